//! Interoperation with the caller's CUDA code: the library can use the caller's streams and memory, and the caller can use
//! the library's tensors, without a copy.
//!
//! The library works in each device's primary context, which frameworks and the runtime API use too, so both sides can use
//! the same handles and addresses. The library never changes the settings of the context.
//!
//! Drivers of CUDA's shape (HIP, CoreX, Ascend's ACL, Cambricon's CNDrv) have the same functions under modules of their own, with
//! their handles and addresses.
//!
//! ```no_run
//! use std::any::Any;
//! use std::ffi::c_void;
//! use std::sync::Arc;
//! use tensor_offload::{Model, Result, Streamer, cuda};
//!
//! /// # Safety
//! /// `stream` is a stream of the primary context of the model's compute device for as long as `keep` lives.
//! unsafe fn pass(model: &Arc<Model>, stream: *mut c_void, keep: Arc<dyn Any + Send + Sync>) -> Result<()> {
//!     // SAFETY: the caller's promise.
//!     let compute = unsafe { cuda::adopt_raw_stream(model.residency().device(), stream, keep)? };
//!     let mut streamer = Streamer::on(model, compute)?;
//!     for layer in model.layout().layer_ids() {
//!         let guard = streamer.layer(layer)?; // `stream` now waits for the layer
//!         for tensor in guard.tensors() {
//!             let weights = cuda::address(&tensor);
//!             // Launch kernels that read there on `stream`.
//! #           let _ = weights;
//!         }
//!     } // dropping the guard marks the end of the layer's use on `stream`
//!     Ok(())
//! }
//! ```
//!
//! With the feature `cudarc`, `adopt_stream` and `slice` do the same with cudarc's types, and without `unsafe`. The module
//! `cuda::cudarc` re-exports that crate, in the version of these types.
//!
//! **Graphs.** The library's work cannot be part of a graph, since it waits for copies that are queued outside the graph.
//! While an adopted stream is being captured, the library refuses work on it with [`Error::Capturing`] before anything is
//! queued, and the capture continues. So ask for a layer before the capture of its kernels begins, and drop its guard after
//! the capture has ended: a guard dropped during the capture cannot mark the end of its use, and its slot is withdrawn.
//! Later, launch the graph while you hold the layer's guard.
//!
//! Resident weights stay at their addresses for as long as the model lives, and so do the slots of streamed layers. With
//! [fixed slots](crate::Planner::fixed_slots) the k-th layer always uses slot k mod n, so one graph for each layer serves all
//! passes. Without them a layer may come in another slot, where the graph would read another layer's weights. A
//! [derived](crate::Loader::derive) model can have its resident weights elsewhere, too. So keep graphs by [`addresses`] of
//! the guard that they were captured under: the key of a later guard is equal exactly if the layer's tensors are there again, and
//! otherwise no graph is found. That covers the guard's tensors only; other memory in the graph is yours to keep. A
//! graph does not keep the model alive.
//!
//! Capture in thread-local or relaxed mode if other threads of yours use the library meanwhile: the global mode forbids
//! them calls that the library needs (allocation, event queries). The library's own threads stay out of captures.

#![expect(unsafe_code, reason = "raw handles and addresses are exchanged with the caller")]

mod key;
#[cfg(feature = "cudarc")]
mod typed;

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

#[cfg(feature = "cudarc")]
pub use cudarc;
pub use key::{LayerAddresses, addresses};
#[cfg(feature = "cudarc")]
pub use typed::{TensorSlice, adopt_stream, byte_slice, slice};

use crate::backend::{self, BufMut, Device, MemoryBlock, Storage, Stream};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::TensorView;

/// Adopts a stream of the caller by its handle (`CUstream`, `cudaStream_t`; `hipStream_t`, `aclrtStream`, `CNqueue`), for
/// [`Streamer::on`](crate::Streamer::on) and for copies in the stream's order. The driver's fixed handles (CUDA's 0, 1, 2) are
/// allowed. One of them (CUDA's 2) is the per-thread default stream, so the returned stream belongs to the calling thread: its work is refused in other threads, and a guard that is
/// dropped there cannot mark the end of its use.
///
/// # Safety
/// `stream` is a stream of the primary context of `device` for as long as `keep` lives: with HIP a stream of the device, with ACL of
/// its default context, with CNDrv of its shared one.
///
/// # Errors
/// [`Error::Invalid`] when `device` is not a device of such a driver.
pub unsafe fn adopt_raw_stream(
    device: &Arc<dyn Device>,
    stream: *mut c_void,
    keep: Arc<dyn Any + Send + Sync>,
) -> Result<Arc<dyn Stream>> {
    // SAFETY: the caller's promise.
    Ok(Arc::new(unsafe { driver_device(device)?.adopt(stream.cast(), keep) }))
}

/// The driver's handle (`CUstream`) of a stream of this library. `None` if it is no stream of such a driver.
pub fn stream_handle(stream: &dyn Stream) -> Option<*mut c_void> {
    (stream as &dyn Any).downcast_ref::<backend::drivers::DriverStream>().map(|stream| stream.handle().cast())
}

/// The device address (`CUdeviceptr`) of a tensor. `None` if it is not in the memory of such a driver's device, or has no bytes.
///
/// The bytes are available to work that is queued on the streamer's compute stream while the layer's guard lives.
pub fn address(tensor: &TensorView<'_>) -> Option<u64> {
    location(tensor).map(|(_, address)| address)
}

/// The device whose memory a tensor is in, and its address there.
fn location(tensor: &TensorView<'_>) -> Option<(DeviceId, u64)> {
    let (buf, range) = (tensor.buf(), tensor.byte_range());
    let memory = buf.block().downcast::<backend::drivers::DeviceMemory>()?;
    let inside = !range.is_empty() && range.end <= buf.bytes();
    buf.address().filter(|_| inside).map(|start| (memory.device(), start + range.start as u64))
}

impl BufMut {
    /// Creates a buffer from device memory of the caller, by its `CUdeviceptr`, for use as the destination of copies. It is not
    /// counted in any ledger. `keep` is dropped, and can free the memory, after all copies that use it are complete.
    ///
    /// # Safety
    /// `address` is the address of `bytes` bytes of memory of `device` for as long as `keep` lives, and all other uses of
    /// them follow the order of this buffer's events.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `device` is not a device of such a driver.
    pub unsafe fn from_raw(
        device: &Arc<dyn Device>,
        address: u64,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<BufMut> {
        // SAFETY: the caller's promise.
        unsafe { driver_device(device)?.foreign(address, bytes, keep) }
    }
}

/// Memory of the caller as the storage of an allocation on a CUDA device, for a
/// [`TensorAllocator`](crate::load::TensorAllocator). `keep` is dropped, and can free the memory, after all copies that use it
/// are complete; [`owner`] finds it again.
///
/// # Safety
/// `address` is the address of `bytes` bytes of memory of `device` for as long as `keep` lives. All other writes to them, and
/// all reads of what the library writes there, are work on streams whose order the library knows: the streamer's compute
/// stream, between a layer's guard and its drop.
///
/// # Errors
/// [`Error::Invalid`] when `device` is not a device of such a driver.
pub unsafe fn storage(
    device: &Arc<dyn Device>,
    address: u64,
    bytes: usize,
    keep: Arc<dyn Any + Send + Sync>,
) -> Result<Box<dyn Storage>> {
    // SAFETY: the caller's promise.
    Ok(Box::new(unsafe { driver_device(device)?.foreign_memory(address, bytes, keep) }))
}

/// What keeps an allocation alive that is memory of the caller: the `keep` of [`storage`] or [`BufMut::from_raw`]. `None` for
/// the library's own memory.
pub fn owner(block: &MemoryBlock) -> Option<&Arc<dyn Any + Send + Sync>> {
    block.downcast::<backend::drivers::DeviceMemory>()?.owner()
}

fn driver_device(device: &Arc<dyn Device>) -> Result<&backend::drivers::DriverDevice> {
    let ours = (&**device as &dyn Any).downcast_ref();
    ours.ok_or_else(|| Error::invalid(format!("{} is no device of a driver of CUDA's shape", device.id())))
}
