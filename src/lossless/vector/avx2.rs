//! The loops over codes in intrinsics of AVX2 and BMI2.
#![expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")]

use std::arch::x86_64::*;

use super::super::block::Kernels;
use super::super::decode::{self, Damage, Parts};
use super::super::encode::{self, Scratch};
use super::super::fields::Fields;
use super::super::ladder::{self, ESCAPE, Levels, Tail, WINDOW, place, threes};
use super::super::table::Table;
use super::super::{CODES, Tile};
use super::window::Window;

/// A byte of one, eight times.
const ONES: u64 = 0x0101_0101_0101_0101;

/// A processor with AVX2 and BMI2, and fast `pdep` and `pext`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn here() -> Option<Avx2> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt");
        (has && !has_slow_pdep()).then_some(Avx2(()))
    }
}

/// Whether the processor takes a step for each bit of `pdep` and `pext`, as AMD's do before Zen 3.
fn has_slow_pdep() -> bool {
    #[allow(unused_unsafe, reason = "the call is safe in later versions of Rust")]
    // SAFETY: processors with AVX2 have `cpuid`.
    let (vendor, model) = unsafe { (__cpuid(0), __cpuid(1)) };
    let is_amd = vendor.ebx == u32::from_le_bytes(*b"Auth") || vendor.ebx == u32::from_le_bytes(*b"Hygo");
    let family = (model.eax >> 8 & 15) + (model.eax >> 20 & 255);
    is_amd && family < 0x19
}

impl Kernels for Avx2 {
    #[inline(always)]
    fn ranks(self, table: &Table, exponents: &Tile, to: &mut Tile) {
        // SAFETY: the value exists only where the processor said that it has these features.
        unsafe { ranks(table, exponents, to) }
    }

    #[inline(always)]
    fn encode(self, ranks: &Tile, codes: &mut [u8; CODES], tail: &mut Tail) {
        // SAFETY: as above.
        unsafe { encode_tile(ranks, codes, tail) }
    }

    #[inline(always)]
    fn decode(self, codes: &[u8; CODES], tail: &[u8; WINDOW], table: &[u8; 16], exponents: &mut Tile) -> Levels {
        // SAFETY: as above.
        unsafe { decode_tile(codes, tail, table, exponents) }
    }

    #[inline(always)]
    fn pack<const WIDTH: usize>(self, rests: &Tile, packed: &mut [u8]) {
        // SAFETY: as above.
        unsafe { pack::<WIDTH>(rests, packed) }
    }

    #[inline(always)]
    fn unpack<const WIDTH: usize>(self, packed: &[u8], rests: &mut Tile) {
        // SAFETY: as above.
        unsafe { unpack::<WIDTH>(packed, rests) }
    }
}

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn encode(
    kernels: Avx2,
    fields: Fields,
    number: u64,
    weights: &[u8],
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> u64 {
    each_type!(fields, |fields| encode::encode(kernels, fields, number, weights, scratch, out))
}

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn decode(
    kernels: Avx2,
    fields: Fields,
    number: u64,
    parts: &Parts<'_>,
    weights: &mut [u8],
) -> Result<(), Damage> {
    each_type!(fields, |fields| decode::decode(kernels, fields, number, parts, weights))
}

/// As [`ladder::ranks`]: two tables of sixteen ranks for the exponents up to the largest of the table.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn ranks(table: &Table, exponents: &Tile, to: &mut Tile) {
    let Some(Window { base, ranks, of_zero }) = Window::of(table) else {
        return ladder::ranks(&table.rank_of, exponents, to);
    };
    let window: [[u8; 16]; 2] = bytemuck::cast(ranks);
    let [low, high] = window.map(|half| _mm256_broadcastsi128_si256(bytemuck::cast(half)));
    let (bases, of_zero) = (_mm256_set1_epi8(base as i8), _mm256_set1_epi8(of_zero as i8));
    for (exponents, to) in exponents.as_chunks::<32>().0.iter().zip(to.as_chunks_mut::<32>().0) {
        let exponents: __m256i = bytemuck::cast(*exponents);
        // A shuffle gives zero for a place above 127, and otherwise takes its lowest four bits.
        let from_low = _mm256_sub_epi8(exponents, bases);
        let from_high = _mm256_sub_epi8(from_low, _mm256_set1_epi8(16));
        let low = _mm256_shuffle_epi8(low, _mm256_adds_epu8(from_low, _mm256_set1_epi8(0x70)));
        let high = _mm256_shuffle_epi8(high, _mm256_adds_epu8(from_high, _mm256_set1_epi8(0x70)));
        let zero = _mm256_and_si256(of_zero, _mm256_cmpeq_epi8(exponents, _mm256_setzero_si256()));
        let ranks = _mm256_or_si256(_mm256_or_si256(low, high), zero);
        *to = bytemuck::cast(_mm256_xor_si256(ranks, _mm256_set1_epi8(ESCAPE as i8)));
    }
}

// The loops below are written out, since a closure that an iterator calls is a function of its own: it cannot be inlined
// into the iterator's, which is compiled for any processor.

/// As [`ladder::encode`]: 32 ranks at a time.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn encode_tile(ranks: &Tile, codes: &mut [u8; CODES], tail: &mut Tail) {
    let (three, two, five) = (_mm256_set1_epi8(3), _mm256_set1_epi8(2), _mm256_set1_epi8(5));
    let (six, seven) = (_mm256_set1_epi8(6), _mm256_set1_epi8(7));
    for (lane, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let ranks: __m256i = bytemuck::cast([
            eight(ranks, place(lane, 0)),
            eight(ranks, place(lane, 1)),
            eight(ranks, place(lane, 2)),
            eight(ranks, place(lane, 3)),
        ]);
        let first = _mm256_min_epu8(ranks, three);
        // The codes of two groups in turn; then nibbles, bytes and words of them.
        let pairs = _mm256_unpacklo_epi8(first, _mm256_srli_si256::<8>(first));
        let nibbles = _mm256_maddubs_epi16(pairs, _mm256_set1_epi16(0x0401));
        let bytes = _mm256_madd_epi16(nibbles, _mm256_set1_epi32(0x0010_0001));
        let bytes = _mm256_packus_epi32(bytes, bytes);
        let bytes: [u32; 8] = bytemuck::cast(_mm256_packus_epi16(bytes, bytes));
        *codes = (u64::from(bytes[0]) | u64::from(bytes[4]) << 32).to_le_bytes();

        let is_second = _mm256_cmpgt_epi8(ranks, two);
        let masks: [u64; 4] = bytemuck::cast(_mm256_and_si256(is_second, three));
        let second: [u64; 4] = bytemuck::cast(_mm256_min_epu8(_mm256_subs_epu8(ranks, three), three));
        tail.second.push(_pext_u64(second[0], masks[0]), masks[0].count_ones());
        tail.second.push(_pext_u64(second[1], masks[1]), masks[1].count_ones());
        tail.second.flush();
        tail.second.push(_pext_u64(second[2], masks[2]), masks[2].count_ones());
        tail.second.push(_pext_u64(second[3], masks[3]), masks[3].count_ones());
        tail.second.flush();
        let is_third = _mm256_cmpgt_epi8(ranks, five);
        if _mm256_movemask_epi8(is_third) != 0 {
            let masks: [u64; 4] = bytemuck::cast(_mm256_and_si256(is_third, seven));
            let third: [u64; 4] = bytemuck::cast(_mm256_subs_epu8(ranks, six));
            for group in 0..4 {
                tail.third.push(_pext_u64(third[group], masks[group]), masks[group].count_ones());
                tail.third.flush();
            }
        }
    }
}

/// As [`ladder::decode`]: eight codes at a time, for which the bits of the next levels are spread out.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn decode_tile(codes: &[u8; CODES], tail: &[u8; WINDOW], table: &[u8; 16], exponents: &mut Tile) -> Levels {
    let codes = codes.as_chunks::<8>().0;
    let mut second = 0;
    for codes in codes {
        second += threes(u64::from_le_bytes(*codes)) as usize;
    }
    let third = (2 * second).next_multiple_of(8);
    let (mut at_second, mut at_third) = (0, third);
    let table = _mm256_broadcastsi128_si256(bytemuck::cast(*table));
    for (lane, codes) in codes.iter().enumerate() {
        let codes = u64::from_le_bytes(*codes);
        let mut ranks = [0u64; 4];
        for (group, ranks) in ranks.iter_mut().enumerate() {
            let codes = codes >> (32 * (group / 2) + 2 * (group % 2)) & 0x3333_3333;
            let first = _pdep_u64(codes, 15 * ONES);
            let is_second = first & first >> 1 & ONES;
            let second = first + _pdep_u64(bits(tail, at_second), 3 * is_second);
            at_second += 2 * is_second.count_ones() as usize;
            // Six is the only one of up to six that has both bits.
            let is_third = second >> 1 & second >> 2 & ONES;
            *ranks = second + _pdep_u64(bits(tail, at_third), 7 * is_third);
            at_third += 3 * is_third.count_ones() as usize;
        }
        let found: [[u8; 8]; 4] = bytemuck::cast(_mm256_shuffle_epi8(table, bytemuck::cast(ranks)));
        for group in 0..4 {
            exponents[place(lane, group)..][..8].copy_from_slice(&found[group]);
        }
    }
    Levels { second, third: (at_third - third) / 3 }
}

/// The bits of a tail from `at` on, 57 or more. The place is within the tail, whose bytes are numbered with ten bits; the
/// compiler sees that eight are there.
#[inline(always)]
fn bits(tail: &[u8; WINDOW], at: usize) -> u64 {
    u64::from_le_bytes(eight(tail, (at / 8) & 1023)) >> (at % 8)
}

/// As [`ladder::pack`].
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn pack<const WIDTH: usize>(rests: &Tile, packed: &mut [u8]) {
    let mask = ((1 << WIDTH) - 1) * ONES;
    for (lane, packed) in packed.chunks_exact_mut(4 * WIDTH).enumerate() {
        let mut number = 0;
        for group in 0..4 {
            let rests = u64::from_le_bytes(eight(rests, place(lane, group)));
            number |= u128::from(_pext_u64(rests, mask)) << (8 * WIDTH * group);
        }
        packed.copy_from_slice(&number.to_le_bytes()[..4 * WIDTH]);
    }
}

/// As [`ladder::unpack`].
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn unpack<const WIDTH: usize>(packed: &[u8], rests: &mut Tile) {
    let mask = ((1 << WIDTH) - 1) * ONES;
    for (lane, packed) in packed.chunks_exact(4 * WIDTH).enumerate() {
        let mut number = [0; 16];
        number[..4 * WIDTH].copy_from_slice(packed);
        let number = u128::from_le_bytes(number);
        for group in 0..4 {
            let unpacked = _pdep_u64((number >> (8 * WIDTH * group)) as u64, mask).to_le_bytes();
            rests[place(lane, group)..][..8].copy_from_slice(&unpacked);
        }
    }
}

/// Eight bytes from `at` on.
#[inline(always)]
fn eight(bytes: &[u8], at: usize) -> [u8; 8] {
    bytes[at..].first_chunk().copied().unwrap_or_default()
}
