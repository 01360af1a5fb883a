//! Reads of a file by position, each part by the way that suits what the page cache has of it.
//!
//! Bytes in the page cache are copied from there. For others the disk's own speed counts, and a copy through the page cache would
//! cost more of the processor than the disk has time for: they are read directly (`O_DIRECT`). Where the system refuses that, they
//! are read through the page cache, which drops them at once if the kernel can (`RWF_DONTCACHE`). A file that refuses is not asked
//! again, and the load's report names it with the reason.
//!
//! This file decides; `system` has the calls on Linux. Other systems read every file through their cache.

mod bounce;
mod extents;
#[cfg(target_os = "linux")]
mod page_cache;
mod scatter;
#[cfg(target_os = "linux")]
mod system;

use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(crate) use bounce::{Bounce, Kept};
pub use scatter::ReadPart;
pub(crate) use scatter::divide;
pub(crate) use scatter::{read_through, readers};
#[cfg(target_os = "linux")]
pub(crate) use system::{DirectFile, OpenCalls};

pub(crate) use extents::Extent;
use extents::extents;

/// Reads of fewer bytes go through the page cache: asking costs as much as it could save.
pub(crate) const LEAST: usize = 256 << 10;

/// The most bytes of one direct read. One thread reaches a disk's speed with it, since the kernel divides it into requests that
/// the disk has at one time.
const DIRECT: usize = 16 << 20;

/// The most bytes of one read whose pages are dropped: as long as the system reads ahead, so that none is dropped unread.
const DROPPED: usize = 4 << 20;

/// The largest alignment that direct reads may ask for.
const MOST_ALIGNMENT: u32 = 64 << 10;

/// How a call reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Through the page cache, which keeps the bytes.
    Cached,
    /// Through the page cache, which drops them.
    Dropped,
    /// Past the page cache. Offset, length and address are aligned.
    Direct,
}

/// What direct reads must be multiples of, in bytes: powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alignment {
    pub(crate) offset: usize,
    pub(crate) memory: usize,
}

impl Alignment {
    /// The alignment that a system names, if it is one that a buffer can have.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "files are read directly on Linux alone"))]
    fn new(offset: u32, memory: u32) -> Option<Alignment> {
        let fits = |number: u32| number.is_power_of_two() && number <= MOST_ALIGNMENT;
        let alignment = Alignment { offset: offset as usize, memory: memory as usize };
        (fits(offset) && fits(memory)).then_some(alignment)
    }
}

/// Why a file is not read directly.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "files are read directly on Linux alone"))]
#[derive(Debug)]
pub(crate) enum NotDirect {
    /// It cannot be, whenever it is tried.
    Refused(String),
    /// It cannot be now, since no descriptor is left.
    NotNow,
}

/// The system's calls on one open file.
pub(crate) trait Calls {
    /// How many bytes of a range are in the page cache. `None` if the system does not tell.
    fn cached(&self, range: Range<u64>) -> Option<u64>;

    /// Prepares direct reads, and returns their alignment.
    fn direct(&self) -> Result<Alignment, NotDirect>;

    /// Reads some bytes, at least one but at the end of the file.
    fn read(&self, way: Way, at: u64, dst: &mut [u8]) -> io::Result<usize>;
}

/// Elsewhere files have one way.
#[cfg(not(target_os = "linux"))]
impl Calls for &crate::file::PositionalFile {
    fn cached(&self, _range: Range<u64>) -> Option<u64> {
        None
    }

    fn direct(&self) -> Result<Alignment, NotDirect> {
        Err(NotDirect::Refused("files are read directly on Linux alone".to_owned()))
    }

    fn read(&self, _way: Way, at: u64, dst: &mut [u8]) -> io::Result<usize> {
        self.read_exact_at(dst, at).map(|()| dst.len())
    }
}

/// What is known of a file's reads, over all times that it is open.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// Whether all reads go through the page cache.
    always_cached: bool,
    refused: OnceLock<String>,
    /// Whether the kernel cannot drop pages.
    keeps: AtomicBool,
    cached: AtomicU64,
    dropped: AtomicU64,
    direct: AtomicU64,
}

/// How the bytes of files were read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadWays {
    /// Bytes read through the page cache: those that it had, those of small reads, and those that could not be read otherwise.
    pub cached: u64,
    /// Bytes read through the page cache that were dropped from it at once.
    pub dropped: u64,
    /// Bytes read directly from the disk.
    pub direct: u64,
    /// Why the file is not read directly, if the system refused.
    pub refused: Option<String>,
}

impl Reader {
    /// A reader that always goes through the page cache.
    pub(crate) fn always_cached() -> Reader {
        Reader { always_cached: true, ..Reader::default() }
    }

    pub(crate) fn is_always_cached(&self) -> bool {
        self.always_cached
    }

    pub(crate) fn ways(&self) -> ReadWays {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (cached, dropped, direct) = (count(&self.cached), count(&self.dropped), count(&self.direct));
        ReadWays { cached, dropped, direct, refused: self.refused.get().cloned() }
    }

    /// Fills `dst` with the bytes from `at` on.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::UnexpectedEof`] when the file ends before.
    pub(crate) fn read(&self, calls: &impl Calls, mut at: u64, mut dst: &mut [u8]) -> io::Result<()> {
        for Extent { bytes, is_cached } in self.extents(calls, at, dst.len()) {
            let (part, rest) = dst.split_at_mut(bytes);
            if is_cached {
                self.read_cached(calls, at, part)?;
            } else {
                self.read_cold(calls, at, part)?;
            }
            (at, dst) = (at + bytes as u64, rest);
        }
        Ok(())
    }

    /// Reads up to `len` bytes, at least one, from `at` on to wherever they may lie in `buffer`, which has at least `len`. Returns
    /// where they are.
    ///
    /// # Errors
    /// As [`read`](Reader::read).
    pub(crate) fn read_within(
        &self,
        calls: &impl Calls,
        at: u64,
        len: usize,
        buffer: &mut [u8],
    ) -> io::Result<Range<usize>> {
        let first = self.extents(calls, at, len).first().copied().unwrap_or(Extent { bytes: len, is_cached: true });
        let len = first.bytes;
        if !first.is_cached
            && let Some(alignment) = self.alignment(calls)
        {
            match self.read_aligned(calls, alignment, at, len, buffer) {
                Err(error) if is_refusal(&error) => self.refuse(&error),
                // The page cache needs no memory of this process.
                Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {}
                read => return read,
            }
        }
        let dst = &mut buffer[..len];
        if first.is_cached {
            self.read_cached(calls, at, dst)?;
        } else {
            self.read_cold(calls, at, dst)?;
        }
        Ok(0..len)
    }

    /// The parts of a range that the page cache has, and those that it does not have.
    pub(crate) fn extents(&self, calls: &impl Calls, at: u64, len: usize) -> Vec<Extent> {
        let asked = !self.always_cached && len >= LEAST;
        extents(at, len, |range| if asked { calls.cached(range) } else { None })
    }

    /// Reads what the page cache does not have.
    fn read_cold(&self, calls: &impl Calls, at: u64, dst: &mut [u8]) -> io::Result<()> {
        if let Some(alignment) = self.alignment(calls) {
            match self.read_direct(calls, alignment, at, dst) {
                Err(error) if is_refusal(&error) => self.refuse(&error),
                // The page cache needs no memory of this process.
                Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {}
                read => return read,
            }
        }
        if !self.keeps.load(Ordering::Relaxed) {
            match read_all(calls, Way::Dropped, DROPPED, at, dst) {
                Err(error) if is_refusal(&error) => self.keeps.store(true, Ordering::Relaxed),
                read => return read.map(|()| add(&self.dropped, dst.len())),
            }
        }
        self.read_cached(calls, at, dst)
    }

    fn read_cached(&self, calls: &impl Calls, at: u64, dst: &mut [u8]) -> io::Result<()> {
        read_all(calls, Way::Cached, usize::MAX, at, dst)?;
        add(&self.cached, dst.len());
        Ok(())
    }

    /// Reads directly: straight to where the bytes stay if that is aligned as the file is, otherwise through a buffer.
    fn read_direct(&self, calls: &impl Calls, alignment: Alignment, at: u64, dst: &mut [u8]) -> io::Result<()> {
        let Alignment { offset, memory } = alignment;
        let head = (at.next_multiple_of(offset as u64) - at) as usize;
        let len = dst.len();
        let done = if len > head && (dst.as_ptr().addr() + head).is_multiple_of(memory) {
            let (first, rest) = dst.split_at_mut(head);
            let whole = rest.len() / offset * offset;
            self.read_bounced(calls, alignment, at, first)?;
            head + read_whole(calls, offset, at + head as u64, &mut rest[..whole])?
        } else {
            0
        };
        self.read_bounced(calls, alignment, at + done as u64, &mut dst[done..])?;
        add(&self.direct, len);
        Ok(())
    }

    /// Reads directly into an aligned buffer, and copies from there.
    fn read_bounced(
        &self,
        calls: &impl Calls,
        alignment: Alignment,
        mut at: u64,
        mut dst: &mut [u8],
    ) -> io::Result<()> {
        if dst.is_empty() {
            return Ok(());
        }
        let mut bounce = Bounce::take(dst.len())?;
        while !dst.is_empty() {
            let found = read_around(calls, alignment, at, dst.len(), bounce.bytes())?;
            let (part, rest) = dst.split_at_mut(found.len());
            part.copy_from_slice(&bounce.bytes()[found]);
            (at, dst) = (at + part.len() as u64, rest);
        }
        Ok(())
    }

    /// Reads directly to an aligned place in `buffer`.
    fn read_aligned(
        &self,
        calls: &impl Calls,
        alignment: Alignment,
        at: u64,
        len: usize,
        buffer: &mut [u8],
    ) -> io::Result<Range<usize>> {
        let found = read_around(calls, alignment, at, len, buffer)?;
        add(&self.direct, found.len());
        Ok(found)
    }

    /// The alignment of direct reads; `None` if the file cannot be read directly.
    fn alignment(&self, calls: &impl Calls) -> Option<Alignment> {
        if self.refused.get().is_some() {
            return None;
        }
        match calls.direct() {
            // A read that stopped goes on at its own offset in memory, so what begins at one must be aligned as memory, too.
            Ok(Alignment { offset, memory }) => Some(Alignment { offset: offset.max(memory), memory }),
            Err(NotDirect::NotNow) => None,
            Err(NotDirect::Refused(why)) => {
                let _ = self.refused.set(why);
                None
            }
        }
    }

    fn refuse(&self, error: &io::Error) {
        // The first reason stays.
        let _ = self.refused.set(format!("direct reads are refused: {error}"));
    }
}

fn add(count: &AtomicU64, bytes: usize) {
    count.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Whether an error says that this way to read is not for this file, or not for this process.
fn is_refusal(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Fills `dst`, in reads of at most `most` bytes.
fn read_all(calls: &impl Calls, way: Way, most: usize, mut at: u64, mut dst: &mut [u8]) -> io::Result<()> {
    while !dst.is_empty() {
        let part = dst.len().min(most);
        let read = read_some(calls, way, at, &mut dst[..part])?;
        (at, dst) = (at + read as u64, &mut dst[read..]);
    }
    Ok(())
}

/// Reads at least one byte.
fn read_some(calls: &impl Calls, way: Way, at: u64, dst: &mut [u8]) -> io::Result<usize> {
    loop {
        match calls.read(way, at, dst) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => return read,
        }
    }
}

/// Reads directly into `dst`, which is whole blocks from an aligned offset on. Returns how much it read: all, or less where the
/// system stopped within a block.
fn read_whole(calls: &impl Calls, block: usize, at: u64, dst: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < dst.len() && done.is_multiple_of(block) {
        let part = (dst.len() - done).min(DIRECT);
        done += read_some(calls, Way::Direct, at + done as u64, &mut dst[done..done + part])?;
    }
    Ok(done)
}

/// Reads up to `len` bytes from `at` on directly, with what is around them in their blocks, to an aligned place in `buffer`.
/// Returns where they are.
fn read_around(
    calls: &impl Calls,
    Alignment { offset, memory }: Alignment,
    at: u64,
    len: usize,
    buffer: &mut [u8],
) -> io::Result<Range<usize>> {
    let start = buffer.as_ptr().addr().next_multiple_of(memory) - buffer.as_ptr().addr();
    let before = (at % offset as u64) as usize;
    let room = buffer.len().saturating_sub(start) / offset * offset;
    let (all, most) = ((before + len).next_multiple_of(offset), room.min(DIRECT));
    // What is left must not be so little that it takes longer than its bytes: then each of two reads takes half.
    let few_left = all > most && all - most < LEAST && all > 2 * LEAST;
    let wanted = if few_left { (all / 2).next_multiple_of(offset).min(most) } else { all.min(most) };
    if wanted <= before {
        // Too small a buffer for a block is as good as none.
        return Err(io::ErrorKind::Unsupported.into());
    }
    let dst = &mut buffer[start..start + wanted];
    let read = read_some(calls, Way::Direct, at - before as u64, dst)?;
    if read <= before {
        // Stopped within a block, where no direct read can go on.
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(start + before..start + (before + len).min(read))
}

#[cfg(test)]
mod tests;
