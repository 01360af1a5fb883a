//! Checkpoints with weights in DFloat11's form are those that its package made them from.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::error::{CodeFault, CompressedFault, DFloat11Fault, FileFault};
use tensor_offload::transfer::{MemorySource, Source};
use tensor_offload::{Checkpoint, DType, Error, Loader, Matching, Planner, Registry, Result, Streamer, Weights};

fn data(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/dfloat11")).join(name)
}

/// What a checkpoint was made from.
fn original(name: &str) -> Subject {
    Subject::new(Checkpoint::open(data(&format!("{name}.expected.safetensors"))).unwrap().into())
}

fn try_bytes(checkpoint: &Checkpoint, name: &str) -> Result<Vec<u8>> {
    let tensor = checkpoint.find(name).unwrap();
    let mut bytes = vec![0; checkpoint.layout().tensor(tensor).unwrap().bytes as usize];
    checkpoint.read(tensor, &mut bytes).map(|()| bytes)
}

/// A copy of a checkpoint, to be changed.
struct Copy(tempfile::TempDir);

impl Copy {
    fn of(name: &str) -> Copy {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for entry in fs::read_dir(data(name)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        Copy(folder)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn configure(&self, change: impl FnOnce(&mut Value)) {
        let mut config = serde_json::from_slice(&fs::read(self.path("config.json")).unwrap()).unwrap();
        change(&mut config);
        fs::write(self.path("config.json"), config.to_string()).unwrap();
    }

    /// Writes a file with another header.
    fn change(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let (mut header, data) = header(&fs::read(self.path(file)).unwrap());
        change(&mut header);
        let header = header.to_string().into_bytes();
        let changed = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        fs::write(self.path(file), changed).unwrap();
    }

    fn open(&self) -> Result<Checkpoint> {
        Checkpoint::open(self.0.path())
    }

    fn refused(&self) -> (Option<String>, FileFault) {
        parts(self.open().unwrap_err())
    }
}

fn header(file: &[u8]) -> (Value, Vec<u8>) {
    let (length, rest) = file.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    (serde_json::from_slice(header).unwrap(), data.to_vec())
}

fn parts(error: Error) -> (Option<String>, FileFault) {
    match error {
        Error::File { tensor, fault, .. } => (tensor, *fault),
        other => panic!("{other:?}"),
    }
}

/// A pattern of `dfloat11_config`, and what it is of.
fn pattern(text: &str, modules: &[&str]) -> impl FnOnce(&mut Value) {
    let patterns = json!({ text: modules });
    |config| config["dfloat11_config"]["pattern_dict"] = patterns
}

#[test]
fn a_checkpoint_is_what_it_was_made_from() {
    // Names and shapes of a language model by its configuration, of others by their biases; for ComfyUI without either.
    for (name, path, files, groups) in [
        ("llama", data("llama"), 5, 4),
        ("llama", data("llama/model_layers_0.safetensors"), 1, 1),
        ("flux", data("flux"), 1, 2),
        ("flux", data("flux/model.safetensors"), 1, 2),
        ("comfy", data("comfy.safetensors"), 1, 2),
    ] {
        let (opened, original) = (Checkpoint::open(&path).unwrap(), original(name));
        assert_eq!(opened.sources().len(), files);
        let (mut compressed, mut to) = (0, 0);
        for info in opened.layout().tensors() {
            let plain = original.layout().tensor(original.checkpoint().find(&info.name).unwrap()).unwrap();
            assert_eq!(
                (info.dtype, &info.shape, info.bytes),
                (plain.dtype, &plain.shape, plain.bytes),
                "{}",
                info.name
            );
            assert!(try_bytes(&opened, &info.name).unwrap() == original.bytes_of(&info.name), "{}", info.name);
            if let Some(bytes) = opened.compressed(opened.find(&info.name).unwrap()) {
                (compressed, to) = (compressed + 1, to + bytes);
            }
        }
        let (mut of_groups, mut found) = (0, 0);
        for source in opened.sources() {
            let file = fs::read(source.path()).unwrap();
            let (header, _) = header(&file);
            // But for the splits, which are read once.
            let left = file.len() as u64 - source.stored(0, source.stamp().len());
            assert!(left <= 200, "{left} of {}", source.path().display());
            for (name, tensor) in header.as_object().unwrap() {
                let offsets = tensor["data_offsets"].as_array().map(|at| at.iter().map(|at| at.as_u64().unwrap()));
                let Some(offsets) = offsets.filter(|_| tensor["dtype"] != "BF16") else { continue };
                of_groups += offsets.rev().reduce(|end, begin| end - begin).unwrap();
                found += u64::from(name.ends_with(".luts"));
            }
        }
        // All bytes that are in no plain tensor are those of the weights in groups.
        assert_eq!((found, to), (groups, of_groups), "{}", path.display());
        assert!(compressed >= groups);
        if files > 1 || name != "llama" {
            assert_eq!(opened.layout().tensors().len(), original.layout().tensors().len());
            let names = |layers: &[tensor_offload::checkpoint::Layer]| -> Vec<String> {
                layers.iter().map(|layer| layer.name.clone()).collect()
            };
            assert_eq!(names(opened.layout().layers()), names(original.layout().layers()));
        }
    }
}

#[test]
fn it_is_loaded_patched_and_streamed() {
    let (opened, original) = (Checkpoint::open(data("llama")).unwrap(), original("llama"));
    let specs = original.layout().tensors().iter().map(|info| spec(&*info.name, info.dtype, &info.shape));
    let specs: Vec<TensorSpec> = specs.collect();
    let patched = |checkpoint: &Checkpoint| {
        Subject::new(Weights::patched(checkpoint.clone(), two_loras(&specs, 6), Matching::Strict).unwrap())
    };
    let (plain, subject) = (patched(original.checkpoint()), patched(&opened));
    let weight = "model.layers.1.mlp.up_proj.weight";
    assert!(plain.bytes_of(weight) != original.bytes_of(weight));
    let devices = Registry::described(machine(), Clock::Wall);
    for (wanted, subject) in [(&original, Subject::new(opened.into())), (&plain, subject)] {
        for allocation in ["cuda:0,30%;cpu,*", "cuda:0,100kb;disk,*", "cuda:1,50%;cpu,*"] {
            let plan = subject.planner(devices.machine(), allocation).plan().unwrap();
            let loaded = load(&devices, &subject, &plan);
            wanted.check(&loaded);
            check_pass(&mut Streamer::new(&loaded).unwrap(), wanted).unwrap();
        }
        // Its weights have another code while they are streamed.
        let weights = subject.weights.clone().compress().unwrap();
        let planner = Planner::new(weights.layout(), devices.machine()).compute(GPU0);
        let plan = planner.allocation("cuda:0,30%;cpu,*".parse().unwrap()).compress(true).plan().unwrap();
        let loaded = Arc::new(Loader::new(&devices).load(&weights, &plan).unwrap());
        assert!(loaded.report().saved > 0, "{}", loaded.report());
        check_pass(&mut Streamer::new(&loaded).unwrap(), wanted).unwrap();
    }
}

#[test]
fn what_is_not_said_is_an_error_that_names_it() {
    let dfloat11 = |fault| FileFault::DFloat11(fault);
    let refused = |copy: &Copy, tensor: &str, fault: DFloat11Fault| {
        assert_eq!(copy.refused(), (Some(tensor.to_owned()), dfloat11(fault)));
    };
    let flux = || Copy::of("flux");
    let (block, config) = ("single_transformer_blocks.0", "config.json");

    let copy = flux();
    fs::remove_file(copy.path(config)).unwrap();
    refused(&copy, block, DFloat11Fault::NoConfig);
    let bytes = fs::read(copy.path("model.safetensors")).unwrap();
    let alone = parts(Checkpoint::from_bytes("model", bytes).unwrap_err());
    assert_eq!(alone, (Some(block.to_owned()), dfloat11(DFloat11Fault::NoConfig)));

    let copy = flux();
    // Whole names are matched, and a dot is any character.
    copy.configure(pattern("transformer_blocks.0", &["norm.linear"]));
    refused(&copy, block, DFloat11Fault::NoPattern);
    copy.configure(pattern(r"single.transformer_blocks\.[0-9]", &["norm.linear"]));
    refused(&copy, block, DFloat11Fault::Modules { named: 1, found: 6 });
    copy.configure(pattern(r"single_transformer_blocks\.\d+", &[]));
    refused(&copy, block, DFloat11Fault::Modules { named: 1, found: 6 });

    let copy = flux();
    copy.change("model.safetensors", |header| {
        let bias = header[format!("{block}.attn.to_k.bias")].take();
        header[format!("{block}.attn.to_k.bios")] = bias;
        header.as_object_mut().unwrap().retain(|_, tensor| !tensor.is_null());
    });
    refused(&copy, &format!("{block}.attn.to_k.weight"), DFloat11Fault::NoShape { weights: 576 });

    let copy = Copy::of("llama");
    copy.configure(|config| config["num_key_value_heads"] = 4.into());
    let (layer, rows, columns) = ("model.layers.0", Some(64), Some(64));
    refused(
        &copy,
        &format!("{layer}.self_attn.k_proj.weight"),
        DFloat11Fault::OtherShape { weights: 2048, rows, columns },
    );
    copy.configure(|config| {
        config.as_object_mut().unwrap().remove("hidden_size");
    });
    refused(&copy, "lm_head.weight", DFloat11Fault::NoShape { weights: 10240 });

    for (key, value, says) in [
        ("bytes_per_thread", json!(16), "bytes_per_thread is 16"),
        ("threads_per_block", json!([16, 16]), "threads_per_block is [16, 16]"),
        ("threads_per_block", json!("all"), "threads"),
        ("pattern_dict", json!({ "(": [] }), "the pattern `(`"),
        ("pattern_dict", json!(["lm_head"]), "an object"),
    ] {
        let copy = flux();
        copy.configure(|config| config["dfloat11_config"][key] = value);
        let (_, fault) = copy.refused();
        assert!(matches!(&fault, FileFault::BadConfig { reason } if reason.to_lowercase().contains(says)), "{fault}");
    }
}

#[test]
fn what_does_not_fit_together_is_an_error() {
    let block = "single_transformer_blocks.1";
    let rename = |from: &str, to: Option<&str>| {
        let copy = Copy::of("flux");
        copy.change("model.safetensors", |header| {
            let tensor = header.as_object_mut().unwrap().remove(&format!("{block}.{from}")).unwrap();
            header[to.map_or("other".to_owned(), |to| format!("{block}.{to}"))] = tensor;
        });
        copy.refused()
    };
    for part in ["sign_mantissa", "gaps", "output_positions"] {
        let fault = DFloat11Fault::NoPart { name: format!("{block}.{part}") };
        assert_eq!(rename(part, None), (Some(block.to_owned()), FileFault::DFloat11(fault)));
    }
    let modules = DFloat11Fault::Modules { named: 6, found: 1 };
    assert_eq!(rename("split_positions", None), (Some(block.to_owned()), FileFault::DFloat11(modules)));

    let copy = Copy::of("flux");
    let mut shape = Vec::new();
    copy.change("model.safetensors", |header| {
        let gaps = &mut header[format!("{block}.gaps")];
        gaps["dtype"] = "I8".into();
        shape = serde_json::from_value(gaps["shape"].clone()).unwrap();
    });
    let fault = DFloat11Fault::OtherPart { expected: "U8 in one dimension", dtype: DType::I8, shape };
    assert_eq!(copy.refused(), (Some(format!("{block}.gaps")), FileFault::DFloat11(fault)));

    let copy = Copy::of("flux");
    copy.configure(|config| config["dfloat11_config"]["threads_per_block"] = json!([64]));
    let what = "it has not as many gaps as windows";
    let fault = FileFault::Compressed(CompressedFault::Code(CodeFault::Header { what }));
    assert_eq!(copy.refused(), (Some("single_transformer_blocks.0".to_owned()), fault));

    // Splits that go back, and one beyond the end.
    for (at, position, least) in [(1, 3, 1728), (0, -1, 0), (4, 1 << 40, 7488)] {
        let copy = Copy::of("flux");
        let path = copy.path("model.safetensors");
        let mut file = fs::read(&path).unwrap();
        let (header, data) = header(&file);
        let begin = file.len() - data.len()
            + header[format!("{block}.split_positions")]["data_offsets"][0].as_u64().unwrap() as usize;
        file[begin + 8 * at..][..8].copy_from_slice(&i64::to_le_bytes(position));
        fs::write(&path, file).unwrap();
        let fault = DFloat11Fault::Splits { position, least, weights: 8640 };
        assert_eq!(copy.refused(), (Some(block.to_owned()), FileFault::DFloat11(fault)));
    }

    let copy = Copy::of("llama");
    fs::copy(copy.path("lm_head.safetensors"), copy.path("once_more.safetensors")).unwrap();
    assert_eq!(copy.refused(), (Some("lm_head.weight".to_owned()), FileFault::DuplicateKey));
}

/// Transformers writes an index where the tensors that are in no group take several files. It names no others.
#[test]
fn an_index_does_not_hide_groups() {
    let copy = Copy::of("llama");
    let index = json!({ "weight_map": { "model.norm.weight": "model.safetensors" } });
    fs::write(copy.path("model.safetensors.index.json"), index.to_string()).unwrap();
    for opened in [copy.open(), Checkpoint::open(copy.path("model.safetensors.index.json"))] {
        assert_eq!(opened.unwrap().layout().tensors().len(), original("llama").layout().tensors().len());
    }
}

/// Codes have no sums. What is damaged is found where a block's codes are not as many as they should be, or end elsewhere; what is
/// not found is weights of other exponents, and never more.
#[test]
fn damage_is_an_error_or_other_weights() {
    let (file, layer) = (data("llama/model_layers_0.safetensors"), "model.layers.0");
    let whole = fs::read(&file).unwrap();
    let (header, data_of_file) = header(&whole);
    let begin = whole.len() - data_of_file.len();
    let (mut found, mut tried) = (0, 0);
    for part in ["encoded_exponent", "luts", "gaps", "output_positions"] {
        let at = &header[format!("{layer}.{part}")]["data_offsets"];
        let range = begin + at[0].as_u64().unwrap() as usize..begin + at[1].as_u64().unwrap() as usize;
        let step = (range.len() / 100).max(1);
        for at in range.step_by(step) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            let source = |path: &Path| Ok(Arc::new(MemorySource::new(path, damaged.clone())) as Arc<dyn Source>);
            let opened = Checkpoint::open_with(&file, source).unwrap();
            for name in ["self_attn.q_proj", "mlp.down_proj"].map(|module| format!("{layer}.{module}.weight")) {
                if let Err(error) = try_bytes(&opened, &name) {
                    let (tensor, fault) = parts(error);
                    assert_eq!(tensor.as_deref(), Some(&*name));
                    assert!(matches!(fault, FileFault::Compressed(CompressedFault::Code(_))), "{fault}");
                    found += 1;
                }
                tried += 1;
            }
        }
    }
    assert!(found * 4 > tried, "{found} of {tried}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Parts of a file in any order, across tensors, from and to the middle of a weight.
    #[test]
    fn any_parts_are_those_of_the_plain_file(
        file in 0usize..5,
        parts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6),
    ) {
        let (opened, original) = (Checkpoint::open(data("llama")).unwrap(), original("llama"));
        let source = &opened.sources()[file];
        let mut infos: Vec<_> = opened.layout().tensors().iter().filter(|info| info.file == file).collect();
        infos.sort_by_key(|info| info.offset);
        let all: Vec<u8> = infos.iter().flat_map(|info| original.bytes_of(&info.name).to_vec()).collect();
        let begin = infos[0].offset;
        check_parts(&**source, begin, &all, &parts);
    }
}
