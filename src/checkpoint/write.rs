//! Writing files tensor by tensor: what every format has in common, and safetensors.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::header::{HEADER_LIMIT, LENGTH_BYTES, METADATA_KEY};
use super::json::repeated;
use super::temporary::Temporary;
use crate::dtype::DType;
use crate::error::{Error, FileFault, Measured, Result};

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// A tensor of this name, type and shape.
    pub fn new(name: impl Into<String>, dtype: DType, shape: impl Into<Vec<u64>>) -> TensorSpec {
        TensorSpec { name: name.into(), dtype, shape: shape.into() }
    }
}

/// Writes a safetensors file with the tensors in the given order.
///
/// `fill` is called once for each tensor, in order, and writes its bytes (little endian) in pieces of any size, so the
/// model need not fit in memory. The file appears under its name when it is complete and on the disk. Until then,
/// and if anything fails, an existing file of that name is unchanged. Until then the bytes are in a hidden file of the same
/// folder, named `.tensor-offload-…tmp`. A process that is killed leaves it behind; the next write to the folder removes
/// it.
///
/// ```
/// use std::collections::BTreeMap;
/// use tensor_offload::DType;
/// use tensor_offload::checkpoint::{Checkpoint, TensorSpec, write_safetensors};
///
/// let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("ones.safetensors");
/// let tensors = [TensorSpec::new("ones", DType::F32, [2, 2])];
/// write_safetensors(&path, &tensors, &BTreeMap::new(), |_, out| {
///     (0..4).try_for_each(|_| out.put(&1f32.to_le_bytes()))
/// })?;
/// assert_eq!(Checkpoint::open(&path)?.layout().bytes(), 16);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] when a name occurs twice or is `__metadata__`, or a shape is not a whole number of bytes;
/// [`Error::WrongSize`] when `fill` writes more or fewer bytes than a tensor has; [`Error::File`] when the header exceeds
/// the format's limit; [`Error::Io`] when the system refuses, or the file would be longer than the process may write
/// (`ulimit -f`); and the errors of `fill`.
pub fn write_safetensors(
    path: impl AsRef<Path>,
    tensors: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
    fill: impl FnMut(usize, &mut TensorWriter<'_>) -> Result<()>,
) -> Result<()> {
    let path = path.as_ref();
    let start = header(tensors, metadata, path)?;
    let (at, tensors) = (start.len() as u64, Header::new(tensors, metadata)?.tensors);
    let bytes = tensors.last().map_or(0, |entry| entry.end);
    Contents { start, at, tensors, bytes }.write(path, fill)
}

/// The beginning of a safetensors file with these tensors: the header's length, and the header.
pub(super) fn header(tensors: &[TensorSpec], metadata: &BTreeMap<String, String>, path: &Path) -> Result<Vec<u8>> {
    let json = Header::new(tensors, metadata)?.padded_json(path)?;
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

/// What a file is to hold: a header, and tensors behind it. Zeros are between them.
pub(super) struct Contents<'a> {
    /// The header.
    pub(super) start: Vec<u8>,
    /// Where the tensors' bytes begin, not before the header's end. Their places count from there.
    pub(super) at: u64,
    /// In order of their places.
    pub(super) tensors: Vec<Entry<'a>>,
    /// From there to the file's end.
    pub(super) bytes: u64,
}

impl Contents<'_> {
    /// Writes the file `path`, with the tensors' bytes from `fill`.
    pub(super) fn write(
        &self,
        path: &Path,
        mut fill: impl FnMut(usize, &mut TensorWriter<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut file = Temporary::beside(path, self.at.saturating_add(self.bytes))?;
        let pad = |out: &mut BufWriter<File>, bytes| {
            io::copy(&mut io::repeat(0).take(bytes), out).map(drop).map_err(Error::io("write", path))
        };
        file.out.write_all(&self.start).map_err(Error::io("write", path))?;
        pad(&mut file.out, self.at - self.start.len() as u64)?;
        let mut at = 0;
        for (index, entry) in self.tensors.iter().enumerate() {
            pad(&mut file.out, entry.begin - at)?;
            TensorWriter::fill(path, entry, &mut file.out, |writer| fill(index, writer))?;
            at = entry.end;
        }
        pad(&mut file.out, self.bytes - at)?;
        file.rename_to(path)
    }
}

/// Receives the bytes of one tensor, exactly as many as it has.
pub struct TensorWriter<'a> {
    path: &'a Path,
    entry: &'a Entry<'a>,
    out: &'a mut (dyn Write + Send + Sync),
    left: u64,
    /// The bytes that there would have been with those that were too many.
    refused: Option<u64>,
}

impl TensorWriter<'_> {
    /// Has `fill` write a tensor to `out`.
    pub(super) fn fill(
        path: &Path,
        entry: &Entry<'_>,
        out: &mut (dyn Write + Send + Sync),
        fill: impl FnOnce(&mut TensorWriter<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut writer = TensorWriter { path, entry, out, left: entry.bytes(), refused: None };
        fill(&mut writer)?;
        let written = entry.bytes() - writer.left;
        match writer.refused {
            Some(given) => Err(entry.wrong_size(given)),
            None if written < entry.bytes() => Err(entry.wrong_size(written)),
            None => Ok(()),
        }
    }

    /// Writes the tensor's next bytes.
    ///
    /// # Errors
    /// [`Error::WrongSize`] when the tensor has fewer bytes; [`Error::Io`] when the system refuses.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let path = self.path;
        let written = self.write_all(bytes);
        match self.refused {
            Some(given) => Err(self.entry.wrong_size(given)),
            None => written.map_err(Error::io("write", path)),
        }
    }

    /// Bytes that the tensor still lacks.
    pub fn left(&self) -> u64 {
        self.left
    }
}

impl fmt::Debug for TensorWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorWriter")
            .field("path", &self.path)
            .field("entry", self.entry)
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

/// For what writes to any writer, `std::io::copy` among them.
impl Write for TensorWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            let given = (self.entry.bytes() - self.left).saturating_add(bytes.len() as u64);
            let given = *self.refused.get_or_insert(given);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, self.entry.wrong_size(given)));
        }
        let written = self.out.write(bytes)?;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A header whose names are unique and whose ranges follow each other.
struct Header<'a> {
    metadata: &'a BTreeMap<String, String>,
    tensors: Vec<Entry<'a>>,
}

/// A tensor and its place, counted from the beginning of the tensors' bytes.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) spec: &'a TensorSpec,
    pub(super) begin: u64,
    pub(super) end: u64,
}

impl<'a> Entry<'a> {
    /// A tensor in a safetensors file that begins at `begin`.
    fn from(spec: &'a TensorSpec, begin: u64) -> Result<Entry<'a>> {
        let TensorSpec { name, dtype, shape } = spec;
        if dtype.is_ggml_block() {
            return Err(Error::invalid(format!("tensor `{name}`: safetensors has no element type {dtype}")));
        }
        let bytes = dtype.bytes_of(shape);
        let end = bytes.and_then(|bytes| begin.checked_add(bytes)).ok_or_else(|| {
            Error::invalid(format!("tensor `{name}`: {dtype} {shape:?} does not end on a byte of a 64-bit file"))
        })?;
        Ok(Entry { spec, begin, end })
    }

    /// A tensor by itself.
    pub(super) fn alone(spec: &'a TensorSpec) -> Result<Entry<'a>> {
        Entry::from(spec, 0)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.end - self.begin
    }

    fn wrong_size(&self, given: u64) -> Error {
        let what = Measured::Written { name: self.spec.name.clone() };
        Error::WrongSize { what, needed: self.bytes(), given }
    }
}

impl<'a> Header<'a> {
    fn new(tensors: &'a [TensorSpec], metadata: &'a BTreeMap<String, String>) -> Result<Header<'a>> {
        let names = tensors.iter().map(|t| t.name.as_str());
        if let Some(name) = repeated([METADATA_KEY].into_iter().chain(names)) {
            return Err(Error::invalid(match name {
                METADATA_KEY => format!("a tensor cannot have the name `{METADATA_KEY}`"),
                _ => format!("two tensors have the name `{name}`"),
            }));
        }
        let mut begin = 0u64;
        let entry = |spec: &'a TensorSpec| {
            let entry = Entry::from(spec, begin)?;
            begin = entry.end;
            Ok(entry)
        };
        Ok(Header { metadata, tensors: tensors.iter().map(entry).collect::<Result<_>>()? })
    }

    /// The header's text, padded with blanks so that the tensors' bytes begin at a multiple of 8.
    fn padded_json(&self, path: &Path) -> Result<Vec<u8>> {
        let mut json = serde_json::to_vec(self).map_err(|e| Error::bug(format!("a header that is no JSON: {e}")))?;
        json.resize(json.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
        let bytes = json.len() as u64;
        if bytes > HEADER_LIMIT {
            return Err(Error::file(path, None, FileFault::HeaderTooLarge { bytes, limit: HEADER_LIMIT }));
        }
        Ok(json)
    }
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA_KEY, self.metadata)?;
        }
        for entry in &self.tensors {
            map.serialize_entry(&entry.spec.name, entry)?;
        }
        map.end()
    }
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("dtype", &self.spec.dtype)?;
        map.serialize_entry("shape", &self.spec.shape)?;
        map.serialize_entry("data_offsets", &[self.begin, self.end])?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::ErrorKind;

    fn write(path: &Path, tensors: &[TensorSpec], bytes: &[&[u8]]) -> Result<()> {
        write_safetensors(path, tensors, &BTreeMap::new(), |index, out| out.put(bytes[index]))
    }

    fn names_in(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn the_order_given_is_kept_and_the_header_padded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let tensors = [
            TensorSpec::new("z\"é", DType::U8, [3]),
            TensorSpec::new("empty", DType::F8E4M3, [0]),
            TensorSpec::new("a", DType::F32, []),
            TensorSpec::new("six", DType::F6E2M3, [4]),
        ];
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let bytes: [&[u8]; 4] = [b"abc", b"", b"1234", b"xyz"];
        write_safetensors(&path, &tensors, &metadata, |index, out| out.put(bytes[index])).unwrap();

        let file = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(file[..8].try_into().unwrap());
        assert_eq!(header % 8, 0);
        assert!(file.ends_with(b"abc1234xyz"));
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        for (spec, bytes) in tensors.iter().zip(bytes) {
            let view = read.tensor(&spec.name).unwrap();
            assert_eq!((view.data(), view.dtype().to_string()), (bytes, spec.dtype.to_string()));
        }
        let (_, head) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(head.metadata().as_ref().unwrap()["format"], "pt");
        assert_eq!(names_in(folder.path()), ["m.safetensors"]);
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let tensors = [TensorSpec::new("a", DType::U8, [2]), TensorSpec::new("b", DType::U8, [2])];
        write(&path, &tensors, &[b"12", b"34"]).unwrap();
        let old = fs::read(&path).unwrap();
        let cases: [(&[&[u8]; 2], &str); 2] =
            [(&[b"12", b"3"], "`b` has 2 bytes, only 1"), (&[b"123", b"34"], "`a` has 2 bytes, 3 were written")];
        for (bytes, message) in cases {
            let error = write(&path, &tensors, bytes).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
        // An error that `fill` keeps to itself.
        let kept = write_safetensors(&path, &tensors, &BTreeMap::new(), |_, out| {
            let _ = out.put(b"123");
            out.put(b"12")
        });
        assert_eq!(kept.unwrap_err().to_string(), "tensor `a` has 2 bytes, 3 were written");
        let failed = write_safetensors(&path, &tensors, &BTreeMap::new(), |_, _| {
            Err(Error::Invalid { reason: "no more".to_owned() })
        });
        assert_eq!(failed.unwrap_err().to_string(), "no more");
        assert_eq!(fs::read(&path).unwrap(), old);
        assert_eq!(names_in(folder.path()), ["m.safetensors"]);
    }

    #[test]
    fn what_no_file_can_hold_is_refused_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape);
        for tensors in [
            vec![spec("a", DType::U8, &[]), spec("a", DType::U8, &[])],
            vec![spec("__metadata__", DType::U8, &[])],
            vec![spec("a", DType::F4, &[3])],
            vec![spec("a", DType::Q8_0, &[32])],
            vec![spec("a", DType::U8, &[u64::MAX]), spec("b", DType::U8, &[1])],
        ] {
            assert_eq!(write(&path, &tensors, &[]).unwrap_err().kind(), ErrorKind::Invalid);
        }
        for path in [folder.path().to_owned(), folder.path().join("none/m.safetensors"), "/dev/null".into(), "".into()]
        {
            assert_eq!(write(&path, &[], &[]).unwrap_err().kind(), ErrorKind::Io);
        }
        assert_eq!(names_in(folder.path()), [""; 0]);
    }
}
