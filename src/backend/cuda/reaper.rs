//! Keeps what the device still uses, and lets it go once an event says so.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::context::Context;
use crate::backend::{Event, FenceState, MemoryBlock};
use crate::error::{Error, Result};

/// The shortest and the longest pause between two looks at the events.
const PAUSE: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(2));

/// What to keep, until when, and what a trace shows until then.
struct Kept {
    /// The stream that the event is of.
    stream: u64,
    event: Event,
    memory: Memory,
    _span: tracing::Span,
}

/// Memory that queued work uses: of a plain copy its two ends, which are kept without a list.
pub(super) enum Memory {
    Ends([Arc<MemoryBlock>; 2]),
    All(Vec<Arc<MemoryBlock>>),
}

impl Memory {
    /// Never frees it: a device that failed may still use it.
    pub(super) fn abandon(&self) {
        let all = match self {
            Memory::Ends(ends) => &ends[..],
            Memory::All(all) => all,
        };
        all.iter().for_each(|allocation| allocation.abandon());
    }
}

/// A thread that holds memory until its last use is over.
pub(super) struct Reaper(Arc<Mailbox>);

/// What the thread has been given and not taken yet.
#[derive(Default)]
struct Mailbox {
    letters: Mutex<Letters>,
    arrived: Condvar,
}

#[derive(Default)]
struct Letters {
    new: Vec<Kept>,
    /// The thread keeps nothing and sleeps until it is woken. While it keeps something it looks at times anyway, so that
    /// those who bring more need not wake it, which would cost them more than all else.
    idle: bool,
    /// Nobody will bring more.
    closed: bool,
}

impl Mailbox {
    fn letters(&self) -> MutexGuard<'_, Letters> {
        // Every change is one push, take or assignment, so a poisoned lock still guards whole letters.
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reaper {
    pub(super) fn start(context: &Arc<Context>) -> Result<Reaper> {
        let device = context.id();
        let mailbox = Arc::<Mailbox>::default();
        // What is kept holds the context; the thread itself must not keep the device open.
        let (theirs, context) = (Arc::clone(&mailbox), Arc::downgrade(context));
        let thread = std::thread::Builder::new().name(format!("{device} reaper"));
        thread.spawn(move || run(&theirs, &context)).map_err(Error::io("start a thread for", device.to_string()))?;
        Ok(Reaper(mailbox))
    }

    /// Keeps `memory`, and `span` open, until `event` is over. The events of one `stream` come in their order.
    pub(super) fn keep(&self, stream: u64, event: Event, memory: Memory, span: tracing::Span) {
        let mut letters = self.0.letters();
        letters.new.push(Kept { stream, event, memory, _span: span });
        if std::mem::take(&mut letters.idle) {
            self.0.arrived.notify_one();
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.0.letters().closed = true;
        self.0.arrived.notify_one();
    }
}

/// What the thread keeps: a queue for each stream, whose first entry is the first to be over.
#[derive(Default)]
struct Queues(HashMap<u64, VecDeque<Kept>>);

impl Queues {
    fn add(&mut self, kept: Vec<Kept>) {
        kept.into_iter().for_each(|kept| self.0.entry(kept.stream).or_default().push_back(kept));
    }

    /// Lets go of what is over; whether there was any. Of each stream one event is asked for that is not.
    fn look(&mut self, context: &Weak<Context>) -> bool {
        let context = context.upgrade();
        // Once for all that is asked here. Where it fails, so does what is asked, and the events say why.
        let _entered = context.as_ref().map(|context| context.enter());
        let mut some = false;
        self.0.retain(|_, queue| {
            while let Some(kept) = queue.pop_front() {
                match kept.event.state() {
                    FenceState::Pending => {
                        queue.push_front(kept);
                        return true;
                    }
                    FenceState::Done | FenceState::Failed(_) => {}
                    FenceState::Lost(_) => kept.memory.abandon(),
                }
                some = true;
                // Its memory is another backend's, perhaps, and its drop code too.
                if catch_unwind(AssertUnwindSafe(|| drop(kept))).is_err() {
                    tracing::error!("freeing memory that a device is done with panicked");
                }
            }
            false
        });
        some
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        // Only when the thread ends before its time: nobody will see when these are over.
        self.0.values().flatten().for_each(|kept| kept.memory.abandon());
    }
}

/// The thread: until the reaper is dropped and nothing is kept any more.
fn run(mailbox: &Mailbox, context: &Weak<Context>) {
    let mut kept = Queues::default();
    let mut pause = PAUSE.0;
    loop {
        let mut letters = mailbox.letters();
        if kept.0.is_empty() && letters.new.is_empty() {
            if letters.closed {
                return;
            }
            letters.idle = true;
            drop(mailbox.arrived.wait(letters).unwrap_or_else(PoisonError::into_inner));
            continue;
        }
        let new = std::mem::take(&mut letters.new);
        drop(letters);
        let more = !new.is_empty();
        kept.add(new);
        let some = kept.look(context);
        pause = if more || some { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        if !kept.0.is_empty() {
            std::thread::sleep(pause);
        }
    }
}
