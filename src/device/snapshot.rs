//! Snapshots of the memory usage of all devices, printed as one line.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DeviceId, MemoryUsage};

/// The memory usage of all devices at one moment, with a tag that names the moment.
///
/// Prints as `tag=after load|cpu=3.25/62.70|cuda:0=1.50/2.00`, used over total in GiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemorySnapshot {
    /// The name of the moment.
    pub tag: String,
    /// Each device and its memory usage, in order of device.
    pub devices: Vec<(DeviceId, MemoryUsage)>,
}

impl MemorySnapshot {
    /// A snapshot of these devices.
    pub fn new(tag: impl Into<String>, devices: impl IntoIterator<Item = (DeviceId, MemoryUsage)>) -> MemorySnapshot {
        let mut devices: Vec<_> = devices.into_iter().collect();
        devices.sort_by_key(|(id, _)| *id);
        MemorySnapshot { tag: tag.into(), devices }
    }
}

impl fmt::Display for MemorySnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tag={}", self.tag)?;
        for (id, memory) in &self.devices {
            let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
            // Small (described) devices would show as zeros with two decimals.
            let decimals = if memory.total >= 1 << 30 { 2 } else { 6 };
            write!(f, "|{id}={:.decimals$}/{:.decimals$}", gib(memory.used()), gib(memory.total))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_order_of_device() {
        let memory = |total: u64, free: u64| MemoryUsage::new(total, free, 0, 0);
        let snapshot = MemorySnapshot::new(
            "loaded",
            [
                (DeviceId::cuda(10), memory(1 << 20, 0)),
                (DeviceId::cuda(2), memory(4 << 30, 1 << 30)),
                (DeviceId::CPU, memory(64 << 30, 63 << 30)),
            ],
        );
        assert_eq!(snapshot.to_string(), "tag=loaded|cpu=1.00/64.00|cuda:2=3.00/4.00|cuda:10=0.000977/0.000977");
    }
}
