//! The inner loops, compiled for several instruction sets of which the best present is chosen at run time.
//!
//! The loops are plain Rust over arrays, of which the compiler makes vectors under `target_feature`; one needs
//! intrinsics to use the widest. Fused multiply-add is
//! exact in every tier: where the processor lacks it, `f32::mul_add` computes it in software, which is slow and gives
//! the same bits.
#![expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")]

use std::ops::Range;

use super::steps::{TILE_COLS, TILE_ROWS};
use crate::float::Float;
use crate::ggml::Format;
use crate::rounding::Noise;

/// An instruction set that this processor has; made by asking the processor only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tier(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

impl Tier {
    /// The best one.
    pub(crate) fn best() -> Tier {
        #[cfg(target_arch = "x86_64")]
        {
            if Tier::has_avx512() {
                return Tier(Kind::Avx512);
            }
            if Tier::has_avx2() {
                return Tier(Kind::Avx2);
            }
        }
        Tier(Kind::Plain)
    }

    /// All that there are, the best first.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Tier> {
        let mut tiers = vec![Tier::best()];
        #[cfg(target_arch = "x86_64")]
        if Tier::has_avx2() {
            tiers.push(Tier(Kind::Avx2));
        }
        tiers.push(Tier(Kind::Plain));
        tiers.dedup();
        tiers
    }

    #[cfg(target_arch = "x86_64")]
    fn has_avx512() -> bool {
        Tier::has_avx2()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
    }

    #[cfg(target_arch = "x86_64")]
    fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
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
            // Read whole before it is written, so that no store can lie before a load.
            Output::Add(scale) => {
                let old = *out;
                *out = std::array::from_fn(|col| old[col] + scale * sums[col]);
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

macro_rules! tiers {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        impl Tier {
            $(pub(crate) fn $name(self, $($arg: $type),*) $(-> $result)? {
                match self.0 {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: a tier of this kind exists only where the processor said that it has these features.
                    Kind::Avx512 => unsafe { avx512::$name($($arg),*) },
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: as above.
                    Kind::Avx2 => unsafe { avx2::$name($($arg),*) },
                    Kind::Plain => plain::$name($($arg),*),
                }
            })*
        }
    };
}

tiers! {
    fn lift(float: Float, bytes: &[u8], values: &mut [f32]);
    fn round(float: Float, values: &[f32], bytes: &mut [u8]) -> u64;
    fn round_noisy(float: Float, noise: Noise, first: u64, values: &[f32], bytes: &mut [u8]) -> u64;
    fn dequantise(format: Format, blocks: &[u8], values: &mut [f32]);
    fn quantise(format: Format, values: &[f32], blocks: &mut [u8]) -> Option<u64>;
    fn product(strip: &mut StridedRows<'_>, up: &[f32], down: &[f32], output: Output, rows: Range<usize>);
    fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]);
}

/// `sums += factor values`, fused.
#[inline(always)]
fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = factor.mul_add(*value, *sum));
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps};

    use super::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
        super::add_multiple(factor, values, sums);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn lift(float: Float, bytes: &[u8], values: &mut [f32]) {
        float.lift(bytes, values);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn dequantise(format: Format, blocks: &[u8], values: &mut [f32]) {
        format.dequantise(blocks, values);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn quantise(format: Format, values: &[f32], blocks: &mut [u8]) -> Option<u64> {
        format.quantise(values, blocks)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn round(float: Float, values: &[f32], bytes: &mut [u8]) -> u64 {
        float.round(values, bytes)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn round_noisy(float: Float, noise: Noise, first: u64, values: &[f32], bytes: &mut [u8]) -> u64 {
        float.round_noisy(noise, first, values, bytes)
    }

    /// In intrinsics, since the compiler makes vectors of half this width of plain arrays.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn product(strip: &mut StridedRows<'_>, up: &[f32], down: &[f32], output: Output, rows: Range<usize>) {
        each_tile::<TILE_ROWS, TILE_COLS>(strip, up, down, output, rows, |up, down, _, _| {
            let mut sums = [[_mm512_setzero_ps(); 2]; TILE_ROWS];
            for (up, down) in up.iter().zip(down) {
                // SAFETY: both reads are of sixteen of the 32 values of `down`.
                let (left, right) = unsafe { (_mm512_loadu_ps(down.as_ptr()), _mm512_loadu_ps(down[16..].as_ptr())) };
                for row in 0..TILE_ROWS {
                    let up = _mm512_set1_ps(up[row]);
                    sums[row][0] = _mm512_fmadd_ps(up, left, sums[row][0]);
                    sums[row][1] = _mm512_fmadd_ps(up, right, sums[row][1]);
                }
            }
            // SAFETY: two vectors of sixteen f32 are an array of 32.
            unsafe { std::mem::transmute(sums) }
        });
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
        super::add_multiple(factor, values, sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn lift(float: Float, bytes: &[u8], values: &mut [f32]) {
        float.lift(bytes, values);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn dequantise(format: Format, blocks: &[u8], values: &mut [f32]) {
        format.dequantise(blocks, values);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn quantise(format: Format, values: &[f32], blocks: &mut [u8]) -> Option<u64> {
        format.quantise(values, blocks)
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn round(float: Float, values: &[f32], bytes: &mut [u8]) -> u64 {
        float.round(values, bytes)
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn round_noisy(float: Float, noise: Noise, first: u64, values: &[f32], bytes: &mut [u8]) -> u64 {
        float.round_noisy(noise, first, values, bytes)
    }

    #[target_feature(enable = "avx2,fma")]
    #[expect(clippy::redundant_closure, reason = "a closure is compiled for the instructions of what it stands in")]
    pub(super) fn product(strip: &mut StridedRows<'_>, up: &[f32], down: &[f32], output: Output, rows: Range<usize>) {
        each_tile::<4, 16>(strip, up, down, output, rows, |up, down, row, col| sums(up, down, row, col));
    }
}

mod plain {
    use super::*;

    pub(super) fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
        super::add_multiple(factor, values, sums);
    }

    pub(super) fn lift(float: Float, bytes: &[u8], values: &mut [f32]) {
        float.lift(bytes, values);
    }

    pub(super) fn dequantise(format: Format, blocks: &[u8], values: &mut [f32]) {
        format.dequantise(blocks, values);
    }

    pub(super) fn quantise(format: Format, values: &[f32], blocks: &mut [u8]) -> Option<u64> {
        format.quantise(values, blocks)
    }

    pub(super) fn round(float: Float, values: &[f32], bytes: &mut [u8]) -> u64 {
        float.round(values, bytes)
    }

    pub(super) fn round_noisy(float: Float, noise: Noise, first: u64, values: &[f32], bytes: &mut [u8]) -> u64 {
        float.round_noisy(noise, first, values, bytes)
    }

    pub(super) fn product(strip: &mut StridedRows<'_>, up: &[f32], down: &[f32], output: Output, rows: Range<usize>) {
        each_tile::<4, 16>(strip, up, down, output, rows, sums);
    }
}

/// The product of packed factors, for the `rows` of one tile of rows and all columns of the strip.
///
/// `sums` gives the product for `ROWS` by `COLS` of a tile, from a row and a column of the tile on.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant places keep the sums in registers")]
fn each_tile<const ROWS: usize, const COLS: usize>(
    strip: &mut StridedRows<'_>,
    up: &[f32],
    down: &[f32],
    output: Output,
    rows: Range<usize>,
    sums: impl Fn(&[[f32; TILE_ROWS]], &[[f32; TILE_COLS]], usize, usize) -> [[f32; COLS]; ROWS],
) {
    let (up, _) = up.as_chunks::<TILE_ROWS>();
    let (down, _) = down.as_chunks::<TILE_COLS>();
    for (tile, down) in down.chunks_exact(up.len()).take(strip.cols.div_ceil(TILE_COLS)).enumerate() {
        for first_col in (0..TILE_COLS).step_by(COLS) {
            for first_row in (0..TILE_ROWS).step_by(ROWS) {
                let sums = sums(up, down, first_row, first_col);
                for row in 0..ROWS {
                    if first_row + row < rows.start || first_row + row >= rows.end {
                        continue;
                    }
                    let at = (first_row + row) * strip.stride + tile * TILE_COLS + first_col;
                    if let Some(out) = strip.values[at..].first_chunk_mut() {
                        output.put(&sums[row], out);
                    }
                }
            }
        }
    }
}

/// `up down` for `ROWS` by `COLS` of a tile.
#[inline(always)]
fn sums<const ROWS: usize, const COLS: usize>(
    up: &[[f32; TILE_ROWS]],
    down: &[[f32; TILE_COLS]],
    first_row: usize,
    first_col: usize,
) -> [[f32; COLS]; ROWS] {
    let mut sums = [[0.0f32; COLS]; ROWS];
    for (up, down) in up.iter().zip(down) {
        let (up, down) = (&up[first_row..first_row + ROWS], &down[first_col..first_col + COLS]);
        for row in 0..ROWS {
            for col in 0..COLS {
                sums[row][col] = up[row].mul_add(down[col], sums[row][col]);
            }
        }
    }
    sums
}
