//! Small files of text beside the weights: indexes and configurations.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::format::other_format;
use super::header::HEADER_LIMIT;
use super::looked::Looked;
use crate::error::{Error, FileFault, Result};

/// The mark at the beginning of a text in UTF-8, which some editors write.
pub(super) const MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads a file of UTF-8 text, without the byte order mark. `refuse` makes the error of a file that is none.
///
/// # Errors
/// [`Error::Io`] and [`Error::File`] as of the storage and its sources; those of `refuse`.
pub(crate) fn read_text(look: &Looked<'_>, path: &Path, refuse: impl Fn(String) -> Error) -> Result<String> {
    let source = look.open(path)?;
    let len = source.stamp().len();
    if len > HEADER_LIMIT {
        return Err(refuse(format!("it is {len} bytes long, the limit is {HEADER_LIMIT}")));
    }
    let mut bytes = vec![0; len as usize];
    source.read_at(0, &mut bytes)?;
    if let Some(encoding) = other_encoding(&bytes) {
        return Err(refuse(format!("it is encoded in {encoding}; save it as UTF-8")));
    }
    match other_format(&*source) {
        // JSON is what such a file should be, and of other text its parser tells what it met.
        None | Some(FileFault::Text { kind: "JSON text" | "text", .. }) => {}
        Some(fault) => return Err(Error::file(path, None, fault)),
    }
    if bytes.starts_with(MARK) {
        bytes.drain(..MARK.len());
    }
    String::from_utf8(bytes).map_err(|error| refuse(format!("it is not UTF-8 text: {}", error.utf8_error())))
}

/// Reads a JSON file; `bad` makes the fault of an invalid one.
pub(super) fn read_json<T: DeserializeOwned>(
    look: &Looked<'_>,
    path: &Path,
    bad: impl Fn(String) -> FileFault,
) -> Result<T> {
    let refuse = |reason| Error::file(path, None, bad(reason));
    let text = read_text(look, path, refuse)?;
    serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))
}

/// The encoding that a byte order mark tells, other than UTF-8.
fn other_encoding(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => Some("UTF-32"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("UTF-16"),
        _ => None,
    }
}
