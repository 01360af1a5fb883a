//! What holds for every code, whoever decodes it.

mod damage;
mod warp;

use proptest::prelude::*;

use super::vector::Tier;
use super::*;

const TYPES: [DType; 7] =
    [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::F8E5M2, DType::F8E4M3Fnuz, DType::F8E5M2Fnuz];

/// Pseudo-random numbers of 32 bits.
pub(super) fn noise(seed: u32) -> impl FnMut() -> u32 {
    let mut state = u64::from(seed) << 1 | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    }
}

/// Numbers that are nearly normally distributed, of a standard deviation.
fn normal(seed: u32, deviation: f32) -> impl Iterator<Item = f32> {
    let mut next = noise(seed);
    std::iter::repeat_with(move || {
        let sum: u32 = (0..12).map(|_| next() >> 12).sum();
        (sum as f32 / (1 << 20) as f32 - 6.0) * deviation
    })
}

/// Values in the bits of a type, rounded down where it holds fewer.
fn stored(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    let f16 = |value: f32| half::f16::from_f32(value).to_bits();
    match dtype {
        DType::BF16 => values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| f16(value).to_le_bytes()).collect(),
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F8E5M2 | DType::F8E5M2Fnuz => values.map(|value| (f16(value) >> 8) as u8).collect(),
        // An f16 of a smaller exponent has the bits of E4M3 below its two highest exponent bits.
        _ => values.map(|value| (f16(value / 256.0) >> 8 & 0x80 | f16(value / 256.0) >> 7 & 0x7f) as u8).collect(),
    }
}

/// The code of each tier, which are equal; and what each decodes it to is what was coded.
fn coded(dtype: DType, bytes: &[u8]) -> Vec<u8> {
    let code = compress(dtype, bytes).unwrap();
    let fields = Fields::of(dtype).unwrap();
    for tier in Tier::all() {
        let (encoder, mut blocks) = (Encoder::with_tier(tier, dtype, bytes.len()).unwrap(), Vec::new());
        let piece = (encoder.encode(0, bytes, &mut blocks), blocks);
        let found = in_blocks(encoder, std::slice::from_ref(&piece)).unwrap();
        let found = found.unwrap_or_else(|| as_it_is(dtype, encoder, bytes, &[piece]));
        assert!(found == code, "{tier:?} codes {dtype} otherwise");
        let mut decoded = vec![0xa5; bytes.len()];
        let mut opened = Code::open(&code).unwrap();
        opened.head.tier = tier;
        opened.decode(&mut decoded).unwrap();
        assert!(decoded == bytes, "{tier:?} decodes {dtype} otherwise");
    }
    assert!(code.len() <= compressed_bound(dtype, bytes.len() / fields.size()).unwrap());
    code
}

fn ratio(dtype: DType, bytes: &[u8]) -> f64 {
    coded(dtype, bytes).len() as f64 / bytes.len() as f64
}

/// Weights as models have them, and as they rarely do.
fn weights() -> impl Strategy<Value = (DType, Vec<u8>)> {
    let count = prop_oneof![0usize..70, 1000usize..1050, 8000usize..8400, 16_300usize..17_500];
    let deviation = (-40i32..10).prop_map(|exponent| (exponent as f32 / 2.0).exp2());
    (prop::sample::select(&TYPES[..]), count, 0u8..8, any::<u32>(), deviation).prop_map(
        |(dtype, count, kind, seed, deviation)| {
            let mut random = noise(seed);
            let values: Vec<f32> = match kind {
                0 | 1 => normal(seed, deviation).take(count).collect(),
                // A mixture: columns of other scales, and some zeros.
                2 => {
                    let scale = |at: usize| [1.0, 0.01, 100.0, 0.0][at % 64 / 16];
                    normal(seed, deviation).take(count).enumerate().map(|(at, value)| value * scale(at)).collect()
                }
                3 => {
                    (0..count).map(|at| if random().is_multiple_of(9) { deviation } else { 0.0 * at as f32 }).collect()
                }
                4 => vec![deviation; count],
                5 => (0..count).map(|at| at as f32 * deviation - 3.0).collect(),
                6 => (0..count).map(|_| f32::from_bits(0x7f80_0000 | random() >> 9 | 1)).collect(),
                _ => (0..count).map(|_| f32::from_bits(random())).collect(),
            };
            (dtype, stored(dtype, values.into_iter()))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn weights_come_back_and_all_tiers_agree((dtype, bytes) in weights()) {
        coded(dtype, &bytes);
    }

    #[test]
    fn any_bytes_come_back(
        dtype in prop::sample::select(&TYPES[..]),
        mut bytes in prop::collection::vec(any::<u8>(), 0..4000),
        repeat in 1usize..12,
    ) {
        bytes = bytes.repeat(repeat);
        bytes.truncate(bytes.len() / 4 * 4);
        coded(dtype, &bytes);
    }

    #[test]
    fn a_range_is_that_of_the_whole(
        (dtype, bytes) in weights(),
        begin in any::<prop::sample::Index>(),
        end in any::<prop::sample::Index>(),
    ) {
        let size = Fields::of(dtype).unwrap().size();
        let count = bytes.len() / size;
        let (begin, end) = (begin.index(count + 1), end.index(count + 1));
        let (begin, end) = (begin.min(end), begin.max(end));
        let code = compress(dtype, &bytes).unwrap();
        let mut decoded = vec![0xa5; (end - begin) * size];
        Code::open(&code).unwrap().decode_range(begin as u64..end as u64, &mut decoded).unwrap();
        prop_assert!(decoded == bytes[begin * size..end * size]);
    }
}

/// The shortest codes are those of equal weights.
#[test]
fn no_code_is_shorter_than_the_least() {
    for dtype in TYPES {
        let size = Fields::of(dtype).unwrap().size();
        for count in [0, 1, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 40 * BLOCK] {
            let (code, least) = (compress(dtype, &vec![0; count * size]).unwrap(), compressed_least(count as u64));
            assert!(code.len() as u64 >= least, "{count} of {dtype}");
            // A small last block stays as it was.
            let whole = count > 0 && count.is_multiple_of(BLOCK);
            assert!(!whole || code.len() as u64 == least, "{count} of {dtype}: {} and {least}", code.len());
        }
    }
    assert!(compressed_least(u64::MAX) > u64::MAX / 8192 * 32);
}

#[test]
fn every_bit_pattern_comes_back() {
    let of_two: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let of_one: Vec<u8> = (0..=u8::MAX).cycle().take(9000).collect();
    // Each pattern among usual weights too, where it is an escape.
    let spread = |dtype: DType, size: usize, patterns: &[u8]| {
        let mut bytes = stored(dtype, normal(7, 0.02).take(patterns.len() / size * 20));
        for (at, pattern) in patterns.chunks(size).enumerate() {
            bytes[at * 20 * size..][..size].copy_from_slice(pattern);
        }
        bytes
    };
    for dtype in [DType::BF16, DType::F16] {
        coded(dtype, &of_two);
        let code = coded(dtype, &spread(dtype, 2, &of_two));
        assert!(Info::read(&code).unwrap().in_blocks);
    }
    for dtype in &TYPES[3..] {
        coded(*dtype, &of_one);
        coded(*dtype, &spread(*dtype, 1, &of_one));
    }
    // f32 with all upper and all lower halves: infinities, NaN of any payload, zeros of both signs, subnormal numbers.
    let of_four: Vec<u8> = (0..=u16::MAX)
        .flat_map(|half| (u32::from(half) << 16 | u32::from(half.wrapping_mul(40_503))).to_le_bytes())
        .collect();
    coded(DType::F32, &of_four);
    assert!(Info::read(&coded(DType::F32, &spread(DType::F32, 4, &of_four))).unwrap().in_blocks);
}

/// The figures for normally distributed weights, which trained ones are near.
#[test]
fn weights_take_as_many_bytes_as_they_should() {
    let of = |dtype, deviation| ratio(dtype, &stored(dtype, normal(3, deviation).take(40 * BLOCK)));
    let is_near = |ratio: f64, expected: f64| assert!((ratio - expected).abs() < 0.006, "{ratio} and not {expected}");
    is_near(of(DType::BF16, 0.02), 0.672);
    is_near(of(DType::F16, 0.02), 0.858);
    is_near(of(DType::F32, 0.02), 0.836);
    is_near(of(DType::F8E5M2, 0.02), 0.716);
    is_near(of(DType::F8E4M3, 60.0), 0.843);
    // f32 that was of another type has planes of zeros.
    let of_bf16 = normal(3, 0.02).map(|value| half::bf16::from_f32(value).to_f32());
    is_near(ratio(DType::F32, &stored(DType::F32, of_bf16.take(9 * BLOCK))), 0.336);
    let of_f16 = normal(3, 0.02).map(|value| half::f16::from_f32(value).to_f32());
    is_near(ratio(DType::F32, &stored(DType::F32, of_f16.take(9 * BLOCK))), 0.586);
    // Constant weights take a plane of eight bits, or nothing but headers.
    is_near(ratio(DType::BF16, &stored(DType::BF16, std::iter::repeat_n(0.3, 9 * BLOCK))), 0.503);
    is_near(ratio(DType::BF16, &vec![0; 18 * BLOCK]), 0.003);
}

#[test]
fn what_saves_little_stays_as_it_was() {
    let mut random = noise(5);
    let random: Vec<u8> = (0..5 * BLOCK).flat_map(|_| (random() as u16).to_le_bytes()).collect();
    let code = coded(DType::BF16, &random);
    let info = Info::read(&code).unwrap();
    assert!(!info.in_blocks && code.len() == 64 + 48 + random.len());
    assert_eq!(code[112..], random);
    assert_eq!(Code::open(&code).unwrap().block(4).unwrap(), &random[8 * BLOCK..]);
    assert_eq!(Code::open(&code).unwrap().block(5), None);
    // One block of them among others is plain.
    let mut mixed = stored(DType::BF16, normal(4, 0.02).take(5 * BLOCK));
    mixed[2 * BLOCK..4 * BLOCK].copy_from_slice(&random[..2 * BLOCK]);
    let code = coded(DType::BF16, &mixed);
    let block = Code::open(&code).unwrap().block(1).unwrap();
    assert_eq!((block.len(), &block[32..]), (32 + 2 * BLOCK, &random[..2 * BLOCK]));
}

#[test]
fn a_header_says_what_was_coded() {
    for dtype in TYPES {
        let bytes = stored(dtype, normal(1, 0.5).take(20_000));
        let code = compress(dtype, &bytes).unwrap();
        let info = Info::read(&code[..64]).unwrap();
        assert_eq!((info.dtype, info.count, info.blocks(), info.bytes), (dtype, 20_000, 3, code.len() as u64));
        assert_eq!(info.decoded_bytes, bytes.len() as u64);
        let other = compress(dtype, &stored(dtype, normal(2, 0.5).take(20_000))).unwrap();
        assert_ne!(Info::read(&other).unwrap().sum, info.sum);
    }
}

/// On several threads, as a large tensor is.
#[test]
fn tasks_are_put_together_in_order() {
    let bytes = stored(DType::BF16, normal(8, 0.1).take(3 * TOGETHER * BLOCK + 5000));
    let code = coded(DType::BF16, &bytes);
    let code = Code::open(&code).unwrap();
    let mut part = vec![0; bytes.len() - 2 * 5001];
    code.decode_range(5001..code.info().count, &mut part).unwrap();
    assert!(part == bytes[2 * 5001..]);
}

/// A code made of pieces, whatever their sizes, is that of the whole tensor; and the weights come back from pieces alone.
#[test]
fn pieces_of_any_size_make_the_same_code() {
    for (dtype, deviation) in [(DType::BF16, 0.02), (DType::F32, 3.0), (DType::F8E4M3, 1.0)] {
        let bytes = stored(dtype, normal(8, deviation).take(5 * BLOCK + 77));
        let encoder = Encoder::new(dtype, bytes.len()).unwrap();
        for blocks in [1, 2, 4, 9] {
            let piece = blocks * encoder.block_bytes();
            let made: Vec<Piece> = bytes
                .chunks(piece)
                .enumerate()
                .map(|(number, weights)| {
                    let mut out = Vec::new();
                    (encoder.encode(number * piece, weights, &mut out), out)
                })
                .collect();
            let whole = encoder.whole(made.iter().map(|(blocks, bytes)| (blocks, &bytes[..])));
            let mut code = vec![0xa5; whole.bytes().unwrap_or(0)];
            let plain = Info::read(&compress(dtype, &bytes).unwrap()).unwrap();
            if plain.in_blocks {
                assert_eq!(whole.write(&mut code), Ok(plain));
                assert!(code == compress(dtype, &bytes).unwrap(), "{dtype}, {blocks}");
                let needed = code.len() as u64;
                assert_eq!(whole.write(&mut code[1..]), Err(CodeFault::Destination { needed, given: needed - 1 }));
            } else {
                assert!(code.is_empty(), "{dtype}");
            }
            let mut weights = vec![0xa5; bytes.len()];
            whole.write_weights(&mut weights).unwrap();
            assert!(weights == bytes, "{dtype}, {blocks}");
        }
    }
}

#[test]
fn an_estimate_is_near_the_code() {
    for (dtype, deviation) in [(DType::BF16, 0.02), (DType::F16, 0.02), (DType::F32, 3.0), (DType::F8E5M2, 1.0)] {
        let bytes = stored(dtype, normal(8, deviation).take(30 * BLOCK));
        let estimate = estimate(dtype, &bytes[..bytes.len() / 10]).unwrap();
        assert!((estimate - ratio(dtype, &bytes)).abs() < 0.005, "{dtype} {estimate}");
    }
    let random: Vec<u8> = (0..64).map(|at: u8| at.wrapping_mul(151)).collect();
    assert_eq!(estimate(DType::BF16, &random), Ok(1.0), "too few for a block");
    assert_eq!(estimate(DType::BF16, &[]), Ok(1.0));
}

#[test]
fn what_cannot_be_done_is_said() {
    assert_eq!(compress(DType::U8, &[1]), Err(CodeFault::NoCode { dtype: DType::U8 }));
    assert_eq!(compressed_bound(DType::U8, 1), None);
    assert_eq!(compress(DType::F32, &[1; 7]), Err(CodeFault::PartOfWeight { dtype: DType::F32, bytes: 7 }));
    assert_eq!(compressed_bound(DType::BF16, usize::MAX / 2), None, "offsets of 32 bits");
    let code = compress(DType::BF16, &[7; 20]).unwrap();
    assert_eq!(decompress(&code, &mut [0; 18]), Err(CodeFault::Destination { needed: 20, given: 18 }));
    let code = Code::open(&code).unwrap();
    let range = |range: std::ops::Range<u64>, weights: &mut [u8]| code.decode_range(range, weights);
    assert_eq!(range(3..11, &mut [0; 16]), Err(CodeFault::Range { begin: 3, end: 11, count: 10 }));
    #[expect(clippy::reversed_empty_ranges, reason = "what is tried")]
    let backward = range(4..3, &mut []);
    assert_eq!(backward, Err(CodeFault::Range { begin: 4, end: 3, count: 10 }));
    assert_eq!(range(3..5, &mut [0; 5]), Err(CodeFault::Destination { needed: 4, given: 5 }));
    assert_eq!(range(10..10, &mut []), Ok(()));
}
