//! What is to be done to one tensor, in order, with factors ready for the arithmetic.

use std::ops::Range;
use std::sync::Arc;

use super::matrix::Matrix;
use super::scale::Scaling;
use crate::float::Float;

/// All that the adapters do to one tensor of the checkpoint.
///
/// A clone shares the factors. [`apply`](TensorPatch::apply) does the arithmetic.
#[derive(Clone, Debug)]
pub struct TensorPatch {
    /// The tensor's name, for messages.
    pub(crate) name: String,
    pub(crate) float: Float,
    /// Its shape in the checkpoint.
    pub(crate) shape: Vec<u64>,
    /// Its shape afterwards.
    pub(crate) patched_shape: Vec<u64>,
    pub(crate) scaling: Option<Scaling>,
    pub(crate) needs: Vec<usize>,
    pub(crate) steps: Arc<Vec<Step>>,
}

impl TensorPatch {
    /// The tensors whose bytes [`apply`](TensorPatch::apply) wants beside the weight's, by place in
    /// [`Layout::tensors`](crate::checkpoint::Layout::tensors): the scale of an fp8 weight.
    pub fn needs(&self) -> &[usize] {
        &self.needs
    }

    /// The tensor's shape once it is patched; larger than in the checkpoint where an adapter pads the weight.
    pub fn patched_shape(&self) -> &[u64] {
        &self.patched_shape
    }

    /// The bytes of its factors as they are held, in f32.
    pub fn factor_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.change.values() as u64 * 4).sum()
    }
}

/// One change of some rows of a weight seen as a matrix: its first dimension by all others.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) rows: Range<usize>,
    pub(crate) change: Change,
}

#[derive(Debug)]
pub(crate) enum Change {
    /// `W += scale D`.
    Add { delta: Delta, scale: f32 },
    /// `W <- V`.
    Set(Vec<f32>),
}

impl Change {
    /// How many numbers its factors hold.
    fn values(&self) -> usize {
        match self {
            Change::Add { delta, .. } => delta.values(),
            Change::Set(values) => values.len(),
        }
    }
}

/// A matrix to add, as the factors that make it.
#[derive(Debug)]
pub(crate) enum Delta {
    /// `up down`.
    Product(Product),
    /// Given whole, row by row.
    Dense(Vec<f32>),
}

impl Delta {
    fn values(&self) -> usize {
        match self {
            Delta::Product(product) => product.values(),
            Delta::Dense(values) => values.len(),
        }
    }
}

/// Rows of a tile: what one pass of the innermost loop works on.
pub(crate) const TILE_ROWS: usize = 8;
/// Columns of a tile.
pub(crate) const TILE_COLS: usize = 32;

/// The factors of `up down`, packed by tile, so that the innermost loop reads both in order.
///
/// Rows and columns beyond the matrix are zero.
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) rank: usize,
    /// For each eight rows of the weight, rank by [`TILE_ROWS`].
    up: Vec<f32>,
    /// For each 32 columns, rank by [`TILE_COLS`].
    down: Vec<f32>,
    /// The tile of rows of the weight at which `up` begins.
    first_tile: usize,
}

impl Product {
    /// Packs `up` [rows, rank] and `down` [rank, columns], whose product changes the weight from `first_row` on.
    pub(crate) fn pack(up: &Matrix, down: &Matrix, first_row: usize) -> Product {
        let rank = down.rows;
        let lead = first_row % TILE_ROWS;
        let mut packed_up = vec![0.0; (lead + up.rows).div_ceil(TILE_ROWS) * TILE_ROWS * rank];
        for row in 0..up.rows {
            let (tile, place) = ((lead + row) / TILE_ROWS, (lead + row) % TILE_ROWS);
            for k in 0..rank {
                packed_up[(tile * rank + k) * TILE_ROWS + place] = up.row(row)[k];
            }
        }
        let tiles = down.cols.div_ceil(TILE_COLS);
        let mut packed_down = vec![0.0; tiles * TILE_COLS * rank];
        for k in 0..rank {
            for (tile, values) in down.row(k).chunks(TILE_COLS).enumerate() {
                packed_down[(tile * rank + k) * TILE_COLS..][..values.len()].copy_from_slice(values);
            }
        }
        Product { rank, up: packed_up, down: packed_down, first_tile: first_row / TILE_ROWS }
    }

    /// The packed factor of the weight's tile of rows number `tile`.
    pub(crate) fn up(&self, tile: usize) -> &[f32] {
        let length = self.rank * TILE_ROWS;
        &self.up[(tile - self.first_tile) * length..][..length]
    }

    /// The packed factors from the tile of columns number `tile` on.
    pub(crate) fn down(&self, tile: usize) -> &[f32] {
        &self.down[tile * self.rank * TILE_COLS..]
    }

    fn values(&self) -> usize {
        self.up.len() + self.down.len()
    }
}
