//! The format of the lossless code: what was once written is read for ever, and is what is written today.

use sha2::{Digest, Sha256};
use tensor_offload::DType;
use tensor_offload::lossless::{Code, Info, compress, decompress};

/// Integers in place of normally distributed numbers: sums of four bytes less their mean, times a scale.
fn weights(dtype: DType, count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let mut value = || next().to_le_bytes().map(i32::from).iter().sum::<i32>() as f32 - 509.5;
    let values: Vec<f32> = (0..count)
        .map(|at| match at % 517 {
            0 => f32::from_bits((at as u32).wrapping_mul(8_287_621) & 0xbfff_ffff),
            1..8 => 0.0,
            _ => value() / 8192.0,
        })
        .collect();
    let f16 = |value: &f32| half::f16::from_f32(*value).to_bits();
    match dtype {
        DType::BF16 => values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|value| f16(value).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F8E5M2 => values.iter().map(|value| (f16(value) >> 8) as u8).collect(),
        _ => values.iter().map(f16).map(|f16| (f16 >> 8 & 0x80 | f16 >> 7 & 0x7f) as u8).collect(),
    }
}

const TYPES: [DType; 5] = [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::F8E5M2];

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `tests/data/lossless.txt` has the hash of a code for each type and length. A line that differs is another format: it needs
/// another version, and the reader has to go on reading this one.
#[test]
fn codes_are_those_of_version_1() {
    let mut lines = String::new();
    for dtype in TYPES {
        for count in [0, 1, 1500, 8192, 20_000, 300_000] {
            let weights = weights(dtype, count);
            let code = compress(dtype, &weights).unwrap();
            let mut back = vec![0; weights.len()];
            decompress(&code, &mut back).unwrap();
            assert!(back == weights);
            lines += &format!("{dtype} {count} {} {}\n", code.len(), hash(&code));
        }
    }
    let expected = include_str!("data/lossless.txt");
    assert_eq!(lines, expected, "the format changed");
}

/// Whole codes, for readers in other languages to be tried with, too.
#[test]
fn codes_of_version_1_are_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/lossless");
    for dtype in TYPES {
        let code = std::fs::read(format!("{folder}/{dtype}.bin")).unwrap();
        let info = Info::read(&code).unwrap();
        assert_eq!((info.dtype, info.count, info.in_blocks), (dtype, 2000, true));
        let mut back = vec![0; info.decoded_bytes as usize];
        Code::open(&code).unwrap().decode(&mut back).unwrap();
        assert!(back == weights(dtype, 2000), "{dtype}");
    }
}
