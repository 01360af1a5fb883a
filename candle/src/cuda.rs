//! Candle's memory on CUDA devices.

#![expect(
    unsafe_code,
    reason = "the library copies into candle's memory, by its address and in the order of its stream"
)]

use std::any::Any;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, sys};
use candle_core::cuda_backend::{CudaError, CudaStorageSlice};
use candle_core::{CudaDevice, Device, Storage as CandleStorage, Tensor};
use tensor_offload::backend::{self, MemoryBlock, Storage};
use tensor_offload::load::{TensorAllocator, TensorRequest};
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{DType, DeviceId, Model, Streamer, cuda};

use crate::dtype;
use crate::error::{Error, Result, invalid};

/// The driver's handle of the per-thread default stream.
const PER_THREAD: usize = 2;

/// An allocator of candle tensors on a CUDA device, for [`ModelBuilder::allocator`](tensor_offload::ModelBuilder::allocator) and
/// [`Loader::allocator`](tensor_offload::Loader::allocator): the tensors that stay on the device, and the slots.
///
/// Each tensor that stays has a storage of its own. A slot has one for each element type, and the parameters are views of it:
/// candle's products on CUDA read a view where it is. The memory is candle's, from the pool that it allocates from.
/// What does not stay on the device is in the library's pinned memory, on the host or on other devices. A load waits until candle
/// has done what it has queued on the stream, however long that takes.
///
/// `device` has to come from [`Device::new_cuda_with_stream`]. That of [`Device::new_cuda`] works on the per-thread default
/// stream, which is another one in every thread, so nothing could be ordered before or after its work.
///
/// Candle tracks the use of its memory with events: each kernel waits for the events of its arguments and records new
/// ones. All its work is on one stream, so that tells it nothing. A program that uses no other stream of candle's can switch
/// it off (`CudaDevice::disable_event_tracking`) before it loads a model.
///
/// # Safety
/// Candle's memory is written by its address. So as long as a model loaded with this allocator or a [`Streamer`] of it lives, no
/// in-place operation of the program ([`InplaceOp1`](candle_core::InplaceOp1) and its kind) puts another storage in the
/// place of a weight's, which would free the memory. (Operations that write to the storage are no danger, and neither are
/// any of candle's own.)
///
/// # Errors
/// [`Error::NotCuda`]; [`Error::PerThreadStream`].
pub unsafe fn cuda_memory(device: &Device) -> Result<Arc<dyn TensorAllocator>> {
    let Device::Cuda(cuda) = device else { return Err(Error::NotCuda) };
    if cuda.cuda_stream().cu_stream().addr() == PER_THREAD {
        return Err(Error::PerThreadStream { device: id(cuda) });
    }
    Ok(Arc::new(CudaMemory { device: device.clone(), id: id(cuda) }))
}

/// The library's name of a device of candle's.
fn id(cuda: &CudaDevice) -> DeviceId {
    DeviceId::cuda(cuda.cuda_stream().context().ordinal() as u32)
}

/// The allocator.
struct CudaMemory {
    device: Device,
    id: DeviceId,
}

impl TensorAllocator for CudaMemory {
    fn device(&self) -> DeviceId {
        self.id
    }

    fn grouping(&self) -> TensorGrouping {
        TensorGrouping::PerType
    }

    fn supports(&self, dtype: DType) -> bool {
        dtype::of(dtype).is_some()
    }

    fn allocate(&self, request: &TensorRequest<'_>) -> tensor_offload::Result<Box<dyn Storage>> {
        let memory = CudaTensor::new(&self.device, request).map_err(|error| failed(error, request))?;
        let (address, bytes) = memory.location().ok_or_else(|| failed(Error::NotCuda, request))?;
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(memory);
        // SAFETY: candle's storage has these bytes at this address until its last tensor is dropped, since nobody replaces it
        // (the promise of `cuda_memory`), and `keep` is one of its tensors. The memory is there, for candle's stream has
        // allocated and cleared it, which was waited for. What reads it is candle's work, on the stream that `Streamed`
        // computes on.
        unsafe { cuda::storage(request.device, address, bytes, keep) }
    }
}

/// A storage of candle's on a CUDA device.
struct CudaTensor {
    /// All of it, of one dimension. `None` while it is dropped.
    tensor: Option<Tensor>,
    stream: Arc<CudaStream>,
}

impl CudaTensor {
    fn new(device: &Device, request: &TensorRequest<'_>) -> Result<CudaTensor> {
        let dtype = dtype::of(request.dtype).ok_or_else(|| {
            let reason = format!("candle has no tensors of {} on CUDA devices", request.dtype);
            tensor_offload::Error::Invalid { reason }
        })?;
        let stream = device.as_cuda_device()?.cuda_stream();
        let tensor = Tensor::zeros(request.bytes / dtype.size_in_bytes(), dtype, device)?;
        // The memory is there for other streams once candle's has come so far.
        stream.synchronize().map_err(candle_core::Error::wrap)?;
        Ok(CudaTensor { tensor: Some(tensor), stream })
    }

    /// The address and the bytes of the storage.
    fn location(&self) -> Option<(u64, usize)> {
        let (storage, _) = self.tensor.as_ref()?.storage_and_layout();
        let CandleStorage::Cuda(storage) = &*storage else { return None };
        macro_rules! of {
            ($($kind:ident),*) => {
                match &storage.slice {
                    $(CudaStorageSlice::$kind(slice) => (slice.device_ptr(&self.stream).0, slice.num_bytes()),)*
                }
            };
        }
        Some(of!(U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3, F6E2M3, F6E3M2, F4, F8E8M0))
    }
}

impl Drop for CudaTensor {
    /// Frees the memory with its context current, which threads of the library's may not have.
    fn drop(&mut self) {
        let mut before = std::ptr::null_mut();
        // SAFETY: it writes to the variable.
        let known = unsafe { sys::cuCtxGetCurrent(&mut before) }.result().is_ok();
        // SAFETY: the stream keeps its context open.
        let entered = unsafe { sys::cuCtxSetCurrent(self.stream.context().cu_ctx()) }.result().is_ok();
        drop(self.tensor.take());
        if known && entered {
            // SAFETY: it was current in this thread, and what was done since closes no context.
            let _ = unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

/// Candle's tensor of an allocation, of one dimension; `None` if it is not candle's on a CUDA device.
pub(crate) fn tensor(block: &MemoryBlock) -> Option<&Tensor> {
    cuda::owner(block)?.downcast_ref::<CudaTensor>()?.tensor.as_ref()
}

/// A stream of the library's that is candle's, for a model that is in its memory.
///
/// # Errors
/// [`Error::PerThreadStream`]; [`Error::OtherDevice`] when the model computes elsewhere.
pub(crate) fn compute(model: &Arc<Model>, cuda: &CudaDevice) -> Result<Arc<dyn backend::Stream>> {
    let (device, computes) = (id(cuda), model.residency().device().id());
    if device != computes {
        return Err(Error::OtherDevice { device, computes });
    }
    let stream = cuda.cuda_stream();
    if stream.cu_stream().addr() == PER_THREAD {
        return Err(Error::PerThreadStream { device });
    }
    // SAFETY: candle works in the primary context, as the library does, and `stream` is open as long as it is held.
    let adopted = unsafe {
        cuda::adopt_raw_stream(model.residency().device(), stream.cu_stream().cast(), Arc::clone(&stream) as Arc<_>)
    };
    Ok(adopted?)
}

/// Checks that work on this tensor is ordered with the streamer's.
///
/// # Errors
/// [`Error::OtherStream`] when the streamer computes on another stream than the tensor's device does.
pub(crate) fn check_order(streamer: &Streamer, tensor: &Tensor) -> Result<()> {
    let Device::Cuda(cuda) = tensor.device() else { return Ok(()) };
    let (theirs, ours) = (cuda.cuda_stream().cu_stream().addr(), cuda::stream_handle(&**streamer.compute()));
    match ours.is_some_and(|ours| ours.addr() == theirs) {
        true => Ok(()),
        false => Err(Error::OtherStream { device: id(cuda) }),
    }
}

/// The library's error for one of this crate's.
fn failed(error: Error, request: &TensorRequest<'_>) -> tensor_offload::Error {
    match error {
        Error::Offload(error) => error,
        Error::Candle(error) if is_out_of_memory(&error) => {
            let (device, requested) = (request.device.id(), request.bytes as u64);
            let available = request.device.memory().map_or(0, |memory| memory.available());
            let limit = request.device.ledger().limit();
            tensor_offload::Error::OutOfMemory { device, requested, available, limit }
        }
        Error::Candle(error) => invalid(&error),
        other => tensor_offload::Error::Invalid { reason: other.to_string() },
    }
}

/// Whether the driver had no memory, from candle's own error or cudarc's.
fn is_out_of_memory(error: &candle_core::Error) -> bool {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } | candle_core::Error::Context { inner, .. } => {
            is_out_of_memory(inner)
        }
        candle_core::Error::Cuda(error) => match error.downcast_ref::<CudaError>() {
            Some(CudaError::Cuda(error)) => error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            _ => false,
        },
        _ => false,
    }
}
