//! Run models larger than one device.

pub mod adapter;
mod bytes;
pub mod checkpoint;
pub mod device;
mod dtype;
mod error;
mod float;
pub mod patch;
pub mod transfer;

pub use adapter::{Adapter, MatchReport, Matching, Patches, TensorPatch};
pub use bytes::{ByteSize, Human};
pub use checkpoint::Checkpoint;
pub use device::{
    Bandwidth, Described, DeviceId, DeviceInfo, DeviceKind, Machine, MemorySnapshot, MemoryUsage, Topology,
};
pub use dtype::{DType, UnknownDType};
pub use error::{AdapterFault, Error, ErrorKind, FileFault, Result, Shortfall};
pub use patch::PatchOutcome;
