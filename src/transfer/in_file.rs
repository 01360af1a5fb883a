//! Sources as what memory of a disk reads, and what a device reads of such memory itself.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use super::device_reads::{DeviceReads, FilePart, Stretch};
use super::source::Source;
use crate::backend::{BufMut, Piece, Readable};
use crate::error::{Error, Result};
use crate::file::read::ReadPart;

/// A source whose bytes are memory of a disk.
pub(crate) struct InFile {
    source: Arc<dyn Source>,
    tensors: Box<dyn Tensors>,
}

/// Who knows which bytes of a source are which tensor.
pub(crate) trait Tensors: Send + Sync {
    /// Reads parts of the source. An error names the tensor.
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()>;

    /// An error of a read from offset `at` on, with the name of the tensor that is there.
    fn named(&self, error: Error, at: u64) -> Error;
}

impl InFile {
    /// The bytes of `source`, which are those of `tensors`.
    pub(crate) fn new(source: Arc<dyn Source>, tensors: impl Tensors + 'static) -> InFile {
        InFile { source, tensors: Box::new(tensors) }
    }
}

impl Readable for InFile {
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        self.tensors.read_parts(parts)
    }

    fn stored(&self, at: u64, len: u64) -> u64 {
        self.source.stored(at, len)
    }
}

impl DeviceReads {
    /// Has the device read what it can of `pieces` into `dst`: what stays in files. Returns the others, and what it left, in their
    /// order. `progress` is told the bytes of each read, and ends the reads by an error.
    ///
    /// # Errors
    /// As [`read`](DeviceReads::read).
    pub(super) fn take(
        &self,
        pieces: &[Piece],
        dst: &mut BufMut,
        deadline: Duration,
        mut progress: impl FnMut(usize) -> Result<()>,
    ) -> Result<Vec<Piece>> {
        let mut left = Vec::new();
        for piece in pieces {
            let Some(extents) = piece.src.extents(&piece.from) else {
                left.push(piece.clone());
                continue;
            };
            let mut done = 0;
            for (of, from, bytes) in extents {
                let rest = |bytes: std::ops::Range<usize>| {
                    let (start, end) = (piece.from.start + done + bytes.start, piece.from.start + done + bytes.end);
                    Piece { src: piece.src.clone(), from: start..end, at: piece.at + done + bytes.start }
                };
                let Some(InFile { source, tensors }) = (&**of as &dyn Any).downcast_ref::<InFile>() else {
                    left.push(rest(0..bytes));
                    done += bytes;
                    continue;
                };
                let to = piece.at + done..piece.at + done + bytes;
                let part = FilePart { source: &**source, from, to };
                for Stretch { bytes, by_device } in self.divide(&part) {
                    let to = part.to.start + bytes.start..part.to.start + bytes.end;
                    let stretch = FilePart { from: part.from + bytes.start as u64, to, ..part.clone() };
                    let at = stretch.from;
                    let read = match by_device {
                        true => self
                            .read(&[stretch], dst, deadline, &mut progress)
                            .map_err(|error| tensors.named(error, at))?,
                        false => 0,
                    };
                    if read < bytes.len() {
                        left.push(rest(bytes.start + read..bytes.end));
                    }
                }
                done += bytes;
            }
        }
        Ok(left)
    }
}
