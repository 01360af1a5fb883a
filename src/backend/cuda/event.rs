//! Events of the driver as fences.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::calls::EventHandle;
use super::context::{Context, Refusal};
use super::stream::RawStream;
use crate::backend::{Event, Fence, FenceState};
use crate::error::Error;

/// How long a wait asks again and again before it sleeps between questions.
const EAGER: Duration = Duration::from_micros(30);

/// The longest sleep between two questions.
const PATIENT: Duration = Duration::from_micros(500);

/// An event that is recorded once.
pub(super) struct CudaFence {
    event: EventHandle,
    context: Arc<Context>,
    /// What the stream waited for that this device knows nothing of: another device's events. That device may fail and its
    /// event come true all the same.
    /// Let go of when all is over: each may have others of its own.
    others: Mutex<Vec<Event>>,
    /// The stream that refused to record it, for now.
    unrecorded: Mutex<Option<Arc<RawStream>>>,
    /// Recording it was refused, for a reason of its own perhaps: it is not used again.
    refused: AtomicBool,
    ended: OnceLock<Result<(), Ended>>,
}

/// How work failed.
enum Ended {
    /// It is over; what it waited for failed.
    Failed(Arc<Error>),
    Lost(Arc<Error>),
}

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for CudaFence {}
// SAFETY: as above.
unsafe impl Sync for CudaFence {}

impl CudaFence {
    /// An event that is not recorded yet. One that never is may be dropped.
    pub(super) fn new(context: &Arc<Context>, others: Vec<Event>) -> Result<CudaFence, Refusal> {
        let (unrecorded, ended) = (Mutex::default(), OnceLock::new());
        let (event, others) = (context.event()?, Mutex::new(others));
        let refused = AtomicBool::new(false);
        Ok(CudaFence { event, context: Arc::clone(context), others, unrecorded, refused, ended })
    }

    /// Records it after all work of `stream` so far.
    pub(super) fn record(&self, stream: &RawStream) -> Result<(), Refusal> {
        // SAFETY: both handles are alive: the event is this fence's, the stream the caller's.
        let recorded = self.context.raw(|calls| unsafe { calls.event_record(self.event, stream.handle()) });
        self.refused.store(recorded.is_err(), Ordering::Relaxed);
        recorded
    }

    /// Has it recorded when that is next asked for, since `stream` cannot record it now.
    pub(super) fn record_later(&self, stream: &Arc<RawStream>) {
        *lock(&self.unrecorded) = Some(Arc::clone(stream));
    }

    /// The handle, for another stream to wait for; none before it is recorded.
    pub(super) fn handle(&self) -> Option<EventHandle> {
        lock(&self.unrecorded).is_none().then_some(self.event)
    }

    /// Whether it is of another device than `context`.
    pub(super) fn is_of_another(&self, context: &Context) -> bool {
        self.context.handle() != context.handle()
    }

    /// Whether it can come true, for a stream of `context` that waits for it on the device, and yet have failed.
    pub(super) fn can_mislead(&self, context: &Context) -> bool {
        let failed = || matches!(self.ended.get(), Some(Err(_)));
        self.is_of_another(context) || !lock(&self.others).is_empty() || failed()
    }

    /// Asks the driver.
    fn ask(&self) -> FenceState {
        let mut unrecorded = lock(&self.unrecorded);
        if let Some(stream) = &*unrecorded {
            if !stream.is_of_this_thread() {
                return FenceState::Pending;
            }
            let again = |refusal: Refusal| if refusal.goes_on() { Err(refusal) } else { self.record(stream) };
            match self.record(stream).or_else(again) {
                Ok(()) => *unrecorded = None,
                Err(refusal) if refusal.is_of_captures() => return FenceState::Pending,
                Err(refusal) => return self.lost(refusal),
            }
        }
        drop(unrecorded);
        match self.query().or_else(|refusal| if refusal.goes_on() { Err(refusal) } else { self.query() }) {
            Ok(()) => self.done(),
            Err(refusal) if refusal.goes_on() => FenceState::Pending,
            // Twice: it is not a passing refusal.
            Err(refusal) => self.lost(refusal),
        }
    }

    fn query(&self) -> Result<(), Refusal> {
        // SAFETY: this fence lets go of the event in its drop and not before.
        self.context.raw(|calls| unsafe { calls.event_query(self.event) })
    }

    /// The device is done; it is as well as what its stream waited for elsewhere.
    fn done(&self) -> FenceState {
        self.ask_oldest();
        let mut failed = None;
        for other in lock(&self.others).iter() {
            match other.state() {
                FenceState::Done => {}
                FenceState::Pending => return FenceState::Pending,
                // The stream went on regardless, and this work is over.
                FenceState::Failed(cause) | FenceState::Lost(cause) => failed = Some(cause),
            }
        }
        self.end(failed.map_or(Ok(()), |cause| Err(Ended::Failed(cause))))
    }

    fn end(&self, how: Result<(), Ended>) -> FenceState {
        let _ = self.ended.set(how);
        let others = std::mem::take(&mut *lock(&self.others));
        drop(others);
        self.state()
    }

    /// Asks those that others of these wait for first, in place of each asking the next: as many may be in a row as copies
    /// are under way.
    fn ask_oldest(&self) {
        let open = |fence: &CudaFence| -> Vec<Event> {
            let is_open =
                |event: &&Event| event.downcast::<CudaFence>().is_some_and(|fence| fence.ended.get().is_none());
            lock(&fence.others).iter().filter(is_open).cloned().collect()
        };
        let (mut seen, mut row) = (HashSet::new(), open(self));
        while let Some(event) = row.last() {
            let deeper = match event.downcast::<CudaFence>() {
                Some(fence) if seen.insert(event.key()) => open(fence),
                _ => Vec::new(),
            };
            if deeper.is_empty() {
                row.pop().iter().for_each(|event| drop(event.state()));
            } else {
                row.extend(deeper);
            }
        }
    }

    /// An event of one's own that cannot be asked for is gone, with its context: reset by someone else, for example.
    fn lost(&self, refusal: Refusal) -> FenceState {
        let error = match self.context.error(refusal) {
            error @ (Error::DeviceLost { .. } | Error::Forked { .. }) => error,
            error => self.context.lose(&error),
        };
        self.end(Err(Ended::Lost(Arc::new(error))))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one assignment, so a poisoned lock still guards what was there.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: the driver says that an event has fired when all work before it is done. A context that was lost or is gone tells
// nothing, and neither does this.
unsafe impl Fence for CudaFence {
    fn state(&self) -> FenceState {
        match self.ended.get() {
            None => self.ask(),
            Some(Ok(())) => FenceState::Done,
            Some(Err(Ended::Failed(cause))) => FenceState::Failed(Arc::clone(cause)),
            Some(Err(Ended::Lost(cause))) => FenceState::Lost(Arc::clone(cause)),
        }
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        let (start, mut sleep) = (Instant::now(), Duration::from_micros(20));
        loop {
            let state = self.state();
            let waited = start.elapsed();
            if !matches!(state, FenceState::Pending) || waited >= deadline {
                return state;
            }
            if waited < EAGER {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(sleep.min(deadline - waited));
                sleep = (sleep * 2).min(PATIENT);
            }
        }
    }
}

impl Drop for CudaFence {
    fn drop(&mut self) {
        match self.refused.get_mut() {
            true => self.context.destroy(self.event),
            false => self.context.recycle(self.event),
        }
    }
}
