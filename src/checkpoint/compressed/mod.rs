//! Tensors that a safetensors file has in compressed form: the [`lossless`] code of each.
//!
//! A compressed tensor `X` is stored as the tensor `X.lossless`, of type U8 in one dimension, which is its code. The file's metadata
//! has an entry of that name, without which it is a tensor like any other: the element type and the shape of `X`, as
//! `BF16 [2, 3]`. So a program that does not know this form misses `X`, and does not take the code for weights.
//!
//! And weights in the form of another program, [DFloat11](dfloat11), which are read only.

pub(super) mod dfloat11;
mod estimate;
mod source;
mod write;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::TensorInfo;
use super::header::Header;
use crate::dtype::DType;
use crate::error::{CodeFault, CompressedFault, Error, FileFault, Result};
use crate::lossless;
use crate::transfer::Source;
use dfloat11::Beside;
pub(crate) use source::CompressedSource;
use source::{Form, Span};

pub use write::{CompressedReport, write_compressed};

/// How the name of a code ends.
const ENDING: &str = ".lossless";

/// The entry of the metadata for a tensor's code.
fn entry(dtype: DType, shape: &[u64]) -> String {
    format!("{dtype} {shape:?}")
}

/// The element type and the shape that an entry says.
fn parse(entry: &str) -> Option<(DType, Vec<u64>)> {
    let (dtype, shape) = entry.split_once(' ')?;
    let (dtype, shape) = (dtype.parse().ok()?, serde_json::from_str(shape).ok()?);
    lossless::compressed_bound(dtype, 0).map(|_| (dtype, shape))
}

/// A file's tensors as they are read, in a source that decompresses what the file has in compressed form.
///
/// # Errors
/// [`FileFault::Compressed`] for an entry of the metadata that its tensor does not fit; [`FileFault::DuplicateKey`] for a tensor that
/// the file has in both forms; those of [`dfloat11::groups`].
pub(super) fn decompressed(
    source: Arc<dyn Source>,
    mut header: Header,
    beside: &Beside<'_>,
) -> Result<(Arc<dyn Source>, Header)> {
    // All begins where it would if the file were not compressed.
    let begin = header.tensors.first().map_or(0, |first| first.offset);
    let groups = if header.gguf.is_some() { Vec::new() } else { dfloat11::groups(&*source, &mut header, beside)? };
    let has_groups = !groups.is_empty();
    let is_code = |tensor: &TensorInfo| tensor.name.ends_with(ENDING) && header.metadata.contains_key(&tensor.name);
    if header.gguf.is_some() || groups.is_empty() && !header.tensors.iter().any(is_code) {
        return Ok((source, header));
    }
    let path = source.path().to_owned();
    let (mut at, mut spans) = (begin, vec![Span { begin: 0, bytes: begin, at: 0, form: Form::Plain }]);
    for tensor in &mut header.tensors {
        let fault = |name: &str, fault: CompressedFault| Error::file(&path, Some(name), fault.into());
        let stored = (tensor.offset, tensor.bytes);
        let entry = tensor.name.ends_with(ENDING).then(|| header.metadata.remove(&tensor.name)).flatten();
        let form = match entry {
            None => Form::Plain,
            Some(entry) => {
                if tensor.dtype != DType::U8 || tensor.shape.len() != 1 {
                    let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                    return Err(fault(&tensor.name, CompressedFault::NotBytes { dtype, shape }));
                }
                let parsed = parse(&entry).and_then(|(dtype, shape)| {
                    let name = tensor.name.strip_suffix(ENDING)?;
                    TensorInfo::new(name, dtype, &shape, tensor.file, at).ok()
                });
                let Some(parsed) = parsed else { return Err(fault(&tensor.name, CompressedFault::Entry { entry })) };
                // What nobody could have stored would be memory, and sums, that there are not.
                let (expected, given) = (lossless::compressed_least(parsed.shape.iter().product()), stored.1);
                if given < expected {
                    return Err(fault(&parsed.name, CodeFault::Length { expected, given }.into()));
                }
                *tensor = parsed;
                header.compressed.insert(tensor.name.clone(), stored.1);
                Form::code(tensor.dtype, stored.1)
            }
        };
        tensor.offset = at;
        spans.push(Span { begin: at, bytes: tensor.bytes, at: stored.0, form });
        let end = at.checked_add(tensor.bytes);
        at = end.ok_or_else(|| {
            let entry = entry_of(tensor);
            fault(&tensor.name, CompressedFault::Entry { entry })
        })?;
    }
    for group in groups {
        let (name, count) = (group.name.clone(), group.stored.weights());
        let end = group.add_to(&mut header, &mut spans, at);
        let too_large = || CompressedFault::Code(CodeFault::TooLarge { count });
        at = end.ok_or_else(|| Error::file(&path, Some(&name), too_large().into()))?;
    }
    let names = header.tensors.iter().map(|tensor| tensor.name.as_str());
    if let Some(name) = super::json::repeated(names) {
        return Err(Error::file(&path, Some(name), FileFault::DuplicateKey));
    }
    let source = Arc::new(CompressedSource::new(source, spans, at));
    header.stored = (!has_groups).then(|| Arc::clone(&source));
    Ok((source, header))
}

fn entry_of(tensor: &TensorInfo) -> String {
    entry(tensor.dtype, &tensor.shape)
}

/// The bytes that each compressed tensor takes in its file.
pub(super) type Sizes = BTreeMap<String, u64>;
