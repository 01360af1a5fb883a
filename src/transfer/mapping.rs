//! A file mapped into memory, for callers who vouch for the file.
#![expect(unsafe_code, reason = "a mapping is only as constant as the file behind it, which no type can promise")]

use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::open_files::open_regular;
use super::source::{Source, copy_range};
use super::stamp::Stamp;
use crate::error::{Error, Result};

/// A file mapped into memory.
#[derive(Debug)]
pub struct MappedSource {
    path: PathBuf,
    bytes: Mmap,
    stamp: Stamp,
}

impl MappedSource {
    /// Maps a file.
    ///
    /// # Safety
    /// Until the source is dropped, nothing may write to the file or shorten it, in this process or any other: the
    /// bytes are handed out as `&[u8]`, which may not change, and touching a page beyond the file's end
    /// kills the process (`SIGBUS`). A file on a network or removable disk cannot be vouched for. Where
    /// that is not certain, [`FileSource`](super::FileSource) reads as fast into memory that is reused.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened or mapped, or is not a regular file;
    /// [`FileFault::BrokenLink`](crate::error::FileFault::BrokenLink) when a link on the way to it leads nowhere.
    pub unsafe fn assume_immutable(path: impl Into<PathBuf>) -> Result<MappedSource> {
        let path = path.into();
        let file = open_regular(&path)?;
        let stamp = Stamp::stable_metadata(&file)
            .map(|metadata| Stamp::of_file(&metadata))
            .map_err(Error::io("open", &path))?;
        // SAFETY: the caller promises that the file stays as it is while the mapping lives.
        let bytes = unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?;
        Ok(MappedSource { path, bytes, stamp })
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Source for MappedSource {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_reads_as_the_file_does() {
        let folder = tempfile::tempdir().unwrap();
        for content in [&b"12345678"[..], b""] {
            let path = folder.path().join("file");
            std::fs::write(&path, content).unwrap();
            // SAFETY: the file lies in a folder of this test's own.
            let mapped = unsafe { MappedSource::assume_immutable(&path) }.unwrap();
            let mut bytes = vec![0; content.len()];
            mapped.read_at(0, &mut bytes).unwrap();
            assert_eq!((bytes.as_slice(), mapped.bytes()), (content, content));
            assert_eq!(mapped.stamp(), super::super::FileSource::open(&path).unwrap().stamp());
            assert!(mapped.read_at(1, &mut bytes).is_err() || content.is_empty());
        }
    }
}
