//! The code of DFloat11: Huffman codes of the exponents of bf16 weights, for checkpoints that others have written in it.
//!
//! *70% Size, 100% Accuracy: Lossless LLM Compression for Efficient GPU Inference via Dynamic-Length Float* (arXiv 2504.11651), and
//! the package `dfloat11`, versions 0.2 to 0.5, whose encoder and kernel define what is read here. Nothing is written in it.
//!
//! # Format
//!
//! A group is the weights of some modules, one after the other, with a code of their own. Its tensors, of bytes but for the last:
//!
//! | tensor | |
//! |---|---|
//! | `sign_mantissa` | a byte for each weight: its sign above its mantissa |
//! | `encoded_exponent` | the codes of the exponents, each from its highest bit on, in bytes that are filled from the highest bit down |
//! | `luts` | rows of 256 bytes: tables by the next byte of a code, and in the last row the bits of each exponent's code |
//! | `gaps` | for each window of 8 bytes of the codes the bit at which the first code begins in it: 5 bits each, the highest first |
//! | `output_positions` | for each block of windows the weights before the first code that begins in it, then all weights: u32 |
//! | `split_positions` | the weights before the second of the group's modules, the third, and so on: I64 |
//!
//! A block has as many windows as the kernel has threads, 512. The bits after the last code, up to a whole byte, are those of a code
//! that stands for the end. The byte `b` of a code is looked up in a table, that of its first byte in the first one. What is found is the
//! exponent, or, if it is 240 or more, 256 less the number of the table for the next byte. So codes have at most 32 bits, and
//! exponents of 240 and more cannot be coded. Entries that no code leads to hold what their neighbours hold.
//!
//! Where no code begins in the last block and its bytes are full, the encoder leaves its position out.
//!
//! There are no sums. What is damaged is found where a block's codes are not as many as its positions say, or do not end where the
//! next block's begin.

mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use rayon::prelude::*;

use super::CodeFault;
use table::{Run, Table};

/// Bytes of a window.
const WINDOW: u64 = 8;

/// Bits of a gap.
const GAP: u64 = 5;

/// The most threads of a block on a card.
const MOST_THREADS: u32 = 1024;

/// Blocks that a thread decodes in a row.
const TOGETHER: usize = 16;

/// Blocks that are decoded side by side.
const AT_ONCE: usize = 4;

/// The tensors of a group that say how its codes are read, and the lengths of the others.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The bytes of `luts`.
    pub luts: &'a [u8],
    /// The bytes of `output_positions`.
    pub output_positions: &'a [u8],
    /// The bytes of `gaps`.
    pub gaps: &'a [u8],
    /// The windows of a block: `threads_per_block` of the configuration.
    pub threads: u32,
    /// The bytes of `encoded_exponent`.
    pub encoded: u64,
    /// The bytes of `sign_mantissa`: the weights.
    pub weights: u64,
}

/// The code of a group, without the codes of its weights.
pub struct Group {
    table: Table,
    /// The first weight of each block and the bit at which its code begins; then the end.
    starts: Vec<Start>,
    block_bytes: u64,
    encoded: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Start {
    weight: u32,
    gap: u8,
}

fn header(what: &'static str) -> CodeFault {
    CodeFault::Header { what }
}

/// The lengths of a group's tensors, in bytes.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each is the tensor of its name, or as in `Parts`")]
pub struct Lengths {
    pub luts: u64,
    pub output_positions: u64,
    pub gaps: u64,
    pub threads: u32,
    pub encoded: u64,
    pub weights: u64,
}

impl Lengths {
    fn blocks(&self) -> u64 {
        self.encoded.div_ceil(WINDOW * u64::from(self.threads))
    }

    /// Checks that they fit each other.
    ///
    /// # Errors
    /// [`CodeFault::Header`] when they do not; [`CodeFault::TooLarge`] for more weights than positions can count.
    pub fn check(&self) -> Result<(), CodeFault> {
        if !(1..=MOST_THREADS).contains(&self.threads) {
            return Err(header("its blocks are not of 1 to 1024 threads"));
        }
        if u32::try_from(self.weights).is_err() {
            return Err(CodeFault::TooLarge { count: self.weights });
        }
        if !self.luts.is_multiple_of(table::ROW as u64)
            || !(2..=table::MOST_ROWS as u64).contains(&(self.luts / table::ROW as u64))
        {
            return Err(header("it has no tables, or more than can be named"));
        }
        let windows = self.blocks().checked_mul(self.threads.into());
        if windows.and_then(|windows| windows.checked_mul(GAP)).map(|bits| bits.div_ceil(8)) != Some(self.gaps) {
            return Err(header("it has not as many gaps as windows"));
        }
        // One may be left out.
        let positions = self.blocks().max(1)..=self.blocks() + 1;
        if !self.output_positions.is_multiple_of(4) || !positions.contains(&(self.output_positions / 4)) {
            return Err(header("it has not as many positions as blocks"));
        }
        Ok(())
    }
}

impl Group {
    /// Checks the tables, the positions and the gaps that are used, those of blocks.
    ///
    /// # Errors
    /// [`CodeFault::Header`] when they do not fit each other; [`CodeFault::TooLarge`] for more weights than positions can count.
    pub fn new(parts: &Parts<'_>) -> Result<Group, CodeFault> {
        let Parts { luts, output_positions, gaps, threads, encoded, weights } = *parts;
        let [a, b, c] = [luts, output_positions, gaps].map(|part| part.len() as u64);
        let lengths = Lengths { luts: a, output_positions: b, gaps: c, threads, encoded, weights };
        lengths.check()?;
        let (blocks, weights) = (lengths.blocks(), weights as u32);
        let positions = output_positions.as_chunks().0.iter().map(|position| u32::from_le_bytes(*position));
        let mut positions: Vec<u32> = positions.collect();
        if positions.len() as u64 == blocks && positions.last() == Some(&weights) {
            positions.push(weights);
        }
        if positions.len() as u64 != blocks + 1 {
            return Err(header("it has not as many positions as blocks"));
        }
        if positions[0] != 0 || positions.last() != Some(&weights) {
            return Err(header("its positions do not go from 0 to the number of weights"));
        }
        // A code has at least one bit.
        let (block_bytes, most) = (WINDOW * u64::from(threads), 8 * WINDOW * u64::from(threads));
        let fits = |pair: &[u32]| pair[1].checked_sub(pair[0]).is_some_and(|codes| u64::from(codes) <= most);
        if !positions.windows(2).all(fits) {
            return Err(header("its positions are not in order, or farther apart than a block's codes"));
        }
        let gap = |block: usize| if block as u64 == blocks { 0 } else { gap(gaps, block * threads as usize) };
        let starts = positions.iter().enumerate().map(|(block, &weight)| Start { weight, gap: gap(block) });
        let starts: Vec<Start> = starts.collect();
        if starts[0].gap != 0 {
            return Err(header("its first code does not begin at the first bit"));
        }
        Ok(Group { table: Table::new(luts)?, starts, block_bytes, encoded })
    }

    /// The weights of the group.
    pub fn weights(&self) -> u64 {
        self.starts.last().map_or(0, |end| end.weight.into())
    }

    /// The blocks whose codes are those of some weights.
    fn blocks(&self, weights: &Range<u64>) -> Result<Range<usize>, CodeFault> {
        let Range { start, end } = *weights;
        if start > end || end > self.weights() {
            return Err(CodeFault::Range { begin: start, end, count: self.weights() });
        }
        if start == end {
            return Ok(0..0);
        }
        let first = self.starts.partition_point(|block| u64::from(block.weight) <= start) - 1;
        Ok(first..self.starts.partition_point(|block| u64::from(block.weight) < end))
    }

    /// The bytes of `encoded_exponent` with the codes of some blocks. The last code may end in the next block.
    fn bytes_of(&self, blocks: &Range<usize>) -> Range<u64> {
        let end = (blocks.end as u64 * self.block_bytes).saturating_add(4).min(self.encoded);
        let begin = blocks.start as u64 * self.block_bytes;
        if blocks.is_empty() { 0..0 } else { begin..end }
    }

    /// The bytes of `encoded_exponent` that [`decode`](Group::decode) needs for some weights.
    ///
    /// # Errors
    /// [`CodeFault::Range`] for weights that there are not.
    pub fn encoded_bytes(&self, weights: &Range<u64>) -> Result<Range<u64>, CodeFault> {
        Ok(self.bytes_of(&self.blocks(weights)?))
    }

    /// Decodes weights of the group to their bf16 bits, in little-endian order. `encoded` is
    /// [what that needs](Group::encoded_bytes), and `rests` are these weights' bytes of `sign_mantissa`. Of a block that is partly in
    /// the range, all exponents are decoded.
    ///
    /// Above some blocks the work runs on the library's threads, one for each core.
    ///
    /// # Errors
    /// [`CodeFault::Range`] for weights that there are not; [`CodeFault::Length`] when `encoded` or `rests` is not as long as it
    /// should be, and [`CodeFault::Destination`] when `to` is not; [`CodeFault::Block`] for the first damaged block that is read. What
    /// `to` holds then is not defined.
    pub fn decode(&self, weights: Range<u64>, encoded: &[u8], rests: &[u8], to: &mut [u8]) -> Result<(), CodeFault> {
        let blocks = self.blocks(&weights)?;
        let (count, bytes) = (weights.end - weights.start, self.bytes_of(&blocks));
        for (expected, given) in [(bytes.end - bytes.start, encoded.len()), (count, rests.len())] {
            if expected != given as u64 {
                return Err(CodeFault::Length { expected, given: given as u64 });
            }
        }
        if 2 * count != to.len() as u64 {
            return Err(CodeFault::Destination { needed: 2 * count, given: to.len() as u64 });
        }
        let mut tasks = self.tasks(&weights, blocks, rests, to);
        let run = |task: &mut Task<'_>| self.run(task, bytes.start, encoded);
        let on_threads = super::tasks(tasks.len() > 1, || {
            let outcomes = tasks.par_iter_mut().map(run);
            // In order, so that the first of several damaged blocks is named.
            outcomes.reduce(|| Ok(()), Result::and)
        });
        on_threads.unwrap_or_else(|| tasks.iter_mut().try_for_each(run))
    }

    /// Shares the blocks out.
    fn tasks<'a>(
        &self,
        weights: &Range<u64>,
        blocks: Range<usize>,
        mut rests: &'a [u8],
        mut to: &'a mut [u8],
    ) -> Vec<Task<'a>> {
        let mut tasks = Vec::with_capacity(blocks.len().div_ceil(TOGETHER));
        let mut first = weights.start;
        for begin in blocks.clone().step_by(TOGETHER) {
            let blocks = begin..blocks.end.min(begin + TOGETHER);
            let end = u64::from(self.starts[blocks.end].weight).min(weights.end);
            let count = (end - first) as usize;
            let (here, after) = rests.split_at(count);
            let (task_to, to_after) = to.split_at_mut(2 * count);
            tasks.push(Task { blocks, first, rests: here, to: task_to });
            (rests, to, first) = (after, to_after, end);
        }
        tasks
    }

    fn run(&self, task: &mut Task<'_>, begin: u64, encoded: &[u8]) -> Result<(), CodeFault> {
        let Task { blocks, first, rests, to } = task;
        let (mut first, mut rests, mut to) = (*first, *rests, &mut **to);
        let codes = self.starts[blocks.start..=blocks.end].windows(2).map(|pair| pair[1].weight - pair[0].weight);
        let room = codes.max().unwrap_or(0) as usize + table::SLACK;
        let mut exponents = vec![0; AT_ONCE * room];
        for begins in blocks.clone().step_by(AT_ONCE) {
            let blocks = begins..blocks.end.min(begins + AT_ONCE);
            let mut runs = exponents
                .chunks_mut(room)
                .zip(blocks.clone())
                .map(|(exponents, block)| {
                    let bytes = self.bytes_of(&(block..block + 1));
                    let bytes = &encoded[(bytes.start - begin) as usize..(bytes.end - begin) as usize];
                    let count = self.count(block);
                    Run::new(bytes, self.starts[block].gap.into(), &mut exponents[..count + table::SLACK])
                })
                .collect::<Vec<_>>();
            self.decode_runs(blocks.start, &mut runs)?;
            for (exponents, block) in exponents.chunks(room).zip(blocks) {
                let skip = (first - u64::from(self.starts[block].weight)) as usize;
                let count = (self.count(block) - skip).min(rests.len());
                let (here, after) = rests.split_at(count);
                let (block_to, to_after) = to.split_at_mut(2 * count);
                join(&exponents[skip..skip + count], here, block_to);
                (rests, to, first) = (after, to_after, self.starts[block + 1].weight.into());
            }
        }
        Ok(())
    }

    fn count(&self, block: usize) -> usize {
        (self.starts[block + 1].weight - self.starts[block].weight) as usize
    }

    /// Decodes the exponents of some blocks.
    fn decode_runs(&self, first: usize, runs: &mut [Run<'_>]) -> Result<(), CodeFault> {
        let fault = |block: usize, what| CodeFault::Block { block: block as u64, what };
        if let Ok(runs) = <&mut [Run<'_>; AT_ONCE]>::try_from(&mut *runs) {
            // Which of them it was is found out below.
            let _ = self.table.decode_together(runs);
        }
        for (block, run) in (first..).zip(runs) {
            self.table.decode(run).ok_or(fault(block, "its bits are no code, or end"))?;
            if !self.ends_well(block, run.end() as u64) {
                return Err(fault(block, "its codes do not end where those of the next block begin"));
            }
        }
        Ok(())
    }

    /// Whether a block's last code ends where it should: at bit `reached` of the block's.
    fn ends_well(&self, block: usize, reached: u64) -> bool {
        let (next, bits) = (self.starts[block + 1], 8 * self.block_bytes);
        if u64::from(next.weight) < self.weights() {
            return reached == bits + u64::from(next.gap);
        }
        // What follows the last of all codes is less than a byte.
        (block as u64 * self.block_bytes).checked_add(reached.div_ceil(8)) == Some(self.encoded)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Group");
        debug.field("weights", &self.weights()).field("encoded", &self.encoded).finish_non_exhaustive()
    }
}

/// Blocks whose weights, from `first` on, go to `to`.
struct Task<'a> {
    blocks: Range<usize>,
    first: u64,
    rests: &'a [u8],
    to: &'a mut [u8],
}

/// The gap of a window, which is among `gaps`.
fn gap(gaps: &[u8], window: usize) -> u8 {
    let bit = window * GAP as usize;
    let bytes = [gaps[bit / 8], gaps.get(bit / 8 + 1).copied().unwrap_or(0)];
    (u16::from_be_bytes(bytes) >> (16 - GAP as usize - bit % 8) & 0x1f) as u8
}

/// Puts exponents between signs and mantissas.
fn join(exponents: &[u8], rests: &[u8], to: &mut [u8]) {
    for ((to, &exponent), &rest) in to.as_chunks_mut().0.iter_mut().zip(exponents).zip(rests) {
        let (exponent, rest) = (u16::from(exponent), u16::from(rest));
        *to = ((rest & 0x80) << 8 | exponent << 7 | rest & 0x7f).to_le_bytes();
    }
}
