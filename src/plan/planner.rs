//! The planner: inputs in, a checked plan out.

use super::auto;
use super::check;
use super::forecast::ComputeTime;
use super::outlier::outliers_of;
use super::pattern::matches;
use super::place::{Placement, Quotas};
use super::value::{Assignment, Order, Parts, Plan, Unit, Use};
use super::warning::Warning;
use crate::allocation::{Allocation, Mode};
use crate::bytes::ByteSize;
use crate::checkpoint::{Layer, Layout, Module, ModuleId, Per, TensorId, TensorInfo, is_table};
use crate::device::{DeviceId, DeviceKind, Machine};
use crate::error::{PlanFault, Result};

/// The most bytes that can be planned; products of two such numbers stay within `u128`.
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
    resident: Vec<String>,
    in_place: Vec<String>,
    /// Whether the caller gathers rows of tables that are looked up.
    gather: bool,
    pub(super) external_slots: bool,
    pub(super) fixed_slots: bool,
    pub(super) compute_time: ComputeTime,
    /// What of a layer would make a slot larger than this is kept resident.
    largest_slot: Option<u64>,
}

impl<'a> Planner<'a> {
    /// A plan of `layout` for `machine` with everything on the compute device, until told otherwise.
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
            compute_time: ComputeTime::default(),
            largest_slot: None,
        }
    }

    /// Which device takes how much. Default: everything on the compute device.
    pub fn allocation(mut self, allocation: Allocation) -> Self {
        self.allocation = Some(allocation);
        self
    }

    /// The device that computes. The allocation's own (after `#`) comes before it. Default: the first device
    /// of the machine that is neither host nor disk, else `cpu`.
    pub fn compute(mut self, device: DeviceId) -> Self {
        self.compute = Some(device);
        self
    }

    /// How the modules are spread; mode virtual has an order of its own, and mode auto finds one. Default:
    /// [`Order::Interleaved`].
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// What an interleaved order spreads; mode auto finds it. Default: [`Unit::Module`].
    pub fn unit(mut self, unit: Unit) -> Self {
        self.unit = unit;
        self
    }

    /// How many layers are brought ahead of the one in use; each takes a slot. Default: 2.
    pub fn depth(mut self, layers: usize) -> Self {
        self.depth = layers;
        self
    }

    /// Memory that the caller keeps on the compute device for activations. An allocation's own (`auto,reserve=2gb`)
    /// comes before it. Default: 0.
    pub fn reserve(mut self, size: ByteSize) -> Self {
        self.reserve = size.get();
        self
    }

    /// Bytes that patching needs on the compute device; they may use the memory of the slots. Default: 0.
    pub fn scratch(mut self, bytes: u64) -> Self {
        self.scratch = bytes;
        self
    }

    /// Places the modules of this name first, on the compute device, within its quota. `*` stands for any
    /// run of characters; may be called several times.
    pub fn keep_resident(mut self, pattern: impl Into<String>) -> Self {
        self.resident.push(pattern.into());
        self
    }

    /// Lets the modules of this name be used where they live instead of streamed, as experts that the caller
    /// runs on the host. `*` stands for any run of characters; may be called several times.
    pub fn in_place(mut self, pattern: impl Into<String>) -> Self {
        self.in_place.push(pattern.into());
        self
    }

    /// Whether the caller gathers what the network looks up of embeddings, instead of having the tables on the compute device:
    /// with [`Model::read_rows`](crate::Model::read_rows) or [`Streamer::send_rows`](crate::Streamer::send_rows). Then
    /// tables of tokens and positions, as models name them, that the compute device's quota does not hold are used in
    /// place; one that would make slots large lives on the host, if a quota allows it there and the order is interleaved.
    /// An embedding that is the head too is needed whole, and no such table. Default: no.
    pub fn gather_embeddings(mut self, gather: bool) -> Self {
        self.gather = gather;
        self
    }

    /// Whether the caller has memory for streamed layers, so that the plan counts none: for
    /// [`Streamer::with_slots`](crate::Streamer::with_slots). Default: no.
    pub fn external_slots(mut self, own: bool) -> Self {
        self.external_slots = own;
        self
    }

    /// Whether each streamed layer always uses the same slot: of n slots and layers numbered from 0 in order of execution,
    /// the k-th uses number k mod n. So its tensors keep their addresses, which are known before the first pass: for CUDA
    /// graphs, and for code that keeps state beside its weights.
    ///
    /// It costs time where n does not divide the number of streamed layers: the slots that the first layers of a pass
    /// use are then those of its last ones, so fewer can be fetched ahead across the end.
    /// [`Plan::forecast`] tells how much. Default: no, any layer uses any slot.
    pub fn fixed_slots(mut self, fixed: bool) -> Self {
        self.fixed_slots = fixed;
        self
    }

    /// The most host memory that streamed weights may pin; none for no limit, though a backend pins no more than its own.
    /// Default: what the machine says of its host ([`DeviceInfo::pinned_cap`](crate::device::DeviceInfo::pinned_cap)).
    pub fn pinned_cap(mut self, cap: Option<ByteSize>) -> Self {
        self.pinned_cap = cap;
        self
    }

    /// What the network itself takes in a pass, or each of its layers: behind it an allocation of mode auto hides
    /// transfers. Other modes do without. Default: no time, so that `auto` makes the transfers short.
    pub fn compute_time(mut self, time: impl Into<ComputeTime>) -> Self {
        self.compute_time = time.into();
        self
    }

    /// Keeps as much of each layer resident as would make its slot larger than so many bytes.
    pub(super) fn largest_slot(mut self, bytes: Option<u64>) -> Self {
        self.largest_slot = bytes;
        self
    }

    /// Places every module and checks that the devices hold the result.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`](crate::Error::UnknownDevice) for a device that the machine lacks;
    /// [`Error::DoesNotFit`](crate::Error::DoesNotFit) with the device, the term, the bytes short, and what would make it
    /// fit: these remedies are planned to see whether they do;
    /// [`AllocationError::DuplicateDevice`](crate::error::AllocationError::DuplicateDevice) when the allocation names the compute
    /// device by name and without; [`Error::Plan`](crate::Error::Plan) for more than 2^63 bytes;
    /// [`Error::Invalid`](crate::Error::Invalid) for compute times of another number of layers.
    pub fn plan(&self) -> Result<Plan> {
        let plan = match self.is_auto() {
            true => auto::plan(&self.for_auto(), self.compute_device()),
            false => self.placed().and_then(|parts| self.checked(parts)),
        };
        plan.map_err(|error| self.advised(error))
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
        warnings.extend(self.uneven_slots(&assignments));
        Ok(Parts {
            mode: allocation.mode(),
            order,
            unit: self.unit,
            compute,
            depth: self.depth,
            external_slots: self.external_slots,
            fixed_slots: self.fixed_slots,
            slots,
            devices,
            assignments,
            warnings,
            explanation: None,
        })
    }

    /// The plan of these parts, if the devices hold them.
    pub(super) fn checked(&self, parts: Parts) -> Result<Plan> {
        check::fits(self.machine, &parts.devices, &parts.assignments, self.largest_streamed(&parts.assignments))?;
        Plan::new(parts)
    }

    /// Which modules are to be kept resident.
    fn kept(&self) -> Per<ModuleId, bool> {
        let layout = self.layout;
        let mut kept: Per<ModuleId, bool> =
            layout.modules().iter().map(|module| any(&self.resident, &module.name)).collect();
        if let Some(most) = self.largest_slot {
            layout.layers().iter().for_each(|layer| self.excess(layer, most).for_each(|module| kept[module] = true));
        }
        kept
    }

    /// The modules of `layer` to keep resident if it is to fit a slot of `most` bytes: of those from the largest down, each
    /// that no longer fits beside those before it.
    pub(super) fn excess(&self, layer: &Layer, most: u64) -> impl Iterator<Item = ModuleId> + use<'a> {
        let layout = self.layout;
        let bytes = |module: &ModuleId| Layout::slot_bytes(layout.at(*module).bytes);
        let mut modules = if self.slot(layer) > most { layer.modules.clone() } else { Vec::new() };
        modules.retain(|&module| !self.is_in_place(layout.at(module)));
        modules.sort_by_key(|module| std::cmp::Reverse(bytes(module)));
        let mut in_slot = 0u64;
        modules.retain(|module| {
            let fits = in_slot.saturating_add(bytes(module)) <= most;
            in_slot += if fits { bytes(module) } else { 0 };
            !fits
        });
        modules.into_iter()
    }

    /// The bytes of a slot for `layer`, all of it streamed but for what is used in place.
    pub(super) fn slot(&self, layer: &Layer) -> u64 {
        let moves = self.layout.needs(layer).into_iter().map(|module| self.layout.at(module));
        let moves = moves.filter(|module| !self.is_in_place(module));
        moves.map(|module| Layout::slot_bytes(module.bytes)).fold(0, u64::saturating_add)
    }

    pub(super) fn total(&self) -> Result<u64> {
        let bytes = self.layout.modules().iter().map(|module| u128::from(module.bytes)).sum();
        let countable = u64::try_from(bytes).ok().filter(|&bytes| bytes <= MOST_BYTES);
        countable.ok_or_else(|| PlanFault::TooManyBytes { bytes, most: MOST_BYTES }.into())
    }

    /// Whether mode auto is to find the quotas.
    pub(super) fn is_auto(&self) -> bool {
        self.allocation.as_ref().is_some_and(|allocation| allocation.mode() == Mode::Auto)
    }

    /// The planner that mode auto begins with.
    pub(super) fn for_auto(&self) -> Planner<'a> {
        let reserve = self.allocation.as_ref().and_then(Allocation::reserve);
        let reserve = reserve.unwrap_or(ByteSize(self.reserve));
        Planner { allocation: None, compute: Some(self.compute_device()), ..self.clone() }.reserve(reserve)
    }

    /// Whether a module is to be used where it lives, if that is not the compute device.
    pub(super) fn is_in_place(&self, module: &Module) -> bool {
        any(&self.in_place, &module.name) || self.is_gathered(module)
    }

    /// Whether it is a table of which the caller gathers rows.
    fn is_gathered(&self, module: &Module) -> bool {
        let of_rows = |&tensor: &TensorId| {
            let TensorInfo { dtype, shape, .. } = self.layout.at(tensor);
            shape.len() == 2 && dtype.bytes_of(&shape[1..]).is_some()
        };
        let looked_up = self.gather && !module.tied && module.alias_of.is_none() && is_table(&module.name);
        looked_up && matches!(&module.tensors[..], [tensor] if of_rows(tensor))
    }

    pub(super) fn compute_device(&self) -> DeviceId {
        let accelerator = |id: &DeviceId| !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk);
        let named = self.allocation.as_ref().and_then(Allocation::compute).or(self.compute);
        named.or_else(|| self.machine.ids().find(accelerator)).unwrap_or(DeviceId::CPU)
    }

    /// The name of the layer that the slots are made for.
    fn largest_streamed(&self, assignments: &[Assignment]) -> Option<&str> {
        let bytes = |module: ModuleId| {
            Some(&assignments[module.index()]).filter(|a| a.usage == Use::Streamed).map_or(0, |a| a.bytes)
        };
        let of = |modules: &[ModuleId]| modules.iter().map(|&module| bytes(module)).sum::<u64>();
        let layers = self.layout.layers().iter().rev();
        layers.max_by_key(|layer| of(&layer.modules)).map(|layer| layer.name.as_str())
    }

    /// Warnings for patterns that name nothing.
    fn idle_patterns(&self) -> impl Iterator<Item = Warning> {
        let idle = |pattern: &&String| !self.layout.modules().iter().any(|module| matches(pattern, &module.name));
        let patterns = self.resident.iter().chain(&self.in_place);
        patterns.filter(idle).map(|pattern| Warning::IdlePattern { pattern: pattern.clone() })
    }
}

fn any(patterns: &[String], name: &str) -> bool {
    patterns.iter().any(|pattern| matches(pattern, name))
}

/// The most of the machine's host memory that may be pinned; none where it has no host.
pub(super) fn default_pinned_cap(machine: &Machine) -> Option<ByteSize> {
    machine.device(DeviceId::CPU).ok().map(|host| ByteSize(host.pinned_cap()))
}
