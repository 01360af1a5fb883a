//! What a load takes, beside floors of the same run that no load on this machine gets below.
//!
//! Warm, with the file in the page cache, the floor is a copy between two buffers as long as the file, by as many threads as a
//! load has. Loads go into the ring of staging buffers (to a device that keeps no bytes, so nothing but the ring is written),
//! and into fresh memory of the host. A peer reads in the same turns: the crate safetensors over a mapping, with a copy of each
//! tensor.
//!
//! Cold, with nothing of the file in the page cache, the floors are the two plain ways past it: direct reads (`O_DIRECT`), and
//! reads whose pages are dropped at once (`RWF_DONTCACHE`). Before each turn the file's pages are dropped, and the system is
//! asked whether they are gone.
//!
//! It prints medians of alternating turns and their ratios, which is what to compare: absolute times move with whatever else the
//! machine does. With `--bench` the file has 2 GiB, otherwise 48 MiB. It lies in Cargo's folder for temporary files, or in
//! `TENSOR_OFFLOAD_BENCH_DIR`, which must be on the disk that is meant.
#![allow(unsafe_code, reason = "a mapping, and calls of the system that no crate has")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tensor_offload::backend::{Backend, BufMut, Clock, Contents, Host, MemoryKind, Simulated};
use tensor_offload::checkpoint::{TensorSpec, write_safetensors};
use tensor_offload::transfer::{FileSource, MappedSource, Source};
use tensor_offload::{Checkpoint, DType, DeviceId, Loader, Machine, Model, Plan, Planner, Registry, Weights};

/// Turns that medians are taken of.
const TURNS: usize = 5;

/// What a thread copies at a time.
const PIECE: usize = 1 << 20;

/// What one direct read takes.
const DIRECT: usize = 16 << 20;

/// Layers of a model of a transformer: weights of 8 to 24 MiB, and vectors of some KiB.
fn checkpoint(folder: &Path, bytes: u64) -> PathBuf {
    const SHAPES: [(&str, &[u64]); 7] = [
        ("attn.qkv.weight", &[6144, 2048]),
        ("attn.out.weight", &[2048, 2048]),
        ("attn.norm.weight", &[2048]),
        ("mlp.up.weight", &[4096, 2048]),
        ("mlp.up.bias", &[4096]),
        ("mlp.down.weight", &[2048, 4096]),
        ("mlp.norm.weight", &[2048]),
    ];
    let path = folder.join("model.safetensors");
    let of_layer = |layer: u64| {
        SHAPES.map(|(name, shape)| TensorSpec::new(format!("model.layers.{layer}.{name}"), DType::BF16, shape.to_vec()))
    };
    let layer_bytes: u64 = SHAPES.iter().map(|(_, shape)| 2 * shape.iter().product::<u64>()).sum();
    let specs: Vec<_> = (0..(bytes / layer_bytes).max(1)).flat_map(of_layer).collect();
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

/// The plainest ways to copy and to read, with memory and threads of their own.
struct Floors<'a> {
    path: &'a Path,
    bytes: usize,
    threads: usize,
    /// Memory like a load's, all of it touched.
    from: BufMut,
    to: BufMut,
    /// A buffer for each thread.
    ring: Vec<BufMut>,
}

impl<'a> Floors<'a> {
    /// The floors of a file of so many bytes, of which as many are copied as `copied` says.
    fn new(path: &'a Path, bytes: usize, copied: usize, threads: usize) -> Floors<'a> {
        let host = Host::new().open(DeviceId::CPU).expect("this host");
        let touched = |bytes: usize| {
            let mut memory = host.alloc(bytes, MemoryKind::Arena).expect("memory for the file");
            memory.host_mut().expect("host memory").fill(1);
            memory
        };
        let ring = (0..threads).map(|_| touched(DIRECT)).collect();
        Floors { path, bytes, threads, from: touched(copied), to: touched(copied), ring }
    }

    /// Copies as many bytes as the file has.
    fn copy(&mut self) {
        let from = &*self.from.host_mut().expect("host memory");
        let to = self.to.host_mut().expect("host memory");
        let pieces = Mutex::new(from.chunks(PIECE).zip(to.chunks_mut(PIECE)));
        std::thread::scope(|scope| {
            for _ in 0..self.threads {
                scope.spawn(|| {
                    while let Some((from, to)) = next(&pieces) {
                        to.copy_from_slice(from);
                    }
                });
            }
        });
    }

    /// Reads the file into a buffer for each thread, past the page cache or not.
    fn read(&mut self, way: Way, threads: usize) {
        let (path, bytes, at) = (self.path, self.bytes, AtomicUsize::new(0));
        let piece = if way == Way::DontCache { DIRECT / 4 } else { DIRECT };
        std::thread::scope(|scope| {
            for buffer in &mut self.ring[..threads] {
                let at = &at;
                scope.spawn(move || {
                    let (file, buffer) = (way.open(path), buffer.host_mut().expect("host memory"));
                    loop {
                        let at = at.fetch_add(piece, Ordering::Relaxed);
                        if at >= bytes {
                            break;
                        }
                        way.read(&file, at, &mut buffer[..piece], piece.min(bytes - at));
                    }
                });
            }
        });
    }
}

fn next<I: Iterator>(pieces: &Mutex<I>) -> Option<I::Item> {
    pieces.lock().expect("no thread panics").next()
}

/// How a floor reads.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Direct,
    DontCache,
}

impl Way {
    fn open(self, path: &Path) -> File {
        let mut options = File::options();
        #[cfg(target_os = "linux")]
        if self == Way::Direct {
            std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_DIRECT);
        }
        options.read(true).open(path).expect("the file that was written")
    }

    /// Reads at least `needed` bytes of a piece that may go beyond the file's end.
    #[cfg(target_os = "linux")]
    fn read(self, file: &File, at: usize, piece: &mut [u8], needed: usize) {
        use rustix::io::{ReadWriteFlags, preadv2};
        let flags = if self == Way::DontCache { 0x80 } else { 0 };
        let mut done = 0;
        while done < needed {
            let mut slices = [std::io::IoSliceMut::new(&mut piece[done..])];
            let flags = ReadWriteFlags::from_bits_retain(flags);
            match preadv2(file, &mut slices, (at + done) as u64, flags) {
                Ok(0) => panic!("the file was cut short"),
                Ok(read) => done += read,
                Err(error) => panic!("this system cannot read so: {error}"),
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn read(self, file: &File, at: usize, piece: &mut [u8], needed: usize) {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = file;
        file.seek(SeekFrom::Start(at as u64)).expect("a place in the file");
        file.read_exact(&mut piece[..needed]).expect("as many bytes as the file has");
    }
}

/// Drops the file's pages from the page cache, and returns how many are left.
#[cfg(target_os = "linux")]
fn evict(path: &Path) -> u64 {
    use std::os::fd::AsRawFd;
    let file = File::open(path).expect("the file that was written");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
    let (range, mut counts) = ([0u64; 2], [0u64; 5]);
    // SAFETY: cachestat reads two numbers and writes five.
    let asked = unsafe { libc::syscall(451, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0) };
    if asked == 0 { counts[0] } else { u64::MAX }
}

/// Where loads put the checkpoint.
struct Load {
    devices: Registry,
    plan: Plan,
}

impl Load {
    fn new(weights: &Weights, allocation: &str) -> Load {
        let described = ["cpu=64gb", "cuda:0=64gb"].map(|text| text.parse().expect("a device"));
        let card = Simulated::new(Machine::described(&described), Clock::Virtual).contents(Contents::SizesOnly);
        let devices = Registry::new([Arc::new(Host::new()) as Arc<dyn Backend>, Arc::new(card)]);
        let planner =
            Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse().expect("an allocation"));
        let plan = planner.compute("cuda:0".parse().expect("a device")).plan().expect("a plan that fits");
        Load { devices, plan }
    }

    fn load(&self, weights: &Weights) -> Model {
        Loader::new(&self.devices).load(weights, &self.plan).expect("a load")
    }
}

/// The bytes of the crate safetensors' way: the file mapped, and each tensor copied.
fn peer(path: &Path) -> Vec<Vec<u8>> {
    // SAFETY: nobody else has the file.
    let mapped = unsafe { memmap2::Mmap::map(&File::open(path).expect("the file that was written")) };
    let mapped = mapped.expect("a mapping");
    let tensors = safetensors::SafeTensors::deserialize(&mapped).expect("the file that was written");
    tensors.iter().map(|(_, view)| view.data().to_vec()).collect()
}

/// How long it takes to make something; letting go of that is not counted.
fn timed<T>(make: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let made = make();
    let time = start.elapsed();
    drop(made);
    time
}

/// How many bytes more than before the process had resident at the most, while something was made.
#[cfg(target_os = "linux")]
fn peak_of<T>(make: impl FnOnce() -> T) -> i64 {
    let of = |key: &str| {
        let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
        let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("a line of the status");
        line.trim().trim_end_matches(" kB").parse::<i64>().expect("a number") << 10
    };
    std::fs::write("/proc/self/clear_refs", "5").expect("a kernel that counts peaks anew");
    let before = of("VmRSS:");
    drop(make());
    of("VmHWM:") - before
}

/// The times of things that take turns.
struct Turns {
    title: &'static str,
    bytes: u64,
    times: Vec<(&'static str, Vec<Duration>)>,
}

impl Turns {
    fn new(title: &'static str, bytes: u64) -> Turns {
        Turns { title, bytes, times: Vec::new() }
    }

    /// Has all take their turns, each time in another order: what comes after something that freed memory finds it free.
    fn take(&mut self, before: &mut dyn FnMut(), all: &[(&'static str, &dyn Fn() -> Duration)]) {
        all.iter().for_each(|(name, _)| self.times.push((name, Vec::new())));
        for turn in 0..TURNS {
            for index in 0..all.len() {
                // A prime, so that neighbours differ too.
                let index = (index * (1 + 2 * (turn % 2)) + turn * 3) % all.len();
                before();
                let time = all[index].1();
                self.times[index].1.push(time);
            }
        }
    }

    /// Prints medians, and the speed of each as a part of the fastest floor's.
    fn print(mut self) {
        self.times.iter_mut().for_each(|(_, times)| times.sort());
        let median = |times: &Vec<Duration>| times[times.len() / 2].as_secs_f64();
        let floors = self.times.iter().filter(|(name, _)| name.starts_with("floor: "));
        let floor = floors.map(|(_, times)| median(times)).fold(f64::INFINITY, f64::min);
        println!("{}, {} MB, medians of {TURNS} turns:", self.title, self.bytes / 1_000_000);
        for (name, times) in &self.times {
            let (time, best) = (median(times), times[0].as_secs_f64());
            let speed = self.bytes as f64 / time / 1e9;
            println!(
                "  {name:44} {:8.1} ms (best {:8.1}), {speed:6.2} GB/s, {:.2} of the floor",
                time * 1e3,
                best * 1e3,
                floor / time
            );
        }
    }
}

/// One turn on a file that exists, for `scripts/load-peers`: prints its seconds.
fn turn(what: &str, path: &Path) {
    let bytes = std::fs::metadata(path).expect("the file that is named").len() as usize;
    let load = |opened: tensor_offload::Result<Checkpoint>, allocation: &str| {
        let weights = Weights::new(opened.expect("a checkpoint"));
        let load = Load::new(&weights, allocation);
        timed(|| load.load(&weights))
    };
    let kept = |file: &Path| Ok(Arc::new(FileSource::open(file)?.through_page_cache()) as Arc<dyn Source>);
    let floors = |copied: usize| Floors::new(path, bytes, copied, threads());
    let time = match what {
        "load" => load(Checkpoint::open(path), "cpu,*"),
        "kept" => load(Checkpoint::open_with(path, kept), "cpu,*"),
        "ring" => load(Checkpoint::open(path), "cuda:0,100%"),
        "memcpy" => {
            let mut floors = floors(bytes);
            timed(|| floors.copy())
        }
        "direct" | "dropped" => {
            let (mut floors, way) = (floors(0), if what == "direct" { Way::Direct } else { Way::DontCache });
            timed(|| floors.read(way, threads()))
        }
        _ => panic!("no such turn: {what}"),
    };
    println!("{}", time.as_secs_f64());
}

/// As many as a loader has that is told nothing.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().min(8))
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some([_, what, path]) = args.iter().position(|arg| arg == "--turn").and_then(|at| args.get(at..at + 3)) {
        return turn(what, Path::new(path));
    }
    let in_earnest = std::env::args().any(|arg| arg == "--bench");
    let folder = std::env::var_os("TENSOR_OFFLOAD_BENCH_DIR").map_or(env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let folder = tempfile::tempdir_in(folder).expect("a temporary folder");
    let path = checkpoint(folder.path(), if in_earnest { 2 << 30 } else { 48 << 20 });
    File::open(&path).and_then(|file| file.sync_all()).expect("a disk that is written");
    let weights = Weights::new(Checkpoint::open(&path).expect("the checkpoint that was written"));
    let map = |path: &Path| {
        // SAFETY: nobody else has the file.
        let mapped = unsafe { MappedSource::assume_immutable(path) }?;
        Ok(Arc::new(mapped) as Arc<dyn Source>)
    };
    let mapped = Weights::new(Checkpoint::open_with(&path, map).expect("the checkpoint that was written"));
    let bytes = std::fs::metadata(&path).expect("the file that was written").len();
    let threads = threads();
    println!("{threads} threads");
    let mut floors = Floors::new(&path, bytes as usize, bytes as usize, threads);
    let (ring, owned) = (Load::new(&weights, "cuda:0,100%"), Load::new(&weights, "cpu,*"));

    floors.read(Way::Plain, threads);
    let mut warm = Turns::new("warm", bytes);
    let floors = Mutex::new(floors);
    let floor = || floors.lock().expect("no thread panics");
    warm.take(
        &mut || (),
        &[
            ("floor: memcpy", &|| timed(|| floor().copy())),
            ("plain reads into a buffer for each thread", &|| timed(|| floor().read(Way::Plain, threads))),
            ("load into the ring", &|| timed(|| ring.load(&weights))),
            ("load into the ring, from a mapping", &|| timed(|| ring.load(&mapped))),
            ("load into fresh memory", &|| timed(|| owned.load(&weights))),
            ("load into fresh memory, from a mapping", &|| timed(|| owned.load(&mapped))),
            ("peer: safetensors, mapped, copied", &|| timed(|| peer(&path))),
        ],
    );
    warm.print();

    #[cfg(target_os = "linux")]
    {
        drop(mapped);
        let mut left = 0;
        let mut cold = Turns::new("cold", bytes);
        cold.take(
            &mut || left = evict(&path).max(left),
            &[
                ("floor: direct reads", &|| timed(|| floor().read(Way::Direct, threads))),
                ("floor: direct reads by one thread", &|| timed(|| floor().read(Way::Direct, 1))),
                ("floor: reads whose pages are dropped", &|| timed(|| floor().read(Way::DontCache, threads))),
                ("load into the ring", &|| timed(|| ring.load(&weights))),
                ("load into fresh memory", &|| timed(|| owned.load(&weights))),
            ],
        );
        cold.print();
        println!("  at most {left} pages of the file were in the page cache before a turn");
        drop(floors);
        for (name, load, planned) in [("the ring", &ring, 0), ("fresh memory", &owned, bytes)] {
            for state in ["cold", "warm"] {
                if state == "cold" {
                    evict(&path);
                } else {
                    std::fs::read(&path).expect("the file that was written");
                }
                let beyond = peak_of(|| load.load(&weights)) - planned as i64;
                println!(
                    "peak of the process beyond the plan, {state} into {name}: {:.1} MiB",
                    beyond as f64 / 1048576.0
                );
            }
        }
    }
}
