//! Values as blocks of the "K" formats: scales are searched for that make the weighted squares of errors least.
//!
//! What is minimised and the scales that are tried are those of `make_qkx2_quants` and `make_qx_quants` in llama.cpp,
//! `ggml/src/ggml-quants.c`, as its `quantize_row_q4_K_ref`, `…_q5_K_ref` and `…_q6_K_ref` use them, with sums in the same order, so that
//! the values of blocks are the same. Here values are divided by a power of two first, so that no square overflows or vanishes.
//!
//! A block with a value that is NaN or infinite, or with a scale beyond the range of f16, becomes NaN as a whole.

use super::k_quants::six_bits;
use super::parts::mapped;
use super::quantise::{NAN, extreme, half, half_is_finite, largest, unit};
use crate::float::{lift_f16, round_f16};

/// The magnitude below which a block is zero; the least scale of f16 is far above it.
const ZERO: f32 = 1e-15;

#[inline(always)]
pub(super) fn q4_k(values: &[f32; 256], block: &mut [u8; 144]) -> bool {
    let (fields, codes) = block.split_at_mut(16);
    let Some(of_block) = with_least::<15>(values, fields, -1.0, 20) else {
        codes.fill(0);
        return false;
    };
    put_pairs(&of_block, codes);
    true
}

#[inline(always)]
pub(super) fn q5_k(values: &[f32; 256], block: &mut [u8; 176]) -> bool {
    let (fields, rest) = block.split_at_mut(16);
    let Some(of_block) = with_least::<31>(values, fields, -0.5, 15) else {
        rest.fill(0);
        return false;
    };
    let (fifth, codes) = rest.split_at_mut(32);
    for (at, byte) in fifth.iter_mut().enumerate() {
        *byte = (0..8).fold(0, |bits, sub| bits | (of_block[32 * sub + at] >> 4) << sub);
    }
    put_pairs(&of_block, codes);
    true
}

/// The low four bits of codes, two sub-blocks of 32 in 32 bytes.
#[inline(always)]
fn put_pairs(codes: &[u8; 256], bytes: &mut [u8]) {
    for (bytes, pair) in bytes.as_chunks_mut::<32>().0.iter_mut().zip(codes.as_chunks::<64>().0) {
        *bytes = std::array::from_fn(|at| pair[at] & 15 | pair[at + 32] << 4);
    }
}

/// The larger of two numbers. Of zeros it is the first: `max` may give either, and their signs differ.
fn larger(one: f32, other: f32) -> f32 {
    if other > one { other } else { one }
}

/// Puts the sixteen bytes of scales of eight sub-blocks, and gives the codes, from 0 to `TOP`. The scales that are tried put the
/// range of a sub-block at `first` more codes than `TOP`, and at a tenth more for each of `steps`.
#[inline(always)]
fn with_least<const TOP: u8>(values: &[f32; 256], fields: &mut [u8], first: f32, steps: u8) -> Option<[u8; 256]> {
    let largest = largest(values);
    fields.fill(0);
    if largest < ZERO {
        return Some([0; 256]);
    }
    let mut fits = [(0.0, 0.0); 8];
    let unit = if largest.is_finite() { unit(largest) } else { f32::NAN };
    for (fit, values) in fits.iter_mut().zip(values.as_chunks::<32>().0) {
        *fit = fitted::<TOP>(&mapped(values, |value| value / unit), first, steps);
    }
    let (scale, least) = fits.iter().fold((0.0f32, 0.0f32), |most, fit| (larger(most.0, fit.0), larger(most.1, fit.1)));
    let (of_scale, of_least) = (scale * unit / 63.0, least * unit / 63.0);
    if !half_is_finite(of_scale) || !half_is_finite(of_least) {
        fields[..2].copy_from_slice(&NAN);
        return None;
    }
    fields[..2].copy_from_slice(&half(of_scale));
    fields[2..4].copy_from_slice(&half(of_least));
    let mut factors = [0; 12];
    for (sub, fit) in fits.iter().enumerate() {
        put_six_bits(&mut factors, sub, [factor(fit.0, scale), factor(fit.1, least)]);
    }
    fields[4..].copy_from_slice(&factors);
    let (of_scale, of_least) = (lift_f16(round_f16(of_scale)), lift_f16(round_f16(of_least)));
    let mut codes = [0; 256];
    let subs = codes.as_chunks_mut::<32>().0.iter_mut().zip(values.as_chunks::<32>().0);
    for (sub, (codes, values)) in subs.enumerate() {
        let (scale, least) = six_bits(&factors, sub);
        let (scale, least) = (of_scale * f32::from(scale), of_least * f32::from(least));
        if scale != 0.0 {
            *codes = mapped(values, |value| nearest((value + least) / scale).max(0.0).min(f32::from(TOP)) as u8);
        }
    }
    Some(codes)
}

/// A number in sixty-thirds of the largest.
#[inline(always)]
fn factor(number: f32, largest: f32) -> u8 {
    if largest > 0.0 { nearest(63.0 / largest * number).min(63.0) as u8 } else { 0 }
}

/// The reverse of [`six_bits`], for fields that are zero.
#[inline(always)]
fn put_six_bits(packed: &mut [u8; 12], sub: usize, factors: [u8; 2]) {
    for (factor, at) in factors.into_iter().zip([sub % 4, sub % 4 + 4]) {
        packed[at] |= if sub < 4 { factor } else { factor >> 4 << 6 };
    }
    if sub >= 4 {
        packed[sub + 4] = factors[0] & 15 | factors[1] << 4;
    }
}

/// The nearest whole number, of halves the even one, for magnitudes up to 2^22.
#[inline(always)]
fn nearest(value: f32) -> f32 {
    const WHOLE: f32 = 12_582_912.0;
    (value + WHOLE) - WHOLE
}

/// The sum over `N` places, in order.
#[inline(always)]
fn sum<const N: usize>(of: impl Fn(usize) -> f32) -> f32 {
    let mut sum = 0.0;
    for at in 0..N {
        sum += of(at);
    }
    sum
}

/// The scale of a sub-block, and what is taken off its codes times the scale: of those tried, the two with the least weighted
/// squares of errors. Values of large magnitude weigh more.
#[inline(always)]
fn fitted<const TOP: u8>(values: &[f32; 32], first: f32, steps: u8) -> (f32, f32) {
    let typical = (sum::<32>(|at| values[at] * values[at]) / 32.0).sqrt();
    let weights = mapped(values, |value| typical + value.abs());
    let mut least = values.iter().copied().fold(0.0f32, |least, value| if value < least { value } else { least });
    let most = values.iter().copied().fold(f32::NEG_INFINITY, |most, value| if value > most { value } else { most });
    if most <= least {
        return (0.0, -least);
    }
    let top = f32::from(TOP);
    let mut scale = 1.0 / (top / (most - least));
    let mut best = error(values, &weights, &codes(values, top, top / (most - least), least), scale, least);
    let (all, of_values) = (sum::<32>(|at| weights[at]), sum::<32>(|at| weights[at] * values[at]));
    for step in 0..=steps {
        // From the least value of the best so far.
        let by = (first + 0.1 * f32::from(step) + top) / (most - least);
        let codes = codes(values, top, by, least);
        let linear = sum::<32>(|at| weights[at] * codes[at]);
        let squares = sum::<32>(|at| weights[at] * codes[at] * codes[at]);
        let products = sum::<32>(|at| weights[at] * codes[at] * values[at]);
        let divisor = all * squares - linear * linear;
        if divisor <= 0.0 {
            continue;
        }
        let mut now = (all * products - of_values * linear) / divisor;
        let mut off = (squares * of_values - linear * products) / divisor;
        if off > 0.0 {
            (now, off) = (products / squares, 0.0);
        }
        let error = error(values, &weights, &codes, now, off);
        if error < best {
            (best, scale, least) = (error, now, off);
        }
    }
    (scale, -least)
}

/// The codes of values at `by` codes for each unit from the least value on.
#[inline(always)]
fn codes(values: &[f32; 32], top: f32, by: f32, least: f32) -> [f32; 32] {
    mapped(values, |value| nearest(by * (value - least)).max(0.0).min(top))
}

/// The weighted squares of the errors of codes.
#[inline(always)]
fn error(values: &[f32; 32], weights: &[f32; 32], codes: &[f32; 32], scale: f32, least: f32) -> f32 {
    sum::<32>(|at| {
        let off = scale * codes[at] + least - values[at];
        weights[at] * (off * off)
    })
}

#[inline(always)]
pub(super) fn q6_k(values: &[f32; 256], block: &mut [u8; 210]) -> bool {
    let largest = largest(values);
    block.fill(0);
    if largest < ZERO {
        return true;
    }
    let unit = if largest.is_finite() { unit(largest) } else { f32::NAN };
    let mut fits = [0.0; 16];
    for (fit, values) in fits.iter_mut().zip(values.as_chunks::<16>().0) {
        *fit = fitted_around_zero(&mapped(values, |value| value / unit));
    }
    // The first of the largest magnitude.
    let most = fits.iter().fold(0.0f32, |most, fit| if fit.abs() > most.abs() { *fit } else { most });
    let by = -128.0 / most;
    let of_scale = unit / by;
    if !half_is_finite(of_scale) {
        block[208..].copy_from_slice(&NAN);
        return false;
    }
    block[208..].copy_from_slice(&half(of_scale));
    let of_scale = lift_f16(round_f16(of_scale));
    let mut codes = [0; 256];
    for (sub, (codes, values)) in codes.as_chunks_mut::<16>().0.iter_mut().zip(values.as_chunks::<16>().0).enumerate() {
        let factor = nearest(by * fits[sub]).min(127.0);
        block[192 + sub] = factor as i8 as u8;
        let scale = of_scale * factor;
        if scale != 0.0 {
            *codes = mapped(values, |value| (nearest(value / scale).clamp(-32.0, 31.0) + 32.0) as u8);
        }
    }
    for (half, codes) in codes.as_chunks::<128>().0.iter().enumerate() {
        for at in 0..64 {
            block[64 * half + at] = codes[at] & 15 | codes[64 + at] << 4;
        }
        for at in 0..32 {
            block[128 + 32 * half + at] = (0..4).fold(0, |bits, sub| bits | (codes[32 * sub + at] >> 4) << (2 * sub));
        }
    }
    true
}

/// The scale of sixteen values: of nineteen that put the extreme one at or near the code -32, each then fitted to its codes, the
/// one with the least squares of errors, weighted by squares of values.
#[inline(always)]
fn fitted_around_zero(values: &[f32; 16]) -> f32 {
    let extreme = extreme(values, largest(values));
    if extreme == 0.0 {
        return 0.0;
    }
    let weights = mapped(values, |value| value * value);
    let (products, squares) = sums(values, &weights, -32.0 / extreme);
    let mut scale = if squares > 0.0 { products / squares } else { 0.0 };
    let mut best = scale * products;
    for step in (-9i8..=9).filter(|&step| step != 0) {
        let (products, squares) = sums(values, &weights, -(32.0 + 0.1 * f32::from(step)) / extreme);
        if squares > 0.0 && products * products > best * squares {
            scale = products / squares;
            best = scale * products;
        }
    }
    scale
}

/// The weighted products of values and their codes, and the weighted squares of these.
#[inline(always)]
fn sums(values: &[f32; 16], weights: &[f32; 16], by: f32) -> (f32, f32) {
    let codes = mapped(values, |value| nearest(by * value).clamp(-32.0, 31.0));
    let products = sum::<16>(|at| weights[at] * values[at] * codes[at]);
    (products, sum::<16>(|at| weights[at] * codes[at] * codes[at]))
}
