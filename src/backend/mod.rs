//! Backends move bytes between devices. They know nothing of models.
//!
//! A [`Backend`] finds and opens devices. A [`Device`] provides memory and streams. A [`Stream`] is a queue of copies that
//! runs asynchronously to the caller; an [`Event`] is a point in it. A [`BufMut`] is memory that one owner can write, a
//! [`Buf`] is memory that many can read. Both carry the events of their last uses, so a copy into or out of them waits for
//! exactly those events, on the device where the backend can.
//!
//! Ownership travels with a copy: [`Stream::copy`] takes the destination and returns a [`Flight`], which returns the
//! destination once the bytes have arrived. If a value is dropped early, the stream still keeps the memory of both ends
//! until it is done with it.

mod buffer;
pub mod conformance;
mod copy;
mod decompress;
mod dequantise;
#[cfg(feature = "cuda")]
pub(crate) mod drivers;
mod event;
mod extents;
mod faulty;
mod file_reads;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod first_touch;
mod host;
mod host_memory;
mod kernels;
mod ledger;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod pinning_host;
pub(crate) mod process;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod reaper;
mod simulated;
mod software;
mod storage;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod sysfs;
#[cfg(feature = "vulkan")]
pub(crate) mod vulkan;
mod watcher;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use buffer::{Buf, BufMut};
pub use copy::{Flight, Piece, Rejected, Transfer};
pub use decompress::{Decompress, DecompressFlight, Undecoded};
pub use dequantise::Dequantise;
#[cfg(feature = "ascend")]
pub use drivers::Ascend;
#[cfg(feature = "cambricon")]
pub use drivers::Cambricon;
#[cfg(feature = "corex")]
pub use drivers::Corex;
#[cfg(feature = "cuda")]
pub use drivers::Cuda;
#[cfg(feature = "hip")]
pub use drivers::Hip;
pub(crate) use event::until;
pub use event::{Event, Fence, FenceState};
pub(crate) use extents::ExtentPart;
pub use extents::{Extent, Extents, HostCache, Readable};
pub use faulty::{Countdown, Faulty, Operation};
pub use file_reads::{DeviceFile, FileReads, Gds, NoFileReads};
pub use host::Host;
pub(crate) use host_memory::trim_allocator;
pub use kernels::{BlockScales, Kernels, MatrixPatch, PackedProduct, PatchFlight, SentPatch};
pub use ledger::{Charge, Ledger};
pub use simulated::{Contents, Simulated};
pub use software::Clock;
pub use storage::{MemoryBlock, SharedMemory, Storage};
#[cfg(feature = "vulkan")]
pub use vulkan::Vulkan;

use crate::device::{DeviceId, DeviceInfo, DeviceKind, MemoryUsage, Topology};
use crate::error::{Error, Missing, Result};

/// Finds devices and opens them.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Lists the available devices, and the kinds of device that are unavailable with the reason. Opens none.
    fn discover(&self) -> Vec<Found>;

    /// Opens a device that [`discover`](Backend::discover) found.
    ///
    /// # Errors
    /// [`UnknownDevice`](crate::Error::UnknownDevice) for a device that it did not find.
    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>>;

    /// The links of the backend's devices, as far as they are known.
    fn topology(&self) -> Topology {
        Topology::new()
    }
}

/// A device that was found, or the reason why a kind of device is unavailable.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(clippy::large_enum_variant, reason = "a machine has a few of them")]
pub enum Found {
    /// A device that can be opened.
    Here(DeviceInfo),
    /// A kind of device that cannot be used here.
    Absent {
        /// The kind.
        kind: DeviceKind,
        /// The reason, for the user.
        why: String,
    },
}

/// An open device.
pub trait Device: Any + Send + Sync + fmt::Debug {
    /// The facts about the device that were known when it was found.
    fn info(&self) -> &DeviceInfo;

    /// The ledger of the device memory that this process has taken.
    fn ledger(&self) -> &Arc<Ledger>;

    /// The current memory usage of the device.
    ///
    /// # Errors
    /// When the driver does not respond.
    fn memory(&self) -> Result<MemoryUsage>;

    /// Allocates the bytes of a charge on this device's ledger, aligned to at least 64 bytes. Fresh memory holds
    /// unspecified bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory); the charge is then released.
    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut>;

    /// As [`allocate`](Device::allocate), for memory that is mostly copied from and to by the device `near`. A host with
    /// several NUMA nodes can take [`Pinned`](MemoryKind::Pinned) memory from that device's node. The default ignores
    /// `near`.
    ///
    /// # Errors
    /// As [`allocate`](Device::allocate).
    fn allocate_near(&self, charge: Charge, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        let _ = near;
        self.allocate(charge, kind)
    }

    /// Makes memory of this device out of bytes that stay where they are and are read for each copy. It can only be read, and
    /// takes nothing of the device's memory. `None` if the device has no such memory, which is the default: then the bytes are
    /// copied to the device.
    ///
    /// # Errors
    /// When the device cannot be used.
    fn read_only(&self, contents: Extents) -> Result<Option<Buf>> {
        drop(contents);
        Ok(None)
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// When the driver cannot create one.
    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>>;

    /// The route by which a stream of this device can copy from memory of `source`.
    fn route_from(&self, source: &dyn Device) -> Route;

    /// The kernels of the device. `None` if it has none.
    fn kernels(&self) -> Option<&dyn Kernels> {
        None
    }

    /// The device's own reads of files. `None` if it has none.
    fn file_reads(&self) -> Option<&dyn FileReads> {
        None
    }

    /// Whether queueing a copy from `source` to this device blocks the calling thread, since the device's streams cannot
    /// wait for those bytes. They are then better copied through pinned memory, by a thread that may block.
    fn copies_block(&self, source: &MemoryBlock) -> bool {
        let _ = source;
        false
    }

    /// Runs `work`, which makes several calls to this device in a row. A backend whose calls need preparation can prepare
    /// once for all of them.
    fn batched(&self, work: &mut dyn FnMut()) {
        work();
    }

    /// Returns memory that the allocator caches for reuse to the system. Returns the number of bytes released.
    ///
    /// # Errors
    /// When the driver refuses.
    fn trim(&self) -> Result<u64>;

    /// The health of the device.
    fn health(&self) -> Health;
}

impl dyn Device + '_ {
    /// The device's id: its name in allocation strings.
    pub fn id(&self) -> DeviceId {
        self.info().id
    }

    /// Charges the ledger and allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory).
    pub fn alloc(&self, bytes: usize, kind: MemoryKind) -> Result<BufMut> {
        self.back(self.ledger().charge(bytes as u64)?, kind, None)
    }

    /// Charges the ledger and allocates memory that is mostly copied from and to by the device `near`.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory).
    pub fn alloc_near(&self, bytes: usize, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        self.back(self.ledger().charge(bytes as u64)?, kind, Some(near))
    }

    /// Allocates the bytes of a charge, and checks the size and device of what the backend returns.
    pub(crate) fn back(&self, charge: Charge, kind: MemoryKind, near: Option<DeviceId>) -> Result<BufMut> {
        let (bytes, id) = (charge.bytes() as usize, self.id());
        let memory = match near {
            Some(near) => self.allocate_near(charge, kind, near)?,
            None => self.allocate(charge, kind)?,
        };
        if (memory.bytes(), memory.device()) == (bytes, id) {
            return Ok(memory);
        }
        Err(other_memory(id, bytes, memory.bytes(), memory.device()))
    }

    /// Makes [memory that is only read](Device::read_only), and checks its size and device likewise.
    ///
    /// # Errors
    /// [`Missing::ReadOnly`] when the device has no such memory.
    pub(crate) fn only_read(&self, contents: Extents) -> Result<Buf> {
        let (bytes, id) = (contents.bytes(), self.id());
        let memory = self.read_only(contents)?.ok_or(Missing::ReadOnly { device: id })?;
        if (memory.bytes(), memory.device()) == (bytes, id) {
            return Ok(memory);
        }
        Err(other_memory(id, bytes, memory.bytes(), memory.device()))
    }
}

fn other_memory(id: DeviceId, bytes: usize, given: usize, device: DeviceId) -> Error {
    Error::bug(format!("{id} was asked for {bytes} bytes and gave {given} on {device}"))
}

/// A queue of copies that run in order, asynchronously to the caller.
///
/// A stream keeps everything that it is given alive until it is done with it.
pub trait Stream: Any + Send + Sync + fmt::Debug {
    /// The device that the stream belongs to.
    fn device(&self) -> DeviceId;

    /// Queues a copy. It runs after all earlier work of this stream and after the pending events of both ends. Its event
    /// completes after these even if the copy fails.
    ///
    /// # Errors
    /// [`Rejected`], which returns the destination.
    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>>;

    /// Makes all later work of this stream wait for `event`.
    ///
    /// # Errors
    /// When the stream accepts no more work.
    fn wait(&self, event: &Event) -> Result<Joined>;

    /// Records an event after all earlier work of this stream. `uses` are the buffers that this work reads: none of them is
    /// written or freed before the event completes.
    ///
    /// # Errors
    /// When the stream accepts no more work; the buffers then carry no new event.
    fn record(&self, uses: &[Buf]) -> Result<Event>;

    /// Keeps the stream busy for a time, in place of a caller's compute: for replays, examples and measurements. Backends may
    /// leave it out.
    ///
    /// # Errors
    /// [`Missing::Occupy`] if the backend does not support it; otherwise when the stream accepts no more work.
    fn occupy(&self, time: Duration) -> Result<()> {
        let _ = time;
        Err(Missing::Occupy { device: self.device() }.into())
    }
}

impl dyn Stream + '_ {
    /// Queues a copy, and checks that the flight returns its destination: the stream may be another crate's.
    ///
    /// # Errors
    /// As [`copy`](Stream::copy); [`Error::Bug`] with the buffer that came back in place of the destination.
    pub(crate) fn send(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        let wanted = transfer.dst().shape();
        let flight = self.copy(transfer)?;
        if flight.shape() == wanted {
            return Ok(flight);
        }
        let error = Error::bug(format!("a stream of {} mixed its copies up", self.device()));
        Err(Box::new(Rejected { error, dst: flight.chain() }))
    }
}

/// The purpose of an allocation. The host, the disk and simulated devices treat all kinds alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory that the library keeps and reuses.
    Arena,
    /// A separate allocation, which can be handed over as a whole.
    Whole,
    /// Host memory that devices copy from and to at full speed.
    Pinned,
}

/// The purpose of a stream. A backend may give each role its own priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Copies to the device.
    Upload,
    /// Copies from the device.
    Download,
    /// The caller's compute.
    Compute,
}

/// The route of bytes from one device's memory to another's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// One copy.
    Direct,
    /// Two copies, through host memory; with the reason.
    Staged(String),
}

/// Who must wait for an event after [`Stream::wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// The stream waits, on its device. The host continues.
    OnDevice,
    /// The stream cannot wait. The caller must wait for the event before queueing more work.
    HostMustWait,
}

/// The health of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// The device works.
    Good,
    /// The device has failed for good; with the first reason seen.
    Lost(String),
}
