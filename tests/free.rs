//! Freeing memory: requests that a worker serves between two jobs, room on one device, shared loads, pressure.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use support::watched::Watched;
use support::*;
use tensor_offload::backend::{Clock, Operation};
use tensor_offload::cache::{Evict, FreeRequest, Identity, Pressure, Unloaded};
use tensor_offload::error::NoRoom;
use tensor_offload::{
    ByteSize, Checkpoint, DeviceId, Error, ErrorKind, Loader, Matching, Model, ModelCache, Plan, Registry, Result,
    Retention, Streamer, Weights,
};

const UNLOAD: FreeRequest = FreeRequest { unload_models: true, free_memory: false };
const FREE: FreeRequest = FreeRequest { unload_models: false, free_memory: true };

struct Case {
    subject: Subject,
    plan: Plan,
}

impl Case {
    fn new(seed: u64) -> Case {
        let subject = Subject::plain(&llama(2, 32), seed);
        let plan = subject.planner(&machine(), "cuda:0,20kb;xpu:0,10kb;cpu,*").depth(1).plan().unwrap();
        Case { subject, plan }
    }

    fn load(&self, registry: &Registry) -> Result<Model> {
        Loader::new(registry).workers(1).load(&self.subject.weights, &self.plan)
    }

    /// A cache of models `a`, `b`, …, those in `flagged` to go.
    fn fill(&self, registry: &Registry, names: &str, flagged: &str) -> ModelCache {
        let cache = ModelCache::new();
        for name in names.chars() {
            let retention = if flagged.contains(name) { Retention::Unload } else { Retention::Keep };
            cache.insert(name, Arc::new(self.load(registry).unwrap()), retention);
        }
        cache
    }

    fn bytes_on(&self, id: DeviceId) -> u64 {
        let share = self.plan.device(id).unwrap();
        share.weights.bytes + share.beside.slots
    }
}

fn keys(list: &[Unloaded]) -> String {
    list.iter().map(|unloaded| unloaded.key.as_str()).collect()
}

fn held(cache: &ModelCache) -> String {
    cache.list().into_iter().map(|info| info.key).collect()
}

#[test]
fn case_31_each_combination_of_the_flags() {
    for (request, unloads, resets) in [
        (FreeRequest::default(), false, false),
        (UNLOAD, true, false),
        (FREE, true, true),
        (FreeRequest::ALL, true, true),
    ] {
        let watched = Watched::new(machine(), Clock::Wall);
        open_all(&watched.registry);
        let case = Case::new(60);
        let cache = case.fill(&watched.registry, "abc", "b");
        let hooks = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&hooks);
        cache.on_reset(move || _ = counter.fetch_add(1, Ordering::Relaxed));
        let calls = watched.countdown.calls();
        std::thread::scope(|scope| _ = scope.spawn(|| cache.request_free(request)));
        assert_eq!((watched.countdown.calls(), held(&cache).as_str()), (calls, "abc"), "asking only sets flags");
        let report = cache.service_requests(&watched.registry).unwrap();
        assert_eq!(report.is_none(), request.is_empty(), "{request:?}");
        assert_eq!(held(&cache), if unloads { "ac" } else { "abc" }, "{request:?}");
        assert_eq!(hooks.load(Ordering::Relaxed), usize::from(resets), "{request:?}");
        let trims = watched.countdown.calls_of(Operation::Trim);
        assert_eq!(trims, if resets { watched.registry.opened().len() as u64 } else { 0 }, "{request:?}");
        if let Some(report) = report {
            let tags: Vec<_> = report.snapshots.iter().map(|snapshot| snapshot.tag.as_str()).collect();
            let all = ["before clean-up", "after unload", "after reset", "after emptying"];
            assert_eq!(tags, all[..if resets { 4 } else { 2 }]);
            assert_eq!((report.request, report.resets), (request, usize::from(resets)));
        } else {
            assert_eq!(watched.countdown.calls(), calls, "nothing asked for: no device is asked anything");
        }
        assert!(cache.service_requests(&watched.registry).unwrap().is_none(), "served once");
        cache.list().iter().for_each(|info| case.subject.check(&cache.get(&info.key).unwrap()));
    }
}

#[test]
fn a_clean_up_unloads_then_resets_then_empties() {
    let watched = Watched::new(machine(), Clock::Virtual);
    let cache = Arc::new(Case::new(61).fill(&watched.registry, "ab", "a"));
    let seen = Arc::new(Mutex::new(Vec::new()));
    for hook in 0..2 {
        let (seen, countdown, cache_of_hook) = (Arc::clone(&seen), watched.countdown.clone(), Arc::downgrade(&cache));
        cache.on_reset(move || {
            let cache = cache_of_hook.upgrade().unwrap();
            // A hook may use the cache, and ask again: that is for the next time.
            cache.request_free(UNLOAD);
            seen.lock().unwrap().push((hook, held(&cache), countdown.calls_of(Operation::Trim)));
        });
    }
    cache.full_cleanup(&watched.registry).unwrap();
    assert_eq!(*seen.lock().unwrap(), [(0, "b".to_owned(), 0), (1, "b".to_owned(), 0)]);
    assert!(watched.countdown.calls_of(Operation::Trim) > 0);
    assert_eq!(cache.requested(), UNLOAD);
}

#[test]
fn requests_of_many_threads_are_served_once() {
    let registry = Registry::described(machine(), Clock::Wall);
    let cache = ModelCache::new();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (cache, request) = (&cache, if thread % 2 == 0 { UNLOAD } else { FREE });
            scope.spawn(move || (0..1000).for_each(|_| cache.request_free(request)));
        }
    });
    assert_eq!(cache.service_requests(&registry).unwrap().unwrap().request, FreeRequest::ALL);
    assert!(cache.service_requests(&registry).unwrap().is_none());
}

/// A registry whose first card holds `models` models of a case and nothing more.
fn tight(case: &Case, models: u64) -> Registry {
    let card = format!("cuda:0={}b,link=10", models * case.bytes_on(GPU0));
    Registry::described(described(&["cpu=64mb", "xpu:0=24mb", &card]), Clock::Wall)
}

fn no_room(error: impl Into<Error>) -> NoRoom {
    match error.into() {
        Error::NoRoom(no_room) => *no_room,
        other => panic!("{other}"),
    }
}

#[test]
fn room_is_made_by_the_flagged_then_by_the_least_recently_used() {
    let case = Case::new(62);
    let one = case.bytes_on(GPU0);
    let registry = tight(&case, 4);
    let cache = case.fill(&registry, "abcd", "c");
    // What fits as it is lets nobody go.
    let report = cache.make_room(&registry, GPU0, 0, Evict::Kept).unwrap();
    assert_eq!((keys(&report.unloaded).as_str(), report.kept.len()), ("", 4));
    drop(cache.get("a"));
    let report = cache.make_room(&registry, GPU0, one, Evict::Flagged).unwrap();
    assert_eq!(keys(&report.unloaded), "c");
    // Used longest ago: b, then d, then a. One and a byte need two, of which one can stay on the host; c's room is free
    // already.
    let demoted = case.plan.demoted(case.subject.layout(), registry.machine()).unwrap();
    let frees = one - demoted.slots().bytes();
    let report = cache.make_room(&registry, GPU0, one * 2 + 1, Evict::Kept).unwrap();
    assert_eq!(
        (keys(&report.unloaded).as_str(), keys(&report.demoted), report.kept.join("")),
        ("b", "d".into(), "ad".into())
    );
    assert_eq!(report.demoted[0].bytes, [(GPU0, frees), (xpu(), 0)].into_iter().filter(|b| b.1 > 0).collect());
    case.subject.check(&cache.get("d").unwrap());
    drop(cache.get("a"));
    // Two demoted ones are not enough for this, so the one used least recently goes.
    let report = cache.make_room(&registry, GPU0, one * 3, Evict::Kept).unwrap();
    assert_eq!((keys(&report.unloaded).as_str(), report.kept.join("")), ("d", "a".to_owned()));
    let error = no_room(cache.make_room(&registry, GPU0, one * 4, Evict::Flagged).unwrap_err());
    assert_eq!((error.requested, error.available, error.short, error.others), (one * 4, one * 3, one, 0));
    assert_eq!((error.holders[0].key.as_str(), error.holders[0].bytes, error.holders[0].kept), ("a", one, true));
    cache.make_room(&registry, GPU0, one * 4, Evict::Kept).unwrap();
    assert_eq!(registry.device(GPU0).unwrap().ledger().charged(), 0);
}

#[test]
fn case_23_a_second_model_that_fits_evicts_nothing() {
    let (first, second) = (Case::new(66), Case::new(67));
    let registry = tight(&first, 2);
    open_all(&registry);
    let before = levels(&registry);
    // Even one that is to go at the next clean-up stays until then.
    let cache = first.fill(&registry, "a", "a");
    let (kept, alone) = (Arc::downgrade(&cache.get("a").unwrap()), levels(&registry));
    let needed = second.bytes_on(GPU0);
    let report = cache.make_room(&registry, GPU0, needed, Evict::Kept).unwrap();
    assert!(report.unloaded.is_empty() && report.demoted.is_empty() && levels(&registry) == alone, "{report}");
    cache.insert("b", Arc::new(second.load(&registry).unwrap()), Retention::Unload);
    assert_eq!((held(&cache).as_str(), registry.device(GPU0).unwrap().ledger().charged()), ("ab", 2 * needed));
    let again = cache.get("a").unwrap();
    assert!(std::ptr::eq(kept.as_ptr(), Arc::as_ptr(&again)), "the same model as before");
    first.subject.check(&again);
    second.subject.check(&cache.get("b").unwrap());
    drop(again);
    assert_eq!(keys(&cache.unload_all().unloaded), "ab");
    comes_back(&registry);
    assert_eq!(levels(&registry), before);
}

#[test]
fn nothing_goes_where_that_would_not_be_enough() {
    let case = Case::new(63);
    let one = case.bytes_on(GPU0);
    let registry = tight(&case, 3);
    let cache = case.fill(&registry, "abc", "ab");
    let user = cache.get("b").unwrap();
    let error = cache.make_room(&registry, GPU0, one * 2, Evict::Flagged).unwrap_err().error;
    let text = error.to_string();
    assert_eq!((error.kind(), held(&cache).as_str()), (ErrorKind::NoRoom, "abc"));
    assert!(text.contains(&format!("`b` ({one} bytes, in use)")) && text.contains("`c` (") && text.contains(", kept)"));
    let error = no_room(cache.make_room(&registry, GPU0, one * 3, Evict::Kept).unwrap_err());
    assert_eq!((error.short, held(&cache).as_str()), (one * 3, "abc"), "a model in use stays");
    // What others hold is told apart.
    drop(cache.unload("c").unwrap());
    let other = registry.device(GPU0).unwrap().alloc(1000, tensor_offload::backend::MemoryKind::Arena).unwrap();
    let error = no_room(cache.make_room(&registry, GPU0, one * 3, Evict::Kept).unwrap_err());
    assert_eq!(error.others, 1000);
    drop((user, other));
    cache.make_room(&registry, GPU0, one * 3, Evict::Kept).unwrap();
    assert_eq!(held(&cache), "");
}

#[test]
fn others_on_a_device_are_flagged() {
    let registry = Registry::described(machine(), Clock::Virtual);
    let case = Case::new(64);
    let cache = case.fill(&registry, "abc", "b");
    let elsewhere = case.subject.planner(&machine(), "cpu,*").compute(CPU).plan();
    let elsewhere = elsewhere.or_else(|_| case.subject.planner(&machine(), "cuda:1,*").compute(GPU1).plan()).unwrap();
    let loader = Loader::new(&registry).workers(1);
    let model = loader.load(&case.subject.weights, &elsewhere).unwrap();
    cache.insert("d", Arc::new(model), Retention::Keep);
    assert_eq!(cache.eject_others("a", xpu()).unwrap(), ["b", "c"]);
    assert_eq!(cache.eject_others("nobody", xpu()).unwrap_err().kind(), ErrorKind::Missing);
    assert_eq!(keys(&cache.unload_all().unloaded), "bc");
    assert_eq!(held(&cache), "ad");
}

#[test]
fn the_same_request_is_a_hit_and_another_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (registry, tensors) = (Registry::described(machine(), Clock::Virtual), llama(1, 32));
    let path = |name: &str| folder.path().join(name);
    let write = |name: &str, seed: u64| std::fs::write(path(name), safetensors(&tensors, seed)).unwrap();
    write("one.safetensors", 1);
    write("two.safetensors", 2);
    let cache = ModelCache::new();
    let loads = AtomicUsize::new(0);
    let get = |key: &str, file: &str, strength: Option<f32>, allocation: &str| {
        let checkpoint = Checkpoint::open(path(file)).unwrap();
        let adapters = strength.map(|strength| {
            std::fs::write(path("lora.safetensors"), lora_bytes(&tensors)).unwrap();
            tensor_offload::Adapter::open(path("lora.safetensors"), strength).unwrap()
        });
        let weights =
            Weights::patched(checkpoint.clone(), adapters.into_iter().collect(), Matching::AllowPartial).unwrap();
        let subject = Subject::new(weights);
        let plan = subject.planner(&machine(), allocation).plan().unwrap();
        let identity = Identity::of(&subject.weights, &plan);
        let before = loads.load(Ordering::Relaxed);
        let model = cache.get_or_load(key, &identity, Retention::Keep, |base| {
            loads.fetch_add(1, Ordering::Relaxed);
            Loader::new(&registry).workers(1).derive(base, &subject.weights, &plan)
        });
        subject.check(&model.unwrap());
        loads.load(Ordering::Relaxed) - before
    };
    const ALL: &str = "cuda:0,8kb;cpu,*";
    assert_eq!(get("m", "one.safetensors", None, ALL), 1);
    assert_eq!(get("m", "one.safetensors", None, ALL), 0, "the same");
    assert_eq!(get("n", "two.safetensors", None, ALL), 1, "another file of the same shape");
    assert_eq!(held(&cache), "mn", "two files are two entries");
    assert_eq!(get("m", "two.safetensors", None, ALL), 1, "the key is another file's now");
    assert_eq!(get("m", "two.safetensors", None, "cuda:0,16kb;cpu,*"), 1, "another plan");
    write("three.safetensors", 3);
    std::fs::rename(path("three.safetensors"), path("two.safetensors")).unwrap();
    assert_eq!(get("m", "two.safetensors", None, "cuda:0,16kb;cpu,*"), 1, "the file was replaced");
    assert_eq!(get("m", "two.safetensors", None, "cuda:0,16kb;cpu,*"), 0);
    assert_eq!(held(&cache), "mn");
    cache.unload_everything();
    comes_back(&registry);
}

fn lora_bytes(tensors: &[tensor_offload::checkpoint::TensorSpec]) -> Vec<u8> {
    safetensors(&tensors[..1], 9)
}

#[test]
fn strengths_tell_identities_apart() {
    let plain = Subject::plain(&llama(1, 32), 65);
    let adapters = two_loras(&llama(1, 32), 65);
    let plan = plain.planner(&machine(), "cuda:0,8kb;cpu,*").plan().unwrap();
    let identity = |adapters: &[tensor_offload::Adapter]| {
        let weights = Weights::patched(plain.checkpoint().clone(), adapters.to_vec(), Matching::Strict).unwrap();
        Identity::of(&weights, &plan)
    };
    let other = tensor_offload::Adapter::from_checkpoint(lora(&llama(1, 32), tensor_offload::DType::F32, 3, 66), 0.75);
    assert_eq!(identity(&adapters), identity(&adapters));
    let rotary = adapters[0].clone().rotary_rows(tensor_offload::adapter::RotaryRows::Same);
    assert_ne!(identity(&[rotary]), identity(&adapters[..1]), "rows in another order");
    for different in
        [vec![], vec![adapters[0].clone()], vec![adapters[1].clone(), adapters[0].clone()], vec![other.unwrap()]]
    {
        assert_ne!(identity(&adapters), identity(&different));
    }
}

/// How many threads say that they wait for the load of another one.
#[derive(Clone, Default)]
struct Waiting(Arc<AtomicUsize>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Waiting {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if event.metadata().target() == "tensor_offload::cache::identity" {
            self.0.fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl Waiting {
    /// Runs what may wait in this thread.
    fn watch<T>(&self, run: impl FnOnce() -> T) -> T {
        use tracing_subscriber::layer::SubscriberExt;
        tracing::subscriber::with_default(tracing_subscriber::registry().with(self.clone()), run)
    }

    /// Until so many wait.
    fn reach(&self, count: usize) {
        let until = Instant::now() + DEADLINE;
        while self.0.load(Ordering::Acquire) < count {
            assert!(Instant::now() < until, "{} of {count} threads wait", self.0.load(Ordering::Acquire));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn concurrent_loads_of_one_key_are_one() {
    let (registry, case) = (Registry::described(machine(), Clock::Wall), Case::new(67));
    let identity = Identity::of(&case.subject.weights, &case.plan);
    for fails in [true, false] {
        let (cache, loads, waiting) = (ModelCache::new(), AtomicUsize::new(0), Waiting::default());
        let results: Vec<Result<Arc<Model>>> = std::thread::scope(|scope| {
            let load = || {
                let load = |_: Option<&Arc<Model>>| {
                    loads.fetch_add(1, Ordering::Relaxed);
                    waiting.reach(7);
                    if fails { Err(Error::Invalid { reason: "on purpose".into() }) } else { case.load(&registry) }
                };
                waiting.watch(|| cache.get_or_load("m", &identity, Retention::Keep, load))
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(load)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(loads.load(Ordering::Relaxed), 1);
        for result in &results {
            match result {
                Ok(model) => assert!(!fails && Arc::ptr_eq(model, results[0].as_ref().unwrap())),
                Err(error) => assert!(fails && error.to_string().contains("on purpose"), "{error}"),
            }
        }
        assert_eq!(held(&cache), if fails { "" } else { "m" });
        drop(results);
        assert!(cache.list().iter().all(|info| !info.in_use));
        // The key is free after a failure.
        cache.get_or_load("m", &identity, Retention::Keep, |_| case.load(&registry)).unwrap();
    }
    comes_back(&registry);
}

/// A load that asks for its own key, or for one whose load waits for it, would wait for itself.
#[test]
fn a_load_that_waits_for_itself_is_refused_at_once() {
    without_hanging("a load inside of its own".into(), || {
        let (registry, case) = (Registry::described(machine(), Clock::Wall), Case::new(69));
        let identity = Identity::of(&case.subject.weights, &case.plan);
        let cache = ModelCache::new();
        let get = |key: &str, inside: &dyn Fn() -> Result<()>| {
            cache
                .get_or_load(key, &identity, Retention::Keep, |_| inside().and_then(|()| case.load(&registry)))
                .map(drop)
        };
        let refused = |outcome: Result<()>, key: &str| -> Result<()> {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
            assert!(error.to_string().contains(&format!("`{key}`")), "{error}");
            Ok(())
        };
        let load = || Ok(());
        get("a", &|| refused(get("a", &load), "a")).unwrap();
        cache.unload_everything();
        get("a", &|| get("b", &|| get("c", &|| refused(get("a", &load), "a")))).unwrap();
        assert_eq!(held(&cache), "abc", "who refuses nobody loads");
        cache.unload_everything();
        // Each of two threads wants what the other loads: one of them is refused, and then both end.
        let (both, refusals) = (Barrier::new(2), AtomicUsize::new(0));
        let cross = |key: &str, other: &str| {
            get(key, &|| {
                both.wait();
                if let Err(error) = get(other, &load) {
                    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
                    refusals.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        std::thread::scope(|scope| {
            let threads = [scope.spawn(|| cross("a", "b")), scope.spawn(|| cross("b", "a"))];
            threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        });
        assert_eq!((refusals.into_inner(), held(&cache).as_str()), (1, "ab"));
    });
}

/// Whoever waits for a load that has ended, and has not woken up, holds up nobody.
#[test]
fn loads_inside_of_others_in_one_order_are_never_refused() {
    let (registry, case) = (Registry::described(machine(), Clock::Virtual), Case::new(70));
    let identity = Identity::of(&case.subject.weights, &case.plan);
    let cache = ModelCache::new();
    let get = |key: &str, inside: &dyn Fn() -> Result<()>| {
        cache.get_or_load(key, &identity, Retention::Keep, |_| inside().and_then(|()| case.load(&registry))).map(drop)
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (get, cache) = (&get, &cache);
            scope.spawn(move || {
                for round in 0..50 {
                    match (thread + round) % 4 {
                        0 => get("a", &|| get("b", &|| get("c", &|| Ok(())))).unwrap(),
                        1 => get("b", &|| get("c", &|| Ok(()))).unwrap(),
                        2 => get("c", &|| Ok(())).unwrap(),
                        _ => drop(cache.unload_everything()),
                    }
                }
            });
        }
    });
    cache.unload_everything();
    comes_back(&registry);
}

#[test]
fn a_load_that_panics_fails_those_who_wait() {
    let (registry, case) = (Registry::described(machine(), Clock::Wall), Case::new(68));
    let identity = Identity::of(&case.subject.weights, &case.plan);
    let (cache, inside, waiting) = (ModelCache::new(), Barrier::new(2), Waiting::default());
    std::thread::scope(|scope| {
        let panics = scope.spawn(|| {
            cache.get_or_load("m", &identity, Retention::Keep, |_| {
                inside.wait();
                waiting.reach(1);
                panic!("on purpose")
            })
        });
        inside.wait();
        let load = |_: Option<&Arc<Model>>| case.load(&registry);
        let waited = waiting.watch(|| cache.get_or_load("m", &identity, Retention::Keep, load));
        assert!(waited.is_err() && panics.join().is_err());
    });
    cache.get_or_load("m", &identity, Retention::Keep, |_| case.load(&registry)).unwrap();
}

#[test]
fn pressure_requests_what_the_next_service_does() {
    let machine = described(&["cpu=64mb,free=5mb,link=20", "cuda:0=24mb,link=10", "xpu:0=24mb,link=5"]);
    let watched = Watched::new(machine, Clock::Wall);
    let (registry, case) = (&watched.registry, Case::new(69));
    let cache = case.fill(registry, "ab", "a");
    let pressure = Pressure::new();
    let model = cache.get("b").unwrap();
    let streamer = Streamer::new(&model).unwrap();
    assert!(cache.check_pressure(registry, &pressure, false).unwrap().postponed);
    assert!(cache.requested().is_empty());
    drop((streamer, model));
    let report = cache.check_pressure(registry, &pressure, false).unwrap();
    assert!(report.host > 9_000 && report.to_string().contains("a clean-up is asked for"), "{report}");
    assert_eq!(keys(&cache.service_requests(registry).unwrap().unwrap().unload.unloaded), "a");
    assert!(cache.check_pressure(registry, &pressure, false).unwrap().request.is_empty(), "no 5 points higher");
    let pressure = pressure.margin(GPU0, ByteSize(24 << 20));
    let report = cache.check_pressure(registry, &pressure, false).unwrap();
    assert_eq!((report.request, report.short[0].1), (FreeRequest::ALL, case.bytes_on(GPU0)));
}

/// Whatever operation fails during a load, a clean-up or while room is made, nothing leaks and kept models stay usable.
#[test]
fn every_failing_operation_leaves_kept_models_usable() {
    let case = Case::new(70);
    let round = |watched: &Watched, cache: &ModelCache| -> Result<()> {
        let registry = &watched.registry;
        let model = Arc::new(case.load(registry)?);
        cache.insert("new", Arc::clone(&model), Retention::Unload);
        drop(model);
        cache.make_room(registry, GPU0, 24 << 20, Evict::Flagged).map(drop).or_else(|unfinished| {
            match unfinished.error {
                // The kept model is in the way, as it should be.
                Error::NoRoom(_) => Ok(()),
                other => Err(other),
            }
        })?;
        let other = Arc::new(case.load(registry)?);
        cache.insert("other", other, Retention::Unload);
        cache.request_free(FREE);
        cache.service_requests(registry)?;
        Ok(())
    };
    let calls = {
        let watched = Watched::new(machine(), Clock::Virtual);
        let cache = case.fill(&watched.registry, "k", "");
        let before = watched.countdown.calls();
        round(&watched, &cache).unwrap();
        watched.countdown.calls() - before
    };
    let mut failures = 0;
    for nth in 1..=calls {
        let watched = Watched::new(machine(), Clock::Virtual);
        let cache = case.fill(&watched.registry, "k", "");
        let level = levels(&watched.registry);
        watched.countdown.fail_nth(nth);
        failures += usize::from(round(&watched, &cache).is_err());
        cache.unload_all();
        for (id, now) in levels(&watched.registry) {
            let then = level.iter().find(|(device, _)| *device == id).map_or(0, |(_, bytes)| *bytes);
            assert_eq!(now, then, "operation {nth}: {id}");
        }
        case.subject.check(&cache.get("k").unwrap());
        cache.full_cleanup(&watched.registry).unwrap();
        cache.unload_everything();
        comes_back(&watched.registry);
    }
    assert!(failures > 20, "{failures} of {calls} failed");
}
