//! Computation on the device: patching matrices, the values of blocks (`dequantise`), and the weights of codes (`decompress`). The
//! texts of kernels are loaded once per context.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use super::context::Context;
use super::cuda::calls::FunctionHandle;
use super::device::DriverDevice;
use super::memory::DeviceMemory;
use super::module::{Module, Text, launch};
use super::stream::DriverStream;
use super::verbs::{Address, StreamHandle};
use super::{decompress, dequantise, trial};
use crate::backend::{
    Buf, BufMut, Decompress, DecompressFlight, Dequantise, Flight, Kernels, MatrixPatch, MemoryBlock, PatchFlight,
    Rejected, SentPatch, Stream, Undecoded,
};
use crate::device::DeviceKind;
use crate::dtype::DType;
use crate::error::{Error, Measured, Mismatch, Result};

/// The PTX that `scripts/kernels/regenerate` generates from `kernels/patch.cu`, which the driver compiles for its device; and the
/// code that `scripts/kernels/hip` compiles, of which AMD's runtime takes that for its device.
const TEXT: Text = Text::new(concat!(include_str!("kernels/patch.ptx"), "\0"), BUNDLE);

#[cfg(not(feature = "hip"))]
const BUNDLE: Option<&[u8]> = None;
#[cfg(feature = "hip")]
const BUNDLE: Option<&[u8]> = {
    /// The runtime reads the code where it lies, and parts of it are aligned to pages.
    #[repr(C, align(4096))]
    struct Pages<T: ?Sized>(T);
    static PAGES: &Pages<[u8]> = &Pages(*include_bytes!("kernels/patch.hipfb"));
    Some(&PAGES.0)
};

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
        let names = FUNCTIONS.iter().map(|(.., name)| *name);
        context.kernels().patch.get(context, &TEXT, names, |module| match context.id().kind() {
            DeviceKind::Cuda => Ok(()),
            // No card of theirs is among those that the kernels are tested on.
            _ => trial::run(context, module),
        })
    }

    /// Whether memory is this device's, and of this library of the driver.
    fn holds(&self, memory: &MemoryBlock) -> bool {
        memory.downcast::<DeviceMemory>().is_some_and(|memory| memory.context().is(self.context()))
    }

    /// The stream, if it is one of this device, and of this library of the driver.
    pub(super) fn own_stream<'s>(&self, stream: &'s dyn Stream) -> Option<&'s DriverStream> {
        let stream = (stream as &dyn Any).downcast_ref::<DriverStream>();
        stream.filter(|stream| stream.context().is(self.context()))
    }

    /// The address of a buffer in this device's memory that is only read. `what` is what a buffer of another device is.
    pub(super) fn source_in(&self, what: &str, buffer: &Buf) -> Result<u64> {
        let id = self.context().id();
        let own = self.holds(buffer.block());
        let mismatch = || Mismatch::Memory { what: what.to_owned(), memory: buffer.device(), device: id };
        Ok(buffer.address().filter(|_| own).ok_or_else(mismatch)?)
    }

    /// The address of `bytes` bytes at offset `at` of a buffer in this device's memory. Checks that it is a multiple of
    /// `align`. `what` is what a buffer of another device is.
    pub(super) fn address_in(&self, what: &str, buffer: &BufMut, at: usize, bytes: usize, align: usize) -> Result<u64> {
        let id = self.context().id();
        let own = self.holds(buffer.block());
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

/// A launch of a patch, without its addresses.
pub(super) struct Patching {
    function: FunctionHandle,
    blocks: u32,
    /// The arguments after the addresses.
    numbers: [u32; 7],
}

impl Patching {
    /// The launch of a patch by its function of `module`. `None` if there is no function for it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the matrix is too large.
    pub(super) fn of(module: &Module, patch: &MatrixPatch<'_>) -> Result<Option<Patching>> {
        let Some(function) = index(patch).and_then(|index| module.function(index)) else { return Ok(None) };
        let [high, wide] = BLOCK_TILE;
        let blocks = patch.rows().div_ceil(high).saturating_mul(patch.cols().div_ceil(wide));
        let scales = patch.scales().map_or([0, 1, 1, 1], |scales| {
            let [high, wide] = scales.block.map(|side| side.min(MatrixPatch::MOST));
            [patch.scales_at(), high, wide, scales.grid_cols]
        });
        let mut numbers = [0; 7];
        let values = [patch.rows(), patch.cols(), patch.products()].into_iter().chain(scales);
        let fits =
            numbers.iter_mut().zip(values).all(|(number, value)| u32::try_from(value).map(|v| *number = v).is_ok());
        match u32::try_from(blocks) {
            // AMD's runtime counts the threads of a launch in 32 bits.
            Ok(blocks) if fits && blocks <= u32::MAX / BLOCK[0] => Ok(Some(Patching { function, blocks, numbers })),
            _ => Err(Error::invalid(format!("a matrix of {} by {} takes too many blocks", patch.rows(), patch.cols()))),
        }
    }

    /// Queues the launch on a stream of the device.
    ///
    /// # Safety
    /// Until it is complete, the addresses are those of the matrix and of the work memory of the patch that this is for, which was
    /// written as [`MatrixPatch::write`] does.
    pub(super) unsafe fn queue(
        mut self,
        context: &Context,
        mut weight: Address,
        mut work: Address,
        stream: StreamHandle,
    ) -> Result<()> {
        let pointers = [&raw mut weight, &raw mut work].map(|at| at.cast::<c_void>());
        let mut arguments = [std::ptr::null_mut(); 9];
        arguments[..2].copy_from_slice(&pointers);
        let rest = arguments[2..].iter_mut().zip(&mut self.numbers);
        rest.for_each(|(argument, number)| *argument = (number as *mut u32).cast());
        // SAFETY: the arguments match the kernel's in number and size; what it accesses is the caller's promise.
        unsafe { launch(context, self.function, (self.blocks, BLOCK), stream, &mut arguments) }
    }
}

/// The function for a patch, by its place.
fn index(patch: &MatrixPatch<'_>) -> Option<usize> {
    FUNCTIONS.iter().position(|(of, most, _)| *of == patch.dtype() && patch.products() <= *most)
}

/// The name of the function for a patch.
pub(super) fn name(patch: &MatrixPatch<'_>) -> String {
    index(patch).map_or_else(String::new, |index| FUNCTIONS[index].2.to_string_lossy().into_owned())
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
        let module = self.module().map_err(|why| Error::invalid(format!("{id} does not patch: {why}")))?;
        let patching = Patching::of(module, &patch)?;
        let (Some(patching), Some(stream)) = (patching, self.own_stream(stream)) else {
            return Err(Error::invalid(format!("{} is not patched on {id}, or not on this stream", patch.dtype())));
        };
        if !trusted {
            return Err(Mismatch::Sender { device: id }.into());
        }
        let weight_at = self.address_in(PATCHED, &weight, at, patch.matrix_bytes(), patch.element_bytes())?;
        let work_at = self.address_in(PATCHED, &work, 0, patch.work_bytes(), 16)?;
        let waits: Vec<_> = weight.pending().into_iter().chain(work.pending()).collect();
        let memory = vec![Arc::clone(weight.block()), Arc::clone(work.block())];
        let done = stream.run("patching", &waits, memory, |handle| {
            // SAFETY: the bounds of both were checked, and they are kept until the event after the kernel. The offsets at which it
            // reads the work memory were copied there by a stream of this backend.
            unsafe { patching.queue(self.context(), weight_at, work_at, handle) }
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
    use std::path::Path;

    #[test]
    fn the_text_is_made_of_the_sources() {
        let sources: [&[u8]; 3] = [
            include_bytes!("kernels/cuda.cuh"),
            include_bytes!("kernels/float.cuh"),
            include_bytes!("kernels/patch.cu"),
        ];
        assert_made_of(TEXT.ptx, &sources, FUNCTIONS.iter().map(|(.., name)| *name));
    }

    #[test]
    fn the_bundle_is_made_of_the_sources() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/drivers/kernels");
        let sums = std::fs::read_to_string(folder.join("patch.hipfb.sha256")).unwrap();
        let names: Vec<&str> = sums.lines().filter_map(|line| Some(line.split_once("  ")?.1)).collect();
        assert_eq!(names, ["hip.cuh", "float.cuh", "patch.cu", "patch.hipfb"]);
        for (line, name) in sums.lines().zip(names) {
            let content = std::fs::read(folder.join(name)).unwrap();
            assert!(line.starts_with(&sha256(&content)), "{name} has changed since; run scripts/kernels/hip");
        }
    }

    /// What AMD's runtime looks for: the list of parts in the first page, and the functions in each part.
    #[test]
    fn each_part_of_the_bundle_has_the_functions() {
        let bundle = include_bytes!("kernels/patch.hipfb");
        let number = |at: usize| u64::from_le_bytes(bundle[at..at + 8].try_into().unwrap()) as usize;
        assert_eq!(bundle[..24], *b"__CLANG_OFFLOAD_BUNDLE__");
        let (mut at, mut architectures) = (32, Vec::new());
        for _ in 0..number(24) {
            let name = str::from_utf8(&bundle[at + 24..][..number(at + 16)]).unwrap();
            let part = &bundle[number(at)..][..number(at + 8)];
            at += 24 + name.len();
            let Some(architecture) = name.strip_prefix("hipv4-amdgcn-amd-amdhsa--") else {
                assert_eq!((name, part.len()), ("host-x86_64-unknown-linux--", 0));
                continue;
            };
            architectures.push(architecture);
            for (.., function) in FUNCTIONS {
                let symbol = function.to_bytes_with_nul();
                assert!(part.windows(symbol.len()).any(|bytes| bytes == symbol), "{architecture} has no {function:?}");
            }
        }
        assert!(at <= 4096);
        let known = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100 gfx1101 gfx1102 gfx1200 gfx1201";
        assert_eq!(architectures.join(" "), known);
    }

    /// The names of all functions.
    pub(in crate::backend::drivers) fn function_names() -> impl Iterator<Item = String> {
        FUNCTIONS.iter().map(|(.., name)| name.to_string_lossy().into_owned())
    }

    fn sha256(bytes: &[u8]) -> String {
        Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Checks that a text was made of `sources` as they are, and has these functions.
    pub(in crate::backend::drivers) fn assert_made_of<'n>(
        text: &str,
        sources: &[&[u8]],
        names: impl Iterator<Item = &'n CStr>,
    ) {
        let hash = sha256(&sources.concat());
        let head = text.lines().next().unwrap_or_default();
        assert!(head.ends_with(&hash), "the source has changed since; run scripts/kernels/regenerate");
        for name in names {
            assert!(text.contains(&format!(".visible .entry {}(", name.to_string_lossy())));
        }
    }
}
