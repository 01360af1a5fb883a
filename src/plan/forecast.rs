//! How long a pass takes: the streamer's copies and waits, reckoned through.

use std::time::Duration;

use super::groups::Groups;
use super::value::{Plan, Use};
use crate::checkpoint::{Layer, Layout};
use crate::device::{Bookings, DeviceId, Topology};
use crate::error::{Error, Result};

/// What the network itself takes, layer by layer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeTime {
    /// The time of a whole pass. Each layer takes a part as large as its part of the bytes that layers need.
    Pass(Duration),
    /// The time of each layer, in order of execution.
    Layers(Vec<Duration>),
}

impl Default for ComputeTime {
    /// No time.
    fn default() -> ComputeTime {
        ComputeTime::Pass(Duration::ZERO)
    }
}

impl From<Duration> for ComputeTime {
    fn from(pass: Duration) -> ComputeTime {
        ComputeTime::Pass(pass)
    }
}

impl From<Vec<Duration>> for ComputeTime {
    fn from(layers: Vec<Duration>) -> ComputeTime {
        ComputeTime::Layers(layers)
    }
}

impl ComputeTime {
    /// The time of every layer of `layout`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when times are given for another number of layers, or add up to more than a `Duration` holds.
    pub fn of_layers(&self, layout: &Layout) -> Result<Vec<Duration>> {
        let layers = layout.layers.len();
        match self {
            ComputeTime::Layers(times) if times.len() != layers => {
                let given = times.len();
                Err(Error::invalid(format!("there are compute times of {given} layers, the model has {layers}")))
            }
            ComputeTime::Layers(times) => {
                let sum = times.iter().try_fold(Duration::ZERO, |sum, &time| sum.checked_add(time));
                sum.ok_or_else(|| Error::invalid("the compute times add up to too much"))?;
                Ok(times.clone())
            }
            ComputeTime::Pass(pass) => {
                let needs =
                    |layer| layout.needs_of(layer).into_iter().map(|m| u128::from(layout.modules[m].bytes)).sum();
                let bytes: Vec<u128> = layout.layers.iter().map(needs).collect();
                let all = bytes.iter().sum::<u128>().max(1);
                // Where each layer ends, so that they add up to the pass.
                let until = |bytes: u128| scaled(*pass, bytes, all);
                let mut before = 0;
                let time = |bytes: u128| {
                    let begin = until(before);
                    before += bytes;
                    until(before) - begin
                };
                Ok(bytes.into_iter().map(time).collect())
            }
        }
    }
}

/// `time * part / all`, for a part of the whole.
fn scaled(time: Duration, part: u128, all: u128) -> Duration {
    let nanos = |n: u128| Duration::from_nanos(u64::try_from(n).unwrap_or(u64::MAX));
    // Whole seconds apart, so that no product passes `u128`.
    let (seconds, below) = (u128::from(time.as_secs()) * part, u128::from(time.subsec_nanos()) * part);
    let whole = Duration::from_secs(u64::try_from(seconds / all).unwrap_or(u64::MAX));
    whole.saturating_add(nanos((seconds % all) * 1_000_000_000 / all + below / all))
}

impl Plan {
    /// The time of a pass of a model that runs already, every layer asked for in turn: the copies of a
    /// [`Streamer`](crate::Streamer) reckoned through, as a simulated device's virtual clock would have them.
    ///
    /// Where [`estimate`](Plan::estimate) is a floor, this says what is left of it: slots that wait for compute, a
    /// first layer that nothing hides, layers that come too thick for their link. Neither knows what a real driver adds.
    ///
    /// # Errors
    /// As [`verify`](Plan::verify) for another model's layout, and [`ComputeTime::of_layers`].
    pub fn forecast(&self, layout: &Layout, topology: &Topology, compute: &ComputeTime) -> Result<Duration> {
        self.verify(layout)?;
        Ok(self.forecast_of(layout, topology, &compute.of_layers(layout)?))
    }

    /// As [`forecast`](Plan::forecast), for the plan's own layout and the time of each of its layers.
    pub(super) fn forecast_of(&self, layout: &Layout, topology: &Topology, compute: &[Duration]) -> Duration {
        Clockwork::new(self, layout, topology).pass(compute)
    }
}

/// Passes before the first that counts: the first finds the slots empty.
const BEFORE: u32 = 1;
/// Passes that count.
const COUNTED: u32 = 2;

/// Over so many pieces those of one layer and device count as one: the forecast is then off by what they would have
/// gained or lost by taking turns with others in one segment.
const MOST_PIECES: usize = 20_000;

/// Host memory on the way of bytes that the compute device cannot read where they are: a few buffers, that take turns.
pub(crate) const HOST_BUFFERS: usize = 4;
/// The bytes of one such buffer. Smaller ones would save host memory, larger ones copies.
pub(crate) const HOST_PIECE: u64 = 32 << 20;

/// The streamer's slots and lanes, in time.
struct Clockwork<'a> {
    topology: &'a Topology,
    /// In order of the first layer that uses each.
    lanes: Vec<Lane>,
    /// From the host to the compute device.
    from_host: Vec<usize>,
    depth: usize,
    /// For each layer the bytes that it brings, piece by piece: those of each lane together, in order of lane.
    fills: Vec<Vec<(usize, u64)>>,
    /// The layers that bring anything, in order, and for each layer how many of these come before it.
    streamed: Vec<usize>,
    rank: Vec<usize>,
    bookings: Bookings,
    slots: Vec<Slot>,
    /// Layer -> slot.
    holds: Vec<Option<usize>>,
    /// What the host has seen the end of.
    now: Duration,
    compute: Duration,
}

/// The way from a device, and when its streams are free.
struct Lane {
    device: DeviceId,
    /// To the compute device, or to the host, where the compute device cannot reach it.
    way: Vec<usize>,
    upload: Duration,
    /// None where bytes go straight.
    through_host: Option<ThroughHost>,
}

/// When the stream to the host is free, and each of the buffers there.
#[derive(Default)]
struct ThroughHost {
    download: Duration,
    buffers: [Duration; HOST_BUFFERS],
    next: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    layer: Option<usize>,
    /// When what is in it has arrived.
    ready: Duration,
    /// When its last use ends.
    free: Duration,
}

impl<'a> Clockwork<'a> {
    fn new(plan: &Plan, layout: &Layout, topology: &'a Topology) -> Clockwork<'a> {
        let compute = plan.compute();
        let lane = |device: DeviceId| {
            let straight = topology.reaches(compute, device);
            let way = topology.way(device, if straight { compute } else { DeviceId::CPU });
            let through_host = (!straight).then(ThroughHost::default);
            Lane { device, way, upload: Duration::ZERO, through_host }
        };
        let mut lanes: Vec<Lane> = Vec::new();
        let (modules, groups) = (plan.assignments().iter().filter(|a| a.usage == Use::Streamed), plan.groups(layout));
        let many = modules.count() > MOST_PIECES;
        let fill = |layer| {
            let mut fill: Vec<(usize, u64)> = Vec::new();
            for (device, bytes) in pieces(plan, layout, &groups, layer) {
                let place = lanes.iter().position(|lane| lane.device == device).unwrap_or_else(|| {
                    lanes.push(lane(device));
                    lanes.len() - 1
                });
                match fill.iter_mut().find(|(other, _)| *other == place).filter(|_| many) {
                    Some((_, sum)) => *sum += bytes,
                    None => fill.push((place, bytes)),
                }
            }
            fill.sort_by_key(|(lane, _)| *lane);
            fill
        };
        let fills: Vec<Vec<(usize, u64)>> = layout.layers.iter().map(fill).collect();
        let brings = |&layer: &usize| !fills[layer].is_empty();
        let streamed: Vec<usize> = (0..fills.len()).filter(brings).collect();
        let mut rank = vec![0; fills.len() + 1];
        for layer in 0..fills.len() {
            rank[layer + 1] = rank[layer] + usize::from(brings(&layer));
        }
        // Where the plan counts none, they are the caller's.
        let slots = vec![Slot::default(); streamed.len().min(plan.depth().saturating_add(1))];
        Clockwork {
            topology,
            from_host: topology.way(DeviceId::CPU, compute),
            lanes,
            depth: plan.depth(),
            holds: vec![None; fills.len()],
            fills,
            streamed,
            rank,
            bookings: Bookings::of(topology),
            slots,
            now: Duration::ZERO,
            compute: Duration::ZERO,
        }
    }

    /// The time of a pass, on average over a few.
    fn pass(mut self, compute: &[Duration]) -> Duration {
        if self.slots.len() >= self.streamed.len() {
            // Everything stays in the slots.
            return compute.iter().fold(Duration::ZERO, |sum, &time| sum.saturating_add(time));
        }
        let mut begin = Duration::ZERO;
        for pass in 0..BEFORE + COUNTED {
            if pass == BEFORE {
                begin = self.now;
            }
            for (layer, &time) in compute.iter().enumerate() {
                self.turn(layer, time);
            }
            self.now = self.now.max(self.compute);
        }
        (self.now - begin) / COUNTED
    }

    /// A layer is asked for, the ones after it are sent for, and it computes.
    fn turn(&mut self, layer: usize, time: Duration) {
        let brings = self.rank[layer + 1] > self.rank[layer];
        if brings && self.holds[layer].is_none() {
            self.bring(layer, layer);
        }
        let ready = self.holds[layer].map_or(Duration::ZERO, |slot| self.slots[slot].ready);
        self.compute = self.compute.max(self.now).max(ready);
        let first = self.rank[layer + 1];
        let ahead = self.depth.min(self.streamed.len() - usize::from(brings));
        for rank in first..first + ahead {
            let next = self.streamed[rank % self.streamed.len()];
            if self.holds[next].is_none() && !self.bring(next, layer) {
                break;
            }
        }
        self.compute = self.compute.saturating_add(time);
        if let Some(slot) = self.holds[layer] {
            self.slots[slot].free = self.compute;
        }
    }

    /// Sends for `layer` while `current` is in use, in the slot whose layer is needed last, if that is later.
    fn bring(&mut self, layer: usize, current: usize) -> bool {
        let turn = self.turns_from(layer, current);
        let needed = |slot: &Slot| slot.layer.map_or(usize::MAX, |other| self.turns_from(other, current));
        let mut best: Option<(usize, usize)> = None;
        for (slot, needed) in self.slots.iter().map(needed).enumerate() {
            if needed > turn && best.is_none_or(|(_, latest)| needed > latest) {
                best = Some((slot, needed));
            }
        }
        let Some((slot, _)) = best else { return false };
        if let Some(other) = self.slots[slot].layer.replace(layer) {
            self.holds[other] = None;
        }
        self.holds[layer] = Some(slot);
        self.fill(layer, slot);
        true
    }

    /// After how many streamed layers this one is needed; the most possible where that is beyond the depth.
    fn turns_from(&self, layer: usize, current: usize) -> usize {
        let after = self.rank[current + 1];
        let turns = match layer == current {
            true => 0,
            false => (self.rank[layer] + self.streamed.len() - after) % self.streamed.len() + 1,
        };
        if turns <= self.depth { turns } else { usize::MAX }
    }

    fn fill(&mut self, layer: usize, slot: usize) {
        let Clockwork { topology, bookings, lanes, fills, from_host, now, .. } = self;
        let slot = &mut self.slots[slot];
        let mut copy = |way: &[usize], bytes: u64, ready: Duration| {
            bookings.forget(way, *now);
            bookings.transfer(topology, way, bytes, ready)
        };
        slot.ready = *now;
        for part in fills[layer].chunk_by(|a, b| a.0 == b.0) {
            let Lane { way, upload, through_host, .. } = &mut lanes[part[0].0];
            // The pieces of one copy go one after the other.
            let mut at = (*upload).max(*now).max(slot.free);
            match through_host {
                None => part.iter().for_each(|(_, bytes)| at = copy(way, *bytes, at)),
                Some(host) => {
                    for chunk in chunks(part) {
                        let buffer = &mut host.buffers[host.next];
                        host.next = (host.next + 1) % HOST_BUFFERS;
                        let mut here = host.download.max(*now).max(*buffer);
                        chunk.iter().for_each(|bytes| here = copy(way, *bytes, here));
                        host.download = here;
                        at = at.max(here);
                        chunk.iter().for_each(|bytes| at = copy(from_host, *bytes, at));
                        *buffer = at;
                    }
                }
            }
            *upload = at;
            slot.ready = slot.ready.max(at);
        }
    }
}

/// What a layer brings, in the streamer's order: from where, and how many bytes. In slots of the library's own, modules
/// that lie side by side at home and there are one piece.
fn pieces(plan: &Plan, layout: &Layout, groups: &Groups, layer: &Layer) -> Vec<(DeviceId, u64)> {
    let (needs, own_slots) = (layout.needs_of(layer), plan.parts().own_slots);
    let needs = if own_slots { needs } else { groups.in_slot(needs) };
    let mut pieces: Vec<(DeviceId, u64)> = Vec::new();
    // The group of the last piece, and where in it that ends.
    let mut end = None;
    let streamed = needs.into_iter().map(|module| &plan.assignments()[module]);
    for assignment in streamed.filter(|a| a.usage == Use::Streamed && a.bytes > 0) {
        let (group, span) = (groups.of(assignment.index), groups.place(assignment.index));
        let goes_on = end.replace((group, span.end)) == Some((group, span.start)) && !own_slots;
        match pieces.last_mut().filter(|_| goes_on) {
            Some((_, bytes)) => *bytes += assignment.bytes,
            None => pieces.push((assignment.device, assignment.bytes)),
        }
    }
    pieces
}

/// What shares a buffer on the host, one after the other.
fn chunks(part: &[(usize, u64)]) -> Vec<Vec<u64>> {
    let (mut chunks, mut room) = (Vec::<Vec<u64>>::new(), 0);
    for &(_, bytes) in part {
        let mut left = bytes;
        while left > 0 {
            if room == 0 {
                chunks.push(Vec::new());
                room = HOST_PIECE;
            }
            let taken = left.min(room);
            if let Some(chunk) = chunks.last_mut() {
                chunk.push(taken);
            }
            (left, room) = (left - taken, room - taken);
        }
    }
    chunks
}
