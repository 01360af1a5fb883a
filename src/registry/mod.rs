//! The devices of a machine, opened at first use, and the measured speeds of their links.

mod links;
mod pattern;
mod relay;
mod timing;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use links::measure_links;
pub use timing::LinkTiming;

use crate::backend::{Backend, Clock, Device, Found, Host, Simulated};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, LinkMatrix, Machine, MemorySnapshot, MemoryUsage, Topology};
use crate::error::{Error, Result};
use crate::limits::Limits;

/// All devices that this process can use.
///
/// A device is opened when it is first requested, and stays open. A device that is never requested is never touched.
///
/// ```
/// use tensor_offload::{DeviceId, Registry};
/// let devices = Registry::system();
/// assert!(devices.machine().device(DeviceId::CPU)?.total > 0);
/// println!("{}", devices.snapshot("start")); // tag=start|cpu=3.25/62.70|…
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Debug)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
    machine: Machine,
    /// The index of the backend that each device belongs to.
    owner: BTreeMap<DeviceId, usize>,
    absent: Vec<(DeviceKind, String)>,
    open: Mutex<BTreeMap<DeviceId, Arc<dyn Device>>>,
    /// Whether the devices are only described, so that staging memory comes from this system's host instead.
    described: bool,
    limits: Limits,
    /// The links, once measured.
    measured: Mutex<Option<Arc<LinkMatrix>>>,
}

impl Registry {
    /// Creates a registry of the devices that `backends` find. If two devices have the same id, the first is kept.
    pub fn new(backends: impl IntoIterator<Item = Arc<dyn Backend>>) -> Registry {
        let backends: Vec<_> = backends.into_iter().collect();
        let Discovery { infos, owner, absent } = Discovery::of(&backends);
        let topology = backends.iter().map(|b| b.topology()).find(|topology| *topology != Topology::new());
        let machine = Machine::new(infos, topology.unwrap_or_else(Topology::new));
        Registry {
            backends,
            machine,
            owner,
            absent,
            open: Mutex::default(),
            described: false,
            limits: Limits::default(),
            measured: Mutex::default(),
        }
    }

    /// The devices of this system: those of the drivers that the library is built for (by its features) and that are present, the
    /// host's memory, and its disk. A card that two drivers have is one memory with two names.
    pub fn system() -> Registry {
        let backends: Vec<Arc<dyn Backend>> = vec![
            // Precedes the host: it provides host memory that is pinned.
            #[cfg(feature = "cuda")]
            Arc::new(crate::backend::Cuda::new()),
            #[cfg(feature = "hip")]
            Arc::new(crate::backend::Hip::new()),
            #[cfg(feature = "corex")]
            Arc::new(crate::backend::Corex::new()),
            #[cfg(feature = "ascend")]
            Arc::new(crate::backend::Ascend::new()),
            #[cfg(feature = "cambricon")]
            Arc::new(crate::backend::Cambricon::new()),
            #[cfg(feature = "vulkan")]
            Arc::new(crate::backend::Vulkan::new()),
            Arc::new(Host::new()),
        ];
        Registry::new(backends)
    }

    /// Devices that are only described, as in `cuda:0=24gib,link=27.2` ([`Described`](crate::device::Described)). They are
    /// simulated in host memory with real bytes, and their copies take as long, in real time, as their links need. For trying
    /// programs without a card.
    ///
    /// ```
    /// use tensor_offload::{DeviceId, Registry};
    /// let devices = Registry::simulated(["cuda:0=24gib,link=27.2", "cpu=64gib"])?;
    /// assert_eq!(devices.machine().device(DeviceId::cuda(0))?.total, 24 << 30);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Allocation`] for a malformed description, with the position of the fault.
    pub fn simulated<'a>(devices: impl IntoIterator<Item = &'a str>) -> Result<Registry> {
        let devices: Vec<_> = devices.into_iter().map(str::parse).collect::<Result<_>>()?;
        Ok(Registry::described(Machine::described(&devices), Clock::Wall))
    }

    /// The simulated devices of a described machine, and no others.
    pub fn described(machine: Machine, clock: Clock) -> Registry {
        let registry = Registry::new([Arc::new(Simulated::new(machine, clock)) as Arc<dyn Backend>]);
        Registry { described: true, ..registry }
    }

    /// Sets the longest waits for work of its devices.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Registry {
        self.limits = limits;
        self
    }

    /// The longest waits for work of its devices.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The devices as they were when they were found. Opens none.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The devices as they are now, for planning in addition to what is already loaded. Opens none. For an open device, the
    /// free memory excludes reserved bytes, and opening takes nothing more.
    pub fn machine_now(&self) -> Machine {
        let Discovery { infos, owner, .. } = Discovery::of(&self.backends);
        let open = self.open_devices();
        // A device that appeared later is not part of this registry.
        let known = infos.into_iter().filter(|info| owner.get(&info.id) == self.owner.get(&info.id));
        let now = known.map(|info| match open.get(&info.id).and_then(|device| device.memory().ok()) {
            Some(memory) => info.free(Some(memory.available())).opening(0),
            None => info,
        });
        Machine::new(now, self.machine.topology().clone())
    }

    /// The kinds of device that are unavailable, each with the reason.
    pub fn absent(&self) -> &[(DeviceKind, String)] {
        &self.absent
    }

    /// The device `id`, which may be an [alias](DeviceInfo::aliases). Opens it if necessary.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] with the known devices; [`Error::DeviceAbsent`] with the reason when no device of its kind is
    /// available; any error of opening it.
    pub fn device(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let id = self.machine.named(id);
        let Some(&owner) = self.owner.get(&id) else { return Err(self.missing(id)) };
        let mut open = self.open_devices();
        if let Some(device) = open.get(&id) {
            return Ok(Arc::clone(device));
        }
        let device = self.backends[owner].open(id)?;
        open.insert(id, Arc::clone(&device));
        Ok(device)
    }

    /// The host whose memory is used for staging: `cpu`, or this system's host if the machine is described or has no
    /// `cpu`.
    pub(crate) fn staging_host(&self) -> Result<Arc<dyn Device>> {
        if self.described || !self.owner.contains_key(&DeviceId::CPU) {
            return Host::new().open(DeviceId::CPU);
        }
        self.device(DeviceId::CPU)
    }

    /// The devices opened so far, in order of id.
    pub fn opened(&self) -> Vec<Arc<dyn Device>> {
        self.open_devices().values().cloned().collect()
    }

    /// The current memory usage of all devices. Opens none: a device that is not open is shown as it was found.
    pub fn snapshot(&self, tag: impl Into<String>) -> MemorySnapshot {
        let open = self.open_devices();
        let memory = |info: &DeviceInfo| {
            let now = open.get(&info.id).and_then(|device| device.memory().ok());
            let found = MemoryUsage::new(info.total, info.usable(), 0, 0);
            (info.id, now.unwrap_or(found))
        };
        MemorySnapshot::new(tag, self.machine.devices().iter().map(memory))
    }

    /// Empties the allocator caches of all open devices. Returns the bytes that each device released.
    ///
    /// # Errors
    /// The first error, after all devices were trimmed.
    pub fn trim(&self) -> Result<BTreeMap<DeviceId, u64>> {
        let trimmed: Vec<_> = self.opened().iter().map(|device| (device.id(), device.trim())).collect();
        trimmed.into_iter().map(|(id, bytes)| bytes.map(|bytes| (id, bytes))).collect()
    }

    fn missing(&self, id: DeviceId) -> Error {
        let kind = id.kind();
        if self.owner.keys().any(|known| known.kind() == kind) {
            return Error::UnknownDevice { device: id, known: self.machine.ids().collect() };
        }
        let known = self.absent.iter().find(|(absent, _)| *absent == kind).map(|(_, why)| why.clone());
        let why = known.unwrap_or_else(|| format!("no backend for devices of kind {kind} was given to the registry"));
        Error::DeviceAbsent { device: id, why }
    }

    fn open_devices(&self) -> MutexGuard<'_, BTreeMap<DeviceId, Arc<dyn Device>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The devices that backends find.
#[derive(Default)]
struct Discovery {
    infos: Vec<DeviceInfo>,
    /// The index of the backend that each device belongs to.
    owner: BTreeMap<DeviceId, usize>,
    absent: Vec<(DeviceKind, String)>,
}

impl Discovery {
    fn of(backends: &[Arc<dyn Backend>]) -> Discovery {
        let mut found = Discovery::default();
        for (index, backend) in backends.iter().enumerate() {
            for device in backend.discover() {
                match device {
                    Found::Here(info) if !found.owner.contains_key(&info.id) => {
                        found.owner.insert(info.id, index);
                        let info = found.of_one_card(info);
                        found.infos.push(info);
                    }
                    Found::Here(_) => {}
                    Found::Absent { kind, why } => found.absent.push((kind, why)),
                }
            }
        }
        found
    }

    /// A device that is found, with the memory of the device found before that is the same card by another driver.
    fn of_one_card(&self, info: DeviceInfo) -> DeviceInfo {
        // An identifier of zeros is none.
        let says = |text: &&str| text.bytes().any(|byte| matches!(byte, b'1'..=b'9' | b'a'..=b'f'));
        let uuid = |info: &DeviceInfo| info.gpu.as_ref().and_then(|gpu| gpu.uuid.clone());
        let address = |info: &DeviceInfo| info.gpu.as_ref().map(|gpu| gpu.pci_bus_id.clone());
        let equal = |one: Option<String>, other: Option<String>| one == other && one.as_deref().filter(says).is_some();
        let same = |other: &&DeviceInfo| {
            other.id.kind() != info.id.kind()
                && (equal(uuid(other), uuid(&info)) || equal(address(other), address(&info)))
        };
        match self.infos.iter().find(same).map(|other| other.domain) {
            Some(domain) => info.domain(domain),
            None => info,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::GpuDetails;

    #[test]
    fn a_missing_device_says_why() {
        let machine = Machine::described(&["cuda:0=1gb".parse().unwrap(), "cpu=1gb".parse().unwrap()]);
        let registry = Registry::described(machine, Clock::Virtual);
        let unknown = registry.device(DeviceId::cuda(1)).unwrap_err();
        assert_eq!(unknown.to_string(), "there is no cuda:1 here; there are cpu, cuda:0");
        let absent = registry.device("npu:0".parse().unwrap()).unwrap_err();
        assert!(matches!(absent, Error::DeviceAbsent { .. }), "{absent}");
        assert!(registry.opened().is_empty(), "looking does not open");
    }

    /// Two drivers have one card: by its UUID, or by its place.
    #[test]
    fn a_card_of_two_drivers_is_one_memory() {
        let gpu = |uuid: Option<&str>, place: &str| {
            let uuid = uuid.map(str::to_owned);
            GpuDetails { uuid, ..GpuDetails::new((0, 0), place) }
        };
        let card = |id: DeviceId, gpu| DeviceInfo::new(id, 8).gpu(gpu);
        let of = |first: GpuDetails, second: GpuDetails| {
            let found = Discovery { infos: vec![card(DeviceId::cuda(0), first)], ..Discovery::default() };
            found.of_one_card(card(DeviceId::vulkan(3), second)).domain
        };
        let (one, same) = (DeviceId::vulkan(3), DeviceId::cuda(0));
        assert_eq!(of(gpu(Some("GPU-12"), ""), gpu(Some("GPU-12"), "")), same);
        assert_eq!(of(gpu(Some("GPU-12"), "0:1"), gpu(Some("GPU-13"), "0:2")), one);
        assert_eq!(of(gpu(None, "0:1:0.0"), gpu(Some("GPU-13"), "0:1:0.0")), same);
        assert_eq!(of(gpu(Some("GPU-00"), ""), gpu(Some("GPU-00"), "")), one);
        assert_eq!(of(gpu(None, ""), gpu(None, "")), one);
    }

    #[test]
    fn a_snapshot_follows_what_is_taken() {
        let machine = Machine::described(&["cuda:0=1gb,free=768mb".parse().unwrap()]);
        let registry = Registry::described(machine, Clock::Virtual);
        assert_eq!(registry.snapshot("found").to_string(), "tag=found|cuda:0=0.25/1.00");
        let card = registry.device(DeviceId::cuda(0)).unwrap();
        let held = card.alloc(1 << 28, crate::backend::MemoryKind::Arena).unwrap();
        assert_eq!(registry.snapshot("held").to_string(), "tag=held|cuda:0=0.50/1.00");
        let now = registry.machine_now();
        assert_eq!((now.devices()[0].free, registry.machine().devices()[0].free), (Some(512 << 20), Some(768 << 20)));
        drop(held);
        assert_eq!(registry.snapshot("freed").to_string(), "tag=freed|cuda:0=0.25/1.00");
    }
}
