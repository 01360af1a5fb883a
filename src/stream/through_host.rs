//! The route through host memory, for bytes on devices that the compute device cannot read. A layer is sent in chunks that
//! take turns with a few buffers, so a layer of any size needs little host memory.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::backend::{Buf, BufMut, Device, Piece, Rejected, Stream, Transfer};
use crate::error::Result;
use crate::limits::STAGING_BUFFERS;
use crate::load::Model;
use crate::schedule::{Chunk, Slice, chunks};
use crate::staging::{Lease, Pool};

/// A stream from the source to the host, a stream from the host to the compute device, and the buffers between them.
pub(super) struct ThroughHost {
    down: Arc<dyn Stream>,
    up: Arc<dyn Stream>,
    host: Arc<dyn Device>,
    /// Made at the first use, when the largest part, and so the size of the buffers, is known.
    pool: OnceLock<Pool>,
}

impl ThroughHost {
    pub(super) fn new(down: Arc<dyn Stream>, up: Arc<dyn Stream>, host: Arc<dyn Device>) -> ThroughHost {
        ThroughHost { down, up, host, pool: OnceLock::new() }
    }

    /// Queues the copies of slices of a layer. No part of one is larger than `largest` bytes. Returns the memory that they go to.
    pub(super) fn send(
        &self,
        model: &Model,
        slices: &[Slice],
        dst: BufMut,
        largest: usize,
    ) -> Result<BufMut, Box<Rejected>> {
        let make = || Pool::new(Arc::clone(&self.host), self.up.device(), largest, STAGING_BUFFERS);
        let pool = self.pool.get_or_init(make);
        chunks(slices).into_iter().try_fold(dst, |dst, chunk| {
            let (filled, lease) = match self.to_host(model, pool, &chunk) {
                Ok(filled) => filled,
                Err(error) => return Err(Box::new(Rejected { error, dst })),
            };
            let mut begin = 0;
            let piece = |Slice { range, at, .. }: &Slice| {
                let from = begin..begin + range.len();
                begin = from.end;
                Piece { src: filled.clone(), from, at: *at }
            };
            let flight = self.up.send(Transfer::new(chunk.iter().map(piece).collect(), dst)?)?;
            lease.give_back(flight.done().clone(), filled);
            Ok(flight.chain())
        })
    }

    /// Queues the copy of a chunk into the next buffer.
    fn to_host<'p>(&self, model: &Model, pool: &'p Pool, chunk: &Chunk) -> Result<(Buf, Lease<'p>)> {
        let (mut pieces, mut at) = (Vec::new(), 0);
        for Slice { module, range, .. } in chunk {
            if let Some((home, from)) = model.find_stored(*module, range) {
                pieces.push(Piece { src: home.clone(), from, at });
            }
            at += range.len();
        }
        // Only this lane uses the pool, and it returns each buffer at once.
        let (buffer, lease) = pool.next(Duration::ZERO)?;
        Ok((self.down.send(Transfer::new(pieces, buffer)?)?.chain().freeze(), lease))
    }
}
