//! What planning and replaying one model on the virtual clock costs, what asking for a layer costs in a very deep model,
//! and how close streaming comes to its floor on the wall clock.

#[path = "../examples/support/replay.rs"]
mod replay;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tensor_offload::backend::{Backend, Clock, Contents, Simulated};
use tensor_offload::checkpoint::Layout;
use tensor_offload::{Described, DeviceId, Estimate, Machine, Model, Plan, Planner, Registry, Streamer};

/// Layers of one model.
const LAYERS: usize = 60;

fn machine(devices: &[&str]) -> Machine {
    let described: Vec<Described> = devices.iter().map(|text| text.parse().expect("a description")).collect();
    Machine::described(&described)
}

fn plan(layout: &Layout, machine: &Machine, allocation: &str) -> Plan {
    let planner = Planner::new(layout, machine).compute(DeviceId::cuda(0));
    planner.allocation(allocation.parse().expect("an allocation")).plan().expect("a plan")
}

/// 19 GB, half of it on the host behind 27.2 GB/s, 4.28 s of compute: three steps of 60 layers.
fn virtual_clock(c: &mut Criterion) {
    let machine = machine(&["cpu=64gib", "cuda:0=24gib,link=27.2"]);
    let layout = Layout::blocks([19_000_000_000 / LAYERS as u64; LAYERS]);
    let mut group = c.benchmark_group("stream");
    group.throughput(Throughput::Elements(3 * LAYERS as u64));
    group.bench_function("plan and replay, virtual clock", |b| {
        b.iter(|| {
            let plan = plan(&layout, &machine, "cuda:0,50%;cpu,50%");
            let step = replay::step(&machine, &layout, &plan, Duration::from_millis(4280), 1).expect("a step");
            assert!((4280..4300).contains(&step.as_millis()), "{step:?}");
            black_box(step)
        });
    });
    group.finish();
}

/// A pass of 10,000 layers that all are away, each asked for with 100 sent for ahead.
fn deep(c: &mut Criterion) {
    let machine = machine(&["cpu=64gib", "cuda:0=24gib,link=27.2"]);
    let layout = Layout::blocks([1_000_000; 10_000]);
    let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual).contents(Contents::SizesOnly));
    let devices = Registry::new([simulated as Arc<dyn Backend>]);
    let planner = Planner::new(&layout, &machine).compute(DeviceId::cuda(0)).depth(100);
    let plan = planner.allocation("cpu,*".parse().expect("an allocation")).plan().expect("a plan");
    let model = Arc::new(Model::unfilled(&devices, &layout, &plan).expect("a model"));
    let mut streamer = Streamer::new(&model).expect("a streamer");
    let mut group = c.benchmark_group("stream");
    group.sample_size(10).throughput(Throughput::Elements(10_000));
    group.bench_function("a pass of 10,000 layers, 100 ahead, virtual clock", |b| {
        b.iter(|| replay::run(&mut streamer, Duration::from_secs(1), 1).expect("a pass"));
    });
    group.finish();
}

/// Twelve layers of 8 MB, all on the host behind 1 GB/s: 8 ms of copies and as much compute for each, with real bytes
/// and real time.
fn wall_clock(c: &mut Criterion) {
    let machine = machine(&["cpu=256mb", "cuda:0=64mb,link=1"]);
    let (layout, compute) = (Layout::blocks([8_000_000; 12]), Duration::from_millis(96));
    let devices = Registry::described(machine.clone(), Clock::Wall);
    let plan = plan(&layout, &machine, "cpu,*");
    let Estimate { pass: floor, .. } = plan.estimate(&machine.topology, compute);
    let model = Arc::new(Model::unfilled(&devices, &layout, &plan).expect("a model"));
    let mut streamer = Streamer::new(&model).expect("a streamer");
    let mut step = || {
        let begin = Instant::now();
        replay::run(&mut streamer, compute, 1).expect("a step");
        begin.elapsed()
    };
    step();
    let mut steps = [step(), step(), step()];
    steps.sort();
    let ratio = steps[1].as_secs_f64() / floor.as_secs_f64();
    println!("wall clock: {:?} a step, the floor is {floor:?}: {ratio:.3} times it", steps[1]);
    let mut group = c.benchmark_group("stream");
    group.sample_size(10).measurement_time(Duration::from_secs(2));
    group.bench_function("a step, wall clock", |b| b.iter(&mut step));
    group.bench_function("a step, wall clock: floor", |b| b.iter(|| std::thread::sleep(floor)));
    group.finish();
}

criterion_group!(benches, virtual_clock, deep, wall_clock);
criterion_main!(benches);
