//! What planning and replaying one model on the virtual clock costs, what asking for a layer costs in a very deep model,
//! how close streaming comes to its floor on the wall clock, and what bringing layers of many small modules through pinned
//! buffers costs.

#[path = "../examples/support/replay.rs"]
mod replay;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tensor_offload::backend::{
    Backend, BufMut, Charge, Clock, Contents, Device, Found, Health, Ledger, MemoryBlock, MemoryKind, Role, Route,
    Simulated, Stream,
};
use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::device::{Described, DeviceInfo, MemoryUsage, Topology};
use tensor_offload::plan::Estimate;
use tensor_offload::{DType, DeviceId, Machine, Model, Plan, Planner, Registry, Result, Streamer};

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
    let Estimate { pass: floor, .. } = plan.estimate(machine.topology(), compute);
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

/// Layers of so many modules of 4 KiB, and one of the same bytes in one module, in host memory that the device's streams
/// cannot wait for: a thread copies them into pinned buffers. The floor copies the same bytes module by module.
fn staged(c: &mut Criterion) {
    const BYTES: usize = 4096;
    let machine = machine(&["cpu=256mb", "cuda:0=64mb,link=100"]);
    let mut group = c.benchmark_group("stream");
    group.sample_size(10);
    for modules in [400, 1600] {
        let weight = |layer: usize, module: usize, rows: usize| {
            let (name, at) =
                (format!("model.layers.{layer}.experts.{module}.weight"), (layer * modules + module) * BYTES);
            TensorInfo::new(name, DType::F32, &[rows as u64, 32], 0, at as u64).expect("a countable shape")
        };
        let small = (0..4).flat_map(|layer| (0..modules).map(move |module| weight(layer, module, 32)));
        let whole = (0..4).map(|layer| weight(layer, 0, 32 * modules));
        for (what, tensors) in [("in modules of 4 KiB", small.collect::<Vec<_>>()), ("in one module", whole.collect())]
        {
            let layout = Layout::new(tensors);
            let simulated = Simulated::new(machine.clone(), Clock::Wall);
            let devices = Registry::new([Arc::new(Pageable(simulated)) as Arc<dyn Backend>]);
            let plan = plan(&layout, &machine, "cpu,*");
            let model = Arc::new(Model::unfilled(&devices, &layout, &plan).expect("a model"));
            let mut streamer = Streamer::new(&model).expect("a streamer");
            replay::run(&mut streamer, Duration::ZERO, 1).expect("a pass");
            assert!(streamer.report().bytes[&DeviceId::CPU] >= layout.bytes(), "all is streamed");
            group.throughput(Throughput::Bytes((4 * modules * BYTES) as u64));
            group.bench_function(format!("a pass of 4 layers of {modules} x 4 KiB, staged, {what}"), |b| {
                b.iter(|| replay::run(&mut streamer, Duration::ZERO, 1).expect("a pass"));
            });
        }
        let (src, mut dst) = (vec![1u8; 4 * modules * BYTES], vec![0u8; 4 * modules * BYTES]);
        group.bench_function(format!("floor: copies of 4 x {modules} x 4 KiB"), |b| {
            b.iter(|| {
                let modules = dst.chunks_mut(BYTES).zip(src.chunks(BYTES));
                modules.for_each(|(dst, src)| dst.copy_from_slice(black_box(src)));
            });
        });
    }
    group.finish();
}

/// A described machine whose devices' streams cannot wait for host memory, as those of a card for what is not pinned.
#[derive(Debug)]
struct Pageable(Simulated);

impl Backend for Pageable {
    fn discover(&self) -> Vec<Found> {
        self.0.discover()
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(PageableDevice(self.0.open(id)?)))
    }

    fn topology(&self) -> Topology {
        self.0.topology()
    }
}

#[derive(Debug)]
struct PageableDevice(Arc<dyn Device>);

impl Device for PageableDevice {
    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    fn ledger(&self) -> &Arc<Ledger> {
        self.0.ledger()
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.0.memory()
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        self.0.allocate(charge, kind)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        self.0.stream(role)
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        self.0.route_from(source)
    }

    fn copies_block(&self, source: &MemoryBlock) -> bool {
        source.device().is_host()
    }

    fn trim(&self) -> Result<u64> {
        self.0.trim()
    }

    fn health(&self) -> Health {
        self.0.health()
    }
}

criterion_group!(benches, virtual_clock, deep, wall_clock, staged);
criterion_main!(benches);
