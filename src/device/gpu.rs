//! The properties of a GPU that its driver reports, apart from its memory.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Bandwidth;

/// The properties of a GPU that its driver reports, apart from its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GpuDetails {
    /// CUDA's compute capability, major and minor; `(0, 0)` for a device of another driver.
    pub compute_capability: (u32, u32),
    /// The PCI address, as `domain:bus:device.function` in hexadecimal; empty if the driver does not report it.
    pub pci_bus_id: String,
    /// The UUID, as `nvidia-smi -L` prints it.
    pub uuid: Option<String>,
    /// The number of copies that can run concurrently with compute.
    pub copy_engines: u32,
    /// Whether the GPU shares the host's memory.
    pub integrated: bool,
    /// The PCIe link. `None` if the driver does not report it.
    #[serde(default)]
    pub pcie: Option<PcieLink>,
    /// The NVLinks that are up.
    #[serde(default)]
    pub nvlinks: Vec<NvLink>,
    /// The nearest NUMA node of the host. `None` if the host has only one node or does not report it.
    #[serde(default)]
    pub numa_node: Option<u32>,
}

/// A PCIe link: its best and its current state. An idle GPU may have dropped to a slow generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PcieLink {
    /// The highest generation that both the device and its slot support.
    pub max_generation: u32,
    /// The most lanes that both support.
    pub max_width: u32,
    /// The current generation.
    pub generation: u32,
    /// The current number of lanes.
    pub width: u32,
}

/// The other end of one NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NvLink {
    /// The kind of device at the other end.
    pub end: NvLinkEnd,
    /// The PCI address of that device, as in [`GpuDetails::pci_bus_id`].
    pub pci_bus_id: String,
}

/// The kind of device at the other end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NvLinkEnd {
    /// Another GPU.
    Gpu,
    /// A switch, which connects all GPUs that are linked to it.
    Switch,
    /// Something else, a processor for example, or unknown.
    Other,
}

/// The attainable rate of one NVLink of 25 GB/s, in bytes a second: an A100's 12 links gave 276 GB/s between two GPUs in
/// the sample output of nvbandwidth.
const NVLINK_ATTAINS: u64 = 23_000_000_000;

impl PcieLink {
    /// A link of this generation and width, both current and highest.
    pub fn new(generation: u32, width: u32) -> PcieLink {
        PcieLink { max_generation: generation, max_width: width, generation, width }
    }

    /// The attainable speed of copies of pinned memory in each direction, by the link's highest generation and its current
    /// number of lanes.
    ///
    /// With nvbandwidth, sixteen lanes of generations 3, 4 and 5 gave 12.1, 26 and 57 GB/s. Other generations are assumed to
    /// attain the same fraction of their nominal rate as the nearest of these. This is an estimate: it does not include
    /// other traffic on the link, or a slow host.
    pub fn attainable(&self) -> Bandwidth {
        let sixteen_lanes: u64 = match self.max_generation {
            0 | 1 => 3_000_000_000,
            2 => 6_000_000_000,
            3 => 12_100_000_000,
            4 => 26_000_000_000,
            5 => 57_000_000_000,
            _ => 114_000_000_000,
        };
        Bandwidth::bytes_per_second(sixteen_lanes / 16 * u64::from(self.width.clamp(1, 16)))
    }
}

impl fmt::Display for PcieLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PcieLink { max_generation, max_width, generation, width } = self;
        write!(f, "PCIe {max_generation} x{max_width}")?;
        if (generation, width) != (max_generation, max_width) {
            write!(f, " (now {generation} x{width})")?;
        }
        Ok(())
    }
}

impl NvLink {
    /// A link to this kind of device, at this PCI address.
    pub fn new(end: NvLinkEnd, pci_bus_id: impl Into<String>) -> NvLink {
        NvLink { end, pci_bus_id: pci_bus_id.into() }
    }
}

impl GpuDetails {
    /// A GPU with this compute capability and PCI address. Everything else is unknown.
    pub fn new(compute_capability: (u32, u32), pci_bus_id: impl Into<String>) -> GpuDetails {
        GpuDetails {
            compute_capability,
            pci_bus_id: pci_bus_id.into(),
            uuid: None,
            copy_engines: 0,
            integrated: false,
            pcie: None,
            nvlinks: Vec::new(),
            numa_node: None,
        }
    }

    /// The attainable speed of copies from this GPU's memory to that of `other` over their common NVLinks, direct or through
    /// switches. `None` if they have none in common. An estimate, for links of 25 GB/s.
    pub fn attainable_over_nvlink(&self, other: &GpuDetails) -> Option<Bandwidth> {
        let straight = |a: &GpuDetails, b: &GpuDetails| {
            a.nvlinks.iter().filter(|link| link.end == NvLinkEnd::Gpu && link.pci_bus_id == b.pci_bus_id).count()
        };
        let switched = |gpu: &GpuDetails| gpu.nvlinks.iter().filter(|link| link.end == NvLinkEnd::Switch).count();
        let links = straight(self, other).min(straight(other, self)) + switched(self).min(switched(other));
        (links > 0).then(|| Bandwidth::bytes_per_second(NVLINK_ATTAINS * links as u64))
    }
}

impl fmt::Display for GpuDetails {
    /// Prints the links, as far as they are known: `PCIe 4 x16, 12 NVLinks`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pcie = self.pcie.map(|link| link.to_string());
        let nvlinks = match self.nvlinks.len() {
            0 => None,
            1 => Some("1 NVLink".to_owned()),
            links => Some(format!("{links} NVLinks")),
        };
        let node = self.numa_node.map(|node| format!("NUMA node {node}"));
        let known: Vec<String> = [pcie, nvlinks, node].into_iter().flatten().collect();
        f.pad(&known.join(", "))
    }
}

/// A UUID as `nvidia-smi -L` prints it.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) fn gpu_uuid(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(pci_bus_id: &str, nvlinks: &[(NvLinkEnd, &str)]) -> GpuDetails {
        let link = |&(end, id): &(NvLinkEnd, &str)| NvLink::new(end, id);
        GpuDetails {
            copy_engines: 2,
            pcie: Some(PcieLink { max_generation: 4, max_width: 16, generation: 1, width: 8 }),
            nvlinks: nvlinks.iter().map(link).collect(),
            numa_node: Some(1),
            ..GpuDetails::new((8, 0), pci_bus_id)
        }
    }

    #[test]
    fn a_link_is_estimated_by_its_generation_and_the_lanes_it_has() {
        let link = |max_generation, width| PcieLink { max_generation, max_width: 16, generation: 1, width };
        let gb = |link: PcieLink| link.attainable().to_string();
        assert_eq!([gb(link(3, 16)), gb(link(4, 16)), gb(link(5, 16))], ["12.1", "26", "57"]);
        assert_eq!([gb(link(4, 8)), gb(link(3, 1)), gb(link(5, 0))], ["13", "0.75625", "3.5625"]);
        assert!(link(6, 16).attainable() > link(5, 16).attainable());
        assert!(link(1, 16).attainable() < link(2, 16).attainable());
    }

    #[test]
    fn nvlinks_count_where_both_ends_tell_of_them() {
        use NvLinkEnd::{Gpu, Other, Switch};
        let (a, b) = (gpu("0:1", &[(Gpu, "0:2"), (Gpu, "0:2"), (Gpu, "0:3")]), gpu("0:2", &[(Gpu, "0:1")]));
        let speed = |a: &GpuDetails, b: &GpuDetails| a.attainable_over_nvlink(b).map(|speed| speed.to_string());
        assert_eq!(speed(&a, &b).as_deref(), Some("23"));
        let switched = |id: &str, links: usize| gpu(id, &vec![(Switch, "0:9"); links]);
        assert_eq!(speed(&switched("0:1", 12), &switched("0:2", 12)).as_deref(), Some("276"));
        assert_eq!(speed(&switched("0:1", 12), &b), None);
        assert_eq!(speed(&gpu("0:1", &[(Other, "0:2")]), &b), None);
    }

    #[test]
    fn links_print_as_far_as_they_are_told() {
        let told = gpu("0:1", &[(NvLinkEnd::Switch, "0:9"); 2]);
        assert_eq!(told.to_string(), "PCIe 4 x16 (now 1 x8), 2 NVLinks, NUMA node 1");
        let untold = GpuDetails { pcie: None, numa_node: None, ..gpu("0:1", &[]) };
        assert_eq!(untold.to_string(), "");
    }
}
