//! The slots of a streamer: which layer each holds, and filling one again.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::Wanted;
use crate::backend::{Buf, BufMut, Device, FenceState, MemoryKind, Piece, Role, Route, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::Model;

/// The slots, and the streams that fill them.
pub(super) struct Slots {
    slots: Vec<Slot>,
    upload: Arc<dyn Stream>,
    /// Streams of devices whose memory the compute device cannot reach: their bytes go through the host.
    downloads: BTreeMap<DeviceId, Arc<dyn Stream>>,
    host: Arc<dyn Device>,
    /// The most bytes of one layer that go through the host: the size of every staging buffer, so that none has to
    /// be exchanged for a larger one while a copy still reads it.
    staging_bytes: usize,
}

/// Device memory for one layer, and host memory for the part of it that has to go through the host.
struct Slot {
    /// The layer that is in it or on its way to it; none after a copy that was refused.
    layer: Option<usize>,
    memory: Option<Buf>,
    staging: Option<Buf>,
}

impl Slots {
    pub(super) fn of(model: &Model, wanted: &[Vec<Wanted>]) -> Result<Slots> {
        let residency = model.residency();
        let device = residency.device();
        let upload = device.stream(Role::Upload)?;
        let mut downloads: BTreeMap<DeviceId, Arc<dyn Stream>> = BTreeMap::new();
        for home in wanted.iter().flatten().filter_map(|wanted| model.home(wanted.module)) {
            let source = model.device(home.device())?;
            let staged = matches!(device.route_from(&**source), Route::Staged(_));
            if staged && !downloads.contains_key(&source.id()) {
                downloads.insert(source.id(), source.stream(Role::Download)?);
            }
        }
        let through_host = |wanted: &Wanted| model.home(wanted.module).filter(|h| downloads.contains_key(&h.device()));
        let staged = |layer: &Vec<Wanted>| layer.iter().filter_map(through_host).map(Buf::bytes).sum();
        let staging_bytes = wanted.iter().map(staged).max().unwrap_or(0);
        let busy = || {
            Error::invalid(
                "the model, or one that shares its slots, is being streamed already; they are for one streamer",
            )
        };
        let memory = residency.take_slots().ok_or_else(busy)?;
        let slot = |memory| Slot { layer: None, memory: Some(memory), staging: None };
        let (slots, host) = (memory.into_iter().map(slot).collect(), Arc::clone(model.host()));
        Ok(Slots { slots, upload, downloads, host, staging_bytes })
    }

    /// The slot that holds `layer`, or will.
    pub(super) fn find(&self, layer: usize) -> Option<Buf> {
        self.slots.iter().find(|slot| slot.layer == Some(layer)).and_then(|slot| slot.memory.clone())
    }

    /// Forgets the layers whose copies failed, so that they are sent for again.
    pub(super) fn forget_failed(&mut self) {
        let failed = |memory: &Buf| memory.ready().any(|event| matches!(event.state(), FenceState::Failed(_)));
        for slot in self.slots.iter_mut().filter(|slot| slot.memory.as_ref().is_some_and(failed)) {
            slot.layer = None;
        }
    }

    /// Queues the copies of a layer into a slot that no guard holds and whose layer is not needed before it: `window`
    /// are the layers needed next, in order. Returns the bytes from each device.
    pub(super) fn fill(
        &mut self,
        model: &Model,
        layer: usize,
        wanted: &[Wanted],
        window: &[usize],
    ) -> Result<BTreeMap<DeviceId, u64>> {
        let Slots { slots, upload, downloads, host, staging_bytes } = self;
        let (slot, memory) = Slot::reclaim(slots, layer, window)?;
        let (mut pieces, mut staged) = (Vec::new(), Vec::new());
        let mut copied = BTreeMap::new();
        for &Wanted { module, at } in wanted {
            let Some(home) = model.home(module) else { continue };
            let piece = Piece { src: home.clone(), from: 0..home.bytes(), at };
            *copied.entry(home.device()).or_default() += home.bytes() as u64;
            if downloads.contains_key(&home.device()) { staged.push(piece) } else { pieces.push(piece) }
        }
        let through_host = match slot.stage(staged, downloads, host, *staging_bytes) {
            Ok(pieces) => pieces,
            Err(error) => {
                slot.memory = Some(memory.freeze());
                return Err(error);
            }
        };
        pieces.extend(through_host);
        match Transfer::new(pieces, memory).and_then(|transfer| upload.copy(transfer)) {
            Ok(flight) => {
                slot.memory = Some(flight.chain().freeze());
                slot.layer = Some(layer);
                Ok(copied)
            }
            Err(rejected) => {
                slot.memory = Some(rejected.dst.freeze());
                Err(rejected.error)
            }
        }
    }

    /// Leaves the slots to the next streamer. Guards that are still out keep theirs until they are dropped.
    pub(super) fn give_back(&mut self, model: &Model) {
        let memory = self.slots.drain(..).filter_map(|slot| slot.memory).collect();
        model.residency().return_slots(memory);
    }
}

impl Slot {
    /// The slot whose layer is needed last, with its memory, which can be written again.
    fn reclaim<'a>(slots: &'a mut [Slot], layer: usize, window: &[usize]) -> Result<(&'a mut Slot, BufMut)> {
        let turn = |layer: usize| window.iter().position(|&next| next == layer).unwrap_or(usize::MAX);
        let mut latest: Vec<_> = slots.iter().map(|slot| slot.layer.map_or(usize::MAX, turn)).enumerate().collect();
        latest.retain(|(_, needed)| *needed > turn(layer));
        latest.sort_by_key(|(_, needed)| Reverse(*needed));
        for (index, _) in latest {
            match slots[index].memory.take().map(Buf::try_reclaim) {
                Some(Ok(memory)) => {
                    slots[index].layer = None;
                    return Ok((&mut slots[index], memory));
                }
                Some(Err(held)) => slots[index].memory = Some(held),
                None => {}
            }
        }
        let count = slots.len();
        Err(Error::invalid(format!(
            "all {count} slots are held by guards; drop one before asking for another layer, or plan with a greater depth"
        )))
    }

    /// Queues the copies of what has to go through the host; the pieces from there on.
    fn stage(
        &mut self,
        mut staged: Vec<Piece>,
        downloads: &BTreeMap<DeviceId, Arc<dyn Stream>>,
        host: &Arc<dyn Device>,
        staging_bytes: usize,
    ) -> Result<Vec<Piece>> {
        if staged.is_empty() {
            return Ok(Vec::new());
        }
        let mut staging = match self.staging.take().map(Buf::try_reclaim) {
            Some(Ok(staging)) => staging,
            _ => host.alloc(staging_bytes, MemoryKind::Pinned)?,
        };
        let (mut onward, mut at) = (Vec::new(), 0);
        for piece in &mut staged {
            let bytes = piece.from.len();
            onward.push((at..at + bytes, piece.at));
            piece.at = at;
            at += bytes;
        }
        while let Some(first) = staged.first().map(|piece| piece.src.device()) {
            let (same, others) = staged.into_iter().partition(|piece: &Piece| piece.src.device() == first);
            staging = downloads[&first].copy(Transfer::new(same, staging)?)?.chain();
            staged = others;
        }
        let staging = staging.freeze();
        self.staging = Some(staging.clone());
        Ok(onward.into_iter().map(|(from, at)| Piece { src: staging.clone(), from, at }).collect())
    }
}
