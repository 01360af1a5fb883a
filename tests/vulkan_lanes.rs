//! Streaming to Vulkan devices: the ways that weights take, callers that leave early, and a cache of several models.
#![cfg(feature = "vulkan")]

mod support;
mod vulkan_devices;

use std::sync::Arc;

use support::whole_path::{Source, load, pass, source};
use tensor_offload::{ByteSize, DeviceId, Model, ModelCache, Registry, Retention, Streamer};
use vulkan_devices::{Drivers, assert_given_back, drivers, registry};

const COMPUTE: DeviceId = DeviceId::vulkan(0);

fn loaded(devices: &Registry, source: &Source, allocation: &str, depth: usize) -> Arc<Model> {
    Arc::new(load(devices, source, COMPUTE, allocation, depth).unwrap())
}

/// Runs `work` on each kind of host memory; afterwards everything has to be given back.
fn on_each(drivers: &Drivers, work: impl Fn(&Registry)) {
    for (what, backend) in drivers.hosts() {
        let devices = registry(backend);
        work(&devices);
        assert_given_back(&devices, what);
    }
}

/// At every depth, and with less pinned memory than the weights take.
#[test]
fn vulkan_layers_arrive_at_every_depth_and_under_every_cap() {
    let (source, drivers) = (source(), drivers());
    for cap in [u64::MAX, 5 << 20, 1 << 20, 0] {
        let devices = registry(drivers.vulkan().pinned_cap(ByteSize(cap)));
        for depth in 0..4 {
            let mut streamer = Streamer::new(&loaded(&devices, &source, "vulkan:0,40kb;cpu,*", depth)).unwrap();
            for _ in 0..2 {
                pass(&mut streamer, &source).unwrap();
            }
        }
        assert_given_back(&devices, &format!("a cap of {cap}"));
    }
}

#[test]
fn vulkan_callers_that_leave_in_the_middle_spoil_nothing() {
    let (source, drivers) = (source(), drivers());
    on_each(&drivers, |devices| {
        let model = loaded(devices, &source, "vulkan:0,40kb;cpu,*", 2);
        for leave in 1..model.layout().layers().len() {
            let mut streamer = Streamer::new(&model).unwrap();
            for layer in model.layout().layer_ids().take(leave) {
                drop(streamer.layer(layer).unwrap());
            }
        }
        // Layers in any order, and the same again.
        let mut streamer = Streamer::new(&model).unwrap();
        let layers: Vec<_> = model.layout().layer_ids().collect();
        for index in [0, 2, 1, 1, 3, 0] {
            drop(streamer.layer(layers[index % layers.len()]).unwrap());
        }
        pass(&mut streamer, &source).unwrap();
    });
}

#[test]
fn vulkan_a_hundred_passes_are_right() {
    let (source, drivers) = (source(), drivers());
    let devices = drivers.registry();
    let mut streamer = Streamer::new(&loaded(&devices, &source, "vulkan:0,40kb;cpu,*", 1)).unwrap();
    for _ in 0..100 {
        pass(&mut streamer, &source).unwrap();
    }
    drop(streamer);
    assert_given_back(&devices, "a hundred passes");
}

/// Flagged models go; the kept ones stay and are whole.
#[test]
fn vulkan_a_clean_up_takes_the_flagged_model_and_leaves_the_kept_ones() {
    let (source, drivers) = (source(), drivers());
    on_each(&drivers, |devices| {
        let cache = ModelCache::new();
        for (name, retention) in [("a", Retention::Unload), ("b", Retention::Keep), ("c", Retention::Keep)] {
            cache.insert(name, loaded(devices, &source, "vulkan:0,60kb;cpu,*", 1), retention);
        }
        for cycle in 0..2 {
            let report = cache.full_cleanup(devices).unwrap();
            assert_eq!(report.unload.unloaded.len(), usize::from(cycle == 0));
            for name in ["b", "c"] {
                pass(&mut Streamer::new(&cache.get(name).unwrap()).unwrap(), &source).unwrap();
            }
        }
    });
}
