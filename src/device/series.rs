//! Series of memory snapshots: the memory usage of devices over time, and where the ledger and the driver disagree.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DeviceId, DeviceKind, MemorySnapshot};
use crate::bytes::ByteSize;

/// Snapshots in the order in which they were taken.
///
/// A ledger counts the memory that this process took through the library; the driver reports the memory in use by anyone.
/// Both should report the same change since the first snapshot. If they do not, something takes memory that the ledger does
/// not count: another process, another library, or an allocator's cache, which [`Registry::trim`](crate::Registry::trim)
/// empties. The host and the disk are excluded, since everything on the system uses them.
///
/// Prints a line for each device, with the least and the most in use, then the differences.
///
/// ```
/// use tensor_offload::backend::{Clock, MemoryKind};
/// use tensor_offload::{DeviceId, Machine, Registry};
/// use tensor_offload::device::MemorySeries;
/// let devices = Registry::described(Machine::described(&["cuda:0=1gib".parse()?]), Clock::Virtual);
/// let mut series = MemorySeries::new();
/// series.push(devices.snapshot("start"));
/// let held = devices.device(DeviceId::cuda(0))?.alloc(256 << 20, MemoryKind::Arena)?;
/// series.push(devices.snapshot("loaded"));
/// assert!(series.drifts().is_empty());
/// assert_eq!(series.to_string(), "cuda:0: 0 B at start, most 256.00 MiB at loaded, 256.00 MiB at loaded");
/// # drop(held);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySeries {
    snapshots: Vec<MemorySnapshot>,
    tolerance: u64,
}

/// A disagreement of the ledger and the driver: the change that each reports since the first snapshot of a series.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryDrift {
    /// The tag of the snapshot.
    pub tag: String,
    /// The device.
    pub device: DeviceId,
    /// The growth, in bytes, of this process's allocations as the ledger counts them.
    pub counted: i64,
    /// The growth, in bytes, of the memory in use as the driver reports it.
    pub reported: i64,
}

impl Default for MemorySeries {
    fn default() -> MemorySeries {
        MemorySeries { snapshots: Vec::new(), tolerance: MemorySeries::TOLERANCE.get() }
    }
}

impl MemorySeries {
    /// The default tolerance for a difference between the ledger and the driver. It covers the rounding of allocators and a
    /// driver's own tables. The context that a driver creates when its device is opened takes more; begin a series after
    /// that.
    pub const TOLERANCE: ByteSize = ByteSize(64 << 20);

    /// An empty series with a tolerance of [`TOLERANCE`](MemorySeries::TOLERANCE).
    pub fn new() -> MemorySeries {
        MemorySeries::default()
    }

    /// Sets the tolerated difference between the ledger and the driver.
    #[must_use]
    pub fn tolerance(mut self, bytes: ByteSize) -> MemorySeries {
        self.tolerance = bytes.get();
        self
    }

    /// Adds a snapshot. Also logs its drifts as warnings.
    pub fn push(&mut self, snapshot: MemorySnapshot) {
        self.snapshots.push(snapshot);
        let last = self.snapshots.len() - 1;
        self.drifts_at(last).for_each(|drift| tracing::warn!("{drift}"));
    }

    /// The snapshots.
    pub fn snapshots(&self) -> &[MemorySnapshot] {
        &self.snapshots
    }

    /// The differences between the ledger and the driver that exceed the tolerance, in order of snapshot.
    pub fn drifts(&self) -> Vec<MemoryDrift> {
        (0..self.snapshots.len()).flat_map(|index| self.drifts_at(index)).collect()
    }

    fn drifts_at(&self, index: usize) -> impl Iterator<Item = MemoryDrift> {
        let (first, now) = (&self.snapshots[0], &self.snapshots[index]);
        let own = now.devices.iter().filter(|(id, _)| !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk));
        let drift = |(id, memory): &(DeviceId, super::MemoryUsage)| {
            let (_, then) = first.devices.iter().find(|(device, _)| device == id)?;
            let grown = |now: u64, then: u64| now as i64 - then as i64;
            let allocated = |memory: &super::MemoryUsage| memory.charged.saturating_sub(memory.reserved);
            let (counted, reported) = (grown(allocated(memory), allocated(then)), grown(memory.used(), then.used()));
            let differs = counted.abs_diff(reported) > self.tolerance;
            differs.then(|| MemoryDrift { tag: now.tag.clone(), device: *id, counted, reported })
        };
        own.filter_map(drift)
    }
}

impl fmt::Display for MemorySeries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut of: BTreeMap<DeviceId, Vec<(&str, u64)>> = BTreeMap::new();
        for (snapshot, (id, memory)) in self.snapshots.iter().flat_map(|s| s.devices.iter().map(move |d| (s, d))) {
            of.entry(*id).or_default().push((&snapshot.tag, memory.used()));
        }
        let mut lines = Vec::new();
        for (id, used) in &of {
            let show = |(tag, bytes): &(&str, u64)| format!("{} at {tag}", ByteSize(*bytes).human());
            let most = used.iter().max_by_key(|(_, bytes)| *bytes);
            if let (Some(first), Some(most), Some(last)) = (used.first(), most, used.last()) {
                lines.push(format!("{id}: {}, most {}, {}", show(first), show(most), show(last)));
            }
        }
        lines.extend(self.drifts().iter().map(|drift| format!("warning: {drift}")));
        f.write_str(&lines.join("\n"))
    }
}

impl fmt::Display for MemoryDrift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryDrift { tag, device, counted, reported } = self;
        let apart = ByteSize(counted.abs_diff(*reported));
        write!(
            f,
            "{device} at {tag}: counted {counted:+} bytes, the driver reports {reported:+} ({} apart)",
            apart.human()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::MemoryUsage;

    fn series(readings: &[(&str, DeviceId, MemoryUsage)]) -> MemorySeries {
        let mut series = MemorySeries::new().tolerance(ByteSize(10));
        readings.iter().for_each(|(tag, id, memory)| series.push(MemorySnapshot::new(*tag, [(*id, *memory)])));
        series
    }

    #[test]
    fn memory_that_nobody_counts_is_told_with_both_numbers() {
        let card = DeviceId::cuda(0);
        // Total, free, charged, reserved: others used 100 from the beginning, 50 are reserved, then taken.
        let readings = [
            ("start", card, MemoryUsage::new(1000, 900, 50, 50)),
            ("loaded", card, MemoryUsage::new(1000, 850, 50, 0)),
            ("within", card, MemoryUsage::new(1000, 840, 50, 0)),
            ("beyond", card, MemoryUsage::new(1000, 839, 50, 0)),
            ("kept", card, MemoryUsage::new(1000, 850, 0, 0)),
        ];
        let series = series(&readings);
        let drifts = series.drifts();
        let parted: Vec<_> = drifts.iter().map(|d| (d.tag.as_str(), d.counted, d.reported)).collect();
        assert_eq!(parted, [("beyond", 50, 61), ("kept", 0, 50)]);
        let text = series.to_string();
        assert!(text.starts_with("cuda:0: 100 B at start, most 161 B at beyond, 150 B at kept\n"), "{text}");
        assert!(text.contains("warning: cuda:0 at beyond: counted +50 bytes, the driver reports +61 (11 B apart)"));
        assert!(serde_json::from_str::<MemorySeries>(&serde_json::to_string(&series).unwrap()).unwrap() == series);
    }

    #[test]
    fn the_host_is_everyones() {
        let host = |free| MemoryUsage::new(1000, free, 0, 0);
        let series = series(&[("start", DeviceId::CPU, host(900)), ("later", DeviceId::CPU, host(100))]);
        assert!(series.drifts().is_empty() && series.snapshots().len() == 2);
    }
}
