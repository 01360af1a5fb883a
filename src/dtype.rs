//! Element types of stored tensors.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The element type of a tensor, named as the safetensors format names it.
///
/// `Display` and `FromStr` use those names (`BF16`, `F8_E4M3`, …).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the format's own")]
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
}

/// Type, name in files, bits of one element.
const TABLE: [(DType, &str, u64); 22] = [
    (DType::Bool, "BOOL", 8),
    (DType::F4, "F4", 4),
    (DType::F6E2M3, "F6_E2M3", 6),
    (DType::F6E3M2, "F6_E3M2", 6),
    (DType::U8, "U8", 8),
    (DType::I8, "I8", 8),
    (DType::F8E5M2, "F8_E5M2", 8),
    (DType::F8E4M3, "F8_E4M3", 8),
    (DType::F8E8M0, "F8_E8M0", 8),
    (DType::F8E4M3Fnuz, "F8_E4M3FNUZ", 8),
    (DType::F8E5M2Fnuz, "F8_E5M2FNUZ", 8),
    (DType::I16, "I16", 16),
    (DType::U16, "U16", 16),
    (DType::F16, "F16", 16),
    (DType::BF16, "BF16", 16),
    (DType::I32, "I32", 32),
    (DType::U32, "U32", 32),
    (DType::F32, "F32", 32),
    (DType::C64, "C64", 64),
    (DType::F64, "F64", 64),
    (DType::I64, "I64", 64),
    (DType::U64, "U64", 64),
];

impl DType {
    /// Every type, in the order of the enum.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The name in files.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// Bits of one element.
    pub fn bits(self) -> u64 {
        TABLE[self as usize].2
    }

    /// The bytes of a tensor of `shape`; `None` if they exceed `u64` or are not a whole number.
    pub fn bytes_of(self, shape: &[u64]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
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
#[error("`{0}` is no element type of the safetensors format")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let row = TABLE.iter().find(|row| row.1 == name);
        row.map(|row| row.0).ok_or_else(|| UnknownDType(name.to_owned()))
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
            assert_eq!(size_of::<T>() as u64 * 8, T::DTYPE.bits(), "{}", T::DTYPE);
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
    fn sizes_count_bits() {
        assert_eq!(DType::BF16.bytes_of(&[4, 3]), Some(24));
        assert_eq!(DType::F4.bytes_of(&[2, 3]), Some(3));
        assert_eq!(DType::F4.bytes_of(&[3]), None);
        assert_eq!(DType::F6E2M3.bytes_of(&[4]), Some(3));
        assert_eq!(DType::F32.bytes_of(&[]), Some(4));
        assert_eq!(DType::F32.bytes_of(&[5, 0, 7]), Some(0));
        assert_eq!(DType::U8.bytes_of(&[u64::MAX, 2]), None);
    }
}
