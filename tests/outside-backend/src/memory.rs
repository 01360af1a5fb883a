//! The memory of accelerators.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use tensor_offload::backend::{MemoryBlock, Storage};

/// Sixty-four bytes: the least alignment that a device's memory has.
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "copies use its address")] [u8; Line::BYTES]);

impl Line {
    const BYTES: usize = 64;
}

/// One allocation. Its bytes are freed when it is dropped, which the library does once nothing uses them any more; memory that is
/// freed otherwise has a `Storage::free` of its own.
pub(crate) struct DeviceMemory(Box<[UnsafeCell<Line>]>);

// SAFETY: the lines are accessed only by copies, each of which is the only one to use its bytes then (see `queue`), whichever thread
// it is on.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Room for `bytes` bytes. `None` if the system has none.
    pub(crate) fn new(bytes: u64) -> Option<DeviceMemory> {
        let count = usize::try_from(bytes).ok()?.div_ceil(Line::BYTES);
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).ok()?;
        // Fresh memory holds anything, but it is initialised. Bytes that look like no weights show who relies on them.
        lines.resize_with(count, || UnsafeCell::new(Line([0xa5; Line::BYTES])));
        Some(DeviceMemory(lines.into_boxed_slice()))
    }

    /// Where it begins.
    fn first_byte(&self) -> NonNull<u8> {
        NonNull::from(&*self.0).cast()
    }
}

// SAFETY: the lines are initialised, belong to this value and do not move while it lives; nobody but the library's copies has their
// address. `host` stays `None`, so no slice of them is ever made.
unsafe impl Storage for DeviceMemory {
    fn bytes(&self) -> usize {
        self.0.len() * Line::BYTES
    }

    /// For the caller's kernels. It means something to the accelerator alone.
    fn address(&self) -> Option<u64> {
        Some(self.first_byte().expose_provenance().get() as u64)
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceMemory").field(&self.bytes()).finish()
    }
}

/// A range of memory that a queue reads or writes, and the block that it is in.
pub(crate) struct Place {
    byte: NonNull<u8>,
    _block: Arc<MemoryBlock>,
}

// SAFETY: any thread may read and write the memory, and the block keeps it.
unsafe impl Send for Place {}

impl Place {
    /// A range of the memory of an accelerator, or of the host. `None` for what no queue reaches: files, other vendors' memory, and
    /// memory of the host that has no lasting address.
    pub(crate) fn of(block: &Arc<MemoryBlock>, range: Range<usize>) -> Option<Place> {
        let start = block.downcast::<DeviceMemory>().map(DeviceMemory::first_byte).or_else(|| block.host())?;
        let is_inside = range.start <= range.end && range.end <= block.bytes();
        // SAFETY: inside the block's memory, or one past its end.
        is_inside.then(|| Place { byte: unsafe { start.add(range.start) }, _block: Arc::clone(block) })
    }

    /// Its first byte.
    pub(crate) fn byte(&self) -> NonNull<u8> {
        self.byte
    }
}
