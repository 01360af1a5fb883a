//! The fences of software streams, and the failures that they tell.

#![expect(unsafe_code, reason = "who waits for a fence relies on the end of the work before it")]

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::timeline::Timeline;
use crate::backend::event::until;
use crate::backend::process::Process;
use crate::backend::watcher::wake_all;
use crate::backend::{Event, Fence, FenceState};
use crate::device::DeviceId;
use crate::error::Error;

/// Completes a fence, as failed if the work was dropped.
pub(super) struct FenceCompleter(pub(super) Arc<ThreadFence>);

impl Drop for FenceCompleter {
    fn drop(&mut self) {
        if lock(&self.0.outcome).is_none() {
            let why = "the work was given up".to_owned();
            let cause = Arc::new(Error::DeviceLost { device: self.0.device, why });
            self.0.complete(Err(Failure { cause, over: false }));
        }
    }
}

/// A failure of work.
#[derive(Clone)]
pub(super) struct Failure {
    cause: Arc<Error>,
    /// Whether none of the events that it waited for is still using its memory.
    over: bool,
}

impl Failure {
    pub(super) fn over(cause: Error) -> Failure {
        Failure { cause: Arc::new(cause), over: true }
    }

    /// The failure of work that waited for `events`, one of which failed.
    pub(super) fn of(events: &[Event], cause: Arc<Error>) -> Failure {
        Failure { cause, over: events.iter().all(Event::is_over) }
    }

    /// The failure of work that waited for all of these: the first, and over only if all of them are.
    pub(super) fn first(failures: Vec<Failure>) -> Option<Failure> {
        let over = failures.iter().all(|failure| failure.over);
        failures.into_iter().next().map(|Failure { cause, .. }| Failure { cause, over })
    }

    fn state(&self) -> FenceState {
        let cause = Arc::clone(&self.cause);
        if self.over { FenceState::Failed(cause) } else { FenceState::Lost(cause) }
    }
}

/// The fence of a stream with a thread.
pub(super) struct ThreadFence {
    device: DeviceId,
    /// The process of the stream's thread.
    process: Process,
    /// The time at which the work ended on the stream's timeline, or its failure. `None` while it is pending.
    outcome: Mutex<Option<Result<Duration, Failure>>>,
    completed: Condvar,
    /// The wakers of tasks that wait for completion.
    wakers: Mutex<Vec<Waker>>,
    /// Whether there is a timeline.
    paced: bool,
}

impl ThreadFence {
    pub(super) fn new(device: DeviceId, paced: bool) -> ThreadFence {
        ThreadFence {
            device,
            process: Process::current(),
            outcome: Mutex::default(),
            completed: Condvar::new(),
            wakers: Mutex::default(),
            paced,
        }
    }

    pub(super) fn complete(&self, outcome: Result<Duration, Failure>) {
        *lock(&self.outcome) = Some(outcome);
        self.completed.notify_all();
        self.wake_tasks();
    }

    fn wake_tasks(&self) {
        let wakers = std::mem::take(&mut *lock(&self.wakers));
        wake_all(wakers);
    }

    fn state_of(&self, outcome: &Option<Result<Duration, Failure>>) -> FenceState {
        match outcome {
            // In a fork the thread that would complete the work does not exist.
            None => {
                self.process.check().map_or_else(|error| FenceState::Lost(Arc::new(error)), |()| FenceState::Pending)
            }
            Some(Ok(_)) => FenceState::Done,
            Some(Err(failure)) => failure.state(),
        }
    }
}

// SAFETY: the outcome is set once, after the stream's thread has ended the work.
unsafe impl Fence for ThreadFence {
    fn state(&self) -> FenceState {
        self.state_of(&lock(&self.outcome))
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        let until = until(deadline);
        let mut outcome = lock(&self.outcome);
        while matches!(self.state_of(&outcome), FenceState::Pending) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            outcome = self.completed.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.state_of(&outcome)
    }

    fn wake(&self, waker: &Waker) -> bool {
        lock(&self.wakers).push(waker.clone());
        if lock(&self.outcome).is_some() {
            self.wake_tasks();
        }
        true
    }

    fn time(&self) -> Option<Duration> {
        let outcome = lock(&self.outcome);
        outcome.as_ref().and_then(|outcome| outcome.as_ref().ok()).copied().filter(|_| self.paced)
    }
}

/// The fence of a virtual stream: a time.
pub(super) struct VirtualFence {
    pub(super) at: Duration,
    /// The failure of the work, known from the start.
    pub(super) failed: Option<Failure>,
    pub(super) timeline: Arc<Timeline>,
}

// SAFETY: the work was complete before the fence was created.
unsafe impl Fence for VirtualFence {
    fn state(&self) -> FenceState {
        match &self.failed {
            _ if self.at > self.timeline.now() => FenceState::Pending,
            Some(failure) => failure.state(),
            None => FenceState::Done,
        }
    }

    fn wait(&self, _deadline: Duration) -> FenceState {
        self.timeline.advance(self.at);
        self.state()
    }

    /// Advances the virtual clock immediately, since nobody else does while a task waits.
    fn wake(&self, waker: &Waker) -> bool {
        self.timeline.advance(self.at);
        waker.wake_by_ref();
        true
    }

    fn time(&self) -> Option<Duration> {
        Some(self.at)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work that waited for several that failed fails with the first cause, and is over only if all of them are.
    #[test]
    fn work_after_two_failures_is_over_when_both_are() {
        let failure = |why: &str, over| Failure { cause: Arc::new(Error::bug(why)), over };
        for (one, two) in [(true, true), (true, false), (false, true), (false, false)] {
            let first = failure("one", one);
            let cause = Arc::clone(&first.cause);
            let both = Failure::first(vec![first, failure("two", two)]).unwrap();
            assert!(Arc::ptr_eq(&both.cause, &cause));
            assert_eq!(both.over, one && two);
        }
        assert!(Failure::first(Vec::new()).is_none());
    }
}
