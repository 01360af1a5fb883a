//! The weights of the lossless code, decoded on the device.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use super::cuda::calls::FunctionHandle;
use super::device::DriverDevice;
use super::module::{Module, Text, launch};
use super::stream::DriverStream;
use crate::backend::{Decompress, DecompressFlight, Event, Stream, Undecoded};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::lossless::{BLOCK_WEIGHTS, CODE_ALIGN, longest_block};

/// The PTX that `scripts/kernels/regenerate` generates from `kernels/lossless.cu`.
const TEXT: Text = Text::new(concat!(include_str!("kernels/lossless.ptx"), "\0"), None);

/// The functions; types whose weights have the same fields share one.
const FUNCTIONS: [&CStr; 5] = [c"lossless_bf16", c"lossless_f16", c"lossless_f32", c"lossless_e4m3", c"lossless_e5m2"];

/// The threads of a block: four warps, each of which decodes a block of weights.
const BLOCK: [u32; 2] = [32, WARPS];
const WARPS: u32 = 4;

/// What is refused while a stream is captured.
const OPERATION: &str = "decompression";

/// Whether there is a kernel for this type that the driver takes; otherwise why not. Nothing is loaded while `stream` accepts no
/// work, which the work itself will be told.
pub(super) fn covers(device: &DriverDevice, stream: &dyn Stream, dtype: DType) -> Result<(), String> {
    let id = device.context().id();
    if index(dtype).is_none() || TEXT.of(id.kind()).is_none() {
        return Err(format!("{id} has no kernel that decodes {dtype}"));
    }
    let stream = device.own_stream(stream).ok_or_else(|| format!("the stream is not one of {id}"))?;
    if stream.check_accepts(OPERATION).is_err() {
        return Ok(());
    }
    module(device).map(drop)
}

fn index(dtype: DType) -> Option<usize> {
    match dtype {
        DType::BF16 => Some(0),
        DType::F16 => Some(1),
        DType::F32 => Some(2),
        DType::F8E4M3 | DType::F8E4M3Fnuz => Some(3),
        DType::F8E5M2 | DType::F8E5M2Fnuz => Some(4),
        _ => None,
    }
}

fn module(device: &DriverDevice) -> Result<&Module, String> {
    let context = device.context();
    context.kernels().lossless.get(context, &TEXT, FUNCTIONS.into_iter(), |_| Ok(()))
}

/// Queues the kernel.
pub(super) fn queue(
    device: &DriverDevice,
    stream: &dyn Stream,
    work: Decompress,
) -> Result<DecompressFlight, Box<Undecoded>> {
    match launched(device, stream, &work) {
        Ok(done) => Ok(work.launched_in_order(done)),
        Err((error, under_way)) => Err(work.refused(error, under_way)),
    }
}

/// The event after the kernel; or the error, with the event after what may be under way.
fn launched(device: &DriverDevice, stream: &dyn Stream, work: &Decompress) -> Result<Event, (Error, Option<Event>)> {
    let (stream, mut launching) = prepared(device, stream, work).map_err(|error| (error, None))?;
    let memory = [work.source().block(), work.dst().block(), work.verdict().block()].map(Arc::clone).to_vec();
    stream.run(OPERATION, &work.waits(), memory, |handle| {
        let Launching { function, wide, narrow, warps } = &mut launching;
        if *warps == 0 {
            return Ok(());
        }
        let mut arguments: Vec<*mut c_void> = wide.iter_mut().map(|wide| (&raw mut *wide).cast()).collect();
        arguments.extend(narrow.iter_mut().map(|narrow| (&raw mut *narrow).cast::<c_void>()));
        let groups = warps.div_ceil(WARPS);
        // SAFETY: the arguments match the kernel's in number and size. Whatever the code holds, the kernel reads inside of its
        // header, its index and the part, and writes the weights and the verdict alone, which are inside of their buffers. Their
        // memory is kept until the event after it.
        unsafe { launch(device.context(), *function, (groups, BLOCK), handle, &mut arguments) }
    })
}

/// A launch, without its stream.
struct Launching {
    function: FunctionHandle,
    /// The addresses of header and index, of the part of the code, for the weights, and of the verdict; then the sum of all blocks, negated.
    wide: [u64; 5],
    /// Of the part its first byte, the end of the one before, and its end, all by 16; the warps; all blocks, the weights of the last
    /// one, and whether they are coded.
    narrow: [u32; 7],
    warps: u32,
}

/// Checks everything that can be checked before anything is queued.
fn prepared<'s>(
    device: &DriverDevice,
    stream: &'s dyn Stream,
    work: &Decompress,
) -> Result<(&'s DriverStream, Launching)> {
    let id = device.context().id();
    let info = work.info();
    let (Some(index), Some(stream)) = (index(info.dtype), device.own_stream(stream)) else {
        return Err(Error::invalid(format!("{} is not decoded on {id}, or not on this stream", info.dtype)));
    };
    stream.check_accepts(OPERATION)?;
    let module = module(device).map_err(|why| Error::invalid(format!("{id} does not decompress: {why}")))?;
    let function = module.function(index).ok_or_else(|| Error::bug("a function that was not loaded"))?;
    let source = device.source_in("what is to be decompressed", work.source())?;
    let size = info.dtype.element_bytes().unwrap_or(1);
    let bytes = info.decoded_bytes as usize;
    // A buffer of no bytes has no address.
    let weights = if bytes == 0 { 0 } else { device.address_in(WEIGHTS, work.dst(), work.at(), bytes, size)? };
    let verdict = device.address_in(VERDICT, work.verdict(), work.place(), Decompress::VERDICT, Decompress::VERDICT)?;
    let too_many = || Error::invalid(format!("{} weights are too many for one launch", info.count));
    let narrow = |number: u64| u32::try_from(number).map_err(|_| too_many());
    let blocks = info.blocks();
    let last = info.count - blocks.saturating_sub(1) * BLOCK_WEIGHTS as u64;
    let part = work.code_part();
    let [begin, after, end] = [part.begin, part.after, part.end].map(|place| narrow(place / CODE_ALIGN as u64));
    // A warp for each block, if the part's blocks are half as long as blocks can be, or longer.
    let warps = (2 * (part.end - part.after)).div_ceil(longest_block(size as u64));
    let (warps, blocks) = (narrow(warps.min(blocks))?, narrow(blocks)?);
    let wide =
        [source + work.offset() as u64, source + work.part_offset() as u64, weights, verdict, info.sum.wrapping_neg()];
    let narrow = [begin?, after?, end?, warps, blocks, narrow(last)?, info.in_blocks.into()];
    Ok((stream, Launching { function, wide, narrow, warps }))
}

/// What the buffers are called.
const WEIGHTS: &str = "the memory for the weights of a code";
const VERDICT: &str = "the memory for the verdict on a code";

#[cfg(test)]
mod tests {
    use super::super::kernels::tests::assert_made_of;
    use super::*;
    use crate::lossless::compressed_bound;

    #[test]
    fn the_text_is_made_of_the_source() {
        assert_made_of(TEXT.ptx, &[include_bytes!("kernels/lossless.cu")], FUNCTIONS.into_iter());
    }

    #[test]
    fn all_types_that_are_coded_have_a_function() {
        assert!(DType::all().all(|dtype| compressed_bound(dtype, 1).is_some() == index(dtype).is_some()));
    }
}
