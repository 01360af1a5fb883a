//! Values as blocks, in the formats with one scale for all values of a block.
//!
//! The bytes are those of gguf-py's `quantize` (for IQ4_NL, of `quantize_iq4_nl` in llama.cpp, `ggml/src/ggml-quants.c`), on
//! finite values whose scale f32 can divide by. A block with a value that is NaN or infinite becomes NaN as a whole: its
//! scale is NaN. MXFP4 has no such scale; its block becomes infinite. Where values are so small that the reciprocal of their
//! scale is infinite, they become zero.

use super::blocks::{IQ4, doubled_e2m1, half_power};
use super::parts::mapped;
use crate::float::{Float, round_f16};

/// A half float as bytes.
#[inline(always)]
pub(super) fn half(value: f32) -> [u8; 2] {
    round_f16(value).to_le_bytes()
}

/// Whether a value is finite as a half float.
#[inline(always)]
pub(super) fn half_is_finite(value: f32) -> bool {
    round_f16(value) & 0x7c00 != 0x7c00
}

/// The NaN that scales of a block that cannot be expressed are set to.
pub(super) const NAN: [u8; 2] = (Float::F16.nan() as u16).to_le_bytes();

/// The largest magnitude; NaN or infinite if any value is.
#[inline(always)]
pub(super) fn largest<const N: usize>(values: &[f32; N]) -> f32 {
    // Bits of magnitudes are in the order of these, and those of NaN are above all.
    f32::from_bits(values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff)))
}

/// The first of the values with the largest magnitude.
#[inline(always)]
pub(super) fn extreme<const N: usize>(values: &[f32; N], largest: f32) -> f32 {
    values.iter().copied().find(|value| value.abs() == largest).unwrap_or_default()
}

/// One by a scale; zero for a scale that has no reciprocal.
#[inline(always)]
fn reciprocal(scale: f32) -> f32 {
    let reciprocal = 1.0 / scale;
    if reciprocal.is_finite() { reciprocal } else { 0.0 }
}

/// The least and the largest value.
#[inline(always)]
fn ends(values: &[f32; 32]) -> (f32, f32) {
    let least = values.iter().copied().fold(f32::INFINITY, |least, value| if value < least { value } else { least });
    (least, values.iter().copied().fold(f32::NEG_INFINITY, |most, value| if value > most { value } else { most }))
}

/// Codes in half bytes: those of the first half of the values in the low ones.
#[inline(always)]
fn put_nibbles(codes: &[u8; 32], bytes: &mut [u8]) {
    let (low, high) = codes.split_at(16);
    bytes.iter_mut().zip(low.iter().zip(high)).for_each(|(byte, (low, high))| *byte = low & 15 | high << 4);
}

/// The fifth bits of codes.
#[inline(always)]
fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    codes.iter().enumerate().fold(0u32, |bits, (at, code)| bits | u32::from(code >> 4 & 1) << at).to_le_bytes()
}

#[inline(always)]
pub(super) fn q4_0(values: &[f32; 32], block: &mut [u8; 18]) -> bool {
    let Some(codes) = around_zero::<8>(values, &mut block[..2]) else {
        block[2..].fill(0);
        return false;
    };
    put_nibbles(&codes, &mut block[2..]);
    true
}

#[inline(always)]
pub(super) fn q5_0(values: &[f32; 32], block: &mut [u8; 22]) -> bool {
    let Some(codes) = around_zero::<16>(values, &mut block[..2]) else {
        block[2..].fill(0);
        return false;
    };
    block[2..6].copy_from_slice(&fifth_bits(&codes));
    put_nibbles(&codes, &mut block[6..]);
    true
}

/// Puts a scale for codes that are `ZERO` at zero, of which the value with the largest magnitude has the code 0.
#[inline(always)]
fn around_zero<const ZERO: u8>(values: &[f32; 32], scale_bytes: &mut [u8]) -> Option<[u8; 32]> {
    let largest = largest(values);
    if !largest.is_finite() {
        scale_bytes.copy_from_slice(&NAN);
        return None;
    }
    let zero = f32::from(ZERO);
    let scale = extreme(values, largest) / -zero;
    scale_bytes.copy_from_slice(&half(scale));
    let by = reciprocal(scale);
    Some(mapped(values, |value| ((value * by + (zero + 0.5)) as u8).min(2 * ZERO - 1)))
}

#[inline(always)]
pub(super) fn q4_1(values: &[f32; 32], block: &mut [u8; 20]) -> bool {
    let Some(codes) = from_least::<15>(values, &mut block[..4]) else {
        block[4..].fill(0);
        return false;
    };
    put_nibbles(&codes, &mut block[4..]);
    true
}

#[inline(always)]
pub(super) fn q5_1(values: &[f32; 32], block: &mut [u8; 24]) -> bool {
    let Some(codes) = from_least::<31>(values, &mut block[..4]) else {
        block[4..].fill(0);
        return false;
    };
    block[4..8].copy_from_slice(&fifth_bits(&codes));
    put_nibbles(&codes, &mut block[8..]);
    true
}

/// Puts the scale and the least value for codes of which the least value has 0 and the largest `TOP`.
#[inline(always)]
fn from_least<const TOP: u8>(values: &[f32; 32], bytes: &mut [u8]) -> Option<[u8; 32]> {
    let (of_scale, of_least) = bytes.split_at_mut(2);
    if !largest(values).is_finite() {
        of_scale.copy_from_slice(&NAN);
        of_least.copy_from_slice(&NAN);
        return None;
    }
    let (least, most) = ends(values);
    let scale = (most - least) / f32::from(TOP);
    of_scale.copy_from_slice(&half(scale));
    of_least.copy_from_slice(&half(least));
    let by = reciprocal(scale);
    Some(mapped(values, |value| (((value - least) * by + 0.5) as u8).min(TOP)))
}

#[inline(always)]
pub(super) fn q8_0(values: &[f32; 32], block: &mut [u8; 34]) -> bool {
    let largest = largest(values);
    if !largest.is_finite() {
        block.fill(0);
        block[..2].copy_from_slice(&NAN);
        return false;
    }
    let scale = largest / 127.0;
    block[..2].copy_from_slice(&half(scale));
    let by = reciprocal(scale);
    block[2..].iter_mut().zip(values).for_each(|(code, value)| *code = half_away(value * by) as i8 as u8);
    true
}

/// The nearest whole number, of halves the one with the larger magnitude, for magnitudes below 2^31.
#[inline(always)]
fn half_away(value: f32) -> i32 {
    let magnitude = value.abs();
    let whole = magnitude as i32;
    let nearest = whole + i32::from(magnitude - whole as f32 >= 0.5);
    if value < 0.0 { -nearest } else { nearest }
}

/// The power of two is that of the largest magnitude, from which the largest code is two above: a logarithm that is
/// rounded to f32, as gguf-py has it, so a magnitude just below a power of two counts as that.
#[inline(always)]
pub(super) fn mxfp4(values: &[f32; 32], block: &mut [u8; 17]) -> bool {
    let largest = largest(values);
    if !largest.is_finite() {
        block[0] = 255;
        let code = |value: f32| 7 | ((value.to_bits() >> 31) as u8) << 3;
        put_nibbles(&mapped(values, code), &mut block[1..]);
        return false;
    }
    let exponent = (f64::from(largest).log2() as f32).floor() + 125.0;
    block[0] = if largest > 0.0 { exponent as u8 } else { 0 };
    let scale = half_power(block[0]);
    let (mut codes, mut errors) = ([0; 32], [f32::INFINITY; 32]);
    for code in 0..16 {
        let of_code = scale * doubled_e2m1(code);
        for ((value, best), least) in values.iter().zip(&mut codes).zip(&mut errors) {
            let error = (of_code - value).abs();
            *best = if error < *least { code } else { *best };
            *least = if error < *least { error } else { *least };
        }
    }
    put_nibbles(&codes, &mut block[1..]);
    true
}

/// The scale is the best by squares of errors, weighted by squares of values, of fifteen that put the extreme value at or near
/// the end of the table, each then fitted to its codes.
#[inline(always)]
pub(super) fn iq4_nl(values: &[f32; 32], block: &mut [u8; 18]) -> bool {
    /// The magnitude below which values are zero.
    const ZERO: f32 = 1e-15;
    let largest = largest(values);
    if !largest.is_finite() {
        block.fill(0);
        block[..2].copy_from_slice(&NAN);
        return false;
    }
    let mut scale = 0.0;
    if largest >= ZERO {
        // Scaled by a power of two, so that no square overflows.
        let unit = unit(largest);
        let scaled = mapped(values, |value| value / unit);
        scale = iq4_scale(&scaled, extreme(&scaled, largest / unit)) * unit;
    }
    block[..2].copy_from_slice(&half(scale));
    let by = reciprocal(scale);
    put_nibbles(&mapped(values, |value| iq4_code(value * by)), &mut block[2..]);
    half_is_finite(scale)
}

#[inline(always)]
fn iq4_scale(values: &[f32; 32], extreme: f32) -> f32 {
    let end = f32::from(IQ4[0]);
    let (mut scale, mut best) = (0.0, -1.0);
    for reciprocal in
        std::iter::once(1.0 / (-extreme / end)).chain((-7i8..=7).map(|by| (f32::from(by) + end) / extreme))
    {
        let (mut products, mut squares) = (0.0, 0.0);
        for value in values {
            let of_code = f32::from(IQ4[usize::from(iq4_code(value * reciprocal))]);
            let weight = value * value;
            products += weight * of_code * value;
            squares += weight * of_code * of_code;
        }
        if squares > 0.0 && (best < 0.0 || products * products > best * squares) {
            scale = products / squares;
            best = scale * products;
        }
    }
    scale
}

/// The code with the nearest value of the table; half way, the one with the larger.
#[inline(always)]
fn iq4_code(value: f32) -> u8 {
    IQ4.windows(2).map(|ends| u8::from(2.0 * value >= f32::from(ends[0]) + f32::from(ends[1]))).sum()
}

/// The power of two at or next below a magnitude, which is at least 2^-126.
#[inline(always)]
pub(super) fn unit(magnitude: f32) -> f32 {
    f32::from_bits(magnitude.to_bits() & 0x7f80_0000)
}
