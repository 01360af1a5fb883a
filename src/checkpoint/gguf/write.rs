//! Writing GGUF files, tensor by tensor.

use std::collections::HashSet;
use std::path::Path;

use super::cursor::{HEADER_LIMIT, NAME_LIMIT};
use super::tensors::DIMENSIONS;
use super::value::put_text;
use super::{GgufMetadata, MARK};
use crate::checkpoint::json::repeated;
use crate::checkpoint::write::{Contents, Entry, TensorSpec, TensorWriter};
use crate::error::{Error, FileFault, Result};

/// The version that is written.
const VERSION: u32 = 3;

/// Writes a GGUF file (version 3, little-endian) with the tensors in the given order.
///
/// `fill` is called once for each tensor, in order, and writes its bytes in pieces of any size, as for
/// [`write_safetensors`](crate::checkpoint::write_safetensors); the file appears under its name in the same way. Each tensor
/// begins at a multiple of `general.alignment`, or of 32 bytes without that entry, and the last one is padded, too.
///
/// `metadata` of [`Gguf::to_metadata`](super::Gguf::to_metadata) know the tensors that their file stores in another shape. They
/// are stored in that again where a spec has the shape that the [layout](crate::checkpoint::Checkpoint::layout) of that file
/// has; where a spec has another one, the file has this one, and no entry `comfy.gguf.orig_shape.NAME`.
///
/// ```
/// use tensor_offload::checkpoint::{Checkpoint, GgufMetadata, GgufValue, TensorSpec, write_gguf};
/// use tensor_offload::patch::quantise;
/// use tensor_offload::DType;
///
/// let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("halves.gguf");
/// let mut metadata = GgufMetadata::new();
/// metadata.set("general.architecture", GgufValue::Text("llama".to_owned()))?;
/// let tensors = [TensorSpec::new("token_embd.weight", DType::Q8_0, [2, 32])];
/// let mut blocks = vec![0; 2 * 34];
/// quantise(DType::Q8_0, &[0.5; 64], &mut blocks)?;
/// write_gguf(&path, &tensors, &metadata, |_, out| out.put(&blocks))?;
/// assert_eq!(Checkpoint::open(&path)?.layout().bytes(), 68);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] when a name occurs twice or has more than 65,535 bytes, a tensor has a type that the format does not have or
/// more than four dimensions, a row is not a whole number of blocks, or `general.alignment` is no alignment;
/// [`Error::WrongSize`] when `fill` writes more or fewer bytes than a tensor has; [`Error::File`] when the header exceeds 1 GiB;
/// [`Error::Io`] when the system refuses, or the file would be longer than the process may write (`ulimit -f`); and the errors
/// of `fill`.
pub fn write_gguf(
    path: impl AsRef<Path>,
    tensors: &[TensorSpec],
    metadata: &GgufMetadata,
    fill: impl FnMut(usize, &mut TensorWriter<'_>) -> Result<()>,
) -> Result<()> {
    let path = path.as_ref();
    if let Some(name) = repeated(tensors.iter().map(|tensor| tensor.name.as_str())) {
        return Err(Error::invalid(format!("two tensors have the name `{name}`")));
    }
    let alignment = metadata.alignment()?;
    let (entries, bytes) = places(tensors, alignment)?;
    let start = header(&entries, metadata)?;
    let len = start.len() as u64;
    if len > HEADER_LIMIT {
        return Err(Error::file(path, None, FileFault::HeaderTooLarge { bytes: len, limit: HEADER_LIMIT }));
    }
    Contents { start, at: len.next_multiple_of(alignment), tensors: entries, bytes }.write(path, fill)
}

/// The tensors one after another, each padded; and the bytes of all.
fn places<'a>(tensors: &'a [TensorSpec], alignment: u64) -> Result<(Vec<Entry<'a>>, u64)> {
    let mut begin = 0u64;
    let entry = |spec: &'a TensorSpec| {
        let TensorSpec { name, dtype, shape } = spec;
        let size = || Error::invalid(format!("tensor `{name}`: {dtype} {shape:?}: {}", dtype.why_no_size(shape)));
        let bytes = dtype.bytes_of(shape).ok_or_else(size)?;
        let padded = |begin: u64| begin.checked_add(bytes)?.checked_next_multiple_of(alignment);
        let next = padded(begin).ok_or_else(|| {
            Error::invalid(format!("tensor `{name}`: {dtype} {shape:?} does not end in a 64-bit file"))
        })?;
        let begin = std::mem::replace(&mut begin, next);
        Ok(Entry { spec, begin, end: begin + bytes })
    };
    let entries = tensors.iter().map(entry).collect::<Result<_>>()?;
    Ok((entries, begin))
}

/// What stands before the tensors' bytes and the padding.
fn header(tensors: &[Entry<'_>], metadata: &GgufMetadata) -> Result<Vec<u8>> {
    let (mut infos, mut reshaped) = (Vec::new(), HashSet::new());
    for entry in tensors {
        let TensorSpec { name, dtype, shape } = entry.spec;
        let key = GgufMetadata::key_of_shape(name);
        let shape = match metadata.stored_shapes.get(name).filter(|_| metadata.keys().any(|other| *other == key)) {
            Some(of_file) if of_file.shape != *shape => {
                reshaped.insert(key);
                shape
            }
            Some(of_file) if dtype.bytes_of(&of_file.stored) == Some(entry.bytes()) => &of_file.stored,
            _ => shape,
        };
        put_info(&mut infos, entry, shape)?;
    }
    let (count, entries) = metadata.encode(&reshaped);
    let mut header = MARK.to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend(count.to_le_bytes());
    header.extend(entries);
    header.extend(infos);
    Ok(header)
}

/// Adds what the header says of a tensor, which is stored in `shape`.
fn put_info(out: &mut Vec<u8>, entry: &Entry<'_>, shape: &[u64]) -> Result<()> {
    let TensorSpec { name, dtype, .. } = entry.spec;
    let (len, sides) = (name.len() as u64, shape.len());
    if len > NAME_LIMIT {
        return Err(Error::invalid(format!("a tensor's name has {len} bytes, and one of GGUF at most {NAME_LIMIT}")));
    }
    let number = dtype.ggml_number();
    let number = number.ok_or_else(|| Error::invalid(format!("tensor `{name}`: GGUF has no element type {dtype}")))?;
    if sides > DIMENSIONS as usize {
        let most = format!("and one of GGUF at most {DIMENSIONS}");
        return Err(Error::invalid(format!("tensor `{name}` has {sides} dimensions, {most}")));
    }
    put_text(out, name);
    out.extend((sides as u32).to_le_bytes());
    // The innermost dimension comes first.
    shape.iter().rev().for_each(|side| out.extend(side.to_le_bytes()));
    out.extend(number.to_le_bytes());
    out.extend(entry.begin.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::checkpoint::{Checkpoint, GgufArray, GgufKind, GgufValue};
    use crate::dtype::DType;
    use crate::error::ErrorKind;

    fn metadata() -> GgufMetadata {
        let mut metadata = GgufMetadata::new();
        metadata.set("general.architecture", GgufValue::Text("test".to_owned())).unwrap();
        metadata
    }

    /// Writes tensors of bytes 1, 2, … and gives the file's bytes.
    fn written(tensors: &[TensorSpec], metadata: &GgufMetadata) -> Result<Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let fill = |index: usize, out: &mut TensorWriter<'_>| out.put(&vec![index as u8 + 1; out.left() as usize]);
        let outcome = write_gguf(&path, tensors, metadata, fill);
        let left = fs::read_dir(&folder).unwrap().count();
        assert_eq!(left, usize::from(outcome.is_ok()), "no more than the file");
        outcome.map(|()| fs::read(path).unwrap())
    }

    fn three() -> [TensorSpec; 3] {
        [
            TensorSpec::new("a", DType::Q8_0, [3, 32]),
            TensorSpec::new("none", DType::F32, [2, 0]),
            TensorSpec::new("b", DType::F16, [5]),
        ]
    }

    #[test]
    fn a_header_is_as_the_format_says() {
        let mut metadata = metadata();
        metadata.set("general.alignment", GgufValue::U32(64)).unwrap();
        let file = written(&three(), &metadata).unwrap();
        let mut wanted = b"GGUF\x03\0\0\0\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
        wanted.extend(b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x04\0\0\0\0\0\0\0test");
        wanted.extend(b"\x11\0\0\0\0\0\0\0general.alignment\x04\0\0\0\x40\0\0\0");
        let info = |name: &str, sides: &[u64], number: u32, offset: u64| {
            let mut info = (name.len() as u64).to_le_bytes().to_vec();
            info.extend(name.as_bytes());
            info.extend((sides.len() as u32).to_le_bytes());
            sides.iter().for_each(|side| info.extend(side.to_le_bytes()));
            info.extend(number.to_le_bytes());
            info.extend(offset.to_le_bytes());
            info
        };
        wanted.extend(info("a", &[32, 3], 8, 0));
        wanted.extend(info("none", &[0, 2], 0, 128));
        wanted.extend(info("b", &[5], 1, 128));
        wanted.resize(wanted.len().next_multiple_of(64), 0);
        wanted.extend([1; 102]);
        wanted.extend([0; 26]);
        wanted.extend([3; 10]);
        wanted.extend([0; 54]);
        assert!(file == wanted, "{file:?}\n{wanted:?}");
    }

    #[test]
    fn what_is_set_is_read_again() {
        let mut metadata = metadata();
        let values = [
            GgufValue::U8(200),
            GgufValue::I8(-3),
            GgufValue::U16(60_000),
            GgufValue::I16(-300),
            GgufValue::U32(4_000_000_000),
            GgufValue::I32(-70_000),
            GgufValue::U64(u64::MAX),
            GgufValue::I64(i64::MIN),
            GgufValue::F32(0.1),
            GgufValue::F64(-1e300),
            GgufValue::Bool(true),
            GgufValue::Text("ünder".to_owned()),
        ];
        for (at, value) in values.iter().enumerate() {
            metadata.set(format!("v{at}"), GgufValue::Bool(false)).unwrap();
            metadata.set(format!("v{at}"), value.clone()).unwrap();
        }
        let arrays: [GgufArray; 4] = [
            ["<s>", "", "ü"].into_iter().collect(),
            [1.5f32, -0.25].into_iter().collect(),
            [-1i16, 300].into_iter().collect(),
            [true, false].into_iter().collect(),
        ];
        for (at, array) in arrays.iter().enumerate() {
            metadata.set_array(format!("a{at}"), array.clone()).unwrap();
        }
        metadata.set("gone", GgufValue::U8(1)).unwrap();
        assert!(metadata.remove("gone") && !metadata.remove("gone"));
        let model = Checkpoint::from_bytes("m.gguf", written(&three(), &metadata).unwrap()).unwrap();
        let gguf = model.gguf().unwrap();
        for (at, value) in values.iter().enumerate() {
            assert_eq!(gguf.get(&format!("v{at}")), Some(value));
        }
        for (at, array) in arrays.iter().enumerate() {
            assert_eq!(&gguf.array(&format!("a{at}")).unwrap().unwrap(), array);
        }
        assert_eq!(gguf.entries().count(), 17);
        let again = gguf.to_metadata().unwrap();
        assert!(again.keys().eq(metadata.keys()));
        assert!(written(&three(), &again).unwrap() == written(&three(), &metadata).unwrap());
    }

    #[test]
    fn what_no_file_can_hold_is_refused_before_anything_is_written() {
        let long = "n".repeat(65_536);
        let cases: [(TensorSpec, &str); 7] = [
            (TensorSpec::new("a", DType::F32, [1]), "two tensors have the name `a`"),
            (TensorSpec::new(&long, DType::F32, [1]), "a tensor's name has 65536 bytes"),
            (TensorSpec::new("c", DType::F8E4M3, [1]), "tensor `c`: GGUF has no element type F8_E4M3"),
            (TensorSpec::new("c", DType::F32, [1; 5]), "tensor `c` has 5 dimensions"),
            (TensorSpec::new("c", DType::Q8_0, [32, 16]), "tensor `c`: Q8_0 [32, 16]"),
            (TensorSpec::new("c", DType::I8, [u64::MAX - 31]), "does not end in a 64-bit file"),
            (TensorSpec::new("c", DType::I8, [u64::MAX]), "does not end in a 64-bit file"),
        ];
        for (spec, wanted) in cases {
            let error = written(&[&three()[..], &[spec]].concat(), &metadata()).unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains(wanted), "{error}");
        }
        for value in [GgufValue::U32(33), GgufValue::U32(4), GgufValue::U64(32), GgufValue::Text("32".to_owned())] {
            let mut metadata = metadata();
            metadata.set("general.alignment", value).unwrap();
            let error = written(&three(), &metadata).unwrap_err();
            assert!(error.to_string().contains("`general.alignment` is not a power of two"), "{error}");
        }
        let mut metadata = metadata();
        let array = GgufValue::Array { kind: GgufKind::U8, len: 1 };
        assert_eq!(metadata.set("a", array).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(metadata.set(long, GgufValue::U8(1)).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        fs::write(&path, "old").unwrap();
        let write = |bytes: usize| write_gguf(&path, &three()[..1], &metadata(), |_, out| out.put(&vec![0; bytes]));
        for (bytes, wanted) in [(101, "`a` has 102 bytes, only 101"), (103, "`a` has 102 bytes, 103 were written")] {
            let error = write(bytes).unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
            assert_eq!(fs::read(&path).unwrap(), b"old");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        write(102).unwrap();
        assert!(Checkpoint::open(&path).is_ok());
    }
}
