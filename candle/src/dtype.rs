//! Element types of the library and of candle.

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use tensor_offload::DType as Stored;

/// Candle's type of these elements; `None` for types that its tensors do not compute with.
pub(crate) fn of(stored: Stored) -> Option<DType> {
    Some(match stored {
        Stored::U8 => DType::U8,
        Stored::U32 => DType::U32,
        Stored::I16 => DType::I16,
        Stored::I32 => DType::I32,
        Stored::I64 => DType::I64,
        Stored::BF16 => DType::BF16,
        Stored::F16 => DType::F16,
        Stored::F32 => DType::F32,
        Stored::F64 => DType::F64,
        Stored::F8E4M3 => DType::F8E4M3,
        _ => return None,
    })
}

/// Candle's type of these blocks of GGML; `None` for other types, and for blocks that candle has no products with. Q8_1 is what
/// activations become in products with other blocks, and no type of weights.
pub(crate) fn blocks(stored: Stored) -> Option<GgmlDType> {
    Some(match stored {
        Stored::Q4_0 => GgmlDType::Q4_0,
        Stored::Q4_1 => GgmlDType::Q4_1,
        Stored::Q5_0 => GgmlDType::Q5_0,
        Stored::Q5_1 => GgmlDType::Q5_1,
        Stored::Q8_0 => GgmlDType::Q8_0,
        Stored::Q2_K => GgmlDType::Q2K,
        Stored::Q3_K => GgmlDType::Q3K,
        Stored::Q4_K => GgmlDType::Q4K,
        Stored::Q5_K => GgmlDType::Q5K,
        Stored::Q6_K => GgmlDType::Q6K,
        Stored::Q8_K => GgmlDType::Q8K,
        _ => return None,
    })
}

/// Candle's type of the elements that hold a type's bytes: of its own elements, or of single bytes for blocks.
pub(crate) fn held(stored: Stored) -> Option<DType> {
    of(stored).or_else(|| blocks(stored).map(|_| DType::U8))
}
