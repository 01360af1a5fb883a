//! Rounding values to a storage type, and the pseudorandom numbers for it.

use crate::float::Float;

/// How patched weights are rounded to their storage type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rounding {
    /// To the nearest value, ties to even.
    #[default]
    NearestEven,
    /// To one of the two neighbouring values, with a probability proportional to nearness, so that the average is right:
    /// changes much smaller than the distance of stored values are not lost. For types of one and two bytes; f32 is not
    /// rounded.
    ///
    /// The choice is a hash of the seed, the tensor's name and the element's index, so equal seeds give equal bytes for every
    /// placement, number of threads and instruction set. Values that the type can represent are unchanged. The average
    /// is right within 2^-20 of the distance of subnormal values, and exactly right elsewhere, up to the type's largest
    /// value.
    Stochastic {
        /// Any number.
        seed: u64,
    },
}

impl Rounding {
    /// The pseudorandom numbers for the tensor `name`; `None` if rounding needs none.
    pub(crate) fn noise(self, name: &str) -> Option<Noise> {
        let Rounding::Stochastic { seed } = self else { return None };
        // FNV-1a, of which the bytes of results depend: it stays as it is.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Some(Noise { key: mixed(mixed(seed) ^ hash) })
    }
}

/// A pseudorandom 32-bit number for each element index of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noise {
    key: u64,
}

impl Noise {
    /// The keys of the 2^32 places from `block` 2^32 on.
    fn keys(self, block: u64) -> [u32; 2] {
        let keys = mixed(self.key ^ mixed(block));
        [keys as u32, (keys >> 32) as u32]
    }
}

/// The finaliser of SplitMix64 after one step (Steele, Lea and Flood, 2014).
fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// The number for `place`: two rounds of a hash of 32 bits (Wellons' lowbias32), which is vector code in every
/// instruction set that has products of 32 bits.
#[inline(always)]
fn drawn(place: u32, keys: [u32; 2]) -> u32 {
    let round = |value: u32| {
        let value = (value ^ value >> 16).wrapping_mul(0x21f0_aaad);
        let value = (value ^ value >> 15).wrapping_mul(0xd35a_2d97);
        value ^ value >> 15
    };
    round(round(place ^ keys[0]).wrapping_add(keys[1]))
}

impl Float {
    /// As [`Float::round`], but [stochastically](Rounding::Stochastic); the first value stands at `first` in its
    /// tensor.
    #[inline(always)]
    pub(crate) fn round_noisy(self, noise: Noise, first: u64, values: &[f32], bytes: &mut [u8]) -> u64 {
        let (mut saturated, mut first, mut values, mut bytes) = (0, first, values, bytes);
        while !values.is_empty() {
            // Runs that stay within 2^32 places of one pair of keys, and whose saturated values fit a u32.
            let run = ((1u64 << 32) - (first & 0xffff_ffff)).min(1 << 16).min(values.len() as u64) as usize;
            let (now, later) = values.split_at(run);
            let (raw, rest) = bytes.split_at_mut((run * self.size()).min(bytes.len()));
            saturated += self.round_run(noise.keys(first >> 32), first as u32, now, raw);
            (first, values, bytes) = (first + run as u64, later, rest);
        }
        saturated
    }

    #[inline(always)]
    fn round_run(self, keys: [u32; 2], first: u32, values: &[f32], bytes: &mut [u8]) -> u64 {
        match self {
            // Scales, of which E8M0 is a type, are not rounded by chance.
            Float::F32 | Float::E8M0 => self.round(values, bytes),
            Float::BF16 => each(keys, first, values, bytes, |bits, draw| (bf16(bits, draw).to_le_bytes(), false)),
            Float::F16 => each(keys, first, values, bytes, |bits, draw| (f16(bits, draw).to_le_bytes(), false)),
            Float::E4M3 => each(keys, first, values, bytes, |bits, draw| {
                let (magnitude, sign) = (bits & !SIGN, (bits & SIGN) >> 24);
                let (rounded, nan) = (beside::<3, 7>(magnitude, draw), magnitude > INFINITY);
                let code = if nan { Float::E4M3.nan() } else { rounded.min(0x7e) | sign };
                ([code as u8], rounded > 0x7e && !nan)
            }),
            Float::E5M2 => each(keys, first, values, bytes, |bits, draw| {
                let (magnitude, sign) = (bits & !SIGN, (bits & SIGN) >> 24);
                let rounded = beside::<2, 15>(magnitude, draw);
                let finite = if magnitude == INFINITY { 0x7c } else { rounded.min(0x7b) };
                let code = if magnitude > INFINITY { Float::E5M2.nan() } else { finite | sign };
                ([code as u8], rounded > 0x7b && magnitude < INFINITY)
            }),
        }
    }
}

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7f80_0000;

#[inline(always)]
fn each<const N: usize>(
    keys: [u32; 2],
    first: u32,
    values: &[f32],
    bytes: &mut [u8],
    round: impl Fn(u32, u32) -> ([u8; N], bool),
) -> u64 {
    let mut saturated = 0u32;
    let places = (0u32..).map(|place| first.wrapping_add(place));
    for ((value, raw), place) in values.iter().zip(bytes.as_chunks_mut::<N>().0).zip(places) {
        let (rounded, beyond) = round(value.to_bits(), drawn(place, keys));
        *raw = rounded;
        saturated += u32::from(beyond);
    }
    u64::from(saturated)
}

/// The sixteen bits that bf16 keeps; carries go to the exponent, and from the largest value to infinity.
#[inline(always)]
fn bf16(bits: u32, draw: u32) -> u16 {
    let rounded = bits.wrapping_add(draw >> 16) >> 16;
    (if bits & !SIGN > INFINITY { Float::BF16.nan() } else { rounded }) as u16
}

#[inline(always)]
fn f16(bits: u32, draw: u32) -> u16 {
    let magnitude = bits & !SIGN;
    let rounded = beside::<10, 15>(magnitude, draw).min(0x7c00) | (bits & SIGN) >> 16;
    (if magnitude > INFINITY { Float::F16.nan() } else { rounded }) as u16
}

/// The code at or next above the bits of a magnitude, of a type with `MANTISSA` bits of fraction and exponent bias
/// `BIAS`; beyond the type's range the code goes on counting.
#[inline(always)]
fn beside<const MANTISSA: u32, const BIAS: u32>(magnitude: u32, draw: u32) -> u32 {
    let shift = 23 - MANTISSA;
    let normal = (magnitude.wrapping_add(draw >> (32 - shift)) >> shift).wrapping_sub((127 - BIAS) << MANTISSA);
    // The multiple of the distance of subnormals in fixed point, with as many bits after it as make 30.
    let after = 30 - MANTISSA;
    let scale = f32::from_bits((127 + BIAS - 1 + 30) << 23);
    let fixed = (f32::from_bits(magnitude) * scale) as i32 as u32;
    let subnormal = fixed.wrapping_add(draw >> (32 - after)) >> after;
    if magnitude < (128 - BIAS) << 23 { subnormal } else { normal }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Float; 4] = [Float::BF16, Float::F16, Float::E4M3, Float::E5M2];

    fn round(float: Float, noise: Noise, first: u64, values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; values.len() * float.size()];
        float.round_noisy(noise, first, values, &mut bytes);
        let mut rounded = vec![0.0; values.len()];
        float.lift(&bytes, &mut rounded);
        rounded
    }

    fn noise(seed: u64) -> Noise {
        Rounding::Stochastic { seed }.noise("blocks.0.weight").unwrap()
    }

    #[test]
    fn values_of_the_type_stay() {
        for float in ALL {
            let codes: Vec<u8> = (0..=u16::MAX).flat_map(|code| code.to_le_bytes()[..float.size()].to_vec()).collect();
            let mut values = vec![0.0; 1 << 16];
            float.lift(&codes, &mut values);
            for (got, value) in round(float, noise(1), 9, &values).iter().zip(&values) {
                assert!(got.to_bits() == value.to_bits() || (got.is_nan() && value.is_nan()), "{float:?} {value}");
            }
        }
    }

    /// The magnitudes that the type has beside this one: the largest that is no larger, and the next.
    fn beside(float: Float, magnitude: f32) -> (f64, f64) {
        let codes: Vec<u8> = (0..=u16::MAX).flat_map(|code| code.to_le_bytes()[..float.size()].to_vec()).collect();
        let mut values = vec![0.0; 1 << 16];
        float.lift(&codes, &mut values);
        let below = values.iter().copied().filter(|&v| v <= magnitude).fold(0.0, f32::max);
        let above = values.iter().copied().filter(|&v| v > below).fold(f32::INFINITY, f32::min);
        (below.into(), above.into())
    }

    /// The larger of the two neighbours where the value's place between them and the number drawn come to one or more.
    #[test]
    fn others_become_one_of_their_two_neighbours_and_are_right_on_average() {
        const COUNT: usize = 1 << 18;
        const ONE: f64 = 4_294_967_296.0;
        // With each type's smallest normal value.
        let two_to = |exponent: i32| f32::powi(2.0, exponent);
        let types = [
            (Float::BF16, f32::MIN_POSITIVE),
            (Float::F16, two_to(-14)),
            (Float::E4M3, two_to(-6)),
            (Float::E5M2, two_to(-14)),
        ];
        for (float, normal) in types {
            for value in [1.0 + 1.0 / 4096.0, -0.3, 0.001, 3e-5, 5e-6, 100.7, -1.0e-9, 0.93] {
                let (low, high) = beside(float, f32::abs(value));
                let at = (f64::from(f32::abs(value)) - low) / (high - low) * ONE;
                // The place of a subnormal value is exact within 2^-20 of the distance.
                let room = if f32::abs(value) < normal { ONE / f64::from(1 << 20) } else { 0.0 };
                let rounded = round(float, noise(7), 0, &vec![value; COUNT]);
                let keys = noise(7).keys(0);
                let mut close = 0;
                for (place, &got) in rounded.iter().enumerate() {
                    let sum = at + f64::from(drawn(place as u32, keys));
                    let wanted = if sum >= ONE { high } else { low };
                    let got = f64::from(got) * f64::from(value.signum());
                    let undecided = (sum - ONE).abs() < room && (got == low || got == high);
                    close += usize::from(got != wanted);
                    assert!(got == wanted || undecided, "{float:?} {value} at {place}: {got} between {low} and {high}");
                }
                assert!(close <= 2, "{float:?} {value}: {close} of {COUNT} went the other way");
                let mean = rounded.iter().map(|&r| f64::from(r)).sum::<f64>() / COUNT as f64;
                // Five standard deviations of the mean of so many choices between the two; 2^-20 for subnormals.
                let room = (high - low) * (2.5 / (COUNT as f64).sqrt() + 1.0 / f64::from(1 << 20));
                let off = (mean - f64::from(value)).abs();
                assert!(off <= room, "{float:?} {value}: off by {off}, room for {room}");
            }
        }
    }

    #[test]
    fn many_values_are_right_on_average_too() {
        let values: Vec<f32> = (0..1 << 18).map(|i| (mixed(i) >> 40) as f32 / (1 << 24) as f32 + 0.25).collect();
        for (float, step) in [(Float::BF16, 1.0 / 256.0), (Float::F16, 1.0 / 2048.0), (Float::E4M3, 1.0 / 16.0)] {
            let rounded = round(float, noise(3), 0, &values);
            let off: f64 = rounded.iter().zip(&values).map(|(r, v)| f64::from(*r) - f64::from(*v)).sum();
            assert!(off.abs() / (values.len() as f64) < step * 4.0 / (values.len() as f64).sqrt(), "{float:?} {off}");
        }
    }

    #[test]
    fn a_value_depends_on_its_place_only() {
        let values: Vec<f32> = (0..1000).map(|i| i as f32 * 0.001_37).collect();
        for first in [0, 5, (1 << 32) - 300, 3 << 33] {
            for float in ALL {
                let whole = round(float, noise(2), first, &values);
                for cut in [1, 299, 300, 301, 777] {
                    let mut parts = round(float, noise(2), first, &values[..cut]);
                    parts.extend(round(float, noise(2), first + cut as u64, &values[cut..]));
                    assert_eq!(parts, whole);
                }
                assert_ne!(round(float, noise(4), first, &values), whole);
                let other = Rounding::Stochastic { seed: 2 }.noise("blocks.1.weight").unwrap();
                assert_ne!(round(float, other, first, &values), whole);
            }
        }
        assert_eq!(Rounding::NearestEven.noise("a"), None);
    }

    #[test]
    fn the_ends_of_the_range_are_those_of_nearest_rounding() {
        for float in ALL {
            for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, -1e30, 0.0, -0.0] {
                let mut nearest = vec![0; float.size()];
                let mut noisy = nearest.clone();
                let counts =
                    [float.round(&[value], &mut nearest), float.round_noisy(noise(1), 0, &[value], &mut noisy)];
                assert_eq!((noisy, counts[1]), (nearest, counts[0]), "{float:?} {value}");
            }
        }
    }

    #[test]
    fn the_numbers_of_a_seed_stay_as_they_are() {
        let keys = Rounding::Stochastic { seed: 42 }.noise("w").unwrap().keys(0);
        assert_eq!(
            [drawn(0, keys), drawn(1, keys), drawn(u32::MAX, keys)],
            [2_718_089_358, 712_796_128, 1_625_339_452]
        );
    }
}
