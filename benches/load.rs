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

#[path = "support/files.rs"]
mod files;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

#[cfg(target_os = "linux")]
use files::evict;
use files::{Floors, Turns, Way, checkpoint, timed};
use tensor_offload::backend::{Backend, Clock, Contents, Host, Simulated};
use tensor_offload::transfer::{FileSource, MappedSource, Source};
use tensor_offload::{Checkpoint, Loader, Machine, Model, Plan, Planner, Registry, Weights};

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

/// One turn on a file that exists, for `scripts/load-peers`: prints its seconds.
fn turn(what: &str, path: &Path) {
    let bytes = std::fs::metadata(path).expect("the file that is named").len() as usize;
    let load = |opened: tensor_offload::Result<Checkpoint>, allocation: &str| {
        let weights = Weights::new(opened.expect("a checkpoint"));
        let load = Load::new(&weights, allocation);
        timed(|| load.load(&weights))
    };
    let kept = |file: &Path| Ok(Arc::new(FileSource::open(file)?.through_page_cache()) as Arc<dyn Source>);
    let time = match what {
        "load" => load(Checkpoint::open(path), "cpu,*"),
        "kept" => load(Checkpoint::open_with(path, kept), "cpu,*"),
        "ring" => load(Checkpoint::open(path), "cuda:0,100%"),
        "memcpy" => {
            let mut floors = Floors::new(path, bytes, threads());
            timed(|| floors.copy())
        }
        "direct" | "dropped" => {
            let (mut floors, way) =
                (Floors::of_reads(path, bytes, threads()), if what == "direct" { Way::Direct } else { Way::DontCache });
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
    let mut floors = Floors::new(&path, bytes as usize, threads);
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
