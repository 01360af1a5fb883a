//! Points in the work of queues.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tensor_offload::backend::{Event, Fence, FenceState};
use tensor_offload::{DeviceId, Error, Limits};

use crate::lock;

/// The end of a piece of work, for those who wait for it.
pub(crate) struct Signal {
    status: Mutex<Status>,
    raised: Condvar,
    /// The process whose thread does the work.
    process: u32,
}

struct Status {
    state: FenceState,
    /// Of the tasks that wait for the end.
    wakers: Vec<Waker>,
}

impl Signal {
    /// The state as this process sees it: in a fork there is no thread to end what is pending.
    fn seen(&self, status: &Status) -> FenceState {
        let (parent, child) = (self.process, std::process::id());
        match &status.state {
            FenceState::Pending if parent != child => FenceState::Lost(Arc::new(Error::Forked { parent, child })),
            state => state.clone(),
        }
    }
}

// SAFETY: a state other than pending is set once, by `Completion`, when the work has ended or will never begin.
unsafe impl Fence for Signal {
    fn state(&self) -> FenceState {
        self.seen(&lock(&self.status))
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        let is_pending = |status: &mut Status| matches!(self.seen(status), FenceState::Pending);
        let waited = self.raised.wait_timeout_while(lock(&self.status), deadline, is_pending);
        self.seen(&waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// A backend that is not told of the end of its work leaves this out; the library then asks now and then.
    fn wake(&self, waker: &Waker) -> bool {
        let mut status = lock(&self.status);
        match status.state {
            FenceState::Pending => status.wakers.push(waker.clone()),
            _ => waker.wake_by_ref(),
        }
        true
    }
}

/// The part of a signal that its queue has. If the queue ends without a word about the work, nobody knows what became of it.
pub(crate) struct Completion {
    signal: Arc<Signal>,
    device: DeviceId,
}

impl Completion {
    /// Work that `device` has to do, and the event of its end.
    pub(crate) fn pending(device: DeviceId) -> (Completion, Event) {
        let status = Mutex::new(Status { state: FenceState::Pending, wakers: Vec::new() });
        let signal = Arc::new(Signal { status, raised: Condvar::new(), process: std::process::id() });
        let event = Event::new(Arc::clone(&signal) as Arc<dyn Fence>);
        (Completion { signal, device }, event)
    }

    /// Says that the work is done, or has failed.
    pub(crate) fn complete(self, outcome: Result<(), FenceState>) {
        self.raise(|| outcome.err().unwrap_or(FenceState::Done));
    }

    fn raise(&self, state: impl FnOnce() -> FenceState) {
        let mut status = lock(&self.signal.status);
        if !matches!(status.state, FenceState::Pending) {
            return;
        }
        status.state = state();
        let wakers = std::mem::take(&mut status.wakers);
        drop(status);
        self.signal.raised.notify_all();
        // A waker is an executor's code. One that panics keeps neither the others asleep nor the queue from its work.
        wakers.into_iter().for_each(|waker| drop(catch_unwind(AssertUnwindSafe(|| waker.wake()))));
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        let why = || "the thread of a queue ended".to_owned();
        self.raise(|| FenceState::Lost(Arc::new(Error::DeviceLost { device: self.device, why: why() })));
    }
}

/// Waits for `events`, of whatever backends, on the thread of a queue.
///
/// # Errors
/// The state of the work that needed them, if one of them failed: the cause is that of the first. All are waited for nevertheless, since
/// whoever sees the work as over takes all of them for over. If one may not be, the work is lost.
pub(crate) fn wait_for(events: &[Event]) -> Result<(), FenceState> {
    let longest = Limits::default().work;
    let failures: Vec<Error> = events.iter().filter_map(|event| event.wait(longest).err()).collect();
    let cause = match failures.into_iter().next() {
        None => return Ok(()),
        Some(Error::Failed { cause, .. }) => cause,
        Some(other) => Arc::new(other),
    };
    Err(if events.iter().all(Event::is_over) { FenceState::Failed(cause) } else { FenceState::Lost(cause) })
}
