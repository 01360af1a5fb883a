//! A blocking pool: at most a fixed number of items are created, and the one released first is acquired first.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The idle items, and the number of items in all.
#[derive(Debug)]
pub(super) struct BlockingPool<T> {
    state: Mutex<State<T>>,
    released: Condvar,
}

#[derive(Debug)]
struct State<T> {
    capacity: usize,
    created: usize,
    idle: VecDeque<T>,
}

/// The outcome of [`BlockingPool::acquire`].
#[derive(Debug)]
pub(super) enum Acquired<T> {
    /// The item that was released first.
    Oldest(T),
    /// Permission to create one more item. A caller that cannot create it calls [`BlockingPool::discard`].
    MayCreate,
}

impl<T> BlockingPool<T> {
    pub(super) fn new(capacity: usize) -> BlockingPool<T> {
        let state = Mutex::new(State { capacity, created: 0, idle: VecDeque::new() });
        BlockingPool { state, released: Condvar::new() }
    }

    /// Returns an item, or permission to create one. `None` if no item is released within `deadline`.
    pub(super) fn acquire(&self, deadline: Duration) -> Option<Acquired<T>> {
        let until = Instant::now() + deadline;
        let mut state = self.state();
        loop {
            if state.created < state.capacity {
                state.created += 1;
                return Some(Acquired::MayCreate);
            }
            if let Some(item) = state.idle.pop_front() {
                return Some(Acquired::Oldest(item));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.released.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns an item to the pool.
    pub(super) fn release(&self, item: T) {
        self.state().idle.push_back(item);
        self.released.notify_one();
    }

    /// Forgets an acquired item that will not be released. Another may be created in its place.
    pub(super) fn discard(&self) {
        self.state().created -= 1;
        self.released.notify_one();
    }

    /// Gives up a permission to create an item, and lowers the capacity to the items that exist, so that no more are
    /// created. Returns false and changes nothing if no other item exists.
    pub(super) fn stop_growing(&self) -> bool {
        let mut state = self.state();
        if state.created <= 1 {
            return false;
        }
        state.created -= 1;
        state.capacity = state.created;
        true
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
