//! The inner loops, compiled for several instruction sets of which the best present is chosen at run time.
//!
//! Each loop is plain Rust over arrays; the compiler makes vectors of it under `target_feature`. Fused multiply-add is
//! exact in every tier: where the processor lacks it, `f32::mul_add` computes it in software, which is slow and gives
//! the same bits.
#![expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")]

use crate::adapter::{TILE_COLS, TILE_ROWS};
use crate::float::Float;

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

/// Rows of f32 values, `stride` apart; a stride is at least the columns rounded up to [`TILE_COLS`].
pub(crate) struct Strip<'a> {
    pub(crate) values: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) cols: usize,
}

macro_rules! tiers {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? { $body:expr })*) => {
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

        #[cfg(target_arch = "x86_64")]
        mod avx512 {
            use super::*;
            const ROWS: usize = 8;
            const COLS: usize = 32;
            $(#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            pub(super) fn $name($($arg: $type),*) $(-> $result)? { $body })*
        }

        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            use super::*;
            const ROWS: usize = 4;
            const COLS: usize = 16;
            $(#[target_feature(enable = "avx2,fma")]
            pub(super) fn $name($($arg: $type),*) $(-> $result)? { $body })*
        }

        mod plain {
            use super::*;
            const ROWS: usize = 4;
            const COLS: usize = 16;
            $(pub(super) fn $name($($arg: $type),*) $(-> $result)? { $body })*
        }
    };
}

tiers! {
    fn lift(float: Float, bytes: &[u8], values: &mut [f32]) { float.lift(bytes, values) }
    fn round(float: Float, values: &[f32], bytes: &mut [u8]) -> u64 { float.round(values, bytes) }
    fn product(strip: &mut Strip<'_>, up: &[f32], down: &[f32], output: Output, rows: std::ops::Range<usize>) {
        tiles::<ROWS, COLS>(strip, up, down, output, rows)
    }
}

/// The product of packed factors, for the `rows` of one tile of rows and all columns of the strip.
#[inline(always)]
fn tiles<const ROWS: usize, const COLS: usize>(
    strip: &mut Strip<'_>,
    up: &[f32],
    down: &[f32],
    output: Output,
    rows: std::ops::Range<usize>,
) {
    let (up, _) = up.as_chunks::<TILE_ROWS>();
    let (down, _) = down.as_chunks::<TILE_COLS>();
    for (tile, down) in down.chunks_exact(up.len()).take(strip.cols.div_ceil(TILE_COLS)).enumerate() {
        for first_col in (0..TILE_COLS).step_by(COLS) {
            for first_row in (0..TILE_ROWS).step_by(ROWS) {
                let mut sums = [[0.0f32; COLS]; ROWS];
                for (up, down) in up.iter().zip(down) {
                    let (Some(up), Some(down)) =
                        (up[first_row..].first_chunk::<ROWS>(), down[first_col..].first_chunk::<COLS>())
                    else {
                        return;
                    };
                    for row in 0..ROWS {
                        for col in 0..COLS {
                            sums[row][col] = up[row].mul_add(down[col], sums[row][col]);
                        }
                    }
                }
                for (row, sums) in sums.iter().enumerate() {
                    if !rows.contains(&(first_row + row)) {
                        continue;
                    }
                    let at = (first_row + row) * strip.stride + tile * TILE_COLS + first_col;
                    let Some(out) = strip.values[at..].first_chunk_mut::<COLS>() else { return };
                    match output {
                        Output::Store => *out = *sums,
                        Output::Add(scale) => {
                            for (out, sum) in out.iter_mut().zip(sums) {
                                *out += scale * sum;
                            }
                        }
                    }
                }
            }
        }
    }
}
