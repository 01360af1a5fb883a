//! The variants of errors without their contents.

use std::fmt;

use serde::{Serialize, Serializer};

use super::{AllocationError, Error};

/// The kind of an [`Error`], to match on and to report.
///
/// It prints and serialises as its name; but those below [`ErrorKind::Invalid`], which were all of that kind once, as
/// `Invalid`, so that who reads reports finds what they know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is described at the variant of Error or AllocationError that has its name")]
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
    Plan,
    InUse,
    Corrupted,
    Unpatchable,
    Uncastable,
    Shard,
    Unreachable,
    Missing,
    WrongSize,
    Mismatch,
    Bug,
}

impl Error {
    /// The kind, for matching and for reports; that of the cause for [`Error::Failed`].
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Allocation(error) => error.kind(),
            Error::UnknownDevice { .. } => ErrorKind::UnknownDevice,
            Error::DeviceAbsent { .. } => ErrorKind::DeviceAbsent,
            Error::DoesNotFit(_) => ErrorKind::DoesNotFit,
            Error::Plan(_) => ErrorKind::Plan,
            Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Error::NoRoom(_) => ErrorKind::NoRoom,
            Error::InUse(_) => ErrorKind::InUse,
            Error::ModelsLost { .. } => ErrorKind::ModelsLost,
            Error::Corrupted { .. } => ErrorKind::Corrupted,
            Error::File { .. } => ErrorKind::File,
            Error::Adapter { .. } => ErrorKind::Adapter,
            Error::Unpatchable { .. } => ErrorKind::Unpatchable,
            Error::Uncastable { .. } => ErrorKind::Uncastable,
            Error::Shard { .. } => ErrorKind::Shard,
            Error::Io { .. } => ErrorKind::Io,
            Error::DeviceLost { .. } => ErrorKind::DeviceLost,
            Error::Driver { .. } => ErrorKind::Driver,
            Error::Unreachable { .. } => ErrorKind::Unreachable,
            Error::Capturing { .. } => ErrorKind::Capturing,
            Error::Forked { .. } => ErrorKind::Forked,
            Error::Missing(_) => ErrorKind::Missing,
            Error::WrongSize { .. } => ErrorKind::WrongSize,
            Error::Mismatch(_) => ErrorKind::Mismatch,
            Error::TimedOut { .. } => ErrorKind::TimedOut,
            Error::Failed { cause, .. } => cause.kind(),
            Error::Cancelled { .. } => ErrorKind::Cancelled,
            Error::Bug { .. } => ErrorKind::Bug,
            Error::Invalid { .. } => ErrorKind::Invalid,
        }
    }
}

impl AllocationError {
    fn kind(&self) -> ErrorKind {
        match self {
            AllocationError::Syntax { .. } => ErrorKind::Syntax,
            AllocationError::MixedModes { .. } => ErrorKind::MixedModes,
            AllocationError::DuplicateDevice { .. } => ErrorKind::DuplicateDevice,
            AllocationError::MultipleRemainders { .. } => ErrorKind::MultipleRemainders,
            AllocationError::ZeroShare { .. } => ErrorKind::ZeroShare,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ErrorKind::{
            Bug, Corrupted, InUse, Invalid, Mismatch, Missing, Plan, Shard, Uncastable, Unpatchable, Unreachable,
            WrongSize,
        };
        let printed = match self {
            Plan | InUse | Corrupted | Unpatchable | Uncastable | Shard | Unreachable | Missing | WrongSize
            | Mismatch | Bug => &Invalid,
            other => other,
        };
        fmt::Debug::fmt(printed, f)
    }
}

impl Serialize for ErrorKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
