//! Blocks of GGML's types as f32 values, and values as blocks, beside a copy of as many values in the same run. With GGUF_PYTHON
//! set to a Python that has the package `gguf`, beside that package's numpy, too.
//!
//! After criterion's own figures it prints medians of alternating turns and their ratios, which is what to compare:
//! absolute times move with whatever else the machine does.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use tensor_offload::DType;
use tensor_offload::patch::{dequantise, quantise};

/// 64 MiB of values, a multiple of every block.
const COUNT: usize = 16 << 20;

const TURNS: usize = 9;

const WRITTEN: [DType; 10] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_NL,
    DType::MXFP4,
];

/// For each type, the seconds that gguf-py takes for as many values of random bytes: the median of three.
const SCRIPT: &str = r#"
import sys, time, numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants
np.seterr(all="ignore")
count = int(sys.argv[1])
for name in sys.argv[2:]:
    try:
        elements, size = GGML_QUANT_SIZES[T[name]]
        blocks = np.random.default_rng(1).integers(0, 256, (count // 4096, 4096 // elements * size), np.uint8)
        times = []
        for _ in range(3):
            start = time.perf_counter(); quants.dequantize(blocks, T[name]); times.append(time.perf_counter() - start)
        print(name, sorted(times)[1], flush=True)
    except (KeyError, NotImplementedError):
        pass
"#;

fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// Blocks of random bytes, with usual scales where a half float begins them.
fn blocks(dtype: DType, count: usize) -> Vec<u8> {
    let block = dtype.block();
    let bytes = count / block.elements as usize * block.bytes as usize;
    noise(bytes).iter().map(|value| ((value + 0.5) * 63.0) as u8).collect()
}

fn types() -> Vec<DType> {
    DType::all().filter(|dtype| dtype.is_ggml_block()).collect()
}

fn bench(criterion: &mut Criterion) {
    let measured = std::env::args().any(|arg| arg == "--bench");
    let count = if measured { COUNT } else { 1 << 17 };
    let mut values = vec![0.0f32; count];
    let mut group = criterion.benchmark_group("dequantise");
    group.sample_size(10);
    for dtype in [DType::Q8_0, DType::Q4_K] {
        let blocks = blocks(dtype, count);
        group.bench_function(dtype.name(), |b| b.iter(|| dequantise(dtype, &blocks, black_box(&mut values)).unwrap()));
    }
    group.finish();
    if measured {
        print_dequantise(&mut values);
        print_quantise();
    } else {
        for dtype in types() {
            dequantise(dtype, &blocks(dtype, count), &mut values).unwrap();
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The median seconds of a piece of work, and of a copy of the values, in alternating turns.
fn turns(values: &mut [f32], floor: &[f32], mut work: impl FnMut(&mut [f32])) -> (f64, f64) {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        let start = Instant::now();
        work(black_box(values));
        times[0].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        black_box(&mut *values).copy_from_slice(floor);
        times[1].push(start.elapsed().as_secs_f64());
    }
    let [work, copy] = times.map(median);
    (work, copy)
}

fn print_dequantise(values: &mut [f32]) {
    let (floor, theirs) = (noise(values.len()), python(values.len()));
    let gigabytes = (values.len() * 4) as f64 / 1e9;
    println!("values of blocks, {} MiB of f32, medians of {TURNS} turns on {} threads:", values.len() >> 18, threads());
    for dtype in types() {
        let blocks = blocks(dtype, values.len());
        let (time, copy) = turns(values, &floor, |values| dequantise(dtype, &blocks, values).unwrap());
        let theirs = theirs.get(dtype.name()).map(|theirs| format!(", gguf-py takes {:.0} x as long", theirs / time));
        println!(
            "  {:8} {:6.2} ms {:6.2} GB/s, {:5.2} x memcpy{}",
            dtype.name(),
            time * 1e3,
            gigabytes / time,
            time / copy,
            theirs.unwrap_or_default()
        );
    }
}

fn print_quantise() {
    let (from, mut values) = (noise(COUNT), vec![0.0; COUNT]);
    println!("blocks of values, medians of {TURNS} turns on {} threads:", threads());
    for dtype in WRITTEN {
        let mut made = blocks(dtype, COUNT);
        let (time, copy) = turns(&mut values, &from, |values| {
            quantise(dtype, values, &mut made).unwrap();
        });
        let million = COUNT as f64 / 1e6 / time;
        println!("  {:8} {:7.2} ms {million:6.0} million/s, {:6.2} x memcpy", dtype.name(), time * 1e3, time / copy);
    }
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What gguf-py takes, if a Python with it is named.
fn python(count: usize) -> BTreeMap<String, f64> {
    let Some(python) = std::env::var_os("GGUF_PYTHON") else {
        println!("GGUF_PYTHON names no Python with the package gguf, so there is nothing to compare with");
        return BTreeMap::new();
    };
    let names = types();
    let names = names.iter().map(|dtype| dtype.name());
    let run = Command::new(python).args(["-c", SCRIPT, &count.to_string()]).args(names).output();
    let text = match run {
        Ok(run) if run.status.success() => String::from_utf8_lossy(&run.stdout).into_owned(),
        Ok(run) => panic!("{}", String::from_utf8_lossy(&run.stderr)),
        Err(error) => panic!("GGUF_PYTHON: {error}"),
    };
    let pair = |line: &str| line.split_once(' ').and_then(|(name, time)| Some((name.to_owned(), time.parse().ok()?)));
    text.lines().filter_map(pair).collect()
}

criterion_group!(benches, bench);
criterion_main!(benches);
