//! Faults of allocation strings and related texts.

use std::ops::Range;

use crate::device::DeviceId;

/// What is wrong with an allocation string, or with a size, a device, a bandwidth or a description of a machine: the texts
/// that allocations are made of and planned against. It quotes what was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocationError {
    /// The text is malformed; `span` is the byte range of the error in `text`.
    #[error("`{text}`: at {}..{}, `{}`: expected {expected}", span.start, span.end, text.get(span.clone()).unwrap_or(""))]
    Syntax {
        /// The whole text.
        text: String,
        /// The offending part.
        span: Range<usize>,
        /// The expected input.
        expected: String,
    },
    /// One allocation string holds entries of two modes.
    #[error("`{first}` is of mode {first_mode} and `{second}` of mode {second_mode}; one allocation holds one mode")]
    MixedModes {
        /// An entry of the first mode.
        first: String,
        /// Its mode.
        first_mode: &'static str,
        /// An entry of the other.
        second: String,
        /// Its mode.
        second_mode: &'static str,
    },
    /// A device occurs twice in one allocation string.
    #[error("{device} has two entries: `{first}` and `{second}`")]
    DuplicateDevice {
        /// The device.
        device: DeviceId,
        /// Its first entry.
        first: String,
        /// Its second entry.
        second: String,
    },
    /// Two entries have a `*`.
    #[error("both {first} and {second} are marked `*`; only one device can take the remainder")]
    MultipleRemainders {
        /// The first device marked.
        first: DeviceId,
        /// The second one.
        second: DeviceId,
    },
    /// The weights of a ratio are all zero.
    #[error("every share of `{text}` is zero, so no device would get anything")]
    ZeroShare {
        /// The allocation string.
        text: String,
    },
}
