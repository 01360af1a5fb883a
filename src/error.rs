//! Errors: one variant for each way a caller can react.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::bytes::ByteSize;
use crate::device::DeviceId;
use crate::dtype::DType;

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
    /// The part that passes the limit: `weights`, `slots`, `scratch` or `reserve`.
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

/// What is wrong with a model file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// The file ends before what its header announces.
    #[error("truncated: {expected} bytes expected, the file has {actual}")]
    Truncated {
        /// Bytes that the header announces.
        expected: u64,
        /// Bytes that there are.
        actual: u64,
    },
    /// Bytes after the last tensor.
    #[error("{extra} bytes follow the last tensor")]
    TrailingBytes {
        /// How many.
        extra: u64,
    },
    /// The header's length passes the format's limit.
    #[error("the header is said to be {bytes} bytes long, the limit is {limit}")]
    HeaderTooLarge {
        /// Its announced length.
        bytes: u64,
        /// The format's limit.
        limit: u64,
    },
    /// The header is no JSON, or not of the format's form.
    #[error("the header is not a safetensors header: {reason}")]
    BadHeader {
        /// What the parser met.
        reason: String,
    },
    /// A name stands twice in a header or an index.
    #[error("the name stands twice")]
    DuplicateKey,
    /// The element type is none of the format's.
    #[error("its element type `{name}` is none of the safetensors format")]
    UnknownDType {
        /// The name in the file.
        name: String,
    },
    /// The byte range ends before it begins.
    #[error("its byte range ends at {end}, before it begins at {begin}")]
    BackwardRange {
        /// Where it is said to begin.
        begin: u64,
        /// Where it is said to end.
        end: u64,
    },
    /// Two tensors share bytes.
    #[error("its bytes {}..{} overlap those of `{other}`", range.start, range.end)]
    Overlap {
        /// This tensor's bytes.
        range: Range<u64>,
        /// The other tensor.
        other: String,
    },
    /// Bytes that belong to no tensor.
    #[error("the {} bytes before it, {}..{}, belong to no tensor", hole.end - hole.start, hole.start, hole.end)]
    Hole {
        /// The unclaimed bytes.
        hole: Range<u64>,
    },
    /// The byte range does not hold the shape.
    #[error("{dtype} {shape:?} takes {} bytes, its range holds {actual}", expected.map_or("an uncountable number of".to_owned(), |n| n.to_string()))]
    WrongSize {
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes of that shape; none over `u64` or when they do not end on a byte.
        expected: Option<u64>,
        /// Bytes of the range.
        actual: u64,
    },
    /// The file is of another format; the text names it.
    #[error("this is {format}, which is not read: {advice}")]
    OtherFormat {
        /// What it looks like.
        format: &'static str,
        /// What to do instead.
        advice: &'static str,
    },
    /// A folder of several weight files without an index.
    #[error("{} safetensors files and no index that says which belong together: {}", files.len(), List(files))]
    NoIndex {
        /// The files' names.
        files: Vec<String>,
    },
    /// A folder with several indexes.
    #[error("{} indexes, of which one has to be opened by name: {}", files.len(), List(files))]
    SeveralIndexes {
        /// The indexes' names.
        files: Vec<String>,
    },
    /// The index is no JSON, or not of the form that sharded checkpoints use.
    #[error("this is not the index of a sharded checkpoint: {reason}")]
    BadIndex {
        /// What the parser met.
        reason: String,
    },
    /// The model's configuration is no JSON.
    #[error("this is not a model's configuration: {reason}")]
    BadConfig {
        /// What the parser met.
        reason: String,
    },
    /// A folder without any weights.
    #[error("the folder holds no safetensors file")]
    NoWeights,
    /// Files that an index names and the folder lacks.
    #[error("{} files named by the index are missing: {}", files.len(), List(files))]
    MissingShards {
        /// Their names.
        files: Vec<String>,
    },
    /// A tensor is not in the file that the index names for it.
    #[error("the index places it in {shard}, which does not hold it")]
    NotInShard {
        /// The file named.
        shard: String,
    },
    /// An index entry points out of the folder.
    #[error("the index names `{entry}`, which leaves the folder")]
    LeavesFolder {
        /// The entry.
        entry: String,
    },
    /// The file is not the one that was opened.
    #[error("the file changed while it was in use")]
    Changed,
}

/// What is wrong with an adapter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterFault {
    /// No key of the adapter names a tensor of the checkpoint.
    #[error(
        "none of its {keys} modules is in the checkpoint; it has {}; the checkpoint has {}",
        Sample(adapter_sample),
        Sample(checkpoint_sample)
    )]
    NothingMatches {
        /// How many modules the adapter has.
        keys: usize,
        /// Some of the adapter's names.
        adapter_sample: Vec<String>,
        /// Some of the checkpoint's names.
        checkpoint_sample: Vec<String>,
    },
    /// Some of the adapter's modules are not in the checkpoint.
    #[error("{} of its {keys} modules are not in the checkpoint: {}", unmatched.len(), Sample(unmatched))]
    PartlyMatches {
        /// How many modules the adapter has.
        keys: usize,
        /// Those without a target.
        unmatched: Vec<String>,
    },
    /// A name fits several modules of the checkpoint.
    #[error("the name fits several modules: {}", List(candidates))]
    Ambiguous {
        /// The modules.
        candidates: Vec<String>,
    },
    /// Two tensors of the adapter claim one role.
    #[error("it is for {role}, as `{other}` is")]
    Collision {
        /// The other key.
        other: String,
        /// The module or tensor that both are for.
        role: String,
    },
    /// Tensors of the adapter that no known kind has.
    #[error("{} of its tensors are of no known kind of adapter: {}", keys.len(), Sample(keys))]
    NotUnderstood {
        /// Their keys.
        keys: Vec<String>,
    },
    /// A factor's shape does not fit its target.
    #[error("shape {found:?} does not fit {what} of shape {wanted:?}")]
    Shape {
        /// The shape in the adapter.
        found: Vec<u64>,
        /// What it has to fit.
        what: String,
        /// That one's shape.
        wanted: Vec<u64>,
    },
    /// One half of a pair is missing.
    #[error("its counterpart {missing} is missing")]
    Incomplete {
        /// The missing key.
        missing: String,
    },
    /// A kind of adapter that is not applied.
    #[error("{kind} adapters are not supported")]
    Unsupported {
        /// Its name.
        kind: String,
    },
    /// The rows of queries or keys may be ordered otherwise than in the adapter.
    #[error("the rows of `{target}` may be in another order; say which with Adapter::rotary_rows")]
    RowOrder {
        /// The module of the checkpoint.
        target: String,
    },
    /// An element type that a factor or its target cannot have.
    #[error("{what} has element type {dtype}, which cannot be patched")]
    BadDType {
        /// The factor or the target.
        what: String,
        /// Its type.
        dtype: DType,
    },
    /// A factor holds NaN or an infinity.
    #[error("element {index} is {value}")]
    NotFinite {
        /// Its place in row-major order.
        index: u64,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// `adapter_config.json` is missing, no JSON, or lacks a field.
    #[error("adapter_config.json: {reason}")]
    Config {
        /// What is wrong.
        reason: String,
    },
}

/// Names separated by commas.
struct List<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, item) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{item}")?;
        }
        if self.0.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

/// The first few names of a list, and how many more there are.
struct Sample<'a>(&'a [String]);

impl fmt::Display for Sample<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        let shown = &self.0[..self.0.len().min(SHOWN)];
        write!(f, "{}", List(shown))?;
        if self.0.len() > SHOWN { write!(f, " and {} more", self.0.len() - SHOWN) } else { Ok(()) }
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
