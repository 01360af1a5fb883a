//! A stream's submissions: command buffers in order, each of which ends with the next value of one timeline semaphore.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ash::vk;

use super::context::{Context, Named, Outcome, Refusal};
use super::dispatch::Sets;
use super::pipelines::Layouts;
use super::queues::{Queue, QueueUse};
use super::semaphore::{Point, Semaphore};
use super::staging::Staging;
use crate::backend::Role;

/// What records commands.
type Recorder<'a> = &'a dyn Fn(&ash::Device, vk::CommandBuffer);

/// What records kernels, each with its set of descriptors.
type KernelRecorder<'a> = &'a dyn Fn(&ash::Device, vk::CommandBuffer, &[vk::DescriptorSet]);

/// The submissions of one stream. Events hold it, so it outlives all of them.
pub(super) struct Timeline {
    context: Arc<Context>,
    queue: QueueUse,
    semaphore: Arc<Semaphore>,
    pool: vk::CommandPool,
    submitted: Mutex<Submitted>,
    /// A number that no other stream of this process ever has.
    number: u64,
    /// The buffer for copies of memory that the device cannot reach.
    staging: Mutex<Option<Staging>>,
}

#[derive(Default)]
struct Submitted {
    /// The last value that will be reached.
    last: u64,
    /// The points that the next submission waits for, and with it all later ones.
    after: Vec<Point>,
    in_flight: VecDeque<Submission>,
    /// Command buffers that can be recorded.
    unused: Vec<vk::CommandBuffer>,
    sets: Sets,
}

/// A submission that was not seen to be done.
struct Submission {
    /// The value that is reached when it is.
    value: u64,
    commands: Option<vk::CommandBuffer>,
    sets: Vec<vk::DescriptorSet>,
    /// What it waits for: no semaphore may go before it is done.
    _waits: Vec<Point>,
}

impl Timeline {
    pub(super) fn new(context: &Arc<Context>, role: Role) -> Result<Arc<Timeline>, Refusal> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let queue = QueueUse::of(context.queues().of(role));
        let semaphore = Semaphore::new(context)?;
        let pool = context.raw(|device| {
            let flags = vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER | vk::CommandPoolCreateFlags::TRANSIENT;
            let create = vk::CommandPoolCreateInfo::default().flags(flags).queue_family_index(queue.family());
            // SAFETY: the device has queues of the family.
            unsafe { device.create_command_pool(&create, None) }.of("vkCreateCommandPool")
        })?;
        Ok(Arc::new(Timeline {
            context: Arc::clone(context),
            queue,
            semaphore,
            pool,
            submitted: Mutex::default(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            staging: Mutex::default(),
        }))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The point at which the work up to `value` is done.
    pub(super) fn point(&self, value: u64) -> Point {
        (Arc::clone(&self.semaphore), value)
    }

    /// The last value that will be reached.
    pub(super) fn last(&self) -> u64 {
        self.lock().last
    }

    fn lock(&self) -> MutexGuard<'_, Submitted> {
        // Nothing that can panic comes between a submission and its entry here.
        self.submitted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Whether its queue runs kernels.
    pub(super) fn computes(&self) -> bool {
        self.context.queues().computes(&self.queue)
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn staging(&self) -> &Mutex<Option<Staging>> {
        &self.staging
    }

    /// Makes the next submission wait for a point, and with it all later ones.
    pub(super) fn wait_for(&self, point: Point) {
        self.lock().after.push(point);
    }

    /// Submits what `record` records, if anything, after all earlier submissions and the points `waits`. Returns the value that
    /// is reached when it is done.
    pub(super) fn submit(&self, waits: Vec<Point>, record: Option<Recorder<'_>>) -> Result<u64, Refusal> {
        let mut submitted = self.lock();
        self.reclaim(&mut submitted)?;
        let commands = record.map(|record| self.recorded(&mut submitted, record)).transpose()?;
        self.submit_recorded(&mut submitted, waits, commands, Vec::new())
    }

    /// As [`submit`](Timeline::submit), for `count` kernels of these layouts.
    pub(super) fn submit_kernels(
        &self,
        waits: Vec<Point>,
        (layouts, count): (Layouts, usize),
        record: KernelRecorder<'_>,
    ) -> Result<u64, Refusal> {
        let mut submitted = self.lock();
        self.reclaim(&mut submitted)?;
        let sets = submitted.sets.take(&self.context, layouts, count)?;
        let recorded = self.recorded(&mut submitted, &|device, commands| record(device, commands, &sets));
        match recorded {
            Ok(commands) => self.submit_recorded(&mut submitted, waits, Some(commands), sets),
            Err(refusal) => {
                submitted.sets.give_back(sets);
                Err(refusal)
            }
        }
    }

    fn submit_recorded(
        &self,
        submitted: &mut Submitted,
        mut waits: Vec<Point>,
        commands: Option<vk::CommandBuffer>,
        sets: Vec<vk::DescriptorSet>,
    ) -> Result<u64, Refusal> {
        waits.extend(submitted.after.iter().cloned());
        let point = |semaphore, value| {
            vk::SemaphoreSubmitInfo::default()
                .semaphore(semaphore)
                .value(value)
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
        };
        // The order of submissions to a queue makes no earlier write visible, so a stream waits for itself, too.
        let mut before = vec![point(self.semaphore.raw(), submitted.last)];
        for (semaphore, value) in &waits {
            match before.iter_mut().find(|known| known.semaphore == semaphore.raw()) {
                Some(known) => known.value = known.value.max(*value),
                None => before.push(point(semaphore.raw(), *value)),
            }
        }
        let value = submitted.last + 1;
        let after = [point(self.semaphore.raw(), value)];
        let buffers: Vec<_> =
            commands.iter().map(|&buffer| vk::CommandBufferSubmitInfo::default().command_buffer(buffer)).collect();
        let submission = vk::SubmitInfo2::default()
            .wait_semaphore_infos(&before)
            .command_buffer_infos(&buffers)
            .signal_semaphore_infos(&after);
        let outcome = self.context.raw(|device| {
            self.queue.submit(|queue| {
                // SAFETY: no other thread uses the queue; the semaphores and the command buffer are kept until the value is seen to
                // be reached.
                unsafe { device.queue_submit2(queue, &[submission], vk::Fence::null()) }.of("vkQueueSubmit2")
            })
        });
        if let Err(refusal) = outcome {
            // The driver took nothing, unless the device is lost, whose command buffers are never used again.
            submitted.unused.extend(commands);
            submitted.sets.give_back(sets);
            return Err(refusal);
        }
        submitted.last = value;
        submitted.after.clear();
        submitted.in_flight.push_back(Submission { value, commands, sets, _waits: waits });
        Ok(value)
    }

    /// Takes the command buffers of submissions back that are done.
    fn reclaim(&self, submitted: &mut Submitted) -> Result<(), Refusal> {
        while let Some(first) = submitted.in_flight.front()
            && self.is_reached(first.value)?
        {
            let Some(Submission { commands, sets, .. }) = submitted.in_flight.pop_front() else { break };
            submitted.unused.extend(commands);
            submitted.sets.give_back(sets);
        }
        Ok(())
    }

    /// A command buffer with what `record` records.
    fn recorded(&self, submitted: &mut Submitted, record: Recorder<'_>) -> Result<vk::CommandBuffer, Refusal> {
        let buffer = match submitted.unused.pop() {
            Some(buffer) => buffer,
            None => self.context.raw(|device| self.new_buffer(device))?,
        };
        let recorded = self.context.raw(|device| {
            let once = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
            // SAFETY: the buffer is not in flight, and its pool is this timeline's, which is locked. Beginning resets it.
            unsafe { device.begin_command_buffer(buffer, &once) }.of("vkBeginCommandBuffer")?;
            record(device, buffer);
            // SAFETY: as above.
            unsafe { device.end_command_buffer(buffer) }.of("vkEndCommandBuffer")
        });
        recorded.map(|()| buffer).inspect_err(|_| {
            // Whether it is being recorded still cannot be told.
            // SAFETY: it was not submitted, and its pool is this timeline's, which is locked.
            self.context.destroy(|device| unsafe { device.free_command_buffers(self.pool, &[buffer]) });
        })
    }

    fn new_buffer(&self, device: &ash::Device) -> Outcome<vk::CommandBuffer> {
        let allocate = vk::CommandBufferAllocateInfo::default().command_pool(self.pool).command_buffer_count(1);
        // SAFETY: the pool is this timeline's, which is locked.
        let buffers = unsafe { device.allocate_command_buffers(&allocate) }.of("vkAllocateCommandBuffers")?;
        buffers.first().copied().ok_or(("vkAllocateCommandBuffers", vk::Result::ERROR_UNKNOWN))
    }

    /// Whether the work up to `value` is done. Never blocks.
    pub(super) fn is_reached(&self, value: u64) -> Result<bool, Refusal> {
        self.semaphore.is_reached(value)
    }

    /// Blocks until the work up to `value` is done, at most for `deadline`. Returns whether it is.
    pub(super) fn wait(&self, value: u64, deadline: Duration) -> Result<bool, Refusal> {
        self.semaphore.wait(value, deadline)
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        if self.context.lost().is_some() {
            // Submissions may be running still. Their staging memory stays with them.
            let staging = self.staging.get_mut().unwrap_or_else(PoisonError::into_inner);
            return std::mem::forget(staging.take());
        }
        let submitted = self.submitted.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: events hold the timeline until they were observed to be complete, and there are none left. Destroying the pool
        // frees its command buffers.
        self.context.destroy(|device| unsafe {
            submitted.sets.destroy(device);
            device.destroy_command_pool(self.pool, None);
        });
    }
}
