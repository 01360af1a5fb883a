//! Declarations of the calls of Ascend's ACL (`acl_rt.h`), as CANN 8.0 and later have them, and what their results mean.

use std::ffi::{c_char, c_int, c_void};

use crate::backend::drivers::verbs::{Code, ContextHandle, EventHandle, HostFunction, Meaning, StreamHandle};

/// `ACL_HBM_MEM`. Devices without such memory answer for what they have.
pub(super) const DEVICE_MEMORY: c_int = 1;
/// `ACL_MEM_MALLOC_HUGE_FIRST`, and the same for memory that peers reach.
pub(super) const HUGE_FIRST: c_int = 0;
pub(super) const HUGE_FIRST_FOR_PEERS: c_int = 3;
/// `ACL_EVENT_SYNC`: streams can wait for the event.
pub(super) const EVENT_FOR_STREAMS: u32 = 1;
/// `ACL_EVENT_RECORDED_STATUS_COMPLETE`. Not ready is 0.
pub(super) const EVENT_COMPLETE: c_int = 1;
/// `ACL_STOP_ON_FAILURE`.
pub(super) const STOP_ON_FAILURE: u64 = 1;
/// `ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE`.
pub(super) const TOTAL_MEMORY: c_int = 301;

/// `aclrtMemcpyKind`.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum CopyKind {
    ToDevice = 1,
    ToHost = 2,
    OnDevices = 3,
}

/// The codes that are named: those after which something is done other than to report them, and those that users meet.
pub(super) const NAMES: [(c_int, &str); 21] = [
    (100_000, "ACL_ERROR_INVALID_PARAM"),
    (UNINITIALIZED, "ACL_ERROR_UNINITIALIZE"),
    (REPEATED_INIT, "ACL_ERROR_REPEAT_INITIALIZE"),
    (STUB, "ACL_ERROR_COMPILING_STUB_MODE"),
    (200_000, "ACL_ERROR_BAD_ALLOC"),
    (NOT_SUPPORTED, "ACL_ERROR_API_NOT_SUPPORT"),
    (107_000, "ACL_ERROR_RT_PARAM_INVALID"),
    (107_001, "ACL_ERROR_RT_INVALID_DEVICEID"),
    (NO_CONTEXT, "ACL_ERROR_RT_CONTEXT_NULL"),
    (107_003, "ACL_ERROR_RT_STREAM_CONTEXT"),
    (207_000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT"),
    (207_001, "ACL_ERROR_RT_MEMORY_ALLOCATION"),
    (NO_DEVICE, "ACL_ERROR_RT_NO_DEVICE"),
    (207_007, "ACL_ERROR_RT_NO_EVENT_RESOURCE"),
    (207_008, "ACL_ERROR_RT_NO_STREAM_RESOURCE"),
    (207_018, "ACL_ERROR_RT_DEVICE_OOM"),
    (507_010, "ACL_ERROR_RT_LOST_HEARTBEAT"),
    (507_013, "ACL_ERROR_RT_SYS_DMA_ERROR"),
    (507_014, "ACL_ERROR_RT_AICORE_TIMEOUT"),
    (507_015, "ACL_ERROR_RT_AICORE_EXCEPTION"),
    (507_899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR"),
];

pub(super) const UNINITIALIZED: c_int = 100_001;
/// `aclInit` was called before, which counts this call, too.
pub(super) const REPEATED_INIT: c_int = 100_002;
/// The library is the one that programs are linked with on machines without a driver.
pub(super) const STUB: c_int = 100_039;
pub(super) const NOT_SUPPORTED: c_int = 200_001;
/// No device is set in the thread.
pub(super) const NO_CONTEXT: c_int = 107_002;
pub(super) const NO_DEVICE: c_int = 207_004;

/// What a result code means, by `rt_error_codes.h` and by what CANN's runtime does with the state of contexts and devices
/// (`context.cc` of hicann/runtime). Where a stream stops on failure, the code of a failed task comes back from every later call of
/// the context. 507000 and 507899 are what the runtime says of any refusal that it has no other code for.
pub(super) fn meaning(code: Code) -> Meaning {
    const TASK_ABORTED: c_int = 107_022;
    const STREAM_NOT_COMPLETE: c_int = 507_004;
    const EVENT_NOT_COMPLETE: c_int = 507_006;
    const TASK_NOT_SUPPORTED: c_int = 507_009;
    const LOST_HEARTBEAT: c_int = 507_010;
    const DEVICE_SETUP: c_int = 507_033;
    const HOST_LINK_CLOSED: c_int = 507_901;
    const CAPTURE_INVALIDATED: c_int = 507_903;
    const NOT_REGISTERED: c_int = 507_911;
    match code.0 {
        100_000 | 107_000 => Meaning::InvalidValue,
        200_000 | 207_001 | 207_018 => Meaning::OutOfMemory,
        NOT_SUPPORTED | 200_006 | 207_000 | TASK_NOT_SUPPORTED => Meaning::NotSupported,
        // Tasks are aborted for a time; then the runtime goes on.
        STREAM_NOT_COMPLETE | EVENT_NOT_COMPLETE | TASK_ABORTED => Meaning::NotReady,
        NOT_REGISTERED => Meaning::NotRegistered,
        107_024..=107_045 | CAPTURE_INVALIDATED => Meaning::OfCaptures,
        LOST_HEARTBEAT | DEVICE_SETUP | HOST_LINK_CLOSED => Meaning::Sticks,
        // Failed copies (507013), kernels on the cores of all kinds, and traps.
        507_013..=507_018 | 507_034..=507_036 | 507_042..=507_045 => Meaning::Sticks,
        // Errors of memory and of links.
        507_053..=507_057 => Meaning::Sticks,
        _ => Meaning::Refused,
    }
}

table! { meaning;
    /// The required calls. Device memory is by pointer.
    Calls {
        init = "aclInit"(configuration: *const c_char);
        device_count = "aclrtGetDeviceCount"(count: *mut u32);
        set_device = "aclrtSetDevice"(device: i32);
        reset_device = "aclrtResetDevice"(device: i32);
        can_access_peer = "aclrtDeviceCanAccessPeer"(can: *mut i32, device: i32, peer: i32);
        enable_peer_access = "aclrtDeviceEnablePeerAccess"(peer: i32, flags: u32);
        current = "aclrtGetCurrentContext"(context: *mut ContextHandle);
        make_current = "aclrtSetCurrentContext"(context: ContextHandle);
        memory_info = "aclrtGetMemInfo"(kind: c_int, free: *mut usize, total: *mut usize);
        allocate = "aclrtMalloc"(address: *mut *mut c_void, bytes: usize, policy: c_int);
        free = "aclrtFree"(address: *mut c_void);
        host_allocate = "aclrtMallocHost"(address: *mut *mut c_void, bytes: usize);
        host_free = "aclrtFreeHost"(address: *mut c_void);
        copy = "aclrtMemcpyAsync"(
            dst: *mut c_void,
            room: usize,
            src: *const c_void,
            bytes: usize,
            kind: c_int,
            stream: StreamHandle,
        );
        copy_now = "aclrtMemcpy"(dst: *mut c_void, room: usize, src: *const c_void, bytes: usize, kind: c_int);
        stream_create = "aclrtCreateStreamWithConfig"(stream: *mut StreamHandle, priority: u32, flags: u32);
        stream_stops = "aclrtSetStreamFailureMode"(stream: StreamHandle, mode: u64);
        stream_destroy = "aclrtDestroyStream"(stream: StreamHandle);
        stream_synchronize = "aclrtSynchronizeStream"(stream: StreamHandle);
        stream_wait = "aclrtStreamWaitEvent"(stream: StreamHandle, event: EventHandle);
        event_create = "aclrtCreateEventExWithFlag"(event: *mut EventHandle, flags: u32);
        event_destroy = "aclrtDestroyEvent"(event: EventHandle);
        event_query = "aclrtQueryEventStatus"(event: EventHandle, status: *mut c_int);
        event_record = "aclrtRecordEvent"(event: EventHandle, stream: StreamHandle);
    }
}

table! { meaning;
    /// Properties of devices that are not open.
    DeviceInfoCalls {
        info = "aclrtGetDeviceInfo"(device: u32, attribute: c_int, value: *mut i64);
    }
}

table! { meaning;
    /// Addresses of devices on the bus.
    BusCalls {
        pci_bus_id = "aclrtDeviceGetPCIBusId"(device: i32, text: *mut c_char, room: i32);
    }
}

table! { meaning;
    /// Functions of the host in streams.
    HostFunctionCalls {
        launch = "aclrtLaunchHostFunc"(stream: StreamHandle, function: HostFunction, data: *mut c_void);
    }
}

table! { meaning;
    /// The capture status of streams.
    CaptureCalls {
        info = "aclmdlRICaptureGetInfo"(stream: StreamHandle, status: *mut c_int, model: *mut *mut c_void);
    }
}

table! { meaning;
    /// The capture mode of a thread.
    CaptureModeCalls {
        exchange = "aclmdlRICaptureThreadExchangeMode"(mode: *mut c_int);
    }
}

table! { meaning;
    /// The state of a device's default context.
    ContextStateCalls {
        state = "aclrtGetPrimaryCtxState"(device: i32, flags: *mut u32, active: *mut i32);
    }
}

/// `aclrtGetSocName`: the model of the devices, or null.
pub(super) type SocName = unsafe extern "C" fn() -> *const c_char;

/// `aclGetRecentErrMsg`: what happened in this thread, which is forgotten then; or null.
pub(super) type RecentMessage = unsafe extern "C" fn() -> *const c_char;
