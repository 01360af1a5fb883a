//! Files that get their name when they are whole.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::file::within_limit;

/// How the names of temporary files begin and end. Between are the process and a number.
const NAME: (&str, &str) = (".tensor-offload-", ".tmp");

/// A temporary file in the target's folder. Removed unless it is renamed to the target.
///
/// The process that writes it has it locked, and the system ends the lock with the process. So a file of this kind without a
/// lock is one that a killed process left behind.
#[derive(Debug)]
pub(super) struct Temporary {
    pub(super) out: BufWriter<File>,
    /// `None` once it was renamed.
    path: Option<PathBuf>,
}

impl Temporary {
    /// Creates a file for so many bytes, and removes what killed processes left in its folder.
    pub(super) fn beside(target: &Path, bytes: u64) -> Result<Temporary> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // A rename would fail on a folder only when all is written, and would replace a device or a pipe.
        if target.file_name().is_none() || fs::metadata(target).is_ok_and(|m| !m.is_file()) {
            let not_regular = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::io("write", target)(not_regular));
        }
        within_limit(bytes).map_err(Error::io("write", target))?;
        remove_left_behind(folder_of(target));
        loop {
            let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = target.with_file_name(format!("{}{process}-{number}{}", NAME.0, NAME.1));
            match File::options().write(true).create_new(true).open(&path) {
                // Another process may have taken it for one that was left behind, before it was locked.
                Ok(file) if !is_locked_here(&file, &path) => {}
                Ok(file) => {
                    let out = BufWriter::with_capacity(1 << 20, file);
                    return Ok(Temporary { out, path: Some(path) });
                }
                // Left by a process that died and had the same id.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io("create", target)(error)),
            }
        }
    }

    pub(super) fn rename_to(mut self, target: &Path) -> Result<()> {
        self.out.flush().and_then(|()| self.out.get_ref().sync_all()).map_err(Error::io("write", target))?;
        if let Some(path) = &self.path {
            fs::rename(path, target).map_err(Error::io("replace", target))?;
        }
        self.path = None;
        sync_folder_of(target);
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Only after an error, which is the one to report.
            let _ = fs::remove_file(path);
        }
    }
}

/// Locks a new file, and tells whether it still is this process's: where locks work, it is locked and has its name.
fn is_locked_here(file: &File, path: &Path) -> bool {
    match file.try_lock() {
        Ok(()) => is_named(file, path),
        Err(TryLockError::WouldBlock) => false,
        // Without locks in the file system nobody removes it.
        Err(TryLockError::Error(_)) => true,
    }
}

/// Removes the temporary files in a folder whose writers are gone. What cannot be removed stays; that is no fault of the
/// write that is to begin.
fn remove_left_behind(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // Not a link, which could lead anywhere.
        if !is_ours(&entry.file_name()) || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        // Opened for writing: network file systems lock no other.
        let Ok(file) = File::options().write(true).open(&path) else { continue };
        if file.try_lock().is_ok() && is_named(&file, &path) {
            let removed = fs::remove_file(&path);
            tracing::info!(path = %path.display(), ?removed, "a file that a killed process left behind");
        }
    }
}

/// Whether a name is that of a temporary file.
fn is_ours(name: &std::ffi::OsStr) -> bool {
    let numbers = name.to_str().and_then(|name| name.strip_prefix(NAME.0)?.strip_suffix(NAME.1)?.split_once('-'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(process, number)| is_number(process) && is_number(number))
}

/// Whether `path` is the name of an open file.
#[cfg(unix)]
fn is_named(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let of = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (open, named) = (file.metadata().map(of), fs::symlink_metadata(path).map(of));
    matches!((open, named), (Ok(open), Ok(named)) if open == named)
}

/// Whether `path` is the name of an open file. An open file keeps its name from others here.
#[cfg(not(unix))]
fn is_named(_file: &File, path: &Path) -> bool {
    path.exists()
}

/// The folder of a file; that of the process for a mere name.
fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes a new name in a folder durable. On systems that cannot sync a folder, this is not needed.
fn sync_folder_of(file: &Path) {
    if let Ok(folder) = File::open(folder_of(file)) {
        let _ = folder.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("m");
        let others = [".tensor-offload-1-x.tmp", ".tensor-offload-1-2.tmp.bak", ".tensor-offload--2.tmp", "m.tmp"];
        for name in others.iter().chain(&[".tensor-offload-4194305-0.tmp", ".tensor-offload-1-7.tmp"]) {
            fs::write(folder.path().join(name), "left").unwrap();
        }
        fs::create_dir(folder.path().join(".tensor-offload-3-3.tmp")).unwrap();
        let mut writing = Temporary::beside(&target, 3).unwrap();
        let own = writing.path.clone().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        let mut wanted: Vec<&str> = others.iter().copied().chain([".tensor-offload-3-3.tmp", &own]).collect();
        wanted.sort_unstable();
        assert_eq!(names(folder.path()), wanted);
        // A second writer to the same place.
        let second = Temporary::beside(&target, 3).unwrap();
        writing.out.write_all(b"one").unwrap();
        writing.rename_to(&target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"one");
        second.rename_to(&target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"");
        assert_eq!(names(folder.path()).iter().filter(|name| is_ours(name.as_ref())).count(), 1, "the folder");
    }

    /// What has the name of a temporary file and is none stays, and another name is taken.
    #[test]
    fn a_name_that_is_taken_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let process = std::process::id();
        let taken = |number: usize| folder.path().join(format!("{}{process}-{number}{}", NAME.0, NAME.1));
        (0..1_000).for_each(|number| fs::create_dir(taken(number)).unwrap());
        let target = folder.path().join("m");
        let mut file = Temporary::beside(&target, 4).unwrap();
        file.out.write_all(b"full").unwrap();
        file.rename_to(&target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"full");
        assert_eq!(names(folder.path()).len(), 1_001);
        assert!(Temporary::beside(&folder.path().join("none").join("m"), 4).is_err());
    }

    /// Writers that begin and end while others look for what was left behind.
    #[test]
    fn writers_at_one_time_do_not_lose_their_files() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let target = folder.path().join(format!("m{thread}"));
                scope.spawn(move || {
                    for _ in 0..50 {
                        let mut file = Temporary::beside(&target, 4).unwrap();
                        file.out.write_all(b"full").unwrap();
                        file.rename_to(&target).unwrap();
                        assert_eq!(fs::read(&target).unwrap(), b"full");
                    }
                });
            }
        });
        assert_eq!(names(folder.path()), ["m0", "m1", "m2", "m3"]);
    }
}
