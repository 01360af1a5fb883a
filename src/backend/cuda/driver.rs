//! The driver's library: found, checked before anything in it is called, and its devices listed.

use std::ffi::{OsStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::{result, sys};
use libloading::Library;

use crate::device::{DeviceId, DeviceInfo};

/// The environment variable that names the driver's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBCUDA";

/// The names under which cudarc looks for the driver, in its order.
const NAMES: [&str; 3] = if cfg!(windows) {
    ["cuda.dll", "nvcuda.dll", "nvcuda64.dll"]
} else {
    ["libcuda.so", "libcuda.so.12", "libcuda.so.1"]
};

/// The oldest driver whose calls are used: 11.4 is the first that cudarc describes.
const OLDEST: i32 = 11_040;

/// The calls that have to be there. cudarc looks each up when it is first used and panics where it is missing.
const NEEDED: &[&str] = &[
    "cuCtxEnablePeerAccess",
    "cuCtxGetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchHostFunc",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// The calls of stream-ordered memory pools. Where one is missing, memory is allocated plainly.
const POOLS: [&str; 7] = [
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolGetAttribute",
    "cuMemPoolSetAccess",
    "cuMemPoolTrimTo",
];

/// The calls of kernels. Where one is missing, the host patches.
const KERNELS: [&str; 4] = ["cuLaunchKernel", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"];

/// A driver that was loaded, has the calls that are used, and is initialised.
pub(super) struct Driver {
    /// Whether it has the calls of memory pools; a device may still lack them.
    pub(super) pools: bool,
    /// The call of kernels that it lacks.
    pub(super) missing_kernel_call: Option<&'static str>,
    /// Whether it tells which streams are captured.
    pub(super) tells_captures: bool,
    /// Whether a thread can be taken out of the captures of others.
    pub(super) has_capture_modes: bool,
    /// Whether it tells which contexts there are already.
    tells_contexts: bool,
}

impl Driver {
    /// Loads and initialises the driver, or says why that cannot be.
    pub(super) fn load(file: Option<&Path>) -> Result<Arc<Driver>, String> {
        let named = file.map(Path::to_owned).or_else(|| std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from));
        let library = open(named.as_deref())?;
        let has = |name: &&str| {
            // SAFETY: the address is only compared with null, never called.
            unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_ok()
        };
        if let Some(missing) = NEEDED.iter().find(|name| !has(name)) {
            return Err(format!("the driver has no {missing}; it is older than this library can use"));
        }
        let pools = POOLS.iter().all(has);
        let missing_kernel_call = KERNELS.into_iter().find(|name| !has(name));
        let tells_captures = has(&"cuStreamIsCapturing");
        let has_capture_modes = has(&"cuThreadExchangeStreamCaptureMode");
        let tells_contexts = has(&"cuDevicePrimaryCtxGetState");
        result::init().map_err(|error| describe("cuInit", error))?;
        let mut version = 0;
        // SAFETY: the pointer is to a living integer.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|e| describe("cuDriverGetVersion", e))?;
        if version < OLDEST {
            let of = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
            return Err(format!("the driver is for CUDA {}, at least {} is needed", of(version), of(OLDEST)));
        }
        Ok(Arc::new(Driver { pools, missing_kernel_call, tells_captures, has_capture_modes, tells_contexts }))
    }

    /// The devices, none of them opened.
    pub(super) fn devices(&self) -> Result<Vec<DeviceInfo>, String> {
        let count = result::device::get_count().map_err(|error| describe("cuDeviceGetCount", error))?;
        if count == 0 {
            return Err(match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(visible) => format!("no CUDA device is visible; CUDA_VISIBLE_DEVICES is `{visible}`"),
                Err(_) => "the driver sees no CUDA device".to_owned(),
            });
        }
        (0..count).map(device_info).collect()
    }

    /// Takes the calling thread out of all captures of other threads, which could forbid it to ask for events; what it
    /// asks is about the library's own work, never about captured work.
    pub(super) fn leave_captures(&self) {
        if self.has_capture_modes {
            let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: the pointer is to a living mode, which is exchanged for the one before.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        }
    }

    /// Whether someone in this process, the caller for example, has opened the device's primary context.
    pub(super) fn has_context(&self, id: DeviceId) -> bool {
        let Some(device) = handle(id).filter(|_| self.tells_contexts) else { return false };
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the pointers are to living integers, the device comes from the driver.
        let asked = unsafe { sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) }.result();
        asked.is_ok() && active != 0
    }

    /// Whether the driver says that `to` can reach the memory of `from`. Opens neither.
    pub(super) fn can_reach(&self, to: DeviceId, from: DeviceId) -> bool {
        let (Some(to), Some(from)) = (handle(to), handle(from)) else { return false };
        let mut can = 0;
        // SAFETY: as above.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, to, from) }.result();
        asked.is_ok() && can != 0
    }
}

fn handle(id: DeviceId) -> Option<sys::CUdevice> {
    result::device::get(i32::try_from(id.index()).ok()?).ok()
}

/// Opens the driver's library for good, and makes sure that cudarc will find the same one by its name.
fn open(file: Option<&Path>) -> Result<&'static Library, String> {
    let load = |name: &OsStr| {
        // SAFETY: loading a driver runs its initialisers, which is what opening a driver means.
        unsafe { Library::new(name) }.map(|library| &*Box::leak(Box::new(library)))
    };
    let by_name = || NAMES.iter().find_map(|name| load(OsStr::new(name)).ok());
    let Some(file) = file else {
        return by_name().ok_or_else(|| format!("no CUDA driver: none of {} can be loaded", NAMES.join(", ")));
    };
    let library = load(file.as_os_str()).map_err(|error| format!("{} cannot be loaded: {error}", file.display()))?;
    let entry = |library: &Library| {
        // SAFETY: the address is only compared.
        unsafe { library.get::<*const c_void>(b"cuInit") }.map(|symbol| *symbol as usize).ok()
    };
    match by_name().and_then(entry) {
        Some(found) if Some(found) == entry(library) => Ok(library),
        Some(_) => Err(format!("{} is not the driver that this process opens by name; another one is", file.display())),
        None => Err(format!("{} does not go by the name of a driver ({})", file.display(), NAMES[2])),
    }
}

fn device_info(ordinal: i32) -> Result<DeviceInfo, String> {
    let device = result::device::get(ordinal).map_err(|error| describe("cuDeviceGet", error))?;
    let name = result::device::get_name(device).map_err(|error| describe("cuDeviceGetName", error))?;
    // SAFETY: the device was just got from the driver.
    let total = unsafe { result::device::total_mem(device) }.map_err(|error| describe("cuDeviceTotalMem", error))?;
    let attribute = |attribute| {
        // SAFETY: as above.
        unsafe { result::device::get_attribute(device, attribute) }.unwrap_or(0)
    };
    use sys::CUdevice_attribute as A;
    let capability = (
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    );
    let integrated = attribute(A::CU_DEVICE_ATTRIBUTE_INTEGRATED) != 0;
    let id = DeviceId::cuda(ordinal.unsigned_abs());
    let pci = (
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
    );
    let details = crate::device::GpuDetails {
        compute_capability: (capability.0.unsigned_abs(), capability.1.unsigned_abs()),
        pci_bus_id: format!("{:08x}:{:02x}:{:02x}.0", pci.0, pci.1, pci.2),
        uuid: result::device::get_uuid(device).map(uuid_text).ok(),
        copy_engines: attribute(A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT).unsigned_abs(),
        integrated,
        pcie: None,
        nvlinks: Vec::new(),
        numa_node: None,
    };
    // What of it is free the driver tells once it is open.
    let info = DeviceInfo::new(id, total as u64).name(name).free(None).gpu(details);
    Ok(if integrated { info.domain(DeviceId::CPU) } else { info })
}

/// A UUID as `nvidia-smi` writes it.
fn uuid_text(uuid: sys::CUuuid) -> String {
    let hex: String = uuid.bytes.iter().map(|&byte: &c_char| format!("{:02x}", byte as u8)).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// A failed call by its name, with the driver's own words.
pub(super) fn describe(call: &str, error: result::DriverError) -> String {
    let (name, text) = (error.error_name().unwrap_or(c"?"), error.error_string().unwrap_or(c"?"));
    format!("{call}: {} ({})", name.to_string_lossy(), text.to_string_lossy())
}
