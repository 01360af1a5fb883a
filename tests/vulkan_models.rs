//! Load, patch, stream and unload on Vulkan devices.
#![cfg(feature = "vulkan")]

mod support;
mod vulkan_devices;

use support::whole_path::{of_weights, source, whole_path};
use tensor_offload::{DType, DeviceId};
use vulkan_devices::{assert_given_back, drivers, registry};

const COMPUTE: DeviceId = DeviceId::vulkan(0);

/// Allocations for one device, and for two.
fn allocations(devices: usize) -> impl Iterator<Item = &'static str> {
    let of_one = ["vulkan:0,60kb;cpu,*", "vulkan:0,40kb;disk,100kb;cpu,*", "vulkan:0,100%", "vulkan:0,25%;cpu,*"];
    let of_two = ["vulkan:0,60kb;vulkan:1,100kb;cpu,*", "vulkan:0,40kb;disk,100kb;vulkan:1,*", "vulkan:1,50%;cpu,50%"];
    of_one.into_iter().chain(of_two.into_iter().filter(move |_| devices > 1))
}

#[test]
fn vulkan_models_arrive_whole_from_every_home() {
    let (source, drivers) = (source(), drivers());
    for (what, backend) in drivers.hosts() {
        let devices = registry(backend);
        let count = devices.machine().ids().filter(|id| id.kind() == COMPUTE.kind()).count();
        for allocation in allocations(count) {
            for depth in [0, 2] {
                whole_path(&devices, &source, COMPUTE, allocation, depth).unwrap();
                assert_given_back(&devices, &format!("{allocation} with {what}"));
            }
        }
    }
}

#[test]
fn vulkan_models_arrive_cast() {
    let drivers = drivers();
    for to in [DType::F32, DType::F16] {
        let source = of_weights(source().weights.cast_floats(to).unwrap());
        for allocation in ["vulkan:0,100%", "vulkan:0,60kb;cpu,*"] {
            let devices = drivers.registry();
            whole_path(&devices, &source, COMPUTE, allocation, 1).unwrap();
            assert_given_back(&devices, allocation);
        }
    }
}

#[test]
fn vulkan_two_threads_stream_two_models_to_one_device() {
    let (source, drivers) = (source(), drivers());
    let devices = drivers.registry();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| whole_path(&devices, &source, COMPUTE, "vulkan:0,60kb;cpu,*", 1).unwrap());
        }
    });
    assert_given_back(&devices, "two threads");
}
