//! A small model with an adapter, loaded, streamed and unloaded on the devices of a test.

use std::sync::Arc;

use tensor_offload::{
    Adapter, Checkpoint, DeviceId, Loader, Matching, Model, ModelCache, Order, Planner, Registry, Result, Retention,
    Streamer, Weights,
};

use super::DEADLINE;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
const LORA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama-lora");

pub(crate) struct Source {
    pub(crate) weights: Weights,
    /// For each tensor its bytes as patching on the host gives them.
    pub(crate) merged: Vec<Vec<u8>>,
}

pub(crate) fn source() -> Source {
    let adapters = vec![Adapter::open(LORA, 0.8).unwrap()];
    of_weights(Weights::patched(Checkpoint::open(MODEL).unwrap(), adapters, Matching::Strict).unwrap())
}

pub(crate) fn of_weights(weights: Weights) -> Source {
    let merged = weights.layout().tensor_ids().map(|tensor| {
        let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
        weights.read(tensor, &mut bytes).unwrap();
        bytes
    });
    Source { merged: merged.collect(), weights }
}

/// Loads the model for `compute` as the allocation says.
pub(crate) fn load(
    devices: &Registry,
    source: &Source,
    compute: DeviceId,
    allocation: &str,
    depth: usize,
) -> Result<Model> {
    let planner = Planner::new(source.weights.layout(), devices.machine()).allocation(allocation.parse()?);
    let plan = planner.compute(compute).order(Order::Interleaved).depth(depth).plan()?;
    Loader::new(devices).workers(2).deadline(DEADLINE).load(&source.weights, &plan)
}

/// Streams every layer and compares it with what patching on the host gives.
pub(crate) fn pass(streamer: &mut Streamer, source: &Source) -> Result<()> {
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

/// Loads, streams twice, and unloads.
pub(crate) fn whole_path(
    devices: &Registry,
    source: &Source,
    compute: DeviceId,
    allocation: &str,
    depth: usize,
) -> Result<()> {
    let model = Arc::new(load(devices, source, compute, allocation, depth)?);
    let cache = ModelCache::new();
    cache.insert("model", Arc::clone(&model), Retention::Unload);
    let mut streamer = Streamer::new(&model)?;
    pass(&mut streamer, source)?;
    pass(&mut streamer, source)?;
    drop((streamer, model));
    cache.full_cleanup(devices)?;
    Ok(())
}
