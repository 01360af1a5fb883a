//! What a streamer did, as plain figures.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::bytes::ByteSize;
use crate::device::{DeviceId, Topology};

/// What a streamer did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StreamReport {
    /// Layers handed out. Those with nothing to bring, all resident, are in neither of the next two.
    pub layers: u64,
    /// Those of them that had been fetched, or were on their way, when they were asked for.
    #[serde(rename = "prefetched")]
    pub hits: u64,
    /// Those whose fetch began when they were asked for.
    #[serde(rename = "late")]
    pub misses: u64,
    /// Bytes sent for from each device.
    pub bytes: BTreeMap<DeviceId, u64>,
    /// The same by the way that they took.
    pub lanes: Vec<LaneReport>,
    /// How often and how long the thread that asks for layers was held up, by what it waited for.
    pub stalls: BTreeMap<StallCause, Stalls>,
}

/// What went one way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LaneReport {
    /// Where the bytes live.
    pub from: DeviceId,
    /// The compute device.
    pub to: DeviceId,
    /// How they get there.
    pub via: Via,
    /// How often a layer's part was sent for.
    pub fills: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// How bytes get to the compute device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Via {
    /// In one copy.
    Straight,
    /// Through host memory, in two copies that the devices order.
    Host,
    /// Through pinned buffers that a thread fills.
    Staging,
}

/// What the thread that asks for layers waited for. It prints, and serialises, as the words for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StallCause {
    /// A copy whose event the compute stream cannot wait for, so that the host did.
    Copy,
    /// The thread that stages a layer's bytes, until it had queued the last of its copies.
    Staging,
}

/// How often something was waited for, and for how long in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stalls {
    /// How often.
    pub count: u64,
    /// For how long.
    pub time: Duration,
}

impl StreamReport {
    /// The bytes that passed each segment of `topology`, by its name: the machine's, or one that was measured. Bytes
    /// that were staged pass the host on their way.
    pub fn segments<'a>(&self, topology: &'a Topology) -> BTreeMap<&'a str, u64> {
        let mut segments = BTreeMap::new();
        for LaneReport { from, to, via, bytes, .. } in &self.lanes {
            let ways = match via {
                Via::Host => vec![(*from, DeviceId::CPU), (DeviceId::CPU, *to)],
                _ => vec![(*from, *to)],
            };
            for segment in ways.into_iter().flat_map(|(from, to)| topology.route(from, to)) {
                *segments.entry(topology.segments()[segment].name.as_str()).or_default() += bytes;
            }
        }
        segments
    }

    /// Counts a layer's part that was sent for.
    pub(super) fn sent(&mut self, lane: usize, bytes: u64) {
        let lane = &mut self.lanes[lane];
        (lane.fills, lane.bytes) = (lane.fills + 1, lane.bytes + bytes);
        *self.bytes.entry(lane.from).or_default() += bytes;
    }

    /// Counts a wait.
    pub(super) fn stalled(&mut self, cause: StallCause, time: Duration) {
        let stalls = self.stalls.entry(cause).or_default();
        (stalls.count, stalls.time) = (stalls.count + 1, stalls.time + time);
    }
}

impl Via {
    /// What a report says after the device.
    fn words(self) -> &'static str {
        match self {
            Via::Straight => "",
            Via::Host => " through the host",
            Via::Staging => " through pinned buffers",
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
        for (what, Stalls { count, time }) in stalls {
            write!(f, ", stalled {count} times for {:.3} s on {what}", time.as_secs_f64())?;
        }
        Ok(())
    }
}
