//! What a model was loaded from, and loads that several callers share.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::{Entry, ModelCache, Retention, let_go};
use crate::adapter::Weights;
use crate::error::{Error, InUse, Result};
use crate::load::Model;
use crate::patch::{Origin, ScalePolicy};
use crate::plan::Plan;
use crate::rounding::Rounding;
use crate::transfer::Stamp;

/// What a model is loaded from: the checkpoint's files and their stamps, the adapters and their strengths, rounding
/// and scales, the plan.
/// Two requests of equal identity want the same model; two files of one shape have different ones, and so has a file
/// that was replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(Arc<Parts>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    checkpoint: PathBuf,
    files: Vec<(PathBuf, Stamp)>,
    adapters: Vec<Arc<Origin>>,
    policy: Option<(Rounding, ScalePolicy)>,
    plan: Plan,
}

impl Identity {
    /// The identity of what these make.
    pub fn of(weights: &Weights, plan: &Plan) -> Identity {
        let (checkpoint, patches) = (weights.checkpoint(), weights.patches());
        let files = checkpoint.sources().iter().map(|source| (source.path().to_owned(), source.stamp())).collect();
        let (checkpoint, adapters, plan) = (checkpoint.path().to_owned(), patches.origins().to_vec(), plan.clone());
        Identity(Arc::new(Parts { checkpoint, files, adapters, policy: patches.policy(), plan }))
    }

    /// The identity of the same with another plan.
    pub(super) fn with_plan(&self, plan: &Plan) -> Identity {
        Identity(Arc::new(Parts { plan: plan.clone(), ..(*self.0).clone() }))
    }

    /// Whether both are made from the same files, so that one model may have much of the other.
    fn same_files(&self, other: &Identity) -> bool {
        self.0.files == other.0.files
    }
}

/// The loads that run now.
#[derive(Debug, Default)]
pub(super) struct Loads(Mutex<Running>);

#[derive(Debug, Default)]
struct Running {
    by_key: BTreeMap<String, Arc<Shared>>,
    /// The threads that wait for another's load, and those loads.
    waiting: HashMap<ThreadId, Arc<Shared>>,
}

/// One load and what came of it.
#[derive(Debug)]
struct Shared {
    identity: Identity,
    /// The thread that runs it.
    leader: ThreadId,
    outcome: Mutex<Option<Result<Arc<Model>, Arc<Error>>>>,
    ended: Condvar,
}

impl ModelCache {
    /// The model `key`, made by `load` unless the cache has it already with this identity and its devices work. It is
    /// in use until what is returned is dropped. A hit leaves the entry's retention as it is.
    ///
    /// Callers that want the same at the same time share one load: one runs its `load`, the others wait. Where the key
    /// has a model of the same files with other adapters, other strengths or another plan, `load` is given that model,
    /// to [derive](crate::Loader::derive) from; it is replaced when the new one is there, and whoever uses it keeps it.
    /// If they do not fit beside each other ([`Error::OutOfMemory`]), nobody uses the old one, and what it holds may be
    /// what is missing, it is let go, and `load` is called again with none. A model of other files leaves before the load begins, so that its memory can
    /// be had.
    ///
    /// ```
    /// use tensor_offload::{Checkpoint, Loader, ModelCache, Planner, Registry, Retention, Weights};
    /// use tensor_offload::cache::Identity;
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// # let devices = Registry::system();
    /// # let checkpoint = Checkpoint::open(path)?;
    /// # let weights = Weights::new(checkpoint);
    /// # let plan = Planner::new(weights.layout(), devices.machine()).compute("cpu".parse()?).plan()?;
    /// let (cache, loader) = (ModelCache::new(), Loader::new(&devices));
    /// let identity = Identity::of(&weights, &plan);
    /// let load = |base: Option<&_>| loader.derive(base, &weights, &plan);
    /// let model = cache.get_or_load("text encoder", &identity, Retention::Keep, load)?;
    /// assert_eq!(model.report().read, plan.bytes());
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Failed`] with what `load` met, for all who waited for it. The old model stays then, if it was given to
    /// `load` and did not have to go for the new one, which the error says; else the key is free.
    /// [`Error::InUse`] where `load` asks, on its own thread, for the key that it is loading, or for one whose load waits
    /// for it: nobody would ever end. [`Error::TimedOut`] after waiting for another's load for as long as the [limits](ModelCache::with_limits)
    /// say.
    pub fn get_or_load(
        &self,
        key: &str,
        identity: &Identity,
        retention: Retention,
        load: impl FnMut(Option<&Arc<Model>>) -> Result<Model>,
    ) -> Result<Arc<Model>> {
        let deadline = self.limits.load;
        let until = Instant::now() + deadline;
        loop {
            let shared = {
                let mut loads = self.loads.all();
                if let Some(model) = self.hit(key, identity) {
                    return Ok(model);
                }
                match loads.by_key.get(key).map(Arc::clone) {
                    Some(shared) => {
                        loads.wait_for(&shared, key)?;
                        shared
                    }
                    None => {
                        let shared = Arc::new(Shared::new(identity.clone()));
                        loads.by_key.insert(key.to_owned(), Arc::clone(&shared));
                        drop(loads);
                        return self.lead(key, &shared, retention, load);
                    }
                }
            };
            tracing::debug!(key, "waits for a load that is under way");
            let outcome = shared.wait(key, until, deadline);
            self.loads.all().waiting.remove(&std::thread::current().id());
            let outcome = outcome?;
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
        load: impl FnMut(Option<&Arc<Model>>) -> Result<Model>,
    ) -> Result<Arc<Model>> {
        let mut ending = Ending { loads: &self.loads, key, shared, outcome: None };
        let outcome = self.load_over(key, &shared.identity, load).map(Arc::new).map_err(Arc::new);
        if let Ok(model) = &outcome {
            let old =
                self.entries().insert(key.to_owned(), Arc::clone(model), retention, Some(shared.identity.clone()));
            drop(old);
        }
        ending.outcome = Some(outcome.clone());
        drop(ending);
        outcome.map_err(failed)
    }

    /// Loads where another model may have the key, out of that one where it is of the same files.
    fn load_over(
        &self,
        key: &str,
        identity: &Identity,
        mut load: impl FnMut(Option<&Arc<Model>>) -> Result<Model>,
    ) -> Result<Model> {
        let of_same_files = |entry: &&Entry| entry.identity.as_ref().is_some_and(|old| old.same_files(identity));
        let base = self.entries().models.get(key).filter(of_same_files).map(|entry| Arc::clone(&entry.model));
        let Some(base) = base else {
            let old = self.entries().models.remove(key);
            drop(old.map(|old| let_go(vec![(key.to_owned(), old)], Vec::new())));
            return load(None);
        };
        match load(Some(&base)) {
            Err(Error::OutOfMemory { device, requested, available, limit }) => {
                let full = Error::OutOfMemory { device, requested, available, limit };
                let own = base.own_bytes().get(&device).copied().unwrap_or(0);
                if own.saturating_add(available) < requested {
                    return Err(full);
                }
                let Some(old) = self.take_unused(key, base) else { return Err(full) };
                drop(let_go(vec![(key.to_owned(), old)], Vec::new()));
                load(None).map_err(|error| Error::Failed {
                    operation: "a load for which the model that had the key was let go",
                    cause: Arc::new(error),
                })
            }
            outcome => outcome,
        }
    }

    /// Takes the entry `key` out if it is still this model and nobody else has it.
    fn take_unused(&self, key: &str, model: Arc<Model>) -> Option<Entry> {
        let mut entries = self.entries();
        let same = Arc::ptr_eq(&entries.models.get(key)?.model, &model);
        drop(model);
        if same && !entries.models.get(key)?.in_use() { entries.models.remove(key) } else { None }
    }
}

impl Loads {
    fn all(&self) -> MutexGuard<'_, Running> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    /// Notes that this thread waits for a load.
    ///
    /// # Errors
    /// [`InUse::Loading`] when that load waits for this thread.
    fn wait_for(&mut self, shared: &Arc<Shared>, key: &str) -> Result<()> {
        let this = std::thread::current().id();
        // Each waits for one at most and none was let wait in a circle, so this comes to an end.
        let mut last = shared;
        while last.leader != this {
            // A load that has ended holds up nobody, whether they have woken up or not.
            let Some(next) = self.waiting.get(&last.leader).filter(|next| !next.has_ended()) else {
                self.waiting.insert(this, Arc::clone(shared));
                return Ok(());
            };
            last = next;
        }
        Err(InUse::Loading { key: key.to_owned() }.into())
    }
}

impl Shared {
    fn new(identity: Identity) -> Shared {
        let leader = std::thread::current().id();
        Shared { identity, leader, outcome: Mutex::default(), ended: Condvar::new() }
    }

    fn has_ended(&self) -> bool {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn wait(&self, key: &str, until: Instant, deadline: Duration) -> Result<Result<Arc<Model>, Arc<Error>>> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*outcome {
                return Ok(outcome.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut { what: format!("the load of `{key}` by another"), after: deadline });
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
        self.loads.all().by_key.remove(self.key);
        let panicked = || Err(Arc::new(Error::invalid("the load panicked")));
        let outcome = self.outcome.take().unwrap_or_else(panicked);
        *self.shared.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.shared.ended.notify_all();
    }
}

fn failed(cause: Arc<Error>) -> Error {
    Error::Failed { operation: "the load of a model for the cache", cause }
}
