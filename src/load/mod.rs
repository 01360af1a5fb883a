//! Load, patch, distribute: from files to where the plan wants every module.
//!
//! A module that lives on the host is read straight into the memory it stays in and patched there. One that
//! lives elsewhere is read piece by piece through a few staging buffers, or, when an adapter changes
//! it, patched in a worker's own buffer first; then it is copied to its device while the next one is read.

mod derive;
mod made;
mod model;
mod on_device;
mod probe;
mod progress;
mod reservation;
mod reuse;
mod store;
mod worker;

use std::time::Duration;

pub use model::{LoadReport, Model, TensorView};
pub use progress::{Cancel, Progress};
pub use reservation::Reservation;
pub(crate) use store::Part;
pub use store::{Residency, WeightStore};

use made::Made;
use reuse::Reuse;
use worker::Inputs;

use crate::adapter::Patches;
use crate::checkpoint::{Checkpoint, TensorId, TensorInfo};
use crate::error::{Mismatch, Result, TensorShape};
use crate::limits::LONGEST;
use crate::plan::Plan;
use crate::registry::Registry;

/// Brings checkpoints to where plans want them.
///
/// ```
/// use tensor_offload::{Checkpoint, Loader, Patches, Planner, Registry};
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
/// let devices = Registry::system();
/// let checkpoint = Checkpoint::open(path)?;
/// let patches = Patches::none(checkpoint.layout());
/// let plan = Planner::new(patches.layout(), devices.machine()).compute("cpu".parse()?).plan()?;
/// let model = Loader::new(&devices).load(&checkpoint, &patches, &plan)?;
/// assert_eq!(model.report().bytes, patches.layout().bytes());
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Debug)]
pub struct Loader<'a> {
    registry: &'a Registry,
    workers: usize,
    deadline: Duration,
    progress: Option<&'a dyn Progress>,
    cancel: Cancel,
}

impl<'a> Loader<'a> {
    /// A loader with a worker per core (8 at most) that waits for a copy as long as the [limits](Registry::limits) say.
    pub fn new(registry: &'a Registry) -> Loader<'a> {
        let workers = std::thread::available_parallelism().map_or(2, |cores| cores.get().min(8));
        Loader { registry, workers, deadline: registry.limits().work, progress: None, cancel: Cancel::new() }
    }

    /// Sets how many threads read and patch, at least one.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Loader<'a> {
        self.workers = workers.max(1);
        self
    }

    /// Sets how long one copy may take before the load gives up; a century at most.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Loader<'a> {
        self.deadline = deadline.min(LONGEST);
        self
    }

    /// Tells `progress` how many bytes are in place.
    #[must_use]
    pub fn progress(mut self, progress: &'a dyn Progress) -> Loader<'a> {
        self.progress = Some(progress);
        self
    }

    /// Stops when `cancel` is set.
    #[must_use]
    pub fn cancel(mut self, cancel: &Cancel) -> Loader<'a> {
        self.cancel = cancel.clone();
        self
    }

    /// Reads `checkpoint`, applies `patches`, and places every module as `plan` says.
    ///
    /// All memory is reserved before the first byte is read. The bytes are the same whatever the plan.
    ///
    /// # Errors
    /// What reading, patching and allocating meet; [`Plan`](crate::Error::Plan) or
    /// [`Mismatch`](crate::Error::Mismatch) when the plan or the patches are of another model;
    /// [`Cancelled`](crate::Error::Cancelled), even if all bytes are read by then.
    /// Whatever the error, all memory is given back first.
    pub fn load(&self, checkpoint: &Checkpoint, patches: &Patches, plan: &Plan) -> Result<Model> {
        plan.verify(patches.layout())?;
        check_tensors(checkpoint, patches)?;
        let (made, reuse) = (Made::of(checkpoint, patches), Reuse::nothing(patches.layout(), plan));
        let inputs = Inputs { checkpoint: Some(checkpoint), patches, plan, base: None, reuse: &reuse };
        self.place(inputs, made)
    }
}

/// Patches and plans know tensors by their places: those of another checkpoint, even one of the same names in another
/// order, would give each tensor the bytes of another.
///
/// # Errors
/// [`Mismatch`] naming the first tensor that differs.
fn check_tensors(checkpoint: &Checkpoint, patches: &Patches) -> Result<()> {
    let (stored, patched) = (checkpoint.layout().tensors(), patches.layout().tensors());
    if stored.len() != patched.len() {
        let file = checkpoint.path().to_owned();
        return Err(Mismatch::Checkpoint { patched: patched.len(), stored: stored.len(), file }.into());
    }
    let same = |(id, (stored, patched)): &(TensorId, (&TensorInfo, &TensorInfo))| {
        let sized = stored.bytes == patched.bytes || patches.tensor(*id).is_some();
        stored.name == patched.name && stored.dtype == patched.dtype && sized
    };
    match checkpoint.layout().tensor_ids().zip(stored.iter().zip(patched)).find(|pair| !same(pair)) {
        None => Ok(()),
        Some((id, (stored, patched))) => {
            let known = |t: &TensorInfo| TensorShape { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone() };
            let (patched, stored, file) = (known(patched), known(stored), checkpoint.path().to_owned());
            Err(Mismatch::Tensor { index: id.index(), patched, stored, file }.into())
        }
    }
}
