//! The routes by which bytes reach the compute device: one lane per source device and kind of route, each with its own
//! streams, so that the parts of a layer are copied concurrently.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::report::{LaneReport, Via};
use super::through_host::ThroughHost;
use super::verdict::{Places, Verdict};
use crate::backend::{Buf, BufMut, Device, ExtentPart, MemoryBlock, Piece, Rejected, Role, Route, Stream, Transfer};
use crate::checkpoint::{ModuleId, Per};
use crate::device::{DeviceId, DeviceKind};
use crate::dtype::BlockSize;
use crate::error::{Error, Result};
use crate::load::Model;
use crate::schedule::{Contents, Form, Landed, Part, Round, Slice, Unpacked, rounds};
use crate::transfer::{
    Arriving, Engine, Landing, Order, Ordered, Packed, PendingOrder, StagingLane, Values, dequantise,
};

/// Bytes with the same key share a lane.
type LaneKey = (DeviceId, Via);

/// The lanes that one streamer uses.
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    by_key: BTreeMap<LaneKey, usize>,
    /// The buffers in which tensors arrive that are unpacked, and the bytes of each. There is one for each lane, unless memory
    /// that the plan has as pinned is not, and has a lane of its own; then lanes take turns.
    landings: Vec<Arc<Landing>>,
    /// Where the compute device tells the verdict on codes that live there: a part of the first one.
    verdict_here: Option<Landing>,
    /// The bytes of each that tensors land in, and the streams that unpack them.
    room: u64,
    unpackers: Vec<Arc<dyn Stream>>,
    /// What verdicts on codes need, if there are any.
    verdicts: Option<Verdicts>,
    device: Arc<dyn Device>,
    host: Arc<dyn Device>,
    /// The device's staging engine and this streamer's client number. `None` while no lane is staged.
    engine: Option<(Arc<Engine>, u64)>,
}

/// What verdicts on codes need.
struct Verdicts {
    places: Arc<Places>,
    /// The stream that copies them to the host.
    down: Arc<dyn Stream>,
    /// What verdicts begin with, on the host.
    zeros: Buf,
}

/// The route from one device.
struct Lane {
    from: DeviceId,
    via: Via,
    route: LaneRoute,
    /// The most bytes that one layer sends along this lane.
    largest: usize,
    /// The number of the lane among those whose bytes land; `None` if none do.
    landing: Option<usize>,
    /// Whether it brings any codes.
    has_codes: bool,
}

/// What a part of a layer is that lives on a disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Read {
    /// The bytes that are read.
    pub(super) disk: u64,
    /// The bytes that the host has kept.
    pub(super) kept: u64,
}

enum LaneRoute {
    /// From the compute device's own memory.
    Local(Arc<dyn Stream>),
    Direct(Arc<dyn Stream>),
    ThroughHost(ThroughHost),
    Staged(Arc<StagingLane>),
}

impl Lanes {
    pub(super) fn new(model: &Model) -> Result<Lanes> {
        let (device, host) = (Arc::clone(model.residency().device()), Arc::clone(model.host()));
        let (lanes, by_key, landings, room) = (Vec::new(), BTreeMap::new(), Vec::new(), model.plan().landing_room());
        let unpackers = (0..model.plan().slots().landings).map(|_| device.stream(Role::Upload));
        let unpackers = unpackers.collect::<Result<_>>()?;
        let verdicts = model.plan().is_compressed().then(|| Verdicts::new(&device, &host)).transpose()?;
        Ok(Lanes { lanes, by_key, landings, verdict_here: None, room, unpackers, verdicts, device, host, engine: None })
    }

    /// Gives the lanes their landing buffers. Returns those that are in use, which are lost.
    pub(super) fn land(&mut self, memory: Vec<Buf>) -> Vec<Buf> {
        let mut in_use = Vec::new();
        let landing = |memory: Buf| memory.try_reclaim().map_err(|memory| in_use.push(memory)).ok();
        let memory = memory.into_iter().filter_map(landing).zip(&self.unpackers);
        let landings = memory.map(|(memory, stream)| match &self.verdicts {
            Some(verdicts) => Landing::with_verdict(memory, Arc::clone(stream), &verdicts.zeros),
            None => Landing::new(memory, Arc::clone(stream)),
        });
        self.landings = landings.map(Arc::new).collect();
        let local = self.lanes.iter().find_map(|lane| match &lane.route {
            LaneRoute::Local(stream) if lane.has_codes => Some(stream),
            _ => None,
        });
        let verdicts = self.verdicts.as_ref().zip(self.landings.first());
        self.verdict_here = local
            .zip(verdicts)
            .and_then(|(stream, (verdicts, landing))| landing.split_verdict(Arc::clone(stream), &verdicts.zeros));
        in_use
    }

    /// Takes the landing buffers back, but for those that a lane has not let go of.
    pub(super) fn take_landings(&mut self) -> Vec<Buf> {
        let here = self.verdict_here.take();
        // Of a buffer that a lane has not let go of nothing comes back.
        if let Some((landing, here)) = self.landings.first_mut().and_then(Arc::get_mut).zip(here) {
            landing.join(here.into_memory());
        }
        let memory = |landing: Arc<Landing>| Arc::into_inner(landing)?.into_memory().map(BufMut::freeze);
        std::mem::take(&mut self.landings).into_iter().filter_map(memory).collect()
    }

    /// The lane of each module that is streamed and owns bytes. Lanes are numbered by the first module that uses them.
    pub(super) fn of_modules(&mut self, model: &Model) -> Result<Per<ModuleId, Option<usize>>> {
        model.layout().module_ids().map(|module| self.lane_of(model, module)).collect()
    }

    /// The lane of a module, created for the first module that needs it.
    fn lane_of(&mut self, model: &Model, module: ModuleId) -> Result<Option<usize>> {
        let fetched = model.plan().origin(module).is_some() && model.layout().at(module).bytes > 0;
        let Some(home) = model.stored_bufs(module).next().filter(|_| fetched) else { return Ok(None) };
        model.stored_bufs(module).for_each(|home| home.block().keep_when_read());
        let key = (home.device(), via(model, home)?);
        if let Some(&lane) = self.by_key.get(&key) {
            return Ok(Some(lane));
        }
        let (from, via) = key;
        let source = model.device(from)?;
        let route = match via {
            Via::Local => LaneRoute::Local(self.device.stream(Role::Upload)?),
            Via::Direct => LaneRoute::Direct(self.device.stream(Role::Upload)?),
            Via::Host => {
                let (down, up) = (source.stream(Role::Download)?, self.device.stream(Role::Upload)?);
                LaneRoute::ThroughHost(ThroughHost::new(down, up, Arc::clone(&self.host)))
            }
            Via::Staging => LaneRoute::Staged(self.engine()?.lane(source)?),
        };
        self.lanes.push(Lane { from, via, route, largest: 0, landing: None, has_codes: false });
        self.by_key.insert(key, self.lanes.len() - 1);
        Ok(Some(self.lanes.len() - 1))
    }

    /// Records the most bytes that one layer sends along each lane, and which lanes need a landing buffer.
    pub(super) fn expect(&mut self, contents: &Contents) {
        let mut landings = 0;
        for part in contents.iter().flat_map(|content| &content.parts) {
            let lane = &mut self.lanes[part.lane];
            lane.largest = lane.largest.max(part.copied() as usize);
            lane.has_codes |= part.has_codes();
            if !part.unpacked.is_empty() && lane.via != Via::Local && lane.landing.is_none() {
                lane.landing = Some(landings);
                landings += 1;
            }
        }
    }

    /// Whether a lane's bytes cross a link.
    pub(super) fn is_local(&self, lane: usize) -> bool {
        self.lanes[lane].via == Via::Local
    }

    /// Whether any bytes come from a disk.
    pub(super) fn reads_disk(&self) -> bool {
        self.lanes.iter().any(|lane| lane.from.kind() == DeviceKind::Disk)
    }

    /// What the device has read itself of files, and why not more; `None` if it reads none.
    pub(super) fn device_reads(&self) -> Option<(u64, Vec<String>)> {
        self.lanes.iter().find_map(|lane| match &lane.route {
            LaneRoute::Staged(staging) => staging.device_reads(),
            _ => None,
        })
    }

    /// Has the device prepare memory that it reads files into, if it reads any. The memory is prepared while the values live.
    pub(super) fn prepare(&self, memory: impl Iterator<Item = Arc<MemoryBlock>>) -> Vec<Box<dyn Any + Send + Sync>> {
        let reads = self.device.file_reads().filter(|reads| self.device_reads().is_some() && reads.ready().is_ok());
        let Some(reads) = reads else { return Vec::new() };
        let register = |memory: Arc<MemoryBlock>| match reads.register_memory(&memory) {
            Ok(registered) => Some(registered),
            Err(why) => {
                tracing::debug!(device = %self.device.id(), %why, "reads of files pass another buffer of the device");
                None
            }
        };
        memory.filter_map(register).collect()
    }

    /// The bytes that a part of a layer brings from a disk, were it fetched now, and those that the host has kept of it.
    pub(super) fn read(&self, model: &Model, part: &Part) -> Read {
        let mut read = Read::default();
        if self.lanes[part.lane].from.kind() != DeviceKind::Disk {
            return read;
        }
        for slice in part.slices.iter().chain(part.unpacked.iter().map(|tensor| &tensor.slice)) {
            let (bytes, home) = (slice.range.len() as u64, model.find_stored(slice.module, &slice.range));
            match home {
                Some((home, _)) if home.block().is_kept() => read.kept += bytes,
                Some((home, range)) => {
                    read.disk =
                        read.disk.saturating_add(home.extents(&range).map_or(bytes, |extents| stored(&extents)));
                }
                None => {}
            }
        }
        read
    }

    pub(super) fn is_staged(&self, lane: usize) -> bool {
        matches!(self.lanes[lane].route, LaneRoute::Staged(_))
    }

    /// Queues the copies of a part of a layer, and the computation of what is unpacked. Returns the part's memory, and the verdict on
    /// its codes.
    ///
    /// # Errors
    /// Carries the memory; copies into it may already be in flight.
    pub(super) fn queue(
        &self,
        model: &Model,
        part: &Part,
        mut dst: BufMut,
    ) -> Result<(BufMut, Option<Arc<Verdict>>), Box<Rejected>> {
        let lane = &self.lanes[part.lane];
        if !part.slices.is_empty() {
            dst = lane.copy(model, &part.slices, dst)?;
        }
        if let LaneRoute::Local(stream) = &lane.route {
            return self.unpack_here(model, part, stream, dst);
        }
        if part.unpacked.is_empty() {
            return Ok((dst, None));
        }
        let verdicts = self.verdicts.as_ref().filter(|_| part.has_codes());
        let begin = || Ok((self.landing(lane).ok_or_else(no_landing)?, verdicts.map(Verdicts::place).transpose()?));
        let (landing, place) = match begin() {
            Ok(begun) => begun,
            Err(error) => return Err(Box::new(Rejected { error, dst })),
        };
        let rounds = rounds(&part.unpacked, self.room);
        let rounds: Vec<_> = rounds.iter().map(|round| arriving(model, round, round.slices())).collect();
        let fill = |slices: &Vec<Slice>, memory| {
            lane.copy(model, slices, memory).map_err(|rejected| (rejected.error, Some(rejected.dst)))
        };
        let (place, down) = place.unzip();
        let verdict = place.zip(down.as_deref());
        let (dst, verdict) = landing.pass(&*self.device, &rounds, dst, verdict, fill)?;
        Ok((dst, verdict.zip(verdicts).map(|(place, verdicts)| verdicts.places.verdict(place))))
    }

    /// Where the verdicts of staging lanes are from.
    pub(super) fn places(&self) -> Option<Arc<Places>> {
        self.verdicts.as_ref().map(|verdicts| Arc::clone(&verdicts.places))
    }

    /// Queues the computation of what is unpacked from the memory where it lives. Returns the verdict on the codes among it, too.
    fn unpack_here(
        &self,
        model: &Model,
        part: &Part,
        stream: &Arc<dyn Stream>,
        dst: BufMut,
    ) -> Result<(BufMut, Option<Arc<Verdict>>), Box<Rejected>> {
        let tensor = |tensor: &Unpacked| {
            let Slice { module, range, .. } = &tensor.slice;
            let (home, range) = model.find_stored(*module, range)?;
            let whole = 0..tensor.slice.range.len();
            Some((values_of(model, &Landed { tensor, range: whole, at: range.start, code: None }), home.clone()))
        };
        let Some(tensors) = part.unpacked.iter().map(tensor).collect::<Option<Vec<_>>>() else {
            return Err(Box::new(Rejected { error: Error::bug("tensors to unpack that live nowhere"), dst }));
        };
        if !part.has_codes() {
            let unpack =
                |dst, (values, home): (Values, Buf)| dequantise((&*self.device, &**stream), &values, home, dst);
            return Ok((tensors.into_iter().try_fold(dst, unpack)?, None));
        }
        let begin = || {
            let (here, verdicts) = self.verdict_here.as_ref().zip(self.verdicts.as_ref()).ok_or_else(no_landing)?;
            Ok((here, verdicts, verdicts.place()?))
        };
        let (here, verdicts, (place, down)) = match begin() {
            Ok(begun) => begun,
            Err(error) => return Err(Box::new(Rejected { error, dst })),
        };
        let (dst, place) = here.decode_here(&*self.device, &tensors, dst, (place, &*down))?;
        Ok((dst, place.map(|place| verdicts.places.verdict(place))))
    }

    /// The landing buffer of a lane.
    fn landing(&self, lane: &Lane) -> Option<&Arc<Landing>> {
        self.landings.get(lane.landing? % self.landings.len().max(1))
    }

    /// Submits a part of a layer to its staging lane.
    pub(super) fn order(
        &self,
        model: &Model,
        part: &Part,
        dst: BufMut,
        urgent: bool,
        deadline: Duration,
    ) -> Result<PendingOrder> {
        let lane = &self.lanes[part.lane];
        let (LaneRoute::Staged(staging), Some((_, client))) = (&lane.route, &self.engine) else {
            return Err(Error::bug("a part that needs no staging was given to a staging lane"));
        };
        let rounds = rounds(&part.unpacked, self.room);
        let rounds = rounds.iter().map(|round| arriving(model, round, pieces(model, &round.slices()))).collect();
        let landing = self.landing(lane).filter(|_| !part.unpacked.is_empty()).cloned();
        let verdicts = self.verdicts.as_ref().filter(|_| part.has_codes());
        let verdict = verdicts.map(Verdicts::place).transpose()?;
        let bytes = Ordered { pieces: pieces(model, &part.slices), rounds, landing, verdict };
        Ok(staging.submit(Order { client: *client, dst, bytes, urgent, deadline }))
    }

    /// The lanes' entries of a new report, with nothing sent yet.
    pub(super) fn report(&self) -> Vec<LaneReport> {
        let to = self.device.id();
        let of = |lane: &Lane| LaneReport { from: lane.from, to, via: lane.via, fills: 0, bytes: 0, read: 0, kept: 0 };
        self.lanes.iter().map(of).collect()
    }

    fn engine(&mut self) -> Result<&Arc<Engine>> {
        if self.engine.is_none() {
            let engine = Engine::of(&self.device, &self.host)?;
            let client = engine.client();
            self.engine = Some((engine, client));
        }
        let engine = self.engine.as_ref().map(|(engine, _)| engine);
        engine.ok_or_else(|| Error::bug("the engine was just made"))
    }
}

impl Verdicts {
    fn new(device: &Arc<dyn Device>, host: &Arc<dyn Device>) -> Result<Verdicts> {
        let places = Places::new(host, device.id());
        let mut zeros = places.take()?;
        if let Some(zeros) = zeros.host_mut() {
            zeros.fill(0);
        }
        Ok(Verdicts { places, down: device.stream(Role::Download)?, zeros: zeros.freeze() })
    }

    /// Memory for a verdict, and the stream that copies it there.
    fn place(&self) -> Result<(BufMut, Arc<dyn Stream>)> {
        Ok((self.places.take()?, Arc::clone(&self.down)))
    }
}

impl Lane {
    /// Queues copies of slices. Returns the memory that they go to.
    fn copy(&self, model: &Model, slices: &[Slice], dst: BufMut) -> Result<BufMut, Box<Rejected>> {
        match &self.route {
            LaneRoute::Direct(stream) | LaneRoute::Local(stream) => {
                Ok(stream.send(Transfer::new(pieces(model, slices), dst)?)?.chain())
            }
            LaneRoute::ThroughHost(through) => through.send(model, slices, dst, self.largest),
            LaneRoute::Staged(_) => Err(Box::new(Rejected { error: not_a_copy(), dst })),
        }
    }
}

/// The bytes that extents take where they are stored. What a caller's source says of itself may be any number.
fn stored(extents: &[ExtentPart<'_>]) -> u64 {
    extents.iter().map(|(of, at, bytes)| of.stored(*at, *bytes as u64)).fold(0, u64::saturating_add)
}

fn not_a_copy() -> Error {
    Error::bug("a staged part is an order, not a copy")
}

fn no_landing() -> Error {
    Error::bug("tensors to unpack, and no landing buffer")
}

/// A round on its way through a landing buffer, of which `copied` is what is copied there.
fn arriving<R>(model: &Model, round: &Round<'_>, copied: R) -> Arriving<R> {
    let values = round.landed().iter().map(|landed| values_of(model, landed)).collect();
    Arriving { copied, carried: round.carried().cloned(), values }
}

/// The values of a tensor, or of a part of it, out of the buffer that it arrived in.
fn values_of(model: &Model, landed: &Landed<'_>) -> Values {
    let Slice { module, range, at } = &landed.tensor.slice;
    match landed.tensor.form {
        Form::Blocks { from, to } => {
            let BlockSize { elements, bytes } = from.block();
            let values = |bytes_of: usize| bytes_of / bytes.max(1) as usize * elements as usize;
            let at = at + values(landed.range.start) * to.element_bytes().unwrap_or(1);
            Values { begin: landed.at, at, form: Packed::Blocks { from, count: values(landed.range.len()), to } }
        }
        Form::Code { .. } => {
            let (info, weights) = (model.code_info(*module, range.start), landed.decoded());
            // Header and index of a part are at the beginning.
            let begin = if landed.code.is_some() { 0 } else { landed.at };
            Values { begin, at: *at, form: Packed::Code { info, part: landed.code, weights } }
        }
    }
}

/// The pieces that slices are, from the homes of their modules.
fn pieces(model: &Model, slices: &[Slice]) -> Vec<Piece> {
    let piece = |Slice { module, range, at }: &Slice| {
        model.find_stored(*module, range).map(|(home, from)| Piece { src: home.clone(), from, at: *at })
    };
    slices.iter().filter_map(piece).collect()
}

/// The kind of route from `home` to the compute device.
fn via(model: &Model, home: &Buf) -> Result<Via> {
    let (device, source) = (model.residency().device(), model.device(home.device())?);
    if device.id() == source.id() {
        return Ok(Via::Local);
    }
    Ok(match device.route_from(&**source) {
        _ if device.copies_block(home.block()) => Via::Staging,
        Route::Direct => Via::Direct,
        Route::Staged(_) => Via::Host,
    })
}
