//! Computation on the device: the values of blocks (`dequantise`) and the weights of codes (`decompress`). Patches are made on the
//! host: they are defined by fused multiply-add, which no feature of Vulkan 1.3 promises.

use std::any::Any;
use std::sync::Arc;

use super::arena::VulkanMemory;
use super::copy::Place;
use super::device::VulkanDevice;
use super::dispatch::Dispatch;
use super::pipelines::{Pipeline, Program};
use super::stream::VulkanStream;
use super::{decompress, dequantise};
use crate::backend::{
    Buf, BufMut, Decompress, DecompressFlight, Dequantise, Event, Flight, Kernels, MemoryBlock, PatchFlight, Rejected,
    SentPatch, Stream, Undecoded,
};
use crate::dtype::DType;
use crate::error::{Error, Mismatch, Result};

/// The bytes that kernels write at a time, at multiples of as many.
const WORD: usize = 4;

impl VulkanDevice {
    /// The kernel of a program, for a stream of this device.
    ///
    /// # Errors
    /// The reason why there is none, for the user.
    pub(super) fn kernel(&self, stream: &dyn Stream, program: &Program) -> Result<Pipeline, String> {
        let stream = self.own(stream).ok_or_else(|| format!("the stream is not one of {}", self.context().id()))?;
        if !stream.computes() {
            return Err(format!("the stream's queue of {} only copies", self.context().id()));
        }
        self.context().pipelines().get(self.context(), program)
    }

    /// The stream, if it is one of this device.
    pub(super) fn own<'s>(&self, stream: &'s dyn Stream) -> Option<&'s VulkanStream> {
        (stream as &dyn Any).downcast_ref::<VulkanStream>().filter(|stream| stream.is_of(self.context()))
    }

    /// The place of `at` in a buffer of this device that is only read. `what` is what a buffer of another device is.
    pub(super) fn source(&self, what: &str, buffer: &Buf, at: usize) -> Result<Place> {
        self.place(what, buffer.block(), buffer.start() + at)
    }

    /// The place of `bytes` bytes at `at` of a buffer of this device. Kernels write whole words, and none of them may have bytes of
    /// another buffer, which others may be writing.
    pub(super) fn target(&self, what: &str, buffer: &BufMut, at: usize, bytes: usize) -> Result<Place> {
        let (start, begin) = (buffer.start(), buffer.start() + at);
        let (own_end, end) = (start + buffer.bytes(), begin + bytes);
        let last = own_end == buffer.block().bytes();
        if begin / WORD * WORD < start || (end.next_multiple_of(WORD) > own_end && !last) {
            let why = format!("{what} begins or ends in {WORD} bytes that another part of the allocation shares");
            return Err(Error::invalid(why));
        }
        self.place(what, buffer.block(), begin)
    }

    /// Queues kernels on a stream of this device. Returns the event after them; or the error, with the event after what may be under
    /// way.
    fn run(
        &self,
        stream: &dyn Stream,
        events: &[Event],
        memory: &[&Arc<MemoryBlock>],
        dispatches: &[Dispatch],
    ) -> Result<Event, (Error, Option<Event>)> {
        let not_own = || (Error::invalid(format!("the stream is not one of {}", self.context().id())), None);
        let stream = self.own(stream).ok_or_else(not_own)?;
        // SAFETY: what is bound is inside of the buffers, as the work was checked for. The kernel of blocks reads the blocks of so many
        // values and writes these. That of codes, whatever the code holds, reads inside of its header, its index and the part, and
        // writes the weights and the verdict alone.
        unsafe { stream.run(events, memory, dispatches) }
    }

    fn place(&self, what: &str, block: &MemoryBlock, at: usize) -> Result<Place> {
        let id = self.context().id();
        let own = block.downcast::<VulkanMemory>().filter(|memory| memory.context().is(self.context()));
        let mismatch = || Mismatch::Memory { what: what.to_owned(), memory: block.device(), device: id };
        let (buffer, start) = own.and_then(VulkanMemory::place).ok_or_else(mismatch)?;
        Ok((buffer, start + at as u64))
    }
}

impl Kernels for VulkanDevice {
    fn patches(&self) -> bool {
        false
    }

    fn ready(&self) -> Result<(), String> {
        Err(format!("{} has no kernels that patch", self.context().id()))
    }

    fn patch<'a>(
        &self,
        _stream: &dyn Stream,
        _patch: SentPatch<'a>,
        _weight: BufMut,
        _at: usize,
    ) -> Result<PatchFlight<'a>> {
        Err(Error::invalid(self.ready().err().unwrap_or_default()))
    }

    fn dequantises(&self, stream: &dyn Stream, from: DType, to: DType) -> Result<(), String> {
        dequantise::pipeline(self, stream, from, to).map(drop)
    }

    fn dequantise(&self, stream: &dyn Stream, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        let dispatches = match dequantise::dispatches(self, stream, &work) {
            Ok(dispatches) => dispatches,
            Err(error) => return Err(work.refused(error, None)),
        };
        let memory = [work.source().block(), work.dst().block()];
        match self.run(stream, &work.waits(), &memory, &dispatches) {
            Ok(done) => Ok(work.launched_in_order(done)),
            Err((error, under_way)) => Err(work.refused(error, under_way)),
        }
    }

    fn decompresses(&self, stream: &dyn Stream, dtype: DType) -> Result<(), String> {
        decompress::pipeline(self, stream, dtype).map(drop)
    }

    fn decompress(&self, stream: &dyn Stream, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        let dispatches = match decompress::dispatches(self, stream, &work) {
            Ok(dispatches) => dispatches,
            Err(error) => return Err(work.refused(error, None)),
        };
        let memory = [work.source().block(), work.dst().block(), work.verdict().block()];
        match self.run(stream, &work.waits(), &memory, &dispatches) {
            Ok(done) => Ok(work.launched_in_order(done)),
            Err((error, under_way)) => Err(work.refused(error, under_way)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sha2::{Digest, Sha256};

    #[test]
    fn the_texts_are_made_of_the_sources() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/vulkan/kernels");
        let sums = std::fs::read_to_string(folder.join("sha256")).unwrap();
        assert!(sums.lines().filter(|line| line.ends_with(".spv")).count() == 28);
        for line in sums.lines() {
            let (sum, name) = line.split_once("  ").unwrap();
            let content = std::fs::read(folder.join(name)).unwrap();
            let found: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, sum, "{name} has changed since; run scripts/kernels/vulkan");
        }
    }
}
