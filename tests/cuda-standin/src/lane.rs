//! A stream's queue and the thread that works it off.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::acl;
use crate::backing::{Backing, RUBBISH};
use crate::code::Code;
use crate::contexts::Fate;
use crate::fault::Spoil;
use crate::hazard::Clock;
use crate::pace::Route;
use crate::ptx_run::Launch;
use crate::shared::Shared;
use crate::sync::lock;
use crate::worker;

/// A place in a backing.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) backing: Arc<Backing>,
    pub(crate) offset: usize,
}

impl Place {
    pub(crate) fn at(&self) -> *mut u8 {
        self.backing.at(self.offset)
    }
}

/// Whether and when a copy's source is fingerprinted, to see whether it changes under the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    Never,
    /// Taken by the call.
    Taken(u64),
    /// Earlier work has yet to write the source: taken when the copy starts.
    AtStart,
}

#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) src: Place,
    pub(crate) dst: Place,
    pub(crate) len: usize,
    pub(crate) route: Route,
    pub(crate) check: Check,
    /// Deliver wrong bytes.
    pub(crate) lie: bool,
}

/// A function of the program that a stream calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCall {
    pub(crate) function: unsafe extern "C" fn(*mut c_void),
    pub(crate) argument: *mut c_void,
}

// SAFETY: whoever hands a host function to the driver promises that another thread may call it with its argument.
unsafe impl Send for HostCall {}

#[derive(Debug)]
pub(crate) enum Work {
    /// Only its place in the order matters, as that of a recorded event.
    Nothing,
    Copy(Copy),
    Fill {
        dst: Place,
        len: usize,
        byte: u8,
    },
    /// Overwrites memory that was freed in the order of the stream.
    Poison {
        backing: Arc<Backing>,
        ranges: Vec<Range<u64>>,
    },
    Kernel(Box<Launch>),
    /// The clock is what the function's caller may learn from it.
    Host(HostCall, Clock),
}

impl Work {
    fn is_trivial(&self) -> bool {
        matches!(self, Work::Nothing)
    }
}

/// A point in a lane.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) lane: Arc<Lane>,
    pub(crate) epoch: u64,
    /// When the work up to here ends in counted time.
    pub(crate) counted: u64,
}

impl Ticket {
    pub(crate) fn is_done(&self) -> bool {
        self.lane.done() >= self.epoch
    }

    /// Waits until the work up to here has run (or the whole driver was reset).
    pub(crate) fn wait(&self) {
        self.lane.wait(self.epoch);
    }

    /// The same, no longer than this; whether it has.
    pub(crate) fn wait_at_most(&self, limit: Duration) -> bool {
        self.lane.wait_at_most(self.epoch, limit)
    }
}

/// The point at which an event was recorded.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) ticket: Ticket,
    pub(crate) clock: Clock,
}

#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) epoch: u64,
    pub(crate) call: &'static str,
    pub(crate) after: Vec<Ticket>,
    pub(crate) work: Work,
    pub(crate) spoil: Spoil,
    pub(crate) enqueued: Instant,
}

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) index: u32,
    pub(crate) device: usize,
    /// That of its context, if that has one.
    pub(crate) fate: Option<Arc<Fate>>,
    inner: Mutex<Inner>,
    /// Signalled when there is something to do for the worker, or to stop for.
    work: Condvar,
    /// Signalled when `done` has grown.
    progress: Condvar,
    done: AtomicU64,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    queue: VecDeque<Op>,
    busy: bool,
    closed: bool,
    worker: Option<std::thread::JoinHandle<()>>,
    /// When the last piece of work ended, on the paced time line.
    time: Instant,
}

impl Lane {
    /// A lane whose work is done up to an epoch.
    pub(crate) fn new(index: u32, device: usize, fate: Option<Arc<Fate>>, done: u64) -> Arc<Lane> {
        let inner = Inner { queue: VecDeque::new(), busy: false, closed: false, worker: None, time: Instant::now() };
        Arc::new(Lane {
            index,
            device,
            fate,
            inner: Mutex::new(inner),
            work: Condvar::new(),
            progress: Condvar::new(),
            done: AtomicU64::new(done),
            stopped: AtomicBool::new(false),
        })
    }

    /// A piece of work has failed: its context's matter, if that has a fate of its own, or its device's.
    pub(crate) fn fail(&self, shared: &Shared, code: Code) {
        match &self.fate {
            Some(fate) if !acl::ends_the_device(code) => fate.fail(code),
            _ => shared.break_device(self.device, code),
        }
    }

    /// The result of all that comes after a failure.
    pub(crate) fn ended(&self, shared: &Shared) -> Option<Code> {
        shared.broken(self.device).or_else(|| self.fate.as_ref().and_then(|fate| fate.ended()))
    }

    /// The work up to here has run.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// When the last piece of work ended.
    pub(crate) fn time(&self) -> Instant {
        lock(&self.inner).time
    }

    /// Adds work. Called in the order of the epochs, under the lock of the driver's state.
    pub(crate) fn submit(self: &Arc<Lane>, op: Op, shared: &Arc<Shared>) {
        let ready = op.work.is_trivial() && op.spoil == Spoil::default() && op.after.iter().all(Ticket::is_done);
        let mut inner = lock(&self.inner);
        if ready && !inner.busy && inner.queue.is_empty() {
            self.done.store(op.epoch, Ordering::Release);
            drop(inner);
            self.progress.notify_all();
            return;
        }
        inner.queue.push_back(op);
        if inner.worker.is_none() {
            let (lane, shared) = (Arc::clone(self), Arc::clone(shared));
            let name = format!("standin-{}", self.index);
            inner.worker = std::thread::Builder::new().name(name).spawn(move || worker::run(&lane, &shared)).ok();
        }
        drop(inner);
        self.work.notify_one();
    }

    /// The next piece of work; none when there will be no more.
    pub(crate) fn next(&self) -> Option<Op> {
        let mut inner = lock(&self.inner);
        loop {
            if self.is_stopped() {
                return None;
            }
            if let Some(op) = inner.queue.pop_front() {
                inner.busy = true;
                return Some(op);
            }
            if inner.closed {
                // Nobody joins the worker of a stream that was destroyed; detached, its stack goes when it ends.
                drop(inner.worker.take());
                return None;
            }
            inner = self.work.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Says that a piece of work ended, at a time on the paced time line.
    pub(crate) fn finish(&self, epoch: u64, time: Instant) {
        let mut inner = lock(&self.inner);
        inner.busy = false;
        inner.time = time;
        self.reach(epoch, inner);
    }

    /// Work up to here is over. A lock and a store, since ThreadSanitizer does not see an atomic maximum.
    fn reach(&self, epoch: u64, inner: MutexGuard<'_, Inner>) {
        if self.done() < epoch {
            self.done.store(epoch, Ordering::Release);
        }
        drop(inner);
        self.progress.notify_all();
    }

    pub(crate) fn wait(&self, epoch: u64) {
        if self.done() >= epoch {
            return;
        }
        let mut inner = lock(&self.inner);
        while self.done() < epoch && (inner.busy || !self.is_stopped()) {
            inner = self.progress.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The same, no longer than this; whether it has run.
    fn wait_at_most(&self, epoch: u64, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut inner = lock(&self.inner);
        while self.done() < epoch && (inner.busy || !self.is_stopped()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            inner = self.progress.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Sleeps until then, unless the lane is stopped.
    pub(crate) fn sleep_until(&self, deadline: Instant) {
        let mut inner = lock(&self.inner);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_stopped() {
                return;
            }
            inner = self.work.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// No more work will come: the worker ends when it has run what is queued.
    pub(crate) fn close(&self) {
        lock(&self.inner).closed = true;
        self.work.notify_all();
    }

    /// Drops what is queued and interrupts what runs.
    pub(crate) fn stop(&self) {
        let mut inner = lock(&self.inner);
        self.stopped.store(true, Ordering::Release);
        inner.queue.clear();
        drop(inner);
        self.work.notify_all();
        self.progress.notify_all();
    }

    /// Lets a stopped lane's work count as over, which will never run.
    pub(crate) fn abandon(&self, epoch: u64) {
        self.stop();
        self.reach(epoch, lock(&self.inner));
    }

    /// Waits for the worker of a stopped lane to end, so that it touches no memory of the program any more.
    pub(crate) fn join(&self, limit: Duration) {
        let Some(worker) = lock(&self.inner).worker.take() else { return };
        let deadline = Instant::now() + limit;
        while !worker.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
        }
        if worker.is_finished() {
            let _ = worker.join();
        }
    }
}

pub(crate) fn poison(backing: &Backing, ranges: &[Range<u64>]) {
    for range in ranges {
        backing.fill(range.start as usize..range.end as usize, RUBBISH);
    }
}
