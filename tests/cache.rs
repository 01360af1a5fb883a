//! The cache: what stays, what goes, and when its memory is back. Numbers are those of the cases that users met.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use support::watched::Watched;
use support::*;
use tensor_offload::backend::{Clock, Operation};
use tensor_offload::cache::{UnloadReport, Unloaded};
use tensor_offload::{ErrorKind, LayerId, Loader, Machine, Model, ModelCache, Plan, Registry, Retention, Streamer};

/// A model over the host and a card, and everything to load it again.
struct Case {
    subject: Subject,
    plan: Plan,
}

impl Case {
    fn new(seed: u64, machine: &Machine) -> Case {
        let subject = Subject::plain(&llama(3, 32), seed);
        let plan = subject.planner(machine, "cuda:0,20kb;xpu:0,10kb;cpu,*").depth(1).plan().unwrap();
        Case { subject, plan }
    }

    fn load(&self, registry: &Registry) -> Arc<Model> {
        let loader = Loader::new(registry).workers(1);
        Arc::new(loader.load(&self.subject.weights, &self.plan).unwrap())
    }
}

fn watched(clock: Clock) -> (Watched, Case) {
    let watched = Watched::new(machine(), clock);
    open_all(&watched.registry);
    let case = Case::new(40, watched.machine());
    (watched, case)
}

fn keys(list: &[Unloaded]) -> Vec<&str> {
    list.iter().map(|unloaded| unloaded.key.as_str()).collect()
}

/// A cache of models `a`, `b`, …, those in `flagged` to go.
fn filled(case: &Case, registry: &Registry, names: &str, flagged: &str) -> ModelCache {
    let cache = ModelCache::new();
    for name in names.chars() {
        let retention = if flagged.contains(name) { Retention::Unload } else { Retention::Keep };
        assert!(cache.insert(name, case.load(registry), retention).is_none());
    }
    cache
}

fn handles(cache: &ModelCache) -> BTreeMap<String, *const Model> {
    cache.list().into_iter().map(|info| (info.key.clone(), Arc::as_ptr(&cache.get(&info.key).unwrap()))).collect()
}

#[test]
fn case_22_with_nothing_flagged_nothing_happens() {
    let (watched, case) = watched(Clock::Wall);
    let cache = filled(&case, &watched.registry, "abcde", "");
    let (before, level, calls) = (handles(&cache), levels(&watched.registry), watched.countdown.calls());
    let report = cache.unload_all();
    assert_eq!(watched.countdown.calls(), calls, "the devices were asked something");
    assert_eq!(report.kept, ["a", "b", "c", "d", "e"]);
    assert!(report.unloaded.is_empty() && report.deferred.is_empty() && report.freed().is_empty());
    assert_eq!((handles(&cache), levels(&watched.registry)), (before, level));
}

#[test]
fn case_22_exactly_the_flagged_ones_go() {
    let (watched, case) = watched(Clock::Virtual);
    let cache = filled(&case, &watched.registry, "abcde", "bd");
    let before = handles(&cache);
    let level = levels(&watched.registry);
    let report = cache.unload_all();
    assert_eq!((keys(&report.unloaded), report.kept.join("")), (vec!["b", "d"], "ace".to_owned()));
    let freed = report.freed();
    for ((id, now), (_, then)) in levels(&watched.registry).into_iter().zip(&level) {
        assert_eq!((now * 5, now + freed.get(&id).copied().unwrap_or(0)), (then * 3, *then), "{id}");
    }
    let after = handles(&cache);
    assert!(after.len() == 3 && after.iter().all(|(key, handle)| before[key] == *handle), "the same handles");
}

#[test]
fn case_22_kept_models_survive_two_clean_ups() {
    let (watched, case) = watched(Clock::Wall);
    let cache = filled(&case, &watched.registry, "abc", "a");
    for round in 0..2 {
        let report = cache.full_cleanup(&watched.registry).unwrap();
        assert_eq!(report.unload.unloaded.len(), usize::from(round == 0));
        for key in ["b", "c"] {
            let model = cache.get(key).expect("a kept model stays");
            case.subject.check(&model);
            let mut streamer = Streamer::new(&model).unwrap();
            model.layout().layer_ids().for_each(|layer| drop(streamer.layer(layer).unwrap()));
        }
    }
}

#[test]
fn case_29_a_clean_up_takes_the_flagged_model_and_leaves_the_kept_ones() {
    let (watched, case) = watched(Clock::Wall);
    let cache = filled(&case, &watched.registry, "abc", "a");
    let (before, trims) = (levels(&watched.registry), watched.countdown.calls_of(Operation::Trim));
    let report = cache.full_cleanup(&watched.registry).unwrap();
    assert_eq!((keys(&report.unload.unloaded), report.unload.kept.join("")), (vec!["a"], "bc".to_owned()));
    assert!(cache.get("a").is_none());
    case.subject.check(&cache.get("b").unwrap());
    case.subject.check(&cache.get("c").unwrap());
    for ((id, now), (_, then)) in levels(&watched.registry).into_iter().zip(before) {
        assert_eq!(now, then / 3 * 2, "{id}");
    }
    let used = |snapshot: usize| report.snapshots[snapshot].devices.iter().find(|d| d.0 == CPU).unwrap().1.used();
    assert!(used(1) < used(0) && used(2) <= used(1), "host memory is lower: {:?}", report.snapshots);
    let opened = watched.registry.opened().len() as u64;
    assert_eq!(watched.countdown.calls_of(Operation::Trim) - trims, opened, "every allocator cache was emptied");
    assert_eq!(report.trimmed.len() as u64, opened);
}

#[test]
fn case_30_a_clean_up_with_only_kept_models_empties_allocator_caches() {
    let (watched, case) = watched(Clock::Virtual);
    let cache = filled(&case, &watched.registry, "de", "");
    let (before, level) = (handles(&cache), levels(&watched.registry));
    let report = cache.full_cleanup(&watched.registry).unwrap();
    assert_eq!(report.unload, {
        let mut kept = UnloadReport::default();
        kept.kept = vec!["d".into(), "e".into()];
        kept
    });
    let text = report.to_string();
    assert!(text.starts_with("unloaded nothing; kept d, e; allocator caches emptied"), "{text}");
    assert_eq!(watched.countdown.calls_of(Operation::Trim), watched.registry.opened().len() as u64);
    assert_eq!((handles(&cache), levels(&watched.registry)), (before, level));
}

#[test]
fn a_model_in_use_goes_with_its_last_user() {
    let (watched, case) = watched(Clock::Wall);
    let cache = filled(&case, &watched.registry, "ab", "ab");
    let level = levels(&watched.registry);
    let user = cache.get("a").unwrap();
    let mut streamer = Streamer::new(&user).unwrap();
    let guard = streamer.layer(LayerId::new(1)).unwrap();
    let report = cache.unload_all();
    assert_eq!((keys(&report.unloaded), keys(&report.deferred)), (vec!["b"], vec!["a"]));
    assert!(report.to_string().contains("still in use: a"), "{report}");
    assert!(cache.list().is_empty() && cache.get("a").is_none());
    case.subject.check(&user);
    for ((id, now), (_, then)) in levels(&watched.registry).into_iter().zip(level) {
        assert!(now >= then / 2, "{id}: a model in use lost memory");
    }
    drop((streamer, user));
    let norm = guard.tensors().next().unwrap().info().name.clone();
    let mut bytes = vec![0; case.subject.bytes_of(&norm).len()];
    guard.read(&norm, &mut bytes).unwrap();
    assert!(bytes == case.subject.bytes_of(&norm), "the last user is the guard");
    drop(guard);
    comes_back(&watched.registry);
}

/// What is kept away from the compute device can be held on its own; the model is in use then, too.
#[test]
fn a_store_in_use_is_a_model_in_use() {
    let (watched, case) = watched(Clock::Virtual);
    let cache = filled(&case, &watched.registry, "a", "a");
    let store = Arc::clone(cache.get("a").unwrap().store());
    assert!(cache.list()[0].in_use);
    let report = cache.unload_all();
    assert_eq!((keys(&report.unloaded), keys(&report.deferred)), (vec![], vec!["a"]));
    drop(store);
    comes_back(&watched.registry);
}

/// Compute that is queued still reads the model when its last owner is gone. What is reported as unloaded is free, so a
/// model that needs the same memory can be loaded at once.
#[test]
fn case_23_unloaded_memory_is_free() {
    let (one, machine) = (Case::new(41, &machine()), machine());
    let needed = one.plan.device(GPU0).unwrap().needed();
    let card = format!("cuda:0={needed}b,link=10");
    let tight = described(&["cpu=64mb", "xpu:0=24mb", &card]);
    for clock in [Clock::Wall, Clock::Virtual] {
        let registry = Registry::described(tight.clone(), clock);
        let cache = ModelCache::new();
        for seed in 42..45 {
            let case = Case::new(seed, &machine);
            let key = format!("model {seed}");
            cache.insert(&key, case.load(&registry), Retention::Unload);
            let mut streamer = Streamer::new(&cache.get(&key).unwrap()).unwrap();
            for layer in case.subject.layout().layer_ids() {
                let _guard = streamer.layer(layer).unwrap();
                streamer.compute().occupy(Duration::from_millis(20)).unwrap();
            }
            drop(streamer);
            let report = cache.unload_all();
            assert_eq!(keys(&report.unloaded), [key.as_str()], "{clock:?}: {report}");
            assert_eq!(registry.device(GPU0).unwrap().ledger().charged(), 0, "reported as free");
        }
    }
}

#[test]
fn one_model_is_unloaded_by_its_key() {
    let (watched, case) = watched(Clock::Virtual);
    let cache = filled(&case, &watched.registry, "abc", "a");
    let report = cache.unload("b").unwrap();
    assert_eq!((keys(&report.unloaded), report.kept.join("")), (vec!["b"], "ac".to_owned()));
    assert_eq!(cache.unload("b").unwrap_err().kind(), ErrorKind::Missing);
    assert_eq!(cache.flag("b", Retention::Keep).unwrap_err().kind(), ErrorKind::Missing);
    cache.flag("a", Retention::Keep).unwrap();
    cache.flag("c", Retention::Unload).unwrap();
    assert_eq!(keys(&cache.unload_all().unloaded), ["c"]);
    assert_eq!(keys(&cache.unload_everything().unloaded), ["a"]);
    comes_back(&watched.registry);
}

#[test]
fn a_key_that_is_taken_again_gives_the_old_model_back() {
    let (watched, case) = watched(Clock::Virtual);
    let cache = filled(&case, &watched.registry, "a", "");
    let level = levels(&watched.registry);
    let old = cache.get("a").unwrap();
    let replaced = cache.insert("a", case.load(&watched.registry), Retention::Unload).unwrap();
    assert!(Arc::ptr_eq(&old, &replaced) && !cache.list()[0].kept);
    case.subject.check(&old);
    drop((old, replaced));
    assert_eq!(levels(&watched.registry), level, "the old one went with its last user");
    assert_eq!(keys(&cache.unload_all().unloaded), ["a"]);
    comes_back(&watched.registry);
}

/// A model that several threads unload at once goes once.
#[test]
fn threads_share_a_cache() {
    let registry = Registry::described(machine(), Clock::Wall);
    let case = Case::new(46, &machine());
    let (cache, inserted, gone) = (ModelCache::new(), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (registry, case, cache, inserted, gone) = (&registry, &case, &cache, &inserted, &gone);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for _ in 0..40 {
                    let key = format!("model {}", random.next() % 3);
                    let count = |report: UnloadReport| {
                        gone.fetch_add(report.unloaded.len() + report.deferred.len(), Ordering::Relaxed);
                    };
                    match random.next() % 6 {
                        0 | 1 => {
                            let old = cache.insert(&key, case.load(registry), Retention::Unload);
                            inserted.fetch_add(usize::from(old.is_none()), Ordering::Relaxed);
                        }
                        2 | 3 => {
                            if let Some(model) = cache.get(&key) {
                                assert!(
                                    read(&model, "lm_head.weight").unwrap() == case.subject.bytes_of("lm_head.weight")
                                );
                            }
                        }
                        // Either it is there and goes, or there is none.
                        4 => drop(cache.unload(&key).map(count)),
                        _ => count(cache.unload_all()),
                    }
                    registry.snapshot("meanwhile");
                }
            });
        }
    });
    let report = cache.unload_everything();
    assert_eq!(gone.into_inner() + report.unloaded.len(), inserted.into_inner());
    comes_back(&registry);
}
