//! The files of a checkpoint with their headers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::header::Header;
use crate::error::{Error, Result};
use crate::threads::{Permits, work_through};
use crate::transfer::{Source, Storage};

/// A file with its header.
pub(super) type Opened = (Arc<dyn Source>, Header);

/// Opens files, each with its number in the checkpoint, and reads their headers. The result has their order.
pub(super) type Open<'o> = &'o mut dyn FnMut(Vec<(usize, PathBuf)>) -> Result<Vec<Opened>>;

/// The most threads that open files.
const MOST: usize = 64;

/// Opens files one after the other by `open`.
///
/// # Errors
/// Those of `open`; as [`Header::read`].
pub(super) fn each(
    files: Vec<(usize, PathBuf)>,
    mut open: impl FnMut(&Path) -> Result<Arc<dyn Source>>,
) -> Result<Vec<Opened>> {
    let with_header = |(number, file): (usize, PathBuf)| with_header(open(&file)?, number);
    files.into_iter().map(with_header).collect()
}

/// Opens files of a storage, as many at a time as it takes well.
///
/// # Errors
/// As [`Storage::open`] and [`Header::read`], of the first file that fails.
pub(super) fn of(storage: &dyn Storage, files: Vec<(usize, PathBuf)>) -> Result<Vec<Opened>> {
    let places: Vec<Mutex<Option<Result<Opened>>>> = files.iter().map(|_| Mutex::default()).collect();
    let permits = Permits::new(storage.concurrency().clamp(1, MOST) - 1);
    let items = files.into_iter().zip(&places).collect();
    work_through(
        items,
        || permits.free(),
        |((number, file), place): ((usize, PathBuf), &Mutex<_>)| {
            let opened = storage.open(&file).and_then(|source| with_header(source, number));
            let failed = opened.is_err();
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
            if failed { Err(()) } else { Ok(()) }
        },
    )
    .ok();
    // Where one fails, others may not have been begun with: the first failure comes before them or after.
    let all: Vec<Option<Result<Opened>>> =
        places.into_iter().map(|place| place.into_inner().unwrap_or_else(PoisonError::into_inner)).collect();
    let complete = all.iter().all(Option::is_some);
    let opened: Result<Vec<Opened>> = all.into_iter().flatten().collect();
    match opened {
        Ok(opened) if complete => Ok(opened),
        Ok(_) => Err(Error::bug("files that were not opened, and none of them failed")),
        Err(error) => Err(error),
    }
}

fn with_header(source: Arc<dyn Source>, number: usize) -> Result<Opened> {
    let header = Header::read(&*source, number)?;
    Ok((source, header))
}
