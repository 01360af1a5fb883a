//! A lower bound for the time of a pass.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::value::{Assignment, DeviceWeights, Plan, Use};
use crate::checkpoint::Layout;
use crate::device::{Bandwidth, Topology};

/// The time of one pass through the network when transfers and compute overlap fully: the largest of the
/// compute time and of each segment's bytes over its bandwidth.
///
/// A lower bound, not a forecast: streaming reaches it when the bytes are spread evenly over the layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Estimate {
    /// The time of the pass.
    pub pass: Duration,
    /// The time of the compute alone.
    pub compute: Duration,
    /// The segments that bytes pass, slowest first.
    pub segments: Vec<SegmentTime>,
}

/// The traffic of one segment of the topology in a pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SegmentTime {
    /// The segment's name in the topology.
    pub name: String,
    /// The bytes that pass the segment.
    pub bytes: u64,
    /// The segment's speed.
    pub bandwidth: Bandwidth,
    /// Whether the speed is an [estimate](crate::device::Segment::estimated).
    #[serde(default)]
    pub estimated: bool,
    /// `bytes` over `bandwidth`.
    pub time: Duration,
}

impl Plan {
    /// A lower bound for the time of a pass over `topology`. `compute` is the network's compute time.
    ///
    /// Staged bytes go through the host's memory, so they pass the segments of both routes
    /// ([`Topology::staged_path`]); so do a disk's bytes. If no link is known, transfers take no time. If the slots hold all
    /// streamed layers at once, the estimate is for the first pass; later passes fetch nothing. If every large layer has a
    /// large slot, these layers stay in their slots and do not count.
    pub fn estimate(&self, topology: &Topology, compute: Duration) -> Estimate {
        let mut bytes = vec![0u64; topology.segments().len()];
        let stays = self.stays_in_slots();
        for device in self.devices() {
            let direct = topology.path(device.id, self.compute());
            let staged = topology.staged_path(device.id, self.compute());
            let stays = |staged: bool| stays.iter().filter(move |a| a.device == device.id && a.staged == staged);
            let [stays_staged, stays_direct] =
                [true, false].map(|staged| stays(staged).map(|a| a.taken()).sum::<u64>());
            let DeviceWeights { streamed, staged: all_staged, .. } = device.weights;
            let passes =
                direct.into_iter().map(|segment| (segment, (streamed - all_staged).saturating_sub(stays_direct)));
            let staged = staged.into_iter().map(|segment| (segment, all_staged.saturating_sub(stays_staged)));
            for (segment, passing) in passes.chain(staged) {
                bytes[segment] = bytes[segment].saturating_add(passing);
            }
        }
        let loaded = topology.segments().iter().zip(bytes).filter(|(_, bytes)| *bytes > 0);
        let time = |(segment, bytes): (&crate::device::Segment, u64)| SegmentTime {
            name: segment.name.clone(),
            bytes,
            bandwidth: segment.bandwidth,
            estimated: segment.estimated,
            time: segment.bandwidth.time(bytes),
        };
        let mut segments: Vec<SegmentTime> = loaded.map(time).collect();
        segments.sort_by_key(|segment| std::cmp::Reverse(segment.time));
        let pass = segments.first().map_or(compute, |slowest| slowest.time.max(compute));
        Estimate { pass, compute, segments }
    }

    /// The streamed modules of layers that each have a large slot to themselves.
    fn stays_in_slots(&self) -> Vec<&Assignment> {
        let slots = self.slots();
        let sum = |layer: &[Assignment], bytes: fn(&Assignment) -> u64| {
            let streamed = layer.iter().filter(|a| a.usage == Use::Streamed);
            streamed.map(bytes).fold(0, u64::saturating_add)
        };
        let layers = self.assignments().chunk_by(|a, b| a.layer == b.layer);
        let divided = self.grouping().is_apart() && !self.has_external_slots();
        let unpacks = self.assignments().iter().any(|a| a.usage == Use::Unpacked);
        let large = if divided || unpacks || self.unpacked().is_some() {
            // Which layers are large depends on their tensors, which a plan does not know. No others that stay have more bytes.
            let mut layers: Vec<&[Assignment]> = layers.collect();
            layers.sort_by_key(|layer| std::cmp::Reverse(sum(layer, Assignment::taken)));
            layers.truncate(slots.large);
            layers
        } else {
            let in_slot = |layer: &[Assignment]| sum(layer, |a| Layout::slot_bytes(a.bytes));
            let large: Vec<&[Assignment]> = layers.filter(|layer| in_slot(layer) > slots.bytes_each).collect();
            let stay = slots.large > 0 && large.len() <= slots.large;
            if stay { large } else { Vec::new() }
        };
        large.into_iter().flatten().filter(|a| a.usage == Use::Streamed).collect()
    }

    /// The bytes that move to the compute device in each pass. Large layers that stay in their slots move in the first pass
    /// only.
    pub fn streamed_bytes(&self) -> u64 {
        self.devices().iter().fold(0, |sum, d| sum.saturating_add(d.weights.streamed))
    }

    /// The number of layers that use slots: those with a part that is streamed, or unpacked on the compute device.
    pub(super) fn fetched_layers(&self) -> usize {
        let layers = self.assignments().chunk_by(|a, b| a.layer == b.layer);
        layers.filter(|layer| layer.iter().any(|a| a.usage.is_fetched())).count()
    }

    /// The number of layers with a streamed part.
    pub fn streamed_layers(&self) -> usize {
        let layers = self.assignments().chunk_by(|a, b| a.layer == b.layer);
        layers.filter(|layer| layer.iter().any(|a| a.usage == Use::Streamed)).count()
    }
}

impl Estimate {
    /// The segment that limits the pass; `None` if the compute does.
    pub fn bound(&self) -> Option<&SegmentTime> {
        self.segments.first().filter(|slowest| slowest.time > self.compute)
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a pass takes at least {:.3} s, ", self.pass.as_secs_f64())?;
        match self.bound() {
            Some(SegmentTime { name, bytes, bandwidth, estimated, .. }) => {
                let gb = *bytes as f64 / 1e9;
                let speed = if *estimated { "an estimated " } else { "" };
                write!(
                    f,
                    "limited by {name} ({gb:.2} GB at {speed}{bandwidth} GB/s; compute {:.3} s)",
                    self.compute.as_secs_f64()
                )
            }
            None => f.write_str("limited by compute"),
        }
    }
}
