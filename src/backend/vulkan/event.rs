//! Values of timelines as fences.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::context::Refusal;
use super::semaphore::Point;
use super::timeline::Timeline;
use crate::backend::{Event, Fence, FenceState};
use crate::error::Error;

/// The end of a submission.
pub(super) struct VulkanFence {
    timeline: Arc<Timeline>,
    value: u64,
    lost: OnceLock<Arc<Error>>,
}

impl VulkanFence {
    /// The event of the submission to `timeline` that ends with `value`.
    pub(super) fn event(timeline: &Arc<Timeline>, value: u64) -> Event {
        Event::new(Arc::new(VulkanFence { timeline: Arc::clone(timeline), value, lost: OnceLock::new() }))
    }

    /// The point that a submission to the same device waits for.
    pub(super) fn point(&self) -> Point {
        self.timeline.point(self.value)
    }

    pub(super) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    fn state_of(&self, reached: Result<bool, Refusal>) -> FenceState {
        match reached {
            Ok(true) => FenceState::Done,
            Ok(false) => FenceState::Pending,
            Err(refusal) => {
                let context = self.timeline.context();
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
        match self.timeline.was_reached(self.value) {
            true => Some(FenceState::Done),
            false => self.lost.get().map(|cause| FenceState::Lost(Arc::clone(cause))),
        }
    }
}

// SAFETY: the driver counts a timeline up to a value when the submission that ends with it is done, and that comes after all
// earlier ones of the stream. What cannot be asked is lost.
unsafe impl Fence for VulkanFence {
    fn state(&self) -> FenceState {
        self.known().unwrap_or_else(|| self.state_of(self.timeline.is_reached(self.value)))
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        self.known().unwrap_or_else(|| self.state_of(self.timeline.wait(self.value, deadline)))
    }
}
