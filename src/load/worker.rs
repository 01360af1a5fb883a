//! The threads of a load.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::model::{LoadReport, home_kind, places};
use super::{Loader, Reservation};
use crate::adapter::Patches;
use crate::backend::{Buf, BufMut, Device, MemoryKind, Piece, Role, Stream, Transfer};
use crate::bytes::ByteSize;
use crate::checkpoint::Checkpoint;
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::transfer::Ring;

/// Bytes of one staging buffer. 4 to 16 MiB reach the speed of a link; larger ones only cost memory.
const CHUNK: u64 = 16 << 20;

/// What one load's threads share.
pub(super) struct Job<'a> {
    checkpoint: &'a Checkpoint,
    patches: &'a Patches,
    plan: &'a Plan,
    /// For each tensor where its bytes lie in its module's buffer.
    places: Vec<Range<usize>>,
    host: Arc<dyn Device>,
    streams: BTreeMap<DeviceId, Arc<dyn Stream>>,
    ring: Ring,
    loader: &'a Loader<'a>,
    next: AtomicUsize,
    done: AtomicU64,
    patched: AtomicUsize,
    saturated: AtomicU64,
    stop: AtomicBool,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        loader: &'a Loader<'a>,
        checkpoint: &'a Checkpoint,
        patches: &'a Patches,
        plan: &'a Plan,
        reservation: &Reservation,
    ) -> Result<Job<'a>> {
        let host = loader.registry.staging_host()?;
        let away = |device: &&Arc<dyn Device>| !device.id().is_host();
        let upload = |device: &Arc<dyn Device>| Ok((device.id(), device.stream(Role::Upload)?));
        let streams = reservation.devices().filter(away).map(upload).collect::<Result<_>>()?;
        let layout = patches.layout();
        let largest = plan.assignments().iter().filter(|a| !a.device.is_host());
        let largest = largest.flat_map(|a| &layout.modules[a.index].tensors).map(|&t| layout.tensors[t].bytes).max();
        let ring = Ring::new(Arc::clone(&host), largest.unwrap_or(0).min(CHUNK) as usize, loader.workers + 1);
        Ok(Job {
            checkpoint,
            patches,
            plan,
            places: places(layout),
            host,
            streams,
            ring,
            loader,
            next: AtomicUsize::new(0),
            done: AtomicU64::new(0),
            patched: AtomicUsize::new(0),
            saturated: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        })
    }

    /// Places every module; for each its memory, none where another module owns it. When it returns, all
    /// copies have landed, or the error is the first that a worker met and no copy is under way.
    pub(super) fn run(&self, workers: usize, reservation: &mut Reservation) -> Result<Vec<Option<Buf>>> {
        let homes = Mutex::new(vec![None; self.plan.assignments().len()]);
        let reservation = Mutex::new(reservation);
        let failure = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..workers.min(self.plan.assignments().len()) {
                scope.spawn(|| {
                    if let Err(error) = self.work(&reservation, &homes) {
                        self.stop.store(true, Ordering::Relaxed);
                        lock(&failure).get_or_insert(error);
                    }
                });
            }
        });
        let homes = homes.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        let landed = homes.iter().flatten().try_for_each(|buf: &Buf| buf.wait(self.loader.deadline));
        match failure.map_or(landed, Err).and_then(|()| self.go_on()) {
            Ok(()) => Ok(homes),
            Err(error) => {
                drop(homes);
                self.settle();
                Err(error)
            }
        }
    }

    /// Waits until no copy is under way, so that the memory of a failed load is back when it returns.
    fn settle(&self) {
        for stream in self.streams.values() {
            // A stream that fails here has nothing under way that would ever finish.
            let _ = stream.record(&[]).and_then(|event| event.wait(self.loader.deadline));
        }
    }

    pub(super) fn report(&self, time: Duration) -> LoadReport {
        LoadReport {
            bytes: self.done.load(Ordering::Relaxed),
            modules: self.plan.assignments().len(),
            patched: self.patched.load(Ordering::Relaxed),
            saturated: self.saturated.load(Ordering::Relaxed),
            time,
        }
    }

    /// One worker: takes the next module until there is none.
    fn work(&self, reservation: &Mutex<&mut Reservation>, homes: &Mutex<Vec<Option<Buf>>>) -> Result<()> {
        let mut scratch = None;
        while !self.stop.load(Ordering::Relaxed) {
            self.go_on()?;
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(assignment) = self.plan.assignments().get(index) else { break };
            if self.patches.layout().modules[assignment.index].alias_of.is_some() {
                continue;
            }
            let memory = lock(reservation).alloc(assignment.device, assignment.bytes, home_kind(assignment))?;
            let home = match self.streams.get(&assignment.device) {
                None => self.fill_here(assignment.index, memory)?,
                Some(stream) => self.fill_there(assignment.index, memory, &**stream, &mut scratch)?,
            };
            lock(homes)[index] = Some(home);
        }
        Ok(())
    }

    /// The tensors that a module brings to its memory, with their places in it.
    fn own_tensors(&self, module: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let layout = self.patches.layout();
        let own = |&t: &usize| layout.storage[t] == t;
        layout.modules[module].tensors.iter().copied().filter(own).map(|t| (t, self.places[t].clone()))
    }

    /// Reads a module into the host memory where it stays.
    fn fill_here(&self, module: usize, mut memory: BufMut) -> Result<Buf> {
        let mut bytes = memory.host_mut().ok_or_else(|| Error::invalid("host memory that the host cannot address"))?;
        for (tensor, place) in self.own_tensors(module) {
            let dst = &mut bytes[place];
            match self.patches.tensor(tensor) {
                Some(_) => self.read_patched(tensor, dst)?,
                None => self.read_plain(tensor, dst)?,
            }
        }
        drop(bytes);
        Ok(memory.freeze())
    }

    /// Reads a module through staging buffers into the memory of another device.
    fn fill_there(
        &self,
        module: usize,
        mut memory: BufMut,
        stream: &dyn Stream,
        scratch: &mut Option<Buf>,
    ) -> Result<Buf> {
        for (tensor, place) in self.own_tensors(module) {
            memory = match self.patches.tensor(tensor) {
                Some(_) => self.send_patched(tensor, place, memory, stream, scratch)?,
                None => self.send_plain(tensor, place, memory, stream)?,
            };
        }
        Ok(memory.freeze())
    }

    /// An unpatched tensor, in pieces through the ring.
    fn send_plain(
        &self,
        tensor: usize,
        place: Range<usize>,
        mut memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        let mut at = 0;
        while at < place.len() {
            let bytes = self.ring.bytes_each().min(place.len() - at);
            let mut staging = self.ring.acquire(self.loader.deadline)?;
            let filled = match staging.host_mut() {
                Some(mut dst) => self.read_part(tensor, at as u64, &mut dst[..bytes]),
                None => Err(Error::invalid("staging memory that the host cannot address")),
            };
            filled.inspect_err(|_| self.ring.lost())?;
            let staging = staging.freeze();
            let piece = Piece { src: staging.clone(), from: 0..bytes, at: place.start + at };
            let flight = Transfer::new(vec![piece], memory).and_then(|transfer| stream.copy(transfer));
            let flight = flight.inspect_err(|_| self.ring.lost())?;
            self.ring.release(flight.done().clone(), staging);
            memory = flight.chain();
            at += bytes;
        }
        Ok(memory)
    }

    /// A patched tensor, whole, from the worker's own buffer, which it uses again for the next one.
    fn send_patched(
        &self,
        tensor: usize,
        place: Range<usize>,
        memory: BufMut,
        stream: &dyn Stream,
        scratch: &mut Option<Buf>,
    ) -> Result<BufMut> {
        let mut old = scratch.take().and_then(|old| old.try_reclaim().ok());
        // One that is too small is waited for, too: it has to be back before a larger one is taken.
        old.as_mut().map_or(Ok(()), |old| old.settle(self.loader.deadline))?;
        let mut staging = match old.filter(|old| old.bytes() >= place.len()) {
            Some(old) => old,
            None => self.host.alloc(place.len(), MemoryKind::Pinned)?,
        };
        match staging.host_mut() {
            Some(mut dst) => self.read_patched(tensor, &mut dst[..place.len()])?,
            None => return Err(Error::invalid("staging memory that the host cannot address")),
        }
        let staging = staging.freeze();
        let piece = Piece { src: staging.clone(), from: 0..place.len(), at: place.start };
        let flight = stream.copy(Transfer::new(vec![piece], memory)?)?;
        *scratch = Some(staging);
        Ok(flight.chain())
    }

    fn read_plain(&self, tensor: usize, dst: &mut [u8]) -> Result<()> {
        let mut at = 0;
        for part in dst.chunks_mut(CHUNK as usize) {
            self.read_part(tensor, at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn read_part(&self, tensor: usize, at: u64, dst: &mut [u8]) -> Result<()> {
        self.go_on()?;
        self.checkpoint.read_at(tensor, at, dst)?;
        self.advance(dst.len() as u64);
        Ok(())
    }

    /// Reads a tensor and patches it in place; `dst` has the size of the patched one.
    fn read_patched(&self, tensor: usize, dst: &mut [u8]) -> Result<()> {
        self.go_on()?;
        let outcome = self.patches.read(self.checkpoint, tensor, dst)?;
        self.patched.fetch_add(1, Ordering::Relaxed);
        self.saturated.fetch_add(outcome.saturated, Ordering::Relaxed);
        self.advance(dst.len() as u64);
        Ok(())
    }

    /// Whether there is any use in going on.
    fn go_on(&self) -> Result<()> {
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
