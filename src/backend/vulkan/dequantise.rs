//! The values of GGML's blocks, computed on the device.

use super::device::VulkanDevice;
use super::dispatch::{Binding, Dispatch};
use super::pipelines::{Pipeline, Program};
use crate::backend::{Dequantise, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The block types, all of GGML's, and the texts for them.
const TEXTS: [(DType, &[u8]); 27] = [
    (DType::Q1_0, include_bytes!("kernels/dequantise/q1_0.spv")),
    (DType::Q2_0, include_bytes!("kernels/dequantise/q2_0.spv")),
    (DType::Q4_0, include_bytes!("kernels/dequantise/q4_0.spv")),
    (DType::Q4_1, include_bytes!("kernels/dequantise/q4_1.spv")),
    (DType::Q5_0, include_bytes!("kernels/dequantise/q5_0.spv")),
    (DType::Q5_1, include_bytes!("kernels/dequantise/q5_1.spv")),
    (DType::Q8_0, include_bytes!("kernels/dequantise/q8_0.spv")),
    (DType::Q8_1, include_bytes!("kernels/dequantise/q8_1.spv")),
    (DType::Q2_K, include_bytes!("kernels/dequantise/q2_k.spv")),
    (DType::Q3_K, include_bytes!("kernels/dequantise/q3_k.spv")),
    (DType::Q4_K, include_bytes!("kernels/dequantise/q4_k.spv")),
    (DType::Q5_K, include_bytes!("kernels/dequantise/q5_k.spv")),
    (DType::Q6_K, include_bytes!("kernels/dequantise/q6_k.spv")),
    (DType::Q8_K, include_bytes!("kernels/dequantise/q8_k.spv")),
    (DType::IQ1_S, include_bytes!("kernels/dequantise/iq1_s.spv")),
    (DType::IQ1_M, include_bytes!("kernels/dequantise/iq1_m.spv")),
    (DType::IQ2_XXS, include_bytes!("kernels/dequantise/iq2_xxs.spv")),
    (DType::IQ2_XS, include_bytes!("kernels/dequantise/iq2_xs.spv")),
    (DType::IQ2_S, include_bytes!("kernels/dequantise/iq2_s.spv")),
    (DType::IQ3_XXS, include_bytes!("kernels/dequantise/iq3_xxs.spv")),
    (DType::IQ3_S, include_bytes!("kernels/dequantise/iq3_s.spv")),
    (DType::IQ4_NL, include_bytes!("kernels/dequantise/iq4_nl.spv")),
    (DType::IQ4_XS, include_bytes!("kernels/dequantise/iq4_xs.spv")),
    (DType::TQ1_0, include_bytes!("kernels/dequantise/tq1_0.spv")),
    (DType::TQ2_0, include_bytes!("kernels/dequantise/tq2_0.spv")),
    (DType::MXFP4, include_bytes!("kernels/dequantise/mxfp4.spv")),
    (DType::NVFP4, include_bytes!("kernels/dequantise/nvfp4.spv")),
];

/// The types of values, by their numbers in the kernel.
const VALUES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The values of a run. A block of any type is 1, 2, 4 or 8 of them.
const RUN: u64 = 32;
/// The most values of a block of any type.
const LARGEST: u64 = 256;
/// The words of values that a group of the kernel computes.
const GROUP: u64 = 128;

/// The kernel for these types.
///
/// # Errors
/// The reason why the device has none, for the user.
pub(super) fn pipeline(device: &VulkanDevice, stream: &dyn Stream, from: DType, to: DType) -> Result<Pipeline, String> {
    let known = TEXTS.iter().find(|(of, _)| *of == from).filter(|_| VALUES.contains(&to));
    let (_, text) = known.ok_or_else(|| format!("{} has no kernel that computes {to} of {from}", stream.device()))?;
    let block = from.block();
    let constants = vec![block.bytes as u32, (block.elements / RUN) as u32];
    device.kernel(stream, &Program { name: format!("values of {from}"), text, constants })
}

/// The kernels that compute all values. Each is for as many as bindings can hold.
pub(super) fn dispatches(device: &VulkanDevice, stream: &dyn Stream, work: &Dequantise) -> Result<Vec<Dispatch>> {
    let (from, to) = work.types();
    let pipeline = pipeline(device, stream, from, to);
    let pipeline = pipeline.map_err(|why| Error::invalid(format!("{} does not dequantise: {why}", stream.device())))?;
    if work.values() == 0 {
        return Ok(Vec::new());
    }
    let (block, size) = (from.block(), to.element_bytes().unwrap_or(1) as u64);
    let blocks_at = device.source("what is to be dequantised", work.source(), work.offset())?;
    let values_at = device.target(VALUES_OF, work.dst(), work.at(), work.bytes())?;
    let (context, all) = (device.context(), work.values() as u64);
    let most = Binding::most(context);
    let most = (most / block.bytes * block.elements).min(most / size) / LARGEST * LARGEST;
    if most == 0 {
        return Err(Binding::too_small(context));
    }
    let kind = VALUES.iter().position(|of| *of == to).unwrap_or_default() as u32;
    let part = |first: u64| {
        let count = most.min(all - first);
        let bytes_of = |values: u64| values / block.elements * block.bytes;
        let source = Binding::new(context, (blocks_at.0, blocks_at.1 + bytes_of(first)), bytes_of(count));
        let target = Binding::new(context, (values_at.0, values_at.1 + first * size), count * size);
        let words = (u64::from(target.at) % 4 + count * size).div_ceil(4);
        Dispatch {
            pipeline,
            bindings: vec![source, target],
            arguments: vec![source.at, target.at, count as u32, kind],
            groups: words.div_ceil(GROUP) as u32,
        }
    };
    Ok((0..all).step_by(most as usize).map(part).collect())
}

/// What the destination is called.
const VALUES_OF: &str = "the memory for the values of blocks";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_block_types_have_a_text_and_whole_runs() {
        assert!(DType::all().all(|dtype| dtype.is_ggml_block() == TEXTS.iter().any(|(of, _)| *of == dtype)));
        for (dtype, _) in TEXTS {
            let elements = dtype.block().elements;
            assert!(elements.is_multiple_of(RUN) && LARGEST.is_multiple_of(elements), "{dtype}");
        }
    }
}
