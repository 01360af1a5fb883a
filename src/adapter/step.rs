//! What is to be done to one tensor, in order, with factors ready for the arithmetic.

use std::ops::Range;
use std::sync::Arc;

use super::Origin;
use super::matrix::Matrix;
use super::scale::{ScalePolicy, Scaling};
use crate::float::Float;
use crate::rounding::Rounding;

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
    /// Whether it is a bias, each element of which is a row: of a fused one, a part is changed.
    pub(crate) is_bias: bool,
    pub(crate) rounding: Rounding,
    pub(crate) scale_policy: ScalePolicy,
    /// The weight whose scale this tensor is, when that is computed anew.
    pub(crate) scale_of: Option<Arc<TensorPatch>>,
    /// For each module of an adapter that made some of the steps where it comes from, in order.
    pub(crate) makers: Vec<(Arc<Origin>, String)>,
}

/// What a patch was made from, without its factors. Patches of one checkpoint with equal recipes make the same of a
/// tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recipe {
    name: String,
    patched_shape: Vec<u64>,
    rounding: Rounding,
    scale_policy: ScalePolicy,
    makers: Vec<(Arc<Origin>, String)>,
    scale_of: Option<Box<Recipe>>,
}

impl TensorPatch {
    /// The tensors whose bytes [`apply`](TensorPatch::apply) wants beside the weight's, by place in
    /// [`Layout::tensors`](crate::checkpoint::Layout::tensors): the scale of an fp8 weight, or the weight of a scale that
    /// is computed anew.
    pub fn needs(&self) -> &[usize] {
        &self.needs
    }

    /// The tensor's shape in the checkpoint.
    pub(crate) fn pristine_shape(&self) -> &Vec<u64> {
        &self.shape
    }

    /// The tensor's shape once it is patched; larger than in the checkpoint where an adapter pads the weight.
    pub fn patched_shape(&self) -> &[u64] {
        &self.patched_shape
    }

    /// What it was made from.
    pub(crate) fn recipe(&self) -> Recipe {
        Recipe {
            name: self.name.clone(),
            patched_shape: self.patched_shape.clone(),
            rounding: self.rounding,
            scale_policy: self.scale_policy,
            makers: self.makers.clone(),
            scale_of: self.scale_of.as_ref().map(|weight| Box::new(weight.recipe())),
        }
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
    Add { delta: Arc<Delta>, scale: f32 },
    /// `W <- V`.
    Set(Vec<f32>),
    /// DoRA: [`Dora`].
    Decompose(Dora),
    /// OFT: for each block of `size` rows `W += strength M^T W`, where `turns` holds the blocks' M.
    Rotate { size: usize, turns: Vec<f32>, strength: f32 },
    /// The weight in the corner of zeros of a larger shape.
    Pad { from: Vec<u64>, to: Vec<u64> },
}

impl Change {
    /// How many numbers its factors hold.
    fn values(&self) -> usize {
        match self {
            Change::Add { delta, .. } => delta.values(),
            Change::Set(values) => values.len(),
            Change::Decompose(dora) => dora.delta.values() + dora.magnitude.len(),
            Change::Rotate { turns, .. } => turns.len(),
            Change::Pad { .. } => 0,
        }
    }

    /// What it has to see of the weight at once.
    pub(crate) fn reach(&self) -> Reach {
        match self {
            Change::Add { delta, .. } if matches!(**delta, Delta::Linear(_)) => Reach::Row,
            Change::Add { .. } | Change::Set(_) => Reach::Element,
            Change::Decompose(Dora { axis: Axis::Rows, .. }) => Reach::Row,
            Change::Decompose(_) | Change::Rotate { .. } | Change::Pad { .. } => Reach::Weight,
        }
    }
}

/// How much of a weight a change of one element depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reach {
    Element,
    Row,
    Weight,
}

/// A matrix to add, as the factors that make it.
#[derive(Debug)]
pub(crate) enum Delta {
    /// `up down`.
    Product(Product),
    /// Given whole, row by row.
    Dense(Vec<f32>),
    /// LoHa: the two products multiplied element by element.
    Hadamard(Box<[Product; 2]>),
    /// LoKr: the Kronecker product.
    Kronecker(Matrix, Matrix),
    /// GLoRA: [`Linear`].
    Linear(Box<Linear>),
}

impl Delta {
    fn values(&self) -> usize {
        match self {
            Delta::Product(product) => product.values(),
            Delta::Dense(values) => values.len(),
            Delta::Hadamard(products) => products.iter().map(Product::values).sum(),
            Delta::Kronecker(left, right) => left.values.len() + right.values.len(),
            Delta::Linear(linear) => linear.first.values.len() + linear.second.values.len() + linear.base.values(),
        }
    }
}

/// `W first second + base`, where the first factor applies to a row's channels of `inner` elements each.
#[derive(Debug)]
pub(crate) struct Linear {
    /// [channels, rank].
    pub(crate) first: Matrix,
    /// [rank, channels].
    pub(crate) second: Matrix,
    pub(crate) base: Product,
    pub(crate) inner: usize,
}

/// `Wc = W + ratio D`, then `W += strength (Wc m / n - W)`, with a magnitude m and a norm n for each row or channel.
#[derive(Debug)]
pub(crate) struct Dora {
    pub(crate) delta: Arc<Delta>,
    pub(crate) ratio: f32,
    pub(crate) magnitude: Vec<f32>,
    pub(crate) axis: Axis,
    /// Whether n is the norm of W and not of Wc.
    pub(crate) of_original: bool,
    /// What is added to n.
    pub(crate) epsilon: f32,
    pub(crate) strength: f32,
}

/// What DoRA takes its norms over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    Rows,
    /// Channels of `inner` columns each, over all rows; the factors of D are then packed from row 0.
    Columns {
        inner: usize,
    },
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

    /// Both packed factors whole: of the rows that it changes, and of all columns.
    pub(crate) fn factors(&self) -> (&[f32], &[f32]) {
        (&self.up, &self.down)
    }

    fn values(&self) -> usize {
        self.up.len() + self.down.len()
    }
}
