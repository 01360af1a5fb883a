//! An open CUDA device.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::Opened;
use super::context::{Context, Refusal};
use super::driver::Driver;
use super::memory::{DeviceMemory, Pool, free_and_total};
use super::peers;
use super::reaper::Reaper;
use super::stream::{Adopted, CudaStream};
use crate::backend::{
    Allocation, BufMut, Charge, Device, Event, Health, Kernels, Ledger, MemoryKind, Role, Route, Stream,
};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, MemoryUsage};
use crate::error::{Error, Result};

/// A CUDA device whose primary context is retained.
pub(crate) struct CudaDevice {
    info: DeviceInfo,
    ledger: Arc<Ledger>,
    pool: Option<Arc<Pool>>,
    reaper: Arc<Reaper>,
    open: Arc<Opened>,
    driver: Arc<Driver>,
    /// Peer -> why its memory cannot be reached, or none where it can; found out when first asked.
    peers: Mutex<BTreeMap<DeviceId, Option<String>>>,
    context: Arc<Context>,
}

impl CudaDevice {
    pub(super) fn open(info: DeviceInfo, driver: &Arc<Driver>, open: Arc<Opened>) -> Result<CudaDevice> {
        let context = Arc::new(Context::retain(info.id)?);
        let pool = if driver.pools { Pool::create(&context)? } else { None };
        let (free, total) = free_and_total(&context)?;
        let reaper = Arc::new(Reaper::start(&context, driver)?);
        let ledger = Ledger::new(info.id, total);
        let info = info.free(Some(free)).opening(0);
        let (peers, driver) = (Mutex::default(), Arc::clone(driver));
        Ok(CudaDevice { info, ledger, pool, reaper, open, driver, peers, context })
    }

    /// A stream of the caller's as one of this device; `keep` holds it open.
    ///
    /// # Safety
    /// `handle` is a stream of this device's primary context for as long as `keep` lives.
    pub(crate) unsafe fn adopt(&self, handle: sys::CUstream, keep: Arc<dyn Any + Send + Sync>) -> CudaStream {
        let adopted = Adopted { _keep: keep, tells_captures: self.driver.tells_captures };
        CudaStream::adopted(handle, adopted, &self.context, &self.reaper, &self.open)
    }

    /// The primary context.
    pub(crate) fn raw_context(&self) -> sys::CUcontext {
        self.context.handle()
    }

    /// Memory of the caller's as memory of this device; `keep` holds it.
    ///
    /// # Safety
    /// `address` is that of `bytes` bytes of this device's memory for as long as `keep` lives, and nobody else
    /// uses them.
    pub(crate) unsafe fn foreign(&self, address: u64, bytes: usize, keep: Arc<dyn Any + Send + Sync>) -> BufMut {
        let memory = DeviceMemory::foreign(&self.context, address, keep);
        BufMut::new(Box::new(memory), Charge::uncounted(self.info.id, bytes as u64))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn missing_kernel_call(&self) -> Option<&'static str> {
        self.driver.missing_kernel_call
    }

    pub(super) fn pool(&self) -> Option<&Arc<Pool>> {
        self.pool.as_ref()
    }

    /// Whether copies from the memory of `peer` to this device's are known to work.
    pub(super) fn reaches(&self, peer: DeviceId) -> bool {
        self.unreachable(peer).is_none()
    }

    /// Why this device cannot reach the memory of `peer`; asked of the driver and tried out once.
    fn unreachable(&self, peer: DeviceId) -> Option<String> {
        if !self.open.peers {
            return Some("the caller forbids it".to_owned());
        }
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let find = || match self.open.get(peer.index()) {
            Some(source) => peers::connect(self, &source).err(),
            None => Some(format!("{peer} is not open")),
        };
        peers.entry(peer).or_insert_with(find).clone()
    }

    /// Memory from the pool, or of its own, with the event after which it may be used.
    fn memory_of(&self, bytes: usize, kind: MemoryKind) -> Result<(DeviceMemory, Option<Event>), Refusal> {
        match &self.pool {
            Some(pool) if bytes > 0 && kind != MemoryKind::Whole => {
                let (memory, ready) = DeviceMemory::pooled(pool, bytes)?;
                Ok((memory, Some(Event::new(Arc::new(ready)))))
            }
            _ => DeviceMemory::plain(&self.context, bytes).map(|memory| (memory, None)),
        }
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    fn memory(&self) -> Result<MemoryUsage> {
        let (free, total) = free_and_total(&self.context)?;
        Ok(MemoryUsage::new(total, free, self.ledger.charged(), self.ledger.reserved()))
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        let bytes = charge.bytes() as usize;
        let mut memory = self.memory_of(bytes, kind);
        if memory.as_ref().is_err_and(|refusal| refusal.is_out_of_memory()) {
            // What the pool keeps for reuse may be what is missing.
            self.trim()?;
            memory = self.memory_of(bytes, kind);
        }
        let (memory, ready) = memory.map_err(|refusal| {
            if refusal.is_out_of_memory() {
                let available = free_and_total(&self.context).map_or(0, |(free, _)| free);
                let limit = self.ledger.limit();
                return Error::OutOfMemory { device: self.info.id, requested: charge.bytes(), available, limit };
            }
            self.context.error(refusal)
        })?;
        let mut buffer = BufMut::new(Box::new(memory), charge);
        if let Some(ready) = ready {
            buffer.after(ready);
        }
        Ok(buffer)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::create(&self.context, &self.reaper, &self.open, role)?))
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        let from = source.info().id;
        match from.kind() {
            DeviceKind::Cpu => Route::Direct,
            DeviceKind::Cuda if from == self.info.id => Route::Direct,
            DeviceKind::Cuda => self.unreachable(from).map_or(Route::Direct, Route::Staged),
            _ => Route::Staged(format!("a CUDA stream cannot read the memory of {from}")),
        }
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        Some(self)
    }

    fn copies_hold_up(&self, source: &Allocation) -> bool {
        let straight = source.downcast::<DeviceMemory>().is_some() || source.storage().pinned();
        !straight
    }

    fn trim(&self) -> Result<u64> {
        self.context.trim_events();
        self.pool.as_ref().map_or(Ok(0), |pool| pool.trim())
    }

    fn health(&self) -> Health {
        self.context.lost().map_or(Health::Good, |why| Health::Lost(why.to_owned()))
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("info", &self.info).field("ledger", &self.ledger).finish_non_exhaustive()
    }
}
