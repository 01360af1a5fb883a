//! GGML's block formats: fixed numbers of consecutive values of a row in a few bytes, with scales of their own.
//!
//! The formats are those of llama.cpp, `ggml/src/ggml-common.h` (structures and tables) and `ggml/src/ggml-quants.c` (formulas),
//! and of gguf-py, `gguf/quants.py`, both under the MIT licence. Values are bit for bit those of its dequantisation, save which
//! NaN one is. All numbers are little-endian.
//!
//! Everything here is loops over arrays of constant size, inlined always, so that they become vector code of whatever instruction
//! set their caller is compiled for.

mod blocks;
mod grids;
mod k_quants;
mod lattices;
mod parts;
mod ternary;

use crate::dtype::DType;

/// A block format that GGML stores tensors in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "the names are the format's own")]
pub(crate) enum Format {
    Q1_0,
    Q2_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
}

macro_rules! formats {
    ($($format:ident = $bytes:literal => $elements:literal, $decode:path;)*) => {
        impl Format {
            /// All of them.
            #[cfg(test)]
            pub(crate) const ALL: &[Format] = &[$(Format::$format),*];

            /// Values of a block.
            pub(crate) fn elements(self) -> usize {
                match self {
                    $(Format::$format => $elements,)*
                }
            }

            /// Bytes of a block.
            pub(crate) fn bytes(self) -> usize {
                match self {
                    $(Format::$format => $bytes,)*
                }
            }

            /// `blocks` as values, block by block up to the shorter of the two.
            #[inline(always)]
            pub(crate) fn dequantize(self, blocks: &[u8], values: &mut [f32]) {
                match self {
                    $(Format::$format => each::<$bytes, $elements>(blocks, values, $decode),)*
                }
            }
        }
    };
}

formats! {
    Q1_0 = 18 => 128, blocks::q1_0;
    Q2_0 = 18 => 64, blocks::q2_0;
    Q4_0 = 18 => 32, blocks::q4_0;
    Q4_1 = 20 => 32, blocks::q4_1;
    Q5_0 = 22 => 32, blocks::q5_0;
    Q5_1 = 24 => 32, blocks::q5_1;
    Q8_0 = 34 => 32, blocks::q8_0;
    Q8_1 = 36 => 32, blocks::q8_1;
    Q2_K = 84 => 256, k_quants::q2_k;
    Q3_K = 110 => 256, k_quants::q3_k;
    Q4_K = 144 => 256, k_quants::q4_k;
    Q5_K = 176 => 256, k_quants::q5_k;
    Q6_K = 210 => 256, k_quants::q6_k;
    Q8_K = 292 => 256, k_quants::q8_k;
    IQ1_S = 50 => 256, lattices::iq1_s;
    IQ1_M = 56 => 256, lattices::iq1_m;
    IQ2_XXS = 66 => 256, lattices::iq2_xxs;
    IQ2_XS = 74 => 256, lattices::iq2_xs;
    IQ2_S = 82 => 256, lattices::iq2_s;
    IQ3_XXS = 98 => 256, lattices::iq3_xxs;
    IQ3_S = 110 => 256, lattices::iq3_s;
    IQ4_NL = 18 => 32, blocks::iq4_nl;
    IQ4_XS = 136 => 256, blocks::iq4_xs;
    TQ1_0 = 54 => 256, ternary::tq1_0;
    TQ2_0 = 66 => 256, ternary::tq2_0;
    MXFP4 = 17 => 32, blocks::mxfp4;
    NVFP4 = 36 => 64, blocks::nvfp4;
}

#[inline(always)]
fn each<const BYTES: usize, const ELEMENTS: usize>(
    blocks: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let (blocks, values) = (blocks.as_chunks::<BYTES>().0, values.as_chunks_mut::<ELEMENTS>().0);
    blocks.iter().zip(values).for_each(|(block, values)| decode(block, values));
}
