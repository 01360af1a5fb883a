//! The header of a file, and how one of safetensors is read.
//!
//! A file is the header's length (8 bytes, little endian), the header (a JSON object), and the tensors' bytes without
//! a gap. See <https://github.com/huggingface/safetensors#format>.
//!
//! The parser refuses duplicate names, ranges that overlap or leave holes, bytes after the last tensor, sizes that do not
//! match the shape, and headers over the format's limit; the error names the tensor. It accepts what real files contain:
//! empty tensors, scalars, unsorted headers, padding, unaligned offsets.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, Visitor};

use super::TensorInfo;
use super::compressed::{CompressedSource, Sizes};
use super::format::other_format;
use super::gguf::{self, GgufHeader};
use super::json::{Entries, repeated};
use crate::dtype::DType;
use crate::error::{Error, FileFault, Result};
use crate::transfer::Source;

/// The longest header that the format's reference reader accepts, in bytes.
pub(super) const HEADER_LIMIT: u64 = 100_000_000;

/// Bytes of the header's length.
pub(super) const LENGTH_BYTES: u64 = 8;

/// The key of the free text among the tensors' names.
pub(super) const METADATA_KEY: &str = "__metadata__";

/// The contents of a header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, String>,
    /// In order of offset.
    pub(super) tensors: Vec<TensorInfo>,
    /// The bytes in the file of the tensors that it has in compressed form.
    pub(super) compressed: Sizes,
    /// The file as it is stored, if it has codes.
    pub(super) stored: Option<Arc<CompressedSource>>,
    /// The metadata of a GGUF file.
    pub(super) gguf: Option<Arc<GgufHeader>>,
}

impl Header {
    /// Reads and checks the header of file number `number`.
    pub(super) fn read(source: &dyn Source, number: usize) -> Result<Header> {
        if gguf::is_gguf(source)? {
            return GgufHeader::read(source, number);
        }
        Header::read_safetensors(source, number).map_err(|error| match (&error, other_format(source)) {
            (Error::File { .. }, Some(fault)) => Error::file(source.path(), None, fault),
            _ => error,
        })
    }

    fn read_safetensors(source: &dyn Source, number: usize) -> Result<Header> {
        let (path, file_len) = (source.path(), source.stamp().len());
        let truncated = |expected| Error::file(path, None, FileFault::Truncated { expected, actual: file_len });
        if file_len < LENGTH_BYTES {
            return Err(truncated(LENGTH_BYTES));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        source.read_at(0, &mut length)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_LIMIT {
            let fault = FileFault::HeaderTooLarge { bytes: length, limit: HEADER_LIMIT };
            return Err(Error::file(path, None, fault));
        }
        let data_start = LENGTH_BYTES + length;
        if file_len < data_start {
            return Err(truncated(data_start));
        }
        let mut json = vec![0; length as usize];
        source.read_at(LENGTH_BYTES, &mut json)?;
        let raw = RawHeader::parse(&json, path)?;
        let tensors = raw.tensors.into_iter().map(|(name, entry)| entry.check(name, path)).collect::<Result<_>>()?;
        let tensors = check_ranges(tensors, path, data_start, file_len)?;
        let tensors = tensors.into_iter().map(|t| TensorInfo { file: number, ..t }).collect();
        Ok(Header { metadata: raw.metadata, tensors, compressed: Sizes::default(), stored: None, gguf: None })
    }
}

/// Sorts tensors with offsets from the header's end, refuses overlaps and holes, and makes the offsets relative to the start
/// of the file.
fn check_ranges(mut tensors: Vec<TensorInfo>, path: &Path, data_start: u64, file_len: u64) -> Result<Vec<TensorInfo>> {
    tensors.sort_by_key(|t| (t.offset, t.bytes));
    let mut end = 0;
    for index in 0..tensors.len() {
        let tensor = &tensors[index];
        let range = tensor.offset..tensor.offset + tensor.bytes;
        let fault = if range.start < end {
            // The first tensor begins at or after 0, so this one has a predecessor.
            Some(FileFault::Overlap { range: range.clone(), other: tensors[index - 1].name.clone() })
        } else if range.start > end {
            Some(FileFault::Hole { hole: end..range.start })
        } else {
            None
        };
        if let Some(fault) = fault {
            return Err(Error::file(path, Some(&tensor.name), fault));
        }
        end = range.end;
    }
    let expected = data_start.saturating_add(end);
    if expected > file_len {
        return Err(Error::file(path, None, FileFault::Truncated { expected, actual: file_len }));
    }
    if expected < file_len {
        return Err(Error::file(path, None, FileFault::TrailingBytes { extra: file_len - expected }));
    }
    tensors.iter_mut().for_each(|t| t.offset += data_start);
    Ok(tensors)
}

/// The parsed header: its names are unique, its tensors unchecked.
#[derive(Default)]
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawTensor)>,
}

impl RawHeader {
    fn parse(json: &[u8], path: &Path) -> Result<RawHeader> {
        let (mut header, mut current) = (RawHeader::default(), None);
        let mut parser = serde_json::Deserializer::from_slice(json);
        let seed = HeaderSeed { header: &mut header, current: &mut current };
        let parsed = seed.deserialize(&mut parser).and_then(|()| parser.end());
        parsed.map_err(|error| {
            let fault = FileFault::BadHeader { reason: error.to_string() };
            Error::file(path, current.as_deref(), fault)
        })?;
        match repeated(header.tensors.iter().map(|(name, _)| name.as_str())) {
            Some(name) => Err(Error::file(path, Some(name), FileFault::DuplicateKey)),
            None => Ok(header),
        }
    }
}

/// A tensor's entry, unchecked.
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawTensor {
    /// Checks what can be seen from the entry alone; the offset counts from the header's end.
    fn check(self, name: String, path: &Path) -> Result<TensorInfo> {
        let refuse = |fault| Err(Error::file(path, Some(&name), fault));
        // The block types of GGML are none of this format.
        let Some(dtype) = self.dtype.parse().ok().filter(|dtype: &DType| !dtype.is_ggml_block()) else {
            return refuse(FileFault::UnknownDType { name: self.dtype });
        };
        let (begin, end) = self.data_offsets;
        let Some(actual) = end.checked_sub(begin) else {
            return refuse(FileFault::BackwardRange { begin, end });
        };
        let expected = dtype.bytes_of(&self.shape);
        if expected != Some(actual) {
            return refuse(FileFault::WrongSize { dtype, shape: self.shape, expected, actual });
        }
        Ok(TensorInfo { name, dtype, shape: self.shape, bytes: actual, file: 0, offset: begin })
    }
}

/// Fills a header and leaves the key being read in `current`, so that an error can name it.
struct HeaderSeed<'a> {
    header: &'a mut RawHeader,
    current: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata: Option<BTreeMap<String, String>> = None;
        while let Some(key) = map.next_key::<String>()? {
            *self.current = Some(key.clone());
            if key == METADATA_KEY {
                // The format's reader takes `null` for none.
                let text = map.next_value::<Option<Entries<String>>>()?.unwrap_or(Entries(Vec::new()));
                if let Some(key) = text.repeated() {
                    return Err(de::Error::custom(format_args!("the key `{key}` occurs twice")));
                }
                if metadata.replace(text.0.into_iter().collect()).is_some() {
                    return Err(de::Error::custom(format_args!("{METADATA_KEY} occurs twice")));
                }
            } else {
                self.header.tensors.push((key, map.next_value()?));
            }
            *self.current = None;
        }
        self.header.metadata = metadata.unwrap_or_default();
        Ok(())
    }
}

impl<'de> Deserialize<'de> for RawTensor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawTensor, D::Error> {
        struct TensorVisitor;

        impl<'de> Visitor<'de> for TensorVisitor {
            type Value = RawTensor;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawTensor, A::Error> {
                let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    let twice = match key.as_str() {
                        "dtype" => dtype.replace(map.next_value()?).is_some(),
                        "shape" => shape.replace(map.next_value()?).is_some(),
                        "data_offsets" => data_offsets.replace(map.next_value()?).is_some(),
                        // Parsed in full, so that what is accepted does not depend on the key.
                        _ => map.next_value::<serde_json::Value>().map(|_| false)?,
                    };
                    if twice {
                        return Err(de::Error::custom(format_args!("the field `{key}` occurs twice")));
                    }
                }
                Ok(RawTensor {
                    dtype: dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| de::Error::missing_field("shape"))?,
                    data_offsets: data_offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?,
                })
            }
        }

        deserializer.deserialize_map(TensorVisitor)
    }
}
