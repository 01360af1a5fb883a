//! Streams: copies between the host and a device, in order.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ash::vk;

use super::context::Context;
use super::copy::{self, Move};
use super::dispatch::{self, Dispatch};
use super::event::VulkanFence;
use super::raise::{Gate, Raiser};
use super::semaphore::Point;
use super::staging::{self, Broken};
use super::timeline::Timeline;
use crate::backend::reaper::{Memory, Reaper};
use crate::backend::{Buf, Event, FenceState, Flight, Joined, MemoryBlock, Rejected, Role, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Missing, Result};
use crate::limits::WORK;

/// A stream of a Vulkan device.
pub(super) struct VulkanStream {
    timeline: Arc<Timeline>,
    context: Arc<Context>,
    reaper: Arc<Reaper>,
    /// The thread that raises points of the host, from the first one on.
    raiser: Mutex<Option<Raiser>>,
    /// The gates of events that the stream was told to wait for.
    after: Mutex<Vec<Arc<Gate>>>,
}

/// What a submission waits for.
struct Waits {
    points: Vec<Point>,
    /// What tells whether events failed that it waits for through the host.
    gates: Vec<Arc<Gate>>,
}

impl VulkanStream {
    pub(super) fn new(context: &Arc<Context>, reaper: &Arc<Reaper>, role: Role) -> Result<VulkanStream> {
        let timeline = Timeline::new(context, role).map_err(|refusal| context.error(refusal))?;
        let (context, reaper) = (Arc::clone(context), Arc::clone(reaper));
        Ok(VulkanStream { timeline, context, reaper, raiser: Mutex::default(), after: Mutex::default() })
    }

    pub(super) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The points of this device's events, which its submissions wait for. For the others they wait for a point that the host raises,
    /// if no other stream's work would wait in the same queue; else the host waits here. It also does for all of them if `on_host`: then
    /// it touches the memory itself.
    fn join(&self, events: &[Event], on_host: bool) -> Result<Waits> {
        let (mut waits, mut others) = (Waits { points: Vec::new(), gates: self.gates() }, Vec::new());
        // A caller's device may have binary semaphores, which must not wait for what the host raises.
        let gated = !on_host && self.timeline.queue().has_one_stream() && !self.context.is_of_caller();
        for event in events {
            let own = event.downcast::<VulkanFence>().filter(|fence| fence.context().is(&self.context));
            match event.state() {
                FenceState::Failed(cause) | FenceState::Lost(cause) => {
                    return Err(Error::Failed { operation: "a copy", cause });
                }
                FenceState::Pending if own.is_none() && gated => others.push(event.clone()),
                FenceState::Pending if own.is_none() || on_host => event.wait(WORK)?,
                FenceState::Done | FenceState::Pending => {}
            }
            if let Some(own) = own {
                // Also where it is done: the wait is what makes its writes visible.
                waits.points.push(own.point());
                waits.gates.extend(own.gates().cloned());
            }
        }
        if !others.is_empty() {
            let (point, gate) = self.raise(|raiser| raiser.after_events(others))?;
            waits.points.push(point);
            waits.gates.push(gate);
        }
        Ok(waits)
    }

    /// The gates of events that the stream was told to wait for, and of which it is not known yet how they end.
    fn gates(&self) -> Vec<Arc<Gate>> {
        let mut after = self.after.lock().unwrap_or_else(PoisonError::into_inner);
        after.retain(|gate| gate.is_open());
        after.clone()
    }

    /// Has the host raise a point.
    fn raise<T>(&self, begin: impl FnOnce(&mut Raiser) -> Result<T>) -> Result<T> {
        let mut raiser = self.raiser.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *raiser {
            Some(raiser) => begin(raiser),
            none => begin(none.insert(Raiser::new(&self.context)?)),
        }
    }

    /// The copies of a transfer, and what they wait for.
    fn prepared(&self, transfer: &Transfer) -> Result<(Vec<Move>, Waits)> {
        let dst = transfer.dst().block();
        let moves = transfer.pieces().iter().filter_map(|piece| Move::of(&self.context, piece, dst).transpose());
        let moves = moves.collect::<Result<Vec<Move>>>()?;
        let waits = self.join(&transfer.waits(), !moves.iter().all(Move::is_direct))?;
        Ok((moves, waits))
    }

    /// Queues copies after points. Returns the value after them.
    ///
    /// # Safety
    /// The ranges are inside memory that is kept until the event after the copies, and no copy overlaps its own source. Unless all are
    /// direct, nothing that is pending uses the memory.
    unsafe fn queue(&self, moves: &[Move], waits: Vec<Point>) -> Result<u64, Broken> {
        if moves.iter().all(Move::is_direct) {
            // SAFETY: the caller's promise.
            let record = |device: &ash::Device, commands| unsafe { copy::record(device, commands, moves) };
            let record = (!moves.is_empty()).then_some(&record as _);
            let submitted = self.timeline.submit(waits, record);
            submitted.map_err(|refusal| Broken::refused(&self.context, refusal, None))
        } else {
            // SAFETY: the caller's promise.
            unsafe { staging::stage(&self.timeline, waits, moves) }
        }
    }

    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Whether the stream's queue runs kernels.
    pub(super) fn computes(&self) -> bool {
        self.timeline.computes()
    }

    /// Queues kernels after events. Returns the event after them; or the error, with the event after what may be under way. Until
    /// then `memory` is kept.
    ///
    /// # Safety
    /// The bindings are inside of the memory. With their arguments the kernels access nothing outside of the bindings.
    pub(super) unsafe fn run(
        &self,
        events: &[Event],
        memory: &[&Arc<MemoryBlock>],
        dispatches: &[Dispatch],
    ) -> Result<Event, (Error, Option<Event>)> {
        let memory = Memory::All(memory.iter().copied().map(Arc::clone).collect());
        let Waits { points: waits, gates } = self.join(events, false).map_err(|error| (error, None))?;
        let submitted = match dispatches.first() {
            None => self.timeline.submit(waits, None),
            Some(first) => {
                // SAFETY: the caller's promise; the memory is kept until the event after the kernels, and the timeline keeps the sets.
                let record = |device: &ash::Device, commands, sets: &[vk::DescriptorSet]| unsafe {
                    dispatch::record(device, commands, sets, dispatches);
                };
                self.timeline.submit_kernels(waits, (first.pipeline.layouts, dispatches.len()), &record)
            }
        };
        match submitted.map_err(|refusal| Broken::refused(&self.context, refusal, None)) {
            Ok(value) => Ok(self.keep(value, gates, memory, tracing::Span::none())),
            Err(Broken { error, under_way }) => {
                let event = under_way.map(|value| self.keep(value, gates, memory, tracing::Span::none()));
                Err((error, event))
            }
        }
    }

    /// The event of a submission, which fails if one of the gates does. Until then `memory` is kept and `span` is open.
    fn keep(&self, value: u64, gates: Vec<Arc<Gate>>, memory: Memory, span: tracing::Span) -> Event {
        let event = VulkanFence::event(&self.timeline, value, gates);
        self.reaper.keep(self.timeline.number(), event.clone(), memory, span);
        event
    }
}

impl Stream for VulkanStream {
    fn device(&self) -> DeviceId {
        self.context.id()
    }

    /// Blocks the host for events of other devices, such as a file's, where other streams share the queue; and while it moves bytes that
    /// the device cannot reach.
    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        let span = transfer.span();
        let (moves, Waits { points, gates }) = match self.prepared(&transfer) {
            Ok(prepared) => prepared,
            Err(error) => return Err(transfer.refused(error, None)),
        };
        // SAFETY: the ranges are inside the ends, whose memory is kept until the event after the copies. A destination and its sources
        // are different buffers of the library. Unless all copies are direct, the events of both ends have been waited for, and the
        // destination is the transfer's.
        match unsafe { self.queue(&moves, points) } {
            Ok(value) => {
                let done = self.keep(value, gates, Memory::of(&transfer), span);
                Ok(transfer.launched_in_order(done))
            }
            Err(Broken { error, under_way }) => {
                let event = under_way.map(|value| self.keep(value, gates, Memory::of(&transfer), span));
                Err(transfer.refused(error, event))
            }
        }
    }

    fn wait(&self, event: &Event) -> Result<Joined> {
        let own = event.downcast::<VulkanFence>().filter(|fence| fence.context().is(&self.context));
        match (event.state(), own) {
            (FenceState::Failed(cause) | FenceState::Lost(cause), _) => {
                Err(Error::Failed { operation: "a copy", cause })
            }
            (_, Some(fence)) => {
                self.after.lock().unwrap_or_else(PoisonError::into_inner).extend(fence.gates().cloned());
                self.timeline.wait_for(fence.point());
                Ok(Joined::OnDevice)
            }
            (FenceState::Done, None) => Ok(Joined::OnDevice),
            (FenceState::Pending, None) => Ok(Joined::HostMustWait),
        }
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        let memory = Memory::All(uses.iter().map(|buf| Arc::clone(buf.block())).collect());
        let gates = self.gates();
        let submitted = self.timeline.submit(Vec::new(), None);
        let (value, refused) = match submitted.map_err(|refusal| Broken::refused(&self.context, refusal, None)) {
            Ok(value) => (Some(value), None),
            Err(Broken { error, under_way }) => (under_way, Some(error)),
        };
        let event = value.map(|value| self.keep(value, gates, memory, tracing::Span::none()));
        uses.iter().for_each(|buf| event.iter().for_each(|event| buf.used_until(event.clone())));
        match (event, refused) {
            (Some(event), None) => Ok(event),
            (_, refused) => Err(refused.unwrap_or_else(|| Error::bug("a mark that was not made"))),
        }
    }

    /// On a device whose streams share a queue, all of them wait meanwhile. A caller's device has none of this: its own submissions may
    /// have binary semaphores, which must not wait for what the host has yet to raise.
    fn occupy(&self, time: Duration) -> Result<()> {
        if self.context.is_of_caller() {
            return Err(Missing::Occupy { device: self.context.id() }.into());
        }
        // What the stream is to wait for comes before the time, so it is submitted before.
        self.record(&[])?;
        let end = self.raise(|raiser| raiser.after_time(&self.timeline, time))?;
        self.timeline.wait_for(end);
        self.record(&[]).map(drop)
    }
}

impl fmt::Debug for VulkanStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VulkanStream").field("device", &self.context.id()).finish_non_exhaustive()
    }
}
