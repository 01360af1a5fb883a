//! GGUF files: how their rows are ordered compared with transformers', and adapters in them.
//!
//! llama.cpp's converter (`conversion/`, one file for each family) renames the tensors of transformers' checkpoints and changes
//! some of them. The architectures here are those whose converters were read: each leaves the weights as they are, but for the
//! rows of queries and keys where it says so, and norms, to which Gemma's adds one. Experts are stacked.

use super::names::rows::RotaryRows;
use crate::checkpoint::{Gguf, GgufValue};
use crate::error::AdapterFault;

/// Architectures in whose files the partners of a rotary pair stand side by side (`LlamaModel.permute`).
const PAIRED: [&str; 3] = ["llama", "mistral3", "arcee"];

/// Architectures in whose files all rows are in transformers' order.
const SAME: [&str; 18] = [
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen3moe",
    "qwen3vl",
    "qwen3vlmoe",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma-embedding",
    "phi3",
    "phimoe",
    "olmo2",
    "olmoe",
    "seed_oss",
    "command-r",
    "cohere2",
];

/// The names of llama.cpp for modules outside the blocks.
const OUTSIDE: [&str; 3] = ["token_embd", "output_norm", "output"];

/// How a file orders the rows of queries and keys; `None` where that is not known.
pub(super) fn rotary_rows(gguf: Gguf<'_>) -> Option<RotaryRows> {
    let architecture = gguf.architecture()?;
    if SAME.contains(&architecture) {
        return Some(RotaryRows::Same);
    }
    let heads = PAIRED.contains(&architecture).then(|| heads(gguf, "attention.head_count"))??;
    let kv_heads = match gguf.of_architecture("attention.head_count_kv") {
        None => heads,
        Some(_) => self::heads(gguf, "attention.head_count_kv")?,
    };
    Some(RotaryRows::Paired { heads, kv_heads })
}

/// A number of heads. Files may have one for each layer; they have to be equal.
fn heads(gguf: Gguf<'_>, key: &str) -> Option<usize> {
    let value = gguf.of_architecture(key)?;
    if let Some(heads) = value.as_u64() {
        return heads.try_into().ok();
    }
    let array = gguf.array(&format!("{}.{key}", gguf.architecture()?))?.ok()?;
    let mut layers = array.integers()?;
    let first = layers.next()?;
    layers.all(|heads| heads == first).then(|| first.try_into().ok())?
}

/// Whether a file's norms are those of transformers.
pub(super) fn keeps_norms(gguf: Gguf<'_>) -> bool {
    gguf.architecture().is_some_and(|name| is_known(name) && !name.starts_with("gemma"))
}

/// Whether it is known what the conversion to an architecture changes.
fn is_known(architecture: &str) -> bool {
    PAIRED.contains(&architecture) || SAME.contains(&architecture)
}

/// The fault of an adapter's file for models of another architecture, whose modules may have the same names (llama.cpp,
/// `src/llama-adapter.cpp`). Nothing is known of a file that names none.
pub(super) fn other_architecture(model: Option<Gguf<'_>>, adapter: Option<Gguf<'_>>) -> Option<AdapterFault> {
    let [model, adapter] = [model?.architecture()?, adapter?.architecture()?].map(str::to_owned);
    (model != adapter).then_some(AdapterFault::OtherArchitecture { adapter, model })
}

/// The fault of the name that a module of a file, whose conversion is not known, has in transformers.
pub(super) fn unknown_conversion(gguf: Gguf<'_>, name: &str, module: &str) -> Option<AdapterFault> {
    let of_llama_cpp = module.starts_with("blk.") || OUTSIDE.contains(&module);
    let flat = |text: &str| text.replace('.', "_");
    if !of_llama_cpp || flat(name).ends_with(&flat(module)) {
        return None;
    }
    let architecture = gguf.architecture().unwrap_or("none");
    let known = is_known(architecture);
    let (target, architecture) = (module.to_owned(), architecture.to_owned());
    (!known).then_some(AdapterFault::UnknownConversion { target, architecture })
}

/// What the file of an adapter says of its alpha; `None` if it says nothing, or zero, which is none (llama.cpp,
/// `src/llama-adapter.h`).
///
/// # Errors
/// [`AdapterFault::Metadata`] for a file of a model, [`AdapterFault::Unsupported`] for other kinds than LoRA.
pub(super) fn alpha(gguf: Gguf<'_>) -> Result<Option<f64>, AdapterFault> {
    let text = |key: &str| gguf.get(key).and_then(GgufValue::as_str);
    if let Some(kind) = text("general.type").filter(|kind| *kind != "adapter") {
        let reason = format!("general.type is `{kind}`, so this is no adapter; open it with Checkpoint::open");
        return Err(AdapterFault::Metadata { reason });
    }
    if let Some(kind) = text("adapter.type").filter(|kind| *kind != "lora") {
        return Err(AdapterFault::Unsupported { kind: kind.to_owned() });
    }
    if gguf.get("adapter.alora.invocation_tokens").is_some() {
        return Err(AdapterFault::Unsupported { kind: "activated LoRA".to_owned() });
    }
    let Some(value) = gguf.get("adapter.lora.alpha") else { return Ok(None) };
    let alpha = value.as_f64().filter(|alpha| alpha.is_finite());
    let wrong =
        || AdapterFault::Metadata { reason: format!("adapter.lora.alpha is {value}, no finite floating-point number") };
    alpha.map(|alpha| (alpha != 0.0).then_some(alpha)).ok_or_else(wrong)
}
