//! Layers on the compute device, one after the other, each brought while the one before it runs.

mod guard;
mod slots;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

pub use guard::LayerGuard;

use crate::backend::{Joined, Role, Stream};
use crate::bytes::ByteSize;
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::Model;
use crate::plan::Use;
use slots::Slots;

/// Brings the layers of a model to its compute device and hands them out in any order.
///
/// Asking for a layer makes the compute stream wait until the layer's tensors are there, and sends for the
/// `depth` layers after it (around the end to the beginning, for the next pass). The host waits for nothing.
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
    slots: Slots,
    /// For each layer the modules to bring, with their sizes.
    wanted: Arc<Vec<Vec<Wanted>>>,
    report: StreamReport,
}

/// How long the host waits for a copy whose event the compute stream cannot wait for.
const DEADLINE: Duration = Duration::from_secs(600);

/// A module that a layer brings, and where it goes in the slot.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    module: usize,
    at: usize,
}

/// What a streamer did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StreamReport {
    /// Layers handed out. Those with nothing to bring, all resident, are in neither of the next two.
    pub layers: u64,
    /// Those of them that were there or on their way when they were asked for.
    pub prefetched: u64,
    /// Those that had to be sent for when they were asked for.
    pub late: u64,
    /// Bytes copied from each device.
    pub bytes: BTreeMap<DeviceId, u64>,
}

impl Streamer {
    /// A streamer with a compute stream of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] while another streamer of this model lives; whatever making streams meets.
    pub fn new(model: &Arc<Model>) -> Result<Streamer> {
        let compute = model.residency().device().stream(Role::Compute)?;
        Streamer::on(model, compute)
    }

    /// A streamer for work that is queued on `compute`, a stream of the model's compute device.
    ///
    /// # Errors
    /// [`Error::Invalid`] while another streamer of this model lives, or when `compute` is of another device;
    /// whatever making streams meets.
    pub fn on(model: &Arc<Model>, compute: Arc<dyn Stream>) -> Result<Streamer> {
        let (device, other) = (model.residency().device().id(), compute.device());
        if device != other {
            return Err(Error::invalid(format!("the model computes on {device}, the stream is of {other}")));
        }
        let wanted = Arc::new(wanted(model));
        let slots = Slots::of(model, &wanted)?;
        Ok(Streamer { model: Arc::clone(model), compute, slots, wanted, report: StreamReport::default() })
    }

    /// The layer at this place in [`Layout::layers`](crate::checkpoint::Layout::layers), on the compute device.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such layer, or when guards hold all slots (one more layer needs a
    /// greater depth); whatever the copies meet. The streamer stays usable.
    pub fn layer(&mut self, layer: usize) -> Result<LayerGuard> {
        let layers = self.wanted.len();
        if layer >= layers {
            return Err(Error::invalid(format!("there is no layer {layer}, the model has {layers}")));
        }
        let window = self.window(layer);
        self.slots.forget_failed();
        let mut slot = None;
        if !self.wanted[layer].is_empty() {
            let there = self.slots.find(layer);
            if there.is_none() {
                self.bring(layer, &window)?;
            }
            *(if there.is_some() { &mut self.report.prefetched } else { &mut self.report.late }) += 1;
            slot = self.slots.find(layer);
        }
        for event in slot.iter().flat_map(|buf| buf.ready()) {
            if self.compute.wait(event)? == Joined::HostMustWait {
                event.wait(DEADLINE)?;
            }
        }
        let guard = LayerGuard::new(&self.model, &self.compute, layer, slot, &self.wanted);
        self.report.layers += 1;
        for &ahead in window.iter().filter(|&&ahead| ahead != layer) {
            if self.slots.find(ahead).is_some() {
                continue;
            }
            // What fails here is tried again, and reported, when the layer is asked for.
            if let Err(error) = self.bring(ahead, &window) {
                tracing::debug!(layer = ahead, %error, "not sent for ahead");
                break;
            }
        }
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

    /// The layer and the streamed ones that follow it, as far as there are slots.
    fn window(&self, layer: usize) -> Vec<usize> {
        let layers = self.wanted.len();
        let after = (1..layers).map(|ahead| (layer + ahead) % layers);
        let streamed = after.filter(|&l| !self.wanted[l].is_empty()).take(self.model.plan().depth());
        std::iter::once(layer).chain(streamed).collect()
    }

    /// Sends for a layer of `window`, in a slot whose layer is not needed before it.
    fn bring(&mut self, layer: usize, window: &[usize]) -> Result<()> {
        let copied = self.slots.fill(&self.model, layer, &self.wanted[layer], window)?;
        for (device, bytes) in copied {
            *self.report.bytes.entry(device).or_default() += bytes;
        }
        Ok(())
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        self.slots.give_back(&self.model);
    }
}

impl fmt::Debug for Streamer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streamer").field("model", &self.model).field("report", &self.report).finish_non_exhaustive()
    }
}

impl fmt::Display for StreamReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StreamReport { layers, prefetched, late, bytes } = self;
        write!(f, "{layers} layers, {prefetched} sent for ahead, {late} when asked for")?;
        bytes.iter().try_for_each(|(device, bytes)| write!(f, ", {} from {device}", ByteSize(*bytes).human()))
    }
}

/// For each layer the modules that it has to bring: its own streamed ones, and those whose storage its
/// tensors share, if these are streamed.
fn wanted(model: &Model) -> Vec<Vec<Wanted>> {
    let (layout, plan) = (model.layout(), model.plan());
    let wanted_of = |layer: &crate::checkpoint::Layer| {
        let (mut wanted, mut at) = (Vec::new(), 0);
        for module in layout.needs_of(layer) {
            if plan.assignments()[module].usage == Use::Streamed && layout.modules[module].bytes > 0 {
                wanted.push(Wanted { module, at });
                at += crate::checkpoint::Layout::slot_bytes(layout.modules[module].bytes) as usize;
            }
        }
        wanted
    };
    layout.layers.iter().map(wanted_of).collect()
}
