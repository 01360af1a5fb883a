//! Measured speeds of copies between devices.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Bandwidth, DeviceId, Topology};
use crate::bytes::ByteSize;

/// The kind of route that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LinkKind {
    /// Within host memory, by the threads of the host's own streams.
    Memory,
    /// Between a device and ordinary host memory.
    Pageable,
    /// Between a device and pinned host memory. For simulated devices, all host memory counts as pinned.
    Pinned,
    /// Between a device and ordinary host memory through pinned buffers, which the host fills or empties.
    Staged,
    /// As `Pinned`, with equal traffic in the opposite direction.
    BothWays,
    /// From one device's memory directly to another's.
    Peer,
    /// From one device's memory to another's through pinned buffers.
    PeerStaged,
}

impl LinkKind {
    /// The name, such as `pinned` or `both_ways`.
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::Memory => "memory",
            LinkKind::Pageable => "pageable",
            LinkKind::Pinned => "pinned",
            LinkKind::Staged => "staged",
            LinkKind::BothWays => "both_ways",
            LinkKind::Peer => "peer",
            LinkKind::PeerStaged => "peer_staged",
        }
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One route between two devices in one direction, as measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Link {
    /// The source device.
    pub from: DeviceId,
    /// The destination device.
    pub to: DeviceId,
    /// The kind of route.
    pub kind: LinkKind,
    /// The size of each copy, in bytes.
    pub bytes: u64,
    /// The size of a copy divided by the median of the copies' times.
    pub bandwidth: Bandwidth,
    /// The number of timed copies, without warm-up copies.
    pub median_of: u32,
    /// The time of a single copy of four bytes, from the call until the host observes its completion: the fixed cost of a
    /// copy that is waited for. `None` if it was not measured. It is not subtracted in `bandwidth`.
    pub fixed: Option<Duration>,
}

impl Link {
    /// The measured speed of one route, from one copy of `bytes`.
    pub fn new(from: DeviceId, to: DeviceId, kind: LinkKind, bytes: u64, bandwidth: Bandwidth) -> Link {
        Link { from, to, kind, bytes, bandwidth, median_of: 1, fixed: None }
    }
}

/// Something that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeftOut {
    /// A kind of device, a device, or a route between two devices.
    pub what: String,
    /// The reason.
    pub why: String,
}

impl LeftOut {
    /// An entry for `what`, which was not measured because of `why`.
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> LeftOut {
        LeftOut { what: what.into(), why: why.into() }
    }
}

/// The measured links of a machine, each route and direction separately, and what was left out.
///
/// Shared bottlenecks (a PCIe switch, the host's memory) show only where both directions of one link were measured
/// concurrently; links of different devices are measured one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LinkMatrix {
    /// The devices whose links were measured. The host is not listed.
    pub devices: Vec<DeviceId>,
    /// The routes that were measured.
    pub links: Vec<Link>,
    /// The routes and devices that were not measured, with the reasons.
    pub left_out: Vec<LeftOut>,
}

impl LinkMatrix {
    /// The measured link of this kind. `None` if it was not measured.
    pub fn find(&self, from: DeviceId, to: DeviceId, kind: LinkKind) -> Option<&Link> {
        self.links.iter().find(|link| (link.from, link.to, link.kind) == (from, to, kind))
    }

    /// The links as a topology, for [`Plan::estimate`](crate::Plan::estimate). It has the links of devices to the host with
    /// pinned memory (with ordinary memory if none could be pinned), and a peer link for each direction. A pair without a
    /// measured peer link counts as unable to reach each other, so its bytes go through the host. A host link that was
    /// measured in one direction only is assumed to be equally fast in the other.
    pub fn topology(&self) -> Topology {
        let speed = |from, to| {
            let kinds = [LinkKind::Pinned, LinkKind::Pageable];
            kinds.iter().find_map(|&kind| self.find(from, to, kind)).map(|link| link.bandwidth)
        };
        let mut topology = Topology::new();
        for &device in &self.devices {
            let (out, into) = (speed(device, DeviceId::CPU), speed(DeviceId::CPU, device));
            if let (Some(out), Some(into)) = (out.or(into), into.or(out)) {
                topology = topology.directed_link(device, out, into);
            }
        }
        for &from in &self.devices {
            for &to in self.devices.iter().filter(|&&to| to != from) {
                topology = match self.find(from, to, LinkKind::Peer) {
                    Some(peer) => topology.directed_peer(from, to, peer.bandwidth),
                    None => topology.no_access(from, to),
                };
            }
        }
        topology
    }
}

impl fmt::Display for LinkMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const HEADS: [&str; 7] = ["from", "to", "way", "bytes", "GB/s", "median of", "fixed µs"];
        writeln!(
            f,
            "{:10} {:10} {:12} {:>11} {:>9} {:>10} {:>9}",
            HEADS[0], HEADS[1], HEADS[2], HEADS[3], HEADS[4], HEADS[5], HEADS[6]
        )?;
        for link in &self.links {
            let gb = link.bandwidth.get() as f64 / 1e9;
            let fixed = link.fixed.map_or("-".to_owned(), |fixed| format!("{:.1}", fixed.as_secs_f64() * 1e6));
            let bytes = ByteSize(link.bytes).human();
            let way = link.kind.name().replace('_', " ");
            writeln!(
                f,
                "{:10} {:10} {:12} {bytes:>11} {gb:9.2} {:>10} {fixed:>9}",
                link.from, link.to, way, link.median_of
            )?;
        }
        for LeftOut { what, why } in &self.left_out {
            writeln!(f, "left out: {what}: {why}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gbps(n: u64) -> Bandwidth {
        Bandwidth::bytes_per_second(n * 1_000_000_000)
    }

    fn matrix() -> LinkMatrix {
        let (a, b) = (DeviceId::cuda(0), DeviceId::cuda(1));
        let link = |from, to, kind, speed| Link::new(from, to, kind, 1 << 20, gbps(speed));
        LinkMatrix {
            devices: vec![a, b],
            links: vec![
                link(DeviceId::CPU, a, LinkKind::Pageable, 3),
                link(DeviceId::CPU, a, LinkKind::Pinned, 25),
                link(a, DeviceId::CPU, LinkKind::Pinned, 26),
                link(DeviceId::CPU, b, LinkKind::Pageable, 4),
                link(a, b, LinkKind::Peer, 276),
                link(b, a, LinkKind::PeerStaged, 11),
            ],
            left_out: vec![LeftOut { what: "cuda:1 to cuda:0".to_owned(), why: "no peer access".to_owned() }],
        }
    }

    #[test]
    fn a_topology_takes_the_best_way_of_each_direction() {
        let topology = matrix().topology();
        let speeds = |from, to| -> Vec<u64> {
            let route = topology.route(from, to);
            route.iter().map(|&s| topology.segments()[s].bandwidth.get() / 1_000_000_000).collect()
        };
        let (host, a, b) = (DeviceId::CPU, DeviceId::cuda(0), DeviceId::cuda(1));
        assert_eq!((speeds(host, a), speeds(a, host)), (vec![25], vec![26]));
        assert_eq!((speeds(host, b), speeds(b, host)), (vec![4], vec![4]));
        assert_eq!(speeds(a, b), [276]);
        assert!(topology.reaches(b, a) && !topology.reaches(a, b));
    }

    #[test]
    fn a_matrix_prints_and_keeps() {
        let text = matrix().to_string();
        let row = text.lines().nth(2).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(row, ["cpu", "cuda:0", "pinned", "1.00", "MiB", "25.00", "1", "-"]);
        assert!(text.ends_with("left out: cuda:1 to cuda:0: no peer access\n"), "{text}");
        let json = serde_json::to_string(&matrix()).unwrap();
        assert_eq!(serde_json::from_str::<LinkMatrix>(&json).unwrap(), matrix());
    }
}
