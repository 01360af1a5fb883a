//! What went wrong, by what a caller can do about it.
//!
//! [`Error`] has a variant for each reaction. Where there is more to say than names and numbers, a type of its own says it:
//! those are here, and the ones that are met most are at the root of the crate too.

mod allocation;
mod fault;
mod kind;
mod message;
mod plan;
mod request;
mod room;

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use allocation::AllocationError;
pub use fault::{AdapterFault, FileFault};
pub use kind::ErrorKind;
pub use plan::{Contradiction, Limit, PlanFault, PlannedModule, Remedy, Shortfall, Term};
pub use request::{Measured, Mismatch, Missing, NoRows, TensorShape};
pub use room::{Holder, InUse, NoRoom};

use crate::bytes::ByteSize;
use crate::device::DeviceId;

/// The result of this library's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the names and numbers that the next move needs. There is one variant for each such move.
///
/// Where an error has a cause, [`source`](std::error::Error::source) gives it; the messages of causes are part of the
/// message, too.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A text (allocation, size, device) cannot be used; change it.
    Allocation(Box<AllocationError>),
    /// A device is named that this machine (or the description of one) does not have.
    UnknownDevice {
        /// The device named.
        device: DeviceId,
        /// The devices there are.
        known: Vec<DeviceId>,
    },
    /// A kind of device that the library knows by name, but cannot open here.
    DeviceAbsent {
        /// The device named.
        device: DeviceId,
        /// Why not.
        why: String,
    },
    /// A plan that this machine can never hold; change the allocation, the depth or the reserve.
    DoesNotFit(Box<Shortfall>),
    /// A plan that cannot be used, or cannot be made; change the plan, or plan anew.
    Plan(Box<PlanFault>),
    /// A device is full right now; free something and try again.
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// Bytes asked for.
        requested: u64,
        /// Bytes that could have been had.
        available: u64,
        /// The most that can be taken from the device.
        limit: u64,
    },
    /// A device is full, and what a cache may let go of there does not make the room; unload one of those named.
    NoRoom(Box<NoRoom>),
    /// What was asked for is in use; drop a guard, or wait.
    InUse(InUse),
    /// Models that a cache keeps can no longer be read; load them again.
    ModelsLost {
        /// Their keys.
        keys: Vec<String>,
        /// Why the first of them cannot be read.
        cause: Arc<Error>,
    },
    /// Bytes are not what they should be: a device, or the way to it, has changed them.
    Corrupted {
        /// Which bytes.
        what: &'static str,
    },
    /// A file is not what it should be.
    File {
        /// The file.
        file: PathBuf,
        /// The tensor, where one is to blame.
        tensor: Option<String>,
        /// What is wrong with it.
        fault: Box<FileFault>,
    },
    /// An adapter cannot be applied to this checkpoint.
    Adapter {
        /// The adapter's file or folder.
        adapter: PathBuf,
        /// The key in it, where one is to blame.
        key: Option<String>,
        /// What is wrong.
        fault: Box<AdapterFault>,
    },
    /// A tensor of the checkpoint is such that no adapter can change it; replace the checkpoint, or do without.
    Unpatchable {
        /// The tensor.
        tensor: String,
        /// What is wrong with it, or with the scale beside it.
        fault: Box<AdapterFault>,
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
    /// A driver refused a call; the device goes on working.
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
        /// The memory that bytes were to come from.
        from: DeviceId,
        /// The memory that they were to go to.
        to: DeviceId,
    },
    /// The stream's work is being captured into a graph, which work of this library's cannot be part of; queue it before
    /// the capture begins or after it has ended.
    Capturing {
        /// The stream's device.
        device: DeviceId,
        /// What was to be queued.
        operation: &'static str,
    },
    /// This process is a fork of one that uses devices. Their drivers, the threads of their streams and pinned memory stay
    /// with that process: use them there, or start a program of its own.
    Forked {
        /// The process that uses devices.
        parent: u32,
        /// This process.
        child: u32,
    },
    /// What was asked for is not there; name something that is.
    Missing(Missing),
    /// Something has another size than it needs; pass one of the right size.
    WrongSize {
        /// What was measured.
        what: Measured,
        /// The size that it needs.
        needed: u64,
        /// The size that it has.
        given: u64,
    },
    /// Two things do not belong together; pass those that do.
    Mismatch(Box<Mismatch>),
    /// A wait passed its deadline.
    TimedOut {
        /// What was waited for.
        what: String,
        /// For how long.
        after: Duration,
    },
    /// Work that was queued failed later; what waited for it failed with it.
    Failed {
        /// The work.
        operation: &'static str,
        /// Why, shared by all who waited.
        cause: Arc<Error>,
    },
    /// The caller cancelled the operation; what it had taken is given back.
    Cancelled {
        /// Bytes finished by then.
        done: ByteSize,
        /// Bytes there were.
        of: ByteSize,
    },
    /// What only a mistake in code can lead to, this library's or that of a backend of another crate; please report it.
    Bug {
        /// What was found.
        what: String,
    },
    /// An argument that cannot be used, or two that contradict each other; `reason` says which.
    Invalid {
        /// What cannot be.
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

/// For conversions that cannot fail, where others may.
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
