//! What is beside a model's files.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::transfer::{Entry, PathKind, Source, Storage};

/// A storage while a model in it is being opened. Each folder is listed once.
#[derive(Debug)]
pub(crate) struct Looked<'s> {
    storage: &'s dyn Storage,
    /// The entries of folders, in order of name.
    folders: RefCell<HashMap<PathBuf, Rc<[Entry]>>>,
    /// The files that were opened, where that is dear.
    opened: RefCell<HashMap<PathBuf, Arc<dyn Source>>>,
}

impl<'s> Looked<'s> {
    pub(crate) fn at(storage: &'s dyn Storage) -> Looked<'s> {
        Looked { storage, folders: RefCell::default(), opened: RefCell::default() }
    }

    /// What is at a path; `None` if nothing is.
    ///
    /// # Errors
    /// As [`Storage::kind`].
    pub(crate) fn kind(&self, path: &Path) -> Result<Option<PathKind>> {
        match self.noted(path) {
            Some(noted) => Ok(noted),
            None => self.storage.kind(path),
        }
    }

    /// As [`kind`](Looked::kind), of what has to be there.
    ///
    /// # Errors
    /// As [`Storage::kind`]; [`Error::Io`] when nothing is there.
    pub(crate) fn kind_of_existing(&self, path: &Path) -> Result<PathKind> {
        let nothing = || std::io::Error::new(std::io::ErrorKind::NotFound, "no such file or folder");
        let missing = || Error::io("open", path)(nothing());
        self.kind(path)?.ok_or_else(missing)
    }

    /// Whether a file is there. On this machine, what cannot be looked at is none.
    ///
    /// # Errors
    /// Those of a storage far away, but for its refusal: some say that of a file that is not there, unless one may list them.
    pub(crate) fn is_file(&self, path: &Path) -> Result<bool> {
        match self.kind(path) {
            Ok(kind) => Ok(kind == Some(PathKind::File)),
            Err(error) if self.is_far() && !is_refused(&error) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Whether something is there, which need not be: a configuration.
    ///
    /// # Errors
    /// As [`Storage::kind`], but for the refusal of a storage far away, as [`is_file`](Looked::is_file).
    pub(crate) fn exists(&self, path: &Path) -> Result<bool> {
        match self.kind(path) {
            Ok(kind) => Ok(kind.is_some()),
            Err(error) if self.is_far() && is_refused(&error) => {
                tracing::warn!(%error, "a file that is refused is taken for none");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether a file that belongs to a model is known not to be there. Of a storage far away this is known of what is in a folder that
    /// can be [listed](Looked::look_into); else opening tells.
    ///
    /// # Errors
    /// As [`Storage::kind`].
    pub(crate) fn is_absent(&self, path: &Path) -> Result<bool> {
        match self.is_far() {
            true => Ok(self.noted(path) == Some(None)),
            false => Ok(self.kind(path)?.is_none()),
        }
    }

    /// Lists a folder of which several files will be asked for, where each question takes its time.
    pub(crate) fn look_into(&self, folder: &Path) {
        if self.is_far() {
            // Without the list, opening tells what is there.
            let _ = self.list(folder);
        }
    }

    /// Whether a file is there, as far as the listing of its folder has told.
    pub(crate) fn is_noted_file(&self, path: &Path) -> bool {
        self.noted(path) == Some(Some(PathKind::File))
    }

    /// As [`is_folder`](Looked::is_folder), of a path that decides what is read next.
    ///
    /// # Errors
    /// Those of a storage far away.
    pub(crate) fn is_known_folder(&self, path: &Path) -> Result<bool> {
        match self.kind(path) {
            Ok(kind) => Ok(kind == Some(PathKind::Folder)),
            Err(error) if self.is_far() => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Whether a folder is there. What cannot be looked at is none.
    pub(crate) fn is_folder(&self, path: &Path) -> bool {
        matches!(self.kind(path), Ok(Some(PathKind::Folder)))
    }

    /// What the listing of its folder has told of a path: `Some(None)` if nothing is there. `None` where a look costs nothing.
    fn noted(&self, path: &Path) -> Option<Option<PathKind>> {
        if !self.is_far() {
            return None;
        }
        let folders = self.folders.borrow();
        let (folder, name) = (folders.get(path.parent()?)?, Path::new(path.file_name()?));
        Some(folder.iter().find(|entry| entry.name == name).map(|entry| entry.kind))
    }

    /// The entries of a folder, in order of name.
    ///
    /// # Errors
    /// As [`Storage::list`].
    pub(crate) fn list(&self, folder: &Path) -> Result<Rc<[Entry]>> {
        if let Some(listed) = self.folders.borrow().get(folder) {
            return Ok(Rc::clone(listed));
        }
        let mut entries = self.storage.list(folder)?;
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        let entries: Rc<[Entry]> = entries.into();
        self.folders.borrow_mut().insert(folder.to_owned(), Rc::clone(&entries));
        Ok(entries)
    }

    /// Opens a file, where that is dear only once.
    ///
    /// # Errors
    /// As [`Storage::open`].
    pub(crate) fn open(&self, path: &Path) -> Result<Arc<dyn Source>> {
        if !self.is_far() {
            return self.storage.open(path);
        }
        if let Some(opened) = self.opened.borrow().get(path) {
            return Ok(Arc::clone(opened));
        }
        let source = self.storage.open(path)?;
        self.opened.borrow_mut().insert(path.to_owned(), Arc::clone(&source));
        Ok(source)
    }

    /// Whether what is asked of the storage takes its time, as that of several threads at once tells.
    pub(crate) fn is_far(&self) -> bool {
        self.storage.concurrency() > 1
    }

    /// The storage.
    pub(crate) fn storage(&self) -> &'s dyn Storage {
        self.storage
    }
}

fn is_refused(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied)
}
