//! The cache over CUDA devices: the clean-up cases, room, a card that is lost, and a failure at every call.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use card::{DEADLINE, assert_clean, assert_comes_to, assert_given_back, driver, registry_of, spread, stand_in};
use cuda_standin::{Config, Effect, Fault, FaultPlan};
use tensor_offload::backend::Cuda;
use tensor_offload::cache::{Evict, FreeRequest};
use tensor_offload::{
    ByteSize, Checkpoint, DeviceId, Error, Loader, Model, ModelCache, Planner, Registry, Result, Retention, Streamer,
    Weights,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
const CARD: DeviceId = DeviceId::cuda(0);

fn registry() -> Registry {
    // The stand-in's contexts take nothing of its small cards.
    registry_of(Cuda::new().context_size(ByteSize(0)))
}

fn one_card() -> Config {
    Config::with_devices(&[64 << 20])
}

fn checkpoint() -> &'static Checkpoint {
    static CHECKPOINT: OnceLock<Checkpoint> = OnceLock::new();
    CHECKPOINT.get_or_init(|| Checkpoint::open(MODEL).unwrap())
}

fn load_as(devices: &Registry, allocation: &str) -> Result<Arc<Model>> {
    let weights = Weights::new(checkpoint().clone());
    let planner = Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse()?).depth(1);
    let plan = planner.compute(if allocation == "cpu,*" { DeviceId::CPU } else { CARD }).plan()?;
    Loader::new(devices).workers(1).deadline(DEADLINE).load(&weights, &plan).map(Arc::new)
}

fn load(devices: &Registry) -> Result<Arc<Model>> {
    load_as(devices, "cuda:0,60kb;cpu,*")
}

/// A cache of models `a`, `b`, …, those in `flagged` to go.
fn filled(devices: &Registry, names: &str, flagged: &str) -> ModelCache {
    let cache = ModelCache::new();
    for name in names.chars() {
        let retention = if flagged.contains(name) { Retention::Unload } else { Retention::Keep };
        cache.insert(name, load(devices).unwrap(), retention);
    }
    cache
}

/// Every tensor of the model is as in its file, and its layers can be streamed.
fn check(model: &Arc<Model>) {
    for (index, tensor) in checkpoint().layout().tensor_ids().zip(checkpoint().layout().tensors()) {
        let (mut stored, mut read) = (vec![0; tensor.bytes as usize], vec![0; tensor.bytes as usize]);
        checkpoint().read(index, &mut stored).unwrap();
        model.read(&tensor.name, &mut read).unwrap();
        assert!(stored == read, "{}", tensor.name);
    }
    let mut streamer = Streamer::new(model).unwrap();
    model.layout().layer_ids().for_each(|layer| drop(streamer.layer(layer).unwrap()));
}

fn held(cache: &ModelCache) -> String {
    cache.list().into_iter().map(|info| info.key).collect()
}

/// Waits until this much is taken of a device: memory comes back when the last event of its use has been seen.
fn comes_to(devices: &Registry, id: DeviceId, bytes: u64, what: &str) {
    let until = Instant::now() + DEADLINE;
    let device = devices.device(id).unwrap();
    while device.ledger().charged() != bytes {
        assert!(Instant::now() < until, "{what}: {} bytes of {id} are taken, not {bytes}", device.ledger().charged());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn all_back(devices: &Registry, what: &str) {
    devices.opened().iter().for_each(|device| comes_to(devices, device.id(), 0, what));
}

#[test]
fn cuda_case_29_a_clean_up_takes_the_flagged_model_and_leaves_the_kept_ones() {
    let cuda = driver(&one_card().late_micros(2000));
    let devices = registry();
    let cache = filled(&devices, "abc", "a");
    let card = devices.device(CARD).unwrap();
    let (on_card, on_host) =
        (card.ledger().charged(), cache.list().iter().map(|info| info.bytes[&DeviceId::CPU]).sum::<u64>());
    // Two cycles, for the kept ones to survive.
    for cycle in 0..2 {
        let report = cache.full_cleanup(&devices).unwrap();
        assert_eq!((report.unload.unloaded.len(), held(&cache).as_str()), (usize::from(cycle == 0), "bc"));
        assert_eq!(report.trimmed.len(), devices.opened().len(), "every allocator cache was emptied");
        cache.list().iter().for_each(|info| check(&cache.get(&info.key).unwrap()));
    }
    comes_to(&devices, CARD, on_card / 3 * 2, "the flagged one went");
    comes_to(&devices, DeviceId::CPU, on_host / 3 * 2, "host memory is lower");
    drop((cache, card));
    all_back(&devices, "at the end");
    drop(devices);
    cuda.assert_clean();
}

#[test]
fn cuda_case_30_a_clean_up_with_only_kept_models_empties_allocator_caches() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    let cache = filled(&devices, "de", "");
    let handles = |cache: &ModelCache| ["d", "e"].map(|key| Arc::as_ptr(&cache.get(key).unwrap()));
    let (before, trims) = (handles(&cache), cuda.report().calls_of("cuMemPoolTrimTo"));
    let report = cache.full_cleanup(&devices).unwrap();
    assert_eq!((report.unload.unloaded.len(), report.unload.kept.join("")), (0, "de".to_owned()));
    assert_eq!(handles(&cache), before);
    assert!(cuda.report().calls_of("cuMemPoolTrimTo") > trims);
    drop((cache, devices));
    assert_clean(&cuda);
}

#[test]
fn cuda_case_31_flags_are_consumed_once_between_two_jobs() {
    let cuda = driver(&one_card());
    let devices = registry();
    for (unload_models, free_memory) in [(false, false), (true, false), (false, true), (true, true)] {
        let cache = filled(&devices, "ab", "a");
        let resets = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&resets);
        cache.on_reset(move || _ = counter.fetch_add(1, Ordering::Relaxed));
        std::thread::scope(|scope| _ = scope.spawn(|| cache.request_free(FreeRequest { unload_models, free_memory })));
        assert_eq!(held(&cache), "ab", "asking frees nothing");
        let report = cache.service_requests(&devices).unwrap();
        assert_eq!(report.is_some_and(|report| !report.trimmed.is_empty()), free_memory);
        assert_eq!(held(&cache), if unload_models || free_memory { "b" } else { "ab" });
        assert_eq!(resets.load(Ordering::Relaxed), usize::from(free_memory));
        assert!(cache.service_requests(&devices).unwrap().is_none(), "consumed");
        check(&cache.get("b").unwrap());
    }
    drop(devices);
    cuda.assert_clean();
}

#[test]
fn cuda_room_is_there_when_it_is_made() {
    // A card counts free memory in pieces larger than these models.
    let Some(cuda) = stand_in(&one_card().late_micros(2000)) else { return };
    let devices = registry();
    let cache = filled(&devices, "abc", "b");
    let card = devices.device(CARD).unwrap();
    let all = card.memory().unwrap().available();
    cache.make_room(&devices, CARD, all + 1, Evict::Flagged).unwrap();
    assert_eq!(held(&cache), "ac");
    assert!(card.memory().unwrap().available() > all);
    let unfinished = cache.make_room(&devices, CARD, 1 << 50, Evict::Kept).unwrap_err();
    let Error::NoRoom(error) = unfinished.error else { panic!("{unfinished}") };
    assert_eq!((error.holders.len(), held(&cache).as_str()), (2, "ac"));
    cache.list().iter().for_each(|info| check(&cache.get(&info.key).unwrap()));
    drop((cache, card, devices));
    assert_clean(&cuda);
}

/// A card that fails for good takes its models with it, and the clean-up says which; the rest goes on.
#[test]
fn cuda_a_lost_card_is_told_by_its_models() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    let cache = filled(&devices, "abc", "a");
    cache.insert("host", load_as(&devices, "cpu,*").unwrap(), Retention::Keep);
    let resets = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&resets);
    cache.on_reset(move || _ = counter.fetch_add(1, Ordering::Relaxed));
    // A call that the load makes and no thread beside it.
    cuda.fault(&FaultPlan::one(Fault::nth("cuMemAllocFromPoolAsync", 1, Effect::Sticky(700))));
    assert!(load(&devices).is_err());
    for info in cache.list() {
        assert_eq!(info.lost.is_some(), info.key != "host", "{}: {:?}", info.key, info.lost);
    }
    let unfinished = cache.full_cleanup(&devices).unwrap_err();
    match unfinished.error {
        Error::ModelsLost { keys, .. } => assert_eq!(keys, ["b", "c"]),
        other => panic!("{other}"),
    }
    assert_eq!((unfinished.report.unload.unloaded.len(), unfinished.report.resets), (1, 1), "what was done is told");
    assert_eq!((held(&cache).as_str(), resets.load(Ordering::Relaxed)), ("bchost", 1), "the rest was done");
    check(&cache.get("host").unwrap());
    cache.unload("b").unwrap();
    cache.unload("c").unwrap();
    assert!(
        cache.full_cleanup(&devices).is_err_and(|unfinished| !matches!(unfinished.error, Error::ModelsLost { .. }))
            || cache.list().len() == 1
    );
    drop(cache);
    assert_given_back(&devices, &cuda, "a lost card's memory is counted no more");
}

fn round(devices: &Registry, cache: &ModelCache) -> Result<()> {
    cache.insert("new", load(devices)?, Retention::Unload);
    let available = devices.device(CARD)?.memory()?.available();
    cache.make_room(devices, CARD, available + 1, Evict::Flagged)?;
    cache.insert("other", load(devices)?, Retention::Unload);
    cache.request_free(FreeRequest::ALL);
    cache.service_requests(devices)?;
    Ok(())
}

/// Whatever call of the driver fails during a load, a clean-up or while room is made, the kept model stays usable and
/// nothing is kept beside it.
#[test]
fn cuda_every_failing_call_leaves_kept_models_usable() {
    let session = |fault: Option<(u64, Effect)>| -> Option<(u64, bool)> {
        let cuda = stand_in(&one_card())?;
        let devices = registry();
        let cache = filled(&devices, "k", "");
        let kept = cache.list().remove(0).bytes;
        let before: u64 = cuda.report().calls.values().sum();
        if let Some((nth, effect)) = fault {
            cuda.fault(&FaultPlan::one(Fault::any(nth, effect)));
        }
        let outcome = round(&devices, &cache);
        let calls = cuda.report().calls.values().sum::<u64>() - before;
        cuda.fault(&FaultPlan::default());
        cache.unload_all();
        let what = format!("{fault:?}, {outcome:?}");
        assert!(!matches!(&outcome, Err(Error::TimedOut { .. })), "{what}");
        kept.iter().for_each(|(id, bytes)| assert_comes_to(&devices, &cuda, *id, *bytes, &what));
        assert_eq!(held(&cache), "k", "{what}");
        check(&cache.get("k").unwrap());
        drop(cache);
        assert_given_back(&devices, &cuda, &what);
        Some((calls, outcome.is_err()))
    };
    let Some((calls, false)) = session(None) else { return };
    let mut failures = 0;
    for effect in [Effect::Fail(304), Effect::OutOfMemory] {
        for nth in spread(40, calls) {
            failures += session(Some((nth, effect))).map_or(0, |(_, failed)| usize::from(failed));
        }
    }
    assert!(failures > 10, "{failures} rounds failed");
}
