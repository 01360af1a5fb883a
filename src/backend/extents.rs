//! Memory that is bytes of something else, which are read each time that they are needed: the files of a model.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Buf, Device, MemoryKind};
use crate::bytes::ByteSize;
use crate::error::{Error, Result};

/// A part of something that is read by position, and the memory that its bytes go to.
#[derive(Debug)]
pub struct ReadPart<'a> {
    /// The offset of the first byte.
    pub at: u64,
    /// Where the bytes go, as many as it has.
    pub dst: &'a mut [u8],
}

/// Bytes that can be read by position at any time, by any number of threads at once.
pub trait Readable: Send + Sync {
    /// Fills the parts, which may be in any order.
    ///
    /// # Errors
    /// When the bytes are not there any more, or are not the same. The parts then hold unspecified bytes.
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()>;
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

    /// Has `cache` keep the bytes once all of them have been read at one time.
    #[must_use]
    pub fn cached_by(self, cache: Arc<HostCache>) -> Extents {
        Extents { cache: Some(cache), ..self }
    }

    /// The number of bytes.
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
    /// The bytes that it may still keep.
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

    /// Keeps a copy of `bytes`, if there is room.
    pub(super) fn keep(self: &Arc<Self>, bytes: &[u8]) -> Option<Kept> {
        let size = bytes.len() as u64;
        {
            let mut left = self.lock();
            *left = left.checked_sub(size)?;
        }
        let room = Room { cache: Arc::clone(self), bytes: size };
        // Whatever the reason is why there is no memory, the bytes can be read again.
        let free = self.host.memory().ok()?.available();
        let mut memory = (size <= free).then(|| self.host.alloc(bytes.len(), MemoryKind::Arena).ok()).flatten()?;
        memory.host_mut()?.copy_from_slice(bytes);
        Some(Kept { memory: memory.freeze(), _room: room })
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
    use super::*;
    use crate::backend::{Backend, Host};
    use crate::device::DeviceId;

    #[test]
    fn a_cache_keeps_what_comes_first_and_gives_its_room_back() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let cache = HostCache::new(Arc::clone(&host), ByteSize(100));
        let first = cache.keep(&[1; 60]).unwrap();
        assert!(cache.keep(&[2; 60]).is_none(), "there is no room for it");
        assert_eq!((cache.left(), host.ledger().charged_and_reserved().0), (ByteSize(40), 60));
        let second = cache.keep(&[3; 40]).unwrap();
        assert_eq!((first.bytes().unwrap(), second.bytes().unwrap()), (&[1; 60][..], &[3; 40][..]));
        drop(first);
        assert_eq!((cache.left(), host.ledger().charged_and_reserved().0), (ByteSize(60), 40));
    }

    #[test]
    fn a_cache_takes_no_memory_that_is_not_free() {
        let cache = HostCache::new(Host::new().open(DeviceId::CPU).unwrap(), ByteSize(u64::MAX));
        let available = cache.host.memory().unwrap().available();
        // As many bytes as nobody has: only their number is looked at.
        assert!(available < u64::MAX / 2);
        let held = cache.host.ledger().charge(cache.host.ledger().limit()).unwrap();
        assert!(cache.keep(&[0; 8]).is_none());
        assert_eq!(cache.left(), ByteSize(u64::MAX));
        drop(held);
        assert!(cache.keep(&[0; 8]).is_some());
    }
}
