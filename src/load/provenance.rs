//! Where the bytes of a model's tensors come from.

use std::sync::Arc;

use crate::adapter::Weights;
use crate::checkpoint::{Per, TensorId};
use crate::patch::{FactorRecipe, Recipe};
use crate::transfer::Stamp;

/// The origin of a tensor's bytes. Tensors of equal provenance have equal bytes; no weight is read to compare them.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Provenance {
    /// A tensor of the checkpoint.
    File {
        file: Stamp,
        /// The offset in the file.
        offset: u64,
        bytes: u64,
        patch: Option<Patched>,
    },
    /// A factor of a deferred change. Where it belongs may depend on other tensors and their names, as for a patch.
    Factor { files: Arc<[Stamp]>, recipe: FactorRecipe },
}

/// How the bytes of the file were changed. A patch may depend on other tensors and their names, so patches are equal only
/// if all files of the checkpoint are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Patched {
    files: Arc<[Stamp]>,
    recipe: Recipe,
}

impl Provenance {
    /// The provenance of each tensor of the weights' layout.
    pub(super) fn of(weights: &Weights) -> Per<TensorId, Provenance> {
        let (checkpoint, patches) = (weights.checkpoint(), weights.patches());
        let files: Arc<[Stamp]> = checkpoint.sources().iter().map(|source| source.stamp()).collect();
        let patched = |id| patches.tensor(id).map(|p| Patched { files: Arc::clone(&files), recipe: p.recipe() });
        let tensors = checkpoint.layout().tensor_ids().zip(checkpoint.layout().tensors());
        let stored = tensors.map(|(id, tensor)| Provenance::File {
            file: files[tensor.file],
            offset: tensor.offset,
            bytes: tensor.bytes,
            patch: patched(id),
        });
        // The factors are the last tensors of the layout.
        let factors = weights.layout().tensor_ids().skip(checkpoint.layout().tensors().len());
        let factor = |id| {
            let (deferral, side) = patches.factor(id)?;
            Some(Provenance::Factor { files: Arc::clone(&files), recipe: deferral.recipe(side) })
        };
        stored.chain(factors.filter_map(factor)).collect()
    }
}
