//! Interoperation with the crate wgpu: the library works on the device of a `wgpu::Device`, and layers that it streams there are
//! buffers for WGSL shaders, without a copy.
//!
//! A buffer of Vulkan belongs to one open device, and wgpu opens its devices without `synchronization2`, which the library needs.
//! So [`request_device`] takes the place of `Adapter::request_device`: it opens a device for both, with what wgpu wants of it and
//! what the library does.
//!
//! ```no_run
//! use tensor_offload::wgpu::{self, wgpu as gpu};
//! use tensor_offload::{Model, Registry, Result, Streamer};
//!
//! /// Runs `shader` over each tensor of each layer of a model.
//! fn pass(instance: &gpu::Instance, shader: impl Fn(&gpu::Device, gpu::BindingResource<'_>) -> gpu::CommandBuffer) -> Result<()> {
//!     let adapters = wgpu::adapters(instance);
//!     // SAFETY: nothing is presented.
//!     let shared = unsafe { wgpu::request_device(&adapters[0], &gpu::DeviceDescriptor::default())? };
//!     let devices = Registry::new([shared.backend()]);
//!     let model = Model::open("model")?.allocation("vulkan:0,25%;cpu,*")?.load(&devices)?;
//!     let mut streamer = Streamer::new(&model)?;
//!     for layer in model.layout().layer_ids() {
//!         let guard = streamer.layer(layer)?;
//!         let mut work = Vec::new();
//!         for tensor in guard.tensors() {
//!             // SAFETY: the shader only reads, and the work is submitted below, while the guard lives.
//!             let buffer = unsafe { shared.buffer(&tensor)? };
//!             work.push(shader(shared.device(), gpu::BindingResource::Buffer(buffer.binding())));
//!         }
//!         shared.submit(&**streamer.compute(), work)?; // runs after the layer has arrived
//!     } // dropping the guard marks the end of the layer's use: what was submitted before
//!     Ok(())
//! }
//! ```
//!
//! wgpu and the streamer's compute stream share one queue. Each submission to it takes its turn, also those that wgpu makes by
//! itself. Copies have queues of their own where the device has some.

#![expect(unsafe_code, reason = "raw handles are exchanged with wgpu")]

mod locked;
mod open;
mod tensor;

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

pub use tensor::TensorBuffer;
pub use wgpu;
use wgpu::hal::api;

use crate::backend::vulkan::{self, interop};
use crate::backend::{Backend, Stream, Vulkan};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::TensorView;

/// The adapters that [`request_device`] accepts, in the order in which the Vulkan backend numbers its devices. Those that compute on
/// the processor are among them only if `TENSOR_OFFLOAD_VULKAN_SOFTWARE` is `1`.
pub fn adapters(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    let software = vulkan::software_is_admitted();
    let all = ready(instance.enumerate_adapters(wgpu::Backends::VULKAN));
    all.into_iter().filter(|adapter| open::suits(adapter, software).is_ok()).collect()
}

/// The output of a future that waits for nothing.
fn ready<F: Future>(future: F) -> F::Output {
    let (mut future, mut context) = (pin!(future), Context::from_waker(Waker::noop()));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

/// Opens a device that both wgpu and the library work on.
///
/// # Safety
/// Whoever presents a surface with the device's queue, or uses the queue by its raw handle, holds the [lock](SharedDevice::lock)
/// meanwhile. Programs that present nothing have nothing to do.
///
/// # Errors
/// [`Error::DeviceAbsent`] with the reason when the adapter is not of wgpu's Vulkan backend, lacks what the library needs, or
/// refuses the device.
pub unsafe fn request_device(adapter: &wgpu::Adapter, descriptor: &wgpu::DeviceDescriptor<'_>) -> Result<SharedDevice> {
    open::open(adapter, descriptor)
}

/// A device that both wgpu and the library work on. It is `vulkan:0` of its [backend](SharedDevice::backend).
pub struct SharedDevice {
    device: wgpu::Device,
    queue: wgpu::Queue,
    backend: Arc<Vulkan>,
    lock: Arc<Mutex<()>>,
}

impl SharedDevice {
    /// wgpu's side of the device.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// wgpu's queue. Work on the library's tensors is submitted with [`submit`](SharedDevice::submit).
    pub fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// The library's side: the device as `vulkan:0`, and `cpu`, for a [`Registry`](crate::Registry).
    pub fn backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.backend) as Arc<dyn Backend>
    }

    /// Holds the queue. Until the guard is dropped nobody else submits to it: nor must the thread that holds it.
    pub fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A tensor as a buffer of wgpu, which only reads it. It keeps the memory until wgpu has dropped the buffer, which may be at the
    /// next `poll` after its last use; a slot is filled with another layer after the guard's drop all the same.
    ///
    /// # Safety
    /// Work that uses the buffer only reads, and only the bytes of the [binding](TensorBuffer::binding). It is submitted by
    /// [`submit`](SharedDevice::submit) with the streamer's compute stream while the layer's guard lives, or, of a tensor that stays
    /// on the device, while the model does.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when the tensor is not in this device's memory; [`Error::Invalid`] when it has no bytes, or is larger
    /// than the device's `max_storage_buffer_binding_size`.
    pub unsafe fn buffer(&self, tensor: &TensorView<'_>) -> Result<TensorBuffer> {
        // SAFETY: the caller's promise.
        unsafe { tensor::buffer(&self.device, self.handle()?, tensor) }
    }

    /// Submits work, which runs after all that `compute` waits for, the layers whose guards live. Until it is done no slot is filled
    /// again whose guard is dropped afterwards. The host waits for nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `compute` is no compute stream of this device; when it accepts no more work.
    pub fn submit(
        &self,
        compute: &dyn Stream,
        work: impl IntoIterator<Item = wgpu::CommandBuffer>,
    ) -> Result<wgpu::SubmissionIndex> {
        // SAFETY: nothing is done to the queue.
        let own = unsafe { self.queue.as_hal::<api::Vulkan>() }.map(|queue| queue.as_raw());
        if own.is_none() || interop::queue(compute) != Some(self.handle()?).zip(own) {
            return Err(Error::invalid("the stream is no compute stream of the device that is shared with wgpu"));
        }
        // What is submitted after this comes after what it waits for, and the next mark of the stream after both.
        compute.record(&[])?;
        Ok(self.queue.submit(work))
    }

    /// The device's handle.
    fn handle(&self) -> Result<ash::vk::Device> {
        // SAFETY: nothing is done to the device.
        let device = unsafe { self.device.as_hal::<api::Vulkan>() };
        let lost = || Error::DeviceLost { device: DeviceId::vulkan(0), why: "wgpu has destroyed it".to_owned() };
        device.map(|device| device.raw_device().handle()).ok_or_else(lost)
    }
}

impl fmt::Debug for SharedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedDevice")
            .field("device", &self.device)
            .field("backend", &self.backend)
            .finish_non_exhaustive()
    }
}
