//! Modules that are kept compressed: what their files have of them lives on the host or where it is and crosses the links, and a
//! layer's turn finds the weights.

mod support;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use support::compressed::{AnyModel, Packed, check_turns, held, kept};
use support::framework::{Framework, Memory};
use support::machines::steady_pass;
use support::*;
use tensor_offload::backend::{Backend, Clock, MemoryKind, Operation, Role, Simulated};
use tensor_offload::cache::Evict;
use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::error::{CompressedFault, FileFault, PlanFault};
use tensor_offload::plan::{TensorGrouping, Use, Warning};
use tensor_offload::{
    ByteSize, DType, Error, Loader, Matching, Model, ModelCache, Plan, Planner, Registry, Result, Retention, Streamer,
    Weights,
};

#[test]
fn codes_cross_the_links_and_turns_find_weights() {
    let allocations = [
        "cpu,*",
        "cuda:0,20%;cuda:1,20%;xpu:0,20%;disk,20%;cpu,20%",
        "disk,*",
        "cuda:1,60%;cuda:0,40%",
        "xpu:0,60%;cuda:0,40%",
        "cuda:0,*",
    ];
    for tensors in [llama(5, 96), mixed(3), norms(3)] {
        let model = Packed::new(&tensors, 1);
        for allocation in allocations {
            for compute in [GPU0, xpu()] {
                let devices = Registry::described(machine(), Clock::Wall);
                for depth in [0, 2] {
                    let planner = model.planner(devices.machine(), allocation).compute(compute).depth(depth);
                    let plan = planner.clone().fixed_slots(depth == 2).plan().unwrap();
                    let (bytes, taken) = kept(&plan);
                    assert!(taken < bytes || plan.streamed_bytes() == 0, "{plan}");
                    let loaded = load(&devices, &model.subject, &plan);
                    for share in plan.devices() {
                        let needed = share.weights.taken() + share.beside.slots;
                        assert_eq!(held(&devices, share.id), needed, "{} in\n{plan}", share.id);
                        assert_eq!(
                            loaded.bytes().get(&share.id).copied().unwrap_or(0),
                            needed,
                            "{} in\n{plan}",
                            share.id
                        );
                    }
                    let saved: u64 = plan.devices().iter().map(|share| share.weights.saved).sum();
                    assert_eq!(loaded.report().saved, saved);
                    model.file.plain.check(&loaded);
                    let mut streamer = Streamer::new(&loaded).unwrap();
                    (0..3).for_each(|_| model.check_pass(&mut streamer).unwrap());
                    // Layers that have a slot to themselves come once.
                    let (crossed, each) = (streamer.report().bytes.values().sum::<u64>(), plan.streamed_bytes());
                    assert!((each..=4 * each).contains(&crossed), "{crossed} bytes in three passes of\n{plan}");
                    let whole = planner.compress(false).plan().unwrap().streamed_bytes();
                    assert_eq!(whole - each, bytes - taken, "{plan}");
                    drop((streamer, loaded));
                    comes_back(&devices);
                }
            }
        }
    }
}

/// Plans say what is saved, and take no more than what is left.
#[test]
fn a_plan_counts_what_its_files_have() {
    let (model, machine) = (Packed::new(&llama(4, 128), 2), machine());
    let plan = model.planner(&machine, "cuda:0,20%;cpu,*").plan().unwrap();
    let host = plan.device(CPU).unwrap();
    let (bytes, taken) = kept(&plan);
    assert!(taken * 10 < bytes * 8 && bytes > host.weights.bytes * 9 / 10, "{taken} of {bytes}");
    assert_eq!(host.weights.saved, bytes - taken);
    assert_eq!((host.weights.taken(), host.needed()), (host.weights.bytes - host.weights.saved, host.weights.taken()));
    assert!(host.weights.pinned <= host.weights.taken());
    let of_file = |module: &str| {
        let tensor = model.subject.checkpoint().find(&format!("{module}.weight")).unwrap();
        model.subject.checkpoint().compressed(tensor).unwrap()
    };
    for a in plan.assignments().iter().filter(|a| a.is_compressed()) {
        assert_eq!((a.usage, a.bytes - a.saved), (Use::Streamed, of_file(&a.module)), "{}", a.module);
    }
    assert!(plan.to_string().contains("kept compressed"), "{plan}");
    let written = serde_json::to_value(&plan).unwrap();
    assert_eq!(serde_json::from_value::<Plan>(written).unwrap(), plan);
    // What stays on the compute device, or is used where it lives, is as it is.
    let others = model.planner(&machine, "cuda:0,50%;cpu,*").in_place("lm_head").plan().unwrap();
    let plain = |a: &&tensor_offload::plan::Assignment| a.usage != Use::Streamed;
    assert!(others.assignments().iter().filter(plain).all(|a| !a.is_compressed()));
    // Without codes a plan is as without the setting.
    let plain = model.file.plain.planner(&machine, "cuda:0,20%;cpu,*");
    let (with, without) = (plain.clone().compress(true).plan().unwrap(), plain.plan().unwrap());
    assert_eq!((with.slots(), with.assignments()), (without.slots(), without.assignments()));
    let streamed = without.device(CPU).unwrap().weights.bytes;
    assert_eq!(with.warnings(), [Warning::NothingCompressed { bytes: streamed }]);
    // Where the host computes nothing is streamed from it, and its disk is read as always.
    let here = model.planner(&machine, "disk,*").compute(CPU);
    assert_eq!(here.plan().unwrap(), here.compress(false).plan().unwrap());
}

#[test]
fn a_host_holds_more_than_its_memory() {
    let model = Packed::new(&llama(8, 128), 3);
    let bytes = model.subject.layout().bytes();
    let machine = described(&[&format!("cpu={}b", bytes * 9 / 10), "cuda:0=24mb,link=10"]);
    let plan = model.planner(&machine, "cpu,*").compress(false).plan().unwrap_err();
    assert!(matches!(plan, Error::DoesNotFit(_)), "{plan}");
    let plan = model.planner(&machine, "cpu,*").plan().unwrap();
    let devices = Registry::described(machine.clone(), Clock::Virtual);
    let loaded = load(&devices, &model.subject, &plan);
    model.check_pass(&mut Streamer::new(&loaded).unwrap()).unwrap();
    // Mode auto counts with that, too.
    let (host, card) = (format!("cpu={}b", bytes * 6 / 10), format!("cuda:0={}b,link=0.001", bytes * 5 / 10));
    let machine = described(&[&host, &card]);
    let auto = |compress| model.planner(&machine, "auto").compress(compress).depth(1).plan();
    assert!(matches!(auto(false).unwrap_err(), Error::DoesNotFit(_)));
    let plan = auto(true).unwrap();
    let on_host = plan.device(CPU).unwrap().weights;
    assert!(kept(&plan).0 > on_host.bytes * 9 / 10, "{plan}");
    let on_the_way = format!("{:.3} s on the way", on_host.streamed as f64 / 1e6);
    assert!(
        plan.explanation().unwrap().devices.iter().any(|told| told.why.contains(&on_the_way)),
        "{on_the_way} in {plan}"
    );
    let devices = Registry::described(machine.clone(), Clock::Virtual);
    model.check_pass(&mut Streamer::new(&load(&devices, &model.subject, &plan)).unwrap()).unwrap();
}

/// What compression brings is told by samples, and a little more than it takes. What a file has is known.
#[test]
fn an_estimate_is_near_what_files_then_have() {
    let (model, machine) = (Packed::new(&llama(4, 256), 17), machine());
    let of = |layout: &tensor_offload::checkpoint::Layout| {
        let planner = Planner::new(layout, &machine).compute(GPU0).compress(true);
        planner.allocation("cpu,*".parse().unwrap()).plan().unwrap().streamed_bytes() as f64
    };
    let exact = of(model.subject.layout());
    let estimated = of(model.file.plain.weights.clone().compress().unwrap().layout());
    assert!((exact..exact * 1.02).contains(&estimated), "{estimated} bytes, and there are {exact}");
    assert_eq!(of(model.subject.weights.clone().compress().unwrap().layout()), exact);
}

/// A plan for codes is for files that have them.
#[test]
fn a_plan_for_other_codes_is_refused() {
    let (model, devices) = (Packed::new(&llama(3, 96), 4), Registry::described(machine(), Clock::Virtual));
    let plan = model.planner(devices.machine(), "cpu,*").plan().unwrap();
    for weights in [&model.file.plain.weights, &Packed::new(&llama(3, 96), 5).subject.weights] {
        let refused = Loader::new(&devices).load(weights, &plan).unwrap_err();
        assert!(matches!(&refused, Error::Plan(fault) if matches!(**fault, PlanFault::OtherCodes { .. })), "{refused}");
    }
}

/// A pass that is bound by its link takes as much less time as the codes are smaller, and a forecast says so.
#[test]
fn a_pass_that_its_link_bounds_is_as_fast_as_the_codes_are_small() {
    // The table is large, and stays in a slot of its own.
    let mut tensors = llama(8, 128);
    tensors[0].shape = vec![8192, 128];
    let model = Packed::new(&tensors, 6);
    for (described_devices, allocation) in [
        (&["cpu=64mb", "cuda:0=24mb,link=1"][..], "cpu,*"),
        (&["cpu=64mb", "disk=64mb,link=2", "cuda:0=24mb,link=1"][..], "cpu,60%;disk,40%"),
    ] {
        let machine = described(described_devices);
        let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual));
        let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
        let time = |compress: bool| {
            let plan = model.planner(&machine, allocation).compress(compress).depth(2).plan().unwrap();
            let loaded = load(&devices, &model.subject, &plan);
            let compute = vec![Duration::from_micros(1); loaded.layout().layers().len()];
            let pass = steady_pass(&simulated, &loaded, &compute).unwrap();
            let forecast = plan.forecast(loaded.layout(), machine.topology(), &compute.into()).unwrap();
            assert_eq!(pass, forecast, "{allocation}, compressed {compress}");
            assert_eq!(plan.slots().large, 1);
            let bound = plan.estimate(machine.topology(), Duration::ZERO).pass;
            assert!(bound <= forecast && bound > forecast * 9 / 10, "{bound:?} of {forecast:?}");
            (forecast, plan)
        };
        let ((plain, _), (compressed, plan)) = (time(false), time(true));
        let others = plan.assignments().iter().filter(|a| a.is_compressed() && !a.module.contains("embed"));
        let (bytes, taken) = others.fold((0, 0), |(bytes, taken), a| (bytes + a.bytes, taken + a.bytes - a.saved));
        let ratio = compressed.as_secs_f64() / plain.as_secs_f64();
        let wanted = taken as f64 / bytes as f64;
        assert!((ratio - wanted).abs() < 0.01, "{ratio} of the time with {wanted} of the bytes");
    }
}

/// Decoding takes as long as the device is described to take, for weights and for a model without contents, and mode auto knows.
#[test]
fn decoding_takes_the_time_that_is_described() {
    let model = Packed::new(&llama(8, 128), 19);
    let compute = vec![Duration::from_micros(1); model.subject.layout().layers().len()];
    let forecast_with = |decode: &str, compress: bool| {
        let machine = described(&["cpu=64mb", "disk=64mb,link=2", &format!("cuda:0=24mb,link=1{decode}")]);
        let planner = model.planner(&machine, "cpu,60%;disk,40%").compress(compress).depth(1);
        let plan = planner.clone().plan().unwrap();
        let forecast = plan.forecast(model.subject.layout(), machine.topology(), &compute.clone().into()).unwrap();
        let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual));
        let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
        let pass = steady_pass(&simulated, &load(&devices, &model.subject, &plan), &compute).unwrap();
        assert_eq!(pass, forecast, "{decode}, compressed {compress}");
        // A model without contents has no verdicts, which take a few nanoseconds of each layer.
        let clocked = support::machines::clocked(&machine, model.subject.layout(), &plan, &compute).unwrap();
        assert!(clocked.abs_diff(forecast) < forecast / 1000, "{clocked:?}, not {forecast:?}");
        let read: Plan = serde_json::from_value(serde_json::to_value(&plan).unwrap()).unwrap();
        assert_eq!(
            read.forecast(model.subject.layout(), machine.topology(), &compute.clone().into()).unwrap(),
            forecast
        );
        let auto = planner.allocation("auto,reserve=22mb".parse().unwrap()).plan().unwrap();
        let told = auto.explanation().unwrap();
        assert!(told.compressed.is_none_or(|pass| pass > told.pass), "{told}");
        (forecast, (kept(&auto).0 > 0, told.compressed.is_some()))
    };
    let plain = forecast_with("", false).0;
    let [free, fast, slow] = ["", ",decode=100", ",decode=0.5"].map(|decode| forecast_with(decode, true));
    // What is faster than the link is hidden behind it.
    assert!(free.0 == fast.0 && fast.0 < plain && plain < slow.0, "{free:?}, {fast:?}, {slow:?}, plain {plain:?}");
    assert_eq!([free.1, fast.1, slow.1], [(true, false), (true, false), (false, true)]);
}

/// A code that is larger than half a landing buffer arrives in parts, which are decoded while the next ones arrive: so a link does not
/// wait for kernels, and damage anywhere is told.
#[test]
fn large_tensors_are_decoded_part_by_part_while_the_link_goes_on() {
    let tensors = [
        spec("model.layers.0.up.weight", DType::BF16, &[2048, 8192]),
        spec("model.layers.0.up.bias", DType::BF16, &[2048]),
        spec("model.layers.1.up.weight", DType::BF16, &[8192, 2048]),
        spec("model.layers.1.norm.weight", DType::F32, &[8192]),
        spec("model.layers.2.down.weight", DType::BF16, &[2048, 2051]),
    ];
    let model = Packed::new(&tensors, 23);
    let devices = ["cpu=1gb", "disk=1gb,link=7", "xpu:0=128mb,link=55", "cuda:0=256mb,link=55,decode=1636"];
    let machine = described(&devices);
    let compute = vec![Duration::from_micros(1); 3];
    for (number, allocation) in ["cpu,*", "disk,*", "xpu:0,40%;cpu,60%"].into_iter().enumerate() {
        let plan = model.planner(&machine, allocation).depth(1).plan().unwrap();
        // No more than two halves of 16 MiB, and room for two verdicts.
        assert_eq!(plan.slots().landing_bytes, (32 << 20) + 512, "{plan}");
        let registry = Registry::described(machine.clone(), Clock::Wall);
        let loaded = load(&registry, &model.subject, &plan);
        let mut streamer = Streamer::new(&loaded).unwrap();
        (0..2).for_each(|_| model.check_pass(&mut streamer).unwrap());
        drop((streamer, loaded));
        comes_back(&registry);

        let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual));
        let registry = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
        let pass = steady_pass(&simulated, &load(&registry, &model.subject, &plan), &compute).unwrap();
        let forecast =
            |plan: &Plan| plan.forecast(model.subject.layout(), machine.topology(), &compute.clone().into()).unwrap();
        assert_eq!(pass, forecast(&plan), "{allocation}");
        let clocked = support::machines::clocked(&machine, model.subject.layout(), &plan, &compute).unwrap();
        assert!(clocked.abs_diff(forecast(&plan)) < Duration::from_nanos(100), "{clocked:?}");
        if number == 0 {
            let bound = plan.estimate(machine.topology(), Duration::ZERO).pass;
            let (plain, (bytes, taken)) =
                (model.planner(&machine, allocation).compress(false).depth(1).plan(), kept(&plan));
            let plain = forecast(&plain.unwrap());
            let ratio = forecast(&plan).as_secs_f64() / plain.as_secs_f64();
            assert!(forecast(&plan) < bound * 1006 / 1000, "{:?}, where the link takes {bound:?}", forecast(&plan));
            assert!(ratio < taken as f64 / bytes as f64 + 0.005, "{ratio}: {taken} of {bytes} bytes");
        }
    }
    let code = tensor_offload::lossless::compress(DType::BF16, model.file.plain.bytes_of(&tensors[0].name)).unwrap();
    let file = fs::read(model.file.file()).unwrap();
    let begin = file.windows(64).position(|bytes| bytes == &code[..64]).unwrap();
    // Of the first part, across the border of the two, and at the end.
    for at in [code.len() / 3, (16 << 20) - 40, (16 << 20) + 40, code.len() - 20] {
        let mut damaged = file.clone();
        damaged[begin + at] ^= 4;
        fs::write(model.file.file(), &damaged).unwrap();
        let weights: Weights = model.file.open().into();
        let registry = Registry::described(machine.clone(), Clock::Wall);
        let planner = Planner::new(weights.layout(), registry.machine()).compute(GPU0).compress(true);
        let plan = planner.allocation("disk,*".parse().unwrap()).plan().unwrap();
        let loaded = Arc::new(Loader::new(&registry).load(&weights, &plan).unwrap());
        let mut streamer = Streamer::new(&loaded).unwrap();
        let [first, second, _] = layers(&streamer).collect::<Vec<_>>()[..] else { panic!("three layers") };
        let told = streamer.layer(first).unwrap().wait(DEADLINE);
        assert!(matches!(told, Err(Error::Corrupted { .. })), "byte {at}: {told:?}");
        streamer.layer(second).or_else(|_| streamer.layer(second)).unwrap().wait(DEADLINE).unwrap();
    }
}

/// The host keeps codes of what is on the disk, so that its memory holds more layers.
#[test]
fn a_host_cache_keeps_codes() {
    let model = Packed::new(&llama(6, 128), 7);
    let machine = described(&["cpu=64mb", "disk=64mb", "cuda:0=24mb,link=10"]);
    let devices = Registry::new([Arc::new(Simulated::new(machine, Clock::Wall)) as Arc<dyn Backend>]);
    let plan = model.planner(devices.machine(), "disk,*").depth(1).plan().unwrap();
    let (_, taken) = kept(&plan);
    let loader = Loader::new(&devices).host_cache(ByteSize(plan.streamed_bytes()));
    let loaded = Arc::new(loader.load(&model.subject.weights, &plan).unwrap());
    let mut streamer = Streamer::new(&loaded).unwrap();
    model.check_pass(&mut streamer).unwrap();
    let (read, held) = (streamer.report().read, held(&devices, CPU));
    assert!(read >= plan.streamed_bytes() && held >= taken, "{read} bytes read, {held} kept");
    assert!(held < plan.bytes() * 9 / 10);
    (0..2).for_each(|_| model.check_pass(&mut streamer).unwrap());
    let report = streamer.report();
    assert!(report.read < plan.streamed_bytes() * 2, "{report}");
    assert!(report.bytes.values().sum::<u64>() > plan.streamed_bytes() * 3 - plan.streamed_bytes() / 4, "{report}");
}

/// Adapters change some modules, which are then as they were changed; the others stay compressed.
#[test]
fn what_an_adapter_changes_is_not_compressed() {
    let tensors = llama(4, 96);
    let model = Packed::new(&tensors, 8);
    let patched = |checkpoint: &tensor_offload::Checkpoint| {
        let one: Vec<TensorSpec> = tensors.iter().filter(|tensor| tensor.name.contains("layers.2.")).cloned().collect();
        let weights = Weights::patched(checkpoint.clone(), two_loras(&one, 9), Matching::Strict).unwrap();
        Subject::new(weights)
    };
    let (subject, wanted) = (patched(model.subject.checkpoint()), patched(model.file.plain.checkpoint()));
    let devices = Registry::described(machine(), Clock::Wall);
    for allocation in ["cpu,*", "disk,50%;cpu,50%"] {
        let plan = subject.planner(devices.machine(), allocation).compress(true).plan().unwrap();
        for a in plan.assignments().iter().filter(|a| a.bytes > 10_000) {
            assert_eq!(a.is_compressed(), !a.module.contains("layers.2."), "{}", a.module);
        }
        let loaded = load(&devices, &subject, &plan);
        wanted.check(&loaded);
        check_pass(&mut Streamer::new(&loaded).unwrap(), &wanted).unwrap();
    }
}

/// Models that are derived, refilled, moved and demoted are right, and share what they can.
#[test]
fn models_made_of_others_are_compressed_too() {
    let tensors = llama(4, 96);
    let model = Packed::new(&tensors, 10);
    let devices = Registry::described(machine(), Clock::Wall);
    let planner = model.planner(devices.machine(), "cuda:0,30%;cpu,*");
    let (plan, loader) = (planner.plan().unwrap(), Loader::new(&devices));
    let base = load(&devices, &model.subject, &plan);
    let level = held(&devices, CPU);
    let check = |loaded: &Arc<Model>| {
        model.file.plain.check(loaded);
        model.check_pass(&mut Streamer::new(loaded).unwrap()).unwrap();
    };
    let again = Arc::new(loader.derive(&base, &model.subject.weights, &plan).unwrap());
    assert_eq!((held(&devices, CPU), again.report().shared), (level, plan.bytes()));
    check(&again);
    drop(again);
    // Staged instead of pinned: the codes are copied, and not read again.
    let staged = planner.clone().pinned_cap(Some(ByteSize(0))).plan().unwrap();
    let copied = Arc::new(loader.relocate(&base, &staged).unwrap());
    assert_eq!((copied.report().read, kept(&staged)), (0, kept(&plan)));
    check(&copied);
    drop(copied);
    // To the disk and back, as weights, and to other devices.
    let on_disk = model.planner(devices.machine(), "cuda:0,30%;disk,*").plan().unwrap();
    let moved = Arc::new(loader.derive(&base, &model.subject.weights, &on_disk).unwrap());
    assert_eq!(moved.report().in_files, on_disk.device(DISK).unwrap().weights.in_files);
    check(&moved);
    let back = Arc::new(loader.relocate(&moved, &plan).unwrap());
    assert_eq!(back.report().read, 0);
    check(&back);
    drop((moved, back));
    for allocation in ["cuda:0,30%;cpu,*", "cuda:1,50%;cpu,*", "xpu:0,*", "disk,*"] {
        let plain = model.planner(devices.machine(), allocation).compress(false).plan().unwrap();
        let weights = Arc::new(loader.relocate(&base, &plain).unwrap());
        assert_eq!((weights.report().read, kept(&plain).0), (0, 0));
        check(&weights);
        // Back to codes: they are made of the weights, or read from the files.
        let made = Arc::new(loader.relocate(&weights, &staged).unwrap());
        assert_eq!((made.report().read, kept(made.plan())), (0, kept(&staged)));
        check(&made);
        drop(made);
        let derived = Arc::new(loader.derive(&weights, &model.subject.weights, &staged).unwrap());
        check(&derived);
    }
    // Another generation takes new memory for what changes alone.
    let one: Vec<TensorSpec> = tensors.iter().filter(|tensor| tensor.name.contains("layers.1.")).cloned().collect();
    let weights = Weights::patched(model.subject.checkpoint().clone(), two_loras(&one, 11), Matching::Strict).unwrap();
    let wanted = Subject::new(weights);
    let changed = wanted.planner(devices.machine(), "cuda:0,30%;cpu,*").compress(true).plan().unwrap();
    let derived = Arc::new(loader.derive(&base, &wanted.weights, &changed).unwrap());
    wanted.check(&derived);
    let refilled = Arc::new(loader.refill(derived, &model.subject.weights, &plan).unwrap());
    check(&refilled);
    drop(refilled);
    // What leaves the card goes to the host as weights.
    let cache = ModelCache::new();
    cache.insert("model", Arc::clone(&base), Retention::Keep);
    drop(base);
    let demoted = plan.demoted(model.subject.layout(), devices.machine()).unwrap();
    let room = (24 << 20) - demoted.device(GPU0).unwrap().needed();
    cache.make_room(&devices, GPU0, room, Evict::Demote).unwrap();
    let loaded = cache.get("model").unwrap();
    assert_eq!((loaded.plan(), kept(&demoted)), (&demoted, kept(&plan)));
    assert_eq!(held(&devices, CPU), demoted.device(CPU).unwrap().weights.taken());
    check(&loaded);
    drop((loaded, cache));
    comes_back(&devices);
}

#[test]
fn slots_may_be_the_callers_own_or_divided() {
    let model = Packed::new(&llama(4, 96), 12);
    let devices = Registry::described(machine(), Clock::Wall);
    let planner = model.planner(devices.machine(), "cuda:0,20%;disk,30%;cpu,50%");
    let plan = planner.clone().external_slots(true).plan().unwrap();
    let loaded = load(&devices, &model.subject, &plan);
    let device = loaded.residency().device();
    for _ in 0..2 {
        let slots = (0..3).map(|_| device.alloc(plan.slots().largest() as usize, MemoryKind::Whole));
        let slots = slots.collect::<Result<_>>().unwrap();
        let mut streamer = Streamer::with_slots(&loaded, device.stream(Role::Compute).unwrap(), slots).unwrap();
        (0..2).for_each(|_| model.check_pass(&mut streamer).unwrap());
        assert_eq!(streamer.into_slots().unwrap().len(), 3);
    }
    for grouping in [TensorGrouping::PerType, TensorGrouping::PerTensor] {
        let framework = Framework::new(GPU0, grouping, Memory::Locked);
        let plan = planner.clone().grouping(grouping).plan().unwrap();
        assert!(kept(&plan).0 > 0);
        let loader = Loader::new(&devices).allocator(Arc::clone(&framework) as _);
        let loaded = Arc::new(loader.load(&model.subject.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&loaded).unwrap();
        (0..2).for_each(|_| model.check_pass(&mut streamer).unwrap());
    }
}

/// Without contents nothing is decoded, and everything takes as long.
#[test]
fn a_model_without_contents_streams_in_the_same_time() {
    let model = Packed::new(&llama(5, 128), 13);
    let machine = described(&["cpu=64mb", "disk=64mb,link=2", "cuda:0=24mb,link=1"]);
    let plan = model.planner(&machine, "cuda:0,20%;disk,20%;cpu,60%").plan().unwrap();
    let compute = vec![Duration::from_micros(3); model.subject.layout().layers().len()];
    let forecast = plan.forecast(model.subject.layout(), machine.topology(), &compute.clone().into()).unwrap();
    let clocked = support::machines::clocked(&machine, model.subject.layout(), &plan, &compute).unwrap();
    assert!(clocked.abs_diff(forecast) < Duration::from_nanos(10), "{clocked:?}, not {forecast:?}");
}

/// A byte of a code that changes is an error of the load on the host, and of the layer from the disk, and no other layer is lost.
#[test]
fn damaged_codes_are_errors_and_no_wrong_weights() {
    let model = Packed::new(&llama(3, 96), 14);
    let name = "model.layers.1.mlp.up_proj.weight";
    let tensor = model.subject.checkpoint().find(name).unwrap();
    let code = tensor_offload::lossless::compress(DType::BF16, model.file.plain.bytes_of(name)).unwrap();
    let file = fs::read(model.file.file()).unwrap();
    let begin = file.windows(code.len()).position(|bytes| bytes == code).unwrap();
    assert_eq!(model.subject.checkpoint().compressed(tensor), Some(code.len() as u64));
    for at in [begin + 20, begin + 70, begin + code.len() / 2, begin + code.len() - 20] {
        let mut damaged = file.clone();
        damaged[at] ^= 4;
        fs::write(model.file.file(), &damaged).unwrap();
        let weights: Weights = model.file.open().into();
        let devices = Registry::described(machine(), Clock::Wall);
        let planner = Planner::new(weights.layout(), devices.machine()).compute(GPU0).compress(true).depth(1);
        let plan = planner.clone().allocation("cpu,*".parse().unwrap()).plan().unwrap();
        let error = Loader::new(&devices).load(&weights, &plan).unwrap_err();
        let Error::File { tensor, fault, .. } = &error else { panic!("{error}") };
        assert_eq!(tensor.as_deref(), Some(name), "{error}");
        assert!(matches!(&**fault, FileFault::Compressed(CompressedFault::Code(_))), "{error}");
        comes_back(&devices);
        // Header and index are read when it is loaded, and blocks for a layer's turn.
        let plan = planner.allocation("disk,*".parse().unwrap()).plan().unwrap();
        let loaded = match Loader::new(&devices).load(&weights, &plan) {
            Ok(loaded) => Arc::new(loaded),
            Err(error) => {
                assert!(at < begin + 100 && error.to_string().contains(name), "{error}");
                continue;
            }
        };
        assert!(at >= begin + 100, "byte {} of the code", at - begin);
        let mut streamer = Streamer::new(&loaded).unwrap();
        for pass in 0..2 {
            let (mut told, mut seen) = (0, 0);
            for layer in layers(&streamer) {
                let is_damaged = loaded.layout().layer(layer).unwrap().name == "model.layers.1";
                let guard = match streamer.layer(layer) {
                    Ok(guard) => guard,
                    // The layer before it was damaged, and the next attempt is of the layer itself.
                    Err(error) => {
                        assert!(matches!(error, Error::Corrupted { .. }), "{error}");
                        assert!(error.to_string().contains("`model.layers.1`"), "{error}");
                        told += 1;
                        streamer.layer(layer).unwrap()
                    }
                };
                match guard.wait(DEADLINE) {
                    Err(error) => {
                        assert!(is_damaged && error.to_string().contains("`model.layers.1` are damaged"), "{error}");
                        assert!(guard.to_vec::<half::bf16>("mlp.up_proj.weight").is_err());
                        seen += 1;
                    }
                    Ok(()) => {
                        assert!(!is_damaged, "not noticed in pass {pass}");
                        check_layer(&guard, &model.file.plain).unwrap();
                    }
                }
            }
            streamer.verify().unwrap();
            assert_eq!((told, seen), (1, 1), "pass {pass}");
        }
        drop((streamer, loaded));
        comes_back(&devices);
    }
}

/// A code of other weights than the metadata says is none of the tensor's, wherever it lives.
#[test]
fn a_code_of_other_weights_is_refused() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let plain = Subject::plain(&[spec("x.weight", DType::BF16, &[9000])], 18);
    let code = tensor_offload::lossless::compress(DType::BF16, plain.bytes_of("x.weight")).unwrap();
    for (number, (entry, is_right)) in
        [("BF16 [90, 100]", true), ("BF16 [90, 101]", false), ("F16 [90, 100]", false)].into_iter().enumerate()
    {
        let header = serde_json::json!({
            "__metadata__": { "x.weight.lossless": entry },
            "x.weight.lossless": { "dtype": "U8", "shape": [code.len()], "data_offsets": [0, code.len()] },
        });
        let header = header.to_string().into_bytes();
        let path = folder.path().join(format!("{number}.safetensors"));
        fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], &header, &code].concat()).unwrap();
        let weights: Weights = tensor_offload::Checkpoint::open(&path).unwrap().into();
        let devices = Registry::described(machine(), Clock::Virtual);
        for allocation in ["cpu,*", "disk,*"] {
            let planner = Planner::new(weights.layout(), devices.machine()).compute(GPU0).compress(true);
            let plan = planner.allocation(allocation.parse().unwrap()).plan().unwrap();
            assert!(kept(&plan).0 > 0);
            match Loader::new(&devices).load(&weights, &plan) {
                Ok(_) => assert!(is_right, "{entry} on {allocation}"),
                Err(error) => {
                    let Error::File { tensor, fault, .. } = &error else { panic!("{error}") };
                    assert_eq!((tensor.as_deref(), is_right), (Some("x.weight"), false), "{error}");
                    let FileFault::Compressed(fault) = &**fault else { panic!("{error}") };
                    assert!(matches!(fault, CompressedFault::Other { found: 9000, .. }), "{error}");
                }
            }
        }
    }
}

/// The last layers of the last pass are asked for at the end.
#[test]
fn damage_is_told_at_the_end_of_a_pass() {
    let model = Packed::new(&llama(2, 96), 15);
    let code = tensor_offload::lossless::compress(DType::BF16, model.file.plain.bytes_of("lm_head.weight")).unwrap();
    let mut file = fs::read(model.file.file()).unwrap();
    let begin = file.windows(code.len()).position(|bytes| bytes == code).unwrap();
    file[begin + code.len() / 2] ^= 1;
    fs::write(model.file.file(), &file).unwrap();
    let weights: Weights = model.file.open().into();
    let devices = Registry::described(machine(), Clock::Wall);
    let planner = Planner::new(weights.layout(), devices.machine()).compute(GPU0).compress(true);
    let plan = planner.allocation("disk,*".parse().unwrap()).plan().unwrap();
    let loaded = Arc::new(Loader::new(&devices).load(&weights, &plan).unwrap());
    let mut streamer = Streamer::new(&loaded).unwrap();
    for layer in streamer.pass() {
        drop(layer.unwrap());
    }
    let error = streamer.verify().unwrap_err();
    assert!(matches!(error, Error::Corrupted { .. }) && error.to_string().contains("`lm_head`"), "{error}");
    streamer.verify().unwrap();
}

/// Whatever operation fails, the error is told, all memory comes back, and the next attempt is right.
#[test]
fn nothing_is_lost_whatever_operation_fails() {
    // The large one arrives in parts.
    let large = spec("model.layers.1.large.weight", DType::BF16, &[256, 192]);
    let model = Packed::new(&[llama(3, 96), vec![large]].concat(), 16);
    let path = |devices: &Registry| -> Result<()> {
        let planner = model.planner(devices.machine(), "cuda:0,20%;xpu:0,20%;disk,20%;cpu,*").depth(1);
        let plan = planner.landing_cap(ByteSize(0)).plan()?;
        assert!(plan.slots().landing_bytes < 2 * (33 << 10) + 1024, "{plan}");
        let loaded = Arc::new(Loader::new(devices).workers(1).load(&model.subject.weights, &plan)?);
        let mut streamer = Streamer::new(&loaded)?;
        check_turns(&mut streamer, &model.file.plain)
    };
    let [decoded, calls, told] = whatever_operation_fails(Operation::Decompress, path);
    assert!(decoded >= 12, "{decoded} tensors");
    // What fails ahead of its turn is fetched again then.
    assert!(told > calls / 2, "{told} of {calls} failures");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any small model, over any division of a machine.
    #[test]
    fn any_model_is_as_its_files_were(any in AnyModel::strategy()) {
        let model = Packed::new(&any.tensors, any.seed);
        let devices = Registry::described(machine(), Clock::Virtual);
        let planner = any.apply(model.planner(devices.machine(), &any.allocation)).landing_cap(ByteSize(any.seed % 30_000));
        let plan = planner.plan().unwrap();
        plan.verify(model.subject.layout()).unwrap();
        let loaded = load(&devices, &model.subject, &plan);
        for share in plan.devices() {
            prop_assert_eq!(held(&devices, share.id), share.weights.taken() + share.beside.slots);
        }
        let mut streamer = Streamer::new(&loaded).unwrap();
        for _ in 0..2 {
            model.check_pass(&mut streamer).unwrap();
        }
    }
}
