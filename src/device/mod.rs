//! Devices as values: their names, sizes, links, and snapshots of their memory. Nothing here opens a device.

mod bookings;
mod described;
mod gpu;
mod id;
mod info;
mod links;
mod series;
mod snapshot;
mod topology;

pub(crate) use bookings::Bookings;
pub use described::Described;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) use gpu::gpu_uuid;
pub use gpu::{GpuDetails, NvLink, NvLinkEnd, PcieLink};
pub use id::{DeviceId, DeviceKind, KindName};
pub use info::{DeviceInfo, Machine, MemoryUsage};
pub use links::{LeftOut, Link, LinkKind, LinkMatrix};
pub use series::{MemoryDrift, MemorySeries};
pub use snapshot::MemorySnapshot;
pub use topology::{Bandwidth, Segment, Topology};
