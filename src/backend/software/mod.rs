//! Software devices: host memory or files, with streams that are threads. The host backend and the simulated devices use
//! them.

mod decompress;
mod dequantise;
mod extents;
mod fence;
mod files;
mod memory;
mod stream;
mod timeline;

use std::fmt;
use std::sync::Arc;

pub use timeline::Clock;
pub(super) use timeline::Timeline;

pub(super) use extents::ExtentMemory;
pub(super) use files::DiskFolder;
use memory::RamMemory;
pub(super) use memory::{HostAllocation, SizeOnly};
use stream::SoftwareStream;

use super::process::Process;
use super::{Buf, BufMut, Charge, Device, Extents, Health, Kernels, Ledger, MemoryKind, Role, Route, Storage, Stream};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, MemoryUsage};
use crate::error::{Error, Result};

/// The medium in which a software device keeps its bytes.
pub(super) enum Medium {
    /// Host memory that the host may address.
    Host,
    /// Host memory that only streams may access, in place of a device's memory.
    Hidden,
    /// Unnamed files in this folder.
    Files(DiskFolder),
    /// No medium: memory is counted and copies take their time, but there are no bytes.
    Nowhere,
}

/// A device of host memory or files.
pub(super) struct SoftwareDevice {
    pub(super) info: DeviceInfo,
    pub(super) ledger: Arc<Ledger>,
    pub(super) medium: Medium,
    /// The links and the clock that pace its streams. `None` for streams that run as fast as they can.
    pub(super) timeline: Option<Arc<Timeline>>,
    /// The process that opened it.
    pub(super) process: Process,
    /// The free memory according to the system. `None` if the ledger alone decides.
    pub(super) free: Option<fn() -> u64>,
}

impl Device for SoftwareDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    fn memory(&self) -> Result<MemoryUsage> {
        let (charged, reserved) = self.ledger.charged_and_reserved();
        let allocated = charged - reserved;
        let free = self.free.map_or(self.ledger.limit().saturating_sub(allocated), |free| free());
        Ok(MemoryUsage::new(self.info.total, free, charged, reserved))
    }

    fn allocate(&self, charge: Charge, _kind: MemoryKind) -> Result<BufMut> {
        self.process.check()?;
        charge.check(self.id())?;
        if let Some(largest) = self.info.largest.filter(|&largest| charge.bytes() > largest) {
            let (device, limit) = (self.id(), self.info.total);
            return Err(Error::OutOfMemory { device, requested: charge.bytes(), available: largest, limit });
        }
        let bytes = charge.bytes() as usize;
        let memory = || HostAllocation::new(bytes).map_err(|_| self.refused(charge.bytes()));
        let storage: Box<dyn Storage> = match &self.medium {
            Medium::Host => Box::new(RamMemory::visible(memory()?)),
            Medium::Hidden => Box::new(RamMemory::hidden(memory()?)),
            Medium::Files(folder) => match folder.allocate(bytes) {
                Err(Error::Io { source, .. }) if is_full(&source) => return Err(self.refused(charge.bytes())),
                memory => Box::new(memory?),
            },
            Medium::Nowhere => Box::new(SizeOnly(bytes)),
        };
        BufMut::new(storage, charge)
    }

    fn read_only(&self, contents: Extents) -> Result<Option<Buf>> {
        self.process.check()?;
        if !contents.is_countable() {
            return Err(Error::invalid("extents of more bytes than memory can have, or beyond the last offset"));
        }
        let storage: Box<dyn Storage> = match &self.medium {
            Medium::Files(_) | Medium::Host => Box::new(ExtentMemory::new(contents)),
            Medium::Nowhere if matches!(self.id().kind(), DeviceKind::Disk | DeviceKind::Cpu) => {
                Box::new(SizeOnly(contents.bytes()))
            }
            Medium::Hidden | Medium::Nowhere => return Ok(None),
        };
        Ok(Some(Buf::uncharged(storage, self.ledger.charge(0)?)))
    }

    fn stream(&self, _role: Role) -> Result<Arc<dyn Stream>> {
        self.process.check()?;
        Ok(Arc::new(SoftwareStream::new(&self.info, self.timeline.clone())?))
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        let (this, other) = (self.id(), source.id());
        let reaches = match &self.timeline {
            Some(timeline) => timeline.topology().reaches(this, other),
            // The host's streams can access its memory and its files.
            None => matches!(other.kind(), DeviceKind::Cpu | DeviceKind::Disk),
        };
        if reaches { Route::Direct } else { Route::Staged(format!("{this} cannot reach the memory of {other}")) }
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        Some(self)
    }

    fn trim(&self) -> Result<u64> {
        // Freed memory is returned to the system immediately; there is no caching allocator.
        Ok(0)
    }

    fn health(&self) -> Health {
        Health::Good
    }
}

impl SoftwareDevice {
    fn id(&self) -> DeviceId {
        self.info.id
    }

    /// The error when the system refuses memory that the ledger allows.
    fn refused(&self, requested: u64) -> Error {
        let available = self.free.map_or(0, |free| free());
        Error::OutOfMemory { device: self.id(), requested, available, limit: self.info.total }
    }
}

/// Whether an error says that a file system has no room left.
fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

impl fmt::Debug for SoftwareDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftwareDevice").field("info", &self.info).field("ledger", &self.ledger).finish_non_exhaustive()
    }
}
