//! The ways in which programs pack weights into codes.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::dtype::DType;

/// How the codes of a weight are packed, by the program that writes them so.
///
/// It prints and serialises as its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are those of the programs")]
pub enum Packing {
    BitsAndBytesNf4,
    BitsAndBytesFp4,
    /// Four bits, without the name of the type.
    BitsAndBytes4Bit,
    BitsAndBytesInt8,
    Gptq,
    Awq,
    /// `weight_packed` of compressed-tensors, in integers.
    CompressedTensors,
    Nvfp4,
    Mxfp4,
    /// One integer of eight bits for each value, with a scale.
    Int8,
    TorchAo,
    Quanto,
    SvdQuant,
    Hqq,
    Eetq,
    Aqlm,
    Mlx,
    Marlin,
    Exl2,
    Exl3,
    Vptq,
    QuipSharp,
    /// Codes of a packing that the library does not know.
    Unknown,
}

impl Packing {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Packing::BitsAndBytesNf4 => "bitsandbytes NF4",
            Packing::BitsAndBytesFp4 => "bitsandbytes FP4",
            Packing::BitsAndBytes4Bit => "bitsandbytes 4 bit",
            Packing::BitsAndBytesInt8 => "bitsandbytes int8",
            Packing::Gptq => "GPTQ",
            Packing::Awq => "AWQ",
            Packing::CompressedTensors => "compressed-tensors packed integers",
            Packing::Nvfp4 => "NVFP4",
            Packing::Mxfp4 => "MXFP4",
            Packing::Int8 => "int8",
            Packing::TorchAo => "torchao",
            Packing::Quanto => "quanto",
            Packing::SvdQuant => "SVDQuant (Nunchaku)",
            Packing::Hqq => "HQQ",
            Packing::Eetq => "EETQ",
            Packing::Aqlm => "AQLM",
            Packing::Mlx => "MLX",
            Packing::Marlin => "Marlin",
            Packing::Exl2 => "EXL2",
            Packing::Exl3 => "EXL3",
            Packing::Vptq => "VPTQ",
            Packing::QuipSharp => "QuIP#",
            Packing::Unknown => "codes of an unknown packing",
        }
    }
}

impl Packing {
    /// Whether changed values can be packed so again.
    pub(crate) fn is_written(self) -> bool {
        matches!(self, Packing::BitsAndBytesNf4 | Packing::BitsAndBytesFp4 | Packing::Nvfp4)
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Packing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Why the codes of a packed weight are not understood, or not written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackingFault {
    /// A tensor that belongs to the codes is missing.
    #[error("`{tensor}` is missing")]
    Missing {
        /// Its name.
        tensor: String,
    },
    /// A tensor beside the codes is not one that the packing has, and may change what they stand for.
    #[error("`{tensor}` beside it is not understood")]
    Unknown {
        /// Its name.
        tensor: String,
    },
    /// A tensor has an element type that it cannot have.
    #[error("`{tensor}` has element type {dtype}")]
    BadDType {
        /// Its name.
        tensor: String,
        /// Its type.
        dtype: DType,
    },
    /// A tensor has a shape that does not fit the values.
    #[error("`{tensor}` has shape {found:?} where the values need {wanted:?}")]
    Shape {
        /// Its name.
        tensor: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape of as many elements as are needed.
        wanted: Vec<u64>,
    },
    /// What a file notes about the codes is not understood.
    #[error("`{tensor}` is not understood: {reason}")]
    Note {
        /// The tensor with the note, or the entry of the metadata.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// A number among those that make values of codes cannot be one of them.
    #[error("`{tensor}` holds {value} at {index}")]
    Value {
        /// The tensor.
        tensor: String,
        /// The place in row-major order.
        index: u64,
        /// The number.
        value: String,
    },
    /// A changed value is NaN or infinite, which no codes stand for.
    #[error("its changed value {index} is {value}, which cannot be packed")]
    NotFinite {
        /// The place in row-major order.
        index: u64,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// Such a weight cannot be packed again at all.
    #[error("only bitsandbytes NF4 and FP4 and NVFP4 can be packed again")]
    NotWritten,
}
