//! The steps of a patch: which rows of a tensor each one changes, and by which f32 values.
//!
//! Callers pass plain matrices. The constructors of [`Step`] pack them into tiles for the inner loops, aligned with the rows
//! of the weight.

use std::ops::Range;
use std::sync::Arc;

/// A change of some rows of a weight, which is seen as a matrix: its first dimension by all others.
#[derive(Debug)]
pub(crate) struct Step {
    pub(super) rows: Range<usize>,
    pub(super) change: Change,
}

impl Step {
    /// `W += scale D`.
    pub(crate) fn add(rows: Range<usize>, delta: Delta<Product>, scale: f32) -> Step {
        let delta = Arc::new(delta.packed(rows.start));
        Step { rows, change: Change::Add { delta, scale } }
    }

    /// `W <- V`.
    pub(crate) fn set(rows: Range<usize>, values: Vec<f32>) -> Step {
        Step { rows, change: Change::Set(values) }
    }

    /// DoRA with the change D.
    pub(crate) fn decompose(rows: Range<usize>, delta: Delta<Product>, dora: Dora) -> Step {
        // Norms over columns see the rows of the step as a matrix of their own.
        let first_row = if dora.axis == Axis::Rows { rows.start } else { 0 };
        let delta = Arc::new(delta.packed(first_row));
        Step { rows, change: Change::Decompose { delta, dora } }
    }

    /// OFT: for each block of `size` rows `W += strength M^T W`, where `turns` holds the blocks' M.
    pub(crate) fn rotate(rows: Range<usize>, size: usize, turns: Vec<f32>, strength: f32) -> Step {
        Step { rows, change: Change::Rotate { size, turns, strength } }
    }

    /// Each row w becomes `w + strength (w' - w)`, see [`Columns`].
    pub(crate) fn transform(rows: Range<usize>, columns: Columns) -> Step {
        Step { rows, change: Change::Transform(columns) }
    }

    /// Pads the weight with zeros from the shape `from` to the shape `to`; it keeps the leading corner.
    pub(crate) fn pad(from: Vec<u64>, to: Vec<u64>) -> Step {
        Step { rows: 0..0, change: Change::Pad { from, to } }
    }

    /// Counts each row of the weight as `count` rows, for steps that hold dense values.
    pub(crate) fn split_rows(&mut self, count: usize) {
        debug_assert!(match &self.change {
            Change::Add { delta, .. } => matches!(**delta, Delta::Dense(_)),
            change => matches!(change, Change::Set(_)),
        });
        self.rows = self.rows.start * count..self.rows.end * count;
    }

    /// What it changes of the rows in `rows` and the columns in `cols` of a weight of `all` columns, as steps of the weight that has only
    /// these. `None` for a change that is not the addition of a product of two factors.
    pub(super) fn part(&self, rows: &[Range<usize>], cols: &[Range<usize>], all: usize) -> Option<Vec<Step>> {
        let Change::Add { delta, scale } = &self.change else { return None };
        let Delta::Product(product) = &**delta else { return None };
        if product.rank == 0 || product.down.len() != all.div_ceil(TILE_COLS) * TILE_COLS * product.rank {
            return None;
        }
        let Product { up, down } = product.unpacked(&self.rows, all);
        let columns = |row: &[f32]| cols.iter().flat_map(|cols| row[cols.clone()].to_vec()).collect::<Vec<f32>>();
        let values: Vec<f32> = down.values.chunks_exact(all).flat_map(columns).collect();
        let down = Matrix { rows: down.rows, cols: values.len() / down.rows, values };
        let (mut steps, mut begin) = (Vec::new(), 0);
        for range in rows {
            let (first, end) = (range.start.max(self.rows.start), range.end.min(self.rows.end));
            if first < end {
                let of_step = first - self.rows.start..end - self.rows.start;
                let values = up.values[of_step.start * up.cols..of_step.end * up.cols].to_vec();
                let up = Matrix { rows: of_step.len(), cols: up.cols, values };
                let place = begin + first - range.start..begin + end - range.start;
                steps.push(Step::add(place, Delta::Product(Product { up, down: down.clone() }), *scale));
            }
            begin += range.len();
        }
        Some(steps)
    }

    /// The rows that change.
    pub(crate) fn rows(&self) -> &Range<usize> {
        &self.rows
    }
}

/// The operation of a [`Step`]; the constructors describe each.
#[derive(Debug)]
pub(super) enum Change {
    Add { delta: Arc<Delta>, scale: f32 },
    Set(Vec<f32>),
    Decompose { delta: Arc<Delta>, dora: Dora },
    Rotate { size: usize, turns: Vec<f32>, strength: f32 },
    Transform(Columns),
    Pad { from: Vec<u64>, to: Vec<u64> },
}

impl Change {
    /// The number of values in its factors.
    pub(super) fn values(&self) -> usize {
        match self {
            Change::Add { delta, .. } => delta.values(),
            Change::Set(values) => values.len(),
            Change::Decompose { delta, dora } => delta.values() + dora.magnitude.len(),
            Change::Rotate { turns, .. } => turns.len(),
            Change::Transform(columns) => {
                let transforms = columns.transforms.iter().map(|transform| transform.blocks.len());
                transforms.sum::<usize>() + columns.by_rows.as_ref().map_or(0, Vec::len)
            }
            Change::Pad { .. } => 0,
        }
    }

    /// The products that it is made of.
    pub(super) fn products(&self) -> &[Packed] {
        match self {
            Change::Add { delta, .. } | Change::Decompose { delta, .. } => delta.products(),
            Change::Set(_) | Change::Rotate { .. } | Change::Transform(_) | Change::Pad { .. } => &[],
        }
    }

    /// How much of the weight it needs at once.
    pub(super) fn scope(&self) -> Scope {
        match self {
            Change::Add { delta, .. } if matches!(**delta, Delta::Linear(_)) => Scope::Row,
            Change::Add { .. } | Change::Set(_) => Scope::Element,
            Change::Decompose { dora: Dora { axis: Axis::Rows, .. }, .. } | Change::Transform(_) => Scope::Row,
            Change::Decompose { .. } | Change::Rotate { .. } | Change::Pad { .. } => Scope::Weight,
        }
    }
}

/// How much of a weight a change of one element depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    Element,
    Row,
    Weight,
}

/// A matrix D to add, held as its factors. `P` is the form of a product's factors: as given ([`Product`]) or [`Packed`].
#[derive(Debug)]
pub(crate) enum Delta<P = Packed> {
    /// `up down`.
    Product(P),
    /// The values of D, row by row.
    Dense(Vec<f32>),
    /// LoHa: the two products multiplied element by element.
    Hadamard(Box<[P; 2]>),
    /// LoKr: the Kronecker product.
    Kronecker(Box<Kronecker>),
    /// GLoRA: [`Linear`].
    Linear(Box<Linear<P>>),
}

impl Delta<Product> {
    /// Packs the factors, for rows of the weight from `first_row` on.
    fn packed(self, first_row: usize) -> Delta {
        match self {
            Delta::Product(product) => Delta::Product(product.packed(first_row)),
            Delta::Dense(values) => Delta::Dense(values),
            Delta::Hadamard(products) => Delta::Hadamard(Box::new(products.map(|product| product.packed(first_row)))),
            Delta::Kronecker(product) => Delta::Kronecker(product),
            Delta::Linear(linear) => {
                let Linear { first, second, base, inner } = *linear;
                Delta::Linear(Box::new(Linear { first, second, base: base.packed(first_row), inner }))
            }
        }
    }
}

impl Delta {
    /// The products that it is made of.
    pub(super) fn products(&self) -> &[Packed] {
        match self {
            Delta::Product(product) => std::slice::from_ref(product),
            Delta::Hadamard(products) => &**products,
            Delta::Linear(linear) => std::slice::from_ref(&linear.base),
            Delta::Dense(_) | Delta::Kronecker(_) => &[],
        }
    }

    fn values(&self) -> usize {
        match self {
            Delta::Product(product) => product.values(),
            Delta::Dense(values) => values.len(),
            Delta::Hadamard(products) => products.iter().map(Packed::values).sum(),
            Delta::Kronecker(product) => product.left.values.len() + product.right.values.len(),
            Delta::Linear(linear) => linear.first.values.len() + linear.second.values.len() + linear.base.values(),
        }
    }
}

/// The Kronecker product of two matrices, or some of its rows.
#[derive(Debug)]
pub(crate) struct Kronecker {
    pub(crate) left: Matrix,
    pub(crate) right: Matrix,
    /// For each row of the change, its row in the product; `None` if the rows are the same.
    pub(crate) source: Option<Vec<usize>>,
}

/// `W first second + base`, where the first factor applies to a row's channels of `inner` elements each.
#[derive(Debug)]
pub(crate) struct Linear<P = Packed> {
    /// [channels, rank].
    pub(crate) first: Matrix,
    /// [rank, channels].
    pub(crate) second: Matrix,
    pub(crate) base: P,
    pub(crate) inner: usize,
}

/// `Wc = W + ratio D`, then `W += strength (Wc m / n - W)`, with a magnitude m and a norm n for each row or channel.
#[derive(Debug)]
pub(crate) struct Dora {
    pub(crate) ratio: f32,
    pub(crate) magnitude: Vec<f32>,
    pub(crate) axis: Axis,
    /// Whether n is the norm of W and not of Wc.
    pub(crate) of_original: bool,
    /// What is added to n.
    pub(crate) epsilon: f32,
    pub(crate) strength: f32,
}

/// The axis that DoRA normalizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    Rows,
    /// Channels of `inner` columns each, over all rows.
    Columns {
        inner: usize,
    },
}

/// A linear transform of each row w: `w' = T_n .. T_1 w`, times the row's factor in `by_rows`.
#[derive(Debug)]
pub(crate) struct Columns {
    pub(crate) transforms: Vec<BlockTransform>,
    pub(crate) by_rows: Option<Vec<f32>>,
    pub(crate) strength: f32,
}

/// A matrix T of square blocks along the diagonal, between a permutation P and its inverse: `T = P B P^T`.
#[derive(Debug)]
pub(crate) struct BlockTransform {
    pub(super) size: usize,
    /// The blocks, each transposed.
    pub(super) blocks: Vec<f32>,
    /// For each element of the permuted row, the index of its source.
    pub(super) order: Option<Vec<u32>>,
}

impl BlockTransform {
    /// `blocks` holds the blocks in order, each row by row. `order`, if given, is a permutation of all columns.
    pub(crate) fn new(size: usize, blocks: Vec<f32>, order: Option<Vec<u32>>) -> BlockTransform {
        let transposed = |block: &[f32]| {
            let at = |index: usize| block[index % size * size + index / size];
            (0..size * size).map(at).collect::<Vec<f32>>()
        };
        let blocks = blocks.chunks_exact(size * size).flat_map(transposed).collect();
        BlockTransform { size, blocks, order }
    }

    pub(crate) fn is_finite(&self) -> bool {
        self.blocks.iter().all(|value| value.is_finite())
    }
}

/// A matrix, row by row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    pub(crate) fn transposed(&self) -> Matrix {
        let at = |index: usize| self.values[index % self.rows * self.cols + index / self.rows];
        let values = (0..self.values.len()).map(at).collect();
        Matrix { rows: self.cols, cols: self.rows, values }
    }

    /// The product `self other`, where `self.cols` equals `other.rows`; each element is summed in order. It multiplies and adds in
    /// two operations, because a fused one may be a function call on the baseline instruction set.
    pub(crate) fn times(&self, other: &Matrix) -> Matrix {
        let mut values = vec![0.0f32; self.rows * other.cols];
        if other.cols > 0 {
            for (row, out) in values.chunks_exact_mut(other.cols).enumerate() {
                for (k, &left) in self.row(row).iter().enumerate() {
                    out.iter_mut().zip(other.row(k)).for_each(|(sum, &right)| *sum += left * right);
                }
            }
        }
        Matrix { rows: self.rows, cols: other.cols, values }
    }
}

/// The rows and columns of a tensor seen as a matrix, its first dimension by all others; a vector is one row. `None`
/// if the sizes overflow.
pub(crate) fn matrix_of(shape: &[u64]) -> Option<(usize, usize)> {
    let (rows, inner) = match shape {
        [rows, inner @ ..] if !inner.is_empty() => (*rows, inner),
        vector => (1, vector),
    };
    let cols = inner.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    rows.checked_mul(cols)?;
    Some((usize::try_from(rows).ok()?, usize::try_from(cols).ok()?))
}

/// The factors of `up down`, as matrices of [rows, rank] and [rank, columns].
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

/// The rows of a tile, the unit of the innermost loop.
pub(super) const TILE_ROWS: usize = 8;
/// The columns of a tile.
pub(super) const TILE_COLS: usize = 32;

/// The factors of a [`Product`], packed by tile, so that the innermost loop reads both in order.
///
/// Rows and columns beyond the matrix are zero.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(super) rank: usize,
    /// For each [`TILE_ROWS`] rows of the weight, values [rank, TILE_ROWS].
    up: Vec<f32>,
    /// For each [`TILE_COLS`] columns, values [rank, TILE_COLS].
    down: Vec<f32>,
    /// The index of the weight's tile of rows that `up` begins with.
    first_tile: usize,
}

impl Product {
    /// Packs the factors, whose product changes the weight from `first_row` on.
    fn packed(&self, first_row: usize) -> Packed {
        let Product { up, down } = self;
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
        Packed { rank, up: packed_up, down: packed_down, first_tile: first_row / TILE_ROWS }
    }
}

impl Packed {
    /// The factor of some rows of the weight in panels of `panel` rows, values [rank, panel] each. What is not packed is zero.
    pub(super) fn panels(&self, rows: &Range<usize>, panel: usize) -> Vec<f32> {
        let mut panels = vec![0.0; rows.len().div_ceil(panel) * panel * self.rank];
        if self.rank == 0 {
            return panels;
        }
        let first = self.first_tile * TILE_ROWS;
        let tiles = self.up.chunks_exact(self.rank * TILE_ROWS);
        let packed = first.max(rows.start)..(first + tiles.len() * TILE_ROWS).min(rows.end);
        for row in packed {
            let tile = (row - first) / TILE_ROWS * self.rank * TILE_ROWS;
            let (tile, _) = self.up[tile..][..self.rank * TILE_ROWS].as_chunks::<TILE_ROWS>();
            let (index, place) = ((row - rows.start) / panel, (row - rows.start) % panel);
            let panel = panels[index * panel * self.rank..].chunks_exact_mut(panel);
            panel.zip(tile).for_each(|(values, tile)| values[place] = tile[row % TILE_ROWS]);
        }
        panels
    }

    /// The factors of the changed rows and of all `cols` columns, as they were before they were packed.
    fn unpacked(&self, rows: &Range<usize>, cols: usize) -> Product {
        let up = Matrix { rows: rows.len(), cols: self.rank, values: self.panels(rows, 1) };
        let mut values = vec![0.0; self.rank * cols];
        for (k, row) in values.chunks_exact_mut(cols.max(1)).enumerate() {
            for (tile, part) in row.chunks_mut(TILE_COLS).enumerate() {
                part.copy_from_slice(&self.down(tile)[k * TILE_COLS..][..part.len()]);
            }
        }
        Product { up, down: Matrix { rows: self.rank, cols, values } }
    }

    /// The packed factors from the tile of columns number `tile` on.
    pub(super) fn down(&self, tile: usize) -> &[f32] {
        &self.down[tile * self.rank * TILE_COLS..]
    }

    /// Both packed factors: up for the changed rows, down for all columns.
    pub(super) fn factors(&self) -> (&[f32], &[f32]) {
        (&self.up, &self.down)
    }

    fn values(&self) -> usize {
        self.up.len() + self.down.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_algebra() {
        let a = Matrix { rows: 2, cols: 3, values: vec![1., 2., 3., 4., 5., 6.] };
        assert_eq!(a.transposed().values, [1., 4., 2., 5., 3., 6.]);
        assert_eq!(a.times(&a.transposed()).values, [14., 32., 32., 77.]);
    }

    /// Whole tiles of rows, counted from the weight's first, and whole tiles of columns.
    #[test]
    fn packed_factors_are_counted_with_their_padding() {
        let ones = |rows: usize, cols: usize| Matrix { rows, cols, values: vec![1.0; rows * cols] };
        let product = Product { up: ones(2, 3), down: ones(3, 5) };
        assert_eq!(product.packed(0).values(), 3 * (TILE_ROWS + TILE_COLS));
        assert_eq!(product.packed(TILE_ROWS - 1).values(), 3 * (2 * TILE_ROWS + TILE_COLS));
    }
}
