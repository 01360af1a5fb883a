//! Thousands of cycles of load, stream and unload by eight threads on the host, on simulated devices and on CUDA devices
//! over the stand-in driver: no memory stays, whoever counts it. Only on demand:
//! `cargo test --release --test soak -- --ignored --nocapture`.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::{Evict, FreeRequest, Loader, ModelCache, Plan, Registry, Result, Retention, Streamer};

const THREADS: usize = 8;
const CYCLES: usize = 10_000;
/// Fewer: the stand-in keeps the stacks of all streams' threads, and 10,000 cycles reach the limit of mappings.
const CUDA_CYCLES: usize = 1_000;

/// Bytes of this process in memory that no file backs, as the system counts them; none where it does not tell.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

struct Soak<'a> {
    registry: &'a Registry,
    subject: &'a Subject,
    plan: &'a Plan,
    cache: ModelCache,
}

impl Soak<'_> {
    /// One cycle: load, stream, and one of the ways in which memory is freed.
    fn cycle(&self, thread: usize, cycle: usize) -> Result<()> {
        let Soak { registry, subject, plan, cache } = self;
        let model = Arc::new(Loader::new(registry).workers(1).load(&subject.checkpoint, &subject.patches, plan)?);
        let retention = [Retention::Keep, Retention::Unload, Retention::Unload][cycle % 3];
        // Threads replace each other's models.
        cache.insert(format!("model {}", (thread + cycle) % (THREADS / 2)), Arc::clone(&model), retention);
        let mut streamer = Streamer::new(&model)?;
        (0..model.layout().layers.len()).try_for_each(|layer| streamer.layer(layer).map(drop))?;
        drop((streamer, model));
        match cycle % 8 {
            0 => cache.request_free(FreeRequest { unload_models: true, free_memory: false }),
            1 => cache.request_free(FreeRequest { unload_models: false, free_memory: true }),
            2 => drop(cache.make_room(registry, plan.compute(), 1 << 10, Evict::Kept)?),
            3 => drop(cache.unload_everything()),
            4 => drop(cache.service_requests(registry)?),
            _ => drop(cache.unload_all()),
        }
        Ok(())
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
    let subject = Subject::plain(&llama(2, 32), 80);
    let compute = if allocation == "cpu,*" { CPU } else { GPU0 };
    let planner = subject.planner(registry.machine(), allocation).compute(compute).depth(1);
    let plan = planner.plan().unwrap();
    let soak = Soak { registry, subject: &subject, plan: &plan, cache: ModelCache::new() };
    soak.run(cycles / 10);
    let (warm, before, begin) = (resident_bytes(), driver(), Instant::now());
    soak.run(cycles);
    let (now, after, seconds) = (resident_bytes(), driver(), begin.elapsed().as_secs_f64());
    let grown = now.zip(warm).map_or(0, |(now, warm)| now as i64 - warm as i64);
    println!("{what}: {cycles} cycles in {seconds:.1} s, {grown:+} bytes in memory, driver {before:?} -> {after:?}");
    assert_eq!(before, after, "{what}: what the driver holds");
    // The stand-in driver keeps the threads of all streams, and what it knows of them, until its session ends.
    let counted = driver().is_empty();
    assert!(!counted || grown <= 1 << 20, "{what}: {grown} bytes more than after {} cycles", cycles / 10);
}

#[test]
#[ignore = "a soak, run on demand"]
fn soak_on_the_host_and_on_simulated_devices() {
    soak("host", &Registry::system(), "cpu,*", CYCLES, &Vec::new);
    let simulated = Registry::described(machine(), Clock::Wall);
    soak("simulated", &simulated, "cuda:0,20kb;xpu:0,10kb;cpu,*", CYCLES, &Vec::new);
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[test]
#[ignore = "a soak, run on demand"]
fn soak_on_cuda_devices() {
    use cuda_standin::{Config, MemoryMode, session};
    use tensor_offload::backend::{Backend, Cuda, Host};
    let mut config = Config::with_devices(&[1 << 30]).memory(MemoryMode::Reuse);
    config.check_sources = false;
    let cuda = session(&config);
    let registry = Registry::new([Arc::new(Cuda::new()) as Arc<dyn Backend>, Arc::new(Host::new())]);
    // Bytes on the card, pinned bytes, streams and events.
    let level = || {
        let report = cuda.report();
        vec![report.live_bytes, report.live_pinned_bytes, report.live_streams, report.live_events]
    };
    soak("cuda", &registry, "cuda:0,20kb;cpu,*", CUDA_CYCLES, &level);
    drop(registry);
    let until = Instant::now() + DEADLINE;
    while !cuda.report().is_clean() && Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    cuda.report().assert_clean();
}
