//! Memory with its owners and the events of its last uses.

#![expect(
    unsafe_code,
    reason = "the host's view of memory rests on the events of its uses, which the compiler cannot see"
)]

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::event::until;
use super::{Charge, Event, FenceState, MemoryBlock, Storage};
use crate::device::DeviceId;
use crate::error::{Error, Measured, Result};

/// From how many uses of a buffer on it is worth asking which of them are over.
const MANY_USES: usize = 8;

/// One buffer: its memory, and the events that have to fire before it is written or read by the host again.
#[derive(Debug)]
struct Handle {
    allocation: Arc<MemoryBlock>,
    /// Its bytes of the allocation: all, or those of a part.
    place: Range<usize>,
    uses: Mutex<Vec<Event>>,
}

impl Handle {
    /// The address of its first byte, where the device has one.
    fn address(&self) -> Option<u64> {
        self.allocation.address().map(|start| start + self.place.start as u64)
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
    ///
    /// # Errors
    /// [`Error::Bug`] when there are fewer bytes than are charged.
    pub fn new(storage: Box<dyn Storage>, charge: Charge) -> Result<BufMut> {
        let allocation = Arc::new(MemoryBlock::new(storage, charge)?);
        let (place, uses) = (0..allocation.bytes(), Mutex::default());
        Ok(BufMut(Arc::new(Handle { allocation, place, uses })))
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.0.place.len()
    }

    /// What tells it from buffers that cannot take its place: its size, its device and where it begins.
    pub(crate) fn shape(&self) -> (usize, DeviceId, usize) {
        (self.bytes(), self.device(), self.start())
    }

    /// The address of its first byte, where the device has one.
    pub fn address(&self) -> Option<u64> {
        self.0.address()
    }

    /// Keeps the first `at` bytes and gives the others as a buffer of their own, with events of its own from now on:
    /// several copies can then fill the parts of one allocation at one time. The allocation lives as long as any part.
    ///
    /// # Errors
    /// [`Error::WrongSize`] when it has fewer bytes; it stays whole.
    pub fn split_off(&mut self, at: usize) -> Result<BufMut> {
        if at > self.bytes() {
            return Err(Error::WrongSize { what: Measured::Split, needed: at as u64, given: self.bytes() as u64 });
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
    pub fn block(&self) -> &Arc<MemoryBlock> {
        &self.0.allocation
    }

    /// The events of its uses that have not fired yet, or failed: what is copied on top of a failed copy fails too.
    pub fn pending(&self) -> Vec<Event> {
        self.0.open_uses()
    }

    /// The events of its uses, those that may have fired among them: nobody is asked.
    pub(super) fn uses(&self) -> Vec<Event> {
        self.0.uses().clone()
    }

    /// Adds an event that the next use has to wait for: where memory comes in a stream's order, that of its coming.
    pub fn after(&mut self, event: Event) {
        self.0.uses().push(event);
    }

    /// Says that a copy fills it until `event`, which comes after those of all earlier uses and fails with them: it
    /// stands for them all from now on.
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
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when a device that uses it was lost: it may be written still,
    /// and stays as it is. Another failed use is over: it left unspecified bytes.
    pub fn wait_unused(&mut self, deadline: Duration) -> Result<()> {
        let until = until(deadline);
        for event in self.0.open_uses() {
            let outcome = event.wait(until.saturating_duration_since(Instant::now()));
            outcome.or_else(|error| if event.is_over() { Ok(()) } else { Err(error) })?;
        }
        self.0.uses().clear();
        Ok(())
    }

    /// The bytes, to write: none when the host cannot address them, a use is pending or failed, or this process is a fork
    /// of the one that allocated them.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        if !self.0.open_uses().is_empty() || !self.0.allocation.process().is_current() {
            return None;
        }
        // SAFETY: the place is this buffer's alone, and the buffer is borrowed for as long as the slice. What was queued to
        // read or write it is over, and queueing more takes the buffer.
        unsafe { self.0.allocation.slice_mut(self.0.place.clone()) }
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
    pub fn block(&self) -> &Arc<MemoryBlock> {
        &self.handle.allocation
    }

    /// Where it begins in its allocation.
    pub(super) fn start(&self) -> usize {
        self.handle.place.start
    }

    /// The events after which its contents are there, those that have fired among them: nobody is asked.
    pub(crate) fn filled_by(&self) -> &[Event] {
        &self.ready
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
        let until = until(deadline);
        self.ready.iter().try_for_each(|event| event.wait(until.saturating_duration_since(Instant::now())))
    }

    /// The bytes: none when the host cannot address them.
    ///
    /// # Errors
    /// As [`wait`](Buf::wait); [`Error::Forked`] in a fork of the process that allocated them.
    pub fn host(&self, deadline: Duration) -> Result<Option<&[u8]>> {
        self.handle.allocation.process().check()?;
        self.wait(deadline)?;
        // SAFETY: what fills the place is over. Nobody writes it again before this buffer, which is borrowed for as long as
        // the slice, and all its clones are gone.
        Ok(unsafe { self.handle.allocation.slice(self.handle.place.clone()) })
    }

    /// Says that a stream reads it until `event`; whoever writes it next waits for that.
    pub fn used_until(&self, event: Event) {
        let mut uses = self.handle.uses();
        if uses.len() >= MANY_USES {
            // The oldest are over first; of those that are not, one is asked for and no more.
            let over = uses.iter().take_while(|event| event.is_over()).count();
            uses.drain(..over);
            // Behind one that stays, as a lost device's does, all are asked for now and then.
            if over == 0 && uses.len().is_power_of_two() {
                uses.retain(|event| !event.is_over());
            }
        }
        uses.push(event);
    }

    /// Waits until no work that was queued uses it, as far as that can be waited for: a lost device's cannot.
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

    /// Whether this is a clone of `other`, or it of this one.
    pub fn is_same(&self, other: &Buf) -> bool {
        Arc::ptr_eq(&self.handle, &other.handle)
    }

    /// Whether it has other clones, so that it cannot be reclaimed.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.handle) > 1
    }

    /// The buffer to write again, when this is its last clone; it carries what is still pending, and what a lost device may
    /// still do.
    ///
    /// # Errors
    /// The same buffer when others read it.
    pub fn try_reclaim(mut self) -> Result<BufMut, Buf> {
        // Not a look at the count alone: what other owners read before they let go has to be before what is written now.
        if Arc::get_mut(&mut self.handle).is_none() {
            return Err(self);
        }
        // A use that failed is over; the contents that it spoilt are given up.
        self.handle.uses().retain(|event| !event.is_over());
        Ok(BufMut(self.handle))
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buf").field(&self.handle.allocation).finish()
    }
}
