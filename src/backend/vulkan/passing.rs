//! Time that passes on a stream, in place of a caller's compute: a thread of the host raises a semaphore, which the stream waits
//! for.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::context::{Context, Refusal};
use super::semaphore::{Point, Semaphore};
use super::timeline::Timeline;
use crate::error::{Error, Result};
use crate::limits::LONGEST;

/// The thread that lets time pass on one stream.
pub(super) struct Passing {
    semaphore: Arc<Semaphore>,
    sender: Sender<Time>,
    /// The value that the last time ends with.
    last: u64,
}

/// A time that begins when a stream's work up to a value is done.
struct Time {
    timeline: Arc<Timeline>,
    after: u64,
    time: Duration,
    /// The value of the semaphore that it ends with.
    value: u64,
}

impl Passing {
    pub(super) fn new(context: &Arc<Context>) -> Result<Passing> {
        let semaphore = Semaphore::new(context).map_err(|refusal| context.error(refusal))?;
        let (sender, receiver) = channel();
        let (thread, raised) = (std::thread::Builder::new(), Arc::clone(&semaphore));
        let device = context.id();
        thread
            .name(format!("{device} time"))
            .spawn(move || run(&receiver, &raised))
            .map_err(Error::io("start a thread for", device.to_string()))?;
        Ok(Passing { semaphore, sender, last: 0 })
    }

    /// Lets time pass after the work of `timeline` so far. Returns the point at which it ends.
    pub(super) fn begin(&mut self, timeline: &Arc<Timeline>, time: Duration) -> Result<Point> {
        let context = timeline.context();
        let value = self.last + 1;
        let time = Time { timeline: Arc::clone(timeline), after: timeline.last(), time, value };
        let ended = |_| Error::DeviceLost { device: context.id(), why: "the thread of its time ended".to_owned() };
        self.sender.send(time).map_err(ended)?;
        self.last = value;
        Ok((Arc::clone(&self.semaphore), value))
    }
}

/// The thread's loop. It runs until the stream is dropped and all its times have passed, or the device is lost.
fn run(times: &Receiver<Time>, semaphore: &Semaphore) {
    while let Ok(Time { timeline, after, time, value }) = times.recv() {
        let passed = timeline.wait(after, LONGEST).and_then(|_| {
            std::thread::sleep(time);
            semaphore.signal(value)
        });
        if let Err(refusal @ Refusal::Code(..)) = passed {
            // What waits for it would wait for ever.
            let context = timeline.context();
            context.lose(&context.error(refusal).to_string());
            return;
        }
    }
}
