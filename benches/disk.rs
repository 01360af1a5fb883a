//! A model that is larger than memory: passes over a disk tier, beside direct reads of the same file in the same run.
//!
//! All of the model is on `disk`, so it stays in its file, and each pass reads it into two slots on the host. The floors are the
//! plainest direct reads (`O_DIRECT`) of as many bytes, by as many threads as there are cores and by one. The alternative is a
//! mapping of the file, from which each layer is copied to a buffer as it would be to a slot. Before each turn the file's pages are
//! dropped from the page cache.
//!
//! The same weights stand in a second file compressed without loss, from which a pass brings two thirds of the bytes and decodes them. It
//! pays where the disk is slower than the processor: `TENSOR_OFFLOAD_BENCH_RATE=1gb` limits reads to so many bytes a second (control
//! groups, version 1, as root).
//!
//! With `--bench` the file has 4 GiB and the process puts itself under a memory limit of 1 GiB (control groups, version 1 or 2, as
//! root; it says so where it may not), otherwise 48 MiB and no limit. The file lies in Cargo's folder for temporary files, or in
//! `TENSOR_OFFLOAD_BENCH_DIR`, which must be on the disk that is meant.
#![cfg_attr(not(target_os = "linux"), allow(unused, reason = "the page cache can be dropped on Linux alone"))]
#![allow(unsafe_code, reason = "a mapping, and calls of the system that no crate has")]

#[path = "support/files.rs"]
mod files;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use files::{Floors, Turns, Way, checkpoint, timed};
use tensor_offload::checkpoint::Layout;
use tensor_offload::{Checkpoint, DeviceId, Loader, Planner, Registry, Streamer, Weights};

/// The memory limit.
const LIMIT: u64 = 1 << 30;

/// Puts this process under a memory limit. The group is removed when it is empty, by whoever comes next.
fn limited(bytes: u64) -> Result<(), String> {
    let process = std::process::id().to_string();
    let put =
        |file: PathBuf, text: &str| std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()));
    let (root, limit) = match Path::new("/sys/fs/cgroup/memory").is_dir() {
        true => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        false => ("/sys/fs/cgroup", "memory.max"),
    };
    let group = Path::new(root).join(format!("tensor-offload-bench-{process}"));
    std::fs::create_dir(&group).map_err(|error| format!("{}: {error}", group.display()))?;
    put(group.join(limit), &bytes.to_string())?;
    put(group.join("cgroup.procs"), &process)
}

/// Limits this process's reads from the disk of `file`.
#[cfg(target_os = "linux")]
fn slowed(rate: &str, file: &Path) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    let failed = |error: &dyn std::fmt::Display| error.to_string();
    let rate = rate.parse::<tensor_offload::ByteSize>().map_err(|error| failed(&error))?;
    let device = std::fs::metadata(file).map_err(|error| failed(&error))?.dev();
    let group = PathBuf::from(format!("/sys/fs/cgroup/blkio/tensor-offload-bench-{}", std::process::id()));
    std::fs::create_dir(&group).map_err(|error| format!("{}: {error}", group.display()))?;
    let limit = format!("{}:{} {}", rustix::fs::major(device), rustix::fs::minor(device), rate.get());
    let put = |name: &str, text: &str| {
        std::fs::write(group.join(name), text).map_err(|error| format!("{}: {error}", group.join(name).display()))
    };
    put("blkio.throttle.read_bps_device", &limit)?;
    put("cgroup.procs", &std::process::id().to_string())
}

/// A model of which all is on the disk, and its streamer.
fn on_disk(path: &Path, devices: &Registry) -> Streamer {
    let weights = Weights::new(Checkpoint::open(path).expect("the checkpoint that was written"));
    let planner = Planner::new(weights.layout(), devices.machine()).compute(DeviceId::CPU);
    let plan = planner.allocation("disk,*".parse().expect("an allocation")).depth(1).plan().expect("a plan");
    let model = Arc::new(Loader::new(devices).load(&weights, &plan).expect("a load"));
    Streamer::new(&model).expect("a streamer")
}

/// One pass through the model; when its last layer has arrived, all have.
fn pass(streamer: &mut Streamer) {
    for layer in streamer.model().layout().layer_ids() {
        streamer.layer(layer).expect("a layer");
    }
}

/// The ranges of the layers in the file, one after the other.
fn layer_ranges(layout: &Layout) -> Vec<Vec<std::ops::Range<usize>>> {
    let range = |tensor: &tensor_offload::checkpoint::TensorInfo| {
        tensor.offset as usize..(tensor.offset + tensor.bytes) as usize
    };
    let of = |layer| layout.modules_in(layer).flat_map(|module| layout.tensors_in(module.id)).map(range).collect();
    layout.layer_ids().map(of).collect()
}

/// Copies each layer from a mapping of the file to one buffer, with several threads.
fn mapped_pass(path: &Path, layers: &[Vec<std::ops::Range<usize>>], buffer: &mut [u8], threads: usize) {
    // SAFETY: nobody else has the file.
    let mapped = unsafe { memmap2::Mmap::map(&File::open(path).expect("the file that was written")) };
    let mapped = mapped.expect("a mapping");
    // Ignored where the system has no advice.
    #[cfg(unix)]
    let _ = mapped.advise(memmap2::Advice::Sequential);
    for layer in layers {
        let mut rest = &mut *buffer;
        let mut parts = Vec::new();
        for range in layer {
            let (part, after) = rest.split_at_mut(range.len());
            rest = after;
            parts.extend(mapped[range.clone()].chunks(1 << 20).zip(part.chunks_mut(1 << 20)));
        }
        let parts = Mutex::new(parts.into_iter());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some((from, to)) = files::next(&parts) {
                        to.copy_from_slice(from);
                    }
                });
            }
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    let in_earnest = std::env::args().any(|arg| arg == "--bench");
    let folder = std::env::var_os("TENSOR_OFFLOAD_BENCH_DIR").map_or(env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let folder = tempfile::tempdir_in(folder).expect("a temporary folder");
    let size = if in_earnest { 4 << 30 } else { 48 << 20 };
    let (path, compressed) = (checkpoint(folder.path(), size), files::compressed(folder.path(), size));
    let evict = || [&path, &compressed].map(|path| files::evict(path)).into_iter().max().unwrap_or(0);
    for path in [&path, &compressed] {
        File::open(path).and_then(|file| file.sync_all()).expect("a disk that is written");
    }
    evict();
    if let Ok(rate) = std::env::var("TENSOR_OFFLOAD_BENCH_RATE") {
        match slowed(&rate, &path) {
            Ok(()) => println!("reads of at most {rate} a second"),
            Err(why) => println!("reads as fast as they are: {why}"),
        }
    }
    if in_earnest {
        match limited(LIMIT) {
            Ok(()) => println!("under a limit of {} MiB", LIMIT >> 20),
            Err(why) => println!("under no limit: {why}"),
        }
    }
    let bytes = std::fs::metadata(&path).expect("the file that was written").len();
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().min(8));
    println!("{threads} threads");

    let devices = Registry::system();
    let streamer = Mutex::new(on_disk(&path, &devices));
    let of_compressed = Mutex::new(on_disk(&compressed, &devices));
    let layers = layer_ranges(streamer.lock().expect("no thread panics").model().layout());
    let largest = layers.iter().map(|layer| layer.iter().map(|range| range.len()).sum()).max().unwrap_or(0);
    let buffer = Mutex::new(vec![1; largest]);
    let floors = Mutex::new(Floors::of_reads(&path, bytes as usize, threads));
    let floor = || floors.lock().expect("no thread panics");

    let mut left = 0;
    let mut turns = Turns::new("a pass", bytes);
    turns.take(
        &mut || left = evict().max(left),
        &[
            ("floor: direct reads", &|| timed(|| floor().read(Way::Direct, threads))),
            ("floor: direct reads by one thread", &|| timed(|| floor().read(Way::Direct, 1))),
            ("a pass over the disk tier", &|| timed(|| pass(&mut streamer.lock().expect("no thread panics")))),
            ("opened, loaded, and the first pass", &|| timed(|| pass(&mut on_disk(&path, &devices)))),
            ("a pass over a compressed file", &|| timed(|| pass(&mut of_compressed.lock().expect("no thread panics")))),
            ("a pass over a mapping", &|| {
                timed(|| mapped_pass(&path, &layers, &mut buffer.lock().expect("no thread panics"), threads))
            }),
        ],
    );
    turns.print();
    println!("  at most {left} pages of the file were in the page cache before a turn");
    for (what, streamer) in [("the disk tier", &streamer), ("the same, compressed", &of_compressed)] {
        let report = streamer.lock().expect("no thread panics").report().clone();
        println!(
            "  {what}: {report}, {:.3} read of each byte",
            report.read as f64 / report.bytes[&DeviceId::DISK] as f64
        );
    }
    let peak = std::fs::read_to_string("/proc/self/status").expect("/proc");
    peak.lines().filter(|line| line.starts_with("VmHWM")).for_each(|line| println!("  peak of the process: {line}"));
}
