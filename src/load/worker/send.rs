//! Tensors on their way to other devices: through the staging buffers piece by piece, or whole if the host patches them; or
//! past the host, where a device reads files itself.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{Job, Scratch, Tensors};
use crate::backend::{Buf, BufMut, Event, MemoryKind, Piece, Stream, Transfer};
use crate::checkpoint::TensorId;
use crate::error::{Error, Result};
use crate::patch::TensorPatch;
use crate::transfer::{FilePart, Stretch};

impl Job<'_> {
    /// Fills a block that lives on another device, through staging buffers.
    pub(super) fn fill_device(
        &self,
        tensors: Tensors,
        mut memory: BufMut,
        stream: &dyn Stream,
        scratch: &mut Scratch,
    ) -> Result<Buf> {
        for (tensor, range) in tensors {
            memory = match (self.reuse.in_base(tensor), self.patch(tensor)) {
                (Some(base), _) => self.send_from_base(base, range, memory, stream)?,
                (None, None) if self.layout.factors_with(tensor).is_some() => {
                    self.send_factor(tensor, range, memory, stream)?
                }
                (None, Some(patch)) if patch.only_casts() => self.send_cast(patch, tensor, range, memory, stream)?,
                (None, Some(patch)) => self.send_changed(patch, tensor, range, memory, stream, scratch)?,
                (None, None) => self.send_plain(tensor, range, memory, stream)?,
            };
        }
        Ok(memory.freeze())
    }

    /// Fills the place of an unpatched tensor: what its device reads itself, and the rest in pieces through the pool.
    fn send_plain(
        &self,
        tensor: TensorId,
        range: Range<usize>,
        mut memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        for Stretch { bytes, by_device } in self.divided(tensor, &range, stream)? {
            let read = if by_device { self.read_on_device(tensor, &bytes, &range, &mut memory, stream)? } else { 0 };
            let rest = bytes.start + read..bytes.end;
            memory = self.send_parts(
                range.start + rest.start..range.start + rest.end,
                memory,
                stream,
                |at, len, buffer| self.read_within(tensor, (rest.start + at) as u64, len, buffer),
            )?;
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
        self.send_parts(range, memory, stream, |at, len, buffer| {
            self.cast_part(patch, tensor, at, &mut buffer[..len]).map(|()| 0..len)
        })
    }

    /// Sends a tensor in pieces through the pool. `read` reads up to so many bytes of the tensor from a byte on into a buffer, and
    /// returns where they are.
    pub(in crate::load) fn send_parts(
        &self,
        range: Range<usize>,
        mut memory: BufMut,
        stream: &dyn Stream,
        mut read: impl FnMut(usize, usize, &mut [u8]) -> Result<Range<usize>>,
    ) -> Result<BufMut> {
        let mut at = 0;
        while at < range.len() {
            let most = self.pool.bytes_each().min(range.len() - at);
            let (mut staging, lease) = self.pool.acquire(self.loader.deadline)?;
            let from = match staging.host_mut() {
                Some(buffer) => read(at, most, buffer)?,
                None => return Err(Error::bug("staging memory that the host cannot address")),
            };
            let (staging, bytes) = (staging.freeze(), from.len());
            let piece = Piece { src: staging.clone(), from, at: range.start + at };
            let flight = stream.send(Transfer::new(vec![piece], memory)?)?;
            lease.give_back(flight.done().clone(), staging);
            memory = flight.chain();
            at += bytes;
        }
        Ok(memory)
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
