//! Events of the driver as fences.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::context::{Context, Refusal};
use super::stream::RawStream;
use super::verbs::EventHandle;
use crate::backend::{Event, Fence, FenceState};
use crate::error::Error;

/// How long a wait spins before it sleeps between queries.
const SPIN: Duration = Duration::from_micros(30);

/// The longest sleep between two queries.
const LONGEST_SLEEP: Duration = Duration::from_micros(500);

/// An event that is recorded once.
pub(super) struct DriverFence {
    event: EventHandle,
    context: Arc<Context>,
    /// The events of other devices that the stream waited for. Such a device may fail although its event completes.
    /// Dropped once all are complete, since each may hold further events.
    others: Mutex<Vec<Event>>,
    /// The stream that refuses to record the event for now.
    unrecorded: Mutex<Option<Arc<RawStream>>>,
    /// Recording was refused, perhaps because of the event itself: it is not recycled.
    refused: AtomicBool,
    outcome: OnceLock<Result<(), Failure>>,
}

/// A failure of work.
enum Failure {
    /// The work is complete, but an event that it waited for failed.
    Failed(Arc<Error>),
    Lost(Arc<Error>),
}

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for DriverFence {}
// SAFETY: as above.
unsafe impl Sync for DriverFence {}

impl DriverFence {
    /// A fence that is not recorded yet. It may be dropped without being recorded.
    pub(super) fn new(context: &Arc<Context>, others: Vec<Event>) -> Result<DriverFence, Refusal> {
        let (unrecorded, outcome) = (Mutex::default(), OnceLock::new());
        let (event, others) = (context.event()?, Mutex::new(others));
        let refused = AtomicBool::new(false);
        Ok(DriverFence { event, context: Arc::clone(context), others, unrecorded, refused, outcome })
    }

    /// Records the event after all work of `stream` so far.
    pub(super) fn record(&self, stream: &RawStream) -> Result<(), Refusal> {
        // SAFETY: both handles are alive: the event is this fence's, the stream the caller's.
        let recorded = self.context.raw(|verbs| unsafe { verbs.event_record(self.event, stream.handle()) });
        self.refused.store(recorded.is_err(), Ordering::Relaxed);
        recorded
    }

    /// Records the event at its next query, since `stream` cannot record it now.
    pub(super) fn record_later(&self, stream: &Arc<RawStream>) {
        *lock(&self.unrecorded) = Some(Arc::clone(stream));
    }

    /// The handle, for another stream to wait for. `None` until the event is recorded.
    pub(super) fn handle(&self) -> Option<EventHandle> {
        lock(&self.unrecorded).is_none().then_some(self.event)
    }

    /// Whether a stream of `context` can wait for the event on the device.
    pub(super) fn is_awaited_by(&self, context: &Context) -> bool {
        let driver = context.driver();
        driver.is(self.context.driver()) && (driver.rules.waits_across || self.context.is(context))
    }

    /// Whether the event belongs to another device than `context`.
    pub(super) fn is_of_another(&self, context: &Context) -> bool {
        !self.context.is(context)
    }

    /// Whether a stream of `context` that waits for the event on the device can go on although the work failed.
    pub(super) fn can_mislead(&self, context: &Context) -> bool {
        let failed = || matches!(self.outcome.get(), Some(Err(_)));
        self.is_of_another(context) || !lock(&self.others).is_empty() || failed()
    }

    /// Queries the driver.
    fn query(&self) -> FenceState {
        let mut unrecorded = lock(&self.unrecorded);
        if let Some(stream) = &*unrecorded {
            if !stream.is_of_this_thread() {
                return FenceState::Pending;
            }
            let again = |refusal: Refusal| if refusal.may_be_pending() { Err(refusal) } else { self.record(stream) };
            match self.record(stream).or_else(again) {
                Ok(()) => *unrecorded = None,
                Err(refusal) if refusal.is_of_captures() => return FenceState::Pending,
                Err(refusal) => return self.lost(refusal),
            }
        }
        drop(unrecorded);
        match self.raw_query().or_else(|refusal| if refusal.may_be_pending() { Err(refusal) } else { self.raw_query() })
        {
            Ok(()) => self.done(),
            Err(refusal) if refusal.may_be_pending() => FenceState::Pending,
            // Refused twice, so it is not transient.
            Err(refusal) => self.lost(refusal),
        }
    }

    fn raw_query(&self) -> Result<(), Refusal> {
        // SAFETY: the fence releases the event in its drop and not before.
        self.context.raw(|verbs| unsafe { verbs.event_query(self.event) })
    }

    /// The state once the device is done: that of the events of other devices that the stream waited for.
    fn done(&self) -> FenceState {
        self.query_oldest();
        let mut failed = None;
        for other in lock(&self.others).iter() {
            match other.state() {
                FenceState::Done => {}
                FenceState::Pending => return FenceState::Pending,
                // The stream went on regardless, and this work is complete.
                FenceState::Failed(cause) | FenceState::Lost(cause) => failed = Some(cause),
            }
        }
        self.end(failed.map_or(Ok(()), |cause| Err(Failure::Failed(cause))))
    }

    fn end(&self, outcome: Result<(), Failure>) -> FenceState {
        let _ = self.outcome.set(outcome);
        let others = std::mem::take(&mut *lock(&self.others));
        drop(others);
        self.state()
    }

    /// Queries the events at the end of the chain first, instead of recursing: a chain may have as many events as there are
    /// copies in flight.
    fn query_oldest(&self) {
        let open = |fence: &DriverFence| -> Vec<Event> {
            let is_open =
                |event: &&Event| event.downcast::<DriverFence>().is_some_and(|fence| fence.outcome.get().is_none());
            lock(&fence.others).iter().filter(is_open).cloned().collect()
        };
        let (mut seen, mut stack) = (HashSet::new(), open(self));
        while let Some(event) = stack.last() {
            let deeper = match event.downcast::<DriverFence>() {
                Some(fence) if seen.insert(event.key()) => open(fence),
                _ => Vec::new(),
            };
            if deeper.is_empty() {
                stack.pop().iter().for_each(|event| drop(event.state()));
            } else {
                stack.extend(deeper);
            }
        }
    }

    /// The state if the fence's own event cannot be queried: it is gone with its context, for example after a reset by
    /// someone else.
    fn lost(&self, refusal: Refusal) -> FenceState {
        let error = match self.context.error(refusal) {
            error @ (Error::DeviceLost { .. } | Error::Forked { .. }) => error,
            error => self.context.lose(&error),
        };
        self.end(Err(Failure::Lost(Arc::new(error))))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one assignment, so a poisoned lock still guards a valid value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: the driver reports an event as complete when all work before it is done. A lost or destroyed context reports
// nothing, and the fence is then lost.
unsafe impl Fence for DriverFence {
    fn state(&self) -> FenceState {
        match self.outcome.get() {
            None => self.query(),
            Some(Ok(())) => FenceState::Done,
            Some(Err(Failure::Failed(cause))) => FenceState::Failed(Arc::clone(cause)),
            Some(Err(Failure::Lost(cause))) => FenceState::Lost(Arc::clone(cause)),
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
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(sleep.min(deadline - waited));
                sleep = (sleep * 2).min(LONGEST_SLEEP);
            }
        }
    }
}

impl Drop for DriverFence {
    fn drop(&mut self) {
        match self.refused.get_mut() {
            true => self.context.destroy(self.event),
            false => self.context.recycle(self.event),
        }
    }
}
