//! Interoperation with the caller's Vulkan code: the library works on a device that the caller has opened, and the caller's
//! submissions use the library's tensors, without a copy.
//!
//! A buffer of Vulkan belongs to one open device, so the library has to [adopt](Vulkan::adopt) the caller's; of a device that it
//! opens itself the caller could not use the handles. The module re-exports [`ash`], whose handles these are. With the feature
//! `wgpu` the module `wgpu` does all of this for a device of that crate.
//!
//! ```no_run
//! use std::sync::{Arc, Mutex};
//! use tensor_offload::backend::{Backend, Host, Vulkan};
//! use tensor_offload::vulkan::{self, AdoptedDevice, AdoptedQueue, EnabledFeatures, ash};
//! use tensor_offload::{Model, Registry, Result, Streamer};
//!
//! /// The devices for `Model::load`: yours as `vulkan:0`, and the host.
//! ///
//! /// # Safety
//! /// As `Vulkan::adopt`: the handles are valid while `keep` lives, and whoever submits to the queue holds `lock`.
//! unsafe fn devices(
//!     instance: &ash::Instance,
//!     physical: ash::vk::PhysicalDevice,
//!     device: &ash::Device,
//!     queue: (ash::vk::Queue, u32),
//!     lock: Arc<Mutex<()>>,
//!     keep: impl std::any::Any + Send + Sync,
//! ) -> Result<Registry> {
//!     let enabled = EnabledFeatures { timeline_semaphore: true, synchronization2: true };
//!     let yours = AdoptedDevice::new(instance.clone(), physical, device.clone(), enabled, keep)
//!         .queue(AdoptedQueue::shared(queue.0, queue.1, lock));
//!     // SAFETY: the caller's promise.
//!     let backend = unsafe { Vulkan::adopt([yours])? };
//!     Ok(Registry::new([Arc::new(backend) as Arc<dyn Backend>]))
//! }
//!
//! /// # Safety
//! /// `submit` submits work that waits for the point that it is given, and returns a semaphore of the device and the value that
//! /// it has after that work. The semaphore lives as long as `keep`.
//! unsafe fn pass(
//!     model: &Arc<Model>,
//!     submit: impl Fn(&[vulkan::Place], &vulkan::SemaphorePoint) -> (ash::vk::Semaphore, u64),
//!     keep: Arc<dyn std::any::Any + Send + Sync>,
//! ) -> Result<()> {
//!     let mut streamer = Streamer::new(model)?;
//!     for layer in model.layout().layer_ids() {
//!         let guard = streamer.layer(layer)?;
//!         let weights: Vec<_> = guard.tensors().filter_map(|tensor| vulkan::place(&tensor)).collect();
//!         let arrived = vulkan::mark(&**streamer.compute())?;
//!         let (semaphore, value) = submit(&weights, &arrived);
//!         // SAFETY: the caller's promise.
//!         let used = unsafe { vulkan::event(model.residency().device(), semaphore, value, Arc::clone(&keep))? };
//!         streamer.compute().wait(&used)?;
//!     } // dropping the guard marks the end of the layer's use, which comes after `used`
//!     Ok(())
//! }
//! ```
//!
//! **On one queue.** Work that the caller submits to the queue of the streamer's compute stream ([`stream_queue`]) needs no
//! semaphores: what is submitted after a [`mark`] comes after all that the stream waits for, and the mark that the guard's drop
//! makes comes after what was submitted before it. Between the two, submit under the queue's lock.

#![expect(unsafe_code, reason = "raw handles are exchanged with the caller")]

use std::any::Any;
use std::sync::Arc;

pub use ash;
use ash::vk;

#[cfg(doc)]
use crate::backend::Vulkan;
use crate::backend::vulkan::interop;
pub use crate::backend::vulkan::interop::SemaphorePoint;
pub use crate::backend::vulkan::{AdoptedDevice, AdoptedQueue, EnabledFeatures, QueueLock};
use crate::backend::{Device, Event, Stream};
use crate::error::{Error, Result};
use crate::load::TensorView;

/// Where a tensor is in the memory of a Vulkan device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Place {
    /// The open device.
    pub device: vk::Device,
    /// A buffer of it, with the usages of storage buffers and of both ends of transfers. It holds other memory beside the tensor.
    pub buffer: vk::Buffer,
    /// The offset of the tensor's first byte in the buffer. That of the first tensor of a module is a multiple of 64.
    pub offset: u64,
    /// The size in bytes.
    pub size: u64,
}

/// The place of a tensor. `None` if it is not in a Vulkan device's memory, or has no bytes.
///
/// The bytes are available to work that comes after a [`mark`] on the streamer's compute stream while the layer's guard lives, and
/// may only be read. The buffer lives as long as the tensor's [`block`](crate::backend::Buf::block), so that clones of that keep it;
/// a slot is filled with another layer after the guard's drop all the same.
pub fn place(tensor: &TensorView<'_>) -> Option<Place> {
    let (buf, range) = (tensor.buf(), tensor.byte_range());
    let (device, buffer, start) = interop::place(buf.block())?;
    let inside = !range.is_empty() && range.end <= buf.bytes();
    let offset = start + (buf.start() + range.start) as u64;
    inside.then_some(Place { device, buffer, offset, size: range.len() as u64 })
}

/// Marks the end of a stream's work so far: the point after which all of that is done, and all that the stream waits for, such as
/// the copies of layers whose guards live. A submission that waits for it sees what they wrote.
///
/// # Errors
/// [`Error::Invalid`] for a stream of another backend; when the stream accepts no more work.
pub fn mark(stream: &dyn Stream) -> Result<SemaphorePoint> {
    let other = || Error::invalid(format!("{} has streams without semaphores of Vulkan", stream.device()));
    interop::queue(stream).ok_or_else(other)?;
    point(&stream.record(&[])?).ok_or_else(other)
}

/// The point of an event. `None` if it is not of a Vulkan device's stream.
pub fn point(event: &Event) -> Option<SemaphorePoint> {
    SemaphorePoint::of(event)
}

/// A point of the caller's work as an event, for which streams wait on the device: after
/// [`wait`](crate::backend::Stream::wait) on the streamer's compute stream, the drop of a layer's guard comes after that work.
/// `keep` is dropped, and can destroy the semaphore, once nothing waits for it.
///
/// # Safety
/// - `semaphore` is a timeline semaphore of the open device for as long as `keep` lives.
/// - The work that raises it to the value or beyond has been submitted, and waits for nothing that comes after the event.
/// - When the value is reached, all work before it that uses the library's memory is done.
///
/// # Errors
/// [`Error::Invalid`] when `device` is not a Vulkan device, or `semaphore` is null.
pub unsafe fn event(
    device: &Arc<dyn Device>,
    semaphore: vk::Semaphore,
    value: u64,
    keep: Arc<dyn Any + Send + Sync>,
) -> Result<Event> {
    if semaphore == vk::Semaphore::null() {
        return Err(Error::invalid(format!("a semaphore of {} is null", device.id())));
    }
    // SAFETY: the caller's promise.
    unsafe { interop::event(device, semaphore, value, keep) }
}

/// The queue that a stream submits to, one of those that were [given](AdoptedDevice::queue) if the device was adopted. `None` for
/// streams of other backends.
pub fn stream_queue(stream: &dyn Stream) -> Option<vk::Queue> {
    interop::queue(stream).map(|(_, queue)| queue)
}
