//! Devices of any vendor, through Vulkan 1.3: AMD's, Intel's, Apple's through MoltenVK, and NVIDIA's where there is no CUDA.
//!
//! A device of Vulkan has buffers and no addresses, so its memory is a range of a buffer. Each stream is a timeline semaphore,
//! and each event a value of it: whatever waits for an event waits for that value, also on the same queue, since the order of
//! submissions alone makes no write visible.

#![expect(unsafe_code, reason = "the driver's interface is one of raw handles")]

mod adopted;
mod arena;
mod context;
mod copy;
mod decompress;
mod dequantise;
mod device;
mod dispatch;
mod event;
mod exit;
mod import;
mod instance;
pub(crate) mod interop;
mod kernels;
mod pinned;
mod pipelines;
mod queues;
mod raise;
mod semaphore;
mod staging;
mod stream;
mod timeline;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use super::pinning_host::{Pin, PinningHost};
use super::sysfs::Sysfs;
use super::{Backend, Device, Found, Host};
use crate::bytes::ByteSize;
use crate::device::{DeviceId, DeviceInfo, DeviceKind, Topology};
use crate::error::{Error, Result};
use adopted::Adopted;
pub use adopted::{AdoptedDevice, AdoptedQueue, EnabledFeatures};
#[cfg(feature = "wgpu")]
pub(crate) use adopted::{Suited, suits};
use device::VulkanDevice;
use instance::{Instance, Physical};
use pinned::Pins;
pub use queues::QueueLock;

/// The environment variable that admits software drivers.
const SOFTWARE_VARIABLE: &str = "TENSOR_OFFLOAD_VULKAN_SOFTWARE";

/// The backend of devices that have a driver for Vulkan 1.3 or later, and of `cpu` with memory that they copy from directly.
///
/// Finding devices loads Vulkan's library and opens no device. Their numbers are the order in which the library lists them. The
/// library is the system's, or the file that [`library`](Vulkan::library) or the environment variable
/// `TENSOR_OFFLOAD_LIBVULKAN` names. Without a usable driver, [`discover`](Backend::discover) returns the reason; nothing
/// panics. Drivers that compute on the processor (lavapipe, SwiftShader) count only where [`software`](Vulkan::software) or
/// `TENSOR_OFFLOAD_VULKAN_SOFTWARE=1` admits them.
///
/// A device that has no memory of its own is in the [domain](DeviceInfo::domain) of `cpu`. The free memory of a device is that
/// which the driver's budget leaves to this process, if the driver has one.
///
/// ```
/// use tensor_offload::backend::{Backend, Found, Vulkan};
/// for found in Vulkan::new().discover() {
///     match found {
///         Found::Here(device) => println!("{}: {}, {} bytes", device.id, device.name, device.total),
///         Found::Absent { kind, why } => println!("no {kind} device: {why}"),
///         _ => {}
///     }
/// }
/// ```
pub struct Vulkan {
    library: Option<PathBuf>,
    software: Option<bool>,
    pinned_cap: Option<ByteSize>,
    imports: bool,
    sysfs: Sysfs,
    host: Host,
    /// The caller's devices. `None` for those that the library finds.
    adopted: Option<Vec<Candidate>>,
    found: OnceLock<std::result::Result<Shared, String>>,
}

/// A device that can be opened, or that the caller has opened.
#[derive(Clone)]
struct Candidate {
    instance: Arc<Instance>,
    physical: Physical,
    adopted: Option<Arc<Adopted>>,
}

/// The state that the devices of one backend share.
struct Shared {
    devices: Vec<Candidate>,
    pins: Arc<Pins>,
    open: Arc<Opened>,
}

/// The devices that are open, by number.
#[derive(Default)]
struct Opened(Mutex<BTreeMap<u32, Weak<VulkanDevice>>>);

impl Opened {
    fn devices(&self) -> MutexGuard<'_, BTreeMap<u32, Weak<VulkanDevice>>> {
        // Every change is one insertion, so a poisoned lock still guards a consistent map.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<VulkanDevice>> {
        self.devices().values().filter_map(Weak::upgrade).collect()
    }
}

impl Default for Vulkan {
    fn default() -> Self {
        Vulkan::new()
    }
}

impl Vulkan {
    /// The Vulkan devices of this system.
    pub fn new() -> Vulkan {
        Vulkan {
            library: None,
            software: None,
            pinned_cap: None,
            imports: true,
            sysfs: Sysfs::default(),
            host: Host::new(),
            adopted: None,
            found: OnceLock::new(),
        }
    }

    /// Devices that the caller has opened, as `vulkan:0`, `vulkan:1` and so on, in place of those that the library would find and
    /// open: buffers of Vulkan belong to one open device, so only there the caller's own work can use the library's tensors
    /// ([`vulkan`](crate::vulkan)). Software drivers are admitted.
    ///
    /// The library destroys what it makes on a device, but neither the device nor the instance. If a device is lost, what the
    /// library has made on it stays, and so does its `keep`. Streams there have no [`occupy`](super::Stream::occupy).
    ///
    /// # Safety
    /// Of each of the devices, for as long as its `keep` lives:
    ///
    /// - the handles are valid, and the device is one of the physical device, which is one of the instance; the functions of
    ///   [`Instance`](crate::vulkan::ash::Instance) and [`Device`](crate::vulkan::ash::Device) of ash are theirs, and their code
    ///   stays loaded;
    /// - the instance was created for Vulkan 1.3 or later, the device with the features and the extensions that are said to be
    ///   enabled, and with queues of all named families;
    /// - the queues are the device's, of the named families. Nobody else uses one that is [the library's
    ///   own](AdoptedQueue::own); whoever uses [another](AdoptedQueue::shared) holds its lock meanwhile, and that lock excludes.
    ///   `vkDeviceWaitIdle`, which uses all queues, is not called while the library submits.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a null handle, for no queue, for one that is named twice, and for a family that the device does not
    /// have; [`Error::DeviceAbsent`] for a device that lacks what the library needs: Vulkan 1.3, an enabled feature, a queue that
    /// computes.
    pub unsafe fn adopt(devices: impl IntoIterator<Item = AdoptedDevice>) -> Result<Vulkan> {
        let numbered = devices.into_iter().enumerate();
        // SAFETY: the caller's promise.
        let candidate = |(number, device)| unsafe { adopted::candidate(DeviceId::vulkan(number as u32), device) };
        let adopted = numbered.map(candidate).collect::<Result<Vec<_>>>()?;
        Ok(Vulkan { adopted: Some(adopted), ..Vulkan::new() })
    }

    /// Sets the file of Vulkan's library: the loader's, or a driver's such as MoltenVK.
    #[must_use]
    pub fn library(mut self, file: impl Into<PathBuf>) -> Vulkan {
        self.library = Some(file.into());
        self
    }

    /// Sets whether drivers count that compute on the processor. Default: whether `TENSOR_OFFLOAD_VULKAN_SOFTWARE` is `1`.
    #[must_use]
    pub fn software(mut self, admitted: bool) -> Vulkan {
        self.software = Some(admitted);
        self
    }

    /// Sets the most host memory that may be pinned at one time. Plans for this machine respect it too. Default: the share of
    /// the host's memory that [`DeviceInfo::pinned_cap`] returns.
    #[must_use]
    pub fn pinned_cap(mut self, cap: ByteSize) -> Vulkan {
        self.pinned_cap = Some(cap);
        self
    }

    /// Sets whether pinned memory is the library's own, which the devices import where their drivers can
    /// (`VK_EXT_external_memory_host`). Default: yes. Otherwise the driver of the first open device allocates it, and copies to
    /// other devices pass through buffers.
    #[must_use]
    pub fn host_imports(mut self, allowed: bool) -> Vulkan {
        self.imports = allowed;
        self
    }

    /// Sets the backend of the host whose memory is pinned.
    #[must_use]
    pub fn host(mut self, host: Host) -> Vulkan {
        self.host = host;
        self
    }

    /// Adds the link of a device, as the system reports it.
    fn add_links(&self, info: &mut DeviceInfo) {
        let Some(gpu) = info.gpu.as_mut().filter(|gpu| !gpu.pci_bus_id.is_empty()) else { return };
        gpu.pcie = self.sysfs.pcie(&gpu.pci_bus_id);
        gpu.numa_node = self.sysfs.numa_node(&gpu.pci_bus_id);
    }

    fn shared(&self) -> std::result::Result<&Shared, &str> {
        let find = || {
            let mut devices = match &self.adopted {
                Some(adopted) => adopted.clone(),
                None => {
                    let instance = Instance::load(self.library.as_deref())?;
                    let devices = instance.devices(self.software.unwrap_or_else(software_is_admitted))?;
                    let candidate = |physical| Candidate { instance: Arc::clone(&instance), physical, adopted: None };
                    devices.into_iter().map(candidate).collect()
                }
            };
            devices.iter_mut().for_each(|device| self.add_links(&mut device.physical.info));
            let open = Arc::<Opened>::default();
            let limit = self.pinned_cap.map_or_else(|| self.host.cpu().pinned_cap(), ByteSize::get);
            let pins = Arc::new(Pins::new(limit, self.imports, Arc::clone(&open)));
            Ok(Shared { devices, pins, open })
        };
        self.found.get_or_init(find).as_ref().map_err(String::as_str)
    }
}

/// Runs calls of a driver, unless the process is ending.
#[cfg(feature = "wgpu")]
pub(crate) fn unless_ending(calls: impl FnOnce()) {
    if let Some(_entered) = exit::enter() {
        calls();
    }
}

/// Whether the environment admits software drivers.
pub(crate) fn software_is_admitted() -> bool {
    std::env::var_os(SOFTWARE_VARIABLE).is_some_and(|value| value == "1")
}

impl Candidate {
    fn id(&self) -> DeviceId {
        self.physical.info.id
    }

    fn now(&self) -> DeviceInfo {
        let free = self.instance.free(&self.physical);
        self.physical.info.clone().free(free)
    }
}

impl Backend for Vulkan {
    fn discover(&self) -> Vec<Found> {
        match self.shared() {
            Err(why) => vec![Found::Absent { kind: DeviceKind::Vulkan, why: why.to_owned() }],
            Ok(shared) => {
                let cpu = self.host.cpu().pinnable(Some(shared.pins.limit()));
                shared.devices.iter().map(Candidate::now).chain([cpu]).map(Found::Here).collect()
            }
        }
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let shared = self.shared().map_err(|why| Error::DeviceAbsent { device: id, why: why.to_owned() })?;
        if id == DeviceId::CPU {
            return Ok(Arc::new(PinningHost::new(self.host.open(id)?, Arc::clone(&shared.pins))));
        }
        let Some(candidate) = shared.devices.iter().find(|candidate| candidate.id() == id) else {
            let known = shared.devices.iter().map(Candidate::id).collect();
            return Err(Error::UnknownDevice { device: id, known });
        };
        let mut open = shared.open.devices();
        if let Some(device) = open.get(&id.index()).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(VulkanDevice::open(candidate.now(), candidate)?);
        open.insert(id.index(), Arc::downgrade(&device));
        Ok(device)
    }

    /// The links of the devices with the speeds that such links are known to attain, all of them estimates.
    fn topology(&self) -> Topology {
        let Ok(shared) = self.shared() else { return Topology::new() };
        let infos =
            shared.devices.iter().map(|candidate| &candidate.physical.info).filter(|info| info.domain == info.id);
        let pcie = |info: &DeviceInfo| info.gpu.as_ref().and_then(|gpu| gpu.pcie);
        let linked = infos.filter_map(|info| pcie(info).map(|link| (info.id, link.attainable())));
        linked.fold(Topology::new(), |topology, (id, speed)| topology.link(id, speed)).estimated()
    }
}

impl fmt::Debug for Vulkan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vulkan")
            .field("library", &self.library)
            .field("software", &self.software)
            .field("pinned_cap", &self.pinned_cap)
            .finish_non_exhaustive()
    }
}
