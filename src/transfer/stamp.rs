//! The identity of a source, by which a change of its bytes is detected.

use std::fs::{File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
///   on some others. Opening a [`FileSource`](super::FileSource) waits out the ticks of the system's own clock, of at most
///   20 milliseconds; [`of_file`](Stamp::of_file) cannot;
/// - on network file systems, a write by another machine until this one asks the server again, which takes some seconds
///   by default;
/// - a write to the disk beneath the file system;
/// - while a [`FileSource`](super::FileSource) is open, a write whose modification time is set back, if the file gains or loses a name between
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
    /// A hash of what tells the versions of a source apart.
    Version(u128),
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

    /// The stamp of `len` bytes of which `identity` says which they are: the place of an object in a store, and its version there, for
    /// example. Stamps of equal identities are equal, whenever the sources are opened by this process.
    pub fn of_version(len: u64, identity: &impl Hash) -> Stamp {
        let half = |number: u8| {
            let mut hasher = DefaultHasher::new();
            (number, identity).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        Stamp { len, origin: Origin::Version(half(0) << 64 | half(1)) }
    }

    /// The stamp of the same bytes in another form, of `len` bytes.
    pub(crate) fn with_len(self, len: u64) -> Stamp {
        Stamp { len, ..self }
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
    pub(super) fn matches_except_change_time(&self, other: &Stamp) -> bool {
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
pub(super) const TICK: Duration = Duration::from_millis(20);

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
pub(super) fn links(metadata: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(metadata)
}

#[cfg(not(unix))]
pub(super) fn links(_: &Metadata) -> u64 {
    1
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::{FileSource, MemorySource, Source};
    use super::*;

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
            for path in [&a, &b] {
                File::options().write(true).open(path).unwrap().set_modified(UNIX_EPOCH).unwrap();
            }
            let times = |stamp: Stamp| match stamp.origin {
                Origin::File(times) => times,
                other => panic!("the stamp of a file is {other:?}"),
            };
            let (one, other) = (stamp(&a), stamp(&b));
            assert_eq!((one.len, times(one).modified), (other.len, times(other).modified));
            let at_once = FileTimes { changed: times(one).changed, ..times(other) };
            assert_ne!(Stamp { origin: Origin::File(at_once), ..other }, one);
            assert!(!one.matches_except_change_time(&other));
        }
        let memory = || MemorySource::new("m", vec![1; 4]);
        assert_ne!(memory().stamp(), memory().stamp());
        let version = |len, tag: &str| Stamp::of_version(len, &("s3://bucket/", "model", Some(tag)));
        assert_eq!(version(4, "a"), version(4, "a"));
        assert!(version(4, "a") != version(4, "b") && version(4, "a") != version(5, "a"));
    }
}
