//! Models made out of models: another generation of the weights, another place for them, or both.

use std::sync::Arc;
use std::time::Instant;

use super::made::Made;
use super::model::Parts;
use super::reuse::Reuse;
use super::worker::{Inputs, Job};
use super::{Loader, Model, Reservation, check_tensors};
use crate::adapter::Patches;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::plan::Plan;

impl Loader<'_> {
    /// Makes a model as [`load`](Loader::load) does, with what `base` has of it already: for a changed strength, an
    /// adapter less or more, another plan, another compute device.
    ///
    /// A module whose bytes would be the same is shared where its device and kind of memory are the same, and copied
    /// from the base's memory where they are not. So are single tensors of a module that changes. Only the rest is read
    /// from the files, and patched from what they hold, never from patched bytes. Whether bytes would be the same
    /// follows from the files' stamps and the adapters, not from the bytes. What a lost device holds is read anew.
    ///
    /// Only what is new is reserved. The slots are shared where compute device, number and size are the same; then one
    /// streamer at a time can be had of all the models that share them. The base stays what it is, whatever happens
    /// here, and keeps its bytes for as long as anyone holds it.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tensor_offload::{Adapter, Checkpoint, Loader, Matching, Patches, Planner, Registry};
    /// # let (path, lora) = ("examples/data/tiny-llama", "examples/data/tiny-llama-lora");
    /// let devices = Registry::system();
    /// let checkpoint = Checkpoint::open(path)?;
    /// let at = |strength| Patches::resolve(checkpoint.layout(), vec![Adapter::open(lora, strength)?], Matching::Strict);
    /// let (weak, strong) = (at(0.5)?, at(1.0)?);
    /// let plan = Planner::new(weak.layout(), devices.machine()).compute("cpu".parse()?).plan()?;
    /// let loader = Loader::new(&devices);
    /// let first = Arc::new(loader.load(&checkpoint, &weak, &plan)?);
    /// let second = loader.derive(&first, &checkpoint, &strong, &plan)?;
    /// let report = second.report();
    /// assert!(report.read < plan.bytes() && report.read + report.shared + report.copied == plan.bytes());
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`load`](Loader::load); [`Error::Invalid`] too when the base is on devices of another registry. Whatever the
    /// error, all memory is given back first, and the base is as it was.
    pub fn derive(&self, base: &Arc<Model>, checkpoint: &Checkpoint, patches: &Patches, plan: &Plan) -> Result<Model> {
        plan.verify(patches.layout())?;
        check_tensors(checkpoint, patches)?;
        self.check_base(base)?;
        let made = Made::of(checkpoint, patches);
        let same = |tensor: usize, old: usize| base.made().get(old) == Some(&made[tensor]);
        let reuse = Reuse::of(base, patches.layout(), plan, same);
        let inputs = Inputs { checkpoint: Some(checkpoint), patches, plan, base: Some(base), reuse: &reuse };
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
        let patches = Patches::none(base.layout());
        let inputs = Inputs { checkpoint: None, patches: &patches, plan, base: Some(base), reuse: &reuse };
        self.place(inputs, base.made().to_vec())
    }

    /// Reserves, fills and puts together.
    pub(super) fn place(&self, inputs: Inputs<'_>, made: Vec<Made>) -> Result<Model> {
        let start = Instant::now();
        let Inputs { patches, plan, reuse, .. } = inputs;
        let mut needed = reuse.needed(plan);
        if reuse.slots.is_none() {
            let slots = needed.entry(plan.compute()).or_default();
            *slots = slots.saturating_add(plan.slots().bytes());
        }
        let mut reservation = Reservation::of(self.registry, plan, &needed)?;
        let job = Job::new(self, inputs, &reservation)?;
        let homes = job.run(self.workers, &mut reservation)?;
        let layout = Arc::new(patches.layout().clone());
        let parts = Parts { layout, plan, homes, made, slots: reuse.slots.clone() };
        let model = Model::assemble(parts, reservation, self.registry)?;
        Ok(model.with_report(job.report(start.elapsed())))
    }

    /// Memory of devices that another registry opened is counted elsewhere.
    fn check_base(&self, base: &Model) -> Result<()> {
        for device in base.devices() {
            if !Arc::ptr_eq(device, &self.registry.device(device.id())?) {
                let id = device.id();
                return Err(Error::invalid(format!("the model to derive from is on {id} of another registry")));
            }
        }
        Ok(())
    }
}
