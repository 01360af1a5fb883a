//! Checkpoints by behaviour: what opens, and how what does not is refused.

#[path = "support/fault.rs"]
mod fault;

use std::fs;
use std::path::{Path, PathBuf};

use fault::parts;
use serde_json::json;
use tensor_offload::checkpoint::{Checkpoint, Layout, TensorInfo, TensorSpec, write_safetensors};
use tensor_offload::error::FileFault;
use tensor_offload::error::{Measured, Missing};
use tensor_offload::{DType, Error, ErrorKind, Machine, Planner, TensorId, Weights};

/// A safetensors file of this header and so many bytes.
fn file(header: &str, bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..bytes).map(|i| i as u8));
    file
}

/// Opens bytes that must be refused; -> the tensor blamed and the fault. The message has to name both.
fn refused(bytes: Vec<u8>) -> (Option<String>, FileFault) {
    parts(Checkpoint::from_bytes("weights/bad.safetensors", bytes).unwrap_err(), "weights/bad.safetensors")
}

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// A folder of two shards: `a` in the first, `b` and `c` in the second.
fn two_shards() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    shard(folder.path(), "1.safetensors", &["a"]);
    shard(folder.path(), "2.safetensors", &["b", "c"]);
    index(folder.path(), &[("c", "2.safetensors"), ("a", "1.safetensors"), ("b", "2.safetensors")]);
    folder
}

fn shard(folder: &Path, name: &str, tensors: &[&str]) {
    let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(*t, DType::U8, [4])).collect();
    let none = Default::default();
    write_safetensors(folder.join(name), &specs, &none, |t, out| out.put(tensors[t][..1].repeat(4).as_bytes()))
        .unwrap();
}

fn index(folder: &Path, entries: &[(&str, &str)]) {
    let map: serde_json::Map<_, _> = entries.iter().map(|(t, f)| (t.to_string(), (*f).into())).collect();
    let json = serde_json::json!({ "metadata": { "total_size": 12 }, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), json.to_string()).unwrap();
}

fn names(model: &Checkpoint) -> Vec<&str> {
    model.layout().tensors().iter().map(|t| t.name.as_str()).collect()
}

fn bytes_of(model: &Checkpoint, name: &str) -> Vec<u8> {
    let tensor = model.find(name).unwrap();
    let mut bytes = vec![0; model.layout().tensor(tensor).unwrap().bytes as usize];
    model.read(tensor, &mut bytes).unwrap();
    bytes
}

#[test]
fn case_19_a_set_keeps_unit_dimensions_and_its_tied_head() {
    let folder = tempfile::tempdir().unwrap();
    let shapes: [(&str, &str, &[u64]); 4] = [
        ("model.layers.0.row.weight", "1.safetensors", &[1, 6]),
        ("model.layers.0.column.weight", "1.safetensors", &[6, 1]),
        ("model.embed_tokens.weight", "2.safetensors", &[1, 1, 3]),
        ("model.layers.0.scale", "2.safetensors", &[1]),
    ];
    for file in ["1.safetensors", "2.safetensors"] {
        let specs: Vec<_> =
            shapes.iter().filter(|t| t.1 == file).map(|t| TensorSpec::new(t.0, DType::U8, t.2)).collect();
        let path = folder.path().join(file);
        write_safetensors(path, &specs, &Default::default(), |_, out| out.put(&vec![7; out.left() as usize])).unwrap();
    }
    index(folder.path(), &shapes.map(|(name, file, _)| (name, file)));
    fs::write(folder.path().join("config.json"), r#"{"tie_word_embeddings":true}"#).unwrap();
    let model = Checkpoint::open(folder.path()).unwrap();
    for (name, _, shape) in shapes {
        assert_eq!(model.layout().tensor(model.find(name).unwrap()).unwrap().shape, shape, "{name}");
    }
    // The embedding is in another file than the first layer, and there is no head in any.
    let both: Vec<_> = model.layout().modules().iter().filter(|m| m.tied).map(|m| m.name.as_str()).collect();
    assert_eq!(both, ["model.embed_tokens"]);
}

#[test]
fn case_20_odd_but_valid_files_load() {
    let mut count = 0;
    for entry in fs::read_dir(data("safetensors_valid")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let wanted = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for model in [Checkpoint::open(&path).unwrap(), Checkpoint::from_bytes("in memory", bytes.clone()).unwrap()] {
            assert_eq!(model.layout().tensors().len(), wanted.len(), "{}", path.display());
            for (name, view) in wanted.iter() {
                let info = model.layout().tensor(model.find(name).unwrap()).unwrap();
                assert_eq!(info.dtype.name(), view.dtype().to_string());
                assert_eq!(info.shape, view.shape().iter().map(|&d| d as u64).collect::<Vec<_>>());
                assert_eq!(bytes_of(&model, name), view.data(), "{}: {name}", path.display());
            }
        }
        count += 1;
    }
    assert_eq!(count, 10);
}

#[test]
fn case_21_all_missing_shards_are_listed() {
    let folder = two_shards();
    for shard in ["1.safetensors", "2.safetensors"] {
        fs::remove_file(folder.path().join(shard)).unwrap();
    }
    let error = Checkpoint::open(folder.path()).unwrap_err();
    let (_, fault) = parts(error, "model.safetensors.index.json");
    assert_eq!(fault, FileFault::MissingShards { files: vec!["1.safetensors".into(), "2.safetensors".into()] });
    assert!(fault.to_string().contains("1.safetensors, 2.safetensors"));
}

#[test]
fn case_21_stray_files_are_ignored() {
    let folder = two_shards();
    let alone = Checkpoint::open(folder.path()).unwrap();
    shard(folder.path(), "0.safetensors", &["a", "stray"]);
    fs::write(folder.path().join("3.safetensors"), "no weights at all").unwrap();
    let model = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(model.layout(), alone.layout());
    assert_eq!(model.find("stray"), None);
}

#[test]
fn case_21_a_key_absent_from_its_shard_is_named() {
    let folder = two_shards();
    index(folder.path(), &[("a", "1.safetensors"), ("b", "1.safetensors"), ("c", "2.safetensors")]);
    let (tensor, fault) = parts(Checkpoint::open(folder.path()).unwrap_err(), "model.safetensors.index.json");
    assert_eq!(tensor.as_deref(), Some("b"));
    assert_eq!(fault, FileFault::NotInShard { shard: "1.safetensors".into() });
}

#[test]
fn case_21_entries_that_leave_the_folder_are_refused() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("model");
    fs::create_dir(&folder).unwrap();
    shard(outer.path(), "x.safetensors", &["a"]);
    let absolute = outer.path().join("x.safetensors");
    for entry in [
        "../x.safetensors",
        absolute.to_str().unwrap(),
        "sub/../../x.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        "c:x.safetensors",
        "\\\\host\\share\\x.safetensors",
        "..",
    ] {
        index(&folder, &[("a", entry)]);
        let (tensor, fault) = parts(Checkpoint::open(&folder).unwrap_err(), "model.safetensors.index.json");
        assert_eq!((tensor.as_deref(), fault), (Some("a"), FileFault::LeavesFolder { entry: entry.into() }));
    }
}

#[test]
fn tensors_come_by_offset_and_files_by_name() {
    let folder = two_shards();
    for path in [folder.path().to_owned(), folder.path().join("model.safetensors.index.json")] {
        let model = Checkpoint::open(&path).unwrap();
        assert_eq!((names(&model), model.path()), (vec!["a", "b", "c"], path.as_path()));
        assert_eq!(bytes_of(&model, "b"), b"bbbb");
        assert!(model.file_of(TensorId::new(2)).unwrap().ends_with("2.safetensors"));
        assert_eq!(model.sources().len(), 2);
        let mut part = [0; 2];
        model.read_at(TensorId::new(2), 2, &mut part).unwrap();
        assert_eq!(&part, b"cc");
    }
    let unsorted = Checkpoint::open(data("safetensors_valid/unsorted.safetensors")).unwrap();
    assert!(unsorted.layout().tensors().is_sorted_by_key(|t| t.offset));
}

#[test]
fn a_sharded_model_is_the_same_as_one_file() {
    let whole = Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-llama")).unwrap();
    let sharded = Checkpoint::open(data("peft/base_sharded")).unwrap();
    assert_eq!(sharded.sources().len(), 3);
    assert_eq!(whole.metadata().get("format").map(String::as_str), Some("pt"));
    let layers = |m: &Checkpoint| m.layout().layers().iter().map(|l| (l.name.clone(), l.bytes)).collect::<Vec<_>>();
    assert_eq!(layers(&whole), layers(&sharded));
    for name in names(&whole) {
        assert_eq!(bytes_of(&whole, name), bytes_of(&sharded, name), "{name}");
    }
}

#[test]
fn the_configuration_tells_of_tied_embeddings() {
    let folder = tempfile::tempdir().unwrap();
    shard(folder.path(), "m.safetensors", &["model.embed_tokens.weight", "model.layers.0.mlp.weight"]);
    let tied = |config: &str| {
        fs::write(folder.path().join("config.json"), config).unwrap();
        Checkpoint::open(folder.path()).map(|m| m.layout().modules()[0].tied)
    };
    for config in [r#"{"tie_word_embeddings":true}"#, r#"{"text_config":{"tie_word_embeddings":true}}"#] {
        assert!(tied(config).unwrap(), "{config}");
    }
    // The architectures of transformers tie a head that is not there, unless told otherwise.
    assert!(tied(r#"{"architectures":["GemmaForCausalLM"]}"#).unwrap());
    for config in
        [r#"{"architectures":["BertModel"]}"#, r#"{"architectures":["LlamaForCausalLM"],"tie_word_embeddings":false}"#]
    {
        assert!(!tied(config).unwrap(), "{config}");
    }
    for config in ["{}", r#"{"tie_word_embeddings":false,"text_config":{"tie_word_embeddings":true}}"#] {
        assert!(!tied(config).unwrap(), "{config}");
    }
    let (_, fault) = parts(tied("{").unwrap_err(), "config.json");
    assert!(matches!(fault, FileFault::BadConfig { .. }));
}

#[test]
fn reads_are_checked() {
    let model =
        Checkpoint::from_bytes("m", file(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 4)).unwrap();
    let tensor = || Measured::Tensor { name: "a".to_owned() };
    let part = |at| Measured::Part { name: "a".to_owned(), at };
    for (wrong, measured, sizes) in [
        (model.read(TensorId::new(0), &mut [0; 3]), tensor(), (4, 3)),
        (model.read_at(TensorId::new(0), 1, &mut [0; 4]), part(1), (5, 4)),
        (model.read_at(TensorId::new(0), u64::MAX, &mut [0; 4]), part(u64::MAX), (u64::MAX, 4)),
    ] {
        let Err(Error::WrongSize { what, needed, given }) = wrong else { panic!("{wrong:?}") };
        assert_eq!((what, (needed, given)), (measured, sizes));
    }
    let none = model.read(TensorId::new(1), &mut [0; 4]).unwrap_err();
    assert!(matches!(&none, Error::Missing(Missing::TensorAt { index: 1, count: 1, .. })), "{none}");
    model.read_at(TensorId::new(0), 4, &mut []).unwrap();
}

#[test]
fn ids_of_another_layout_are_refused() {
    let names = |count: usize| (0..count).map(|n| format!("layers.{n}.w.weight")).collect::<Vec<_>>();
    let opened = |names: Vec<String>| {
        let entry = |(n, name): (usize, &String)| {
            format!(r#""{name}":{{"dtype":"U8","shape":[4],"data_offsets":[{},{}]}}"#, 4 * n, 4 * n + 4)
        };
        let header = names.iter().enumerate().map(entry).collect::<Vec<_>>().join(",");
        Checkpoint::from_bytes("m", file(&format!("{{{header}}}"), 4 * names.len())).unwrap()
    };
    let (two, three) = (opened(names(2)), opened(names(3)));
    let (layout, other) = (two.layout(), three.layout());
    let (tensor, module, layer) =
        (other.tensor_ids().last().unwrap(), other.module_ids().last().unwrap(), other.layer_ids().last().unwrap());
    assert_eq!(
        (other.layers()[2].id, other.modules()[2].id, other.find("layers.2.w.weight")),
        (layer, module, Some(tensor))
    );

    assert_eq!((layout.tensor(tensor), layout.module(module), layout.layer(layer)), (None, None, None));
    assert_eq!((layout.storage_of(tensor), layout.module_of(tensor)), (None, None));
    assert_eq!((layout.needs_of(layer), layout.slot_of(layer)), (None, None));
    assert_eq!((layout.modules_in(layer).count(), layout.tensors_in(module).count()), (0, 0));
    assert_eq!(two.file_of(tensor), None);
    let missing = |error: Error| matches!(error, Error::Missing(Missing::TensorAt { index: 2, count: 2, .. }));
    assert!(missing(two.read(tensor, &mut [0; 4]).unwrap_err()));
    assert!(missing(two.read_at(tensor, 0, &mut []).unwrap_err()));

    let weights = Weights::new(two.clone());
    assert!(weights.patches().tensor(tensor).is_none());
    assert!(missing(weights.read(tensor, &mut [0; 4]).unwrap_err()));
    let machine = Machine::described(&["cpu=1mb".parse().unwrap()]);
    let plan = Planner::new(layout, &machine).plan().unwrap();
    assert_eq!((plan.assignment(module), plan.assignment(layout.modules()[1].id).unwrap().bytes), (None, 4));
}

/// The form that the examples' output is made of.
#[test]
fn a_layout_serialises_as_lists_that_name_each_other_by_place() {
    let header = r#"{"a.0.w.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let model = Checkpoint::from_bytes("m", file(header, 4)).unwrap();
    let first = model.layout().tensors()[0].offset;
    let wanted = json!({
        "tensors": [{"name": "a.0.w.weight", "dtype": "U8", "shape": [4], "bytes": 4, "file": 0, "offset": first}],
        "modules": [
            {"name": "a.0.w", "layer": 0, "role": "w", "tensors": [0], "bytes": 4, "alias_of": null, "both_ends": false},
        ],
        "layers": [{"name": "a.0", "modules": [0], "bytes": 4, "class": 0}],
        "classes": 1,
        "order": { "source": "names_rule" },
        "storage": [0],
        "module_of": [0],
    });
    assert_eq!(serde_json::to_value(model.layout()).unwrap(), wanted);
    let machine = Machine::described(&["cpu=1mb".parse().unwrap()]);
    let plan = Planner::new(model.layout(), &machine).plan().unwrap();
    let assignment = serde_json::to_value(&plan).unwrap()["assignments"][0].clone();
    assert_eq!(
        (&assignment["index"], &assignment["layer"], &assignment["module"]),
        (&json!(0), &json!(0), &json!("a.0.w"))
    );
}

#[test]
fn a_file_that_changes_while_open_is_named_with_its_tensor() {
    let folder = tempfile::tempdir().unwrap();
    shard(folder.path(), "m.safetensors", &["a", "b"]);
    let path = folder.path().join("m.safetensors");
    let model = Checkpoint::open(&path).unwrap();
    let len = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
    let (tensor, fault) = parts(model.read(TensorId::new(1), &mut [0; 4]).unwrap_err(), "m.safetensors");
    assert_eq!((tensor.as_deref(), fault), (Some("b"), FileFault::Changed));
}

#[test]
fn a_file_that_is_replaced_while_open_reads_on_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    shard(folder.path(), "m.safetensors", &["a"]);
    let model = Checkpoint::open(folder.path()).unwrap();
    shard(folder.path(), "m.safetensors", &["z"]);
    assert_eq!(bytes_of(&model, "a"), b"aaaa");
    assert_ne!(model.sources()[0].stamp(), Checkpoint::open(folder.path()).unwrap().sources()[0].stamp());
}

#[test]
fn truncated_files_are_refused() {
    let whole = file(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 4);
    let len = whole.len() as u64;
    for (cut, expected) in [(0, 8), (7, 8), (8, len - 4), (len - 5, len - 4), (len - 4, len), (len - 1, len)] {
        let (tensor, fault) = refused(whole[..cut as usize].to_vec());
        assert_eq!((tensor, fault), (None, FileFault::Truncated { expected, actual: cut }));
    }
}

#[test]
fn bytes_after_the_last_tensor_are_refused() {
    let trailing = file(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 7);
    assert_eq!(refused(trailing), (None, FileFault::TrailingBytes { extra: 3 }));
}

#[test]
fn a_header_past_the_limit_is_refused_before_it_is_read() {
    for bytes in [100_000_001, u64::MAX] {
        let mut file = bytes.to_le_bytes().to_vec();
        file.extend(b"{}");
        assert_eq!(refused(file), (None, FileFault::HeaderTooLarge { bytes, limit: 100_000_000 }));
    }
    // The limit itself is none: it is this file that is too short.
    let mut file = 100_000_000u64.to_le_bytes().to_vec();
    file.extend(b"{}");
    assert_eq!(refused(file), (None, FileFault::Truncated { expected: 100_000_008, actual: 10 }));
}

#[test]
fn headers_of_another_form_are_refused() {
    let good = r#""dtype":"U8","shape":[4],"data_offsets":[0,4]"#;
    let deep = format!(r#"{{"a":{{{good},"x":{}1{}}}}}"#, "[".repeat(5000), "]".repeat(5000));
    for (header, tensor, reason) in [
        ("", None, "EOF"),
        ("not json", None, "expected ident"),
        ("[]", None, "an object of tensors"),
        ("{} {}", None, "trailing"),
        (r#"{"a":[]}"#, Some("a"), "dtype, shape and data_offsets"),
        (r#"{"a":{"dtype":"U8","shape":[4]}}"#, Some("a"), "missing field `data_offsets`"),
        (r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#, Some("a"), "integer `-4`"),
        (r#"{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}"#, Some("a"), "floating point"),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,8]}}"#, Some("a"), "trailing"),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551616]}}"#, Some("a"), "floating point"),
        (r#"{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, Some("a"), "`dtype` occurs twice"),
        (r#"{"__metadata__":{"k":1}}"#, Some("__metadata__"), "expected a string"),
        (r#"{"__metadata__":{"k":"1","k":"2"}}"#, Some("__metadata__"), "`k` occurs twice"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, Some("__metadata__"), "occurs twice"),
        (deep.as_str(), Some("a"), "recursion limit"),
    ] {
        let (blamed, fault) = refused(file(header, 4));
        let FileFault::BadHeader { reason: why } = fault else { panic!("{header}: {fault:?}") };
        assert_eq!(blamed.as_deref(), tensor, "{header}");
        assert!(why.contains(reason), "{header}: {why}");
    }
    let mut not_text = file(r#"{"a":{}}"#, 0);
    not_text[10] = 0xff;
    assert!(matches!(refused(not_text).1, FileFault::BadHeader { .. }));
}

#[test]
fn a_name_that_stands_twice_is_refused() {
    let twice = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"\u0061":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    assert_eq!(refused(file(twice, 8)), (Some("a".into()), FileFault::DuplicateKey));
}

#[test]
fn unknown_element_types_are_named() {
    for name in ["f32", "Q4_K", "MXFP4", "Q4_2", ""] {
        let header = format!(r#"{{"a":{{"dtype":"{name}","shape":[4],"data_offsets":[0,4]}}}}"#);
        assert_eq!(refused(file(&header, 4)), (Some("a".into()), FileFault::UnknownDType { name: name.into() }));
    }
}

#[test]
fn ranges_that_end_before_they_begin_are_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#;
    assert_eq!(refused(file(header, 4)), (Some("a".into()), FileFault::BackwardRange { begin: 4, end: 0 }));
}

#[test]
fn ranges_that_do_not_hold_the_shape_are_refused() {
    let max = u64::MAX;
    for (dtype, shape, actual, expected) in [
        (DType::F32, vec![2], 4, Some(8)),
        (DType::F32, vec![], 0, Some(4)),
        (DType::U8, vec![0, 4], 4, Some(0)),
        (DType::F4, vec![3], 4, None),
        (DType::U8, vec![max, 2], 4, None),
        (DType::F32, vec![max], 4, None),
        (DType::U8, vec![max / 8], max, Some(max / 8)),
    ] {
        let header = format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,{actual}]}}}}"#);
        let fault = FileFault::WrongSize { dtype, shape, expected, actual };
        assert_eq!(refused(file(&header, 4)), (Some("a".into()), fault));
    }
    // The right size, though no file is as long.
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, max / 8);
    let expected = 8 + header.len() as u64 + max / 8;
    let actual = 8 + header.len() as u64 + 4;
    assert_eq!(refused(file(&header, 4)), (None, FileFault::Truncated { expected, actual }));
}

#[test]
fn tensors_that_share_bytes_are_refused() {
    // The same range twice as well: the format knows no aliases.
    for (begin, end, blamed, other) in [(2, 6, "b", "a"), (0, 4, "b", "a"), (0, 2, "a", "b"), (1, 1, "b", "a")] {
        let bytes = end - begin;
        let header = format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},"b":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{begin},{end}]}}}}"#
        );
        let (tensor, fault) = refused(file(&header, 6));
        assert_eq!(tensor.as_deref(), Some(blamed));
        let range = if blamed == "a" { 0..4 } else { begin..end };
        assert_eq!(fault, FileFault::Overlap { range, other: other.into() });
    }
}

#[test]
fn bytes_between_tensors_are_refused() {
    let gap =
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}"#;
    assert_eq!(refused(file(gap, 6)), (Some("b".into()), FileFault::Hole { hole: 2..4 }));
    let start = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
    assert_eq!(refused(file(start, 3)), (Some("a".into()), FileFault::Hole { hole: 0..1 }));
}

#[test]
fn other_formats_are_recognised() {
    // For each as it stands at the beginning of a real file, with what to do about it.
    for (start, word, advised) in [
        (&b"PK\x03\x04\0\0\x08\x08"[..], "zip", "convert"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "pickle", "convert"),
        (b"\x80\x03}q\0(X\x06\0\0\0weight", "pickle", "convert"),
        (b"\x80\x04\x95", "pickle", "convert"),
        (b"\x80\x05\x95\x0b\0\0\0\0\0\0\0", "pickle", "convert"),
        (b"lmgg\x03\0\0\0{\0\0\0", "GGML", "convert"),
        (b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08\0", "HDF5", "convert"),
        (b"\x93NUMPY\x01\0v\0{'descr': '<f4'", "NumPy", "convert"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS", "git lfs pull"),
    ] {
        let (tensor, fault) = refused(start.to_vec());
        let FileFault::OtherFormat { format, advice } = fault else { panic!("{word}: {fault:?}") };
        assert!(tensor.is_none() && format.contains(word) && advice.contains(advised), "{format}: {advice}");
    }
    // What only begins like one of them is not one of them.
    for start in
        [&b"\x80\x01\x8a\x0al\xfc\x9cF\xf9"[..], b"PK\x05\x06\0\0\0\0\0", b"GGML\x03\0\0\0{", b"\x93NUMPX\x01\0v"]
    {
        let (_, fault) = refused(start.to_vec());
        assert!(!matches!(fault, FileFault::OtherFormat { .. }), "{start:?}: {fault:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("pytorch_model.bin"), b"PK\x03\x04 and so on").unwrap();
    let (_, fault) = parts(Checkpoint::open(folder.path()).unwrap_err(), "pytorch_model.bin");
    assert!(matches!(fault, FileFault::OtherFormat { .. }));
}

#[test]
fn a_header_length_that_spells_another_format_is_no_matter() {
    // 640 and 66,176 are written as a pickle begins.
    for length in [0x280usize, 0x1_0280] {
        let entry = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        let padded = entry.to_owned() + &" ".repeat(length - entry.len());
        Checkpoint::from_bytes("m", file(&padded, 4)).unwrap();
        assert_eq!(refused(file(&padded, 5)).1, FileFault::TrailingBytes { extra: 1 });
    }
}

#[test]
fn folders_have_to_say_which_files_belong_together() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Checkpoint::open(folder.path()).map_err(|e| parts(e, "").1);
    assert_eq!(open().unwrap_err(), FileFault::NoWeights);
    shard(folder.path(), "1.safetensors", &["a"]);
    shard(folder.path(), "._1.safetensors", &["hidden"]);
    assert_eq!(names(&open().unwrap()), ["a"]);
    shard(folder.path(), "2.safetensors", &["b"]);
    let files = vec!["1.safetensors".into(), "2.safetensors".into()];
    assert_eq!(open().unwrap_err(), FileFault::NoIndex { files });
    index(folder.path(), &[("a", "1.safetensors"), ("b", "2.safetensors")]);
    assert_eq!(names(&open().unwrap()), ["a", "b"]);
    fs::write(folder.path().join("model.fp16.safetensors.index.json"), "{}").unwrap();
    assert!(matches!(open().unwrap_err(), FileFault::SeveralIndexes { files } if files.len() == 2));
}

#[test]
fn an_index_decides_which_tensors_belong_to_the_model() {
    let folder = tempfile::tempdir().unwrap();
    shard(folder.path(), "1.safetensors", &["a", "b", "unnamed"]);
    fs::create_dir(folder.path().join("sub")).unwrap();
    shard(&folder.path().join("sub"), "2.safetensors", &["b"]);
    index(folder.path(), &[("a", "1.safetensors"), ("b", "sub/2.safetensors")]);
    let model = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(names(&model), ["a", "b"]);
    assert!(model.file_of(TensorId::new(1)).unwrap().ends_with("sub/2.safetensors"));
}

#[test]
fn indexes_of_another_form_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    for json in
        ["", "no json", "[]", "{}", r#"{"weight_map":{}}"#, r#"{"weight_map":{"a":1}}"#, r#"{"weight_map":["a"]}"#]
    {
        fs::write(&path, json).unwrap();
        let (_, fault) = parts(Checkpoint::open(&path).unwrap_err(), "model.safetensors.index.json");
        assert!(matches!(fault, FileFault::BadIndex { .. }), "{json}: {fault:?}");
    }
    fs::write(&path, r#"{"weight_map":{"a":"1","a":"2"}}"#).unwrap();
    let (tensor, fault) = parts(Checkpoint::open(&path).unwrap_err(), "model.safetensors.index.json");
    assert_eq!((tensor.as_deref(), fault), (Some("a"), FileFault::DuplicateKey));
}

#[test]
fn a_fault_in_a_shard_names_the_shard() {
    let folder = two_shards();
    let path = folder.path().join("2.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let (_, fault) = parts(Checkpoint::open(folder.path()).unwrap_err(), "2.safetensors");
    assert!(matches!(fault, FileFault::Truncated { .. }));
}

#[test]
fn what_is_not_there_is_named() {
    let error = Checkpoint::open("/no/such/model.safetensors").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("/no/such/model.safetensors"));
}

#[test]
fn another_layout_has_to_lie_in_the_same_files() {
    let header = r#"{"a.0.w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a.1.w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    let stored = Checkpoint::from_bytes("m", file(header, 8)).unwrap();
    let turned = stored.with_layout(stored.layout().clone().in_order(&["a.1"]).unwrap()).unwrap();
    assert_eq!(turned.layout().layers()[0].name, "a.1");
    let (first, second) = (stored.layout().tensors()[0].clone(), stored.layout().tensors()[1].clone());
    let renamed = TensorInfo::new("head", DType::U8, &[4], 0, first.offset).unwrap();
    let shared = stored.with_layout(Layout::new(vec![first, renamed])).unwrap();
    assert_eq!((shared.find("a.1.w"), shared.layout().bytes()), (None, 4));
    assert!(shared.find("head").is_some());

    let longer = TensorInfo::new("a.1.w", DType::U8, &[5], 0, second.offset).unwrap();
    let error = stored.with_layout(Layout::new(vec![longer])).unwrap_err();
    assert!(matches!(error, Error::WrongSize { needed, given, .. } if needed == given + 1), "{error}");
    let mut contradiction = stored.layout().tensors()[1].clone();
    contradiction.bytes = 3;
    let error = stored.with_layout(Layout::new(vec![contradiction])).unwrap_err();
    assert!(matches!(error, Error::WrongSize { needed: 4, given: 3, .. }), "{error}");
    let mut uncountable = stored.layout().tensors()[1].clone();
    uncountable.shape = vec![u64::MAX, 2];
    let error = stored.with_layout(Layout::new(vec![uncountable])).unwrap_err();
    assert!(matches!(error, Error::WrongSize { needed: u64::MAX, given: 4, .. }), "{error}");
    let elsewhere = TensorInfo::new("a.1.w", DType::U8, &[4], 1, 0).unwrap();
    let error = stored.with_layout(Layout::new(vec![elsewhere])).unwrap_err();
    assert!(matches!(error, Error::Missing(Missing::File { index: 1, count: 1, .. })), "{error}");
}
