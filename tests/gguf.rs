//! GGUF files by behaviour: what opens, with which tensors and metadata, and how what does not is refused.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use support::fault::parts;
use support::gguf::{Gguf, Tensor, Value};
use support::{Subject, check_streamed, load, machine};
use tensor_offload::backend::{Clock, MemoryKind, Role, Transfer};
use tensor_offload::checkpoint::{GgufKind, GgufValue, TensorSpec, write_gguf, write_safetensors};
use tensor_offload::error::{FileFault, GgufFault, Missing, NoRows};
use tensor_offload::{Checkpoint, DType, DeviceId, Error, ErrorKind, Loader, Planner, Registry, Streamer, Weights};

fn open(file: &Gguf) -> Checkpoint {
    Checkpoint::from_bytes("weights/model.gguf", file.build()).unwrap()
}

fn bytes_of(model: &Checkpoint, name: &str) -> Vec<u8> {
    let tensor = model.find(name).unwrap();
    let mut bytes = vec![0; model.layout().tensor(tensor).unwrap().bytes as usize];
    model.read(tensor, &mut bytes).unwrap();
    bytes
}

/// Opens bytes that must be refused; -> the tensor blamed and the fault. The message has to name both.
fn refused(bytes: Vec<u8>) -> (Option<String>, FileFault) {
    parts(Checkpoint::from_bytes("weights/bad.gguf", bytes).unwrap_err(), "weights/bad.gguf")
}

/// A file of two tensors that opens.
fn two() -> Gguf {
    Gguf::new("llama").some("token_embd.weight", DType::Q8_0, &[4, 64]).some("blk.0.norm.weight", DType::F32, &[5])
}

fn order(model: &Checkpoint) -> Vec<&str> {
    model.layout().layers().iter().map(|layer| layer.name.as_str()).collect()
}

#[test]
fn a_file_of_another_program_opens_with_its_types_shapes_and_bytes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/mixed.gguf");
    let model = Checkpoint::open(&path).unwrap();
    // As the package gguf 0.19.0 reads it.
    let wanted = [
        ("f32", DType::F32, 8192, 1312),
        ("f16", DType::F16, 4096, 9504),
        ("bf16", DType::BF16, 4096, 13600),
        ("q8_0", DType::Q8_0, 2176, 17696),
        ("q4_0", DType::Q4_0, 1152, 19872),
        ("q4_1", DType::Q4_1, 1280, 21024),
        ("q5_0", DType::Q5_0, 1408, 22304),
        ("q5_1", DType::Q5_1, 1536, 23712),
        ("q2_k", DType::Q2_K, 672, 25248),
        ("q3_k", DType::Q3_K, 880, 25920),
        ("q4_k", DType::Q4_K, 1152, 26816),
        ("q5_k", DType::Q5_K, 1408, 27968),
        ("q6_k", DType::Q6_K, 1680, 29376),
        ("iq4_nl", DType::IQ4_NL, 1152, 31072),
        ("iq4_xs", DType::IQ4_XS, 1088, 32224),
        ("tq1_0", DType::TQ1_0, 432, 33312),
        ("tq2_0", DType::TQ2_0, 528, 33760),
        ("mxfp4", DType::MXFP4, 1088, 34304),
    ];
    let file = fs::read(&path).unwrap();
    assert_eq!(model.layout().tensors().len(), wanted.len());
    for (tensor, (name, dtype, bytes, offset)) in model.layout().tensors().iter().zip(wanted) {
        assert_eq!(tensor.name, format!("blk.0.{name}.weight"));
        assert_eq!((tensor.dtype, &*tensor.shape, tensor.bytes, tensor.offset), (dtype, &[4, 512][..], bytes, offset));
        assert!(bytes_of(&model, &tensor.name) == file[offset as usize..][..bytes as usize], "{name}");
    }
    assert_eq!(model.metadata()["general.name"], "mixed-quant fixture");
    assert_eq!(model.metadata()["llama.block_count"], "2");
    let gguf = model.gguf().unwrap();
    assert_eq!((gguf.version(), gguf.alignment(), gguf.architecture()), (3, 32, Some("llama")));
    assert_eq!(gguf.of_architecture("block_count").and_then(GgufValue::as_u64), Some(2));
    let tokens = gguf.array("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!(tokens.texts().unwrap().collect::<Vec<_>>(), [&b"a"[..], b"b", b"<unk>"]);
}

#[test]
fn a_file_is_known_by_its_first_bytes() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.gguf", "model.safetensors", "blob"] {
        let path = folder.path().join(name);
        fs::write(&path, two().build()).unwrap();
        let model = Checkpoint::open(&path).unwrap();
        assert_eq!(model.layout().tensors().len(), 2, "{name}");
        assert!(model.gguf().is_some());
    }
    let path = folder.path().join("tensors.gguf");
    let spec = [TensorSpec::new("a", DType::U8, [1])];
    write_safetensors(&path, &spec, &Default::default(), |_, out| out.put(b"a")).unwrap();
    let model = Checkpoint::open(&path).unwrap();
    assert!(model.gguf().is_none() && model.find("a").is_some());
}

#[test]
fn shapes_are_outermost_first_and_keep_sides_of_one() {
    let shapes: [&[u64]; 6] = [&[], &[5], &[1, 5], &[5, 1], &[2, 1, 3], &[2, 3, 1, 4]];
    let file = shapes.iter().enumerate().fold(Gguf::new("any"), |file, (at, shape)| {
        file.some(&format!("t{at}"), [DType::F32, DType::BF16, DType::I8][at % 3], shape)
    });
    let model = open(&file);
    for (at, shape) in shapes.iter().enumerate() {
        let tensor = &model.layout().tensor(model.find(&format!("t{at}")).unwrap()).unwrap();
        assert_eq!(tensor.shape, *shape);
        assert!(bytes_of(&model, &tensor.name) == file.tensors[at].bytes);
    }
}

/// Tensors without elements begin where the next one does, or at the end (llama.cpp reads them).
#[test]
fn tensors_without_elements_have_no_bytes() {
    let empty =
        |name: &str, kind, shape| Tensor { name: name.to_owned(), kind, shape, bytes: Vec::new(), offset: None };
    let mut file = two();
    file.tensors.insert(1, empty("scaled_fp8", 0, vec![0]));
    file.tensors.push(empty("blk.0.none.weight", 12, vec![3, 0]));
    let model = open(&file);
    for tensor in &file.tensors {
        assert!(bytes_of(&model, &tensor.name) == tensor.bytes, "{}", tensor.name);
    }
    // The one before may be named first, too.
    file.tensors[1].offset = Some(0);
    assert_eq!(open(&file).layout().tensors().len(), 4);
}

#[test]
fn a_tensor_stored_in_another_shape_has_its_own() {
    let sides = |sides: &[i32]| Value::Array(5, sides.iter().map(|&side| Value::I32(side)).collect());
    let file = Gguf::new("sd1")
        .entry("comfy.gguf.orig_shape.plain", sides(&[2, 8, 3, 3]))
        .entry("comfy.gguf.orig_shape.whole", sides(&[2, 2, 32]))
        .entry("comfy.gguf.orig_shape.broken", sides(&[2, 4, 16]))
        .entry("comfy.gguf.orig_shape.other", sides(&[3, 3]))
        .entry("comfy.gguf.orig_shape.less", sides(&[-1, -5]))
        .some("plain", DType::F16, &[144])
        .some("whole", DType::Q8_0, &[1, 128])
        .some("broken", DType::Q8_0, &[1, 128])
        .some("other", DType::F32, &[5])
        .some("less", DType::F32, &[5]);
    let model = open(&file);
    let shapes = model.layout().tensors().iter().map(|tensor| tensor.shape.as_slice());
    // Rows of 16 elements are no blocks, so the tensor keeps the rows that it is stored in.
    assert_eq!(shapes.collect::<Vec<_>>(), [&[2, 8, 3, 3][..], &[2, 2, 32], &[1, 128], &[5], &[5]]);
}

#[test]
fn every_type_of_metadata_is_there() {
    let array = |kind, values: Vec<Value>| Value::Array(kind, values);
    let nested = array(9, vec![array(4, vec![Value::U32(1)]), array(8, vec!["x".into(), "".into()])]);
    let file = Gguf::new("any")
        .entry("u8", Value::U8(200))
        .entry("i8", Value::I8(-3))
        .entry("u16", Value::U16(60_000))
        .entry("i16", Value::I16(-300))
        .entry("u32", Value::U32(4_000_000_000))
        .entry("i32", Value::I32(-70_000))
        .entry("u64", Value::U64(u64::MAX))
        .entry("i64", Value::I64(i64::MIN))
        .entry("f32", Value::F32(0.5))
        .entry("f64", Value::F64(-1e300))
        .entry("bool", Value::Bool(true))
        .entry("text", "ünder")
        .entry("bad text", Value::Raw(8, [&2u64.to_le_bytes()[..], b"a\xff"].concat()))
        .entry("i8s", array(1, vec![Value::I8(-1), Value::I8(127)]))
        .entry("u64s", array(10, vec![Value::U64(u64::MAX)]))
        .entry("i16s", array(3, vec![Value::I16(-2)]))
        .entry("f32s", array(6, vec![Value::F32(1.5), Value::F32(-0.25)]))
        .entry("f64s", array(12, vec![Value::F64(1e-300)]))
        .entry("bools", array(7, vec![Value::Bool(true), Value::Bool(false)]))
        .entry("none", array(8, vec![]))
        .entry("nested", nested);
    let model = open(&file);
    let metadata = model.metadata();
    for (key, text) in [
        ("u8", "200"),
        ("i8", "-3"),
        ("u16", "60000"),
        ("i16", "-300"),
        ("u32", "4000000000"),
        ("i32", "-70000"),
        ("u64", "18446744073709551615"),
        ("i64", "-9223372036854775808"),
        ("f32", "0.5"),
        ("bool", "true"),
        ("text", "ünder"),
        ("bad text", "a\u{fffd}"),
    ] {
        assert_eq!(metadata[key], text, "{key}");
    }
    assert!(!metadata.contains_key("nested") && !metadata.contains_key("f32s"));
    let gguf = model.gguf().unwrap();
    assert_eq!(gguf.entries().count(), 22);
    assert_eq!(gguf.get("f64"), Some(&GgufValue::F64(-1e300)));
    assert_eq!(gguf.get("f64").unwrap().as_f64(), Some(-1e300));
    assert_eq!([gguf.get("i8"), gguf.get("u64")].map(|v| v.unwrap().as_u64()), [None, Some(u64::MAX)]);
    assert_eq!(gguf.get("bool").and_then(GgufValue::as_bool), Some(true));
    let array = |key: &str| gguf.array(key).unwrap().unwrap();
    let integers = |key: &str| array(key).integers().map(|numbers| numbers.collect::<Vec<_>>());
    assert_eq!(integers("i8s"), Some(vec![-1, 127]));
    assert_eq!(integers("u64s"), Some(vec![u64::MAX.into()]));
    assert_eq!(integers("i16s"), Some(vec![-2]));
    assert_eq!(integers("f32s"), None);
    let floats = |key: &str| array(key).floats().map(|numbers| numbers.collect::<Vec<_>>());
    assert_eq!((floats("f32s"), floats("f64s"), floats("bools")), (Some(vec![1.5, -0.25]), Some(vec![1e-300]), None));
    assert_eq!(array("bools").bools().unwrap().collect::<Vec<_>>(), [true, false]);
    assert!(array("none").is_empty() && array("none").texts().unwrap().next().is_none());
    assert_eq!((array("nested").kind(), array("nested").len()), (GgufKind::Array, 2));
    assert!(gguf.array("text").is_none() && gguf.array("absent").is_none() && gguf.get("absent").is_none());
}

#[test]
fn versions_two_and_three_are_read_and_others_refused_by_name() {
    let at = |version| Gguf { version, ..two() };
    assert_eq!(open(&at(2)).gguf().unwrap().version(), 2);
    for version in [0, 1, 4, 1000] {
        let (_, fault) = refused(at(version).build());
        assert!(matches!(fault, FileFault::Gguf(GgufFault::Version { version: found, .. }) if found == version));
        assert!(fault.to_string().contains(&format!("version {version};")), "{fault}");
    }
    let big = refused(at(3u32.swap_bytes()).build()).1;
    assert_eq!(big, FileFault::Gguf(GgufFault::BigEndian { version: 3 }));
    assert!(big.to_string().contains("big-endian"));
}

#[test]
fn an_alignment_is_a_power_of_two_of_at_least_eight() {
    for alignment in [8u32, 64, 4096] {
        let file = Gguf { alignment: alignment.into(), ..two() };
        let model = open(&file.clone().entry("general.alignment", Value::U32(alignment)));
        assert_eq!(model.gguf().unwrap().alignment(), u64::from(alignment));
        for tensor in &file.tensors {
            assert!(bytes_of(&model, &tensor.name) == tensor.bytes);
        }
    }
    for wrong in [Value::U32(0), Value::U32(4), Value::U32(24), Value::U32(33), "32".into(), Value::I32(32)] {
        let (_, fault) = refused(two().entry("general.alignment", wrong).build());
        let FileFault::Gguf(GgufFault::Value { key, .. }) = fault else { panic!("{fault}") };
        assert_eq!(key, "general.alignment");
    }
}

/// A file of [`two`] whose second tensor is changed.
fn changed(change: impl FnOnce(&mut Tensor)) -> Vec<u8> {
    let mut file = two();
    change(&mut file.tensors[1]);
    file.build()
}

#[test]
fn malformed_tensors_are_refused_by_name() {
    let second = || Some("blk.0.norm.weight".to_owned());
    let gguf = |bytes| match refused(bytes) {
        (tensor, FileFault::Gguf(fault)) => (tensor, fault),
        (_, other) => panic!("{other}"),
    };
    assert_eq!(gguf(changed(|t| t.shape = vec![1; 5])), (second(), GgufFault::Dimensions { count: 5 }));
    for number in [4, 5, 31, 32, 33, 36, 37, 38, 43, 1 << 31] {
        let (tensor, fault) = gguf(changed(|t| t.kind = number));
        assert_eq!((&tensor, &fault), (&second(), &GgufFault::Type { number }));
        assert!(fault.to_string().contains(&format!("number {number} ")), "{fault}");
    }
    // 896 is three blocks of 256 and a half, although two such rows are seven.
    let row = gguf(changed(|t| (t.kind, t.shape) = (12, vec![2, 896])));
    assert_eq!(row, (second(), GgufFault::PartOfABlock { dtype: DType::Q4_K, row: 896, block: 256 }));
    let shape = vec![1 << 32, 1 << 32];
    let large = gguf(changed(|t| t.shape = shape.clone()));
    assert_eq!(large, (second(), GgufFault::Uncountable { dtype: DType::F32, shape }));
    assert_eq!(gguf(changed(|t| t.offset = Some(8))), (second(), GgufFault::Unaligned { offset: 8, alignment: 32 }));
    let (tensor, fault) = refused(changed(|t| t.name = "token_embd.weight".to_owned()));
    assert_eq!((tensor.as_deref(), fault), (Some("token_embd.weight"), FileFault::DuplicateKey));
    let (tensor, fault) = refused(changed(|t| t.offset = Some(0)));
    assert!(matches!(fault, FileFault::Overlap { .. }) && tensor.is_some(), "{fault}");
    let (tensor, fault) = refused(changed(|t| t.offset = Some(u64::MAX - 31)));
    assert!(matches!(fault, FileFault::Truncated { expected: u64::MAX, .. }) && tensor == second(), "{fault}");
    let (tensor, fault) = refused(changed(|t| t.shape = vec![4096]));
    assert!(matches!(fault, FileFault::Truncated { .. }) && tensor == second(), "{fault}");
    // More than the padding between two tensors.
    let mut file = two();
    file.tensors[1].offset = Some(352);
    let mut bytes = file.build();
    bytes.resize(bytes.len() + 64, 0);
    let (tensor, fault) = refused(bytes);
    assert!(matches!(&fault, FileFault::Hole { hole } if hole.end - hole.start == 64) && tensor == second(), "{fault}");
    // More than the padding after the last.
    let mut bytes = two().build();
    bytes.resize(bytes.len() + 3, 0);
    assert_eq!(refused(bytes), (None, FileFault::TrailingBytes { extra: 3 }));
    let mut bytes = two().build();
    let unpadded = bytes.len() - 12;
    bytes.truncate(unpadded);
    Checkpoint::from_bytes("the last tensor needs no padding", bytes.clone()).unwrap();
    bytes.pop();
    assert!(matches!(refused(bytes), (Some(_), FileFault::Truncated { .. })));
}

#[test]
fn malformed_metadata_is_refused_by_key() {
    let key = |fault: FileFault| match fault {
        FileFault::Gguf(
            GgufFault::ValueType { key, .. }
            | GgufFault::Bool { key, .. }
            | GgufFault::Nesting { key, .. }
            | GgufFault::RepeatedKey { key },
        ) => key,
        other => panic!("{other}"),
    };
    let with = |value| refused(two().entry("k", value).build()).1;
    assert_eq!(key(with(Value::Raw(13, vec![0; 8]))), "k");
    assert_eq!(key(with(Value::Raw(7, vec![2]))), "k");
    assert_eq!(key(with(Value::Array(7, vec![Value::Bool(true), Value::Raw(7, vec![9])]))), "k");
    assert_eq!(key(with(Value::Array(13, vec![]))), "k");
    let deep = (0..40).fold(Value::Array(0, vec![]), |inner, _| Value::Array(9, vec![inner]));
    assert_eq!(key(with(deep)), "k");
    assert_eq!(key(refused(two().entry("k", "a").entry("k", "b").build()).1), "k");
    for (kind, len) in [(0, u64::MAX), (8, 1 << 40), (9, 1 << 61), (12, 1 << 61)] {
        let head = [&(kind as u32).to_le_bytes()[..], &len.to_le_bytes()].concat();
        let fault = with(Value::Raw(9, head));
        assert!(matches!(&fault, FileFault::Gguf(GgufFault::Count { count, .. }) if *count == len), "{fault}");
    }
    for len in [1 << 40, u64::MAX] {
        let fault = with(Value::Raw(8, len.to_le_bytes().to_vec()));
        assert!(matches!(fault, FileFault::Truncated { .. }), "{fault}");
    }
    for counts in [[Some(1 << 60), None], [None, Some(u64::MAX)]] {
        let (_, fault) = refused(Gguf { counts, ..two() }.build());
        assert!(matches!(fault, FileFault::Gguf(GgufFault::Count { .. })), "{fault}");
    }
    let long = "k".repeat(70_000);
    let (_, fault) = refused(two().entry(long, "a").build());
    assert!(matches!(fault, FileFault::Gguf(GgufFault::LongName { bytes: 70_000, .. })), "{fault}");
    let mut bytes = two().build();
    let at = bytes.windows(7).position(|window| window == b"general").unwrap();
    bytes[at] = 0xff;
    assert!(matches!(refused(bytes).1, FileFault::Gguf(GgufFault::NotUtf8 { .. })));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = two().entry("k", Value::Array(8, vec!["a".into(), "bc".into()])).build();
    for len in 4..whole.len() - 12 {
        let error = Checkpoint::from_bytes("cut.gguf", whole[..len].to_vec()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::File, "{len}: {error}");
    }
}

/// The files of a set of three, with these tensors.
fn set() -> [Gguf; 3] {
    let part = |number: u16| {
        let file = if number == 0 { Gguf::new("llama") } else { Gguf { entries: vec![], ..Gguf::new("llama") } };
        let file = file.entry("split.no", Value::U16(number)).entry("split.count", Value::U16(3));
        file.entry("split.tensors.count", Value::I32(4))
    };
    [
        part(0).some("token_embd.weight", DType::Q4_0, &[4, 32]),
        part(1).some("blk.1.ffn_up.weight", DType::F16, &[8]).some("output_norm.weight", DType::F32, &[8]),
        part(2).some("blk.0.ffn_up.weight", DType::F16, &[8]),
    ]
}

fn part(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("m-{number:05}-of-00003.gguf"))
}

fn write(files: &[Gguf]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (index, file) in files.iter().enumerate() {
        fs::write(part(folder.path(), index + 1), file.build()).unwrap();
    }
    folder
}

#[test]
fn a_set_opens_from_any_of_its_files_and_from_its_folder() {
    let files = set();
    let folder = write(&files);
    for path in [1, 2, 3].map(|number| part(folder.path(), number)).into_iter().chain([folder.path().to_owned()]) {
        let model = Checkpoint::open(&path).unwrap();
        assert_eq!(model.path(), path);
        assert_eq!(order(&model), ["token_embd", "blk.0", "blk.1", "output_norm"]);
        assert_eq!(model.sources().len(), 3);
        for tensor in files.iter().flat_map(|file| &file.tensors) {
            assert!(bytes_of(&model, &tensor.name) == tensor.bytes, "{}", tensor.name);
        }
        assert_eq!(model.gguf().unwrap().architecture(), Some("llama"));
        // The head is in no file of the set.
        assert!(model.layout().modules()[0].tied);
    }
}

/// llama.cpp's splitter leaves the metadata in the first file.
#[test]
fn the_first_file_of_a_set_has_the_shapes_of_tensors_in_the_others() {
    let mut files = set();
    let name = files[2].tensors[0].name.clone();
    let (elements, stored) = (files[2].tensors[0].shape.iter().product::<u64>(), files[2].tensors[0].shape.clone());
    let shape = |sides: &[u64]| Value::Array(5, sides.iter().map(|side| Value::I32(*side as i32)).collect());
    let sides = [1, stored[0], elements / stored[0]];
    files[0].entries.push((format!("comfy.gguf.orig_shape.{name}"), shape(&sides)));
    let shape_of = |model: &Checkpoint| model.layout().tensor(model.find(&name).unwrap()).unwrap().shape.clone();
    let folder = write(&files);
    let model = Checkpoint::open(part(folder.path(), 2)).unwrap();
    assert_eq!(shape_of(&model), sides);
    // In one file it is as it was in the set: stored in one shape, with another one noted.
    let metadata = model.gguf().unwrap().to_metadata().unwrap();
    let tensors = model.layout().tensors();
    let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(&*t.name, t.dtype, &*t.shape)).collect();
    let joined = folder.path().join("joined.gguf");
    write_gguf(&joined, &specs, &metadata, |tensor, out| out.put(&bytes_of(&model, &tensors[tensor].name))).unwrap();
    assert_eq!(shape_of(&Checkpoint::open(&joined).unwrap()), sides);
    assert_eq!(header_shape(&fs::read(&joined).unwrap(), &name), stored);
    // What the tensor's own file says counts.
    files[2].entries.push((format!("comfy.gguf.orig_shape.{name}"), shape(&stored)));
    let folder = write(&files);
    assert_eq!(shape_of(&Checkpoint::open(folder.path()).unwrap()), stored);
}

/// The shape that a file's header has of a tensor, outermost first.
fn header_shape(file: &[u8], name: &str) -> Vec<u64> {
    let at = file.windows(name.len()).rposition(|window| window == name.as_bytes()).unwrap() + name.len();
    let count = u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    let sides = file[at + 4..].as_chunks().0[..count].iter().map(|side| u64::from_le_bytes(*side));
    sides.rev().collect()
}

#[test]
fn a_set_whose_download_has_not_finished_is_refused() {
    let folder = write(&set());
    fs::write(folder.path().join("m-00003-of-00003.gguf.aria2"), "").unwrap();
    let (_, fault) = parts(Checkpoint::open(folder.path()).unwrap_err(), "m-00003-of-00003.gguf");
    assert!(matches!(fault, FileFault::Unfinished { .. }), "{fault}");
}

#[test]
fn an_incomplete_set_names_all_missing_files() {
    let folder = write(&set());
    fs::remove_file(part(folder.path(), 1)).unwrap();
    fs::remove_file(part(folder.path(), 3)).unwrap();
    for path in [part(folder.path(), 2), folder.path().to_owned()] {
        let (_, fault) = parts(Checkpoint::open(path).unwrap_err(), "m-00002-of-00003.gguf");
        let FileFault::Gguf(GgufFault::MissingParts { count: 3, files }) = fault else { panic!("{fault}") };
        assert_eq!(files, ["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"]);
    }
}

#[test]
fn files_that_are_no_set_are_refused() {
    let fault = |change: &dyn Fn(&mut [Gguf; 3])| {
        let mut files = set();
        change(&mut files);
        let folder = write(&files);
        let error = Checkpoint::open(part(folder.path(), 1)).unwrap_err();
        let Error::File { file, tensor, fault } = error else { panic!("{error}") };
        let FileFault::Gguf(fault) = *fault else { panic!("{fault}") };
        (file.file_name().unwrap().to_str().unwrap().to_owned(), tensor, fault)
    };
    let other = |change: &dyn Fn(&mut [Gguf; 3]), wanted: &str| match fault(change) {
        (file, _, GgufFault::OtherSet { key, .. }) => assert_eq!((&*file, &*key), ("m-00002-of-00003.gguf", wanted)),
        (_, _, fault) => panic!("{fault}"),
    };
    other(&|files| files[1].entries[0].1 = Value::U16(2), "split.no");
    other(&|files| files[1].entries[1].1 = Value::U16(4), "split.count");
    other(&|files| files[1].entries[2].1 = Value::I32(5), "split.tensors.count");
    other(&|files| files[1].entries.clear(), "split.count");
    let (_, _, wrong) = fault(&|files| files.iter_mut().for_each(|f| f.entries.last_mut().unwrap().1 = Value::I32(5)));
    assert_eq!(wrong, GgufFault::TensorsOfSet { found: 4, wanted: 5 });
    let twice = fault(&|files| files[2].tensors[0].name = "token_embd.weight".to_owned());
    assert!(matches!(twice.2, GgufFault::InTwoParts { .. }), "{}", twice.2);
    assert_eq!((&*twice.0, twice.1.as_deref()), ("m-00003-of-00003.gguf", Some("token_embd.weight")));
    let (_, _, wrong) = fault(&|files| files[0].entries[1].1 = Value::U16(3));
    assert!(matches!(wrong, GgufFault::Value { key, .. } if key == "split.no"));
    // A file of a set that is not named as one.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("renamed.gguf");
    fs::write(&path, set()[1].build()).unwrap();
    let lone = refused(set()[1].build()).1;
    assert_eq!(lone, FileFault::Gguf(GgufFault::LonePart { number: 1, count: 3 }));
    let (_, unnamed) = parts(Checkpoint::open(&path).unwrap_err(), "renamed.gguf");
    assert_eq!(unnamed, FileFault::Gguf(GgufFault::UnnamedPart { number: 1, count: 3 }));
    assert!(unnamed.to_string().contains("NAME-00002-of-00003.gguf"), "{unnamed}");
}

#[test]
fn a_folder_of_several_models_has_to_be_opened_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str| fs::write(folder.path().join(name), two().build()).unwrap();
    write("b.gguf");
    let model = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(model.layout().tensors().len(), 2);
    write("a.gguf");
    let fault = Checkpoint::open(folder.path()).unwrap_err();
    let Error::File { fault, .. } = fault else { panic!("{fault}") };
    assert_eq!(*fault, FileFault::Gguf(GgufFault::SeveralFiles { files: vec!["a.gguf".into(), "b.gguf".into()] }));
}

#[test]
fn a_language_model_without_a_head_uses_its_embedding_at_both_ends() {
    let model = |architecture: &str, head: bool| {
        let file = Gguf::new(architecture).some("token_embd.weight", DType::F16, &[8, 4]);
        let file = file.some("blk.0.attn_q.weight", DType::F16, &[4, 4]).some("output_norm.weight", DType::F32, &[4]);
        open(&if head { file.some("output.weight", DType::F16, &[8, 4]) } else { file })
    };
    let tied = |model: Checkpoint| model.layout().modules().iter().any(|module| module.tied);
    assert!(tied(model("llama", false)) && tied(model("gemma3", false)));
    assert!(!tied(model("llama", true)));
    for encoder in ["bert", "nomic-bert-moe", "t5encoder", "gemma-embedding"] {
        assert!(!tied(model(encoder, false)), "{encoder}");
    }
}

#[test]
fn layers_run_in_order_of_their_numbers() {
    let mut file = Gguf::new("qwen3moe").some("output.weight", DType::Q6_K, &[4, 256]);
    file = file.some("output_norm.weight", DType::F32, &[4]);
    for layer in [10, 2, 0, 1, 11, 3, 4, 5, 6, 7, 8, 9] {
        for (name, dtype, shape) in [
            ("ffn_gate_inp", DType::F32, &[2, 256][..]),
            ("ffn_gate_exps", DType::Q4_K, &[2, 3, 256]),
            ("ffn_up_exps", DType::Q4_K, &[2, 3, 256]),
            ("ffn_down_exps", DType::Q6_K, &[2, 4, 256]),
            ("attn_norm", DType::F32, &[256]),
        ] {
            file = file.some(&format!("blk.{layer}.{name}.weight"), dtype, shape);
        }
    }
    let model = open(&file.some("token_embd.weight", DType::Q4_K, &[4, 256]));
    let blocks = (0..12).map(|layer| format!("blk.{layer}"));
    let wanted: Vec<String> =
        ["token_embd".to_owned()].into_iter().chain(blocks).chain(["output_norm".into(), "output".into()]).collect();
    assert_eq!(order(&model), wanted);
    let layers = &model.layout().layers()[1..13];
    assert!(layers.iter().all(|layer| layer.class == layers[0].class && layer.modules.len() == 5));
    assert_eq!(layers[0].bytes, 2 * 256 * 4 + 2 * 6 * 144 + 8 * 210 + 256 * 4);
}

#[test]
fn image_models_keep_the_order_of_their_networks() {
    let mut file = Gguf::new("flux");
    for name in ["final_layer.linear", "img_in", "txt_in", "time_in.in_layer", "vector_in.in_layer"] {
        file = file.some(&format!("{name}.weight"), DType::F16, &[4, 32]);
    }
    for block in [10, 2, 0, 1] {
        file = file.some(&format!("single_blocks.{block}.linear1.weight"), DType::Q8_0, &[4, 32]);
        file = file.some(&format!("double_blocks.{block}.img_attn.qkv.weight"), DType::Q4_0, &[4, 32]);
    }
    let model = open(&file);
    let stacks: Vec<_> = order(&model).into_iter().filter(|name| name.contains("blocks")).collect();
    let wanted = ["double", "single"].map(|stack| [0, 1, 2, 10].map(|block| format!("{stack}_blocks.{block}")));
    assert_eq!(stacks, wanted.concat());
    assert_eq!(order(&model).last(), Some(&"final_layer.linear"));
    assert!(model.layout().modules().iter().all(|module| !module.tied));
}

#[test]
fn blocks_are_loaded_and_streamed_as_they_are() {
    let kinds = DType::all().filter(|dtype| dtype.ggml_number().is_some());
    let mut file = Gguf::new("llama").some("token_embd.weight", DType::Q8_0, &[6, 64]);
    for (number, dtype) in kinds.enumerate() {
        let row = 2 * dtype.block().elements;
        file = file.some(&format!("blk.{}.ffn_{number}.weight", number / 3), dtype, &[3, row]);
        file = file.some(&format!("blk.{}.attn_{number}.weight", number / 3), dtype, &[1, row]);
    }
    let subject = Subject::new(Weights::new(open(&file)));
    let machine = machine();
    for allocation in ["cuda:0,20%;cpu,*", "cuda:0,20%;cpu,30%;disk,*", "cuda:0,*"] {
        let registry = Registry::described(machine.clone(), Clock::Virtual);
        let plan = subject.planner(&machine, allocation).plan().unwrap();
        let model = load(&registry, &subject, &plan);
        subject.check(&model);
        check_streamed(&model, &subject);
    }
}

#[test]
fn rows_of_blocks_are_read_where_they_lie() {
    let file = Gguf::new("llama").some("token_embd.weight", DType::Q6_K, &[6, 512]);
    let file = file.some("blk.0.attn_q.weight", DType::Q8_0, &[64]).some("blk.1.attn_q.weight", DType::Q8_0, &[64]);
    let subject = Subject::new(Weights::new(open(&file)));
    let machine = machine();
    let plan = subject.planner(&machine, "cpu,*").gather_embeddings(true).plan().unwrap();
    let model = load(&Registry::described(machine.clone(), Clock::Virtual), &subject, &plan);
    let bytes = model.tensor("token_embd.weight").unwrap().row_bytes().unwrap();
    assert_eq!(bytes, 420);
    let mut rows = vec![0; 3 * 420];
    model.read_rows("token_embd.weight", &[5, 0, 5], &mut rows).unwrap();
    let row = |row: usize| &file.tensors[0].bytes[row * 420..][..420];
    assert!(rows == [row(5), row(0), row(5)].concat());
    let error = model.tensor("blk.0.attn_q.weight").unwrap().row_bytes().unwrap_err();
    assert!(matches!(error, Error::Missing(Missing::Rows { why: NoRows::PartOfABlock, .. })), "{error}");
}

#[test]
fn safetensors_does_not_take_the_types_of_ggml() {
    let folder = tempfile::tempdir().unwrap();
    let spec = [TensorSpec::new("a", DType::Q4_K, [256])];
    let error = write_safetensors(folder.path().join("m"), &spec, &Default::default(), |_, _| Ok(())).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("Q4_K"), "{error}");
}

/// What is compared with another reader: each tensor's name, type, shape and offset.
type Seen = Vec<(String, String, Vec<u64>, u64)>;

/// The tensors as the crate gguf-rs-lib reads them, and the metadata without arrays; `None` for a file that it refuses.
fn oracle(bytes: &[u8]) -> Option<(Seen, Vec<(String, String)>)> {
    use gguf_rs_lib::format::metadata::MetadataValue;
    let reader = gguf_rs_lib::reader::GGUFFileReader::new(std::io::Cursor::new(bytes)).ok()?;
    let tensor = |info: &gguf_rs_lib::tensor::TensorInfo| {
        let mut shape = info.shape().dims().to_vec();
        shape.reverse();
        let offset = reader.tensor_data_offset() + info.data_offset();
        (info.name().to_owned(), info.tensor_type().name().to_owned(), shape, offset)
    };
    let mut tensors: Seen = reader.tensor_infos().iter().map(tensor).collect();
    tensors.sort_by_key(|tensor| tensor.3);
    let scalars = reader.metadata().iter().filter(|(_, value)| !matches!(value, MetadataValue::Array(_)));
    let mut scalars: Vec<_> = scalars.map(|(key, value)| (key.to_string(), value.to_string_representation())).collect();
    scalars.sort();
    Some((tensors, scalars))
}

/// This crate's view of the same.
fn seen(model: &Checkpoint) -> Seen {
    let tensor = |info: &tensor_offload::checkpoint::TensorInfo| {
        (info.name.clone(), info.dtype.to_string(), info.shape.clone(), info.offset)
    };
    model.layout().tensors().iter().map(tensor).collect()
}

fn dtypes() -> Vec<DType> {
    DType::all().filter(|dtype| dtype.ggml_number().is_some()).collect()
}

prop_compose! {
    fn value()(choice in 0..14u8, number in any::<u64>(), text in "[a-zß ]{0,12}", count in 0..4usize) -> Value {
        let simple = |choice| match choice {
            0 => Value::U8(number as u8),
            1 => Value::I8(number as i8),
            2 => Value::U16(number as u16),
            3 => Value::I16(number as i16),
            4 => Value::U32(number as u32),
            5 => Value::I32(number as i32),
            6 => Value::F32((number >> 40) as f32),
            7 => Value::Bool(number % 2 == 0),
            8 => Value::Text(text.clone()),
            9 => Value::U64(number),
            10 => Value::I64(number as i64),
            _ => Value::F64((number >> 12) as f64),
        };
        match choice {
            12 | 13 => {
                let one = simple((number % 12) as u8);
                Value::Array(one.number(), vec![one; count])
            }
            choice => simple(choice),
        }
    }
}

prop_compose! {
    fn file()(
        entries in prop::collection::btree_map("[a-z]{1,6}", value(), 0..6),
        tensors in prop::collection::btree_map(
            "[a-z]{1,8}(\\.[0-9])?",
            (prop::sample::select(dtypes()), prop::collection::vec(1..4u64, 0..4)),
            0..6,
        ),
        alignment in prop::sample::select(vec![32u64, 8, 64, 128]),
        version in 2..4u32,
    ) -> Gguf {
        let mut file = Gguf { version, alignment, ..Gguf::new("any") };
        if alignment != 32 {
            file = file.entry("general.alignment", Value::U32(alignment as u32));
        }
        for (key, value) in entries {
            file = file.entry(key, value);
        }
        for (name, (dtype, mut shape)) in tensors {
            match shape.last_mut() {
                Some(row) => *row *= dtype.block().elements,
                None if dtype.is_ggml_block() => shape.push(dtype.block().elements),
                None => {}
            }
            file = file.some(&name, dtype, &shape);
        }
        file
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn files_are_read_as_they_were_written(file in file()) {
        let bytes = file.build();
        let model = Checkpoint::from_bytes("m.gguf", bytes.clone()).unwrap();
        prop_assert_eq!(model.layout().tensors().len(), file.tensors.len());
        for tensor in &file.tensors {
            let info = model.layout().tensor(model.find(&tensor.name).unwrap()).unwrap();
            prop_assert_eq!((info.dtype.ggml_number(), &info.shape), (Some(tensor.kind), &tensor.shape));
            prop_assert!(bytes_of(&model, &tensor.name) == tensor.bytes);
        }
        prop_assert_eq!(model.gguf().unwrap().entries().count(), file.entries.len());
        // What the other reader accepts, it reads alike. It knows fewer types.
        if let Some((tensors, scalars)) = oracle(&bytes) {
            prop_assert_eq!(tensors, seen(&model));
            let metadata: Vec<_> = model.metadata().clone().into_iter().collect();
            prop_assert_eq!(scalars, metadata);
        }
    }

    #[test]
    fn whatever_is_changed_in_a_file_it_is_read_or_refused(
        file in file(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = file.build();
        for (place, byte, how) in changes {
            let at = place.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                _ => bytes.insert(at, byte),
            }
        }
        if let Some(place) = cut {
            bytes.truncate(place.index(bytes.len()));
        }
        match Checkpoint::from_bytes("m.gguf", bytes.clone()) {
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::File, "{}", error),
            Ok(model) => {
                for info in model.layout().tensors() {
                    prop_assert!(bytes_of(&model, &info.name).len() as u64 == info.bytes);
                }
                if let Some((tensors, _)) = oracle(&bytes) {
                    prop_assert_eq!(tensors, seen(&model));
                }
            }
        }
    }
}

#[test]
fn the_other_reader_agrees_on_real_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/mixed.gguf");
    let bytes = fs::read(&path).unwrap();
    let (tensors, scalars) = oracle(&bytes).unwrap();
    let model = Checkpoint::open(&path).unwrap();
    assert_eq!(tensors, seen(&model));
    let metadata: Vec<_> = model.metadata().clone().into_iter().collect();
    assert_eq!(scalars, metadata);
}

/// On devices without kernels the host computes the values of a layer's blocks: the bytes of a cast, wherever the layer lives.
#[test]
fn a_guard_has_the_values_of_its_blocks_on_every_device() {
    let file = (0..3).fold(Gguf::new("llama"), |file, layer| {
        let types = [DType::Q4_K, DType::IQ2_XXS, DType::Q8_0];
        types.into_iter().fold(file, |file, dtype| {
            file.some(&format!("blk.{layer}.{}.weight", dtype.name().to_lowercase()), dtype, &[6, 512])
        })
    });
    let weights = Weights::new(open(&file));
    let cast = Weights::new(open(&file)).cast_floats(DType::F16).unwrap();
    let deadline = Duration::from_secs(20);
    for compute in ["cpu", "cuda:0", "xpu:0"] {
        let devices = Registry::described(machine(), Clock::Wall);
        let planner = Planner::new(weights.layout(), devices.machine()).compute(compute.parse().unwrap());
        let plan = planner.allocation("cuda:0,20%;disk,40%;cpu,*".parse().unwrap()).depth(1).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&weights, &plan).unwrap());
        let (device, host) = (model.residency().device(), devices.device(DeviceId::CPU).unwrap());
        let down = device.stream(Role::Download).unwrap();
        let mut streamer = Streamer::new(&model).unwrap();
        let mut values = device.alloc(6 * 512 * 2, MemoryKind::Whole).unwrap();
        for layer in support::layers(&streamer) {
            let guard = streamer.layer(layer).unwrap();
            for view in guard.tensors() {
                let tensor = cast.layout().find(view.name()).unwrap();
                let mut wanted = vec![0; values.bytes()];
                cast.read(tensor, &mut wanted).unwrap();
                let filled = guard.dequantise(view.name(), DType::F16, values).unwrap().chain().freeze();
                let back = host.alloc(filled.bytes(), MemoryKind::Whole).unwrap();
                let back = down.copy(Transfer::whole(&filled, back).unwrap()).unwrap().wait(deadline).unwrap().freeze();
                let got = back.host(deadline).unwrap().unwrap();
                assert!(got == wanted, "{} on {compute}", view.name());
                values = filled.try_reclaim().unwrap();
            }
        }
    }
}
