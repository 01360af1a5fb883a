//! Errors: one variant for each way a caller can react.

mod fault;

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use fault::List;
pub use fault::{AdapterFault, FileFault};

use crate::bytes::ByteSize;
use crate::device::DeviceId;

/// The result of this library's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the names and numbers that the next move needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text (allocation, size, device) is not of its form; `span` is the place in `text`, in bytes.
    #[error("`{text}`: at {}..{}, `{}`: expected {expected}", span.start, span.end, text.get(span.clone()).unwrap_or(""))]
    Syntax {
        /// The whole text.
        text: String,
        /// The offending part.
        span: Range<usize>,
        /// What would have been right there.
        expected: String,
    },
    /// One allocation string holds entries of two modes.
    #[error("`{first}` is of mode {first_mode} and `{second}` of mode {second_mode}; one allocation holds one mode")]
    MixedModes {
        /// An entry of the first mode.
        first: String,
        /// Its mode.
        first_mode: &'static str,
        /// An entry of the other.
        second: String,
        /// Its mode.
        second_mode: &'static str,
    },
    /// A device stands twice in one allocation string.
    #[error("{device} has two entries: `{first}` and `{second}`")]
    DuplicateDevice {
        /// The device.
        device: DeviceId,
        /// Its first entry.
        first: String,
        /// Its second entry.
        second: String,
    },
    /// Two entries carry `*`.
    #[error("both {first} and {second} are marked `*`; only one device can take the remainder")]
    MultipleRemainders {
        /// The first device marked.
        first: DeviceId,
        /// The second one.
        second: DeviceId,
    },
    /// The weights of a ratio are all zero.
    #[error("every share of `{text}` is zero, so no device would get anything")]
    ZeroShare {
        /// The allocation string.
        text: String,
    },
    /// A device is named that this machine (or the description of one) does not have.
    #[error("there is no {device} here; there are {}", List(known))]
    UnknownDevice {
        /// The device named.
        device: DeviceId,
        /// The devices there are.
        known: Vec<DeviceId>,
    },
    /// A kind of device that the library knows by name, but cannot open here.
    #[error("{device} cannot be opened: {why}")]
    DeviceAbsent {
        /// The device named.
        device: DeviceId,
        /// Why not.
        why: String,
    },
    /// A plan that this machine can never hold; change the allocation, the depth or the reserve.
    #[error(transparent)]
    DoesNotFit(Box<Shortfall>),
    /// A device is full right now; free something and try again.
    #[error("{device} has {} bytes free of {limit}, the request needs {requested} ({} bytes short)", available, requested.saturating_sub(*available))]
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
    #[error(transparent)]
    NoRoom(Box<NoRoom>),
    /// Models that a cache keeps can no longer be read; load them again.
    #[error("the cache lost {}: {cause}", keys.join(", "))]
    ModelsLost {
        /// Their keys.
        keys: Vec<String>,
        /// Why the first of them cannot be read.
        cause: Arc<Error>,
    },
    /// A file is not what it should be.
    #[error("{}{}: {fault}", file.display(), tensor.as_ref().map(|t| format!(", tensor `{t}`")).unwrap_or_default())]
    File {
        /// The file.
        file: PathBuf,
        /// The tensor, where one is to blame.
        tensor: Option<String>,
        /// What is wrong with it.
        fault: Box<FileFault>,
    },
    /// An adapter cannot be applied to this checkpoint.
    #[error("{}{}: {fault}", adapter.display(), key.as_ref().map(|k| format!(", key `{k}`")).unwrap_or_default())]
    Adapter {
        /// The adapter's file or folder.
        adapter: PathBuf,
        /// The key in it, where one is to blame.
        key: Option<String>,
        /// What is wrong.
        fault: Box<AdapterFault>,
    },
    /// The system refused an operation on a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried: `open`, `read`, `write`, …
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A device failed and stays failed; place its weights elsewhere.
    #[error("{device} is lost: {why}")]
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// The first failure seen.
        why: String,
    },
    /// A driver refused a call; the device goes on working.
    #[error("{device}: {call} failed with {code}: {text}")]
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
    /// The stream's work is being captured into a graph, which work of this library's cannot be part of; queue it before
    /// the capture begins or after it has ended.
    #[error(
        "a stream of {device} is being captured: {operation} cannot be part of a graph, queue it before the capture begins"
    )]
    Capturing {
        /// The stream's device.
        device: DeviceId,
        /// What was to be queued.
        operation: &'static str,
    },
    /// This process is a fork of one that uses devices. Their drivers, the threads of their streams and pinned memory stay
    /// with that process: use them there, or start a program of its own.
    #[error("process {child} is a fork of {parent}, which has the devices; they cannot be used here")]
    Forked {
        /// The process that uses devices.
        parent: u32,
        /// This process.
        child: u32,
    },
    /// A wait passed its deadline.
    #[error("waited {after:?} for {what}, in vain")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// For how long.
        after: Duration,
    },
    /// Work that was queued failed later; what waited for it failed with it.
    #[error("{operation} failed: {cause}")]
    Failed {
        /// The work.
        operation: &'static str,
        /// Why, shared by all who waited.
        cause: Arc<Error>,
    },
    /// The caller cancelled the operation; what it had taken is given back.
    #[error("cancelled after {} of {}", done.human(), of.human())]
    Cancelled {
        /// Bytes finished by then.
        done: ByteSize,
        /// Bytes there were.
        of: ByteSize,
    },
    /// A request that contradicts itself or names what is not there; `reason` says which.
    #[error("{reason}")]
    Invalid {
        /// What cannot be.
        reason: String,
    },
}

impl Error {
    /// The variant, for matching and for reports; that of the cause for [`Error::Failed`].
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Syntax { .. } => ErrorKind::Syntax,
            Error::MixedModes { .. } => ErrorKind::MixedModes,
            Error::DuplicateDevice { .. } => ErrorKind::DuplicateDevice,
            Error::MultipleRemainders { .. } => ErrorKind::MultipleRemainders,
            Error::ZeroShare { .. } => ErrorKind::ZeroShare,
            Error::UnknownDevice { .. } => ErrorKind::UnknownDevice,
            Error::DeviceAbsent { .. } => ErrorKind::DeviceAbsent,
            Error::DoesNotFit(_) => ErrorKind::DoesNotFit,
            Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Error::NoRoom(_) => ErrorKind::NoRoom,
            Error::ModelsLost { .. } => ErrorKind::ModelsLost,
            Error::File { .. } => ErrorKind::File,
            Error::Adapter { .. } => ErrorKind::Adapter,
            Error::Io { .. } => ErrorKind::Io,
            Error::DeviceLost { .. } => ErrorKind::DeviceLost,
            Error::Driver { .. } => ErrorKind::Driver,
            Error::Capturing { .. } => ErrorKind::Capturing,
            Error::Forked { .. } => ErrorKind::Forked,
            Error::TimedOut { .. } => ErrorKind::TimedOut,
            Error::Failed { cause, .. } => cause.kind(),
            Error::Cancelled { .. } => ErrorKind::Cancelled,
            Error::Invalid { .. } => ErrorKind::Invalid,
        }
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

    /// An [`Error::Invalid`].
    pub(crate) fn invalid(reason: impl Into<String>) -> Error {
        Error::Invalid { reason: reason.into() }
    }
}

/// The kind of an [`Error`]; its `Display` is the variant's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is described at the variant of Error that has its name")]
pub enum ErrorKind {
    Syntax,
    MixedModes,
    DuplicateDevice,
    MultipleRemainders,
    ZeroShare,
    UnknownDevice,
    DeviceAbsent,
    DoesNotFit,
    OutOfMemory,
    NoRoom,
    ModelsLost,
    File,
    Adapter,
    Io,
    DeviceLost,
    Driver,
    Capturing,
    Forked,
    TimedOut,
    Cancelled,
    Invalid,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why a plan can never be held: the device, the part of the plan that passes its memory, and both numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device} has {limit} bytes {limit_is}{}, the plan needs {needed} there ({term}{}): {short} bytes short", if limit < total { format!(" of {total}") } else { String::new() }, module.as_ref().map(|m| format!(", at {m}")).unwrap_or_default())]
#[non_exhaustive]
pub struct Shortfall {
    /// The device that would be overfull.
    pub device: DeviceId,
    /// The part that passes the limit: `opening` (what opening the device takes), `weights`, `slots`, `scratch` or
    /// `reserve`.
    pub term: &'static str,
    /// The module (for `slots` the layer) at which the limit is passed, where one is.
    pub module: Option<String>,
    /// Bytes that the plan needs on the device.
    pub needed: u64,
    /// Bytes that the device has.
    pub limit: u64,
    /// What the limit is: `free` or `in all`.
    pub limit_is: &'static str,
    /// All bytes of the device, free or not; `limit` where that is unknown.
    pub total: u64,
    /// `needed - limit`.
    pub short: u64,
}

/// Why a cache cannot make room: both numbers, and who holds the device's memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{device} has {available} bytes free, the request needs {requested}: {short} bytes short; it is held by {}",
    Holders(self)
)]
#[non_exhaustive]
pub struct NoRoom {
    /// The device.
    pub device: DeviceId,
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes that can be had now.
    pub available: u64,
    /// Bytes that are missing when all that may go has gone.
    pub short: u64,
    /// The cached models that hold memory there, in order of key.
    pub holders: Vec<Holder>,
    /// Bytes that this process has taken there and no cached model holds.
    pub others: u64,
}

/// A cached model that holds memory of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// Its key.
    pub key: String,
    /// The bytes that it holds there.
    pub bytes: u64,
    /// Whether it is to be kept.
    pub kept: bool,
    /// Whether anyone beside the cache holds it.
    pub in_use: bool,
}

struct Holders<'a>(&'a NoRoom);

impl fmt::Display for Holders<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Holder { key, bytes, kept, in_use } in &self.0.holders {
            let (kept, used) = (if *kept { ", kept" } else { "" }, if *in_use { ", in use" } else { "" });
            write!(f, "`{key}` ({bytes} bytes{kept}{used}), ")?;
        }
        write!(f, "others ({} bytes)", self.0.others)
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
    }
}
