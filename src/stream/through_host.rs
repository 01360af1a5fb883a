//! The way through host memory, for bytes of devices that the compute device cannot read: in pieces that take turns with
//! a few buffers, so that a layer of any size needs little of the host.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::backend::{Buf, BufMut, Device, Piece, Rejected, Stream, Transfer};
use crate::error::Result;
use crate::limits::STAGING_BUFFERS;
use crate::load::Model;
use crate::schedule::{Chunk, Part, Slice, chunks};
use crate::staging::{Lent, Pool};

/// A stream of the source to the host, one of the compute device on from there, and the buffers between them.
pub(super) struct ThroughHost {
    down: Arc<dyn Stream>,
    up: Arc<dyn Stream>,
    host: Arc<dyn Device>,
    /// No larger than they have to be, so made when that is known.
    pool: OnceLock<Pool>,
}

impl ThroughHost {
    pub(super) fn new(down: Arc<dyn Stream>, up: Arc<dyn Stream>, host: Arc<dyn Device>) -> ThroughHost {
        ThroughHost { down, up, host, pool: OnceLock::new() }
    }

    /// Queues the copies of a part of a layer, of which none is larger than `largest`; its memory.
    pub(super) fn send(
        &self,
        model: &Model,
        part: &Part,
        dst: BufMut,
        largest: usize,
    ) -> Result<BufMut, Box<Rejected>> {
        let make = || Pool::new(Arc::clone(&self.host), self.up.device(), largest, STAGING_BUFFERS);
        let pool = self.pool.get_or_init(make);
        chunks(part).into_iter().try_fold(dst, |dst, chunk| {
            let (filled, lent) = match self.to_host(model, pool, &chunk) {
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
            lent.give_back(flight.done().clone(), filled);
            Ok(flight.chain())
        })
    }

    /// Queues the copy of a chunk to the next buffer.
    fn to_host<'p>(&self, model: &Model, pool: &'p Pool, chunk: &Chunk) -> Result<(Buf, Lent<'p>)> {
        let (mut pieces, mut at) = (Vec::new(), 0);
        for Slice { module, range, .. } in chunk {
            if let Some(home) = model.home(*module) {
                pieces.push(Piece { src: home.clone(), from: range.clone(), at });
            }
            at += range.len();
        }
        // Nobody else has buffers of this pool, and each is given back at once.
        let (buffer, lent) = pool.next(Duration::ZERO)?;
        Ok((self.down.send(Transfer::new(pieces, buffer)?)?.chain().freeze(), lent))
    }
}
