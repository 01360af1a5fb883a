//! NVIDIA's driver: the library, its devices, and what only this vendor has beside it.

pub(super) mod calls;
pub(super) mod cufile;
mod nvml;
pub(super) mod verbs;

use std::ffi::{OsStr, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;

use self::calls::{Attribute, CaptureCalls, CaptureModeCalls, KernelCalls, OldUuidCalls, PoolCalls, UuidCalls};
pub(super) use self::nvml::Nvml;
use self::verbs::CudaVerbs;
use super::driver::{Batches, Driver, lacks, named, open, open_any};
use super::stream::PER_THREAD;
use super::table::Spelling;
use super::verbs::{DeviceHandle, Outcome, Peers, Rules, Verbs, given};
use super::{Cards, Vendor};
use crate::backend::Gds;
use crate::backend::sysfs::Sysfs;
use crate::device::{DeviceId, DeviceInfo, DeviceKind, GpuDetails, gpu_uuid};

/// The environment variable that names the driver's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBCUDA";

/// The names of the driver's library, in the same order as cudarc tries them.
const NAMES: [&str; 3] = if cfg!(windows) {
    ["cuda.dll", "nvcuda.dll", "nvcuda64.dll"]
} else {
    ["libcuda.so", "libcuda.so.12", "libcuda.so.1"]
};

/// What such a library is.
const DRIVER: &str = "CUDA driver";

/// How the names of devices begin that CoreX's driver lists, which goes by the same name.
const COREX_MAKER: &str = "Iluvatar";

/// The oldest supported driver: 11.4 is the first version that cudarc, whose types callers get tensors in, describes.
const OLDEST: i32 = 11_040;

/// The backend of NVIDIA devices, and of `cpu` with memory that they copy from at full speed.
///
/// Finding devices loads the driver but opens no device. If NVIDIA's management library is installed, the free memory of the
/// devices is then known; it and, on Linux, the system also report their PCIe links and NVLinks. Without a usable driver,
/// [`discover`](crate::backend::Backend::discover) returns the reason; nothing panics. The driver's library is the system's, or
/// the file that [`library`](Cuda::library) or the environment variable `TENSOR_OFFLOAD_LIBCUDA` names. The first driver that a
/// process opens stays its driver.
///
/// ```
/// use tensor_offload::backend::{Backend, Cuda, Found};
/// for found in Cuda::new().discover() {
///     match found {
///         Found::Here(device) => println!("{}: {}, {} bytes", device.id, device.name, device.total),
///         Found::Absent { kind, why } => println!("no {kind} device: {why}"),
///         _ => {}
///     }
/// }
/// ```
pub struct Cuda {
    cards: Cards<Nvidia>,
}

/// The settings that only this vendor has.
#[derive(Default)]
struct Nvidia {
    nvml: Option<PathBuf>,
    gds: Option<Gds>,
    cufile: Option<PathBuf>,
}

backend!(Cuda);

impl Cuda {
    /// The CUDA devices of this system.
    pub fn new() -> Cuda {
        Cuda { cards: Cards::new(Nvidia::default()) }
    }

    /// Sets the file of NVIDIA's management library (NVML). Default: the system's, by its name. Without NVML, the free memory
    /// of a device is unknown until it is opened.
    #[must_use]
    pub fn nvml(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.cards.vendor.nvml = Some(file.into());
        self
    }

    /// Sets when files are read straight into a device's memory, by NVIDIA GPUDirect Storage. Default: what the environment
    /// variable `TENSOR_OFFLOAD_GDS` says (`off`, `auto`, `direct` or `always`), else [`Gds::Auto`]. All other reads pass pinned
    /// memory of the host. [`LoadReport`](crate::load::LoadReport) says what a load did.
    #[must_use]
    pub fn gds(mut self, gds: Gds) -> Cuda {
        self.cards.vendor.gds = Some(gds);
        self
    }

    /// Sets the file of the library of GPUDirect Storage, libcufile. Default: what the environment variable
    /// `TENSOR_OFFLOAD_LIBCUFILE` names, else the system's, by its name.
    #[must_use]
    pub fn cufile(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.cards.vendor.cufile = Some(file.into());
        self
    }
}

impl Vendor for Nvidia {
    const KIND: DeviceKind = DeviceKind::Cuda;

    fn load(&self, library: Option<&Path>) -> Result<(Driver, Vec<DeviceInfo>), String> {
        let library = find(named(library, LIBRARY_VARIABLE).as_deref())?;
        let (driver, devices) = load(&library, Nvidia::KIND, Variant::Nvidia)?;
        if devices.is_empty() {
            return Err(no_device("CUDA"));
        }
        if devices.iter().all(|info| info.name.starts_with(COREX_MAKER)) {
            return Err("this driver is CoreX's, whose devices are corex:N".to_owned());
        }
        Ok((driver, devices))
    }

    fn management(&self) -> Option<Nvml> {
        let nvml = Nvml::load(self.nvml.as_deref());
        nvml.inspect_err(|why| tracing::debug!(%why, "no management library")).ok()
    }

    fn file_reads(&self, sysfs: &Sysfs) -> Option<Arc<cufile::Settings>> {
        Some(Arc::new(cufile::Settings::new(self.gds, self.cufile.clone(), sysfs.clone())))
    }
}

/// What is said where a driver with the calls of CUDA's sees no device. `what` is whose devices they would be.
pub(super) fn no_device(what: &str) -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(visible) => format!("no {what} device is visible; CUDA_VISIBLE_DEVICES is `{visible}`"),
        Err(_) => format!("the driver sees no {what} device"),
    }
}

/// Whose driver has the calls of CUDA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    Nvidia,
    /// Iluvatar's, which says that it is for CUDA 10.2. Programs were seen to fail that destroy what is in use (muda's port).
    CoreX,
}

/// Loads and initialises a driver that has the calls of CUDA's, and lists its devices.
///
/// # Errors
/// The reason why it cannot be used.
pub(super) fn load(library: &Library, kind: DeviceKind, variant: Variant) -> Result<(Driver, Vec<DeviceInfo>), String> {
    const SPELLING: Spelling = Spelling::Own;
    let mut verbs = CudaVerbs::find(library, SPELLING).map_err(lacks)?;
    verbs.waits_before_destroying = variant == Variant::CoreX;
    // SAFETY: no flags are defined.
    let started = unsafe { verbs.calls.init(0) }.and_then(|()| verbs.version());
    let devices = started.and_then(|_| devices(&verbs, library, kind));
    let rules = Rules { kind, waits_across: true, peers: Peers::Both, registers: true, per_thread: Some(PER_THREAD) };
    let mut driver = Driver::new(verbs, rules);
    driver.pools = PoolCalls::find(library, SPELLING).ok();
    driver.kernels = KernelCalls::find(library, SPELLING).map_err(|missing| format!("the driver has no {missing}"));
    driver.captures = CaptureCalls::find(library, SPELLING).ok();
    driver.capture_modes = CaptureModeCalls::find(library, SPELLING).ok();
    driver.batches = started.ok().and_then(|version| Batches::find(library, version));
    let version = started.map_err(|failure| driver.describe(failure))?;
    if variant == Variant::Nvidia && version < OLDEST {
        let of = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(format!("the driver is for CUDA {}, at least {} is needed", of(version), of(OLDEST)));
    }
    let devices = devices.map_err(|failure| driver.describe(failure))?;
    Ok((driver, devices))
}

fn devices(verbs: &CudaVerbs, library: &Library, kind: DeviceKind) -> Outcome<Vec<DeviceInfo>> {
    let uuids = Uuids {
        now: UuidCalls::find(library, Spelling::Own).ok(),
        old: OldUuidCalls::find(library, Spelling::Own).ok(),
    };
    let count = verbs.device_count()?.max(0);
    (0..count.unsigned_abs()).map(|number| device_info(verbs, &uuids, kind, number)).collect()
}

fn device_info(verbs: &CudaVerbs, uuids: &Uuids, kind: DeviceKind, number: u32) -> Outcome<DeviceInfo> {
    let device = verbs.device(number)?;
    let attribute = |attribute: Attribute| verbs.attribute(device, attribute as i32);
    let number_of = |which| attribute(which).unsigned_abs();
    let pci = [Attribute::PciDomain, Attribute::PciBus, Attribute::PciDevice].map(attribute);
    let integrated = attribute(Attribute::Integrated) != 0;
    let capability = (number_of(Attribute::ComputeMajor), number_of(Attribute::ComputeMinor));
    let details = GpuDetails {
        uuid: uuids.of(device),
        copy_engines: number_of(Attribute::CopyEngines),
        integrated,
        ..GpuDetails::new(capability, format!("{:08x}:{:02x}:{:02x}.0", pci[0], pci[1], pci[2]))
    };
    // The driver reports the free memory only once the device is open.
    let id = DeviceId::of(kind, number);
    let info =
        DeviceInfo::new(id, verbs.device_total(device)?).name(verbs.device_name(device)?).free(None).gpu(details);
    Ok(if integrated { info.domain(DeviceId::CPU) } else { info })
}

/// The calls that report UUIDs, of which a driver may have none.
struct Uuids {
    now: Option<UuidCalls>,
    old: Option<OldUuidCalls>,
}

impl Uuids {
    /// The UUID as `nvidia-smi` prints it.
    fn of(&self, device: DeviceHandle) -> Option<String> {
        let uuid = given([0; 16], |uuid| match (&self.now, &self.old) {
            // SAFETY: the pointer is to sixteen living bytes, the device comes from the driver.
            (Some(calls), _) => unsafe { calls.uuid(uuid, device) },
            // SAFETY: as above.
            (None, Some(calls)) => unsafe { calls.uuid(uuid, device) },
            (None, None) => Ok(()),
        });
        let known = self.now.is_some() || self.old.is_some();
        uuid.ok().filter(|_| known).map(gpu_uuid)
    }
}

/// Opens the driver's library for good, and checks that others who look for it by its name, such as cudarc, find the same
/// one.
fn find(file: Option<&Path>) -> Result<ManuallyDrop<Library>, String> {
    let library = open_any(file, &NAMES, DRIVER)?;
    let Some(file) = file else { return Ok(library) };
    let by_name = NAMES.iter().find_map(|name| open(OsStr::new(name)).ok());
    match by_name.and_then(|library| entry(&library)) {
        Some(found) if Some(found) == entry(&library) => Ok(library),
        Some(_) => Err(format!("{} is not the driver that this process opens by name; another one is", file.display())),
        None => Err(format!("{} does not go by the name of a driver ({})", file.display(), NAMES[2])),
    }
}

/// The address of a call, by which libraries are told apart.
fn entry(library: &Library) -> Option<usize> {
    // SAFETY: the address is only compared.
    unsafe { library.get::<*const c_void>(b"cuInit") }.map(|symbol| *symbol as usize).ok()
}
