//! Patching in pieces of twelve rows by some columns: each piece is converted to f32, changed and rounded, in place or into
//! memory of another type. Where steps are products alone, which most adapters are, a piece never leaves the registers.

use std::ops::Range;

use rayon::prelude::*;

use super::rows::{Spare, decompose_row, transform_row};
use super::scales::Scales;
use super::steps::{Change, Delta, Kronecker, Linear, Packed, Scope, Step, TILE_COLS};
use super::tiles::{Factors, Output, PANELS, StridedRows, fetch};
use super::vector::Tier;
use super::{PatchOutcome, Requantised};
use crate::encoding::Encoding;
use crate::float::Float;
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

/// The columns of a piece, a multiple of [`TILE_COLS`] and of every block. The f32 values of [`PANELS`] rows fit in the
/// first-level cache, and the factors of as many columns in the second-level cache.
const PIECE_COLS: usize = 512;

/// The rows of one task for a weight of `cols` columns: enough work for a task, and few enough rows to occupy all threads.
fn task_rows(cols: usize) -> usize {
    const ELEMENTS: usize = 1 << 18;
    (ELEMENTS / cols.max(1)).clamp(PANELS, 128) / PANELS * PANELS
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
/// weight.
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

/// Some whole rows of a weight.
struct Task<'a> {
    tier: Tier,
    weight: Stored<'a>,
    steps: &'a [Step],
    first_row: usize,
}

/// A step of a task, with the factors of the task's rows in panels, for each of its products.
struct TaskStep<'a> {
    step: &'a Step,
    products: Vec<Panels<'a>>,
}

/// A product, and its factor of the task's rows in panels.
struct Panels<'a> {
    product: &'a Packed,
    panel_rows: usize,
    up: Vec<f32>,
}

impl Panels<'_> {
    /// The factors from a row of the task on, where a panel begins, and from a column of the weight on, where a tile begins.
    fn factors(&self, row: usize, col: usize) -> Factors<'_> {
        let rank = self.product.rank;
        let up = &self.up[row / self.panel_rows * self.panel_rows * rank..];
        Factors { rank, up, down: self.product.down(col / TILE_COLS) }
    }
}

impl Task<'_> {
    fn run(&self, mut bytes: RowBytes<'_>, scratch: &mut Scratch) -> PatchOutcome {
        let rows = bytes.before().len() / self.weight.from.bytes(self.weight.cols);
        let all = self.first_row..self.first_row + rows;
        // Of a stack of experts, each step changes the rows of one.
        let in_task = |step: &&Step| step.rows.start.max(all.start) < step.rows.end.min(all.end);
        let steps: Vec<TaskStep<'_>> = self.steps.iter().filter(in_task).map(|step| self.step(step, &all)).collect();
        match (&mut bytes, self.merges(&steps, &all)) {
            (RowBytes::InPlace(bytes), Some(float)) => self.merge(float, &steps, bytes),
            _ => self.run_in_pieces(rows, &steps, bytes, scratch),
        }
    }

    fn step<'a>(&self, step: &'a Step, rows: &Range<usize>) -> TaskStep<'a> {
        let panel_rows = self.tier.panel_rows();
        let panels = |product: &'a Packed| Panels { product, panel_rows, up: product.panels(rows, panel_rows) };
        TaskStep { step, products: step.change.products().iter().map(panels).collect() }
    }

    /// The float type of the weight, if the steps add products to all of the task's rows and nothing else is to be done. Not for
    /// other types than these: their conversion takes many registers, so it is faster for a run of values at once.
    fn merges(&self, steps: &[TaskStep<'_>], rows: &Range<usize>) -> Option<Float> {
        let adds = |TaskStep { step, .. }: &TaskStep<'_>| {
            let product = matches!(&step.change, Change::Add { delta, .. } if matches!(**delta, Delta::Product(_)));
            product && step.rows.start <= rows.start && rows.end <= step.rows.end
        };
        let Stored { from, to, scales: None, noise: None, .. } = self.weight else { return None };
        match from {
            Encoding::Float(float @ (Float::F32 | Float::BF16)) if from == to => {
                (!steps.is_empty() && steps.iter().all(adds)).then_some(float)
            }
            _ => None,
        }
    }

    /// Adds the products of all steps to whole rows.
    fn merge(&self, float: Float, steps: &[TaskStep<'_>], bytes: &mut [u8]) -> PatchOutcome {
        let mut products = Vec::with_capacity(steps.len());
        for step in steps {
            if let (Change::Add { scale, .. }, [product]) = (&step.step.change, &step.products[..]) {
                products.push((product.factors(0, 0), *scale));
            }
        }
        PatchOutcome::of_saturated(self.tier.merge(float, bytes, self.weight.cols, &products))
    }

    fn run_in_pieces(
        &self,
        rows: usize,
        steps: &[TaskStep<'_>],
        mut bytes: RowBytes<'_>,
        scratch: &mut Scratch,
    ) -> PatchOutcome {
        let (cols, from, to) = (self.weight.cols, self.weight.from, self.weight.to);
        let whole_rows = steps.iter().any(|TaskStep { step, .. }| step.change.scope() > Scope::Element);
        let most_cols = if whole_rows { cols } else { PIECE_COLS };
        let mut outcome = PatchOutcome::default();
        // Columns are the outer loop, so that the factors of a piece's columns stay in cache for all rows of the task.
        for first_col in (0..cols).step_by(most_cols) {
            let piece_cols = most_cols.min(cols - first_col);
            for first_row in (0..rows).step_by(PANELS) {
                let piece_rows = PANELS.min(rows - first_row);
                let piece = Piece {
                    rows: self.first_row + first_row..self.first_row + first_row + piece_rows,
                    cols: first_col..first_col + piece_cols,
                };
                let stride = stride(piece_cols);
                scratch.weight.resize(PANELS * stride, 0.0);
                let row_bytes = |row: usize, stored: Encoding| stored.bytes((first_row + row) * cols + first_col)..;
                for row in 0..piece_rows {
                    let raw = &bytes.before()[row_bytes(row, from)];
                    let (raw, next) = raw.split_at(from.bytes(piece_cols));
                    fetch(next, 0, raw.len());
                    self.lift(&piece, row, raw, &mut scratch.weight[row * stride..][..piece_cols]);
                }
                let mut strip = StridedRows { values: &mut scratch.weight, stride, cols: piece_cols };
                for step in steps {
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

    fn change(&self, step: &TaskStep<'_>, piece: &Piece, strip: &mut StridedRows<'_>, spare: &mut Spare) {
        let TaskStep { step, products } = step;
        let Some(rows) = piece.shared_rows(&step.rows) else { return };
        match &step.change {
            Change::Add { delta, scale } => {
                if let (Delta::Product(_), [product]) = (&**delta, &products[..]) {
                    self.product(product, piece, strip, Output::Add(*scale), rows);
                    return;
                }
                let place = Place { first_row: step.rows.start, piece, rows: rows.clone() };
                self.fill(delta, products, &place, strip, spare);
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
                self.fill(delta, products, &place, strip, spare);
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
        product: &Panels<'_>,
        piece: &Piece,
        strip: &mut StridedRows<'_>,
        output: Output,
        rows: Range<usize>,
    ) {
        let factors = product.factors(piece.rows.start - self.first_row, piece.cols.start);
        self.tier.product(strip, factors, output, rows);
    }

    /// Computes D for the rows of a piece into `spare.delta`.
    fn fill(
        &self,
        delta: &Delta,
        products: &[Panels<'_>],
        place: &Place<'_>,
        weight: &mut StridedRows<'_>,
        spare: &mut Spare,
    ) {
        let (stride, cols, piece) = (weight.stride, weight.cols, place.piece);
        let Spare { delta: out, other } = spare;
        out.resize(piece.rows.len() * stride, 0.0);
        let mut out = StridedRows { values: out, stride, cols };
        match delta {
            Delta::Product(_) => self.product(&products[0], piece, &mut out, Output::Store, place.rows.clone()),
            Delta::Dense(values) => {
                for row in place.rows.clone() {
                    let at = place.of_step(row) * self.weight.cols + piece.cols.start;
                    out.row(row).copy_from_slice(&values[at..at + cols]);
                }
            }
            Delta::Hadamard(_) => {
                other.resize(piece.rows.len() * stride, 0.0);
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
                self.product(&products[0], piece, &mut out, Output::Store, place.rows.clone());
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
