//! From a file to a loaded model in one expression.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::{Loader, Model};
use crate::adapter::{Adapter, Matching, Weights};
use crate::allocation::{Allocation, Mode};
use crate::bytes::ByteSize;
use crate::checkpoint::Checkpoint;
use crate::device::{DeviceId, Machine};
use crate::error::{Error, Result};
use crate::patch::ScalePolicy;
use crate::plan::{Plan, Planner};
use crate::registry::Registry;
use crate::rounding::Rounding;

/// A model that is to be loaded: its files, the adapters to merge, and where it is to live. [`Model::open`] makes one.
///
/// ```
/// use tensor_offload::prelude::*;
/// # let machine = Machine::described(&["cuda:0=256kb,link=1".parse()?, "cpu=64mb".parse()?]);
/// # let devices = Registry::described(machine, tensor_offload::backend::Clock::Virtual);
/// let model = Model::open("examples/data/tiny-llama")?
///     .adapter("examples/data/tiny-llama-lora", 0.8)?
///     .allocation("cuda:0,25%;cpu,*")?
///     .depth(1)
///     .load(&devices)?;
/// for layer in model.stream()?.pass() {
///     let layer = layer?;
///     let weight = layer.tensors().next().expect("every layer has tensors");
///     println!("{} {} {:?} on {}", weight.name(), weight.dtype(), weight.shape(), weight.device());
/// }
/// # Ok::<(), Error>(())
/// ```
///
/// It stands for the stages [`Checkpoint`], [`Adapter`], [`Weights`], [`Planner`] and [`Loader`]. What it does not set is
/// set on the planner ([`planner`](ModelBuilder::planner)) or the loader ([`load_with`](ModelBuilder::load_with)); and
/// [`weights`](ModelBuilder::weights) gives what the stages take.
#[must_use = "nothing is loaded until `load`"]
pub struct ModelBuilder {
    checkpoint: Checkpoint,
    adapters: Vec<Adapter>,
    matching: Matching,
    rounding: Rounding,
    scales: ScalePolicy,
    allocation: Option<Allocation>,
    settings: Vec<Setting>,
    /// The adapters on the checkpoint, once they are needed.
    weights: OnceLock<Weights>,
}

/// What a caller sets on the planner.
type Setting = Box<dyn for<'p> Fn(Planner<'p>) -> Planner<'p> + Send + Sync>;

impl Model {
    /// Opens a checkpoint as [`Checkpoint::open`] does, to be loaded. Only headers are read.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<ModelBuilder> {
        Ok(ModelBuilder::new(Checkpoint::open(path)?))
    }
}

impl ModelBuilder {
    /// The model of a checkpoint that is open, to be loaded.
    pub fn new(checkpoint: Checkpoint) -> ModelBuilder {
        ModelBuilder {
            checkpoint,
            adapters: Vec::new(),
            matching: Matching::Strict,
            rounding: Rounding::default(),
            scales: ScalePolicy::default(),
            allocation: None,
            settings: Vec::new(),
            weights: OnceLock::new(),
        }
    }

    /// Opens an adapter as [`Adapter::open`] does, to be merged with this strength after those before it.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn adapter(self, path: impl AsRef<Path>, strength: f32) -> Result<ModelBuilder> {
        Ok(self.with_adapter(Adapter::open(path, strength)?))
    }

    /// Merges an adapter that is open after those before it.
    pub fn with_adapter(mut self, adapter: Adapter) -> ModelBuilder {
        self.adapters.push(adapter);
        self.unresolved()
    }

    /// Whether all of each adapter has to match the checkpoint. Default: [`Matching::Strict`].
    pub fn matching(mut self, matching: Matching) -> ModelBuilder {
        self.matching = matching;
        self.unresolved()
    }

    /// How merged weights are rounded. Default: [`Rounding::NearestEven`].
    pub fn rounding(mut self, rounding: Rounding) -> ModelBuilder {
        self.rounding = rounding;
        self.unresolved()
    }

    /// Whether the scales of merged fp8 weights are kept. Default: [`ScalePolicy::Keep`].
    pub fn scales(mut self, policy: ScalePolicy) -> ModelBuilder {
        self.scales = policy;
        self.unresolved()
    }

    /// Which device takes how much: an [`Allocation`], or its text (`cuda:0,50%;cpu,*`). Default: everything on the compute
    /// device.
    ///
    /// # Errors
    /// [`Error::Allocation`], with the place where the text is not of the form.
    pub fn allocation<A>(mut self, allocation: A) -> Result<ModelBuilder>
    where
        A: TryInto<Allocation>,
        Error: From<A::Error>,
    {
        self.allocation = Some(allocation.try_into()?);
        Ok(self)
    }

    /// The device that computes; see [`Planner::compute`].
    pub fn compute(self, device: DeviceId) -> ModelBuilder {
        self.planner(move |planner| planner.compute(device))
    }

    /// How many layers are fetched ahead of the one in use. Default: 2.
    pub fn depth(self, layers: usize) -> ModelBuilder {
        self.planner(move |planner| planner.depth(layers))
    }

    /// Memory that stays free on the compute device for activations. Default: 0.
    pub fn reserve(self, size: ByteSize) -> ModelBuilder {
        self.planner(move |planner| planner.reserve(size))
    }

    /// Sets anything else on the planner.
    ///
    /// ```
    /// # use tensor_offload::{Model, Order};
    /// # let model = Model::open("examples/data/tiny-llama")?;
    /// let model = model.planner(|planner| planner.order(Order::Sequential).keep_resident("model.norm"));
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    pub fn planner(mut self, set: impl for<'p> Fn(Planner<'p>) -> Planner<'p> + Send + Sync + 'static) -> ModelBuilder {
        self.settings.push(Box::new(set));
        self
    }

    /// The checkpoint with the adapters, as the planner and the loader take it. The adapters' factors are read once.
    ///
    /// # Errors
    /// As [`Weights::patched`] and [`Weights::scales`].
    pub fn weights(&self) -> Result<&Weights> {
        if let Some(weights) = self.weights.get() {
            return Ok(weights);
        }
        let weights = Weights::patched(self.checkpoint.clone(), self.adapters.clone(), self.matching)?;
        let weights = weights.scales(self.scales)?.rounding(self.rounding);
        Ok(self.weights.get_or_init(|| weights))
    }

    /// Where every module would live if it were loaded now. The links of the devices are measured if the allocation is
    /// `auto` and nobody described them.
    ///
    /// # Errors
    /// As [`weights`](ModelBuilder::weights), [`Planner::plan`] and [`Registry::measured_topology`].
    pub fn plan(&self, devices: &Registry) -> Result<Plan> {
        let (weights, machine) = (self.weights()?, self.machine(devices)?);
        let planner = self.settings.iter().fold(Planner::new(weights.layout(), &machine), |planner, set| set(planner));
        let planner = self.allocation.iter().cloned().fold(planner, Planner::allocation);
        planner.plan()
    }

    /// Loads the model: plans it, merges the adapters, and puts every module where the plan wants it.
    ///
    /// # Errors
    /// As [`plan`](ModelBuilder::plan) and [`Loader::load`].
    pub fn load(&self, devices: &Registry) -> Result<Arc<Model>> {
        self.load_with(&Loader::new(devices))
    }

    /// As [`load`](ModelBuilder::load), by a loader with settings of its own: progress, cancellation, threads.
    ///
    /// # Errors
    /// As [`load`](ModelBuilder::load).
    pub fn load_with(&self, loader: &Loader<'_>) -> Result<Arc<Model>> {
        loader.load(self.weights()?, &self.plan(loader.registry)?).map(Arc::new)
    }

    /// The devices as they are now, with links where the plan depends on them.
    fn machine(&self, devices: &Registry) -> Result<Machine> {
        let machine = devices.machine_now();
        let auto = self.allocation.as_ref().is_some_and(|allocation| allocation.mode() == Mode::Auto);
        if auto && machine.topology().is_estimate() {
            return Ok(machine.with_topology(devices.measured_topology()?));
        }
        Ok(machine)
    }

    /// Forgets what the adapters were resolved to.
    fn unresolved(mut self) -> ModelBuilder {
        self.weights = OnceLock::new();
        self
    }
}

impl fmt::Debug for ModelBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelBuilder")
            .field("checkpoint", &self.checkpoint)
            .field("adapters", &self.adapters.len())
            .field("allocation", &self.allocation)
            .finish_non_exhaustive()
    }
}
