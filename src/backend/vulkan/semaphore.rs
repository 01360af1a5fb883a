//! Timeline semaphores: numbers that only grow, which submissions and the host wait for.

use std::sync::Arc;

use ash::vk;

use super::context::{Context, Named, Refusal};

/// A timeline semaphore. Whatever waits for it holds it.
pub(super) struct Semaphore {
    context: Arc<Context>,
    raw: vk::Semaphore,
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
        Ok(Arc::new(Semaphore { context: Arc::clone(context), raw }))
    }

    pub(super) fn raw(&self) -> vk::Semaphore {
        self.raw
    }

    /// Waits until the value is reached, at most for `nanoseconds`. Returns whether it is. A wait of no time takes the place of a
    /// look at the value: whatever is submitted after a wait comes after the work before the value.
    pub(super) fn wait(&self, value: u64, nanoseconds: u64) -> Result<bool, Refusal> {
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
        if self.context.lost().is_none() {
            // SAFETY: timelines hold what their submissions raise and wait for until these were seen to be done.
            self.context.destroy(|device| unsafe { device.destroy_semaphore(self.raw, None) });
        }
    }
}
