//! Sources of bytes, read by position.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::file::FileSource;
use super::stamp::Stamp;
use crate::error::{Error, FileFault, Result};
use crate::file::read::{ReadPart, ReadWays};

/// Bytes that are read by position, by any number of threads at once: a file, memory, an object store.
pub trait Source: Send + Sync + fmt::Debug {
    /// The name in errors; a file's path.
    fn path(&self) -> &Path;

    /// The source's length and identity at the time when it was opened.
    fn stamp(&self) -> Stamp;

    /// Fills `dst` with the bytes that start at offset `at`.
    ///
    /// # Errors
    /// [`FileFault::Truncated`] when the range exceeds the source, [`FileFault::Changed`] when the source no longer matches
    /// its stamp, [`Error::Io`] when the system refuses. `dst` then holds unspecified bytes.
    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()>;

    /// Reads some of the `len` bytes that start at offset `at`, at least one unless `len` is zero, to wherever they may lie in
    /// `buffer`, which has at least `len` bytes. Returns where they are. A file is read without a copy so, if it is read past
    /// the page cache; other sources fill the beginning of `buffer`.
    ///
    /// # Errors
    /// As [`read_at`](Source::read_at).
    ///
    /// # Panics
    /// If `buffer` has fewer bytes than `len`.
    fn read_within(&self, at: u64, len: usize, buffer: &mut [u8]) -> Result<Range<usize>> {
        self.read_at(at, &mut buffer[..len])?;
        Ok(0..len)
    }

    /// Fills all `parts`. They may be in any order, empty, close together or far apart, and two of them may want the same bytes. A
    /// file is read in its own order, in chunks that ignore where one part ends and the next begins, and what is large by several
    /// threads: better than a [`read_at`](Source::read_at) for each part, which other sources make.
    ///
    /// ```
    /// use tensor_offload::transfer::{MemorySource, ReadPart, Source};
    /// let source = MemorySource::new("letters", b"abcdefgh".to_vec());
    /// let (mut last, mut first) = ([0; 2], [0; 3]);
    /// source.read_parts(&mut [ReadPart::new(6, &mut last), ReadPart::new(0, &mut first)])?;
    /// assert_eq!((&last, &first), (b"gh", b"abc"));
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`read_at`](Source::read_at). Then all parts hold unspecified bytes.
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        parts.iter_mut().try_for_each(|part| self.read_at(part.at, part.dst))
    }

    /// The file whose bytes these are, if they are those of a file: a device may [read](crate::backend::FileReads) them itself
    /// then. The default is none. A source that wraps another may return that one's, if it need not see the reads.
    fn file(&self) -> Option<&FileSource> {
        None
    }

    /// Whether weights on `disk` that nothing changes may stay here, to be read again for each turn of their layer, at any time. The
    /// default is that of files alone; another source may be slow, or in memory.
    fn may_stay(&self) -> bool {
        self.file().is_some()
    }

    /// The bytes that a read of `len` bytes from offset `at` on brings from where they are stored. They are fewer if they are
    /// compressed there; the default is `len`.
    fn stored(&self, _at: u64, len: u64) -> u64 {
        len
    }

    /// How many threads best read the source at a time. The default is one, which stands for as many as there are cores; of a source
    /// that is far away, several take no longer than one. A load has as many, up to 32, unless it is
    /// [told](crate::Loader::workers) a number.
    fn concurrency(&self) -> usize {
        1
    }

    /// How the bytes were read since the source was opened, if it is a file.
    fn ways(&self) -> ReadWays {
        ReadWays::default()
    }
}

/// Bytes in memory.
pub struct MemorySource {
    path: PathBuf,
    bytes: Vec<u8>,
    stamp: Stamp,
}

impl MemorySource {
    /// A source of `bytes`, called `path` in errors.
    pub fn new(path: impl Into<PathBuf>, bytes: Vec<u8>) -> MemorySource {
        let stamp = Stamp::unique(bytes.len() as u64);
        MemorySource { path: path.into(), bytes, stamp }
    }
}

impl fmt::Debug for MemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemorySource").field("path", &self.path).field("stamp", &self.stamp).finish_non_exhaustive()
    }
}

impl Source for MemorySource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn stamp(&self) -> Stamp {
        self.stamp
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        copy_range(&self.path, &self.bytes, at, dst)
    }
}

/// Copies `bytes[at..]`, of the source called `path`, into `dst`.
pub(super) fn copy_range(path: &Path, bytes: &[u8], at: u64, dst: &mut [u8]) -> Result<()> {
    check_range(path, bytes.len() as u64, at, dst.len())?;
    // Within `bytes`, so within `usize`.
    let at = at as usize;
    dst.copy_from_slice(&bytes[at..at + dst.len()]);
    Ok(())
}

/// Returns an error unless `len` bytes at offset `at` fit into `actual` bytes.
pub(super) fn check_range(path: &Path, actual: u64, at: u64, len: usize) -> Result<()> {
    match at.checked_add(len as u64) {
        Some(end) if end <= actual => Ok(()),
        end => Err(Error::file(path, None, FileFault::Truncated { expected: end.unwrap_or(u64::MAX), actual })),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn fault(error: Error) -> FileFault {
        match error {
            Error::File { fault, .. } => *fault,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn files_and_memory_read_alike() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        let bytes: Vec<u8> = (0..=255).collect();
        fs::write(&path, &bytes).unwrap();
        let sources: [Box<dyn Source>; 2] =
            [Box::new(FileSource::open(&path).unwrap()), Box::new(MemorySource::new(&path, bytes))];
        for source in sources {
            let mut part = [0; 4];
            source.read_at(252, &mut part).unwrap();
            assert_eq!(part, [252, 253, 254, 255]);
            source.read_at(256, &mut []).unwrap();
            let beyond = source.read_at(253, &mut part).unwrap_err();
            assert!(beyond.to_string().contains(&path.display().to_string()), "{beyond}");
            assert_eq!(fault(beyond), FileFault::Truncated { expected: 257, actual: 256 });
            assert!(source.read_at(u64::MAX, &mut part).is_err());
        }
    }
}
