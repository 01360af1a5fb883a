//! The weights of the lossless code, decoded by the streams of software devices.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use super::memory;
use crate::backend::{Decompress, MemoryBlock};
use crate::error::Result;
use crate::lossless::{Code, Info};

/// A code in memory, and where its weights and the verdict go.
pub(super) struct Weights {
    pub(super) src: Arc<MemoryBlock>,
    /// The bytes of the code.
    pub(super) from: Range<usize>,
    info: Info,
    pub(super) dst: Arc<MemoryBlock>,
    at: usize,
    verdict: Arc<MemoryBlock>,
    /// Where the verdict tells of damage.
    damaged_at: usize,
}

impl Weights {
    pub(super) fn of(work: &Decompress) -> Weights {
        let begin = work.source().start() + work.offset();
        Weights {
            src: Arc::clone(work.source().block()),
            from: begin..begin + work.info().bytes as usize,
            info: *work.info(),
            dst: Arc::clone(work.dst().block()),
            at: work.dst().start() + work.at(),
            verdict: Arc::clone(work.verdict().block()),
            damaged_at: work.verdict().start() + work.place() + 8,
        }
    }

    /// Decodes and writes them.
    ///
    /// # Safety
    /// Until this returns, nobody writes the code, and nobody else reads or writes the bytes of the weights and the verdict, except
    /// those who share the memory.
    #[expect(unsafe_code, reason = "as for copies")]
    pub(super) unsafe fn decode(&self) -> Result<()> {
        let Weights { src, from, info, dst, at, verdict, damaged_at } = self;
        let sound = Cell::new(true);
        let decode = |code: &[u8], weights: &mut [u8]| {
            let code = Code::open(code).ok().filter(|code| code.info() == info);
            sound.set(code.is_some_and(|code| code.decode(weights).is_ok()));
            Ok(())
        };
        let each = (from.len(), info.decoded_bytes as usize);
        // SAFETY: the ranges are inside of both, as `Decompress::new` checked; the rest is the caller's promise.
        unsafe { memory::convert((src, from.clone()), (dst, *at), each, decode)? };
        // SAFETY: as above.
        if sound.get() { Ok(()) } else { unsafe { memory::write(&1u32.to_le_bytes(), verdict, *damaged_at) } }
    }
}
