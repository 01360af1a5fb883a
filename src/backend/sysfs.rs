//! Linux's information about the slot of a device and the host's NUMA nodes.
#![cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CUDA devices ask for nodes and storage"))]

use std::path::{Path, PathBuf};

use crate::device::PcieLink;

/// The folder in which Linux describes the hardware.
#[derive(Clone, Debug)]
pub(super) struct Sysfs(PathBuf);

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs(PathBuf::from("/sys"))
    }
}

impl Sysfs {
    /// Uses another folder of the same structure.
    pub(super) fn at(root: PathBuf) -> Sysfs {
        Sysfs(root)
    }

    /// The PCIe link of the device at `pci`, a `domain:bus:device.function`.
    pub(super) fn pcie(&self, pci: &str) -> Option<PcieLink> {
        let device = self.device(pci)?;
        // The parent of the device is the other end of its link; a switch or a root port has its own limits.
        let above = device.canonicalize().ok().and_then(|device| Some(device.parent()?.to_owned()));
        let both = |file: &str, read: fn(&Path) -> Option<u32>| {
            let here = read(&device.join(file))?;
            Some(above.as_ref().and_then(|above| read(&above.join(file))).map_or(here, |there| there.min(here)))
        };
        Some(PcieLink {
            max_generation: both("max_link_speed", generation)?,
            max_width: both("max_link_width", number)?,
            generation: generation(&device.join("current_link_speed"))?,
            width: number(&device.join("current_link_width"))?,
        })
    }

    /// The NUMA node of the device at `pci`. `None` if the host has one node or does not report it.
    pub(super) fn numa_node(&self, pci: &str) -> Option<u32> {
        let node = number(&self.device(pci)?.join("numa_node"))?;
        (self.nodes() > 1).then_some(node)
    }

    /// The numbers of a NUMA node's processors. Empty if they are not reported.
    pub(super) fn processors(&self, node: u32) -> Vec<usize> {
        let file = self.0.join(format!("devices/system/node/node{node}/cpulist"));
        std::fs::read_to_string(file).ok().and_then(|text| processors(text.trim())).unwrap_or_default()
    }

    /// The folder of a block device by its number, as it is among all devices.
    #[cfg(target_os = "linux")]
    pub(super) fn block_device(&self, number: u64) -> Option<PathBuf> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        self.0.join(format!("dev/block/{major}:{minor}")).canonicalize().ok()
    }

    fn nodes(&self) -> usize {
        let Ok(entries) = std::fs::read_dir(self.0.join("devices/system/node")) else { return 0 };
        let is_node = |name: &str| name.strip_prefix("node").is_some_and(|rest| rest.parse::<u32>().is_ok());
        entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count()
    }

    fn device(&self, pci: &str) -> Option<PathBuf> {
        // Linux writes a domain with four digits unless it needs more.
        let (domain, rest) = pci.split_once(':')?;
        let domain = u32::from_str_radix(domain, 16).ok()?;
        Some(self.0.join("bus/pci/devices").join(format!("{domain:04x}:{rest}")))
    }
}

/// The PCIe generation of the rate in a file, such as `16.0 GT/s PCIe`.
fn generation(file: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(file).ok()?;
    match text.split_whitespace().next()?.trim_end_matches(".0") {
        "2.5" => Some(1),
        "5" => Some(2),
        "8" => Some(3),
        "16" => Some(4),
        "32" => Some(5),
        "64" => Some(6),
        _ => None,
    }
}

/// Parses a list such as `0-3,8-11`. `None` for anything else.
fn processors(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        // Systems have at most some thousands of processors, so a longer range is cut off.
        all.extend(first..=last.min(first.saturating_add(65_536)));
    }
    Some(all)
}

fn number(file: &Path) -> Option<u32> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card below a root port, in a folder as Linux would make it.
    #[cfg(unix)]
    fn host(nodes: u32) -> (tempfile::TempDir, Sysfs) {
        let root = tempfile::tempdir().unwrap();
        let port = root.path().join("devices/pci0000:00/0000:00:01.0");
        let card = port.join("0001:0b:00.0");
        let write = |folder: &Path, files: &[(&str, &str)]| {
            std::fs::create_dir_all(folder).unwrap();
            files.iter().for_each(|(file, text)| std::fs::write(folder.join(file), format!("{text}\n")).unwrap());
        };
        write(&port, &[("max_link_speed", "16.0 GT/s PCIe"), ("max_link_width", "16")]);
        write(
            &card,
            &[
                ("max_link_speed", "32.0 GT/s PCIe"),
                ("max_link_width", "16"),
                ("current_link_speed", "2.5 GT/s PCIe"),
                ("current_link_width", "8"),
                ("numa_node", "1"),
            ],
        );
        let devices = root.path().join("bus/pci/devices");
        std::fs::create_dir_all(&devices).unwrap();
        std::os::unix::fs::symlink(&card, devices.join("0001:0b:00.0")).unwrap();
        for node in 0..nodes {
            std::fs::create_dir_all(root.path().join(format!("devices/system/node/node{node}"))).unwrap();
        }
        let sysfs = Sysfs::at(root.path().to_owned());
        (root, sysfs)
    }

    #[test]
    #[cfg(unix)]
    fn a_link_is_what_both_its_ends_can() {
        let (_root, sysfs) = host(2);
        let link = sysfs.pcie("00000001:0b:00.0").unwrap();
        assert_eq!(link, PcieLink { max_generation: 4, max_width: 16, generation: 1, width: 8 });
        assert_eq!(sysfs.numa_node("00000001:0b:00.0"), Some(1));
        assert_eq!((sysfs.pcie("00000001:0c:00.0"), sysfs.pcie("nonsense")), (None, None));
    }

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(processors("0-2,8,10-11"), Some(vec![0, 1, 2, 8, 10, 11]));
        assert_eq!((processors(""), processors("5-3")), (Some(vec![]), Some(vec![])));
        assert_eq!((processors("0-x"), processors("-1")), (None, None));
    }

    #[test]
    #[cfg(unix)]
    fn one_node_is_none_to_choose() {
        assert_eq!(host(1).1.numa_node("00000001:0b:00.0"), None);
        assert_eq!(host(0).1.numa_node("00000001:0b:00.0"), None);
    }
}
