//! Run models larger than one device.

pub mod adapter;
mod allocation;
pub mod backend;
mod bytes;
mod cache;
pub mod checkpoint;
pub mod device;
mod dtype;
mod error;
mod float;
mod load;
pub mod patch;
mod plan;
mod registry;
mod stream;
pub mod transfer;

pub use adapter::{Adapter, MatchReport, Matching, Patches, TensorPatch};
pub use allocation::{Allocation, Mode};
pub use bytes::{ByteSize, Human};
pub use cache::{CleanupReport, EntryInfo, ModelCache, Retention, UnloadReport, Unloaded};
pub use checkpoint::Checkpoint;
pub use device::{
    Bandwidth, Described, DeviceId, DeviceInfo, DeviceKind, Machine, MemorySnapshot, MemoryUsage, Topology,
};
pub use dtype::{DType, UnknownDType};
pub use error::{AdapterFault, Error, ErrorKind, FileFault, Result, Shortfall};
pub use load::{Cancel, LoadReport, Loader, Model, Progress, Reservation, Residency, TensorView, WeightStore};
pub use patch::PatchOutcome;
pub use plan::{Assignment, DevicePlan, Estimate, Order, Plan, Planner, SegmentTime, Slots, Unit, Use};
pub use registry::Registry;
pub use stream::{LayerGuard, StreamReport, Streamer};
