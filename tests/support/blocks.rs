//! Blocks of GGML's types with scales at the edges of their numbers, and the values that they have to give.

use half::{bf16, f16};
use tensor_offload::DType;
use tensor_offload::patch::dequantise;

/// Bytes of any value: all codes, and scales that are subnormal, infinite and NaN.
pub(crate) fn random_bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut random = super::Random::new(seed);
    (0..count.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(count).collect()
}

/// Scales at the edges of f16: zeros, subnormals, the largest, infinities and NaN.
const SCALES: [u16; 8] = [0x0000, 0x8000, 0x0001, 0x83ff, 0x7bff, 0x7c00, 0xfc00, 0x7e01];

/// Scales in f32, likewise.
const WHOLE_SCALES: [u32; 8] =
    [0, 0x8000_0000, 0x0000_0001, 0x807f_ffff, 0x7f7f_ffff, 0x7f80_0000, 0xff80_0000, 0x7fc0_0001];

/// Random blocks. The scales of the first 32 are at the edges; MXFP4 and NVFP4 have all scales that there are.
pub(crate) fn edged(seed: u64, dtype: DType, count: usize) -> Vec<u8> {
    let size = dtype.block().bytes as usize;
    let mut blocks = random_bytes(seed, count * size);
    for (at, block) in blocks.chunks_exact_mut(size).enumerate() {
        match dtype {
            DType::MXFP4 => block[0] = at as u8,
            DType::NVFP4 => (0..4).for_each(|sub| block[sub] = (4 * at + sub) as u8),
            _ if at < 32 => set_scale(dtype, block, at),
            _ => {}
        }
    }
    blocks
}

/// Puts scale number `at`, and where there is one a least value, into a block.
fn set_scale(dtype: DType, block: &mut [u8], at: usize) {
    let (scale, least) = (SCALES[at % 8], SCALES[at / 8 * 2 + at % 2]);
    let mut put = |offset: usize, bits: u16| block[offset..offset + 2].copy_from_slice(&bits.to_le_bytes());
    match dtype {
        // The high half of every other byte has four bits of it.
        DType::IQ1_M => {
            let quarters = block[49..].iter_mut().step_by(2).zip([0, 4, 8, 12]);
            quarters.for_each(|(byte, shift)| *byte = *byte & 15 | ((scale >> shift) as u8) << 4);
        }
        DType::Q8_K => block[..4].copy_from_slice(&WHOLE_SCALES[at % 8].to_le_bytes()),
        DType::Q2_K => {
            put(80, scale);
            put(82, least);
        }
        DType::Q3_K | DType::Q6_K | DType::TQ1_0 | DType::TQ2_0 => put(block_end(dtype), scale),
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => {
            put(0, scale);
            put(2, least);
        }
        _ => put(0, scale),
    }
}

/// Where the last two bytes of a block are.
fn block_end(dtype: DType) -> usize {
    dtype.block().bytes as usize - 2
}

/// The values of blocks as bytes of `to`, by the crate half.
pub(crate) fn wanted(dtype: DType, blocks: &[u8], to: DType) -> Vec<u8> {
    let block = dtype.block();
    let mut values = vec![0.0; blocks.len() / block.bytes as usize * block.elements as usize];
    dequantise(dtype, blocks, &mut values).unwrap();
    let stored = |value: &f32| match to {
        DType::F32 => (if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }).to_le_bytes().to_vec(),
        DType::F16 if value.is_nan() => 0x7e00u16.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
        _ if value.is_nan() => 0x7fc0u16.to_le_bytes().to_vec(),
        _ => bf16::from_f32(*value).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(stored).collect()
}
