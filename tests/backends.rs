//! The conformance suite over every backend there is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensor_offload::backend::{
    Backend, Buf, Clock, Countdown, Device, Extent, Extents, Faulty, Host, MemoryKind, Operation, Piece, Readable,
    Role, Route, Simulated, Transfer, conformance,
};
use tensor_offload::device::{Bandwidth, Topology};
use tensor_offload::transfer::ReadPart;
use tensor_offload::{DeviceId, ErrorKind, Machine};

/// How long a test waits for anything.
const DEADLINE: Duration = Duration::from_secs(20);

fn machine() -> Machine {
    let described =
        ["cpu=64mb,link=20", "disk=64mb", "cuda:0=16mb,link=10", "cuda:1=16mb,link=10", "xpu:0=1mb,free=900kb"];
    Machine::described(&described.map(|text| text.parse().unwrap()))
}

#[test]
fn the_host_conforms() {
    let host = Host::new();
    let (cpu, disk) = (host.open(DeviceId::CPU).unwrap(), host.open(DeviceId::DISK).unwrap());
    conformance::check(&*cpu, &*cpu);
    conformance::check(&*disk, &*cpu);
}

#[test]
fn simulated_devices_conform_on_both_clocks() {
    for clock in [Clock::Virtual, Clock::Wall] {
        let simulated = Simulated::new(machine(), clock);
        let cpu = simulated.open(DeviceId::CPU).unwrap();
        for info in machine().devices() {
            conformance::check(&*simulated.open(info.id).unwrap(), &*cpu);
        }
    }
}

#[test]
fn a_wrapper_that_fails_nothing_conforms() {
    let faulty = Faulty::new(Simulated::new(machine(), Clock::Wall), Countdown::new());
    let cpu = faulty.open(DeviceId::CPU).unwrap();
    conformance::check(&*faulty.open(DeviceId::cuda(0)).unwrap(), &*cpu);
}

/// Uploads through two devices and reads back; whatever fails, nothing may stay taken.
fn round_trip(backend: &dyn Backend, opened: &mut Vec<Arc<dyn Device>>) -> tensor_offload::Result<()> {
    for id in [DeviceId::CPU, DeviceId::cuda(0)] {
        opened.push(backend.open(id)?);
    }
    let (cpu, card) = (&opened[0], &opened[1]);
    let source = cpu.alloc(1000, MemoryKind::Pinned)?.freeze();
    let (up, compute) = (card.stream(Role::Upload)?, card.stream(Role::Compute)?);
    let on_card =
        up.copy(Transfer::whole(&source, card.alloc(1000, MemoryKind::Arena)?)?)?.order(&*compute, DEADLINE)?;
    compute.record(std::slice::from_ref(&on_card))?;
    let down = card.stream(Role::Download)?;
    down.copy(Transfer::whole(&on_card, cpu.alloc(1000, MemoryKind::Pinned)?)?)?.wait(DEADLINE)?;
    card.trim()?;
    card.memory()?;
    Ok(())
}

#[test]
fn every_failing_operation_gives_everything_back() {
    let calls = {
        let countdown = Countdown::new();
        round_trip(&Faulty::new(Simulated::new(machine(), Clock::Wall), countdown.clone()), &mut Vec::new()).unwrap();
        assert_eq!(countdown.calls_of(Operation::Copy), 2);
        countdown.calls()
    };
    assert!(calls >= 12, "{calls}");
    for n in 1..=calls {
        let countdown = Countdown::new();
        countdown.fail_nth(n);
        let mut opened = Vec::new();
        let error =
            round_trip(&Faulty::new(Simulated::new(machine(), Clock::Wall), countdown), &mut opened).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "operation {n}: {error}");
        for device in opened {
            let until = Instant::now() + DEADLINE;
            while device.ledger().charged() > 0 {
                assert!(Instant::now() < until, "operation {n}: {} keeps memory", device.id());
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn virtual_time_is_that_of_the_links() {
    let link = |gbps: u64| Bandwidth::bytes_per_second(gbps * 1_000_000_000);
    let card = DeviceId::cuda(0);
    let topology = Topology::new().link(DeviceId::CPU, link(20)).link(card, link(10));
    let simulated = Simulated::new(machine().with_topology(topology), Clock::Virtual);
    let (cpu, card) = (simulated.open(DeviceId::CPU).unwrap(), simulated.open(card).unwrap());
    let source = cpu.alloc(5_000_000, MemoryKind::Pinned).unwrap().freeze();
    let (up, compute) = (card.stream(Role::Upload).unwrap(), card.stream(Role::Compute).unwrap());
    for _ in 0..4 {
        // Each copy takes 0.5 ms, each layer's compute 1 ms; the first copy alone is not hidden.
        let slot = card.alloc(source.bytes(), MemoryKind::Arena).unwrap();
        up.copy(Transfer::whole(&source, slot).unwrap()).unwrap().order(&*compute, DEADLINE).unwrap();
        compute.occupy(Duration::from_millis(1)).unwrap();
    }
    compute.record(&[]).unwrap().wait(Duration::ZERO).unwrap();
    assert_eq!(simulated.now(), Duration::from_micros(4500));
}

#[test]
fn wall_time_is_at_least_that_of_the_links() {
    let simulated = Simulated::new(machine(), Clock::Wall);
    let (cpu, card) = (simulated.open(DeviceId::CPU).unwrap(), simulated.open(DeviceId::cuda(0)).unwrap());
    let source = cpu.alloc(10_000_000, MemoryKind::Pinned).unwrap().freeze();
    let stream = card.stream(Role::Upload).unwrap();
    let slot = card.alloc(source.bytes(), MemoryKind::Arena).unwrap();
    let start = Instant::now();
    stream.copy(Transfer::whole(&source, slot).unwrap()).unwrap().wait(DEADLINE).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(1), "10 MB at 10 GB/s took {:?}", start.elapsed());
}

#[test]
fn devices_of_different_kinds_need_the_host_between_them() {
    let simulated = Simulated::new(machine(), Clock::Virtual);
    let open = |id: &str| simulated.open(id.parse().unwrap()).unwrap();
    assert_eq!(open("cuda:0").route_from(&*open("cuda:1")), Route::Direct);
    assert_eq!(open("cuda:0").route_from(&*open("cpu")), Route::Direct);
    assert!(matches!(open("cuda:0").route_from(&*open("xpu:0")), Route::Staged(_)));
}

/// Parts of one allocation are copied to each other, in one stream and crosswise in two: nobody waits for oneself.
#[test]
fn copies_between_parts_of_allocations_end() {
    for device in [
        Host::new().open(DeviceId::CPU).unwrap(),
        Host::new().open(DeviceId::DISK).unwrap(),
        Simulated::new(machine(), Clock::Wall).open(DeviceId::cuda(0)).unwrap(),
        Simulated::new(machine(), Clock::Virtual).open(DeviceId::cuda(0)).unwrap(),
    ] {
        let streams = [Role::Upload, Role::Download].map(|role| device.stream(role).unwrap());
        let cut = || {
            let mut first = device.alloc(2 << 20, MemoryKind::Arena).unwrap();
            let second = first.split_off(1 << 20).unwrap();
            (first.freeze(), second)
        };
        let ((a, mut a_end), (b, mut b_end)) = (cut(), cut());
        let flight = streams[0].copy(Transfer::whole(&a, a_end).unwrap()).unwrap();
        a_end = flight.wait(DEADLINE).expect("one part to another of one allocation");
        for _ in 0..20 {
            let pieces = |src: &Buf| {
                let piece = |i: usize| Piece { src: src.clone(), from: i << 14..(i + 1) << 14, at: i << 14 };
                (0..64).map(piece).collect::<Vec<_>>()
            };
            // Both begin at one time, and each reads what the other's allocation has beside what it writes.
            streams.iter().for_each(|stream| stream.occupy(Duration::from_millis(1)).unwrap());
            let one = streams[0].copy(Transfer::new(pieces(&a), b_end).unwrap()).unwrap();
            let other = streams[1].copy(Transfer::new(pieces(&b), a_end).unwrap()).unwrap();
            b_end = one.wait(DEADLINE).expect("crosswise");
            a_end = other.wait(DEADLINE).expect("crosswise");
        }
    }
}

/// Bytes that count up from their offset.
struct Counting;

impl Readable for Counting {
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> tensor_offload::Result<()> {
        for part in parts {
            part.dst.iter_mut().zip(part.at..).for_each(|(byte, at)| *byte = at as u8);
        }
        Ok(())
    }
}

fn extent(at: u64, bytes: usize) -> Extent {
    Extent { of: Arc::new(Counting), at, bytes }
}

/// Memory that is only read takes nothing of the device, is copied from like any other, and is never written, not even by its last
/// owner.
#[test]
fn memory_that_is_only_read_is_never_written() {
    let host = Host::new();
    let (cpu, disk) = (host.open(DeviceId::CPU).unwrap(), host.open(DeviceId::DISK).unwrap());
    let stream = cpu.stream(Role::Upload).unwrap();
    for device in [&cpu, &disk] {
        let memory = device.read_only(Extents::new(vec![extent(5, 3), extent(100, 2)])).unwrap().unwrap();
        assert_eq!((memory.bytes(), memory.device(), device.ledger().charged()), (5, device.id(), 0));
        assert!(memory.host(Duration::ZERO).unwrap().is_none());
        let copy = |from: &Buf| Transfer::whole(from, cpu.alloc(5, MemoryKind::Arena).unwrap()).unwrap();
        let mut copied = stream.copy(copy(&memory)).unwrap().wait(DEADLINE).unwrap();
        assert_eq!(copied.host_mut().unwrap(), [5, 6, 7, 100, 101]);
        let mut reclaimed = memory.try_reclaim().unwrap();
        assert!(reclaimed.host_mut().is_none() && reclaimed.write_with(|_| ()).unwrap().is_none());
        let rejected = stream.copy(Transfer::whole(&copied.freeze(), reclaimed).unwrap()).unwrap_err();
        assert_eq!(rejected.error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn extents_that_nobody_can_count_are_refused() {
    let disk = Host::new().open(DeviceId::DISK).unwrap();
    for list in [vec![extent(0, usize::MAX), extent(0, 2)], vec![extent(0, usize::MAX)], vec![extent(u64::MAX, 1)]] {
        assert_eq!(disk.read_only(Extents::new(list)).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
