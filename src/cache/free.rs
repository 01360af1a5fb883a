//! Freeing memory: any thread requests it, and the worker serves requests between two jobs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::{CleanupReport, ModelCache, Retention, Unfinished};
use crate::backend::trim_allocator;
use crate::error::{Error, ErrorKind, Result};
use crate::load::Model;
use crate::registry::Registry;

/// A request to free memory before the next job. In JSON, an object with the two fields; a missing field is false.
///
/// | requested | effect |
/// |---|---|
/// | neither | nothing |
/// | `unload_models` | the flagged models are unloaded |
/// | `free_memory` | the same; then the reset hooks run, and the allocator caches of all open devices are emptied |
/// | both | as `free_memory` |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FreeRequest {
    /// Unload the flagged models.
    pub unload_models: bool,
    /// Unload the flagged models, run the reset hooks, and empty the allocator caches.
    pub free_memory: bool,
}

impl FreeRequest {
    /// A request for both.
    pub const ALL: FreeRequest = FreeRequest { unload_models: true, free_memory: true };

    /// Whether nothing is requested.
    pub fn is_empty(self) -> bool {
        self == FreeRequest::default()
    }

    fn bits(self) -> u8 {
        u8::from(self.unload_models) | u8::from(self.free_memory) << 1
    }

    fn of(bits: u8) -> FreeRequest {
        FreeRequest { unload_models: bits & 1 > 0, free_memory: bits & 2 > 0 }
    }
}

/// The pending request, as bits.
#[derive(Debug, Default)]
pub(super) struct Requests(AtomicU8);

/// The callbacks that a clean-up runs between unloading models and emptying allocator caches.
#[derive(Default)]
pub(super) struct Hooks(Mutex<Vec<Hook>>);

type Hook = Arc<dyn Fn() + Send + Sync>;

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hooks").field(&self.all().len()).finish()
    }
}

impl Hooks {
    fn all(&self) -> Vec<Hook> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A model that stays, and the hash of its bytes if known.
type Kept = (String, Arc<Model>, Option<u64>);

impl ModelCache {
    /// Requests that memory be freed before the next job. Returns immediately, on any thread; several requests before that
    /// job become one.
    pub fn request_free(&self, request: FreeRequest) {
        self.requests.0.fetch_or(request.bits(), Ordering::AcqRel);
    }

    /// The request that is pending.
    pub fn requested(&self) -> FreeRequest {
        FreeRequest::of(self.requests.0.load(Ordering::Acquire))
    }

    /// Registers a hook that frees other memory, such as a caller's caches. A clean-up with `free_memory` runs it between
    /// unloading models and emptying allocator caches. Hooks run in the order of registration, on the thread that serves the
    /// request, without any lock of the cache held.
    pub fn on_reset(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.hooks.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(hook));
    }

    /// Serves the pending request, once. Call it between two jobs, while nothing runs. Without a pending request it returns
    /// `None`, and queries no device.
    ///
    /// # Errors
    /// As [`full_cleanup`](ModelCache::full_cleanup). The request counts as served.
    pub fn service_requests(&self, registry: &Registry) -> Result<Option<CleanupReport>, Unfinished<CleanupReport>> {
        let request = FreeRequest::of(self.requests.0.swap(0, Ordering::AcqRel));
        if request.is_empty() { Ok(None) } else { self.clean_up(registry, request).map(Some) }
    }

    /// Cleans up between two jobs, as a request for both does: unloads the flagged models, runs the reset hooks, empties the
    /// allocator caches of all open devices, and returns host memory to the system.
    ///
    /// At the end it reads the beginning of every module of the kept models. Debug builds read all bytes, which must be
    /// those of the last clean-up.
    ///
    /// # Errors
    /// [`Error::ModelsLost`] naming the kept models that can no longer be read; otherwise the error of the first device that
    /// fails to empty its allocator cache. The rest of the clean-up is done all the same, and the error includes the
    /// report.
    pub fn full_cleanup(&self, registry: &Registry) -> Result<CleanupReport, Unfinished<CleanupReport>> {
        self.clean_up(registry, FreeRequest::ALL)
    }

    fn clean_up(&self, registry: &Registry, request: FreeRequest) -> Result<CleanupReport, Unfinished<CleanupReport>> {
        if cfg!(debug_assertions) {
            self.remember_contents();
        }
        let mut snapshots = vec![registry.snapshot("before clean-up")];
        let unload = self.unload_all();
        snapshots.push(registry.snapshot("after unload"));
        let (mut resets, mut trimmed, mut refused) = (0, BTreeMap::new(), None);
        if request.free_memory {
            let hooks = self.hooks.all();
            hooks.iter().for_each(|hook| hook());
            resets = hooks.len();
            snapshots.push(registry.snapshot("after reset"));
            for device in registry.opened() {
                match device.trim() {
                    Ok(bytes) => drop(trimmed.insert(device.id(), bytes)),
                    Err(error) => drop(refused.get_or_insert(error)),
                }
            }
            trim_allocator();
            snapshots.push(registry.snapshot("after emptying"));
        }
        let report = CleanupReport { request, unload, resets, trimmed, snapshots };
        match verify(&self.kept()).err().or(refused) {
            None => Ok(report),
            Some(error) => Err(Unfinished { report: Box::new(report), error }),
        }
    }

    /// Hashes each kept model that has no hash yet and can be read.
    fn remember_contents(&self) {
        for (key, model, content) in self.kept() {
            let Some(now) = content.is_none().then(|| model.fingerprint().ok()).flatten() else { continue };
            if let Some(entry) = self.entries().models.get_mut(&key).filter(|entry| Arc::ptr_eq(&entry.model, &model)) {
                entry.content = Some(now);
            }
        }
    }

    fn kept(&self) -> Vec<Kept> {
        let entries = self.entries();
        let kept = entries.models.iter().filter(|(_, entry)| entry.retention == Retention::Keep);
        kept.map(|(key, entry)| (key.clone(), Arc::clone(&entry.model), entry.content)).collect()
    }
}

/// Checks that all of these models can be read, and that their bytes are unchanged.
fn verify(kept: &[Kept]) -> Result<()> {
    let (mut keys, mut first, mut untold) = (Vec::new(), None, Ok(()));
    for (key, model, content) in kept {
        let Err(error) = alive(model, *content) else { continue };
        // Without room for a staging buffer, or after a timeout, nothing is known about the model.
        if matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::TimedOut) {
            untold = Err(error);
            continue;
        }
        keys.push(key.clone());
        first.get_or_insert(error);
    }
    match first {
        Some(cause) => Err(Error::ModelsLost { keys, cause: Arc::new(cause) }),
        None => untold,
    }
}

fn alive(model: &Model, content: Option<u64>) -> Result<()> {
    if let Some(lost) = model.lost() {
        return Err(lost);
    }
    match content {
        None => model.touch(),
        Some(content) if model.fingerprint()? == content => Ok(()),
        Some(_) => Err(Error::Corrupted { what: "its bytes are not those that were loaded".to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_become_one_and_are_told_apart() {
        let cache = ModelCache::new();
        assert!(cache.requested().is_empty());
        cache.request_free(FreeRequest::default());
        assert!(cache.requested().is_empty(), "neither is nothing");
        cache.request_free(FreeRequest { unload_models: true, free_memory: false });
        cache.request_free(FreeRequest { unload_models: true, free_memory: false });
        assert_eq!(cache.requested(), FreeRequest { unload_models: true, free_memory: false });
        cache.request_free(FreeRequest { unload_models: false, free_memory: true });
        assert_eq!(cache.requested(), FreeRequest::ALL);
    }

    #[test]
    fn json_is_an_object_of_two_booleans() {
        let parse = |text: &str| serde_json::from_str::<FreeRequest>(text).ok();
        assert_eq!(parse(r#"{"unload_models":true,"free_memory":true}"#), Some(FreeRequest::ALL));
        assert_eq!(parse("{}"), Some(FreeRequest::default()));
        for wrong in ["", "true", r#"{"free_memory":1}"#, r#"{"unload_model":true}"#, r#"{"free_memory":null}"#] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
