//! Adapters as programs write them: where rank and alpha stand, whole tensors beside factors, one change under several names,
//! fused weights in other kinds than LoRA, mlx-lm's folders, and models that tie embedding and head.

mod reference;

use std::fs;
use std::path::Path;

use reference::{Tensor, f32s, floats, merged, tensor};
use tensor_offload::adapter::{Adapter, FactorSource, Matching, SkipReason, Weights};
use tensor_offload::error::AdapterFault;
use tensor_offload::{Checkpoint, DType, Error};

/// A safetensors file with metadata in its header.
fn file_with(metadata: &[(&str, &str)], tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    if !metadata.is_empty() {
        let entries = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
        header.insert("__metadata__".to_owned(), serde_json::Value::Object(entries));
    }
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        let offsets = [begin, data.len()];
        header
            .insert(name.clone(), serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": offsets}));
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes().chain(data));
    bytes
}

fn checkpoint(tensors: &[Tensor]) -> Checkpoint {
    Checkpoint::from_bytes("file", file_with(&[], tensors)).unwrap()
}

fn adapter(metadata: &[(&str, &str)], tensors: &[Tensor]) -> Adapter {
    let file = Checkpoint::from_bytes("adapter", file_with(metadata, tensors)).unwrap();
    Adapter::from_checkpoint(file, 1.0).unwrap()
}

/// A folder with a configuration and one weights file.
fn folder(root: &Path, name: &str, config: &str, file: &str, tensors: &[Tensor]) -> std::path::PathBuf {
    let folder = root.join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("adapter_config.json"), config).unwrap();
    fs::write(folder.join(file), file_with(&[], tensors)).unwrap();
    folder
}

fn ones(name: &str, shape: &[u64]) -> Tensor {
    f32s(name, shape, &vec![1.0; shape.iter().product::<u64>() as usize])
}

fn zeros(name: &str, shape: &[u64]) -> Tensor {
    f32s(name, shape, &vec![0.0; shape.iter().product::<u64>() as usize])
}

/// Factors of rank 2 for a weight of 4 by 4; each element of their product is 2.
fn pair(module: &str) -> Vec<Tensor> {
    vec![ones(&format!("{module}.lora_A.weight"), &[2, 4]), ones(&format!("{module}.lora_B.weight"), &[4, 2])]
}

fn fault(base: &Checkpoint, adapter: Adapter) -> AdapterFault {
    match Weights::patched(base.clone(), vec![adapter], Matching::Strict) {
        Err(Error::Adapter { fault, .. }) => *fault,
        other => panic!("{other:?}"),
    }
}

/// The merged values of every tensor.
fn values(base: &Checkpoint, adapter: Adapter) -> Vec<Vec<f32>> {
    let (tensors, _) = merged(base, vec![adapter], Matching::Strict);
    tensors.iter().map(|(_, dtype, _, bytes)| floats(*dtype, bytes)).collect()
}

#[test]
fn the_factor_comes_from_the_first_place_that_says_an_alpha() {
    let base = checkpoint(&[zeros("q.weight", &[4, 4])]);
    let diffusers = r#"{"transformer.r": 2, "transformer.lora_alpha": 8, "transformer.use_rslora": false}"#;
    let diffusers = ("lora_adapter_metadata", diffusers);
    let kohya = [("ss_network_alpha", "1"), ("ss_network_dim", "2")];
    let metadata = |key: &str| FactorSource::Metadata(key.to_owned());
    let with = |alpha: Tensor| [pair("transformer.q"), vec![alpha]].concat();
    let alpha = |dtype, bytes: &[u8]| with(tensor("transformer.q.alpha", dtype, &[], bytes.to_vec()));
    let float = alpha(DType::F32, &3f32.to_le_bytes());
    let cases = [
        (adapter(&[diffusers], &pair("transformer.q")), 4.0, metadata("lora_adapter_metadata")),
        (adapter(&kohya, &pair("transformer.q")), 0.5, metadata("ss_network_alpha")),
        (adapter(&[("network_alpha", "6.0")], &pair("transformer.q")), 3.0, metadata("network_alpha")),
        (adapter(&[diffusers], &float), 1.5, FactorSource::Tensor),
        (adapter(&[], &alpha(DType::I64, &5i64.to_le_bytes())), 2.5, FactorSource::Tensor),
        (adapter(&[], &alpha(DType::F64, &5f64.to_le_bytes())), 2.5, FactorSource::Tensor),
        (adapter(&[("ss_network_dim", "Dynamic")], &pair("transformer.q")), 1.0, FactorSource::Nothing),
        (adapter(&[diffusers], &float).alpha(1.0).unwrap(), 0.5, FactorSource::Caller),
    ];
    for (adapter, factor, source) in cases {
        let (tensors, weights) = merged(&base, vec![adapter], Matching::Strict);
        let told = weights.report().applied[0].factor.clone().unwrap();
        assert_eq!((told.value, told.source), (factor, source.clone()));
        assert_eq!(floats(DType::F32, &tensors[0].3), [2.0 * factor as f32; 16], "{source}");
        assert!(weights.report().to_string().contains(&format!("factor {factor} ({source})")), "{}", weights.report());
    }
    for contradiction in [&[diffusers, kohya[0]][..], &[("lora_alpha", "2"), ("rank", "16")]] {
        let fault = fault(&base, adapter(contradiction, &pair("transformer.q")));
        assert!(matches!(fault, AdapterFault::Metadata { .. }), "{fault}");
    }
    let none = fault(&base, adapter(&[], &pair("transformer.q")).only("unet."));
    assert!(matches!(&none, AdapterFault::NoComponent { sample, .. } if *sample == ["transformer.q"]), "{none}");
}

#[test]
fn pefts_names_never_mean_a_factor_of_one() {
    let base = checkpoint(&[zeros("q.weight", &[4, 4])]);
    let tensors = pair("base_model.model.q");
    assert_eq!(fault(&base, adapter(&[], &tensors)), AdapterFault::NoAlpha);
    assert_eq!(values(&base, adapter(&[("lora_alpha", "1")], &tensors))[0], [1.0; 16]);
    // A configuration beside a file of another name is found by the names, whatever its folder's only file is called.
    let root = tempfile::tempdir().unwrap();
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 8}"#;
    let folder = folder(root.path(), "lora", config, "my_lora_v2.safetensors", &tensors);
    for path in [folder.clone(), folder.join("my_lora_v2.safetensors")] {
        assert_eq!(values(&base, Adapter::open(path, 1.0).unwrap())[0], [8.0; 16]);
    }
    // The only file of the folder is the configuration's, whatever its names are.
    let plain = self::folder(root.path(), "plain", config, "lora.safetensors", &pair("q"));
    assert_eq!(values(&base, Adapter::open(plain.join("lora.safetensors"), 1.0).unwrap())[0], [8.0; 16]);
    let with_alpha = [pair("q"), vec![f32s("q.alpha", &[], &[1.0])]].concat();
    let plain = self::folder(root.path(), "alpha", config, "lora.safetensors", &with_alpha);
    assert_eq!(values(&base, Adapter::open(&plain, 1.0).unwrap())[0], [1.0; 16]);
    // Another program's file beside it keeps its own meaning.
    fs::write(folder.join("other.safetensors"), file_with(&[], &pair("transformer.q"))).unwrap();
    assert_eq!(values(&base, Adapter::open(folder.join("other.safetensors"), 1.0).unwrap())[0], [2.0; 16]);
    // Adapters of other names are in folders of their own.
    let error = Adapter::open(root.path(), 1.0).unwrap_err().to_string();
    assert!(error.contains("lora"), "{error}");
}

#[test]
fn adapters_of_any_name_are_read() {
    let base = checkpoint(&[zeros("q.weight", &[4, 4]), zeros("emb.weight", &[4, 4])]);
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 2}"#;
    let named = [
        ones("base_model.model.q.lora_A.my-style.weight", &[2, 4]),
        ones("base_model.model.q.lora_B.my-style.weight", &[4, 2]),
        ones("base_model.model.emb.lora_embedding_A.my-style", &[2, 4]),
        ones("base_model.model.emb.lora_embedding_B.my-style", &[4, 2]),
    ];
    let adapter = Adapter::from_peft(checkpoint(&named), config, 1.0).unwrap();
    assert_eq!(values(&base, adapter), [[2.0; 16], [2.0; 16]]);
    let mut two = named.to_vec();
    two.push(ones("base_model.model.q.lora_A.other.weight", &[2, 4]));
    let error = Adapter::from_peft(checkpoint(&two), config, 1.0).unwrap_err().to_string();
    assert!(error.contains("my-style") && error.contains("other"), "{error}");
}

#[test]
fn a_row_is_changed_once() {
    let base = checkpoint(&[zeros("b.qkv.weight", &[12, 4]), zeros("b.out.weight", &[4, 4])]);
    let up = |name: &str, values: &[f32]| f32s(&format!("{name}.lora_B.weight"), &[values.len() as u64, 1], values);
    let down = |name: &str| ones(&format!("{name}.lora_A.weight"), &[1, 4]);
    let all: Vec<f32> = (0..12).map(|value| value as f32).collect();
    let fused = [up("b.qkv", &all), down("b.qkv")];
    let parts = |q: f32| {
        let each = [("b.to_q", 0), ("b.to_k", 4), ("b.to_v", 8)];
        let mut tensors: Vec<Tensor> =
            each.iter().flat_map(|(name, at)| [up(name, &all[*at..at + 4]), down(name)]).collect();
        tensors[0] = up("b.to_q", &[q, 1.0, 2.0, 3.0]);
        tensors
    };
    // The same twice counts once, in either order.
    for tensors in [[&fused[..], &parts(0.0)].concat(), [&parts(0.0), &fused[..]].concat()] {
        let (got, weights) = merged(&base, vec![adapter(&[], &tensors)], Matching::Strict);
        let wanted: Vec<f32> = all.iter().flat_map(|value| [*value; 4]).collect();
        assert_eq!(floats(DType::F32, &got[0].3), wanted);
        assert!(weights.report().skipped.iter().all(|skipped| skipped.why == SkipReason::Repeated));
        assert!(!weights.report().skipped.is_empty());
    }
    let different = fault(&base, adapter(&[], &[&fused[..], &parts(7.0)].concat()));
    let AdapterFault::Overlap { other, tensor } = &different else { panic!("{different}") };
    assert!(other.contains("qkv") && tensor == "b.qkv.weight", "{different}");
    // A part of what another module changes.
    let more = [up("b.to_q", &all[..4]), down("b.to_q"), up("b.to_q", &all[..4]), down("b.to_q")];
    let renamed = more.map(|mut tensor| {
        tensor.0 = tensor.0.replace("b.", "diffusion_model.b.");
        tensor
    });
    let partly =
        fault(&base, adapter(&[], &[&fused[..], &parts(0.0), &renamed[2..], &[ones("b.to_q.diff_b", &[4])]].concat()));
    assert!(matches!(partly, AdapterFault::PartlyMatches { .. }), "{partly}");
}

#[test]
fn whole_tensors_beside_factors_take_the_place_of_the_checkpoints() {
    let base = checkpoint(&[
        zeros("img_in.weight", &[4, 2]),
        zeros("img_in.bias", &[4]),
        zeros("norm.key_norm.scale", &[2]),
        zeros("x.weight", &[4, 4]),
    ]);
    let mut tensors = pair("img_in");
    tensors.push(f32s("img_in.lora_B.bias", &[4], &[5.0; 4]));
    tensors.push(f32s("norm.key_norm.scale", &[2], &[7.0; 2]));
    let (got, weights) = merged(&base, vec![adapter(&[], &tensors)], Matching::Strict);
    // A control LoRA's input is wider: the new columns begin as zeros.
    assert_eq!((&got[0].2[..], floats(DType::F32, &got[0].3)), (&[4, 4][..], vec![2.0; 16]));
    assert_eq!((floats(DType::F32, &got[1].3), floats(DType::F32, &got[2].3)), (vec![5.0; 4], vec![7.0; 2]));
    assert_eq!(weights.layout().tensors()[0].shape, [4, 4]);
    // A tensor that is not the checkpoint's in name and shape is not understood.
    for other in [f32s("norm.key_norm.scale", &[3], &[7.0; 3]), f32s("nothing.scale", &[2], &[7.0; 2])] {
        let fault = fault(&base, adapter(&[], &[pair("x"), vec![other]].concat()));
        assert!(matches!(fault, AdapterFault::NotUnderstood { .. }), "{fault}");
    }
    // Without any factors a file is no adapter.
    let fault = fault(&base, adapter(&[], &[zeros("x.weight", &[4, 4])]));
    assert!(matches!(fault, AdapterFault::NothingMatches { .. }), "{fault}");
    // Other weights do not grow.
    let wide = [ones("x.lora_A.weight", &[2, 8]), ones("x.lora_B.weight", &[4, 2])];
    assert!(matches!(self::fault(&base, adapter(&[], &wide)), AdapterFault::Shape { .. }));
}

#[test]
fn a_difference_of_a_modulation_table_is_added() {
    let base = checkpoint(&[zeros("blocks.0.modulation", &[1, 6, 4]), zeros("head.modulation", &[1, 2, 4])]);
    for [block, head] in [
        ["diffusion_model.blocks.0.diff_m", "diffusion_model.head.diff_m"],
        ["lora_unet_blocks_0.diff_m", "lora_unet_head.diff_m"],
    ] {
        let tensors = [ones(block, &[1, 6, 4]), ones(head, &[1, 2, 4])];
        assert_eq!(values(&base, adapter(&[], &tensors)), [vec![1.0; 24], vec![1.0; 8]]);
    }
}

#[test]
fn lokr_and_oft_of_a_fused_weight_are_cut_by_rows() {
    let start: Vec<f32> = (0..48).map(|value| value as f32 * 0.25 - 3.0).collect();
    let fused = checkpoint(&[f32s("b.qkv.weight", &[12, 4], &start)]);
    let apart = checkpoint(&[
        f32s("b.to_q.weight", &[4, 4], &start[..16]),
        f32s("b.to_k.weight", &[4, 4], &start[16..32]),
        f32s("b.to_v.weight", &[4, 4], &start[32..]),
    ]);
    let numbers = |count: usize| (0..count).map(|value| value as f32 * 0.5 - 1.0).collect::<Vec<f32>>();
    let lokr = vec![f32s("b.qkv.lokr_w1", &[2, 2], &numbers(4)), f32s("b.qkv.lokr_w2", &[6, 2], &numbers(12))];
    let tucker = vec![
        f32s("b.qkv.lokr_w1", &[6, 2], &numbers(12)),
        f32s("b.qkv.lokr_w2_a", &[2, 1], &numbers(2)),
        f32s("b.qkv.lokr_w2_b", &[1, 2], &numbers(2)),
    ];
    let oft = vec![f32s("b.qkv.oft_blocks", &[6, 2, 2], &numbers(24))];
    let mut dora = vec![f32s("b.qkv.lora_B.weight", &[12, 1], &numbers(12)), ones("b.qkv.lora_A.weight", &[1, 4])];
    dora.push(f32s("b.qkv.dora_scale", &[12, 1], &numbers(12)));
    for (kind, tensors) in [("LoKr", lokr), ("LoKr of factors", tucker), ("OFT", oft), ("DoRA", dora)] {
        let whole = values(&fused, adapter(&[], &tensors));
        assert_ne!(whole[0], start, "{kind}");
        assert_eq!(values(&apart, adapter(&[], &tensors)).concat(), whole[0], "{kind}");
    }
    // A block that reaches from q into k mixes rows of both.
    let across = [f32s("b.qkv.oft_blocks", &[2, 6, 6], &numbers(72))];
    let fault = fault(&apart, adapter(&[], &across));
    assert!(matches!(&fault, AdapterFault::Unsupported { kind } if kind.contains("b.to_q")), "{fault}");
}

#[test]
fn more_words_make_the_embedding_larger() {
    let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "modules_to_save": ["embed_tokens"]}"#;
    let base = checkpoint(&[zeros("model.embed_tokens.weight", &[4, 4]), zeros("model.q.weight", &[4, 4])]);
    let words = vec![f32s("base_model.model.model.embed_tokens.weight", &[6, 4], &[3.0; 24])];
    let (got, _) = merged(&base, vec![Adapter::from_peft(checkpoint(&words), config, 1.0).unwrap()], Matching::Strict);
    assert_eq!((&got[0].2[..], floats(DType::F32, &got[0].3)), (&[6, 4][..], vec![3.0; 24]));
    // PEFT saves what lies beneath an embedding's factors; these are added to it.
    let beneath = vec![
        f32s("base_model.model.model.embed_tokens.base_layer.weight", &[6, 4], &[3.0; 24]),
        ones("base_model.model.model.embed_tokens.lora_embedding_A", &[2, 6]),
        ones("base_model.model.model.embed_tokens.lora_embedding_B", &[4, 2]),
    ];
    let adapter = Adapter::from_peft(checkpoint(&beneath), config, 1.0).unwrap();
    let (got, _) = merged(&base, vec![adapter], Matching::Strict);
    assert_eq!(floats(DType::F32, &got[0].3), [5.0; 24]);
    // Other weights keep their rows, and so do embeddings of another width.
    for name in ["model.q.weight", "model.embed_tokens.weight"] {
        let shape = if name.contains("q") { [6, 4] } else { [6, 5] };
        let tensors = [f32s(&format!("base_model.model.{name}"), &shape, &vec![1.0; (shape[0] * shape[1]) as usize])];
        let adapter = Adapter::from_peft(checkpoint(&tensors), config, 1.0).unwrap();
        assert!(matches!(fault(&base, adapter), AdapterFault::Shape { .. }), "{name}");
    }
}

#[test]
fn folders_of_mlx_lm_are_read() {
    let root = tempfile::tempdir().unwrap();
    let base = checkpoint(&[zeros("model.layers.0.q.weight", &[4, 3]), zeros("model.embed_tokens.weight", &[5, 3])]);
    let lora = [
        f32s("model.layers.0.q.lora_a", &[3, 2], &[1.0, 0.0, 2.0, 0.0, 3.0, 0.0]),
        f32s("model.layers.0.q.lora_b", &[2, 4], &[1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0]),
        ones("model.embed_tokens.lora_a", &[5, 2]),
        ones("model.embed_tokens.lora_b", &[2, 3]),
    ];
    let config = r#"{"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": {"rank": 2, "scale": 10.0}}"#;
    let path = folder(root.path(), "lora", config, "adapters.safetensors", &lora);
    let got = values(&base, Adapter::open(&path, 1.0).unwrap());
    let wanted: Vec<f32> = [1.0, 2.0, 3.0, 4.0].iter().flat_map(|b| [1.0, 2.0, 3.0].map(|a| 10.0 * a * b)).collect();
    assert_eq!((&got[0], &got[1]), (&wanted, &vec![20.0; 15]));
    // Without the configuration nothing says the scale.
    assert_eq!(fault(&base, adapter(&[], &lora)), AdapterFault::NoAlpha);
    let whole = r#"{"fine_tune_type": "full", "num_layers": 4}"#;
    let path = folder(root.path(), "full", whole, "adapters.safetensors", &[ones("model.layers.0.q.weight", &[4, 3])]);
    assert_eq!(values(&base, Adapter::open(path, 1.0).unwrap())[0], [1.0; 12]);
    let dora = r#"{"fine_tune_type": "dora", "lora_parameters": {"scale": 1.0}}"#;
    let base = checkpoint(&[f32s("q.weight", &[2, 2], &[3.0, 0.0, 0.0, 1.0])]);
    let factors = [zeros("q.lora_a", &[2, 1]), zeros("q.lora_b", &[1, 2]), f32s("q.m", &[2], &[6.0, 1.0])];
    let path = folder(root.path(), "dora", dora, "adapters.safetensors", &factors);
    assert_eq!(values(&base, Adapter::open(path, 1.0).unwrap())[0], [6.0, 0.0, 0.0, 1.0]);
}

/// A folder of a small model that ties its embedding and head.
fn tied(root: &Path) -> Checkpoint {
    fs::write(root.join("config.json"), r#"{"tie_word_embeddings": true}"#).unwrap();
    let tensors = [zeros("model.embed_tokens.weight", &[4, 4]), zeros("model.layers.0.q.weight", &[4, 4])];
    fs::write(root.join("model.safetensors"), file_with(&[], &tensors)).unwrap();
    Checkpoint::open(root).unwrap()
}

fn read(weights: &Weights, name: &str) -> Vec<f32> {
    let tensor = weights.layout().find(name).unwrap_or_else(|| panic!("no {name}"));
    let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
    weights.read(tensor, &mut bytes).unwrap();
    floats(DType::F32, &bytes)
}

#[test]
fn a_tied_head_becomes_a_tensor_of_its_own_where_it_comes_to_differ() {
    let root = tempfile::tempdir().unwrap();
    let base = tied(root.path());
    let config = |more: &str| format!(r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 2{more}}}"#);
    let embedding = vec![
        ones("base_model.model.model.embed_tokens.lora_embedding_A", &[2, 4]),
        ones("base_model.model.model.embed_tokens.lora_embedding_B", &[4, 2]),
    ];
    let head = pair("base_model.model.lm_head");
    let patched = |tensors: &[Tensor], config: &str| {
        let adapter = Adapter::from_peft(checkpoint(tensors), config, 1.0).unwrap();
        Weights::patched(base.clone(), vec![adapter], Matching::Strict).unwrap()
    };
    let (changed, unchanged) = ([2.0; 16], [0.0; 16]);
    for (tensors, of_embedding, of_head) in [(&embedding, changed, unchanged), (&head, unchanged, changed)] {
        let weights = patched(tensors, &config(""));
        assert_eq!(read(&weights, "model.embed_tokens.weight"), of_embedding);
        assert_eq!(read(&weights, "lm_head.weight"), of_head);
        assert_eq!(weights.report().untied.as_ref().unwrap().head, "lm_head.weight");
        assert!(weights.report().to_string().contains("tie_word_embeddings"));
        assert_eq!(weights.layout().layers().last().unwrap().name, "lm_head");
        assert_eq!(weights.layout().bytes(), base.layout().bytes() + 64);
        assert!(weights.layout().modules().iter().all(|module| !module.tied));
    }
    // The same at both ends, a model that keeps both one, and other modules change nothing about it.
    let both = [embedding.clone(), head.clone()].concat();
    let weights = patched(&both, &config(""));
    assert_eq!(weights.report().skipped.iter().filter(|s| s.why == SkipReason::Repeated).count(), 2);
    for weights in [
        weights,
        patched(&embedding, &config(r#", "ensure_weight_tying": true"#)),
        patched(&pair("base_model.model.model.layers.0.q"), &config("")),
    ] {
        assert_eq!((weights.layout().find("lm_head.weight"), &weights.report().untied), (None, &None));
        assert!(weights.layout().modules().iter().any(|module| module.tied));
    }
    // Both, differently.
    let mut differently = both;
    differently[2] = zeros("base_model.model.lm_head.lora_A.weight", &[2, 4]);
    let weights = patched(&differently, &config(""));
    assert_eq!(read(&weights, "model.embed_tokens.weight"), changed);
    assert_eq!(read(&weights, "lm_head.weight"), unchanged);
    // More words are for both ends.
    let more = [f32s("base_model.model.model.embed_tokens.weight", &[6, 4], &[3.0; 24])];
    let weights = patched(&more, &config(""));
    assert_eq!((read(&weights, "model.embed_tokens.weight"), &weights.report().untied), (vec![3.0; 24], &None));
}
