//! The memory of software devices, and copies between any two kinds of it.

#![expect(unsafe_code, reason = "events order the accesses, which the compiler cannot see")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io::{Error as IoError, ErrorKind as IoErrorKind, Result as IoResult};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

use super::extents::{ExtentMemory, Wanted, read_all};
use super::files::FileMemory;
use crate::backend::{MemoryBlock, SharedMemory, Storage};
use crate::device::DeviceId;
use crate::error::{Error, Missing, Result};

/// The size from which memory is mapped separately: it is returned to the system when it is freed, and huge pages make the
/// first touch several times faster.
const MAPPED_FROM: usize = 1 << 20;

/// The alignment of heap memory in bytes; mapped memory is aligned to pages.
const ALIGNMENT: usize = 64;

/// Owned host memory, aligned to [`ALIGNMENT`] or more, zeroed.
pub(in crate::backend) struct HostAllocation {
    address: NonNull<u8>,
    bytes: usize,
    backing: Backing,
}

/// The source of host memory.
enum Backing {
    Heap(Layout),
    Mapped(
        #[cfg_attr(
            not(all(target_os = "linux", any(feature = "cuda", feature = "vulkan"))),
            expect(dead_code, reason = "held to be unmapped in the end; told of forks where memory is pinned")
        )]
        MmapRaw,
    ),
}

// SAFETY: this value alone owns the memory, whichever thread it is on.
unsafe impl Send for HostAllocation {}
// SAFETY: a shared reference gives out an address and accesses no byte.
unsafe impl Sync for HostAllocation {}

impl HostAllocation {
    pub(in crate::backend) fn new(bytes: usize) -> IoResult<HostAllocation> {
        let no_memory = || IoError::from(IoErrorKind::OutOfMemory);
        if bytes >= MAPPED_FROM {
            let map = MmapRaw::from(MmapMut::map_anon(bytes)?);
            #[cfg(target_os = "linux")]
            // Fails on kernels without huge pages; ordinary pages are fine then.
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

    /// All bytes, for writing before anyone else has the address.
    ///
    /// # Safety
    /// Nobody else uses the address while the slice lives.
    #[cfg(any(test, feature = "cuda", feature = "vulkan"))]
    pub(in crate::backend) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `self.bytes` bytes were allocated and zeroed, and belong to this value.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }

    /// Excludes the memory from forked processes, where the system supports that. Otherwise pages that a device has pinned
    /// would be copied away from the device when this process next writes them.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
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

// SAFETY: the memory belongs to this value, does not move until the value is dropped, and was zeroed.
unsafe impl Storage for RamMemory {
    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn host(&self) -> Option<NonNull<u8>> {
        self.visible.then(|| self.memory.address())
    }
}

// SAFETY: it has no address.
unsafe impl Storage for FileMemory {
    fn bytes(&self) -> usize {
        self.len()
    }
}

// SAFETY: it has no address.
unsafe impl Storage for ExtentMemory {
    fn bytes(&self) -> usize {
        self.len()
    }
}

/// Memory that has only a size.
pub(in crate::backend) struct SizeOnly(pub(super) usize);

// SAFETY: it has no address.
unsafe impl Storage for SizeOnly {
    fn bytes(&self) -> usize {
        self.0
    }
}

/// The access of a software stream to the bytes of an allocation.
#[derive(Clone, Copy)]
enum Access<'a> {
    Ram(NonNull<u8>),
    Shared(&'a dyn SharedMemory),
    File(&'a FileMemory),
    Extents(&'a ExtentMemory),
    SizeOnly,
}

impl<'a> Access<'a> {
    /// The access to `allocation`. `None` if a software stream cannot access it.
    fn of(allocation: &'a MemoryBlock) -> Option<Access<'a>> {
        if let Some(ram) = allocation.downcast::<RamMemory>() {
            Some(Access::Ram(ram.memory.address()))
        } else if let Some(file) = allocation.downcast::<FileMemory>() {
            Some(Access::File(file))
        } else if let Some(extents) = allocation.downcast::<ExtentMemory>() {
            Some(Access::Extents(extents))
        } else if allocation.downcast::<SizeOnly>().is_some() {
            Some(Access::SizeOnly)
        } else if let Some(shared) = allocation.shared() {
            Some(Access::Shared(shared))
        } else {
            allocation.host().map(Access::Ram)
        }
    }
}

/// A piece of a copy: memory, a byte range of it, and an offset in the destination.
pub(super) type Piece = (Arc<MemoryBlock>, Range<usize>, usize);

/// Copies pieces to their offsets in `dst`. What is read of files is read together.
///
/// # Safety
/// As [`copy`], for each piece.
pub(super) unsafe fn copy_all(pieces: &[Piece], dst: &MemoryBlock) -> Result<()> {
    let extents = |(src, ..): &&Piece| src.downcast::<ExtentMemory>().is_some();
    let together = pieces.iter().filter(extents).count() > 1 && !overlap(pieces);
    for (src, from, at) in pieces.iter().filter(|piece| !together || !extents(piece)) {
        // SAFETY: the caller's promise.
        unsafe { copy(src, from.clone(), dst, *at) }?;
    }
    if !together {
        return Ok(());
    }
    let read = |start: NonNull<u8>| {
        let wanted = pieces.iter().filter_map(|(src, from, at)| {
            let memory = src.downcast::<ExtentMemory>()?;
            // SAFETY: inside the allocation, and not accessed by anyone else until this returns, as the caller promises. No
            // two pieces overlap.
            let dst = unsafe { std::slice::from_raw_parts_mut(start.as_ptr().add(*at), from.len()) };
            Some(Wanted { memory, from: from.clone(), dst })
        });
        read_all(&mut wanted.collect::<Vec<_>>())
    };
    match Access::of(dst) {
        Some(Access::Ram(start)) => read(start),
        Some(Access::Shared(shared)) => locked(|work| shared.write(work), read),
        // SAFETY: the caller's promise.
        _ => pieces.iter().filter(extents).try_for_each(|(src, from, at)| unsafe { copy(src, from.clone(), dst, *at) }),
    }
}

/// Whether any two pieces overlap in their destination.
fn overlap(pieces: &[Piece]) -> bool {
    let mut ranges: Vec<(usize, usize)> =
        pieces.iter().filter(|(_, from, _)| !from.is_empty()).map(|(_, from, at)| (*at, at + from.len())).collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

/// Copies the range `from` of `src` to the offset `at` of `dst`.
///
/// # Safety
/// Both ranges are inside their allocations, and they do not overlap. Until this returns, nobody writes the source range,
/// and nobody else reads or writes the destination range, except those who share the memory.
pub(super) unsafe fn copy(src: &MemoryBlock, from: Range<usize>, dst: &MemoryBlock, at: usize) -> Result<()> {
    let (Some(src_access), Some(dst_access)) = (Access::of(src), Access::of(dst)) else {
        return Err(Error::bug(format!("a copy from {src:?} to {dst:?} that was queued and cannot be made")));
    };
    match (src_access, dst_access) {
        (_, Access::SizeOnly) => Ok(()),
        (Access::SizeOnly, _) => Err(no_bytes(src)),
        // SAFETY: the caller's promise.
        (src, dst) => unsafe { move_bytes(src, from, dst, at) },
    }
}

/// Writes what `work` makes of the range `from` of `src` to the offset `at` of `dst`. It is given a few bytes at a time: `each`
/// of the source for as many as the second figure of the destination, and at the end the rest.
///
/// # Safety
/// As [`copy`], for all that is written.
pub(super) unsafe fn convert(
    (src, from): (&MemoryBlock, Range<usize>),
    (dst, at): (&MemoryBlock, usize),
    each: (usize, usize),
    work: impl Fn(&[u8], &mut [u8]) -> Result<()>,
) -> Result<()> {
    let (Some(src_access), Some(dst_access)) = (Access::of(src), Access::of(dst)) else {
        return Err(Error::bug(format!("values of {src:?} for {dst:?} that were queued and cannot be computed")));
    };
    match (src_access, dst_access) {
        (_, Access::SizeOnly) => return Ok(()),
        (Access::SizeOnly, _) => return Err(no_bytes(src)),
        _ => {}
    }
    let (mut read, mut written) = (vec![0; each.0.min(from.len())], vec![0; each.1]);
    for (part, begin) in from.clone().step_by(each.0.max(1)).enumerate() {
        let bytes = each.0.min(from.end - begin);
        let values = bytes / each.0.max(1) * each.1 + bytes % each.0.max(1) * each.1 / each.0.max(1);
        let here = |chunk: &mut [u8]| Access::Ram(NonNull::from(chunk).cast());
        // SAFETY: the caller's promise; nobody else has the chunks.
        unsafe { move_bytes(src_access, begin..begin + bytes, here(&mut read), 0)? };
        work(&read[..bytes], &mut written[..values])?;
        // SAFETY: as above.
        unsafe { move_bytes(here(&mut written), 0..values, dst_access, at + part * each.1)? };
    }
    Ok(())
}

/// Reads the bytes of the range `from` of `src`.
///
/// # Errors
/// [`Error::Missing`] if it has none.
///
/// # Safety
/// The range is inside of the memory, and nobody writes it until this returns.
pub(super) unsafe fn read(src: &MemoryBlock, from: Range<usize>, dst: &mut [u8]) -> Result<()> {
    let Some(src_access) = Access::of(src) else {
        return Err(Error::bug(format!("bytes of {src:?} that were queued and cannot be read")));
    };
    if let Access::SizeOnly = src_access {
        return Err(no_bytes(src));
    }
    let here = Access::Ram(NonNull::from(dst).cast());
    // SAFETY: the caller's promise; nobody else has `dst`.
    unsafe { move_bytes(src_access, from, here, 0) }
}

/// Writes bytes to the offset `at` of `dst`.
///
/// # Safety
/// As [`copy`], for all that is written.
pub(super) unsafe fn write(bytes: &[u8], dst: &MemoryBlock, at: usize) -> Result<()> {
    let Some(dst_access) = Access::of(dst) else {
        return Err(Error::bug(format!("bytes for {dst:?} that were queued and cannot be written")));
    };
    let here = Access::Ram(NonNull::from(bytes).cast());
    // SAFETY: the caller's promise; the bytes are only read.
    unsafe { move_bytes(here, 0..bytes.len(), dst_access, at) }
}

/// As [`copy`], between memory that has bytes.
///
/// # Safety
/// As [`copy`].
unsafe fn move_bytes(src: Access<'_>, from: Range<usize>, dst: Access<'_>, at: usize) -> Result<()> {
    let bytes = from.len();
    let written = |start: NonNull<u8>| {
        // SAFETY: inside the allocation, and not accessed by anyone else until this returns.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr().add(at), bytes) }
    };
    let read = |start: NonNull<u8>| {
        // SAFETY: inside the allocation, and not written by anyone until this returns.
        unsafe { std::slice::from_raw_parts(start.as_ptr().add(from.start), bytes) }
    };
    match (src, dst) {
        (Access::Ram(src), Access::Ram(dst)) => {
            written(dst).copy_from_slice(read(src));
            Ok(())
        }
        (Access::File(src), Access::Ram(dst)) => src.read(from.start, written(dst)),
        (Access::Extents(src), Access::Ram(dst)) => src.read(from.start, written(dst)),
        (_, Access::Extents(_)) => Err(read_only()),
        (Access::Ram(src), Access::File(dst)) => dst.write(at, read(src)),
        // Files have no address, and only one shared memory is locked at a time, so that no two copies wait for each other.
        (Access::File(_) | Access::Extents(_), Access::File(_)) | (Access::Shared(_), Access::Shared(_)) => {
            let mut chunk = vec![0; bytes.min(MAPPED_FROM)];
            let here = NonNull::from(&mut *chunk).cast();
            for done in (0..bytes).step_by(chunk.len().max(1)) {
                let part = chunk.len().min(bytes - done);
                let begin = from.start + done;
                // SAFETY: the caller's promise; nobody else has the chunk.
                unsafe {
                    move_bytes(src, begin..begin + part, Access::Ram(here), 0)?;
                    move_bytes(Access::Ram(here), 0..part, dst, at + done)?;
                }
            }
            Ok(())
        }
        (Access::Shared(shared), dst) => {
            // SAFETY: the caller's promise; the memory is locked until the work is done.
            let copy = |start| unsafe { move_bytes(Access::Ram(start), from.clone(), dst, at) };
            locked(|work| shared.read(work), copy)
        }
        (src, Access::Shared(shared)) => {
            // SAFETY: as above.
            let copy = |start| unsafe { move_bytes(src, from.clone(), Access::Ram(start), at) };
            locked(|work| shared.write(work), copy)
        }
        (Access::SizeOnly, _) | (_, Access::SizeOnly) => Ok(()),
    }
}

/// Runs `work` with the address of shared memory, which `lock` locks meanwhile.
fn locked(
    lock: impl FnOnce(&mut dyn FnMut(NonNull<u8>)) -> Result<()>,
    mut work: impl FnMut(NonNull<u8>) -> Result<()>,
) -> Result<()> {
    let mut outcome = Err(Error::bug("shared memory that was not accessed"));
    lock(&mut |start| outcome = work(start))?;
    outcome
}

/// Checks that a software stream of the device `stream` can copy from `src` to `dst`: it can access both, and no bytes are
/// read from memory that has none.
pub(super) fn copyable(stream: DeviceId, src: &MemoryBlock, dst: &MemoryBlock) -> Result<()> {
    match (Access::of(src), Access::of(dst)) {
        (Some(Access::SizeOnly), Some(Access::Ram(_) | Access::Shared(_) | Access::File(_))) => Err(no_bytes(src)),
        // A destination is checked as its own source, too.
        (Some(_), Some(Access::Extents(_))) => Err(read_only()),
        (Some(_), Some(_)) => Ok(()),
        _ => Err(Error::Unreachable { stream, from: src.device(), to: dst.device() }),
    }
}

fn read_only() -> Error {
    Error::invalid("the bytes of memory that is only read stay where they are, so nothing can be written there")
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
}
