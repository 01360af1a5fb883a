//! Patches of tensors of which a rank has a part, or a stage of a pipeline some.
//!
//! Whatever a rank has, its bytes are those of the whole tensor, patched. What adds products of two factors is divided as the tensor is,
//! so that the part is patched by itself. Any other patch is that of the whole, of which the part is kept: rows are read and patched a few
//! at a time, those that the part has something of; and where a change needs the whole weight, all of it.

use std::ops::Range;
use std::sync::Arc;

use super::pieces;
use super::scales::ScalePolicy;
use super::steps::{Step, TILE_ROWS, matrix_of};
use super::vector::Tier;
use super::{PatchOutcome, TensorPatch};
use crate::checkpoint::{Checkpoint, Cut, Stretches, TensorId};
use crate::encoding::Encoding;
use crate::error::{Error, Mismatch, Result};
use crate::limits::STAGING_BYTES;
use crate::rounding::Rounding;
use crate::threads;

/// The patch of a whole tensor, for a part of it.
#[derive(Clone, Debug)]
pub(super) struct OfWhole {
    pub(super) patch: TensorPatch,
    /// The tensor of the whole checkpoint.
    tensor: TensorId,
    /// The bytes of the patched tensor that are the part; `None` if all are.
    kept: Option<Stretches>,
    /// Whether the part's own steps do the same.
    has_own: bool,
}

impl TensorPatch {
    /// This patch, of tensor `tensor` of a whole checkpoint, for the part of it that `cut` keeps, and of the patched tensor `patched`.
    /// `None` if it changes nothing of the part.
    ///
    /// # Errors
    /// [`Error::Bug`] for a part of blocks.
    pub(crate) fn part(
        &self,
        tensor: TensorId,
        cut: Option<&Cut>,
        patched: Option<&Cut>,
    ) -> Result<Option<TensorPatch>> {
        let kept = patched.map(|cut| {
            let kept = cut.stretches(&self.patched_shape, self.dtype());
            kept.ok_or_else(|| Error::bug(format!("a part of tensor `{}` that divides blocks", self.name)))
        });
        let kept = kept.transpose()?;
        let own = self.own_steps(cut);
        if own.as_ref().is_some_and(|steps| steps.is_empty())
            && !self.steps.is_empty()
            && !self.casts()
            && !self.requantises
        {
            return Ok(None);
        }
        let shape = |cut: Option<&Cut>, whole: &[u64]| cut.map_or_else(|| whole.to_vec(), |cut| cut.shape(whole));
        let has_own = own.is_some();
        let of_whole = OfWhole { patch: self.clone(), tensor, kept, has_own };
        let is_all = cut.is_none() && has_own;
        Ok(Some(TensorPatch {
            shape: shape(cut, &self.shape),
            patched_shape: shape(patched, &self.patched_shape),
            scaling: None,
            needs: Vec::new(),
            steps: own.unwrap_or_else(|| Arc::clone(&self.steps)),
            is_bias: self.is_bias && is_all,
            view: self.view.filter(|_| is_all),
            scale_of: None,
            codes: None,
            of_whole: Some(Arc::new(of_whole)),
            ..self.clone()
        }))
    }

    /// The steps of a part, if these are enough to patch it.
    fn own_steps(&self, cut: Option<&Cut>) -> Option<Arc<Vec<Step>>> {
        let plain = self.scaling.is_none() && self.codes.is_none() && self.scale_of.is_none() && self.needs.is_empty();
        if !plain || self.patched_shape != self.shape {
            return cut.is_none().then(|| Arc::clone(&self.steps)).filter(|_| plain);
        }
        let Some(cut) = cut else { return Some(Arc::clone(&self.steps)) };
        let (rows, cols) = matrix_of(&self.shape)?;
        let is_matrix = self.view.is_none_or(|view| view == (rows, cols)) && !self.is_bias && self.shape.len() > 1;
        // Blocks that are made again would differ where nothing changes.
        let unchanged = self.steps.iter().any(|step| *step.rows() != (0..rows)) && self.requantises;
        if self.steps.is_empty() {
            return Some(Arc::clone(&self.steps));
        }
        if !is_matrix || unchanged || cut.dimension() > 1 {
            return None;
        }
        let inner: u64 = if cut.dimension() == 1 { self.shape[2..].iter().product() } else { 1 };
        let scaled = |range: &Range<u64>| (range.start * inner) as usize..(range.end * inner) as usize;
        let ranges: Vec<Range<usize>> = cut.ranges().iter().map(scaled).collect();
        let (all_rows, all_cols) = (0..rows, 0..cols);
        let (of_rows, of_cols) = match cut.dimension() {
            0 => (&ranges[..], std::slice::from_ref(&all_cols)),
            _ => (std::slice::from_ref(&all_rows), &ranges[..]),
        };
        let parts = self.steps.iter().map(|step| step.part(of_rows, of_cols, cols));
        Some(Arc::new(parts.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect()))
    }

    /// The patch of the whole that this one's tensor has to be read through; none if it is whole, or its own steps are enough.
    pub(super) fn through_whole(&self) -> Option<&OfWhole> {
        // Noise is counted over the whole.
        let noisy = !matches!(self.rounding, Rounding::NearestEven);
        self.of_whole.as_deref().filter(|of| !of.has_own || (noisy && of.kept.is_some()))
    }

    /// Fails if the bytes of the part are not enough to patch it.
    pub(super) fn check_own(&self) -> Result<()> {
        match self.through_whole() {
            None => Ok(()),
            Some(_) => Err(Mismatch::PartOfTensor { tensor: self.name.clone() }.into()),
        }
    }

    /// The bytes that [`read`](TensorPatch::read) reads of a checkpoint for its tensor, number `tensor` there.
    pub(crate) fn bytes_read(&self, checkpoint: &Checkpoint, tensor: TensorId) -> u64 {
        let (of, read) = match (self.through_whole(), checkpoint.part()) {
            (Some(of), Some(part)) => (part.whole(), [&of.patch.needs[..], &[of.tensor]].concat()),
            _ => (checkpoint, [&self.needs[..], &[tensor]].concat()),
        };
        read.iter().map(|&tensor| of.layout().tensor(tensor).map_or(0, |info| info.bytes)).sum()
    }

    /// Whether it changes a few rows at a time, and needs nothing else of its tensor.
    fn is_in_rows(&self) -> bool {
        let recomputes = self.scaling.is_some()
            && matches!(self.target, Encoding::Float(_))
            && self.scale_policy == ScalePolicy::Recompute;
        self.codes.is_none() && self.scale_of.is_none() && !recomputes && self.is_in_pieces()
    }
}

impl OfWhole {
    /// Reads the part and patches it. `dst` is as long as it is. `checkpoint` is the part that has the tensor.
    pub(super) fn read(&self, checkpoint: &Checkpoint, dst: &mut [u8]) -> Result<PatchOutcome> {
        let whole = checkpoint.part().map(|part| part.whole());
        let whole = whole.ok_or_else(|| Error::bug("the patch of a part, for a checkpoint that is none"))?;
        let Some(kept) = &self.kept else { return self.patch.read(whole, self.tensor, dst) };
        if self.patch.is_in_rows() {
            return self.read_rows(whole, kept, dst);
        }
        let bytes =
            self.patch.dtype().bytes_of(&self.patch.patched_shape).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| Error::bug("a tensor of more bytes than there are"))?;
        let mut all = vec![0; bytes];
        let outcome = self.patch.read(whole, self.tensor, &mut all)?;
        kept.gather(&all, dst);
        Ok(outcome)
    }

    /// Reads the rows of which the part has something, a few MiB at a time.
    fn read_rows(&self, whole: &Checkpoint, kept: &Stretches, dst: &mut [u8]) -> Result<PatchOutcome> {
        let patch = &self.patch;
        patch.check_target()?;
        let siblings = patch.read_siblings(whole)?;
        let scales = patch.scales(&siblings.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let weight = patch.stored(scales.as_ref());
        let (from, to) = (weight.from.bytes(weight.cols), weight.to.bytes(weight.cols));
        let together = (STAGING_BYTES / from.max(1)).max(TILE_ROWS);
        let (mut stored, mut patched, mut outcome) = (Vec::new(), Vec::new(), PatchOutcome::default());
        let mut rest = dst;
        for Rows { rows, places } in rows_of(kept, rest.len(), to.max(1), together) {
            stored.resize(from * rows.len(), 0);
            patched.resize(to * rows.len(), 0);
            whole.read_at(self.tensor, (from * rows.start) as u64, &mut stored)?;
            outcome += threads::run(|| {
                pieces::convert(Tier::best(), weight, rows.start, &stored, &mut patched, &patch.steps)
            })?;
            for place in places {
                let (here, after) = std::mem::take(&mut rest).split_at_mut(place.len());
                here.copy_from_slice(&patched[place.start - to * rows.start..place.end - to * rows.start]);
                rest = after;
            }
        }
        Ok(outcome)
    }
}

/// Rows that are patched together, and the bytes of the whole that are kept of them.
#[derive(Debug, PartialEq, Eq)]
struct Rows {
    rows: Range<usize>,
    places: Vec<Range<usize>>,
}

/// The rows, of `row` bytes each, that have the `len` bytes of a part, at most `most` together.
fn rows_of(kept: &Stretches, len: usize, row: usize, most: usize) -> Vec<Rows> {
    let mut all: Vec<Rows> = Vec::new();
    kept.each(0..len as u64, |at, len| {
        let (mut at, end) = (at as usize, (at + len) as usize);
        while at < end {
            let first = at / row;
            let joins = |last: &Rows| first <= last.rows.end && first < last.rows.start + most;
            if !all.last().is_some_and(joins) {
                all.push(Rows { rows: first..first, places: Vec::new() });
            }
            if let Some(last) = all.last_mut() {
                let until = end.min((last.rows.start + most) * row);
                last.rows.end = last.rows.end.max(until.div_ceil(row));
                last.places.push(at..until);
                at = until;
            }
        }
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn rows_that_a_part_has_nothing_of_are_not_read() {
        let cut = |dimension, ranges: &[Range<u64>], shape: &[u64]| {
            Cut::new(dimension, ranges.to_vec()).stretches(shape, DType::U8).unwrap()
        };
        let rows = |rows: Range<usize>, places: &[Range<usize>]| Rows { rows, places: places.to_vec() };
        let two = cut(0, &[1..4, 8..9], &[10, 4]);
        assert_eq!(rows_of(&two, 16, 4, 100), [rows(1..4, &[4..16]), rows(8..9, &[32..36])]);
        assert_eq!(rows_of(&two, 16, 4, 2), [rows(1..3, &[4..12]), rows(3..4, &[12..16]), rows(8..9, &[32..36])]);
        let columns = cut(1, &[1..2], &[3, 4]);
        assert_eq!(rows_of(&columns, 3, 4, 2), [rows(0..2, &[1..2, 5..6]), rows(2..3, &[9..10])]);
    }
}
