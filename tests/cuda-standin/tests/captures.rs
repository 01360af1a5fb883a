//! Captures of streams: what is taken into one, and what breaks it.

mod common;

use common::Cuda;
use cuda_standin::{Config, library_path, session};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult, CUstream, CUstreamCaptureMode as Mode, CUstreamCaptureStatus as Status};

const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;

fn begin(stream: CUstream, mode: Mode) {
    // SAFETY: handles are checked by the stand-in, here and below.
    unsafe { result::stream::begin_capture(stream, mode) }.unwrap();
}

/// Ends a capture; the nodes of its graph.
fn end(stream: CUstream) -> Result<usize, CUresult> {
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above; the pointers are to living values.
    unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) }.result().map_err(|error| error.0)?;
    let mut nodes = 0;
    // SAFETY: as above.
    unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes) }.result().unwrap();
    // SAFETY: as above.
    unsafe { sys::cuGraphDestroy(graph) }.result().unwrap();
    Ok(nodes)
}

fn status(stream: CUstream) -> Result<Status, DriverError> {
    // SAFETY: as above.
    unsafe { result::stream::is_capturing(stream) }
}

fn code<T>(outcome: Result<T, DriverError>) -> Option<CUresult> {
    outcome.err().map(|error| error.0)
}

#[test]
fn what_is_enqueued_meanwhile_is_taken_and_not_run() {
    let standin = session(&Config::default());
    let cuda = Cuda::open(0);
    let (stream, other) = (cuda.stream(), cuda.stream());
    let memory = cuda.alloc(64);
    begin(stream, GLOBAL);
    assert_eq!(status(stream), Ok(Status::CU_STREAM_CAPTURE_STATUS_ACTIVE));
    let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
    // SAFETY: as above.
    unsafe {
        result::memset_d8_async(memory, 1, 64, stream).unwrap();
        result::event::record(event, stream).unwrap();
        result::stream::wait_event(stream, event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
    }
    assert_eq!(end(stream), Ok(3));
    assert_eq!(status(stream), Ok(Status::CU_STREAM_CAPTURE_STATUS_NONE));
    // SAFETY: as above.
    assert_eq!(code(unsafe { result::event::query(event) }), Some(CUresult::CUDA_ERROR_CAPTURED_EVENT));
    // Recorded again elsewhere it is an event like any other.
    // SAFETY: as above.
    unsafe {
        result::event::record(event, other).unwrap();
        result::event::synchronize(event).unwrap();
        result::event::destroy(event).unwrap();
    }
    cuda.free(memory);
    [stream, other].into_iter().for_each(|stream| cuda.destroy(stream));
    cuda.close();
    standin.report().assert_clean();
}

#[test]
fn what_lies_outside_breaks_a_capture() {
    let standin = session(&Config::default());
    let cuda = Cuda::open(0);
    let (stream, other) = (cuda.stream(), cuda.stream());
    let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
    // SAFETY: as above.
    unsafe { result::event::record(event, other) }.unwrap();
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    begin(stream, RELAXED);
    // SAFETY: as above.
    let waited = code(unsafe { result::stream::wait_event(stream, event, flags) });
    assert_eq!(waited, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION));
    assert_eq!(status(stream), Ok(Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED));
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    begin(stream, RELAXED);
    // SAFETY: as above.
    let waited = code(unsafe { result::stream::synchronize(stream) });
    assert_eq!(waited, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    // The legacy stream would have to wait for a blocking stream that is captured. Asking is allowed.
    let blocking = cuda.blocking_stream();
    begin(blocking, RELAXED);
    assert_eq!(code(status(std::ptr::null_mut())), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
    assert_eq!(end(blocking), Ok(0));
    begin(blocking, RELAXED);
    // SAFETY: as above.
    let recorded = code(unsafe { result::event::record(event, std::ptr::null_mut()) });
    assert_eq!(recorded, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
    assert_eq!(end(blocking), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    // SAFETY: as above.
    unsafe { result::event::destroy(event) }.unwrap();
    [stream, other, blocking].into_iter().for_each(|stream| cuda.destroy(stream));
    cuda.close();
    standin.report().assert_clean();
}

/// A capture in global mode forbids threads that know nothing of it what is not safe; a thread can leave captures.
#[test]
fn a_global_capture_is_broken_by_calls_of_other_threads() {
    let standin = session(&Config::default());
    let cuda = Cuda::open(0);
    let (stream, other) = (cuda.stream(), cuda.stream());
    let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
    // SAFETY: as above.
    unsafe { result::event::record(event, other) }.unwrap();
    let (context, event_number) = (cuda.context as usize, event as usize);
    let asked = |leave: bool| {
        let ask = move || {
            // SAFETY: as above.
            unsafe { result::ctx::set_current(context as sys::CUcontext) }.unwrap();
            if leave {
                let mut mode = RELAXED;
                // SAFETY: as above.
                unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().unwrap();
                assert_eq!(mode, GLOBAL);
            }
            // SAFETY: as above.
            code(unsafe { result::event::query(event_number as sys::CUevent) })
        };
        std::thread::spawn(ask).join().unwrap()
    };
    // SAFETY: as above.
    unsafe { result::event::synchronize(event) }.unwrap();
    begin(stream, GLOBAL);
    assert_eq!(asked(true), None);
    assert_eq!(end(stream), Ok(0));
    begin(stream, GLOBAL);
    assert_eq!(asked(false), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    begin(stream, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    assert_eq!(asked(false), None, "another thread's");
    assert_eq!(end(stream), Ok(0));
    // SAFETY: as above.
    unsafe { result::event::destroy(event) }.unwrap();
    [stream, other].into_iter().for_each(|stream| cuda.destroy(stream));
    cuda.close();
    standin.report().assert_clean();
}

/// The mode is each thread's own, and what counts is the mode at the call: relaxed for one call only, a thread spares the
/// capture at that call and breaks it at the next.
#[test]
fn a_threads_mode_counts_at_each_call_and_for_that_thread_alone() {
    let standin = session(&Config::default());
    let cuda = Cuda::open(0);
    let (stream, other) = (cuda.stream(), cuda.stream());
    let event = cuda.record(other);
    cuda.synchronize(other);
    let (context, event_number) = (cuda.context as usize, event as usize);
    let query = move || {
        // SAFETY: as above.
        code(unsafe { result::event::query(event_number as sys::CUevent) })
    };
    let exchange = |mut mode: Mode| {
        // SAFETY: as above.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().unwrap();
        mode
    };
    begin(stream, GLOBAL);
    std::thread::scope(|scope| {
        scope
            .spawn(move || {
                // SAFETY: as above.
                unsafe { result::ctx::set_current(context as sys::CUcontext) }.unwrap();
                for _ in 0..3 {
                    assert_eq!(exchange(RELAXED), GLOBAL);
                    assert_eq!(query(), None, "relaxed");
                    assert_eq!(exchange(GLOBAL), RELAXED, "what was exchanged comes back");
                }
            })
            .join()
            .unwrap();
    });
    assert_eq!(status(stream), Ok(Status::CU_STREAM_CAPTURE_STATUS_ACTIVE));
    // This thread began the capture, and the other one's mode is not its own.
    assert_eq!(exchange(RELAXED), GLOBAL);
    assert_eq!(query(), None);
    assert_eq!(exchange(GLOBAL), RELAXED);
    assert_eq!(query(), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    cuda.forget(event);
    [stream, other].into_iter().for_each(|stream| cuda.destroy(stream));
    cuda.close();
    standin.report().assert_clean();
}

/// The same library answers as the management library, about the same machine and before the driver is initialised.
#[test]
fn the_management_library_tells_of_the_same_machine() {
    let mut config = Config::with_devices(&[8 << 30]);
    config.devices[0].others_bytes = 1 << 30;
    let _standin = session(&config);
    type ByUuid = unsafe extern "C" fn(*const std::ffi::c_char, *mut *mut std::ffi::c_void) -> i32;
    type Memory = unsafe extern "C" fn(*mut std::ffi::c_void, *mut [u64; 3]) -> i32;
    // SAFETY: the library is loaded already; the types are those of its calls, the pointers to living values.
    let (found, memory) = unsafe {
        let library = libloading::Library::new(library_path().unwrap()).unwrap();
        let by_uuid = library.get::<ByUuid>(b"nvmlDeviceGetHandleByUUID").unwrap();
        let memory_of = library.get::<Memory>(b"nvmlDeviceGetMemoryInfo").unwrap();
        let (mut device, mut memory) = (std::ptr::null_mut(), [0; 3]);
        let uuid = c"GPU-63756461-2d73-7461-6e64-696e2d303030";
        let found = by_uuid(uuid.as_ptr(), &raw mut device);
        assert_eq!(memory_of(device, &raw mut memory), 0);
        assert_ne!(by_uuid(c"GPU-0".as_ptr(), &raw mut device), 0);
        (found, memory)
    };
    assert_eq!((found, memory), (0, [8 << 30, 7 << 30, 1 << 30]));
}
