//! The loops over codes in intrinsics of NEON, for two lanes at a time.
//!
//! There is neither `pext` nor `pdep`. Bits of a level are put together as a tree instead: of two neighbours, each with its bits and
//! how many these are, the second is shifted by the count of the first, in lanes of 8, 16, 32 and 64 bits; and taken apart the
//! same way back. A shift takes the lowest byte of its lane as the count, so what lies above it does not matter.
#![expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")]

use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;

use super::super::block::Kernels;
use super::super::decode::{self, Damage, Parts};
use super::super::encode::{self, Scratch};
use super::super::fields::Fields;
use super::super::ladder::{self, ESCAPE, Levels, SECOND, THIRD, Tail, WINDOW, place};
use super::super::table::Table;
use super::super::{CODES, Tile, sum};
use super::window::Window;

/// A little-endian processor with NEON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neon(());

impl Neon {
    pub(super) fn here() -> Option<Neon> {
        (cfg!(target_endian = "little") && is_aarch64_feature_detected!("neon")).then_some(Neon(()))
    }
}

impl Kernels for Neon {
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
        unsafe {
            match WIDTH {
                3 => pack_3(rests, packed),
                4 => pack_4(rests, packed),
                _ => ladder::pack::<WIDTH>(rests, packed),
            }
        }
    }

    #[inline(always)]
    fn unpack<const WIDTH: usize>(self, packed: &[u8], rests: &mut Tile) {
        // SAFETY: as above.
        unsafe {
            match WIDTH {
                3 => unpack_3(packed, rests),
                4 => unpack_4(packed, rests),
                _ => ladder::unpack::<WIDTH>(packed, rests),
            }
        }
    }

    #[inline(always)]
    fn sum(self, bytes: &[u8], first: usize) -> u64 {
        // SAFETY: as above.
        unsafe { words(bytes, first) }
    }
}

#[target_feature(enable = "neon")]
pub(super) fn encode(
    kernels: Neon,
    fields: Fields,
    number: u64,
    weights: &[u8],
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> u64 {
    each_type!(fields, |fields| encode::encode(kernels, fields, number, weights, scratch, out))
}

#[target_feature(enable = "neon")]
pub(super) fn decode(
    kernels: Neon,
    fields: Fields,
    number: u64,
    parts: &Parts<'_>,
    weights: &mut [u8],
) -> Result<(), Damage> {
    each_type!(fields, |fields| decode::decode(kernels, fields, number, parts, weights))
}

/// As [`ladder::ranks`]: a table of 32 ranks, which gives zero for any other place.
#[target_feature(enable = "neon")]
fn ranks(table: &Table, exponents: &Tile, to: &mut Tile) {
    let Some(Window { base, ranks, of_zero }) = Window::of(table) else {
        return ladder::ranks(&table.rank_of, exponents, to);
    };
    let [low, high]: [uint8x16_t; 2] = bytemuck::cast(ranks);
    let (window, base, of_zero) = (uint8x16x2_t(low, high), vdupq_n_u8(base), vdupq_n_u8(of_zero));
    for (exponents, to) in exponents.as_chunks::<16>().0.iter().zip(to.as_chunks_mut::<16>().0) {
        let exponents: uint8x16_t = bytemuck::cast(*exponents);
        let in_window = vqtbl2q_u8(window, vsubq_u8(exponents, base));
        let ranks = vbslq_u8(vceqzq_u8(exponents), of_zero, in_window);
        *to = bytemuck::cast(veorq_u8(ranks, vdupq_n_u8(ESCAPE)));
    }
}

/// As [`ladder::encode`].
#[target_feature(enable = "neon")]
fn encode_tile(ranks: &Tile, codes: &mut [u8; CODES], tail: &mut Tail) {
    let most = vdupq_n_u8(SECOND);
    for (pair, codes) in codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let [a, b, c, d] = gather(ranks, 2 * pair);
        // Of either lane, every other weight.
        let (even, odd) = ([vuzp1q_u8(a, b), vuzp1q_u8(c, d)], [vuzp2q_u8(a, b), vuzp2q_u8(c, d)]);

        // A byte has two weights of a group, and with two bits between them those of the next group.
        let first = vsliq_n_u8::<4>(vminq_u8(even[0], most), vminq_u8(odd[0], most));
        let second = vsliq_n_u8::<4>(vminq_u8(even[1], most), vminq_u8(odd[1], most));
        let (first, second) = (vreinterpretq_u32_u8(first), vreinterpretq_u32_u8(second));
        *codes = bytemuck::cast(vorrq_u32(vuzp1q_u32(first, second), vshlq_n_u32::<2>(vuzp2q_u32(first, second))));

        let of_first = pairs::<2>(even[0], odd[0], SECOND);
        let of_second = pairs::<2>(even[1], odd[1], SECOND);
        let (bits, counts) = sixteens(eights(fours(of_first, of_second)));
        let (bits, counts): ([u32; 4], [u32; 4]) = (bytemuck::cast(bits), bytemuck::cast(counts));
        for (bits, count) in bits.into_iter().zip(counts) {
            tail.second.push(u64::from(bits), count);
            tail.second.flush();
        }
        if vmaxvq_u8(vmaxq_u8(vmaxq_u8(even[0], even[1]), vmaxq_u8(odd[0], odd[1]))) >= THIRD {
            for lane in 0..2 {
                let (bits, counts) = pairs::<3>(even[lane], odd[lane], THIRD);
                let (bits, counts) = sixteens(eights((bits, counts)));
                let (bits, counts) = whole((bits, counts));
                let (bits, counts): ([u64; 2], [u64; 2]) = (bytemuck::cast(bits), bytemuck::cast(counts));
                for (bits, count) in bits.into_iter().zip(counts) {
                    tail.third.push(bits, count as u32);
                    tail.third.flush();
                }
            }
        }
    }
}

/// The codes of pairs of ranks on the level of `WIDTH` bits that begins with a rank, and how many bits each pair has.
#[inline]
#[target_feature(enable = "neon")]
fn pairs<const WIDTH: u32>(even: uint8x16_t, odd: uint8x16_t, first: u8) -> (uint8x16_t, uint8x16_t) {
    let (first, most, width) = (vdupq_n_u8(first), vdupq_n_u8((1 << WIDTH) - 1), vdupq_n_u8(WIDTH as u8));
    let codes = [even, odd].map(|ranks| vminq_u8(vqsubq_u8(ranks, first), most));
    let counts = [even, odd].map(|ranks| vandq_u8(vcgeq_u8(ranks, first), width));
    let bits = vorrq_u8(codes[0], vshlq_u8(codes[1], vreinterpretq_s8_u8(counts[0])));
    (bits, vaddq_u8(counts[0], counts[1]))
}

/// Neighbouring bytes put together, where both fit a byte.
#[inline]
#[target_feature(enable = "neon")]
fn fours(first: (uint8x16_t, uint8x16_t), second: (uint8x16_t, uint8x16_t)) -> (uint8x16_t, uint8x16_t) {
    let counts = vreinterpretq_s8_u8(vuzp1q_u8(first.1, second.1));
    let bits = vorrq_u8(vuzp1q_u8(first.0, second.0), vshlq_u8(vuzp2q_u8(first.0, second.0), counts));
    (bits, vpaddq_u8(first.1, second.1))
}

/// Neighbouring bytes put together.
#[inline]
#[target_feature(enable = "neon")]
fn eights((bits, counts): (uint8x16_t, uint8x16_t)) -> (uint16x8_t, uint16x8_t) {
    let bits = vreinterpretq_u16_u8(bits);
    let high = vshlq_u16(vshrq_n_u16::<8>(bits), vreinterpretq_s16_u8(counts));
    (vorrq_u16(vandq_u16(bits, vdupq_n_u16(0xff)), high), vpaddlq_u8(counts))
}

/// Neighbouring halves of words put together.
#[inline]
#[target_feature(enable = "neon")]
fn sixteens((bits, counts): (uint16x8_t, uint16x8_t)) -> (uint32x4_t, uint32x4_t) {
    let bits = vreinterpretq_u32_u16(bits);
    let high = vshlq_u32(vshrq_n_u32::<16>(bits), vreinterpretq_s32_u16(counts));
    (vorrq_u32(vandq_u32(bits, vdupq_n_u32(0xffff)), high), vpaddlq_u16(counts))
}

/// Neighbouring words put together.
#[inline]
#[target_feature(enable = "neon")]
fn whole((bits, counts): (uint32x4_t, uint32x4_t)) -> (uint64x2_t, uint64x2_t) {
    let bits = vreinterpretq_u64_u32(bits);
    let high = vshlq_u64(vshrq_n_u64::<32>(bits), vreinterpretq_s64_u32(counts));
    (vorrq_u64(vandq_u64(bits, vdupq_n_u64(0xffff_ffff)), high), vpaddlq_u32(counts))
}

/// As [`ladder::decode`]. Counts are negative, as a shift to the right takes them.
#[target_feature(enable = "neon")]
fn decode_tile(codes: &[u8; CODES], tail: &[u8; WINDOW], table: &[u8; 16], exponents: &mut Tile) -> Levels {
    let codes = codes.as_chunks::<16>().0;
    let mut threes = vdupq_n_u8(0);
    for codes in codes {
        let codes: uint8x16_t = bytemuck::cast(*codes);
        let both = vandq_u8(vandq_u8(codes, vshrq_n_u8::<1>(codes)), vdupq_n_u8(0x55));
        threes = vaddq_u8(threes, vcntq_u8(both));
    }
    let second = usize::from(vaddlvq_u8(threes));
    let third = (2 * second).next_multiple_of(8);
    let (mut at_second, mut at_third) = (0, third);
    let table: uint8x16_t = bytemuck::cast(*table);
    for (pair, codes) in codes.iter().enumerate() {
        let mut ranks = first_codes(bytemuck::cast(*codes));
        at_second = add_second(&mut ranks, tail, at_second);
        let is_third = ranks.map(|ranks| vceqq_u8(ranks, vdupq_n_u8(THIRD)));
        let any = vorrq_u8(vorrq_u8(is_third[0], is_third[1]), vorrq_u8(is_third[2], is_third[3]));
        if vmaxvq_u8(any) != 0 {
            for lane in 0..2 {
                at_third = add_third(&mut ranks[2 * lane..], &is_third[2 * lane..], tail, at_third);
            }
        }
        scatter(ranks.map(|ranks| vqtbl1q_u8(table, ranks)), exponents, 2 * pair);
    }
    Levels { second, third: (at_third - third) / 3 }
}

/// The codes of two lanes, each a byte, in the order of [`gather`].
#[inline]
#[target_feature(enable = "neon")]
fn first_codes(codes: uint8x16_t) -> [uint8x16_t; 4] {
    const BYTES: [u8; 16] = [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3];
    const SHIFTS: [i8; 16] = [0, -4, 0, -4, 0, -4, 0, -4, -2, -6, -2, -6, -2, -6, -2, -6];
    let (bytes, shifts): (uint8x16_t, int8x16_t) = (bytemuck::cast(BYTES), bytemuck::cast(SHIFTS));
    [0, 4, 8, 12].map(|word| {
        let bytes = vqtbl1q_u8(codes, vaddq_u8(bytes, vdupq_n_u8(word)));
        vandq_u8(vshlq_u8(bytes, shifts), vdupq_n_u8(3))
    })
}

/// Adds the codes of the second level to the ranks of two lanes. Returns the place of the next lanes' codes.
#[inline]
#[target_feature(enable = "neon")]
fn add_second(ranks: &mut [uint8x16_t; 4], tail: &[u8; WINDOW], at: usize) -> usize {
    let is_second = ranks.map(|ranks| vceqq_u8(ranks, vdupq_n_u8(SECOND)));
    let of_one = is_second.map(|is| vandq_s8(vreinterpretq_s8_u8(is), vdupq_n_s8(-2)));
    let of_two = [vpaddq_s8(of_one[0], of_one[1]), vpaddq_s8(of_one[2], of_one[3])];
    let of_four = vpaddq_s8(of_two[0], of_two[1]);
    let of_eight = vpaddlq_s8(of_four);
    let of_sixteen = vpaddlq_s16(of_eight);
    let [first, both]: [i64; 2] = {
        let of_lane = vpaddlq_s32(of_sixteen);
        let (first, second) = (vgetq_lane_s64::<0>(of_lane), vgetq_lane_s64::<1>(of_lane));
        [-first, -first - second]
    };
    let bits: uint64x2_t = bytemuck::cast([word(tail, at), word(tail, at + first as usize)]);
    let bits = vsliq_n_u64::<32>(bits, vshlq_u64(bits, vreinterpretq_s64_s32(of_sixteen)));
    let bits = vreinterpretq_u32_u64(bits);
    let bits = vsliq_n_u32::<16>(bits, vshlq_u32(bits, vreinterpretq_s32_s16(of_eight)));
    let bits = vreinterpretq_u16_u32(bits);
    let bits = vsliq_n_u16::<8>(bits, vshlq_u16(bits, vreinterpretq_s16_s8(of_four)));
    let of_pairs = halves(vreinterpretq_u8_u16(bits), vuzp1q_s8(of_two[0], of_two[1]));
    for lane in 0..2 {
        let [a, b] = halves(of_pairs[lane], vuzp1q_s8(of_one[2 * lane], of_one[2 * lane + 1]));
        for (half, codes) in [a, b].into_iter().enumerate() {
            let (ranks, is_second) = (&mut ranks[2 * lane + half], is_second[2 * lane + half]);
            *ranks = vaddq_u8(*ranks, vandq_u8(vandq_u8(codes, vdupq_n_u8(3)), is_second));
        }
    }
    at + both as usize
}

/// Adds the codes of the third level to the ranks of a lane, where there are some. Returns the place of the next lane's.
#[inline]
#[target_feature(enable = "neon")]
fn add_third(ranks: &mut [uint8x16_t], is_third: &[uint8x16_t], tail: &[u8; WINDOW], at: usize) -> usize {
    let of_one = [is_third[0], is_third[1]].map(|is| vandq_s8(vreinterpretq_s8_u8(is), vdupq_n_s8(-3)));
    let of_two = vpaddq_s8(of_one[0], of_one[1]);
    let of_four = vpaddlq_s8(of_two);
    let of_eight = vpaddlq_s16(of_four);
    let of_sixteen = vpaddlq_s32(of_eight);
    let first = -vgetq_lane_s64::<0>(of_sixteen);
    let both = first - vgetq_lane_s64::<1>(of_sixteen);
    let bits: uint64x2_t = bytemuck::cast([bits(tail, at), bits(tail, at + first as usize)]);
    let bits = vsliq_n_u64::<32>(bits, vshlq_u64(bits, vreinterpretq_s64_s32(of_eight)));
    let bits = vreinterpretq_u32_u64(bits);
    let bits = vsliq_n_u32::<16>(bits, vshlq_u32(bits, vreinterpretq_s32_s16(of_four)));
    let bits = vreinterpretq_u16_u32(bits);
    let bits = vsliq_n_u16::<8>(bits, vshlq_u16(bits, vreinterpretq_s16_s8(of_two)));
    let codes = halves(vreinterpretq_u8_u16(bits), vuzp1q_s8(of_one[0], of_one[1]));
    for half in 0..2 {
        let codes = vandq_u8(vandq_u8(codes[half], vdupq_n_u8(7)), is_third[half]);
        ranks[half] = vaddq_u8(ranks[half], codes);
    }
    at + both as usize
}

/// Each byte, and behind it the bits above the first, of which `firsts` says how many these are.
#[inline]
#[target_feature(enable = "neon")]
fn halves(bits: uint8x16_t, firsts: int8x16_t) -> [uint8x16_t; 2] {
    let second = vshlq_u8(bits, firsts);
    [vzip1q_u8(bits, second), vzip2q_u8(bits, second)]
}

/// The bits of a tail from `at` on, 57 or more. The place is within the tail, whose bytes are numbered with ten bits; the
/// compiler sees that eight are there.
#[inline(always)]
fn bits(tail: &[u8; WINDOW], at: usize) -> u64 {
    u64::from_le_bytes(chunk(tail, (at / 8) & 1023)) >> (at % 8)
}

/// As [`bits`], 64 of them: those from the next byte on, too.
#[inline(always)]
fn word(tail: &[u8; WINDOW], at: usize) -> u64 {
    bits(tail, at) | u64::from_le_bytes(chunk(tail, ((at / 8) & 1023) + 1)) << (8 - at % 8)
}

/// As [`ladder::pack`], of three bits: neighbours put together in 6, 12 and 24 bits.
#[target_feature(enable = "neon")]
fn pack_3(rests: &Tile, packed: &mut [u8]) {
    const BYTES: [u8; 16] = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 255, 255, 255, 255];
    let bytes: uint8x16_t = bytemuck::cast(BYTES);
    for (pair, packed) in packed.as_chunks_mut::<24>().0.iter_mut().enumerate() {
        let [a, b, c, d] = gather(rests, 2 * pair);
        for (packed, (a, b)) in packed.as_chunks_mut::<12>().0.iter_mut().zip([(a, b), (c, d)]) {
            let twos = vreinterpretq_u16_u8(vsliq_n_u8::<3>(vuzp1q_u8(a, b), vuzp2q_u8(a, b)));
            let fours = vreinterpretq_u32_u16(vsliq_n_u16::<6>(twos, vshrq_n_u16::<8>(twos)));
            let eights = vreinterpretq_u8_u32(vsliq_n_u32::<12>(fours, vshrq_n_u32::<16>(fours)));
            let whole: [u8; 16] = bytemuck::cast(vqtbl1q_u8(eights, bytes));
            packed.copy_from_slice(&whole[..12]);
        }
    }
}

/// As [`ladder::pack`], of four bits.
#[target_feature(enable = "neon")]
fn pack_4(rests: &Tile, packed: &mut [u8]) {
    for (pair, packed) in packed.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let [a, b, c, d] = gather(rests, 2 * pair);
        let lanes = [(a, b), (c, d)].map(|(a, b)| vsliq_n_u8::<4>(vuzp1q_u8(a, b), vuzp2q_u8(a, b)));
        *packed = bytemuck::cast(lanes);
    }
}

/// As [`ladder::unpack`], of three bits.
#[target_feature(enable = "neon")]
fn unpack_3(packed: &[u8], rests: &mut Tile) {
    const BYTES: [u8; 16] = [0, 1, 2, 255, 3, 4, 5, 255, 6, 7, 8, 255, 9, 10, 11, 255];
    let (bytes, three) = (bytemuck::cast::<_, uint8x16_t>(BYTES), vdupq_n_u8(7));
    for (pair, packed) in packed.as_chunks::<24>().0.iter().enumerate() {
        let mut lanes = [vdupq_n_u8(0); 4];
        for (lane, packed) in packed.as_chunks::<12>().0.iter().enumerate() {
            let mut whole = [0; 16];
            whole[..12].copy_from_slice(packed);
            let eights = vreinterpretq_u32_u8(vqtbl1q_u8(bytemuck::cast(whole), bytes));
            let fours = vreinterpretq_u16_u32(vsliq_n_u32::<16>(eights, vshrq_n_u32::<12>(eights)));
            let twos = vreinterpretq_u8_u16(vsliq_n_u16::<8>(fours, vshrq_n_u16::<6>(fours)));
            let (even, odd) = (vandq_u8(twos, three), vandq_u8(vshrq_n_u8::<3>(twos), three));
            (lanes[2 * lane], lanes[2 * lane + 1]) = (vzip1q_u8(even, odd), vzip2q_u8(even, odd));
        }
        scatter(lanes, rests, 2 * pair);
    }
}

/// As [`ladder::unpack`], of four bits.
#[target_feature(enable = "neon")]
fn unpack_4(packed: &[u8], rests: &mut Tile) {
    for (pair, packed) in packed.as_chunks::<32>().0.iter().enumerate() {
        let [first, second]: [uint8x16_t; 2] = bytemuck::cast(*packed);
        let [(a, b), (c, d)] = [first, second].map(|packed| {
            let (even, odd) = (vandq_u8(packed, vdupq_n_u8(15)), vshrq_n_u8::<4>(packed));
            (vzip1q_u8(even, odd), vzip2q_u8(even, odd))
        });
        scatter([a, b, c, d], rests, 2 * pair);
    }
}

/// As [`sum::words`]: four words at a time, of whose products the compiler makes none of vectors.
#[target_feature(enable = "neon")]
fn words(bytes: &[u8], first: usize) -> u64 {
    const WORDS: usize = 16;
    let (runs, rest) = bytes.as_chunks::<{ 4 * WORDS }>();
    let factors: [u32; WORDS] = std::array::from_fn(|word| sum::factor(first + word));
    let mut factors: [uint32x4_t; WORDS / 4] = bytemuck::cast(factors);
    let step = vdupq_n_u32(sum::FACTOR.wrapping_mul(2 * WORDS as u32));
    let mut sums = [vdupq_n_u64(0); WORDS / 2];
    for run in runs {
        let words: [uint32x4_t; WORDS / 4] = bytemuck::cast(*run);
        for four in 0..WORDS / 4 {
            let (words, factors) = (words[four], &mut factors[four]);
            sums[2 * four] = vmlal_u32(sums[2 * four], vget_low_u32(words), vget_low_u32(*factors));
            sums[2 * four + 1] = vmlal_high_u32(sums[2 * four + 1], words, *factors);
            *factors = vaddq_u32(*factors, step);
        }
    }
    let sum = sums.into_iter().fold(vdupq_n_u64(0), |all, sum| vaddq_u64(all, sum));
    vaddvq_u64(sum).wrapping_add(sum::words(rest, first + WORDS * runs.len()))
}

/// The weights of `lane` and the next: two groups in each vector, in the order of lanes and groups.
#[inline]
#[target_feature(enable = "neon")]
fn gather(tile: &Tile, lane: usize) -> [uint8x16_t; 4] {
    let [a, b, c, d]: [uint64x2_t; 4] = [0, 1, 2, 3].map(|group| bytemuck::cast(chunk::<16>(tile, place(lane, group))));
    [vzip1q_u64(a, b), vzip1q_u64(c, d), vzip2q_u64(a, b), vzip2q_u64(c, d)].map(|groups| vreinterpretq_u8_u64(groups))
}

/// The inverse of [`gather`].
#[inline]
#[target_feature(enable = "neon")]
fn scatter(lanes: [uint8x16_t; 4], tile: &mut Tile, lane: usize) {
    let [a, b, c, d] = lanes.map(|groups| vreinterpretq_u64_u8(groups));
    let groups = [vzip1q_u64(a, c), vzip2q_u64(a, c), vzip1q_u64(b, d), vzip2q_u64(b, d)];
    for (group, weights) in groups.into_iter().enumerate() {
        tile[place(lane, group)..][..16].copy_from_slice(&bytemuck::cast::<_, [u8; 16]>(weights));
    }
}

/// The bytes from `at` on.
#[inline(always)]
fn chunk<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..].first_chunk().copied().unwrap_or([0; N])
}
