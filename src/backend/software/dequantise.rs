//! The values of GGML's blocks, computed by the streams of software devices.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::SoftwareDevice;
use super::memory;
use super::stream::SoftwareStream;
use crate::backend::{
    BufMut, Decompress, DecompressFlight, Dequantise, Flight, Kernels, MemoryBlock, PatchFlight, Rejected, SentPatch,
    Stream, Undecoded,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::ggml::Format;
use crate::lossless::compressed_bound;
use crate::threads;

/// The values that are computed before they are written: a multiple of every block.
const TOGETHER: usize = 1 << 20;

/// The values that a thread computes at a time: a multiple of every block.
const TASK: usize = 1 << 14;

/// Blocks in memory, and where their values go.
pub(super) struct Values {
    pub(super) src: Arc<MemoryBlock>,
    /// The bytes of the blocks.
    pub(super) from: Range<usize>,
    format: Format,
    pub(super) dst: Arc<MemoryBlock>,
    at: usize,
    to: Float,
}

impl Values {
    pub(super) fn of(work: &Dequantise) -> Option<Values> {
        let (from, to) = work.types();
        let (format, to) = (Format::of(from)?, Float::of(to)?);
        let begin = work.source().start() + work.offset();
        let end = begin + work.values() / format.elements() * format.bytes();
        let (src, dst) = (Arc::clone(work.source().block()), Arc::clone(work.dst().block()));
        Some(Values { src, from: begin..end, format, dst, at: work.dst().start() + work.at(), to })
    }

    /// Computes and writes them.
    ///
    /// # Safety
    /// Until this returns, nobody writes the blocks, and nobody else reads or writes the bytes of the values, except those who
    /// share the memory.
    #[expect(unsafe_code, reason = "as for copies")]
    pub(super) unsafe fn compute(&self) -> Result<()> {
        let Values { src, from, format, dst, at, to } = self;
        let (blocks, values) = (TOGETHER / format.elements() * format.bytes(), TOGETHER * to.size());
        // SAFETY: the ranges are inside of both, as `Dequantise::new` checked; the rest is the caller's promise.
        unsafe { memory::convert((src, from.clone()), (dst, *at), (blocks, values), |src, dst| self.convert(src, dst)) }
    }

    fn convert(&self, blocks: &[u8], bytes: &mut [u8]) -> Result<()> {
        let Values { format, to, .. } = *self;
        let task = |(blocks, bytes): (&[u8], &mut [u8])| {
            let mut values = [0.0; TASK];
            let values = &mut values[..bytes.len() / to.size()];
            format.dequantise(blocks, values);
            to.round(values, bytes);
        };
        let (each, room) = (TASK / format.elements() * format.bytes(), TASK * to.size());
        if bytes.len() <= room {
            task((blocks, bytes));
            return Ok(());
        }
        threads::run(|| blocks.par_chunks(each).zip(bytes.par_chunks_mut(room)).for_each(task))
    }
}

/// The stream, if it is one of a software device.
fn own(stream: &dyn Stream) -> Option<&SoftwareStream> {
    (stream as &dyn std::any::Any).downcast_ref()
}

impl Kernels for SoftwareDevice {
    fn patches(&self) -> bool {
        false
    }

    fn ready(&self) -> Result<(), String> {
        Err(format!("the host patches what is for {}", self.id()))
    }

    fn patch<'a>(&self, _: &dyn Stream, _: SentPatch<'a>, _: BufMut, _: usize) -> Result<PatchFlight<'a>> {
        Err(Error::invalid(format!("{} has no kernels that patch", self.id())))
    }

    fn dequantises(&self, stream: &dyn Stream, from: DType, to: DType) -> Result<(), String> {
        let known = from.is_ggml_block() && matches!(to, DType::F32 | DType::F16 | DType::BF16);
        let here = own(stream).is_some_and(|stream| stream.device() == self.id());
        if known && here {
            Ok(())
        } else {
            Err(format!("{} does not compute {to} of {from} on this stream", self.id()))
        }
    }

    fn dequantise(&self, stream: &dyn Stream, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        let (from, to) = work.types();
        match own(stream).filter(|_| self.dequantises(stream, from, to).is_ok()) {
            Some(stream) => stream.dequantise(work),
            None => {
                let why = format!("{} does not compute {to} of {from} on this stream", self.id());
                Err(work.rejected(Error::invalid(why)))
            }
        }
    }

    fn decompresses(&self, stream: &dyn Stream, dtype: DType) -> Result<(), String> {
        let here = own(stream).is_some_and(|stream| stream.device() == self.id());
        if here && compressed_bound(dtype, 0).is_some() {
            Ok(())
        } else {
            Err(format!("{} does not decode {dtype} on this stream", self.id()))
        }
    }

    fn decompress(&self, stream: &dyn Stream, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        match (self.decompresses(stream, work.dtype()), own(stream)) {
            (Ok(()), Some(stream)) => stream.decompress(work),
            (Err(why), _) => Err(work.rejected(Error::invalid(why))),
            (Ok(()), None) => Err(work.rejected(Error::bug("a stream of another kind that decodes"))),
        }
    }
}
