//! A model's blocks over weights that are streamed.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use tensor_offload::checkpoint::Layer;
use tensor_offload::error::Missing;
use tensor_offload::{DeviceId, LayerGuard, LayerId, Loader, Model, Plan, Streamer, Weights};

use crate::error::{Error, Result};
use crate::weights::LayerWeights;

/// Bytes of this value are NaN in every floating-point type.
const NAN: u8 = 0xff;

/// The blocks of a model, one for each layer and each slot that may hold it, and the stream of their weights.
///
/// [`layer_named`](Streamed::layer_named) hands out a layer's block over weights that have arrived, and prefetches the layers that come
/// next. Ask for layers in any order; the order is learned from the first pass.
pub struct Streamed<B> {
    streamer: Streamer,
    layers: Vec<Layers<B>>,
}

/// The blocks of one layer.
struct Layers<B> {
    name: String,
    /// By slot, or by `None` where nothing of the layer is streamed.
    blocks: BTreeMap<Option<usize>, Built<B>>,
}

/// A block, and its weights until its first output has been looked at.
struct Built<B> {
    block: B,
    unchecked: Option<LayerWeights>,
}

impl<B> Streamed<B> {
    /// Builds the blocks of all layers. `build` is called for each layer, once for each slot that may hold it, with a builder of
    /// that layer's weights. It is at the root of the model's names, and what it gives are views: of the type and shape that
    /// the model holds, or it is an error.
    ///
    /// The model must be in candle's memory on the CPU, loaded with [`cpu_memory`](crate::cpu_memory).
    ///
    /// # Errors
    /// [`Error::NotOfCandle`]; what `build` returns, with [`Error::Shape`], [`Error::Type`], [`Error::OtherLayer`],
    /// [`Error::NoTensor`] and [`Error::Unsupported`] if it asks for a tensor that is not there like that;
    /// [`Error::OtherDevice`] if the model computes elsewhere; as [`Streamer::new`].
    pub fn new(
        model: &Arc<Model>,
        build: impl FnMut(&Layer, VarBuilder<'static>) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        Streamed::on(model, &Device::Cpu, build)
    }

    /// As [`new`](Streamed::new), for a model that is in the memory of any device of candle's. On a CUDA device it is loaded
    /// with `cuda_memory` (the feature `cuda`), and the weights are there for what candle queues on the device's stream between
    /// [`layer_named`](Streamed::layer_named) and the end of the turn.
    ///
    /// # Errors
    /// As [`new`](Streamed::new); [`Error::PerThreadStream`].
    pub fn on(
        model: &Arc<Model>,
        device: &Device,
        build: impl FnMut(&Layer, VarBuilder<'static>) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        Streamed::from_streamer(streamer(model, device)?, build)
    }

    /// As [`on`](Streamed::on), with a streamer that has its own settings. On a CUDA device it computes on candle's stream.
    ///
    /// # Errors
    /// As [`on`](Streamed::on); [`Error::OtherStream`] if the streamer computes on another stream.
    pub fn from_streamer(
        streamer: Streamer,
        mut build: impl FnMut(&Layer, VarBuilder<'static>) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        Streamed::build(streamer, |layer, weights| build(layer, weights.builder()))
    }

    /// As [`new`](Streamed::new), for networks that multiply with weights in GGML's blocks, such as those of GGUF files.
    /// `build` gets the layer's weights: blocks from [`LayerWeights::quantized`], all else from [`LayerWeights::builder`] too.
    ///
    /// ```
    /// # use candle_core::{Device, Module, Tensor};
    /// # use tensor_offload::{DeviceId, Model, Registry};
    /// # use tensor_offload_candle::{Streamed, cpu_memory};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// # let tensors = (0..4).map(|k| (format!("blk.{k}.up.weight"), Tensor::ones((8, 8), candle_core::DType::F32, &Device::Cpu).unwrap()));
    /// # candle_core::safetensors::save(&tensors.collect(), &path)?;
    /// # let model = Model::open(&path)?.allocator(cpu_memory()).compute(DeviceId::CPU);
    /// # let model = model.allocation("cpu,25%;disk,*")?.load(&Registry::system())?;
    /// let mut blocks = Streamed::quantized(&model, |layer, weights| {
    ///     Ok(weights.quantized(&format!("{}.up.weight", layer.name))?)
    /// })?;
    /// # let mut x = Tensor::ones((1, 8), candle_core::DType::F32, &Device::Cpu)?;
    /// x = blocks.layer_named("blk.2")?.run(|up| up.forward(&x))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Streamed::new); what [`LayerWeights::quantized`] returns.
    pub fn quantized(
        model: &Arc<Model>,
        build: impl FnMut(&Layer, &LayerWeights) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        Streamed::quantized_on(model, &Device::Cpu, build)
    }

    /// As [`quantized`](Streamed::quantized), on any device of candle's. Candle has no quantised products over memory that exists
    /// on CUDA devices. There a plan that unpacks ([`Planner::unpack`](tensor_offload::Planner::unpack)) gives
    /// [`LayerWeights::quantized`] values in place of blocks, which still live and travel as blocks.
    ///
    /// # Errors
    /// As [`quantized`](Streamed::quantized) and [`on`](Streamed::on); [`Error::QuantizedDevice`] on another device than the CPU,
    /// unless the plan unpacks.
    pub fn quantized_on(
        model: &Arc<Model>,
        device: &Device,
        build: impl FnMut(&Layer, &LayerWeights) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        Streamed::quantized_from_streamer(streamer(model, device)?, build)
    }

    /// As [`quantized`](Streamed::quantized), with a streamer that has its own settings.
    ///
    /// # Errors
    /// As [`quantized_on`](Streamed::quantized_on).
    pub fn quantized_from_streamer(
        streamer: Streamer,
        mut build: impl FnMut(&Layer, &LayerWeights) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        let device = streamer.model().residency().device().id();
        if !device.is_host() && streamer.model().plan().unpacked().is_none() {
            return Err(Error::QuantizedDevice { device });
        }
        Streamed::build(streamer, |layer, weights| build(layer, weights))
    }

    /// Builds the blocks of all layers while the slots hold NaN.
    fn build(
        mut streamer: Streamer,
        mut build: impl FnMut(&Layer, &LayerWeights) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        streamer.overwrite_slots(NAN)?;
        let mut of_layer = |layer: &Layer| -> Result<Layers<B>> {
            let slots = streamer.slots_of(layer.id);
            let slots: Vec<Option<usize>> = match slots.is_empty() {
                true => vec![None],
                false => slots.into_iter().map(Some).collect(),
            };
            let built = |slot: Option<usize>| -> Result<(Option<usize>, Built<B>)> {
                let weights = LayerWeights::new(&streamer, layer, slot)?;
                #[cfg(feature = "cuda")]
                weights.tensors().try_for_each(|tensor| crate::cuda::check_order(&streamer, tensor))?;
                // What stays where it is holds its values already, so a copy of it is right.
                let block = build(layer, &weights)?;
                Ok((slot, Built { block, unchecked: slot.map(|_| weights) }))
            };
            Ok(Layers { name: layer.name.clone(), blocks: slots.into_iter().map(built).collect::<Result<_>>()? })
        };
        let layers = streamer.model().layout().layers().iter().map(&mut of_layer).collect::<Result<_>>()?;
        Ok(Streamed { streamer, layers })
    }

    /// Leaves out the search for NaN in the first outputs, for networks that have NaN there by right.
    #[must_use]
    pub fn unchecked(mut self) -> Streamed<B> {
        let built = self.layers.iter_mut().flat_map(|layer| layer.blocks.values_mut());
        built.for_each(|built| built.unchecked = None);
        self
    }

    /// Gives the network other weights: another strength of an adapter, say. What changes is written over the old weights, so no
    /// more memory is taken ([`Loader::refill`]), unless someone else holds the model. All blocks are built again, since a block
    /// of resident weights may have copied them.
    ///
    /// # Errors
    /// As [`Loader::refill`] and [`on`](Streamed::on). The blocks are gone then, and so is the model unless someone else
    /// holds it.
    pub fn refill(
        self,
        loader: &Loader<'_>,
        weights: &Weights,
        plan: &Plan,
        build: impl FnMut(&Layer, VarBuilder<'static>) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        Streamed::from_streamer(self.refilled(loader, weights, plan)?, build)
    }

    /// As [`refill`](Streamed::refill), for blocks of [`quantized`](Streamed::quantized).
    ///
    /// # Errors
    /// As [`refill`](Streamed::refill) and [`quantized`](Streamed::quantized).
    pub fn refill_quantized(
        self,
        loader: &Loader<'_>,
        weights: &Weights,
        plan: &Plan,
        build: impl FnMut(&Layer, &LayerWeights) -> candle_core::Result<B>,
    ) -> Result<Streamed<B>> {
        Streamed::quantized_from_streamer(self.refilled(loader, weights, plan)?, build)
    }

    /// A streamer of other weights in the memory of these, without the blocks.
    fn refilled(self, loader: &Loader<'_>, weights: &Weights, plan: &Plan) -> Result<Streamer> {
        let (model, compute) = (Arc::clone(self.model()), Arc::clone(self.streamer.compute()));
        drop(self);
        let model = Arc::new(loader.refill(model, weights, plan)?);
        Ok(Streamer::on(&model, compute)?)
    }

    /// The block of the layer `name` (`model.layers.7`), over weights that have arrived. Drop it before you ask for the next
    /// one; its slot is then free for another layer.
    ///
    /// # Errors
    /// As [`Streamer::layer_named`].
    pub fn layer_named(&mut self, name: &str) -> Result<Block<'_, B>> {
        let missing = || tensor_offload::Error::from(Missing::Layer { name: name.to_owned() });
        let layer = self.streamer.model().layout().find_layer(name).ok_or_else(missing)?;
        self.layer(layer)
    }

    /// As [`layer_named`](Streamed::layer_named), by the layer's id.
    ///
    /// # Errors
    /// As [`Streamer::layer`].
    pub fn layer(&mut self, layer: LayerId) -> Result<Block<'_, B>> {
        let guard = self.streamer.layer(layer)?;
        let Layers { name, blocks } = &mut self.layers[layer.index()];
        let missing = || tensor_offload::Error::from(Missing::Layer { name: name.clone() });
        let built = blocks.get_mut(&guard.slot()).ok_or_else(missing)?;
        Ok(Block { built, guard })
    }

    /// Checks that weights were sound that arrived compressed; see [`Streamer::verify`]. Nothing else needs it.
    ///
    /// # Errors
    /// As [`Streamer::verify`].
    pub fn verify(&mut self) -> Result<()> {
        Ok(self.streamer.verify()?)
    }

    /// The stream of the weights, with its report.
    pub fn streamer(&self) -> &Streamer {
        &self.streamer
    }

    /// The model. It is not unloaded while the blocks live.
    pub fn model(&self) -> &Arc<Model> {
        self.streamer.model()
    }

    /// Drops the blocks and returns the stream of their weights.
    pub fn into_streamer(self) -> Streamer {
        self.streamer
    }
}

/// A streamer whose compute is candle's on this device.
fn streamer(model: &Arc<Model>, device: &Device) -> Result<Streamer> {
    let computes = model.residency().device().id();
    match device {
        Device::Cpu if computes.is_host() => Ok(Streamer::new(model)?),
        Device::Cpu => Err(Error::OtherDevice { device: DeviceId::CPU, computes }),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => Ok(Streamer::on(model, crate::cuda::compute(model, cuda)?)?),
        _ => Err(Error::NotCuda),
    }
}

impl<B> fmt::Debug for Streamed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streamed").field("layers", &self.layers.len()).field("streamer", &self.streamer).finish()
    }
}

/// A layer's turn: its block, whose weights stay until this is dropped.
pub struct Block<'s, B> {
    built: &'s mut Built<B>,
    guard: LayerGuard,
}

impl<B> Block<'_, B> {
    /// Runs the block and ends its turn.
    ///
    /// In the block's first turn the output is searched for NaN. NaN from weights that have none means that the block computes with
    /// copies which it made of its weights when it was built.
    ///
    /// # Errors
    /// What `forward` returns; [`Error::Copied`].
    pub fn run<T: Output>(self, forward: impl FnOnce(&B) -> candle_core::Result<T>) -> Result<T> {
        let Built { block, unchecked } = self.built;
        let output = forward(block)?;
        if let Some(weights) = unchecked {
            if has_nan(&output)? && !weights.has_nan()? {
                let (layer, block) = (self.guard.name().to_owned(), std::any::type_name::<B>());
                return Err(Error::Copied { layer, block });
            }
            *unchecked = None;
        }
        Ok(output)
    }

    /// The layer's tensors in the library's terms.
    pub fn guard(&self) -> &LayerGuard {
        &self.guard
    }
}

impl<B> fmt::Debug for Block<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("guard", &self.guard).finish_non_exhaustive()
    }
}

impl<B> Deref for Block<'_, B> {
    type Target = B;

    fn deref(&self) -> &B {
        &self.built.block
    }
}

/// What a block may return: tensors, alone or together. Its first output is searched for NaN.
pub trait Output {
    /// Calls `visit` for each tensor.
    ///
    /// # Errors
    /// Those of `visit`.
    fn for_each_tensor(&self, visit: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>) -> candle_core::Result<()>;
}

impl Output for Tensor {
    fn for_each_tensor(&self, visit: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>) -> candle_core::Result<()> {
        visit(self)
    }
}

impl<T: Output> Output for Option<T> {
    fn for_each_tensor(&self, visit: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>) -> candle_core::Result<()> {
        self.iter().try_for_each(|output| output.for_each_tensor(visit))
    }
}

impl<T: Output> Output for Vec<T> {
    fn for_each_tensor(&self, visit: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>) -> candle_core::Result<()> {
        self.iter().try_for_each(|output| output.for_each_tensor(visit))
    }
}

impl<A: Output, B: Output> Output for (A, B) {
    fn for_each_tensor(&self, visit: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>) -> candle_core::Result<()> {
        self.0.for_each_tensor(visit)?;
        self.1.for_each_tensor(visit)
    }
}

impl<A: Output, B: Output, C: Output> Output for (A, B, C) {
    fn for_each_tensor(&self, visit: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>) -> candle_core::Result<()> {
        self.0.for_each_tensor(visit)?;
        self.1.for_each_tensor(visit)?;
        self.2.for_each_tensor(visit)
    }
}

impl Output for () {
    fn for_each_tensor(&self, _: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>) -> candle_core::Result<()> {
        Ok(())
    }
}

/// Whether a floating-point tensor among these has NaN.
pub(crate) fn has_nan(output: &impl Output) -> Result<bool> {
    let mut found = false;
    output.for_each_tensor(&mut |tensor| {
        if !found && tensor.dtype().is_float() && tensor.elem_count() > 0 {
            let values = tensor.to_dtype(DType::F32)?;
            // NaN alone differs from itself.
            found = values.ne(&values)?.to_dtype(DType::F32)?.max_all()?.to_scalar::<f32>()? > 0.0;
        }
        Ok(())
    })?;
    Ok(found)
}
