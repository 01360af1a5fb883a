//! What benches of reading have in common: a checkpoint, the plainest ways to copy and to read it, and turns.

#![allow(dead_code, reason = "each bench uses its part")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tensor_offload::backend::{Backend, BufMut, Host, MemoryKind};
use tensor_offload::checkpoint::{TensorSpec, TensorWriter, write_compressed, write_safetensors};
use tensor_offload::{DType, DeviceId};

/// Turns that medians are taken of.
pub(crate) const TURNS: usize = 5;

/// What a thread copies at a time.
pub(crate) const PIECE: usize = 1 << 20;

/// What one direct read takes.
pub(crate) const DIRECT: usize = 16 << 20;

/// Layers of a model of a transformer: weights of 8 to 24 MiB, and vectors of some KiB.
fn tensors(bytes: u64) -> Vec<TensorSpec> {
    const SHAPES: [(&str, &[u64]); 7] = [
        ("attn.qkv.weight", &[6144, 2048]),
        ("attn.out.weight", &[2048, 2048]),
        ("attn.norm.weight", &[2048]),
        ("mlp.up.weight", &[4096, 2048]),
        ("mlp.up.bias", &[4096]),
        ("mlp.down.weight", &[2048, 4096]),
        ("mlp.norm.weight", &[2048]),
    ];
    let of_layer = |layer: u64| {
        SHAPES.map(|(name, shape)| TensorSpec::new(format!("model.layers.{layer}.{name}"), DType::BF16, shape.to_vec()))
    };
    let layer_bytes: u64 = SHAPES.iter().map(|(_, shape)| 2 * shape.iter().product::<u64>()).sum();
    (0..(bytes / layer_bytes).max(1)).flat_map(of_layer).collect()
}

/// Such a model in a file.
pub(crate) fn checkpoint(folder: &Path, bytes: u64) -> PathBuf {
    let path = folder.join("model.safetensors");
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let written = write_safetensors(&path, &tensors(bytes), &Default::default(), |_, out| repeat(&block, out));
    written.expect("a folder that can be written");
    path
}

/// The same with about normally distributed weights, in a compressed file.
pub(crate) fn compressed(folder: &Path, bytes: u64) -> PathBuf {
    let path = folder.join("compressed.safetensors");
    let mut state = 1u64;
    let mut weight = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let sum: i32 = (state >> 16).to_le_bytes()[..6].iter().map(|byte| i32::from(*byte)).sum();
        half::bf16::from_f32((sum - 765) as f32 / 16_384.0)
    };
    let block: Vec<u8> = (0..1 << 20).flat_map(|_| weight().to_le_bytes()).collect();
    let written = write_compressed(&path, &tensors(bytes), &Default::default(), |_, out| repeat(&block, out));
    written.expect("a folder that can be written");
    path
}

/// Fills a tensor with a block, again and again.
fn repeat(block: &[u8], out: &mut TensorWriter<'_>) -> tensor_offload::Result<()> {
    while out.left() > 0 {
        let part = block.len().min(out.left() as usize);
        out.put(&block[..part])?;
    }
    Ok(())
}

/// The plainest ways to copy and to read, with memory and threads of their own.
pub(crate) struct Floors<'a> {
    path: &'a Path,
    bytes: usize,
    threads: usize,
    /// Memory like a load's, all of it touched; none if nothing is copied.
    memory: Option<(BufMut, BufMut)>,
    /// A buffer for each thread.
    ring: Vec<BufMut>,
}

impl<'a> Floors<'a> {
    pub(crate) fn new(path: &'a Path, bytes: usize, threads: usize) -> Floors<'a> {
        let memory = Some((touched(bytes), touched(bytes)));
        Floors { memory, ..Floors::of_reads(path, bytes, threads) }
    }

    /// Those that only read.
    pub(crate) fn of_reads(path: &'a Path, bytes: usize, threads: usize) -> Floors<'a> {
        Floors { path, bytes, threads, memory: None, ring: (0..threads).map(|_| touched(DIRECT)).collect() }
    }

    /// Copies as many bytes as the file has.
    pub(crate) fn copy(&mut self) {
        let (from, to) = self.memory.as_mut().expect("floors that copy");
        let from = &*from.host_mut().expect("host memory");
        let to = to.host_mut().expect("host memory");
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
    pub(crate) fn read(&mut self, way: Way, threads: usize) {
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

pub(crate) fn next<I: Iterator>(pieces: &Mutex<I>) -> Option<I::Item> {
    pieces.lock().expect("no thread panics").next()
}

/// Host memory like a load's, all of it touched.
fn touched(bytes: usize) -> BufMut {
    let host = Host::new().open(DeviceId::CPU).expect("this host");
    let mut memory = host.alloc(bytes, MemoryKind::Arena).expect("memory for the file");
    memory.host_mut().expect("host memory").fill(1);
    memory
}

/// How a floor reads.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Way {
    Plain,
    Direct,
    DontCache,
}

impl Way {
    pub(crate) fn open(self, path: &Path) -> File {
        let mut options = File::options();
        #[cfg(target_os = "linux")]
        if self == Way::Direct {
            std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_DIRECT);
        }
        options.read(true).open(path).expect("the file that was written")
    }

    /// Reads at least `needed` bytes of a piece that may go beyond the file's end.
    #[cfg(target_os = "linux")]
    pub(crate) fn read(self, file: &File, at: usize, piece: &mut [u8], needed: usize) {
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
    pub(crate) fn read(self, file: &File, at: usize, piece: &mut [u8], needed: usize) {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = file;
        file.seek(SeekFrom::Start(at as u64)).expect("a place in the file");
        file.read_exact(&mut piece[..needed]).expect("as many bytes as the file has");
    }
}

/// Drops the file's pages from the page cache, and returns how many are left.
#[cfg(target_os = "linux")]
pub(crate) fn evict(path: &Path) -> u64 {
    use std::os::fd::AsRawFd;
    let file = File::open(path).expect("the file that was written");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
    let (range, mut counts) = ([0u64; 2], [0u64; 5]);
    // SAFETY: cachestat reads two numbers and writes five.
    let asked = unsafe { libc::syscall(451, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0) };
    if asked == 0 { counts[0] } else { u64::MAX }
}

/// How long it takes to make something; letting go of that is not counted.
pub(crate) fn timed<T>(make: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    let made = make();
    let time = start.elapsed();
    drop(made);
    time
}

/// The times of things that take turns.
pub(crate) struct Turns {
    title: &'static str,
    bytes: u64,
    times: Vec<(&'static str, Vec<Duration>)>,
}

impl Turns {
    pub(crate) fn new(title: &'static str, bytes: u64) -> Turns {
        Turns { title, bytes, times: Vec::new() }
    }

    /// Has all take their turns, each time in another order: what comes after something that freed memory finds it free.
    pub(crate) fn take(&mut self, before: &mut dyn FnMut(), all: &[(&'static str, &dyn Fn() -> Duration)]) {
        all.iter().for_each(|(name, _)| self.times.push((name, Vec::new())));
        for turn in 0..TURNS {
            for index in 0..all.len() {
                let index = if turn % 2 == 0 { index } else { all.len() - 1 - index };
                let index = (index + turn * 3) % all.len();
                before();
                let time = all[index].1();
                self.times[index].1.push(time);
            }
        }
    }

    /// Prints medians, and the speed of each as a part of the fastest floor's.
    pub(crate) fn print(mut self) {
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
