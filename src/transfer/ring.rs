//! A few staging buffers on the host that copies to devices take turns with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rota::{Rota, Taken};
use crate::backend::{Buf, BufMut, Device, Event, MemoryKind};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// At most `most` host buffers of one size. A buffer comes back with the event of the copy that reads it and
/// is handed out again when that has fired.
pub(crate) struct Ring {
    host: Arc<dyn Device>,
    near: DeviceId,
    bytes_each: usize,
    buffers: Rota<(Event, Buf)>,
}

impl Ring {
    /// A ring of buffers near the device that copies from them.
    pub(crate) fn new(host: Arc<dyn Device>, near: DeviceId, bytes_each: usize, most: usize) -> Ring {
        Ring { host, near, bytes_each, buffers: Rota::new(most) }
    }

    pub(crate) fn bytes_each(&self) -> usize {
        self.bytes_each
    }

    /// A buffer that nobody uses, ready to be written.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when there is no memory for the first buffers; [`Error::TimedOut`] when none comes
    /// back.
    pub(crate) fn acquire(&self, deadline: Duration) -> Result<BufMut> {
        let until = Instant::now() + deadline;
        loop {
            let left = || until.saturating_duration_since(Instant::now());
            let (event, buffer) = match self.buffers.take(left()) {
                None => return Err(Error::TimedOut { what: "a staging buffer".to_owned(), after: deadline }),
                Some(Taken::Another) => {
                    let buffer = self.host.alloc_near(self.bytes_each, MemoryKind::Pinned, self.near);
                    return buffer.inspect_err(|_| self.lost());
                }
                Some(Taken::Oldest(lent)) => lent,
            };
            match event.wait(left()) {
                Ok(()) => {}
                // The copy still reads it, and it is as good as before for whoever has more time.
                Err(error @ Error::TimedOut { .. }) => {
                    self.release(event, buffer);
                    return Err(error);
                }
                // The copy failed, for those who wait for it; its buffer may be in use still.
                Err(_) => {
                    self.lost();
                    continue;
                }
            }
            if let Ok(buffer) = buffer.try_reclaim() {
                return Ok(buffer);
            }
            // Someone kept a clone beyond the copy; that memory is theirs now.
            self.lost();
        }
    }

    /// Gives back a buffer that a copy reads until `event`.
    pub(crate) fn release(&self, event: Event, buffer: Buf) {
        self.buffers.give((event, buffer));
    }

    /// A buffer is gone; another may be made in its place.
    pub(crate) fn lost(&self) {
        self.buffers.lost();
    }
}
