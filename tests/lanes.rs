//! Lanes, slots of the caller's own, figures, and several models on one device: on simulated devices.

mod support;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use support::watched::Watched;
use support::*;
use tensor_offload::backend::{BufMut, Clock, MemoryKind, Role, Transfer};
use tensor_offload::device::Topology;
use tensor_offload::stream::Via;
use tensor_offload::{ErrorKind, LayerId, Model, Plan, Registry, Streamer};

/// Layers whose bytes come from two devices, each behind a link of its own: they come at one time.
#[test]
fn the_parts_of_a_layer_come_at_one_time() {
    let tensors: Vec<_> = (0..6)
        .flat_map(|layer| ["a", "b"].map(|name| spec(format!("layers.{layer}.{name}.weight"), DTYPE, &[1_000_000])))
        .collect();
    let subject = Subject::plain(&tensors, 90);
    let gbps = |n: u64| tensor_offload::device::Bandwidth::bytes_per_second(n * 1_000_000_000);
    let devices = described(&["cpu=64mb", "cuda:0=24mb", "cuda:1=24mb"]);
    let machine = devices.with_topology(Topology::new().link(GPU0, gbps(1)).peer(GPU0, GPU1, gbps(1)));
    let plan = subject.planner(&machine, "cuda:1,50%;cpu,50%").depth(1).plan().unwrap();
    let first_pass = |clock| {
        let watched = Watched::new(machine.clone(), clock);
        let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
        let begin = watched.simulated.now();
        pass(&mut streamer, Duration::ZERO).wait(DEADLINE).unwrap();
        let time = watched.simulated.now() - begin;
        assert!(time >= Duration::from_millis(6), "{time:?}");
        (streamer, time)
    };
    for clock in [Clock::Virtual, Clock::Wall] {
        let (mut streamer, time) = first_pass(clock);
        // Twelve megabytes over two links of 1 GB/s; one after the other they would take 12 ms.
        assert!(clock == Clock::Wall || time < Duration::from_micros(6_010), "{time:?}");
        let report = streamer.report().clone();
        let lanes: Vec<_> = report.lanes.iter().map(|lane| (lane.from, lane.via)).collect();
        assert_eq!(lanes.len(), 2);
        assert!(lanes.contains(&(CPU, Via::Direct)) && lanes.contains(&(GPU1, Via::Direct)), "{lanes:?}");
        assert_eq!(report.lanes.iter().map(|lane| lane.bytes).sum::<u64>(), report.bytes.values().sum::<u64>());
        let segments = report.segments(machine.topology());
        assert_eq!(
            segments,
            BTreeMap::from([("cuda:0 <- cuda:1", report.bytes[&GPU1]), ("cuda:0 in", report.bytes[&CPU])])
        );
        assert!(report.stalls.is_empty(), "{report}");
        check_pass(&mut streamer, &subject).unwrap();
    }
}

const DTYPE: tensor_offload::DType = tensor_offload::DType::U8;

/// Two models on one device: together they take what their bytes take on the link they share, and neither waits for
/// the other's whole pass.
#[test]
fn two_models_on_one_device_are_at_their_joint_floor() {
    const LAYERS: u32 = 8;
    // Two megabytes at 0.5 GB/s; compute is in their shade.
    let (copy, busy) = (Duration::from_millis(4), Duration::from_millis(2));
    let machine = described(&["cpu=256mb", "cuda:0=64mb,link=0.5"]);
    let subjects = [91, 92].map(|seed| Subject::plain(&blocks(&[2_000_000; LAYERS as usize]), seed));
    let streamers = |registry: &Registry| {
        subjects.each_ref().map(|subject| {
            let plan = subject.planner(&machine, "cpu,*").depth(2).plan().unwrap();
            Streamer::new(&load(registry, subject, &plan)).unwrap()
        })
    };
    let watched = Watched::new(machine.clone(), Clock::Virtual);
    let mut both = streamers(&watched.registry);
    let begin = watched.simulated.now();
    for pass in 1..=6 {
        for layer in 0..LAYERS as usize {
            for streamer in &mut both {
                let _guard = streamer.layer(LayerId::new(layer)).unwrap();
                streamer.compute().occupy(busy).unwrap();
            }
        }
        let ends = both.each_ref().map(|streamer| streamer.compute().record(&[]).unwrap());
        ends.iter().for_each(|end| end.wait(DEADLINE).unwrap());
        // The link is never idle: the last copy of a pass is the second model's, that before it the first one's.
        let floor = copy * 2 * LAYERS * pass;
        let ends = ends.map(|end| end.time().unwrap() - begin);
        assert_eq!(ends, [floor - copy + busy, floor + busy], "pass {pass}");
    }
    // With a thread each and in real time, who comes when is the processors' affair; the link is the limit, and each gets
    // its own bytes.
    let registry = Registry::described(machine.clone(), Clock::Wall);
    let (both, begin) = (streamers(&registry), Instant::now());
    std::thread::scope(|scope| {
        for (mut streamer, subject) in both.into_iter().zip(&subjects) {
            scope.spawn(move || {
                pass(&mut streamer, busy).wait(DEADLINE).unwrap();
                check_pass(&mut streamer, subject).unwrap();
                let fetched = streamer.report().bytes[&CPU];
                assert!((32_000_000..=36_000_000).contains(&fetched), "two passes and two layers ahead: {fetched}");
            });
        }
    });
    assert!(begin.elapsed() >= copy * 2 * LAYERS * 2, "{:?}", begin.elapsed());
}

fn own_slots(model: &Model, count: usize) -> Vec<BufMut> {
    let (device, bytes) = (model.residency().device(), model.plan().slots().bytes_each);
    (0..count).map(|_| device.alloc(bytes as usize, MemoryKind::Whole).unwrap()).collect()
}

fn compute(model: &Model) -> Arc<dyn tensor_offload::backend::Stream> {
    model.residency().device().stream(Role::Compute).unwrap()
}

/// The caller's memory is filled in place, in any order, from every kind of home, and each tensor keeps its address
/// in each slot.
#[test]
fn slots_of_the_callers_own_are_filled_in_place() {
    let split = "cuda:0,15%;cuda:1,20%;xpu:0,25%;disk,20%;cpu,20%";
    for (tensors, clock, allocation) in [
        (llama(5, 32), Clock::Virtual, split),
        (llama(5, 32), Clock::Wall, "cpu,*"),
        (norms(5), Clock::Virtual, split),
        (norms(5), Clock::Wall, "cpu,*"),
    ] {
        let subject = Subject::patched(&tensors, 93);
        let registry = Registry::described(machine(), clock);
        let machine = machine();
        let plan = subject.planner(&machine, allocation).depth(2).external_slots(true).plan().unwrap();
        assert_eq!((plan.slots().count, plan.device(GPU0).unwrap().beside.slots), (0, 0));
        let read: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(read, plan);
        let model = load(&registry, &subject, &plan);
        let card = registry.device(GPU0).unwrap();
        assert_eq!(card.ledger().charged(), plan.device(GPU0).unwrap().weights.bytes, "no slot is taken");
        let error = Streamer::new(&model).unwrap_err();
        assert!(error.to_string().contains("leaves the slots to the caller"), "{error}");
        let slots = own_slots(&model, 3);
        let bytes = plan.slots().bytes_each as usize;
        let known: Vec<usize> = slots.iter().map(|slot| Arc::as_ptr(slot.block()) as usize).collect();
        let taken = card.ledger().charged();
        let mut streamer = Streamer::with_slots(&model, compute(&model), slots).unwrap();
        let (mut random, mut streamed) = (Random::new(7), 0);
        for step in 0..60 {
            let turn = if step < 16 { step } else { random.next() as usize };
            let layer = LayerId::new(turn % layers(&streamer).len());
            let guard = streamer.layer(layer).unwrap();
            check_layer(&guard, &subject).unwrap();
            let mut places = Vec::new();
            for tensor in guard.tensors() {
                let Some(place) = streamer.range_in_slot(&tensor.info().name) else { continue };
                let slot = guard.slot().expect("a layer with streamed tensors is in a slot");
                assert_eq!(Arc::as_ptr(tensor.buf().block()) as usize, known[slot], "{:?} moved", tensor.info());
                assert_eq!((tensor.byte_range().len(), place.end <= bytes), (place.len(), true));
                places.push(place);
            }
            places.sort_by_key(|place| place.start);
            assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start), "{places:?} overlap");
            streamed += places.len();
        }
        assert!(streamed > 100, "{streamed} tensors were in slots");
        assert!(streamer.report().misses < 60, "{}", streamer.report());
        assert_eq!(card.ledger().charged(), taken, "streaming takes no memory on the device");
        let guard = streamer.layer(LayerId::new(1)).unwrap();
        let held = guard.slot().is_some();
        let streamer = match streamer.into_slots() {
            Err(streamer) if held => streamer,
            Ok(_) if !held => continue,
            other => panic!("{other:?}"),
        };
        drop(guard);
        let again = streamer.into_slots().unwrap();
        check_pass(&mut Streamer::with_slots(&model, compute(&model), again).unwrap(), &subject).unwrap();
        drop((model, card));
        comes_back(&registry);
    }
}

#[test]
fn slots_that_do_not_fit_are_refused_by_name() {
    let (subject, machine) = (Subject::plain(&llama(3, 16), 94), machine());
    let registry = Registry::described(machine.clone(), Clock::Virtual);
    let plan = subject.planner(&machine, "cpu,*").external_slots(true).plan().unwrap();
    let model = load(&registry, &subject, &plan);
    let refused = |change: &dyn Fn(&mut Vec<BufMut>)| {
        let mut slots = own_slots(&model, 2);
        change(&mut slots);
        let error = Streamer::with_slots(&model, compute(&model), slots).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::WrongSize | ErrorKind::Mismatch), "{error}");
        error.to_string()
    };
    let other = registry.device(GPU1).unwrap();
    let bytes = plan.slots().bytes_each as usize;
    let small =
        refused(&|slots| slots[1] = registry.device(GPU0).unwrap().alloc(bytes - 1, MemoryKind::Arena).unwrap());
    assert!(
        small.contains(&format!("slot 1 has {} bytes", bytes - 1)) && small.contains(&bytes.to_string()),
        "{small}"
    );
    let elsewhere = refused(&|slots| slots[0] = other.alloc(bytes, MemoryKind::Arena).unwrap());
    assert!(elsewhere.contains("on cuda:1") && elsewhere.contains("cuda:0"), "{elsewhere}");
    assert!(refused(&|slots| slots.clear()).contains("0 slots were given"));
    let other_stream = other.stream(Role::Compute).unwrap();
    assert!(Streamer::with_slots(&model, other_stream, own_slots(&model, 1)).is_err());
    check_pass(&mut Streamer::with_slots(&model, compute(&model), own_slots(&model, 1)).unwrap(), &subject).unwrap();
}

/// Wakes the thread that waits, as the smallest executor does.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What the future gives, and how often it was asked.
fn block_on<T>(future: impl Future<Output = T>) -> (T, usize) {
    let (mut future, mut asked) = (pin!(future), 0);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        asked += 1;
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return (value, asked);
        }
        std::thread::park_timeout(DEADLINE);
    }
}

#[test]
fn arrival_can_be_awaited() {
    let subject = Subject::plain(&blocks(&[200_000; 4]), 95);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.02"]);
    for clock in [Clock::Wall, Clock::Virtual] {
        let watched = Watched::new(machine.clone(), clock);
        let plan = subject.planner(&machine, "cpu,*").depth(1).plan().unwrap();
        let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
        for layer in 0..4 {
            let begin = watched.simulated.now();
            let guard = streamer.layer(LayerId::new(layer)).unwrap();
            let (arrived, asked) = block_on(guard.arrived());
            arrived.unwrap();
            assert!(asked <= 4, "asked {asked} times for one event");
            assert!(guard.arriving().next().is_none());
            assert!(layer > 0 || watched.simulated.now() - begin >= Duration::from_millis(9), "it took no time");
            check_layer(&guard, &subject).unwrap();
        }
        // A copy that fails ends the wait with its cause; this backend's event tells nobody, so that a thread looks.
        watched.copies.spoil_nth_when_let_go(1);
        let guard = streamer.layer(LayerId::new(1)).unwrap();
        let mut arrived = pin!(guard.arrived());
        assert!(arrived.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        watched.copies.let_go();
        assert_eq!(block_on(arrived).0.unwrap_err().kind(), ErrorKind::DeviceLost);
    }
}

/// Whoever stops awaiting leaves nothing behind.
#[test]
fn an_await_can_be_given_up() {
    let subject = Subject::plain(&blocks(&[200_000; 3]), 96);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.02"]);
    let watched = Watched::new(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "cpu,*").depth(1).plan().unwrap();
    let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
    watched.copies.hold();
    let guard = streamer.layer(LayerId::new(0)).unwrap();
    {
        let mut future = pin!(guard.arrived());
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    watched.copies.let_go();
    drop((guard, streamer));
    comes_back(&watched.registry);
}

/// A thousand passes with skips, repeats, steps back and guards that are kept for a while, from every kind of home.
#[test]
fn a_thousand_passes_are_right() {
    let subject = Subject::plain(&llama(4, 16), 97);
    for (clock, passes) in [(Clock::Virtual, 1000), (Clock::Wall, 300)] {
        let registry = Registry::described(machine(), clock);
        let machine = machine();
        let plan =
            subject.planner(&machine, "cuda:0,10%;cuda:1,20%;xpu:0,25%;disk,20%;cpu,25%").depth(2).plan().unwrap();
        let mut streamer = Streamer::new(&load(&registry, &subject, &plan)).unwrap();
        let (mut random, mut kept) = (Random::new(11), None);
        for pass in 0..passes {
            let mut layer = 0;
            while layer < layers(&streamer).len() {
                let guard = streamer.layer(LayerId::new(layer)).unwrap();
                if layer == pass % layers(&streamer).len() {
                    check_layer(&guard, &subject).unwrap();
                }
                let (skip, keep) = (random.next() % 10, random.next() % 8 == 0);
                layer = match skip {
                    0 => layer,
                    1 => layer.saturating_sub(1),
                    2 | 3 => layer + 2,
                    _ => layer + 1,
                };
                if keep {
                    kept = Some(guard);
                } else if kept.as_ref().is_some_and(|kept| check_layer(kept, &subject).is_ok()) {
                    kept = None;
                }
            }
        }
        let report = streamer.report();
        assert!(report.hits > report.misses, "{report}");
        drop((kept, streamer));
        comes_back(&registry);
    }
}

/// A caller that panics in a layer: its guard marks the end of the use, and the pass goes on.
#[test]
fn a_caller_that_panics_in_a_layer_spoils_nothing() {
    let subject = Subject::plain(&llama(4, 16), 98);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.05", "xpu:0=24mb"]);
    let registry = Registry::described(machine.clone(), Clock::Wall);
    let plan = subject.planner(&machine, "xpu:0,40%;cpu,60%").depth(1).plan().unwrap();
    let model = load(&registry, &subject, &plan);
    let mut streamer = Streamer::new(&model).unwrap();
    for layer in layers(&streamer) {
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _guard = streamer.layer(layer).unwrap();
            streamer.compute().occupy(Duration::from_millis(1)).unwrap();
            // A panic without its message.
            std::panic::resume_unwind(Box::new("the caller's code fails"));
        }));
        assert!(panicked.is_err());
        check_layer(&streamer.layer(layer).unwrap(), &subject).unwrap();
    }
    check_pass(&mut streamer, &subject).unwrap();
    drop((streamer, model));
    comes_back(&registry);
}

/// While a link stands still a wait ends at its deadline, and what was late comes in the end.
#[test]
fn a_link_that_stands_still_is_an_error_that_passes() {
    let subject = Subject::plain(&blocks(&[100_000; 4]), 99);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=1"]);
    let watched = Watched::new(machine.clone(), Clock::Wall);
    watched.copies.let_the_host_wait();
    let plan = subject.planner(&machine, "cpu,*").depth(1).plan().unwrap();
    let mut streamer = Streamer::new(&load(&watched.registry, &subject, &plan)).unwrap();
    streamer = streamer.deadline(Duration::from_millis(1));
    watched.copies.hold();
    assert_eq!(streamer.layer(LayerId::new(0)).unwrap_err().kind(), ErrorKind::TimedOut);
    let stalls = streamer.report().stalls.clone();
    assert!(stalls.values().any(|stalls| stalls.count == 1 && stalls.time >= Duration::from_millis(1)), "{stalls:?}");
    watched.copies.let_go();
    streamer = streamer.deadline(DEADLINE);
    check_pass(&mut streamer, &subject).unwrap();
    drop(streamer);
    comes_back(&watched.registry);
}

/// A copy that fails does not say that it is over while its destination is read: the next one into it would be too early.
#[test]
fn a_failed_copy_is_over_when_its_destination_is_free() {
    for clock in [Clock::Wall, Clock::Virtual] {
        let watched = Watched::new(machine(), clock);
        let (cpu, card) = (watched.registry.device(CPU).unwrap(), watched.registry.device(GPU0).unwrap());
        let (up, compute) = (card.stream(Role::Upload).unwrap(), card.stream(Role::Compute).unwrap());
        let alloc = || card.alloc(1000, MemoryKind::Arena).unwrap();
        let source = cpu.alloc(1000, MemoryKind::Pinned).unwrap().freeze();
        watched.copies.spoil_nth(1);
        let broken = up.copy(Transfer::whole(&source, alloc()).unwrap()).unwrap().chain().freeze();
        let slot = alloc().freeze();
        let begin = watched.simulated.now();
        compute.occupy(Duration::from_millis(30)).unwrap();
        compute.record(std::slice::from_ref(&slot)).unwrap();
        let flight = up.copy(Transfer::whole(&broken, slot.try_reclaim().unwrap()).unwrap()).unwrap();
        assert_eq!(flight.done().wait(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
        assert!(watched.simulated.now() - begin >= Duration::from_millis(30), "over while the slot was read");
    }
}
