//! The weights of one layer for candle's `VarBuilder`.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use tensor_offload::checkpoint::{Layer, TensorInfo};
use tensor_offload::{LayerId, Model, Streamer};

use crate::dtype;
use crate::error::{Error, Result};
use crate::views;

/// The tensors of one layer, as they are while a slot holds it.
pub(crate) struct LayerWeights {
    model: Arc<Model>,
    layer: LayerId,
    tensors: HashMap<String, Tensor>,
}

impl LayerWeights {
    /// The tensors of a layer: those that are streamed in this slot, the others where they live.
    pub(crate) fn new(streamer: &Streamer, layer: &Layer, slot: Option<usize>) -> Result<LayerWeights> {
        let model = Arc::clone(streamer.model());
        let layout = model.layout();
        let modules = layer.modules.iter().filter_map(|&module| layout.module(module));
        let infos = modules.flat_map(|module| &module.tensors).filter_map(|&tensor| layout.tensor(tensor));
        let infos = infos.filter(|info| dtype::of(info.dtype).is_some());
        let (empty, infos): (Vec<&TensorInfo>, Vec<&TensorInfo>) = infos.partition(|info| info.bytes == 0);
        let tensor = |info: &TensorInfo| Ok((info.name.clone(), tensor(streamer, info, slot)?));
        let mut tensors = infos.into_iter().map(tensor).collect::<Result<HashMap<_, _>>>()?;
        let device = largest(&tensors).map_or(Device::Cpu, |tensor| tensor.device().clone());
        for info in empty {
            tensors.insert(info.name.clone(), views::empty(info, &device)?);
        }
        Ok(LayerWeights { layer: layer.id, tensors, model: Arc::clone(&model) })
    }

    /// A builder of candle's for these weights, at the root of the model's names. Its element type and device are those of the
    /// largest tensor.
    pub(crate) fn builder(self) -> VarBuilder<'static> {
        let of = |tensor: &Tensor| (tensor.dtype(), tensor.device().clone());
        let (dtype, device) = largest(&self.tensors).map_or((DType::F32, Device::Cpu), of);
        VarBuilder::from_backend(Box::new(self), dtype, device)
    }

    /// The tensors.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    fn find(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| {
            let (layout, tensor) = (self.model.layout(), name.to_owned());
            let found = layout.find(name).and_then(|id| Some((layout.tensor(id)?, layout.layer_of(id)?)));
            let name = |layer| layout.layer(layer).map_or_else(String::new, |layer| layer.name.clone());
            match found {
                None => Error::NoTensor { tensor },
                Some((info, layer)) if layer == self.layer => Error::Unsupported { tensor, stored: info.dtype },
                Some((_, of)) => Error::OtherLayer { tensor, of: name(of), layer: name(self.layer) },
            }
        })
    }
}

/// The tensor with the most bytes.
fn largest(tensors: &HashMap<String, Tensor>) -> Option<&Tensor> {
    tensors.values().max_by_key(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes())
}

/// A tensor in a slot, or where it lives if it is not streamed.
fn tensor(streamer: &Streamer, info: &TensorInfo, slot: Option<usize>) -> Result<Tensor> {
    if let Some(place) = slot.and_then(|slot| streamer.in_slot(slot, &info.name)) {
        return views::view(info, place.block(), &place.byte_range());
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
