//! Sources of bytes that are read by position.

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
/// A file's stamp is its length, its time of modification, where it lies, and, on Unix, its change time, which no program
/// can set: so a file that was rewritten in place and given its old time of modification is another one. A new name, a
/// new link or other permissions change that time, too, and count as a change. On Unix a file lies at a device and inode.
/// Elsewhere the time of creation stands for the place, and there is no change time: a program that sets the
/// time of modification back hides what it wrote.
///
/// These go unseen:
/// - a write through a mapping, to a page that was written before and is not on the disk yet: the system notes the time of
///   the first such write alone;
/// - a write when the system's clock was set back to the time of the last change, or below it and up to it again;
/// - a write that keeps the length within one tick of the file system's clock, which is two seconds on FAT and one second
///   on some others. Opening a [`FileSource`] waits out the ticks of the system's own clock, of at most
///   20 milliseconds; [`of_file`](Stamp::of_file) cannot;
/// - on network file systems, what another machine wrote until this one asks the server again, which takes some seconds
///   by default;
/// - a write to the disk beneath the file system;
/// - while a [`FileSource`] is open, a write whose time of modification is set back, where the file gets or loses a name
///   between the same two reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    len: u64,
    origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    File(FileTimes),
    /// A number given once in this process.
    Unique(u64),
}

/// When a file was changed, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FileTimes {
    /// In nanoseconds since the epoch, as is the next.
    modified: i128,
    /// Of the bytes or of what is told about the file; that of modification where the system has no other.
    changed: i128,
    place: (u64, u64),
}

impl Stamp {
    /// A stamp of `len` bytes that equals no other.
    pub fn unique(len: u64) -> Stamp {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Stamp { len, origin: Origin::Unique(NEXT.fetch_add(1, Ordering::Relaxed)) }
    }

    /// The stamp of a file.
    pub fn of_file(metadata: &Metadata) -> Stamp {
        Stamp { len: metadata.len(), origin: Origin::File(FileTimes::of(metadata)) }
    }

    /// What is told of an open file once the system's clock has passed the time of its last change: what is written from
    /// now on has a later one.
    pub(super) fn is_complete(file: &File) -> io::Result<Metadata> {
        let mut metadata = file.metadata()?;
        // One that is written all the while is told apart when it is read.
        for _ in 0..TICKS {
            let FileTimes { changed, .. } = FileTimes::of(&metadata);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i128);
            // A file of the future is on a clock that this one does not follow.
            if !(0..TICK.as_nanos() as i128).contains(&(now - changed)) {
                break;
            }
            std::thread::sleep(TICK);
            metadata = file.metadata()?;
        }
        Ok(metadata)
    }

    /// Whether it is `other` but for the change time.
    fn but_for_change(&self, other: &Stamp) -> bool {
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

/// The longest tick of the clocks by which systems date changes; Linux's is 1 to 10 ms.
const TICK: Duration = Duration::from_millis(20);

/// How many ticks opening waits for at most.
const TICKS: usize = 5;

#[cfg(unix)]
impl FileTimes {
    fn of(metadata: &Metadata) -> FileTimes {
        use std::os::unix::fs::MetadataExt;
        let nanos = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        FileTimes {
            modified: nanos(metadata.mtime(), metadata.mtime_nsec()),
            changed: nanos(metadata.ctime(), metadata.ctime_nsec()),
            place: (metadata.dev(), metadata.ino()),
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
        FileTimes { modified, changed: modified, place: (since(metadata.created()) as u64, 0) }
    }
}

/// How many names a file has.
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
/// A file that loses its name, to another that takes its place for example, is read on as it was.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    file: PositionalFile,
    stamp: Stamp,
    last: Mutex<Last>,
}

/// The stamp of an open file when it was last read, and how many names it had then.
#[derive(Debug)]
struct Last {
    stamp: Stamp,
    links: u64,
}

impl Last {
    /// Whether the bytes are those of the last time. A name more or less has a change time of its own, so that a write
    /// between the same two reads is seen by its time of modification only.
    fn is_still(&mut self, now: &Metadata) -> bool {
        let now = Last { stamp: Stamp::of_file(now), links: links(now) };
        let still = now.stamp == self.stamp || (now.links != self.links && now.stamp.but_for_change(&self.stamp));
        if still {
            *self = now;
        }
        still
    }
}

impl FileSource {
    /// Opens a regular file. One that was changed a moment ago is waited for, some milliseconds, so that no later change
    /// has the time of that one.
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
        let settled = Stamp::is_complete(&file).map_err(Error::io("open", &path))?;
        let (stamp, links) = (Stamp::of_file(&settled), links(&settled));
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
            // The range lay within the file when it was opened.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(changed()),
            read => read.map_err(Error::io("read", &self.path))?,
        }
        // Asked after the read, so that a change before or during it is seen.
        let now = self.file.metadata().map_err(Error::io("read", &self.path))?;
        // Whatever a panic left of it is a stamp that was right.
        let still = self.last.lock().unwrap_or_else(PoisonError::into_inner).is_still(&now);
        if still { Ok(()) } else { Err(changed()) }
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

    /// Writes a file as reproducible archives and content stores do: at one time for all.
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
        // In place, at once.
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

    /// A new name or the loss of one is no write, and hides none for longer than until the next read.
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
        // The clock leaves the tick of that last change.
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
            // Of one length and one time of modification. No program can set the change time, so `a`'s stands in for `b`'s.
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
            assert!(!one.but_for_change(&other));
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
