//! The free flow: anyone asks, the worker serves between two jobs.

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

/// What is to be freed before the next job. As JSON an object of the two; what is left out is false.
///
/// | asked for | what happens |
/// |---|---|
/// | neither | nothing |
/// | `unload_models` | the flagged models go |
/// | `free_memory` | the same; then the reset hooks run, and the allocator caches of all open devices are emptied |
/// | both | as `free_memory` |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FreeRequest {
    /// Let the flagged models go.
    pub unload_models: bool,
    /// Let the flagged models go, reset what else holds memory, and empty the allocator caches.
    pub free_memory: bool,
}

impl FreeRequest {
    /// Both.
    pub const ALL: FreeRequest = FreeRequest { unload_models: true, free_memory: true };

    /// Whether nothing is asked for.
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

/// What was asked for and not served yet, as the bits of a request.
#[derive(Debug, Default)]
pub(super) struct Requests(AtomicU8);

/// What a clean-up calls between unloading and emptying.
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

/// A model that stays, and the hash of its bytes where one is known.
type Kept = (String, Arc<Model>, Option<u64>);

impl ModelCache {
    /// Asks for memory to be freed before the next job. Returns at once, on any thread; several requests before that
    /// job become one.
    pub fn request_free(&self, request: FreeRequest) {
        self.requests.0.fetch_or(request.bits(), Ordering::AcqRel);
    }

    /// What was asked for and not served yet.
    pub fn requested(&self) -> FreeRequest {
        FreeRequest::of(self.requests.0.load(Ordering::Acquire))
    }

    /// Registers what else has to let go of memory when a clean-up with `free_memory` runs, between unloading and
    /// emptying: a caller's own caches, for example. Hooks run in the order in which they came, on the thread that
    /// serves, with nothing of the cache locked.
    pub fn on_reset(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.hooks.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(hook));
    }

    /// Serves what was asked for since the last time, once. Call it where nothing runs: between two jobs. Nothing is
    /// done and no device asked anything when nothing was asked for.
    ///
    /// # Errors
    /// As [`full_cleanup`](ModelCache::full_cleanup). The request counts as served.
    pub fn service_requests(&self, registry: &Registry) -> Result<Option<CleanupReport>, Unfinished<CleanupReport>> {
        let request = FreeRequest::of(self.requests.0.swap(0, Ordering::AcqRel));
        if request.is_empty() { Ok(None) } else { self.clean_up(registry, request).map(Some) }
    }

    /// The clean-up between two jobs, as a request for both would have it: lets go of the flagged models, runs the
    /// reset hooks, empties the allocator caches of all open devices, and gives host memory back to the system.
    ///
    /// At the end some of every module of the kept models is read; in debug builds all bytes, which have to be those
    /// of the last time.
    ///
    /// # Errors
    /// [`Error::ModelsLost`] naming the kept models that can no longer be read; else the first device that refuses to
    /// give its allocator cache back. Whatever fails, the rest is done all the same, and the report comes with the
    /// error.
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

    /// Takes a hash of each kept model that has none yet, where its bytes can be read.
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

/// Whether all of these can be read, and hold what they held.
fn verify(kept: &[Kept]) -> Result<()> {
    let (mut keys, mut first, mut untold) = (Vec::new(), None, Ok(()));
    for (key, model, content) in kept {
        let Err(error) = alive(model, *content) else { continue };
        // Without room for a staging buffer, or time, nothing is known of the model.
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
        Some(_) => Err(Error::Corrupted { what: "its bytes are not those that were loaded" }),
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
