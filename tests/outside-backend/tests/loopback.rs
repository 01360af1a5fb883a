//! The backend, checked as every backend is: by the conformance suite, with each of its operations failing in turn, and with a model
//! that is loaded, streamed and unloaded.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use outside_backend::Loopback;
use tensor_offload::backend::{
    Backend, Buf, BufMut, Clock, Countdown, Device, Event, Faulty, Fence, FenceState, Health, Host, MemoryKind,
    Operation, Role, Route, Simulated, Transfer, conformance,
};
use tensor_offload::stream::Via;
use tensor_offload::{
    Adapter, Allocation, Checkpoint, DeviceId, Error, ErrorKind, Loader, Machine, Matching, Model, ModelCache, Order,
    Planner, Registry, Result, Retention, Streamer, Weights,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data/tiny-llama");
const LORA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data/tiny-llama-lora");

/// How long a test waits for anything.
const DEADLINE: Duration = Duration::from_secs(20);

const ZERO: DeviceId = Loopback::id(0);
const ONE: DeviceId = Loopback::id(1);

/// Two accelerators with 16 MiB each.
fn loopback() -> Loopback {
    Loopback::new(&[16 << 20, 16 << 20])
}

fn registry(backend: Arc<dyn Backend>) -> Registry {
    Registry::new([backend, Arc::new(Host::new())])
}

/// Waits until nothing is taken of any device. Memory comes back when the last work that uses it is done.
fn assert_given_back(devices: &Registry, what: &str) {
    let until = Instant::now() + DEADLINE;
    for device in devices.opened() {
        while device.ledger().charged() > 0 {
            let (bytes, id) = (device.ledger().charged(), device.id());
            assert!(Instant::now() < until, "{what}: {bytes} bytes of {id} stay taken");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn weights() -> Weights {
    let adapters = vec![Adapter::open(LORA, 0.8).unwrap()];
    Weights::patched(Checkpoint::open(MODEL).unwrap(), adapters, Matching::Strict).unwrap()
}

/// Loads the model for `loopback:0` as the allocation says.
fn load(devices: &Registry, weights: &Weights, allocation: &str) -> Result<Model> {
    let planner = Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse()?);
    let plan = planner.compute(ZERO).order(Order::Interleaved).depth(1).plan()?;
    Loader::new(devices).workers(2).deadline(DEADLINE).load(weights, &plan)
}

/// Streams every layer, and compares each tensor with what reading it on the host gives. Returns how many there were.
fn pass(streamer: &mut Streamer, weights: &Weights) -> Result<usize> {
    let (model, mut tensors) = (Arc::clone(streamer.model()), 0);
    for layer in model.layout().layer_ids() {
        let guard = streamer.layer(layer)?;
        for view in guard.tensors() {
            let (name, bytes) = (&view.info().name, view.info().bytes as usize);
            let (mut arrived, mut wanted) = (vec![0; bytes], vec![0; bytes]);
            guard.read(name, &mut arrived)?;
            weights.read(weights.checkpoint().find(name).unwrap(), &mut wanted)?;
            assert!(arrived == wanted, "{layer:?}: `{name}` arrived wrong");
            tensors += 1;
        }
    }
    Ok(tensors)
}

/// Loads, streams twice, and unloads. Returns the routes that the layers took.
fn whole_path(devices: &Registry, weights: &Weights, allocation: &str) -> Result<BTreeSet<(DeviceId, Via)>> {
    let model = Arc::new(load(devices, weights, allocation)?);
    let cache = ModelCache::new();
    cache.insert("model", Arc::clone(&model), Retention::Unload);
    let mut streamer = Streamer::new(&model)?;
    for _ in 0..2 {
        assert_eq!(pass(&mut streamer, weights)?, weights.layout().tensor_ids().count());
    }
    let lanes = streamer.report().lanes.iter().filter(|lane| lane.bytes > 0);
    let routes = lanes.map(|lane| (lane.from, lane.via)).collect();
    drop((streamer, model));
    cache.full_cleanup(devices)?;
    Ok(routes)
}

#[test]
fn accelerators_and_the_host_beside_them_conform() {
    let (loopback, host) = (loopback(), Host::new());
    let cpu = host.open(DeviceId::CPU).unwrap();
    for id in [ZERO, ONE] {
        conformance::check(&*loopback.open(id).unwrap(), &*cpu);
    }
    conformance::check(&*cpu, &*cpu);
    let faulty = Faulty::new(loopback, Countdown::new());
    conformance::check(&*faulty.open(ONE).unwrap(), &*cpu);
}

#[test]
fn a_model_arrives_from_wherever_its_weights_live() {
    let (devices, weights) = (registry(Arc::new(loopback())), weights());
    let (peer, host, disk) = ((ONE, Via::Direct), (DeviceId::CPU, Via::Direct), (DeviceId::DISK, Via::Host));
    for (allocation, routes) in [
        ("loopback:0,*", vec![]),
        ("loopback:0,10%;loopback:1,*", vec![peer]),
        ("cpu,*", vec![host]),
        ("disk,*", vec![disk]),
        ("loopback:0,20%;loopback:1,30%;cpu,25%;disk,*", vec![peer, host, disk]),
    ] {
        let taken = whole_path(&devices, &weights, allocation).unwrap();
        assert_eq!(taken, routes.into_iter().collect(), "{allocation}");
        assert_given_back(&devices, allocation);
    }
}

#[test]
fn an_allocation_names_the_kind() {
    let allocation: Allocation = "loopback:0,25%;cpu,*".parse().unwrap();
    assert_eq!(allocation.to_string(), "loopback:0,25%;cpu,*");
    let (devices, weights) = (registry(Arc::new(loopback())), weights());
    let planner = Planner::new(weights.layout(), devices.machine()).compute(ZERO);
    let plan = planner.clone().allocation(allocation).plan().unwrap();
    let (here, all) = (plan.device(ZERO).unwrap().weights.bytes, plan.bytes());
    assert!(here > 0 && here <= all / 4, "{here} of {all} bytes");
    let unknown = planner.allocation("loopback:7,*".parse().unwrap()).plan().unwrap_err();
    assert!(unknown.to_string().contains("loopback:7"), "{unknown}");
    let unknown = devices.device(Loopback::id(7)).unwrap_err();
    assert!(matches!(unknown, Error::UnknownDevice { device, .. } if device == Loopback::id(7)), "{unknown}");
}

#[test]
fn whatever_operation_fails_gives_everything_back() {
    let (weights, allocation) = (weights(), "loopback:0,20%;loopback:1,30%;cpu,25%;disk,*");
    let run = |countdown: &Countdown| {
        let devices = registry(Arc::new(Faulty::new(loopback(), countdown.clone())));
        let outcome = whole_path(&devices, &weights, allocation);
        assert_given_back(&devices, &format!("{outcome:?}"));
        outcome
    };
    let none = Countdown::new();
    run(&none).unwrap();
    assert!(none.calls_of(Operation::Copy) > 20 && none.calls_of(Operation::Allocate) > 2, "{none:?}");
    let mut seen = 0;
    for n in 1..=none.calls() {
        let countdown = Countdown::new();
        countdown.fail_nth(n);
        // A fetch ahead of need that fails is tried again, and what it brings is compared, so a run may be right all the same.
        if let Err(error) = run(&countdown) {
            assert_eq!(error.kind(), ErrorKind::DeviceLost, "operation {n}: {error}");
            seen += 1;
        }
    }
    assert!(seen > none.calls() / 2, "{seen} of {} failures were seen", none.calls());
}

#[test]
fn what_does_not_fit_says_how_much_there_is() {
    let devices = registry(Arc::new(Loopback::new(&[65_536])));
    let accelerator = devices.device(ZERO).unwrap();
    let first = accelerator.alloc(60_000, MemoryKind::Arena).unwrap();
    let error = accelerator.alloc(6_000, MemoryKind::Arena).unwrap_err();
    assert_eq!(error.to_string(), "loopback:0 has 5536 bytes free of 65536, the request needs 6000 (464 bytes short)");
    assert!(matches!(error, Error::OutOfMemory { requested: 6_000, available: 5_536, limit: 65_536, .. }), "{error:?}");
    assert_eq!(accelerator.memory().unwrap().free, 5_536);
    drop(first);
    assert_given_back(&devices, "memory that was dropped");
    // More than the system has is refused by the system, whatever the ledger allows.
    let vast = registry(Arc::new(Loopback::new(&[1 << 62])));
    let error = vast.device(ZERO).unwrap().alloc(1 << 61, MemoryKind::Arena).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { requested, available: 0, .. } if requested == 1 << 61), "{error:?}");
    assert_given_back(&vast, "memory that was refused");
}

/// An event that the test brings about, of no backend at all.
#[derive(Default)]
struct Gate {
    state: Mutex<Option<FenceState>>,
    opened: Condvar,
}

impl Gate {
    fn new() -> (Arc<Gate>, Event) {
        let gate = Arc::new(Gate::default());
        (Arc::clone(&gate), Event::new(gate))
    }

    fn open(&self, state: FenceState) {
        *self.state.lock().unwrap() = Some(state);
        self.opened.notify_all();
    }
}

// SAFETY: no work stands behind it.
unsafe impl Fence for Gate {
    fn state(&self) -> FenceState {
        self.state.lock().unwrap().clone().unwrap_or(FenceState::Pending)
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        let state = self.state.lock().unwrap();
        let waited = self.opened.wait_timeout_while(state, deadline, |state| state.is_none()).unwrap();
        waited.0.clone().unwrap_or(FenceState::Pending)
    }
}

/// Memory of the device, filled, and as much of the host.
fn filled(device: &dyn Device, cpu: &dyn Device) -> (Buf, BufMut) {
    let mut source = cpu.alloc(100, MemoryKind::Pinned).unwrap();
    source.host_mut().unwrap().fill(7);
    let there = Transfer::whole(&source.freeze(), device.alloc(100, MemoryKind::Arena).unwrap()).unwrap();
    let there = device.stream(Role::Upload).unwrap().copy(there).unwrap().wait(DEADLINE).unwrap();
    (there.freeze(), cpu.alloc(100, MemoryKind::Pinned).unwrap())
}

#[test]
fn queues_work_while_the_host_does_something_else_and_wait_for_each_other() {
    let devices = registry(Arc::new(loopback()));
    let (zero, one, cpu) =
        (devices.device(ZERO).unwrap(), devices.device(ONE).unwrap(), devices.device(DeviceId::CPU).unwrap());
    let (source, host) = filled(&*one, &*cpu);
    assert!(source.host(DEADLINE).unwrap().is_none(), "the host sees the memory of an accelerator");
    let (gate, opens) = Gate::new();
    let (first, second) = (zero.stream(Role::Upload).unwrap(), zero.stream(Role::Download).unwrap());
    first.wait(&opens).unwrap();
    // From one accelerator to the other, and on to the host by another queue.
    let there = Transfer::whole(&source, zero.alloc(100, MemoryKind::Arena).unwrap()).unwrap();
    let there = first.copy(there).unwrap().order(&*second, DEADLINE).unwrap();
    let back = second.copy(Transfer::whole(&there, host).unwrap()).unwrap();
    let mark = second.record(&[]).unwrap();
    assert!(matches!((back.done().state(), mark.state()), (FenceState::Pending, FenceState::Pending)));
    gate.open(FenceState::Done);
    let mut arrived = back.wait(DEADLINE).unwrap();
    assert_eq!(arrived.host_mut().unwrap(), [7; 100]);
    mark.wait(DEADLINE).unwrap();
    drop((source, there, arrived));
    assert_given_back(&devices, "after the copies");
}

/// Tells a thread that it was woken.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_task_is_woken_when_the_work_is_done() {
    let loopback = loopback();
    let queue = loopback.open(ZERO).unwrap().stream(Role::Compute).unwrap();
    let (gate, opens) = Gate::new();
    queue.wait(&opens).unwrap();
    let mut done = std::pin::pin!(queue.record(&[]).unwrap().completed());
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    assert!(done.as_mut().poll(&mut context).is_pending());
    gate.open(FenceState::Done);
    let until = Instant::now() + DEADLINE;
    loop {
        match done.as_mut().poll(&mut context) {
            Poll::Ready(outcome) => break outcome.unwrap(),
            Poll::Pending => std::thread::park_timeout(DEADLINE),
        }
        assert!(Instant::now() < until, "nobody was woken");
    }
}

#[test]
fn a_failure_travels_with_its_event_and_the_queue_goes_on() {
    let devices = registry(Arc::new(loopback()));
    let (zero, cpu) = (devices.device(ZERO).unwrap(), devices.device(DeviceId::CPU).unwrap());
    let (first, second) = (zero.stream(Role::Upload).unwrap(), zero.stream(Role::Download).unwrap());
    for lost in [false, true] {
        let (source, host) = filled(&*zero, &*cpu);
        let cause = Arc::new(Error::Corrupted { what: "bytes on purpose".to_owned() });
        let is_cause = |event: &Event| match (event.wait(DEADLINE), event.is_over()) {
            (Err(Error::Failed { cause: found, .. }), over) => Arc::ptr_eq(&found, &cause) && over != lost,
            _ => false,
        };
        let (gate, opens) = Gate::new();
        first.wait(&opens).unwrap();
        let copied =
            first.copy(Transfer::whole(&source, zero.alloc(100, MemoryKind::Arena).unwrap()).unwrap()).unwrap();
        let (event, copied) = (copied.done().clone(), copied.chain().freeze());
        // What comes after it on another queue, once as a source and once as an event.
        let back = second.copy(Transfer::whole(&copied, host).unwrap()).unwrap();
        second.wait(&event).unwrap();
        let mark = second.record(&[]).unwrap();
        gate.open(if lost { FenceState::Lost(Arc::clone(&cause)) } else { FenceState::Failed(Arc::clone(&cause)) });
        assert!(is_cause(&event) && is_cause(back.done()) && is_cause(&mark), "lost: {lost}");
        assert!(first.wait(&event).is_err(), "an event that has failed already");
        for queue in [&first, &second] {
            queue.record(&[]).unwrap().wait(DEADLINE).expect("the work after it");
        }
        drop((source, copied, back));
        assert_given_back(&devices, "after a failure");
    }
    assert_eq!(zero.health(), Health::Good);
}

#[test]
fn copies_that_no_queue_can_make_are_refused() {
    let devices = registry(Arc::new(loopback()));
    let [zero, one, cpu, disk] = [ZERO, ONE, DeviceId::CPU, DeviceId::DISK].map(|id| devices.device(id).unwrap());
    assert_eq!((zero.route_from(&*one), zero.route_from(&*cpu)), (Route::Direct, Route::Direct));
    assert!(matches!(zero.route_from(&*disk), Route::Staged(why) if why.contains("disk")));
    let queue = zero.stream(Role::Upload).unwrap();
    for (from, to) in [(&disk, &zero), (&zero, &disk), (&cpu, &cpu), (&one, &cpu)] {
        let source = from.alloc(10, MemoryKind::Arena).unwrap().freeze();
        let transfer = Transfer::whole(&source, to.alloc(10, MemoryKind::Arena).unwrap()).unwrap();
        let rejected = queue.copy(transfer).unwrap_err();
        let ends = matches!(rejected.error, Error::Unreachable { stream, from: a, to: b } if (stream, a, b) == (ZERO, from.id(), to.id()));
        assert!(ends && rejected.dst.device() == to.id(), "{}", rejected.error);
    }
    assert_given_back(&devices, "what was refused");
}

#[test]
fn an_accelerator_that_is_pulled_out_fails_what_is_queued_and_keeps_nothing() {
    let loopback = Arc::new(loopback());
    let (devices, weights) = (registry(Arc::clone(&loopback) as Arc<dyn Backend>), weights());
    let model = Arc::new(load(&devices, &weights, "loopback:0,10%;loopback:1,*").unwrap());
    let mut streamer = Streamer::new(&model).unwrap();
    pass(&mut streamer, &weights).unwrap();
    let accelerator = devices.device(ZERO).unwrap();
    let (queue, (gate, opens)) = (accelerator.stream(Role::Compute).unwrap(), Gate::new());
    queue.wait(&opens).unwrap();
    let queued = queue.record(&[]).unwrap();
    loopback.unplug(ZERO).unwrap();
    gate.open(FenceState::Done);
    let error = queued.wait(DEADLINE).unwrap_err();
    assert!(matches!(&error, Error::Failed { cause, .. } if cause.kind() == ErrorKind::DeviceLost), "{error}");
    assert_eq!(accelerator.health(), Health::Lost("it was unplugged".to_owned()));
    for error in [
        pass(&mut streamer, &weights).unwrap_err(),
        accelerator.alloc(10, MemoryKind::Arena).unwrap_err(),
        accelerator.stream(Role::Upload).map(drop).unwrap_err(),
        queue.record(&[]).map(drop).unwrap_err(),
        loopback.open(ZERO).map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    }
    drop((streamer, model));
    assert_given_back(&devices, "after it was pulled out");
}

#[test]
fn its_links_are_known_beside_those_of_another_backend() {
    let described = Machine::described(&["cuda:0=1mb,link=10".parse().unwrap()]);
    let simulated = Simulated::new(described, Clock::Virtual);
    let backends: [Arc<dyn Backend>; 3] = [Arc::new(simulated), Arc::new(loopback()), Arc::new(Host::new())];
    let devices = Registry::new(backends);
    let topology = devices.machine().topology();
    for (from, to, segment) in [
        (DeviceId::CPU, DeviceId::cuda(0), "cuda:0 in"),
        (DeviceId::CPU, ZERO, "loopback:0 in"),
        (ONE, ZERO, "loopback:0 <- loopback:1"),
    ] {
        let names: Vec<&str> = topology.route(from, to).iter().map(|&at| &*topology.segments()[at].name).collect();
        assert_eq!(names, [segment]);
    }
}
