//! The lossless code of weights beside zstd at its fastest level, LZ4 and a copy of the same bytes, all on one thread, in pieces
//! of 256 KiB of bf16, and in the same run. The weights are normally distributed ones in each type that is coded; with
//! LOSSLESS_MODEL naming a checkpoint (a file or folder), its f32 and bf16 weights as bf16, too.
//!
//! The decoder of DFloat11's codes is measured on the bf16 ones, in the same pieces of one group; what codes them is here, and is not.
//!
//! After criterion's own figures it prints medians of alternating turns, which is what to compare: absolute times move with
//! whatever else the machine does. Beside the median it prints the rate of the fastest piece, which other programs disturb
//! least. Then the same code on all threads.

use std::cmp::Reverse;
use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use half::{bf16, f16};
use tensor_offload::lossless::dfloat11::{Group, Parts};
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

/// Weights in DFloat11's form.
struct DFloat11 {
    group: Group,
    encoded: Vec<u8>,
    rests: Vec<u8>,
    /// The bytes of all tensors.
    bytes: usize,
}

/// The windows of a block, and the bits of one.
const THREADS: usize = 512;
const WINDOW: usize = 64;

impl DFloat11 {
    fn of(weights: &[u8]) -> DFloat11 {
        let weights: Vec<u16> = weights.as_chunks().0.iter().map(|weight| u16::from_le_bytes(*weight)).collect();
        let (codes, end) = huffman(&weights);
        let (mut encoded, mut gaps, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let (mut buffer, mut at) = (0u64, 0usize);
        let mut push = |(code, length): (u32, u32), at: usize| {
            buffer = buffer << length | u64::from(code);
            let after = at + length as usize;
            (at / 8..after / 8).for_each(|byte| encoded.push((buffer >> (after - 8 * (byte + 1))) as u8));
            after
        };
        let begin = |at: usize, count: usize, gaps: &mut Vec<usize>, positions: &mut Vec<u32>| {
            if at / WINDOW == gaps.len() {
                gaps.push(at % WINDOW);
            }
            if at / WINDOW / THREADS == positions.len() {
                positions.push(count as u32);
            }
        };
        for (count, weight) in weights.iter().enumerate() {
            begin(at, count, &mut gaps, &mut positions);
            at = push(codes[usize::from(weight >> 7 & 0xff)], at);
        }
        if !at.is_multiple_of(8) {
            begin(at, weights.len(), &mut gaps, &mut positions);
            // As many of its bits as there is room for.
            let room = 8 - at as u32 % 8;
            push(if end.1 < room { (end.0 << (room - end.1), room) } else { (end.0 >> (end.1 - room), room) }, at);
        }
        positions.push(weights.len() as u32);
        gaps.resize(encoded.len().div_ceil(WINDOW / 8 * THREADS) * THREADS, 0);
        let bits = gaps.iter().flat_map(|gap| (0..5).rev().map(move |bit| (gap >> bit & 1) as u8)).collect::<Vec<u8>>();
        let gaps: Vec<u8> = bits.chunks(8).map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | bit)).collect();
        let rests: Vec<u8> = weights.iter().map(|weight| (weight >> 8 & 0x80 | weight & 0x7f) as u8).collect();
        let (luts, positions) = (luts(&codes), positions.iter().flat_map(|at| at.to_le_bytes()).collect::<Vec<u8>>());
        let bytes = luts.len() + positions.len() + gaps.len() + encoded.len() + rests.len();
        let group = Group::new(&Parts {
            luts: &luts,
            output_positions: &positions,
            gaps: &gaps,
            threads: THREADS as u32,
            encoded: encoded.len() as u64,
            weights: weights.len() as u64,
        });
        DFloat11 { group: group.expect("what was just coded"), encoded, rests, bytes }
    }

    fn decode(&self, first: usize, to: &mut [u8]) {
        let weights = first as u64..(first + to.len() / 2) as u64;
        let bytes = self.group.encoded_bytes(&weights).expect("weights of the group");
        let (encoded, rests) = (bytes.start as usize..bytes.end as usize, first..first + to.len() / 2);
        let decoded = self.group.decode(weights, &self.encoded[encoded], &self.rests[rests], to);
        decoded.expect("what was just coded");
    }
}

/// The Huffman code of the weights' exponents, bits and their number for each, and that of the end, of ones alone.
fn huffman(weights: &[u16]) -> ([(u32, u32); 256], (u32, u32)) {
    const END: usize = 256;
    let mut counts = [0u64; 257];
    weights.iter().for_each(|weight| counts[usize::from(weight >> 7 & 0xff)] += 1);
    counts[END] = 1;
    let mut trees: Vec<(u64, Vec<usize>)> = counts
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0)
        .map(|(symbol, count)| (*count, vec![symbol]))
        .collect();
    let mut lengths = [0u32; 257];
    while trees.len() > 1 {
        trees.sort_by_key(|tree| Reverse(tree.0));
        let (one, other) = (trees.pop().expect("two"), trees.pop().expect("two"));
        let symbols = [one.1, other.1].concat();
        symbols.iter().for_each(|&symbol| lengths[symbol] += 1);
        trees.push((one.0 + other.0, symbols));
    }
    let mut symbols: Vec<usize> = (0..257).filter(|&symbol| lengths[symbol] > 0).collect();
    symbols.sort_by_key(|&symbol| (lengths[symbol], symbol));
    let (mut codes, mut next, mut before) = ([(0, 0); 257], 0u64, 0);
    for symbol in symbols {
        next <<= lengths[symbol] - before;
        before = lengths[symbol];
        codes[symbol] = (next as u32, before);
        next += 1;
    }
    (*codes.first_chunk().expect("257 of them"), codes[END])
}

/// The tables by the bytes of codes, and the lengths.
fn luts(codes: &[(u32, u32); 256]) -> Vec<u8> {
    // The codes' bits on the left of 32, and the bytes before the last one.
    let codes = codes.iter().enumerate().filter(|(_, code)| code.1 > 0);
    let codes: Vec<(u32, u32, u8)> =
        codes.map(|(e, &(bits, length))| (bits << (32 - length), length, e as u8)).collect();
    let prefix = |bits: u32, bytes: u32| if bytes == 0 { 0 } else { bits >> (32 - 8 * bytes) };
    let mut tables = vec![(0, 0)];
    for bytes in 1..4 {
        for &(bits, length, _) in &codes {
            let table = (bytes, prefix(bits, bytes));
            if length > 8 * bytes && !tables.contains(&table) {
                tables.push(table);
            }
        }
    }
    let (mut luts, mut lengths) = (vec![0; 256 * tables.len()], [0; 256]);
    for &(bits, length, exponent) in &codes {
        lengths[usize::from(exponent)] = length as u8;
        for (number, &(bytes, of)) in tables.iter().enumerate().filter(|(_, table)| length > 8 * table.0) {
            if prefix(bits, bytes) == of {
                let byte = 256 * number + (prefix(bits, bytes + 1) & 0xff) as usize;
                let (value, entries) = match length - 8 * bytes {
                    left @ 1..=8 => (exponent, 1 << (8 - left)),
                    _ => {
                        let next = (bytes + 1, prefix(bits, bytes + 1));
                        let table = tables.iter().position(|table| *table == next).expect("it was made");
                        ((256 - table) as u8, 1)
                    }
                };
                luts[byte..byte + entries].fill(value);
            }
        }
    }
    luts.extend(lengths);
    luts
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
    if dtype == DType::BF16 {
        let coded = DFloat11::of(bytes);
        let mut times = Vec::new();
        for _ in 0..turns {
            back.fill(0);
            let mut parts = back.chunks_exact_mut(piece).enumerate();
            times.push(turn(pieces.len(), piece, |_| {
                let (at, part) = parts.next().expect("as many pieces");
                coded.decode(at * piece / 2, black_box(part));
            }));
            assert!(back[..pieces.len() * piece] == bytes[..pieces.len() * piece]);
        }
        let ratio = coded.bytes as f64 / bytes.len() as f64;
        println!("  dfloat11  {ratio:.3} {:15} {}", "", rate(all, times));
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
