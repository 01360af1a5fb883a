//! The ladder: a code of 2, 4 or 7 bits for the rank of an exponent in its block's table. This is its definition, which the
//! kernels of instruction sets agree with bit for bit.

use super::{CODES, LANES, TILE, Tile};

/// The exponents of a table that have ranks.
pub(super) const RANKS: usize = 13;
/// All exponents of a table: the last is that of an escape, which is decoded to it before its own is put there.
pub(super) const TABLE: usize = RANKS + 1;
/// The rank of an exponent that is not in the table.
pub(super) const ESCAPE: u8 = RANKS as u8;
/// The first rank of the second level, which is also how far the code of the first counts.
pub(super) const SECOND: u8 = 3;
/// The first rank of the third level.
pub(super) const THIRD: u8 = 6;
/// The most bytes of a tile's second and third level.
pub(super) const TAIL: usize = (2 + 3) * TILE / 8;
/// The bytes that a tile's tail is read from: more than it can have, so that eight bytes can be read at any bit of it, and
/// such that a place in it is a number of ten bits.
pub(super) const WINDOW: usize = 1024 + 8;

/// How many codes of the second and the third level a tile has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Levels {
    pub(super) second: usize,
    pub(super) third: usize,
}

impl Levels {
    /// The bytes of the two levels, each rounded up; the tail that holds them is padded to four.
    #[inline(always)]
    pub(super) fn bytes(self) -> usize {
        (2 * self.second).div_ceil(8) + (3 * self.third).div_ceil(8)
    }

    /// Whether all bits of a tail are zero that belong to no code.
    #[inline(always)]
    pub(super) fn padded_with_zeros(self, tail: &[u8]) -> bool {
        let (second, third) = tail.split_at((2 * self.second).div_ceil(8));
        let beyond = |bits: usize, bytes: &[u8]| bits.is_multiple_of(8) || bytes[bits / 8] >> (bits % 8) == 0;
        beyond(2 * self.second, second)
            && beyond(3 * self.third, third)
            && third[(3 * self.third).div_ceil(8)..].iter().all(|byte| *byte == 0)
    }
}

/// The tail of a tile while its codes are written.
#[derive(Debug)]
pub(super) struct Tail {
    pub(super) second: Bits,
    pub(super) third: Bits,
}

impl Tail {
    pub(super) fn new() -> Tail {
        Tail { second: Bits::new(), third: Bits::new() }
    }

    /// Appends the tail, padded to four bytes, and empties it.
    pub(super) fn take(&mut self, to: &mut Vec<u8>) {
        let begin = to.len();
        self.second.take(to);
        self.third.take(to);
        to.resize(begin + (to.len() - begin).next_multiple_of(4), 0);
    }
}

/// Bits in the order in which they are written, the first in the lowest place of the first byte.
#[derive(Debug)]
pub(super) struct Bits {
    bytes: [u8; WINDOW],
    /// Whole bytes of `bytes`, up to a tile's of one level.
    whole: usize,
    /// Bits that are not yet a whole byte, and how many.
    rest: u64,
    count: u32,
}

impl Bits {
    fn new() -> Bits {
        Bits { bytes: [0; WINDOW], whole: 0, rest: 0, count: 0 }
    }

    /// Adds `count` bits, at most 56 between two flushes; those above them are zero.
    #[inline(always)]
    pub(super) fn push(&mut self, bits: u64, count: u32) {
        self.rest |= bits << self.count;
        self.count += count;
    }

    /// Stores the whole bytes.
    #[inline(always)]
    pub(super) fn flush(&mut self) {
        // The place is below a tile's bytes of a level; the compiler sees that it is below 1024.
        self.bytes[self.whole & 1023..][..8].copy_from_slice(&self.rest.to_le_bytes());
        self.whole += self.count as usize / 8;
        self.rest >>= self.count & !7;
        self.count &= 7;
    }

    fn take(&mut self, to: &mut Vec<u8>) {
        self.flush();
        to.extend_from_slice(&self.bytes[..self.whole + usize::from(self.count > 0)]);
        (self.whole, self.rest, self.count) = (0, 0, 0);
    }
}

/// The place in its tile of a weight of a lane: the `group`-th eight of the lane.
#[inline(always)]
pub(super) fn place(lane: usize, group: usize) -> usize {
    group * (TILE / 4) + lane * 8
}

/// The ranks of exponents.
#[inline(always)]
pub(super) fn ranks(rank_of: &[u8; 256], exponents: &Tile, ranks: &mut Tile) {
    ranks.iter_mut().zip(exponents).for_each(|(rank, exponent)| *rank = rank_of[usize::from(*exponent)]);
}

/// The codes of ranks.
#[inline(always)]
pub(super) fn encode(ranks: &Tile, codes: &mut [u8; CODES], tail: &mut Tail) {
    for (lane, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let mut word = 0u64;
        for group in 0..4 {
            for (j, rank) in ranks[place(lane, group)..][..8].iter().enumerate() {
                word |= u64::from((*rank).min(SECOND)) << (32 * (group / 2) + 2 * (group % 2) + 4 * j);
                if *rank >= SECOND {
                    tail.second.push(u64::from((*rank).min(THIRD) - SECOND), 2);
                    tail.second.flush();
                }
                if *rank >= THIRD {
                    tail.third.push(u64::from(*rank - THIRD), 3);
                    tail.third.flush();
                }
            }
        }
        *codes = word.to_le_bytes();
    }
}

/// The exponents of codes; an escape's is that of its rank in `table`. Whatever the codes are, nothing is read outside the tail.
#[inline(always)]
pub(super) fn decode(codes: &[u8; CODES], tail: &[u8; WINDOW], table: &[u8; 16], exponents: &mut Tile) -> Levels {
    let second: u32 = codes.as_chunks::<8>().0.iter().map(|codes| threes(u64::from_le_bytes(*codes))).sum();
    let bits = |at: usize, count: u32| {
        let byte = (at / 8) & 1023;
        let bits = u16::from_le_bytes([tail[byte], tail[byte + 1]]) >> (at % 8);
        bits as u8 & ((1 << count) - 1)
    };
    let (mut at_second, third) = (0, (2 * second as usize).next_multiple_of(8));
    let mut at_third = third;
    for (lane, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
        let word = u64::from_le_bytes(*codes);
        for group in 0..4 {
            for (j, exponent) in exponents[place(lane, group)..][..8].iter_mut().enumerate() {
                let mut rank = (word >> (32 * (group / 2) + 2 * (group % 2) + 4 * j)) as u8 & 3;
                if rank == SECOND {
                    rank += bits(at_second, 2);
                    at_second += 2;
                    if rank == THIRD {
                        rank += bits(at_third, 3);
                        at_third += 3;
                    }
                }
                *exponent = table[usize::from(rank & 15)];
            }
        }
    }
    Levels { second: at_second / 2, third: (at_third - third) / 3 }
}

/// How many of a lane's codes are continued on the second level.
#[inline(always)]
pub(super) fn threes(codes: u64) -> u32 {
    (codes & (codes >> 1) & 0x5555_5555_5555_5555).count_ones()
}

/// Packs the lowest `WIDTH` bits of each byte, whose others are zero: those of a lane are a number, the first the lowest.
#[inline(always)]
pub(super) fn pack<const WIDTH: usize>(rests: &Tile, packed: &mut [u8]) {
    for (lane, packed) in packed.chunks_exact_mut(4 * WIDTH).enumerate().take(LANES) {
        let mut number = 0u128;
        for group in (0..4).rev() {
            let rests = rests[place(lane, group)..][..8].iter().rev();
            number = rests.fold(number, |number, rest| number << WIDTH | u128::from(*rest));
        }
        packed.copy_from_slice(&number.to_le_bytes()[..4 * WIDTH]);
    }
}

/// The inverse of [`pack`].
#[inline(always)]
pub(super) fn unpack<const WIDTH: usize>(packed: &[u8], rests: &mut Tile) {
    for (lane, packed) in packed.chunks_exact(4 * WIDTH).enumerate().take(LANES) {
        let mut number = [0; 16];
        number[..4 * WIDTH].copy_from_slice(packed);
        let mut number = u128::from_le_bytes(number);
        for group in 0..4 {
            for rest in &mut rests[place(lane, group)..][..8] {
                *rest = number as u8 & ((1 << WIDTH) - 1);
                number >>= WIDTH;
            }
        }
    }
}
