//! The memory of models: homes of modules, and slots. Models derived from each other share what is equal.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::compressed::CompressedForm;
use crate::backend::{Buf, Device, MemoryKind, Stream};
use crate::device::DeviceId;
use crate::plan::Slots;
use crate::schedule::SlotBlocks;

/// The memory where a group of modules lives: one buffer, or one for each tensor.
#[derive(Debug)]
pub(super) struct Home {
    /// At least one. Ranges of the home count through all of them.
    bufs: Vec<Buf>,
    pub(super) kind: MemoryKind,
    /// Whether each tensor has a buffer by itself.
    pub(super) apart: bool,
    /// Whether the bytes stay in the model's own files.
    pub(super) in_files: bool,
    /// The compressed form, if that is what there is: the buffers then give the weights, and take no memory.
    pub(super) compressed: Option<CompressedForm>,
}

/// The modules that live on devices other than the compute device. Read-only, and shared by all models that stream them.
#[derive(Debug)]
pub struct WeightStore {
    /// The memory of each group of modules; `None` if it is resident or another module owns its storage.
    pub(super) homes: Vec<Option<Arc<Home>>>,
}

/// The memory of one slot: for each block the parts into which it was last split. No part for a block that the slot lacks.
pub(crate) type SlotMemory = Vec<Vec<Buf>>;

/// What streamed layers take on the compute device: slots, and landing buffers for what is unpacked into them.
#[derive(Debug, Default)]
pub(crate) struct FetchMemory {
    pub(crate) slots: Vec<SlotMemory>,
    pub(crate) landings: Vec<Buf>,
}

/// A model's memory on its compute device: resident modules, and the slots for streamed layers.
#[derive(Debug)]
pub struct Residency {
    pub(super) device: Arc<dyn Device>,
    pub(super) homes: Vec<Option<Arc<Home>>>,
    pub(super) slots: Arc<SlotPool>,
}

/// The slots of a model, shared with the models derived from it that have the same device and equal slots.
#[derive(Debug)]
pub(super) struct SlotPool {
    pub(super) shape: Slots,
    /// How the slots are divided.
    pub(super) blocks: SlotBlocks,
    /// The slots and landing buffers; `None` while a [`Streamer`](crate::Streamer) has them.
    memory: Mutex<Option<FetchMemory>>,
    /// Memory in use by work whose end could not be recorded, with the stream of that work.
    withdrawn: Mutex<Vec<Withdrawn>>,
    /// Whether a slot was withdrawn, or a landing buffer lost.
    incomplete: AtomicBool,
}

/// Memory, and the stream whose work uses it.
type Withdrawn = (Arc<dyn Stream>, Vec<Buf>);

/// A part of a model's memory that is freed as a whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Unique among all parts that exist.
    pub(crate) id: usize,
    pub(crate) device: DeviceId,
    pub(crate) bytes: u64,
    /// The number of models that hold it.
    pub(crate) holders: usize,
}

impl Home {
    /// A home in these buffers, at least one.
    pub(super) fn new(bufs: Vec<Buf>, kind: MemoryKind, apart: bool) -> Home {
        Home { bufs, kind, apart, in_files: false, compressed: None }
    }

    /// As [`new`](Home::new), for bytes that stay in the model's own files.
    pub(super) fn in_files(bufs: Vec<Buf>, kind: MemoryKind, apart: bool) -> Home {
        Home { bufs, kind, apart, in_files: true, compressed: None }
    }

    /// A home in compressed form, whose weights are read from `values`.
    pub(super) fn compressed(values: Buf, kind: MemoryKind, in_files: bool, form: CompressedForm) -> Home {
        Home { bufs: vec![values], kind, apart: false, in_files, compressed: Some(form) }
    }

    pub(super) fn bufs(&self) -> &[Buf] {
        &self.bufs
    }

    pub(super) fn into_bufs(self) -> Vec<Buf> {
        self.bufs
    }

    pub(super) fn device(&self) -> DeviceId {
        self.compressed.as_ref().map_or_else(|| self.bufs[0].device(), |form| form.buf.device())
    }

    /// The bytes of memory that it takes.
    pub(super) fn taken(&self) -> u64 {
        match &self.compressed {
            // What stays in files takes nothing.
            _ if self.in_files => 0,
            Some(form) => form.buf.bytes() as u64,
            None => self.bytes(),
        }
    }

    /// All its buffers.
    pub(super) fn all_bufs(&self) -> impl Iterator<Item = &Buf> {
        self.bufs.iter().chain(self.compressed.iter().map(|form| &form.buf))
    }

    /// As [`find`](Home::find), for a range of what lanes copy: the compressed form, if there is one.
    pub(super) fn find_stored(&self, range: &Range<usize>) -> Option<(&Buf, Range<usize>)> {
        match &self.compressed {
            Some(form) => (range.end <= form.buf.bytes()).then(|| (&form.buf, range.clone())),
            None => self.find(range),
        }
    }

    /// The bytes of its weights.
    pub(super) fn bytes(&self) -> u64 {
        self.bufs.iter().map(|buf| buf.bytes() as u64).sum()
    }

    /// The buffer that a range of the home lies in, and the range there. `None` if it lies in no single one.
    pub(super) fn find(&self, range: &Range<usize>) -> Option<(&Buf, Range<usize>)> {
        let mut within = self.within(range);
        within.find(|(_, found)| found.len() == range.len())
    }

    /// The buffers that a range of the home lies in, with the ranges there.
    pub(super) fn within<'a>(
        &'a self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (&'a Buf, Range<usize>)> + use<'a> {
        let (begin, end, mut start) = (range.start, range.end, 0);
        self.bufs.iter().filter_map(move |buf| {
            let first = start;
            start += buf.bytes();
            let (from, to) = (begin.max(first), end.min(start));
            (from <= to).then(|| (buf, from - first..to - first))
        })
    }
}

impl Residency {
    /// The compute device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Takes the slots and landing buffers, for one streamer at a time.
    pub(crate) fn take_slots(&self) -> Option<FetchMemory> {
        self.slots.idle().take()
    }

    /// Returns them.
    pub(crate) fn return_slots(&self, memory: FetchMemory) {
        // What a lane did not let go of is missing.
        let lost = memory.landings.len() < self.slots.shape.landings;
        self.slots.incomplete.fetch_or(lost, Ordering::Relaxed);
        *self.slots.idle() = Some(memory);
    }

    /// Keeps the memory of a `slot` and of `resident` modules that work on `stream` may use for an unknown time. The slot is
    /// never filled again, because it has another owner here. When the last model with these slots is dropped, the end of
    /// the work is recorded once more.
    pub(crate) fn withdraw(&self, stream: Arc<dyn Stream>, slot: Vec<Buf>, resident: Vec<Buf>) {
        self.slots.incomplete.fetch_or(!slot.is_empty(), Ordering::Relaxed);
        let uses = slot.into_iter().chain(resident).collect();
        self.slots.withdrawn.lock().unwrap_or_else(PoisonError::into_inner).push((stream, uses));
    }
}

impl SlotPool {
    pub(super) fn new(shape: Slots, blocks: SlotBlocks, memory: FetchMemory) -> SlotPool {
        let incomplete = AtomicBool::new(false);
        SlotPool { shape, blocks, memory: Mutex::new(Some(memory)), withdrawn: Mutex::default(), incomplete }
    }

    /// The slots and landing buffers; `None` while a streamer has them.
    pub(super) fn idle(&self) -> MutexGuard<'_, Option<FetchMemory>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no slot was withdrawn, and no landing buffer lost.
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
        Part { id, device: home.device(), bytes: home.taken(), holders }
    }

    pub(super) fn of_slots(residency: &Residency) -> Part {
        let pool = &residency.slots;
        let (id, holders) = (Arc::as_ptr(pool).addr(), Arc::strong_count(pool));
        Part { id, device: residency.device.id(), bytes: pool.shape.bytes(), holders }
    }
}
