//! What errors say, and what caused them.

use std::error::Error as StdError;
use std::fmt::{self, Display};

use super::Error;
use super::fault::List;

impl Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Allocation(error) => error.fmt(f),
            Error::UnknownDevice { device, known } => {
                write!(f, "there is no {device} here; there are {}", List(known))
            }
            Error::DeviceAbsent { device, why } => write!(f, "{device} cannot be opened: {why}"),
            Error::DoesNotFit(shortfall) => shortfall.fmt(f),
            Error::Plan(fault) => fault.fmt(f),
            Error::OutOfMemory { device, requested, available, limit } => {
                let short = requested.saturating_sub(*available);
                write!(
                    f,
                    "{device} has {available} bytes free of {limit}, the request needs {requested} ({short} bytes short)"
                )
            }
            Error::NoRoom(no_room) => no_room.fmt(f),
            Error::InUse(in_use) => in_use.fmt(f),
            Error::ModelsLost { keys, cause } => write!(f, "the cache lost {}: {cause}", keys.join(", ")),
            Error::Corrupted { what } => f.write_str(what),
            Error::File { file, tensor, fault } => {
                write!(f, "{}{}: {fault}", file.display(), Part(", tensor", tensor.as_deref()))
            }
            Error::Adapter { adapter, key, fault } => {
                write!(f, "{}{}: {fault}", adapter.display(), Part(", key", key.as_deref()))
            }
            Error::Unpatchable { tensor, fault } => write!(f, "tensor `{tensor}`: {fault}"),
            Error::Uncastable { tensor, to, fault } => write!(f, "tensor `{tensor}` cannot be cast to {to}: {fault}"),
            Error::Shard { tensor, fault } => match tensor {
                Some(tensor) => write!(f, "tensor `{tensor}` cannot be divided: {fault}"),
                None => write!(f, "the checkpoint cannot be divided: {fault}"),
            },
            Error::Io { path, action, source } => write!(f, "cannot {action} {}: {source}", path.display()),
            Error::DeviceLost { device, why } => write!(f, "{device} is lost: {why}"),
            Error::Driver { device, call, code, text } => write!(f, "{device}: {call} failed with {code}: {text}"),
            Error::Unreachable { stream, from, to } => write!(
                f,
                "a stream of {stream} cannot copy from {from} to {to}; copy through the host, or on another device's stream"
            ),
            Error::Capturing { device, operation } => write!(
                f,
                "a stream of {device} is being captured: {operation} cannot be part of a graph, queue it before the capture begins"
            ),
            Error::Forked { parent, child } => {
                write!(f, "process {child} is a fork of {parent}, which has the devices; they cannot be used here")
            }
            Error::Missing(missing) => missing.fmt(f),
            Error::WrongSize { what, needed, given } => what.write(f, *needed, *given),
            Error::Mismatch(mismatch) => mismatch.fmt(f),
            Error::TimedOut { what, after } => write!(f, "timed out after {after:?} waiting for {what}"),
            Error::Failed { operation, cause } => write!(f, "{operation} failed: {cause}"),
            Error::Cancelled { done, of } => write!(f, "cancelled after {} of {}", done.human(), of.human()),
            Error::Bug { what } => write!(f, "{what}; this is a bug, please report it"),
            Error::Invalid { reason } => f.write_str(reason),
        }
    }
}

/// A part of a file by name, where one is named.
struct Part<'a>(&'static str, Option<&'a str>);

impl Display for Part<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.map_or(Ok(()), |name| write!(f, "{} `{name}`", self.0))
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::ModelsLost { cause, .. } | Error::Failed { cause, .. } => Some(&**cause),
            Error::File { fault, .. } => Some(&**fault),
            Error::Adapter { fault, .. } | Error::Unpatchable { fault, .. } => Some(&**fault),
            Error::Uncastable { fault, .. } => Some(&**fault),
            Error::Shard { fault, .. } => Some(&**fault),
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;
    use crate::error::{AdapterFault, FileFault};

    fn io_error() -> Error {
        Error::io("read", "model.safetensors")(io::Error::other("the disk is gone"))
    }

    /// From the outermost error to what nothing has caused.
    fn chain<'e>(error: &'e (dyn StdError + 'static)) -> Vec<&'e (dyn StdError + 'static)> {
        std::iter::successors(Some(error), |&error| error.source()).collect()
    }

    #[test]
    fn every_wrapper_gives_its_cause() {
        let failed = Error::Failed { operation: "a copy", cause: Arc::new(io_error()) };
        let lost = Error::ModelsLost { keys: vec!["a".to_owned()], cause: Arc::new(failed) };
        let links = chain(&lost);
        let [_, failed, read, system] = links[..] else { panic!("{links:?}") };
        assert!(matches!(failed.downcast_ref(), Some(Error::Failed { operation: "a copy", .. })));
        assert!(matches!(read.downcast_ref(), Some(Error::Io { action: "read", .. })));
        assert_eq!(system.downcast_ref::<io::Error>().map(ToString::to_string).as_deref(), Some("the disk is gone"));
        // Who only prints the outermost loses nothing.
        assert!(links.windows(2).all(|pair| pair[0].to_string().ends_with(&pair[1].to_string())), "{lost}");
        let file = Error::file("model.safetensors", Some("a"), FileFault::Changed);
        assert_eq!(chain(&file)[1].downcast_ref(), Some(&FileFault::Changed));
        let unsupported = AdapterFault::Unsupported { kind: "such".to_owned() };
        let adapter = Error::adapter("lora.safetensors", None, unsupported.clone());
        assert_eq!(chain(&adapter)[1].downcast_ref(), Some(&unsupported));
        let tensor = Error::Unpatchable { tensor: "a".to_owned(), fault: Box::new(unsupported.clone()) };
        assert_eq!(chain(&tensor)[1].downcast_ref(), Some(&unsupported));
    }
}
