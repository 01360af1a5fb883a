//! A model in memory: every module on the device that its plan gives it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::Reservation;
use super::allocator::Allocators;
use super::compressed;
use super::deferred::Scales;
use super::in_files::{Files, stays_in_files};
use super::index::TensorIndex;
use super::probe::lost;
use super::provenance::Provenance;
use super::read_back::{ReadBack, TensorView};
use super::report::LoadReport;
use super::reuse::Reuse;
use super::store::{FetchMemory, Home, Part, Residency, SlotMemory, SlotPool, WeightStore};
use super::worker::Tensors;
use crate::backend::{Buf, BufMut, Device, MemoryKind};
use crate::checkpoint::{Layout, ModuleId, Per, TensorId};
use crate::device::DeviceId;
use crate::dtype::{DType, Element};
use crate::error::{Error, Missing, Result};
use crate::limits::Limits;
use crate::lossless::Info;
use crate::plan::{Assignment, Plan, Slots, Use};
use crate::registry::Registry;
use crate::schedule::{Groups, SlotBlocks};

/// A loaded model. Its memory is released when the last owner drops it.
pub struct Model {
    /// The tensors, and their byte ranges in its memory.
    index: TensorIndex,
    plan: Plan,
    store: Arc<WeightStore>,
    residency: Residency,
    devices: BTreeMap<DeviceId, Arc<dyn Device>>,
    read_back: ReadBack,
    /// The provenance of each tensor; empty if the model was not filled.
    provenance: Per<TensorId, Provenance>,
    /// The scales of its deferred changes; empty if the model was not filled.
    scales: Scales,
    report: LoadReport,
    limits: Limits,
    /// The allocators that its memory is from.
    allocators: Allocators,
}

/// The parts that a model is assembled from.
pub(super) struct Parts<'a> {
    pub(super) layout: Arc<Layout>,
    pub(super) plan: &'a Plan,
    pub(super) groups: Groups,
    /// The memory of each group; `None` if another module owns its storage.
    pub(super) homes: Vec<Option<Arc<Home>>>,
    pub(super) provenance: Per<TensorId, Provenance>,
    pub(super) scales: Scales,
    /// The slots of another model, if they are shared.
    pub(super) slots: Option<Arc<SlotPool>>,
    /// The devices of the base that bytes are copied from.
    pub(super) from: Vec<Arc<dyn Device>>,
}

impl Model {
    /// A model without contents: its memory is allocated as `plan` says and holds unspecified bytes. For replays,
    /// benchmarks and dry runs. On simulated devices that keep [sizes only](crate::backend::Contents::SizesOnly) it
    /// costs no memory, whatever its size.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tensor_offload::backend::{Backend, Clock, Contents, Simulated};
    /// use tensor_offload::checkpoint::Layout;
    /// use tensor_offload::{Machine, Model, Planner, Registry, Streamer};
    /// use std::time::Duration;
    ///
    /// let machine = Machine::described(&["cpu=64gib".parse()?, "cuda:0=24gib,link=27.2".parse()?]);
    /// let simulated = Arc::new(Simulated::new(machine, Clock::Virtual).contents(Contents::SizesOnly));
    /// let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
    /// let layout = Layout::blocks([1 << 30; 40]);
    /// let plan = Planner::new(&layout, devices.machine()).allocation("cuda:0,20gib;cpu,*".parse()?).plan()?;
    /// let model = Arc::new(Model::unfilled(&devices, &layout, &plan)?);
    /// let mut streamer = Streamer::new(&model)?;
    /// for layer in layout.layer_ids() {
    ///     let _guard = streamer.layer(layer)?;
    ///     streamer.compute().occupy(Duration::from_millis(50))?;
    /// }
    /// streamer.compute().record(&[])?.wait(Duration::ZERO)?;
    /// assert!(simulated.now() < Duration::from_millis(2_030)); // 20 GiB, hidden behind 2 s
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Plan`] when the plan is for another model; any error of reserving or allocating. All memory is released
    /// before an error is returned.
    pub fn unfilled(registry: &Registry, layout: &Layout, plan: &Plan) -> Result<Model> {
        let plan = &*plan.checked(layout)?;
        let groups = plan.groups(layout);
        let (mut reuse, files) = (Reuse::nothing(layout, plan), Files::unspecified());
        reuse = reuse.leaving(stays_in_files(layout, plan, &groups, |id| registry.device(id))?);
        let mut reservation = Reservation::of(registry, plan, &reuse.needed_with_slots(plan))?;
        let home = |group: usize| {
            let first = plan.at(groups.members(group)[0]);
            let home = |()| {
                let (kind, apart) = (home_kind(first), plan.is_apart(first.index));
                let blocks = home_blocks(layout, plan, &groups, group);
                if reuse.is_compressed(group) {
                    let devices = (&*registry.device(first.device)?, &*registry.staging_host()?);
                    let (of, placed) = ((&reuse.compressed, &groups, group), (first, reuse.is_in_files(group)));
                    return compressed::unfilled(devices, &mut reservation, of, placed);
                }
                if reuse.is_in_files(group) {
                    let device = registry.device(first.device)?;
                    let buf = |(alone, _)| files.home(&*device, layout, tensors_of(layout, &groups, group, alone));
                    let bufs = blocks.into_iter().map(buf).collect::<Result<_>>()?;
                    return Ok(Arc::new(Home::in_files(bufs, kind, apart)));
                }
                let alloc = |(_, bytes)| reservation.alloc(first.device, bytes, kind).map(BufMut::freeze);
                let bufs = blocks.into_iter().map(alloc).collect::<Result<_>>()?;
                Ok(Arc::new(Home::new(bufs, kind, apart)))
            };
            layout.at(first.index).alias_of.is_none().then_some(()).map(home).transpose()
        };
        let homes = (0..groups.len()).map(home).collect::<Result<Vec<_>>>()?;
        let (layout, provenance, from) = (Arc::new(layout.clone()), Per::default(), Vec::new());
        let (scales, slots) = (Scales::default(), None);
        Model::assemble(Parts { layout, plan, groups, homes, provenance, scales, slots, from }, reservation, registry)
    }

    /// Allocates the slots from the reservation, unless they are another model's, and checks that nothing else is left
    /// of it. Checks too that no device failed that bytes were read from or written to: copies that it never made may count
    /// as done elsewhere.
    pub(super) fn assemble(parts: Parts<'_>, mut reservation: Reservation, registry: &Registry) -> Result<Model> {
        let Parts { layout, plan, groups, homes, provenance, scales, slots, from } = parts;
        let (compute, shape) = (plan.compute(), plan.slots());
        let slots = match slots {
            Some(slots) => slots,
            None => {
                let blocks = plan.slot_blocks(&layout);
                let alloc = |dtype, bytes| reservation.alloc_block(dtype, bytes);
                let memory = fetch_memory(shape, &blocks, alloc)?;
                Arc::new(SlotPool::new(shape, blocks, memory))
            }
        };
        let devices: BTreeMap<_, _> = reservation.devices().map(|d| (d.id(), Arc::clone(d))).collect();
        if let Some(id) = devices.keys().find(|id| reservation.left(**id) > 0) {
            let left = reservation.left(*id);
            return Err(Error::bug(format!("{left} bytes that the plan counts on {id} were not allocated")));
        }
        let compressed = plan.compressed(&layout, &groups);
        let device = devices.get(&compute).cloned().map_or_else(|| registry.device(compute), Ok)?;
        let host = registry.staging_host()?;
        if let Some(lost) = lost(devices.values().chain([&device, &host]).chain(&from)) {
            return Err(lost);
        }
        let (resident, away): (Vec<_>, Vec<_>) = homes
            .into_iter()
            .map(|home| match home {
                Some(home) if home.device() == compute => (Some(home), None),
                other => (None, other),
            })
            .unzip();
        Ok(Model {
            index: TensorIndex::new(layout, groups, compressed),
            plan: plan.clone(),
            store: Arc::new(WeightStore { homes: away }),
            residency: Residency { device, homes: resident, slots },
            devices,
            read_back: ReadBack::new(host, registry.limits().work),
            provenance,
            scales,
            report: LoadReport::default(),
            limits: *registry.limits(),
            allocators: reservation.allocators.clone(),
        })
    }

    /// Sets the slots, and the plan to stream by, which must have every module where it is.
    pub(super) fn set_slots(&mut self, plan: Plan, slots: Arc<SlotPool>) {
        self.plan = plan;
        self.residency.slots = slots;
    }

    pub(super) fn with_report(mut self, report: LoadReport) -> Model {
        self.report = report;
        self
    }

    /// The tensors, modules and layers, after patching.
    pub fn layout(&self) -> &Layout {
        self.index.layout()
    }

    /// The tensors' byte ranges in its memory.
    pub(crate) fn index(&self) -> &TensorIndex {
        &self.index
    }

    /// The plan: the device of every module.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The deadlines of waits for its devices.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The report of its load.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// The model's memory on its compute device.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// The model's memory on other devices.
    pub fn store(&self) -> &Arc<WeightStore> {
        &self.store
    }

    /// The bytes that the model holds on each device, slots included. What stays in the model's files takes none.
    pub fn bytes(&self) -> BTreeMap<DeviceId, u64> {
        let share = |share: &crate::plan::DevicePlan| (share.id, share.weights.bytes + share.beside.slots);
        let mut held: BTreeMap<DeviceId, u64> = self.plan.devices().iter().map(share).collect();
        for home in self.all_homes() {
            let less = home.bytes().saturating_sub(home.taken());
            held.entry(home.device()).and_modify(|bytes| *bytes = bytes.saturating_sub(less));
        }
        held.retain(|_, bytes| *bytes > 0);
        held
    }

    /// A view of the tensor `name` where it lives; `None` if there is no such tensor.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.view(self.index.find(name)?)
    }

    /// Copies the tensor `name` to host memory, wherever it lives. `dst` must be as long as the tensor.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor, [`Error::WrongSize`] when `dst` is of another length; any
    /// error of the copy.
    pub fn read(&self, name: &str, dst: &mut [u8]) -> Result<()> {
        let view = self.tensor(name).ok_or_else(|| Missing::Tensor { name: name.to_owned(), layer: None })?;
        self.download(&view, dst)
    }

    /// The elements of the tensor `name`, copied to host memory from wherever it lives.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor; [`Error::Mismatch`] when its elements are of another type than `T`;
    /// any error of the copy.
    pub fn to_vec<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        let view = self.tensor(name).ok_or_else(|| Missing::Tensor { name: name.to_owned(), layer: None })?;
        self.elements(&view)
    }

    /// The elements of a view, copied to host memory.
    pub(crate) fn elements<T: Element>(&self, view: &TensorView<'_>) -> Result<Vec<T>> {
        view.check_element::<T>()?;
        let mut elements = vec![T::zeroed(); view.size() / size_of::<T>()];
        self.download(view, bytemuck::cast_slice_mut(&mut elements))?;
        Ok(elements)
    }

    /// Copies the bytes of a view to host memory.
    pub(crate) fn download(&self, view: &TensorView<'_>, dst: &mut [u8]) -> Result<()> {
        self.read_back.read(self.device(view.buf().device())?, view, dst)
    }

    /// Copies byte ranges of a view's buffer to host memory.
    pub(crate) fn gather(&self, view: &TensorView<'_>, ranges: &[Range<usize>], dst: &mut [u8]) -> Result<()> {
        self.read_back.gather(self.device(view.buf().device())?, view.buf(), ranges, dst)
    }

    /// Whether anyone other than the calling owner holds the model, or its memory away from the compute device.
    pub(crate) fn is_shared(self: &Arc<Model>) -> bool {
        Arc::strong_count(self) > 1 || Arc::strong_count(&self.store) > 1
    }

    /// Waits until no queued work uses the memory that no other model shares, so that dropping the model frees it.
    pub(crate) fn wait_unused(&self) -> Result<()> {
        let own = self.all_homes().filter(|home| Arc::strong_count(home) == 1);
        own.flat_map(|home| home.all_bufs()).try_for_each(|buf| buf.wait_unused(self.limits.work))?;
        let pool = &self.residency.slots;
        let slots = pool.idle();
        let buffers = slots.iter().flat_map(|memory| memory.slots.iter().flatten().flatten().chain(&memory.landings));
        let mut own = buffers.filter(|_| Arc::strong_count(pool) == 1);
        own.try_for_each(|buf| buf.wait_unused(self.limits.work))
    }

    /// The parts of its memory.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Part> {
        self.all_homes().map(Part::of_home).chain([Part::of_slots(&self.residency)])
    }

    /// The bytes on each device that no other model shares: dropping the model frees them.
    pub(crate) fn own_bytes(&self) -> BTreeMap<DeviceId, u64> {
        let mut own = BTreeMap::new();
        for part in self.parts().filter(|part| part.holders == 1 && part.bytes > 0) {
            *own.entry(part.device).or_default() += part.bytes;
        }
        own
    }

    /// Whether the model has a [`Streamer`](crate::Streamer) now.
    pub(crate) fn is_streaming(&self) -> bool {
        self.residency.slots.idle().is_none()
    }

    /// The memory of every module that has a home, in order, and the byte ranges there.
    pub(super) fn homes(&self) -> impl Iterator<Item = (&Buf, Range<usize>)> {
        let home = |module| self.home(module).map(|home| home.within(&self.index.span(module)));
        self.layout().module_ids().filter_map(home).flatten()
    }

    /// All homes, those on the compute device first.
    fn all_homes(&self) -> impl Iterator<Item = &Arc<Home>> {
        self.residency.homes.iter().chain(&self.store.homes).flatten()
    }

    /// The provenance of each tensor; empty if the model was not filled.
    pub(super) fn provenance(&self) -> &Per<TensorId, Provenance> {
        &self.provenance
    }

    /// The scales of its deferred changes.
    pub(super) fn scales(&self) -> &Scales {
        &self.scales
    }

    /// The devices that the model is on.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.devices.values()
    }

    /// A view of a tensor where it lives; `None` if it has no memory.
    pub(crate) fn view(&self, tensor: TensorId) -> Option<TensorView<'_>> {
        let (buf, range) = self.find(self.index.owner(tensor), &self.index.place(tensor))?;
        Some(TensorView::new(self.layout().at(tensor), buf, range, self.limits.work))
    }

    /// The buffers where a module lives; none if another module owns its storage.
    pub(crate) fn bufs(&self, module: ModuleId) -> &[Buf] {
        self.home(module).map_or(&[], |home| home.bufs())
    }

    /// The buffer that holds a range of the memory where a module lives, and the range there.
    pub(crate) fn find(&self, module: ModuleId, range: &Range<usize>) -> Option<(&Buf, Range<usize>)> {
        self.home(module)?.find(range)
    }

    /// As [`find`](Model::find), for a range of what lanes copy: the module's compressed form, if there is one.
    pub(crate) fn find_stored(&self, module: ModuleId, range: &Range<usize>) -> Option<(&Buf, Range<usize>)> {
        self.home(module)?.find_stored(range)
    }

    /// The buffers that lanes copy of a module.
    pub(crate) fn stored_bufs(&self, module: ModuleId) -> impl Iterator<Item = &Buf> {
        let home = self.home(module);
        let compressed = home.and_then(|home| home.compressed.as_ref()).map(|form| &form.buf);
        let plain = home.filter(|_| compressed.is_none()).map_or(&[][..], |home| home.bufs());
        compressed.into_iter().chain(plain)
    }

    /// What the header of a code says that begins at a byte of a module's compressed form. `None` in a model without contents.
    pub(crate) fn code_info(&self, module: ModuleId, begin: usize) -> Option<Info> {
        self.home(module)?.compressed.as_ref()?.info(begin)
    }

    /// The allocators that its memory is from.
    pub(super) fn allocators(&self) -> &Allocators {
        &self.allocators
    }

    /// Takes the memory where a module lives, if nobody else has it. The model is not complete then.
    pub(super) fn take_home(&mut self, module: ModuleId) -> Option<Home> {
        let group = self.index.groups().of(module);
        let home = match self.residency.homes[group].as_mut() {
            Some(_) => &mut self.residency.homes[group],
            None => &mut Arc::get_mut(&mut self.store)?.homes[group],
        };
        match Arc::try_unwrap(home.take()?) {
            Ok(taken) => Some(taken),
            Err(shared) => {
                *home = Some(shared);
                None
            }
        }
    }

    /// The memory where a module lives; `None` if another module owns its storage.
    pub(super) fn home(&self, module: ModuleId) -> Option<&Arc<Home>> {
        let group = self.index.groups().of(module);
        self.residency.homes[group].as_ref().or(self.store.homes[group].as_ref())
    }

    pub(crate) fn device(&self, id: DeviceId) -> Result<&Arc<dyn Device>> {
        // The host reads the weights of compressed homes, wherever these are.
        let host = || id.is_host().then(|| self.host());
        let device = self.devices.get(&id).or_else(host);
        device.ok_or_else(|| Error::bug(format!("the model has nothing on {id}")))
    }

    pub(crate) fn host(&self) -> &Arc<dyn Device> {
        self.read_back.host()
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("modules", &self.layout().modules().len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// The blocks of the memory where a group of modules lives: the tensor that has the block for itself, if there is one, and
/// the size in bytes.
pub(super) fn home_blocks(layout: &Layout, plan: &Plan, groups: &Groups, group: usize) -> Vec<(Option<TensorId>, u64)> {
    let members = groups.members(group);
    if !plan.is_apart(members[0]) || groups.bytes(group) == 0 {
        return vec![(None, groups.bytes(group))];
    }
    let ranges = members.iter().flat_map(|&module| groups.ranges_of(layout, module));
    ranges.filter(|(_, range)| !range.is_empty()).map(|(tensor, range)| (Some(tensor), range.len() as u64)).collect()
}

/// The tensors in a block of a group's memory, with their byte ranges there: the one that is `alone`, or all that the group's
/// modules own.
pub(super) fn tensors_of(layout: &Layout, groups: &Groups, group: usize, alone: Option<TensorId>) -> Tensors {
    let own = groups.members(group).iter().flat_map(|&module| groups.ranges_of(layout, module));
    match alone {
        Some(tensor) => {
            let bytes = layout.at(tensor).bytes as usize;
            vec![(tensor, 0..bytes)]
        }
        None => own.collect(),
    }
}

/// Allocates slots block by block, and landing buffers: `alloc` is given the element type and the size in bytes.
pub(super) fn fetch_memory(
    shape: Slots,
    blocks: &SlotBlocks,
    mut alloc: impl FnMut(Option<DType>, u64) -> Result<BufMut>,
) -> Result<FetchMemory> {
    let mut slot = |large: bool| {
        let block = |(dtype, bytes)| match bytes {
            0 => Ok(Vec::new()),
            bytes => Ok(vec![alloc(dtype, bytes)?.freeze()]),
        };
        blocks.of_slot(large).map(block).collect::<Result<SlotMemory>>()
    };
    let large = std::iter::repeat_n(false, shape.count).chain(std::iter::repeat_n(true, shape.large));
    let slots = large.map(&mut slot).collect::<Result<_>>()?;
    let landing = |_| Ok(alloc(None, shape.landing_bytes)?.freeze());
    Ok(FetchMemory { slots, landings: (0..shape.landings).map(landing).collect::<Result<_>>()? })
}

/// The kind of memory of a module's home: pinned if it is copied from host memory straight to the device.
pub(super) fn home_kind(assignment: &Assignment) -> MemoryKind {
    let straight = assignment.usage == Use::Streamed && !assignment.staged;
    if assignment.device.is_host() && straight { MemoryKind::Pinned } else { MemoryKind::Arena }
}
