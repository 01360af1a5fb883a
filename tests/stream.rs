//! Streaming: the right bytes at every depth and in any order, slots that are not refilled too early, and the time that
//! it takes. Numbers are those of the cases that users met.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use support::watched::Watched;
use support::*;
use tensor_offload::backend::{Clock, Flight, MemoryKind, Operation, Piece, Role, Transfer};
use tensor_offload::device::Topology;
use tensor_offload::plan::{TensorGrouping, Unit, Warning};
use tensor_offload::{
    DType, DeviceId, ErrorKind, LayerGuard, LayerId, Loader, Machine, Order, Plan, Planner, Registry, Result, Streamer,
    Use,
};

/// Homes of every kind: the compute device, its peer, one whose memory it cannot reach, the disk and the host.
const SPLIT: &str = "cuda:0,15%;cuda:1,20%;xpu:0,25%;disk,20%;cpu,20%";

/// The same for [`mixed`] models, of which one tensor is larger than all others.
const SPLIT_MIXED: &str = "cuda:0,8kb;cuda:1,15kb;xpu:0,15kb;disk,15kb;cpu,*";

/// Waits and numbers of workers may be as large as they can be written.
#[test]
fn limits_without_limit() {
    let subject = Subject::patched(&llama(2, 32), 29);
    let (registry, machine) = (Registry::described(machine(), Clock::Wall), machine());
    let plan = subject.planner(&machine, SPLIT).depth(1).plan().unwrap();
    let loader = Loader::new(&registry).workers(usize::MAX).deadline(Duration::MAX);
    let model = Arc::new(loader.load(&subject.weights, &plan).unwrap());
    let mut streamer = Streamer::new(&model).unwrap().deadline(Duration::MAX);
    for layer in layers(&streamer) {
        let guard = streamer.layer(layer).unwrap();
        guard.wait(Duration::MAX).unwrap();
        check_layer(&guard, &subject).unwrap();
    }
}

/// Compute that is busy for a while before it reads the layer, all of it queued: the reads, to be looked at later.
fn read_late(streamer: &mut Streamer, layer: LayerId, busy: Duration) -> Result<Vec<(String, Flight)>> {
    let guard = streamer.layer(layer)?;
    let compute = Arc::clone(streamer.compute());
    compute.occupy(busy)?;
    let host = tensor_offload::backend::Host::new();
    let host = tensor_offload::backend::Backend::open(&host, CPU)?;
    let read = |view: tensor_offload::TensorView<'_>| {
        let dst = host.alloc(view.byte_range().len(), MemoryKind::Pinned)?;
        let piece = Piece { src: view.buf().clone(), from: view.byte_range(), at: 0 };
        Ok((view.info().name.clone(), compute.copy(Transfer::new(vec![piece], dst)?)?))
    };
    guard.tensors().filter(|view| view.device() == GPU0).map(read).collect()
}

fn check_reads(reads: Vec<(String, Flight)>, subject: &Subject) {
    for (name, flight) in reads {
        let landed = flight.wait(DEADLINE).unwrap().freeze();
        let bytes = landed.host(DEADLINE).unwrap().expect("host memory");
        assert!(*bytes == *subject.bytes_of(&name), "{name} was overwritten before it was read");
    }
}

#[test]
fn case_25_nothing_is_copied_back() {
    let subject = Subject::patched(&mixed(4), 21);
    let watched = Watched::new(machine(), Clock::Virtual);
    let plan = subject.planner(&machine(), SPLIT_MIXED).depth(1).plan().unwrap();
    let model = load(&watched.registry, &subject, &plan);
    watched.copies.take();
    let mut streamer = Streamer::new(&model).unwrap();
    for _ in 0..2 {
        layers(&streamer).for_each(|layer| drop(streamer.layer(layer).unwrap()));
    }
    let (mut uploaded, mut staged) = (0, 0);
    for copied in watched.copies.take() {
        match copied.role {
            Role::Upload => {
                assert_eq!(copied.to, GPU0);
                uploaded += copied.bytes;
            }
            // From a device that the compute device cannot reach, on the way to it.
            Role::Download => {
                assert_eq!((copied.from, copied.to), (xpu(), CPU));
                staged += copied.bytes;
            }
            role => panic!("the streamer queues nothing for {role:?}"),
        }
        assert_ne!(copied.from, GPU0, "bytes came back from the compute device");
    }
    let sent = streamer.report().bytes.clone();
    assert_eq!((uploaded, staged), (sent.values().sum(), sent[&xpu()]));
    // The layer with the one large tensor has a large slot to itself, and stays in it.
    let stays = subject.bytes_of("model.layers.1.table.codes").len() as u64;
    assert_eq!((plan.slots().large, plan.slots().large_bytes > stays), (1, true), "{plan}");
    let kept = stays + plan.slots().bytes_each;
    assert!(uploaded >= 2 * plan.streamed_bytes() - kept && uploaded < 2 * plan.streamed_bytes(), "{uploaded}, {plan}");
    drop(streamer);
    subject.check(&model);
}

#[test]
fn case_26_every_depth_gives_the_same_bytes() {
    let subject = Subject::patched(&mixed(3), 22);
    let count = subject.layout().layers().len();
    for depth in 0..=count + 2 {
        for (order, unit) in [(Order::Sequential, Unit::Module), (Order::Interleaved, Unit::Uniform)] {
            let clock = if depth % 2 == 0 { Clock::Virtual } else { Clock::Wall };
            let registry = Registry::described(machine(), clock);
            let plan = subject.planner(&machine(), SPLIT_MIXED).depth(depth).order(order).unit(unit).plan().unwrap();
            let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
            for _ in 0..2 {
                check_pass(&mut streamer, &subject).unwrap();
            }
            let report = streamer.report();
            assert_eq!(report.layers, 2 * count as u64);
            let streamed = plan.streamed_layers() as u64;
            assert!(streamed > 3, "{plan}");
            // A first layer that is resident sends for the first streamed one.
            let first_streamed =
                plan.assignments().iter().any(|a| a.layer == LayerId::new(0) && a.usage == Use::Streamed);
            let late = if depth == 0 { 2 * streamed } else { u64::from(first_streamed) };
            assert_eq!((report.misses, report.hits), (late, 2 * streamed - late), "depth {depth}");
        }
    }
}

/// Slow links and slow compute that reads its layer at the very end: a slot or a staging buffer that is refilled
/// before its reader is done shows another layer's bytes.
#[test]
fn case_26_nothing_is_refilled_before_its_reader_is_done() {
    let subject = Subject::plain(&llama(6, 64), 23);
    let machines = [("fast links", "50"), ("slow links", "0.05")];
    for ((name, link), busy) in machines.into_iter().zip([4, 1]) {
        let link = |device: &str| format!("{device},link={link}");
        let devices = ["cpu=64mb", "disk=64mb", "cuda:0=24mb", "cuda:1=24mb", "xpu:0=24mb"].map(link);
        let machine = described(&devices.each_ref().map(String::as_str));
        for depth in [0, 1, 3] {
            let registry = Registry::described(machine.clone(), Clock::Wall);
            for allocation in ["xpu:0,*", SPLIT] {
                let plan = subject.planner(&machine, allocation).depth(depth).plan().unwrap();
                let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
                let mut reads = Vec::new();
                for layer in layers(&streamer).chain([3, 3, 1].map(LayerId::new)) {
                    reads.extend(read_late(&mut streamer, layer, Duration::from_millis(busy)).unwrap());
                }
                drop(streamer);
                check_reads(reads, &subject);
            }
            println!("{name}, depth {depth}");
            comes_back(&registry);
        }
    }
}

#[test]
fn case_28_what_cannot_be_reached_goes_through_the_host() {
    let subject = Subject::patched(&llama(4, 48), 24);
    let topology = Topology::new().no_peer_access(GPU0, GPU1);
    for (donor, topology, staged) in [
        (xpu(), Topology::new(), true),
        (GPU1, topology, true),
        (GPU1, Topology::new(), false),
        (DISK, Topology::new(), false),
    ] {
        let machine = machine().with_topology(topology);
        let watched = Watched::new(machine.clone(), Clock::Virtual);
        let plan = subject.planner(&machine, &format!("{donor},*")).depth(1).plan().unwrap();
        let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
        watched.copies.take();
        layers(&streamer).for_each(|layer| drop(streamer.layer(layer).unwrap()));
        let direct: Vec<DeviceId> =
            watched.copies.take().iter().filter(|c| c.role == Role::Upload).map(|c| c.from).collect();
        let from = if staged { CPU } else { donor };
        assert!(!direct.is_empty() && direct.iter().all(|id| *id == from), "{donor}: {direct:?}");
        check_pass(&mut streamer, &subject).unwrap();
    }
}

/// Host memory for staging stays four buffers of 16 MiB at most, however large layers are and however they grow.
#[test]
fn staging_does_not_pile_up() {
    let subject = Subject::plain(&blocks(&[10_000, 20_000, 30_000, 40_000, 50_000, 60_000]), 25);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.01", "xpu:0=24mb"]);
    let watched = Watched::new(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "xpu:0,*").depth(1).plan().unwrap();
    let model = load(&watched.registry, &subject, &plan);
    let host = watched.registry.device(CPU).unwrap();
    let before = host.ledger().charged();
    let mut streamer = Streamer::new(&model).unwrap();
    let mut most = 0;
    for layer in layers(&streamer) {
        drop(streamer.layer(layer).unwrap());
        most = most.max(host.ledger().charged() - before);
    }
    assert!(most <= 4 * 60_000, "{most} bytes of staging for layers of up to 60,000");
    check_pass(&mut streamer, &subject).unwrap();
}

/// A layer that is larger than all buffers of its way through the host arrives whole.
#[test]
fn a_layer_larger_than_its_staging_arrives_whole() {
    let subject = Subject::plain(&blocks(&[150_000_000, 1_000, 50_000]), 26);
    let machine = described(&["cpu=2gb", "cuda:0=1gb,link=100", "xpu:0=1gb"]);
    let watched = Watched::new(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "xpu:0,*").depth(1).plan().unwrap();
    let model = load(&watched.registry, &subject, &plan);
    let host = watched.registry.device(CPU).unwrap();
    let before = host.ledger().charged();
    let mut streamer = Streamer::new(&model).unwrap();
    for _ in 0..2 {
        check_pass(&mut streamer, &subject).unwrap();
    }
    let peak = host.ledger().charged() - before;
    assert_eq!(peak, 4 * (16 << 20), "what stays for the next pass");
}

/// A model small enough to be streamed many thousand times.
fn small() -> (Subject, Machine) {
    (Subject::plain(&llama(5, 16), 26), machine())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Skips, repeats, steps back, second passes, with guards kept for a while, as long as one slot is left.
    #[test]
    fn case_27_any_order_is_right(
        depth in 0usize..6,
        wall in any::<bool>(),
        steps in prop::collection::vec((0usize..8, 0usize..4), 1..40),
    ) {
        let (subject, machine) = small();
        let registry = Registry::described(machine.clone(), if wall { Clock::Wall } else { Clock::Virtual });
        let plan = subject.planner(&machine, SPLIT).depth(depth).plan().unwrap();
        let slots = plan.slots().count;
        let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
        let mut held: Vec<(usize, LayerGuard)> = Vec::new();
        for (layer, keep) in steps {
            held.iter_mut().for_each(|(left, _)| *left -= 1);
            held.retain(|(left, _)| *left > 0);
            held.truncate(slots.saturating_sub(1));
            let guard = streamer.layer(LayerId::new(layer % layers(&streamer).len())).unwrap();
            check_layer(&guard, &subject).unwrap();
            if keep > 0 {
                held.push((keep, guard));
            }
            for (_, guard) in &held {
                check_layer(guard, &subject).unwrap();
            }
        }
    }
}

#[test]
fn case_27_a_guard_that_is_kept_leaves_the_other_slots_to_all_layers() {
    let (subject, machine) = small();
    let registry = Registry::described(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "cpu,*").depth(2).plan().unwrap();
    let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
    let kept = streamer.layer(LayerId::new(0)).unwrap();
    // Brings 3 and sends for 4 ahead; layer 2 comes after that, with both wanted soon.
    for layer in [1, 3, 2, 4, 3, 1, 2, 5, 6, 1] {
        check_layer(&streamer.layer(LayerId::new(layer)).unwrap(), &subject).unwrap();
    }
    check_layer(&kept, &subject).unwrap();
    // In order, with one slot fewer, each layer is still sent for before it is asked for.
    let late = streamer.report().misses;
    for layer in [2, 3, 4, 5, 6] {
        check_layer(&streamer.layer(LayerId::new(layer)).unwrap(), &subject).unwrap();
    }
    assert_eq!(streamer.report().misses, late);
}

#[test]
fn more_guards_than_slots_is_an_error_that_passes() {
    let (subject, machine) = small();
    let registry = Registry::described(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "cpu,*").depth(1).plan().unwrap();
    let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
    let held = [streamer.layer(LayerId::new(1)).unwrap(), streamer.layer(LayerId::new(4)).unwrap()];
    let error = streamer.layer(LayerId::new(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().contains("2 slots are held by guards"), "{error}");
    for (guard, layer) in held.iter().zip([1, 4]) {
        check_layer(guard, &subject).unwrap();
        check_layer(&streamer.layer(LayerId::new(layer)).unwrap(), &subject).unwrap();
    }
    drop(held);
    check_pass(&mut streamer, &subject).unwrap();
    let other = tensor_offload::checkpoint::Layout::blocks([1; 100]).layer_ids().last().unwrap();
    for foreign in [other, LayerId::new(subject.layout().layers().len()), LayerId::new(usize::MAX)] {
        assert_eq!(streamer.layer(foreign).unwrap_err().kind(), ErrorKind::Missing);
        assert_eq!(streamer.slot_of(foreign), None);
    }
    check_pass(&mut streamer, &subject).unwrap();
}

#[test]
fn a_forgotten_guard_costs_its_slot_and_no_byte() {
    let (subject, machine) = small();
    let registry = Registry::described(machine.clone(), Clock::Wall);
    for depth in [1, 2, 3] {
        let plan = subject.planner(&machine, "cpu,*").depth(depth).plan().unwrap();
        let model = load(&registry, &subject, &plan);
        let mut streamer = Streamer::new(&model).unwrap();
        std::mem::forget(streamer.layer(LayerId::new(2)).unwrap());
        for layer in [0, 1, 2, 3, 6, 5, 4, 3, 2, 1, 0, 3, 1, 5] {
            check_layer(&streamer.layer(LayerId::new(layer)).unwrap(), &subject).unwrap();
        }
        drop(streamer);
        let mut streamer = Streamer::new(&model).unwrap();
        for _ in 0..2 {
            check_pass(&mut streamer, &subject).unwrap();
        }
    }
}

/// When the end of a layer's use cannot be marked, its slot is out of use; the others go on.
#[test]
fn a_slot_whose_use_cannot_be_marked_is_not_filled_again() {
    let (subject, machine) = small();
    let watched = Watched::new(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "cpu,*").depth(1).plan().unwrap();
    let model = load(&watched.registry, &subject, &plan);
    let mut streamer = Streamer::new(&model).unwrap();
    let guard = streamer.layer(LayerId::new(2)).unwrap();
    let memory = |guard: &LayerGuard| Arc::as_ptr(guard.tensors().next().unwrap().buf().block());
    let lost = memory(&guard);
    watched.countdown.fail_nth(1);
    drop(guard);
    for layer in [3, 0, 1, 0, 5, 4, 3, 1, 0] {
        let guard = streamer.layer(LayerId::new(layer)).unwrap();
        assert_ne!(memory(&guard), lost, "compute may still read it");
        check_layer(&guard, &subject).unwrap();
    }
    check_layer(&streamer.layer(LayerId::new(2)).unwrap(), &subject).unwrap();
    drop((streamer, model));
    comes_back(&watched.registry);
}

#[test]
fn a_streamer_that_stops_half_way_leaves_the_model_to_the_next() {
    let subject = Subject::plain(&llama(6, 64), 27);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.05", "xpu:0=24mb"]);
    let registry = Registry::described(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "xpu:0,40%;cpu,60%").depth(2).plan().unwrap();
    let model = load(&registry, &subject, &plan);
    let mut reads = Vec::new();
    for stop in [1, 3, 0, 5] {
        let mut streamer = Streamer::new(&model).unwrap();
        let error = Streamer::new(&model).unwrap_err();
        assert!(error.kind() == ErrorKind::InUse && error.to_string().contains("streamed already"), "{error}");
        for layer in layers(&streamer).take(stop) {
            reads.extend(read_late(&mut streamer, layer, Duration::from_millis(2)).unwrap());
        }
        let guard = streamer.layer(LayerId::new(stop)).unwrap();
        drop(streamer);
        check_layer(&guard, &subject).unwrap();
    }
    check_reads(reads, &subject);
    check_pass(&mut Streamer::new(&model).unwrap(), &subject).unwrap();
    drop(model);
    comes_back(&registry);
}

#[test]
fn models_stream_to_one_device_from_several_threads() {
    let machine = described(&["cpu=64mb,link=2", "cuda:0=24mb,link=1", "xpu:0=24mb,link=1"]);
    let registry = Registry::described(machine.clone(), Clock::Wall);
    std::thread::scope(|scope| {
        for seed in 30..33 {
            let (registry, machine) = (&registry, &machine);
            scope.spawn(move || {
                let subject = Subject::plain(&llama(4, 32), seed);
                let plan = subject.planner(machine, "cuda:0,10%;xpu:0,40%;cpu,50%").depth(1).plan().unwrap();
                let mut streamer = Streamer::new(&load(registry, &subject, &plan)).unwrap();
                for _ in 0..5 {
                    check_pass(&mut streamer, &subject).unwrap();
                }
            });
        }
    });
    comes_back(&registry);
}

/// A copy that is refused, and one that is queued and fails later, wherever in the pass: an error where the layer is
/// asked for or read, never its old bytes, and the next pass is right.
#[test]
fn a_failed_copy_is_an_error_and_the_next_pass_is_right() {
    let (subject, machine) = small();
    for clock in [Clock::Virtual, Clock::Wall] {
        for depth in [0, 1, 7] {
            let plan = subject.planner(&machine, "xpu:0,50%;cpu,50%").depth(depth).plan().unwrap();
            for nth in 1..=16 {
                let watched = Watched::new(machine.clone(), clock);
                let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
                watched.copies.spoil_nth(nth);
                let mut errors = 0;
                for layer in layers(&streamer) {
                    let outcome = streamer.layer(layer).and_then(|guard| check_layer(&guard, &subject));
                    if let Err(error) = outcome {
                        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
                        errors += 1;
                    }
                }
                // What was queued behind it into the same memory before it failed, for layers ahead, fails with it.
                assert!(errors <= 1 + depth, "one copy failed, {errors} layers did");
                check_pass(&mut streamer, &subject)
                    .unwrap_or_else(|error| panic!("copy {nth}, depth {depth}: {error}"));
            }
        }
    }
}

#[test]
fn a_refused_copy_is_an_error_and_the_next_pass_is_right() {
    let (subject, machine) = small();
    let watched = Watched::new(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "xpu:0,50%;cpu,50%").depth(2).plan().unwrap();
    assert_eq!(plan.slots().count, 3);
    let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
    for nth in 1..60 {
        watched.countdown.fail_nth(nth);
        for layer in layers(&streamer) {
            if let Err(error) = streamer.layer(layer).and_then(|guard| check_layer(&guard, &subject)) {
                assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
            }
        }
        watched.countdown.fail_nth(u64::MAX / 2);
        check_pass(&mut streamer, &subject).unwrap();
        // A slot whose last use could not be marked went with the pass; the next model has all of them. Which operation is the
        // nth is up to the threads, so each pass may lose one of three.
        if nth % 2 == 0 {
            let model = load(&watched.registry, &subject, &plan);
            streamer = Streamer::new(&model).unwrap();
        }
    }
    assert!(watched.countdown.calls_of(Operation::Copy) > 100);
}

/// Files are sorted by name, which is not the order in which a network runs. Where no table knows the network, nothing is fetched
/// in vain from the second pass on.
#[test]
fn the_second_pass_fetches_ahead_in_the_order_of_the_first() {
    let tensor = |name: String| spec(name, DType::F32, &[16, 16]);
    let stack = |stack: &str, count| (0..count).map(|n| tensor(format!("{stack}.{n}.w.weight"))).collect::<Vec<_>>();
    let tensors =
        [stack("a_blocks_that_run_later", 8), stack("b_blocks_that_run_sooner", 4), stack("c_first", 1)].concat();
    let subject = Subject::plain(&tensors, 31);
    let machine = machine();
    let registry = Registry::described(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "cpu,*").depth(2).plan().unwrap();
    let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
    let layout = subject.layout();
    let of = |stack: &str| {
        let layers = layout.layers().iter().filter(|layer| layer.name.starts_with(stack));
        layers.map(|layer| layer.id).collect::<Vec<_>>()
    };
    let order = [of("c_first"), of("b_blocks_that_run_sooner"), of("a_blocks_that_run_later")].concat();
    assert_ne!(order, layout.layer_ids().collect::<Vec<_>>(), "the file is in another order");
    let mut passes = Vec::new();
    for _ in 0..4 {
        let before = streamer.report().clone();
        for &layer in &order {
            check_layer(&streamer.layer(layer).unwrap(), &subject).unwrap();
        }
        let after = streamer.report();
        passes.push((after.misses - before.misses, after.bytes[&CPU] - before.bytes.get(&CPU).copied().unwrap_or(0)));
    }
    let whole = plan.streamed_bytes();
    assert!(passes[0].1 > whole, "the first pass fetches some layers in vain: {passes:?}");
    assert_eq!(passes[2..], [(0, whole); 2], "{passes:?}");
}

/// Which slot a layer is in, and where its tensors lie there, is known before the first pass and the same in all. Where
/// the first and the last layer have one slot, a pass takes longer by what the copy of the first is not hidden.
#[test]
fn fixed_slots_are_the_same_in_every_pass() {
    let subject = Subject::plain(&blocks(&[1_000_000; 7]), 32);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=1"]);
    let compute = Duration::from_micros(1_500);
    let pass = |fixed: bool| {
        let registry = Registry::described(machine.clone(), Clock::Virtual);
        let planner = subject.planner(&machine, "cpu,*").depth(1).fixed_slots(fixed);
        let plan = planner.plan().unwrap();
        let read: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!((&read, read.fixed_slots()), (&plan, fixed));
        let uneven = fixed.then_some(Warning::UnevenSlots { slots: 2, layers: 7 });
        assert_eq!(plan.warnings(), Vec::from_iter(uneven));
        let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
        let known: Vec<Option<usize>> = layers(&streamer).map(|layer| streamer.slot_of(layer)).collect();
        assert_eq!(known, (0..7).map(|layer| fixed.then_some(layer % 2)).collect::<Vec<_>>());
        let places: Vec<_> =
            subject.layout().tensors().iter().map(|tensor| streamer.range_in_slot(&tensor.name)).collect();
        for _ in 0..3 {
            for (layer, known) in layers(&streamer).zip(&known) {
                let guard = streamer.layer(layer).unwrap();
                assert!(!fixed || guard.slot() == *known);
                assert!(places.contains(&Some(guard.tensors().next().unwrap().byte_range())));
                check_layer(&guard, &subject).unwrap();
                streamer.compute().occupy(compute).unwrap();
            }
        }
        assert_eq!((streamer.slot_of(LayerId::new(99)), streamer.range_in_slot("no such tensor")), (None, None));
        plan.forecast(subject.layout(), machine.topology(), &vec![compute; 7].into()).unwrap()
    };
    assert_eq!(pass(false), 7 * compute);
    assert_eq!(pass(true), 7 * compute + Duration::from_millis(1), "the copy of the first layer");
}

/// Layers of equal size, a link of 1 GB/s, compute of equal time in every layer.
fn time_of_a_pass(count: u32, bytes: u64, depth: usize, compute: Duration) -> Duration {
    let subject = Subject::plain(&blocks(&vec![bytes; count as usize]), 28);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=1"]);
    let watched = Watched::new(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "cpu,*").depth(depth).plan().unwrap();
    let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
    let before = watched.simulated.now();
    for layer in layers(&streamer) {
        let _guard = streamer.layer(layer).unwrap();
        streamer.compute().occupy(compute).unwrap();
    }
    streamer.compute().record(&[]).unwrap().wait(DEADLINE).unwrap();
    watched.simulated.now() - before
}

#[test]
fn transfers_and_compute_overlap() {
    let (layers, transfer) = (12, Duration::from_micros(100));
    for compute in [25, 99, 100, 101, 400].map(Duration::from_micros) {
        // The first layer's transfer is not hidden; where the link is what bounds the pass, the last compute is not.
        let ideal = (compute * layers).max(transfer * layers) + compute.min(transfer);
        for depth in 1..4 {
            let time = time_of_a_pass(layers, 100_000, depth, compute);
            let ratio = time.as_secs_f64() / ideal.as_secs_f64();
            assert!((0.999..1.02).contains(&ratio), "depth {depth}, {compute:?}: {time:?} instead of {ideal:?}");
        }
        // Without prefetch each layer waits for its transfer, and each transfer for the compute before it.
        assert_eq!(time_of_a_pass(layers, 100_000, 0, compute), (compute + transfer) * layers, "depth 0, {compute:?}");
    }
}

/// A head that uses the embedding's bytes: they live in one place, come with both layers, and move once in each.
#[test]
fn tied_weights_are_shared() {
    let tied = tied(29);
    let layout = tied.layout();
    for (allocation, depth) in [("cpu,*", 0), ("cpu,*", 1), ("xpu:0,*", 1), ("cuda:0,1kb;cpu,*", 1), ("cuda:0,*", 1)] {
        let watched = Watched::new(machine(), Clock::Wall);
        let plan = Planner::new(layout, watched.machine())
            .compute(GPU0)
            .allocation(allocation.parse().unwrap())
            .depth(depth)
            .plan()
            .unwrap();
        let model = load(&watched.registry, &tied, &plan);
        assert_eq!(levels(&watched.registry).iter().map(|l| l.1).sum::<u64>(), plan.bytes() + plan.slots().bytes());
        assert!(read(&model, "lm_head.weight").unwrap() == tied.merged[0], "the head is the embedding");
        let mut streamer = Streamer::new(&model).unwrap();
        for _ in 0..2 {
            check_pass(&mut streamer, &tied).unwrap();
        }
    }
}

#[test]
fn where_the_compute_stream_cannot_wait_the_host_does() {
    let subject = Subject::plain(&llama(4, 48), 32);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.01"]);
    let watched = Watched::new(machine.clone(), Clock::Wall);
    watched.copies.let_the_host_wait();
    let plan = subject.planner(&machine, "cpu,*").depth(1).plan().unwrap();
    let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
    for layer in layers(&streamer) {
        let guard = streamer.layer(layer).unwrap();
        assert!(guard.tensors().all(|view| view.buf().ready().next().is_none()), "handed out before it was there");
    }
}

/// What stays is used where it is: nothing moves, and the guard shows the resident memory.
#[test]
fn a_resident_model_is_streamed_without_a_copy() {
    let (subject, machine) = small();
    let watched = Watched::new(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "cuda:0,*").plan().unwrap();
    let model = load(&watched.registry, &subject, &plan);
    watched.copies.take();
    let mut streamer = Streamer::new(&model).unwrap();
    for layer in layers(&streamer) {
        assert!(streamer.layer(layer).unwrap().tensors().all(|view| view.device() == GPU0));
    }
    assert!(watched.copies.take().is_empty());
    assert_eq!(streamer.report().bytes, BTreeMap::new());
    check_pass(&mut streamer, &subject).unwrap();
}

#[test]
fn modules_used_in_place_stay_where_they_are() {
    let (subject, machine) = small();
    let registry = Registry::described(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "cpu,50%;xpu:0,50%").in_place("*.mlp.*").plan().unwrap();
    let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
    let guard = streamer.layer(LayerId::new(2)).unwrap();
    for view in guard.tensors() {
        assert_eq!(view.device() == GPU0, !view.info().name.contains("mlp"), "{}", view.info().name);
    }
    check_layer(&guard, &subject).unwrap();
    drop(guard);
    check_pass(&mut streamer, &subject).unwrap();
}

/// A driver that makes no allocation as large as a layer gets slots of several, and what arrives in them is whole.
#[test]
fn slots_are_divided_where_a_driver_makes_no_allocation_as_large() {
    use support::whole_path::{load, source, whole_path};
    let source = source();
    let machine = described(&["cpu=64mb,link=20", "cuda:0=24mb,link=10,largest=40kb"]);
    let devices = Registry::described(machine, Clock::Virtual);
    let plan = load(&devices, &source, GPU0, "cuda:0,60kb;cpu,*", 1).unwrap();
    assert_eq!(plan.plan().grouping(), TensorGrouping::PerTensor);
    drop(plan);
    whole_path(&devices, &source, GPU0, "cuda:0,60kb;cpu,*", 1).unwrap();
    devices.opened().iter().for_each(|device| assert_eq!(device.ledger().charged(), 0, "{}", device.id()));
}
