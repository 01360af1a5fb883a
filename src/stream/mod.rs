//! Streams layers to the compute device, one after the other, each fetched while the layer before it runs.

mod dequantise;
mod guard;
mod in_slot;
mod kernels;
mod lanes;
mod pass;
mod report;
mod rows;
mod slots;
mod through_host;
mod verdict;

use std::any::Any;
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use guard::LayerGuard;
pub use in_slot::InSlot;
pub use pass::Pass;
pub use report::{LaneReport, StallCause, Stalls, StreamReport, Via};

use crate::backend::process::Process;
use crate::backend::{Buf, BufMut, Event, FenceState, Joined, Role, Stream};
use crate::checkpoint::{LayerId, Layout, ModuleId, Per};
use crate::error::{Error, InUse, Measured, Mismatch, Missing, PlanFault, Result};
use crate::limits::LONGEST;
use crate::load::{FetchMemory, Model, SlotMemory};
use crate::schedule::{Contents, Part, Schedule};
use crate::staging::Pool;
use crate::transfer::Kept;
use lanes::{Lanes, Read};
use slots::{Fill, Slots, Writable};
use verdict::Verdict;

/// Fetches the layers of a model to its compute device and hands them out in any order.
///
/// Asking for a layer makes the compute stream wait until the layer's tensors have arrived, and prefetches the `depth`
/// layers that come next. In the first pass that follows the model's order, wrapping around from the last layer to the
/// first for the next pass. Later passes follow the order of the pass before, until layers are asked for in another order.
/// The host waits in two cases only: where the device cannot wait for the bytes (pageable host memory, files), it waits for
/// the thread that queues their copies; and where the compute device is the host itself, it waits until the layer is there,
/// since compute on the host begins as soon as the layer is handed out.
///
/// A slot is filled again only after the compute that was queued while its [`LayerGuard`] lived: queue your
/// kernels on [`compute`](Streamer::compute), then drop the guard. Depth 0 is the same without prefetching.
///
/// ```
/// use std::sync::Arc;
/// use tensor_offload::{Checkpoint, Loader, Machine, Planner, Registry, Streamer, Weights, backend::Clock};
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
/// let machine = Machine::described(&["cuda:0=256kb".parse()?, "cpu=64mb".parse()?]);
/// let devices = Registry::described(machine, Clock::Wall);
/// let weights = Weights::new(Checkpoint::open(path)?);
/// let plan = Planner::new(weights.layout(), devices.machine())
///     .allocation("cuda:0,20kb;cpu,*".parse()?)
///     .compute("cuda:0".parse()?)
///     .depth(1)
///     .plan()?;
/// let model = Arc::new(Loader::new(&devices).load(&weights, &plan)?);
/// let mut streamer = Streamer::new(&model)?;
/// for layer in model.layout().layer_ids() {
///     let guard = streamer.layer(layer)?;
///     for tensor in guard.tensors() {
///         assert_eq!(tensor.device(), "cuda:0".parse()?);
///     }
///     // Queue the layer's kernels on `streamer.compute()` here.
/// }
/// # Ok::<(), tensor_offload::Error>(())
/// ```
pub struct Streamer {
    model: Arc<Model>,
    compute: Arc<dyn Stream>,
    lanes: Lanes,
    streamed: Arc<Streamed>,
    schedule: Schedule,
    slots: Slots,
    /// The plan's slots, unused because the caller supplied its own.
    spare: Option<Vec<SlotMemory>>,
    /// The staging buffers of [`send_rows`](Streamer::send_rows), made at its first use.
    rows: Option<Pool>,
    deadline: Duration,
    report: StreamReport,
    /// The verdicts that nobody has seen yet on codes of layers that were handed out.
    unseen: VecDeque<(LayerId, Vec<Arc<Verdict>>)>,
    /// Keeps the buffers of direct reads from one layer to the next, if any are read from a disk.
    _buffers: Option<Kept>,
    /// Slots that the device has prepared to read files into, while these live.
    _prepared: Vec<Box<dyn Any + Send + Sync>>,
    /// The process that its lanes' threads run in.
    process: Process,
}

/// Facts about the layers that a streamer and its guards share.
struct Streamed {
    /// The parts that each layer fetches.
    contents: Contents,
    /// The layout with its tensors as slots hold them, if any are unpacked.
    unpacked: Option<Layout>,
    /// The modules that each layer needs and that stay on the compute device.
    resident: Per<LayerId, Vec<ModuleId>>,
}

impl Streamer {
    /// Creates a streamer with its own compute stream.
    ///
    /// # Errors
    /// [`Error::InUse`] while another streamer of this model lives; [`Error::Plan`] when its plan leaves the slots to the
    /// caller; [`Error::Missing`] when the device has no kernel for a type that the plan [unpacks](crate::Planner::unpack); any
    /// error of making the streams.
    pub fn new(model: &Arc<Model>) -> Result<Streamer> {
        let compute = model.residency().device().stream(Role::Compute)?;
        Streamer::on(model, compute)
    }

    /// Creates a streamer for work queued on `compute`, a stream of the model's compute device.
    ///
    /// # Errors
    /// [`Error::InUse`] while another streamer of this model lives; [`Error::Plan`] when its plan leaves the slots to the
    /// caller; [`Error::Missing`] when the device has no kernel for a type that the plan [unpacks](crate::Planner::unpack);
    /// [`Error::Mismatch`] when `compute` belongs to another device; any error of making the streams.
    pub fn on(model: &Arc<Model>, compute: Arc<dyn Stream>) -> Result<Streamer> {
        let mut lanes = lanes(model, &*compute)?;
        let streamed = Streamed::new(model, &mut lanes)?;
        if streamed.contents.streamed() > 0 && model.plan().slots().sizes().next().is_none() {
            return Err(PlanFault::SlotsLeftToCaller.into());
        }
        let memory = model.residency().take_slots().ok_or(InUse::Streamed)?;
        lanes.land(memory.landings);
        Ok(Streamer::from(model, compute, lanes, streamed, Slots::new(memory.slots), None))
    }

    /// Creates a streamer that fills the caller's memory. All layers share the slots; each is one buffer of at least
    /// [`Slots::bytes_each`] (`model.plan().slots()`). If the plan has [`Slots::large_bytes`], at least one slot must be
    /// that large, and only such slots hold the layers that are larger than the others. A framework's tensors can be views
    /// of the slots and are then filled in place; on CUDA devices [`BufMut::from_raw`](crate::backend::BufMut) makes a
    /// buffer from a framework's memory. Nothing is allocated on the device.
    ///
    /// In a given slot each tensor always has the same [byte range](Streamer::range_in_slot);
    /// [`LayerGuard::slot`] returns the slot's number. Two or more slots allow prefetching, as far as the plan's depth and
    /// the slots permit. Plan with [`Planner::external_slots`](crate::Planner::external_slots), so that the model takes no
    /// memory for slots, and with [`Planner::fixed_slots`](crate::Planner::fixed_slots) if each layer must use the same slot
    /// in every pass.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use tensor_offload::backend::{Clock, MemoryKind, Role};
    /// # use tensor_offload::{Checkpoint, Loader, Machine, Planner, Registry, Streamer, Weights};
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// # let machine = Machine::described(&["cuda:0=1mb".parse()?, "cpu=64mb".parse()?]);
    /// # let devices = Registry::described(machine, Clock::Wall);
    /// # let weights = Weights::new(Checkpoint::open(path)?);
    /// let plan = Planner::new(weights.layout(), devices.machine()).allocation("cpu,*".parse()?).external_slots(true).plan()?;
    /// let model = Arc::new(Loader::new(&devices).load(&weights, &plan)?);
    /// let device = model.residency().device();
    /// let bytes = plan.slots().bytes_each as usize;
    /// let slots = (0..3).map(|_| device.alloc(bytes, MemoryKind::Whole)); // or your own memory
    /// let slots = slots.collect::<Result<_, _>>()?;
    /// let mut streamer = Streamer::with_slots(&model, device.stream(Role::Compute)?, slots)?;
    /// for layer in model.layout().layer_ids() {
    ///     let guard = streamer.layer(layer)?;
    ///     println!("{} is in slot {:?}", guard.layer().name, guard.slot());
    /// }
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongSize`] when there is no slot, or naming the first slot that is too small, or the largest one if none is
    /// large enough; [`Error::Mismatch`] for a slot on another device; [`Error::Plan`] when the plan
    /// [divides](crate::Plan::grouping) slots of the library's own; as [`on`](Streamer::on). On an error the slots are
    /// dropped.
    ///
    /// [`Slots::bytes_each`]: crate::plan::Slots::bytes_each
    /// [`Slots::large_bytes`]: crate::plan::Slots::large_bytes
    pub fn with_slots(model: &Arc<Model>, compute: Arc<dyn Stream>, slots: Vec<BufMut>) -> Result<Streamer> {
        let (plan, grouping) = (model.plan(), model.plan().grouping());
        if grouping.is_apart() && !plan.has_external_slots() {
            return Err(PlanFault::SlotsDivided { grouping }.into());
        }
        let mut lanes = lanes(model, &*compute)?;
        let streamed = Streamed::new(model, &mut lanes)?;
        let (device, shape) = (compute.device(), plan.slots());
        let most = slots.iter().map(BufMut::bytes).max();
        if slots.is_empty() && streamed.contents.streamed() > 0 {
            return Err(Error::WrongSize { what: Measured::Slots, needed: 1, given: 0 });
        }
        for (number, slot) in slots.iter().enumerate() {
            if slot.device() != device {
                let (what, memory) = (format!("slot {number}"), slot.device());
                return Err(Mismatch::Memory { what, memory, device }.into());
            }
            let (what, given) = (Measured::Slot { number }, slot.bytes() as u64);
            let needed = if most == Some(slot.bytes()) { shape.largest() } else { shape.bytes_each };
            if given < needed {
                return Err(Error::WrongSize { what, needed, given });
            }
        }
        let spare = model.residency().take_slots().ok_or(InUse::Streamed)?;
        lanes.land(spare.landings);
        let slots = Slots::new(slots.into_iter().map(|slot| vec![vec![slot.freeze()]]));
        Ok(Streamer::from(model, compute, lanes, streamed, slots, Some(spare.slots)))
    }

    fn from(
        model: &Arc<Model>,
        compute: Arc<dyn Stream>,
        lanes: Lanes,
        streamed: Streamed,
        slots: Slots,
        spare: Option<Vec<SlotMemory>>,
    ) -> Streamer {
        let report = StreamReport { lanes: lanes.report(), ..StreamReport::default() };
        let plan = model.plan();
        let schedule = Schedule::new(&streamed.contents, slots.sizes(), plan.depth(), plan.fixed_slots());
        let (model, streamed, deadline) = (Arc::clone(model), Arc::new(streamed), model.limits().work);
        let (process, rows) = (Process::current(), None);
        let _prepared = lanes.prepare(slots.allocations());
        let _buffers = lanes.reads_disk().then(Kept::new);
        Streamer {
            model,
            compute,
            lanes,
            streamed,
            schedule,
            slots,
            spare,
            rows,
            deadline,
            report,
            unseen: VecDeque::new(),
            _buffers,
            _prepared,
            process,
        }
    }

    /// Sets the longest time that the host waits for anything, capped at a century. The default comes from the
    /// [limits](crate::Registry::limits) of the model's registry.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Streamer {
        self.deadline = deadline.min(LONGEST);
        self
    }

    /// Hands out a layer of the model's [layout](Model::layout), on the compute device.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such layer; [`Error::InUse`] when guards hold all slots (one more layer needs a
    /// greater depth); [`Error::TimedOut`] when the host waited longer than the deadline; any error of the copies. The
    /// streamer stays usable.
    pub fn layer(&mut self, layer: LayerId) -> Result<LayerGuard> {
        self.process.check()?;
        let device = Arc::clone(self.model.residency().device());
        let mut guard = None;
        device.batched(&mut || guard = Some(self.turn(layer)));
        guard.unwrap_or_else(|| Err(Error::bug(format!("{} did not do what it was asked for", device.id()))))
    }

    fn turn(&mut self, layer: LayerId) -> Result<LayerGuard> {
        let missing = || Missing::LayerAt { index: layer.index(), count: self.streamed.contents.len() };
        let is_streamed = self.streamed.contents.get(layer).ok_or_else(missing)?.is_streamed();
        self.see_verdicts()?;
        self.schedule.turn(layer);
        let slot = match is_streamed {
            true => Some(self.fetched(layer)?),
            false => None,
        };
        if let Some((gds, not_gds)) = self.lanes.device_reads() {
            (self.report.gds, self.report.not_gds) = (gds, not_gds);
        }
        let mut known = HashSet::new();
        let on_host = self.compute.device().is_host();
        let arrivals = slot.iter().flat_map(|(_, parts)| parts).flat_map(Buf::filled_by);
        // The parts that one lane fills share their event.
        for event in arrivals.filter(|event| known.insert(event.key())) {
            let joined = self.compute.wait(event)?;
            // Compute on the host runs at once, in the caller's threads, and no stream can hold it back.
            if joined == Joined::HostMustWait || (on_host && !matches!(event.state(), FenceState::Done)) {
                let begin = Instant::now();
                let outcome = self.stall("a copy", event);
                self.report.stalled(StallCause::Copy, begin.elapsed());
                outcome?;
            }
        }
        let (model, streamed, compute) =
            (Arc::clone(&self.model), Arc::clone(&self.streamed), Arc::clone(&self.compute));
        let verdicts = slot.iter().flat_map(|(slot, _)| self.slots.verdicts(*slot)).collect::<Vec<_>>();
        if !verdicts.is_empty() {
            self.unseen.push_back((layer, verdicts.clone()));
        }
        let guard = LayerGuard { model, compute, streamed, layer, slot, verdicts };
        self.report.layers += 1;
        self.prefetch();
        Ok(guard)
    }

    /// The stream that compute is queued on.
    pub fn compute(&self) -> &Arc<dyn Stream> {
        &self.compute
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Statistics of this streamer's work so far.
    pub fn report(&self) -> &StreamReport {
        &self.report
    }

    /// The number of the slot that holds a layer or is being filled with it. With
    /// [fixed slots](crate::Planner::fixed_slots) it is the slot that the layer always uses. `None` if nothing of the layer
    /// is streamed, no slot holds it now, or there is no such layer.
    pub fn slot_of(&self, layer: LayerId) -> Option<usize> {
        self.streamed.contents.get(layer)?;
        self.schedule.fixed_slot_of(layer).or(self.schedule.slot_of(layer))
    }

    /// Returns the caller's slots, which carry the events of their last uses. Empty for a streamer that uses the model's
    /// slots.
    ///
    /// # Errors
    /// Returns the streamer while guards or copies hold slots.
    pub fn into_slots(mut self) -> Result<Vec<BufMut>, Box<Streamer>> {
        if self.spare.is_none() {
            return Ok(Vec::new());
        }
        (0..self.slots.count()).for_each(|slot| self.schedule.empty(slot));
        let slots = self.slots.take_all(self.deadline);
        slots.map(|slots| slots.into_iter().flatten().collect()).ok_or_else(|| Box::new(self))
    }

    /// The number and parts of a layer's slot. All its copies are complete or queued on a stream of the device.
    fn fetched(&mut self, layer: LayerId) -> Result<(usize, Vec<Buf>)> {
        if let Some(slot) = self.schedule.slot_of(layer).filter(|&slot| !self.slots.is_sound(slot)) {
            self.schedule.empty(slot);
        }
        let slot = match self.schedule.slot_of(layer) {
            Some(slot) => {
                self.report.hits += 1;
                slot
            }
            None => {
                let slot = self.fetch(layer, true)?;
                self.report.misses += 1;
                slot.ok_or(InUse::Slots { count: self.schedule.slots_for(layer) })?
            }
        };
        let waits = self.slots.is_with_a_lane(slot);
        let begin = Instant::now();
        let parts = {
            let _span = waits.then(|| tracing::debug_span!("stall", layer = layer.index(), what = "staging").entered());
            self.slots.collect(slot, self.deadline)
        };
        if waits {
            self.report.stalled(StallCause::Staging, begin.elapsed());
        }
        if parts.is_err() && self.slots.is_collected(slot) {
            self.schedule.empty(slot);
        }
        Ok((slot, parts?))
    }

    /// Fetches the layers that come next, as far as there are slots for them.
    fn prefetch(&mut self) {
        for layer in self.schedule.ahead() {
            // A failed fetch is retried when the layer is asked for, and its error reported then.
            if let Err(error) = self.fetch(layer, false) {
                tracing::debug!(layer = layer.index(), %error, "not fetched ahead");
                break;
            }
        }
    }

    /// Fetches a layer into the best slot that is available; `None` if there is none. For a fetch on demand it waits for
    /// lanes that hold a slot.
    fn fetch(&mut self, layer: LayerId, on_demand: bool) -> Result<Option<usize>> {
        let candidates = self.schedule.candidates(layer);
        let mut taken = self.take_first(&candidates, Duration::ZERO);
        if taken.is_none() && on_demand {
            taken = self.take_first(&candidates, self.deadline);
        }
        let Some((slot, memory)) = taken else { return Ok(None) };
        let parts = &self.streamed.contents.of(layer).parts;
        let read: Vec<Read> = parts.iter().map(|part| self.lanes.read(&self.model, part)).collect();
        let fill = Fill { model: &self.model, lanes: &self.lanes, parts, on_demand, deadline: self.deadline };
        self.slots.fill(&fill, slot, memory)?;
        self.schedule.hold(slot, layer);
        let crossing = |part: &Part| if self.lanes.is_local(part.lane) { 0 } else { part.copied() };
        for (part, read) in parts.iter().zip(read) {
            self.report.sent(part.lane, crossing(part), read);
        }
        Ok(Some(slot))
    }

    /// Takes the memory of the first of these slots that is available, and marks the slot empty.
    fn take_first(&mut self, candidates: &[usize], patience: Duration) -> Option<(usize, Writable)> {
        for &slot in candidates {
            if self.slots.cancel(slot, patience) {
                self.schedule.empty(slot);
            }
            if let Some(memory) = self.slots.take(slot) {
                self.schedule.empty(slot);
                return Some((slot, memory));
            }
        }
        None
    }

    fn stall(&self, what: &'static str, event: &Event) -> Result<()> {
        let _span = tracing::debug_span!("stall", what).entered();
        event.wait(self.deadline)
    }
}

impl Streamed {
    /// The parts that the layers of `model` fetch. Creates the lanes for them.
    fn new(model: &Model, lanes: &mut Lanes) -> Result<Streamed> {
        let (layout, blocks) = (model.layout(), model.plan().slot_blocks(model.layout()));
        let in_slots = model.plan().in_slots(layout);
        let of_modules = lanes.of_modules(model)?;
        let homes = (model.index().groups(), model.index().compressed());
        let contents = Contents::new((layout, &in_slots), homes, &of_modules, &blocks);
        lanes.expect(&contents);
        let compute = model.residency().device().id();
        // The compute reads no blocks that are unpacked.
        let stays = |module: &ModuleId| model.plan().origin(*module).is_none();
        let on_compute = |module: &ModuleId| model.bufs(*module).first().is_some_and(|buf| buf.device() == compute);
        let resident = |layer| model.layout().needs(layer).into_iter().filter(stays).filter(on_compute).collect();
        let resident = layout.layers().iter().map(resident).collect();
        let unpacked = model.plan().unpacked().map(|_| in_slots.into_owned());
        Ok(Streamed { contents, unpacked, resident })
    }
}

/// The lanes of a streamer that computes on `compute`.
fn lanes(model: &Arc<Model>, compute: &dyn Stream) -> Result<Lanes> {
    let (device, other) = (model.residency().device().id(), compute.device());
    if device != other {
        return Err(Mismatch::Compute { model: device, stream: other }.into());
    }
    kernels::check(model, compute)?;
    Lanes::new(model)
}

impl Drop for Streamer {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        let slots = self.slots.drain(self.deadline);
        let (slots, landings) = (self.spare.take().unwrap_or(slots), self.lanes.take_landings());
        self.model.residency().return_slots(FetchMemory { slots, landings });
    }
}

impl fmt::Debug for Streamer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streamer").field("model", &self.model).field("report", &self.report).finish_non_exhaustive()
    }
}
