//! What kernels touch of what their parameters point to, by their names, where that follows from the parameters alone. The
//! interpreter holds a launch to it. Without such knowledge a launch counts as touching an allocation to its end.

/// The elements and bytes of a block of GGML's types (`ggml/src/ggml-common.h` in llama.cpp), by the ends of names.
const BLOCKS: [(&str, u64, u64); 27] = [
    ("q1_0", 128, 18),
    ("q2_0", 64, 18),
    ("q4_0", 32, 18),
    ("q4_1", 32, 20),
    ("q5_0", 32, 22),
    ("q5_1", 32, 24),
    ("q8_0", 32, 34),
    ("q8_1", 32, 36),
    ("q2_k", 256, 84),
    ("q3_k", 256, 110),
    ("q4_k", 256, 144),
    ("q5_k", 256, 176),
    ("q6_k", 256, 210),
    ("q8_k", 256, 292),
    ("iq1_s", 256, 50),
    ("iq1_m", 256, 56),
    ("iq2_xxs", 256, 66),
    ("iq2_xs", 256, 74),
    ("iq2_s", 256, 82),
    ("iq3_xxs", 256, 98),
    ("iq3_s", 256, 110),
    ("iq4_nl", 32, 18),
    ("iq4_xs", 256, 136),
    ("tq1_0", 256, 54),
    ("tq2_0", 256, 66),
    ("mxfp4", 32, 17),
    ("nvfp4", 64, 36),
];

/// The bytes of a weight, by the ends of the names of functions that decode weights.
const WEIGHTS: [(&str, u64); 5] = [("bf16", 2), ("f16", 2), ("f32", 4), ("e4m3", 1), ("e5m2", 1)];

/// The weights of a block of the lossless code.
const BLOCK_WEIGHTS: u64 = 8192;

/// The most bytes that a launch touches behind the address in parameter `index`; `None` if that is not known.
pub(crate) fn extent(function: &str, params: &[u64], index: usize) -> Option<u64> {
    if let Some(kind) = function.strip_prefix("lossless_") {
        return of_weights(kind, params, index);
    }
    let kind = function.strip_prefix("dequantise_")?;
    let &(_, elements, bytes) = BLOCKS.iter().find(|(name, ..)| *name == kind)?;
    // Blocks, values, the number of runs of 32 values, and the type of the values: F32, or one of two bytes.
    let &[_, _, runs, to] = params else { return None };
    let values = (runs & u64::from(u32::MAX)) * 32;
    match index {
        0 => Some(values.div_ceil(elements) * bytes),
        1 => Some(values * if to & u64::from(u32::MAX) == 0 { 4 } else { 2 }),
        _ => None,
    }
}

/// Of a function that decodes weights.
fn of_weights(kind: &str, params: &[u64], index: usize) -> Option<u64> {
    let &(_, bytes) = WEIGHTS.iter().find(|(name, _)| *name == kind)?;
    // Header and index, a part of the code, weights, state, the sum of all; by 16 bytes where the part begins, where the one before
    // ends, and where it ends; the warps, all blocks, the weights of the last one, and whether they are coded.
    let &[_, _, _, _, _, begin, _, end, _, blocks, last, coded] = params else { return None };
    let [begin, end, blocks, last, coded] =
        [begin, end, blocks, last, coded].map(|number| number & u64::from(u32::MAX));
    match index {
        0 => Some(64 + if coded == 0 { 8 * blocks } else { 4 * (blocks + 1) }.next_multiple_of(16)),
        1 => Some(end.saturating_sub(begin) * 16),
        2 => Some((blocks.saturating_sub(1) * BLOCK_WEIGHTS + last) * bytes),
        3 => Some(16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_values_of_so_many_runs_are_touched() {
        let of = |function: &str, to: u64| [0, 1, 2].map(|index| extent(function, &[1 << 40, 1 << 41, 24, to], index));
        assert_eq!(of("dequantise_q4_k", 0), [Some(3 * 144), Some(768 * 4), None]);
        assert_eq!(of("dequantise_q8_0", 2), [Some(24 * 34), Some(768 * 2), None]);
        assert_eq!((of("patch_f32", 0), of("dequantise_q4_7", 0)), ([None; 3], [None; 3]));
        assert_eq!(extent("dequantise_q4_k", &[1, 2], 0), None);
    }

    #[test]
    fn a_code_and_its_weights_are_touched() {
        let params = |coded| [1, 2, 3, 4, 5, 40, 60, 110, 1, 3, 5, coded];
        let of = |function: &str, coded| [0, 1, 2, 3, 4].map(|index| extent(function, &params(coded), index));
        assert_eq!(of("lossless_f32", 1), [Some(80), Some(1120), Some((2 * 8192 + 5) * 4), Some(16), None]);
        assert_eq!((of("lossless_e4m3", 0)[0], of("lossless_e4m3", 0)[2]), (Some(96), Some(2 * 8192 + 5)));
        assert_eq!(of("lossless_f64", 1), [None; 5]);
    }
}
