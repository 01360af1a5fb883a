//! Merging LoRA into a bf16 weight of [4096, 4096], beside what it is to be measured by in the same run: a copy of the
//! weight, and the plain way in passes (lift the whole weight, add the product, round it) in f32 memory made before,
//! compiled for the baseline instruction set as a loop of one's own would be. Then the same for a model of a billion
//! parameters in 64 such weights.
//!
//! After criterion's own figures it prints medians of alternating turns and their ratios, which is what to compare:
//! absolute times move with whatever else the machine does. Then, for several ranks, the floor: the weight's bytes read and
//! written once at the pace of a copy by all threads, and the products at the rate of a loop that only multiplies and adds.
//! With TORCH_PYTHON naming a Python that has torch, turns of torch alternate with these: the weight as f32 in memory made
//! before, `addmm_` into that, and back.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "calling a function of an instruction set is unsafe; the processor is asked before")
)]

use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use half::bf16;
use rayon::prelude::*;
use tensor_offload::adapter::{Adapter, Matching, Patches};
use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::{Checkpoint, DType, TensorId};

const SIZE: usize = 4096;

/// The weights of the model of a billion parameters: 64 * 4096 * 4096 = 1.07e9.
const WEIGHTS: usize = 64;

fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

fn adapter(rank: usize, seed: u32) -> Checkpoint {
    let (up, down) = (noise(SIZE * rank, seed), noise(rank * SIZE, seed + 1));
    let length = up.len() * 4;
    let header = format!(
        r#"{{"w.lora_up.weight":{{"dtype":"F32","shape":[{SIZE},{rank}],"data_offsets":[0,{length}]}},"w.lora_down.weight":{{"dtype":"F32","shape":[{rank},{SIZE}],"data_offsets":[{length},{}]}}}}"#,
        2 * length
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(up.iter().chain(&down).flat_map(|v| v.to_le_bytes()));
    Checkpoint::from_bytes("bench", bytes).expect("a valid file")
}

fn patches(adapters: &[(usize, u32)]) -> Patches {
    let shape = [SIZE as u64; 2];
    let weight = TensorInfo::new("w.weight", DType::BF16, &shape, 0, 0).expect("a countable shape");
    let open = |&(rank, seed): &(usize, u32)| Adapter::from_checkpoint(adapter(rank, seed), 0.8).expect("a LoRA");
    let adapters = adapters.iter().map(open).collect();
    Patches::resolve(&Layout::new(vec![weight]), adapters, Matching::Strict).expect("it fits")
}

/// Whole passes in f32 memory that exists already: lift, add the product row by row, round.
fn in_passes(bytes: &mut [u8], lifted: &mut [f32], up: &[f32], down: &[f32], rank: usize) {
    let raw = bytes.as_chunks::<2>().0;
    lifted.par_iter_mut().zip(raw.par_iter()).for_each(|(value, raw)| *value = bf16::from_le_bytes(*raw).to_f32());
    lifted.par_chunks_mut(SIZE).zip(up.par_chunks(rank)).for_each(|(row, up)| {
        for (k, up) in up.iter().enumerate() {
            let scaled = 0.8 * up;
            row.iter_mut().zip(&down[k * SIZE..]).for_each(|(value, down)| *value += scaled * down);
        }
    });
    let raw = bytes.as_chunks_mut::<2>().0;
    raw.par_iter_mut().zip(lifted.par_iter()).for_each(|(raw, value)| *raw = bf16::from_f32(*value).to_le_bytes());
}

/// One way to spend time on the weight.
type Work<'a> = (&'static str, Box<dyn FnMut(&mut [u8]) + 'a>);

fn works(weight: &[u8]) -> Vec<Work<'_>> {
    let merge = |adapters: &[(usize, u32)]| {
        let patches = patches(adapters);
        move |bytes: &mut [u8]| {
            patches.tensor(TensorId::new(0)).expect("the weight is patched").apply(bytes, &[]).expect("it applies");
        }
    };
    let passes = |rank: usize| {
        let (up, down, mut lifted) = (noise(SIZE * rank, 3), noise(rank * SIZE, 4), vec![0.0; SIZE * SIZE]);
        move |bytes: &mut [u8]| in_passes(bytes, &mut lifted, &up, &down, rank)
    };
    vec![
        ("memcpy", Box::new(|bytes| bytes.copy_from_slice(weight))),
        ("rank16", Box::new(merge(&[(16, 3)]))),
        ("rank64", Box::new(merge(&[(64, 3)]))),
        ("rank16_twice", Box::new(merge(&[(16, 3), (16, 5)]))),
        ("passes_rank16", Box::new(passes(16))),
        ("passes_rank64", Box::new(passes(64))),
    ]
}

fn bench(criterion: &mut Criterion) {
    let weight: Vec<u8> = noise(SIZE * SIZE, 1).iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    let mut works = works(&weight);
    let mut bytes = weight.clone();
    let mut group = criterion.benchmark_group("lora_bf16_4096");
    group.sample_size(20);
    for (name, work) in &mut works {
        group.bench_function(*name, |b| b.iter(|| work(black_box(&mut bytes))));
    }
    group.finish();
    if std::env::args().any(|arg| arg == "--bench") {
        print_ratios("a weight", &mut works, &mut bytes, 15);
        // Every weight has bytes of its own, so that none comes out of a cache; the adapters' factors are alike.
        let mut model = weight.repeat(WEIGHTS);
        let mut works = over_all(works);
        print_ratios("a model of 1.07 billion parameters", &mut works, &mut model, 3);
        drop((works, model));
        print_floors(&weight, &mut bytes);
    }
}

/// The ranks that are measured beside their floor.
const RANKS: [usize; 6] = [4, 8, 16, 32, 64, 128];

fn print_floors(weight: &[u8], bytes: &mut [u8]) {
    const TURNS: usize = 15;
    let mut torch = Torch::start();
    let rate = multiply_add_rate();
    println!("a weight and its floor, medians of {TURNS} turns; {:.0} G multiply-adds a second:", rate / 1e9);
    for rank in RANKS {
        let patches = patches(&[(rank, 3)]);
        let patch = patches.tensor(TensorId::new(0)).expect("the weight is patched");
        let (mut copies, mut merges, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..TURNS {
            let start = Instant::now();
            let pieces = bytes.par_chunks_mut(1 << 18).zip(weight.par_chunks(1 << 18));
            pieces.for_each(|(to, from)| to.copy_from_slice(from));
            copies.push(start.elapsed().as_secs_f64() * 1e3);
            let start = Instant::now();
            patch.apply(black_box(bytes), &[]).expect("it applies");
            merges.push(start.elapsed().as_secs_f64() * 1e3);
            theirs.extend(torch.as_mut().map(|torch| torch.merge(rank)));
        }
        let (copy, merge) = (median(copies), median(merges));
        let products = (SIZE * SIZE * rank) as f64 / rate * 1e3;
        let torch = if theirs.is_empty() { String::new() } else { beside(median(theirs), merge) };
        println!("  rank {rank:3} {merge:6.2} ms; bytes {copy:5.2} ms, products {products:5.2} ms{torch}");
    }
}

fn beside(theirs: f64, ours: f64) -> String {
    format!("; torch {theirs:6.2} ms, {:.2} x as long", theirs / ours)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Fused multiply-adds of f32 a second, of all threads together.
fn multiply_add_rate() -> f64 {
    const TIMES: usize = 4_000_000;
    let rates = (0..9).map(|_| {
        let start = Instant::now();
        let done: usize = rayon::broadcast(|_| multiply_add(TIMES)).into_iter().sum();
        done as f64 / start.elapsed().as_secs_f64()
    });
    rates.fold(0.0, f64::max)
}

/// Multiplies and adds in twelve independent vectors, `times` each. Returns how many values that were.
#[cfg(target_arch = "x86_64")]
fn multiply_add(times: usize) -> usize {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};

    #[target_feature(enable = "avx512f")]
    fn wide(times: usize) -> usize {
        let (mut sums, one) = ([_mm512_set1_ps(0.5); 12], _mm512_set1_ps(black_box(0.5)));
        (0..times).for_each(|_| sums.iter_mut().for_each(|sum| *sum = _mm512_fmadd_ps(*sum, one, one)));
        black_box(sums);
        times * 12 * 16
    }

    #[target_feature(enable = "avx2,fma")]
    fn narrow(times: usize) -> usize {
        let (mut sums, one) = ([_mm256_set1_ps(0.5); 12], _mm256_set1_ps(black_box(0.5)));
        (0..times).for_each(|_| sums.iter_mut().for_each(|sum| *sum = _mm256_fmadd_ps(*sum, one, one)));
        black_box(sums);
        times * 12 * 8
    }

    if cfg!(not(at_most_avx2)) && is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has it.
        unsafe { wide(times) }
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: as above.
        unsafe { narrow(times) }
    } else {
        plain_multiply_add(times)
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_add(times: usize) -> usize {
    plain_multiply_add(times)
}

fn plain_multiply_add(times: usize) -> usize {
    let (mut sums, one) = ([0.5f32; 48], black_box(0.5f32));
    (0..times).for_each(|_| sums.iter_mut().for_each(|sum| *sum = sum.mul_add(one, one)));
    black_box(sums);
    times * 48
}

/// A Python with torch, which merges when it is told to.
struct Torch(Child, BufReader<std::process::ChildStdout>);

/// For each line, a rank, it merges once and writes the milliseconds.
const TORCH: &str = "
import sys, time, torch
size = int(sys.argv[1])
weight = torch.rand(size, size).sub(0.5).to(torch.bfloat16)
lifted = torch.empty(size, size)
factors = {int(rank): (torch.rand(size, int(rank)), torch.rand(int(rank), size)) for rank in sys.argv[2:]}
print('torch', torch.__version__, 'on', torch.get_num_threads(), 'threads,', torch.backends.cpu.get_cpu_capability(), flush=True)
for line in sys.stdin:
    up, down = factors[int(line)]
    start = time.perf_counter()
    lifted.copy_(weight)
    lifted.addmm_(up, down, alpha=0.8)
    weight.copy_(lifted)
    print((time.perf_counter() - start) * 1e3, flush=True)
";

impl Torch {
    fn start() -> Option<Torch> {
        let Some(python) = std::env::var_os("TORCH_PYTHON") else {
            println!("TORCH_PYTHON names no Python with torch, so there is nothing to compare with");
            return None;
        };
        let mut command = Command::new(python);
        command.args(["-c", TORCH, &SIZE.to_string()]).args(RANKS.map(|rank| rank.to_string()));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("TORCH_PYTHON runs");
        let answers = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut torch = Torch(child, answers);
        println!("{}", torch.answer());
        for rank in RANKS {
            torch.merge(rank);
        }
        Some(torch)
    }

    /// Milliseconds of one merge.
    fn merge(&mut self, rank: usize) -> f64 {
        writeln!(self.0.stdin.as_mut().expect("it is piped"), "{rank}").expect("torch runs");
        let time = self.answer().parse().expect("a number of milliseconds");
        // Its threads wait busily for more work before they sleep.
        std::thread::sleep(Duration::from_millis(20));
        time
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).expect("torch runs");
        line.trim().to_owned()
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The same work on each weight of a model, one after the other.
fn over_all(works: Vec<Work<'_>>) -> Vec<Work<'_>> {
    fn over<'a>((name, mut work): Work<'a>) -> Work<'a> {
        (name, Box::new(move |model| model.chunks_mut(2 * SIZE * SIZE).for_each(&mut work)))
    }
    works.into_iter().map(over).collect()
}

/// Turns of all works one after the other, so that all see the same machine.
fn print_ratios(what: &str, works: &mut [Work<'_>], bytes: &mut [u8], turns: usize) {
    let mut times = vec![Vec::new(); works.len()];
    for _ in 0..turns {
        for ((_, work), times) in works.iter_mut().zip(&mut times) {
            let start = Instant::now();
            work(black_box(bytes));
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    let medians: Vec<f64> = times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            times[turns / 2]
        })
        .collect();
    println!("{what}, medians of {turns} turns on {} threads:", rayon::current_num_threads());
    for ((name, _), (median, times)) in works.iter().zip(medians.iter().zip(&times)) {
        println!("  {name:14} {median:7.2} ms (best {:.2}), {:5.2} x memcpy", times[0], median / medians[0]);
    }
    for (merge, passes) in [(1, 4), (2, 5)] {
        println!("  {} takes {:.2} of {}", works[merge].0, medians[merge] / medians[passes], works[passes].0);
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
