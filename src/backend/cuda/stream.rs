//! Streams: copies between host, device and peers, in order.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureStatus};

use super::Opened;
use super::context::{Context, Entered, Refusal};
use super::event::CudaFence;
use super::memory::{DeviceMemory, create_stream, destroy_stream};
use super::reaper::{Memory, Reaper};
use crate::backend::{Allocation, Buf, Event, FenceState, Flight, Joined, Piece, Rejected, Role, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// How long a copy waits on the host for an event that the device cannot wait for.
const DEADLINE: Duration = Duration::from_secs(600);

/// What is known of a stream of the caller's.
pub(super) struct Adopted {
    /// Holds it open.
    pub(super) _keep: Arc<dyn Any + Send + Sync>,
    /// Whether the driver tells whether it is being captured.
    pub(super) tells_captures: bool,
}

/// A stream of a CUDA device.
pub(crate) struct CudaStream {
    handle: sys::CUstream,
    /// Of a stream of the caller's; none for one of the library's own.
    adopted: Option<Adopted>,
    context: Arc<Context>,
    reaper: Arc<Reaper>,
    open: Arc<Opened>,
    /// The copies of one transfer and the event after them belong together.
    order: Mutex<()>,
}

// SAFETY: the driver allows any thread to use a stream.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn create(
        context: &Arc<Context>,
        reaper: &Arc<Reaper>,
        open: &Arc<Opened>,
        role: Role,
    ) -> Result<CudaStream> {
        let (least, greatest) = context.call("cuCtxGetStreamPriorityRange", result::stream::get_priority_range)?;
        // Copies go before the compute that waits for them.
        let priority = if role == Role::Compute { least } else { greatest };
        let handle = create_stream(context, priority)?;
        let (context, reaper, open) = (Arc::clone(context), Arc::clone(reaper), Arc::clone(open));
        Ok(CudaStream { handle, adopted: None, context, reaper, open, order: Mutex::default() })
    }

    /// A stream of the caller's.
    pub(super) fn adopted(
        handle: sys::CUstream,
        adopted: Adopted,
        context: &Arc<Context>,
        reaper: &Arc<Reaper>,
        open: &Arc<Opened>,
    ) -> CudaStream {
        let (context, reaper, open) = (Arc::clone(context), Arc::clone(reaper), Arc::clone(open));
        CudaStream { handle, adopted: Some(adopted), context, reaper, open, order: Mutex::default() }
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Makes the context current for all calls of one piece of work.
    fn enter(&self) -> Result<Entered> {
        self.context.enter().map_err(|refusal| self.context.error(refusal))
    }

    /// Refuses work while the caller captures the stream. Nothing has been asked of the stream then that would spoil the
    /// capture; what was recorded outside of it, as all events of the library are, it could not wait for.
    fn not_capturing(&self, operation: &'static str) -> Result<()> {
        if !self.adopted.as_ref().is_some_and(|adopted| adopted.tells_captures) {
            return Ok(());
        }
        // SAFETY: the stream is alive as long as `self`.
        let asked = self.context.raw("cuStreamIsCapturing", || unsafe { result::stream::is_capturing(self.handle) });
        match asked {
            Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) => Ok(()),
            // The legacy default stream: one that takes turns with it is captured.
            Ok(_) | Err(Refusal::Code(_, DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT))) => {
                Err(Error::Capturing { device: self.context.id(), operation })
            }
            Err(refusal) => Err(self.context.error(refusal)),
        }
    }

    /// Makes the stream wait for what it can wait for, and the host for the rest.
    fn join(&self, events: &[Event]) -> Result<()> {
        for event in events {
            match event.state() {
                FenceState::Done => {}
                FenceState::Failed(cause) => return Err(Error::Failed { operation: "a copy", cause }),
                FenceState::Pending => match event.downcast::<CudaFence>() {
                    Some(fence) => self.wait_for(fence)?,
                    None => event.wait(DEADLINE)?,
                },
            }
        }
        Ok(())
    }

    fn wait_for(&self, fence: &CudaFence) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is alive as long as the fence, the stream as long as `self`.
        let wait = || unsafe { result::stream::wait_event(self.handle, fence.handle(), flags) };
        self.context.call("cuStreamWaitEvent", wait)
    }

    fn queue(&self, piece: &Piece, dst: &Allocation) -> Result<()> {
        let (from, to) = (piece.from.clone(), piece.at..piece.at + piece.from.len());
        if from.is_empty() {
            return Ok(());
        }
        match (End::of(piece.src.allocation(), from)?, End::of(dst, to)?) {
            (End::Host(src), End::Device(_, dst)) => {
                // SAFETY: both ranges are inside allocations that the caller keeps until the event after the copy.
                let copy =
                    || unsafe { sys::cuMemcpyHtoDAsync_v2(dst, src.address as *const c_void, src.bytes, self.handle) };
                self.context.call("cuMemcpyHtoDAsync", || copy().result())
            }
            (End::Device(_, src), End::Host(dst)) => {
                // SAFETY: as above; the destination has one owner, and that one does not look before the event.
                let copy =
                    || unsafe { sys::cuMemcpyDtoHAsync_v2(dst.address as *mut c_void, src, dst.bytes, self.handle) };
                self.context.call("cuMemcpyDtoHAsync", || copy().result())
            }
            (End::Device(source, src), End::Device(target, dst)) => {
                self.queue_on_devices(source, src, target, dst, piece.from.len())
            }
            (End::Host(_), End::Host(_)) => {
                Err(Error::invalid("a stream of a CUDA device copies nothing from host to host"))
            }
        }
    }

    fn queue_on_devices(&self, source: &Context, src: u64, target: &Context, dst: u64, bytes: usize) -> Result<()> {
        if source.id() == target.id() {
            // SAFETY: as in `queue`.
            return self
                .context
                .call("cuMemcpyDtoDAsync", || unsafe { result::memcpy_dtod_async(dst, src, bytes, self.handle) });
        }
        let reached = self.open.get(target.id().index()).is_some_and(|device| device.reaches(source.id()));
        if !reached {
            let (from, to) = (source.id(), target.id());
            return Err(Error::invalid(format!("{to} cannot reach the memory of {from}; copy through the host")));
        }
        // SAFETY: as in `queue`; both contexts are retained by the memory that belongs to them.
        let copy =
            || unsafe { result::memcpy_peer_async(target.handle(), dst, source.handle(), src, bytes, self.handle) };
        self.context.call("cuMemcpyPeerAsync", copy)
    }

    /// Queues work of the device's own with `queue`, after `waits`; the event after it, until which `memory` is kept.
    pub(super) fn run(
        &self,
        waits: &[Event],
        memory: Vec<Arc<Allocation>>,
        queue: impl FnOnce(sys::CUstream) -> Result<()>,
    ) -> Result<Event> {
        let _entered = self.enter()?;
        self.not_capturing("patching")?;
        self.join(waits)?;
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        queue(self.handle)?;
        self.mark(Memory::All(memory), tracing::Span::none())
    }

    /// An event after all work so far, until which `memory` is kept and `span` is open.
    fn mark(&self, memory: Memory, span: tracing::Span) -> Result<Event> {
        match CudaFence::record(&self.context, self.handle) {
            Ok(fence) => {
                let event = Event::new(Arc::new(fence));
                self.reaper.keep(event.clone(), memory, span);
                Ok(event)
            }
            Err(refusal) => {
                let error = self.context.error(refusal);
                // SAFETY: the stream is this value's own.
                let idle = || unsafe { result::stream::synchronize(self.handle) };
                if let Err(unknown) = self.context.call("cuStreamSynchronize", idle) {
                    // Work that uses the memory may run, and nobody will know when it is over.
                    self.context.lose(&unknown);
                    memory.abandon();
                }
                Err(error)
            }
        }
    }
}

impl Stream for CudaStream {
    fn device(&self) -> DeviceId {
        self.context.id()
    }

    /// Waits on the host only for events of other backends' streams, such as a file's.
    fn copy(&self, mut transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        let _entered = match self.enter() {
            Ok(entered) => entered,
            Err(error) => return Err(transfer.rejected(error)),
        };
        if let Err(error) = self.not_capturing("a copy").and_then(|()| self.join(&transfer.waits())) {
            return Err(transfer.rejected(error));
        }
        let dst = Arc::clone(transfer.dst().allocation());
        let memory = match transfer.pieces() {
            [piece] => Memory::Ends([Arc::clone(piece.src.allocation()), dst]),
            pieces => {
                let sources = pieces.iter().map(|piece| Arc::clone(piece.src.allocation()));
                Memory::All(sources.chain([dst]).collect())
            }
        };
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let span = copy_span(&transfer);
        let queued = transfer.pieces().iter().try_for_each(|piece| self.queue(piece, transfer.dst().allocation()));
        match (queued, self.mark(memory, span)) {
            (Ok(()), Ok(done)) => Ok(transfer.launched(done)),
            (Err(error), marked) => {
                // Some pieces may be under way; whoever writes the destination next waits for them.
                if let Ok(event) = marked {
                    transfer.dst_mut().after(event);
                }
                Err(transfer.rejected(error))
            }
            (Ok(()), Err(error)) => Err(transfer.rejected(error)),
        }
    }

    fn wait(&self, event: &Event) -> Result<Joined> {
        let _entered = self.enter()?;
        self.not_capturing("a wait")?;
        match (event.state(), event.downcast::<CudaFence>()) {
            (FenceState::Pending, Some(fence)) => self.wait_for(fence).map(|()| Joined::OnDevice),
            (FenceState::Done, None) | (_, Some(_)) => Ok(Joined::OnDevice),
            (_, None) => Ok(Joined::HostMustWait),
        }
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        let _entered = self.enter()?;
        self.not_capturing("the mark after a use")?;
        let memory = uses.iter().map(|buf| Arc::clone(buf.allocation())).collect();
        let event = self.mark(Memory::All(memory), tracing::Span::none())?;
        uses.iter().for_each(|buf| buf.used_until(event.clone()));
        Ok(event)
    }

    fn occupy(&self, time: Duration) -> Result<()> {
        self.not_capturing("time that passes")?;
        /// Sleeps on a thread of the driver's, which holds the stream meanwhile.
        unsafe extern "C" fn sleep(time: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below, and given to one call of this function.
            let time = unsafe { Box::from_raw(time.cast::<Duration>()) };
            let _span = tracing::debug_span!("compute", ?time).entered();
            std::thread::sleep(*time);
        }
        let boxed = Box::into_raw(Box::new(time)).cast::<c_void>();
        // SAFETY: the function takes the box back.
        let launch: fn(sys::CUstream, *mut c_void) -> Result<(), DriverError> =
            |stream, boxed| unsafe { result::stream::launch_host_function(stream, sleep, boxed) };
        self.context.call("cuLaunchHostFunc", || launch(self.handle, boxed)).inspect_err(|_| {
            // SAFETY: the call was refused, so nobody else has the box.
            drop(unsafe { Box::from_raw(boxed.cast::<Duration>()) });
        })
    }
}

/// What a trace shows from when a copy is queued until it was seen to be done.
fn copy_span(transfer: &Transfer) -> tracing::Span {
    let to = transfer.dst().device();
    let from = || transfer.pieces().first().map_or(to, |piece| piece.src.device());
    let bytes = || transfer.pieces().iter().map(|piece| piece.from.len()).sum::<usize>();
    // Of its own, since it outlives whatever the thread that queues it is at.
    tracing::debug_span!(parent: None, "copy", from = %from(), to = %to, bytes = bytes())
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.adopted.is_none() {
            destroy_stream(&self.context, self.handle);
        }
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStream").field("device", &self.context.id()).finish_non_exhaustive()
    }
}

/// One end of a copy.
enum End<'a> {
    Host(HostRange),
    Device(&'a Context, u64),
}

struct HostRange {
    address: usize,
    bytes: usize,
}

impl<'a> End<'a> {
    fn of(allocation: &'a Allocation, range: Range<usize>) -> Result<End<'a>> {
        if let Some(memory) = allocation.downcast::<DeviceMemory>() {
            return Ok(End::Device(memory.context(), memory.device_address() + range.start as u64));
        }
        let Some(host) = allocation.storage().host() else {
            let device = allocation.device();
            return Err(Error::invalid(format!(
                "a CUDA stream cannot reach the memory of {device}; copy through the host"
            )));
        };
        // The bytes stay where they are as long as the allocation lives, and the events of its uses keep others
        // from writing them; the lock is only for the moment of asking.
        let bytes = host.read().unwrap_or_else(PoisonError::into_inner);
        let address = bytes.bytes()[range.clone()].as_ptr() as usize;
        Ok(End::Host(HostRange { address, bytes: range.len() }))
    }
}
