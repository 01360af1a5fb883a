//! A thread that polls the events of backends without completion notifications, and wakes the tasks that wait for them. It
//! runs while there are such events.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use super::Event;
use super::process::Process;

/// The shortest and the longest polling interval.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

static WATCHED: Mutex<Watched> = Mutex::new(Watched { waiting: Vec::new(), running: None });

struct Watched {
    waiting: Vec<(Event, Waker)>,
    /// The process in which a thread polls them, if any: a fork has the list but not the thread.
    running: Option<Process>,
}

/// Wakes `waker` soon after `event` is complete or lost.
pub(super) fn watch(event: Event, waker: Waker) {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.waiting.push((event, waker));
    if !watched.running.is_some_and(Process::is_current) {
        let thread = std::thread::Builder::new().name("event watcher".to_owned());
        watched.running = thread.spawn(run).ok().map(|_| Process::current());
    }
    if watched.running.is_none() {
        // Without a thread the tasks poll by themselves.
        let waiting = std::mem::take(&mut watched.waiting);
        drop(watched);
        wake_all(waiting.into_iter().map(|(_, waker)| waker));
    }
}

/// Wakes all of these, even if one panics: a waker is the executor's, and its panic must not keep the others from being
/// woken. The caller must not hold a lock, since a waker may poll immediately.
pub(super) fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    for waker in wakers {
        if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
            tracing::error!("a waker panicked");
        }
    }
}

/// Whether to stop polling an event. A panic of the event counts as completion: its waiters then see the panic.
fn is_over(event: &Event) -> bool {
    catch_unwind(AssertUnwindSafe(|| event.is_complete())).unwrap_or(true)
}

fn run() {
    let mut pause = PAUSE.0;
    loop {
        std::thread::sleep(pause);
        let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
        let over: Vec<_> = watched.waiting.extract_if(.., |(event, _)| is_over(event)).collect();
        let more = !watched.waiting.is_empty();
        watched.running = watched.running.filter(|_| more);
        drop(watched);
        pause = if over.is_empty() { (pause * 2).min(PAUSE.1) } else { PAUSE.0 };
        let (events, wakers): (Vec<_>, Vec<_>) = over.into_iter().unzip();
        wake_all(wakers);
        drop(events);
        if !more {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Instant;

    use super::*;
    use crate::backend::{Fence, FenceState};

    /// A fence that the test completes, and that may panic when it is queried.
    #[derive(Default)]
    struct ManualFence {
        done: AtomicBool,
        panics: bool,
    }

    #[expect(unsafe_code, reason = "a fence's word is trusted")]
    // SAFETY: no work stands behind it.
    unsafe impl Fence for ManualFence {
        fn state(&self) -> FenceState {
            assert!(!self.panics, "an event on purpose");
            if self.done.load(Ordering::Acquire) { FenceState::Done } else { FenceState::Pending }
        }

        fn wait(&self, _deadline: Duration) -> FenceState {
            self.state()
        }
    }

    /// A waker that counts its calls, and may panic.
    #[derive(Default)]
    struct Count {
        woken: AtomicUsize,
        panics: bool,
    }

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(1, Ordering::AcqRel);
            assert!(!self.panics, "a waker on purpose");
        }
    }

    fn woken(count: &Count) -> usize {
        let until = Instant::now() + Duration::from_secs(20);
        while count.woken.load(Ordering::Acquire) == 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        count.woken.load(Ordering::Acquire)
    }

    #[test]
    fn a_panic_of_one_keeps_nobody_from_being_woken() {
        for (bad_event, bad_waker) in [(false, true), (true, false), (true, true)] {
            let [now, later] = [false, false].map(|panics| Arc::new(ManualFence { panics, ..ManualFence::default() }));
            let bad = Arc::new(ManualFence { done: AtomicBool::new(true), panics: bad_event });
            let counts = [bad_waker, false, false].map(|panics| Arc::new(Count { panics, ..Count::default() }));
            for (fence, count) in [&bad, &now, &later].into_iter().zip(&counts) {
                watch(Event::new(Arc::clone(fence) as Arc<dyn Fence>), Waker::from(Arc::clone(count)));
            }
            now.done.store(true, Ordering::Release);
            assert_eq!([woken(&counts[0]), woken(&counts[1])], [1, 1], "with the bad one");
            later.done.store(true, Ordering::Release);
            assert_eq!(woken(&counts[2]), 1, "after the bad one");
        }
    }

    /// A waker that polls immediately and registers again.
    struct Again(AtomicUsize);

    impl Wake for Again {
        fn wake(self: Arc<Self>) {
            if self.0.fetch_add(1, Ordering::AcqRel) < 3 {
                let fence = ManualFence { done: AtomicBool::new(true), panics: false };
                watch(Event::new(Arc::new(fence)), Waker::from(Arc::clone(&self)));
            }
        }
    }

    #[test]
    fn a_waker_may_sleep_again() {
        let again = Arc::new(Again(AtomicUsize::new(0)));
        Waker::from(Arc::clone(&again)).wake();
        let until = Instant::now() + Duration::from_secs(20);
        while again.0.load(Ordering::Acquire) < 4 {
            assert!(Instant::now() < until, "woken {} times", again.0.load(Ordering::Acquire));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
