//! The memory of a backend, its charge, and whether it may ever be freed.

#![expect(unsafe_code, reason = "the address of host-accessible memory is shared between threads")]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Charge;
use super::extents::ExtentPart;
use super::process::Process;
use super::software::{ExtentMemory, SizeOnly};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// A backend's part of one allocation.
///
/// Streams and the host read and write at the addresses that it returns, without further checks. In return all accesses
/// follow the order of the events of the buffers made from it, and [`free`](Storage::free) is called once all of those are
/// complete.
///
/// # Safety
/// From the call of [`BufMut::new`](super::BufMut::new) until it is freed:
/// - every method always returns the same value;
/// - [`host`](Storage::host) is the address of [`bytes`](Storage::bytes) initialised bytes, which every thread may read and
///   write, and which nothing else reads or writes;
/// - [`address`](Storage::address) is the address of as many bytes of the device's memory, which nothing else uses.
pub unsafe trait Storage: Any + Send + Sync {
    /// The size in bytes.
    fn bytes(&self) -> usize;

    /// The host address of the first byte. `None` if the host cannot access the memory.
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    /// The device address of the first byte. `None` if the device has no addresses.
    fn address(&self) -> Option<u64> {
        None
    }

    /// Host memory that others can reach too, each time behind a lock: a framework's tensor. `None` if nobody else can, as
    /// with memory that has a [`host`](Storage::host) address; memory that is shared has none.
    fn shared(&self) -> Option<&dyn SharedMemory> {
        None
    }

    /// Whether this is host memory that is pinned for a device's copies. False for memory requested as
    /// [`Pinned`](super::MemoryKind::Pinned) that could not be pinned, and for memory of software devices, which do not need
    /// pinning.
    fn pinned(&self) -> bool {
        false
    }

    /// Frees the memory, which nothing uses any more, and releases its charge. A backend that cannot free the memory now must
    /// keep the charge with it.
    fn free(self: Box<Self>, charge: Charge) {
        drop(self);
        drop(charge);
    }
}

/// Host memory that is not the library's alone. The library never keeps its address: it asks for it at each access, so that
/// the owner can lock the memory meanwhile.
///
/// # Safety
/// Both methods call `work` at most once, with the address of [`bytes`](Storage::bytes) initialised bytes. Until `work`
/// returns, [`read`](SharedMemory::read) keeps everyone from writing them, and [`write`](SharedMemory::write) keeps everyone
/// from reading or writing them.
pub unsafe trait SharedMemory {
    /// Runs `work`, which reads the memory.
    ///
    /// # Errors
    /// When the memory is not there any more; `work` is then not called.
    fn read(&self, work: &mut dyn FnMut(NonNull<u8>)) -> Result<()>;

    /// Runs `work`, which reads and writes the memory.
    ///
    /// # Errors
    /// As [`read`](SharedMemory::read).
    fn write(&self, work: &mut dyn FnMut(NonNull<u8>)) -> Result<()>;
}

/// An allocation of a device with its charge. Streams keep it alive while they work.
pub struct MemoryBlock {
    /// `None` only once it is freed.
    held: Option<(Box<dyn Storage>, Charge)>,
    host: Option<HostAddress>,
    address: Option<u64>,
    bytes: usize,
    device: DeviceId,
    process: Process,
    abandoned: AtomicBool,
}

/// The address of host memory that its [`Storage`] does not move.
#[derive(Clone, Copy)]
struct HostAddress(NonNull<u8>);

// SAFETY: any thread may use the memory, as every implementation of `Storage` promises.
unsafe impl Send for HostAddress {}
// SAFETY: as above.
unsafe impl Sync for HostAddress {}

impl MemoryBlock {
    /// Creates an allocation from `storage` for `charge`.
    ///
    /// # Errors
    /// [`Error::Bug`] when `storage` has fewer bytes than are charged; it is then freed.
    pub(super) fn new(storage: Box<dyn Storage>, charge: Charge) -> Result<MemoryBlock> {
        let (bytes, have) = (charge.bytes() as usize, storage.bytes());
        if have < bytes {
            storage.free(charge);
            return Err(Error::bug(format!("memory of {have} bytes stands behind a charge of {bytes}")));
        }
        Ok(MemoryBlock::of(storage, charge, bytes))
    }

    /// All of `storage`, which takes nothing of the device's memory: `charge` is empty.
    pub(super) fn uncharged(storage: Box<dyn Storage>, charge: Charge) -> MemoryBlock {
        let bytes = storage.bytes();
        MemoryBlock::of(storage, charge, bytes)
    }

    fn of(storage: Box<dyn Storage>, mut charge: Charge, bytes: usize) -> MemoryBlock {
        charge.back();
        let (host, address, device) = (storage.host(), storage.address(), charge.device());
        // Shared memory has no lasting address, whatever it says.
        let host = host.filter(|_| storage.shared().is_none()).map(HostAddress);
        let (process, abandoned) = (Process::current(), AtomicBool::new(false));
        MemoryBlock { held: Some((storage, charge)), host, address, bytes, device, process, abandoned }
    }

    /// The storage as its backend's type.
    pub fn downcast<T: Storage>(&self) -> Option<&T> {
        let (storage, _) = self.held.as_ref()?;
        (&**storage as &dyn Any).downcast_ref()
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device that the memory belongs to.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The host address of the first byte. `None` if the host cannot access the memory. It is for streams: they read and
    /// write there after the events that a [`Transfer`](super::Transfer) waits for and before the event that they give it.
    pub fn host(&self) -> Option<NonNull<u8>> {
        self.host.map(|HostAddress(address)| address)
    }

    /// The device address of the first byte. `None` if the device has no addresses.
    pub fn address(&self) -> Option<u64> {
        self.address
    }

    /// Whether this is host memory that is pinned for a device's copies.
    pub fn pinned(&self) -> bool {
        self.held.as_ref().is_some_and(|(storage, _)| storage.pinned())
    }

    /// Whether the bytes stay [elsewhere](super::Device::read_only) and have been kept in host memory since they were last read.
    pub(crate) fn is_kept(&self) -> bool {
        self.downcast::<ExtentMemory>().is_some_and(ExtentMemory::is_kept)
    }

    /// Has a [cache](super::HostCache) keep the bytes that are read from now on, where they stay elsewhere and have one.
    pub(crate) fn keep_when_read(&self) {
        if let Some(memory) = self.downcast::<ExtentMemory>() {
            memory.keep_when_read();
        }
    }

    /// Whether the memory has bytes, and not only a size: that of described devices may have none.
    pub(crate) fn has_bytes(&self) -> bool {
        self.downcast::<SizeOnly>().is_none()
    }

    /// Whether the bytes stay [elsewhere](super::Device::read_only), and are read for each copy.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.downcast::<ExtentMemory>().is_some()
    }

    /// Reads bytes that stay elsewhere, from byte `at` on. `None` for other memory.
    pub(super) fn read_elsewhere(&self, at: usize, dst: &mut [u8]) -> Option<Result<()>> {
        Some(self.downcast::<ExtentMemory>()?.read(at, dst))
    }

    /// What a range of bytes is read from that stay [elsewhere](super::Device::read_only) and are not kept.
    pub(super) fn extents(&self, range: Range<usize>) -> Option<Vec<ExtentPart<'_>>> {
        let memory = self.downcast::<ExtentMemory>().filter(|memory| !memory.is_kept())?;
        Some(memory.parts(range).collect())
    }

    /// Whether others can reach this host memory too, so that it has no address but during an access.
    pub(super) fn shared(&self) -> Option<&dyn SharedMemory> {
        self.held.as_ref().and_then(|(storage, _)| storage.shared())
    }

    /// Whether its owner locks the memory for each access, so that it has no address in between.
    pub(crate) fn is_locked(&self) -> bool {
        self.shared().is_some()
    }

    /// Runs `work` on the bytes of `range`. `None` if the host cannot access them.
    ///
    /// # Safety
    /// The range is inside the memory. Until this returns nobody writes the bytes, but those who share the memory.
    pub(super) unsafe fn read_with<T>(&self, range: Range<usize>, work: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        let Some(shared) = self.shared() else {
            // SAFETY: the caller's promise.
            return Ok(unsafe { self.slice(range) }.map(work));
        };
        let (mut work, mut outcome) = (Some(work), None);
        shared.read(&mut |address| {
            // SAFETY: inside the memory, as the caller promises; those who share it do not write until this returns.
            let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().add(range.start), range.len()) };
            outcome = work.take().map(|work| work(bytes));
        })?;
        Ok(outcome)
    }

    /// Runs `work` on the bytes of `range`, which it may write. `None` if the host cannot access them.
    ///
    /// # Safety
    /// The range is inside the memory. Until this returns nobody else reads or writes the bytes, but those who share the
    /// memory.
    pub(super) unsafe fn write_with<T>(
        &self,
        range: Range<usize>,
        work: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<Option<T>> {
        let Some(shared) = self.shared() else {
            // SAFETY: the caller's promise.
            return Ok(unsafe { self.slice_mut(range) }.map(work));
        };
        let (mut work, mut outcome) = (Some(work), None);
        shared.write(&mut |address| {
            // SAFETY: inside the memory, as the caller promises; those who share it do not use it until this returns.
            let bytes = unsafe { std::slice::from_raw_parts_mut(address.as_ptr().add(range.start), range.len()) };
            outcome = work.take().map(|work| work(bytes));
        })?;
        Ok(outcome)
    }

    /// The process that allocated the memory.
    pub(super) fn process(&self) -> Process {
        self.process
    }

    /// Marks the memory as never to be freed, because a failed device may still use it. The charge for device memory is
    /// released nevertheless: that memory is gone, but nobody holds it. Host memory stays charged.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// The bytes of `range`, for reading.
    ///
    /// # Safety
    /// The allocation outlives `'a`, and nobody writes the bytes during `'a`.
    pub(super) unsafe fn slice<'a>(&self, range: Range<usize>) -> Option<&'a [u8]> {
        let address = self.host_at(&range)?;
        // SAFETY: the range is inside the memory, which is initialised; the rest is the caller's promise.
        Some(unsafe { std::slice::from_raw_parts(address, range.len()) })
    }

    /// The bytes of `range`, for writing.
    ///
    /// # Safety
    /// The allocation outlives `'a`, and nobody else reads or writes the bytes during `'a`.
    pub(super) unsafe fn slice_mut<'a>(&self, range: Range<usize>) -> Option<&'a mut [u8]> {
        let address = self.host_at(&range)?;
        // SAFETY: as in `slice`.
        Some(unsafe { std::slice::from_raw_parts_mut(address, range.len()) })
    }

    /// The host address of `range`. `None` if the range is outside the memory or the host cannot access it.
    pub(super) fn host_at(&self, range: &Range<usize>) -> Option<*mut u8> {
        let inside = range.start <= range.end && range.end <= self.bytes;
        // The offset is inside the memory, or one past its end for an empty range there.
        self.host().filter(|_| inside).map(|start| start.as_ptr().wrapping_add(range.start))
    }
}

impl Drop for MemoryBlock {
    fn drop(&mut self) {
        let Some((storage, charge)) = self.held.take() else { return };
        let forked = !self.process.is_current();
        if !forked && !*self.abandoned.get_mut() {
            return storage.free(charge);
        }
        // In a fork the memory is the parent's, and a thread that does not exist here may hold the lock of its ledger.
        if forked || self.host.is_some() || storage.shared().is_some() {
            std::mem::forget(charge);
        }
        std::mem::forget(storage);
    }
}

impl fmt::Debug for MemoryBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {}", self.bytes, self.device)
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::{Backend, Host, MemoryKind};
    use crate::device::DeviceId;

    #[test]
    fn no_range_outside_the_memory_has_an_address() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let memory = host.alloc(8, MemoryKind::Pinned).unwrap();
        let (block, start) = (memory.block(), memory.block().host().unwrap().as_ptr());
        for (from, to, inside) in
            [(0, 8, true), (3, 5, true), (8, 8, true), (0, 9, false), (9, 9, false), (5, 3, false)]
        {
            let address = inside.then(|| start.wrapping_add(from));
            assert_eq!(block.host_at(&std::ops::Range { start: from, end: to }), address, "{from}..{to}");
        }
    }
}
