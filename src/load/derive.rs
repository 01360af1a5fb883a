//! Models made out of models: another generation of the weights, another place for them, or both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::made::Made;
use super::model::Parts;
use super::reuse::Reuse;
use super::store::SlotPool;
use super::worker::Inputs;
use super::{Loader, Model};
use crate::adapter::Weights;
use crate::backend::{Device, MemoryKind};
use crate::checkpoint::TensorId;
use crate::error::{Error, Mismatch, Result};
use crate::plan::{Plan, Slots};

impl Loader<'_> {
    /// Makes a model as [`load`](Loader::load) does, with what `base` has of it already: for a changed strength, an
    /// adapter less or more, another plan, another compute device.
    ///
    /// A module whose bytes would be the same is shared where its device and kind of memory are the same, and copied
    /// from the base's memory where they are not. Small streamed modules of one layer and device are shared together or
    /// copied, since they have their memory together. So are single tensors of a module that changes. Only the rest is read
    /// from the files, and patched from what they hold, never from patched bytes. Whether bytes would be the same
    /// follows from the files' stamps and the adapters, not from the bytes. What a lost device holds is read anew.
    ///
    /// Only what is new is reserved. The slots are shared where compute device, number and size are the same; then one
    /// streamer at a time can be had of all the models that share them. The base stays what it is, whatever happens
    /// here, and keeps its bytes for as long as anyone holds it. Without a base this is [`load`](Loader::load).
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
    /// As [`load`](Loader::load); [`Error::Mismatch`] too when the base is on devices of another registry. Whatever the
    /// error, all memory is given back first, and the base is as it was.
    pub fn derive<'b>(&self, base: impl Into<Option<&'b Arc<Model>>>, weights: &Weights, plan: &Plan) -> Result<Model> {
        let Some(base) = base.into() else { return self.load(weights, plan) };
        let layout = weights.layout();
        plan.verify(layout)?;
        self.check_base(base)?;
        let made = Made::of(weights);
        let same = |tensor: TensorId, old: TensorId| base.made().get(old) == Some(&made[tensor]);
        let reuse = Reuse::of(base, layout, plan, same);
        let inputs = Inputs { weights: Some(weights), layout, plan, base: Some(base), reuse: &reuse };
        self.place(inputs, made)
    }

    /// Makes a model of the same bytes as `base` with another plan, from its memory alone. As
    /// [`derive`](Loader::derive), without files.
    ///
    /// # Errors
    /// As [`derive`](Loader::derive); [`Error::DeviceLost`] when a lost device holds what is needed.
    pub fn relocate(&self, base: &Arc<Model>, plan: &Plan) -> Result<Model> {
        plan.verify(base.layout())?;
        self.check_base(base)?;
        let reuse = Reuse::of(base, base.layout(), plan, |tensor, old| tensor == old);
        if let Some(lost) = base.lost().filter(|_| !reuse.is_complete(base.layout())) {
            return Err(lost);
        }
        let inputs = Inputs { weights: None, layout: base.layout(), plan, base: Some(base), reuse: &reuse };
        self.place(inputs, base.made().clone())
    }

    /// The first half of a demotion: all that `base` has on its compute device is on the host, too, in a model that can
    /// be used as `parked` says. The slots that `plan` wants are not taken yet, since there may be no room for them while
    /// the base lives.
    pub(crate) fn move_away(&self, base: &Model, plan: Plan, parked: &Plan) -> Result<Moved> {
        let start = Instant::now();
        let reuse = Reuse::of(base, base.layout(), &plan, |tensor, old| tensor == old);
        let inputs = Inputs { weights: None, layout: base.layout(), plan: &plan, base: Some(base), reuse: &reuse };
        let (homes, reservation, report) = self.fill(inputs, &reuse.needed(&plan), start)?;
        let (layout, made, from) = (Arc::new(base.layout().clone()), base.made().clone(), reuse.from(base));
        let slots = Some(Arc::new(SlotPool::new(parked.slots(), Vec::new())));
        let parts = Parts { layout, plan: parked, groups: reuse.groups, homes, made, slots, from };
        let model = Model::assemble(parts, reservation, self.registry)?.with_report(report);
        Ok(Moved { model: Arc::new(model), plan, slots: reuse.slots })
    }

    /// Memory of devices that another registry opened is counted elsewhere.
    fn check_base(&self, base: &Model) -> Result<()> {
        for device in base.devices() {
            if !Arc::ptr_eq(device, &self.registry.device(device.id())?) {
                return Err(Mismatch::Registry { device: device.id() }.into());
            }
        }
        Ok(())
    }
}

/// A model whose weights have left its compute device: it has all of them on the host, and no slots yet.
pub(crate) struct Moved {
    model: Arc<Model>,
    /// How it is streamed once there are slots.
    plan: Plan,
    /// Those of the base, where they do for that.
    slots: Option<Arc<SlotPool>>,
}

impl Moved {
    /// The second half of a demotion: takes the place of the base, which nobody else may hold. That one is let go for the
    /// slots; if they cannot be had then, the model waits on the host. Whatever happens, even a panic, all weights are in
    /// the place.
    pub(crate) fn take_place(self, place: &mut Arc<Model>) {
        let Moved { model, plan, slots } = self;
        let base = std::mem::replace(place, model);
        let device = Arc::clone(base.residency().device());
        let beside = slots.map_or_else(|| slots_on(&*device, plan.slots()), Ok);
        let slots = beside.or_else(|_| {
            drop(base);
            slots_when_free(&*device, plan.slots(), place.limits().release)
        });
        match (slots, Arc::get_mut(place)) {
            (Ok(slots), Some(model)) => model.give_slots(plan, slots),
            (Ok(_), None) => tracing::warn!("a demoted model is used already; it waits on the host"),
            (Err(error), _) => tracing::warn!(%error, "no room for the slots of a demoted model; it waits on the host"),
        }
    }
}

/// Slots in memory that nobody reserved before.
fn slots_on(device: &dyn Device, shape: Slots) -> Result<Arc<SlotPool>> {
    let (requested, available) = (shape.bytes(), device.memory()?.available());
    if requested > available {
        return Err(Error::OutOfMemory { device: device.id(), requested, available, limit: device.ledger().limit() });
    }
    let mut charge = device.ledger().charge(requested)?;
    let mut slot = |bytes| device.back(charge.split(bytes)?, MemoryKind::Arena, None).map(|slot| vec![slot.freeze()]);
    let slots = shape.sizes().map(&mut slot).collect::<Result<_>>()?;
    Ok(Arc::new(SlotPool::new(shape, slots)))
}

/// The same once memory that was just given up is back.
fn slots_when_free(device: &dyn Device, shape: Slots, deadline: Duration) -> Result<Arc<SlotPool>> {
    let until = Instant::now() + deadline;
    loop {
        match slots_on(device, shape) {
            Err(Error::OutOfMemory { .. }) if Instant::now() < until => {
                // What the allocator keeps for reuse may be what is missing.
                device.trim()?;
                std::thread::sleep(Duration::from_millis(1));
            }
            outcome => return outcome,
        }
    }
}
