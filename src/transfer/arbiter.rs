//! A fair queue: one worker serves the orders of several clients in turns, weighted by their bytes.

use std::collections::VecDeque;
use std::time::Duration;

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Deficit round robin (Shreedhar and Varghese 1995): each client in turn may be served `quantum` more bytes, and keeps
/// unused credit for as long as it has orders. An order that cannot begin yet blocks no other: the orders behind it, of
/// its own client too, go first.
#[derive(Debug)]
pub(super) struct Arbiter<T> {
    quantum: u64,
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    clients: Vec<Client<T>>,
    /// The client whose turn it is, and whether it was granted the quantum of this turn.
    turn: usize,
    granted: bool,
    closed: bool,
}

#[derive(Debug)]
struct Client<T> {
    id: u64,
    /// The bytes that the client may be served before its turn ends.
    credit: u64,
    /// The bytes of each order and the order itself, in order of submission.
    orders: VecDeque<(u64, T)>,
}

impl<T> Arbiter<T> {
    pub(super) fn new(quantum: u64) -> Arbiter<T> {
        let state = State { clients: Vec::new(), turn: 0, granted: false, closed: false };
        Arbiter { quantum: quantum.max(1), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds an order of `bytes`. An urgent one precedes the client's others.
    ///
    /// # Errors
    /// Returns the order if the arbiter is closed.
    pub(super) fn submit(&self, client: u64, bytes: u64, order: T, urgent: bool) -> Result<(), T> {
        let mut state = self.state();
        if state.closed {
            return Err(order);
        }
        let index = state.clients.iter().position(|other| other.id == client).unwrap_or_else(|| {
            state.clients.push(Client { id: client, credit: 0, orders: VecDeque::new() });
            state.clients.len() - 1
        });
        let orders = &mut state.clients[index].orders;
        if urgent {
            orders.push_front((bytes, order));
        } else {
            orders.push_back((bytes, order));
        }
        self.changed.notify_one();
        Ok(())
    }

    /// The next order that `ready` accepts. `None` once the arbiter is closed and empty. While it accepts none, the orders
    /// are checked again, at first after a fraction of `patience`, later every `patience`.
    pub(super) fn next(&self, mut ready: impl FnMut(&T) -> bool, patience: Duration) -> Option<T> {
        let mut state = self.state();
        let mut pause = patience / 16;
        loop {
            if let Some(order) = state.choose(self.quantum, &mut ready) {
                return Some(order);
            }
            if !state.clients.is_empty() {
                state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
                pause = (pause * 2).min(patience);
            } else if state.closed {
                return None;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                pause = patience / 16;
            }
        }
    }

    /// Accepts no more orders. Orders already accepted are still served.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    /// Goes round the clients until one has the credit for an order that can begin.
    fn choose(&mut self, quantum: u64, ready: &mut impl FnMut(&T) -> bool) -> Option<T> {
        let first = |client: &Client<T>, ready: &mut dyn FnMut(&T) -> bool| {
            client.orders.iter().position(|(_, order)| ready(order))
        };
        let can_begin: Vec<Option<usize>> = self.clients.iter().map(|client| first(client, ready)).collect();
        if can_begin.iter().all(Option::is_none) {
            return None;
        }
        loop {
            let turn = self.turn % self.clients.len();
            let client = &mut self.clients[turn];
            if let Some(index) = can_begin[turn] {
                let bytes = client.orders[index].0;
                if !self.granted {
                    client.credit = client.credit.saturating_add(quantum);
                    self.granted = true;
                }
                if client.credit >= bytes {
                    client.credit -= bytes;
                    self.turn = turn;
                    return self.take(turn, index);
                }
            }
            (self.turn, self.granted) = (turn + 1, false);
        }
    }

    /// Removes an order. A client without orders is removed, with its credit.
    fn take(&mut self, client: usize, index: usize) -> Option<T> {
        let order = self.clients[client].orders.remove(index);
        if self.clients[client].orders.is_empty() {
            self.clients.remove(client);
            self.granted = false;
        }
        order.map(|(_, order)| order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every order is served once, and a client's orders in their order. While two clients both have orders, the bytes that
    /// they were served differ by at most twice the largest order and the quantum.
    fn serve(orders: &[(u64, u64)], quantum: u64) {
        let arbiter = Arbiter::new(quantum);
        for (number, &(client, bytes)) in orders.iter().enumerate() {
            arbiter.submit(client, bytes, (client, bytes, number), false).unwrap();
        }
        arbiter.close();
        let largest = orders.iter().map(|order| order.1).max().unwrap_or(0);
        let (mut served, mut last) = ([0u64; 3], [None; 3]);
        let mut left = [0usize; 3];
        orders.iter().for_each(|order| left[order.0 as usize] += 1);
        for _ in orders {
            let busy: Vec<usize> = (0..3).filter(|&client| left[client] > 0).collect();
            for (a, b) in busy.iter().flat_map(|a| busy.iter().map(move |b| (*a, *b))) {
                assert!(served[a].abs_diff(served[b]) <= 2 * (largest + quantum), "{served:?}");
            }
            let (client, bytes, number) = arbiter.next(|_| true, Duration::ZERO).unwrap();
            let client = client as usize;
            assert!(last[client].is_none_or(|last| last < number));
            (served[client], last[client], left[client]) = (served[client] + bytes, Some(number), left[client] - 1);
        }
        assert!(arbiter.next(|_| true, Duration::ZERO).is_none());
    }

    proptest! {
        #[test]
        fn turns_are_fair(orders in prop::collection::vec((0u64..3, 0u64..100), 1..60), quantum in 1u64..200) {
            serve(&orders, quantum);
        }
    }

    #[test]
    fn an_order_that_cannot_begin_holds_up_nobody() {
        let arbiter = Arbiter::new(10);
        for (client, order) in [(1, "a"), (1, "b"), (2, "c")] {
            arbiter.submit(client, 10, order, false).unwrap();
        }
        arbiter.submit(2, 10, "first", true).unwrap();
        let next = |stuck: &[&str]| arbiter.next(|order| !stuck.contains(order), Duration::ZERO).unwrap();
        assert_eq!([next(&["a"]), next(&["a"]), next(&["a"]), next(&[])], ["b", "first", "c", "a"]);
        arbiter.close();
        assert_eq!(arbiter.submit(1, 10, "late", false), Err("late"));
        assert!(arbiter.next(|_| true, Duration::ZERO).is_none());
    }
}
