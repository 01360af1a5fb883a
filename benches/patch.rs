//! Merging LoRA into a bf16 weight of [4096, 4096], beside what it is to be measured by in the same run: a copy of the
//! weight, and the plain way in passes (lift the whole weight, add the product, round it) in f32 memory made before,
//! compiled for the baseline instruction set as a loop of one's own would be. Then the same for a model of a billion
//! parameters in 64 such weights.
//!
//! After criterion's own figures it prints medians of alternating turns and their ratios, which is what to compare:
//! absolute times move with whatever else the machine does.

use std::hint::black_box;
use std::time::Instant;

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
