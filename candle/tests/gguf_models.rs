//! Models in GGUF files compute what llama.cpp computes, over streamed weights and over candle's own, and what a file says that
//! the model cannot do is an error that names it. `data/gguf/reference.py` made the expected logits.

#[path = "../examples/support/gguf.rs"]
mod gguf;
#[path = "../../tests/support/gguf.rs"]
#[allow(dead_code, reason = "this test writes plain files")]
mod gguf_file;
#[path = "../examples/support/llama.rs"]
mod llama;
#[path = "support/random.rs"]
mod random;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use gguf::Owned;
use gguf_file::{Gguf, Value};
use llama::{Config, Part, State};
use random::Random;
use serde::Deserialize;
use tensor_offload::backend::Clock;
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{Checkpoint, DType, DeviceId, Loader, Machine, Model, Planner, Registry, Weights};
use tensor_offload_candle::{Streamed, cpu_memory};

const HIDDEN: u64 = 16;
const INNER: u64 = 24;
const VOCABULARY: u64 = 32;

impl Random {
    fn elements(&mut self, _: DType, bytes: usize) -> Vec<u8> {
        (0..bytes / 4).flat_map(|_| self.next().to_le_bytes()).collect()
    }
}

#[derive(Deserialize)]
struct Reference {
    tokens: Vec<u32>,
    cases: Vec<Case>,
}

#[derive(Clone, Deserialize)]
struct Case {
    name: String,
    architecture: String,
    entries: serde_json::Map<String, serde_json::Value>,
    head_dim: u64,
    tied: bool,
    biases: Vec<String>,
    factors: Vec<f32>,
    logits: Vec<f32>,
}

impl Case {
    fn named(name: &str) -> Case {
        reference().cases.into_iter().find(|case| case.name == name).unwrap()
    }

    fn set(mut self, key: &str, value: serde_json::Value) -> Case {
        self.entries.insert(key.to_owned(), value);
        self
    }

    fn file(&self) -> Gguf {
        let mut file = Gguf::new(&self.architecture);
        for (key, value) in &self.entries {
            let (kind, number) = value.as_object().unwrap().iter().next().unwrap();
            let value = match kind.as_str() {
                "u32" => Value::U32(number.as_u64().unwrap() as u32),
                "u64" => Value::U64(number.as_u64().unwrap()),
                "f32" => Value::F32(number.as_f64().unwrap() as f32),
                "bool" => Value::Bool(number.as_bool().unwrap()),
                "array" => Value::Array(
                    4,
                    number.as_array().unwrap().iter().map(|n| Value::U32(n.as_u64().unwrap() as u32)).collect(),
                ),
                _ => number.as_str().unwrap().into(),
            };
            file = file.entry(format!("{}.{key}", self.architecture), value);
        }
        let norm = |file: Gguf, name: String, width: u64| {
            let mut random = Random::of(7, &name);
            let bytes = (0..width).flat_map(|_| (random.next() + 1.0).to_le_bytes()).collect();
            file.tensor(name, DType::F32, &[width], bytes)
        };
        file = norm(
            file.some("token_embd.weight", DType::F32, &[VOCABULARY, HIDDEN]),
            "output_norm.weight".to_owned(),
            HIDDEN,
        );
        if !self.tied {
            file = file.some("output.weight", DType::F32, &[VOCABULARY, HIDDEN]);
        }
        if !self.factors.is_empty() {
            let bytes = self.factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
            file = file.tensor("rope_freqs.weight", DType::F32, &[self.factors.len() as u64], bytes);
        }
        let (q, kv) = (2 * self.head_dim, self.head_dim);
        for block in 0..2 {
            for name in ["attn_norm", "ffn_norm"] {
                file = norm(file, format!("blk.{block}.{name}.weight"), HIDDEN);
            }
            for name in ["attn_q_norm", "attn_k_norm"].iter().filter(|_| self.architecture == "qwen3") {
                file = norm(file, format!("blk.{block}.{name}.weight"), self.head_dim);
            }
            for (name, outputs, inputs) in [
                ("attn_q", q, HIDDEN),
                ("attn_k", kv, HIDDEN),
                ("attn_v", kv, HIDDEN),
                ("attn_output", HIDDEN, q),
                ("ffn_gate", INNER, HIDDEN),
                ("ffn_up", INNER, HIDDEN),
                ("ffn_down", HIDDEN, INNER),
            ] {
                file = file.some(&format!("blk.{block}.{name}.weight"), DType::F32, &[outputs, inputs]);
                if self.biases.iter().any(|biased| biased == name) {
                    file = file.some(&format!("blk.{block}.{name}.bias"), DType::F32, &[outputs]);
                }
            }
        }
        file
    }

    /// Why the model does not run.
    fn refused(&self) -> String {
        refused(&self.file())
    }
}

fn reference() -> Reference {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/models.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn save(file: &Gguf) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file.build()).unwrap();
    (folder, path)
}

fn open(path: &Path) -> (Weights, Config) {
    let weights = Weights::new(Checkpoint::open(path).unwrap());
    let config = gguf::config(weights.checkpoint().gguf().unwrap(), &weights).unwrap();
    gguf::check(&weights).unwrap();
    (weights, config)
}

fn refused(file: &Gguf) -> String {
    let (_folder, path) = save(file);
    let weights = Weights::new(Checkpoint::open(&path).unwrap());
    let config = gguf::config(weights.checkpoint().gguf().unwrap(), &weights);
    config.and_then(|_| gguf::check(&weights)).unwrap_err().to_string()
}

fn load(weights: &Weights) -> Arc<Model> {
    let texts = ["cpu=1gb", "disk=1gb"];
    let devices: Vec<_> = texts.iter().map(|text| text.parse().unwrap()).collect();
    let devices = Registry::described(Machine::described(&devices), Clock::Wall);
    let planner = Planner::new(weights.layout(), devices.machine()).compute(DeviceId::CPU).depth(1);
    let allocation = "cpu,30%;disk,*".parse().unwrap();
    let plan = planner.allocation(allocation).grouping(TensorGrouping::PerTensor).plan().unwrap();
    Arc::new(Loader::new(&devices).allocator(cpu_memory()).load(weights, &plan).unwrap())
}

/// The last logits of a sequence that is read in one pass and then token by token.
fn last(
    config: &Config,
    tokens: &[u32],
    mut turn: impl FnMut(&str, &mut State, &Tensor) -> Result<Tensor>,
) -> Vec<f32> {
    let mut state = State::new(config, &Device::Cpu).unwrap().last_only();
    let (first, rest) = tokens.split_at(tokens.len() - 3);
    let mut logits = Vec::new();
    for tokens in [first].into_iter().chain(rest.chunks(1)) {
        let mut x = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        for step in config.steps() {
            x = turn(&step.layer, &mut state, &x).unwrap();
        }
        logits = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    }
    logits
}

fn resident(config: &Config, weights: &Owned, tokens: &[u32]) -> Vec<f32> {
    last(config, tokens, |layer, state, x| Part::gguf(config, layer, weights)?.forward(x, state))
}

fn streamed(config: &Config, weights: &Weights, tokens: &[u32]) -> Vec<f32> {
    let part = |layer: &tensor_offload::checkpoint::Layer, weights: &tensor_offload_candle::LayerWeights| {
        let has_turn = config.steps().any(|step| step.layer == layer.name);
        has_turn.then(|| Part::gguf(config, &layer.name, &gguf::Streamed(weights))).transpose()
    };
    let mut blocks = Streamed::quantized(&load(weights), part).unwrap();
    last(config, tokens, |layer, state, x| {
        Ok(blocks.layer_named(layer)?.run(|part| part.as_ref().unwrap().forward(x, state))?)
    })
}

fn assert_near(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    for (one, other) in found.iter().zip(expected) {
        assert!((one - other).abs() <= 1e-4 * largest, "{name}: {one}, and {other} in llama.cpp");
    }
}

#[test]
fn logits_are_those_of_llama_cpp() {
    let reference = reference();
    for case in &reference.cases {
        let (_folder, path) = save(&case.file());
        let (weights, config) = open(&path);
        let own = resident(&config, &Owned::open(&path).unwrap(), &reference.tokens);
        assert_near(&case.name, &own, &case.logits);
        assert_eq!(streamed(&config, &weights, &reference.tokens), own, "{}", case.name);
    }
}

#[test]
fn what_a_case_adds_changes_the_logits() {
    let reference = reference();
    let plain = Case::named("llama").logits;
    let same = ["llama", "llama, no scaling in spite of a factor", "llama, a factor of 0", "llama, YaRN by 1"];
    for case in &reference.cases {
        assert_eq!(case.logits == plain, same.contains(&&*case.name), "{}", case.name);
    }
}

/// The betas of YaRN, which llama.cpp does not read for these models: twice the turns within half the length.
#[test]
fn the_betas_of_yarn_are_turns_within_the_trained_length() {
    let of = |trained: u64, betas: [f32; 2]| {
        let mut case = Case::named("llama, YaRN");
        case = case.set("rope.scaling.original_context_length", serde_json::json!({ "u32": trained }));
        for (name, beta) in ["fast", "slow"].iter().zip(betas) {
            case = case.set(&format!("rope.scaling.yarn_beta_{name}"), serde_json::json!({ "f32": beta }));
        }
        let (_folder, path) = save(&case.file());
        let (_, config) = open(&path);
        resident(&config, &Owned::open(&path).unwrap(), &reference().tokens)
    };
    assert_near("the defaults", &of(32, [32.0, 1.0]), &Case::named("llama, YaRN").logits);
    assert_eq!(of(64, [32.0, 1.0]), of(32, [16.0, 0.5]));
    assert_ne!(of(64, [32.0, 1.0]), of(32, [32.0, 1.0]));
}

/// The same models in a folder of transformers' names.
#[test]
fn qwens_in_folders_give_the_logits_of_llama_cpp() {
    let reference = reference();
    for case in reference.cases.iter().filter(|case| case.architecture != "llama") {
        let new = |name: &str| {
            let names = [
                ("token_embd", "model.embed_tokens"),
                ("blk", "model.layers"),
                ("output_norm", "model.norm"),
                ("attn_output", "self_attn.o_proj"),
                ("output", "lm_head"),
                ("attn_q_norm", "self_attn.q_norm"),
                ("attn_k_norm", "self_attn.k_norm"),
                ("attn_q", "self_attn.q_proj"),
                ("attn_k", "self_attn.k_proj"),
                ("attn_v", "self_attn.v_proj"),
                ("attn_norm", "input_layernorm"),
                ("ffn_norm", "post_attention_layernorm"),
                ("ffn_gate", "mlp.gate_proj"),
                ("ffn_up", "mlp.up_proj"),
                ("ffn_down", "mlp.down_proj"),
            ];
            let part = |part: &str| {
                names.iter().find(|(old, _)| *old == part).map_or(part.to_owned(), |(_, new)| (*new).to_owned())
            };
            name.split('.').map(part).collect::<Vec<_>>().join(".")
        };
        let tensors = case.file().tensors.into_iter().map(|tensor| {
            let shape: Vec<usize> = tensor.shape.iter().map(|&side| side as usize).collect();
            let tensor_of = Tensor::from_raw_buffer(&tensor.bytes, candle_core::DType::F32, &shape, &Device::Cpu);
            (new(&tensor.name), tensor_of.unwrap())
        });
        let vb = candle_nn::VarBuilder::from_tensors(tensors.collect(), candle_core::DType::F32, &Device::Cpu);
        let yarn = serde_json::json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32 });
        let text = serde_json::json!({
            "model_type": case.architecture, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": case.head_dim, "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "tie_word_embeddings": case.tied, "use_sliding_window": false,
            "sliding_window": 4096, "rope_scaling": case.name.ends_with("YaRN").then_some(yarn),
        });
        let config = Config::parse(&text.to_string()).unwrap();
        let logits = last(&config, &reference.tokens, |layer, state, x| {
            Part::new(&config, layer, vb.clone())?.forward(x, state)
        });
        assert_near(&case.name, &logits, &case.logits);
    }
}

/// Llama 3.1's scaling, as llama.cpp's converter writes it into `rope_freqs.weight`, is that of transformers' `config.json`.
#[test]
fn factors_of_llama_3_are_its_scaling() {
    let (factor, low, high, trained, theta, dim) = (8.0_f32, 1.0_f32, 4.0_f32, 64.0_f32, 1000.0_f32, 8);
    let factors = (0..dim / 2).map(|pair| {
        let angle = 1.0 / theta.powf((2 * pair) as f32 / dim as f32);
        let wavelength = 2.0 * std::f32::consts::PI / angle;
        if wavelength < trained / high {
            1.0
        } else if wavelength > trained / low {
            factor
        } else {
            let smooth = (trained / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    });
    let case = Case { factors: factors.collect(), ..Case::named("llama") };
    let between = case.factors.iter().filter(|factor| **factor > 1.0 && **factor < 8.0);
    assert!(between.count() > 0, "{:?}", case.factors);
    let (_folder, path) = save(&case.file());
    let (_, config) = open(&path);
    let text = serde_json::json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": dim, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_scaling": {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": trained,
        },
    });
    let mut scaled = Config::parse(&text.to_string()).unwrap();
    scaled.gguf = config.gguf;
    let owned = Owned::open(&path).unwrap();
    let tokens = reference().tokens;
    assert_near("llama 3", &resident(&config, &owned, &tokens), &resident(&scaled, &owned, &tokens));
}

#[test]
fn what_a_model_cannot_do_is_refused_by_name() {
    let llama = || Case::named("llama");
    let u32 = |value: u64| serde_json::json!({ "u32": value });
    let f32 = |value: f64| serde_json::json!({ "f32": value });
    let text = |value: &str| serde_json::json!({ "text": value });
    let lengths = ["attention.key_length", "attention.value_length", "rope.dimension_count"];
    let wide = lengths.iter().fold(llama(), |case, key| case.set(key, serde_json::json!({ "u64": 1_u64 << 62 })));
    let cases = [
        (llama().set("rope.scaling.type", text("longrope")).set("rope.scaling.factor", f32(4.0)), "`longrope`"),
        (llama().set("rope.scaling.type", text("dynamic")).set("rope.scaling.factor", f32(4.0)), "`dynamic`"),
        (llama().set("rope.scaling.type", text("yarn")), "no `llama.rope.scaling.factor`"),
        (llama().set("rope.scaling.factor", f32(-4.0)), "`factor` -4"),
        (llama().set("rope.scaling.type", u32(1)), "`llama.rope.scaling.type` is 1, not a text"),
        (llama().set("rope.freq_base", text("big")), "`llama.rope.freq_base` is big, not a number"),
        (
            llama().set("rope.scaling.yarn_ext_factor", f32(0.5)),
            "`llama.rope.scaling.yarn_ext_factor` (0.5) is not known",
        ),
        (llama().set("rope.scaling.yarn_log_multiplier", f32(0.1)), "`llama.rope.scaling.yarn_log_multiplier`"),
        (llama().set("rope.dimension_count", u32(4)), "only a part is turned"),
        (llama().set("attention.scale", f32(0.3)), "`llama.attention.scale` (0.3) is not known"),
        (llama().set("logit_scale", f32(8.0)), "`llama.logit_scale`"),
        (llama().set("attention.causal", serde_json::json!({ "bool": false })), "`llama.attention.causal`"),
        (llama().set("attention.sliding_window", u32(8)), "`sliding_window`"),
        (llama().set("expert_count", u32(8)), "8 experts"),
        (
            llama().set("attention.head_count", serde_json::json!({ "array": [2, 1] })),
            "`llama.attention.head_count` is not one",
        ),
        (
            llama().set("attention.head_count", u32(4)),
            "`blk.0.attn_q.weight` has 16 rows; by the metadata it has 4 heads of 8",
        ),
        (llama().set("attention.head_count_kv", u32(2)), "`blk.0.attn_k.weight` has the shape [8, 16]"),
        (llama().set("attention.head_count_kv", u32(0)), "2 heads cannot share 0"),
        (
            llama().set("feed_forward_length", u32(25)),
            "`blk.0.ffn_gate.weight` has the shape [24, 16]; by the metadata it is [25, 16]",
        ),
        (llama().set("block_count", u32(3)), "no tensor `blk.2."),
        (llama().set("block_count", u32(1)), "tensor `blk.1."),
        (llama().set("block_count", serde_json::json!({ "u64": u64::MAX })), "too few"),
        (wide, "has 16 rows"),
        (Case { factors: vec![1.0; 3], ..llama() }, "`rope_freqs.weight` has 3 factors for 4 pairs"),
        (Case { factors: vec![1.0, 0.0, 1.0, 1.0], ..llama() }, "`rope_freqs.weight` divides an angle by 0"),
        (Case { factors: vec![1.0; 4], ..Case::named("qwen2") }, "`rope_freqs.weight` is of no qwen2"),
        (Case { biases: Vec::new(), ..Case::named("qwen2") }, "no tensor `blk.0.attn_k.bias`"),
    ];
    for (case, told) in &cases {
        let error = case.refused();
        assert!(error.contains(told), "{told}: {error}");
    }
}

#[test]
fn tensors_that_a_model_does_not_use_or_lacks_are_refused_by_name() {
    let llama = Case::named("llama").file();
    let added = [
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_qkv.weight",
        "blk.0.attn_q.scale",
        "blk.0.attn_sub_norm.weight",
        "output.bias",
        "output_norm.bias",
        "rope_factors_long.weight",
        "blk.2.attn_q.weight",
    ];
    for name in added {
        let error = refused(&llama.clone().some(name, DType::F32, &[8]));
        assert!(error.contains(&format!("tensor `{name}` is of no llama")), "{error}");
    }
    let without = |case: &str, name: &str| {
        let mut file = Case::named(case).file();
        file.tensors.retain(|tensor| tensor.name != name);
        refused(&file)
    };
    for (case, name) in [
        ("llama", "token_embd.weight"),
        ("llama", "output_norm.weight"),
        ("llama", "blk.0.attn_q.weight"),
        ("llama", "blk.1.ffn_up.weight"),
        ("qwen3, wide heads", "blk.1.attn_k_norm.weight"),
    ] {
        let error = without(case, name);
        assert!(error.contains(&format!("no tensor `{name}`")), "{error}");
    }
}

#[test]
fn other_architectures_and_kinds_of_files_are_refused_by_name() {
    let mut file = Case::named("llama").file();
    file.entries[0].1 = "gemma2".into();
    assert!(refused(&file).contains("`gemma2`; llama, qwen2 and qwen3 run here: give"));
    let adapter = Case::named("llama").file().entry("general.type", "adapter");
    assert!(refused(&adapter).contains("`adapter`, not `model`"));
}

#[test]
fn equal_layers_in_an_array_are_one_number() {
    let case = Case::named("llama").set("attention.head_count_kv", serde_json::json!({ "array": [1, 1] }));
    let (_folder, path) = save(&case.file());
    let (_, config) = open(&path);
    assert_near("an array", &resident(&config, &Owned::open(&path).unwrap(), &reference().tokens), &case.logits);
}

/// A file with norms and a bias of another type. Blocks are of as many values as these have.
fn with_vectors(dtype: DType) -> (Gguf, [&'static str; 2]) {
    let names = ["blk.1.attn_q.bias", "blk.0.ffn_norm.weight"];
    let mut file = Case::named("qwen2").file();
    for tensor in file.tensors.iter_mut().filter(|tensor| names.contains(&&*tensor.name)) {
        let values = tensor.bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        tensor.bytes = match dtype {
            DType::F16 => values.flat_map(|value| half::f16::from_f32(value).to_le_bytes()).collect(),
            _ => values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        };
        tensor.kind = dtype.ggml_number().unwrap();
    }
    (file, names)
}

#[test]
fn norms_and_biases_of_any_floats_are_taken() {
    let tokens = reference().tokens;
    for dtype in [DType::F16, DType::BF16] {
        let (file, names) = with_vectors(dtype);
        let (_folder, path) = save(&file);
        let (weights, config) = open(&path);
        let own = resident(&config, &Owned::open(&path).unwrap(), &tokens);
        assert_eq!(streamed(&config, &weights, &tokens), own, "{dtype}");
        let cast = names.iter().fold(weights, |weights, name| weights.cast(*name, DType::F32).unwrap());
        assert_eq!(streamed(&config, &cast, &tokens), own, "{dtype}, cast");
    }
}

#[test]
fn norms_and_biases_in_blocks_are_refused_with_what_helps() {
    let mut file = Case::named("qwen2").file();
    let key = |file: &mut Gguf, key: &str, value: u32| {
        let entry = file.entries.iter_mut().find(|(own, _)| own == key).unwrap();
        entry.1 = Value::U32(value);
    };
    // Heads wide enough for a block of a bias.
    let wide = |tensor: &mut gguf_file::Tensor, name: &str, rows: u64| {
        if tensor.name.ends_with(&format!("{name}.weight")) {
            tensor.shape = if name == "attn_output" { vec![HIDDEN, rows] } else { vec![rows, HIDDEN] };
            tensor.bytes = vec![0; (4 * rows * HIDDEN) as usize];
        } else if tensor.name.ends_with(&format!("{name}.bias")) {
            (tensor.shape, tensor.bytes) = (vec![rows], vec![0; 4 * rows as usize]);
        }
    };
    for tensor in &mut file.tensors {
        for (name, rows) in [("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64)] {
            wide(tensor, name, rows);
        }
        if tensor.name == "blk.1.attn_k.bias" {
            (tensor.kind, tensor.bytes) = (DType::Q8_0.ggml_number().unwrap(), vec![0; 34]);
        }
    }
    for name in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
        key(&mut file, &format!("qwen2.{name}"), 32);
    }
    let error = refused(&file);
    let told = ["`blk.1.attn_k.bias` holds Q8_0", "--cast blk.1.attn_k.bias=F32"];
    assert!(told.iter().all(|told| error.contains(told)), "{error}");
}

/// Any file of a set stands for the set; its metadata is in the first.
#[test]
fn a_set_of_files_computes_what_one_file_does() {
    let case = Case::named("qwen3, wide heads");
    let whole = case.file();
    let count = whole.tensors.len();
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(format!("model-{number:05}-of-00002.gguf"));
    for (number, tensors) in [&whole.tensors[..count / 2], &whole.tensors[count / 2..]].into_iter().enumerate() {
        let entries = if number == 0 { whole.entries.clone() } else { Vec::new() };
        let mut part = Gguf { tensors: tensors.to_vec(), entries, ..whole.clone() };
        part = part.entry("split.no", Value::U16(number as u16)).entry("split.count", Value::U16(2));
        part = part.entry("split.tensors.count", Value::I32(count as i32));
        std::fs::write(path(number + 1), part.build()).unwrap();
    }
    let tokens = reference().tokens;
    for given in [path(1), path(2), folder.path().to_owned()] {
        let (weights, config) = open(&given);
        assert!(!gguf::is_alone(&weights));
        assert_near("a set", &streamed(&config, &weights, &tokens), &case.logits);
    }
    std::fs::remove_file(path(1)).unwrap();
    let error = Checkpoint::open(path(2)).unwrap_err().to_string();
    assert!(error.contains("model-00001-of-00002.gguf"), "{error}");
}
