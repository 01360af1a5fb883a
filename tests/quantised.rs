//! Blocks of GGML's types: their values, and values as blocks. `tests/data/ggml/README.md` tells where the data come from.

use std::collections::BTreeMap;

use proptest::prelude::*;
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use tensor_offload::patch::{dequantise, quantise};
use tensor_offload::{DType, Error};

const FORMATS: [&str; 27] = [
    "Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
    "NVFP4",
];

/// The types that values can become: those whose bytes are given, and those whose errors are.
const EXACT: [&str; 6] = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"];
const SEARCHED: [&str; 4] = ["Q4_K", "Q5_K", "Q6_K", "IQ4_NL"];

fn data(file: &str) -> Vec<u8> {
    std::fs::read(format!("{}/tests/data/ggml/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn dtype(name: &str) -> DType {
    name.parse().unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
}

fn values_of(dtype: DType, blocks: &[u8]) -> Vec<f32> {
    let block = dtype.block();
    let mut values = vec![0.0; blocks.len() / block.bytes as usize * block.elements as usize];
    dequantise(dtype, blocks, &mut values).unwrap();
    values
}

fn blocks_of(dtype: DType, values: &[f32]) -> (Vec<u8>, u64) {
    let block = dtype.block();
    let mut blocks = vec![0xa5; values.len() / block.elements as usize * block.bytes as usize];
    let beyond = quantise(dtype, values, &mut blocks).unwrap();
    (blocks, beyond)
}

/// The finaliser of SplitMix64 after one step.
fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

fn random_bytes(count: usize) -> Vec<u8> {
    (0..count.div_ceil(8) as u64).flat_map(|at| mixed(at).to_le_bytes()).take(count).collect()
}

#[test]
fn blocks_have_the_values_of_the_formats_own_implementation() {
    let file = data("dequantized.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    for name in FORMATS {
        let wanted = floats(file.tensor(&format!("{name}.values")).unwrap().data());
        let got = values_of(dtype(name), file.tensor(name).unwrap().data());
        assert_eq!(got.len(), wanted.len(), "{name}");
        for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert_eq!(got.to_bits(), wanted.to_bits(), "{name} at {at}: {got}, wanted {wanted}");
        }
    }
}

/// A thousand blocks of each format: all codes, and scales that are subnormal, infinite and NaN.
#[test]
fn blocks_of_any_bytes_have_the_values_of_the_formats_own_implementation() {
    let wanted: BTreeMap<String, String> = serde_json::from_slice(&data("dequantized.json")).unwrap();
    assert_eq!(wanted.len(), FORMATS.len());
    for name in FORMATS {
        let dtype = dtype(name);
        let mut hash = Sha256::new();
        for value in values_of(dtype, &random_bytes(1000 * dtype.block().bytes as usize)) {
            let bits = if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() };
            hash.update(bits.to_le_bytes());
        }
        let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, wanted[name], "{name}");
    }
}

#[test]
fn every_block_type_has_values() {
    for dtype in DType::all().filter(|dtype| dtype.is_ggml_block()) {
        assert!(FORMATS.contains(&dtype.name()), "{dtype}");
    }
}

/// Many blocks at once, which threads share, are what each is by itself.
#[test]
fn a_block_does_not_depend_on_others() {
    for name in FORMATS {
        let dtype = dtype(name);
        let block = dtype.block();
        let (size, elements) = (block.bytes as usize, block.elements as usize);
        let count = (1 << 19) / elements;
        let blocks = random_bytes(257 * size).into_iter().cycle().take(count * size).collect::<Vec<u8>>();
        let all = values_of(dtype, &blocks);
        for at in (0..count).step_by(count / 300) {
            let one = values_of(dtype, &blocks[at * size..][..size]);
            let bits =
                |values: &[f32]| values.iter().map(|v| if v.is_nan() { 0 } else { v.to_bits() }).collect::<Vec<_>>();
            assert!(bits(&all[at * elements..][..elements]) == bits(&one), "{name}, block {at}");
        }
    }
}

#[test]
fn wrong_lengths_and_types_are_refused_by_name() {
    let mut values = [7.0; 64];
    for (blocks, count) in [(33, 32), (35, 32), (34, 31), (34, 64), (0, 32), (34, 0)] {
        let refused = dequantise(DType::Q8_0, &vec![0; blocks], &mut values[..count]).unwrap_err();
        assert!(matches!(refused, Error::WrongSize { given, .. } if given == blocks as u64), "{refused}");
        let refused = quantise(DType::Q8_0, &values[..count], &mut vec![0; blocks]).unwrap_err();
        assert!(matches!(refused, Error::WrongSize { .. }), "{refused}");
    }
    assert_eq!(values, [7.0; 64]);
    dequantise(DType::Q8_0, &[], &mut []).unwrap();
    let message = dequantise(DType::BF16, &[0; 64], &mut values[..32]).unwrap_err().to_string();
    assert_eq!(message, "BF16 is no block type of GGML");
    let message = quantise(DType::IQ2_XS, &[0.0; 256], &mut [0; 74]).unwrap_err().to_string();
    for part in ["not of IQ2_XS", "Q4_K", "Q8_0"] {
        assert!(message.contains(part), "{message}");
    }
    let message = dequantise(DType::Q4_K, &[0; 100], &mut values).unwrap_err().to_string();
    assert!(message.contains("256") && message.contains("64") && message.contains("100"), "{message}");
}

#[test]
fn values_become_the_bytes_of_gguf_py() {
    let file = data("quantized.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let values = floats(file.tensor("values").unwrap().data());
    for name in EXACT {
        let size = dtype(name).block().bytes as usize;
        let wanted = file.tensor(name).unwrap();
        let (got, beyond) = blocks_of(dtype(name), &values);
        assert_eq!(beyond, 0, "{name}");
        for (at, (got, wanted)) in got.chunks(size).zip(wanted.data().chunks(size)).enumerate() {
            assert_eq!(got, wanted, "{name}, block {at}");
        }
    }
}

fn mean_error(values: &[f32], back: &[f32]) -> f64 {
    let squares = values.iter().zip(back).map(|(value, back)| (f64::from(*value) - f64::from(*back)).powi(2));
    (squares.sum::<f64>() / values.len() as f64).sqrt()
}

/// Blocks have the values of llama.cpp's; where a scale is zero, codes may differ.
#[test]
fn searched_scales_are_those_of_llama_cpp() {
    let file = data("quantized.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let values = floats(file.tensor("values").unwrap().data());
    for name in SEARCHED {
        let dtype = dtype(name);
        let theirs = values_of(dtype, file.tensor(name).unwrap().data());
        let (blocks, beyond) = blocks_of(dtype, &values);
        assert_eq!(beyond, 0, "{name}");
        for (row, (ours, theirs)) in values_of(dtype, &blocks).chunks(256).zip(theirs.chunks(256)).enumerate() {
            if row == 8 && matches!(name, "Q6_K" | "IQ4_NL") {
                // Of values of a million, llama.cpp's squares of products are infinite, and its search ends early.
                let values = &values[row * 256..][..256];
                assert!(mean_error(values, ours) < mean_error(values, theirs));
                continue;
            }
            assert_eq!(ours, theirs, "{name}, row {row}");
        }
    }
}

fn uniform(at: u64) -> f32 {
    (mixed(at) >> 40) as f32 / (1 << 24) as f32 - 0.5
}

fn bell(at: u64) -> f32 {
    let [a, b, c, d] = [0, 1, 2, 3].map(|part| uniform(4 * at + part));
    a + b + c + d
}

/// Of fifty thousand values of four distributions.
#[test]
fn mean_errors_are_those_of_llama_cpp() {
    let errors: BTreeMap<String, BTreeMap<String, f64>> = serde_json::from_slice(&data("errors.json")).unwrap();
    for name in EXACT.iter().chain(&SEARCHED) {
        for (kind, wanted) in &errors[*name] {
            let values: Vec<f32> = (0..256 * 200)
                .map(|at| match kind.as_str() {
                    "uniform" => uniform(at),
                    "bell" => bell(at),
                    "tails" => bell(at) * bell(at) * bell(at),
                    _ => bell(at).abs() + 0.25,
                })
                .collect();
            let error = mean_error(&values, &values_of(dtype(name), &blocks_of(dtype(name), &values).0));
            println!("{name} {kind}: {error:.6}, {:.5} of llama.cpp's", error / wanted);
            assert!((error / wanted - 1.0).abs() < 1e-9, "{name} {kind}: {error}, llama.cpp's {wanted}");
        }
    }
}

#[test]
fn a_block_with_a_value_that_is_not_finite_is_lost_as_a_whole_and_counted() {
    for name in EXACT.iter().chain(&SEARCHED) {
        let elements = dtype(name).block().elements as usize;
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values: Vec<f32> = (0..3 * elements as u64).map(uniform).collect();
            values[elements + 9] = bad;
            let (blocks, beyond) = blocks_of(dtype(name), &values);
            assert_eq!(beyond, 1, "{name} {bad}");
            let back = values_of(dtype(name), &blocks);
            assert!(
                back[..elements].iter().chain(&back[2 * elements..]).all(|value| value.is_finite()),
                "{name} {bad}"
            );
            let lost = &back[elements..2 * elements];
            let all =
                if *name == "MXFP4" { lost.iter().all(|v| v.is_infinite()) } else { lost.iter().all(|v| v.is_nan()) };
            assert!(all, "{name} {bad}: {lost:?}");
        }
    }
}

/// Scales beyond f16, and values so small that no scale has a reciprocal.
#[test]
fn blocks_of_the_largest_and_the_smallest_values_are_defined() {
    for name in EXACT.iter().chain(&SEARCHED) {
        let elements = dtype(name).block().elements as usize;
        let huge: Vec<f32> = (0..elements as u64).map(|at| uniform(at) * 3e38).collect();
        let (blocks, beyond) = blocks_of(dtype(name), &huge);
        let back = values_of(dtype(name), &blocks);
        let finite = *name == "MXFP4";
        assert_eq!(back.iter().all(|value| value.is_finite()), finite, "{name}");
        assert_eq!(beyond, u64::from(SEARCHED.contains(name)), "{name}");
        for tiny in [1e-40, 1e-45, 1e-37] {
            let values: Vec<f32> = (0..elements as u64).map(|at| uniform(at) * tiny).collect();
            let back = values_of(dtype(name), &blocks_of(dtype(name), &values).0);
            assert!(back.iter().all(|value| value.abs() <= 1e-36), "{name} {tiny}: {back:?}");
        }
    }
}

/// Half of a code's distance for the range of a block, in each type; f16 keeps eleven bits of a scale.
fn bound(name: &str, block: &[f32]) -> f32 {
    let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let (least, most) = block.iter().fold((0.0f32, 0.0f32), |ends, value| (ends.0.min(*value), ends.1.max(*value)));
    let (range, of_scale) = (most - least, 1.0 / 1024.0);
    let distance = match name {
        "Q8_0" => largest * (0.5 / 127.0 + of_scale),
        // On the side of the sign that the extreme value has not, the last code is missing.
        "Q4_0" => largest * (1.0 / 8.0 + of_scale),
        "Q5_0" => largest * (1.0 / 16.0 + of_scale),
        "Q4_1" => range * (0.5 / 15.0 + of_scale) + largest * of_scale,
        "Q5_1" => range * (0.5 / 31.0 + of_scale) + largest * of_scale,
        // Between 4 and 6 there is nothing, and what is between 6 and 8 becomes 6.
        "MXFP4" => largest * 0.25,
        // The least scale that is tried has its last code there; factors are sixty-thirds of the largest.
        "Q4_K" => range * (1.0 / 15.0 + 1.0 / 32.0 + of_scale),
        "Q5_K" => range * (1.0 / 31.0 + 1.0 / 32.0 + of_scale),
        "Q6_K" => largest * (1.0 / 31.0 + 1.0 / 64.0 + of_scale),
        "IQ4_NL" => largest * (24.0 / 113.0 + of_scale),
        name => panic!("{name}"),
    };
    distance + 1e-6
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn values_come_back_within_the_distance_of_codes(
        values in prop::collection::vec(-4.0f32..4.0, 256),
        scale in prop::sample::select(vec![1e-2f32, 1.0, 300.0]),
        shift in -2.0f32..2.0,
    ) {
        let values: Vec<f32> = values.iter().map(|value| (value + shift) * scale).collect();
        for name in EXACT.iter().chain(&SEARCHED) {
            let back = values_of(dtype(name), &blocks_of(dtype(name), &values).0);
            let bound = bound(name, &values);
            for (at, (value, back)) in values.iter().zip(&back).enumerate() {
                prop_assert!((value - back).abs() <= bound, "{} at {}: {} became {}, bound {}", name, at, value, back, bound);
            }
        }
    }

    /// Codes and scales of any bytes: what is quantised from the values of blocks is those values again, or a lost block.
    #[test]
    fn any_values_become_blocks(values in prop::collection::vec(any::<f32>(), 256)) {
        for name in EXACT.iter().chain(&SEARCHED) {
            let (blocks, _) = blocks_of(dtype(name), &values);
            prop_assert_eq!(values_of(dtype(name), &blocks).len(), 256);
        }
    }
}
