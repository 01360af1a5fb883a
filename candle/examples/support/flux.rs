//! A FLUX.1 over candle-nn with its block loop open. The caller goes through [`Config::steps`] and gets each [`Part`] from
//! wherever its weights are:
//!
//! ```text
//! let mut state = State::new(&config, &inputs)?;
//! let mut x = img;                                          // [batch, image tokens, in_channels]
//! for step in config.steps() {
//!     x = provider(&step.layer)?.forward(&x, &mut state)?;
//! }                                                         // x: the velocity, [batch, image tokens, out_channels]
//! ```
//!
//! The network and its names are Black Forest Labs', src/flux/model.py and src/flux/modules/layers.py.

#![allow(dead_code, reason = "each program uses its part")]

use candle_core::{D, DType, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Linear, VarBuilder, linear, linear_b, ops, rotary_emb};
use serde::Deserialize;

/// The width of a number's sinusoidal embedding.
const SINUSOIDS: usize = 256;
const EPS: f64 = 1e-6;

/// The sizes of a network, by Black Forest Labs' names.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) in_channels: usize,
    pub(crate) out_channels: usize,
    /// The width of the pooled text embedding.
    pub(crate) vec_in_dim: usize,
    /// The width of the text's tokens.
    pub(crate) context_in_dim: usize,
    pub(crate) hidden_size: usize,
    pub(crate) mlp_ratio: f64,
    pub(crate) num_heads: usize,
    /// The number of double blocks.
    pub(crate) depth: usize,
    pub(crate) depth_single_blocks: usize,
    /// How a head's width is shared out to the coordinates of a position.
    pub(crate) axes_dim: Vec<usize>,
    pub(crate) theta: f64,
    pub(crate) qkv_bias: bool,
    pub(crate) guidance_embed: bool,
}

/// A layer's turn in a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The layer's name in the checkpoint's layout.
    pub(crate) layer: String,
}

impl Config {
    /// The sizes of FLUX.1-dev.
    pub(crate) fn dev() -> Config {
        Config {
            in_channels: 64,
            out_channels: 64,
            vec_in_dim: 768,
            context_in_dim: 4096,
            hidden_size: 3072,
            mlp_ratio: 4.0,
            num_heads: 24,
            depth: 19,
            depth_single_blocks: 38,
            axes_dim: vec![16, 56, 56],
            theta: 10_000.0,
            qkv_bias: true,
            guidance_embed: true,
        }
    }

    /// The sizes of FLUX.1-schnell.
    pub(crate) fn schnell() -> Config {
        Config { guidance_embed: false, ..Config::dev() }
    }

    /// The layers of a pass in their order.
    pub(crate) fn steps(&self) -> impl Iterator<Item = Step> + use<> {
        let embedders =
            Embedder::ALL.into_iter().filter(|&embedder| self.guidance_embed || embedder != Embedder::Guidance);
        let halves = |embedder: Embedder| ["in_layer", "out_layer"].map(|half| format!("{}.{half}", embedder.name()));
        let mut names = vec!["img_in".to_owned()];
        names.extend(embedders.flat_map(halves));
        names.push("txt_in".to_owned());
        names.extend((0..self.depth).map(|index| format!("double_blocks.{index}")));
        names.extend((0..self.depth_single_blocks).map(|index| format!("single_blocks.{index}")));
        names.extend(["final_layer.adaLN_modulation.1".to_owned(), "final_layer.linear".to_owned()]);
        names.into_iter().map(|layer| Step { layer })
    }

    fn head_dim(&self) -> usize {
        self.hidden_size.checked_div(self.num_heads).unwrap_or(0)
    }

    fn mlp_size(&self) -> usize {
        (self.hidden_size as f64 * self.mlp_ratio) as usize
    }
}

/// What a step of denoising is given besides the image.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    /// The text's tokens, `[batch, text tokens, context_in_dim]`.
    pub(crate) txt: Tensor,
    /// The positions of the text's and the image's tokens, `[batch, tokens, axes]`.
    pub(crate) txt_ids: Tensor,
    pub(crate) img_ids: Tensor,
    /// How much noise is left, from 1 to 0, `[batch]`.
    pub(crate) timesteps: Tensor,
    /// The pooled text embedding, `[batch, vec_in_dim]`.
    pub(crate) y: Tensor,
    /// The strength of the guidance, `[batch]`, if the network takes one.
    pub(crate) guidance: Option<Tensor>,
}

/// What the parts of a pass leave for those after them. It holds no weights.
#[derive(Debug)]
pub(crate) struct State {
    inputs: Inputs,
    text: Text,
    /// An embedder between its halves.
    half: Option<Tensor>,
    /// The sum of the embedders, which modulates every block.
    vec: Option<Tensor>,
    /// The modulation of the last layer.
    last: Option<Tensor>,
    /// The rotary tables of all tokens, `[batch, tokens, head_dim / 2]` in f32.
    cos: Tensor,
    sin: Tensor,
    /// The norms' scale and shift, which the network does not have.
    one: Tensor,
    zero: Tensor,
}

/// Where the text's tokens are.
#[derive(Debug)]
enum Text {
    /// As it was given.
    Given,
    Apart(Tensor),
    /// So many, before the image's.
    Joined(usize),
}

impl State {
    /// For one pass.
    ///
    /// # Errors
    /// What does not fit together among the inputs and the configuration.
    pub(crate) fn new(config: &Config, inputs: &Inputs) -> Result<State> {
        if config.guidance_embed != inputs.guidance.is_some() {
            let takes = if config.guidance_embed { "takes a" } else { "takes no" };
            bail!("the network {takes} guidance strength");
        }
        let ids = Tensor::cat(&[&inputs.txt_ids, &inputs.img_ids], 1)?.to_dtype(DType::F32)?;
        let angles = angles(config, &ids)?;
        let (dtype, device) = (inputs.txt.dtype(), inputs.txt.device());
        Ok(State {
            inputs: inputs.clone(),
            text: Text::Given,
            half: None,
            vec: None,
            last: None,
            cos: angles.cos()?,
            sin: angles.sin()?,
            one: Tensor::ones(config.hidden_size, dtype, device)?,
            zero: Tensor::zeros(config.hidden_size, dtype, device)?,
        })
    }

    fn vec(&self) -> Result<&Tensor> {
        self.vec.as_ref().ok_or_else(|| early("the embedders"))
    }

    /// The norm over the last dimension, scaled and shifted by rows of a modulation.
    fn modulated(&self, x: &Tensor, shift: &Tensor, scale: &Tensor) -> Result<Tensor> {
        let normed = ops::layer_norm(&x.contiguous()?, &self.one, &self.zero, EPS as f32)?;
        normed.broadcast_mul(&(scale + 1.0)?)?.broadcast_add(shift)
    }
}

fn early(missing: &str) -> candle_core::Error {
    candle_core::Error::msg(format!("a part had its turn before {missing}"))
}

/// The angles by which each token's position turns a head's pairs.
fn angles(config: &Config, ids: &Tensor) -> Result<Tensor> {
    let axes = &config.axes_dim;
    if ids.dim(D::Minus1)? != axes.len() || axes.iter().sum::<usize>() != config.head_dim() {
        bail!("axes {axes:?} of heads {} wide do not fit positions {:?}", config.head_dim(), ids.shape());
    }
    let of_axis = |(axis, &dim): (usize, &usize)| {
        let turns = (0..dim / 2).map(|pair| config.theta.powf(-((2 * pair) as f64) / dim as f64) as f32);
        let turns = Tensor::from_iter(turns, ids.device())?;
        ids.i((.., .., axis))?.unsqueeze(2)?.broadcast_mul(&turns)
    };
    Tensor::cat(&axes.iter().enumerate().map(of_axis).collect::<Result<Vec<_>>>()?, 2)
}

/// A number as 256 sinusoids, `[batch, 256]`.
fn sinusoids(number: &Tensor, dtype: DType) -> Result<Tensor> {
    let half = SINUSOIDS / 2;
    let frequencies = (0..half).map(|at| (-(10_000f64.ln()) * at as f64 / half as f64).exp() as f32);
    let frequencies = Tensor::from_iter(frequencies, number.device())?;
    let angles = (number.to_dtype(DType::F32)? * 1000.0)?.unsqueeze(1)?.broadcast_mul(&frequencies)?;
    Tensor::cat(&[angles.cos()?, angles.sin()?], 1)?.to_dtype(dtype)
}

/// What is embedded and added up to the vector that modulates the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Embedder {
    Time,
    Guidance,
    Pooled,
}

impl Embedder {
    const ALL: [Embedder; 3] = [Embedder::Time, Embedder::Guidance, Embedder::Pooled];

    fn name(self) -> &'static str {
        match self {
            Embedder::Time => "time_in",
            Embedder::Guidance => "guidance_in",
            Embedder::Pooled => "vector_in",
        }
    }

    fn input(self, inputs: &Inputs) -> Result<Tensor> {
        match (self, &inputs.guidance) {
            (Embedder::Time, _) => sinusoids(&inputs.timesteps, inputs.txt.dtype()),
            (Embedder::Guidance, Some(guidance)) => sinusoids(guidance, inputs.txt.dtype()),
            (Embedder::Guidance, None) => bail!("the network takes a guidance strength"),
            (Embedder::Pooled, _) => Ok(inputs.y.clone()),
        }
    }
}

/// A layer of the checkpoint, as a network's part over its weights, which it does not copy.
#[derive(Debug)]
pub(crate) enum Part {
    Image(Linear),
    /// The first and the second half of an embedder.
    EmbedderIn(Embedder, Linear),
    EmbedderOut(Linear),
    Text(Linear),
    Double(Box<DoubleBlock>),
    Single(Box<SingleBlock>),
    LastModulation(Linear),
    Last(Linear),
}

impl Part {
    /// The part for layer `name`. `vb` is at the root of the checkpoint's names.
    ///
    /// # Errors
    /// A name that the network has no layer of, and what `vb` says of tensors and their shapes.
    pub(crate) fn new(config: &Config, name: &str, vb: VarBuilder<'_>) -> Result<Part> {
        let hidden = config.hidden_size;
        let vb = vb.pp(name);
        if let Some(index) = number(name, "double_blocks.")
            && index < config.depth
        {
            return Ok(Part::Double(Box::new(DoubleBlock::new(config, vb)?)));
        }
        if let Some(index) = number(name, "single_blocks.")
            && index < config.depth_single_blocks
        {
            return Ok(Part::Single(Box::new(SingleBlock::new(config, vb)?)));
        }
        match name {
            "img_in" => Ok(Part::Image(linear(config.in_channels, hidden, vb)?)),
            "time_in.in_layer" => Ok(Part::EmbedderIn(Embedder::Time, linear(SINUSOIDS, hidden, vb)?)),
            "guidance_in.in_layer" => Ok(Part::EmbedderIn(Embedder::Guidance, linear(SINUSOIDS, hidden, vb)?)),
            "vector_in.in_layer" => Ok(Part::EmbedderIn(Embedder::Pooled, linear(config.vec_in_dim, hidden, vb)?)),
            "time_in.out_layer" | "guidance_in.out_layer" | "vector_in.out_layer" => {
                Ok(Part::EmbedderOut(linear(hidden, hidden, vb)?))
            }
            "txt_in" => Ok(Part::Text(linear(config.context_in_dim, hidden, vb)?)),
            "final_layer.adaLN_modulation.1" => Ok(Part::LastModulation(linear(hidden, 2 * hidden, vb)?)),
            "final_layer.linear" => Ok(Part::Last(linear(hidden, config.out_channels, vb)?)),
            _ => bail!("a FLUX of {} and {} blocks has no layer `{name}`", config.depth, config.depth_single_blocks),
        }
    }

    /// The layer's turn: `x` is the image's tokens, which the first part takes as they come and the last gives as the velocity.
    /// Parts that do not touch them give them back.
    pub(crate) fn forward(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        match self {
            Part::Image(linear) => return linear.forward(x),
            Part::EmbedderIn(embedder, linear) => {
                state.half = Some(ops::silu(&linear.forward(&embedder.input(&state.inputs)?)?)?);
            }
            Part::EmbedderOut(linear) => {
                let half = state.half.take().ok_or_else(|| early("an embedder's first half"))?;
                let embedded = linear.forward(&half)?;
                state.vec = Some(match &state.vec {
                    Some(vec) => (vec + embedded)?,
                    None => embedded,
                });
            }
            Part::Text(linear) => state.text = Text::Apart(linear.forward(&state.inputs.txt)?),
            Part::Double(block) => return block.forward(x, state),
            Part::Single(block) => return block.forward(&joined(x, state)?, state),
            Part::LastModulation(linear) => state.last = Some(linear.forward(&ops::silu(state.vec()?)?)?.unsqueeze(1)?),
            Part::Last(linear) => {
                let x = match state.text {
                    Text::Joined(tokens) => x.narrow(1, tokens, x.dim(1)? - tokens)?,
                    Text::Given | Text::Apart(_) => x.clone(),
                };
                let modulation = state.last.as_ref().ok_or_else(|| early("the last layer's modulation"))?;
                let [shift, scale] = rows(modulation)?;
                return linear.forward(&state.modulated(&x, &shift, &scale)?);
            }
        }
        Ok(x.clone())
    }
}

/// The number in a block's name.
fn number(name: &str, stack: &str) -> Option<usize> {
    name.strip_prefix(stack)?.parse().ok()
}

/// The text's tokens and the image's in one sequence.
fn joined(x: &Tensor, state: &mut State) -> Result<Tensor> {
    let text = match &state.text {
        Text::Given => return Err(early("the text's embedder")),
        Text::Apart(text) => text,
        Text::Joined(_) => return Ok(x.clone()),
    };
    let (all, tokens) = (Tensor::cat(&[text, x], 1)?, text.dim(1)?);
    state.text = Text::Joined(tokens);
    Ok(all)
}

/// The equal parts of a modulation.
fn rows<const N: usize>(modulation: &Tensor) -> Result<[Tensor; N]> {
    let rows = modulation.chunk(N, D::Minus1)?;
    rows.try_into().map_err(|_| candle_core::Error::msg(format!("a modulation is not {N} rows")))
}

/// The scales of queries and keys, which are divided by their root mean square.
#[derive(Debug)]
struct QkNorm {
    heads: usize,
    query: Tensor,
    key: Tensor,
}

impl QkNorm {
    fn new(config: &Config, vb: VarBuilder<'_>) -> Result<QkNorm> {
        let scale = |name: &str| vb.pp(name).get(config.head_dim(), "scale");
        Ok(QkNorm { heads: config.num_heads, query: scale("query_norm")?, key: scale("key_norm")? })
    }

    /// `[batch, tokens, 3 * width]` as queries, keys and values, `[batch, heads, tokens, head_dim]`.
    fn split(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let (batch, tokens, width) = qkv.dims3()?;
        let qkv = qkv.reshape((batch, tokens, 3, self.heads, width / 3 / self.heads))?;
        let of = |at: usize| qkv.i((.., .., at))?.transpose(1, 2)?.contiguous();
        let q = ops::rms_norm(&of(0)?, &self.query, EPS as f32)?;
        let k = ops::rms_norm(&of(1)?, &self.key, EPS as f32)?;
        Ok([q, k, of(2)?])
    }
}

/// Every token sees every other; `[batch, tokens, width]`.
fn attention([q, k, v]: &[Tensor; 3], state: &State) -> Result<Tensor> {
    let turned = |x: &Tensor| rotary_emb::rope_i(&x.to_dtype(DType::F32)?, &state.cos, &state.sin)?.to_dtype(x.dtype());
    let (q, k) = (turned(q)?, turned(k)?);
    let scale = 1.0 / (q.dim(D::Minus1)? as f64).sqrt();
    let weights = ops::softmax_last_dim(&((q * scale)?.matmul(&k.t()?)?))?;
    weights.matmul(v)?.transpose(1, 2)?.flatten_from(2)
}

/// What the image's tokens and the text's each have in a double block.
#[derive(Debug)]
struct Side {
    modulation: Linear,
    qkv: Linear,
    norm: QkNorm,
    proj: Linear,
    mlp: [Linear; 2],
}

impl Side {
    fn new(config: &Config, side: &str, vb: &VarBuilder<'_>) -> Result<Side> {
        let (hidden, inner) = (config.hidden_size, config.mlp_size());
        let (attention, mlp) = (vb.pp(format!("{side}_attn")), vb.pp(format!("{side}_mlp")));
        Ok(Side {
            modulation: linear(hidden, 6 * hidden, vb.pp(format!("{side}_mod.lin")))?,
            qkv: linear_b(hidden, 3 * hidden, config.qkv_bias, attention.pp("qkv"))?,
            norm: QkNorm::new(config, attention.pp("norm"))?,
            proj: linear(hidden, hidden, attention.pp("proj"))?,
            mlp: [linear(hidden, inner, mlp.pp("0"))?, linear(inner, hidden, mlp.pp("2"))?],
        })
    }

    fn finish(&self, x: &Tensor, mixed: &Tensor, modulation: &[Tensor; 6], state: &State) -> Result<Tensor> {
        let [_, _, gate, shift, scale, mlp_gate] = modulation;
        let x = (x + self.proj.forward(mixed)?.broadcast_mul(gate)?)?;
        let inner = self.mlp[0].forward(&state.modulated(&x, shift, scale)?)?.gelu()?;
        &x + self.mlp[1].forward(&inner)?.broadcast_mul(mlp_gate)?
    }
}

/// A block in which image and text have weights of their own and meet in the attention.
#[derive(Debug)]
pub(crate) struct DoubleBlock {
    img: Side,
    txt: Side,
}

impl DoubleBlock {
    fn new(config: &Config, vb: VarBuilder<'_>) -> Result<DoubleBlock> {
        Ok(DoubleBlock { img: Side::new(config, "img", &vb)?, txt: Side::new(config, "txt", &vb)? })
    }

    fn forward(&self, img: &Tensor, state: &mut State) -> Result<Tensor> {
        let txt = match &state.text {
            Text::Given => return Err(early("the text's embedder")),
            Text::Apart(txt) => txt,
            Text::Joined(_) => bail!("a double block had its turn after a single one"),
        };
        let vec = ops::silu(state.vec()?)?;
        let begin = |side: &Side, x: &Tensor| -> Result<([Tensor; 6], [Tensor; 3])> {
            let modulation: [Tensor; 6] = rows(&side.modulation.forward(&vec)?.unsqueeze(1)?)?;
            let [shift, scale, ..] = &modulation;
            let qkv = side.qkv.forward(&state.modulated(x, shift, scale)?)?;
            Ok((modulation, side.norm.split(&qkv)?))
        };
        let (txt_modulation, [txt_q, txt_k, txt_v]) = begin(&self.txt, txt)?;
        let (img_modulation, [img_q, img_k, img_v]) = begin(&self.img, img)?;
        let [q, k, v] = [(txt_q, img_q), (txt_k, img_k), (txt_v, img_v)].map(|(a, b)| Tensor::cat(&[a, b], 2));
        let mixed = attention(&[q?, k?, v?], state)?;
        let (txt_tokens, img_tokens) = (txt.dim(1)?, img.dim(1)?);
        let img = self.img.finish(img, &mixed.narrow(1, txt_tokens, img_tokens)?, &img_modulation, state)?;
        let txt = self.txt.finish(txt, &mixed.narrow(1, 0, txt_tokens)?, &txt_modulation, state)?;
        state.text = Text::Apart(txt);
        Ok(img)
    }
}

/// A block over image and text in one sequence, with attention and feed-forward network side by side.
#[derive(Debug)]
pub(crate) struct SingleBlock {
    modulation: Linear,
    linear1: Linear,
    linear2: Linear,
    norm: QkNorm,
}

impl SingleBlock {
    fn new(config: &Config, vb: VarBuilder<'_>) -> Result<SingleBlock> {
        let (hidden, inner) = (config.hidden_size, config.mlp_size());
        Ok(SingleBlock {
            modulation: linear(hidden, 3 * hidden, vb.pp("modulation.lin"))?,
            linear1: linear(hidden, 3 * hidden + inner, vb.pp("linear1"))?,
            linear2: linear(hidden + inner, hidden, vb.pp("linear2"))?,
            norm: QkNorm::new(config, vb.pp("norm"))?,
        })
    }

    fn forward(&self, x: &Tensor, state: &State) -> Result<Tensor> {
        let [shift, scale, gate] = rows(&self.modulation.forward(&ops::silu(state.vec()?)?)?.unsqueeze(1)?)?;
        let both = self.linear1.forward(&state.modulated(x, &shift, &scale)?)?;
        let (hidden, all) = (x.dim(D::Minus1)?, both.dim(D::Minus1)?);
        let mixed = attention(&self.norm.split(&both.narrow(D::Minus1, 0, 3 * hidden)?)?, state)?;
        let inner = both.narrow(D::Minus1, 3 * hidden, all - 3 * hidden)?.gelu()?;
        x + self.linear2.forward(&Tensor::cat(&[mixed, inner], D::Minus1)?)?.broadcast_mul(&gate)?
    }
}
