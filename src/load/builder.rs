//! From a file to a loaded model in one expression.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::allocator::{Allocators, TensorAllocator};
use super::{Loader, Model};
use crate::adapter::{Adapter, Matching, Weights};
use crate::allocation::{Allocation, Mode};
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, Rank, ShardRules};
use crate::device::{DeviceId, Machine};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::patch::ScalePolicy;
use crate::plan::{Plan, Planner};
use crate::registry::Registry;
use crate::rounding::Rounding;
use crate::transfer::Storage;

/// A model to load: its files, the adapters to merge, and where it will live. [`Model::open`] makes one.
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
/// It runs the stages [`Checkpoint`], [`Adapter`], [`Weights`], [`Planner`] and [`Loader`]. Other settings are made on the
/// planner ([`planner`](ModelBuilder::planner)) or the loader ([`load_with`](ModelBuilder::load_with)).
/// [`weights`](ModelBuilder::weights) returns the input of the later stages.
#[must_use = "nothing is loaded until `load`"]
pub struct ModelBuilder {
    checkpoint: Checkpoint,
    adapters: Vec<Adapter>,
    matching: Matching,
    rounding: Rounding,
    scales: ScalePolicy,
    /// Patterns, none for all tensors of floating-point numbers, and the types to cast to.
    casts: Vec<(Option<String>, DType)>,
    /// Whether weights in blocks that adapters change become blocks again.
    requantises: bool,
    /// Patterns of weights whose changes are not merged, and the types of their factors.
    deferred: Vec<(String, DType)>,
    /// Whether the load compresses what is to be kept so.
    compresses: bool,
    allocation: Option<Allocation>,
    settings: Vec<Setting>,
    allocators: Allocators,
    /// The adapters resolved against the checkpoint, once they are needed.
    weights: OnceLock<Weights>,
}

/// A setting of the planner.
type Setting = Box<dyn for<'p> Fn(Planner<'p>) -> Planner<'p> + Send + Sync>;

impl Model {
    /// Opens a checkpoint for loading, as [`Checkpoint::open`] does. Only headers are read.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<ModelBuilder> {
        Ok(ModelBuilder::new(Checkpoint::open(path)?))
    }

    /// As [`open`](Model::open), of a path in any [storage](Storage).
    ///
    /// # Errors
    /// As [`Checkpoint::open_in`].
    pub fn open_in(storage: &dyn Storage, path: impl AsRef<Path>) -> Result<ModelBuilder> {
        Ok(ModelBuilder::new(Checkpoint::open_in(storage, path)?))
    }
}

impl ModelBuilder {
    /// A builder for the model of an open checkpoint.
    pub fn new(checkpoint: Checkpoint) -> ModelBuilder {
        ModelBuilder {
            checkpoint,
            adapters: Vec::new(),
            matching: Matching::Strict,
            rounding: Rounding::default(),
            scales: ScalePolicy::default(),
            casts: Vec::new(),
            requantises: false,
            deferred: Vec::new(),
            compresses: false,
            allocation: None,
            settings: Vec::new(),
            allocators: Allocators::default(),
            weights: OnceLock::new(),
        }
    }

    /// Takes the part of the model that `rank` has by `rules`: see [`Checkpoint::shard`].
    ///
    /// # Errors
    /// As [`Checkpoint::shard`].
    pub fn shard(mut self, rules: &ShardRules, rank: Rank) -> Result<ModelBuilder> {
        self.checkpoint = self.checkpoint.shard(rules, rank)?;
        Ok(self.unresolved())
    }

    /// Takes some layers of the model, a stage of a pipeline: see [`Checkpoint::stage`].
    ///
    /// # Errors
    /// As [`Checkpoint::stage`].
    pub fn stage(mut self, layers: Range<usize>) -> Result<ModelBuilder> {
        self.checkpoint = self.checkpoint.stage(layers)?;
        Ok(self.unresolved())
    }

    /// Opens an adapter as [`Adapter::open`] does, and merges it with this strength after the adapters added before.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn adapter(self, path: impl AsRef<Path>, strength: f32) -> Result<ModelBuilder> {
        Ok(self.with_adapter(Adapter::open(path, strength)?))
    }

    /// Merges an open adapter after the adapters added before.
    pub fn with_adapter(mut self, adapter: Adapter) -> ModelBuilder {
        self.adapters.push(adapter);
        self.unresolved()
    }

    /// Sets whether every part of each adapter must match the checkpoint. Default: [`Matching::Strict`].
    pub fn matching(mut self, matching: Matching) -> ModelBuilder {
        self.matching = matching;
        self.unresolved()
    }

    /// Sets how merged weights are rounded. Default: [`Rounding::NearestEven`].
    pub fn rounding(mut self, rounding: Rounding) -> ModelBuilder {
        self.rounding = rounding;
        self.unresolved()
    }

    /// Sets whether the scales of merged fp8 weights are kept. Default: [`ScalePolicy::Keep`].
    pub fn scales(mut self, policy: ScalePolicy) -> ModelBuilder {
        self.scales = policy;
        self.unresolved()
    }

    /// Casts the tensors that `pattern` names to `dtype` while they load; see [`Weights::cast`]. May be called several times; a later
    /// call decides for the tensors that both name. Default: every tensor keeps its type.
    ///
    /// ```
    /// use tensor_offload::{DType, DeviceId, Model, Registry};
    /// let model = Model::open("examples/data/tiny-llama")?.cast("*", DType::F32).compute(DeviceId::CPU);
    /// let model = model.load(&Registry::system())?;
    /// let norm = model.tensor("model.norm.weight").expect("every Llama has one");
    /// let scales: &[f32] = norm.as_slice()?; // bf16 in the file
    /// # assert_eq!(norm.shape(), [scales.len() as u64]);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    pub fn cast(mut self, pattern: impl Into<String>, dtype: DType) -> ModelBuilder {
        self.casts.push((Some(pattern.into()), dtype));
        self.unresolved()
    }

    /// Casts all tensors of floating-point numbers to `dtype` while they load; see [`Weights::cast_floats`].
    pub fn cast_floats(mut self, dtype: DType) -> ModelBuilder {
        self.casts.push((None, dtype));
        self.unresolved()
    }

    /// Lets weights in blocks of GGML's types that adapters change become blocks again, and packed ones be packed again; see
    /// [`Weights::requantise`] and [`Weights::repacked`]. Default: blocks have to be cast, and packed weights are refused.
    pub fn requantise(mut self) -> ModelBuilder {
        self.requantises = true;
        self.unresolved()
    }

    /// Leaves the weights that `pattern` names as they are in the file, packed ones too, and keeps what LoRA changes of them as
    /// factors of type `dtype` beside them, for the caller to compute `W x + s B (A x)`; see [`Weights::defer`] and
    /// [`LayerGuard::deferred`](crate::LayerGuard::deferred). May be called several times. Default: all changes are merged.
    pub fn defer(mut self, pattern: impl Into<String>, dtype: DType) -> ModelBuilder {
        self.deferred.push((pattern.into(), dtype));
        self.unresolved()
    }

    /// Sets how much each device takes: an [`Allocation`], or its text (`cuda:0,50%;cpu,*`). Default: everything on the
    /// compute device.
    ///
    /// # Errors
    /// [`Error::Allocation`] with the position of the error when the text is not a valid allocation.
    pub fn allocation<A>(mut self, allocation: A) -> Result<ModelBuilder>
    where
        A: TryInto<Allocation>,
        Error: From<A::Error>,
    {
        self.allocation = Some(allocation.try_into()?);
        Ok(self)
    }

    /// Sets the compute device; see [`Planner::compute`].
    pub fn compute(self, device: DeviceId) -> ModelBuilder {
        self.planner(move |planner| planner.compute(device))
    }

    /// Sets how many layers are prefetched. Default: 2.
    pub fn depth(self, layers: usize) -> ModelBuilder {
        self.planner(move |planner| planner.depth(layers))
    }

    /// Keeps streamed modules compressed: as the files have them, or as they are compressed while they load. See
    /// [`Planner::compress`] and [`Weights::compress`].
    pub fn compress(mut self) -> ModelBuilder {
        self.compresses = true;
        self.planner(|planner| planner.compress(true)).unresolved()
    }

    /// Keeps modules compressed that live on the compute device. See [`Planner::compress_resident`] and [`Weights::compress`].
    pub fn compress_resident(mut self) -> ModelBuilder {
        self.compresses = true;
        self.planner(|planner| planner.compress_resident(true)).unresolved()
    }

    /// Has slots hold the values of tensors in GGML's blocks, as F32, F16 or BF16; see [`Planner::unpack`].
    pub fn unpack(self, dtype: DType) -> ModelBuilder {
        self.planner(move |planner| planner.unpack(dtype))
    }

    /// Sets how much memory stays free on the compute device for activations. Default: 0.
    pub fn reserve(self, size: ByteSize) -> ModelBuilder {
        self.planner(move |planner| planner.reserve(size))
    }

    /// Has a framework allocate the memory of the model's tensors on its device, and plans as the allocator needs it. May be
    /// called for several devices; slots are divided as the compute device's allocator needs it.
    pub fn allocator(mut self, allocator: Arc<dyn TensorAllocator>) -> ModelBuilder {
        self.allocators.add(allocator);
        self
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

    /// The checkpoint with its adapters, the input of the planner and the loader. The adapters' factors are read once.
    ///
    /// # Errors
    /// As [`Weights::patched`], [`Weights::scales`], [`Weights::cast`], [`Weights::defer`], [`Weights::requantise`] and
    /// [`Weights::compress`].
    pub fn weights(&self) -> Result<&Weights> {
        if let Some(weights) = self.weights.get() {
            return Ok(weights);
        }
        let inputs = (self.checkpoint.clone(), self.adapters.clone(), self.matching);
        let weights = Weights::all_deferred(inputs, self.requantises, &self.deferred)?;
        let weights = weights.scales(self.scales)?.rounding(self.rounding);
        let weights = self.casts.iter().try_fold(weights, |weights, (pattern, dtype)| match pattern {
            Some(pattern) => weights.cast(pattern, *dtype),
            None => weights.cast_floats(*dtype),
        })?;
        let weights = if self.requantises { weights.requantise()? } else { weights };
        let weights = if self.compresses { weights.compress()? } else { weights };
        Ok(self.weights.get_or_init(|| weights))
    }

    /// The plan for loading the model now. The links of the devices are measured if the allocation is `auto` and the links
    /// have not been described.
    ///
    /// # Errors
    /// As [`weights`](ModelBuilder::weights), [`Planner::plan`] and [`Registry::measured_topology`].
    pub fn plan(&self, devices: &Registry) -> Result<Plan> {
        let (weights, machine) = (self.weights()?, self.machine(devices)?);
        let planner = self.settings.iter().fold(Planner::new(weights.layout(), &machine), |planner, set| set(planner));
        let planner = self.allocation.iter().cloned().fold(planner, Planner::allocation);
        match self.allocators.grouping(planner.compute_device()) {
            Some(grouping) => planner.grouping(grouping).plan(),
            None => planner.plan(),
        }
    }

    /// Plans the model, merges the adapters, and loads every module onto the device that the plan gives it.
    ///
    /// # Errors
    /// As [`plan`](ModelBuilder::plan) and [`Loader::load`].
    pub fn load(&self, devices: &Registry) -> Result<Arc<Model>> {
        self.load_with(&Loader::new(devices))
    }

    /// As [`load`](ModelBuilder::load), with a loader that has its own settings: progress, cancellation, threads.
    ///
    /// # Errors
    /// As [`load`](ModelBuilder::load).
    pub fn load_with(&self, loader: &Loader<'_>) -> Result<Arc<Model>> {
        let (weights, plan) = (self.weights()?, self.plan(loader.registry)?);
        loader.with_allocators(&self.allocators).load(weights, &plan).map(Arc::new)
    }

    /// The current state of the devices, with measured links if the plan depends on them.
    fn machine(&self, devices: &Registry) -> Result<Machine> {
        let machine = devices.machine_now();
        let auto = self.allocation.as_ref().is_some_and(|allocation| allocation.mode() == Mode::Auto);
        if auto && machine.topology().is_estimate() {
            return Ok(machine.with_topology(devices.measured_topology()?));
        }
        Ok(machine)
    }

    /// Discards the resolved adapters.
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
