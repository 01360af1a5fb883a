//! Sources of bytes, and the route of bytes that must pass through pinned memory.

mod arbiter;
mod engine;
mod lane;
mod mapping;
mod source;

pub(crate) use engine::Engine;
pub(crate) use lane::{Order, PendingOrder, StagingLane};
pub use mapping::MappedSource;
pub use source::{FileSource, MemorySource, Source, Stamp};

// The locks of a lane's queue; `tests/loom` substitutes others.
use crate::staging::sync;
