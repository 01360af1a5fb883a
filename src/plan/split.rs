//! Splitting the streamed bytes among the donors, by the speed of their links.

use std::time::Duration;

use crate::device::{DeviceId, DeviceKind, Machine, Topology};

/// The number of parts that the streamed bytes are split into.
const PARTS: u64 = 256;

/// A device that can keep what the compute device does not hold.
#[derive(Clone, Debug)]
pub(super) struct Donor {
    pub(super) device: DeviceId,
    /// The bytes that the donor can take.
    pub(super) room: u64,
    /// The bytes among these that are pinned, so not staged; all of them if the donor stages nothing.
    pinned: u64,
    /// The segments on the route of its bytes, and on that of its staged bytes.
    path: Vec<usize>,
    staged_path: Vec<usize>,
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
                path: topology.path(device, compute),
                staged_path: topology.staged_path(device, compute),
            }
        };
        devices.into_iter().map(donor).collect()
    }

    /// Adds the time that `bytes` more take on each segment, after `before` bytes.
    fn load(&self, before: u64, bytes: u64, topology: &Topology, busy: &mut [Duration]) {
        let straight = bytes.min(self.pinned.saturating_sub(before));
        for (path, bytes) in [(&self.path, straight), (&self.staged_path, bytes - straight)] {
            for &segment in path.iter().filter(|_| bytes > 0) {
                busy[segment] = busy[segment].saturating_add(topology.segments()[segment].bandwidth.time(bytes));
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
