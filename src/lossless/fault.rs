//! What is wrong with the code of a tensor, or with a request for it.

use crate::dtype::DType;

/// Why a tensor cannot be coded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodeFault {
    /// The element type has no code; keep the tensor as it is.
    #[error("tensors of {dtype} are not coded, those of BF16, F16, F32, F8_E4M3 and F8_E5M2 are")]
    NoCode {
        /// The type.
        dtype: DType,
    },
    /// The bytes to be coded end within a weight; pass whole weights.
    #[error("{bytes} bytes are not a whole number of weights of {dtype}")]
    PartOfWeight {
        /// The weights' type.
        dtype: DType,
        /// The given bytes.
        bytes: u64,
    },
    /// The tensor has more weights than the format can index; code it in parts.
    #[error("{count} weights are more than one code holds; code the tensor in parts")]
    TooLarge {
        /// The weights.
        count: u64,
    },
    /// The bytes do not begin as the code of a tensor.
    #[error("these bytes are not the code of a tensor")]
    NotCode,
    /// The code was written by a later version of this library; read it with that one.
    #[error("the code is of version {found}, and this library reads version {known}")]
    Version {
        /// The code's version.
        found: u16,
        /// The version that is read.
        known: u16,
    },
    /// The code is not as long as it says; fetch it again.
    #[error("the code has {given} bytes where {expected} belong to it")]
    Length {
        /// The bytes that the header announces, or at least needs.
        expected: u64,
        /// The bytes that there are.
        given: u64,
    },
    /// The header or the index is damaged; fetch the code again.
    #[error("the code is damaged: {what}")]
    Header {
        /// What is wrong with it.
        what: &'static str,
    },
    /// A block is damaged; fetch the code again.
    #[error("block {block} of the code is damaged: {what}")]
    Block {
        /// The block's number, from 0.
        block: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The destination is not as long as the weights; pass one that is.
    #[error("the weights take {needed} bytes, the buffer for them has {given}")]
    Destination {
        /// The bytes of the weights.
        needed: u64,
        /// The bytes of the destination.
        given: u64,
    },
    /// The range of weights ends beyond the tensor, or before it begins.
    #[error("there are no weights {begin}..{end} in a tensor of {count}")]
    Range {
        /// The first weight.
        begin: u64,
        /// The end.
        end: u64,
        /// The weights of the tensor.
        count: u64,
    },
}
