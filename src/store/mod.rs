//! Weights in object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure, and plain HTTP servers, through the crate
//! [`object_store`].
//!
//! An [`ObjectStorage`] is a [`Storage`], so checkpoints and adapters open in it as they do on a disk:
//!
//! ```
//! use std::sync::Arc;
//! use object_store::{ObjectStoreExt, memory::InMemory, path::Path};
//! use tensor_offload::{Checkpoint, store::ObjectStorage};
//! # let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama-lora/adapter_model.safetensors"))?;
//! # let put = |store: &InMemory| {
//! #     let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
//! #     runtime.block_on(store.put(&Path::from("models/lora.safetensors"), file.into())).unwrap();
//! # };
//! let bucket = InMemory::new(); // or one of another builder of that crate, with its feature `aws`, `gcp` or `azure`
//! # put(&bucket);
//! let storage = ObjectStorage::new(Arc::new(bucket));
//! let checkpoint = Checkpoint::open_in(&storage, "models/lora.safetensors")?;
//! println!("{} tensors", checkpoint.layout().tensors().len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`ObjectStorage::from_url`] takes addresses such as `s3://models/llama`, and credentials from the environment by the rules of
//! [`object_store`]. Reads go straight into their destination, in ranges of 4 to 8 MiB, 32 at a time, and only what a load needs is
//! read. Every answer is checked to be of the object that was opened. A store that is told to stop sends nothing more: cancelling a load
//! ends its reads at once. All of this can be called from within a runtime of the caller's; like all reads, it blocks the thread.

mod client;
mod fault;
mod ranges;
mod runtime;
mod source;
mod url;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use object_store::path::Path as Key;
use object_store::{ListResult, ObjectStore, ObjectStoreExt};
use tokio::sync::Semaphore;

use crate::error::{Error, Result};
use crate::transfer::{Entry, PathKind, Source, Storage};
use client::Trouble;
use source::{ObjectSource, Shared};
pub use url::is_url;

/// The requests that are under way at a time, unless [`ObjectStorage::in_flight`] says another number. Run:ai's streamer loads 15 GB
/// from S3 in 28.2 s with 4, and in 4.9 s with 32 (its published benchmark).
const IN_FLIGHT: usize = 32;

/// The endings of files that are looked for, among the many names that models have.
const FILES: [&str; 4] = [".safetensors", ".gguf", ".json", ".aria2"];

/// How long a store may send nothing, unless [`ObjectStorage::deadline`] says otherwise.
const DEADLINE: Duration = Duration::from_secs(60);

/// An object store as a place of models. Clones are the same storage.
#[derive(Clone)]
pub struct ObjectStorage {
    shared: Arc<Shared>,
    /// What paths may begin with, and objects are called by: `s3://bucket/`.
    base: String,
    /// Whether paths are those of URLs, with `%20` for a space.
    encoded: bool,
}

/// What was asked of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Requests, without those that the client made again.
    pub requests: u64,
    /// Bytes of objects that arrived.
    pub bytes: u64,
}

impl ObjectStorage {
    /// A storage of a store that the caller has set up. Paths are keys in it.
    pub fn new(store: Arc<dyn ObjectStore>) -> ObjectStorage {
        ObjectStorage::called(store, String::new(), false, None)
    }

    /// The storage that has a URL: `s3://BUCKET/...` (or `s3a`), `gs://BUCKET/...`, `az://CONTAINER/...` (or `abfs`, `abfss`),
    /// `http://HOST/...` and `https://HOST/...`. Paths in it are such URLs, or keys.
    ///
    /// Credentials and settings are those that [`object_store`] takes from the environment: for S3 `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP=true` for an endpoint without TLS,
    /// `AWS_SKIP_SIGNATURE=true` for a public bucket; `GOOGLE_...` and `AZURE_...` likewise. To plain HTTP servers, requests have no
    /// credentials; such a server tells nothing of folders, so a model there is opened by its file or its index.
    ///
    /// ```
    /// use tensor_offload::store::ObjectStorage;
    /// let storage = ObjectStorage::from_url("s3://models/llama")?;
    /// // Checkpoint::open_in(&storage, "s3://models/llama")
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is no such URL, has credentials or a query in it, or the environment's settings cannot be used.
    pub fn from_url(url: &str) -> Result<ObjectStorage> {
        let url::Store { store, base, encoded, trouble } = url::store(url)?;
        Ok(ObjectStorage::called(store, base, encoded, Some(trouble)))
    }

    fn called(
        store: Arc<dyn ObjectStore>,
        base: String,
        encoded: bool,
        trouble: Option<Arc<Trouble>>,
    ) -> ObjectStorage {
        let shared = Shared {
            store,
            permits: Arc::new(Semaphore::new(IN_FLIGHT)),
            in_flight: IN_FLIGHT,
            deadline: DEADLINE,
            trouble,
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        ObjectStorage { shared: Arc::new(shared), base, encoded }
    }

    /// Sets how many requests are under way at a time, at least one. Default: 32. What has arrived and is not in its place yet takes at
    /// most 8 MiB of host memory for each.
    #[must_use]
    pub fn in_flight(self, requests: usize) -> ObjectStorage {
        let in_flight = requests.clamp(1, Semaphore::MAX_PERMITS);
        self.with(in_flight, self.shared.deadline)
    }

    /// Sets how long the store may send nothing, while it is asked again after errors, before a read fails. Default: one minute.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> ObjectStorage {
        self.with(self.shared.in_flight, deadline)
    }

    fn with(&self, in_flight: usize, deadline: Duration) -> ObjectStorage {
        let permits = Arc::new(Semaphore::new(in_flight));
        let (store, trouble) = (Arc::clone(&self.shared.store), self.shared.trouble.clone());
        let (requests, bytes) = Default::default();
        let shared = Shared { store, permits, in_flight, deadline, trouble, requests, bytes };
        ObjectStorage { shared: Arc::new(shared), base: self.base.clone(), encoded: self.encoded }
    }

    /// What was asked of the store so far, by this storage and its clones.
    pub fn traffic(&self) -> Traffic {
        let Shared { requests, bytes, .. } = &*self.shared;
        Traffic { requests: requests.load(Ordering::Relaxed), bytes: bytes.load(Ordering::Relaxed) }
    }

    /// The key of a path, and what it is called.
    fn key(&self, path: &Path) -> Result<(Key, PathBuf)> {
        let text = path.to_str().ok_or_else(|| refused(path, "it is no UTF-8 text"))?;
        if let Some(why) = url::secret_in(text).filter(|_| is_url(text)) {
            return Err(Error::invalid(why));
        }
        // Windows joins paths by backslashes, which no key of a model has.
        let text = if cfg!(windows) { text.replace('\\', "/") } else { text.to_owned() };
        // The bucket itself may be called without the slash.
        let is_bucket = !self.base.is_empty() && text == self.base.trim_end_matches('/');
        let rest = if is_bucket { "" } else { text.strip_prefix(&self.base).unwrap_or(&text) };
        if is_url(rest) {
            return Err(refused(path, &format!("it is not in {}", self.base)));
        }
        // As a file system takes them: `./model` is `model`.
        let rest: Vec<&str> = rest.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        let rest = rest.join("/");
        let key = if self.encoded { Key::from_url_path(&rest) } else { Key::parse(&rest) };
        let key = key.map_err(|error| refused(path, &error.to_string()))?;
        Ok((key, PathBuf::from(format!("{}{rest}", self.base))))
    }

    /// What is in a folder, without what is in its folders.
    fn listed(&self, folder: &Path) -> Result<(Key, ListResult)> {
        let (key, path) = self.key(folder)?;
        if self.encoded {
            let why = "a plain HTTP server tells nothing of folders; open a file, or an index";
            return Err(Error::io("list", path)(std::io::Error::new(std::io::ErrorKind::Unsupported, why)));
        }
        let prefix = key.clone();
        let list = move |store: Arc<dyn ObjectStore>| async move {
            store.list_with_delimiter(Some(&prefix).filter(|prefix| !prefix.as_ref().is_empty())).await
        };
        Ok((key, self.shared.wait("list", &path, list)?))
    }
}

fn refused(path: &Path, why: &str) -> Error {
    Error::invalid(format!("{} cannot be the path of an object: {why}", path.display()))
}

impl Storage for ObjectStorage {
    fn kind(&self, path: &Path) -> Result<Option<PathKind>> {
        let (key, name) = self.key(path)?;
        let is_file = || {
            if key.as_ref().is_empty() {
                return Ok(None);
            }
            let key = key.clone();
            match self.shared.wait("open", &name, |store| async move { store.head(&key).await }) {
                Ok(_) => Ok(Some(PathKind::File)),
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        };
        let is_folder = || {
            let (_, ListResult { objects, common_prefixes, .. }) = self.listed(path)?;
            Ok((!objects.is_empty() || !common_prefixes.is_empty()).then_some(PathKind::Folder))
        };
        if self.encoded {
            return is_file();
        }
        // Most paths are what their names say, and then one question is enough.
        if FILES.iter().any(|end| name.as_os_str().as_encoded_bytes().ends_with(end.as_bytes())) {
            let file = is_file()?;
            return Ok(file.or_else(|| is_folder().unwrap_or(None)));
        }
        match is_folder() {
            Ok(None) => is_file(),
            Ok(folder) => Ok(folder),
            // Credentials may be good for objects alone.
            Err(error) => is_file()?.map_or(Err(error), |file| Ok(Some(file))),
        }
    }

    fn list(&self, folder: &Path) -> Result<Vec<Entry>> {
        let (key, ListResult { objects, common_prefixes, .. }) = self.listed(folder)?;
        let named = |of: &Key, kind| {
            // What marks an empty folder is called like the folder.
            let name = of.prefix_match(&key)?.next()?.as_ref().to_owned();
            Some(Entry { name: PathBuf::from(name), kind })
        };
        let files = objects.iter().filter_map(|object| named(&object.location, PathKind::File));
        let folders = common_prefixes.iter().filter_map(|prefix| named(prefix, PathKind::Folder));
        Ok(files.chain(folders).collect())
    }

    fn open(&self, path: &Path) -> Result<Arc<dyn Source>> {
        let (key, name) = self.key(path)?;
        let place = format!("{} {}", self.base, self.shared.store);
        Ok(Arc::new(ObjectSource::open(&self.shared, name, key, &place)?))
    }

    fn concurrency(&self) -> usize {
        // At least two, which say that the store is far away.
        self.shared.in_flight.max(2)
    }
}

impl fmt::Debug for ObjectStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("ObjectStorage");
        debug.field("base", &self.base).field("in_flight", &self.shared.in_flight).finish_non_exhaustive()
    }
}
