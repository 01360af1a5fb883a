//! Errors, classified by what a caller can do about them.
//!
//! [`Error`] has a variant for each reaction. Details beyond names and numbers have types in this module; the most common of
//! these are at the root of the crate too.

mod allocation;
mod cast;
mod compressed;
mod dfloat11;
mod fault;
mod gguf;
mod kind;
mod message;
mod packing;
mod plan;
mod request;
mod room;
mod shard;

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use allocation::AllocationError;
pub use cast::CastFault;
pub use compressed::CompressedFault;
pub use dfloat11::DFloat11Fault;
pub use fault::{AdapterFault, FileFault};
pub use gguf::GgufFault;
pub use kind::ErrorKind;
pub use packing::{Packing, PackingFault};
pub use plan::{Contradiction, Limit, PlanFault, PlannedModule, Remedy, Shortfall, Term};
pub use request::{Measured, Mismatch, Missing, NoRows, TensorShape};
pub use room::{Holder, InUse, NoRoom};
pub use shard::ShardFault;

use crate::bytes::ByteSize;
use crate::device::DeviceId;
use crate::dtype::DType;
pub use crate::lossless::CodeFault;

/// The result of this library's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, with the names and numbers that the caller's next move needs. There is one variant for each such move.
///
/// [`source`](std::error::Error::source) returns the cause of an error, if it has one. The message includes the messages of
/// the causes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A text (allocation, size, device) is invalid; change it.
    Allocation(Box<AllocationError>),
    /// A named device is not on this machine (or not in its description).
    UnknownDevice {
        /// The device named.
        device: DeviceId,
        /// The devices there are.
        known: Vec<DeviceId>,
    },
    /// A device of a known kind cannot be opened here.
    DeviceAbsent {
        /// The device named.
        device: DeviceId,
        /// Why not.
        why: String,
    },
    /// This machine can never hold the plan; change the allocation, the depth or the reserve.
    DoesNotFit(Box<Shortfall>),
    /// A plan cannot be used, or cannot be made; change it, or plan again.
    Plan(Box<PlanFault>),
    /// A device is full right now; free something and try again.
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// The bytes requested.
        requested: u64,
        /// The bytes available.
        available: u64,
        /// The most bytes that can be allocated on the device.
        limit: u64,
    },
    /// A device is full, and unloading all that a cache may unload there is not enough; unload one of the named models.
    NoRoom(Box<NoRoom>),
    /// The requested resource is in use; drop a guard, or wait.
    InUse(InUse),
    /// Models that a cache keeps can no longer be read; load them again.
    ModelsLost {
        /// Their keys.
        keys: Vec<String>,
        /// Why the first of them cannot be read.
        cause: Arc<Error>,
    },
    /// Bytes are corrupted: a device, or the link to it, changed them.
    Corrupted {
        /// Which bytes.
        what: String,
    },
    /// A file is invalid, or has changed.
    File {
        /// The file.
        file: PathBuf,
        /// The tensor, if one is to blame.
        tensor: Option<String>,
        /// What is wrong with it.
        fault: Box<FileFault>,
    },
    /// An adapter cannot be applied to this checkpoint.
    Adapter {
        /// The adapter's file or folder.
        adapter: PathBuf,
        /// The key in it, if one is to blame.
        key: Option<String>,
        /// What is wrong.
        fault: Box<AdapterFault>,
    },
    /// No adapter can change this tensor of the checkpoint; replace the checkpoint, or leave the adapter out.
    Unpatchable {
        /// The tensor.
        tensor: String,
        /// The fault of the tensor, or of its scale.
        fault: Box<AdapterFault>,
    },
    /// A tensor cannot be cast; name others, or another type.
    Uncastable {
        /// The tensor.
        tensor: String,
        /// The type that it was to be cast to.
        to: DType,
        /// Why it cannot be.
        fault: Box<CastFault>,
    },
    /// A checkpoint cannot be divided among ranks in this way; take other rules, or another number of ranks.
    Shard {
        /// The tensor, if one is to blame.
        tensor: Option<String>,
        /// Why not.
        fault: Box<ShardFault>,
    },
    /// The system refused an operation on a file.
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried: `open`, `read`, `write`, …
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A device failed and stays failed; place its weights elsewhere.
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// The first failure seen.
        why: String,
    },
    /// A driver refused a call; the device still works.
    Driver {
        /// The device.
        device: DeviceId,
        /// The call.
        call: &'static str,
        /// The driver's name for the result.
        code: String,
        /// The driver's words for it.
        text: String,
    },
    /// A stream cannot copy between these memories; copy through the host, or on a stream of another device.
    Unreachable {
        /// The stream's device.
        stream: DeviceId,
        /// The source memory.
        from: DeviceId,
        /// The destination memory.
        to: DeviceId,
    },
    /// The stream is capturing its work into a graph, which the library's work cannot be part of; queue it before the capture
    /// begins or after it ends.
    Capturing {
        /// The stream's device.
        device: DeviceId,
        /// The operation to be queued.
        operation: &'static str,
    },
    /// This process is a fork of one that uses devices. Their drivers, the threads of their streams and pinned memory stay
    /// with that process: use them there, or start a new program instead of forking.
    Forked {
        /// The process that uses devices.
        parent: u32,
        /// This process.
        child: u32,
    },
    /// The named thing does not exist; name one that does.
    Missing(Missing),
    /// Something has the wrong size; pass one of the right size.
    WrongSize {
        /// What was measured.
        what: Measured,
        /// The required size.
        needed: u64,
        /// The given size.
        given: u64,
    },
    /// Two things do not belong together; pass ones that do.
    Mismatch(Box<Mismatch>),
    /// A wait passed its deadline.
    TimedOut {
        /// What was waited for.
        what: String,
        /// For how long.
        after: Duration,
    },
    /// Queued work failed later; everything that waited for it failed too.
    Failed {
        /// The work.
        operation: &'static str,
        /// The cause, shared by all waiters.
        cause: Arc<Error>,
    },
    /// The caller cancelled the operation; its memory is released.
    Cancelled {
        /// The bytes finished until then.
        done: ByteSize,
        /// The total bytes.
        of: ByteSize,
    },
    /// A bug in this library, or in a backend of another crate; please report it.
    Bug {
        /// What was found.
        what: String,
    },
    /// An argument that cannot be used, or two that contradict each other; `reason` says which.
    Invalid {
        /// What is wrong.
        reason: String,
    },
}

impl Error {
    /// An [`AllocationError::Syntax`].
    pub(crate) fn syntax(text: impl Into<String>, span: std::ops::Range<usize>, expected: impl Into<String>) -> Error {
        AllocationError::Syntax { text: text.into(), span, expected: expected.into() }.into()
    }

    /// An [`Error::File`].
    pub(crate) fn file(file: impl Into<PathBuf>, tensor: Option<&str>, fault: FileFault) -> Error {
        Error::File { file: file.into(), tensor: tensor.map(str::to_owned), fault: Box::new(fault) }
    }

    /// An [`Error::Adapter`].
    pub(crate) fn adapter(adapter: impl Into<PathBuf>, key: Option<&str>, fault: AdapterFault) -> Error {
        Error::Adapter { adapter: adapter.into(), key: key.map(str::to_owned), fault: Box::new(fault) }
    }

    /// An [`Error::Shard`].
    pub(crate) fn shard(tensor: Option<&str>, fault: ShardFault) -> Error {
        Error::Shard { tensor: tensor.map(str::to_owned), fault: Box::new(fault) }
    }

    /// An [`Error::Io`], shaped for `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, action, source }
    }

    /// An [`Error::Bug`].
    pub(crate) fn bug(what: impl Into<String>) -> Error {
        Error::Bug { what: what.into() }
    }

    /// An [`Error::Invalid`].
    pub(crate) fn invalid(reason: impl Into<String>) -> Error {
        Error::Invalid { reason: reason.into() }
    }
}

impl From<AllocationError> for Error {
    fn from(fault: AllocationError) -> Error {
        Error::Allocation(Box::new(fault))
    }
}

/// Lets conversions that cannot fail be used where others can.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Error {
        match never {}
    }
}

impl From<PlanFault> for Error {
    fn from(fault: PlanFault) -> Error {
        Error::Plan(Box::new(fault))
    }
}

impl From<Contradiction> for Error {
    fn from(contradiction: Contradiction) -> Error {
        PlanFault::NotValid(contradiction).into()
    }
}

impl From<InUse> for Error {
    fn from(in_use: InUse) -> Error {
        Error::InUse(in_use)
    }
}

impl From<Missing> for Error {
    fn from(missing: Missing) -> Error {
        Error::Missing(missing)
    }
}

impl From<Mismatch> for Error {
    fn from(mismatch: Mismatch) -> Error {
        Error::Mismatch(Box::new(mismatch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_stays_small() {
        assert!(size_of::<Error>() <= 96, "{}", size_of::<Error>());
    }

    #[test]
    fn messages_hold_both_numbers_and_the_names() {
        let full = Error::OutOfMemory { device: "cuda:1".parse().unwrap(), requested: 10, available: 4, limit: 16 };
        assert_eq!(full.to_string(), "cuda:1 has 4 bytes free of 16, the request needs 10 (6 bytes short)");
        assert_eq!(full.kind().to_string(), "OutOfMemory");
        let none = Error::UnknownDevice { device: "cuda:3".parse().unwrap(), known: vec![DeviceId::CPU] };
        assert_eq!(none.to_string(), "there is no cuda:3 here; there are cpu");
        let short = Error::WrongSize { what: Measured::Tensor { name: "a".to_owned() }, needed: 4, given: 3 };
        assert_eq!(short.to_string(), "tensor `a` has 4 bytes, the buffer for it 3");
    }

    /// The examples print kinds, and what they print stays.
    #[test]
    fn kinds_that_were_invalid_are_still_called_so() {
        let json = |kind: ErrorKind| serde_json::to_value(kind).unwrap();
        for kind in [ErrorKind::Plan, ErrorKind::Missing, ErrorKind::WrongSize, ErrorKind::Bug, ErrorKind::Invalid] {
            assert_eq!((kind.to_string().as_str(), json(kind)), ("Invalid", "Invalid".into()), "{kind:?}");
        }
        for kind in [ErrorKind::Syntax, ErrorKind::ZeroShare, ErrorKind::File, ErrorKind::Cancelled] {
            assert_eq!((kind.to_string(), json(kind)), (format!("{kind:?}"), format!("{kind:?}").into()));
        }
        let whole: Error = AllocationError::ZeroShare { text: "cpu,0%".to_owned() }.into();
        assert_eq!(whole.kind(), ErrorKind::ZeroShare);
    }
}
