//! Quantised weights: the tensors that stand beside a weight, what they say of it, and which weights are packed into codes.
//!
//! Names and shapes alone tell this, but for the [notes](Note) in ComfyUI's files and what a model's configuration
//! [states](Stated).

mod coded;
mod config;
mod note;
mod packed;
mod shape;
mod siblings;

pub(crate) use coded::Coded;
pub(crate) use config::Stated;
pub(crate) use note::{Format, Note};
pub(crate) use packed::{Packed, packed_modules};
pub(crate) use siblings::{Role, Sibling, Siblings};
