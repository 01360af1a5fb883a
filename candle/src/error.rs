//! What can go wrong between candle and the library.

use std::fmt;

use candle_core::{DType, Shape};
use tensor_offload::DeviceId;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the library, of candle, or of a block that does not fit the weights.
///
/// It converts to candle's own error, so `?` works in functions that return candle's `Result`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The library's.
    Offload(tensor_offload::Error),
    /// Candle's.
    Candle(candle_core::Error),
    /// The model's memory is not candle's: load it with an allocator of this crate.
    NotOfCandle {
        /// The first tensor whose memory is not.
        tensor: String,
    },
    /// Candle's device is no CUDA device.
    NotCuda,
    /// Candle's device works on the per-thread default stream, which is another one in every thread, so its work has no
    /// order with the library's. `Device::new_cuda_with_stream` opens one that has a stream of its own.
    PerThreadStream {
        /// The device.
        device: DeviceId,
    },
    /// The model computes on another device than candle is to.
    OtherDevice {
        /// Candle's device.
        device: DeviceId,
        /// The compute device of the model's plan.
        computes: DeviceId,
    },
    /// The streamer computes on another stream than candle does, so that candle would not wait for the weights. Make it with
    /// [`Streamed::on`](crate::Streamed::on), or with `Streamer::on` and candle's stream.
    OtherStream {
        /// The device.
        device: DeviceId,
    },
    /// No layer has a tensor of this name.
    NoTensor {
        /// The name.
        tensor: String,
    },
    /// A block asked for a tensor of another layer, which is not there in its turn.
    OtherLayer {
        /// The tensor.
        tensor: String,
        /// The layer that the tensor belongs to.
        of: String,
        /// The layer of the block.
        layer: String,
    },
    /// A tensor has another shape than it was asked for.
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        stored: Shape,
        /// The shape that was asked for.
        asked: Shape,
    },
    /// A tensor holds another type than it was asked for. Views cannot be cast; the load can
    /// (`ModelBuilder::cast`).
    Type {
        /// The tensor.
        tensor: String,
        /// Its element type.
        stored: DType,
        /// The element type that was asked for.
        asked: DType,
    },
    /// A tensor holds elements of a type that candle's tensors cannot. Such tensors are loaded, in memory of the library's own.
    Unsupported {
        /// The tensor.
        tensor: String,
        /// Its element type.
        stored: tensor_offload::DType,
    },
    /// A tensor holds blocks of GGML that were asked for as a tensor of candle's. Candle's quantised products take them:
    /// [`Streamed::quantized`](crate::Streamed::quantized), [`LayerWeights::quantized`](crate::LayerWeights::quantized).
    Blocks {
        /// The tensor.
        tensor: String,
        /// Its type.
        stored: tensor_offload::DType,
    },
    /// Quantised products over weights that are streamed were asked for on a device that has none: candle's quantised tensors
    /// on CUDA devices cannot be made over memory that exists.
    QuantizedDevice {
        /// The compute device of the model's plan.
        device: DeviceId,
    },
    /// A block computed NaN in its first turn, from weights that have none: it copied them when it was built, at a time
    /// when the slots held NaN, in place of keeping views. (Or its input had NaN.)
    Copied {
        /// The layer.
        layer: String,
        /// The type of its block.
        block: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Offload(error) => write!(f, "{error}"),
            Error::Candle(error) => write!(f, "{}", without_backtrace(error)),
            Error::NotOfCandle { tensor } => {
                write!(f, "tensor `{tensor}` is not in candle's memory; load the model with an allocator of this crate")
            }
            Error::NotCuda => f.write_str("candle's device is not a CUDA device"),
            Error::PerThreadStream { device } => write!(
                f,
                "candle works on the per-thread default stream of {device}, with which no order can be had; open the device \
                 with `Device::new_cuda_with_stream`"
            ),
            Error::OtherDevice { device, computes } => {
                write!(f, "the model computes on {computes}, and candle on {device}")
            }
            Error::OtherStream { device } => write!(
                f,
                "candle computes on another stream of {device} than the streamer, and would not wait for the weights; give \
                 `Streamed::on` candle's device"
            ),
            Error::NoTensor { tensor } => write!(f, "the model has no tensor `{tensor}`"),
            Error::OtherLayer { tensor, of, layer } => {
                write!(f, "tensor `{tensor}` is of layer `{of}`; the block is of `{layer}` and has its weights alone")
            }
            Error::Shape { tensor, stored, asked } => {
                write!(f, "tensor `{tensor}` has the shape {:?}, not {:?}", stored.dims(), asked.dims())
            }
            Error::Type { tensor, stored, asked } => {
                let (stored, asked) = (stored.as_str(), asked.as_str());
                write!(f, "tensor `{tensor}` holds {stored}, not {asked}; cast it when the model is loaded")
            }
            Error::Unsupported { tensor, stored } if stored.is_ggml_block() => write!(
                f,
                "tensor `{tensor}` holds {stored}, blocks that candle has no products with; cast it when the model is loaded \
                 (`ModelBuilder::cast`, `--cast {tensor}=F32`)"
            ),
            Error::Unsupported { tensor, stored } => {
                write!(f, "tensor `{tensor}` holds {stored}, which candle's tensors cannot hold")
            }
            Error::Blocks { tensor, stored } => write!(
                f,
                "tensor `{tensor}` holds {stored}, blocks that candle's quantised products take; build with \
                 `Streamed::quantized`, have blocks unpacked into slots (`ModelBuilder::unpack`), or cast it when the model is \
                 loaded (`ModelBuilder::cast`, `--cast {tensor}=F32`)"
            ),
            Error::QuantizedDevice { device } => write!(
                f,
                "candle's quantised products can have weights that are streamed on cpu, not on {device}; compute on cpu, have them \
                 unpacked into slots (`ModelBuilder::unpack`, `--unpack BF16`), or cast them when the model is loaded \
                 (`ModelBuilder::cast_floats`, `--cast BF16`)"
            ),
            Error::Copied { layer, block } => write!(
                f,
                "layer `{layer}` computes NaN: its block ({block}) copies weights when it is built, where it should keep \
                 views of them (or the input of its turn has NaN)"
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Offload(error) => Some(error),
            Error::Candle(error) => Some(error),
            _ => None,
        }
    }
}

impl From<tensor_offload::Error> for Error {
    fn from(error: tensor_offload::Error) -> Error {
        Error::Offload(error)
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Error {
        Error::Candle(error)
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> candle_core::Error {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}

/// The library's error for one of candle's.
pub(crate) fn invalid(error: &candle_core::Error) -> tensor_offload::Error {
    tensor_offload::Error::Invalid { reason: without_backtrace(error).to_string() }
}

/// An error of candle's whose text is one line. With `RUST_BACKTRACE` candle prints its backtrace, too.
fn without_backtrace(error: &candle_core::Error) -> &candle_core::Error {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => without_backtrace(inner),
        other => other,
    }
}
