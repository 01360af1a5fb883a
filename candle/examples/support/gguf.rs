//! A Llama's GGUF file: the configuration in its metadata, and its weights as blocks that candle multiplies with.
//!
//! The keys are those of llama.cpp, `gguf-py/gguf/constants.py`, and what they mean is in `src/llama-model.cpp` there.

#![allow(dead_code, reason = "each program uses its part")]

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor, gguf_file};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use serde_json::json;
use tensor_offload::checkpoint::{Gguf, GgufValue};
use tensor_offload::{TensorId, Weights};
use tensor_offload_candle::{LayerWeights, QuantizedWeight};

use super::llama::{Config, Parts, Rows, Table};

/// Reads the configuration of a Llama from its file's metadata, or of a Qwen2, which runs as one.
///
/// # Errors
/// What is missing in the file, or what it asks for that is not here.
pub(crate) fn config(gguf: Gguf<'_>, weights: &Weights) -> Result<Config> {
    let rows = match gguf.architecture() {
        Some("llama") => Rows::Pairs,
        Some("qwen2") => Rows::Halves,
        other => bail!("the file's architecture is `{}`; llama and qwen2 run here", other.unwrap_or("none")),
    };
    let number = |key: &str| gguf.of_architecture(key).and_then(GgufValue::as_u64);
    let needed = |key: &str| match (number(key), gguf.of_architecture(key)) {
        (Some(number), _) => Ok(number),
        (None, Some(_)) => bail!("the file's `{key}` is not one whole number; a Llama of equal layers runs here"),
        (None, None) => bail!("the file's metadata has no `{key}`"),
    };
    let float = |key: &str| gguf.of_architecture(key).and_then(GgufValue::as_f64);
    let (hidden, heads) = (needed("embedding_length")?, needed("attention.head_count")?);
    if number("expert_count").is_some_and(|experts| experts > 0) {
        bail!("the file's model has experts, which are not here");
    }
    let Some(eps) = float("attention.layer_norm_rms_epsilon") else {
        bail!("the file's metadata has no `attention.layer_norm_rms_epsilon`")
    };
    let head_dim = number("attention.key_length").or_else(|| hidden.checked_div(heads)).unwrap_or(0);
    let turned = number("rope.dimension_count").unwrap_or(head_dim);
    if number("attention.value_length").is_some_and(|length| length != head_dim) || turned != head_dim {
        bail!("heads whose values differ in length from their keys, or of which only a part is turned, are not here");
    }
    let scaling = gguf.of_architecture("rope.scaling.type").and_then(GgufValue::as_str);
    let factor = float("rope.scaling.factor").or_else(|| float("rope.scale_linear"));
    let scaling = scaling.or(factor.map(|_| "linear")).filter(|kind| *kind != "none");
    let layout = weights.layout();
    let table = layout.find("token_embd.weight").and_then(|id| layout.tensor(id));
    let Some(&[vocabulary, _]) = table.map(|table| &table.shape[..]) else {
        bail!("the file has no table `token_embd.weight`")
    };
    let text = json!({
        "model_type": gguf.architecture(),
        "hidden_size": hidden,
        "intermediate_size": needed("feed_forward_length")?,
        "num_hidden_layers": needed("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": if gguf.of_architecture("attention.head_count_kv").is_some() {
            needed("attention.head_count_kv")?
        } else {
            heads
        },
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "rms_norm_eps": eps,
        "rope_theta": float("rope.freq_base").unwrap_or(10_000.0),
        "rope_scaling": scaling.map(|kind| json!({ "type": kind, "factor": factor })),
        "rope_factors": rope_factors(weights)?,
        "tie_word_embeddings": layout.find("output.weight").is_none(),
        "sliding_window": number("attention.sliding_window").filter(|window| *window > 0),
    });
    let mut config = Config::parse(&text.to_string())?;
    config.gguf = Some(rows);
    Ok(config)
}

/// By what the angles of rotary positions are divided, in the order of the pairs: how converters store Llama 3's scaling.
fn rope_factors(weights: &Weights) -> Result<Option<Vec<f32>>> {
    let layout = weights.layout();
    let Some(id) = layout.find("rope_freqs.weight") else { return Ok(None) };
    let tensor = tensor(weights, id)?;
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1().map(Some)
}

/// Whether candle's own reader takes the file: it knows no sets of files, and no Q8_K.
pub(crate) fn is_alone(weights: &Weights) -> bool {
    let set = weights.checkpoint().gguf().and_then(|gguf| gguf.get("split.count")).and_then(GgufValue::as_u64);
    let read = |info: &tensor_offload::checkpoint::TensorInfo| info.dtype != tensor_offload::DType::Q8_K;
    set.is_none_or(|files| files <= 1) && weights.layout().tensors().iter().all(read)
}

/// The tokens that end a text.
pub(crate) fn ends(gguf: Gguf<'_>) -> Vec<u32> {
    let keys = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];
    let ids = keys.iter().filter_map(|key| gguf.get(key).and_then(GgufValue::as_u64));
    ids.filter_map(|id| id.try_into().ok()).collect()
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

/// Checks that candle can multiply with all weights.
///
/// # Errors
/// The first tensor that it cannot multiply with, and what would help.
pub(crate) fn check(weights: &Weights) -> Result<()> {
    let other = weights.layout().tensors().iter().find(|info| ggml(info.dtype).is_none());
    match other {
        None => Ok(()),
        Some(info) => bail!(
            "tensor `{}` holds {}, which candle has no products with; cast it with --cast {}=F32",
            info.name,
            info.dtype,
            info.name
        ),
    }
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
