//! Patches that cast: a tensor is read in the checkpoint's type and stored in another.
//!
//! The bytes before and after have different lengths, so nothing is done in place. A tensor is read and cast a few MiB at a
//! time, along with its steps, unless one of these needs the whole weight.

use std::sync::Arc;

use super::pieces;
use super::steps::TILE_ROWS;
use super::vector::Tier;
use super::whole::F32Weight;
use super::{Changes, PatchOutcome, TensorPatch, bytes_of};
use crate::checkpoint::{Checkpoint, Siblings, TensorId, TensorInfo};
use crate::encoding::Encoding;
use crate::error::{AdapterFault, Error, Measured, Result};
use crate::float::Float;
use crate::ggml::Format;
use crate::limits::STAGING_BYTES;
use crate::threads;

impl TensorPatch {
    /// Patches the weight whose bytes, as the checkpoint holds them, are `stored`, and writes it to `dst`, which is as long as the
    /// patched tensor. Otherwise as [`apply`](TensorPatch::apply), also for a patch that casts.
    ///
    /// # Errors
    /// [`Error::WrongSize`] when `stored`, `dst` or a sibling has another length; as [`apply`](TensorPatch::apply).
    pub fn apply_from(&self, stored: &[u8], siblings: &[&[u8]], dst: &mut [u8]) -> Result<PatchOutcome> {
        self.check_own()?;
        self.check_size(dst)?;
        // What packed weights are made of keeps its length.
        let needed = if self.codes.is_some() { Some(dst.len()) } else { bytes_of(&self.shape, self.stored) };
        if needed != Some(stored.len()) {
            let (what, given) = (Measured::Tensor { name: self.name.clone() }, stored.len() as u64);
            return Err(Error::WrongSize { what, needed: needed.map_or(u64::MAX, |bytes| bytes as u64), given });
        }
        self.check_target()?;
        if !self.casts() {
            dst[..stored.len()].copy_from_slice(stored);
            return self.apply(dst, siblings);
        }
        // A weight with scales is never cast.
        self.scales(siblings)?;
        threads::run(|| self.cast_with(Tier::best(), stored, dst))
    }

    /// The patch that only casts a tensor; it has no steps.
    ///
    /// # Errors
    /// [`AdapterFault::BadDType`] for a tensor that is not of floats.
    pub(crate) fn of_cast(tensor: &TensorInfo, to: Float) -> Result<TensorPatch, AdapterFault> {
        let changes = Changes { shape: tensor.shape.clone(), ..Changes::default() };
        // Whoever casts has looked for scales.
        let mut patch = TensorPatch::new(tensor, changes, &Siblings::default())?;
        patch.set_type(to);
        Ok(patch)
    }

    /// Sets the type that the tensor is stored in afterwards.
    pub(crate) fn set_type(&mut self, to: Float) {
        self.target = Encoding::Float(to);
    }

    /// Lets the values of blocks that its steps change become blocks of the same type again.
    ///
    /// # Errors
    /// [`Error::Unpatchable`] for a type that is not written.
    pub(crate) fn requantise(&mut self) -> Result<()> {
        let unwritten = |format: &Format| !format.is_written() && !self.only_casts();
        if let Some(format) = self.target.blocks().filter(unwritten) {
            let fault = AdapterFault::NotWritten { dtype: format.dtype(), written: Format::written().collect() };
            return Err(Error::Unpatchable { tensor: self.name.clone(), fault: Box::new(fault) });
        }
        self.requantises = true;
        Ok(())
    }

    /// Fails if the values of blocks are changed and nothing says what becomes of them.
    pub(crate) fn check_target(&self) -> Result<()> {
        match self.target.blocks() {
            Some(format) if !self.requantises && !self.only_casts() => {
                let fault = AdapterFault::Blocks { dtype: format.dtype() };
                Err(Error::Unpatchable { tensor: self.name.clone(), fault: Box::new(fault) })
            }
            _ => Ok(()),
        }
    }

    /// Drops its steps, so that it casts the tensor if it does anything.
    pub(crate) fn drop_steps(&mut self) {
        self.steps = Arc::default();
        (self.is_bias, self.view) = (false, None);
        self.makers.clear();
    }

    /// Whether it makes blocks of changed values.
    pub(crate) fn requantises(&self) -> bool {
        if let Some(of) = &self.of_whole {
            return of.patch.requantises();
        }
        self.requantises && (self.target.blocks().is_some() || self.codes.is_some()) && !self.only_casts()
    }

    /// Whether the tensor's type changes.
    pub(crate) fn casts(&self) -> bool {
        self.stored != self.target
    }

    /// Whether it does nothing else: it has no steps.
    pub(crate) fn only_casts(&self) -> bool {
        match &self.of_whole {
            Some(of) => of.patch.only_casts(),
            None => self.steps.is_empty() && !self.is_of_scale(),
        }
    }

    /// Whether it is [read in parts](TensorPatch::read_part): it only casts, and needs no more of a tensor than the part.
    pub(crate) fn is_read_in_parts(&self) -> bool {
        self.only_casts() && self.through_whole().is_none()
    }

    /// Reads a part of its tensor, number `tensor` of the checkpoint, and casts it into `dst`. The part is of whole elements and
    /// begins at byte `at` of the cast tensor. For a patch that [only casts](TensorPatch::only_casts). Returns also how many
    /// bytes were read.
    pub(crate) fn read_part(
        &self,
        checkpoint: &Checkpoint,
        tensor: TensorId,
        at: usize,
        dst: &mut [u8],
    ) -> Result<(PatchOutcome, u64)> {
        let (from, weight) = (self.stored, self.weight());
        let (first, count) = (self.target.count(at), self.target.count(dst.len()));
        // The blocks that the part lies in.
        let before = first % from.together();
        let count_read = (before + count).next_multiple_of(from.together());
        let mut stored = vec![0; from.bytes(count_read)];
        checkpoint.read_at(tensor, from.bytes(first - before) as u64, &mut stored)?;
        let outcome = threads::run(|| match count_read == count {
            true => pieces::cast(Tier::best(), weight, first, &stored, dst),
            false => {
                let tier = Tier::best();
                let mut values = vec![0.0; count_read];
                weight.lift(tier, 0, &(0..count_read), &stored, &mut values);
                weight.round(tier, 0, &(first..first + count), &mut values[before..before + count], dst)
            }
        })?;
        Ok((outcome, stored.len() as u64))
    }

    /// As [`read`](TensorPatch::read), for a patch that casts.
    pub(super) fn read_cast(&self, checkpoint: &Checkpoint, tensor: TensorId, dst: &mut [u8]) -> Result<PatchOutcome> {
        self.check_size(dst)?;
        if self.only_casts() {
            return self.read_in_parts(checkpoint, tensor, dst);
        }
        if self.is_in_pieces() {
            return self.read_in_rows(checkpoint, tensor, dst);
        }
        let mut stored = vec![0; checkpoint.info(tensor)?.bytes as usize];
        checkpoint.read(tensor, &mut stored)?;
        let outcome = threads::run(|| {
            let mut lifted = F32Weight::lifted(Tier::best(), self.weight(), &stored);
            // Its memory is free for what the steps need.
            drop(stored);
            lifted.change(&self.steps);
            lifted.store(self.weight(), dst)
        })?;
        Ok(outcome)
    }

    fn read_in_parts(&self, checkpoint: &Checkpoint, tensor: TensorId, dst: &mut [u8]) -> Result<PatchOutcome> {
        let (mut at, mut outcome) = (0, PatchOutcome::default());
        for part in dst.chunks_mut(STAGING_BYTES) {
            outcome += self.read_part(checkpoint, tensor, at, part)?.0;
            at += part.len();
        }
        Ok(outcome)
    }

    /// A few MiB at a time, and eight rows at least.
    fn read_in_rows(&self, checkpoint: &Checkpoint, tensor: TensorId, dst: &mut [u8]) -> Result<PatchOutcome> {
        let weight = self.weight();
        let (from, to) = (weight.from.bytes(weight.cols), weight.to.bytes(weight.cols));
        let rows = (STAGING_BYTES / from.max(1)).max(TILE_ROWS) / TILE_ROWS * TILE_ROWS;
        let (mut stored, mut outcome) = (Vec::new(), PatchOutcome::default());
        for (part, dst) in dst.chunks_mut((rows * to).max(1)).enumerate() {
            let first_row = part * rows;
            stored.resize(weight.from.bytes(weight.to.count(dst.len())), 0);
            checkpoint.read_at(tensor, (first_row * from) as u64, &mut stored)?;
            outcome += threads::run(|| pieces::convert(Tier::best(), weight, first_row, &stored, dst, &self.steps))?;
        }
        Ok(outcome)
    }

    /// Casts the whole tensor, on the current thread pool.
    pub(super) fn cast_with(&self, tier: Tier, stored: &[u8], dst: &mut [u8]) -> PatchOutcome {
        let (weight, steps): (_, &Arc<_>) = (self.weight(), &self.steps);
        if self.only_casts() {
            pieces::cast(tier, weight, 0, stored, dst)
        } else if self.is_in_pieces() {
            pieces::convert(tier, weight, 0, stored, dst, steps)
        } else {
            F32Weight::patched(tier, weight, stored, steps).store(weight, dst)
        }
    }

    /// The weight, which has no scales.
    fn weight(&self) -> pieces::Stored<'static> {
        self.stored(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::rounding::Rounding;

    /// Parts that begin and end inside blocks hold what the whole holds there.
    #[test]
    fn any_part_of_a_cast_tensor_is_that_part_of_the_whole() {
        let (rows, cols) = (3u64, 512u64);
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend([1u64, 0].map(u64::to_le_bytes).as_flattened());
        file.extend([&8u64.to_le_bytes()[..], b"w.weight", &2u32.to_le_bytes()].concat());
        file.extend([cols, rows].map(u64::to_le_bytes).as_flattened());
        file.extend(DType::Q4_K.ggml_number().unwrap().to_le_bytes());
        file.extend(0u64.to_le_bytes());
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend((0..6 * 144u32).map(|at| (at * 37 % 113) as u8));
        let checkpoint = Checkpoint::from_bytes("model.gguf", file).unwrap();
        let (tensor, info) = (TensorId::new(0), checkpoint.layout().at(TensorId::new(0)));
        let mut patch = TensorPatch::of_cast(info, Float::BF16).unwrap();
        for rounding in [Rounding::NearestEven, Rounding::Stochastic { seed: 3 }] {
            patch.set_rounding(rounding);
            let mut whole = vec![0; 2 * (rows * cols) as usize];
            patch.read(&checkpoint, tensor, &mut whole).unwrap();
            assert!(whole.iter().any(|byte| *byte != 0));
            for (at, length) in
                [(0, 2), (2, 510), (510, 2), (512, 512), (300, 1000), (1024, 2048), (514, 2558), (3070, 2)]
            {
                let mut part = vec![0; length];
                let (_, read) = patch.read_part(&checkpoint, tensor, at, &mut part).unwrap();
                assert!(part == whole[at..at + length], "{length} bytes from {at}");
                assert!(read.is_multiple_of(144) && read >= (length as u64).div_ceil(512) * 144, "{read}");
            }
        }
    }
}
