//! Copies through pinned buffers: between a device and ordinary host memory, and between devices that cannot access each
//! other's memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::timing::Watch;
use crate::backend::{Buf, BufMut, Device, Event, Piece, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::limits::{STAGING_BUFFERS, STAGING_BYTES};
use crate::staging::{Pool, copy};

/// Timed copies through staging buffers.
pub(super) struct Relay {
    pool: Pool,
    watch: Watch,
    pinned: bool,
}

impl Relay {
    /// A relay through buffers near the device `near`, which copies from or to them.
    pub(super) fn new(host: &Arc<dyn Device>, near: DeviceId, watch: Watch) -> Result<Relay> {
        let pool = Pool::new(Arc::clone(host), near, STAGING_BYTES, STAGING_BUFFERS);
        // Allocated here, so that the time of a copy does not include it.
        let pinned = pool.make_all()?;
        Ok(Relay { pool, watch, pinned })
    }

    /// Whether the buffers are pinned.
    pub(super) fn pinned(&self) -> bool {
        self.pinned
    }

    /// Copies `src` on the host to `dst` on the device of `up`, part by part. Returns the time.
    pub(super) fn up(&self, up: &dyn Stream, src: &Buf, dst: &mut Option<BufMut>) -> Result<Duration> {
        let begin = self.watch.begin(up)?;
        let deadline = self.watch.deadline();
        let bytes = src.host(deadline)?.ok_or_else(not_host)?;
        let mut last = None;
        for (part, bytes) in bytes.chunks(STAGING_BYTES).enumerate() {
            let (mut buffer, lease) = self.pool.acquire(deadline)?;
            copy(None, vec![(bytes, &mut buffer.host_mut().ok_or_else(not_host)?[..bytes.len()])])?;
            let buffer = buffer.freeze();
            let done = send(up, &buffer, 0..bytes.len(), dst, part * STAGING_BYTES)?;
            lease.give_back(done.clone(), buffer);
            last = Some(done);
        }
        self.since(begin, last)
    }

    /// Copies `src` on the device of `down` to `dst` on the host, part by part. Returns the time.
    pub(super) fn down(&self, down: &dyn Stream, src: &Buf, dst: &mut [u8]) -> Result<Duration> {
        let begin = self.watch.begin(down)?;
        let (mut end, deadline) = (begin, self.watch.deadline());
        let mut parts = dst.chunks_mut(STAGING_BYTES).enumerate();
        let mut in_flight = VecDeque::new();
        loop {
            // Queue copies into all free buffers, then empty the oldest.
            while in_flight.len() < STAGING_BUFFERS {
                let Some((part, dst)) = parts.next() else { break };
                let (buffer, lease) = self.pool.next(deadline)?;
                let (mut buffer, from) = (Some(buffer), part * STAGING_BYTES);
                let done = send(down, src, from..from + dst.len(), &mut buffer, 0)?;
                in_flight.extend(buffer.map(|buffer| (buffer.freeze(), lease, done, dst)));
            }
            let Some((buffer, lease, done, dst)) = in_flight.pop_front() else { break };
            let arrived = self.watch.see(&done)?;
            copy(None, vec![(&buffer.host(deadline)?.ok_or_else(not_host)?[..dst.len()], dst)])?;
            lease.give_back(None, buffer);
            end = self.watch.now(arrived);
        }
        Ok(end.saturating_sub(begin))
    }

    /// Copies `bytes` of `src` on the device of `down` to `dst` on the device of `up`. Returns the time.
    pub(super) fn across(
        &self,
        (down, up): (&dyn Stream, &dyn Stream),
        (src, bytes): (&Buf, usize),
        dst: &mut Option<BufMut>,
    ) -> Result<Duration> {
        let begin = self.watch.begin(down)?.max(self.watch.begin(up)?);
        let mut last = None;
        for from in (0..bytes).step_by(STAGING_BYTES) {
            let part = from..bytes.min(from + STAGING_BYTES);
            let length = part.len();
            let (buffer, lease) = self.pool.next(self.watch.deadline())?;
            let mut buffer = Some(buffer);
            send(down, src, part, &mut buffer, 0)?;
            let Some(buffer) = buffer.map(BufMut::freeze) else { continue };
            let done = send(up, &buffer, 0..length, dst, from)?;
            lease.give_back(done.clone(), buffer);
            last = Some(done);
        }
        self.since(begin, last)
    }

    /// The time from `begin` until the last event.
    fn since(&self, begin: Duration, last: Option<Event>) -> Result<Duration> {
        last.map_or(Ok(begin), |event| self.watch.see(&event)).map(|end| end.saturating_sub(begin))
    }
}

/// Queues a copy of the range `from` of `src` to the offset `at` of `dst`. Returns the event of the copy.
fn send(stream: &dyn Stream, src: &Buf, from: Range<usize>, dst: &mut Option<BufMut>, at: usize) -> Result<Event> {
    let to = dst.take().ok_or_else(|| Error::bug("a copy was refused before"))?;
    let piece = Piece { src: src.clone(), from, at };
    let flight = stream.send(Transfer::new(vec![piece], to)?)?;
    let done = flight.done().clone();
    *dst = Some(flight.chain());
    Ok(done)
}

fn not_host() -> Error {
    Error::bug("the host cannot address its own memory")
}
