//! Keeps what the device still uses, and lets it go once an event says so.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::context::Context;
use super::driver::Driver;
use crate::backend::{Allocation, Event, FenceState};
use crate::error::{Error, Result};

/// The shortest and the longest pause between two looks at the events.
const PAUSE: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(2));

/// What to keep, until when, and what a trace shows until then.
struct Kept {
    event: Event,
    memory: Memory,
    _span: tracing::Span,
}

/// Memory that queued work uses: of a plain copy its two ends, which are kept without a list.
pub(super) enum Memory {
    Ends([Arc<Allocation>; 2]),
    All(Vec<Arc<Allocation>>),
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
    pub(super) fn start(context: &Arc<Context>, driver: &Arc<Driver>) -> Result<Reaper> {
        let device = context.id();
        let (mailbox, driver) = (Arc::<Mailbox>::default(), Arc::clone(driver));
        // What is kept holds the context; the thread itself must not keep the device open.
        let (theirs, context) = (Arc::clone(&mailbox), Arc::downgrade(context));
        let watch = move || {
            driver.leave_captures();
            run(&theirs, &context);
        };
        let thread = std::thread::Builder::new().name(format!("{device} reaper"));
        thread.spawn(watch).map_err(Error::io("start a thread for", device.to_string()))?;
        Ok(Reaper(mailbox))
    }

    /// Keeps `memory`, and `span` open, until `event` has fired or failed.
    pub(super) fn keep(&self, event: Event, memory: Memory, span: tracing::Span) {
        let mut letters = self.0.letters();
        letters.new.push(Kept { event, memory, _span: span });
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

/// The thread: until the reaper is dropped and nothing is kept any more.
fn run(mailbox: &Mailbox, context: &Weak<Context>) {
    let mut kept: Vec<Kept> = Vec::new();
    let mut pause = PAUSE.0;
    loop {
        let mut letters = mailbox.letters();
        if kept.is_empty() && letters.new.is_empty() {
            if letters.closed {
                return;
            }
            letters.idle = true;
            drop(mailbox.arrived.wait(letters).unwrap_or_else(PoisonError::into_inner));
            continue;
        }
        let more = !letters.new.is_empty();
        kept.append(&mut letters.new);
        drop(letters);
        let before = kept.len();
        look(&mut kept, context);
        pause = if more || kept.len() < before { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        if !kept.is_empty() {
            std::thread::sleep(pause);
        }
    }
}

/// Lets go of what is over.
fn look(kept: &mut Vec<Kept>, context: &Weak<Context>) {
    let context = context.upgrade();
    // Once for all that is asked here. Where it fails, so does what is asked, and the events say why.
    let _entered = context.as_ref().map(|context| context.enter());
    kept.retain(|Kept { event, memory, .. }| match event.state() {
        FenceState::Pending => true,
        FenceState::Done => false,
        FenceState::Failed(_) => {
            memory.abandon();
            false
        }
    });
}
