//! The ways of bytes to the compute device: one for each device that they come from, with streams of its own, so that
//! the parts of a layer are under way at one time.

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
use crate::transfer::{Engine, Order, StagingLane, Ticket};

/// What makes bytes go the same way.
type LaneKey = (DeviceId, Via);

/// The lanes that one streamer uses.
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    by_key: BTreeMap<LaneKey, usize>,
    device: Arc<dyn Device>,
    host: Arc<dyn Device>,
    /// The part of the device's engine that this streamer is; none while all its bytes go without it.
    engine: Option<(Arc<Engine>, u64)>,
}

/// One way.
struct Lane {
    from: DeviceId,
    via: Via,
    way: Way,
    /// The most bytes of one layer.
    largest: usize,
}

enum Way {
    Straight(Arc<dyn Stream>),
    ThroughHost(ThroughHost),
    Staged(Arc<StagingLane>),
}

impl Lanes {
    pub(super) fn new(model: &Model) -> Lanes {
        let (device, host) = (Arc::clone(model.residency().device()), Arc::clone(model.host()));
        Lanes { lanes: Vec::new(), by_key: BTreeMap::new(), device, host, engine: None }
    }

    /// The lane of each module that is streamed and has bytes of its own, in order of the first that goes that way.
    pub(super) fn of_modules(&mut self, model: &Model) -> Result<Per<ModuleId, Option<usize>>> {
        model.layout().module_ids().map(|module| self.lane_of(model, module)).collect()
    }

    /// The lane of a module, made if it is the first that goes this way.
    fn lane_of(&mut self, model: &Model, module: ModuleId) -> Result<Option<usize>> {
        let streamed = model.plan().origin(module).is_some() && model.layout().at(module).bytes > 0;
        let Some(home) = model.home(module).filter(|_| streamed) else { return Ok(None) };
        let key = (home.device(), via(model, home)?);
        if let Some(&lane) = self.by_key.get(&key) {
            return Ok(Some(lane));
        }
        let (from, via) = key;
        let source = model.device(from)?;
        let way = match via {
            Via::Straight => Way::Straight(self.device.stream(Role::Upload)?),
            Via::Host => {
                let (down, up) = (source.stream(Role::Download)?, self.device.stream(Role::Upload)?);
                Way::ThroughHost(ThroughHost::new(down, up, Arc::clone(&self.host)))
            }
            Via::Staging => Way::Staged(self.engine()?.lane(source)?),
        };
        self.lanes.push(Lane { from, via, way, largest: 0 });
        self.by_key.insert(key, self.lanes.len() - 1);
        Ok(Some(self.lanes.len() - 1))
    }

    /// Learns what the lanes will bring.
    pub(super) fn expect(&mut self, contents: &Contents) {
        for part in contents.iter().flat_map(|content| &content.parts) {
            let lane = &mut self.lanes[part.lane];
            lane.largest = lane.largest.max(part.copied() as usize);
        }
    }

    pub(super) fn is_staged(&self, lane: usize) -> bool {
        matches!(self.lanes[lane].way, Way::Staged(_))
    }

    /// Queues the copies of a part of a layer; its memory.
    ///
    /// # Errors
    /// With the memory, of which some may be on its way.
    pub(super) fn queue(&self, model: &Model, part: &Part, dst: BufMut) -> Result<BufMut, Box<Rejected>> {
        let lane = &self.lanes[part.lane];
        match &lane.way {
            Way::Straight(stream) => Ok(stream.send(Transfer::new(pieces(model, part), dst)?)?.chain()),
            Way::ThroughHost(way) => way.send(model, part, dst, lane.largest),
            Way::Staged(_) => {
                Err(Box::new(Rejected { error: Error::bug("a staged part is an order, not a copy"), dst }))
            }
        }
    }

    /// Gives a part of a layer to its staging lane.
    pub(super) fn order(
        &self,
        model: &Model,
        part: &Part,
        dst: BufMut,
        urgent: bool,
        deadline: Duration,
    ) -> Result<Ticket> {
        let (Way::Staged(staging), Some((_, client))) = (&self.lanes[part.lane].way, &self.engine) else {
            return Err(Error::bug("a part that needs no staging was given to a staging lane"));
        };
        Ok(staging.submit(Order { client: *client, dst, pieces: pieces(model, part), urgent, deadline }))
    }

    /// For a report, with nothing sent yet.
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
        model.home(*module).map(|home| Piece { src: home.clone(), from: range.clone(), at: *at })
    };
    part.slices.iter().filter_map(piece).collect()
}

/// How bytes of `home` get to the compute device.
fn via(model: &Model, home: &Buf) -> Result<Via> {
    let (device, source) = (model.residency().device(), model.device(home.device())?);
    Ok(match device.route_from(&**source) {
        _ if device.copies_hold_up(home.block()) => Via::Staging,
        Route::Direct => Via::Straight,
        Route::Staged(_) => Via::Host,
    })
}
