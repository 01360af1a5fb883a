//! The inner loops, compiled for several instruction sets of which the best present is chosen at run time.
//!
//! The loops are plain Rust over arrays, of which the compiler makes vectors under `target_feature`; one needs
//! intrinsics to use the widest. Fused multiply-add is
//! exact in every tier: where the processor lacks it, software computes it, which is slow and gives the same bits.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")
)]

use std::ops::Range;

use super::tiles::{self, Factors, Output, StridedRows, each_tile};
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
            // A build of its own measures the narrower one on any machine.
            if cfg!(not(at_most_avx2)) && Tier::has_avx512() {
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

    /// The rows that its innermost loop takes at once, a divisor of [`PANELS`](tiles::PANELS).
    pub(crate) fn panel_rows(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => avx512::ROWS,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => avx2::ROWS,
            Kind::Plain => plain::ROWS,
        }
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
    fn product(strip: &mut StridedRows<'_>, factors: Factors<'_>, output: Output, rows: Range<usize>);
    fn merge(float: Float, bytes: &mut [u8], cols: usize, products: &[(Factors<'_>, f32)]) -> u64;
    fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]);
}

/// `sums += factor values`, fused.
#[inline(always)]
fn add_multiple(fused: impl Fn(f32, f32, f32) -> f32, factor: f32, values: &[f32], sums: &mut [f32]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = fused(factor, *value, *sum));
}

/// `a b + c`, rounded once, whatever the processor has.
#[inline(always)]
pub(super) fn fused(a: f32, b: f32, c: f32) -> f32 {
    // `f32::mul_add` is the C library's `fmaf` where there is no instruction, and MinGW's rounds twice.
    #[cfg(all(windows, target_env = "gnu"))]
    return libm::fmaf(a, b, c);
    #[cfg(not(all(windows, target_env = "gnu")))]
    return a.mul_add(b, c);
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps};

    use super::super::steps::TILE_COLS;
    use super::*;

    pub(super) const ROWS: usize = 12;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
        super::add_multiple(|a, b, c| a.mul_add(b, c), factor, values, sums);
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

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn product(strip: &mut StridedRows<'_>, factors: Factors<'_>, output: Output, rows: Range<usize>) {
        each_tile(strip, factors, output, rows, |up, down, _| sums(up, down));
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn merge(float: Float, bytes: &mut [u8], cols: usize, products: &[(Factors<'_>, f32)]) -> u64 {
        tiles::merge(float, bytes, cols, products, |up, down, _| sums(up, down))
    }

    /// `up down` for a panel and a tile. In intrinsics, since the compiler may make vectors of half this width, or single
    /// values, of plain arrays.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn sums(up: &[[f32; ROWS]], down: &[[f32; TILE_COLS]]) -> [[f32; TILE_COLS]; ROWS] {
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        for (up, down) in up.iter().zip(down) {
            // SAFETY: both reads are of sixteen of the 32 values of `down`.
            let (left, right) = unsafe { (_mm512_loadu_ps(down.as_ptr()), _mm512_loadu_ps(down[16..].as_ptr())) };
            for row in 0..ROWS {
                let up = _mm512_set1_ps(up[row]);
                sums[row][0] = _mm512_fmadd_ps(up, left, sums[row][0]);
                sums[row][1] = _mm512_fmadd_ps(up, right, sums[row][1]);
            }
        }
        // SAFETY: two vectors of sixteen f32 are an array of 32.
        unsafe { std::mem::transmute(sums) }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;

    /// Twelve sums of eight values hide the latency of the additions, and leave four of the sixteen registers.
    pub(super) const ROWS: usize = 6;
    const COLS: usize = 16;

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
        super::add_multiple(|a, b, c| a.mul_add(b, c), factor, values, sums);
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
    pub(super) fn product(strip: &mut StridedRows<'_>, factors: Factors<'_>, output: Output, rows: Range<usize>) {
        // Closures are compiled for the instructions of what they stand in.
        each_tile::<ROWS, COLS>(strip, factors, output, rows, |up, down, col| {
            tiles::sums(|a, b, c| a.mul_add(b, c), up, down, col)
        });
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn merge(float: Float, bytes: &mut [u8], cols: usize, products: &[(Factors<'_>, f32)]) -> u64 {
        tiles::merge::<ROWS, COLS>(float, bytes, cols, products, |up, down, col| {
            tiles::sums(|a, b, c| a.mul_add(b, c), up, down, col)
        })
    }
}

mod plain {
    use super::*;

    pub(super) const ROWS: usize = 4;
    const COLS: usize = 16;

    pub(super) fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
        super::add_multiple(fused, factor, values, sums);
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

    pub(super) fn product(strip: &mut StridedRows<'_>, factors: Factors<'_>, output: Output, rows: Range<usize>) {
        each_tile::<ROWS, COLS>(strip, factors, output, rows, |up, down, col| tiles::sums(fused, up, down, col));
    }

    pub(super) fn merge(float: Float, bytes: &mut [u8], cols: usize, products: &[(Factors<'_>, f32)]) -> u64 {
        tiles::merge::<ROWS, COLS>(float, bytes, cols, products, |up, down, col| tiles::sums(fused, up, down, col))
    }
}
