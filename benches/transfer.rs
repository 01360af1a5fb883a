//! Copies from the host to each device and back, between devices, and both ways at once, from 64 KiB to 1 GiB, beside
//! the driver's own copies of that size in the same run.
//!
//! Each measured turn queues copies as streaming does, each with buffers of its own, up to four at a time, and waits
//! for the last; the driver's are queued and waited for in the same numbers. `staged` goes from ordinary host memory
//! through pinned buffers, which all cores fill and empty. How near measured links come to described ones is told, too. Without a card the host's memory and simulated devices are measured, up to 16 MiB.

#[cfg(feature = "cuda")]
#[path = "support/raw.rs"]
mod raw;

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use rayon::prelude::*;
use tensor_offload::backend::{
    Backend, Buf, BufMut, Clock, Device, Host, MemoryKind, Piece, Role, Route, Stream, Transfer,
};
use tensor_offload::device::Link;
use tensor_offload::device::{Bandwidth, DeviceInfo, DeviceKind, Topology};
use tensor_offload::registry::{LinkTiming, measure_links};
use tensor_offload::{ByteSize, DeviceId, Machine, Registry, Result};

const SIZES: [usize; 5] = [64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30];

/// How many copies are under way at once; fewer of the largest.
const DEPTH: usize = 4;

/// The most bytes of a staging buffer. Copies of less take it in four parts, so that one is filled while others are
/// under way, but in parts of a mebibyte at least.
const PART: usize = 16 << 20;

/// What one thread copies at a time: the caches hold it.
const GRAIN: usize = 1 << 20;

const DEADLINE: Duration = Duration::from_secs(120);

/// Whether this is a measurement and not a test run.
fn measuring() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// The sizes of which `left` bytes hold what copies of them take.
fn sizes(most: usize, left: u64) -> Vec<usize> {
    let most = if measuring() { most } else { SIZES[0] };
    let fits = |size: usize| size <= most && (size * depth(size) * 2) as u64 <= left / 2;
    let (fit, large): (Vec<usize>, Vec<usize>) = SIZES.iter().partition(|&&size| fits(size));
    if let Some(first) = large.first().filter(|_| measuring()) {
        println!("left out: {} MiB and more: over what memory or time there is", first >> 20);
    }
    fit
}

fn depth(size: usize) -> usize {
    if size > 256 << 20 { 1 } else { DEPTH }
}

/// Queues of copies that are made over and over: for each stream, the ends of its copies.
struct Lane {
    stream: Arc<dyn Stream>,
    ends: Vec<(Buf, Option<BufMut>)>,
}

impl Lane {
    fn new(
        stream: &Arc<dyn Stream>,
        from: (&dyn Device, MemoryKind),
        to: (&dyn Device, MemoryKind),
        size: usize,
    ) -> Result<Lane> {
        let mut ends = Vec::new();
        for _ in 0..depth(size) {
            let (mut src, mut dst) = (from.0.alloc(size, from.1)?, to.0.alloc(size, to.1)?);
            for end in [&mut src, &mut dst] {
                end.wait_unused(DEADLINE)?;
                if let Some(bytes) = end.host_mut() {
                    bytes.fill(1);
                }
            }
            ends.push((src.freeze(), Some(dst)));
        }
        Ok(Lane { stream: Arc::clone(stream), ends })
    }
}

/// Makes `count` copies on each lane.
fn copies(lanes: &mut [Lane], count: u64) -> Result<()> {
    let depth = lanes.iter().map(|lane| lane.ends.len()).min().unwrap_or(1);
    let mut left = count;
    while left > 0 {
        let turn = left.min(depth as u64);
        let mut last = Vec::new();
        for place in 0..turn as usize {
            last.clear();
            for Lane { stream, ends } in lanes.iter_mut() {
                let (src, dst) = &mut ends[place];
                let Some(to) = dst.take() else { continue };
                let flight = stream.copy(Transfer::whole(src, to)?)?;
                last.push(flight.done().clone());
                *dst = Some(flight.chain());
            }
        }
        for event in last {
            // As the driver's own wait does; the library's sleeps now and then.
            while !event.is_complete() {
                std::thread::yield_now();
            }
            event.wait(Duration::ZERO)?;
        }
        left -= turn;
    }
    Ok(())
}

/// What goes through pinned buffers: the card's stream, ordinary memory, and memory of the card.
struct Staged {
    stream: Arc<dyn Stream>,
    ring: Vec<Option<BufMut>>,
    part: usize,
    host: Option<BufMut>,
    card: Option<BufMut>,
}

impl Staged {
    fn new(stream: &Arc<dyn Stream>, host: &dyn Device, card: &dyn Device, size: usize) -> Result<Staged> {
        let part = (size / DEPTH).clamp(GRAIN, PART).min(size);
        let buffer = || host.alloc(part, MemoryKind::Pinned).map(Some);
        let mut memory = host.alloc(size, MemoryKind::Arena)?;
        memory.host_mut().into_iter().for_each(|bytes| bytes.fill(1));
        let card = card.alloc(size, MemoryKind::Arena)?;
        let ring = (0..DEPTH).map(|_| buffer()).collect::<Result<_>>()?;
        Ok(Staged { stream: Arc::clone(stream), ring, part, host: Some(memory), card: Some(card) })
    }

    fn up(&mut self) -> Result<()> {
        let (Some(host), Some(mut to)) = (self.host.as_mut(), self.card.take()) else { return Ok(()) };
        let bytes = host.host_mut().expect("the host's own memory");
        for (part, bytes) in bytes.chunks(self.part).enumerate() {
            let place = part % DEPTH;
            let mut buffer = self.ring[place].take().expect("given back below");
            buffer.wait_unused(DEADLINE)?;
            copy(bytes, &mut buffer.host_mut().expect("settled")[..bytes.len()]);
            let buffer = buffer.freeze();
            let piece = Piece { src: buffer.clone(), from: 0..bytes.len(), at: part * self.part };
            to = self.stream.copy(Transfer::new(vec![piece], to)?)?.chain();
            self.ring[place] = buffer.try_reclaim().ok();
        }
        to.wait_unused(DEADLINE)?;
        self.card = Some(to);
        Ok(())
    }

    fn down(&mut self) -> Result<()> {
        let (Some(card), Some(host)) = (self.card.take(), self.host.as_mut()) else { return Ok(()) };
        let card = card.freeze();
        let bytes = host.host_mut().expect("the host's own memory");
        let mut under_way = std::collections::VecDeque::new();
        let mut parts = bytes.chunks_mut(self.part).enumerate();
        loop {
            while under_way.len() < DEPTH {
                let Some((part, to)) = parts.next() else { break };
                let buffer = self.ring[part % DEPTH].take().expect("given back below");
                let piece = Piece { src: card.clone(), from: part * self.part..part * self.part + to.len(), at: 0 };
                under_way.push_back((part, to, self.stream.copy(Transfer::new(vec![piece], buffer)?)?));
            }
            let Some((part, to, flight)) = under_way.pop_front() else { break };
            let mut buffer = flight.wait(DEADLINE)?;
            copy(&buffer.host_mut().expect("landed")[..to.len()], to);
            self.ring[part % DEPTH] = Some(buffer);
        }
        self.card = card.try_reclaim().ok();
        Ok(())
    }
}

/// Copies on all cores; what one takes at a time, on this one.
fn copy(src: &[u8], dst: &mut [u8]) {
    match dst.len() <= GRAIN {
        true => dst.copy_from_slice(src),
        false => dst.par_chunks_mut(GRAIN).zip(src.par_chunks(GRAIN)).for_each(|(dst, src)| dst.copy_from_slice(src)),
    }
}

/// One bench: `work` does so many copies.
fn bench(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, size: usize, mut work: impl FnMut(u64)) {
    group.bench_function(BenchmarkId::new(name, size), |b| {
        b.iter_custom(|iters| {
            let start = Instant::now();
            work(iters);
            start.elapsed()
        });
    });
}

/// What the benches of one pair of ends are about.
struct Ends<'a> {
    host: &'a dyn Device,
    card: &'a dyn Device,
    most: usize,
}

fn left_out(what: &str, why: impl std::fmt::Display) {
    println!("left out: {what}: {why}");
}

/// Host to device and back, in every way.
fn device(criterion: &mut Criterion, ends: &Ends<'_>, simulated: bool) -> Result<()> {
    let Ends { host, card, most } = ends;
    let label = if simulated { format!("{} (simulated, 2 GB/s)", card.id()) } else { card.id().to_string() };
    let (up, down) = (card.stream(Role::Upload)?, card.stream(Role::Download)?);
    let left = card.memory()?.available().min(host.memory()?.available());
    let arena = (*card, MemoryKind::Arena);
    let mut group = group(criterion, &label);
    for size in sizes(*most, left) {
        group.throughput(Throughput::BytesDecimal(size as u64));
        for (kind, memory) in [("pinned", MemoryKind::Pinned), ("pageable", MemoryKind::Arena)] {
            {
                let mut lane = [Lane::new(&up, (*host, memory), arena, size)?];
                bench(&mut group, &format!("host to device/{kind}"), size, |n| copies(&mut lane, n).expect("copies"));
            }
            let mut lane = [Lane::new(&down, arena, (*host, memory), size)?];
            bench(&mut group, &format!("device to host/{kind}"), size, |n| copies(&mut lane, n).expect("copies"));
        }
        let mut staged = Staged::new(&up, *host, *card, size)?;
        bench(&mut group, "host to device/staged", size, |n| (0..n).for_each(|_| staged.up().expect("copies")));
        let mut staged = Staged::new(&down, *host, *card, size)?;
        bench(&mut group, "device to host/staged", size, |n| (0..n).for_each(|_| staged.down().expect("copies")));
        group.throughput(Throughput::BytesDecimal(2 * size as u64));
        let pinned = (*host, MemoryKind::Pinned);
        let mut lanes = [Lane::new(&up, pinned, arena, size)?, Lane::new(&down, arena, pinned, size)?];
        bench(&mut group, "both ways/pinned", size, |n| copies(&mut lanes, n).expect("copies"));
        drop(lanes);
        #[cfg(feature = "cuda")]
        if !simulated {
            raw_device(&mut group, card.id(), size).unwrap_or_else(|error| left_out("the driver's own copies", error));
        }
    }
    group.finish();
    Ok(())
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(format!("transfer {name}"));
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(400));
    group
}

/// The driver's own copies between the host and a device.
#[cfg(feature = "cuda")]
fn raw_device(group: &mut BenchmarkGroup<'_, WallTime>, id: DeviceId, size: usize) -> Result<(), String> {
    use raw::{Card, Memory};
    let text = |error: cudarc::driver::result::DriverError| format!("{error:?}");
    let (up, down) = (Card::open(id.index()).map_err(text)?, Card::open(id.index()).map_err(text)?);
    let (there, back) = (up.memory(size).map_err(text)?, up.memory(size).map_err(text)?);
    let mut pinned = (up.pinned(size).map_err(text)?, up.pinned(size).map_err(text)?);
    group.throughput(Throughput::BytesDecimal(size as u64));
    for kind in ["pinned", "pageable"] {
        if kind == "pageable" {
            pinned = (Memory::pageable(size), Memory::pageable(size));
        }
        let host = &pinned.0;
        bench(group, &format!("host to device/{kind}, raw"), size, |n| run(&[(&up, host, &there)], size, n));
        bench(group, &format!("device to host/{kind}, raw"), size, |n| run(&[(&down, &there, host)], size, n));
        if kind == "pinned" {
            group.throughput(Throughput::BytesDecimal(2 * size as u64));
            let both = [(&up, host, &there), (&down, &back, &pinned.1)];
            bench(group, "both ways/pinned, raw", size, |n| run(&both, size, n));
            group.throughput(Throughput::BytesDecimal(size as u64));
        }
    }
    Ok(())
}

/// Queues and waits as [`copies`] does, with the driver's own calls.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "raw copies leave it to the caller that both ends live until they are over")]
fn run(lanes: &[(&raw::Card, &raw::Memory, &raw::Memory)], size: usize, count: u64) {
    let mut left = count;
    while left > 0 {
        let turn = left.min(depth(size) as u64);
        for _ in 0..turn {
            for (card, src, dst) in lanes {
                card.make_current();
                // SAFETY: the ends are borrowed until the waits below have returned, and used by nothing else.
                unsafe { card.copy(src, dst, size, 1) }.expect("the driver copies");
            }
        }
        lanes.iter().for_each(|(card, _, _)| card.wait().expect("the driver copies"));
        left -= turn;
    }
}

/// From each card's memory to each other one's.
fn peers(criterion: &mut Criterion, cards: &[Arc<dyn Device>]) -> Result<()> {
    for from in cards {
        for to in cards.iter().filter(|to| to.id() != from.id()) {
            let name = format!("{} to {}", from.id(), to.id());
            if let Route::Staged(why) = to.route_from(&**from) {
                left_out(&name, why);
                continue;
            }
            let up = to.stream(Role::Upload)?;
            let left = to.memory()?.available().min(from.memory()?.available());
            let mut group = group(criterion, &name);
            for size in sizes(SIZES[4], left) {
                group.throughput(Throughput::BytesDecimal(size as u64));
                let ends = ((&**from, MemoryKind::Arena), (&**to, MemoryKind::Arena));
                let mut lane = [Lane::new(&up, ends.0, ends.1, size)?];
                bench(&mut group, "peer", size, |n| copies(&mut lane, n).expect("copies"));
                drop(lane);
                #[cfg(feature = "cuda")]
                raw_peer(&mut group, from.id(), to.id(), size).unwrap_or_else(|error| left_out(&name, error));
            }
            group.finish();
            if from.id() < to.id() && from.route_from(&**to) == Route::Direct {
                peers_both_ways(criterion, &**from, &**to, left)?;
            }
        }
    }
    if cards.len() < 2 {
        left_out("device to device", format!("there is {} card", if cards.is_empty() { "no" } else { "one" }));
    }
    Ok(())
}

/// Between two cards that reach each other, as much the one way as the other at once.
fn peers_both_ways(criterion: &mut Criterion, a: &dyn Device, b: &dyn Device, left: u64) -> Result<()> {
    let name = format!("{} and {}", a.id(), b.id());
    let (into_a, into_b) = (a.stream(Role::Upload)?, b.stream(Role::Upload)?);
    let mut group = group(criterion, &name);
    for size in sizes(SIZES[4], left) {
        group.throughput(Throughput::BytesDecimal(2 * size as u64));
        let (at_a, at_b) = ((a, MemoryKind::Arena), (b, MemoryKind::Arena));
        let mut lanes = [Lane::new(&into_b, at_a, at_b, size)?, Lane::new(&into_a, at_b, at_a, size)?];
        bench(&mut group, "peer, both ways", size, |n| copies(&mut lanes, n).expect("copies"));
        drop(lanes);
        #[cfg(feature = "cuda")]
        raw_peers_both_ways(&mut group, a.id(), b.id(), size).unwrap_or_else(|error| left_out(&name, error));
    }
    group.finish();
    Ok(())
}

#[cfg(feature = "cuda")]
fn raw_peers_both_ways(
    group: &mut BenchmarkGroup<'_, WallTime>,
    a: DeviceId,
    b: DeviceId,
    size: usize,
) -> Result<(), String> {
    let text = |error: cudarc::driver::result::DriverError| format!("{error:?}");
    let (a, b) = (raw::Card::open(a.index()).map_err(text)?, raw::Card::open(b.index()).map_err(text)?);
    let memory = |card: &raw::Card| card.memory(size).map_err(text);
    let (from_a, to_a, from_b, to_b) = (memory(&a)?, memory(&a)?, memory(&b)?, memory(&b)?);
    bench(group, "peer, both ways, raw", size, |n| run(&[(&b, &from_a, &to_b), (&a, &from_b, &to_a)], size, n));
    Ok(())
}

#[cfg(feature = "cuda")]
fn raw_peer(group: &mut BenchmarkGroup<'_, WallTime>, from: DeviceId, to: DeviceId, size: usize) -> Result<(), String> {
    let text = |error: cudarc::driver::result::DriverError| format!("{error:?}");
    let (there, here) = (raw::Card::open(from.index()).map_err(text)?, raw::Card::open(to.index()).map_err(text)?);
    let (src, dst) = (there.memory(size).map_err(text)?, here.memory(size).map_err(text)?);
    bench(group, "peer, raw", size, |n| run(&[(&here, &src, &dst)], size, n));
    Ok(())
}

/// The host's memory, by its own streams, beside a plain copy.
fn memory(criterion: &mut Criterion, host: &dyn Device, most: usize) -> Result<()> {
    let stream = host.stream(Role::Upload)?;
    let mut group = group(criterion, "cpu to cpu");
    for size in sizes(most, host.memory()?.available()) {
        group.throughput(Throughput::BytesDecimal(size as u64));
        let arena = (host, MemoryKind::Arena);
        let mut lane = [Lane::new(&stream, arena, arena, size)?];
        bench(&mut group, "pageable", size, |n| copies(&mut lane, n).expect("copies"));
        let (src, mut dst) = (vec![1u8; size], vec![0u8; size]);
        bench(&mut group, "memcpy, raw", size, |n| {
            (0..n).for_each(|_| std::hint::black_box(&mut dst).copy_from_slice(std::hint::black_box(&src)));
        });
    }
    group.finish();
    Ok(())
}

fn transfer(criterion: &mut Criterion) {
    let registry = Registry::system();
    for (kind, why) in registry.absent() {
        left_out(&kind.to_string(), why);
    }
    let mut cards = Vec::new();
    // Opened before the host, whose memory is pinned for the devices that are open.
    for id in registry.machine().ids().filter(|id| !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk)) {
        match registry.device(id) {
            Ok(card) => cards.push(card),
            Err(error) => left_out(&id.to_string(), error),
        }
    }
    let host = registry.device(DeviceId::CPU).expect("a host");
    let most = if cards.is_empty() { SIZES[2] } else { SIZES[4] };
    memory(criterion, &*host, most).unwrap_or_else(|error| left_out("cpu to cpu", error));
    if cards.is_empty() {
        simulated(criterion).unwrap_or_else(|error| left_out("the simulated device", error));
    }
    for card in &cards {
        let ends = Ends { host: &*host, card: &**card, most };
        device(criterion, &ends, false).unwrap_or_else(|error| left_out(&card.id().to_string(), error));
    }
    peers(criterion, &cards).unwrap_or_else(|error| left_out("device to device", error));
}

/// A described card of 1 GiB on a link of 2 GB/s.
fn simulated(criterion: &mut Criterion) -> Result<()> {
    let id = DeviceId::cuda(0);
    let topology = Topology::new().link(id, Bandwidth::bytes_per_second(2_000_000_000));
    let registry = Registry::described(Machine::new([DeviceInfo::new(id, 1 << 30)], topology), Clock::Wall);
    let (host, card) = (Host::new().open(DeviceId::CPU)?, registry.device(id)?);
    device(criterion, &Ends { host: &*host, card: &*card, most: SIZES[2] }, true)
}

/// What measuring a described card's links gives in real time, and how near that is to what was described; beside it the
/// time that the copies take by what the links are, which no measurement can be under.
fn accuracy(criterion: &mut Criterion) {
    let (id, up, down) = (DeviceId::cuda(0), 2_000_000_000, 1_000_000_000);
    let speed = Bandwidth::bytes_per_second;
    let topology = Topology::new().directed_link(id, speed(down), speed(up));
    let registry = Registry::described(Machine::new([DeviceInfo::new(id, 1 << 30)], topology), Clock::Wall);
    let timing = LinkTiming::quick().bytes(ByteSize(if measuring() { 16 << 20 } else { 64 << 10 }));
    let measure = || measure_links(&registry, &timing).expect("figures");
    let matrix = measure();
    let described = |link: &Link| if link.to == id { up } else { down };
    for link in &matrix.links {
        let ratio = link.bandwidth.get() as f64 / described(link) as f64;
        println!(
            "{} to {}, {}: {} GB/s, {ratio:.3} of what was described",
            link.from, link.to, link.kind, link.bandwidth
        );
    }
    let timed = |link: &Link| f64::from(link.median_of) * link.bytes as f64 / described(link) as f64;
    let floor = Duration::from_secs_f64(matrix.links.iter().map(timed).sum());
    let mut group = criterion.benchmark_group("links of a described card");
    group.sample_size(10).measurement_time(Duration::from_secs(2));
    group.bench_function("measured", |b| b.iter(measure));
    group.bench_function("floor: the copies that are timed", |b| b.iter(|| std::thread::sleep(floor)));
    group.finish();
}

criterion_group!(benches, transfer, accuracy);
criterion_main!(benches);
