//! Writing GGUF files: what is read from a written one, by this crate and by another, and what `merge` writes.

#[path = "support/examples.rs"]
mod run;
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use run::{fails, json_of, works};
use support::gguf::{Gguf, Value};
use tensor_offload::checkpoint::{GgufMetadata, TensorSpec, write_gguf, write_safetensors};
use tensor_offload::patch::{dequantise, quantise};
use tensor_offload::{Adapter, Checkpoint, DType, Matching, Weights};

/// Tensors of a model by name: types, shapes and bytes.
type Contents = BTreeMap<String, (DType, Vec<u64>, Vec<u8>)>;

fn contents(model: &Checkpoint) -> Contents {
    let tensors = model.layout().tensor_ids().zip(model.layout().tensors());
    let read = |(tensor, info): (_, &tensor_offload::checkpoint::TensorInfo)| {
        let mut bytes = vec![0; info.bytes as usize];
        model.read(tensor, &mut bytes).unwrap();
        (info.name.clone(), (info.dtype, info.shape.clone(), bytes))
    };
    tensors.map(read).collect()
}

/// Writes a model as it is.
fn copy(model: &Checkpoint, path: &Path) {
    let tensors = model.layout().tensors();
    let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(&*t.name, t.dtype, &*t.shape)).collect();
    let metadata = model.gguf().unwrap().to_metadata().unwrap();
    let all = contents(model);
    write_gguf(path, &specs, &metadata, |index, out| out.put(&all[&specs[index].name].2)).unwrap();
}

/// Numbers around 0.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut random = support::Random::new(seed);
    (0..count).map(|_| (random.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

const TYPES: [(&str, DType); 5] = [
    ("attn_q", DType::Q4_K),
    ("attn_k", DType::Q8_0),
    ("attn_v", DType::Q4_0),
    ("attn_output", DType::F16),
    ("ffn_up", DType::IQ2_XXS),
];

/// One block of a Llama in several types, whose tensors no adapter changes besides those of attention.
fn llama() -> Gguf {
    let mut file = Gguf::new("llama")
        .entry("llama.attention.head_count", Value::U32(4))
        .entry("llama.attention.head_count_kv", Value::U32(4))
        .entry("general.file_type", Value::U32(15))
        .entry("zz.first", Value::F32(0.1))
        .entry("aa.last", Value::Raw(8, [&2u64.to_le_bytes()[..], b"a\xff"].concat()))
        .entry("tokenizer.ggml.tokens", Value::Array(8, vec!["<s>".into(), "".into()]))
        .some("token_embd.weight", DType::Q6_K, &[8, 256]);
    for (number, (name, dtype)) in TYPES.into_iter().enumerate() {
        let (values, shape) = (numbers(256 * 256, number as u64), [256, 256]);
        let name = format!("blk.0.{name}.weight");
        file = match dtype {
            DType::F16 => {
                let bytes = values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect();
                file.tensor(name, dtype, &shape, bytes)
            }
            DType::IQ2_XXS => file.some(&name, dtype, &shape),
            _ => {
                let mut blocks = vec![0; dtype.bytes_of(&shape).unwrap() as usize];
                quantise(dtype, &values, &mut blocks).unwrap();
                file.tensor(name, dtype, &shape, blocks)
            }
        };
    }
    file.some("output_norm.weight", DType::F32, &[256]).some("output.weight", DType::Q6_K, &[8, 256])
}

/// Writes an adapter of rank 4 for modules of so many rows.
fn adapter(folder: &Path, modules: &[(&str, u64)]) -> String {
    let path = folder.join("lora.safetensors");
    let mut specs = Vec::new();
    for (module, rows) in modules {
        let name = format!("base_model.model.{module}");
        specs.push(TensorSpec::new(format!("{name}.lora_A.weight"), DType::F32, [4, 256]));
        specs.push(TensorSpec::new(format!("{name}.lora_B.weight"), DType::F32, [*rows, 4]));
        specs.push(TensorSpec::new(format!("{name}.alpha"), DType::F32, []));
    }
    let fill = |index: usize, left: u64| match left {
        4 => bytes_of(&[4.0]),
        _ => bytes_of(&numbers(left as usize / 4, 100 + index as u64)),
    };
    write_safetensors(&path, &specs, &BTreeMap::new(), |index, out| out.put(&fill(index, out.left()))).unwrap();
    path.display().to_string()
}

/// One for the parts of attention.
fn of_attention(folder: &Path) -> String {
    let parts = ["q", "k", "v", "o"].map(|part| format!("model.layers.0.self_attn.{part}_proj"));
    adapter(folder, &parts.each_ref().map(|part| (part.as_str(), 256)))
}

#[test]
fn a_copy_is_the_file_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from.gguf"), folder.path().join("to.gguf"));
    let sides = Value::Array(5, [2, 8, 3, 2, 3].map(Value::I32).to_vec());
    let aligned = |alignment: u64| {
        let mut file = llama().entry("general.alignment", Value::U32(alignment as u32));
        file.alignment = alignment;
        file.some("none", DType::F32, &[0]).some("scalar", DType::F32, &[])
    };
    let reshaped = llama().entry("comfy.gguf.orig_shape.conv", sides).some("conv", DType::F16, &[288]);
    for file in [llama(), aligned(8), aligned(64), aligned(4096), reshaped, Gguf::new("none")] {
        fs::write(&from, file.build()).unwrap();
        let model = Checkpoint::open(&from).unwrap();
        copy(&model, &to);
        assert!(fs::read(&to).unwrap() == file.build(), "alignment {}", file.alignment);
        assert_eq!(contents(&Checkpoint::open(&to).unwrap()), contents(&model));
    }
    // Version 2 differs from 3 in its number alone, as far as files with the least significant byte first go.
    fs::write(&from, Gguf { version: 2, ..llama() }.build()).unwrap();
    copy(&Checkpoint::open(&from).unwrap(), &to);
    assert!(fs::read(&to).unwrap() == llama().build());
    let mixed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/mixed.gguf");
    copy(&Checkpoint::open(&mixed).unwrap(), &to);
    assert!(fs::read(&to).unwrap() == fs::read(&mixed).unwrap());
}

#[test]
fn another_reader_finds_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut file = llama().entry("general.alignment", Value::U32(128));
    file.alignment = 128;
    // The other reader refuses texts that are not UTF-8.
    file.entries.retain(|(key, _)| key != "aa.last");
    let model = Checkpoint::from_bytes("m.gguf", file.build()).unwrap();
    copy(&model, &path);
    let bytes = fs::read(&path).unwrap();
    let reader = gguf_rs_lib::reader::GGUFFileReader::new(std::io::Cursor::new(&bytes)).unwrap();
    assert_eq!(reader.tensor_infos().len(), file.tensors.len());
    for tensor in &file.tensors {
        let info = reader.tensor_infos().iter().find(|info| info.name() == tensor.name).unwrap();
        let mut shape = info.shape().dims().to_vec();
        shape.reverse();
        let at = reader.tensor_data_offset() + info.data_offset();
        assert!(shape == tensor.shape && at.is_multiple_of(128), "{}", tensor.name);
        assert!(bytes[at as usize..][..tensor.bytes.len()] == tensor.bytes, "{}", tensor.name);
    }
    assert_eq!(reader.metadata().iter().count(), file.entries.len());
}

/// Writes a set of three files whose entries and tensors differ.
fn set(folder: &Path) -> Vec<Gguf> {
    let part = |number: u16, file: Gguf| {
        let file = file.entry("split.no", Value::U16(number)).entry("split.count", Value::U16(3));
        file.entry("split.tensors.count", Value::I32(5))
    };
    let bare = || Gguf { entries: Vec::new(), ..Gguf::new("") };
    let mut first = Gguf::new("llama").entry("general.alignment", Value::U32(64)).entry("zz", Value::U8(1));
    first.alignment = 64;
    first = first.some("token_embd.weight", DType::Q8_0, &[4, 32]).some("blk.0.attn_q.weight", DType::Q4_0, &[3, 32]);
    let second =
        bare().entry("zz", Value::U8(2)).entry("only.second", "x").some("blk.1.ffn_up.weight", DType::F32, &[5]);
    let third = bare().some("blk.2.ffn_up.weight", DType::F16, &[5]).some("output.weight", DType::Q8_0, &[4, 32]);
    let files = vec![part(0, first), part(1, second), part(2, third)];
    for (index, file) in files.iter().enumerate() {
        fs::write(folder.join(format!("m-{:05}-of-00003.gguf", index + 1)), file.build()).unwrap();
    }
    files
}

#[test]
fn a_set_becomes_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let files = set(folder.path());
    let base = folder.path().join("m-00002-of-00003.gguf").display().to_string();
    let out = folder.path().join("joined.gguf").display().to_string();
    works("merge", &[base.as_str(), "--requantise", "--out", &out]);
    let (joined, model) = (Checkpoint::open(&out).unwrap(), Checkpoint::open(&base).unwrap());
    assert_eq!(contents(&joined), contents(&model));
    let names: Vec<_> = joined.layout().tensors().iter().map(|tensor| tensor.name.clone()).collect();
    assert!(names.iter().eq(files.iter().flat_map(|file| &file.tensors).map(|tensor| &tensor.name)));
    let gguf = joined.gguf().unwrap();
    assert_eq!(gguf.alignment(), 64);
    assert!(joined.layout().tensors().iter().all(|tensor| tensor.offset.is_multiple_of(64)));
    let metadata = gguf.to_metadata().unwrap();
    let keys: Vec<_> = metadata.keys().collect();
    assert_eq!(keys, ["general.architecture", "general.alignment", "zz", "only.second"]);
    assert_eq!(joined.metadata()["zz"], "1");
}

#[test]
fn merge_requantises_what_adapters_change_and_copies_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (base, out, placed) = (path("base.gguf"), path("out.gguf"), path("placed"));
    let lora = of_attention(folder.path());
    fs::write(&base, llama().build()).unwrap();
    let args = [base.as_str(), "--adapter", &lora, "--requantise", "--out"];
    let report = json_of("merge", &[&args[..], &[&out]].concat());
    // Read back from several devices, into a name that says nothing.
    let alloc = ["--alloc", "cuda:0,40%;cpu,*", "--device", "cuda:0=16mb", "--device", "cpu=64mb"];
    let other = json_of("merge", &[&args[..], &[&placed], &alloc[..]].concat());
    assert!(fs::read(&out).unwrap() == fs::read(&placed).unwrap());

    let (model, merged) = (Checkpoint::open(&base).unwrap(), Checkpoint::open(&out).unwrap());
    let adapters = || vec![Adapter::open(&lora, 1.0).unwrap()];
    let floats =
        Weights::patched(model.clone(), adapters(), Matching::Strict).unwrap().cast_floats(DType::F32).unwrap();
    let (before, after) = (contents(&model), contents(&merged));
    assert!(before.keys().eq(after.keys()));
    let (mut changed, mut worst, mut values) = (0, (0.0, String::new()), 0);
    for (name, (dtype, shape, bytes)) in &before {
        let found = &after[name];
        assert_eq!((dtype, shape), (&found.0, &found.1), "{name}");
        if !name.contains("attn") {
            assert!(*bytes == found.2, "{name}");
            continue;
        }
        changed += 1;
        assert!(*bytes != found.2, "{name}");
        let mut wanted = vec![0; 256 * 256 * 4];
        floats.read(model.find(name).unwrap(), &mut wanted).unwrap();
        let wanted: Vec<f32> = wanted.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        if *dtype == DType::F16 {
            let halves = wanted.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes());
            assert!(halves.eq(found.2.iter().copied()), "{name}");
            continue;
        }
        let (mut blocks, mut stored) = (vec![0; bytes.len()], vec![0.0; wanted.len()]);
        quantise(*dtype, &wanted, &mut blocks).unwrap();
        assert!(blocks == found.2, "{name}");
        dequantise(*dtype, &blocks, &mut stored).unwrap();
        let square = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
        let errors: f64 = wanted.iter().zip(&stored).map(square).sum();
        let squares: f64 = wanted.iter().map(|value| f64::from(*value).powi(2)).sum();
        values += wanted.len();
        if errors / squares > worst.0 {
            worst = (errors / squares, name.clone());
        }
    }
    assert_eq!(changed, 4);
    let keys =
        |file: &Checkpoint| file.gguf().unwrap().to_metadata().unwrap().keys().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(keys(&merged), llama().entries.into_iter().map(|(key, _)| key).collect::<Vec<_>>());
    for report in [report, other] {
        assert_eq!(report["requantised"]["values"], values);
        assert!(report["requantised"]["rms_error"].as_f64().unwrap() > 0.0);
        assert_eq!(report["worst_requantised"], worst.1);
    }
    let text = works("merge", &[&args[..], &[&out]].concat());
    assert!(text.contains("196608 values requantised") && text.contains(&worst.1), "{text}");
}

#[test]
fn a_head_that_an_adapter_unties_is_the_last_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (base, out, lora) = (path("base.gguf"), path("out.gguf"), adapter(folder.path(), &[("lm_head", 8)]));
    let (mut blocks, embedding) = (vec![0; 8 * 210], numbers(8 * 256, 1));
    quantise(DType::Q6_K, &embedding, &mut blocks).unwrap();
    let file = Gguf::new("llama").tensor("token_embd.weight", DType::Q6_K, &[8, 256], blocks.clone());
    fs::write(&base, file.some("blk.0.ffn_up.weight", DType::F32, &[256, 256]).build()).unwrap();
    works("merge", &[base.as_str(), "--adapter", &lora, "--requantise", "--out", &out]);
    let (before, model) = (contents(&Checkpoint::open(&base).unwrap()), Checkpoint::open(&out).unwrap());
    let mut after = contents(&model);
    assert_eq!(model.layout().tensors().last().unwrap().name, "output.weight");
    let (dtype, shape, bytes) = after.remove("output.weight").unwrap();
    assert!((dtype, shape) == (DType::Q6_K, vec![8, 256]) && bytes != blocks);
    assert!(before == after);
}

#[test]
fn merge_writes_floats_as_gguf_where_the_name_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (base, out) = (path("base.gguf"), path("out.GGUF"));
    fs::write(&base, llama().build()).unwrap();
    for (name, dtype, kind) in [("f32", DType::F32, "0"), ("bf16", DType::BF16, "32")] {
        works("merge", &[base.as_str(), "--promote", name, "--out", &out]);
        let model = Checkpoint::open(&out).unwrap();
        assert!(model.layout().tensors().iter().all(|tensor| tensor.dtype == dtype));
        assert_eq!(model.metadata()["general.file_type"], kind);
        assert_eq!(model.gguf().unwrap().entries().count(), llama().entries.len());
    }
    // A shape that a tensor is stored in stays, whatever its type.
    let sides = Value::Array(5, [2, 2, 2, 2, 32].map(Value::I32).to_vec());
    let file = Gguf::new("flux").entry("comfy.gguf.orig_shape.conv", sides).some("conv", DType::Q8_0, &[2, 256]);
    fs::write(&base, file.build()).unwrap();
    works("merge", &[base.as_str(), "--promote", "f32", "--out", &out]);
    let model = Checkpoint::open(&out).unwrap();
    assert_eq!(model.layout().tensors()[0].shape, [2, 2, 2, 2, 32]);
    let bytes = fs::read(&out).unwrap();
    let info =
        [2u32.to_le_bytes().as_slice(), &256u64.to_le_bytes(), &2u64.to_le_bytes(), &0u32.to_le_bytes()].concat();
    assert!(bytes.windows(info.len()).any(|window| window == info));
}

/// A tensor of another shape than that of its file is stored in its own, and nothing says otherwise.
#[test]
fn what_is_said_of_shapes_stays_true() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let sides = Value::Array(5, [2, 8, 3, 3].map(Value::I32).to_vec());
    let file = Gguf::new("sd1").entry("comfy.gguf.orig_shape.conv", sides).some("conv", DType::F16, &[144]);
    let model = Checkpoint::from_bytes("m.gguf", file.build()).unwrap();
    let metadata = model.gguf().unwrap().to_metadata().unwrap();
    let written = |shape: [u64; 4], metadata: &GgufMetadata| {
        let specs = [TensorSpec::new("conv", DType::F16, shape)];
        write_gguf(&path, &specs, metadata, |_, out| out.put(&vec![0; out.left() as usize])).unwrap();
        let model = Checkpoint::open(&path).unwrap();
        assert_eq!(model.layout().tensors()[0].shape, shape);
        model.gguf().unwrap().array("comfy.gguf.orig_shape.conv").is_some()
    };
    assert!(written([2, 8, 3, 3], &metadata));
    assert!(!written([2, 16, 3, 3], &metadata));
    let mut without = metadata.clone();
    without.remove("comfy.gguf.orig_shape.conv");
    assert!(!written([2, 8, 3, 3], &without));
}

#[test]
fn merge_refuses_what_it_cannot_write_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (base, lora) = (path("base.gguf"), of_attention(folder.path()));
    fs::write(&base, llama().build()).unwrap();
    let (gguf, safetensors) = (path("out.gguf"), path("out.safetensors"));
    let refused = |args: &[&str], wanted: &[&str]| {
        let (_, message) = fails("merge", args);
        wanted.iter().for_each(|part| assert!(message.contains(part), "{message}"));
        assert!(!Path::new(&gguf).exists() && !Path::new(&safetensors).exists());
        let hidden = fs::read_dir(&folder)
            .unwrap()
            .filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'));
        assert_eq!(hidden.count(), 0);
    };
    let undecided = ["6 of 8 tensors", "--promote F32, F16 or BF16", "--requantise"];
    refused(&[&base, "--adapter", &lora, "--out", &gguf], &undecided);
    refused(&[&base, "--adapter", &lora, "--out", &safetensors], &undecided);
    refused(&[&base, "--adapter", &lora, "--requantise", "--out", &safetensors], &undecided);
    refused(&[&base, "--cast", "blk.0.attn_q.weight=F16", "--adapter", &lora, "--out", &gguf], &["5 of 8 tensors"]);
    refused(&[&base, "--promote", "f32", "--cast", "*norm*=F8_E4M3", "--out", &gguf], &["output_norm", "F8_E4M3"]);
    let plain = format!("{}/examples/data/tiny-llama", env!("CARGO_MANIFEST_DIR"));
    refused(&[&plain, "--requantise", "--out", &gguf], &["convert_hf_to_gguf.py"]);
    // Without blocks there is nothing to requantise.
    works("merge", &[plain.as_str(), "--requantise", "--out", &safetensors]);
    assert!(Checkpoint::open(&safetensors).unwrap().gguf().is_none());
}
