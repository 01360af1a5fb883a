//! Chunks of layers whose bytes go through buffers on the host, because the compute device cannot read them. Each chunk uses
//! one of a few buffers in turn.

use super::contents::{Part, Slice};
use crate::limits::STAGING_BYTES;

/// Byte ranges that share a buffer, one after the other.
pub(crate) type Chunk = Vec<Slice>;

/// Splits the slices of a part into chunks that each fit one buffer.
pub(crate) fn chunks(part: &Part) -> Vec<Chunk> {
    let (mut chunks, mut room) = (Vec::<Chunk>::new(), 0);
    for Slice { module, range, at } in &part.slices {
        let mut begin = range.start;
        while begin < range.end {
            if room == 0 {
                chunks.push(Chunk::new());
                room = STAGING_BYTES;
            }
            let end = range.end.min(begin + room);
            let slice = Slice { module: *module, range: begin..end, at: at + begin - range.start };
            if let Some(chunk) = chunks.last_mut() {
                chunk.push(slice);
            }
            (room, begin) = (room - (end - begin), end);
        }
    }
    chunks
}
