//! Reading tensors of a checkpoint as adapters leave them.

use super::PatchOutcome;
use crate::adapter::{Patches, TensorPatch};
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
        let siblings = siblings(checkpoint, patch)?;
        patch.apply(dst, &siblings.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// The bytes of the tensors that a patch needs beside its own.
pub(crate) fn siblings(checkpoint: &Checkpoint, patch: &TensorPatch) -> Result<Vec<Vec<u8>>> {
    let read = |&sibling: &usize| {
        let tensor = checkpoint.layout().tensors.get(sibling);
        let mut bytes = vec![0; tensor.map_or(0, |tensor| tensor.bytes as usize)];
        checkpoint.read(sibling, &mut bytes).map(|()| bytes)
    };
    patch.needs().iter().map(read).collect()
}
