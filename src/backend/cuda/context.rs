//! A device's primary context: current for every call, and lost for good after an error that sticks.

use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::calls::{Calls, Code, ContextHandle, DeviceHandle, EVENT_WITHOUT_TIMING, EventHandle, Failure, Outcome};
use super::driver::{Driver, shown};
use super::kernels::Module;
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// A retained primary context.
pub(super) struct Context {
    id: DeviceId,
    device: DeviceHandle,
    handle: ContextHandle,
    driver: Arc<Driver>,
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
    pub(super) fn retain(id: DeviceId, driver: &Arc<Driver>) -> Result<Context> {
        driver.process.check()?;
        let absent = |why| Error::DeviceAbsent { device: id, why };
        let device = driver.handle(id).ok_or_else(|| absent("the driver does not find it any more".to_owned()))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a living handle, the device comes from the driver.
        let retained = unsafe { driver.calls.context_retain(&raw mut handle, device) };
        retained.map_err(|failure| absent(driver.describe(failure)))?;
        let (events, kernels, driver) = (Mutex::default(), OnceLock::new(), Arc::clone(driver));
        Ok(Context { id, device, handle, driver, lost: OnceLock::new(), events, kernels })
    }

    pub(super) fn id(&self) -> DeviceId {
        self.id
    }

    pub(super) fn device(&self) -> DeviceHandle {
        self.device
    }

    pub(super) fn handle(&self) -> ContextHandle {
        self.handle
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    pub(super) fn kernels(&self) -> &OnceLock<Result<Module, String>> {
        &self.kernels
    }

    /// Why the device is lost, if it is.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Gives the device up: something runs on it that cannot be waited for. The reason is told by everything from now on.
    pub(super) fn lose(&self, why: &Error) -> Error {
        let _ = self.lost.set(why.to_string());
        self.error(Refusal::Lost)
    }

    /// Runs calls of the driver with this context current, and leaves the thread with the one it had.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] at once when the device is lost, and when the call loses it; [`Error::Forked`] in a fork;
    /// [`Error::Driver`] for any other refusal.
    pub(super) fn call<T>(&self, calls: impl FnOnce(&Calls) -> Outcome<T>) -> Result<T> {
        self.raw(calls).map_err(|refusal| self.error(refusal))
    }

    /// As [`call`](Context::call), for callers that react to the driver's own code.
    pub(super) fn raw<T>(&self, calls: impl FnOnce(&Calls) -> Outcome<T>) -> Result<T, Refusal> {
        let _entered = self.enter()?;
        calls(&self.driver.calls).map_err(Refusal::Code)
    }

    /// Makes this context the calling thread's until what is returned is dropped, which leaves the thread with the one it
    /// had. Calls meanwhile find it made, which saves each of them most of the way in. The captures of other threads forbid nothing
    /// meanwhile: this thread's capture mode is relaxed, and restored with the context.
    ///
    /// # Errors
    /// When the device is lost, in a fork, and when the driver refuses.
    pub(super) fn enter(&self) -> Result<Entered<'_>, Refusal> {
        if self.lost().is_some() {
            return Err(Refusal::Lost);
        }
        let (handle, outer, driver) = (self.handle.addr(), ENTERED.get(), &*self.driver);
        if outer != handle && !driver.process.is_current() {
            return Err(Refusal::Forked);
        }
        let mut before = std::ptr::null_mut();
        // Also where it was made current before: code of others ran meanwhile, a wrapper of a stream for one.
        // SAFETY: the pointer is to a living handle.
        unsafe { driver.calls.context_current(&raw mut before) }.map_err(Refusal::Code)?;
        let restore = (before != self.handle).then_some(before);
        if restore.is_some() {
            // SAFETY: the context is retained for as long as `self` lives.
            unsafe { driver.calls.make_context_current(self.handle) }.map_err(Refusal::Code)?;
        }
        ENTERED.set(handle);
        // Whoever entered another context has left the captures.
        let mode = if outer == 0 { driver.leave_captures() } else { None };
        Ok(Entered { restore, mode, outer, driver, thread: PhantomData })
    }

    /// An event to record: one that was let go of, or a new one.
    pub(super) fn event(&self) -> Result<EventHandle, Refusal> {
        let spare = self.events().pop();
        if let Some(Spare(event)) = spare {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is to a living handle.
        self.raw(|calls| unsafe { calls.event_create(&raw mut event, EVENT_WITHOUT_TIMING) }).map(|()| event)
    }

    /// Takes an event that nobody asks for any more. Streams that were told to wait for it wait for what it stood for
    /// then, so it can be recorded anew.
    pub(super) fn recycle(&self, event: EventHandle) {
        if self.lost().is_some() || !self.driver.process.is_current() {
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

    /// Gives an event back to the driver.
    pub(super) fn destroy(&self, event: EventHandle) {
        // SAFETY: created by `event`, destroyed once; the driver lets an event go before it has fired. What a lost or
        // departed driver refuses is gone already.
        let _ = self.raw(|calls| unsafe { calls.event_destroy(event) });
    }

    fn events(&self) -> MutexGuard<'_, Vec<Spare>> {
        // Every change is one push or pop, so a poisoned lock still guards whole events.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a refused call; one that sticks makes the device lost.
    pub(super) fn error(&self, refusal: Refusal) -> Error {
        match refusal {
            Refusal::Lost => {}
            Refusal::Forked => {
                if let Err(error) = self.driver.process.check() {
                    return error;
                }
            }
            Refusal::Code(failure) if failure.code.sticks() => drop(self.lost.set(self.driver.describe(failure))),
            Refusal::Code(Failure { call, code }) => {
                let (name, text) = (self.driver.code_name(code), self.driver.code_text(code));
                return Error::Driver { device: self.id, call: shown(call), code: name, text };
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
        if self.lost().is_none() && self.driver.process.is_current() {
            // SAFETY: retained by `retain`, released once. At process exit a driver that is gone refuses; then
            // there is nothing to release.
            let _ = unsafe { self.driver.calls.context_release(self.device) };
        }
    }
}

/// How many events are kept for use at most.
const MOST_EVENTS: usize = 1024;

/// An event that was let go of.
struct Spare(EventHandle);

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for Spare {}

thread_local! {
    /// The context that code of this backend has made current in this thread and not left yet, by its address.
    static ENTERED: Cell<usize> = const { Cell::new(0) };
}

/// That a context is the calling thread's.
pub(super) struct Entered<'a> {
    /// The context that the thread had, if it was another.
    restore: Option<ContextHandle>,
    /// The capture mode that it had, if it was another.
    mode: Option<c_int>,
    outer: usize,
    driver: &'a Driver,
    /// It stays in its thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        ENTERED.set(self.outer);
        if let Some(mode) = self.mode {
            self.driver.restore_capture_mode(mode);
        }
        let Some(before) = self.restore else { return };
        // SAFETY: the thread had this context, or none, when this one was entered.
        let restored = unsafe { self.driver.calls.make_context_current(before) };
        if restored.is_err() {
            // Better none than one that the caller does not expect and that may be gone when it is used next.
            // SAFETY: null is the documented way to have no context.
            let _ = unsafe { self.driver.calls.make_context_current(std::ptr::null_mut()) };
        }
    }
}

/// Why a call was not made or did not work.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// The device was lost before.
    Lost,
    /// The process is a fork of the one that opened the device.
    Forked,
    /// The call and the driver's result.
    Code(Failure),
}

impl Refusal {
    fn code(self) -> Option<Code> {
        match self {
            Refusal::Code(failure) => Some(failure.code),
            Refusal::Lost | Refusal::Forked => None,
        }
    }

    /// Whether the driver refused with this code.
    pub(super) fn is(self, code: Code) -> bool {
        self.code() == Some(code)
    }

    /// Whether the work that was asked about goes on, as far as can be told now.
    pub(super) fn goes_on(self) -> bool {
        self.is(Code::NOT_READY) || self.is_of_captures()
    }

    /// Whether a capture stands in the way.
    pub(super) fn is_of_captures(self) -> bool {
        self.code().is_some_and(Code::is_of_captures)
    }
}
