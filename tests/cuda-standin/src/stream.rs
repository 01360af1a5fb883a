//! Streams and events: what is enqueued in which order, and what waits for what.

use std::sync::Arc;
use std::time::Instant;

use crate::code::{Code, Outcome};
use crate::contexts::Fate;
use crate::fault::Spoil;
use crate::graph::Node;
use crate::hazard::{Clock, Stamp};
use crate::lane::{HostCall, Lane, Op, Record, Ticket, Work};
use crate::report::Rule;
use crate::shared::Shared;
use crate::vendor::Vendor;
use crate::world::{Call, State, new_handle};
use crate::{acl, cndrv};

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;
/// The legacy default stream, by its two names.
pub(crate) const LEGACY: [u64; 2] = [0, 1];
const PER_THREAD: u64 = 2;

/// A stream that was created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub(crate) lane: u32,
    pub(crate) device: usize,
    pub(crate) context: u64,
    flags: u32,
    priority: i32,
    pub(crate) call: &'static str,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) context: u64,
    flags: u32,
    record: Option<Arc<Record>>,
    /// It was last recorded on a stream that was captured.
    captured: bool,
    pub(crate) call: &'static str,
}

/// A lane as the calls see it: what was enqueued, and what that is ordered after.
#[derive(Debug)]
pub(crate) struct LaneState {
    pub(crate) lane: Arc<Lane>,
    pub(crate) clock: Clock,
    /// Of what made it.
    pub(crate) context: u64,
    epoch: u64,
    /// When what was enqueued ends in counted time.
    counted: u64,
    /// It takes turns with the legacy default stream.
    blocking: bool,
}

impl LaneState {
    /// Whether it takes turns with the legacy default stream.
    pub(crate) fn blocking(&self) -> bool {
        self.blocking
    }

    /// All that was enqueued by now.
    pub(crate) fn ticket(&self) -> Ticket {
        Ticket { lane: Arc::clone(&self.lane), epoch: self.epoch, counted: self.counted }
    }
}

/// A place in the order of a lane that work is about to take.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) lane: usize,
    pub(crate) stamp: Stamp,
    after: Vec<Ticket>,
    /// When it may begin in counted time.
    ready: u64,
}

impl State {
    fn new_lane(&mut self, device: usize, blocking: bool, context: u64, fate: Option<Arc<Fate>>) -> u32 {
        if let Some(index) = self.take_spare() {
            // Its stamps go on counting, so that those of the stream that had it before keep their meaning.
            let epoch = self.lanes[index as usize].epoch;
            let lane = Lane::new(index, device, fate, epoch);
            let clock = Clock::default();
            self.lanes[index as usize] = LaneState { lane, clock, context, epoch, counted: 0, blocking };
            return index;
        }
        let index = self.lanes.len() as u32;
        let lane = Lane::new(index, device, fate, 0);
        self.lanes.push(LaneState { lane, clock: Clock::default(), context, epoch: 0, counted: 0, blocking });
        index
    }

    /// A lane whose stream was destroyed, where the host has seen the end of all its work: whatever is enqueued from now
    /// on is after that anyway, so taking the lane's place in the clocks says nothing more. Without this a program that
    /// makes and destroys streams for long would fill the memory with clocks and ended threads.
    fn take_spare(&mut self) -> Option<u32> {
        let over = |lane: &u32| {
            let state = &self.lanes[*lane as usize];
            self.host.get(*lane) >= state.epoch && state.lane.done() >= state.epoch
        };
        let place = self.spare.iter().position(over)?;
        Some(self.spare.swap_remove(place))
    }

    /// Takes the next turn of a lane: after all that came before on it, after what the host has seen, and, on the
    /// legacy default stream and the streams that take turns with it, after each other.
    pub(crate) fn turn(&mut self, lane: u32, call: &'static str) -> Turn {
        let own = &self.lanes[lane as usize];
        let (device, blocking) = (own.lane.device, own.blocking);
        let mut clock = self.host.clone();
        let mut after = Vec::new();
        let mut follow = |other: &LaneState| {
            clock.join(&other.clock);
            after.push(other.ticket());
        };
        match self.devices[device].legacy {
            Some(legacy) if legacy == lane => {
                self.lanes.iter().filter(|l| l.blocking && l.lane.device == device).for_each(&mut follow);
            }
            Some(legacy) if blocking => follow(&self.lanes[legacy as usize]),
            _ => {}
        }
        let before = after.iter().map(|ticket| ticket.counted).max().unwrap_or(0);
        after.retain(|ticket| !ticket.is_done());
        let ready = self.counting.earliest().max(before);
        let state = &mut self.lanes[lane as usize];
        state.epoch += 1;
        state.clock.join(&clock);
        state.clock.set(lane, state.epoch);
        let stamp = Stamp { lane, epoch: state.epoch, call };
        Turn { lane: lane as usize, stamp, after, ready: ready.max(state.counted) }
    }

    pub(crate) fn stamp_is_done(&self, stamp: &Stamp) -> bool {
        self.lanes[stamp.lane as usize].lane.done() >= stamp.epoch
    }

    pub(crate) fn ticket_of(&self, stamp: &Stamp) -> Ticket {
        let lane = &self.lanes[stamp.lane as usize];
        Ticket { lane: Arc::clone(&lane.lane), epoch: stamp.epoch, counted: lane.counted }
    }

    /// Counts the time of work that takes its turn.
    fn count(&mut self, shared: &Shared, turn: &Turn, work: &Work, spoil: Spoil) {
        let ready = turn.ready.saturating_add(spoil.stall_millis.saturating_mul(1_000_000));
        let end = match work {
            Work::Copy(copy) => match shared.engines.engine(&shared.config, copy.route) {
                Some((engine, link)) => self.counting.copy(engine, link, copy.len, ready),
                None => ready,
            },
            Work::Host(..) => ready.saturating_add(shared.config.function_micros.saturating_mul(1000)),
            _ => ready,
        };
        self.lanes[turn.lane].counted = end;
        self.counting.ends(end);
    }
}

impl Call<'_> {
    pub(crate) fn submit(&self, state: &mut State, turn: Turn, work: Work) {
        self.submit_spoilt(state, turn, work, self.spoil);
    }

    pub(crate) fn submit_spoilt(&self, state: &mut State, turn: Turn, work: Work, spoil: Spoil) {
        state.count(&self.world.shared, &turn, &work, spoil);
        let lane = &state.lanes[turn.lane].lane;
        let op =
            Op { epoch: turn.stamp.epoch, call: self.name, after: turn.after, work, spoil, enqueued: Instant::now() };
        lane.submit(op, &self.world.shared);
    }

    /// The lane of a stream that work is enqueued on which no graph can run here.
    pub(crate) fn lane(&self, state: &mut State, stream: u64) -> Outcome<u32> {
        self.lane_for(state, stream, || Node::Other)
    }

    /// The lane of a stream that work is enqueued on: it must be one of the current context. While the stream is captured,
    /// the work becomes a node instead.
    pub(crate) fn lane_for(&self, state: &mut State, stream: u64, node: impl FnOnce() -> Node) -> Outcome<u32> {
        let device = self.device(state)?;
        if LEGACY.contains(&stream) {
            self.legacy_beside_captures(state, device, true)?;
            if let Some(lane) = state.devices[device].legacy {
                return Ok(lane);
            }
            let lane = state.new_lane(device, true, self.owning_context(), None);
            state.devices[device].legacy = Some(lane);
            return Ok(lane);
        }
        if stream == PER_THREAD {
            let thread = std::thread::current().id();
            if let Some(&lane) = state.devices[device].per_thread.get(&thread) {
                return Ok(lane);
            }
            let lane = state.new_lane(device, true, self.owning_context(), None);
            state.devices[device].per_thread.insert(thread, lane);
            return Ok(lane);
        }
        let found = self.known_stream(state, stream)?;
        self.goes_on(&state.lanes[found.lane as usize].lane)?;
        self.of_current_context(&found, device)?;
        self.capture(state, stream, node)?;
        Ok(found.lane)
    }

    /// Refuses a stream that is not of the current context, in the vendor's sense of that.
    pub(crate) fn of_current_context(&self, found: &Stream, device: usize) -> Outcome<()> {
        let here = match self.vendor {
            Vendor::Cuda => found.device == device,
            // The device is the stream's, whichever is current.
            Vendor::Hip => true,
            Vendor::Acl | Vendor::CnDrv => found.context == Call::current_context(),
        };
        if here {
            return Ok(());
        }
        self.violation(Rule::WrongContext, || {
            if found.device == device {
                return format!("a stream of one context of device {device} with another one current");
            }
            format!("a stream of device {} with a context of device {device} current", found.device)
        });
        Err(self.vendor.foreign_stream())
    }

    /// The lane of a stream that is only asked about or waited for: any context will do.
    fn any_lane(&self, state: &mut State, stream: u64) -> Outcome<u32> {
        if stream <= PER_THREAD {
            return self.lane(state, stream);
        }
        let lane = self.known_stream(state, stream)?.lane;
        self.not_capturing(state, stream)?;
        Ok(lane)
    }

    pub(crate) fn known_stream(&self, state: &State, stream: u64) -> Outcome<Stream> {
        let Some(found) = state.streams.get(&stream) else {
            return Err(self.no_handle(state, stream, "stream", self.vendor.no_stream()));
        };
        self.whole(found.device)?;
        Ok(*found)
    }

    pub(crate) fn create_stream(&self, flags: u32, priority: i32) -> Outcome<u64> {
        let mut state = self.state();
        let device = self.device(&state)?;
        if flags > NON_BLOCKING {
            return Err(Code::INVALID_VALUE);
        }
        let made = state.streams.values().filter(|stream| stream.device == device).count();
        if self.world.config().devices[device].streams_limit.is_some_and(|limit| made >= limit) {
            return Err(Code::NO_STREAM);
        }
        let context = self.owning_context();
        let fate = state.fate_of(self.vendor, context);
        let lane = state.new_lane(device, flags != NON_BLOCKING, context, fate);
        let handle = new_handle();
        let (least, greatest) = self.vendor.priorities();
        let priority = priority.clamp(greatest, least);
        state.streams.insert(handle, Stream { lane, device, context, flags, priority, call: self.name });
        Ok(handle)
    }

    pub(crate) fn destroy_stream(&self, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        if stream <= PER_THREAD {
            return Err(Code::INVALID_HANDLE);
        }
        let found = self.known_stream(&state, stream)?;
        if self.vendor == Vendor::Acl {
            let device = self.device(&state)?;
            self.of_current_context(&found, device)?;
        }
        state.streams.remove(&stream);
        state.captures.remove(&stream);
        state.lanes[found.lane as usize].lane.close();
        state.spare.push(found.lane);
        Ok(())
    }

    pub(crate) fn stream_info(&self, stream: u64) -> Outcome<(u64, u32, i32)> {
        let mut state = self.state();
        if stream <= PER_THREAD {
            self.lane(&mut state, stream)?;
            return Ok((Call::current_context(), 0, 0));
        }
        let found = self.known_stream(&state, stream)?;
        let context = state.context_of(self.world.config(), found.device);
        Ok((context, found.flags, found.priority))
    }

    pub(crate) fn query_stream(&self, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        let lane = self.any_lane(&mut state, stream)? as usize;
        let (ticket, clock) = (state.lanes[lane].ticket(), state.lanes[lane].clock.clone());
        let done = self.host_asks(&mut state, &ticket, &clock);
        self.goes_on(&ticket.lane)?;
        if done { Ok(()) } else { Err(Code::NOT_READY) }
    }

    /// The end of what is enqueued on a stream by now.
    pub(crate) fn end_of_stream(&self, stream: u64) -> Outcome<Record> {
        let mut state = self.state();
        let lane = self.any_lane(&mut state, stream)? as usize;
        Ok(Record { ticket: state.lanes[lane].ticket(), clock: state.lanes[lane].clock.clone() })
    }

    pub(crate) fn synchronize_stream(&self, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        let lane = self.any_lane(&mut state, stream)?;
        self.wait_for_lane(state, lane)
    }

    /// Waits for all that is enqueued on a lane, giving up the state meanwhile.
    pub(crate) fn wait_for_lane(&self, state: std::sync::MutexGuard<'_, State>, lane: u32) -> Outcome<()> {
        let lane = lane as usize;
        let (ticket, clock) = (state.lanes[lane].ticket(), state.lanes[lane].clock.clone());
        drop(state);
        self.host_waits(std::slice::from_ref(&ticket), &clock);
        self.goes_on(&ticket.lane)
    }

    pub(crate) fn launch_host_function(&self, stream: u64, host: HostCall) -> Outcome<()> {
        let mut state = self.state();
        let argument = host.argument.expose_provenance() as u64;
        let lane = self.lane_for(&mut state, stream, || Node::Host { function: host.function, argument })?;
        let turn = state.turn(lane, self.name);
        let clock = state.lanes[turn.lane].clock.clone();
        self.submit(&mut state, turn, Work::Host(host, clock));
        Ok(())
    }

    pub(crate) fn create_event(&self, flags: u32) -> Outcome<u64> {
        let mut state = self.state();
        let device = self.device(&state)?;
        if flags & !self.vendor.event_flags() != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let counts = |flags: u32| match self.vendor {
            Vendor::Cuda | Vendor::Hip => true,
            // It takes one of the device's when it is recorded.
            Vendor::Acl => false,
            Vendor::CnDrv => flags & cndrv::NO_TIMING == 0,
        };
        if counts(flags) {
            self.one_event_more(&state, device, |event| counts(event.flags))?;
        }
        let context = self.owning_context();
        let handle = new_handle();
        state.events.insert(handle, Event { device, context, flags, record: None, captured: false, call: self.name });
        Ok(handle)
    }

    /// Refuses one event more than a device has.
    fn one_event_more(&self, state: &State, device: usize, counts: impl Fn(&Event) -> bool) -> Outcome<()> {
        let of_device = state.events.values().filter(|event| event.device == device && counts(event)).count();
        let limit = self.world.config().devices[device].events_limit;
        if limit.is_some_and(|limit| of_device >= limit) { Err(Code::NO_EVENT) } else { Ok(()) }
    }

    fn known_event<'s>(&self, state: &'s State, event: u64) -> Outcome<&'s Event> {
        let Some(found) = state.events.get(&event) else {
            return Err(self.no_handle(state, event, "event", self.vendor.no_event()));
        };
        self.whole(found.device)?;
        Ok(found)
    }

    pub(crate) fn destroy_event(&self, event: u64) -> Outcome<()> {
        let mut state = self.state();
        self.known_event(&state, event)?;
        state.events.remove(&event);
        Ok(())
    }

    pub(crate) fn record(&self, event: u64, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        let known = self.known_event(&state, event)?;
        let (device, context, unrecorded) = (known.device, known.context, known.record.is_none());
        let captured = state.captures.contains_key(&stream);
        if let Some(event) = state.events.get_mut(&event) {
            event.captured = captured;
        }
        let lane = self.lane_for(&mut state, stream, || Node::Order)?;
        if self.vendor == Vendor::Acl && unrecorded {
            // Only now it gets one of the device's.
            self.one_event_more(&state, device, |event| event.record.is_some())?;
        }
        let of_stream = state.lanes[lane as usize].lane.device;
        let foreign = self.vendor == Vendor::CnDrv && context != Call::current_context();
        if device != of_stream || foreign {
            self.violation(Rule::WrongContext, || {
                let context = if device == of_stream { "of another context of" } else { "of" };
                format!("an event of device {device} recorded on a stream {context} device {of_stream}")
            });
            return Err(self.vendor.no_event());
        }
        let record = self.point(&mut state, lane);
        if let Some(event) = state.events.get_mut(&event) {
            event.record = Some(record);
        }
        Ok(())
    }

    pub(crate) fn wait_event(&self, stream: u64, event: u64) -> Outcome<()> {
        let mut state = self.state();
        let known = self.known_event(&state, event)?;
        let (record, captured) = (known.record.clone(), known.captured);
        if self.vendor == Vendor::Acl && !acl::may_be_waited_for(known.flags) {
            return Err(Code::NOT_SUPPORTED);
        }
        if self.vendor == Vendor::CnDrv && known.context != Call::current_context() {
            // Between contexts only the host can wait.
            return Err(Code::NOT_PERMITTED);
        }
        self.isolated(&mut state, stream, captured || record.is_none())?;
        let lane = self.lane_for(&mut state, stream, || Node::Order)?;
        self.follow(&mut state, lane, record.as_deref());
        Ok(())
    }

    /// The point that a lane has come to: all that was enqueued on it by now.
    pub(crate) fn point(&self, state: &mut State, lane: u32) -> Arc<Record> {
        let turn = state.turn(lane, self.name);
        let clock = state.lanes[turn.lane].clock.clone();
        let stamp = turn.stamp;
        self.submit(state, turn, Work::Nothing);
        Arc::new(Record { ticket: state.ticket_of(&stamp), clock })
    }

    /// Lets what is enqueued on a lane from now on run after a point of another.
    pub(crate) fn follow(&self, state: &mut State, lane: u32, point: Option<&Record>) {
        let mut turn = state.turn(lane, self.name);
        if let Some(point) = point {
            state.lanes[turn.lane].clock.join(&point.clock);
            turn.ready = turn.ready.max(point.ticket.counted);
            turn.after.push(point.ticket.clone());
        }
        self.submit(state, turn, Work::Nothing);
    }

    pub(crate) fn query_event(&self, event: u64) -> Outcome<()> {
        let mut state = self.state();
        let known = self.known_event(&state, event)?;
        if known.captured {
            return Err(Code::CAPTURED_EVENT);
        }
        let Some(record) = known.record.clone() else { return Ok(()) };
        let done = self.host_asks(&mut state, &record.ticket, &record.clock);
        self.goes_on(&record.ticket.lane)?;
        if done { Ok(()) } else { Err(Code::NOT_READY) }
    }

    /// Where an event was recorded last, if it was.
    pub(crate) fn point_of_event(&self, event: u64) -> Outcome<Option<Arc<Record>>> {
        Ok(self.known_event(&self.state(), event)?.record.clone())
    }

    pub(crate) fn synchronize_event(&self, event: u64) -> Outcome<()> {
        let state = self.state();
        let Some(record) = self.known_event(&state, event)?.record.clone() else { return Ok(()) };
        drop(state);
        self.host_waits(std::slice::from_ref(&record.ticket), &record.clock);
        self.goes_on(&record.ticket.lane)
    }

    /// Counted milliseconds between two events that were recorded with timing.
    pub(crate) fn elapsed(&self, start: u64, end: u64) -> Outcome<f32> {
        let state = self.state();
        let time = |event: u64| {
            let found = self.known_event(&state, event)?;
            let record = found.record.as_ref().filter(|_| found.flags & DISABLE_TIMING == 0);
            let record = record.ok_or(Code::INVALID_HANDLE)?;
            if record.ticket.is_done() { Ok(record.ticket.counted) } else { Err(Code::NOT_READY) }
        };
        let (start, end) = (time(start)?, time(end)?);
        state.counting.saw(start.max(end));
        Ok(((end as f64 - start as f64) / 1e6) as f32)
    }
}
