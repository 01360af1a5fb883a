//! The code of a tensor, made from pieces of its weights.

use rayon::prelude::*;

use super::block;
use super::code::check_destination;
use super::decode::Parts;
use super::encode::Scratch;
use super::fault::CodeFault;
use super::fields::Fields;
use super::header::{self, Index, Info};
use super::vector::Tier;
use super::{BLOCK, holds, tasks};
use crate::dtype::DType;

/// Makes the code of a tensor. Its weights come in pieces: in any order, and from several threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoder {
    dtype: DType,
    pub(super) fields: Fields,
    tier: Tier,
    /// The number of weights.
    count: usize,
}

/// The blocks of a piece of a tensor.
#[derive(Debug)]
pub(crate) struct Blocks {
    lengths: Vec<u32>,
    sums: Vec<u64>,
}

/// The code of a tensor whose pieces are all there, in order, each with the bytes of its blocks.
#[derive(Debug)]
pub(crate) struct WholeCode<'a> {
    of: Encoder,
    pieces: Vec<(&'a Blocks, &'a [u8])>,
}

impl Encoder {
    /// For a tensor of so many bytes.
    ///
    /// # Errors
    /// [`CodeFault::NoCode`] for a type that is not coded; [`CodeFault::PartOfWeight`] when the bytes end within a weight;
    /// [`CodeFault::TooLarge`] for more weights than one code holds.
    pub(crate) fn new(dtype: DType, bytes: usize) -> Result<Encoder, CodeFault> {
        Encoder::with_tier(Tier::best(), dtype, bytes)
    }

    pub(super) fn with_tier(tier: Tier, dtype: DType, bytes: usize) -> Result<Encoder, CodeFault> {
        let fields = Fields::of(dtype).ok_or(CodeFault::NoCode { dtype })?;
        if !bytes.is_multiple_of(fields.size()) {
            return Err(CodeFault::PartOfWeight { dtype, bytes: bytes as u64 });
        }
        let count = bytes / fields.size();
        if !holds(fields, count) {
            return Err(CodeFault::TooLarge { count: count as u64 });
        }
        Ok(Encoder { dtype, fields, tier, count })
    }

    /// The bytes of a block's weights. Each piece but the last is a whole number of blocks.
    pub(crate) fn block_bytes(&self) -> usize {
        BLOCK * self.fields.size()
    }

    /// A capacity that the blocks of so many bytes of weights rarely exceed.
    pub(crate) fn capacity(&self, weights: usize) -> usize {
        weights - weights / 8 + block::bound(0) * weights.div_ceil(self.block_bytes())
    }

    /// Appends to `out` the blocks of the weights from byte `at` of the tensor on, which is where a block begins.
    pub(crate) fn encode(&self, at: usize, weights: &[u8], out: &mut Vec<u8>) -> Blocks {
        let of = weights.chunks(self.block_bytes());
        let mut blocks = Blocks { lengths: Vec::with_capacity(of.len()), sums: Vec::with_capacity(of.len()) };
        let (mut scratch, first) = (Scratch::new(), (at / self.block_bytes()) as u64);
        for (number, weights) in (first..).zip(of) {
            let begin = out.len();
            blocks.sums.push(self.tier.encode(self.fields, number, weights, &mut scratch, out));
            blocks.lengths.push((out.len() - begin) as u32);
        }
        blocks
    }

    /// The code of all pieces, given in order.
    pub(crate) fn whole<'a>(self, pieces: impl IntoIterator<Item = (&'a Blocks, &'a [u8])>) -> WholeCode<'a> {
        WholeCode { of: self, pieces: pieces.into_iter().collect() }
    }
}

impl WholeCode<'_> {
    /// The bytes of the code. `None` if the tensor is to stay as it is, since blocks would save too little.
    pub(crate) fn bytes(&self) -> Option<usize> {
        let (blocks, body, plain) = (self.lengths().count(), self.body(), self.plain());
        header::in_blocks(blocks, body, plain).then(|| header::HEADER + header::length(true, blocks) + body)
    }

    /// Writes the code into as many [bytes](WholeCode::bytes), and returns what its header says.
    ///
    /// # Errors
    /// [`CodeFault::Destination`] for another number of bytes.
    pub(crate) fn write(&self, to: &mut [u8]) -> Result<Info, CodeFault> {
        let (lengths, sums): (Vec<u32>, Vec<u64>) = (self.lengths().collect(), self.sums().collect());
        let head =
            header::write(self.of.dtype, self.of.count, &Index::Blocks { lengths: &lengths, sums: &sums }, self.body());
        check_destination((head.len() + self.body()) as u64, to)?;
        let (first, mut left) = to.split_at_mut(head.len());
        first.copy_from_slice(&head);
        let mut copies = Vec::with_capacity(self.pieces.len());
        for (_, piece) in &self.pieces {
            let (to, others) = left.split_at_mut(piece.len());
            left = others;
            copies.push((to, *piece));
        }
        // In parallel, since the system has yet to give most of the memory.
        let copy = |(to, piece): &mut (&mut [u8], &[u8])| to.copy_from_slice(piece);
        if tasks(copies.len() > 1, || copies.par_iter_mut().for_each(copy)).is_none() {
            copies.iter_mut().for_each(copy);
        }
        Info::read(&head)
    }

    /// Decodes the weights from the pieces into as many bytes: of a tensor that is to stay as it is nothing else is left.
    ///
    /// # Errors
    /// [`CodeFault::Destination`] for another number of bytes; [`CodeFault::Block`] when the bytes are not those of the pieces.
    pub(crate) fn write_weights(&self, to: &mut [u8]) -> Result<(), CodeFault> {
        check_destination(self.plain() as u64, to)?;
        let (fields, tier) = (self.of.fields, self.of.tier);
        let mut weights = to.chunks_mut(self.of.block_bytes());
        let mut number = 0;
        for (blocks, bytes) in &self.pieces {
            let mut bytes = *bytes;
            for (length, to) in blocks.lengths.iter().zip(&mut weights) {
                let damaged = |what| CodeFault::Block { block: number, what };
                let (code, rest) = bytes.split_at(bytes.len().min(*length as usize));
                let parts = Parts::find(fields, to.len() / fields.size(), code).map_err(damaged)?;
                tier.decode(fields, number, &parts, to).map_err(damaged)?;
                (bytes, number) = (rest, number + 1);
            }
        }
        Ok(())
    }

    pub(super) fn sums(&self) -> impl Iterator<Item = u64> {
        self.pieces.iter().flat_map(|(blocks, _)| &blocks.sums).copied()
    }

    fn lengths(&self) -> impl Iterator<Item = u32> {
        self.pieces.iter().flat_map(|(blocks, _)| &blocks.lengths).copied()
    }

    /// The bytes of all blocks.
    fn body(&self) -> usize {
        self.pieces.iter().map(|(_, bytes)| bytes.len()).sum()
    }

    /// The bytes of the weights.
    fn plain(&self) -> usize {
        self.of.count * self.of.fields.size()
    }
}
