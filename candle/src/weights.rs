//! The weights of one layer for candle's `VarBuilder`.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use tensor_offload::checkpoint::{Layer, TensorInfo};
use tensor_offload::{LayerId, Model, Streamer};

use crate::blocks::has_nan;
use crate::dtype;
use crate::error::{Error, Result};
use crate::quantized::QuantizedWeight;
use crate::views;

/// The weights of one layer over the slot that holds it in its turn, or where they live if they are not streamed.
///
/// [`Streamed::quantized`](crate::Streamed::quantized) gives them to what builds a block. A block keeps what it gets here; values
/// that it computes of it when it is built are NaN.
#[derive(Clone)]
pub struct LayerWeights {
    model: Arc<Model>,
    layer: LayerId,
    /// All that candle can hold; blocks of GGML as single bytes.
    tensors: HashMap<String, Tensor>,
    /// What each of these is in the layer's turn: values where the plan unpacks blocks into slots.
    infos: HashMap<String, TensorInfo>,
}

impl LayerWeights {
    /// The tensors of a layer: those that are streamed in this slot, the others where they live.
    pub(crate) fn new(streamer: &Streamer, layer: &Layer, slot: Option<usize>) -> Result<LayerWeights> {
        let model = Arc::clone(streamer.model());
        let layout = model.layout();
        let modules = layer.modules.iter().filter_map(|&module| layout.module(module));
        let infos = modules.flat_map(|module| &module.tensors).filter_map(|&tensor| layout.tensor(tensor));
        let here = |info: &TensorInfo| {
            let place = slot.and_then(|slot| streamer.in_slot(slot, &info.name));
            place.map_or(info, |place| place.info()).clone()
        };
        let held = |info: &TensorInfo| match info.dtype.is_ggml_block() {
            // Only the host's allocator takes blocks.
            true => dtype::blocks(info.dtype).is_some() && model.residency().device().id().is_host(),
            false => dtype::of(info.dtype).is_some(),
        };
        let infos: Vec<TensorInfo> = infos.map(here).filter(held).collect();
        let (empty, filled): (Vec<&TensorInfo>, Vec<&TensorInfo>) = infos.iter().partition(|info| info.bytes == 0);
        let tensor = |info: &TensorInfo| Ok((info.name.clone(), tensor(streamer, info, slot)?));
        let mut tensors = filled.into_iter().map(tensor).collect::<Result<HashMap<_, _>>>()?;
        let device = largest(&tensors).map_or(Device::Cpu, |tensor| tensor.device().clone());
        for info in empty {
            tensors.insert(info.name.clone(), views::empty(info, &device)?);
        }
        let infos = infos.into_iter().map(|info| (info.name.clone(), info)).collect();
        Ok(LayerWeights { layer: layer.id, tensors, infos, model: Arc::clone(&model) })
    }

    /// A builder of candle's for these weights, at the root of the model's names. Its element type and device are those of the
    /// largest tensor that is not in blocks.
    pub fn builder(&self) -> VarBuilder<'static> {
        let of = |tensor: &Tensor| (tensor.dtype(), tensor.device().clone());
        let plain = self.tensors.iter().filter(|(name, _)| !self.is_blocks(name)).map(|(_, tensor)| tensor);
        let (dtype, device) = plain.max_by_key(|tensor| bytes(tensor)).map_or((DType::F32, Device::Cpu), of);
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device)
    }

    /// A weight for products, in blocks of GGML or of F32, F16 or BF16.
    ///
    /// # Errors
    /// [`Error::NoTensor`]; [`Error::OtherLayer`]; [`Error::Unsupported`] for blocks that candle has no products with;
    /// [`Error::Type`] for whole numbers.
    pub fn quantized(&self, name: &str) -> Result<QuantizedWeight> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        let info = self.info(name).ok_or_else(|| self.missing(name))?;
        match dtype::blocks(info.dtype) {
            Some(blocks) => Ok(QuantizedWeight::blocks(info, tensor.clone(), blocks)),
            None => QuantizedWeight::floats(info, tensor.clone()),
        }
    }

    /// A tensor that is not in blocks, of the type and shape that the model holds.
    ///
    /// # Errors
    /// [`Error::NoTensor`]; [`Error::OtherLayer`]; [`Error::Unsupported`] for a type that candle lacks; [`Error::Blocks`].
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        self.find(name).cloned()
    }

    /// Whether the layer has a tensor of this name, of a type that candle can hold.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensors.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// Whether a floating-point weight has NaN.
    pub(crate) fn has_nan(&self) -> Result<bool> {
        for (name, tensor) in &self.tensors {
            let found = match self.is_blocks(name) {
                true => has_nan(&self.quantized(name)?.dequantize()?)?,
                false => has_nan(tensor)?,
            };
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        let layout = self.model.layout();
        let stored = || layout.tensor(layout.find(name)?);
        self.infos.get(name).or_else(stored)
    }

    fn is_blocks(&self, name: &str) -> bool {
        self.info(name).is_some_and(|info| info.dtype.is_ggml_block())
    }

    /// A tensor that candle computes with as it is.
    fn find(&self, name: &str) -> Result<&Tensor> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        match self.info(name) {
            Some(info) if info.dtype.is_ggml_block() => {
                Err(Error::Blocks { tensor: name.to_owned(), stored: info.dtype })
            }
            _ => Ok(tensor),
        }
    }

    /// Why there is no tensor of this name.
    fn missing(&self, name: &str) -> Error {
        let (layout, tensor) = (self.model.layout(), name.to_owned());
        let found = layout.find(name).and_then(|id| Some((layout.tensor(id)?, layout.layer_of(id)?)));
        let name = |layer| layout.layer(layer).map_or_else(String::new, |layer| layer.name.clone());
        match found {
            None => Error::NoTensor { tensor },
            Some((info, layer)) if layer == self.layer => Error::Unsupported { tensor, stored: info.dtype },
            Some((_, of)) => Error::OtherLayer { tensor, of: name(of), layer: name(self.layer) },
        }
    }
}

impl fmt::Debug for LayerWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layer = self.model.layout().layer(self.layer).map(|layer| &layer.name);
        f.debug_struct("LayerWeights").field("layer", &layer).field("tensors", &self.tensors.len()).finish()
    }
}

/// The tensor with the most bytes.
fn largest(tensors: &HashMap<String, Tensor>) -> Option<&Tensor> {
    tensors.values().max_by_key(|tensor| bytes(tensor))
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// A tensor in a slot, or where it lives if it is not streamed.
fn tensor(streamer: &Streamer, info: &TensorInfo, slot: Option<usize>) -> Result<Tensor> {
    if let Some(place) = slot.and_then(|slot| streamer.in_slot(slot, &info.name)) {
        return views::view(place.info(), place.block(), &place.byte_range());
    }
    let missing = || Error::NoTensor { tensor: info.name.clone() };
    let home = streamer.model().tensor(&info.name).ok_or_else(missing)?;
    views::view(info, home.buf().block(), &home.byte_range())
}

impl SimpleBackend for LayerWeights {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let found = self.get_unchecked(name, dtype, &Device::Cpu)?;
        if found.shape() != &shape {
            let (tensor, stored) = (name.to_owned(), found.shape().clone());
            return Err(Error::Shape { tensor, stored, asked: shape }.into());
        }
        Ok(found)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let found = self.find(name)?;
        if found.dtype() != dtype {
            let (tensor, stored) = (name.to_owned(), found.dtype());
            return Err(Error::Type { tensor, stored, asked: dtype }.into());
        }
        Ok(found.clone())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}
