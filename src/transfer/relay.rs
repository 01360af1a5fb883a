//! Copies by way of pinned buffers: between a device and ordinary host memory, and between devices that cannot reach
//! each other.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use super::pattern;
use super::timing::{DEADLINE, Watch};
use crate::backend::{Buf, BufMut, Device, Event, MemoryKind, Piece, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The bytes of one pinned buffer, and how many there are.
const BUFFERS: (usize, usize) = (16 << 20, 4);

/// Pinned buffers that are used in turn. Copies wait for each other on the devices, where the ring of a load or of a lane waits
/// on the host.
pub(super) struct Relay(VecDeque<BufMut>);

impl Relay {
    /// Buffers near a device that copies from or to them.
    pub(super) fn new(host: &dyn Device, near: DeviceId) -> Result<Relay> {
        let buffer = |_| host.alloc_near(BUFFERS.0, MemoryKind::Pinned, near);
        (0..BUFFERS.1).map(buffer).collect::<Result<_>>().map(Relay)
    }

    /// Whether its memory is pinned.
    pub(super) fn pinned(&self) -> bool {
        self.0.iter().all(|buffer| buffer.allocation().pinned())
    }

    fn take(&mut self) -> Result<BufMut> {
        self.0.pop_front().ok_or_else(|| Error::bug("a staging buffer was lost with a copy that was refused"))
    }

    fn give_back(&mut self, buffer: Buf) {
        self.0.extend(buffer.try_reclaim());
    }

    /// Copies `src` of the host to `dst` of the device of `up`, part by part; the time.
    pub(super) fn up(
        &mut self,
        watch: Watch,
        up: &dyn Stream,
        src: &Buf,
        dst: &mut Option<BufMut>,
    ) -> Result<Duration> {
        let begin = watch.begin(up)?;
        let bytes = src.host(DEADLINE)?.ok_or_else(not_host)?;
        let mut last = None;
        for (part, bytes) in bytes.chunks(BUFFERS.0).enumerate() {
            let mut buffer = self.take()?;
            buffer.settle(DEADLINE)?;
            pattern::copy(bytes, &mut buffer.host_mut().ok_or_else(not_host)?[..bytes.len()])?;
            let buffer = buffer.freeze();
            last = Some(send(up, &buffer, 0..bytes.len(), dst, part * BUFFERS.0)?);
            self.give_back(buffer);
        }
        last.map_or(Ok(begin), |event| watch.see(&event)).map(|end| end.saturating_sub(begin))
    }

    /// Copies `src` of the device of `down` to `dst` of the host, part by part; the time.
    pub(super) fn down(&mut self, watch: Watch, down: &dyn Stream, src: &Buf, dst: &mut [u8]) -> Result<Duration> {
        let begin = watch.begin(down)?;
        let mut end = begin;
        let mut under_way: VecDeque<(Buf, Event)> = VecDeque::new();
        let mut parts = dst.chunks_mut(BUFFERS.0).enumerate();
        let mut empty = VecDeque::new();
        loop {
            // Send for as much as there are buffers, then empty the oldest.
            while !self.0.is_empty() {
                let Some((part, dst)) = parts.next() else { break };
                let mut buffer = Some(self.take()?);
                let from = part * BUFFERS.0;
                let done = send(down, src, from..from + dst.len(), &mut buffer, 0)?;
                under_way.extend(buffer.map(|buffer| (buffer.freeze(), done)));
                empty.push_back(dst);
            }
            let (Some((buffer, done)), Some(dst)) = (under_way.pop_front(), empty.pop_front()) else { break };
            let arrived = watch.see(&done)?;
            pattern::copy(&buffer.host(DEADLINE)?.ok_or_else(not_host)?[..dst.len()], dst)?;
            self.give_back(buffer);
            end = watch.now(arrived);
        }
        Ok(end.saturating_sub(begin))
    }

    /// Copies `bytes` of `src` of the device of `down` to `dst` of that of `up`; the time.
    pub(super) fn across(
        &mut self,
        watch: Watch,
        (down, up): (&dyn Stream, &dyn Stream),
        (src, bytes): (&Buf, usize),
        dst: &mut Option<BufMut>,
    ) -> Result<Duration> {
        let begin = watch.begin(down)?.max(watch.begin(up)?);
        let mut last = None;
        for from in (0..bytes).step_by(BUFFERS.0) {
            let part = from..bytes.min(from + BUFFERS.0);
            let length = part.len();
            let mut buffer = Some(self.take()?);
            send(down, src, part, &mut buffer, 0)?;
            let Some(buffer) = buffer.map(BufMut::freeze) else { continue };
            last = Some(send(up, &buffer, 0..length, dst, from)?);
            self.give_back(buffer);
        }
        last.map_or(Ok(begin), |event| watch.see(&event)).map(|end| end.saturating_sub(begin))
    }
}

/// Queues a copy of `from` of `src` to `at` of `dst`; its event.
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
