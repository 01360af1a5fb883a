//! Slots of the caller's own: what memory each class of layers needs, and whether what is given is that.

use std::collections::HashMap;

use serde::Serialize;

use super::turns::streamed_tensors;
use crate::backend::BufMut;
use crate::checkpoint::Layer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::load::Model;

/// Streamed layers whose streamed tensors have the same roles, element types and shapes, so that they can use the same
/// slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SlotClass {
    /// The layers, by place in [`Layout::layers`](crate::checkpoint::Layout::layers).
    pub layers: Vec<usize>,
    /// What one slot holds, tensor by tensor. Storage that tensors of a layer share is in it once.
    pub tensors: Vec<SlotTensor>,
}

/// A tensor in the slots of a class.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct SlotTensor {
    /// Its name inside its layer.
    pub role: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: u64,
}

/// The memory of one slot: a buffer for each of [`SlotClass::tensors`], in their order.
pub type OwnSlot = Vec<BufMut>;

impl Model {
    /// The classes of its streamed layers, in order of their first layers: what
    /// [`Streamer::with_slots`](crate::Streamer::with_slots) wants memory for.
    pub fn slot_classes(&self) -> Vec<SlotClass> {
        let mut classes: Vec<SlotClass> = Vec::new();
        let mut by_tensors: HashMap<Vec<SlotTensor>, usize> = HashMap::new();
        for (index, layer) in self.layout().layers.iter().enumerate() {
            let tensors = tensors(self, layer);
            if tensors.is_empty() {
                continue;
            }
            let class = *by_tensors.entry(tensors).or_insert_with_key(|tensors| {
                classes.push(SlotClass { layers: Vec::new(), tensors: tensors.clone() });
                classes.len() - 1
            });
            classes[class].layers.push(index);
        }
        classes
    }
}

fn tensors(model: &Model, layer: &Layer) -> Vec<SlotTensor> {
    let tensor = |tensor: usize| {
        let info = &model.layout().tensors[tensor];
        let role = info.name.strip_prefix(&layer.name).unwrap_or(&info.name).trim_start_matches('.').to_owned();
        SlotTensor { role, dtype: info.dtype, shape: info.shape.clone(), bytes: info.bytes }
    };
    streamed_tensors(model, layer).into_iter().map(tensor).collect()
}

/// For each layer its class; those that are not streamed have none, which no one asks for.
pub(super) fn class_of_layers(classes: &[SlotClass], layers: usize) -> Vec<usize> {
    let mut class_of = vec![0; layers];
    for (number, class) in classes.iter().enumerate() {
        class.layers.iter().for_each(|&layer| class_of[layer] = number);
    }
    class_of
}

/// Whether `slots` are what the classes of `model` need.
///
/// # Errors
/// [`Error::Invalid`] naming the first class, slot or tensor that is wrong.
pub(super) fn check(model: &Model, classes: &[SlotClass], slots: &[Vec<OwnSlot>]) -> Result<()> {
    if classes.len() != slots.len() {
        let (have, need) = (slots.len(), classes.len());
        return Err(Error::invalid(format!("slots of {have} classes were given, the model has {need}")));
    }
    let device = model.residency().device().id();
    for (class, slots) in classes.iter().zip(slots) {
        let layer = &model.layout().layers[class.layers[0]].name;
        if slots.is_empty() {
            return Err(Error::invalid(format!("there is no slot for the class of layer {layer}")));
        }
        for (number, slot) in slots.iter().enumerate() {
            let of = format!("slot {number} of the class of layer {layer}");
            if slot.len() != class.tensors.len() {
                let (have, need) = (slot.len(), class.tensors.len());
                return Err(Error::invalid(format!("{of} has {have} buffers, it needs {need}")));
            }
            let fits = |(tensor, buffer): &(&SlotTensor, &BufMut)| {
                buffer.bytes() as u64 == tensor.bytes && buffer.device() == device
            };
            let pairs = class.tensors.iter().zip(slot);
            if let Some((SlotTensor { role, bytes, .. }, buffer)) = { pairs }.find(|pair| !fits(pair)) {
                let (have, there) = (buffer.bytes(), buffer.device());
                let given = format!("the buffer of `{role}` has {have} bytes on {there}");
                return Err(Error::invalid(format!("{of}: {given}, it needs {bytes} on {device}")));
            }
        }
    }
    Ok(())
}
