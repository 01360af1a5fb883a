//! Splitting the streamed bytes among the donors, by the speed of their links.

use std::time::Duration;

use crate::device::{DeviceId, DeviceKind, Machine, Topology};

/// The number of parts that the streamed bytes are split into.
const PARTS: u64 = 256;

/// A device that can keep what the compute device does not hold.
#[derive(Clone, Debug)]
pub(super) struct Donor {
    pub(super) device: DeviceId,
    /// The bytes of weights that the donor can take.
    pub(super) room: u64,
    /// The bytes among these that are pinned, so not staged; all of them if the donor stages nothing.
    pinned: u64,
    /// What it keeps, and what crosses its link, of so many bytes of weights: less if they are compressed there.
    kept: Kept,
    /// The segments on the route of its bytes, and on that of its staged bytes.
    path: Vec<usize>,
    staged_path: Vec<usize>,
}

/// What a device keeps of weights that are compressed there: so many bytes of so many.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    bytes: u64,
    weights: u64,
}

impl Kept {
    /// All of them.
    pub(super) const ALL: Kept = Kept { bytes: 1, weights: 1 };

    /// `bytes` of `weights`, or all if that saves nothing.
    pub(super) fn new(bytes: u64, weights: u64) -> Kept {
        if bytes == 0 || bytes >= weights { Kept::ALL } else { Kept { bytes, weights } }
    }

    /// The weights that are kept in so many bytes.
    pub(super) fn weights_in(self, bytes: u64) -> u64 {
        scaled(bytes, self.weights, self.bytes)
    }

    /// The bytes that are kept of so many of weights.
    fn of_weights(self, bytes: u64) -> u64 {
        scaled(bytes, self.bytes, self.weights)
    }
}

/// A rule for splitting the streamed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// Part by part to the donor that keeps the transfers shortest. While they are hidden behind the compute, to the
    /// fastest donor.
    Hidden,
    /// As [`Hidden`](Split::Hidden), ignoring the compute.
    Balanced,
    /// As much as it holds to the fastest donor, then to the next.
    Fastest,
    /// To the donors in order of their names.
    InOrder,
    /// Equal parts to all donors, as far as they hold them.
    Equal,
}

impl Donor {
    /// The donors of a machine, in order of preference for equal links: the host, devices that the compute device can read,
    /// devices that it cannot read, the disk. Of devices that share one memory, only the first is a donor; devices that
    /// share the compute device's memory are none.
    pub(super) fn all(machine: &Machine, compute: DeviceId, pinned_cap: u64) -> Vec<Donor> {
        let topology = machine.topology();
        let domain = |device: DeviceId| machine.device(device).map_or(device, |info| info.domain);
        let rank = |device: &DeviceId| match device.kind() {
            DeviceKind::Cpu => 0,
            DeviceKind::Disk => 3,
            _ if topology.reaches(compute, *device) => 1,
            _ => 2,
        };
        let mut devices: Vec<DeviceId> = machine.ids().filter(|&id| domain(id) != domain(compute)).collect();
        devices.sort_by_key(rank);
        let mut domains = Vec::new();
        devices.retain(|&device| {
            let new = !domains.contains(&domain(device));
            domains.push(domain(device));
            new
        });
        let donor = |device: DeviceId| {
            let usable = |id| machine.device(id).map_or(u64::MAX, |info| info.usable());
            Donor {
                device,
                room: usable(device).min(usable(domain(device))),
                pinned: if device.is_host() && !compute.is_host() { pinned_cap } else { u64::MAX },
                kept: Kept::ALL,
                path: topology.path(device, compute),
                staged_path: topology.staged_path(device, compute),
            }
        };
        devices.into_iter().map(donor).collect()
    }

    /// This donor, if it keeps so much of weights.
    pub(super) fn compressing(self, kept: Kept) -> Donor {
        Donor { room: kept.weights_in(self.room), pinned: kept.weights_in(self.pinned), kept, ..self }
    }

    /// The bytes of weights that it has room for in so many bytes.
    pub(super) fn weights_in(&self, bytes: u64) -> u64 {
        self.kept.weights_in(bytes)
    }

    /// Adds the time that `bytes` more take on each segment, after `before` bytes.
    fn load(&self, before: u64, bytes: u64, topology: &Topology, busy: &mut [Duration]) {
        let straight = bytes.min(self.pinned.saturating_sub(before));
        for (path, bytes) in [(&self.path, straight), (&self.staged_path, bytes - straight)] {
            for &segment in path {
                let crossing = self.kept.of_weights(bytes);
                busy[segment] = busy[segment].saturating_add(topology.segments()[segment].bandwidth.time(crossing));
            }
        }
    }

    /// The time that `bytes` more take if nothing else moves.
    pub(super) fn alone(&self, before: u64, bytes: u64, topology: &Topology) -> Duration {
        let mut busy = vec![Duration::ZERO; topology.segments().len()];
        self.load(before, bytes, topology, &mut busy);
        busy.into_iter().max().unwrap_or_default()
    }
}

impl Split {
    pub(super) const ALL: [Split; 5] = [Split::Hidden, Split::Balanced, Split::Fastest, Split::InOrder, Split::Equal];

    /// The bytes of each donor, out of `total`; `None` if the donors do not hold that many.
    pub(super) fn shares(
        self,
        donors: &[Donor],
        total: u64,
        topology: &Topology,
        compute: Duration,
    ) -> Option<Vec<u64>> {
        let rooms = donors.iter().fold(0u64, |sum, donor| sum.saturating_add(donor.room));
        if rooms < total {
            return None;
        }
        let mut order: Vec<usize> = (0..donors.len()).collect();
        match self {
            Split::Hidden => return Some(by_links(donors, total, topology, compute)),
            Split::Balanced => return Some(by_links(donors, total, topology, Duration::ZERO)),
            Split::Equal => return Some(level(donors, total)),
            Split::Fastest => order.sort_by_key(|&d| donors[d].alone(0, 1 << 30, topology)),
            Split::InOrder => order.sort_by_key(|&d| (donors[d].device == DeviceId::DISK, donors[d].device)),
        }
        let (mut shares, mut left) = (vec![0; donors.len()], total);
        for donor in order {
            shares[donor] = left.min(donors[donor].room);
            left -= shares[donor];
        }
        Some(shares)
    }
}

/// `bytes * by / of`; the largest number if it is beyond.
fn scaled(bytes: u64, by: u64, of: u64) -> u64 {
    u64::try_from(u128::from(bytes) * u128::from(by) / u128::from(of)).unwrap_or(u64::MAX)
}

/// Splits `total` in parts. Each part goes to the donor with which the slowest segment ends first, ignoring what `compute`
/// hides; among equals, to the donor where the part itself takes the least time.
fn by_links(donors: &[Donor], total: u64, topology: &Topology, compute: Duration) -> Vec<u64> {
    let part = total.div_ceil(PARTS).max(1);
    let (mut shares, mut left) = (vec![0u64; donors.len()], total);
    let mut busy = vec![Duration::ZERO; topology.segments().len()];
    while left > 0 {
        let bytes_of = |donor: usize| part.min(left).min(donors[donor].room - shares[donor]);
        let mut best: Option<((Duration, Duration), usize, Vec<Duration>)> = None;
        for donor in (0..donors.len()).filter(|&donor| bytes_of(donor) > 0) {
            let mut after = busy.clone();
            donors[donor].load(shares[donor], bytes_of(donor), topology, &mut after);
            let own = donors[donor].alone(shares[donor], part, topology);
            let slowest = after.iter().copied().max().unwrap_or_default();
            let cost = (slowest.max(compute), own);
            if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                best = Some((cost, donor, after));
            }
        }
        let Some((_, donor, after)) = best else { break };
        let bytes = bytes_of(donor);
        shares[donor] += bytes;
        left -= bytes;
        busy = after;
    }
    shares
}

/// Equal parts for all donors; a donor that holds less gets as much as it holds.
fn level(donors: &[Donor], total: u64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..donors.len()).collect();
    order.sort_by_key(|&donor| donors[donor].room);
    let (mut shares, mut left) = (vec![0; donors.len()], total);
    for (done, &donor) in order.iter().enumerate() {
        shares[donor] = left.div_ceil((order.len() - done) as u64).min(donors[donor].room);
        left -= shares[donor];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Bandwidth, DeviceInfo};

    const GPU0: DeviceId = DeviceId::cuda(0);

    fn gbps(n: u64) -> Bandwidth {
        Bandwidth::bytes_per_second(n * 1_000_000_000)
    }

    /// A card that computes, beside these devices of so many bytes.
    fn donors(devices: &[(&str, u64)], topology: Topology) -> (Vec<Donor>, Topology) {
        let info = |(id, bytes): &(&str, u64)| DeviceInfo::new(id.parse().unwrap(), *bytes);
        let machine = Machine::new(devices.iter().map(info).chain([DeviceInfo::new(GPU0, 1 << 30)]), topology.clone());
        (Donor::all(&machine, GPU0, 1_000), topology)
    }

    fn shares(split: Split, donors: &(Vec<Donor>, Topology), total: u64, compute: Duration) -> Option<Vec<u64>> {
        split.shares(&donors.0, total, &donors.1, compute)
    }

    #[test]
    fn of_equal_links_the_nearest_memory_is_first() {
        let peers = Topology::new().no_peer_access(GPU0, DeviceId::cuda(1));
        let all = [("cpu", 5), ("disk", 5), ("cuda:1", 5), ("cuda:2", 5), ("xpu:0", 5)];
        let (found, _) = donors(&all, peers);
        let names: Vec<String> = found.iter().map(|donor| donor.device.to_string()).collect();
        assert_eq!(names, ["cpu", "cuda:2", "cuda:1", "xpu:0", "disk"]);
        // Only the host stages what it may not pin, and only for another device.
        assert_eq!(
            found.iter().map(|donor| donor.pinned).collect::<Vec<_>>(),
            [1_000, u64::MAX, u64::MAX, u64::MAX, u64::MAX]
        );
        let machine = Machine::new([DeviceInfo::new(DeviceId::CPU, 5), DeviceInfo::new(GPU0, 5)], Topology::new());
        assert_eq!(Donor::all(&machine, DeviceId::CPU, 1_000)[0].pinned, u64::MAX);
    }

    #[test]
    fn devices_of_one_memory_are_one_donor() {
        let shared = |id: &str, domain: DeviceId| DeviceInfo::new(id.parse().unwrap(), 9).domain(domain);
        let infos = [
            shared("cpu", DeviceId::CPU),
            shared("xpu:0", DeviceId::CPU),
            shared("xpu:1", GPU0),
            shared("cuda:0", GPU0),
        ];
        let found = Donor::all(&Machine::new(infos, Topology::new()), GPU0, 1_000);
        assert_eq!(found.iter().map(|donor| donor.device).collect::<Vec<_>>(), [DeviceId::CPU]);
    }

    #[test]
    fn what_is_not_pinned_takes_the_staged_way() {
        let memory = Topology::new().link(DeviceId::CPU, gbps(2)).link(GPU0, gbps(4));
        let (found, topology) = donors(&[("cpu", 1 << 20)], memory);
        // Pinned bytes are read once; staged ones twice.
        assert_eq!(found[0].alone(0, 1_000, &topology), Duration::from_nanos(500));
        assert_eq!(found[0].alone(1_000, 1_000, &topology), Duration::from_nanos(1_000));
        assert_eq!(found[0].alone(400, 1_000, &topology), Duration::from_nanos(300 + 400));
    }

    /// What is compressed takes as much less room, of what may be pinned, too, and time.
    #[test]
    fn a_donor_that_compresses_holds_and_sends_more() {
        let (found, topology) = donors(&[("cpu", 1 << 20)], Topology::new().link(GPU0, gbps(2)));
        let donor = found[0].clone().compressing(Kept::new(200, 300));
        assert_eq!((donor.room, donor.pinned), ((1 << 20) * 3 / 2, 1_500));
        assert_eq!((donor.weights_in(100), donor.weights_in(u64::MAX)), (150, u64::MAX));
        assert_eq!(donor.alone(0, 1_500, &topology), Duration::from_nanos(500));
        // Nothing that is compressed, or that gains from it.
        for (kept, weights) in [(0, 0), (0, 300), (300, 300), (301, 300)] {
            assert_eq!(found[0].clone().compressing(Kept::new(kept, weights)).room, 1 << 20);
        }
    }

    #[test]
    fn links_get_bytes_in_proportion_to_their_speed() {
        let links = Topology::new().link(DeviceId::cuda(1), gbps(3)).link(DeviceId::cuda(2), gbps(1));
        let roomy = donors(&[("cuda:1", 1 << 20), ("cuda:2", 1 << 20)], links.clone());
        assert_eq!(shares(Split::Balanced, &roomy, 256_000, Duration::ZERO), Some(vec![192_000, 64_000]));
        // While the compute hides all of it, the fastest donor has it.
        let hidden = |micros| shares(Split::Hidden, &roomy, 256_000, Duration::from_micros(micros));
        assert_eq!(hidden(100), Some(vec![256_000, 0]));
        assert_eq!(hidden(0), Some(vec![192_000, 64_000]));
        let alike = Topology::new().link(DeviceId::cuda(1), gbps(1)).link(DeviceId::cuda(2), gbps(1));
        let alike = donors(&[("cuda:1", 1 << 20), ("cuda:2", 1 << 20)], alike);
        assert_eq!(shares(Split::Hidden, &alike, 256_000, Duration::from_secs(1)), Some(vec![256_000, 0]));
        // A donor that is full gets no more, and all of them together have to hold the bytes.
        let tight = donors(&[("cuda:1", 100_500), ("cuda:2", 200_000)], links);
        assert_eq!(shares(Split::Balanced, &tight, 256_000, Duration::ZERO), Some(vec![100_500, 155_500]));
        assert_eq!(shares(Split::Balanced, &tight, 300_500, Duration::ZERO), Some(vec![100_500, 200_000]));
        assert_eq!(Split::ALL.map(|split| shares(split, &tight, 300_501, Duration::ZERO)), [const { None }; 5]);
        assert_eq!(
            Split::ALL.map(|split| shares(split, &tight, 0, Duration::ZERO)),
            [const { Some([0, 0]) }; 5].map(|s| s.map(Vec::from))
        );
    }

    #[test]
    fn donors_fill_in_turn_or_alike() {
        let links = Topology::new()
            .link(DeviceId::cuda(1), gbps(1))
            .link(DeviceId::cuda(2), gbps(3))
            .link(DeviceId::DISK, gbps(2));
        let three = donors(&[("cuda:1", 300), ("cuda:2", 100), ("disk", 1_000)], links);
        let of = |split, total| shares(split, &three, total, Duration::ZERO).unwrap();
        assert_eq!(of(Split::Fastest, 1_150), [50, 100, 1_000]);
        assert_eq!(of(Split::InOrder, 350), [300, 50, 0]);
        assert_eq!(of(Split::InOrder, 450), [300, 100, 50]);
        assert_eq!(of(Split::Equal, 240), [80, 80, 80]);
        assert_eq!(of(Split::Equal, 500), [200, 100, 200]);
        assert_eq!(of(Split::Equal, 1_000), [300, 100, 600]);
        assert_eq!(of(Split::Equal, 7).iter().sum::<u64>(), 7);
    }
}
