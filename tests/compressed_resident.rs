//! Modules that are kept compressed on the compute device: it holds more of them, and decodes them into a slot for each turn of their
//! layer.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::compressed::{Packed, check, check_turns, check_values, held, kept};
use support::framework::{Framework, Memory};
use support::machines::{clocked, steady_pass};
use support::*;
use tensor_offload::backend::{Backend, Clock, MemoryKind, Operation, Role, Simulated};
use tensor_offload::cache::Evict;
use tensor_offload::checkpoint::{Layout, TensorSpec};
use tensor_offload::error::PlanFault;
use tensor_offload::plan::{Assignment, TensorGrouping, Use, Warning};
use tensor_offload::{
    ByteSize, DType, Error, Loader, Matching, ModelBuilder, ModelCache, Plan, Planner, Registry, Result, Retention,
    Streamer, Weights,
};

/// The modules that live compressed on the compute device.
fn compressed_here(plan: &Plan) -> Vec<&str> {
    let here = plan.assignments().iter().filter(|a| a.usage == Use::Unpacked && a.is_compressed());
    here.map(|a| &*a.module).collect()
}

#[test]
fn turns_find_weights_that_live_compressed_on_the_device() {
    let allocations = ["cuda:0,*", "cuda:0,50%;cpu,50%", "cuda:0,40%;cuda:1,20%;xpu:0,10%;disk,20%;cpu,10%"];
    for tensors in [llama(4, 96), mixed(3), norms(3)] {
        let model = Packed::new(&tensors, 31);
        let patched = Subject::patched(&tensors, 32);
        let made = patched.weights.clone().compress().unwrap();
        for (weights, subject) in [(&model.subject.weights, &model.file.plain), (&made, &patched)] {
            for (allocation, streamed) in
                allocations.iter().flat_map(|allocation| [(allocation, true), (allocation, false)])
            {
                for compute in [GPU0, xpu()] {
                    let devices = Registry::described(machine(), Clock::Wall);
                    let planner = Planner::new(weights.layout(), devices.machine()).compute(compute).depth(1);
                    let planner = planner.allocation(allocation.parse().unwrap()).compress(streamed);
                    let plan = planner.clone().compress_resident(true).plan().unwrap();
                    let without = planner.plan().unwrap();
                    let on_it = |plan: &Plan| plan.device(compute).unwrap().weights;
                    assert_eq!(on_it(&plan).bytes, on_it(&without).bytes, "quotas are of weights");
                    let here = compressed_here(&plan);
                    assert!(!here.is_empty() || on_it(&plan).bytes == 0 || tensors != llama(4, 96), "{plan}");
                    assert_eq!(on_it(&plan).saved > 0, !here.is_empty());
                    assert!(compressed_here(&without).is_empty());
                    let loaded = Arc::new(Loader::new(&devices).load(weights, &plan).unwrap());
                    check(&devices, &loaded, subject);
                    drop(loaded);
                    comes_back(&devices);
                }
            }
        }
    }
}

/// What would make slots large, is small, used at both ends, or wanted there, stays as it is; and a plan says all of it.
#[test]
fn a_plan_tells_what_lives_compressed_and_what_does_not() {
    let mut tensors = llama(4, 128);
    tensors[0].shape = vec![8192, 128];
    tensors.push(spec("model.layers.1.mlp.up_proj.bias", DType::BF16, &[8]));
    let (model, machine) = (Packed::new(&tensors, 33), machine());
    let planner = model.planner(&machine, "cuda:0,*").compress(false).compress_resident(true);
    let plan = planner.clone().keep_resident("model.layers.2.*").plan().unwrap();
    let here = compressed_here(&plan);
    assert!(here.iter().all(|module| !module.contains("layers.2.") && !module.contains("embed")), "{here:?}");
    assert!(here.len() > 12, "{here:?}");
    let usage = |module: &str| plan.assignments().iter().find(|a| &*a.module == module).unwrap().usage;
    assert_eq!(usage("model.embed_tokens"), Use::Resident);
    let share = plan.device(GPU0).unwrap();
    let (bytes, taken) = kept(&plan);
    assert_eq!((share.weights.saved, share.weights.taken()), (bytes - taken, share.weights.bytes - (bytes - taken)));
    // Nothing moves; there are slots of a layer, and room for a verdict.
    assert_eq!(plan.streamed_bytes(), 0);
    let slots = plan.slots();
    assert_eq!((slots.count, slots.landings, slots.landing_bytes), (3, 1, 512), "{slots}");
    assert_eq!(share.beside.slots, 3 * slots.bytes_each + 512);
    assert!(plan.to_string().contains("kept compressed"), "{plan}");
    // For other codes it is refused.
    let devices = Registry::described(machine.clone(), Clock::Virtual);
    let other = Packed::new(&tensors, 34);
    let refused = Loader::new(&devices).load(&other.subject.weights, &plan).unwrap_err();
    assert!(matches!(&refused, Error::Plan(fault) if matches!(**fault, PlanFault::OtherCodes { .. })), "{refused}");
    // A host that computes uses its weights where they are, and without codes all is as without the setting.
    let here = planner.compute(CPU).allocation("cpu,*".parse().unwrap());
    assert_eq!(here.clone().plan().unwrap(), here.compress_resident(false).plan().unwrap());
    let plain = model.file.plain.planner(&machine, "cuda:0,*");
    let (with, without) = (plain.clone().compress_resident(true).plan().unwrap(), plain.plan().unwrap());
    assert_eq!((with.slots(), with.assignments()), (without.slots(), without.assignments()));
    let is_for = |a: &&Assignment| !a.module.contains("embed") && a.bytes * 10_000 >= without.bytes();
    let bytes = without.assignments().iter().filter(is_for).map(|a| a.bytes).sum();
    assert_eq!(with.warnings(), [Warning::NothingCompressed { bytes }]);
    let all = plain.keep_resident("*").compress_resident(true).plan().unwrap();
    assert_eq!(all.warnings(), [], "all of it is to stay as it is");
}

/// A forecast knows that the device decodes what lives on it, beside what arrives, and a virtual clock says the same.
#[test]
fn a_forecast_counts_what_is_decoded_where_it_lives() {
    let model = Packed::new(&llama(8, 128), 35);
    let layout = model.subject.layout();
    let compute = vec![Duration::from_micros(2); layout.layers().len()];
    for decode in ["", ",decode=100", ",decode=0.5"] {
        let mut passes = Vec::new();
        for (allocation, streamed, resident) in [
            ("cuda:0,*", false, true),
            ("cuda:0,50%;cpu,50%", false, true),
            ("cuda:0,50%;cpu,50%", true, true),
            ("cuda:0,50%;cpu,50%", true, false),
            ("cuda:0,30%;disk,20%;cpu,50%", true, true),
        ] {
            let machine = described(&["cpu=64mb", "disk=64mb,link=2", &format!("cuda:0=24mb,link=1{decode}")]);
            let planner = model.planner(&machine, allocation).compress(streamed).compress_resident(resident);
            let plan = planner.depth(1).plan().unwrap();
            let forecast = plan.forecast(layout, machine.topology(), &compute.clone().into()).unwrap();
            let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual));
            let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
            let pass = steady_pass(&simulated, &load(&devices, &model.subject, &plan), &compute).unwrap();
            assert_eq!(pass, forecast, "{allocation}{decode}, streamed {streamed}, resident {resident}");
            // A model without contents has no verdicts, which take a few nanoseconds of each layer.
            let clocked = clocked(&machine, layout, &plan, &compute).unwrap();
            assert!(clocked.abs_diff(forecast) < forecast / 100, "{allocation}: {clocked:?}, not {forecast:?}");
            passes.push(forecast);
        }
        // A slow decoder shows.
        let whole = compute.iter().sum::<Duration>();
        let slow = passes[0] > whole * 3;
        assert_eq!(slow, decode.contains("0.5"), "{:?} where {whole:?} is computed{decode}", passes[0]);
    }
}

/// Mode auto keeps resident modules compressed where a pass is shorter so, and only there.
#[test]
fn auto_weighs_what_it_takes_to_decode() {
    let model = Packed::new(&llama(8, 128), 36);
    let bytes = model.subject.layout().bytes();
    let auto = |card: u64, options: &str, compute: u64| {
        let machine = described(&["cpu=64mb", &format!("cuda:0={card}b,link=1{options}")]);
        let planner = model.planner(&machine, "auto").compress_resident(true).depth(1);
        let plan = planner.compute_time(Duration::from_micros(compute)).plan().unwrap();
        plan.verify(model.subject.layout()).unwrap();
        let devices = Registry::described(machine, Clock::Virtual);
        check_values(&load(&devices, &model.subject, &plan), &model.file.plain);
        plan
    };
    // Where all of it fits, nothing is compressed; nor where the compute hides what is streamed.
    assert!(compressed_here(&auto(2 * bytes, "", 10)).is_empty());
    assert!(compressed_here(&auto(bytes * 9 / 10, "", 1_000_000)).is_empty());
    // A model that fits if it is compressed is not streamed.
    let whole = auto(bytes * 95 / 100, ",decode=100", 10);
    assert_eq!((whole.streamed_bytes(), compressed_here(&whole).is_empty()), (0, false), "{whole}");
    // A larger one is streamed in part, and less of it than without.
    let part = auto(bytes * 6 / 10, ",decode=100", 10);
    assert!(part.streamed_bytes() > 0 && !compressed_here(&part).is_empty(), "{part}");
    let machine = described(&["cpu=64mb", &format!("cuda:0={}b,link=1,decode=100", bytes * 6 / 10)]);
    let without = model.planner(&machine, "auto").depth(1).compute_time(Duration::from_micros(10)).plan().unwrap();
    assert!(part.streamed_bytes() < without.streamed_bytes() * 9 / 10, "{part}\n{without}");
    assert!(part.explanation().unwrap().pass < without.explanation().unwrap().pass);
    // A device that decodes slowly streams, and the plan says why.
    let slow = auto(bytes * 9 / 10, ",decode=0.1", 10);
    assert!(compressed_here(&slow).is_empty(), "{slow}");
    let told = slow.explanation().unwrap();
    assert!(told.compressed_resident.is_some_and(|pass| pass > told.pass), "{told}");
    assert!(told.to_string().contains("with resident weights kept compressed, too, a pass takes"), "{told}");
}

/// Layers of any sizes, of which some are to stay as they are: a plan is found where there is one without, and a pass is no longer.
#[test]
fn auto_copes_with_any_sizes() {
    let mut random = Random::new(43);
    let mut below = |most: u64| random.next() % most;
    let mut compressed = 0;
    for case in 0..60 {
        let large = 1 + below(40);
        let mut sizes: Vec<u64> = (0..2 + below(40)).map(|_| (1 + below(4)) << 20).collect();
        sizes.insert(below(sizes.len() as u64) as usize, large << 20);
        let layout = Layout::blocks(sizes.iter().copied()).assume_compressed(0.6 + below(30) as f64 / 100.0);
        let total: u64 = sizes.iter().sum();
        let card = total * (30 + below(100)) / 100;
        let decode = ["", ",decode=2", ",decode=50"][below(3) as usize];
        let machine = described(&["cpu=1gb", &format!("cuda:0={card}b,link=2{decode}")]);
        let kept = format!("block.{}", below(sizes.len() as u64));
        let planner = || {
            let planner = Planner::new(&layout, &machine).allocation("auto".parse().unwrap()).depth(case % 3);
            let planner = if case % 2 == 0 { planner.keep_resident(&kept) } else { planner };
            planner.compress(true)
        };
        let (with, without) = (planner().compress_resident(true).plan(), planner().plan());
        let Ok(with) = with else {
            assert!(without.is_err(), "{} where {}", with.unwrap_err(), without.unwrap());
            continue;
        };
        with.verify(&layout).unwrap();
        let pass = |plan: &Plan| plan.explanation().unwrap().pass;
        assert!(without.is_err() || pass(&with) <= pass(without.as_ref().unwrap()), "{with}");
        compressed += usize::from(!compressed_here(&with).is_empty());
    }
    assert!(compressed > 5, "{compressed} plans keep modules compressed on the card");
    // Much that stays as it is takes nothing from what may be compressed.
    let sizes = std::iter::once(4 << 30).chain(std::iter::repeat_n(20 << 20, 3000));
    let layout = Layout::blocks(sizes).assume_compressed(0.675);
    let machine = described(&["cpu=256gb", "cuda:0=24gb,link=25"]);
    let planner = Planner::new(&layout, &machine).allocation("auto".parse().unwrap()).keep_resident("block.0");
    let plan = planner.compress(true).compress_resident(true).plan().unwrap();
    let share = plan.device(GPU0).unwrap();
    assert!(share.needed() > 23 << 30 && share.weights.bytes > 32 << 30, "{plan}");
}

/// Models that are derived, refilled, moved and demoted are right, and share or copy the codes that they can.
#[test]
fn models_made_of_others_live_compressed_too() {
    let tensors = llama(4, 96);
    let model = Packed::new(&tensors, 37);
    let devices = Registry::described(machine(), Clock::Wall);
    let planner = model.planner(devices.machine(), "cuda:0,60%;cpu,40%").compress_resident(true);
    let (plan, loader) = (planner.plan().unwrap(), Loader::new(&devices));
    let base = load(&devices, &model.subject, &plan);
    let level = held(&devices, GPU0);
    let again = Arc::new(loader.derive(&base, &model.subject.weights, &plan).unwrap());
    assert_eq!((held(&devices, GPU0), again.report().shared), (level, plan.bytes()));
    check_values(&again, &model.file.plain);
    drop(again);
    // As weights, elsewhere, and back: no file is read.
    for (allocation, streamed, resident) in [
        ("cuda:0,60%;cpu,40%", true, false),
        ("cuda:1,50%;cpu,*", true, true),
        ("cuda:0,*", false, true),
        ("cpu,*", true, true),
    ] {
        let other = model.planner(devices.machine(), allocation).compress(streamed).compress_resident(resident);
        let moved = Arc::new(loader.relocate(&base, &other.plan().unwrap()).unwrap());
        assert_eq!(moved.report().read, 0);
        check_values(&moved, &model.file.plain);
        let back = Arc::new(loader.relocate(&moved, &plan).unwrap());
        assert_eq!((back.report().read, kept(back.plan())), (0, kept(&plan)));
        check_values(&back, &model.file.plain);
    }
    // Another generation takes new memory for what changes alone.
    let one: Vec<TensorSpec> = tensors.iter().filter(|tensor| tensor.name.contains("layers.1.")).cloned().collect();
    let weights = Weights::patched(model.subject.checkpoint().clone(), two_loras(&one, 38), Matching::Strict).unwrap();
    let wanted = Subject::new(weights.compress().unwrap());
    let changed = wanted.planner(devices.machine(), "cuda:0,60%;cpu,40%").compress(true).compress_resident(true);
    let derived = Arc::new(loader.derive(&base, &wanted.weights, &changed.plan().unwrap()).unwrap());
    assert!(derived.report().shared > plan.bytes() / 2);
    check_values(&derived, &wanted);
    let refilled = Arc::new(loader.refill(derived, &model.subject.weights, &plan).unwrap());
    check_values(&refilled, &model.file.plain);
    drop(refilled);
    // Streams let go of the last of it a moment later.
    let until = Instant::now() + DEADLINE;
    while held(&devices, GPU0) > level {
        assert!(Instant::now() < until, "{} of {level} bytes", held(&devices, GPU0));
        std::thread::sleep(Duration::from_millis(1));
    }
    // What leaves the card goes to the host as it is, and takes no more there.
    let cache = ModelCache::new();
    cache.insert("model", Arc::clone(&base), Retention::Keep);
    drop(base);
    let demoted = plan.demoted(model.subject.layout(), devices.machine()).unwrap();
    assert_eq!((kept(&demoted), demoted.device(GPU0).unwrap().weights.saved), (kept(&plan), 0));
    let room = (24 << 20) - demoted.device(GPU0).unwrap().needed();
    cache.make_room(&devices, GPU0, room, Evict::Demote).unwrap();
    let loaded = cache.get("model").unwrap();
    assert_eq!(loaded.plan(), &demoted);
    assert_eq!(held(&devices, CPU), demoted.device(CPU).unwrap().weights.taken());
    check_values(&loaded, &model.file.plain);
    drop((loaded, cache));
    comes_back(&devices);
}

#[test]
fn slots_may_be_the_callers_own_or_divided() {
    let model = Packed::new(&llama(4, 96), 39);
    let devices = Registry::described(machine(), Clock::Wall);
    let planner = model.planner(devices.machine(), "cuda:0,50%;disk,20%;cpu,30%").compress_resident(true);
    let plan = planner.clone().external_slots(true).plan().unwrap();
    let loaded = load(&devices, &model.subject, &plan);
    let device = loaded.residency().device();
    let slots = (0..3).map(|_| device.alloc(plan.slots().largest() as usize, MemoryKind::Whole));
    let slots = slots.collect::<Result<_>>().unwrap();
    let mut streamer = Streamer::with_slots(&loaded, device.stream(Role::Compute).unwrap(), slots).unwrap();
    (0..2).for_each(|_| model.check_pass(&mut streamer).unwrap());
    assert_eq!(streamer.into_slots().unwrap().len(), 3);
    drop(loaded);
    for grouping in [TensorGrouping::PerType, TensorGrouping::PerTensor] {
        let framework = Framework::new(GPU0, grouping, Memory::Locked);
        let plan = planner.clone().grouping(grouping).plan().unwrap();
        assert!(!compressed_here(&plan).is_empty());
        let loader = Loader::new(&devices).allocator(Arc::clone(&framework) as _);
        let loaded = Arc::new(loader.load(&model.subject.weights, &plan).unwrap());
        check_values(&loaded, &model.file.plain);
    }
}

/// With a builder, and an adapter: bits are those of the same load without compression.
#[test]
fn a_builder_keeps_residents_compressed() {
    let (tensors, devices) = (llama(4, 96), Registry::described(machine(), Clock::Wall));
    let plain = Subject::plain(&tensors, 40);
    let build = || {
        let builder = two_loras(&tensors, 41)
            .into_iter()
            .fold(ModelBuilder::new(plain.checkpoint().clone()), |builder, adapter| builder.with_adapter(adapter));
        builder.allocation("cuda:0,*").unwrap().compute(GPU0)
    };
    let compressed = build().compress_resident().load(&devices).unwrap();
    let share = compressed.plan().device(GPU0).unwrap().weights;
    assert!(share.taken() < share.bytes * 8 / 10 && compressed.plan().streamed_bytes() == 0, "{}", compressed.plan());
    assert_eq!(hash(&compressed), hash(&build().load(&devices).unwrap()));
    let mut streamer = compressed.stream().unwrap();
    for layer in streamer.pass() {
        let guard = layer.unwrap();
        for view in guard.tensors() {
            let mut bytes = vec![0; view.info().bytes as usize];
            guard.read(view.name(), &mut bytes).unwrap();
            assert_eq!(bytes, read(&compressed, &view.info().name).unwrap());
        }
    }
}

/// Whatever operation fails, the error is told, all memory comes back, and the next attempt is right.
#[test]
fn nothing_is_lost_whatever_operation_fails() {
    let model = Packed::new(&llama(3, 96), 42);
    let path = |devices: &Registry| -> Result<()> {
        let planner = model.planner(devices.machine(), "cuda:0,60%;xpu:0,20%;cpu,*").compress_resident(true).depth(1);
        let plan = planner.landing_cap(ByteSize(0)).plan()?;
        let loaded = Arc::new(Loader::new(devices).workers(1).load(&model.subject.weights, &plan)?);
        for _ in 0..2 {
            check_turns(&mut Streamer::new(&loaded)?, &model.file.plain)?;
        }
        Ok(())
    };
    let [decoded, calls, told] = whatever_operation_fails(Operation::Decompress, path);
    assert!(decoded >= 12, "{decoded} tensors");
    // What fails ahead of its turn is fetched again then.
    assert!(told > calls / 2, "{told} of {calls} failures");
}
