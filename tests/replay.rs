//! Step times on the virtual clock: devices that keep sizes only, models without a file, and the floor of a step.

#[path = "../examples/support/replay.rs"]
mod replay;
mod support;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use support::*;
use tensor_offload::backend::{Backend, Clock, Contents, MemoryKind, Role, Simulated, Transfer};
use tensor_offload::checkpoint::Layout;
use tensor_offload::device::{Bandwidth, Topology};
use tensor_offload::error::Missing;
use tensor_offload::plan::Unit;
use tensor_offload::{Error, ErrorKind, LayerId, Machine, Model, Order, Plan, Planner, Registry, Streamer};

fn sizes_only(devices: &[&str]) -> (Arc<Simulated>, Registry) {
    let simulated = Arc::new(Simulated::new(described(devices), Clock::Virtual).contents(Contents::SizesOnly));
    let registry = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
    (simulated, registry)
}

#[test]
fn sizes_only_count_and_take_time() {
    let (simulated, devices) = sizes_only(&["cpu=900gb", "cuda:0=800gb,link=1", "disk=900gb"]);
    let (cpu, card, disk) =
        (devices.device(CPU).unwrap(), devices.device(GPU0).unwrap(), devices.device(DISK).unwrap());
    let mut source = cpu.alloc(500_000_000_000, MemoryKind::Pinned).unwrap();
    assert!(source.host_mut().is_none(), "there are no bytes to write");
    let source = source.freeze();
    assert_eq!(cpu.ledger().charged(), 500_000_000_000);
    assert_eq!(cpu.alloc(500_000_000_000, MemoryKind::Arena).unwrap_err().kind(), ErrorKind::OutOfMemory);
    let slot = card.alloc(500_000_000_000, MemoryKind::Arena).unwrap();
    let stream = card.stream(Role::Upload).unwrap();
    stream.copy(Transfer::whole(&source, slot).unwrap()).unwrap().wait(DEADLINE).unwrap();
    assert_eq!(simulated.now(), Duration::from_secs(500));
    let on_disk = disk.alloc(500_000_000_000, MemoryKind::Arena).unwrap();
    drop((source, on_disk));
    assert_eq!((cpu.ledger().charged(), disk.ledger().charged(), card.ledger().charged()), (0, 0, 0));
}

/// Bytes that are not there are never handed out as if they were.
#[test]
fn sizes_only_are_not_copied_to_memory_with_bytes() {
    let (_, devices) = sizes_only(&["cuda:0=1mb"]);
    let card = devices.device(GPU0).unwrap();
    let nothing = card.alloc(1000, MemoryKind::Arena).unwrap().freeze();
    let host = tensor_offload::backend::Host::new().open(CPU).unwrap();
    let stream = card.stream(Role::Download).unwrap();
    let copy = Transfer::whole(&nothing, host.alloc(1000, MemoryKind::Pinned).unwrap()).unwrap();
    let rejected = stream.copy(copy).unwrap_err();
    assert!(matches!(&rejected.error, Error::Missing(Missing::Bytes { device: GPU0 })), "{}", rejected.error);
    // A refused copy is an error itself, with its cause.
    let cause = std::error::Error::source(&*rejected).and_then(|cause| cause.downcast_ref::<Error>());
    assert_eq!(cause.map(Error::kind), Some(ErrorKind::Missing));
    let source = host.alloc(1000, MemoryKind::Pinned).unwrap().freeze();
    let there = card.alloc(1000, MemoryKind::Arena).unwrap();
    stream.copy(Transfer::whole(&source, there).unwrap()).unwrap().wait(DEADLINE).unwrap();
}

#[test]
fn an_unfilled_model_takes_what_its_plan_says() {
    let (_, devices) = sizes_only(&["cpu=64gb", "cuda:0=23gb,link=27.2", "xpu:0=16gb,link=10", "disk=100gb"]);
    let layout = Layout::blocks([1 << 30; 40]);
    let planner =
        Planner::new(&layout, devices.machine()).allocation("cuda:0,10gb;xpu:0,8gb;disk,9gb;cpu,*".parse().unwrap());
    let plan = planner.depth(1).plan().unwrap();
    let model = Arc::new(Model::unfilled(&devices, &layout, &plan).unwrap());
    for share in plan.devices() {
        assert_eq!(
            devices.device(share.id).unwrap().ledger().charged(),
            share.weights.bytes + share.beside.slots,
            "{}",
            share.id
        );
    }
    let again = Model::unfilled(&devices, &layout, &plan).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::OutOfMemory, "{again}");
    let mut streamer = Streamer::new(&model).unwrap();
    for _ in 0..2 {
        replay::run(&mut streamer, Duration::from_secs(1), 1).unwrap();
    }
    // The first pass brings what it uses; each sends for the beginning of the next.
    assert_eq!(streamer.report().bytes.values().sum::<u64>(), (2 * 30 + 1) << 30);
    let guard = streamer.layer(LayerId::new(0)).unwrap();
    let refused = guard.read("block.0.weight", &mut vec![0; 1 << 10]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::WrongSize, "{refused}");
    drop((guard, streamer, model));
    assert!(devices.opened().iter().all(|device| device.ledger().charged() == 0));
    let other = Layout::blocks([1 << 30; 39]);
    assert_eq!(Model::unfilled(&devices, &other, &plan).unwrap_err().kind(), ErrorKind::Plan);
}

/// A card and a host with a link of so many bytes a second.
fn card_and_host(bandwidth: u64) -> Machine {
    let big = described(&["cpu=4tb", "cuda:0=4tb"]);
    big.with_topology(Topology::new().link(GPU0, Bandwidth::bytes_per_second(bandwidth)))
}

fn planned(machine: &Machine, layout: &Layout, kept: u64, order: Order, depth: usize) -> Plan {
    let allocation = format!("cuda:0,{kept}b;cpu,*").parse().unwrap();
    Planner::new(layout, machine)
        .compute(GPU0)
        .allocation(allocation)
        .order(order)
        .unit(Unit::Uniform)
        .depth(depth)
        .plan()
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever moves and however fast, a step takes no less than its floor; with layers that are alike and at least
    /// one of them ahead, hardly more.
    #[test]
    fn steps_of_uniform_layers_are_at_their_floor(
        layers in 5u64..40,
        modules in 1u64..5,
        kept in 0u64..4,
        bytes in 100_000u64..2_000_000_000,
        bandwidth in 500_000_000u64..60_000_000_000,
        compute_us in 10_000u64..10_000_000,
        depth in 0usize..4,
        passes in 1u32..3,
    ) {
        let kept = kept.min(modules - 1);
        let name = |layer, module| format!("layers.{layer}.{module}.weight");
        let tensor = |i: u64| {
            let (layer, module) = (i / modules, i % modules);
            tensor_offload::checkpoint::TensorInfo::new(name(layer, module), tensor_offload::DType::U8, &[bytes], 0, i * bytes)
        };
        let layout = Layout::new((0..layers * modules).map(|i| tensor(i).unwrap()).collect());
        let machine = card_and_host(bandwidth);
        let plan = planned(&machine, &layout, layers * kept * bytes, Order::Interleaved, depth);
        let compute = Duration::from_micros(compute_us);
        let floor = plan.estimate(machine.topology(), compute * passes).pass.max(Bandwidth::bytes_per_second(bandwidth).time(plan.streamed_bytes()) * passes);
        let time = replay::step(&machine, &layout, &plan, compute * passes, passes).unwrap();
        let ratio = time.as_secs_f64() / floor.as_secs_f64();
        prop_assert!(ratio > 0.999_999, "{ratio}");
        if depth >= 1 {
            prop_assert!(ratio < 1.01, "{ratio}: {plan}");
        }
    }
}

/// Half of 60 layers away, and as much to copy as to compute: spread evenly the copies are hidden; at one end they are
/// not, for the link idles while the layers that stay run.
#[test]
fn interleaving_hides_what_filling_in_turn_does_not() {
    let (layout, machine) = (Layout::blocks([100_000_000; 60]), card_and_host(3_000_000_000));
    let compute = Duration::from_secs(1);
    let time = |order, depth| {
        let plan = planned(&machine, &layout, 3_000_000_000, order, depth);
        assert_eq!(plan.streamed_bytes(), 3_000_000_000);
        replay::step(&machine, &layout, &plan, compute, 1).unwrap().as_secs_f64()
    };
    let (even, in_turn, serial) =
        (time(Order::Interleaved, 2), time(Order::Sequential, 2), time(Order::Interleaved, 0));
    assert!((1.0..1.01).contains(&even), "{even}");
    assert!((1.4..1.5).contains(&in_turn), "{in_turn}");
    // Nothing sent for ahead: a copy has only the layers that stay beside it, not the one before it.
    assert!((1.49..1.51).contains(&serial), "{serial}");
}
