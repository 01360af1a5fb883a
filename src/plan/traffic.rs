//! The traffic of a placement in every pass, and the memory that it takes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::compress::{KeptCodes, kept_compressed, saved_on};
use super::place::Quotas;
use super::planner::Planner;
use super::slots::Slots;
use super::value::{Assignment, DeviceBeside, DevicePlan, DeviceWeights, Use};
use super::warning::Warning;
use crate::bytes::ByteSize;
use crate::checkpoint::{Layer, Layout, Module, ModuleId, Per};
use crate::device::{DeviceId, DeviceKind, Topology};
use crate::dtype::{DType, TensorGrouping};
use crate::error::Result;
use crate::lossless::needed_before;
use crate::schedule::{Groups, LayerBlocks, VERDICT_ROOM, landed, landing_bytes};

/// The inputs: where every module lives and what decides its use.
pub(super) struct Placed<'a> {
    pub(super) layout: &'a Layout,
    /// The layout with tensors as slots hold them.
    pub(super) in_slots: &'a Layout,
    pub(super) topology: &'a Topology,
    pub(super) compute: DeviceId,
    /// Bin -> device.
    pub(super) devices: &'a [DeviceId],
    /// The bin of each module.
    pub(super) home: &'a Per<ModuleId, usize>,
    pub(super) form: SlotForm,
    /// The most bytes that may be pinned on the host.
    pub(super) pinned_cap: u64,
    /// Which modules are kept compressed.
    pub(super) codes: KeptCodes,
}

/// What decides the slots, beside the streamed layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotForm {
    pub(super) depth: usize,
    /// Whether each layer always uses the same slot.
    pub(super) fixed: bool,
    pub(super) grouping: TensorGrouping,
    /// The type of the values that slots hold in place of blocks.
    pub(super) unpacked: Option<DType>,
    /// The most bytes of a landing buffer.
    pub(super) landing_cap: u64,
}

impl SlotForm {
    /// `layout` with its tensors as slots hold them.
    pub(super) fn in_slots(self, layout: &Layout) -> Cow<'_, Layout> {
        match self.unpacked {
            Some(dtype) => Cow::Owned(layout.unpacked(dtype)),
            None => Cow::Borrowed(layout),
        }
    }
}

/// How a module gets into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetch {
    /// From this bin, through the staging buffers or not, compressed or not.
    Streamed { bin: usize, staged: bool, compressed: bool },
    /// From the compute device, which keeps it in blocks, or compressed.
    Unpacked { compressed: bool },
}

impl Fetch {
    /// How a module with this use in `bin` gets into a slot; `None` if it does not.
    pub(super) fn of(usage: Use, bin: usize, staged: bool, compressed: bool) -> Option<Fetch> {
        match usage {
            Use::Streamed => Some(Fetch::Streamed { bin, staged, compressed }),
            Use::Unpacked => Some(Fetch::Unpacked { compressed }),
            Use::Resident | Use::InPlace => None,
        }
    }
}

/// The traffic of a placement.
#[derive(Debug)]
pub(super) struct Traffic {
    /// The use of each module.
    pub(super) usage: Per<ModuleId, Use>,
    /// Whether each module passes the staging buffers, if it is streamed.
    pub(super) staged: Per<ModuleId, bool>,
    /// The bytes that each module takes less because it is kept compressed.
    pub(super) saved: Per<ModuleId, u64>,
    /// The traffic of each bin.
    pub(super) bins: Vec<BinTraffic>,
    pub(super) slots: Slots,
}

/// The bytes of one bin that are streamed, that pass the staging buffers, and that are pinned.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BinTraffic {
    pub(super) streamed: u64,
    pub(super) staged: u64,
    pub(super) pinned: u64,
}

impl Placed<'_> {
    pub(super) fn traffic(&self, in_place: impl Fn(&Module) -> bool) -> Traffic {
        let usage = self.layout.modules().iter().map(|module| {
            let here = self.devices[self.home[module.id]] == self.compute;
            match (here, in_place(module)) {
                (true, false) if self.is_unpacked_here(module) => Use::Unpacked,
                (true, _) => Use::Resident,
                (false, true) => Use::InPlace,
                (false, false) => Use::Streamed,
            }
        });
        let usage: Per<ModuleId, Use> = usage.collect();
        let saved = self.layout.modules().iter().map(|module| self.saved(module, usage[module.id])).collect();
        let mut bins = vec![BinTraffic::default(); self.devices.len()];
        let staged = self.staged(&usage, &saved, &mut bins);
        let slots = self.slots(&usage, &staged, &saved, &mut bins);
        Traffic { usage, staged, saved, bins, slots }
    }

    /// The bytes that a module takes less because it is kept compressed. A host that computes decodes what it reads.
    fn saved(&self, module: &Module, usage: Use) -> u64 {
        let compress = match usage {
            Use::Streamed => self.codes.streamed && !self.compute.is_host(),
            Use::Unpacked => self.codes.resident.contains(&module.id),
            Use::Resident | Use::InPlace => false,
        };
        let kept = || kept_compressed(self.layout, self.devices[self.home[module.id]], module.id);
        compress.then(kept).flatten().map_or(0, |bytes| module.bytes - bytes)
    }

    /// Whether a module of the compute device, or the one whose storage it shares, is kept there in blocks whose values slots hold, or
    /// compressed.
    fn is_unpacked_here(&self, module: &Module) -> bool {
        let owner = module.alias_of.unwrap_or(module.id);
        let has_blocks = || self.layout.own_tensors(owner).any(|tensor| self.layout.at(tensor).dtype.is_ggml_block());
        self.codes.resident.contains(&owner) || self.form.unpacked.is_some() && has_blocks()
    }

    /// Pins the modules streamed from the host, in order, up to the cap. Returns whether each module is staged: the rest is.
    fn staged(
        &self,
        usage: &Per<ModuleId, Use>,
        saved: &Per<ModuleId, u64>,
        bins: &mut [BinTraffic],
    ) -> Per<ModuleId, bool> {
        let stages: Vec<bool> = self.devices.iter().map(|&device| self.stages(device)).collect();
        let mut pinned = 0u64;
        let mut staged: Per<ModuleId, bool> = self.home.values().map(|&bin| stages[bin]).collect();
        for module in self.layout.modules() {
            let bin = self.home[module.id];
            let pinnable = self.devices[bin].is_host() && !self.compute.is_host();
            if pinnable && usage[module.id] == Use::Streamed && module.alias_of.is_none() {
                let bytes = module.bytes - saved[module.id];
                staged[module.id] = bytes > self.pinned_cap.saturating_sub(pinned);
                if !staged[module.id] {
                    pinned += bytes;
                    bins[bin].pinned += bytes;
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

    /// Whether pageable bytes of `device` reach the compute device through the staging buffers.
    fn stages(&self, device: DeviceId) -> bool {
        let host_or_disk = matches!(device.kind(), DeviceKind::Cpu | DeviceKind::Disk);
        !self.compute.is_host() && (host_or_disk || !self.topology.reaches(self.compute, device))
    }

    /// Sums up the traffic, and returns the slots.
    pub(super) fn slots(
        &self,
        usage: &Per<ModuleId, Use>,
        staged: &Per<ModuleId, bool>,
        saved: &Per<ModuleId, u64>,
        bins: &mut [BinTraffic],
    ) -> Slots {
        let fetch = |module| Fetch::of(usage[module], self.home[module], staged[module], saved[module] > 0);
        slots_of((self.layout, self.in_slots), self.form, fetch, bins)
    }
}

impl<'a> Planner<'a> {
    /// The plan of each device, and the use of each module there.
    pub(super) fn assemble(
        &self,
        quotas: &Quotas,
        compute: DeviceId,
        home: &Per<ModuleId, usize>,
    ) -> Result<(Vec<DevicePlan>, Vec<Assignment>, Slots)> {
        let ids: Vec<DeviceId> = quotas.bins.iter().map(|bin| bin.device).collect();
        let (layout, topology) = (self.layout, self.machine.topology());
        let grouping = if self.external_slots { TensorGrouping::Joined } else { self.grouping };
        let (depth, fixed, unpacked, landing_cap) = (self.depth, self.fixed_slots, self.unpacked, self.landing_cap);
        let form = SlotForm { depth, fixed, grouping, unpacked, landing_cap };
        let (pinned_cap, in_slots) = (self.pinnable(&ids, home), self.in_slots());
        let codes = self.kept_codes(compute);
        let placed = Placed { layout, in_slots, topology, compute, devices: &ids, home, form, pinned_cap, codes };
        let mut traffic = placed.traffic(|module| self.is_in_place(module));
        if self.external_slots {
            traffic.slots = traffic.slots.left_to_caller();
        }
        let (mut bytes, mut modules) = (vec![0u64; ids.len()], vec![0usize; ids.len()]);
        let mut saved = vec![0u64; ids.len()];
        let assignment = |module: &Module| {
            let bin = home[module.id];
            bytes[bin] += module.bytes;
            modules[bin] += 1;
            let usage = traffic.usage[module.id];
            let staged = usage == Use::Streamed && traffic.staged[module.id];
            saved[bin] += saved_on(layout, ids[bin], module.id, traffic.saved[module.id]);
            let name = Arc::from(module.name.as_str());
            Assignment {
                module: name,
                index: module.id,
                layer: module.layer,
                device: ids[bin],
                usage,
                staged,
                bytes: module.bytes,
                saved: traffic.saved[module.id],
            }
        };
        let assignments: Vec<Assignment> = layout.modules().iter().map(assignment).collect();
        let in_files = in_files(layout, &assignments);
        let mut devices = Vec::with_capacity(ids.len());
        for (index, (bin, moved)) in quotas.bins.iter().zip(&traffic.bins).enumerate() {
            let computes = bin.device == compute;
            let info = match self.machine.device(bin.device) {
                Ok(info) => info,
                // A host that the allocation does not name and that gets nothing.
                Err(_) if modules[index] == 0 => continue,
                Err(unknown) => return Err(unknown),
            };
            let (bytes, modules) = (bytes[index], modules[index]);
            let BinTraffic { streamed, staged, pinned } = *moved;
            let of_compute = |bytes: u64| if computes { bytes } else { 0 };
            devices.push(DevicePlan {
                weights: DeviceWeights {
                    bytes,
                    modules,
                    streamed,
                    staged,
                    pinned,
                    in_files: in_files.get(&bin.device).copied().unwrap_or(0),
                    saved: saved[index],
                },
                beside: DeviceBeside {
                    slots: of_compute(traffic.slots.bytes()),
                    scratch: of_compute(self.scratch),
                    reserve: of_compute(self.reserve),
                    // Of the devices that get nothing, only the compute device is opened.
                    opening: if computes || bytes > 0 { info.opening } else { 0 },
                },
                ..DevicePlan::of(info, bin.quoted.then_some(bin.cap))
            });
        }
        devices.sort_by_key(|device| device.id);
        Ok((devices, assignments, traffic.slots))
    }

    /// The most bytes that may be pinned: the cap, minus the weights of other devices that share the host's memory, because
    /// their pages are locked too.
    fn pinnable(&self, devices: &[DeviceId], home: &Per<ModuleId, usize>) -> u64 {
        let topology = self.machine.topology();
        let locked = |bin: usize| !devices[bin].is_host() && topology.memory_of(devices[bin]).is_host();
        let modules = self.layout.modules().iter().filter(|module| locked(home[module.id]));
        let cap = self.pinned_cap.map_or(u64::MAX, ByteSize::get);
        modules.fold(cap, |cap, module| cap.saturating_sub(module.bytes))
    }

    /// Warnings for bytes that are streamed within one memory.
    pub(super) fn copies_in_place<'b>(
        &'b self,
        devices: &'b [DevicePlan],
        compute: DeviceId,
    ) -> impl Iterator<Item = Warning> + use<'b, 'a> {
        let topology = self.machine.topology();
        let here =
            move |d: &&DevicePlan| d.weights.streamed > 0 && topology.memory_of(d.id) == topology.memory_of(compute);
        let warning = move |d: &DevicePlan| Warning::OneMemory { device: d.id, compute, bytes: d.weights.streamed };
        devices.iter().filter(here).map(warning)
    }

    /// Warnings for weights on a disk that is in the memory of another device.
    pub(super) fn disks_in_memory<'b>(
        &'b self,
        devices: &'b [DevicePlan],
    ) -> impl Iterator<Item = Warning> + use<'b, 'a> {
        let memory_of = |id: DeviceId| self.machine.topology().memory_of(id);
        let there =
            move |d: &&DevicePlan| d.id.kind() == DeviceKind::Disk && d.weights.taken() > 0 && memory_of(d.id) != d.id;
        let warning = move |d: &DevicePlan| Warning::DiskInMemory {
            device: d.id,
            memory: memory_of(d.id),
            bytes: d.weights.taken(),
        };
        devices.iter().filter(there).map(warning)
    }

    /// A warning if the number of fixed slots does not divide the number of layers.
    pub(super) fn uneven_slots(&self, assignments: &[Assignment]) -> Option<Warning> {
        let by_layer = assignments.chunk_by(|a, b| a.layer == b.layer);
        let layers = by_layer.filter(|layer| layer.iter().any(|a| a.usage.is_fetched())).count();
        let slots = self.depth.saturating_add(1);
        let uneven = self.fixed_slots && layers > slots && layers % slots != 0;
        uneven.then_some(Warning::UnevenSlots { slots, layers })
    }
}

/// The bytes of each disk that stay in the model's own files: those that nothing changes, group by group, since a group is one home.
pub(super) fn in_files(layout: &Layout, assignments: &[Assignment]) -> BTreeMap<DeviceId, u64> {
    let mut in_files = BTreeMap::new();
    if !assignments.iter().any(|a| a.device.kind() == DeviceKind::Disk) {
        return in_files;
    }
    let groups = Groups::new(layout, |module| assignments[module.index()].origin());
    for members in (0..groups.len()).map(|group| groups.members(group)) {
        let device = assignments[members[0].index()].device;
        if device.kind() == DeviceKind::Disk && members.iter().all(|&module| layout.is_in_files(module)) {
            *in_files.entry(device).or_default() += members.iter().map(|&module| layout.at(module).bytes).sum::<u64>();
        }
    }
    in_files
}

/// Sums up the traffic layer by layer, and returns the slots. `layout` is given with its tensors at home, and as slots hold them;
/// `fetch` tells how each module gets into a slot, if it does. Storage that several modules of a layer share moves once.
pub(super) fn slots_of(
    (layout, in_slots): (&Layout, &Layout),
    form: SlotForm,
    fetch: impl Fn(ModuleId) -> Option<Fetch>,
    bins: &mut [BinTraffic],
) -> Slots {
    let mut landings = Landings::default();
    for layer in layout.layers() {
        for module in layout.needs(layer) {
            let (bin, staged, compressed) = match fetch(module) {
                Some(Fetch::Streamed { bin, staged, compressed }) => (bin, staged, compressed),
                Some(Fetch::Unpacked { compressed }) => {
                    landings.codes |= compressed;
                    continue;
                }
                None => continue,
            };
            let stored = compressed.then(|| layout.compressed_bytes(module)).flatten();
            let bytes = stored.unwrap_or(layout.at(module).bytes);
            if compressed || form.unpacked.is_some() {
                landings.add((bin, staged), layout, module, (compressed, form.unpacked.is_some()));
            }
            let bin = &mut bins[bin];
            bin.streamed = bin.streamed.saturating_add(bytes);
            bin.staged = bin.staged.saturating_add(if staged { bytes } else { 0 });
        }
        landings.end_layer();
    }
    let layers = fetched_blocks((layout, in_slots), form.grouping, |module| fetch(module).is_some());
    let (landings, landing_bytes) = landings.count_and_bytes(form.landing_cap);
    Slots { landings, landing_bytes, ..Slots::of_blocks(&layers, form.depth, form.fixed).0 }
}

/// The tensors in blocks, or compressed, that arrive by each route: from a bin, through the staging buffers or not.
#[derive(Default)]
struct Landings {
    /// For each route the bytes of the present layer, as they lie in a landing buffer.
    of_layer: BTreeMap<(usize, bool), u64>,
    /// The most bytes of a tensor, and of a layer on one route.
    largest: u64,
    most: u64,
    /// The most bytes that a part of a code needs of the part before.
    carried: u64,
    /// Whether any tensors are codes, which need room for a verdict.
    codes: bool,
}

impl Landings {
    /// Counts the tensors of a module of the present layer that land: codes, if it is `compressed`, and blocks, if slots hold their
    /// values.
    fn add(&mut self, route: (usize, bool), layout: &Layout, module: ModuleId, (compressed, unpacks): (bool, bool)) {
        self.codes |= compressed;
        for tensor in layout.own_tensors(module) {
            let info = layout.at(tensor);
            let code = layout.stored(tensor).filter(|stored| compressed && stored.is_code);
            let is_block = unpacks && info.dtype.is_ggml_block() && info.bytes > 0;
            let bytes = code.map(|code| code.bytes).or(is_block.then_some(info.bytes));
            if code.is_some() {
                let (head, block) = needed_before(info.bytes, info.shape.iter().product());
                self.carried = self.carried.max(head.saturating_add(block));
            }
            if let Some(bytes) = bytes {
                let (bytes, layer) = (landed(bytes), self.of_layer.entry(route).or_default());
                self.largest = self.largest.max(bytes);
                *layer = layer.saturating_add(bytes);
            }
        }
    }

    fn end_layer(&mut self) {
        for bytes in self.of_layer.values_mut() {
            self.most = self.most.max(std::mem::take(bytes));
        }
    }

    /// The number of landing buffers, and the bytes of each.
    fn count_and_bytes(&self, cap: u64) -> (usize, u64) {
        let verdict = if self.codes { VERDICT_ROOM } else { 0 };
        // The verdict on codes of the compute device has room in any of them.
        let count = self.of_layer.len().max(usize::from(self.codes));
        (count, landing_bytes(self.largest, self.most, self.carried, cap).saturating_add(verdict))
    }
}

/// The blocks of each layer that fetches anything, in order.
pub(super) fn fetched_blocks(
    (layout, in_slots): (&Layout, &Layout),
    grouping: TensorGrouping,
    is_fetched: impl Fn(ModuleId) -> bool,
) -> Vec<LayerBlocks> {
    let blocks = |layer: &Layer| {
        let mut needs = layout.needs(layer);
        needs.retain(|&module| is_fetched(module));
        LayerBlocks::of(in_slots, grouping, &needs)
    };
    let layers = layout.layers().iter().filter(|layer| layer.modules.iter().any(|&module| is_fetched(module)));
    layers.map(blocks).collect()
}
