//! Queues of copies: a thread for each, which does what was queued, in order.

use std::fmt;
use std::slice;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use tensor_offload::backend::{Buf, Event, FenceState, Flight, Joined, MemoryBlock, Piece, Rejected, Stream, Transfer};
use tensor_offload::{DeviceId, Error, Result};

use crate::accelerator::Accelerator;
use crate::memory::Place;
use crate::signal::{Completion, wait_for};

/// A queue of an accelerator.
pub(crate) struct Queue {
    accelerator: Accelerator,
    jobs: Sender<Job>,
}

/// What a queue's thread is told to do.
enum Job {
    /// Wait for an event of another queue, or of another backend.
    Wait(Event),
    /// Do nothing for a time.
    Occupy(Duration),
    /// Wait for what the work needs, do it, and say so.
    Do { waits: Vec<Event>, work: Work, done: Completion },
}

/// Work, and the memory that it keeps: blocks, since a clone of a buffer would be a further owner of it.
enum Work {
    /// From where, to where, how many bytes.
    Copy(Vec<(Place, Place, usize)>),
    /// A point after all earlier work. Until then nobody frees the memory.
    Mark(#[expect(dead_code, reason = "held")] Vec<Arc<MemoryBlock>>),
}

impl Queue {
    pub(crate) fn start(accelerator: Accelerator) -> Result<Queue> {
        accelerator.check()?;
        let (jobs, queued) = channel();
        let (device, its) = (accelerator.id(), accelerator.clone());
        let spawned = thread::Builder::new().name(format!("{device} queue")).spawn(move || run(&queued, &its));
        match spawned {
            Ok(_) => Ok(Queue { accelerator, jobs }),
            Err(source) => Err(Error::Io { path: device.to_string().into(), action: "start a thread for", source }),
        }
    }

    fn send(&self, job: Job) -> Result<()> {
        self.accelerator.check()?;
        let (device, why) = (self.device(), "the thread of a queue ended".to_owned());
        self.jobs.send(job).map_err(|_| Error::DeviceLost { device, why })
    }

    /// Queues work after all earlier work and after `waits`. Returns the event of its end.
    fn enqueue(&self, waits: Vec<Event>, work: Work) -> Result<Event> {
        let (done, event) = Completion::pending(self.device());
        self.send(Job::Do { waits, work, done }).map(|()| event)
    }

    /// The work of a transfer.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the queue does not reach both ends of a piece, or none is its accelerator's own.
    fn resolve(&self, transfer: &Transfer) -> Result<Work> {
        let (stream, dst) = (self.device(), transfer.dst().block());
        let resolved = transfer.pieces().iter().map(|Piece { src, from, at }| {
            let (src, bytes) = (src.block(), from.len());
            let is_own = [src.device(), dst.device()].contains(&stream);
            let ends = Place::of(src, from.clone()).zip(Place::of(dst, *at..*at + bytes)).filter(|_| is_own);
            let unreachable = || Error::Unreachable { stream, from: src.device(), to: dst.device() };
            ends.map(|(from, to)| (from, to, bytes)).ok_or_else(unreachable)
        });
        resolved.collect::<Result<_>>().map(Work::Copy)
    }
}

impl Stream for Queue {
    fn device(&self) -> DeviceId {
        self.accelerator.id()
    }

    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        let queued = self.resolve(&transfer).and_then(|work| self.enqueue(transfer.waits(), work));
        match queued {
            Ok(done) => Ok(transfer.launched(done)),
            Err(error) => Err(transfer.rejected(error)),
        }
    }

    /// A thread can wait for any event. Where a device can only wait for those of its own driver (`Event::downcast` tells them),
    /// the answer for the others is [`Joined::HostMustWait`].
    fn wait(&self, event: &Event) -> Result<Joined> {
        match event.state() {
            FenceState::Done => {}
            FenceState::Pending => self.send(Job::Wait(event.clone()))?,
            FenceState::Failed(cause) | FenceState::Lost(cause) => {
                return Err(Error::Failed { operation: "a copy", cause });
            }
        }
        Ok(Joined::OnDevice)
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        let memory = uses.iter().map(|buf| Arc::clone(buf.block())).collect();
        let event = self.enqueue(Vec::new(), Work::Mark(memory))?;
        uses.iter().for_each(|buf| buf.used_until(event.clone()));
        Ok(event)
    }

    fn occupy(&self, time: Duration) -> Result<()> {
        self.send(Job::Occupy(time))
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("device", &self.device()).finish_non_exhaustive()
    }
}

/// The thread of a queue. It ends when the queue was dropped and all of its work is done.
fn run(jobs: &Receiver<Job>, accelerator: &Accelerator) {
    // Events that failed. The next work fails with them, and the work after it does not: the queue can be used again.
    let mut failed = Vec::new();
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Wait(event) => {
                if wait_for(slice::from_ref(&event)).is_err() {
                    failed.push(event);
                }
            }
            Job::Occupy(time) => thread::sleep(time),
            Job::Do { mut waits, work, done } => {
                waits.append(&mut failed);
                let outcome = wait_for(&waits).and_then(|()| work.run(accelerator));
                // Whoever sees the event finds the memory freed that nobody else has.
                drop((waits, work));
                done.complete(outcome);
            }
        }
    }
}

impl Work {
    /// Does the work, once all that it waits for is done.
    ///
    /// # Errors
    /// The state of work that was not done. Nothing here goes on by itself, so it is over. A driver that cannot tell says
    /// [`FenceState::Lost`], and abandons the memory ([`MemoryBlock::abandon`]).
    fn run(&self, accelerator: &Accelerator) -> Result<(), FenceState> {
        accelerator.check().map_err(|error| FenceState::Failed(Arc::new(error)))?;
        if let Work::Copy(pieces) = self {
            for (from, to, bytes) in pieces {
                // SAFETY: as many bytes are at both places, which keep their memory. What the transfer waits for is over, and its
                // own event, which all others wait for who use these bytes, is pending: nobody writes the source, and nobody else
                // uses the destination. They do not overlap, since a destination has one owner and a source is a buffer that none
                // can write.
                unsafe { from.byte().copy_to_nonoverlapping(to.byte(), *bytes) };
            }
        }
        Ok(())
    }
}
