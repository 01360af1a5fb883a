//! Where models and adapters are: on a disk, or in an object store.

use std::path::Path;

use tensor_offload::transfer::{LocalFiles, Storage};
use tensor_offload::{Adapter, Checkpoint, Result};

/// The storages that an example has opened: those of one bucket are one.
#[derive(Debug, Default)]
pub(crate) struct Places {
    #[cfg(feature = "store")]
    stores: std::cell::RefCell<std::collections::BTreeMap<String, tensor_offload::store::ObjectStorage>>,
}

impl Places {
    pub(crate) fn checkpoint(&self, path: impl AsRef<Path>) -> Result<Checkpoint> {
        self.with(path.as_ref(), |storage| Checkpoint::open_in(storage, &path))
    }

    pub(crate) fn adapter(&self, path: impl AsRef<Path>, strength: f32) -> Result<Adapter> {
        self.with(path.as_ref(), |storage| Adapter::open_in(storage, &path, strength))
    }

    fn with<T>(&self, path: &Path, open: impl Fn(&dyn Storage) -> Result<T>) -> Result<T> {
        let Some(url) = path.to_str().filter(|path| is_url(path)) else { return open(&LocalFiles) };
        self.with_store(url, open)
    }

    #[cfg(feature = "store")]
    fn with_store<T>(&self, url: &str, open: impl Fn(&dyn Storage) -> Result<T>) -> Result<T> {
        use tensor_offload::store::ObjectStorage;
        // The scheme and the bucket.
        let base = url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
        let known = self.stores.borrow().get(&base).cloned();
        let storage = known.map_or_else(|| ObjectStorage::from_url(url), Ok)?;
        self.stores.borrow_mut().insert(base, storage.clone());
        open(&storage)
    }

    #[cfg(not(feature = "store"))]
    fn with_store<T>(&self, url: &str, _open: impl Fn(&dyn Storage) -> Result<T>) -> Result<T> {
        let scheme = url.split("://").next().unwrap_or_default();
        let reason = format!("{scheme}:// is read with the feature `store`: cargo run --features store --example ...");
        Err(tensor_offload::Error::Invalid { reason })
    }

    /// What was asked of each bucket so far: its URL, requests and bytes.
    pub(crate) fn traffic(&self) -> Vec<(String, u64, u64)> {
        #[cfg(feature = "store")]
        return {
            let stores = self.stores.borrow();
            let of = |(base, storage): (&String, &tensor_offload::store::ObjectStorage)| {
                let traffic = storage.traffic();
                (base.clone(), traffic.requests, traffic.bytes)
            };
            stores.iter().map(of).collect()
        };
        #[cfg(not(feature = "store"))]
        Vec::new()
    }
}

/// Whether a text is a URL, and no path: whether it begins with a word and `://`.
pub(crate) fn is_url(text: &str) -> bool {
    text.split_once("://")
        .is_some_and(|(scheme, _)| scheme.len() > 1 && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}
