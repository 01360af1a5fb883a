//! Why a checkpoint cannot be divided among ranks.

use super::Packing;
use crate::dtype::DType;

/// Why a checkpoint, or a tensor of it, cannot be divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardFault {
    /// There is no such rank.
    #[error("there is no rank {rank} of {of}; ranks are counted from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        of: u32,
    },
    /// A line of the rules is not understood.
    #[error("`{line}`: {reason}")]
    Rule {
        /// The line.
        line: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No rule divides any tensor, so that each rank would have all of them.
    #[error("no rule divides any of its tensors, so each rank would have all of them; name some by rules of your own")]
    NothingDivided,
    /// The checkpoint is one rank's part already.
    #[error("it is the part of rank {rank} of {of} already; divide the whole")]
    Divided {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        of: u32,
    },
    /// What is to be divided is not so many equal shares.
    #[error("{what} cannot be divided equally among {of} ranks; take another number of ranks, or leave it whole")]
    Unequal {
        /// What is to be divided: `dimension 0 of [100, 64]`, `30 heads`.
        what: String,
        /// The number of ranks.
        of: u32,
    },
    /// A dimension does not consist of equal units or parts.
    #[error("dimension {dimension} of {shape:?} does not consist of {what}")]
    Units {
        /// The dimension.
        dimension: usize,
        /// The tensor's shape.
        shape: Vec<u64>,
        /// What the rule says: `32 heads`, `parts of 1 + 1 + 1`.
        what: String,
    },
    /// A share begins or ends within a block of values that are stored together.
    #[error(
        "dimension {dimension} of {shape:?} is stored in blocks of {block} elements ({dtype}), and the shares of {of} ranks are no \
         whole blocks; take another number of ranks, or leave it whole"
    )]
    Blocks {
        /// The dimension.
        dimension: usize,
        /// The tensor's shape.
        shape: Vec<u64>,
        /// The tensor's type.
        dtype: DType,
        /// The elements of a block.
        block: u64,
        /// The number of ranks.
        of: u32,
    },
    /// A rule needs a number that is not known.
    #[error(
        "its rule needs the number of {what}, which neither a config.json nor the file says; see `ShardRules::heads`"
    )]
    Heads {
        /// Of what: `heads`, `key-value heads`.
        what: &'static str,
    },
    /// The weight is packed in a way in which it is not divided.
    #[error("it is packed ({packing}), and such weights are not divided; leave it whole")]
    Packed {
        /// How it is packed.
        packing: Packing,
    },
    /// A tensor beside a weight cannot be divided as the weight is.
    #[error("its shape is {shape:?}, which cannot be divided as that of `{weight}` is, {of_weight:?}")]
    Beside {
        /// The tensor's shape.
        shape: Vec<u64>,
        /// The weight.
        weight: String,
        /// The weight's shape.
        of_weight: Vec<u64>,
    },
}
