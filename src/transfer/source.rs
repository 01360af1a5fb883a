//! Sources of bytes, read by position.

use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{Error, FileFault, Result};

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
}

/// The identity of a source: two sources with equal stamps hold the same bytes.
///
/// A file's stamp is its length, its modification time, its location, and, on Unix, its change time. No program can set
/// the change time, so a file that was rewritten in place and given its old modification time has another stamp. A new
/// name, a new link or other permissions also update the change time, and count as a change. On Unix the location is the
/// device and inode. Elsewhere the creation time stands for the location, and there is no change time: a program that sets
/// the modification time back hides its writes.
///
/// These changes are not detected:
/// - a write through a mapping, to a page that was written before and is not on the disk yet: the system records only the
///   time of the first such write;
/// - a write when the system's clock was set back to the time of the last change, or below it and up to it again;
/// - a write that keeps the length within one tick of the file system's clock, which is two seconds on FAT and one second
///   on some others. Opening a [`FileSource`] waits out the ticks of the system's own clock, of at most
///   20 milliseconds; [`of_file`](Stamp::of_file) cannot;
/// - on network file systems, a write by another machine until this one asks the server again, which takes some seconds
///   by default;
/// - a write to the disk beneath the file system;
/// - while a [`FileSource`] is open, a write whose modification time is set back, if the file gains or loses a name between
///   the same two reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    len: u64,
    origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    File(FileTimes),
    /// A number that is unique in this process.
    Unique(u64),
}

/// The times at which a file was changed, and its location.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FileTimes {
    /// The modification time, in nanoseconds since the epoch.
    modified: i128,
    /// The change time, of the bytes or the metadata, in the same unit. The modification time where the system has no change
    /// time.
    changed: i128,
    location: (u64, u64),
}

impl Stamp {
    /// A stamp for `len` bytes that equals no other.
    pub fn unique(len: u64) -> Stamp {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Stamp { len, origin: Origin::Unique(NEXT.fetch_add(1, Ordering::Relaxed)) }
    }

    /// The stamp of a file.
    pub fn of_file(metadata: &Metadata) -> Stamp {
        Stamp { len: metadata.len(), origin: Origin::File(FileTimes::of(metadata)) }
    }

    /// The metadata of an open file once the system's clock has passed the time of its last change, so that later writes
    /// have a later time.
    pub(super) fn stable_metadata(file: &File) -> io::Result<Metadata> {
        let mut metadata = file.metadata()?;
        // A file that is being written continuously is detected when it is read.
        for _ in 0..TICKS {
            let FileTimes { changed, .. } = FileTimes::of(&metadata);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i128);
            // A time in the future comes from another clock.
            if !(0..TICK.as_nanos() as i128).contains(&(now - changed)) {
                break;
            }
            std::thread::sleep(TICK);
            metadata = file.metadata()?;
        }
        Ok(metadata)
    }

    /// Whether the stamps are equal apart from the change time.
    fn matches_except_change_time(&self, other: &Stamp) -> bool {
        match (self.origin, other.origin) {
            (Origin::File(this), Origin::File(other_times)) => {
                let changed = other_times.changed;
                self.len == other.len && FileTimes { changed, ..this } == other_times
            }
            (this, other) => this == other,
        }
    }

    /// The source's length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "the length is that of the source, not of the stamp")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// The longest tick of the clocks with which systems timestamp changes; Linux's is 1 to 10 ms.
const TICK: Duration = Duration::from_millis(20);

/// The most ticks that opening waits for.
const TICKS: usize = 5;

#[cfg(unix)]
impl FileTimes {
    fn of(metadata: &Metadata) -> FileTimes {
        use std::os::unix::fs::MetadataExt;
        let nanos = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        FileTimes {
            modified: nanos(metadata.mtime(), metadata.mtime_nsec()),
            changed: nanos(metadata.ctime(), metadata.ctime_nsec()),
            location: (metadata.dev(), metadata.ino()),
        }
    }
}

#[cfg(not(unix))]
impl FileTimes {
    fn of(metadata: &Metadata) -> FileTimes {
        let since = |time: io::Result<SystemTime>| {
            time.ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).map_or(0, |d| d.as_nanos())
        };
        let modified = since(metadata.modified()) as i128;
        FileTimes { modified, changed: modified, location: (since(metadata.created()) as u64, 0) }
    }
}

/// The number of a file's names (hard links).
#[cfg(unix)]
fn links(metadata: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(metadata)
}

#[cfg(not(unix))]
fn links(_: &Metadata) -> u64 {
    1
}

/// A file, read by position.
///
/// A file that loses its name, for example to a file that replaces it, stays readable as it was.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    file: PositionalFile,
    stamp: Stamp,
    last: Mutex<Last>,
}

/// The stamp of an open file when it was last read, and the number of its names then.
#[derive(Debug)]
struct Last {
    stamp: Stamp,
    links: u64,
}

impl Last {
    /// Whether the bytes are unchanged since the last read. Adding or removing a name updates the change time, so a write
    /// between the same two reads is then detected by its modification time only.
    fn is_unchanged(&mut self, now: &Metadata) -> bool {
        let now = Last { stamp: Stamp::of_file(now), links: links(now) };
        let unchanged =
            now.stamp == self.stamp || (now.links != self.links && now.stamp.matches_except_change_time(&self.stamp));
        if unchanged {
            *self = now;
        }
        unchanged
    }
}

impl FileSource {
    /// Opens a regular file. If the file has just been changed, this waits some milliseconds, so that no later change has
    /// the same time.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened or is not a regular file (a folder, a pipe).
    pub fn open(path: impl Into<PathBuf>) -> Result<FileSource> {
        let path = path.into();
        // Checked before opening, since opening a pipe blocks until its other end is opened.
        let is_file = std::fs::metadata(&path).map_err(Error::io("open", &path))?.is_file();
        if !is_file {
            let not_regular = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::io("open", &path)(not_regular));
        }
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        let metadata = Stamp::stable_metadata(&file).map_err(Error::io("open", &path))?;
        let (stamp, links) = (Stamp::of_file(&metadata), links(&metadata));
        let last = Mutex::new(Last { stamp, links });
        Ok(FileSource { path, file: PositionalFile::new(file), stamp, last })
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
            // The range was within the file when it was opened.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(changed()),
            read => read.map_err(Error::io("read", &self.path))?,
        }
        // Queried after the read, so that a change before or during the read is detected.
        let now = self.file.metadata().map_err(Error::io("read", &self.path))?;
        // A panic leaves a stamp that was valid.
        let unchanged = self.last.lock().unwrap_or_else(PoisonError::into_inner).is_unchanged(&now);
        if unchanged { Ok(()) } else { Err(changed()) }
    }
}

/// A file that several threads can read by position at once.
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

/// Without positional reads in the system, the threads take turns with the file's single cursor.
#[cfg(not(any(unix, windows)))]
#[derive(Debug)]
struct PositionalFile(std::sync::Mutex<File>);

#[cfg(not(any(unix, windows)))]
impl PositionalFile {
    fn new(file: File) -> PositionalFile {
        PositionalFile(std::sync::Mutex::new(file))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, File> {
        // Every use sets the cursor first, so it does not matter where a panic left it.
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
    fn what_is_not_written_keeps_its_stamp() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        fs::write(&path, [1; 16]).unwrap();
        let open = || FileSource::open(&path).unwrap();
        let first = open();
        for at in 0..8 {
            first.read_at(at, &mut [0; 8]).unwrap();
            assert_eq!(open().stamp(), first.stamp());
        }
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
        #[cfg(unix)]
        {
            // Equal lengths and modification times. No program can set the change time, so `b` is given `a`'s.
            put(&a, 1);
            put(&b, 1);
            let times = |stamp: Stamp| match stamp.origin {
                Origin::File(times) => times,
                Origin::Unique(number) => panic!("the stamp of a file is number {number}"),
            };
            let (one, other) = (stamp(&a), stamp(&b));
            assert_eq!((one.len, times(one).modified), (other.len, times(other).modified));
            let at_once = FileTimes { changed: times(one).changed, ..times(other) };
            assert_ne!(Stamp { origin: Origin::File(at_once), ..other }, one);
            assert!(!one.matches_except_change_time(&other));
        }
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
