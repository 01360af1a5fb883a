//! Device memory: from a pool of the library if the device supports pools, otherwise from the driver.

use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use super::context::{Context, Refusal};
use super::cuda::calls::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, Access, Location, POOL_RESERVED_NOW, PoolCalls, PoolHandle, PoolProperties,
};
use super::event::DriverFence;
use super::stream::RawStream;
use super::verbs::{Address, Outcome};
use crate::backend::Storage;
use crate::error::Result;

/// A pool and the stream that orders its allocations and frees.
pub(super) struct Pool {
    handle: PoolHandle,
    stream: Arc<RawStream>,
    context: Arc<Context>,
    /// Keeps an allocation and the event after it together.
    order: Mutex<()>,
}

// SAFETY: the driver allows any thread to use a pool.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Creates a pool on the device of `context`. `None` if the device does not support pools or the driver refuses, since
    /// memory can be allocated without one.
    ///
    /// # Errors
    /// When the device is lost.
    pub(super) fn create(context: &Arc<Context>) -> Result<Option<Arc<Pool>>> {
        let pools = context.driver().pools.as_ref();
        if !pools.is_some_and(|pools| pools.are_supported(context.place().device)) {
            return Ok(None);
        }
        let refused = |refusal| {
            let error = context.error(refusal);
            tracing::warn!(device = %context.id(), %error, "no memory pool; memory is allocated plainly");
            context.lost().map_or(Ok(None), |_| Err(error))
        };
        let stream = match RawStream::create(context, None) {
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
        // SAFETY: the properties and the handle outlive the call.
        let create = |pools: &PoolCalls| unsafe { pools.create(&raw mut handle, &raw const properties) };
        match pooled(context, create) {
            Ok(()) => {
                Ok(Some(Arc::new(Pool { handle, stream, context: Arc::clone(context), order: Mutex::default() })))
            }
            Err(refusal) => refused(refusal),
        }
    }

    /// Returns unused memory to the system. Returns the number of bytes released.
    pub(super) fn trim(&self) -> Result<u64> {
        let context = &self.context;
        // SAFETY: the stream belongs to this pool and is alive.
        context.call(|verbs| unsafe { verbs.stream_synchronize(self.stream.handle()) })?;
        let before = self.reserved()?;
        // SAFETY: the pool is alive.
        let trimmed = pooled(context, |pools| unsafe { pools.trim(self.handle, 0) });
        trimmed.map_err(|refusal| context.error(refusal))?;
        Ok(before.saturating_sub(self.reserved()?))
    }

    /// Grants the device number `to` access to this pool's memory.
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

/// Runs pool calls, which are available wherever a pool was created.
fn pooled(context: &Context, calls: impl FnOnce(&PoolCalls) -> Outcome) -> Result<(), Refusal> {
    match &context.driver().pools {
        Some(pools) => context.raw(|_| calls(pools)),
        None => Ok(()),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // All memory has been freed, since it holds the pool. Frees run in the stream's order, so the stream is waited for.
        // SAFETY: the stream belongs to this pool.
        let idle = self.context.raw(|verbs| unsafe { verbs.stream_synchronize(self.stream.handle()) });
        if idle.is_ok() {
            // SAFETY: the pool is destroyed once, here.
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

/// The source of device memory.
enum Origin {
    Pool(Arc<Pool>),
    /// An allocation of the driver, or of zero bytes.
    Driver,
    /// The caller's memory, which is freed when `keep` is dropped.
    Caller {
        keep: Arc<dyn Any + Send + Sync>,
    },
}

impl DeviceMemory {
    /// Allocates from the pool. Returns the memory and the event after which it may be used.
    pub(super) fn pooled(pool: &Arc<Pool>, bytes: usize) -> Result<(DeviceMemory, DriverFence), Refusal> {
        let context = &pool.context;
        let _entered = context.enter()?;
        let ready = DriverFence::new(context, Vec::new())?;
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

    /// Allocates from the driver. The memory is usable immediately. Nothing is allocated for zero bytes.
    pub(super) fn plain(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory, Refusal> {
        // SAFETY: nobody reads the memory before it is written.
        let allocate = || context.raw(|verbs| unsafe { verbs.allocate(bytes) });
        let address = if bytes > 0 { allocate()? } else { 0 };
        Ok(DeviceMemory { address, bytes, context: Arc::clone(context), origin: Origin::Driver })
    }

    /// Wraps the caller's memory, which `keep` holds.
    pub(super) fn foreign(
        context: &Arc<Context>,
        address: Address,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> DeviceMemory {
        DeviceMemory { address, bytes, context: Arc::clone(context), origin: Origin::Caller { keep } }
    }

    pub(super) fn device_address(&self) -> Address {
        self.address
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What keeps the caller's memory alive.
    pub(crate) fn owner(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        match &self.origin {
            Origin::Caller { keep } => Some(keep),
            Origin::Pool(_) | Origin::Driver => None,
        }
    }

    /// The device of the memory.
    pub(crate) fn device(&self) -> crate::device::DeviceId {
        self.context.id()
    }
}

// SAFETY: the driver gave the memory to this value alone, or the caller did, with the same promise.
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
        // Memory is dropped only after all its uses were observed to be complete, so it can be freed now.
        let freed = match (&self.origin, self.address) {
            (_, 0) | (Origin::Caller { .. }, _) => Ok(()),
            (Origin::Pool(pool), address) => {
                // SAFETY: allocated by `pooled` from this pool, freed once.
                pooled(&self.context, |pools| unsafe { pools.free(address, pool.stream.handle()) })
            }
            // SAFETY: allocated by `plain`, freed once.
            (Origin::Driver, address) => self.context.raw(|verbs| unsafe { verbs.free(address) }),
        };
        if let Err(Refusal::Code(failure)) = freed {
            tracing::warn!(device = %self.context.id(), %failure, "device memory could not be freed");
        }
    }
}

/// The free and total bytes of the device.
pub(super) fn free_and_total(context: &Context) -> Result<(u64, u64)> {
    context.call(|verbs| verbs.memory_info())
}
