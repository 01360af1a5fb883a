//! Where bytes come from, and the way of those that have to pass pinned memory.

mod arbiter;
mod engine;
mod lane;
mod mapping;
mod source;

pub(crate) use engine::Engine;
pub(crate) use lane::{Order, StagingLane, Ticket};
pub use mapping::MappedSource;
pub use source::{FileSource, MemorySource, Source, Stamp};

// What the queue of a lane is made of; `tests/loom` has others in its place.
use crate::staging::sync;
