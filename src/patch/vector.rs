//! The inner loops, compiled for several instruction sets of which the best present is chosen at run time.
//!
//! The loops are plain Rust over arrays, of which the compiler makes vectors under `target_feature`; the innermost of products
//! needs intrinsics with AVX-512 and NEON. Fused multiply-add is exact in every tier: where the processor lacks it, software
//! computes it, which is slow and gives the same bits.
#![cfg_attr(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")
)]

use std::ops::Range;

use super::steps::TILE_COLS;
use super::tiles::{self, Factors, Output, StridedRows, Sums, each_tile};
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
    #[cfg(target_arch = "aarch64")]
    Neon,
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
        #[cfg(target_arch = "aarch64")]
        // The lanes of a vector are numbered from the other end in big-endian memory.
        if cfg!(target_endian = "little") && std::arch::is_aarch64_feature_detected!("neon") {
            return Tier(Kind::Neon);
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
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => neon::ROWS,
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
                    #[cfg(target_arch = "aarch64")]
                    // SAFETY: as above.
                    Kind::Neon => unsafe { neon::$name($($arg),*) },
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

/// The loops of an instruction set, with the innermost one and the fused multiply-add that it brings.
macro_rules! loops {
    ($kernel:expr, $fused:expr $(, #[$features:meta])?) => {
        $(#[$features])?
        pub(super) fn lift(float: Float, bytes: &[u8], values: &mut [f32]) {
            float.lift(bytes, values);
        }

        $(#[$features])?
        pub(super) fn round(float: Float, values: &[f32], bytes: &mut [u8]) -> u64 {
            float.round(values, bytes)
        }

        $(#[$features])?
        pub(super) fn round_noisy(float: Float, noise: Noise, first: u64, values: &[f32], bytes: &mut [u8]) -> u64 {
            float.round_noisy(noise, first, values, bytes)
        }

        $(#[$features])?
        pub(super) fn dequantise(format: Format, blocks: &[u8], values: &mut [f32]) {
            format.dequantise(blocks, values);
        }

        $(#[$features])?
        pub(super) fn quantise(format: Format, values: &[f32], blocks: &mut [u8]) -> Option<u64> {
            format.quantise(values, blocks)
        }

        $(#[$features])?
        pub(super) fn product(strip: &mut StridedRows<'_>, factors: Factors<'_>, output: Output, rows: Range<usize>) {
            each_tile(strip, factors, output, rows, $kernel);
        }

        $(#[$features])?
        pub(super) fn merge(float: Float, bytes: &mut [u8], cols: usize, products: &[(Factors<'_>, f32)]) -> u64 {
            tiles::merge(float, bytes, cols, products, $kernel)
        }

        $(#[$features])?
        pub(super) fn add_multiple(factor: f32, values: &[f32], sums: &mut [f32]) {
            // A closure is compiled for the instructions of what it stands in.
            super::add_multiple($fused, factor, values, sums);
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps};

    use super::*;

    pub(super) const ROWS: usize = 12;

    loops!(
        Kernel,
        |a, b, c| a.mul_add(b, c),
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    );

    /// Made by the loops of this module only.
    #[derive(Clone, Copy)]
    struct Kernel;

    impl Sums<ROWS, TILE_COLS> for Kernel {
        #[inline(always)]
        fn sums(self, up: &[[f32; ROWS]], down: &[[f32; TILE_COLS]], _: usize) -> [[f32; TILE_COLS]; ROWS] {
            // SAFETY: the loops that make one are called only where the processor said that it has these features.
            unsafe { sums(up, down) }
        }
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

    // A closure is compiled for the instructions of what it stands in: the loops themselves.
    loops!(
        Kernel(|a: f32, b: f32, c: f32| a.mul_add(b, c)),
        |a, b, c| a.mul_add(b, c),
        #[target_feature(enable = "avx2,fma")]
    );

    /// The innermost loop by a fused multiply-add.
    #[derive(Clone, Copy)]
    struct Kernel<F>(F);

    impl<F: Fn(f32, f32, f32) -> f32 + Copy> Sums<ROWS, COLS> for Kernel<F> {
        #[inline(always)]
        fn sums(self, up: &[[f32; ROWS]], down: &[[f32; TILE_COLS]], first_col: usize) -> [[f32; COLS]; ROWS] {
            tiles::sums(self.0, up, down, first_col)
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use std::arch::aarch64::{float32x2_t, float32x4_t, vdupq_lane_f32, vdupq_laneq_f32, vdupq_n_f32, vfmaq_f32};

    use super::*;

    /// Of 32 registers the sums take 24, and leave eight for the factors.
    pub(super) const ROWS: usize = 6;
    const COLS: usize = 16;

    loops!(Kernel, |a, b, c| a.mul_add(b, c), #[target_feature(enable = "neon")]);

    /// Made by the loops of this module only.
    #[derive(Clone, Copy)]
    struct Kernel;

    impl Sums<ROWS, COLS> for Kernel {
        #[inline(always)]
        fn sums(self, up: &[[f32; ROWS]], down: &[[f32; TILE_COLS]], first_col: usize) -> [[f32; COLS]; ROWS] {
            // SAFETY: the loops that make one are called only where the processor said that it has these features.
            unsafe { sums(up, down, first_col) }
        }
    }

    /// As [`tiles::sums`]. In intrinsics, since the compiler may keep plain arrays in memory and store them for every value of
    /// the rank.
    #[inline]
    #[target_feature(enable = "neon")]
    fn sums(up: &[[f32; ROWS]], down: &[[f32; TILE_COLS]], first_col: usize) -> [[f32; COLS]; ROWS] {
        let mut sums = [[vdupq_n_f32(0.0); COLS / 4]; ROWS];
        for (up, down) in up.iter().zip(down) {
            let down: [f32; COLS] = std::array::from_fn(|col| down[first_col + col]);
            let down: [float32x4_t; COLS / 4] = bytemuck::cast(down);
            let [a, b, c, d, e, f] = *up;
            let (four, two): (float32x4_t, float32x2_t) = (bytemuck::cast([a, b, c, d]), bytemuck::cast([e, f]));
            let up = [
                vdupq_laneq_f32::<0>(four),
                vdupq_laneq_f32::<1>(four),
                vdupq_laneq_f32::<2>(four),
                vdupq_laneq_f32::<3>(four),
                vdupq_lane_f32::<0>(two),
                vdupq_lane_f32::<1>(two),
            ];
            for row in 0..ROWS {
                for col in 0..COLS / 4 {
                    sums[row][col] = vfmaq_f32(sums[row][col], up[row], down[col]);
                }
            }
        }
        bytemuck::cast(sums)
    }
}

mod plain {
    use super::*;

    pub(super) const ROWS: usize = 4;
    const COLS: usize = 16;

    loops!(Kernel, fused);

    #[derive(Clone, Copy)]
    struct Kernel;

    impl Sums<ROWS, COLS> for Kernel {
        #[inline(always)]
        fn sums(self, up: &[[f32; ROWS]], down: &[[f32; TILE_COLS]], first_col: usize) -> [[f32; COLS]; ROWS] {
            tiles::sums(fused, up, down, first_col)
        }
    }
}
