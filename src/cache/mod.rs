//! Models that stay in memory between uses until they are unloaded.

mod free;
mod identity;
mod pressure;
mod report;
mod room;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use free::FreeRequest;
pub use identity::Identity;
pub use pressure::{Pressure, PressureReadings, PressureReport, PressureState};
pub use report::{CleanupReport, EntryInfo, Unfinished, UnloadReport, Unloaded};
pub use room::Evict;

use crate::error::{Error, Missing, Result};
use crate::limits::Limits;
use crate::load::Model;

/// What the next [`unload_all`](ModelCache::unload_all) does with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Retention {
    /// The model stays.
    Keep,
    /// The model is flagged, and is unloaded.
    Unload,
}

/// Models by key. The cache owns them: a kept model cannot disappear.
///
/// ```
/// use std::sync::Arc;
/// use tensor_offload::{Checkpoint, Loader, ModelCache, Planner, Registry, Retention, Weights};
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
/// # let devices = Registry::system();
/// # let checkpoint = Checkpoint::open(path)?;
/// # let weights = Weights::new(checkpoint);
/// # let plan = Planner::new(weights.layout(), devices.machine()).compute("cpu".parse()?).plan()?;
/// # let load = || Loader::new(&devices).load(&weights, &plan).map(Arc::new);
/// let cache = ModelCache::new();
/// cache.insert("text encoder", load()?, Retention::Unload);
/// cache.insert("transformer", load()?, Retention::Keep);
/// let report = cache.unload_all();
/// assert_eq!(report.unloaded[0].key, "text encoder");
/// assert_eq!(report.kept, ["transformer"]);
/// assert!(cache.get("transformer").is_some());
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct ModelCache {
    entries: Mutex<Entries>,
    requests: free::Requests,
    hooks: free::Hooks,
    loads: identity::Loads,
    pressure: Mutex<PressureState>,
    limits: Limits,
}

#[derive(Debug, Default)]
struct Entries {
    models: BTreeMap<String, Entry>,
    /// Incremented by each use of an entry.
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    model: Arc<Model>,
    retention: Retention,
    /// The model's identity; `None` if the cache did not load it.
    identity: Option<Identity>,
    /// The clock at the entry's last use.
    used: u64,
    /// A hash of the model's bytes, if one was taken.
    content: Option<u64>,
}

impl Entries {
    fn insert(
        &mut self,
        key: String,
        model: Arc<Model>,
        retention: Retention,
        identity: Option<Identity>,
    ) -> Option<Arc<Model>> {
        self.clock += 1;
        let entry = Entry { model, retention, identity, used: self.clock, content: None };
        self.models.insert(key, entry).map(|old| old.model)
    }

    /// The entry `key`, marked as just used.
    fn touch(&mut self, key: &str) -> Option<&Entry> {
        self.clock += 1;
        let entry = self.models.get_mut(key)?;
        entry.used = self.clock;
        Some(entry)
    }
}

impl Entry {
    /// Whether anyone but the cache holds the model.
    fn in_use(&self) -> bool {
        self.model.is_shared()
    }
}

impl ModelCache {
    /// An empty cache.
    pub fn new() -> ModelCache {
        ModelCache::default()
    }

    /// Sets how long to wait for a load that another caller runs.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> ModelCache {
        self.limits = limits;
        self
    }

    /// Inserts a model under a key. Returns the model that had the key before, which is freed when its last user drops it.
    pub fn insert(&self, key: impl Into<String>, model: Arc<Model>, retention: Retention) -> Option<Arc<Model>> {
        self.entries().insert(key.into(), model, retention, None)
    }

    /// The model `key`; `None` if there is none. It is in use, and not freed, until the returned value is dropped. A call counts
    /// as a use for [`make_room`](ModelCache::make_room), which frees the least recently used models first.
    pub fn get(&self, key: &str) -> Option<Arc<Model>> {
        self.entries().touch(key).map(|entry| Arc::clone(&entry.model))
    }

    /// Changes the retention of the model `key`.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such model.
    pub fn flag(&self, key: &str, retention: Retention) -> Result<()> {
        let mut entries = self.entries();
        let entry = entries.models.get_mut(key).ok_or_else(|| no_model(key))?;
        entry.retention = retention;
        Ok(())
    }

    /// The models in the cache, in order of key.
    pub fn list(&self) -> Vec<EntryInfo> {
        let info = |(key, entry): (&String, &Entry)| EntryInfo {
            key: key.clone(),
            kept: entry.retention == Retention::Keep,
            in_use: entry.in_use(),
            bytes: entry.model.bytes(),
            own: entry.model.own_bytes(),
            lost: entry.model.lost().map(|error| error.to_string()),
        };
        self.entries().models.iter().map(info).collect()
    }

    /// Unloads one model, flagged or not.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such model.
    pub fn unload(&self, key: &str) -> Result<UnloadReport> {
        let report = self.unload_where(|candidate, _| candidate == key);
        if report.unloaded.is_empty() && report.deferred.is_empty() { Err(no_model(key)) } else { Ok(report) }
    }

    /// Unloads exactly the flagged models. If none is flagged, nothing happens.
    ///
    /// A flagged model in use leaves the cache now, and its memory is freed when its last user drops it; the report lists it
    /// as deferred. If nobody holds the model but queued work still uses it, this waits for that work (five minutes at
    /// most), so that the memory reported as unloaded is free.
    pub fn unload_all(&self) -> UnloadReport {
        self.unload_where(|_, retention| retention == Retention::Unload)
    }

    /// Unloads every model, including kept ones.
    pub fn unload_everything(&self) -> UnloadReport {
        self.unload_where(|_, _| true)
    }

    fn unload_where(&self, goes: impl Fn(&str, Retention) -> bool) -> UnloadReport {
        let (leaving, kept) = {
            let models = &mut self.entries().models;
            let keys: Vec<String> = models.keys().filter(|key| goes(key, models[*key].retention)).cloned().collect();
            let leaving: Vec<_> = keys.into_iter().filter_map(|key| models.remove_entry(&key)).collect();
            (leaving, models.keys().cloned().collect())
        };
        let report = release(leaving, kept);
        report.log();
        report
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Releases the memory of models that left the cache. This can take a while; the cache is not locked meanwhile.
fn release(leaving: Vec<(String, Entry)>, kept: Vec<String>) -> UnloadReport {
    let mut report = UnloadReport { kept, ..UnloadReport::default() };
    for (key, entry) in leaving {
        let unloaded = Unloaded { key, bytes: entry.model.own_bytes() };
        let deferred = entry.in_use() || entry.model.wait_unused().is_err();
        let list = if deferred { &mut report.deferred } else { &mut report.unloaded };
        list.push(unloaded);
    }
    report
}

fn no_model(key: &str) -> Error {
    Missing::Model { key: key.to_owned() }.into()
}
