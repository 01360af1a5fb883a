//! The routes by which bytes reach the compute device: one lane per source device and kind of route, each with its own
//! streams, so that the parts of a layer are copied concurrently.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::report::{LaneReport, Via};
use super::through_host::ThroughHost;
use crate::backend::{Buf, BufMut, Device, Piece, Rejected, Role, Route, Stream, Transfer};
use crate::checkpoint::{ModuleId, Per};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::Model;
use crate::schedule::{Contents, Part, Slice};
use crate::transfer::{Engine, Order, PendingOrder, StagingLane};

/// Bytes with the same key share a lane.
type LaneKey = (DeviceId, Via);

/// The lanes that one streamer uses.
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    by_key: BTreeMap<LaneKey, usize>,
    device: Arc<dyn Device>,
    host: Arc<dyn Device>,
    /// The device's staging engine and this streamer's client number. `None` while no lane is staged.
    engine: Option<(Arc<Engine>, u64)>,
}

/// The route from one device.
struct Lane {
    from: DeviceId,
    via: Via,
    route: LaneRoute,
    /// The most bytes that one layer sends along this lane.
    largest: usize,
}

enum LaneRoute {
    Direct(Arc<dyn Stream>),
    ThroughHost(ThroughHost),
    Staged(Arc<StagingLane>),
}

impl Lanes {
    pub(super) fn new(model: &Model) -> Lanes {
        let (device, host) = (Arc::clone(model.residency().device()), Arc::clone(model.host()));
        Lanes { lanes: Vec::new(), by_key: BTreeMap::new(), device, host, engine: None }
    }

    /// The lane of each module that is streamed and owns bytes. Lanes are numbered by the first module that uses them.
    pub(super) fn of_modules(&mut self, model: &Model) -> Result<Per<ModuleId, Option<usize>>> {
        model.layout().module_ids().map(|module| self.lane_of(model, module)).collect()
    }

    /// The lane of a module, created for the first module that needs it.
    fn lane_of(&mut self, model: &Model, module: ModuleId) -> Result<Option<usize>> {
        let streamed = model.plan().origin(module).is_some() && model.layout().at(module).bytes > 0;
        let Some(home) = model.bufs(module).first().filter(|_| streamed) else { return Ok(None) };
        let key = (home.device(), via(model, home)?);
        if let Some(&lane) = self.by_key.get(&key) {
            return Ok(Some(lane));
        }
        let (from, via) = key;
        let source = model.device(from)?;
        let route = match via {
            Via::Direct => LaneRoute::Direct(self.device.stream(Role::Upload)?),
            Via::Host => {
                let (down, up) = (source.stream(Role::Download)?, self.device.stream(Role::Upload)?);
                LaneRoute::ThroughHost(ThroughHost::new(down, up, Arc::clone(&self.host)))
            }
            Via::Staging => LaneRoute::Staged(self.engine()?.lane(source)?),
        };
        self.lanes.push(Lane { from, via, route, largest: 0 });
        self.by_key.insert(key, self.lanes.len() - 1);
        Ok(Some(self.lanes.len() - 1))
    }

    /// Records the most bytes that one layer sends along each lane.
    pub(super) fn expect(&mut self, contents: &Contents) {
        for part in contents.iter().flat_map(|content| &content.parts) {
            let lane = &mut self.lanes[part.lane];
            lane.largest = lane.largest.max(part.copied() as usize);
        }
    }

    pub(super) fn is_staged(&self, lane: usize) -> bool {
        matches!(self.lanes[lane].route, LaneRoute::Staged(_))
    }

    /// Queues the copies of a part of a layer. Returns the part's memory.
    ///
    /// # Errors
    /// Carries the memory; copies into it may already be in flight.
    pub(super) fn queue(&self, model: &Model, part: &Part, dst: BufMut) -> Result<BufMut, Box<Rejected>> {
        let lane = &self.lanes[part.lane];
        match &lane.route {
            LaneRoute::Direct(stream) => Ok(stream.send(Transfer::new(pieces(model, part), dst)?)?.chain()),
            LaneRoute::ThroughHost(through) => through.send(model, part, dst, lane.largest),
            LaneRoute::Staged(_) => {
                Err(Box::new(Rejected { error: Error::bug("a staged part is an order, not a copy"), dst }))
            }
        }
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
        let (LaneRoute::Staged(staging), Some((_, client))) = (&self.lanes[part.lane].route, &self.engine) else {
            return Err(Error::bug("a part that needs no staging was given to a staging lane"));
        };
        Ok(staging.submit(Order { client: *client, dst, pieces: pieces(model, part), urgent, deadline }))
    }

    /// The lanes' entries of a new report, with nothing sent yet.
    pub(super) fn report(&self) -> Vec<LaneReport> {
        let to = self.device.id();
        let of = |lane: &Lane| LaneReport { from: lane.from, to, via: lane.via, fills: 0, bytes: 0 };
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

/// The pieces of a part, from the homes of its modules.
fn pieces(model: &Model, part: &Part) -> Vec<Piece> {
    let piece = |Slice { module, range, at }: &Slice| {
        model.find(*module, range).map(|(home, from)| Piece { src: home.clone(), from, at: *at })
    };
    part.slices.iter().filter_map(piece).collect()
}

/// The kind of route from `home` to the compute device.
fn via(model: &Model, home: &Buf) -> Result<Via> {
    let (device, source) = (model.residency().device(), model.device(home.device())?);
    Ok(match device.route_from(&**source) {
        _ if device.copies_block(home.block()) => Via::Staging,
        Route::Direct => Via::Direct,
        Route::Staged(_) => Via::Host,
    })
}
