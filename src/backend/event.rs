//! Events: points in a stream's work.

#![expect(unsafe_code, reason = "a fence that reports wrongly breaks memory safety, so its trait is unsafe")]

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::watcher;

use crate::error::{Error, Result};
use crate::limits::LONGEST;

/// The backend side of an [`Event`].
///
/// # Safety
/// Memory is read, written and freed according to the state that a fence reports. Once it has reported
/// [`Done`](FenceState::Done) or [`Failed`](FenceState::Failed), the work before it no longer accesses any memory, and the
/// fence must keep reporting that state.
pub unsafe trait Fence: Any + Send + Sync {
    /// The state of the work before the fence. Never blocks.
    fn state(&self) -> FenceState;

    /// Blocks until the work is no longer pending, at most for `deadline`. Returns the state then.
    fn wait(&self, deadline: Duration) -> FenceState;

    /// Registers `waker` to be woken once the work is no longer pending, or immediately if it is not pending now. Returns
    /// false and does nothing if the backend is not notified of completion: a thread then polls the
    /// [`state`](Fence::state).
    fn wake(&self, waker: &Waker) -> bool {
        let _ = waker;
        false
    }

    /// The time at which the work was or will be done, on the clock of simulated devices. `None` on others.
    fn time(&self) -> Option<Duration> {
        None
    }
}

/// The state of the work before an event.
#[derive(Clone, Debug)]
pub enum FenceState {
    /// Not done yet.
    Pending,
    /// Done.
    Done,
    /// Failed and complete. Work that waits for it fails too.
    Failed(Arc<Error>),
    /// The device failed, and it is unknown whether the work is complete. Work that waits for it fails, and the memory that
    /// it uses is never handed out again.
    Lost(Arc<Error>),
}

/// A point in a stream's work: pending, then done or failed for good.
#[derive(Clone)]
pub struct Event(Arc<dyn Fence>);

impl Event {
    /// Creates an event from a backend's fence.
    pub fn new(fence: Arc<dyn Fence>) -> Event {
        Event(fence)
    }

    /// Whether there is nothing left to wait for: the work is done, failed, or lost.
    pub fn is_complete(&self) -> bool {
        !matches!(self.0.state(), FenceState::Pending)
    }

    /// Whether the work is known to no longer access any memory: it is done or failed.
    pub fn is_over(&self) -> bool {
        matches!(self.0.state(), FenceState::Done | FenceState::Failed(_))
    }

    /// Whether this and `other` are clones of the same event.
    pub fn is_same(&self, other: &Event) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A key that is unique among live events.
    pub(crate) fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The state of the work. Never blocks.
    pub fn state(&self) -> FenceState {
        self.0.state()
    }

    /// Waits for the work.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] with the cause when the work failed.
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        match self.0.wait(deadline) {
            FenceState::Done => Ok(()),
            FenceState::Failed(cause) | FenceState::Lost(cause) => Err(Error::Failed { operation: "a copy", cause }),
            FenceState::Pending => Err(Error::TimedOut { what: "an event".to_owned(), after: deadline }),
        }
    }

    /// As [`wait`](Event::wait), for asynchronous code: a future that any executor can run. It completes only when the work
    /// does; use the executor's timeout for a deadline.
    ///
    /// # Errors
    /// [`Error::Failed`] with the cause when the work failed.
    pub fn completed(&self) -> impl Future<Output = Result<()>> + Send + 'static {
        EventFuture { event: self.clone(), registered: None }
    }

    /// The time at which the work was or will be done, on the clock of simulated devices. `None` on others.
    pub fn time(&self) -> Option<Duration> {
        self.0.time()
    }

    /// The fence as its backend's type, for waiting on the device.
    pub fn downcast<T: Fence>(&self) -> Option<&T> {
        (&*self.0 as &dyn Any).downcast_ref()
    }
}

/// The instant at which a wait that begins now ends.
pub(crate) fn until(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(LONGEST)
}

/// The future of an event's completion.
struct EventFuture {
    event: Event,
    /// The waker that was registered last.
    registered: Option<Waker>,
}

impl Future for EventFuture {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let waker = context.waker();
        if !self.event.is_complete() && !self.registered.as_ref().is_some_and(|registered| registered.will_wake(waker))
        {
            if !self.event.0.wake(waker) {
                watcher::watch(self.event.clone(), waker.clone());
            }
            self.registered = Some(waker.clone());
        }
        // Checked after the waker was registered, so that no completion is missed.
        match self.event.is_complete() {
            true => Poll::Ready(self.event.wait(Duration::ZERO)),
            false => Poll::Pending,
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.0.state()).finish()
    }
}
