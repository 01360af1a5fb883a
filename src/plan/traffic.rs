//! What a placement makes move in every pass, and the memory that this takes.

use super::value::{Slots, Use};
use crate::checkpoint::Layout;
use crate::device::{DeviceId, DeviceKind, Topology};

/// The inputs: where every module lives and what decides its use.
pub(super) struct Placed<'a> {
    pub(super) layout: &'a Layout,
    pub(super) topology: &'a Topology,
    pub(super) compute: DeviceId,
    /// Bin -> device.
    pub(super) devices: &'a [DeviceId],
    /// Module -> bin.
    pub(super) home: &'a [usize],
    pub(super) depth: usize,
    /// The most that may be pinned on the host, in bytes.
    pub(super) pinned_cap: u64,
}

/// What moves.
#[derive(Debug)]
pub(super) struct Traffic {
    /// Module -> use.
    pub(super) usage: Vec<Use>,
    /// Module -> whether it passes the staging buffers, if it is streamed.
    pub(super) staged: Vec<bool>,
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
        let modules = self.layout.modules.iter().zip(self.home);
        let usage = modules.map(|(module, &bin)| match self.devices[bin] == self.compute {
            true => Use::Resident,
            false if in_place(&module.name) => Use::InPlace,
            false => Use::Streamed,
        });
        let usage: Vec<Use> = usage.collect();
        let mut bins = vec![BinTraffic::default(); self.devices.len()];
        let staged = self.staged(&usage, &mut bins);
        let slots = self.slots(&usage, &staged, &mut bins);
        Traffic { usage, staged, bins, slots }
    }

    /// Pins what is streamed from the host, in order, up to the cap. -> module -> whether it is staged.
    fn staged(&self, usage: &[Use], bins: &mut [BinTraffic]) -> Vec<bool> {
        let stages: Vec<bool> = self.devices.iter().map(|&device| self.stages(device)).collect();
        let mut pinned = 0u64;
        let mut staged: Vec<bool> = self.home.iter().map(|&bin| stages[bin]).collect();
        for (index, module) in self.layout.modules.iter().enumerate() {
            let bin = self.home[index];
            let pinnable = self.devices[bin].is_host() && !self.compute.is_host();
            if pinnable && usage[index] == Use::Streamed && module.alias_of.is_none() {
                staged[index] = module.bytes > self.pinned_cap.saturating_sub(pinned);
                if !staged[index] {
                    pinned += module.bytes;
                    bins[bin].pinned += module.bytes;
                }
            }
        }
        for (index, module) in self.layout.modules.iter().enumerate() {
            if let Some(owner) = module.alias_of {
                staged[index] = staged[owner];
            }
        }
        staged
    }

    /// Whether pageable bytes of `device` pass the staging buffers on their way to the compute device.
    fn stages(&self, device: DeviceId) -> bool {
        let host_or_disk = matches!(device.kind(), DeviceKind::Cpu | DeviceKind::Disk);
        !self.compute.is_host() && (host_or_disk || !self.topology.reaches(self.compute, device))
    }

    /// Sums up what moves, layer by layer; storage that several modules of a layer share moves once.
    fn slots(&self, usage: &[Use], staged: &[bool], bins: &mut [BinTraffic]) -> Slots {
        let layout = self.layout;
        let shared = layout.storage.iter().enumerate().any(|(tensor, &first)| tensor != first);
        let owner = if shared { owners(layout) } else { Vec::new() };
        let mut moved_in = vec![usize::MAX; owner.len()];
        let mut slots = Slots::default();
        for (number, layer) in layout.layers.iter().enumerate() {
            let (mut bytes, mut streams) = (0u64, false);
            let mut moves = |module: usize, size: u64| {
                bytes += size;
                let bin = &mut bins[self.home[module]];
                bin.streamed = bin.streamed.saturating_add(size);
                bin.staged = bin.staged.saturating_add(if staged[module] { size } else { 0 });
            };
            for &module in layer.modules.iter().filter(|&&module| usage[module] == Use::Streamed) {
                streams = true;
                if !shared {
                    moves(module, layout.modules[module].bytes);
                    continue;
                }
                for &tensor in &layout.modules[module].tensors {
                    let first = layout.storage[tensor];
                    let at_hand = usage[owner[first]] == Use::Resident;
                    if !at_hand && std::mem::replace(&mut moved_in[first], number) != number {
                        moves(owner[first], layout.tensors[first].bytes);
                    }
                }
            }
            slots.count += usize::from(streams);
            slots.bytes_each = slots.bytes_each.max(bytes);
        }
        slots.count = slots.count.min(self.depth.saturating_add(1));
        slots
    }
}

/// Tensor -> module.
fn owners(layout: &Layout) -> Vec<usize> {
    let mut owner = vec![0; layout.tensors.len()];
    for (index, module) in layout.modules.iter().enumerate() {
        module.tensors.iter().for_each(|&tensor| owner[tensor] = index);
    }
    owner
}
