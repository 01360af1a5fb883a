//! The ways of bytes to the compute device: one for each device that they come from, with streams of its own, so that
//! the parts of a layer are under way at one time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::report::{LaneReport, Via};
use super::slots::LaneParts;
use super::through_host::ThroughHost;
use super::turns::{From, Part};
use crate::backend::{Buf, BufMut, Device, Flight, Piece, Role, Route, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::load::Model;
use crate::transfer::{Engine, Order, StagedPart, StagingLane, Ticket};

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
    /// The most bytes of one layer's part.
    largest: usize,
}

enum Way {
    Straight(Arc<dyn Stream>),
    ThroughHost(ThroughHost),
    Staged(Arc<StagingLane>),
}

/// A part whose copy was queued, or the error and the part as far as it came.
pub(super) type Queued = std::result::Result<Buf, (Error, Option<Buf>)>;

impl Lanes {
    pub(super) fn new(model: &Model) -> Lanes {
        let (device, host) = (Arc::clone(model.residency().device()), Arc::clone(model.host()));
        Lanes { lanes: Vec::new(), by_key: BTreeMap::new(), device, host, engine: None }
    }

    /// The lane of a module, made if it is the first that goes this way; none for a module without a home of its own.
    pub(super) fn lane_of(&mut self, model: &Model, module: usize) -> Result<Option<usize>> {
        let Some(home) = model.home(module) else { return Ok(None) };
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

    /// Counts a part among those that the lane will bring.
    pub(super) fn expect(&mut self, part: &Part) {
        let lane = &mut self.lanes[part.lane];
        lane.largest = lane.largest.max(part.end());
    }

    pub(super) fn is_staged(&self, lane: usize) -> bool {
        matches!(self.lanes[lane].way, Way::Staged(_))
    }

    /// Queues the copies of a part.
    pub(super) fn queue(&self, model: &Model, part: &Part, dst: BufMut) -> Queued {
        let lane = &self.lanes[part.lane];
        let sent = match &lane.way {
            Way::Straight(stream) => {
                let sent = Transfer::new(pieces(model, part), dst).and_then(|all| stream.copy(all));
                sent.map(Flight::chain)
            }
            Way::ThroughHost(way) => way.send(model, part, dst, lane.largest),
            Way::Staged(_) => {
                return Err((Error::invalid("a staged part is an order, not a copy"), Some(dst.freeze())));
            }
        };
        match sent {
            Ok(memory) => Ok(memory.freeze()),
            Err(rejected) => Err((rejected.error, Some(rejected.dst.freeze()))),
        }
    }

    /// Gives parts of one layer to their staging lane.
    pub(super) fn order(
        &self,
        model: &Model,
        lane: usize,
        parts: LaneParts<'_>,
        urgent: bool,
        deadline: Duration,
    ) -> Result<Ticket> {
        let (Way::Staged(staging), Some((_, client))) = (&self.lanes[lane].way, &self.engine) else {
            return Err(Error::invalid("a part that needs no staging was given to a staging lane"));
        };
        let part = |(part, dst): (&Part, BufMut)| StagedPart { dst, bytes: part.end(), pieces: pieces(model, part) };
        let parts = parts.into_iter().map(part).collect();
        Ok(staging.submit(Order { client: *client, parts, urgent, deadline }))
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
        engine.ok_or_else(|| Error::invalid("the engine was just made"))
    }
}

/// The pieces of a part, from the homes of its modules.
fn pieces(model: &Model, part: &Part) -> Vec<Piece> {
    let piece = |From { module, place, at }: &From| {
        model.home(*module).map(|home| Piece { src: home.clone(), from: place.clone(), at: *at })
    };
    part.pieces.iter().filter_map(piece).collect()
}

/// How bytes of `home` get to the compute device.
fn via(model: &Model, home: &Buf) -> Result<Via> {
    let (device, source) = (model.residency().device(), model.device(home.device())?);
    Ok(match device.route_from(&**source) {
        _ if device.copies_hold_up(home.allocation()) => Via::Staging,
        Route::Direct => Via::Straight,
        Route::Staged(_) => Via::Host,
    })
}
