//! Values of timelines as fences.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::context::{Context, Refusal};
use super::semaphore::Point;
use super::timeline::Timeline;
use crate::backend::{Event, Fence, FenceState};
use crate::error::Error;

/// A value of a semaphore: the end of a submission, or a point of the caller's work.
pub(super) struct VulkanFence {
    point: Point,
    /// What ends with the value. `None` if it is the caller's.
    _timeline: Option<Arc<Timeline>>,
    lost: OnceLock<Arc<Error>>,
}

impl VulkanFence {
    /// The event of the submission to `timeline` that ends with `value`.
    pub(super) fn event(timeline: &Arc<Timeline>, value: u64) -> Event {
        let (point, _timeline) = (timeline.point(value), Some(Arc::clone(timeline)));
        Event::new(Arc::new(VulkanFence { point, _timeline, lost: OnceLock::new() }))
    }

    /// The event of a point of the caller's work.
    pub(super) fn of_caller(point: Point) -> Event {
        Event::new(Arc::new(VulkanFence { point, _timeline: None, lost: OnceLock::new() }))
    }

    /// The point that a submission to the same device waits for.
    pub(super) fn point(&self) -> Point {
        self.point.clone()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.point.0.context()
    }

    fn state_of(&self, reached: Result<bool, Refusal>) -> FenceState {
        match reached {
            Ok(true) => FenceState::Done,
            Ok(false) => FenceState::Pending,
            Err(refusal) => {
                let context = self.context();
                let lost = match context.error(refusal) {
                    error @ (Error::DeviceLost { .. } | Error::Forked { .. }) => error,
                    // Whether the work is done cannot be told any more.
                    error => context.lose(&error.to_string()),
                };
                // Another thread may have seen the end of the work just before.
                self.known().unwrap_or_else(|| FenceState::Lost(Arc::clone(self.lost.get_or_init(|| Arc::new(lost)))))
            }
        }
    }

    /// The state, if no driver has to be asked. What was done once stays so.
    fn known(&self) -> Option<FenceState> {
        match self.point.0.was_reached(self.point.1) {
            true => Some(FenceState::Done),
            false => self.lost.get().map(|cause| FenceState::Lost(Arc::clone(cause))),
        }
    }
}

// SAFETY: the driver counts a timeline up to a value when the submission that ends with it is done, and that comes after all
// earlier ones of the stream; for a semaphore of the caller that is the caller's promise. What cannot be asked is lost.
unsafe impl Fence for VulkanFence {
    fn state(&self) -> FenceState {
        self.known().unwrap_or_else(|| self.state_of(self.point.0.is_reached(self.point.1)))
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        self.known().unwrap_or_else(|| self.state_of(self.point.0.wait(self.point.1, deadline)))
    }
}
