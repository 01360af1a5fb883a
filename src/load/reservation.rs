//! Taking the memory of a plan on all devices, or none of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::{BufMut, Charge, Device, MemoryKind};
use crate::device::DeviceId;
use crate::error::{Error, Missing, Result};
use crate::plan::Plan;
use crate::registry::Registry;

/// The memory of a plan, taken on every device that it uses: weights, and slots on the compute device.
///
/// The plan's reserve is not taken, for it is the caller's; nor is scratch beyond the slots.
#[derive(Debug)]
pub struct Reservation {
    devices: BTreeMap<DeviceId, Arc<dyn Device>>,
    charges: BTreeMap<DeviceId, Charge>,
    compute: DeviceId,
}

impl Reservation {
    /// Opens the plan's devices and reserves what it puts on each. Devices that get nothing are not opened,
    /// but for the compute device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the device that has too little right now; nothing is taken then.
    pub fn take(registry: &Registry, plan: &Plan) -> Result<Reservation> {
        let all = |share: &crate::plan::DevicePlan| (share.id, share.bytes.saturating_add(share.slots));
        Reservation::of(registry, plan, &plan.devices().iter().map(all).collect())
    }

    /// Opens the plan's devices and reserves what is `needed` on each: less than the plan's where some of it is there.
    pub(super) fn of(registry: &Registry, plan: &Plan, needed: &BTreeMap<DeviceId, u64>) -> Result<Reservation> {
        let (devices, charges) = (BTreeMap::new(), BTreeMap::new());
        let mut reservation = Reservation { devices, charges, compute: plan.compute() };
        for share in plan.devices() {
            if share.bytes.saturating_add(share.slots) == 0 && share.id != plan.compute() {
                continue;
            }
            let device = registry.device(share.id)?;
            let bytes = needed.get(&share.id).copied().unwrap_or(0);
            let available = device.memory()?.available();
            if bytes > available {
                let (device, limit) = (share.id, device.ledger().limit());
                return Err(Error::OutOfMemory { device, requested: bytes, available, limit });
            }
            reservation.charges.insert(share.id, device.ledger().charge(bytes)?);
            reservation.devices.insert(share.id, device);
        }
        Ok(reservation)
    }

    /// The devices of the plan, open.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.devices.values()
    }

    /// The device `id`, where the plan uses it.
    pub fn device(&self, id: DeviceId) -> Option<&Arc<dyn Device>> {
        self.devices.get(&id)
    }

    /// What is reserved on `id` and not allocated yet.
    pub fn left(&self, id: DeviceId) -> u64 {
        self.charges.get(&id).map_or(0, Charge::bytes)
    }

    /// Allocates a part of what is reserved on `id`, near the compute device, which reads it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when less is left, or when the device refuses.
    pub fn alloc(&mut self, id: DeviceId, bytes: u64, kind: MemoryKind) -> Result<BufMut> {
        let (Some(device), Some(charge)) = (self.devices.get(&id), self.charges.get_mut(&id)) else {
            return Err(Missing::Reserved { device: id, reserved: self.charges.keys().copied().collect() }.into());
        };
        device.back(charge.split(bytes)?, kind, Some(self.compute))
    }
}
