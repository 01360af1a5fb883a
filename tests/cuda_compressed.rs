//! Modules that are kept compressed, for CUDA devices: over the stand-in driver, which interprets the kernels and sees every access
//! that no event orders, or over the driver that is named.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::fs;

use card::{DEADLINE, Driver, assert_given_back, driver, has_devices, registry, stand_in, whatever_call_fails};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode};
use support::coded::{Codes, load, passes, tensors};
use support::compressed::Compressed;
use support::{DISK, GPU0, GPU1, spec};
use tensor_offload::error::Missing;
use tensor_offload::{DType, Error, ErrorKind, Loader, Planner, Registry, Streamer};

fn cards(count: usize) -> Config {
    Config::with_devices(&vec![64 << 20; count]).memory(MemoryMode::Reuse).late_micros(2000).seed(5)
}

/// Pinned and pageable, from files, past another card: codes cross the link and kernels decode them, and those that live on the card.
#[test]
fn cuda_slots_hold_the_weights_of_codes_that_cross_the_link() {
    // The large one arrives in parts.
    let large = spec("model.layers.1.large.weight", DType::BF16, &[160, 192]);
    let file = Compressed::new(&[tensors(), vec![large]].concat(), 1);
    for (allocation, pinned, codes) in [
        ("cpu,*", None, Codes::OfTheFile),
        ("cpu,*", None, Codes::OfTheLoad),
        ("cuda:0,30%;cpu,70%", Some(0), Codes::OfTheFile),
        ("disk,*", None, Codes::OfTheFile),
        ("cpu,50%;disk,50%", Some(20_000), Codes::OfTheFile),
        ("cuda:0,*", None, Codes::OfTheFile),
        ("cuda:0,60%;cpu,40%", None, Codes::OfTheLoad),
    ] {
        let driver = driver(&cards(1));
        let devices = registry();
        passes((&devices, GPU0), (&file, codes), allocation, pinned, 2).unwrap();
        if let Driver::StandIn(cuda) = &driver {
            assert!(cuda.report().calls_of("cuLaunchKernel") >= 8);
        }
        drop(devices);
        driver.assert_clean();
    }
    let machines = [Config { pinned_limit: Some(0), ..cards(2) }, cards(2), cards(2).all_peers()];
    for (machine, codes) in
        machines.iter().flat_map(|machine| [(machine, Codes::OfTheFile), (machine, Codes::OfTheLoad)])
    {
        let driver = driver(machine);
        if has_devices(2) {
            let devices = registry();
            passes((&devices, GPU0), (&file, codes), "cuda:0,20%;cuda:1,40%;disk,20%;cpu,20%", None, 2).unwrap();
            drop(devices);
        }
        driver.assert_clean();
    }
}

/// The device tells of a damaged block that it decoded.
#[test]
fn cuda_a_damaged_code_is_an_error_of_its_layer() {
    let file = Compressed::new(&tensors(), 2);
    let name = "model.layers.1.up.weight";
    let code = tensor_offload::lossless::compress(DType::BF16, file.plain.bytes_of(name)).unwrap();
    let mut bytes = fs::read(file.file()).unwrap();
    let begin = bytes.windows(code.len()).position(|bytes| bytes == code).unwrap();
    bytes[begin + code.len() / 2] ^= 8;
    fs::write(file.file(), &bytes).unwrap();
    let driver = driver(&cards(1));
    let devices = registry();
    let model = load((&devices, GPU0), &file.open().into(), "disk,*", None).unwrap();
    let mut streamer = Streamer::new(&model).unwrap().deadline(DEADLINE);
    let mut told = Vec::new();
    for layer in model.layout().layer_ids() {
        let name = model.layout().layer(layer).unwrap().name.clone();
        let outcome = streamer.layer(layer).and_then(|guard| guard.wait(DEADLINE));
        if let Err(error) = outcome {
            assert!(matches!(error, Error::Corrupted { .. }) && error.to_string().contains("layers.1`"), "{error}");
            told.push(name);
        }
    }
    assert!(told.contains(&"model.layers.1".to_owned()) && told.len() <= 2, "{told:?}");
    streamer.verify().unwrap();
    assert_eq!(model.plan().device(DISK).unwrap().weights.taken(), 0);
    drop((streamer, model, devices));
    driver.assert_clean();
}

#[test]
fn cuda_drivers_that_refuse_the_kernels_decode_nothing_and_say_so() {
    let Some(cuda) = stand_in(&Config { refuse_ptx: true, ..cards(1) }) else { return };
    let devices = registry();
    let file = Compressed::new(&tensors(), 3);
    let model = load((&devices, GPU0), &file.open().into(), "cuda:0,30%;cpu,*", None).unwrap();
    let refused = Streamer::new(&model).unwrap_err();
    let Error::Missing(Missing::Decoding { tensor, .. }) = &refused else { panic!("{refused}") };
    assert!(tensor.ends_with(".weight") && refused.to_string().contains("plan without `compress`"), "{refused}");
    drop((model, devices));
    card::assert_clean(&cuda);
}

#[test]
fn cuda_compressed_streams_keep_nothing_whatever_call_fails() {
    let file = Compressed::new(&tensors()[..8], 4);
    let effects = [Effect::Fail(304), Effect::Sticky(700)];
    let path =
        |devices: &Registry| passes((devices, GPU0), (&file, Codes::OfTheFile), "cuda:0,20%;disk,40%;cpu,*", None, 1);
    whatever_call_fails(&cards(1), &effects, 0, registry, path);
    // Made by the load, and on another card.
    let path =
        |devices: &Registry| passes((devices, GPU0), (&file, Codes::OfTheLoad), "cuda:0,20%;cuda:1,40%;cpu,*", None, 1);
    whatever_call_fails(&cards(2).all_peers(), &effects, 0, registry, path);
}

/// A card that is lost with its codes: what was there is read from the files again.
#[test]
fn cuda_codes_of_a_lost_card_come_from_the_files() {
    let Some(cuda) = stand_in(&cards(2).all_peers()) else { return };
    let (devices, file) = (registry(), Compressed::new(&tensors(), 5));
    let weights = file.plain.weights.clone().compress().unwrap();
    let base = load((&devices, GPU0), &weights, "cuda:0,20%;cuda:1,*", None).unwrap();
    let other = Planner::new(weights.layout(), devices.machine()).compute(GPU1).plan().unwrap();
    cuda.fault(&FaultPlan::one(Fault::nth("cuMemAllocFromPoolAsync", 1, Effect::Sticky(700))));
    let lost = Loader::new(&devices).deadline(DEADLINE).load(&weights, &other).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::DeviceLost, "{lost}");
    let planner = Planner::new(weights.layout(), devices.machine()).compute(GPU0).compress(true);
    let plan = planner.allocation("cuda:0,20%;cpu,*".parse().unwrap()).plan().unwrap();
    assert!(base.read("model.layers.1.up.weight", &mut vec![0; 2 * 40 * 256]).is_err());
    let model = Loader::new(&devices).deadline(DEADLINE).derive(&base, &weights, &plan).unwrap();
    assert!(model.report().read > 0 && model.report().shared > 0, "{}", model.report());
    for info in model.layout().tensors() {
        let mut got = vec![0; info.bytes as usize];
        model.read(&info.name, &mut got).unwrap();
        assert!(got == file.plain.bytes_of(&info.name), "{}", info.name);
    }
    drop((base, model));
    assert_given_back(&devices, &cuda, "a lost card's memory is counted no more");
}
