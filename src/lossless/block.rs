//! The code of a block: its header, and the loops that make and read what follows.

use super::fields::Fields;
use super::ladder::{self, Levels, Tail, WINDOW};
use super::table::Table;
use super::{BLOCK, CODES, TILE, Tile, sum};

/// The bytes of a block's header.
pub(super) const HEADER: usize = 32;

/// Blocks begin at multiples of it.
pub(super) const ALIGN: usize = 16;

/// The kind of a block whose weights are as they were.
pub(super) const PLAIN: u8 = 0;
/// The kind of a coded block.
pub(super) const LADDER: u8 = 1;

/// The flag of a block whose exponents are all the first of its table, so that it has no codes.
pub(super) const NO_CODES: u8 = 1 << 7;

/// The tiles of a block.
pub(super) const TILES: usize = BLOCK / TILE;

/// The inner loops, of which every instruction set may have its own. All give what those of [`ladder`] and [`sum`] give.
pub(super) trait Kernels: Copy {
    fn ranks(self, table: &Table, exponents: &Tile, ranks: &mut Tile);
    fn encode(self, ranks: &Tile, codes: &mut [u8; CODES], tail: &mut Tail);
    fn decode(self, codes: &[u8; CODES], tail: &[u8; WINDOW], table: &[u8; 16], exponents: &mut Tile) -> Levels;
    fn pack<const WIDTH: usize>(self, rests: &Tile, packed: &mut [u8]);
    fn unpack<const WIDTH: usize>(self, packed: &[u8], rests: &mut Tile);
    #[inline(always)]
    fn sum(self, bytes: &[u8], first: usize) -> u64 {
        sum::words(bytes, first)
    }
}

/// The loops of the definition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Definition;

impl Kernels for Definition {
    #[inline(always)]
    fn ranks(self, table: &Table, exponents: &Tile, ranks: &mut Tile) {
        ladder::ranks(&table.rank_of, exponents, ranks);
    }

    #[inline(always)]
    fn encode(self, ranks: &Tile, codes: &mut [u8; CODES], tail: &mut Tail) {
        ladder::encode(ranks, codes, tail);
    }

    #[inline(always)]
    fn decode(self, codes: &[u8; CODES], tail: &[u8; WINDOW], table: &[u8; 16], exponents: &mut Tile) -> Levels {
        ladder::decode(codes, tail, table, exponents)
    }

    #[inline(always)]
    fn pack<const WIDTH: usize>(self, rests: &Tile, packed: &mut [u8]) {
        ladder::pack::<WIDTH>(rests, packed);
    }

    #[inline(always)]
    fn unpack<const WIDTH: usize>(self, packed: &[u8], rests: &mut Tile) {
        ladder::unpack::<WIDTH>(packed, rests);
    }
}

/// The most bytes of the code of a block of some bytes.
pub(super) fn bound(bytes: usize) -> usize {
    HEADER + bytes.next_multiple_of(ALIGN)
}

/// Whether a code is worth while: it saves at least a twentieth.
pub(super) fn is_worth_while(code: usize, plain: usize) -> bool {
    code <= plain - plain / 20
}

/// The planes of the rests that a block of these flags has.
#[inline(always)]
pub(super) fn present(fields: Fields, flags: u8) -> impl Iterator<Item = usize> {
    (0..fields.planes()).filter(move |plane| flags >> plane & 1 == 0)
}

/// What a header adds to the sum of the weights.
pub(super) fn sum_of_header(header: &[u8; HEADER]) -> u64 {
    sum::words(&header[8..], BLOCK)
}
