//! The way of bytes through buffers on the host, where the compute device cannot read them: in chunks, each of which takes
//! one of a few buffers in turn.

use super::contents::{Part, Slice};

/// How many buffers on the host take turns.
pub(crate) const HOST_BUFFERS: usize = 4;
/// The bytes of one such buffer. Smaller ones would save host memory, larger ones copies.
pub(crate) const HOST_PIECE: u64 = 32 << 20;

/// Byte ranges that share a buffer, one after the other, with the places of their parts.
pub(crate) type Chunk = Vec<(usize, Slice)>;

/// Cuts what parts bring into the chunks that go through a buffer one after the other.
pub(crate) fn chunks<'a>(parts: impl IntoIterator<Item = &'a Part>) -> Vec<Chunk> {
    let (mut chunks, mut room) = (Vec::<Chunk>::new(), 0);
    let slices = parts.into_iter().enumerate().flat_map(|(part, of)| of.slices.iter().map(move |slice| (part, slice)));
    for (part, Slice { module, range, at }) in slices {
        let mut begin = range.start;
        while begin < range.end {
            if room == 0 {
                chunks.push(Chunk::new());
                room = HOST_PIECE as usize;
            }
            let end = range.end.min(begin + room);
            let slice = Slice { module: *module, range: begin..end, at: at + begin - range.start };
            if let Some(chunk) = chunks.last_mut() {
                chunk.push((part, slice));
            }
            (room, begin) = (room - (end - begin), end);
        }
    }
    chunks
}

/// Whose turn it is among a few buffers.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    buffers: usize,
    next: usize,
}

impl Default for Rotation {
    fn default() -> Rotation {
        Rotation { buffers: HOST_BUFFERS, next: 0 }
    }
}

impl Rotation {
    /// The buffer for the next chunk.
    pub(crate) fn next(&mut self) -> usize {
        let buffer = self.next;
        self.next = (buffer + 1) % self.buffers;
        buffer
    }

    /// There is no memory for more than so many buffers, at least one.
    pub(crate) fn limit(&mut self, buffers: usize) {
        self.buffers = buffers.max(1);
        self.next %= self.buffers;
    }
}
