//! A Llama over candle-nn with its block loop open: grouped queries, rotary positions with Llama 3's scaling, a key-value
//! cache, and a head that may be the embedding. The caller goes through [`Config::steps`] and gets each [`Part`] from
//! wherever its weights are:
//!
//! ```text
//! let mut x = ids;                                          // [batch, tokens]
//! for step in config.steps() {
//!     x = provider(&step.layer)?.forward(&x, &mut state)?;
//! }                                                         // x: logits, [batch, tokens, vocabulary]
//! ```
//!
//! The weights are candle's tensors, or in GGML's blocks as GGUF files have them: [`Parts`].
//!
//! The arithmetic is that of transformers, models/llama/modeling_llama.py, and models/qwen3/modeling_qwen3.py for the norms of
//! queries and keys.

#![allow(dead_code, reason = "each program uses its part")]

#[path = "rope.rs"]
mod rope;

use std::fmt;

use candle_core::{DType, Device, Error, Module, Result, Tensor, bail};
use candle_nn::kv_cache::ConcatKvCache;
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder, ops, rotary_emb};
use rope::{Rope, Rotary};
use serde::Deserialize;

const EMBEDDING: &str = "model.embed_tokens";
const BLOCKS: &str = "model.layers.";
const NORM: &str = "model.norm";
const HEAD: &str = "lm_head";

/// What `config.json` says of a Llama, or of a Mistral, Qwen2 or Qwen3 whose attention has no sliding window.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) model_type: String,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: Option<usize>,
    pub(crate) head_dim: Option<usize>,
    pub(crate) vocab_size: usize,
    pub(crate) rms_norm_eps: f64,
    #[serde(default = "silu")]
    pub(crate) hidden_act: String,
    #[serde(default)]
    pub(crate) tie_word_embeddings: bool,
    #[serde(default)]
    pub(crate) attention_bias: bool,
    #[serde(default)]
    pub(crate) mlp_bias: bool,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) use_sliding_window: Option<bool>,
    rope_theta: Option<f32>,
    rope_scaling: Option<Rope>,
    rope_parameters: Option<Rope>,
    /// By what the angle of each pair is divided, in a GGUF file that says so.
    #[serde(skip)]
    pub(crate) rope_factors: Option<Vec<f32>>,
    /// How a GGUF file orders the rows of queries and keys; `None` for a checkpoint in transformers' names and order.
    #[serde(skip)]
    pub(crate) gguf: Option<Rows>,
}

/// The order of the rows of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// The partners of a rotary pair are half a head apart.
    Halves,
    /// The partners stand side by side.
    Pairs,
}

fn silu() -> String {
    "silu".to_owned()
}

/// A layer's turn in a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The layer's name in the checkpoint's layout.
    pub(crate) layer: String,
}

impl Config {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// What is missing in the text, or what it asks for that is not here.
    pub(crate) fn parse(json: &str) -> Result<Config> {
        Config::read(json).map_err(|wrong| Error::msg(format!("config.json: {wrong}")))
    }

    /// [`parse`](Config::parse) of a text that is not in a file.
    pub(crate) fn read(json: &str) -> std::result::Result<Config, String> {
        let config: Config = serde_json::from_str(json).map_err(|error| error.to_string())?;
        if !["llama", "mistral", "qwen2", "qwen3"].contains(&config.model_type.as_str()) {
            let kind = config.model_type;
            return Err(format!("`model_type` is `{kind}`; this is a Llama, and Mistral, Qwen2 and Qwen3 run as one"));
        }
        if config.hidden_act != "silu" {
            return Err(format!("`hidden_act` is `{}`, not `silu`", config.hidden_act));
        }
        if config.sliding_window.is_some() && config.use_sliding_window != Some(false) {
            return Err("attention with a `sliding_window` is not here".to_owned());
        }
        let (heads, kv_heads) = (config.num_attention_heads, config.kv_heads());
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!("{heads} heads cannot share {kv_heads} of keys"));
        }
        if config.head_dim() == 0 || !config.head_dim().is_multiple_of(2) {
            return Err(format!("heads of {} values have no pairs that positions can turn", config.head_dim()));
        }
        config.rotary()?;
        Ok(config)
    }

    /// The layers of a pass in their order. With a tied head the embedding's layer has the last turn too.
    pub(crate) fn steps(&self) -> impl Iterator<Item = Step> + use<> {
        let [embedding, block, norm, head] = match self.gguf {
            None => [EMBEDDING, BLOCKS, NORM, HEAD],
            Some(_) => ["token_embd", "blk.", "output_norm", "output"],
        };
        let head = if self.tie_word_embeddings { embedding } else { head };
        let blocks = (0..self.num_hidden_layers).map(move |index| format!("{block}{index}"));
        let names = std::iter::once(embedding.to_owned()).chain(blocks).chain([norm.to_owned(), head.to_owned()]);
        names.map(|layer| Step { layer })
    }

    pub(crate) fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Whether the queries and keys of each head have norms.
    fn head_norms(&self) -> bool {
        self.model_type == "qwen3"
    }

    /// How positions turn a head's pairs.
    fn rotary(&self) -> std::result::Result<Rotary, String> {
        let rope = self.rope_parameters.clone().or_else(|| self.rope_scaling.clone()).unwrap_or_default();
        let theta = rope.rope_theta.or(self.rope_theta).unwrap_or(10_000.0);
        let mut rotary = rope.rotary(theta, self.head_dim())?;
        if let Some(factors) = &self.rope_factors {
            rotary.angles.iter_mut().zip(factors).for_each(|(angle, factor)| *angle /= factor);
        }
        match rotary.angles.iter().all(|angle| angle.is_finite()) {
            true => Ok(rotary),
            false => Err("the angles of rotary positions are not finite".to_owned()),
        }
    }
}

/// What a sequence leaves behind for its next tokens: each block's keys and values. It holds no weights.
#[derive(Debug)]
pub(crate) struct State {
    caches: Vec<ConcatKvCache>,
    inverse_frequencies: Tensor,
    /// What sines and cosines are multiplied by.
    scale: f64,
    /// The rotary tables and the mask of this pass: from the first block for the others.
    pass: Option<Pass>,
    last_only: bool,
}

#[derive(Clone, Debug)]
struct Pass {
    position: usize,
    tokens: usize,
    cos: Tensor,
    sin: Tensor,
    /// `[tokens, position + tokens]`, 0 or minus infinity; `None` for one token, which sees all.
    mask: Option<Tensor>,
}

impl State {
    /// An empty sequence, or several of one length in a batch.
    pub(crate) fn new(config: &Config, device: &Device) -> Result<State> {
        let Rotary { angles, scale } = config.rotary().map_err(Error::msg)?;
        let inverse_frequencies = Tensor::new(angles, device)?.reshape((1, ()))?;
        let caches = vec![ConcatKvCache::new(2); config.num_hidden_layers];
        Ok(State { caches, inverse_frequencies, scale: scale.into(), pass: None, last_only: false })
    }

    /// Passes give the logits of their last token alone, `[batch, 1, vocabulary]`.
    #[must_use]
    pub(crate) fn last_only(mut self) -> State {
        self.last_only = true;
        self
    }

    /// How many tokens the first block has seen. After a pass that failed half-way, begin again with a new state.
    pub(crate) fn position(&self) -> usize {
        self.caches.first().map_or(0, ConcatKvCache::current_seq_len)
    }

    fn pass(&mut self, position: usize, tokens: usize, dtype: DType) -> Result<Pass> {
        if let Some(pass) = &self.pass
            && (pass.position, pass.tokens, pass.cos.dtype()) == (position, tokens, dtype)
        {
            return Ok(pass.clone());
        }
        let device = self.inverse_frequencies.device();
        let end = position + tokens;
        let positions = Tensor::arange(position as u32, end as u32, device)?.to_dtype(DType::F32)?.reshape(((), 1))?;
        let angles = positions.matmul(&self.inverse_frequencies)?;
        let visible =
            |row: usize| (0..end).map(move |column| if column <= position + row { 0.0 } else { f32::NEG_INFINITY });
        let mask = match tokens {
            1 => None,
            _ => Some(Tensor::from_iter((0..tokens).flat_map(visible), device)?.reshape((tokens, end))?),
        };
        let scaled = |x: Tensor| if self.scale == 1.0 { Ok(x) } else { x * self.scale };
        let (cos, sin) = (scaled(angles.cos()?)?.to_dtype(dtype)?, scaled(angles.sin()?)?.to_dtype(dtype)?);
        Ok(self.pass.insert(Pass { position, tokens, cos, sin, mask }).clone())
    }
}

/// A layer of the checkpoint, as a network's part over its weights, which it does not copy.
pub(crate) enum Part {
    /// Token ids become hidden states; hidden states become logits, where the head is tied.
    Embedding(Embedding),
    /// The same of a table that may be in blocks.
    Table(Box<dyn Table>),
    Block(Box<Block>),
    Norm(Norm),
    Head(Box<dyn Module>),
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Embedding(_) | Part::Table(_) => "Embedding",
            Part::Block(_) => "Block",
            Part::Norm(_) => "Norm",
            Part::Head(_) => "Head",
        })
    }
}

/// A weight whose rows can be looked up.
pub(crate) trait Table: Module {
    /// The rows that ids name, `[…ids, width]`.
    fn rows(&self, ids: &Tensor) -> Result<Tensor>;
}

/// The weights of a layer of a GGUF file by name.
pub(crate) trait Parts {
    /// A weight of products.
    fn weight(&self, name: &str) -> Result<Box<dyn Table>>;
    /// A tensor of floats; `None` if the file has none of this name.
    fn tensor(&self, name: &str) -> Result<Option<Tensor>>;
}

/// A product and what is added to it.
struct Biased {
    weight: Box<dyn Table>,
    bias: Option<Tensor>,
}

impl Module for Biased {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let product = self.weight.forward(x)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(&bias.to_dtype(product.dtype())?),
            None => Ok(product),
        }
    }
}

impl Part {
    /// The part for layer `name`. `vb` is at the root of the checkpoint's names.
    ///
    /// # Errors
    /// A name that a Llama has no layer of, and what `vb` says of tensors and their shapes.
    pub(crate) fn new(config: &Config, name: &str, vb: VarBuilder<'_>) -> Result<Part> {
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let vb = vb.pp(name);
        match name {
            EMBEDDING => Ok(Part::Embedding(candle_nn::embedding(vocabulary, hidden, vb)?)),
            NORM => Ok(Part::Norm(Norm::new(hidden, config.rms_norm_eps, vb)?)),
            HEAD => Ok(Part::Head(Box::new(candle_nn::linear_no_bias(hidden, vocabulary, vb)?))),
            _ => match name.strip_prefix(BLOCKS).and_then(|index| index.parse().ok()) {
                Some(index) if index < config.num_hidden_layers => {
                    Ok(Part::Block(Box::new(Block::new(config, index, vb)?)))
                }
                _ => bail!("a Llama of {} blocks has no layer `{name}`", config.num_hidden_layers),
            },
        }
    }

    /// The part for layer `name` of a GGUF file.
    ///
    /// # Errors
    /// As [`new`](Part::new).
    pub(crate) fn gguf(config: &Config, name: &str, weights: &dyn Parts) -> Result<Part> {
        match name {
            "token_embd" => Ok(Part::Table(weights.weight("token_embd.weight")?)),
            "output_norm" => Ok(Part::Norm(norm(config, "output_norm.weight", weights)?)),
            "output" => Ok(Part::Head(Box::new(Biased { weight: weights.weight("output.weight")?, bias: None }))),
            _ => match name.strip_prefix("blk.").and_then(|index| index.parse().ok()) {
                Some(index) if index < config.num_hidden_layers => {
                    Ok(Part::Block(Box::new(Block::gguf(config, index, weights)?)))
                }
                _ => bail!("a Llama of {} blocks has no layer `{name}`", config.num_hidden_layers),
            },
        }
    }

    /// The layer's turn: from token ids, `[batch, tokens]`, or hidden states, `[batch, tokens, width]`, to hidden states or
    /// logits.
    pub(crate) fn forward(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        match self {
            Part::Embedding(embedding) if x.dtype().is_int() => embedding.forward(x),
            Part::Embedding(embedding) => Linear::new(embedding.embeddings().clone(), None).forward(x),
            Part::Table(table) if x.dtype().is_int() => table.rows(x),
            Part::Table(table) => table.forward(x),
            Part::Block(block) => block.forward(x, state),
            Part::Norm(norm) if state.last_only => norm.forward(&x.narrow(1, x.dim(1)? - 1, 1)?.contiguous()?),
            Part::Norm(norm) => norm.forward(x),
            Part::Head(head) => head.forward(x),
        }
    }
}

/// An RMS norm, of a weight that may be of another type than what it scales.
pub(crate) struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Norm {
    fn new(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Norm> {
        Ok(Norm { weight: vb.get(width, "weight")?, eps })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        RmsNorm::new(self.weight.to_dtype(x.dtype())?, self.eps).forward(x)
    }
}

/// A norm of a GGUF file.
fn norm(config: &Config, name: &str, weights: &dyn Parts) -> Result<Norm> {
    let Some(weight) = weights.tensor(name)? else { bail!("the file has no tensor `{name}`") };
    Ok(Norm { weight, eps: config.rms_norm_eps })
}

/// A decoder block: attention and a gated feed-forward network, each behind a norm and beside a residual connection.
pub(crate) struct Block {
    index: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rows: Rows,
    attention_norm: Norm,
    q: Box<dyn Module>,
    k: Box<dyn Module>,
    v: Box<dyn Module>,
    o: Box<dyn Module>,
    /// The norms of each head's queries and keys.
    head_norms: Option<[Norm; 2]>,
    mlp_norm: Norm,
    gate: Box<dyn Module>,
    up: Box<dyn Module>,
    down: Box<dyn Module>,
}

impl Block {
    fn new(config: &Config, index: usize, vb: VarBuilder<'_>) -> Result<Block> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.rms_norm_eps);
        let (heads, kv_heads, head_dim) = (config.num_attention_heads, config.kv_heads(), config.head_dim());
        let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        // Qwen2 has biases of which its configuration says nothing.
        let linear = |inputs, outputs, bias: bool, vb: VarBuilder<'_>| -> Result<Box<dyn Module>> {
            Ok(Box::new(candle_nn::linear_b(inputs, outputs, bias || vb.contains_tensor("bias"), vb)?))
        };
        let (a, m) = (config.attention_bias, config.mlp_bias);
        let head_norm = |name| Norm::new(head_dim, eps, attention.pp(name));
        Ok(Block {
            index,
            heads,
            kv_heads,
            head_dim,
            rows: Rows::Halves,
            attention_norm: Norm::new(hidden, eps, vb.pp("input_layernorm"))?,
            q: linear(hidden, heads * head_dim, a, attention.pp("q_proj"))?,
            k: linear(hidden, kv_heads * head_dim, a, attention.pp("k_proj"))?,
            v: linear(hidden, kv_heads * head_dim, a, attention.pp("v_proj"))?,
            o: linear(heads * head_dim, hidden, a, attention.pp("o_proj"))?,
            head_norms: if config.head_norms() { Some([head_norm("q_norm")?, head_norm("k_norm")?]) } else { None },
            mlp_norm: Norm::new(hidden, eps, vb.pp("post_attention_layernorm"))?,
            gate: linear(hidden, inner, m, mlp.pp("gate_proj"))?,
            up: linear(hidden, inner, m, mlp.pp("up_proj"))?,
            down: linear(inner, hidden, m, mlp.pp("down_proj"))?,
        })
    }

    /// The names are those of gguf-py, `gguf/constants.py`.
    fn gguf(config: &Config, index: usize, weights: &dyn Parts) -> Result<Block> {
        let linear = |name: &str| -> Result<Box<dyn Module>> {
            let (weight, bias) = (format!("blk.{index}.{name}.weight"), format!("blk.{index}.{name}.bias"));
            Ok(Box::new(Biased { weight: weights.weight(&weight)?, bias: weights.tensor(&bias)? }))
        };
        let norm = |name: &str| norm(config, &format!("blk.{index}.{name}.weight"), weights);
        Ok(Block {
            index,
            heads: config.num_attention_heads,
            kv_heads: config.kv_heads(),
            head_dim: config.head_dim(),
            rows: config.gguf.unwrap_or(Rows::Halves),
            attention_norm: norm("attn_norm")?,
            q: linear("attn_q")?,
            k: linear("attn_k")?,
            v: linear("attn_v")?,
            o: linear("attn_output")?,
            head_norms: if config.head_norms() { Some([norm("attn_q_norm")?, norm("attn_k_norm")?]) } else { None },
            mlp_norm: norm("ffn_norm")?,
            gate: linear("ffn_gate")?,
            up: linear("ffn_up")?,
            down: linear("ffn_down")?,
        })
    }

    fn forward(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        let x = (x + self.attention(&self.attention_norm.forward(x)?, state)?)?;
        let normed = self.mlp_norm.forward(&x)?;
        let inner = (ops::silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?;
        x + self.down.forward(&inner)?
    }

    fn attention(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let split =
            |x: Tensor, heads: usize| x.reshape((batch, tokens, heads, self.head_dim))?.transpose(1, 2)?.contiguous();
        let mut q = split(self.q.forward(x)?, self.heads)?;
        let mut k = split(self.k.forward(x)?, self.kv_heads)?;
        let v = split(self.v.forward(x)?, self.kv_heads)?;
        if let Some([of_q, of_k]) = &self.head_norms {
            (q, k) = (of_q.forward(&q)?, of_k.forward(&k)?);
        }
        let pass = state.pass(state.caches[self.index].current_seq_len(), tokens, x.dtype())?;
        let turned = match self.rows {
            Rows::Halves => rotary_emb::rope,
            Rows::Pairs => rotary_emb::rope_i,
        };
        let (q, k) = (turned(&q, &pass.cos, &pass.sin)?, turned(&k, &pass.cos, &pass.sin)?);
        let (k, v) = state.caches[self.index].append(&k, &v)?;
        // The queries that share keys are rows of one product.
        let group = self.heads / self.kv_heads;
        let q = (q.reshape((batch, self.kv_heads, group * tokens, self.head_dim))? / (self.head_dim as f64).sqrt())?;
        let mut scores = q.matmul(&k.t()?)?.to_dtype(DType::F32)?;
        if let Some(mask) = &pass.mask {
            let apart = scores.reshape((batch, self.kv_heads, group, tokens, ()))?;
            scores = apart.broadcast_add(mask)?.reshape(scores.shape())?;
        }
        let weights = ops::softmax_last_dim(&scores)?.to_dtype(x.dtype())?;
        let mixed = weights.matmul(&v)?.reshape((batch, self.heads, tokens, self.head_dim))?.transpose(1, 2)?;
        self.o.forward(&mixed.reshape((batch, tokens, self.heads * self.head_dim))?)
    }
}
