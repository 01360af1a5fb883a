//! What the bytes of a model's tensors were made from.

use std::sync::Arc;

use crate::adapter::Weights;
use crate::checkpoint::{Per, TensorId};
use crate::patch::Recipe;
use crate::transfer::Stamp;

/// What a tensor's bytes were made from: where equal, the bytes are. No weight is read to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Made {
    /// The file, and the place in it.
    file: Stamp,
    at: u64,
    bytes: u64,
    patch: Option<Patched>,
}

/// What was done to the bytes of the file. A patch may depend on other tensors and their names, so it is the same only
/// where all files of the checkpoint are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Patched {
    files: Arc<[Stamp]>,
    recipe: Recipe,
}

impl Made {
    /// For each tensor what it is made from.
    pub(super) fn of(weights: &Weights) -> Per<TensorId, Made> {
        let (checkpoint, patches) = (weights.checkpoint(), weights.patches());
        let files: Arc<[Stamp]> = checkpoint.sources().iter().map(|source| source.stamp()).collect();
        let patched = |id| patches.tensor(id).map(|p| Patched { files: Arc::clone(&files), recipe: p.recipe() });
        let tensors = checkpoint.layout().tensor_ids().zip(checkpoint.layout().tensors());
        let made = tensors.map(|(id, tensor)| Made {
            file: files[tensor.file],
            at: tensor.offset,
            bytes: tensor.bytes,
            patch: patched(id),
        });
        made.collect()
    }
}
