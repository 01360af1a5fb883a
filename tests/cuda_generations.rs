//! Models made out of models over CUDA devices: other strengths, demotion, two cards on one host copy, a card that is
//! lost, and a failure at every call.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::sync::Arc;

use card::{
    DEADLINE, assert_clean, assert_comes_to, assert_given_back, driver, has_devices, registry, spread, stand_in,
};
use cuda_standin::{Config, Effect, Fault, FaultPlan};
use support::{CPU, GPU0, GPU1, Subject, check_streamed, hash, llama, lora, safetensors};
use tensor_offload::cache::{Evict, Identity};
use tensor_offload::{
    Adapter, Checkpoint, DType, DeviceId, ErrorKind, Loader, Matching, Model, ModelCache, Plan, Planner, Registry,
    Result, Retention, Weights,
};

/// A model, and the same with an adapter on one of its layers.
struct Case {
    plain: Subject,
    patched: Subject,
}

impl Case {
    fn new() -> Case {
        let tensors = llama(3, 32);
        let checkpoint = Checkpoint::from_bytes("model", safetensors(&tensors, 130)).unwrap();
        let layer: Vec<_> = tensors.into_iter().filter(|tensor| tensor.name.contains("layers.1.")).collect();
        let adapter = Adapter::from_checkpoint(lora(&layer, DType::F32, 3, 131), 0.75).unwrap();
        let of = |adapters| {
            let weights = Weights::patched(checkpoint.clone(), adapters, Matching::Strict).unwrap();
            Subject::new(weights)
        };
        Case { plain: of(vec![]), patched: of(vec![adapter]) }
    }

    fn plan(&self, devices: &Registry, compute: DeviceId, allocation: &str) -> Plan {
        let planner = Planner::new(self.plain.layout(), devices.machine()).compute(compute);
        planner.allocation(allocation.parse().unwrap()).depth(1).plan().unwrap()
    }
}

fn loader(devices: &Registry) -> Loader<'_> {
    Loader::new(devices).workers(1).deadline(DEADLINE)
}

fn load(devices: &Registry, subject: &Subject, plan: &Plan) -> Result<Arc<Model>> {
    loader(devices).load(&subject.weights, plan).map(Arc::new)
}

fn derive(devices: &Registry, base: &Arc<Model>, subject: &Subject, plan: &Plan) -> Result<Arc<Model>> {
    loader(devices).derive(base, &subject.weights, plan).map(Arc::new)
}

#[test]
fn cuda_generations_share_what_does_not_change() {
    let cuda = driver(&Config::with_devices(&[64 << 20, 64 << 20]).all_peers().late_micros(500));
    if !has_devices(2) {
        return;
    }
    let (devices, case) = (registry(), Case::new());
    for allocation in ["cuda:0,*", "cuda:0,30kb;cpu,*", "cuda:0,20kb;cuda:1,30kb;cpu,*", "cpu,*"] {
        let plan = case.plan(&devices, GPU0, allocation);
        let plain = load(&devices, &case.plain, &plan).unwrap();
        let patched = derive(&devices, &plain, &case.patched, &plan).unwrap();
        let report = patched.report();
        assert_eq!((report.read + report.shared, report.copied), (plan.bytes(), 0), "{allocation}");
        assert_eq!(report.patched, case.patched.weights.patches().iter().count());
        check_streamed(&plain, &case.plain);
        check_streamed(&patched, &case.patched);
        let removed = derive(&devices, &patched, &case.plain, &plan).unwrap();
        assert_eq!(hash(&removed), hash(&plain));
        // Every way: to the host, between the cards, from the host.
        for other in ["cpu,*", "cuda:1,*", "cuda:0,10kb;cuda:1,10kb;cpu,*", "cuda:0,*"] {
            let other = case.plan(&devices, GPU0, other);
            let moved = derive(&devices, &patched, &case.patched, &other).unwrap();
            assert_eq!(moved.report().read, 0);
            check_streamed(&moved, &case.patched);
        }
    }
    [CPU, GPU0, GPU1].iter().for_each(|&id| assert_comes_to(&devices, None, id, 0, "at the end"));
    drop(devices);
    cuda.assert_clean();
}

#[test]
fn cuda_without_peer_access_bytes_go_through_the_host() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20, 64 << 20])) else { return };
    let (devices, case) = (registry(), Case::new());
    let from = case.plan(&devices, GPU0, "cuda:0,30kb;cuda:1,30kb;cpu,*");
    let base = load(&devices, &case.patched, &from).unwrap();
    for to in ["cuda:1,*", "cuda:0,*"] {
        let moved = loader(&devices).relocate(&base, &case.plan(&devices, GPU0, to)).map(Arc::new).unwrap();
        assert_eq!(moved.report().read, 0);
        check_streamed(&moved, &case.patched);
    }
    drop((base, devices));
    assert_clean(&cuda);
}

#[test]
fn cuda_two_cards_stream_one_host_copy() {
    let cuda = driver(&Config::with_devices(&[64 << 20, 64 << 20]).late_micros(300));
    if !has_devices(2) {
        return;
    }
    let (devices, case) = (registry(), Case::new());
    let plans = [(GPU0, "cuda:0,10kb;cpu,*"), (GPU1, "cuda:1,10kb;cpu,*")].map(|(id, a)| case.plan(&devices, id, a));
    let first = load(&devices, &case.patched, &plans[0]).unwrap();
    let host = plans[0].device(CPU).unwrap().weights.bytes;
    let second = derive(&devices, &first, &case.patched, &plans[1]).unwrap();
    assert_eq!((second.report().read, second.report().shared), (0, host));
    assert_comes_to(&devices, None, CPU, host, "one copy");
    std::thread::scope(|scope| {
        for model in [&first, &second] {
            scope.spawn(|| (0..5).for_each(|_| check_streamed(model, &case.patched)));
        }
    });
    drop(first);
    check_streamed(&second, &case.patched);
    drop((second, devices));
    cuda.assert_clean();
}

/// The disk's streams cannot read a card's memory, so what moves there goes through the host.
#[test]
fn cuda_a_model_moves_to_disk_and_back() {
    let cuda = driver(&Config::with_devices(&[64 << 20]).late_micros(300));
    let (devices, case) = (registry(), Case::new());
    let [on_card, on_disk] = ["cuda:0,*", "disk,*"].map(|allocation| case.plan(&devices, GPU0, allocation));
    let base = load(&devices, &case.patched, &on_card).unwrap();
    let moved = Arc::new(loader(&devices).relocate(&base, &on_disk).unwrap());
    check_streamed(&moved, &case.patched);
    let back = Arc::new(loader(&devices).relocate(&moved, &on_card).unwrap());
    drop((base, moved));
    check_streamed(&back, &case.patched);
    drop((back, devices));
    cuda.assert_clean();
}

#[test]
fn cuda_room_is_made_by_demotion() {
    let cuda = driver(&Config::with_devices(&[64 << 20]).late_micros(500));
    let (devices, case) = (registry(), Case::new());
    let plan = case.plan(&devices, GPU0, "cuda:0,*");
    let cache = ModelCache::new();
    cache.insert("a", load(&devices, &case.plain, &plan).unwrap(), Retention::Keep);
    let card = devices.device(GPU0).unwrap();
    let (one, all) = (card.ledger().charged(), card.memory().unwrap().available());
    let slots = plan.demoted(case.plain.layout(), devices.machine()).unwrap().slots().bytes();
    // A card counts free memory in pieces larger than this model, so what the ledger has is looked at.
    let report = cache.make_room(&devices, GPU0, all + 1, Evict::Demote);
    let report = report.unwrap_or_else(|unfinished| *unfinished.report);
    assert_eq!(report.demoted.len(), 1, "{report}");
    assert_comes_to(&devices, None, GPU0, slots, "demoted");
    assert!(slots < one);
    let model = cache.get("a").unwrap();
    check_streamed(&model, &case.plain);
    drop((model, cache, card, devices));
    cuda.assert_clean();
}

/// A card that fails for good: its models say so, and are placed on the other card from the host's memory, and from the
/// files what only the lost card had.
#[test]
fn cuda_models_of_a_lost_card_are_placed_elsewhere() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20, 64 << 20])) else { return };
    let (devices, case) = (registry(), Case::new());
    let cache = ModelCache::new();
    let get = |subject: &Subject, plan: &Plan| {
        let identity = Identity::of(&subject.weights, plan);
        cache.get_or_load("m", &identity, Retention::Keep, |base| loader(&devices).derive(base, &subject.weights, plan))
    };
    let lost_plan = case.plan(&devices, GPU0, "cuda:0,30kb;cpu,*");
    let base = get(&case.patched, &lost_plan).unwrap();
    let (on_card, on_host) =
        (lost_plan.device(GPU0).unwrap().weights.bytes, lost_plan.device(CPU).unwrap().weights.bytes);
    let all_away = load(&devices, &case.patched, &case.plan(&devices, GPU0, "cpu,*")).unwrap();
    drop(base);
    // A call that the load makes and no thread beside it.
    cuda.fault(&FaultPlan::one(Fault::nth("cuMemAllocFromPoolAsync", 1, Effect::Sticky(700))));
    assert!(load(&devices, &case.plain, &lost_plan).is_err());
    assert!(cache.list()[0].lost.is_some());
    // On the lost card nothing can be placed, and the entry stays to be derived from.
    assert!(get(&case.plain, &lost_plan).is_err());
    assert_eq!(cache.list().len(), 1);
    // What only the lost card has cannot come from memory.
    let elsewhere = case.plan(&devices, GPU1, "cuda:1,30kb;cpu,*");
    let error = loader(&devices).relocate(&cache.get("m").unwrap(), &elsewhere).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    let model = get(&case.patched, &elsewhere).unwrap();
    let report = model.report();
    assert_eq!((report.read, report.shared + report.copied), (on_card, on_host), "{report}");
    check_streamed(&model, &case.patched);
    assert!(cache.list()[0].lost.is_none());
    cache.full_cleanup(&devices).unwrap_err();
    assert_eq!(cache.list().len(), 1, "the rest goes on");
    // One that has nothing but slots on the lost card needs no file.
    let moved = loader(&devices).relocate(&all_away, &case.plan(&devices, GPU1, "cpu,*")).map(Arc::new).unwrap();
    assert_eq!((moved.report().read, moved.report().shared), (0, lost_plan.bytes()));
    check_streamed(&moved, &case.patched);
    drop((all_away, moved, model, cache));
    assert_given_back(&devices, &cuda, "a lost card's memory is counted no more");
}

/// A card that fails under a copy to the host, late: the other card's copy of those bytes may count as done.
#[test]
fn cuda_no_model_is_made_of_a_card_that_fails_meanwhile() {
    let case = Case::new();
    let relocate = |nth: Option<u64>| -> Option<u64> {
        let cuda = stand_in(&Config::with_devices(&[64 << 20, 64 << 20]).late_micros(300_000))?;
        let devices = registry();
        let plan = |allocation| case.plan(&devices, GPU0, allocation);
        let base = load(&devices, &case.plain, &plan("cuda:1,*")).unwrap();
        let downloads = || cuda.report().calls_of("cuMemcpyDtoHAsync_v2");
        let before = downloads();
        if let Some(nth) = nth {
            cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyDtoHAsync_v2", nth, Effect::LateSticky(700))));
        }
        let outcome = loader(&devices).relocate(&base, &plan("cuda:0,*"));
        let copies = downloads() - before;
        match nth {
            None => case.plain.check(&outcome.unwrap()),
            Some(nth) => {
                let error = outcome.map(drop).expect_err("a model of bytes that never came");
                assert_eq!(error.kind(), ErrorKind::DeviceLost, "copy {nth}: {error}");
                // All the bytes come from the file, since only the lost card has them.
                let model = derive(&devices, &base, &case.plain, &plan("cuda:0,*")).unwrap();
                assert_eq!(model.report().read, model.plan().bytes());
                case.plain.check(&model);
            }
        }
        drop(base);
        assert_given_back(&devices, &cuda, "nothing is kept");
        Some(copies)
    };
    let Some(copies) = relocate(None) else { return };
    assert!(copies > 5, "{copies} copies");
    for nth in [1, 2, copies / 2, copies - 1, copies] {
        relocate(Some(nth));
    }
}

/// Whatever call of the driver fails while a model is derived or demoted, the base stays usable and nothing is kept.
#[test]
fn cuda_every_failing_call_leaves_the_base_usable() {
    let case = Case::new();
    let session = |fault: Option<(u64, Effect)>| -> Option<(u64, bool)> {
        let cuda = stand_in(&Config::with_devices(&[64 << 20, 64 << 20]).all_peers())?;
        let devices = registry();
        let (from, to) = (
            case.plan(&devices, GPU0, "cuda:0,30kb;cuda:1,20kb;cpu,*"),
            case.plan(&devices, GPU0, "cuda:0,20kb;cuda:1,30kb;cpu,*"),
        );
        let base = load(&devices, &case.plain, &from).unwrap();
        let before: u64 = cuda.report().calls.values().sum();
        if let Some((nth, effect)) = fault {
            cuda.fault(&FaultPlan::one(Fault::any(nth, effect)));
        }
        let attempt = || derive(&devices, &derive(&devices, &base, &case.patched, &from)?, &case.patched, &to);
        let outcome = attempt().map(drop);
        let calls = cuda.report().calls.values().sum::<u64>() - before;
        cuda.fault(&FaultPlan::default());
        let what = format!("{fault:?}, {outcome:?}");
        for (id, bytes) in base.bytes() {
            assert_comes_to(&devices, &cuda, id, bytes, &what);
        }
        check_streamed(&base, &case.plain);
        drop(base);
        assert_given_back(&devices, &cuda, &what);
        Some((calls, outcome.is_err()))
    };
    let Some((calls, false)) = session(None) else { return };
    let mut failures = 0;
    for effect in [Effect::Fail(304), Effect::OutOfMemory] {
        for nth in spread(30, calls) {
            failures += session(Some((nth, effect))).map_or(0, |(_, failed)| usize::from(failed));
        }
    }
    assert!(failures > 10, "{failures} attempts failed");
}
