//! Loading: the bytes, the memory, and what is left when it fails. Numbers are those of the cases that users met.

mod support;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;

use support::watched::Watched;
use support::*;
use tensor_offload::backend::{Clock, Countdown, Faulty, MemoryKind, Operation, Simulated};
use tensor_offload::checkpoint::write_safetensors;
use tensor_offload::error::FileFault;
use tensor_offload::load::Reservation;
use tensor_offload::plan::Unit;
use tensor_offload::transfer::{FileSource, Source, Stamp};
use tensor_offload::{
    Cancel, Checkpoint, DType, DeviceId, Error, ErrorKind, Loader, Machine, ModelCache, Order, Plan, Registry,
    Retention, Streamer, Weights,
};

const SPLIT: &str = "cuda:0,20kb;cuda:1,20kb;xpu:0,15kb;disk,15kb;cpu,*";

/// Plans of one model that differ in all that may not matter.
fn placements(subject: &Subject, machine: &Machine) -> Vec<(String, Plan)> {
    let mut plans =
        vec![("all on the host".to_owned(), subject.planner(machine, "cpu,*").compute(CPU).plan().unwrap())];
    for allocation in ["cuda:0,*", "cpu,*", "disk,*", "xpu:0,*", SPLIT, "cuda:0,2%;cuda:1,2%;cpu,92%;disk,2%;xpu:0,2%"]
    {
        let orders = [
            (Order::Sequential, Unit::Module),
            (Order::Interleaved, Unit::Module),
            (Order::Interleaved, Unit::Uniform),
        ];
        for (order, unit) in orders {
            let plan = subject.planner(machine, allocation).order(order).unit(unit).depth(1).plan().unwrap();
            plans.push((format!("{allocation} {order} {unit:?}"), plan));
        }
    }
    plans
}

#[test]
fn case_13_every_placement_gives_the_same_bytes() {
    let subject = Subject::patched(&mixed(4), 1);
    assert!(subject.weights.patches().iter().count() >= 16, "every matrix is patched");
    let plans = placements(&subject, &machine());
    let everywhere = |plan: &Plan| plan.devices().iter().filter(|share| share.weights.bytes > 1000).count() == 5;
    assert!(plans.iter().filter(|(_, plan)| everywhere(plan)).count() >= 5);
    for (index, (name, plan)) in plans.into_iter().enumerate() {
        let clock = if index % 4 == 3 { Clock::Wall } else { Clock::Virtual };
        let watched = Watched::new(machine(), clock);
        let workers = 1 + index % 8;
        let model = Loader::new(&watched.registry).workers(workers).load(&subject.weights, &plan);
        let model = model.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(hash(&model), subject.hash(), "{name}, {workers} workers");
        subject.check(&model);
        assert_eq!(model.report().bytes, subject.layout().bytes());
        assert_eq!(model.report().patched, subject.weights.patches().iter().count());
    }
}

#[test]
fn case_13_any_number_of_workers_gives_the_same_bytes() {
    let subject = Subject::patched(&mixed(3), 2);
    let plan = subject.planner(&machine(), SPLIT).plan().unwrap();
    let registry = Registry::described(machine(), Clock::Wall);
    for workers in 1..=8 {
        let model = Loader::new(&registry).workers(workers).load(&subject.weights, &plan).unwrap();
        assert_eq!(hash(&model), subject.hash(), "{workers} workers");
    }
}

/// A tensor of more bytes than two staging buffers, and three: its pieces lie where they belong.
#[test]
fn case_13_a_large_tensor_arrives_in_pieces() {
    let subject = Subject::plain(&blocks(&[(32 << 20) + 3, 1_000_003]), 14);
    let machine = described(&["cpu=128mb", "disk=64mb", "cuda:0=64mb", "xpu:0=64mb"]);
    for allocation in ["cuda:0,*", "xpu:0,*", "disk,*", "cpu,*"] {
        let registry = Registry::described(machine.clone(), Clock::Wall);
        let plan = subject.planner(&machine, allocation).depth(0).plan().unwrap();
        let model = Loader::new(&registry).workers(2).load(&subject.weights, &plan).unwrap();
        subject.check(&model);
    }
}

#[test]
fn case_23_a_load_takes_what_is_planned_and_gives_it_back() {
    let subject = Subject::patched(&mixed(4), 3);
    let largest_tensor = subject.layout().tensors().iter().map(|t| t.bytes).max().unwrap();
    let largest_module = subject.layout().modules().iter().map(|m| m.bytes).max().unwrap();
    for (name, plan) in placements(&subject, &machine()) {
        for workers in [1, 4] {
            let watched = Watched::new(machine(), Clock::Virtual);
            open_all(&watched.registry);
            let loader = Loader::new(&watched.registry).workers(workers);
            let model = loader.load(&subject.weights, &plan).unwrap();
            assert_eq!(model.bytes(), levels(&watched.registry).into_iter().filter(|l| l.1 > 0).collect(), "{name}");
            for id in machine().ids() {
                let planned = plan.device(id).map_or(0, |share| share.weights.bytes + share.beside.slots);
                let staging = (workers as u64 + 1) * largest_tensor + workers as u64 * largest_module;
                let most = planned + if id == CPU { staging } else { 0 };
                assert!(watched.peak(id) <= most, "{name}: {id} had {} of {most} taken", watched.peak(id));
            }
            drop(model);
            comes_back(&watched.registry);
        }
    }
}

/// Weights that grow, over a link so slow that the copies of all of them could be under way at once.
#[test]
fn case_23_staging_of_patched_weights_does_not_pile_up() {
    let rows: Vec<u64> = (1..=12).map(|n| 16 * n).collect();
    let weight =
        |(layer, rows): (usize, &u64)| spec(format!("model.layers.{layer}.up.weight"), DType::F32, &[*rows, 64]);
    let subject = Subject::patched(&rows.iter().enumerate().map(weight).collect::<Vec<_>>(), 4);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.01"]);
    let plan = subject.planner(&machine, "cuda:0,*").plan().unwrap();
    let watched = Watched::new(machine, Clock::Wall);
    let model = Loader::new(&watched.registry).workers(1).load(&subject.weights, &plan).unwrap();
    let largest = 12 * 16 * 64 * 4;
    assert!(watched.peak(CPU) <= largest, "{} bytes of staging for weights of {largest} at most", watched.peak(CPU));
    subject.check(&model);
}

#[test]
fn untouched_tensors_never_pass_the_compute_device() {
    let subject = Subject::patched(&mixed(4), 5);
    for (name, plan) in placements(&subject, &machine()) {
        let watched = Watched::new(machine(), Clock::Virtual);
        let model = Loader::new(&watched.registry).load(&subject.weights, &plan).unwrap();
        let mut arrived: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for copied in watched.copies.take() {
            assert_eq!(copied.from, CPU, "{name}: bytes came back from a device");
            *arrived.entry(copied.to).or_default() += copied.bytes;
        }
        let away = plan.devices().iter().filter(|share| share.id != CPU && share.weights.bytes > 0);
        assert_eq!(arrived, away.map(|share| (share.id, share.weights.bytes)).collect(), "{name}");
        drop(model);
    }
}

#[test]
fn a_device_that_gets_nothing_is_not_opened() {
    let subject = Subject::plain(&llama(2, 32), 6);
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = subject.planner(&machine(), "cuda:0,100%;cuda:1,0%;cpu,0%").plan().unwrap();
    let _model = Loader::new(&registry).load(&subject.weights, &plan).unwrap();
    assert_eq!(registry.opened().iter().map(|d| d.id()).collect::<Vec<_>>(), [GPU0]);
}

#[test]
fn progress_counts_every_byte_once() {
    let subject = Subject::patched(&mixed(3), 7);
    let plan = subject.planner(&machine(), SPLIT).plan().unwrap();
    let registry = Registry::described(machine(), Clock::Virtual);
    let (seen, most) = (Mutex::new(HashSet::new()), AtomicU64::new(0));
    let progress = |done: u64, of: u64| {
        assert_eq!(of, plan.bytes());
        assert!(done <= of && seen.lock().unwrap().insert(done), "{done} of {of} twice");
        most.fetch_max(done, Ordering::Relaxed);
    };
    Loader::new(&registry).workers(4).progress(&progress).load(&subject.weights, &plan).unwrap();
    assert_eq!(most.into_inner(), plan.bytes());
    let seen = Mutex::new(Vec::new());
    let progress = |done: u64, _: u64| seen.lock().unwrap().push(done);
    Loader::new(&registry).workers(1).progress(&progress).load(&subject.weights, &plan).unwrap();
    assert!(seen.into_inner().unwrap().is_sorted(), "one worker goes forward");
}

#[test]
fn a_cancelled_load_gives_everything_back() {
    let subject = Subject::patched(&mixed(3), 8);
    // So slow that copies are under way when the load stops.
    let slow = described(&[
        "cpu=64mb",
        "disk=64mb,link=0.002",
        "cuda:0=24mb,link=0.002",
        "cuda:1=24mb,link=0.002",
        "xpu:0=24mb",
    ]);
    let plan = subject.planner(&slow, SPLIT).plan().unwrap();
    let total = plan.bytes();
    // Before the first byte, after some, and with the very last one.
    for (at, workers) in [(0, 1), (1, 1), (1, 4), (total / 2, 1), (total / 2, 4), (total, 1), (total, 4)] {
        let watched = Watched::new(slow.clone(), Clock::Wall);
        let cancel = Cancel::new();
        let progress = |done: u64, _: u64| {
            if done >= at {
                cancel.cancel();
            }
        };
        if at == 0 {
            cancel.cancel();
        }
        let loader = Loader::new(&watched.registry).workers(workers).progress(&progress).cancel(&cancel);
        match loader.load(&subject.weights, &plan) {
            Err(Error::Cancelled { done, of }) => {
                assert_eq!(of.get(), total);
                // Nothing was read before it began; else what the cancelling call was told of counts.
                let (least, most) = if at == 0 { (0, 0) } else { (at, total) };
                assert!((least..=most).contains(&done.get()), "cancelled at {at} of {total}, not {done}");
            }
            other => panic!("cancelled at {at}: {other:?}"),
        }
        assert!(levels(&watched.registry).iter().all(|level| level.1 == 0), "{:?}", levels(&watched.registry));
    }
}

/// The first tensor of a module is on its way when the load stops before the second.
#[test]
fn a_load_that_fails_returns_when_its_copies_have_landed() {
    let subject = Subject::plain(&[spec("a.weight", DType::U8, &[40_000]), spec("a.bias", DType::U8, &[10])], 15);
    let machine = described(&["cpu=64mb", "cuda:0=24mb,link=0.002"]);
    let plan = subject.planner(&machine, "cuda:0,*").plan().unwrap();
    let (watched, cancel) = (Watched::new(machine, Clock::Wall), Cancel::new());
    let progress = |_: u64, _: u64| cancel.cancel();
    let loader = Loader::new(&watched.registry).progress(&progress).cancel(&cancel);
    let error = loader.load(&subject.weights, &plan).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!((watched.copies.take().len(), levels(&watched.registry)), (1, vec![(CPU, 0), (GPU0, 0)]));
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let (subject, other) = (Subject::plain(&llama(2, 32), 9), Subject::plain(&llama(3, 32), 9));
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = other.planner(&machine(), "cpu,*").plan().unwrap();
    let error = Loader::new(&registry).load(&subject.weights, &plan).unwrap_err();
    assert!(error.to_string().contains("the plan is of another model"), "{error}");
    assert!(registry.opened().is_empty(), "refused before a device is opened");
}

#[test]
fn a_file_that_changes_after_opening_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors = mixed(2);
    let bytes = safetensors(&tensors, 10);
    for (what, length) in [("truncated", bytes.len() as u64 / 2), ("longer", bytes.len() as u64 + 1)] {
        fs::write(&path, &bytes).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let weights = Weights::patched(checkpoint.clone(), two_loras(&tensors, 10), Default::default()).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        for workers in [1, 4] {
            let watched = Watched::new(machine(), Clock::Wall);
            let plan = tensor_offload::Planner::new(weights.layout(), watched.machine())
                .compute(GPU0)
                .allocation(SPLIT.parse().unwrap())
                .plan()
                .unwrap();
            let error = Loader::new(&watched.registry).workers(workers).load(&weights, &plan).unwrap_err();
            let changed = matches!(&error, Error::File { fault, .. } if **fault == FileFault::Changed);
            assert!(changed, "{what}: {error}");
            assert!(levels(&watched.registry).iter().all(|level| level.1 == 0), "{:?}", levels(&watched.registry));
        }
    }
}

#[test]
fn a_reservation_takes_all_or_nothing() {
    let subject = Subject::plain(&llama(3, 64), 11);
    let plan = subject.planner(&machine(), "cuda:0,100kb;cuda:1,100kb;xpu:0,*").plan().unwrap();
    let registry = Registry::described(machine(), Clock::Virtual);
    let last = registry.device(xpu()).unwrap();
    let taken = last.alloc(last.ledger().limit() as usize - 1000, MemoryKind::Arena).unwrap();
    let error = Reservation::take(&registry, &plan).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { device, available: 1000, .. } if device == xpu()), "{error}");
    assert_eq!(levels(&registry).into_iter().filter(|l| l.1 > 0).map(|l| l.0).collect::<Vec<_>>(), [xpu()]);
    drop(taken);
    let reservation = Reservation::take(&registry, &plan).unwrap();
    for share in plan.devices() {
        assert_eq!(reservation.left(share.id), share.weights.bytes + share.beside.slots);
    }
    drop(reservation);
    comes_back(&registry);
}

#[test]
fn a_device_that_is_full_now_is_told_before_a_byte_is_read() {
    let subject = Subject::patched(&llama(3, 64), 12);
    let plan = subject.planner(&machine(), SPLIT).plan().unwrap();
    for full in plan.devices().iter().filter(|share| share.weights.bytes > 0).map(|share| share.id) {
        let watched = Watched::new(machine(), Clock::Virtual);
        let device = watched.registry.device(full).unwrap();
        let taken = device.alloc(device.ledger().limit() as usize - 5000, MemoryKind::Arena).unwrap();
        let progress = |_: u64, _: u64| panic!("a byte was read");
        let loader = Loader::new(&watched.registry).progress(&progress);
        let error = loader.load(&subject.weights, &plan).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { device, available: 5000, .. } if device == full), "{error}");
        assert!(watched.copies.take().is_empty());
        drop(taken);
        comes_back(&watched.registry);
        Loader::new(&watched.registry).load(&subject.weights, &plan).unwrap();
    }
}

/// A file whose large reads wait until another thread makes one too.
#[derive(Debug)]
struct InCompany {
    inner: FileSource,
    threads: Mutex<HashSet<ThreadId>>,
    arrived: Condvar,
}

impl Source for InCompany {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn stamp(&self) -> Stamp {
        self.inner.stamp()
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> tensor_offload::Result<()> {
        if dst.len() > 1 << 20 {
            let mut threads = self.threads.lock().unwrap();
            threads.insert(std::thread::current().id());
            self.arrived.notify_all();
            let alone = |threads: &mut HashSet<ThreadId>| threads.len() < 2;
            let (_threads, waited) = self.arrived.wait_timeout_while(threads, DEADLINE, alone).unwrap();
            assert!(!waited.timed_out(), "one thread reads the large tensor alone");
        }
        self.inner.read_at(at, dst)
    }
}

/// One large tensor is read by the workers together, whether it stays on the host or goes to a device.
#[test]
fn a_large_tensor_is_read_by_several_workers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors = [spec("embed.weight", DType::U8, &[40 << 20]), spec("norm.weight", DType::U8, &[256])];
    let write = |_: usize, out: &mut tensor_offload::checkpoint::TensorWriter<'_>| {
        while out.left() > 0 {
            let from = out.left();
            let part: Vec<u8> = (0..from.min(1 << 20)).map(|at| (from + at) as u8 ^ (from >> 20) as u8).collect();
            out.put(&part)?;
        }
        Ok(())
    };
    write_safetensors(&path, &tensors, &Default::default(), write).unwrap();
    let machine = described(&["cpu=128mb", "cuda:0=64mb"]);
    for allocation in ["cpu,*", "cuda:0,*"] {
        let open = |path: &Path| {
            let (inner, threads, arrived) = (FileSource::open(path)?, Mutex::default(), Condvar::new());
            Ok(Arc::new(InCompany { inner, threads, arrived }) as Arc<dyn Source>)
        };
        let weights = Weights::new(Checkpoint::open_with(&path, open).unwrap());
        let registry = Registry::described(machine.clone(), Clock::Virtual);
        let planner = tensor_offload::Planner::new(weights.layout(), &machine).compute(GPU0);
        let plan = planner.allocation(allocation.parse().unwrap()).plan().unwrap();
        let model = Loader::new(&registry).workers(3).load(&weights, &plan).unwrap();
        for tensor in ["embed.weight", "norm.weight"] {
            let id = weights.checkpoint().find(tensor).unwrap();
            let mut expected = vec![0; weights.layout().tensor(id).unwrap().bytes as usize];
            Weights::new(Checkpoint::open(&path).unwrap()).checkpoint().read(id, &mut expected).unwrap();
            assert!(read(&model, tensor).unwrap() == expected, "{allocation}, {tensor}");
        }
    }
}

/// Snapshots while other threads reserve and allocate: what is counted is counted at one moment.
#[test]
fn memory_can_be_looked_at_while_others_take_it() {
    let registry = Registry::described(machine(), Clock::Virtual);
    let device = registry.device(GPU0).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..300_000 {
                drop(device.ledger().charge(1000).unwrap());
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let memory = device.memory().unwrap();
            assert!(memory.reserved <= memory.charged, "{memory:?}");
        }
    });
}

/// Load, read, stream, unload. An error is passed on; a wrong byte is a panic.
fn whole_life(registry: &Registry, subject: &Subject, plan: &Plan) -> tensor_offload::Result<()> {
    let cache = ModelCache::new();
    let model = Loader::new(registry).workers(2).deadline(DEADLINE).load(&subject.weights, plan)?;
    let model = std::sync::Arc::new(model);
    cache.insert("model", std::sync::Arc::clone(&model), Retention::Unload);
    let name = "model.layers.1.mlp.up_proj.weight";
    assert!(read(&model, name)? == subject.bytes_of(name), "wrong bytes where they live");
    let mut streamer = Streamer::new(&model)?;
    let mut failed = None;
    // One operation fails at most, so that of two passes in a row one is right.
    for pass in 0..3 {
        match check_pass(&mut streamer, subject) {
            Ok(()) => {}
            Err(error) if failed.is_none() => failed = Some(error),
            Err(error) => panic!("pass {pass} fails although another operation failed before: {error}"),
        }
    }
    drop((streamer, model));
    assert_eq!(cache.full_cleanup(registry)?.unload.unloaded.len(), 1);
    failed.map_or(Ok(()), Err)
}

fn faulty(clock: Clock, countdown: &Countdown) -> Registry {
    Registry::new([std::sync::Arc::new(Faulty::new(Simulated::new(machine(), clock), countdown.clone())) as _])
}

#[test]
fn whatever_operation_fails_nothing_is_wrong_or_kept() {
    let subject = std::sync::Arc::new(Subject::patched(&llama(3, 32), 13));
    let plan =
        subject.planner(&machine(), "cuda:0,8kb;cuda:1,16kb;xpu:0,24kb;disk,16kb;cpu,*").depth(1).plan().unwrap();
    assert!(plan.devices().iter().all(|share| share.weights.bytes > 0), "{plan}");
    for clock in [Clock::Virtual, Clock::Wall] {
        let countdown = Countdown::new();
        whole_life(&faulty(clock, &countdown), &subject, &plan).unwrap();
        let calls = countdown.calls();
        assert!(calls > 100 && countdown.calls_of(Operation::Copy) > 30, "{calls}");
        for n in 1..=calls {
            let (subject, plan) = (std::sync::Arc::clone(&subject), plan.clone());
            without_hanging(format!("operation {n} of {calls} on the {clock:?} clock failing"), move || {
                let countdown = Countdown::new();
                let registry = faulty(clock, &countdown);
                countdown.fail_nth(n);
                if let Err(error) = whole_life(&registry, &subject, &plan) {
                    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
                }
                comes_back(&registry);
            });
        }
    }
}
