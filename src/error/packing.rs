//! The ways in which programs pack weights into codes.

use std::fmt;

use serde::{Serialize, Serializer};

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
