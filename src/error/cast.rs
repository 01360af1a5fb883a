//! Why a tensor cannot be cast to another element type.

use super::{AdapterFault, Packing};
use crate::dtype::DType;

/// Why a tensor cannot be cast.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CastFault {
    /// Nothing is cast to this type.
    #[error("tensors are cast to F32, F16, BF16, F8_E4M3 and F8_E5M2")]
    Target,
    /// The tensor is of a type that is not cast: of integers or codes, or of values that f32 does not hold.
    #[error("it is of {dtype}; tensors of F32, F16, BF16, F8_E4M3, F8_E5M2 and blocks of GGML are cast")]
    Source {
        /// The tensor's type.
        dtype: DType,
    },
    /// The tensor holds codes that a scale beside it makes values of.
    #[error("its values are codes times the scale `{scale}`, so a cast of the codes alone gives others; leave it out")]
    Scaled {
        /// The scale.
        scale: String,
    },
    /// The tensor holds codes of eight bits, and what makes values of them is not understood.
    #[error("{0}")]
    Codes(AdapterFault),
    /// The tensor holds the codes of a packed weight.
    #[error(
        "it is packed ({packing}{}), and its elements are no values; leave it out",
        sign.as_ref().map_or(String::new(), |sign| format!(", by `{sign}`"))
    )]
    Packed {
        /// How it is packed.
        packing: Packing,
        /// The tensor beside it that shows this.
        sign: Option<String>,
    },
    /// The tensor says what the codes of a weight stand for; what unpacks the weight wants it as it is.
    #[error("`{weight}` holds codes, and needs it as it is; leave it out")]
    OfCodes {
        /// The weight.
        weight: String,
    },
    /// The tensor's bytes are those of another tensor, of another type.
    #[error("its bytes are those of `{other}` too, which is of {dtype}")]
    SharedBytes {
        /// The other tensor.
        other: String,
        /// The other tensor's type.
        dtype: DType,
    },
}
