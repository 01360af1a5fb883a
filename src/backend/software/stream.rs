//! Streams of software devices: a thread with a queue, or, on a virtual clock, work that is executed immediately.

#![expect(unsafe_code, reason = "copies rely on the events before them, and events on the copies behind them")]

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::decompress::Weights;
use super::dequantise::Values;
use super::fence::{Failure, FenceCompleter, ThreadFence, VirtualFence, lock};
use super::memory;
use super::timeline::{Clock, Timeline};
use crate::backend::process::Process;
use crate::backend::{
    Buf, Decompress, DecompressFlight, Dequantise, Event, FenceState, Flight, Joined, MemoryBlock, Piece, Rejected,
    Stream, Transfer, Undecoded,
};
use crate::device::{Bandwidth, DeviceId, DeviceInfo};
use crate::error::{Error, Result};
use crate::limits::WORK;

/// A stream of one software device.
pub(super) struct SoftwareStream {
    device: DeviceId,
    timeline: Option<Arc<Timeline>>,
    /// The speed at which it decodes, on a clock.
    decoding: Option<Bandwidth>,
    queue: Queue,
    /// The pending events that all later work waits for. If one fails, later work fails.
    after: Mutex<Vec<Event>>,
    /// The process of its thread.
    process: Process,
}

enum Queue {
    Thread(Mutex<Sender<Job>>),
    /// The virtual time at which the work queued so far will be done.
    Virtual(Mutex<Duration>),
}

/// One piece of work for a stream's thread. It keeps the memory that it accesses alive.
struct Job {
    waits: Vec<Event>,
    work: Work,
    /// The memory that must stay alive until the job is done.
    keep: Vec<Arc<MemoryBlock>>,
    done: FenceCompleter,
    /// The time at which it was queued, on a paced stream.
    queued: Duration,
}

enum Work {
    /// Pieces and the destination.
    Copy {
        pieces: Vec<memory::Piece>,
        dst: Arc<MemoryBlock>,
    },
    /// Values of blocks. It takes no time on a clock.
    Dequantise(Values),
    /// Weights of a code, and the time that it takes on a clock.
    Decompress(Weights, Duration),
    Occupy(Duration),
    Nothing,
}

impl SoftwareStream {
    pub(super) fn new(info: &DeviceInfo, timeline: Option<Arc<Timeline>>) -> Result<SoftwareStream> {
        let DeviceInfo { id: device, decoding, .. } = *info;
        let virtual_time = timeline.as_ref().is_some_and(|t| t.clock() == Clock::Virtual);
        let queue = if virtual_time {
            Queue::Virtual(Mutex::default())
        } else {
            let (sender, receiver) = channel();
            let paced_by = timeline.clone();
            let thread = thread::Builder::new().name(format!("{device} stream"));
            thread
                .spawn(move || run(&receiver, device, paced_by.as_deref()))
                .map_err(Error::io("start a thread for", device.to_string()))?;
            Queue::Thread(Mutex::new(sender))
        };
        Ok(SoftwareStream { device, timeline, decoding, queue, after: Mutex::default(), process: Process::current() })
    }

    /// Queues work after all earlier work and the events `waits`. Returns the event of its completion.
    fn enqueue(&self, mut waits: Vec<Event>, work: Work, keep: Vec<Arc<MemoryBlock>>) -> Result<Event> {
        self.process.check()?;
        {
            let mut after = lock(&self.after);
            after.retain(|event| !event.is_complete());
            waits.extend(after.iter().cloned());
        }
        match (&self.queue, &self.timeline) {
            (Queue::Virtual(tail), Some(timeline)) => Ok(perform(&mut lock(tail), &waits, &work, timeline)),
            (Queue::Virtual(_), None) => Err(Error::bug("a virtual stream without a timeline")),
            (Queue::Thread(sender), _) => {
                let done = Arc::new(ThreadFence::new(self.device, self.timeline.is_some()));
                let queued = self.timeline.as_ref().map_or(Duration::ZERO, |timeline| timeline.now());
                let job = Job { waits, work, keep, done: FenceCompleter(Arc::clone(&done)), queued };
                let why = || Error::DeviceLost { device: self.device, why: "its stream's thread ended".to_owned() };
                lock(sender).send(job).map_err(|_| why())?;
                Ok(Event::new(done))
            }
        }
    }
}

impl SoftwareStream {
    /// Queues the computation of values of blocks.
    pub(super) fn dequantise(&self, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        if let Err(error) = memory::copyable(self.device, work.source().block(), work.dst().block()) {
            return Err(work.rejected(error));
        }
        let Some(values) = Values::of(&work) else {
            return Err(work.rejected(Error::bug("values of other types than blocks have")));
        };
        match self.enqueue(work.waits(), Work::Dequantise(values), Vec::new()) {
            Ok(done) => Ok(work.launched_in_order(done)),
            Err(error) => Err(work.rejected(error)),
        }
    }

    /// Queues the decoding of a tensor's code.
    pub(super) fn decompress(&self, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        let (src, dst, verdict) = (work.source().block(), work.dst().block(), work.verdict().block());
        let copyable = |to| memory::copyable(self.device, src, to);
        if let Err(error) = copyable(dst).and_then(|()| copyable(verdict)) {
            return Err(work.rejected(error));
        }
        let time = self.decoding.map_or(Duration::ZERO, |speed| speed.time(work.weights()));
        match self.enqueue(work.waits(), Work::Decompress(Weights::of(&work), time), Vec::new()) {
            Ok(done) => Ok(work.launched_in_order(done)),
            Err(error) => Err(work.rejected(error)),
        }
    }
}

impl Stream for SoftwareStream {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        let dst = transfer.dst().block();
        let mut ends = transfer.pieces().iter().map(|piece| piece.src.block());
        let copyable = |src| memory::copyable(self.device, src, dst);
        if let Err(error) = copyable(dst).and_then(|()| ends.try_for_each(|src| copyable(src))) {
            return Err(transfer.rejected(error));
        }
        let piece = |Piece { src, from, at }: &Piece| (Arc::clone(src.block()), from.clone(), *at);
        let pieces = transfer.pieces().iter().map(piece).collect();
        let dst = Arc::clone(transfer.dst().block());
        match self.enqueue(transfer.waits(), Work::Copy { pieces, dst }, Vec::new()) {
            Ok(done) => Ok(transfer.launched_in_order(done)),
            Err(error) => Err(transfer.rejected(error)),
        }
    }

    fn wait(&self, event: &Event) -> Result<Joined> {
        match event.state() {
            FenceState::Done => {}
            FenceState::Failed(cause) | FenceState::Lost(cause) => {
                return Err(Error::Failed { operation: "a copy", cause });
            }
            FenceState::Pending => {
                self.process.check()?;
                lock(&self.after).push(event.clone());
            }
        }
        Ok(Joined::OnDevice)
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        let keep = uses.iter().map(|buf| Arc::clone(buf.block())).collect();
        let event = self.enqueue(Vec::new(), Work::Nothing, keep)?;
        uses.iter().for_each(|buf| buf.used_until(event.clone()));
        Ok(event)
    }

    fn occupy(&self, time: Duration) -> Result<()> {
        self.enqueue(Vec::new(), Work::Occupy(time), Vec::new()).map(|_| ())
    }
}

impl fmt::Debug for SoftwareStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftwareStream").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The loop of a stream's thread. It runs until the stream is dropped and its queue is empty.
fn run(jobs: &Receiver<Job>, device: DeviceId, timeline: Option<&Timeline>) {
    // The time at which the work so far ended at the links' speeds. Work that begins late only because this thread woke up
    // late is counted from here, so that such delays don't accumulate.
    let mut tail = Duration::ZERO;
    while let Ok(Job { waits, work, keep, done, queued }) = jobs.recv() {
        let outcome = wait_for(&waits, device).and_then(|()| {
            let begin = waits.iter().filter_map(Event::time).fold(queued.max(tail), Duration::max);
            let panicked = || Error::DeviceLost { device, why: "a copy panicked".to_owned() };
            let run = catch_unwind(AssertUnwindSafe(|| work.run(device, timeline, begin)));
            run.unwrap_or_else(|_| Err(panicked())).map_err(Failure::over)
        });
        // The memory is released before the fence completes. It may be another backend's, and so may its drop code.
        if catch_unwind(AssertUnwindSafe(|| drop((waits, work, keep)))).is_err() {
            tracing::error!(%device, "freeing the memory of a copy panicked");
        }
        tail = *outcome.as_ref().unwrap_or(&tail);
        done.0.complete(outcome);
    }
}

/// Waits, on a stream's thread, for the events that its next work needs. After a failed event it still waits for the others:
/// work that fails must not release its destination to the next writer while the destination is being read.
fn wait_for(waits: &[Event], device: DeviceId) -> Result<(), Failure> {
    let pending = !waits.iter().all(Event::is_complete);
    let _span = pending.then(|| tracing::trace_span!("wait", %device, events = waits.len()).entered());
    let outcomes: Vec<Result<()>> = waits.iter().map(|event| event.wait(WORK)).collect();
    outcomes.into_iter().collect::<Result<()>>().map_err(|error| Failure::of(waits, Arc::new(error)))
}

impl Work {
    /// The tracing span of the work.
    fn span(&self, device: DeviceId) -> tracing::Span {
        match self {
            Work::Nothing => tracing::Span::none(),
            Work::Occupy(time) => tracing::debug_span!("compute", %device, ?time),
            Work::Dequantise(Values { src, from, dst, .. }) => {
                tracing::debug_span!("dequantise", from = %src.device(), to = %dst.device(), bytes = from.len())
            }
            Work::Decompress(Weights { src, from, dst, .. }, _) => {
                tracing::debug_span!("decompress", from = %src.device(), to = %dst.device(), bytes = from.len())
            }
            Work::Copy { pieces, dst } => {
                let bytes = || pieces.iter().map(|(_, from, _)| from.len()).sum::<usize>();
                let from = || pieces.first().map_or(dst.device(), |(src, ..)| src.device());
                tracing::debug_span!("copy", from = %from(), to = %dst.device(), bytes = bytes())
            }
        }
    }

    /// Does the work on a stream's thread, and returns the time at which it ended. On a paced stream it begins at `begin` and
    /// takes as long as the links need, or as the work itself takes if that is longer.
    fn run(&self, device: DeviceId, timeline: Option<&Timeline>, begin: Duration) -> Result<Duration> {
        let _span = self.span(device).entered();
        let mut end = begin;
        match self {
            Work::Nothing => return Ok(end),
            Work::Occupy(time) => match timeline {
                Some(_) => end += *time,
                None => thread::sleep(*time),
            },
            // SAFETY: the ranges are inside their buffers. The events that the work waits for are complete, and its own event,
            // which all later users wait for, is not.
            Work::Dequantise(values) => unsafe { values.compute() }?,
            Work::Decompress(weights, time) => {
                // SAFETY: as above.
                unsafe { weights.decode() }?;
                end += timeline.map_or(Duration::ZERO, |_| *time);
            }
            Work::Copy { pieces, dst } => {
                for (src, from, _) in pieces {
                    let bytes = from.len() as u64;
                    end = timeline.map_or(end, |timeline| timeline.transfer(origin(src), dst.device(), bytes, end));
                }
                // SAFETY: a transfer's ranges are inside its buffers, which do not overlap. The events that it waits for
                // are complete, and its own event, which all later users wait for, is not.
                unsafe { memory::copy_all(pieces, dst) }?;
                end = timeline.map_or(end, |timeline| timeline.now().max(end));
            }
        }
        if let Some(timeline) = timeline {
            timeline.sleep_until(end);
        }
        Ok(end)
    }
}

/// The device whose link the bytes of a source take: the host's, if it keeps what stays elsewhere.
fn origin(src: &MemoryBlock) -> DeviceId {
    if src.is_kept() { DeviceId::CPU } else { src.device() }
}

/// Does the work immediately and advances `tail`, the end of the stream's work, by the time that it would have taken.
fn perform(tail: &mut Duration, waits: &[Event], work: &Work, timeline: &Arc<Timeline>) -> Event {
    let mut at = (*tail).max(timeline.now());
    let mut failures = Vec::new();
    for event in waits {
        // A virtual fence knows its outcome before its time has come.
        let outcome = match event.downcast::<VirtualFence>() {
            Some(fence) => fence.failed.clone().map_or(Ok(()), Err),
            None => event.wait(WORK).map_err(|error| Failure::of(std::slice::from_ref(event), Arc::new(error))),
        };
        at = at.max(event.time().unwrap_or_default());
        failures.extend(outcome.err());
    }
    let mut failed = Failure::first(failures);
    if failed.is_none() {
        match work {
            Work::Nothing => {}
            Work::Occupy(time) => at += *time,
            Work::Dequantise(values) => {
                // SAFETY: the ranges are inside their buffers. The work that it waits for is complete, and so is this before
                // anyone has its event.
                failed = unsafe { values.compute() }.err().map(Failure::over);
            }
            Work::Decompress(weights, time) => {
                at += *time;
                // SAFETY: as above.
                failed = unsafe { weights.decode() }.err().map(Failure::over);
            }
            Work::Copy { pieces, dst } => {
                for (src, from, _) in pieces {
                    at = timeline.transfer(origin(src), dst.device(), from.len() as u64, at);
                }
                // SAFETY: a transfer's ranges are inside its buffers, which do not overlap. The work that it waits for is
                // complete, and so is this copy before anyone has its event.
                failed = unsafe { memory::copy_all(pieces, dst) }.err().map(Failure::over);
            }
        }
    }
    *tail = at;
    Event::new(Arc::new(VirtualFence { at, failed, timeline: Arc::clone(timeline) }))
}
