//! Runs [candle](https://github.com/huggingface/candle) models that are larger than one device.
//!
//! [`tensor_offload`] keeps the weights on other devices, on the host or on disk, and copies each block's weights to the
//! compute device in time for its turn. Candle owns all memory that it computes on: the weights that stay and the slots that
//! the others pass through are tensors of candle, so nothing is copied twice.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{Linear, VarBuilder};
//! use tensor_offload::prelude::*;
//! use tensor_offload_candle::{Streamed, cpu_memory};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("model.safetensors");
//! # let tensors = (0..8).map(|k| (format!("layers.{k}.weight"), Tensor::randn(0f32, 1., (16, 16), &Device::Cpu).unwrap()));
//! # candle_core::safetensors::save(&tensors.collect(), &path)?;
//! let model = Model::open(&path)?
//!     .allocator(cpu_memory())
//!     .compute(DeviceId::CPU)
//!     .allocation("cpu,25%;disk,*")?
//!     .load(&Registry::system())?;
//! let mut blocks = Streamed::new(&model, |layer, weights: VarBuilder<'_>| {
//!     Ok(Linear::new(weights.pp(&layer.name).get((16, 16), "weight")?, None))
//! })?;
//! let mut x = Tensor::ones((1, 16), DType::F32, &Device::Cpu)?;
//! for k in 0..8 {
//!     x = blocks.layer_named(&format!("layers.{k}"))?.run(|block| block.forward(&x))?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Every block is built by its own constructor, once for each slot that may hold its layer, and its parameters are views of
//! the slot. So a block must keep the tensors that it gets, or views of them, and must not copy them (`contiguous` of a
//! transposed weight, `cat`, `to_dtype`, `to_device`). The slots hold NaN while blocks are built, so a block that copies
//! computes NaN in its first turn, and [`Error::Copied`] names its layer. What hides NaN hides the copy, too: candle's `relu`,
//! which makes it 0, and integer outputs.
//!
//! Weights of GGUF files stay in their blocks: [`Streamed::quantized`] builds blocks that multiply with them, on the CPU.

mod blocks;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod dtype;
mod error;
mod quantized;
mod views;
mod weights;

pub use blocks::{Block, Output, Streamed};
pub use cpu::cpu_memory;
#[cfg(feature = "cuda")]
pub use cuda::cuda_memory;
pub use error::{Error, Result};
pub use quantized::QuantizedWeight;
pub use weights::LayerWeights;

/// The example of the guide, compiled and run with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/candle.md")]
struct Guide;
