//! Load, patch, stream and unload on CUDA devices, over the stand-in driver.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::sync::Arc;

use card::{
    DEADLINE, assert_clean, assert_given_back, devices, driver, named, registry_of, stand_in, whatever_call_fails,
};
use cuda_standin::{Config, Effect, MemoryMode};
use tensor_offload::backend::Cuda;
use tensor_offload::{
    Adapter, ByteSize, Checkpoint, DType, Loader, Matching, Model, ModelCache, Order, Planner, Registry, Result,
    Retention, Streamer, Weights,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
const LORA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama-lora");

fn registry() -> Registry {
    // The stand-in's contexts take nothing of its small cards.
    registry_of(Cuda::new().context_size(ByteSize(0)))
}

struct Source {
    weights: Weights,
    /// For each tensor its bytes as patching on the host gives them.
    merged: Vec<Vec<u8>>,
}

fn source() -> Source {
    let adapters = vec![Adapter::open(LORA, 0.8).unwrap()];
    of_weights(Weights::patched(Checkpoint::open(MODEL).unwrap(), adapters, Matching::Strict).unwrap())
}

fn of_weights(weights: Weights) -> Source {
    let merged = weights.layout().tensor_ids().map(|tensor| {
        let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
        weights.read(tensor, &mut bytes).unwrap();
        bytes
    });
    Source { merged: merged.collect(), weights }
}

fn load(devices: &Registry, source: &Source, allocation: &str, depth: usize) -> Result<Model> {
    let planner = Planner::new(source.weights.layout(), devices.machine()).allocation(allocation.parse()?);
    let plan = planner.compute("cuda:0".parse()?).order(Order::Interleaved).depth(depth).plan()?;
    Loader::new(devices).workers(2).deadline(DEADLINE).load(&source.weights, &plan)
}

/// Streams every layer and compares it with what patching on the host gives.
fn pass(streamer: &mut Streamer, source: &Source) -> Result<()> {
    let model = Arc::clone(streamer.model());
    for layer in model.layout().layer_ids() {
        let guard = streamer.layer(layer)?;
        for view in guard.tensors() {
            let name = &view.info().name;
            let tensor = source.weights.checkpoint().find(name).unwrap();
            let mut bytes = vec![0; view.info().bytes as usize];
            guard.read(name, &mut bytes)?;
            assert!(bytes == source.merged[tensor.index()], "{layer:?}: `{name}` arrived wrong");
        }
    }
    Ok(())
}

fn whole_path(devices: &Registry, source: &Source, allocation: &str, depth: usize) -> Result<()> {
    let model = Arc::new(load(devices, source, allocation, depth)?);
    let cache = ModelCache::new();
    cache.insert("model", Arc::clone(&model), Retention::Unload);
    let mut streamer = Streamer::new(&model)?;
    pass(&mut streamer, source)?;
    pass(&mut streamer, source)?;
    drop((streamer, model));
    cache.full_cleanup(devices)?;
    Ok(())
}

fn two_cards() -> Config {
    Config::with_devices(&[64 << 20, 32 << 20]).all_peers()
}

#[test]
fn cuda_models_arrive_whole_from_every_home_in_both_memory_modes() {
    let source = source();
    let mut no_peers = two_cards();
    no_peers.peers.clear();
    let machines = [
        two_cards().memory(MemoryMode::Quarantine).late_micros(10_000_000),
        two_cards().memory(MemoryMode::Reuse).seed(5),
        no_peers.memory(MemoryMode::Reuse).late_micros(10_000_000),
    ];
    // A driver that is named is one machine, as it is.
    for config in machines.into_iter().take(if named() { 1 } else { 3 }) {
        for allocation in [
            "cuda:0,60kb;cuda:1,100kb;cpu,*",
            "cuda:0,40kb;disk,100kb;cuda:1,*",
            "cuda:0,40kb;disk,100kb;cpu,*",
            "cuda:0,100%",
            "cuda:1,50%;cpu,50%",
        ] {
            for depth in [0, 2] {
                let cuda = driver(&config);
                if allocation.contains("cuda:1") && devices().len() < 2 {
                    continue;
                }
                let devices = registry();
                whole_path(&devices, &source, allocation, depth).unwrap();
                assert_given_back(&devices, None, allocation);
                drop(devices);
                cuda.assert_clean();
            }
        }
    }
}

/// The kernels patch products in the type that a weight has; the host casts.
#[test]
fn cuda_models_arrive_cast() {
    for to in [DType::F32, DType::F16] {
        let source = of_weights(source().weights.cast_floats(to).unwrap());
        for allocation in ["cuda:0,100%", "cuda:0,60kb;cpu,*"] {
            let cuda = driver(&two_cards());
            let devices = registry();
            whole_path(&devices, &source, allocation, 1).unwrap();
            assert_given_back(&devices, None, allocation);
            drop(devices);
            cuda.assert_clean();
        }
    }
}

#[test]
fn cuda_opens_no_device_that_a_plan_does_not_use() {
    let Some(cuda) = stand_in(&two_cards()) else { return };
    let devices = registry();
    let model = load(&devices, &source(), "cuda:0,60kb;cuda:1,0kb;cpu,*", 1).unwrap();
    assert_eq!(cuda.report().calls_of("cuDevicePrimaryCtxRetain"), 1);
    drop((model, devices));
    assert_clean(&cuda);
}

/// Whatever call of the driver fails, the outcome is an error or a right result: nothing hangs, panics, keeps
/// memory or delivers a wrong byte.
#[test]
fn cuda_every_failing_call_gives_an_error_or_a_right_result() {
    let source = source();
    let allocation = "cuda:0,60kb;cuda:1,100kb;cpu,*";
    let effects = [Effect::Fail(304), Effect::OutOfMemory, Effect::Sticky(700)];
    let path = |devices: &Registry| whole_path(devices, &source, allocation, 1);
    whatever_call_fails(&two_cards(), &effects, 100, registry, path);
}

#[test]
fn cuda_two_threads_stream_two_models_to_one_device() {
    let source = source();
    let cuda = driver(&two_cards().memory(MemoryMode::Reuse).seed(9));
    let allocation = if devices().len() > 1 { "cuda:0,60kb;cuda:1,50kb;cpu,*" } else { "cuda:0,60kb;cpu,*" };
    let devices = registry();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| whole_path(&devices, &source, allocation, 1).unwrap());
        }
    });
    drop(devices);
    cuda.assert_clean();
}
