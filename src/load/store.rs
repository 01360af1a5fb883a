//! The memory of models: homes of modules, and slots. Models that are made out of each other share what is alike.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{Buf, Device, MemoryKind, Stream};
use crate::device::DeviceId;
use crate::plan::Slots;

/// The memory of one group of modules where it lives.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) buf: Buf,
    pub(super) kind: MemoryKind,
}

/// The modules that live away from the compute device: read-only, shared by all who stream them.
#[derive(Debug)]
pub struct WeightStore {
    /// For each group of modules its memory; none when it is resident or another module owns its storage.
    pub(super) homes: Vec<Option<Arc<Home>>>,
}

/// The memory of one slot, in the parts into which it was cut last.
pub(crate) type SlotMemory = Vec<Buf>;

/// What a model holds on its compute device: resident modules, and the slots for streamed layers.
#[derive(Debug)]
pub struct Residency {
    pub(super) device: Arc<dyn Device>,
    pub(super) homes: Vec<Option<Arc<Home>>>,
    pub(super) slots: Arc<SlotPool>,
}

/// The slots of a model, and of those that were made out of it for the same device with the same slots.
#[derive(Debug)]
pub(super) struct SlotPool {
    pub(super) shape: Slots,
    /// The slots, while no [`Streamer`](crate::Streamer) has them.
    slots: Mutex<Option<Vec<SlotMemory>>>,
    /// Memory that work uses whose end could not be marked, each with the stream that it was queued on.
    withdrawn: Mutex<Vec<Withdrawn>>,
    /// Whether a slot is among it.
    incomplete: AtomicBool,
}

/// Memory, and the stream whose work uses it.
type Withdrawn = (Arc<dyn Stream>, Vec<Buf>);

/// A part of a model's memory that goes as a whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Tells it from every other part that exists.
    pub(crate) id: usize,
    pub(crate) device: DeviceId,
    pub(crate) bytes: u64,
    /// How many models hold it.
    pub(crate) holders: usize,
}

impl Residency {
    /// The compute device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Takes the slots, for one streamer at a time.
    pub(crate) fn take_slots(&self) -> Option<Vec<SlotMemory>> {
        self.slots.idle().take()
    }

    /// Gives the slots back.
    pub(crate) fn return_slots(&self, slots: Vec<SlotMemory>) {
        *self.slots.idle() = Some(slots);
    }

    /// Keeps memory that work on `stream` may use for as long as nobody knows, `slot` and `resident` modules: held here, a
    /// slot has another owner and is never filled again. When the last model that has the slots is dropped, the end of
    /// the work is marked once more.
    pub(crate) fn withdraw(&self, stream: Arc<dyn Stream>, slot: SlotMemory, resident: Vec<Buf>) {
        self.slots.incomplete.fetch_or(!slot.is_empty(), Ordering::Relaxed);
        let uses = slot.into_iter().chain(resident).collect();
        self.slots.withdrawn.lock().unwrap_or_else(PoisonError::into_inner).push((stream, uses));
    }
}

impl SlotPool {
    pub(super) fn new(shape: Slots, slots: Vec<SlotMemory>) -> SlotPool {
        let incomplete = AtomicBool::new(false);
        SlotPool { shape, slots: Mutex::new(Some(slots)), withdrawn: Mutex::default(), incomplete }
    }

    /// The slots that no streamer has.
    pub(super) fn idle(&self) -> MutexGuard<'_, Option<Vec<SlotMemory>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether none was withdrawn.
    pub(super) fn is_whole(&self) -> bool {
        !self.incomplete.load(Ordering::Relaxed)
    }
}

impl Drop for SlotPool {
    fn drop(&mut self) {
        for (stream, uses) in self.withdrawn.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if let Err(error) = stream.record(&uses) {
                tracing::error!(%error, "memory is never freed: the end of its last use could not be marked");
                uses.iter().for_each(|buf| buf.block().abandon());
            }
        }
    }
}

impl Part {
    pub(super) fn of_home(home: &Arc<Home>) -> Part {
        let (id, holders) = (Arc::as_ptr(home).addr(), Arc::strong_count(home));
        Part { id, device: home.buf.device(), bytes: home.buf.bytes() as u64, holders }
    }

    pub(super) fn of_slots(residency: &Residency) -> Part {
        let pool = &residency.slots;
        let (id, holders) = (Arc::as_ptr(pool).addr(), Arc::strong_count(pool));
        Part { id, device: residency.device.id(), bytes: pool.shape.bytes(), holders }
    }
}
