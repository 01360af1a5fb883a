//! CUDA devices, over the driver's own calls.
//!
//! The declarations of the calls, memory, events, streams and what keeps them alive are this library's own.
//! A device's primary context is retained when the device is opened and shared with everything else in the
//! process that uses it; none of its settings are touched.

#![expect(unsafe_code, reason = "the driver's interface is one of raw handles and addresses")]

mod calls;
mod context;
mod device;
mod driver;
mod event;
mod kernels;
mod memory;
mod numa;
mod nvml;
mod peers;
mod pinned;
mod reaper;
mod stream;
mod sysfs;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use super::{Backend, Device, Found, Host};
use crate::bytes::ByteSize;
use crate::device::{Bandwidth, DeviceId, DeviceInfo, DeviceKind, Topology};
use crate::error::{Error, Result};
pub(crate) use device::CudaDevice;
use driver::Driver;
pub(crate) use memory::DeviceMemory;
use nvml::Nvml;
use pinned::{Nodes, PinningHost, Pins};
pub(crate) use stream::CudaStream;
#[cfg(feature = "cudarc")]
pub(crate) use stream::PER_THREAD;
use sysfs::Sysfs;

/// The backend of NVIDIA devices, and of `cpu` with memory that they copy from at full speed.
///
/// Finding devices loads the driver and opens none of them. What of their memory is free is then known where NVIDIA's
/// management library is installed; it and, on Linux, the system also tell of their PCIe links and NVLinks. Where there is no driver, or none that will do,
/// [`discover`](Backend::discover) says why; nothing panics. The driver's library is the system's, or the file
/// that [`library`](Cuda::library) or the environment variable `TENSOR_OFFLOAD_LIBCUDA` names.
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
    library: Option<PathBuf>,
    nvml: Option<PathBuf>,
    sysfs: Sysfs,
    pinned_cap: Option<ByteSize>,
    context: Option<ByteSize>,
    peers: bool,
    numa_node: Option<u32>,
    host: Host,
    found: OnceLock<std::result::Result<Shared, String>>,
}

/// About what a context takes of its device's memory, 0.4 GiB. The driver tells only what is free after opening; what
/// opening took on a card is among the results of `scripts/gpu-check`.
const CONTEXT: ByteSize = ByteSize((4 << 30) / 10);

/// What the devices of one backend share.
struct Shared {
    driver: Arc<Driver>,
    nvml: Option<Nvml>,
    /// As they were found; what is free of them is asked for anew each time.
    devices: Vec<DeviceInfo>,
    pins: Arc<Pins>,
    open: Arc<Opened>,
}

/// The devices that are open, by number.
struct Opened {
    devices: Mutex<BTreeMap<u32, Weak<CudaDevice>>>,
    /// Whether they may copy straight from each other's memory.
    peers: bool,
}

impl Opened {
    fn devices(&self) -> MutexGuard<'_, BTreeMap<u32, Weak<CudaDevice>>> {
        // Every change is one insertion, so a poisoned lock still guards a whole map.
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<CudaDevice>> {
        self.devices().values().filter_map(Weak::upgrade).collect()
    }

    fn get(&self, index: u32) -> Option<Arc<CudaDevice>> {
        self.devices().get(&index).and_then(Weak::upgrade)
    }
}

impl Default for Cuda {
    fn default() -> Self {
        Cuda::new()
    }
}

impl Cuda {
    /// The CUDA devices of this system.
    pub fn new() -> Cuda {
        Cuda {
            library: None,
            nvml: None,
            sysfs: Sysfs::default(),
            pinned_cap: None,
            context: None,
            peers: true,
            numa_node: None,
            host: Host::new(),
            found: OnceLock::new(),
        }
    }

    /// Names the driver's library file, for containers that keep it in an unusual place. The first driver that a
    /// process opens stays its driver.
    #[must_use]
    pub fn library(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.library = Some(file.into());
        self
    }

    /// Names the file of NVIDIA's management library (NVML). Without it: the system's, by its name. Where there is
    /// none, the free memory of a device is unknown until it is opened.
    #[must_use]
    pub fn nvml(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.nvml = Some(file.into());
        self
    }

    /// Names the folder in which the system tells of its hardware. Without it: `/sys`.
    #[must_use]
    pub fn sysfs(mut self, folder: impl Into<PathBuf>) -> Cuda {
        self.sysfs = Sysfs::at(folder.into());
        self
    }

    /// Sets what plans count for the context of a device that is not open yet. Without it: 0.4 GiB, or an
    /// eighth of a device's memory where that is less.
    #[must_use]
    pub fn context_size(mut self, size: ByteSize) -> Cuda {
        self.context = Some(size);
        self
    }

    /// Sets whether devices may copy straight from each other's memory, where they can. Without it: yes. When they may
    /// not, the driver is asked nothing about it, and copies between devices go through the host.
    #[must_use]
    pub fn peers(mut self, allowed: bool) -> Cuda {
        self.peers = allowed;
        self
    }

    /// Sets the NUMA node of the host on which memory is pinned, from 1 MiB on. Without it: that of the device that the
    /// memory is for ([`allocate_near`](Device::allocate_near)); where none is named, that of the open devices
    /// if the system tells that they have the same; else wherever the threads run that touch it first.
    #[must_use]
    pub fn numa_node(mut self, node: u32) -> Cuda {
        self.numa_node = Some(node);
        self
    }

    /// Sets how much host memory may be pinned at one time; plans for this machine pin no more either. Without it: the share
    /// of the host's memory that [`DeviceInfo::pinned_cap`] says.
    #[must_use]
    pub fn pinned_cap(mut self, cap: ByteSize) -> Cuda {
        self.pinned_cap = Some(cap);
        self
    }

    /// The backend of the host whose memory is pinned.
    #[must_use]
    pub fn host(mut self, host: Host) -> Cuda {
        self.host = host;
        self
    }

    fn shared(&self) -> std::result::Result<&Shared, &str> {
        let find = || {
            let driver = Driver::load(self.library.as_deref())?;
            let nvml = Nvml::load(self.nvml.as_deref());
            let nvml = nvml.inspect_err(|why| tracing::debug!(%why, "no management library")).ok();
            let mut devices = driver.devices()?;
            devices.iter_mut().for_each(|info| self.look_around(info, nvml.as_ref()));
            let open = Arc::new(Opened { peers: self.peers, devices: Mutex::default() });
            let limit = self.pinned_cap.map_or_else(|| self.host.cpu().pinned_cap(), ByteSize::get);
            let pins = Arc::new(Pins::new(limit, Arc::clone(&open)));
            Ok(Shared { driver, nvml, devices, pins, open })
        };
        self.found.get_or_init(find).as_ref().map_err(String::as_str)
    }

    /// Adds what others than the driver tell of a device's links.
    fn look_around(&self, info: &mut DeviceInfo, nvml: Option<&Nvml>) {
        let Some(gpu) = &mut info.gpu else { return };
        let nvml = nvml.zip(gpu.uuid.as_deref());
        gpu.nvlinks = nvml.map(|(nvml, uuid)| nvml.nvlinks(uuid)).unwrap_or_default();
        gpu.pcie = nvml.and_then(|(nvml, uuid)| nvml.pcie(uuid)).or_else(|| self.sysfs.pcie(&gpu.pci_bus_id));
        gpu.numa_node = self.sysfs.numa_node(&gpu.pci_bus_id);
    }

    /// A device with what is free of it now, and what opening it will take of that.
    fn now(&self, shared: &Shared, info: &DeviceInfo) -> DeviceInfo {
        let uuid = info.gpu.as_ref().and_then(|gpu| gpu.uuid.as_deref());
        let free = shared.nvml.as_ref().zip(uuid).and_then(|(nvml, uuid)| nvml.free(uuid, info.total));
        let context = self.context.map_or_else(|| CONTEXT.get().min(info.total / 8), ByteSize::get);
        // An older driver does not tell of contexts; those of this backend's devices are known.
        let open = shared.open.get(info.id.index()).is_some() || shared.driver.has_context(info.id);
        let opening = if open { 0 } else { context };
        info.clone().free(free).opening(opening)
    }
}

impl Backend for Cuda {
    fn discover(&self) -> Vec<Found> {
        match self.shared() {
            Err(why) => vec![Found::Absent { kind: DeviceKind::Cuda, why: why.to_owned() }],
            Ok(shared) => {
                let cpu = self.host.cpu().pinnable(Some(shared.pins.limit()));
                shared.devices.iter().map(|info| self.now(shared, info)).chain([cpu]).map(Found::Here).collect()
            }
        }
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let shared = self.shared().map_err(|why| Error::DeviceAbsent { device: id, why: why.to_owned() })?;
        if id == DeviceId::CPU {
            let host = self.host.open(id)?;
            let nodes = Nodes { told: self.numa_node, sysfs: self.sysfs.clone() };
            return Ok(Arc::new(PinningHost::new(host, Arc::clone(&shared.pins), nodes)));
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
        let device = Arc::new(CudaDevice::open(info.clone(), &shared.driver, Arc::clone(&shared.open))?);
        open.insert(id.index(), Arc::downgrade(&device));
        Ok(device)
    }

    /// Which devices reach each other, by the driver, and what their links are known to attain: all of it estimates.
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
                if !self.peers || !shared.driver.can_reach(to.id, from.id) {
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

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("library", &self.library)
            .field("pinned_cap", &self.pinned_cap)
            .field("peers", &self.peers)
            .finish_non_exhaustive()
    }
}
