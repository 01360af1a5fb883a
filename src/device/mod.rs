//! Devices as values: their names, sizes, links, and snapshots of their memory. Nothing here opens one.

mod id;
mod info;
mod links;
mod series;
mod snapshot;
mod topology;

pub use id::{DeviceId, DeviceKind, KindName};
pub use info::{Described, DeviceInfo, GpuDetails, Machine, MemoryUsage};
pub use links::{LeftOut, Link, LinkKind, LinkMatrix};
pub use series::{MemoryDrift, MemorySeries};
pub use snapshot::MemorySnapshot;
pub use topology::{Bandwidth, Segment, Topology};
