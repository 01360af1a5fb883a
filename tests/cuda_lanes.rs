//! Streaming to CUDA devices over the stand-in driver: bytes that need staging, slots of the caller's own, several models
//! on one device, and what goes wrong.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use card::{DEADLINE, adopted, assert_clean, assert_given_back, driver, registry, stand_in};
use cuda_standin::{Config, Effect, Fault, FaultPlan, Link, MemoryMode};
use cudarc::driver::{CudaContext, DevicePtr};
use support::{
    CPU, DISK, GPU0, Random, Subject, blocks, check_layer, check_pass, comes_back, layers, levels, llama, norms, pass,
    safetensors,
};
use tensor_offload::backend::{Backend, BufMut, Countdown, Cuda, Faulty, Host};
use tensor_offload::stream::Via;
use tensor_offload::transfer::{MappedSource, Source};
use tensor_offload::{ByteSize, Checkpoint, ErrorKind, LayerId, Loader, Model, Planner, Registry, Streamer, cuda};

/// The model with at most `pinned` bytes of it pinned; what is over that needs staging.
fn load(devices: &Registry, subject: &Subject, allocation: &str, depth: usize, pinned: u64) -> Arc<Model> {
    load_with(devices, subject, allocation, |planner| planner.depth(depth).pinned_cap(Some(ByteSize(pinned))))
}

fn load_with(
    devices: &Registry,
    subject: &Subject,
    allocation: &str,
    options: impl FnOnce(Planner<'_>) -> Planner<'_>,
) -> Arc<Model> {
    let plan = options(subject.planner(devices.machine(), allocation)).plan().unwrap();
    let loader = Loader::new(devices).workers(2).deadline(DEADLINE);
    Arc::new(loader.load(&subject.weights, &plan).unwrap())
}

fn bytes_via(streamer: &Streamer, via: Via) -> u64 {
    streamer.report().lanes.iter().filter(|lane| lane.via == via).map(|lane| lane.bytes).sum()
}

/// Pinned memory goes straight, all else through pinned buffers, and the thread that asks does none of it.
#[test]
fn cuda_pageable_memory_and_files_pass_pinned_buffers() {
    // Larger than a pinned buffer in one layer, and many small tensors in others.
    let tensors = [llama(4, 32), blocks(&[9_000_001, 300])].concat();
    let subject = Subject::plain(&tensors, 100);
    for config in [
        Config::with_devices(&[256 << 20]).memory(MemoryMode::Quarantine).late_micros(10_000_000),
        Config::with_devices(&[256 << 20]).memory(MemoryMode::Reuse).seed(3),
    ] {
        for (allocation, pinned, depth) in
            [("cpu,*", 0, 2), ("cpu,*", 30_000, 0), ("cuda:0,10kb;disk,5mb;cpu,*", 20_000, 1), ("disk,*", 0, 2)]
        {
            let cuda = driver(&config);
            let devices = registry();
            let model = load(&devices, &subject, allocation, depth, pinned);
            let mut streamer = Streamer::new(&model).unwrap();
            check_pass(&mut streamer, &subject).unwrap();
            let mut random = Random::new(depth as u64);
            for _ in 0..40 {
                let layer = LayerId::new(random.next() as usize % layers(&streamer).len());
                check_layer(&streamer.layer(layer).unwrap(), &subject).unwrap();
            }
            let (straight, staged) = (bytes_via(&streamer, Via::Direct), bytes_via(&streamer, Via::Staging));
            assert_eq!(straight + staged, streamer.report().bytes.values().sum::<u64>());
            assert!(staged > 9_000_000 && (straight > 0) == (pinned > 0), "{}", streamer.report());
            assert_eq!(streamer.report().bytes.contains_key(&DISK), allocation.contains("disk"));
            drop((streamer, model));
            comes_back(&devices);
            drop(devices);
            cuda.assert_clean();
        }
    }
}

/// The bytes of a mapped file are read into memory of the library's own, which is what is pinned: the file can be let go of
/// and cut short while the model streams.
#[test]
#[expect(unsafe_code, reason = "maps a file")]
fn cuda_case_24_a_mapped_file_is_never_pinned() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors = [llama(3, 32), blocks(&[3_000_000])].concat();
    std::fs::write(&path, safetensors(&tensors, 120)).unwrap();
    let map = |file: &std::path::Path| {
        // SAFETY: the file is written above, and cut short below when the mapping is gone.
        let source = unsafe { MappedSource::assume_immutable(file) }?;
        Ok(Arc::new(source) as Arc<dyn Source>)
    };
    let checkpoint = Checkpoint::open_with(&path, map).unwrap();
    let (subject, devices) = (Subject::new(checkpoint.into()), registry());
    let model = load(&devices, &subject, "cpu,*", 1, u64::MAX);
    assert_eq!(cuda.report().live_pinned_bytes, levels(&devices)[0].1, "all that the host holds is pinned");
    drop(subject);
    let subject = Subject::new(Checkpoint::from_bytes("as it was", std::fs::read(&path).unwrap()).unwrap().into());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let mut streamer = Streamer::new(&model).unwrap();
    for _ in 0..2 {
        check_pass(&mut streamer, &subject).unwrap();
    }
    drop((streamer, model));
    comes_back(&devices);
    drop(devices);
    // Clean of memory that was unmapped while it was registered, too.
    assert_clean(&cuda);
}

/// Ten small vectors of a layer are one copy, beside those of its matrix and of a vector of an odd size.
#[test]
fn cuda_small_modules_of_a_layer_are_one_copy() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    let (subject, devices) = (Subject::plain(&norms(3), 110), registry());
    let model = load(&devices, &subject, "cpu,*", 0, u64::MAX);
    let mut streamer = Streamer::new(&model).unwrap();
    let copies = || cuda.report().calls_of("cuMemcpyHtoDAsync_v2");
    check_pass(&mut streamer, &subject).unwrap();
    let before = copies();
    check_pass(&mut streamer, &subject).unwrap();
    assert_eq!(copies() - before, 3 * 3);
    drop((streamer, model));
    comes_back(&devices);
    drop(devices);
    assert_clean(&cuda);
}

/// What may be pinned is said once, to the backend: a plan for its machine pins no more, and what it calls staged is staged.
#[test]
fn cuda_a_plan_pins_what_the_backend_pins() {
    let subject = Subject::plain(&blocks(&[40_000; 4]), 105);
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        let backend = Arc::new(Cuda::new().pinned_cap(ByteSize(100_000)));
        let devices = Registry::new([backend as Arc<dyn Backend>, Arc::new(Host::new())]);
        for machine in [devices.machine(), &devices.machine_now()] {
            assert_eq!(machine.device(CPU).unwrap().pinned_cap(), 100_000);
        }
        let model = load_with(&devices, &subject, "cpu,*", |planner| planner.depth(1));
        let host = model.plan().device(CPU).unwrap();
        assert_eq!((host.weights.pinned, host.weights.streamed, host.weights.staged), (80_000, 160_000, 80_000));
        assert_eq!(devices.device(CPU).unwrap().info().pinned_cap(), 100_000);
        let mut streamer = Streamer::new(&model).unwrap();
        layers(&streamer).for_each(|layer| drop(streamer.layer(layer).unwrap()));
        let lanes: Vec<(Via, bool)> =
            streamer.report().lanes.iter().map(|lane| (lane.via, lane.bytes >= 80_000)).collect();
        assert_eq!(lanes, [(Via::Direct, true), (Via::Staging, true)]);
    }
    assert_clean(&cuda);
}

/// A framework's tensors, whole allocations of the driver's, are refilled where they are.
#[test]
fn cuda_slots_of_the_callers_own_are_refilled_in_place() {
    let subject = Subject::patched(&llama(4, 32), 101);
    let config = Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).late_micros(10_000_000);
    for pinned in [u64::MAX, 15_000] {
        let cuda = driver(&config);
        {
            let context = CudaContext::new(0).unwrap();
            let devices = registry();
            let model = load_with(&devices, &subject, "cuda:0,10kb;cpu,*", |planner| {
                planner.depth(1).external_slots(true).pinned_cap(Some(ByteSize(pinned)))
            });
            let (device, stream) = (Arc::clone(model.residency().device()), context.new_stream().unwrap());
            let buffer = |bytes: u64| {
                let slice = stream.alloc_zeros::<u8>(bytes as usize).unwrap();
                let address = slice.device_ptr(&stream).0;
                // SAFETY: the slice holds the memory for as long as the buffer keeps it, and nobody else uses it.
                #[expect(unsafe_code, reason = "the test's own memory becomes a buffer")]
                unsafe {
                    BufMut::from_raw(&device, address, bytes as usize, Arc::new(slice) as Arc<dyn Any + Send + Sync>)
                }
                .unwrap()
            };
            let bytes = model.plan().slots().bytes_each;
            let slots: Vec<BufMut> = (0..2).map(|_| buffer(bytes)).collect();
            let addresses: Vec<u64> = slots.iter().map(|slot| slot.address().unwrap()).collect();
            stream.synchronize().unwrap();
            let compute = adopted(&device, &stream);
            let mut streamer = Streamer::with_slots(&model, compute, slots).unwrap();
            let mut seen = 0;
            for layer in layers(&streamer).chain([2, 5, 1, 1, 0, 4].map(LayerId::new)) {
                let guard = streamer.layer(layer).unwrap();
                for tensor in guard.tensors() {
                    let Some(place) = streamer.range_in_slot(&tensor.info().name) else { continue };
                    let slot = addresses[guard.slot().unwrap()];
                    assert_eq!(cuda::address(&tensor), Some(slot + place.start as u64));
                    seen += 1;
                }
                check_layer(&guard, &subject).unwrap();
            }
            assert!(seen > 20, "{seen} tensors were in slots");
            // What patching on the device took may take a moment to come back.
            let (kept, until) = (model.plan().device(GPU0).unwrap().weights.bytes, Instant::now() + DEADLINE);
            while device.ledger().charged() != kept {
                assert!(Instant::now() < until, "more than what is resident is taken on the device");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        cuda.assert_clean();
    }
}

/// Two models that stream to one card, pinned or not, take what their bytes take: compute is in the shade of the copies.
/// In counted time, which does not depend on who has the processors: whichever model's thread comes first, its copies for two
/// layers ahead are queued before the compute of a layer, and take longer.
#[test]
fn cuda_two_models_on_one_device_are_at_their_joint_floor() {
    const LAYERS: u32 = 6;
    const PASSES: u32 = 6;
    let compute = Duration::from_millis(3);
    let subjects = [102, 103].map(|seed| Subject::plain(&blocks(&[6_000_000; LAYERS as usize]), seed));
    // Staged bytes are copied twice by this machine's processors, so their link is slower, lest they be late in real time.
    for (pinned, link) in [(u64::MAX, 1_000_000_000), (0, 500_000_000)] {
        let mut config = Config::with_devices(&[256 << 20]).links(Link::new(link, 0));
        (config.check_sources, config.function_micros) = (false, compute.as_micros() as u64);
        let Some(cuda) = stand_in(&config) else { return };
        let devices = registry();
        let streamers = subjects.each_ref().map(|s| Streamer::new(&load(&devices, s, "cpu,*", 2, pinned)).unwrap());
        let busy = || cuda.report().counted.busy("to device 0");
        let (begin, before) = (cuda.mark(), busy());
        std::thread::scope(|scope| {
            for mut streamer in streamers {
                scope.spawn(move || (0..PASSES).for_each(|_| pass(&mut streamer, compute).wait(DEADLINE).unwrap()));
            }
        });
        let (time, busy) = (cuda.mark() - begin, busy() - before);
        println!("pinned {pinned}: {time:?}, of which the link was used for {busy:?}");
        // The passes, and for each model at most the two layers that it had sent for ahead when it ended.
        let copy = Duration::from_secs_f64(6e6 / link as f64);
        let floor = copy * 2 * PASSES * LAYERS;
        assert!(busy >= floor && busy <= floor + copy * 4, "the link was used for {busy:?}, the passes take {floor:?}");
        assert!(time >= busy && time <= busy + compute, "the link was used for {busy:?} of {time:?}");
        drop(devices);
        assert_clean(&cuda);
    }
}

/// A step takes what is larger of compute and transfer, here 10 ms of compute and 8 ms of copies for each layer, in counted time.
#[test]
fn cuda_streaming_hides_behind_the_compute() {
    let (layers, passes) = (6, 3);
    let (compute, copy) = (Duration::from_millis(10), Duration::from_millis(8));
    let mut config = Config::with_devices(&[64 << 20]).links(Link::new(125_000_000, 0));
    (config.check_sources, config.function_micros) = (false, compute.as_micros() as u64);
    let subject = Subject::plain(&blocks(&[1_000_000; 6]), 113);
    let Some(cuda) = stand_in(&config) else { return };
    let devices = registry();
    let model = load(&devices, &subject, "cpu,*", 2, u64::MAX);
    let mut streamer = Streamer::new(&model).unwrap();
    let busy = || cuda.report().counted.busy("to device 0");
    let (begin, before) = (cuda.mark(), busy());
    for _ in 0..passes {
        // What was seen to be over when the next work is queued would depend on how fast the stand-in really is.
        cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
        let end = pass(&mut streamer, compute);
        cuda.no_faults();
        end.wait(DEADLINE).unwrap();
    }
    let (time, copies) = (cuda.mark() - begin, busy() - before);
    assert_eq!(streamer.report().misses, 1, "{}", streamer.report());
    // Two layers are sent for ahead when it ends. Nothing can be hidden of the first copy, and all of the others.
    assert_eq!((copies, time), (copy * (passes * layers + 2), copy + compute * passes * layers));
    drop((streamer, model));
    comes_back(&devices);
    drop(devices);
    assert_clean(&cuda);
}

/// A link that stalls: waits end at their deadline with an error that says so, and what was late comes in the end.
#[test]
fn cuda_a_link_that_stalls_is_an_error_that_passes() {
    let subject = Subject::plain(&blocks(&[100_000; 4]), 104);
    for pinned in [u64::MAX, 0] {
        let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
        let devices = registry();
        let model = load(&devices, &subject, "cpu,*", 1, pinned);
        let mut streamer = Streamer::new(&model).unwrap();
        cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
        let guard = streamer.layer(LayerId::new(0)).unwrap();
        assert_eq!(guard.wait(Duration::from_millis(1)).unwrap_err().kind(), ErrorKind::TimedOut);
        cuda.no_faults();
        guard.wait(DEADLINE).unwrap();
        drop(guard);
        check_pass(&mut streamer, &subject).unwrap();
        drop((streamer, model));
        comes_back(&devices);
        drop(devices);
        assert_clean(&cuda);
    }
}

/// A lane that cannot queue in time, since the link holds all its buffers, is an error at the layer; the streamer goes on.
#[test]
fn cuda_a_lane_that_stalls_is_an_error_at_the_layer_and_passes() {
    let subject = Subject::plain(&blocks(&[70_000_000, 1000, 70_000_000]), 105);
    let Some(cuda) = stand_in(&Config { check_sources: false, ..Config::with_devices(&[256 << 20]) }) else { return };
    let devices = registry();
    let model = load(&devices, &subject, "cpu,*", 1, 0);
    let mut streamer = Streamer::new(&model).unwrap().deadline(Duration::from_millis(50));
    // A large layer needs five buffers of 16 MiB. There are four, and the first does not come back.
    cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
    let error = streamer.layer(LayerId::new(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    cuda.no_faults();
    let (mut errors, until) = (0, Instant::now() + DEADLINE);
    let mut streamer = streamer.deadline(DEADLINE);
    while let Err(error) = streamer.layer(LayerId::new(0)) {
        assert!(error.kind() == ErrorKind::TimedOut && Instant::now() < until, "{error}");
        errors += 1;
    }
    assert!(errors <= 1, "the order that ran out of time, once");
    check_pass(&mut streamer, &subject).unwrap();
    assert!(
        streamer.report().stalls.values().any(|stalls| stalls.count > 0 && stalls.time >= Duration::from_millis(50))
    );
    // Dropped half way through a layer that a lane is at.
    drop(streamer.layer(LayerId::new(2)).unwrap());
    drop(streamer);
    check_pass(&mut Streamer::new(&model).unwrap(), &subject).unwrap();
    drop(model);
    comes_back(&devices);
    drop(devices);
    assert_clean(&cuda);
}

/// Pinned buffers are filled while a copy from one is on its way: here the first, which is held, and the other three are used.
#[test]
fn cuda_buffers_are_filled_while_others_are_on_their_way() {
    let subject = Subject::plain(&blocks(&[100_000_000]), 114);
    let Some(cuda) = stand_in(&Config { check_sources: false, ..Config::with_devices(&[256 << 20]) }) else { return };
    let devices = registry();
    let model = load(&devices, &subject, "cpu,*", 0, 0);
    let mut streamer = Streamer::new(&model).unwrap();
    let copies = || cuda.report().calls_of("cuMemcpyHtoDAsync_v2");
    let before = copies();
    cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
    std::thread::scope(|scope| {
        let layer = scope.spawn(|| check_layer(&streamer.layer(LayerId::new(0)).unwrap(), &subject).unwrap());
        let until = Instant::now() + DEADLINE;
        while copies() < before + 4 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let queued = copies() - before;
        cuda.no_faults();
        layer.join().unwrap();
        assert_eq!((queued, copies() - before), (4, 6), "with one copy held, and in all");
    });
    drop((streamer, model));
    comes_back(&devices);
    drop(devices);
    assert_clean(&cuda);
}

/// A caller that panics in a layer, or stops half way: the model streams again, and nothing is kept.
#[test]
fn cuda_callers_that_leave_in_the_middle_spoil_nothing() {
    let subject = Subject::plain(&llama(5, 32), 106);
    let config = Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).seed(8);
    for pinned in [u64::MAX, 0] {
        let cuda = driver(&config);
        let devices = registry();
        let model = load(&devices, &subject, "cpu,*", 2, pinned);
        for stop in 0..7 {
            let mut streamer = Streamer::new(&model).unwrap();
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                for layer in 0..7 {
                    let guard = streamer.layer(LayerId::new(layer)).unwrap();
                    streamer.compute().occupy(Duration::from_micros(200)).unwrap();
                    if layer == stop {
                        // A panic without its message.
                        resume_unwind(Box::new("the caller's code fails"));
                    }
                    drop(guard);
                }
            }));
            assert!(panicked.is_err());
            if stop % 2 == 0 {
                check_pass(&mut streamer, &subject).unwrap();
            }
            // Sent for ahead, and never asked for.
            drop(streamer.layer(LayerId::new(stop)).unwrap());
        }
        check_pass(&mut Streamer::new(&model).unwrap(), &subject).unwrap();
        drop(model);
        comes_back(&devices);
        drop(devices);
        cuda.assert_clean();
    }
}

/// A guard that is not dropped holds its slot, in this streamer and in the next, and no more.
#[test]
fn cuda_a_guard_that_is_not_dropped_costs_its_slot() {
    let subject = Subject::plain(&llama(5, 32), 110);
    let cuda = driver(&Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).seed(4));
    let devices = registry();
    for pinned in [u64::MAX, 0] {
        let model = load(&devices, &subject, "cpu,*", 1, pinned);
        let mut streamer = Streamer::new(&model).unwrap();
        let kept = streamer.layer(LayerId::new(3)).unwrap();
        for _ in 0..2 {
            check_pass(&mut streamer, &subject).unwrap();
            check_layer(&kept, &subject).unwrap();
            drop(streamer);
            streamer = Streamer::new(&model).unwrap();
        }
    }
    comes_back(&devices);
    drop(devices);
    cuda.assert_clean();
}

/// A copy that fails for good in the middle of a pass: the model says that its device is lost, at once and for ever, and
/// everything else is given back.
#[test]
fn cuda_a_device_that_is_lost_in_mid_pass_says_so() {
    let subject = Subject::plain(&llama(5, 32), 107);
    for pinned in [u64::MAX, 0] {
        for nth in [1, 2, 5, 7] {
            let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
            let devices = registry();
            let model = load(&devices, &subject, "cpu,*", 2, pinned);
            cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", nth, Effect::Sticky(700))));
            // What waits for the device would wait for ten minutes.
            let mut streamer = Streamer::new(&model).unwrap();
            let failed = |streamer: &mut Streamer| check_pass(streamer, &subject).unwrap_err();
            let begin = Instant::now();
            for _ in 0..3 {
                assert_eq!(failed(&mut streamer).kind(), ErrorKind::DeviceLost);
            }
            drop(streamer);
            assert!(begin.elapsed() < 3 * DEADLINE, "it took {:?}", begin.elapsed());
            assert!(subject.bytes_of("model.norm.weight") == support::read(&model, "model.norm.weight").unwrap());
            drop(model);
            assert_given_back(&devices, &cuda, "a lost device");
            drop(devices);
        }
    }
}

/// A thousand passes with skips, repeats and steps back, straight and staged: every layer has its bytes.
#[test]
fn cuda_a_thousand_passes_are_right() {
    let subject = Subject::plain(&llama(4, 16), 108);
    let config = Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse);
    let cuda = driver(&config);
    let devices = registry();
    let model = load(&devices, &subject, "cuda:0,3kb;disk,5kb;cpu,*", 2, 6_000);
    let mut streamer = Streamer::new(&model).unwrap();
    let mut random = Random::new(9);
    for pass in 0..1000 {
        let mut layer = 0;
        while layer < layers(&streamer).len() {
            let guard = streamer.layer(LayerId::new(layer)).unwrap();
            // Reading back takes its time, so one layer of each pass is looked at.
            if layer == pass % layers(&streamer).len() {
                check_layer(&guard, &subject).unwrap();
            }
            layer = match random.next() % 10 {
                0 => layer,
                1 => layer.saturating_sub(1),
                2 | 3 => layer + 2,
                _ => layer + 1,
            };
        }
    }
    let report = streamer.report();
    assert!(report.hits > report.misses, "{report}");
    drop((streamer, model));
    comes_back(&devices);
    drop(devices);
    cuda.assert_clean();
}

/// Whatever operation of a stream that needs staging fails, it is an error or a right pass; nothing is kept.
#[test]
fn cuda_whatever_fails_of_a_staged_stream_nothing_is_wrong_or_kept() {
    let subject = Subject::plain(&llama(3, 16), 112);
    let cuda = driver(&Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse));
    let countdown = Countdown::new();
    let whole_path = |devices: &Registry| {
        let model = load(devices, &subject, "cuda:0,2kb;disk,3kb;cpu,*", 1, 2_000);
        let before = countdown.calls();
        let outcome = Streamer::new(&model).and_then(|mut streamer| {
            check_pass(&mut streamer, &subject)?;
            countdown.fail_nth(u64::MAX / 2);
            check_pass(&mut streamer, &subject)
        });
        (outcome, countdown.calls() - before)
    };
    let faulty = || {
        let cuda: Arc<dyn Backend> = Arc::new(Faulty::new(Cuda::new(), countdown.clone()));
        Registry::new([cuda, Arc::new(Host::new())])
    };
    let devices = faulty();
    let loading = {
        load(&devices, &subject, "cuda:0,2kb;disk,3kb;cpu,*", 1, 2_000);
        countdown.calls()
    };
    let (right, calls) = whole_path(&devices);
    right.unwrap();
    drop(devices);
    let mut errors = 0;
    for nth in 1..calls / 2 {
        let devices = faulty();
        countdown.fail_nth(loading + nth);
        let (outcome, _) = whole_path(&devices);
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
            errors += 1;
        }
        comes_back(&devices);
    }
    assert!(errors > 5 && calls > 40, "{errors} errors of {calls} operations");
    cuda.assert_clean();
}

/// A trace shows copies of a device's from when they are queued until they are seen to be done.
#[test]
fn cuda_copies_are_spans_until_they_are_done() {
    use std::sync::Mutex;
    use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
    /// The name of a span, whether it was opened or closed, and when.
    type Mark = (&'static str, bool, Instant);
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<Mark>>>);
    impl<S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>> Layer<S> for Seen {
        fn on_new_span(&self, attrs: &tracing::span::Attributes<'_>, _: &tracing::Id, _: Context<'_, S>) {
            self.0.lock().unwrap().push((attrs.metadata().name(), true, Instant::now()));
        }
        fn on_close(&self, id: tracing::Id, context: Context<'_, S>) {
            self.0.lock().unwrap().push((context.span(&id).unwrap().name(), false, Instant::now()));
        }
    }
    let subject = Subject::plain(&blocks(&[100_000; 3]), 111);
    let cuda = driver(&Config::with_devices(&[64 << 20]).links(Link::new(0, 10_000_000)));
    let devices = registry();
    let model = load(&devices, &subject, "cpu,*", 1, u64::MAX);
    let seen = Seen::default();
    tracing::subscriber::with_default(tracing_subscriber::registry().with(seen.clone()), || {
        let mut streamer = Streamer::new(&model).unwrap();
        (0..3).for_each(|layer| drop(streamer.layer(LayerId::new(layer)).unwrap()));
        pass(&mut streamer, Duration::from_millis(1)).wait(DEADLINE).unwrap();
    });
    drop(model);
    comes_back(&devices);
    drop(devices);
    cuda.assert_clean();
    let seen = seen.0.lock().unwrap();
    let copies = |opened: bool| seen.iter().filter(move |span| span.0 == "copy" && span.1 == opened).map(|span| span.2);
    assert!(copies(true).count() >= 6 && copies(true).count() == copies(false).count(), "{seen:?}");
    let took = copies(true).zip(copies(false)).map(|(begin, end)| end.saturating_duration_since(begin));
    assert!(took.min() >= Some(Duration::from_millis(if card::named() { 0 } else { 9 })));
}

/// Events of a driver, which tells nobody of their end, can be awaited all the same.
#[test]
fn cuda_arrival_can_be_awaited() {
    use std::future::Future;
    use std::task::{Context, Poll, Wake, Waker};
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let subject = Subject::plain(&blocks(&[100_000; 3]), 109);
    let cuda = driver(&Config::with_devices(&[64 << 20]).links(Link::new(0, 20_000_000)));
    let devices = registry();
    let mut streamer = Streamer::new(&load(&devices, &subject, "cpu,*", 1, u64::MAX)).unwrap();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    for layer in 0..3 {
        let guard = streamer.layer(LayerId::new(layer)).unwrap();
        {
            let (mut future, mut asked) = (std::pin::pin!(guard.arrived()), 1);
            while future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                std::thread::park_timeout(DEADLINE);
                asked += 1;
            }
            assert!(asked <= 3, "asked {asked} times");
        }
        let Poll::Ready(again) = std::pin::pin!(guard.arrived()).poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("it arrived")
        };
        again.unwrap();
        assert_eq!(guard.tensors().next().unwrap().device(), GPU0);
    }
    assert_eq!(streamer.report().bytes.keys().collect::<Vec<_>>(), [&CPU]);
    drop((streamer, devices));
    cuda.assert_clean();
}
