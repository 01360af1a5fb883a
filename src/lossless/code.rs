//! The code of a tensor, or some of its blocks, and how weights are decoded from it.

use std::fmt;
use std::ops::Range;

use rayon::prelude::*;

use super::block::ALIGN;
use super::decode::Parts;
use super::fault::CodeFault;
use super::fields::Fields;
use super::header::{self, Info, Place};
use super::vector::Tier;
use super::{BLOCK, TOGETHER, longest_block, padded, tasks};

/// Decodes a code as [`compress`](super::compress) makes it: [`Code::open`], then [`Code::decode`].
///
/// # Errors
/// Those of the two.
pub fn decompress(code: &[u8], weights: &mut [u8]) -> Result<(), CodeFault> {
    Code::open(code)?.decode(weights)
}

/// The header and the index of a code, which were checked: they say where each block is, so that a part of the code can be decoded
/// without the rest.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    info: Info,
    fields: Fields,
    place: Place<'a>,
    pub(super) tier: Tier,
}

impl<'a> Head<'a> {
    /// Checks header and index, the first [`Info::head_bytes`] bytes of a code, no less and no more.
    ///
    /// # Errors
    /// As [`Info::read`]; [`CodeFault::Length`] when there are more or less bytes; [`CodeFault::Header`].
    pub fn open(head: &'a [u8]) -> Result<Head<'a>, CodeFault> {
        let (info, place) = header::open(head)?;
        let fields = Fields::of(info.dtype).ok_or(CodeFault::NoCode { dtype: info.dtype })?;
        Ok(Head { info, fields, place, tier: Tier::best() })
    }

    /// What the header says.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The bytes of the code, counted from the header's first, from which weights of a range are decoded: those of all blocks that
    /// have any of them.
    ///
    /// # Errors
    /// [`CodeFault::Range`] for weights that there are not.
    pub fn bytes_of(&self, weights: &Range<u64>) -> Result<Range<u64>, CodeFault> {
        self.check_range(weights)?;
        if weights.is_empty() {
            return Ok(0..0);
        }
        let block = BLOCK as u64;
        let (first, last) = (self.block(weights.start / block), self.block((weights.end - 1) / block));
        let (first, last) = first.zip(last).ok_or(CodeFault::Header { what: "it has too few blocks" })?;
        Ok(first.start..last.end)
    }

    /// The bytes of a block, counted from the header's first. `None` if there is no such block.
    fn block(&self, block: u64) -> Option<Range<u64>> {
        match self.place {
            Place::Blocks(places) => {
                let block = usize::try_from(block).ok()?;
                let place = |place: &[u8; 4]| u64::from(u32::from_le_bytes(*place)) * ALIGN as u64;
                Some(place(places.get(block)?)..place(places.get(block.checked_add(1)?)?))
            }
            Place::Plain { .. } if block < self.info.blocks() => {
                let (head, each) = (self.info.head_bytes(), (BLOCK * self.fields.size()) as u64);
                Some(head + block * each..head + ((block + 1) * each).min(self.info.decoded_bytes))
            }
            Place::Plain { .. } => None,
        }
    }

    /// The blocks that end in a part of the code.
    pub(crate) fn blocks_of(&self, part: &CodePart) -> Range<u64> {
        // They follow each other, so how many end up to a byte is found by halving.
        let up_to = |byte: u64| {
            let (mut low, mut high) = (0, self.info.blocks());
            while low < high {
                let middle = low + (high - low) / 2;
                match self.block(middle) {
                    // What pads the weights of a tensor that stays as it was is no block's.
                    Some(block) if padded(block.end) <= byte => low = middle + 1,
                    _ => high = middle,
                }
            }
            low
        };
        up_to(part.after)..up_to(part.end)
    }

    /// The code, of which `bytes` are those from `begin` on, counted from the header's first.
    pub fn part(&self, begin: u64, bytes: &'a [u8]) -> Code<'a> {
        Code { head: *self, begin, bytes }
    }

    fn check_range(&self, weights: &Range<u64>) -> Result<(), CodeFault> {
        let Range { start, end } = *weights;
        match start <= end && end <= self.info.count {
            true => Ok(()),
            false => Err(CodeFault::Range { begin: start, end, count: self.info.count }),
        }
    }
}

/// A part of a code that is decoded by itself, once header and index are there, too: those blocks that end after byte `after` of the
/// code and not after byte `end`, of which the bytes from `begin` on are there. Parts of which each has the `end` of the one before
/// as `after`, from 0 to all bytes, decode all weights. None of them is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "three places in a code")]
pub struct CodePart {
    /// The first byte of the code that is there, a multiple of 16.
    pub begin: u64,
    /// The end of the part before, a multiple of 16.
    pub after: u64,
    /// The end of those that are there, a multiple of 16.
    pub end: u64,
}

impl CodePart {
    /// All of a code.
    pub fn whole(info: &Info) -> CodePart {
        CodePart { begin: 0, after: 0, end: info.bytes }
    }

    /// Whether it is a part of a code with this header, so that all that ends in it, and is no longer than a block may be, is there.
    pub(crate) fn is_of(&self, info: &Info) -> bool {
        let CodePart { begin, after, end } = *self;
        let tail = longest_block(info.decoded_bytes / info.count.max(1));
        let aligned = [begin, after, end].iter().all(|place| place.is_multiple_of(ALIGN as u64));
        aligned
            && begin <= after
            && after < end
            && end <= info.bytes
            && (begin == 0 || begin.saturating_add(tail) <= after)
    }

    /// Its share of as many bytes of weights, by its share of the code's `bytes`: what is decoded of them, but for some blocks. The
    /// shares of all parts add up.
    pub(crate) fn share(&self, weights: u64, bytes: u64) -> u64 {
        let up_to = |end: u64| (u128::from(weights) * u128::from(end) / u128::from(bytes.max(1))) as u64;
        up_to(self.end).saturating_sub(up_to(self.after))
    }
}

/// The code of a tensor, whose header and index were checked, or a [part](Head::part) of it.
#[derive(Clone, Copy)]
pub struct Code<'a> {
    pub(super) head: Head<'a>,
    /// What is there of the code, and the place of the first byte.
    begin: u64,
    bytes: &'a [u8],
}

impl<'a> Code<'a> {
    /// Checks header and index. The bytes are those of one code, no less and no more.
    ///
    /// # Errors
    /// As [`Info::read`]; [`CodeFault::Length`] when there are more or less bytes than the header says.
    pub fn open(code: &'a [u8]) -> Result<Code<'a>, CodeFault> {
        let info = Info::read(code)?;
        if info.bytes != code.len() as u64 {
            return Err(CodeFault::Length { expected: info.bytes, given: code.len() as u64 });
        }
        // A header that announces a longer index is found below.
        let (head, _) = code.split_at(code.len().min(usize::try_from(info.head_bytes()).unwrap_or(usize::MAX)));
        let code = Head::open(head)?.part(0, code);
        code.check_end()?;
        Ok(code)
    }

    /// What the header says.
    pub fn info(&self) -> &Info {
        self.head.info()
    }

    /// The bytes of a block's code, for what decodes it elsewhere; of a tensor that stays as it was, the block's weights.
    /// `None` if there is no such block, or not here.
    pub fn block(&self, block: u64) -> Option<&'a [u8]> {
        let range = self.head.block(block)?;
        let at = |place: u64| usize::try_from(place.checked_sub(self.begin)?).ok();
        self.bytes.get(at(range.start)?..at(range.end)?)
    }

    /// Decodes all weights, into as many bytes.
    ///
    /// Above some blocks the work runs on the library's threads, one for each core.
    ///
    /// # Errors
    /// [`CodeFault::Destination`] when `weights` has another length; [`CodeFault::Block`] for the first damaged block, and
    /// [`CodeFault::Header`] when the blocks are not those of the header. What `weights` holds then is not defined.
    pub fn decode(&self, weights: &mut [u8]) -> Result<(), CodeFault> {
        check_destination(self.info().decoded_bytes, weights)?;
        let sum = self.decode_blocks(0, weights)?;
        if sum != self.info().sum {
            return Err(CodeFault::Header { what: "its blocks are not those of its header" });
        }
        Ok(())
    }

    /// Checks what follows the last block, if that is in this part.
    ///
    /// # Errors
    /// [`CodeFault::Header`] when it is not zero.
    pub(crate) fn check_end(&self) -> Result<(), CodeFault> {
        let (info, end) = (self.info(), self.begin.saturating_add(self.bytes.len() as u64));
        let (Place::Plain { .. }, true) = (self.head.place, end == info.bytes) else { return Ok(()) };
        let weights = info.head_bytes().saturating_add(info.decoded_bytes);
        let at = usize::try_from(weights.saturating_sub(self.begin)).unwrap_or(usize::MAX);
        header::check_zeros(self.bytes.get(at..).unwrap_or(&[]))
    }

    /// Decodes whole blocks from `first` on, into as many bytes as their weights have, and returns the sum of their sums.
    ///
    /// # Errors
    /// [`CodeFault::Block`] for the first damaged block, or that is not in this [part](Head::part).
    pub(crate) fn decode_blocks(&self, first: u64, weights: &mut [u8]) -> Result<u64, CodeFault> {
        let task = BLOCK * self.head.fields.size() * TOGETHER;
        let of_tasks = tasks(weights.len() > task, || {
            let tasks = weights.par_chunks_mut(task).enumerate();
            let sums = tasks.map(|(index, weights)| self.decode_each(first + (index * TOGETHER) as u64, weights));
            // In order, so that the first of several damaged blocks is named.
            sums.reduce(|| Ok(0), |before, after| Ok(before?.wrapping_add(after?)))
        });
        of_tasks.unwrap_or_else(|| self.decode_each(first, weights))
    }

    fn decode_each(&self, first: u64, weights: &mut [u8]) -> Result<u64, CodeFault> {
        let mut sum = 0u64;
        for (block, weights) in (first..).zip(weights.chunks_mut(BLOCK * self.head.fields.size())) {
            sum = sum.wrapping_add(self.decode_block(block, weights)?);
        }
        Ok(sum)
    }

    /// Decodes a block's weights, all of them, and returns their sum.
    fn decode_block(&self, block: u64, weights: &mut [u8]) -> Result<u64, CodeFault> {
        let Head { fields, place, tier, .. } = self.head;
        let damaged = |what| CodeFault::Block { block, what };
        let code = self.block(block).ok_or(damaged("there is no such block"))?;
        let parts = match place {
            Place::Blocks(_) => Parts::find(fields, weights.len() / fields.size(), code),
            Place::Plain { sums } => {
                let sum = sums.get(block as usize).ok_or(damaged("it has no sum"))?;
                Parts::plain(u64::from_le_bytes(*sum), code, weights.len())
            }
        };
        let parts = parts.map_err(damaged)?;
        tier.decode(fields, block, &parts, weights).map_err(damaged)?;
        Ok(parts.sum)
    }

    /// Decodes the weights of a range. Of a block that is partly in it, all is decoded.
    ///
    /// # Errors
    /// [`CodeFault::Range`] for weights that there are not; [`CodeFault::Destination`] when `weights` has not as many bytes as
    /// the range; [`CodeFault::Block`] for the first damaged block that is read, or that is not in this
    /// [part](Head::part). What `weights` holds then is not defined.
    pub fn decode_range(&self, range: Range<u64>, weights: &mut [u8]) -> Result<(), CodeFault> {
        self.head.check_range(&range)?;
        let Range { start, end } = range;
        let size = self.head.fields.size();
        check_destination((end - start) * size as u64, weights)?;
        // The parts of the range: up to the next block's beginning, whole blocks, and what is left.
        let block = BLOCK as u64;
        let first = ((start.next_multiple_of(block) - start).min(end - start)) as usize * size;
        let (head, others) = weights.split_at_mut(first);
        let whole =
            if end == self.info().count { others.len() } else { others.len() / (BLOCK * size) * (BLOCK * size) };
        let (whole, tail) = others.split_at_mut(whole);
        self.decode_part(start, head)?;
        self.decode_blocks(start.div_ceil(block), whole)?;
        self.decode_part(end - (tail.len() / size) as u64, tail)
    }

    /// Decodes weights of one block, from weight `start` of the tensor on.
    fn decode_part(&self, start: u64, weights: &mut [u8]) -> Result<(), CodeFault> {
        if weights.is_empty() {
            return Ok(());
        }
        let size = self.head.fields.size();
        let block = start / BLOCK as u64;
        let begin = block * BLOCK as u64;
        let count = (self.info().count - begin).min(BLOCK as u64) as usize;
        let mut all = vec![0; count * size];
        self.decode_block(block, &mut all)?;
        weights.copy_from_slice(&all[(start - begin) as usize * size..][..weights.len()]);
        Ok(())
    }
}

pub(super) fn check_destination(needed: u64, weights: &[u8]) -> Result<(), CodeFault> {
    if needed == weights.len() as u64 {
        return Ok(());
    }
    Err(CodeFault::Destination { needed, given: weights.len() as u64 })
}

impl fmt::Debug for Head<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Head").field("info", &self.info).finish_non_exhaustive()
    }
}

impl fmt::Debug for Code<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Code").field("info", self.info()).finish_non_exhaustive()
    }
}
