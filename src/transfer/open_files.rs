//! Open files, of which a process may have only so many.
//!
//! A file is opened when it is read and closed when others need its descriptor, so a model of hundreds of files loads under
//! any limit. A file that is opened again must be the one that it was: its stamp is compared before a byte is read.

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::stamp::{Stamp, links};
use crate::error::{Error, FileFault, Result};
use crate::file::OpenFile;

/// The most files that are kept open for reading, where the process may open many.
const MOST: usize = 64;

/// The fewest, whatever the process may open.
const FEWEST: usize = 2;

/// How often, and after which pause, opening is tried again while the process has no descriptor left.
const RETRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// A file that can be closed and opened again at any time.
#[derive(Debug)]
pub(super) struct ReopenedFile {
    /// The path in errors.
    path: PathBuf,
    /// The same path, whatever becomes of the current folder.
    absolute: PathBuf,
    open: Mutex<Option<Arc<OpenFile>>>,
    last: Mutex<Last>,
    /// When it was last read, by the count of all reads.
    used: AtomicU64,
}

/// The stamp of a file when it was last read, and the number of its names then.
#[derive(Clone, Copy, Debug)]
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

impl ReopenedFile {
    /// Opens a regular file, and waits until a later change has a later time.
    pub(super) fn open(path: PathBuf) -> Result<(Arc<ReopenedFile>, Stamp)> {
        let turn = OPEN.turn();
        let file = turn.open(&path)?;
        let metadata = Stamp::stable_metadata(&file).map_err(Error::io("open", &path))?;
        let stamp = Stamp::of_file(&metadata);
        let last = Mutex::new(Last { stamp, links: links(&metadata) });
        // Fails only without a current folder, where a relative path could not have been opened.
        let absolute = std::path::absolute(&path).unwrap_or_else(|_| path.clone());
        let open = Mutex::new(Some(Arc::new(OpenFile::new(file))));
        let file = Arc::new(ReopenedFile { path, absolute, open, last, used: AtomicU64::new(OPEN.now()) });
        turn.done(&file);
        Ok((file, stamp))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, open. It stays open while the value lives.
    ///
    /// # Errors
    /// [`FileFault::Changed`] when another file has the path, or none; [`Error::Io`] when the system refuses.
    pub(super) fn get(self: &Arc<Self>) -> Result<Arc<OpenFile>> {
        self.used.store(OPEN.now(), Ordering::Relaxed);
        let mut open = lock(&self.open);
        if let Some(file) = &*open {
            return Ok(Arc::clone(file));
        }
        let turn = OPEN.turn();
        let file = turn.open(&self.absolute).map_err(|error| match error {
            // There is nothing, or something else, in its place.
            Error::Io { source, .. } if is_gone(source.kind()) => self.changed(),
            Error::Io { action, source, .. } => Error::Io { path: self.path.clone(), action, source },
            Error::File { .. } => self.changed(),
            other => other,
        })?;
        let file = OpenFile::new(file);
        self.check(&file)?;
        let file = Arc::new(file);
        *open = Some(Arc::clone(&file));
        turn.done(self);
        Ok(file)
    }

    /// Fails if the file has changed since it was last read.
    pub(super) fn check(&self, file: &OpenFile) -> Result<()> {
        self.check_metadata(&file.positional().metadata().map_err(Error::io("read", &self.path))?)
    }

    /// As [`check`](ReopenedFile::check), by what the system says of the file now.
    pub(super) fn check_metadata(&self, now: &Metadata) -> Result<()> {
        // A panic leaves a stamp that was valid.
        if lock(&self.last).is_unchanged(now) { Ok(()) } else { Err(self.changed()) }
    }

    pub(super) fn changed(&self) -> Error {
        Error::file(&self.path, None, FileFault::Changed)
    }

    /// Closes the file once nobody reads it.
    fn close(&self) {
        *lock(&self.open) = None;
    }
}

/// The files of this process that are open for reading.
static OPEN: OpenFiles = OpenFiles { files: Mutex::new(Vec::new()), reads: AtomicU64::new(0) };

struct OpenFiles {
    /// The open files, and a place for each that is being opened.
    files: Mutex<Vec<Weak<ReopenedFile>>>,
    reads: AtomicU64,
}

impl OpenFiles {
    fn now(&self) -> u64 {
        self.reads.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes room for one more file: closes those that were read the longest ago until there is.
    fn turn(&self) -> Turn<'_> {
        self.close_down_to(most().saturating_sub(1));
        Turn { files: self }
    }

    /// Closes files until so many are open.
    fn close_down_to(&self, most: usize) {
        let closed = {
            let mut files = lock(&self.files);
            files.retain(|file| file.strong_count() > 0);
            files.sort_by_cached_key(|file| file.upgrade().map_or(0, |file| file.used.load(Ordering::Relaxed)));
            let surplus = files.len().saturating_sub(most);
            files.drain(..surplus).collect::<Vec<_>>()
        };
        // Outside the lock: a thread that opens a file holds that one's lock while it waits for this one.
        closed.iter().filter_map(Weak::upgrade).for_each(|file| file.close());
    }
}

/// The turn of one file to be opened.
struct Turn<'a> {
    files: &'a OpenFiles,
}

impl Turn<'_> {
    /// Opens a regular file for reading.
    fn open(&self, path: &Path) -> Result<File> {
        for _ in 0..RETRIES {
            match open_regular(path) {
                Err(Error::Io { source, .. }) if is_out_of_descriptors(&source) => {
                    self.files.close_down_to(0);
                    std::thread::sleep(PAUSE);
                }
                opened => return opened,
            }
        }
        open_regular(path)
    }

    /// Counts the file, which is open.
    fn done(self, file: &Arc<ReopenedFile>) {
        lock(&self.files.files).push(Arc::downgrade(file));
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// [`Error::Io`] when it cannot be opened or is not a regular file, [`FileFault::BrokenLink`] when a link leads nowhere.
pub(super) fn open_regular(path: &Path) -> Result<File> {
    // Checked before opening, since opening a pipe blocks until its other end is opened.
    let is_file = std::fs::metadata(path).map_err(open_error(path))?.is_file();
    if !is_file {
        let not_regular = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        return Err(Error::io("open", path)(not_regular));
    }
    File::open(path).map_err(open_error(path))
}

/// The error for a path that cannot be opened, shaped for `map_err`. Where a link on the way leads nowhere, it names the link.
pub(crate) fn open_error(path: &Path) -> impl FnOnce(io::Error) -> Error + '_ {
    move |source| {
        let broken = (source.kind() == io::ErrorKind::NotFound).then(|| broken_link(path)).flatten();
        broken.map_or_else(|| Error::io("open", path)(source), |fault| Error::file(path, None, fault))
    }
}

/// The link on the way to a path that leads nowhere.
pub(super) fn broken_link(path: &Path) -> Option<FileFault> {
    /// The most links that systems follow.
    const LINKS: usize = 40;
    let target_of = |link: &Path| std::fs::read_link(link).ok();
    let is_broken = |path: &&Path| target_of(path).is_some() && std::fs::metadata(path).is_err();
    // The outermost: what lies beyond it is not there to be looked at.
    let ancestors: Vec<&Path> = path.ancestors().collect();
    let mut link = ancestors.into_iter().rev().find(is_broken)?.to_owned();
    let mut target = target_of(&link)?;
    for _ in 0..LINKS {
        let next = link.parent().unwrap_or(Path::new("")).join(&target);
        let Some(further) = target_of(&next) else { break };
        (link, target) = (next, further);
    }
    Some(FileFault::BrokenLink { link, target })
}

/// Whether an error of opening says that there is no such file any more.
fn is_gone(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput)
}

/// How many files may be open for reading: a quarter of what the process may open, since others need descriptors too.
#[cfg(unix)]
fn most() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(MOST, |limit| (limit / 4).clamp(FEWEST as u64, MOST as u64) as usize)
}

#[cfg(not(unix))]
fn most() -> usize {
    MOST.max(FEWEST)
}

/// Whether the process, or the system, has no descriptor left.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    #[cfg(unix)]
    {
        use rustix::io::Errno;
        let code = error.raw_os_error();
        code == Some(Errno::MFILE.raw_os_error()) || code == Some(Errno::NFILE.raw_os_error())
    }
    #[cfg(not(unix))]
    {
        // ERROR_TOO_MANY_OPEN_FILES
        cfg!(windows) && error.raw_os_error() == Some(4)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
