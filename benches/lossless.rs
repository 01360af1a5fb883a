//! The lossless code of weights beside zstd at its fastest level, LZ4 and a copy of the same bytes, all on one thread, in pieces
//! of 256 KiB of bf16, and in the same run. The weights are normally distributed ones in each type that is coded; with
//! LOSSLESS_MODEL naming a checkpoint (a file or folder), its f32 and bf16 weights as bf16, too.
//!
//! After criterion's own figures it prints medians of alternating turns, which is what to compare: absolute times move with
//! whatever else the machine does. Beside the median it prints the rate of the fastest piece, which other programs disturb
//! least. Then the same code on all threads.

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use half::{bf16, f16};
use tensor_offload::lossless::{BLOCK_WEIGHTS, compress, decompress};
use tensor_offload::{Checkpoint, DType};

/// Weights that are measured: 32 MiB of bf16.
const COUNT: usize = 16 << 20;

/// Weights of a piece, which is small enough for one thread.
const PIECE: usize = 16 * BLOCK_WEIGHTS;

const TURNS: usize = 7;

/// Values near to normally distributed ones.
fn normal(count: usize) -> impl Iterator<Item = f32> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 44) as f32 / (1 << 20) as f32
    };
    (0..count).map(move |_| 0.02 * ((0..12).map(|_| next()).sum::<f32>() - 6.0))
}

fn stored(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        // The upper half of an f16; for four bits of exponent its bits from the second on, of an exponent less by eight.
        DType::F8E5M2 => values.map(|value| (f16::from_f32(value).to_bits() >> 8) as u8).collect(),
        _ => values
            .map(|value| f16::from_f32(value / 2.0).to_bits())
            .map(|f16| (f16 >> 8 & 0x80 | f16 >> 7 & 0x7f) as u8)
            .collect(),
    }
}

/// The f32 and bf16 weights of a checkpoint as bf16, up to [`COUNT`].
fn model(path: &str) -> Vec<u8> {
    let checkpoint = Checkpoint::open(path).expect("LOSSLESS_MODEL names a checkpoint");
    let layout = checkpoint.layout();
    let mut weights = Vec::new();
    for (id, tensor) in layout.tensor_ids().zip(layout.tensors()) {
        let mut bytes = vec![0; tensor.bytes as usize];
        checkpoint.read(id, &mut bytes).expect("a tensor of the checkpoint");
        match tensor.dtype {
            DType::BF16 => weights.extend(bytes),
            DType::F32 => {
                let values = bytes.as_chunks().0.iter().map(|value| bf16::from_f32(f32::from_le_bytes(*value)));
                weights.extend(values.flat_map(bf16::to_le_bytes));
            }
            _ => {}
        }
        weights.truncate(2 * COUNT);
    }
    weights
}

/// Puts the code of a piece into an empty vector.
type Compress = Box<dyn FnMut(&[u8], &mut Vec<u8>)>;

/// Puts what a code is of into as many bytes.
type Decompress = Box<dyn FnMut(&[u8], &mut [u8])>;

/// A way to make bytes smaller.
struct Way {
    name: &'static str,
    compress: Compress,
    decompress: Decompress,
}

fn ways(dtype: DType) -> Vec<Way> {
    let mut packs = zstd::bulk::Compressor::new(1).expect("zstd");
    let mut unpacks = zstd::bulk::Decompressor::new().expect("zstd");
    let copy = |from: &[u8], to: &mut Vec<u8>| to.extend_from_slice(from);
    vec![
        Way {
            name: "lossless",
            compress: Box::new(move |bytes, to| *to = compress(dtype, bytes).expect("whole weights")),
            decompress: Box::new(|code, back| decompress(code, back).expect("its own code")),
        },
        Way {
            name: "zstd -1",
            compress: Box::new(move |bytes, to| {
                to.reserve(zstd::zstd_safe::compress_bound(bytes.len()));
                packs.compress_to_buffer(bytes, to).expect("room");
            }),
            decompress: Box::new(move |code, back| {
                unpacks.decompress_to_buffer(code, back).expect("its own code");
            }),
        },
        Way {
            name: "lz4",
            compress: Box::new(|bytes, to| *to = lz4_flex::block::compress(bytes)),
            decompress: Box::new(|code, back| {
                lz4_flex::block::decompress_into(code, back).expect("its own code");
            }),
        },
        Way { name: "memcpy", compress: Box::new(copy), decompress: Box::new(|code, back| back.copy_from_slice(code)) },
    ]
}

/// The seconds of a turn over all pieces, and the shortest of a byte.
#[derive(Clone, Copy)]
struct Turn {
    seconds: f64,
    shortest: f64,
}

fn turn(pieces: usize, bytes: usize, mut work: impl FnMut(usize)) -> Turn {
    let (begin, mut shortest) = (Instant::now(), f64::MAX);
    for piece in 0..pieces {
        let begin = Instant::now();
        work(piece);
        shortest = shortest.min(begin.elapsed().as_secs_f64() / bytes as f64);
    }
    Turn { seconds: begin.elapsed().as_secs_f64(), shortest }
}

/// `GB/s (of the fastest piece)`.
fn rate(bytes: usize, mut turns: Vec<Turn>) -> String {
    turns.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let shortest = turns.iter().map(|turn| turn.shortest).fold(f64::MAX, f64::min);
    format!("{:6.2} ({:6.2})", bytes as f64 / 1e9 / turns[turns.len() / 2].seconds, 1e-9 / shortest)
}

fn compare(name: &str, dtype: DType, bytes: &[u8], turns: usize) {
    let piece = PIECE * dtype.element_bytes().expect("a type of whole bytes");
    let pieces: Vec<&[u8]> = bytes.chunks_exact(piece.min(bytes.len())).collect();
    let mut ways = ways(dtype);
    let mut back = vec![0; bytes.len()];
    let mut times: Vec<[Vec<Turn>; 2]> = ways.iter().map(|_| Default::default()).collect();
    let mut sizes = vec![0; ways.len()];
    for _ in 0..turns {
        for ((way, times), size) in ways.iter_mut().zip(&mut times).zip(&mut sizes) {
            let mut codes = vec![Vec::new(); pieces.len()];
            times[0].push(turn(pieces.len(), piece, |at| (way.compress)(black_box(pieces[at]), &mut codes[at])));
            *size = codes.iter().map(Vec::len).sum();
            let mut back = back.chunks_mut(piece);
            times[1].push(turn(pieces.len(), piece, |at| {
                let back = back.next().expect("as many pieces");
                (way.decompress)(black_box(&codes[at]), &mut back[..pieces[at].len()]);
            }));
        }
        assert!(back[..pieces.len() * piece] == bytes[..pieces.len() * piece]);
    }
    let all = pieces.iter().map(|piece| piece.len()).sum::<usize>();
    println!("{name}, {} MiB, one thread: ratio, GB/s of weights compressed and decompressed:", all >> 20);
    for ((way, [packs, unpacks]), size) in ways.iter().zip(times).zip(sizes) {
        let ratio = size as f64 / all as f64;
        println!("  {:9} {ratio:.3} {} {}", way.name, rate(all, packs), rate(all, unpacks));
    }
    on_all_threads(dtype, bytes, &mut back, turns);
}

fn on_all_threads(dtype: DType, bytes: &[u8], back: &mut [u8], turns: usize) {
    let mut times: [Vec<Turn>; 3] = Default::default();
    for _ in 0..turns {
        let mut code = Vec::new();
        times[0].push(turn(1, bytes.len(), |_| code = compress(dtype, bytes).expect("whole weights")));
        times[1].push(turn(1, bytes.len(), |_| decompress(&code, black_box(back)).expect("its own code")));
        times[2].push(turn(1, bytes.len(), |_| black_box(&mut *back).copy_from_slice(bytes)));
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let [packs, unpacks, copy] = times.map(|times| rate(bytes.len(), times));
    println!("  on {threads} threads: {packs} {unpacks}, memcpy on one {copy}");
}

fn bench(criterion: &mut Criterion) {
    let measured = std::env::args().any(|arg| arg == "--bench");
    let bf16 = stored(DType::BF16, normal(PIECE));
    let code = compress(DType::BF16, &bf16).expect("whole weights");
    let mut back = vec![0; bf16.len()];
    let mut group = criterion.benchmark_group("lossless");
    group.sample_size(10);
    group.bench_function("compress", |b| b.iter(|| compress(DType::BF16, black_box(&bf16)).expect("whole weights")));
    group.bench_function("decompress", |b| b.iter(|| decompress(black_box(&code), &mut back).expect("its own code")));
    group.finish();
    let (count, turns) = if measured { (COUNT, TURNS) } else { (PIECE, 1) };
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::F8E5M2] {
        compare(&format!("normal {dtype}"), dtype, &stored(dtype, normal(count)), turns);
    }
    match std::env::var("LOSSLESS_MODEL") {
        Ok(path) => compare("model", DType::BF16, &model(&path), turns),
        Err(_) => println!("LOSSLESS_MODEL names no checkpoint, so there are no trained weights to measure with"),
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
