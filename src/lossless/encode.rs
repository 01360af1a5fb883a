//! A block's weights as its code.

use super::block::{
    ALIGN, HEADER, Kernels, LADDER, NO_CODES, PLAIN, TILES, bound, is_worth_while, present, sum_of_header,
};
use super::fields::{Fields, RESTS};
use super::ladder::{ESCAPE, Tail};
use super::table::Table;
use super::{BLOCK, CODES, TILE, Tile, sum};

/// What a block's parts are collected in, kept to be used again.
#[derive(Debug)]
pub(super) struct Scratch {
    exponents: [u8; BLOCK],
    rests: [[u8; BLOCK]; RESTS],
    ranks: Tile,
    codes: [u8; CODES * TILES],
    escapes: Vec<u32>,
    tail: Tail,
    tails: Vec<u8>,
}

impl Scratch {
    pub(super) fn new() -> Box<Scratch> {
        Box::new(Scratch {
            exponents: [0; BLOCK],
            rests: [[0; BLOCK]; RESTS],
            ranks: [0; TILE],
            codes: [0; CODES * TILES],
            escapes: Vec::new(),
            tail: Tail::new(),
            tails: Vec::new(),
        })
    }
}

/// Appends the code of block `number`, of one to [`BLOCK`] weights, and returns the sum of these.
#[inline(always)]
pub(super) fn encode<K: Kernels>(
    kernels: K,
    fields: Fields,
    number: u64,
    weights: &[u8],
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> u64 {
    let sum = sum::start(number).wrapping_add(kernels.sum(weights, 0));
    let tiles = (weights.len() / fields.size()).div_ceil(TILE);
    let (table, flags) = take_apart(fields, weights, scratch);
    scratch.escapes.clear();
    scratch.tails.clear();
    let mut length = HEADER + present(fields, flags).map(|plane| fields.plane(plane) * tiles).sum::<usize>();
    if flags & NO_CODES == 0 {
        write_codes(kernels, &table, tiles, scratch);
        length += CODES * tiles + 4 * scratch.escapes.len() + scratch.tails.len();
    }
    let (begin, length) = (out.len(), length.next_multiple_of(ALIGN));
    if is_worth_while(length, weights.len()) {
        out.extend_from_slice(&header(sum, scratch.escapes.len(), length, [LADDER, flags], &table.exponents));
        append(kernels, fields, flags, tiles, scratch, out);
        out.resize(begin + length, 0);
    } else {
        let length = bound(weights.len());
        out.extend_from_slice(&header(sum, 0, length, [PLAIN, 0], &[0; 16]));
        out.extend_from_slice(weights);
        out.resize(begin + length, 0);
    }
    sum
}

/// Takes weights apart into exponents and rests, in whole tiles. Returns the table and the flags of what is left out.
#[inline(always)]
fn take_apart(fields: Fields, weights: &[u8], scratch: &mut Scratch) -> (Table, u8) {
    let count = weights.len() / fields.size();
    let padded = count.next_multiple_of(TILE);
    let [first, second, third] = &mut scratch.rests;
    fields.split(weights, &mut scratch.exponents, [first, second, third]);
    let exponents = &scratch.exponents[..count];
    let table = Table::of(exponents, fields.largest());
    let mut flags = if exponents.iter().all(|exponent| *exponent == table.exponents[0]) { NO_CODES } else { 0 };
    // What is beyond the last weight takes no bits: the code of rank 0, and zeros.
    scratch.exponents[count..padded].fill(table.exponents[0]);
    for (plane, rests) in scratch.rests.iter_mut().enumerate().take(fields.planes()) {
        rests[count..padded].fill(0);
        if rests[..count].iter().all(|rest| *rest == 0) {
            flags |= 1 << plane;
        }
    }
    (table, flags)
}

/// Codes, tails and escapes of the exponents.
#[inline(always)]
fn write_codes<K: Kernels>(kernels: K, table: &Table, tiles: usize, scratch: &mut Scratch) {
    let exponents = scratch.exponents.as_chunks::<TILE>().0.iter().take(tiles);
    for ((tile, exponents), codes) in exponents.enumerate().zip(scratch.codes.as_chunks_mut::<CODES>().0) {
        kernels.ranks(table, exponents, &mut scratch.ranks);
        add_escapes(tile, exponents, &scratch.ranks, &mut scratch.escapes);
        kernels.encode(&scratch.ranks, codes, &mut scratch.tail);
        scratch.tail.take(&mut scratch.tails);
    }
}

/// Adds the escapes of a tile.
#[inline(always)]
fn add_escapes(tile: usize, exponents: &Tile, ranks: &Tile, escapes: &mut Vec<u32>) {
    // No rank is above that of an escape, and few tiles have one.
    let has_escape = |ranks: &[u8]| ranks.iter().fold(0, |most: u8, rank| most.max(*rank)) == ESCAPE;
    if !has_escape(ranks) {
        return;
    }
    for (run, ranks) in ranks.as_chunks::<32>().0.iter().enumerate().filter(|(_, ranks)| has_escape(*ranks)) {
        let places = (run * 32..).zip(ranks).filter(|(_, rank)| **rank == ESCAPE);
        escapes.extend(places.map(|(at, _)| ((tile * TILE + at) << 8) as u32 | u32::from(exponents[at])));
    }
}

/// Appends all that follows the header.
#[inline(always)]
fn append<K: Kernels>(kernels: K, fields: Fields, flags: u8, tiles: usize, scratch: &Scratch, out: &mut Vec<u8>) {
    for plane in present(fields, flags) {
        let rests = &scratch.rests[plane][..TILE * tiles];
        if plane < fields.bytes() {
            out.extend_from_slice(rests);
            continue;
        }
        for rests in rests.as_chunks::<TILE>().0 {
            let at = out.len();
            out.resize(at + fields.plane(plane), 0);
            match fields.bits() {
                3 => kernels.pack::<3>(rests, &mut out[at..]),
                _ => kernels.pack::<4>(rests, &mut out[at..]),
            }
        }
    }
    if flags & NO_CODES == 0 {
        out.extend_from_slice(&scratch.codes[..CODES * tiles]);
        scratch.escapes.iter().for_each(|escape| out.extend_from_slice(&escape.to_le_bytes()));
        out.extend_from_slice(&scratch.tails);
    }
}

/// The header of a block whose weights have this sum.
fn header(sum: u64, escapes: usize, length: usize, kind: [u8; 2], table: &[u8; 16]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[8..10].copy_from_slice(&(escapes as u16).to_le_bytes());
    header[10..12].copy_from_slice(&((length / ALIGN) as u16).to_le_bytes());
    header[12..14].copy_from_slice(&kind);
    header[16..].copy_from_slice(table);
    let sum = sum.wrapping_add(sum_of_header(&header));
    header[..8].copy_from_slice(&sum.to_le_bytes());
    header
}
