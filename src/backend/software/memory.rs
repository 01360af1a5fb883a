//! The bytes behind software devices, and copies between any two kinds of them.

#![expect(unsafe_code, reason = "the order of accesses is that of events, which the compiler cannot see")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::File;
use std::io::{Error as IoError, ErrorKind as IoErrorKind, Result as IoResult};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};

use crate::backend::{MemoryBlock, Storage};
use crate::device::DeviceId;
use crate::error::{Error, Missing, Result};

/// From this size on memory is mapped for itself: it goes back to the system when it is freed, and huge pages
/// make the first touch several times faster.
const MAPPED_FROM: usize = 1 << 20;

/// What memory is aligned to; mapped memory is aligned to pages.
const ALIGNMENT: usize = 64;

/// Owned host memory, aligned to [`ALIGNMENT`] or more, zeroed.
pub(in crate::backend) struct HostAllocation {
    address: NonNull<u8>,
    bytes: usize,
    backing: Backing,
}

/// Where host memory comes from and goes back to.
enum Backing {
    Heap(Layout),
    Mapped(#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "held to be unmapped in the end"))] MmapRaw),
}

// SAFETY: the memory is owned by this value alone, whichever thread has it.
unsafe impl Send for HostAllocation {}
// SAFETY: a shared reference gives an address and touches no byte.
unsafe impl Sync for HostAllocation {}

impl HostAllocation {
    pub(in crate::backend) fn new(bytes: usize) -> IoResult<HostAllocation> {
        let no_memory = || IoError::from(IoErrorKind::OutOfMemory);
        if bytes >= MAPPED_FROM {
            let map = MmapRaw::from(MmapMut::map_anon(bytes)?);
            #[cfg(target_os = "linux")]
            // Refused where the kernel is built without huge pages; ordinary ones do then.
            let _ = map.advise(memmap2::Advice::HugePage);
            let address = NonNull::new(map.as_mut_ptr()).ok_or_else(no_memory)?;
            return Ok(HostAllocation { address, bytes, backing: Backing::Mapped(map) });
        }
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).map_err(|_| no_memory())?;
        // SAFETY: the size is not zero.
        let address = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(no_memory)?;
        Ok(HostAllocation { address, bytes, backing: Backing::Heap(layout) })
    }

    pub(in crate::backend) fn address(&self) -> NonNull<u8> {
        self.address
    }

    pub(in crate::backend) fn bytes(&self) -> usize {
        self.bytes
    }

    /// All bytes, to write before anybody else has the address.
    ///
    /// # Safety
    /// The address was given to nobody who uses it while the slice lives.
    #[cfg(any(test, feature = "cuda"))]
    pub(in crate::backend) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: so many bytes were allocated, zeroed, and are this value's own.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }

    /// Keeps it out of processes that are forked from this one, where the system can: pages that a device has pinned
    /// would otherwise be copied away from it when they are next written here.
    #[cfg(feature = "cuda")]
    pub(in crate::backend) fn keep_from_forks(&self) {
        #[cfg(target_os = "linux")]
        if let Backing::Mapped(map) = &self.backing
            && let Err(error) = map.advise(memmap2::Advice::DontFork)
        {
            tracing::debug!(%error, "pinned memory will be copied when the process forks");
        }
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        if let Backing::Heap(layout) = self.backing {
            // SAFETY: allocated with this layout, freed once.
            unsafe { dealloc(self.address.as_ptr(), layout) };
        }
    }
}

/// Host memory of a software device.
pub(super) struct RamMemory {
    memory: HostAllocation,
    visible: bool,
}

impl RamMemory {
    pub(super) fn visible(memory: HostAllocation) -> RamMemory {
        RamMemory { memory, visible: true }
    }

    pub(super) fn hidden(memory: HostAllocation) -> RamMemory {
        RamMemory { memory, visible: false }
    }
}

// SAFETY: the memory is this value's own, stays where it is until it is dropped, and was zeroed.
unsafe impl Storage for RamMemory {
    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn host(&self) -> Option<NonNull<u8>> {
        self.visible.then(|| self.memory.address())
    }
}

/// A part of the disk: a file without a name, which the system removes when it is closed.
pub(super) struct FileMemory {
    file: Mutex<File>,
    bytes: usize,
    folder: PathBuf,
}

impl FileMemory {
    pub(super) fn new(folder: &Path, bytes: usize) -> Result<FileMemory> {
        let file = unnamed_file(folder).map_err(Error::io("create a file in", folder))?;
        file.set_len(bytes as u64).map_err(Error::io("grow a file in", folder))?;
        Ok(FileMemory { file: Mutex::new(file), bytes, folder: folder.to_owned() })
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

// SAFETY: it has no address.
unsafe impl Storage for FileMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Memory of which there is only the size.
pub(super) struct SizeOnly(pub(super) usize);

// SAFETY: it has no address.
unsafe impl Storage for SizeOnly {
    fn bytes(&self) -> usize {
        self.0
    }
}

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
    Ram(NonNull<u8>),
    File(&'a FileMemory),
    SizeOnly,
}

impl<'a> Reach<'a> {
    /// How `allocation` is reached; none where it is not.
    fn of(allocation: &'a MemoryBlock) -> Option<Reach<'a>> {
        if let Some(ram) = allocation.downcast::<RamMemory>() {
            Some(Reach::Ram(ram.memory.address()))
        } else if let Some(file) = allocation.downcast::<FileMemory>() {
            Some(Reach::File(file))
        } else if allocation.downcast::<SizeOnly>().is_some() {
            Some(Reach::SizeOnly)
        } else {
            allocation.host().map(Reach::Ram)
        }
    }
}

/// Copies `from` of `src` to `at` of `dst`.
///
/// # Safety
/// Both ranges are inside their allocations, and they share no byte. Nobody writes the one, and nobody reads or writes the
/// other, until this returns.
pub(super) unsafe fn copy(src: &MemoryBlock, from: Range<usize>, dst: &MemoryBlock, at: usize) -> Result<()> {
    let bytes = from.len();
    let written = |start: NonNull<u8>| {
        // SAFETY: inside the allocation, and nobody else's until this returns.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr().add(at), bytes) }
    };
    let read = |start: NonNull<u8>| {
        // SAFETY: inside the allocation, and written by nobody until this returns.
        unsafe { std::slice::from_raw_parts(start.as_ptr().add(from.start), bytes) }
    };
    let (Some(reached_src), Some(reached_dst)) = (Reach::of(src), Reach::of(dst)) else {
        return Err(Error::bug(format!("a copy from {src:?} to {dst:?} that was queued and cannot be made")));
    };
    match (reached_src, reached_dst) {
        (_, Reach::SizeOnly) => Ok(()),
        (Reach::SizeOnly, _) => Err(no_bytes(src)),
        (Reach::Ram(src), Reach::Ram(dst)) => {
            written(dst).copy_from_slice(read(src));
            Ok(())
        }
        (Reach::File(src), Reach::Ram(dst)) => src.read(from.start, written(dst)),
        (Reach::Ram(src), Reach::File(dst)) => dst.write(at, read(src)),
        (Reach::File(src), Reach::File(dst)) => {
            let mut chunk = vec![0; bytes.min(MAPPED_FROM)];
            let mut done = 0;
            while done < bytes {
                let part = chunk.len().min(bytes - done);
                src.read(from.start + done, &mut chunk[..part])?;
                dst.write(at + done, &chunk[..part])?;
                done += part;
            }
            Ok(())
        }
    }
}

/// Whether a stream of software of the device `stream` can copy from the one to the other: it reaches both, and no bytes
/// are asked of memory that has none.
pub(super) fn copyable(stream: DeviceId, src: &MemoryBlock, dst: &MemoryBlock) -> Result<()> {
    match (Reach::of(src), Reach::of(dst)) {
        (Some(Reach::SizeOnly), Some(Reach::Ram(_) | Reach::File(_))) => Err(no_bytes(src)),
        (Some(_), Some(_)) => Ok(()),
        _ => Err(Error::Unreachable { stream, from: src.device(), to: dst.device() }),
    }
}

fn no_bytes(src: &MemoryBlock) -> Error {
    Missing::Bytes { device: src.device() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_aligned_at_every_size() {
        for bytes in [0, 1, 63, 64, 65, 4096, MAPPED_FROM - 1, MAPPED_FROM, MAPPED_FROM + 1] {
            let mut allocation = HostAllocation::new(bytes).unwrap();
            assert_eq!(allocation.bytes(), bytes);
            // SAFETY: nobody else has the address.
            let all = unsafe { allocation.bytes_mut() };
            assert_eq!((all.as_ptr() as usize % ALIGNMENT, all.iter().all(|&byte| byte == 0)), (0, true));
            all.fill(1);
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
