//! Host memory that devices copy from and to directly.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ash::vk;
use range_alloc::RangeAllocator;

use super::Opened;
use super::context::Context;
use super::device::VulkanDevice;
use super::import::HostBuffer;
use crate::backend::first_touch;
use crate::backend::pinning_host::Pin;
use crate::backend::process::Process;
use crate::backend::software::HostAllocation;
use crate::backend::{Device, Health, Storage};
use crate::device::DeviceId;

/// The size in bytes of a region that smaller memory shares. Each import is one of the allocations that a driver limits.
const SHARED: usize = 4 << 20;

/// The size from which memory is a region of its own. What is smaller is not mapped, and has no pages to itself.
const OWN_FROM: usize = 1 << 20;

/// The least alignment of regions and of their sizes: a page.
const PAGE: usize = 4096;

/// The alignment of memory within a shared region.
const ALIGNMENT: usize = 256;

/// The pinned memory of the host, and its limit.
pub(super) struct Pins {
    limit: u64,
    pinned: AtomicU64,
    imports: bool,
    open: Arc<Opened>,
    /// The regions that small memory shares.
    shared: Mutex<Vec<Arc<Region>>>,
    /// The process whose pages they are: a fork has none of them.
    process: Process,
}

impl Pins {
    /// Pins with a limit of `limit` bytes. With `imports`, devices import the library's own memory.
    pub(super) fn new(limit: u64, imports: bool, open: Arc<Opened>) -> Pins {
        let (pinned, shared, process) = (AtomicU64::new(0), Mutex::default(), Process::current());
        Pins { limit, pinned, imports, open, shared, process }
    }

    /// As [`Pin::pin`].
    fn take(self: &Arc<Self>, bytes: usize) -> Option<PinnedMemory> {
        if bytes == 0 || !self.process.is_current() {
            return None;
        }
        let devices = self.devices();
        if devices.is_empty() {
            return None;
        }
        let pinned = |region, range| PinnedMemory { region, range, bytes, pins: Arc::clone(self) };
        if bytes >= OWN_FROM {
            let region = Arc::new(Region::new(self, &devices, bytes)?);
            let range = region.take(bytes)?;
            return Some(pinned(region, range));
        }
        let mut shared = self.shared();
        let find = |regions: &[Arc<Region>]| {
            regions.iter().find_map(|region| region.take(bytes).map(|range| (Arc::clone(region), range)))
        };
        if let Some((region, range)) = find(&shared) {
            return Some(pinned(region, range));
        }
        // Near the limit there may be room for a smaller one.
        let region = Region::new(self, &devices, SHARED).or_else(|| Region::new(self, &devices, OWN_FROM))?;
        shared.push(Arc::new(region));
        find(&shared).map(|(region, range)| pinned(region, range))
    }

    fn devices(&self) -> Vec<Arc<VulkanDevice>> {
        self.open.all().into_iter().filter(|device| device.health() == Health::Good).collect()
    }

    /// Takes a range back. A region without any is given back to the system.
    fn give_back(&self, region: &Arc<Region>, range: Range<usize>) {
        let mut shared = self.shared();
        region.ranges().free_range(range);
        if region.ranges().is_empty() {
            shared.retain(|other| !Arc::ptr_eq(other, region));
        }
    }

    fn shared(&self) -> MutexGuard<'_, Vec<Arc<Region>>> {
        // Every change is one push or removal, so a poisoned lock still guards a consistent list.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pin for Pins {
    fn limit(&self) -> u64 {
        self.limit
    }

    fn pin(self: &Arc<Self>, bytes: usize, _near: Option<DeviceId>) -> Option<Box<dyn Storage>> {
        Some(Box::new(self.take(bytes)?))
    }
}

/// Room under the limit of pinned memory.
struct Room {
    bytes: u64,
    pins: Arc<Pins>,
}

impl Room {
    fn take(pins: &Arc<Pins>, bytes: usize) -> Option<Room> {
        let bytes = bytes as u64;
        let more = |pinned: u64| pinned.checked_add(bytes).filter(|&sum| sum <= pins.limit);
        pins.pinned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Room { bytes, pins: Arc::clone(pins) })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.pins.pinned.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Consecutive pages of pinned memory.
struct Region {
    address: NonNull<u8>,
    bytes: usize,
    ranges: Mutex<RangeAllocator<usize>>,
    /// What each device that was asked has of the region; none for a device that cannot import it. Dropped before the pages.
    known: Mutex<Vec<(Weak<Context>, Option<HostBuffer>)>>,
    /// The pages, if they are the library's own.
    pages: Option<HostAllocation>,
    _room: Room,
}

// SAFETY: the region owns its memory, whichever thread it is on.
unsafe impl Send for Region {}
// SAFETY: a shared reference gives out an address and accesses no byte.
unsafe impl Sync for Region {}

impl Region {
    /// A region of at least so many bytes for these devices.
    fn new(pins: &Arc<Pins>, devices: &[Arc<VulkanDevice>], bytes: usize) -> Option<Region> {
        let contexts = || devices.iter().map(|device| device.context());
        let alignments = contexts().filter_map(|context| context.limits().import);
        let alignment = alignments.max().map_or(PAGE, |most| (most as usize).max(PAGE));
        let bytes = bytes.checked_next_multiple_of(alignment)?;
        // Before any page is touched.
        if contexts().all(|context| bytes as u64 > context.limits().allocation) {
            return None;
        }
        let room = Room::take(pins, bytes)?;
        let ranges = Mutex::new(RangeAllocator::new(0..bytes));
        let (address, known, pages, room) = match pins.imports {
            true => match Region::imported(contexts(), bytes, alignment) {
                Some((address, known, pages)) => (address, known, Some(pages), room),
                None => Region::of_a_driver(contexts(), bytes).map(|(address, known)| (address, known, None, room))?,
            },
            false => Region::of_a_driver(contexts(), bytes).map(|(address, known)| (address, known, None, room))?,
        };
        Some(Region { address, bytes, ranges, known: Mutex::new(known), pages, _room: room })
    }

    /// Pages of the library that at least one device has imported.
    #[expect(clippy::type_complexity, reason = "the parts of a region")]
    fn imported<'a>(
        contexts: impl Iterator<Item = &'a Arc<Context>>,
        bytes: usize,
        alignment: usize,
    ) -> Option<(NonNull<u8>, Vec<(Weak<Context>, Option<HostBuffer>)>, HostAllocation)> {
        // A mapping begins with a page.
        let more = if alignment > PAGE { alignment } else { 0 };
        let mut pages = HostAllocation::new(bytes + more).ok()?;
        // SAFETY: nobody else has the address yet.
        first_touch::touch(unsafe { pages.bytes_mut() });
        pages.keep_from_forks();
        let start = pages.address();
        let ahead = start.addr().get().next_multiple_of(alignment) - start.addr().get();
        // SAFETY: `bytes` bytes from there on are inside the mapping.
        let address = unsafe { start.add(ahead) };
        let known: Vec<_> = contexts
            .map(|context| {
                // SAFETY: the pages are the region's, which drops the buffer first.
                let buffer = unsafe { HostBuffer::import(context, address, bytes) };
                (Arc::downgrade(context), buffer)
            })
            .collect();
        known.iter().any(|(_, buffer)| buffer.is_some()).then_some((address, known, pages))
    }

    /// Memory that the driver of one of the devices allocates.
    #[expect(clippy::type_complexity, reason = "the parts of a region")]
    fn of_a_driver<'a>(
        contexts: impl Iterator<Item = &'a Arc<Context>>,
        bytes: usize,
    ) -> Option<(NonNull<u8>, Vec<(Weak<Context>, Option<HostBuffer>)>)> {
        for context in contexts {
            match HostBuffer::allocate(context, bytes) {
                Ok((buffer, address)) => return Some((address, vec![(Arc::downgrade(context), Some(buffer))])),
                Err(refusal) => {
                    let error = context.error(refusal);
                    tracing::warn!(device = %context.id(), bytes, %error, "host memory could not be pinned");
                }
            }
        }
        None
    }

    fn take(&self, bytes: usize) -> Option<Range<usize>> {
        self.ranges().allocate_range(bytes.next_multiple_of(ALIGNMENT)).ok()
    }

    fn ranges(&self) -> MutexGuard<'_, RangeAllocator<usize>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The region's buffer on this device, which is asked once. `None` if it has none.
    fn on(&self, context: &Arc<Context>) -> Option<vk::Buffer> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, buffer)) = known.iter().find(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(context))) {
            return buffer.as_ref().map(HostBuffer::buffer);
        }
        let own = self.pages.is_some();
        // SAFETY: the pages are the region's, which drops the buffer first.
        let buffer = if own { unsafe { HostBuffer::import(context, self.address, self.bytes) } } else { None };
        let handle = buffer.as_ref().map(HostBuffer::buffer);
        known.push((Arc::downgrade(context), buffer));
        handle
    }
}

/// A range of a region.
pub(super) struct PinnedMemory {
    region: Arc<Region>,
    range: Range<usize>,
    bytes: usize,
    pins: Arc<Pins>,
}

impl PinnedMemory {
    /// The buffer of this memory on a device, and the offset of the first byte. `None` if the device cannot copy from it.
    pub(super) fn place(&self, context: &Arc<Context>) -> Option<(vk::Buffer, u64)> {
        self.region.on(context).map(|buffer| (buffer, self.range.start as u64))
    }
}

// SAFETY: the range of the region is this value's alone, and the region does not move. Its bytes were zero at first, and hold
// what was written since.
unsafe impl Storage for PinnedMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn host(&self) -> Option<NonNull<u8>> {
        // SAFETY: the range is inside the region.
        Some(unsafe { self.region.address.add(self.range.start) })
    }

    fn pinned(&self) -> bool {
        true
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.pins.give_back(&self.region, self.range.clone());
    }
}
