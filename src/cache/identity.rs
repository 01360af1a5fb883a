//! The identity of a model, and loads that several callers share.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::{Entry, ModelCache, Retention, release};
use crate::adapter::Weights;
use crate::checkpoint::TensorId;
use crate::dtype::DType;
use crate::error::{Error, InUse, Result};
use crate::load::{Allocators, Model, TensorAllocator};
use crate::patch::{Origin, ScalePolicy};
use crate::plan::Plan;
use crate::rounding::Rounding;
use crate::transfer::Stamp;

/// The inputs that a model is loaded from: the checkpoint's files and their stamps, the adapters and their strengths, rounding,
/// scales, casts, deferred changes and whether changed blocks are requantised, the plan, and the allocators if they are [named](Identity::allocator).
/// Requests of equal identity want the same model. Different files have different identities even if their shapes are equal,
/// and so has a file that was replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(Arc<Parts>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    checkpoint: PathBuf,
    files: Vec<(PathBuf, Stamp)>,
    adapters: Vec<Arc<Origin>>,
    policy: Option<(Rounding, ScalePolicy)>,
    casts: Vec<(TensorId, DType)>,
    requantises: bool,
    deferred: Vec<(TensorId, DType)>,
    plan: Plan,
    allocators: Allocators,
}

impl Identity {
    /// The identity of the model that `weights` and `plan` give.
    pub fn of(weights: &Weights, plan: &Plan) -> Identity {
        let (checkpoint, patches) = (weights.checkpoint(), weights.patches());
        let files = checkpoint.sources().iter().map(|source| (source.path().to_owned(), source.stamp())).collect();
        let (checkpoint, adapters, plan) = (checkpoint.path().to_owned(), patches.origins().to_vec(), plan.clone());
        let (policy, casts, requantises) = (patches.policy(), patches.casts(), patches.requantises());
        let (deferred, allocators) = (patches.deferred_types(), Allocators::default());
        Identity(Arc::new(Parts {
            checkpoint,
            files,
            adapters,
            policy,
            casts,
            requantises,
            deferred,
            plan,
            allocators,
        }))
    }

    /// This identity for a load with this allocator, which need not be named if all loads under a key have the same.
    #[must_use]
    pub fn allocator(&self, allocator: Arc<dyn TensorAllocator>) -> Identity {
        let mut parts = (*self.0).clone();
        parts.allocators.add(allocator);
        Identity(Arc::new(parts))
    }

    /// This identity with another plan.
    pub(super) fn with_plan(&self, plan: &Plan) -> Identity {
        Identity(Arc::new(Parts { plan: plan.clone(), ..(*self.0).clone() }))
    }

    /// Whether both are made from the same files, so that the models may have most bytes in common.
    fn same_files(&self, other: &Identity) -> bool {
        self.0.files == other.0.files
    }
}

/// The loads in progress.
#[derive(Debug, Default)]
pub(super) struct Loads(Mutex<Running>);

#[derive(Debug, Default)]
struct Running {
    by_key: BTreeMap<String, Arc<Shared>>,
    /// The threads that wait for another thread's load, with that load.
    waiting: HashMap<ThreadId, Arc<Shared>>,
}

/// One load and its outcome.
#[derive(Debug)]
struct Shared {
    identity: Identity,
    /// The thread that runs it.
    leader: ThreadId,
    outcome: Mutex<Option<Result<Arc<Model>, Arc<Error>>>>,
    ended: Condvar,
}

impl ModelCache {
    /// The model `key`: from the cache if it has this identity and its devices work, otherwise made by `load`. The model is in
    /// use until the returned value is dropped. A hit leaves the entry's retention unchanged.
    ///
    /// Concurrent callers for the same model share one load: one runs its `load`, the others wait. If the key has a model of
    /// the same files with other adapters, other strengths or another plan, `load` gets that model to
    /// [derive](crate::Loader::derive) from. The old model is replaced when the new one is loaded; callers that use it keep
    /// it. If the two do not fit at the same time ([`Error::OutOfMemory`]), nobody uses the old one, and its memory may be
    /// what is missing, the old model is dropped, and `load` is called again with `None`. A model of other files is dropped
    /// before the load begins, so that its memory is available.
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
    /// [`Error::Failed`] with the error of `load`, for all callers that waited for it. The old model then stays if `load` got it
    /// and it was not dropped to make room, which the error says; otherwise the key is free. [`Error::InUse`] when `load`
    /// requests, on its own thread, the key that it is loading, or one whose load waits for it: a deadlock.
    /// [`Error::TimedOut`] after waiting for another caller's load for as long as the [limits](ModelCache::with_limits) say.
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

    /// Runs the load for all waiting callers. The model enters the cache before the load counts as complete, so nobody loads it
    /// again.
    fn lead(
        &self,
        key: &str,
        shared: &Arc<Shared>,
        retention: Retention,
        load: impl FnMut(Option<&Arc<Model>>) -> Result<Model>,
    ) -> Result<Arc<Model>> {
        let mut completion = CompletionGuard { loads: &self.loads, key, shared, outcome: None };
        let outcome = self.load_over(key, &shared.identity, load).map(Arc::new).map_err(Arc::new);
        if let Ok(model) = &outcome {
            let old =
                self.entries().insert(key.to_owned(), Arc::clone(model), retention, Some(shared.identity.clone()));
            drop(old);
        }
        completion.outcome = Some(outcome.clone());
        drop(completion);
        outcome.map_err(failed)
    }

    /// Loads under a key that may have another model, and derives from that model if it has the same files.
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
            drop(old.map(|old| release(vec![(key.to_owned(), old)], Vec::new())));
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
                drop(release(vec![(key.to_owned(), old)], Vec::new()));
                load(None).map_err(|error| Error::Failed {
                    operation: "a load for which the model that had the key was let go",
                    cause: Arc::new(error),
                })
            }
            outcome => outcome,
        }
    }

    /// Removes the entry `key` if it still holds this model and nobody else does.
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
    /// Records that this thread waits for a load.
    ///
    /// # Errors
    /// [`InUse::Loading`] when that load waits for this thread.
    fn wait_for(&mut self, shared: &Arc<Shared>, key: &str) -> Result<()> {
        let this = std::thread::current().id();
        // Each thread waits for one load at most, and no cycle was ever admitted, so this loop ends.
        let mut last = shared;
        while last.leader != this {
            // A completed load blocks nobody, even if its waiters have not woken up yet.
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

/// Completes a load when dropped, and wakes all waiters, even after a panic.
struct CompletionGuard<'a> {
    loads: &'a Loads,
    key: &'a str,
    shared: &'a Arc<Shared>,
    outcome: Option<Result<Arc<Model>, Arc<Error>>>,
}

impl Drop for CompletionGuard<'_> {
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
