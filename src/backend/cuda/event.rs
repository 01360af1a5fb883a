//! Events of the driver as fences.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::result;
use cudarc::driver::sys;

use super::context::{Context, Refusal};
use crate::backend::{Fence, FenceState};
use crate::error::Error;

/// How long a wait asks again and again before it sleeps between questions.
const EAGER: Duration = Duration::from_micros(30);

/// The longest sleep between two questions.
const PATIENT: Duration = Duration::from_micros(500);

/// An event that was recorded once.
pub(super) struct CudaFence {
    event: sys::CUevent,
    context: Arc<Context>,
    ended: OnceLock<Result<(), Arc<Error>>>,
}

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for CudaFence {}
// SAFETY: as above.
unsafe impl Sync for CudaFence {}

impl CudaFence {
    /// An event after all work of `stream` so far.
    pub(super) fn record(context: &Arc<Context>, stream: sys::CUstream) -> Result<CudaFence, Refusal> {
        let fence = CudaFence { event: context.event()?, context: Arc::clone(context), ended: OnceLock::new() };
        // SAFETY: both handles are alive: the event is this fence's, the stream the caller's.
        context.raw("cuEventRecord", || unsafe { result::event::record(fence.event, stream) })?;
        Ok(fence)
    }

    pub(super) fn handle(&self) -> sys::CUevent {
        self.event
    }
}

impl Fence for CudaFence {
    fn state(&self) -> FenceState {
        if self.ended.get().is_none() {
            // SAFETY: this fence lets go of the event in its drop and not before.
            match self.context.raw("cuEventQuery", || unsafe { result::event::query(self.event) }) {
                Err(refusal) if refusal.is_not_ready() => return FenceState::Pending,
                Ok(()) => drop(self.ended.set(Ok(()))),
                Err(refusal) => match self.context.error(refusal) {
                    error @ Error::DeviceLost { .. } => drop(self.ended.set(Err(Arc::new(error)))),
                    // The question failed, not the work; whoever waits asks again until the deadline.
                    error => tracing::warn!(%error, "an event could not be asked for"),
                },
            }
        }
        match self.ended.get() {
            None => FenceState::Pending,
            Some(Ok(())) => FenceState::Done,
            Some(Err(cause)) => FenceState::Failed(Arc::clone(cause)),
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
        self.context.recycle(self.event);
    }
}
