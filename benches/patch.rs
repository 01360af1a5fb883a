//! Merging LoRA into a bf16 weight of [4096, 4096], beside what it is to be measured by in the same run: a copy of the
//! weight, and the plain way (lift the whole weight, add the product, round it).
//!
//! Ratios are printed at the end of each rank's group by criterion's own medians; compare inside one run.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use half::bf16;
use rayon::prelude::*;
use tensor_offload::adapter::{Adapter, Matching, Patches};
use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::{Checkpoint, DType};

const SIZE: usize = 4096;

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
fn two_pass(bytes: &mut [u8], lifted: &mut [f32], up: &[f32], down: &[f32], rank: usize) {
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

fn bench(criterion: &mut Criterion) {
    let weight: Vec<u8> = noise(SIZE * SIZE, 1).iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    let mut group = criterion.benchmark_group("lora_bf16_4096");
    group.sample_size(20);
    let mut copy = weight.clone();
    group.bench_function("memcpy", |b| b.iter(|| black_box(&mut copy).copy_from_slice(black_box(&weight))));
    for (name, adapters) in [("rank16", &[(16, 3)][..]), ("rank64", &[(64, 3)]), ("rank16_twice", &[(16, 3), (16, 5)])]
    {
        let patches = patches(adapters);
        let patch = patches.tensor(0).expect("the weight is patched");
        let mut bytes = weight.clone();
        group.bench_function(name, |b| {
            b.iter(|| patch.apply(black_box(&mut bytes), &[]).expect("it applies"));
        });
    }
    for rank in [16, 64] {
        let (up, down) = (noise(SIZE * rank, 3), noise(rank * SIZE, 4));
        let mut lifted = vec![0.0; SIZE * SIZE];
        group.bench_function(format!("two_pass_rank{rank}"), |b| {
            b.iter_batched_ref(
                || weight.clone(),
                |bytes| two_pass(black_box(bytes), &mut lifted, &up, &down, rank),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
