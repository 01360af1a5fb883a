//! Faults of tensors that a file has in compressed form.

use crate::dtype::DType;
use crate::lossless::CodeFault;

/// What is wrong with a compressed tensor of a file; see [`write_compressed`](crate::checkpoint::write_compressed).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompressedFault {
    /// The metadata's entry for it is no element type and shape.
    #[error(
        "the metadata says that it is compressed, and of what type and shape as `{entry}`, which is not like `BF16 [2, 3]`"
    )]
    Entry {
        /// The entry.
        entry: String,
    },
    /// A code is bytes in one dimension, and this is something else.
    #[error("the metadata says that it is compressed, but {dtype} {shape:?} is no code, which is U8 in one dimension")]
    NotBytes {
        /// Its element type in the file.
        dtype: DType,
        /// Its shape in the file.
        shape: Vec<u64>,
    },
    /// The code is of other weights than the metadata says.
    #[error("its code is of {found} weights of {found_dtype}, and the metadata says {count} of {dtype}")]
    Other {
        /// The number of weights by the metadata.
        count: u64,
        /// Their type.
        dtype: DType,
        /// The number of weights in the code.
        found: u64,
        /// Their type.
        found_dtype: DType,
    },
    /// The code is damaged, or of a later version.
    #[error(transparent)]
    Code(#[from] CodeFault),
}
