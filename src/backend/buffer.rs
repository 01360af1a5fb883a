//! Buffers: memory with its owners and the events of its last uses.

#![expect(
    unsafe_code,
    reason = "the host's view of memory rests on the events of its uses, which the compiler cannot see"
)]

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::event::until;
use super::extents::ExtentPart;
use super::{Charge, Event, FenceState, MemoryBlock, Storage};
use crate::device::DeviceId;
use crate::error::{Error, Measured, Result};

/// The number of a buffer's uses from which it is worth checking which of them are complete.
const MANY_USES: usize = 8;

/// The shared state of a buffer: its memory, and the events that must complete before it is written, or read by the host.
#[derive(Debug)]
struct Handle {
    allocation: Arc<MemoryBlock>,
    /// The buffer's byte range in the allocation: all of it, or a part.
    range: Range<usize>,
    uses: Mutex<Vec<Event>>,
}

impl Handle {
    /// The address of the first byte. `None` if the device has no addresses.
    fn address(&self) -> Option<u64> {
        self.allocation.address().map(|start| start + self.range.start as u64)
    }

    fn uses(&self) -> MutexGuard<'_, Vec<Event>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events that are not [`Done`](FenceState::Done): pending events, and failed ones, whose bytes did not arrive.
    fn open_uses(&self) -> Vec<Event> {
        let mut uses = self.uses();
        uses.retain(|event| !matches!(event.state(), FenceState::Done));
        uses.clone()
    }
}

/// Memory that one owner can write. It carries the events of its last uses: the next copy into it waits for them in its
/// stream, and the host can access its bytes only once they are complete.
pub struct BufMut(Arc<Handle>);

impl BufMut {
    /// Creates a buffer for a backend's [`allocate`](super::Device::allocate): `storage` holds the bytes of `charge`.
    ///
    /// # Errors
    /// [`Error::Bug`] when `storage` has fewer bytes than are charged.
    pub fn new(storage: Box<dyn Storage>, charge: Charge) -> Result<BufMut> {
        let allocation = Arc::new(MemoryBlock::new(storage, charge)?);
        let (range, uses) = (0..allocation.bytes(), Mutex::default());
        Ok(BufMut(Arc::new(Handle { allocation, range, uses })))
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.range.len()
    }

    /// The properties that a substitute buffer must share: size, device and start.
    pub(crate) fn shape(&self) -> (usize, DeviceId, usize) {
        (self.bytes(), self.device(), self.start())
    }

    /// The address of the first byte. `None` if the device has no addresses.
    pub fn address(&self) -> Option<u64> {
        self.0.address()
    }

    /// Whether it is memory that its owner locks for each access.
    pub(crate) fn is_locked(&self) -> bool {
        self.0.allocation.is_locked()
    }

    /// Keeps the first `at` bytes and returns the others as a separate buffer. From then on each part has its own events, so
    /// several copies can fill the parts of one allocation concurrently. The allocation lives as long as any part.
    ///
    /// # Errors
    /// [`Error::WrongSize`] when the buffer has fewer bytes; it then stays whole.
    pub fn split_off(&mut self, at: usize) -> Result<BufMut> {
        if at > self.bytes() {
            return Err(Error::WrongSize { what: Measured::Split, needed: at as u64, given: self.bytes() as u64 });
        }
        let (Range { start, end }, uses) = (self.0.range.clone(), self.0.open_uses());
        let part = |range: Range<usize>| {
            let (allocation, uses) = (Arc::clone(&self.0.allocation), Mutex::new(uses.clone()));
            BufMut(Arc::new(Handle { allocation, range, uses }))
        };
        let (first, rest) = (part(start..start + at), part(start + at..end));
        *self = first;
        Ok(rest)
    }

    /// Joins the part that begins where this one ends. The joined buffer carries the events of both.
    ///
    /// # Errors
    /// Returns `next` if it is not that part.
    pub fn unsplit(&mut self, next: BufMut) -> Result<(), BufMut> {
        let follows = self.0.range.end == next.0.range.start;
        if !follows || !Arc::ptr_eq(&self.0.allocation, &next.0.allocation) {
            return Err(next);
        }
        let (allocation, range) = (Arc::clone(&self.0.allocation), self.0.range.start..next.0.range.end);
        let mut uses = self.0.open_uses();
        let others = next.0.open_uses().into_iter();
        uses.extend(others.filter(|event| !uses.iter().any(|known| known.is_same(event))).collect::<Vec<_>>());
        self.0 = Arc::new(Handle { allocation, range, uses: Mutex::new(uses) });
        Ok(())
    }

    /// The device that the memory belongs to.
    pub fn device(&self) -> DeviceId {
        self.0.allocation.device()
    }

    /// The underlying allocation, for a stream to keep alive.
    pub fn block(&self) -> &Arc<MemoryBlock> {
        &self.0.allocation
    }

    /// The events of the buffer's uses that are pending or failed: a copy into it after a failed copy fails too.
    pub fn pending(&self) -> Vec<Event> {
        self.0.open_uses()
    }

    /// The events of the buffer's uses, complete ones included. Queries no backend.
    pub(super) fn uses(&self) -> Vec<Event> {
        self.0.uses().clone()
    }

    /// Adds an event that the next use must wait for. An example is stream-ordered memory: it becomes available at an event.
    pub fn after(&mut self, event: Event) {
        self.0.uses().push(event);
    }

    /// Marks the buffer as written by a copy until `event`, which completes after the events of all earlier uses and fails
    /// if they fail. It replaces them.
    pub(super) fn written_until(&mut self, event: Event) {
        *self.0.uses() = vec![event];
    }

    /// The buffer's offset in its allocation.
    pub(super) fn start(&self) -> usize {
        self.0.range.start
    }

    /// Waits until no use is pending.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when a device that uses the buffer was lost: that device may
    /// still write to it, and the buffer stays as it is. Any other failed use counts as complete; it left unspecified bytes.
    pub fn wait_unused(&mut self, deadline: Duration) -> Result<()> {
        let until = until(deadline);
        for event in self.0.open_uses() {
            let outcome = event.wait(until.saturating_duration_since(Instant::now()));
            outcome.or_else(|error| if event.is_over() { Ok(()) } else { Err(error) })?;
        }
        self.0.uses().clear();
        Ok(())
    }

    /// The bytes, for writing. `None` if the host cannot address them, a use is pending or failed, or this process is a fork
    /// of the one that allocated them.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        if !self.0.open_uses().is_empty() || !self.0.allocation.process().is_current() {
            return None;
        }
        // SAFETY: the range belongs to this buffer alone, and the buffer is borrowed for as long as the slice. All queued
        // reads and writes of it are complete, and queueing more takes the buffer.
        unsafe { self.0.allocation.slice_mut(self.0.range.clone()) }
    }

    /// Runs `work` on the bytes, for writing; also on memory that the library shares with a framework, which is locked
    /// meanwhile and has no slice otherwise. `None` as for [`host_mut`](BufMut::host_mut).
    ///
    /// # Errors
    /// When shared memory is not there any more.
    pub fn write_with<T>(&mut self, work: impl FnOnce(&mut [u8]) -> T) -> Result<Option<T>> {
        if !self.0.open_uses().is_empty() || !self.0.allocation.process().is_current() {
            return Ok(None);
        }
        // SAFETY: as in `host_mut`; the buffer stays borrowed until this returns.
        unsafe { self.0.allocation.write_with(self.0.range.clone(), work) }
    }

    /// Ends writing: from now on many can read. The contents are available once the events pending now are complete.
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
    /// The events after which the contents are available.
    ready: Arc<[Event]>,
}

impl Buf {
    /// Memory that holds bytes already, and takes nothing of its device's memory: `charge` is empty.
    pub(super) fn uncharged(storage: Box<dyn Storage>, charge: Charge) -> Buf {
        let allocation = Arc::new(MemoryBlock::uncharged(storage, charge));
        let (range, uses) = (0..allocation.bytes(), Mutex::default());
        Buf { handle: Arc::new(Handle { allocation, range, uses }), ready: Arc::new([]) }
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.handle.range.len()
    }

    /// The address of the first byte. `None` if the device has no addresses.
    pub fn address(&self) -> Option<u64> {
        self.handle.address()
    }

    /// The device that the memory belongs to.
    pub fn device(&self) -> DeviceId {
        self.handle.allocation.device()
    }

    /// The underlying allocation, for a stream to keep alive.
    pub fn block(&self) -> &Arc<MemoryBlock> {
        &self.handle.allocation
    }

    /// The buffer's offset in its allocation.
    pub(crate) fn start(&self) -> usize {
        self.handle.range.start
    }

    /// What bytes that stay [elsewhere](super::Device::read_only) are read from.
    /// `None` for other memory, and for bytes that the host keeps by now.
    pub(crate) fn extents(&self, range: &Range<usize>) -> Option<Vec<ExtentPart<'_>>> {
        let start = self.start();
        self.handle.allocation.extents(start + range.start..start + range.end)
    }

    /// The events after which the contents are available, complete ones included. Queries no backend.
    pub(crate) fn filled_by(&self) -> &[Event] {
        &self.ready
    }

    /// The events after which the contents are available, as far as they are pending or failed.
    pub fn ready(&self) -> impl Iterator<Item = &Event> {
        self.ready.iter().filter(|event| !matches!(event.state(), FenceState::Done))
    }

    /// Waits until the contents are available.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when the copy that fills the buffer failed.
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        let until = until(deadline);
        self.ready.iter().try_for_each(|event| event.wait(until.saturating_duration_since(Instant::now())))
    }

    /// Waits for the contents and returns the bytes. `None` if the host cannot address them, or shares them with a framework
    /// that locks them for each access ([`read_with`](Buf::read_with)).
    ///
    /// # Errors
    /// As [`wait`](Buf::wait); [`Error::Forked`] in a fork of the process that allocated them.
    pub fn host(&self, deadline: Duration) -> Result<Option<&[u8]>> {
        self.handle.allocation.process().check()?;
        self.wait(deadline)?;
        // SAFETY: the copy that fills the range is complete. The range is not written again before this buffer, which is
        // borrowed for as long as the slice, and all its clones are dropped.
        Ok(unsafe { self.handle.allocation.slice(self.handle.range.clone()) })
    }

    /// Waits for the contents and runs `work` on the bytes; also on memory that the library shares with a framework, which is
    /// locked meanwhile and has no slice otherwise. `None` if the host cannot address them.
    ///
    /// # Errors
    /// As [`host`](Buf::host); also when shared memory is not there any more.
    pub fn read_with<T>(&self, deadline: Duration, work: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        self.handle.allocation.process().check()?;
        self.wait(deadline)?;
        // SAFETY: as in `host`; the buffer stays borrowed until this returns.
        unsafe { self.handle.allocation.read_with(self.handle.range.clone(), work) }
    }

    /// Waits for the contents and copies a range of them to host memory. `false` if the host cannot read them without a stream.
    ///
    /// # Errors
    /// As [`read_with`](Buf::read_with), and as reading what stays [elsewhere](super::Device::read_only).
    pub(crate) fn read_into(&self, range: Range<usize>, dst: &mut [u8], deadline: Duration) -> Result<bool> {
        self.handle.allocation.process().check()?;
        self.wait(deadline)?;
        match self.handle.allocation.read_elsewhere(self.start() + range.start, dst) {
            Some(read) => read.map(|()| true),
            None => Ok(self.read_with(deadline, |bytes| dst.copy_from_slice(&bytes[range]))?.is_some()),
        }
    }

    /// Marks the buffer as read by a stream until `event`. The next write waits for that event.
    pub fn used_until(&self, event: Event) {
        let mut uses = self.handle.uses();
        if uses.len() >= MANY_USES {
            // The oldest events complete first, so the scan stops at the first that is not over.
            let over = uses.iter().take_while(|event| event.is_over()).count();
            uses.drain(..over);
            // An event that stays, such as a lost device's, blocks that scan, so all events are checked now and then.
            if over == 0 && uses.len().is_power_of_two() {
                uses.retain(|event| !event.is_over());
            }
        }
        uses.push(event);
    }

    /// Waits until no queued work uses the buffer. Work of a lost device is not waited for.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`.
    pub fn wait_unused(&self, deadline: Duration) -> Result<()> {
        let until = until(deadline);
        let wait = |event: Event| match event.wait(until.saturating_duration_since(Instant::now())) {
            Err(Error::Failed { .. }) => Ok(()),
            other => other,
        };
        self.handle.open_uses().into_iter().try_for_each(wait)
    }

    /// Whether this and `other` are clones of the same buffer.
    pub fn is_same(&self, other: &Buf) -> bool {
        Arc::ptr_eq(&self.handle, &other.handle)
    }

    /// Whether other clones exist, so that the buffer cannot be reclaimed.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.handle) > 1
    }

    /// Makes the buffer writable again, if this is its last clone. It carries the events that are still pending, and those of
    /// a lost device.
    ///
    /// # Errors
    /// Returns the same buffer while other clones exist.
    pub fn try_reclaim(mut self) -> Result<BufMut, Buf> {
        // The reference count alone is not enough: the reads of other owners must happen before the writes that follow.
        if Arc::get_mut(&mut self.handle).is_none() {
            return Err(self);
        }
        // A failed use is complete; the contents that it spoilt are discarded.
        self.handle.uses().retain(|event| !event.is_over());
        Ok(BufMut(self.handle))
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buf").field(&self.handle.allocation).finish()
    }
}
