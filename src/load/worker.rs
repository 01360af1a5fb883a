//! The threads of a load.
//!
//! Workers take groups of modules in the order of the files. A worker that finds none left makes room for a thread that helps
//! another, so that one large tensor is read by as many threads as many small ones. The pool of staging buffers has one buffer
//! more than there are workers, so that each piece is copied on while the next is read. Beyond the plan a load takes on the
//! host: these buffers, for each worker its largest patched tensor that the host patches and sends on and its largest set of
//! factors for a device, as much of a tensor in the file's type as a staging buffer holds once it is cast, a factor of a deferred
//! change, half a staging buffer for direct reads of what stays on the host, and all factors of the adapters; and of two modules that it
//! compresses the codes, these twice on their way to another device, the weights of changed ones, and for each worker two pieces of
//! others. The threads with which these reads keep the disk busy (`file/read/scatter`), at most seven, have half a staging buffer each
//! too, and so have those of the second pieces.

mod fill;
mod report;
mod send;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::encoded::Encoding;
use super::in_files::Files;
use super::model::{Model, home_blocks, home_kind, tensors_of};
use super::on_device::{Factors, OnDevice};
use super::read_back::ReadBack;
use super::reuse::{CopyRoutes, Reuse};
use super::store::Home;
use super::{Loader, Reservation};
use crate::adapter::Weights;
use crate::backend::{Buf, BufMut, Device, Event, Role, Stream};
use crate::bytes::ByteSize;
use crate::checkpoint::{Layout, TensorId};
use crate::device::{DeviceId, DeviceKind};
use crate::error::{Error, Missing, Result};
use crate::interrupt::interruptible;
use crate::limits::STAGING_BYTES;
use crate::patch::{Requantised, TensorPatch};
use crate::plan::Plan;
use crate::staging::Pool;
use crate::threads::{Permit, Permits};
use crate::transfer::{DeviceReads, Kept, ReadWays};
pub(super) use fill::Block;
use report::ways;

/// The state that the threads of one load share.
pub(super) struct Job<'a> {
    /// `None` if all bytes are in the base.
    weights: Option<&'a Weights>,
    pub(super) layout: &'a Layout,
    pub(super) plan: &'a Plan,
    pub(super) reuse: &'a Reuse,
    pub(super) routes: CopyRoutes,
    pub(super) host: Arc<dyn Device>,
    /// For what the host reads of compressed homes on other devices, while it lives.
    pub(super) read_back: Arc<ReadBack>,
    streams: BTreeMap<DeviceId, Arc<dyn Stream>>,
    on_device: OnDevice,
    /// The reads of the devices that read files themselves.
    device_reads: BTreeMap<DeviceId, DeviceReads>,
    pub(super) pool: Pool,
    pub(super) loader: &'a Loader<'a>,
    /// What homes on a disk are read from, if any are.
    files: Option<Files>,
    /// How the files had been read before.
    ways: Vec<ReadWays>,
    /// Keeps the buffers of direct reads for the reads that follow.
    _buffers: Kept,
    /// The groups that a worker fills at a time, in order of the files.
    turns: Vec<Vec<usize>>,
    /// The number of the next turn.
    next: AtomicUsize,
    /// As many as there are workers. One that has nothing to do has no place, and another has help in its place.
    pub(super) places: Permits,
    done: Arc<AtomicU64>,
    read: AtomicU64,
    in_files: AtomicU64,
    shared: AtomicU64,
    copied: AtomicU64,
    patched: AtomicUsize,
    saturated: AtomicU64,
    /// By tensor, so that the order of the sum is not that of the workers.
    requantised: Mutex<BTreeMap<TensorId, Requantised>>,
    pub(super) encoding: Encoding,
    stop: Arc<AtomicBool>,
}

/// The most bytes of a staging buffer on the way to a disk alone.
const DISK_PIECE: u64 = 1 << 20;

/// The tensors in a block of memory, with their byte ranges there.
pub(super) type Tensors = Vec<(TensorId, Range<usize>)>;

/// A worker's buffers, kept from one tensor to the next.
#[derive(Default)]
struct Scratch {
    /// Host memory with a tensor that the host patched. A copy reads it until the event.
    patched: Option<(Event, Buf)>,
    factors: Factors,
}

/// The inputs of a load.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// `None` if all bytes are in the base.
    pub(super) weights: Option<&'a Weights>,
    /// The layout of the new model.
    pub(super) layout: &'a Layout,
    pub(super) plan: &'a Plan,
    pub(super) base: Option<&'a Model>,
    pub(super) reuse: &'a Reuse,
}

impl<'a> Job<'a> {
    pub(super) fn new(loader: &'a Loader<'a>, inputs: Inputs<'a>, reservation: &Reservation) -> Result<Job<'a>> {
        let Inputs { weights, layout, plan, base, reuse } = inputs;
        let host = loader.registry.staging_host()?;
        let away = |device: &&Arc<dyn Device>| !device.id().is_host();
        let upload = |device: &Arc<dyn Device>| Ok((device.id(), device.stream(Role::Upload)?));
        let streams = reservation.devices().filter(away).map(upload).collect::<Result<_>>()?;
        let routes = base.map(|base| CopyRoutes::of(reuse, layout, plan, reservation, base)).transpose()?;
        let routes = routes.unwrap_or_default();
        let largest = plan.assignments().iter().filter(|a| !a.device.is_host());
        let largest = largest.flat_map(|a| &layout.at(a.index).tensors).map(|&t| layout.at(t).bytes).max();
        // A disk takes small pieces as fast as large ones, and the memory that computes may be short.
        let only_disks = reservation.devices().filter(away).all(|device| device.id().kind() == DeviceKind::Disk);
        let most = if only_disks { DISK_PIECE } else { u64::MAX };
        let largest = usize::try_from(largest.unwrap_or(0).min(most)).unwrap_or(usize::MAX);
        let workers = loader.workers_for(weights);
        let pool = Pool::new(Arc::clone(&host), plan.compute(), largest, workers.saturating_add(1));
        Ok(Job {
            weights,
            layout,
            plan,
            reuse,
            routes,
            on_device: OnDevice::new(reservation, &host, loader.deadline),
            device_reads: reservation.devices().filter_map(|d| Some((d.id(), DeviceReads::of(d)?))).collect(),
            streams,
            pool,
            loader,
            read_back: Arc::new(ReadBack::new(Arc::clone(&host), loader.registry.limits().work)),
            files: weights.map(|weights| loader.files_of(weights, &host)),
            host,
            ways: weights.map_or_else(Vec::new, ways),
            _buffers: Kept::new(),
            turns: turns(layout, plan, reuse, workers),
            next: AtomicUsize::new(0),
            places: Permits::new(workers),
            done: Arc::default(),
            read: AtomicU64::new(0),
            in_files: AtomicU64::new(0),
            shared: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            patched: AtomicUsize::new(0),
            saturated: AtomicU64::new(0),
            requantised: Mutex::default(),
            encoding: Encoding::new(workers),
            stop: Arc::default(),
        })
    }

    /// Fills every group of modules, and returns the memory of each; `None` if another module owns it. On success, all
    /// copies are complete. On failure, the error is the first that a worker met, and no copy is in progress. A worker's
    /// panic is resumed here, likewise with no copy in progress.
    pub(super) fn run(&self, reservation: &mut Reservation) -> Result<Vec<Option<Arc<Home>>>> {
        let homes = Mutex::new(vec![None; self.reuse.groups.len()]);
        let reservation = Mutex::new(reservation);
        let failure = Mutex::new(None);
        let work = &|place| {
            let work = || interruptible(self.check(), || self.work(place, &reservation, &homes));
            let outcome = catch_unwind(AssertUnwindSafe(work));
            if !matches!(outcome, Ok(Ok(()))) {
                // First, since the others fail once they are told to stop.
                lock(&failure).get_or_insert(outcome);
                self.stop.store(true, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            let places = || self.places.free();
            let places: Vec<_> = std::iter::from_fn(places).take(self.turns.len()).collect();
            for (worker, place) in places.into_iter().enumerate() {
                let thread = std::thread::Builder::new().name(format!("load {worker}"));
                let thread = thread.spawn_scoped(scope, move || work(Some(place)));
                // If no more threads can be had, fewer do the work, or this one alone.
                if let Err(error) = thread {
                    tracing::warn!(%error, worker, "a load goes on with fewer threads");
                    if worker == 0 {
                        work(self.places.free());
                    }
                    break;
                }
            }
        });
        let homes = homes.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        let outcome = failure.unwrap_or_else(|| {
            let landed = homes.iter().flatten().flat_map(|home: &Arc<Home>| home.all_bufs());
            let landed = landed.into_iter().try_for_each(|buf| buf.wait(self.loader.deadline));
            // The wait for a home that was filled through the host succeeds even if the device that sent the bytes failed.
            Ok(landed.and_then(|()| self.drain()).and_then(|()| self.check_cancelled()))
        });
        match outcome {
            Ok(Ok(())) => Ok(homes),
            failed => {
                drop(homes);
                // A stream that fails here has no work left that could complete.
                let _ = self.drain();
                failed.unwrap_or_else(|panic| resume_unwind(panic)).map(|()| Vec::new())
            }
        }
    }

    /// Waits until no copy is in progress, so that a failed load has released its memory when it returns.
    ///
    /// # Errors
    /// The first failure of a stream, after waiting for all streams.
    fn drain(&self) -> Result<()> {
        let streams = self.streams.values().chain(self.routes.downloads.values());
        let wait = |stream: &Arc<dyn Stream>| stream.record(&[])?.wait(self.loader.deadline);
        let outcomes: Vec<Result<()>> = streams.map(wait).collect();
        outcomes.into_iter().collect()
    }

    /// The loop of one worker: fills the groups of the next turn until none is left.
    fn work<'p>(
        &'p self,
        mut place: Option<Permit<'p>>,
        reservation: &Mutex<&mut Reservation>,
        homes: &Mutex<Vec<Option<Arc<Home>>>>,
    ) -> Result<()> {
        let mut scratch = Scratch::default();
        while !self.stop.load(Ordering::Relaxed) {
            self.check_cancelled()?;
            let Some(groups) = self.turns.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            // The blocks on the host, and the number of each group's.
            let (mut blocks, mut of_groups) = (Vec::new(), Vec::new());
            for &group in groups {
                if let Some(home) = self.reuse.shared(group) {
                    let bytes = self.reuse.groups.bytes(group);
                    lock(homes)[group] = Some(Arc::clone(home));
                    self.shared.fetch_add(bytes, Ordering::Relaxed);
                    self.advance(bytes);
                    continue;
                }
                if self.reuse.is_compressed(group) && !self.reuse.is_in_files(group) {
                    let encodes = self.is_encoded(group);
                    let home = if encodes {
                        self.encode(group, reservation, &mut place)
                    } else {
                        self.load_compressed(group, reservation)
                    };
                    lock(homes)[group] = Some(home?);
                    continue;
                }
                if self.reuse.is_in_files(group) {
                    let bytes = self.reuse.groups.bytes(group);
                    lock(homes)[group] = Some(self.leave_in_files(group)?);
                    self.in_files.fetch_add(bytes, Ordering::Relaxed);
                    self.advance(bytes);
                    continue;
                }
                let device = self.plan.at(self.reuse.groups.members(group)[0]).device;
                let mut own = self.blocks(group, reservation);
                if let Some(stream) = self.streams.get(&device) {
                    let fill = |block: Result<Block>| self.fill_device(block?, &**stream, &mut scratch);
                    let bufs = own.map(fill).collect::<Result<_>>()?;
                    lock(homes)[group] = Some(self.home(group, bufs));
                } else {
                    let before = blocks.len();
                    own.try_for_each(|block| block.map(|block| blocks.push(block)))?;
                    of_groups.push((group, blocks.len() - before));
                }
            }
            let mut bufs = self.fill_host(blocks)?.into_iter();
            for (group, count) in of_groups {
                lock(homes)[group] = Some(self.home(group, bufs.by_ref().take(count).collect()));
            }
        }
        drop(place);
        let saturated = scratch.factors.close(&self.on_device, &self.streams)?;
        self.saturated.fetch_add(saturated, Ordering::Relaxed);
        Ok(())
    }

    /// The home of a group that stays in the model's files.
    fn leave_in_files(&self, group: usize) -> Result<Arc<Home>> {
        let assignment = self.plan.at(self.reuse.groups.members(group)[0]);
        let device = self.loader.registry.device(assignment.device)?;
        let files = self.files.as_ref().ok_or_else(|| Error::bug("a home in files, and no files"))?;
        if self.reuse.is_compressed(group) {
            let (tensors, kind) = (self.tensors_of(group, None), home_kind(assignment));
            return files.compressed_home(&*device, self.layout, &self.reuse.compressed, tensors, kind);
        }
        let buf = |(alone, _)| files.home(&*device, self.layout, self.tensors_of(group, alone));
        let bufs = home_blocks(self.layout, self.plan, &self.reuse.groups, group).into_iter().map(buf);
        let (bufs, apart) = (bufs.collect::<Result<_>>()?, self.plan.is_apart(assignment.index));
        Ok(Arc::new(Home::in_files(bufs, home_kind(assignment), apart)))
    }

    /// The blocks of a group, each with its memory once it is its turn.
    fn blocks(&self, group: usize, reservation: &Mutex<&mut Reservation>) -> impl Iterator<Item = Result<Block>> {
        let assignment = self.plan.at(self.reuse.groups.members(group)[0]);
        let (kind, device) = (home_kind(assignment), assignment.device);
        let mut refilled = self.reuse.take_refilled(group).map(Vec::into_iter);
        let block = move |(alone, bytes): (Option<TensorId>, u64)| {
            let (info, mut tensors) = (alone.map(|tensor| self.layout.at(tensor)), self.tensors_of(group, alone));
            let memory = match refilled.as_mut().and_then(Iterator::next) {
                Some(memory) => self.keep(&mut tensors, memory)?,
                None => {
                    let what = info.map(|info| (info.dtype, info.name.as_str())).unzip();
                    // A framework may take its time, or take part of the reservation itself.
                    let (device, charge) = lock(reservation).split(device, bytes)?;
                    self.loader.allocators.alloc(&device, charge, what, kind, Some(self.plan.compute()))?
                }
            };
            Ok(Block { tensors, memory })
        };
        home_blocks(self.layout, self.plan, &self.reuse.groups, group).into_iter().map(block)
    }

    fn home(&self, group: usize, bufs: Vec<Buf>) -> Arc<Home> {
        let first = self.reuse.groups.members(group)[0];
        Arc::new(Home::new(bufs, home_kind(self.plan.at(first)), self.plan.is_apart(first)))
    }

    /// The tensors in a block of a group's memory, with their byte ranges there: the one that is `alone`, or all that the
    /// group's modules own.
    pub(super) fn tensors_of(&self, group: usize, alone: Option<TensorId>) -> Tensors {
        tensors_of(self.layout, &self.reuse.groups, group, alone)
    }

    /// Leaves out the tensors that a block of the base holds already, and waits until nobody uses the block.
    fn keep(&self, tensors: &mut Tensors, mut memory: BufMut) -> Result<BufMut> {
        tensors.retain(|(tensor, range)| {
            let kept = self.reuse.is_kept(*tensor);
            if kept {
                self.shared.fetch_add(range.len() as u64, Ordering::Relaxed);
                self.advance(range.len() as u64);
            }
            !kept
        });
        memory.wait_unused(self.loader.deadline)?;
        Ok(memory)
    }

    /// Reads up to `len` bytes of a tensor from its byte `at` on into `buffer`. Returns where they are.
    fn read_within(&self, tensor: TensorId, at: u64, len: usize, buffer: &mut [u8]) -> Result<Range<usize>> {
        self.check_cancelled()?;
        let found = self.files(tensor)?.checkpoint().read_within(tensor, at, len, buffer)?;
        self.count_read(found.len());
        Ok(found)
    }

    pub(super) fn count_read(&self, bytes: usize) {
        self.count_weights_read(bytes);
        self.advance(bytes as u64);
    }

    /// Counts weights that were read, and are not in place yet.
    pub(super) fn count_weights_read(&self, bytes: usize) {
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts weights that the base has, and that are not in place yet.
    pub(super) fn count_weights_copied(&self, bytes: usize) {
        self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The weights that are loaded, if any are read from files.
    pub(super) fn weights(&self) -> Option<&'a Weights> {
        self.weights
    }

    /// The stream that copies to a device.
    pub(super) fn upload(&self, id: DeviceId) -> Result<&Arc<dyn Stream>> {
        self.streams.get(&id).ok_or_else(|| Error::bug(format!("there is no stream to {id}")))
    }

    /// The file of a tensor.
    pub(super) fn path_of(&self, tensor: TensorId) -> &'a Path {
        let path = |weights: &'a Weights| weights.checkpoint().file_of(tensor);
        self.weights.and_then(path).unwrap_or(Path::new("memory"))
    }

    /// The weights' files, to read a tensor that the base does not have.
    pub(super) fn files(&self, tensor: TensorId) -> Result<&'a Weights> {
        self.weights.ok_or_else(|| {
            let tensor = self.layout.at(tensor).name.clone();
            Missing::Held { tensor }.into()
        })
    }

    /// The patch of a tensor, if adapters change it or it is cast.
    fn patch(&self, tensor: TensorId) -> Option<&'a TensorPatch> {
        self.weights?.patches().tensor(tensor)
    }

    /// Counts bytes whose copy from the base is queued or done.
    pub(super) fn copied(&self, bytes: usize) {
        self.count_weights_copied(bytes);
        self.advance(bytes as u64);
    }

    /// Fails if the load was cancelled.
    pub(super) fn check_cancelled(&self) -> Result<()> {
        match self.loader.cancel.is_cancelled() {
            true => Err(cancelled(&self.done, self.plan.bytes())),
            false => Ok(()),
        }
    }

    /// What fails once the load was cancelled, or another worker has failed.
    fn check(&self) -> impl Fn() -> Result<()> + use<> {
        let (cancel, stop, done) = (self.loader.cancel.clone(), Arc::clone(&self.stop), Arc::clone(&self.done));
        let of = self.plan.bytes();
        move || match cancel.is_cancelled() || stop.load(Ordering::Relaxed) {
            true => Err(cancelled(&done, of)),
            false => Ok(()),
        }
    }

    pub(super) fn advance(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(progress) = self.loader.progress {
            progress.advance(done, self.plan.bytes());
        }
    }
}

fn cancelled(done: &AtomicU64, of: u64) -> Error {
    Error::Cancelled { done: ByteSize(done.load(Ordering::Relaxed)), of: ByteSize(of) }
}

/// The groups of the model, in the order in which the files have them, as workers take them: on the host so many at a time that
/// their bytes are worth a read. Groups of modules whose storage another one owns are left out.
fn turns(layout: &Layout, plan: &Plan, reuse: &Reuse, workers: usize) -> Vec<Vec<usize>> {
    let groups = &reuse.groups;
    let first = |group: &usize| groups.members(*group)[0];
    let mut order: Vec<usize> = (0..groups.len()).filter(|group| layout.at(first(group)).alias_of.is_none()).collect();
    let place = |group: &usize| {
        let own = groups.members(*group).iter().flat_map(|&module| layout.own_tensors(module));
        own.map(|tensor| (layout.at(tensor).file, layout.at(tensor).offset)).min()
    };
    order.sort_by_cached_key(place);
    // Of a small model each worker has several turns.
    let share = plan.bytes() / (workers as u64).saturating_mul(4).max(1);
    let (mut turns, mut open): (Vec<Vec<usize>>, Option<u64>) = (Vec::new(), None);
    for group in order {
        let together = plan.at(first(&group)).device.is_host() && reuse.shared(group).is_none();
        match (open, turns.last_mut()) {
            (Some(_), Some(turn)) if together => turn.push(group),
            _ => turns.push(vec![group]),
        }
        let bytes = open.filter(|_| together).unwrap_or(0).saturating_add(groups.bytes(group));
        open = (together && bytes < share.min(STAGING_BYTES as u64)).then_some(bytes);
    }
    turns
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
