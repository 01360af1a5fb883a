//! The caller's own CUDA code: streams and memory of theirs here, tensors of ours there, without a copy.
//!
//! The library works in each device's primary context, the one that frameworks and the runtime API use too, so handles
//! and addresses go both ways. Its settings are never touched.
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
//! `cuda::cudarc` is that crate, in the version that they are of.
//!
//! **Graphs.** Work of the library's cannot be part of a graph: it waits for copies that are queued outside of it. While
//! a stream that was adopted is being captured, all such work on it is refused by
//! [`Error::Capturing`] before anything is queued, and the capture goes on. So ask for a layer
//! before the capture of its kernels begins and drop its guard after the capture has ended: a guard dropped meanwhile
//! cannot mark its use, and its slot is withdrawn. Later, launch the graph between the two. Resident weights, and the
//! slots of streamed layers, stay at their addresses for as long as the model lives, but which slot a layer gets is
//! decided each time, so a graph over streamed layers has to fit the addresses that the guard gives, or copy the weights
//! to memory of its own first. Capture with the thread-local or relaxed mode where threads of yours use the library
//! meanwhile: the global mode forbids them what it needs (allocating, asking for events); the library's own threads stay
//! out of captures.

#![expect(unsafe_code, reason = "raw handles and addresses cross the border here")]

#[cfg(feature = "cudarc")]
mod typed;

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

#[cfg(feature = "cudarc")]
pub use cudarc;
#[cfg(feature = "cudarc")]
pub use typed::{TensorSlice, adopt_stream, byte_slice, slice};

use crate::backend::{self, BufMut, Device, Stream};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::TensorView;

/// A stream of the caller's by its handle (`CUstream`, `cudaStream_t`), for [`Streamer::on`](crate::Streamer::on) and for
/// copies that are to come in its order. It may be one of the driver's own (0, 1, 2). With handle 2, the stream that every
/// thread has its own of, what is returned belongs to the calling thread: in others its work is refused, and a guard that is
/// dropped there cannot mark the end of its use.
///
/// # Safety
/// `stream` is a stream of the primary context of `device` for as long as `keep` lives.
///
/// # Errors
/// [`Error::Invalid`] when `device` is no CUDA device.
pub unsafe fn adopt_raw_stream(
    device: &Arc<dyn Device>,
    stream: *mut c_void,
    keep: Arc<dyn Any + Send + Sync>,
) -> Result<Arc<dyn Stream>> {
    // SAFETY: the caller's promise.
    Ok(Arc::new(unsafe { cuda_device(device)?.adopt(stream.cast(), keep) }))
}

/// The driver's handle of a stream of this library's (`CUstream`); none when it is no CUDA stream.
pub fn stream_handle(stream: &dyn Stream) -> Option<*mut c_void> {
    (stream as &dyn Any).downcast_ref::<backend::cuda::CudaStream>().map(|stream| stream.handle().cast())
}

/// Where a tensor begins in device memory (`CUdeviceptr`); none when it is not in a CUDA device's memory, or has no bytes.
///
/// The bytes are there for work that is queued, while the layer's guard lives, on the stream that its streamer works
/// on.
pub fn address(tensor: &TensorView<'_>) -> Option<u64> {
    placed(tensor).map(|(_, address)| address)
}

/// The device whose memory a tensor is in, and its address there.
fn placed(tensor: &TensorView<'_>) -> Option<(DeviceId, u64)> {
    let (buf, place) = (tensor.buf(), tensor.byte_range());
    let memory = buf.block().downcast::<backend::cuda::DeviceMemory>()?;
    let inside = !place.is_empty() && place.end <= buf.bytes();
    buf.address().filter(|_| inside).map(|start| (memory.device(), start + place.start as u64))
}

impl BufMut {
    /// Device memory of the caller's, by its `CUdeviceptr`, as a buffer, to be the destination of copies. It counts on no ledger, and is
    /// freed by whoever `keep` holds, after all copies that use it are over.
    ///
    /// # Safety
    /// `address` is that of `bytes` bytes of memory of `device` for as long as `keep` lives, and nobody else uses
    /// them but in the order of this buffer's events.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `device` is no CUDA device.
    pub unsafe fn from_raw(
        device: &Arc<dyn Device>,
        address: u64,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<BufMut> {
        // SAFETY: the caller's promise.
        unsafe { cuda_device(device)?.foreign(address, bytes, keep) }
    }
}

fn cuda_device(device: &Arc<dyn Device>) -> Result<&backend::cuda::CudaDevice> {
    let ours = (&**device as &dyn Any).downcast_ref();
    ours.ok_or_else(|| Error::invalid(format!("{} is no CUDA device of this library's backend", device.id())))
}
