//! A Llama whose weights are in GGML's blocks computes over streamed weights, bit for bit, what it computes with candle's own
//! quantised tensors in memory, and what transformers computes with the same numbers.

#[path = "../examples/support/gguf.rs"]
mod gguf;
#[path = "../../tests/support/gguf.rs"]
#[allow(dead_code, reason = "this test writes plain files")]
mod gguf_file;
#[path = "../examples/support/llama.rs"]
mod llama;
#[path = "support/random.rs"]
mod random;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{Device, Module, Result, Tensor, bail};
use gguf::Owned;
use gguf_file::{Gguf, Value};
use llama::{Config, Part, State};
use random::Random;
use tensor_offload::backend::Clock;
use tensor_offload::patch::quantise;
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{Checkpoint, DType, DeviceId, Loader, Machine, Model, Planner, Registry, Weights};
use tensor_offload_candle::{Error, Streamed, cpu_memory};

const CPU: DeviceId = DeviceId::CPU;
const WIDTH: u64 = 256;
const INNER: u64 = 512;
const TOKENS: u64 = 96;
const BLOCKS: u64 = 3;

impl Random {
    /// Bytes of a type: numbers, as blocks where it has blocks.
    fn elements(&mut self, dtype: DType, bytes: usize) -> Vec<u8> {
        let block = dtype.block();
        let values: Vec<f32> = (0..bytes as u64 / block.bytes * block.elements).map(|_| 0.2 * self.next()).collect();
        match dtype {
            DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect(),
            DType::BF16 => values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect(),
            _ => {
                let mut blocks = vec![0; bytes];
                match quantise(dtype, &values, &mut blocks) {
                    Ok(_) => blocks,
                    // The library writes not every type, and candle does.
                    Err(_) => candles_blocks(dtype, &values),
                }
            }
        }
    }
}

fn candles_blocks(dtype: DType, values: &[f32]) -> Vec<u8> {
    let dtype = match dtype {
        DType::Q2_K => GgmlDType::Q2K,
        DType::Q3_K => GgmlDType::Q3K,
        DType::Q8_K => GgmlDType::Q8K,
        other => panic!("{other}"),
    };
    let values = Tensor::new(values, &Device::Cpu).unwrap();
    QTensor::quantize(&values, dtype).unwrap().data().unwrap().to_vec()
}

/// The metadata of a Llama of a width, a number of blocks, heads of queries and of keys.
fn llama_file(blocks: u64, width: u64, [heads, kv_heads]: [u64; 2]) -> Gguf {
    let number = |value: u64| Value::U32(value as u32);
    Gguf::new("llama")
        .entry("llama.block_count", number(blocks))
        .entry("llama.embedding_length", number(width))
        .entry("llama.feed_forward_length", number(INNER))
        .entry("llama.attention.head_count", number(heads))
        .entry("llama.attention.head_count_kv", number(kv_heads))
        .entry("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5))
        .entry("llama.rope.freq_base", Value::F32(10_000.0))
}

/// A Llama in a file. `dtype` tells the type of a weight of a block, as `blk.1.attn_v`.
fn written(table: DType, head: Option<DType>, dtype: impl Fn(&str) -> DType) -> (tempfile::TempDir, PathBuf) {
    let mut file = llama_file(BLOCKS, WIDTH, [4, 2]);
    let norm = |file: Gguf, name: &str| {
        let mut random = Random::of(3, name);
        let bytes = (0..WIDTH).flat_map(|_| (1.0 + random.next()).to_le_bytes()).collect();
        file.tensor(name, DType::F32, &[WIDTH], bytes)
    };
    file = file.some("token_embd.weight", table, &[TOKENS, WIDTH]);
    for block in 0..BLOCKS {
        file = norm(file, &format!("blk.{block}.attn_norm.weight"));
        file = norm(file, &format!("blk.{block}.ffn_norm.weight"));
        for (name, outputs, inputs) in [
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH / 2, WIDTH),
            ("attn_v", WIDTH / 2, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ] {
            let name = format!("blk.{block}.{name}");
            file = file.some(&format!("{name}.weight"), dtype(&name), &[outputs, inputs]);
        }
    }
    file = norm(file, "output_norm.weight");
    if let Some(head) = head {
        file = file.some("output.weight", head, &[TOKENS, WIDTH]);
    }
    save(&file)
}

fn save(file: &Gguf) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file.build()).unwrap();
    (folder, path)
}

/// The mix of Q4_K_M: Q6_K for the values and the last product of some blocks, Q4_K for all else.
fn q4_k_m(name: &str) -> DType {
    let wide = name.ends_with("attn_v") || name.ends_with("ffn_down");
    if wide && !name.starts_with("blk.1.") { DType::Q6_K } else { DType::Q4_K }
}

fn devices() -> Registry {
    let texts = ["cpu=1gb", "disk=1gb"];
    let devices: Vec<_> = texts.iter().map(|text| text.parse().unwrap()).collect();
    Registry::described(Machine::described(&devices), Clock::Wall)
}

fn load(weights: &Weights, allocation: &str, depth: usize) -> Arc<Model> {
    load_as(weights, allocation, depth, None)
}

/// As [`load`], with slots of values if a type of these is given.
fn load_as(weights: &Weights, allocation: &str, depth: usize, unpacked: Option<DType>) -> Arc<Model> {
    let devices = devices();
    let planner = Planner::new(weights.layout(), devices.machine()).compute(CPU).depth(depth);
    let planner = unpacked.into_iter().fold(planner, Planner::unpack);
    let plan = planner.allocation(allocation.parse().unwrap()).grouping(TensorGrouping::PerTensor).plan().unwrap();
    Arc::new(Loader::new(&devices).allocator(cpu_memory()).load(weights, &plan).unwrap())
}

/// Passes of several tokens and of one, and then a second sequence; the bits of all logits.
fn passes(config: &Config, mut turn: impl FnMut(&str, &mut State, &Tensor) -> Result<Tensor>) -> Vec<u32> {
    let mut bits = Vec::new();
    for _ in 0..2 {
        let mut state = State::new(config, &Device::Cpu).unwrap();
        for tokens in [&[1_u32, 7, 3, 12, 95][..], &[5], &[9], &[2, 4], &[8]] {
            let mut x = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            for step in config.steps() {
                x = turn(&step.layer, &mut state, &x).unwrap();
            }
            let values = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(values.iter().all(|value| value.is_finite()));
            bits.extend(values.into_iter().map(f32::to_bits));
        }
    }
    bits
}

fn candles_own(config: &Config, weights: &Owned) -> Vec<u32> {
    let part = |layer: String| (layer.clone(), Part::gguf(config, &layer, weights).unwrap());
    let parts: HashMap<String, Part> = config.steps().map(|step| part(step.layer)).collect();
    passes(config, |layer, state, x| parts[layer].forward(x, state))
}

fn streamed(config: &Config, model: &Arc<Model>) -> Vec<u32> {
    let mut blocks =
        Streamed::quantized(model, |layer, weights| Part::gguf(config, &layer.name, &gguf::Streamed(weights))).unwrap();
    passes(config, |layer, state, x| Ok(blocks.layer_named(layer)?.run(|part| part.forward(x, state))?))
}

fn open(path: &Path) -> (Weights, Config) {
    let weights = Weights::new(Checkpoint::open(path).unwrap());
    gguf::check(&weights).unwrap();
    let config = gguf::config(weights.checkpoint().gguf().unwrap(), &weights).unwrap();
    (weights, config)
}

/// Slots hold what a cast would: blocks live on the devices, and products are those of floats.
#[test]
fn values_that_slots_hold_are_those_of_a_model_that_is_cast() {
    let (_folder, path) = written(DType::Q6_K, Some(DType::Q8_0), q4_k_m);
    let (weights, config) = open(&path);
    for dtype in [DType::F32, DType::BF16] {
        let cast = Weights::new(Checkpoint::open(&path).unwrap()).cast_floats(dtype).unwrap();
        let cast = cast.cast("*norm.weight", DType::F32).unwrap();
        let expected = streamed(&config, &load(&cast, "cpu,*", 1));
        for allocation in ["disk,*", "cpu,40%;disk,*", "cpu,*"] {
            let model = load_as(&weights, allocation, 1, Some(dtype));
            assert!(streamed(&config, &model) == expected, "{allocation} as {dtype}");
            let plan = model.plan();
            assert_eq!(plan.bytes(), weights.layout().bytes(), "homes hold blocks");
            // Candle's builder has them as tensors, too.
            let built = Streamed::new(&model, |layer, vb| {
                let named = layer.name == "blk.1";
                named.then(|| vb.get((WIDTH as usize, WIDTH as usize), "blk.1.attn_q.weight")).transpose()
            });
            let mut built = built.unwrap();
            let values = built.layer_named("blk.1").unwrap().run(|weight| match weight {
                Some(weight) => weight.to_dtype(candle_core::DType::F32),
                None => bail!("the layer was built"),
            });
            let mut wanted = vec![0; (WIDTH * WIDTH) as usize * dtype.element_bytes().unwrap()];
            cast.read(cast.layout().find("blk.1.attn_q.weight").unwrap(), &mut wanted).unwrap();
            let wanted: Vec<f32> = match dtype {
                DType::F32 => wanted.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
                _ => wanted.chunks(2).map(|raw| half::bf16::from_le_bytes([raw[0], raw[1]]).to_f32()).collect(),
            };
            assert!(
                values.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap() == wanted,
                "{allocation} as {dtype}"
            );
        }
    }
}

/// A quantised tensor of candle's that is kept for a slot has a copy of Q4_K, and of Q6_K after passes of several tokens, of
/// the layer that came first, and this fails.
#[test]
fn a_mix_of_k_quants_is_equal_for_allocations_and_depths() {
    let (_folder, path) = written(DType::Q6_K, None, q4_k_m);
    let (weights, config) = open(&path);
    let expected = candles_own(&config, &Owned::open(&path).unwrap());
    for allocation in ["disk,*", "cpu,40%;disk,*", "cpu,80%;disk,*", "cpu,*"] {
        for depth in [0, 1, 2] {
            let model = load(&weights, allocation, depth);
            assert!(streamed(&config, &model) == expected, "{allocation}, depth {depth}");
        }
    }
}

#[test]
fn every_type_of_candle_is_equal() {
    let types = [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::Q8_K,
        DType::F32,
        DType::F16,
        DType::BF16,
    ];
    for dtype in types {
        let (_folder, path) = written(dtype, Some(dtype), |_| dtype);
        let (weights, config) = open(&path);
        let expected = match gguf::is_alone(&weights) {
            true => Owned::open(&path).unwrap(),
            false => Owned::read(&weights, weights.layout().tensor_ids()).unwrap(),
        };
        let expected = candles_own(&config, &expected);
        assert!(streamed(&config, &load(&weights, "cpu,20%;disk,*", 1)) == expected, "{dtype}");
    }
}

/// The same for one product, with a slot that all layers share.
#[test]
fn a_product_after_a_refill_is_that_of_the_new_blocks() {
    let (_folder, path) = written(DType::Q4_K, None, |_| DType::Q4_K);
    let (weights, _) = open(&path);
    let model = load(&weights, "disk,*", 0);
    let mut blocks = Streamed::quantized(&model, |layer, weights| {
        let name = format!("{}.attn_q.weight", layer.name);
        if weights.contains(&name) { Ok(Some(weights.quantized(&name)?)) } else { Ok(None) }
    })
    .unwrap();
    for rows in [1, 4] {
        let x = Tensor::randn(0_f32, 1.0, (rows, WIDTH as usize), &Device::Cpu).unwrap();
        for layer in ["blk.0", "blk.1", "blk.2", "blk.0"] {
            let id = weights.layout().find(&format!("{layer}.attn_q.weight")).unwrap();
            let mut bytes = vec![0; weights.layout().tensor(id).unwrap().bytes as usize];
            weights.read(id, &mut bytes).unwrap();
            let storage = QStorage::from_data(bytes.into(), &Device::Cpu, GgmlDType::Q4K).unwrap();
            let own = QTensor::new(storage, (WIDTH as usize, WIDTH as usize)).unwrap();
            let expected = QMatMul::from_qtensor(own).unwrap().forward(&x).unwrap();
            let product = blocks.layer_named(layer).unwrap().run(|q| q.as_ref().unwrap().forward(&x)).unwrap();
            assert_eq!(product.to_vec2::<f32>().unwrap(), expected.to_vec2::<f32>().unwrap(), "{layer}");
        }
    }
}

#[test]
fn a_block_that_keeps_the_values_of_its_blocks_is_found() {
    let (_folder, path) = written(DType::Q4_K, None, q4_k_m);
    let (weights, _) = open(&path);
    let model = load(&weights, "disk,*", 1);
    let mut blocks = Streamed::quantized(&model, |layer, weights| {
        let name = format!("{}.attn_v.weight", layer.name);
        if weights.contains(&name) { Ok(Some(weights.quantized(&name)?.dequantize()?)) } else { Ok(None) }
    })
    .unwrap();
    let error = blocks.layer_named("blk.0").unwrap().run(|values| Ok(values.clone())).unwrap_err();
    assert!(matches!(&error, Error::Copied { layer, .. } if layer == "blk.0"), "{error}");
}

#[test]
fn blocks_without_products_are_named_with_what_helps() {
    let iq4 = |name: &str| if name == "blk.1.ffn_up" { DType::IQ4_NL } else { DType::Q4_K };
    let (_folder, path) = written(DType::Q4_K, None, iq4);
    let weights = Weights::new(Checkpoint::open(&path).unwrap());
    let config = gguf::config(weights.checkpoint().gguf().unwrap(), &weights).unwrap();
    let build = |weights: &Weights| {
        Streamed::quantized(&load(weights, "cpu,40%;disk,*", 1), |layer, weights| {
            Part::gguf(&config, &layer.name, &gguf::Streamed(weights))
        })
    };
    let told = ["`blk.1.ffn_up.weight` holds IQ4_NL", "--cast blk.1.ffn_up.weight=F32"];
    let errors = [build(&weights).unwrap_err().to_string(), gguf::check(&weights).unwrap_err().to_string()];
    for (error, told) in errors.iter().flat_map(|error| told.map(|told| (error, told))) {
        assert!(error.contains(told), "{error}");
    }
    // And it does help.
    let cast = weights.clone().cast("blk.1.ffn_up.weight", DType::F32).unwrap();
    let expected = candles_own(&config, &Owned::read(&cast, cast.layout().tensor_ids()).unwrap());
    assert!(streamed(&config, &load(&cast, "cpu,40%;disk,*", 1)) == expected);
}

#[test]
fn blocks_that_are_asked_for_as_tensors_are_an_error() {
    let (_folder, path) = written(DType::Q4_K, None, q4_k_m);
    let (weights, _) = open(&path);
    let model = load(&weights, "cpu,40%;disk,*", 1);
    let built = Streamed::new(&model, |_, vb| vb.get((WIDTH as usize, WIDTH as usize), "token_embd.weight"));
    let error = built.unwrap_err().to_string();
    assert!(error.contains("`token_embd.weight` holds Q4_K") && error.contains("Streamed::quantized"), "{error}");
}

/// A checkpoint of transformers as llama.cpp's converter writes it, in f32: other names, and queries and keys whose rotary
/// partners stand side by side.
fn converted(folder: &Path) -> (tempfile::TempDir, PathBuf) {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let number = |key: &str| json[key].as_u64().unwrap();
    let (heads, kv_heads) = (number("num_attention_heads"), number("num_key_value_heads"));
    let mut file = llama_file(number("num_hidden_layers"), number("hidden_size"), [heads, kv_heads]);
    let eps = json["rms_norm_eps"].as_f64().unwrap() as f32;
    for (key, value) in &mut file.entries {
        match key.as_str() {
            "llama.feed_forward_length" => *value = Value::U32(number("intermediate_size") as u32),
            "llama.attention.layer_norm_rms_epsilon" => *value = Value::F32(eps),
            _ => {}
        }
    }
    let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    for (name, tensor) in tensors {
        let renamed = [
            ("model.embed_tokens", "token_embd"),
            ("model.layers", "blk"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("post_attention_layernorm", "ffn_norm"),
            ("input_layernorm", "attn_norm"),
        ];
        let new = renamed.iter().fold(name.clone(), |name, (from, to)| name.replace(from, to));
        let tensor = tensor.to_dtype(candle_core::DType::F32).unwrap();
        let count = if name.contains("q_proj") { heads } else { kv_heads } as usize;
        let rows = match name.contains("q_proj.weight") || name.contains("k_proj.weight") {
            true => {
                let (outputs, inputs) = tensor.dims2().unwrap();
                let halves = tensor.reshape((count, 2, outputs / count / 2, inputs)).unwrap();
                halves.transpose(1, 2).unwrap().contiguous().unwrap().reshape((outputs, inputs)).unwrap()
            }
            false => tensor,
        };
        let shape: Vec<u64> = rows.dims().iter().map(|&side| side as u64).collect();
        let values = rows.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        file = file.tensor(new, DType::F32, &shape, values.iter().flat_map(|value| value.to_le_bytes()).collect());
    }
    save(&file)
}

#[test]
fn a_converted_llama_gives_the_logits_of_the_checkpoint() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/tiny-llama");
    let (_folder, path) = converted(&folder);
    let (weights, config) = open(&path);
    let logits = streamed(&config, &load(&weights, "cpu,40%;disk,*", 1));
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let plain = Config::parse(&text).unwrap();
    let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    let tensors = tensors.into_iter().map(|(name, t)| (name, t.to_dtype(candle_core::DType::F32).unwrap())).collect();
    let vb = candle_nn::VarBuilder::from_tensors(tensors, candle_core::DType::F32, &Device::Cpu);
    let expected = passes(&plain, |layer, state, x| Part::new(&plain, layer, vb.clone())?.forward(x, state));
    let largest = expected.iter().map(|bits| f32::from_bits(*bits).abs()).fold(0.0, f32::max);
    for (one, other) in logits.iter().zip(&expected).map(|(one, other)| (f32::from_bits(*one), f32::from_bits(*other)))
    {
        assert!((one - other).abs() <= 2e-5 * largest, "{one} and {other}");
    }
    assert_eq!(logits.len(), expected.len());
}
