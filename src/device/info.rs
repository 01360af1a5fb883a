//! Facts about a device that are known without opening it, and machines made of devices.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Bandwidth, Described, DeviceId, GpuDetails, Topology};
use crate::bytes::ByteSize;
use crate::error::{Error, Result};

/// The facts about one device that are known without opening it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The name in allocation strings.
    pub id: DeviceId,
    /// The vendor's name, or a substitute.
    pub name: String,
    /// The total memory, in bytes.
    pub total: u64,
    /// The bytes that were free when the device was queried. `None` if that is unknown until the device is opened.
    pub free: Option<u64>,
    /// The bytes of memory that opening the device takes before anything is allocated there, for example for a context.
    /// Zero if opening takes nothing, and once the device is open, since `free` then excludes them.
    #[serde(default)]
    pub opening: u64,
    /// The most bytes of memory that may be pinned at one time, if a backend or a description says so; see
    /// [`pinned_cap`](DeviceInfo::pinned_cap).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinnable: Option<u64>,
    /// The bytes of the largest allocation that the device's driver makes. `None` if that is no less than its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest: Option<u64>,
    /// The speed at which the device decodes [compressed](crate::Planner::compress) weights, in bytes of the weights. `None` if it is not
    /// known: then forecasts and simulated clocks take decoding for free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoding: Option<Bandwidth>,
    /// The device whose memory this one shares (unified memory); otherwise the device itself.
    pub domain: DeviceId,
    /// Further properties of a GPU.
    pub gpu: Option<GpuDetails>,
    /// Further names that allocation strings may have for it, where the machine has no devices of that kind: a Vulkan device of
    /// Intel's is an `xpu`, for example.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<DeviceId>,
}

impl DeviceInfo {
    /// A device with its own memory, all of it free.
    pub fn new(id: DeviceId, total: u64) -> DeviceInfo {
        let (name, free) = (id.to_string(), Some(total));
        let (pinnable, largest, decoding, gpu, aliases) = (None, None, None, None, Vec::new());
        DeviceInfo { id, name, total, free, opening: 0, pinnable, largest, decoding, domain: id, gpu, aliases }
    }

    /// Sets the vendor's name.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> DeviceInfo {
        self.name = name.into();
        self
    }

    /// Sets the free bytes.
    #[must_use]
    pub fn free(mut self, free: Option<u64>) -> DeviceInfo {
        self.free = free;
        self
    }

    /// Sets the bytes that opening the device takes.
    #[must_use]
    pub fn opening(mut self, bytes: u64) -> DeviceInfo {
        self.opening = bytes;
        self
    }

    /// Sets the most bytes of memory that may be pinned at one time.
    #[must_use]
    pub fn pinnable(mut self, bytes: Option<u64>) -> DeviceInfo {
        self.pinnable = bytes;
        self
    }

    /// Sets the bytes of the largest allocation that its driver makes.
    #[must_use]
    pub fn largest(mut self, bytes: Option<u64>) -> DeviceInfo {
        self.largest = bytes;
        self
    }

    /// Sets the speed at which it decodes compressed weights.
    #[must_use]
    pub fn decoding(mut self, speed: Option<Bandwidth>) -> DeviceInfo {
        self.decoding = speed;
        self
    }

    /// Sets the device whose memory this one shares.
    #[must_use]
    pub fn domain(mut self, domain: DeviceId) -> DeviceInfo {
        self.domain = domain;
        self
    }

    /// Sets the properties of a GPU.
    #[must_use]
    pub fn gpu(mut self, details: GpuDetails) -> DeviceInfo {
        self.gpu = Some(details);
        self
    }

    /// Adds a further name.
    #[must_use]
    pub fn alias(mut self, id: DeviceId) -> DeviceInfo {
        self.aliases.push(id);
        self
    }

    /// The bytes that a plan can count on: the free bytes, or all if the free bytes are unknown. They include the bytes that
    /// opening the device takes.
    pub fn usable(&self) -> u64 {
        self.free.map_or(self.total, |free| free.min(self.total))
    }

    /// The most bytes of memory that may be pinned at one time: [`pinnable`](DeviceInfo::pinnable) if it is set. The default
    /// is 40 % of the total on Windows. Elsewhere it is 90 %, or all but 4 GiB if that is less, and at least 40 %. These are
    /// the caps that ComfyUI uses.
    pub fn pinned_cap(&self) -> u64 {
        let percent = |percent: u64| self.total / 100 * percent;
        self.pinnable.unwrap_or_else(|| match cfg!(windows) {
            true => percent(40),
            false => percent(40).max(percent(90).min(self.total.saturating_sub(4 << 30))),
        })
    }

    /// The part of [`usable`](DeviceInfo::usable) that is left for weights, slots and the rest once the device is open.
    pub fn usable_open(&self) -> u64 {
        self.usable().saturating_sub(self.opening)
    }
}

/// The memory usage of an open device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// The total memory.
    pub total: u64,
    /// The free memory, as the system or the driver reports it.
    pub free: u64,
    /// The memory that this process has taken through this library, allocated or reserved.
    pub charged: u64,
    /// The part of `charged` that is reserved and not allocated yet, so still counted in `free`.
    pub reserved: u64,
}

impl MemoryUsage {
    /// Creates a memory usage, all in bytes. `reserved` is the part of `charged` that is not allocated yet.
    pub fn new(total: u64, free: u64, charged: u64, reserved: u64) -> MemoryUsage {
        MemoryUsage { total, free, charged, reserved }
    }

    /// The memory that can still be taken: free and not reserved.
    pub fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    /// The memory in use by anyone: `total - free`.
    pub fn used(&self) -> u64 {
        self.total.saturating_sub(self.free)
    }
}

/// A set of devices and the links between them. Plans are made for a machine.
///
/// The devices are unique and in order of id, and they and the topology agree on which devices share a memory. This also
/// holds for a deserialised machine, whatever the order of its devices; naming a device twice is an error.
///
/// ```
/// use tensor_offload::Machine;
/// use tensor_offload::device::Topology;
/// let machine = Machine::described(&["cuda:0=24gib,link=27.2".parse()?, "cpu=64gib".parse()?]);
/// let unlinked = machine.with_topology(Topology::new());
/// assert_eq!(unlinked.devices()[0].total, 64 << 30);
/// assert!(unlinked.topology().segments().is_empty());
/// # Ok::<(), tensor_offload::Error>(())
/// ```
///
/// These properties stay true, since a machine cannot be changed in place:
///
/// ```compile_fail,E0616
/// let mut machine = tensor_offload::Machine::described(&["cpu=64gib".parse().unwrap()]);
/// machine.devices().clear();
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct Machine {
    devices: Vec<DeviceInfo>,
    topology: Topology,
}

/// The serialised form of a machine.
#[derive(Deserialize)]
#[serde(rename = "Machine")]
struct Parts {
    devices: Vec<DeviceInfo>,
    topology: Topology,
}

impl TryFrom<Parts> for Machine {
    type Error = Error;

    fn try_from(Parts { devices, topology }: Parts) -> Result<Machine> {
        let mut known = BTreeSet::new();
        match devices.iter().find(|device| !known.insert(device.id)) {
            Some(device) => Err(Error::invalid(format!("the machine has {} twice", device.id))),
            None => Ok(Machine::new(devices, topology)),
        }
    }
}

impl Machine {
    /// Creates a machine of these devices. If two devices have the same id, the later is kept. Devices that share a memory
    /// are entered in the topology, and devices that share a memory in the topology get its owner as their domain.
    pub fn new(devices: impl IntoIterator<Item = DeviceInfo>, topology: Topology) -> Machine {
        let mut by_id: BTreeMap<_, _> = devices.into_iter().map(|d| (d.id, d)).collect();
        let topology = by_id.values().fold(topology, |topology, d| topology.within(d.id, d.domain));
        by_id.values_mut().for_each(|device| device.domain = topology.memory_of(device.id));
        Machine { devices: by_id.into_values().collect(), topology }
    }

    /// Replaces the links between the devices. Devices that shared a memory still do.
    #[must_use]
    pub fn with_topology(self, topology: Topology) -> Machine {
        Machine::new(self.devices, topology)
    }

    /// The devices, in order of id and without duplicates.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// The links between the devices, as far as they are known.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Creates a machine from descriptions of its devices.
    pub fn described(devices: &[Described]) -> Machine {
        let mut topology = Topology::new();
        for device in devices {
            if let Some(link) = device.link {
                topology = topology.link(device.id, link);
            }
        }
        let info = |d: &Described| {
            let free = d.free.unwrap_or(d.total).get();
            let info = DeviceInfo::new(d.id, d.total.get()).name("described device").free(Some(free));
            let info = info.domain(d.domain.unwrap_or(d.id)).pinnable(d.pinned.map(ByteSize::get)).decoding(d.decode);
            info.largest(d.largest.map(ByteSize::get))
        };
        Machine::new(devices.iter().map(info), topology)
    }

    /// The id of the device that `id` names: `id`, or that of the first device that has it as an [alias](DeviceInfo::aliases) if
    /// the machine has no device of that kind.
    pub fn named(&self, id: DeviceId) -> DeviceId {
        let known = || self.devices.iter().find(|device| device.aliases.contains(&id));
        match self.devices.iter().any(|device| device.id.kind() == id.kind()) {
            true => id,
            false => known().map_or(id, |device| device.id),
        }
    }

    /// The device `id`, which may be an [alias](DeviceInfo::aliases).
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] with the known devices when there is no such device.
    pub fn device(&self, id: DeviceId) -> Result<&DeviceInfo> {
        let named = self.named(id);
        self.devices
            .iter()
            .find(|d| d.id == named)
            .ok_or_else(|| Error::UnknownDevice { device: id, known: self.ids().collect() })
    }

    /// The ids of the devices, in order.
    pub fn ids(&self) -> impl Iterator<Item = DeviceId> {
        self.devices.iter().map(|d| d.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_names_a_device_where_there_is_none_of_that_kind() {
        let id = |text: &str| text.parse::<DeviceId>().unwrap();
        let vulkan = |number, alias: &str| DeviceInfo::new(DeviceId::vulkan(number), 8).alias(id(alias));
        let found = |machine: &Machine, text| machine.device(id(text)).map(|info| info.id.to_string()).ok();
        let machine = Machine::new([vulkan(0, "xpu:0"), vulkan(1, "xpu:1"), vulkan(2, "cuda:0")], Topology::new());
        assert_eq!(
            ["xpu:1", "cuda:0"].map(|text| found(&machine, text)),
            ["vulkan:1", "vulkan:2"].map(|n| Some(n.into()))
        );
        assert_eq!(["xpu:2", "mps"].map(|text| found(&machine, text)), [None, None]);
        let card = DeviceInfo::new(DeviceId::cuda(1), 8);
        let machine = Machine::new([vulkan(0, "cuda:0"), card], Topology::new());
        assert_eq!(["cuda:1", "cuda:0"].map(|text| found(&machine, text)), [Some("cuda:1".into()), None]);
        let text = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), machine);
    }

    #[test]
    fn an_unknown_device_is_named_with_those_there_are() {
        let machine = Machine::described(&["cuda:0=1gb".parse().unwrap(), "cpu=1gb".parse().unwrap()]);
        let error = machine.device(DeviceId::cuda(3)).unwrap_err();
        assert_eq!(error.to_string(), "there is no cuda:3 here; there are cpu, cuda:0");
    }

    #[test]
    fn a_machine_from_a_file_is_in_order_and_has_each_device_once() {
        let described = ["cuda:0=2gb,link=27.2", "cuda:1=1gb,domain=cpu", "cpu=8gb"].map(|text| text.parse().unwrap());
        let machine = Machine::described(&described);
        let mut json = serde_json::to_value(&machine).unwrap();
        assert_eq!(json.as_object().unwrap().keys().collect::<Vec<_>>(), ["devices", "topology"]);
        json["devices"].as_array_mut().unwrap().reverse();
        // Shared memory in the topology follows from the devices, and vice versa.
        let mut unshared = json.clone();
        unshared["topology"]["within"].as_object_mut().unwrap().clear();
        let mut apart = json.clone();
        apart["devices"][0]["domain"] = "cuda:1".into();
        for json in [&json, &unshared, &apart] {
            assert_eq!(serde_json::from_value::<Machine>(json.clone()).unwrap(), machine);
        }
        let devices = json["devices"].as_array_mut().unwrap();
        devices.push(devices[0].clone());
        let error = serde_json::from_value::<Machine>(json).unwrap_err();
        assert!(error.to_string().contains("the machine has cuda:1 twice"), "{error}");
    }

    #[test]
    fn devices_and_topology_agree_on_memory_that_is_shared() {
        let (a, b) = (DeviceId::cuda(0), DeviceId::cuda(1));
        let devices = |a_in, b_in| [DeviceInfo::new(a, 1).domain(a_in), DeviceInfo::new(b, 1).domain(b_in)];
        let domains = |machine: &Machine| {
            let agree = |d: &DeviceInfo| d.domain == machine.topology().memory_of(d.id);
            assert!(machine.devices().iter().all(agree), "{machine:?}");
            machine.devices().iter().map(|d| d.domain).collect::<Vec<_>>()
        };
        let host = DeviceId::CPU;
        // Known to the topology alone; a memory within a memory; two memories, each declared to be within the other.
        assert_eq!(domains(&Machine::new(devices(a, b), Topology::new().within(a, host))), [host, b]);
        assert_eq!(domains(&Machine::new(devices(b, host), Topology::new())), [host, host]);
        assert_eq!(domains(&Machine::new(devices(host, a), Topology::new())), [host, host]);
        assert_eq!(domains(&Machine::new(devices(b, a), Topology::new())), [a, a]);
        let shared = Machine::new(devices(host, b), Topology::new()).with_topology(Topology::new());
        assert_eq!(domains(&shared), [host, b]);
    }

    #[test]
    #[cfg(not(windows))]
    fn a_host_pins_most_of_its_memory_but_not_all() {
        const GB: u64 = 1_000_000_000;
        let cap = |total| DeviceInfo::new(DeviceId::CPU, total).pinned_cap();
        assert_eq!((cap(100 * GB), cap(10 * GB), cap(5 * GB)), (90 * GB, 10 * GB - (4 << 30), 2 * GB));
        assert_eq!(DeviceInfo::new(DeviceId::CPU, 100 * GB).pinnable(Some(7)).pinned_cap(), 7);
    }
}
