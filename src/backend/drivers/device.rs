//! An open device.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::Opened;
use super::context::{Context, Refusal};
use super::cuda::cufile;
use super::driver::Driver;
use super::event::DriverFence;
use super::memory::{DeviceMemory, Pool, free_and_total};
use super::peers;
use super::pinned::is_pinned_for;
use super::stream::DriverStream;
use super::verbs::{Meaning, Peers, StreamHandle};
use crate::backend::reaper::{self, Reaper};
use crate::backend::{
    BufMut, Charge, Device, Event, FileReads, Health, Kernels, Ledger, MemoryBlock, MemoryKind, Role, Route, Stream,
};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, MemoryUsage};
use crate::error::{Error, Result};

/// A device whose shared context is retained.
pub(crate) struct DriverDevice {
    info: DeviceInfo,
    ledger: Arc<Ledger>,
    pool: Option<Arc<Pool>>,
    reaper: Arc<Reaper>,
    open: Arc<Opened>,
    /// The results of the peer access checks so far.
    peers: Mutex<BTreeMap<DeviceId, Peer>>,
    files: Option<cufile::Reads>,
    context: Arc<Context>,
}

/// The result of a peer access check.
struct Peer {
    /// The peer's context at the time of the check. A peer that was closed and opened again has another one.
    context: Weak<Context>,
    /// The reason why the peer's memory cannot be reached. `None` if it can.
    unreachable: Option<String>,
}

impl DriverDevice {
    pub(super) fn open(info: DeviceInfo, driver: &Arc<Driver>, open: Arc<Opened>) -> Result<DriverDevice> {
        let context = Arc::new(Context::retain(info.id, driver)?);
        let pool = Pool::create(&context)?;
        let (free, total) = free_and_total(&context)?;
        let reaper = Arc::new(Reaper::start(&context)?);
        let ledger = Ledger::new(info.id, total);
        let info = info.free(Some(free)).opening(0);
        let files = open.cufile.as_ref().map(|settings| cufile::Reads::new(Arc::clone(settings), &context));
        Ok(DriverDevice { info, ledger, pool, reaper, open, peers: Mutex::default(), files, context })
    }

    /// Adopts a stream of the caller, which `keep` holds open.
    ///
    /// # Safety
    /// `handle` is a stream of this device's primary context for as long as `keep` lives.
    pub(crate) unsafe fn adopt(&self, handle: StreamHandle, keep: Arc<dyn Any + Send + Sync>) -> DriverStream {
        DriverStream::adopted(handle, keep, &self.context, &self.reaper, &self.open)
    }

    /// The primary context.
    #[cfg(feature = "cudarc")]
    pub(crate) fn raw_context(&self) -> super::verbs::ContextHandle {
        self.context.handle()
    }

    /// Wraps memory of the caller, which `keep` holds, as memory of this device.
    ///
    /// # Safety
    /// `address` is the address of `bytes` bytes of this device's memory for as long as `keep` lives, and nobody else uses
    /// them.
    ///
    /// # Errors
    /// None in practice: there are as many bytes as are charged.
    pub(crate) unsafe fn foreign(
        &self,
        address: u64,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<BufMut> {
        // SAFETY: the caller's promise.
        let memory = unsafe { self.foreign_memory(address, bytes, keep) };
        BufMut::new(Box::new(memory), Charge::uncounted(self.info.id, bytes as u64))
    }

    /// As [`foreign`](DriverDevice::foreign), for an allocation with a charge.
    ///
    /// # Safety
    /// As [`foreign`](DriverDevice::foreign).
    pub(crate) unsafe fn foreign_memory(
        &self,
        address: u64,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> DeviceMemory {
        DeviceMemory::foreign(&self.context, address, bytes, keep)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn pool(&self) -> Option<&Arc<Pool>> {
        self.pool.as_ref()
    }

    /// Whether copies from the memory of `peer` to this device's memory work.
    pub(super) fn reaches(&self, peer: DeviceId) -> bool {
        self.unreachable(peer).is_none()
    }

    /// The reason why this device cannot reach the memory of `peer`. `None` if it can. The driver is asked, and the copies are
    /// verified, once for each time that the peer is opened.
    fn unreachable(&self, peer: DeviceId) -> Option<String> {
        if !self.open.peers {
            return Some("the caller forbids it".to_owned());
        }
        if let Peers::Never(why) = self.context.driver().rules.peers {
            return Some(why.to_owned());
        }
        let Some(source) = self.open.get(peer.index()) else { return Some(format!("{peer} is not open")) };
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        match peers.get(&peer) {
            Some(known) if std::ptr::eq(known.context.as_ptr(), Arc::as_ptr(source.context())) => {
                known.unreachable.clone()
            }
            _ => {
                let (context, unreachable) = (Arc::downgrade(source.context()), peers::connect(self, &source).err());
                peers.insert(peer, Peer { context, unreachable: unreachable.clone() });
                unreachable
            }
        }
    }

    /// Allocates memory, from the pool or separately. Returns it with the event after which it may be used, if any.
    pub(super) fn memory_of(
        &self,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<(DeviceMemory, Option<DriverFence>), Refusal> {
        match &self.pool {
            Some(pool) if bytes > 0 && kind != MemoryKind::Whole => {
                let (memory, ready) = DeviceMemory::pooled(pool, bytes)?;
                Ok((memory, Some(ready)))
            }
            _ => DeviceMemory::plain(&self.context, bytes).map(|memory| (memory, None)),
        }
    }
}

impl Device for DriverDevice {
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
        charge.check(self.info.id)?;
        let bytes = charge.bytes() as usize;
        let mut memory = self.memory_of(bytes, kind);
        if memory.as_ref().is_err_and(|refusal| refusal.is(Meaning::OutOfMemory)) {
            // Retried after a trim: the pool may hold the missing memory for reuse.
            self.trim()?;
            memory = self.memory_of(bytes, kind);
        }
        let (memory, ready) = memory.map_err(|refusal| {
            if refusal.is(Meaning::OutOfMemory) {
                let available = free_and_total(&self.context).map_or(0, |(free, _)| free);
                let limit = self.ledger.limit();
                return Error::OutOfMemory { device: self.info.id, requested: charge.bytes(), available, limit };
            }
            self.context.error(refusal)
        })?;
        let mut buffer = BufMut::new(Box::new(memory), charge)?;
        if let Some(ready) = ready {
            buffer.after(Event::new(Arc::new(ready)));
        }
        Ok(buffer)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(DriverStream::create(&self.context, &self.reaper, &self.open, role)?))
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        let from = source.info().id;
        match from.kind() {
            DeviceKind::Cpu => Route::Direct,
            _ if from == self.info.id => Route::Direct,
            kind if kind == self.info.id.kind() => self.unreachable(from).map_or(Route::Direct, Route::Staged),
            _ => Route::Staged(format!("a stream of {} cannot read the memory of {from}", self.info.id)),
        }
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        Some(self)
    }

    fn file_reads(&self) -> Option<&dyn FileReads> {
        self.files.as_ref().map(|files| files as &dyn FileReads)
    }

    fn copies_block(&self, source: &MemoryBlock) -> bool {
        let direct = source.downcast::<DeviceMemory>().is_some() || is_pinned_for(source, self.context.driver());
        !direct
    }

    fn batched(&self, work: &mut dyn FnMut()) {
        reaper::Context::batched(&*self.context, work);
    }

    fn trim(&self) -> Result<u64> {
        self.context.trim_events();
        self.pool.as_ref().map_or(Ok(0), |pool| pool.trim())
    }

    fn health(&self) -> Health {
        self.context.lost().map_or(Health::Good, |why| Health::Lost(why.to_owned()))
    }
}

impl fmt::Debug for DriverDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverDevice").field("info", &self.info).field("ledger", &self.ledger).finish_non_exhaustive()
    }
}
