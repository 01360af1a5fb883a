//! Weights to be coded, and buffers of a device with bytes.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;

use half::{bf16, f16};
use tensor_offload::backend::{Backend, BufMut, Decompress, Device, Host, MemoryKind, Role, Transfer};
use tensor_offload::{DType, DeviceId, Result};

use super::card::DEADLINE;
use super::support;

pub(crate) fn random_bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut random = support::Random::new(seed);
    (0..count.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(count).collect()
}

/// Numbers that are nearly normally distributed, of a standard deviation.
pub(crate) fn normal(seed: u64, deviation: f32) -> impl Iterator<Item = f32> {
    let mut random = support::Random::new(seed);
    std::iter::repeat_with(move || {
        let sum: u64 = (0..12).map(|_| random.next() >> 44).sum();
        (sum as f32 / (1 << 20) as f32 - 6.0) * deviation
    })
}

/// Values in the bits of a type, rounded down where it holds fewer.
pub(crate) fn stored(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    let half = |value: f32| f16::from_f32(value).to_bits();
    match dtype {
        DType::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| half(value).to_le_bytes()).collect(),
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F8E5M2 | DType::F8E5M2Fnuz => values.map(|value| (half(value) >> 8) as u8).collect(),
        // An f16 of a smaller exponent has the bits of E4M3 below its two highest exponent bits.
        _ => values.map(|value| (half(value / 4.0) >> 8 & 0x80 | half(value / 4.0) >> 7 & 0x7f) as u8).collect(),
    }
}

pub(crate) fn sent(device: &Arc<dyn Device>, bytes: &[u8]) -> BufMut {
    let host = Host::new().open(DeviceId::CPU).unwrap();
    let mut staged = host.alloc(bytes.len(), MemoryKind::Whole).unwrap();
    staged.host_mut().unwrap().copy_from_slice(bytes);
    let memory = device.alloc(bytes.len(), MemoryKind::Whole).unwrap();
    let stream = device.stream(Role::Upload).unwrap();
    let flight = stream.copy(Transfer::whole(&staged.freeze(), memory).unwrap()).unwrap();
    flight.wait(DEADLINE).unwrap()
}

pub(crate) fn read(device: &Arc<dyn Device>, values: BufMut) -> Result<Vec<u8>> {
    let host = Host::new().open(DeviceId::CPU)?;
    let memory = host.alloc(values.bytes(), MemoryKind::Whole)?;
    let stream = device.stream(Role::Download)?;
    let mut back = stream.copy(Transfer::whole(&values.freeze(), memory)?)?.wait(DEADLINE)?;
    Ok(back.host_mut().unwrap().to_vec())
}

pub(crate) fn verdict(device: &Arc<dyn Device>, bytes: BufMut) -> bool {
    Decompress::is_sound(read(device, bytes).unwrap()[..].try_into().unwrap())
}
