//! Reading tensors of a checkpoint as adapters leave them.

use super::PatchOutcome;
use crate::adapter::Patches;
use crate::checkpoint::{Checkpoint, Layout};
use crate::error::{Error, Result};

impl Patches {
    /// No patches: `layout` as it is.
    pub fn none(layout: &Layout) -> Patches {
        Patches::unchanged(layout.clone())
    }

    /// Reads a tensor of the checkpoint that these patches were resolved against, patched where an adapter changes
    /// it. `dst` has to be as long as the patched tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such tensor or `dst` is of another length; what reading meets; as
    /// [`TensorPatch::apply`](crate::TensorPatch::apply).
    pub fn read(&self, checkpoint: &Checkpoint, tensor: usize, dst: &mut [u8]) -> Result<PatchOutcome> {
        let Some(patch) = self.tensor(tensor) else {
            checkpoint.read(tensor, dst)?;
            return Ok(PatchOutcome::default());
        };
        let bytes_of = |tensor: usize| checkpoint.layout().tensors.get(tensor).map_or(0, |t| t.bytes as usize);
        let (stored, room) = (bytes_of(tensor), dst.len());
        let pristine = dst.get_mut(..stored).ok_or_else(|| {
            let name = &self.layout().tensors[tensor].name;
            Error::invalid(format!("tensor `{name}` has at least {stored} bytes, the room given is {room}"))
        })?;
        checkpoint.read(tensor, pristine)?;
        let read = |&sibling: &usize| {
            let mut bytes = vec![0; bytes_of(sibling)];
            checkpoint.read(sibling, &mut bytes).map(|()| bytes)
        };
        let siblings = patch.needs().iter().map(read).collect::<Result<Vec<_>>>()?;
        patch.apply(dst, &siblings.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}
