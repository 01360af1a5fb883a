//! The caller's own CUDA code: streams and memory of theirs here, tensors of ours there, without a copy.
//!
//! The library works in each device's primary context, the one that [`CudaContext::new`] retains too, so handles
//! and addresses go both ways. Its settings are never touched.
//!
//! ```no_run
//! use std::sync::Arc;
//! use cudarc::driver::CudaContext;
//! use tensor_offload::{Streamer, cuda};
//! # fn example(model: &Arc<tensor_offload::Model>) -> Result<(), Box<dyn std::error::Error>> {
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let compute = cuda::adopt_stream(model.residency().device(), &stream)?;
//! let mut streamer = Streamer::on(model, compute)?;
//! for layer in model.layout().layer_ids() {
//!     let guard = streamer.layer(layer)?; // `stream` now waits for the layer
//!     for tensor in guard.tensors() {
//!         let weights = cuda::slice(&tensor, &stream)?;
//!         // Launch kernels that read `weights` on `stream`.
//! #       let _ = &*weights;
//!     }
//! } // dropping the guard marks the end of the layer's use on `stream`
//! # Ok(())
//! # }
//! ```
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

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

#[cfg(doc)]
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaSlice, CudaStream};

use crate::backend::{self, BufMut, Device, Stream};
use crate::device::DeviceId;
use crate::error::{Error, Mismatch, Result};
use crate::load::TensorView;

/// A stream of the caller's, for [`Streamer::on`](crate::Streamer::on) and for copies that are to come in its order.
/// It stays open as long as what is returned lives.
///
/// # Errors
/// [`Error::Mismatch`] when the stream is not of the device's primary context; [`Error::Invalid`] when `device` is no CUDA
/// device, and for the stream that every thread has its own of (`CudaContext::per_thread_stream`): work that is queued and
/// waited for in several threads would be on several streams. [`adopt_raw_stream`] takes that one, for one thread.
pub fn adopt_stream(device: &Arc<dyn Device>, stream: &Arc<CudaStream>) -> Result<Arc<dyn Stream>> {
    let ours = cuda_device(device)?;
    if stream.context().cu_ctx().addr() != ours.raw_context().addr() {
        return Err(Mismatch::Context { device: device.id() }.into());
    }
    if stream.cu_stream().addr() == backend::cuda::PER_THREAD {
        return Err(Error::invalid(
            "the per-thread default stream is another one in every thread; adopt a stream of its own",
        ));
    }
    // SAFETY: the context was compared, and the stream is held open by its `Arc`.
    Ok(Arc::new(unsafe { ours.adopt(stream.cu_stream().cast(), Arc::clone(stream) as Arc<dyn Any + Send + Sync>) }))
}

/// As [`adopt_stream`], for a stream by its handle: another binding's, or one of the driver's own (0, 1, 2). With
/// handle 2, the stream that every thread has its own of, what is returned belongs to the calling thread: in others its
/// work is refused, and a guard that is dropped there cannot mark the end of its use.
///
/// # Safety
/// `stream` is a stream of the primary context of `device` for as long as `keep` lives.
///
/// # Errors
/// [`Error::Invalid`] when `device` is no CUDA device.
pub unsafe fn adopt_raw_stream(
    device: &Arc<dyn Device>,
    stream: CUstream,
    keep: Arc<dyn Any + Send + Sync>,
) -> Result<Arc<dyn Stream>> {
    // SAFETY: the caller's promise.
    Ok(Arc::new(unsafe { cuda_device(device)?.adopt(stream.cast(), keep) }))
}

/// The driver's handle of a stream of this library's; none when it is no CUDA stream.
pub fn stream_handle(stream: &dyn Stream) -> Option<CUstream> {
    (stream as &dyn Any).downcast_ref::<backend::cuda::CudaStream>().map(|stream| stream.handle().cast())
}

/// Where a tensor begins in device memory; none when it is not in a CUDA device's memory, or has no bytes.
///
/// The bytes are there for work that is queued, while the layer's guard lives, on the stream that its streamer works
/// on.
pub fn address(tensor: &TensorView<'_>) -> Option<CUdeviceptr> {
    placed(tensor).map(|(_, address)| address)
}

/// The device whose memory a tensor is in, and its address there.
fn placed(tensor: &TensorView<'_>) -> Option<(DeviceId, CUdeviceptr)> {
    let (buf, place) = (tensor.buf(), tensor.place());
    let memory = buf.allocation().downcast::<backend::cuda::DeviceMemory>()?;
    let inside = !place.is_empty() && place.end <= buf.bytes();
    buf.address().filter(|_| inside).map(|start| (memory.device(), start + place.start as u64))
}

/// A tensor as cudarc's own type, to be read on `stream`: the one that the layer's streamer works on.
///
/// # Errors
/// [`Error::Mismatch`] when the tensor is not in the memory of the stream's device, [`Error::Invalid`] when it has no bytes.
pub fn slice<'a>(tensor: &TensorView<'a>, stream: &Arc<CudaStream>) -> Result<TensorSlice<'a>> {
    let (what, memory) = (format!("tensor `{}`", tensor.info().name), tensor.device());
    if tensor.place().is_empty() {
        return Err(Error::invalid(format!("{what} has no bytes")));
    }
    let here = placed(tensor).filter(|(device, _)| device.index() as usize == stream.context().ordinal());
    let device = DeviceId::cuda(stream.context().ordinal() as u32);
    let (_, address) = here.ok_or(Mismatch::Memory { what, memory, device })?;
    // SAFETY: the memory holds this many bytes for as long as `'a`, which the result does not outlive; the result
    // never frees it and gives no way to write it.
    let slice = unsafe { stream.upgrade_device_ptr::<u8>(address, tensor.place().len()) };
    Ok(TensorSlice { slice: ManuallyDrop::new(slice), tensor: PhantomData })
}

/// The bytes of a tensor as a [`CudaSlice`] that does not own them.
pub struct TensorSlice<'a> {
    slice: ManuallyDrop<CudaSlice<u8>>,
    tensor: PhantomData<&'a ()>,
}

impl Deref for TensorSlice<'_> {
    type Target = CudaSlice<u8>;

    fn deref(&self) -> &CudaSlice<u8> {
        &self.slice
    }
}

impl Drop for TensorSlice<'_> {
    fn drop(&mut self) {
        // SAFETY: taken once, here; `leak` lets go of all but the memory, which is not the slice's.
        let _ = unsafe { ManuallyDrop::take(&mut self.slice) }.leak();
    }
}

impl fmt::Debug for TensorSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorSlice({} bytes)", self.slice.len())
    }
}

impl BufMut {
    /// Device memory of the caller's as a buffer, to be the destination of copies. It counts on no ledger, and is
    /// freed by whoever `keep` holds, after all copies that use it are over.
    ///
    /// # Safety
    /// `address` is that of `bytes` bytes of memory of `device` for as long as `keep` lives, and nobody else uses
    /// them but in the order of this buffer's events.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `device` is no CUDA device.
    pub unsafe fn foreign(
        device: &Arc<dyn Device>,
        address: CUdeviceptr,
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
