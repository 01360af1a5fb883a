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

use self::calls::{Attribute, KernelCalls, OldUuidCalls, PoolCalls, UuidCalls};
pub(super) use self::nvml::Nvml;
use self::verbs::CudaVerbs;
use super::driver::{Batches, Driver, lacks, named, no_device, open, open_any};
use super::stream::PER_THREAD;
use super::table::Spelling;
use super::verbs::{DeviceHandle, MANY_EVENTS, Outcome, Peers, Rules, Verbs};
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
        load(&library, Nvidia::KIND, Variant::Nvidia)
    }

    fn management(&self, _library: Option<&Path>) -> Option<Nvml> {
        let nvml = Nvml::load(self.nvml.as_deref());
        nvml.inspect_err(|why| tracing::debug!(%why, "no management library")).ok()
    }

    fn file_reads(&self, sysfs: &Sysfs) -> Option<Arc<cufile::Settings>> {
        Some(Arc::new(cufile::Settings::new(self.gds, self.cufile.clone(), sysfs.clone())))
    }
}

/// Whose driver has the calls of CUDA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    Nvidia,
    /// Iluvatar's, which says that it is for CUDA 10.2. Programs were seen to fail that destroy what is in use (muda's port).
    #[cfg_attr(not(feature = "corex"), expect(dead_code, reason = "that backend is not built"))]
    CoreX,
}

impl Variant {
    fn name(self) -> &'static str {
        match self {
            Variant::Nvidia => "CUDA",
            Variant::CoreX => "CoreX",
        }
    }
}

/// Loads and initialises a driver that has the calls of CUDA's, and lists its devices.
///
/// # Errors
/// The reason why it cannot be used.
pub(super) fn load(library: &Library, kind: DeviceKind, variant: Variant) -> Result<(Driver, Vec<DeviceInfo>), String> {
    const SPELLING: Spelling = Spelling::Own;
    let verbs = CudaVerbs::find(library, SPELLING).map_err(lacks)?;
    // SAFETY: no flags are defined.
    let version = unsafe { verbs.calls.init(0) }.and_then(|()| verbs.version());
    let devices = version.and_then(|_| devices(&verbs, library, kind));
    let mut driver = Driver::new(
        verbs,
        Rules {
            kind,
            waits_across: true,
            peers: Peers::Both,
            registers: true,
            destroys_pending: variant == Variant::Nvidia,
            events: MANY_EVENTS,
            per_thread: Some(PER_THREAD),
        },
    );
    let version = version.map_err(|failure| driver.describe(failure))?;
    let from_corex = || devices.as_ref().is_ok_and(|found| found.iter().any(|info| info.name.starts_with(COREX_MAKER)));
    if variant == Variant::Nvidia && from_corex() {
        return Err("this driver is CoreX's, whose devices are corex:N".to_owned());
    }
    if variant == Variant::Nvidia && version < OLDEST {
        let of = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(format!("the driver is for CUDA {}, at least {} is needed", of(version), of(OLDEST)));
    }
    driver.pools = PoolCalls::find(library, SPELLING).ok();
    driver.kernels = KernelCalls::find(library, SPELLING).map_err(|missing| format!("the driver has no {missing}"));
    driver.batches = Batches::find(library, version);
    match devices.map_err(|failure| driver.describe(failure))? {
        devices if devices.is_empty() => Err(no_device(variant.name(), &["CUDA_VISIBLE_DEVICES"])),
        devices => Ok((driver, devices)),
    }
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
        let ask = |uuid: *mut [u8; 16]| match (&self.now, &self.old) {
            // SAFETY: the pointer is to sixteen living bytes, the device comes from the driver.
            (Some(calls), _) => Some(unsafe { calls.uuid(uuid, device) }),
            // SAFETY: as above.
            (None, Some(calls)) => Some(unsafe { calls.uuid(uuid, device) }),
            (None, None) => None,
        };
        let mut uuid = [0; 16];
        ask(&raw mut uuid)?.ok().map(|()| gpu_uuid(uuid))
    }
}

/// Opens the driver's library for good, and checks that others who look for it by its name, such as cudarc, find the same
/// one.
fn find(file: Option<&Path>) -> Result<ManuallyDrop<Library>, String> {
    let library = open_any(file, &NAMES.map(PathBuf::from), DRIVER)?;
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
