//! Keeps what the device still uses, and lets it go once an event says so.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::backend::{Allocation, Event, FenceState};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The shortest and the longest pause between two looks at the events.
const PAUSE: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(2));

/// What to keep, until when, and what a trace shows until then.
type Kept = (Event, Vec<Arc<Allocation>>, tracing::Span);

/// A thread that holds memory until its last use is over.
pub(super) struct Reaper(Mutex<Sender<Kept>>);

impl Reaper {
    pub(super) fn start(device: DeviceId) -> Result<Reaper> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name(format!("{device} reaper"));
        thread.spawn(move || run(&receiver)).map_err(Error::io("start a thread for", device.to_string()))?;
        Ok(Reaper(Mutex::new(sender)))
    }

    /// Keeps `memory`, and `span` open, until `event` has fired or failed.
    pub(super) fn keep(&self, event: Event, memory: Vec<Arc<Allocation>>, span: tracing::Span) {
        let sent = self.0.lock().unwrap_or_else(PoisonError::into_inner).send((event, memory, span));
        if let Err(unsent) = sent {
            // Nobody watches the event any more, so the memory can never be given back safely.
            std::mem::forget(unsent);
        }
    }
}

/// The thread: until the reaper is dropped and nothing is kept any more.
fn run(incoming: &Receiver<Kept>) {
    let mut kept: Vec<Kept> = Vec::new();
    let mut pause = PAUSE.0;
    loop {
        let next = match kept.is_empty() {
            true => incoming.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => incoming.recv_timeout(pause),
        };
        match next {
            Ok(more) => {
                kept.push(more);
                kept.extend(incoming.try_iter());
            }
            Err(RecvTimeoutError::Disconnected) if kept.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(pause),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let before = kept.len();
        kept.retain(|(event, memory, _)| match event.state() {
            FenceState::Pending => true,
            FenceState::Done => false,
            FenceState::Failed(_) => {
                memory.iter().for_each(|allocation| allocation.abandon());
                false
            }
        });
        pause = if kept.len() < before { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
    }
}
