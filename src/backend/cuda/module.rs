//! A text of kernels that the driver has compiled for its device.

use std::ffi::{CStr, CString, c_void};

use super::calls::{FunctionHandle, KernelCalls, ModuleHandle, Outcome, StreamHandle};
use super::context::{Context, Refusal};
use crate::error::Result;

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
    ///
    /// # Errors
    /// The reason why the driver refuses them.
    pub(super) fn load<'n>(
        context: &Context,
        text: &str,
        names: impl Iterator<Item = &'n CStr>,
    ) -> Result<Module, String> {
        let calls = context.driver().kernels.as_ref().map_err(|missing| format!("the driver has no {missing}"))?;
        let text = CString::new(text).map_err(|error| error.to_string())?;
        let why = |refusal| match refusal {
            Refusal::Code(failure) => context.driver().describe(failure),
            refusal => context.error(refusal).to_string(),
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
    let Ok(calls) = &context.driver().kernels else { return Ok(()) };
    let ([x, y], arguments, extra) = (threads, arguments.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: the caller's promise; the arguments outlive the call.
    let launch = || unsafe { calls.launch(function, blocks, 1, 1, x, y, 1, 0, stream, arguments, extra) };
    context.call(|_| launch())
}
