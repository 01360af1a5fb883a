//! Cycles of load, stream, derive and unload by eight threads on the host, on simulated devices, on CUDA devices, over the
//! stand-in driver or the one that `TENSOR_OFFLOAD_LIBCUDA` names, and on Vulkan devices: no memory stays, whoever counts it.
//! 300 cycles of each by default; 10,000, with the process's own memory compared, on demand: `cargo test --release --test soak -- --ignored --nocapture`.

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod card;
mod support;
#[cfg(feature = "vulkan")]
mod vulkan_devices;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::cache::{Evict, FreeRequest, Identity};
use tensor_offload::device::MemorySeries;
use tensor_offload::{
    Adapter, ByteSize, Error, Loader, Matching, ModelCache, Plan, Registry, Result, Retention, Streamer, Weights,
};

const THREADS: usize = 8;
const CYCLES: usize = 10_000;
const SOME_CYCLES: usize = 300;
/// How much more memory a process may have after the cycles than before them.
const MOST_GROWN: i64 = 1 << 20;

/// Bytes of this process in memory that no file backs, as the system counts them; none where it does not tell.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

/// How many bytes more the process has afterwards.
fn growth(run: impl FnOnce()) -> i64 {
    let before = resident_bytes();
    run();
    resident_bytes().zip(before).map_or(0, |(now, before)| now as i64 - before as i64)
}

struct Soak<'a> {
    registry: &'a Registry,
    /// A model, and the same with an adapter.
    subjects: &'a [Subject; 2],
    plan: &'a Plan,
    cache: ModelCache,
}

impl Soak<'_> {
    /// One cycle: load or derive, stream, and one of the ways in which memory is freed.
    fn cycle(&self, thread: usize, cycle: usize) -> Result<()> {
        let Soak { registry, subjects, plan, cache } = self;
        let retention = [Retention::Keep, Retention::Unload, Retention::Unload][cycle % 3];
        // Threads replace each other's models.
        let key = format!("model {}", (thread + cycle) % (THREADS / 2));
        let subject = &subjects[cycle / 3 % 2];
        let Subject { weights, .. } = subject;
        let loader = Loader::new(registry).workers(1);
        let model = match cycle % 2 {
            0 => {
                let model = Arc::new(loader.load(weights, plan)?);
                cache.insert(&key, Arc::clone(&model), retention);
                model
            }
            _ => {
                let identity = Identity::of(weights, plan);
                cache.get_or_load(&key, &identity, retention, |base| loader.derive(base, weights, plan))?
            }
        };
        // Another thread may be streaming what this one shares the slots of.
        if let Ok(mut streamer) = Streamer::new(&model) {
            model.layout().layer_ids().try_for_each(|layer| streamer.layer(layer).map(drop))?;
        }
        drop(model);
        match cycle % 8 {
            0 => cache.request_free(FreeRequest { unload_models: true, free_memory: false }),
            1 => cache.request_free(FreeRequest { unload_models: false, free_memory: true }),
            2 => drop(cache.make_room(registry, plan.compute(), 1 << 10, Evict::Kept)?),
            3 => drop(cache.unload_everything()),
            4 => drop(cache.service_requests(registry)?),
            5 => self.make_all_the_room(),
            _ => drop(cache.unload_all()),
        }
        Ok(())
    }

    /// Asks for more than can be had without demotion, or at all.
    fn make_all_the_room(&self) {
        let compute = self.plan.compute();
        let limit = self.registry.device(compute).unwrap().ledger().limit();
        match self.cache.make_room(self.registry, compute, limit, Evict::Demote).map_err(Error::from) {
            Ok(_) | Err(Error::NoRoom(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }

    /// So many cycles, shared by all threads; then nothing is taken any more.
    fn run(&self, cycles: usize) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let next = &next;
                scope.spawn(move || {
                    loop {
                        let cycle = next.fetch_add(1, Ordering::Relaxed);
                        if cycle >= cycles {
                            break;
                        }
                        self.cycle(thread, cycle).unwrap();
                    }
                });
            }
        });
        self.cache.unload_everything();
        self.cache.full_cleanup(self.registry).unwrap();
        comes_back(self.registry);
        self.cache.full_cleanup(self.registry).unwrap();
    }
}

/// Warms up, runs the cycles, and compares the levels. `driver` tells what the driver counts.
fn soak(what: &str, registry: &Registry, allocation: &str, cycles: usize, driver: &dyn Fn() -> Vec<u64>) {
    let tensors = llama(2, 32);
    let plain = Subject::plain(&tensors, 80);
    let adapter = Adapter::from_checkpoint(lora(&tensors[..4], tensor_offload::DType::F32, 2, 81), 1.0).unwrap();
    let weights = Weights::patched(plain.checkpoint().clone(), vec![adapter], Matching::Strict).unwrap();
    let patched = Subject::new(weights);
    let compute = allocation.split(',').next().unwrap().parse().unwrap();
    let plan = plain.planner(registry.machine(), allocation).compute(compute).depth(1).plan().unwrap();
    let subjects = [plain, patched];
    let soak = Soak { registry, subjects: &subjects, plan: &plan, cache: ModelCache::new() };
    soak.run(cycles / 5);
    let mut memory = MemorySeries::new().tolerance(ByteSize(2 << 20));
    memory.push(registry.snapshot("warm-up"));
    let (before, begin) = (driver(), Instant::now());
    let mut grown = vec![growth(|| soak.run(cycles))];
    let (after, seconds) = (driver(), begin.elapsed().as_secs_f64());
    memory.push(registry.snapshot("end"));
    // What is kept for as many threads as there ever were at one time, their stacks and the allocator's areas, goes up with
    // that number and stays. What leaks goes up with the cycles, in each run of them.
    while cycles == CYCLES && grown.len() < 5 && grown.iter().all(|bytes| *bytes > MOST_GROWN) {
        grown.push(growth(|| soak.run(cycles)));
    }
    println!("{what}: {cycles} cycles in {seconds:.1} s, {grown:?} bytes in memory, driver {before:?} -> {after:?}");
    println!("{memory}");
    // Of a device in the host's memory, the driver tells what all programs take.
    let apart = |id| registry.machine().device(id).is_ok_and(|info| info.domain == id);
    assert!(!memory.drifts().iter().any(|drift| apart(drift.device)), "{what}: {memory}");
    assert_eq!(before, after, "{what}: what the driver holds");
    // The process is shared with other tests unless all cycles run.
    let least = grown.iter().min().unwrap();
    assert!(cycles < CYCLES || *least <= MOST_GROWN, "{what}: {grown:?} bytes more after each {cycles} cycles");
}

/// One at a time: they count the memory of the process that they share.
static ALONE: Mutex<()> = Mutex::new(());

fn on_software(cycles: usize) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    soak("host", &Registry::system(), "cpu,*", cycles, &Vec::new);
    let simulated = Registry::described(machine(), Clock::Wall);
    soak("simulated", &simulated, "cuda:0,20kb;xpu:0,10kb;cpu,*", cycles, &Vec::new);
}

#[test]
fn cycles_on_the_host_and_on_simulated_devices() {
    on_software(SOME_CYCLES);
}

#[test]
#[ignore = "a soak, run on demand"]
fn soak_on_the_host_and_on_simulated_devices() {
    on_software(CYCLES);
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
fn on_cuda(cycles: usize) {
    use card::Driver;
    use cuda_standin::{Config, MemoryMode};
    use tensor_offload::backend::{Backend, Cuda, Host};
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut config = Config::with_devices(&[1 << 30]).memory(MemoryMode::Reuse);
    config.check_sources = false;
    let cuda = card::driver(&config);
    let registry = Registry::new([Arc::new(Cuda::new()) as Arc<dyn Backend>, Arc::new(Host::new())]);
    // Bytes on the card, pinned bytes, streams and events, where the driver tells.
    let level = || match &cuda {
        Driver::StandIn(cuda) => {
            let report = cuda.report();
            vec![report.live_bytes, report.live_pinned_bytes, report.live_streams, report.live_events]
        }
        Driver::Named(_) => Vec::new(),
    };
    soak("cuda", &registry, "cuda:0,20kb;cpu,*", cycles, &level);
    drop(registry);
    cuda.assert_clean();
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[test]
fn cycles_on_cuda_devices() {
    on_cuda(SOME_CYCLES);
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[test]
#[ignore = "a soak, run on demand"]
fn soak_on_cuda_devices() {
    on_cuda(CYCLES);
}

#[cfg(feature = "vulkan")]
fn on_vulkan(cycles: usize) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let drivers = vulkan_devices::drivers();
    let registry = drivers.registry();
    // One unused block of each is kept for the next.
    soak("vulkan", &registry, "vulkan:0,20kb;cpu,*", cycles, &Vec::new);
}

#[cfg(feature = "vulkan")]
#[test]
fn vulkan_devices_in_cycles() {
    on_vulkan(SOME_CYCLES);
}

#[cfg(feature = "vulkan")]
#[test]
#[ignore = "a soak, run on demand"]
fn soak_on_vulkan_devices() {
    on_vulkan(CYCLES);
}
