//! Changes that need the whole weight at once. They work on an f32 copy.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::PatchOutcome;
use super::pieces::{self, Stored, TOGETHER};
use super::rows::mixed;
use super::scales::Scales;
use super::steps::{Axis, Change, Delta, Dora, Scope, Step, matrix_of};
use super::vector::Tier;
use crate::encoding::Encoding;
use crate::float::Float;

/// Applies `steps` in order to the weight at the start of `bytes`, which is as long as the patched weight.
pub(super) fn apply(tier: Tier, weight: Stored<'_>, bytes: &mut [u8], steps: &[Step]) -> PatchOutcome {
    F32Weight::patched(tier, weight, bytes, steps).store(weight, bytes)
}

impl F32Weight {
    /// The values of a matrix of `rows` by `cols` after `steps`.
    pub(super) fn changed(tier: Tier, (rows, cols): (usize, usize), values: Vec<f32>, steps: &[Step]) -> Vec<f32> {
        let mut weight = F32Weight { tier, rows, cols, values };
        weight.change(steps);
        weight.values
    }

    /// The weight at the start of `bytes`, after `steps`.
    pub(super) fn patched(tier: Tier, weight: Stored<'_>, bytes: &[u8], steps: &[Step]) -> F32Weight {
        let mut lifted = F32Weight::lifted(tier, weight, bytes);
        lifted.change(steps);
        lifted
    }

    /// The weight at the start of `bytes`.
    pub(super) fn lifted(tier: Tier, weight: Stored<'_>, bytes: &[u8]) -> F32Weight {
        let mut lifted =
            F32Weight { tier, rows: weight.rows, cols: weight.cols, values: vec![0.0; weight.rows * weight.cols] };
        if lifted.values.is_empty() {
            return lifted;
        }
        if weight.from.blocks().is_some() {
            // Rows, as steps count them, may be parts of blocks.
            let blocks = bytes.par_chunks(weight.from.bytes(TOGETHER));
            let runs = lifted.values.par_chunks_mut(TOGETHER).zip(blocks);
            runs.for_each(|(values, raw)| weight.lift(tier, 0, &(0..values.len()), raw, values));
            return lifted;
        }
        let cols = 0..weight.cols;
        let rows = lifted.values.par_chunks_mut(weight.cols).zip(bytes.par_chunks(weight.from.bytes(weight.cols)));
        rows.enumerate().for_each(|(row, (values, raw))| weight.lift(tier, row, &cols, raw, values));
        lifted
    }

    /// Rounds it into `bytes`, in the type and with the scales of `weight`.
    pub(super) fn store(mut self, weight: Stored<'_>, bytes: &mut [u8]) -> PatchOutcome {
        if self.values.is_empty() {
            return PatchOutcome::default();
        }
        let (tier, cols) = (self.tier, 0..self.cols);
        if weight.to.blocks().is_some() {
            let blocks = bytes.par_chunks_mut(weight.to.bytes(TOGETHER));
            let runs = self.values.par_chunks_mut(TOGETHER).zip(blocks);
            let tasks = runs.map(|(values, raw)| weight.round(tier, 0, &(0..values.len()), values, raw));
            return PatchOutcome::of_tasks(tasks);
        }
        let weight = Stored { cols: self.cols, ..weight };
        let raw = bytes.par_chunks_mut(weight.to.bytes(self.cols));
        let rows = self.values.par_chunks_mut(self.cols).zip(raw).enumerate();
        PatchOutcome::of_tasks(rows.map(|(row, (values, raw))| weight.round(tier, row, &cols, values, raw)))
    }

    /// The new scales of the weight.
    pub(super) fn scales(&self, weight: Float, stored: Float, old: &Scales) -> Scales {
        old.recomputed(weight, stored, &self.values)
    }

    pub(super) fn change(&mut self, steps: &[Step]) {
        let mut rest = steps;
        while let [step, later @ ..] = rest {
            rest = match &step.change {
                Change::Pad { from, to } => {
                    self.pad(from, to);
                    later
                }
                Change::Rotate { size, turns, strength } => {
                    self.rotate(step, *size, turns, *strength);
                    later
                }
                Change::Decompose { delta, dora } if step.change.scope() == Scope::Weight => {
                    self.decompose(step, delta, dora);
                    later
                }
                _ => {
                    let count = rest.iter().take_while(|step| step.change.scope() < Scope::Weight).count();
                    self.in_pieces(&rest[..count]);
                    &rest[count..]
                }
            };
        }
    }
}

/// A weight in f32, after the steps so far.
pub(super) struct F32Weight {
    tier: Tier,
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl F32Weight {
    fn in_pieces(&mut self, steps: &[Step]) {
        change_in_pieces(self.tier, &mut self.values, self.cols, steps);
    }

    fn of_step(&mut self, step: &Step) -> &mut [f32] {
        &mut self.values[step.rows.start * self.cols..step.rows.end * self.cols]
    }

    fn pad(&mut self, from: &[u64], to: &[u64]) {
        if let Some((rows, cols)) = matrix_of(to) {
            self.values = padded(&self.values, from, to, rows * cols);
            (self.rows, self.cols) = (rows, cols);
        }
    }

    /// For each block of rows `W += strength M^T W`.
    fn rotate(&mut self, step: &Step, size: usize, turns: &[f32], strength: f32) {
        let (tier, cols) = (self.tier, self.cols);
        if cols == 0 {
            return;
        }
        let blocks = self.of_step(step).par_chunks_mut(size * cols).zip(turns.par_chunks(size * size));
        blocks.for_each(|(block, turn)| {
            let mut change = vec![0.0; size * cols];
            for (row, sums) in change.chunks_exact_mut(cols).enumerate() {
                for (from, weights) in block.chunks_exact(cols).enumerate() {
                    tier.add_multiple(turn[from * size + row], weights, sums);
                }
            }
            block.iter_mut().zip(&change).for_each(|(weight, change)| *weight += strength * change);
        });
    }

    /// DoRA with norms over channels: `Wc = W + ratio D`, n over all rows and the channel's columns.
    fn decompose(&mut self, step: &Step, delta: &Arc<Delta>, dora: &Dora) {
        let Axis::Columns { inner } = dora.axis else { return };
        let (tier, cols) = (self.tier, self.cols);
        let weights = self.of_step(step);
        let mut changed = weights.to_vec();
        let rows = 0..step.rows.len();
        let change = Change::Add { delta: Arc::clone(delta), scale: dora.ratio };
        change_in_pieces(tier, &mut changed, cols, &[Step { rows, change }]);
        let normed = if dora.of_original { &*weights } else { &changed[..] };
        let factors: Vec<f32> = channel_norms(normed, cols, inner)
            .iter()
            .zip(&dora.magnitude)
            .map(|(norm, magnitude)| magnitude / (norm + dora.epsilon))
            .collect();
        let rows = weights.par_chunks_mut(cols.max(1)).zip(changed.par_chunks(cols.max(1)));
        rows.for_each(|(weights, changed)| {
            for (col, (weight, changed)) in weights.iter_mut().zip(changed).enumerate() {
                *weight = mixed(*weight, changed * factors[col / inner], dora.strength);
            }
        });
    }
}

/// Whether two lists of steps change some rows of a weight of `cols` columns by the same numbers, whatever the weight is. False
/// for steps whose change depends on the weight.
pub(crate) fn same_change(one: &[Step], other: &[Step], rows: &[Range<usize>], cols: usize) -> bool {
    let plain = |steps: &[Step]| steps.iter().all(|step| step.change.scope() == Scope::Element);
    let replaces = |steps: &[Step]| steps.iter().any(|step| matches!(step.change, Change::Set(_)));
    if !plain(one) || !plain(other) || replaces(one) != replaces(other) {
        return false;
    }
    let changed = |steps: &[Step]| {
        let mut values = vec![0.0; rows.iter().map(|rows| rows.end).max().unwrap_or(0) * cols];
        change_in_pieces(Tier::best(), &mut values, cols, steps);
        values
    };
    let (one, other) = (changed(one), changed(other));
    rows.iter().map(|rows| rows.start * cols..rows.end * cols).all(|place| one[place.clone()] == other[place])
}

fn change_in_pieces(tier: Tier, values: &mut [f32], cols: usize, steps: &[Step]) {
    let rows = values.len().checked_div(cols).unwrap_or(0);
    let f32s = Encoding::Float(Float::F32);
    let weight = Stored { from: f32s, to: f32s, scales: None, noise: None, rows, cols };
    pieces::apply(tier, weight, bytemuck::cast_slice_mut(values), steps);
}

/// `old`, of shape `from`, padded with zeros to the shape `to` of `count` values.
fn padded(old: &[f32], from: &[u64], to: &[u64], count: usize) -> Vec<f32> {
    let mut new = vec![0.0; count];
    let (Some((&run, outer)), Some((&run_to, outer_to))) = (from.split_last(), to.split_last()) else { return new };
    for (index, values) in old.chunks_exact((run as usize).max(1)).enumerate() {
        let (mut rest, mut at, mut stride) = (index as u64, 0, run_to);
        for (from, to) in outer.iter().zip(outer_to).rev() {
            at += rest % from * stride;
            rest /= from;
            stride *= to;
        }
        new[at as usize..][..values.len()].copy_from_slice(values);
    }
    new
}

/// The Euclidean norm of each channel of `inner` columns over all rows, summed in f64 in order of the rows.
fn channel_norms(values: &[f32], cols: usize, inner: usize) -> Vec<f32> {
    const TOGETHER: usize = 64;
    let mut sums = vec![0.0f64; cols / inner];
    sums.par_chunks_mut(TOGETHER).enumerate().for_each(|(chunk, sums)| {
        let first = chunk * TOGETHER * inner;
        for row in values.chunks_exact(cols) {
            for (sum, channel) in sums.iter_mut().zip(row[first..].chunks_exact(inner)) {
                channel.iter().for_each(|&value| *sum += f64::from(value) * f64::from(value));
            }
        }
    });
    sums.iter().map(|sum| sum.sqrt() as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_keeps_the_corner() {
        let new = padded(&[1., 2., 3., 4.], &[2, 1, 2], &[2, 2, 3], 12);
        assert_eq!(new, [1., 2., 0., 0., 0., 0., 3., 4., 0., 0., 0., 0.]);
    }

    #[test]
    fn channels_are_normed_over_rows() {
        assert_eq!(channel_norms(&[3., 0., 1., 2., 0., 4., 2., 4.], 4, 2), [5., 5.]);
    }
}
