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
    /// [`Error::Invalid`] when there is no such tensor, when it is another than the one of that place that the patches
    /// were resolved against, or when `dst` is of another length; what reading meets; as
    /// [`TensorPatch::apply`](crate::TensorPatch::apply).
    pub fn read(&self, checkpoint: &Checkpoint, tensor: usize, dst: &mut [u8]) -> Result<PatchOutcome> {
        self.check(checkpoint, tensor)?;
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

    /// Patches know tensors by their places, so another checkpoint's would get what is not meant for them.
    fn check(&self, checkpoint: &Checkpoint, tensor: usize) -> Result<()> {
        let (Some(stored), Some(known)) = (checkpoint.layout().tensors.get(tensor), self.layout().tensors.get(tensor))
        else {
            let counts = (self.layout().tensors.len(), checkpoint.layout().tensors.len());
            let (path, (known, stored)) = (checkpoint.path().display(), counts);
            let reason =
                format!("there is no tensor {tensor}: the patches are for {known} tensors, {path} has {stored}");
            return Err(Error::invalid(reason));
        };
        let shape = self.tensor(tensor).map_or(&known.shape, TensorPatch::pristine_shape);
        if (&stored.name, stored.dtype, &stored.shape) == (&known.name, known.dtype, shape) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the patches are of another checkpoint: tensor {tensor} is `{}` ({} {shape:?}) there and `{}` ({} {:?}) in {}",
            known.name,
            known.dtype,
            stored.name,
            stored.dtype,
            stored.shape,
            checkpoint.path().display()
        )))
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
