//! Memory that is bytes of something else, which are read each time that they are needed: the files of a model.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Buf, BufMut, Device, MemoryKind};
use crate::bytes::ByteSize;
use crate::error::{Error, Result};
use crate::file::read::ReadPart;

/// Bytes that can be read by position at any time, by any number of threads at once.
pub trait Readable: Any + Send + Sync {
    /// Fills the parts, which may be in any order.
    ///
    /// # Errors
    /// When the bytes are not there any more, or are not the same. The parts then hold unspecified bytes.
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()>;

    /// The bytes that a read of `len` bytes from offset `at` on brings from where they are stored, for reports. They are fewer if
    /// they are compressed there; the default is `len`.
    fn stored(&self, _at: u64, len: u64) -> u64 {
        len
    }
}

/// Consecutive bytes of something that can be read.
#[derive(Clone)]
pub struct Extent {
    /// What is read.
    pub of: Arc<dyn Readable>,
    /// The offset of the first byte.
    pub at: u64,
    /// The number of bytes.
    pub bytes: usize,
}

/// A part of an extent: what is read, the offset of the first byte there, and the number of bytes.
pub(crate) type ExtentPart<'a> = (&'a Arc<dyn Readable>, u64, usize);

/// Extents, one after the other, as the contents of [memory that is only read](Device::read_only).
#[derive(Clone, Debug, Default)]
pub struct Extents {
    pub(super) list: Vec<Extent>,
    pub(super) cache: Option<Arc<HostCache>>,
}

impl Extents {
    /// The bytes of `list`, in this order.
    pub fn new(list: Vec<Extent>) -> Extents {
        Extents { list, cache: None }
    }

    /// Has `cache` keep the bytes once all of them have been read for the turns of layers. What else reads them leaves its room alone.
    #[must_use]
    pub fn cached_by(self, cache: Arc<HostCache>) -> Extents {
        Extents { cache: Some(cache), ..self }
    }

    /// Whether all bytes, and their offsets, are numbers that there are.
    pub(super) fn is_countable(&self) -> bool {
        let ends = |extent: &Extent| extent.at.checked_add(extent.bytes as u64).is_some();
        self.list.iter().all(ends) && self.bytes() <= isize::MAX as usize
    }

    /// The number of bytes; the largest number there is if there are more.
    pub fn bytes(&self) -> usize {
        self.list.iter().map(|extent| extent.bytes).fold(0, usize::saturating_add)
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes from {}", self.bytes, self.at)
    }
}

/// Host memory for bytes that were read, so that they need not be read again. What is kept first stays: a model is read in
/// turn, so that whatever is thrown out would be the next to be read.
pub struct HostCache {
    host: Arc<dyn Device>,
    /// The bytes that it may still keep; none once the host had no memory for it.
    left: Mutex<u64>,
}

impl HostCache {
    /// A cache of at most so many bytes in the memory of `host`. It takes only memory that is free when the bytes arrive.
    pub fn new(host: Arc<dyn Device>, most: ByteSize) -> Arc<HostCache> {
        Arc::new(HostCache { host, left: Mutex::new(most.get()) })
    }

    /// The bytes that it may still keep.
    pub fn left(&self) -> ByteSize {
        ByteSize(*self.lock())
    }

    /// Takes memory for so many bytes, if there is room.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Option<Keeping> {
        let size = bytes as u64;
        {
            let mut left = self.lock();
            *left = left.checked_sub(size)?;
        }
        let room = Room { cache: Arc::clone(self), bytes: size };
        // Whatever the reason is why there is no memory, the bytes can be read again.
        let is_free = self.host.memory().is_ok_and(|memory| size <= memory.available());
        match is_free.then(|| self.host.alloc(bytes, MemoryKind::Arena).ok()).flatten() {
            Some(memory) => Some(Keeping { memory, covered: Vec::new(), room }),
            None => {
                drop(room);
                *self.lock() = 0;
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for HostCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostCache").field("left", &self.left()).finish_non_exhaustive()
    }
}

/// Memory of a cache that is being filled.
#[derive(Debug)]
pub(super) struct Keeping {
    memory: BufMut,
    /// What it has, in order. No two ranges touch.
    covered: Vec<Range<usize>>,
    room: Room,
}

impl Keeping {
    /// Copies bytes to a place. Returns whether all have been copied by now.
    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) -> bool {
        let (mut range, all) = (at..at + bytes.len(), self.memory.bytes());
        let Some(memory) = self.memory.host_mut().and_then(|memory| memory.get_mut(range.clone())) else {
            return false;
        };
        memory.copy_from_slice(bytes);
        self.covered.retain(|known| {
            let touches = known.start <= range.end && range.start <= known.end;
            if touches {
                range = range.start.min(known.start)..range.end.max(known.end);
            }
            !touches
        });
        let place = self.covered.partition_point(|known| known.start < range.start);
        self.covered.insert(place, range);
        self.covered.first().is_some_and(|first| *first == (0..all))
    }

    /// The bytes, once all of them have been copied.
    pub(super) fn done(self) -> Kept {
        Kept { memory: self.memory.freeze(), _room: self.room }
    }
}

/// Bytes that a cache keeps.
#[derive(Debug)]
pub(super) struct Kept {
    memory: Buf,
    _room: Room,
}

impl Kept {
    pub(super) fn bytes(&self) -> Result<&[u8]> {
        self.memory
            .host(Duration::ZERO)?
            .ok_or_else(|| Error::bug("a host cache in memory that the host cannot address"))
    }
}

/// Room that was taken of a cache.
#[derive(Debug)]
struct Room {
    cache: Arc<HostCache>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        *self.cache.lock() += self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::{Backend, Host};
    use crate::device::DeviceId;

    #[test]
    fn a_cache_keeps_what_comes_first_and_gives_its_room_back() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let cache = HostCache::new(Arc::clone(&host), ByteSize(100));
        let keep = |byte: u8, bytes: usize| {
            let mut keeping = cache.take(bytes)?;
            assert!(keeping.put(0, &vec![byte; bytes]));
            Some(keeping.done())
        };
        let first = keep(1, 60).unwrap();
        assert!(keep(2, 60).is_none(), "there is no room for it");
        assert_eq!((cache.left(), host.ledger().charged_and_reserved().0), (ByteSize(40), 60));
        let second = keep(3, 40).unwrap();
        assert_eq!((first.bytes().unwrap(), second.bytes().unwrap()), (&[1; 60][..], &[3; 40][..]));
        drop(first);
        assert_eq!((cache.left(), host.ledger().charged_and_reserved().0), (ByteSize(60), 40));
    }

    #[test]
    fn a_cache_takes_no_memory_that_is_not_free() {
        let cache = HostCache::new(Host::new().open(DeviceId::CPU).unwrap(), ByteSize(u64::MAX));
        let held = cache.host.ledger().charge(cache.host.ledger().limit()).unwrap();
        assert!(cache.take(8).is_none());
        drop(held);
        // It does not ask for each tensor again.
        assert!(cache.take(8).is_none());
        assert_eq!(cache.left(), ByteSize(0));
    }

    proptest! {
        /// Parts may come in any order, and more than once; the memory is whole when every byte has come.
        #[test]
        fn parts_come_in_any_order(parts in prop::collection::vec((0usize..40, 0usize..20), 0..40)) {
            let cache = HostCache::new(Host::new().open(DeviceId::CPU).unwrap(), ByteSize(40));
            let mut keeping = cache.take(40).unwrap();
            let mut seen = [false; 40];
            for (at, bytes) in parts {
                let range = at..(at + bytes).min(40);
                seen[range.clone()].fill(true);
                let whole = keeping.put(at, &range.map(|at| at as u8).collect::<Vec<_>>());
                prop_assert_eq!(whole, seen == [true; 40]);
            }
            if seen == [true; 40] {
                let kept = keeping.done();
                prop_assert_eq!(kept.bytes().unwrap(), &(0..40).collect::<Vec<u8>>()[..]);
            }
        }
    }
}
