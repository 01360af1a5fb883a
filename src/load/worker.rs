//! The threads of a load.
//!
//! Workers take groups of modules in the plan's order. The pool of staging buffers has one buffer more than there are
//! workers, so that each piece is copied on while the next is read. Beyond the plan a load takes on the host: these
//! buffers, for each worker its largest patched tensor that the host patches and sends on and its largest set of factors
//! for a device, and all factors of the adapters.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::index::places;
use super::model::{Model, home_kind};
use super::on_device::{Factors, OnDevice};
use super::report::LoadReport;
use super::reuse::{Reuse, Ways};
use super::store::Home;
use super::{Loader, Reservation};
use crate::adapter::Weights;
use crate::backend::{Buf, BufMut, Device, Event, MemoryKind, Piece, Role, Stream, Transfer};
use crate::bytes::ByteSize;
use crate::checkpoint::{Layout, ModuleId, Per, TensorId};
use crate::device::DeviceId;
use crate::error::{Error, Missing, Result};
use crate::limits::STAGING_BYTES;
use crate::patch::TensorPatch;
use crate::plan::Plan;
use crate::staging::Pool;

/// What one load's threads share.
pub(super) struct Job<'a> {
    /// None where all bytes are in memory already.
    weights: Option<&'a Weights>,
    layout: &'a Layout,
    plan: &'a Plan,
    pub(super) reuse: &'a Reuse,
    pub(super) ways: Ways,
    /// For each tensor where its bytes lie in its group's buffer.
    places: Per<TensorId, Range<usize>>,
    host: Arc<dyn Device>,
    streams: BTreeMap<DeviceId, Arc<dyn Stream>>,
    there: OnDevice,
    pub(super) pool: Pool,
    pub(super) loader: &'a Loader<'a>,
    next: AtomicUsize,
    done: AtomicU64,
    read: AtomicU64,
    shared: AtomicU64,
    copied: AtomicU64,
    patched: AtomicUsize,
    saturated: AtomicU64,
    stop: AtomicBool,
}

/// What a worker keeps from one tensor to the next.
#[derive(Default)]
struct Scratch {
    /// Host memory with a tensor that the host patched, which a copy reads until its event.
    patched: Option<(Event, Buf)>,
    factors: Factors,
}

/// What a load is made of.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// None where all bytes are in the base.
    pub(super) weights: Option<&'a Weights>,
    /// Of the model that is made.
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
        let ways = base.map(|base| Ways::of(reuse, layout, plan, reservation, base)).transpose()?.unwrap_or_default();
        let largest = plan.assignments().iter().filter(|a| !a.device.is_host());
        let largest = largest.flat_map(|a| &layout.at(a.index).tensors).map(|&t| layout.at(t).bytes).max();
        let largest = usize::try_from(largest.unwrap_or(0)).unwrap_or(usize::MAX);
        let pool = Pool::new(Arc::clone(&host), plan.compute(), largest, loader.workers.saturating_add(1));
        Ok(Job {
            weights,
            layout,
            plan,
            reuse,
            ways,
            places: places(layout, &reuse.groups),
            there: OnDevice::new(reservation, &host, loader.deadline),
            host,
            streams,
            pool,
            loader,
            next: AtomicUsize::new(0),
            done: AtomicU64::new(0),
            read: AtomicU64::new(0),
            shared: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            patched: AtomicUsize::new(0),
            saturated: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        })
    }

    /// Places every group of modules; for each its memory, none where another module owns it. When it returns, all
    /// copies have landed, or the error is the first that a worker met and no copy is under way. So it is when a worker
    /// panics, which goes on here.
    pub(super) fn run(&self, workers: usize, reservation: &mut Reservation) -> Result<Vec<Option<Arc<Home>>>> {
        let homes = Mutex::new(vec![None; self.reuse.groups.len()]);
        let reservation = Mutex::new(reservation);
        let failure = Mutex::new(None);
        let work = || {
            let outcome = catch_unwind(AssertUnwindSafe(|| self.work(&reservation, &homes)));
            if !matches!(outcome, Ok(Ok(()))) {
                self.stop.store(true, Ordering::Relaxed);
                lock(&failure).get_or_insert(outcome);
            }
        };
        std::thread::scope(|scope| {
            for worker in 0..workers.min(self.reuse.groups.len()) {
                let thread = std::thread::Builder::new().name(format!("load {worker}")).spawn_scoped(scope, work);
                // Where the system gives no more threads, fewer do it, or this one alone.
                if let Err(error) = thread {
                    tracing::warn!(%error, worker, "a load goes on with fewer threads");
                    if worker == 0 {
                        work();
                    }
                    break;
                }
            }
        });
        let homes = homes.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        let outcome = failure.unwrap_or_else(|| {
            let landed = homes.iter().flatten().try_for_each(|home: &Arc<Home>| home.buf.wait(self.loader.deadline));
            // What came by way of the host landed in its home whether its own device brought it or failed.
            Ok(landed.and_then(|()| self.settle()).and_then(|()| self.check_cancelled()))
        });
        match outcome {
            Ok(Ok(())) => Ok(homes),
            failed => {
                drop(homes);
                // A stream that fails here has nothing under way that would ever finish.
                let _ = self.settle();
                failed.unwrap_or_else(|panic| resume_unwind(panic)).map(|()| Vec::new())
            }
        }
    }

    /// Waits until no copy is under way, so that the memory of a failed load is back when it returns.
    ///
    /// # Errors
    /// The first failure of a stream, after all were waited for.
    fn settle(&self) -> Result<()> {
        let streams = self.streams.values().chain(self.ways.downloads.values());
        let over = |stream: &Arc<dyn Stream>| stream.record(&[])?.wait(self.loader.deadline);
        let outcomes: Vec<Result<()>> = streams.map(over).collect();
        outcomes.into_iter().collect()
    }

    pub(super) fn report(&self, time: Duration) -> LoadReport {
        let (patched_on_device, host_instead) = self.there.report();
        LoadReport {
            patched_on_device,
            host_instead,
            bytes: self.done.load(Ordering::Relaxed),
            read: self.read.load(Ordering::Relaxed),
            shared: self.shared.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
            modules: self.plan.assignments().len(),
            patched: self.patched.load(Ordering::Relaxed),
            saturated: self.saturated.load(Ordering::Relaxed),
            time,
        }
    }

    /// One worker: takes the next group until there is none.
    fn work(&self, reservation: &Mutex<&mut Reservation>, homes: &Mutex<Vec<Option<Arc<Home>>>>) -> Result<()> {
        let mut scratch = Scratch::default();
        while !self.stop.load(Ordering::Relaxed) {
            self.check_cancelled()?;
            let group = self.next.fetch_add(1, Ordering::Relaxed);
            if group >= self.reuse.groups.len() {
                break;
            }
            let (first, bytes) = (self.reuse.groups.members(group)[0], self.reuse.groups.bytes(group));
            if self.layout.at(first).alias_of.is_some() {
                continue;
            }
            if let Some(home) = self.reuse.shared(group) {
                lock(homes)[group] = Some(Arc::clone(home));
                self.shared.fetch_add(bytes, Ordering::Relaxed);
                self.advance(bytes);
                continue;
            }
            let assignment = self.plan.at(first);
            let kind = home_kind(assignment);
            let memory = lock(reservation).alloc(assignment.device, bytes, kind)?;
            let buf = match self.streams.get(&assignment.device) {
                None => self.fill_here(group, memory)?,
                Some(stream) => self.fill_there(group, memory, &**stream, &mut scratch)?,
            };
            lock(homes)[group] = Some(Arc::new(Home { buf, kind }));
        }
        let saturated = scratch.factors.close(&self.there, &self.streams)?;
        self.saturated.fetch_add(saturated, Ordering::Relaxed);
        Ok(())
    }

    /// The tensors that a group's modules bring to its memory, with their places in it.
    pub(super) fn own_tensors(&self, group: usize) -> impl Iterator<Item = (TensorId, Range<usize>)> {
        let tensors = |&module: &ModuleId| self.layout.own_tensors(module);
        self.reuse.groups.members(group).iter().flat_map(tensors).map(|t| (t, self.places[t].clone()))
    }

    /// Reads a group into the host memory where it stays.
    fn fill_here(&self, group: usize, mut memory: BufMut) -> Result<Buf> {
        let bytes = memory.host_mut().ok_or_else(|| Error::bug("host memory that the host cannot address"))?;
        for (tensor, place) in self.own_tensors(group) {
            let dst = &mut bytes[place];
            match (self.reuse.held(tensor), self.patch(tensor)) {
                (Some(held), _) => self.copy_here(held, dst)?,
                (None, Some(patch)) => self.read_patched(patch, tensor, dst)?,
                (None, None) => self.read_plain(tensor, dst)?,
            }
        }
        Ok(self.bring_here(group, memory)?.freeze())
    }

    /// Reads a group through staging buffers into the memory of another device.
    fn fill_there(&self, group: usize, mut memory: BufMut, stream: &dyn Stream, scratch: &mut Scratch) -> Result<Buf> {
        for (tensor, place) in self.own_tensors(group) {
            memory = match (self.reuse.held(tensor), self.patch(tensor)) {
                (Some(held), _) => self.send_held(held, place, memory, stream)?,
                (None, Some(patch)) => self.send_changed(patch, tensor, place, memory, stream, scratch)?,
                (None, None) => self.send_plain(tensor, place, memory, stream)?,
            };
        }
        Ok(memory.freeze())
    }

    /// An unpatched tensor, in pieces through the pool.
    fn send_plain(
        &self,
        tensor: TensorId,
        place: Range<usize>,
        mut memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        let mut at = 0;
        while at < place.len() {
            let bytes = self.pool.bytes_each().min(place.len() - at);
            let (mut staging, lent) = self.pool.acquire(self.loader.deadline)?;
            match staging.host_mut() {
                Some(dst) => self.read_part(tensor, at as u64, &mut dst[..bytes])?,
                None => return Err(Error::bug("staging memory that the host cannot address")),
            }
            let staging = staging.freeze();
            let piece = Piece { src: staging.clone(), from: 0..bytes, at: place.start + at };
            let flight = stream.send(Transfer::new(vec![piece], memory)?)?;
            lent.give_back(flight.done().clone(), staging);
            memory = flight.chain();
            at += bytes;
        }
        Ok(memory)
    }

    /// A tensor that adapters change: patched by the device that it is for where that can, by the host elsewhere.
    fn send_changed(
        &self,
        patch: &TensorPatch,
        tensor: TensorId,
        place: Range<usize>,
        memory: BufMut,
        stream: &dyn Stream,
        scratch: &mut Scratch,
    ) -> Result<BufMut> {
        let checkpoint = self.files(tensor)?.checkpoint();
        let planned = self.there.plan(stream.device(), patch, place.start, checkpoint)?;
        let sent =
            planned.as_ref().map(|planned| planned.send(&self.there, stream, &mut scratch.factors)).transpose()?;
        let Some((planned, sent)) = planned.as_ref().zip(sent.flatten()) else {
            return self.send_patched(patch, tensor, place, memory, stream, &mut scratch.patched);
        };
        let memory = self.send_plain(tensor, place.clone(), memory, stream)?;
        let beside = patch.needs().iter().map(|&tensor| checkpoint.layout().at(tensor).bytes).sum();
        self.read.fetch_add(beside, Ordering::Relaxed);
        self.patched.fetch_add(1, Ordering::Relaxed);
        planned.apply(&self.there, stream, sent, (memory, place.start), &mut scratch.factors)
    }

    /// A patched tensor, whole, from the worker's own buffer, which it uses again for the next one.
    fn send_patched(
        &self,
        patch: &TensorPatch,
        tensor: TensorId,
        place: Range<usize>,
        memory: BufMut,
        stream: &dyn Stream,
        scratch: &mut Option<(Event, Buf)>,
    ) -> Result<BufMut> {
        // One that is too small is waited for, too: it has to be back before a larger one is taken.
        let old = scratch.take();
        let old = old.map(|(event, old)| event.wait(self.loader.deadline).map(|()| old.try_reclaim().ok()));
        let mut staging = match old.transpose()?.flatten().filter(|old| old.bytes() >= place.len()) {
            Some(old) => old,
            None => self.host.alloc_near(place.len(), MemoryKind::Pinned, stream.device())?,
        };
        match staging.host_mut() {
            Some(dst) => self.read_patched(patch, tensor, &mut dst[..place.len()])?,
            None => return Err(Error::bug("staging memory that the host cannot address")),
        }
        let staging = staging.freeze();
        let piece = Piece { src: staging.clone(), from: 0..place.len(), at: place.start };
        let flight = stream.send(Transfer::new(vec![piece], memory)?)?;
        *scratch = Some((flight.done().clone(), staging));
        Ok(flight.chain())
    }

    fn read_plain(&self, tensor: TensorId, dst: &mut [u8]) -> Result<()> {
        let mut at = 0;
        for part in dst.chunks_mut(STAGING_BYTES) {
            self.read_part(tensor, at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn read_part(&self, tensor: TensorId, at: u64, dst: &mut [u8]) -> Result<()> {
        self.check_cancelled()?;
        self.files(tensor)?.checkpoint().read_at(tensor, at, dst)?;
        self.read.fetch_add(dst.len() as u64, Ordering::Relaxed);
        self.advance(dst.len() as u64);
        Ok(())
    }

    /// Reads a tensor and patches it in place; `dst` has the size of the patched one.
    fn read_patched(&self, patch: &TensorPatch, tensor: TensorId, dst: &mut [u8]) -> Result<()> {
        self.check_cancelled()?;
        let checkpoint = self.files(tensor)?.checkpoint();
        let outcome = patch.read(checkpoint, tensor, dst)?;
        let stored = |&tensor: &TensorId| checkpoint.layout().at(tensor).bytes;
        self.read.fetch_add(patch.needs().iter().chain([&tensor]).map(stored).sum(), Ordering::Relaxed);
        self.patched.fetch_add(1, Ordering::Relaxed);
        self.saturated.fetch_add(outcome.saturated, Ordering::Relaxed);
        self.advance(dst.len() as u64);
        Ok(())
    }

    /// The files, to read a tensor that is in no memory.
    fn files(&self, tensor: TensorId) -> Result<&'a Weights> {
        self.weights.ok_or_else(|| {
            let tensor = self.layout.at(tensor).name.clone();
            Missing::Held { tensor }.into()
        })
    }

    /// What adapters do to a tensor.
    fn patch(&self, tensor: TensorId) -> Option<&'a TensorPatch> {
        self.weights?.patches().tensor(tensor)
    }

    /// Says that bytes of another model are on their way.
    pub(super) fn copied(&self, bytes: usize) {
        self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
        self.advance(bytes as u64);
    }

    /// Whether there is any use in going on.
    pub(super) fn check_cancelled(&self) -> Result<()> {
        if self.loader.cancel.is_cancelled() {
            let (done, of) = (ByteSize(self.done.load(Ordering::Relaxed)), ByteSize(self.plan.bytes()));
            return Err(Error::Cancelled { done, of });
        }
        Ok(())
    }

    fn advance(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(progress) = self.loader.progress {
            progress.advance(done, self.plan.bytes());
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
