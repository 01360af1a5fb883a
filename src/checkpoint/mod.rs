//! Checkpoints: a model's files, and their tensors grouped into modules and layers.

mod compressed;
mod execution;
mod families;
mod files;
mod folder;
mod format;
mod gguf;
mod header;
mod hub;
mod id;
mod json;
mod layout;
mod looked;
mod names;
mod opened;
mod pattern;
mod quantised;
mod shard;
mod temporary;
mod text;
mod write;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Measured, Missing, Result};
use crate::lossless::Info;
use crate::transfer::{LocalFiles, MemorySource, ReadPart, Source, Storage};
pub(crate) use compressed::CompressedSource;
use compressed::Sizes;
use compressed::dfloat11::Beside;
use files::{FileSet, Said, Tied};
use gguf::GgufHeader;
use header::Header;
use opened::{Open, Opened};

pub use compressed::{CompressedReport, write_compressed};
pub use execution::OrderSource;
pub(crate) use folder::{lacks_weights, weights_in};
pub use gguf::{Gguf, GgufArray, GgufKind, GgufMetadata, GgufValue, write_gguf};
pub(crate) use hub::model_folder;
pub(crate) use id::Per;
pub use id::{LayerId, ModuleId, TensorId};
pub(crate) use layout::{FactorShapes, Stored};
pub use layout::{Factors, Layer, Layout, Module, TensorInfo};
pub(crate) use looked::Looked;
pub(crate) use names::{has_vocabulary_rows, is_in_stack, is_language_head, is_table};
pub(crate) use pattern::{Alike, Pattern};
pub(crate) use quantised::{Coded, Format, Note, Packed, Role, Sibling, Siblings, Stated, packed_modules};
pub(crate) use shard::{Cut, Stretches};
use shard::{Network, Part};
pub use shard::{Rank, ShardRules};
pub(crate) use text::read_text;
pub use write::{TensorSpec, TensorWriter, write_safetensors};

/// The weights of a model in its files.
///
/// Opening reads the headers only; [`read`](Checkpoint::read) reads one tensor's bytes. A clone refers to the same
/// checkpoint. Files that change while it is open are detected at the next read.
///
/// ```
/// use tensor_offload::Checkpoint;
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
/// let model = Checkpoint::open(path)?;
/// let norm = model.find("model.norm.weight").expect("every Llama has one");
/// let info = model.layout().tensor(norm).expect("it was just found");
/// let mut bytes = vec![0; info.bytes as usize];
/// model.read(norm, &mut bytes)?;
/// assert_eq!(model.layout().layers()[1].name, "model.layers.0");
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone)]
pub struct Checkpoint(Arc<Inner>);

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// As the weights that it stands for.
    Weights,
    /// As it is stored, which in a file with codes is something else.
    Stored,
}

#[derive(Clone)]
struct Inner {
    path: PathBuf,
    sources: Vec<Arc<dyn Source>>,
    layout: Layout,
    metadata: BTreeMap<String, String>,
    /// The headers of the sources that are GGUF files.
    gguf: Vec<Option<Arc<GgufHeader>>>,
    by_name: HashMap<String, TensorId>,
    /// What the configuration says of quantised weights.
    stated: Stated,
    /// The bytes in the files of the tensors that they have in compressed form.
    compressed: Sizes,
    /// The sources that are files with codes.
    stored: Vec<Option<Arc<CompressedSource>>>,
    /// What the configuration says of the network.
    network: Network,
    /// What it is a part of.
    part: Option<Arc<Part>>,
}

impl Checkpoint {
    /// Opens a safetensors or GGUF file, the `.json` index of a sharded checkpoint, or a folder that holds any of these. The
    /// first bytes of a file say which format it has, whatever it is called.
    ///
    /// A folder's index lists the files and tensors of the model; without an index the folder must hold exactly one
    /// `.safetensors` file, or none and the files of one GGUF model. Any file of a GGUF set (`NAME-00001-of-00003.gguf`)
    /// opens the whole set. A GGUF model whose architecture has a head, and no tensor of it, uses the embedding at both ends.
    /// `config.json` in the folder says whether the embeddings are tied, and how weights are quantised. A folder in a cache
    /// of the Hugging Face hub (`models--ORG--NAME`) stands for the snapshot that its `refs/main` names.
    ///
    /// Tensors that are [compressed without loss](write_compressed), or weights in the form of DFloat11, are as they were before. If
    /// `config.json` has a `dfloat11_config`, all `.safetensors` files of the folder belong to the model. It says which weights are
    /// in that form; their shapes, which are not in it, come from the rest of `config.json` and from biases.
    ///
    /// # Errors
    /// [`Error::File`] with the file, the tensor if one is to blame, and the fault;
    /// [`Error::Io`] when the system refuses.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_in(&LocalFiles, path)
    }

    /// As [`open`](Checkpoint::open), of a path in any [storage](Storage): an object store, for example. The headers of several files
    /// are read [at the same time](Storage::concurrency).
    ///
    /// # Errors
    /// As [`open`](Checkpoint::open), and those of the storage and of its sources.
    pub fn open_in(storage: &dyn Storage, path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_looking(&Looked::at(storage), path.as_ref())
    }

    /// As [`open_in`](Checkpoint::open_in), with what is known of the storage.
    pub(crate) fn open_looking(look: &Looked<'_>, path: &Path) -> Result<Checkpoint> {
        Checkpoint::open_by(look, path, &mut |files| opened::of(look.storage(), files))
    }

    /// As [`open`](Checkpoint::open), with the weights' files opened by the caller: mapped, for example.
    ///
    /// # Errors
    /// As [`open`](Checkpoint::open), and the errors of `open_file`.
    pub fn open_with(
        path: impl AsRef<Path>,
        mut open_file: impl FnMut(&Path) -> Result<Arc<dyn Source>>,
    ) -> Result<Checkpoint> {
        let look = Looked::at(&LocalFiles);
        Checkpoint::open_by(&look, path.as_ref(), &mut |files| opened::each(files, &mut open_file))
    }

    fn open_by(look: &Looked<'_>, path: &Path, open: Open<'_>) -> Result<Checkpoint> {
        let set = FileSet::at(look, path)?;
        let beside = Beside::files_in(look, &set.folder);
        let files = open(set.files.iter().cloned().enumerate().collect())?;
        let of_weights = |(source, header)| compressed::decompressed(source, header, &beside);
        let mut files = files.into_iter().map(of_weights).collect::<Result<Vec<Opened>>>()?;
        set.select(&mut files)?;
        if let [file] = &set.files[..] {
            gguf::complete(look, file, &mut files, open)?;
        }
        // GGUF files say all of this themselves.
        let said = match files.iter().all(|(_, header)| header.gguf.is_some()) {
            true => Said::default(),
            false => files::configuration(look, &set.folder)?,
        };
        Ok(Checkpoint::assemble(path.to_owned(), files, said))
    }

    /// Opens a safetensors or GGUF file in memory, called `name` in errors.
    ///
    /// # Errors
    /// [`Error::File`] with the tensor if one is to blame, and the fault.
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Checkpoint> {
        let source: Arc<dyn Source> = Arc::new(MemorySource::new(name, bytes));
        let header = Header::read(&*source, 0)?;
        let (source, header) = compressed::decompressed(source, header, &Beside::default())?;
        gguf::alone(source.path(), &header)?;
        Ok(Checkpoint::assemble(source.path().to_owned(), vec![(source, header)], Said::default()))
    }

    fn assemble(path: PathBuf, opened: Vec<Opened>, Said { tied, stated, network }: Said) -> Checkpoint {
        let (mut tensors, mut metadata, mut gguf, mut compressed) = (Vec::new(), None, Vec::new(), Sizes::new());
        let (mut sources, mut stored) = (Vec::new(), Vec::new());
        for (source, header) in opened {
            sources.push(source);
            stored.push(header.stored);
            metadata.get_or_insert(header.metadata);
            gguf.push(header.gguf);
            compressed.extend(header.compressed);
            tensors.extend(header.tensors);
        }
        let metadata = metadata.unwrap_or_default();
        let headed = gguf.first().is_some_and(|first| first.as_ref().is_some_and(|gguf| gguf.has_language_head()));
        let tied = if headed { Tied::IfHeadless } else { tied };
        let files: Vec<bool> = sources.iter().map(|source| source.may_stay()).collect();
        let layout = Layout::new(tensors).read_from(&files).stored_as(|info| stored_in(&stored, info));
        let by_name = by_name(&layout);
        let headless = || !layout.modules().iter().any(|module| names::is_language_head(&module.name));
        let tied = tied == Tied::Yes || (tied == Tied::IfHeadless && headless());
        let layout = if tied { layout.tie_embeddings() } else { layout };
        let part = None;
        Checkpoint(Arc::new(Inner {
            path,
            sources,
            layout,
            metadata,
            gguf,
            by_name,
            stated,
            compressed,
            stored,
            network,
            part,
        }))
    }

    /// The same files with another layout: layers in [another order](Layout::in_order), an embedding that is [used at both
    /// ends](Layout::tie_embeddings), tensors that share their bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a layout with [factors](Layout::factors), and for one with other tensors than a [part](Checkpoint::shard) of a
    /// model; [`Error::Missing`] when a tensor is in a file that the checkpoint does not have; [`Error::WrongSize`] when its bytes
    /// would exceed its file, or do not match its shape.
    pub fn with_layout(&self, layout: Layout) -> Result<Checkpoint> {
        if !layout.factors().is_empty() {
            let reason = "a layout with the factors of deferred changes, which are in no file, is none of a checkpoint";
            return Err(Error::invalid(reason));
        }
        let same = |(old, new): (&TensorInfo, &TensorInfo)| old.name == new.name;
        let own = self.layout().tensors();
        if self.0.part.is_some() && !(own.len() == layout.tensors().len() && own.iter().zip(layout.tensors()).all(same))
        {
            return Err(Error::invalid("a layout with other tensors than the part of a model that it is to be of"));
        }
        let count = self.0.sources.len();
        for info in layout.tensors() {
            let source = self.0.sources.get(info.file);
            let source = source.ok_or_else(|| Missing::File { tensor: info.name.clone(), index: info.file, count })?;
            // A shape of too many bytes to count has none that are right.
            let needed = info.dtype.bytes_of(&info.shape).unwrap_or(u64::MAX);
            if needed != info.bytes {
                let what = Measured::Tensor { name: info.name.clone() };
                return Err(Error::WrongSize { what, needed, given: info.bytes });
            }
            let (end, len) = (info.offset.saturating_add(info.bytes), source.stamp().len());
            if end > len {
                let what = Measured::File { path: source.path().to_owned(), tensor: info.name.clone() };
                return Err(Error::WrongSize { what, needed: end, given: len });
            }
        }
        let files: Vec<bool> = self.0.sources.iter().map(|source| source.may_stay()).collect();
        let layout = layout.read_from(&files).stored_as(|info| stored_in(&self.0.stored, info));
        let by_name = by_name(&layout);
        Ok(Checkpoint(Arc::new(Inner { layout, by_name, ..(*self.0).clone() })))
    }

    /// The tensors in the order of the files, grouped into modules and layers in order of execution.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// The metadata in the (first) file's header: `__metadata__` of safetensors; of a GGUF file what is not an array, as text.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.0.metadata
    }

    /// The metadata of a GGUF file, of the first one of a set; `None` for other files.
    pub fn gguf(&self) -> Option<Gguf<'_>> {
        Gguf::of(&self.0.gguf, &self.0.sources)
    }

    /// The path that was opened: the file, the index or the folder.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The files in order of name; [`TensorInfo::file`] is an index into this list.
    pub fn sources(&self) -> &[Arc<dyn Source>] {
        &self.0.sources
    }

    /// The file that holds a tensor; `None` if there is no such tensor.
    pub fn file_of(&self, tensor: TensorId) -> Option<&Path> {
        self.0.layout.tensor(tensor).map(|info| self.0.sources[info.file].path())
    }

    /// The bytes that a tensor takes in its file, if the file has it in [compressed form](write_compressed), or its share of those of a
    /// group in DFloat11's form; `None` if it does not, or if there is no such tensor.
    pub fn compressed(&self, tensor: TensorId) -> Option<u64> {
        self.0.compressed.get(&self.0.layout.tensor(tensor)?.name).copied()
    }

    /// The tensor `name`; `None` if there is none.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.0.by_name.get(name).copied()
    }

    /// Reads all of a tensor's bytes into `dst`.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor; [`Error::WrongSize`] when `dst` is not as long as the tensor;
    /// [`Error::File`] with
    /// [`FileFault::Changed`](crate::error::FileFault::Changed) when the file has changed since it was opened;
    /// [`Error::Io`] when the system refuses.
    pub fn read(&self, tensor: TensorId, dst: &mut [u8]) -> Result<()> {
        let info = self.info(tensor)?;
        if info.bytes != dst.len() as u64 {
            let what = Measured::Tensor { name: info.name.clone() };
            return Err(Error::WrongSize { what, needed: info.bytes, given: dst.len() as u64 });
        }
        self.read_at(tensor, 0, dst)
    }

    /// Reads a tensor's bytes from its byte `at` on into `dst`.
    ///
    /// # Errors
    /// As [`read`](Checkpoint::read); also [`Error::WrongSize`] when the range exceeds the tensor.
    pub fn read_at(&self, tensor: TensorId, at: u64, dst: &mut [u8]) -> Result<()> {
        let (info, source) = self.range(tensor, at, dst.len())?;
        source.read_at(info.offset + at, dst).map_err(|error| naming_tensor(error, &info.name))
    }

    /// Reads some of the `len` bytes of a tensor from its byte `at` on, to wherever they may lie in `buffer`, which has at least
    /// `len` bytes. Returns where they are ([`Source::read_within`]).
    ///
    /// # Errors
    /// As [`read_at`](Checkpoint::read_at).
    pub(crate) fn read_within(&self, tensor: TensorId, at: u64, len: usize, buffer: &mut [u8]) -> Result<Range<usize>> {
        let (info, source) = self.range(tensor, at, len)?;
        let found =
            source.read_within(info.offset + at, len, buffer).map_err(|error| naming_tensor(error, &info.name))?;
        // A source may be the caller's.
        let some = found.len() <= len && (!found.is_empty() || len == 0);
        if found.end > buffer.len() || !some {
            let what = Measured::Part { name: info.name.clone(), at };
            return Err(Error::WrongSize { what, needed: len as u64, given: found.len() as u64 });
        }
        Ok(found)
    }

    /// Runs `work` on the source of a tensor's bytes and the place of the first there. Its error names the tensor.
    ///
    /// # Errors
    /// That of `work`; [`Error::Missing`] when there is no such tensor.
    pub(crate) fn with_source<T>(
        &self,
        tensor: TensorId,
        work: impl FnOnce(&dyn Source, u64) -> Result<T>,
    ) -> Result<T> {
        let (info, source) = self.range(tensor, 0, 0)?;
        work(&**source, info.offset).map_err(|error| naming_tensor(error, &info.name))
    }

    /// The part of a file that is a tensor's bytes from byte `at` on, as many as `dst` has, with the number of the file.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor; [`Error::WrongSize`] when it is shorter.
    pub(crate) fn part_at<'a>(&self, tensor: TensorId, at: u64, dst: &'a mut [u8]) -> Result<(usize, ReadPart<'a>)> {
        let (info, _) = self.range(tensor, at, dst.len())?;
        Ok((info.file, ReadPart::new(info.offset + at, dst)))
    }

    /// Reads parts of one file that lie in tensors.
    ///
    /// # Errors
    /// As [`read_at`](Checkpoint::read_at).
    pub(crate) fn read_parts(&self, file: usize, read: Read, parts: &mut [ReadPart<'_>]) -> Result<()> {
        let source = match read {
            Read::Weights => &self.0.sources[file],
            Read::Stored => self.stored(file).ok_or_else(|| Error::bug("a file without codes, read for them"))?.file(),
        };
        let error = match source.read_parts(parts) {
            // Of a source far away a second read may take long, and fail otherwise.
            Err(error) if source.concurrency() > 1 => return Err(error),
            Err(error) => error,
            Ok(()) => return Ok(()),
        };
        // Read again one by one, the part that fails tells its tensor. If none does, all bytes have been read.
        for part in parts.iter_mut().filter(|part| !part.dst.is_empty()) {
            source.read_at(part.at, part.dst).map_err(|error| self.named(error, file, read, part.at))?;
        }
        tracing::debug!(%error, "what could not be read in one go was read part by part");
        Ok(())
    }

    /// An error of a read of a file from offset `at` on, with the name of the tensor that is there.
    pub(crate) fn named(&self, error: Error, file: usize, read: Read, at: u64) -> Error {
        let place = |info: &TensorInfo| match read {
            Read::Weights => Some((info.offset, info.bytes)),
            Read::Stored => self.stored(file)?.place(info.offset, info.bytes).map(|(at, stored)| (at, stored.bytes)),
        };
        let has = |info: &&TensorInfo| {
            let within = |(begin, bytes): (u64, u64)| (begin..begin.saturating_add(bytes)).contains(&at);
            info.file == file && place(info).is_some_and(within)
        };
        match self.0.layout.tensors().iter().find(has) {
            Some(tensor) => naming_tensor(error, &tensor.name),
            None => error,
        }
    }

    /// The part of a file with codes that is what it has of a tensor, with the number of the file.
    ///
    /// # Errors
    /// [`Error::Bug`] when the file has no such tensor, or another number of bytes.
    pub(crate) fn stored_part<'a>(&self, tensor: TensorId, dst: &'a mut [u8]) -> Result<(usize, ReadPart<'a>)> {
        let info = self.info(tensor)?;
        match self.stored(info.file).and_then(|file| file.place(info.offset, info.bytes)) {
            Some((at, stored)) if stored.bytes == dst.len() as u64 => Ok((info.file, ReadPart::new(at, dst))),
            _ => Err(Error::bug(format!("tensor `{}` is not stored as a code", info.name))),
        }
    }

    /// Checks that a code with this header is the one of a tensor.
    ///
    /// # Errors
    /// [`FileFault::Compressed`](crate::error::FileFault::Compressed) when it is of other weights.
    pub(crate) fn check_code(&self, tensor: TensorId, code: &Info) -> Result<()> {
        let info = self.info(tensor)?;
        let file = self.stored(info.file).ok_or_else(|| Error::bug("a code of a file without any"))?;
        file.check(info.offset, info.bytes, code).map_err(|error| naming_tensor(error, &info.name))
    }

    /// A tensor of which `len` bytes from `at` on are to be read, and its file.
    fn range(&self, tensor: TensorId, at: u64, len: usize) -> Result<(&TensorInfo, &Arc<dyn Source>)> {
        let info = self.info(tensor)?;
        // No tensor ends at `u64::MAX`, since its range lies in a file.
        let end = at.saturating_add(len as u64);
        if end > info.bytes {
            let what = Measured::Part { name: info.name.clone(), at };
            return Err(Error::WrongSize { what, needed: end, given: info.bytes });
        }
        Ok((info, &self.0.sources[info.file]))
    }

    /// A file with codes, as it is stored. `None` for other files.
    pub(crate) fn stored(&self, file: usize) -> Option<&Arc<CompressedSource>> {
        self.0.stored.get(file)?.as_ref()
    }

    /// What the configuration beside the files says of quantised weights.
    pub(crate) fn stated(&self) -> Stated {
        self.0.stated
    }

    /// A tensor.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor.
    pub(crate) fn info(&self, tensor: TensorId) -> Result<&TensorInfo> {
        let (index, count) = (tensor.index(), self.0.layout.tensors().len());
        let missing = || Missing::TensorAt { index, count, file: self.0.path.clone() }.into();
        self.0.layout.tensor(tensor).ok_or_else(missing)
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Checkpoint");
        debug.field("path", &self.0.path).field("tensors", &self.0.layout.tensors().len()).finish_non_exhaustive()
    }
}

/// How a file with codes holds a tensor.
fn stored_in(files: &[Option<Arc<CompressedSource>>], info: &TensorInfo) -> Option<Stored> {
    files.get(info.file)?.as_ref()?.place(info.offset, info.bytes).map(|(_, stored)| stored)
}

fn by_name(layout: &Layout) -> HashMap<String, TensorId> {
    layout.tensor_ids().map(|tensor| (layout.at(tensor).name.clone(), tensor)).collect()
}

/// Adds the name of the tensor that was being read to an error.
fn naming_tensor(error: Error, name: &str) -> Error {
    match error {
        Error::File { file, tensor: None, fault } => Error::File { file, tensor: Some(name.to_owned()), fault },
        other => other,
    }
}
