//! Writes a checkpoint of random weights for trials, with Llama's names and shapes, and a LoRA adapter for it.
//! The same options give the same bytes; no more than one piece of a tensor is held at a time.
//!
//! ```text
//! cargo run --release --example generate -- /tmp/model --size 2gb --shards 3 --lora /tmp/lora --rank 16
//! ```

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use half::{bf16, f16};
use serde_json::{Value, json};
use tensor_offload::checkpoint::{Checkpoint, TensorSpec, TensorWriter, write_safetensors};
use tensor_offload::{ByteSize, DType, Error, Result};

/// Write a checkpoint of random weights.
#[derive(Parser)]
struct Generate {
    /// A .safetensors file, or a folder for the file or the shards and their index.
    out: PathBuf,
    /// The approximate size of the model, for example 2gb; sets what --hidden and --layers leave open.
    #[arg(long, default_value = "64mb")]
    size: ByteSize,
    /// How many layers.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    layers: Option<u64>,
    /// The width of the hidden state, a multiple of 64.
    #[arg(long, value_parser = clap::value_parser!(u64).range(64..=65_536))]
    hidden: Option<u64>,
    /// The number of tokens; by default eight times the hidden width, at most 32,000.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    vocab: Option<u64>,
    /// The element type.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Float,
    /// Another seed gives other weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many files the model is cut into.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    shards: u64,
    /// Write a LoRA adapter too: a .safetensors file, or a folder as PEFT saves it.
    #[arg(long)]
    lora: Option<PathBuf>,
    /// The adapter's rank.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4_096))]
    rank: u64,
    /// Print one JSON value instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Float {
    Bf16,
    F16,
    F32,
}

impl Float {
    fn dtype(self) -> DType {
        match self {
            Float::Bf16 => DType::BF16,
            Float::F16 => DType::F16,
            Float::F32 => DType::F32,
        }
    }
}

fn main() {
    support::main::<Generate>()
}

impl support::Example for Generate {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let shape = Shape::of(&self)?;
        let tensors = shape.tensors();
        self.write_model(&shape, &tensors)?;
        if let Some(path) = &self.lora {
            self.write_lora(path, &shape)?;
        }
        // Opened again, so that what a folder held before cannot be mistaken for the model.
        let bytes = Checkpoint::open(&self.out)?.layout().bytes();
        let Shape { layers, hidden, .. } = shape;
        if !self.json {
            let (out, size, dtype) = (self.out.display(), ByteSize(bytes).human(), self.dtype.dtype());
            println!("{out}: {size} of {dtype}, {layers} layers of width {hidden}, {} tensors", tensors.len());
            if let Some(path) = &self.lora {
                println!("{}: a LoRA adapter of rank {}", path.display(), self.rank);
            }
        }
        // As text, whatever the path.
        let (model, lora) = (text(&self.out), self.lora.as_ref().map(text));
        Ok(json!({
            "model": model, "bytes": bytes, "tensors": tensors.len(), "layers": layers, "hidden": hidden, "lora": lora,
        }))
    }
}

/// A path as text; characters that are not Unicode are replaced.
fn text(path: impl AsRef<Path>) -> String {
    path.as_ref().display().to_string()
}

/// The sizes that all shapes follow from.
struct Shape {
    layers: u64,
    hidden: u64,
    /// The width of keys and values: a quarter of the heads.
    kv: u64,
    intermediate: u64,
    vocab: u64,
    dtype: DType,
}

const HEAD: u64 = 64;

impl Shape {
    /// The shape that the options ask for; what they leave open comes as near to the size as whole layers do.
    fn of(options: &Generate) -> Result<Shape> {
        let size = options.size.get();
        let by_size = match size >> 20 {
            0..4 => 64,
            4..32 => 256,
            32..256 => 512,
            256..1024 => 1024,
            1024..8192 => 2048,
            8192..32768 => 4096,
            _ => 8192,
        };
        let hidden = options.hidden.unwrap_or(by_size);
        if !hidden.is_multiple_of(HEAD) {
            return Err(invalid(format!("the hidden width is a multiple of {HEAD}, which {hidden} is not")));
        }
        let vocab = options.vocab.unwrap_or((8 * hidden).min(32_000));
        let intermediate = (hidden * 8).div_ceil(3).next_multiple_of(HEAD);
        let kv = (hidden / HEAD / 4).max(1) * HEAD;
        let mut shape = Shape { layers: 0, hidden, kv, intermediate, vocab, dtype: options.dtype.dtype() };
        let around = shape.bytes();
        shape.layers = 1;
        let layer = shape.bytes() - around;
        let by_size = ((size.saturating_sub(around) + layer / 2) / layer).clamp(1, 10_000);
        shape.layers = options.layers.unwrap_or(by_size);
        Ok(shape)
    }

    /// The linear modules of one layer: name, outputs, inputs.
    fn linears(&self) -> [(&'static str, u64, u64); 7] {
        let Shape { hidden, kv, intermediate, .. } = *self;
        [
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ]
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let tensor = |name: String, shape: Vec<u64>| TensorSpec::new(name, self.dtype, shape);
        let mut tensors = vec![tensor("model.embed_tokens.weight".into(), vec![self.vocab, self.hidden])];
        for layer in 0..self.layers {
            for (linear, outputs, inputs) in self.linears() {
                tensors.push(tensor(format!("model.layers.{layer}.{linear}.weight"), vec![outputs, inputs]));
            }
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.push(tensor(format!("model.layers.{layer}.{norm}.weight"), vec![self.hidden]));
            }
        }
        tensors.push(tensor("model.norm.weight".into(), vec![self.hidden]));
        tensors.push(tensor("lm_head.weight".into(), vec![self.vocab, self.hidden]));
        tensors
    }

    fn bytes(&self) -> u64 {
        self.tensors().iter().map(bytes).sum()
    }

    /// `config.json` as the model would have it.
    fn config(&self) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden / HEAD, "num_key_value_heads": self.kv / HEAD, "head_dim": HEAD,
            "vocab_size": self.vocab, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        })
    }
}

impl Generate {
    fn write_model(&self, shape: &Shape, tensors: &[TensorSpec]) -> Result<()> {
        if is_file_name(&self.out) {
            if self.shards > 1 {
                return Err(invalid(format!("{} shards need a folder to lie in", self.shards)));
            }
            return self.write(&self.out, tensors);
        }
        let shards = cut(tensors, self.shards as usize)?;
        create_folder(&self.out)?;
        write_json(&self.out.join("config.json"), &shape.config())?;
        if self.shards == 1 {
            return self.write(&self.out.join("model.safetensors"), tensors);
        }
        let mut weight_map = BTreeMap::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
            self.write(&self.out.join(&name), shard)?;
            weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone())));
        }
        let index = json!({ "metadata": { "total_size": shape.bytes() }, "weight_map": weight_map });
        write_json(&self.out.join("model.safetensors.index.json"), &index)
    }

    /// An adapter on every linear module, of alpha equal to the rank.
    fn write_lora(&self, path: &Path, shape: &Shape) -> Result<()> {
        let peft = !is_file_name(path);
        let (prefix, rank) = (if peft { "base_model.model." } else { "" }, self.rank);
        let mut tensors = Vec::new();
        for layer in 0..shape.layers {
            for (linear, outputs, inputs) in shape.linears() {
                let module = format!("{prefix}model.layers.{layer}.{linear}");
                tensors.push(TensorSpec::new(format!("{module}.lora_A.weight"), DType::F32, [rank, inputs]));
                tensors.push(TensorSpec::new(format!("{module}.lora_B.weight"), DType::F32, [outputs, rank]));
            }
        }
        if !peft {
            return self.write(path, &tensors);
        }
        create_folder(path)?;
        self.write(&path.join("adapter_model.safetensors"), &tensors)?;
        let targets = shape.linears().map(|(name, ..)| name.rsplit('.').next());
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": text(&self.out), "bias": "none",
            "fan_in_fan_out": false, "r": rank, "lora_alpha": rank, "target_modules": targets,
        });
        write_json(&path.join("adapter_config.json"), &config)
    }

    fn write(&self, path: &Path, tensors: &[TensorSpec]) -> Result<()> {
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        write_safetensors(path, tensors, &metadata, |index, out| {
            let tensor = &tensors[index];
            let mut random = Random::of(self.seed, &tensor.name);
            // A norm's weights lie around one.
            let mean = if tensor.shape.len() == 1 { 1.0 } else { 0.0 };
            match tensor.dtype {
                DType::BF16 => fill(out, || bf16::from_f32(mean + random.weight()).to_le_bytes()),
                DType::F16 => fill(out, || f16::from_f32(mean + random.weight()).to_le_bytes()),
                _ => fill(out, || (mean + random.weight()).to_le_bytes()),
            }
        })
    }
}

/// Writes elements until the tensor is full, a piece at a time.
fn fill<const BYTES: usize>(out: &mut TensorWriter<'_>, mut element: impl FnMut() -> [u8; BYTES]) -> Result<()> {
    let mut piece = [[0; BYTES]; 1 << 12];
    while out.left() > 0 {
        let elements = (out.left() / BYTES as u64).min(piece.len() as u64) as usize;
        piece[..elements].fill_with(&mut element);
        out.put(piece[..elements].as_flattened())?;
    }
    Ok(())
}

/// The generator splitmix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    /// Each tensor has its own sequence, so that its bytes do not depend on the others or on the shards.
    fn of(seed: u64, name: &str) -> Random {
        let mut random = Random(seed);
        for byte in name.bytes() {
            random.0 = random.next() ^ u64::from(byte);
        }
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// About normal around zero with a deviation of 0.02, as models are initialised: the sum of four even numbers.
    fn weight(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
        // Four numbers of 0..65536 have the mean 131,070 and the deviation 65,536 / sqrt(3).
        (sum as f32 - 131_070.0) * (0.02 * 3f32.sqrt() / 65_536.0)
    }
}

/// Cuts the tensors into `count` runs of about equal bytes, none empty.
fn cut(tensors: &[TensorSpec], count: usize) -> Result<Vec<&[TensorSpec]>> {
    if count > tensors.len() {
        return Err(invalid(format!("{} tensors cannot fill {count} shards", tensors.len())));
    }
    let total: u64 = tensors.iter().map(bytes).sum();
    let (mut shards, mut rest, mut done) = (Vec::new(), tensors, 0);
    for shard in 1..=count {
        let goal = total / count as u64 * shard as u64;
        // Each of the shards to come takes one tensor at least.
        let most = rest.len() - (count - shard);
        let mut taken = 0;
        while taken < most && (taken == 0 || shard == count || done < goal) {
            done += bytes(&rest[taken]);
            taken += 1;
        }
        let (head, tail) = rest.split_at(taken);
        shards.push(head);
        rest = tail;
    }
    Ok(shards)
}

fn bytes(tensor: &TensorSpec) -> u64 {
    tensor.dtype.bytes_of(&tensor.shape).unwrap_or(0)
}

fn is_file_name(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "safetensors")
}

fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|source| Error::Io { path: path.to_owned(), action: "create", source })
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = format!("{value:#}\n");
    fs::write(path, text).map_err(|source| Error::Io { path: path.to_owned(), action: "write", source })
}

fn invalid(reason: String) -> Error {
    Error::Invalid { reason }
}
