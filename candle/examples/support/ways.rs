//! Three ways to run a Llama: over streamed weights, with all weights in candle's memory, and with a copy of each layer that
//! does not fit made for its turn, as programs do by hand.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hasher;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tensor_offload::checkpoint::{Layer, TensorSpec, TensorWriter, write_safetensors};
use tensor_offload::plan::Assignment;
use tensor_offload::{Checkpoint, Loader, Model, Plan, Planner, Registry, TensorId, Use, Weights};
use tensor_offload_candle::{LayerWeights, Streamed};

use super::compute::Compute;
use super::llama::{Config, Part, Parts, State};
use super::{generate, gguf};

/// How the weights come to the compute device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    Streamed,
    Resident,
    ToDevice,
}

/// What all ways run.
pub(crate) struct Job {
    pub(crate) compute: Compute,
    pub(crate) config: Config,
    pub(crate) weights: Weights,
    /// What slots hold in place of blocks, and all weights as such values.
    pub(crate) unpacked: Option<(tensor_offload::DType, Weights)>,
    /// The file that the weights are in, if it is one of GGUF and they are as it has them.
    pub(crate) gguf: Option<PathBuf>,
    pub(crate) allocation: String,
    pub(crate) depth: usize,
    pub(crate) prompt: Vec<u32>,
    pub(crate) ends: Vec<u32>,
    pub(crate) tokens: usize,
}

/// What a run gave, and what it took.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Run {
    pub(crate) tokens: Vec<u32>,
    /// A hash of the bits of each pass's logits.
    pub(crate) logits: Vec<u64>,
    /// The prompt's pass, and all passes after it, in seconds.
    pub(crate) prompt_seconds: f64,
    pub(crate) seconds: f64,
    /// The most memory that loading and running took, without the pages of files; `None` where the system does not tell.
    pub(crate) peak_bytes: Option<u64>,
    /// As many passes as `seconds` had, without the network; of streamed weights alone.
    pub(crate) transfer_seconds: Option<f64>,
    /// The bytes that a pass takes to the slots; of streamed weights alone.
    pub(crate) pass_bytes: Option<u64>,
}

impl Job {
    pub(crate) fn run(&self, way: Way) -> Result<Run> {
        match way {
            Way::Streamed => self.streamed(),
            Way::Resident => self.resident(),
            Way::ToDevice => self.to_device(),
        }
    }

    /// The plan of the streamed weights.
    pub(crate) fn plan(&self, devices: &Registry) -> tensor_offload::Result<Plan> {
        let planner = Planner::new(self.weights.layout(), devices.machine());
        let planner = self.unpacked.iter().fold(planner, |planner, (dtype, _)| planner.unpack(*dtype));
        planner
            .compute(self.compute.id)
            .allocation(self.allocation.parse()?)
            .depth(self.depth)
            .grouping(self.compute.grouping())
            .plan()
    }

    fn streamed(&self) -> Result<Run> {
        let peak = self.compute.watch();
        let devices = Registry::system();
        let plan = self.plan(&devices).map_err(Error::wrap)?;
        let loader = Loader::new(&devices).allocator(self.compute.memory()?);
        let model = Arc::new(loader.load(&self.weights, &plan).map_err(Error::wrap)?);
        let mut blocks = self.blocks(&model)?;
        let mut run = self.generate(|layer, state, x| {
            let block = blocks.layer_named(layer)?;
            Ok(block.run(|part| part.as_ref().map_or_else(|| Err(no_turn(layer)), |part| part.forward(x, state)))?)
        })?;
        run.peak_bytes = peak.bytes();
        run.pass_bytes = Some(plan.devices().iter().map(|share| share.weights.streamed).sum());
        let begin = Instant::now();
        for _ in 1..run.logits.len() {
            for step in self.config.steps() {
                blocks.layer_named(&step.layer)?;
            }
        }
        run.transfer_seconds = Some(begin.elapsed().as_secs_f64());
        Ok(run)
    }

    /// The blocks over the slots; `None` for a layer that has no turn.
    fn blocks(&self, model: &Arc<Model>) -> Result<Streamed<Option<Part>>> {
        let turns: Vec<String> = self.config.steps().map(|step| step.layer).collect();
        let has_turn = |layer: &Layer| turns.contains(&layer.name);
        if self.config.gguf.is_some() {
            let part = |layer: &Layer, weights: &LayerWeights| {
                has_turn(layer).then(|| Part::gguf(&self.config, &layer.name, &gguf::Streamed(weights))).transpose()
            };
            return Ok(Streamed::quantized_on(model, self.device(), part)?);
        }
        Ok(Streamed::on(model, self.device(), |layer, vb| Part::new(&self.config, &layer.name, vb).map(Some))?)
    }

    fn resident(&self) -> Result<Run> {
        let peak = self.compute.watch();
        if self.config.gguf.is_some() {
            let weights: Box<dyn Parts> = match (&self.unpacked, &self.gguf) {
                (Some((_, values)), _) => Box::new(gguf::Values(self.read(values, values.layout().tensor_ids())?)),
                (None, Some(file)) => Box::new(gguf::Owned::open(file)?),
                (None, None) => Box::new(gguf::Owned::read(&self.weights, self.weights.layout().tensor_ids())?),
            };
            let part = |layer: String| Ok((layer.clone(), Part::gguf(&self.config, &layer, &*weights)?));
            let parts: HashMap<String, Part> =
                self.config.steps().map(|step| part(step.layer)).collect::<Result<_>>()?;
            drop(weights);
            let mut run = self.generate(|layer, state, x| parts[layer].forward(x, state))?;
            run.peak_bytes = peak.bytes();
            return Ok(run);
        }
        let tensors = self.read(&self.weights, self.weights.layout().tensor_ids())?;
        let parts = self.config.steps().map(|step| Ok((step.layer.clone(), self.part(&step.layer, tensors.clone())?)));
        let parts: HashMap<String, Part> = parts.collect::<Result<_>>()?;
        let mut run = self.generate(|layer, state, x| parts[layer].forward(x, state))?;
        run.peak_bytes = peak.bytes();
        Ok(run)
    }

    fn to_device(&self) -> Result<Run> {
        let merged = match self.config.gguf {
            // A safetensors file holds no blocks.
            Some(_) => Merged { weights: self.weights.clone(), _folder: None },
            None => Merged::new(&self.weights)?,
        };
        let peak = self.compute.watch();
        let devices = Registry::system();
        let plan = self.plan(&devices).map_err(Error::wrap)?;
        let layout = self.weights.layout();
        let stays = |layer: &&Layer| {
            let needs = layout.needs_of(layer.id).unwrap_or_default();
            let here = |planned: &Assignment| matches!(planned.usage, Use::Resident | Use::Unpacked);
            needs.iter().all(|&module| plan.assignment(module).is_some_and(here))
        };
        let of_layer = |layer: &Layer| -> Result<Part> {
            let tensors = layout.modules_in(layer.id).flat_map(|module| module.tensors.clone());
            match (self.config.gguf, &self.unpacked) {
                (Some(_), Some((_, values))) => {
                    Part::gguf(&self.config, &layer.name, &gguf::Values(self.read(values, tensors)?))
                }
                (Some(_), None) => Part::gguf(&self.config, &layer.name, &gguf::Owned::read(&self.weights, tensors)?),
                (None, _) => self.part(&layer.name, self.read(&merged.weights, tensors)?),
            }
        };
        let turns: Vec<String> = self.config.steps().map(|step| step.layer).collect();
        let has_turn = |layer: &&Layer| turns.contains(&layer.name);
        let kept = layout
            .layers()
            .iter()
            .filter(has_turn)
            .filter(stays)
            .map(|layer| Ok((layer.name.as_str(), of_layer(layer)?)));
        let kept: HashMap<&str, Part> = kept.collect::<Result<_>>()?;
        let layers: HashMap<&str, &Layer> = layout.layers().iter().map(|layer| (layer.name.as_str(), layer)).collect();
        let mut run = self.generate(|layer, state, x| match kept.get(layer) {
            Some(part) => part.forward(x, state),
            None => of_layer(layers[layer])?.forward(x, state),
        })?;
        run.peak_bytes = peak.bytes();
        Ok(run)
    }

    fn part(&self, layer: &str, tensors: HashMap<String, Tensor>) -> Result<Part> {
        let largest = tensors.values().max_by_key(|tensor| tensor.elem_count());
        let dtype = largest.map_or(DType::F32, Tensor::dtype);
        Part::new(&self.config, layer, VarBuilder::from_tensors(tensors, dtype, self.device()))
    }

    /// Tensors of a checkpoint in memory of candle's, merged.
    fn read(&self, weights: &Weights, tensors: impl IntoIterator<Item = TensorId>) -> Result<HashMap<String, Tensor>> {
        let tensor = |id: TensorId| {
            let info = weights.layout().tensor(id).ok_or_else(|| Error::msg("a tensor of another layout"))?;
            let dtype = match info.dtype {
                tensor_offload::DType::F32 => DType::F32,
                tensor_offload::DType::BF16 => DType::BF16,
                tensor_offload::DType::F16 => DType::F16,
                other => candle_core::bail!("tensor `{}` holds {other}; cast it with --cast F32", info.name),
            };
            let mut bytes = vec![0; info.bytes as usize];
            weights.read(id, &mut bytes).map_err(Error::wrap)?;
            let shape: Vec<usize> = info.shape.iter().map(|&dim| dim as usize).collect();
            Ok((info.name.clone(), Tensor::from_raw_buffer(&bytes, dtype, &shape, self.device())?))
        };
        tensors.into_iter().map(tensor).collect()
    }

    fn device(&self) -> &Device {
        &self.compute.device
    }

    /// Generates the tokens; `turn` runs one layer.
    fn generate(&self, mut turn: impl FnMut(&str, &mut State, &Tensor) -> Result<Tensor>) -> Result<Run> {
        let mut state = State::new(&self.config, self.device())?.last_only();
        let mut logits = Vec::new();
        let pass = |ids: Tensor| {
            let mut x = ids;
            for step in self.config.steps() {
                x = turn(&step.layer, &mut state, &x)?;
            }
            logits.push((Instant::now(), x.clone()));
            Ok::<_, Error>(x)
        };
        let begin = Instant::now();
        let tokens = generate::greedy(&self.prompt, &self.ends, self.device(), pass).take(self.tokens);
        let tokens = tokens.collect::<Result<Vec<u32>>>()?;
        let ends: Vec<f64> = logits.iter().map(|(at, _)| (*at - begin).as_secs_f64()).collect();
        let (first, last) = (ends.first().copied().unwrap_or(0.0), ends.last().copied().unwrap_or(0.0));
        let logits = logits.iter().map(|(_, logits)| hash(logits)).collect::<Result<_>>()?;
        let (prompt_seconds, seconds) = (first, last - first);
        Ok(Run { tokens, logits, prompt_seconds, seconds, peak_bytes: None, transfer_seconds: None, pass_bytes: None })
    }
}

fn no_turn(layer: &str) -> Error {
    Error::msg(format!("layer `{layer}` has no turn"))
}

/// A hash of a tensor's bits.
fn hash(tensor: &Tensor) -> Result<u64> {
    let mut hasher = std::hash::DefaultHasher::new();
    let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    values.iter().for_each(|value| hasher.write_u32(value.to_bits()));
    Ok(hasher.finish())
}

/// Weights that need no patching: a program that copies layers by hand would merge adapters before.
struct Merged {
    weights: Weights,
    _folder: Option<tempfile::TempDir>,
}

impl Merged {
    fn new(weights: &Weights) -> Result<Merged> {
        let layout = weights.layout();
        if layout.tensor_ids().all(|tensor| weights.patches().tensor(tensor).is_none()) {
            return Ok(Merged { weights: weights.clone(), _folder: None });
        }
        let folder = tempfile::tempdir()?;
        let path: PathBuf = folder.path().join("merged.safetensors");
        let specs =
            layout.tensors().iter().map(|info| TensorSpec::new(info.name.clone(), info.dtype, info.shape.clone()));
        let specs: Vec<TensorSpec> = specs.collect();
        let ids: Vec<TensorId> = layout.tensor_ids().collect();
        let fill = |tensor: usize, out: &mut TensorWriter<'_>| {
            let mut bytes = vec![0; layout.tensors()[tensor].bytes as usize];
            weights.read(ids[tensor], &mut bytes)?;
            out.put(&bytes)
        };
        write_safetensors(&path, &specs, &BTreeMap::new(), fill).map_err(Error::wrap)?;
        let weights = Weights::new(Checkpoint::open(&path).map_err(Error::wrap)?);
        Ok(Merged { weights, _folder: Some(folder) })
    }
}
