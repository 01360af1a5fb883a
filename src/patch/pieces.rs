//! A weight in pieces: eight rows by some columns, lifted, changed and rounded in place.

use std::ops::Range;

use rayon::prelude::*;

use super::vector::{Output, Strip, Tier};
use crate::adapter::{Change, Delta, Step, TILE_COLS, TILE_ROWS};
use crate::float::Float;

/// A weight as a matrix in its storage type.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) float: Float,
    /// What the stored numbers are multiplied by.
    pub(crate) scales: Option<&'a Scales>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// The scales of a weight, one for each block of a grid.
pub(crate) struct Scales {
    pub(crate) values: Vec<f32>,
    pub(crate) block: [usize; 2],
    pub(crate) grid_cols: usize,
}

/// Columns of a piece; a multiple of [`TILE_COLS`]. Its f32 values stay in the first-level cache, and the factors of
/// as many columns in the second-level one.
const PIECE_COLS: usize = 512;

/// Rows that one task works on, for weights of so many columns: enough work to be worth a task, few enough rows to
/// share a weight out.
fn task_rows(cols: usize) -> usize {
    const ELEMENTS: usize = 1 << 18;
    (ELEMENTS / cols.max(1)).clamp(TILE_ROWS, 128) / TILE_ROWS * TILE_ROWS
}

/// Applies `steps` in order to the weight in `bytes`; returns how many values were saturated.
pub(crate) fn apply(tier: Tier, matrix: Matrix<'_>, bytes: &mut [u8], steps: &[Step]) -> u64 {
    let rows = task_rows(matrix.cols);
    let task_bytes = rows * matrix.cols * matrix.float.size();
    if task_bytes == 0 {
        return 0;
    }
    let tasks = bytes.par_chunks_mut(task_bytes).enumerate();
    tasks
        .map_init(Scratch::default, |scratch, (task, bytes)| {
            Task { tier, matrix, steps, first_row: task * rows }.run(bytes, scratch)
        })
        .sum()
}

/// The f32 values of the piece in work.
#[derive(Default)]
struct Scratch {
    weight: Vec<f32>,
}

/// Some whole rows of a weight.
struct Task<'a> {
    tier: Tier,
    matrix: Matrix<'a>,
    steps: &'a [Step],
    first_row: usize,
}

impl Task<'_> {
    fn run(&self, bytes: &mut [u8], scratch: &mut Scratch) -> u64 {
        let (cols, size) = (self.matrix.cols, self.matrix.float.size());
        let rows = bytes.len() / (cols * size);
        let piece_cols = PIECE_COLS;
        let mut saturated = 0;
        // Columns outside, so that the factors of a piece's columns serve all rows of the task.
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
                let row_bytes = |row: usize| ((first_row + row) * cols + first_col) * size..;
                for row in 0..piece_rows {
                    let raw = &bytes[row_bytes(row)][..piece_cols * size];
                    self.lift(&piece, row, raw, &mut scratch.weight[row * stride..][..piece_cols]);
                }
                let mut strip = Strip { values: &mut scratch.weight, stride, cols: piece_cols };
                for step in self.steps {
                    self.change(step, &piece, &mut strip);
                }
                for row in 0..piece_rows {
                    let raw = &mut bytes[row_bytes(row)][..piece_cols * size];
                    saturated += self.round(&piece, row, &mut scratch.weight[row * stride..][..piece_cols], raw);
                }
            }
        }
        saturated
    }

    fn lift(&self, piece: &Piece, row: usize, raw: &[u8], values: &mut [f32]) {
        self.tier.lift(self.matrix.float, raw, values);
        if let Some(scales) = self.matrix.scales {
            scales.each(piece.rows.start + row, &piece.cols, values, |value, scale| value * scale);
        }
    }

    fn round(&self, piece: &Piece, row: usize, values: &mut [f32], raw: &mut [u8]) -> u64 {
        if let Some(scales) = self.matrix.scales {
            scales.each(piece.rows.start + row, &piece.cols, values, |value, scale| value / scale);
        }
        self.tier.round(self.matrix.float, values, raw)
    }

    fn change(&self, step: &Step, piece: &Piece, strip: &mut Strip<'_>) {
        let Some(rows) = piece.shared_rows(&step.rows) else { return };
        match &step.change {
            Change::Add { delta: Delta::Product(product), scale } => {
                let (up, down) = (product.up(piece.rows.start / TILE_ROWS), product.down(piece.cols.start / TILE_COLS));
                self.tier.product(strip, up, down, Output::Add(*scale), rows);
            }
            Change::Add { delta: Delta::Dense(values), scale } => {
                self.each_row(step, piece, strip, rows, values, |weight, value| weight + scale * value);
            }
            Change::Set(values) => self.each_row(step, piece, strip, rows, values, |_, value| value),
        }
    }

    /// Combines each weight of the piece with the value at its place in `values`, which holds the step's rows.
    fn each_row(
        &self,
        step: &Step,
        piece: &Piece,
        strip: &mut Strip<'_>,
        rows: Range<usize>,
        values: &[f32],
        combine: impl Fn(f32, f32) -> f32,
    ) {
        for row in rows {
            let at = (piece.rows.start + row - step.rows.start) * self.matrix.cols + piece.cols.start;
            let weights = &mut strip.values[row * strip.stride..][..strip.cols];
            weights.iter_mut().zip(&values[at..]).for_each(|(weight, &value)| *weight = combine(*weight, value));
        }
    }
}

/// The place of a piece in its weight.
struct Piece {
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Piece {
    /// The piece's rows, counted in it, that are among `rows` of the weight.
    fn shared_rows(&self, rows: &Range<usize>) -> Option<Range<usize>> {
        let (start, end) = (rows.start.max(self.rows.start), rows.end.min(self.rows.end));
        (start < end).then(|| start - self.rows.start..end - self.rows.start)
    }
}

/// The distance of a piece's rows: an odd number of tiles, so that rows do not fall on the same cache sets.
fn stride(cols: usize) -> usize {
    (cols.div_ceil(TILE_COLS) | 1) * TILE_COLS
}

impl Scales {
    /// Combines each value of a row's `cols` with its scale.
    fn each(&self, row: usize, cols: &Range<usize>, values: &mut [f32], combine: impl Fn(f32, f32) -> f32) {
        let of_row = row / self.block[0] * self.grid_cols;
        let mut col = cols.start;
        let mut rest = values;
        while !rest.is_empty() {
            let block = col / self.block[1];
            let length = ((block + 1) * self.block[1] - col).min(rest.len());
            let (now, later) = rest.split_at_mut(length);
            let scale = self.values[of_row + block];
            now.iter_mut().for_each(|value| *value = combine(*value, scale));
            (rest, col) = (later, col + length);
        }
    }
}
