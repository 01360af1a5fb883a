//! Faults of requests: names that do not exist, wrong sizes, things that do not belong together.

use std::fmt;
use std::path::PathBuf;

use super::fault::List;
use crate::device::DeviceId;
use crate::dtype::{DType, TensorGrouping};

/// What was requested and does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Missing {
    /// No tensor has this name.
    #[error("{} no tensor `{name}`", layer.as_ref().map_or("there is".to_owned(), |layer| format!("layer {layer} has")))]
    Tensor {
        /// The name.
        name: String,
        /// The layer that was searched; `None` if the whole model was.
        layer: Option<String>,
    },
    /// The index exceeds the number of tensors.
    #[error("{} has {count} tensors, so none at {index}", file.display())]
    TensorAt {
        /// The requested index.
        index: usize,
        /// The number of tensors.
        count: usize,
        /// The checkpoint.
        file: PathBuf,
    },
    /// A tensor is in a file that the checkpoint does not have.
    #[error("tensor `{tensor}` is in file {index} of {count}")]
    File {
        /// The tensor.
        tensor: String,
        /// The index of its file.
        index: usize,
        /// The number of files.
        count: usize,
    },
    /// No module and no tensor has a name like this pattern.
    #[error("no module and no tensor is named like `{pattern}`")]
    Named {
        /// The pattern.
        pattern: String,
    },
    /// No layer has this name.
    #[error("there is no layer `{name}`")]
    Layer {
        /// The name.
        name: String,
    },
    /// The index exceeds the number of layers.
    #[error("there is no layer {index}, the model has {count}")]
    LayerAt {
        /// The requested index.
        index: usize,
        /// The number of layers.
        count: usize,
    },
    /// A cache has no model of this key.
    #[error("the cache has no model `{key}`")]
    Model {
        /// The key.
        key: String,
    },
    /// A plan places nothing on this device.
    #[error("the plan reserves nothing on {device}; it does on {}", List(reserved))]
    Reserved {
        /// The device.
        device: DeviceId,
        /// The devices that it uses.
        reserved: Vec<DeviceId>,
    },
    /// The index exceeds the number of rows.
    #[error("tensor `{tensor}` has {count} rows, so none at {row}")]
    Row {
        /// The tensor.
        tensor: String,
        /// The requested index.
        row: u64,
        /// The number of rows.
        count: u64,
    },
    /// A tensor has no rows of bytes.
    #[error("tensor {tensor} has no rows that can be copied: {why}")]
    Rows {
        /// The tensor.
        tensor: TensorShape,
        /// Why not.
        why: NoRows,
    },
    /// The memory of a tensor is gone, and there is no file to read it from.
    #[error("the memory that held tensor `{tensor}` is gone, and there is no file to read it from")]
    Held {
        /// The tensor.
        tensor: String,
    },
    /// The streams of a device cannot be kept busy for a time.
    #[error("streams of {device} cannot be kept busy for a time, only with work")]
    Occupy {
        /// The device.
        device: DeviceId,
    },
    /// A device cannot unpack a tensor into slots.
    #[error(
        "tensor `{tensor}` cannot be unpacked into slots: {why}; cast it, or plan without `unpack` and compute its values \
         with `LayerGuard::dequantise`"
    )]
    Unpacking {
        /// The tensor.
        tensor: String,
        /// Why not.
        why: String,
    },
    /// A device cannot decode weights that a plan keeps compressed.
    #[error("tensor `{tensor}` cannot be decoded in slots: {why}; plan without `compress` and `compress_resident`")]
    Decoding {
        /// The tensor.
        tensor: String,
        /// Why not.
        why: String,
    },
    /// A device has no memory that is only read, which weights need that are kept compressed.
    #[error(
        "{device} has no memory that is only read, so no weights can be compressed there; plan without `compress` and `compress_resident`"
    )]
    ReadOnly {
        /// The device.
        device: DeviceId,
    },
    /// The memory of a described device has a size and no bytes.
    #[error("the memory of {device} has only sizes, no bytes that could be copied elsewhere")]
    Bytes {
        /// The device.
        device: DeviceId,
    },
}

/// The reason why a tensor has no rows of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoRows {
    /// The tensor has no dimension.
    Scalar,
    /// Its elements are so small that a row is no whole number of bytes.
    PartOfAByte,
    /// It has one dimension, and its elements are encoded in blocks: a row, which is one element, is a part of one.
    PartOfABlock,
}

impl fmt::Display for NoRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            NoRows::Scalar => "it is a scalar",
            NoRows::PartOfAByte => "a row is no whole number of bytes",
            NoRows::PartOfABlock => "a row is a part of a block",
        })
    }
}

/// What has the wrong size. Sizes are in bytes unless stated otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Measured {
    /// The buffer for a tensor.
    Tensor {
        /// Its name.
        name: String,
    },
    /// The memory that an allocator made for a tensor, or for a slot.
    Allocation {
        /// The tensor that it was for; `None` for a slot.
        tensor: Option<String>,
    },
    /// The buffer for rows of a tensor.
    Rows {
        /// The tensor's name.
        name: String,
        /// The number of rows.
        rows: usize,
    },
    /// The buffer for a patched tensor.
    Patched {
        /// Its name.
        name: String,
    },
    /// The bytes of a tensor that the patch of another needs.
    Sibling {
        /// Its name.
        name: String,
    },
    /// The number of tensors that a patch needs.
    Siblings {
        /// Its name.
        name: String,
    },
    /// A byte range of a tensor, by its end.
    Part {
        /// The tensor's name.
        name: String,
        /// Where the range begins.
        at: u64,
    },
    /// The bytes written of a tensor.
    Written {
        /// Its name.
        name: String,
    },
    /// A file, by the end of a tensor in it.
    File {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// A buffer that is split at the size needed.
    Split,
    /// The source of a copy.
    Source,
    /// The destination of a copy.
    Destination,
    /// The memory for the verdict on a code.
    Verdict,
    /// The memory for the factors of a patch.
    Work,
    /// The memory of a matrix that a device patches, by its end.
    Matrix {
        /// The device.
        device: DeviceId,
        /// Where the matrix begins.
        at: usize,
    },
    /// The memory of blocks of a type of GGML, which hold so many values.
    Blocks {
        /// The type.
        dtype: DType,
        /// The number of values.
        values: usize,
    },
    /// The number of slots for streamed layers.
    Slots,
    /// One slot.
    Slot {
        /// Its number.
        number: usize,
    },
}

impl Measured {
    /// Writes what has `given` and needs `needed`.
    pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, needed: u64, given: u64) -> fmt::Result {
        match self {
            Measured::Tensor { name } => write!(f, "tensor `{name}` has {needed} bytes, the buffer for it {given}"),
            Measured::File { path, tensor } => {
                write!(f, "tensor `{tensor}` ends at byte {needed} of {}, which has {given}", path.display())
            }
            Measured::Patched { name } => {
                write!(f, "tensor `{name}` has {needed} bytes once patched, the buffer for it {given}")
            }
            Measured::Allocation { tensor } => {
                let what = of_tensor(tensor.as_deref());
                write!(f, "the allocator made {given} bytes for {what}, which needs {needed}")
            }
            Measured::Rows { name, rows } => {
                write!(f, "{rows} rows of tensor `{name}` have {needed} bytes, the buffer for them {given}")
            }
            Measured::Sibling { name } => write!(f, "tensor `{name}` has {needed} bytes, {given} are given"),
            Measured::Siblings { name } => {
                write!(f, "tensor `{name}` needs {needed} others to be patched, {given} are given")
            }
            Measured::Part { name, at } => {
                write!(f, "tensor `{name}` has {given} bytes, the part from {at} on ends at {needed}")
            }
            Measured::Written { name } => {
                let only = if given < needed { "only " } else { "" };
                write!(f, "tensor `{name}` has {needed} bytes, {only}{given} were written")
            }
            Measured::Split => write!(f, "a buffer of {given} bytes cannot be split at {needed}"),
            Measured::Source => write!(f, "the copy reads up to byte {needed} of a buffer of {given}"),
            Measured::Destination => write!(f, "the copy writes up to byte {needed} of a buffer of {given}"),
            Measured::Verdict => write!(f, "there is a verdict up to byte {needed} of a buffer of {given}"),
            Measured::Work => write!(f, "work memory of {needed} bytes does not fit into {given}"),
            Measured::Matrix { device, at } => {
                write!(f, "the matrix at {at} that {device} is to patch ends at {needed}, in a buffer of {given}")
            }
            Measured::Blocks { dtype, values } => {
                let block = dtype.block().elements;
                write!(f, "{values} values are blocks of {block} in {dtype}, of {needed} bytes, not {given}")
            }
            Measured::Slots => {
                write!(f, "{given} slots were given for layers that are streamed, they need {needed} at least")
            }
            Measured::Slot { number } => write!(f, "slot {number} has {given} bytes, it needs {needed}"),
        }
    }
}

/// Two things that do not belong together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// A model on a device that another registry opened.
    #[error("the model to derive from is on {device} of another registry")]
    Registry {
        /// The device.
        device: DeviceId,
    },
    /// A stream of another device than the model computes on.
    #[error("the model computes on {model}, the stream is of {stream}")]
    Compute {
        /// Where the model computes.
        model: DeviceId,
        /// The stream's device.
        stream: DeviceId,
    },
    /// A stream of a context that is not the device's primary one, which the library uses.
    #[error("the stream is not of the primary context of {device}")]
    Context {
        /// The device.
        device: DeviceId,
    },
    /// Memory of another device than the one that works on it.
    #[error("{what} is on {memory}, {device} works on its own memory")]
    Memory {
        /// What is in that memory.
        what: String,
        /// Where it is.
        memory: DeviceId,
        /// Where it has to be.
        device: DeviceId,
    },
    /// Memory of an allocator for the host that the host cannot address.
    #[error("the memory that the allocator made for {} has no address on the host", of_tensor(tensor.as_deref()))]
    NotOnHost {
        /// The tensor that it was for; `None` for a slot.
        tensor: Option<String>,
    },
    /// A slice of a tensor whose memory others may write.
    #[error("tensor `{tensor}` is in a framework's memory, behind its lock; copy it with to_vec, or read it there")]
    Shared {
        /// The tensor's name.
        tensor: String,
    },
    /// A slice of a tensor that is not in memory as it is: it is compressed there, or in its file.
    #[error("tensor `{tensor}` is in a file, or compressed, and is read or decoded for each use; copy it with to_vec")]
    ReadForEachUse {
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor that was read as another element type.
    #[error("tensor `{tensor}` holds {dtype}, not {asked}")]
    Element {
        /// The tensor's name.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// The requested element type.
        asked: DType,
    },
    /// A plan that divides tensors otherwise than an allocator needs it.
    #[error("tensors on {device} are allocated {needed}, the plan has them {planned}; plan with Planner::grouping")]
    Grouping {
        /// The allocator's device.
        device: DeviceId,
        /// The division of the plan.
        planned: TensorGrouping,
        /// The division that the allocator needs.
        needed: TensorGrouping,
    },
    /// A tensor that is cast, in a patch that is to be applied in place.
    #[error(
        "tensor `{tensor}` is cast from {dtype} to {asked}, which is not done in place; use TensorPatch::apply_from"
    )]
    InPlace {
        /// The tensor's name.
        tensor: String,
        /// Its element type in the checkpoint.
        dtype: DType,
        /// The element type that it is cast to.
        asked: DType,
    },
    /// A part of a tensor is to be patched, and its change needs more of the tensor than the part.
    #[error("the change of tensor `{tensor}` needs more of it than this part; use Weights::read")]
    PartOfTensor {
        /// The tensor's name.
        tensor: String,
    },
    /// A type of other elements, where blocks of GGML are to be read.
    #[error("{dtype} is no block type of GGML")]
    NoBlocks {
        /// The type.
        dtype: DType,
    },
    /// A type that values cannot become.
    #[error("values become blocks of {}, not of {dtype}", List(written))]
    NotWritten {
        /// The type.
        dtype: DType,
        /// Those that they can become.
        written: Vec<DType>,
    },
    /// Memory of one device behind the charge of another.
    #[error("memory of {device} for a charge of {charge}")]
    Charge {
        /// The device that was asked for memory.
        device: DeviceId,
        /// The device that the charge is of.
        charge: DeviceId,
    },
    /// A patch that the stream of another backend has sent.
    #[error("the patch for {device} was sent by another backend's stream")]
    Sender {
        /// The device of the patch.
        device: DeviceId,
    },
}

/// The words for what memory is for: a tensor, or a slot.
fn of_tensor(tensor: Option<&str>) -> String {
    tensor.map_or_else(|| "a slot".to_owned(), |tensor| format!("tensor `{tensor}`"))
}

/// A tensor as an error names it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorShape {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
}

impl fmt::Display for TensorShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ({} {:?})", self.name, self.dtype, self.shape)
    }
}
