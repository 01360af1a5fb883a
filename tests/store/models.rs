//! Models in stores are those on a disk, and only what is needed is asked for.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use object_store::memory::InMemory;
use proptest::prelude::*;
use proptest::sample::Index;
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::{Rank, ShardRules};
use tensor_offload::store::ObjectStorage;
use tensor_offload::transfer::Storage;
use tensor_offload::{Adapter, Checkpoint, DType, Error, Loader, Matching, Registry, Weights};

use crate::server::Server;
use crate::support::gguf::{Gguf, Value};
use crate::support::*;
use crate::{contents, memory, put};

/// Files of a folder on a disk, as objects below `prefix`.
fn uploaded(folder: &Path, prefix: &str) -> Vec<(String, Vec<u8>)> {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    files
        .map(|file| (format!("{prefix}/{}", file.file_name().unwrap().display()), std::fs::read(&file).unwrap()))
        .collect()
}

/// A model in three shards with an index, and its files.
pub(crate) fn sharded(seed: u64) -> BTreeMap<String, Vec<u8>> {
    let tensors = mixed(6);
    let (mut files, mut map) = (BTreeMap::new(), serde_json::Map::new());
    for (number, part) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
        let name = format!("model-{:05}-of-00003.safetensors", number + 1);
        part.iter().for_each(|tensor| drop(map.insert(tensor.name.clone(), name.clone().into())));
        files.insert(name, safetensors(part, seed));
    }
    let index = serde_json::json!({ "weight_map": map });
    files.insert("model.safetensors.index.json".to_owned(), index.to_string().into_bytes());
    files.insert(
        "config.json".to_owned(),
        br#"{"architectures":["LlamaForCausalLM"],"tie_word_embeddings":true}"#.to_vec(),
    );
    files
}

fn storage(files: &BTreeMap<String, Vec<u8>>, prefix: &str) -> ObjectStorage {
    let store = memory(
        files
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.clone()))
            .map(|(name, bytes)| (Box::leak(format!("{prefix}{name}").into_boxed_str()) as &str, bytes)),
    );
    ObjectStorage::new(Arc::new(store))
}

#[test]
fn what_opens_on_a_disk_opens_in_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let files = sharded(1);
    files.iter().for_each(|(name, bytes)| std::fs::write(folder.path().join(name), bytes).unwrap());
    let of_store = storage(&files, "models/one/");
    for path in ["", "model.safetensors.index.json", "model-00002-of-00003.safetensors"] {
        let local = Checkpoint::open(folder.path().join(path)).unwrap();
        let stored = Checkpoint::open_in(&of_store, Path::new("models/one").join(path)).unwrap();
        assert_eq!(contents(&local), contents(&stored), "{path}");
        assert_eq!(local.layout().modules(), stored.layout().modules(), "{path}");
        assert_eq!(local.layout().tensors().len(), stored.layout().tensors().len());
    }
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data");
    let objects: Vec<_> = uploaded(&examples.join("tiny-llama"), "llama")
        .into_iter()
        .chain(uploaded(&examples.join("tiny-llama-lora"), "adapters/lora"))
        .collect();
    let store = memory(objects.iter().map(|(key, bytes)| (key.as_str(), bytes.clone())));
    let storage = ObjectStorage::new(Arc::new(store));
    let stored = Checkpoint::open_in(&storage, "llama").unwrap();
    let local = Checkpoint::open(examples.join("tiny-llama")).unwrap();
    for path in ["adapters/lora", "adapters/lora/adapter_model.safetensors", "adapters/lora/"] {
        let merged = |checkpoint: &Checkpoint, adapter| {
            let weights = Weights::patched(checkpoint.clone(), vec![adapter], Matching::Strict).unwrap();
            let read = |tensor| {
                let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
                weights.read(tensor, &mut bytes).unwrap();
                bytes
            };
            weights.layout().tensor_ids().map(read).collect::<Vec<_>>()
        };
        let of_store = merged(&stored, Adapter::open_in(&storage, path, 0.5).unwrap());
        assert!(of_store == merged(&local, Adapter::open(examples.join("tiny-llama-lora"), 0.5).unwrap()), "{path}");
    }
}

#[test]
fn a_set_of_gguf_files_is_found_in_a_store() {
    let part = |number: u16| {
        Gguf::new("llama")
            .entry("split.no", Value::U16(number))
            .entry("split.count", Value::U16(2))
            .entry("split.tensors.count", Value::I32(2))
            .some(&format!("blk.{number}.ffn_up.weight"), DType::F16, &[64, 4])
            .build()
    };
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let store = memory(names.iter().zip(0..).map(|(name, number)| (*name, part(number))));
    let storage = ObjectStorage::new(Arc::new(store));
    for path in ["", names[0], names[1]] {
        let checkpoint = Checkpoint::open_in(&storage, path).unwrap();
        assert_eq!((checkpoint.sources().len(), contents(&checkpoint).len()), (2, 2), "{path}");
    }
}

#[test]
fn what_is_not_there_is_said_as_on_a_disk() {
    let files = sharded(2);
    let of = |files: &BTreeMap<String, Vec<u8>>, path: &str| {
        Checkpoint::open_in(&storage(files, "m/"), path).map(|_| ()).unwrap_err().to_string()
    };
    let nothing = Checkpoint::open_in(&storage(&files, "m/"), "other").unwrap_err();
    let Error::Io { source, .. } = &nothing else { panic!("{nothing}") };
    assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
    let mut fewer = files.clone();
    fewer.remove("model-00003-of-00003.safetensors");
    assert!(of(&fewer, "m").contains("model-00003-of-00003.safetensors"), "{}", of(&fewer, "m"));
    let mut unfinished = files.clone();
    unfinished.insert("model-00001-of-00003.safetensors.aria2".to_owned(), Vec::new());
    assert!(of(&unfinished, "m").contains("aria2"), "{}", of(&unfinished, "m"));
    let mut no_index = files.clone();
    no_index.remove("model.safetensors.index.json");
    assert!(of(&no_index, "m").contains("no index"), "{}", of(&no_index, "m"));
    // One level up there is only the folder.
    assert!(of(&files, "").contains("weights in sub-folders only; open one of what is in it: m"), "{}", of(&files, ""));
    let empty = BTreeMap::from([("model.safetensors".to_owned(), Vec::new())]);
    assert!(of(&empty, "m").contains("is empty"), "{}", of(&empty, "m"));
    for path in ["s3://other/m", "../m", "s3://id:secret@bucket/m"] {
        assert!(matches!(Checkpoint::open_in(&storage(&files, "m/"), path), Err(Error::Invalid { .. })), "{path}");
    }
}

/// A model larger than what is read of it when it is opened.
fn large(seed: u64) -> Vec<u8> {
    safetensors(&blocks(&[3 << 20, 5 << 20, 9 << 20, 64, 2 << 20]), seed)
}

#[test]
fn a_load_asks_for_every_byte_once_however_many_devices_take_some() {
    let file = large(3);
    let server = Server::start();
    server.put("model.safetensors", &file);
    let storage = server.storage();
    let checkpoint = Checkpoint::open_in(&storage, "model.safetensors").unwrap();
    let of_memory = Checkpoint::from_bytes("model", file.clone()).unwrap();
    let weights = Weights::new(checkpoint);
    for allocation in ["cpu,*", "cuda:0,4mb;cuda:1,4mb;disk,2mb;cpu,*"] {
        let machine =
            described(&["cpu=64mb,link=20", "disk=64mb,link=4", "cuda:0=64mb,link=10", "cuda:1=24mb,link=10"]);
        let registry = Registry::described(machine.clone(), Clock::Virtual);
        let subject = Subject::new(Weights::new(of_memory.clone()));
        let plan = subject.planner(&machine, allocation).plan().unwrap();
        server.forget();
        let before = storage.traffic();
        let model = Loader::new(&registry).load(&weights, &plan).unwrap();
        subject.check(&model);
        drop(model);
        // What came when the file was opened is not asked for again.
        let mut asked: Vec<_> = server.asked().into_iter().map(|asked| asked.range.unwrap()).collect();
        asked.sort_by_key(|range| range.start);
        assert!(asked.windows(2).all(|pair| pair[0].end <= pair[1].start), "{allocation}: {asked:?}");
        let bytes: usize = asked.iter().map(|range| range.len()).sum();
        assert_eq!(bytes, file.len() - (256 << 10), "{allocation}");
        let after = storage.traffic();
        assert_eq!((after.requests - before.requests, after.bytes - before.bytes), (asked.len() as u64, bytes as u64));
    }
}

/// Of what is divided by rows a rank asks for its own; of columns, with what is between them, in few requests.
#[test]
fn a_rank_asks_for_its_part() {
    let specs = [
        spec("layers.0.up.weight", DType::BF16, &[2048, 1024]),
        spec("layers.0.down.weight", DType::BF16, &[1024, 2048]),
    ];
    let file = safetensors(&specs, 3);
    let server = Server::start();
    server.put("model.safetensors", &file);
    let whole = Checkpoint::from_bytes("model", file).unwrap();
    let rules: ShardRules = "up: rows; down: columns".parse().unwrap();
    let half = 4u64 << 20;
    for rank in 0..4 {
        let rank = Rank { rank, of: 4 };
        let storage = server.storage();
        let part = Checkpoint::open_in(&storage, "model.safetensors").unwrap().shard(&rules, rank).unwrap();
        let opened = storage.traffic();
        assert!(contents(&part) == contents(&whole.shard(&rules, rank).unwrap()), "{rank}");
        let (requests, bytes) = (storage.traffic().requests - opened.requests, storage.traffic().bytes - opened.bytes);
        assert!(bytes <= half / 4 + half && requests <= 4, "{rank}: {requests} requests for {bytes} bytes");
    }
}

/// The same object, opened again, has the same stamp: what is derived from it reads only what an adapter changes.
#[test]
fn a_derived_model_reads_only_what_changes() {
    let tensors = llama(4, 256);
    let store = InMemory::new();
    put(&store, "model.safetensors", safetensors(&tensors, 4));
    let storage = ObjectStorage::new(Arc::new(store));
    let open = || Checkpoint::open_in(&storage, "model.safetensors").unwrap();
    let machine = machine();
    let registry = Registry::described(machine.clone(), Clock::Virtual);
    let weights = Weights::new(open());
    let plan = tensor_offload::Planner::new(weights.layout(), &machine).compute(CPU).plan().unwrap();
    let base = Arc::new(Loader::new(&registry).load(&weights, &plan).unwrap());
    let again = Weights::new(open());
    let before = storage.traffic();
    let derived = Loader::new(&registry).derive(Some(&base), &again, &plan).unwrap();
    assert_eq!(storage.traffic(), before);
    assert_eq!(derived.report().read, 0);
    let adapter = || Adapter::from_checkpoint(lora(&tensors, DType::F32, 4, 5), 1.0).unwrap();
    let patched = Weights::patched(open(), vec![adapter()], Matching::Strict).unwrap();
    let plan = tensor_offload::Planner::new(patched.layout(), &machine).compute(CPU).plan().unwrap();
    let derived = Loader::new(&registry).derive(Some(&base), &patched, &plan).unwrap();
    let changed: u64 = derived.report().read;
    assert!(changed > 0 && changed < patched.layout().bytes(), "{changed} of {}", patched.layout().bytes());
    let local = Checkpoint::from_bytes("model", safetensors(&tensors, 4)).unwrap();
    Subject::new(Weights::patched(local, vec![adapter()], Matching::Strict).unwrap()).check(&derived);
    // Another object at the same place is another model.
    let replaced = memory([("model.safetensors", safetensors(&tensors, 6))]);
    let other = Checkpoint::open_in(&ObjectStorage::new(Arc::new(replaced)), "model.safetensors").unwrap();
    assert_ne!(other.sources()[0].stamp(), open().sources()[0].stamp());
}

#[test]
fn shards_are_opened_at_the_same_time() {
    let server = Server::start();
    let files = sharded(7);
    files.iter().for_each(|(name, bytes)| server.put(&format!("m/{name}"), bytes));
    let storage = server.storage();
    server.gate(3);
    Checkpoint::open_in(&storage, "m").unwrap();
    let asked = server.asked();
    let times = |what: &str, method: &str| {
        asked.iter().filter(|asked| asked.key.ends_with(what) && asked.method == method).count()
    };
    // No object is asked for twice: whether the path is a folder, what is in it, and its files.
    assert_eq!((times("m/", "LIST"), asked.len()), (2, 7), "{asked:?}");
    assert_eq!((times(".json", "GET"), times(".safetensors", "GET")), (2, 3), "{asked:?}");
}

#[test]
fn ranges_are_asked_for_at_the_same_time() {
    let file = safetensors(&blocks(&[40 << 20]), 8);
    let server = Server::start();
    server.put("model.safetensors", &file);
    let storage = server.storage().in_flight(8);
    let checkpoint = Checkpoint::open_in(&storage, "model.safetensors").unwrap();
    server.gate(8);
    let mut bytes = vec![0; 40 << 20];
    checkpoint.read(checkpoint.layout().tensor_ids().next().unwrap(), &mut bytes).unwrap();
    assert!(bytes[..] == file[file.len() - bytes.len()..]);
    // Of a load, each of its threads has some ranges under way.
    let registry = Registry::described(described(&["cpu=256mb,link=20"]), Clock::Virtual);
    let weights = Weights::new(checkpoint);
    let plan = tensor_offload::Planner::new(weights.layout(), registry.machine()).compute(CPU).plan().unwrap();
    Loader::new(&registry).load(&weights, &plan).unwrap();
}

#[test]
fn a_caller_may_have_a_runtime_of_its_own() {
    let store = Arc::new(memory([("model.safetensors", large(9))]));
    let open = || {
        let checkpoint = Checkpoint::open_in(&ObjectStorage::new(store.clone()), "model.safetensors").unwrap();
        contents(&checkpoint)
    };
    let expected = open();
    let alone = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert!(alone.block_on(async { open() }) == expected);
    let several = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    assert!(
        several.block_on(async {
            tokio::spawn(async move {
                contents(&Checkpoint::open_in(&ObjectStorage::new(store), "model.safetensors").unwrap())
            })
            .await
            .unwrap()
        }) == expected
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_parts_of_an_object_are_its_bytes(
        len in 1usize..900_000,
        parts in proptest::collection::vec(any::<(Index, Index)>(), 1..8),
    ) {
        let bytes: Vec<u8> = (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let storage = ObjectStorage::new(Arc::new(memory([("object", bytes.clone())])));
        check_parts(&*storage.open(Path::new("object")).unwrap(), 0, &bytes, &parts);
    }
}
