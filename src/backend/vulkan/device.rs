//! An open Vulkan device.

use std::fmt;
use std::sync::Arc;

use super::Candidate;
use super::arena::{Arena, VulkanMemory};
use super::context::Context;
use super::pinned::PinnedMemory;
use super::stream::VulkanStream;
use crate::backend::reaper::Reaper;
use crate::backend::{BufMut, Charge, Device, Health, Kernels, Ledger, MemoryBlock, MemoryKind, Role, Route, Stream};
use crate::device::{DeviceInfo, MemoryUsage};
use crate::error::{Error, Result};

/// A Vulkan device.
pub(super) struct VulkanDevice {
    info: DeviceInfo,
    ledger: Arc<Ledger>,
    reaper: Arc<Reaper>,
    arena: Arc<Arena>,
    context: Arc<Context>,
}

impl VulkanDevice {
    pub(super) fn open(info: DeviceInfo, candidate: &Candidate) -> Result<VulkanDevice> {
        let Candidate { instance, physical, adopted } = candidate;
        let context = Arc::new(Context::open(info.id, physical, instance, adopted.as_deref())?);
        let reaper = Arc::new(Reaper::start(&context)?);
        let (ledger, arena) = (Ledger::new(info.id, info.total), Arena::new(&context));
        Ok(VulkanDevice { info, ledger, reaper, arena, context })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The bytes that may still be taken: what the driver leaves, else what this process has not taken.
    fn free(&self) -> u64 {
        self.context.free().unwrap_or_else(|| self.ledger.limit().saturating_sub(self.ledger.charged()))
    }
}

impl Device for VulkanDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.context.call(|_| Ok(()))?;
        let (charged, reserved) = self.ledger.charged_and_reserved();
        let free = self.context.free().unwrap_or(self.info.total.saturating_sub(charged - reserved));
        Ok(MemoryUsage::new(self.info.total, free, charged, reserved))
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        charge.check(self.info.id)?;
        self.context.call(|_| Ok(()))?;
        let bytes = charge.bytes() as usize;
        let mut memory = self.arena.allocate(bytes, kind);
        if memory.as_ref().is_err_and(|refusal| refusal.is_out_of_memory()) {
            // Retried after a trim: an unused block may hold the missing memory.
            self.trim()?;
            memory = self.arena.allocate(bytes, kind);
        }
        let memory = memory.map_err(|refusal| match refusal.is_out_of_memory() {
            true => {
                let (requested, limit) = (charge.bytes(), self.ledger.limit());
                let available = self.free().min(self.arena.largest());
                Error::OutOfMemory { device: self.info.id, requested, available, limit }
            }
            false => self.context.error(refusal),
        })?;
        BufMut::new(Box::new(memory), charge)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(VulkanStream::new(&self.context, &self.reaper, role)?))
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        let from = source.info().id;
        match from.is_host() || from == self.info.id {
            true => Route::Direct,
            false => Route::Staged(format!("a stream of {} cannot read the memory of {from}", self.info.id)),
        }
    }

    fn copies_block(&self, source: &MemoryBlock) -> bool {
        let own = source.downcast::<VulkanMemory>().is_some_and(|memory| memory.context().is(&self.context));
        let pinned = || source.downcast::<PinnedMemory>().is_some_and(|memory| memory.place(&self.context).is_some());
        !own && !pinned()
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        Some(self)
    }

    fn trim(&self) -> Result<u64> {
        self.context.call(|_| Ok(()))?;
        Ok(self.arena.trim())
    }

    fn health(&self) -> Health {
        self.context.lost().map_or(Health::Good, |why| Health::Lost(why.to_owned()))
    }
}

impl fmt::Debug for VulkanDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VulkanDevice").field("info", &self.info).field("ledger", &self.ledger).finish_non_exhaustive()
    }
}
