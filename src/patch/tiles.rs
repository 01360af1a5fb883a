//! The loops over packed factors: products of panels of rows and tiles of columns, of which an instruction set brings the
//! innermost loop.
//!
//! Everything is inlined, so that it is compiled for the instruction set of its caller.
#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "asking for cache lines in advance takes a pointer"))]

use std::ops::Range;

use super::steps::TILE_COLS;
use crate::float::Float;

/// The rows of a piece, which are whole panels in every tier.
pub(crate) const PANELS: usize = 12;

/// The factors of a product, for some rows and columns of a weight.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a> {
    pub(crate) rank: usize,
    /// For each panel of [`panel_rows`](super::vector::Tier::panel_rows) rows, values [rank, rows].
    pub(crate) up: &'a [f32],
    /// For each [`TILE_COLS`] columns, values [rank, `TILE_COLS`].
    pub(crate) down: &'a [f32],
}

impl<'a> Factors<'a> {
    #[inline(always)]
    fn panel<const ROWS: usize>(&self, panel: usize) -> &'a [[f32; ROWS]] {
        self.up[panel * self.rank * ROWS..][..self.rank * ROWS].as_chunks().0
    }

    #[inline(always)]
    fn tile(&self, tile: usize) -> &'a [[f32; TILE_COLS]] {
        self.down[tile * self.rank * TILE_COLS..][..self.rank * TILE_COLS].as_chunks().0
    }
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Output {
    /// `out = up down`.
    Store,
    /// `out = out + scale (up down)`.
    Add(f32),
}

impl Output {
    #[inline(always)]
    fn put<const COLS: usize>(self, sums: &[f32; COLS], out: &mut [f32; COLS]) {
        match self {
            Output::Store => *out = *sums,
            Output::Add(scale) => {
                // Read whole before it is written, so that no store can lie before a load.
                let mut new = *out;
                add(scale, sums, &mut new);
                *out = new;
            }
        }
    }
}

/// Rows of f32 values, `stride` apart; a stride is at least the columns rounded up to [`TILE_COLS`].
pub(crate) struct StridedRows<'a> {
    pub(crate) values: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) cols: usize,
}

impl StridedRows<'_> {
    /// The values of a row, without what pads it.
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.stride..][..self.cols]
    }
}

/// The innermost loop. A trait, since what is not inlined gives its sums through memory, and a method can be asked to be.
pub(super) trait Sums<const ROWS: usize, const COLS: usize>: Copy {
    /// `up down` for a panel and `COLS` columns of a tile, from a column of the tile on.
    fn sums(self, up: &[[f32; ROWS]], down: &[[f32; TILE_COLS]], first_col: usize) -> [[f32; COLS]; ROWS];
}

/// The product of packed factors, for some `rows` and all columns of the strip. Panels are counted from its first row.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant places keep the sums in registers")]
pub(super) fn each_tile<const ROWS: usize, const COLS: usize>(
    strip: &mut StridedRows<'_>,
    factors: Factors<'_>,
    output: Output,
    rows: Range<usize>,
    kernel: impl Sums<ROWS, COLS>,
) {
    // Tiles are the outer loop, so that one stays in the first-level cache for all panels.
    for tile in 0..strip.cols.div_ceil(TILE_COLS) {
        let down = factors.tile(tile);
        for panel in rows.start / ROWS..rows.end.div_ceil(ROWS) {
            let up = factors.panel::<ROWS>(panel);
            for first_col in (0..TILE_COLS).step_by(COLS) {
                let sums = kernel.sums(up, down, first_col);
                for row in 0..ROWS {
                    let of_strip = panel * ROWS + row;
                    if of_strip < rows.start || of_strip >= rows.end {
                        continue;
                    }
                    let at = of_strip * strip.stride + tile * TILE_COLS + first_col;
                    if let Some(out) = strip.values[at..].first_chunk_mut() {
                        output.put(&sums[row], out);
                    }
                }
            }
        }
    }
}

/// Adds products times their factors, in order, to whole rows of `cols` stored values, and rounds to the nearest. Returns how
/// many values were saturated.
#[inline(always)]
pub(super) fn merge<const ROWS: usize, const COLS: usize>(
    float: Float,
    bytes: &mut [u8],
    cols: usize,
    products: &[(Factors<'_>, f32)],
    kernel: impl Sums<ROWS, COLS>,
) -> u64 {
    // Constant types, so that conversions are made for them.
    match float {
        Float::F32 => merge_as(Float::F32, bytes, cols, products, kernel),
        Float::BF16 => merge_as(Float::BF16, bytes, cols, products, kernel),
        other => merge_as(other, bytes, cols, products, kernel),
    }
}

#[inline(always)]
fn merge_as<const ROWS: usize, const COLS: usize>(
    float: Float,
    bytes: &mut [u8],
    cols: usize,
    products: &[(Factors<'_>, f32)],
    kernel: impl Sums<ROWS, COLS>,
) -> u64 {
    let (size, rows) = (float.size(), bytes.len() / (cols * float.size()));
    let mut saturated = 0;
    for tile in 0..cols.div_ceil(TILE_COLS) {
        for panel in 0..rows.div_ceil(ROWS) {
            for in_tile in (0..TILE_COLS.min(cols - tile * TILE_COLS)).step_by(COLS) {
                let first_col = tile * TILE_COLS + in_tile;
                let (rows, width) = (ROWS.min(rows - panel * ROWS), COLS.min(cols - first_col));
                let at = |row: usize| ((panel * ROWS + row) * cols + first_col) * size;
                if in_tile == 0 {
                    (0..rows).for_each(|row| fetch(bytes, at(row) + AHEAD, TILE_COLS * size));
                }
                let place = Place { panel, tile, in_tile };
                // With constants where the tile is whole, which nearly all are.
                saturated += if (rows, width) == (ROWS, COLS) {
                    merge_tile(float, bytes, at, (ROWS, COLS), products, place, kernel)
                } else {
                    merge_tile(float, bytes, at, (rows, width), products, place, kernel)
                };
            }
        }
    }
    saturated
}

/// The panel, the tile and its column that sums are for.
#[derive(Clone, Copy)]
struct Place {
    panel: usize,
    tile: usize,
    in_tile: usize,
}

impl Place {
    #[inline(always)]
    fn sums<const ROWS: usize, const COLS: usize>(
        self,
        factors: &Factors<'_>,
        kernel: impl Sums<ROWS, COLS>,
    ) -> [[f32; COLS]; ROWS] {
        kernel.sums(factors.panel(self.panel), factors.tile(self.tile), self.in_tile)
    }
}

/// As [`merge`], for a tile of `rows` by `width` values; `at` gives the place of a row in `bytes`.
#[inline(always)]
fn merge_tile<const ROWS: usize, const COLS: usize>(
    float: Float,
    bytes: &mut [u8],
    at: impl Fn(usize) -> usize,
    (rows, width): (usize, usize),
    products: &[(Factors<'_>, f32)],
    place: Place,
    kernel: impl Sums<ROWS, COLS>,
) -> u64 {
    let mut saturated = 0;
    let Some(((first, scale), others)) = products.split_first() else { return 0 };
    let first_sums = place.sums(first, kernel);
    if others.is_empty() {
        for row in 0..ROWS.min(rows) {
            let raw = &mut bytes[at(row)..][..width * float.size()];
            let mut values = [0.0; COLS];
            float.lift(raw, &mut values[..width]);
            add(*scale, &first_sums[row], &mut values);
            saturated += float.round(&values[..width], raw);
        }
        return saturated;
    }
    let mut values = [[0.0; COLS]; ROWS];
    for (row, values) in values.iter_mut().enumerate().take(rows) {
        float.lift(&bytes[at(row)..][..width * float.size()], &mut values[..width]);
        add(*scale, &first_sums[row], values);
    }
    for (other, scale) in others {
        let sums = place.sums(other, kernel);
        for row in 0..ROWS {
            add(*scale, &sums[row], &mut values[row]);
        }
    }
    for (row, values) in values.iter().enumerate().take(rows) {
        saturated += float.round(&values[..width], &mut bytes[at(row)..][..width * float.size()]);
    }
    saturated
}

/// `values += scale sums`, for values that are in registers.
#[inline(always)]
fn add<const COLS: usize>(scale: f32, sums: &[f32; COLS], values: &mut [f32; COLS]) {
    for col in 0..COLS {
        values[col] += scale * sums[col];
    }
}

/// `up down` for a panel and `COLS` columns of a tile, by fused multiply-add.
#[inline(always)]
pub(super) fn sums<const ROWS: usize, const COLS: usize>(
    fused: impl Fn(f32, f32, f32) -> f32,
    up: &[[f32; ROWS]],
    down: &[[f32; TILE_COLS]],
    first_col: usize,
) -> [[f32; COLS]; ROWS] {
    let mut sums = [[0.0f32; COLS]; ROWS];
    for (up, down) in up.iter().zip(down) {
        let down: [f32; COLS] = std::array::from_fn(|col| down[first_col + col]);
        for row in 0..ROWS {
            for col in 0..COLS {
                sums[row][col] = fused(up[row], down[col], sums[row][col]);
            }
        }
    }
    sums
}

/// How many bytes of a row a merge asks for in advance: far enough for memory to answer, and near enough for caches to hold as
/// much of all rows of a task.
const AHEAD: usize = 320;

/// Asks for the cache lines of `count` bytes from `at` on, which are soon read.
#[inline(always)]
pub(crate) fn fetch(bytes: &[u8], at: usize, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..count).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which reads nothing; the processor takes any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(at + line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, at, count);
}
