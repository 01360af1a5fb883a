//! Memory with its owners and the events of its last uses.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use super::{Charge, Event, FenceState};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The bytes of an allocation that the host can address.
pub trait HostBytes: Send + Sync {
    /// All of them.
    fn bytes(&self) -> &[u8];
    /// All of them, to write.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// What a backend keeps for one allocation; its `Drop` frees the memory.
pub trait Storage: Any + Send + Sync {
    /// The bytes, where the host can address them.
    fn host(&self) -> Option<&RwLock<Box<dyn HostBytes>>> {
        None
    }

    /// The address on the device, where it has one.
    fn address(&self) -> Option<u64> {
        None
    }

    /// Whether it is host memory that is pinned for a device's copies. What was asked for as
    /// [`Pinned`](super::MemoryKind::Pinned) and could not be pinned is not, nor is that of software devices, which
    /// have no need of it.
    fn pinned(&self) -> bool {
        false
    }
}

/// Memory of a device and the charge that it stands for: what a stream holds on to while it works.
pub struct Allocation {
    storage: Arc<dyn Storage>,
    bytes: usize,
    charge: Charge,
    abandoned: AtomicBool,
}

impl Allocation {
    /// The backend's own part.
    pub fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    /// The backend's own part as its own type.
    pub fn downcast<T: Storage>(&self) -> Option<&T> {
        (&*self.storage as &dyn Any).downcast_ref()
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device they are of.
    pub fn device(&self) -> DeviceId {
        self.charge.device()
    }

    /// Says that the memory must never be freed, because a device that failed may still use it. Its charge is
    /// given back all the same: it can be had no more, but nobody holds it.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.abandoned.load(Ordering::Relaxed) {
            std::mem::forget(Arc::clone(&self.storage));
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {}", self.bytes, self.device())
    }
}

/// One buffer: its memory, and the events that have to fire before it is written or read by the host again.
#[derive(Debug)]
struct Handle {
    allocation: Arc<Allocation>,
    /// Its bytes of the allocation: all, or those of a part.
    place: Range<usize>,
    uses: Mutex<Vec<Event>>,
}

impl Handle {
    /// The address of its first byte, where the device has one.
    fn address(&self) -> Option<u64> {
        self.allocation.storage.address().map(|start| start + self.place.start as u64)
    }

    fn uses(&self) -> MutexGuard<'_, Vec<Event>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events that have not come true: pending ones, and failed ones, whose bytes are not there.
    fn open_uses(&self) -> Vec<Event> {
        let mut uses = self.uses();
        uses.retain(|event| !matches!(event.state(), FenceState::Done));
        uses.clone()
    }
}

/// Memory that one owner can write. It carries the events of its last uses: the next copy into it waits for
/// them in its stream, and the host sees its bytes only when they have fired.
pub struct BufMut(Arc<Handle>);

impl BufMut {
    /// What a backend's [`allocate`](super::Device::allocate) returns: `storage` stands behind `charge`.
    pub fn new(storage: Box<dyn Storage>, mut charge: Charge) -> BufMut {
        charge.back();
        let bytes = charge.bytes() as usize;
        let allocation =
            Arc::new(Allocation { storage: storage.into(), bytes, charge, abandoned: AtomicBool::new(false) });
        BufMut(Arc::new(Handle { allocation, place: 0..bytes, uses: Mutex::default() }))
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.0.place.len()
    }

    /// The address of its first byte, where the device has one.
    pub fn address(&self) -> Option<u64> {
        self.0.address()
    }

    /// Keeps the first `at` bytes and gives the others as a buffer of their own, with events of its own from now on:
    /// several copies can then fill the parts of one allocation at one time. The allocation lives as long as any part.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it has fewer bytes; it stays whole.
    pub fn split_off(&mut self, at: usize) -> Result<BufMut> {
        if at > self.bytes() {
            return Err(Error::invalid(format!("a buffer of {} bytes cannot be split at {at}", self.bytes())));
        }
        let (Range { start, end }, uses) = (self.0.place.clone(), self.0.open_uses());
        let part = |place: Range<usize>| {
            let (allocation, uses) = (Arc::clone(&self.0.allocation), Mutex::new(uses.clone()));
            BufMut(Arc::new(Handle { allocation, place, uses }))
        };
        let (first, rest) = (part(start..start + at), part(start + at..end));
        *self = first;
        Ok(rest)
    }

    /// Takes back the part that begins where this one ends; it carries the events of both.
    ///
    /// # Errors
    /// `next`, when it is no such part.
    pub fn unsplit(&mut self, next: BufMut) -> Result<(), BufMut> {
        let follows = self.0.place.end == next.0.place.start;
        if !follows || !Arc::ptr_eq(&self.0.allocation, &next.0.allocation) {
            return Err(next);
        }
        let (allocation, place) = (Arc::clone(&self.0.allocation), self.0.place.start..next.0.place.end);
        let mut uses = self.0.open_uses();
        let others = next.0.open_uses().into_iter();
        uses.extend(others.filter(|event| !uses.iter().any(|known| known.is_same(event))).collect::<Vec<_>>());
        self.0 = Arc::new(Handle { allocation, place, uses: Mutex::new(uses) });
        Ok(())
    }

    /// The device they are of.
    pub fn device(&self) -> DeviceId {
        self.0.allocation.device()
    }

    /// The memory itself, for a stream to hold on to.
    pub fn allocation(&self) -> &Arc<Allocation> {
        &self.0.allocation
    }

    /// The events of its uses that have not fired yet, or failed: what is copied on top of a failed copy fails too.
    pub fn pending(&self) -> Vec<Event> {
        self.0.open_uses()
    }

    /// Adds an event that the next use has to wait for: where memory comes in a stream's order, that of its coming.
    pub fn after(&mut self, event: Event) {
        self.0.uses().push(event);
    }

    /// Says that a copy fills it until `event`, which comes after those of all earlier uses and fails with them.
    pub(super) fn written_until(&mut self, event: Event) {
        *self.0.uses() = vec![event];
    }

    /// Where it begins in its allocation.
    pub(super) fn start(&self) -> usize {
        self.0.place.start
    }

    /// Waits until no use is pending.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`. A failed use is over, too: it left unspecified bytes.
    pub fn settle(&mut self, deadline: Duration) -> Result<()> {
        settle(&self.0.open_uses(), deadline)?;
        self.0.uses().clear();
        Ok(())
    }

    /// The bytes, to write: none when the host cannot address them or a use is pending.
    pub fn host_mut(&mut self) -> Option<HostMut<'_>> {
        let lock = self.0.allocation.storage.host()?;
        if !self.0.open_uses().is_empty() {
            return None;
        }
        Some(HostMut(lock.write().unwrap_or_else(PoisonError::into_inner), self.0.place.clone()))
    }

    /// Ends the writing: from now on many can read. The contents are there once what is pending now is done.
    pub fn freeze(self) -> Buf {
        let ready = self.0.open_uses().into();
        Buf { handle: self.0, ready }
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BufMut").field(&self.0.allocation).finish()
    }
}

/// Memory that many can read and nobody can write. Cloning shares it.
#[derive(Clone)]
pub struct Buf {
    handle: Arc<Handle>,
    /// The events after which its contents are there.
    ready: Arc<[Event]>,
}

impl Buf {
    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.handle.place.len()
    }

    /// The address of its first byte, where the device has one.
    pub fn address(&self) -> Option<u64> {
        self.handle.address()
    }

    /// The device they are of.
    pub fn device(&self) -> DeviceId {
        self.handle.allocation.device()
    }

    /// The memory itself, for a stream to hold on to.
    pub fn allocation(&self) -> &Arc<Allocation> {
        &self.handle.allocation
    }

    /// Where it begins in its allocation.
    pub(super) fn start(&self) -> usize {
        self.handle.place.start
    }

    /// The events after which its contents are there, those that have not fired, or failed.
    pub fn ready(&self) -> impl Iterator<Item = &Event> {
        self.ready.iter().filter(|event| !matches!(event.state(), FenceState::Done))
    }

    /// Waits until its contents are there.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when the copy that was to fill it failed.
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        self.ready.iter().try_for_each(|event| event.wait(until.saturating_duration_since(Instant::now())))
    }

    /// The bytes: none when the host cannot address them.
    ///
    /// # Errors
    /// As [`wait`](Buf::wait).
    pub fn host(&self, deadline: Duration) -> Result<Option<HostRef<'_>>> {
        self.wait(deadline)?;
        let lock = self.handle.allocation.storage.host();
        let place = || self.handle.place.clone();
        Ok(lock.map(|lock| HostRef(lock.read().unwrap_or_else(PoisonError::into_inner), place())))
    }

    /// Says that a stream reads it until `event`; whoever writes it next waits for that.
    pub fn used_until(&self, event: Event) {
        let mut uses = self.handle.uses();
        uses.retain(|event| !event.settled());
        uses.push(event);
    }

    /// Waits until no work that was queued uses it.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`.
    pub fn wait_unused(&self, deadline: Duration) -> Result<()> {
        settle(&self.handle.open_uses(), deadline)
    }

    /// Whether this is a clone of `other`, or it of this one.
    pub fn is_same(&self, other: &Buf) -> bool {
        Arc::ptr_eq(&self.handle, &other.handle)
    }

    /// Whether it has other clones, so that it cannot be reclaimed.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.handle) > 1
    }

    /// The buffer to write again, when this is its last clone; it carries what is still pending.
    ///
    /// # Errors
    /// The same buffer when others read it.
    pub fn try_reclaim(self) -> Result<BufMut, Buf> {
        if self.is_shared() {
            return Err(self);
        }
        // A use that failed is over; the contents that it spoilt are given up.
        self.handle.uses().retain(|event| !event.settled());
        Ok(BufMut(self.handle))
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buf").field(&self.handle.allocation).finish()
    }
}

/// Waits until none of `events` is pending, failed ones included.
fn settle(events: &[Event], deadline: Duration) -> Result<()> {
    let until = Instant::now() + deadline;
    events.iter().try_for_each(|event| match event.wait(until.saturating_duration_since(Instant::now())) {
        Err(Error::Failed { .. }) => Ok(()),
        other => other,
    })
}

/// The bytes of a [`Buf`] that the host can address.
pub struct HostRef<'a>(RwLockReadGuard<'a, Box<dyn HostBytes>>, Range<usize>);

impl Deref for HostRef<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes()[self.1.clone()]
    }
}

/// The bytes of a [`BufMut`] that the host can address.
///
/// The parts of one allocation share a lock: while this is held, the others wait.
pub struct HostMut<'a>(RwLockWriteGuard<'a, Box<dyn HostBytes>>, Range<usize>);

impl Deref for HostMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes()[self.1.clone()]
    }
}

impl DerefMut for HostMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0.bytes_mut()[self.1.clone()]
    }
}

impl fmt::Debug for HostRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostRef({} bytes)", self.len())
    }
}

impl fmt::Debug for HostMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMut({} bytes)", self.len())
    }
}
