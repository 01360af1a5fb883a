//! Where the bytes of a model's tensors come from.

use std::sync::Arc;

use crate::adapter::Weights;
use crate::checkpoint::{Per, TensorId};
use crate::patch::Recipe;
use crate::transfer::Stamp;

/// The origin of a tensor's bytes. Tensors of equal provenance have equal bytes; no weight is read to compare them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Provenance {
    file: Stamp,
    /// The offset in the file.
    offset: u64,
    bytes: u64,
    patch: Option<Patched>,
}

/// How the bytes of the file were changed. A patch may depend on other tensors and their names, so patches are equal only
/// if all files of the checkpoint are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Patched {
    files: Arc<[Stamp]>,
    recipe: Recipe,
}

impl Provenance {
    /// The provenance of each tensor.
    pub(super) fn of(weights: &Weights) -> Per<TensorId, Provenance> {
        let (checkpoint, patches) = (weights.checkpoint(), weights.patches());
        let files: Arc<[Stamp]> = checkpoint.sources().iter().map(|source| source.stamp()).collect();
        let patched = |id| patches.tensor(id).map(|p| Patched { files: Arc::clone(&files), recipe: p.recipe() });
        let tensors = checkpoint.layout().tensor_ids().zip(checkpoint.layout().tensors());
        let provenance = tensors.map(|(id, tensor)| Provenance {
            file: files[tensor.file],
            offset: tensor.offset,
            bytes: tensor.bytes,
            patch: patched(id),
        });
        provenance.collect()
    }
}
