//! Declarations of the calls of Cambricon's CNDrv (`cn_api.h`, version 2.15.5), and what their results mean.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::backend::drivers::verbs::{Address, Code, ContextHandle, EventHandle, HostFunction, Meaning, StreamHandle};

/// `CNdev`.
pub(super) type Device = u64;

/// `CN_NOTIFIER_DISABLE_TIMING_ALL`.
pub(super) const NOTIFIER_WITHOUT_TIMING: c_uint = 4;
/// `CN_ERROR_NO_DEVICE`.
pub(super) const NO_DEVICE: c_int = 100_004;
/// `CN_ERROR_NOT_SUPPORTED`.
pub(super) const NOT_SUPPORTED: c_int = 100_050;

/// What a result code means, by the comments of `CNresult`. They call none sticky; those after which a context is of no use any more
/// are by what the comments say happened.
pub(super) fn meaning(code: Code) -> Meaning {
    const NOT_READY: c_int = 1;
    const DEINITIALIZED: c_int = 100_003;
    const SYSTEM_NOT_READY: c_int = 100_008;
    const DRIVER_MISMATCH: c_int = 100_009;
    const HOST_OUT_OF_MEMORY: c_int = 100_010;
    const ECC_UNCORRECTABLE: c_int = 100_016;
    const EXECUTED_TIMEOUT: c_int = 100_121;
    const INVOKE_ERROR: c_int = 100_200;
    match code.0 {
        NOT_READY => Meaning::NotReady,
        100_006 => Meaning::InvalidValue,
        HOST_OUT_OF_MEMORY | 100_100 | 100_101 => Meaning::OutOfMemory,
        NOT_SUPPORTED => Meaning::NotSupported,
        100_360..=100_366 => Meaning::OfCaptures,
        DEINITIALIZED | SYSTEM_NOT_READY | DRIVER_MISMATCH | ECC_UNCORRECTABLE | EXECUTED_TIMEOUT | INVOKE_ERROR => {
            Meaning::Sticks
        }
        // Kernels that failed: illegal instructions and addresses, assertions, traps.
        100_123..=100_138 => Meaning::Sticks,
        200_000 => Meaning::Unknown,
        _ => Meaning::Refused,
    }
}

table! { meaning;
    /// The required calls.
    Calls {
        init = "cnInit"(flags: c_uint);
        error_name = "cnGetErrorName"(code: c_int, name: *mut *const c_char);
        error_text = "cnGetErrorString"(code: c_int, text: *mut *const c_char);
        device_count = "cnDeviceGetCount"(count: *mut c_int);
        device = "cnDeviceGet"(device: *mut Device, number: c_int);
        device_name = "cnDeviceGetName"(name: *mut c_char, room: c_uint, device: Device);
        device_total = "cnDeviceTotalMem"(bytes: *mut u64, device: Device);
        pci_bus_id = "cnDeviceGetPCIBusId"(text: *mut c_char, room: c_int, device: Device);
        retain = "cnSharedContextAcquire"(context: *mut ContextHandle, device: Device);
        release = "cnSharedContextRelease"(device: Device);
        context_state = "cnSharedContextGetState"(device: Device, flags: *mut c_uint, active: *mut c_int);
        current = "cnCtxGetCurrent"(context: *mut ContextHandle);
        make_current = "cnCtxSetCurrent"(context: ContextHandle);
        priorities = "cnCtxGetQueuePriorityRange"(least: *mut c_int, greatest: *mut c_int);
        memory_info = "cnMemGetInfo"(free: *mut u64, total: *mut u64);
        allocate = "cnMalloc"(address: *mut Address, bytes: u64);
        free = "cnFree"(address: Address);
        host_allocate = "cnMallocHost"(address: *mut *mut c_void, bytes: u64);
        host_free = "cnFreeHost"(address: *mut c_void);
        copy_to_device = "cnMemcpyHtoDAsync_V2"(dst: Address, src: *const c_void, bytes: u64, queue: StreamHandle);
        copy_to_host = "cnMemcpyDtoHAsync_V2"(dst: *mut c_void, src: Address, bytes: u64, queue: StreamHandle);
        copy_on_device = "cnMemcpyDtoDAsync"(dst: Address, src: Address, bytes: u64, queue: StreamHandle);
        copy_to_device_now = "cnMemcpyHtoD"(dst: Address, src: *const c_void, bytes: u64);
        copy_to_host_now = "cnMemcpyDtoH"(dst: *mut c_void, src: Address, bytes: u64);
        queue_create = "cnCreateQueue"(queue: *mut StreamHandle, flags: c_uint);
        queue_create_with_priority = "cnCreateQueueWithPriority"(
            queue: *mut StreamHandle,
            flags: c_uint,
            priority: c_int,
        );
        queue_destroy = "cnDestroyQueue"(queue: StreamHandle);
        queue_sync = "cnQueueSync"(queue: StreamHandle);
        queue_wait = "cnQueueWaitNotifier"(queue: StreamHandle, notifier: EventHandle);
        host_function = "cnInvokeHostFunc"(queue: StreamHandle, function: HostFunction, data: *mut c_void);
        notifier_create = "cnCreateNotifier"(notifier: *mut EventHandle, flags: c_uint);
        notifier_destroy = "cnDestroyNotifier"(notifier: EventHandle);
        notifier_query = "cnQueryNotifier"(notifier: EventHandle);
        notifier_place = "cnPlaceNotifier"(notifier: EventHandle, queue: StreamHandle);
    }
}

table! { meaning;
    /// Copies in any direction, as of newer versions, which announce the end of the single ones.
    CopyCalls {
        copy = "cnMemcpyAsync_V3"(dst: Address, src: Address, bytes: u64, queue: StreamHandle);
    }
}

table! { meaning;
    /// The capture status of queues.
    CaptureCalls {
        is_capturing = "cnQueueIsCapturing"(queue: StreamHandle, status: *mut c_int);
    }
}

table! { meaning;
    /// The capture mode of a thread.
    CaptureModeCalls {
        exchange = "cnThreadExchangeQueueCaptureMode"(mode: *mut c_int);
    }
}

table! { meaning;
    /// The UUID of a device.
    UuidCalls {
        uuid = "cnDeviceGetUuid"(uuid: *mut [u8; 16], device: Device);
    }
}
