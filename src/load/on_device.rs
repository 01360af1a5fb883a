//! Patching where a tensor is to live: its bytes are sent as the checkpoint has them, its factors beside them, and the
//! device's kernels change it in place. What they do not cover, and what there is no room for, the host patches: the
//! bytes are the same either way.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::Reservation;
use super::worker::lock;
use crate::backend::{
    Buf, BufMut, Device, Event, Kernels, MatrixPatch, MemoryKind, Piece, SentPatch, Stream, Transfer,
};
use crate::bytes::ByteSize;
use crate::checkpoint::Checkpoint;
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::patch::{Scales, TensorPatch};

/// What the workers of a load share for patching on devices.
pub(super) struct OnDevice {
    devices: BTreeMap<DeviceId, Arc<dyn Device>>,
    host: Arc<dyn Device>,
    deadline: Duration,
    /// For each device that did not patch the first reason.
    instead: Mutex<BTreeMap<DeviceId, String>>,
    patched: AtomicUsize,
    /// Looking for room and taking it belong together.
    taking: Mutex<()>,
}

/// What a worker keeps from one tensor to the next: for each device the memory for factors.
#[derive(Default)]
pub(super) struct Factors {
    /// Host memory that an upload reads until its event.
    staging: Option<(Event, Buf)>,
    /// It counts saturated values, from its taking on.
    work: BTreeMap<DeviceId, BufMut>,
    saturated: u64,
}

/// A patch that the device will do of the tensor that is for it, with the scales beside that.
pub(super) struct Planned<'a> {
    kernels: &'a dyn Kernels,
    patch: &'a TensorPatch,
    scales: Option<Scales>,
}

impl OnDevice {
    pub(super) fn new(reservation: &Reservation, host: &Arc<dyn Device>, deadline: Duration) -> OnDevice {
        OnDevice {
            devices: reservation.devices().map(|device| (device.id(), Arc::clone(device))).collect(),
            host: Arc::clone(host),
            deadline,
            instead: Mutex::default(),
            patched: AtomicUsize::new(0),
            taking: Mutex::default(),
        }
    }

    /// How many tensors devices patched, and why a device patched none or not all that it could have.
    pub(super) fn report(&self) -> (usize, Vec<String>) {
        let why = |(device, why): (&DeviceId, &String)| format!("{device}: {why}");
        (self.patched.load(Ordering::Relaxed), lock(&self.instead).iter().map(why).collect())
    }

    /// How the device `id` will do this patch of a tensor that begins at `at` in its module's memory; none where it can't.
    ///
    /// # Errors
    /// What reading the scale meets, and a scale that cannot be used.
    pub(super) fn plan<'a>(
        &'a self,
        id: DeviceId,
        patch: &'a TensorPatch,
        at: usize,
        checkpoint: &Checkpoint,
    ) -> Result<Option<Planned<'a>>> {
        let kernels = self.devices.get(&id).and_then(|device| device.kernels());
        let covered = patch.is_products() && at.is_multiple_of(patch.element_bytes());
        let Some(kernels) = kernels.filter(|_| covered) else { return Ok(None) };
        if let Err(why) = kernels.ready() {
            self.not_there(id, why);
            return Ok(None);
        }
        let siblings = patch.read_siblings(checkpoint)?;
        let scales = patch.scales(&siblings.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        Ok(Some(Planned { kernels, patch, scales }))
    }

    fn not_there(&self, id: DeviceId, why: String) {
        lock(&self.instead).entry(id).or_insert(why);
    }

    /// What the device counted in `work`, once all that uses it is done.
    fn saturated(&self, work: BufMut, stream: &dyn Stream) -> Result<u64> {
        let counted = self.host.alloc(MatrixPatch::SATURATED.len(), MemoryKind::Pinned)?;
        let piece = Piece { src: work.freeze(), from: MatrixPatch::SATURATED, at: 0 };
        let landed = stream.send(Transfer::new(vec![piece], counted)?)?.wait(self.deadline)?.freeze();
        let bytes = landed.host(self.deadline)?;
        let count = bytes.and_then(|bytes| bytes.try_into().ok());
        count.map(u64::from_le_bytes).ok_or_else(|| Error::bug("staging memory that the host cannot address"))
    }

    /// Memory on a device beside all that is promised to others; none where there is not so much.
    fn room(&self, id: DeviceId, bytes: usize) -> Option<BufMut> {
        let device = self.devices.get(&id)?;
        let _taking = lock(&self.taking);
        let available = device.memory().map_or(0, |memory| memory.available());
        if bytes as u64 > available {
            return None;
        }
        device.alloc(bytes, MemoryKind::Arena).ok()
    }
}

impl Planned<'_> {
    /// Sends the factors to the device; none where there is no room.
    pub(super) fn send(
        &self,
        there: &OnDevice,
        stream: &dyn Stream,
        factors: &mut Factors,
    ) -> Result<Option<SentPatch<'_>>> {
        let Some(patch) = self.patch.products(self.scales.as_ref()) else { return Ok(None) };
        let (id, bytes) = (stream.device(), patch.work_bytes());
        let Some(staging) = factors.staging(there, id, bytes)? else { return Ok(None) };
        let Some((memory, fresh)) = factors.work(there, stream, bytes)? else {
            there.not_there(id, format!("no room for {} of factors", ByteSize(bytes as u64).human()));
            return Ok(None);
        };
        // What was counted before stays.
        let (sent, read, staging) = patch.send(stream, staging, memory, !fresh)?;
        factors.staging = Some((read, staging));
        Ok(Some(sent))
    }

    /// Queues the patch of the matrix that begins at `at` in `memory`, whose bytes are sent; the memory comes back.
    pub(super) fn apply(
        &self,
        there: &OnDevice,
        stream: &dyn Stream,
        patch: SentPatch<'_>,
        (memory, at): (BufMut, usize),
        factors: &mut Factors,
    ) -> Result<BufMut> {
        let flight = self.kernels.patch(stream, patch, memory, at)?;
        factors.work.insert(stream.device(), flight.patch.into_memory());
        there.patched.fetch_add(1, Ordering::Relaxed);
        Ok(flight.weight.chain())
    }
}

impl Factors {
    /// Host memory for the factors of one tensor, the last one's where that is enough; none where there is not so much.
    fn staging(&mut self, there: &OnDevice, near: DeviceId, bytes: usize) -> Result<Option<BufMut>> {
        let old = self.staging.take();
        let old = old.map(|(event, old)| event.wait(there.deadline).map(|()| old.try_reclaim().ok())).transpose()?;
        match old.flatten().filter(|old| old.bytes() >= bytes) {
            Some(old) => Ok(Some(old)),
            None => Ok(there.host.alloc_near(bytes, MemoryKind::Pinned, near).ok()),
        }
    }

    /// Memory for them on the stream's device, and whether it is fresh.
    fn work(&mut self, there: &OnDevice, stream: &dyn Stream, bytes: usize) -> Result<Option<(BufMut, bool)>> {
        let id = stream.device();
        match self.work.remove(&id) {
            Some(work) if work.bytes() >= bytes => return Ok(Some((work, false))),
            // The smaller one is let go before a larger one is taken.
            Some(work) => self.saturated += there.saturated(work, stream)?,
            None => {}
        }
        Ok(there.room(id, bytes).map(|memory| (memory, true)))
    }

    /// Lets all memory go once nobody uses it; how many values were saturated in all.
    pub(super) fn close(mut self, there: &OnDevice, streams: &BTreeMap<DeviceId, Arc<dyn Stream>>) -> Result<u64> {
        for (id, work) in std::mem::take(&mut self.work) {
            let stream = streams.get(&id).ok_or_else(|| Error::bug(format!("there is no stream of {id}")))?;
            self.saturated += there.saturated(work, &**stream)?;
        }
        Ok(self.saturated)
    }
}
