//! The queues between streamers and the threads of staging lanes, as they are in the library, over loom's locks in place of
//! the system's: loom runs each model in every order in which its threads can interleave.

#![allow(dead_code, reason = "a model uses its part of a queue")]

#[path = "../../src/transfer/arbiter.rs"]
mod arbiter;
#[path = "../../src/staging/blocking_pool.rs"]
mod blocking_pool;

/// The locks of the library's queues, here loom's.
mod sync {
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(super) use std::sync::PoisonError;
}

use std::time::Duration;

use arbiter::Arbiter;
use blocking_pool::{Acquired, BlockingPool};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// Loom's time does not pass; a wait ends when it is told to.
const LONG: Duration = Duration::from_secs(3600);

/// Two streamers give orders while a lane serves, then the lane is closed: it serves each order once and ends.
fn every_order_is_served_and_the_worker_ends() {
    let arbiter = Arc::new(Arbiter::new(1));
    let worker = {
        let arbiter = Arc::clone(&arbiter);
        thread::spawn(move || {
            let mut served = Vec::new();
            while let Some(order) = arbiter.next(|_| true, LONG) {
                served.push(order);
            }
            served
        })
    };
    let client = |client: u64| {
        let arbiter = Arc::clone(&arbiter);
        thread::spawn(move || arbiter.submit(client, 1, client, client == 2).expect("not closed"))
    };
    let clients = [client(1), client(2)];
    clients.into_iter().for_each(|client| client.join().expect("no panic"));
    arbiter.close();
    let mut served = worker.join().expect("no panic");
    served.sort_unstable();
    assert_eq!(served, [1, 2]);
}

/// A lane is closed while a streamer gives an order: it is served or given back, never lost.
fn an_order_at_the_end_is_served_or_given_back() {
    let arbiter = Arc::new(Arbiter::new(1));
    let client = {
        let arbiter = Arc::clone(&arbiter);
        thread::spawn(move || arbiter.submit(1, 1, "order", false))
    };
    let closing = {
        let arbiter = Arc::clone(&arbiter);
        thread::spawn(move || arbiter.close())
    };
    let served = arbiter.next(|_| true, LONG);
    let given_back = client.join().expect("no panic").is_err();
    closing.join().expect("no panic");
    assert_eq!(served.is_some(), !given_back);
}

/// Two lanes take turns with one buffer: never both have it, and each gets it in the end.
fn a_buffer_is_lent_to_one_at_a_time() {
    let pool = Arc::new(BlockingPool::new(1));
    let (leased, created) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let lane = || {
        let (pool, leased, created) = (Arc::clone(&pool), Arc::clone(&leased), Arc::clone(&created));
        thread::spawn(move || {
            let buffer = match pool.acquire(LONG).expect("it comes back") {
                Acquired::Oldest(buffer) => buffer,
                Acquired::MayCreate => created.fetch_add(1, Ordering::Relaxed),
            };
            assert_eq!(leased.fetch_add(1, Ordering::SeqCst), 0, "leased twice");
            leased.fetch_sub(1, Ordering::SeqCst);
            pool.release(buffer);
        })
    };
    let lanes = [lane(), lane()];
    lanes.into_iter().for_each(|lane| lane.join().expect("no panic"));
    assert_eq!(created.load(Ordering::Relaxed), 1);
}

/// A buffer is lost with a copy that failed: whoever waits for it may make another.
fn a_lost_buffer_is_replaced() {
    let pool = Arc::new(BlockingPool::<usize>::new(1));
    let lane = || {
        let pool = Arc::clone(&pool);
        thread::spawn(move || {
            assert!(matches!(pool.acquire(LONG), Some(Acquired::MayCreate)));
            pool.discard();
        })
    };
    let lanes = [lane(), lane()];
    lanes.into_iter().for_each(|lane| lane.join().expect("no panic"));
}

fn main() {
    let models: [(&str, fn()); 4] = [
        ("every_order_is_served_and_the_worker_ends", every_order_is_served_and_the_worker_ends),
        ("an_order_at_the_end_is_served_or_given_back", an_order_at_the_end_is_served_or_given_back),
        ("a_buffer_is_lent_to_one_at_a_time", a_buffer_is_lent_to_one_at_a_time),
        ("a_lost_buffer_is_replaced", a_lost_buffer_is_replaced),
    ];
    for (name, model) in models {
        loom::model(model);
        println!("model {name} ... ok");
    }
}
