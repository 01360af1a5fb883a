//! A thread that keeps memory alive while the device uses it, and releases it once its event is complete.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::{Event, FenceState, MemoryBlock, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The driver's side of an open device, through which events are queried.
pub(super) trait Context: Send + Sync + 'static {
    /// The device.
    fn id(&self) -> DeviceId;

    /// Runs `work`, which makes several calls in a row.
    fn batched(&self, work: &mut dyn FnMut()) {
        work();
    }
}

/// The shortest and the longest polling interval.
const PAUSE: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(2));

/// Memory in use, the event until which it is used, and the tracing span of that time.
struct InUse {
    /// The number of the event's stream.
    stream: u64,
    event: Event,
    memory: Memory,
    _span: tracing::Span,
}

/// Memory that queued work uses. The two ends of a plain copy are kept without a list.
pub(super) enum Memory {
    Ends([Arc<MemoryBlock>; 2]),
    All(Vec<Arc<MemoryBlock>>),
}

impl Memory {
    /// The memory of both ends of a transfer.
    pub(super) fn of(transfer: &Transfer) -> Memory {
        let dst = transfer.dst().block();
        if let [piece] = transfer.pieces() {
            return Memory::Ends([piece.src.block(), dst].map(Arc::clone));
        }
        let mut all = vec![Arc::clone(dst)];
        for piece in transfer.pieces() {
            // Adjacent pieces of one source are held once.
            if !all.last().is_some_and(|last| Arc::ptr_eq(last, piece.src.block())) {
                all.push(Arc::clone(piece.src.block()));
            }
        }
        Memory::All(all)
    }

    /// Marks the memory as never to be freed: a failed device may still use it.
    pub(super) fn abandon(&self) {
        let all = match self {
            Memory::Ends(ends) => &ends[..],
            Memory::All(all) => all,
        };
        all.iter().for_each(|allocation| allocation.abandon());
    }
}

/// The handle of a thread that holds memory until its last use is complete.
pub(super) struct Reaper(Arc<Channel>);

/// The entries that the thread has not received yet.
#[derive(Default)]
struct Channel {
    state: Mutex<ChannelState>,
    changed: Condvar,
}

#[derive(Default)]
struct ChannelState {
    new: Vec<InUse>,
    /// The thread holds nothing and sleeps until it is woken. While it holds something it polls anyway, so that senders need
    /// not wake it, which would be their largest cost.
    idle: bool,
    /// Nothing more will be sent.
    closed: bool,
}

impl Channel {
    fn state(&self) -> MutexGuard<'_, ChannelState> {
        // Every change is one push, take or assignment, so a poisoned lock still guards a consistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reaper {
    pub(super) fn start<C: Context>(context: &Arc<C>) -> Result<Reaper> {
        let device = context.id();
        let channel = Arc::<Channel>::default();
        // The memory in use holds the context; the thread itself must not keep the device open.
        let (receiver, context) = (Arc::clone(&channel), Arc::downgrade(context));
        let thread = std::thread::Builder::new().name(format!("{device} reaper"));
        thread.spawn(move || run(&receiver, &context)).map_err(Error::io("start a thread for", device.to_string()))?;
        Ok(Reaper(channel))
    }

    /// Keeps `memory` alive, and `span` open, until `event` is complete. The events of one `stream` must be passed in order.
    pub(super) fn keep(&self, stream: u64, event: Event, memory: Memory, span: tracing::Span) {
        let mut state = self.0.state();
        state.new.push(InUse { stream, event, memory, _span: span });
        if std::mem::take(&mut state.idle) {
            self.0.changed.notify_one();
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.changed.notify_one();
    }
}

/// The memory in use: a queue for each stream, whose first entry is the first to complete.
#[derive(Default)]
struct Queues(HashMap<u64, VecDeque<InUse>>);

impl Queues {
    fn add(&mut self, new: Vec<InUse>) {
        new.into_iter().for_each(|entry| self.0.entry(entry.stream).or_default().push_back(entry));
    }

    /// Releases the entries whose events are complete. Returns whether there were any. It queries at most one pending event of
    /// each stream.
    fn release_completed(&mut self, context: &Weak<impl Context>) -> bool {
        let mut any = false;
        match context.upgrade() {
            Some(context) => context.batched(&mut || any = self.release_now()),
            None => any = self.release_now(),
        }
        any
    }

    fn release_now(&mut self) -> bool {
        let mut any = false;
        self.0.retain(|_, queue| {
            while let Some(entry) = queue.pop_front() {
                match entry.event.state() {
                    FenceState::Pending => {
                        queue.push_front(entry);
                        return true;
                    }
                    FenceState::Done | FenceState::Failed(_) => {}
                    FenceState::Lost(_) => entry.memory.abandon(),
                }
                any = true;
                // The memory may be another backend's, and so may its drop code.
                if catch_unwind(AssertUnwindSafe(|| drop(entry))).is_err() {
                    tracing::error!("freeing memory that a device is done with panicked");
                }
            }
            false
        });
        any
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        // Entries are left only if the thread ends early: nobody will see when their events complete.
        self.0.values().flatten().for_each(|entry| entry.memory.abandon());
    }
}

/// The thread's loop. It runs until the reaper is dropped and no memory is in use any more.
fn run(channel: &Channel, context: &Weak<impl Context>) {
    let mut queues = Queues::default();
    let mut pause = PAUSE.0;
    loop {
        let mut state = channel.state();
        if queues.0.is_empty() && state.new.is_empty() {
            if state.closed {
                return;
            }
            state.idle = true;
            drop(channel.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
            continue;
        }
        let new = std::mem::take(&mut state.new);
        drop(state);
        let more = !new.is_empty();
        queues.add(new);
        let any = queues.release_completed(context);
        pause = if more || any { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        if !queues.0.is_empty() {
            std::thread::sleep(pause);
        }
    }
}
