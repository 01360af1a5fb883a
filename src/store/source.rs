//! Objects as sources.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::client::Trouble;
use super::fault;
use super::ranges::{Wanted, ranges, scatter};
use super::runtime::runtime;
use crate::error::{Error, FileFault, Result};
use crate::limits::STAGING_BYTES;
use crate::transfer::{ReadPart, Source, Stamp, check_interrupt};

/// The bytes that opening an object asks for: most headers and all small files are in them.
const BEGINNING: u64 = 256 << 10;

/// The ranges of one read of a load, which reads as much as a staging buffer holds.
const RANGES_OF_A_READ: usize = STAGING_BYTES / super::ranges::SMALLEST as usize;

/// How often a thread that waits for bytes asks whether it should go on.
const SLICE: Duration = Duration::from_millis(50);

/// What all objects of a store share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) store: Arc<dyn ObjectStore>,
    /// Who may have a request under way.
    pub(super) permits: Arc<Semaphore>,
    pub(super) in_flight: usize,
    /// How long the store may send nothing.
    pub(super) deadline: Duration,
    /// What the client has met, where it is the library's.
    pub(super) trouble: Option<Arc<Trouble>>,
    pub(super) requests: AtomicU64,
    pub(super) bytes: AtomicU64,
}

impl Shared {
    /// Has the runtime do work on the store, and waits for what it returns. Only one of `in_flight` is done at a time.
    ///
    /// # Errors
    /// That of `work`, as one of `action` on `path`; [`Error::TimedOut`]; as [`check_interrupt`].
    pub(super) fn wait<T: Send + 'static, F>(
        self: &Arc<Shared>,
        action: &'static str,
        path: &Path,
        work: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let (send, outcome) = mpsc::channel();
        let (permits, deadline, work) = (Arc::clone(&self.permits), self.deadline, work(Arc::clone(&self.store)));
        let mut tasks = JoinSet::new();
        let task = async move {
            let _permit = permits.acquire_owned().await;
            // The receiver is gone when nobody wants this any more.
            let _ = send.send(tokio::time::timeout(deadline, work).await);
        };
        tasks.spawn_on(task, runtime()?.handle());
        match Messages::of(&outcome).next()? {
            Some(Ok(outcome)) => outcome.map_err(|error| fault::error(action, path, &error)),
            Some(Err(_)) => Err(self.timed_out(path)),
            None => Err(lost(path)),
        }
    }

    fn timed_out(&self, path: &Path) -> Error {
        let trouble = self.trouble.as_ref().and_then(|trouble| trouble.last());
        let trouble = trouble.map_or(String::new(), |trouble| format!(" (last, {trouble})"));
        Error::TimedOut {
            what: format!("the store to send bytes of {}{trouble}", path.display()),
            after: self.deadline,
        }
    }
}

/// Messages of tasks, waited for as long as they are wanted.
struct Messages<'a, T> {
    messages: &'a mpsc::Receiver<T>,
    asked: Instant,
}

impl<'a, T> Messages<'a, T> {
    fn of(messages: &'a mpsc::Receiver<T>) -> Messages<'a, T> {
        Messages { messages, asked: Instant::now() }
    }

    /// The next message. `None` if none will come.
    ///
    /// # Errors
    /// As [`check_interrupt`], also while messages come.
    fn next(&mut self) -> Result<Option<T>> {
        loop {
            if self.asked.elapsed() >= SLICE {
                check_interrupt()?;
                self.asked = Instant::now();
            }
            match self.messages.recv_timeout(SLICE) {
                Ok(message) => return Ok(Some(message)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }
}

fn lost(path: &Path) -> Error {
    Error::bug(format!("a task that reads {} ended without a result", path.display()))
}

/// Which bytes an object has, as far as the store tells.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    len: u64,
    etag: Option<String>,
    version: Option<String>,
    /// When it was written, in milliseconds since the epoch.
    modified: i64,
}

impl Version {
    fn of(meta: &ObjectMeta) -> Version {
        let ObjectMeta { size, e_tag, version, last_modified, .. } = meta;
        Version {
            len: *size,
            etag: e_tag.clone(),
            version: version.clone(),
            modified: last_modified.timestamp_millis(),
        }
    }

    /// Whether an answer is of the same bytes. An answer need not have a version, and some servers round times.
    fn is(&self, other: &Version) -> bool {
        let times = || self.etag.is_some() || self.modified / 1_000 == other.modified / 1_000;
        self.len == other.len && self.etag == other.etag && times()
    }
}

/// An object, read by ranges.
pub(super) struct ObjectSource {
    shared: Arc<Shared>,
    path: PathBuf,
    key: Key,
    version: Version,
    stamp: Stamp,
    /// The first bytes, which came when the object was opened.
    beginning: Vec<u8>,
}

impl ObjectSource {
    /// Opens an object and reads its beginning, in one request.
    pub(super) fn open(shared: &Arc<Shared>, path: PathBuf, key: Key, place: &str) -> Result<ObjectSource> {
        let of = key.clone();
        let first = shared.wait("open", &path, move |store| async move {
            let options = GetOptions { range: Some((0..BEGINNING).into()), ..GetOptions::default() };
            let answer = store.get_opts(&of, options).await?;
            let (version, mut bytes, mut stream) = (Version::of(&answer.meta), Vec::new(), answer.into_stream());
            while bytes.len() as u64 <= BEGINNING
                && let Some(more) = stream.next().await
            {
                bytes.extend_from_slice(&more?);
            }
            Ok((version, bytes))
        });
        let (version, beginning) = match first {
            Ok(opened) => opened,
            // No range begins in an object without bytes, which stores say in many ways.
            Err(error) if is_unclear(&error) => {
                let of = key.clone();
                match shared.wait("open", &path, |store| async move { store.head(&of).await }) {
                    Ok(meta) if meta.size == 0 => (Version::of(&meta), Vec::new()),
                    _ => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        let (expected, actual) = (version.len.min(BEGINNING), beginning.len() as u64);
        shared.bytes.fetch_add(actual, Ordering::Relaxed);
        if actual != expected {
            return Err(Error::file(&path, None, FileFault::Truncated { expected, actual }));
        }
        let identity = (place, key.as_ref(), &version.etag, &version.version, version.modified);
        let stamp = Stamp::of_version(version.len, &identity);
        Ok(ObjectSource { shared: Arc::clone(shared), path, key, version, stamp, beginning })
    }

    /// Reads parts in order of their offsets, none of which is empty.
    fn read(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        let wanted = ranges(parts, self.shared.in_flight);
        if wanted.is_empty() {
            return Ok(());
        }
        let (send, arrived) = mpsc::channel();
        // Dropped, it ends what is under way.
        let mut tasks = JoinSet::new();
        let runtime = runtime()?;
        for (index, Wanted { range, .. }) in wanted.iter().enumerate() {
            let range = Ranged {
                shared: Arc::clone(&self.shared),
                key: self.key.clone(),
                version: self.version.clone(),
                range: range.clone(),
            };
            tasks.spawn_on(range.stream(index, send.clone()), runtime.handle());
        }
        drop(send);
        let (mut left, mut messages) = (wanted.len(), Messages::of(&arrived));
        while left > 0 {
            let Some((index, arrival)) = messages.next()? else { return Err(lost(&self.path)) };
            let Wanted { parts: of, .. } = &wanted[index];
            match arrival {
                Arrival::Bytes(at, bytes) => scatter(&mut parts[of.clone()], at, &bytes),
                // Until now, so that what has arrived and has no place yet is never more than what may be under way.
                Arrival::Complete(permit) => {
                    drop(permit);
                    left -= 1;
                }
                Arrival::Failed(failure) => {
                    // With the permits of what is under way and of what has arrived.
                    drop((tasks, arrived));
                    return Err(self.explain(failure));
                }
            }
        }
        Ok(())
    }

    /// The error of a range.
    fn explain(&self, failure: Failure) -> Error {
        let changed = || Error::file(&self.path, None, FileFault::Changed);
        let of = self.key.clone();
        // What a store says of a range that an object no longer has differs from store to store.
        let now = || self.shared.wait("read", &self.path, |store| async move { store.head(&of).await });
        match failure {
            Failure::Changed => changed(),
            Failure::TimedOut => self.shared.timed_out(&self.path),
            Failure::Short { upto } => match now() {
                Ok(now) if !self.version.is(&Version::of(&now)) => changed(),
                _ => Error::file(&self.path, None, FileFault::Truncated { expected: self.version.len, actual: upto }),
            },
            Failure::Store(error) => {
                let error = fault::error("read", &self.path, &error);
                match is_unclear(&error).then(now) {
                    Some(Ok(now)) if !self.version.is(&Version::of(&now)) => changed(),
                    _ => error,
                }
            }
        }
    }
}

/// Whether an error says nothing of the object.
fn is_unclear(error: &Error) -> bool {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    matches!(error, Error::Io { source, .. } if !matches!(source.kind(), NotFound | PermissionDenied))
}

/// What comes of a range.
enum Arrival {
    /// Bytes, and their offset in the object.
    Bytes(u64, bytes::Bytes),
    /// All bytes were sent.
    Complete(Option<OwnedSemaphorePermit>),
    Failed(Failure),
}

enum Failure {
    /// The object is another one.
    Changed,
    /// The answer ends before this offset in the object, and says nothing of it.
    Short {
        upto: u64,
    },
    TimedOut,
    Store(object_store::Error),
}

/// A range to read of an object.
struct Ranged {
    shared: Arc<Shared>,
    key: Key,
    version: Version,
    range: std::ops::Range<u64>,
}

impl Ranged {
    /// Sends the bytes of the range as they arrive.
    async fn stream(self, index: usize, to: Sender<(usize, Arrival)>) {
        let permit = Arc::clone(&self.shared.permits).acquire_owned().await.ok();
        let last = match self.arrive(index, &to).await {
            Ok(()) => Arrival::Complete(permit),
            Err(failure) => Arrival::Failed(failure),
        };
        // The receiver is gone when nobody wants this any more.
        let _ = to.send((index, last));
    }

    async fn arrive(&self, index: usize, to: &Sender<(usize, Arrival)>) -> Result<(), Failure> {
        let Shared { store, deadline, requests, bytes: count, .. } = &*self.shared;
        requests.fetch_add(1, Ordering::Relaxed);
        let options = GetOptions {
            range: Some(self.range.clone().into()),
            // Servers that ignore this send the tag of what they have, which is compared below. A weak tag matches nothing (RFC 9110,
            // section 13.1.1).
            if_match: self.version.etag.clone().filter(|tag| !tag.starts_with("W/")),
            ..GetOptions::default()
        };
        let patient = |_| Failure::TimedOut;
        let answer = tokio::time::timeout(*deadline, store.get_opts(&self.key, options)).await.map_err(patient)?;
        let answer: GetResult = answer.map_err(Failure::Store)?;
        if !self.version.is(&Version::of(&answer.meta)) {
            return Err(Failure::Changed);
        }
        if answer.range != self.range {
            return Err(Failure::Short { upto: answer.range.end });
        }
        let (mut stream, mut at) = (answer.into_stream(), self.range.start);
        while let Some(bytes) = tokio::time::timeout(*deadline, stream.next()).await.map_err(patient)? {
            let bytes = bytes.map_err(Failure::Store)?;
            let len = bytes.len() as u64;
            // More than was asked for would belong to other parts.
            if len > self.range.end - at {
                return Err(Failure::Short { upto: at });
            }
            count.fetch_add(len, Ordering::Relaxed);
            if to.send((index, Arrival::Bytes(at, bytes))).is_err() {
                return Ok(());
            }
            at += len;
        }
        if at == self.range.end { Ok(()) } else { Err(Failure::Short { upto: at }) }
    }
}

impl fmt::Debug for ObjectSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectSource").field("path", &self.path).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Source for ObjectSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn stamp(&self) -> Stamp {
        self.stamp
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        self.read_parts(&mut [ReadPart::new(at, dst)])
    }

    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        let len = self.version.len;
        for part in parts.iter() {
            match part.at.checked_add(part.dst.len() as u64) {
                Some(end) if end <= len => {}
                end => {
                    let fault = FileFault::Truncated { expected: end.unwrap_or(u64::MAX), actual: len };
                    return Err(Error::file(&self.path, None, fault));
                }
            }
        }
        let mut rest: Vec<ReadPart<'_>> = Vec::with_capacity(parts.len());
        for part in parts {
            let at = usize::try_from(part.at).unwrap_or(usize::MAX);
            let here = self.beginning.get(at..).unwrap_or_default();
            let (known, asked) = part.dst.split_at_mut(here.len().min(part.dst.len()));
            known.copy_from_slice(&here[..known.len()]);
            if !asked.is_empty() {
                rest.push(ReadPart::new(part.at + known.len() as u64, asked));
            }
        }
        rest.sort_by_key(|part| part.at);
        self.read(&mut rest)
    }

    fn concurrency(&self) -> usize {
        // At least two, which say that the store is far away.
        self.shared.in_flight.div_ceil(RANGES_OF_A_READ).max(2)
    }
}
