//! Adapters on GGUF files of image models, which ComfyUI-GGUF's `tools/convert.py` writes: tensors keep the names of the original, so
//! an adapter in whatever program's names changes them as it changes the original.

mod reference;
mod support;

use reference::{Tensor, f32s, file, floats, stored, tensor};
use support::gguf::{Gguf, Value};
use tensor_offload::adapter::{Adapter, Matching, Weights};
use tensor_offload::patch::{dequantise, quantise};
use tensor_offload::{Checkpoint, DType};

const HIDDEN: u64 = 32;
const RANK: u64 = 2;

/// A module with the shape of its weight.
type Module = (String, Vec<u64>);

/// Numbers that look random and are sums of few powers of two.
fn numbers(count: u64, seed: &str) -> Vec<f32> {
    let seed: u64 = seed.bytes().fold(7, |sum, byte| sum * 31 % 65_521 + u64::from(byte));
    (0..count).map(|index| ((index * 37 + seed * 101) % 61) as f32 / 16.0 - 1.75).collect()
}

fn modules(prefix: &str, sides: &[(&str, u64, u64)]) -> Vec<Module> {
    sides.iter().map(|(name, rows, cols)| (format!("{prefix}{name}"), vec![*rows, *cols])).collect()
}

/// A weight and a bias for each module, and the other tensors.
fn model(modules: &[Module], others: &[(&str, &[u64])]) -> Vec<Tensor> {
    let some = |name: String, shape: &[u64]| f32s(&name, shape, &numbers(shape.iter().product(), &name));
    let of_module =
        |(name, shape): &Module| [some(format!("{name}.weight"), shape), some(format!("{name}.bias"), &shape[..1])];
    let others = others.iter().map(|(name, shape)| some((*name).to_owned(), shape));
    modules.iter().flat_map(of_module).chain(others).collect()
}

fn flux() -> Vec<Tensor> {
    let double = [
        ("img_attn.qkv", 96, 32),
        ("img_attn.proj", 32, 32),
        ("img_mlp.0", 128, 32),
        ("img_mlp.2", 32, 128),
        ("img_mod.lin", 192, 32),
        ("txt_attn.qkv", 96, 32),
        ("txt_attn.proj", 32, 32),
        ("txt_mlp.0", 128, 32),
        ("txt_mlp.2", 32, 128),
        ("txt_mod.lin", 192, 32),
    ];
    let single = [("linear1", 224, 32), ("linear2", 32, 160), ("modulation.lin", 96, 32)];
    let ends = [("img_in", 32, 64), ("txt_in", 32, 64), ("final_layer.linear", 64, 32)];
    let mut all = modules("", &ends);
    all.extend(modules("", &[("final_layer.adaLN_modulation.1", 64, 32)]));
    for block in 0..2 {
        all.extend(modules(&format!("double_blocks.{block}."), &double));
        all.extend(modules(&format!("single_blocks.{block}."), &single));
    }
    let norms: [(&str, &[u64]); 2] =
        [("double_blocks.0.img_attn.norm.query_norm.scale", &[8]), ("single_blocks.0.norm.key_norm.scale", &[8])];
    model(&all, &norms)
}

fn wan() -> Vec<Tensor> {
    let mut all = modules("", &[("head.head", 64, 32), ("time_embedding.0", 32, 32), ("time_projection.1", 192, 32)]);
    for block in 0..2 {
        for attention in ["self_attn", "cross_attn"] {
            let sides = ["q", "k", "v", "o"].map(|part| (part, 32, 32));
            all.extend(modules(&format!("blocks.{block}.{attention}."), &sides));
        }
        all.extend(modules(&format!("blocks.{block}.ffn."), &[("0", 64, 32), ("2", 32, 64)]));
    }
    all.push(("patch_embedding".into(), vec![HIDDEN, 16, 1, 2, 2]));
    let others: [(&str, &[u64]); 4] = [
        ("blocks.0.modulation", &[1, 6, 32]),
        ("blocks.0.norm3.weight", &[32]),
        ("blocks.0.norm3.bias", &[32]),
        ("blocks.0.self_attn.norm_q.weight", &[32]),
    ];
    model(&all, &others)
}

fn qwen_image() -> Vec<Tensor> {
    let attention = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"]
        .map(|p| (p, 32, 32));
    let mut all =
        modules("", &[("img_in", 32, 64), ("txt_in", 32, 64), ("proj_out", 64, 32), ("norm_out.linear", 64, 32)]);
    for block in 0..2 {
        let block = format!("transformer_blocks.{block}.");
        all.extend(modules(&format!("{block}attn."), &attention));
        for stream in ["img", "txt"] {
            let mlp = [("net.0.proj", 128, 32), ("net.2", 32, 128)];
            all.extend(modules(&format!("{block}{stream}_mlp."), &mlp));
            all.extend(modules(&format!("{block}{stream}_mod."), &[("1", 192, 32)]));
        }
    }
    model(&all, &[("transformer_blocks.0.attn.norm_q.weight", &[8]), ("txt_norm.weight", &[64])])
}

/// The endings of a pair of factors, and whether an alpha stands beside them.
#[derive(Clone, Copy)]
enum Pair {
    Kohya,
    Peft,
}

/// A LoRA of modules, in an adapter's names.
fn lora(pair: Pair, modules: &[Module]) -> Vec<Tensor> {
    let factors = |(name, shape): &Module| {
        let (down, up) = match pair {
            Pair::Kohya => ("lora_down", "lora_up"),
            Pair::Peft => ("lora_A", "lora_B"),
        };
        let down_shape = [&[RANK], &shape[1..]].concat();
        let up_shape: Vec<u64> = [shape[0], RANK].into_iter().chain(shape[2..].iter().map(|_| 1)).collect();
        let some = |end: &str, shape: &[u64]| {
            let name = format!("{name}.{end}.weight");
            f32s(&name, shape, &numbers(shape.iter().product(), &name))
        };
        let alpha = matches!(pair, Pair::Kohya).then(|| f32s(&format!("{name}.alpha"), &[], &[1.0]));
        [Some(some(down, &down_shape)), Some(some(up, &up_shape)), alpha].into_iter().flatten()
    };
    modules.iter().flat_map(factors).collect()
}

/// The modules of a model that have a name beginning with one of these, under other names.
fn renamed(base: &[Tensor], rename: impl Fn(&str) -> String) -> Vec<Module> {
    let weights = base.iter().filter_map(|(name, _, shape, _)| Some((name.strip_suffix(".weight")?, shape)));
    let matrices = weights.filter(|(_, shape)| shape.len() > 1);
    matrices.map(|(name, shape)| (rename(name), shape.clone())).collect()
}

fn kohya(base: &[Tensor]) -> Vec<Tensor> {
    lora(Pair::Kohya, &renamed(base, |name| format!("lora_unet_{}", name.replace('.', "_"))))
}

fn native(base: &[Tensor]) -> Vec<Tensor> {
    lora(Pair::Peft, &renamed(base, |name| format!("diffusion_model.{name}")))
}

/// The values of a matrix that Q8_0 has, and their blocks.
fn as_q8_0(values: &[f32]) -> (Vec<f32>, Vec<u8>) {
    let mut blocks = vec![0; values.len() / 32 * 34];
    assert_eq!(quantise(DType::Q8_0, values, &mut blocks).unwrap(), 0);
    let mut own = vec![0.0; values.len()];
    dequantise(DType::Q8_0, &blocks, &mut own).unwrap();
    (own, blocks)
}

/// A model as the converter writes it, with matrices of a type, and the original of the same values. Tensors of more than four
/// dimensions are stored in two; they and those of one are floats.
fn pair(base: &[Tensor], architecture: &str, dtype: DType) -> (Checkpoint, Checkpoint) {
    let mut gguf = Gguf::new(architecture).entry("general.quantization_version", Value::U32(2));
    let mut original = Vec::new();
    for (name, _, shape, bytes) in base {
        let values = floats(DType::F32, bytes);
        let float = if dtype == DType::F16 && shape.len() > 1 { DType::F16 } else { DType::F32 };
        if shape.len() == 2 && dtype == DType::Q8_0 {
            let (own, blocks) = as_q8_0(&values);
            gguf = gguf.tensor(name, dtype, shape, blocks);
            original.push(f32s(name, shape, &own));
            continue;
        }
        let bytes = stored(float, &values);
        original.push(tensor(name, float, shape, bytes.clone()));
        if shape.len() > 4 {
            let sides = shape.iter().map(|side| Value::I32(*side as i32)).collect();
            gguf = gguf.entry(format!("comfy.gguf.orig_shape.{name}"), Value::Array(5, sides));
            gguf = gguf.tensor(name, float, &[shape[0], shape[1..].iter().product()], bytes);
        } else {
            gguf = gguf.tensor(name, float, shape, bytes);
        }
    }
    (Checkpoint::from_bytes("model.gguf", gguf.build()).unwrap(), file("model", &original))
}

/// All tensors, in order of name.
fn read(weights: &Weights) -> Vec<Tensor> {
    let layout = weights.layout();
    let one = |tensor| {
        let info = layout.tensor(tensor).unwrap();
        let mut bytes = vec![0; info.bytes as usize];
        weights.read(tensor, &mut bytes).unwrap();
        (info.name.clone(), info.dtype, info.shape.clone(), bytes)
    };
    let mut all: Vec<Tensor> = layout.tensor_ids().map(one).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Merges an adapter into a model's GGUF files and into their originals; both must come to the same.
fn check(architecture: &str, base: &[Tensor], form: &str, adapter: &[Tensor], changed: usize) {
    for (dtype, casts) in [
        (DType::F32, &[None, Some(DType::BF16)][..]),
        (DType::F16, &[None, Some(DType::F32)]),
        (DType::Q8_0, &[Some(DType::F32), Some(DType::F16), Some(DType::BF16)]),
    ] {
        let (gguf, original) = pair(base, architecture, dtype);
        for &cast in casts {
            let merged = |model: &Checkpoint| {
                let adapter = Adapter::from_checkpoint(file("adapter", adapter), 0.75).unwrap();
                let weights = Weights::patched(model.clone(), vec![adapter], Matching::Strict);
                let weights = weights.unwrap_or_else(|error| panic!("{architecture} {form}: {error}"));
                assert_eq!(weights.patches().iter().count(), changed, "{architecture} {form}");
                cast.map_or(weights.clone(), |to| weights.cast_floats(to).unwrap())
            };
            let (got, wanted) = (read(&merged(&gguf)), read(&merged(&original)));
            assert_eq!(got.len(), base.len());
            for (got, wanted) in got.iter().zip(&wanted) {
                assert_eq!((&got.0, got.1, &got.2), (&wanted.0, wanted.1, &wanted.2), "{architecture} {form}");
                assert!(got.3 == wanted.3, "{architecture} {form} {dtype} as {cast:?}: {}", got.0);
            }
        }
    }
}

/// How many modules have a matrix, or more dimensions.
fn matrices(base: &[Tensor]) -> usize {
    renamed(base, str::to_owned).len()
}

#[test]
fn flux_merges_as_its_original() {
    let base = flux();
    let all = matrices(&base);
    check("flux", &base, "kohya", &kohya(&base), all);
    check("flux", &base, "native", &native(&base), all);
    // diffusers and ai-toolkit keep apart what Black Forest Labs fuse.
    let mut apart = Vec::new();
    for block in 0..2 {
        let double = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"];
        let name = format!("transformer.transformer_blocks.{block}.");
        apart.extend(modules(&format!("{name}attn."), &double.map(|part| (part, 32, 32))));
        for feed in ["ff", "ff_context"] {
            apart.extend(modules(&format!("{name}{feed}."), &[("net.0.proj", 128, 32), ("net.2", 32, 128)]));
        }
        apart.extend(modules(&name, &[("norm1.linear", 192, 32), ("norm1_context.linear", 192, 32)]));
        let name = format!("transformer.single_transformer_blocks.{block}.");
        apart.extend(modules(&format!("{name}attn."), &["to_q", "to_k", "to_v"].map(|part| (part, 32, 32))));
        apart.extend(modules(&name, &[("proj_mlp", 128, 32), ("proj_out", 32, 160), ("norm.linear", 96, 32)]));
    }
    let ends =
        [("x_embedder", 32, 64), ("context_embedder", 32, 64), ("proj_out", 64, 32), ("norm_out.linear", 64, 32)];
    apart.extend(modules("transformer.", &ends));
    check("flux", &base, "diffusers", &lora(Pair::Peft, &apart), all);
    let flat: Vec<Module> = apart
        .iter()
        .map(|(name, shape)| (name.replacen("transformer.", "lora_transformer_", 1).replace('.', "_"), shape.clone()))
        .collect();
    check("flux", &base, "OneTrainer", &lora(Pair::Kohya, &flat), all);
}

#[test]
fn wan_merges_as_its_original() {
    let base = wan();
    let all = matrices(&base);
    check("wan", &base, "kohya", &kohya(&base), all);
    check("wan", &base, "ai-toolkit", &native(&base), all);
    let diffusers = |name: &str| {
        let pairs = [
            ("self_attn.", "attn1.to_"),
            ("cross_attn.", "attn2.to_"),
            (".to_o", ".to_out.0"),
            ("ffn.0", "ffn.net.0.proj"),
            ("ffn.2", "ffn.net.2"),
            ("head.head", "proj_out"),
            ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
            ("time_projection.1", "condition_embedder.time_proj"),
        ];
        pairs.iter().fold(format!("transformer.{name}"), |name, (from, to)| name.replace(from, to))
    };
    check("wan", &base, "diffusers", &lora(Pair::Peft, &renamed(&base, diffusers)), all);
    // Changes of what is no matrix.
    let change = |name: &str, shape: &[u64]| f32s(name, shape, &numbers(shape.iter().product(), name));
    let others = [
        change("diffusion_model.blocks.0.self_attn.q.diff_b", &[32]),
        change("diffusion_model.blocks.0.norm3.diff", &[32]),
        change("diffusion_model.blocks.0.diff_m", &[1, 6, 32]),
        change("diffusion_model.patch_embedding.diff", &[32, 16, 1, 2, 2]),
    ];
    check("wan", &base, "differences", &others, 4);
}

#[test]
fn qwen_image_merges_as_its_original() {
    let base = qwen_image();
    let all = matrices(&base);
    check("qwen_image", &base, "kohya", &kohya(&base), all);
    check("qwen_image", &base, "ai-toolkit", &native(&base), all);
    let diffusers = renamed(&base, |name| format!("transformer.{name}"));
    check("qwen_image", &base, "diffusers", &lora(Pair::Peft, &diffusers), all);
    check("qwen_image", &base, "without a prefix", &lora(Pair::Kohya, &renamed(&base, str::to_owned)), all);
}
