//! Where bytes come from.

mod mapping;
mod source;

pub use mapping::MappedSource;
pub use source::{FileSource, MemorySource, Source, Stamp};
