//! The scales beside an fp8 weight: lifted, applied, and computed anew.

use std::ops::Range;

use rayon::prelude::*;

use crate::adapter::Scaling;
use crate::backend::BlockScales;
use crate::float::Float;

/// The scales of a weight, one for each block of a grid.
pub(crate) struct Scales {
    values: Vec<f32>,
    block: [usize; 2],
    grid_cols: usize,
}

impl Scales {
    /// Lifts the scales of a weight; each has to be finite and not zero.
    pub(crate) fn read(scaling: &Scaling, bytes: &[u8]) -> Result<Scales, String> {
        let count = scaling.count();
        if bytes.len() != count * scaling.float.size() {
            return Err(format!("has {} bytes instead of {}", bytes.len(), count * scaling.float.size()));
        }
        let mut values = vec![0.0; count];
        scaling.float.lift(bytes, &mut values);
        match values.iter().position(|scale| !scale.is_finite() || *scale == 0.0) {
            Some(index) => Err(format!("holds {} at {index}", values[index])),
            None => Ok(Scales { values, block: scaling.block, grid_cols: scaling.grid[1] }),
        }
    }

    /// As a device takes them.
    pub(crate) fn blocks(&self) -> BlockScales<'_> {
        BlockScales { values: &self.values, block: self.block, grid_cols: self.grid_cols }
    }

    /// Combines each value of a row's `cols` with its scale.
    pub(crate) fn each(&self, row: usize, cols: &Range<usize>, values: &mut [f32], combine: impl Fn(f32, f32) -> f32) {
        let of_row = row / self.block[0] * self.grid_cols;
        let mut col = cols.start;
        let mut rest = values;
        while !rest.is_empty() {
            let block = col / self.block[1];
            let length = (block + 1).saturating_mul(self.block[1]).saturating_sub(col).min(rest.len());
            let (now, later) = rest.split_at_mut(length);
            let scale = self.values[of_row + block];
            now.iter_mut().for_each(|value| *value = combine(*value, scale));
            (rest, col) = (later, col + length);
        }
    }

    /// The scales for these real weights of `cols` columns: for each block the largest finite magnitude divided by the
    /// largest value of `weight`, rounded to the type that the scales are stored in; the old one where that is none.
    pub(crate) fn anew(&self, weight: Float, stored: Float, values: &[f32], cols: usize) -> Scales {
        let block_cols = self.block[1].min(cols.max(1));
        let of_row = |(row, values): (usize, &[f32])| {
            let largest = |block: &[f32]| {
                block.iter().map(|value| value.abs()).filter(|value| value.is_finite()).fold(0.0, f32::max)
            };
            (row / self.block[0] * self.grid_cols, values.chunks(block_cols).map(largest).collect::<Vec<f32>>())
        };
        let rows: Vec<_> = values.par_chunks(cols.max(1)).enumerate().map(of_row).collect();
        let mut largest = vec![0.0f32; self.values.len()];
        for (first, blocks) in rows {
            largest[first..].iter_mut().zip(blocks).for_each(|(largest, block)| *largest = largest.max(block));
        }
        let quotients: Vec<f32> = largest.iter().map(|largest| largest / weight.largest()).collect();
        let mut bytes = vec![0; quotients.len() * stored.size()];
        stored.round(&quotients, &mut bytes);
        let mut values = vec![0.0; quotients.len()];
        stored.lift(&bytes, &mut values);
        for (value, old) in values.iter_mut().zip(&self.values) {
            if !value.is_normal() {
                *value = *old;
            }
        }
        Scales { values, block: self.block, grid_cols: self.grid_cols }
    }

    /// Stores them, exactly.
    pub(crate) fn write(&self, stored: Float, bytes: &mut [u8]) {
        stored.round(&self.values, bytes);
    }
}
