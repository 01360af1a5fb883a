//! A checkpoint and its adapters, as one value.

use super::Adapter;
use super::patches::{Matching, Patches};
use super::report::MatchReport;
use crate::checkpoint::{Checkpoint, Layout, TensorId};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::patch::{PatchOutcome, ScalePolicy};
use crate::rounding::Rounding;

/// The weights of a model to load: a checkpoint, and the adapters to merge into it.
///
/// Only headers and the adapters' factors have been read. [`read`](Weights::read) returns one merged tensor;
/// [`Loader::load`](crate::Loader::load) loads all of them onto the devices that a plan gives them.
///
/// ```
/// use tensor_offload::{Adapter, Checkpoint, Matching, Weights};
/// let checkpoint = Checkpoint::open("examples/data/tiny-llama")?;
/// let adapter = Adapter::open("examples/data/tiny-llama-lora", 0.5)?;
/// let weights = Weights::patched(checkpoint, vec![adapter], Matching::Strict)?;
/// println!("{}", weights.report()); // 9 modules applied to 9 tensors …
///
/// let name = "model.layers.0.mlp.down_proj.weight";
/// let tensor = weights.checkpoint().find(name).expect("every Llama has one");
/// let mut merged = vec![0; weights.layout().tensor(tensor).expect("it was just found").bytes as usize];
/// weights.read(tensor, &mut merged)?;
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Weights {
    checkpoint: Checkpoint,
    patches: Patches,
}

impl Weights {
    /// A checkpoint without adapters.
    pub fn new(checkpoint: Checkpoint) -> Weights {
        let patches = Patches::none(checkpoint.layout());
        Weights { checkpoint, patches }
    }

    /// A checkpoint with `adapters` merged into it, in this order.
    ///
    /// # Errors
    /// As [`Patches::resolve`].
    pub fn patched(checkpoint: Checkpoint, adapters: Vec<Adapter>, matching: Matching) -> Result<Weights> {
        let patches = Patches::resolve_in(&checkpoint, adapters, matching)?;
        let with_head = patches.with_head().map(|layout| checkpoint.with_layout(layout.clone())).transpose()?;
        let checkpoint = with_head.unwrap_or(checkpoint);
        Ok(Weights { checkpoint, patches })
    }

    /// Sets how all patched tensors are rounded.
    #[must_use]
    pub fn rounding(mut self, rounding: Rounding) -> Weights {
        self.patches = self.patches.rounding(rounding);
        self
    }

    /// Sets whether the scales of patched fp8 weights are kept or recomputed; see [`Patches::scales`].
    ///
    /// # Errors
    /// As [`Patches::scales`].
    pub fn scales(mut self, policy: ScalePolicy) -> Result<Weights> {
        self.patches = self.patches.scales(policy)?;
        Ok(self)
    }

    /// The unpatched checkpoint. If the [report](Weights::report) tells of an untied head, it has that as a last tensor, with the
    /// embedding's bytes.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The patches of the tensors that the adapters change.
    pub fn patches(&self) -> &Patches {
        &self.patches
    }

    /// The tensors after patching, as they are planned and loaded.
    pub fn layout(&self) -> &Layout {
        self.patches.layout()
    }

    /// How every tensor of the adapters was used.
    pub fn report(&self) -> &MatchReport {
        self.patches.report()
    }

    /// Reads one tensor, merged if an adapter changes it. `dst` must be as long as the merged tensor.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor; [`Error::WrongSize`] when `dst` is of another length; any error of
    /// reading; as [`TensorPatch::apply`](crate::patch::TensorPatch::apply).
    pub fn read(&self, tensor: TensorId, dst: &mut [u8]) -> Result<PatchOutcome> {
        match self.patches.tensor(tensor) {
            Some(patch) => patch.read(&self.checkpoint, tensor, dst),
            None => self.checkpoint.read(tensor, dst).map(|()| PatchOutcome::default()),
        }
    }
}

impl From<Checkpoint> for Weights {
    fn from(checkpoint: Checkpoint) -> Weights {
        Weights::new(checkpoint)
    }
}
