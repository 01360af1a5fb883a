//! The scales of an fp8 weight: finding, reading, applying and recomputing them.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::vector::Tier;
use super::whole::F32Weight;
use super::{PatchOutcome, TensorPatch, bytes_of};
use crate::backend::BlockScales;
use crate::checkpoint::{TensorId, TensorInfo};
use crate::error::{AdapterFault, Error, Measured, Result};
use crate::float::Float;
use crate::rounding::Rounding;

/// The policy for the scale of an fp8 weight that adapters change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScalePolicy {
    /// The scale is kept. Weights beyond its range saturate, and are counted.
    #[default]
    Keep,
    /// The scale becomes the largest magnitude of its changed weights divided by the type's largest value, so that no weight
    /// saturates and no bits are wasted. The scale is then a patched tensor too. If that gives no valid scale (weights that
    /// are all zero, a quotient below the range of the scale's type), the scale is kept.
    Recompute,
}

impl TensorPatch {
    /// The scale beside the weight.
    pub(crate) fn scale(&self) -> Option<TensorId> {
        self.scaling.as_ref().map(|scaling| scaling.tensor)
    }

    /// The patch that recomputes `scale`, the scale of the tensor `weight` that this patch is for; `None` if it has none.
    pub(crate) fn of_scale(&self, weight: TensorId, scale: &TensorInfo) -> Option<TensorPatch> {
        let scaling = self.scaling.as_ref()?;
        Some(TensorPatch {
            name: scale.name.clone(),
            float: scaling.float,
            shape: scale.shape.clone(),
            patched_shape: scale.shape.clone(),
            scaling: None,
            needs: vec![weight],
            steps: Arc::default(),
            is_bias: false,
            view: None,
            rounding: Rounding::NearestEven,
            scale_policy: self.scale_policy,
            scale_of: Some(Arc::new(self.clone())),
            makers: Vec::new(),
        })
    }

    /// Recomputes the scale in `bytes`; the only sibling is the weight, as the checkpoint holds it.
    pub(super) fn apply_to_scale(&self, tier: Tier, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        let [weight] = siblings else { return Err(self.miscounted(1, siblings.len())) };
        let wanted = bytes_of(&self.shape, self.float.size());
        if wanted != Some(weight.len()) {
            let (name, given) = (self.name.clone(), weight.len() as u64);
            let needed = wanted.map_or(u64::MAX, |bytes| bytes as u64);
            return Err(Error::WrongSize { what: Measured::Sibling { name }, needed, given });
        }
        let (Some(scaling), Some(old)) = (&self.scaling, self.scales(&[bytes])?) else {
            return Ok(PatchOutcome::default());
        };
        let lifted = F32Weight::patched(tier, self.stored(Some(&old)), weight, &self.steps);
        lifted.scales(self.float, scaling.float, &old).write(scaling.float, bytes);
        Ok(PatchOutcome::default())
    }

    /// The scales beside the weight, from the siblings' bytes.
    pub(crate) fn scales(&self, siblings: &[&[u8]]) -> Result<Option<Scales>> {
        if siblings.len() != self.needs.len() {
            return Err(self.miscounted(self.needs.len(), siblings.len()));
        }
        let Some((scaling, bytes)) = self.scaling.as_ref().zip(siblings.first()) else { return Ok(None) };
        Scales::read(scaling, bytes, &self.name).map(Some)
    }

    fn miscounted(&self, needs: usize, given: usize) -> Error {
        let what = Measured::Siblings { name: self.name.clone() };
        Error::WrongSize { what, needed: needs as u64, given: given as u64 }
    }
}

/// A scaled fp8 weight is `stored * scale`, one scale for each block of a grid over its rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scaling {
    /// The scale.
    pub(super) tensor: TensorId,
    /// The scale's own type.
    pub(super) float: Float,
    /// Blocks in a column of the grid and in a row of it.
    grid: [usize; 2],
    /// Rows and columns of a block; those at the edges may be smaller.
    block: [usize; 2],
}

/// Rows and columns of a block of `weight_scale_inv`.
const BLOCK: usize = 128;

impl Scaling {
    /// The scale of `weight`, a matrix of `rows` by `cols`, where it is an fp8 weight and has one: `X.scale_weight`
    /// (ComfyUI), `X.weight_scale` (one, or one for each row) or `X.weight_scale_inv` (one for each 128 by 128 block).
    ///
    /// # Errors
    /// [`AdapterFault::BadDType`] or [`AdapterFault::Shape`] about the scale.
    pub(super) fn of<'a>(
        weight: &TensorInfo,
        (rows, cols): (usize, usize),
        find: impl Fn(&str) -> Option<(TensorId, &'a TensorInfo)>,
    ) -> Result<Option<Scaling>, AdapterFault> {
        let Some(module) = weight.name.strip_suffix(".weight") else { return Ok(None) };
        if !Float::of(weight.dtype).is_some_and(Float::is_fp8) {
            return Ok(None);
        }
        let named = |ending: &str| find(&format!("{module}.{ending}"));
        let whole = named("scale_weight").or_else(|| named("weight_scale"));
        let Some((tensor, scale)) = whole.or_else(|| named("weight_scale_inv")) else { return Ok(None) };
        let Some(float) = Float::of(scale.dtype).filter(|f| !f.is_fp8()) else {
            return Err(AdapterFault::BadDType { what: format!("the scale `{}`", scale.name), dtype: scale.dtype });
        };
        let blocks = [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
        let (grid, block) = match scale.shape[..] {
            [] | [1] | [1, 1] => ([1, 1], [usize::MAX; 2]),
            [n] | [n, 1] if whole.is_some() && n == rows as u64 => ([rows, 1], [1, usize::MAX]),
            [a, b] if whole.is_none() && [a, b] == blocks.map(|n| n as u64) => (blocks, [BLOCK; 2]),
            _ => {
                let wanted = if whole.is_some() { vec![1] } else { blocks.map(|n| n as u64).to_vec() };
                let what = format!("the weight; `{}` has to be", scale.name);
                return Err(AdapterFault::Shape { found: scale.shape.clone(), what, wanted });
            }
        };
        Ok(Some(Scaling { tensor, float, grid, block }))
    }

    /// How many scales there are.
    pub(super) fn count(&self) -> usize {
        self.grid[0] * self.grid[1]
    }
}

/// The scales of a weight, one for each block of a grid.
pub(crate) struct Scales {
    values: Vec<f32>,
    block: [usize; 2],
    grid_cols: usize,
}

impl Scales {
    /// Lifts the scales of a weight; each has to be finite and not zero.
    ///
    /// # Errors
    /// [`Error::WrongSize`] and [`Error::Unpatchable`], naming the weight.
    pub(crate) fn read(scaling: &Scaling, bytes: &[u8], weight: &str) -> Result<Scales> {
        let count = scaling.count();
        let (needed, given) = (count as u64 * scaling.float.size() as u64, bytes.len() as u64);
        if needed != given {
            return Err(Error::WrongSize { what: Measured::Sibling { name: weight.to_owned() }, needed, given });
        }
        let mut values = vec![0.0; count];
        scaling.float.lift(bytes, &mut values);
        match values.iter().position(|scale| !scale.is_finite() || *scale == 0.0) {
            Some(index) => {
                let fault = AdapterFault::BadScale { index: index as u64, value: values[index].to_string() };
                Err(Error::Unpatchable { tensor: weight.to_owned(), fault: Box::new(fault) })
            }
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
    pub(crate) fn recomputed(&self, weight: Float, stored: Float, values: &[f32], cols: usize) -> Scales {
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
