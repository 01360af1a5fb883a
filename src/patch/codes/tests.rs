use proptest::prelude::*;

use super::*;
use crate::checkpoint::{Checkpoint, Layout};

/// A safetensors file.
fn file(tensors: &[(&str, DType, &[u64], Vec<u8>)]) -> Checkpoint {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        let offsets = [begin, data.len()];
        let entry = serde_json::json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": offsets });
        header.insert((*name).to_owned(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes().chain(data));
    Checkpoint::from_bytes("model", bytes).unwrap()
}

/// The codes of the tensor `w.weight`.
fn codes_of(checkpoint: &Checkpoint) -> Codes {
    let layout: &Layout = checkpoint.layout();
    let siblings = Siblings::of_checkpoint(checkpoint);
    let weight = siblings.find("w.weight").unwrap();
    let packed = Packed::of(layout.at(weight.0), &siblings).unwrap();
    Codes::of(weight, &packed, &siblings).unwrap()
}

fn little(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Codes of zeros of a weight of `rows` by `cols`, without nested scales, and the bytes of the parts.
fn zeros(kind: &str, rows: u64, cols: u64) -> (Codes, Vec<Vec<u8>>) {
    let count = rows * cols;
    let numbers = bnb::numbers(kind == "nf4");
    let state = serde_json::json!({ "quant_type": kind, "blocksize": 64, "shape": [rows, cols] }).to_string();
    let blocks = count.div_ceil(64);
    let parts = vec![vec![0; count.div_ceil(2) as usize], vec![0; 4 * blocks as usize], little(&numbers)];
    let checkpoint = file(&[
        ("w.weight", DType::U8, &[count.div_ceil(2), 1], parts[0].clone()),
        ("w.weight.absmax", DType::F32, &[blocks], parts[1].clone()),
        ("w.weight.quant_map", DType::F32, &[16], parts[2].clone()),
        (&format!("w.weight.quant_state.bitsandbytes__{kind}"), DType::U8, &[state.len() as u64], state.into_bytes()),
    ]);
    (codes_of(&checkpoint), parts)
}

/// Packs `values`, which were those of `parts`, and lifts them again. Gives also what was packed.
fn round_trip(codes: &Codes, parts: &[Vec<u8>], values: &[f32]) -> (Vec<f32>, Vec<Vec<u8>>) {
    let views: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let old = codes.lift(&views).unwrap();
    let written = codes.pack(&views, &old, values).unwrap().parts;
    let mut now = parts.to_vec();
    let mut written = written.into_iter();
    for (part, bytes) in codes.parts.iter().zip(&mut now) {
        if part.is_written {
            *bytes = written.next().unwrap();
        }
    }
    let views: Vec<&[u8]> = now.iter().map(Vec::as_slice).collect();
    (codes.lift(&views).unwrap(), now)
}

proptest! {
    /// The widest gap between numbers of NF4 is that from -1 to -0.696, of FP4 that from 2/3 to 1.
    #[test]
    fn a_value_is_within_half_a_step_of_its_block(
        values in prop::collection::vec(-8.0f32..8.0, 3 * 67), nf4: bool, small in -12i32..3,
    ) {
        let values: Vec<f32> = values.iter().enumerate().map(|(at, value)| value * ((at / 64) as f32 * small as f32).exp2()).collect();
        let (codes, parts) = zeros(if nf4 { "nf4" } else { "fp4" }, 3, 67);
        let (stored, packed) = round_trip(&codes, &parts, &values);
        let gap = if nf4 { 1.0 - 0.696_192_8 } else { 1.0 / 3.0 };
        for (values, stored) in values.chunks(64).zip(stored.chunks(64)) {
            let most = largest(values);
            for (value, stored) in values.iter().zip(stored) {
                prop_assert!((value - stored).abs() <= most * (gap / 2.0 + 1e-6), "{value} {stored} of {most}");
            }
            prop_assert_eq!(largest(stored), most);
        }
        // What is packed once is not changed by being packed again.
        let (again, repacked) = round_trip(&codes, &packed, &stored);
        prop_assert!(again == stored && repacked == packed);
        let (zeroed, zero) = round_trip(&codes, &parts, &stored);
        // FP4 has a negative zero.
        prop_assert!(zeroed == stored && (zero == packed || !nf4));
    }
}

#[test]
fn a_number_half_way_between_two_codes_is_the_lower_one() {
    let (codes, parts) = zeros("nf4", 1, 64);
    let numbers = bnb::numbers(true);
    let mut values: Vec<f32> = numbers.windows(2).map(|two| f32::midpoint(two[0], two[1])).collect();
    values.resize(64, 1.0);
    let (stored, _) = round_trip(&codes, &parts, &values);
    assert_eq!(stored[..15], numbers[..15]);
}
