//! Backends move bytes between devices. They know nothing of models.
//!
//! A [`Backend`] finds and opens devices. A [`Device`] gives memory and streams. A [`Stream`] is a queue of
//! copies that runs beside the caller; an [`Event`] is a point in it. A [`BufMut`] is memory that one owner can
//! write, a [`Buf`] is memory that many can read; both carry the events of their last uses, so a copy into or
//! out of them waits for exactly those, on the device wherever the backend can.
//!
//! Ownership travels with a copy: [`Stream::copy`] takes the destination and gives a [`Flight`], which gives it
//! back when the bytes have landed. Whatever is dropped early, the stream keeps both ends' memory until it is
//! done with them.

mod buffer;
pub mod conformance;
mod copy;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod event;
mod faulty;
mod host;
mod host_memory;
mod kernels;
mod ledger;
pub(crate) mod process;
mod simulated;
mod software;
mod storage;
mod watcher;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use buffer::{Buf, BufMut};
pub use copy::{Flight, Piece, Rejected, Transfer};
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use event::{Event, Fence, FenceState};
pub use faulty::{Countdown, Faulty, Operation};
pub use host::Host;
pub(crate) use host_memory::trim_allocator;
pub use kernels::{BlockScales, Kernels, MatrixPatch, PackedProduct, PatchFlight, SentPatch};
pub use ledger::{Charge, Ledger};
pub use simulated::{Contents, Simulated};
pub use software::Clock;
pub use storage::{MemoryBlock, Storage};

use crate::device::{DeviceId, DeviceInfo, DeviceKind, MemoryUsage, Topology};
use crate::error::{Error, Missing, Result};

/// Finds devices and opens them.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The devices there are, and the kinds that are not there with the reason. Opens none.
    fn discover(&self) -> Vec<Found>;

    /// Opens a device that [`discover`](Backend::discover) found.
    ///
    /// # Errors
    /// [`UnknownDevice`](crate::Error::UnknownDevice) for one that it did not find.
    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>>;

    /// The links of its devices, where known.
    fn topology(&self) -> Topology {
        Topology::new()
    }
}

/// A device, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Found {
    /// A device that can be opened.
    Here(DeviceInfo),
    /// A kind of device that cannot be used here.
    Absent {
        /// The kind.
        kind: DeviceKind,
        /// Why not, for the user.
        why: String,
    },
}

/// An open device.
pub trait Device: Any + Send + Sync + fmt::Debug {
    /// What was known of it when it was found.
    fn info(&self) -> &DeviceInfo;

    /// What this process has taken of its memory.
    fn ledger(&self) -> &Arc<Ledger>;

    /// Its memory now.
    ///
    /// # Errors
    /// When the driver does not answer.
    fn memory(&self) -> Result<MemoryUsage>;

    /// Backs a charge on this device's ledger with memory of that many bytes, aligned to at least 64. Fresh
    /// memory holds unspecified bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory), and the charge is given back.
    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut>;

    /// The same for memory that the device `near` will copy from and to most. A host of several NUMA nodes can take
    /// [`Pinned`](MemoryKind::Pinned) memory from the node of that device; elsewhere it changes nothing.
    ///
    /// # Errors
    /// As [`allocate`](Device::allocate).
    fn allocate_near(&self, charge: Charge, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        let _ = near;
        self.allocate(charge, kind)
    }

    /// A new queue for copies.
    ///
    /// # Errors
    /// When the driver has none to give.
    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>>;

    /// How a stream of this device can copy from memory of `source`.
    fn route_from(&self, source: &dyn Device) -> Route;

    /// The arithmetic that it offers, if any; the software devices offer none.
    fn kernels(&self) -> Option<&dyn Kernels> {
        None
    }

    /// Whether a copy from `source` to this device makes the thread that queues it wait, since the device's streams
    /// cannot wait for those bytes. They are then better brought through pinned memory, by a thread that may wait.
    fn copies_hold_up(&self, source: &MemoryBlock) -> bool {
        let _ = source;
        false
    }

    /// Runs `work`, in which this device is asked for several things in a row: a backend whose calls need preparing can do
    /// that once for all of them.
    fn batched(&self, work: &mut dyn FnMut()) {
        work();
    }

    /// Gives memory that the allocator holds for reuse back to the system; the bytes given back.
    ///
    /// # Errors
    /// When the driver refuses.
    fn trim(&self) -> Result<u64>;

    /// Whether the device still works.
    fn health(&self) -> Health;
}

impl dyn Device + '_ {
    /// Its name in allocation strings.
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

    /// Charges the ledger and allocates memory that the device `near` will copy from and to most.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory).
    pub fn alloc_near(&self, bytes: usize, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        self.back(self.ledger().charge(bytes as u64)?, kind, Some(near))
    }

    /// Backs a charge with memory, and makes sure that it is as much and where it was asked for.
    pub(crate) fn back(&self, charge: Charge, kind: MemoryKind, near: Option<DeviceId>) -> Result<BufMut> {
        let (bytes, id) = (charge.bytes() as usize, self.id());
        let memory = match near {
            Some(near) => self.allocate_near(charge, kind, near)?,
            None => self.allocate(charge, kind)?,
        };
        if (memory.bytes(), memory.device()) == (bytes, id) {
            return Ok(memory);
        }
        let (have, there) = (memory.bytes(), memory.device());
        Err(Error::bug(format!("{id} was asked for {bytes} bytes and gave {have} on {there}")))
    }
}

/// A queue of copies that run in order, beside the caller.
///
/// Whatever a stream is given it keeps alive until it is done with it.
pub trait Stream: Any + Send + Sync + fmt::Debug {
    /// The device that it belongs to.
    fn device(&self) -> DeviceId;

    /// Queues a copy. It runs after all earlier work of this stream and after the pending events of both ends. Its event
    /// comes after these also when the copy fails.
    ///
    /// # Errors
    /// [`Rejected`] gives the destination back.
    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>>;

    /// Makes all later work of this stream wait for `event`.
    ///
    /// # Errors
    /// When the stream takes no more work.
    fn wait(&self, event: &Event) -> Result<Joined>;

    /// An event after all earlier work of this stream. `uses` are the buffers that this work reads: none of
    /// them is written or freed before the event.
    ///
    /// # Errors
    /// When the stream takes no more work; the buffers then carry no new event.
    fn record(&self, uses: &[Buf]) -> Result<Event>;

    /// Keeps the stream busy for a time, in place of a caller's compute: for replays, examples and measurements. A backend
    /// need not have it.
    ///
    /// # Errors
    /// [`Missing::Occupy`] where it has not; else when the stream takes no more work.
    fn occupy(&self, time: Duration) -> Result<()> {
        let _ = time;
        Err(Missing::Occupy { device: self.device() }.into())
    }
}

impl dyn Stream + '_ {
    /// Queues a copy, and makes sure that the flight is that of its destination: a stream may be another crate's.
    ///
    /// # Errors
    /// As [`copy`](Stream::copy); [`Error::Bug`] with what came back in the destination's place.
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

/// What memory is for. To the host, the disk and simulated devices all kinds are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Part of what the library keeps and reuses.
    Arena,
    /// An allocation of its own, which can be handed over whole.
    Whole,
    /// Host memory that devices copy from and to at full speed.
    Pinned,
}

/// What a stream is for; a backend may give each its own priority.
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

/// How bytes get from one device's memory to another's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// One copy.
    Direct,
    /// Through host memory, in two copies; the reason.
    Staged(String),
}

/// Who waits for an event that a stream was told to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// The stream, on its device; the host goes on.
    OnDevice,
    /// The stream cannot; the caller has to wait for the event before queueing more.
    HostMustWait,
}

/// Whether a device still works.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// It does.
    Good,
    /// It failed and stays failed; the first reason seen.
    Lost(String),
}
