//! Adapters and GGUF files: one for a checkpoint of transformers changes the checkpoint's conversion to GGUF alike, and llama.cpp's
//! own adapters do, too. The conversion here follows llama.cpp's `conversion/`.

mod reference;
mod support;

use std::collections::BTreeMap;

use reference::{Tensor, f32s, file, merged};
use support::gguf::{Gguf, Value};
use tensor_offload::adapter::{Adapter, FactorSource, Matching, RotaryRows, Weights};
use tensor_offload::error::AdapterFault;
use tensor_offload::{Checkpoint, DType, Error};

const HIDDEN: u64 = 16;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const HEAD: u64 = 4;
const WIDE: u64 = 24;
const EXPERTS: usize = 3;
const RANK: u64 = 2;

/// Numbers that look random and are sums of few powers of two.
fn numbers(count: u64, seed: &str) -> Vec<f32> {
    let seed: u64 = seed.bytes().fold(7, |sum, byte| sum * 31 % 65_521 + u64::from(byte));
    (0..count).map(|index| ((index * 37 + seed * 101) % 61) as f32 / 16.0 - 1.75).collect()
}

/// Modules of a block with their rows and columns.
type Modules = Vec<(String, [u64; 2])>;

fn attention(layer: usize) -> Modules {
    let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}_proj");
    vec![
        (name("q"), [HEADS * HEAD, HIDDEN]),
        (name("k"), [KV_HEADS * HEAD, HIDDEN]),
        (name("v"), [KV_HEADS * HEAD, HIDDEN]),
        (name("o"), [HIDDEN, HEADS * HEAD]),
    ]
}

fn dense(layer: usize) -> Modules {
    let name = |part: &str| format!("model.layers.{layer}.mlp.{part}_proj");
    vec![(name("gate"), [WIDE, HIDDEN]), (name("up"), [WIDE, HIDDEN]), (name("down"), [HIDDEN, WIDE])]
}

/// A checkpoint of transformers with these modules, an embedding, a head, and norms.
fn transformers(modules: &Modules, biases: bool) -> Vec<Tensor> {
    let mut tensors = vec![];
    let mut matrix = |name: &str, [rows, cols]: [u64; 2]| {
        tensors.push(f32s(&format!("{name}.weight"), &[rows, cols], &numbers(rows * cols, name)));
        if biases && ["q_proj", "k_proj", "v_proj"].iter().any(|end| name.ends_with(end)) {
            tensors.push(f32s(&format!("{name}.bias"), &[rows], &numbers(rows, &format!("{name} bias"))));
        }
    };
    matrix("model.embed_tokens", [8, HIDDEN]);
    matrix("lm_head", [8, HIDDEN]);
    modules.iter().for_each(|(name, sides)| matrix(name, *sides));
    for name in ["model.norm", "model.layers.0.input_layernorm"] {
        tensors.push(f32s(&format!("{name}.weight"), &[HIDDEN], &numbers(HIDDEN, name)));
    }
    tensors
}

/// PEFT's LoRA for modules, and for their biases.
fn lora(modules: &Modules) -> Vec<Tensor> {
    let factors = |(name, [rows, cols]): &(String, [u64; 2])| {
        let key = |end: &str| format!("base_model.model.{name}.lora_{end}.weight");
        [
            f32s(&key("A"), &[RANK, *cols], &numbers(RANK * cols, &key("A"))),
            f32s(&key("B"), &[*rows, RANK], &numbers(rows * RANK, &key("B"))),
        ]
    };
    modules.iter().flat_map(factors).collect()
}

fn adapter(tensors: &[Tensor]) -> Adapter {
    Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap().alpha(4.0).unwrap()
}

/// The name of a tensor in GGUF (gguf-py, `tensor_mapping.py`).
fn renamed(name: &str) -> String {
    let names = [
        ("model.layers.", "blk."),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.gate.", "ffn_gate_inp."),
        ("block_sparse_moe.gate.", "ffn_gate_inp."),
        ("input_layernorm", "attn_norm"),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ];
    names.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// `LlamaModel.permute`: reshaped to (heads, 2, half, rest), the middle two swapped.
fn permuted(bytes: &[u8], rows: u64, heads: u64) -> Vec<u8> {
    let (row, half) = (bytes.len() / rows as usize, (rows / heads / 2) as usize);
    let place = |at: usize| {
        let (head, within) = (at / (2 * half), at % (2 * half));
        head * 2 * half + within % 2 * half + within / 2
    };
    (0..rows as usize).flat_map(|at| bytes[place(at) * row..][..row].iter().copied()).collect()
}

/// The tensors of a checkpoint as they are in its GGUF file.
fn converted(tensors: &[Tensor], architecture: &str) -> BTreeMap<String, Tensor> {
    let mut out = BTreeMap::new();
    let mut experts: BTreeMap<String, Vec<(usize, Tensor)>> = BTreeMap::new();
    for (name, dtype, shape, bytes) in tensors {
        let mut bytes = bytes.clone();
        if architecture == "llama" && name.contains(".q_proj.") {
            bytes = permuted(&bytes, shape[0], HEADS);
        }
        if architecture == "llama" && name.contains(".k_proj.") {
            bytes = permuted(&bytes, shape[0], KV_HEADS);
        }
        if architecture.starts_with("gemma") && name.ends_with("norm.weight") {
            let values = reference::floats(DType::F32, &bytes);
            bytes = values.iter().flat_map(|value| (value + 1.0).to_le_bytes()).collect();
        }
        let tensor = (name.clone(), *dtype, shape.clone(), bytes);
        match name.split_once(".experts.") {
            Some((outer, rest)) => {
                let (number, part) = rest.split_once('.').unwrap();
                let part = match part.strip_suffix(".weight").unwrap() {
                    "w1" | "gate_proj" => "gate",
                    "w3" | "up_proj" => "up",
                    _ => "down",
                };
                let block = renamed(outer.rsplit_once('.').unwrap().0);
                let stack = format!("{block}.ffn_{part}_exps.weight");
                experts.entry(stack).or_default().push((number.parse().unwrap(), tensor));
            }
            None => {
                out.insert(renamed(name), tensor);
            }
        }
    }
    for (name, mut parts) in experts {
        parts.sort_by_key(|part| part.0);
        let (dtype, sides) = (parts[0].1.1, parts[0].1.2.clone());
        let shape = [&[parts.len() as u64][..], &sides].concat();
        let bytes = parts.iter().flat_map(|part| part.1.3.clone()).collect();
        out.insert(name.clone(), (name, dtype, shape, bytes));
    }
    out
}

fn header(architecture: &str) -> Gguf {
    Gguf::new(architecture)
        .entry(format!("{architecture}.attention.head_count"), Value::U32(HEADS as u32))
        .entry(format!("{architecture}.attention.head_count_kv"), Value::U32(KV_HEADS as u32))
}

fn gguf(tensors: &BTreeMap<String, Tensor>, header: Gguf) -> Checkpoint {
    let add = |file: Gguf, (name, (_, dtype, shape, bytes)): (&String, &Tensor)| {
        file.tensor(name, *dtype, shape, bytes.clone())
    };
    Checkpoint::from_bytes("model.gguf", tensors.iter().fold(header, add).build()).unwrap()
}

/// Merges an adapter into a checkpoint and into its conversion; both must come to the same.
fn check(architecture: &str, base: &[Tensor], adapters: &[Adapter]) {
    let model = file("model", base);
    let (wanted, _) = merged(&model, adapters.to_vec(), Matching::Strict);
    let wanted = converted(&wanted, architecture);
    let base = converted(base, architecture);
    let (got, weights) = merged(&gguf(&base, header(architecture)), adapters.to_vec(), Matching::Strict);
    assert_eq!(got.len(), wanted.len());
    let mut changed = 0;
    for (name, dtype, shape, bytes) in got {
        let (_, want_dtype, want_shape, want) = &wanted[&name];
        assert_eq!((dtype, &shape), (*want_dtype, want_shape), "{architecture} {name}");
        assert!(bytes == *want, "{architecture} {name}: {:?}", reference::difference(dtype, &bytes, want));
        changed += usize::from(bytes != base[&name].3);
    }
    assert_eq!(changed, weights.patches().iter().count(), "{architecture}");
    assert!(changed > 4);
}

#[test]
fn an_adapter_changes_a_conversion_as_it_changes_the_original() {
    let ends = vec![("lm_head".to_owned(), [8, HIDDEN])];
    let modules: Modules = (0..2).flat_map(|layer| [attention(layer), dense(layer)].concat()).collect();
    for architecture in ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"] {
        let base = transformers(&modules, architecture != "gemma");
        check(architecture, &base, &[adapter(&lora(&[&modules[..], &ends].concat()))]);
    }
    let fused: Modules = vec![
        ("model.layers.0.self_attn.qkv_proj".into(), [(HEADS + 2 * KV_HEADS) * HEAD, HIDDEN]),
        ("model.layers.0.self_attn.o_proj".into(), [HIDDEN, HEADS * HEAD]),
        ("model.layers.0.mlp.gate_up_proj".into(), [2 * WIDE, HIDDEN]),
        ("model.layers.0.mlp.down_proj".into(), [HIDDEN, WIDE]),
    ];
    check("phi3", &transformers(&fused, false), &[adapter(&lora(&[&fused[..], &ends].concat()))]);
}

#[test]
fn names_of_a_language_model_inside_another_are_found_too() {
    let modules = [attention(0), dense(0)].concat();
    let base = gguf(&converted(&transformers(&modules, false), "gemma3"), header("gemma3"));
    let (wanted, _) = merged(&base, vec![adapter(&lora(&modules))], Matching::Strict);
    for root in ["language_model.model.", "model.language_model.", "language_model."] {
        let other = |(name, dtype, shape, bytes): Tensor| {
            (name.replace(".model.model.", &format!(".model.{root}")), dtype, shape, bytes)
        };
        let tensors: Vec<Tensor> = lora(&modules).into_iter().map(other).collect();
        assert!(tensors[0].0.contains(root));
        assert!(merged(&base, vec![adapter(&tensors)], Matching::Strict).0 == wanted, "{root}");
    }
}

#[test]
fn biases_of_queries_and_keys_are_moved_as_their_rows() {
    let modules = attention(0);
    let base = transformers(&modules, true);
    let change = |(name, [rows, _]): &(String, [u64; 2])| {
        f32s(&format!("{name}.diff_b"), &[*rows], &numbers(*rows, &format!("{name} change")))
    };
    let of_biases: Vec<Tensor> = modules[..3].iter().map(change).collect();
    check("llama", &base, &[adapter(&lora(&modules)), adapter(&of_biases)]);
}

#[test]
fn whole_norms_are_replaced_where_they_are_the_same() {
    let modules = attention(0);
    let base = transformers(&modules, false);
    let norm = f32s("model.layers.0.input_layernorm.set_weight", &[HIDDEN], &numbers(HIDDEN, "new"));
    check("qwen3", &base, &[adapter(&lora(&modules)), adapter(std::slice::from_ref(&norm))]);
    let gemma = gguf(&converted(&base, "gemma3"), header("gemma3"));
    let refused = fault(&gemma, adapter(&[norm]));
    assert!(matches!(&refused, AdapterFault::Unsupported { kind } if kind.contains("blk.0.attn_norm")), "{refused}");
    let change = f32s("model.layers.0.input_layernorm.diff", &[HIDDEN], &numbers(HIDDEN, "change"));
    let merged = merged(&gemma, vec![adapter(&[change])], Matching::Strict).0;
    let before = converted(&base, "gemma3");
    assert!(
        merged.iter().filter(|tensor| tensor.3 != before[&tensor.0].3).map(|t| &*t.0).eq(["blk.0.attn_norm.weight"])
    );
}

#[test]
fn a_head_that_is_the_embedding_becomes_one_of_its_own() {
    let modules = attention(0);
    let headed = transformers(&modules, false);
    let base: Vec<Tensor> = headed.iter().filter(|tensor| tensor.0 != "lm_head.weight").cloned().collect();
    let ends = vec![("lm_head".to_owned(), [8, HIDDEN])];
    // The same with a head that has the embedding's values.
    let mut apart = base.clone();
    let embedding = base.iter().find(|tensor| tensor.0 == "model.embed_tokens.weight").unwrap();
    apart.push(("lm_head.weight".into(), embedding.1, embedding.2.clone(), embedding.3.clone()));
    let (wanted, _) = merged(&file("model", &apart), vec![adapter(&lora(&ends))], Matching::Strict);
    let tied = gguf(&converted(&base, "qwen3"), header("qwen3"));
    let weights = Weights::patched(tied, vec![adapter(&lora(&ends))], Matching::Strict).unwrap();
    let read = |name: &str| {
        let tensor = weights.layout().find(name).unwrap();
        let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
        weights.read(tensor, &mut bytes).unwrap();
        bytes
    };
    assert!(read("output.weight") == wanted.last().unwrap().3);
    assert!(read("token_embd.weight") == embedding.3);
}

#[test]
fn experts_are_found_in_the_stack() {
    for (architecture, holder, names) in [
        ("llama", "block_sparse_moe", ["w1", "w3", "w2"]),
        ("qwen3moe", "mlp", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen2moe", "mlp", ["gate_proj", "up_proj", "down_proj"]),
    ] {
        let mut modules = attention(0);
        modules.push((format!("model.layers.0.{holder}.gate"), [EXPERTS as u64, HIDDEN]));
        for expert in 0..EXPERTS {
            let sides = [[HIDDEN, HIDDEN]; 3];
            let expert = |name: &str| format!("model.layers.0.{holder}.experts.{expert}.{name}");
            // Square ones, whose shape does not say which side is which.
            modules.extend(names.iter().zip(sides).map(|(name, sides)| (expert(name), sides)));
        }
        check(architecture, &transformers(&modules, false), &[adapter(&lora(&modules))]);
    }
}

fn fault(base: &Checkpoint, adapter: Adapter) -> AdapterFault {
    match Weights::patched(base.clone(), vec![adapter], Matching::Strict).unwrap_err() {
        Error::Adapter { fault, .. } => *fault,
        other => panic!("{other}"),
    }
}

#[test]
fn what_a_conversion_changes_has_to_be_known() {
    let modules = attention(0);
    let base = converted(&transformers(&modules, false), "qwen2");
    let found = |header: Gguf| fault(&gguf(&base, header), adapter(&lora(&modules)));
    let unknown = found(Gguf::new("plamo"));
    let AdapterFault::UnknownConversion { architecture, target } = &unknown else { panic!("{unknown}") };
    assert_eq!((&**architecture, &**target), ("plamo", "blk.0.attn_q"));
    assert!(unknown.to_string().contains("rotary_rows"), "{unknown}");
    // The rows of a Llama are known to be permuted, and without its heads not how.
    let headless = found(Gguf::new("llama"));
    assert_eq!(headless, AdapterFault::RowOrder { target: "blk.0.attn_q".into() });
    let key = "llama.attention.head_count";
    let each = |heads: &[i32]| Value::Array(5, heads.iter().map(|&heads| Value::I32(heads)).collect());
    let uneven = found(Gguf::new("llama").entry(key, each(&[4, 2])));
    assert_eq!(uneven, AdapterFault::RowOrder { target: "blk.0.attn_q".into() });
    // Heads that the rows are not made of, whatever twice their number comes to.
    for heads in [0, 3, 5, 1 << 62, 1 << 63, u64::MAX] {
        let found = found(Gguf::new("llama").entry(key, Value::U64(heads)));
        assert!(matches!(found, AdapterFault::Shape { .. } | AdapterFault::RowOrder { .. }), "{heads}: {found}");
    }
    let even = Gguf::new("llama").entry(key, each(&[4, 4])).entry("llama.attention.head_count_kv", each(&[2, 2]));
    let even = gguf(&base, even);
    Weights::patched(even, vec![adapter(&lora(&modules))], Matching::Strict).unwrap();
    // Whoever says the order is believed.
    let plamo = gguf(&base, Gguf::new("plamo"));
    let said = adapter(&lora(&modules)).rotary_rows(RotaryRows::Same);
    Weights::patched(plamo.clone(), vec![said], Matching::Strict).unwrap();
    // Names of the file itself need no conversion.
    let own = ["lora_A", "lora_B"].map(|end| format!("blk.0.attn_q.{end}.weight"));
    let own = [f32s(&own[0], &[1, HIDDEN], &numbers(HIDDEN, "a")), f32s(&own[1], &[16, 1], &numbers(16, "b"))];
    Weights::patched(plamo, vec![adapter(&own)], Matching::Strict).unwrap();
}

#[test]
fn a_weight_of_blocks_needs_a_type_for_its_new_values() {
    let modules = vec![("model.layers.0.mlp.up_proj".to_owned(), [4, 256])];
    let base = header("qwen2").some("blk.0.ffn_up.weight", DType::Q4_K, &[4, 256]);
    let base = Checkpoint::from_bytes("m.gguf", base.build()).unwrap();
    let weights = Weights::patched(base, vec![adapter(&lora(&modules))], Matching::Strict).unwrap();
    let tensor = weights.layout().find("blk.0.ffn_up.weight").unwrap();
    let read = |weights: &Weights| {
        let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
        weights.read(tensor, &mut bytes).map(|_| bytes.len())
    };
    let found = read(&weights).unwrap_err().to_string();
    for part in ["`blk.0.ffn_up.weight`", "Q4_K", "Weights::cast"] {
        assert!(found.contains(part), "{found}");
    }
    assert_eq!(read(&weights.cast("blk.0.ffn_up", DType::BF16).unwrap()).unwrap(), 2 * 4 * 256);
}

/// An adapter as llama.cpp's `convert_lora_to_gguf.py` writes it.
fn llama_cpp(architecture: &str, modules: &Modules, alpha: Option<f32>) -> Checkpoint {
    let mut file = Gguf::new(architecture).entry("general.type", "adapter").entry("adapter.type", "lora");
    if let Some(alpha) = alpha {
        file = file.entry("adapter.lora.alpha", Value::F32(alpha));
    }
    for (name, [rows, cols]) in modules {
        let key = |end: &str| format!("base_model.model.{name}.lora_{end}.weight");
        let up = f32s(&key("B"), &[*rows, RANK], &numbers(rows * RANK, &key("B")));
        let down = f32s(&key("A"), &[RANK, *cols], &numbers(RANK * cols, &key("A")));
        let up = match architecture {
            "llama" if name.ends_with("q_proj") => permuted(&up.3, *rows, HEADS),
            "llama" if name.ends_with("k_proj") => permuted(&up.3, *rows, KV_HEADS),
            _ => up.3,
        };
        let name = renamed(&format!("{name}.weight"));
        file = file.tensor(format!("{name}.lora_a"), DType::F32, &[RANK, *cols], down.3);
        file = file.tensor(format!("{name}.lora_b"), DType::F32, &[*rows, RANK], up);
    }
    Checkpoint::from_bytes("adapter.gguf", file.build()).unwrap()
}

#[test]
fn an_adapter_of_llama_cpp_is_the_one_that_it_was_made_of() {
    let modules = [attention(0), dense(0)].concat();
    for architecture in ["llama", "qwen3"] {
        let base = gguf(&converted(&transformers(&modules, false), architecture), header(architecture));
        let (wanted, _) = merged(&base, vec![adapter(&lora(&modules))], Matching::Strict);
        let own = Adapter::from_checkpoint(llama_cpp(architecture, &modules, Some(4.0)), 1.0).unwrap();
        let (got, weights) = merged(&base, vec![own], Matching::Strict);
        assert!(got == wanted, "{architecture}");
        let factor = weights.report().applied[0].factor.clone().unwrap();
        assert_eq!((factor.value, factor.source), (2.0, FactorSource::Metadata("adapter.lora.alpha".into())));
    }
    // On the original, where the order of rows is the same.
    let original = file("model", &transformers(&modules, false));
    let (wanted, _) = merged(&original, vec![adapter(&lora(&modules))], Matching::Strict);
    let own = Adapter::from_checkpoint(llama_cpp("qwen3", &modules, Some(4.0)), 1.0).unwrap();
    assert!(merged(&original, vec![own], Matching::Strict).0 == wanted);
    // The file of an adapter does not say how many heads the model has.
    let own = Adapter::from_checkpoint(llama_cpp("llama", &modules, Some(4.0)), 1.0).unwrap();
    assert!(matches!(fault(&original, own.clone()), AdapterFault::RowOrder { .. }));
    let said = own.rotary_rows(RotaryRows::Paired { heads: HEADS as usize, kv_heads: KV_HEADS as usize });
    assert!(merged(&original, vec![said], Matching::Strict).0 == wanted);
    // Without an alpha, and with one of zero, factors are not scaled.
    for alpha in [None, Some(0.0)] {
        let own = Adapter::from_checkpoint(llama_cpp("qwen3", &modules, alpha), 1.0).unwrap();
        let plain = Adapter::from_checkpoint(file("adapter", &lora(&modules)), 1.0).unwrap().alpha(2.0).unwrap();
        let got = |adapter| merged(&original, vec![adapter], Matching::Strict).0;
        assert!(got(own) == got(plain), "{alpha:?}");
    }
}

#[test]
fn what_is_no_lora_is_refused_by_name() {
    let open = |file: Gguf| match Adapter::from_checkpoint(Checkpoint::from_bytes("a.gguf", file.build()).unwrap(), 1.0)
    {
        Err(Error::Adapter { fault, .. }) => fault.to_string(),
        other => panic!("{other:?}"),
    };
    let model = open(Gguf::new("llama").entry("general.type", "model"));
    assert!(model.contains("general.type is `model`"), "{model}");
    let adapter = || Gguf::new("llama").entry("general.type", "adapter");
    assert!(open(adapter().entry("adapter.type", "control_vector")).contains("control_vector adapters"));
    let tokens = Value::Array(4, vec![Value::U32(1)]);
    assert!(open(adapter().entry("adapter.alora.invocation_tokens", tokens)).contains("activated LoRA"));
    assert!(open(adapter().entry("adapter.lora.alpha", Value::F32(f32::NAN))).contains("adapter.lora.alpha is NaN"));
    let whole = open(adapter().entry("adapter.lora.alpha", Value::U32(16)));
    assert!(whole.contains("adapter.lora.alpha is 16, no finite floating-point number"), "{whole}");
    let embedding = adapter().some("token_embd.weight.lora_a", DType::F32, &[8, 2]);
    assert!(open(embedding).contains("token embedding"));
}

#[test]
fn an_adapter_of_llama_cpp_is_for_its_architecture_alone() {
    let modules = attention(0);
    let base = |architecture| gguf(&converted(&transformers(&modules, false), architecture), header(architecture));
    for (own, model) in [("qwen2", "llama"), ("llama", "qwen2"), ("qwen3", "plamo")] {
        let adapter = Adapter::from_checkpoint(llama_cpp(own, &modules, Some(4.0)), 1.0).unwrap();
        let found = fault(&base(model), adapter);
        assert_eq!(found, AdapterFault::OtherArchitecture { adapter: own.into(), model: model.into() });
    }
    // Of an architecture whose conversion is not known it fits files of that architecture, and not the original.
    let plamo = Adapter::from_checkpoint(llama_cpp("plamo", &modules[2..].to_vec(), Some(4.0)), 1.0).unwrap();
    Weights::patched(base("plamo"), vec![plamo.clone()], Matching::Strict).unwrap();
    let found = fault(&file("model", &transformers(&modules, false)), plamo);
    let unknown = AdapterFault::UnknownConversion { target: "blk.0.attn_v".into(), architecture: "plamo".into() };
    assert_eq!(found, unknown);
}

#[test]
fn an_adapter_of_llama_cpp_has_the_factors_of_all_experts_in_one_tensor() {
    const SIDES: [(&str, [u64; 2]); 3] = [("gate", [WIDE, HIDDEN]), ("up", [WIDE, HIDDEN]), ("down", [HIDDEN, WIDE])];
    let (mut modules, mut own) = (Modules::new(), Gguf::new("qwen3moe").entry("general.type", "adapter"));
    own = own.entry("adapter.type", "lora").entry("adapter.lora.alpha", Value::F32(4.0));
    for (part, [rows, cols]) in SIDES {
        let name = |expert: usize| format!("model.layers.0.mlp.experts.{expert}.{part}_proj");
        let stack: Modules = (0..EXPERTS).map(|expert| (name(expert), [rows, cols])).collect();
        let factors = lora(&stack);
        let all = |of: &str| -> Vec<u8> {
            factors.iter().filter(|tensor| tensor.0.contains(of)).flat_map(|tensor| tensor.3.clone()).collect()
        };
        let of_part = format!("blk.0.ffn_{part}_exps.weight");
        let count = EXPERTS as u64;
        own = own.tensor(format!("{of_part}.lora_a"), DType::F32, &[count, RANK, cols], all("lora_A"));
        own = own.tensor(format!("{of_part}.lora_b"), DType::F32, &[count, rows, RANK], all("lora_B"));
        modules.extend(stack);
    }
    let base = gguf(&converted(&transformers(&modules, false), "qwen3moe"), header("qwen3moe"));
    let (wanted, _) = merged(&base, vec![adapter(&lora(&modules))], Matching::Strict);
    let own = Adapter::from_checkpoint(Checkpoint::from_bytes("a.gguf", own.build()).unwrap(), 1.0).unwrap();
    let (got, weights) = merged(&base, vec![own], Matching::Strict);
    assert!(got == wanted);
    assert_eq!(weights.patches().iter().count(), 3);
}

#[test]
fn a_weight_that_is_multiplied_by_a_scale_is_not_changed() {
    let modules = vec![("model.layers.0.mlp.up_proj".to_owned(), [4, 64])];
    for dtype in [DType::NVFP4, DType::F16] {
        let base = header("qwen3").some("blk.0.ffn_up.weight", dtype, &[4, 64]);
        let with = |name: &str| {
            let file = base.clone().some(name, DType::F32, &[1]);
            Checkpoint::from_bytes("m.gguf", file.build()).unwrap()
        };
        let found = fault(&with("blk.0.ffn_up.scale"), adapter(&lora(&modules)));
        let (weight, scale) = ("blk.0.ffn_up.weight".to_owned(), "blk.0.ffn_up.scale".to_owned());
        assert_eq!(found, AdapterFault::UnknownScale { weight, scale });
        // A scale of what the weight is given is none of the weight's.
        let input = with("blk.0.ffn_up.input_scale");
        Weights::patched(input, vec![adapter(&lora(&modules))], Matching::Strict).unwrap();
    }
}

#[test]
fn a_whole_norm_of_llama_cpps_adapter_replaces_the_originals_where_it_is_the_same() {
    let new = f32s("blk.0.attn_norm.weight", &[HIDDEN], &numbers(HIDDEN, "new"));
    let own = |architecture: &str| {
        let file = Gguf::new(architecture).entry("general.type", "adapter").entry("adapter.type", "lora");
        let file = file.tensor(&*new.0, DType::F32, &[HIDDEN], new.3.clone());
        Adapter::from_checkpoint(Checkpoint::from_bytes("a.gguf", file.build()).unwrap(), 1.0).unwrap()
    };
    let original = file("model", &transformers(&attention(0), false));
    let (got, weights) = merged(&original, vec![own("qwen3")], Matching::Strict);
    let norm = got.iter().find(|tensor| tensor.0 == "model.layers.0.input_layernorm.weight").unwrap();
    assert!(norm.3 == new.3);
    assert_eq!(weights.patches().iter().count(), 1);
    // Gemma's has one added.
    let refused = fault(&original, own("gemma3"));
    assert!(matches!(refused, AdapterFault::Unsupported { .. }), "{refused}");
}
