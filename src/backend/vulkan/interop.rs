//! What the caller's own work needs of this backend's memory, streams and events.

use std::any::Any;
use std::sync::Arc;

use ash::vk;

use super::arena::VulkanMemory;
use super::context::Context;
use super::device::VulkanDevice;
use super::event::VulkanFence;
use super::semaphore::{Point, Semaphore};
use super::stream::VulkanStream;
use crate::backend::{Device, Event, MemoryBlock, Stream};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// A value of a timeline semaphore, which work waits for: a point in the library's work. The semaphore lives as long as this.
#[derive(Clone)]
pub struct SemaphorePoint(Point);

impl SemaphorePoint {
    /// The semaphore, of the device that the work is on.
    pub fn semaphore(&self) -> vk::Semaphore {
        self.0.0.raw()
    }

    /// The value that it has reached, or exceeded, once the work is done.
    pub fn value(&self) -> u64 {
        self.0.1
    }

    pub(crate) fn of(event: &Event) -> Option<SemaphorePoint> {
        event.downcast::<VulkanFence>().map(|fence| SemaphorePoint(fence.point()))
    }
}

impl std::fmt::Debug for SemaphorePoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SemaphorePoint").field("semaphore", &self.semaphore()).field("value", &self.value()).finish()
    }
}

/// The device of an allocation, the buffer that it is in, and the offset of its first byte there. `None` for memory of other
/// backends, and for no bytes.
pub(crate) fn place(block: &MemoryBlock) -> Option<(vk::Device, vk::Buffer, u64)> {
    let memory = block.downcast::<VulkanMemory>()?;
    memory.place().map(|(buffer, offset)| (memory.context().handle(), buffer, offset))
}

/// The device of a stream, and the queue that it submits to.
pub(crate) fn queue(stream: &dyn Stream) -> Option<(vk::Device, vk::Queue)> {
    let timeline = (stream as &dyn Any).downcast_ref::<VulkanStream>()?.timeline();
    Some((timeline.context().handle(), timeline.queue().raw()))
}

/// The event of a point of the caller's work.
///
/// # Safety
/// As [`crate::vulkan::event`].
pub(crate) unsafe fn event(
    device: &Arc<dyn Device>,
    semaphore: vk::Semaphore,
    value: u64,
    keep: Arc<dyn Any + Send + Sync>,
) -> Result<Event> {
    let context = context(device)?;
    Ok(VulkanFence::of_caller((Semaphore::foreign(context, semaphore, keep), value)))
}

fn context(device: &Arc<dyn Device>) -> Result<&Arc<Context>> {
    let ours = (&**device as &dyn Any).downcast_ref::<VulkanDevice>();
    let none = |id: DeviceId| Error::invalid(format!("{id} is no Vulkan device of this library's backend"));
    ours.map(VulkanDevice::context).ok_or_else(|| none(device.id()))
}
