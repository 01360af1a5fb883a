//! A few staging buffers on the host that copies to devices take turns with.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::{Buf, BufMut, Device, Event, MemoryKind};
use crate::error::{Error, Result};

/// At most `most` host buffers of one size. A buffer comes back with the event of the copy that reads it and
/// is handed out again when that has fired.
pub(super) struct Ring {
    host: Arc<dyn Device>,
    bytes_each: usize,
    most: usize,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    made: usize,
    /// Buffers that a copy reads, with its event, oldest first.
    busy: VecDeque<(Event, Buf)>,
}

impl Ring {
    pub(super) fn new(host: Arc<dyn Device>, bytes_each: usize, most: usize) -> Ring {
        Ring { host, bytes_each, most, state: Mutex::default(), returned: Condvar::new() }
    }

    pub(super) fn bytes_each(&self) -> usize {
        self.bytes_each
    }

    /// A buffer that nobody uses, ready to be written.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when there is no memory for the first buffers; [`Error::TimedOut`] when none comes
    /// back; the error of the copy that had the buffer.
    pub(super) fn acquire(&self, deadline: Duration) -> Result<BufMut> {
        let until = Instant::now() + deadline;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.made < self.most {
                state.made += 1;
                drop(state);
                return self.host.alloc(self.bytes_each, MemoryKind::Pinned).inspect_err(|_| self.lost());
            }
            if let Some((event, buffer)) = state.busy.pop_front() {
                drop(state);
                event.wait(until.saturating_duration_since(Instant::now())).inspect_err(|_| self.lost())?;
                if let Ok(buffer) = buffer.try_reclaim() {
                    return Ok(buffer);
                }
                // Someone kept a clone beyond the copy; that memory is theirs now.
                self.lost();
                state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut { what: "a staging buffer".to_owned(), after: deadline });
            }
            state = self.returned.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives back a buffer that a copy reads until `event`.
    pub(super) fn release(&self, event: Event, buffer: Buf) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).busy.push_back((event, buffer));
        self.returned.notify_one();
    }

    /// A buffer is gone; another may be made in its place.
    pub(super) fn lost(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).made -= 1;
        self.returned.notify_one();
    }
}
