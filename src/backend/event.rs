//! Points in a stream's work.

#![expect(unsafe_code, reason = "a fence whose word cannot be trusted breaks memory, so its trait is unsafe")]

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

/// What a backend's event can do.
///
/// # Safety
/// Memory is read, written and freed on its word: once it has said [`Done`](FenceState::Done) or
/// [`Failed`](FenceState::Failed), the work before it touches no memory any more, and so it says from then on.
pub unsafe trait Fence: Any + Send + Sync {
    /// Whether the work before it is done. Never blocks.
    fn state(&self) -> FenceState;

    /// Blocks until the work is no longer pending, at most for `deadline`; the state then.
    fn wait(&self, deadline: Duration) -> FenceState;

    /// Lets `waker` be woken once the work is no longer pending; at once where it is not now. False, and nothing, where
    /// the backend is not told of that: then a thread asks for the [`state`](Fence::state) again and again.
    fn wake(&self, waker: &Waker) -> bool {
        let _ = waker;
        false
    }

    /// When the work was or will be done, on the clock of simulated devices.
    fn time(&self) -> Option<Duration> {
        None
    }
}

/// How far the work before an event is.
#[derive(Clone, Debug)]
pub enum FenceState {
    /// Not done yet.
    Pending,
    /// Done.
    Done,
    /// It failed and is over; so fails whatever waits for it.
    Failed(Arc<Error>),
    /// Its device failed, and nobody can tell whether the work is over. What waits for it fails, and the memory that it
    /// uses is never handed out again.
    Lost(Arc<Error>),
}

/// A point in a stream's work: pending, then done or failed for good.
#[derive(Clone)]
pub struct Event(Arc<dyn Fence>);

impl Event {
    /// The event of a backend's fence.
    pub fn new(fence: Arc<dyn Fence>) -> Event {
        Event(fence)
    }

    /// Whether nothing is to be waited for any more: done, failed, or lost.
    pub fn is_complete(&self) -> bool {
        !matches!(self.0.state(), FenceState::Pending)
    }

    /// Whether the work is known to touch no memory any more: done, or failed.
    pub fn is_over(&self) -> bool {
        matches!(self.0.state(), FenceState::Done | FenceState::Failed(_))
    }

    /// Whether this is a clone of `other`, or it of this one.
    pub fn is_same(&self, other: &Event) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Tells it from all other events that live.
    pub(crate) fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// How far the work is. Never blocks.
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

    /// As [`wait`](Event::wait), for asynchronous code: a future that any executor can run. It does not end before the
    /// work does; a deadline is the executor's to give.
    ///
    /// # Errors
    /// [`Error::Failed`] with the cause when the work failed.
    pub fn completed(&self) -> impl Future<Output = Result<()>> + Send + 'static {
        EventFuture { event: self.clone(), asked: None }
    }

    /// When the work was or will be done, on the clock of simulated devices; none on others.
    pub fn time(&self) -> Option<Duration> {
        self.0.time()
    }

    /// The fence as its backend's own type, to be waited for on the device.
    pub fn downcast<T: Fence>(&self) -> Option<&T> {
        (&*self.0 as &dyn Any).downcast_ref()
    }
}

/// When a wait that begins now is to end.
pub(crate) fn until(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(LONGEST)
}

/// The future of an event's end.
struct EventFuture {
    event: Event,
    /// Who is to be woken, if anyone was named.
    asked: Option<Waker>,
}

impl Future for EventFuture {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let waker = context.waker();
        if !self.event.is_complete() && !self.asked.as_ref().is_some_and(|asked| asked.will_wake(waker)) {
            if !self.event.0.wake(waker) {
                watcher::watch(self.event.clone(), waker.clone());
            }
            self.asked = Some(waker.clone());
        }
        // Asked for after the waker was left, so that no end goes by unnoticed.
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
