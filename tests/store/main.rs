//! Models in object stores: what is asked for, what arrives, and what is said when it does not.
#![cfg(feature = "store")]

mod faults;
mod models;
mod real;
mod server;
#[path = "../support/mod.rs"]
mod support;

use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};
use tensor_offload::Checkpoint;

/// A store in memory with these objects.
fn memory<'a>(objects: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> InMemory {
    let store = InMemory::new();
    objects.into_iter().for_each(|(key, bytes)| put(&store, key, bytes));
    store
}

fn put(store: &dyn ObjectStore, key: &str, bytes: Vec<u8>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.put(&Key::from(key), bytes.into())).unwrap();
}

/// The bytes of all tensors, by name.
fn contents(checkpoint: &Checkpoint) -> Vec<(String, Vec<u8>)> {
    let read = |id| {
        let info = checkpoint.layout().tensor(id).unwrap();
        let mut bytes = vec![0; info.bytes as usize];
        checkpoint.read(id, &mut bytes).unwrap();
        (info.name.clone(), bytes)
    };
    checkpoint.layout().tensor_ids().map(read).collect()
}
