//! Declarations of the driver's calls, and their lookup.
//!
//! Results are integers: a driver may be newer than any list of codes, and an enumeration must not hold an undeclared value.
//! All calls of a table are looked up when the driver is loaded, so that none is missing at its first use. The names and
//! types are those of the CUDA driver API; a unit test compares the numbers with cudarc's declarations.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;

use libloading::Library;

/// Declares a handle type of the driver.
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $what:ident) => {
        #[doc(hidden)]
        pub(crate) enum $what {}
        $(#[$doc])*
        pub(crate) type $name = *mut $what;
    };
}

handle!(/// `CUcontext`.
    ContextHandle, OpaqueContext);
handle!(/// `CUstream`.
    StreamHandle, OpaqueStream);
handle!(/// `CUevent`.
    EventHandle, OpaqueEvent);
handle!(/// `CUmemoryPool`.
    PoolHandle, OpaquePool);
handle!(/// `CUmodule`.
    ModuleHandle, OpaqueModule);
handle!(/// `CUfunction`.
    FunctionHandle, OpaqueFunction);

/// `CUdevice`, a number.
pub(super) type DeviceHandle = c_int;

/// `CUdeviceptr`.
pub(super) type Address = u64;

/// `CUhostFn`.
pub(super) type HostFunction = unsafe extern "system" fn(*mut c_void);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

impl Location {
    /// A device by its number.
    pub(super) fn device(number: u32) -> Location {
        Location { kind: LOCATION_DEVICE, id: c_int::try_from(number).unwrap_or(c_int::MAX) }
    }
}

/// `CUmemPoolProps`, with zeros for the fields that newer versions name.
#[repr(C)]
pub(super) struct PoolProperties {
    pub(super) allocation: c_int,
    pub(super) handles: c_int,
    pub(super) location: Location,
    pub(super) security: *mut c_void,
    pub(super) reserved: [u8; 64],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(super) struct Access {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
pub(super) struct CopyAttributes {
    pub(super) source_order: c_int,
    pub(super) source_hint: Location,
    pub(super) destination_hint: Location,
    pub(super) flags: c_uint,
}

impl CopyAttributes {
    /// Sources are read in stream order; no hints about the location of memory.
    pub(super) const IN_STREAM_ORDER: CopyAttributes = CopyAttributes {
        source_order: 1,
        source_hint: Location { kind: 0, id: 0 },
        destination_hint: Location { kind: 0, id: 0 },
        flags: 0,
    };
}

pub(super) const LOCATION_DEVICE: c_int = 1;
pub(super) const ALLOCATION_PINNED: c_int = 1;
pub(super) const ACCESS_READ_WRITE: c_int = 3;
pub(super) const POOL_RESERVED_NOW: c_int = 5;
pub(super) const EVENT_WITHOUT_TIMING: c_uint = 2;
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const REGISTER_PORTABLE: c_uint = 1;
pub(super) const HOST_ALLOCATION_PORTABLE: c_uint = 1;
pub(super) const CAPTURE_NONE: c_int = 0;
pub(super) const CAPTURE_MODE_RELAXED: c_int = 2;

/// The values of `CUdevice_attribute` that are used.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum Attribute {
    Integrated = 18,
    PciBus = 33,
    PciDevice = 34,
    CopyEngines = 40,
    PciDomain = 50,
    ComputeMajor = 75,
    ComputeMinor = 76,
    MemoryPools = 115,
}

/// A result that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) c_int);

impl Code {
    pub(super) const INVALID_VALUE: Code = Code(1);
    pub(super) const OUT_OF_MEMORY: Code = Code(2);
    pub(super) const DEINITIALIZED: Code = Code(4);
    pub(super) const NOT_READY: Code = Code(600);
    pub(super) const PEER_ACCESS_ALREADY_ENABLED: Code = Code(704);
    pub(super) const NOT_REGISTERED: Code = Code(713);
    pub(super) const NOT_SUPPORTED: Code = Code(801);
    pub(super) const CAPTURE_IMPLICIT: Code = Code(906);
    pub(super) const UNKNOWN: Code = Code(999);

    /// Whether the error is sticky: every later call of the context returns it, and by its documentation the process must end
    /// before the device can be used again.
    pub(super) fn sticks(self) -> bool {
        const ECC_UNCORRECTABLE: c_int = 214;
        const NVLINK_UNCORRECTABLE: c_int = 220;
        const CONTAINED: c_int = 226;
        const ILLEGAL_ADDRESS: c_int = 700;
        const LAUNCH_TIMEOUT: c_int = 702;
        const CONTEXT_IS_DESTROYED: c_int = 709;
        const ASSERT: c_int = 710;
        const HARDWARE_STACK_ERROR: c_int = 714;
        const ILLEGAL_INSTRUCTION: c_int = 715;
        const MISALIGNED_ADDRESS: c_int = 716;
        const INVALID_ADDRESS_SPACE: c_int = 717;
        const INVALID_PC: c_int = 718;
        const LAUNCH_FAILED: c_int = 719;
        const TENSOR_MEMORY_LEAK: c_int = 721;
        const MPS_RPC_FAILURE: c_int = 806;
        const MPS_CLIENT_TERMINATED: c_int = 810;
        self == Code::DEINITIALIZED
            || self == Code::UNKNOWN
            || matches!(
                self.0,
                ECC_UNCORRECTABLE
                    | NVLINK_UNCORRECTABLE
                    | CONTAINED
                    | ILLEGAL_ADDRESS
                    | LAUNCH_TIMEOUT
                    | CONTEXT_IS_DESTROYED
                    | ASSERT
                    | HARDWARE_STACK_ERROR
                    | ILLEGAL_INSTRUCTION
                    | MISALIGNED_ADDRESS
                    | INVALID_ADDRESS_SPACE
                    | INVALID_PC
                    | LAUNCH_FAILED
                    | TENSOR_MEMORY_LEAK
                    | MPS_RPC_FAILURE
                    | MPS_CLIENT_TERMINATED
            )
    }

    /// Whether a capture prevents the call, which may succeed once the capture has ended.
    pub(super) fn is_of_captures(self) -> bool {
        (900..=908).contains(&self.0)
    }
}

/// A call that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) call: &'static str,
    pub(super) code: Code,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {}", self.call, self.code.0)
    }
}

/// The result of a call.
pub(super) type Outcome<T = ()> = Result<T, Failure>;

/// Declares a table of calls, each with its name in the driver's library.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($verb:ident = $symbol:literal($($arg:ident: $type:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        pub(super) struct $name { $($verb: unsafe extern "system" fn($($type),*) -> c_int,)* }

        impl $name {
            /// Finds all calls of the table.
            ///
            /// # Errors
            /// The name of the first call that the library does not have.
            pub(super) fn find(library: &Library) -> Result<$name, &'static str> {
                // SAFETY: the types are those of the documented calls. The library is never closed.
                Ok($name { $($verb: *unsafe { library.get($symbol) }.map_err(|_| $symbol)?,)* })
            }

            $(
                /// # Safety
                /// The arguments are as the documentation of the call requires.
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's call has")]
                pub(super) unsafe fn $verb(&self, $($arg: $type),*) -> Outcome {
                    // SAFETY: the caller's promise.
                    match unsafe { (self.$verb)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(Failure { call: $symbol, code: Code(code) }),
                    }
                }
            )*
        }
    };
}

table! {
    /// The required calls.
    Calls {
        init = "cuInit"(flags: c_uint);
        driver_version = "cuDriverGetVersion"(version: *mut c_int);
        error_name = "cuGetErrorName"(code: c_int, name: *mut *const c_char);
        error_text = "cuGetErrorString"(code: c_int, text: *mut *const c_char);
        device_count = "cuDeviceGetCount"(count: *mut c_int);
        device = "cuDeviceGet"(device: *mut DeviceHandle, number: c_int);
        device_name = "cuDeviceGetName"(name: *mut c_char, room: c_int, device: DeviceHandle);
        device_total = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: DeviceHandle);
        device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: DeviceHandle);
        can_access_peer = "cuDeviceCanAccessPeer"(can: *mut c_int, device: DeviceHandle, peer: DeviceHandle);
        context_retain = "cuDevicePrimaryCtxRetain"(context: *mut ContextHandle, device: DeviceHandle);
        context_release = "cuDevicePrimaryCtxRelease_v2"(device: DeviceHandle);
        context_current = "cuCtxGetCurrent"(context: *mut ContextHandle);
        make_context_current = "cuCtxSetCurrent"(context: ContextHandle);
        enable_peer_access = "cuCtxEnablePeerAccess"(peer: ContextHandle, flags: c_uint);
        stream_priorities = "cuCtxGetStreamPriorityRange"(least: *mut c_int, greatest: *mut c_int);
        memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
        allocate = "cuMemAlloc_v2"(address: *mut Address, bytes: usize);
        free = "cuMemFree_v2"(address: Address);
        host_allocate = "cuMemHostAlloc"(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        host_free = "cuMemFreeHost"(address: *mut c_void);
        host_register = "cuMemHostRegister_v2"(address: *mut c_void, bytes: usize, flags: c_uint);
        host_unregister = "cuMemHostUnregister"(address: *mut c_void);
        copy_to_device = "cuMemcpyHtoDAsync_v2"(dst: Address, src: *const c_void, bytes: usize, stream: StreamHandle);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(dst: *mut c_void, src: Address, bytes: usize, stream: StreamHandle);
        copy_on_device = "cuMemcpyDtoDAsync_v2"(dst: Address, src: Address, bytes: usize, stream: StreamHandle);
        copy_from_peer = "cuMemcpyPeerAsync"(
            dst: Address,
            to: ContextHandle,
            src: Address,
            from: ContextHandle,
            bytes: usize,
            stream: StreamHandle,
        );
        copy_to_device_now = "cuMemcpyHtoD_v2"(dst: Address, src: *const c_void, bytes: usize);
        copy_to_host_now = "cuMemcpyDtoH_v2"(dst: *mut c_void, src: Address, bytes: usize);
        stream_create = "cuStreamCreateWithPriority"(stream: *mut StreamHandle, flags: c_uint, priority: c_int);
        stream_destroy = "cuStreamDestroy_v2"(stream: StreamHandle);
        stream_synchronize = "cuStreamSynchronize"(stream: StreamHandle);
        stream_wait = "cuStreamWaitEvent"(stream: StreamHandle, event: EventHandle, flags: c_uint);
        launch_host_function = "cuLaunchHostFunc"(stream: StreamHandle, function: HostFunction, data: *mut c_void);
        event_create = "cuEventCreate"(event: *mut EventHandle, flags: c_uint);
        event_destroy = "cuEventDestroy_v2"(event: EventHandle);
        event_query = "cuEventQuery"(event: EventHandle);
        event_record = "cuEventRecord"(event: EventHandle, stream: StreamHandle);
    }
}

table! {
    /// Stream-ordered memory pools. If a call is missing, memory is allocated without a pool.
    PoolCalls {
        allocate = "cuMemAllocFromPoolAsync"(address: *mut Address, bytes: usize, pool: PoolHandle, stream: StreamHandle);
        free = "cuMemFreeAsync"(address: Address, stream: StreamHandle);
        create = "cuMemPoolCreate"(pool: *mut PoolHandle, properties: *const PoolProperties);
        destroy = "cuMemPoolDestroy"(pool: PoolHandle);
        attribute = "cuMemPoolGetAttribute"(pool: PoolHandle, attribute: c_int, value: *mut c_void);
        set_access = "cuMemPoolSetAccess"(pool: PoolHandle, access: *const Access, count: usize);
        trim = "cuMemPoolTrimTo"(pool: PoolHandle, keep: usize);
    }
}

table! {
    /// Kernels. If a call is missing, the host patches.
    KernelCalls {
        load = "cuModuleLoadData"(module: *mut ModuleHandle, image: *const c_void);
        function = "cuModuleGetFunction"(function: *mut FunctionHandle, module: ModuleHandle, name: *const c_char);
        unload = "cuModuleUnload"(module: ModuleHandle);
        launch = "cuLaunchKernel"(
            function: FunctionHandle,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            shared_bytes: c_uint,
            stream: StreamHandle,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
    }
}

table! {
    /// Batched copies, as of CUDA 12.8. The call reports the copy that failed.
    OldBatchCalls {
        copy = "cuMemcpyBatchAsync"(
            dst: *const Address,
            src: *const Address,
            bytes: *const usize,
            count: usize,
            attributes: *const CopyAttributes,
            attributes_from: *const usize,
            attributes_count: usize,
            failed: *mut usize,
            stream: StreamHandle,
        );
    }
}

table! {
    /// Batched copies, as of CUDA 13.0.
    BatchCalls {
        copy = "cuMemcpyBatchAsync_v2"(
            dst: *const Address,
            src: *const Address,
            bytes: *const usize,
            count: usize,
            attributes: *const CopyAttributes,
            attributes_from: *const usize,
            attributes_count: usize,
            stream: StreamHandle,
        );
    }
}

table! {
    /// The capture status of streams.
    CaptureCalls {
        is_capturing = "cuStreamIsCapturing"(stream: StreamHandle, status: *mut c_int);
    }
}

table! {
    /// The capture mode of a thread.
    CaptureModeCalls {
        exchange = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_int);
    }
}

table! {
    /// The state of a device's primary context.
    ContextStateCalls {
        state = "cuDevicePrimaryCtxGetState"(device: DeviceHandle, flags: *mut c_uint, active: *mut c_int);
    }
}

table! {
    /// The UUID of a device. If the device is a part of a card, it is the part's UUID.
    UuidCalls {
        uuid = "cuDeviceGetUuid_v2"(uuid: *mut [u8; 16], device: DeviceHandle);
    }
}

table! {
    /// The UUID of a device.
    OldUuidCalls {
        uuid = "cuDeviceGetUuid"(uuid: *mut [u8; 16], device: DeviceHandle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys;

    /// The numbers and sizes match the driver's headers, as another crate declares them.
    #[test]
    fn the_declarations_are_those_of_the_headers() {
        use sys::CUdevice_attribute as A;
        let attributes = [
            (Attribute::Integrated, A::CU_DEVICE_ATTRIBUTE_INTEGRATED),
            (Attribute::PciBus, A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
            (Attribute::PciDevice, A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
            (Attribute::PciDomain, A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
            (Attribute::CopyEngines, A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
            (Attribute::ComputeMajor, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            (Attribute::ComputeMinor, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            (Attribute::MemoryPools, A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
        ];
        for (ours, theirs) in attributes {
            assert_eq!(ours as i32, theirs as i32);
        }
        assert_eq!(LOCATION_DEVICE, sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_int);
        assert_eq!(ALLOCATION_PINNED, sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as c_int);
        assert_eq!(ACCESS_READ_WRITE, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_int);
        assert_eq!(POOL_RESERVED_NOW, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as c_int);
        assert_eq!(EVENT_WITHOUT_TIMING, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint);
        assert_eq!(STREAM_NON_BLOCKING, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint);
        assert_eq!(CAPTURE_NONE, sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int);
        assert_eq!(CAPTURE_MODE_RELAXED, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int);
        assert_eq!(
            (REGISTER_PORTABLE, HOST_ALLOCATION_PORTABLE),
            (sys::CU_MEMHOSTREGISTER_PORTABLE, sys::CU_MEMHOSTALLOC_PORTABLE)
        );
        assert_eq!(size_of::<PoolProperties>(), size_of::<sys::CUmemPoolProps>());
        assert_eq!(size_of::<Access>(), size_of::<sys::CUmemAccessDesc>());
        use sys::CUresult as R;
        let codes = [
            (Code::INVALID_VALUE, R::CUDA_ERROR_INVALID_VALUE),
            (Code::OUT_OF_MEMORY, R::CUDA_ERROR_OUT_OF_MEMORY),
            (Code::DEINITIALIZED, R::CUDA_ERROR_DEINITIALIZED),
            (Code::NOT_READY, R::CUDA_ERROR_NOT_READY),
            (Code::PEER_ACCESS_ALREADY_ENABLED, R::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
            (Code::NOT_REGISTERED, R::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
            (Code::NOT_SUPPORTED, R::CUDA_ERROR_NOT_SUPPORTED),
            (Code::CAPTURE_IMPLICIT, R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
            (Code::UNKNOWN, R::CUDA_ERROR_UNKNOWN),
        ];
        for (ours, theirs) in codes {
            assert_eq!(ours.0, theirs as c_int);
        }
    }

    #[test]
    fn codes_that_stick_are_known_however_new_they_are() {
        let stick = [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 806, 810, 999];
        let found: Vec<c_int> = (1..=1100).filter(|&code| Code(code).sticks()).collect();
        assert_eq!(found, stick);
        assert!((1..=1100).filter(|&code| Code(code).is_of_captures()).eq(900..=908));
    }
}
