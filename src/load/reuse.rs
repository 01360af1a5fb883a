//! What a new model reuses of the model it is derived from: memory to share, and bytes to copy.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::Reservation;
use super::allocator::Allocators;
use super::compressed::CompressedForm;
use super::model::{Model, home_kind};
use super::store::{Home, SlotPool};
use super::worker::{Job, Tensors};
use crate::backend::{Buf, BufMut, Device, Health, MemoryKind, Piece, Role, Route, Stream, Transfer};
use crate::checkpoint::{Layout, ModuleId, Per, Stored, TensorId};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::limits::STAGING_BYTES;
use crate::plan::{Assignment, Plan};
use crate::schedule::{Compressed, Groups, Place};

/// A tensor's bytes in the memory of the base, the model that another is derived from.
#[derive(Clone, Debug)]
pub(super) struct BaseBytes {
    pub(super) buf: Buf,
    pub(super) range: Range<usize>,
    /// The device where they live: the buffer may be one that the host reads them through.
    pub(super) home: DeviceId,
}

/// The parts of a base that a new model reuses.
#[derive(Debug)]
pub(super) struct Reuse {
    /// The new model's groups of modules that lie in one buffer.
    pub(super) groups: Groups,
    /// For each group, the base's memory if it is shared.
    shared: Vec<Option<Arc<Home>>>,
    /// For each tensor, its bytes in the base, if the base has them.
    in_base: Per<TensorId, Option<BaseBytes>>,
    pub(super) slots: Option<Arc<SlotPool>>,
    /// For each group, memory of the base that is filled again, if there is any.
    refilled: Vec<Mutex<Option<Vec<BufMut>>>>,
    /// The tensors that are in such memory already.
    kept: BTreeSet<TensorId>,
    /// For each group, whether its bytes stay in the model's own files.
    in_files: Vec<bool>,
    /// The new model's compressed tensors.
    pub(super) compressed: Compressed,
    /// For each tensor, its compressed form in the base, if the base has that. Empty without a base.
    compressed_in_base: Per<TensorId, Option<(CompressedForm, Range<usize>)>>,
}

impl Reuse {
    /// No reuse, for a model without a base.
    pub(super) fn nothing(layout: &Layout, plan: &Plan) -> Reuse {
        let groups = plan.groups(layout);
        let compressed = plan.compressed(layout, &groups);
        Reuse::with((groups, compressed), Vec::new(), Per::default(), None)
    }

    fn with(
        (groups, compressed): (Groups, Compressed),
        shared: Vec<Option<Arc<Home>>>,
        in_base: Per<TensorId, Option<BaseBytes>>,
        slots: Option<Arc<SlotPool>>,
    ) -> Reuse {
        let (refilled, kept, in_files, compressed_in_base) = Default::default();
        Reuse { groups, shared, in_base, slots, refilled, kept, in_files, compressed, compressed_in_base }
    }

    /// Has the groups that `in_files` names stay in the model's own files, unless the base's memory is shared for them.
    pub(super) fn leaving(self, in_files: Vec<bool>) -> Reuse {
        Reuse { in_files, ..self }
    }

    /// Whether a group's bytes stay in the model's own files.
    pub(super) fn is_in_files(&self, group: usize) -> bool {
        self.in_files.get(group).copied().unwrap_or(false) && self.shared(group).is_none()
    }

    /// What `base` has for a model of `layout` placed by `plan`. `same` says whether a tensor of the new model has the bytes
    /// of a tensor of the base. Nothing is reused from a lost device, and no memory is shared that is from another allocator.
    pub(super) fn of(
        base: &Model,
        layout: &Layout,
        plan: &Plan,
        allocators: &Allocators,
        same: impl Fn(TensorId, TensorId) -> bool,
    ) -> Reuse {
        let lost: BTreeSet<DeviceId> =
            base.devices().filter(|device| device.health() != Health::Good).map(|device| device.id()).collect();
        let in_base = layout.tensor_ids().zip(layout.tensors()).map(|(id, tensor)| {
            let old = base.index().find(&tensor.name).filter(|&old| same(id, old))?;
            let home = base.home(base.index().owner(old))?;
            let (buf, range) = home.find(&base.index().place(old))?;
            let home = home.device();
            let here = range.len() as u64 == tensor.bytes && !lost.contains(&home);
            here.then(|| BaseBytes { buf: buf.clone(), range, home })
        });
        let in_base: Per<TensorId, Option<BaseBytes>> = in_base.collect();
        let groups = plan.groups(layout);
        let (ranges, compressed) = (groups.tensor_ranges(layout), plan.compressed(layout, &groups));
        let compressed_in_base = layout.tensor_ids().map(|tensor| {
            in_base[tensor].as_ref()?;
            let old = base.index().find(&layout.at(tensor).name)?;
            let form = base.home(base.index().owner(old))?.compressed.as_ref()?;
            let place = base.index().stored(old)?;
            let alike = compressed.place(tensor).is_some_and(|new| new.alike(place));
            alike.then(|| (form.clone(), place.range.clone()))
        });
        let compressed_in_base = compressed_in_base.collect();
        let shared = (0..groups.len()).map(|group| {
            let members = groups.members(group);
            let mut own = members.iter().flat_map(|&module| layout.own_tensors(module)).peekable();
            let old = base.index().find(&layout.at(*own.peek()?).name)?;
            let home = base.home(base.index().owner(old))?;
            let alike = alike(home, base, (&groups, &compressed), group, plan, allocators);
            let in_home = |tensor: TensorId| {
                let (bytes, place) = (in_base[tensor].as_ref(), home.find(&ranges[tensor]));
                bytes.zip(place).is_some_and(|(bytes, (buf, range))| bytes.buf.is_same(buf) && bytes.range == range)
            };
            (alike && own.all(in_home)).then(|| Arc::clone(home))
        });
        let shared = shared.collect();
        let residency = base.residency();
        let slots_alike = residency.device().id() == plan.compute()
            && !lost.contains(&plan.compute())
            && residency.slots.shape == plan.slots()
            && residency.slots.blocks == plan.slot_blocks(layout)
            && allocators.agree(base.allocators(), plan.compute())
            && residency.slots.is_whole();
        let slots = slots_alike.then(|| Arc::clone(&residency.slots));
        Reuse { compressed_in_base, ..Reuse::with((groups, compressed), shared, in_base, slots) }
    }

    /// The compressed form of a tensor in the base.
    pub(super) fn compressed_in_base(&self, tensor: TensorId) -> Option<&(CompressedForm, Range<usize>)> {
        self.compressed_in_base.get(tensor)?.as_ref()
    }

    /// Whether a group is compressed.
    pub(super) fn is_compressed(&self, group: usize) -> bool {
        self.compressed.bytes(group).is_some()
    }

    /// Takes memory of the base to be filled again: that of groups of the same modules in the same place, some of whose
    /// tensors change, if no other model has it.
    pub(super) fn refill(&mut self, base: &mut Model, layout: &Layout, plan: &Plan, allocators: &Allocators) {
        let ranges = self.groups.tensor_ranges(layout);
        for group in 0..self.groups.len() {
            if self.is_in_files(group) || self.is_compressed(group) {
                continue;
            }
            let members = self.groups.members(group);
            let own: Vec<TensorId> = members.iter().flat_map(|&module| layout.own_tensors(module)).collect();
            let in_place = |home: &Home, tensor: TensorId| {
                let old = base.index().find(&layout.at(tensor).name)?;
                let (buf, range) = base.find(base.index().owner(old), &base.index().place(old))?;
                let (same, place) = home.find(&ranges[tensor])?;
                Some(buf.is_same(same) && range == place)
            };
            let old = own.first().and_then(|&first| base.index().find(&layout.at(first).name));
            let owner = old.map(|old| base.index().owner(old)).filter(|_| self.shared(group).is_none());
            let works = |id: DeviceId| base.devices().any(|d| d.id() == id && d.health() == Health::Good);
            let fits = |home: &&Arc<Home>| {
                works(home.device())
                    && !home.in_files
                    && alike(home, base, (&self.groups, &self.compressed), group, plan, allocators)
                    && own.iter().all(|&tensor| in_place(home, tensor) == Some(true))
            };
            let Some(owner) = owner.filter(|&owner| base.home(owner).filter(fits).is_some()) else { continue };
            let Some(home) = base.take_home(owner) else { continue };
            let unchanged =
                own.iter().filter(|&&tensor| self.in_base[tensor].take().is_some()).copied().collect::<Vec<_>>();
            // Work whose end is unknown may hold a buffer still. Then the group gets new memory, and is read whole.
            let memory = home.into_bufs().into_iter().map(Buf::try_reclaim).collect::<Result<Vec<_>, _>>();
            if let Ok(memory) = memory {
                self.refilled.resize_with(self.groups.len(), Mutex::default);
                self.refilled[group] = Mutex::new(Some(memory));
                self.kept.extend(unchanged);
            }
        }
    }

    /// The memory of the base that a group is filled into again. It is given once.
    pub(super) fn take_refilled(&self, group: usize) -> Option<Vec<BufMut>> {
        self.refilled.get(group)?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether a tensor is in such memory already.
    pub(super) fn is_kept(&self, tensor: TensorId) -> bool {
        self.kept.contains(&tensor)
    }

    /// The memory that a group shares with the base.
    pub(super) fn shared(&self, group: usize) -> Option<&Arc<Home>> {
        self.shared.get(group)?.as_ref()
    }

    /// The modules that get new memory: those of groups that are neither shared nor filled again, and that do not stay in files.
    fn placed(&self) -> impl Iterator<Item = ModuleId> {
        let refilled = |group: usize| {
            let memory = self.refilled.get(group).map(|memory| memory.lock().unwrap_or_else(PoisonError::into_inner));
            memory.is_some_and(|memory| memory.is_some())
        };
        let unshared = (0..self.groups.len())
            .filter(move |&group| self.shared(group).is_none() && !refilled(group) && !self.is_in_files(group));
        unshared.flat_map(|group| self.groups.members(group)).copied()
    }

    /// The bytes of a tensor in the base.
    pub(super) fn in_base(&self, tensor: TensorId) -> Option<&BaseBytes> {
        self.in_base.get(tensor)?.as_ref()
    }

    /// The devices of `base` that bytes are copied from.
    pub(super) fn from(&self, base: &Model) -> Vec<Arc<dyn Device>> {
        let from: BTreeSet<DeviceId> = self.in_base.values().flatten().map(|bytes| bytes.home).collect();
        base.devices().filter(|device| from.contains(&device.id())).cloned().collect()
    }

    /// Whether every byte is in the base, so that no file is read.
    pub(super) fn is_complete(&self, layout: &Layout) -> bool {
        layout.module_ids().flat_map(|module| layout.own_tensors(module)).all(|t| self.in_base(t).is_some())
    }

    /// The bytes that a plan needs on each device, without shared memory.
    pub(super) fn needed_with_slots(&self, plan: &Plan) -> BTreeMap<DeviceId, u64> {
        let mut needed = self.needed(plan);
        if self.slots.is_none() {
            let slots = needed.entry(plan.compute()).or_default();
            *slots = slots.saturating_add(plan.slots().bytes());
        }
        needed
    }

    /// The bytes that a plan's weights need on each device, without shared memory.
    pub(super) fn needed(&self, plan: &Plan) -> BTreeMap<DeviceId, u64> {
        let mut needed = BTreeMap::new();
        for assignment in self.placed().map(|module| plan.at(module)) {
            *needed.entry(assignment.device).or_default() += assignment.taken();
        }
        needed
    }
}

impl Model {
    /// How this model holds the tensors of `layout` that it has compressed, or tried to, of which that layout has estimates. `same` says
    /// whether a tensor has the bytes of one of this model.
    pub(super) fn codes_for(
        &self,
        layout: &Layout,
        same: impl Fn(TensorId, TensorId) -> bool,
    ) -> Vec<(TensorId, Stored)> {
        let known = |tensor: TensorId| {
            layout.stored(tensor).filter(|stored| stored.is_made)?;
            let old = self.index().find(&layout.at(tensor).name).filter(|&old| same(tensor, old))?;
            let kept = |Place { range, is_code }: &Place| Stored {
                bytes: range.len() as u64,
                is_code: *is_code,
                is_made: true,
            };
            let plain = || self.layout().stored(old).filter(|stored| stored.is_made && !stored.is_code);
            Some((tensor, self.index().stored(old).map(kept).or_else(plain)?))
        };
        layout.tensor_ids().filter_map(known).collect()
    }
}

/// Whether a home of the base is of the kind that a group of the new model needs.
fn alike(
    home: &Home,
    base: &Model,
    (groups, compressed): (&Groups, &Compressed),
    group: usize,
    plan: &Plan,
    allocators: &Allocators,
) -> bool {
    let first = groups.members(group)[0];
    let planned = plan.at(first);
    home.device() == planned.device
        && home.compressed.as_ref().map(|form| form.buf.bytes() as u64) == compressed.bytes(group)
        && home.bytes() == groups.bytes(group)
        && home.kind == home_kind(planned)
        && home.apart == plan.is_apart(first)
        && (!home.apart || allocators.agree(base.allocators(), planned.device))
}

/// The routes of bytes from the devices of the base to those of the new model.
#[derive(Debug, Default)]
pub(super) struct CopyRoutes {
    /// The download streams of the devices whose bytes go to the host, or through it.
    pub(super) downloads: BTreeMap<DeviceId, Arc<dyn Stream>>,
    /// The pairs of devices whose copies go through the host.
    staged: BTreeSet<(DeviceId, DeviceId)>,
}

impl CopyRoutes {
    pub(super) fn of(
        reuse: &Reuse,
        layout: &Layout,
        plan: &Plan,
        to: &Reservation,
        base: &Model,
    ) -> Result<CopyRoutes> {
        let mut routes = CopyRoutes::default();
        let placed = reuse.placed().map(|module| plan.at(module));
        // What is compressed on its way is on the host meanwhile.
        let encodes = |a: &Assignment| reuse.is_compressed(reuse.groups.of(a.index));
        let pairs: BTreeSet<(DeviceId, DeviceId, bool)> = placed
            .flat_map(|a| {
                let from = layout.own_tensors(a.index).filter_map(|t| Some(reuse.in_base(t)?.buf.device()));
                from.map(move |from| (from, a.device, encodes(a)))
            })
            .collect();
        for (from, target, encodes) in pairs.into_iter().filter(|(from, ..)| !from.is_host()) {
            let source = base.device(from)?;
            let staged = match to.device(target) {
                Some(device) if !target.is_host() => matches!(device.route_from(&**source), Route::Staged(_)),
                _ => false,
            };
            if staged {
                routes.staged.insert((from, target));
            }
            if (staged || encodes || target.is_host()) && !routes.downloads.contains_key(&from) {
                routes.downloads.insert(from, source.stream(Role::Download)?);
            }
        }
        Ok(routes)
    }
}

impl Job<'_> {
    /// Copies a tensor that the base has in host memory. What another device holds is copied by
    /// [`download_block`](Job::download_block).
    pub(super) fn copy_on_host(&self, base: &BaseBytes, dst: &mut [u8]) -> Result<()> {
        if base.buf.device().is_host() {
            self.check_cancelled()?;
            if !base.buf.read_into(base.range.clone(), dst, self.loader.deadline)? {
                return Err(Error::bug("host memory that the host cannot address"));
            }
            self.copied(dst.len());
        }
        Ok(())
    }

    /// Copies to a block of host memory the tensors that the base has on other devices.
    pub(super) fn download_block(&self, tensors: &Tensors, mut memory: BufMut) -> Result<BufMut> {
        let mut pieces: BTreeMap<DeviceId, Vec<Piece>> = BTreeMap::new();
        for (tensor, range) in tensors.iter().cloned() {
            let Some(base) = self.reuse.in_base(tensor).filter(|base| !base.buf.device().is_host()) else { continue };
            let piece = Piece { src: base.buf.clone(), from: base.range.clone(), at: range.start };
            pieces.entry(base.buf.device()).or_default().push(piece);
            self.copied(range.len());
        }
        for (from, pieces) in pieces {
            self.check_cancelled()?;
            if memory.is_locked() {
                pieces.into_iter().try_for_each(|piece| self.download_locked(from, piece, &mut memory))?;
                continue;
            }
            memory = self.download(from)?.send(Transfer::new(pieces, memory)?)?.chain();
        }
        Ok(memory)
    }

    /// Copies bytes of the base on another device to memory that its owner locks, through a buffer, since a device's copies
    /// know no locks.
    fn download_locked(&self, from: DeviceId, piece: Piece, memory: &mut BufMut) -> Result<()> {
        let Piece { src, from: range, at } = piece;
        let most = range.len().min(STAGING_BYTES);
        let mut staging = self.host.alloc_near(most, MemoryKind::Pinned, from)?;
        for done in (0..range.len()).step_by(most.max(1)) {
            self.check_cancelled()?;
            let (bytes, begin) = (most.min(range.len() - done), range.start + done);
            let part = Piece { src: src.clone(), from: begin..begin + bytes, at: 0 };
            staging = self.download(from)?.send(Transfer::new(vec![part], staging)?)?.wait(self.loader.deadline)?;
            let landed = staging.host_mut().ok_or_else(|| Error::bug("staging memory that the host cannot address"))?;
            let written = memory.write_with(|dst| dst[at + done..][..bytes].copy_from_slice(&landed[..bytes]))?;
            written.ok_or_else(|| Error::bug("host memory that the host cannot address"))?;
        }
        Ok(())
    }

    /// Copies bytes of the base to a staging buffer, through which they go on to another device.
    fn stage(&self, base: &Buf, range: Range<usize>, mut staging: BufMut) -> Result<Buf> {
        if base.device().is_host() {
            let dst = staging.host_mut().ok_or_else(|| Error::bug("staging memory that the host cannot address"))?;
            let bytes = range.len();
            if !base.read_into(range, &mut dst[..bytes], self.loader.deadline)? {
                return Err(Error::bug("host memory that the host cannot address"));
            }
            return Ok(staging.freeze());
        }
        let from = base.device();
        let piece = Piece { src: base.clone(), from: range, at: 0 };
        Ok(self.download(from)?.send(Transfer::new(vec![piece], staging)?)?.chain().freeze())
    }

    /// Copies a tensor from the base to another device's memory, straight or through staging buffers.
    pub(super) fn send_from_base(
        &self,
        base: &BaseBytes,
        range: Range<usize>,
        mut memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        let from = base.buf.device();
        // A device's copies know no locks, and do not decode.
        let block = base.buf.block();
        let by_host = from.is_host() && (block.is_locked() || block.is_elsewhere());
        let through_host = by_host || self.routes.staged.contains(&(from, memory.device()));
        let most = if through_host { self.pool.bytes_each().max(1) } else { range.len().max(1) };
        let mut at = 0;
        while at < range.len() {
            self.check_cancelled()?;
            let bytes = most.min(range.len() - at);
            let begin = base.range.start + at;
            if through_host {
                let (staging, lease) = self.pool.acquire(self.loader.deadline)?;
                let staging = self.stage(&base.buf, begin..begin + bytes, staging)?;
                let onward = Piece { src: staging.clone(), from: 0..bytes, at: range.start + at };
                let flight = stream.send(Transfer::new(vec![onward], memory)?)?;
                lease.give_back(flight.done().clone(), staging);
                memory = flight.chain();
            } else {
                let piece = Piece { src: base.buf.clone(), from: begin..begin + bytes, at: range.start + at };
                memory = stream.send(Transfer::new(vec![piece], memory)?)?.chain();
            }
            at += bytes;
            self.copied(bytes);
        }
        Ok(memory)
    }

    fn download(&self, from: DeviceId) -> Result<&Arc<dyn Stream>> {
        self.routes.downloads.get(&from).ok_or_else(|| Error::bug(format!("there is no way from {from} to the host")))
    }
}
