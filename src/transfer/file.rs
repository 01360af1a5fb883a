//! Files as sources.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::open_files::ReopenedFile;
use super::source::{Source, check_range};
use super::stamp::Stamp;
use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::file::read::{Extent, ReadPart, ReadWays, Reader};

/// A file, read by position.
///
/// A file that loses its name, for example to a file that replaces it, stays readable as it was while it is open. Up to a
/// quarter of the files that the process may open, at most 64, are open at a time, those that were read last; a file of more
/// is opened again when it is read. Another file in its place is then [`FileFault::Changed`](crate::error::FileFault::Changed).
///
/// On Linux each part of a file is read as suits what the page cache has of it. What is there is copied. The rest is read
/// directly from the disk, which leaves the page cache as it is; where the system refuses that, through the page cache.
/// [`ways`](Source::ways) counts the bytes of each.
#[derive(Debug)]
pub struct FileSource {
    file: Arc<ReopenedFile>,
    stamp: Stamp,
    reader: Reader,
}

impl FileSource {
    /// Opens a regular file. If the file has just been changed, this waits some milliseconds, so that no later change has
    /// the same time.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened or is not a regular file (a folder, a pipe);
    /// [`FileFault::BrokenLink`](crate::error::FileFault::BrokenLink) when a link on the way to it leads nowhere.
    pub fn open(path: impl Into<PathBuf>) -> Result<FileSource> {
        let (file, stamp) = ReopenedFile::open(path.into())?;
        Ok(FileSource { file, stamp, reader: Reader::default() })
    }

    /// Has every read go through the page cache, which keeps the bytes. The first read of a file is somewhat slower then, and
    /// the next ones many times as fast, while the system has the memory. For files that are loaded again and again
    /// ([`Checkpoint::open_with`](crate::Checkpoint::open_with)).
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tensor_offload::Checkpoint;
    /// use tensor_offload::transfer::FileSource;
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// let open = |file: &std::path::Path| Ok(Arc::new(FileSource::open(file)?.through_page_cache()) as Arc<_>);
    /// let checkpoint = Checkpoint::open_with(path, open)?;
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    #[must_use]
    pub fn through_page_cache(self) -> FileSource {
        FileSource { reader: Reader::always_cached(), ..self }
    }

    /// Whether every read goes through the page cache.
    pub(super) fn is_always_cached(&self) -> bool {
        self.reader.is_always_cached()
    }

    /// The parts of a range that are in the page cache, and those that are not.
    ///
    /// # Errors
    /// As [`open_direct`](FileSource::open_direct).
    pub(super) fn extents(&self, at: u64, len: usize) -> Result<Vec<Extent>> {
        let file = self.file.get()?;
        Ok(self.reader.extents(&file.calls(self.stamp.len()), at, len))
    }

    /// The file once more, open for direct reads; or why it cannot be.
    ///
    /// # Errors
    /// [`FileFault::Changed`](crate::error::FileFault::Changed) when another file is in its place, [`Error::Io`] when it cannot be
    /// opened.
    pub(super) fn open_direct(&self) -> Result<std::result::Result<File, String>> {
        let file = self.file.get()?;
        Ok(file.open_direct(self.stamp.len()))
    }

    /// Fails if the file has changed since it was opened. `file` is one of its descriptors.
    pub(super) fn check(&self, file: &File) -> Result<()> {
        let now = file.metadata().map_err(Error::io("read", self.path()))?;
        self.file.check_metadata(&now)
    }

    /// Reads bytes of a range from the open file.
    fn read<T>(&self, at: u64, len: usize, read: impl FnOnce(&OpenFile) -> io::Result<T>) -> Result<T> {
        check_range(self.path(), self.stamp.len(), at, len)?;
        self.read_checked(read)
    }

    /// Reads from the open file, within its length. A change before or during the read is an error.
    fn read_checked<T>(&self, read: impl FnOnce(&OpenFile) -> io::Result<T>) -> Result<T> {
        let file = self.file.get()?;
        let read = match read(&file) {
            // The range was within the file when it was opened.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(self.file.changed()),
            read => read.map_err(Error::io("read", self.path()))?,
        };
        // Checked after the read, so that a change before or during the read is detected.
        self.file.check(&file)?;
        Ok(read)
    }
}

impl Source for FileSource {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn stamp(&self) -> Stamp {
        self.stamp
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        self.read(at, dst.len(), |file| self.reader.read(&file.calls(self.stamp.len()), at, dst))
    }

    fn read_within(&self, at: u64, len: usize, buffer: &mut [u8]) -> Result<Range<usize>> {
        self.read(at, len, |file| self.reader.read_within(&file.calls(self.stamp.len()), at, len, buffer))
    }

    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        parts.iter().try_for_each(|part| check_range(self.path(), self.stamp.len(), part.at, part.dst.len()))?;
        let parts = parts.iter_mut().map(ReadPart::reborrow).collect();
        self.read_checked(|file| self.reader.read_parts(&file.calls(self.stamp.len()), parts))
    }

    fn file(&self) -> Option<&FileSource> {
        Some(self)
    }

    fn ways(&self) -> ReadWays {
        self.reader.ways()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    #[cfg(unix)]
    use std::time::{Duration, UNIX_EPOCH};

    #[cfg(unix)]
    use super::super::stamp::TICK;
    use super::*;
    use crate::ErrorKind;
    use crate::error::FileFault;

    fn fault(error: Error) -> FileFault {
        match error {
            Error::File { fault, .. } => *fault,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_file_that_changes_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        let mut part = [0; 4];
        for change in [0u64, 8, 12] {
            fs::write(&path, [7; 16]).unwrap();
            let source = FileSource::open(&path).unwrap();
            source.read_at(8, &mut part).unwrap();
            File::options().write(true).open(&path).unwrap().set_len(change).unwrap();
            assert_eq!(fault(source.read_at(8, &mut part).unwrap_err()), FileFault::Changed, "{change}");
        }
        fs::write(&path, [7; 16]).unwrap();
        let source = FileSource::open(&path).unwrap();
        let later = fs::metadata(&path).unwrap().modified().unwrap() + std::time::Duration::from_secs(1);
        File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        assert_eq!(fault(source.read_at(8, &mut part).unwrap_err()), FileFault::Changed);
    }

    /// Writes a file as reproducible archives and content stores do: with a fixed time.
    #[cfg(unix)]
    fn put(path: &Path, byte: u8) {
        let mut file = File::create(path).unwrap();
        io::Write::write_all(&mut file, &[byte; 4096]).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(1)).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_file_rewritten_with_its_old_time_of_modification_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        let mut part = [0; 16];
        put(&path, 1);
        let first = FileSource::open(&path).unwrap();
        first.read_at(0, &mut part).unwrap();
        assert_eq!(part, [1; 16]);
        // In place, immediately.
        put(&path, 2);
        assert_eq!(fault(first.read_at(0, &mut part).unwrap_err()), FileFault::Changed);
        let second = FileSource::open(&path).unwrap();
        assert_ne!(first.stamp(), second.stamp());
        second.read_at(0, &mut part).unwrap();
        assert_eq!(part, [2; 16]);
        // A new file, which may get the inode of the old one.
        drop((first, fs::remove_file(&path).unwrap()));
        let stamp = second.stamp();
        drop(second);
        put(&path, 3);
        assert_ne!(FileSource::open(&path).unwrap().stamp(), stamp);
    }

    /// Adding or removing a name is no write, and hides a write only until the next read.
    #[cfg(unix)]
    #[test]
    fn names_come_and_go() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("model"), folder.path().join("other"));
        let mut part = [0; 16];
        put(&path, 1);
        let source = FileSource::open(&path).unwrap();
        fs::hard_link(&path, &other).unwrap();
        source.read_at(0, &mut part).unwrap();
        fs::remove_file(&path).unwrap();
        source.read_at(0, &mut part).unwrap();
        assert_eq!(part, [1; 16]);
        // The clock passes the tick of the last change.
        std::thread::sleep(TICK);
        put(&other, 2);
        assert_eq!(fault(source.read_at(0, &mut part).unwrap_err()), FileFault::Changed);
    }

    #[test]
    fn only_regular_files_open() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("nothing")] {
            let error = FileSource::open(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(error.to_string().contains(&path.display().to_string()));
        }
    }
}
