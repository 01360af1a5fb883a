//! The stored float types as f32: lifting is exact, rounding goes to nearest, ties to even (in E8M0, up).
//!
//! Everything here is branch-free arithmetic on bits, so that a loop over it becomes vector code, and inlined
//! always, so that it becomes vector code of whatever instruction set its caller is compiled for.

use crate::dtype::DType;

/// The float types whose values are all f32 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    F16,
    BF16,
    /// Four exponent bits, no infinity; the largest value is 448.
    E4M3,
    /// Five exponent bits, with infinities; the largest finite value is 57344.
    E5M2,
    /// Eight exponent bits and nothing else: the powers of two from 2^-127 to 2^127, and NaN. The type of scales (OCP
    /// Microscaling Formats 1.0); no weight has it.
    E8M0,
}

impl Float {
    /// The float type of weights of `dtype`; `None` if it is none of these.
    pub(crate) fn of(dtype: DType) -> Option<Float> {
        match dtype {
            DType::F32 => Some(Float::F32),
            DType::F16 => Some(Float::F16),
            DType::BF16 => Some(Float::BF16),
            DType::F8E4M3 => Some(Float::E4M3),
            DType::F8E5M2 => Some(Float::E5M2),
            _ => None,
        }
    }

    /// The element type.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Float::F32 => DType::F32,
            Float::F16 => DType::F16,
            Float::BF16 => DType::BF16,
            Float::E4M3 => DType::F8E4M3,
            Float::E5M2 => DType::F8E5M2,
            Float::E8M0 => DType::F8E8M0,
        }
    }

    /// Bytes of one element.
    pub(crate) fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::BF16 => 2,
            Float::E4M3 | Float::E5M2 | Float::E8M0 => 1,
        }
    }

    /// Whether it is one of the eight-bit types, whose weights often have a scale tensor.
    pub(crate) fn is_fp8(self) -> bool {
        matches!(self, Float::E4M3 | Float::E5M2)
    }

    /// The largest finite value.
    pub(crate) fn largest(self) -> f32 {
        match self {
            Float::F32 => f32::MAX,
            Float::F16 => 65504.0,
            Float::BF16 => f32::from_bits(0x7f7f_0000),
            Float::E4M3 => 448.0,
            Float::E5M2 => 57344.0,
            Float::E8M0 => f32::from_bits(0x7f00_0000),
        }
    }

    /// The code of the NaN that is stored.
    #[inline(always)]
    pub(crate) const fn nan(self) -> u32 {
        match self {
            Float::F32 => 0x7fc0_0000,
            Float::F16 => 0x7e00,
            Float::BF16 => 0x7fc0,
            Float::E4M3 | Float::E5M2 => 0x7f,
            Float::E8M0 => 0xff,
        }
    }

    /// Little-endian `bytes` as values, element by element up to the shorter of the two.
    #[inline(always)]
    pub(crate) fn lift(self, bytes: &[u8], values: &mut [f32]) {
        match self {
            Float::F32 => lift_each(bytes, values, f32::from_le_bytes),
            Float::BF16 => lift_each(bytes, values, |raw| f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16)),
            Float::F16 => lift_each(bytes, values, |raw| lift_f16(u16::from_le_bytes(raw))),
            Float::E4M3 => lift_each(bytes, values, |[raw]| lift_e4m3(raw)),
            Float::E5M2 => lift_each(bytes, values, |[raw]| lift_e5m2(raw)),
            Float::E8M0 => lift_each(bytes, values, |[raw]| lift_e8m0(raw)),
        }
    }

    /// Values as little-endian `bytes`. Beyond the range f16 and bf16 become infinite, the eight-bit types saturate (an
    /// infinity stays one in E5M2). E8M0 takes the power of two at or next above a magnitude, so that nothing that is divided
    /// by it grows beyond what was meant. Every NaN becomes the one of [`nan`](Float::nan), since which one an operation gives
    /// is up to the processor.
    ///
    /// Returns how many values were saturated.
    #[inline(always)]
    pub(crate) fn round(self, values: &[f32], bytes: &mut [u8]) -> u64 {
        match self {
            Float::F32 => round_each(values, bytes, |value| (round_f32(value).to_le_bytes(), false)),
            Float::BF16 => round_each(values, bytes, |value| (round_bf16(value).to_le_bytes(), false)),
            Float::F16 => round_each(values, bytes, |value| (round_f16(value).to_le_bytes(), false)),
            Float::E4M3 => round_each(values, bytes, round_e4m3),
            Float::E5M2 => round_each(values, bytes, round_e5m2),
            Float::E8M0 => round_each(values, bytes, round_e8m0),
        }
    }
}

#[inline(always)]
fn lift_each<const N: usize>(bytes: &[u8], values: &mut [f32], lift: impl Fn([u8; N]) -> f32) {
    for (value, raw) in values.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *value = lift(*raw);
    }
}

#[inline(always)]
fn round_each<const N: usize>(values: &[f32], bytes: &mut [u8], round: impl Fn(f32) -> ([u8; N], bool)) -> u64 {
    let mut saturated = 0u64;
    // Counted in u32 over short runs, which keeps the loop in vectors of one width.
    for (values, bytes) in values.chunks(1 << 16).zip(bytes.chunks_mut(N << 16)) {
        let mut count = 0u32;
        for (value, raw) in values.iter().zip(bytes.as_chunks_mut::<N>().0) {
            let (rounded, beyond) = round(*value);
            *raw = rounded;
            count += u32::from(beyond);
        }
        saturated += u64::from(count);
    }
    saturated
}

const INFINITY: u32 = 0x7f80_0000;

#[inline(always)]
pub(crate) fn lift_f16(raw: u16) -> f32 {
    let magnitude = u32::from(raw) & 0x7fff;
    let finite = lift_magnitude::<10, 15>(magnitude);
    let special = INFINITY | (magnitude & 0x3ff) << 13;
    with_sign(if magnitude >= 0x7c00 { special } else { finite }, u32::from(raw) >> 15)
}

#[inline(always)]
fn lift_e4m3(raw: u8) -> f32 {
    let magnitude = u32::from(raw) & 0x7f;
    let finite = lift_magnitude::<3, 7>(magnitude);
    with_sign(if magnitude == 0x7f { INFINITY | 0x40_0000 } else { finite }, u32::from(raw) >> 7)
}

#[inline(always)]
fn lift_e5m2(raw: u8) -> f32 {
    let magnitude = u32::from(raw) & 0x7f;
    let finite = lift_magnitude::<2, 15>(magnitude);
    let special = INFINITY | (magnitude & 3) << 21;
    with_sign(if magnitude >= 0x7c { special } else { finite }, u32::from(raw) >> 7)
}

#[inline(always)]
fn lift_e8m0(raw: u8) -> f32 {
    let normal = u32::from(raw) << 23;
    // 2^-127 is subnormal in f32.
    let special = if raw == 0 { 0x40_0000 } else { INFINITY | 0x40_0000 };
    f32::from_bits(if raw == 0 || raw == 0xff { special } else { normal })
}

/// The f32 bits of a finite magnitude with `MANTISSA` bits of fraction and exponent bias `BIAS`.
#[inline(always)]
fn lift_magnitude<const MANTISSA: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23);
    // 2^(1 - BIAS - MANTISSA), the distance of subnormals.
    let step = f32::from_bits((128 - BIAS - MANTISSA) << 23);
    let subnormal = (magnitude as i32 as f32 * step).to_bits();
    if magnitude < 1 << MANTISSA { subnormal } else { normal }
}

#[inline(always)]
fn with_sign(magnitude: u32, sign: u32) -> f32 {
    f32::from_bits(magnitude | sign << 31)
}

#[inline(always)]
fn round_f32(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits & !SIGN > INFINITY { Float::F32.nan() } else { bits }
}

#[inline(always)]
fn round_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if bits & !SIGN > INFINITY { Float::BF16.nan() } else { rounded }) as u16
}

const SIGN: u32 = 0x8000_0000;

#[inline(always)]
pub(crate) fn round_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & !SIGN;
    let rounded = round_magnitude::<10, 15>(magnitude).min(0x7c00) | (bits & SIGN) >> 16;
    (if magnitude > INFINITY { Float::F16.nan() } else { rounded }) as u16
}

#[inline(always)]
fn round_e4m3(value: f32) -> ([u8; 1], bool) {
    let bits = value.to_bits();
    let magnitude = bits & !SIGN;
    let (rounded, nan) = (round_magnitude::<3, 7>(magnitude), magnitude > INFINITY);
    let code = rounded.min(0x7e) | (bits & SIGN) >> 24;
    ([if nan { Float::E4M3.nan() } else { code } as u8], rounded > 0x7e && !nan)
}

#[inline(always)]
fn round_e5m2(value: f32) -> ([u8; 1], bool) {
    let bits = value.to_bits();
    let magnitude = bits & !SIGN;
    let rounded = round_magnitude::<2, 15>(magnitude);
    let code = if magnitude == INFINITY { 0x7c } else { rounded.min(0x7b) } | (bits & SIGN) >> 24;
    ([if magnitude > INFINITY { Float::E5M2.nan() } else { code } as u8], rounded > 0x7b && magnitude < INFINITY)
}

#[inline(always)]
fn round_e8m0(value: f32) -> ([u8; 1], bool) {
    let magnitude = value.to_bits() & !SIGN;
    let above = (magnitude + 0x7f_ffff) >> 23;
    let code = if magnitude <= 0x40_0000 { 0 } else { above.min(0xfe) };
    ([if magnitude > INFINITY { Float::E8M0.nan() } else { code } as u8], above > 0xfe && magnitude <= INFINITY)
}

/// The nearest magnitude with `MANTISSA` bits of fraction and exponent bias `BIAS`, ties to even; beyond the type's
/// range the code goes on counting, so the caller compares it with the largest code.
#[inline(always)]
fn round_magnitude<const MANTISSA: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let shift = 23 - MANTISSA;
    let even = magnitude >> shift & 1;
    let normal =
        (magnitude.wrapping_add((1 << (shift - 1)) - 1 + even) >> shift).wrapping_sub((127 - BIAS) << MANTISSA);
    // Adding the number whose unit in the last place is the distance of subnormals rounds to a multiple of it.
    let magic = f32::from_bits((128 - BIAS - MANTISSA + 23) << 23);
    let subnormal = (f32::from_bits(magnitude) + magic).to_bits().wrapping_sub(magic.to_bits());
    if magnitude < (128 - BIAS) << 23 { subnormal } else { normal }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn lift(float: Float, bytes: &[u8]) -> f32 {
        let mut value = [0.0];
        float.lift(bytes, &mut value);
        value[0]
    }

    fn round(float: Float, value: f32) -> (Vec<u8>, u64) {
        let mut bytes = vec![0; float.size()];
        let saturated = float.round(&[value], &mut bytes);
        (bytes, saturated)
    }

    #[test]
    fn every_sixteen_bit_value_lifts_and_comes_back() {
        for bits in 0..=u16::MAX {
            let raw = bits.to_le_bytes();
            let (half, brain) = (lift(Float::F16, &raw), lift(Float::BF16, &raw));
            assert!(
                half == f16::from_bits(bits).to_f32() || (half.is_nan() && f16::from_bits(bits).is_nan()),
                "{bits:x}"
            );
            assert!(brain == bf16::from_bits(bits).to_f32() || (brain.is_nan() && bf16::from_bits(bits).is_nan()));
            if !half.is_nan() {
                assert_eq!(round(Float::F16, half).0, raw);
            }
            if !brain.is_nan() {
                assert_eq!(round(Float::BF16, brain).0, raw);
            }
        }
    }

    #[test]
    fn every_nan_is_stored_as_one() {
        for float in [Float::F32, Float::F16, Float::BF16, Float::E4M3, Float::E5M2, Float::E8M0] {
            for bits in [0x7f80_0001u32, 0x7fc0_0000, 0x7fff_ffff, 0xff80_0001, 0xffc0_0000, 0xffc1_2345] {
                let wanted = &float.nan().to_le_bytes()[..float.size()];
                assert_eq!((&*round(float, f32::from_bits(bits)).0, true), (wanted, lift(float, wanted).is_nan()));
            }
        }
    }

    #[test]
    fn rounding_agrees_with_half_on_a_comb_of_all_floats() {
        for bits in
            (0..=u32::MAX).step_by(9973).chain([0x477f_efff, 0x477f_f000, 0x3380_0000, 0x3300_0000, 0x3300_0001])
        {
            let value = f32::from_bits(bits);
            let half = f16::from_le_bytes(round(Float::F16, value).0.try_into().unwrap());
            let brain = bf16::from_le_bytes(round(Float::BF16, value).0.try_into().unwrap());
            if value.is_nan() {
                assert!(half.is_nan() && brain.is_nan());
            } else {
                assert_eq!((half, brain), (f16::from_f32(value), bf16::from_f32(value)), "{bits:x}");
            }
        }
    }

    #[test]
    fn eight_bit_values_are_those_of_the_format() {
        let e4m3 = |code| lift(Float::E4M3, &[code]);
        assert_eq!([e4m3(0x7e), e4m3(0x08), e4m3(0x01), e4m3(0xb8)], [448.0, 0.015625, 0.001953125, -1.0]);
        let e5m2 = |code| lift(Float::E5M2, &[code]);
        assert_eq!(
            [e5m2(0x7b), e5m2(0x04), e5m2(0x01), e5m2(0xfc)],
            [57344.0, 6.1035156e-5, 1.5258789e-5, f32::NEG_INFINITY]
        );
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan() && e5m2(0x7d).is_nan());
    }

    /// The nearest finite code by trying all of them; of two equally near the even one.
    fn nearest(float: Float, value: f32) -> u8 {
        let finite =
            (0..=u8::MAX).filter(|&c| lift(float, &[c]).is_finite() && (c & 0x80 != 0) == value.is_sign_negative());
        let distance = |c: u8| (f64::from(lift(float, &[c])) - f64::from(value)).abs();
        finite.min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
    }

    #[test]
    fn eight_bit_rounding_is_nearest_even_and_saturates() {
        for float in [Float::E4M3, Float::E5M2] {
            for bits in (0x3000_0000..0x4800_0000u32).step_by(65_521).chain((0..0x800).map(|b| 0x3000_0000 + (b << 17)))
            {
                for value in [f32::from_bits(bits), -f32::from_bits(bits)] {
                    assert_eq!(round(float, value).0, [nearest(float, value)], "{float:?} {value}");
                }
            }
        }
        assert_eq!(round(Float::E4M3, 464.0), (vec![0x7e], 0));
        assert_eq!(round(Float::E4M3, 464.1), (vec![0x7e], 1));
        assert_eq!(round(Float::E4M3, f32::NEG_INFINITY), (vec![0xfe], 1));
        assert_eq!(round(Float::E5M2, 61440.0), (vec![0x7b], 1));
        assert_eq!(round(Float::E5M2, f32::MAX), (vec![0x7b], 1));
        assert_eq!(round(Float::E5M2, f32::INFINITY), (vec![0x7c], 0));
        for float in [Float::E4M3, Float::E5M2] {
            assert!(lift(float, &round(float, f32::NAN).0).is_nan());
        }
    }

    #[test]
    fn exponents_are_powers_of_two_and_round_up() {
        for code in 0..=254u8 {
            let value = lift(Float::E8M0, &[code]);
            assert_eq!(f64::from(value), 2f64.powi(i32::from(code) - 127), "{code}");
            assert_eq!(round(Float::E8M0, value), (vec![code], 0));
            assert_eq!(round(Float::E8M0, -value).0, [code]);
            assert_eq!(round(Float::E8M0, value * 0.75).0, [code], "{code}");
        }
        assert!(lift(Float::E8M0, &[255]).is_nan());
        assert_eq!(round(Float::E8M0, 0.0), (vec![0], 0));
        assert_eq!(round(Float::E8M0, f32::NAN), (vec![255], 0));
        for beyond in [f32::MAX, f32::INFINITY] {
            assert_eq!(round(Float::E8M0, beyond), (vec![254], 1));
        }
    }
}
