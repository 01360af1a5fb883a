//! The values of the metadata. Arrays stay in the file until they are asked for: a tokenizer has some 100,000 strings.

use std::fmt;
use std::ops::Range;

use super::cursor::Cursor;
use crate::error::{GgufFault, Result};

/// The most arrays within each other. Programs write none in another.
const NESTING: usize = 8;

/// The type of a value of a GGUF file's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum GgufKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

/// The kinds in the order of their numbers in files (ggml, `docs/gguf.md`), with the bytes of a value; 0 where they differ.
const KINDS: [(GgufKind, u64, &str); 13] = [
    (GgufKind::U8, 1, "u8"),
    (GgufKind::I8, 1, "i8"),
    (GgufKind::U16, 2, "u16"),
    (GgufKind::I16, 2, "i16"),
    (GgufKind::U32, 4, "u32"),
    (GgufKind::I32, 4, "i32"),
    (GgufKind::F32, 4, "f32"),
    (GgufKind::Bool, 1, "bool"),
    (GgufKind::Text, 0, "text"),
    (GgufKind::Array, 0, "array"),
    (GgufKind::U64, 8, "u64"),
    (GgufKind::I64, 8, "i64"),
    (GgufKind::F64, 8, "f64"),
];

impl GgufKind {
    /// The bytes of a value; `None` for text and arrays, whose values differ in length.
    fn size(self) -> Option<u64> {
        Some(KINDS[self as usize].1).filter(|size| *size > 0)
    }

    /// The fewest bytes of a value: those of the length of a text, of the type and length of an array.
    fn least(self) -> u64 {
        self.size().unwrap_or(if self == GgufKind::Array { 12 } else { 8 })
    }

    fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<GgufKind> {
        let number = cursor.u32()?;
        let kind = KINDS.get(number as usize).map(|kind| kind.0);
        kind.ok_or_else(|| cursor.error(GgufFault::ValueType { key: key.to_owned(), number }))
    }
}

impl fmt::Display for GgufKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(KINDS[*self as usize].2)
    }
}

/// A value of a GGUF file's metadata.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    /// A text. Bytes that are not UTF-8 are replaced by U+FFFD.
    Text(String),
    /// An array, which is read by [`Gguf::array`](super::Gguf::array).
    Array {
        /// The type of its elements.
        kind: GgufKind,
        /// The number of its elements.
        len: u64,
    },
}

impl GgufValue {
    /// A whole number that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            GgufValue::U8(n) => Some(n.into()),
            GgufValue::U16(n) => Some(n.into()),
            GgufValue::U32(n) => Some(n.into()),
            GgufValue::U64(n) => Some(n),
            GgufValue::I8(n) => n.try_into().ok(),
            GgufValue::I16(n) => n.try_into().ok(),
            GgufValue::I32(n) => n.try_into().ok(),
            GgufValue::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// A floating-point number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            GgufValue::F32(n) => Some(n.into()),
            GgufValue::F64(n) => Some(n),
            _ => None,
        }
    }

    /// A truth value.
    pub fn as_bool(&self) -> Option<bool> {
        if let GgufValue::Bool(truth) = self { Some(*truth) } else { None }
    }

    /// Its kind, and its bytes in a file; none of an array's elements.
    pub(super) fn encoded(&self) -> (GgufKind, Vec<u8>) {
        match self {
            GgufValue::U8(n) => (GgufKind::U8, n.to_le_bytes().to_vec()),
            GgufValue::I8(n) => (GgufKind::I8, n.to_le_bytes().to_vec()),
            GgufValue::U16(n) => (GgufKind::U16, n.to_le_bytes().to_vec()),
            GgufValue::I16(n) => (GgufKind::I16, n.to_le_bytes().to_vec()),
            GgufValue::U32(n) => (GgufKind::U32, n.to_le_bytes().to_vec()),
            GgufValue::I32(n) => (GgufKind::I32, n.to_le_bytes().to_vec()),
            GgufValue::U64(n) => (GgufKind::U64, n.to_le_bytes().to_vec()),
            GgufValue::I64(n) => (GgufKind::I64, n.to_le_bytes().to_vec()),
            GgufValue::F32(n) => (GgufKind::F32, n.to_le_bytes().to_vec()),
            GgufValue::F64(n) => (GgufKind::F64, n.to_le_bytes().to_vec()),
            GgufValue::Bool(truth) => (GgufKind::Bool, vec![u8::from(*truth)]),
            GgufValue::Text(text) => {
                let mut bytes = Vec::new();
                put_text(&mut bytes, text);
                (GgufKind::Text, bytes)
            }
            GgufValue::Array { kind, len } => {
                (GgufKind::Array, [&(*kind as u32).to_le_bytes()[..], &len.to_le_bytes()].concat())
            }
        }
    }

    /// A text.
    pub fn as_str(&self) -> Option<&str> {
        if let GgufValue::Text(text) = self { Some(text) } else { None }
    }
}

impl fmt::Display for GgufValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgufValue::U8(n) => n.fmt(f),
            GgufValue::I8(n) => n.fmt(f),
            GgufValue::U16(n) => n.fmt(f),
            GgufValue::I16(n) => n.fmt(f),
            GgufValue::U32(n) => n.fmt(f),
            GgufValue::I32(n) => n.fmt(f),
            GgufValue::U64(n) => n.fmt(f),
            GgufValue::I64(n) => n.fmt(f),
            GgufValue::F32(n) => n.fmt(f),
            GgufValue::F64(n) => n.fmt(f),
            GgufValue::Bool(truth) => truth.fmt(f),
            GgufValue::Text(text) => f.pad(text),
            GgufValue::Array { kind, len } => write!(f, "an array of {len} {kind}"),
        }
    }
}

/// A value as the reader keeps it: with the place of an array's elements in the file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) value: GgufValue,
    /// Where the elements of an array begin, and their bytes.
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// Where the number of its type and the value lie in the file.
    pub(super) place: Range<u64>,
}

impl Stored {
    /// Reads the value of `key`. Arrays are checked and skipped.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Stored> {
        let from = cursor.at();
        let kind = GgufKind::read(cursor, key)?;
        if kind == GgufKind::Array {
            let (kind, len) = array_head(cursor, key)?;
            let at = cursor.at();
            check_elements(cursor, key, kind, len, 1)?;
            let (value, to) = (GgufValue::Array { kind, len }, cursor.at());
            return Ok(Stored { value, at, bytes: to - at, place: from..to });
        }
        let at = cursor.at();
        let value = if kind == GgufKind::Text {
            let bytes = cursor.u64()?;
            GgufValue::Text(String::from_utf8_lossy(cursor.take(bytes)?).into_owned())
        } else {
            let value = plain(kind, cursor.take(kind.least())?);
            value.map_err(|byte| cursor.error(GgufFault::Bool { key: key.to_owned(), byte }))?
        };
        Ok(Stored { value, at, bytes: 0, place: from..cursor.at() })
    }
}

/// A value of a fixed size; the byte of a truth value that is none.
fn plain(kind: GgufKind, bytes: &[u8]) -> Result<GgufValue, u8> {
    fn of<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes.first_chunk().copied().unwrap_or([0; N])
    }
    Ok(match kind {
        GgufKind::U8 => GgufValue::U8(u8::from_le_bytes(of(bytes))),
        GgufKind::I8 => GgufValue::I8(i8::from_le_bytes(of(bytes))),
        GgufKind::U16 => GgufValue::U16(u16::from_le_bytes(of(bytes))),
        GgufKind::I16 => GgufValue::I16(i16::from_le_bytes(of(bytes))),
        GgufKind::U32 => GgufValue::U32(u32::from_le_bytes(of(bytes))),
        GgufKind::I32 => GgufValue::I32(i32::from_le_bytes(of(bytes))),
        GgufKind::U64 => GgufValue::U64(u64::from_le_bytes(of(bytes))),
        GgufKind::I64 => GgufValue::I64(i64::from_le_bytes(of(bytes))),
        GgufKind::F32 => GgufValue::F32(f32::from_le_bytes(of(bytes))),
        GgufKind::F64 => GgufValue::F64(f64::from_le_bytes(of(bytes))),
        GgufKind::Bool | GgufKind::Text | GgufKind::Array => match of::<1>(bytes) {
            [byte @ 0..=1] => GgufValue::Bool(byte == 1),
            [byte] => return Err(byte),
        },
    })
}

/// The type and the number of an array's elements.
fn array_head(cursor: &mut Cursor<'_>, key: &str) -> Result<(GgufKind, u64)> {
    let kind = GgufKind::read(cursor, key)?;
    let len = cursor.u64()?;
    cursor.check_count(|| format!("elements in `{key}`"), len, kind.least())?;
    Ok((kind, len))
}

/// Goes past the elements of an array, of which `depth` are within each other.
fn check_elements(cursor: &mut Cursor<'_>, key: &str, kind: GgufKind, len: u64, depth: usize) -> Result<()> {
    match (kind, kind.size()) {
        (GgufKind::Bool, _) => {
            // One byte each, so as many as were counted.
            let wrong = cursor.take(len)?.iter().copied().find(|byte| *byte > 1);
            wrong.map_or(Ok(()), |byte| Err(cursor.error(GgufFault::Bool { key: key.to_owned(), byte })))
        }
        (_, Some(size)) => cursor.skip(len.saturating_mul(size)),
        (GgufKind::Text, None) => (0..len).try_for_each(|_| {
            let bytes = cursor.u64()?;
            cursor.skip(bytes)
        }),
        (_, None) if depth >= NESTING => Err(cursor.error(GgufFault::Nesting { key: key.to_owned(), limit: NESTING })),
        (_, None) => (0..len).try_for_each(|_| {
            let (kind, len) = array_head(cursor, key)?;
            check_elements(cursor, key, kind, len, depth + 1)
        }),
    }
}

/// An array of a GGUF file's metadata.
///
/// ```no_run
/// # use tensor_offload::Checkpoint;
/// let model = Checkpoint::open("model.gguf")?;
/// let tokens = model.gguf().and_then(|gguf| gguf.array("tokenizer.ggml.tokens")).transpose()?;
/// let tokens: Vec<&[u8]> = tokens.as_ref().and_then(|tokens| tokens.texts()).into_iter().flatten().collect();
/// # Ok::<(), tensor_offload::Error>(())
/// ```
///
/// One to be written is collected from its elements:
///
/// ```
/// use tensor_offload::checkpoint::{GgufArray, GgufKind};
/// let tokens: GgufArray = ["<s>", "</s>", "a"].into_iter().collect();
/// assert_eq!((tokens.kind(), tokens.len()), (GgufKind::Text, 3));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufArray {
    pub(super) kind: GgufKind,
    pub(super) len: u64,
    pub(super) bytes: Vec<u8>,
}

impl GgufArray {
    /// The type of its elements.
    pub fn kind(&self) -> GgufKind {
        self.kind
    }

    /// The number of its elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as the file has them, little-endian, one after another: each text after its length as u64, each array after
    /// the number of its type as u32 and its length as u64.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The elements of an array of texts, in the bytes of the file, which should be UTF-8; `None` for one of another type.
    pub fn texts(&self) -> Option<impl Iterator<Item = &[u8]>> {
        let mut rest = &self.bytes[..];
        let next = move || {
            let (len, after) = rest.split_first_chunk()?;
            let (text, after) = after.split_at_checked(u64::from_le_bytes(*len) as usize)?;
            rest = after;
            Some(text)
        };
        (self.kind == GgufKind::Text).then(|| std::iter::from_fn(next))
    }

    /// The elements of an array of whole numbers; `None` for one of another type.
    pub fn integers(&self) -> Option<impl Iterator<Item = i128>> {
        let (signed, size) = match self.kind {
            GgufKind::U8 | GgufKind::U16 | GgufKind::U32 | GgufKind::U64 => (false, self.kind.size()?),
            GgufKind::I8 | GgufKind::I16 | GgufKind::I32 | GgufKind::I64 => (true, self.kind.size()?),
            _ => return None,
        };
        Some(self.bytes.chunks_exact(size as usize).map(move |bytes| {
            let fill = if signed && bytes.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 };
            let mut all = [fill; 16];
            all[..bytes.len()].copy_from_slice(bytes);
            i128::from_le_bytes(all)
        }))
    }

    /// The elements of an array of floating-point numbers; `None` for one of another type.
    pub fn floats(&self) -> Option<impl Iterator<Item = f64>> {
        let size = self.kind.size().filter(|_| matches!(self.kind, GgufKind::F32 | GgufKind::F64))?;
        let float = |bytes: &[u8]| plain(self.kind, bytes).ok().and_then(|value| value.as_f64());
        Some(self.bytes.chunks_exact(size as usize).filter_map(float))
    }

    /// The elements of an array of truth values; `None` for one of another type.
    pub fn bools(&self) -> Option<impl Iterator<Item = bool>> {
        (self.kind == GgufKind::Bool).then(|| self.bytes.iter().map(|byte| *byte == 1))
    }
}

/// Arrays collected from elements of these types.
macro_rules! collected {
    ($($element:ty => $kind:ident),* $(,)?) => {$(
        impl FromIterator<$element> for GgufArray {
            fn from_iter<I: IntoIterator<Item = $element>>(elements: I) -> GgufArray {
                let (mut len, mut bytes) = (0, Vec::new());
                for element in elements {
                    len += 1;
                    bytes.extend(element.to_le_bytes());
                }
                GgufArray { kind: GgufKind::$kind, len, bytes }
            }
        }
    )*};
}

collected! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64, f32 => F32, f64 => F64,
}

impl FromIterator<bool> for GgufArray {
    fn from_iter<I: IntoIterator<Item = bool>>(elements: I) -> GgufArray {
        let bytes: GgufArray = elements.into_iter().map(u8::from).collect();
        GgufArray { kind: GgufKind::Bool, ..bytes }
    }
}

impl<'a> FromIterator<&'a str> for GgufArray {
    fn from_iter<I: IntoIterator<Item = &'a str>>(elements: I) -> GgufArray {
        let (mut len, mut bytes) = (0, Vec::new());
        for element in elements {
            len += 1;
            put_text(&mut bytes, element);
        }
        GgufArray { kind: GgufKind::Text, len, bytes }
    }
}

/// A text or name, after its length.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
