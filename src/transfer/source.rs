//! Sources of bytes that are read by position.

use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, FileFault, Result};

/// Bytes that are read by position, by any number of threads at once: a file, memory, an object store.
pub trait Source: Send + Sync + fmt::Debug {
    /// What errors call it; a file's path.
    fn path(&self) -> &Path;

    /// Its length and identity, as they were when it was opened.
    fn stamp(&self) -> Stamp;

    /// Fills `dst` with the bytes from `at` on.
    ///
    /// # Errors
    /// [`FileFault::Truncated`] when the range leaves the source, [`FileFault::Changed`] when the source is no longer
    /// what its stamp says, [`Error::Io`] when the system refuses. `dst` then holds nothing of use.
    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()>;
}

/// The identity of a source: two sources with equal stamps hold the same bytes.
///
/// A file's stamp is its length, its time of last change and where it lies (device and inode on Unix, time of
/// creation elsewhere), so a write within the file system's clock tick that keeps the length goes unseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    len: u64,
    origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    /// Nanoseconds since the epoch, and the place.
    File { changed: i128, place: (u64, u64) },
    /// A number given once in this process.
    Unique(u64),
}

impl Stamp {
    /// A stamp of `len` bytes that equals no other.
    pub fn unique(len: u64) -> Stamp {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Stamp { len, origin: Origin::Unique(NEXT.fetch_add(1, Ordering::Relaxed)) }
    }

    /// The stamp of a file.
    pub fn of_file(metadata: &Metadata) -> Stamp {
        let (changed, place) = changed_and_place(metadata);
        Stamp { len: metadata.len(), origin: Origin::File { changed, place } }
    }

    /// The source's length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "the length is that of the source, not of the stamp")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

#[cfg(unix)]
fn changed_and_place(metadata: &Metadata) -> (i128, (u64, u64)) {
    use std::os::unix::fs::MetadataExt;
    let changed = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    (changed, (metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn changed_and_place(metadata: &Metadata) -> (i128, (u64, u64)) {
    use std::time::{SystemTime, UNIX_EPOCH};
    let since = |time: io::Result<SystemTime>| {
        time.ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).map_or(0, |d| d.as_nanos())
    };
    (since(metadata.modified()) as i128, (since(metadata.created()) as u64, 0))
}

/// A file, read by position.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    file: PositionalFile,
    stamp: Stamp,
}

impl FileSource {
    /// Opens a regular file.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened or is no regular file (a folder, a pipe).
    pub fn open(path: impl Into<PathBuf>) -> Result<FileSource> {
        let path = path.into();
        // Asked before opening, since opening a pipe waits for its other end.
        let is_file = std::fs::metadata(&path).map_err(Error::io("open", &path))?.is_file();
        if !is_file {
            let not_regular = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::io("open", &path)(not_regular));
        }
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        let metadata = file.metadata().map_err(Error::io("open", &path))?;
        Ok(FileSource { path, file: PositionalFile::new(file), stamp: Stamp::of_file(&metadata) })
    }
}

impl Source for FileSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn stamp(&self) -> Stamp {
        self.stamp
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        check_range(&self.path, self.stamp.len, at, dst.len())?;
        let changed = || Error::file(&self.path, None, FileFault::Changed);
        match self.file.read_exact_at(dst, at) {
            // The range lay within the file when it was opened.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(changed()),
            read => read.map_err(Error::io("read", &self.path))?,
        }
        // Asked after the read, so that a change before or during it is seen.
        let now = self.file.metadata().map_err(Error::io("read", &self.path))?;
        if Stamp::of_file(&now) == self.stamp { Ok(()) } else { Err(changed()) }
    }
}

/// A file that several threads read by position at once.
#[cfg(any(unix, windows))]
#[derive(Debug)]
struct PositionalFile(File);

#[cfg(any(unix, windows))]
impl PositionalFile {
    fn new(file: File) -> PositionalFile {
        PositionalFile(file)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    #[cfg(unix)]
    fn read_exact_at(&self, dst: &mut [u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, dst, at)
    }

    #[cfg(windows)]
    fn read_exact_at(&self, mut dst: &mut [u8], mut at: u64) -> io::Result<()> {
        while !dst.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(&self.0, dst, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (dst, at) = (&mut dst[n..], at + n as u64),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Where the system has no positional read, the threads take turns at the file's one cursor.
#[cfg(not(any(unix, windows)))]
#[derive(Debug)]
struct PositionalFile(std::sync::Mutex<File>);

#[cfg(not(any(unix, windows)))]
impl PositionalFile {
    fn new(file: File) -> PositionalFile {
        PositionalFile(std::sync::Mutex::new(file))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, File> {
        // Every use sets the cursor first, so one that a panic left anywhere is as good.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        self.lock().metadata()
    }

    fn read_exact_at(&self, dst: &mut [u8], at: u64) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.lock();
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(dst)
    }
}

/// Bytes in memory.
pub struct MemorySource {
    path: PathBuf,
    bytes: Vec<u8>,
    stamp: Stamp,
}

impl MemorySource {
    /// These bytes; errors call them `path`.
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

/// Refuses `len` bytes from `at` on where there are only `actual`.
fn check_range(path: &Path, actual: u64, at: u64, len: usize) -> Result<()> {
    match at.checked_add(len as u64) {
        Some(end) if end <= actual => Ok(()),
        end => Err(Error::file(path, None, FileFault::Truncated { expected: end.unwrap_or(u64::MAX), actual })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use std::fs;

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
        let later = source.file.metadata().unwrap().modified().unwrap() + std::time::Duration::from_secs(1);
        File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        assert_eq!(fault(source.read_at(8, &mut part).unwrap_err()), FileFault::Changed);
    }

    #[test]
    fn stamps_tell_sources_apart() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&a, [1; 4]).unwrap();
        fs::write(&b, [1; 4]).unwrap();
        let stamp = |path: &Path| FileSource::open(path).unwrap().stamp();
        assert_eq!(stamp(&a), stamp(&a));
        assert_ne!(stamp(&a), stamp(&b));
        let memory = || MemorySource::new("m", vec![1; 4]);
        assert_ne!(memory().stamp(), memory().stamp());
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
