//! Memory on the disk: ranges of unnamed files, which the system removes when they are closed.
//!
//! All memory of a device lies in one file, or a few, since a process may have only so many files open and a model may have
//! thousands of tensors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Error, Result};
use crate::file::read::{ReadPart, Reader};
use crate::file::{OpenFile, within_limit};

/// The alignment of ranges, so that what the file system gives back are whole pages.
const ALIGNMENT: u64 = 4096;

/// The folder of a disk device.
pub(in crate::backend) struct DiskFolder {
    path: PathBuf,
    /// The files that hold memory. One is closed with the last of its memory.
    files: Mutex<Vec<Weak<SharedFile>>>,
}

impl DiskFolder {
    pub(in crate::backend) fn new(path: impl Into<PathBuf>) -> DiskFolder {
        DiskFolder { path: path.into(), files: Mutex::default() }
    }

    /// Takes a range of a file.
    pub(super) fn allocate(&self, bytes: usize) -> Result<FileMemory> {
        let mut files = lock(&self.files);
        files.retain(|file| file.strong_count() > 0);
        for file in files.iter().filter_map(Weak::upgrade) {
            // A file may have reached the largest size that the system or the file system allows.
            match file.take(bytes as u64) {
                Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {}
                taken => return Ok(self.memory(&file, taken.map_err(Error::io("grow a file in", &self.path))?, bytes)),
            }
        }
        let file = unnamed_file(&self.path).map_err(Error::io("create a file in", &self.path))?;
        let file = Arc::new(SharedFile::new(file));
        let at = file.take(bytes as u64).map_err(Error::io("grow a file in", &self.path))?;
        files.push(Arc::downgrade(&file));
        Ok(self.memory(&file, at, bytes))
    }

    fn memory(&self, file: &Arc<SharedFile>, at: u64, bytes: usize) -> FileMemory {
        FileMemory { file: Arc::clone(file), at, bytes, folder: self.path.clone() }
    }
}

/// A file whose ranges are memory.
struct SharedFile {
    file: OpenFile,
    reader: Reader,
    extents: Mutex<Extents>,
}

impl SharedFile {
    fn new(file: File) -> SharedFile {
        SharedFile { file: OpenFile::new(file), reader: Reader::default(), extents: Mutex::default() }
    }

    fn read(&self, at: u64, dst: &mut [u8]) -> io::Result<()> {
        let end = lock(&self.extents).end;
        self.reader.read_parts(&self.file.calls(end), vec![ReadPart::new(at, dst)])
    }

    /// Takes a range that is free, or grows the file.
    fn take(&self, bytes: u64) -> io::Result<u64> {
        let mut extents = lock(&self.extents);
        let (at, end) = extents.find(room_of(bytes));
        if end > extents.end {
            within_limit(end)?;
        }
        if bytes > 0 {
            self.file.positional().reserve(at, room_of(bytes))?;
        }
        extents.take(at, room_of(bytes));
        Ok(at)
    }

    /// Gives a range back.
    fn give_back(&self, at: u64, bytes: u64) {
        let mut extents = lock(&self.extents);
        let before = extents.end;
        extents.give_back(at, room_of(bytes));
        if extents.end < before {
            // A file that stays long is no fault: it is used again.
            let _ = self.file.positional().set_len(extents.end);
        } else {
            self.file.positional().punch(at, room_of(bytes));
        }
    }
}

fn room_of(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// The free ranges of a file, and where the last that is not free ends.
#[derive(Debug, Default, PartialEq)]
struct Extents {
    /// From the start of each free range to its end. Two free ranges never touch, nor does one the end of the file.
    free: BTreeMap<u64, u64>,
    end: u64,
}

impl Extents {
    /// The first place for so many bytes, and where they end.
    fn find(&self, bytes: u64) -> (u64, u64) {
        let at = self.free.iter().find(|&(start, end)| end - start >= bytes).map_or(self.end, |(&start, _)| start);
        (at, at + bytes)
    }

    /// Takes the bytes at a place that was found.
    fn take(&mut self, at: u64, bytes: u64) {
        if let Some(end) = self.free.remove(&at)
            && at + bytes < end
        {
            self.free.insert(at + bytes, end);
        }
        self.end = self.end.max(at + bytes);
    }

    fn give_back(&mut self, mut at: u64, bytes: u64) {
        let mut end = at + bytes;
        if let Some((&before, _)) = self.free.range(..at).next_back().filter(|&(_, &free)| free == at) {
            self.free.remove(&before);
            at = before;
        }
        end = self.free.remove(&end).unwrap_or(end);
        if end == self.end {
            self.end = at;
        } else if end > at {
            self.free.insert(at, end);
        }
    }
}

/// Memory on the disk.
pub(super) struct FileMemory {
    file: Arc<SharedFile>,
    /// Where it begins in the file.
    at: u64,
    bytes: usize,
    folder: PathBuf,
}

impl FileMemory {
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn read(&self, at: usize, dst: &mut [u8]) -> Result<()> {
        self.file.read(self.at + at as u64, dst).map_err(Error::io("read a file in", &self.folder))
    }

    pub(super) fn write(&self, at: usize, src: &[u8]) -> Result<()> {
        self.file
            .file
            .positional()
            .write_all_at(src, self.at + at as u64)
            .map_err(Error::io("write a file in", &self.folder))
    }
}

impl Drop for FileMemory {
    fn drop(&mut self) {
        self.file.give_back(self.at, self.bytes as u64);
    }
}

/// Creates an unnamed file in `folder`.
fn unnamed_file(folder: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{Mode, OFlags, open};
        // A file that never has a name, where the file system has such files.
        if let Ok(file) = open(folder, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR) {
            return Ok(file.into());
        }
    }
    named_and_removed(folder)
}

/// As [`unnamed_file`], where a file gets a name first.
fn named_and_removed(folder: &Path) -> io::Result<File> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".tensor-offload-{}-{number}", std::process::id()));
        #[cfg(windows)]
        {
            use std::os::windows::fs::OpenOptionsExt;
            const FILE_FLAG_DELETE_ON_CLOSE: u32 = 0x0400_0000;
            options.custom_flags(FILE_FLAG_DELETE_ON_CLOSE);
        }
        match options.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => {
                let removed = std::fs::remove_file(&path);
                // There the name goes with the file at the latest, and with this where the file system can do it.
                if cfg!(not(windows)) {
                    removed?;
                }
                return Ok(file);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn files_leave_no_name_behind() {
        let folder = tempfile::tempdir().unwrap();
        let disk = DiskFolder::new(folder.path());
        let memory = disk.allocate(10).unwrap();
        memory.write(3, b"abc").unwrap();
        let mut back = [0; 5];
        memory.read(2, &mut back).unwrap();
        assert_eq!(&back, b"\0abc\0");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        // There the name may stay as long as the file.
        assert!(names() == 0 || cfg!(windows));
        drop((memory, disk));
        assert_eq!(names(), 0);
    }

    #[test]
    fn memory_of_one_file_keeps_apart_and_is_used_again() {
        let folder = tempfile::tempdir().unwrap();
        let disk = DiskFolder::new(folder.path());
        let mut kept: Vec<(FileMemory, u8)> = Vec::new();
        for number in 0..60u8 {
            let memory = disk.allocate(5000 * usize::from(number % 4)).unwrap();
            memory.write(0, &vec![number; memory.len()]).unwrap();
            kept.push((memory, number));
            if number % 3 == 2 {
                kept.remove(usize::from(number) / 3);
            }
        }
        for (memory, number) in &kept {
            let mut bytes = vec![0; memory.len()];
            memory.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| byte == number), "{number}");
        }
        assert_eq!(lock(&disk.files).len(), 1);
        let file = Arc::clone(&kept[0].0.file);
        let taken: u64 = kept.iter().map(|(memory, _)| room_of(memory.len() as u64)).sum();
        assert!(file.file.positional().metadata().unwrap().len() < 2 * taken);
        kept.clear();
        assert_eq!((lock(&file.extents).end, file.file.positional().metadata().unwrap().len()), (0, 0));
        drop(file);
        disk.allocate(1).unwrap();
        assert_eq!(lock(&disk.files).len(), 1, "the first was closed");
    }

    /// The limit is a process's, so the test runs in one of its own.
    #[cfg(unix)]
    #[test]
    fn memory_goes_on_in_another_file_where_one_may_not_grow() {
        use rustix::process::{Resource, Rlimit, setrlimit};
        const IN_CHILD: &str = "TENSOR_OFFLOAD_FILES_IN_CHILD";
        const MOST: u64 = 64 << 10;
        if std::env::var_os(IN_CHILD).is_none() {
            let test = "backend::software::files::tests::memory_goes_on_in_another_file_where_one_may_not_grow";
            let program = std::env::current_exe().unwrap();
            let child =
                std::process::Command::new(program).args([test, "--exact"]).env(IN_CHILD, "1").output().unwrap();
            let said = String::from_utf8_lossy(&child.stdout).into_owned();
            assert!(child.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        setrlimit(Resource::Fsize, Rlimit { current: Some(MOST), maximum: Some(MOST) }).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let disk = DiskFolder::new(folder.path());
        let kept: Vec<FileMemory> = (0..3).map(|_| disk.allocate(40 << 10).unwrap()).collect();
        for (memory, byte) in kept.iter().zip(1..) {
            memory.write(0, &[byte; 40 << 10]).unwrap();
        }
        for (memory, byte) in kept.iter().zip(1..) {
            let mut bytes = vec![0; memory.len()];
            memory.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&found| found == byte));
        }
        assert_eq!(lock(&disk.files).len(), 3);
        // What fits no file is an error.
        assert!(matches!(disk.allocate(65 << 10), Err(Error::Io { .. })));
    }

    /// No other file helps against an error of another kind, such as that of a file that cannot be written.
    #[test]
    fn a_file_that_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("m"), "").unwrap();
        let file = File::open(folder.path().join("m")).unwrap();
        let file = Arc::new(SharedFile::new(file));
        let disk = DiskFolder::new(folder.path());
        lock(&disk.files).push(Arc::downgrade(&file));
        assert!(matches!(disk.allocate(1), Err(Error::Io { .. })));
    }

    /// Names left by a process that had the same id and was killed before it removed them.
    #[test]
    fn a_name_that_is_taken_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let taken = |number: usize| folder.path().join(format!(".tensor-offload-{}-{number}", std::process::id()));
        (0..500).for_each(|number| std::fs::write(taken(number), "left").unwrap());
        let mut file = named_and_removed(folder.path()).unwrap();
        io::Write::write_all(&mut file, b"ours").unwrap();
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 500);
        (0..500).for_each(|number| assert_eq!(std::fs::read(taken(number)).unwrap(), b"left"));
        let missing = DiskFolder::new(folder.path().join("none")).allocate(4);
        assert!(matches!(missing, Err(Error::Io { .. })));
    }

    proptest! {
        /// Whatever is taken and given back, what is taken never overlaps, and all given back leaves nothing.
        #[test]
        fn ranges_never_overlap(steps in prop::collection::vec((1u64..9, any::<prop::sample::Index>(), any::<bool>()), 1..80)) {
            let (mut extents, mut taken) = (Extents::default(), Vec::<(u64, u64)>::new());
            for (bytes, which, back) in steps {
                if back && !taken.is_empty() {
                    let (at, end) = taken.swap_remove(which.index(taken.len()));
                    extents.give_back(at, end - at);
                } else {
                    let (at, end) = extents.find(bytes);
                    extents.take(at, bytes);
                    taken.push((at, end));
                }
                taken.sort_unstable();
                prop_assert!(taken.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                prop_assert_eq!(extents.end, taken.iter().map(|range| range.1).max().unwrap_or(0));
                let free: u64 = extents.free.iter().map(|(start, end)| end - start).sum();
                prop_assert_eq!(free + taken.iter().map(|(at, end)| end - at).sum::<u64>(), extents.end);
            }
            taken.drain(..).for_each(|(at, end)| extents.give_back(at, end - at));
            prop_assert_eq!(extents, Extents::default());
        }
    }
}
