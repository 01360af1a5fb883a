//! Memory that is bytes of something else: they stay where they are, and are read for each copy.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::backend::extents::{ExtentPart, HostCache, Keeping, Kept};
use crate::backend::{Extent, Extents, Readable};
use crate::error::Result;
use crate::file::read::ReadPart;

/// Memory that can only be read.
pub(in crate::backend) struct ExtentMemory {
    /// The extents, and where each begins.
    extents: Vec<(usize, Extent)>,
    bytes: usize,
    cache: Option<Arc<HostCache>>,
    /// Whether the bytes will be read again and again, so that it is worth while to keep them.
    wanted: AtomicBool,
    keeping: Mutex<Option<Keeping>>,
    kept: OnceLock<Kept>,
}

/// A range of such memory that is to be read, and where to.
pub(super) struct Wanted<'a> {
    pub(super) memory: &'a ExtentMemory,
    pub(super) from: Range<usize>,
    pub(super) dst: &'a mut [u8],
}

impl ExtentMemory {
    pub(super) fn new(Extents { list, cache }: Extents) -> ExtentMemory {
        let mut bytes = 0;
        let place = |extent: Extent| {
            let start = bytes;
            bytes += extent.bytes;
            (start, extent)
        };
        let extents = list.into_iter().filter(|extent| extent.bytes > 0).map(place).collect();
        ExtentMemory {
            extents,
            bytes,
            cache,
            wanted: AtomicBool::new(false),
            keeping: Mutex::default(),
            kept: OnceLock::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the bytes are in host memory by now.
    pub(in crate::backend) fn is_kept(&self) -> bool {
        self.kept.get().is_some()
    }

    /// Has the cache keep what is read from now on, if it has room for all of the memory.
    pub(in crate::backend) fn keep_when_read(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    pub(in crate::backend) fn read(&self, at: usize, dst: &mut [u8]) -> Result<()> {
        read_all(&mut [Wanted { memory: self, from: at..at + dst.len(), dst }])
    }

    /// The parts of a range, each with what it is read from, its offset there, and its size.
    pub(in crate::backend) fn parts(&self, range: Range<usize>) -> impl Iterator<Item = ExtentPart<'_>> {
        let first = self.extents.partition_point(|(start, extent)| start + extent.bytes <= range.start);
        let reached = self.extents[first..].iter().take_while(move |(start, _)| *start < range.end);
        reached.map(move |(start, extent)| {
            let (begin, end) = (range.start.max(*start), range.end.min(start + extent.bytes));
            (&extent.of, extent.at + (begin - start) as u64, end - begin)
        })
    }

    fn keep(&self, at: usize, bytes: &[u8]) {
        let wanted = self.wanted.load(Ordering::Relaxed) && !self.is_kept();
        let Some(cache) = self.cache.as_ref().filter(|_| wanted) else { return };
        // A panic leaves memory that was filled in part, and what it was filled with.
        let mut keeping = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        if keeping.is_none() && !self.is_kept() {
            *keeping = cache.take(self.bytes);
        }
        if let Some(whole) = keeping.take_if(|keeping| keeping.put(at, bytes)) {
            let _ = self.kept.set(whole.done());
        }
    }
}

/// Reads ranges of several such memories. What is read of one file is read together, so that neighbours there are one read.
pub(super) fn read_all(wanted: &mut [Wanted<'_>]) -> Result<()> {
    let mut by_source: Vec<(&Arc<dyn Readable>, Vec<ReadPart<'_>>)> = Vec::new();
    for Wanted { memory, from, dst } in wanted.iter_mut() {
        if let Some(kept) = memory.kept.get() {
            dst.copy_from_slice(&kept.bytes()?[from.clone()]);
            continue;
        }
        let mut rest = &mut **dst;
        for (of, at, bytes) in memory.parts(from.clone()) {
            let (dst, after) = rest.split_at_mut(bytes);
            rest = after;
            let part = ReadPart::new(at, dst);
            match by_source.iter_mut().find(|(known, _)| Arc::ptr_eq(known, of)) {
                Some((_, parts)) => parts.push(part),
                None => by_source.push((of, vec![part])),
            }
        }
    }
    by_source.iter_mut().try_for_each(|(of, parts)| of.read_parts(parts))?;
    drop(by_source);
    for Wanted { memory, from, dst } in wanted {
        memory.keep(from.start, dst);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;
    use crate::ByteSize;
    use crate::backend::{Backend, Host};
    use crate::device::DeviceId;

    /// Bytes that count up, and a record of what was read.
    struct Counting {
        first: u8,
        reads: Mutex<Vec<usize>>,
    }

    impl Readable for Counting {
        fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
            self.reads.lock().unwrap().push(parts.len());
            for ReadPart { at, dst } in parts {
                dst.iter_mut().zip(*at..).for_each(|(byte, at)| *byte = (at as u8).wrapping_add(self.first));
            }
            Ok(())
        }
    }

    fn counting(first: u8) -> Arc<Counting> {
        Arc::new(Counting { first, reads: Mutex::default() })
    }

    proptest! {
        /// Any range of any extents holds their bytes, one after the other.
        #[test]
        fn ranges_are_read_across_extents(
            sizes in prop::collection::vec((0usize..2, 0u64..1000, 0usize..50), 0..8),
            begin in any::<prop::sample::Index>(),
            end in any::<prop::sample::Index>(),
        ) {
            let sources = [counting(0), counting(100)];
            let list: Vec<Extent> = sizes.iter().map(|&(of, at, bytes)| {
                Extent { of: Arc::clone(&sources[of]) as Arc<dyn Readable>, at, bytes }
            }).collect();
            let all: Vec<u8> = sizes.iter().flat_map(|&(of, at, bytes)| {
                (at..at + bytes as u64).map(move |at| (at as u8).wrapping_add(of as u8 * 100))
            }).collect();
            let memory = ExtentMemory::new(Extents::new(list));
            prop_assert_eq!(memory.len(), all.len());
            let (begin, end) = (begin.index(all.len() + 1), end.index(all.len() + 1));
            let (begin, end) = (begin.min(end), begin.max(end));
            let mut got = vec![0; end - begin];
            memory.read(begin, &mut got).unwrap();
            prop_assert_eq!(got, &all[begin..end]);
            // Each source was asked once.
            prop_assert!(sources.iter().all(|source| source.reads.lock().unwrap().len() <= 1));
        }
    }

    #[test]
    fn what_was_read_whole_is_kept_within_the_caps() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let (cache, source) = (HostCache::new(host, ByteSize(100)), counting(0));
        let memory = |bytes: usize| {
            let of = Arc::clone(&source) as Arc<dyn Readable>;
            let extents = Extents::new(vec![Extent { of, at: 7, bytes }]).cached_by(Arc::clone(&cache));
            ExtentMemory::new(extents)
        };
        let (small, large) = (memory(80), memory(30));
        small.read(0, &mut [0; 80]).unwrap();
        assert!(!small.is_kept() && cache.left() == ByteSize(100), "nobody said that it is read again");
        [&small, &large].iter().for_each(|memory| memory.keep_when_read());
        let read = |memory: &ExtentMemory, range: Range<usize>| {
            let mut bytes = vec![0; range.len()];
            memory.read(range.start, &mut bytes).unwrap();
            assert!(bytes.iter().zip(7 + range.start..).all(|(&byte, at)| byte == at as u8));
            memory.is_kept()
        };
        assert!(!read(&small, 30..79), "not all of it was read");
        assert!(!read(&small, 5..40) && !read(&small, 79..80) && read(&small, 0..7) && !read(&large, 0..30));
        let before = source.reads.lock().unwrap().len();
        assert!(read(&small, 3..40) && read(&small, 0..80));
        assert_eq!(source.reads.lock().unwrap().len(), before, "what is kept is not read again");
        drop(small);
        assert!(read(&large, 0..30));
    }
}
