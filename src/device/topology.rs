//! Links between devices, modelled as shared segments.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::DeviceId;
use crate::bytes::Decimal;
use crate::error::{Error, Result};

/// The speed of a link, in bytes a second, at least 1. Parses and prints decimal GB/s (`27.2` is 27.2e9 bytes a second);
/// serialises as bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64")]
pub struct Bandwidth(u64);

impl Bandwidth {
    /// A speed of `bytes` a second, at least 1.
    pub fn bytes_per_second(bytes: u64) -> Bandwidth {
        Bandwidth(bytes.max(1))
    }

    /// The speed in bytes a second.
    pub fn get(self) -> u64 {
        self.0
    }

    /// The transfer time of `bytes`, rounded up to a nanosecond.
    pub fn time(self, bytes: u64) -> Duration {
        let nanos = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(self.0));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fraction = format!("{:09}", self.0 % 1_000_000_000);
        let text = format!("{}.{}", self.0 / 1_000_000_000, fraction);
        f.pad(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl FromStr for Bandwidth {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bytes = Decimal::parse(text.trim()).and_then(|n| n.scaled_floor(1_000_000_000));
        bytes
            .filter(|&b| b > 0)
            .map(Bandwidth)
            .ok_or_else(|| Error::syntax(text, 0..text.len(), "a bandwidth in GB/s over 0, such as 27.2"))
    }
}

impl TryFrom<u64> for Bandwidth {
    type Error = Error;

    fn try_from(bytes: u64) -> Result<Bandwidth> {
        match bytes {
            0 => Err(Error::invalid("a bandwidth of no bytes a second")),
            bytes => Ok(Bandwidth(bytes)),
        }
    }
}

/// A part of the machine whose bandwidth is shared by all transfers that cross it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Segment {
    /// The name: `cuda:0 in`, `cuda:1 out`, the name of a switch, `cuda:0 <- cuda:1`.
    pub name: String,
    /// The speed.
    pub bandwidth: Bandwidth,
    /// Whether the speed is an estimate, from what such links are known to attain, and neither measured here nor described.
    #[serde(default)]
    pub estimated: bool,
}

/// The links of a machine as a graph of shared segments.
///
/// A device's link to the host is two segments, one in each direction. A peer link is a separate segment for each
/// direction and uses neither of these. A shared segment (a PCIe switch, host memory) is crossed by every route that starts
/// or ends at one of its members and is not a peer link.
///
/// Deserialising checks that every link's segment exists, and that no memory is within a memory that is itself within
/// another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct Topology {
    segments: Vec<Segment>,
    /// Device -> its segments (out, in).
    links: BTreeMap<DeviceId, (usize, usize)>,
    /// `to` -> `from` -> segment.
    peers: BTreeMap<DeviceId, BTreeMap<DeviceId, usize>>,
    /// Segment -> members.
    shared: BTreeMap<usize, BTreeSet<DeviceId>>,
    /// Pairs of devices that cannot reach each other's memory.
    unreachable: BTreeSet<(DeviceId, DeviceId)>,
    /// Device -> the device whose memory it shares, which has its own memory.
    within: BTreeMap<DeviceId, DeviceId>,
}

/// The serialised form of a topology.
#[derive(Deserialize)]
#[serde(rename = "Topology")]
struct Parts {
    segments: Vec<Segment>,
    links: BTreeMap<DeviceId, (usize, usize)>,
    peers: BTreeMap<DeviceId, BTreeMap<DeviceId, usize>>,
    shared: BTreeMap<usize, BTreeSet<DeviceId>>,
    unreachable: BTreeSet<(DeviceId, DeviceId)>,
    #[serde(default)]
    within: BTreeMap<DeviceId, DeviceId>,
}

impl TryFrom<Parts> for Topology {
    type Error = Error;

    fn try_from(parts: Parts) -> Result<Topology> {
        let Parts { segments, links, peers, shared, unreachable, within } = parts;
        let of_links = links.values().flat_map(|&(out, into)| [out, into]);
        let mut named = of_links.chain(peers.values().flat_map(BTreeMap::values).chain(shared.keys()).copied());
        if let Some(segment) = named.find(|&segment| segment >= segments.len()) {
            let count = segments.len();
            return Err(Error::invalid(format!("the topology has {count} segments, and names one at {segment}")));
        }
        if let Some((device, memory)) = within.iter().find(|(_, memory)| within.contains_key(memory)) {
            return Err(Error::invalid(format!(
                "the memory of {device} is that of {memory}, which has none of its own"
            )));
        }
        Ok(Topology { segments, links, peers, shared, unreachable, within })
    }
}

impl Topology {
    /// A topology without known links: in estimates, transfers take no time.
    pub fn new() -> Topology {
        Topology::default()
    }

    /// Adds the link of `device` to the host, with `bandwidth` in each direction. For `cpu` and `disk` it is the speed of the
    /// memory or disk itself.
    #[must_use]
    pub fn link(self, device: DeviceId, bandwidth: Bandwidth) -> Topology {
        self.directed_link(device, bandwidth, bandwidth)
    }

    /// Adds the link of `device` to the host with a speed for each direction: `out` of the device, and `into` it.
    #[must_use]
    pub fn directed_link(mut self, device: DeviceId, out: Bandwidth, into: Bandwidth) -> Topology {
        let out = self.segment(format!("{device} out"), out);
        let into = self.segment(format!("{device} in"), into);
        self.links.insert(device, (out, into));
        self
    }

    /// Adds a direct link between two devices, with `bandwidth` in each direction.
    #[must_use]
    pub fn peer(self, a: DeviceId, b: DeviceId, bandwidth: Bandwidth) -> Topology {
        self.directed_peer(b, a, bandwidth).directed_peer(a, b, bandwidth)
    }

    /// Adds a direct link that carries bytes `from` one device `to` another, but not back.
    #[must_use]
    pub fn directed_peer(mut self, from: DeviceId, to: DeviceId, bandwidth: Bandwidth) -> Topology {
        let segment = self.segment(format!("{to} <- {from}"), bandwidth);
        self.peers.entry(to).or_default().insert(from, segment);
        self
    }

    /// Marks the segments added so far as estimates: the speeds that such links are known to attain.
    #[must_use]
    pub fn estimated(mut self) -> Topology {
        self.segments.iter_mut().for_each(|segment| segment.estimated = true);
        self
    }

    /// Whether no speed in the topology was measured or described: it has no segments, or only estimates.
    pub fn is_estimate(&self) -> bool {
        self.segments.iter().all(|segment| segment.estimated)
    }

    /// Declares that `device` has no memory of its own but uses that of `memory`. A copy within one memory crosses no link
    /// of a device, only that memory's own segment, if there is one.
    ///
    /// If `memory` is itself within another memory, that one is used instead. Memories that were within `device` move along.
    /// If `memory` was within `device`, the new declaration reverses that.
    #[must_use]
    pub fn within(mut self, device: DeviceId, memory: DeviceId) -> Topology {
        if device != memory {
            let memory = match self.memory_of(memory) {
                around if around == device => memory,
                own => own,
            };
            self.within.remove(&memory);
            self.within.values_mut().filter(|own| **own == device).for_each(|own| *own = memory);
            self.within.insert(device, memory);
        }
        self
    }

    /// Adds a segment that all transfers of its members share.
    #[must_use]
    pub fn shared(
        mut self,
        name: impl Into<String>,
        bandwidth: Bandwidth,
        members: impl IntoIterator<Item = DeviceId>,
    ) -> Topology {
        let segment = self.segment(name.into(), bandwidth);
        self.shared.insert(segment, members.into_iter().collect());
        self
    }

    /// Declares that `a` and `b` cannot read each other's memory, so that copies between them go through the host.
    #[must_use]
    pub fn no_peer_access(mut self, a: DeviceId, b: DeviceId) -> Topology {
        self.unreachable.extend([(a, b), (b, a)]);
        self
    }

    /// Declares that `to` cannot read the memory of `from`. The opposite direction is unaffected.
    #[must_use]
    pub fn no_access(mut self, from: DeviceId, to: DeviceId) -> Topology {
        self.unreachable.insert((to, from));
        self
    }

    /// Adds what another topology says of links and memories of which this one says nothing.
    pub(crate) fn and(mut self, other: Topology) -> Topology {
        let before = self.segments.len();
        self.segments.extend(other.segments);
        for (device, (out, into)) in other.links {
            self.links.entry(device).or_insert((before + out, before + into));
        }
        for (to, sources) in other.peers {
            let known = self.peers.entry(to).or_default();
            sources.into_iter().for_each(|(from, segment)| {
                known.entry(from).or_insert(before + segment);
            });
        }
        self.shared.extend(other.shared.into_iter().map(|(segment, members)| (before + segment, members)));
        self.unreachable.extend(other.unreachable);
        let unsaid = |topology: &Topology, device: DeviceId| !topology.within.contains_key(&device);
        other.within.into_iter().fold(self, |topology, (device, memory)| match unsaid(&topology, device) {
            true => topology.within(device, memory),
            false => topology,
        })
    }

    fn segment(&mut self, name: String, bandwidth: Bandwidth) -> usize {
        self.segments.push(Segment { name, bandwidth, estimated: false });
        self.segments.len() - 1
    }

    /// All segments. Routes refer to them by index.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The device whose memory `device` uses: itself unless declared otherwise.
    pub fn memory_of(&self, device: DeviceId) -> DeviceId {
        self.within.get(&device).copied().unwrap_or(device)
    }

    /// Whether `to` can read the memory of `from`. True if either is the host or the disk, if both share a memory, and for
    /// devices of the same kind unless declared otherwise.
    pub fn reaches(&self, to: DeviceId, from: DeviceId) -> bool {
        let near = |d: DeviceId| matches!(d.kind(), super::DeviceKind::Cpu | super::DeviceKind::Disk);
        self.memory_of(to) == self.memory_of(from)
            || near(to)
            || near(from)
            || (to.kind() == from.kind() && !self.unreachable.contains(&(to, from)))
    }

    /// The segments that bytes cross from the memory of `from` to that of `to`, each as often as they cross it.
    ///
    /// If `to` can read the memory of `from`, this is their [`route`](Topology::route). Bytes that only the host can read, on
    /// the disk or in memory that `to` cannot reach, go to the host's memory first and on from there.
    pub fn path(&self, from: DeviceId, to: DeviceId) -> Vec<usize> {
        let ends = [from, to];
        let reads_itself = !ends.contains(&DeviceId::DISK) || self.peer_link(from, to).is_some();
        if from == to || ends.contains(&DeviceId::CPU) || (reads_itself && self.reaches(to, from)) {
            return self.route(from, to);
        }
        let mut route = self.route(from, DeviceId::CPU);
        route.extend(self.route(DeviceId::CPU, to));
        route
    }

    /// As [`path`](Topology::path), for bytes that go through a staging buffer on the host. Bytes of the host itself then cross
    /// its memory once more.
    pub fn staged_path(&self, from: DeviceId, to: DeviceId) -> Vec<usize> {
        if !from.is_host() {
            return self.path(from, to);
        }
        let mut route = self.route(from, to);
        route.extend(self.links.get(&from).into_iter().flat_map(|&(out, into)| [out, into]));
        route.extend(self.shared.iter().filter(|(_, members)| members.contains(&from)).map(|(&segment, _)| segment));
        route
    }

    fn peer_link(&self, from: DeviceId, to: DeviceId) -> Option<usize> {
        self.peers.get(&to).and_then(|sources| sources.get(&from)).copied()
    }

    /// The segments that bytes cross between two devices, each once. Empty if no link is known.
    pub fn route(&self, from: DeviceId, to: DeviceId) -> Vec<usize> {
        if from == to {
            return Vec::new();
        }
        let memory = self.memory_of(from);
        if memory == self.memory_of(to) {
            return self.links.get(&memory).map(|link| link.0).into_iter().collect();
        }
        if let Some(segment) = self.peer_link(from, to).filter(|_| self.reaches(to, from)) {
            return vec![segment];
        }
        let mut route = Vec::new();
        route.extend(self.links.get(&from).map(|link| link.0));
        let shares = |members: &BTreeSet<DeviceId>| members.contains(&from) || members.contains(&to);
        route.extend(self.shared.iter().filter(|(_, members)| shares(members)).map(|(&segment, _)| segment));
        route.extend(self.links.get(&to).map(|link| link.1));
        route
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gbps(n: u64) -> Bandwidth {
        Bandwidth::bytes_per_second(n * 1_000_000_000)
    }

    #[test]
    fn bandwidths_are_decimal() {
        let link: Bandwidth = "27.2".parse().unwrap();
        assert_eq!(link.get(), 27_200_000_000);
        assert_eq!(link.to_string(), "27.2");
        assert_eq!(link.time(27_200_000_000), Duration::from_secs(1));
        assert_eq!(link.time(1), Duration::from_nanos(1));
    }

    #[test]
    fn routes_pass_what_they_share() {
        let (a, b, c) = (DeviceId::cuda(0), DeviceId::cuda(1), DeviceId::cuda(2));
        let topology = Topology::new()
            .link(DeviceId::CPU, gbps(40))
            .link(a, gbps(26))
            .link(b, gbps(26))
            .shared("switch", gbps(30), [a, b])
            .peer(a, c, gbps(50));
        let names = |from, to| -> Vec<&str> {
            topology.route(from, to).iter().map(|&s| topology.segments()[s].name.as_str()).collect()
        };
        assert_eq!(names(DeviceId::CPU, a), ["cpu out", "switch", "cuda:0 in"]);
        assert_eq!(names(b, a), ["cuda:1 out", "switch", "cuda:0 in"]);
        assert_eq!(names(c, a), ["cuda:0 <- cuda:2"]);
        assert_eq!(names(a, a), [""; 0]);
        let path = |from, to| -> Vec<&str> {
            topology.path(from, to).iter().map(|&s| topology.segments()[s].name.as_str()).collect()
        };
        assert_eq!(path(b, a), ["cuda:1 out", "switch", "cuda:0 in"]);
        // The host reads the disk, and its memory is read again.
        assert_eq!(path(DeviceId::DISK, a), ["cpu in", "cpu out", "switch", "cuda:0 in"]);
        assert_eq!(path(DeviceId::DISK, DeviceId::CPU), ["cpu in"]);
        assert!(topology.reaches(a, b) && !topology.clone().no_peer_access(a, b).reaches(b, a));
        assert!(!topology.reaches(a, "xpu:0".parse().unwrap()));
    }

    #[test]
    fn what_stays_in_one_memory_passes_no_link() {
        let (host, a, b) = (DeviceId::CPU, DeviceId::cuda(0), DeviceId::cuda(1));
        let topology = Topology::new().link(a, gbps(26)).link(b, gbps(26)).estimated().within(a, host).within(b, b);
        assert!(topology.is_estimate() && Topology::new().is_estimate());
        assert_eq!((topology.route(host, a), topology.route(a, host)), (vec![], vec![]));
        assert_eq!(topology.route(host, b).len(), 1);
        let topology = topology.link(host, gbps(40)).no_peer_access(host, a);
        assert!(!topology.is_estimate());
        assert_eq!(topology.segments()[topology.route(host, a)[0]].name, "cpu out");
        assert!(topology.reaches(a, host) && topology.memory_of(a) == host);
    }

    #[test]
    fn two_topologies_know_what_each_knows_and_the_first_is_believed() {
        let [a, b, c] = [0, 1, 2].map(DeviceId::cuda);
        let first = Topology::new().link(a, gbps(1)).peer(a, b, gbps(2)).within(c, DeviceId::CPU);
        let second = Topology::new().link(a, gbps(8)).link(b, gbps(3)).peer(a, b, gbps(8)).directed_peer(c, b, gbps(4));
        let second = second.shared("switch", gbps(5), [b]).no_access(a, c).within(c, a);
        let both = first.clone().and(second);
        let speeds = |from, to| -> Vec<u64> {
            let route = both.route(from, to);
            route.iter().map(|&s| both.segments()[s].bandwidth.get() / 1_000_000_000).collect()
        };
        assert_eq!((speeds(DeviceId::CPU, a), speeds(DeviceId::CPU, b)), (vec![1], vec![5, 3]));
        assert_eq!((speeds(a, b), speeds(b, a), speeds(c, b)), (vec![2], vec![2], vec![4]));
        assert!(!both.reaches(c, a) && both.reaches(a, c) && both.memory_of(c) == DeviceId::CPU);
        assert_eq!((first.clone().and(Topology::new()), Topology::new().and(first.clone())), (first.clone(), first));
    }

    #[test]
    fn memory_is_within_memory_that_is_nowhere_else() {
        let [a, b, c, d] = [0, 1, 2, 3].map(DeviceId::cuda);
        let memories = |topology: &Topology| [a, b, c, d].map(|device| topology.memory_of(device));
        let chain = Topology::new().within(a, b).within(b, c);
        assert_eq!(memories(&chain), [c, c, c, d]);
        assert_eq!(memories(&Topology::new().within(b, c).within(a, b)), [c, c, c, d]);
        assert_eq!(memories(&chain.clone().within(c, d)), [d, d, d, d]);
        assert_eq!(memories(&chain.within(c, a)), [a, a, a, d]);
    }

    #[test]
    fn what_does_not_hold_together_is_not_read() {
        let (a, b) = (DeviceId::cuda(0), DeviceId::cuda(1));
        let whole = Topology::new().link(a, gbps(26)).peer(a, b, gbps(50)).shared("switch", gbps(30), [a, b]);
        let whole = serde_json::to_value(whole.within(b, DeviceId::CPU)).unwrap();
        let reads = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut json = whole.clone();
            change(&mut json);
            serde_json::from_value::<Topology>(json).map_err(|error| error.to_string())
        };
        assert_eq!(serde_json::to_value(reads(&|_| {}).unwrap()).unwrap(), whole);
        let fault = reads(&|json| drop(json["segments"].as_array_mut().unwrap().pop())).unwrap_err();
        assert!(fault.contains("has 4 segments, and names one at 4"), "{fault}");
        assert!(reads(&|json| json["links"]["cuda:0"][1] = 7.into()).is_err());
        assert!(reads(&|json| json["peers"]["cuda:0"]["cuda:1"] = 7.into()).is_err());
        assert!(reads(&|json| json["within"]["cpu"] = "disk".into()).is_err());
        let fault = reads(&|json| json["segments"][0]["bandwidth"] = 0.into()).unwrap_err();
        assert!(fault.contains("no bytes a second"), "{fault}");
    }

    #[test]
    fn the_directions_of_a_link_can_differ() {
        let (a, b) = (DeviceId::cuda(0), DeviceId::cuda(1));
        let topology = Topology::new().directed_link(a, gbps(1), gbps(2)).directed_peer(a, b, gbps(9)).no_access(b, a);
        let speeds = |from, to| -> Vec<u64> {
            let route = topology.route(from, to);
            route.iter().map(|&s| topology.segments()[s].bandwidth.get() / 1_000_000_000).collect()
        };
        assert_eq!((speeds(a, DeviceId::CPU), speeds(DeviceId::CPU, a)), (vec![1], vec![2]));
        assert_eq!((speeds(a, b), speeds(b, a)), (vec![9], vec![2]));
        assert!(topology.reaches(b, a) && !topology.reaches(a, b));
    }
}
