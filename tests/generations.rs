//! Models made out of models in the cache: other strengths and plans of a key, room by demotion, several compute devices,
//! devices that are lost.

mod support;

use std::sync::Arc;

use support::watched::Watched;
use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::{
    Adapter, Checkpoint, DType, Error, ErrorKind, Identity, Loader, Matching, Model, ModelCache, Patches, Plan,
    Registry, Result, Retention, Streamer,
};

/// A checkpoint, and an adapter for one of its layers.
struct Case {
    checkpoint: Checkpoint,
    factors: Checkpoint,
}

impl Case {
    fn new(seed: u64) -> Case {
        let tensors = llama(3, 32);
        let checkpoint = Checkpoint::from_bytes("model", safetensors(&tensors, seed)).unwrap();
        let layer: Vec<_> = tensors.into_iter().filter(|tensor| tensor.name.contains("layers.1.")).collect();
        Case { checkpoint, factors: lora(&layer, DType::F32, 3, seed + 1) }
    }

    /// The checkpoint with the adapter at a strength; zero for none.
    fn at(&self, strength: f32) -> Subject {
        let adapter = Adapter::from_checkpoint(self.factors.clone(), strength).unwrap();
        let adapters = if strength == 0.0 { vec![] } else { vec![adapter] };
        let patches = Patches::resolve(self.checkpoint.layout(), adapters, Matching::Strict).unwrap();
        Subject::new(self.checkpoint.clone(), patches)
    }
}

fn plan(subject: &Subject, allocation: &str) -> Plan {
    subject.planner(&machine(), allocation).depth(1).plan().unwrap()
}

fn get(cache: &ModelCache, registry: &Registry, subject: &Subject, plan: &Plan) -> Result<Arc<Model>> {
    let identity = Identity::of(&subject.checkpoint, &subject.patches, plan);
    cache.get_or_load("m", &identity, Retention::Keep, |base| {
        Loader::new(registry).workers(1).derive(base, &subject.checkpoint, &subject.patches, plan)
    })
}

fn stream(model: &Arc<Model>, subject: &Subject) {
    let mut streamer = Streamer::new(model).unwrap();
    for layer in 0..model.layout().layers.len() {
        let guard = streamer.layer(layer).unwrap();
        for tensor in guard.tensors() {
            let mut bytes = vec![0; tensor.place().len()];
            guard.read(&tensor.info().name, &mut bytes).unwrap();
            assert!(bytes == subject.bytes_of(&tensor.info().name), "{}", tensor.info().name);
        }
    }
}

const SPLIT: &str = "cuda:0,30kb;xpu:0,10kb;cpu,*";

#[test]
fn a_key_with_another_strength_or_plan_derives_from_its_entry() {
    let case = Case::new(110);
    let (weak, full) = (case.at(0.9), case.at(1.0));
    let registry = Registry::described(machine(), Clock::Wall);
    let (cache, split) = (ModelCache::new(), plan(&weak, SPLIT));
    let first = get(&cache, &registry, &weak, &split).unwrap();
    assert_eq!((first.report().read, first.report().shared), (split.bytes(), 0));
    let second = get(&cache, &registry, &full, &split).unwrap();
    let targets: u64 = full.patches.iter().map(|(tensor, _)| full.layout().tensors[tensor].bytes).sum();
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
    stream(&third, &full);
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
    let case = Case::new(112);
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
    let identity = Identity::of(&weak.checkpoint, &weak.patches, &resident);
    let mut calls = 0;
    let error = cache.get_or_load("m", &identity, Retention::Keep, |base| {
        calls += 1;
        match base {
            Some(base) => Loader::new(&registry).derive(base, &weak.checkpoint, &weak.patches, &resident),
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
    let case = Case::new(114);
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
