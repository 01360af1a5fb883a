//! How fast bytes got from device to device when that was measured.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Bandwidth, DeviceId, Topology};
use crate::bytes::ByteSize;

/// The way that bytes took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LinkKind {
    /// Within host memory, by the threads of the host's own streams.
    Memory,
    /// Between a device and ordinary host memory.
    Pageable,
    /// Between a device and pinned host memory. To simulated devices all host memory is that.
    Pinned,
    /// Between a device and ordinary host memory by way of pinned buffers, filled or emptied by the host.
    Staged,
    /// As `Pinned`, while as much goes the other way.
    BothWays,
    /// From one device's memory straight to another's.
    Peer,
    /// From one device's memory to another's by way of pinned buffers.
    PeerStaged,
}

impl LinkKind {
    /// Its name: `pinned`, `both_ways`.
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

/// One way between two devices, in one direction, as measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Link {
    /// Where the bytes were.
    pub from: DeviceId,
    /// Where they went.
    pub to: DeviceId,
    /// The way they took.
    pub kind: LinkKind,
    /// The bytes of each copy.
    pub bytes: u64,
    /// The bytes of a copy over the median of the copies' times.
    pub bandwidth: Bandwidth,
    /// How many copies were timed, those to warm up not counted.
    pub median_of: u32,
    /// What a copy of four bytes takes from the call until the host sees its end, alone: the fixed cost of a copy that
    /// is waited for, where it was measured. It is not taken off the figure above.
    pub fixed: Option<Duration>,
}

impl Link {
    /// What was measured of one way: copies of `bytes`, `median_of` of them.
    pub fn new(from: DeviceId, to: DeviceId, kind: LinkKind, bytes: u64, bandwidth: Bandwidth) -> Link {
        Link { from, to, kind, bytes, bandwidth, median_of: 1, fixed: None }
    }
}

/// Something that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeftOut {
    /// What: a kind of device, a device, or a way between two.
    pub what: String,
    /// Why not.
    pub why: String,
}

impl LeftOut {
    /// What was not measured, and why not.
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> LeftOut {
        LeftOut { what: what.into(), why: why.into() }
    }
}

/// The links of a machine as measured, each way and direction by itself, and what was left out.
///
/// What copies share (a PCIe switch, the host's memory) shows only where both directions of one link were measured at
/// once; links of different devices are measured one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LinkMatrix {
    /// The devices whose links were measured; the host is always one end or the other and not listed.
    pub devices: Vec<DeviceId>,
    /// The ways that were measured.
    pub links: Vec<Link>,
    /// What was not, and why.
    pub left_out: Vec<LeftOut>,
}

impl LinkMatrix {
    /// The link of this kind, if it was measured.
    pub fn find(&self, from: DeviceId, to: DeviceId, kind: LinkKind) -> Option<&Link> {
        self.links.iter().find(|link| (link.from, link.to, link.kind) == (from, to, kind))
    }

    /// The links as a topology, for [`Plan::estimate`](crate::Plan::estimate): those of devices to the host with
    /// pinned memory (ordinary memory where nothing could be pinned), and peer links for each direction. A pair
    /// without a measured peer link counts as one that cannot reach each other, so that its bytes pass the host. A
    /// way that was measured in one direction only counts as that fast in the other.
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
