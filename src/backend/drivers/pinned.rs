//! Pinned host memory, which devices copy from and to at full speed.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Opened;
use super::context::{Context, Refusal};
use super::device::DriverDevice;
use super::driver::Driver;
use super::numa::Node;
use super::verbs::Meaning;
use crate::backend::first_touch;
use crate::backend::pinning_host::Pin;
use crate::backend::software::HostAllocation;
use crate::backend::sysfs::Sysfs;
use crate::backend::{Charge, Device, Health, MemoryBlock, Storage};
use crate::device::DeviceId;

/// The size from which memory is mapped separately and then pinned: its first touch is parallel and on huge pages, which
/// the driver's allocation of pinned memory is not.
const REGISTERED_FROM: usize = 1 << 20;

/// The pinned memory of the host: its limit, its size, and the memory that could not be released.
pub(super) struct Pins {
    limit: u64,
    pinned: AtomicU64,
    open: Arc<Opened>,
    nodes: Nodes,
    /// Unused memory that the driver did not release. It counts as pinned and stays charged.
    stuck: Mutex<Vec<(PinnedMemory, Charge)>>,
}

impl Pins {
    /// Creates pins with a limit of `limit` bytes.
    pub(super) fn new(limit: u64, open: Arc<Opened>, nodes: Nodes) -> Pins {
        Pins { limit, pinned: AtomicU64::new(0), open, nodes, stuck: Mutex::default() }
    }

    fn take(&self, bytes: u64) -> bool {
        let more = |pinned: u64| pinned.checked_add(bytes).filter(|&sum| sum <= self.limit);
        self.pinned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.pinned.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Retries releasing memory that could not be released before.
    fn release_stuck(&self) {
        // Not under the lock: memory that is refused again is pushed back here.
        let stuck = std::mem::take(&mut *self.stuck());
        stuck.into_iter().for_each(|(memory, charge)| Box::new(memory).free(charge));
    }

    fn stuck(&self) -> MutexGuard<'_, Vec<(PinnedMemory, Charge)>> {
        // Every change is one push or take.
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The choice of the NUMA node on which memory is pinned.
pub(super) struct Nodes {
    /// The caller's choice. `None` means the node of the device that the memory is for, or else the common node of all open
    /// devices.
    pub(super) chosen: Option<u32>,
    pub(super) sysfs: Sysfs,
}

impl Nodes {
    /// The node for memory for the device `near`, if that is named and among the open `devices`.
    fn near(&self, devices: &[Arc<DriverDevice>], near: Option<DeviceId>) -> Option<Node> {
        let node = |device: &Arc<DriverDevice>| device.info().gpu.as_ref().and_then(|gpu| gpu.numa_node);
        let own = || devices.iter().find(|device| Some(device.info().id) == near).and_then(node);
        let common = || devices.first().and_then(node).filter(|&first| devices.iter().all(|d| node(d) == Some(first)));
        Node::find(&self.sysfs, self.chosen.or_else(own).or_else(common)?)
    }
}

impl Pin for Pins {
    fn limit(&self) -> u64 {
        self.limit
    }

    fn pin(self: &Arc<Self>, bytes: usize, near: Option<DeviceId>) -> Option<Box<dyn Storage>> {
        // Memory pinned through one context is pinned for all: it is portable.
        let good = |device: &Arc<DriverDevice>| device.health() == Health::Good;
        let devices: Vec<_> = self.open.all().into_iter().filter(good).collect();
        let device = devices.first()?;
        self.release_stuck();
        if bytes == 0 || !self.take(bytes as u64) {
            return None;
        }
        let node = self.nodes.near(&devices, near);
        let Some(pinned) = PinnedMemory::new(device.context(), self, bytes, node.as_ref()) else {
            self.give_back(bytes as u64);
            return None;
        };
        Some(Box::new(pinned))
    }

    fn trim(&self) {
        self.release_stuck();
    }
}

/// Pinned host memory.
struct PinnedMemory {
    address: NonNull<u8>,
    bytes: usize,
    origin: Origin,
    /// The context that pinned it.
    context: Arc<Context>,
    pins: Arc<Pins>,
}

enum Origin {
    /// Memory of this library, registered with the driver. It is unmapped only after the driver has released it: otherwise its
    /// addresses could be reused for ordinary memory that the driver takes for pinned.
    Registered(ManuallyDrop<HostAllocation>),
    /// Memory allocated by the driver.
    Driver,
}

// SAFETY: this value alone owns the memory, whichever thread it is on.
unsafe impl Send for PinnedMemory {}
// SAFETY: a shared reference gives out an address and accesses no byte.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    fn new(context: &Arc<Context>, pins: &Arc<Pins>, bytes: usize, node: Option<&Node>) -> Option<PinnedMemory> {
        let registers = context.driver().rules.registers && bytes >= REGISTERED_FROM;
        let registered = if registers { register(context, bytes, node) } else { None };
        let (address, origin) =
            registered.or_else(|| Some((driver_memory_on(context, bytes, node)?, Origin::Driver)))?;
        Some(PinnedMemory { address, bytes, origin, context: Arc::clone(context), pins: Arc::clone(pins) })
    }

    /// Makes the driver release the memory, through any working device: the memory is pinned for all of them.
    fn release(&self) -> Result<(), Refusal> {
        let others = || self.pins.open.all().into_iter().map(|device| Arc::clone(device.context()));
        let mut outcome = self.release_through(&self.context);
        for context in others() {
            if outcome.is_ok() {
                break;
            }
            outcome = self.release_through(&context);
        }
        outcome
    }

    fn release_through(&self, context: &Context) -> Result<(), Refusal> {
        let address = self.address.as_ptr().cast::<c_void>();
        let released = match self.origin {
            // SAFETY: registered by `register`; nothing uses it any more.
            Origin::Registered(_) => context.raw(|verbs| unsafe { verbs.host_unregister(address) }),
            // SAFETY: allocated by `driver_memory`, freed once.
            Origin::Driver => context.raw(|verbs| unsafe { verbs.host_free(address) }),
        };
        match released {
            // The context that registered it is gone, and the registration with it.
            Err(refusal) if refusal.is(Meaning::NotRegistered) => Ok(()),
            other => other,
        }
    }
}

// SAFETY: the memory does not move, belongs to this value, and was zeroed.
unsafe impl Storage for PinnedMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.address)
    }

    fn pinned(&self) -> bool {
        true
    }

    fn free(mut self: Box<Self>, charge: Charge) {
        let pins = Arc::clone(&self.pins);
        if let Err(refusal) = self.release() {
            // A sticky error makes the device lost.
            let error = self.context.error(refusal);
            tracing::warn!(device = %self.context.id(), %error, "pinned memory could not be released; it stays");
            pins.stuck().push((*self, charge));
            return;
        }
        if let Origin::Registered(memory) = &mut self.origin {
            // SAFETY: this value is dropped now and does not access the memory again.
            unsafe { ManuallyDrop::drop(memory) };
        }
        pins.give_back(self.bytes as u64);
    }
}

/// Whether memory is pinned for a driver, as far as is known: a caller's own that says that it is pinned is pinned for all.
pub(super) fn is_pinned_for(block: &MemoryBlock, driver: &Driver) -> bool {
    block.downcast::<PinnedMemory>().map_or_else(|| block.pinned(), |memory| memory.context.driver().is(driver))
}

fn register(context: &Context, bytes: usize, node: Option<&Node>) -> Option<(NonNull<u8>, Origin)> {
    let mut memory = HostAllocation::new(bytes).ok()?;
    // SAFETY: nobody else has the address yet.
    let fresh = unsafe { memory.bytes_mut() };
    match node {
        Some(node) => node.touch(fresh),
        None => first_touch::touch(fresh),
    }
    memory.keep_from_forks();
    let address = memory.address();
    // SAFETY: this library owns the range, which is mapped separately and unmapped only after the driver has released it.
    let register = context.raw(|verbs| unsafe { verbs.host_register(address.as_ptr().cast(), bytes) });
    register.inspect_err(|&refusal| refused(context, refusal)).ok()?;
    Some((address, Origin::Registered(ManuallyDrop::new(memory))))
}

/// As [`driver_memory`], for larger memory from a thread on the node, so that the system takes the pages from there.
fn driver_memory_on(context: &Context, bytes: usize, node: Option<&Node>) -> Option<NonNull<u8>> {
    /// An address that one thread hands to another.
    struct Sent(Option<NonNull<u8>>);
    // SAFETY: the memory is the receiver's alone.
    unsafe impl Send for Sent {}
    let Some(node) = node.filter(|_| bytes >= REGISTERED_FROM) else { return driver_memory(context, bytes) };
    std::thread::scope(|scope| {
        let allocate = || {
            node.bind();
            Sent(driver_memory(context, bytes))
        };
        let thread = std::thread::Builder::new().spawn_scoped(scope, allocate).ok();
        thread.map_or_else(
            || driver_memory(context, bytes),
            |thread| thread.join().ok().and_then(|Sent(address)| address),
        )
    })
}

fn driver_memory(context: &Context, bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: there are bytes to allocate.
    let allocated = context.raw(|verbs| unsafe { verbs.host_allocate(bytes) });
    let address = allocated.inspect_err(|&refusal| refused(context, refusal)).ok()?;
    let address = NonNull::new(address.cast::<u8>())?;
    // SAFETY: `bytes` fresh bytes at `address`; zeroed so that safe code reads initialised bytes.
    unsafe { address.write_bytes(0, bytes) };
    Some(address)
}

/// Logs a refusal to pin; ordinary memory takes its place. `UNKNOWN`, which some systems return for a limit on pinned memory,
/// does not make the device lost: if it is lost, its next call reports that.
fn refused(context: &Context, refusal: Refusal) {
    let error = match refusal {
        Refusal::Code(failure) if refusal.is(Meaning::Unknown) => context.driver().describe(failure),
        refusal => context.error(refusal).to_string(),
    };
    tracing::warn!(device = %context.id(), error, "host memory could not be pinned this way");
}
