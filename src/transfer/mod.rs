//! Where bytes come from, and how fast they get from device to device.

mod links;
mod mapping;
mod pattern;
mod relay;
mod source;
mod timing;

pub use links::measure_links;
pub use mapping::MappedSource;
pub use source::{FileSource, MemorySource, Source, Stamp};
pub use timing::LinkTiming;
