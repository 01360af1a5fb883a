//! Load, patch, distribute: from files to where the plan wants every module.
//!
//! A module that lives on the host is read straight into the memory it stays in and patched there. One that
//! lives elsewhere is read piece by piece through a few staging buffers, or, when an adapter changes
//! it, patched in a worker's own buffer first; then it is copied to its device while the next one is read.

mod builder;
mod derive;
mod index;
mod made;
mod model;
mod on_device;
mod probe;
mod progress;
mod read_back;
mod report;
mod reuse;
mod rows;
mod store;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use builder::ModelBuilder;
pub use model::Model;
pub use progress::{Cancel, Progress};
pub use read_back::TensorView;
pub use report::LoadReport;
pub(crate) use store::Part;
pub use store::{Residency, WeightStore};

use made::Made;
use model::Parts;
use reuse::Reuse;
use store::Home;
use worker::{Inputs, Job};

use crate::adapter::Weights;
use crate::backend::{BufMut, Charge, Device, MemoryKind};
use crate::checkpoint::{Per, TensorId};
use crate::device::DeviceId;
use crate::error::{Error, Missing, Result};
use crate::limits::LONGEST;
use crate::plan::Plan;
use crate::registry::Registry;

/// Loads weights to where a plan wants them.
///
/// ```
/// use tensor_offload::{Checkpoint, Loader, Planner, Registry, Weights};
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
/// let devices = Registry::system();
/// let weights = Weights::new(Checkpoint::open(path)?);
/// let plan = Planner::new(weights.layout(), devices.machine()).compute("cpu".parse()?).plan()?;
/// let model = Loader::new(&devices).load(&weights, &plan)?;
/// assert_eq!(model.report().bytes, weights.layout().bytes());
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

    /// Reads `weights`, merges their adapters, and places every module as `plan` says.
    ///
    /// All memory is reserved before the first byte is read. The bytes are the same whatever the plan.
    ///
    /// # Errors
    /// What reading, patching and allocating meet; [`Plan`](crate::Error::Plan) when the plan is of another model;
    /// [`Cancelled`](crate::Error::Cancelled), even if all bytes are read by then.
    /// Whatever the error, all memory is given back first.
    pub fn load(&self, weights: &Weights, plan: &Plan) -> Result<Model> {
        let layout = weights.layout();
        plan.verify(layout)?;
        let (made, reuse) = (Made::of(weights), Reuse::nothing(layout, plan));
        let inputs = Inputs { weights: Some(weights), layout, plan, base: None, reuse: &reuse };
        self.place(inputs, made)
    }

    /// Reserves, fills and puts together.
    fn place(&self, inputs: Inputs<'_>, made: Per<TensorId, Made>) -> Result<Model> {
        let (plan, start) = (inputs.plan, Instant::now());
        let mut needed = inputs.reuse.needed(plan);
        if inputs.reuse.slots.is_none() {
            let slots = needed.entry(plan.compute()).or_default();
            *slots = slots.saturating_add(plan.slots().bytes());
        }
        let (homes, reservation, report) = self.fill(inputs, &needed, start)?;
        let layout = Arc::new(inputs.layout.clone());
        let (groups, slots) = (inputs.reuse.groups.clone(), inputs.reuse.slots.clone());
        let from = inputs.base.map_or_else(Vec::new, |base| inputs.reuse.from(base));
        let parts = Parts { layout, plan, groups, homes, made, slots, from };
        Model::assemble(parts, reservation, self.registry).map(|model| model.with_report(report))
    }

    fn fill(&self, inputs: Inputs<'_>, needed: &BTreeMap<DeviceId, u64>, start: Instant) -> Result<Filled> {
        let mut reservation = Reservation::of(self.registry, inputs.plan, needed)?;
        let job = Job::new(self, inputs, &reservation)?;
        let homes = job.run(self.workers, &mut reservation)?;
        let report = job.report(start.elapsed());
        Ok((homes, reservation, report))
    }
}

/// Homes, what is left of their reservation, and how it went.
type Filled = (Vec<Option<Arc<Home>>>, Reservation, LoadReport);

/// The memory of a plan, taken on every device that it uses: weights, and slots on the compute device.
///
/// The plan's reserve is not taken, for it is the caller's; nor is scratch beyond the slots.
#[derive(Debug)]
pub struct Reservation {
    devices: BTreeMap<DeviceId, Arc<dyn Device>>,
    charges: BTreeMap<DeviceId, Charge>,
    compute: DeviceId,
}

impl Reservation {
    /// Opens the plan's devices and reserves what it puts on each. Devices that get nothing are not opened,
    /// but for the compute device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the device that has too little right now; nothing is taken then.
    pub fn take(registry: &Registry, plan: &Plan) -> Result<Reservation> {
        let all = |share: &crate::plan::DevicePlan| (share.id, share.weights.bytes.saturating_add(share.beside.slots));
        Reservation::of(registry, plan, &plan.devices().iter().map(all).collect())
    }

    /// Opens the plan's devices and reserves what is `needed` on each: less than the plan's where some of it is there.
    pub(super) fn of(registry: &Registry, plan: &Plan, needed: &BTreeMap<DeviceId, u64>) -> Result<Reservation> {
        let (devices, charges) = (BTreeMap::new(), BTreeMap::new());
        let mut reservation = Reservation { devices, charges, compute: plan.compute() };
        for share in plan.devices() {
            if share.weights.bytes.saturating_add(share.beside.slots) == 0 && share.id != plan.compute() {
                continue;
            }
            let device = registry.device(share.id)?;
            let bytes = needed.get(&share.id).copied().unwrap_or(0);
            let available = device.memory()?.available();
            if bytes > available {
                let (device, limit) = (share.id, device.ledger().limit());
                return Err(Error::OutOfMemory { device, requested: bytes, available, limit });
            }
            reservation.charges.insert(share.id, device.ledger().charge(bytes)?);
            reservation.devices.insert(share.id, device);
        }
        Ok(reservation)
    }

    /// The devices of the plan, open.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.devices.values()
    }

    /// The device `id`, where the plan uses it.
    pub fn device(&self, id: DeviceId) -> Option<&Arc<dyn Device>> {
        self.devices.get(&id)
    }

    /// What is reserved on `id` and not allocated yet.
    pub fn left(&self, id: DeviceId) -> u64 {
        self.charges.get(&id).map_or(0, Charge::bytes)
    }

    /// Allocates a part of what is reserved on `id`, near the compute device, which reads it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when less is left, or when the device refuses.
    pub fn alloc(&mut self, id: DeviceId, bytes: u64, kind: MemoryKind) -> Result<BufMut> {
        let (Some(device), Some(charge)) = (self.devices.get(&id), self.charges.get_mut(&id)) else {
            return Err(Missing::Reserved { device: id, reserved: self.charges.keys().copied().collect() }.into());
        };
        device.back(charge.split(bytes)?, kind, Some(self.compute))
    }
}
