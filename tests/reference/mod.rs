//! Files in memory, and the tolerances of values that other programs computed.

#![allow(dead_code, reason = "each test file uses a part")]

use half::{bf16, f16};
use tensor_offload::adapter::{Adapter, Matching, Weights};
use tensor_offload::{Checkpoint, DType, TensorId};

/// A tensor: name, type, shape, bytes.
pub(crate) type Tensor = (String, DType, Vec<u64>, Vec<u8>);

pub(crate) fn tensor(name: &str, dtype: DType, shape: &[u64], bytes: Vec<u8>) -> Tensor {
    (name.to_owned(), dtype, shape.to_vec(), bytes)
}

pub(crate) fn f32s(name: &str, shape: &[u64], values: &[f32]) -> Tensor {
    tensor(name, DType::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// A safetensors file of these tensors.
pub(crate) fn file(name: &str, tensors: &[Tensor]) -> Checkpoint {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        let offsets = [begin, data.len()];
        header
            .insert(name.clone(), serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": offsets}));
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes().chain(data));
    Checkpoint::from_bytes(name, bytes).unwrap()
}

/// All tensors of a checkpoint.
pub(crate) fn tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let infos = checkpoint.layout().tensor_ids().zip(checkpoint.layout().tensors());
    infos.map(|(index, info)| (info.name.clone(), info.dtype, info.shape.clone(), bytes(checkpoint, index))).collect()
}

pub(crate) fn bytes(checkpoint: &Checkpoint, index: TensorId) -> Vec<u8> {
    let mut bytes = vec![0; checkpoint.layout().tensor(index).unwrap().bytes as usize];
    checkpoint.read(index, &mut bytes).unwrap();
    bytes
}

pub(crate) fn named(checkpoint: &Checkpoint, name: &str) -> Tensor {
    let index = checkpoint.find(name).unwrap_or_else(|| panic!("no tensor `{name}`"));
    let info = checkpoint.layout().tensor(index).unwrap();
    (name.to_owned(), info.dtype, info.shape.clone(), bytes(checkpoint, index))
}

/// The values of F32, F16 or BF16 bytes.
pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect(),
        other => panic!("{other} holds no such floats"),
    }
}

/// Values as F32, F16 or BF16 bytes.
pub(crate) fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        other => panic!("{other} holds no such floats"),
    }
}

/// The checkpoint once the adapters are applied.
pub(crate) fn merged(base: &Checkpoint, adapters: Vec<Adapter>, matching: Matching) -> (Vec<Tensor>, Weights) {
    let weights = Weights::patched(base.clone(), adapters, matching).unwrap_or_else(|error| panic!("{error}"));
    let mut all = tensors(base);
    let before = all.clone();
    for (index, patch) in weights.patches().iter() {
        let needs: Vec<&[u8]> = patch.needs().iter().map(|&index| before[index.index()].3.as_slice()).collect();
        let info = weights.layout().tensor(index).unwrap();
        let (_, _, shape, bytes) = &mut all[index.index()];
        shape.clone_from(&info.shape);
        bytes.resize(info.bytes as usize, 0xff);
        patch.apply(bytes, &needs).unwrap();
    }
    (all, weights)
}

/// Why `got` is not `wanted` within what right orders of summation differ by: 1e-5 of the largest magnitude for F32,
/// one unit in the last place on one element in a hundred otherwise.
pub(crate) fn difference(dtype: DType, got: &[u8], wanted: &[u8]) -> Option<String> {
    if got.len() != wanted.len() {
        return Some(format!("{} bytes, wanted {}", got.len(), wanted.len()));
    }
    let (values, right) = (floats(dtype, got), floats(dtype, wanted));
    if dtype == DType::F32 {
        let largest = right.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let off = values
            .iter()
            .zip(&right)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, |m: f32, e| if e > m || e.is_nan() { e } else { m });
        return (off.is_nan() || off > 1e-5 * largest).then(|| format!("off by {off} of {largest}"));
    }
    let place = |raw: &[u8; 2]| {
        let bits = u16::from_le_bytes(*raw);
        i32::from(if bits & 0x8000 != 0 { !bits } else { bits | 0x8000 })
    };
    let pairs = got.as_chunks().0.iter().zip(wanted.as_chunks().0);
    let off: Vec<i32> = pairs.map(|(a, b)| (place(a) - place(b)).abs()).filter(|&off| off > 0).collect();
    let bad = off.iter().any(|&off| off > 1) || off.len() > (values.len() / 100).max(4);
    bad.then(|| format!("{} of {} differ, by up to {:?} units", off.len(), values.len(), off.iter().max()))
}
