//! What a layout is made of: tensors, modules, layers, and the factors of deferred changes.

use serde::Serialize;

use crate::checkpoint::id::{LayerId, ModuleId, TensorId};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// One stored tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// The size in bytes.
    pub bytes: u64,
    /// The index of the checkpoint's file that holds it; of a [factor](Factors), that of the weight's file.
    pub file: usize,
    /// The offset of its bytes in that file; of a factor, that of the weight's bytes.
    pub offset: u64,
}

impl TensorInfo {
    /// A tensor whose bytes begin at `offset` of file number `file`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the size exceeds `u64`, or a row is not a whole number of blocks of the type.
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[u64], file: usize, offset: u64) -> Result<TensorInfo> {
        let name = name.into();
        let bytes = dtype.bytes_of(shape).ok_or_else(|| {
            Error::invalid(format!("tensor `{name}`: {dtype} {shape:?}: {}", dtype.why_no_size(shape)))
        })?;
        Ok(TensorInfo { name, dtype, shape: shape.to_vec(), bytes, file, offset })
    }
}

/// The tensors that belong to one operation: `X.weight`, `X.bias`, `X.weight_scale`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Module {
    /// The module's id.
    #[serde(skip)]
    pub id: ModuleId,
    /// The prefix of its tensors' names.
    pub name: String,
    /// The layer of the module.
    pub layer: LayerId,
    /// Its name inside the layer; empty when the layer is this module.
    pub role: String,
    /// Its tensors.
    pub tensors: Vec<TensorId>,
    /// The bytes of its tensors, without those that alias another module's.
    pub bytes: u64,
    /// The module whose storage all of its tensors alias (tied weights); its own bytes are then 0.
    pub alias_of: Option<ModuleId>,
    /// Whether it is an embedding that the model uses at both ends.
    #[serde(rename = "both_ends")]
    pub tied: bool,
    /// The module whose weight's [factors](Factors) it holds, if it holds any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factors_of: Option<ModuleId>,
}

/// The tensors of a weight's low-rank change that is not merged into it; see [`Weights::defer`](crate::Weights::defer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Factors {
    /// The weight.
    #[serde(skip)]
    pub weight: TensorId,
    /// The factor that is applied first, `X.lora_A.weight`.
    #[serde(skip)]
    pub a: TensorId,
    /// The factor that is applied to its result, `X.lora_B.weight`.
    #[serde(skip)]
    pub b: TensorId,
}

/// Modules that run together; the unit of streaming.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Layer {
    /// The layer's id.
    #[serde(skip)]
    pub id: LayerId,
    /// The numbered prefix (`model.layers.7`), or the name of its only module.
    pub name: String,
    /// Its modules.
    pub modules: Vec<ModuleId>,
    /// The bytes of its modules.
    pub bytes: u64,
    /// The class: layers of one class have the same roles, element types and sizes.
    pub class: usize,
}
