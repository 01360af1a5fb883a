//! Host memory that devices copy from and to at full speed.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use cudarc::driver::{result, sys};

use super::Opened;
use super::context::{Context, Refusal};
use super::device::CudaDevice;
use super::numa::Node;
use super::sysfs::Sysfs;
use crate::backend::software::HostAllocation;
use crate::backend::{BufMut, Charge, Device, Health, HostBytes, Ledger, MemoryKind, Role, Route, Storage, Stream};
use crate::bytes::ByteSize;
use crate::device::{DeviceId, DeviceInfo, MemoryUsage};
use crate::error::Result;

/// From this size on memory is mapped for itself and then pinned: its first touch is parallel and on huge pages,
/// which the driver's own allocation of pinned memory is not.
const REGISTERED_FROM: usize = 1 << 20;

/// How much may be pinned at one time, and how much is.
pub(super) struct Cap {
    limit: u64,
    pinned: AtomicU64,
}

impl Cap {
    /// A cap of this size, or the default for this system.
    pub(super) fn new(cap: Option<ByteSize>) -> Cap {
        let total = super::super::host_memory::HostMemory::read().total;
        let share = |percent: u64| total / 100 * percent;
        let default = match cfg!(windows) {
            true => share(40),
            false => share(40).max(share(90).min(total.saturating_sub(4 << 30))),
        };
        Cap { limit: cap.map_or(default, ByteSize::get), pinned: AtomicU64::new(0) }
    }

    fn take(&self, bytes: u64) -> bool {
        let more = |pinned: u64| pinned.checked_add(bytes).filter(|&sum| sum <= self.limit);
        self.pinned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.pinned.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The host, with pinned memory for the open CUDA devices. What cannot be pinned is ordinary memory instead: every
/// copy works all the same, slower.
pub(super) struct PinningHost {
    inner: Arc<dyn Device>,
    open: Arc<Opened>,
    cap: Arc<Cap>,
    nodes: Nodes,
}

/// On which NUMA node memory is pinned.
pub(super) struct Nodes {
    /// That of the caller's choice; without one, that of the device that the memory is for, or of all open devices where
    /// they have the same.
    pub(super) told: Option<u32>,
    pub(super) sysfs: Sysfs,
}

impl Nodes {
    /// The node for memory that is for the device `near`, where that is named and among the open `devices`.
    fn near(&self, devices: &[Arc<CudaDevice>], near: Option<DeviceId>) -> Option<Node> {
        let node = |device: &Arc<CudaDevice>| device.info().gpu.as_ref().and_then(|gpu| gpu.numa_node);
        let own = || devices.iter().find(|device| Some(device.info().id) == near).and_then(node);
        let common = || devices.first().and_then(node).filter(|&first| devices.iter().all(|d| node(d) == Some(first)));
        Node::find(&self.sysfs, self.told.or_else(own).or_else(common)?)
    }
}

impl PinningHost {
    pub(super) fn new(inner: Arc<dyn Device>, open: Arc<Opened>, cap: Arc<Cap>, nodes: Nodes) -> PinningHost {
        PinningHost { inner, open, cap, nodes }
    }

    /// Memory of that kind, near a device where one is named.
    fn take(&self, charge: Charge, kind: MemoryKind, near: Option<DeviceId>) -> Result<BufMut> {
        let pinned = if kind == MemoryKind::Pinned { self.pin(charge.bytes() as usize, near) } else { None };
        match pinned {
            Some(pinned) => Ok(BufMut::new(Box::new(PinnedMemory(RwLock::new(Box::new(pinned)))), charge)),
            None => self.inner.allocate(charge, kind),
        }
    }

    /// Pinned memory of `bytes`, if there is a device to pin it for, room under the cap, and the driver agrees.
    fn pin(&self, bytes: usize, near: Option<DeviceId>) -> Option<PinnedBytes> {
        // Memory pinned through one context is pinned for all: it is portable.
        let good = |device: &Arc<CudaDevice>| device.health() == Health::Good;
        let devices: Vec<_> = self.open.all().into_iter().filter(good).collect();
        let device = devices.first()?;
        if bytes == 0 || !self.cap.take(bytes as u64) {
            return None;
        }
        let node = self.nodes.near(&devices, near);
        let pinned = PinnedBytes::new(device.context(), &self.cap, bytes, node.as_ref());
        if pinned.is_none() {
            self.cap.give_back(bytes as u64);
        }
        pinned
    }
}

impl Device for PinningHost {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn ledger(&self) -> &Arc<Ledger> {
        self.inner.ledger()
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.inner.memory()
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        self.take(charge, kind, None)
    }

    fn allocate_near(&self, charge: Charge, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        self.take(charge, kind, Some(near))
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        self.inner.stream(role)
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        self.inner.route_from(source)
    }

    fn trim(&self) -> Result<u64> {
        self.inner.trim()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

impl fmt::Debug for PinningHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinningHost").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// Pinned memory as a buffer's storage.
struct PinnedMemory(RwLock<Box<dyn HostBytes>>);

impl Storage for PinnedMemory {
    fn host(&self) -> Option<&RwLock<Box<dyn HostBytes>>> {
        Some(&self.0)
    }

    fn pinned(&self) -> bool {
        true
    }
}

/// Host memory that is pinned for as long as it lives.
struct PinnedBytes {
    memory: Pinned,
    bytes: usize,
    context: Arc<Context>,
    cap: Arc<Cap>,
}

enum Pinned {
    /// Memory of ours that the driver was told of.
    Registered(HostAllocation),
    /// Memory of the driver's.
    Driver(*mut u8),
}

// SAFETY: the memory is owned by this value alone, whichever thread has it.
unsafe impl Send for PinnedBytes {}
// SAFETY: a shared reference only reads the bytes.
unsafe impl Sync for PinnedBytes {}

impl PinnedBytes {
    fn new(context: &Arc<Context>, cap: &Arc<Cap>, bytes: usize, node: Option<&Node>) -> Option<PinnedBytes> {
        let memory =
            if bytes >= REGISTERED_FROM { register(context, bytes, node) } else { driver_memory(context, bytes) };
        let (context, cap) = (Arc::clone(context), Arc::clone(cap));
        Some(PinnedBytes { memory: memory?, bytes, context, cap })
    }
}

fn register(context: &Arc<Context>, bytes: usize, node: Option<&Node>) -> Option<Pinned> {
    let mut memory = HostAllocation::new(bytes).ok()?;
    match node {
        Some(node) => node.touch(memory.bytes_mut()),
        None => touch(memory.bytes_mut()),
    }
    let address = memory.bytes_mut().as_mut_ptr().cast::<c_void>();
    // SAFETY: the range is ours, mapped for itself, and is unregistered before it is unmapped.
    let call = || unsafe { sys::cuMemHostRegister_v2(address, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
    refused(context, "cuMemHostRegister", context.call("cuMemHostRegister", || call().result()))?;
    Some(Pinned::Registered(memory))
}

fn driver_memory(context: &Arc<Context>, bytes: usize) -> Option<Pinned> {
    // SAFETY: the memory is freed by the drop of what owns it. Without the flag for write-combining the host reads
    // it at full speed.
    let call = || unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
    let address = refused(context, "cuMemHostAlloc", context.call("cuMemHostAlloc", call))?.cast::<u8>();
    // SAFETY: `bytes` fresh bytes at `address`; written once so that what safe code reads is initialised.
    unsafe { address.write_bytes(0, bytes) };
    Some(Pinned::Driver(address))
}

/// Reports a refusal to pin; ordinary memory takes its place.
fn refused<T>(context: &Context, call: &str, outcome: Result<T>) -> Option<T> {
    outcome.inspect_err(|error| tracing::warn!(device = %context.id(), call, %error, "host memory stays unpinned")).ok()
}

/// Makes the system back fresh memory with pages, on all cores.
fn touch(bytes: &mut [u8]) {
    use rayon::prelude::*;
    bytes.par_chunks_mut(4 << 20).for_each(|part| part.iter_mut().step_by(4096).for_each(|byte| *byte = 0));
}

impl HostBytes for PinnedBytes {
    fn bytes(&self) -> &[u8] {
        match &self.memory {
            Pinned::Registered(memory) => memory.bytes(),
            // SAFETY: the driver gave this many bytes, initialised in `driver_memory`, alive as long as `self`.
            Pinned::Driver(address) => unsafe { std::slice::from_raw_parts(*address, self.bytes) },
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Pinned::Registered(memory) => memory.bytes_mut(),
            // SAFETY: as above, and `self` is borrowed mutably.
            Pinned::Driver(address) => unsafe { std::slice::from_raw_parts_mut(*address, self.bytes) },
        }
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        let freed = match &mut self.memory {
            Pinned::Registered(memory) => {
                let address = memory.bytes_mut().as_mut_ptr().cast::<c_void>();
                // SAFETY: registered by `register`, once.
                self.context.raw("cuMemHostUnregister", || unsafe { sys::cuMemHostUnregister(address) }.result())
            }
            Pinned::Driver(address) => {
                // SAFETY: allocated by `driver_memory`, freed once.
                self.context.raw("cuMemFreeHost", || unsafe { result::free_host(address.cast()) })
            }
        };
        if let Err(Refusal::Code(call, error)) = freed {
            tracing::warn!(device = %self.context.id(), call, ?error, "pinned memory could not be released");
        }
        self.cap.give_back(self.bytes as u64);
    }
}
