//! The metadata of a file that is to be written.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use super::cursor::NAME_LIMIT;
use super::split;
use super::tensors::StoredShapes;
use super::value::put_text;
use super::{ALIGNMENT, ALIGNMENTS, Gguf, GgufArray, GgufHeader, GgufKind, GgufValue, SHAPE, is_alignment};
use crate::error::{Error, Result};

/// The metadata of a GGUF file to [write](super::write_gguf): entries in order.
///
/// [`Gguf::to_metadata`] gives those of a file that is open, as they are there. A file for llama.cpp needs at least
/// `general.architecture`.
///
/// ```
/// use tensor_offload::checkpoint::{GgufMetadata, GgufValue};
/// let mut metadata = GgufMetadata::new();
/// metadata.set("general.architecture", GgufValue::Text("llama".to_owned()))?;
/// metadata.set("llama.block_count", GgufValue::U32(2))?;
/// metadata.set_array("tokenizer.ggml.tokens", ["<s>", "</s>"].into_iter().collect())?;
/// assert!(metadata.remove("llama.block_count"));
/// assert_eq!(metadata.keys().collect::<Vec<_>>(), ["general.architecture", "tokenizer.ggml.tokens"]);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct GgufMetadata {
    entries: Vec<Entry>,
    /// Of the tensors of the file that they come from.
    pub(super) stored_shapes: StoredShapes,
}

/// An entry: its key, and the number of its type and its value as files have them.
#[derive(Clone)]
struct Entry {
    key: String,
    bytes: Vec<u8>,
}

impl GgufMetadata {
    /// No entries.
    pub fn new() -> GgufMetadata {
        GgufMetadata::default()
    }

    /// Sets the value of `key`. A key that is new comes last.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the key is longer than 65,535 bytes, or the value is [`GgufValue::Array`], which has no elements:
    /// see [`set_array`](GgufMetadata::set_array).
    pub fn set(&mut self, key: impl Into<String>, value: GgufValue) -> Result<()> {
        let (kind, bytes) = value.encoded();
        match kind {
            GgufKind::Array => Err(Error::invalid(format!("`{}`: set an array with its elements", key.into()))),
            _ => self.put(key.into(), [&(kind as u32).to_le_bytes(), &bytes[..]].concat()),
        }
    }

    /// Sets the value of `key` to an array. A key that is new comes last.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the key is longer than 65,535 bytes.
    pub fn set_array(&mut self, key: impl Into<String>, array: GgufArray) -> Result<()> {
        let (kind, head) = GgufValue::Array { kind: array.kind, len: array.len }.encoded();
        self.put(key.into(), [&(kind as u32).to_le_bytes(), &head[..], &array.bytes].concat())
    }

    /// Removes the entry `key`; whether there was one.
    pub fn remove(&mut self, key: &str) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.key != key);
        self.entries.len() < before
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.key.as_str())
    }

    fn put(&mut self, key: String, bytes: Vec<u8>) -> Result<()> {
        let len = key.len() as u64;
        if len > NAME_LIMIT {
            return Err(Error::invalid(format!("a key has {len} bytes, and one of GGUF at most {NAME_LIMIT}")));
        }
        match self.entries.iter_mut().find(|entry| entry.key == key) {
            Some(entry) => entry.bytes = bytes,
            None => self.entries.push(Entry { key, bytes }),
        }
        Ok(())
    }

    /// The alignment that the entries ask for.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is none.
    pub(super) fn alignment(&self) -> Result<u64> {
        let (key, default) = ALIGNMENT;
        let Some(entry) = self.entries.iter().find(|entry| entry.key == key) else { return Ok(default) };
        let number = entry.bytes.strip_prefix(&(GgufKind::U32 as u32).to_le_bytes());
        let number = number.and_then(|number| number.try_into().ok()).map(u32::from_le_bytes);
        let number = number.filter(|number| is_alignment(*number));
        number.map(u64::from).ok_or_else(|| Error::invalid(format!("`{key}` is not {ALIGNMENTS}")))
    }

    /// The entries as files have them, and their number, without those that are for `dropped`.
    pub(super) fn encode(&self, dropped: &HashSet<String>) -> (u64, Vec<u8>) {
        let (mut count, mut bytes) = (0, Vec::new());
        for entry in self.entries.iter().filter(|entry| !dropped.contains(&entry.key)) {
            count += 1;
            put_text(&mut bytes, &entry.key);
            bytes.extend(&entry.bytes);
        }
        (count, bytes)
    }

    /// The key of the shape of a tensor that is stored in another one.
    pub(super) fn key_of_shape(tensor: &str) -> String {
        format!("{SHAPE}{tensor}")
    }
}

impl fmt::Debug for GgufMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.keys()).finish()
    }
}

impl Gguf<'_> {
    /// All entries, byte for byte and in the order of the file, for one that is to be [written](super::write_gguf).
    ///
    /// Of a set, these are the entries for one file that holds all of its tensors: those of the first file, then what only others
    /// have. `split.no`, `split.count` and `split.tensors.count`, which say which file of a set one is, are left out. With the
    /// entries come the shapes of tensors that are stored in another shape (`comfy.gguf.orig_shape.NAME`).
    ///
    /// # Errors
    /// As [`Source::read_at`](crate::transfer::Source::read_at).
    pub fn to_metadata(&self) -> Result<GgufMetadata> {
        let mut metadata = GgufMetadata::new();
        let mut known: HashSet<&str> = split::KEYS.into_iter().collect();
        for (header, source) in self.headers.iter().zip(self.sources) {
            let Some(header) = header else { continue };
            for (key, place) in in_order(header) {
                if !known.insert(key) {
                    continue;
                }
                let mut bytes = vec![0; (place.end - place.start) as usize];
                source.read_at(place.start, &mut bytes)?;
                metadata.entries.push(Entry { key: key.to_owned(), bytes });
            }
            // Each file has its own.
            known.insert(ALIGNMENT.0);
            metadata
                .stored_shapes
                .extend(header.stored_shapes.iter().map(|(name, shapes)| (name.clone(), shapes.clone())));
        }
        Ok(metadata)
    }
}

/// The keys and places of a header's entries, in the order of the file.
fn in_order(header: &GgufHeader) -> Vec<(&str, &Range<u64>)> {
    let mut entries: Vec<_> = header.values.iter().map(|(key, stored)| (key.as_str(), &stored.place)).collect();
    entries.sort_by_key(|(_, place)| place.start);
    entries
}
