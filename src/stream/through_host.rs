//! The way through host memory, for bytes of devices that the compute device cannot read: in pieces that take turns with
//! a few buffers, so that a layer of any size needs little of the host.

use std::sync::{Arc, Mutex, PoisonError};

use super::turns::{From, Part};
use crate::backend::{Buf, BufMut, Device, MemoryKind, Piece, Rejected, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::Model;
use crate::plan::{HOST_BUFFERS, HOST_PIECE};

/// A stream of the source to the host, one of the compute device on from there, and the buffers between them.
pub(super) struct ThroughHost {
    down: Arc<dyn Stream>,
    up: Arc<dyn Stream>,
    host: Arc<dyn Device>,
    ring: Mutex<Ring>,
}

/// Buffers in turn. What is copied into one waits, on its stream, for the copies that read it.
#[derive(Default)]
struct Ring {
    buffers: Vec<Option<Buf>>,
    next: usize,
    /// The host has no memory for more.
    full: bool,
}

/// Bytes that share a buffer: where they come from, and where they go in their part of the slot.
type Chunk = Vec<From>;

impl ThroughHost {
    pub(super) fn new(down: Arc<dyn Stream>, up: Arc<dyn Stream>, host: Arc<dyn Device>) -> ThroughHost {
        ThroughHost { down, up, host, ring: Mutex::default() }
    }

    /// Queues the copies of a part. No part of the lane is larger than `largest`.
    pub(super) fn send(
        &self,
        model: &Model,
        part: &Part,
        dst: BufMut,
        largest: usize,
    ) -> Result<BufMut, Box<Rejected>> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        chunks(part).into_iter().try_fold(dst, |dst, chunk| {
            let (place, buffer) = match ring.take(&*self.host, self.up.device(), largest.min(HOST_PIECE as usize)) {
                Ok(buffer) => buffer,
                Err(error) => return Err(Box::new(Rejected { error, dst })),
            };
            let (mut down, mut up, mut at) = (Vec::new(), Vec::new(), 0);
            for From { module, place, at: to } in &chunk {
                let Some(home) = model.home(*module) else { continue };
                down.push(Piece { src: home.clone(), from: place.clone(), at });
                up.push((at..at + place.len(), *to));
                at += place.len();
            }
            let filled = Transfer::new(down, buffer).and_then(|transfer| self.down.copy(transfer));
            let filled = match filled {
                Ok(flight) => flight.chain().freeze(),
                Err(rejected) => return Err(Box::new(Rejected { error: rejected.error, dst })),
            };
            let onward = up.into_iter().map(|(from, at)| Piece { src: filled.clone(), from, at }).collect();
            let sent = Transfer::new(onward, dst).and_then(|transfer| self.up.copy(transfer))?;
            ring.buffers[place] = Some(filled);
            Ok(sent.chain())
        })
    }
}

impl Ring {
    /// The next buffer, with its place: a fresh one, near the device that reads it, as long as there are few.
    fn take(&mut self, host: &dyn Device, near: DeviceId, bytes: usize) -> Result<(usize, BufMut)> {
        if self.buffers.len() < HOST_BUFFERS && !self.full {
            match host.alloc_near(bytes, MemoryKind::Pinned, near) {
                Ok(buffer) => {
                    self.buffers.push(None);
                    return Ok((self.buffers.len() - 1, buffer));
                }
                Err(Error::OutOfMemory { .. }) if !self.buffers.is_empty() => self.full = true,
                Err(error) => return Err(error),
            }
        }
        let place = self.next;
        self.next = (place + 1) % self.buffers.len();
        match self.buffers[place].take().map(Buf::try_reclaim) {
            Some(Ok(buffer)) => Ok((place, buffer)),
            // One that a copy was refused for is made anew.
            _ => Ok((place, host.alloc_near(bytes, MemoryKind::Pinned, near)?)),
        }
    }
}

/// The bytes of a part in the pieces that go through a buffer one after the other.
fn chunks(part: &Part) -> Vec<Chunk> {
    let (mut chunks, mut room) = (Vec::<Chunk>::new(), 0);
    for From { module, place, at } in &part.pieces {
        let mut begin = place.start;
        while begin < place.end {
            if room == 0 {
                chunks.push(Chunk::new());
                room = HOST_PIECE as usize;
            }
            let end = place.end.min(begin + room);
            let from = From { module: *module, place: begin..end, at: at + begin - place.start };
            if let Some(chunk) = chunks.last_mut() {
                chunk.push(from);
            }
            (room, begin) = (room - (end - begin), end);
        }
    }
    chunks
}
