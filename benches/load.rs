//! What a load takes, beside floors of the same run that no load on this machine gets below. Both read the same bytes out
//! of the page cache, with as many threads as a load has, each of which takes the next piece when it is done with one:
//!
//! - into a buffer for each thread that its caches hold, which is what reading alone costs;
//! - into memory like a load's own, of huge pages where the system has them, all of it touched before.
//!
//! After criterion's own figures it prints medians of alternating turns and their ratios, which is what to compare:
//! absolute times move with whatever else the machine does.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensor_offload::backend::{Backend, BufMut, Clock, Host, MemoryKind};
use tensor_offload::checkpoint::{TensorSpec, write_safetensors};
use tensor_offload::{Checkpoint, DType, DeviceId, Loader, Machine, Model, Plan, Planner, Registry, Weights};

/// Layers of two weights of 8 MiB and two norms.
const LAYERS: usize = 16;

/// What a thread of a floor reads at a time: its caches hold it, and the calls' own cost is small beside it.
const PIECE: usize = 256 << 10;

/// Turns that medians are taken of.
const TURNS: usize = 15;

fn checkpoint(folder: &Path) -> PathBuf {
    let path = folder.join("model.safetensors");
    let weight = |layer: usize, name: &str| {
        TensorSpec::new(format!("model.layers.{layer}.{name}.weight"), DType::BF16, [2048, 2048])
    };
    let norm = |layer: usize| TensorSpec::new(format!("model.layers.{layer}.norm.weight"), DType::BF16, [2048]);
    let layers = (0..LAYERS).flat_map(|layer| [weight(layer, "up"), weight(layer, "down"), norm(layer)]);
    let specs: Vec<_> = layers.collect();
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let written = write_safetensors(&path, &specs, &Default::default(), |_, out| {
        while out.left() > 0 {
            let part = block.len().min(out.left() as usize);
            out.put(&block[..part])?;
        }
        Ok(())
    });
    written.expect("a folder that can be written");
    path
}

/// The plainest way to read a file, with memory and threads of its own.
struct Floor<'a> {
    path: &'a Path,
    bytes: usize,
    /// A piece for each thread.
    buffers: Vec<Vec<u8>>,
    /// Memory like a load's, all of it touched.
    whole: BufMut,
}

impl<'a> Floor<'a> {
    fn new(path: &'a Path, bytes: usize, threads: usize) -> Floor<'a> {
        let host = Host::new().open(DeviceId::CPU).expect("this host");
        let mut whole = host.alloc(bytes, MemoryKind::Arena).expect("memory for the file");
        whole.host_mut().expect("host memory").fill(1);
        Floor { path, bytes, buffers: vec![vec![1; PIECE]; threads], whole }
    }

    /// Into each thread's buffer.
    fn read(&mut self) {
        let (path, bytes) = (self.path, self.bytes);
        let pieces = Mutex::new((0..bytes).step_by(PIECE));
        std::thread::scope(|scope| {
            for buffer in &mut self.buffers {
                scope.spawn(|| {
                    let mut file = File::open(path).expect("the file that was written");
                    while let Some(at) = next(&pieces) {
                        fill(&mut file, at, &mut buffer[..PIECE.min(bytes - at)]);
                    }
                });
            }
        });
    }

    /// Into the memory where it stays.
    fn place(&mut self) {
        let path = self.path;
        let whole = self.whole.host_mut().expect("host memory");
        let pieces = Mutex::new(whole.chunks_mut(PIECE).enumerate());
        std::thread::scope(|scope| {
            for _ in &self.buffers {
                scope.spawn(|| {
                    let mut file = File::open(path).expect("the file that was written");
                    while let Some((index, piece)) = next(&pieces) {
                        fill(&mut file, index * PIECE, piece);
                    }
                });
            }
        });
    }
}

fn next<I: Iterator>(pieces: &Mutex<I>) -> Option<I::Item> {
    pieces.lock().expect("no thread panics").next()
}

fn fill(file: &mut File, at: usize, piece: &mut [u8]) {
    file.seek(SeekFrom::Start(at as u64)).expect("a place in the file");
    file.read_exact(piece).expect("as many bytes as the file has");
}

/// The checkpoint and where a load puts it.
struct Load {
    allocation: &'static str,
    devices: Registry,
    plan: Plan,
}

impl Load {
    fn new(weights: &Weights, allocation: &'static str) -> Load {
        let described = ["cpu=1gb", "cuda:0=1gb", "disk=1gb"].map(|text| text.parse().expect("a device"));
        let devices = Registry::described(Machine::described(&described), Clock::Virtual);
        let planner =
            Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse().expect("an allocation"));
        let plan = planner.compute("cuda:0".parse().expect("a device")).plan().expect("a plan that fits");
        Load { allocation, devices, plan }
    }

    fn load(&self, weights: &Weights) -> Model {
        Loader::new(&self.devices).load(weights, &self.plan).expect("a load")
    }
}

fn bench(c: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = checkpoint(folder.path());
    let weights = Weights::new(Checkpoint::open(&path).expect("the checkpoint that was written"));
    let bytes = std::fs::metadata(&path).expect("the file that was written").len();
    // As many as a loader has that is told nothing.
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().min(8));
    let mut floor = Floor::new(&path, bytes as usize, threads);
    let loads = ["cpu,*", "cuda:0,100%", "cuda:0,50%;cpu,50%"].map(|allocation| Load::new(&weights, allocation));

    let mut group = c.benchmark_group("load");
    group.sample_size(10).throughput(Throughput::BytesDecimal(bytes));
    group.bench_function("floor: read", |b| b.iter(|| floor.read()));
    group.bench_function("floor: read into memory that is there", |b| b.iter(|| floor.place()));
    for load in &loads {
        // Memory is given back outside of the time.
        group.bench_function(BenchmarkId::new("load", load.allocation), |b| {
            b.iter_with_large_drop(|| load.load(&weights));
        });
    }
    group.finish();

    if std::env::args().any(|arg| arg == "--bench") {
        let mut times = [const { Vec::new() }; 5];
        for _ in 0..TURNS {
            times[0].push(timed(|| floor.read()));
            times[1].push(timed(|| floor.place()));
            for (load, times) in loads.iter().zip(&mut times[2..]) {
                times.push(timed(|| load.load(&weights)));
            }
        }
        let names = ["floor: read", "floor: read into memory that is there"].into_iter();
        print_ratios(names.chain(loads.iter().map(|load| load.allocation)), &mut times, bytes, threads);
    }
}

/// How long it takes to make something; letting go of that is not counted.
fn timed<T>(make: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let made = make();
    let time = start.elapsed();
    drop(made);
    time
}

fn print_ratios<'a>(names: impl Iterator<Item = &'a str>, times: &mut [Vec<Duration>], bytes: u64, threads: usize) {
    let median = |times: &mut Vec<Duration>| {
        times.sort();
        (times[TURNS / 2].as_secs_f64(), times[0].as_secs_f64())
    };
    let medians: Vec<_> = times.iter_mut().map(median).collect();
    println!("{} MB, medians of {TURNS} turns on {threads} threads:", bytes / 1_000_000);
    for (name, (median, best)) in names.zip(&medians) {
        let (read, place) = (median / medians[0].0, median / medians[1].0);
        println!(
            "  {name:38} {:7.2} ms (best {:.2}), {:5.2} GB/s, {read:.2} and {place:.2} times the floors",
            median * 1e3,
            best * 1e3,
            bytes as f64 / median / 1e9,
        );
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
