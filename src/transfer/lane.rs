//! A thread that copies bytes to a device through pinned buffers, where the device's streams cannot wait for the bytes:
//! pageable host memory, files.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arbiter::Arbiter;
use super::device_reads::DeviceReads;
use super::engine::Shared;
use super::landing::{Arriving, Landing};
use crate::backend::{Buf, BufMut, Device, Event, Flight, Piece, Stream, Transfer};
use crate::bytes::ByteSize;
use crate::device::{DeviceId, DeviceKind};
use crate::error::{Error, Result};
use crate::interrupt::{check_interrupt, interruptible};
use crate::staging::{self, Lease};

/// The bytes that a client may be served before the others have their turn.
const QUANTUM: u64 = 16 << 20;

/// The longest interval between two checks of whether an order's destination is free, when a lane has nothing else to do.
const PATIENCE: Duration = Duration::from_micros(500);

/// The most pinned buffers that one order has being filled at one time.
const AHEAD: usize = 3;

/// How long a lane waits for a pinned buffer before it checks whether the order was cancelled.
const SLICE: Duration = Duration::from_millis(20);

/// An order of a client to a lane.
pub(crate) struct Order {
    pub(crate) client: u64,
    pub(crate) dst: BufMut,
    /// The bytes that go to `dst`.
    pub(crate) bytes: Ordered,
    /// Whether the caller waits for it, so that it precedes prefetches.
    pub(crate) urgent: bool,
    /// How long the lane may take once it has begun.
    pub(crate) deadline: Duration,
}

/// The bytes of an order.
#[derive(Default)]
pub(crate) struct Ordered {
    /// Those to copy, in order of their offsets in the destination.
    pub(crate) pieces: Vec<Piece>,
    /// Those to copy into a landing buffer, in rounds, with the values to compute of each round.
    pub(crate) rounds: Vec<Arriving<Vec<Piece>>>,
    /// The landing buffer, if there are rounds.
    pub(crate) landing: Option<Arc<Landing>>,
    /// Where the verdict on codes goes, if any are among them, and the stream of the destination's device that copies it there.
    pub(crate) verdict: Option<(BufMut, Arc<dyn Stream>)>,
}

/// The outcome of an order: its copies are queued, or not all of them.
pub(crate) struct Finished {
    /// The destination, with the events of the copies that were queued. `None` if it is lost.
    pub(crate) memory: Option<Buf>,
    /// The verdict on its codes, on its way to the host.
    pub(crate) verdict: Option<Buf>,
    pub(crate) outcome: Result<()>,
}

/// The client's handle to an order that a lane holds.
pub(crate) struct PendingOrder(Arc<Job>);

/// The state of an order that its client and its lane share.
struct Job {
    bytes: u64,
    deadline: Duration,
    cancelled: AtomicBool,
    state: Mutex<State>,
    finished: Condvar,
}

enum State {
    Waiting(BufMut, Ordered),
    Running,
    Finished(Finished),
    /// The client has taken the outcome.
    Taken,
}

/// The route from one device to another through pinned buffers. It serves all clients in fair turns.
pub(crate) struct StagingLane {
    orders: Arc<Arbiter<Arc<Job>>>,
    reads: Option<Arc<DeviceReads>>,
}

/// A pinned buffer that is being filled with a range of an order's destination.
struct Filling<'p> {
    load: Range<usize>,
    filled: Filled,
    lease: Lease<'p>,
}

enum Filled {
    Here(Buf),
    /// A device's stream fills it.
    Flight(Flight),
}

/// The state of a lane's thread.
struct Worker {
    source: DeviceId,
    to: DeviceId,
    device: Arc<dyn Device>,
    up: Arc<dyn Stream>,
    down: Arc<dyn Stream>,
    shared: Shared,
    /// The reads of the device, where it can read the source's files itself.
    reads: Option<Arc<DeviceReads>>,
}

impl StagingLane {
    /// A lane from `source`, whose stream is `down`, to `device`, whose stream is `up`.
    pub(super) fn start(
        device: Arc<dyn Device>,
        up: Arc<dyn Stream>,
        down: Arc<dyn Stream>,
        source: DeviceId,
        shared: Shared,
    ) -> Result<StagingLane> {
        let arbiter = Arc::new(Arbiter::new(QUANTUM));
        let to = up.device();
        let reads = (source.kind() == DeviceKind::Disk).then(|| DeviceReads::of(&device)).flatten().map(Arc::new);
        let worker = Worker { source, to, device, up, down, shared, reads: reads.clone() };
        let orders = Arc::clone(&arbiter);
        let thread = std::thread::Builder::new().name(format!("{source} to {to}"));
        thread.spawn(move || worker.run(&orders)).map_err(Error::io("start a thread for", source.to_string()))?;
        Ok(StagingLane { orders: arbiter, reads })
    }

    /// The bytes that the device has read itself for all clients, and why it did not read others; `None` if it reads no files.
    pub(crate) fn device_reads(&self) -> Option<(u64, Vec<String>)> {
        self.reads.as_ref().map(|reads| reads.report())
    }

    /// Submits an order. It begins when no earlier use of its destination is pending.
    pub(crate) fn submit(&self, order: Order) -> PendingOrder {
        let Order { client, dst, bytes: ordered, urgent, deadline } = order;
        let bytes = ordered.bytes();
        let (cancelled, finished) = (AtomicBool::new(false), Condvar::new());
        let job =
            Arc::new(Job { bytes, deadline, cancelled, state: Mutex::new(State::Waiting(dst, ordered)), finished });
        if let Err(job) = self.orders.submit(client, bytes, Arc::clone(&job), urgent) {
            job.cancel(0);
        }
        PendingOrder(job)
    }
}

impl Ordered {
    /// The number of bytes that are copied.
    fn bytes(&self) -> u64 {
        let landing = self.rounds.iter().flat_map(|round| &round.copied);
        self.pieces.iter().chain(landing).map(|piece| piece.from.len() as u64).sum()
    }
}

impl Finished {
    fn failed(memory: Option<Buf>, error: Error) -> Finished {
        Finished { memory, verdict: None, outcome: Err(error) }
    }
}

impl Drop for StagingLane {
    fn drop(&mut self) {
        self.orders.close();
    }
}

impl PendingOrder {
    /// An order with this outcome, or one that a lane is still at.
    #[cfg(test)]
    pub(crate) fn in_state(finished: Option<Finished>) -> PendingOrder {
        let state = Mutex::new(finished.map_or(State::Running, State::Finished));
        let (cancelled, finished) = (AtomicBool::new(false), Condvar::new());
        PendingOrder(Arc::new(Job { bytes: 0, deadline: Duration::ZERO, cancelled, state, finished }))
    }

    /// Whether the lane is done with the order.
    pub(crate) fn is_finished(&self) -> bool {
        !matches!(*self.0.state(), State::Waiting(..) | State::Running)
    }

    /// Makes the lane stop after the current copy. An order that waits for its turn ends at once.
    pub(crate) fn cancel(&self) {
        self.0.cancel(self.0.bytes);
    }

    /// Waits until the copies are queued. Returns the destination.
    ///
    /// # Errors
    /// [`Error::TimedOut`]: the lane still holds the destination.
    pub(crate) fn wait(&self, deadline: Duration) -> Result<Finished> {
        let until = Instant::now() + deadline;
        let mut state = self.0.state();
        while matches!(*state, State::Waiting(..) | State::Running) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = format!("the lane to queue {}", ByteSize(self.0.bytes).human());
                return Err(Error::TimedOut { what, after: deadline });
            }
            state = self.0.finished.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match std::mem::replace(&mut *state, State::Taken) {
            State::Finished(finished) => Ok(finished),
            _ => Err(Error::bug("what came of this order was asked for before")),
        }
    }
}

impl Job {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the order can begin: a lane must not hold pinned buffers while it waits for a destination.
    fn can_begin(&self) -> bool {
        match &*self.state() {
            State::Waiting(dst, _) => dst.pending().iter().all(Event::is_complete),
            _ => true,
        }
    }

    /// Starts the order. Returns its destination and bytes, or `None` if it was cancelled.
    fn begin(&self) -> Option<(BufMut, Ordered)> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Running) {
            State::Waiting(dst, ordered) => Some((dst, ordered)),
            other => {
                *state = other;
                None
            }
        }
    }

    /// What fails once the order is cancelled.
    fn check(self: &Arc<Job>) -> impl Fn() -> Result<()> + use<> {
        let job = Arc::clone(self);
        move || if job.cancelled.load(Ordering::Relaxed) { Err(cancelled(job.bytes)) } else { Ok(()) }
    }

    fn finish(&self, finished: Finished) {
        *self.state() = State::Finished(finished);
        self.finished.notify_all();
    }

    fn cancel(&self, of: u64) {
        self.cancelled.store(true, Ordering::Relaxed);
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Waiting(dst, _) => {
                *state = State::Finished(Finished::failed(Some(dst.freeze()), cancelled(of)));
                self.finished.notify_all();
            }
            other => *state = other,
        }
    }
}

fn cancelled(of: u64) -> Error {
    Error::Cancelled { done: ByteSize(0), of: ByteSize(of) }
}

impl Worker {
    /// The thread's loop. It runs until the lane is dropped and its orders are served.
    fn run(&self, orders: &Arbiter<Arc<Job>>) {
        // An order that panics here panics again when it is served, and is reported then.
        let ready = |job: &Arc<Job>| catch_unwind(AssertUnwindSafe(|| job.can_begin())).unwrap_or(true);
        let (from, to) = (self.source, self.to);
        while let Some(job) = orders.next(ready, PATIENCE) {
            let Some((dst, ordered)) = job.begin() else { continue };
            // Whoever sees the order finished has its landing buffer alone.
            let finished = catch_unwind(AssertUnwindSafe(|| {
                let _span = tracing::debug_span!("stage", %from, %to, bytes = job.bytes).entered();
                interruptible(job.check(), || self.serve(&job, dst, ordered))
            }));
            job.finish(finished.unwrap_or_else(|_| {
                let why = "the thread that stages its bytes panicked".to_owned();
                Finished::failed(None, Error::DeviceLost { device: to, why })
            }));
        }
    }

    fn serve(&self, job: &Job, mut dst: BufMut, ordered: Ordered) -> Finished {
        // An earlier failed use of this destination is complete; its bytes are overwritten.
        drop(dst.wait_unused(Duration::ZERO));
        let until = Instant::now() + job.deadline;
        let copied = self.copy(job, until, &ordered.pieces, dst);
        match copied.and_then(|dst| self.unpack(job, until, ordered, dst)) {
            Ok((dst, verdict)) => Finished { memory: Some(dst.freeze()), verdict, outcome: Ok(()) },
            Err((error, memory)) => Finished::failed(memory.map(BufMut::freeze), error),
        }
    }

    /// Stages the rounds of an order into its landing buffer, queues the computation of the values, and has the verdict on codes sent.
    ///
    /// # Errors
    /// The first error, with the destination.
    fn unpack(
        &self,
        job: &Job,
        until: Instant,
        Ordered { rounds, landing, verdict, .. }: Ordered,
        dst: BufMut,
    ) -> Result<(BufMut, Option<Buf>), (Error, Option<BufMut>)> {
        if rounds.is_empty() {
            return Ok((dst, None));
        }
        let Some(landing) = landing else {
            return Err((Error::bug("tensors to unpack, and no landing buffer"), Some(dst)));
        };
        let (place, down) = verdict.unzip();
        let verdict = place.zip(down.as_deref());
        let fill = |pieces: &Vec<Piece>, memory| self.copy(job, until, pieces, memory);
        let passed = landing.pass(&*self.device, &rounds, dst, verdict, fill);
        passed.map_err(|rejected| (rejected.error, Some(rejected.dst)))
    }

    /// Stages pieces, in order of their offsets in the destination. While one buffer is filled from a device, the next are already
    /// asked for, as far as there are buffers. Returns the destination.
    ///
    /// # Errors
    /// The first error, with the destination.
    fn copy(
        &self,
        job: &Job,
        until: Instant,
        pieces: &[Piece],
        mut dst: BufMut,
    ) -> Result<BufMut, (Error, Option<BufMut>)> {
        // First, since a device reads beside its streams, into memory that none of them uses.
        let rest = match self.read_by_device(until, pieces, &mut dst) {
            Ok(rest) => rest,
            Err(error) => return Err((error, Some(dst))),
        };
        let pieces = rest.as_deref().unwrap_or(pieces);
        let begin = pieces.first().map_or(0, |piece| piece.at);
        let end = pieces.last().map_or(0, |piece| piece.at + piece.from.len());
        let each = self.shared.pool.bytes_each();
        let mut begun: VecDeque<Filling<'_>> = VecDeque::new();
        for load in (begin..end).step_by(each.max(1)).map(|at| at..end.min(at + each)) {
            if within(pieces, &load).next().is_none() {
                continue;
            }
            let leased = loop {
                let Some(oldest) = begun.pop_front() else { break self.buffer(job, until) };
                // A lane that holds a buffer waits for no other, since two lanes could wait for each other.
                let spare = (begun.len() + 1 < AHEAD).then(|| self.shared.pool.acquire(Duration::ZERO).ok());
                if let Some(spare) = spare.flatten() {
                    begun.push_front(oldest);
                    break Ok(spare);
                }
                dst = self.send(oldest, until, dst)?;
            };
            match leased.and_then(|leased| self.begin(leased, load, pieces, until)) {
                Ok(filling) if begun.is_empty() && matches!(filling.filled, Filled::Here(_)) => {
                    dst = self.send(filling, until, dst)?;
                }
                Ok(filling) => begun.push_back(filling),
                Err(error) => return Err((error, Some(dst))),
            }
        }
        begun.into_iter().try_fold(dst, |dst, filling| self.send(filling, until, dst))
    }

    /// Has the device read what it can itself. Returns the pieces that are left; `None` if those are all.
    fn read_by_device(&self, until: Instant, pieces: &[Piece], dst: &mut BufMut) -> Result<Option<Vec<Piece>>> {
        let Some(reads) = &self.reads else { return Ok(None) };
        let left = until.saturating_duration_since(Instant::now());
        reads.take(pieces, dst, left, |_| check_interrupt()).map(Some)
    }

    /// Sends on what a pinned buffer is being filled with. Returns the destination.
    ///
    /// # Errors
    /// The first error, with the destination.
    fn send(
        &self,
        Filling { load, filled, lease }: Filling<'_>,
        until: Instant,
        dst: BufMut,
    ) -> Result<BufMut, (Error, Option<BufMut>)> {
        let filled = match filled {
            Filled::Here(filled) => Ok(filled),
            Filled::Flight(flight) => flight.wait(until.saturating_duration_since(Instant::now())).map(BufMut::freeze),
        };
        let filled = match filled {
            Ok(filled) => filled,
            Err(error) => return Err((error, Some(dst))),
        };
        let piece = Piece { src: filled.clone(), from: 0..load.len(), at: load.start };
        match Transfer::new(vec![piece], dst).and_then(|transfer| self.up.send(transfer)) {
            Ok(flight) => {
                lease.give_back(flight.done().clone(), filled);
                Ok(flight.chain())
            }
            Err(rejected) => Err((rejected.error, Some(rejected.dst))),
        }
    }

    /// Leases a pinned buffer, unless the order is cancelled meanwhile.
    fn buffer(&self, job: &Job, until: Instant) -> Result<(BufMut, Lease<'_>)> {
        loop {
            if job.cancelled.load(Ordering::Relaxed) {
                return Err(cancelled(job.bytes));
            }
            match self.shared.pool.acquire(SLICE) {
                Err(Error::TimedOut { what, .. }) if Instant::now() >= until => {
                    return Err(Error::TimedOut { what, after: job.deadline });
                }
                Err(Error::TimedOut { .. }) => {}
                other => return other,
            }
        }
    }

    /// Begins to fill a pinned buffer with the range `load` of the destination: from host memory with several threads, which is
    /// done at once, and from other devices by the source's own stream.
    fn begin<'p>(
        &self,
        (mut buffer, lease): (BufMut, Lease<'p>),
        load: Range<usize>,
        pieces: &[Piece],
        until: Instant,
    ) -> Result<Filling<'p>> {
        let left = || until.saturating_duration_since(Instant::now());
        let (mut on_host, mut elsewhere) = (Vec::new(), Vec::new());
        for piece in within(pieces, &load) {
            let list = if piece.src.host(left())?.is_some() { &mut on_host } else { &mut elsewhere };
            list.push(piece);
        }
        let pairs = gathered(&on_host, buffer.host_mut().ok_or_else(not_host)?)?;
        staging::copy(Some(&self.shared.threads), pairs)?;
        let filled = match elsewhere.is_empty() {
            true => Filled::Here(buffer.freeze()),
            false => Filled::Flight(self.down.send(Transfer::new(elsewhere, buffer)?)?),
        };
        Ok(Filling { load, filled, lease })
    }
}

/// Pairs the bytes of each piece with its range of the buffer `bytes`. The pieces are in host memory, available, and in
/// order of their offsets.
fn gathered<'b>(pieces: &'b [Piece], bytes: &'b mut [u8]) -> Result<Vec<(&'b [u8], &'b mut [u8])>> {
    let (mut rest, mut end) = (bytes, 0);
    let pair = |Piece { src, from, at }: &'b Piece| {
        let (to, after) = std::mem::take(&mut rest)[at - end..].split_at_mut(from.len());
        (rest, end) = (after, at + from.len());
        let bytes = src.host(Duration::ZERO)?.ok_or_else(not_host)?;
        Ok((&bytes[from.clone()], to))
    };
    pieces.iter().map(pair).collect()
}

fn not_host() -> Error {
    Error::bug("memory that the host cannot address, where it copies bytes into a pinned buffer")
}

/// The parts of `pieces` that fall into the range `load` of their destination, with offsets from the start of that range.
fn within<'a>(pieces: &'a [Piece], load: &'a Range<usize>) -> impl Iterator<Item = Piece> + use<'a> {
    let first = pieces.partition_point(|piece| piece.at + piece.from.len() <= load.start);
    let inside = pieces[first..].iter().take_while(|piece| piece.at < load.end);
    inside.filter(|piece| !piece.from.is_empty()).map(|piece| {
        let begin = piece.at.max(load.start);
        let end = (piece.at + piece.from.len()).min(load.end);
        let from = piece.from.start + begin - piece.at..piece.from.start + end - piece.at;
        Piece { src: piece.src.clone(), from, at: begin - load.start }
    })
}

#[cfg(test)]
mod tests;
