//! Reading a header forwards, whose length only its end tells.

use std::path::Path;

use crate::error::{Error, FileFault, GgufFault, Result};
use crate::transfer::Source;

/// The longest header that is read, in bytes. Tokenizers, which make up most of a header, take some 10 MiB.
pub(super) const HEADER_LIMIT: u64 = 1 << 30;

/// The longest name of a tensor or key, in bytes (ggml, `docs/gguf.md`, of keys).
pub(super) const NAME_LIMIT: u64 = (1 << 16) - 1;

/// The bytes that are read at once.
const PIECE: u64 = 1 << 18;

/// The same of a source far away, where a tokenizer would take as many questions as it has pieces.
const FAR_PIECE: u64 = 1 << 22;

/// A position in a file, and the bytes after it that have been read.
pub(super) struct Cursor<'a> {
    source: &'a dyn Source,
    len: u64,
    at: u64,
    /// Where `bytes` begin in the file.
    begin: u64,
    bytes: Vec<u8>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(source: &'a dyn Source) -> Cursor<'a> {
        Cursor { source, len: source.stamp().len(), at: 0, begin: 0, bytes: Vec::new() }
    }

    pub(super) fn path(&self) -> &'a Path {
        self.source.path()
    }

    /// The position in the file.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// The bytes from here to the file's end.
    pub(super) fn left(&self) -> u64 {
        self.len - self.at
    }

    /// The length of the file.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The error for a fault of the file.
    pub(super) fn error(&self, fault: impl Into<FileFault>) -> Error {
        Error::file(self.path(), None, fault.into())
    }

    /// The next `count` bytes.
    ///
    /// # Errors
    /// [`FileFault::Truncated`] and [`FileFault::HeaderTooLarge`] before anything is allocated; as [`Source::read_at`].
    pub(super) fn take(&mut self, count: u64) -> Result<&[u8]> {
        let end = self.end(count)?;
        if end > self.begin + self.bytes.len() as u64 {
            // At most `HEADER_LIMIT`.
            let piece = if self.source.concurrency() > 1 && self.at > 0 { FAR_PIECE } else { PIECE };
            let wanted = count.max(piece.min(self.left()));
            self.bytes.resize(wanted as usize, 0);
            self.begin = self.at;
            self.source.read_at(self.at, &mut self.bytes)?;
        }
        let from = (self.at - self.begin) as usize;
        self.at = end;
        Ok(&self.bytes[from..from + count as usize])
    }

    /// Goes past the next `count` bytes without reading them.
    ///
    /// # Errors
    /// As [`take`](Cursor::take).
    pub(super) fn skip(&mut self, count: u64) -> Result<()> {
        self.at = self.end(count)?;
        if self.at > self.begin + self.bytes.len() as u64 {
            (self.begin, self.bytes) = (self.at, Vec::new());
        }
        Ok(())
    }

    /// Where the next `count` bytes end.
    fn end(&self, count: u64) -> Result<u64> {
        let expected = self.at.saturating_add(count);
        if expected > self.len {
            return Err(self.error(FileFault::Truncated { expected, actual: self.len }));
        }
        if expected > HEADER_LIMIT {
            return Err(self.error(FileFault::HeaderTooLarge { bytes: expected, limit: HEADER_LIMIT }));
        }
        Ok(expected)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// The name of a tensor or key.
    pub(super) fn name(&mut self) -> Result<String> {
        let at = self.at;
        let bytes = self.u64()?;
        if bytes > NAME_LIMIT && bytes <= self.left() {
            return Err(self.error(GgufFault::LongName { at, bytes, limit: NAME_LIMIT }));
        }
        let text = std::str::from_utf8(self.take(bytes)?).map(str::to_owned);
        text.map_err(|_| self.error(GgufFault::NotUtf8 { at }))
    }

    /// Returns an error unless `count` things of at least `least` bytes each can follow.
    pub(super) fn check_count(&self, of: impl FnOnce() -> String, count: u64, least: u64) -> Result<()> {
        match count.checked_mul(least) {
            Some(bytes) if bytes <= self.left() => Ok(()),
            _ => Err(self.error(GgufFault::Count { of: of(), count, left: self.left() })),
        }
    }
}
