//! AMD's driver: the runtime library of HIP, whose calls are CUDA's by other names.
//!
//! Its memory pools are not used: with them, memory was handed out twice or zeroed late (CTranslate2 #2090), and threads hung
//! (rocm-systems #10529, hip #3370).

use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library;

use super::cuda::calls::{HipCalls, KernelCalls, UuidCalls};
use super::cuda::verbs::CudaVerbs;
use super::driver::{Driver, lacks, named, no_device, open_any, pci_bus_id};
use super::stream::PER_THREAD;
use super::table::Spelling;
use super::verbs::{DeviceHandle, MANY_EVENTS, Outcome, Peers, Rules, Verbs, given};
use super::{Cards, Vendor};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, GpuDetails};

/// The environment variable that names the driver's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBAMDHIP64";

/// The names of the library, the newest version first.
const NAMES: [&str; 4] = if cfg!(windows) {
    ["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll", "amdhip64_5.dll"]
} else {
    ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"]
};

/// What such a library is.
const DRIVER: &str = "HIP runtime";

/// What limits the devices that the runtime sees.
const VISIBLE: [&str; 2] = ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"];

/// What [`Hip`] finds where there is no card: `hipErrorNoDevice`, and `hipErrorInvalidDevice` from the first call of a process.
const NO_DEVICE: [i32; 2] = [100, 101];

/// The numbers of `hipDeviceAttribute_t`, which are not CUDA's. The same in the headers of 5.7, 6.0, 6.2, 6.4 and 7.0 to 7.2.
#[derive(Clone, Copy)]
enum Attribute {
    CopyEngines = 2,
    Integrated = 16,
}

/// The backend of AMD devices through ROCm's HIP runtime, and of `cpu` with memory that they copy from at full speed.
///
/// The devices are `hip:N`, in the order of the runtime, so `HIP_VISIBLE_DEVICES` and `ROCR_VISIBLE_DEVICES` apply; `cuda:N`, as
/// PyTorch's builds for ROCm call them, means them too where there are no CUDA devices. A library of version 5, 6 or 7 is used: one
/// that the process has loaded already, else the newest by its name, or the file that [`library`](Hip::library) or the environment
/// variable `TENSOR_OFFLOAD_LIBAMDHIP64` names. Without a usable one, [`discover`](crate::backend::Backend::discover) returns the
/// reason; nothing panics.
///
/// The runtime opens all its devices when it is loaded. The free memory of a device is known once it is open here. Freeing memory
/// waits for all work of the device, and setting a device prefers its NUMA node for the thread's memory; both are what the runtime
/// does.
///
/// Kernels patch on devices of the architectures gfx900, gfx906, gfx908, gfx90a, gfx942, gfx1030, gfx1100 to gfx1102, gfx1200 and
/// gfx1201, once a trial on the device gave the bytes that the host gives; on others the host patches. It computes the values of
/// blocks, too, and decodes compressed weights.
///
/// ```
/// use tensor_offload::backend::{Backend, Found, Hip};
/// for found in Hip::new().discover() {
///     match found {
///         Found::Here(device) => println!("{}: {}, {} bytes", device.id, device.name, device.total),
///         Found::Absent { kind, why } => println!("no {kind} device: {why}"),
///         _ => {}
///     }
/// }
/// ```
pub struct Hip {
    cards: Cards<Amd>,
}

struct Amd;

backend!(Hip);

impl Hip {
    /// The HIP devices of this system.
    pub fn new() -> Hip {
        Hip { cards: Cards::new(Amd) }
    }
}

impl Vendor for Amd {
    const KIND: DeviceKind = DeviceKind::Hip;

    fn load(&self, library: Option<&Path>) -> Result<(Driver, Vec<DeviceInfo>), String> {
        let library = find(named(library, LIBRARY_VARIABLE).as_deref())?;
        let verbs = CudaVerbs::find(&library, Spelling::Hip).map_err(lacks)?;
        let hip = HipCalls::find(&library, Spelling::Hip).map_err(lacks)?;
        // SAFETY: no flags are defined.
        let devices = unsafe { verbs.calls.init(0) }.and_then(|()| devices(&verbs, &hip, &library));
        let rules = Rules {
            kind: Amd::KIND,
            waits_across: true,
            peers: Peers::Both,
            registers: true,
            destroys_pending: true,
            events: MANY_EVENTS,
            per_thread: Some(PER_THREAD),
        };
        let mut driver = Driver::new(verbs, rules);
        driver.kernels =
            KernelCalls::find(&library, Spelling::Hip).map_err(|missing| format!("the runtime has no {missing}"));
        let devices = devices.map_err(|failure| match NO_DEVICE.contains(&failure.code.0) {
            true => no_device("HIP", &VISIBLE),
            false => driver.describe(failure),
        })?;
        if devices.is_empty() { Err(no_device("HIP", &VISIBLE)) } else { Ok((driver, devices)) }
    }
}

/// Opens the runtime's library for good: one that the process has loaded, because two versions in one process would know nothing of
/// each other; or the newest.
fn find(file: Option<&Path>) -> Result<ManuallyDrop<Library>, String> {
    let loaded = NAMES.iter().find_map(|name| loaded(name)).filter(|_| file.is_none());
    loaded.map_or_else(|| open_any(file, &NAMES.map(PathBuf::from), DRIVER), Ok)
}

/// The library of this name, if the process has loaded it.
#[cfg(target_os = "linux")]
fn loaded(name: &str) -> Option<ManuallyDrop<Library>> {
    use libloading::os::unix;
    // SAFETY: nothing is loaded, so nothing runs.
    let library = unsafe { unix::Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    library.ok().map(|library| ManuallyDrop::new(library.into()))
}

#[cfg(windows)]
fn loaded(name: &str) -> Option<ManuallyDrop<Library>> {
    let library = libloading::os::windows::Library::open_already_loaded(name);
    library.ok().map(|library| ManuallyDrop::new(library.into()))
}

#[cfg(not(any(target_os = "linux", windows)))]
fn loaded(_name: &str) -> Option<ManuallyDrop<Library>> {
    None
}

fn devices(verbs: &CudaVerbs, hip: &HipCalls, library: &Library) -> Outcome<Vec<DeviceInfo>> {
    let uuids = UuidCalls::find(library, Spelling::Hip).ok();
    let count = verbs.device_count()?.max(0).unsigned_abs();
    (0..count).map(|number| device_info(verbs, hip, uuids.as_ref(), number)).collect()
}

fn device_info(verbs: &CudaVerbs, hip: &HipCalls, uuids: Option<&UuidCalls>, number: u32) -> Outcome<DeviceInfo> {
    let device = verbs.device(number)?;
    let attribute = |attribute: Attribute| verbs.attribute(device, attribute as i32);
    let integrated = attribute(Attribute::Integrated) != 0;
    // SAFETY: the call writes at most the given number of bytes.
    let address = pci_bus_id(|text, room| unsafe { hip.pci_bus_id(text, room, device) });
    let details = GpuDetails {
        uuid: uuids.and_then(|calls| uuid(calls, device)),
        copy_engines: attribute(Attribute::CopyEngines).unsigned_abs(),
        integrated,
        ..GpuDetails::new((0, 0), address.unwrap_or_default())
    };
    let id = DeviceId::hip(number);
    let mut info =
        DeviceInfo::new(id, verbs.device_total(device)?).name(verbs.device_name(device)?).free(None).gpu(details);
    info.aliases = vec![DeviceId::cuda(number)];
    Ok(if integrated { info.domain(DeviceId::CPU) } else { info })
}

/// The UUID as `rocminfo` prints it: the runtime gives its sixteen digits as text, or `XX` for a card that has none. On Windows it
/// gives the address on the bus.
fn uuid(calls: &UuidCalls, device: DeviceHandle) -> Option<String> {
    // SAFETY: the pointer is to sixteen living bytes, the device comes from the driver.
    let uuid = given([0; 16], |uuid| unsafe { calls.uuid(uuid, device) }).ok()?;
    let digits = uuid.iter().all(u8::is_ascii_hexdigit);
    digits.then(|| format!("GPU-{}", String::from_utf8_lossy(&uuid)))
}
