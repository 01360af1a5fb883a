//! Four threads load, derive, move, stream, demote and unload models at one time, on the host, on simulated devices
//! and on CUDA devices. Every byte that arrives is compared with the merged one, and at the end all memory is back.
//!
//! A fixed number of rounds by default; for so many seconds on each kind of device, with
//! `TENSOR_OFFLOAD_STRESS_SECONDS=N cargo test --test stress -- --nocapture --test-threads 1`. `scripts/sanitize` runs
//! it under the tools that watch memory and threads.

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod card;
mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::*;
use tensor_offload::backend::{Backend, Clock, Host};
use tensor_offload::cache::Evict;
use tensor_offload::{
    Adapter, ByteSize, DType, DeviceId, Error, LayerId, Loader, Matching, Model, ModelCache, Plan, Registry, Result,
    Retention, Streamer, Weights,
};

const THREADS: usize = 4;
/// What each thread does where no time is given.
const ROUNDS: usize = 12;

/// When the threads stop.
enum End {
    Rounds(usize),
    At(Instant),
}

impl End {
    fn of_a_run() -> End {
        match std::env::var("TENSOR_OFFLOAD_STRESS_SECONDS") {
            Ok(seconds) => End::At(Instant::now() + Duration::from_secs(seconds.parse().expect("a number of seconds"))),
            Err(_) => End::Rounds(ROUNDS),
        }
    }

    fn is_after(&self, round: usize) -> bool {
        match self {
            End::Rounds(rounds) => round < *rounds,
            End::At(until) => Instant::now() < *until,
        }
    }
}

/// How often each thing was done.
#[derive(Debug, Default)]
struct Done {
    loaded: AtomicUsize,
    derived: AtomicUsize,
    relocated: AtomicUsize,
    layers: AtomicUsize,
    demoted: AtomicUsize,
    unloaded: AtomicUsize,
}

fn count(counter: &AtomicUsize, more: usize) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// The key of a model: pairs of threads replace each other's models, and make theirs of them.
fn key(thread: usize, turn: usize) -> String {
    format!("{} at strength {}", thread / 2, turn % 2)
}

struct Stress<'a> {
    registry: &'a Registry,
    computes: &'a [DeviceId],
    allocations: &'a [&'a str],
    /// One model with an adapter at two strengths.
    subjects: [Subject; 2],
    cache: ModelCache,
    /// Held by the thread that makes room: several that wait for the room that the others' models take wait in vain.
    makes_room: Mutex<()>,
    done: Done,
}

impl<'a> Stress<'a> {
    fn new(registry: &'a Registry, computes: &'a [DeviceId], allocations: &'a [&'a str]) -> Stress<'a> {
        let tensors = llama(4, 32);
        let subject = |strength| {
            let plain = Subject::plain(&tensors, 90);
            let adapter = Adapter::from_checkpoint(lora(&tensors, DType::F32, 2, 91), strength).unwrap();
            let weights = Weights::patched(plain.checkpoint().clone(), vec![adapter], Matching::Strict).unwrap();
            Subject::new(weights)
        };
        let subjects = [subject(0.5), subject(1.0)];
        Stress {
            registry,
            computes,
            allocations,
            subjects,
            cache: ModelCache::new(),
            makes_room: Mutex::default(),
            done: Done::default(),
        }
    }

    fn plan(&self, subject: &Subject, turn: usize) -> Plan {
        let compute = self.computes[turn % self.computes.len()];
        let planner = subject.planner(self.registry.machine(), self.allocations[turn / 2 % self.allocations.len()]);
        let pinned = [u64::MAX, 0, 20_000][turn % 3];
        planner.compute(compute).depth(1 + turn % 3).pinned_cap(Some(ByteSize(pinned))).plan().unwrap()
    }

    /// A model from its file, from one of the other strength, or from one of the same with another plan.
    fn make(&self, subject: &Subject, plan: &Plan, key: &str, other: &str, round: usize) -> Model {
        let loader = Loader::new(self.registry).workers(2);
        let load = || loader.load(&subject.weights, plan);
        let derive = |base| loader.derive(base, &subject.weights, plan);
        let (model, counter) = match (round % 3, self.cache.get(key), self.cache.get(other)) {
            (1, _, Some(base)) => (derive(&base), &self.done.derived),
            (2, Some(base), _) => (loader.relocate(&base, plan), &self.done.relocated),
            _ => (load(), &self.done.loaded),
        };
        count(counter, 1);
        model.unwrap()
    }

    /// Two passes: one that nothing waits for, and one that looks at every byte.
    fn stream(&self, model: &Arc<Model>, subject: &Subject) {
        let mut streamer = match Streamer::new(model) {
            Ok(streamer) => streamer,
            // Another thread streams a model that this one shares its slots with.
            Err(Error::InUse(_)) => return subject.check(model),
            Err(error) => panic!("{error}"),
        };
        let layers = model.layout().layer_ids();
        for layer in layers.clone().chain([2, 0].map(LayerId::new)) {
            let _guard = streamer.layer(layer).unwrap();
            streamer.compute().occupy(Duration::from_micros(50)).unwrap();
        }
        for layer in layers.clone() {
            check_layer(&streamer.layer(layer).unwrap(), subject).unwrap();
        }
        count(&self.done.layers, 2 * layers.len() + 2);
    }

    /// Asks for a little more than there is on a device, so that a model has to leave it.
    fn demote(&self, compute: DeviceId) -> Result<usize> {
        let Ok(_alone) = self.makes_room.try_lock() else { return Ok(0) };
        let device = self.registry.device(compute)?;
        let free = device.memory()?.available().min(device.ledger().limit() - device.ledger().charged());
        let report = match self.cache.make_room(self.registry, compute, free + 1, Evict::Demote) {
            Ok(report) => report,
            Err(unfinished) if matches!(unfinished.error, Error::NoRoom(_)) => *unfinished.report,
            Err(unfinished) => return Err(unfinished.error),
        };
        count(&self.done.demoted, report.demoted.len());
        count(&self.done.unloaded, report.unloaded.len());
        Ok(report.demoted.len())
    }

    fn round(&self, thread: usize, round: usize) {
        let turn = thread + round;
        let (key, other) = (key(thread, turn), key(thread, turn + 1));
        let subject = &self.subjects[turn % 2];
        let plan = self.plan(subject, turn);
        let model = Arc::new(self.make(subject, &plan, &key, &other, round));
        self.stream(&model, subject);
        let retention = if turn.is_multiple_of(3) { Retention::Unload } else { Retention::Keep };
        self.cache.insert(&key, model, retention);
        match round % 4 {
            1 | 2 if !plan.compute().is_host() => drop(self.demote(plan.compute()).unwrap()),
            3 => drop(self.registry.trim().unwrap()),
            _ => count(&self.done.unloaded, self.cache.unload_all().unloaded.len()),
        }
        if let Some(model) = self.cache.get(&key) {
            // Another thread of the pair may have replaced it, by the same.
            subject.check(&model);
        }
    }

    /// A model that nobody else uses is demoted, and has its bytes.
    fn demote_alone(&self) {
        self.cache.unload_everything();
        comes_back(self.registry);
        let (subject, compute) = (&self.subjects[0], self.computes[0]);
        let planner = subject.planner(self.registry.machine(), &format!("{compute},20kb;cpu,*"));
        let plan = planner.compute(compute).depth(1).plan().unwrap();
        let model = Loader::new(self.registry).workers(2).load(&subject.weights, &plan).unwrap();
        self.cache.insert("alone", Arc::new(model), Retention::Keep);
        assert_eq!(self.demote(compute).unwrap(), 1);
        self.stream(&self.cache.get("alone").unwrap(), subject);
    }

    fn run(&self, what: &str) {
        let (end, rounds) = (End::of_a_run(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (end, rounds) = (&end, &rounds);
                scope.spawn(move || {
                    for round in (0..).take_while(|&round| end.is_after(round)) {
                        self.round(thread, round);
                        count(rounds, 1);
                    }
                    // Who still makes room must not wait for what nobody frees any more.
                    [0, 1].iter().for_each(|&turn| drop(self.cache.unload(&key(thread, turn))));
                });
            }
        });
        println!("{what}: {} rounds, {:?}", rounds.into_inner(), self.done);
    }

    fn give_everything_back(&self) {
        self.cache.unload_everything();
        comes_back(self.registry);
    }
}

#[test]
fn threads_share_a_cache_on_the_host() {
    let registry = Registry::new([Arc::new(Host::new()) as Arc<dyn Backend>]);
    let stress = Stress::new(&registry, &[CPU], &["cpu,*", "disk,30kb;cpu,*", "disk,*"]);
    stress.run("host");
    stress.give_everything_back();
}

#[test]
fn threads_share_a_cache_on_simulated_devices() {
    let registry = Registry::described(machine(), Clock::Wall);
    let allocations =
        ["cuda:0,20kb;cpu,*", "cuda:1,*", "xpu:0,20kb;disk,20kb;cuda:0,10kb;cpu,*", "cpu,*", "cuda:1,20kb;disk,*"];
    let stress = Stress::new(&registry, &[GPU0, GPU1, CPU], &allocations);
    stress.run("simulated");
    stress.demote_alone();
    stress.give_everything_back();
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod cuda {
    use cuda_standin::{Config, MemoryMode};
    use tensor_offload::ByteSize;
    use tensor_offload::backend::Cuda;

    use super::*;

    /// On the first two devices that there are.
    fn stress(what: &str, config: &Config) {
        let driver = card::driver(config);
        let devices = card::devices();
        let computes = &devices[..devices.len().min(2)];
        if computes.is_empty() {
            eprintln!("skipped {what}: the driver has no device");
            return;
        }
        let cuda = Cuda::new().context_size(ByteSize(0));
        let registry = Registry::new([Arc::new(cuda) as Arc<dyn Backend>, Arc::new(Host::new())]);
        let (first, second) = (computes[0], computes[computes.len() - 1]);
        let both = if first == second { format!("{first},*") } else { format!("{first},10kb;{second},20kb;cpu,*") };
        let allocations = [format!("{first},20kb;cpu,*"), format!("{second},*"), both, "cpu,*".to_owned()];
        let allocations: Vec<&str> = allocations.iter().map(String::as_str).collect();
        let stress = Stress::new(&registry, computes, &allocations);
        stress.run(what);
        // A real card counts free memory in pieces that are larger than these models.
        if !card::named() {
            stress.demote_alone();
        }
        stress.give_everything_back();
        drop(stress);
        drop(registry);
        driver.assert_clean();
    }

    #[test]
    fn cuda_threads_share_a_cache_on_devices_that_reach_each_other() {
        let config = Config::with_devices(&[64 << 20, 64 << 20]).all_peers().seed(5).late_micros(100);
        stress("cuda, peers", &config);
    }

    #[test]
    fn cuda_threads_share_a_cache_on_devices_that_do_not() {
        let config = Config::with_devices(&[64 << 20, 64 << 20]).seed(6).memory(MemoryMode::Reuse);
        stress("cuda, no peers", &config);
    }
}
