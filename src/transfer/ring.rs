//! A few staging buffers on the host that copies to devices take turns with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rota::{Rota, Taken};
use crate::backend::{Buf, BufMut, Device, Event, MemoryKind};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// At most `most` host buffers of one size. A buffer comes back with the event of the copy that reads it and
/// is handed out again when that has fired; one that does not come back makes room for another.
pub(crate) struct Ring {
    host: Arc<dyn Device>,
    near: DeviceId,
    bytes_each: usize,
    buffers: Rota<(Event, Buf)>,
}

/// The place of a buffer that is out: given back with the buffer, or free for another when this is dropped.
#[must_use]
pub(crate) struct Lent<'r>(Option<&'r Ring>);

impl Lent<'_> {
    /// Gives back the buffer, which a copy reads until `event`.
    pub(crate) fn give_back(mut self, event: Event, buffer: Buf) {
        if let Some(ring) = self.0.take() {
            ring.buffers.give((event, buffer));
        }
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(ring) = self.0 {
            ring.buffers.lost();
        }
    }
}

impl Ring {
    /// A ring of buffers near the device that copies from them.
    pub(crate) fn new(host: Arc<dyn Device>, near: DeviceId, bytes_each: usize, most: usize) -> Ring {
        Ring { host, near, bytes_each, buffers: Rota::new(most) }
    }

    pub(crate) fn bytes_each(&self) -> usize {
        self.bytes_each
    }

    /// A buffer that nobody uses, ready to be written, and its place in the ring.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when there is no memory for the first buffers; [`Error::TimedOut`] when none comes
    /// back.
    pub(crate) fn acquire(&self, deadline: Duration) -> Result<(BufMut, Lent<'_>)> {
        let until = Instant::now() + deadline;
        loop {
            let left = || until.saturating_duration_since(Instant::now());
            let taken = self.buffers.take(left());
            let lent = Lent(taken.is_some().then_some(self));
            let (event, buffer) = match taken {
                None => return Err(Error::TimedOut { what: "a staging buffer".to_owned(), after: deadline }),
                Some(Taken::Another) => {
                    let buffer = self.host.alloc_near(self.bytes_each, MemoryKind::Pinned, self.near)?;
                    return Ok((buffer, lent));
                }
                Some(Taken::Oldest(oldest)) => oldest,
            };
            match event.wait(left()) {
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
            if let Ok(buffer) = buffer.try_reclaim() {
                return Ok((buffer, lent));
            }
        }
    }
}
