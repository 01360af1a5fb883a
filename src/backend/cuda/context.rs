//! A device's primary context: current for every call, and lost for good after an error that sticks.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUevent_flags, CUresult};

use super::driver::describe;
use super::kernels::Module;
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// A retained primary context.
pub(super) struct Context {
    id: DeviceId,
    device: sys::CUdevice,
    handle: sys::CUcontext,
    lost: OnceLock<String>,
    events: Mutex<Vec<Spare>>,
    /// The kernels, or why the driver refused them; here, since memory in use by a launch holds the context.
    kernels: OnceLock<Result<Module, String>>,
}

// SAFETY: the driver allows any thread to use a context that it has made current, and `call` makes it so.
unsafe impl Send for Context {}
// SAFETY: as above; the driver orders concurrent calls itself.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of device number `id`.
    pub(super) fn retain(id: DeviceId) -> Result<Context> {
        let absent = |call: &str, error| Error::DeviceAbsent { device: id, why: describe(call, error) };
        let ordinal = i32::try_from(id.index()).unwrap_or(i32::MAX);
        let device = result::device::get(ordinal).map_err(|error| absent("cuDeviceGet", error))?;
        // SAFETY: the device was just got from the driver.
        let handle = unsafe { result::primary_ctx::retain(device) };
        let handle = handle.map_err(|error| absent("cuDevicePrimaryCtxRetain", error))?;
        let (events, kernels) = (Mutex::default(), OnceLock::new());
        Ok(Context { id, device, handle, lost: OnceLock::new(), events, kernels })
    }

    pub(super) fn id(&self) -> DeviceId {
        self.id
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub(super) fn handle(&self) -> sys::CUcontext {
        self.handle
    }

    pub(super) fn kernels(&self) -> &OnceLock<Result<Module, String>> {
        &self.kernels
    }

    /// Why the device is lost, if it is.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Gives the device up: something runs on it that cannot be waited for.
    pub(super) fn lose(&self, why: &Error) {
        let _ = self.lost.set(why.to_string());
    }

    /// Runs calls of the driver with this context current, and leaves the thread with the one it had.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] at once when the device is lost, and when the call loses it; [`Error::Driver`] for any
    /// other refusal.
    pub(super) fn call<T>(&self, name: &'static str, calls: impl FnOnce() -> Result<T, DriverError>) -> Result<T> {
        self.raw(name, calls).map_err(|refusal| self.error(refusal))
    }

    /// As [`call`](Context::call), for callers that react to the driver's own code.
    pub(super) fn raw<T>(
        &self,
        name: &'static str,
        calls: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, Refusal> {
        let _entered = self.enter()?;
        calls().map_err(|error| Refusal::Code(name, error))
    }

    /// Makes this context the calling thread's until what is returned is dropped, which leaves the thread with the one it
    /// had. Calls meanwhile find it made, which saves each of them three calls.
    ///
    /// # Errors
    /// When the device is lost, and when the driver refuses.
    pub(super) fn enter(&self) -> Result<Entered, Refusal> {
        if self.lost().is_some() {
            return Err(Refusal::Lost);
        }
        let handle = self.handle.addr();
        let outer = ENTERED.get();
        if outer == handle {
            return Ok(Entered { restore: None, outer, thread: PhantomData });
        }
        let before = result::ctx::get_current().map_err(|error| Refusal::Code("cuCtxGetCurrent", error))?;
        let restore = (before != Some(self.handle)).then_some(before);
        if restore.is_some() {
            // SAFETY: the context is retained for as long as `self` lives.
            unsafe { result::ctx::set_current(self.handle) }
                .map_err(|error| Refusal::Code("cuCtxSetCurrent", error))?;
        }
        ENTERED.set(handle);
        Ok(Entered { restore, outer, thread: PhantomData })
    }

    /// An event to record: one that was let go of, or a new one.
    pub(super) fn event(&self) -> Result<sys::CUevent, Refusal> {
        let spare = self.events().pop();
        match spare {
            Some(Spare(event)) => Ok(event),
            None => self.raw("cuEventCreate", || result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)),
        }
    }

    /// Takes an event that nobody asks for any more. Streams that were told to wait for it wait for what it stood for
    /// then, so it can be recorded anew.
    pub(super) fn recycle(&self, event: sys::CUevent) {
        if self.lost().is_some() {
            return;
        }
        let mut events = self.events();
        if events.len() < MOST_EVENTS {
            events.push(Spare(event));
            return;
        }
        drop(events);
        self.destroy(event);
    }

    /// Gives the events that are kept for use back to the driver.
    pub(super) fn trim_events(&self) {
        let events = std::mem::take(&mut *self.events());
        events.into_iter().for_each(|Spare(event)| self.destroy(event));
    }

    fn destroy(&self, event: sys::CUevent) {
        // SAFETY: created by `event`, destroyed once; the driver lets an event go before it has fired. What a lost or
        // departed driver refuses is gone already.
        let _ = self.raw("cuEventDestroy", || unsafe { result::event::destroy(event) });
    }

    fn events(&self) -> MutexGuard<'_, Vec<Spare>> {
        // Every change is one push or pop, so a poisoned lock still guards whole events.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a refused call; one that sticks makes the device lost.
    pub(super) fn error(&self, refusal: Refusal) -> Error {
        match refusal {
            Refusal::Lost => {}
            Refusal::Code(call, code) if sticks(code.0) => {
                let _ = self.lost.set(describe(call, code));
            }
            Refusal::Code(call, code) => {
                let name = code.error_name().unwrap_or(c"?").to_string_lossy().into_owned();
                let text = code.error_string().unwrap_or(c"?").to_string_lossy().into_owned();
                return Error::Driver { device: self.id, call, code: name, text };
            }
        }
        Error::DeviceLost { device: self.id, why: self.lost().unwrap_or_default().to_owned() }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.trim_events();
        if let Some(Ok(module)) = self.kernels.take() {
            module.unload(self);
        }
        if self.lost().is_none() {
            // SAFETY: retained by `retain`, released once. At process exit a driver that is gone refuses; then
            // there is nothing to release.
            let _ = unsafe { result::primary_ctx::release(self.device) };
        }
    }
}

/// How many events are kept for use at most.
const MOST_EVENTS: usize = 1024;

/// An event that was let go of.
struct Spare(sys::CUevent);

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for Spare {}

thread_local! {
    /// The context that code of this backend has made current in this thread and not left yet, by its address.
    static ENTERED: Cell<usize> = const { Cell::new(0) };
}

/// That a context is the calling thread's.
pub(super) struct Entered {
    /// The context that the thread had, if it was another.
    restore: Option<Option<sys::CUcontext>>,
    outer: usize,
    /// It stays in its thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        ENTERED.set(self.outer);
        let Some(before) = self.restore else { return };
        // SAFETY: the thread had this context, or none, when this one was entered.
        let restored = unsafe { result::ctx::set_current(before.unwrap_or(std::ptr::null_mut())) };
        if restored.is_err() {
            // Better none than one that the caller does not expect and that may be gone when it is used next.
            // SAFETY: null is the documented way to have no context.
            let _ = unsafe { result::ctx::set_current(std::ptr::null_mut()) };
        }
    }
}

/// Why a call was not made or did not work.
#[derive(Clone, Copy)]
pub(super) enum Refusal {
    /// The device was lost before.
    Lost,
    /// The call and the driver's result.
    Code(&'static str, DriverError),
}

impl Refusal {
    /// Whether the driver has no memory left.
    pub(super) fn is_out_of_memory(self) -> bool {
        matches!(self, Refusal::Code(_, DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)))
    }

    /// Whether the work asked about is still running.
    pub(super) fn is_not_ready(self) -> bool {
        matches!(self, Refusal::Code(_, DriverError(CUresult::CUDA_ERROR_NOT_READY)))
    }
}

/// Whether a result comes again at every later call of the context.
fn sticks(code: CUresult) -> bool {
    use CUresult as R;
    matches!(
        code,
        R::CUDA_ERROR_DEINITIALIZED
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_UNKNOWN
    )
}
