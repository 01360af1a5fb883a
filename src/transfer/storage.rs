//! Places where files are.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file::FileSource;
use super::open_files::broken_link;
use super::source::Source;
use crate::error::{Error, Result};

/// A place where the files of models are, with the three things that opening a model asks of it: what is at a path, what is in a
/// folder, and the bytes of a file. [`LocalFiles`] is that of the system's own file systems; with the feature `store`,
/// `ObjectStorage` is that of an object store.
///
/// ```
/// use tensor_offload::Checkpoint;
/// use tensor_offload::transfer::{LocalFiles, PathKind, Storage};
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
/// assert_eq!(LocalFiles.kind(folder.as_ref())?, Some(PathKind::Folder));
/// let checkpoint = Checkpoint::open_in(&LocalFiles, folder)?;
/// # assert_eq!(checkpoint.find("model.norm.weight"), Checkpoint::open(folder)?.find("model.norm.weight"));
/// # Ok::<(), tensor_offload::Error>(())
/// ```
pub trait Storage: Send + Sync + fmt::Debug {
    /// What is at `path`; `None` if nothing is.
    ///
    /// # Errors
    /// [`Error::Io`] when the place does not tell;
    /// [`FileFault::BrokenLink`](crate::error::FileFault::BrokenLink) when a link on the way leads nowhere.
    fn kind(&self, path: &Path) -> Result<Option<PathKind>>;

    /// What is in a folder, in any order.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be listed.
    fn list(&self, folder: &Path) -> Result<Vec<Entry>>;

    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Io`] when there is none, or it cannot be opened.
    fn open(&self, path: &Path) -> Result<Arc<dyn Source>>;

    /// How many files are best opened at a time: as many threads do so, up to 64. The default is one; of a place that is far away, several take
    /// no longer than one.
    fn concurrency(&self) -> usize {
        1
    }
}

/// What a path stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// A file with bytes.
    File,
    /// A folder.
    Folder,
    /// Something else: a pipe, a device.
    Other,
}

/// What a folder has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name, without the folder's.
    pub name: PathBuf,
    /// What it is. A link counts as what it leads to, and one that leads nowhere as a file.
    pub kind: PathKind,
}

/// The file systems of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalFiles;

impl Storage for LocalFiles {
    fn kind(&self, path: &Path) -> Result<Option<PathKind>> {
        match fs::metadata(path) {
            Ok(metadata) => Ok(Some(kind_of(&metadata))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                broken_link(path).map_or(Ok(None), |fault| Err(Error::file(path, None, fault)))
            }
            Err(error) => Err(Error::io("open", path)(error)),
        }
    }

    fn list(&self, folder: &Path) -> Result<Vec<Entry>> {
        let listed = |error: io::Error| Error::io("list", folder)(error);
        let entry = |entry: io::Result<fs::DirEntry>| {
            let name = PathBuf::from(entry.map_err(listed)?.file_name());
            // What cannot be looked at is found out when it is opened.
            let kind = fs::metadata(folder.join(&name)).map_or(PathKind::File, |metadata| kind_of(&metadata));
            Ok(Entry { name, kind })
        };
        fs::read_dir(folder).map_err(listed)?.map(entry).collect()
    }

    fn open(&self, path: &Path) -> Result<Arc<dyn Source>> {
        Ok(Arc::new(FileSource::open(path)?))
    }
}

fn kind_of(metadata: &fs::Metadata) -> PathKind {
    match metadata {
        metadata if metadata.is_dir() => PathKind::Folder,
        metadata if metadata.is_file() => PathKind::File,
        _ => PathKind::Other,
    }
}
