//! Modules and launches: what they compute, and what the stand-in names.

mod common;

use common::kernel::{assert_only, function, load, refused, store, unload};
use common::{Cuda, MIB};
use cuda_standin::{Config, Rule, session};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};

/// Stores `value` at `to`, once for each thread, and adds it to the 64 bits at `sum`.
const STORE: &str = "
.version 6.0
.target sm_70
.address_size 64
.visible .entry store(
    .param .u64 to,
    .param .u64 sum,
    .param .u32 value
)
{
    .reg .b32 %r<5>;
    .reg .b64 %rd<8>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd5, [sum];
    ld.param.u32 %r1, [value];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    shl.b32 %r3, %r3, 5;
    add.s32 %r4, %r2, %r3;
    setp.eq.s32 %p1, %r4, 7; // this one stores nothing
    @%p1 bra $L_end;
    mul.wide.u32 %rd2, %r4, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
$L_end:
    cvt.u64.u32 %rd6, %r1;
    atom.global.add.u64 %rd7, [%rd5], %rd6;
    ret;
}
";

/// Stores, for each thread, the number of a table that the byte at `at` is the index of.
const LOOK_UP: &str = "
.version 6.0
.target sm_70
.address_size 64
.global .align 2 .b8 SQUARES[8] = {0, 0, 1, 0, 4, 0, 9, 1};
.visible .entry store(
    .param .u64 at,
    .param .u64 to,
    .param .u32 value
)
{
    .reg .b16 %rs<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [to];
    mov.u32 %r1, %tid.x;
    cvt.u64.u32 %rd3, %r1;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u8 %r2, [%rd4];
    mul.wide.u32 %rd5, %r2, 2;
    mov.u64 %rd6, SQUARES;
    add.s64 %rd7, %rd6, %rd5;
    ld.global.nc.u16 %rs1, [%rd7];
    mul.wide.u32 %rd8, %r1, 2;
    add.s64 %rd9, %rd2, %rd8;
    st.global.u16 [%rd9], %rs1;
    ret;
}
";

#[test]
fn a_function_runs_in_the_order_of_its_stream() {
    let standin = session(&Config::with_devices(&[64 * MIB]).late_micros(10_000_000));
    let cuda = Cuda::open(0);
    let (stream, memory, sum) = (cuda.stream(), cuda.alloc(300), cuda.alloc(8));
    let (source, back) = (cuda.pin(&[1; 300]), cuda.pin(&[0; 300]));
    let module = load(STORE).unwrap();
    cuda.upload(memory, source, 300, stream);
    cuda.upload(sum, source, 8, stream);
    store(function(module), 2, memory + 4, sum, stream).unwrap();
    cuda.download(back, memory, 300, stream);
    cuda.synchronize(stream);
    let got = cuda.host(back, 300);
    let stored = |at: usize| (4..260).contains(&at) && !(32..36).contains(&at);
    let wanted = |at: usize| if !stored(at) { 1 } else { [5, 0, 0, 0][at % 4] };
    assert!(got.iter().enumerate().all(|(at, byte)| *byte == wanted(at)), "{got:?}");
    cuda.download(back, sum, 8, stream);
    cuda.synchronize(stream);
    let total = u64::from_le_bytes(cuda.host(back, 8).try_into().unwrap());
    assert_eq!(total, 0x0101_0101_0101_0101 + 64 * 5);
    unload(module);
    cuda.free(memory);
    cuda.free(sum);
    cuda.unpin(source);
    cuda.unpin(back);
    cuda.destroy(stream);
    cuda.close();
    standin.report().assert_clean();
}

#[test]
fn a_launch_that_does_not_wait_for_a_copy() {
    let standin = session(&Config::with_devices(&[64 * MIB]).late_micros(10_000_000));
    let cuda = Cuda::open(0);
    let (copies, computes, memory, sum) = (cuda.stream(), cuda.stream(), cuda.alloc(256), cuda.alloc(8));
    let source = cuda.pin(&[1; 256]);
    let module = load(STORE).unwrap();
    cuda.upload(memory, source, 256, copies);
    store(function(module), 1, memory, sum, computes).unwrap();
    assert_only(&standin, Rule::Unordered, "cuLaunchKernel");
}

#[test]
fn a_launch_past_the_end_of_its_memory_breaks_the_device() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let (stream, memory, sum) = (cuda.stream(), cuda.alloc(256), cuda.alloc(8));
    let module = load(STORE).unwrap();
    store(function(module), 3, memory, sum, stream).unwrap();
    // SAFETY: the stream is alive.
    let ended = unsafe { result::stream::synchronize(stream) };
    assert_eq!(ended.unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_only(&standin, Rule::OutOfBounds, "cuLaunchKernel");
    let detail = &standin.report().violations[0].detail;
    assert!(detail.contains("store"), "{detail}");
}

/// What a function finds in its table by indexes, one of a thread.
fn looked_up(cuda: &Cuda, text: &str, indexes: [u8; 32]) -> Result<Vec<u8>, CUresult> {
    let (stream, at, to) = (cuda.stream(), cuda.alloc(32), cuda.alloc(64));
    let (source, back) = (cuda.pin(&indexes), cuda.pin(&[0; 64]));
    let module = load(text).unwrap();
    cuda.upload(at, source, 32, stream);
    store(function(module), 1, at, to, stream).unwrap();
    // SAFETY: the stream is alive.
    unsafe { result::stream::synchronize(stream) }.map_err(|error| error.0)?;
    cuda.download(back, to, 64, stream);
    cuda.synchronize(stream);
    let got = cuda.host(back, 64).to_vec();
    unload(module);
    cuda.free(at);
    cuda.free(to);
    cuda.unpin(source);
    cuda.unpin(back);
    cuda.destroy(stream);
    Ok(got)
}

#[test]
fn a_function_reads_from_a_table_of_its_text() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let indexes = std::array::from_fn(|thread| (thread * 3 % 4) as u8);
    let wanted: Vec<u8> =
        indexes.iter().flat_map(|index| [[0, 0], [1, 0], [4, 0], [9, 1]][usize::from(*index)]).collect();
    assert_eq!(looked_up(&cuda, LOOK_UP, indexes).unwrap(), wanted);
    cuda.close();
    standin.report().assert_clean();
}

#[test]
fn a_function_that_misses_its_table_breaks_the_device() {
    let behind = std::array::from_fn(|thread| if thread == 31 { 4 } else { 0 });
    // Behind its end no other table is reached.
    let two = LOOK_UP.replace(".visible", ".global .align 2 .b8 NEXT[2] = {7, 7};\n.visible");
    let halfway = LOOK_UP.replace("[%rd7]", "[%rd7+7]");
    let odd = LOOK_UP.replace("[%rd7]", "[%rd7+1]");
    // The table is aligned to two bytes, so four of them need not be where a number of four may stand.
    let wide = LOOK_UP.replace("ld.global.nc.u16 %rs1", "ld.global.nc.u32 %r2");
    for (text, indexes, code) in [
        (LOOK_UP, behind, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        (&two, behind, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        (&halfway, [0; 32], CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        (&odd, [0; 32], CUresult::CUDA_ERROR_MISALIGNED_ADDRESS),
        (&wide, [0; 32], CUresult::CUDA_ERROR_MISALIGNED_ADDRESS),
    ] {
        let standin = session(&Config::with_devices(&[64 * MIB]));
        assert_eq!(looked_up(&Cuda::open(0), text, indexes).unwrap_err(), code);
        assert!(standin.report().violations.iter().all(|violation| violation.call == "cuLaunchKernel"));
    }
}

#[test]
fn modules_that_are_gone_in_use_or_left() {
    let standin = session(&Config::with_devices(&[64 * MIB]).late_micros(10_000_000));
    let cuda = Cuda::open(0);
    let (stream, memory, sum) = (cuda.stream(), cuda.alloc(256), cuda.alloc(8));
    let module = load(STORE).unwrap();
    let gone = function(module);
    store(gone, 1, memory, sum, stream).unwrap();
    unload(module);
    assert_only(&standin, Rule::FreeInUse, "cuModuleUnload");
    assert_eq!(store(gone, 1, memory, sum, stream).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(standin.report().count(Rule::UnknownHandle), 1);
    let _left = load(STORE).unwrap();
    let report = standin.report();
    assert!(report.leaks.iter().any(|leak| leak.call == "cuModuleLoadData"), "{report}");
}

#[test]
fn texts_that_a_driver_does_not_take() {
    let machine = || Config::with_devices(&[64 * MIB]);
    let newer = STORE.replace("6.0", "8.8");
    assert_eq!(refused(&machine(), &newer), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    assert_eq!(refused(&machine(), &STORE.replace("sm_70", "sm_90")), CUresult::CUDA_ERROR_INVALID_PTX);
    assert_eq!(refused(&machine(), &STORE.replace("shl.b32", "shf.b32")), CUresult::CUDA_ERROR_INVALID_PTX);
    assert_eq!(
        refused(&machine(), &STORE.replace("%rd3, %rd1, %rd2", "%rd3, %rd2, %rd2")),
        CUresult::CUDA_ERROR_INVALID_PTX
    );
    assert_eq!(refused(&Config { refuse_ptx: true, ..machine() }, STORE), CUresult::CUDA_ERROR_INVALID_PTX);
    for (from, to) in [
        // Tables of other types and of other lengths, that are not there, or twice, and sums in the place of an address.
        (".align 2 .b8", ".align 2 .u16"),
        ("SQUARES[8]", "SQUARES[9]"),
        ("%rd6, SQUARES", "%rd6, CUBES"),
        (".visible", ".global .align 2 .b8 SQUARES[1] = {0};\n.visible"),
        ("mov.u64 %rd6, SQUARES", "add.s64 %rd6, SQUARES, 2"),
        // A table that is written to, and what is read as a constant and written to.
        ("add.s64 %rd9, %rd2, %rd8", "add.s64 %rd9, %rd6, %rd8"),
        ("add.s64 %rd7, %rd6, %rd5", "add.s64 %rd7, %rd2, %rd5"),
    ] {
        assert!(LOOK_UP.contains(from), "{from}");
        assert_eq!(refused(&machine(), &LOOK_UP.replacen(from, to, 1)), CUresult::CUDA_ERROR_INVALID_PTX, "{to}");
    }
}

/// A graph launches a function with the parameters that it was captured with, as often as the graph is launched.
#[test]
fn a_function_in_a_graph_runs_at_each_launch() {
    let standin = session(&Config::with_devices(&[64 * MIB]).late_micros(1000));
    let cuda = Cuda::open(0);
    let (stream, memory, sum) = (cuda.stream(), cuda.alloc(300), cuda.alloc(8));
    let back = cuda.pin(&[0; 8]);
    let module = load(STORE).unwrap();
    cuda.fill(sum, 0, 8, stream);
    let mut graph = std::ptr::null_mut();
    // SAFETY: handles are checked by the stand-in, here and below.
    unsafe { result::stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) }.unwrap();
    store(function(module), 2, memory + 4, sum, stream).unwrap();
    // SAFETY: as above.
    unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) }.result().unwrap();
    // SAFETY: as above.
    let executable = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) }.unwrap();
    for launches in 1..=3 {
        // SAFETY: as above.
        unsafe { result::graph::launch(executable, stream) }.unwrap();
        cuda.download(back, sum, 8, stream);
        cuda.synchronize(stream);
        assert_eq!(u64::from_le_bytes(cuda.host(back, 8).try_into().unwrap()), launches * 64 * 5);
    }
    // SAFETY: as above.
    unsafe {
        result::graph::exec_destroy(executable).unwrap();
        result::graph::destroy(graph).unwrap();
    }
    unload(module);
    cuda.free(memory);
    cuda.free(sum);
    cuda.unpin(back);
    cuda.destroy(stream);
    cuda.close();
    standin.report().assert_clean();
}
