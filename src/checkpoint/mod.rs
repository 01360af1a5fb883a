//! What a model is made of: tensors, grouped into modules and layers.

mod layout;

pub use layout::{Layer, Layout, Module, TensorInfo};
