//! A few things that are lent in turn: at most so many are made, and the one given back first is lent first.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The things that are not lent, and how many there are in all.
#[derive(Debug)]
pub(super) struct Rota<T> {
    state: Mutex<State<T>>,
    returned: Condvar,
}

#[derive(Debug)]
struct State<T> {
    most: usize,
    made: usize,
    waiting: VecDeque<T>,
}

/// What [`Rota::take`] gives.
#[derive(Debug)]
pub(super) enum Taken<T> {
    /// The thing that was given back first.
    Oldest(T),
    /// Leave to make one more; whoever cannot says [`Rota::lost`].
    Another,
}

impl<T> Rota<T> {
    pub(super) fn new(most: usize) -> Rota<T> {
        let state = Mutex::new(State { most, made: 0, waiting: VecDeque::new() });
        Rota { state, returned: Condvar::new() }
    }

    /// A thing, or leave to make one; none when nothing comes back within `deadline`.
    pub(super) fn take(&self, deadline: Duration) -> Option<Taken<T>> {
        let until = Instant::now() + deadline;
        let mut state = self.state();
        loop {
            if state.made < state.most {
                state.made += 1;
                return Some(Taken::Another);
            }
            if let Some(thing) = state.waiting.pop_front() {
                return Some(Taken::Oldest(thing));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.returned.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes a thing back.
    pub(super) fn give(&self, thing: T) {
        self.state().waiting.push_back(thing);
        self.returned.notify_one();
    }

    /// A thing that was lent will not come back; another may be made in its place.
    pub(super) fn lost(&self) {
        self.state().made -= 1;
        self.returned.notify_one();
    }

    /// Another one that was to be made could not be: those that there are will do, and no more are made. Not so where there
    /// are none: then it is as if nobody had tried.
    pub(super) fn no_more(&self) -> bool {
        let mut state = self.state();
        if state.made <= 1 {
            return false;
        }
        state.made -= 1;
        state.most = state.made;
        true
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
