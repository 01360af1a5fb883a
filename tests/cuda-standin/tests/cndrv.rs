//! Cambricon's calls over the same world: a program that keeps the rules, and each rule that is CNDrv's own.

mod common;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use common::kernel::assert_only;
use common::loaded::{loaded, made};
use common::{MIB, pattern};
use cuda_standin::{Config, Driver, Effect, Fault, FaultPlan, Rule, Session, session};

type Handle = *mut c_void;

const LEN: usize = MIB as usize;
const NO_TIMING: c_uint = 4;

const NOT_READY: c_int = 1;
const DEINITIALIZED: c_int = 100_003;
const NO_DEVICE: c_int = 100_004;
const INVALID_VALUE: c_int = 100_006;
const HOST_OUT_OF_MEMORY: c_int = 100_010;
const NOT_SUPPORTED: c_int = 100_050;
const NOT_PERMITTED: c_int = 100_051;
const QUEUE_INVALID: c_int = 100_060;
const NO_QUEUE: c_int = 100_061;
const NOTIFIER_INVALID: c_int = 100_080;
const NO_NOTIFIER: c_int = 100_081;
const OUT_OF_MEMORY: c_int = 100_100;
const ILLEGAL_ADDRESS: c_int = 100_131;
const CONTEXT_INVALID: c_int = 100_201;
const CAPTURE_UNSUPPORTED: c_int = 100_360;

loaded!(Cn {
    fn cnInit(flags: c_uint);
    fn cnGetErrorName(error: c_int, name: *mut *const c_char);
    fn cnGetErrorString(error: c_int, text: *mut *const c_char);
    fn cnGetLibVersion(major: *mut c_int, minor: *mut c_int, patch: *mut c_int);
    fn cnDriverGetVersion(major: *mut c_int, minor: *mut c_int, patch: *mut c_int);
    fn cnDeviceGetCount(count: *mut c_int);
    fn cnDeviceGet(device: *mut u64, ordinal: c_int);
    fn cnDeviceGetName(name: *mut c_char, len: c_uint, device: u64);
    fn cnDeviceTotalMem(bytes: *mut u64, device: u64);
    fn cnDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: u64);
    fn cnDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: u64);
    fn cnDeviceGetUuid(uuid: *mut [u8; 16], device: u64);
    fn cnDeviceCanPeerAble(can: *mut c_int, from: u64, to: u64);
    fn cnSharedContextAcquire(context: *mut Handle, device: u64);
    fn cnSharedContextRelease(device: u64);
    fn cnSharedContextGetState(device: u64, flags: *mut c_uint, state: *mut c_int);
    fn cnCtxCreate(context: *mut Handle, flags: c_uint, device: u64);
    fn cnCtxDestroy(context: Handle);
    fn cnCtxGetCurrent(context: *mut Handle);
    fn cnCtxSetCurrent(context: Handle);
    fn cnCtxGetQueuePriorityRange(least: *mut c_int, greatest: *mut c_int);
    fn cnMemGetInfo(free: *mut u64, total: *mut u64);
    fn cnMalloc(at: *mut u64, bytes: u64);
    fn cnFree(at: u64);
    fn cnMallocHost(at: *mut Handle, bytes: u64);
    fn cnFreeHost(at: Handle);
    fn cnMemcpyHtoD(dst: u64, src: Handle, bytes: u64);
    fn cnMemcpyDtoH(dst: Handle, src: u64, bytes: u64);
    fn cnMemcpyHtoDAsync_V2(dst: u64, src: Handle, bytes: u64, queue: Handle);
    fn cnMemcpyDtoHAsync_V2(dst: Handle, src: u64, bytes: u64, queue: Handle);
    fn cnMemcpyDtoDAsync(dst: u64, src: u64, bytes: u64, queue: Handle);
    fn cnMemcpyAsync_V3(dst: u64, src: u64, bytes: u64, queue: Handle);
    fn cnMemcpyPeerAsync(dst: u64, dst_context: Handle, src: u64, src_context: Handle, bytes: u64, queue: Handle);
    fn cnCreateQueueWithPriority(queue: *mut Handle, flags: c_uint, priority: c_int);
    fn cnQueueGetPriority(queue: Handle, priority: *mut c_int);
    fn cnDestroyQueue(queue: Handle);
    fn cnQueryQueue(queue: Handle);
    fn cnQueueSync(queue: Handle);
    fn cnQueueWaitNotifier(queue: Handle, notifier: Handle);
    fn cnInvokeHostFunc(queue: Handle, function: unsafe extern "C" fn(Handle), argument: Handle);
    fn cnQueueIsCapturing(queue: Handle, status: *mut c_int);
    fn cnQueueBeginCapture(queue: Handle, mode: c_int);
    fn cnThreadExchangeQueueCaptureMode(mode: *mut c_int);
    fn cnCreateNotifier(notifier: *mut Handle, flags: c_uint);
    fn cnDestroyNotifier(notifier: Handle);
    fn cnPlaceNotifier(notifier: Handle, queue: Handle);
    fn cnQueryNotifier(notifier: Handle);
    fn cnWaitNotifier(notifier: Handle);
});

/// A machine, initialised, with the first device's shared context current in this thread.
fn open(config: &Config) -> (Session, Cn) {
    let standin = session(config);
    let cn = Cn::find(&standin);
    assert_eq!(cn.cnInit(0), 0);
    cn.bind(0);
    (standin, cn)
}

/// Late enough that no work starts before the host waits for it.
fn late() -> Config {
    Config::with_devices(&[64 * MIB, 32 * MIB]).late_micros(10_000_000)
}

impl Cn {
    /// Makes a device's shared context current.
    fn bind(&self, device: u64) -> Handle {
        let context = made(null_mut(), |context| self.cnSharedContextAcquire(context, device));
        assert_eq!(self.cnCtxSetCurrent(context), 0);
        context
    }

    fn alloc(&self, len: usize) -> u64 {
        made(0, |at| self.cnMalloc(at, len as u64))
    }

    /// Pinned memory with these bytes in it.
    fn pin(&self, bytes: &[u8]) -> Handle {
        let at = made(null_mut(), |at| self.cnMallocHost(at, bytes.len() as u64));
        // SAFETY: the memory is as long as the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.cast::<u8>(), bytes.len()) };
        at
    }

    fn queue(&self) -> Handle {
        made(null_mut(), |queue| self.cnCreateQueueWithPriority(queue, 0, 3))
    }

    fn notifier(&self) -> Handle {
        made(null_mut(), |notifier| self.cnCreateNotifier(notifier, NO_TIMING))
    }

    /// A new notifier, placed.
    fn place(&self, queue: Handle) -> Handle {
        let notifier = self.notifier();
        assert_eq!(self.cnPlaceNotifier(notifier, queue), 0);
        notifier
    }

    fn upload(&self, dst: u64, src: Handle, len: usize, queue: Handle) -> c_int {
        self.cnMemcpyHtoDAsync_V2(dst, src, len as u64, queue)
    }

    fn download(&self, dst: Handle, src: u64, len: usize, queue: Handle) -> c_int {
        self.cnMemcpyDtoHAsync_V2(dst, src, len as u64, queue)
    }
}

fn bytes_at(at: Handle, len: usize) -> Vec<u8> {
    // SAFETY: the callers give pinned memory of this length that nothing writes to any more.
    unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec()
}

#[test]
fn a_lawful_life() {
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB]).late_micros(200));
    assert_eq!((made(0, |count| cn.cnDeviceGetCount(count)), made(9, |device| cn.cnDeviceGet(device, 0))), (1, 0));
    let bytes = pattern(3 * LEN + 17, 1);
    let (queue, device) = (cn.queue(), cn.alloc(bytes.len()));
    let mut total = 0;
    assert_eq!(made(0, |free| cn.cnMemGetInfo(free, &mut total)), 61 * MIB - 512);
    assert_eq!((total, made(-1, |priority| cn.cnQueueGetPriority(queue, priority))), (64 * MIB, 3));
    let (source, target) = (cn.pin(&bytes), cn.pin(&vec![0; bytes.len()]));
    assert_eq!(cn.upload(device, source, bytes.len(), queue), 0);
    let landed = cn.place(queue);
    assert_eq!((cn.cnQueryNotifier(landed), cn.cnQueryQueue(queue)), (NOT_READY, NOT_READY));
    assert_eq!(cn.cnMemcpyAsync_V3(target.expose_provenance() as u64, device, bytes.len() as u64, queue), 0);
    assert_eq!((cn.cnWaitNotifier(landed), cn.cnQueueSync(queue)), (0, 0));
    assert_eq!((cn.cnQueryNotifier(landed), cn.cnQueryQueue(queue)), (0, 0));
    assert!(bytes_at(target, bytes.len()) == bytes);
    assert_eq!((cn.cnFree(device), cn.cnFreeHost(source), cn.cnFreeHost(target)), (0, 0, 0));
    assert_eq!((cn.cnDestroyNotifier(landed), cn.cnDestroyQueue(queue), cn.cnSharedContextRelease(0)), (0, 0, 0));
    let report = standin.report();
    report.assert_clean();
    assert_eq!((report.calls_of("cnMalloc"), report.live_contexts), (1, 0));
}

#[test]
fn a_device_is_what_the_configuration_says_in_cambricons_numbers() {
    let mut config = Config::with_devices(&[24 << 30, 16 << 30]).all_peers();
    config.devices[1].name = "MLU370-X8".to_owned();
    config.devices[1].compute = (3, 7);
    let (standin, cn) = open(&config);
    let mut text = [1_u8; 32];
    assert_eq!(cn.cnDeviceGetName(text.as_mut_ptr().cast(), 9, 1), INVALID_VALUE);
    assert_eq!(cn.cnDeviceGetName(text.as_mut_ptr().cast(), 32, 1), 0);
    assert_eq!(&text[..10], b"MLU370-X8\0");
    assert_eq!(cn.cnDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, 1), 0);
    assert_eq!(&text[..13], b"0000:02:00.0\0");
    assert_eq!(made([0; 16], |uuid| cn.cnDeviceGetUuid(uuid, 1))[15], b'1');
    assert_eq!(made(0, |bytes| cn.cnDeviceTotalMem(bytes, 1)), 16 << 30);
    let attribute = |which| made(-1, |value| cn.cnDeviceGetAttribute(value, which, 1));
    assert_eq!([0x01, 0x02, 0x109, 0x405, 0x406, 0x407, 0x408].map(attribute), [3, 7, 0, 16 << 10, 2, 0, 0]);
    assert_eq!(made(-1, |can| cn.cnDeviceCanPeerAble(can, 0, 1)), 1);
    let (mut minor, mut patch) = (0, 0);
    assert_eq!(made(0, |major| cn.cnGetLibVersion(major, &mut minor, &mut patch)), 2);
    assert_eq!(made(0, |major| cn.cnDriverGetVersion(major, &mut minor, &mut patch)), 2);
    let mut greatest = -1;
    assert_eq!(made(-1, |least| cn.cnCtxGetQueuePriorityRange(least, &mut greatest)), 7);
    assert_eq!((minor, patch, greatest), (15, 5, 0));
    assert_eq!(cn.cnSharedContextRelease(0), 0);
    standin.report().assert_clean();
}

#[test]
fn results_have_cambricons_names_and_what_is_none_is_told_so() {
    let standin = session(&Config::default());
    let cn = Cn::find(&standin);
    let told = |call: &dyn Fn(*mut *const c_char) -> c_int| {
        let text = made(std::ptr::null(), call);
        // SAFETY: the stand-in's texts are constants with a zero at the end.
        unsafe { CStr::from_ptr(text) }
    };
    assert_eq!(told(&|at| cn.cnGetErrorName(1, at)), c"CN_ERROR_NOT_READY");
    assert_eq!(told(&|at| cn.cnGetErrorName(100_100, at)), c"CN_MEMORY_ERROR_OUT_OF_MEMORY");
    assert!(told(&|at| cn.cnGetErrorString(12_345, at)).to_str().unwrap().contains("not in the scope"));
}

#[test]
fn without_a_device_there_is_nothing_to_initialise() {
    let standin = session(&Config { devices: Vec::new(), ..Config::default() });
    let cn = Cn::find(&standin);
    assert_eq!((cn.cnInit(0), cn.cnInit(1)), (NO_DEVICE, INVALID_VALUE));
    standin.report().assert_clean();
}

#[test]
fn nothing_is_current_at_first_and_nothing_can_be_made_current_again() {
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB]));
    let there = std::thread::scope(|scope| {
        let other = || made(1_usize as Handle, |context| cn.cnCtxGetCurrent(context)).is_null();
        scope.spawn(other).join().unwrap()
    });
    assert!(there && !made(null_mut(), |context| cn.cnCtxGetCurrent(context)).is_null());
    assert_eq!(cn.cnCtxSetCurrent(null_mut()), 0);
    let mut state = 0;
    assert_eq!((made(0, |flags| cn.cnSharedContextGetState(0, flags, &mut state)), state), (0, 1));
    assert_eq!(cn.cnSharedContextRelease(0), 0);
    standin.report().assert_clean();
    assert_eq!(cn.cnMalloc(&mut 0, 1), CONTEXT_INVALID);
    assert_only(&standin, Rule::NoContext, "cnMalloc");
}

#[test]
fn host_memory_cannot_be_registered() {
    let standin = session(&Config::default());
    for name in ["cnHostRegister", "cnMemHostRegister", "cnMemAllocAsync"] {
        assert!(standin.call(name).is_none(), "{name}");
    }
}

#[test]
fn no_bytes_and_no_address_are_errors() {
    let (standin, cn) = open(&Config::default());
    assert_eq!((cn.cnMalloc(&mut 0, 0), cn.cnMallocHost(&mut null_mut(), 0)), (INVALID_VALUE, INVALID_VALUE));
    assert_eq!((cn.cnFree(0), cn.cnFreeHost(null_mut())), (INVALID_VALUE, INVALID_VALUE));
    assert_eq!(cn.cnCreateQueueWithPriority(&mut null_mut(), 1, 0), INVALID_VALUE);
    standin.report().assert_clean();
}

#[test]
fn a_copy_of_memory_that_is_not_pinned_is_over_with_its_call() {
    let (standin, cn) = open(&late());
    let (queue, device, mut pageable) = (cn.queue(), cn.alloc(LEN), pattern(LEN, 2));
    assert_eq!(cn.upload(device, pageable.as_mut_ptr().cast(), LEN, queue), 0);
    assert_eq!(cn.cnQueryQueue(queue), 0);
    pageable.fill(0);
    assert_eq!(cn.cnMemcpyDtoH(pageable.as_mut_ptr().cast(), device, LEN as u64), 0);
    assert!(pageable == pattern(LEN, 2));
    standin.report().assert_lawful();
}

#[test]
fn a_skipped_wait_and_memory_freed_too_early() {
    let (standin, cn) = open(&late());
    let (copies, computes) = (cn.queue(), cn.queue());
    let (source, one, two) = (cn.pin(&pattern(LEN, 1)), cn.alloc(LEN), cn.alloc(LEN));
    assert_eq!(cn.upload(one, source, LEN, copies), 0);
    let landed = cn.place(copies);
    assert_eq!(cn.cnQueueWaitNotifier(computes, landed), 0);
    assert_eq!(cn.cnMemcpyDtoDAsync(two, one, LEN as u64, computes), 0);
    standin.report().assert_lawful();
    assert_eq!(cn.cnMemcpyDtoDAsync(one, two, LEN as u64, copies), 0);
    assert_only(&standin, Rule::Unordered, "cnMemcpyDtoDAsync");
    standin.configure(&late());
    cn.bind(0);
    let (queue, device, source) = (cn.queue(), cn.alloc(LEN), cn.pin(&pattern(LEN, 1)));
    assert_eq!((cn.upload(device, source, LEN, queue), cn.cnFree(device)), (0, 0));
    assert_only(&standin, Rule::FreeInUse, "cnFree");
}

#[test]
fn a_queue_waits_for_no_notifier_of_another_context() {
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB, 32 * MIB]).all_peers());
    let (queue, near) = (cn.queue(), made(null_mut(), |context| cn.cnCtxGetCurrent(context)));
    let landed = cn.place(queue);
    cn.bind(1);
    let far = cn.queue();
    assert_eq!(cn.cnQueueWaitNotifier(far, landed), NOT_PERMITTED);
    let own = made(null_mut(), |context| cn.cnCtxCreate(context, 0, 0));
    let beside = cn.queue();
    assert_eq!(cn.cnQueueWaitNotifier(beside, landed), NOT_PERMITTED);
    // The host waits for it from anywhere.
    assert_eq!((cn.cnWaitNotifier(landed), cn.cnQueryNotifier(landed)), (0, 0));
    standin.report().assert_lawful();
    assert_eq!(cn.cnPlaceNotifier(landed, beside), NOTIFIER_INVALID);
    assert_only(&standin, Rule::WrongContext, "cnPlaceNotifier");
    assert_eq!((cn.cnDestroyQueue(beside), cn.cnCtxDestroy(own)), (0, 0));
    assert_eq!((cn.cnCtxSetCurrent(near), cn.cnPlaceNotifier(landed, far)), (0, QUEUE_INVALID));
}

#[test]
fn memory_and_queue_are_of_one_context_and_none_is_copied_to_another_of_the_device() {
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB]));
    let (shared, one) = (made(null_mut(), |context| cn.cnCtxGetCurrent(context)), cn.alloc(LEN));
    let own = made(null_mut(), |context| cn.cnCtxCreate(context, 0, 0));
    let (queue, two, source) = (cn.queue(), cn.alloc(LEN), cn.pin(&pattern(LEN, 1)));
    assert_eq!((cn.upload(two, source, LEN, queue), cn.cnQueueSync(queue)), (0, 0));
    standin.report().assert_lawful();
    assert_eq!(cn.upload(one, source, LEN, queue), INVALID_VALUE);
    assert_only(&standin, Rule::WrongContext, "cnMemcpyHtoDAsync_V2");
    assert_eq!(cn.cnMemcpyPeerAsync(one, shared, two, own, LEN as u64, queue), INVALID_VALUE);
    assert_only(&standin, Rule::WrongContext, "cnMemcpyPeerAsync");
    assert_eq!(cn.cnMemcpyDtoDAsync(one, two, LEN as u64, queue), INVALID_VALUE);
    assert_only(&standin, Rule::WrongContext, "cnMemcpyDtoDAsync");
}

#[test]
fn a_context_of_ones_own_goes_with_its_memory() {
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB]));
    let shared = made(null_mut(), |context| cn.cnCtxGetCurrent(context));
    let own = made(null_mut(), |context| cn.cnCtxCreate(context, 0, 0));
    let memory = cn.alloc(LEN);
    assert_eq!((cn.cnCtxDestroy(own), cn.cnCtxSetCurrent(shared)), (0, 0));
    assert_only(&standin, Rule::Leak, "cnCtxDestroy");
    assert_eq!(made(0, |free| cn.cnMemGetInfo(free, &mut 0)), 64 * MIB);
    assert_eq!(cn.cnFree(memory), INVALID_VALUE);
    assert_eq!(standin.report().count(Rule::DoubleFree), 1);
}

#[test]
fn peers_are_reached_without_being_enabled_where_there_is_a_way() {
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB, 32 * MIB]).all_peers());
    let bytes = pattern(LEN, 5);
    let near = made(null_mut(), |context| cn.cnCtxGetCurrent(context));
    let (queue, source, one) = (cn.queue(), cn.pin(&bytes), cn.alloc(LEN));
    let far = cn.bind(1);
    let (two, other, target) = (cn.alloc(LEN), cn.queue(), cn.pin(&vec![0; LEN]));
    assert_eq!((cn.cnCtxSetCurrent(near), cn.upload(one, source, LEN, queue)), (0, 0));
    assert_eq!(cn.cnMemcpyPeerAsync(two, far, one, near, LEN as u64, queue), 0);
    assert_eq!((cn.cnQueueSync(queue), cn.cnCtxSetCurrent(far)), (0, 0));
    assert_eq!((cn.download(target, two, LEN, other), cn.cnQueueSync(other)), (0, 0));
    assert!(bytes_at(target, LEN) == bytes);
    standin.report().assert_lawful();
    // The source and the queue are of one context.
    assert_eq!(cn.cnMemcpyPeerAsync(two, far, one, near, LEN as u64, other), INVALID_VALUE);
    assert_only(&standin, Rule::WrongContext, "cnMemcpyPeerAsync");
}

#[test]
fn a_peer_that_there_is_no_way_to() {
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB, 32 * MIB]));
    let near = made(null_mut(), |context| cn.cnCtxGetCurrent(context));
    let (queue, one) = (cn.queue(), cn.alloc(LEN));
    let far = cn.bind(1);
    let two = cn.alloc(LEN);
    assert_eq!(cn.cnCtxSetCurrent(near), 0);
    assert_eq!(cn.cnMemcpyPeerAsync(two, far, one, near, LEN as u64, queue), NOT_SUPPORTED);
    assert_only(&standin, Rule::NoPeerAccess, "cnMemcpyPeerAsync");
}

#[test]
fn what_is_pending_is_destroyed_at_once_and_runs() {
    let (standin, cn) = open(&late());
    let (queue, device, source) = (cn.queue(), cn.alloc(LEN), cn.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("cnMemcpyHtoDAsync_V2", 1, Effect::Hold)));
    assert_eq!(cn.upload(device, source, LEN, queue), 0);
    let (landed, second) = (cn.place(queue), cn.place(queue));
    assert_eq!((cn.cnDestroyNotifier(landed), cn.cnDestroyQueue(queue)), (0, 0));
    assert_eq!(cn.cnQueryNotifier(second), NOT_READY);
    standin.no_faults();
    assert_eq!((cn.cnWaitNotifier(second), cn.cnFree(device), cn.cnFreeHost(source)), (0, 0, 0));
    assert_eq!(cn.cnDestroyNotifier(second), 0);
    standin.report().assert_clean();
}

#[test]
fn queues_run_out_and_notifiers_that_take_times_do() {
    let mut config = Config::with_devices(&[64 * MIB]);
    (config.devices[0].streams_limit, config.devices[0].events_limit) = (Some(1), Some(1));
    let (standin, cn) = open(&config);
    let (queue, timed) = (cn.queue(), made(null_mut(), |notifier| cn.cnCreateNotifier(notifier, 0)));
    assert_eq!(cn.cnCreateQueueWithPriority(&mut null_mut(), 0, 0), NO_QUEUE);
    assert_eq!(cn.cnCreateNotifier(&mut null_mut(), 0), NO_NOTIFIER);
    let untimed = [cn.notifier(), cn.notifier()];
    assert_eq!(untimed.map(|notifier| cn.cnDestroyNotifier(notifier)), [0, 0]);
    assert_eq!((cn.cnDestroyNotifier(timed), cn.cnDestroyQueue(queue)), (0, 0));
    assert_eq!((cn.cnQueueSync(queue), cn.cnQueryNotifier(timed)), (QUEUE_INVALID, NOTIFIER_INVALID));
    assert_eq!(standin.report().count(Rule::UnknownHandle), 2);
}

#[test]
fn faults_give_cambricons_results() {
    let (standin, cn) = open(&late());
    let plan = [
        Fault::nth("cnMalloc", 1, Effect::OutOfMemory),
        Fault::pin(1),
        Fault::nth("cnQueryQueue", 1, Effect::Fail(1)),
        Fault::nth("cnMemcpyHtoDAsync_V2", 1, Effect::LateSticky(ILLEGAL_ADDRESS as u32)),
    ];
    standin.fault(&FaultPlan { faults: plan.to_vec(), ..FaultPlan::default() });
    let queue = cn.queue();
    assert_eq!(cn.cnMalloc(&mut 0, MIB), OUT_OF_MEMORY);
    assert_eq!(cn.cnMallocHost(&mut null_mut(), MIB), HOST_OUT_OF_MEMORY);
    assert_eq!(cn.cnQueryQueue(queue), NOT_READY);
    assert_eq!(cn.upload(cn.alloc(LEN), cn.pin(&pattern(LEN, 1)), LEN, queue), 0);
    let event = cn.place(queue);
    assert_eq!((cn.cnQueueSync(queue), cn.cnQueryNotifier(event)), (ILLEGAL_ADDRESS, ILLEGAL_ADDRESS));
    standin.configure(&Config { pinned_limit: Some(MIB), ..late() });
    cn.bind(1);
    assert_eq!(cn.cnMallocHost(&mut null_mut(), 2 * MIB), HOST_OUT_OF_MEMORY);
    standin.fault(&FaultPlan::one(Fault::nth("cnMalloc", 1, Effect::DeviceLost)));
    assert_eq!((cn.cnMalloc(&mut 0, MIB), cn.cnMalloc(&mut 0, MIB)), (DEINITIALIZED, DEINITIALIZED));
}

#[test]
fn a_function_of_the_program_must_not_call_the_driver() {
    unsafe extern "C" fn call(cn: Handle) {
        // SAFETY: the test gives the table, which outlives the work.
        let cn = unsafe { &*cn.cast::<Cn>() };
        assert_eq!(cn.cnFree(0), NOT_PERMITTED);
    }
    let (standin, cn) = open(&Config::with_devices(&[64 * MIB]));
    let queue = cn.queue();
    assert_eq!(cn.cnInvokeHostFunc(queue, call, (&raw const cn).cast_mut().cast()), 0);
    assert_eq!(cn.cnQueueSync(queue), 0);
    assert_only(&standin, Rule::CallInHostFunction, "cnFree");
}

#[test]
fn a_capture_forbids_synchronous_copies() {
    let standin: &Driver = &open(&Config::with_devices(&[64 * MIB])).0;
    let cn = Cn::find(standin);
    let (queue, device, mut byte) = (cn.queue(), cn.alloc(1), 0_u8);
    let capturing = || made(-1, |status| cn.cnQueueIsCapturing(queue, status));
    assert_eq!((capturing(), cn.cnQueueBeginCapture(queue, 0), capturing()), (0, 0, 1));
    assert_eq!(made(2, |mode| cn.cnThreadExchangeQueueCaptureMode(mode)), 0);
    assert_eq!(cn.cnMemcpyHtoD(device, (&raw mut byte).cast(), 1), 0);
    assert_eq!(made(0, |mode| cn.cnThreadExchangeQueueCaptureMode(mode)), 2);
    assert_eq!((cn.cnMemcpyHtoD(device, (&raw mut byte).cast(), 1), capturing()), (CAPTURE_UNSUPPORTED, 2));
    standin.report().assert_lawful();
}
