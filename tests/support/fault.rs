//! Errors on files.

use tensor_offload::Error;
use tensor_offload::error::FileFault;

/// Takes an error on a file apart, having checked that its message names the file and the tensor.
pub(crate) fn parts(error: Error, path: &str) -> (Option<String>, FileFault) {
    let message = error.to_string();
    let Error::File { file, tensor, fault } = error else { panic!("{message}") };
    assert!(file.ends_with(path) && message.contains(path), "{message}");
    assert!(tensor.as_ref().is_none_or(|name| message.contains(&format!("`{name}`"))), "{message}");
    (tensor, *fault)
}
