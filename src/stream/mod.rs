//! Layers on the compute device, one after the other, each brought while the one before it runs.

mod classes;
mod guard;
mod lanes;
mod report;
mod slots;
mod through_host;
mod turns;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use classes::{OwnSlot, SlotClass, SlotTensor};
pub use guard::LayerGuard;
pub use report::{LaneReport, Stalls, StreamReport, Via};

use crate::backend::LONGEST;
use crate::backend::process::Process;
use crate::backend::{Buf, Event, Joined, Role, Stream};
use crate::error::{Error, Result};
use crate::load::Model;
use lanes::Lanes;
use slots::{Candidates, Fill, Slots};
use turns::Turns;

/// Brings the layers of a model to its compute device and hands them out in any order.
///
/// Asking for a layer makes the compute stream wait until the layer's tensors are there, and sends for the
/// `depth` layers after it (around the end to the beginning, for the next pass). The host waits for nothing but, where
/// the device cannot wait for the bytes (pageable host memory, files), for a thread that queues their copies.
/// A slot is filled again only after the compute that was queued while its [`LayerGuard`] lived: queue your
/// kernels on [`compute`](Streamer::compute), then drop the guard. Depth 0 is the same with nothing sent for ahead.
///
/// ```
/// use std::sync::Arc;
/// use tensor_offload::{Checkpoint, Loader, Patches, Planner, Registry, Streamer, backend::Clock, Machine};
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
/// let machine = Machine::described(&["cuda:0=256kb".parse()?, "cpu=64mb".parse()?]);
/// let devices = Registry::described(machine, Clock::Wall);
/// let checkpoint = Checkpoint::open(path)?;
/// let patches = Patches::none(checkpoint.layout());
/// let plan = Planner::new(patches.layout(), devices.machine())
///     .allocation("cuda:0,20kb;cpu,*".parse()?)
///     .compute("cuda:0".parse()?)
///     .depth(1)
///     .plan()?;
/// let model = Arc::new(Loader::new(&devices).load(&checkpoint, &patches, &plan)?);
/// let mut streamer = Streamer::new(&model)?;
/// for layer in 0..model.layout().layers.len() {
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
    turns: Arc<Turns>,
    slots: Slots,
    /// Slots of the plan's that stay unused, since the caller brought others.
    spare: Option<Vec<Vec<Buf>>>,
    deadline: Duration,
    report: StreamReport,
    /// The one that has its lanes' threads.
    process: Process,
}

/// The longest wait of the host unless told otherwise.
const DEADLINE: Duration = Duration::from_secs(600);

impl Streamer {
    /// A streamer with a compute stream of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] while another streamer of this model lives, or when its plan leaves the slots to the caller;
    /// whatever making streams meets.
    pub fn new(model: &Arc<Model>) -> Result<Streamer> {
        let compute = model.residency().device().stream(Role::Compute)?;
        Streamer::on(model, compute)
    }

    /// A streamer for work that is queued on `compute`, a stream of the model's compute device.
    ///
    /// # Errors
    /// [`Error::Invalid`] while another streamer of this model lives, when its plan leaves the slots to the caller, or
    /// when `compute` is of another device; whatever making streams meets.
    pub fn on(model: &Arc<Model>, compute: Arc<dyn Stream>) -> Result<Streamer> {
        let mut lanes = lanes(model, &*compute)?;
        let turns = Turns::by_lane(model, &mut lanes)?;
        if turns.streams() && model.plan().slots().count == 0 {
            return Err(Error::invalid("the plan leaves the slots to the caller; give them with Streamer::with_slots"));
        }
        let memory = model.residency().take_slots().ok_or_else(busy)?;
        let slots = Slots::shared(memory, turns.count());
        Ok(Streamer::from(model, compute, lanes, turns, slots, None))
    }

    /// A streamer that fills memory of the caller's: for each of [`Model::slot_classes`] some slots, each a buffer for
    /// every tensor. A framework keeps its weights in tensors of its own, and they are filled in place; on CUDA devices
    /// [`BufMut::foreign`](crate::backend::BufMut) makes buffers of them. Nothing is allocated on the device.
    ///
    /// A tensor of a class has one address in each slot, and [`LayerGuard::slot`] tells the slot. How far ahead layers
    /// are sent for is up to the plan's depth and the slots of their classes. Plan with
    /// [`Planner::own_slots`](crate::Planner::own_slots), so that the model takes no memory for slots.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use tensor_offload::backend::{Clock, MemoryKind};
    /// # use tensor_offload::{Checkpoint, Loader, Machine, Patches, Planner, Registry, Streamer};
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// # let machine = Machine::described(&["cuda:0=1mb".parse()?, "cpu=64mb".parse()?]);
    /// # let devices = Registry::described(machine, Clock::Wall);
    /// # let checkpoint = Checkpoint::open(path)?;
    /// # let patches = Patches::none(checkpoint.layout());
    /// let plan = Planner::new(patches.layout(), devices.machine()).allocation("cpu,*".parse()?).own_slots(true).plan()?;
    /// let model = Arc::new(Loader::new(&devices).load(&checkpoint, &patches, &plan)?);
    /// let device = model.residency().device();
    /// let mut slots = Vec::new();
    /// for class in model.slot_classes() {
    ///     let buffer = |bytes: u64| device.alloc(bytes as usize, MemoryKind::Whole); // or your own memory
    ///     let slot = |_| class.tensors.iter().map(|tensor| buffer(tensor.bytes)).collect();
    ///     slots.push((0..class.layers.len().min(3)).map(slot).collect::<Result<_, _>>()?);
    /// }
    /// # use tensor_offload::backend::Role;
    /// let mut streamer = Streamer::with_slots(&model, device.stream(Role::Compute)?, slots)?;
    /// for layer in 0..model.layout().layers.len() {
    ///     let guard = streamer.layer(layer)?;
    ///     println!("{} is in slot {:?}", guard.layer().name, guard.slot());
    /// }
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first class, slot or tensor whose memory is not what it needs; as
    /// [`on`](Streamer::on). The slots are dropped then.
    pub fn with_slots(model: &Arc<Model>, compute: Arc<dyn Stream>, slots: Vec<Vec<OwnSlot>>) -> Result<Streamer> {
        let classes = model.slot_classes();
        classes::check(model, &classes, &slots)?;
        let mut lanes = lanes(model, &*compute)?;
        let turns = Turns::by_tensor(model, &mut lanes)?;
        let spare = model.residency().take_slots().ok_or_else(busy)?;
        let slots = Slots::fixed(slots, classes::class_of_layers(&classes, turns.count()));
        Ok(Streamer::from(model, compute, lanes, turns, slots, Some(spare)))
    }

    fn from(
        model: &Arc<Model>,
        compute: Arc<dyn Stream>,
        lanes: Lanes,
        turns: Turns,
        slots: Slots,
        spare: Option<Vec<Vec<Buf>>>,
    ) -> Streamer {
        let report = StreamReport { lanes: lanes.report(), ..StreamReport::default() };
        let (model, turns) = (Arc::clone(model), Arc::new(turns));
        let process = Process::current();
        Streamer { model, compute, lanes, turns, slots, spare, deadline: DEADLINE, report, process }
    }

    /// Sets how long the host waits for anything at most; a century at most. Default: 600 s.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Streamer {
        self.deadline = deadline.min(LONGEST);
        self
    }

    /// The layer at this place in [`Layout::layers`](crate::checkpoint::Layout::layers), on the compute device.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such layer, or when guards hold all slots (one more layer needs a
    /// greater depth); [`Error::TimedOut`] when the host waited for longer than the deadline; whatever the copies meet.
    /// The streamer stays usable.
    pub fn layer(&mut self, layer: usize) -> Result<LayerGuard> {
        self.process.check()?;
        let device = Arc::clone(self.model.residency().device());
        let mut guard = None;
        device.in_one_go(&mut || guard = Some(self.bring_layer(layer)));
        guard.unwrap_or_else(|| Err(Error::invalid(format!("{} did not do what it was asked for", device.id()))))
    }

    fn bring_layer(&mut self, layer: usize) -> Result<LayerGuard> {
        let layers = self.turns.count();
        if layer >= layers {
            return Err(Error::invalid(format!("there is no layer {layer}, the model has {layers}")));
        }
        let slot = if self.turns.is_streamed(layer) { Some(self.bring_now(layer)?) } else { None };
        let mut known = HashSet::new();
        let arrivals = slot.iter().flat_map(|(_, parts)| parts).flat_map(Buf::filled_by);
        // The parts that one lane fills have their event in common.
        for event in arrivals.filter(|event| known.insert(event.key())) {
            if self.compute.wait(event)? == Joined::HostMustWait {
                let begin = Instant::now();
                let outcome = self.stall("a copy", event);
                self.report.stalled("a copy that the compute stream cannot wait for".to_owned(), begin.elapsed());
                outcome?;
            }
        }
        let (model, turns, compute) = (Arc::clone(&self.model), Arc::clone(&self.turns), Arc::clone(&self.compute));
        let guard = LayerGuard { model, compute, turns, layer, slot };
        self.report.layers += 1;
        self.send_ahead(layer);
        Ok(guard)
    }

    /// The stream on which compute is queued.
    pub fn compute(&self) -> &Arc<dyn Stream> {
        &self.compute
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What it did so far.
    pub fn report(&self) -> &StreamReport {
        &self.report
    }

    /// The caller's own slots, with the events of their last uses; none are there for a streamer with slots of the
    /// library's.
    ///
    /// # Errors
    /// The streamer, while guards or copies hold slots.
    pub fn into_slots(mut self) -> Result<Vec<Vec<OwnSlot>>, Box<Streamer>> {
        match self.spare.is_some().then(|| self.slots.take_fixed(self.deadline)) {
            None => Ok(Vec::new()),
            Some(Some(slots)) => Ok(slots),
            Some(None) => Err(Box::new(self)),
        }
    }

    /// The slot that a layer is in, its number and its parts, all of them there or on a stream of the device.
    fn bring_now(&mut self, layer: usize) -> Result<(usize, Vec<Buf>)> {
        let slot = match self.slots.find_sound(layer) {
            Some(slot) => {
                self.report.prefetched += 1;
                slot
            }
            None => {
                let mut candidates = self.slots.candidates(&self.turns, layer, layer);
                let slot = self.bring(layer, layer, true, &mut candidates)?;
                self.report.late += 1;
                slot.ok_or_else(|| held(self.slots.alike(layer)))?
            }
        };
        let waits = self.slots.is_with_a_lane(slot);
        let begin = Instant::now();
        let parts = {
            let _span = waits.then(|| tracing::debug_span!("stall", layer, what = "staging").entered());
            self.slots.collect(slot, self.deadline)
        };
        if waits {
            self.report.stalled("the thread that stages bytes".to_owned(), begin.elapsed());
        }
        Ok((self.slots.number(slot), parts?))
    }

    /// Sends for the layers after `layer`, as far as there are slots for them.
    fn send_ahead(&mut self, layer: usize) {
        let turns = Arc::clone(&self.turns);
        // For each set of slots those that may be filled, looked for when the first layer needs one.
        let mut candidates: Vec<(usize, Candidates)> = Vec::new();
        for ahead in turns.after(layer).take(self.model.plan().depth()) {
            if self.slots.find(ahead).is_some() {
                continue;
            }
            let set = self.slots.set_of(ahead);
            let place = candidates.iter().position(|(of, _)| *of == set).unwrap_or_else(|| {
                candidates.push((set, self.slots.candidates(&turns, ahead, layer)));
                candidates.len() - 1
            });
            // What fails here is tried again, and reported, when the layer is asked for.
            if let Err(error) = self.bring(ahead, layer, false, &mut candidates[place].1) {
                tracing::debug!(layer = ahead, %error, "not sent for ahead");
                break;
            }
        }
    }

    /// Sends for a layer, seen from `current`, in a slot whose layer is not needed before it; none when there is none.
    fn bring(
        &mut self,
        layer: usize,
        current: usize,
        asked: bool,
        candidates: &mut Candidates,
    ) -> Result<Option<usize>> {
        let distance = self.turns.distance(current, layer);
        let (model, turns, lanes) = (&*self.model, &*self.turns, &self.lanes);
        let fill = Fill { model, turns, lanes, layer, asked, deadline: self.deadline };
        let slot = self.slots.bring(&fill, distance, candidates)?;
        if slot.is_some() {
            for part in &self.turns.of_layer(layer).parts {
                self.report.sent(part.lane, part.copied());
            }
        }
        Ok(slot)
    }

    fn stall(&self, what: &'static str, event: &Event) -> Result<()> {
        let _span = tracing::debug_span!("stall", what).entered();
        event.wait(self.deadline)
    }
}

/// The lanes of a streamer that computes on `compute`.
fn lanes(model: &Arc<Model>, compute: &dyn Stream) -> Result<Lanes> {
    let (device, other) = (model.residency().device().id(), compute.device());
    match device == other {
        true => Ok(Lanes::new(model)),
        false => Err(Error::invalid(format!("the model computes on {device}, the stream is of {other}"))),
    }
}

fn busy() -> Error {
    Error::invalid("the model, or one that shares its slots, is being streamed already; they are for one streamer")
}

fn held(count: usize) -> Error {
    Error::invalid(format!(
        "all {count} slots are held by guards; drop one before asking for another layer, or plan with a greater depth"
    ))
}

impl Drop for Streamer {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        let memory = self.slots.drain(self.deadline);
        self.model.residency().return_slots(self.spare.take().unwrap_or(memory));
    }
}

impl fmt::Debug for Streamer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streamer").field("model", &self.model).field("report", &self.report).finish_non_exhaustive()
    }
}
