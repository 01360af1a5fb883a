//! The driver's library: finding it, checking it before anything in it is called, and listing its devices.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::Library;

use super::calls::{
    Address, Attribute, BatchCalls, CAPTURE_MODE_RELAXED, Calls, CaptureCalls, CaptureModeCalls, Code,
    ContextStateCalls, CopyAttributes, DeviceHandle, Failure, KernelCalls, OldBatchCalls, OldUuidCalls, Outcome,
    PoolCalls, StreamHandle, UuidCalls,
};
use crate::backend::process::Process;
use crate::device::{DeviceId, DeviceInfo};

/// The environment variable that names the driver's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBCUDA";

/// The names of the driver's library, in the same order as cudarc tries them.
const NAMES: [&str; 3] = if cfg!(windows) {
    ["cuda.dll", "nvcuda.dll", "nvcuda64.dll"]
} else {
    ["libcuda.so", "libcuda.so.12", "libcuda.so.1"]
};

/// The oldest supported driver: 11.4 is the first version that cudarc, whose types callers get tensors in, describes.
const OLDEST: i32 = 11_040;

/// A driver that is loaded, has the required calls, and is initialised.
pub(super) struct Driver {
    pub(super) calls: Calls,
    /// The calls of memory pools, if the driver has them. A device may still not support pools.
    pub(super) pools: Option<PoolCalls>,
    /// The calls of kernels, or the name of a missing one.
    pub(super) kernels: Result<KernelCalls, &'static str>,
    /// The calls that queue several copies at once, in one of two interfaces.
    batches: Option<Batches>,
    /// Whether the driver has refused a batch.
    refuses_batches: AtomicBool,
    /// The calls that report which streams are captured.
    pub(super) captures: Option<CaptureCalls>,
    capture_modes: Option<CaptureModeCalls>,
    contexts: Option<ContextStateCalls>,
    uuids: Option<UuidCalls>,
    old_uuids: Option<OldUuidCalls>,
    /// The process that initialised it.
    pub(super) process: Process,
}

/// The interfaces of batched copies.
enum Batches {
    Now(BatchCalls),
    Old(OldBatchCalls),
}

impl Batches {
    /// Finds the interface of a driver for this version of CUDA.
    fn find(library: &Library, version: c_int) -> Option<Batches> {
        match version {
            13_000.. => BatchCalls::find(library).map(Batches::Now).ok(),
            12_080.. => OldBatchCalls::find(library).map(Batches::Old).ok(),
            _ => None,
        }
    }
}

impl Driver {
    /// Whether several copies can be queued by one call.
    pub(super) fn takes_batches(&self) -> bool {
        self.batches.is_some() && !self.refuses_batches.load(Ordering::Relaxed)
    }

    /// Queues copies between addresses with one call. If the driver refuses, single copies are queued from then on.
    ///
    /// # Safety
    /// As for single copies. The three lists are equally long, and no destination overlaps another source or destination.
    pub(super) unsafe fn copy_batch(
        &self,
        dst: &[Address],
        src: &[Address],
        bytes: &[usize],
        stream: StreamHandle,
    ) -> Option<Outcome> {
        let (count, attributes, from) = (dst.len(), CopyAttributes::IN_STREAM_ORDER, 0);
        let (dst, src, bytes) = (dst.as_ptr(), src.as_ptr(), bytes.as_ptr());
        let mut failed = 0;
        // SAFETY: the lists and the attributes outlive the call; the rest is the caller's promise.
        let outcome = unsafe {
            match self.batches.as_ref()? {
                Batches::Now(calls) => {
                    calls.copy(dst, src, bytes, count, &raw const attributes, &raw const from, 1, stream)
                }
                Batches::Old(calls) => calls.copy(
                    dst,
                    src,
                    bytes,
                    count,
                    &raw const attributes,
                    &raw const from,
                    1,
                    &raw mut failed,
                    stream,
                ),
            }
        };
        match outcome {
            Err(failure) if matches!(failure.code, Code::INVALID_VALUE | Code::NOT_SUPPORTED) => {
                tracing::debug!(%failure, "copies are queued one by one");
                self.refuses_batches.store(true, Ordering::Relaxed);
                None
            }
            outcome => Some(outcome),
        }
    }

    /// Loads and initialises the driver.
    ///
    /// # Errors
    /// The reason why it cannot be used.
    pub(super) fn load(file: Option<&Path>) -> Result<Arc<Driver>, String> {
        let named = file.map(Path::to_owned).or_else(|| std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from));
        let library = &*open(named.as_deref())?;
        let lacks = |missing: &str| format!("the driver has no {missing}; it is older than this library can use");
        let mut driver = Driver {
            calls: Calls::find(library).map_err(lacks)?,
            pools: PoolCalls::find(library).ok(),
            kernels: KernelCalls::find(library),
            batches: None,
            refuses_batches: AtomicBool::new(false),
            captures: CaptureCalls::find(library).ok(),
            capture_modes: CaptureModeCalls::find(library).ok(),
            contexts: ContextStateCalls::find(library).ok(),
            uuids: UuidCalls::find(library).ok(),
            old_uuids: OldUuidCalls::find(library).ok(),
            process: Process::current(),
        };
        // SAFETY: no flags are defined.
        unsafe { driver.calls.init(0) }.map_err(|failure| driver.describe(failure))?;
        let mut version = 0;
        // SAFETY: the pointer is to a living integer.
        unsafe { driver.calls.driver_version(&raw mut version) }.map_err(|failure| driver.describe(failure))?;
        if version < OLDEST {
            let of = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
            return Err(format!("the driver is for CUDA {}, at least {} is needed", of(version), of(OLDEST)));
        }
        driver.batches = Batches::find(library, version);
        Ok(Arc::new(driver))
    }

    /// The devices. Opens none.
    pub(super) fn devices(&self) -> Result<Vec<DeviceInfo>, String> {
        let mut count = 0;
        // SAFETY: the pointer is to a living integer.
        unsafe { self.calls.device_count(&raw mut count) }.map_err(|failure| self.describe(failure))?;
        if count <= 0 {
            return Err(match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(visible) => format!("no CUDA device is visible; CUDA_VISIBLE_DEVICES is `{visible}`"),
                Err(_) => "the driver sees no CUDA device".to_owned(),
            });
        }
        (0..count).map(|number| self.device_info(number).map_err(|failure| self.describe(failure))).collect()
    }

    /// Relaxes the calling thread's capture mode, so that captures of other threads cannot forbid it to query events, to free
    /// or to pin: this backend's calls concern its own work, never captured work. Returns the previous mode, to be
    /// [restored](Driver::restore_capture_mode), if it was another.
    pub(super) fn leave_captures(&self) -> Option<c_int> {
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a living mode, which is exchanged for the one before.
        unsafe { self.capture_modes.as_ref()?.exchange(&raw mut mode) }.ok()?;
        (mode != CAPTURE_MODE_RELAXED).then_some(mode)
    }

    /// Restores the calling thread's previous capture mode.
    pub(super) fn restore_capture_mode(&self, mut mode: c_int) {
        if let Some(calls) = &self.capture_modes {
            // SAFETY: as above.
            let _ = unsafe { calls.exchange(&raw mut mode) };
        }
    }

    /// Whether the device's primary context is active in this process, opened for example by the caller.
    pub(super) fn has_context(&self, id: DeviceId) -> bool {
        let Some((calls, device)) = self.contexts.as_ref().zip(self.handle(id)) else { return false };
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the pointers are to living integers, the device comes from the driver.
        let asked = unsafe { calls.state(device, &raw mut flags, &raw mut active) };
        asked.is_ok() && active != 0
    }

    /// Whether `to` can reach the memory of `from`, according to the driver. Opens neither.
    pub(super) fn can_reach(&self, to: DeviceId, from: DeviceId) -> bool {
        let (Some(to), Some(from)) = (self.handle(to), self.handle(from)) else { return false };
        let mut can = 0;
        // SAFETY: the pointer is to a living integer, the devices come from the driver.
        let asked = unsafe { self.calls.can_access_peer(&raw mut can, to, from) };
        asked.is_ok() && can != 0
    }

    /// The driver's name for a code, or its number if the driver has none.
    pub(super) fn code_name(&self, code: Code) -> String {
        // SAFETY: the call writes the address of a text.
        self.text(|text| unsafe { self.calls.error_name(code.0, text) }).unwrap_or_else(|| format!("code {}", code.0))
    }

    /// The driver's description of a code.
    pub(super) fn code_text(&self, code: Code) -> String {
        // SAFETY: the call writes the address of a text.
        let text = self.text(|text| unsafe { self.calls.error_text(code.0, text) });
        text.unwrap_or_else(|| "this driver has no words for it".to_owned())
    }

    /// A refused call with the driver's description.
    pub(super) fn describe(&self, failure: Failure) -> String {
        let Failure { call, code } = failure;
        format!("{}: {} ({})", shown(call), self.code_name(code), self.code_text(code))
    }

    fn text(&self, ask: impl FnOnce(*mut *const c_char) -> Outcome) -> Option<String> {
        let mut text = std::ptr::null();
        ask(&raw mut text).ok()?;
        // SAFETY: the driver returns null or a zero-terminated text that lives as long as the driver.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// The driver's number of a device.
    pub(super) fn handle(&self, id: DeviceId) -> Option<DeviceHandle> {
        self.device(i32::try_from(id.index()).ok()?).ok()
    }

    fn device(&self, number: i32) -> Outcome<DeviceHandle> {
        let mut device = 0;
        // SAFETY: the pointer is to a living number.
        unsafe { self.calls.device(&raw mut device, number) }.map(|()| device)
    }

    /// An attribute of a device; 0 if an old driver does not know it.
    pub(super) fn attribute(&self, device: DeviceHandle, attribute: Attribute) -> i32 {
        let mut value = 0;
        // SAFETY: the pointer is to a living integer, the device comes from the driver.
        let asked = unsafe { self.calls.device_attribute(&raw mut value, attribute as c_int, device) };
        if asked.is_ok() { value } else { 0 }
    }

    fn device_info(&self, number: i32) -> Outcome<DeviceInfo> {
        let device = self.device(number)?;
        let mut name = [0u8; 256];
        // SAFETY: the call writes at most the given number of bytes, the last of them a zero.
        unsafe { self.calls.device_name(name.as_mut_ptr().cast(), name.len() as c_int - 1, device) }?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let mut total = 0;
        // SAFETY: the pointer is to a living number.
        unsafe { self.calls.device_total(&raw mut total, device) }?;
        let attribute = |attribute| self.attribute(device, attribute);
        let number_of = |which| attribute(which).unsigned_abs();
        let pci = [Attribute::PciDomain, Attribute::PciBus, Attribute::PciDevice].map(attribute);
        let integrated = attribute(Attribute::Integrated) != 0;
        let capability = (number_of(Attribute::ComputeMajor), number_of(Attribute::ComputeMinor));
        let details = crate::device::GpuDetails {
            uuid: self.uuid(device),
            copy_engines: number_of(Attribute::CopyEngines),
            integrated,
            ..crate::device::GpuDetails::new(capability, format!("{:08x}:{:02x}:{:02x}.0", pci[0], pci[1], pci[2]))
        };
        // The driver reports the free memory only once the device is open.
        let id = DeviceId::cuda(number.unsigned_abs());
        let info = DeviceInfo::new(id, total as u64).name(name).free(None).gpu(details);
        Ok(if integrated { info.domain(DeviceId::CPU) } else { info })
    }

    /// The UUID as `nvidia-smi` prints it.
    fn uuid(&self, device: DeviceHandle) -> Option<String> {
        let mut uuid = [0; 16];
        let asked = match (&self.uuids, &self.old_uuids) {
            // SAFETY: the pointer is to sixteen living bytes, the device comes from the driver.
            (Some(calls), _) => unsafe { calls.uuid(&raw mut uuid, device) },
            // SAFETY: as above.
            (None, Some(calls)) => unsafe { calls.uuid(&raw mut uuid, device) },
            (None, None) => return None,
        };
        asked.ok().map(|()| crate::device::gpu_uuid(uuid))
    }
}

/// A call's name without the version of its interface, as in the documentation.
pub(super) fn shown(call: &'static str) -> &'static str {
    call.trim_end_matches("_v2")
}

/// Opens the driver's library for good, and checks that others who look for it by its name, such as cudarc, find the same
/// one.
fn open(file: Option<&Path>) -> Result<ManuallyDrop<Library>, String> {
    let load = |name: &OsStr| {
        // SAFETY: loading a driver runs its initialisers, which is what opening a driver means.
        unsafe { Library::new(name) }.map(ManuallyDrop::new)
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
    match by_name().and_then(|library| entry(&library)) {
        Some(found) if Some(found) == entry(&library) => Ok(library),
        Some(_) => Err(format!("{} is not the driver that this process opens by name; another one is", file.display())),
        None => Err(format!("{} does not go by the name of a driver ({})", file.display(), NAMES[2])),
    }
}
