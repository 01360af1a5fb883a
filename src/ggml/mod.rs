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
mod quantise;
mod quantise_k;
mod ternary;

use crate::dtype::DType;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use grids::TABLES;

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

impl Format {
    /// The format of a tensor of `dtype`; `None` if that is no block type of GGML.
    pub(crate) fn of(dtype: DType) -> Option<Format> {
        NAMES.iter().find(|(_, other)| *other == dtype).map(|(format, _)| *format)
    }

    /// The element type.
    pub(crate) fn dtype(self) -> DType {
        NAMES[self as usize].1
    }

    /// Whether values can become blocks of it.
    pub(crate) fn is_written(self) -> bool {
        self.quantise(&[], &mut []).is_some()
    }

    /// The element types of all formats that are written.
    pub(crate) fn written() -> impl Iterator<Item = DType> {
        NAMES.iter().filter(|(format, _)| format.is_written()).map(|(_, dtype)| *dtype)
    }

    /// `values` as blocks, block by block up to the shorter of the two. Returns how many blocks the format cannot express: those with
    /// a value that is not finite, or, in the "K" formats and IQ4_NL, with a scale beyond f16. `None` if it is not
    /// [written](Format::is_written).
    #[inline(always)]
    pub(crate) fn quantise(self, values: &[f32], blocks: &mut [u8]) -> Option<u64> {
        Some(match self {
            Format::Q4_0 => each_written(values, blocks, quantise::q4_0),
            Format::Q4_1 => each_written(values, blocks, quantise::q4_1),
            Format::Q5_0 => each_written(values, blocks, quantise::q5_0),
            Format::Q5_1 => each_written(values, blocks, quantise::q5_1),
            Format::Q8_0 => each_written(values, blocks, quantise::q8_0),
            Format::Q4_K => each_written(values, blocks, quantise_k::q4_k),
            Format::Q5_K => each_written(values, blocks, quantise_k::q5_k),
            Format::Q6_K => each_written(values, blocks, quantise_k::q6_k),
            Format::IQ4_NL => each_written(values, blocks, quantise::iq4_nl),
            Format::MXFP4 => each_written(values, blocks, quantise::mxfp4),
            _ => return None,
        })
    }
}

macro_rules! formats {
    ($($format:ident = $bytes:literal => $elements:literal, $decode:path;)*) => {
        /// All of them, in the order of the enum, and their element types.
        const NAMES: &[(Format, DType)] = &[$((Format::$format, DType::$format)),*];

        impl Format {
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
            pub(crate) fn dequantise(self, blocks: &[u8], values: &mut [f32]) {
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
    // A loop, since a closure here would be compiled for the baseline.
    for (block, values) in blocks.as_chunks::<BYTES>().0.iter().zip(values.as_chunks_mut::<ELEMENTS>().0) {
        decode(block, values);
    }
}

#[inline(always)]
fn each_written<const BYTES: usize, const ELEMENTS: usize>(
    values: &[f32],
    blocks: &mut [u8],
    encode: impl Fn(&[f32; ELEMENTS], &mut [u8; BYTES]) -> bool,
) -> u64 {
    let mut beyond = 0;
    for (values, block) in values.as_chunks::<ELEMENTS>().0.iter().zip(blocks.as_chunks_mut::<BYTES>().0) {
        beyond += u64::from(!encode(values, block));
    }
    beyond
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_the_blocks_of_their_element_types() {
        for (index, &(format, dtype)) in NAMES.iter().enumerate() {
            let block = dtype.block();
            assert_eq!((format.elements() as u64, format.bytes() as u64), (block.elements, block.bytes), "{dtype}");
            assert_eq!((format as usize, Format::of(dtype), format.dtype()), (index, Some(format), dtype));
        }
        for dtype in DType::all() {
            assert_eq!(Format::of(dtype).is_some(), dtype.is_ggml_block(), "{dtype}");
        }
    }
}
