//! The library's tensors as candle's, without a copy.

use std::ops::Range;

use candle_core::{Device, Tensor};
use tensor_offload::backend::MemoryBlock;
use tensor_offload::checkpoint::TensorInfo;

use crate::cpu::CpuTensor;
use crate::dtype;
use crate::error::{Error, Result};

/// A tensor of the library at a byte range of an allocation that is candle's. One of GGML's blocks has one dimension, of bytes.
pub(crate) fn view(info: &TensorInfo, block: &MemoryBlock, range: &Range<usize>) -> Result<Tensor> {
    let not_of_candle = || Error::NotOfCandle { tensor: info.name.clone() };
    let whole = whole(block).ok_or_else(not_of_candle)?;
    let size = whole.dtype().size_in_bytes();
    let dims = if info.dtype.is_ggml_block() { vec![info.bytes as usize] } else { dims(info) };
    let count: usize = dims.iter().product();
    let inside = range.start.is_multiple_of(size) && range.len() == count * size;
    if !inside || Some(whole.dtype()) != dtype::held(info.dtype) {
        return Err(not_of_candle());
    }
    Ok(whole.narrow(0, range.start / size, count)?.reshape(dims)?)
}

/// Candle's tensor that an allocation is, of one dimension; `None` if it is none of candle's.
fn whole(block: &MemoryBlock) -> Option<&Tensor> {
    let on_cpu = block.downcast::<CpuTensor>().map(CpuTensor::tensor);
    #[cfg(feature = "cuda")]
    let on_cpu = on_cpu.or_else(|| crate::cuda::tensor(block));
    on_cpu
}

/// A tensor without elements, which has no memory.
pub(crate) fn empty(info: &TensorInfo, device: &Device) -> Result<Tensor> {
    let dtype = dtype::held(info.dtype).ok_or_else(|| Error::NotOfCandle { tensor: info.name.clone() })?;
    Ok(Tensor::zeros(dims(info), dtype, device)?)
}

/// A tensor's shape in candle's terms.
pub(crate) fn dims(info: &TensorInfo) -> Vec<usize> {
    info.shape.iter().map(|&dim| dim as usize).collect()
}
