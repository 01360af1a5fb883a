//! Load, patch, stream and unload on CUDA devices, over the stand-in driver.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use card::{assert_clean, assert_given_back, devices, driver, named, registry_of, stand_in, whatever_call_fails};
use cuda_standin::{Config, Effect, MemoryMode};
use support::GPU0;
use support::whole_path::{load, of_weights, source, whole_path};
use tensor_offload::backend::Cuda;
use tensor_offload::{ByteSize, DType, Registry};

fn registry() -> Registry {
    // The stand-in's contexts take nothing of its small cards.
    registry_of(Cuda::new().context_size(ByteSize(0)))
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
                whole_path(&devices, &source, GPU0, allocation, depth).unwrap();
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
            whole_path(&devices, &source, GPU0, allocation, 1).unwrap();
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
    let model = load(&devices, &source(), GPU0, "cuda:0,60kb;cuda:1,0kb;cpu,*", 1).unwrap();
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
    let path = |devices: &Registry| whole_path(devices, &source, GPU0, allocation, 1);
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
            scope.spawn(|| whole_path(&devices, &source, GPU0, allocation, 1).unwrap());
        }
    });
    drop(devices);
    cuda.assert_clean();
}
