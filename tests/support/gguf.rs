//! A writer of GGUF files for tests, which writes whatever it is told, right or wrong. After ggml, `docs/gguf.md`.

use tensor_offload::DType;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    /// The number of the type of the elements, and these.
    Array(u32, Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
    /// A number of a type, and bytes.
    Raw(u32, Vec<u8>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl Value {
    pub(crate) fn number(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::Text(_) => 8,
            Value::Array(..) => 9,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
            Value::Raw(number, _) => *number,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Value::U8(n) => out.extend(n.to_le_bytes()),
            Value::I8(n) => out.extend(n.to_le_bytes()),
            Value::U16(n) => out.extend(n.to_le_bytes()),
            Value::I16(n) => out.extend(n.to_le_bytes()),
            Value::U32(n) => out.extend(n.to_le_bytes()),
            Value::I32(n) => out.extend(n.to_le_bytes()),
            Value::F32(n) => out.extend(n.to_le_bytes()),
            Value::Bool(truth) => out.push((*truth).into()),
            Value::Text(text) => put_text(out, text.as_bytes()),
            Value::Array(kind, values) => {
                out.extend(kind.to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| value.put(out));
            }
            Value::U64(n) => out.extend(n.to_le_bytes()),
            Value::I64(n) => out.extend(n.to_le_bytes()),
            Value::F64(n) => out.extend(n.to_le_bytes()),
            Value::Raw(_, bytes) => out.extend(bytes),
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// The number of its type.
    pub(crate) kind: u32,
    /// Its shape, outermost first.
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
    /// The offset, if it is not the next one.
    pub(crate) offset: Option<u64>,
}

/// A file.
#[derive(Clone, Debug)]
pub(crate) struct Gguf {
    pub(crate) version: u32,
    pub(crate) alignment: u64,
    pub(crate) entries: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
    /// The numbers of tensors and entries, if they are not those there are.
    pub(crate) counts: [Option<u64>; 2],
}

impl Gguf {
    pub(crate) fn new(architecture: &str) -> Gguf {
        let entries = vec![("general.architecture".to_owned(), architecture.into())];
        Gguf { version: 3, alignment: 32, entries, tensors: Vec::new(), counts: [None; 2] }
    }

    pub(crate) fn entry(mut self, key: impl Into<String>, value: impl Into<Value>) -> Gguf {
        self.entries.push((key.into(), value.into()));
        self
    }

    /// A tensor of these bytes.
    pub(crate) fn tensor(mut self, name: impl Into<String>, dtype: DType, shape: &[u64], bytes: Vec<u8>) -> Gguf {
        let kind = dtype.ggml_number().expect("a type of GGUF files");
        self.tensors.push(Tensor { name: name.into(), kind, shape: shape.to_vec(), bytes, offset: None });
        self
    }

    /// A tensor of bytes that depend on its name.
    pub(crate) fn some(self, name: &str, dtype: DType, shape: &[u64]) -> Gguf {
        let bytes = dtype.bytes_of(shape).expect("whole blocks") as usize;
        let mut random = super::Random::of(7, name);
        self.tensor(name, dtype, shape, random.elements(dtype, bytes))
    }

    /// The header as it is, and the tensors' bytes, each padded.
    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.counts[0].unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.counts[1].unwrap_or(self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            put_text(&mut out, key.as_bytes());
            out.extend(value.number().to_le_bytes());
            value.put(&mut out);
        }
        let mut next = 0u64;
        for Tensor { name, kind, shape, bytes, offset } in &self.tensors {
            put_text(&mut out, name.as_bytes());
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|side| out.extend(side.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.unwrap_or(next).to_le_bytes());
            next = (next + bytes.len() as u64).next_multiple_of(self.alignment);
        }
        for Tensor { bytes, .. } in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
            out.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        out
    }
}
