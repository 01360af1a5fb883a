//! What machine the stand-in plays: its devices, their links, and how strict and how late it is.

use serde::{Deserialize, Serialize};

/// The whole machine. Starts as one device of 8 GiB, unpaced, with freed memory in quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What `cuDriverGetVersion` says: 1000 x major + 10 x minor.
    pub driver_version: i32,
    /// What `hipDriverGetVersion` says: 10,000,000 x major + 100,000 x minor + patch.
    pub hip_version: i32,
    /// What `aclrtGetVersion` says.
    pub acl_version: (i32, i32, i32),
    /// What `cnGetLibVersion` and `cnDriverGetVersion` say.
    pub cndrv_version: (i32, i32, i32),
    /// The devices, in the order of their ordinals.
    pub devices: Vec<DeviceConfig>,
    /// The pairs that can reach each other's memory; every pair that is not listed cannot.
    pub peers: Vec<Peer>,
    /// What happens to freed device memory.
    pub memory: MemoryMode,
    /// The most bytes of host memory that can be pinned at once; none: no limit.
    pub pinned_limit: Option<u64>,
    /// Whether host memory that the program has can be pinned.
    pub registers: bool,
    /// Copies run in pieces of this many bytes.
    pub piece_bytes: usize,
    /// Work starts this long after it was enqueued, unless the host waits for something.
    pub late_micros: u64,
    /// Perturbs the timing of the workers between pieces; none: they run straight through.
    pub seed: Option<u64>,
    /// Pinned sources are fingerprinted by the call and at the end of the copy, which takes its time: for timings, no.
    pub check_sources: bool,
    /// Every text of kernels is refused, as by a driver that cannot compile for its device.
    pub refuse_ptx: bool,
    /// A text in PTX that runs wherever code for AMD's devices would, which cannot run here; none: such code is refused.
    pub code_as_ptx: Option<String>,
    /// The longest pause that `seed` puts between two pieces.
    pub jitter_micros: u64,
    /// How long each function of the program that a stream calls takes of counted time, whatever it does.
    pub function_micros: u64,
    /// Fresh device memory is filled with rubbish up to this many bytes of each allocation.
    pub fill_fresh: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            driver_version: 12_040,
            hip_version: 60_443_484,
            acl_version: (1, 17, 0),
            cndrv_version: (2, 15, 5),
            devices: vec![DeviceConfig::default()],
            peers: Vec::new(),
            memory: MemoryMode::Quarantine,
            pinned_limit: None,
            registers: true,
            piece_bytes: 256 << 10,
            late_micros: 0,
            seed: None,
            check_sources: true,
            refuse_ptx: false,
            code_as_ptx: None,
            jitter_micros: 50,
            function_micros: 0,
            fill_fresh: 1 << 20,
        }
    }
}

impl Config {
    /// A machine with one device per entry, of that many bytes.
    pub fn with_devices(totals: &[u64]) -> Config {
        let devices = totals.iter().enumerate().map(|(i, &total)| DeviceConfig::numbered(i, total)).collect();
        Config { devices, ..Config::default() }
    }

    /// Lets every device reach every other one, unpaced.
    #[must_use]
    pub fn all_peers(mut self) -> Config {
        let count = self.devices.len();
        self.peers = (0..count)
            .flat_map(|from| (0..count).filter(move |&to| to != from).map(move |to| Peer::new(from, to)))
            .collect();
        self
    }

    /// Sets what happens to freed device memory.
    #[must_use]
    pub fn memory(mut self, memory: MemoryMode) -> Config {
        self.memory = memory;
        self
    }

    /// Sets how long work waits before it starts, unless the host waits for something.
    #[must_use]
    pub fn late_micros(mut self, micros: u64) -> Config {
        self.late_micros = micros;
        self
    }

    /// Sets the seed that perturbs the workers.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Config {
        self.seed = Some(seed);
        self
    }

    /// Paces both directions of every device's link to the host.
    #[must_use]
    pub fn links(mut self, link: Link) -> Config {
        for device in &mut self.devices {
            device.to_device = link;
            device.to_host = link;
        }
        self
    }

    /// The link from one device's memory to another's; none when it cannot reach it.
    pub(crate) fn peer(&self, from: usize, to: usize) -> Option<Link> {
        self.peers.iter().find(|p| p.from == from && p.to == to).map(|p| p.link)
    }
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// What `cuDeviceGetName` says.
    pub name: String,
    /// All of its memory, in bytes.
    pub total: u64,
    /// What other programs have taken of it, in bytes.
    pub others_bytes: u64,
    /// What a context takes of it, in bytes.
    pub context_bytes: u64,
    /// Allocations are counted in multiples of this many bytes.
    pub granularity: u64,
    /// Compute capability, major and minor.
    pub compute: (i32, i32),
    /// The architecture of a device of AMD's, as its bundles of code name it.
    pub architecture: String,
    /// The copy engines: with 1, both directions share it; with more, each has its own.
    pub copy_engines: i32,
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Whether it shares the host's memory.
    pub integrated: bool,
    /// Whether it has stream-ordered memory pools.
    pub pools: bool,
    /// The most streams at once; none: no limit. Ascend's devices have 512 to 2,048.
    pub streams_limit: Option<usize>,
    /// The most events at once; none: no limit. Ascend's devices have 1,023 to 65,536, and an event takes one when it is
    /// first recorded.
    pub events_limit: Option<usize>,
    /// `domain:bus:device.function`, in hexadecimal.
    pub pci_bus_id: String,
    /// What `cuDeviceGetUuid` says.
    pub uuid: [u8; 16],
    /// What the management library says of its PCIe link.
    pub pcie: Pcie,
    /// What it says that each NVLink leads to: the ordinal of a device, or more than there are for a switch.
    pub nvlinks: Vec<usize>,
    /// The link from the host.
    pub to_device: Link,
    /// The link to the host.
    pub to_host: Link,
}

impl Default for DeviceConfig {
    fn default() -> DeviceConfig {
        DeviceConfig::numbered(0, 8 << 30)
    }
}

impl DeviceConfig {
    /// A device with a number of its own in its name, bus address and UUID.
    pub fn numbered(index: usize, total: u64) -> DeviceConfig {
        let mut uuid = *b"cuda-standin-000";
        uuid[15] = b'0'.wrapping_add(index as u8);
        DeviceConfig {
            name: format!("Stand-in {index}"),
            total,
            others_bytes: 0,
            context_bytes: 0,
            granularity: 512,
            compute: (8, 0),
            architecture: "gfx90a".to_owned(),
            copy_engines: 2,
            multiprocessors: 8,
            integrated: false,
            pools: true,
            streams_limit: None,
            events_limit: None,
            pci_bus_id: format!("0000:{:02X}:00.0", index + 1),
            uuid,
            pcie: Pcie::default(),
            nvlinks: Vec::new(),
            to_device: Link::default(),
            to_host: Link::default(),
        }
    }

    /// Bus and device number, for the attributes that ask for them apart.
    pub(crate) fn pci_parts(&self) -> (i32, i32, i32) {
        let mut parts = self.pci_bus_id.split([':', '.']).map(|part| i32::from_str_radix(part, 16).unwrap_or_default());
        let mut next = || parts.next().unwrap_or_default();
        (next(), next(), next())
    }
}

/// A PCIe link as the management library tells of it; it paces nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pcie {
    /// The highest generation.
    pub max_generation: u32,
    /// The most lanes.
    pub max_width: u32,
    /// The generation now.
    pub generation: u32,
    /// The lanes now.
    pub width: u32,
}

impl Default for Pcie {
    fn default() -> Pcie {
        Pcie { max_generation: 4, max_width: 16, generation: 4, width: 16 }
    }
}

/// The pace of one direction of a link; by default as fast as the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Link {
    /// Bytes a second; 0: unpaced.
    pub bytes_per_second: u64,
    /// What every copy costs beside its bytes.
    pub latency_nanos: u64,
}

impl Link {
    /// A link of this bandwidth and latency.
    pub fn new(bytes_per_second: u64, latency_nanos: u64) -> Link {
        Link { bytes_per_second, latency_nanos }
    }

    pub(crate) fn is_paced(self) -> bool {
        self.bytes_per_second > 0 || self.latency_nanos > 0
    }

    /// How long a copy takes it.
    pub(crate) fn nanos(self, bytes: usize) -> u64 {
        let mut nanos = u128::from(self.latency_nanos);
        if self.bytes_per_second > 0 {
            nanos += bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second);
        }
        u64::try_from(nanos).unwrap_or(u64::MAX / 4)
    }
}

/// That the contexts of device `from` can reach the memory of device `to`, and how fast bytes go from `from` to `to`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Peer {
    /// The ordinal of the device that reaches.
    pub from: usize,
    /// The ordinal of the device whose memory is reached.
    pub to: usize,
    /// The pace.
    pub link: Link,
}

impl Peer {
    /// An unpaced pair.
    pub fn new(from: usize, to: usize) -> Peer {
        Peer { from, to, link: Link::default() }
    }
}

/// What happens to freed device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryMode {
    /// Its addresses are never handed out again, and its bytes are overwritten.
    #[default]
    Quarantine,
    /// The range that was freed last is handed out first, bytes and all; its next user must be ordered after
    /// its last one.
    Reuse,
}
