//! The planner: inputs in, a checked plan out.

use std::sync::Arc;

use super::auto;
use super::check;
use super::fits;
use super::forecast::ComputeTime;
use super::outlier::outliers_of;
use super::place::{Placement, Quotas};
use super::value::{Order, Parts, Plan, Unit};
use super::warning::Warning;
use crate::allocation::{Allocation, Mode};
use crate::bytes::ByteSize;
use crate::checkpoint::{Layer, Layout, Module, ModuleId, Pattern, Per, TensorId, TensorInfo, is_table};
use crate::device::{DeviceId, DeviceKind, Machine};
use crate::dtype::{DType, TensorGrouping};
use crate::error::{Error, Limit, PlanFault, Result};
use crate::schedule::LANDING_CAP;

/// The most bytes of a plan; the product of two such numbers fits `u128`.
const MOST_BYTES: u64 = 1 << 63;

/// Decides where every module of a model lives. Pure: opens no device and no file.
///
/// ```
/// use tensor_offload::checkpoint::Layout;
/// use tensor_offload::{DeviceId, Machine, Order, Planner};
/// let layout = Layout::blocks([1 << 30; 10]);
/// let machine = Machine::described(&["cuda:0=24gib".parse()?, "cpu=64gib".parse()?]);
/// let plan = Planner::new(&layout, &machine).allocation("cuda:0,50%;cpu,*".parse()?).order(Order::Sequential).plan()?;
/// assert_eq!(plan.device(DeviceId::cuda(0)).unwrap().weights.modules, 5);
/// assert_eq!(plan.slots().count, 3);
/// println!("{plan}");
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a planner does nothing until `plan`"]
pub struct Planner<'a> {
    pub(super) layout: &'a Layout,
    pub(super) machine: &'a Machine,
    allocation: Option<Allocation>,
    compute: Option<DeviceId>,
    order: Order,
    unit: Unit,
    pub(super) depth: usize,
    pub(super) reserve: u64,
    pub(super) scratch: u64,
    pub(super) pinned_cap: Option<ByteSize>,
    resident: Vec<Pattern>,
    in_place: Vec<Pattern>,
    /// Whether the caller gathers rows of lookup tables.
    gather: bool,
    pub(super) external_slots: bool,
    pub(super) fixed_slots: bool,
    pub(super) grouping: TensorGrouping,
    /// The type of the values that slots hold in place of blocks, and the layout with its tensors as slots hold them.
    pub(super) unpacked: Option<DType>,
    in_slots: Option<Arc<Layout>>,
    pub(super) compress: bool,
    pub(super) compress_resident: bool,
    pub(super) landing_cap: u64,
    pub(super) compute_time: ComputeTime,
    /// The largest slot; modules of a layer that would exceed it are kept resident.
    largest_slot: Option<u64>,
}

impl<'a> Planner<'a> {
    /// A plan of `layout` for `machine` with everything on the compute device by default.
    pub fn new(layout: &'a Layout, machine: &'a Machine) -> Planner<'a> {
        Planner {
            layout,
            machine,
            allocation: None,
            compute: None,
            order: Order::default(),
            unit: Unit::default(),
            depth: 2,
            reserve: 0,
            scratch: 0,
            pinned_cap: default_pinned_cap(machine),
            resident: Vec::new(),
            in_place: Vec::new(),
            gather: false,
            external_slots: false,
            fixed_slots: false,
            grouping: TensorGrouping::default(),
            unpacked: None,
            in_slots: None,
            compress: false,
            compress_resident: false,
            landing_cap: LANDING_CAP,
            compute_time: ComputeTime::default(),
            largest_slot: None,
        }
    }

    /// Sets how much each device takes. Default: everything on the compute device. Devices may go by their
    /// [aliases](crate::device::DeviceInfo::aliases).
    pub fn allocation(mut self, allocation: Allocation) -> Self {
        self.allocation = Some(allocation.renamed(|id| self.machine.named(id)));
        self
    }

    /// Sets the compute device. One named by the allocation (after `#`) takes precedence. Default: the first device
    /// of the machine that is neither host nor disk, else `cpu`.
    pub fn compute(mut self, device: DeviceId) -> Self {
        self.compute = Some(self.machine.named(device));
        self
    }

    /// Sets how the modules are spread. Mode virtual has a fixed order, and mode auto finds one. Default:
    /// [`Order::Interleaved`].
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Sets what an interleaved order spreads. Mode auto finds it. Default: [`Unit::Module`].
    pub fn unit(mut self, unit: Unit) -> Self {
        self.unit = unit;
        self
    }

    /// Sets how many layers are prefetched; each takes a slot. Default: 2.
    pub fn depth(mut self, layers: usize) -> Self {
        self.depth = layers;
        self
    }

    /// Sets the memory that the caller keeps on the compute device for activations. A reserve in the allocation
    /// (`auto,reserve=2gb`) takes precedence. Default: 0.
    pub fn reserve(mut self, size: ByteSize) -> Self {
        self.reserve = size.get();
        self
    }

    /// Sets the bytes that patching needs on the compute device; they may use the memory of the slots. Default: 0.
    pub fn scratch(mut self, bytes: u64) -> Self {
        self.scratch = bytes;
        self
    }

    /// Places the modules whose names match `pattern` first, on the compute device, within its quota. May be called several
    /// times.
    ///
    /// In a pattern `*` stands for any run of characters. A pattern without it is the name of a module, or, if no module has
    /// that name, a part of the names between dots: `experts` matches `model.layers.0.mlp.experts.3.up_proj`, and not
    /// `shared_experts`.
    pub fn keep_resident(mut self, pattern: impl Into<String>) -> Self {
        self.resident.push(Pattern::new(pattern.into(), self.layout));
        self
    }

    /// Lets the modules whose names match `pattern` be used where they live instead of streamed, for example experts that the
    /// caller runs on the host. Patterns are those of [`keep_resident`](Planner::keep_resident). May be called several times.
    ///
    /// With an interleaved order the other modules have the compute device's quota first. If it holds all of these, modules
    /// used in place have the rest of it; if not, they live on the host, as far as the host's quota goes.
    pub fn in_place(mut self, pattern: impl Into<String>) -> Self {
        self.in_place.push(Pattern::new(pattern.into(), self.layout));
        self
    }

    /// Sets whether the caller gathers the embedding rows that the network looks up, instead of having the tables on the compute
    /// device: with [`Model::read_rows`](crate::Model::read_rows) or [`Streamer::send_rows`](crate::Streamer::send_rows).
    /// Token and position tables, recognised by the names that models give them, are then used in place if the compute
    /// device's quota does not hold them. A table that would make slots large lives on the host, if a quota allows it there
    /// and the order is interleaved. A tied embedding is needed whole, so it is not such a table. Default: no.
    pub fn gather_embeddings(mut self, gather: bool) -> Self {
        self.gather = gather;
        self
    }

    /// Sets whether the caller provides the memory for streamed layers, so that the plan counts none: for
    /// [`Streamer::with_slots`](crate::Streamer::with_slots). Default: no.
    pub fn external_slots(mut self, own: bool) -> Self {
        self.external_slots = own;
        self
    }

    /// Sets whether each streamed layer always uses the same slot. With n slots, and layers numbered from 0 in order of
    /// execution, layer k uses slot k mod n. A layer's tensors then keep their addresses, which are known before the first
    /// pass: for CUDA graphs, and for code that keeps state for its weights.
    ///
    /// This costs time if n does not divide the number of streamed layers: the first layers of a pass then use the slots of
    /// the last ones, so fewer can be prefetched across the end of a pass. [`Plan::forecast`] includes this time. Default: no,
    /// any layer uses any slot.
    pub fn fixed_slots(mut self, fixed: bool) -> Self {
        self.fixed_slots = fixed;
        self
    }

    /// Sets how tensors are divided into allocations on the compute device, and where they are used in place: as the
    /// [allocator](crate::load::TensorAllocator) needs it that a load is given. Slots of the caller's own are not divided.
    /// Default: [`TensorGrouping::Joined`], or [`TensorGrouping::PerTensor`] where that is refused because a slot or a module would be
    /// more than the [largest allocation](crate::device::DeviceInfo::largest) of the compute device.
    pub fn grouping(mut self, grouping: TensorGrouping) -> Self {
        self.grouping = grouping;
        self
    }

    /// Has slots hold the values of quantised tensors, as elements of `dtype` (F32, F16 or BF16), in place of GGML's blocks. Blocks
    /// alone live on the devices and cross the links: they arrive in a landing buffer on the compute device, which computes the
    /// values into the slot before the layer's turn. Blocks that live on the compute device are computed into a slot from there.
    /// So the plan counts blocks where tensors live, and values in slots. Tensors that are not in blocks, and modules that are
    /// used in place, stay as they are. Default: slots hold what crosses the link, for callers with kernels of their own and
    /// for [`LayerGuard::dequantise`](crate::LayerGuard::dequantise), which takes less memory.
    ///
    /// A table of embeddings is computed whole, into a slot of its size. Gather its rows instead
    /// ([`gather_embeddings`](Planner::gather_embeddings)), or cast it.
    ///
    /// ```
    /// # use tensor_offload::checkpoint::{Layout, TensorInfo};
    /// # use tensor_offload::{DType, Machine, Planner};
    /// let tensor = |n: u64| TensorInfo::new(format!("blk.{n}.ffn_up.weight"), DType::Q8_0, &[1024, 1024], 0, n * (1088 << 10));
    /// let layout = Layout::new((0..8).map(tensor).collect::<Result<_, _>>()?);
    /// let machine = Machine::described(&["cuda:0=24mib".parse()?, "cpu=64mib".parse()?]);
    /// let planner = Planner::new(&layout, &machine).allocation("cpu,*".parse()?).depth(1);
    /// assert_eq!(planner.clone().plan()?.slots().to_string(), "2 x 1.06 MiB");
    /// let plan = planner.unpack(DType::BF16).plan()?;
    /// assert_eq!(plan.slots().to_string(), "2 x 2.00 MiB + 1 x 2.12 MiB to unpack from");
    /// assert_eq!(plan.streamed_bytes(), 8 * (1088 << 10));
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    pub fn unpack(mut self, dtype: DType) -> Self {
        self.in_slots = Some(Arc::new(self.layout.unpacked(dtype)));
        self.unpacked = Some(dtype);
        self
    }

    /// Sets the most host memory that streamed weights may pin. `None` is no limit, though a backend pins no more than its own
    /// limit. Default: the limit of the machine's host ([`DeviceInfo::pinned_cap`](crate::device::DeviceInfo::pinned_cap)).
    pub fn pinned_cap(mut self, cap: Option<ByteSize>) -> Self {
        self.pinned_cap = cap;
        self
    }

    /// Sets the network's compute time, for a pass or for each layer. Mode auto hides transfers behind it; other modes ignore it.
    /// Default: no time, so that `auto` makes the transfers short.
    pub fn compute_time(mut self, time: impl Into<ComputeTime>) -> Self {
        self.compute_time = time.into();
        self
    }

    /// Keeps modules of each layer resident that would make its slot larger than this many bytes.
    pub(super) fn largest_slot(mut self, bytes: Option<u64>) -> Self {
        self.largest_slot = bytes;
        self
    }

    /// Places every module, and checks that the devices hold the result.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] for a device that the machine lacks;
    /// [`Error::DoesNotFit`] with the device, the term, the missing bytes, and remedies, each of which
    /// was planned and fits;
    /// [`AllocationError::DuplicateDevice`](crate::error::AllocationError::DuplicateDevice) when the allocation names the compute
    /// device by name and without; [`Error::Plan`] for more than 2^63 bytes;
    /// [`Error::Invalid`] for compute times of another number of layers, and for a type that blocks are not
    /// [unpacked](Planner::unpack) to.
    pub fn plan(&self) -> Result<Plan> {
        if let Some(dtype) = self.unpacked.filter(|&dtype| !check::is_unpacked_type(dtype)) {
            return Err(Error::invalid(format!("blocks are unpacked to F32, F16 or BF16, not {dtype}")));
        }
        self.planned().map_err(|error| self.advised(error))
    }

    /// As [`plan`](Planner::plan), without remedies.
    pub(super) fn planned(&self) -> Result<Plan> {
        let plan = |planner: &Planner<'_>| match planner.is_auto() {
            true => auto::plan(&planner.for_auto(), planner.compute_device()),
            false => planner.placed().and_then(|parts| planner.checked(parts)),
        };
        plan(self).or_else(|error| match self.may_divide(&error) {
            true => plan(&self.clone().grouping(TensorGrouping::PerTensor)).map_err(|_| error),
            false => Err(error),
        })
    }

    /// Whether an allocation for each tensor of the compute device may fit where this error says that larger ones do not. What
    /// mode auto was refused last may be another thing.
    fn may_divide(&self, error: &Error) -> bool {
        let Error::DoesNotFit(short) = error else { return false };
        let compute = self.compute_device();
        let is_limited = self.machine.device(compute).is_ok_and(|info| info.largest.is_some());
        let is_it = short.device == compute && short.limit_is == Limit::InOneAllocation;
        is_limited && (is_it || self.is_auto()) && self.grouping.is_joined() && !self.external_slots
    }

    /// Places every module, whether the devices hold the result or not.
    pub(super) fn placed(&self) -> Result<Parts> {
        let total = self.total()?;
        let compute = self.compute_device();
        let everything = Allocation::all_on(compute);
        let allocation = self.allocation.as_ref().unwrap_or(&everything);
        let quotas = Quotas::new(allocation, self.machine, compute, total)?;
        let mut placement = Placement::new(self.layout, &quotas);
        let kept = self.kept();
        placement.keep_first(|module| kept[module], total);
        let order = if allocation.mode() == Mode::Virtual { Order::Sequential } else { self.order };
        if order == Order::Interleaved {
            let outliers = outliers_of(self.layout).into_iter();
            let (tables, others): (Vec<_>, Vec<_>) =
                outliers.partition(|&module| self.is_gathered(self.layout.at(module)));
            placement.keep_outliers(&others, &tables);
        }
        if order == Order::Interleaved {
            placement.others_first(|module| self.names(&self.in_place, self.layout.at(module)));
        }
        match (allocation.virtual_vram(), order) {
            (Some(virtual_vram), _) if allocation.mode() == Mode::Virtual => {
                placement.virtual_vram(virtual_vram.bytes().unwrap_or(u64::MAX), self.machine)?;
            }
            (_, Order::Sequential) => placement.sequential(),
            (_, Order::Interleaved) if self.unit == Unit::Module => placement.interleaved(),
            (_, Order::Interleaved) => placement.uniform(),
        }
        let (home, mut warnings) = placement.finish();
        warnings.extend(self.idle_patterns());
        let (devices, assignments, slots) = self.assemble(&quotas, compute, &home)?;
        warnings.extend(self.copies_in_place(&devices, compute));
        warnings.extend(self.disks_in_memory(&devices));
        warnings.extend(self.uneven_slots(&assignments));
        warnings.extend(self.nothing_compressed(&assignments, compute));
        Ok(Parts {
            mode: allocation.mode(),
            order,
            unit: self.unit,
            compute,
            depth: self.depth,
            external_slots: self.external_slots,
            fixed_slots: self.fixed_slots,
            grouping: self.grouping,
            unpacked: self.unpacked,
            landing_cap: self.landing_cap,
            decoding: self.decoding(compute),
            slots,
            devices,
            assignments,
            warnings,
            explanation: None,
        })
    }

    /// The plan with these parts, if the devices hold them.
    pub(super) fn checked(&self, parts: Parts) -> Result<Plan> {
        fits::fits(self.machine, self.layout, &parts.devices, &parts.assignments)?;
        fits::allocations(self.machine, self.layout, self.in_slots(), &parts)?;
        Plan::new(parts)
    }

    /// The modules to keep resident.
    pub(super) fn kept(&self) -> Per<ModuleId, bool> {
        let layout = self.layout;
        let mut kept: Per<ModuleId, bool> =
            layout.modules().iter().map(|module| self.names(&self.resident, module)).collect();
        if let Some(most) = self.largest_slot {
            layout.layers().iter().for_each(|layer| self.excess(layer, most).for_each(|module| kept[module] = true));
        }
        kept
    }

    /// The modules of `layer` to keep resident so that the rest fits a slot of `most` bytes: from the largest down, each module
    /// that does not fit with those that fit before it.
    pub(super) fn excess(&self, layer: &Layer, most: u64) -> impl Iterator<Item = ModuleId> + use<'a> {
        let (layout, in_slots) = (self.layout, self.in_slots());
        let bytes = |module: &ModuleId| Layout::slot_bytes(in_slots.at(*module).bytes);
        let mut modules = if self.slot(layer) > most { layer.modules.clone() } else { Vec::new() };
        modules.retain(|&module| !self.is_in_place(layout.at(module)));
        modules.sort_by_key(|module| std::cmp::Reverse(bytes(module)));
        let mut in_slot = 0u64;
        modules.retain(|module| {
            let fits = in_slot.saturating_add(bytes(module)) <= most;
            in_slot += if fits { bytes(module) } else { 0 };
            !fits
        });
        // Blocks need a slot wherever they live.
        modules.retain(|&module| layout.at(module).bytes == in_slots.at(module).bytes);
        modules.into_iter()
    }

    /// The bytes of a slot for `layer` if all of it is streamed except what is used in place.
    pub(super) fn slot(&self, layer: &Layer) -> u64 {
        let moves = self.layout.needs(layer).into_iter().map(|module| self.layout.at(module));
        let moves = moves.filter(|module| !self.is_in_place(module)).map(|module| self.in_slots().at(module.id));
        moves.map(|module| Layout::slot_bytes(module.bytes)).fold(0, u64::saturating_add)
    }

    /// The layout with its tensors as slots hold them.
    pub(super) fn in_slots(&self) -> &Layout {
        self.in_slots.as_deref().unwrap_or(self.layout)
    }

    pub(super) fn total(&self) -> Result<u64> {
        // As slots hold them the tensors take more bytes, if they take other ones.
        let bytes = self.in_slots().modules().iter().map(|module| u128::from(module.bytes)).sum();
        match u64::try_from(bytes).is_ok_and(|bytes| bytes <= MOST_BYTES) {
            true => Ok(self.layout.bytes()),
            false => Err(PlanFault::TooManyBytes { bytes, most: MOST_BYTES }.into()),
        }
    }

    /// Whether the allocation is of mode auto.
    pub(super) fn is_auto(&self) -> bool {
        self.allocation.as_ref().is_some_and(|allocation| allocation.mode() == Mode::Auto)
    }

    /// The planner that mode auto starts from.
    pub(super) fn for_auto(&self) -> Planner<'a> {
        let reserve = self.allocation.as_ref().and_then(Allocation::reserve);
        let reserve = reserve.unwrap_or(ByteSize(self.reserve));
        self.clone().compute(self.compute_device()).reserve(reserve)
    }

    /// Whether any of the patterns matches a module's name, or, of the factors of a deferred change, that of their weight's module.
    fn names(&self, patterns: &[Pattern], module: &Module) -> bool {
        let weights = module.factors_of.map(|of| self.layout.at(of).name.as_str());
        let matches = |name: &str| patterns.iter().any(|pattern| pattern.matches(name));
        matches(&module.name) || weights.is_some_and(matches)
    }

    /// Whether a module is used where it lives, if that is not the compute device.
    pub(super) fn is_in_place(&self, module: &Module) -> bool {
        self.names(&self.in_place, module) || self.is_gathered(module)
    }

    /// Whether the module is a table whose rows the caller gathers.
    fn is_gathered(&self, module: &Module) -> bool {
        let of_rows = |&tensor: &TensorId| {
            let TensorInfo { dtype, shape, .. } = self.layout.at(tensor);
            shape.len() == 2 && dtype.bytes_of(&shape[1..]).is_some()
        };
        let looked_up = self.gather && !module.tied && module.alias_of.is_none() && is_table(&module.name);
        looked_up && matches!(&module.tensors[..], [tensor] if of_rows(tensor))
    }

    pub(crate) fn compute_device(&self) -> DeviceId {
        let accelerator = |id: &DeviceId| !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk);
        let named = self.allocation.as_ref().and_then(Allocation::compute).or(self.compute);
        named.or_else(|| self.machine.ids().find(accelerator)).unwrap_or(DeviceId::CPU)
    }

    /// Warnings for patterns that match no module.
    fn idle_patterns(&self) -> impl Iterator<Item = Warning> {
        let idle = |pattern: &&Pattern| !self.layout.modules().iter().any(|module| pattern.matches(&module.name));
        let patterns = self.resident.iter().chain(&self.in_place);
        patterns.filter(idle).map(|pattern| Warning::IdlePattern { pattern: pattern.text().to_owned() })
    }
}

/// The most host memory that may be pinned; `None` if the machine has no host.
pub(super) fn default_pinned_cap(machine: &Machine) -> Option<ByteSize> {
    machine.device(DeviceId::CPU).ok().map(|host| ByteSize(host.pinned_cap()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the largest down, each module that fits with those before it stays in the slot.
    #[test]
    fn modules_that_exceed_a_slot_are_kept_out_of_it() {
        let mut at = 0;
        let tensor = |(name, kib): (&str, u64)| {
            at += kib << 10;
            TensorInfo::new(format!("layers.0.{name}.weight"), DType::U8, &[kib << 10], 0, at - (kib << 10)).unwrap()
        };
        let layout = Layout::new([("a", 5), ("b", 2), ("c", 3)].map(tensor).into());
        let machine = Machine::described(&["cuda:0=1gib".parse().unwrap(), "cpu=1gib".parse().unwrap()]);
        let planner = Planner::new(&layout, &machine);
        let layer = &layout.layers()[0];
        let kept = |planner: &Planner<'_>, kib: u64| {
            let names =
                planner.excess(layer, kib << 10).map(|module| layout.at(module).name["layers.0.".len()..].to_owned());
            names.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(planner.slot(layer), 10 << 10);
        assert_eq!([11, 10, 9, 7, 4, 1].map(|kib| kept(&planner, kib)), ["", "", "b", "c", "a b", "a c b"]);
        // Modules used in place take no slot.
        let planner = planner.in_place("a");
        assert_eq!(planner.slot(layer), 5 << 10);
        assert_eq!([5, 4].map(|kib| kept(&planner, kib)), ["", "b"]);
    }
}
