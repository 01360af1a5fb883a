//! The calls of AMD's HIP runtime, each a shim, and what is other there than with CUDA. A context is a device, and each thread
//! has one current from its start. Calls that name a stream take the device from it. Numbers, and what a call does where the
//! documentation says nothing, are those of the headers of 5.7 to 7.14 and of the source of 5.7 to 6.4 (ROCm/clr).
#![allow(non_snake_case, reason = "the names are the runtime's")]
#![allow(unreachable_pub, reason = "exported by name")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are the runtime's own")]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};

use crate::capture::exchange_mode;
use crate::code::{Code, Outcome};
use crate::ffi::{Address, Handle, Out, give, give_text, handle, launch, named_function, number as address, text};
use crate::kernel::Shape;
use crate::lane::HostCall;
use crate::memory::BASE;
use crate::report::Rule;
use crate::vendor::{Vendor, exported};
use crate::world::Call;

/// A result as the runtime numbers it. Where both have one they have the same number; these it has not.
pub(crate) fn number(code: Code) -> u32 {
    match code {
        Code::UNSUPPORTED_PTX_VERSION => Code::NO_BINARY_FOR_GPU.0,
        Code::MISALIGNED_ADDRESS => 719, // launch failure
        Code::NOT_PERMITTED => 801,      // not supported
        Code(number) => number,
    }
}

/// The calls that say something where there is no device; all others say so.
pub(crate) fn needs_no_device(call: &str) -> bool {
    matches!(call, "hipDriverGetVersion" | "hipRuntimeGetVersion" | "hipGetDeviceCount")
}

/// Results with their names and texts.
const RESULTS: [(u32, &CStr, &CStr); 35] = [
    (0, c"hipSuccess", c"no error"),
    (1, c"hipErrorInvalidValue", c"invalid argument"),
    (2, c"hipErrorOutOfMemory", c"out of memory"),
    (3, c"hipErrorNotInitialized", c"initialization error"),
    (4, c"hipErrorDeinitialized", c"driver shutting down"),
    (100, c"hipErrorNoDevice", c"no ROCm-capable device is detected"),
    (101, c"hipErrorInvalidDevice", c"invalid device ordinal"),
    (200, c"hipErrorInvalidImage", c"device kernel image is invalid"),
    (201, c"hipErrorInvalidContext", c"invalid device context"),
    (209, c"hipErrorNoBinaryForGpu", c"no kernel image is available for execution on the device"),
    (214, c"hipErrorECCNotCorrectable", c"uncorrectable ECC error encountered"),
    (217, c"hipErrorPeerAccessUnsupported", c"peer access is not supported between these two devices"),
    (218, c"hipErrorInvalidKernelFile", c"invalid kernel file"),
    (304, c"hipErrorOperatingSystem", c"OS call failed or operation not supported on this OS"),
    (400, c"hipErrorInvalidHandle", c"invalid resource handle"),
    (401, c"hipErrorIllegalState", c"the operation cannot be performed in the present state"),
    (500, c"hipErrorNotFound", c"named symbol not found"),
    (600, c"hipErrorNotReady", c"device not ready"),
    (700, c"hipErrorIllegalAddress", c"an illegal memory access was encountered"),
    (701, c"hipErrorLaunchOutOfResources", c"too many resources requested for launch"),
    (702, c"hipErrorLaunchTimeOut", c"the launch timed out and was terminated"),
    (704, c"hipErrorPeerAccessAlreadyEnabled", c"peer access is already enabled"),
    (705, c"hipErrorPeerAccessNotEnabled", c"peer access has not been enabled"),
    (709, c"hipErrorContextIsDestroyed", c"context is destroyed"),
    (710, c"hipErrorAssert", c"device-side assert triggered"),
    (712, c"hipErrorHostMemoryAlreadyRegistered", c"part or all of the requested memory range is already mapped"),
    (713, c"hipErrorHostMemoryNotRegistered", c"pointer does not correspond to a registered memory region"),
    (719, c"hipErrorLaunchFailure", c"unspecified launch failure"),
    (801, c"hipErrorNotSupported", c"operation not supported"),
    (900, c"hipErrorStreamCaptureUnsupported", c"operation not permitted when stream is capturing"),
    (901, c"hipErrorStreamCaptureInvalidated", c"operation failed due to a previous error during capture"),
    (905, c"hipErrorStreamCaptureIsolation", c"dependency created on uncaptured work in another stream"),
    (
        906,
        c"hipErrorStreamCaptureImplicit",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (907, c"hipErrorCapturedEvent", c"operation not permitted on an event last recorded in a capturing stream"),
    (999, c"hipErrorUnknown", c"unknown error"),
];

/// What the runtime says of a number that it has no name for.
const UNKNOWN: (&CStr, &CStr) = (c"hipErrorUnknown", c"unknown error");

fn described(number: c_uint) -> Option<(&'static CStr, &'static CStr)> {
    RESULTS.iter().find(|(of, ..)| *of == number).map(|(_, name, text)| (*name, *text))
}

/// Flags of pinned memory that say how the processor and the device see it, and not to whom it belongs.
const COHERENCE: c_uint = 0xF000_0000;

/// `hipEventCreateWithFlags` knows four flags more than CUDA, for what it makes visible to whom.
const EVENT_SCOPES: c_uint = 0xE000_0000;

/// The attributes of devices that CUDA has too: HIP's number and CUDA's.
const ATTRIBUTES: [(c_int, c_int); 19] = [
    (2, 40),   // copy engines
    (3, 19),   // maps host memory
    (4, 91),   // host pointers of registered memory are device pointers
    (5, 13),   // clock
    (8, 31),   // concurrent kernels
    (12, 15),  // copies overlap kernels
    (16, 18),  // integrated
    (19, 38),  // L2
    (23, 75),  // compute capability, major
    (56, 1),   // threads per block
    (60, 36),  // memory clock
    (61, 76),  // compute capability, minor
    (63, 16),  // multiprocessors
    (67, 33),  // PCI bus
    (68, 34),  // PCI slot
    (69, 50),  // PCI domain
    (78, 78),  // priorities of streams
    (85, 41),  // one address space
    (88, 115), // memory pools
];
const WARP_SIZE: c_int = 87;
const HOST_REGISTER: c_int = 90;

/// What `hipMemcpyAsync` calls the directions.
const TO_DEVICE: c_int = 1;
const TO_HOST: c_int = 2;
const ON_DEVICE: c_int = 3;
const BY_ADDRESS: c_int = 4;

impl Call<'_> {
    /// A device's context: the device itself, which has always been there.
    fn eternal_context(&self, device: c_int) -> Outcome<u64> {
        let index = self.device_index(device)?;
        self.whole(index)?;
        Ok(self.state().context_of(self.world.config(), index))
    }

    fn choose_device(&self, device: c_int) -> Outcome<()> {
        let index = self.device_index(device)?;
        self.set_thread_device(index);
        Ok(())
    }

    /// Makes a context's device the thread's. None takes nothing back: the device stays as it was.
    fn choose_context(&self, context: u64) -> Outcome<()> {
        if context != 0 {
            let device = self.context_device(&self.state(), context)?;
            self.set_thread_device(device);
        }
        Ok(())
    }

    /// Counts the owners of a device's context for reports; the runtime counts none, and destroys nothing.
    fn count_owners(&self, device: c_int, more: bool) -> Outcome<()> {
        let index = self.device_index(device)?;
        let retained = &mut self.state().devices[index].retained;
        *retained = if more { *retained + 1 } else { retained.saturating_sub(1) };
        Ok(())
    }

    fn hip_attribute(&self, device: c_int, attribute: c_int) -> Outcome<c_int> {
        self.device_index(device)?;
        match attribute {
            WARP_SIZE => Ok(64),
            HOST_REGISTER => Ok(1),
            _ => match ATTRIBUTES.iter().find(|(hip, _)| *hip == attribute) {
                Some((_, cuda)) => self.attribute(device, *cuda),
                None if (0..=90).contains(&attribute) => Ok(0),
                None => Err(Code::INVALID_VALUE),
            },
        }
    }

    /// A device that there is no way to is a wrong number to the runtime.
    fn reach(&self, peer: c_int, enable: bool) -> Outcome<()> {
        let reached = self.set_reach(self.device_index(peer)?, enable);
        reached.map_err(|code| if code == Code::PEER_ACCESS_UNSUPPORTED { Code::INVALID_DEVICE } else { code })
    }

    /// The pools corrupt memory with two streams (CTranslate2, issue 2090), and their calls hang (ROCm/rocm-systems, issue
    /// 10529; ROCm/HIP, issue 3370). A program that calls them breaks a rule here.
    fn pools_do_harm(&self) -> Outcome<()> {
        self.violation(Rule::HarmfulCall, || "HIP's memory pools must not be used".to_owned());
        Err(Code::NOT_SUPPORTED)
    }

    /// A copy in whichever direction.
    fn copy_any_way(&self, dst: Handle, src: Handle, len: usize, kind: c_int, stream: Handle) -> Outcome<()> {
        let of_device = |at: Handle| address(at) >= BASE;
        let kind = match (kind, of_device(dst), of_device(src)) {
            (BY_ADDRESS, true, true) => ON_DEVICE,
            (BY_ADDRESS, true, false) => TO_DEVICE,
            (BY_ADDRESS, false, true) => TO_HOST,
            _ => kind,
        };
        let (len, stream) = (len as u64, address(stream));
        match kind {
            TO_DEVICE => self.upload(address(dst), src.cast::<u8>(), len, stream, false),
            TO_HOST => self.download(dst.cast(), address(src), len, stream, false),
            ON_DEVICE => self.across((address(dst), None), (address(src), None), len, stream, false),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }
}

/// How a bundle of code begins, in the format of clang-offload-bundler.
const BUNDLE: &[u8] = b"__CLANG_OFFLOAD_BUNDLE__";
/// The runtime hands so many bytes of a bundle to whoever reads its list.
const LISTED: usize = 4096;

/// Loads an image: a bundle of code, as the runtime reads it. A text in PTX is taken too, which no runtime of AMD's takes, so that
/// what is done with kernels can be tested; anything else is what the runtime calls a wrong image.
///
/// # Safety
/// The image must be null, end with a zero, or be a bundle that is as long as it says.
unsafe fn load_image(call: &Call<'_>, image: *const c_void) -> Outcome<u64> {
    if image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise. A text may end before the bundle's first word would.
    let is_bundle = BUNDLE.iter().enumerate().all(|(at, byte)| unsafe { *image.cast::<u8>().add(at) } == *byte);
    if is_bundle {
        // SAFETY: the caller's promise.
        return unsafe { parts(image.cast()) }.ok_or(Code::INVALID_IMAGE).and_then(|parts| call.load_code(&parts));
    }
    // SAFETY: the caller's promise.
    let found = unsafe { text(image) }.ok().filter(|text| text.contains(".version"));
    call.load_module(found.ok_or(Code::INVALID_IMAGE)?)
}

/// The parts of a bundle by their names; none where its list is not in the bytes that are read of it.
///
/// # Safety
/// The bundle must be as long as its list says, and as what is read of it.
unsafe fn parts<'i>(bundle: *const u8) -> Option<Vec<(&'i str, &'i [u8])>> {
    // SAFETY: the caller's promise.
    let listed = unsafe { std::slice::from_raw_parts(bundle, LISTED) };
    let number = |at: usize| Some(u64::from_le_bytes(listed.get(at..at + 8)?.try_into().ok()?) as usize);
    let mut at = BUNDLE.len() + 8;
    let part = |_| {
        let (from, len, name) = (number(at)?, number(at + 8)?, number(at + 16)?);
        let name = std::str::from_utf8(listed.get(at + 24..at.checked_add(24)?.checked_add(name)?)?).ok()?;
        at += 24 + name.len();
        // SAFETY: the caller's promise.
        Some((name, unsafe { std::slice::from_raw_parts(bundle.add(from), len) }))
    };
    (0..number(BUNDLE.len())?).map(part).collect()
}

#[allow(unused_unsafe, reason = "many calls only pass numbers on")]
mod calls {
    use super::*;

    exported! { Hip:
        fn hipInit(flags: c_uint) |call| if flags == 0 { call.init() } else { Err(Code::INVALID_VALUE) };
        fn hipDriverGetVersion(version: Out<c_int>) |call| give(version, || Ok(call.driver_version()));
        fn hipRuntimeGetVersion(version: Out<c_int>) |call| give(version, || Ok(call.driver_version()));

        fn hipGetDeviceCount(count: Out<c_int>) |call| {
            let found = call.device_count();
            give(count, || Ok(found as c_int))?;
            if found == 0 { Err(Code::NO_DEVICE) } else { Ok(()) }
        };
        fn hipDeviceGet(device: Out<c_int>, ordinal: c_int) |call| {
            give(device, || call.device_index(ordinal).map(|index| index as c_int))
        };
        fn hipDeviceGetName(name: Out<c_char>, len: c_int, device: c_int) |call| {
            give_text(name, len, &call.described(device)?.name)
        };
        fn hipDeviceTotalMem(bytes: Out<usize>, device: c_int) |call| {
            give(bytes, || Ok(call.described(device)?.total as usize))
        };
        fn hipDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) |call| {
            give(value, || call.hip_attribute(device, attribute))
        };
        fn hipDeviceGetPCIBusId(id: Out<c_char>, len: c_int, device: c_int) |call| {
            give_text(id, len, &call.described(device)?.pci_bus_id.to_lowercase())?;
            // It says so of a place that is too short, and has written what fits.
            if len < 13 { Err(Code::INVALID_VALUE) } else { Ok(()) }
        };
        fn hipDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) |call| give(uuid, || Ok(call.described(device)?.uuid));
        fn hipDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) |call| {
            give(can, || call.can_reach(device, peer).map(c_int::from))
        };
        fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) |call| {
            if flags == 0 { call.reach(peer, true) } else { Err(Code::INVALID_VALUE) }
        };
        fn hipDeviceDisablePeerAccess(peer: c_int) |call| call.reach(peer, false);
        // It succeeds and does nothing.
        fn hipCtxEnablePeerAccess(_peer: Handle, _flags: c_uint) |_call| Ok(());

        fn hipDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) |call| {
            give(context, || call.eternal_context(device).map(handle))?;
            call.count_owners(device, true)
        };
        fn hipDevicePrimaryCtxRelease(device: c_int) |call| call.count_owners(device, false);
        fn hipDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) |call| {
            let (_, is_active) = call.primary_state(device)?;
            give(flags, || Ok(0)).and_then(|()| give(active, || Ok(c_int::from(is_active))))
        };
        fn hipDevicePrimaryCtxReset(device: c_int) |call| call.device_index(device).map(drop);
        fn hipDeviceReset() |call| call.reset_primary(call.thread_device() as c_int);
        fn hipDeviceSynchronize() |call| call.synchronize_context();
        fn hipCtxGetCurrent(context: Out<Handle>) |call| {
            give(context, || call.eternal_context(call.thread_device() as c_int).map(handle))
        };
        fn hipCtxSetCurrent(context: Handle) |call| call.choose_context(address(context));
        fn hipCtxGetDevice(device: Out<c_int>) |call| give(device, || Ok(call.thread_device() as c_int));
        fn hipGetDevice(device: Out<c_int>) |call| give(device, || Ok(call.thread_device() as c_int));
        fn hipSetDevice(device: c_int) |call| call.choose_device(device);
        fn hipDeviceGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) |_call| {
            let (low, high) = Vendor::Hip.priorities();
            give(least, || Ok(low)).and_then(|()| give(greatest, || Ok(high)))
        };

        fn hipMemGetInfo(free: Out<usize>, total: Out<usize>) |call| {
            let (left, all) = call.memory_info()?;
            give(free, || Ok(left as usize)).and_then(|()| give(total, || Ok(all as usize)))
        };
        // No bytes are nowhere, and that is no error.
        fn hipMalloc(at: Out<Handle>, bytes: usize) |call| {
            give(at, || if bytes == 0 { Ok(std::ptr::null_mut()) } else { call.allocate(bytes as u64).map(handle) })
        };
        fn hipFree(at: Handle) |call| call.free(address(at));
        fn hipHostMalloc(at: Out<Handle>, bytes: usize, flags: c_uint) |call| {
            give(at, || {
                if bytes == 0 {
                    return Ok(std::ptr::null_mut());
                }
                let base = call.host_allocate(bytes as u64, flags & !COHERENCE)?;
                Ok(std::ptr::with_exposed_provenance_mut(base as usize))
            })
        };
        fn hipHostFree(at: Handle) |call| if at.is_null() { Ok(()) } else { call.unpin(address(at), false) };
        fn hipHostRegister(at: Handle, bytes: usize, flags: c_uint) |call| {
            call.host_register(at.cast::<u8>(), bytes as u64, flags)
        };
        fn hipHostUnregister(at: Handle) |call| call.unpin(address(at), true);
        fn hipHostGetDevicePointer(device: Out<Handle>, at: Handle, _flags: c_uint) |call| {
            give(device, || call.host_device_pointer(address(at)).map(handle))
        };

        fn hipMallocAsync(_at: Out<Handle>, _bytes: usize, _stream: Handle) |call| call.pools_do_harm();
        fn hipMallocFromPoolAsync(_at: Out<Handle>, _bytes: usize, _pool: Handle, _stream: Handle) |call| {
            call.pools_do_harm()
        };
        fn hipFreeAsync(_at: Handle, _stream: Handle) |call| call.pools_do_harm();
        fn hipMemPoolCreate(_pool: Out<Handle>, _properties: *const c_void) |call| call.pools_do_harm();
        fn hipDeviceGetDefaultMemPool(_pool: Out<Handle>, _device: c_int) |call| call.pools_do_harm();
        fn hipDeviceGetMemPool(_pool: Out<Handle>, _device: c_int) |call| call.pools_do_harm();

        fn hipMemcpyHtoD(dst: Address, src: *const c_void, bytes: usize) |call| {
            call.upload(dst, src.cast(), bytes as u64, 0, true)
        };
        fn hipMemcpyHtoDAsync(dst: Address, src: *const c_void, bytes: usize, stream: Handle) |call| {
            call.upload(dst, src.cast(), bytes as u64, address(stream), false)
        };
        fn hipMemcpyDtoH(dst: Handle, src: Address, bytes: usize) |call| {
            call.download(dst.cast(), src, bytes as u64, 0, true)
        };
        fn hipMemcpyDtoHAsync(dst: Handle, src: Address, bytes: usize, stream: Handle) |call| {
            call.download(dst.cast(), src, bytes as u64, address(stream), false)
        };
        fn hipMemcpyDtoDAsync(dst: Address, src: Address, bytes: usize, stream: Handle) |call| {
            call.across((dst, None), (src, None), bytes as u64, address(stream), false)
        };
        fn hipMemcpyAsync(dst: Handle, src: Handle, bytes: usize, kind: c_int, stream: Handle) |call| {
            call.copy_any_way(dst, src, bytes, kind, stream)
        };
        // The runtime looks at the addresses alone, so that a wrong number goes unnoticed. Not here.
        fn hipMemcpyPeerAsync(
            dst: Address, dst_device: c_int, src: Address, src_device: c_int, bytes: usize, stream: Handle,
        ) |call| {
            let dst = (dst, Some(call.eternal_context(dst_device)?));
            let src = (src, Some(call.eternal_context(src_device)?));
            call.across(dst, src, bytes as u64, address(stream), false)
        };
        fn hipMemsetD8Async(dst: Address, byte: c_uchar, count: usize, stream: Handle) |call| {
            call.fill(dst, byte, count as u64, address(stream))
        };
        fn hipMemsetAsync(dst: Address, value: c_int, count: usize, stream: Handle) |call| {
            call.fill(dst, value as u8, count as u64, address(stream))
        };

        fn hipStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) |call| {
            give(stream, || call.create_stream(flags, priority).map(handle))
        };
        fn hipStreamCreateWithFlags(stream: Out<Handle>, flags: c_uint) |call| {
            give(stream, || call.create_stream(flags, 0).map(handle))
        };
        // The documentation lets it wait for the stream, and the source does; a program that is right with CUDA's, which does
        // not, is right with both.
        fn hipStreamDestroy(stream: Handle) |call| call.destroy_stream(address(stream));
        fn hipStreamSynchronize(stream: Handle) |call| call.synchronize_stream(address(stream));
        fn hipStreamQuery(stream: Handle) |call| call.query_stream(address(stream));
        fn hipStreamGetPriority(stream: Handle, priority: Out<c_int>) |call| {
            give(priority, || call.stream_info(address(stream)).map(|(_, _, priority)| priority))
        };
        fn hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) |call| {
            if flags == 0 { call.wait_event(address(stream), address(event)) } else { Err(Code::INVALID_VALUE) }
        };
        fn hipStreamIsCapturing(stream: Handle, status: Out<c_int>) |call| {
            give(status, || call.capture_status(address(stream)))
        };
        fn hipStreamBeginCapture(stream: Handle, mode: c_int) |call| call.begin_capture(address(stream), mode);
        fn hipStreamEndCapture(stream: Handle, graph: Out<Handle>) |call| {
            give(graph, || call.end_capture(address(stream)).map(handle))
        };
        fn hipGraphDestroy(graph: Handle) |call| call.destroy_graph(address(graph));
        fn hipThreadExchangeStreamCaptureMode(mode: Out<c_int>) |_call| {
            if mode.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            let before = exchange_mode(mode.read())?;
            give(mode, || Ok(before))
        };
        fn hipLaunchHostFunc(stream: Handle, function: Option<unsafe extern "C" fn(Handle)>, argument: Handle) |call| {
            let function = function.ok_or(Code::INVALID_VALUE)?;
            call.launch_host_function(address(stream), HostCall { function, argument })
        };

        fn hipEventCreateWithFlags(event: Out<Handle>, flags: c_uint) |call| {
            give(event, || {
                let (scope, interprocess) = (flags & EVENT_SCOPES, flags & 4 != 0);
                if scope.count_ones() > 1 || interprocess && flags & 2 == 0 {
                    return Err(Code::INVALID_VALUE);
                }
                call.create_event(flags & !EVENT_SCOPES).map(handle)
            })
        };
        fn hipEventDestroy(event: Handle) |call| call.destroy_event(address(event));
        fn hipEventRecord(event: Handle, stream: Handle) |call| call.record(address(event), address(stream));
        fn hipEventQuery(event: Handle) |call| call.query_event(address(event));
        fn hipEventSynchronize(event: Handle) |call| call.synchronize_event(address(event));
        fn hipEventElapsedTime(millis: Out<f32>, start: Handle, end: Handle) |call| {
            give(millis, || call.elapsed(address(start), address(end)))
        };

        fn hipModuleLoadData(module: Out<Handle>, image: *const c_void) |call| {
            give(module, || load_image(call, image).map(handle))
        };
        fn hipModuleUnload(module: Handle) |call| call.unload_module(address(module));
        fn hipModuleGetFunction(function: Out<Handle>, module: Handle, name: *const c_char) |call| {
            give(function, || named_function(call, module, name))
        };
        fn hipModuleLaunchKernel(
            function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared: c_uint, stream: Handle, params: Out<Handle>, extra: Out<Handle>,
        ) |call| {
            let shape = Shape { blocks: [grid_x, grid_y, grid_z], threads: [block_x, block_y, block_z] };
            launch(call, function, shape, shared, stream, (params, extra))
        };
    }
}

/// The name of a result.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(error: c_uint) -> *const c_char {
    described(error).unwrap_or(UNKNOWN).0.as_ptr()
}

/// The description of a result.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(error: c_uint) -> *const c_char {
    described(error).unwrap_or(UNKNOWN).1.as_ptr()
}

/// The name of a result, written; unlike CUDA's call it writes one for a number that it does not know, too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDrvGetErrorName(error: c_uint, name: *mut *const c_char) -> u32 {
    // SAFETY: the caller's pointer, checked for null.
    let given = unsafe { give(name, || Ok(hipGetErrorName(error))) };
    if given.is_ok() && described(error).is_some() { 0 } else { Code::INVALID_VALUE.0 }
}

/// The description of a result, written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDrvGetErrorString(error: c_uint, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's pointer, checked for null.
    let given = unsafe { give(text, || Ok(hipGetErrorString(error))) };
    if given.is_ok() && described(error).is_some() { 0 } else { Code::INVALID_VALUE.0 }
}
