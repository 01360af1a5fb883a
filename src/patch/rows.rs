//! Changes of a row that need all of it.

use super::steps::{BlockTransform, Columns, Dora};
use super::vector::Tier;

/// Buffers for a delta of the same size and its intermediate values.
#[derive(Default)]
pub(super) struct Spare {
    pub(super) delta: Vec<f32>,
    pub(super) other: Vec<f32>,
}

/// `W += s (Wc m / n - W)` for one row, whose D is given.
pub(super) fn decompose_row(dora: &Dora, row: usize, weights: &mut [f32], delta: &[f32]) {
    let changed = |weight: f32, delta: f32| weight + dora.ratio * delta;
    let norm = if dora.of_original {
        norm(weights.iter().copied())
    } else {
        norm(weights.iter().zip(delta).map(|(&weight, &delta)| changed(weight, delta)))
    };
    let factor = dora.magnitude[row] / (norm + dora.epsilon);
    for (weight, &delta) in weights.iter_mut().zip(delta) {
        *weight = mixed(*weight, changed(*weight, delta) * factor, dora.strength);
    }
}

/// `w += s (w' - w)` for one row, see [`Columns`]. Each sum is in order of the columns.
pub(super) fn transform_row(tier: Tier, columns: &Columns, row: usize, weights: &mut [f32], spare: &mut Spare) {
    let Spare { delta: from, other: to } = spare;
    from.clear();
    from.extend_from_slice(weights);
    for BlockTransform { size, blocks, order } in &columns.transforms {
        to.clear();
        to.resize(from.len(), 0.0);
        if let Some(order) = order {
            from.iter().zip(order).for_each(|(value, &place)| to[place as usize] = *value);
            std::mem::swap(from, to);
            to.fill(0.0);
        }
        let sums = to.chunks_exact_mut(*size).zip(from.chunks_exact(*size)).zip(blocks.chunks_exact(size * size));
        for ((sums, values), block) in sums {
            for (value, column) in values.iter().zip(block.chunks_exact(*size)) {
                tier.add_multiple(*value, column, sums);
            }
        }
        std::mem::swap(from, to);
        if let Some(order) = order {
            to.iter_mut().zip(order).for_each(|(value, &place)| *value = from[place as usize]);
            std::mem::swap(from, to);
        }
    }
    let scale = columns.by_rows.as_ref().map_or(1.0, |scales| scales[row]);
    for (weight, value) in weights.iter_mut().zip(from) {
        *weight = mixed(*weight, *value * scale, columns.strength);
    }
}

/// `weight + strength (whole - weight)`, exactly `whole` at strength 1.
pub(super) fn mixed(weight: f32, whole: f32, strength: f32) -> f32 {
    if strength == 1.0 { whole } else { weight + strength * (whole - weight) }
}

/// The Euclidean norm, summed in f64 in order.
fn norm(values: impl Iterator<Item = f32>) -> f32 {
    values.map(|value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt() as f32
}
