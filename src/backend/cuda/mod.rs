//! CUDA devices, through the driver API.
//!
//! The library has its own declarations of the calls, and its own management of memory, events, streams and their lifetimes.
//! A device's primary context is retained when the device is opened, and shared with everything else in the process that
//! uses it. None of its settings are changed.

#![expect(unsafe_code, reason = "the driver's interface is one of raw handles and addresses")]

mod calls;
mod context;
mod cufile;
mod decompress;
mod dequantise;
mod device;
mod driver;
mod event;
mod kernels;
mod memory;
mod module;
mod numa;
mod nvml;
mod peers;
mod pinned;
mod stream;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use super::sysfs::Sysfs;
use super::{Backend, Device, Found, Gds, Host};
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

/// The backend of NVIDIA devices, and of `cpu` with memory that they copy from at full speed.
///
/// Finding devices loads the driver but opens no device. If NVIDIA's management library is installed, the free memory of the
/// devices is then known; it and, on Linux, the system also report their PCIe links and NVLinks. Without a usable driver,
/// [`discover`](Backend::discover) returns the reason; nothing panics. The driver's library is the system's, or the file that
/// [`library`](Cuda::library) or the environment variable `TENSOR_OFFLOAD_LIBCUDA` names.
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
    gds: Option<Gds>,
    cufile: Option<PathBuf>,
    numa_node: Option<u32>,
    host: Host,
    found: OnceLock<std::result::Result<Shared, String>>,
}

/// The approximate memory of a context on its device, 0.4 GiB. The driver reports the free memory only after opening; the
/// memory that opening took on a card is among the results of `scripts/gpu-check`.
const CONTEXT: ByteSize = ByteSize((4 << 30) / 10);

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
    devices: Mutex<BTreeMap<u32, Weak<CudaDevice>>>,
    /// Whether they may copy directly from each other's memory.
    peers: bool,
    /// The library by which they read files.
    cufile: Arc<cufile::Settings>,
}

impl Opened {
    fn devices(&self) -> MutexGuard<'_, BTreeMap<u32, Weak<CudaDevice>>> {
        // Every change is one insertion, so a poisoned lock still guards a consistent map.
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
            gds: None,
            cufile: None,
            numa_node: None,
            host: Host::new(),
            found: OnceLock::new(),
        }
    }

    /// Sets the driver's library file, for containers that keep it in an unusual location. The first driver that a process
    /// opens stays its driver.
    #[must_use]
    pub fn library(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.library = Some(file.into());
        self
    }

    /// Sets the file of NVIDIA's management library (NVML). Default: the system's, by its name. Without NVML, the free memory
    /// of a device is unknown until it is opened.
    #[must_use]
    pub fn nvml(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.nvml = Some(file.into());
        self
    }

    /// Sets the folder in which the system describes its hardware. Default: `/sys`.
    #[must_use]
    pub fn sysfs(mut self, folder: impl Into<PathBuf>) -> Cuda {
        self.sysfs = Sysfs::at(folder.into());
        self
    }

    /// Sets the memory that plans count for the context of a device that is not open yet. Default: 0.4 GiB, or an eighth of
    /// the device's memory if that is less.
    #[must_use]
    pub fn context_size(mut self, size: ByteSize) -> Cuda {
        self.context = Some(size);
        self
    }

    /// Sets whether devices may copy directly from each other's memory, if they can. Default: yes. Otherwise the driver is not
    /// asked about peer access, and copies between devices go through the host.
    #[must_use]
    pub fn peers(mut self, allowed: bool) -> Cuda {
        self.peers = allowed;
        self
    }

    /// Sets when files are read straight into a device's memory, by NVIDIA GPUDirect Storage. Default: what the environment
    /// variable `TENSOR_OFFLOAD_GDS` says (`off`, `auto`, `direct` or `always`), else [`Gds::Auto`]. All other reads pass pinned
    /// memory of the host. [`LoadReport`](crate::load::LoadReport) says what a load did.
    #[must_use]
    pub fn gds(mut self, gds: Gds) -> Cuda {
        self.gds = Some(gds);
        self
    }

    /// Sets the file of the library of GPUDirect Storage, libcufile. Default: what the environment variable
    /// `TENSOR_OFFLOAD_LIBCUFILE` names, else the system's, by its name.
    #[must_use]
    pub fn cufile(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.cufile = Some(file.into());
        self
    }

    /// Sets the NUMA node of the host on which memory of 1 MiB or more is pinned. Default: the node of the device that the
    /// memory is for ([`allocate_near`](Device::allocate_near)). If no device is named, it is the node of the open devices, if
    /// the system reports the same for all; otherwise the node on which the threads run that touch the memory first.
    #[must_use]
    pub fn numa_node(mut self, node: u32) -> Cuda {
        self.numa_node = Some(node);
        self
    }

    /// Sets the most host memory that may be pinned at one time. Plans for this machine respect it too. Default: the share of
    /// the host's memory that [`DeviceInfo::pinned_cap`] returns.
    #[must_use]
    pub fn pinned_cap(mut self, cap: ByteSize) -> Cuda {
        self.pinned_cap = Some(cap);
        self
    }

    /// Sets the backend of the host whose memory is pinned.
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
            devices.iter_mut().for_each(|info| self.add_links(info, nvml.as_ref()));
            let (gds, library, sysfs) = (self.gds, self.cufile.clone(), self.sysfs.clone());
            let cufile = Arc::new(cufile::Settings::new(gds, library, sysfs));
            let open = Arc::new(Opened { peers: self.peers, devices: Mutex::default(), cufile });
            let limit = self.pinned_cap.map_or_else(|| self.host.cpu().pinned_cap(), ByteSize::get);
            let pins = Arc::new(Pins::new(limit, Arc::clone(&open)));
            Ok(Shared { driver, nvml, devices, pins, open })
        };
        self.found.get_or_init(find).as_ref().map_err(String::as_str)
    }

    /// Adds the links of a device, as NVML and the system report them.
    fn add_links(&self, info: &mut DeviceInfo, nvml: Option<&Nvml>) {
        let Some(gpu) = &mut info.gpu else { return };
        let nvml = nvml.zip(gpu.uuid.as_deref());
        gpu.nvlinks = nvml.map(|(nvml, uuid)| nvml.nvlinks(uuid)).unwrap_or_default();
        gpu.pcie = nvml.and_then(|(nvml, uuid)| nvml.pcie(uuid)).or_else(|| self.sysfs.pcie(&gpu.pci_bus_id));
        gpu.numa_node = self.sysfs.numa_node(&gpu.pci_bus_id);
    }

    /// A device with its current free memory, and the memory that opening it takes.
    fn now(&self, shared: &Shared, info: &DeviceInfo) -> DeviceInfo {
        let uuid = info.gpu.as_ref().and_then(|gpu| gpu.uuid.as_deref());
        let free = shared.nvml.as_ref().zip(uuid).and_then(|(nvml, uuid)| nvml.free(uuid, info.total));
        let context = self.context.map_or_else(|| CONTEXT.get().min(info.total / 8), ByteSize::get);
        // An older driver does not report contexts; those of this backend's devices are known.
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
            let nodes = Nodes { chosen: self.numa_node, sysfs: self.sysfs.clone() };
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
