//! Interoperation with the types of the crate cudarc, whose owners keep adopted objects alive.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};

#[cfg(doc)]
use super::adopt_raw_stream;
use super::{driver_device, location};
use crate::backend::{self, Device, Stream};
use crate::device::{DeviceId, DeviceKind};
use crate::dtype::Element;
use crate::error::{Error, Mismatch, Result};
use crate::load::TensorView;

/// Adopts a stream of the caller, for [`Streamer::on`](crate::Streamer::on) and for copies in the stream's order. It stays
/// open as long as the returned stream lives.
///
/// ```no_run
/// use std::sync::Arc;
/// use tensor_offload::cuda::cudarc::driver::CudaContext;
/// use tensor_offload::{Streamer, cuda};
/// # fn example(model: &Arc<tensor_offload::Model>) -> Result<(), Box<dyn std::error::Error>> {
/// let stream = CudaContext::new(0)?.new_stream()?;
/// let compute = cuda::adopt_stream(model.residency().device(), &stream)?;
/// let mut streamer = Streamer::on(model, compute)?;
/// for layer in model.layout().layer_ids() {
///     let guard = streamer.layer(layer)?; // `stream` now waits for the layer
///     for tensor in guard.tensors() {
///         let weights = cuda::slice::<half::bf16>(&tensor, &stream)?;
///         // Launch kernels that read `weights`, a `CudaSlice<bf16>`, on `stream`.
/// #       let _ = &*weights;
///     }
/// } // dropping the guard marks the end of the layer's use on `stream`
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Mismatch`] when the stream does not belong to the device's primary context; [`Error::Invalid`] when `device` is
/// not a CUDA device, and for the per-thread default stream (`CudaContext::per_thread_stream`): work queued and waited for in
/// several threads would be on several streams. [`adopt_raw_stream`] accepts that stream, for one thread.
pub fn adopt_stream(device: &Arc<dyn Device>, stream: &Arc<CudaStream>) -> Result<Arc<dyn Stream>> {
    let ours = driver_device(device)?;
    if device.id().kind() != DeviceKind::Cuda {
        return Err(Error::invalid(format!("{} is no CUDA device, as cudarc's streams are", device.id())));
    }
    if stream.context().cu_ctx().addr() != ours.raw_context().addr() {
        return Err(Mismatch::Context { device: device.id() }.into());
    }
    if stream.cu_stream().addr() == backend::drivers::PER_THREAD {
        return Err(Error::invalid(
            "the per-thread default stream is another one in every thread; adopt a stream of its own",
        ));
    }
    // SAFETY: the context was compared, and the stream is held open by its `Arc`.
    Ok(Arc::new(unsafe { ours.adopt(stream.cu_stream().cast(), Arc::clone(stream) as Arc<dyn Any + Send + Sync>) }))
}

/// A view of a tensor as cudarc's slice type, for reading on `stream`, the streamer's compute stream.
///
/// # Errors
/// [`Error::Mismatch`] when the tensor is not in the memory of the stream's device, or its elements have another type than
/// `T`; [`Error::Invalid`] when it has no bytes.
pub fn slice<'a, T: Element>(tensor: &TensorView<'a>, stream: &Arc<CudaStream>) -> Result<TensorSlice<'a, T>> {
    tensor.check_element::<T>()?;
    view(tensor, stream)
}

/// A view of the bytes of a tensor of any type, for example of fp8 weights; see [`slice()`].
///
/// # Errors
/// [`Error::Mismatch`] when the tensor is not in the memory of the stream's device; [`Error::Invalid`] when it has no bytes.
pub fn byte_slice<'a>(tensor: &TensorView<'a>, stream: &Arc<CudaStream>) -> Result<TensorSlice<'a, u8>> {
    view(tensor, stream)
}

/// A view of a tensor as values of a type for which all bits are valid.
fn view<'a, T: Element>(tensor: &TensorView<'a>, stream: &Arc<CudaStream>) -> Result<TensorSlice<'a, T>> {
    let (what, memory) = (format!("tensor `{}`", tensor.info().name), tensor.device());
    if tensor.byte_range().is_empty() {
        return Err(Error::invalid(format!("{what} has no bytes")));
    }
    let device = DeviceId::cuda(stream.context().ordinal() as u32);
    let found = location(tensor).filter(|(of, _)| *of == device);
    let (_, address) = found.ok_or(Mismatch::Memory { what, memory, device })?;
    // SAFETY: the memory holds this many bytes during `'a`, which the result does not outlive; the result never frees the
    // memory and cannot be used to write it. A tensor begins at a multiple of its element's size, and any bits are valid
    // values of an `Element`.
    let slice = unsafe { stream.upgrade_device_ptr::<T>(address, tensor.size() / size_of::<T>()) };
    Ok(TensorSlice { slice: ManuallyDrop::new(slice), tensor: PhantomData })
}

/// A tensor as a [`CudaSlice`] that does not own its memory.
pub struct TensorSlice<'a, T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    tensor: PhantomData<&'a ()>,
}

impl<T> Deref for TensorSlice<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> Drop for TensorSlice<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here; `leak` releases everything but the memory, which the slice does not own.
        let _ = unsafe { ManuallyDrop::take(&mut self.slice) }.leak();
    }
}

impl<T> fmt::Debug for TensorSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorSlice({} x {})", self.slice.len(), std::any::type_name::<T>())
    }
}
