//! Models whose tensors are memory of the caller's framework: the right bytes in allocations of one element type, as many bytes
//! as the plan says, the same places in slots for every pass, and all of it given back.

mod generations;
mod locks;
#[path = "../support/mod.rs"]
mod support;
mod wrong;

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use support::framework::{Framework, Memory, tensor_of};
use support::*;
use tensor_offload::backend::{Clock, MemoryBlock};
use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::load::TensorAllocator;
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{
    DType, DeviceId, LayerGuard, Loader, Machine, Model, Plan, Planner, Registry, Streamer, TensorView, Use,
};

const DIVIDED: [TensorGrouping; 2] = [TensorGrouping::PerType, TensorGrouping::PerTensor];

/// A loader that has the frameworks allocate.
fn loader<'r>(registry: &'r Registry, frameworks: &[&Arc<Framework>]) -> Loader<'r> {
    let loader = Loader::new(registry).workers(2);
    frameworks.iter().fold(loader, |loader, &framework| loader.allocator(Arc::clone(framework) as _))
}

fn planner<'a>(subject: &'a Subject, machine: &'a Machine, compute: DeviceId, allocation: &str) -> Planner<'a> {
    Planner::new(subject.layout(), machine).compute(compute).allocation(allocation.parse().unwrap())
}

/// What the plan puts on a device in allocations that a framework makes: tensors that stay there, and slots.
fn framework_bytes(plan: &Plan, device: DeviceId) -> u64 {
    let stays = |a: &&tensor_offload::plan::Assignment| a.device == device && a.usage != Use::Streamed;
    let slots = if plan.compute() == device { plan.slots().bytes() } else { 0 };
    plan.assignments().iter().filter(stays).map(|a| a.bytes).sum::<u64>() + slots
}

/// The framework's tensors are as many bytes as the plan says; those that stay are each one tensor of the model, of its type
/// and with its bytes.
fn check_tensors(framework: &Framework, subject: &Subject, model: &Model) {
    assert_eq!(framework.live_bytes(), framework_bytes(model.plan(), framework.device()));
    for tensor in framework.live() {
        let Some(name) = &tensor.name else { continue };
        let view = model.tensor(name).unwrap();
        assert_eq!((view.dtype(), view.size()), (tensor.dtype, tensor.bytes), "{name}");
        assert!(Arc::ptr_eq(&tensor_of(view.buf().block()).unwrap(), &tensor), "{name} is elsewhere");
        assert!(tensor.read().bytes() == subject.bytes_of(name), "{name} has other bytes");
    }
}

/// What is charged on each device is what the plan says.
fn check_levels(registry: &Registry, plan: &Plan) {
    for (device, charged) in levels(registry) {
        let share = plan.device(device).map_or(0, |share| share.weights.bytes + share.beside.slots);
        assert_eq!(charged, share, "{device}\n{plan}");
    }
}

fn same(one: &MemoryBlock, other: &MemoryBlock) -> bool {
    std::ptr::eq(one, other)
}

/// For each slot that may come to hold a layer, where its tensors lie there: in the same place of each, whole, aligned, apart
/// from each other, and in memory of their own type.
fn check_places(streamer: &Streamer, typed: bool) {
    let model = Arc::clone(streamer.model());
    for layer in model.layout().layer_ids() {
        for slot in streamer.slots_of(layer) {
            let mut taken: Vec<(*const MemoryBlock, std::ops::Range<usize>)> = Vec::new();
            for module in model.layout().modules_in(layer) {
                for info in module.tensors.iter().map(|&tensor| model.layout().tensor(tensor).unwrap()) {
                    let Some(place) = streamer.in_slot(slot, &info.name) else {
                        let usage = model.plan().assignment(module.id).unwrap().usage;
                        assert!(usage != Use::Streamed || info.bytes == 0, "{} is nowhere", info.name);
                        continue;
                    };
                    let (range, block) = (place.byte_range(), place.block());
                    assert_eq!(Some(range.clone()), streamer.range_in_slot(&info.name));
                    assert_eq!(range.len() as u64, info.bytes);
                    assert!(
                        range.end <= block.bytes()
                            && range.start.is_multiple_of(info.dtype.element_bytes().unwrap_or(1))
                    );
                    let others = taken.iter().filter(|(other, _)| std::ptr::eq(*other, &**block));
                    for (_, other) in others {
                        assert!(other.end <= range.start || range.end <= other.start, "{} overlaps", info.name);
                        assert_ne!(model.plan().grouping(), TensorGrouping::PerTensor, "{} is not alone", info.name);
                    }
                    if typed {
                        let tensor = tensor_of(block).expect("memory of the framework");
                        assert_eq!((tensor.dtype, &tensor.name), (info.dtype, &None), "{}", info.name);
                    }
                    taken.push((&**block, range));
                }
            }
        }
    }
}

/// The guard shows each streamed tensor where the streamer said that it lies, and the framework sees its bytes there.
fn check_in_slot(streamer: &Streamer, guard: &LayerGuard, subject: &Subject, typed: bool) {
    guard.wait(DEADLINE).unwrap();
    let slot = guard.slot();
    for view in guard.tensors().filter(|view| view.size() > 0) {
        let place = slot.and_then(|slot| streamer.in_slot(slot, view.name()));
        let Some(place) = place else {
            let stays = |view: &TensorView<'_>| {
                let model = streamer.model().tensor(view.name()).unwrap();
                same(model.buf().block(), view.buf().block()) && model.byte_range() == view.byte_range()
            };
            assert!(stays(&view), "{} is neither in the slot nor at home", view.name());
            continue;
        };
        assert!(same(place.block(), view.buf().block()), "{} is in another block", view.name());
        if typed {
            let tensor = tensor_of(place.block()).unwrap();
            let seen = tensor.read();
            assert!(&seen.bytes()[place.byte_range()] == subject.bytes_of(view.name()), "{} in the slot", view.name());
        }
    }
}

/// A changed storage in a written plan is refused.
fn check_written(plan: &Plan) {
    let text = serde_json::to_string(plan).unwrap();
    assert_eq!(&serde_json::from_str::<Plan>(&text).unwrap(), plan);
    for other in ["joined", "per_type", "per_tensor"] {
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let before = json["grouping"].as_str().unwrap_or("joined").to_owned();
        json["grouping"] = other.into();
        let read = serde_json::from_value::<Plan>(json);
        assert_eq!(read.is_ok(), before == other, "{before} as {other}");
    }
}

/// A model of the caller's choice of everything.
#[derive(Clone, Debug)]
struct Case {
    model: usize,
    patched: bool,
    setting: usize,
    grouping: TensorGrouping,
    memory: Memory,
    /// Whether there is a framework; without one the memory is the library's, divided all the same.
    owned: bool,
    depth: usize,
    fixed: bool,
    virtual_time: bool,
}

/// The compute device, where the weights are, and whether some are used in place.
const SETTINGS: [(DeviceId, &str, bool); 9] = [
    (CPU, "cpu,40%;disk,60%", false),
    (CPU, "disk,*", false),
    (CPU, "cpu,*", false),
    (CPU, "cpu,30%;disk,30%;cuda:1,40%", false),
    (GPU0, "cuda:0,30%;cpu,70%", false),
    (GPU0, "cuda:0,15%;cuda:1,20%;xpu:0,25%;disk,20%;cpu,20%", false),
    (GPU0, "xpu:0,50%;cuda:1,50%", false),
    (GPU0, "cpu,*", true),
    (GPU0, "cuda:0,20%;cpu,60%;disk,20%", true),
];

impl Case {
    fn tensors(&self) -> Vec<TensorSpec> {
        match self.model {
            0 => small_mixed(3),
            1 => norms(4),
            2 => llama(4, 32),
            _ => mixed(2),
        }
    }

    fn run(&self) {
        let tensors = self.tensors();
        let subject = if self.patched { Subject::patched(&tensors, 61) } else { Subject::plain(&tensors, 61) };
        let clock = if self.virtual_time { Clock::Virtual } else { Clock::Wall };
        let (machine, (compute, allocation, in_place)) = (machine(), SETTINGS[self.setting]);
        let registry = Registry::described(machine.clone(), clock);
        open_all(&registry);
        let mut planner = planner(&subject, &machine, compute, allocation).grouping(self.grouping);
        planner = planner.depth(self.depth).fixed_slots(self.fixed);
        if in_place {
            planner = planner.in_place("*.mlp.*").in_place("*norm_1*").gather_embeddings(true);
        }
        let plan = planner.plan().unwrap();
        check_written(&plan);
        let apart = self.grouping != TensorGrouping::Joined;
        let new = |device| Framework::new(device, self.grouping, self.memory);
        let frameworks: Vec<Arc<Framework>> =
            [CPU, GPU0].into_iter().filter(|_| self.owned && apart).map(new).collect();
        let loader = loader(&registry, &frameworks.iter().collect::<Vec<_>>());
        let model = Arc::new(loader.load(&subject.weights, &plan).unwrap());
        check_levels(&registry, &plan);
        let typed = frameworks.iter().any(|framework| framework.device() == compute);
        frameworks.iter().for_each(|framework| check_tensors(framework, &subject, &model));
        subject.check(&model);
        check_streams(&model, &subject, typed);
        frameworks.iter().for_each(|framework| check_tensors(framework, &subject, &model));
        check_levels_settle(&registry, &plan);
        drop(model);
        comes_back(&registry);
        frameworks.iter().for_each(|framework| assert_gone(framework));
    }
}

/// Waits until the library has let go of all the framework's tensors: streams do when they are done with them.
fn assert_gone(framework: &Framework) {
    let until = std::time::Instant::now() + DEADLINE;
    while !framework.live().is_empty() {
        assert!(std::time::Instant::now() < until, "{} tensors are kept", framework.live().len());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// As [`check_levels`], once staging buffers are back.
fn check_levels_settle(registry: &Registry, plan: &Plan) {
    let share = |device| plan.device(device).map_or(0, |share| share.weights.bytes + share.beside.slots);
    let until = std::time::Instant::now() + DEADLINE;
    while levels(registry).iter().any(|&(device, charged)| charged != share(device)) {
        assert!(std::time::Instant::now() < until, "{:?}\n{plan}", levels(registry));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Two passes and a few steps out of order, with every byte looked at, and every place compared with what was said before.
fn check_streams(model: &Arc<Model>, subject: &Subject, typed: bool) {
    let mut streamer = Streamer::new(model).unwrap();
    assert_eq!(streamer.slot_count(), streamer.model().plan().slots().sizes().count());
    check_places(&streamer, typed);
    let count = layers(&streamer).len();
    for layer in layers(&streamer).chain(layers(&streamer)).chain(layers(&streamer).rev().step_by(2)) {
        let guard = streamer.layer(layer).unwrap();
        check_layer(&guard, subject).unwrap();
        check_in_slot(&streamer, &guard, subject, typed);
        assert!(guard.slot().is_none_or(|slot| streamer.slots_of(layer).contains(&slot)));
    }
    assert!(streamer.report().layers >= 2 * count as u64);
}

/// As [`mixed`], without the tensor that is far larger than all others.
fn small_mixed(layers: u64) -> Vec<TensorSpec> {
    mixed(layers).into_iter().filter(|tensor| !tensor.name.ends_with("table.codes")).collect()
}

fn cases() -> impl Strategy<Value = Case> {
    let grouping = prop::sample::select(vec![TensorGrouping::Joined, DIVIDED[0], DIVIDED[1], DIVIDED[0], DIVIDED[1]]);
    let memory = prop::sample::select(vec![Memory::Locked, Memory::Locked, Memory::Lent]);
    let slots = (0usize..4, any::<bool>());
    let rest = (grouping, memory, prop::bool::weighted(0.85), slots, any::<bool>());
    (0usize..4, any::<bool>(), 0..SETTINGS.len(), rest).prop_map(|(model, patched, setting, rest)| {
        let (grouping, memory, owned, (depth, fixed), virtual_time) = rest;
        Case { model, patched, setting, grouping, memory, owned, depth, fixed, virtual_time }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_right_in_memory_of_its_type(case in cases()) {
        case.run();
    }
}

/// A layer far larger than the others has large slots, divided like the ordinary ones, that hold the others, too.
#[test]
fn slots_of_two_sizes_are_divided() {
    let mut tensors = small_mixed(6);
    tensors.push(spec("model.layers.2.table.codes", DType::U8, &[300_003]));
    tensors.push(spec("model.layers.2.table.more", DType::F32, &[5_000]));
    let (subject, machine) = (Subject::patched(&tensors, 62), machine());
    for grouping in DIVIDED {
        for (compute, allocation) in [(CPU, "disk,*"), (GPU0, "cpu,50%;xpu:0,50%")] {
            let registry = Registry::described(machine.clone(), Clock::Wall);
            let plan = planner(&subject, &machine, compute, allocation).grouping(grouping).depth(1).plan().unwrap();
            let slots = plan.slots();
            assert!(slots.large == 1 && slots.count == 2 && slots.large_bytes > slots.bytes_each, "{plan}");
            let times = vec![std::time::Duration::ZERO; subject.layout().layers().len()];
            let forecast = plan.forecast(subject.layout(), machine.topology(), &times.into()).unwrap();
            let least = plan.estimate(machine.topology(), std::time::Duration::ZERO);
            assert!(least.pass <= forecast, "the large layer stays: {least}, and {forecast:?}\n{plan}");
            let framework = Framework::new(compute, grouping, Memory::Locked);
            let model = Arc::new(loader(&registry, &[&framework]).load(&subject.weights, &plan).unwrap());
            check_tensors(&framework, &subject, &model);
            check_streams(&model, &subject, true);
            let streamer = Streamer::new(&model).unwrap();
            let usable = |name: &str| {
                let layer = subject.layout().layers().iter().find(|layer| layer.name == name).unwrap();
                streamer.slots_of(layer.id)
            };
            assert_eq!((usable("model.layers.2"), usable("model.layers.1")), (vec![2], vec![0, 1, 2]));
            assert!(streamer.in_slot(0, "model.layers.2.table.codes").is_none());
            assert!(streamer.in_slot(3, "model.layers.1.mlp.up_proj.weight").is_none(), "no such slot");
        }
    }
}

/// A head that uses the embedding's bytes is in the same memory with it, at home and in slots.
#[test]
fn tied_weights_are_one_tensor_of_the_framework() {
    let tied = tied(63);
    let machine = machine();
    for grouping in DIVIDED {
        for allocation in ["disk,*", "cpu,1kb;disk,*", "cpu,*"] {
            let registry = Registry::described(machine.clone(), Clock::Wall);
            let plan = planner(&tied, &machine, CPU, allocation).grouping(grouping).depth(1).plan().unwrap();
            let framework = Framework::new(CPU, grouping, Memory::Locked);
            let model = Arc::new(loader(&registry, &[&framework]).load(&tied.weights, &plan).unwrap());
            check_levels(&registry, &plan);
            check_tensors(&framework, &tied, &model);
            check_streams(&model, &tied, true);
            let mut streamer = Streamer::new(&model).unwrap();
            let head = tied.layout().layers().last().unwrap().id;
            let guard = streamer.layer(head).unwrap();
            assert_eq!(guard.to_vec::<half::bf16>("lm_head.weight").unwrap().len(), 512);
            check_in_slot(&streamer, &guard, &tied, true);
        }
    }
}

/// The builder plans as the allocator of the compute device needs it, in whatever order allocators are given.
#[test]
fn a_builder_plans_as_the_compute_devices_allocator_needs_it() {
    let (subject, machine) = (Subject::plain(&small_mixed(2), 64), machine());
    let registry = Registry::described(machine, Clock::Virtual);
    let [card, host] = [(GPU0, DIVIDED[0]), (CPU, DIVIDED[1])].map(|(id, s)| Framework::new(id, s, Memory::Locked));
    for order in [[&card, &host], [&host, &card]] {
        let builder = tensor_offload::ModelBuilder::new(subject.checkpoint().clone()).compute(GPU0);
        let builder = builder.allocation("cuda:0,20%;cpu,80%").unwrap();
        let builder =
            order.into_iter().fold(builder, |builder, framework| builder.allocator(Arc::clone(framework) as _));
        let model = builder.planner(|planner| planner.in_place("*.mlp.*")).load(&registry).unwrap();
        assert_eq!(model.plan().grouping(), TensorGrouping::PerType);
        for framework in order {
            check_tensors(framework, &subject, &model);
            assert!(framework.live().len() > 3);
        }
        let mut by_type: BTreeMap<DType, usize> = BTreeMap::new();
        card.live().iter().filter(|t| t.name.is_none()).for_each(|t| *by_type.entry(t.dtype).or_default() += 1);
        let slots = model.plan().slots().sizes().count();
        assert!(by_type.values().all(|&count| count == slots), "{by_type:?}");
    }
}

/// An estimate is the least time, and a large layer that stays in its slot takes none, however small modules are padded
/// elsewhere.
#[test]
fn estimates_do_not_count_what_stays_in_a_divided_slot() {
    let small = |layer| (0..20).map(move |n| spec(format!("layers.{layer}.n{n}.bias"), DType::U8, &[10]));
    let large = spec("layers.2.table.weight", DType::U8, &[300_000]);
    let tensors: Vec<TensorSpec> = (0..6).flat_map(small).chain([large]).collect();
    let (subject, machine) = (Subject::plain(&tensors, 65), machine());
    for grouping in [TensorGrouping::Joined, DIVIDED[0], DIVIDED[1]] {
        let plan = planner(&subject, &machine, GPU0, "cpu,*").grouping(grouping).depth(1).plan().unwrap();
        assert_eq!((plan.slots().large, plan.streamed_layers()), (1, 6), "{plan}");
        let times = vec![std::time::Duration::ZERO; 6];
        let forecast = plan.forecast(subject.layout(), machine.topology(), &times.into()).unwrap();
        let least = plan.estimate(machine.topology(), std::time::Duration::ZERO);
        assert!(least.pass <= forecast, "{least}, and {forecast:?}\n{plan}");
    }
}
