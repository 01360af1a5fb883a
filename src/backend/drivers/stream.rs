//! Streams: copies between host, device and peers, in order.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use super::Opened;
use super::context::{Context, ContextGuard, Refusal};
use super::event::DriverFence;
use super::memory::DeviceMemory;
use super::pinned::is_pinned_for;
use super::verbs::{Address, Meaning, Outcome, Peers, StreamHandle, Verbs};
use crate::backend::reaper::{Memory, Reaper};
use crate::backend::{
    Buf, Event, Fence, FenceState, Flight, Joined, MemoryBlock, Piece, Rejected, Role, Stream, Transfer,
};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::limits::{RELEASE, WORK};

/// The handle of CUDA's per-thread default stream, the greatest of its fixed handles.
pub(crate) const PER_THREAD: usize = 2;

/// A stream's handle, kept for as long as an event may be recorded on it.
pub(super) struct RawStream {
    handle: StreamHandle,
    context: Arc<Context>,
    /// The object that holds an adopted stream open. `None` for a stream of the library.
    adopted: Option<Arc<dyn Any + Send + Sync>>,
    /// The thread that the stream belongs to, if the handle is that of the per-thread default stream.
    thread: Option<ThreadId>,
    /// A number that no other stream of this process ever has.
    number: u64,
}

// SAFETY: the driver allows any thread to use a stream.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    fn new(handle: StreamHandle, context: &Arc<Context>, adopted: Option<Arc<dyn Any + Send + Sync>>) -> RawStream {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let per_thread = context.driver().rules.per_thread == Some(handle.addr());
        let thread = per_thread.then(|| std::thread::current().id());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        RawStream { handle, context: Arc::clone(context), adopted, thread, number }
    }

    /// A stream that does not wait for the legacy default stream.
    pub(super) fn create(context: &Arc<Context>, priority: Option<c_int>) -> Result<RawStream, Refusal> {
        // SAFETY: the context is current.
        let handle = context.raw(|verbs| unsafe { verbs.stream_create(priority) })?;
        Ok(RawStream::new(handle, context, None))
    }

    pub(super) fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Waits for the stream's work, if any is pending. Returns whether none is any more.
    fn is_idle(&self) -> bool {
        let fence = DriverFence::new(&self.context, Vec::new());
        let recorded = fence.and_then(|fence| fence.record(self).map(|()| fence));
        // Where nothing can be recorded, nothing runs any more.
        !recorded.is_ok_and(|fence| matches!(fence.wait(RELEASE), FenceState::Pending))
    }

    /// Whether the handle refers to this stream in the calling thread.
    pub(super) fn is_of_this_thread(&self) -> bool {
        self.thread.is_none_or(|thread| thread == std::thread::current().id())
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if self.adopted.is_some() {
            return;
        }
        if !self.context.driver().rules.destroys_pending && !self.is_idle() {
            tracing::warn!(device = %self.context.id(), "a stream whose work does not end is not given back to the driver");
            return;
        }
        // SAFETY: created by `create`, destroyed once; the driver destroys it when its work is done.
        let _ = self.context.raw(|verbs| unsafe { verbs.stream_destroy(self.handle) });
    }
}

/// A stream of a device.
pub(crate) struct DriverStream {
    stream: Arc<RawStream>,
    context: Arc<Context>,
    reaper: Arc<Reaper>,
    open: Arc<Opened>,
    /// Keeps the copies of one transfer and the event after them together.
    order: Mutex<()>,
    /// The pending events of other devices that all later work waits for.
    after: Mutex<Vec<Event>>,
}

impl DriverStream {
    pub(super) fn create(
        context: &Arc<Context>,
        reaper: &Arc<Reaper>,
        open: &Arc<Opened>,
        role: Role,
    ) -> Result<DriverStream> {
        let (compute, copies) = context.call(|verbs| verbs.stream_priorities())?;
        let priority = if role == Role::Compute { compute } else { copies };
        let stream = RawStream::create(context, priority).map_err(|refusal| context.error(refusal))?;
        Ok(DriverStream::of(stream, reaper, open))
    }

    /// A stream of the caller, which `keep` holds open.
    pub(super) fn adopted(
        handle: StreamHandle,
        keep: Arc<dyn Any + Send + Sync>,
        context: &Arc<Context>,
        reaper: &Arc<Reaper>,
        open: &Arc<Opened>,
    ) -> DriverStream {
        DriverStream::of(RawStream::new(handle, context, Some(keep)), reaper, open)
    }

    fn of(stream: RawStream, reaper: &Arc<Reaper>, open: &Arc<Opened>) -> DriverStream {
        let (context, reaper, open) = (Arc::clone(&stream.context), Arc::clone(reaper), Arc::clone(open));
        let (order, after) = (Mutex::default(), Mutex::default());
        DriverStream { stream: Arc::new(stream), context, reaper, open, order, after }
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> StreamHandle {
        self.stream.handle
    }

    /// Makes the context current for all calls of one piece of work, and checks that the stream accepts work: it belongs to this
    /// thread, and the caller is not capturing it. The check itself does not invalidate a capture. A captured stream could not
    /// wait for events recorded outside the capture, as all events of the library are.
    fn enter(&self, operation: &'static str) -> Result<ContextGuard<'_>> {
        if !self.stream.is_of_this_thread() {
            let device = self.context.id();
            return Err(Error::invalid(format!(
                "{operation} on the per-thread default stream of {device}, from another thread than the one that adopted it"
            )));
        }
        let entered = self.context.enter().map_err(|refusal| self.context.error(refusal))?;
        if self.stream.adopted.is_none() {
            return Ok(entered);
        }
        // SAFETY: the stream is alive as long as `self`.
        match self.context.raw(|verbs| unsafe { verbs.is_capturing(self.handle()) }) {
            Ok(false) => Ok(entered),
            Err(refusal) if !refusal.is(Meaning::CaptureImplicit) => Err(self.context.error(refusal)),
            // This stream is captured, or one that synchronises with the legacy default stream is.
            _ => Err(Error::Capturing { device: self.context.id(), operation }),
        }
    }

    /// Makes the stream wait for the events that it can wait for, and the host for the others. Returns the events that may
    /// complete on the device although their work failed elsewhere: the event of the next work must check them too.
    fn join(&self, events: &[Event]) -> Result<Vec<Event>> {
        let mut misleading = self.after();
        for event in events {
            match event.state() {
                FenceState::Done => continue,
                FenceState::Failed(cause) | FenceState::Lost(cause) => {
                    return Err(Error::Failed { operation: "a copy", cause });
                }
                FenceState::Pending => {}
            }
            match event.downcast::<DriverFence>() {
                Some(fence) if fence.is_awaited_by(&self.context) => {
                    self.wait_for(event, fence)?;
                    if fence.can_mislead(&self.context) {
                        misleading.push(event.clone());
                    }
                }
                _ => event.wait(WORK)?,
            }
        }
        Ok(misleading)
    }

    fn wait_for(&self, event: &Event, fence: &DriverFence) -> Result<()> {
        // Waiting for an unrecorded event would not wait at all.
        let Some(handle) = fence.handle() else { return event.wait(WORK) };
        // SAFETY: the event is alive as long as the fence, the stream as long as `self`.
        let told = self.context.raw(|verbs| unsafe { verbs.stream_wait(self.handle(), handle) });
        told.map_err(|refusal| match event.state() {
            // The code may come from the event's device, which failed meanwhile. As far as is known, this device has not.
            FenceState::Failed(cause) | FenceState::Lost(cause) if fence.is_of_another(&self.context) => {
                Error::Failed { operation: "a copy", cause }
            }
            _ => self.context.error(refusal),
        })
    }

    /// The events of other devices that [`wait`](Stream::wait) was called for and that are not done. A failed event is returned
    /// once: the work that is queued next fails with it.
    fn after(&self) -> Vec<Event> {
        let mut after = self.after.lock().unwrap_or_else(PoisonError::into_inner);
        after.retain(|event| !matches!(event.state(), FenceState::Done));
        let now = after.clone();
        after.retain(|event| !event.is_complete());
        now
    }

    /// Fails if the stream accepts no work now. `what` is what is refused.
    pub(super) fn check_accepts(&self, what: &'static str) -> Result<()> {
        self.enter(what).map(drop)
    }

    /// Queues work of the device with `queue`, after `waits`. Returns the event after it, until which `memory` is kept. `what` is
    /// what is refused while the stream is captured.
    ///
    /// # Errors
    /// The error, with the event after which any work that may have been queued is complete, if it may be under way.
    pub(super) fn run(
        &self,
        what: &'static str,
        waits: &[Event],
        memory: Vec<Arc<MemoryBlock>>,
        queue: impl FnOnce(StreamHandle) -> Result<()>,
    ) -> Result<Event, (Error, Option<Event>)> {
        let not_queued = |error| (error, None);
        let _entered = self.enter(what).map_err(not_queued)?;
        let others = self.join(waits).map_err(not_queued)?;
        self.queue(others, Memory::All(memory), tracing::Span::none(), || queue(self.handle()))
    }

    /// Queues work with `queue`. Returns the event after it, until which `memory` is kept and `span` is open.
    ///
    /// # Errors
    /// The error, with the event after which any work that may have been queued is complete, unless it is already known to be
    /// complete.
    fn queue(
        &self,
        others: Vec<Event>,
        memory: Memory,
        span: tracing::Span,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<Event, (Error, Option<Event>)> {
        // The step that can fail without harm comes first, before anything is in flight.
        let fence = DriverFence::new(&self.context, others).map_err(|refusal| (self.context.error(refusal), None))?;
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let queued = Queued { context: &self.context, memory: &memory };
        let outcome = queue();
        let recorded = fence.record(&self.stream);
        std::mem::forget(queued);
        let keep = |fence: DriverFence, memory| {
            let event = Event::new(Arc::new(fence));
            self.reaper.keep(self.stream.number, event.clone(), memory, span);
            event
        };
        match (outcome, recorded) {
            (Ok(()), Ok(())) => Ok(keep(fence, memory)),
            // Some of the work may be in flight.
            (Err(error), Ok(())) => Err((error, Some(keep(fence, memory)))),
            (outcome, Err(refusal)) => {
                let error = outcome.err().unwrap_or_else(|| self.context.error(refusal));
                // SAFETY: the stream is alive as long as `self`.
                let idle = self.context.raw(|verbs| unsafe { verbs.stream_synchronize(self.handle()) });
                match idle {
                    Ok(()) => Err((error, None)),
                    // Neither call is possible during a capture; the reaper's queries record the event once it is.
                    Err(refused) if refused.is_of_captures() => {
                        fence.record_later(&self.stream);
                        Err((error, Some(keep(fence, memory))))
                    }
                    // Work that uses the memory may be running, and its completion cannot be observed.
                    Err(unknown) => {
                        let unknown = self.context.error(unknown);
                        self.context.lose(&unknown);
                        memory.abandon();
                        Err((error, Some(Event::new(Arc::new(fence)))))
                    }
                }
            }
        }
    }
}

/// The memory of work that is being queued. If queueing panics, the memory is never freed.
struct Queued<'a> {
    context: &'a Context,
    memory: &'a Memory,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.memory.abandon();
        tracing::error!(device = %self.context.id(), "queueing work panicked; its memory is abandoned");
    }
}

impl Stream for DriverStream {
    fn device(&self) -> DeviceId {
        self.context.id()
    }

    /// Blocks the host only for events of other backends' streams, such as a file's.
    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        match self.copy_in_order(&transfer) {
            Ok((done, in_order)) => Ok(launched(transfer, done, in_order)),
            Err((error, under_way)) => Err(transfer.refused(error, under_way)),
        }
    }

    fn wait(&self, event: &Event) -> Result<Joined> {
        let is_done = || matches!(event.state(), FenceState::Done);
        if self.stream.adopted.is_none() && is_done() {
            return Ok(Joined::OnDevice);
        }
        let _entered = self.enter("a wait")?;
        match (event.state(), event.downcast::<DriverFence>()) {
            (FenceState::Done, _) => Ok(Joined::OnDevice),
            (FenceState::Failed(cause) | FenceState::Lost(cause), _) => {
                Err(Error::Failed { operation: "a copy", cause })
            }
            (FenceState::Pending, Some(fence)) if fence.is_awaited_by(&self.context) && fence.handle().is_some() => {
                self.wait_for(event, fence)?;
                if fence.can_mislead(&self.context) {
                    self.after.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone());
                }
                Ok(Joined::OnDevice)
            }
            _ => Ok(Joined::HostMustWait),
        }
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        let _entered = self.enter("the mark after a use")?;
        let memory = Memory::All(uses.iter().map(|buf| Arc::clone(buf.block())).collect());
        let (event, refused) = match self.queue(self.after(), memory, tracing::Span::none(), || Ok(())) {
            Ok(event) => (Some(event), None),
            Err((error, under_way)) => (under_way, Some(error)),
        };
        uses.iter().for_each(|buf| event.iter().for_each(|event| buf.used_until(event.clone())));
        match (event, refused) {
            (Some(event), None) => Ok(event),
            (_, refused) => Err(refused.unwrap_or_else(|| Error::bug("a mark that was not made"))),
        }
    }

    fn occupy(&self, time: Duration) -> Result<()> {
        let _entered = self.enter("time that passes")?;
        /// Sleeps on a thread of the driver, which holds the stream meanwhile.
        unsafe extern "system" fn sleep(time: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below, and given to one call of this function.
            let time = unsafe { Box::from_raw(time.cast::<Duration>()) };
            let _span = tracing::debug_span!("compute", ?time).entered();
            std::thread::sleep(*time);
        }
        let boxed = Box::into_raw(Box::new(time)).cast::<c_void>();
        // SAFETY: the function takes the box back.
        self.context.call(|verbs| unsafe { verbs.launch_host_function(self.handle(), sleep, boxed) }).inspect_err(
            |_| {
                // SAFETY: the call was refused, so nobody else has the box.
                drop(unsafe { Box::from_raw(boxed.cast::<Duration>()) });
            },
        )
    }
}

/// The flight of a copy that was queued before `done`. With `in_order`, that event replaces the events of all earlier uses of
/// the destination.
fn launched(transfer: Transfer, done: Event, in_order: bool) -> Flight {
    if in_order { transfer.launched_in_order(done) } else { transfer.launched(done) }
}

impl fmt::Debug for DriverStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverStream").field("device", &self.context.id()).finish_non_exhaustive()
    }
}

/// One copy as the driver performs it.
enum Move<'a> {
    Up { src: *const c_void, pinned: bool, dst: Address, bytes: usize },
    Down { src: Address, dst: *mut c_void, bytes: usize },
    Within { src: Address, dst: Address, bytes: usize },
    Across { from: &'a Context, src: Address, to: &'a Context, dst: Address, bytes: usize },
    Nothing,
}

impl Move<'_> {
    /// # Safety
    /// The ranges are inside memory that stays alive until the copy is done, and both contexts are retained.
    unsafe fn queue(&self, verbs: &dyn Verbs, stream: StreamHandle) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe {
            match *self {
                Move::Up { src, dst, bytes, .. } => verbs.copy_to_device(dst, src, bytes, stream),
                Move::Down { src, dst, bytes } => verbs.copy_to_host(dst, src, bytes, stream),
                Move::Within { src, dst, bytes } => verbs.copy_on_device(dst, src, bytes, stream),
                Move::Across { from, src, to, dst, bytes } => {
                    verbs.copy_between((to.place(), dst), (from.place(), src), bytes, stream)
                }
                Move::Nothing => Ok(()),
            }
        }
    }
}

/// One end of a copy.
enum End<'a> {
    Host(*mut c_void),
    Device(&'a Context, Address),
}

impl<'a> End<'a> {
    /// The end at offset `at` of an allocation. `None` for memory that no stream of such a driver can access.
    fn of(allocation: &'a MemoryBlock, at: usize) -> Option<End<'a>> {
        if let Some(memory) = allocation.downcast::<DeviceMemory>() {
            return Some(End::Device(memory.context(), memory.device_address() + at as u64));
        }
        allocation.host_at(&(at..at)).map(|address| End::Host(address.cast()))
    }
}

impl DriverStream {
    /// Queues the copies of a transfer and one event after them. Returns the event, and whether it replaces the events of all
    /// earlier uses of the destination. It does not if another device's event is among these, since the completion of that
    /// event may never be known.
    fn copy_in_order(&self, transfer: &Transfer) -> Result<(Event, bool), (Error, Option<Event>)> {
        let unqueued = |error| (error, None);
        let _entered = self.enter("a copy").map_err(unqueued)?;
        // Resolved before the first call, since nothing between two calls may fail.
        let dst = transfer.dst().block();
        let moves = transfer.pieces().iter().map(|piece| self.resolve(piece, dst)).collect::<Result<Vec<Move<'_>>>>();
        let moves = moves.map_err(unqueued)?;
        let others = self.join(&transfer.waits()).map_err(unqueued)?;
        let in_order = others.is_empty();
        let done = self.queue(others, Memory::of(transfer), transfer.span(), || {
            // SAFETY: the ranges are inside allocations that are kept until the event after the copies.
            let copy = |verbs: &dyn Verbs| moves.iter().try_for_each(|one| unsafe { one.queue(verbs, self.handle()) });
            self.context.call(|verbs| self.queue_batch(&moves).unwrap_or_else(|| copy(verbs)))
        })?;
        Ok((done, in_order))
    }

    /// Queues uploads from pinned memory with one call, if the driver supports that. `None` if each copy needs its own call.
    fn queue_batch(&self, moves: &[Move<'_>]) -> Option<Outcome> {
        // The driver's fixed streams accept no batches.
        let able = moves.len() > 1 && self.handle().addr() > PER_THREAD && self.context.driver().takes_batches();
        let (mut dsts, mut srcs, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
        for one in moves.iter().filter(|_| able) {
            let Move::Up { src, pinned: true, dst, bytes } = *one else { return None };
            // The copies of a batch are unordered, so no two of them may write the same bytes.
            if dsts.last().zip(sizes.last()).is_some_and(|(last, size)| dst < last + *size as u64) {
                return None;
            }
            dsts.push(dst);
            srcs.push(src.addr() as u64);
            sizes.push(bytes);
        }
        // SAFETY: as for single copies; the destinations are in order and do not overlap.
        if able { unsafe { self.context.driver().copy_batch(&dsts, &srcs, &sizes, self.handle()) } } else { None }
    }

    /// The copy that the driver performs for one piece of a transfer.
    fn resolve<'a>(&self, piece: &'a Piece, dst: &'a MemoryBlock) -> Result<Move<'a>> {
        let stream = self.context.id();
        self.reached(piece, dst).ok_or(Error::Unreachable { stream, from: piece.src.device(), to: dst.device() })
    }

    /// As [`resolve`](DriverStream::resolve). `None` if this stream cannot copy the piece: from host to host, between other
    /// devices, or if one of two devices cannot access the other's memory.
    fn reached<'a>(&self, piece: &'a Piece, dst: &'a MemoryBlock) -> Option<Move<'a>> {
        let bytes = piece.from.len();
        if bytes == 0 {
            return Some(Move::Nothing);
        }
        let is_own = |context: &Context| context.is(&self.context);
        match (End::of(piece.src.block(), piece.from.start)?, End::of(dst, piece.at)?) {
            (End::Host(src), End::Device(to, dst)) if is_own(to) => {
                let pinned = is_pinned_for(piece.src.block(), self.context.driver());
                Some(Move::Up { src: src.cast_const(), pinned, dst, bytes })
            }
            (End::Device(from, src), End::Host(dst)) if is_own(from) => Some(Move::Down { src, dst, bytes }),
            (End::Device(from, src), End::Device(to, dst)) if is_own(from) || is_own(to) => {
                if from.is(to) {
                    return Some(Move::Within { src, dst, bytes });
                }
                let driver = self.context.driver();
                let able = match driver.rules.peers {
                    Peers::Both => true,
                    Peers::Pull => is_own(to),
                    Peers::Never(_) => false,
                };
                let able = able && driver.is(from.driver()) && driver.is(to.driver());
                let receiver = || self.open.get(to.id().index());
                let reached = able && receiver().is_some_and(|device| device.reaches(from.id()));
                reached.then_some(Move::Across { from, src, to, dst, bytes })
            }
            _ => None,
        }
    }
}
