//! The calls of Cambricon's CNDrv, each a shim, and what is other there than with CUDA: memory, queues and notifiers belong to a
//! context, and no wait and no copy goes from one context of a device to another. Names and numbers are those of the header of
//! version 2.15.5, and so is what the calls do; nobody could run the library.
#![allow(non_snake_case, reason = "the names are the driver's")]
#![allow(unreachable_pub, reason = "exported by name")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are the driver's own")]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};

use crate::capture::exchange_mode;
use crate::code::{Code, Outcome};
use crate::ffi::{Address, Handle, Out, give, give_text, handle, number as address};
use crate::lane::HostCall;
use crate::memory::BASE;
use crate::pinned::PORTABLE;
use crate::vendor::{exported, own};
use crate::world::Call;

pub(crate) const HOST_OUT_OF_MEMORY: Code = own(100_010);
pub(crate) const QUEUE_INVALID: Code = own(100_060);
pub(crate) const NOTIFIER_INVALID: Code = own(100_080);

/// A result as the driver numbers it.
pub(crate) fn number(code: Code) -> u32 {
    match code {
        Code::NOT_READY => 1,
        Code::NOT_INITIALIZED => 100_002,
        Code::DEINITIALIZED => 100_003,
        Code::NO_DEVICE => 100_004,
        Code::INVALID_DEVICE => 100_005,
        Code::INVALID_VALUE => 100_006,
        Code::OPERATING_SYSTEM => 100_007,
        Code::INVALID_HANDLE => 100_014,
        Code::ECC_UNCORRECTABLE => 100_016,
        // What there is no way to is in no documentation.
        Code::NOT_SUPPORTED | Code::PEER_ACCESS_NOT_ENABLED | Code::PEER_ACCESS_UNSUPPORTED => 100_050,
        Code::NOT_PERMITTED => 100_051,
        Code::NO_STREAM => 100_061,
        Code::NO_EVENT => 100_081,
        Code::OUT_OF_MEMORY => 100_100,
        Code::MISALIGNED_ADDRESS => 100_130,
        Code::ILLEGAL_ADDRESS => 100_131,
        Code::LAUNCH_FAILED => 100_200,
        Code::INVALID_CONTEXT | Code::CONTEXT_IS_DESTROYED => 100_201,
        Code::NOT_FOUND => 100_301,
        // A default queue beside a capture, and a notifier of a capture, have no numbers of their own.
        Code::STREAM_CAPTURE_UNSUPPORTED | Code::STREAM_CAPTURE_IMPLICIT | Code::CAPTURED_EVENT => 100_360,
        Code::STREAM_CAPTURE_INVALIDATED => 100_361,
        Code::STREAM_CAPTURE_ISOLATION => 100_365,
        _ => 200_000,
    }
}

/// Results with their names, and texts in the stand-in's own words.
const RESULTS: [(u32, &CStr, &CStr); 30] = [
    (0, c"CN_SUCCESS", c"no error"),
    (1, c"CN_ERROR_NOT_READY", c"not ready"),
    (100_002, c"CN_ERROR_NOT_INITIALIZED", c"not initialized"),
    (100_003, c"CN_ERROR_DEINITIALIZED", c"the driver was uninstalled or broke down"),
    (100_004, c"CN_ERROR_NO_DEVICE", c"no device"),
    (100_005, c"CN_ERROR_INVALID_DEVICE", c"invalid device"),
    (100_006, c"CN_ERROR_INVALID_VALUE", c"invalid argument"),
    (100_007, c"CN_ERROR_OPERATING_SYSTEM", c"a call of the operating system failed"),
    (100_010, c"CN_ERROR_SYSTEM_OUT_OF_MEMORY", c"out of host memory"),
    (100_014, c"CN_ERROR_INVALID_HANDLE", c"invalid handle"),
    (100_015, c"CN_ERROR_ILLEGAL_STATE", c"illegal state"),
    (100_016, c"CN_ERROR_ECC_UNCORRECTABLE", c"uncorrectable memory error"),
    (100_050, c"CN_OPS_ERROR_NOT_SUPPORTED", c"not supported"),
    (100_051, c"CN_OPS_ERROR_NOT_PERMITTED", c"not permitted"),
    (100_052, c"CN_OPS_ERROR_TIMEOUT", c"timed out"),
    (100_060, c"CN_QUEUE_ERROR_INVALID", c"invalid queue"),
    (100_061, c"CN_QUEUE_ERROR_OUT_OF_RESOURCES", c"no more queues"),
    (100_080, c"CN_NOTIFIER_ERROR_INVALID", c"invalid notifier"),
    (100_081, c"CN_NOTIFIER_ERROR_OUT_OF_RESOURCES", c"no more notifiers"),
    (100_100, c"CN_MEMORY_ERROR_OUT_OF_MEMORY", c"out of device memory"),
    (100_101, c"CN_MEMORY_ERROR_OUT_OF_PROCESS_MAX_MEMORY", c"out of the memory that the process may have"),
    (100_102, c"CN_MEMORY_ERROR_INVALID_ADDRESS", c"invalid device address"),
    (100_130, c"CN_INVOKE_ERROR_MEMORY_MISALIGNED_ADDRESS", c"misaligned address"),
    (100_131, c"CN_INVOKE_ERROR_MEMORY_ILLEGAL_ADDRESS", c"illegal address"),
    (100_200, c"CN_INVOKE_ERROR", c"a kernel failed"),
    (100_201, c"CN_CONTEXT_ERROR_INVALID", c"invalid context"),
    (100_360, c"CN_ERROR_QUEUE_CAPTURE_UNSUPPORTED", c"not permitted while the queue captures"),
    (100_361, c"CN_ERROR_QUEUE_CAPTURE_INVALIDATED", c"the capture was broken before"),
    (100_365, c"CN_ERROR_QUEUE_CAPTURE_ISOLATION", c"a dependency across the capture's boundary"),
    (200_000, c"CN_ERROR_UNKNOWN", c"unknown error"),
];

/// What the driver says of any other number, and succeeds.
const NOT_A_RESULT: &CStr = c"This error code is not in the scope of the CNresult enumeration";

/// No time is taken, so that it does not count for the device's notifiers.
pub(crate) const NO_TIMING: c_uint = 4;
/// No time by software; no time at all; for other processes.
pub(crate) const NOTIFIER_FLAGS: c_uint = 2 | NO_TIMING | 8;

/// `CNdev`.
type Device = u64;

fn ordinal(device: Device) -> Outcome<c_int> {
    c_int::try_from(device).map_err(|_| Code::INVALID_DEVICE)
}

/// A queue; the names of the two default ones are the other way round.
fn queue(handle: Handle) -> u64 {
    match address(handle) {
        1 => 2,
        2 => 1,
        queue => queue,
    }
}

impl Call<'_> {
    fn mlu_attribute(&self, device: Device, attribute: c_int) -> Outcome<c_int> {
        let device = ordinal(device)?;
        let config = self.described(device)?;
        let (domain, bus, slot) = config.pci_parts();
        let mib = c_int::try_from(config.total >> 20).unwrap_or(c_int::MAX);
        Ok(match attribute {
            0x01 => config.compute.0,
            0x02 => config.compute.1,
            0x101 => config.streams_limit.map_or(4096, |limit| limit as c_int),
            0x102 => config.events_limit.map_or(4096, |limit| limit as c_int),
            0x103 => 1,
            0x205 => config.multiprocessors,
            0x20A => config.compute.0 * 100 + config.compute.1 * 10,
            0x30F => c_int::from(config.integrated),
            0x312 | 0x405 => mib,
            0x406 => bus,
            0x407 => slot,
            0x408 => domain,
            // Among others: no waits between contexts.
            _ if (0x01..=0x0FFF).contains(&attribute) => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    /// A name is given as a whole or not at all.
    ///
    /// # Safety
    /// `at` must be null or good for `room` bytes.
    unsafe fn whole_name(&self, at: *mut c_char, room: c_uint, device: Device) -> Outcome<()> {
        let name = &self.described(ordinal(device)?)?.name;
        if name.len() as u64 >= u64::from(room) {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { give_text(at, c_int::try_from(room).unwrap_or(c_int::MAX), name) }
    }

    /// A copy in the direction that the addresses say.
    fn copy_by_address(&self, dst: Address, src: Address, len: u64, queue: u64) -> Outcome<()> {
        let host = |address: Address| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        match (dst >= BASE, src >= BASE) {
            (true, true) => self.across((dst, None), (src, None), len, queue, false),
            (true, false) => self.upload(dst, host(src).cast_const(), len, queue, false),
            (false, true) => self.download(host(dst), src, len, queue, false),
            (false, false) => Err(Code::INVALID_VALUE),
        }
    }

    fn host_memory(&self, len: u64) -> Outcome<Handle> {
        let base = self.host_allocate(len, PORTABLE);
        let base = base.map_err(|code| if code == Code::OUT_OF_MEMORY { HOST_OUT_OF_MEMORY } else { code })?;
        Ok(std::ptr::with_exposed_provenance_mut(base as usize))
    }
}

#[allow(unused_unsafe, reason = "many calls only pass numbers on")]
mod calls {
    use super::*;

    exported! { CnDrv:
        fn cnInit(flags: c_uint) |call| if flags == 0 { call.init() } else { Err(Code::INVALID_VALUE) };
        fn cnDriverGetVersion(major: Out<c_int>, minor: Out<c_int>, patch: Out<c_int>) |call| {
            let version = call.world.config().cndrv_version;
            give(major, || Ok(version.0))?;
            give(minor, || Ok(version.1)).and_then(|()| give(patch, || Ok(version.2)))
        };
        fn cnGetLibVersion(major: Out<c_int>, minor: Out<c_int>, patch: Out<c_int>) |call| {
            let version = call.world.config().cndrv_version;
            give(major, || Ok(version.0))?;
            give(minor, || Ok(version.1)).and_then(|()| give(patch, || Ok(version.2)))
        };

        fn cnDeviceGetCount(count: Out<c_int>) |call| give(count, || Ok(call.device_count() as c_int));
        fn cnDeviceGet(device: Out<Device>, number: c_int) |call| {
            give(device, || call.device_index(number).map(|index| index as Device))
        };
        fn cnDeviceGetName(name: Out<c_char>, room: c_uint, device: Device) |call| call.whole_name(name, room, device);
        fn cnDeviceTotalMem(bytes: Out<u64>, device: Device) |call| {
            give(bytes, || Ok(call.described(ordinal(device)?)?.total))
        };
        fn cnDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: Device) |call| {
            give(value, || call.mlu_attribute(device, attribute))
        };
        fn cnDeviceGetPCIBusId(id: Out<c_char>, len: c_int, device: Device) |call| {
            give_text(id, len, &call.described(ordinal(device)?)?.pci_bus_id)
        };
        fn cnDeviceGetUuid(uuid: Out<[u8; 16]>, device: Device) |call| {
            give(uuid, || Ok(call.described(ordinal(device)?)?.uuid))
        };
        fn cnDeviceCanPeerAble(can: Out<c_int>, from: Device, to: Device) |call| {
            give(can, || call.can_reach(ordinal(from)?, ordinal(to)?).map(c_int::from))
        };

        fn cnSharedContextAcquire(context: Out<Handle>, device: Device) |call| {
            give(context, || call.retain(ordinal(device)?).map(handle))
        };
        fn cnSharedContextRelease(device: Device) |call| call.release(ordinal(device)?);
        fn cnSharedContextGetState(device: Device, flags: Out<c_uint>, state: Out<c_int>) |call| {
            let (set, is_active) = call.primary_state(ordinal(device)?)?;
            give(flags, || Ok(set)).and_then(|()| give(state, || Ok(c_int::from(is_active))))
        };
        fn cnCtxCreate(context: Out<Handle>, _flags: c_uint, device: Device) |call| {
            give(context, || call.create_context(ordinal(device)?).map(handle))
        };
        fn cnCtxDestroy(context: Handle) |call| call.destroy_context(address(context));
        fn cnCtxGetCurrent(context: Out<Handle>) |_call| give(context, || Ok(handle(Call::current_context())));
        fn cnCtxSetCurrent(context: Handle) |call| call.make_current(address(context));
        fn cnCtxGetDevice(device: Out<Device>) |call| {
            give(device, || call.device(&call.state()).map(|index| index as Device))
        };
        fn cnCtxSync() |call| call.synchronize_context();
        fn cnCtxGetQueuePriorityRange(least: Out<c_int>, greatest: Out<c_int>) |call| {
            call.device(&call.state())?;
            let (low, high) = call.vendor.priorities();
            give(least, || Ok(low)).and_then(|()| give(greatest, || Ok(high)))
        };

        fn cnMemGetInfo(free: Out<u64>, total: Out<u64>) |call| {
            let (left, all) = call.memory_info()?;
            give(free, || Ok(left)).and_then(|()| give(total, || Ok(all)))
        };
        fn cnMalloc(at: Out<Address>, bytes: u64) |call| give(at, || call.allocate(bytes));
        // For a peer's kernels, which are not here.
        fn cnMallocPeerAble(at: Out<Address>, bytes: u64) |call| give(at, || call.allocate(bytes));
        fn cnFree(at: Address) |call| if at == 0 { Err(Code::INVALID_VALUE) } else { call.free(at) };
        fn cnMallocHost(at: Out<Handle>, bytes: u64) |call| give(at, || call.host_memory(bytes));
        fn cnFreeHost(at: Handle) |call| if at.is_null() { Err(Code::INVALID_VALUE) } else { call.unpin(address(at), false) };

        fn cnMemcpyHtoD(dst: Address, src: *const c_void, bytes: u64) |call| call.upload(dst, src.cast(), bytes, 0, true);
        fn cnMemcpyDtoH(dst: Handle, src: Address, bytes: u64) |call| call.download(dst.cast(), src, bytes, 0, true);
        fn cnMemcpyHtoDAsync_V2(dst: Address, src: *const c_void, bytes: u64, on: Handle) |call| {
            call.upload(dst, src.cast(), bytes, queue(on), false)
        };
        fn cnMemcpyDtoHAsync_V2(dst: Handle, src: Address, bytes: u64, on: Handle) |call| {
            call.download(dst.cast(), src, bytes, queue(on), false)
        };
        fn cnMemcpyDtoDAsync(dst: Address, src: Address, bytes: u64, on: Handle) |call| {
            call.across((dst, None), (src, None), bytes, queue(on), false)
        };
        fn cnMemcpyAsync_V3(dst: Address, src: Address, bytes: u64, on: Handle) |call| {
            call.copy_by_address(dst, src, bytes, queue(on))
        };
        fn cnMemcpyPeerAsync(
            dst: Address, dst_context: Handle, src: Address, src_context: Handle, bytes: u64, on: Handle,
        ) |call| {
            let (dst, src) = ((dst, Some(address(dst_context))), (src, Some(address(src_context))));
            call.across(dst, src, bytes, queue(on), false)
        };
        fn cnMemsetD8Async(at: Address, byte: c_uchar, count: u64, on: Handle) |call| {
            call.fill(at, byte, count, queue(on))
        };

        // No queue takes turns with the default one.
        fn cnCreateQueue(made: Out<Handle>, flags: c_uint) |call| {
            give(made, || if flags == 0 { call.create_stream(1, 0).map(handle) } else { Err(Code::INVALID_VALUE) })
        };
        fn cnCreateQueueWithPriority(made: Out<Handle>, flags: c_uint, priority: c_int) |call| {
            give(made, || if flags == 0 { call.create_stream(1, priority).map(handle) } else { Err(Code::INVALID_VALUE) })
        };
        fn cnQueueGetPriority(of: Handle, priority: Out<c_int>) |call| {
            give(priority, || call.stream_info(queue(of)).map(|(_, _, priority)| priority))
        };
        // Both return at once, whatever is pending.
        fn cnDestroyQueue(gone: Handle) |call| call.destroy_stream(queue(gone));
        fn cnDestroyNotifier(notifier: Handle) |call| call.destroy_event(address(notifier));
        fn cnQueryQueue(of: Handle) |call| call.query_stream(queue(of));
        fn cnQueueSync(of: Handle) |call| call.synchronize_stream(queue(of));
        fn cnQueueWaitNotifier(waits: Handle, notifier: Handle) |call| call.wait_event(queue(waits), address(notifier));
        fn cnInvokeHostFunc(on: Handle, function: Option<unsafe extern "C" fn(Handle)>, argument: Handle) |call| {
            let function = function.ok_or(Code::INVALID_VALUE)?;
            call.launch_host_function(queue(on), HostCall { function, argument })
        };
        fn cnQueueIsCapturing(of: Handle, status: Out<c_int>) |call| give(status, || call.capture_status(queue(of)));
        fn cnQueueBeginCapture(of: Handle, mode: c_int) |call| call.begin_capture(queue(of), mode);
        fn cnQueueEndCapture(of: Handle, graph: Out<Handle>) |call| {
            give(graph, || call.end_capture(queue(of)).map(handle))
        };
        fn cnThreadExchangeQueueCaptureMode(mode: Out<c_int>) |_call| {
            if mode.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            let before = exchange_mode(mode.read())?;
            give(mode, || Ok(before))
        };

        fn cnCreateNotifier(notifier: Out<Handle>, flags: c_uint) |call| {
            give(notifier, || call.create_event(flags).map(handle))
        };
        fn cnPlaceNotifier(notifier: Handle, on: Handle) |call| call.record(address(notifier), queue(on));
        fn cnQueryNotifier(notifier: Handle) |call| call.query_event(address(notifier));
        fn cnWaitNotifier(notifier: Handle) |call| call.synchronize_event(address(notifier));
    }
}

/// # Safety
/// `at` must be null or good for a write.
unsafe fn describe(
    error: c_uint,
    at: *mut *const c_char,
    pick: impl Fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> u32 {
    let found = RESULTS.iter().find(|(of, ..)| *of == error).map(|(_, name, text)| pick((name, text)));
    // SAFETY: the caller's promise.
    let given = unsafe { give(at, || Ok(found.unwrap_or(NOT_A_RESULT).as_ptr())) };
    given.err().map_or(0, number)
}

/// The name of a result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnGetErrorName(error: c_uint, name: *mut *const c_char) -> u32 {
    // SAFETY: the caller's pointer.
    unsafe { describe(error, name, |(name, _)| name) }
}

/// The description of a result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnGetErrorString(error: c_uint, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's pointer.
    unsafe { describe(error, text, |(_, text)| text) }
}
