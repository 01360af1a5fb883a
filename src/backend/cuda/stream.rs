//! Streams: copies between host, device and peers, in order.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::Opened;
use super::context::Context;
use super::event::CudaFence;
use super::memory::{DeviceMemory, create_stream, destroy_stream};
use super::reaper::Reaper;
use crate::backend::{Allocation, Buf, Event, FenceState, Flight, Joined, Piece, Rejected, Role, Stream, Transfer};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// How long a copy waits on the host for an event that the device cannot wait for.
const DEADLINE: Duration = Duration::from_secs(600);

/// A stream of a CUDA device.
pub(crate) struct CudaStream {
    handle: sys::CUstream,
    /// What holds a stream of the caller's open; none for one of the library's own.
    adopted: Option<Arc<dyn Any + Send + Sync>>,
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

    /// A stream of the caller's, held open by `keep`.
    pub(super) fn adopted(
        handle: sys::CUstream,
        keep: Arc<dyn Any + Send + Sync>,
        context: &Arc<Context>,
        reaper: &Arc<Reaper>,
        open: &Arc<Opened>,
    ) -> CudaStream {
        let (context, reaper, open) = (Arc::clone(context), Arc::clone(reaper), Arc::clone(open));
        CudaStream { handle, adopted: Some(keep), context, reaper, open, order: Mutex::default() }
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Makes the stream wait for what it can wait for, and the host for the rest.
    fn join(&self, events: &[Event]) -> Result<()> {
        for event in events {
            if self.wait(event)? == Joined::HostMustWait {
                event.wait(DEADLINE)?;
            }
            if let FenceState::Failed(cause) = event.state() {
                return Err(Error::Failed { operation: "a copy", cause });
            }
        }
        Ok(())
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

    /// An event after all work so far, until which `memory` is kept and `span` is open.
    fn mark(&self, memory: Vec<Arc<Allocation>>, span: tracing::Span) -> Result<Event> {
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
                    memory.iter().for_each(|allocation| allocation.abandon());
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
        if let Err(error) = self.join(&transfer.waits()) {
            return Err(transfer.rejected(error));
        }
        let memory = |transfer: &Transfer| -> Vec<Arc<Allocation>> {
            let sources = transfer.pieces().iter().map(|piece| Arc::clone(piece.src.allocation()));
            sources.chain([Arc::clone(transfer.dst().allocation())]).collect()
        };
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let span = copy_span(&transfer);
        let queued = transfer.pieces().iter().try_for_each(|piece| self.queue(piece, transfer.dst().allocation()));
        match (queued, self.mark(memory(&transfer), span)) {
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
        let Some(fence) = event.downcast::<CudaFence>() else {
            let done = matches!(event.state(), FenceState::Done);
            return Ok(if done { Joined::OnDevice } else { Joined::HostMustWait });
        };
        if matches!(event.state(), FenceState::Pending) {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: the event is alive as long as `event`, the stream as long as `self`.
            self.context.call("cuStreamWaitEvent", || unsafe {
                result::stream::wait_event(self.handle, fence.handle(), flags)
            })?;
        }
        Ok(Joined::OnDevice)
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        let memory = uses.iter().map(|buf| Arc::clone(buf.allocation())).collect();
        let event = self.mark(memory, tracing::Span::none())?;
        uses.iter().for_each(|buf| buf.used_until(event.clone()));
        Ok(event)
    }

    fn occupy(&self, time: Duration) -> Result<()> {
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
