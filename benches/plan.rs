//! Planning time of models of 1,000, 10,000 and 100,000 modules, beside the time to copy their names.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::device::Described;
use tensor_offload::plan::Unit;
use tensor_offload::{Allocation, DType, Machine, Order, Planner};

/// Modules of one layer.
const LAYER: usize = 100;

/// Layers of 100 modules whose sizes are those of norms, biases, and matrices of several widths and types.
fn layout(modules: usize) -> Layout {
    let mut offset = 0;
    let tensor = |index: usize| {
        let (layer, place) = (index / LAYER, index % LAYER);
        let (dtype, shape): (_, &[u64]) = match place % 5 {
            0 => (DType::F32, &[3072]),
            1 => (DType::BF16, &[3072, 1024]),
            2 => (DType::F8E4M3, &[1024, 4096]),
            3 => (DType::BF16, &[4096, 3072]),
            _ => (DType::U8, &[640, 1024]),
        };
        let name = format!("model.layers.{layer}.part_{place}.weight");
        let tensor = TensorInfo::new(name, dtype, shape, 0, offset).expect("whole bytes");
        offset += tensor.bytes;
        tensor
    };
    Layout::new((0..modules).map(tensor).collect())
}

fn machine() -> Machine {
    let devices = ["cuda:0=800gib", "cuda:1=800gib", "cpu=4tib"];
    Machine::described(&devices.map(|d| d.parse::<Described>().expect("a description")))
}

fn plan(c: &mut Criterion) {
    let machine = machine();
    let allocation: Allocation = "cuda:0,30%;cuda:1,20%;cpu,*".parse().expect("an allocation");
    let mut group = c.benchmark_group("plan");
    for modules in [1_000, 10_000, 100_000] {
        let layout = layout(modules);
        group.throughput(Throughput::Elements(modules as u64));
        for (name, order, unit) in [
            ("sequential", Order::Sequential, Unit::Module),
            ("interleaved", Order::Interleaved, Unit::Module),
            ("uniform", Order::Interleaved, Unit::Uniform),
        ] {
            let planner = Planner::new(&layout, &machine).allocation(allocation.clone()).order(order).unit(unit);
            group.bench_function(BenchmarkId::new(name, modules), |b| {
                b.iter(|| black_box(planner.plan().expect("a plan")));
            });
        }
        // The least that any plan costs: one owned name for each module.
        group.bench_function(BenchmarkId::new("floor: names", modules), |b| {
            b.iter(|| {
                let names = layout.modules().iter().map(|m| (Arc::<str>::from(m.name.as_str()), m.layer, m.bytes));
                black_box(names.collect::<Vec<_>>())
            });
        });
    }
    group.finish();
}

criterion_group!(benches, plan);
criterion_main!(benches);
