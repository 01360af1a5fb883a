//! The examples on GGUF files, as a user runs them.

#[path = "support/examples.rs"]
mod run;
mod support;

use std::fs;

use run::{fails, json_of, works};
use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use support::gguf::{Gguf, Value};
use tensor_offload::{Checkpoint, DType, Weights};

/// A mixture of experts in as many types as one has, split or not.
fn moe(layers: u64) -> Gguf {
    let mut file = Gguf::new("qwen3moe").entry("qwen3moe.block_count", Value::U32(layers as u32));
    file = file.some("token_embd.weight", DType::Q4_K, &[64, 256]);
    for layer in 0..layers {
        for (name, dtype, shape) in [
            ("attn_norm", DType::F32, &[256][..]),
            ("attn_q", DType::Q4_K, &[256, 256]),
            ("attn_k", DType::Q8_0, &[64, 256]),
            ("attn_v", DType::Q6_K, &[64, 256]),
            ("attn_output", DType::IQ4_XS, &[256, 256]),
            ("ffn_gate_inp", DType::F32, &[4, 256]),
            ("ffn_gate_exps", DType::MXFP4, &[4, 32, 256]),
            ("ffn_up_exps", DType::IQ2_XXS, &[4, 32, 256]),
            ("ffn_down_exps", DType::TQ1_0, &[4, 256, 256]),
        ] {
            file = file.some(&format!("blk.{layer}.{name}.weight"), dtype, shape);
        }
    }
    file.some("output_norm.weight", DType::F32, &[256]).some("output.weight", DType::Q6_K, &[64, 256])
}

fn total(file: &Gguf) -> u64 {
    file.tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum()
}

#[test]
fn inspect_shows_names_types_sizes_and_hashes() {
    let (file, folder) = (moe(3), tempfile::tempdir().unwrap());
    let path = folder.path().join("moe.gguf").display().to_string();
    fs::write(&path, file.build()).unwrap();
    let report = json_of("inspect", &[path.as_str(), "--hash"]);
    assert_eq!(report["total_bytes"], total(&file));
    assert_eq!(report["gguf"]["architecture"], "qwen3moe");
    for tensor in &file.tensors {
        let found = report["tensors"].as_array().unwrap().iter().find(|row| row["name"] == *tensor.name).unwrap();
        let hash: String = Sha256::digest(&tensor.bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!((&found["sha256"], &found["bytes"]), (&Json::from(hash), &Json::from(tensor.bytes.len())));
        assert_eq!(found["dtype"], DType::from_ggml_number(tensor.kind).unwrap().name());
    }
    let layers: Vec<&str> =
        report["layers"].as_array().unwrap().iter().map(|layer| layer["name"].as_str().unwrap()).collect();
    assert_eq!(layers, ["token_embd", "blk.0", "blk.1", "blk.2", "output_norm", "output"]);
    let text = works("inspect", &[path.as_str(), "--tensors"]);
    assert!(
        text.contains("blk.0 … blk.2") && text.contains("IQ2_XXS") && text.contains("architecture qwen3moe"),
        "{text}"
    );
}

#[test]
fn plans_have_the_bytes_of_the_file_and_streams_bring_them() {
    let (file, folder) = (moe(6), tempfile::tempdir().unwrap());
    let path = folder.path().join("model").display().to_string();
    fs::write(&path, file.build()).unwrap();
    let device = ["--device", "cuda:0=16mb", "--device", "cpu=64mb"];
    let plan = json_of("plan", &[&[path.as_str(), "--alloc", "cuda:0,50%;cpu,50%"], &device[..]].concat());
    let planned: u64 = plan["assignments"].as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap()).sum();
    assert_eq!(planned, total(&file));
    let options = ["--alloc", "cuda:0,30%;cpu,*", "--compute-ms", "1"];
    let offload = json_of("offload", &[&[path.as_str()], &options[..], &device].concat());
    // The example compares every streamed tensor with the file's bytes, and fails if one differs.
    assert_eq!(offload["sha256"].as_str().map(str::len), Some(64));
    let whatif = json_of("whatif", &[&[path.as_str(), "--alloc", "cuda:0,30%;cpu,*"], &device[..]].concat());
    assert!(whatif.is_object());
}

/// The values of all tensors in blocks, by a hash of names and values in the order of execution.
#[test]
fn offload_computes_the_values_of_blocks_in_their_layers_turns() {
    let (file, folder) = (moe(2), tempfile::tempdir().unwrap());
    let path = folder.path().join("model.gguf").display().to_string();
    fs::write(&path, file.build()).unwrap();
    let options = ["--alloc", "cuda:0,30%;cpu,*", "--compute-ms", "1", "--dequantise", "BF16"];
    let device = ["--device", "cuda:0=16mb", "--device", "cpu=64mb"];
    let checkpoint = Checkpoint::open(&path).unwrap();
    let layout = checkpoint.layout();
    let modules = layout.layer_ids().flat_map(|layer| layout.modules_in(layer));
    let in_order: Vec<_> =
        modules.flat_map(|module| &module.tensors).map(|tensor| layout.tensor(*tensor).unwrap()).collect();
    for device in [&device[..], &[]] {
        let report = json_of("offload", &[&[path.as_str()], &options[..], device].concat());
        let (mut hash, mut tensors) = (Sha256::new(), 0);
        for tensor in in_order.iter().filter(|tensor| tensor.dtype.is_ggml_block()) {
            let bytes = &file.tensors.iter().find(|other| other.name == tensor.name).unwrap().bytes;
            let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
            tensor_offload::patch::dequantise(tensor.dtype, bytes, &mut values).unwrap();
            hash.update(&tensor.name);
            let one_nan = |value: &f32| if value.is_nan() { f32::NAN } else { *value };
            values.iter().map(one_nan).for_each(|value| hash.update(half::bf16::from_f32(value).to_le_bytes()));
            tensors += 1;
        }
        let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(report["values"], serde_json::json!({ "dtype": "BF16", "tensors": tensors, "sha256": hash }));
    }
    let (_, message) = fails("offload", &[path.as_str(), "--alloc", "cpu,*", "--dequantise", "I8"]);
    assert!(message.contains("--dequantise I8") && message.contains("F32, F16 or BF16"), "{message}");
}

#[test]
fn errors_name_the_file_and_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.gguf").display().to_string();
    fs::write(&path, Gguf { version: 1, ..moe(1) }.build()).unwrap();
    for (example, args) in [("inspect", vec![]), ("plan", vec!["--alloc", "cpu,*"]), ("offload", vec![])] {
        let (kind, message) = fails(example, &[&[path.as_str()], &args[..]].concat());
        assert!(kind == "File" && message.contains("old.gguf") && message.contains("version 1"), "{message}");
    }
    let path = folder.path().join("q4.gguf").display().to_string();
    fs::write(&path, moe(1).build()).unwrap();
    let out = folder.path().join("out.safetensors").display().to_string();
    let (_, message) = fails("merge", &[path.as_str(), "--out", &out]);
    assert!(message.contains("token_embd.weight") && message.contains("Q4_K"), "{message}");
}

#[test]
fn merge_promotes_a_file_of_blocks_and_says_how_where_it_cannot_write_them() {
    let folder = tempfile::tempdir().unwrap();
    let base = format!("{}/tests/data/gguf/mixed.gguf", env!("CARGO_MANIFEST_DIR"));
    let out = folder.path().join("out.safetensors").display().to_string();
    let (_, message) = fails("merge", &[base.as_str(), "--out", &out]);
    for part in ["15 of 18 tensors", "`blk.0.q8_0.weight` (Q8_0)", "--promote F32, F16 or BF16"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!fs::exists(&out).unwrap());
    for (text, dtype) in [("f32", DType::F32), ("F16", DType::F16), ("bf16", DType::BF16)] {
        works("merge", &[base.as_str(), "--promote", text, "--out", &out]);
        let (merged, file) = (Checkpoint::open(&out).unwrap(), Checkpoint::open(&base).unwrap());
        let promoted = Weights::new(file.clone()).cast_floats(dtype).unwrap();
        for (tensor, info) in file.layout().tensor_ids().zip(file.layout().tensors()) {
            let written = merged.find(&info.name).unwrap();
            let found = merged.layout().tensor(written).unwrap();
            assert_eq!((found.dtype, &found.shape), (dtype, &info.shape), "{}", info.name);
            let mut bytes = [vec![0; found.bytes as usize], vec![0; found.bytes as usize]];
            merged.read(written, &mut bytes[0]).unwrap();
            promoted.read(tensor, &mut bytes[1]).unwrap();
            assert!(bytes[0] == bytes[1], "{} as {dtype}", info.name);
        }
    }
    works("offload", &[base.as_str(), "--cast", "bf16"]);
}
