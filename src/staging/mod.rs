//! Staging buffers on the host: pinned memory for bytes on their way to, from and between devices. Loads, streams and link
//! measurements each have a pool of a few buffers of one size, used in turn.

mod blocking_pool;
pub(crate) mod sync;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::backend::{Buf, BufMut, Device, Event, MemoryKind};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::limits::STAGING_BYTES;
use crate::threads;
use blocking_pool::{Acquired, BlockingPool};

/// The bytes that one thread copies at a time. Fewer are copied sooner than another thread wakes up.
const PART: usize = 1 << 20;

/// A pool of host buffers of one size near a device. The buffer returned first is leased first. A buffer that is not returned
/// makes room for another.
pub(crate) struct Pool {
    host: Arc<dyn Device>,
    near: DeviceId,
    bytes_each: usize,
    buffers: BlockingPool<(Option<Event>, Buf)>,
}

/// The lease of a buffer: returned with the buffer, or, when dropped, room in the pool for another buffer.
#[must_use]
pub(crate) struct Lease<'p>(Option<&'p Pool>);

/// The buffer that was returned first: the event of the copy that reads it, the buffer, and its lease.
type Oldest<'p> = (Option<Event>, Buf, Lease<'p>);

impl Lease<'_> {
    /// Returns the buffer to the pool. A copy reads it until `event`, or, with `None`, until its own events are complete.
    pub(crate) fn give_back(mut self, event: impl Into<Option<Event>>, buffer: Buf) {
        if let Some(pool) = self.0.take() {
            pool.buffers.release((event.into(), buffer));
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(pool) = self.0 {
            pool.buffers.discard();
        }
    }
}

impl Pool {
    /// A pool of at most `most` buffers near `near`, the device that copies from or to them. The buffers are no larger than
    /// `largest`, the most bytes that one transfer stages.
    pub(crate) fn new(host: Arc<dyn Device>, near: DeviceId, largest: usize, most: usize) -> Pool {
        Pool { host, near, bytes_each: largest.min(STAGING_BYTES), buffers: BlockingPool::new(most) }
    }

    pub(crate) fn bytes_each(&self) -> usize {
        self.bytes_each
    }

    /// Leases a buffer that no copy uses, ready to be written by the host.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when there is no memory for any; [`Error::TimedOut`] when none is returned in time.
    pub(crate) fn acquire(&self, deadline: Duration) -> Result<(BufMut, Lease<'_>)> {
        let until = Instant::now() + deadline;
        loop {
            let left = || until.saturating_duration_since(Instant::now());
            let (event, buffer, lease) = match self.take(left())? {
                Ok(created) => return Ok(created),
                Err(oldest) => oldest,
            };
            match event.as_ref().map_or(Ok(()), |event| event.wait(left())) {
                Ok(()) => {}
                // The copy still reads the buffer. A caller with a longer deadline can wait for it.
                Err(error @ Error::TimedOut { .. }) => {
                    lease.give_back(event, buffer);
                    return Err(error);
                }
                // The copy failed, and reports that to its own waiters. The buffer may still be in use.
                Err(_) => continue,
            }
            // A clone that outlives the copy keeps the memory.
            let Ok(mut buffer) = buffer.try_reclaim() else { continue };
            match buffer.wait_unused(left()) {
                Ok(()) => return Ok((buffer, lease)),
                Err(error @ Error::TimedOut { .. }) => {
                    lease.give_back(None, buffer.freeze());
                    return Err(error);
                }
                Err(_) => {}
            }
        }
    }

    /// Leases the next buffer, to be written by a stream. The stream waits for the copies that read the buffer.
    ///
    /// # Errors
    /// As [`acquire`](Pool::acquire).
    pub(crate) fn next(&self, deadline: Duration) -> Result<(BufMut, Lease<'_>)> {
        loop {
            match self.take(deadline)? {
                Ok(created) => return Ok(created),
                // A buffer that a rejected copy kept is replaced by a new one.
                Err((_, buffer, lease)) => match buffer.try_reclaim() {
                    Ok(buffer) => return Ok((buffer, lease)),
                    Err(_) => continue,
                },
            }
        }
    }

    /// Allocates all buffers, before any is leased. Returns whether all are pinned.
    ///
    /// # Errors
    /// When there is no memory for all of them.
    pub(crate) fn make_all(&self) -> Result<bool> {
        let mut all = Vec::new();
        while let Some(Acquired::MayCreate) = self.buffers.acquire(Duration::ZERO) {
            let lease = Lease(Some(self));
            all.push((self.host.alloc_near(self.bytes_each, MemoryKind::Pinned, self.near)?, lease));
        }
        let pinned = all.iter().all(|(buffer, _)| buffer.block().pinned());
        all.into_iter().for_each(|(buffer, lease)| lease.give_back(None, buffer.freeze()));
        Ok(pinned)
    }

    /// Leases a new buffer, or else the buffer that was returned first.
    fn take(&self, deadline: Duration) -> Result<Result<(BufMut, Lease<'_>), Oldest<'_>>> {
        let until = Instant::now() + deadline;
        loop {
            let acquired = self.buffers.acquire(until.saturating_duration_since(Instant::now()));
            let mut lease = Lease(acquired.is_some().then_some(self));
            match acquired {
                None => return Err(Error::TimedOut { what: "a staging buffer".to_owned(), after: deadline }),
                Some(Acquired::Oldest((event, buffer))) => return Ok(Err((event, buffer, lease))),
                Some(Acquired::MayCreate) => {
                    match self.host.alloc_near(self.bytes_each, MemoryKind::Pinned, self.near) {
                        Ok(buffer) => return Ok(Ok((buffer, lease))),
                        // The host is full: the pool goes on with the buffers that exist.
                        Err(Error::OutOfMemory { .. }) if self.buffers.stop_growing() => lease.0 = None,
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }
}

/// Copies each source slice to a destination slice of the same length. More than 1 MiB in all is copied by several threads:
/// by `threads`, or by the library's own if that is `None`.
///
/// # Errors
/// [`Error::Io`] when the system gives no threads; then nothing is copied.
pub(crate) fn copy(threads: Option<&ThreadPool>, pairs: Vec<(&[u8], &mut [u8])>) -> Result<()> {
    let bytes: usize = pairs.iter().map(|(_, to)| to.len()).sum();
    let parts = pairs.into_iter().flat_map(|(from, to)| from.chunks(PART).zip(to.chunks_mut(PART)));
    if bytes <= PART {
        parts.for_each(|(from, to)| to.copy_from_slice(from));
        return Ok(());
    }
    // One call into the thread pool, not one for each of what may be hundreds of ranges.
    let parts: Vec<(&[u8], &mut [u8])> = parts.collect();
    let work = || parts.into_par_iter().for_each(|(from, to)| to.copy_from_slice(from));
    match threads {
        Some(threads) => {
            threads.install(work);
            Ok(())
        }
        None => threads::run(work),
    }
}
