//! Models made out of models in the cache: other strengths and plans of a key, room by demotion, several compute devices,
//! devices that are lost.

mod support;

use std::sync::Arc;

use support::watched::Watched;
use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::cache::{Evict, Identity, UnloadReport, Unloaded};
use tensor_offload::{DeviceId, Error, ErrorKind, Loader, Model, ModelCache, Plan, Registry, Result, Retention, Use};

fn plan(subject: &Subject, allocation: &str) -> Plan {
    subject.planner(&machine(), allocation).depth(1).plan().unwrap()
}

fn get(cache: &ModelCache, registry: &Registry, subject: &Subject, plan: &Plan) -> Result<Arc<Model>> {
    let identity = Identity::of(&subject.weights, plan);
    cache.get_or_load("m", &identity, Retention::Keep, |base| {
        Loader::new(registry).workers(1).derive(base, &subject.weights, plan)
    })
}

const SPLIT: &str = "cuda:0,30kb;xpu:0,10kb;cpu,*";

#[test]
fn a_key_with_another_strength_or_plan_derives_from_its_entry() {
    let case = OneLayerPatched::new(110);
    let (weak, full) = (case.at(0.9), case.at(1.0));
    let registry = Registry::described(machine(), Clock::Wall);
    let (cache, split) = (ModelCache::new(), plan(&weak, SPLIT));
    let first = get(&cache, &registry, &weak, &split).unwrap();
    assert_eq!((first.report().read, first.report().shared), (split.bytes(), 0));
    let second = get(&cache, &registry, &full, &split).unwrap();
    let targets: u64 =
        full.weights.patches().iter().map(|(tensor, _)| full.layout().tensor(tensor).unwrap().bytes).sum();
    assert_eq!((second.report().read, second.report().shared), (targets, split.bytes() - targets));
    assert!(second.report().to_string().contains("shared with another model"), "{}", second.report());
    // The entry is the new one, and its own bytes are what the old one has not.
    let entry = &cache.list()[0];
    assert_eq!((entry.own.values().sum::<u64>(), entry.in_use), (targets, true));
    assert!(Arc::ptr_eq(&get(&cache, &registry, &full, &split).unwrap(), &second), "a hit");
    weak.check(&first);
    full.check(&second);
    drop(first);
    assert_eq!(cache.list()[0].own, second.bytes());
    let other = plan(&full, "cuda:0,20kb;cpu,*");
    let third = get(&cache, &registry, &full, &other).unwrap();
    assert_eq!(third.report().read, 0, "another plan");
    assert!(third.report().copied > 0 && third.report().shared > 0);
    drop(second);
    check_streamed(&third, &full);
    drop(third);
    cache.unload_everything();
    comes_back(&registry);
}

/// A machine whose card holds this plan and so many bytes more.
fn tight(plan: &Plan, more: u64) -> Registry {
    let card = format!("cuda:0={}b,link=10", plan.device(GPU0).unwrap().needed() + more);
    Registry::described(described(&["cpu=64mb", "xpu:0=24mb", &card]), Clock::Wall)
}

#[test]
fn what_does_not_fit_beside_its_predecessor_takes_its_place_when_nobody_uses_it() {
    let case = OneLayerPatched::new(112);
    let (weak, full) = (case.at(0.9), case.at(1.0));
    let resident = plan(&weak, "cuda:0,*");
    let registry = tight(&resident, 0);
    let cache = ModelCache::new();
    let user = get(&cache, &registry, &weak, &resident).unwrap();
    let error = get(&cache, &registry, &full, &resident).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert!(Arc::ptr_eq(&cache.get("m").unwrap(), &user), "one that is used stays");
    weak.check(&user);
    drop(user);
    let model = get(&cache, &registry, &full, &resident).unwrap();
    assert_eq!(model.report().read, resident.bytes(), "loaded whole, once the other was gone");
    full.check(&model);
    drop(model);
    // It went, and then the load failed: the error says so, and the key is free.
    let identity = Identity::of(&weak.weights, &resident);
    let mut calls = 0;
    let error = cache.get_or_load("m", &identity, Retention::Keep, |base| {
        calls += 1;
        match base {
            Some(base) => Loader::new(&registry).derive(base, &weak.weights, &resident),
            None => Err(Error::Invalid { reason: "on purpose".into() }),
        }
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("was let go") && text.contains("on purpose"), "{text}");
    assert_eq!((calls, cache.list().len()), (2, 0));
    comes_back(&registry);
}

#[test]
fn a_failed_derivation_leaves_the_entry_as_it_was() {
    let case = OneLayerPatched::new(114);
    let (weak, full) = (case.at(0.9), case.at(1.0));
    let split = plan(&weak, SPLIT);
    let watched = Watched::new(machine(), Clock::Virtual);
    open_all(&watched.registry);
    let cache = ModelCache::new();
    let handle = Arc::as_ptr(&get(&cache, &watched.registry, &weak, &split).unwrap());
    let level = levels(&watched.registry);
    let mut failures = 0;
    for nth in 1.. {
        watched.countdown.fail_nth(nth);
        let Err(error) = get(&cache, &watched.registry, &full, &split) else { break };
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
        failures += 1;
        let entry = cache.get("m").unwrap();
        assert_eq!((Arc::as_ptr(&entry), levels(&watched.registry)), (handle, level.clone()), "operation {nth}");
    }
    assert!(failures > 5, "{failures}");
    watched.countdown.fail_nth(1 << 60);
    full.check(&cache.get("m").unwrap());
    cache.unload_everything();
    comes_back(&watched.registry);
}

/// A cache of these keys, all kept and none used, with an identity each.
fn filled(registry: &Registry, subject: &Subject, plan: &Plan, keys: &str) -> ModelCache {
    let cache = ModelCache::new();
    let identity = Identity::of(&subject.weights, plan);
    for key in keys.chars() {
        let load = |_: Option<&_>| Loader::new(registry).workers(1).load(&subject.weights, plan);
        cache.get_or_load(&key.to_string(), &identity, Retention::Keep, load).unwrap();
    }
    cache
}

fn names(list: &[Unloaded]) -> String {
    list.iter().map(|unloaded| unloaded.key.as_str()).collect()
}

fn charged(registry: &Registry, id: DeviceId) -> u64 {
    registry.device(id).unwrap().ledger().charged()
}

#[test]
fn room_is_made_by_demotion_before_anything_is_dropped() {
    let subject = OneLayerPatched::new(120).at(1.0);
    let resident = plan(&subject, "cuda:0,*");
    let one = resident.device(GPU0).unwrap().needed();
    for clock in [Clock::Wall, Clock::Virtual] {
        let card = format!("cuda:0={}b,link=10", 3 * one);
        let registry = Registry::described(described(&["cpu=64mb", &card]), clock);
        let cache = filled(&registry, &subject, &resident, "abc");
        let demoted = resident.demoted(subject.layout(), registry.machine()).unwrap();
        let frees = one - demoted.slots().bytes();
        // Kept models neither go nor move unless that is allowed.
        let refused = cache.make_room(&registry, GPU0, 1, Evict::Flagged).unwrap_err();
        let cause = std::error::Error::source(&refused).and_then(|cause| cause.downcast_ref::<Error>());
        assert_eq!(cause.map(Error::kind), Some(ErrorKind::NoRoom));
        assert_eq!((refused.error.kind(), *refused.report), (ErrorKind::NoRoom, UnloadReport::default()));
        // Used longest ago: b, since a is used now and c is in use.
        let user = cache.get("c").unwrap();
        drop(cache.get("a"));
        let report = cache.make_room(&registry, GPU0, frees, Evict::Demote).unwrap();
        assert_eq!((names(&report.demoted), names(&report.unloaded)), ("b".to_owned(), String::new()));
        assert_eq!(report.freed(), [(GPU0, frees)].into());
        assert!(report.to_string().contains("demoted b (freed "), "{report}");
        assert_eq!((charged(&registry, GPU0), charged(&registry, CPU)), (3 * one - frees, resident.bytes()));
        let model = cache.get("b").unwrap();
        assert_eq!(model.plan(), &demoted);
        check_streamed(&model, &subject);
        drop(model);
        // A demoted model cannot be demoted again, and a used one not at all.
        drop(cache.get("a"));
        let report = cache.make_room(&registry, GPU0, 2 * frees, Evict::Demote).unwrap();
        assert_eq!(names(&report.demoted), "a");
        let full = cache.make_room(&registry, GPU0, 2 * frees + 1, Evict::Demote).unwrap_err();
        assert!(matches!(full.error, Error::NoRoom(ref room) if room.short == 1), "{}", full.error);
        // What goes is the fewest, used longest ago.
        let report = cache.make_room(&registry, GPU0, 2 * frees + 1, Evict::Kept).unwrap();
        assert_eq!(
            (names(&report.unloaded), names(&report.demoted), report.kept.join("")),
            ("b".into(), "".into(), "ac".into())
        );
        drop(user);
        // A request with the former plan has it on the card again, from the host's memory.
        let before = cache.get("a").unwrap().plan().clone();
        let identity = Identity::of(&subject.weights, &resident);
        let again = cache.get_or_load("a", &identity, Retention::Keep, |base| {
            Loader::new(&registry).derive(base, &subject.weights, &resident)
        });
        let again = again.unwrap();
        assert_eq!((again.report().read, again.report().copied), (0, resident.bytes()));
        assert!(again.plan() == &resident && before == demoted);
        check_streamed(&again, &subject);
        drop(again);
        cache.full_cleanup(&registry).unwrap();
        cache.unload_everything();
        comes_back(&registry);
    }
}

/// Small modules share memory on the host that had some of their own on the card: the bytes are the same to a clean-up.
#[test]
fn a_demoted_model_holds_what_it_held() {
    let subject = Subject::patched(&norms(3), 121);
    let registry = Registry::described(machine(), Clock::Wall);
    let cache = filled(&registry, &subject, &plan(&subject, "cuda:0,*"), "a");
    cache.full_cleanup(&registry).unwrap();
    let free = registry.device(GPU0).unwrap().memory().unwrap().available();
    cache.make_room(&registry, GPU0, free + 1, Evict::Demote).unwrap();
    let model = cache.get("a").unwrap();
    let norm = |index: u64| model.tensor(&format!("model.layers.1.norm_{index}.weight")).unwrap();
    assert!(norm(0).device() == CPU && norm(0).buf().is_same(norm(9).buf()));
    check_streamed(&model, &subject);
    drop(model);
    cache.full_cleanup(&registry).unwrap();
    cache.unload_everything();
    comes_back(&registry);
}

#[test]
fn models_are_demoted_only_as_far_as_the_host_has_room() {
    let subject = OneLayerPatched::new(121).at(1.0);
    let resident = plan(&subject, "cuda:0,*");
    let one = resident.device(GPU0).unwrap().needed();
    let (host, card) = (format!("cpu={}b", resident.bytes() * 3 / 2), format!("cuda:0={}b,link=10", 2 * one));
    let registry = Registry::described(described(&[&host, &card]), Clock::Virtual);
    let cache = filled(&registry, &subject, &resident, "ab");
    let demoted = resident.demoted(subject.layout(), registry.machine()).unwrap();
    let frees = one - demoted.slots().bytes();
    let full = cache.make_room(&registry, GPU0, 2 * frees, Evict::Demote).unwrap_err();
    assert_eq!((full.error.kind(), *full.report), (ErrorKind::NoRoom, UnloadReport::default()), "both do not fit");
    assert_eq!((charged(&registry, GPU0), charged(&registry, CPU)), (2 * one, 0), "so none is moved");
    let report = cache.make_room(&registry, GPU0, one + 1, Evict::Kept).unwrap();
    assert_eq!((names(&report.unloaded), names(&report.demoted)), ("a".to_owned(), "b".to_owned()));
    subject.check(&cache.get("b").unwrap());
}

/// Memory that several models share goes with the last of them, and is reckoned so.
#[test]
fn shared_memory_counts_once() {
    let case = OneLayerPatched::new(122);
    let (weak, full) = (case.at(0.9), case.at(1.0));
    let resident = plan(&weak, "cuda:0,*");
    let one = resident.device(GPU0).unwrap().needed();
    let targets: u64 =
        full.weights.patches().iter().map(|(tensor, _)| full.layout().tensor(tensor).unwrap().bytes).sum();
    let registry = tight(&resident, targets);
    let cache = ModelCache::new();
    let first = get(&cache, &registry, &weak, &resident).unwrap();
    let second = Loader::new(&registry).derive(&first, &full.weights, &resident).unwrap();
    drop(first);
    cache.insert("n", Arc::new(second), Retention::Unload);
    cache.flag("m", Retention::Unload).unwrap();
    assert_eq!(charged(&registry, GPU0), one + targets);
    let full = cache.make_room(&registry, GPU0, one + targets + 1, Evict::Flagged).unwrap_err();
    let Error::NoRoom(room) = full.error else { panic!("{}", full.error) };
    assert_eq!((room.short, room.others, room.holders.len()), (one + targets + 1, 0, 2));
    // One of the two frees what it has alone; a byte more takes both.
    let report = cache.make_room(&registry, GPU0, targets, Evict::Flagged).unwrap();
    assert_eq!((names(&report.unloaded), report.freed()), ("m".to_owned(), [(GPU0, targets)].into()));
    let report = cache.make_room(&registry, GPU0, targets + 1, Evict::Flagged).unwrap();
    assert_eq!((names(&report.unloaded), report.freed()), ("n".to_owned(), [(GPU0, one)].into()));
    comes_back(&registry);
}

/// Whatever operation fails while a kept model is demoted, it can be read, and no other memory is taken.
#[test]
fn a_kept_model_outlives_every_failure_of_its_demotion() {
    let subject = OneLayerPatched::new(123).at(1.0);
    let resident = plan(&subject, "cuda:0,*");
    let card = format!("cuda:0={}b,link=10", resident.device(GPU0).unwrap().needed());
    let (mut failures, mut parked) = (0, 0);
    for nth in 1.. {
        let watched = Watched::new(described(&["cpu=64mb", &card]), Clock::Virtual);
        open_all(&watched.registry);
        let cache = filled(&watched.registry, &subject, &resident, "a");
        let handle = Arc::as_ptr(&cache.get("a").unwrap());
        let before = watched.countdown.calls();
        watched.countdown.fail_nth(nth);
        let outcome = cache.make_room(&watched.registry, GPU0, 1 << 10, Evict::Demote);
        let ended = watched.countdown.calls() - before < nth;
        watched.countdown.fail_nth(1 << 60);
        let model = cache.get("a").expect("a kept model stays");
        subject.check(&model);
        if outcome.is_err() && Arc::as_ptr(&model) == handle {
            check_streamed(&model, &subject);
        }
        let waits = model.plan().assignments().iter().all(|a| a.usage == Use::InPlace);
        failures += u64::from(outcome.is_err());
        parked += u64::from(waits);
        let holds = model.bytes();
        for (id, taken) in levels(&watched.registry) {
            assert_eq!(taken, holds.get(&id).copied().unwrap_or(0), "operation {nth}: {id}");
        }
        if waits {
            // The next request derives from it, as from any other.
            let again = Loader::new(&watched.registry).derive(&model, &subject.weights, &resident).unwrap();
            assert_eq!(again.report().read, 0);
        }
        drop(model);
        cache.unload_everything();
        comes_back(&watched.registry);
        if ended {
            break;
        }
    }
    assert!(failures > 10 && parked > 0, "{failures} failed, {parked} waited on the host");
}

/// The same where an operation panics, and where the card fails while bytes leave it.
#[test]
fn a_kept_model_outlives_every_panic_of_its_demotion() {
    let subject = OneLayerPatched::new(126).at(1.0);
    let resident = plan(&subject, "cuda:0,*");
    let card = format!("cuda:0={}b,link=10", resident.device(GPU0).unwrap().needed());
    let attempt = |prepare: &dyn Fn(&Watched), what: &str| {
        let watched = Watched::new(described(&["cpu=64mb", &card]), Clock::Virtual);
        open_all(&watched.registry);
        let cache = filled(&watched.registry, &subject, &resident, "a");
        prepare(&watched);
        let make_room = || cache.make_room(&watched.registry, GPU0, 1 << 10, Evict::Demote);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make_room));
        watched.copies.panic_at_nth(1 << 60);
        let model = cache.get("a").expect("a kept model stays");
        subject.check(&model);
        let (moved, holds) = (model.plan() != &resident, model.bytes());
        for (id, taken) in levels(&watched.registry) {
            assert_eq!(taken, holds.get(&id).copied().unwrap_or(0), "{what}: {id}");
        }
        if let Ok(made) = &outcome {
            let report = made.as_ref().unwrap_or_else(|unfinished| &unfinished.report);
            assert_eq!(names(&report.demoted), if moved { "a" } else { "" }, "{what}");
        }
        drop(model);
        // It can be had as it was before, whatever it is now.
        let identity = Identity::of(&subject.weights, &resident);
        let again = cache.get_or_load("a", &identity, Retention::Keep, |base| {
            Loader::new(&watched.registry).derive(base, &subject.weights, &resident)
        });
        (outcome.is_err(), moved, again.is_ok_and(|model| model.plan() == &resident))
    };
    let (mut panics, mut moved_all_the_same) = (0, 0);
    for nth in 1.. {
        let prepare = |watched: &Watched| watched.copies.panic_at_nth(nth);
        let (panicked, moved, again) = attempt(&prepare, &format!("a panic at operation {nth}"));
        assert!(again, "operation {nth}");
        if !panicked {
            assert!(moved);
            break;
        }
        (panics, moved_all_the_same) = (panics + 1, moved_all_the_same + u64::from(moved));
    }
    assert!(panics > 10 && moved_all_the_same > 0, "{panics} panics, after {moved_all_the_same} it had moved");
    for nth in 1..=5 {
        let prepare = |watched: &Watched| watched.copies.lose_at_nth(GPU0, nth);
        let (panicked, moved, again) = attempt(&prepare, &format!("the card fails at copy {nth}"));
        assert_eq!((panicked, moved, again), (false, false, false), "copy {nth}");
    }
}

/// Models are demoted, asked for with other plans, and used, by several threads at once: each has its bytes throughout.
#[test]
fn threads_use_models_that_are_demoted() {
    let case = OneLayerPatched::new(124);
    let subjects = [case.at(0.9), case.at(1.0)];
    let resident = plan(&subjects[0], "cuda:0,*");
    let one = resident.device(GPU0).unwrap().needed();
    let card = format!("cuda:0={}b,link=10", 3 * one);
    let registry = Registry::described(described(&["cpu=64mb", &card]), Clock::Wall);
    let cache = filled(&registry, &subjects[0], &resident, "m");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (cache, registry, subjects, resident) = (&cache, &registry, &subjects, &resident);
            scope.spawn(move || {
                for round in 0..30 {
                    let subject = &subjects[(round + thread) % 2];
                    match get(cache, registry, subject, resident) {
                        Ok(model) => subject.check(&model),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}"),
                    }
                    if round % 3 == 0 {
                        let made = cache.make_room(registry, GPU0, 2 * one + 1, Evict::Demote);
                        let error = made.err().map(|unfinished| unfinished.error.kind());
                        assert!(error.is_none_or(|kind| kind == ErrorKind::NoRoom || kind == ErrorKind::OutOfMemory));
                    }
                    assert!(cache.get("m").is_some(), "a kept model cannot disappear");
                }
            });
        }
    });
    cache.unload_everything();
    comes_back(&registry);
}

/// One copy on the host, two compute devices that stream it at the same time.
#[test]
fn two_compute_devices_stream_one_host_copy() {
    let case = OneLayerPatched::new(125);
    let (subject, other) = (case.at(1.0), case.at(0.5));
    for clock in [Clock::Wall, Clock::Virtual] {
        let registry = Registry::described(machine(), clock);
        let on = |device: DeviceId, allocation: &str| {
            subject.planner(&machine(), allocation).compute(device).depth(1).plan().unwrap()
        };
        let (first_plan, second_plan) = (on(GPU0, "cuda:0,10kb;cpu,*"), on(GPU1, "cuda:1,10kb;cpu,*"));
        let loader = Loader::new(&registry).workers(2);
        let first = Arc::new(loader.load(&subject.weights, &first_plan).unwrap());
        let host = charged(&registry, CPU);
        let second = Arc::new(loader.derive(&first, &subject.weights, &second_plan).unwrap());
        assert_eq!(charged(&registry, CPU), host, "one copy");
        assert_eq!((second.report().read, second.report().shared), (0, host));
        assert_eq!(charged(&registry, GPU1), second.bytes()[&GPU1]);
        // Another generation on the second device leaves the first one's bytes alone.
        let changed = Arc::new(loader.derive(&second, &other.weights, &second_plan).unwrap());
        std::thread::scope(|scope| {
            for (model, of) in [(&first, &subject), (&changed, &other)] {
                scope.spawn(move || (0..10).for_each(|_| check_streamed(model, of)));
            }
        });
        assert_eq!((hash(&first), hash(&second), hash(&changed)), (subject.hash(), subject.hash(), other.hash()));
        // The copy goes with the last of them.
        drop((first, changed));
        check_streamed(&second, &subject);
        assert_eq!(charged(&registry, CPU), host);
        drop(second);
        comes_back(&registry);
    }
}
