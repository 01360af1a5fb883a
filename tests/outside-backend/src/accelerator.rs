//! An open accelerator.

use std::sync::{Arc, OnceLock};

use tensor_offload::backend::{BufMut, Charge, Device, Health, Ledger, MemoryKind, Role, Route, Stream};
use tensor_offload::device::{DeviceInfo, MemoryUsage};
use tensor_offload::error::Mismatch;
use tensor_offload::{DeviceId, Error, Result};

use crate::Loopback;
use crate::memory::DeviceMemory;
use crate::queue::Queue;

/// An accelerator. Its queues keep it, so it is one that can be cloned.
#[derive(Clone, Debug)]
pub(crate) struct Accelerator(Arc<State>);

#[derive(Debug)]
struct State {
    info: DeviceInfo,
    ledger: Arc<Ledger>,
    /// The reason why it was lost.
    lost: OnceLock<String>,
    /// The process that has it. A fork has neither the threads of its queues nor, on real hardware, the driver's state.
    process: u32,
}

impl Accelerator {
    pub(crate) fn new(index: u32, total: u64) -> Accelerator {
        let id = Loopback::id(index);
        let info = DeviceInfo::new(id, total).name("memory and threads of this process");
        let (ledger, process) = (Ledger::new(id, total), std::process::id());
        Accelerator(Arc::new(State { info, ledger, lost: OnceLock::new(), process }))
    }

    pub(crate) fn id(&self) -> DeviceId {
        self.0.info.id
    }

    /// The facts about the accelerator with the memory that is free now.
    pub(crate) fn info_now(&self) -> DeviceInfo {
        self.0.info.clone().free(Some(self.usage().free))
    }

    /// What is free is what is not allocated. A driver is asked: other processes take memory, too.
    fn usage(&self) -> MemoryUsage {
        let (total, (charged, reserved)) = (self.0.info.total, self.0.ledger.charged_and_reserved());
        MemoryUsage::new(total, total - (charged - reserved), charged, reserved)
    }

    pub(crate) fn lose(&self, why: &str) {
        // The first reason stays.
        let _ = self.0.lost.set(why.to_owned());
    }

    /// Checks that the accelerator can be used, here and now.
    pub(crate) fn check(&self) -> Result<()> {
        let (parent, child) = (self.0.process, std::process::id());
        match self.0.lost.get() {
            _ if parent != child => Err(Error::Forked { parent, child }),
            Some(why) => Err(Error::DeviceLost { device: self.id(), why: why.clone() }),
            None => Ok(()),
        }
    }
}

impl Device for Accelerator {
    fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    fn ledger(&self) -> &Arc<Ledger> {
        &self.0.ledger
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.check()?;
        Ok(self.usage())
    }

    /// The ledger has refused by now what the accelerator could never hold. Here only the system that lends its memory can refuse.
    fn allocate(&self, charge: Charge, _kind: MemoryKind) -> Result<BufMut> {
        self.check()?;
        let (device, requested) = (self.id(), charge.bytes());
        if charge.device() != device {
            return Err(Mismatch::Charge { device, charge: charge.device() }.into());
        }
        match DeviceMemory::new(requested) {
            Some(memory) => BufMut::new(Box::new(memory), charge),
            None => Err(Error::OutOfMemory { device, requested, available: 0, limit: self.0.ledger.limit() }),
        }
    }

    fn stream(&self, _role: Role) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(Queue::start(self.clone())?))
    }

    /// Its queues read host memory and the memory of other accelerators. A file, or another vendor's memory, they do not: the
    /// library takes such bytes to the host first.
    fn route_from(&self, source: &dyn Device) -> Route {
        let from = source.info().id;
        match from.is_host() || from.kind() == self.id().kind() {
            true => Route::Direct,
            false => Route::Staged(format!("{} cannot read the memory of {from}", self.id())),
        }
    }

    fn trim(&self) -> Result<u64> {
        // What was freed has gone back to the system.
        self.check().map(|()| 0)
    }

    fn health(&self) -> Health {
        self.0.lost.get().map_or(Health::Good, |why| Health::Lost(why.clone()))
    }
}
