//! Graphs: what a launch runs, in which order, and what is refused.

mod common;

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Cuda, pattern};
use cuda_standin::{Config, MemoryMode, Rule, session};
use cudarc::driver::result::{self, graph};
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode as Mode};

const LEN: usize = 1000;

/// Captures what `queue` queues on a stream.
fn captured(stream: CUstream, queue: impl FnOnce()) -> CUgraph {
    let mut graph = std::ptr::null_mut();
    // SAFETY: handles are checked by the stand-in, here and below.
    unsafe { result::stream::begin_capture(stream, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) }.unwrap();
    queue();
    // SAFETY: as above.
    unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) }.result().unwrap();
    graph
}

fn ready(graph: CUgraph) -> Result<CUgraphExec, CUresult> {
    // SAFETY: as above.
    unsafe { graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) }.map_err(|error| error.0)
}

/// The older call for the same.
fn ready_as_of_old(graph: CUgraph) -> CUgraphExec {
    let (mut made, mut failed, mut log) = (std::ptr::null_mut(), std::ptr::dangling_mut(), [1; 8]);
    // SAFETY: as above; the pointers are to living values.
    unsafe { cuGraphInstantiate_v2(&raw mut made, graph, &raw mut failed, log.as_mut_ptr(), 8) };
    assert!(failed.is_null() && log[0] == 0);
    made
}

/// `cuGraphInstantiate_v2`, which cudarc has for older versions only.
#[expect(non_snake_case, reason = "the driver's name")]
unsafe fn cuGraphInstantiate_v2(
    made: *mut CUgraphExec,
    graph: CUgraph,
    failed: *mut *mut c_void,
    log: *mut std::ffi::c_char,
    room: usize,
) {
    type Made =
        unsafe extern "C" fn(*mut CUgraphExec, CUgraph, *mut *mut c_void, *mut std::ffi::c_char, usize) -> CUresult;
    // SAFETY: the library is loaded already; the type is that of its call.
    unsafe {
        let library = libloading::Library::new(cuda_standin::library_path().unwrap()).unwrap();
        let call = library.get::<Made>(b"cuGraphInstantiate_v2").unwrap();
        call(made, graph, failed, log, room).result().unwrap();
    }
}

fn launch(executable: CUgraphExec, stream: CUstream) -> Result<(), CUresult> {
    // SAFETY: as above.
    unsafe { graph::launch(executable, stream) }.map_err(|error| error.0)
}

fn forget(graph: CUgraph, executable: CUgraphExec) {
    // SAFETY: as above.
    unsafe {
        graph::exec_destroy(executable).unwrap();
        graph::destroy(graph).unwrap();
    }
}

/// A launch reads what is at the captured addresses when its turn comes, in the order of the nodes and of the stream.
#[test]
fn a_launch_runs_the_copies_of_its_capture_each_time() {
    let standin = session(&Config::with_devices(&[1 << 20]).memory(MemoryMode::Reuse).late_micros(1000));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let (weight, between) = (cuda.alloc(LEN), cuda.alloc(LEN));
    let (source, seen) = (cuda.pin(&pattern(LEN, 1)), cuda.pin(&[0; LEN]));
    let graph = captured(stream, || {
        cuda.fill(between, 9, LEN, stream);
        cuda.copy(between, weight, LEN - 1, stream);
        cuda.download(seen, between, LEN, stream);
    });
    cuda.synchronize(stream);
    assert_eq!(cuda.host(seen, LEN), [0; LEN], "a capture runs nothing");
    for (round, executable) in [ready(graph).unwrap(), ready_as_of_old(graph)].into_iter().enumerate() {
        for pass in 0..3 {
            let mut bytes = pattern(LEN, (10 * round + pass) as u8);
            let source = cuda.pin(&bytes);
            cuda.upload(weight, source, LEN, stream);
            launch(executable, stream).unwrap();
            cuda.synchronize(stream);
            bytes[LEN - 1] = 9;
            assert_eq!(cuda.host(seen, LEN), bytes, "round {round}, pass {pass}");
            cuda.unpin(source);
        }
        // SAFETY: as above.
        unsafe { graph::exec_destroy(executable) }.unwrap();
    }
    // Uploads and functions of the host are nodes, too, and a graph can be in a graph.
    static CALLED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn called(by: *mut c_void) {
        CALLED.fetch_add(by.addr(), Ordering::SeqCst);
    }
    let inner = ready(graph).unwrap();
    let outer = captured(stream, || {
        cuda.upload(weight, source, LEN, stream);
        launch(inner, stream).unwrap();
        // SAFETY: the function takes any argument.
        unsafe { sys::cuLaunchHostFunc(stream, Some(called), std::ptr::without_provenance_mut(7)) }.result().unwrap();
    });
    let executable = ready(outer).unwrap();
    // What was made ready is a copy, and stays when the graphs that it came from go.
    forget(graph, inner);
    // SAFETY: as above.
    unsafe { graph::destroy(outer) }.unwrap();
    launch(executable, stream).unwrap();
    cuda.synchronize(stream);
    assert_eq!((&cuda.host(seen, LEN)[..LEN - 1], CALLED.load(Ordering::SeqCst)), (&pattern(LEN, 1)[..LEN - 1], 7));
    // SAFETY: as above.
    unsafe { graph::exec_destroy(executable) }.unwrap();
    [weight, between].into_iter().for_each(|memory| cuda.free(memory));
    [source, seen].into_iter().for_each(|memory| cuda.unpin(memory));
    cuda.destroy(stream);
    cuda.close();
    standin.report().assert_clean();
}

/// Launches of one graph run one after the other, on whatever streams. Two graphs do not, so their accesses are checked.
#[test]
fn the_accesses_of_a_launch_are_checked_as_those_of_calls() {
    let standin = session(&Config::with_devices(&[1 << 20]));
    let cuda = Cuda::open(0);
    let (stream, other) = (cuda.stream(), cuda.stream());
    let memory = cuda.alloc(LEN);
    let graph = captured(stream, || cuda.fill(memory, 1, LEN, stream));
    let (one, two) = (ready(graph).unwrap(), ready(graph).unwrap());
    launch(one, stream).unwrap();
    launch(one, other).unwrap();
    assert_eq!(standin.report().count(Rule::Unordered), 0);
    launch(two, stream).unwrap();
    assert_eq!(standin.report().count(Rule::Unordered), 1);
    [stream, other].into_iter().for_each(|stream| cuda.synchronize(stream));
    cuda.free(memory);
    assert_eq!(launch(one, stream), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "its memory is gone");
    assert_eq!(standin.report().count(Rule::UseAfterFree), 1);
    // SAFETY: as above.
    unsafe { graph::exec_destroy(one) }.unwrap();
    assert_eq!(launch(one, stream), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "it is gone");
    assert_eq!(standin.report().count(Rule::UnknownHandle), 1);
    forget(graph, two);
    [stream, other].into_iter().for_each(|stream| cuda.destroy(stream));
    cuda.close();
}

/// What cannot be run as a card would run it is refused: memory that is not pinned, which may be gone by the launch, and
/// allocations.
#[test]
fn what_a_graph_cannot_do_here_is_refused() {
    let standin = session(&Config::with_devices(&[1 << 20]));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let (memory, mut pageable) = (cuda.alloc(LEN), vec![3_u8; LEN]);
    let at = pageable.as_mut_ptr().cast();
    let graph = captured(stream, || cuda.download(at, memory, LEN, stream));
    let executable = ready(graph).unwrap();
    assert_eq!(launch(executable, stream), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    forget(graph, executable);
    // SAFETY: as above.
    let graph = captured(stream, || _ = unsafe { result::malloc_async(stream, LEN) });
    assert_eq!(ready(graph), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    // SAFETY: as above.
    unsafe { graph::destroy(graph) }.unwrap();
    assert_eq!(ready(graph), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "it is gone");
    cuda.synchronize(stream);
    assert_eq!(pageable, [3; LEN]);
    cuda.free(memory);
    cuda.destroy(stream);
    cuda.close();
    standin.report().assert_clean();
}
