//! Where bytes come from, how fast links are, and the way of bytes that have to pass pinned memory.

mod arbiter;
mod engine;
mod links;
mod mapping;
mod pattern;
mod relay;
mod ring;
mod rota;
mod source;
mod staging;
mod sync;
mod timing;

pub(crate) use engine::Engine;
pub use links::measure_links;
pub use mapping::MappedSource;
pub(crate) use ring::Ring;
pub use source::{FileSource, MemorySource, Source, Stamp};
pub(crate) use staging::{Order, StagedPart, StagingLane, Ticket};
pub use timing::LinkTiming;
