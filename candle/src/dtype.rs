//! Element types of the library and of candle.

use candle_core::DType;
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
