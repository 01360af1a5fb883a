//! A device's shared context: current for every call, and lost for good after a sticky error.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::driver::{Driver, shown};
use super::module::Loaded;
use super::verbs::{CaptureMode, ContextHandle, DeviceHandle, EventHandle, Failure, Meaning, Outcome, Place, Verbs};
use crate::backend::reaper;
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::limits::RELEASE;

/// A retained context, the one of its device that everything in the process shares (CUDA's primary context).
pub(super) struct Context {
    id: DeviceId,
    device: DeviceHandle,
    handle: ContextHandle,
    driver: Arc<Driver>,
    lost: OnceLock<String>,
    events: Mutex<Vec<RecycledEvent>>,
    /// The kernels, or the reason why the driver refused them. They are here because memory in use by a launch holds the
    /// context.
    kernels: Modules,
}

/// The texts of kernels, each loaded at its first use.
#[derive(Default)]
pub(super) struct Modules {
    pub(super) patch: Loaded,
    pub(super) dequantise: Loaded,
    pub(super) lossless: Loaded,
}

// SAFETY: the driver allows any thread to use a context that it has made current, and `call` makes it so.
unsafe impl Send for Context {}
// SAFETY: as above; the driver orders concurrent calls itself.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the shared context of device number `id`.
    pub(super) fn retain(id: DeviceId, driver: &Arc<Driver>) -> Result<Context> {
        driver.process.check()?;
        let absent = |why| Error::DeviceAbsent { device: id, why };
        let device = driver.handle(id).ok_or_else(|| absent("the driver does not find it any more".to_owned()))?;
        // SAFETY: the device comes from the driver.
        let retained = unsafe { driver.verbs.retain(device) };
        let handle = retained.map_err(|failure| absent(driver.describe(failure)))?;
        let (events, kernels, driver) = (Mutex::default(), Modules::default(), Arc::clone(driver));
        Ok(Context { id, device, handle, driver, lost: OnceLock::new(), events, kernels })
    }

    pub(super) fn id(&self) -> DeviceId {
        self.id
    }

    /// The device and this context, as an end of a copy between devices.
    pub(super) fn place(&self) -> Place {
        Place { device: self.device, context: self.handle }
    }

    #[cfg(feature = "cudarc")]
    pub(super) fn handle(&self) -> ContextHandle {
        self.handle
    }

    /// Whether both are the context of one device, by whichever backend it was opened.
    pub(super) fn is(&self, other: &Context) -> bool {
        self.handle == other.handle && self.driver.is(&other.driver)
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    pub(super) fn kernels(&self) -> &Modules {
        &self.kernels
    }

    /// The reason why the device is lost. `None` if it is not.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Marks the device as lost: something runs on it that cannot be waited for. All later operations fail with this reason.
    pub(super) fn lose(&self, why: &Error) -> Error {
        let _ = self.lost.set(why.to_string());
        self.error(Refusal::Lost)
    }

    /// Runs calls of the driver with this context current, and then restores the thread's previous context.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] immediately when the device is lost, and when the call loses it; [`Error::Forked`] in a fork;
    /// [`Error::Driver`] for any other refusal.
    pub(super) fn call<T>(&self, calls: impl FnOnce(&dyn Verbs) -> Outcome<T>) -> Result<T> {
        self.raw(calls).map_err(|refusal| self.error(refusal))
    }

    /// As [`call`](Context::call), for callers that react to the driver's result code.
    pub(super) fn raw<T>(&self, calls: impl FnOnce(&dyn Verbs) -> Outcome<T>) -> Result<T, Refusal> {
        let _entered = self.enter()?;
        calls(&*self.driver.verbs).map_err(Refusal::Code)
    }

    /// Makes this context current in the calling thread until the returned guard is dropped, which restores the previous
    /// context. Calls in between find it current, which saves most of their cost of entering. In between, captures of other
    /// threads forbid nothing: this thread's capture mode is relaxed, and restored with the context.
    ///
    /// # Errors
    /// When the device is lost, in a fork, and when the driver refuses.
    pub(super) fn enter(&self) -> Result<ContextGuard<'_>, Refusal> {
        if self.lost().is_some() {
            return Err(Refusal::Lost);
        }
        let (outer, driver) = (ENTERED.get(), &*self.driver);
        let entered = Entered { library: driver.verbs.library(), context: self.handle.addr() };
        if outer != Some(entered) && !driver.process.is_current() {
            return Err(Refusal::Forked);
        }
        // Checked even if this context was entered before: foreign code may have run since, such as a stream's wrapper.
        let before = driver.verbs.current().map_err(Refusal::Code)?;
        let restore = (before != self.handle).then_some(before);
        if restore.is_some() {
            // SAFETY: the context is retained for as long as `self` lives.
            unsafe { driver.verbs.make_current(self.handle) }.map_err(Refusal::Code)?;
        }
        ENTERED.set(Some(entered));
        // If another context of the driver was entered before, the thread has already left its captures.
        let left = outer.is_some_and(|outer| outer.library == entered.library);
        let mode = if left { None } else { driver.leave_captures() };
        Ok(ContextGuard { restore, mode, outer, driver, thread: PhantomData })
    }

    /// An event to record: a recycled one, or a new one.
    pub(super) fn event(&self) -> Result<EventHandle, Refusal> {
        let recycled = self.events().pop();
        if let Some(RecycledEvent(event)) = recycled {
            return Ok(event);
        }
        // SAFETY: the context is current.
        self.raw(|verbs| unsafe { verbs.event_create() })
    }

    /// Takes back an event that nobody queries any more. Streams that wait for it wait for the work that it was recorded after
    /// at the time of the wait, so it can be recorded again.
    pub(super) fn recycle(&self, event: EventHandle) {
        if self.lost().is_some() || !self.driver.process.is_current() {
            return;
        }
        let mut events = self.events();
        if events.len() < self.driver.rules.events {
            events.push(RecycledEvent(event));
            return;
        }
        drop(events);
        self.destroy(event);
    }

    /// Returns the recycled events to the driver.
    pub(super) fn trim_events(&self) {
        let events = std::mem::take(&mut *self.events());
        events.into_iter().for_each(|RecycledEvent(event)| self.destroy(event));
    }

    /// Returns an event to the driver.
    pub(super) fn destroy(&self, event: EventHandle) {
        if !self.driver.rules.destroys_pending && !self.is_done(event) {
            tracing::warn!(device = %self.id, "an event whose work does not end is not given back to the driver");
            return;
        }
        // SAFETY: created by `event`, destroyed once; the driver allows destroying a pending event. If a lost or unloaded
        // driver refuses, the event is already gone.
        let _ = self.raw(|verbs| unsafe { verbs.event_destroy(event) });
    }

    /// Waits for the work that an event was recorded after, if that is pending. Returns whether it is none any more.
    fn is_done(&self, event: EventHandle) -> bool {
        let start = Instant::now();
        // SAFETY: the event is not destroyed yet.
        while self.raw(|verbs| unsafe { verbs.event_query(event) }).is_err_and(Refusal::may_be_pending) {
            if start.elapsed() >= RELEASE {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }

    fn events(&self) -> MutexGuard<'_, Vec<RecycledEvent>> {
        // Every change is one push or pop, so a poisoned lock still guards a consistent list.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a refused call. A sticky error makes the device lost.
    pub(super) fn error(&self, refusal: Refusal) -> Error {
        match refusal {
            Refusal::Lost => {}
            Refusal::Forked => {
                if let Err(error) = self.driver.process.check() {
                    return error;
                }
            }
            Refusal::Code(failure) if failure.meaning.sticks() => drop(self.lost.set(self.driver.describe(failure))),
            Refusal::Code(Failure { call, code, .. }) => {
                let (name, text) = (self.driver.code_name(code), self.driver.code_text(code));
                return Error::Driver { device: self.id, call: shown(call), code: name, text };
            }
        }
        Error::DeviceLost { device: self.id, why: self.lost().unwrap_or_default().to_owned() }
    }
}

impl reaper::Context for Context {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn batched(&self, work: &mut dyn FnMut()) {
        // Entered once for all calls. If that fails, they fail too, and say why.
        let _entered = self.enter();
        work();
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.trim_events();
        let Modules { patch, dequantise, lossless } = std::mem::take(&mut self.kernels);
        [patch, dequantise, lossless]
            .into_iter()
            .filter_map(Loaded::into_module)
            .for_each(|module| module.unload(self));
        if self.lost().is_none() && self.driver.process.is_current() {
            // SAFETY: retained by `retain`, released once. At process exit an unloaded driver refuses; then there is nothing
            // to release.
            let _ = unsafe { self.driver.verbs.release(self.device) };
        }
    }
}

/// An event that can be recorded again.
struct RecycledEvent(EventHandle);

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for RecycledEvent {}

/// A context that is current.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entered {
    /// The driver, as [`Verbs::library`] tells it.
    library: usize,
    context: usize,
}

thread_local! {
    /// The context that was made current in this thread last, and not left yet.
    static ENTERED: Cell<Option<Entered>> = const { Cell::new(None) };
}

/// A guard that keeps a context current in the calling thread.
pub(super) struct ContextGuard<'a> {
    /// The previous context of the thread, if it was another.
    restore: Option<ContextHandle>,
    /// The previous capture mode of the thread, if it was another.
    mode: Option<CaptureMode>,
    outer: Option<Entered>,
    driver: &'a Driver,
    /// Keeps the guard in its thread.
    thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        ENTERED.set(self.outer);
        if let Some(mode) = self.mode {
            self.driver.restore_capture_mode(mode);
        }
        let Some(before) = self.restore else { return };
        // SAFETY: the thread had this context, or none, when this one was entered.
        let restored = unsafe { self.driver.verbs.make_current(before) };
        if restored.is_err() {
            // No context is better than one that the caller does not expect and that may be gone at its next use.
            // SAFETY: null is the documented way to have no context.
            let _ = unsafe { self.driver.verbs.make_current(std::ptr::null_mut()) };
        }
    }
}

/// The reason why a call was not made or failed.
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
    fn meaning(self) -> Option<Meaning> {
        match self {
            Refusal::Code(failure) => Some(failure.meaning),
            Refusal::Lost | Refusal::Forked => None,
        }
    }

    /// Whether the driver refused with this meaning.
    pub(super) fn is(self, meaning: Meaning) -> bool {
        self.meaning() == Some(meaning)
    }

    /// Whether the queried work may still be running.
    pub(super) fn may_be_pending(self) -> bool {
        self.is(Meaning::NotReady) || self.is_of_captures()
    }

    /// Whether a capture prevents the call.
    pub(super) fn is_of_captures(self) -> bool {
        self.meaning().is_some_and(Meaning::is_of_captures)
    }
}
