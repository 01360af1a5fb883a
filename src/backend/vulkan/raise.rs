//! Points that the host raises: for time that passes on a stream in place of a caller's compute, and for events that the device
//! cannot wait for. A thread of the host raises a semaphore, which the stream waits for.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::context::{Context, Refusal};
use super::semaphore::{Point, Semaphore};
use super::timeline::Timeline;
use crate::backend::{Event, FenceState};
use crate::error::{Error, Result};
use crate::limits::{LONGEST, WORK};

/// The thread that raises points for one stream, in order.
pub(super) struct Raiser {
    semaphore: Arc<Semaphore>,
    sender: Sender<(u64, Until)>,
    /// The value of the last point.
    last: u64,
}

/// What a point waits for.
enum Until {
    /// A time, which begins when the stream's work up to a value is done.
    Time {
        timeline: Arc<Timeline>,
        after: u64,
        time: Duration,
    },
    Events {
        events: Vec<Event>,
        gate: Arc<Gate>,
    },
}

/// Events that a submission waits for through the host. A semaphore tells nothing of failures, so whatever comes after the point asks
/// here.
#[derive(Default)]
pub(super) struct Gate(OnceLock<FenceState>);

impl Gate {
    /// The state of an event that failed. `None` if none did, or that is not known yet; it is known once the point is reached.
    pub(super) fn failed(&self) -> Option<&FenceState> {
        self.0.get().filter(|state| !matches!(state, FenceState::Done))
    }

    /// Whether all events are known to be done.
    pub(super) fn is_passed(&self) -> bool {
        matches!(self.0.get(), Some(FenceState::Done))
    }

    /// Whether it is not known yet how the events end.
    pub(super) fn is_open(&self) -> bool {
        self.0.get().is_none()
    }
}

impl Raiser {
    pub(super) fn new(context: &Arc<Context>) -> Result<Raiser> {
        let semaphore = Semaphore::new(context).map_err(|refusal| context.error(refusal))?;
        let (sender, receiver) = channel();
        let (thread, raised) = (std::thread::Builder::new(), Arc::clone(&semaphore));
        let device = context.id();
        thread
            .name(format!("{device} time"))
            .spawn(move || run(&receiver, &raised))
            .map_err(Error::io("start a thread for", device.to_string()))?;
        Ok(Raiser { semaphore, sender, last: 0 })
    }

    /// Lets time pass after the work of `timeline` so far. Returns the point at which it ends.
    pub(super) fn after_time(&mut self, timeline: &Arc<Timeline>, time: Duration) -> Result<Point> {
        self.begin(Until::Time { timeline: Arc::clone(timeline), after: timeline.last(), time })
    }

    /// Returns the point at which events are done or failed, and what tells which.
    pub(super) fn after_events(&mut self, events: Vec<Event>) -> Result<(Point, Arc<Gate>)> {
        let gate = Arc::<Gate>::default();
        let point = self.begin(Until::Events { events, gate: Arc::clone(&gate) })?;
        Ok((point, gate))
    }

    fn begin(&mut self, until: Until) -> Result<Point> {
        let value = self.last + 1;
        let device = self.semaphore.context().id();
        let ended = |_| Error::DeviceLost { device, why: "the thread of its time ended".to_owned() };
        self.sender.send((value, until)).map_err(ended)?;
        self.last = value;
        Ok((Arc::clone(&self.semaphore), value))
    }
}

/// The thread's loop. It runs until the stream is dropped and all its points are raised, or the device is lost.
fn run(orders: &Receiver<(u64, Until)>, semaphore: &Semaphore) {
    while let Ok((value, until)) = orders.recv() {
        let waited = match until {
            Until::Time { timeline, after, time } => timeline.wait(after, LONGEST).map(|_| std::thread::sleep(time)),
            Until::Events { events, gate } => {
                let Some(outcome) = outcome_of(&events) else {
                    let why = format!("an event of others is pending after {} seconds", WORK.as_secs());
                    semaphore.context().lose(&why);
                    return;
                };
                let _ = gate.0.set(outcome);
                Ok(())
            }
        };
        if let Err(refusal @ Refusal::Code(..)) = waited.and_then(|()| semaphore.signal(value)) {
            // What waits for it would wait for ever.
            let context = semaphore.context();
            context.lose(&context.error(refusal).to_string());
            return;
        }
    }
}

/// How events end, once none of them is pending: lost if one is, else failed if one is. `None` if one of them does not end.
fn outcome_of(events: &[Event]) -> Option<FenceState> {
    let mut outcome = FenceState::Done;
    for event in events {
        // The error of a wait says less than the state.
        let _ = event.wait(WORK);
        match (event.state(), &outcome) {
            (FenceState::Pending, _) => return None,
            (lost @ FenceState::Lost(_), _) => outcome = lost,
            (failed @ FenceState::Failed(_), FenceState::Done) => outcome = failed,
            _ => {}
        }
    }
    Some(outcome)
}
