//! Models made out of models whose tensors are a framework's: other strengths, other plans, another framework, demotion and
//! back, and models that share their slots.

use std::sync::Arc;

use tensor_offload::backend::Clock;
use tensor_offload::cache::{Evict, Identity};
use tensor_offload::load::TensorAllocator;
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{ErrorKind, Model, ModelCache, Plan, Registry, Retention, Streamer};

use super::support::framework::{Framework, Memory};
use super::support::*;
use super::{
    DIVIDED, assert_gone, check_levels, check_levels_settle, check_streams, check_tensors, framework_bytes, loader,
    planner,
};

fn check(model: &Arc<Model>, framework: &Framework, subject: &Subject) {
    check_tensors(framework, subject, model);
    subject.check(model);
    check_streams(model, subject, framework.device() == model.plan().compute());
}

/// From the same framework what is unchanged is shared, the slots, too; from another one nothing is, and the base stays as it
/// was; without one the memory is the library's.
#[test]
fn another_strength_shares_what_is_unchanged_and_of_the_same_framework() {
    let case = OneLayerPatched::new(91);
    let (weak, strong) = (case.at(0.5), case.at(1.0));
    let machine = machine();
    for grouping in DIVIDED {
        for (compute, allocation) in [(CPU, "cpu,50%;disk,50%"), (GPU0, "cuda:0,50%;cpu,30%;xpu:0,20%")] {
            let registry = Registry::described(machine.clone(), Clock::Wall);
            open_all(&registry);
            let plan = planner(&weak, &machine, compute, allocation).grouping(grouping).depth(1).plan().unwrap();
            let new = || Framework::new(compute, grouping, Memory::Locked);
            let (own, other) = (new(), new());
            let base = Arc::new(loader(&registry, &[&own]).load(&weak.weights, &plan).unwrap());
            let before = (own.live().len(), own.live_bytes());
            let same = Arc::new(loader(&registry, &[&own]).derive(&base, &strong.weights, &plan).unwrap());
            let changed = same.report().read + same.report().copied;
            assert!(same.report().shared > 0 && changed < plan.bytes() / 2, "{}", same.report());
            assert!(own.live_bytes() - before.1 < framework_bytes(&plan, compute) / 2, "slots are shared");
            strong.check(&same);
            weak.check(&base);
            let streamer = Streamer::new(&same).unwrap();
            assert_eq!(Streamer::new(&base).unwrap_err().kind(), ErrorKind::InUse, "one set of slots");
            drop(streamer);
            for _ in 0..2 {
                check_streamed(&base, &weak);
                check_streamed(&same, &strong);
            }
            drop(same);
            assert_eq!((own.live().len(), own.live_bytes()), before);
            let elsewhere = Arc::new(loader(&registry, &[&other]).derive(&base, &strong.weights, &plan).unwrap());
            check(&elsewhere, &other, &strong);
            check(&base, &own, &weak);
            drop(base);
            // Whoever was made of it.
            assert_gone(&own);
            check_levels_settle(&registry, &plan);
            check(&elsewhere, &other, &strong);
            let unowned = Arc::new(loader(&registry, &[]).derive(&elsewhere, &strong.weights, &plan).unwrap());
            drop(elsewhere);
            assert_gone(&other);
            strong.check(&unowned);
            check_streams(&unowned, &strong, false);
            drop(unowned);
            comes_back(&registry);
        }
    }
}

/// From anywhere to anywhere: resident on a card, streamed, used in place on the host in a framework's memory, all on the host.
#[test]
fn a_model_is_relocated_between_frameworks() {
    let subject = Subject::patched(&llama(3, 32), 92);
    let machine = machine();
    let plan = |compute, allocation: &str, grouping, in_place: &str| -> Plan {
        planner(&subject, &machine, compute, allocation).grouping(grouping).in_place(in_place).plan().unwrap()
    };
    let plans = [
        plan(GPU0, "cuda:0,*", DIVIDED[1], "nothing"),
        plan(GPU0, "cpu,*", DIVIDED[1], "*"),
        plan(GPU0, "cuda:0,30%;cpu,70%", DIVIDED[1], "*.mlp.*"),
        plan(CPU, "cpu,30%;disk,70%", DIVIDED[1], "nothing"),
        plan(CPU, "cpu,*", DIVIDED[1], "nothing"),
        plan(GPU0, "xpu:0,50%;cpu,50%", DIVIDED[1], "nothing"),
    ];
    for clock in [Clock::Wall, Clock::Virtual] {
        let registry = Registry::described(machine.clone(), clock);
        open_all(&registry);
        let [host, card] = [CPU, GPU0].map(|id| Framework::new(id, DIVIDED[1], Memory::Locked));
        for (from, to) in plans.iter().flat_map(|from| plans.iter().map(move |to| (from, to))) {
            let loader = loader(&registry, &[&host, &card]);
            let base = Arc::new(loader.load(&subject.weights, from).unwrap());
            let model = Arc::new(loader.relocate(&base, to).unwrap());
            assert_eq!(model.report().read, 0);
            drop(base);
            check_levels_settle(&registry, to);
            [&host, &card].into_iter().for_each(|framework| check_tensors(framework, &subject, &model));
            check_streamed(&model, &subject);
        }
        comes_back(&registry);
        // To memory that is the library's, and is not divided.
        let base = Arc::new(loader(&registry, &[&host, &card]).load(&subject.weights, &plans[2]).unwrap());
        let joined = plan(GPU0, "cuda:0,30%;cpu,70%", TensorGrouping::Joined, "*.mlp.*");
        let model = Arc::new(loader(&registry, &[]).relocate(&base, &joined).unwrap());
        drop(base);
        [&host, &card].into_iter().for_each(|framework| assert_gone(framework));
        check_levels(&registry, &joined);
        check_streamed(&model, &subject);
    }
}

/// A model in a cache whose resident tensors go to the host and come back, with the framework's memory for what stays on the
/// card.
#[test]
fn a_model_of_a_framework_is_demoted_and_comes_back() {
    let subject = OneLayerPatched::new(93).at(1.0);
    for (grouping, clock) in DIVIDED.into_iter().zip([Clock::Wall, Clock::Virtual]) {
        let all = machine();
        let resident = planner(&subject, &all, GPU0, "cuda:0,*").grouping(grouping).depth(1).plan().unwrap();
        let one = resident.device(GPU0).unwrap().needed();
        let card = format!("cuda:0={one}b,link=10");
        let registry = Registry::described(described(&["cpu=64mb", &card]), clock);
        let framework = Framework::new(GPU0, grouping, Memory::Locked);
        let (cache, identity) = (ModelCache::new(), Identity::of(&subject.weights, &resident));
        let get = || {
            cache.get_or_load("m", &identity, Retention::Keep, |base| {
                loader(&registry, &[&framework]).derive(base, &subject.weights, &resident)
            })
        };
        check(&get().unwrap(), &framework, &subject);
        let demoted = resident.demoted(subject.layout(), registry.machine()).unwrap();
        assert_eq!(demoted.grouping(), grouping);
        let report = cache.make_room(&registry, GPU0, one - demoted.slots().bytes(), Evict::Demote).unwrap();
        assert_eq!(report.demoted.len(), 1, "{report}");
        let model = cache.get("m").unwrap();
        assert_eq!(model.plan(), &demoted);
        check_levels_settle(&registry, &demoted);
        check(&model, &framework, &subject);
        assert!(framework.live().iter().all(|tensor| tensor.name.is_none()), "nothing but slots");
        drop(model);
        let model = get().unwrap();
        assert_eq!(model.plan(), &resident);
        check(&model, &framework, &subject);
        drop(model);
        cache.unload_everything();
        comes_back(&registry);
        assert_gone(&framework);
    }
}

/// A plan that leaves the slots to the caller leaves them to the caller still once it is demoted.
#[test]
fn a_plan_without_slots_is_demoted_without_slots() {
    let (subject, machine) = (Subject::plain(&llama(3, 32), 96), machine());
    for grouping in [TensorGrouping::Joined, DIVIDED[0], DIVIDED[1]] {
        let planner = planner(&subject, &machine, GPU0, "cuda:0,30%;cpu,70%").grouping(grouping).external_slots(true);
        let demoted = planner.clone().plan().unwrap().demoted(subject.layout(), &machine).unwrap();
        let (slots, whole) =
            (demoted.slots(), planner.grouping(TensorGrouping::Joined).allocation("cpu,*".parse().unwrap()));
        assert_eq!((slots.bytes(), slots), (0, whole.plan().unwrap().slots()));
    }
}

/// The same model for another framework is another model.
#[test]
fn a_cache_tells_models_of_two_frameworks_apart() {
    let subject = OneLayerPatched::new(94).at(1.0);
    let machine = machine();
    let plan = planner(&subject, &machine, CPU, "cpu,*").grouping(DIVIDED[1]).plan().unwrap();
    let registry = Registry::described(machine, Clock::Wall);
    let cache = ModelCache::new();
    let get = |framework: &Arc<Framework>| {
        let identity = Identity::of(&subject.weights, &plan).allocator(Arc::clone(framework) as _);
        let load = |base: Option<&Arc<Model>>| loader(&registry, &[framework]).derive(base, &subject.weights, &plan);
        cache.get_or_load("m", &identity, Retention::Keep, load).unwrap()
    };
    let [one, other] = [(); 2].map(|()| Framework::new(CPU, DIVIDED[1], Memory::Locked));
    let first = get(&one);
    assert!(Arc::ptr_eq(&first, &get(&one)));
    drop(first);
    let second = get(&other);
    check(&second, &other, &subject);
    assert_gone(&one);
}

/// Kept models are read at each clean-up where they live, a framework's memory, too; one that cannot be read is named.
#[test]
fn a_clean_up_reads_memory_of_a_framework() {
    let subject = OneLayerPatched::new(95).at(1.0);
    let machine = machine();
    let places = [(CPU, "cpu,*", "nothing"), (GPU0, "cpu,*", "*"), (GPU0, "cuda:0,*", "nothing")];
    for ((compute, allocation, in_place), memory) in
        places.into_iter().zip([Memory::Locked, Memory::Locked, Memory::Lent])
    {
        let registry = Registry::described(machine.clone(), Clock::Wall);
        let planner = planner(&subject, &machine, compute, allocation).grouping(DIVIDED[1]).in_place(in_place);
        let [host, card] = [CPU, GPU0].map(|id| Framework::new(id, DIVIDED[1], memory));
        let model = loader(&registry, &[&host, &card]).load(&subject.weights, &planner.plan().unwrap()).unwrap();
        let cache = ModelCache::new();
        drop(cache.insert("m", Arc::new(model), Retention::Keep));
        for _ in 0..2 {
            cache.full_cleanup(&registry).unwrap();
        }
        if memory == Memory::Locked {
            host.live().last().unwrap().lose();
            let error = cache.full_cleanup(&registry).unwrap_err();
            assert_eq!(error.error.kind(), ErrorKind::ModelsLost, "{}", error.error);
        }
        cache.unload_everything();
        comes_back(&registry);
        [&host, &card].into_iter().for_each(|framework| assert_gone(framework));
    }
}
