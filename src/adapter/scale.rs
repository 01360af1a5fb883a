//! The scale that is kept beside an fp8 weight.

use crate::checkpoint::TensorInfo;
use crate::error::AdapterFault;
use crate::float::Float;

/// What becomes of the scale beside an fp8 weight that adapters change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScalePolicy {
    /// It stays as it is; weights that grow beyond what it can express saturate, which is counted.
    #[default]
    Keep,
    /// It becomes the largest magnitude of the changed weights that it is for, divided by the type's largest value, so
    /// that none saturates and none wastes bits. The scale is then a patched tensor too. Where that gives no scale
    /// (weights that are all zero, a quotient below the scale's own type) it stays.
    Recompute,
}

/// A scaled fp8 weight is `stored * scale`, one scale for each block of a grid over its rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scaling {
    /// The scale's place in [`Layout::tensors`](crate::checkpoint::Layout::tensors).
    pub(crate) tensor: usize,
    /// The scale's own type.
    pub(crate) float: Float,
    /// Blocks in a column of the grid and in a row of it.
    pub(crate) grid: [usize; 2],
    /// Rows and columns of a block; those at the edges may be smaller.
    pub(crate) block: [usize; 2],
}

/// Rows and columns of a block of `weight_scale_inv`.
const BLOCK: usize = 128;

impl Scaling {
    /// The scale of `weight`, a matrix of `rows` by `cols`, where it is an fp8 weight and has one: `X.scale_weight`
    /// (ComfyUI), `X.weight_scale` (one, or one for each row) or `X.weight_scale_inv` (one for each 128 by 128 block).
    ///
    /// # Errors
    /// [`AdapterFault::BadDType`] or [`AdapterFault::Shape`] about the scale.
    pub(crate) fn of<'a>(
        weight: &TensorInfo,
        (rows, cols): (usize, usize),
        find: impl Fn(&str) -> Option<(usize, &'a TensorInfo)>,
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
    pub(crate) fn count(&self) -> usize {
        self.grid[0] * self.grid[1]
    }
}
