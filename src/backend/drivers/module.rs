//! A text of kernels that the driver has compiled for its device.

use std::ffi::{CStr, CString, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::context::{Context, Refusal};
use super::cuda::calls::{FunctionHandle, KernelCalls, ModuleHandle};
use super::verbs::{Meaning, Outcome, StreamHandle};
use crate::error::{Error, Result};

/// A text that is loaded at its first use.
#[derive(Default)]
pub(super) struct Loaded {
    /// The module, or the reason why the driver refused it for good.
    known: OnceLock<Result<Module, String>>,
    loading: Mutex<()>,
}

impl Loaded {
    /// The functions `names` of a PTX `text`, which are the same in every call. What the driver refuses once it refuses always,
    /// unless it had no memory or was in a capture; then a later call tries again.
    ///
    /// # Errors
    /// The reason why the driver refuses them.
    pub(super) fn get<'n>(
        &self,
        context: &Context,
        text: &str,
        names: impl Iterator<Item = &'n CStr>,
    ) -> Result<&Module, String> {
        let known = || self.known.get().map(|known| known.as_ref().map_err(Clone::clone));
        if let Some(known) = known() {
            return known;
        }
        let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known() {
            return known;
        }
        let outcome = Module::load(context, text, names).map_err(|unloaded| {
            let Unloaded { why, lasts } = unloaded;
            tracing::warn!(device = %context.id(), why, "kernels are not loaded; the host does their work");
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
struct Unloaded {
    why: String,
    /// Whether it would be the same again.
    lasts: bool,
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
    /// Loads the functions `names` of a PTX `text`.
    fn load<'n>(context: &Context, text: &str, names: impl Iterator<Item = &'n CStr>) -> Result<Module, Unloaded> {
        let lasting = |why| Unloaded { why, lasts: true };
        let calls = context.driver().kernels.as_ref().map_err(|why| lasting(why.clone()))?;
        let text = CString::new(text).map_err(|error| lasting(error.to_string()))?;
        let why = |refusal: Refusal| {
            let lasts = !refusal.is(Meaning::OutOfMemory) && !refusal.is_of_captures();
            let why = match refusal {
                Refusal::Code(failure) => context.driver().describe(failure),
                refusal => context.error(refusal).to_string(),
            };
            Unloaded { why, lasts }
        };
        let run = |call: &mut dyn FnMut(&KernelCalls) -> Outcome| context.raw(|_| call(calls)).map_err(why);
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero and outlives the call, the pointer is to a living handle.
        run(&mut |calls| unsafe { calls.load(&raw mut handle, text.as_ptr().cast()) })?;
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
