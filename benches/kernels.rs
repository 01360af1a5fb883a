//! Patching by a CUDA device's kernels: a bf16 weight of [4096, 4096] (`--size N` for another) at rank 16 and 64, and by two
//! products of rank 16, beside a copy of the weight on the device in the same turns; and the same weight computed from blocks of
//! GGML's types, beside what reading them and writing it would take at the pace of that copy; and weights of the types that have a
//! lossless code from it, as many as those, and bf16 ones of 512 MiB (`--large MIB` for others, 0 for none), beside a copy of the weights.
//! `--only patches`, `--only blocks` or `--only lossless` does a part of that. Where there is no device, or its driver takes no
//! kernels, it says so and ends.
//!
//! A turn queues its work while the stream is held, and events of the driver around it tell the time; what is printed
//! are medians of alternating turns.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaContext, CudaStream};
use half::{bf16, f16};
use tensor_offload::backend::{
    Backend, Buf, BufMut, Cuda, Decompress, Dequantise, Device, Flight, Found, Kernels, MatrixPatch, MemoryKind,
    PackedProduct, Stream, Transfer,
};
use tensor_offload::device::DeviceKind;
use tensor_offload::lossless::{Code, compress, compressed_bound};
use tensor_offload::{DType, DeviceId, cuda};

/// The ranks of the products of each patch.
const PATCHES: [&[usize]; 3] = [&[16], &[64], &[16, 16]];
/// How long the stream is held while a turn is queued.
const HOLD: Duration = Duration::from_millis(20);
/// Pieces of work in a turn.
const LAUNCHES: usize = 16;
const TURNS: usize = 15;
const DEADLINE: Duration = Duration::from_secs(120);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn noise(count: usize, mut state: u32) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// Queues a copy of all of `source`.
fn copy(stream: &dyn Stream, source: &Buf, to: BufMut) -> tensor_offload::Result<Flight> {
    Ok(stream.copy(Transfer::whole(source, to)?)?)
}

/// A buffer of the device with these bytes.
fn sent(device: &dyn Device, host: &dyn Device, stream: &dyn Stream, bytes: &[u8]) -> Outcome<BufMut> {
    let mut pinned = host.alloc(bytes.len(), MemoryKind::Pinned)?;
    pinned.host_mut().ok_or("fresh host memory is in use")?.copy_from_slice(bytes);
    let there = device.alloc(bytes.len(), MemoryKind::Arena)?;
    Ok(copy(stream, &pinned.freeze(), there)?.wait(DEADLINE)?)
}

/// Milliseconds that a piece of work on a buffer takes, of several behind each other.
fn time(
    raw: &CudaStream,
    stream: &dyn Stream,
    buffer: &mut Option<BufMut>,
    mut each: impl FnMut(BufMut) -> Outcome<BufMut>,
) -> Outcome<f64> {
    let mut memory = buffer.take().ok_or("the buffer is gone")?;
    stream.occupy(HOLD)?;
    let start = raw.record_event(Some(CU_EVENT_DEFAULT))?;
    for _ in 0..LAUNCHES {
        memory = each(memory)?;
    }
    let end = raw.record_event(Some(CU_EVENT_DEFAULT))?;
    let spent = f64::from(start.elapsed_ms(&end)?) / LAUNCHES as f64;
    memory.wait_unused(DEADLINE)?;
    *buffer = Some(memory);
    Ok(spent)
}

fn run(id: DeviceId, (size, large): (usize, usize), only: Option<&str>) -> Outcome<()> {
    let backend = Cuda::new();
    let (device, host) = (backend.open(id)?, backend.open(DeviceId::CPU)?);
    let kernels = device.kernels().ok_or("the device has no kernels")?;
    kernels.ready()?;
    let raw = CudaContext::new(id.index() as usize)?.new_stream()?;
    // SAFETY: cudarc's context is the primary one, and the `Arc` holds the stream.
    #[expect(unsafe_code, reason = "a raw handle crosses the border")]
    let stream = unsafe { cuda::adopt_raw_stream(&device, raw.cu_stream().cast(), Arc::clone(&raw) as _) }?;
    let (device, host, stream) = (&*device, &*host, &*stream);
    if only.is_none_or(|only| only == "lossless") {
        let of = |dtype, count| decompress((&raw, stream), (device, host, kernels), (dtype, count));
        let types = DType::all().filter(|dtype| compressed_bound(*dtype, 1).is_some());
        // Types of the same fields share a kernel.
        let types = types.filter(|dtype| !matches!(dtype, DType::F8E4M3Fnuz | DType::F8E5M2Fnuz));
        let large = (large > 0).then_some((DType::BF16, large << 19));
        types.map(|dtype| (dtype, size * size)).chain(large).try_for_each(|(dtype, count)| of(dtype, count))?;
    }
    if only == Some("lossless") {
        return Ok(());
    }
    let weight: Vec<u8> = noise(size * size, 1).iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    let source = sent(device, host, stream, &weight)?.freeze();
    let mut target = Some(sent(device, host, stream, &weight)?);
    if only != Some("blocks") {
        let times = patches((&raw, stream), (device, host, kernels), size, (&source, &mut target))?;
        println!("{}: bf16 [{size}, {size}], medians of {TURNS} turns of {LAUNCHES}:", device.info().name);
        print_patches(times);
    }
    if only == Some("patches") {
        return Ok(());
    }
    let has_kernel = |dtype: &DType| dtype.is_ggml_block() && kernels.dequantises(stream, *dtype, DType::BF16).is_ok();
    for dtype in DType::all().filter(has_kernel) {
        dequantise((&raw, stream), (device, host, kernels), (dtype, size * size), (&source, &mut target))?;
    }
    Ok(())
}

/// Milliseconds of each turn: of a copy of the weight first, then of each patch.
fn patches(
    (raw, stream): (&CudaStream, &dyn Stream),
    (device, host, kernels): (&dyn Device, &dyn Device, &dyn Kernels),
    size: usize,
    (source, target): (&Buf, &mut Option<BufMut>),
) -> Outcome<Vec<Vec<f64>>> {
    // The factors are random, so a packed one is as good as any; small, so that the weights stay finite.
    let factors = PATCHES.map(|ranks| ranks.iter().map(|rank| (*rank, noise(size * rank, 3), noise(size * rank, 4))));
    let factors = factors.map(Iterator::collect::<Vec<_>>);
    let mut works = Vec::new();
    for factors in &factors {
        let products =
            factors.iter().map(|(rank, up, down)| PackedProduct { up, down, rank: *rank, rows: 0..size, scale: 1e-3 });
        let patch = MatrixPatch::new(DType::BF16, (size, size), products.collect(), None)?;
        let staging = host.alloc(patch.work_bytes(), MemoryKind::Pinned)?;
        let memory = device.alloc(patch.work_bytes(), MemoryKind::Arena)?;
        let (sent, read, _staging) = patch.send(stream, staging, memory, false)?;
        read.wait(DEADLINE)?;
        works.push(Some(sent));
    }
    let mut times = vec![Vec::new(); 1 + PATCHES.len()];
    // The first turn warms up.
    for turn in 0..=TURNS {
        let mut spent = vec![time(raw, stream, target, |memory| Ok(copy(stream, source, memory)?.chain()))?];
        for work in &mut works {
            spent.push(time(raw, stream, target, |memory| {
                let flight = kernels.patch(stream, work.take().ok_or("the factors are gone")?, memory, 0)?;
                *work = Some(flight.patch);
                Ok(flight.weight.chain())
            })?);
        }
        if turn > 0 {
            times.iter_mut().zip(spent).for_each(|(times, time)| times.push(time));
        }
    }
    Ok(times)
}

fn print_patches(times: Vec<Vec<f64>>) {
    let patch = |ranks: &[usize]| {
        format!("patch at rank {}", ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(" and "))
    };
    let names = std::iter::once("copy on the device".to_owned()).chain(PATCHES.map(patch));
    let mut of_copy = None;
    for (name, mut times) in names.zip(times) {
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0] * 1e3, times[TURNS / 2] * 1e3);
        let ratio = median / *of_copy.get_or_insert(median);
        println!("  {name:24} {median:8.1} us (best {best:.1}), {ratio:5.2} x the copy");
    }
}

/// Times the values of blocks of one type in bf16, in turns with a copy of as many values, and prints both.
fn dequantise(
    (raw, stream): (&CudaStream, &dyn Stream),
    (device, host, kernels): (&dyn Device, &dyn Device, &dyn Kernels),
    (dtype, values): (DType, usize),
    (source, target): (&Buf, &mut Option<BufMut>),
) -> Outcome<()> {
    let bytes = dtype.bytes_of(&[values as u64]).ok_or("the weight is not of whole blocks; choose a multiple of 16")?;
    let bytes: Vec<u8> = noise(bytes as usize, 5).iter().map(|value| ((value + 0.5) * 63.0) as u8).collect();
    let blocks = sent(device, host, stream, &bytes)?.freeze();
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..=TURNS {
        let copied = time(raw, stream, target, |memory| Ok(copy(stream, source, memory)?.chain()))?;
        let computed = time(raw, stream, target, |memory| {
            let work = Dequantise::new((blocks.clone(), 0, dtype), values, (memory, 0, DType::BF16))?;
            Ok(kernels.dequantise(stream, work)?.chain())
        })?;
        if turn > 0 {
            times.iter_mut().zip([copied, computed]).for_each(|(times, time)| times.push(time));
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let [copied, computed] = times.each_ref().map(|times| times[TURNS / 2]);
    // A copy reads and writes each byte of the values once.
    let floor = copied * (bytes.len() + 2 * values) as f64 / (4 * values) as f64;
    let (name, ratio, rate) = (format!("from {dtype}"), computed / floor, (2 * values) as f64 / computed / 1e6);
    println!(
        "  {name:24} {:8.1} us, {ratio:5.2} x its bytes at the copy's pace, {rate:.0} GB/s written",
        computed * 1e3
    );
    Ok(())
}

/// Normally distributed weights of a type, as bytes.
fn weights(dtype: DType, count: usize) -> Vec<u8> {
    // The sum of 12 even numbers is nearly normal. A part repeats, whose statistics are those of all.
    let part = count.min(1 << 22);
    let parts: Vec<_> = (0..12).map(|seed| noise(part, 17 * seed + 5)).collect();
    let values = (0..part).map(|at| parts.iter().map(|part| part[at]).sum::<f32>());
    let bytes: Vec<u8> = match dtype {
        DType::F32 => values.flat_map(|value| (value * 0.02).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| f16::from_f32(value * 0.02).to_le_bytes()).collect(),
        DType::F8E5M2 => values.map(|value| (f16::from_f32(value * 0.02).to_bits() >> 8) as u8).collect(),
        // Those of scaled tensors: the bits of E4M3 are those of f16 below the highest of its exponent.
        DType::F8E4M3 => values
            .map(|value| f16::from_f32(value * 0.25).to_bits())
            .map(|bits| (bits >> 8 & 0x80 | bits >> 7 & 0x7f) as u8)
            .collect(),
        _ => values.flat_map(|value| bf16::from_f32(value * 0.02).to_le_bytes()).collect(),
    };
    bytes.iter().copied().cycle().take(bytes.len() / part.max(1) * count).collect()
}

/// Times the decoding of a tensor of one type, in turns with a copy of its weights, checks what was decoded, and prints both.
fn decompress(
    (raw, stream): (&CudaStream, &dyn Stream),
    (device, host, kernels): (&dyn Device, &dyn Device, &dyn Kernels),
    (dtype, count): (DType, usize),
) -> Outcome<()> {
    kernels.decompresses(stream, dtype)?;
    let weights = weights(dtype, count);
    let code = compress(dtype, &weights)?;
    let info = *Code::open(&code)?.info();
    let source = sent(device, host, stream, &weights)?.freeze();
    let coded = sent(device, host, stream, &code)?.freeze();
    let mut target = Some(device.alloc(weights.len(), MemoryKind::Arena)?);
    let mut verdict = Some(sent(device, host, stream, &[0; Decompress::VERDICT])?);
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..=TURNS {
        let copied = time(raw, stream, &mut target, |memory| Ok(copy(stream, &source, memory)?.chain()))?;
        let decoded = time(raw, stream, &mut target, |memory| {
            let told = verdict.take().ok_or("the verdict is gone")?;
            let flight =
                kernels.decompress(stream, Decompress::new((coded.clone(), 0), info, (memory, 0), (told, 0))?)?;
            verdict = Some(flight.verdict.chain());
            Ok(flight.weights.chain())
        })?;
        if turn > 0 {
            times.iter_mut().zip([copied, decoded]).for_each(|(times, time)| times.push(time));
        }
    }
    let back = |memory: Option<BufMut>| -> Outcome<BufMut> {
        let memory = memory.ok_or("the buffer is gone")?.freeze();
        Ok(copy(stream, &memory, host.alloc(memory.bytes(), MemoryKind::Pinned)?)?.wait(DEADLINE)?)
    };
    let (mut decoded, mut told) = (back(target)?, back(verdict)?);
    let is_sound = told.host_mut().and_then(|told| Some(Decompress::is_sound(told.first_chunk()?)));
    if is_sound != Some(true) || decoded.host_mut().is_none_or(|decoded| decoded != weights) {
        return Err(format!("what was decoded of {dtype} is not what was coded").into());
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let [copied, decoded] = times.each_ref().map(|times| times[TURNS / 2]);
    let (name, bytes) = (format!("{dtype} of {} MiB", weights.len() >> 20), weights.len() as f64);
    println!(
        "  {name:24} {:8.1} us, {:5.2} x a copy of the weights, {:.0} GB/s written, from {:.3} of the bytes",
        decoded * 1e3,
        decoded / copied,
        bytes / decoded / 1e6,
        code.len() as f64 / bytes
    );
    Ok(())
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |name: &str| arguments.iter().skip_while(|argument| *argument != name).nth(1);
    let number = |name: &str, otherwise| after(name).map_or(Ok(otherwise), |number| number.parse::<usize>());
    let (size, large) = (number("--size", 4096)?, number("--large", 512)?);
    let mut found = Cuda::new().discover().into_iter();
    let id = found.find_map(|found| match found {
        Found::Here(info) if info.id.kind() == DeviceKind::Cuda => Some(info.id),
        _ => None,
    });
    match id {
        None => println!("no CUDA device to time"),
        Some(id) => run(id, (size, large), after("--only").map(String::as_str))?,
    }
    Ok(())
}
