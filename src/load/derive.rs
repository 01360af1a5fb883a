//! Models derived from models: other weights, another placement, or both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::allocator::Allocators;
use super::deferred::scales_of;
use super::model::{Parts, fetch_memory};
use super::provenance::Provenance;
use super::reuse::Reuse;
use super::store::{FetchMemory, SlotPool};
use super::worker::Inputs;
use super::{Filled, Loader, Model};
use crate::adapter::Weights;
use crate::backend::{Device, MemoryKind};
use crate::checkpoint::TensorId;
use crate::error::{Error, Mismatch, Result};
use crate::plan::{Plan, Slots};
use crate::schedule::SlotBlocks;

impl Loader<'_> {
    /// Makes a model as [`load`](Loader::load) does, reusing the bytes that `base` has in memory: for a changed strength,
    /// another set of adapters, another plan, another compute device.
    ///
    /// A module with unchanged bytes is shared if its device and kind of memory stay the same, and copied from the base's
    /// memory otherwise. Small streamed modules of one layer and device lie in one buffer, so they are shared or copied
    /// together. The unchanged tensors of a module that changes are copied. Only the rest is read from the files, and patched
    /// from the files' bytes, never from patched bytes. The files' stamps and the adapters decide whether bytes are
    /// unchanged; the bytes are not compared. What a lost device holds is read from the files again.
    ///
    /// Memory that an [allocator](Loader::allocator) made is shared only by a loader with the same one, and copied otherwise.
    ///
    /// Only new memory is reserved. The slots are shared if the compute device, their number and their size are the same; the
    /// models that share them can have one streamer at a time between them. The base never changes, and keeps its bytes
    /// for as long as anyone holds it. Without a base this is [`load`](Loader::load).
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tensor_offload::{Adapter, Checkpoint, Loader, Matching, Planner, Registry, Weights};
    /// # let (path, lora) = ("examples/data/tiny-llama", "examples/data/tiny-llama-lora");
    /// let devices = Registry::system();
    /// let checkpoint = Checkpoint::open(path)?;
    /// let at = |strength| Weights::patched(checkpoint.clone(), vec![Adapter::open(lora, strength)?], Matching::Strict);
    /// let (weak, strong) = (at(0.5)?, at(1.0)?);
    /// let plan = Planner::new(weak.layout(), devices.machine()).compute("cpu".parse()?).plan()?;
    /// let loader = Loader::new(&devices);
    /// let first = Arc::new(loader.load(&weak, &plan)?);
    /// let second = loader.derive(&first, &strong, &plan)?;
    /// let report = second.report();
    /// assert!(report.read < plan.bytes() && report.read + report.shared + report.copied == plan.bytes());
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`load`](Loader::load); also [`Error::Mismatch`] when the base is on devices of another registry. All new memory is
    /// released before an error is returned, and the base is unchanged.
    pub fn derive<'b>(&self, base: impl Into<Option<&'b Arc<Model>>>, weights: &Weights, plan: &Plan) -> Result<Model> {
        let Some(base) = base.into() else { return self.load(weights, plan) };
        let (layout, plan) = (weights.layout(), &*plan.checked(weights.layout())?);
        weights.patches().check_targets()?;
        self.check_base(base)?;
        let provenance = Provenance::of(weights);
        let same = |tensor: TensorId, old: TensorId| base.provenance().get(old) == Some(&provenance[tensor]);
        let layout = &layout.with_stored(base.codes_for(layout, same));
        let plan = &*plan.with_codes_of(layout);
        let reuse = self.leaving(Reuse::of(base, layout, plan, &self.allocators, same), layout, plan)?;
        let inputs = Inputs { weights: Some(weights), layout, plan, base: Some(base), reuse: &reuse };
        self.place(inputs, provenance, scales_of(weights))
    }

    /// As [`derive`](Loader::derive), for a base that is not needed any more: what changes is written over it, where its size,
    /// device and kind of memory stay the same. So no more memory is taken for it, and its address stays: a framework's
    /// tensor that is a view of a resident weight then shows the new one.
    ///
    /// Memory that another model shares is not written over, nor is any if someone else holds the base (a
    /// [`Streamer`](crate::Streamer) does): that is new memory, as it is for [`derive`](Loader::derive). So is that of changed modules
    /// that are kept [compressed](crate::Planner::compress), whose codes have other lengths.
    ///
    /// # Errors
    /// As [`derive`](Loader::derive). The base is gone then, and all its memory that no other model shares is released.
    pub fn refill(&self, base: Arc<Model>, weights: &Weights, plan: &Plan) -> Result<Model> {
        let mut base = match Arc::try_unwrap(base) {
            Ok(base) => base,
            Err(shared) => return self.derive(&shared, weights, plan),
        };
        let (layout, plan) = (weights.layout(), &*plan.checked(weights.layout())?);
        weights.patches().check_targets()?;
        self.check_base(&base)?;
        let provenance = Provenance::of(weights);
        let same = |tensor: TensorId, old: TensorId| base.provenance().get(old) == Some(&provenance[tensor]);
        let layout = &layout.with_stored(base.codes_for(layout, same));
        let plan = &*plan.with_codes_of(layout);
        let mut reuse = self.leaving(Reuse::of(&base, layout, plan, &self.allocators, same), layout, plan)?;
        reuse.refill(&mut base, layout, plan, &self.allocators);
        let inputs = Inputs { weights: Some(weights), layout, plan, base: Some(&base), reuse: &reuse };
        self.place(inputs, provenance, scales_of(weights))
    }

    /// Makes a model with the bytes of `base` and another plan, from the base's memory alone. As
    /// [`derive`](Loader::derive), without files.
    ///
    /// # Errors
    /// As [`derive`](Loader::derive); [`Error::DeviceLost`] when a lost device holds what is needed.
    pub fn relocate(&self, base: &Arc<Model>, plan: &Plan) -> Result<Model> {
        let plan = &*plan.checked(base.layout())?;
        self.check_base(base)?;
        let reuse = Reuse::of(base, base.layout(), plan, &self.allocators, |tensor, old| tensor == old);
        if let Some(lost) = base.lost().filter(|_| !reuse.is_complete(base.layout())) {
            return Err(lost);
        }
        let inputs = Inputs { weights: None, layout: base.layout(), plan, base: Some(base), reuse: &reuse };
        self.place(inputs, base.provenance().clone(), base.scales().clone())
    }

    /// The first half of a demotion: copies all that `base` has on its compute device to the host, into a model that can
    /// be used as `parked` says. The slots of `plan` are not allocated yet, since there may be no room for them while
    /// the base lives.
    pub(crate) fn prepare_demotion(&self, base: &Model, plan: Plan, parked: &Plan) -> Result<PreparedDemotion> {
        let start = Instant::now();
        let reuse = Reuse::of(base, base.layout(), &plan, base.allocators(), |tensor, old| tensor == old);
        let inputs = Inputs { weights: None, layout: base.layout(), plan: &plan, base: Some(base), reuse: &reuse };
        let loader = self.with_allocators(base.allocators());
        // What is compressed stays so, here or on the host, and no code is made.
        let Filled { homes, reservation, report, .. } = loader.fill(inputs, &reuse.needed(&plan), start)?;
        let (layout, provenance, from) = (Arc::new(base.layout().clone()), base.provenance().clone(), reuse.from(base));
        let blocks = parked.slot_blocks(base.layout());
        let slots = Some(Arc::new(SlotPool::new(parked.slots(), blocks, FetchMemory::default())));
        let (scales, groups) = (base.scales().clone(), reuse.groups);
        let parts = Parts { layout, plan: parked, groups, homes, provenance, scales, slots, from };
        let model = Model::assemble(parts, reservation, self.registry)?.with_report(report);
        Ok(PreparedDemotion { model: Arc::new(model), plan, slots: reuse.slots })
    }

    /// The base must be on devices of this registry: the memory of other devices is counted by another ledger.
    fn check_base(&self, base: &Model) -> Result<()> {
        for device in base.devices() {
            if !Arc::ptr_eq(device, &self.registry.device(device.id())?) {
                return Err(Mismatch::Registry { device: device.id() }.into());
            }
        }
        Ok(())
    }
}

/// A demotion half done: a model with all of its weights on the host, and no slots yet.
pub(crate) struct PreparedDemotion {
    model: Arc<Model>,
    /// The plan to stream by once there are slots.
    plan: Plan,
    /// The base's slots, if the plan can use them.
    slots: Option<Arc<SlotPool>>,
}

impl PreparedDemotion {
    /// The second half of a demotion: replaces the base, which nobody else may hold. If there is no room for the slots, the
    /// base is dropped first; if there is none even then, the model stays on the host without slots. In every case, even
    /// after a panic, `entry` holds all weights.
    pub(crate) fn replace(self, entry: &mut Arc<Model>) {
        let PreparedDemotion { model, plan, slots } = self;
        let base = std::mem::replace(entry, model);
        let device = Arc::clone(base.residency().device());
        let wanted = Wanted {
            device: &device,
            allocators: entry.allocators().clone(),
            blocks: plan.slot_blocks(entry.layout()),
        };
        let slots = slots.map_or_else(|| wanted.slots(plan.slots()), Ok);
        let slots = slots.or_else(|_| {
            drop(base);
            wanted.slots_when_free(plan.slots(), entry.limits().release)
        });
        match (slots, Arc::get_mut(entry)) {
            (Ok(slots), Some(model)) => model.set_slots(plan, slots),
            (Ok(_), None) => tracing::warn!("a demoted model is used already; it waits on the host"),
            (Err(error), _) => tracing::warn!(%error, "no room for the slots of a demoted model; it waits on the host"),
        }
    }
}

/// Slots to allocate outside a reservation.
struct Wanted<'a> {
    device: &'a Arc<dyn Device>,
    allocators: Allocators,
    blocks: SlotBlocks,
}

impl Wanted<'_> {
    fn slots(&self, shape: Slots) -> Result<Arc<SlotPool>> {
        let device = self.device;
        let (requested, available) = (shape.bytes(), device.memory()?.available());
        if requested > available {
            return Err(Error::OutOfMemory {
                device: device.id(),
                requested,
                available,
                limit: device.ledger().limit(),
            });
        }
        let mut charge = device.ledger().charge(requested)?;
        let alloc =
            |dtype, bytes| self.allocators.alloc(device, charge.split(bytes)?, (dtype, None), MemoryKind::Arena, None);
        let memory = fetch_memory(shape, &self.blocks, alloc)?;
        Ok(Arc::new(SlotPool::new(shape, self.blocks.clone(), memory)))
    }

    /// As [`slots`](Wanted::slots), waiting for memory that was just released.
    fn slots_when_free(&self, shape: Slots, deadline: Duration) -> Result<Arc<SlotPool>> {
        let until = Instant::now() + deadline;
        loop {
            match self.slots(shape) {
                Err(Error::OutOfMemory { .. }) if Instant::now() < until => {
                    // The missing memory may be in the allocator's cache.
                    self.device.trim()?;
                    std::thread::sleep(Duration::from_millis(1));
                }
                outcome => return outcome,
            }
        }
    }
}
