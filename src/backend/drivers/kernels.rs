//! Computation on the device: patching matrices, the values of blocks (`dequantise`), and the weights of codes (`decompress`). The
//! texts of kernels are loaded once per context.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use super::device::DriverDevice;
use super::memory::DeviceMemory;
use super::module::{Module, launch};
use super::stream::DriverStream;
use super::{decompress, dequantise};
use crate::backend::{
    Buf, BufMut, Decompress, DecompressFlight, Dequantise, Flight, Kernels, MatrixPatch, PatchFlight, Rejected,
    SentPatch, Stream, Undecoded,
};
use crate::dtype::DType;
use crate::error::{Error, Measured, Mismatch, Result};

/// The PTX that `scripts/kernels/regenerate` generates from `kernels/patch.cu`. The driver compiles it for its device.
const TEXT: &str = include_str!("kernels/patch.ptx");

/// The functions, each for patches of one storage type, and of so many products at most: the first that fits is the best.
const FUNCTIONS: [(DType, usize, &CStr); 8] = [
    (DType::F32, 1, c"patch_one_f32"),
    (DType::F16, 1, c"patch_one_f16"),
    (DType::BF16, 1, c"patch_one_bf16"),
    (DType::F32, usize::MAX, c"patch_f32"),
    (DType::F16, usize::MAX, c"patch_f16"),
    (DType::BF16, usize::MAX, c"patch_bf16"),
    (DType::F8E4M3, usize::MAX, c"patch_e4m3"),
    (DType::F8E5M2, usize::MAX, c"patch_e5m2"),
];

/// The threads of a block: each patches eight rows by four columns in two tiles.
const BLOCK: [u32; 2] = [128, 1];
/// What a buffer of a patch is called.
const PATCHED: &str = "what is to be patched";

/// The rows and columns that a block patches.
const BLOCK_TILE: [usize; 2] = [64, 128];

impl DriverDevice {
    fn module(&self) -> Result<&Module, String> {
        let context = self.context();
        context.kernels().patch.get(context, TEXT, FUNCTIONS.iter().map(|(.., name)| *name))
    }

    /// The address of a buffer in this device's memory that is only read. `what` is what a buffer of another device is.
    pub(super) fn source_in(&self, what: &str, buffer: &Buf) -> Result<u64> {
        let id = self.context().id();
        let memory = buffer.block().downcast::<DeviceMemory>();
        let own = memory.is_some_and(|memory| memory.context().id() == id);
        let mismatch = || Mismatch::Memory { what: what.to_owned(), memory: buffer.device(), device: id };
        Ok(buffer.address().filter(|_| own).ok_or_else(mismatch)?)
    }

    /// The address of `bytes` bytes at offset `at` of a buffer in this device's memory. Checks that it is a multiple of
    /// `align`. `what` is what a buffer of another device is.
    pub(super) fn address_in(&self, what: &str, buffer: &BufMut, at: usize, bytes: usize, align: usize) -> Result<u64> {
        let id = self.context().id();
        let memory = buffer.block().downcast::<DeviceMemory>();
        let own = memory.is_some_and(|memory| memory.context().id() == id);
        let Some(start) = buffer.address().filter(|_| own) else {
            let (what, memory) = (what.to_owned(), buffer.device());
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

impl Kernels for DriverDevice {
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
        let trusted = sent.was_sent_by::<DriverStream>();
        let SentPatch { patch, memory: work, sent_by } = sent;
        let id = self.context().id();
        let fits = |(of, most, _): &(DType, usize, _)| *of == patch.dtype() && patch.products() <= *most;
        let index = FUNCTIONS.iter().position(fits);
        let function = self.module().map(|module| index.and_then(|index| module.function(index)));
        let function = function.map_err(|why| Error::invalid(format!("{id} does not patch: {why}")))?;
        let stream = (stream as &dyn Any).downcast_ref::<DriverStream>().filter(|stream| stream.device() == id);
        let (Some(function), Some(stream)) = (function, stream) else {
            return Err(Error::invalid(format!("{} is not patched on {id}, or not on this stream", patch.dtype())));
        };
        if !trusted {
            return Err(Mismatch::Sender { device: id }.into());
        }
        let mut weight_at = self.address_in(PATCHED, &weight, at, patch.matrix_bytes(), patch.element_bytes())?;
        let mut work_at = self.address_in(PATCHED, &work, 0, patch.work_bytes(), 16)?;
        let (blocks, mut numbers) = numbers(&patch)?;
        let waits: Vec<_> = weight.pending().into_iter().chain(work.pending()).collect();
        let memory = vec![Arc::clone(weight.block()), Arc::clone(work.block())];
        let done = stream.run("patching", &waits, memory, |handle| {
            let pointers = [&raw mut weight_at, &raw mut work_at].map(|at| at.cast::<c_void>());
            let mut arguments = [std::ptr::null_mut(); 9];
            arguments[..2].copy_from_slice(&pointers);
            let rest = arguments[2..].iter_mut().zip(&mut numbers);
            rest.for_each(|(argument, number)| *argument = (number as *mut u32).cast());
            // SAFETY: the arguments match the kernel's in number and size. The kernel accesses the matrix and the work memory,
            // whose bounds were checked and which are kept until the event after it. The offsets at which it reads the work
            // memory were copied there by a stream of this backend.
            unsafe { launch(self.context(), function, (blocks, BLOCK), handle, &mut arguments) }
        });
        // If it fails, both buffers go; their memory is kept for what may be under way.
        let done = done.map_err(|(error, _)| error)?;
        let weight = Flight::of(weight, done.clone());
        let patch = SentPatch { patch, memory: Flight::of(work, done).chain(), sent_by };
        Ok(PatchFlight { weight, patch })
    }

    fn dequantises(&self, stream: &dyn Stream, from: DType, to: DType) -> Result<(), String> {
        dequantise::covers(self, stream, from, to)
    }

    fn dequantise(&self, stream: &dyn Stream, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        dequantise::queue(self, stream, work)
    }

    fn decompresses(&self, stream: &dyn Stream, dtype: DType) -> Result<(), String> {
        decompress::covers(self, stream, dtype)
    }

    fn decompress(&self, stream: &dyn Stream, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        decompress::queue(self, stream, work)
    }
}

#[cfg(test)]
pub(in crate::backend::drivers) mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    #[test]
    fn the_text_is_made_of_the_source() {
        let names = FUNCTIONS.iter().map(|(.., name)| *name);
        assert_made_of(TEXT, &[include_bytes!("kernels/float.cuh"), include_bytes!("kernels/patch.cu")], names);
    }

    /// Checks that a text was made of `sources` as they are, and has these functions.
    pub(in crate::backend::drivers) fn assert_made_of<'n>(
        text: &str,
        sources: &[&[u8]],
        names: impl Iterator<Item = &'n CStr>,
    ) {
        let hash: String = Sha256::digest(sources.concat()).iter().map(|byte| format!("{byte:02x}")).collect();
        let head = text.lines().next().unwrap_or_default();
        assert!(head.ends_with(&hash), "the source has changed since; run scripts/kernels/regenerate");
        for name in names {
            assert!(text.contains(&format!(".visible .entry {}(", name.to_string_lossy())));
        }
    }
}
