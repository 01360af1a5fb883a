//! Devices whose driver has the shape of CUDA's: contexts, device memory by address, streams, events, and pinned host memory.
//!
//! The library has its own declarations of the calls, and its own management of memory, events, streams and their lifetimes.
//! A vendor brings its driver's [`Verbs`](verbs::Verbs), and says how the library is found and which devices there are
//! ([`Vendor`]); the rest is the same for all. A device's context is the one that the process shares: it is retained when the
//! device is opened, and none of its settings are changed.

#![expect(unsafe_code, reason = "the drivers' interfaces are ones of raw handles and addresses")]

#[macro_use]
mod verbs;
#[macro_use]
mod table;
#[macro_use]
mod settings;
#[cfg(feature = "ascend")]
mod ascend;
#[cfg(feature = "cambricon")]
mod cambricon;
mod context;
#[cfg(feature = "corex")]
mod corex;
mod cuda;
mod decompress;
mod dequantise;
mod device;
mod driver;
mod event;
#[cfg(feature = "hip")]
mod hip;
mod kernels;
mod memory;
mod module;
mod numa;
mod peers;
mod pinned;
mod stream;
mod trial;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use self::cuda::{Nvml, cufile};
use self::driver::Driver;
use self::pinned::{Nodes, Pins};
use self::settings::Settings;
use super::pinning_host::{Pin, PinningHost};
use super::sysfs::Sysfs;
use super::{Backend, Device, Found};
use crate::bytes::ByteSize;
use crate::device::{Bandwidth, DeviceId, DeviceInfo, DeviceKind, Topology};
use crate::error::{Error, Result};
#[cfg(feature = "ascend")]
pub use ascend::Ascend;
#[cfg(feature = "cambricon")]
pub use cambricon::Cambricon;
#[cfg(feature = "corex")]
pub use corex::Corex;
pub use cuda::Cuda;
pub(crate) use device::DriverDevice;
#[cfg(feature = "hip")]
pub use hip::Hip;
pub(crate) use memory::DeviceMemory;
pub(crate) use stream::DriverStream;
#[cfg(feature = "cudarc")]
pub(crate) use stream::PER_THREAD;

/// What a vendor brings to its backend.
trait Vendor: Send + Sync {
    /// The kind of its devices.
    const KIND: DeviceKind;

    /// Loads and initialises the driver, from this file if one is named, and lists the devices. Opens none.
    ///
    /// # Errors
    /// The reason why there are none.
    fn load(&self, library: Option<&Path>) -> std::result::Result<(Driver, Vec<DeviceInfo>), String>;

    /// The library that is asked about devices that are not open, beside a driver from this file if one is named.
    fn management(&self, library: Option<&Path>) -> Option<Nvml> {
        let _ = library;
        None
    }

    /// The library by which devices read files.
    fn file_reads(&self, sysfs: &Sysfs) -> Option<Arc<cufile::Settings>> {
        let _ = sysfs;
        None
    }
}

/// The approximate memory of a context on its device, 0.4 GiB. The driver reports the free memory only after opening; the
/// memory that opening took on a card is among the results of `scripts/gpu-check`.
const CONTEXT: ByteSize = ByteSize((4 << 30) / 10);

/// The devices of one vendor: the backend that the public types wrap.
struct Cards<V> {
    vendor: V,
    settings: Settings,
    found: OnceLock<std::result::Result<Shared, String>>,
}

/// The state that the devices of one backend share.
struct Shared {
    driver: Arc<Driver>,
    nvml: Option<Nvml>,
    /// The devices as they were found. Their free memory is queried again each time.
    devices: Vec<DeviceInfo>,
    pins: Arc<Pins>,
    open: Arc<Opened>,
}

/// The devices that are open, by number.
struct Opened {
    devices: Mutex<BTreeMap<u32, Weak<DriverDevice>>>,
    /// Whether they may copy directly from each other's memory.
    peers: bool,
    /// The library by which they read files, if there is one for them.
    cufile: Option<Arc<cufile::Settings>>,
}

impl Opened {
    fn devices(&self) -> MutexGuard<'_, BTreeMap<u32, Weak<DriverDevice>>> {
        // Every change is one insertion, so a poisoned lock still guards a consistent map.
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<DriverDevice>> {
        self.devices().values().filter_map(Weak::upgrade).collect()
    }

    fn get(&self, index: u32) -> Option<Arc<DriverDevice>> {
        self.devices().get(&index).and_then(Weak::upgrade)
    }
}

impl<V: Vendor> Cards<V> {
    fn new(vendor: V) -> Cards<V> {
        Cards { vendor, settings: Settings::default(), found: OnceLock::new() }
    }

    fn shared(&self) -> std::result::Result<&Shared, &str> {
        let find = || {
            let Settings { library, sysfs, pinned_cap, peers, host, .. } = &self.settings;
            let (driver, mut devices) = self.vendor.load(library.as_deref())?;
            let nvml = self.vendor.management(library.as_deref());
            devices.iter_mut().for_each(|info| self.add_links(info, nvml.as_ref()));
            let cufile = self.vendor.file_reads(sysfs);
            let open = Arc::new(Opened { peers: *peers, devices: Mutex::default(), cufile });
            let limit = pinned_cap.map_or_else(|| host.cpu().pinned_cap(), ByteSize::get);
            let nodes = Nodes { chosen: self.settings.numa_node, sysfs: sysfs.clone() };
            let pins = Arc::new(Pins::new(limit, Arc::clone(&open), nodes));
            Ok(Shared { driver: Arc::new(driver), nvml, devices, pins, open })
        };
        self.found.get_or_init(find).as_ref().map_err(String::as_str)
    }

    /// Adds the links of a device, as NVML and the system report them.
    fn add_links(&self, info: &mut DeviceInfo, nvml: Option<&Nvml>) {
        let Some(gpu) = &mut info.gpu else { return };
        let nvml = nvml.zip(gpu.uuid.as_deref());
        gpu.nvlinks = nvml.map(|(nvml, uuid)| nvml.nvlinks(uuid)).unwrap_or_default();
        let of_system = || self.settings.sysfs.pcie(&gpu.pci_bus_id);
        gpu.pcie = nvml.and_then(|(nvml, uuid)| nvml.pcie(uuid)).or_else(of_system);
        gpu.numa_node = self.settings.sysfs.numa_node(&gpu.pci_bus_id);
    }

    /// A device with its current free memory, and the memory that opening it takes.
    fn now(&self, shared: &Shared, info: &DeviceInfo) -> DeviceInfo {
        let uuid = info.gpu.as_ref().and_then(|gpu| gpu.uuid.as_deref());
        let free = shared.nvml.as_ref().zip(uuid).and_then(|(nvml, uuid)| nvml.free(uuid, info.total));
        let context = self.settings.context.map_or_else(|| CONTEXT.get().min(info.total / 8), ByteSize::get);
        // An older driver does not report contexts; those of this backend's devices are known.
        let open = shared.open.get(info.id.index()).is_some() || shared.driver.has_context(info.id);
        let opening = if open { 0 } else { context };
        info.clone().free(free).opening(opening)
    }
}

impl<V: Vendor> Cards<V> {
    fn discover(&self) -> Vec<Found> {
        match self.shared() {
            Err(why) => vec![Found::Absent { kind: V::KIND, why: why.to_owned() }],
            Ok(shared) => {
                let cpu = self.settings.host.cpu().pinnable(Some(shared.pins.limit()));
                shared.devices.iter().map(|info| self.now(shared, info)).chain([cpu]).map(Found::Here).collect()
            }
        }
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let shared = self.shared().map_err(|why| Error::DeviceAbsent { device: id, why: why.to_owned() })?;
        if id == DeviceId::CPU {
            let host = self.settings.host.open(id)?;
            return Ok(Arc::new(PinningHost::new(host, Arc::clone(&shared.pins))));
        }
        let Some(info) = shared.devices.iter().find(|info| info.id == id) else {
            return Err(Error::UnknownDevice {
                device: id,
                known: shared.devices.iter().map(|info| info.id).collect(),
            });
        };
        let mut open = shared.open.devices();
        if let Some(device) = open.get(&id.index()).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(DriverDevice::open(info.clone(), &shared.driver, Arc::clone(&shared.open))?);
        open.insert(id.index(), Arc::downgrade(&device));
        Ok(device)
    }

    /// The links of the devices with the speeds that such links are known to attain, all of them estimates. Peer access is as
    /// the driver reports it.
    fn topology(&self) -> Topology {
        let Ok(shared) = self.shared() else { return Topology::new() };
        let own_memory = |info: &&DeviceInfo| info.domain == info.id;
        let pcie = |info: &DeviceInfo| info.gpu.as_ref().and_then(|gpu| gpu.pcie);
        let mut topology = Topology::new();
        for info in shared.devices.iter().filter(own_memory) {
            if let Some(link) = pcie(info) {
                topology = topology.link(info.id, link.attainable());
            }
        }
        for to in &shared.devices {
            for from in shared.devices.iter().filter(|from| from.id != to.id) {
                if !self.settings.peers || !shared.driver.can_reach(to.id, from.id) {
                    topology = topology.no_access(from.id, to.id);
                } else if let Some(speed) = nvlink(from, to) {
                    topology = topology.directed_peer(from.id, to.id, speed);
                }
            }
        }
        topology.estimated()
    }
}

fn nvlink(from: &DeviceInfo, to: &DeviceInfo) -> Option<Bandwidth> {
    from.gpu.as_ref()?.attainable_over_nvlink(to.gpu.as_ref()?)
}
