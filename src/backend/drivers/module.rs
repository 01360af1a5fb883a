//! A text of kernels that the driver has compiled for its device.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::context::{Context, Refusal};
use super::cuda::calls::{FunctionHandle, KernelCalls, ModuleHandle};
use super::verbs::{Meaning, Outcome, StreamHandle};
use crate::device::DeviceKind;
use crate::error::{Error, Result};

/// A text of kernels, in the forms that drivers take.
pub(super) struct Text {
    /// PTX, with a zero at its end: for CUDA's driver, and those that take what it takes.
    pub(super) ptx: &'static str,
    /// A bundle of code for the architectures of AMD's devices. `None` where there is none of these kernels.
    hip: Option<&'static [u8]>,
}

impl Text {
    pub(super) const fn new(ptx: &'static str, hip: Option<&'static [u8]>) -> Text {
        assert!(matches!(ptx.as_bytes().last(), Some(0)), "the driver finds the end by a zero");
        Text { ptx, hip }
    }

    /// The form for devices of this kind, if there is one.
    pub(super) fn of(&self, kind: DeviceKind) -> Option<&'static [u8]> {
        if kind == DeviceKind::Hip { self.hip } else { Some(self.ptx.as_bytes()) }
    }
}

/// A text that is loaded at its first use.
#[derive(Default)]
pub(super) struct Loaded {
    /// The module, or the reason why the driver refused it for good.
    known: OnceLock<Result<Module, String>>,
    loading: Mutex<()>,
}

impl Loaded {
    /// The functions `names` of a `text`, which are the same in every call, once `check` has passed. What the driver refuses once
    /// it refuses always, unless it had no memory or was in a capture; then a later call tries again. So it is with the check.
    ///
    /// # Errors
    /// The reason why the driver refuses them, or the check does.
    pub(super) fn get<'n>(
        &self,
        context: &Arc<Context>,
        text: &Text,
        names: impl Iterator<Item = &'n CStr>,
        check: impl FnOnce(&Module) -> Result<(), Unfit>,
    ) -> Result<&Module, String> {
        let known = || self.known.get().map(|known| known.as_ref().map_err(Clone::clone));
        if let Some(known) = known() {
            return known;
        }
        let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known() {
            return known;
        }
        let loaded = Module::load(context, text, names).and_then(|module| match check(&module) {
            Ok(()) => Ok(module),
            Err(Unfit::Idle(unloaded)) => {
                module.unload(context);
                Err(unloaded)
            }
            Err(Unfit::Running(why)) => Err(Unloaded { why, lasts: true }),
        });
        let outcome = loaded.map_err(|Unloaded { why, lasts }| {
            // Of a driver that has none nobody expects them.
            match context.driver().kernels.is_ok() {
                true => tracing::warn!(device = %context.id(), why, "kernels are not loaded; the host does their work"),
                false => tracing::debug!(device = %context.id(), why, "the host does the work of kernels"),
            }
            (why, lasts)
        });
        let outcome = match outcome {
            Err((why, false)) => return Err(why),
            other => other.map_err(|(why, _)| why),
        };
        self.known.get_or_init(|| outcome).as_ref().map_err(Clone::clone)
    }

    pub(super) fn into_module(self) -> Option<Module> {
        self.known.into_inner()?.ok()
    }
}

/// Why a text is not loaded.
pub(super) struct Unloaded {
    pub(super) why: String,
    /// Whether it would be the same again.
    pub(super) lasts: bool,
}

impl Unloaded {
    /// The reason of a refused call.
    pub(super) fn of(context: &Context, refusal: Refusal) -> Unloaded {
        let lasts = !refusal.is(Meaning::OutOfMemory) && !refusal.is_of_captures();
        let why = match refusal {
            Refusal::Code(failure) => context.driver().describe(failure),
            refusal => context.error(refusal).to_string(),
        };
        Unloaded { why, lasts }
    }
}

/// Why the functions of a module that was loaded are not used.
pub(super) enum Unfit {
    /// None of them runs.
    Idle(Unloaded),
    /// One may be running still, so the module stays.
    Running(String),
}

/// A loaded text of a context.
pub(super) struct Module {
    handle: ModuleHandle,
    /// The functions, in the order in which they were asked for.
    functions: Vec<FunctionHandle>,
}

// SAFETY: the driver allows any thread to use a module and its functions.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads the functions `names` of a `text`.
    fn load<'n>(context: &Context, text: &Text, names: impl Iterator<Item = &'n CStr>) -> Result<Module, Unloaded> {
        let lasting = |why| Unloaded { why, lasts: true };
        let calls = context.driver().kernels.as_ref().map_err(|why| lasting(why.clone()))?;
        let id = context.id();
        let image = text.of(id.kind()).ok_or_else(|| lasting(format!("there is no such kernel for {id}")))?;
        let why = |refusal| Unloaded::of(context, refusal);
        let run = |call: &mut dyn FnMut(&KernelCalls) -> Outcome| context.raw(|_| call(calls)).map_err(why);
        let mut handle = std::ptr::null_mut();
        // SAFETY: PTX ends with a zero, a bundle says where it ends; either outlives the driver. The pointer is to a living handle.
        run(&mut |calls| unsafe { calls.load(&raw mut handle, image.as_ptr().cast()) })?;
        let mut module = Module { handle, functions: Vec::new() };
        for name in names {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module was just loaded, the pointer is to a living handle.
            if let Err(why) = run(&mut |calls| unsafe { calls.function(&raw mut function, handle, name.as_ptr()) }) {
                module.unload(context);
                return Err(why);
            }
            module.functions.push(function);
        }
        Ok(module)
    }

    /// Unloads the module. No launch of its kernels may be pending any more.
    pub(super) fn unload(self, context: &Context) {
        if let Ok(calls) = &context.driver().kernels {
            // SAFETY: loaded by `load`, unloaded once. If a lost or unloaded driver refuses, the module is already gone.
            let _ = context.raw(|_| unsafe { calls.unload(self.handle) });
        }
    }

    /// The function whose name was at `index` among those that were loaded.
    pub(super) fn function(&self, index: usize) -> Option<FunctionHandle> {
        self.functions.get(index).copied()
    }
}

/// Queues `blocks` blocks of `threads` threads of a function on a stream.
///
/// # Safety
/// `arguments` point to values that match the function's parameters in number and size. What the function accesses is there
/// until its end.
pub(super) unsafe fn launch(
    context: &Context,
    function: FunctionHandle,
    (blocks, threads): (u32, [u32; 2]),
    stream: StreamHandle,
    arguments: &mut [*mut c_void],
) -> Result<()> {
    let Ok(calls) = &context.driver().kernels else { return Err(Error::bug("a kernel was loaded without its calls")) };
    let ([x, y], arguments, extra) = (threads, arguments.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: the caller's promise; the arguments outlive the call.
    let launch = || unsafe { calls.launch(function, blocks, 1, 1, x, y, 1, 0, stream, arguments, extra) };
    context.call(|_| launch())
}
