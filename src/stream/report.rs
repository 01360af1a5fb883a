//! Statistics of a streamer, as plain figures.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::lanes::Read;
use crate::bytes::ByteSize;
use crate::device::{DeviceId, Topology};

/// Statistics of a streamer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StreamReport {
    /// Layers handed out. Layers that are entirely resident count as neither hits nor misses.
    pub layers: u64,
    /// Layers that were fetched, or in flight, when they were asked for.
    #[serde(rename = "prefetched")]
    pub hits: u64,
    /// Layers whose fetch began when they were asked for.
    #[serde(rename = "late")]
    pub misses: u64,
    /// Bytes fetched from each device.
    pub bytes: BTreeMap<DeviceId, u64>,
    /// The bytes that were read from a disk for these: as many as come from `disk`, but for those that the host
    /// [keeps](crate::Loader::host_cache), and fewer of files that are [compressed](crate::checkpoint::write_compressed).
    pub read: u64,
    /// The bytes among these that the compute device read straight from files ([GPUDirect Storage](crate::backend::FileReads)), for
    /// all streamers to this device since the first of those that there are.
    pub gds: u64,
    /// Why it did not read others so, if it could have.
    pub not_gds: Vec<String>,
    /// The same bytes, by the route that they took.
    pub lanes: Vec<LaneReport>,
    /// Stalls of the thread that asks for layers, by what it waited for.
    pub stalls: BTreeMap<StallCause, Stalls>,
}

/// The traffic of one route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LaneReport {
    /// The device that the bytes live on.
    pub from: DeviceId,
    /// The compute device.
    pub to: DeviceId,
    /// The kind of route.
    pub via: Via,
    /// The number of parts of layers that were fetched.
    pub fills: u64,
    /// The bytes of these parts.
    pub bytes: u64,
    /// The bytes that were read from a disk for these.
    pub read: u64,
    /// The bytes among these that the host had kept.
    pub kept: u64,
}

/// A kind of route to the compute device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Via {
    /// One copy.
    #[serde(rename = "straight")]
    Direct,
    /// Two copies through host memory, ordered on the devices.
    Host,
    /// Copies through pinned buffers that a thread fills.
    Staging,
    /// No link: the bytes live on the compute device, which [unpacks](crate::Planner::unpack) them into a slot. They are not
    /// counted.
    Local,
}

/// The cause of a stall of the thread that asks for layers. It is displayed, and serialised, as a phrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StallCause {
    /// A copy whose event the compute stream cannot wait for, so that the host waited.
    Copy,
    /// The thread that stages a layer's bytes: the host waited until it had queued the last copy.
    Staging,
}

/// The number of stalls of one cause, and their total time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stalls {
    /// The number of stalls.
    pub count: u64,
    /// Their total time.
    pub time: Duration,
}

impl StreamReport {
    /// The bytes that crossed each segment of `topology`, by the segment's name. `topology` is the machine's or a measured
    /// one. Bytes sent [through the host](Via::Host) cross the segments to and from it.
    pub fn segments<'a>(&self, topology: &'a Topology) -> BTreeMap<&'a str, u64> {
        let mut segments = BTreeMap::new();
        for LaneReport { from, to, via, bytes, .. } in &self.lanes {
            let hops = match via {
                Via::Host => vec![(*from, DeviceId::CPU), (DeviceId::CPU, *to)],
                _ => vec![(*from, *to)],
            };
            for segment in hops.into_iter().flat_map(|(from, to)| topology.route(from, to)) {
                *segments.entry(topology.segments()[segment].name.as_str()).or_default() += bytes;
            }
        }
        segments
    }

    /// Counts a part of a layer that was fetched.
    pub(super) fn sent(&mut self, lane: usize, bytes: u64, read: Read) {
        let lane = &mut self.lanes[lane];
        (lane.fills, lane.bytes) = (lane.fills + 1, lane.bytes + bytes);
        (lane.read, lane.kept) = (lane.read.saturating_add(read.disk), lane.kept + read.kept);
        self.read = self.read.saturating_add(read.disk);
        *self.bytes.entry(lane.from).or_default() += bytes;
    }

    /// Counts a stall.
    pub(super) fn stalled(&mut self, cause: StallCause, time: Duration) {
        let stalls = self.stalls.entry(cause).or_default();
        (stalls.count, stalls.time) = (stalls.count + 1, stalls.time + time);
    }
}

impl Via {
    /// The words after the device in a displayed report.
    fn words(self) -> &'static str {
        match self {
            Via::Direct => "",
            Via::Host => " through the host",
            Via::Staging => " through pinned buffers",
            Via::Local => " itself",
        }
    }
}

impl fmt::Display for StallCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            StallCause::Copy => "a copy that the compute stream cannot wait for",
            StallCause::Staging => "the thread that stages bytes",
        })
    }
}

impl Serialize for StallCause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for StreamReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StreamReport { layers, hits, misses, lanes, stalls, .. } = self;
        write!(f, "{layers} layers, {hits} prefetched, {misses} fetched on demand")?;
        for LaneReport { from, via, bytes, .. } in lanes.iter().filter(|lane| lane.bytes > 0) {
            write!(f, ", {} from {from}{}", ByteSize(*bytes).human(), via.words())?;
        }
        let kept: u64 = lanes.iter().map(|lane| lane.kept).sum();
        if kept > 0 {
            write!(f, ", {} of it kept in host memory", ByteSize(kept).human())?;
        }
        if self.gds > 0 {
            write!(f, ", {} read by GPUDirect Storage", ByteSize(self.gds).human())?;
            self.not_gds.iter().try_for_each(|why| write!(f, ", not by it: {why}"))?;
        }
        for (what, Stalls { count, time }) in stalls {
            write!(f, ", stalled {count} times for {:.3} s on {what}", time.as_secs_f64())?;
        }
        Ok(())
    }
}
