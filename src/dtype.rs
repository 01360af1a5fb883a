//! Element types of stored tensors.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The element type of a tensor, named as its file's format names it.
///
/// The types of safetensors come first. Those that follow are the block types of GGML, which only GGUF files have: a block
/// encodes as many consecutive elements of a row as [`block`](DType::block) says, and a row is a whole number of blocks.
///
/// `Display` and `FromStr` use the formats' names (`BF16`, `F8_E4M3`, `Q4_K`, …).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
#[non_exhaustive]
#[allow(missing_docs, non_camel_case_types, reason = "the names are the formats' own")]
pub enum DType {
    Bool,
    F4,
    F6E2M3,
    F6E3M2,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
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
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

/// The smallest part of a tensor of a type that is a whole number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct BlockSize {
    /// The number of elements.
    pub elements: u64,
    /// Their size in bytes.
    pub bytes: u64,
}

/// A type's name in files, its block, and its number in GGUF files.
struct Row {
    dtype: DType,
    name: &'static str,
    block: BlockSize,
    ggml: Option<u32>,
}

const fn row(dtype: DType, name: &'static str, elements: u64, bytes: u64, ggml: Option<u32>) -> Row {
    Row { dtype, name, block: BlockSize { elements, bytes }, ggml }
}

/// In the order of the enum. The numbers and blocks of GGML's types are those of `ggml_type` and of the `block_` structures in
/// llama.cpp, `ggml/include/ggml.h` and `ggml/src/ggml-common.h`. A block of Q8_1 begins with two half floats there; gguf-py
/// still counts the two floats of its first version.
const TABLE: [Row; 49] = [
    row(DType::Bool, "BOOL", 1, 1, None),
    row(DType::F4, "F4", 2, 1, None),
    row(DType::F6E2M3, "F6_E2M3", 4, 3, None),
    row(DType::F6E3M2, "F6_E3M2", 4, 3, None),
    row(DType::U8, "U8", 1, 1, None),
    row(DType::I8, "I8", 1, 1, Some(24)),
    row(DType::F8E5M2, "F8_E5M2", 1, 1, None),
    row(DType::F8E4M3, "F8_E4M3", 1, 1, None),
    row(DType::F8E8M0, "F8_E8M0", 1, 1, None),
    row(DType::F8E4M3Fnuz, "F8_E4M3FNUZ", 1, 1, None),
    row(DType::F8E5M2Fnuz, "F8_E5M2FNUZ", 1, 1, None),
    row(DType::I16, "I16", 1, 2, Some(25)),
    row(DType::U16, "U16", 1, 2, None),
    row(DType::F16, "F16", 1, 2, Some(1)),
    row(DType::BF16, "BF16", 1, 2, Some(30)),
    row(DType::I32, "I32", 1, 4, Some(26)),
    row(DType::U32, "U32", 1, 4, None),
    row(DType::F32, "F32", 1, 4, Some(0)),
    row(DType::C64, "C64", 1, 8, None),
    row(DType::F64, "F64", 1, 8, Some(28)),
    row(DType::I64, "I64", 1, 8, Some(27)),
    row(DType::U64, "U64", 1, 8, None),
    row(DType::Q4_0, "Q4_0", 32, 18, Some(2)),
    row(DType::Q4_1, "Q4_1", 32, 20, Some(3)),
    row(DType::Q5_0, "Q5_0", 32, 22, Some(6)),
    row(DType::Q5_1, "Q5_1", 32, 24, Some(7)),
    row(DType::Q8_0, "Q8_0", 32, 34, Some(8)),
    row(DType::Q8_1, "Q8_1", 32, 36, Some(9)),
    row(DType::Q2_K, "Q2_K", 256, 84, Some(10)),
    row(DType::Q3_K, "Q3_K", 256, 110, Some(11)),
    row(DType::Q4_K, "Q4_K", 256, 144, Some(12)),
    row(DType::Q5_K, "Q5_K", 256, 176, Some(13)),
    row(DType::Q6_K, "Q6_K", 256, 210, Some(14)),
    row(DType::Q8_K, "Q8_K", 256, 292, Some(15)),
    row(DType::IQ2_XXS, "IQ2_XXS", 256, 66, Some(16)),
    row(DType::IQ2_XS, "IQ2_XS", 256, 74, Some(17)),
    row(DType::IQ3_XXS, "IQ3_XXS", 256, 98, Some(18)),
    row(DType::IQ1_S, "IQ1_S", 256, 50, Some(19)),
    row(DType::IQ4_NL, "IQ4_NL", 32, 18, Some(20)),
    row(DType::IQ3_S, "IQ3_S", 256, 110, Some(21)),
    row(DType::IQ2_S, "IQ2_S", 256, 82, Some(22)),
    row(DType::IQ4_XS, "IQ4_XS", 256, 136, Some(23)),
    row(DType::IQ1_M, "IQ1_M", 256, 56, Some(29)),
    row(DType::TQ1_0, "TQ1_0", 256, 54, Some(34)),
    row(DType::TQ2_0, "TQ2_0", 256, 66, Some(35)),
    row(DType::MXFP4, "MXFP4", 32, 17, Some(39)),
    row(DType::NVFP4, "NVFP4", 64, 36, Some(40)),
    row(DType::Q1_0, "Q1_0", 128, 18, Some(41)),
    row(DType::Q2_0, "Q2_0", 64, 18, Some(42)),
];

impl DType {
    /// Every type, in the order of the enum.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.dtype)
    }

    /// The name in files.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The smallest part of a tensor that is a whole number of bytes: one element of most types, two of `F4`, 256 of `Q4_K`.
    pub fn block(self) -> BlockSize {
        self.row().block
    }

    /// Whether this is a block type of GGML, which only GGUF files have.
    pub fn is_ggml_block(self) -> bool {
        self as usize >= DType::Q4_0 as usize
    }

    /// The number of the type in GGUF files; `None` for a type that they cannot hold.
    pub fn ggml_number(self) -> Option<u32> {
        self.row().ggml
    }

    /// The type with this number in GGUF files; `None` for a number that GGML has removed or not assigned.
    pub fn from_ggml_number(number: u32) -> Option<DType> {
        TABLE.iter().find(|row| row.ggml == Some(number)).map(|row| row.dtype)
    }

    /// The bytes of a tensor of `shape`; `None` if they exceed `u64` or are not a whole number of blocks. A block of GGML does
    /// not span rows, so for its types the innermost dimension must be a multiple of the block. For other types the number of
    /// elements must be one.
    pub fn bytes_of(self, shape: &[u64]) -> Option<u64> {
        let block = self.block();
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
        let in_blocks = if self.is_ggml_block() { shape.last().copied().unwrap_or(1) } else { elements };
        in_blocks.is_multiple_of(block.elements).then(|| (elements / block.elements).checked_mul(block.bytes))?
    }

    /// Why [`bytes_of`](DType::bytes_of) has no answer for a shape, as the rest of a sentence about a tensor.
    pub(crate) fn why_no_size(self, shape: &[u64]) -> String {
        let (block, row) = (self.block().elements, shape.last().copied().unwrap_or(1));
        match self.is_ggml_block() && !row.is_multiple_of(block) {
            true => format!("a row of {row} elements is no whole number of blocks of {block}"),
            false => "it is no whole number of bytes, or more than 64 bits count".to_owned(),
        }
    }

    /// The largest power of two that divides the size of a block. Tensors one after another, those with the greatest alignment
    /// first, each begin at a multiple of their own.
    pub(crate) fn alignment(self) -> u64 {
        1 << self.block().bytes.trailing_zeros()
    }

    /// The size of an element in bytes; `None` for a type whose elements are not whole numbers of bytes.
    pub fn element_bytes(self) -> Option<usize> {
        let BlockSize { elements, bytes } = self.block();
        (elements == 1).then_some(bytes as usize)
    }

    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<DType> for &'static str {
    fn from(dtype: DType) -> Self {
        dtype.name()
    }
}

/// The error for a name that is not a [`DType`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no element type of safetensors or GGUF files")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let row = TABLE.iter().find(|row| row.name == name);
        row.map(|row| row.dtype).ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

impl TryFrom<String> for DType {
    type Error = UnknownDType;

    fn try_from(name: String) -> Result<Self, UnknownDType> {
        name.parse()
    }
}

/// A Rust type, or a type of the crate `half`, for reading the elements of a tensor. 8-bit floats have none; read their bytes
/// with [`TensorView::bytes`](crate::TensorView::bytes).
pub trait Element: bytemuck::Pod + sealed::Sealed {
    /// The element type of tensors with such elements.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f16 => F16, bf16 => BF16, f32 => F32, f64 => F64,
}

/// How the tensors of a model are divided into allocations on the compute device.
///
/// A framework's tensors own typed memory, so a load into such memory needs allocations of one element type. With
/// [`PerType`](TensorGrouping::PerType) and [`PerTensor`](TensorGrouping::PerTensor) each resident tensor, and each tensor that
/// is used in place, is an allocation by itself; the two differ in slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TensorGrouping {
    /// The tensors of a module share an allocation, and so does all that a slot holds.
    #[default]
    Joined,
    /// A slot has an allocation for each element type, in which each tensor begins at a multiple of 256 bytes.
    PerType,
    /// A slot has an allocation for each tensor of a layer. Layers of other shapes share them: of each element type the
    /// largest tensor goes into the largest allocation, the next one into the next.
    PerTensor,
}

impl TensorGrouping {
    /// Whether each tensor that stays where it is has an allocation by itself.
    pub(crate) fn is_apart(self) -> bool {
        self != TensorGrouping::Joined
    }

    /// Whether tensors share allocations whatever their types, for serde.
    pub(crate) fn is_joined(&self) -> bool {
        !self.is_apart()
    }
}

impl fmt::Display for TensorGrouping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TensorGrouping::Joined => "joined",
            TensorGrouping::PerType => "per type",
            TensorGrouping::PerTensor => "per tensor",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_as_large_as_their_types() {
        fn check<T: Element>() {
            assert_eq!(Some(size_of::<T>()), T::DTYPE.element_bytes(), "{}", T::DTYPE);
        }
        check::<u8>();
        check::<i8>();
        check::<u16>();
        check::<i16>();
        check::<u32>();
        check::<i32>();
        check::<u64>();
        check::<i64>();
        check::<f16>();
        check::<bf16>();
        check::<f32>();
        check::<f64>();
    }

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (index, dtype) in DType::all().enumerate() {
            assert_eq!(dtype as usize, index);
            assert_eq!(dtype.name().parse::<DType>(), Ok(dtype));
        }
    }

    #[test]
    fn sizes_count_blocks() {
        assert_eq!(DType::BF16.bytes_of(&[4, 3]), Some(24));
        assert_eq!(DType::F4.bytes_of(&[2, 3]), Some(3));
        assert_eq!(DType::F4.bytes_of(&[3]), None);
        assert_eq!(DType::F6E2M3.bytes_of(&[4]), Some(3));
        assert_eq!(DType::F32.bytes_of(&[]), Some(4));
        assert_eq!(DType::F32.bytes_of(&[5, 0, 7]), Some(0));
        assert_eq!(DType::U8.bytes_of(&[u64::MAX, 2]), None);
        assert_eq!(DType::F32.bytes_of(&[1 << 62]), None);
    }

    #[test]
    fn a_block_of_ggml_ends_with_its_row() {
        assert_eq!(DType::Q4_K.bytes_of(&[3, 512]), Some(3 * 2 * 144));
        assert_eq!(
            DType::Q4_K.bytes_of(&[2, 896]),
            None,
            "896 is three blocks and a half, although two rows are seven"
        );
        assert_eq!(DType::Q8_0.bytes_of(&[2, 896]), Some(2 * 28 * 34));
        assert_eq!(DType::Q8_0.bytes_of(&[32, 1]), None);
        assert_eq!(DType::Q8_0.bytes_of(&[]), None);
        assert_eq!(DType::Q8_0.bytes_of(&[7, 0]), Some(0));
        assert_eq!(DType::Q2_K.bytes_of(&[1 << 55, 256]), Some(84 << 55));
        assert_eq!(DType::Q2_K.bytes_of(&[1 << 56, 256]), None, "64 bits do not count these bytes");
        for dtype in DType::all().filter(|dtype| dtype.is_ggml_block()) {
            let BlockSize { elements, bytes } = dtype.block();
            assert_eq!(dtype.bytes_of(&[5, 3 * elements]), Some(15 * bytes), "{dtype}");
            assert_eq!(dtype.bytes_of(&[elements, 3 * elements - 1]), None, "{dtype}");
            assert_eq!(dtype.element_bytes(), None, "{dtype}");
        }
    }

    /// `GGML_QUANT_SIZES` of the package gguf 0.19.0 from PyPI: number, name, elements and bytes of a block. Q2_0 comes from
    /// `gguf-py/gguf/constants.py` of llama.cpp after that release.
    const GGML_QUANT_SIZES: &str = include_str!("../tests/data/ggml-quant-sizes.txt");

    #[test]
    fn ggml_has_the_same_types() {
        let mut seen = 0;
        for line in GGML_QUANT_SIZES.lines().filter(|line| !line.starts_with('#')) {
            let [number, name, elements, bytes] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let dtype: DType = name.parse().unwrap();
            let BlockSize { elements: found, bytes: size } = dtype.block();
            let number = number.parse().unwrap();
            assert_eq!((dtype.ggml_number(), DType::from_ggml_number(number)), (Some(number), Some(dtype)));
            let bytes = if dtype == DType::Q8_1 { "36" } else { bytes };
            assert_eq!((found.to_string(), size.to_string()), (elements.to_owned(), bytes.to_owned()), "{name}");
            seen += 1;
        }
        assert_eq!(DType::all().filter(|dtype| dtype.ggml_number().is_some()).count(), seen);
        for removed in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(DType::from_ggml_number(removed), None);
        }
    }
}
