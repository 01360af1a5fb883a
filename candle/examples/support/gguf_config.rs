//! The configuration in a GGUF file's metadata, and the tensors that it calls for.
//!
//! The keys are those of gguf-py, `gguf/constants.py`; what they mean is in llama.cpp, `src/llama-model.cpp` and `src/models`.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::{DType, Error, Result, bail};
use serde_json::{Value, json};
use tensor_offload::Weights;
use tensor_offload::checkpoint::{Gguf, GgufValue, TensorInfo};

use super::super::llama::{Config, Rows};
use super::tensor;

/// The architectures that run here, and the order of their rows of queries and keys.
const ARCHITECTURES: [(&str, Rows); 3] = [("llama", Rows::Pairs), ("qwen2", Rows::Halves), ("qwen3", Rows::Halves)];

/// The keys of an architecture that are read here.
const READ: [&str; 19] = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "expert_count",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

/// Keys whose value changes nothing of what is computed here.
const INERT: [&str; 4] = ["context_length", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned"];

const CAUSAL: &str = "attention.causal";

/// Keys that change nothing with these values, as those of 0 and false do.
const NEUTRAL: [(&str, f64); 6] = [
    (CAUSAL, 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("logit_scale", 1.0),
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
];

/// Reads the configuration of a Llama from its file's metadata, or of a Qwen2 or Qwen3, which run as one.
///
/// # Errors
/// What is missing in the file, or what it asks for that is not here: keys and tensors that are not known, too.
pub(crate) fn config(gguf: Gguf<'_>, weights: &Weights) -> Result<Config> {
    if let Some(kind) = gguf.get("general.type").and_then(GgufValue::as_str).filter(|kind| *kind != "model") {
        bail!("the file's `general.type` is `{kind}`, not `model`; give the file of the model itself");
    }
    let Some(&(name, rows)) = ARCHITECTURES.iter().find(|(name, _)| gguf.architecture() == Some(name)) else {
        let other = gguf.architecture().unwrap_or("none");
        bail!("the file's architecture is `{other}`; llama, qwen2 and qwen3 run here: give a file of one of these")
    };
    let keys = Keys { gguf, name };
    keys.check()?;
    let text = keys.json(weights)?.to_string();
    let mut config = Config::read(&text).map_err(|wrong| Error::msg(format!("the file's metadata: {wrong}")))?;
    config.gguf = Some(rows);
    config.rope_factors = rope_factors(weights, config.head_dim() / 2)?;
    check_tensors(&config, weights)?;
    Ok(config)
}

/// The metadata of one architecture.
struct Keys<'g> {
    gguf: Gguf<'g>,
    name: &'g str,
}

impl Keys<'_> {
    /// What `config.json` of the same model says.
    fn json(&self, weights: &Weights) -> Result<Value> {
        if let Some(experts) = self.number("expert_count")?.filter(|experts| *experts > 0) {
            bail!("the file's model has {experts} experts, which are not here");
        }
        let (hidden, heads) = (self.needed("embedding_length")?, self.needed("attention.head_count")?);
        let Some(eps) = self.float("attention.layer_norm_rms_epsilon")? else {
            bail!("the file's metadata has no `{}.attention.layer_norm_rms_epsilon`", self.name)
        };
        let head_dim = self.number("attention.key_length")?.or_else(|| hidden.checked_div(heads)).unwrap_or(0);
        let turned = self.number("rope.dimension_count")?.unwrap_or(head_dim);
        if self.number("attention.value_length")?.is_some_and(|length| length != head_dim) || turned != head_dim {
            bail!(
                "heads whose values differ in length from their keys, or of which only a part is turned, are not here"
            );
        }
        let kv_heads = self.number("attention.head_count_kv")?.unwrap_or(heads);
        let layout = weights.layout();
        let rows = |name: &str| match layout.find(name).and_then(|id| layout.tensor(id)).map(|info| &info.shape[..]) {
            Some(&[rows, _]) => Ok(rows),
            Some(shape) => bail!("tensor `{name}` has the shape {shape:?}; it has two dimensions in a {}", self.name),
            None => bail!("the file has no tensor `{name}`; give a file with all of the model"),
        };
        let (vocabulary, outputs) = (rows("token_embd.weight")?, rows("blk.0.attn_q.weight")?);
        if heads.checked_mul(head_dim) != Some(outputs) {
            bail!(
                "tensor `blk.0.attn_q.weight` has {outputs} rows; by the metadata it has {heads} heads of {head_dim}"
            );
        }
        Ok(json!({
            "model_type": self.name,
            "hidden_size": hidden,
            "intermediate_size": self.needed("feed_forward_length")?,
            "num_hidden_layers": self.needed("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocabulary,
            "rms_norm_eps": eps,
            "rope_theta": self.float("rope.freq_base")?.unwrap_or(10_000.0),
            "rope_scaling": self.scaling()?,
            "tie_word_embeddings": layout.find("output.weight").is_none(),
            "sliding_window": self.number("attention.sliding_window")?.filter(|window| *window > 0),
        }))
    }

    /// The scaling of rotary positions. A type without a factor above zero scales nothing, and a factor without a type is
    /// linear, as in llama.cpp.
    fn scaling(&self) -> Result<Value> {
        let factor = match self.float("rope.scaling.factor")? {
            None => self.float("rope.scale_linear")?,
            factor => factor,
        };
        let kind = match (self.text("rope.scaling.type")?.unwrap_or("linear"), factor.filter(|factor| *factor != 0.0)) {
            ("none", _) | ("linear", None) => "default",
            (kind @ ("linear" | "yarn"), Some(_)) => kind,
            ("yarn", None) => bail!("the file's metadata has no `{}.rope.scaling.factor` for `yarn`", self.name),
            (other, _) => bail!("the file scales rotary positions by `{other}`; linear and yarn are here"),
        };
        let trained = match self.number("rope.scaling.original_context_length")? {
            None => self.number("context_length")?,
            trained => trained,
        };
        Ok(json!({
            "type": kind,
            "factor": factor,
            "original_max_position_embeddings": trained,
            "beta_fast": self.float("rope.scaling.yarn_beta_fast")?,
            "beta_slow": self.float("rope.scaling.yarn_beta_slow")?,
            "scale": self.float("rope.scaling.attn_factor")?,
        }))
    }

    /// Checks that no key is passed over that might change what the model computes.
    fn check(&self) -> Result<()> {
        for (key, value) in self.gguf.entries() {
            let Some(own) = key.strip_prefix(self.name).and_then(|rest| rest.strip_prefix('.')) else { continue };
            let number = match value {
                GgufValue::Bool(truth) => Some(f64::from(u8::from(*truth))),
                value => value.as_f64().or_else(|| value.as_u64().map(|number| number as f64)),
            };
            let says = |says: f64| number == Some(says);
            let off = NEUTRAL.iter().any(|(key, neutral)| *key == own && says(*neutral)) || own != CAUSAL && says(0.0);
            if !(off || READ.contains(&own) || INERT.contains(&own)) {
                bail!("the file's `{key}` ({value}) is not known here, and may change what the model computes");
            }
        }
        Ok(())
    }

    fn needed(&self, key: &str) -> Result<u64> {
        match self.number(key)? {
            Some(number) => Ok(number),
            None => bail!("the file's metadata has no `{}.{key}`", self.name),
        }
    }

    /// A whole number, or the one that all elements of an array are.
    fn number(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.gguf.of_architecture(key) else { return Ok(None) };
        if let GgufValue::Array { .. } = value {
            let array = self.gguf.array(&format!("{}.{key}", self.name)).transpose().map_err(Error::wrap)?;
            let mut all = array.as_ref().and_then(|array| array.integers()).into_iter().flatten();
            let first = all.next().and_then(|number| u64::try_from(number).ok());
            return match first.filter(|first| all.all(|number| number == i128::from(*first))) {
                Some(number) => Ok(Some(number)),
                None => {
                    bail!("the file's `{}.{key}` is not one whole number; a model of equal layers runs here", self.name)
                }
            };
        }
        self.value(key, value.as_u64(), "a whole number")
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        let float = |value: &GgufValue| value.as_f64().or_else(|| value.as_u64().map(|number| number as f64));
        self.value(key, self.gguf.of_architecture(key).and_then(float), "a number")
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        self.value(key, self.gguf.of_architecture(key).and_then(GgufValue::as_str), "a text")
    }

    /// What a key's value was read as; `None` if there is no such key.
    fn value<T>(&self, key: &str, read: Option<T>, wanted: &str) -> Result<Option<T>> {
        match self.gguf.of_architecture(key) {
            Some(value) if read.is_none() => bail!("the file's `{}.{key}` is {value}, not {wanted}", self.name),
            _ => Ok(read),
        }
    }
}

/// By what the angles of rotary positions are divided, in the order of the pairs: how converters store Llama 3's scaling.
fn rope_factors(weights: &Weights, pairs: usize) -> Result<Option<Vec<f32>>> {
    let layout = weights.layout();
    let Some(id) = layout.find("rope_freqs.weight") else { return Ok(None) };
    let factors: Vec<f32> = tensor(weights, id)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    if factors.len() != pairs {
        bail!("tensor `rope_freqs.weight` has {} factors for {pairs} pairs of a head", factors.len());
    }
    match factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
        None => Ok(Some(factors)),
        Some(factor) => bail!("tensor `rope_freqs.weight` divides an angle by {factor}"),
    }
}

/// A tensor of a model.
struct Expected {
    shape: Vec<usize>,
    needed: bool,
}

/// Checks that a file has the tensors of its model in their shapes, and none beside them.
fn check_tensors(config: &Config, weights: &Weights) -> Result<()> {
    let layout = weights.layout();
    if config.num_hidden_layers > layout.tensors().len() {
        bail!("the file has {} tensors, too few for {}", layout.tensors().len(), Named(config));
    }
    let expected = expected(config);
    for info in layout.tensors() {
        let shape: Vec<usize> = info.shape.iter().map(|&side| side as usize).collect();
        match expected.get(&info.name) {
            Some(own) if own.shape == shape => {}
            Some(own) => bail!("tensor `{}` has the shape {shape:?}; by the metadata it is {:?}", info.name, own.shape),
            None => bail!("tensor `{}` is of no {} that runs here", info.name, Named(config)),
        }
    }
    match expected.iter().find(|(name, own)| own.needed && layout.find(name).is_none()) {
        None => Ok(()),
        Some((name, _)) => {
            bail!("the file has no tensor `{name}`, which {} needs; download or convert it again", Named(config))
        }
    }
}

/// All tensors that a model may have.
fn expected(config: &Config) -> BTreeMap<String, Expected> {
    let (hidden, inner, vocabulary) = (config.hidden_size, config.intermediate_size, config.vocab_size);
    let (heads, kv_heads, dim) = (config.num_attention_heads, config.kv_heads(), config.head_dim());
    let (qwen2, qwen3) = (config.model_type == "qwen2", config.model_type == "qwen3");
    let mut all = BTreeMap::new();
    let mut add = |name: String, shape: &[usize], needed: bool| {
        all.insert(name, Expected { shape: shape.to_vec(), needed });
    };
    add("token_embd.weight".to_owned(), &[vocabulary, hidden], true);
    add("output_norm.weight".to_owned(), &[hidden], true);
    add("output.weight".to_owned(), &[vocabulary, hidden], false);
    if config.model_type == "llama" {
        add("rope_freqs.weight".to_owned(), &[dim / 2], false);
    }
    for block in 0..config.num_hidden_layers {
        for (name, outputs, inputs) in [
            ("attn_q", heads * dim, hidden),
            ("attn_k", kv_heads.saturating_mul(dim), hidden),
            ("attn_v", kv_heads.saturating_mul(dim), hidden),
            ("attn_output", hidden, heads * dim),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ] {
            // Queries, keys and values of Qwen2 always have a bias.
            let biased = qwen2 && ["attn_q", "attn_k", "attn_v"].contains(&name);
            add(format!("blk.{block}.{name}.weight"), &[outputs, inputs], true);
            add(format!("blk.{block}.{name}.bias"), &[outputs], biased);
        }
        for name in ["attn_norm", "ffn_norm"] {
            add(format!("blk.{block}.{name}.weight"), &[hidden], true);
        }
        for name in ["attn_q_norm", "attn_k_norm"].iter().filter(|_| qwen3) {
            add(format!("blk.{block}.{name}.weight"), &[dim], true);
        }
    }
    all
}

/// A model by its architecture and number of blocks.
struct Named<'c>(&'c Config);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} blocks", self.0.model_type, self.0.num_hidden_layers)
    }
}

/// Whether a tensor is a norm's weight or a bias, of which no product is made.
pub(crate) fn is_vector(info: &TensorInfo) -> bool {
    info.shape.len() == 1
}
