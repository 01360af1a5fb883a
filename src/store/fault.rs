//! What an object store's refusals mean.

use std::io;
use std::path::Path;

use object_store::client::{HttpError, HttpErrorKind};

use crate::error::{Error, FileFault};

/// How the message of an answer that is no success begins, before the status and the body.
const STATUS: &str = "Server returned non-2xx status code: ";

/// The addresses at which machines of clouds are asked for credentials.
const METADATA: [&str; 3] = ["169.254.169.254", "169.254.170.2", "metadata.google.internal"];

/// The error of an operation on an object. Its text has no part of a request, and of an answer only the status and the code: both may
/// repeat credentials.
pub(super) fn error(action: &'static str, path: &Path, error: &object_store::Error) -> Error {
    use object_store::Error as E;
    let io = |kind, text: String| Error::io(action, path)(io::Error::new(kind, text));
    match error {
        E::NotFound { .. } => {
            let what = if action == "list" { "bucket" } else { "object" };
            io(io::ErrorKind::NotFound, format!("the store has no such {what}"))
        }
        E::Precondition { .. } => Error::file(path, None, FileFault::Changed),
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
            let answer = answer(error).map_or(String::new(), |answer| format!(" ({answer})"));
            let text = format!("the store refuses it: the credentials are wrong, or do not allow this{answer}");
            io(io::ErrorKind::PermissionDenied, text)
        }
        E::InvalidPath { source } => io(io::ErrorKind::InvalidInput, source.to_string()),
        E::NotSupported { .. } | E::NotImplemented { .. } => {
            io(io::ErrorKind::Unsupported, "this store cannot do that".to_owned())
        }
        _ => {
            let (kind, text) = cause(error);
            io(kind, text)
        }
    }
}

/// The cause of an error, in as far as it can be told.
fn cause(error: &object_store::Error) -> (io::ErrorKind, String) {
    if METADATA.iter().any(|address| error.to_string().contains(address)) {
        let text = "no credentials are set in the environment, and this machine has no service that gives any (for a public bucket of \
                    S3, set AWS_SKIP_SIGNATURE=true)";
        return (io::ErrorKind::PermissionDenied, text.to_owned());
    }
    if let Some(answer) = answer(error) {
        return (io::ErrorKind::Other, format!("the store answers {answer}"));
    }
    // The innermost, as the client found it.
    let Some(http) = chain(error).filter_map(|cause| cause.downcast_ref::<HttpError>()).last() else {
        return (io::ErrorKind::Other, last(error));
    };
    let kind = match http.kind() {
        HttpErrorKind::Timeout => io::ErrorKind::TimedOut,
        HttpErrorKind::Connect => io::ErrorKind::NotConnected,
        HttpErrorKind::Interrupted => io::ErrorKind::ConnectionAborted,
        _ => io::ErrorKind::Other,
    };
    (kind, unreachable(http))
}

/// What is said of a request without an answer.
pub(super) fn unreachable(error: &HttpError) -> String {
    format!("the store cannot be reached: {}", last(error))
}

/// The text of the first cause, unless it may have the text of an answer in it.
fn last(error: &(dyn std::error::Error + 'static)) -> String {
    let text = chain(error).last().map_or(String::new(), ToString::to_string);
    match text.starts_with("Server returned") || text.contains(['<', '"', '{']) {
        true => "its answer is not understood".to_owned(),
        false => text,
    }
}

/// The status of the store's answer, and the code in it: `503 Service Unavailable, SlowDown`.
fn answer(error: &object_store::Error) -> Option<String> {
    let text = chain(error).map(ToString::to_string).find(|text| text.starts_with(STATUS))?;
    let (status, body) = text[STATUS.len()..].split_once(": ").unwrap_or((&text[STATUS.len()..], ""));
    let code = || body.split_once("<Code>")?.1.split_once("</Code>").map(|(code, _)| code);
    let plain = |code: &&str| code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    Some(match code().filter(plain) {
        Some(code) => format!("{status}, {code}"),
        None => status.to_owned(),
    })
}

/// An error and its causes.
fn chain<'e>(
    error: &'e (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'e (dyn std::error::Error + 'static)> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}
