//! AMD's calls over the same world: a program that keeps the rules, and each rule that is HIP's own.

mod common;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use common::kernel::assert_only;
use common::loaded::{loaded, made};
use common::{MIB, pattern, settled};
use cuda_standin::{Config, Driver, Effect, Fault, FaultPlan, MemoryMode, Rule, session};

type Handle = *mut c_void;

const LEN: usize = MIB as usize;
const NON_BLOCKING: c_uint = 1;
const NO_TIMING: c_uint = 2;
const PORTABLE: c_uint = 1;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_DEVICE: c_int = 101;
const INVALID_IMAGE: c_int = 200;
const INVALID_HANDLE: c_int = 400;
const NOT_READY: c_int = 600;
const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;
const CONTEXT_IS_DESTROYED: c_int = 709;
const LAUNCH_FAILURE: c_int = 719;
const CAPTURE_UNSUPPORTED: c_int = 900;

loaded!(Hip {
    fn hipInit(flags: c_uint);
    fn hipDriverGetVersion(version: *mut c_int);
    fn hipRuntimeGetVersion(version: *mut c_int);
    fn hipDrvGetErrorName(error: c_int, name: *mut *const c_char);
    fn hipDrvGetErrorString(error: c_int, text: *mut *const c_char);
    fn hipGetDeviceCount(count: *mut c_int);
    fn hipDeviceGet(device: *mut c_int, ordinal: c_int);
    fn hipDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    fn hipDeviceTotalMem(bytes: *mut usize, device: c_int);
    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    fn hipDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int);
    fn hipDeviceGetUuid(uuid: *mut [u8; 16], device: c_int);
    fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint);
    fn hipCtxEnablePeerAccess(peer: Handle, flags: c_uint);
    fn hipDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    fn hipDevicePrimaryCtxRelease(device: c_int);
    fn hipDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int);
    fn hipDeviceReset();
    fn hipCtxGetCurrent(context: *mut Handle);
    fn hipCtxSetCurrent(context: Handle);
    fn hipGetDevice(device: *mut c_int);
    fn hipSetDevice(device: c_int);
    fn hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    fn hipMemGetInfo(free: *mut usize, total: *mut usize);
    fn hipMalloc(at: *mut Handle, bytes: usize);
    fn hipFree(at: Handle);
    fn hipHostMalloc(at: *mut Handle, bytes: usize, flags: c_uint);
    fn hipHostFree(at: Handle);
    fn hipHostRegister(at: Handle, bytes: usize, flags: c_uint);
    fn hipHostUnregister(at: Handle);
    fn hipMallocAsync(at: *mut Handle, bytes: usize, stream: Handle);
    fn hipFreeAsync(at: Handle, stream: Handle);
    fn hipMemcpyHtoD(dst: Handle, src: Handle, bytes: usize);
    fn hipMemcpyHtoDAsync(dst: Handle, src: Handle, bytes: usize, stream: Handle);
    fn hipMemcpyDtoH(dst: Handle, src: Handle, bytes: usize);
    fn hipMemcpyDtoHAsync(dst: Handle, src: Handle, bytes: usize, stream: Handle);
    fn hipMemcpyDtoDAsync(dst: Handle, src: Handle, bytes: usize, stream: Handle);
    fn hipMemcpyAsync(dst: Handle, src: Handle, bytes: usize, kind: c_int, stream: Handle);
    fn hipMemcpyPeerAsync(dst: Handle, dst_device: c_int, src: Handle, src_device: c_int, bytes: usize, stream: Handle);
    fn hipStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int);
    fn hipStreamDestroy(stream: Handle);
    fn hipStreamSynchronize(stream: Handle);
    fn hipStreamQuery(stream: Handle);
    fn hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn hipStreamIsCapturing(stream: Handle, status: *mut c_int);
    fn hipStreamBeginCapture(stream: Handle, mode: c_int);
    fn hipStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn hipGraphDestroy(graph: Handle);
    fn hipThreadExchangeStreamCaptureMode(mode: *mut c_int);
    fn hipLaunchHostFunc(stream: Handle, function: unsafe extern "C" fn(Handle), argument: Handle);
    fn hipEventCreateWithFlags(event: *mut Handle, flags: c_uint);
    fn hipEventDestroy(event: Handle);
    fn hipEventQuery(event: Handle);
    fn hipEventRecord(event: Handle, stream: Handle);
    fn hipModuleLoadData(module: *mut Handle, image: *const c_void);
    fn hipModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    fn hipModuleUnload(module: Handle);
    fn hipModuleLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, params: *mut Handle, extra: *mut Handle,
    );
});

impl Hip {
    fn alloc(&self, len: usize) -> Handle {
        made(null_mut(), |at| self.hipMalloc(at, len))
    }

    /// Pinned memory with these bytes in it.
    fn pin(&self, bytes: &[u8]) -> Handle {
        let at = made(null_mut(), |at| self.hipHostMalloc(at, bytes.len(), PORTABLE));
        // SAFETY: the memory is as long as the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.cast::<u8>(), bytes.len()) };
        at
    }

    fn stream(&self) -> Handle {
        made(null_mut(), |stream| self.hipStreamCreateWithPriority(stream, NON_BLOCKING, 0))
    }

    /// A new event, recorded.
    fn record(&self, stream: Handle) -> Handle {
        let event = made(null_mut(), |event| self.hipEventCreateWithFlags(event, NO_TIMING));
        assert_eq!(self.hipEventRecord(event, stream), 0);
        event
    }

    fn device(&self) -> c_int {
        made(-1, |device| self.hipGetDevice(device))
    }

    fn attribute(&self, attribute: c_int) -> c_int {
        made(-1, |value| self.hipDeviceGetAttribute(value, attribute, 0))
    }
}

fn bytes_at(at: Handle, len: usize) -> Vec<u8> {
    // SAFETY: the callers give pinned memory of this length that nothing writes to any more.
    unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec()
}

fn offset(at: Handle, by: usize) -> Handle {
    at.wrapping_byte_add(by)
}

/// Late enough that no work starts before the host waits for it.
fn late() -> Config {
    Config::with_devices(&[64 * MIB, 32 * MIB]).late_micros(10_000_000)
}

#[test]
fn a_lawful_life() {
    let standin = session(&Config::with_devices(&[64 * MIB]).late_micros(200));
    let hip = Hip::find(&standin);
    assert_eq!(hip.hipInit(0), 0);
    assert_eq!(made(-1, |count| hip.hipGetDeviceCount(count)), 1);
    assert_eq!(made(-1, |device| hip.hipDeviceGet(device, 0)), 0);
    let context = made(null_mut(), |context| hip.hipDevicePrimaryCtxRetain(context, 0));
    assert_eq!(hip.hipCtxSetCurrent(context), 0);
    let bytes = pattern(3 * LEN + 17, 1);
    let (stream, device) = (hip.stream(), hip.alloc(bytes.len()));
    let mut total = 0;
    assert_eq!(made(0, |free| hip.hipMemGetInfo(free, &mut total)), 61 * LEN - 512);
    assert_eq!(total, 64 * LEN);
    let (source, target) = (hip.pin(&bytes), hip.pin(&vec![0; bytes.len()]));
    assert_eq!(hip.hipMemcpyHtoDAsync(device, source, bytes.len(), stream), 0);
    let landed = hip.record(stream);
    assert_eq!(hip.hipEventQuery(landed), NOT_READY);
    assert_eq!(hip.hipMemcpyDtoHAsync(target, device, bytes.len(), stream), 0);
    assert_eq!(hip.hipStreamSynchronize(stream), 0);
    assert_eq!((hip.hipEventQuery(landed), hip.hipStreamQuery(stream)), (0, 0));
    assert!(bytes_at(target, bytes.len()) == bytes);
    let mut own = vec![0_u8; 4096];
    assert_eq!(hip.hipHostRegister(own.as_mut_ptr().cast(), own.len(), PORTABLE), 0);
    assert_eq!(hip.hipMemcpyAsync(own.as_mut_ptr().cast(), device, own.len(), 4, stream), 0);
    assert_eq!(hip.hipStreamSynchronize(stream), 0);
    assert!(own == bytes[..4096]);
    assert_eq!(hip.hipHostUnregister(own.as_mut_ptr().cast()), 0);
    let given_back =
        [hip.hipFree(device), hip.hipHostFree(source), hip.hipHostFree(target), hip.hipEventDestroy(landed)];
    assert_eq!(given_back, [0; 4]);
    assert_eq!((hip.hipStreamDestroy(stream), hip.hipDevicePrimaryCtxRelease(0)), (0, 0));
    let report = standin.report();
    report.assert_clean();
    assert_eq!((report.calls_of("hipMalloc"), report.live_contexts, report.calls_of("cuMemAlloc_v2")), (1, 0, 0));
}

#[test]
fn a_device_is_what_the_configuration_says_in_hips_numbers() {
    let mut config = Config::with_devices(&[24 << 30, 16 << 30]).all_peers();
    config.devices[0].name = "Radeon".to_owned();
    config.devices[0].pci_bus_id = "0001:C1:02.0".to_owned();
    config.devices[0].integrated = true;
    config.devices[0].compute = (11, 3);
    let standin = session(&config);
    let hip = Hip::find(&standin);
    let mut text = [1_u8; 32];
    assert_eq!(hip.hipDeviceGetName(text.as_mut_ptr().cast(), 32, 0), 0);
    assert_eq!(&text[..7], b"Radeon\0");
    assert_eq!(hip.hipDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, 0), 0);
    assert_eq!(&text[..13], b"0001:c1:02.0\0");
    assert_eq!(hip.hipDeviceGetPCIBusId(text.as_mut_ptr().cast(), 12, 0), INVALID_VALUE);
    assert_eq!(made([0; 16], |uuid| hip.hipDeviceGetUuid(uuid, 1))[15], b'1');
    assert_eq!(made(0, |bytes| hip.hipDeviceTotalMem(bytes, 1)), 16 << 30);
    assert_eq!([2, 16, 23, 61, 67, 68, 69, 87].map(|which| hip.attribute(which)), [2, 1, 11, 3, 0xC1, 2, 1, 64]);
    assert_eq!(made(-1, |can| hip.hipDeviceCanAccessPeer(can, 0, 1)), 1);
    assert_eq!(made(-1, |can| hip.hipDeviceCanAccessPeer(can, 0, 0)), 0);
    assert_eq!(made(-1, |can| hip.hipDriverGetVersion(can)), 60_443_484);
    assert_eq!(made(-1, |can| hip.hipRuntimeGetVersion(can)), 60_443_484);
    let mut greatest = 0;
    assert_eq!(made(0, |least| hip.hipDeviceGetStreamPriorityRange(least, &mut greatest)), 1);
    assert_eq!(greatest, -1);
    standin.report().assert_clean();
}

#[test]
fn results_have_hips_names_and_an_unknown_one_has_a_name_too() {
    let standin = session(&Config::default());
    let hip = Hip::find(&standin);
    let told = |call: &dyn Fn(*mut *const c_char) -> c_int| {
        let mut text = std::ptr::null();
        let result = call(&mut text);
        // SAFETY: the stand-in's texts are constants with a zero at the end.
        (result, unsafe { CStr::from_ptr(text) })
    };
    assert_eq!(told(&|at| hip.hipDrvGetErrorName(709, at)), (0, c"hipErrorContextIsDestroyed"));
    assert_eq!(told(&|at| hip.hipDrvGetErrorString(100, at)), (0, c"no ROCm-capable device is detected"));
    assert_eq!(told(&|at| hip.hipDrvGetErrorName(12_345, at)), (INVALID_VALUE, c"hipErrorUnknown"));
}

#[test]
fn without_a_device_every_call_says_so() {
    let standin = session(&Config { devices: Vec::new(), ..Config::default() });
    let hip = Hip::find(&standin);
    let mut count = -1;
    assert_eq!((hip.hipGetDeviceCount(&mut count), count), (NO_DEVICE, 0));
    assert_eq!(
        (hip.hipInit(0), hip.hipSetDevice(0), hip.hipCtxSetCurrent(null_mut())),
        (NO_DEVICE, NO_DEVICE, NO_DEVICE)
    );
    assert_eq!(made(0, |version| hip.hipDriverGetVersion(version)), 60_443_484);
    standin.report().assert_clean();
}

#[test]
fn each_thread_has_the_first_device_current_and_no_context_takes_one_back() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]));
    let hip = Hip::find(&standin);
    assert_eq!(hip.device(), 0);
    let second = made(null_mut(), |context| hip.hipDevicePrimaryCtxRetain(context, 1));
    assert_eq!(hip.hipCtxSetCurrent(second), 0);
    assert_eq!(hip.hipCtxSetCurrent(null_mut()), 0);
    assert_eq!((hip.device(), made(null_mut(), |context| hip.hipCtxGetCurrent(context))), (1, second));
    let there = std::thread::scope(|scope| scope.spawn(|| hip.device()).join().unwrap());
    assert_eq!((there, hip.hipSetDevice(2), hip.hipSetDevice(0), hip.device()), (0, INVALID_DEVICE, 0, 0));
    // Nothing was retained here, and all of it works; who releases a context destroys nothing that is in it.
    let device = hip.alloc(4096);
    let mut active = 0;
    let _ = made(0, |flags| hip.hipDevicePrimaryCtxGetState(1, flags, &mut active));
    assert_eq!((active, hip.hipDevicePrimaryCtxRelease(1), hip.hipDevicePrimaryCtxRelease(0)), (1, 0, 0));
    assert_eq!(hip.hipFree(device), 0);
    standin.report().assert_clean();
}

#[test]
fn a_stream_says_which_device_it_is_and_an_address_too() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]));
    let hip = Hip::find(&standin);
    assert_eq!(hip.hipSetDevice(1), 0);
    let (stream, device, source) = (hip.stream(), hip.alloc(LEN), hip.pin(&pattern(LEN, 1)));
    let event = made(null_mut(), |event| hip.hipEventCreateWithFlags(event, NO_TIMING));
    assert_eq!(hip.hipSetDevice(0), 0);
    assert_eq!(hip.hipMemcpyHtoDAsync(device, source, LEN, stream), 0);
    assert_eq!(hip.hipEventRecord(event, stream), 0);
    let other = hip.stream();
    assert_eq!((hip.hipStreamWaitEvent(other, event, 0), hip.hipStreamSynchronize(other)), (0, 0));
    assert_eq!((hip.hipFree(device), hip.hipHostFree(source), hip.hipEventDestroy(event)), (0, 0, 0));
    assert_eq!((hip.hipStreamDestroy(stream), hip.hipStreamDestroy(other)), (0, 0));
    standin.report().assert_clean();
}

#[test]
fn an_event_of_another_device_is_not_recorded_and_a_stream_that_is_gone_is_known_by_its_result() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]));
    let hip = Hip::find(&standin);
    let event = made(null_mut(), |event| hip.hipEventCreateWithFlags(event, NO_TIMING));
    assert_eq!(hip.hipSetDevice(1), 0);
    let stream = hip.stream();
    assert_eq!(hip.hipEventRecord(event, stream), INVALID_HANDLE);
    assert_only(&standin, Rule::WrongContext, "hipEventRecord");
    standin.reset();
    assert_eq!(hip.hipStreamSynchronize(stream), CONTEXT_IS_DESTROYED);
    assert_only(&standin, Rule::UnknownHandle, "hipStreamSynchronize");
}

#[test]
fn no_bytes_are_nowhere_and_freeing_that_is_no_error() {
    let standin = session(&Config::default());
    let hip = Hip::find(&standin);
    assert!(hip.alloc(0).is_null());
    assert!(made(null_mut(), |at| hip.hipHostMalloc(at, 0, 0)).is_null());
    assert_eq!((hip.hipFree(null_mut()), hip.hipHostFree(null_mut())), (0, 0));
    standin.report().assert_clean();
}

/// Peers are named by their numbers.
#[test]
fn a_peer_is_reached_once_its_device_was_enabled_by_number() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]).all_peers());
    let hip = Hip::find(&standin);
    let bytes = pattern(LEN, 7);
    let (stream, near, source, target) = (hip.stream(), hip.alloc(LEN), hip.pin(&bytes), hip.pin(&vec![0; LEN]));
    assert_eq!(hip.hipSetDevice(1), 0);
    let far = hip.alloc(LEN);
    assert_eq!(hip.hipMemcpyHtoD(far, source, LEN), 0);
    assert_eq!((hip.hipSetDevice(0), hip.hipDeviceEnablePeerAccess(1, 0)), (0, 0));
    assert_eq!(hip.hipDeviceEnablePeerAccess(1, 0), PEER_ACCESS_ALREADY_ENABLED);
    assert_eq!(hip.hipMemcpyPeerAsync(near, 0, far, 1, LEN, stream), 0);
    assert_eq!(hip.hipMemcpyDtoHAsync(target, near, LEN, stream), 0);
    assert_eq!(hip.hipStreamSynchronize(stream), 0);
    assert!(bytes_at(target, LEN) == bytes);
    let freed = [near, far].map(|at| hip.hipFree(at)).into_iter().chain([source, target].map(|at| hip.hipHostFree(at)));
    assert!(freed.chain([hip.hipStreamDestroy(stream)]).all(|result| result == 0));
    standin.report().assert_clean();
}

#[test]
fn a_peer_that_was_enabled_by_its_context_was_not_enabled() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]).all_peers());
    let hip = Hip::find(&standin);
    let (stream, near) = (hip.stream(), hip.alloc(LEN));
    let peer = made(null_mut(), |context| hip.hipDevicePrimaryCtxRetain(context, 1));
    assert_eq!((hip.hipCtxEnablePeerAccess(peer, 0), hip.hipSetDevice(1)), (0, 0));
    let far = hip.alloc(LEN);
    assert_ne!(hip.hipMemcpyPeerAsync(near, 0, far, 1, LEN, stream), 0);
    assert_only(&standin, Rule::NoPeerAccess, "hipMemcpyPeerAsync");
}

#[test]
fn a_peer_by_a_wrong_number_or_one_there_is_no_way_to() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]));
    let hip = Hip::find(&standin);
    assert_eq!([hip.hipDeviceEnablePeerAccess(1, 0), hip.hipDeviceEnablePeerAccess(2, 0)], [INVALID_DEVICE; 2]);
    let (stream, one, two) = (hip.stream(), hip.alloc(LEN), hip.alloc(LEN));
    assert_eq!(hip.hipMemcpyPeerAsync(one, 0, two, 2, LEN, stream), INVALID_DEVICE);
    standin.report().assert_lawful();
    assert_eq!(hip.hipMemcpyPeerAsync(one, 0, two, 1, LEN, stream), INVALID_VALUE);
    assert_only(&standin, Rule::WrongContext, "hipMemcpyPeerAsync");
}

#[test]
fn pools_are_there_and_must_not_be_used() {
    let standin = session(&Config::default());
    let hip = Hip::find(&standin);
    let mut at = null_mut();
    assert_ne!(hip.hipMallocAsync(&mut at, LEN, null_mut()), 0);
    assert_only(&standin, Rule::HarmfulCall, "hipMallocAsync");
    assert_ne!(hip.hipFreeAsync(at, null_mut()), 0);
    assert_only(&standin, Rule::HarmfulCall, "hipFreeAsync");
}

#[test]
fn a_skipped_wait() {
    let standin = session(&late());
    let hip = Hip::find(&standin);
    let (copies, computes) = (hip.stream(), hip.stream());
    let (source, one, two) = (hip.pin(&pattern(LEN, 1)), hip.alloc(LEN), hip.alloc(LEN));
    assert_eq!(hip.hipMemcpyHtoDAsync(one, source, LEN, copies), 0);
    let _landed = hip.record(copies);
    assert_eq!(hip.hipMemcpyDtoDAsync(two, one, LEN, computes), 0);
    assert_only(&standin, Rule::Unordered, "hipMemcpyDtoDAsync");
}

#[test]
fn memory_freed_and_pinned_memory_refilled_too_early() {
    let standin = session(&late());
    let hip = Hip::find(&standin);
    let (stream, device, source) = (hip.stream(), hip.alloc(LEN), hip.pin(&pattern(LEN, 1)));
    assert_eq!(hip.hipMemcpyHtoDAsync(device, source, LEN, stream), 0);
    // SAFETY: pinned above, and as long.
    unsafe { source.cast::<u8>().add(LEN / 2).write(0) };
    assert_eq!(hip.hipStreamSynchronize(stream), 0);
    assert_only(&standin, Rule::SourceChanged, "hipMemcpyHtoDAsync");
    standin.configure(&late());
    let (stream, device, source) = (hip.stream(), hip.alloc(LEN), hip.pin(&pattern(LEN, 1)));
    assert_eq!(hip.hipMemcpyHtoDAsync(device, source, LEN, stream), 0);
    // The runtime waits here, for all streams of a device. What relies on that waits for everybody else's work, too.
    assert_eq!(hip.hipFree(device), 0);
    assert_only(&standin, Rule::FreeInUse, "hipFree");
}

#[test]
fn memory_of_another_device_than_the_streams_and_a_copy_past_the_end() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]).memory(MemoryMode::Reuse));
    let hip = Hip::find(&standin);
    let (stream, source) = (hip.stream(), hip.pin(&pattern(LEN, 1)));
    assert_eq!(hip.hipSetDevice(1), 0);
    let device = hip.alloc(LEN);
    assert_eq!(hip.hipMemcpyHtoDAsync(device, source, LEN, stream), INVALID_VALUE);
    assert_only(&standin, Rule::WrongContext, "hipMemcpyHtoDAsync");
    standin.reset();
    let (device, source) = (hip.alloc(LEN), hip.pin(&pattern(LEN, 1)));
    assert_eq!(hip.hipMemcpyHtoD(offset(device, 1), source, LEN), INVALID_VALUE);
    assert_only(&standin, Rule::OutOfBounds, "hipMemcpyHtoD");
}

#[test]
fn faults_give_hips_results() {
    let standin = session(&late());
    let hip = Hip::find(&standin);
    let plan = [
        Fault::nth("hipMalloc", 2, Effect::OutOfMemory),
        Fault::nth("hipStreamQuery", 1, Effect::Fail(1055)),
        Fault::pin(1),
        Fault::nth("hipMemcpyHtoDAsync", 1, Effect::LateSticky(LAUNCH_FAILURE as u32)),
    ];
    standin.fault(&FaultPlan { faults: plan.to_vec(), ..FaultPlan::default() });
    let (stream, device, mut none) = (hip.stream(), hip.alloc(LEN), null_mut());
    assert_eq!(hip.hipMalloc(&mut none, LEN), OUT_OF_MEMORY);
    assert_eq!(hip.hipStreamQuery(stream), 1055);
    assert_eq!(hip.hipHostMalloc(&mut none, LEN, 0), OUT_OF_MEMORY);
    let source = hip.pin(&pattern(LEN, 1));
    assert_eq!(hip.hipMemcpyHtoDAsync(device, source, LEN, stream), 0);
    let event = hip.record(stream);
    assert_eq!(hip.hipStreamSynchronize(stream), LAUNCH_FAILURE);
    assert_eq!((hip.hipEventQuery(event), hip.hipFree(device)), (LAUNCH_FAILURE, LAUNCH_FAILURE));
    assert_eq!((hip.hipSetDevice(1), hip.hipFree(hip.alloc(LEN))), (0, 0));
    standin.report().assert_clean();
}

/// CUDA's driver does not call it.
#[test]
fn a_function_of_the_program_is_called_though_its_stream_has_failed() {
    static CALLED: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn tell(_: Handle) {
        CALLED.store(true, Ordering::Release);
    }
    let standin = session(&late());
    let hip = Hip::find(&standin);
    let (stream, device, source) = (hip.stream(), hip.alloc(LEN), hip.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("hipMemcpyHtoDAsync", 1, Effect::Torn(LAUNCH_FAILURE as u32))));
    assert_eq!(hip.hipMemcpyHtoDAsync(device, source, LEN, stream), 0);
    assert_eq!(hip.hipLaunchHostFunc(stream, tell, null_mut()), 0);
    assert_eq!(hip.hipStreamSynchronize(stream), LAUNCH_FAILURE);
    settled(&standin).assert_clean();
    assert!(CALLED.load(Ordering::Acquire));
}

#[test]
fn a_capture_forbids_what_it_forbids_with_cuda() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let hip = Hip::find(&standin);
    let (captured, stream) = (hip.stream(), hip.stream());
    let capturing = |stream| made(-1, |status| hip.hipStreamIsCapturing(stream, status));
    assert_eq!((hip.hipStreamBeginCapture(captured, 0), capturing(captured), capturing(stream)), (0, 1, 0));
    assert_eq!(made(2, |mode| hip.hipThreadExchangeStreamCaptureMode(mode)), 0);
    let device = hip.alloc(LEN);
    assert_eq!(made(0, |mode| hip.hipThreadExchangeStreamCaptureMode(mode)), 2);
    let graph = made(null_mut(), |graph| hip.hipStreamEndCapture(captured, graph));
    assert_eq!((hip.hipGraphDestroy(graph), hip.hipStreamBeginCapture(captured, 0)), (0, 0));
    assert_eq!((hip.hipFree(device), capturing(captured)), (CAPTURE_UNSUPPORTED, 2));
    standin.report().assert_lawful();
}

#[test]
fn only_a_text_is_taken_as_a_module_and_its_kernels_run() {
    const STORE: &CStr = c"
        .version 6.0
        .target sm_70
        .address_size 64
        .visible .entry store(.param .u64 to, .param .u32 value)
        {
            .reg .b32 %r<2>;
            .reg .b64 %rd<2>;
            ld.param.u64 %rd1, [to];
            ld.param.u32 %r1, [value];
            st.global.u32 [%rd1], %r1;
            ret;
        }";
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let hip = Hip::find(&standin);
    let mut module = null_mut();
    for image in [c"\x7fELF\x02\x01\x01", c"__CLANG_OFFLOAD_BUNDLE__", c""] {
        assert_eq!(hip.hipModuleLoadData(&mut module, image.as_ptr().cast()), INVALID_IMAGE);
    }
    assert_eq!(hip.hipModuleLoadData(&mut module, STORE.as_ptr().cast()), 0);
    let store = made(null_mut(), |function| hip.hipModuleGetFunction(function, module, c"store".as_ptr()));
    let (stream, device, mut back) = (hip.stream(), hip.alloc(4), [0_u8; 4]);
    let (mut to, mut value) = (device, 77_u32);
    let mut params: [Handle; 2] = [(&raw mut to).cast(), (&raw mut value).cast()];
    let launched = hip.hipModuleLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, stream, params.as_mut_ptr(), null_mut());
    assert_eq!((launched, hip.hipStreamSynchronize(stream)), (0, 0));
    assert_eq!(hip.hipMemcpyDtoH(back.as_mut_ptr().cast(), device, 4), 0);
    assert_eq!(u32::from_le_bytes(back), 77);
    assert_eq!((hip.hipModuleUnload(module), hip.hipFree(device), hip.hipStreamDestroy(stream)), (0, 0, 0));
    standin.report().assert_clean();
}

/// It takes everything of everybody in the process, who break no rule by what they do next.
#[test]
fn a_reset_takes_what_others_have() {
    let standin: &Driver = &session(&Config::with_devices(&[64 * MIB]));
    let hip = Hip::find(standin);
    let (stream, device, source) = (hip.stream(), hip.alloc(LEN), hip.pin(&pattern(LEN, 1)));
    assert_eq!(hip.hipDeviceReset(), 0);
    assert_eq!(hip.hipStreamQuery(stream), CONTEXT_IS_DESTROYED);
    assert_eq!((hip.hipFree(device), hip.hipHostFree(source)), (INVALID_VALUE, INVALID_VALUE));
    assert_eq!(hip.hipFree(hip.alloc(LEN)), 0);
    standin.report().assert_clean();
}
