//! The way through host memory, for bytes of devices that the compute device cannot read: in pieces that take turns with
//! a few buffers, so that a layer of any size needs little of the host.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::lanes::send;
use super::slots::LaneParts;
use crate::backend::{Buf, BufMut, Device, MemoryKind, Piece, RejectedAll, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::Model;
use crate::schedule::{Chunk, HOST_BUFFERS, HOST_PIECE, Part, Rotation, Slice, chunks};

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
    rotation: Rotation,
    /// The host has no memory for more.
    full: bool,
}

impl ThroughHost {
    pub(super) fn new(down: Arc<dyn Stream>, up: Arc<dyn Stream>, host: Arc<dyn Device>) -> ThroughHost {
        ThroughHost { down, up, host, ring: Mutex::default() }
    }

    /// Queues the copies of parts of one layer, which are no larger than `largest` together; their memory.
    pub(super) fn send(
        &self,
        model: &Model,
        parts: LaneParts<'_>,
        largest: usize,
    ) -> Result<Vec<BufMut>, Box<RejectedAll>> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let (parts, dst): (Vec<&Part>, Vec<BufMut>) = parts.into_iter().unzip();
        chunks(parts).into_iter().try_fold(dst, |dst, chunk| {
            let bytes = largest.min(HOST_PIECE as usize);
            let filled = ring.take(&*self.host, self.up.device(), bytes).and_then(|(place, buffer)| {
                let (mut down, mut at) = (Vec::new(), 0);
                for (_, Slice { module, range, .. }) in &chunk {
                    if let Some(home) = model.home(*module) {
                        down.push(Piece { src: home.clone(), from: range.clone(), at });
                    }
                    at += range.len();
                }
                Ok((place, self.down.send(Transfer::new(down, buffer)?)?.chain().freeze()))
            });
            let (place, filled) = match filled {
                Ok(filled) => filled,
                Err(error) => return Err(Box::new(RejectedAll { error, dst })),
            };
            let sent = onward(&*self.up, &filled, &chunk, dst)?;
            ring.buffers[place] = Some(filled);
            Ok(sent)
        })
    }
}

/// Queues the copies from a buffer to the parts that have bytes in it; the memory of all parts.
fn onward(up: &dyn Stream, filled: &Buf, chunk: &Chunk, dst: Vec<BufMut>) -> Result<Vec<BufMut>, Box<RejectedAll>> {
    let mut pieces: BTreeMap<usize, Vec<Piece>> = BTreeMap::new();
    let mut begin = 0;
    for (part, Slice { range, at, .. }) in chunk {
        let from = begin..begin + range.len();
        begin = from.end;
        pieces.entry(*part).or_default().push(Piece { src: filled.clone(), from, at: *at });
    }
    let (mut dst, mut copies): (Vec<Option<BufMut>>, Vec<_>) = (dst.into_iter().map(Some).collect(), Vec::new());
    let places: Vec<usize> = pieces.keys().copied().collect();
    copies.extend(pieces.into_iter().filter_map(|(part, pieces)| dst[part].take().map(|dst| (pieces, dst))));
    let (sent, refused) = match send(up, copies.into_iter()) {
        Ok(sent) => (sent, None),
        Err(rejected) => (rejected.dst, Some(rejected.error)),
    };
    places.into_iter().zip(sent).for_each(|(place, sent)| dst[place] = Some(sent));
    let dst = dst.into_iter().flatten().collect();
    match refused {
        None => Ok(dst),
        Some(error) => Err(Box::new(RejectedAll { error, dst })),
    }
}

impl Ring {
    /// The next buffer, with its place: a fresh one, near the device that reads it, as long as there are few.
    fn take(&mut self, host: &dyn Device, near: DeviceId, bytes: usize) -> Result<(usize, BufMut)> {
        if self.buffers.len() < HOST_BUFFERS && !self.full {
            match host.alloc_near(bytes, MemoryKind::Pinned, near) {
                Ok(buffer) => {
                    self.buffers.push(None);
                    return Ok((self.rotation.next(), buffer));
                }
                Err(Error::OutOfMemory { .. }) if !self.buffers.is_empty() => {
                    self.full = true;
                    self.rotation.limit(self.buffers.len());
                }
                Err(error) => return Err(error),
            }
        }
        let place = self.rotation.next();
        match self.buffers[place].take().map(Buf::try_reclaim) {
            Some(Ok(buffer)) => Ok((place, buffer)),
            // One that a copy was refused for is made anew.
            _ => Ok((place, host.alloc_near(bytes, MemoryKind::Pinned, near)?)),
        }
    }
}
