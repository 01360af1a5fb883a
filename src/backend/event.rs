//! Points in a stream's work.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};

/// What a backend's event can do.
pub trait Fence: Any + Send + Sync {
    /// Whether the work before it is done. Never blocks.
    fn state(&self) -> FenceState;

    /// Blocks until the work is done or has failed, at most for `deadline`; the state then.
    fn wait(&self, deadline: Duration) -> FenceState;

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
    /// It failed; so fails whatever waits for it.
    Failed(Arc<Error>),
}

/// A point in a stream's work: pending, then done or failed for good.
#[derive(Clone)]
pub struct Event(Arc<dyn Fence>);

impl Event {
    /// The event of a backend's fence.
    pub fn new(fence: Arc<dyn Fence>) -> Event {
        Event(fence)
    }

    /// Whether nothing is to be waited for any more: done, or failed.
    pub fn settled(&self) -> bool {
        !matches!(self.0.state(), FenceState::Pending)
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
            FenceState::Failed(cause) => Err(Error::Failed { operation: "a copy", cause }),
            FenceState::Pending => Err(Error::TimedOut { what: "an event".to_owned(), after: deadline }),
        }
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

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.0.state()).finish()
    }
}
