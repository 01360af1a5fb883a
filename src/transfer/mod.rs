//! Sources of bytes, and the route of bytes that must pass through pinned memory.

mod arbiter;
mod device_reads;
mod engine;
mod file;
mod in_file;
mod landing;
mod lane;
mod mapping;
mod open_files;
mod source;
mod stamp;
mod storage;

pub(crate) use crate::file::read::{Kept, divide};
pub use crate::file::read::{ReadPart, ReadWays};
pub use crate::interrupt::check_interrupt;
pub(crate) use device_reads::{DeviceReads, FilePart, Stretch};
pub(crate) use engine::Engine;
pub use file::FileSource;
pub(crate) use in_file::{InFile, Tensors};
pub(crate) use landing::{Arriving, Landing, Packed, Values, dequantise};
#[cfg(test)]
pub(crate) use lane::Finished;
pub(crate) use lane::{Order, Ordered, PendingOrder, StagingLane};
pub use mapping::MappedSource;
pub use source::{MemorySource, Source};
pub use stamp::Stamp;
pub use storage::{Entry, LocalFiles, PathKind, Storage};

// The locks of a lane's queue; `tests/loom` substitutes others.
use crate::staging::sync;
