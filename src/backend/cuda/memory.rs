//! Device memory: from a pool of the library's own where the device has pools, from the driver otherwise.

use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{self, mem_pool};
use cudarc::driver::sys;

use super::context::{Context, Refusal};
use super::event::CudaFence;
use crate::backend::Storage;
use crate::error::Result;

/// A pool and the stream in whose order memory comes from it and goes back to it.
pub(super) struct Pool {
    handle: sys::CUmemoryPool,
    stream: sys::CUstream,
    context: Arc<Context>,
    /// Allocation and the event after it belong together.
    order: Mutex<()>,
}

// SAFETY: the driver allows any thread to use a pool and a stream.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool on the device of `context`; none where the device has none.
    pub(super) fn create(context: &Arc<Context>) -> Result<Option<Arc<Pool>>> {
        use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED as POOLS;
        // SAFETY: the context's device comes from the driver.
        let supported = context
            .call("cuDeviceGetAttribute", || unsafe { result::device::get_attribute(context.device(), POOLS) })?;
        if supported == 0 {
            return Ok(None);
        }
        // SAFETY: the structure is plain integers and pointers, for all of which zero is the documented default.
        let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location = location(context.id().index());
        let stream = create_stream(context, 0)?;
        // SAFETY: the properties are filled in above and live through the call.
        let handle = context.raw("cuMemPoolCreate", || unsafe { mem_pool::create(&raw const props) });
        match handle {
            Ok(handle) => {
                Ok(Some(Arc::new(Pool { handle, stream, context: Arc::clone(context), order: Mutex::default() })))
            }
            Err(refusal) => {
                destroy_stream(context, stream);
                Err(context.error(refusal))
            }
        }
    }

    /// Gives unused memory back to the system; the bytes given back.
    pub(super) fn trim(&self) -> Result<u64> {
        let context = &self.context;
        // SAFETY: the stream and the pool are this pool's own, and alive.
        context.call("cuStreamSynchronize", || unsafe { result::stream::synchronize(self.stream) })?;
        let before = self.reserved()?;
        // SAFETY: as above.
        context.call("cuMemPoolTrimTo", || unsafe { mem_pool::trim_to(self.handle, 0) })?;
        Ok(before.saturating_sub(self.reserved()?))
    }

    /// Lets the device of `to` use this pool's memory.
    pub(super) fn grant(&self, to: u32) -> Result<()> {
        let access = sys::CUmemAccessDesc {
            location: location(to),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one descriptor, alive during the call.
        let set = || unsafe { sys::cuMemPoolSetAccess(self.handle, &raw const access, 1) }.result();
        self.context.call("cuMemPoolSetAccess", set)
    }

    fn reserved(&self) -> Result<u64> {
        let mut bytes = 0u64;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        // SAFETY: this attribute is a 64-bit integer, and `bytes` is one.
        let get = || unsafe { mem_pool::get_attribute(self.handle, attribute, (&raw mut bytes).cast::<c_void>()) };
        self.context.call("cuMemPoolGetAttribute", get)?;
        Ok(bytes)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // All memory has gone back: it holds the pool. Freeing is in the stream's order, so that order is waited for.
        let end = || {
            // SAFETY: stream and pool are this pool's own; the pool is destroyed here and once.
            unsafe { result::stream::synchronize(self.stream).and_then(|()| mem_pool::destroy(self.handle)) }
        };
        let _ = self.context.raw("cuMemPoolDestroy", end);
        destroy_stream(&self.context, self.stream);
    }
}

/// One allocation on a device.
pub(crate) struct DeviceMemory {
    address: sys::CUdeviceptr,
    context: Arc<Context>,
    origin: Origin,
}

/// Where device memory comes from and goes back to.
enum Origin {
    Pool(Arc<Pool>),
    /// An allocation of the driver's own, or of no bytes.
    Driver,
    /// The caller's; freed by whoever this holds.
    Caller {
        _keep: Arc<dyn Any + Send + Sync>,
    },
}

impl DeviceMemory {
    /// Memory from the pool, and the event after which it may be used.
    pub(super) fn pooled(pool: &Arc<Pool>, bytes: usize) -> Result<(DeviceMemory, CudaFence), Refusal> {
        let _order = pool.order.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: pool and stream are alive; nobody reads the memory before it is written.
        let address = pool
            .context
            .raw("cuMemAllocFromPoolAsync", || unsafe { mem_pool::alloc_async(pool.handle, bytes, pool.stream) })?;
        let memory =
            DeviceMemory { address, context: Arc::clone(&pool.context), origin: Origin::Pool(Arc::clone(pool)) };
        let ready = CudaFence::record(&pool.context, pool.stream)?;
        Ok((memory, ready))
    }

    /// An allocation of the driver's own, usable at once. Nothing is allocated for no bytes.
    pub(super) fn plain(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory, Refusal> {
        let address = match bytes {
            0 => 0,
            // SAFETY: nobody reads the memory before it is written.
            _ => context.raw("cuMemAlloc", || unsafe { result::malloc_sync(bytes) })?,
        };
        Ok(DeviceMemory { address, context: Arc::clone(context), origin: Origin::Driver })
    }

    /// Memory of the caller's, held by `keep`.
    pub(super) fn foreign(context: &Arc<Context>, address: u64, keep: Arc<dyn Any + Send + Sync>) -> DeviceMemory {
        DeviceMemory { address, context: Arc::clone(context), origin: Origin::Caller { _keep: keep } }
    }

    pub(super) fn device_address(&self) -> sys::CUdeviceptr {
        self.address
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Storage for DeviceMemory {
    fn address(&self) -> Option<u64> {
        (self.address != 0).then_some(self.address)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Memory is dropped when every use of it has been seen to be over, so freeing it now is after them all.
        let free = || match (&self.origin, self.address) {
            (_, 0) | (Origin::Caller { .. }, _) => Ok(()),
            // SAFETY: allocated by `pooled` from this pool, freed once.
            (Origin::Pool(pool), address) => unsafe { result::free_async(address, pool.stream) },
            // SAFETY: allocated by `plain`, freed once.
            (Origin::Driver, address) => unsafe { result::free_sync(address) },
        };
        if let Err(Refusal::Code(call, error)) = self.context.raw("cuMemFree", free) {
            tracing::warn!(device = %self.context.id(), call, ?error, "device memory could not be freed");
        }
    }
}

/// A stream that does not wait for the legacy default stream.
pub(super) fn create_stream(context: &Arc<Context>, priority: i32) -> Result<sys::CUstream> {
    let kind = result::stream::StreamKind::NonBlocking;
    context.call("cuStreamCreateWithPriority", || result::stream::create_with_priority(kind, priority))
}

/// Lets a stream go; the driver ends it when its work is done.
pub(super) fn destroy_stream(context: &Arc<Context>, stream: sys::CUstream) {
    // SAFETY: created by `create_stream`, destroyed once.
    let _ = context.raw("cuStreamDestroy", || unsafe { result::stream::destroy(stream) });
}

fn location(device: u32) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: i32::try_from(device).unwrap_or(i32::MAX),
    }
}

/// Free and total bytes of the device.
pub(super) fn free_and_total(context: &Context) -> Result<(u64, u64)> {
    let (free, total) = context.call("cuMemGetInfo", result::mem_get_info)?;
    Ok((free as u64, total as u64))
}
