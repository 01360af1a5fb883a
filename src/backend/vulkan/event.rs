//! Values of timelines as fences.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::context::{Context, Refusal};
use super::raise::Gate;
use super::semaphore::Point;
use super::timeline::Timeline;
use crate::backend::{Event, Fence, FenceState};
use crate::error::Error;

/// A value of a semaphore: the end of a submission, or a point of the caller's work.
pub(super) struct VulkanFence {
    point: Point,
    /// What ends with the value. `None` if it is the caller's.
    _timeline: Option<Arc<Timeline>>,
    /// What the submission waited for through the host, or what that waited for.
    gates: Vec<Arc<Gate>>,
    lost: OnceLock<Arc<Error>>,
}

impl VulkanFence {
    /// The event of the submission to `timeline` that ends with `value`. It fails if one of the gates does.
    pub(super) fn event(timeline: &Arc<Timeline>, value: u64, gates: Vec<Arc<Gate>>) -> Event {
        let (point, _timeline) = (timeline.point(value), Some(Arc::clone(timeline)));
        Event::new(Arc::new(VulkanFence { point, _timeline, gates, lost: OnceLock::new() }))
    }

    /// The event of a point of the caller's work.
    pub(super) fn of_caller(point: Point) -> Event {
        Event::new(Arc::new(VulkanFence { point, _timeline: None, gates: Vec::new(), lost: OnceLock::new() }))
    }

    /// The gates whose events may fail still.
    pub(super) fn gates(&self) -> impl Iterator<Item = &Arc<Gate>> {
        self.gates.iter().filter(|gate| !gate.is_passed())
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
            Ok(true) => self.outcome(),
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

    /// The state once the value is reached.
    fn outcome(&self) -> FenceState {
        let failed = self.gates.iter().find_map(|gate| gate.failed());
        failed.cloned().unwrap_or(FenceState::Done)
    }

    /// The state, if no driver has to be asked. What was done once stays so.
    fn known(&self) -> Option<FenceState> {
        match self.point.0.was_reached(self.point.1) {
            true => Some(self.outcome()),
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
