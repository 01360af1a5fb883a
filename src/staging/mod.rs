//! Staging buffers on the host: pinned memory that bytes pass on their way to, from and between devices. Loads, streams and
//! link measurements take turns with a few of one size each, from a pool of this kind.

mod rota;
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
use rota::{Rota, Taken};

/// How many bytes one thread copies at a time. Fewer are there sooner than another thread wakes up.
const PART: usize = 1 << 20;

/// At most so many host buffers of one size, near a device, that are lent in turn: the one given back first is lent first.
/// One that does not come back makes room for another.
pub(crate) struct Pool {
    host: Arc<dyn Device>,
    near: DeviceId,
    bytes_each: usize,
    buffers: Rota<(Option<Event>, Buf)>,
}

/// The place of a buffer that is out: given back with the buffer, or free for another when this is dropped.
#[must_use]
pub(crate) struct Lent<'p>(Option<&'p Pool>);

/// The buffer that was given back first, the copy that reads it, and its place.
type Oldest<'p> = (Option<Event>, Buf, Lent<'p>);

impl Lent<'_> {
    /// Gives back the buffer, which a copy reads until `event`, or as long as its own events say.
    pub(crate) fn give_back(mut self, event: impl Into<Option<Event>>, buffer: Buf) {
        if let Some(pool) = self.0.take() {
            pool.buffers.give((event.into(), buffer));
        }
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(pool) = self.0 {
            pool.buffers.lost();
        }
    }
}

impl Pool {
    /// At most `most` buffers near the device that copies from or to them, none larger than the largest thing that passes
    /// them.
    pub(crate) fn new(host: Arc<dyn Device>, near: DeviceId, largest: usize, most: usize) -> Pool {
        Pool { host, near, bytes_each: largest.min(STAGING_BYTES), buffers: Rota::new(most) }
    }

    pub(crate) fn bytes_each(&self) -> usize {
        self.bytes_each
    }

    /// A buffer that nobody uses, ready to be written by the host, and its place in the pool.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when there is no memory for any; [`Error::TimedOut`] when none comes back.
    pub(crate) fn acquire(&self, deadline: Duration) -> Result<(BufMut, Lent<'_>)> {
        let until = Instant::now() + deadline;
        loop {
            let left = || until.saturating_duration_since(Instant::now());
            let (event, buffer, lent) = match self.take(left())? {
                Ok(made) => return Ok(made),
                Err(oldest) => oldest,
            };
            match event.as_ref().map_or(Ok(()), |event| event.wait(left())) {
                Ok(()) => {}
                // The copy still reads it, and it is as good as before for whoever has more time.
                Err(error @ Error::TimedOut { .. }) => {
                    lent.give_back(event, buffer);
                    return Err(error);
                }
                // The copy failed, for those who wait for it; its buffer may be in use still.
                Err(_) => continue,
            }
            // Where someone kept a clone beyond the copy, that memory is theirs now.
            let Ok(mut buffer) = buffer.try_reclaim() else { continue };
            match buffer.wait_unused(left()) {
                Ok(()) => return Ok((buffer, lent)),
                Err(error @ Error::TimedOut { .. }) => {
                    lent.give_back(None, buffer.freeze());
                    return Err(error);
                }
                Err(_) => {}
            }
        }
    }

    /// The next buffer, to be written by a stream, which waits for the copies that read it.
    ///
    /// # Errors
    /// As [`acquire`](Pool::acquire).
    pub(crate) fn next(&self, deadline: Duration) -> Result<(BufMut, Lent<'_>)> {
        loop {
            match self.take(deadline)? {
                Ok(made) => return Ok(made),
                // One that is kept by a copy that was refused is made anew.
                Err((_, buffer, lent)) => match buffer.try_reclaim() {
                    Ok(buffer) => return Ok((buffer, lent)),
                    Err(_) => continue,
                },
            }
        }
    }

    /// Makes all of its buffers, before any is lent; whether all are pinned.
    ///
    /// # Errors
    /// When there is no memory for all of them.
    pub(crate) fn make_all(&self) -> Result<bool> {
        let mut all = Vec::new();
        while let Some(Taken::Another) = self.buffers.take(Duration::ZERO) {
            let lent = Lent(Some(self));
            all.push((self.host.alloc_near(self.bytes_each, MemoryKind::Pinned, self.near)?, lent));
        }
        let pinned = all.iter().all(|(buffer, _)| buffer.block().pinned());
        all.into_iter().for_each(|(buffer, lent)| lent.give_back(None, buffer.freeze()));
        Ok(pinned)
    }

    /// A buffer that was just made, or the one that was given back first, with what reads it.
    fn take(&self, deadline: Duration) -> Result<Result<(BufMut, Lent<'_>), Oldest<'_>>> {
        let until = Instant::now() + deadline;
        loop {
            let taken = self.buffers.take(until.saturating_duration_since(Instant::now()));
            let mut lent = Lent(taken.is_some().then_some(self));
            match taken {
                None => return Err(Error::TimedOut { what: "a staging buffer".to_owned(), after: deadline }),
                Some(Taken::Oldest((event, buffer))) => return Ok(Err((event, buffer, lent))),
                Some(Taken::Another) => {
                    match self.host.alloc_near(self.bytes_each, MemoryKind::Pinned, self.near) {
                        Ok(buffer) => return Ok(Ok((buffer, lent))),
                        // The host is full: those that there are will do.
                        Err(Error::OutOfMemory { .. }) if self.buffers.no_more() => lent.0 = None,
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }
}

/// Copies each of these byte ranges to one as long: where they are much together with several `threads`, the library's own
/// where none are given.
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
    // The threads are asked once, and not for each of what may be hundreds of ranges.
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
