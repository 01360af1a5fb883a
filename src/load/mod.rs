//! Load, patch, distribute: from files to the device that the plan gives each module.
//!
//! A module that lives on the host is read straight into the memory it stays in, together with those beside it in the file,
//! and patched there. One that lives elsewhere is read piece by piece through a few staging buffers, or, when an adapter changes
//! it, patched in a worker's buffer first; then it is copied to its device while the next one is read.

mod allocator;
mod builder;
mod compressed;
mod deferred;
mod derive;
mod encoded;
mod in_files;
mod index;
mod model;
mod on_device;
mod probe;
mod progress;
mod provenance;
mod read_back;
mod report;
mod reuse;
mod rows;
mod store;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use allocator::Allocators;
pub use allocator::{TensorAllocator, TensorRequest};
pub use builder::ModelBuilder;
pub use deferred::Deferred;
pub use model::Model;
pub use progress::{Cancel, Progress};
pub use read_back::TensorView;
pub use report::LoadReport;
pub(crate) use store::{FetchMemory, Part, SlotMemory};
pub use store::{Residency, WeightStore};

use deferred::{Scales, scales_of};
use encoded::Encoded;
use model::Parts;
use provenance::Provenance;
use reuse::Reuse;
use store::Home;
use worker::{Inputs, Job};

use crate::adapter::Weights;
use crate::backend::{BufMut, Charge, Device, MemoryKind};
use crate::bytes::ByteSize;
use crate::checkpoint::{Per, TensorId};
use crate::device::DeviceId;
use crate::dtype::DType;
use crate::error::{Error, Missing, Result};
use crate::limits::LONGEST;
use crate::plan::Plan;
use crate::registry::Registry;

/// Loads weights onto the devices that a plan gives them.
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
    /// `None` for as many as there are cores, or as the files take well.
    workers: Option<usize>,
    deadline: Duration,
    progress: Option<&'a dyn Progress>,
    cancel: Cancel,
    allocators: Allocators,
    host_cache: ByteSize,
}

/// The most threads that a load has for a source that would have more. Each has a staging buffer.
const MOST_READERS: usize = 32;

impl<'a> Loader<'a> {
    /// A loader with one worker per core (at most 8), or more for files far away. Its deadline for a copy is that of the [limits](Registry::limits).
    pub fn new(registry: &'a Registry) -> Loader<'a> {
        let workers = None;
        let (deadline, allocators) = (registry.limits().work, Allocators::default());
        let (progress, cancel, host_cache) = (None, Cancel::new(), ByteSize(0));
        Loader { registry, workers, deadline, progress, cancel, allocators, host_cache }
    }

    /// Sets the number of threads that read and patch; at least one. Reads past the page cache have threads of their own beside
    /// them, which wait for the disk, and a load that [compresses](crate::Weights::compress) has as many threads again.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Loader<'a> {
        self.workers = Some(workers.max(1));
        self
    }

    /// Sets how long one copy may take before the load gives up; at most a century.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Loader<'a> {
        self.deadline = deadline.min(LONGEST);
        self
    }

    /// Reports the number of bytes in place to `progress`.
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

    /// Has a framework allocate the memory of the model's tensors on its device. May be called for several devices. The plan
    /// must divide tensors as the allocator needs it ([`Planner::grouping`](crate::Planner::grouping)).
    #[must_use]
    pub fn allocator(mut self, allocator: Arc<dyn TensorAllocator>) -> Loader<'a> {
        self.allocators.add(allocator);
        self
    }

    /// Keeps what is read of the model's own files in host memory, up to so many bytes, for the next passes: weights on `disk` that
    /// nothing changes are in no other place. A module is kept when a layer has first read it, if the host has the memory free at that
    /// time, until the model is dropped. Default: 0.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tensor_offload::{Checkpoint, Loader, Planner, Registry, Streamer, Weights};
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// let devices = Registry::system();
    /// let weights = Weights::new(Checkpoint::open(path)?);
    /// let planner = Planner::new(weights.layout(), devices.machine()).compute("cpu".parse()?);
    /// let plan = planner.allocation("disk,*".parse()?).plan()?;
    /// let model = Arc::new(Loader::new(&devices).host_cache("1gb".parse()?).load(&weights, &plan)?);
    /// let mut streamer = Streamer::new(&model)?;
    /// for pass in 0..2 {
    ///     let before = streamer.report().read;
    ///     for layer in model.layout().layer_ids() {
    ///         streamer.layer(layer)?;
    ///     }
    ///     println!("pass {pass} read {} bytes from the disk", streamer.report().read - before);
    /// }
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    #[must_use]
    pub fn host_cache(mut self, most: ByteSize) -> Loader<'a> {
        self.host_cache = most;
        self
    }

    /// The number of threads that read `weights` and patch.
    fn workers_for(&self, weights: Option<&Weights>) -> usize {
        self.workers.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get().min(8));
            let sources = weights.map_or(&[][..], |weights| weights.checkpoint().sources());
            sources.iter().map(|source| source.concurrency().min(MOST_READERS)).fold(cores, usize::max)
        })
    }

    /// This loader with `others` for devices that have no allocator.
    fn with_allocators(&self, others: &Allocators) -> Loader<'a> {
        let Loader { registry, workers, deadline, progress, ref cancel, ref allocators, host_cache } = *self;
        let (cancel, allocators) = (cancel.clone(), allocators.or(others));
        Loader { registry, workers, deadline, progress, cancel, allocators, host_cache }
    }

    /// Reads `weights`, merges their adapters, and places every module as `plan` says.
    ///
    /// All memory is reserved before the first byte is read. The bytes are the same whatever the plan.
    ///
    /// # Errors
    /// Any error of reading, patching or allocating; [`Plan`](crate::Error::Plan) when the plan is for another model;
    /// [`Cancelled`](crate::Error::Cancelled), even if all bytes have been read by then.
    /// All memory is released before an error is returned.
    pub fn load(&self, weights: &Weights, plan: &Plan) -> Result<Model> {
        let (layout, plan) = (weights.layout(), &*plan.checked(weights.layout())?);
        weights.patches().check_targets()?;
        let (provenance, reuse) = (Provenance::of(weights), Reuse::nothing(layout, plan));
        let reuse = self.leaving(reuse, layout, plan)?;
        let inputs = Inputs { weights: Some(weights), layout, plan, base: None, reuse: &reuse };
        self.place(inputs, provenance, scales_of(weights))
    }

    /// Reserves memory, fills it, and assembles the model.
    fn place(&self, inputs: Inputs<'_>, provenance: Per<TensorId, Provenance>, scales: Scales) -> Result<Model> {
        let (plan, start) = (inputs.plan, Instant::now());
        let needed = inputs.reuse.needed_with_slots(plan);
        let Filled { homes, mut reservation, mut report, encoded } = self.fill(inputs, &needed, start)?;
        // The sizes of codes that were made are known now.
        let layout = Arc::new(inputs.layout.with_stored(encoded));
        let plan = plan.with_codes_of(&layout);
        report.saved = plan.devices().iter().map(|share| share.weights.saved).sum();
        let (planned, slots) = (inputs.plan.slots(), plan.slots());
        let shared = inputs.reuse.slots.clone().filter(|_| planned == slots);
        if shared.is_none() {
            let reserved = if inputs.reuse.slots.is_some() { 0 } else { planned.bytes() };
            reservation.adjust(plan.compute(), reserved, slots.bytes())?;
        }
        let groups = inputs.reuse.groups.clone();
        let from = inputs.base.map_or_else(Vec::new, |base| inputs.reuse.from(base));
        let parts = Parts { layout, plan: &plan, groups, homes, provenance, scales, slots: shared, from };
        Model::assemble(parts, reservation, self.registry).map(|model| model.with_report(report))
    }

    fn fill(&self, inputs: Inputs<'_>, needed: &BTreeMap<DeviceId, u64>, start: Instant) -> Result<Filled> {
        self.allocators.check(inputs.plan)?;
        let mut reservation = Reservation::of(self.registry, inputs.plan, needed)?;
        reservation.allocators = self.allocators.clone();
        let job = Job::new(self, inputs, &reservation)?;
        let homes = job.run(&mut reservation)?;
        let report = job.report(start.elapsed());
        let encoded = job.encoding.into_encoded();
        Ok(Filled { homes, reservation, report, encoded })
    }
}

/// What a load has filled.
struct Filled {
    homes: Vec<Option<Arc<Home>>>,
    /// The rest of the homes' reservation.
    reservation: Reservation,
    report: LoadReport,
    encoded: Encoded,
}

/// The memory of a plan, reserved on every device that it uses: weights, and slots on the compute device.
///
/// The plan's reserve is not included, because it belongs to the caller; nor is scratch beyond the slots.
#[derive(Debug)]
pub struct Reservation {
    devices: BTreeMap<DeviceId, Arc<dyn Device>>,
    charges: BTreeMap<DeviceId, Charge>,
    compute: DeviceId,
    allocators: Allocators,
}

impl Reservation {
    /// Opens the plan's devices and reserves what it puts on each. Of the devices that get nothing, only the compute
    /// device is opened.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the device that has too little memory right now; then nothing is reserved.
    pub fn take(registry: &Registry, plan: &Plan) -> Result<Reservation> {
        let all =
            |share: &crate::plan::DevicePlan| (share.id, share.weights.taken().saturating_add(share.beside.slots));
        Reservation::of(registry, plan, &plan.devices().iter().map(all).collect())
    }

    /// Opens the plan's devices and reserves what is `needed` on each: less than the plan says if some of it is resident
    /// already.
    pub(super) fn of(registry: &Registry, plan: &Plan, needed: &BTreeMap<DeviceId, u64>) -> Result<Reservation> {
        let (devices, charges) = (BTreeMap::new(), BTreeMap::new());
        let (compute, allocators) = (plan.compute(), Allocators::default());
        let mut reservation = Reservation { devices, charges, compute, allocators };
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

    /// The device `id`; `None` if the plan does not use it.
    pub fn device(&self, id: DeviceId) -> Option<&Arc<dyn Device>> {
        self.devices.get(&id)
    }

    /// The bytes reserved on `id` and not allocated yet.
    pub fn left(&self, id: DeviceId) -> u64 {
        self.charges.get(&id).map_or(0, Charge::bytes)
    }

    /// Allocates part of the reservation on `id`, near the compute device, which reads it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when less is left, or when the device refuses.
    pub fn alloc(&mut self, id: DeviceId, bytes: u64, kind: MemoryKind) -> Result<BufMut> {
        let (device, charge) = self.split(id, bytes)?;
        device.back(charge, kind, Some(self.compute))
    }

    /// As [`alloc`](Reservation::alloc), for a block of a slot: from the compute device's allocator, if it has one.
    fn alloc_block(&mut self, dtype: Option<DType>, bytes: u64) -> Result<BufMut> {
        let (device, charge) = self.split(self.compute, bytes)?;
        self.allocators.alloc(&device, charge, (dtype, None), MemoryKind::Arena, Some(self.compute))
    }

    /// Splits off the part of the reservation on `id` that was `planned` for something that takes `bytes`. What is missing is charged,
    /// and what is left over given back.
    fn split_planned(&mut self, id: DeviceId, planned: u64, bytes: u64) -> Result<(Arc<dyn Device>, Charge)> {
        self.adjust(id, planned, bytes)?;
        self.split(id, bytes)
    }

    /// Reserves `bytes` on `id` in place of the `planned` part of the reservation.
    fn adjust(&mut self, id: DeviceId, planned: u64, bytes: u64) -> Result<()> {
        let (device, mut charge) = self.split(id, planned)?;
        match bytes.checked_sub(planned) {
            Some(more) => charge.join(device.ledger().charge(more)?),
            None => drop(charge.split(planned - bytes)?),
        }
        if let Some(all) = self.charges.get_mut(&id) {
            all.join(charge);
        }
        Ok(())
    }

    /// Splits off a part of the reservation on `id`.
    fn split(&mut self, id: DeviceId, bytes: u64) -> Result<(Arc<dyn Device>, Charge)> {
        let (Some(device), Some(charge)) = (self.devices.get(&id), self.charges.get_mut(&id)) else {
            return Err(Missing::Reserved { device: id, reserved: self.charges.keys().copied().collect() }.into());
        };
        Ok((Arc::clone(device), charge.split(bytes)?))
    }
}
