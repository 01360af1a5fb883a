//! How the values of a tensor are stored: each by itself, or in blocks.

use crate::dtype::DType;
use crate::float::Float;
use crate::ggml::Format;

/// An encoding whose values are f32 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Each value is a float.
    Float(Float),
    /// Values are in blocks of GGML.
    Blocks(Format),
}

impl Encoding {
    /// The encoding of weights of `dtype`; `None` if f32 does not hold their values, or these are integers or codes.
    pub(crate) fn of(dtype: DType) -> Option<Encoding> {
        let float = Float::of(dtype).map(Encoding::Float);
        float.or_else(|| Format::of(dtype).map(Encoding::Blocks))
    }

    /// The element type.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Encoding::Float(float) => float.dtype(),
            Encoding::Blocks(format) => format.dtype(),
        }
    }

    /// The format of blocks; `None` for floats.
    pub(crate) fn blocks(self) -> Option<Format> {
        match self {
            Encoding::Float(_) => None,
            Encoding::Blocks(format) => Some(format),
        }
    }

    /// The number of values that are stored together.
    pub(crate) fn together(self) -> usize {
        self.blocks().map_or(1, Format::elements)
    }

    /// The bytes of `count` values, which are whole blocks.
    pub(crate) fn bytes(self, count: usize) -> usize {
        count / self.together() * self.block_bytes()
    }

    /// The number of values in `bytes`, which are whole blocks.
    pub(crate) fn count(self, bytes: usize) -> usize {
        bytes / self.block_bytes() * self.together()
    }

    /// The bytes of values that are stored together.
    pub(crate) fn block_bytes(self) -> usize {
        match self {
            Encoding::Float(float) => float.size(),
            Encoding::Blocks(format) => format.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_as_element_types_count_them() {
        for dtype in DType::all() {
            let Some(encoding) = Encoding::of(dtype) else {
                assert!(!dtype.is_ggml_block(), "{dtype}");
                continue;
            };
            let count = 3 * encoding.together();
            assert_eq!(Some(encoding.bytes(count) as u64), dtype.bytes_of(&[count as u64]), "{dtype}");
            assert_eq!((encoding.count(encoding.bytes(count)), encoding.dtype()), (count, dtype));
            assert_eq!(encoding.blocks().is_some(), dtype.is_ggml_block(), "{dtype}");
        }
    }
}
