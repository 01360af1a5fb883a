//! Checkpoints whose files have tensors in compressed form: they are what they were before, wherever they are read.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use proptest::prelude::*;
use support::compressed::{Compressed, compress};
use support::*;
use tensor_offload::backend::{Backend, Clock, Host};
use tensor_offload::checkpoint::{CompressedReport, TensorSpec, write_compressed};
use tensor_offload::error::{CodeFault, CompressedFault, FileFault};
use tensor_offload::{
    ByteSize, Checkpoint, DType, Error, Loader, Matching, Planner, Registry, Result, Streamer, TensorId, Weights,
};

fn bytes(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    try_bytes(checkpoint, name).unwrap()
}

fn try_bytes(checkpoint: &Checkpoint, name: &str) -> Result<Vec<u8>> {
    let tensor = checkpoint.find(name).unwrap();
    let mut bytes = vec![0; checkpoint.layout().tensor(tensor).unwrap().bytes as usize];
    checkpoint.read(tensor, &mut bytes).map(|()| bytes)
}

/// Tensors, types, shapes, order and bytes are those of the plain file, and only its size is another.
#[test]
fn a_compressed_file_is_the_checkpoint_that_it_was() {
    for tensors in [llama(3, 96), mixed(2)] {
        let model = Compressed::new(&tensors, 3);
        let (opened, plain) = (model.open(), model.plain.checkpoint());
        assert_eq!(opened.layout().layers(), plain.layout().layers());
        assert_eq!(opened.metadata(), &BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
        let (mut compressed, mut to) = (0, 0);
        for (found, info) in opened.layout().tensors().iter().zip(plain.layout().tensors()) {
            assert_eq!((&found.name, found.dtype, &found.shape), (&info.name, info.dtype, &info.shape));
            assert!(bytes(&opened, &info.name) == bytes(plain, &info.name), "{}", info.name);
            if let Some(stored) = opened.compressed(opened.find(&info.name).unwrap()) {
                assert!(stored < info.bytes, "{}", info.name);
                compressed += 1;
                to += stored;
            }
        }
        let CompressedReport { plain: left, .. } = model.report;
        assert_eq!((compressed, to), (model.report.compressed, model.report.to));
        assert_eq!(compressed + left, tensors.len() as u64);
        assert!(compressed >= 6 && to < model.report.from, "{}", model.report);
        let saved = model.report.from - to;
        let size = fs::metadata(model.file()).unwrap().len();
        assert!(size < plain.layout().bytes() - saved + 30_000, "{size}");
    }
}

/// A program that does not know codes finds bytes under another name.
#[test]
fn other_programs_do_not_take_codes_for_weights() {
    let model = Compressed::new(&llama(1, 64), 4);
    let file = fs::read(model.file()).unwrap();
    let read = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert!(read.tensor("lm_head.weight").is_err());
    let code = read.tensor("lm_head.weight.lossless").unwrap();
    assert_eq!((code.dtype(), code.shape().len()), (safetensors::Dtype::U8, 1));
    assert_eq!(read.tensor("model.norm.weight").unwrap().dtype(), safetensors::Dtype::BF16);
}

#[test]
fn models_are_loaded_patched_and_streamed_from_compressed_files() {
    let tensors = llama(4, 64);
    let model = Compressed::new(&tensors, 5);
    let patched = |checkpoint: &Checkpoint| {
        Subject::new(Weights::patched(checkpoint.clone(), two_loras(&tensors, 6), Matching::Strict).unwrap())
    };
    let (plain, subject) = (patched(model.plain.checkpoint()), patched(&model.open()));
    assert!(plain.merged == subject.merged);
    let devices = Registry::described(machine(), Clock::Wall);
    for (wanted, subject) in [(&model.plain, Subject::new(model.open().into())), (&plain, subject)] {
        for allocation in ["cuda:0,30%;cpu,*", "cuda:0,100kb;disk,*", "cuda:1,50%;cpu,*"] {
            let plan = subject.planner(devices.machine(), allocation).plan().unwrap();
            let loaded = load(&devices, &subject, &plan);
            wanted.check(&loaded);
            let mut streamer = Streamer::new(&loaded).unwrap();
            check_pass(&mut streamer, wanted).unwrap();
        }
    }
}

/// Weights on the disk stay in a compressed file as in any other: each turn reads its codes, and the host keeps what they stand for.
#[test]
fn layers_are_read_from_a_compressed_file_for_their_turns() {
    let model = Compressed::new(&llama(6, 96), 10);
    let subject = Subject::new(model.open().into());
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let devices = Registry::new([Arc::new(Host::new().disk_folder(scratch.path())) as Arc<dyn Backend>]);
    let planner = Planner::new(subject.layout(), devices.machine()).compute(CPU).depth(1);
    let plan = planner.allocation("disk,*".parse().unwrap()).plan().unwrap();
    let sizes = |tensor: TensorId| {
        let info = subject.layout().tensor(tensor).unwrap();
        subject.checkpoint().compressed(tensor).unwrap_or(info.bytes)
    };
    let stored: u64 = subject.layout().tensor_ids().map(sizes).sum();
    for cap in [0, plan.bytes()] {
        let loader = Loader::new(&devices).host_cache(ByteSize(cap));
        let loaded = Arc::new(loader.load(&subject.weights, &plan).unwrap());
        assert_eq!((loaded.report().in_files, loaded.report().read), (plan.bytes(), 0));
        let mut streamer = Streamer::new(&loaded).unwrap();
        let mut pass = || {
            let before = streamer.report().clone();
            check_pass(&mut streamer, &model.plain).unwrap();
            let after = streamer.report();
            (after.read - before.read, after.bytes[&DISK] - before.bytes.get(&DISK).copied().unwrap_or(0))
        };
        let [(first, _), (read, bytes), (again, _)] = [pass(), pass(), pass()];
        // The first pass also fetches the first layer of the next.
        assert!(first >= stored && first < stored * 5 / 4, "{first} of {stored}");
        assert_eq!((read, again, bytes), if cap == 0 { (stored, stored, plan.bytes()) } else { (0, 0, plan.bytes()) });
        assert!(stored * 10 < plan.bytes() * 8);
        assert_eq!(streamer.report().to_string().contains("kept in host memory"), cap > 0);
        model.plain.check(&loaded);
    }
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

/// A file that changes under a model is an error of the next layer that reads it.
#[test]
fn a_compressed_file_that_changes_is_noticed() {
    let model = Compressed::new(&llama(3, 96), 11);
    let subject = Subject::new(model.open().into());
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let devices = Registry::new([Arc::new(Host::new().disk_folder(scratch.path())) as Arc<dyn Backend>]);
    let planner = Planner::new(subject.layout(), devices.machine()).compute(CPU).depth(0);
    let plan = planner.allocation("disk,*".parse().unwrap()).plan().unwrap();
    let loaded = load(&devices, &subject, &plan);
    let mut streamer = Streamer::new(&loaded).unwrap();
    check_pass(&mut streamer, &model.plain).unwrap();
    let bytes = fs::read(model.file()).unwrap();
    fs::write(model.file(), &bytes).unwrap();
    let error = check_pass(&mut streamer, &model.plain).unwrap_err();
    assert!(error.to_string().contains("model.safetensors") && error.to_string().contains("changed"), "{error}");
}

/// The index of a set names tensors as they are called, whatever form a file has them in.
#[test]
fn the_files_of_a_set_are_compressed_one_by_one() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tensors = llama(2, 64);
    let (first, second) = tensors.split_at(6);
    let mut map = serde_json::Map::new();
    for (name, part) in [("a.safetensors", first), ("b.safetensors", second)] {
        compress(Subject::plain(part, 7).checkpoint(), &folder.path().join(name));
        map.extend(part.iter().map(|tensor| (tensor.name.clone(), name.into())));
    }
    let index = serde_json::json!({ "weight_map": map }).to_string();
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let (opened, plain) = (Checkpoint::open(folder.path()).unwrap(), Subject::plain(&tensors, 7));
    assert_eq!(opened.layout().layers(), plain.layout().layers());
    assert!(tensors.iter().all(|tensor| bytes(&opened, &tensor.name) == plain.bytes_of(&tensor.name)));
}

/// Whatever byte changes, what is read is an error with the file and the tensor, or as it was.
#[test]
fn a_damaged_file_gives_errors_and_no_wrong_weight() {
    let model = Compressed::new(&[spec("a.weight", DType::BF16, &[100, 100]), spec("b", DType::U8, &[5])], 8);
    let (mut file, weights) = (fs::read(model.file()).unwrap(), model.plain.bytes_of("a.weight"));
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (mut errors, code) = (0, header..file.len() - 5);
    for at in code.clone().take(200).chain(code.clone().step_by(37)) {
        file[at] ^= 1 << (at % 8);
        let opened = Checkpoint::from_bytes("model", file.clone()).unwrap();
        match try_bytes(&opened, "a.weight") {
            Ok(read) => panic!("byte {at} is not noticed: {}", read == weights),
            Err(error) => {
                let Error::File { tensor, fault, .. } = &error else { panic!("{error:?}") };
                assert_eq!(tensor.as_deref(), Some("a.weight"), "{error}");
                assert!(matches!(&**fault, FileFault::Compressed(CompressedFault::Code(_))), "{error}");
                errors += 1;
            }
        }
        file[at] ^= 1 << (at % 8);
    }
    assert!(errors > 400);
}

#[test]
fn what_the_metadata_says_is_compared_with_the_code() {
    let code = |dtype: DType, count: u64| {
        let plain = Subject::plain(&[spec("x", dtype, &[count])], 9);
        tensor_offload::lossless::compress(dtype, plain.bytes_of("x")).unwrap()
    };
    let file = |stored: TensorSpec, entry: &str, bytes: &[u8]| {
        let header = serde_json::json!({
            "__metadata__": { &stored.name: entry },
            &stored.name: { "dtype": stored.dtype, "shape": stored.shape, "data_offsets": [0, bytes.len()] },
        });
        let header = header.to_string().into_bytes();
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, bytes].concat();
        Checkpoint::from_bytes("file", file).and_then(|opened| match opened.find("x") {
            Some(_) => try_bytes(&opened, "x"),
            None => try_bytes(&opened, &stored.name),
        })
    };
    let bf16 = code(DType::BF16, 9000);
    let bytes = |code: &[u8]| spec("x.lossless", DType::U8, &[code.len() as u64]);
    let fault = |outcome: Result<Vec<u8>>| match outcome {
        Err(Error::File { fault, .. }) => match *fault {
            FileFault::Compressed(fault) => fault,
            other => panic!("{other}"),
        },
        other => panic!("{:?}", other.map(|bytes| bytes.len())),
    };
    assert_eq!(file(bytes(&bf16), "BF16 [90, 100]", &bf16).unwrap().len(), 18_000);
    for wrong in
        ["BF16", "BF16 90", "BF17 [90]", "I32 [90]", "Q8_0 [32]", "BF16 [-1]", "BF16 [18446744073709551615, 2]", ""]
    {
        let found = fault(file(bytes(&bf16), wrong, &bf16));
        assert_eq!(found, CompressedFault::Entry { entry: wrong.to_owned() });
    }
    let other = fault(file(bytes(&bf16), "BF16 [90, 101]", &bf16));
    let (dtype, found_dtype) = (DType::BF16, DType::BF16);
    assert_eq!(other, CompressedFault::Other { count: 9090, dtype, found: 9000, found_dtype });
    let found = fault(file(bytes(&bf16), "F16 [9000]", &bf16));
    assert_eq!(found, CompressedFault::Other { count: 9000, dtype: DType::F16, found: 9000, found_dtype });
    let found = fault(file(spec("x.lossless", DType::I8, &[bf16.len() as u64]), "BF16 [9000]", &bf16));
    assert_eq!(found, CompressedFault::NotBytes { dtype: DType::I8, shape: vec![bf16.len() as u64] });
    let found = fault(file(bytes(&bf16), "BF16 [90000, 100000]", &bf16));
    assert!(matches!(found, CompressedFault::Code(CodeFault::Length { expected: 30_000_000.., .. })), "{found}");
    let short = &bf16[..bf16.len() - 16];
    assert!(matches!(fault(file(bytes(short), "BF16 [9000]", short)), CompressedFault::Code(_)));
    assert!(matches!(fault(file(bytes(&[]), "BF16 [9000]", &[])), CompressedFault::Code(_)));
    // Without an entry, and under another name, these are bytes like any other.
    assert_eq!(file(spec("x.code", DType::U8, &[bf16.len() as u64]), "BF16 [9000]", &bf16).unwrap(), bf16);
}

/// Nothing is left of a write that fails, and what was there stays.
#[test]
fn a_failed_write_leaves_the_old_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("m.safetensors");
    fs::write(&path, "old").unwrap();
    let tensors = [spec("a", DType::BF16, &[70_000]), spec("b", DType::BF16, &[7])];
    let none = BTreeMap::new();
    let write = |tensors: &[TensorSpec], metadata: &BTreeMap<String, String>, given: [usize; 2]| {
        write_compressed(&path, tensors, metadata, |tensor, out| out.put(&vec![0; given[tensor]])).unwrap_err()
    };
    assert!(matches!(write(&tensors, &none, [140_000, 13]), Error::WrongSize { needed: 14, given: 13, .. }));
    assert!(matches!(write(&tensors, &none, [140_001, 14]), Error::WrongSize { needed: 140_000, .. }));
    // More than any machine has; nothing of it is written.
    let huge = [spec("a", DType::BF16, &[1 << 50]), tensors[1].clone()];
    assert!(matches!(write(&huge, &none, [2, 14]), Error::WrongSize { given: 2, .. } | Error::Io { .. }));
    let twice = [tensors[0].clone(), tensors[0].clone()];
    assert!(write(&twice, &none, [140_000; 2]).to_string().contains("two tensors have the name `a`"));
    let taken = BTreeMap::from([("a.lossless".to_owned(), String::new())]);
    assert!(write(&tensors, &taken, [140_000, 14]).to_string().contains("`a.lossless`"));
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let report = write_compressed(&path, &tensors, &none, |tensor, out| out.put(&vec![0; [140_000, 14][tensor]]));
    let report = report.unwrap();
    assert_eq!((report.compressed, report.plain, report.from), (1, 1, 140_000));
    assert!(report.to < 2000, "{report}");
    assert_eq!(bytes(&Checkpoint::open(&path).unwrap(), "a"), vec![0; 140_000]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Parts of a file in any order, across tensors, from and to the middle of a weight.
    #[test]
    fn any_parts_are_those_of_the_plain_file(
        sizes in prop::collection::vec((0usize..5, 0u64..60_000), 1..6),
        seed in any::<u64>(),
        parts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6),
    ) {
        let types = [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::U8];
        let tensor = |(at, &(dtype, count)): (usize, &(usize, u64))| spec(format!("t{at}"), types[dtype], &[count]);
        let tensors: Vec<_> = sizes.iter().enumerate().map(tensor).collect();
        let model = Compressed::new(&tensors, seed);
        let (opened, plain) = (model.open(), model.plain.checkpoint());
        let (source, infos) = (&opened.sources()[0], opened.layout().tensors());
        let all: Vec<u8> = infos.iter().flat_map(|info| bytes(plain, &info.name)).collect();
        let begin = infos.iter().map(|info| info.offset).min().unwrap();
        check_parts(&**source, begin, &all, &parts);
    }
}
