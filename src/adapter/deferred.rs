//! Weights whose changes are not merged.
//!
//! The steps of such a weight leave its patch and become factors, which are tensors of the layout. What is here decides which
//! weights that may be done to.

use super::patches::Patches;
use crate::checkpoint::{Checkpoint, Pattern, TensorId};
use crate::dtype::DType;
use crate::error::{AdapterFault, Error, Missing, Result};
use crate::float::Float;
use crate::patch::{Deferral, TensorPatch};

impl Patches {
    /// Defers the changes of the weights that a pattern names, in the checkpoint that these patches are for.
    ///
    /// # Errors
    /// As [`Weights::defer`](super::Weights::defer).
    pub(super) fn defer(mut self, checkpoint: &Checkpoint, pattern: String, dtype: DType) -> Result<Patches> {
        let stored = checkpoint.layout();
        let named = Pattern::new(pattern.clone(), stored).tensors(stored);
        let Some(&first) = named.first() else { return Err(Missing::Named { pattern }.into()) };
        let fault = |tensor: TensorId, fault| {
            let tensor = stored.at(tensor).name.clone();
            Error::Unpatchable { tensor, fault: Box::new(fault) }
        };
        let float = Float::of(dtype).filter(|float| matches!(float, Float::F32 | Float::F16 | Float::BF16));
        let float = float.ok_or_else(|| fault(first, AdapterFault::FactorType { dtype }))?;
        let mut deferred = Vec::new();
        for tensor in named {
            let deferral = match (self.tensor(tensor).filter(|patch| changes(patch)), self.deferral(tensor)) {
                (Some(patch), _) => Deferral::of(patch, float),
                (None, Some(deferral)) => deferral.stored_as(float),
                (None, None) => continue,
            };
            deferred.push((tensor, deferral.map_err(|refused| fault(tensor, refused))?));
        }
        self.put_off(deferred);
        self.lay_out(stored)
    }
}

/// Whether a patch is for a tensor that adapters change, and not for one that changes along with it.
fn changes(patch: &TensorPatch) -> bool {
    !patch.only_casts() && !patch.is_of_scale() && !patch.is_beside_codes()
}
