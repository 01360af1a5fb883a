//! What most programs name: `use tensor_offload::prelude::*;`.

pub use crate::{
    Adapter, Allocation, ByteSize, Checkpoint, DType, DeviceId, Element, Error, LayerGuard, Loader, Machine, Matching,
    Model, ModelBuilder, ModelCache, Plan, Planner, Registry, Result, Retention, Streamer, TensorView, Use, Weights,
};
