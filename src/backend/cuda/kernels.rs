//! Patching on the device: the module with the kernels, loaded once per context, and their launch.

use std::any::Any;
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use super::calls::{FunctionHandle, KernelCalls, ModuleHandle, Outcome};
use super::context::{Context, Refusal};
use super::device::CudaDevice;
use super::memory::DeviceMemory;
use super::stream::CudaStream;
use crate::backend::{BufMut, Flight, Kernels, MatrixPatch, PatchFlight, SentPatch, Stream};
use crate::dtype::DType;
use crate::error::{Error, Measured, Mismatch, Result};

/// The PTX that `scripts/kernels/regenerate` generates from `kernels/patch.cu`. The driver compiles it for its device.
const TEXT: &str = include_str!("kernels/patch.ptx");

/// The storage types and the functions for them.
const FUNCTIONS: [(DType, &CStr); 5] = [
    (DType::F32, c"patch_f32"),
    (DType::F16, c"patch_f16"),
    (DType::BF16, c"patch_bf16"),
    (DType::F8E4M3, c"patch_e4m3"),
    (DType::F8E5M2, c"patch_e5m2"),
];

/// The threads of a block: a warp patches eight rows by 128 columns, and a block has eight warps, one below the other.
const BLOCK: (u32, u32, u32) = (32, 8, 1);
/// The rows and columns that a block patches.
const BLOCK_TILE: [usize; 2] = [64, 128];

/// The loaded kernels of a context.
pub(super) struct Module {
    handle: ModuleHandle,
    functions: [FunctionHandle; FUNCTIONS.len()],
}

// SAFETY: the driver allows any thread to use a module and its functions.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The reason why the driver refuses them.
    fn load(context: &Context) -> Result<Module, String> {
        let calls = context.driver().kernels.as_ref().map_err(|missing| format!("the driver has no {missing}"))?;
        let text = CString::new(TEXT).map_err(|error| error.to_string())?;
        let why = |refusal| match refusal {
            Refusal::Code(failure) => context.driver().describe(failure),
            refusal => context.error(refusal).to_string(),
        };
        let run = |call: &mut dyn FnMut(&KernelCalls) -> Outcome| context.raw(|_| call(calls)).map_err(why);
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero and outlives the call, the pointer is to a living handle.
        run(&mut |calls| unsafe { calls.load(&raw mut handle, text.as_ptr().cast()) })?;
        let mut module = Module { handle, functions: [std::ptr::null_mut(); FUNCTIONS.len()] };
        for (function, (_, name)) in module.functions.iter_mut().zip(FUNCTIONS) {
            // SAFETY: the module was just loaded, the pointer is to a living handle.
            if let Err(why) = run(&mut |calls| unsafe { calls.function(function, handle, name.as_ptr()) }) {
                module.unload(context);
                return Err(why);
            }
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

    fn function(&self, dtype: DType) -> Option<FunctionHandle> {
        FUNCTIONS.iter().zip(self.functions).find(|((of, _), _)| *of == dtype).map(|(_, function)| function)
    }
}

impl CudaDevice {
    fn module(&self) -> Result<&Module, String> {
        let context = self.context();
        context.kernels().get_or_init(|| Module::load(context)).as_ref().map_err(Clone::clone)
    }

    /// The address of `bytes` bytes at offset `at` of a buffer in this device's memory. Checks that it is a multiple of
    /// `align`.
    fn address(&self, buffer: &BufMut, at: usize, bytes: usize, align: usize) -> Result<u64> {
        let id = self.context().id();
        let memory = buffer.block().downcast::<DeviceMemory>();
        let own = memory.is_some_and(|memory| memory.context().id() == id);
        let Some(start) = buffer.address().filter(|_| own) else {
            let (what, memory) = ("what is to be patched".to_owned(), buffer.device());
            return Err(Mismatch::Memory { what, memory, device: id }.into());
        };
        let end = at.saturating_add(bytes);
        if end > buffer.bytes() {
            let what = Measured::Matrix { device: id, at };
            return Err(Error::WrongSize { what, needed: end as u64, given: buffer.bytes() as u64 });
        }
        let address = start + at as u64;
        if !address.is_multiple_of(align as u64) {
            return Err(Error::invalid(format!("memory on {id} at {address:#x} is not aligned to {align} bytes")));
        }
        Ok(address)
    }
}

/// The number of blocks of a launch, and the arguments after the two addresses.
fn numbers(patch: &MatrixPatch<'_>) -> Result<(u32, [u32; 7])> {
    let [high, wide] = BLOCK_TILE;
    let blocks = patch.rows().div_ceil(high).saturating_mul(patch.cols().div_ceil(wide));
    let scales = patch.scales().map_or([0, 1, 1, 1], |scales| {
        let [high, wide] = scales.block.map(|side| side.min(MatrixPatch::MOST));
        [patch.scales_at(), high, wide, scales.grid_cols]
    });
    let mut numbers = [0; 7];
    let values = [patch.rows(), patch.cols(), patch.products()].into_iter().chain(scales);
    let fits = numbers.iter_mut().zip(values).all(|(number, value)| u32::try_from(value).map(|v| *number = v).is_ok());
    match i32::try_from(blocks) {
        Ok(blocks) if fits => Ok((blocks.unsigned_abs(), numbers)),
        _ => Err(Error::invalid(format!("a matrix of {} by {} takes too many blocks", patch.rows(), patch.cols()))),
    }
}

impl Kernels for CudaDevice {
    fn ready(&self) -> Result<(), String> {
        self.module().map(drop)
    }

    fn patch<'a>(
        &self,
        stream: &dyn Stream,
        sent: SentPatch<'a>,
        weight: BufMut,
        at: usize,
    ) -> Result<PatchFlight<'a>> {
        let trusted = sent.was_sent_by::<CudaStream>();
        let SentPatch { patch, memory: work, sent_by } = sent;
        let id = self.context().id();
        let function = self.module().map(|module| module.function(patch.dtype()));
        let function = function.map_err(|why| Error::invalid(format!("{id} does not patch: {why}")))?;
        let stream = (stream as &dyn Any).downcast_ref::<CudaStream>().filter(|stream| stream.device() == id);
        let (Some(function), Some(stream)) = (function, stream) else {
            return Err(Error::invalid(format!("{} is not patched on {id}, or not on this stream", patch.dtype())));
        };
        if !trusted {
            return Err(Mismatch::Sender { device: id }.into());
        }
        let mut weight_at = self.address(&weight, at, patch.matrix_bytes(), patch.element_bytes())?;
        let mut work_at = self.address(&work, 0, patch.work_bytes(), 16)?;
        let (blocks, mut numbers) = numbers(&patch)?;
        let waits: Vec<_> = weight.pending().into_iter().chain(work.pending()).collect();
        let memory = vec![Arc::clone(weight.block()), Arc::clone(work.block())];
        let done = stream.run(&waits, memory, |handle| {
            let pointers = [&raw mut weight_at, &raw mut work_at].map(|at| at.cast::<c_void>());
            let mut arguments = [std::ptr::null_mut(); 9];
            arguments[..2].copy_from_slice(&pointers);
            let rest = arguments[2..].iter_mut().zip(&mut numbers);
            rest.for_each(|(argument, number)| *argument = (number as *mut u32).cast());
            let Ok(calls) = &self.context().driver().kernels else { return Ok(()) };
            let (x, y, z) = BLOCK;
            let (arguments, extra) = (arguments.as_mut_ptr(), std::ptr::null_mut());
            // SAFETY: the arguments match the kernel's in number and size, and outlive the call. The kernel accesses the matrix
            // and the work memory, whose bounds were checked and which are kept until the event after it. The offsets at which
            // it reads the work memory were copied there by a stream of this backend.
            let launch = || unsafe { calls.launch(function, blocks, 1, 1, x, y, z, 0, handle, arguments, extra) };
            self.context().call(|_| launch())
        })?;
        let weight = Flight::of(weight, done.clone());
        let patch = SentPatch { patch, memory: Flight::of(work, done).chain(), sent_by };
        Ok(PatchFlight { weight, patch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    #[test]
    fn the_text_is_made_of_the_source() {
        let source = Sha256::digest(include_bytes!("kernels/patch.cu"));
        let hash: String = source.iter().map(|byte| format!("{byte:02x}")).collect();
        let head = TEXT.lines().next().unwrap_or_default();
        assert!(head.ends_with(&hash), "patch.cu has changed since; run scripts/kernels/regenerate");
        for (_, name) in FUNCTIONS {
            assert!(TEXT.contains(&format!(".visible .entry {}(", name.to_string_lossy())));
        }
    }
}
