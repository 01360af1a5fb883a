//! What a placement makes move in every pass, and the memory that this takes.

use super::value::{Slots, Use};
use crate::checkpoint::{Layout, ModuleId, Per};
use crate::device::{DeviceId, DeviceKind, Topology};

/// The inputs: where every module lives and what decides its use.
pub(super) struct Placed<'a> {
    pub(super) layout: &'a Layout,
    pub(super) topology: &'a Topology,
    pub(super) compute: DeviceId,
    /// Bin -> device.
    pub(super) devices: &'a [DeviceId],
    /// The bin of each module.
    pub(super) home: &'a Per<ModuleId, usize>,
    pub(super) depth: usize,
    /// The most that may be pinned on the host, in bytes.
    pub(super) pinned_cap: u64,
}

/// What moves.
#[derive(Debug)]
pub(super) struct Traffic {
    /// The use of each module.
    pub(super) usage: Per<ModuleId, Use>,
    /// Whether each module passes the staging buffers, if it is streamed.
    pub(super) staged: Per<ModuleId, bool>,
    /// For each bin.
    pub(super) bins: Vec<BinTraffic>,
    pub(super) slots: Slots,
}

/// The bytes of one bin that move, pass the staging buffers, and are pinned.
#[derive(Clone, Debug, Default)]
pub(super) struct BinTraffic {
    pub(super) streamed: u64,
    pub(super) staged: u64,
    pub(super) pinned: u64,
}

impl Placed<'_> {
    pub(super) fn traffic(&self, in_place: impl Fn(&str) -> bool) -> Traffic {
        let usage =
            self.layout.modules().iter().map(|module| match self.devices[self.home[module.id]] == self.compute {
                true => Use::Resident,
                false if in_place(&module.name) => Use::InPlace,
                false => Use::Streamed,
            });
        let usage: Per<ModuleId, Use> = usage.collect();
        let mut bins = vec![BinTraffic::default(); self.devices.len()];
        let staged = self.staged(&usage, &mut bins);
        let slots = self.slots(&usage, &staged, &mut bins);
        Traffic { usage, staged, bins, slots }
    }

    /// Pins what is streamed from the host, in order, up to the cap. The rest is staged: whether each module is.
    fn staged(&self, usage: &Per<ModuleId, Use>, bins: &mut [BinTraffic]) -> Per<ModuleId, bool> {
        let stages: Vec<bool> = self.devices.iter().map(|&device| self.stages(device)).collect();
        let mut pinned = 0u64;
        let mut staged: Per<ModuleId, bool> = self.home.values().map(|&bin| stages[bin]).collect();
        for module in self.layout.modules() {
            let bin = self.home[module.id];
            let pinnable = self.devices[bin].is_host() && !self.compute.is_host();
            if pinnable && usage[module.id] == Use::Streamed && module.alias_of.is_none() {
                staged[module.id] = module.bytes > self.pinned_cap.saturating_sub(pinned);
                if !staged[module.id] {
                    pinned += module.bytes;
                    bins[bin].pinned += module.bytes;
                }
            }
        }
        for module in self.layout.modules() {
            if let Some(owner) = module.alias_of {
                staged[module.id] = staged[owner];
            }
        }
        staged
    }

    /// Whether pageable bytes of `device` pass the staging buffers on their way to the compute device.
    fn stages(&self, device: DeviceId) -> bool {
        let host_or_disk = matches!(device.kind(), DeviceKind::Cpu | DeviceKind::Disk);
        !self.compute.is_host() && (host_or_disk || !self.topology.reaches(self.compute, device))
    }

    /// Sums up what moves.
    pub(super) fn slots(
        &self,
        usage: &Per<ModuleId, Use>,
        staged: &Per<ModuleId, bool>,
        bins: &mut [BinTraffic],
    ) -> Slots {
        let streamed = |module| (usage[module] == Use::Streamed).then(|| (self.home[module], staged[module]));
        slots_of(self.layout, self.depth, streamed, bins)
    }
}

/// Sums up what moves, layer by layer, where `streamed` tells for each module that does its bin and whether it is staged;
/// storage that several modules of a layer share moves once.
pub(super) fn slots_of(
    layout: &Layout,
    depth: usize,
    streamed: impl Fn(ModuleId) -> Option<(usize, bool)>,
    bins: &mut [BinTraffic],
) -> Slots {
    let mut slots = Slots::default();
    for layer in layout.layers() {
        let mut in_slot = 0u64;
        for module in layout.needs(layer) {
            let Some((bin, staged)) = streamed(module) else { continue };
            let bytes = layout.at(module).bytes;
            in_slot = in_slot.saturating_add(Layout::slot_bytes(bytes));
            let bin = &mut bins[bin];
            bin.streamed = bin.streamed.saturating_add(bytes);
            bin.staged = bin.staged.saturating_add(if staged { bytes } else { 0 });
        }
        slots.count += usize::from(layer.modules.iter().any(|&module| streamed(module).is_some()));
        slots.bytes_each = slots.bytes_each.max(in_slot);
    }
    slots.count = slots.count.min(depth.saturating_add(1));
    slots
}
