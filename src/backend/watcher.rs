//! A thread that looks at the events of backends that tell nobody of their end, for those who sleep until then. It runs
//! while there are any.

use std::sync::{Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use super::Event;

/// The shortest and the longest pause between two looks at the events.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

static WATCHED: Mutex<Watched> = Mutex::new(Watched { sleepers: Vec::new(), running: false });

struct Watched {
    sleepers: Vec<(Event, Waker)>,
    /// Whether a thread looks at them.
    running: bool,
}

/// Wakes `waker` soon after `event` has fired or failed.
pub(super) fn watch(event: Event, waker: Waker) {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.sleepers.push((event, waker));
    if !watched.running {
        let thread = std::thread::Builder::new().name("event watcher".to_owned());
        watched.running = thread.spawn(run).is_ok();
    }
    if !watched.running {
        // Without a thread the sleepers ask by themselves.
        watched.sleepers.drain(..).for_each(|(_, waker)| waker.wake());
    }
}

fn run() {
    let mut pause = PAUSE.0;
    loop {
        std::thread::sleep(pause);
        let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
        let over: Vec<_> = watched.sleepers.extract_if(.., |(event, _)| event.settled()).collect();
        watched.running = !watched.sleepers.is_empty();
        let more = watched.running;
        drop(watched);
        pause = if over.is_empty() { (pause * 2).min(PAUSE.1) } else { PAUSE.0 };
        over.into_iter().for_each(|(_, waker)| waker.wake());
        if !more {
            return;
        }
    }
}
