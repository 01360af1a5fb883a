//! Patching by a CUDA device's kernels: a bf16 weight of [4096, 4096] (`--size N` for another) at rank 16 and 64, and by two
//! products of rank 16, beside a copy of the weight on the device in the same turns; and the same weight computed from blocks of
//! GGML's types, beside what reading them and writing it would take at the pace of that copy. `--only patches` or `--only blocks`
//! does half of that. Where there is no device, or its driver takes no kernels, it says so and ends.
//!
//! A turn queues its work while the stream is held, and events of the driver around it tell the time; what is printed
//! are medians of alternating turns.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaContext, CudaStream};
use half::bf16;
use tensor_offload::backend::{
    Backend, Buf, BufMut, Cuda, Dequantise, Device, Flight, Found, Kernels, MatrixPatch, MemoryKind, PackedProduct,
    Stream, Transfer,
};
use tensor_offload::device::DeviceKind;
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

fn run(id: DeviceId, size: usize, only: Option<&str>) -> Outcome<()> {
    let backend = Cuda::new();
    let (device, host) = (backend.open(id)?, backend.open(DeviceId::CPU)?);
    let kernels = device.kernels().ok_or("the device has no kernels")?;
    kernels.ready()?;
    let raw = CudaContext::new(id.index() as usize)?.new_stream()?;
    // SAFETY: cudarc's context is the primary one, and the `Arc` holds the stream.
    #[expect(unsafe_code, reason = "a raw handle crosses the border")]
    let stream = unsafe { cuda::adopt_raw_stream(&device, raw.cu_stream().cast(), Arc::clone(&raw) as _) }?;
    let (device, host, stream) = (&*device, &*host, &*stream);
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

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |name: &str| arguments.iter().skip_while(|argument| *argument != name).nth(1);
    let size = after("--size").map_or(Ok(4096), |size| size.parse())?;
    let mut found = Cuda::new().discover().into_iter();
    let id = found.find_map(|found| match found {
        Found::Here(info) if info.id.kind() == DeviceKind::Cuda => Some(info.id),
        _ => None,
    });
    match id {
        None => println!("no CUDA device to time"),
        Some(id) => run(id, size, after("--only").map(String::as_str))?,
    }
    Ok(())
}
