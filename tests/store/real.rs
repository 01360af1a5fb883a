//! Over a server of S3's protocol that is not ours. `scripts/store-check` starts one, and says in the environment where it is.

use std::io::ErrorKind as IoKind;
use std::sync::Arc;

use object_store::aws::AmazonS3Builder;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};
use tensor_offload::backend::Clock;
use tensor_offload::error::FileFault;
use tensor_offload::store::ObjectStorage;
use tensor_offload::{Adapter, Checkpoint, Error, Loader, Matching, Planner, Registry, Weights};

use crate::contents;
use crate::models::sharded;
use crate::server::with_tls;
use crate::support::*;

const BUCKET: &str = "models";

/// The bucket, to write to.
fn bucket() -> Arc<dyn ObjectStore> {
    with_tls();
    Arc::new(
        AmazonS3Builder::from_env().with_bucket_name(BUCKET).build().expect("scripts/store-check sets what is needed"),
    )
}

fn now<T>(work: impl Future<Output = object_store::Result<T>>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(work).unwrap()
}

/// Writes an object, and returns its URL.
fn put(key: &str, bytes: &[u8]) -> String {
    now(bucket().put(&Key::from(key), bytes.to_owned().into()));
    format!("s3://{BUCKET}/{key}")
}

fn open(url: &str) -> tensor_offload::Result<Checkpoint> {
    Checkpoint::open_in(&ObjectStorage::from_url(url)?, url)
}

#[test]
#[ignore = "scripts/store-check starts the server"]
fn real_models_are_their_files() {
    let files = sharded(21);
    files.iter().for_each(|(name, bytes)| drop(put(&format!("real/model/{name}"), bytes)));
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, bytes)| std::fs::write(folder.path().join(name), bytes).unwrap());
    let (local, url) = (Checkpoint::open(folder.path()).unwrap(), format!("s3://{BUCKET}/real/model"));
    let stored = open(&url).unwrap();
    assert_eq!(contents(&local), contents(&stored));
    assert_eq!(stored.sources()[0].path().to_str(), Some(&*format!("{url}/model-00001-of-00003.safetensors")));
    assert_eq!(contents(&open(&format!("{url}/model.safetensors.index.json")).unwrap()), contents(&stored));
    // At the top of the bucket, whose folder is `s3://models`.
    let top = put("top.safetensors", &files["model-00001-of-00003.safetensors"]);
    assert_eq!(contents(&open(&top).unwrap()).len(), stored.layout().tensors().iter().filter(|t| t.file == 0).count());

    let large = safetensors(&blocks(&[40 << 20, 7, 3 << 20]), 22);
    let (stored, local) =
        (open(&put("real/large.safetensors", &large)).unwrap(), Checkpoint::from_bytes("large", large).unwrap());
    assert!(contents(&stored) == contents(&local));
}

#[test]
#[ignore = "scripts/store-check starts the server"]
fn real_adapters_are_merged() {
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/");
    let files = ["adapter_config.json", "adapter_model.safetensors"];
    let folder = std::path::Path::new(examples).join("tiny-llama-lora");
    for file in files {
        put(&format!("real/lora/{file}"), &std::fs::read(folder.join(file)).unwrap());
    }
    let model = std::fs::read(std::path::Path::new(examples).join("tiny-llama/model.safetensors")).unwrap();
    let url = put("real/tiny/model.safetensors", &model);
    let adapter = format!("s3://{BUCKET}/real/lora");
    let storage = ObjectStorage::from_url(&adapter).unwrap();
    let of_store = vec![Adapter::open_in(&storage, &adapter, 0.7).unwrap()];
    let weights = Weights::patched(open(&url).unwrap(), of_store, Matching::Strict).unwrap();
    let of_disk = vec![Adapter::open(&folder, 0.7).unwrap()];
    let local = Weights::patched(Checkpoint::from_bytes("m", model).unwrap(), of_disk, Matching::Strict).unwrap();
    let registry = Registry::described(described(&["cpu=64mb,link=20", "cuda:0=24mb,link=10"]), Clock::Virtual);
    let planner = Planner::new(weights.layout(), registry.machine());
    let plan = planner.allocation("cuda:0,25%;cpu,*".parse().unwrap()).plan().unwrap();
    let loaded = Loader::new(&registry).load(&weights, &plan).unwrap();
    Subject::new(local).check(&loaded);
}

#[test]
#[ignore = "scripts/store-check starts the server"]
fn real_objects_that_are_replaced_or_deleted_are_noticed() {
    let read = |checkpoint: &Checkpoint| {
        let tensor = checkpoint.layout().tensor_ids().next().unwrap();
        checkpoint.read(tensor, &mut vec![0; checkpoint.layout().tensor(tensor).unwrap().bytes as usize])
    };
    for (number, size) in [(0, 2 << 20), (1, 1 << 20), (2, 4 << 20)] {
        let key = format!("real/replaced-{number}.safetensors");
        let checkpoint = open(&put(&key, &safetensors(&blocks(&[2 << 20]), 31))).unwrap();
        let stamp = checkpoint.sources()[0].stamp();
        read(&checkpoint).unwrap();
        let url = put(&key, &safetensors(&blocks(&[size]), 32));
        match read(&checkpoint).unwrap_err() {
            Error::File { fault, tensor: Some(_), .. } if *fault == FileFault::Changed => {}
            other => panic!("{size}: {other}"),
        }
        let again = open(&url).unwrap();
        assert_ne!(again.sources()[0].stamp(), stamp);
        assert_eq!(again.sources()[0].stamp(), open(&url).unwrap().sources()[0].stamp());
        now(bucket().delete(&Key::from(key.as_str())));
        match read(&again).unwrap_err() {
            Error::Io { source, .. } if source.kind() == IoKind::NotFound => {}
            other => panic!("{other}"),
        }
        assert!(matches!(open(&url), Err(Error::Io { .. })));
    }
}

#[test]
#[ignore = "scripts/store-check starts the server"]
fn real_credentials_that_are_wrong_are_refused_and_not_repeated() {
    if std::env::var_os("STORE_CHECK_ANYONE").is_some() {
        eprintln!("this server lets anyone in");
        return;
    }
    let url = put("real/secret.safetensors", &safetensors(&blocks(&[1000]), 41));
    let key = url.trim_start_matches(&format!("s3://{BUCKET}/")).to_owned();
    let wrong =
        AmazonS3Builder::from_env().with_bucket_name(BUCKET).with_secret_access_key("not-this-key").build().unwrap();
    let error = Checkpoint::open_in(&ObjectStorage::new(Arc::new(wrong)), &key).unwrap_err();
    let Error::Io { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.kind(), IoKind::PermissionDenied, "{error}");
    let said = format!("{error} {error:?}");
    let secret = std::env::var("AWS_SECRET_ACCESS_KEY").unwrap();
    assert!(!said.contains("not-this-key") && !said.contains(&secret) && !said.contains("Signature="), "{said}");
    assert!(said.contains(&key), "{said}");
}
