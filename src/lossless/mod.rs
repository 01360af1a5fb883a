//! A lossless code for weights: two thirds of the bytes of bf16, and every bit pattern comes back.
//!
//! What can be saved in trained weights is in their exponents: sign and mantissa are as good as random, and of the exponents
//! a few are frequent. So each weight's exponent is coded by its rank among those of its block, and the rest of its bits stays
//! as it is. Blocks are independent of each other, so they are decoded by as many threads as there are, or by a card with a
//! warp for each.
//!
//! # Format
//!
//! All numbers are little-endian, and all that is not named is zero. A code is a header, an index, and blocks.
//!
//! | header | |
//! |---|---|
//! | 0..8 | `89 54 4f 57 4c 43 0d 0a` |
//! | 8..10 | the version, 1 |
//! | 10 | the element type: 1 BF16, 2 F16, 3 F32, 4 F8_E4M3, 5 F8_E5M2, 6 F8_E4M3FNUZ, 7 F8_E5M2FNUZ |
//! | 11 | 1 if the weights are in blocks, 0 if they are as they were |
//! | 12..16 | the number of blocks, of 8,192 weights each; the last may have less |
//! | 16..24 | the number of weights |
//! | 24..32 | the bytes of all, a multiple of 16 |
//! | 32..40 | the sum of the weights, that of all blocks' |
//! | 40..48 | the sum of the index |
//! | 56..64 | the sum of the header up to here |
//!
//! The index of blocks has a u32 for the beginning of each block, and one for the end of the last, in units of 16 bytes from
//! the beginning of the header. If the weights are as they were, it has a u64 for the sum of each block instead, and the
//! weights follow it. Either is padded to 16 bytes. A tensor stays as it was if blocks would save less than a twentieth.
//!
//! | header of a block | |
//! |---|---|
//! | 0..8 | its sum |
//! | 8..10 | the number of escapes |
//! | 10..12 | its length in units of 16 bytes |
//! | 12 | 1 if it is coded; 0 if its weights follow as they were, since coding would save less than a twentieth |
//! | 13 | flags: bit `p`, plane `p` of the rests is all zeros, and left out; bit 7, there are no codes, as below |
//! | 16..29 | the table: exponents by their frequency in the block |
//! | 29 | an exponent that is not in the table |
//!
//! A **tile** is 1,024 weights, of which each of 32 **lanes** has four **groups** of eight: group `k` of lane `l` begins at
//! weight `256 k + 8 l`. A coded block is a whole number of tiles; what is beyond its last weight has the table's first
//! exponent, and zeros for the rest. Bits are numbered from the lowest bit of the first byte. After the header follow:
//!
//! - *The rests.* The rest of a weight is its mantissa with the sign above it, of 8 bits in BF16, 11 in F16, 24 in F32, 4 in
//!   E4M3 and 3 in E5M2. Each whole byte of it, the lowest first, is a plane of a byte for each weight, in their order. The
//!   bits above whole bytes are the last plane: for each tile, in the order of lanes, groups and weights.
//! - *The codes*, a u64 for each tile and lane. Weight `j` of group `k` has two bits at `32 (k / 2) + 2 (k % 2) + 4 j`: the
//!   rank of its exponent in the table, or 3 for a higher rank. Where all exponents are the table's first, neither codes nor
//!   escapes and tails are there.
//! - *The escapes*, a u32 for each exponent that is not in the table, by their place: the place in the block times 256, plus
//!   the exponent.
//! - *The tails*, one for each tile, padded to four bytes. In the order of lanes, groups and weights, two bits for each code
//!   of 3: the rank less 3, or 3 for a higher rank; padded to a byte. Then, in the same order, three bits for each of these that is
//!   3: the rank less 6, or 7 for an escape; padded to a byte.
//!
//! A **sum** is one of u32 words times factors, modulo 2^64: word `i` times the odd number `(2 i + 1) 0x9e3779b1` modulo 2^32,
//! plus `(n + 1) 0x9e3779b97f4a7c15`. That of a block's weights is over their bytes, with zeros up to a whole word, and `n` is
//! the block's number; the block's header has its sum plus that of the words of the header's bytes 8..32, the first of which
//! is word 8,192. So a sum shows a fault of the decoder as well as one of the bytes: any single wrong word, and of several nearly
//! all. The factors grow evenly, so four words can change by amounts that cancel: a byte of the codes of F32 holds such words, and of
//! 522,240 replacements of one byte there 261 were decoded as sound, with other weights; of BF16, with two weights in a word, none.
//! For the tensor's header `n` is 2^40; the index has a sum for each MiB of it with `n` from 2^40 + 1 on, which are added up.
//!
//! The exponents of a table differ from each other, an escape stands where there is the code of one, whatever pads a code is
//! zero, and the sums are over all else.

mod block;
mod code;
mod decode;
pub mod dfloat11;
mod encode;
mod encoder;
mod fault;
mod fields;
mod header;
mod ladder;
mod sum;
mod table;
#[cfg(test)]
mod tests;
mod vector;

use rayon::prelude::*;

use crate::dtype::DType;
use crate::threads;
pub use code::{Code, CodePart, Head, decompress};
pub(crate) use encoder::{Blocks, Encoder, WholeCode};
pub use fault::CodeFault;
use fields::Fields;
use header::Index;
pub use header::Info;

/// The weights of a block.
pub const BLOCK_WEIGHTS: usize = BLOCK;

const BLOCK: usize = 8 * TILE;

/// In memory where a code is decoded elsewhere, it begins at a multiple of it.
pub(crate) const CODE_ALIGN: usize = block::ALIGN;

/// Bytes up to the next multiple of [`CODE_ALIGN`]; the largest number if that is none.
pub(crate) fn padded(bytes: u64) -> u64 {
    bytes.div_ceil(CODE_ALIGN as u64).saturating_mul(CODE_ALIGN as u64)
}

/// The weights of a tile.
const TILE: usize = 32 * 32;

/// A byte for each weight of a tile.
type Tile = [u8; TILE];

/// The lanes of a tile.
const LANES: usize = 32;

/// The bytes of a tile's codes.
const CODES: usize = TILE / 4;

/// The blocks that are a task of their own, where there are several tasks.
pub(crate) const TOGETHER: usize = 16;

/// The most bytes that the code of a tensor takes; `None` if the type is not coded, or for more weights than one code holds.
pub fn compressed_bound(dtype: DType, count: usize) -> Option<usize> {
    let fields = Fields::of(dtype)?;
    let blocks = count.div_ceil(BLOCK);
    let bytes = count.checked_mul(fields.size()).filter(|_| holds(fields, count))?;
    // The code of a tensor that stays as it was: one in blocks is shorter.
    let index = header::HEADER + header::length(false, blocks);
    bytes.checked_next_multiple_of(block::ALIGN)?.checked_add(index)
}

/// The fewest bytes that the code of a tensor takes: what its header and its index have, and the headers of its blocks, or the weights
/// of a tensor that stays as it was. A code that is said to be of more weights than it has bytes for is none.
pub fn compressed_least(count: u64) -> u64 {
    let blocks = count.div_ceil(BLOCK as u64);
    let in_blocks = padded(blocks.saturating_add(1).saturating_mul(4));
    let in_blocks = in_blocks.saturating_add(blocks.saturating_mul(block::HEADER as u64));
    // A weight has a byte at least.
    let plain = padded(blocks.saturating_mul(8)).saturating_add(padded(count));
    (header::HEADER as u64).saturating_add(in_blocks.min(plain))
}

/// What decoding a part of a code needs of the parts before: the most bytes of header and index, and of a block, of a code of so many
/// weights, which have `bytes`.
pub(crate) fn needed_before(bytes: u64, count: u64) -> (u64, u64) {
    (longest_head(count), longest_block(bytes / count.max(1)))
}

/// The most bytes of header and index of a code of as many weights.
fn longest_head(count: u64) -> u64 {
    let blocks = count.div_ceil(BLOCK as u64);
    let index = padded(blocks.saturating_add(1).saturating_mul(4)).max(padded(blocks.saturating_mul(8)));
    (header::HEADER as u64).saturating_add(index)
}

/// The most bytes of a block of weights of this size.
pub(crate) fn longest_block(size: u64) -> u64 {
    block::bound(BLOCK * size.min(8) as usize) as u64
}

/// Whether one code holds as many weights: the places of their blocks are numbers of 32 bits.
fn holds(fields: Fields, count: usize) -> bool {
    let blocks = count.div_ceil(BLOCK) as u128;
    let most = header::HEADER as u128 + 16 * blocks + blocks * block::bound(BLOCK * fields.size()) as u128;
    most / (block::ALIGN as u128) < u128::from(u32::MAX)
}

/// The code of a tensor's bytes, which are little-endian weights. It depends on nothing but them.
///
/// Above some blocks the work runs on the library's threads, one for each core.
///
/// # Errors
/// [`CodeFault::NoCode`] for a type that is not coded; [`CodeFault::PartOfWeight`] when the bytes end within a weight;
/// [`CodeFault::TooLarge`] for more weights than one code holds: some 30 thousand million of bf16.
pub fn compress(dtype: DType, bytes: &[u8]) -> Result<Vec<u8>, CodeFault> {
    let encoder = Encoder::new(dtype, bytes.len())?;
    let pieces = pieces(encoder, bytes);
    Ok(in_blocks(encoder, &pieces)?.unwrap_or_else(|| as_it_is(dtype, encoder, bytes, &pieces)))
}

/// The code of a tensor's bytes; `None` if the tensor has none, or stays as it is because that would save too little.
///
/// # Errors
/// [`CodeFault::PartOfWeight`] as [`compress`].
pub(crate) fn shorter(dtype: DType, bytes: &[u8]) -> Result<Option<Vec<u8>>, CodeFault> {
    match Encoder::new(dtype, bytes.len()) {
        Ok(encoder) => in_blocks(encoder, &pieces(encoder, bytes)),
        Err(CodeFault::NoCode { .. } | CodeFault::TooLarge { .. }) => Ok(None),
        Err(other) => Err(other),
    }
}

/// The blocks of a piece of a tensor, with their bytes.
type Piece = (Blocks, Vec<u8>);

/// The blocks of a tensor, made by several threads if there are many.
fn pieces(encoder: Encoder, bytes: &[u8]) -> Vec<Piece> {
    let task = encoder.block_bytes() * TOGETHER;
    let piece = |index: usize, bytes: &[u8]| {
        let mut out = Vec::with_capacity(encoder.capacity(bytes.len()));
        (encoder.encode(index * task, bytes, &mut out), out)
    };
    let pieces = tasks(bytes.len() > task, || {
        bytes.par_chunks(task).enumerate().map(|(index, bytes)| piece(index, bytes)).collect::<Vec<_>>()
    });
    pieces.unwrap_or_else(|| vec![piece(0, bytes)])
}

/// The code in blocks, if that is worth while.
fn in_blocks(encoder: Encoder, pieces: &[Piece]) -> Result<Option<Vec<u8>>, CodeFault> {
    let whole = encoder.whole(pieces.iter().map(|(blocks, bytes)| (blocks, &bytes[..])));
    let code = |bytes: usize| {
        let mut code = vec![0; bytes];
        whole.write(&mut code).map(|_| code)
    };
    whole.bytes().map(code).transpose()
}

/// The code of a tensor that stays as it is.
fn as_it_is(dtype: DType, encoder: Encoder, weights: &[u8], pieces: &[Piece]) -> Vec<u8> {
    let whole = encoder.whole(pieces.iter().map(|(blocks, bytes)| (blocks, &bytes[..])));
    let sums: Vec<u64> = whole.sums().collect();
    let body = weights.len().next_multiple_of(block::ALIGN);
    let mut code = header::write(dtype, weights.len() / encoder.fields.size(), &Index::Plain { sums: &sums }, body);
    let head = code.len();
    code.reserve_exact(body);
    code.extend_from_slice(weights);
    code.resize(head + body, 0);
    code
}

/// Runs work on the library's threads if it is `large`. `None` if it is not, or if the system gives no threads.
fn tasks<R: Send>(large: bool, work: impl FnOnce() -> R + Send) -> Option<R> {
    if large { threads::run(work).ok() } else { None }
}

/// The bytes of the code of some weights by those of the weights, without header and index: what a planner counts with. One
/// for no weights. A sample of a few blocks from several places of a tensor tells the ratio to a hundredth.
///
/// # Errors
/// As [`compress`].
pub fn estimate(dtype: DType, sample: &[u8]) -> Result<f64, CodeFault> {
    let encoder = Encoder::new(dtype, sample.len())?;
    if sample.is_empty() {
        return Ok(1.0);
    }
    let mut code = Vec::with_capacity(encoder.capacity(sample.len()));
    encoder.encode(0, sample, &mut code);
    Ok((code.len() as f64 / sample.len() as f64).min(1.0))
}
