//! The bytes behind software devices, and copies between any two kinds of them.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};

use memmap2::MmapMut;

use crate::backend::{Allocation, HostBytes, Storage};
use crate::error::{Error, Result};

/// From this size on memory is mapped for itself: it goes back to the system when it is freed, and huge pages
/// make the first touch several times faster.
const MAPPED_FROM: usize = 1 << 20;

/// What memory is aligned to; mapped memory is aligned to pages.
const ALIGNMENT: usize = 64;

/// Owned host memory, aligned to [`ALIGNMENT`] or more, zeroed.
pub(in crate::backend) enum HostAllocation {
    Small { bytes: Vec<u8>, range: Range<usize> },
    Mapped(MmapMut),
}

impl HostAllocation {
    pub(in crate::backend) fn new(bytes: usize) -> std::io::Result<HostAllocation> {
        if bytes >= MAPPED_FROM {
            let map = MmapMut::map_anon(bytes)?;
            #[cfg(target_os = "linux")]
            // Refused where the kernel is built without huge pages; ordinary ones do then.
            let _ = map.advise(memmap2::Advice::HugePage);
            return Ok(HostAllocation::Mapped(map));
        }
        let all = vec![0; bytes + ALIGNMENT];
        let start = all.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Ok(HostAllocation::Small { bytes: all, range: start..start + bytes })
    }
}

impl HostBytes for HostAllocation {
    fn bytes(&self) -> &[u8] {
        match self {
            HostAllocation::Small { bytes, range } => &bytes[range.clone()],
            HostAllocation::Mapped(map) => map,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            HostAllocation::Small { bytes, range } => &mut bytes[range.clone()],
            HostAllocation::Mapped(map) => map,
        }
    }
}

/// Host memory of a software device.
pub(super) struct RamMemory {
    bytes: RwLock<Box<dyn HostBytes>>,
    visible: bool,
}

impl RamMemory {
    pub(super) fn visible(allocation: HostAllocation) -> RamMemory {
        RamMemory { bytes: RwLock::new(Box::new(allocation)), visible: true }
    }

    pub(super) fn hidden(allocation: HostAllocation) -> RamMemory {
        RamMemory { visible: false, ..RamMemory::visible(allocation) }
    }
}

impl Storage for RamMemory {
    fn host(&self) -> Option<&RwLock<Box<dyn HostBytes>>> {
        self.visible.then_some(&self.bytes)
    }
}

/// A part of the disk: a file without a name, which the system removes when it is closed.
pub(super) struct FileMemory {
    file: Mutex<File>,
    folder: PathBuf,
}

impl FileMemory {
    pub(super) fn new(folder: &Path, bytes: u64) -> Result<FileMemory> {
        let file = unnamed_file(folder).map_err(Error::io("create a file in", folder))?;
        file.set_len(bytes).map_err(Error::io("grow a file in", folder))?;
        Ok(FileMemory { file: Mutex::new(file), folder: folder.to_owned() })
    }

    fn read(&self, at: usize, dst: &mut [u8]) -> Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file.seek(SeekFrom::Start(at as u64)).and_then(|_| file.read_exact(dst));
        read.map_err(Error::io("read a file in", &self.folder))
    }

    fn write(&self, at: usize, src: &[u8]) -> Result<()> {
        use std::io::{Seek, SeekFrom, Write};
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = file.seek(SeekFrom::Start(at as u64)).and_then(|_| file.write_all(src));
        written.map_err(Error::io("write a file in", &self.folder))
    }
}

impl Storage for FileMemory {}

/// Memory of which there is only the size.
pub(super) struct SizeOnly;

impl Storage for SizeOnly {}

/// A new file in `folder` that no name leads to.
fn unnamed_file(folder: &Path) -> std::io::Result<File> {
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
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => {
                #[cfg(not(windows))]
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
}

/// How a software stream reaches the bytes of an allocation.
enum Reach<'a> {
    Ram(&'a RwLock<Box<dyn HostBytes>>),
    File(&'a FileMemory),
    SizeOnly,
}

impl<'a> Reach<'a> {
    fn of(allocation: &'a Allocation) -> Result<Reach<'a>> {
        if let Some(ram) = allocation.downcast::<RamMemory>() {
            Ok(Reach::Ram(&ram.bytes))
        } else if let Some(file) = allocation.downcast::<FileMemory>() {
            Ok(Reach::File(file))
        } else if allocation.downcast::<SizeOnly>().is_some() {
            Ok(Reach::SizeOnly)
        } else if let Some(host) = allocation.storage().host() {
            Ok(Reach::Ram(host))
        } else {
            Err(Error::invalid(format!("a software stream cannot reach the memory of {}", allocation.device())))
        }
    }
}

/// Copies `from` of `src` to `at` of `dst`. Both ranges are inside their allocations.
pub(super) fn copy(src: &Allocation, from: Range<usize>, dst: &Allocation, at: usize) -> Result<()> {
    let to = at..at + from.len();
    match (Reach::of(src)?, Reach::of(dst)?) {
        (_, Reach::SizeOnly) => Ok(()),
        (Reach::SizeOnly, _) => Err(no_bytes(src)),
        (Reach::Ram(src), Reach::Ram(dst)) => {
            let src = src.read().unwrap_or_else(PoisonError::into_inner);
            let mut dst = dst.write().unwrap_or_else(PoisonError::into_inner);
            dst.bytes_mut()[to].copy_from_slice(&src.bytes()[from]);
            Ok(())
        }
        (Reach::File(src), Reach::Ram(dst)) => {
            let mut dst = dst.write().unwrap_or_else(PoisonError::into_inner);
            src.read(from.start, &mut dst.bytes_mut()[to])
        }
        (Reach::Ram(src), Reach::File(dst)) => {
            let src = src.read().unwrap_or_else(PoisonError::into_inner);
            dst.write(at, &src.bytes()[from])
        }
        (Reach::File(src), Reach::File(dst)) => {
            let mut chunk = vec![0; from.len().min(MAPPED_FROM)];
            let mut done = 0;
            while done < from.len() {
                let bytes = chunk.len().min(from.len() - done);
                src.read(from.start + done, &mut chunk[..bytes])?;
                dst.write(at + done, &chunk[..bytes])?;
                done += bytes;
            }
            Ok(())
        }
    }
}

/// Whether a stream of software can copy from the one to the other: it reaches both, and no bytes are asked of
/// memory that has none.
pub(super) fn copyable(src: &Allocation, dst: &Allocation) -> Result<()> {
    match (Reach::of(src)?, Reach::of(dst)?) {
        (Reach::SizeOnly, Reach::Ram(_) | Reach::File(_)) => Err(no_bytes(src)),
        _ => Ok(()),
    }
}

fn no_bytes(src: &Allocation) -> Error {
    Error::invalid(format!("the memory of {} has only sizes, no bytes that could be copied elsewhere", src.device()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_aligned_at_every_size() {
        for bytes in [0, 1, 63, 64, 65, 4096, MAPPED_FROM - 1, MAPPED_FROM, MAPPED_FROM + 1] {
            let mut allocation = HostAllocation::new(bytes).unwrap();
            assert_eq!(allocation.bytes().len(), bytes);
            assert_eq!(allocation.bytes_mut().as_ptr() as usize % ALIGNMENT, 0);
        }
    }

    #[test]
    fn files_leave_no_name_behind() {
        let folder = tempfile::tempdir().unwrap();
        let memory = FileMemory::new(folder.path(), 10).unwrap();
        memory.write(3, b"abc").unwrap();
        let mut back = [0; 5];
        memory.read(2, &mut back).unwrap();
        assert_eq!(&back, b"\0abc\0");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
