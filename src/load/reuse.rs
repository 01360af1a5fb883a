//! What a new model takes over from one that is there: memory that is shared, and bytes that are copied.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::Reservation;
use super::index::places;
use super::model::{Model, home_kind};
use super::store::{Home, SlotPool};
use super::worker::Job;
use crate::backend::{Buf, BufMut, Device, Health, Piece, Role, Route, Stream, Transfer};
use crate::checkpoint::{Layout, ModuleId, Per, TensorId};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::schedule::Groups;

/// Bytes in the memory of the model that another is made out of.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) buf: Buf,
    pub(super) place: Range<usize>,
}

/// What of a model that is there becomes a part of a new one.
#[derive(Debug)]
pub(super) struct Reuse {
    /// Which modules of the new model share memory.
    pub(super) groups: Groups,
    /// For each group the memory that is taken over as it is.
    shared: Vec<Option<Arc<Home>>>,
    /// For each tensor where its bytes are, if they are.
    held: Per<TensorId, Option<Held>>,
    pub(super) slots: Option<Arc<SlotPool>>,
}

impl Reuse {
    /// For a model that is made out of none.
    pub(super) fn nothing(layout: &Layout, plan: &Plan) -> Reuse {
        Reuse { groups: plan.groups(layout), shared: Vec::new(), held: Per::default(), slots: None }
    }

    /// What `base` has for a model of `layout` as `plan` places it. `same` says whether tensors, of the new model and of
    /// the base, have the same bytes. Nothing is taken from a device that is lost.
    pub(super) fn of(base: &Model, layout: &Layout, plan: &Plan, same: impl Fn(TensorId, TensorId) -> bool) -> Reuse {
        let lost: BTreeSet<DeviceId> =
            base.devices().filter(|device| device.health() != Health::Good).map(|device| device.id()).collect();
        let held = layout.tensor_ids().zip(layout.tensors()).map(|(id, tensor)| {
            let old = base.index().find(&tensor.name).filter(|&old| same(id, old))?;
            let home = base.home(base.index().owner(old)).filter(|home| !lost.contains(&home.device()))?;
            let place = base.index().place(old);
            (place.len() as u64 == tensor.bytes).then(|| Held { buf: home.clone(), place })
        });
        let held: Per<TensorId, Option<Held>> = held.collect();
        let groups = plan.groups(layout);
        let places = places(layout, &groups);
        let shared = (0..groups.len()).map(|group| {
            let members = groups.members(group);
            let mut own = members.iter().flat_map(|&module| layout.own_tensors(module)).peekable();
            let old = base.index().find(&layout.at(*own.peek()?).name)?;
            let home = base.shared_home(base.index().owner(old))?;
            let first = plan.at(members[0]);
            let alike = home.buf.device() == first.device
                && home.buf.bytes() as u64 == groups.bytes(group)
                && home.kind == home_kind(first);
            let here = |tensor: TensorId| {
                let held = held[tensor].as_ref();
                held.is_some_and(|held| held.buf.is_same(&home.buf) && held.place == places[tensor])
            };
            (alike && own.all(here)).then(|| Arc::clone(home))
        });
        let shared = shared.collect();
        let residency = base.residency();
        let slots_alike = residency.device().id() == plan.compute()
            && !lost.contains(&plan.compute())
            && residency.slots.shape == plan.slots()
            && residency.slots.is_whole();
        Reuse { groups, shared, held, slots: slots_alike.then(|| Arc::clone(&residency.slots)) }
    }

    /// The memory that a group has already.
    pub(super) fn shared(&self, group: usize) -> Option<&Arc<Home>> {
        self.shared.get(group)?.as_ref()
    }

    /// The modules that get memory, with their group's.
    fn placed(&self) -> impl Iterator<Item = ModuleId> {
        let anew = (0..self.groups.len()).filter(|&group| self.shared(group).is_none());
        anew.flat_map(|group| self.groups.members(group)).copied()
    }

    /// Where the bytes of a tensor are.
    pub(super) fn held(&self, tensor: TensorId) -> Option<&Held> {
        self.held.get(tensor)?.as_ref()
    }

    /// The devices of `base` whose memory bytes are taken from.
    pub(super) fn from(&self, base: &Model) -> Vec<Arc<dyn Device>> {
        let from: BTreeSet<DeviceId> = self.held.values().flatten().map(|held| held.buf.device()).collect();
        base.devices().filter(|device| from.contains(&device.id())).cloned().collect()
    }

    /// Whether no byte has to come from a file.
    pub(super) fn is_complete(&self, layout: &Layout) -> bool {
        layout.module_ids().flat_map(|module| layout.own_tensors(module)).all(|t| self.held(t).is_some())
    }

    /// What the weights of a plan need beyond what is shared.
    pub(super) fn needed(&self, plan: &Plan) -> BTreeMap<DeviceId, u64> {
        let mut needed = BTreeMap::new();
        for assignment in self.placed().map(|module| plan.at(module)) {
            *needed.entry(assignment.device).or_default() += assignment.bytes;
        }
        needed
    }
}

/// How bytes get from the devices of the base to those of the new model.
#[derive(Debug, Default)]
pub(super) struct Ways {
    /// Streams of the devices whose bytes go to the host, to stay there or on their way.
    pub(super) downloads: BTreeMap<DeviceId, Arc<dyn Stream>>,
    /// From where to where bytes go through the host.
    staged: BTreeSet<(DeviceId, DeviceId)>,
}

impl Ways {
    pub(super) fn of(reuse: &Reuse, layout: &Layout, plan: &Plan, to: &Reservation, base: &Model) -> Result<Ways> {
        let mut ways = Ways::default();
        let placed = reuse.placed().map(|module| plan.at(module));
        let pairs: BTreeSet<(DeviceId, DeviceId)> = placed
            .flat_map(|a| layout.own_tensors(a.index).filter_map(|t| Some((reuse.held(t)?.buf.device(), a.device))))
            .collect();
        for (from, target) in pairs.into_iter().filter(|(from, _)| !from.is_host()) {
            let source = base.device(from)?;
            let staged = match to.device(target) {
                Some(device) if !target.is_host() => matches!(device.route_from(&**source), Route::Staged(_)),
                _ => false,
            };
            if staged {
                ways.staged.insert((from, target));
            }
            if (staged || target.is_host()) && !ways.downloads.contains_key(&from) {
                ways.downloads.insert(from, source.stream(Role::Download)?);
            }
        }
        Ok(ways)
    }
}

impl Job<'_> {
    /// Copies what host memory holds. What another device holds comes later: [`bring_here`](Job::bring_here).
    pub(super) fn copy_here(&self, held: &Held, dst: &mut [u8]) -> Result<()> {
        if held.buf.device().is_host() {
            self.check_cancelled()?;
            let bytes = held.buf.host(self.loader.deadline)?;
            let bytes = bytes.ok_or_else(|| Error::bug("host memory that the host cannot address"))?;
            dst.copy_from_slice(&bytes[held.place.clone()]);
            self.copied(dst.len());
        }
        Ok(())
    }

    /// Copies to a group's host memory those of its tensors that another device holds.
    pub(super) fn bring_here(&self, group: usize, mut memory: BufMut) -> Result<BufMut> {
        let mut pieces: BTreeMap<DeviceId, Vec<Piece>> = BTreeMap::new();
        for (tensor, place) in self.own_tensors(group) {
            let Some(held) = self.reuse.held(tensor).filter(|held| !held.buf.device().is_host()) else { continue };
            let piece = Piece { src: held.buf.clone(), from: held.place.clone(), at: place.start };
            pieces.entry(held.buf.device()).or_default().push(piece);
            self.copied(place.len());
        }
        for (from, pieces) in pieces {
            self.check_cancelled()?;
            memory = self.download(from)?.send(Transfer::new(pieces, memory)?)?.chain();
        }
        Ok(memory)
    }

    /// Copies a tensor to another device's memory, straight or through the pool.
    pub(super) fn send_held(
        &self,
        held: &Held,
        place: Range<usize>,
        mut memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        let from = held.buf.device();
        let through_host = self.ways.staged.contains(&(from, memory.device()));
        let most = if through_host { self.pool.bytes_each().max(1) } else { place.len().max(1) };
        let mut at = 0;
        while at < place.len() {
            self.check_cancelled()?;
            let bytes = most.min(place.len() - at);
            let begin = held.place.start + at;
            let mut piece = Piece { src: held.buf.clone(), from: begin..begin + bytes, at: place.start + at };
            if through_host {
                piece.at = 0;
                let (staging, lent) = self.pool.acquire(self.loader.deadline)?;
                let staging = self.download(from)?.send(Transfer::new(vec![piece], staging)?)?.chain().freeze();
                let onward = Piece { src: staging.clone(), from: 0..bytes, at: place.start + at };
                let flight = stream.send(Transfer::new(vec![onward], memory)?)?;
                lent.give_back(flight.done().clone(), staging);
                memory = flight.chain();
            } else {
                memory = stream.send(Transfer::new(vec![piece], memory)?)?.chain();
            }
            at += bytes;
            self.copied(bytes);
        }
        Ok(memory)
    }

    fn download(&self, from: DeviceId) -> Result<&Arc<dyn Stream>> {
        self.ways.downloads.get(&from).ok_or_else(|| Error::bug(format!("there is no way from {from} to the host")))
    }
}
