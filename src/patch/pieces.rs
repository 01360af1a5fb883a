//! Patching in pieces of eight rows by some columns: each piece is converted to f32, changed and rounded, in place or into
//! memory of another type.

use std::ops::Range;

use rayon::prelude::*;

use super::scales::Scales;
use super::steps::{
    BlockTransform, Change, Columns, Delta, Dora, Kronecker, Linear, Packed, Scope, Step, TILE_COLS, TILE_ROWS,
};
use super::vector::{Output, StridedRows, Tier};
use super::{PatchOutcome, Requantised};
use crate::encoding::Encoding;
use crate::ggml::Format;
use crate::rounding::Noise;

/// A weight as a matrix in its storage type.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    /// How the values that are read are stored.
    pub(super) from: Encoding,
    /// How they are stored afterwards.
    pub(super) to: Encoding,
    /// The scales of the stored values.
    pub(super) scales: Option<&'a Scales>,
    /// The noise of stochastic rounding; `None` rounds to the nearest value.
    pub(super) noise: Option<Noise>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Stored<'_> {
    /// The real values of some columns of a row.
    pub(super) fn lift(&self, tier: Tier, row: usize, cols: &Range<usize>, raw: &[u8], values: &mut [f32]) {
        match self.from {
            Encoding::Float(float) => tier.lift(float, raw, values),
            Encoding::Blocks(format) => tier.dequantise(format, raw, values),
        }
        if let Some(scales) = self.scales {
            scales.each(row * self.cols + cols.start, values, |value, scale| value * scale);
        }
    }

    /// Rounds `values`, whole blocks if they become such, into `raw`; with scales, `values` are divided by them.
    pub(super) fn round(
        &self,
        tier: Tier,
        row: usize,
        cols: &Range<usize>,
        values: &mut [f32],
        raw: &mut [u8],
    ) -> PatchOutcome {
        if let Some(scales) = self.scales {
            scales.each(row * self.cols + cols.start, values, |value, scale| value / scale);
        }
        match (self.to, self.noise) {
            (Encoding::Float(float), None) => PatchOutcome::of_saturated(tier.round(float, values, raw)),
            (Encoding::Float(float), Some(noise)) => {
                let first = row as u64 * self.cols as u64 + cols.start as u64;
                PatchOutcome::of_saturated(tier.round_noisy(float, noise, first, values, raw))
            }
            // Codes are always the nearest.
            (Encoding::Blocks(format), _) => {
                let requantised = requantise(tier, format, values, raw);
                PatchOutcome { requantised, ..PatchOutcome::default() }
            }
        }
    }
}

/// Turns values into blocks, and compares these with them.
fn requantise(tier: Tier, format: Format, values: &[f32], raw: &mut [u8]) -> Requantised {
    /// Values that are compared at once, a multiple of every block.
    const COMPARED: usize = 256;
    let (mut requantised, mut stored) = (Requantised::default(), [0.0; COMPARED]);
    let blocks = raw.chunks_mut(COMPARED / format.elements() * format.bytes());
    for (values, blocks) in values.chunks(COMPARED).zip(blocks) {
        tier.quantise(format, values, blocks);
        tier.dequantise(format, blocks, &mut stored);
        let of_blocks = values.chunks(format.elements()).zip(stored.chunks(format.elements()));
        of_blocks.for_each(|(wanted, stored)| requantised.count(wanted, stored));
    }
    requantised
}

/// Values that are worked on without regard to rows; a multiple of every block.
pub(super) const TOGETHER: usize = 1 << 14;

/// The columns of a piece, a multiple of [`TILE_COLS`] and of every block. Its f32 values fit in the first-level cache, and
/// the factors of as many columns in the second-level cache.
const PIECE_COLS: usize = 512;

/// The rows of one task for a weight of `cols` columns: enough work for a task, and few enough rows to occupy all threads.
fn task_rows(cols: usize) -> usize {
    const ELEMENTS: usize = 1 << 18;
    (ELEMENTS / cols.max(1)).clamp(TILE_ROWS, 128) / TILE_ROWS * TILE_ROWS
}

/// Applies `steps`, none of which needs more than a row, in order to the weight in `bytes`, whose type stays.
pub(super) fn apply(tier: Tier, weight: Stored<'_>, bytes: &mut [u8], steps: &[Step]) -> PatchOutcome {
    let rows = task_rows(weight.cols);
    let task_bytes = weight.to.bytes(rows * weight.cols);
    if task_bytes == 0 {
        return PatchOutcome::default();
    }
    let tasks = bytes.par_chunks_mut(task_bytes).enumerate();
    PatchOutcome::of_tasks(tasks.map_init(Scratch::default, |scratch, (task, bytes)| {
        Task { tier, weight, steps, first_row: task * rows }.run(RowBytes::InPlace(bytes), scratch)
    }))
}

/// As [`apply`], for some whole rows in `from` that are written to `to` in another type. The first is row `first_row` of the
/// weight, a multiple of [`TILE_ROWS`].
pub(super) fn convert(
    tier: Tier,
    weight: Stored<'_>,
    first_row: usize,
    from: &[u8],
    to: &mut [u8],
    steps: &[Step],
) -> PatchOutcome {
    let rows = task_rows(weight.cols);
    let task = rows * weight.cols;
    if task == 0 {
        return PatchOutcome::default();
    }
    let before = from.par_chunks(weight.from.bytes(task));
    let tasks = before.zip(to.par_chunks_mut(weight.to.bytes(task))).enumerate();
    PatchOutcome::of_tasks(tasks.map_init(Scratch::default, |scratch, (task, (from, to))| {
        let first_row = first_row + task * rows;
        Task { tier, weight, steps, first_row }.run(RowBytes::Apart { from, to }, scratch)
    }))
}

/// Casts values that nothing changes, from `from` to `to`; the first is element `first` of a tensor without scales.
pub(super) fn cast(tier: Tier, weight: Stored<'_>, first: usize, from: &[u8], to: &mut [u8]) -> PatchOutcome {
    let before = from.par_chunks(weight.from.bytes(TOGETHER));
    let tasks = before.zip(to.par_chunks_mut(weight.to.bytes(TOGETHER))).enumerate();
    PatchOutcome::of_tasks(tasks.map_init(Vec::new, |values, (task, (from, to))| {
        let first = first + task * TOGETHER;
        let elements = first..first + weight.to.count(to.len());
        values.resize(elements.len(), 0.0);
        // The elements as one row.
        weight.lift(tier, 0, &elements, from, values);
        weight.round(tier, 0, &elements, values, to)
    }))
}

/// The bytes of some whole rows of a weight, before and after.
enum RowBytes<'a> {
    InPlace(&'a mut [u8]),
    Apart { from: &'a [u8], to: &'a mut [u8] },
}

impl RowBytes<'_> {
    fn before(&self) -> &[u8] {
        match self {
            RowBytes::InPlace(bytes) => bytes,
            RowBytes::Apart { from, .. } => from,
        }
    }

    fn after(&mut self) -> &mut [u8] {
        match self {
            RowBytes::InPlace(bytes) => bytes,
            RowBytes::Apart { to, .. } => to,
        }
    }
}

/// The f32 values of the current piece.
#[derive(Default)]
struct Scratch {
    weight: Vec<f32>,
    spare: Spare,
}

/// Buffers for a delta of the same size and its intermediate values.
#[derive(Default)]
struct Spare {
    delta: Vec<f32>,
    other: Vec<f32>,
}

/// Some whole rows of a weight.
struct Task<'a> {
    tier: Tier,
    weight: Stored<'a>,
    steps: &'a [Step],
    first_row: usize,
}

impl Task<'_> {
    fn run(&self, mut bytes: RowBytes<'_>, scratch: &mut Scratch) -> PatchOutcome {
        let (cols, from, to) = (self.weight.cols, self.weight.from, self.weight.to);
        let rows = bytes.before().len() / from.bytes(cols);
        // Of a stack of experts, each step changes the rows of one.
        let all = Piece { rows: self.first_row..self.first_row + rows, cols: 0..cols };
        let steps: Vec<&Step> = self.steps.iter().filter(|step| all.shared_rows(&step.rows).is_some()).collect();
        let whole_rows = steps.iter().any(|step| step.change.scope() > Scope::Element);
        let piece_cols = if whole_rows { cols } else { PIECE_COLS };
        let mut outcome = PatchOutcome::default();
        // Columns are the outer loop, so that the factors of a piece's columns stay in cache for all rows of the task.
        for first_col in (0..cols).step_by(piece_cols) {
            let piece_cols = piece_cols.min(cols - first_col);
            for first_row in (0..rows).step_by(TILE_ROWS) {
                let piece_rows = TILE_ROWS.min(rows - first_row);
                let piece = Piece {
                    rows: self.first_row + first_row..self.first_row + first_row + piece_rows,
                    cols: first_col..first_col + piece_cols,
                };
                let stride = stride(piece_cols);
                scratch.weight.resize(TILE_ROWS * stride, 0.0);
                let row_bytes = |row: usize, stored: Encoding| stored.bytes((first_row + row) * cols + first_col)..;
                for row in 0..piece_rows {
                    let raw = &bytes.before()[row_bytes(row, from)][..from.bytes(piece_cols)];
                    self.lift(&piece, row, raw, &mut scratch.weight[row * stride..][..piece_cols]);
                }
                let mut strip = StridedRows { values: &mut scratch.weight, stride, cols: piece_cols };
                for step in &steps {
                    self.change(step, &piece, &mut strip, &mut scratch.spare);
                }
                for row in 0..piece_rows {
                    let raw = &mut bytes.after()[row_bytes(row, to)][..to.bytes(piece_cols)];
                    outcome += self.round(&piece, row, &mut scratch.weight[row * stride..][..piece_cols], raw);
                }
            }
        }
        outcome
    }

    fn lift(&self, piece: &Piece, row: usize, raw: &[u8], values: &mut [f32]) {
        self.weight.lift(self.tier, piece.rows.start + row, &piece.cols, raw, values);
    }

    fn round(&self, piece: &Piece, row: usize, values: &mut [f32], raw: &mut [u8]) -> PatchOutcome {
        self.weight.round(self.tier, piece.rows.start + row, &piece.cols, values, raw)
    }

    fn change(&self, step: &Step, piece: &Piece, strip: &mut StridedRows<'_>, spare: &mut Spare) {
        let Some(rows) = piece.shared_rows(&step.rows) else { return };
        match &step.change {
            Change::Add { delta, scale } => {
                if let Delta::Product(product) = &**delta {
                    self.product(product, piece, strip, Output::Add(*scale), rows);
                    return;
                }
                let place = Place { first_row: step.rows.start, piece, rows: rows.clone() };
                self.fill(delta, &place, strip, spare);
                for row in rows {
                    let values = &spare.delta[row * strip.stride..];
                    strip.row(row).iter_mut().zip(values).for_each(|(weight, delta)| *weight += scale * delta);
                }
            }
            Change::Set(values) => {
                for row in rows {
                    let at = (piece.rows.start + row - step.rows.start) * self.weight.cols + piece.cols.start;
                    let weights = strip.row(row);
                    weights.copy_from_slice(&values[at..at + weights.len()]);
                }
            }
            Change::Decompose { delta, dora } => {
                let place = Place { first_row: step.rows.start, piece, rows: rows.clone() };
                self.fill(delta, &place, strip, spare);
                for row in rows {
                    let delta = &spare.delta[row * strip.stride..][..strip.cols];
                    decompose_row(dora, piece.rows.start + row - step.rows.start, strip.row(row), delta);
                }
            }
            Change::Transform(columns) => {
                for row in rows {
                    let of_step = piece.rows.start + row - step.rows.start;
                    transform_row(self.tier, columns, of_step, strip.row(row), spare);
                }
            }
            // These need more than a piece; `whole` applies them.
            Change::Rotate { .. } | Change::Pad { .. } => {}
        }
    }

    fn product(
        &self,
        product: &Packed,
        piece: &Piece,
        strip: &mut StridedRows<'_>,
        output: Output,
        rows: Range<usize>,
    ) {
        let up = product.up(piece.rows.start / TILE_ROWS);
        self.tier.product(strip, up, product.down(piece.cols.start / TILE_COLS), output, rows);
    }

    /// Computes D for the rows of a piece into `spare.delta`.
    fn fill(&self, delta: &Delta, place: &Place<'_>, weight: &mut StridedRows<'_>, spare: &mut Spare) {
        let (stride, cols, piece) = (weight.stride, weight.cols, place.piece);
        let Spare { delta: out, other } = spare;
        out.resize(TILE_ROWS * stride, 0.0);
        let mut out = StridedRows { values: out, stride, cols };
        match delta {
            Delta::Product(product) => self.product(product, piece, &mut out, Output::Store, place.rows.clone()),
            Delta::Dense(values) => {
                for row in place.rows.clone() {
                    let at = place.of_step(row) * self.weight.cols + piece.cols.start;
                    out.row(row).copy_from_slice(&values[at..at + cols]);
                }
            }
            Delta::Hadamard(products) => {
                other.resize(TILE_ROWS * stride, 0.0);
                let mut second = StridedRows { values: other, stride, cols };
                self.product(&products[0], piece, &mut out, Output::Store, place.rows.clone());
                self.product(&products[1], piece, &mut second, Output::Store, place.rows.clone());
                for row in place.rows.clone() {
                    out.row(row).iter_mut().zip(second.row(row)).for_each(|(first, second)| *first *= *second);
                }
            }
            Delta::Kronecker(product) => {
                let Kronecker { left, right, source } = &**product;
                for row in place.rows.clone() {
                    let row_of_step = place.of_step(row);
                    let row_of_step = source.as_ref().map_or(row_of_step, |source| source[row_of_step]);
                    let (left, values) = (left.row(row_of_step / right.rows), right.row(row_of_step % right.rows));
                    for (col, out) in out.row(row).iter_mut().enumerate() {
                        let col = piece.cols.start + col;
                        *out = left[col / right.cols] * values[col % right.cols];
                    }
                }
            }
            Delta::Linear(linear) => {
                self.product(&linear.base, piece, &mut out, Output::Store, place.rows.clone());
                for row in place.rows.clone() {
                    self.linear(linear, weight.row(row), other, out.row(row));
                }
            }
        }
    }

    /// Adds `W first second` for one row, each sum in order of the channels and of the rank.
    fn linear(&self, linear: &Linear, weights: &[f32], spare: &mut Vec<f32>, out: &mut [f32]) {
        let (rank, inner) = (linear.second.rows, linear.inner);
        spare.clear();
        spare.resize(rank * inner + out.len(), 0.0);
        let (ranks, sums) = spare.split_at_mut(rank * inner);
        for (channel, weights) in weights.chunks_exact(inner).enumerate() {
            let first = linear.first.row(channel);
            if let [weight] = weights {
                self.tier.add_multiple(*weight, first, ranks);
            } else {
                let each = ranks.chunks_exact_mut(inner).zip(first);
                each.for_each(|(sums, first)| self.tier.add_multiple(*first, weights, sums));
            }
        }
        for (ranks, k) in ranks.chunks_exact(inner).zip(0..) {
            let second = linear.second.row(k);
            if let [value] = ranks {
                self.tier.add_multiple(*value, second, sums);
            } else {
                let each = sums.chunks_exact_mut(inner).zip(second);
                each.for_each(|(sums, second)| self.tier.add_multiple(*second, ranks, sums));
            }
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += *sum);
    }
}

/// `W += s (Wc m / n - W)` for one row, whose D is given.
fn decompose_row(dora: &Dora, row: usize, weights: &mut [f32], delta: &[f32]) {
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
fn transform_row(tier: Tier, columns: &Columns, row: usize, weights: &mut [f32], spare: &mut Spare) {
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

/// Where rows of a piece are in a step.
struct Place<'a> {
    /// The weight's row where the step begins.
    first_row: usize,
    piece: &'a Piece,
    /// Rows, relative to the piece.
    rows: Range<usize>,
}

impl Place<'_> {
    /// The row of the step for row `row` of the piece.
    fn of_step(&self, row: usize) -> usize {
        self.piece.rows.start + row - self.first_row
    }
}

/// The rows and columns of a piece in its weight.
struct Piece {
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Piece {
    /// The rows of the piece that are in `rows` of the weight, relative to the piece.
    fn shared_rows(&self, rows: &Range<usize>) -> Option<Range<usize>> {
        let (start, end) = (rows.start.max(self.rows.start), rows.end.min(self.rows.end));
        (start < end).then(|| start - self.rows.start..end - self.rows.start)
    }
}

/// The stride between a piece's rows: an odd number of tiles, so that rows do not map to the same cache sets.
fn stride(cols: usize) -> usize {
    (cols.div_ceil(TILE_COLS) | 1) * TILE_COLS
}
