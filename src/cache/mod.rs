//! Models that stay in memory between uses, and leave when they are told to.

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

/// What happens to a model at the next [`unload_all`](ModelCache::unload_all).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Retention {
    /// It stays.
    Keep,
    /// It is flagged, and goes.
    Unload,
}

/// Models by key. It owns them: a model that is kept cannot disappear.
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
    /// Goes up with each use of an entry.
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    model: Arc<Model>,
    retention: Retention,
    /// What it was loaded from, where the cache had it loaded.
    identity: Option<Identity>,
    /// The clock at its last use.
    used: u64,
    /// A hash of its bytes, where one was taken.
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

    /// The entry `key`, which is used now.
    fn touch(&mut self, key: &str) -> Option<&Entry> {
        self.clock += 1;
        let entry = self.models.get_mut(key)?;
        entry.used = self.clock;
        Some(entry)
    }
}

impl Entry {
    /// Whether anyone beside the cache holds the model.
    fn in_use(&self) -> bool {
        self.model.is_shared()
    }
}

impl ModelCache {
    /// An empty cache.
    pub fn new() -> ModelCache {
        ModelCache::default()
    }

    /// Sets how long it waits for loads that others run.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> ModelCache {
        self.limits = limits;
        self
    }

    /// Takes a model under a key. Returns the model that had the key before; it leaves when its last user is done.
    pub fn insert(&self, key: impl Into<String>, model: Arc<Model>, retention: Retention) -> Option<Arc<Model>> {
        self.entries().insert(key.into(), model, retention, None)
    }

    /// The model `key`. It is in use, and not freed, until what is returned is dropped. This is what counts as a use
    /// where [`make_room`](ModelCache::make_room) asks which was used least recently.
    pub fn get(&self, key: &str) -> Option<Arc<Model>> {
        self.entries().touch(key).map(|entry| Arc::clone(&entry.model))
    }

    /// Says anew whether the model `key` stays.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such model.
    pub fn flag(&self, key: &str, retention: Retention) -> Result<()> {
        let mut entries = self.entries();
        let entry = entries.models.get_mut(key).ok_or_else(|| no_model(key))?;
        entry.retention = retention;
        Ok(())
    }

    /// What the cache holds, in order of key.
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

    /// Lets go of one model, flagged or not.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such model.
    pub fn unload(&self, key: &str) -> Result<UnloadReport> {
        let report = self.unload_where(|candidate, _| candidate == key);
        if report.unloaded.is_empty() && report.deferred.is_empty() { Err(no_model(key)) } else { Ok(report) }
    }

    /// Lets go of exactly the flagged models. With none flagged nothing at all happens.
    ///
    /// A flagged model in use leaves the cache now and memory when its last user is done; the report lists it
    /// as deferred. Where nobody holds it but work that uses it is still queued, this waits for that work (five minutes
    /// at most), so that what is reported as unloaded is free.
    pub fn unload_all(&self) -> UnloadReport {
        self.unload_where(|_, retention| retention == Retention::Unload)
    }

    /// Lets go of every model, kept ones too.
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
        let report = let_go(leaving, kept);
        report.log();
        report
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives back the memory of models that left the cache. That can take a while; the cache is open to others meanwhile.
fn let_go(leaving: Vec<(String, Entry)>, kept: Vec<String>) -> UnloadReport {
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
