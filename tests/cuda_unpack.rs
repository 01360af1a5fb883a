//! Slots that CUDA devices unpack blocks into: over the stand-in driver, which sees every access that no event orders, or over the
//! driver that is named.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::sync::Arc;

use card::{DEADLINE, Driver, driver, has_devices, registry, stand_in, whatever_call_fails};
use cuda_standin::{Config, Effect, MemoryMode};
use support::GPU0;
use support::unpacked::{load, passes, weights};
use tensor_offload::error::Missing;
use tensor_offload::{DType, DeviceId, Error, Loader, Planner, Registry, Streamer};

const VALUES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn cards(count: usize) -> Config {
    Config::with_devices(&vec![64 << 20; count]).memory(MemoryMode::Reuse).late_micros(2000).seed(5)
}

#[test]
fn cuda_slots_hold_the_values_of_what_crosses_the_link_in_blocks() {
    // Two tensors of five layers in three passes, and of the layer after the last; seven of the tensors cross the link in two parts.
    let expected = [("cpu,*", 51..=54), ("cuda:0,40%;cpu,60%", 30..=54), ("cuda:0,*", 30..=32)];
    for (to, (allocation, launches)) in VALUES.into_iter().zip(expected) {
        let driver = driver(&cards(1));
        let devices = registry();
        passes(&devices, GPU0, allocation, to, 3).unwrap();
        if let Driver::StandIn(cuda) = &driver {
            let launched = cuda.report().calls_of("cuLaunchKernel");
            assert!(launches.contains(&launched), "{launched} for {allocation}");
        }
        drop(devices);
        driver.assert_clean();
    }
}

/// From another card straight and through the host, from files through pinned buffers, with pinned memory or without.
#[test]
fn cuda_blocks_are_unpacked_whatever_way_they_come() {
    for config in [cards(2), Config { pinned_limit: Some(0), ..cards(2) }] {
        let driver = driver(&config);
        if has_devices(2) {
            let devices = registry();
            passes(&devices, GPU0, "cuda:0,20%;cuda:1,30%;disk,30%;cpu,20%", DType::BF16, 2).unwrap();
            drop(devices);
        }
        driver.assert_clean();
    }
}

/// The host that pins memory for cards can compute, too, with kernels of its own.
#[test]
fn cuda_a_host_beside_a_card_unpacks_into_its_own_memory() {
    let driver = driver(&cards(1));
    let devices = registry();
    let (weights, values) = weights(DType::F16);
    let planner = Planner::new(weights.layout(), devices.machine()).compute(DeviceId::CPU).unpack(DType::F16);
    let plan = planner.allocation("cpu,50%;disk,50%".parse().unwrap()).depth(1).plan().unwrap();
    let model = Arc::new(Loader::new(&devices).deadline(DEADLINE).load(&weights, &plan).unwrap());
    let mut streamer = Streamer::new(&model).unwrap().deadline(DEADLINE);
    for layer in model.layout().layer_ids() {
        let guard = streamer.layer(layer).unwrap();
        for view in guard.tensors() {
            let mut wanted = vec![0; view.size()];
            values.read(values.layout().find(view.name()).unwrap(), &mut wanted).unwrap();
            assert!(view.bytes().unwrap().unwrap() == wanted, "{}", view.name());
        }
    }
    drop((streamer, model, devices));
    driver.assert_clean();
}

#[test]
fn cuda_drivers_that_refuse_the_kernels_unpack_nothing_and_say_so() {
    let Some(cuda) = stand_in(&Config { refuse_ptx: true, ..cards(1) }) else { return };
    let devices = registry();
    let (weights, _) = weights(DType::F16);
    let model = load(&devices, GPU0, &weights, "cuda:0,30%;cpu,*", DType::F16).unwrap();
    let refused = Streamer::new(&model).unwrap_err();
    let Error::Missing(Missing::Unpacking { tensor, .. }) = &refused else { panic!("{refused}") };
    assert!(tensor.ends_with(".weight") && refused.to_string().contains("LayerGuard::dequantise"), "{refused}");
    drop((model, devices));
    card::assert_clean(&cuda);
}

#[test]
fn cuda_unpacking_keeps_nothing_whatever_call_fails() {
    let path = |devices: &Registry| passes(devices, GPU0, "cuda:0,30%;disk,30%;cpu,*", DType::F16, 1);
    whatever_call_fails(&cards(1), &[Effect::Fail(304), Effect::Sticky(700)], 0, registry, path);
}
