//! Timeline semaphores: numbers that only grow, which submissions and the host wait for.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ash::vk;

use super::context::{Context, Named, Refusal};
use crate::backend::event::until;

/// The longest that one call waits: the end of the process waits for it.
const LONGEST_CALL: Duration = Duration::from_millis(50);

/// A timeline semaphore. Whatever waits for it holds it.
pub(super) struct Semaphore {
    context: Arc<Context>,
    raw: vk::Semaphore,
    /// The largest value that was seen to be reached.
    reached: AtomicU64,
    /// What keeps a semaphore of the caller.
    keep: Option<ManuallyDrop<Arc<dyn Any + Send + Sync>>>,
}

/// A value that a submission waits for.
pub(super) type Point = (Arc<Semaphore>, u64);

impl Semaphore {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Semaphore>, Refusal> {
        let raw = context.raw(|device| {
            let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
            let create = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
            // SAFETY: what the structures point to outlives the call.
            unsafe { device.create_semaphore(&create, None) }.of("vkCreateSemaphore")
        })?;
        Ok(Arc::new(Semaphore { context: Arc::clone(context), raw, reached: AtomicU64::new(0), keep: None }))
    }

    /// A semaphore of the caller, who destroys it once `keep` is dropped.
    pub(super) fn foreign(
        context: &Arc<Context>,
        raw: vk::Semaphore,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Arc<Semaphore> {
        let keep = Some(ManuallyDrop::new(keep));
        Arc::new(Semaphore { context: Arc::clone(context), raw, reached: AtomicU64::new(0), keep })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> vk::Semaphore {
        self.raw
    }

    /// Whether the value was seen to be reached.
    pub(super) fn was_reached(&self, value: u64) -> bool {
        self.reached.load(Ordering::Acquire) >= value
    }

    /// Whether the value is reached. Never blocks.
    pub(super) fn is_reached(&self, value: u64) -> Result<bool, Refusal> {
        self.wait_once(value, 0)
    }

    /// Blocks until the value is reached, at most for `deadline`. Returns whether it is.
    pub(super) fn wait(&self, value: u64, deadline: Duration) -> Result<bool, Refusal> {
        let until = until(deadline);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let reached = self.wait_once(value, left.min(LONGEST_CALL).as_nanos() as u64)?;
            if reached || left <= LONGEST_CALL {
                return Ok(reached);
            }
        }
    }

    fn wait_once(&self, value: u64, nanoseconds: u64) -> Result<bool, Refusal> {
        if self.was_reached(value) {
            return Ok(true);
        }
        let reached = self.ask(value, nanoseconds)?;
        if reached {
            self.reached.fetch_max(value, Ordering::AcqRel);
        }
        Ok(reached)
    }

    /// Waits until the value is reached, at most for `nanoseconds`. Returns whether it is. A wait of no time takes the place of a
    /// look at the value: whatever is submitted after a wait comes after the work before the value.
    fn ask(&self, value: u64, nanoseconds: u64) -> Result<bool, Refusal> {
        let (semaphores, values) = ([self.raw], [value]);
        let wait = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let ask = || {
            self.context.raw(|device| {
                // SAFETY: the semaphore is alive.
                unsafe { device.wait_semaphores(&wait, nanoseconds) }.of("vkWaitSemaphores")
            })
        };
        // What is refused twice is not transient.
        match ask().or_else(|refusal| if refusal.is_out_of_memory() { ask() } else { Err(refusal) }) {
            Ok(()) => Ok(true),
            Err(Refusal::Code(_, vk::Result::TIMEOUT)) => Ok(false),
            Err(refusal) => Err(refusal),
        }
    }

    /// Raises the value from the host.
    pub(super) fn signal(&self, value: u64) -> Result<(), Refusal> {
        let signal = vk::SemaphoreSignalInfo::default().semaphore(self.raw).value(value);
        let raise = || {
            self.context.raw(|device| {
                // SAFETY: the semaphore is alive, and its value is less: only one thread signals it, in order.
                unsafe { device.signal_semaphore(&signal) }.of("vkSignalSemaphore")
            })
        };
        raise().or_else(|refusal| if refusal.is_out_of_memory() { raise() } else { Err(refusal) })
    }
}

impl Drop for Semaphore {
    fn drop(&mut self) {
        // A lost device may still wait for it.
        if self.context.lost().is_some() {
            return;
        }
        if let Some(keep) = &mut self.keep {
            // SAFETY: dropped once, here.
            return self.context.destroy(|_| unsafe { ManuallyDrop::drop(keep) });
        }
        // SAFETY: timelines hold what their submissions raise and wait for until these were seen to be done.
        self.context.destroy(|device| unsafe { device.destroy_semaphore(self.raw, None) });
    }
}
