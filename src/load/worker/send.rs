//! Tensors on their way to other devices: through the staging buffers piece by piece, or whole if the host patches them; or
//! past the host, where a device reads files itself.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use super::fill::Block;
use super::{Job, Scratch, lock};
use crate::backend::{Buf, BufMut, Event, MemoryKind, Piece, Stream, Transfer};
use crate::checkpoint::TensorId;
use crate::error::{Error, Result};
use crate::patch::TensorPatch;
use crate::threads;
use crate::transfer::{FilePart, Stretch};

/// The most bytes of a tensor that travels in one staging buffer with others. A larger one is read straight into a buffer by itself.
const SMALL: usize = 256 << 10;

/// What pieces of a tensor begin at multiples of in its file, so that they are read directly without what is around them.
const BLOCK: usize = 64 << 10;

impl Job<'_> {
    /// Fills a block that lives on another device, through staging buffers.
    pub(super) fn fill_device(&self, block: Block, stream: &dyn Stream, scratch: &mut Scratch) -> Result<Buf> {
        let Block { mut tensors, mut memory } = block;
        tensors.sort_by_key(|(_, range)| (range.start, range.end));
        for together in tensors.chunk_by(|one, next| self.travel_together(one, next)) {
            let (tensor, range) = match together {
                [alone] => alone.clone(),
                _ => {
                    memory = self.send_together(together, memory, stream)?;
                    continue;
                }
            };
            memory = match (self.reuse.in_base(tensor), self.patch(tensor)) {
                (Some(base), _) => self.send_from_base(base, range, memory, stream)?,
                (None, None) if self.layout.factors_with(tensor).is_some() => {
                    self.send_factor(tensor, range, memory, stream)?
                }
                (None, Some(patch)) if patch.is_read_in_parts() => {
                    self.send_cast(patch, tensor, range, memory, stream)?
                }
                (None, Some(patch)) => self.send_changed(patch, tensor, range, memory, stream, scratch)?,
                (None, None) => self.send_plain(tensor, range, memory, stream)?,
            };
        }
        Ok(memory.freeze())
    }

    /// Whether two tensors travel in one staging buffer: small ones that lie together in the block and are as in the files.
    fn travel_together(&self, one: &(TensorId, Range<usize>), next: &(TensorId, Range<usize>)) -> bool {
        let small = |(tensor, range): &(TensorId, Range<usize>)| range.len() <= SMALL && self.is_plain(*tensor);
        one.1.end == next.1.start && small(one) && small(next)
    }

    /// Sends tensors that lie together in the block, as many in a staging buffer as it holds.
    fn send_together(
        &self,
        tensors: &[(TensorId, Range<usize>)],
        mut memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        let mut rest = tensors;
        while let Some((_, first)) = rest.first() {
            let begin = first.start;
            let fits = |(_, range): &&(TensorId, Range<usize>)| range.end - begin <= self.pool.bytes_each();
            // A buffer holds any small tensor of the block.
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            let end = now.last().map_or(begin, |(_, range)| range.end);
            let within = |(tensor, range): &(TensorId, Range<usize>)| (*tensor, range.start - begin..range.end - begin);
            let tensors = now.iter().map(within).collect();
            memory = self.send_parts(begin..end, 0, memory, stream, |_, len, buffer| {
                self.read_plain(self.plain_parts(&tensors, &mut buffer[..len])?).map(|()| 0..len)
            })?;
            rest = later;
        }
        Ok(memory)
    }

    /// Fills the place of an unpatched tensor: what its device reads itself, and the rest in pieces through the pool.
    fn send_plain(
        &self,
        tensor: TensorId,
        range: Range<usize>,
        mut memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        let offset = self.files(tensor)?.checkpoint().info(tensor)?.offset;
        for Stretch { bytes, by_device } in self.divided(tensor, &range, stream)? {
            let done = if by_device { self.read_on_device(tensor, &bytes, &range, &mut memory, stream)? } else { 0 };
            let rest = bytes.start + done..bytes.end;
            let place = range.start + rest.start..range.start + rest.end;
            let read = |at, len, buffer: &mut [u8]| self.read_within(tensor, (rest.start + at) as u64, len, buffer);
            memory = self.send_parts(place, offset + rest.start as u64, memory, stream, read)?;
        }
        Ok(memory)
    }

    /// The bytes of a tensor, by whether its device reads them itself.
    fn divided(&self, tensor: TensorId, range: &Range<usize>, stream: &dyn Stream) -> Result<Vec<Stretch>> {
        let Some(reads) = self.device_reads.get(&stream.device()) else {
            return Ok(vec![Stretch { bytes: 0..range.len(), by_device: false }]);
        };
        let checkpoint = self.files(tensor)?.checkpoint();
        checkpoint.with_source(tensor, |source, from| Ok(reads.divide(&FilePart { source, from, to: range.clone() })))
    }

    /// Has the device read `bytes` of a tensor into their place, of which the tensor has `range`. Returns how many it read.
    fn read_on_device(
        &self,
        tensor: TensorId,
        bytes: &Range<usize>,
        range: &Range<usize>,
        memory: &mut BufMut,
        stream: &dyn Stream,
    ) -> Result<usize> {
        let Some(reads) = self.device_reads.get(&stream.device()) else { return Ok(0) };
        let checkpoint = self.files(tensor)?.checkpoint();
        checkpoint.with_source(tensor, |source, from| {
            let to = range.start + bytes.start..range.start + bytes.end;
            let part = FilePart { source, from: from + bytes.start as u64, to };
            reads.read(&[part], memory, self.loader.deadline, |read| {
                self.count_read(read);
                self.check_cancelled()
            })
        })
    }

    /// Sends a tensor that is only cast in pieces through the pool.
    fn send_cast(
        &self,
        patch: &TensorPatch,
        tensor: TensorId,
        range: Range<usize>,
        memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        self.patched.fetch_add(1, Ordering::Relaxed);
        // A piece is a whole tensor, or as large as the pool's largest buffers, which hold whole elements of any type.
        self.send_parts(range, 0, memory, stream, |at, len, buffer| {
            self.cast_part(patch, tensor, at, &mut buffer[..len]).map(|()| 0..len)
        })
    }

    /// Sends a range of a block in pieces through the pool. `read` reads up to so many of its bytes from a byte on into a buffer, and
    /// returns where they are. The range begins at an offset of a file. Workers that have nothing to do help.
    pub(in crate::load) fn send_parts(
        &self,
        range: Range<usize>,
        offset: u64,
        memory: BufMut,
        stream: &dyn Stream,
        read: impl Fn(usize, usize, &mut [u8]) -> Result<Range<usize>> + Sync,
    ) -> Result<BufMut> {
        let memory = Mutex::new(Some(memory));
        let pieces = pieces(range.len(), offset, self.pool.bytes_each());
        threads::work_through(
            pieces,
            || self.places.free(),
            |piece| {
                let mut at = piece.start;
                while at < piece.end {
                    let (mut staging, lease) = self.pool.acquire(self.loader.deadline)?;
                    let from = match staging.host_mut() {
                        Some(buffer) => read(at, piece.end - at, buffer)?,
                        None => return Err(Error::bug("staging memory that the host cannot address")),
                    };
                    let (staging, bytes) = (staging.freeze(), from.len());
                    let piece = Piece { src: staging.clone(), from, at: range.start + at };
                    let mut memory = lock(&memory);
                    // Another thread failed, and says why.
                    let Some(dst) = memory.take() else { return Ok(()) };
                    let flight = stream.send(Transfer::new(vec![piece], dst)?)?;
                    lease.give_back(flight.done().clone(), staging);
                    *memory = Some(flight.chain());
                    at += bytes;
                }
                Ok(())
            },
        )?;
        let memory = memory.into_inner().unwrap_or_else(PoisonError::into_inner);
        memory.ok_or_else(|| Error::bug("memory that a failed copy kept"))
    }

    /// Sends a tensor that adapters change. Its device patches it if it can, otherwise the host does.
    fn send_changed(
        &self,
        patch: &TensorPatch,
        tensor: TensorId,
        range: Range<usize>,
        memory: BufMut,
        stream: &dyn Stream,
        scratch: &mut Scratch,
    ) -> Result<BufMut> {
        let checkpoint = self.files(tensor)?.checkpoint();
        let planned = self.on_device.plan(stream.device(), patch, range.start, checkpoint)?;
        let sent =
            planned.as_ref().map(|planned| planned.send(&self.on_device, stream, &mut scratch.factors)).transpose()?;
        let Some((planned, sent)) = planned.as_ref().zip(sent.flatten()) else {
            return self.send_patched(patch, tensor, range, memory, stream, &mut scratch.patched);
        };
        let memory = self.send_plain(tensor, range.clone(), memory, stream)?;
        let siblings = patch.needs().iter().map(|&tensor| checkpoint.layout().at(tensor).bytes).sum();
        self.read.fetch_add(siblings, Ordering::Relaxed);
        self.patched.fetch_add(1, Ordering::Relaxed);
        planned.apply(&self.on_device, stream, sent, (memory, range.start), &mut scratch.factors)
    }

    /// Sends a whole tensor that the host patched, from the worker's buffer, which the worker reuses for the next tensor.
    fn send_patched(
        &self,
        patch: &TensorPatch,
        tensor: TensorId,
        range: Range<usize>,
        memory: BufMut,
        stream: &dyn Stream,
        scratch: &mut Option<(Event, Buf)>,
    ) -> Result<BufMut> {
        // A buffer that is too small is waited for too: it must be free before a larger one is allocated.
        let old = scratch.take();
        let old = old.map(|(event, old)| event.wait(self.loader.deadline).map(|()| old.try_reclaim().ok()));
        let mut staging = match old.transpose()?.flatten().filter(|old| old.bytes() >= range.len()) {
            Some(old) => old,
            None => self.host.alloc_near(range.len(), MemoryKind::Pinned, stream.device())?,
        };
        match staging.host_mut() {
            Some(dst) => self.read_patched(patch, tensor, &mut dst[..range.len()])?,
            None => return Err(Error::bug("staging memory that the host cannot address")),
        }
        let staging = staging.freeze();
        let piece = Piece { src: staging.clone(), from: 0..range.len(), at: range.start };
        let flight = stream.send(Transfer::new(vec![piece], memory)?)?;
        *scratch = Some((flight.done().clone(), staging));
        Ok(flight.chain())
    }
}

/// Divides `len` bytes, the first of which is at `offset` of a file, into pieces of at most `most`. They are about even, so that none
/// is a few bytes, and all but the first begin at whole blocks of the file.
fn pieces(len: usize, offset: u64, most: usize) -> Vec<Range<usize>> {
    if len <= most || !most.is_multiple_of(BLOCK) {
        return (0..len).step_by(most.max(1)).map(|at| at..len.min(at + most)).collect();
    }
    // Less than a block.
    let before = (offset % BLOCK as u64) as usize;
    let each = (before + len).div_ceil((before + len).div_ceil(most)).next_multiple_of(BLOCK);
    let starts = (0..before + len).step_by(each);
    starts.map(|at| at.saturating_sub(before)..len.min(at + each - before)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_even_and_begin_at_blocks() {
        const MIB: usize = 1 << 20;
        assert!(pieces(0, 5, MIB).is_empty());
        assert!(matches!(&pieces(MIB, 5, MIB)[..], [Range { start: 0, end: MIB }]));
        assert_eq!(pieces(100, 5, 40), [0..40, 40..80, 80..100]);
        for (len, offset) in [(MIB + 1, 0), (5 * MIB, 70_000), (10 * MIB + 100, BLOCK as u64 - 1)] {
            let pieces = pieces(len, offset, MIB);
            assert_eq!((pieces[0].start, pieces.last().unwrap().end), (0, len));
            assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(pieces.iter().all(|piece| piece.len() <= MIB && piece.len() > MIB / 3), "{pieces:?}");
            assert!(pieces[1..].iter().all(|piece| (offset + piece.start as u64).is_multiple_of(BLOCK as u64)));
        }
    }
}
