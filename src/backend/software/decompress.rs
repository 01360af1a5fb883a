//! The weights of the lossless code, decoded by the streams of software devices.

use std::ops::Range;
use std::sync::Arc;

use super::memory;
use crate::backend::{Decompress, MemoryBlock};
use crate::error::Result;
use crate::lossless::{BLOCK_WEIGHTS, CodePart, Head, Info};

/// A code in memory, or a part of it, and where its weights and the verdict go.
pub(super) struct Weights {
    pub(super) src: Arc<MemoryBlock>,
    /// Where its header and index begin, and the bytes of the part.
    head: usize,
    pub(super) from: Range<usize>,
    part: CodePart,
    info: Info,
    pub(super) dst: Arc<MemoryBlock>,
    at: usize,
    verdict: Arc<MemoryBlock>,
    place: usize,
}

/// What came of the blocks of a part: where in all weights they begin, their weights, and the sum of their sums.
struct Decoded {
    at: usize,
    weights: Vec<u8>,
    sum: u64,
}

impl Weights {
    pub(super) fn of(work: &Decompress) -> Weights {
        let (part, start) = (work.code_part(), work.source().start());
        let begin = start + work.part_offset();
        Weights {
            src: Arc::clone(work.source().block()),
            head: start + work.offset(),
            from: begin..begin + (part.end - part.begin) as usize,
            part,
            info: *work.info(),
            dst: Arc::clone(work.dst().block()),
            at: work.dst().start() + work.at(),
            verdict: Arc::clone(work.verdict().block()),
            place: work.verdict().start() + work.place(),
        }
    }

    /// Decodes and writes them.
    ///
    /// # Safety
    /// Until this returns, nobody writes the code, and nobody else reads or writes the bytes of the weights and the verdict, except
    /// those who share the memory.
    #[expect(unsafe_code, reason = "as for copies")]
    pub(super) unsafe fn decode(&self) -> Result<()> {
        let Weights { src, head, from, info, dst, at, verdict, place, .. } = self;
        if !dst.has_bytes() {
            return Ok(());
        }
        let read = |from: Range<usize>| {
            let mut bytes = vec![0; from.len()];
            // SAFETY: the range is inside of the source, as `Decompress::part` checked; the rest is the caller's promise.
            unsafe { memory::read(src, from, &mut bytes) }.map(|()| bytes)
        };
        let head = read(*head..head + info.head_bytes().min(info.bytes) as usize)?;
        let decoded = self.decoded(&head, &read(from.clone())?);
        if let Some(Decoded { at: begin, weights, .. }) = &decoded {
            // SAFETY: as above.
            unsafe { memory::write(weights, dst, at + begin)? };
        }
        let mut told = [0; Decompress::VERDICT];
        // SAFETY: as above.
        unsafe { memory::read(verdict, *place..place + told.len(), &mut told)? };
        // SAFETY: as above.
        unsafe { memory::write(&self.told(told, decoded.as_ref()), verdict, *place) }
    }

    /// The weights of the part's blocks. `None` if any of them is damaged, or the header is another's.
    fn decoded(&self, head: &[u8], bytes: &[u8]) -> Option<Decoded> {
        let head = Head::open(head).ok().filter(|head| *head.info() == self.info)?;
        let blocks = head.blocks_of(&self.part);
        let each = BLOCK_WEIGHTS as u64 * (self.info.decoded_bytes / self.info.count.max(1));
        let end = (blocks.end * each).min(self.info.decoded_bytes);
        let begin = (blocks.start * each).min(end);
        let mut weights = vec![0; (end - begin) as usize];
        let code = head.part(self.part.begin, bytes);
        code.check_end().ok()?;
        let sum = code.decode_blocks(blocks.start, &mut weights).ok()?;
        Some(Decoded { at: begin as usize, weights, sum })
    }

    /// A verdict with what came of the part.
    fn told(&self, mut verdict: [u8; Decompress::VERDICT], decoded: Option<&Decoded>) -> [u8; Decompress::VERDICT] {
        let (sum, others) = verdict.split_at_mut(8);
        // The first part takes off what all together have.
        let of_all = if self.part.after == 0 { self.info.sum } else { 0 };
        let known = sum.first_chunk().map_or(0, |sum| u64::from_le_bytes(*sum));
        let of_part = decoded.map_or(0, |decoded| decoded.sum);
        sum.copy_from_slice(&known.wrapping_add(of_part).wrapping_sub(of_all).to_le_bytes());
        if decoded.is_none() {
            others[..4].copy_from_slice(&1u32.to_le_bytes());
        }
        verdict
    }
}
