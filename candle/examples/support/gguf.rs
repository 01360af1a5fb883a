//! A Llama's GGUF file: the configuration in its metadata, and its weights as blocks that candle multiplies with.

#![allow(dead_code, reason = "each program uses its part")]

#[path = "gguf_config.rs"]
mod config;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor, gguf_file};
use candle_core::{Device, Error, Result, Tensor, bail};
pub(crate) use config::config;
use tensor_offload::checkpoint::GgufValue;
use tensor_offload::{TensorId, Weights};
use tensor_offload_candle::{LayerWeights, QuantizedWeight};

use super::llama::{Parts, Table};

/// Whether candle's own reader takes the file: it knows no sets of files, and no Q8_K.
pub(crate) fn is_alone(weights: &Weights) -> bool {
    let set = weights.checkpoint().gguf().and_then(|gguf| gguf.get("split.count")).and_then(GgufValue::as_u64);
    let read = |info: &tensor_offload::checkpoint::TensorInfo| info.dtype != tensor_offload::DType::Q8_K;
    set.is_none_or(|files| files <= 1) && weights.layout().tensors().iter().all(read)
}

/// Weights over slots.
pub(crate) struct Streamed<'w>(pub(crate) &'w LayerWeights);

impl Parts for Streamed<'_> {
    fn weight(&self, name: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(self.0.quantized(name)?))
    }

    fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        if self.0.contains(name) { Ok(Some(self.0.tensor(name)?)) } else { Ok(None) }
    }
}

impl Table for QuantizedWeight {
    fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        self.embedding(ids)
    }
}

/// Weights in memory of candle's own.
#[derive(Default)]
pub(crate) struct Owned(HashMap<String, Arc<QTensor>>);

impl Owned {
    /// All tensors of a file, as candle reads it.
    pub(crate) fn open(file: &Path) -> Result<Owned> {
        let mut reader = File::open(file)?;
        let content = gguf_file::Content::read(&mut reader)?;
        let names: Vec<String> = content.tensor_infos.keys().cloned().collect();
        let tensor = |name: String| Ok((name.clone(), Arc::new(content.tensor(&mut reader, &name, &Device::Cpu)?)));
        Ok(Owned(names.into_iter().map(tensor).collect::<Result<_>>()?))
    }

    /// Tensors of a checkpoint, merged.
    pub(crate) fn read(weights: &Weights, tensors: impl IntoIterator<Item = TensorId>) -> Result<Owned> {
        let quantized = |id: TensorId| {
            let name = weights.layout().tensor(id).map(|info| info.name.clone()).unwrap_or_default();
            Ok((name, Arc::new(quantized(weights, id)?)))
        };
        Ok(Owned(tensors.into_iter().map(quantized).collect::<Result<_>>()?))
    }
}

impl Parts for Owned {
    fn weight(&self, name: &str) -> Result<Box<dyn Table>> {
        let Some(tensor) = self.0.get(name) else { bail!("the file has no tensor `{name}`") };
        Ok(Box::new(QMatMul::from_arc(Arc::clone(tensor))?))
    }

    fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        self.0.get(name).map(|tensor| tensor.dequantize(&Device::Cpu)).transpose()
    }
}

/// Weights as floats in memory of candle's own, on any device.
pub(crate) struct Values(pub(crate) HashMap<String, Tensor>);

impl Parts for Values {
    fn weight(&self, name: &str) -> Result<Box<dyn Table>> {
        let Some(tensor) = self.0.get(name) else { bail!("the file has no tensor `{name}`") };
        Ok(Box::new(QMatMul::Tensor(tensor.to_dtype(candle_core::DType::F32)?)))
    }

    fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        Ok(self.0.get(name).cloned())
    }
}

impl Table for QMatMul {
    fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        self.embedding(ids)
    }
}

/// A tensor of candle's own, with the bytes of a checkpoint's.
fn quantized(weights: &Weights, id: TensorId) -> Result<QTensor> {
    let info = weights.layout().tensor(id).ok_or_else(|| Error::msg("a tensor of another layout"))?;
    let Some(dtype) = ggml(info.dtype) else {
        bail!("tensor `{}` holds {}, which candle has no products with; cast it with --cast F32", info.name, info.dtype)
    };
    // Candle wants the bytes aligned as its blocks are, by four at most.
    let mut bytes = vec![0_u8; info.bytes as usize + 3];
    let start = bytes.as_ptr().align_offset(4).min(3);
    let bytes = &mut bytes[start..start + info.bytes as usize];
    weights.read(id, bytes).map_err(Error::wrap)?;
    let shape: Vec<usize> = info.shape.iter().map(|&dim| dim as usize).collect();
    QTensor::new(QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype)?, shape)
}

/// The values of a tensor of a checkpoint.
fn tensor(weights: &Weights, id: TensorId) -> Result<Tensor> {
    quantized(weights, id)?.dequantize(&Device::Cpu)
}

/// Checks that candle can compute with all weights: products with blocks and floats, and norms and biases
/// of floats.
///
/// # Errors
/// The first tensor that it cannot compute with, and what would help.
pub(crate) fn check(weights: &Weights) -> Result<()> {
    for info in weights.layout().tensors() {
        let (name, stored) = (&info.name, info.dtype);
        if ggml(stored).is_none() {
            bail!("tensor `{name}` holds {stored}, which candle has no products with; cast it with --cast {name}=F32");
        }
        if config::is_vector(info) && stored.is_ggml_block() {
            bail!("tensor `{name}` holds {stored}; norms and biases are floats here: cast it with --cast {name}=F32");
        }
    }
    Ok(())
}

/// Candle's type of the blocks or floats of a file; `None` for those that it has no products with.
fn ggml(dtype: tensor_offload::DType) -> Option<GgmlDType> {
    use tensor_offload::DType;
    Some(match dtype {
        DType::F32 => GgmlDType::F32,
        DType::F16 => GgmlDType::F16,
        DType::BF16 => GgmlDType::BF16,
        DType::Q4_0 => GgmlDType::Q4_0,
        DType::Q4_1 => GgmlDType::Q4_1,
        DType::Q5_0 => GgmlDType::Q5_0,
        DType::Q5_1 => GgmlDType::Q5_1,
        DType::Q8_0 => GgmlDType::Q8_0,
        DType::Q2_K => GgmlDType::Q2K,
        DType::Q3_K => GgmlDType::Q3K,
        DType::Q4_K => GgmlDType::Q4K,
        DType::Q5_K => GgmlDType::Q5K,
        DType::Q6_K => GgmlDType::Q6K,
        DType::Q8_K => GgmlDType::Q8K,
        _ => return None,
    })
}
