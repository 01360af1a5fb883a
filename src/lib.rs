//! Run models larger than one device.

mod allocation;
pub mod backend;
mod bytes;
pub mod checkpoint;
pub mod device;
mod dtype;
mod error;
mod plan;
mod registry;
pub mod transfer;

pub use allocation::{Allocation, Mode};
pub use bytes::{ByteSize, Human};
pub use checkpoint::Checkpoint;
pub use device::{
    Bandwidth, Described, DeviceId, DeviceInfo, DeviceKind, Machine, MemorySnapshot, MemoryUsage, Topology,
};
pub use dtype::{DType, UnknownDType};
pub use error::{AdapterFault, Error, ErrorKind, FileFault, Result, Shortfall};
pub use plan::{Assignment, DevicePlan, Estimate, Order, Plan, Planner, SegmentTime, Slots, Unit, Use};
pub use registry::Registry;
