//! Scattered reads: parts of a file that go to different places, in chunks that ignore where a part ends and the next begins.
//!
//! The parts are put in order of the file. Those that lie close together are one run. Of each run the page cache is asked what it
//! has, and runs are divided into chunks: cold ones are read directly into a bounce buffer and copied from there into the parts, so
//! a small vector between two matrices costs no read of its own. Several threads take the chunks in turn: while one copies out of
//! its buffer, another's read keeps the disk busy.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::bounce::{Bounce, Kept};
use super::extents::Extent;
use super::{Alignment, Calls, LEAST, Reader, add, is_refusal, read_around};
use crate::threads;

/// Parts with fewer bytes between them are read as one: a disk reads these in less time than it takes to answer.
const GAP: u64 = 64 << 10;

/// The bytes of a chunk, which begins at a multiple of it. While the last chunk of a call is copied nothing is read, so a chunk is as
/// small as a disk reads at its full speed, two at a time.
pub(super) const CHUNK: u64 = 2 << 20;

/// The most threads that read the cold chunks of one call, where there are as many cores. One copies while another reads, and the
/// kernel divides each read into requests that the disk has at one time; more threads than cores would all copy at one time, and
/// all read. Where other programs keep the cores busy, four read faster than two.
const READERS: usize = 4;

/// The fewest, whatever the number of cores.
const FEWEST: usize = 2;

/// The bytes in the page cache for which it pays to start another thread.
const WARM_EACH: u64 = 32 << 20;

/// The most threads that all calls of the process together start to read chunks. Each may have a bounce buffer, of at most 8 MiB.
const MOST_HELPERS: usize = 7;

/// The bytes of which the page cache is asked at once.
const ASKED: u64 = 1 << 30;

/// A part of a source, and the memory that its bytes go to.
pub struct ReadPart<'a> {
    /// The offset of its first byte in the source.
    pub at: u64,
    /// The memory for its bytes.
    pub dst: &'a mut [u8],
}

impl<'a> ReadPart<'a> {
    /// The bytes from offset `at` on, as many as `dst` has.
    pub fn new(at: u64, dst: &'a mut [u8]) -> ReadPart<'a> {
        ReadPart { at, dst }
    }

    /// The same part, borrowed for less long.
    pub(crate) fn reborrow(&mut self) -> ReadPart<'_> {
        ReadPart { at: self.at, dst: self.dst }
    }

    /// The range in the source.
    pub(crate) fn range(&self) -> Range<u64> {
        self.at..self.at.saturating_add(self.dst.len() as u64)
    }

    /// The bytes up to offset `end` of the source, and the rest.
    fn split(self, end: u64) -> (ReadPart<'a>, ReadPart<'a>) {
        // No more than the part has.
        let len = (end.saturating_sub(self.at)).min(self.dst.len() as u64) as usize;
        let (first, rest) = self.dst.split_at_mut(len);
        (ReadPart::new(self.at, first), ReadPart::new(self.at + len as u64, rest))
    }
}

impl fmt::Debug for ReadPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadPart").field("at", &self.at).field("bytes", &self.dst.len()).finish()
    }
}

/// Bytes of a file that are read at one time, with the places that they go to, in order of the file.
struct Chunk<'a> {
    parts: Vec<ReadPart<'a>>,
    is_cached: bool,
}

/// Divides parts at the multiples of `each` in the file. Returns those of each of these stretches that has any, in order of the
/// file.
pub(crate) fn divide(parts: Vec<ReadPart<'_>>, each: u64) -> Vec<Vec<ReadPart<'_>>> {
    let stretches = runs(&parts).into_iter().flat_map(|run| cut(run, each)).map(|range| (range, ())).collect();
    share_out(parts, stretches).into_iter().map(|((), parts)| parts).collect()
}

/// The ranges of a file that the parts lie in, in order: parts that are close together lie in one.
fn runs(parts: &[ReadPart<'_>]) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = parts.iter().map(ReadPart::range).filter(|range| !range.is_empty()).collect();
    ranges.sort_by_key(|range| range.start);
    let mut runs: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match runs.last_mut() {
            Some(run) if range.start <= run.end.saturating_add(GAP) => run.end = run.end.max(range.end),
            _ => runs.push(range),
        }
    }
    runs
}

/// Cuts a range at the multiples of `each`.
fn cut(range: Range<u64>, each: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let start = at;
        at = (start / each + 1).saturating_mul(each).min(range.end);
        (start < range.end).then_some(start..at)
    })
}

/// Gives each stretch of a file the parts, or pieces of parts, that lie in it. The stretches are in order and have all bytes of the
/// parts; those that get nothing are left out.
fn share_out<T>(mut parts: Vec<ReadPart<'_>>, stretches: Vec<(Range<u64>, T)>) -> Vec<(T, Vec<ReadPart<'_>>)> {
    parts.sort_by_key(|part| part.at);
    let mut shares: Vec<Vec<ReadPart<'_>>> = stretches.iter().map(|_| Vec::new()).collect();
    for mut part in parts {
        let mut index = stretches.partition_point(|(range, _)| range.end <= part.at);
        while !part.dst.is_empty()
            && let (Some((range, _)), Some(share)) = (stretches.get(index), shares.get_mut(index))
        {
            let (first, rest) = part.split(range.end);
            share.push(first);
            part = rest;
            index += 1;
        }
    }
    let with_parts = stretches.into_iter().zip(shares).map(|((_, what), parts)| (what, parts));
    with_parts.filter(|(_, parts)| !parts.is_empty()).collect()
}

impl Reader {
    /// Fills all parts.
    ///
    /// # Errors
    /// As [`read`](Reader::read).
    pub(crate) fn read_parts(&self, calls: &(impl Calls + Sync), parts: Vec<ReadPart<'_>>) -> io::Result<()> {
        let chunks = self.chunks(calls, parts);
        // The buffers of this call's first chunks are those of its last.
        let _kept = (chunks.len() > 1).then(Kept::new);
        let more = helpers(&chunks);
        read_through(chunks, more, |chunk| self.read_chunk(calls, chunk))
    }

    /// The parts, divided into chunks.
    fn chunks<'a>(&self, calls: &impl Calls, parts: Vec<ReadPart<'a>>) -> Vec<Chunk<'a>> {
        let mut stretches = Vec::new();
        for asked in runs(&parts).into_iter().flat_map(|run| cut(run, ASKED)) {
            let mut at = asked.start;
            // No more than `ASKED`.
            for Extent { bytes, is_cached } in self.extents(calls, at, (asked.end - at) as usize) {
                let end = at + bytes as u64;
                stretches.extend(cut(at..end, CHUNK).map(|range| (range, is_cached)));
                at = end;
            }
        }
        let shares = share_out(parts, stretches);
        shares.into_iter().map(|(is_cached, parts)| Chunk { parts, is_cached }).collect()
    }

    fn read_chunk(&self, calls: &impl Calls, Chunk { mut parts, is_cached }: Chunk<'_>) -> io::Result<()> {
        let several = parts.len() > 1;
        if !is_cached
            && several
            && let Some(alignment) = self.alignment(calls)
        {
            match self.read_scattered(calls, alignment, &mut parts) {
                Err(error) if is_refusal(&error) => self.refuse(&error),
                // The page cache needs no memory of this process.
                Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {}
                read => return read,
            }
        }
        for ReadPart { at, dst } in parts {
            // A page that is dropped after a small part would be read again for the next.
            if is_cached || (several && dst.len() < LEAST) {
                self.read_cached(calls, at, dst)?;
            } else {
                self.read_cold(calls, at, dst)?;
            }
        }
        Ok(())
    }

    /// Reads all between the first part and the last directly into a buffer, and copies the parts from there.
    fn read_scattered(&self, calls: &impl Calls, alignment: Alignment, parts: &mut [ReadPart<'_>]) -> io::Result<()> {
        let mut at = parts.iter().map(|part| part.at).min().unwrap_or(0);
        let end = parts.iter().map(|part| part.range().end).max().unwrap_or(0);
        let left = |at: u64| end.saturating_sub(at) as usize;
        let mut bounce = Bounce::take(left(at))?;
        while left(at) > 0 {
            let found = read_around(calls, alignment, at, left(at), bounce.bytes())?;
            let bytes = &bounce.bytes()[found];
            parts.iter_mut().for_each(|part| copy_common(at, bytes, part));
            at += bytes.len() as u64;
        }
        add(&self.direct, parts.iter().map(|part| part.dst.len()).sum());
        Ok(())
    }
}

/// Copies what `bytes`, from offset `at` of a file on, have of a part.
fn copy_common(at: u64, bytes: &[u8], part: &mut ReadPart<'_>) {
    let range = part.range();
    let (start, end) = (range.start.max(at), range.end.min(at + bytes.len() as u64));
    if start < end {
        // Within both slices.
        let within = |from: u64| (start - from) as usize..(end - from) as usize;
        part.dst[within(range.start)].copy_from_slice(&bytes[within(at)]);
    }
}

/// Reads what `items` stand for: in this thread, and in `more` others unless calls of this kind have too many.
///
/// # Errors
/// One that `read` returned.
pub(crate) fn read_through<T: Send, E: Send>(
    items: Vec<T>,
    mut more: usize,
    read: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let helper = || {
        more = more.checked_sub(1)?;
        Helper::take()
    };
    threads::work_through(items, helper, read)
}

/// How many threads beside the caller's read so many cold chunks sooner.
pub(crate) fn readers(cold: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    // One for each, so that the caller has one too.
    cold.min(cores.clamp(FEWEST, READERS)).saturating_sub(1)
}

/// How many threads beside the caller's would read the chunks sooner.
fn helpers(chunks: &[Chunk<'_>]) -> usize {
    let bytes_of = |chunk: &Chunk<'_>| chunk.parts.iter().map(|part| part.dst.len() as u64).sum::<u64>();
    let warm: u64 = chunks.iter().filter(|chunk| chunk.is_cached).map(bytes_of).sum();
    let cold = chunks.iter().filter(|chunk| !chunk.is_cached).count();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    // One for each full measure, so that the caller has one too.
    let copiers = usize::try_from(warm / WARM_EACH).unwrap_or(usize::MAX).min(cores);
    copiers.saturating_sub(1).max(readers(cold))
}

/// The threads that read chunks for callers at present.
static HELPERS: AtomicUsize = AtomicUsize::new(0);

/// One of the threads that may be started to read chunks.
struct Helper(());

impl Helper {
    fn take() -> Option<Helper> {
        let one_more = |count: usize| (count < MOST_HELPERS).then_some(count + 1);
        HELPERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok().map(|_| Helper(()))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        HELPERS.fetch_sub(1, Ordering::Relaxed);
    }
}
