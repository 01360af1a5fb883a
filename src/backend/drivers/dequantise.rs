//! The values of GGML's blocks, computed on the device.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use super::cuda::calls::FunctionHandle;
use super::device::DriverDevice;
use super::module::{Module, Text, launch};
use super::stream::DriverStream;
use crate::backend::{Dequantise, Event, Flight, Rejected, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The PTX that `scripts/kernels/regenerate` generates from `kernels/dequantise.cu` and the headers that it includes.
const TEXT: Text = Text::new(concat!(include_str!("kernels/dequantise.ptx"), "\0"), None);

/// The block types, all of GGML's, and the functions for them.
const FUNCTIONS: [(DType, &CStr); 27] = [
    (DType::Q1_0, c"dequantise_q1_0"),
    (DType::Q2_0, c"dequantise_q2_0"),
    (DType::Q4_0, c"dequantise_q4_0"),
    (DType::Q4_1, c"dequantise_q4_1"),
    (DType::Q5_0, c"dequantise_q5_0"),
    (DType::Q5_1, c"dequantise_q5_1"),
    (DType::Q8_0, c"dequantise_q8_0"),
    (DType::Q8_1, c"dequantise_q8_1"),
    (DType::Q2_K, c"dequantise_q2_k"),
    (DType::Q3_K, c"dequantise_q3_k"),
    (DType::Q4_K, c"dequantise_q4_k"),
    (DType::Q5_K, c"dequantise_q5_k"),
    (DType::Q6_K, c"dequantise_q6_k"),
    (DType::Q8_K, c"dequantise_q8_k"),
    (DType::IQ1_S, c"dequantise_iq1_s"),
    (DType::IQ1_M, c"dequantise_iq1_m"),
    (DType::IQ2_XXS, c"dequantise_iq2_xxs"),
    (DType::IQ2_XS, c"dequantise_iq2_xs"),
    (DType::IQ2_S, c"dequantise_iq2_s"),
    (DType::IQ3_XXS, c"dequantise_iq3_xxs"),
    (DType::IQ3_S, c"dequantise_iq3_s"),
    (DType::IQ4_NL, c"dequantise_iq4_nl"),
    (DType::IQ4_XS, c"dequantise_iq4_xs"),
    (DType::TQ1_0, c"dequantise_tq1_0"),
    (DType::TQ2_0, c"dequantise_tq2_0"),
    (DType::MXFP4, c"dequantise_mxfp4"),
    (DType::NVFP4, c"dequantise_nvfp4"),
];

/// The types of values, by their numbers in the kernels.
const VALUES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The threads of a block: eight warps.
const BLOCK: [u32; 2] = [32, 8];
/// The values of a run, of which each thread of a warp computes one. A block of any type is 1, 2, 4 or 8 runs.
const RUN: u64 = 32;
/// The runs of a block of threads: eight for each warp, so that a warp's first one begins a block of any type.
const RUNS: u32 = 64;

/// What is refused while a stream is captured.
const OPERATION: &str = "dequantisation";

/// Whether there is a kernel for these types that the driver takes; otherwise why not. Nothing is loaded while `stream` accepts
/// no work, which the work itself will be told.
pub(super) fn covers(device: &DriverDevice, stream: &dyn Stream, from: DType, to: DType) -> Result<(), String> {
    let id = device.context().id();
    if index(from).is_none() || kind(to).is_none() || TEXT.of(id.kind()).is_none() {
        return Err(format!("{id} has no kernel that computes {to} of {from}"));
    }
    let stream = device.own_stream(stream).ok_or_else(|| format!("the stream is not one of {id}"))?;
    if stream.check_accepts(OPERATION).is_err() {
        return Ok(());
    }
    module(device).map(drop)
}

fn index(from: DType) -> Option<usize> {
    FUNCTIONS.iter().position(|(of, _)| *of == from)
}

fn kind(to: DType) -> Option<usize> {
    VALUES.iter().position(|of| *of == to)
}

fn module(device: &DriverDevice) -> Result<&Module, String> {
    let context = device.context();
    context.kernels().dequantise.get(context, &TEXT, FUNCTIONS.iter().map(|(_, name)| *name), |_| Ok(()))
}

/// Queues the kernel.
pub(super) fn queue(device: &DriverDevice, stream: &dyn Stream, work: Dequantise) -> Result<Flight, Box<Rejected>> {
    match launched(device, stream, &work) {
        Ok(done) => Ok(work.launched_in_order(done)),
        Err((error, under_way)) => Err(work.refused(error, under_way)),
    }
}

/// The event after the kernel; or the error, with the event after what may be under way.
fn launched(device: &DriverDevice, stream: &dyn Stream, work: &Dequantise) -> Result<Event, (Error, Option<Event>)> {
    let (stream, mut launching) = prepared(device, stream, work).map_err(|error| (error, None))?;
    let memory = vec![Arc::clone(work.source().block()), Arc::clone(work.dst().block())];
    stream.run(OPERATION, &work.waits(), memory, |handle| {
        let Launching { function, blocks, source, target, runs, kind } = &mut launching;
        if *blocks == 0 {
            return Ok(());
        }
        let (source, target) = ((&raw mut *source).cast::<c_void>(), (&raw mut *target).cast());
        let mut arguments = [source, target, (&raw mut *runs).cast(), (&raw mut *kind).cast()];
        // SAFETY: the arguments match the kernel's in number and size. The kernel reads the blocks of so many runs and writes
        // as many values, which are inside of both buffers, whose memory is kept until the event after it.
        unsafe { launch(device.context(), *function, (*blocks, BLOCK), handle, &mut arguments) }
    })
}

/// A launch, without its stream.
struct Launching {
    function: FunctionHandle,
    blocks: u32,
    /// The address of the blocks of values, and that for the values.
    source: u64,
    target: u64,
    runs: u32,
    /// The number of the type of the values.
    kind: u32,
}

/// Checks everything that can be checked before anything is queued.
fn prepared<'s>(
    device: &DriverDevice,
    stream: &'s dyn Stream,
    work: &Dequantise,
) -> Result<(&'s DriverStream, Launching)> {
    let id = device.context().id();
    let (from, to) = work.types();
    let (Some(index), Some(kind), Some(stream)) = (index(from), kind(to), device.own_stream(stream)) else {
        return Err(Error::invalid(format!("{to} of {from} is not computed on {id}, or not on this stream")));
    };
    stream.check_accepts(OPERATION)?;
    let module = module(device).map_err(|why| Error::invalid(format!("{id} does not dequantise: {why}")))?;
    let function = module.function(index).ok_or_else(|| Error::bug("a function that was not loaded"))?;
    let too_many = || Error::invalid(format!("{} values are too many for one launch", work.values()));
    let runs = u32::try_from(work.values() as u64 / RUN).map_err(|_| too_many())?;
    let source = device.source_in("what is to be dequantised", work.source())? + work.offset() as u64;
    let target = device.address_in(VALUES_OF, work.dst(), work.at(), work.bytes(), to.element_bytes().unwrap_or(1))?;
    Ok((stream, Launching { function, blocks: runs.div_ceil(RUNS), source, target, runs, kind: kind as u32 }))
}

/// What the destination is called.
const VALUES_OF: &str = "the memory for the values of blocks";

#[cfg(test)]
mod tests {
    use super::super::kernels::tests::assert_made_of;
    use super::*;
    use crate::ggml::TABLES;

    #[test]
    fn the_text_is_made_of_the_sources() {
        let sources: [&[u8]; 7] = [
            include_bytes!("kernels/float.cuh"),
            include_bytes!("kernels/parts.cuh"),
            include_bytes!("kernels/blocks.cuh"),
            include_bytes!("kernels/k_quants.cuh"),
            include_bytes!("kernels/ternary.cuh"),
            include_bytes!("kernels/lattices.cuh"),
            include_bytes!("kernels/dequantise.cu"),
        ];
        assert_made_of(TEXT.ptx, &sources, FUNCTIONS.iter().map(|(_, name)| *name));
    }

    /// The values of lattices stand in tables of the text.
    #[test]
    fn the_tables_of_the_text_are_those_of_the_host() {
        for (name, codes) in TABLES {
            let bytes: Vec<String> = codes.iter().flat_map(|code| code.to_le_bytes()).map(|b| b.to_string()).collect();
            let table = format!("\n.global .align 2 .b8 {name}[{}] = {{{}}};\n", bytes.len(), bytes.join(", "));
            assert!(TEXT.ptx.contains(&table), "{name} has changed since; run scripts/kernels/regenerate");
        }
        assert_eq!(TEXT.ptx.lines().filter(|line| line.starts_with(".global")).count(), TABLES.len());
    }

    #[test]
    fn all_block_types_have_a_function_and_whole_runs() {
        assert!(DType::all().all(|dtype| dtype.is_ggml_block() == index(dtype).is_some()));
        for (dtype, _) in FUNCTIONS {
            let runs = dtype.block().elements / RUN;
            assert!(dtype.block().elements.is_multiple_of(RUN) && [1, 2, 4, 8].contains(&runs), "{dtype}");
        }
    }
}
