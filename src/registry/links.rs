//! The links of a machine, measured with the library's own streams.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Registry;
use super::pattern;
use super::relay::Relay;
use super::timing::{Lane, LinkTiming, Watch, median, speed};
use crate::backend::{Buf, BufMut, Device, Health, MemoryKind, Role, Route, Stream, Transfer};
use crate::device::{DeviceId, DeviceKind, LeftOut, Link, LinkKind, LinkMatrix, Topology};
use crate::error::{Error, Result};

/// Measures the speed of copies from the host to each accelerator and back, and from each accelerator to every other one.
/// Opens every accelerator.
///
/// The result for each route is the median of several copies, after some warm-up copies, and the bytes that arrive are
/// verified. Streams are held until all copies are queued, if they support that. Simulated devices are timed by their own
/// clock, others by the host's. The fixed cost of a copy is measured too. On a virtual clock the time of the simulated
/// devices advances.
///
/// Anything that cannot be measured (a device that is lost or too full, an unavailable kind of device, memory that cannot be
/// pinned, bytes that arrived corrupted) is left out, and the matrix says why.
///
/// # Errors
/// [`Error::Invalid`] for copies of zero bytes; when the host has no memory for one copy.
pub fn measure_links(registry: &Registry, timing: &LinkTiming) -> Result<LinkMatrix> {
    if timing.bytes.get() == 0 {
        return Err(Error::invalid("copies of no bytes have no speed"));
    }
    let mut matrix = LinkMatrix::default();
    for (kind, why) in registry.absent() {
        matrix.left_out.push(LeftOut::new(kind.to_string(), why.as_str()));
    }
    let (mut ends, limit) = (Vec::new(), registry.limits().work);
    // Opened before host memory is allocated: memory is pinned for the devices that are open.
    for id in registry.machine().ids().filter(|id| !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk)) {
        match registry.device(id).and_then(|device| End::open(device, limit)) {
            Ok(end) => ends.push(end),
            Err(error) => matrix.left_out.push(LeftOut::new(id.to_string(), error.to_string())),
        }
    }
    let host = registry.staging_host()?;
    let mut meter = Meter { bytes: fitting(&*host, timing.bytes.get(), 8)?, host, timing, limit, seed: 0, matrix };
    if timing.all_ways {
        meter.note("cpu to cpu", Meter::memory);
    }
    for end in &ends {
        meter.device(end);
    }
    for from in &ends {
        for to in ends.iter().filter(|to| to.id() != from.id()) {
            meter.peers(from, to);
        }
    }
    let measured = |id: &DeviceId| meter.matrix.links.iter().any(|link| link.from == *id || link.to == *id);
    meter.matrix.devices = ends.iter().map(End::id).filter(measured).collect();
    Ok(meter.matrix)
}

impl Registry {
    /// The links of the registry's accelerators, measured by [`measure_links`] with [`LinkTiming::quick`]. The first call
    /// measures, which takes some tens of milliseconds per link; later calls return the same result.
    ///
    /// # Errors
    /// As [`measure_links`].
    pub fn links(&self) -> Result<Arc<LinkMatrix>> {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(links) = &*measured {
            return Ok(Arc::clone(links));
        }
        let links = Arc::new(measure_links(self, &LinkTiming::quick())?);
        *measured = Some(Arc::clone(&links));
        Ok(links)
    }

    /// [`links`](Registry::links) as a topology, for [`Plan::estimate`](crate::Plan::estimate).
    ///
    /// # Errors
    /// As [`measure_links`].
    pub fn measured_topology(&self) -> Result<Topology> {
        self.links().map(|links| links.topology())
    }
}

/// A device with a stream for each direction.
struct End {
    device: Arc<dyn Device>,
    up: Arc<dyn Stream>,
    down: Arc<dyn Stream>,
    watch: Watch,
}

impl End {
    fn open(device: Arc<dyn Device>, limit: Duration) -> Result<End> {
        if let Health::Lost(why) = device.health() {
            return Err(Error::DeviceLost { device: device.id(), why });
        }
        let (up, down) = (device.stream(Role::Upload)?, device.stream(Role::Download)?);
        let watch = Watch::of(&*up, limit)?;
        Ok(End { device, up, down, watch })
    }

    fn id(&self) -> DeviceId {
        self.device.id()
    }
}

/// The lesser of `bytes` and the `share`-th part of the memory that `device` has left, in whole pages if possible.
fn fitting(device: &dyn Device, bytes: u64, share: u64) -> Result<usize> {
    let left = device.memory()?.available().min(device.ledger().limit().saturating_sub(device.ledger().charged()));
    let fit = bytes.min(left / share);
    let fit = if fit < bytes && fit > 4096 { fit / 4096 * 4096 } else { fit };
    if fit == 0 {
        return Err(Error::OutOfMemory { device: device.info().id, requested: 1, available: left, limit: left });
    }
    Ok(usize::try_from(fit).unwrap_or(usize::MAX))
}

/// A measurement in progress, with its results so far.
struct Meter<'a> {
    host: Arc<dyn Device>,
    timing: &'a LinkTiming,
    /// The longest time that any copy may take.
    limit: Duration,
    bytes: usize,
    /// The number of the next pattern.
    seed: u64,
    matrix: LinkMatrix,
}

impl Meter<'_> {
    /// Runs a measurement, or records why it failed.
    fn note(&mut self, what: &str, measure: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(error) = measure(self) {
            self.leave_out(what, error.to_string());
        }
    }

    fn leave_out(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.matrix.left_out.push(LeftOut::new(what, why));
    }

    fn found(
        &mut self,
        (from, to): (DeviceId, DeviceId),
        kind: LinkKind,
        bytes: usize,
        times: Vec<Duration>,
        fixed: Option<Duration>,
    ) {
        let count = u32::try_from(times.len()).unwrap_or(u32::MAX);
        let bandwidth = speed(bytes as u64, median(times));
        let link = Link { median_of: count, fixed, ..Link::new(from, to, kind, bytes as u64, bandwidth) };
        self.matrix.links.push(link);
    }

    /// Measures both directions of a device's link, by all requested kinds of route.
    fn device(&mut self, end: &End) {
        let id = end.id();
        let bytes = match fitting(&*end.device, self.bytes as u64, 4) {
            Ok(bytes) => bytes,
            Err(error) => return self.leave_out(id.to_string(), error.to_string()),
        };
        let kinds: &[LinkKind] = match self.timing.all_ways {
            true => &[LinkKind::Pageable, LinkKind::Pinned, LinkKind::Staged, LinkKind::BothWays],
            false => &[LinkKind::Pinned],
        };
        for &kind in kinds {
            if kind == LinkKind::BothWays {
                self.note(&format!("cpu and {id}, both ways at once"), |meter| meter.both_ways(end, bytes));
                continue;
            }
            self.note(&format!("cpu to {id}, {kind}"), |meter| meter.up(end, kind, bytes));
            self.note(&format!("{id} to cpu, {kind}"), |meter| meter.down(end, kind, bytes));
        }
    }

    fn up(&mut self, end: &End, kind: LinkKind, bytes: usize) -> Result<()> {
        let (src, seed) = self.source(end, kind, bytes)?;
        let dst = end.device.alloc(bytes, MemoryKind::Arena)?;
        let (times, fixed, dst) = match kind {
            LinkKind::Staged => {
                let (relay, mut dst) = (self.relay(end)?, Some(dst));
                let times = self.timing.one_by_one(|| relay.up(&*end.up, &src, &mut dst))?;
                (times, None, dst.ok_or_else(lost)?)
            }
            _ => {
                let mut lane = Lane::new(&*end.up, src, dst, bytes);
                let (times, fixed) = self.along(end.watch, kind, &mut lane)?;
                (times, Some(fixed), lane.ends()?.1)
            }
        };
        self.check(end, &dst.freeze(), bytes, seed)?;
        self.found((DeviceId::CPU, end.id()), kind, bytes, times, fixed);
        Ok(())
    }

    fn down(&mut self, end: &End, kind: LinkKind, bytes: usize) -> Result<()> {
        let (src, seed) = self.filled(end, bytes)?;
        let dst = self.host_memory(end, kind, bytes)?;
        let (times, fixed, mut dst) = match kind {
            LinkKind::Staged => {
                let (relay, mut dst) = (self.relay(end)?, dst);
                let memory = dst.host_mut().ok_or_else(lost)?;
                let times = self.timing.one_by_one(|| relay.down(&*end.down, &src, memory))?;
                (times, None, dst)
            }
            _ => {
                let mut lane = Lane::new(&*end.down, src, dst, bytes);
                let (times, fixed) = self.along(end.watch, kind, &mut lane)?;
                (times, Some(fixed), lane.ends()?.1)
            }
        };
        dst.wait_unused(self.limit)?;
        self.verify(&dst.freeze(), bytes, seed)?;
        self.found((end.id(), DeviceId::CPU), kind, bytes, times, fixed);
        Ok(())
    }

    fn both_ways(&mut self, end: &End, bytes: usize) -> Result<()> {
        let (src, seed) = self.source(end, LinkKind::Pinned, bytes)?;
        let up = Lane::new(&*end.up, src, end.device.alloc(bytes, MemoryKind::Arena)?, bytes);
        let (there, other) = self.filled(end, bytes)?;
        let down = Lane::new(&*end.down, there, self.host_memory(end, LinkKind::Pinned, bytes)?, bytes);
        let mut lanes = [up, down];
        let times = self.timing.queued(end.watch, &mut lanes)?;
        let [up, down] = lanes;
        self.check(end, &up.ends()?.1.freeze(), bytes, seed)?;
        let mut arrived = down.ends()?.1;
        arrived.wait_unused(self.limit)?;
        self.verify(&arrived.freeze(), bytes, other)?;
        let directions = [(DeviceId::CPU, end.id()), (end.id(), DeviceId::CPU)];
        for (ends, times) in directions.into_iter().zip(times) {
            self.found(ends, LinkKind::BothWays, bytes, times, None);
        }
        Ok(())
    }

    /// Measures copies from the memory of `from` to that of `to`: direct, or through the host if there is no other route.
    fn peers(&mut self, from: &End, to: &End) {
        let what = format!("{} to {}", from.id(), to.id());
        match to.device.route_from(&*from.device) {
            Route::Direct => self.note(&what, |meter| meter.straight(from, to)),
            Route::Staged(why) => {
                self.leave_out(format!("{what}, straight"), why);
                self.note(&format!("{what}, staged"), |meter| meter.across(from, to));
            }
        }
    }

    fn straight(&mut self, from: &End, to: &End) -> Result<()> {
        let bytes = fitting(&*from.device, self.bytes as u64, 4)?.min(fitting(&*to.device, self.bytes as u64, 4)?);
        let (src, seed) = self.filled(from, bytes)?;
        let mut lane = Lane::new(&*to.up, src, to.device.alloc(bytes, MemoryKind::Arena)?, bytes);
        let (times, fixed) = self.along(to.watch, LinkKind::Peer, &mut lane)?;
        self.check(to, &lane.ends()?.1.freeze(), bytes, seed)?;
        self.found((from.id(), to.id()), LinkKind::Peer, bytes, times, Some(fixed));
        Ok(())
    }

    fn across(&mut self, from: &End, to: &End) -> Result<()> {
        let bytes = fitting(&*from.device, self.bytes as u64, 4)?.min(fitting(&*to.device, self.bytes as u64, 4)?);
        let (src, seed) = self.filled(from, bytes)?;
        let mut dst = Some(to.device.alloc(bytes, MemoryKind::Arena)?);
        let relay = self.relay(to)?;
        let streams = (&*from.down, &*to.up);
        let times = self.timing.one_by_one(|| relay.across(streams, (&src, bytes), &mut dst))?;
        self.check(to, &dst.ok_or_else(lost)?.freeze(), bytes, seed)?;
        self.found((from.id(), to.id()), LinkKind::PeerStaged, bytes, times, None);
        Ok(())
    }

    /// Measures copies within the host's memory, on the host's own stream.
    fn memory(&mut self) -> Result<()> {
        let end = End::open(Arc::clone(&self.host), self.limit)?;
        let (src, seed) = self.source(&end, LinkKind::Pageable, self.bytes)?;
        let dst = self.host.alloc(self.bytes, MemoryKind::Arena)?;
        let mut lane = Lane::new(&*end.up, src, dst, self.bytes);
        let (times, fixed) = self.along(end.watch, LinkKind::Memory, &mut lane)?;
        let mut dst = lane.ends()?.1;
        dst.wait_unused(self.limit)?;
        self.verify(&dst.freeze(), self.bytes, seed)?;
        self.found((DeviceId::CPU, DeviceId::CPU), LinkKind::Memory, self.bytes, times, Some(fixed));
        Ok(())
    }

    /// The times of one lane's copies, and the time of a small copy. Copies from and to ordinary memory cannot be queued
    /// ahead: the driver executes them while the caller waits.
    fn along(&self, watch: Watch, kind: LinkKind, lane: &mut Lane<'_>) -> Result<(Vec<Duration>, Duration)> {
        let times = if kind == LinkKind::Pageable {
            let bytes = lane.bytes;
            self.timing.one_by_one(|| lane.once(watch, bytes))?
        } else {
            self.timing.queued(watch, std::slice::from_mut(lane))?.pop().unwrap_or_default()
        };
        Ok((times, lane.fixed(watch)?))
    }

    fn relay(&self, end: &End) -> Result<Relay> {
        let relay = Relay::new(&self.host, end.id(), end.watch)?;
        if end.watch.simulated() || relay.pinned() { Ok(relay) } else { Err(unpinned()) }
    }

    /// Host memory as `kind` requires it.
    fn host_memory(&self, end: &End, kind: LinkKind, bytes: usize) -> Result<BufMut> {
        if kind != LinkKind::Pinned {
            return self.host.alloc(bytes, MemoryKind::Arena);
        }
        let memory = self.host.alloc_near(bytes, MemoryKind::Pinned, end.id())?;
        let pinned = end.watch.simulated() || memory.block().pinned();
        if pinned { Ok(memory) } else { Err(unpinned()) }
    }

    /// Host memory filled with a pattern, and the pattern's number.
    fn source(&mut self, end: &End, kind: LinkKind, bytes: usize) -> Result<(Buf, u64)> {
        let mut memory = self.host_memory(end, kind, bytes)?;
        self.seed += 1;
        pattern::fill(memory.host_mut().ok_or_else(lost)?, self.seed)?;
        Ok((memory.freeze(), self.seed))
    }

    /// Device memory filled with a pattern, and the pattern's number.
    fn filled(&mut self, end: &End, bytes: usize) -> Result<(Buf, u64)> {
        let (src, seed) = self.source(end, LinkKind::Pageable, bytes)?;
        let transfer = Transfer::whole(&src, end.device.alloc(bytes, MemoryKind::Arena)?)?;
        Ok((end.up.send(transfer)?.wait(self.limit)?.freeze(), seed))
    }

    /// Verifies the bytes that arrived on a device.
    fn check(&self, end: &End, arrived: &Buf, bytes: usize, seed: u64) -> Result<()> {
        let back = Transfer::whole(arrived, self.host.alloc(arrived.bytes(), MemoryKind::Arena)?)?;
        self.verify(&end.down.copy(back)?.wait(self.limit)?.freeze(), bytes, seed)
    }

    fn verify(&self, arrived: &Buf, bytes: usize, seed: u64) -> Result<()> {
        let memory = arrived.host(self.limit)?.ok_or_else(lost)?;
        match pattern::matches(&memory[..bytes], seed)? {
            true => Ok(()),
            false => Err(Error::Corrupted { what: "wrong bytes arrived".to_owned() }),
        }
    }
}

fn unpinned() -> Error {
    Error::invalid("the host memory could not be pinned")
}

fn lost() -> Error {
    Error::bug("a buffer of the host cannot be addressed by it")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::backend::{Backend, Clock, Countdown, Faulty, Host, Simulated};
    use crate::bytes::ByteSize;
    use crate::device::{Bandwidth, DeviceInfo, Machine};

    fn gbps(n: u64) -> Bandwidth {
        Bandwidth::bytes_per_second(n * 100_000_000)
    }

    /// Two cards with separate links in each direction, in tenths of GB/s, a peer link one way, and no access the other way.
    fn machine(tenths: u64) -> Machine {
        let (a, b) = (DeviceId::cuda(0), DeviceId::cuda(1));
        let topology = Topology::new()
            .directed_link(a, gbps(tenths + 3), gbps(tenths))
            .directed_link(b, gbps(tenths * 2), gbps(tenths * 2))
            .directed_peer(a, b, gbps(tenths * 3))
            .no_access(b, a);
        Machine::new([DeviceInfo::new(a, 64 << 20), DeviceInfo::new(b, 1 << 30)], topology)
    }

    fn of(matrix: &LinkMatrix, from: DeviceId, to: DeviceId, kind: LinkKind) -> u64 {
        matrix.find(from, to, kind).unwrap_or_else(|| panic!("{matrix}")).bandwidth.get()
    }

    #[test]
    fn a_virtual_clock_gives_what_was_described() {
        let described = machine(272);
        let registry = Registry::described(described.clone(), Clock::Virtual);
        let matrix = registry.links().unwrap();
        let (host, a, b) = (DeviceId::CPU, DeviceId::cuda(0), DeviceId::cuda(1));
        assert_eq!(of(&matrix, host, a, LinkKind::Pinned), 27_200_000_000);
        assert_eq!(of(&matrix, a, host, LinkKind::Pinned), 27_500_000_000);
        assert_eq!(of(&matrix, host, b, LinkKind::Pinned), 54_400_000_000);
        assert_eq!(of(&matrix, a, b, LinkKind::Peer), 81_600_000_000);
        let staged = of(&matrix, b, a, LinkKind::PeerStaged);
        assert!((13_000_000_000..=27_200_000_000).contains(&staged), "{staged}");
        assert_eq!(matrix.links[0].bytes, 16 << 20, "a quarter of the small card");
        assert_eq!(matrix.left_out.len(), 1, "{matrix}");
        assert!(matrix.left_out[0].why.contains("cannot reach"), "{matrix}");
        // The resulting topology sends bytes over the same segments.
        let measured = registry.measured_topology().unwrap();
        for (from, to) in [(host, a), (a, host), (host, b), (b, host), (a, b)] {
            let speeds =
                |t: &Topology| t.route(from, to).iter().map(|&s| t.segments()[s].bandwidth).collect::<Vec<_>>();
            assert_eq!(speeds(&measured), speeds(described.topology()), "{from} to {to}");
        }
        assert!(Arc::ptr_eq(&matrix, &registry.links().unwrap()), "measured once");
    }

    /// Pages where the memory limits the copy, and what was asked for where it does not.
    #[test]
    fn copies_fit_the_memory_that_is_left() {
        let id = DeviceId::cuda(0);
        let fit = |total: u64, bytes: u64| {
            let machine = Machine::new([DeviceInfo::new(id, total)], Topology::new());
            fitting(&*Registry::described(machine, Clock::Virtual).device(id).unwrap(), bytes, 4).ok()
        };
        assert_eq!(fit(1 << 20, 10_000), Some(10_000));
        assert_eq!((fit(100_000, 1 << 20), fit(100_000, 25_001)), (Some(24_576), Some(24_576)));
        assert_eq!(fit(100_000, 25_000), Some(25_000));
        assert_eq!((fit(16_384, 1 << 20), fit(16_383, 1 << 20), fit(16, 9)), (Some(4_096), Some(4_095), Some(4)));
        assert_eq!(fit(3, 1 << 20), None);
    }

    /// Copies in both directions at once share a link that they have in common.
    #[test]
    fn both_ways_are_measured_at_one_time() {
        let id = DeviceId::cuda(0);
        let topology = Topology::new().link(id, gbps(100)).shared("bus", gbps(100), [id]);
        let machine = Machine::new([DeviceInfo::new(id, 1 << 30)], topology);
        let mut timing = LinkTiming::quick().bytes(ByteSize(4 << 20)).copies(5);
        timing.all_ways = true;
        let matrix = measure_links(&Registry::described(machine, Clock::Virtual), &timing).unwrap();
        for (from, to) in [(DeviceId::CPU, id), (id, DeviceId::CPU)] {
            assert_eq!(of(&matrix, from, to, LinkKind::Pinned), 10_000_000_000);
            let each = of(&matrix, from, to, LinkKind::BothWays);
            assert!(each.abs_diff(5_000_000_000) < 1_000_000, "{matrix}");
        }
    }

    /// In real time a busy machine lowers the figures without bound. The evaluation of times is tested with made-up ones in
    /// `timing.rs`, and its accuracy is measured by `benches/transfer.rs`.
    #[test]
    fn a_wall_clock_gives_no_more_than_was_described() {
        let registry = Registry::described(machine(5), Clock::Wall);
        let mut timing = LinkTiming::quick().bytes(ByteSize(4 << 20)).copies(5);
        timing.all_ways = true;
        let (host, a, b) = (DeviceId::CPU, DeviceId::cuda(0), DeviceId::cuda(1));
        let begin = Instant::now();
        let matrix = measure_links(&registry, &timing).unwrap();
        // No copy took longer than all of them together did.
        let least = speed(4 << 20, begin.elapsed()).get();
        assert!(matrix.links.iter().all(|link| link.bandwidth.get() >= least), "{matrix}");
        // 20/17 of the described speeds: the most that `Run::plausible` lets pass.
        for (from, to, kind, most) in [
            (host, a, LinkKind::Pinned, 589_000_000),
            (a, host, LinkKind::Pinned, 942_000_000),
            (host, b, LinkKind::Pinned, 1_177_000_000),
            (host, a, LinkKind::BothWays, 589_000_000),
            (a, host, LinkKind::BothWays, 942_000_000),
            (a, b, LinkKind::Peer, 1_765_000_000),
            // Timed one by one.
            (host, a, LinkKind::Pageable, 501_000_000),
            (a, host, LinkKind::Pageable, 801_000_000),
            (host, a, LinkKind::Staged, 501_000_000),
            (a, host, LinkKind::Staged, 801_000_000),
        ] {
            assert!(of(&matrix, from, to, kind) <= most, "{from} to {to}, {kind}, over {most}\n{matrix}");
        }
        assert!(matrix.find(host, host, LinkKind::Memory).is_some(), "{matrix}");
    }

    #[test]
    fn what_cannot_be_measured_is_left_out_with_the_reason() {
        let countdown = Countdown::new();
        let simulated = || Simulated::new(machine(100), Clock::Virtual);
        let counted = || Arc::new(Faulty::new(simulated(), countdown.clone())) as Arc<dyn Backend>;
        let timing = LinkTiming::quick().bytes(ByteSize(1 << 16)).copies(3);
        let measure = || measure_links(&Registry::new([counted(), Arc::new(Host::new()) as Arc<dyn Backend>]), &timing);
        let whole = measure().unwrap();
        assert_eq!((whole.links.len(), whole.left_out.len()), (6, 1), "{whole}");
        let calls = countdown.calls();
        for nth in 1..=calls {
            countdown.fail_nth(nth);
            let matrix = measure().unwrap();
            let reported = matrix.left_out.iter().any(|left| left.why.contains("on purpose"));
            assert!(reported && matrix.links.len() < whole.links.len(), "operation {nth} of {calls}:\n{matrix}");
        }
    }

    #[test]
    fn no_accelerator_means_no_links() {
        let registry = Registry::described(Machine::described(&["cpu=1gb".parse().unwrap()]), Clock::Wall);
        let matrix = registry.links().unwrap();
        assert!(matrix.links.is_empty() && matrix.devices.is_empty());
        assert_eq!(registry.measured_topology().unwrap(), Topology::new());
        assert!(measure_links(&registry, &LinkTiming::quick().bytes(ByteSize(0))).is_err());
    }
}
