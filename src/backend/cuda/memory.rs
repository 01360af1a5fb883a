//! Device memory: from a pool of the library's own where the device has pools, from the driver otherwise.

use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use super::calls::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, Access, Address, Attribute, Calls, Location, Outcome, POOL_RESERVED_NOW,
    PoolCalls, PoolHandle, PoolProperties,
};
use super::context::{Context, Refusal};
use super::event::CudaFence;
use super::stream::RawStream;
use crate::backend::Storage;
use crate::error::Result;

/// A pool and the stream in whose order memory comes from it and goes back to it.
pub(super) struct Pool {
    handle: PoolHandle,
    stream: Arc<RawStream>,
    context: Arc<Context>,
    /// MemoryBlock and the event after it belong together.
    order: Mutex<()>,
}

// SAFETY: the driver allows any thread to use a pool.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool on the device of `context`; none where the device has none or the driver refuses one, since memory can be
    /// had without.
    ///
    /// # Errors
    /// When the device is lost.
    pub(super) fn create(context: &Arc<Context>) -> Result<Option<Arc<Pool>>> {
        let driver = context.driver();
        let supported = driver.pools.is_some() && driver.attribute(context.device(), Attribute::MemoryPools) != 0;
        if !supported {
            return Ok(None);
        }
        let refused = |refusal| {
            let error = context.error(refusal);
            tracing::warn!(device = %context.id(), %error, "no memory pool; memory is allocated plainly");
            context.lost().map_or(Ok(None), |_| Err(error))
        };
        let stream = match RawStream::create(context, 0) {
            Ok(stream) => Arc::new(stream),
            Err(refusal) => return refused(refusal),
        };
        let properties = PoolProperties {
            allocation: ALLOCATION_PINNED,
            handles: 0,
            location: Location::device(context.id().index()),
            security: std::ptr::null_mut(),
            reserved: [0; 64],
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the properties and the handle live through the call.
        let create = |pools: &PoolCalls| unsafe { pools.create(&raw mut handle, &raw const properties) };
        match pooled(context, create) {
            Ok(()) => {
                Ok(Some(Arc::new(Pool { handle, stream, context: Arc::clone(context), order: Mutex::default() })))
            }
            Err(refusal) => refused(refusal),
        }
    }

    /// Gives unused memory back to the system; the bytes given back.
    pub(super) fn trim(&self) -> Result<u64> {
        let context = &self.context;
        // SAFETY: the stream is this pool's own, and alive.
        context.call(|calls| unsafe { calls.stream_synchronize(self.stream.handle()) })?;
        let before = self.reserved()?;
        // SAFETY: the pool is alive.
        let trimmed = pooled(context, |pools| unsafe { pools.trim(self.handle, 0) });
        trimmed.map_err(|refusal| context.error(refusal))?;
        Ok(before.saturating_sub(self.reserved()?))
    }

    /// Lets the device of `to` use this pool's memory.
    pub(super) fn grant(&self, to: u32) -> Result<()> {
        let access = Access { location: Location::device(to), flags: ACCESS_READ_WRITE };
        // SAFETY: one descriptor, alive during the call.
        let set = pooled(&self.context, |pools| unsafe { pools.set_access(self.handle, &raw const access, 1) });
        set.map_err(|refusal| self.context.error(refusal))
    }

    fn reserved(&self) -> Result<u64> {
        let mut bytes = 0u64;
        let value = (&raw mut bytes).cast::<c_void>();
        // SAFETY: this attribute is a 64-bit integer, and `bytes` is one.
        let get = pooled(&self.context, |pools| unsafe { pools.attribute(self.handle, POOL_RESERVED_NOW, value) });
        get.map_err(|refusal| self.context.error(refusal))?;
        Ok(bytes)
    }
}

/// Runs calls of pools, which are there where a pool was made.
fn pooled(context: &Context, calls: impl FnOnce(&PoolCalls) -> Outcome) -> Result<(), Refusal> {
    match &context.driver().pools {
        Some(pools) => context.raw(|_: &Calls| calls(pools)),
        None => Ok(()),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // All memory has gone back: it holds the pool. Freeing is in the stream's order, so that order is waited for.
        // SAFETY: the stream is this pool's own.
        let idle = self.context.raw(|calls| unsafe { calls.stream_synchronize(self.stream.handle()) });
        if idle.is_ok() {
            // SAFETY: the pool is destroyed here and once.
            let _ = pooled(&self.context, |pools| unsafe { pools.destroy(self.handle) });
        }
    }
}

/// One allocation on a device.
pub(crate) struct DeviceMemory {
    address: Address,
    bytes: usize,
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
        let context = &pool.context;
        let _entered = context.enter()?;
        let ready = CudaFence::new(context, Vec::new())?;
        let _order = pool.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut address = 0;
        // SAFETY: pool and stream are alive; nobody reads the memory before it is written.
        let allocate =
            |pools: &PoolCalls| unsafe { pools.allocate(&raw mut address, bytes, pool.handle, pool.stream.handle()) };
        pooled(context, allocate)?;
        let origin = Origin::Pool(Arc::clone(pool));
        let memory = DeviceMemory { address, bytes, context: Arc::clone(context), origin };
        ready.record(&pool.stream)?;
        Ok((memory, ready))
    }

    /// An allocation of the driver's own, usable at once. Nothing is allocated for no bytes.
    pub(super) fn plain(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory, Refusal> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: nobody reads the memory before it is written.
            context.raw(|calls| unsafe { calls.allocate(&raw mut address, bytes) })?;
        }
        Ok(DeviceMemory { address, bytes, context: Arc::clone(context), origin: Origin::Driver })
    }

    /// Memory of the caller's, held by `keep`.
    pub(super) fn foreign(
        context: &Arc<Context>,
        address: Address,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> DeviceMemory {
        DeviceMemory { address, bytes, context: Arc::clone(context), origin: Origin::Caller { _keep: keep } }
    }

    pub(super) fn device_address(&self) -> Address {
        self.address
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The device that it is on.
    pub(crate) fn device(&self) -> crate::device::DeviceId {
        self.context.id()
    }
}

// SAFETY: the driver gave the memory to this value alone, or the caller, who promised the same.
unsafe impl Storage for DeviceMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn address(&self) -> Option<u64> {
        (self.address != 0).then_some(self.address)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Memory is dropped when every use of it has been seen to be over, so freeing it now is after them all.
        let freed = match (&self.origin, self.address) {
            (_, 0) | (Origin::Caller { .. }, _) => Ok(()),
            (Origin::Pool(pool), address) => {
                // SAFETY: allocated by `pooled` from this pool, freed once.
                pooled(&self.context, |pools| unsafe { pools.free(address, pool.stream.handle()) })
            }
            // SAFETY: allocated by `plain`, freed once.
            (Origin::Driver, address) => self.context.raw(|calls| unsafe { calls.free(address) }),
        };
        if let Err(Refusal::Code(failure)) = freed {
            tracing::warn!(device = %self.context.id(), %failure, "device memory could not be freed");
        }
    }
}

/// Free and total bytes of the device.
pub(super) fn free_and_total(context: &Context) -> Result<(u64, u64)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers are to living numbers.
    context.call(|calls| unsafe { calls.memory_info(&raw mut free, &raw mut total) })?;
    Ok((free as u64, total as u64))
}
