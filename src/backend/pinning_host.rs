//! The host, with memory that a backend pins for its devices.

use std::fmt;
use std::sync::Arc;

use super::{Buf, BufMut, Charge, Device, Extents, Health, Kernels, Ledger, MemoryKind, Role, Route, Storage, Stream};
use crate::device::{DeviceId, DeviceInfo, MemoryUsage};
use crate::error::Result;

/// What pins host memory.
pub(super) trait Pin: Send + Sync + 'static {
    /// The most bytes that may be pinned at one time.
    fn limit(&self) -> u64;

    /// Allocates pinned memory, near a device if one is named. `None` if there is no device to pin it for, no room under the
    /// limit, or the driver refuses.
    fn pin(self: &Arc<Self>, bytes: usize, near: Option<DeviceId>) -> Option<Box<dyn Storage>>;

    /// Gives back to the system what can be given back.
    fn trim(&self) {}
}

/// The host, with pinned memory for the open devices of a backend. If memory cannot be pinned, ordinary memory takes its place:
/// copies still work, but more slowly.
pub(super) struct PinningHost<P> {
    info: DeviceInfo,
    inner: Arc<dyn Device>,
    pins: Arc<P>,
}

impl<P: Pin> PinningHost<P> {
    pub(super) fn new(inner: Arc<dyn Device>, pins: Arc<P>) -> PinningHost<P> {
        PinningHost { info: inner.info().clone().pinnable(Some(pins.limit())), inner, pins }
    }

    fn take(&self, charge: Charge, kind: MemoryKind, near: Option<DeviceId>) -> Result<BufMut> {
        charge.check(self.info.id)?;
        let pinned = if kind == MemoryKind::Pinned { self.pins.pin(charge.bytes() as usize, near) } else { None };
        match pinned {
            Some(pinned) => BufMut::new(pinned, charge),
            None => self.inner.allocate(charge, kind),
        }
    }
}

impl<P: Pin> Device for PinningHost<P> {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn ledger(&self) -> &Arc<Ledger> {
        self.inner.ledger()
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.inner.memory()
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        self.take(charge, kind, None)
    }

    fn allocate_near(&self, charge: Charge, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        self.take(charge, kind, Some(near))
    }

    fn read_only(&self, contents: Extents) -> Result<Option<Buf>> {
        self.inner.read_only(contents)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        self.inner.stream(role)
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        self.inner.route_from(source)
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        self.inner.kernels()
    }

    fn trim(&self) -> Result<u64> {
        self.pins.trim();
        self.inner.trim()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

impl<P> fmt::Debug for PinningHost<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinningHost").field("inner", &self.inner).finish_non_exhaustive()
    }
}
