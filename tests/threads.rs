//! Loads and measurements that are called on threads of the caller's own pools, all of which may be busy with them.

mod support;

use std::sync::Barrier;
use std::sync::mpsc::channel;

use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::registry::{LinkTiming, measure_links};
use tensor_offload::{Loader, Registry};

/// A model with adapters, whose larger weights several threads patch together.
fn subject(seed: u64) -> Subject {
    Subject::patched(&llama(1, 256), seed)
}

/// A load whose weights are patched on the host.
fn load(subject: &Subject) {
    let registry = Registry::described(machine(), Clock::Wall);
    let machine = machine();
    let plan = subject.planner(&machine, "cuda:0,400kb;xpu:0,400kb;cpu,*").depth(1).plan().unwrap();
    let model = Loader::new(&registry).load(&subject.weights, &plan).unwrap();
    assert!(model.report().patched > 0);
    subject.check(&model);
}

#[test]
fn a_load_on_the_one_thread_of_a_pool_ends() {
    without_hanging("a load on a pool of one thread".into(), || {
        let subject = subject(140);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        pool.install(|| load(&subject));
        // The thread takes up the second load only when the first has ended.
        pool.install(|| rayon::join(|| load(&subject), || load(&subject)));
    });
}

#[test]
fn loads_on_all_threads_of_the_global_pool_end() {
    without_hanging("a load on each thread of the global pool".into(), || {
        let subject = subject(141);
        let at_once = Barrier::new(rayon::current_num_threads());
        rayon::broadcast(|_| {
            at_once.wait();
            load(&subject);
        });
    });
}

/// Nobody else's thread is needed: the global pool's are all held until the load has ended.
#[test]
fn a_load_beside_a_global_pool_that_is_held_ends() {
    without_hanging("a load beside a pool that is held".into(), || {
        let subject = subject(142);
        let holds: Vec<_> = (0..rayon::current_num_threads())
            .map(|_| {
                let (hold, held) = channel::<()>();
                rayon::spawn(move || _ = held.recv());
                hold
            })
            .collect();
        load(&subject);
        drop(holds);
    });
}

/// The first to ask measures, the others wait for the lock: whoever measures must not take up a task that waits.
#[test]
fn links_are_measured_once_for_all_tasks_of_a_pool() {
    without_hanging("links asked for by the tasks of a pool".into(), || {
        let registry = Registry::described(described(&["cpu=64mb,link=20", "cuda:0=24mb,link=10"]), Clock::Virtual);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        pool.scope(|scope| {
            for _ in 0..32 {
                scope.spawn(|_| assert!(!registry.links().unwrap().links.is_empty()));
            }
        });
        pool.install(|| measure_links(&registry, &LinkTiming::quick())).unwrap();
    });
}
