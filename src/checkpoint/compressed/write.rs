//! Writing files with compressed tensors.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use serde::Serialize;

use super::{ENDING, entry};
use crate::bytes::ByteSize;
use crate::checkpoint::temporary::Temporary;
use crate::checkpoint::write::{self, Entry, TensorSpec, TensorWriter};
use crate::dtype::DType;
use crate::error::{CodeFault, Error, FileFault, Result};
use crate::lossless;

/// Bytes up to which the memory for a tensor is taken at once.
const LEAST: u64 = 64 << 20;

/// What [`write_compressed`] came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CompressedReport {
    /// The tensors that were compressed.
    pub compressed: u64,
    /// Their bytes as they were.
    pub from: u64,
    /// Their bytes in the file.
    pub to: u64,
    /// The tensors that stay as they are: of types that are not compressed, or of which too little would be saved.
    pub plain: u64,
}

impl fmt::Display for CompressedReport {
    /// As "290 tensors compressed from 13.2 GiB to 8.9 GiB (0.674), 1 as it was".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CompressedReport { compressed, from, to, plain } = *self;
        let plural = |count| if count == 1 { "" } else { "s" };
        write!(f, "{compressed} tensor{} compressed", plural(compressed))?;
        if compressed > 0 {
            write!(f, " from {} to {} ({:.3})", ByteSize(from).human(), ByteSize(to).human(), to as f64 / from as f64)?;
        }
        if plain > 0 {
            write!(f, ", {plain} as {} were", if plain == 1 { "it" } else { "they" })?;
        }
        Ok(())
    }
}

/// Writes a safetensors file with the tensors in the given order, compressed without loss where that saves a twentieth or more:
/// bf16 weights to about 0.68 of their bytes, f16 and f32 to 0.84. [`Checkpoint::open`](crate::Checkpoint::open) gives all
/// tensors as they were, bit for bit, and a read decompresses what it needs. Other programs find no tensor of the old name, and
/// with `.lossless` at its end one of bytes.
///
/// `fill` is called and the file appears as with [`write_safetensors`](super::super::write_safetensors), but a tensor is in memory as a
/// whole, beside its compressed form.
///
/// ```
/// use std::collections::BTreeMap;
/// use tensor_offload::DType;
/// use tensor_offload::checkpoint::{Checkpoint, TensorSpec, write_compressed};
///
/// let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("ramp.safetensors");
/// let tensors = [TensorSpec::new("ramp", DType::BF16, [512, 128])];
/// let ramp: Vec<u8> = (0..1u32 << 16).flat_map(|n| half::bf16::from_f32(n as f32 / 65e3).to_le_bytes()).collect();
/// let report = write_compressed(&path, &tensors, &BTreeMap::new(), |_, out| out.put(&ramp))?;
/// assert!(report.to * 10 < report.from * 7);
///
/// let checkpoint = Checkpoint::open(&path)?;
/// let mut read = vec![0; ramp.len()];
/// checkpoint.read(checkpoint.find("ramp").unwrap(), &mut read)?;
/// assert_eq!(read, ramp);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
///
/// # Errors
/// As [`write_safetensors`](super::super::write_safetensors); [`Error::Invalid`] when the metadata already has an entry that a
/// compressed tensor needs.
pub fn write_compressed(
    path: impl AsRef<Path>,
    tensors: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
    mut fill: impl FnMut(usize, &mut TensorWriter<'_>) -> Result<()>,
) -> Result<CompressedReport> {
    let path = path.as_ref();
    let (mut report, mut stored, mut metadata) = (CompressedReport::default(), Vec::new(), metadata.clone());
    // What is wrong with the tensors as they are given is wrong in either form.
    write::header(tensors, &metadata, path)?;
    // No header is longer than that of all tensors compressed, to what they take at most.
    let most = Largest::new(tensors, &metadata)?;
    let room = write::header(&most.tensors, &most.metadata, path)?.len() as u64;
    let mut file = Temporary::beside(path, room.saturating_add(most.bytes))?;
    let failed = Error::io("write", path);
    file.out.seek(SeekFrom::Start(room)).map_err(failed)?;
    for (index, spec) in tensors.iter().enumerate() {
        let bytes = whole(path, spec, |out| fill(index, out))?;
        let code = code(path, spec, &bytes)?;
        file.out.write_all(code.as_ref().unwrap_or(&bytes)).map_err(Error::io("write", path))?;
        match code {
            Some(code) => {
                let coded = coded(spec, code.len() as u64);
                metadata.insert(coded.name.clone(), entry(spec.dtype, &spec.shape));
                stored.push(coded);
                report.compressed += 1;
                report.from += bytes.len() as u64;
                report.to += code.len() as u64;
            }
            None => {
                stored.push(spec.clone());
                report.plain += 1;
            }
        }
    }
    let mut header = write::header(&stored, &metadata, path)?;
    if header.len() as u64 > room {
        return Err(Error::bug(format!("a header of {} bytes, with room for {room}", header.len())));
    }
    // Blanks may follow the header's text.
    header.resize(room as usize, b' ');
    header[..8].copy_from_slice(&(room - 8).to_le_bytes());
    file.out.seek(SeekFrom::Start(0)).and_then(|_| file.out.write_all(&header)).map_err(Error::io("write", path))?;
    file.rename_to(path)?;
    Ok(report)
}

/// A tensor's bytes, which `fill` writes.
fn whole(path: &Path, spec: &TensorSpec, fill: impl FnOnce(&mut TensorWriter<'_>) -> Result<()>) -> Result<Vec<u8>> {
    let entry = Entry::alone(spec)?;
    // What it is said to have may be more than there is memory for, and more than `fill` writes.
    let mut bytes = Vec::with_capacity(entry.bytes().min(LEAST) as usize);
    TensorWriter::fill(path, &entry, &mut bytes, fill)?;
    Ok(bytes)
}

/// The code of a tensor; `None` if it stays as it is.
fn code(path: &Path, spec: &TensorSpec, bytes: &[u8]) -> Result<Option<Vec<u8>>> {
    let fault = |fault: CodeFault| Error::file(path, Some(&spec.name), FileFault::Compressed(fault.into()));
    lossless::shorter(spec.dtype, bytes).map_err(fault)
}

/// A compressed tensor as the file has it.
fn coded(spec: &TensorSpec, bytes: u64) -> TensorSpec {
    TensorSpec::new(format!("{}{ENDING}", spec.name), DType::U8, [bytes])
}

/// The tensors and the metadata with the longest header that there may be, and the most bytes that they take.
struct Largest {
    tensors: Vec<TensorSpec>,
    metadata: BTreeMap<String, String>,
    bytes: u64,
}

impl Largest {
    fn new(tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Largest> {
        let mut most = Largest { tensors: Vec::new(), metadata: metadata.clone(), bytes: 0 };
        for spec in tensors {
            let bytes = Entry::alone(spec)?.bytes();
            most.bytes = most.bytes.saturating_add(bytes);
            let coded = coded(spec, bytes);
            if most.metadata.insert(coded.name.clone(), entry(spec.dtype, &spec.shape)).is_some() {
                let name = &coded.name;
                return Err(Error::invalid(format!("the metadata has an entry `{name}`, and a tensor needs it")));
            }
            most.tensors.push(coded);
        }
        Ok(most)
    }
}
