//! What a model was loaded from, and loads that several callers share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{ModelCache, Retention};
use crate::adapter::{Origin, Patches, ScalePolicy};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::load::Model;
use crate::plan::Plan;
use crate::rounding::Rounding;
use crate::transfer::Stamp;

/// What a model is loaded from: the checkpoint's files and their stamps, the adapters and their strengths, rounding
/// and scales, the plan.
/// Two requests of equal identity want the same model; two files of one shape have different ones, and so has a file
/// that was replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(Arc<Parts>);

#[derive(Debug, PartialEq, Eq)]
struct Parts {
    checkpoint: PathBuf,
    files: Vec<(PathBuf, Stamp)>,
    adapters: Vec<Arc<Origin>>,
    policy: Option<(Rounding, ScalePolicy)>,
    plan: Plan,
}

impl Identity {
    /// The identity of what these make.
    pub fn of(checkpoint: &Checkpoint, patches: &Patches, plan: &Plan) -> Identity {
        let files = checkpoint.sources().iter().map(|source| (source.path().to_owned(), source.stamp())).collect();
        let (checkpoint, adapters, plan) = (checkpoint.path().to_owned(), patches.origins().to_vec(), plan.clone());
        Identity(Arc::new(Parts { checkpoint, files, adapters, policy: patches.policy(), plan }))
    }
}

/// The loads that run now, by key.
#[derive(Debug, Default)]
pub(super) struct Loads(Mutex<BTreeMap<String, Arc<Shared>>>);

/// One load and what came of it.
#[derive(Debug)]
struct Shared {
    identity: Identity,
    outcome: Mutex<Option<Result<Arc<Model>, Arc<Error>>>>,
    ended: Condvar,
}

/// How long a caller waits for a load of another.
const DEADLINE: Duration = Duration::from_secs(3600);

impl ModelCache {
    /// The model `key`, loaded by `load` unless the cache has it already with this identity and its devices work. It is
    /// in use until what is returned is dropped. A hit leaves the entry's retention as it is.
    ///
    /// Callers that want the same at the same time share one load: one runs its `load`, the others wait. A model that
    /// has the key with another identity leaves before the load begins, so that its memory can be had.
    ///
    /// # Errors
    /// [`Error::Failed`] with what `load` met, for all who waited for it; the key is free then.
    /// [`Error::TimedOut`] after waiting an hour for another's load.
    pub fn get_or_load(
        &self,
        key: &str,
        identity: &Identity,
        retention: Retention,
        load: impl FnOnce() -> Result<Model>,
    ) -> Result<Arc<Model>> {
        let until = Instant::now() + DEADLINE;
        loop {
            let shared = {
                let mut loads = self.loads.all();
                if let Some(model) = self.hit(key, identity) {
                    return Ok(model);
                }
                match loads.get(key) {
                    Some(shared) => Arc::clone(shared),
                    None => {
                        let shared = Arc::new(Shared::new(identity.clone()));
                        loads.insert(key.to_owned(), Arc::clone(&shared));
                        drop(loads);
                        return self.lead(key, &shared, retention, load);
                    }
                }
            };
            let outcome = shared.wait(key, until)?;
            if shared.identity == *identity {
                return outcome.map_err(failed);
            }
        }
    }

    fn hit(&self, key: &str, identity: &Identity) -> Option<Arc<Model>> {
        let mut entries = self.entries();
        let entry = entries.touch(key)?;
        let same = entry.identity.as_ref() == Some(identity) && entry.model.lost().is_none();
        same.then(|| Arc::clone(&entry.model))
    }

    /// Loads for all who wait. The cache has the model before the load counts as ended, so nobody loads it again.
    fn lead(
        &self,
        key: &str,
        shared: &Arc<Shared>,
        retention: Retention,
        load: impl FnOnce() -> Result<Model>,
    ) -> Result<Arc<Model>> {
        let mut ending = Ending { loads: &self.loads, key, shared, outcome: None };
        let old = self.entries().models.remove(key);
        drop(old.map(|old| super::let_go(vec![(key.to_owned(), old)], Vec::new())));
        let outcome = load().map(Arc::new).map_err(Arc::new);
        if let Ok(model) = &outcome {
            let old =
                self.entries().insert(key.to_owned(), Arc::clone(model), retention, Some(shared.identity.clone()));
            drop(old);
        }
        ending.outcome = Some(outcome.clone());
        drop(ending);
        outcome.map_err(failed)
    }
}

impl Loads {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Shared>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn new(identity: Identity) -> Shared {
        Shared { identity, outcome: Mutex::default(), ended: Condvar::new() }
    }

    fn wait(&self, key: &str, until: Instant) -> Result<Result<Arc<Model>, Arc<Error>>> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*outcome {
                return Ok(outcome.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut { what: format!("the load of `{key}` by another"), after: DEADLINE });
            }
            outcome = self.ended.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Tells all who wait, however the load ends.
struct Ending<'a> {
    loads: &'a Loads,
    key: &'a str,
    shared: &'a Arc<Shared>,
    outcome: Option<Result<Arc<Model>, Arc<Error>>>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.loads.all().remove(self.key);
        let panicked = || Err(Arc::new(Error::invalid("the load panicked")));
        let outcome = self.outcome.take().unwrap_or_else(panicked);
        *self.shared.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.shared.ended.notify_all();
    }
}

fn failed(cause: Arc<Error>) -> Error {
    Error::Failed { operation: "the load of a model for the cache", cause }
}
