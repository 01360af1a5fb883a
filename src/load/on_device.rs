//! Patching on the device where a tensor will live: the checkpoint's bytes and the adapter's factors are sent, and the
//! device's kernels patch the tensor in place. The host patches what the kernels do not cover or the device has no room for.
//! The bytes are the same either way.

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

/// The state that the workers of a load share for patching on devices.
pub(super) struct OnDevice {
    devices: BTreeMap<DeviceId, Arc<dyn Device>>,
    host: Arc<dyn Device>,
    deadline: Duration,
    /// For each device that did not patch all that it could have, the first reason.
    host_instead: Mutex<BTreeMap<DeviceId, String>>,
    patched: AtomicUsize,
    /// Makes the check for room and the allocation one step.
    room: Mutex<()>,
}

/// A worker's memory for factors, on the host and on each device, kept from one tensor to the next.
#[derive(Default)]
pub(super) struct Factors {
    /// Host memory that an upload reads until the event.
    staging: Option<(Event, Buf)>,
    /// Device memory. It counts saturated values from its allocation on.
    work: BTreeMap<DeviceId, BufMut>,
    saturated: u64,
}

/// A patch that a device will apply, with the scales of the tensor.
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
            host_instead: Mutex::default(),
            patched: AtomicUsize::new(0),
            room: Mutex::default(),
        }
    }

    /// The number of tensors that devices patched, and for each device that did not patch all that it could have, why.
    pub(super) fn report(&self) -> (usize, Vec<String>) {
        let why = |(device, why): (&DeviceId, &String)| format!("{device}: {why}");
        (self.patched.load(Ordering::Relaxed), lock(&self.host_instead).iter().map(why).collect())
    }

    /// Plans this patch for the kernels of the device `id`. The tensor begins at `at` in its group's memory. `None` if the
    /// device cannot apply the patch.
    ///
    /// # Errors
    /// Any error of reading the scale, and a scale that cannot be used.
    pub(super) fn plan<'a>(
        &'a self,
        id: DeviceId,
        patch: &'a TensorPatch,
        at: usize,
        checkpoint: &Checkpoint,
    ) -> Result<Option<Planned<'a>>> {
        let kernels = self.devices.get(&id).and_then(|device| device.kernels());
        let covered = patch.is_products() && at.is_multiple_of(patch.element_bytes());
        let Some(kernels) = kernels.filter(|kernels| covered && kernels.patches()) else { return Ok(None) };
        if let Err(why) = kernels.ready() {
            self.fall_back(id, why);
            return Ok(None);
        }
        let siblings = patch.read_siblings(checkpoint)?;
        let scales = patch.scales(&siblings.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        Ok(Some(Planned { kernels, patch, scales }))
    }

    /// Records why the host patches instead of the device.
    fn fall_back(&self, id: DeviceId, why: String) {
        lock(&self.host_instead).entry(id).or_insert(why);
    }

    /// The saturated values that the device counted in `work`. Waits for all uses of `work`.
    fn saturated(&self, work: BufMut, stream: &dyn Stream) -> Result<u64> {
        let counted = self.host.alloc(MatrixPatch::SATURATED.len(), MemoryKind::Pinned)?;
        let piece = Piece { src: work.freeze(), from: MatrixPatch::SATURATED, at: 0 };
        let landed = stream.send(Transfer::new(vec![piece], counted)?)?.wait(self.deadline)?.freeze();
        let bytes = landed.host(self.deadline)?;
        let count = bytes.and_then(|bytes| bytes.try_into().ok());
        count.map(u64::from_le_bytes).ok_or_else(|| Error::bug("staging memory that the host cannot address"))
    }

    /// Memory on a device beyond everything that is reserved; `None` if there is not enough.
    fn alloc(&self, id: DeviceId, bytes: usize) -> Option<BufMut> {
        let device = self.devices.get(&id)?;
        let _room = lock(&self.room);
        let available = device.memory().map_or(0, |memory| memory.available());
        if bytes as u64 > available {
            return None;
        }
        device.alloc(bytes, MemoryKind::Arena).ok()
    }
}

impl Planned<'_> {
    /// Sends the factors to the device; `None` if there is no room.
    pub(super) fn send(
        &self,
        on_device: &OnDevice,
        stream: &dyn Stream,
        factors: &mut Factors,
    ) -> Result<Option<SentPatch<'_>>> {
        let Some(patch) = self.patch.products(self.scales.as_ref()) else { return Ok(None) };
        let (id, bytes) = (stream.device(), patch.work_bytes());
        let Some(staging) = factors.staging(on_device, id, bytes)? else { return Ok(None) };
        let Some((memory, fresh)) = factors.work(on_device, stream, bytes)? else {
            on_device.fall_back(id, format!("no room for {} of factors", ByteSize(bytes as u64).human()));
            return Ok(None);
        };
        // The count in memory that is reused is kept.
        let (sent, read, staging) = patch.send(stream, staging, memory, !fresh)?;
        factors.staging = Some((read, staging));
        Ok(Some(sent))
    }

    /// Queues the patch of the matrix that begins at `at` in `memory`, whose bytes have been sent. Returns the memory.
    pub(super) fn apply(
        &self,
        on_device: &OnDevice,
        stream: &dyn Stream,
        patch: SentPatch<'_>,
        (memory, at): (BufMut, usize),
        factors: &mut Factors,
    ) -> Result<BufMut> {
        let flight = self.kernels.patch(stream, patch, memory, at)?;
        factors.work.insert(stream.device(), flight.patch.into_memory());
        on_device.patched.fetch_add(1, Ordering::Relaxed);
        Ok(flight.weight.chain())
    }
}

impl Factors {
    /// Host memory for the factors of one tensor, reused if it is large enough; `None` if there is not enough.
    fn staging(&mut self, on_device: &OnDevice, near: DeviceId, bytes: usize) -> Result<Option<BufMut>> {
        let old = self.staging.take();
        let old =
            old.map(|(event, old)| event.wait(on_device.deadline).map(|()| old.try_reclaim().ok())).transpose()?;
        match old.flatten().filter(|old| old.bytes() >= bytes) {
            Some(old) => Ok(Some(old)),
            None => Ok(on_device.host.alloc_near(bytes, MemoryKind::Pinned, near).ok()),
        }
    }

    /// Memory for the factors on the stream's device, and whether it is newly allocated.
    fn work(&mut self, on_device: &OnDevice, stream: &dyn Stream, bytes: usize) -> Result<Option<(BufMut, bool)>> {
        let id = stream.device();
        match self.work.remove(&id) {
            Some(work) if work.bytes() >= bytes => return Ok(Some((work, false))),
            // The smaller buffer is released before a larger one is allocated.
            Some(work) => self.saturated += on_device.saturated(work, stream)?,
            None => {}
        }
        Ok(on_device.alloc(id, bytes).map(|memory| (memory, true)))
    }

    /// Releases all memory once it is unused, and returns the number of saturated values.
    pub(super) fn close(mut self, on_device: &OnDevice, streams: &BTreeMap<DeviceId, Arc<dyn Stream>>) -> Result<u64> {
        for (id, work) in std::mem::take(&mut self.work) {
            let stream = streams.get(&id).ok_or_else(|| Error::bug(format!("there is no stream of {id}")))?;
            self.saturated += on_device.saturated(work, &**stream)?;
        }
        Ok(self.saturated)
    }
}
