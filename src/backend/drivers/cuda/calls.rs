//! Declarations of the calls of CUDA's driver, and of AMD's HIP where it has the same under another name; and their lookup.
//!
//! Results are integers: a driver may be newer than any list of codes, and an enumeration must not hold an undeclared value.
//! All calls of a table are looked up when the driver is loaded, so that none is missing at its first use. The names and
//! types are those of the CUDA driver API; unit tests compare the numbers with cudarc's declarations.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::backend::drivers::verbs::{
    Address, Code, ContextHandle, DeviceHandle, EventHandle, HostFunction, Meaning, StreamHandle, given,
};

handle!(/// `CUmemoryPool`.
    PoolHandle, OpaquePool);
handle!(/// `CUmodule`, `hipModule_t`.
    ModuleHandle, OpaqueModule);
handle!(/// `CUfunction`, `hipFunction_t`.
    FunctionHandle, OpaqueFunction);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::backend::drivers) struct Location {
    pub(in crate::backend::drivers) kind: c_int,
    pub(in crate::backend::drivers) id: c_int,
}

impl Location {
    /// A device by its number.
    pub(in crate::backend::drivers) fn device(number: u32) -> Location {
        Location { kind: LOCATION_DEVICE, id: c_int::try_from(number).unwrap_or(c_int::MAX) }
    }
}

/// `CUmemPoolProps`, with zeros for the fields that newer versions name.
#[repr(C)]
pub(in crate::backend::drivers) struct PoolProperties {
    pub(in crate::backend::drivers) allocation: c_int,
    pub(in crate::backend::drivers) handles: c_int,
    pub(in crate::backend::drivers) location: Location,
    pub(in crate::backend::drivers) security: *mut c_void,
    pub(in crate::backend::drivers) reserved: [u8; 64],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(in crate::backend::drivers) struct Access {
    pub(in crate::backend::drivers) location: Location,
    pub(in crate::backend::drivers) flags: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
pub(in crate::backend::drivers) struct CopyAttributes {
    pub(in crate::backend::drivers) source_order: c_int,
    pub(in crate::backend::drivers) source_hint: Location,
    pub(in crate::backend::drivers) destination_hint: Location,
    pub(in crate::backend::drivers) flags: c_uint,
}

impl CopyAttributes {
    /// Sources are read in stream order; no hints about the location of memory.
    pub(in crate::backend::drivers) const IN_STREAM_ORDER: CopyAttributes = CopyAttributes {
        source_order: 1,
        source_hint: Location { kind: 0, id: 0 },
        destination_hint: Location { kind: 0, id: 0 },
        flags: 0,
    };
}

pub(in crate::backend::drivers) const LOCATION_DEVICE: c_int = 1;
pub(in crate::backend::drivers) const ALLOCATION_PINNED: c_int = 1;
pub(in crate::backend::drivers) const ACCESS_READ_WRITE: c_int = 3;
pub(in crate::backend::drivers) const POOL_RESERVED_NOW: c_int = 5;
pub(in crate::backend::drivers) const EVENT_WITHOUT_TIMING: c_uint = 2;
pub(in crate::backend::drivers) const STREAM_NON_BLOCKING: c_uint = 1;
pub(in crate::backend::drivers) const REGISTER_PORTABLE: c_uint = 1;
pub(in crate::backend::drivers) const HOST_ALLOCATION_PORTABLE: c_uint = 1;

/// The values of `CUdevice_attribute` that are used.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(in crate::backend::drivers) enum Attribute {
    Integrated = 18,
    PciBus = 33,
    PciDevice = 34,
    CopyEngines = 40,
    PciDomain = 50,
    ComputeMajor = 75,
    ComputeMinor = 76,
    MemoryPools = 115,
}

/// What a result code means. HIP's codes are those of CUDA's driver, number for number, as far as they are named here.
pub(in crate::backend::drivers) fn meaning(code: Code) -> Meaning {
    const DEINITIALIZED: c_int = 4;
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
    match code.0 {
        1 => Meaning::InvalidValue,
        2 => Meaning::OutOfMemory,
        600 => Meaning::NotReady,
        704 => Meaning::PeerAccessAlreadyEnabled,
        713 => Meaning::NotRegistered,
        801 => Meaning::NotSupported,
        906 => Meaning::CaptureImplicit,
        900..=908 => Meaning::OfCaptures,
        999 => Meaning::Unknown,
        DEINITIALIZED
        | ECC_UNCORRECTABLE
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
        | MPS_CLIENT_TERMINATED => Meaning::Sticks,
        _ => Meaning::Refused,
    }
}

table! { meaning;
    /// The required calls.
    Calls {
        init = "cuInit" / "hipInit"(flags: c_uint);
        driver_version = "cuDriverGetVersion" / "hipDriverGetVersion"(version: *mut c_int);
        error_name = "cuGetErrorName" / "hipDrvGetErrorName"(code: c_int, name: *mut *const c_char);
        error_text = "cuGetErrorString" / "hipDrvGetErrorString"(code: c_int, text: *mut *const c_char);
        device_count = "cuDeviceGetCount" / "hipGetDeviceCount"(count: *mut c_int);
        device = "cuDeviceGet" / "hipDeviceGet"(device: *mut DeviceHandle, number: c_int);
        device_name = "cuDeviceGetName" / "hipDeviceGetName"(name: *mut c_char, room: c_int, device: DeviceHandle);
        device_total = "cuDeviceTotalMem_v2" / "hipDeviceTotalMem"(bytes: *mut usize, device: DeviceHandle);
        device_attribute = "cuDeviceGetAttribute" / "hipDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: DeviceHandle);
        can_access_peer = "cuDeviceCanAccessPeer" / "hipDeviceCanAccessPeer"(can: *mut c_int, device: DeviceHandle, peer: DeviceHandle);
        stream_priorities = "cuCtxGetStreamPriorityRange" / "hipDeviceGetStreamPriorityRange"(least: *mut c_int, greatest: *mut c_int);
        memory_info = "cuMemGetInfo_v2" / "hipMemGetInfo"(free: *mut usize, total: *mut usize);
        allocate = "cuMemAlloc_v2" / "hipMalloc"(address: *mut Address, bytes: usize);
        free = "cuMemFree_v2" / "hipFree"(address: Address);
        host_allocate = "cuMemHostAlloc" / "hipHostMalloc"(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        host_free = "cuMemFreeHost" / "hipHostFree"(address: *mut c_void);
        host_register = "cuMemHostRegister_v2" / "hipHostRegister"(address: *mut c_void, bytes: usize, flags: c_uint);
        host_unregister = "cuMemHostUnregister" / "hipHostUnregister"(address: *mut c_void);
        copy_to_device = "cuMemcpyHtoDAsync_v2" / "hipMemcpyHtoDAsync"(dst: Address, src: *const c_void, bytes: usize, stream: StreamHandle);
        copy_to_host = "cuMemcpyDtoHAsync_v2" / "hipMemcpyDtoHAsync"(dst: *mut c_void, src: Address, bytes: usize, stream: StreamHandle);
        copy_on_device = "cuMemcpyDtoDAsync_v2" / "hipMemcpyDtoDAsync"(dst: Address, src: Address, bytes: usize, stream: StreamHandle);
        copy_to_device_now = "cuMemcpyHtoD_v2" / "hipMemcpyHtoD"(dst: Address, src: *const c_void, bytes: usize);
        copy_to_host_now = "cuMemcpyDtoH_v2" / "hipMemcpyDtoH"(dst: *mut c_void, src: Address, bytes: usize);
        stream_create = "cuStreamCreateWithPriority" / "hipStreamCreateWithPriority"(stream: *mut StreamHandle, flags: c_uint, priority: c_int);
        stream_destroy = "cuStreamDestroy_v2" / "hipStreamDestroy"(stream: StreamHandle);
        stream_synchronize = "cuStreamSynchronize" / "hipStreamSynchronize"(stream: StreamHandle);
        stream_wait = "cuStreamWaitEvent" / "hipStreamWaitEvent"(stream: StreamHandle, event: EventHandle, flags: c_uint);
        launch_host_function = "cuLaunchHostFunc" / "hipLaunchHostFunc"(stream: StreamHandle, function: HostFunction, data: *mut c_void);
        event_create = "cuEventCreate" / "hipEventCreateWithFlags"(event: *mut EventHandle, flags: c_uint);
        event_destroy = "cuEventDestroy_v2" / "hipEventDestroy"(event: EventHandle);
        event_query = "cuEventQuery" / "hipEventQuery"(event: EventHandle);
        event_record = "cuEventRecord" / "hipEventRecord"(event: EventHandle, stream: StreamHandle);
    }
}

table! { meaning;
    /// Contexts, and copies between devices that are named by theirs.
    ContextCalls {
        retain = "cuDevicePrimaryCtxRetain"(context: *mut ContextHandle, device: DeviceHandle);
        current = "cuCtxGetCurrent"(context: *mut ContextHandle);
        make_current = "cuCtxSetCurrent"(context: ContextHandle);
        enable_peer_access = "cuCtxEnablePeerAccess"(peer: ContextHandle, flags: c_uint);
        copy = "cuMemcpyPeerAsync"(
            dst: Address,
            to: ContextHandle,
            src: Address,
            from: ContextHandle,
            bytes: usize,
            stream: StreamHandle,
        );
    }
}

table! { meaning;
    /// The release of a context, as of CUDA 11.0.
    ReleaseCalls {
        release = "cuDevicePrimaryCtxRelease_v2"(device: DeviceHandle);
    }
}

table! { meaning;
    /// The release of a context, before that.
    OldReleaseCalls {
        release = "cuDevicePrimaryCtxRelease"(device: DeviceHandle);
    }
}

table! { meaning;
    /// Current devices, and copies between devices, by their numbers.
    DeviceCalls {
        current = "" / "hipGetDevice"(device: *mut DeviceHandle);
        make_current = "" / "hipSetDevice"(device: DeviceHandle);
        enable_peer_access = "" / "hipDeviceEnablePeerAccess"(peer: DeviceHandle, flags: c_uint);
        copy = "" / "hipMemcpyPeerAsync"(
            dst: Address,
            to: DeviceHandle,
            src: Address,
            from: DeviceHandle,
            bytes: usize,
            stream: StreamHandle,
        );
    }
}

table! { meaning;
    /// Stream-ordered memory pools. If a call is missing, memory is allocated without a pool.
    PoolCalls {
        device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: DeviceHandle);
        allocate = "cuMemAllocFromPoolAsync"(address: *mut Address, bytes: usize, pool: PoolHandle, stream: StreamHandle);
        free = "cuMemFreeAsync"(address: Address, stream: StreamHandle);
        create = "cuMemPoolCreate"(pool: *mut PoolHandle, properties: *const PoolProperties);
        destroy = "cuMemPoolDestroy"(pool: PoolHandle);
        attribute = "cuMemPoolGetAttribute"(pool: PoolHandle, attribute: c_int, value: *mut c_void);
        set_access = "cuMemPoolSetAccess"(pool: PoolHandle, access: *const Access, count: usize);
        trim = "cuMemPoolTrimTo"(pool: PoolHandle, keep: usize);
    }
}

impl PoolCalls {
    /// Whether a device supports pools.
    pub(in crate::backend::drivers) fn are_supported(&self, device: DeviceHandle) -> bool {
        // SAFETY: the pointer is to a living integer, the device comes from the driver.
        let asked = given(0, |value| unsafe { self.device_attribute(value, Attribute::MemoryPools as c_int, device) });
        asked.is_ok_and(|value| value != 0)
    }
}

table! { meaning;
    /// Kernels. If a call is missing, the host patches.
    KernelCalls {
        load = "cuModuleLoadData" / "hipModuleLoadData"(module: *mut ModuleHandle, image: *const c_void);
        function = "cuModuleGetFunction" / "hipModuleGetFunction"(function: *mut FunctionHandle, module: ModuleHandle, name: *const c_char);
        unload = "cuModuleUnload" / "hipModuleUnload"(module: ModuleHandle);
        launch = "cuLaunchKernel" / "hipModuleLaunchKernel"(
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

table! { meaning;
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

table! { meaning;
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

table! { meaning;
    /// The capture status of streams.
    CaptureCalls {
        is_capturing = "cuStreamIsCapturing" / "hipStreamIsCapturing"(stream: StreamHandle, status: *mut c_int);
    }
}

table! { meaning;
    /// The capture mode of a thread.
    CaptureModeCalls {
        exchange = "cuThreadExchangeStreamCaptureMode" / "hipThreadExchangeStreamCaptureMode"(mode: *mut c_int);
    }
}

table! { meaning;
    /// The state of a device's primary context.
    ContextStateCalls {
        state = "cuDevicePrimaryCtxGetState" / "hipDevicePrimaryCtxGetState"(device: DeviceHandle, flags: *mut c_uint, active: *mut c_int);
    }
}

#[cfg(feature = "hip")]
table! { meaning;
    /// What only HIP is asked.
    HipCalls {
        pci_bus_id = "" / "hipDeviceGetPCIBusId"(text: *mut c_char, room: c_int, device: DeviceHandle);
    }
}

table! { meaning;
    /// The UUID of a device. If the device is a part of a card, it is the part's UUID.
    UuidCalls {
        uuid = "cuDeviceGetUuid_v2" / "hipDeviceGetUuid"(uuid: *mut [u8; 16], device: DeviceHandle);
    }
}

table! { meaning;
    /// The UUID of a device.
    OldUuidCalls {
        uuid = "cuDeviceGetUuid"(uuid: *mut [u8; 16], device: DeviceHandle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::drivers::verbs::{CAPTURE_NONE, CaptureMode};
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
        assert_eq!(CaptureMode::RELAXED.0, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int);
        assert_eq!(
            (REGISTER_PORTABLE, HOST_ALLOCATION_PORTABLE),
            (sys::CU_MEMHOSTREGISTER_PORTABLE, sys::CU_MEMHOSTALLOC_PORTABLE)
        );
        assert_eq!(size_of::<PoolProperties>(), size_of::<sys::CUmemPoolProps>());
        assert_eq!(size_of::<Access>(), size_of::<sys::CUmemAccessDesc>());
        use sys::CUresult as R;
        let codes = [
            (Meaning::InvalidValue, R::CUDA_ERROR_INVALID_VALUE),
            (Meaning::OutOfMemory, R::CUDA_ERROR_OUT_OF_MEMORY),
            (Meaning::Sticks, R::CUDA_ERROR_DEINITIALIZED),
            (Meaning::NotReady, R::CUDA_ERROR_NOT_READY),
            (Meaning::PeerAccessAlreadyEnabled, R::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
            (Meaning::NotRegistered, R::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
            (Meaning::NotSupported, R::CUDA_ERROR_NOT_SUPPORTED),
            (Meaning::CaptureImplicit, R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
            (Meaning::Unknown, R::CUDA_ERROR_UNKNOWN),
            (Meaning::Refused, R::CUDA_ERROR_INVALID_HANDLE),
        ];
        for (ours, theirs) in codes {
            assert_eq!(meaning(Code(theirs as c_int)), ours);
        }
    }

    #[test]
    fn codes_that_stick_are_known_however_new_they_are() {
        let stick = [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 806, 810, 999];
        let found: Vec<c_int> = (1..=1100).filter(|&code| meaning(Code(code)).sticks()).collect();
        assert_eq!(found, stick);
        assert!((1..=1100).filter(|&code| meaning(Code(code)).is_of_captures()).eq(900..=908));
    }
}
