//! GGUF files: the header, its metadata, sets of files, and how one is written.
//!
//! A file is the mark `GGUF`, the version, the numbers of tensors and of entries of the metadata, these entries, what is known of
//! each tensor, and the tensors' bytes from the next multiple of the alignment on. See ggml, `docs/gguf.md`, and the reader
//! in `src/gguf.cpp`.
//!
//! The reader refuses what no program writes: names that occur twice, tensors that overlap or leave more than the padding between
//! them, bytes after the last tensor and its padding, rows that end within a block, types that GGML has removed. Whatever a
//! file announces is compared with its length before anything is allocated. Arrays of the metadata are skipped, and read when
//! they are asked for.

mod cursor;
mod metadata;
mod split;
mod tensors;
mod value;
mod write;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::compressed::Sizes;
use super::header::Header;
use crate::error::{Error, GgufFault, Result};
use crate::transfer::Source;
use cursor::Cursor;
use tensors::StoredShapes;
use value::Stored;

pub use metadata::GgufMetadata;
pub(super) use split::{alone, complete, one_set};
pub use value::{GgufArray, GgufKind, GgufValue};
pub use write::write_gguf;

/// The first bytes of a file.
pub(super) const MARK: &[u8] = b"GGUF";

/// The key of the alignment, and the alignment without it.
const ALIGNMENT: (&str, u64) = ("general.alignment", 32);

/// What the key of a tensor's shape begins with, where it is stored in another one.
const SHAPE: &str = "comfy.gguf.orig_shape.";

/// The bytes of the least entry of the metadata: the lengths of a key and a value's type, and a byte.
const LEAST_ENTRY: u64 = 13;

/// The header of a GGUF file, without its tensors.
#[derive(Clone, Debug)]
pub(super) struct GgufHeader {
    version: u32,
    alignment: u64,
    values: BTreeMap<String, Stored>,
    stored_shapes: StoredShapes,
}

impl GgufHeader {
    /// Reads and checks the header of file number `number`, which begins with the [mark](MARK).
    pub(super) fn read(source: &dyn Source, number: usize) -> Result<Header> {
        let mut cursor = Cursor::new(source);
        cursor.skip(MARK.len() as u64)?;
        let version = version(&mut cursor)?;
        let (tensors, entries) = (cursor.u64()?, cursor.u64()?);
        cursor.check_count(|| "tensors".to_owned(), tensors, tensors::LEAST)?;
        let values = entries_of(&mut cursor, entries)?;
        let alignment = alignment(&cursor, &values)?;
        let mut header = GgufHeader { version, alignment, values, stored_shapes: StoredShapes::new() };
        let shape = |name: &str| header.shape(source, name);
        let (tensors, stored_shapes) = tensors::read(&mut cursor, tensors, alignment, shape, number)?;
        header.stored_shapes = stored_shapes;
        Ok(Header {
            metadata: header.texts(),
            tensors,
            compressed: Sizes::default(),
            stored: None,
            gguf: Some(Arc::new(header)),
        })
    }

    /// The values that are not arrays, as text.
    fn texts(&self) -> BTreeMap<String, String> {
        let scalars = self.values.iter().filter(|(_, stored)| !matches!(stored.value, GgufValue::Array { .. }));
        scalars.map(|(key, stored)| (key.clone(), stored.value.to_string())).collect()
    }

    fn value(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key).map(|stored| &stored.value)
    }

    fn array(&self, source: &dyn Source, key: &str) -> Option<Result<GgufArray>> {
        let Stored { value: GgufValue::Array { kind, len }, at, bytes, .. } = self.values.get(key)? else {
            return None;
        };
        let mut array = GgufArray { kind: *kind, len: *len, bytes: vec![0; *bytes as usize] };
        Some(source.read_at(*at, &mut array.bytes).map(|()| array))
    }

    /// The shape that a tensor had before it was stored in another one (city96, ComfyUI-GGUF, `loader.py`, `get_orig_shape`).
    fn shape(&self, source: &dyn Source, tensor: &str) -> Result<Option<Vec<u64>>> {
        let Some(array) = self.array(source, &format!("{SHAPE}{tensor}")) else { return Ok(None) };
        let array = array?;
        let shape = array.integers().and_then(|sides| sides.map(|side| side.try_into().ok()).collect());
        Ok(shape)
    }

    /// Whether it has the shape of a tensor.
    fn has_shape(&self, tensor: &str) -> bool {
        self.values.contains_key(&format!("{SHAPE}{tensor}"))
    }

    /// Whether the model has a head that computes the logits of tokens. Encoders have a token table and none.
    pub(super) fn has_language_head(&self) -> bool {
        // llama.cpp, src/llama-arch.cpp and src/llama-model.cpp: these have no `output`, and no `token_embd` in its place.
        const ENCODERS: [&str; 4] = ["t5encoder", "gemma-embedding", "llama-embed", "clip"];
        let architecture = self.value("general.architecture").and_then(GgufValue::as_str);
        let encoder = |name: &str| name.contains("bert") || ENCODERS.contains(&name);
        architecture.is_some_and(|name| !encoder(name))
    }
}

/// The metadata of a GGUF file, of the first one of a set. [`Checkpoint::gguf`](crate::Checkpoint::gguf) returns it.
///
/// Whatever is not an array is in [`Checkpoint::metadata`](crate::Checkpoint::metadata) too, as text.
#[derive(Clone, Copy, Debug)]
pub struct Gguf<'a> {
    header: &'a GgufHeader,
    /// Those of all files, in order; `None` for files of another format.
    headers: &'a [Option<Arc<GgufHeader>>],
    sources: &'a [Arc<dyn Source>],
}

impl<'a> Gguf<'a> {
    /// `None` if the first file is of another format.
    pub(super) fn of(headers: &'a [Option<Arc<GgufHeader>>], sources: &'a [Arc<dyn Source>]) -> Option<Gguf<'a>> {
        headers.first()?.as_deref().map(|header| Gguf { header, headers, sources })
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// The alignment of the tensors in the file, in bytes.
    pub fn alignment(&self) -> u64 {
        self.header.alignment
    }

    /// `general.architecture`: `llama`, `qwen2`, `flux`, …
    pub fn architecture(&self) -> Option<&'a str> {
        self.get("general.architecture").and_then(GgufValue::as_str)
    }

    /// All entries, in order of key.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a GgufValue)> + use<'a> {
        self.header.values.iter().map(|(key, stored)| (key.as_str(), &stored.value))
    }

    /// The value of `key`; `None` if there is none.
    pub fn get(&self, key: &str) -> Option<&'a GgufValue> {
        self.header.value(key)
    }

    /// The value of `ARCHITECTURE.KEY`, such as `llama.attention.head_count`; `None` if there is none.
    pub fn of_architecture(&self, key: &str) -> Option<&'a GgufValue> {
        self.get(&format!("{}.{key}", self.architecture()?))
    }

    /// Reads the array `key` from the file; `None` if there is no array of this key.
    ///
    /// # Errors
    /// As [`Source::read_at`].
    pub fn array(&self, key: &str) -> Option<Result<GgufArray>> {
        self.header.array(&**self.sources.first()?, key)
    }
}

fn version(cursor: &mut Cursor<'_>) -> Result<u32> {
    const OLD: &str = "convert the model again with a current version of llama.cpp";
    const NEW: &str = "this library is older than the file";
    let version = cursor.u32()?;
    // A number of another byte order, as llama.cpp recognises it.
    let fault = match version {
        2 | 3 => return Ok(version),
        _ if version != 0 && version.trailing_zeros() >= 16 => GgufFault::BigEndian { version: version.swap_bytes() },
        0 | 1 => GgufFault::Version { version, advice: OLD },
        _ => GgufFault::Version { version, advice: NEW },
    };
    Err(cursor.error(fault))
}

fn entries_of(cursor: &mut Cursor<'_>, count: u64) -> Result<BTreeMap<String, Stored>> {
    cursor.check_count(|| "entries of metadata".to_owned(), count, LEAST_ENTRY)?;
    let mut values = BTreeMap::new();
    for _ in 0..count {
        let key = cursor.name()?;
        let value = Stored::read(cursor, &key)?;
        if values.contains_key(&key) {
            return Err(cursor.error(GgufFault::RepeatedKey { key }));
        }
        values.insert(key, value);
    }
    Ok(values)
}

fn alignment(cursor: &Cursor<'_>, values: &BTreeMap<String, Stored>) -> Result<u64> {
    let (key, default) = ALIGNMENT;
    let Some(Stored { value, .. }) = values.get(key) else { return Ok(default) };
    match value {
        GgufValue::U32(alignment) if is_alignment(*alignment) => Ok((*alignment).into()),
        other => Err(cursor.error(unlike(key, other, ALIGNMENTS))),
    }
}

/// What an alignment is.
const ALIGNMENTS: &str = "a power of two of at least 8, of type u32";

fn is_alignment(alignment: u32) -> bool {
    alignment.is_power_of_two() && alignment >= 8
}

/// The fault of a value that is not what it should be.
fn unlike(key: &str, value: &GgufValue, wanted: &'static str) -> GgufFault {
    GgufFault::Value { key: key.to_owned(), found: value.to_string(), wanted }
}

/// Whether a file begins with the mark. A header of safetensors of such a length is over the limit.
pub(super) fn is_gguf(source: &dyn Source) -> Result<bool> {
    let mut start = [0; MARK.len()];
    Ok(source.stamp().len() >= MARK.len() as u64 && source.read_at(0, &mut start).map(|()| start == *MARK)?)
}

/// The error for a fault of a tensor.
fn of_tensor(cursor: &Cursor<'_>, name: &str, error: Error) -> Error {
    match error {
        Error::File { tensor: None, fault, .. } => Error::file(cursor.path(), Some(name), *fault),
        other => other,
    }
}
