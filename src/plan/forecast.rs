//! A forecast of the time of a pass: a simulation of the streamer's copies and waits.

use std::time::Duration;

use super::slots::Slots;
use super::value::{Assignment, Plan};
use crate::checkpoint::{Layer, LayerId, Layout, ModuleId, Per};
use crate::device::{Bookings, DeviceId, Topology};
use crate::error::{PlanFault, Result};
use crate::limits::STAGING_BUFFERS;
use crate::schedule::{Contents, Landed, Part, Round, Schedule, Slice, chunks, rounds};

/// The bytes of a verdict.
const VERDICT: u64 = 16;

/// The network's compute time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeTime {
    /// The time of a whole pass, divided among the layers in proportion to their bytes.
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
    /// [`Error::Plan`](crate::Error::Plan) when the number of times differs from the number of layers, or their sum exceeds
    /// `Duration::MAX`.
    pub fn of_layers(&self, layout: &Layout) -> Result<Vec<Duration>> {
        let layers = layout.layers().len();
        match self {
            ComputeTime::Layers(times) if times.len() != layers => {
                Err(PlanFault::ComputeTimes { given: times.len(), layers }.into())
            }
            ComputeTime::Layers(times) => {
                let sum = times.iter().try_fold(Duration::ZERO, |sum, &time| sum.checked_add(time));
                sum.ok_or(PlanFault::EndlessComputeTime)?;
                Ok(times.clone())
            }
            ComputeTime::Pass(pass) => {
                let needs =
                    |layer: &Layer| layout.needs(layer).into_iter().map(|m| u128::from(layout.at(m).bytes)).sum();
                let bytes: Vec<u128> = layout.layers().iter().map(needs).collect();
                let all = bytes.iter().sum::<u128>().max(1);
                // The end of each layer, so that the times add up to the pass.
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
    // Seconds and nanoseconds separately, so that no product exceeds `u128`.
    let (seconds, below) = (u128::from(time.as_secs()) * part, u128::from(time.subsec_nanos()) * part);
    let whole = Duration::from_secs(u64::try_from(seconds / all).unwrap_or(u64::MAX));
    whole.saturating_add(nanos((seconds % all) * 1_000_000_000 / all + below / all))
}

impl Plan {
    /// The time of a pass in steady state, with the layers requested in order: the copies of a [`Streamer`](crate::Streamer)
    /// are simulated as on a simulated device's virtual clock.
    ///
    /// [`estimate`](Plan::estimate) is a lower bound; the forecast adds slots that wait for compute, a first layer whose copy
    /// nothing hides, and layers that follow each other too closely for their link. Neither includes a real driver's
    /// overhead.
    ///
    /// # Errors
    /// As [`verify`](Plan::verify) for another model's layout, and [`ComputeTime::of_layers`].
    pub fn forecast(&self, layout: &Layout, topology: &Topology, compute: &ComputeTime) -> Result<Duration> {
        Ok(self.checked(layout)?.forecast_of(layout, topology, &compute.of_layers(layout)?))
    }

    /// As [`forecast`](Plan::forecast), with the time of each layer, for a layout known to be the plan's.
    pub(super) fn forecast_of(&self, layout: &Layout, topology: &Topology, compute: &[Duration]) -> Duration {
        Simulation::new(self, layout, topology).pass(compute)
    }
}

/// Passes before the first that counts. The first pass finds the slots empty and fetches the layers that stay; while it waits
/// for these, it prefetches more for the second pass than any later pass does.
const BEFORE: u32 = 2;
/// Passes that count.
const COUNTED: u32 = 2;

/// Above this many modules, those of one layer and device count as one copy. The forecast then ignores what these copies gain
/// or lose by sharing a segment with others in turn.
const MOST_PIECES: usize = 20_000;

/// A simulation of streaming: runs the schedule over booked links.
struct Simulation<'a> {
    topology: &'a Topology,
    schedule: Schedule,
    /// The copies of each layer on each lane.
    fetches: Per<LayerId, Vec<LaneFetch>>,
    lanes: Vec<Lane>,
    /// The route from the host to the compute device.
    from_host: Vec<usize>,
    /// The route back, and when its stream for verdicts is free.
    to_host: Vec<usize>,
    download: Duration,
    bookings: Bookings,
    slots: Vec<Slot>,
    /// The time on the host.
    now: Duration,
    /// Whether the host computes, so that it waits for each layer, and asks for the next one when it has computed.
    on_host: bool,
    compute: Duration,
}

/// The copies of a layer on one lane for one block of a slot.
struct LaneFetch {
    lane: usize,
    block: usize,
    copies: Vec<Copies>,
    /// Whether a verdict follows, on codes among them.
    has_verdict: bool,
}

/// Copies into a slot, or into a landing buffer, from where values are computed into the slot.
struct Copies {
    /// The bytes of each copy, in chunks if they go through the host.
    chunks: Vec<Vec<u64>>,
    lands: bool,
    /// Whether any of what lands is a code, and the time to decode it. Values of blocks take none here.
    coded: bool,
    decoding: Duration,
}

/// The route from a device, and the times when its streams are free.
#[derive(Default)]
struct Lane {
    /// The route to the compute device, or to the host if the compute device cannot reach this device.
    way: Vec<usize>,
    upload: Duration,
    /// `None` if bytes go straight to the compute device.
    through_host: Option<ThroughHost>,
    /// Whether it is the compute device, whose memory is unpacked on the lane's own stream.
    is_local: bool,
    /// When the kernels that unpack what it brings are done, and those that read each half of its landing buffer.
    unpacked: Duration,
    halves: [Duration; 2],
    next: usize,
    /// When its last verdict was on the host; `None` before the first, for which the device needs zeros.
    verdict: Option<Duration>,
}

/// The times when the stream to the host and each buffer there are free.
#[derive(Default)]
struct ThroughHost {
    download: Duration,
    buffers: [Duration; STAGING_BUFFERS],
    next: usize,
}

#[derive(Clone)]
struct Slot {
    /// When its contents have arrived.
    ready: Duration,
    /// When the last use of each of its blocks ends. A layer uses those that it has tensors in.
    free: Vec<Duration>,
}

impl<'a> Simulation<'a> {
    fn new(plan: &Plan, layout: &Layout, topology: &'a Topology) -> Simulation<'a> {
        let compute = plan.compute();
        let mut devices: Vec<DeviceId> = Vec::new();
        let lane_of = |assignment: &Assignment| {
            let device = plan.origin(assignment.index).filter(|_| assignment.bytes > 0)?.device;
            Some(devices.iter().position(|&other| other == device).unwrap_or_else(|| {
                devices.push(device);
                devices.len() - 1
            }))
        };
        let of_modules: Per<ModuleId, Option<usize>> = plan.assignments().iter().map(lane_of).collect();
        let (in_slots, blocks) = (plan.in_slots(layout), plan.slot_blocks(layout));
        let groups = plan.groups(layout);
        let compressed = plan.compressed(layout, &groups);
        let contents = Contents::new((layout, &in_slots), (&groups, &compressed), &of_modules, &blocks);
        let lane = |device: DeviceId| {
            let straight = topology.reaches(compute, device);
            let way = topology.path(device, if straight { compute } else { DeviceId::CPU });
            let through_host = (!straight).then(ThroughHost::default);
            Lane { way, through_host, is_local: device == compute, ..Lane::default() }
        };
        let lanes: Vec<Lane> = devices.into_iter().map(lane).collect();
        let many = of_modules.values().flatten().count() > MOST_PIECES;
        let landing = plan.landing_room();
        let fetch = |part: &Part| {
            let straight = lanes[part.lane].through_host.is_none();
            let bytes = |slice: &Slice| slice.range.len() as u64;
            let decoding = |round: &Round<'_>| {
                let time = |landed: &Landed<'_>| match (landed.decoded(), plan.decoding()) {
                    (0, _) | (_, None) => Duration::ZERO,
                    (weights, Some(speed)) => speed.time(weights),
                };
                round.landed().iter().map(time).fold(Duration::ZERO, Duration::saturating_add)
            };
            let copies = |slices: &[Slice], lands: bool, coded: bool, decoding: Duration| {
                let mut chunks: Vec<Vec<u64>> = match straight {
                    true => vec![slices.iter().map(bytes).collect()],
                    false => chunks(slices).iter().map(|chunk| chunk.iter().map(bytes).collect()).collect(),
                };
                if many {
                    chunks.iter_mut().for_each(|chunk| *chunk = vec![chunk.iter().sum()]);
                }
                Copies { chunks, lands, coded, decoding }
            };
            let mut all = vec![copies(&part.slices, false, false, Duration::ZERO)];
            all.retain(|_| !part.slices.is_empty());
            // What lives on the compute device is unpacked from there, all at once.
            let rounds = rounds(&part.unpacked, if lanes[part.lane].is_local { u64::MAX } else { landing });
            let coded = |round: &Round<'_>| round.landed().iter().any(|landed| landed.tensor.is_code());
            all.extend(rounds.iter().map(|round| copies(&round.slices(), true, coded(round), decoding(round))));
            LaneFetch { lane: part.lane, block: part.block, copies: all, has_verdict: part.has_codes() }
        };
        let fetches = contents.iter().map(|content| content.parts.iter().map(fetch).collect()).collect();
        let blocks = contents.iter().flat_map(|content| &content.parts).map(|part| part.block + 1).max();
        let slot = Slot { ready: Duration::ZERO, free: vec![Duration::ZERO; blocks.unwrap_or(0)] };
        // A plan without slots uses the caller's.
        let slots: Vec<u64> = match plan.slots().sizes().next() {
            Some(_) => plan.slots().sizes().collect(),
            None => Slots::of(&contents.bytes(), plan.depth(), plan.fixed_slots()).sizes().collect(),
        };
        Simulation {
            topology,
            slots: vec![slot; slots.len()],
            schedule: Schedule::new(&contents, slots, plan.depth(), plan.fixed_slots()),
            fetches,
            from_host: topology.path(DeviceId::CPU, compute),
            to_host: topology.path(compute, DeviceId::CPU),
            download: Duration::ZERO,
            lanes,
            bookings: Bookings::of(topology),
            now: Duration::ZERO,
            on_host: compute.is_host(),
            compute: Duration::ZERO,
        }
    }

    /// The time of a pass, averaged over a few.
    fn pass(mut self, compute: &[Duration]) -> Duration {
        if self.slots.len() >= self.fetches.values().filter(|fetch| !fetch.is_empty()).count() {
            // Everything stays in the slots.
            return compute.iter().fold(Duration::ZERO, |sum, &time| sum.saturating_add(time));
        }
        let mut begin = Duration::ZERO;
        for pass in 0..BEFORE + COUNTED {
            if pass == BEFORE {
                begin = self.now;
            }
            for (layer, &time) in self.fetches.ids().zip(compute) {
                self.turn(layer, time);
            }
            self.now = self.now.max(self.compute);
        }
        (self.now - begin) / COUNTED
    }

    /// Requests a layer, prefetches the layers after it, and computes.
    fn turn(&mut self, layer: LayerId, time: Duration) {
        self.schedule.turn(layer);
        if !self.fetches[layer].is_empty() && self.schedule.slot_of(layer).is_none() {
            self.fetch(layer);
        }
        let slot = self.schedule.slot_of(layer);
        let ready = slot.map_or(Duration::ZERO, |slot| self.slots[slot].ready);
        if self.on_host {
            self.now = self.now.max(ready);
        }
        self.compute = self.compute.max(self.now).max(ready);
        self.schedule.ahead().into_iter().for_each(|next| self.fetch(next));
        self.compute = self.compute.saturating_add(time);
        if self.on_host {
            // The caller's thread computes.
            self.now = self.compute;
        }
        if let Some(slot) = slot {
            let used = self.fetches[layer].iter().map(|fetch| fetch.block);
            used.for_each(|block| self.slots[slot].free[block] = self.compute);
        }
    }

    /// Fetches a layer into the best slot for it, if there is one.
    fn fetch(&mut self, layer: LayerId) {
        if let Some(&slot) = self.schedule.candidates(layer).first() {
            self.schedule.hold(slot, layer);
            self.copy(layer, slot);
        }
    }

    fn copy(&mut self, layer: LayerId, slot: usize) {
        let Simulation { topology, bookings, lanes, fetches, from_host, to_host, download, now, .. } = self;
        let slot = &mut self.slots[slot];
        let mut copy = |way: &[usize], bytes: u64, ready: Duration| {
            bookings.forget(way, *now);
            bookings.transfer(topology, way, bytes, ready)
        };
        slot.ready = *now;
        for LaneFetch { lane, block, copies, has_verdict } in &fetches[layer] {
            let Lane { way, upload, through_host, is_local, unpacked, halves, next, verdict } = &mut lanes[*lane];
            // The pieces of one copy go one after the other.
            let (mut at, mut free) = ((*upload).max(*now), slot.free[*block]);
            let (mut done, mut decoded, mut cleared) = (at, at, !*has_verdict);
            for Copies { chunks, lands, coded, decoding } in copies {
                if *lands && !std::mem::replace(&mut cleared, true) {
                    let begin = (*unpacked).max(*now).max(if *is_local { at } else { Duration::ZERO });
                    *unpacked = verdict.map_or_else(|| copy(from_host, VERDICT, begin), |seen| begin.max(seen));
                }
                at = at.max(if *lands { halves[*next] } else { free });
                for chunk in chunks {
                    match through_host {
                        None => chunk.iter().for_each(|bytes| at = copy(way, *bytes, at)),
                        Some(host) => {
                            let buffer = &mut host.buffers[host.next];
                            host.next = (host.next + 1) % STAGING_BUFFERS;
                            let mut here = host.download.max(*now).max(*buffer);
                            chunk.iter().for_each(|bytes| here = copy(way, *bytes, here));
                            host.download = here;
                            at = at.max(here);
                            chunk.iter().for_each(|bytes| at = copy(from_host, *bytes, at));
                            *buffer = at;
                        }
                    }
                }
                if *lands {
                    // What has landed is unpacked when the slot is free, and has what is copied into it.
                    *unpacked = (*unpacked).max(*now).max(at).max(free).saturating_add(*decoding);
                    halves[*next] = *unpacked;
                    *next = 1 - *next;
                    done = *unpacked;
                    decoded = if *coded { done } else { decoded };
                } else {
                    (free, done) = (at, at);
                }
            }
            *upload = if *is_local { done } else { at };
            if *has_verdict {
                *download = copy(to_host, VERDICT, (*download).max(decoded));
                *verdict = Some(*download);
            }
            slot.ready = slot.ready.max(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_time_are_exact_to_the_nanosecond() {
        let time = Duration::new(10, 600_000_001);
        assert_eq!(scaled(time, 1, 3), Duration::new(3, 533_333_333));
        assert_eq!(scaled(time, 3, 3), time);
        assert_eq!(scaled(Duration::new(7, 0), 1, 2), Duration::new(3, 500_000_000));
        assert_eq!(scaled(Duration::new(7, 0), 0, 2), Duration::ZERO);
        assert_eq!(scaled(Duration::MAX, 1, 1), Duration::MAX);
    }
}
