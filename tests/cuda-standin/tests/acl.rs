//! Ascend's calls over the same world: a program that keeps the rules, and each rule that is ACL's own.

mod common;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::kernel::assert_only;
use common::loaded::{loaded, made};
use common::{MIB, pattern};
use cuda_standin::{Config, Driver, Effect, Fault, FaultPlan, Rule, Session, session};

type Handle = *mut c_void;

const LEN: usize = MIB as usize;
const HBM: c_int = 1;
const TO_DEVICE: c_int = 1;
const TO_HOST: c_int = 2;
const ON_DEVICE: c_int = 3;
const BY_ADDRESS: c_int = 4;
const SYNC: c_uint = 1;
const PROGRESS: c_uint = 2;
const STOP_ON_FAILURE: u64 = 1;
const REGISTER_PINNED: c_uint = 0x1000_0000;

const INVALID_PARAM: c_int = 100_000;
const REPEAT_INITIALIZE: c_int = 100_002;
const PARAM: c_int = 107_000;
const INVALID_DEVICE: c_int = 107_001;
const NO_CONTEXT: c_int = 107_002;
const STREAM_CONTEXT: c_int = 107_003;
const UNALIGNED: c_int = 107_008;
const NOT_SUPPORTED: c_int = 207_000;
const OUT_OF_MEMORY: c_int = 207_001;
const NO_EVENT: c_int = 207_007;
const NO_STREAM: c_int = 207_008;
const LOST_HEARTBEAT: c_int = 507_010;
const COPY_FAILED: c_int = 507_013;
const STREAM_TIMEOUT: c_int = 507_046;
const EVENT_TIMEOUT: c_int = 507_047;

loaded!(Acl {
    fn aclInit(config: *const c_char);
    fn aclFinalizeReference(left: *mut u64);
    fn aclrtGetVersion(major: *mut c_int, minor: *mut c_int, patch: *mut c_int);
    fn aclrtGetDeviceCount(count: *mut c_uint);
    fn aclrtGetDeviceInfo(device: c_uint, attribute: c_uint, value: *mut i64);
    fn aclrtDeviceGetUuid(device: c_int, uuid: *mut [u8; 16]);
    fn aclrtDeviceGetPCIBusId(device: c_int, id: *mut c_char, len: c_int);
    fn aclrtDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn aclrtDeviceEnablePeerAccess(peer: c_int, flags: c_uint);
    fn aclrtDevicePeerAccessStatus(device: c_int, peer: c_int, status: *mut c_int);
    fn aclrtDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    fn aclrtSetDevice(device: c_int);
    fn aclrtResetDevice(device: c_int);
    fn aclrtGetDevice(device: *mut c_int);
    fn aclrtGetCurrentContext(context: *mut Handle);
    fn aclrtSetCurrentContext(context: Handle);
    fn aclrtCreateContext(context: *mut Handle, device: c_int);
    fn aclrtDestroyContext(context: Handle);
    fn aclrtGetMemInfo(kind: c_int, free: *mut usize, total: *mut usize);
    fn aclrtMalloc(at: *mut Handle, bytes: usize, policy: c_uint);
    fn aclrtFree(at: Handle);
    fn aclrtMallocHost(at: *mut Handle, bytes: usize);
    fn aclrtFreeHost(at: Handle);
    fn aclrtHostRegister(at: Handle, bytes: u64, kind: c_int, device: *mut Handle);
    fn aclrtHostRegisterV2(at: Handle, bytes: u64, flags: c_uint);
    fn aclrtHostUnregister(at: Handle);
    fn aclrtMemcpy(dst: Handle, room: usize, src: Handle, bytes: usize, kind: c_int);
    fn aclrtMemcpyAsync(dst: Handle, room: usize, src: Handle, bytes: usize, kind: c_int, stream: Handle);
    fn aclrtCreateStreamWithConfig(stream: *mut Handle, priority: c_uint, flags: c_uint);
    fn aclrtDestroyStream(stream: Handle);
    fn aclrtDestroyStreamForce(stream: Handle);
    fn aclrtSetStreamFailureMode(stream: Handle, mode: u64);
    fn aclrtStreamQuery(stream: Handle, status: *mut c_int);
    fn aclrtSynchronizeStream(stream: Handle);
    fn aclrtSynchronizeStreamWithTimeout(stream: Handle, millis: c_int);
    fn aclrtStreamWaitEvent(stream: Handle, event: Handle);
    fn aclrtLaunchHostFunc(stream: Handle, function: unsafe extern "C" fn(Handle), argument: Handle);
    fn aclrtCreateEventExWithFlag(event: *mut Handle, flags: c_uint);
    fn aclrtDestroyEvent(event: Handle);
    fn aclrtRecordEvent(event: Handle, stream: Handle);
    fn aclrtQueryEventStatus(event: Handle, status: *mut c_int);
    fn aclrtSynchronizeEvent(event: Handle);
    fn aclrtSynchronizeEventWithTimeout(event: Handle, millis: c_int);
    fn aclmdlRICaptureGetInfo(stream: Handle, status: *mut c_int, graph: *mut Handle);
    fn aclmdlRICaptureThreadExchangeMode(mode: *mut c_int);
});

/// A machine, initialised, with a device current in this thread.
fn open(config: &Config) -> (Session, Acl) {
    let standin = session(config);
    let acl = initialised(&standin);
    assert_eq!(acl.aclrtSetDevice(0), 0);
    (standin, acl)
}

/// The process may have been initialised by another test.
fn initialised(standin: &Driver) -> Acl {
    let acl = Acl::find(standin);
    assert!([0, REPEAT_INITIALIZE].contains(&acl.aclInit(std::ptr::null())));
    acl
}

/// Late enough that no work starts before the host waits for it.
fn late() -> Config {
    Config::with_devices(&[64 * MIB, 32 * MIB]).late_micros(10_000_000)
}

impl Acl {
    fn alloc(&self, len: usize) -> Handle {
        made(null_mut(), |at| self.aclrtMalloc(at, len, 0))
    }

    /// Pinned memory with these bytes in it.
    fn pin(&self, bytes: &[u8]) -> Handle {
        let at = made(null_mut(), |at| self.aclrtMallocHost(at, bytes.len()));
        // SAFETY: the memory is as long as the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.cast::<u8>(), bytes.len()) };
        at
    }

    fn stream(&self) -> Handle {
        made(null_mut(), |stream| self.aclrtCreateStreamWithConfig(stream, 0, 3))
    }

    fn event(&self) -> Handle {
        made(null_mut(), |event| self.aclrtCreateEventExWithFlag(event, SYNC | PROGRESS))
    }

    /// A new event, recorded.
    fn record(&self, stream: Handle) -> Handle {
        let event = self.event();
        assert_eq!(self.aclrtRecordEvent(event, stream), 0);
        event
    }

    fn upload(&self, dst: Handle, src: Handle, len: usize, stream: Handle) -> c_int {
        self.aclrtMemcpyAsync(dst, len, src, len, TO_DEVICE, stream)
    }

    fn download(&self, dst: Handle, src: Handle, len: usize, stream: Handle) -> c_int {
        self.aclrtMemcpyAsync(dst, len, src, len, TO_HOST, stream)
    }

    fn is_recorded(&self, event: Handle) -> bool {
        made(-1, |status| self.aclrtQueryEventStatus(event, status)) == 1
    }

    fn is_idle(&self, stream: Handle) -> bool {
        made(-1, |status| self.aclrtStreamQuery(stream, status)) == 0
    }

    fn context(&self) -> Handle {
        made(null_mut(), |context| self.aclrtGetCurrentContext(context))
    }
}

fn bytes_at(at: Handle, len: usize) -> Vec<u8> {
    // SAFETY: the callers give pinned memory of this length that nothing writes to any more.
    unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec()
}

/// Whole pages of the program's own.
#[repr(C, align(4096))]
struct Pages([u8; 8192]);

#[test]
fn a_lawful_life() {
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]).late_micros(200));
    assert_eq!(made(0, |count| acl.aclrtGetDeviceCount(count)), 1);
    let bytes = pattern(3 * LEN + 17, 1);
    let (stream, device) = (acl.stream(), acl.alloc(bytes.len()));
    let mut total = 0;
    assert_eq!(made(0, |free| acl.aclrtGetMemInfo(HBM, free, &mut total)), 61 * LEN - 512);
    assert_eq!(total, 64 * LEN);
    let (source, target) = (acl.pin(&bytes), acl.pin(&vec![0; bytes.len()]));
    assert_eq!(acl.upload(device, source, bytes.len(), stream), 0);
    let landed = acl.record(stream);
    assert!(!acl.is_recorded(landed) && !acl.is_idle(stream));
    assert_eq!(acl.aclrtMemcpyAsync(target, LEN * 4, device, bytes.len(), BY_ADDRESS, stream), 0);
    assert_eq!((acl.aclrtSynchronizeEvent(landed), acl.aclrtSynchronizeStream(stream)), (0, 0));
    assert!(acl.is_recorded(landed) && acl.is_idle(stream));
    assert!(bytes_at(target, bytes.len()) == bytes);
    assert_eq!((acl.aclrtFree(device), acl.aclrtFreeHost(source), acl.aclrtFreeHost(target)), (0, 0, 0));
    assert_eq!((acl.aclrtDestroyEvent(landed), acl.aclrtDestroyStream(stream), acl.aclrtResetDevice(0)), (0, 0, 0));
    let report = standin.report();
    report.assert_clean();
    assert_eq!((report.calls_of("aclrtMalloc"), report.live_contexts), (1, 0));
}

#[test]
fn a_device_is_what_the_configuration_says_before_any_is_current() {
    let mut config = Config::with_devices(&[24 << 30, 16 << 30]).all_peers();
    config.devices[0].name = "Ascend910B3".to_owned();
    let standin = session(&config);
    let acl = initialised(&standin);
    assert_eq!(made(0, |value| acl.aclrtGetDeviceInfo(1, 301, value)), 16 << 30);
    assert_eq!(made([0; 16], |uuid| acl.aclrtDeviceGetUuid(1, uuid))[15], b'1');
    let mut id = [1_u8; 16];
    assert_eq!(acl.aclrtDeviceGetPCIBusId(1, id.as_mut_ptr().cast(), 16), 0);
    assert_eq!(&id[..13], b"0000:02:00.0\0");
    let mut greatest = -1;
    assert_eq!(made(-1, |least| acl.aclrtDeviceGetStreamPriorityRange(least, &mut greatest)), 7);
    let (mut minor, mut patch) = (0, 0);
    assert_eq!(made(0, |major| acl.aclrtGetVersion(major, &mut minor, &mut patch)), 1);
    assert_eq!((greatest, minor, patch), (0, 17, 0));
    assert_eq!(made(-1, |can| acl.aclrtDeviceCanAccessPeer(can, 0, 1)), 1);
    assert_eq!(acl.aclrtDeviceCanAccessPeer(&mut 0, 0, 0), INVALID_PARAM);
    // SAFETY: the call has this type, and its text ends with a zero.
    let name = unsafe {
        let call: extern "C" fn() -> *const c_char = std::mem::transmute(standin.call("aclrtGetSocName").unwrap());
        CStr::from_ptr(call())
    };
    assert_eq!(name, c"Ascend910B3");
    standin.report().assert_clean();
}

#[test]
fn the_library_is_initialised_once_and_given_up_by_count() {
    let standin = session(&Config::default());
    let acl = initialised(&standin);
    assert_eq!(acl.aclInit(std::ptr::null()), REPEAT_INITIALIZE);
    assert!(made(0, |left| acl.aclFinalizeReference(left)) > 0);
    assert_eq!(acl.aclrtSetDevice(0), 0);
    standin.report().assert_lawful();
}

#[test]
fn a_thread_forgets_a_message_once_it_was_told() {
    let (standin, acl) = open(&Config::default());
    // SAFETY: the call has this type.
    let told: extern "C" fn() -> *const c_char =
        unsafe { std::mem::transmute(standin.call("aclGetRecentErrMsg").unwrap()) };
    assert_eq!(acl.aclrtSetDevice(7), INVALID_DEVICE);
    // SAFETY: a text with its closing zero, good until the next call.
    assert_eq!(unsafe { CStr::from_ptr(told()) }, c"aclrtSetDevice failed with 107001");
    assert!(told().is_null());
}

#[test]
fn nothing_is_current_at_first_and_nothing_can_be_made_current() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let acl = initialised(&standin);
    let (mut device, mut context, mut at) = (0, null_mut(), null_mut());
    assert_eq!((acl.aclrtGetDevice(&mut device), acl.aclrtGetCurrentContext(&mut context)), (NO_CONTEXT, NO_CONTEXT));
    assert_eq!(acl.aclrtSetCurrentContext(null_mut()), INVALID_PARAM);
    standin.report().assert_clean();
    assert_eq!(acl.aclrtMalloc(&mut at, LEN, 0), NO_CONTEXT);
    assert_only(&standin, Rule::NoContext, "aclrtMalloc");
}

#[test]
fn a_default_context_lives_until_the_last_who_set_its_device_resets_it() {
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]));
    let context = acl.context();
    let same = std::thread::scope(|scope| {
        let other = || (acl.aclrtSetDevice(0), acl.context() as usize);
        scope.spawn(other).join().unwrap() == (0, context as usize)
    });
    let stream = acl.stream();
    assert_eq!((same, acl.aclrtResetDevice(0), acl.context()), (true, 0, context));
    standin.report().assert_lawful();
    assert_eq!(acl.aclrtResetDevice(0), 0);
    assert_only(&standin, Rule::Leak, "aclrtResetDevice");
    assert_eq!(acl.aclrtGetCurrentContext(&mut null_mut()), NO_CONTEXT);
    assert_ne!(acl.aclrtSynchronizeStream(stream), 0);
}

#[test]
fn no_bytes_and_no_address_are_errors() {
    let (standin, acl) = open(&Config::default());
    let mut at = null_mut();
    assert_eq!((acl.aclrtMalloc(&mut at, 0, 0), acl.aclrtMallocHost(&mut at, 0)), (INVALID_PARAM, INVALID_PARAM));
    assert_eq!((acl.aclrtFree(null_mut()), acl.aclrtFreeHost(null_mut())), (INVALID_PARAM, INVALID_PARAM));
    standin.report().assert_clean();
}

#[test]
fn a_copy_says_how_much_room_there_is_and_has_to_be_of_a_kind_that_a_stream_knows() {
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]));
    let (stream, device, source) = (acl.stream(), acl.alloc(LEN), acl.pin(&pattern(LEN, 1)));
    assert_eq!(acl.aclrtMemcpyAsync(device, LEN - 1, source, LEN, TO_DEVICE, stream), PARAM);
    assert_eq!(acl.aclrtMemcpyAsync(source, LEN, source, LEN, 0, stream), NOT_SUPPORTED);
    assert_eq!(acl.aclrtMemcpyAsync(null_mut(), 0, null_mut(), 0, TO_DEVICE, stream), 0);
    assert!(acl.is_idle(stream));
    standin.report().assert_lawful();
}

#[test]
fn a_copy_of_memory_that_is_not_pinned_is_over_with_its_call() {
    let (standin, acl) = open(&late());
    let (stream, device, source) = (acl.stream(), acl.alloc(LEN), acl.pin(&pattern(LEN, 1)));
    let mut pageable = pattern(LEN, 2);
    assert_eq!(acl.upload(device, source, LEN, stream), 0);
    let before = acl.record(stream);
    assert_eq!(acl.upload(device, pageable.as_mut_ptr().cast(), LEN, stream), 0);
    assert!(acl.is_recorded(before) && acl.is_idle(stream));
    pageable.fill(0);
    assert_eq!(acl.download(pageable.as_mut_ptr().cast(), device, LEN, stream), 0);
    assert!(pageable == pattern(LEN, 2));
    standin.report().assert_lawful();
}

#[test]
fn only_what_was_registered_as_pinned_is_pinned() {
    let (standin, acl) = open(&late());
    let (stream, device) = (acl.stream(), acl.alloc(8192));
    let mut pages = Box::new(Pages([7; 8192]));
    let at: Handle = pages.0.as_mut_ptr().cast();
    assert_eq!(acl.aclrtHostRegisterV2(at.wrapping_byte_add(64), 4096, REGISTER_PINNED), UNALIGNED);
    assert_eq!(acl.aclrtHostRegister(at, 8192, 0, &mut null_mut()), 0);
    assert_eq!(acl.upload(device, at, 8192, stream), 0);
    assert!(acl.is_idle(stream));
    assert_eq!((acl.aclrtHostUnregister(at), acl.aclrtHostRegisterV2(at, 8192, REGISTER_PINNED)), (0, 0));
    assert_eq!(acl.upload(device, at, 8192, stream), 0);
    assert!(!acl.is_idle(stream));
    assert_eq!((acl.aclrtSynchronizeStream(stream), acl.aclrtHostUnregister(at)), (0, 0));
    standin.report().assert_lawful();
    standin.configure(&Config { registers: false, ..late() });
    assert_eq!((acl.aclrtSetDevice(0), acl.aclrtHostRegisterV2(at, 8192, REGISTER_PINNED)), (0, NOT_SUPPORTED));
}

#[test]
fn memory_is_freed_at_once_whoever_uses_it() {
    let (standin, acl) = open(&late());
    let (stream, device, source) = (acl.stream(), acl.alloc(LEN), acl.pin(&pattern(LEN, 1)));
    assert_eq!(acl.upload(device, source, LEN, stream), 0);
    let event = acl.event();
    assert_eq!((acl.aclrtRecordEvent(event, stream), acl.aclrtFree(device)), (0, 0));
    let mut status = -1;
    assert_eq!((acl.aclrtQueryEventStatus(event, &mut status), status), (0, 0));
    assert_only(&standin, Rule::FreeInUse, "aclrtFree");
}

#[test]
fn a_skipped_wait() {
    let (standin, acl) = open(&late());
    let (copies, computes) = (acl.stream(), acl.stream());
    let (source, one, two) = (acl.pin(&pattern(LEN, 1)), acl.alloc(LEN), acl.alloc(LEN));
    assert_eq!(acl.upload(one, source, LEN, copies), 0);
    let _landed = acl.record(copies);
    assert_eq!(acl.aclrtMemcpyAsync(two, LEN, one, LEN, ON_DEVICE, computes), 0);
    assert_only(&standin, Rule::Unordered, "aclrtMemcpyAsync");
}

#[test]
fn an_event_that_is_not_for_synchronisation_is_not_waited_for_and_one_never_recorded_is_complete() {
    let (standin, acl) = open(&late());
    let (one, two) = (acl.stream(), acl.stream());
    assert_eq!(acl.aclrtCreateEventExWithFlag(&mut null_mut(), 0), PARAM);
    let event = made(null_mut(), |event| acl.aclrtCreateEventExWithFlag(event, PROGRESS));
    assert!(acl.is_recorded(event));
    assert_eq!((acl.aclrtRecordEvent(event, one), acl.aclrtStreamWaitEvent(two, event)), (0, NOT_SUPPORTED));
    let event = acl.record(one);
    assert_eq!(acl.aclrtStreamWaitEvent(two, event), 0);
    standin.report().assert_lawful();
}

#[test]
fn streams_run_out_and_events_do_when_they_are_recorded() {
    let mut config = Config::with_devices(&[64 * MIB]);
    (config.devices[0].streams_limit, config.devices[0].events_limit) = (Some(2), Some(2));
    let (standin, acl) = open(&config);
    let (stream, last) = (acl.stream(), acl.stream());
    assert_eq!(acl.aclrtCreateStreamWithConfig(&mut null_mut(), 0, 0), NO_STREAM);
    let (first, second, third) = (acl.record(stream), acl.record(stream), acl.event());
    assert_eq!((acl.aclrtRecordEvent(third, stream), acl.aclrtRecordEvent(second, stream)), (NO_EVENT, 0));
    assert_eq!((acl.aclrtDestroyEvent(first), acl.aclrtRecordEvent(third, stream)), (0, 0));
    assert_eq!((acl.aclrtDestroyEvent(second), acl.aclrtDestroyEvent(third)), (0, 0));
    assert_eq!((acl.aclrtDestroyStream(stream), acl.aclrtDestroyStream(last)), (0, 0));
    standin.report().assert_clean();
}

/// Two streams that other streams' copies and events come after: the first copy delivers half of its bytes.
fn failing_copy(acl: &Acl, standin: &Driver, stream: Handle) -> (Handle, Handle, Handle) {
    standin.fault(&FaultPlan::one(Fault::nth("aclrtMemcpyAsync", 1, Effect::Torn(COPY_FAILED as u32))));
    let (device, source, target) = (acl.alloc(LEN), acl.pin(&pattern(LEN, 1)), acl.pin(&vec![0; LEN]));
    assert_eq!(acl.upload(device, source, LEN, stream), 0);
    (device, target, acl.record(stream))
}

#[test]
fn by_default_nobody_is_told_of_a_copy_that_failed() {
    let (standin, acl) = open(&late());
    let stream = acl.stream();
    let (device, target, event) = failing_copy(&acl, &standin, stream);
    assert_eq!(acl.download(target, device, LEN, stream), 0);
    assert_eq!(acl.aclrtSynchronizeStream(stream), 0);
    assert!(acl.is_recorded(event) && acl.is_idle(stream));
    let got = bytes_at(target, LEN);
    assert!(got != pattern(LEN, 1) && got[..LEN / 2] == pattern(LEN, 1)[..LEN / 2]);
    standin.report().assert_lawful();
}

#[test]
fn a_failure_that_stops_its_context_is_seen_by_all_that_is_in_it() {
    let (standin, acl) = open(&late());
    let (default, other) = (acl.context(), acl.stream());
    let _own = made(null_mut(), |context| acl.aclrtCreateContext(context, 0));
    let (stream, beside) = (acl.stream(), acl.stream());
    let mode = |mode| acl.aclrtSetStreamFailureMode(stream, mode);
    assert_eq!([mode(0), mode(STOP_ON_FAILURE), mode(STOP_ON_FAILURE), mode(0)], [0, 0, 0, NOT_SUPPORTED]);
    let (device, target, event) = failing_copy(&acl, &standin, stream);
    assert_eq!(acl.download(target, device, LEN, stream), 0);
    assert_eq!(acl.aclrtSynchronizeStream(stream), COPY_FAILED);
    let mut status = -1;
    assert_eq!(acl.aclrtQueryEventStatus(event, &mut status), COPY_FAILED);
    assert_eq!(acl.aclrtStreamQuery(beside, &mut status), COPY_FAILED);
    assert_eq!(acl.upload(device, target, LEN, beside), COPY_FAILED);
    // What came after it did not run.
    assert!(bytes_at(target, LEN) == vec![0; LEN]);
    // Memory can be given back, and the default context goes on.
    assert_eq!((acl.aclrtFree(device), acl.aclrtDestroyEvent(event), acl.aclrtDestroyStream(stream)), (0, 0, 0));
    assert_eq!((acl.aclrtSetCurrentContext(default), acl.aclrtSynchronizeStream(other)), (0, 0));
    assert!(acl.is_recorded(acl.record(other)));
}

#[test]
fn a_failure_of_the_device_is_everybodys() {
    let (standin, acl) = open(&late());
    let (default, other) = (acl.context(), acl.stream());
    let _own = made(null_mut(), |context| acl.aclrtCreateContext(context, 0));
    let (stream, device) = (acl.stream(), acl.alloc(LEN));
    standin.fault(&FaultPlan::one(Fault::nth("aclrtMemcpyAsync", 1, Effect::LateSticky(LOST_HEARTBEAT as u32))));
    assert_eq!(acl.upload(device, acl.pin(&pattern(LEN, 1)), LEN, stream), 0);
    assert_eq!(acl.aclrtSynchronizeStream(stream), LOST_HEARTBEAT);
    assert_eq!(acl.aclrtSetCurrentContext(default), LOST_HEARTBEAT);
    assert_eq!(acl.aclrtSynchronizeStream(other), LOST_HEARTBEAT);
    standin.configure(&late());
    assert_eq!(acl.aclrtSetDevice(1), 0);
    standin.fault(&FaultPlan::one(Fault::nth("aclrtMalloc", 1, Effect::DeviceLost)));
    assert_eq!(acl.aclrtMalloc(&mut null_mut(), LEN, 0), LOST_HEARTBEAT);
    assert_eq!(acl.aclrtSetDevice(0), 0);
    standin.report().assert_clean();
}

#[test]
fn faults_give_acls_results() {
    let (standin, acl) = open(&late());
    let plan = [
        Fault::nth("aclrtMalloc", 1, Effect::OutOfMemory),
        Fault::pin(1),
        Fault::nth("aclrtStreamQuery", 1, Effect::Fail(107_022)),
    ];
    standin.fault(&FaultPlan { faults: plan.to_vec(), ..FaultPlan::default() });
    let stream = acl.stream();
    assert_eq!(acl.aclrtMalloc(&mut null_mut(), LEN, 0), OUT_OF_MEMORY);
    assert_eq!(acl.aclrtMallocHost(&mut null_mut(), LEN), OUT_OF_MEMORY);
    assert_eq!(acl.aclrtStreamQuery(stream, &mut 0), 107_022);
    standin.no_faults();
    assert_eq!(acl.aclrtMalloc(&mut null_mut(), 65 * LEN, 0), OUT_OF_MEMORY);
}

#[test]
fn access_to_a_peer_goes_one_way() {
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB, 32 * MIB]).all_peers());
    let bytes = pattern(LEN, 5);
    let (stream, near, source, target) = (acl.stream(), acl.alloc(LEN), acl.pin(&bytes), acl.pin(&vec![0; LEN]));
    let access = |from, to| made(-1, |status| acl.aclrtDevicePeerAccessStatus(from, to, status));
    assert_eq!((acl.aclrtDeviceEnablePeerAccess(1, 0), acl.aclrtDeviceEnablePeerAccess(1, 0)), (0, 0));
    assert_eq!(acl.aclrtDeviceEnablePeerAccess(0, 0), INVALID_PARAM);
    assert_eq!((access(0, 1), access(1, 0)), (1, 0));
    assert_eq!(acl.aclrtSetDevice(1), 0);
    let (far, other) = (acl.alloc(LEN), acl.stream());
    assert_eq!(acl.aclrtMemcpy(far, LEN, source, LEN, TO_DEVICE), 0);
    assert_eq!(acl.aclrtSetDevice(0), 0);
    assert_eq!(acl.aclrtMemcpyAsync(near, LEN, far, LEN, ON_DEVICE, stream), 0);
    assert_eq!((acl.download(target, near, LEN, stream), acl.aclrtSynchronizeStream(stream)), (0, 0));
    assert!(bytes_at(target, LEN) == bytes);
    standin.report().assert_lawful();
    assert_eq!(acl.aclrtSetDevice(1), 0);
    assert_ne!(acl.aclrtMemcpyAsync(far, LEN, near, LEN, ON_DEVICE, other), 0);
    assert_only(&standin, Rule::NoPeerAccess, "aclrtMemcpyAsync");
}

#[test]
fn work_is_enqueued_in_the_context_of_its_stream_alone() {
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]));
    let (default, stream, device, source) = (acl.context(), acl.stream(), acl.alloc(LEN), acl.pin(&pattern(LEN, 1)));
    let event = acl.record(stream);
    let own = made(null_mut(), |context| acl.aclrtCreateContext(context, 0));
    // Asking and waiting is done from any.
    assert_eq!((acl.context(), acl.aclrtSynchronizeStream(stream), acl.aclrtSynchronizeEvent(event)), (own, 0, 0));
    assert!(acl.is_recorded(event) && acl.is_idle(stream));
    // A stream of this context may wait for an event of the other one, and use the device's memory.
    let here = acl.stream();
    assert_eq!((acl.aclrtStreamWaitEvent(here, event), acl.upload(device, source, LEN, here)), (0, 0));
    assert_eq!(acl.aclrtSynchronizeStream(here), 0);
    standin.report().assert_lawful();
    assert_eq!(acl.upload(device, source, LEN, stream), STREAM_CONTEXT);
    assert_only(&standin, Rule::WrongContext, "aclrtMemcpyAsync");
    assert_eq!((acl.aclrtDestroyStream(stream), acl.aclrtRecordEvent(event, stream)), (STREAM_CONTEXT, STREAM_CONTEXT));
    assert_eq!(acl.aclrtSetCurrentContext(default), 0);
    assert_eq!((acl.aclrtDestroyStream(stream), acl.aclrtDestroyEvent(event)), (0, 0));
}

#[test]
fn a_context_of_ones_own_goes_empty() {
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]));
    let own = made(null_mut(), |context| acl.aclrtCreateContext(context, 0));
    let stream = acl.stream();
    assert_eq!(standin.report().count(Rule::Leak), 2);
    assert_eq!((acl.aclrtDestroyStream(stream), acl.aclrtDestroyContext(own)), (0, 0));
    assert_eq!((acl.aclrtGetCurrentContext(&mut null_mut()), acl.aclrtResetDevice(0)), (NO_CONTEXT, 0));
    standin.report().assert_clean();
    let own = made(null_mut(), |context| acl.aclrtCreateContext(context, 0));
    let _event = acl.event();
    assert_eq!(acl.aclrtDestroyContext(own), 0);
    assert_only(&standin, Rule::Leak, "aclrtDestroyContext");
}

#[test]
fn a_wait_that_timed_out_is_no_failure() {
    let (standin, acl) = open(&late());
    let (stream, device, source) = (acl.stream(), acl.alloc(LEN), acl.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("aclrtMemcpyAsync", 1, Effect::Hold)));
    assert_eq!(acl.upload(device, source, LEN, stream), 0);
    let event = acl.record(stream);
    assert_eq!(acl.aclrtSynchronizeEventWithTimeout(event, 5), EVENT_TIMEOUT);
    assert_eq!(acl.aclrtSynchronizeStreamWithTimeout(stream, 5), STREAM_TIMEOUT);
    assert_eq!(acl.aclrtSynchronizeEventWithTimeout(acl.event(), 0), 0);
    standin.no_faults();
    assert_eq!(acl.aclrtSynchronizeEventWithTimeout(event, -1), 0);
    assert_eq!((acl.aclrtSynchronizeStreamWithTimeout(stream, 60_000), acl.aclrtFree(device)), (0, 0));
    standin.report().assert_lawful();
}

#[test]
fn a_stream_is_destroyed_when_it_is_done_or_by_force_at_once() {
    let (standin, acl) = open(&late());
    let (stream, device, target) = (acl.stream(), acl.alloc(LEN), acl.pin(&vec![0; LEN]));
    assert_eq!(acl.upload(device, acl.pin(&pattern(LEN, 1)), LEN, stream), 0);
    let event = acl.record(stream);
    assert_eq!(acl.aclrtDestroyStream(stream), 0);
    assert!(acl.is_recorded(event));
    let stream = acl.stream();
    standin.fault(&FaultPlan::one(Fault::nth("aclrtMemcpyAsync", 1, Effect::Hold)));
    assert_eq!(acl.download(target, device, LEN, stream), 0);
    assert_eq!((acl.aclrtRecordEvent(event, stream), acl.aclrtDestroyStreamForce(stream)), (0, 0));
    standin.no_faults();
    assert!(acl.is_recorded(event));
    assert!(bytes_at(target, LEN) == vec![0; LEN]);
    standin.report().assert_lawful();
}

#[test]
fn functions_of_the_program_are_called_one_at_a_time_in_a_context() {
    static INSIDE: AtomicU32 = AtomicU32::new(0);
    static TOGETHER: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn look(_: Handle) {
        if INSIDE.fetch_add(1, Ordering::AcqRel) > 0 {
            TOGETHER.store(true, Ordering::Release);
        }
        (0..20).for_each(|_| std::thread::yield_now());
        INSIDE.fetch_sub(1, Ordering::AcqRel);
    }
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]));
    let streams = [acl.stream(), acl.stream(), acl.stream()];
    for _ in 0..200 {
        streams.iter().for_each(|&stream| assert_eq!(acl.aclrtLaunchHostFunc(stream, look, null_mut()), 0));
    }
    streams.iter().for_each(|&stream| assert_eq!(acl.aclrtSynchronizeStream(stream), 0));
    assert!(!TOGETHER.load(Ordering::Acquire));
    streams.iter().for_each(|&stream| assert_eq!(acl.aclrtDestroyStream(stream), 0));
    standin.report().assert_clean();
}

#[test]
fn a_function_of_the_program_must_not_call_the_library() {
    unsafe extern "C" fn call(acl: Handle) {
        // SAFETY: the test gives the table, which outlives the work.
        let acl = unsafe { &*acl.cast::<Acl>() };
        assert_ne!(acl.aclrtFree(null_mut()), 0);
    }
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]));
    let stream = acl.stream();
    assert_eq!(acl.aclrtLaunchHostFunc(stream, call, (&raw const acl).cast_mut().cast()), 0);
    assert_eq!(acl.aclrtSynchronizeStream(stream), 0);
    assert_only(&standin, Rule::CallInHostFunction, "aclrtFree");
}

#[test]
fn a_stream_that_is_not_captured_says_so() {
    let (standin, acl) = open(&Config::with_devices(&[64 * MIB]));
    let stream = acl.stream();
    assert_eq!(made(-1, |status| acl.aclmdlRICaptureGetInfo(stream, status, null_mut())), 0);
    assert_eq!(made(2, |mode| acl.aclmdlRICaptureThreadExchangeMode(mode)), 0);
    assert_eq!(made(0, |mode| acl.aclmdlRICaptureThreadExchangeMode(mode)), 2);
    assert_eq!(acl.aclrtDestroyStream(stream), 0);
    standin.report().assert_clean();
}
