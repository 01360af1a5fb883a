//! Names of devices, as users write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The kind of a device: the part of its name before the colon.
///
/// Kinds sort in the order listed here. Kinds of other crates come last, sorted by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// Host memory.
    Cpu,
    /// Files.
    Disk,
    /// NVIDIA. Tools on PyTorch's builds for ROCm call AMD's devices so, too.
    Cuda,
    /// AMD through ROCm's HIP.
    Hip,
    /// Apple.
    Mps,
    /// Intel.
    Xpu,
    /// Ascend.
    Npu,
    /// Cambricon.
    Mlu,
    /// DirectML.
    DirectMl,
    /// Iluvatar.
    Corex,
    /// Any vendor's, through Vulkan.
    Vulkan,
    /// A kind that another crate defines.
    Other(KindName),
}

/// Each kind, its name, and whether one machine can have several devices of it.
const KINDS: [(DeviceKind, &str, bool); 11] = [
    (DeviceKind::Cpu, "cpu", false),
    (DeviceKind::Disk, "disk", false),
    (DeviceKind::Cuda, "cuda", true),
    (DeviceKind::Hip, "hip", true),
    (DeviceKind::Mps, "mps", false),
    (DeviceKind::Xpu, "xpu", true),
    (DeviceKind::Npu, "npu", true),
    (DeviceKind::Mlu, "mlu", true),
    (DeviceKind::DirectMl, "directml", true),
    (DeviceKind::Corex, "corex", true),
    (DeviceKind::Vulkan, "vulkan", true),
];

impl DeviceKind {
    /// The kind's name, in lower case.
    pub fn name(&self) -> &str {
        match self {
            DeviceKind::Other(name) => name.as_str(),
            known => KINDS.iter().find(|row| row.0 == *known).map_or("", |row| row.1),
        }
    }

    /// Whether a machine can have several devices of this kind, so that their names have a number.
    pub fn numbered(self) -> bool {
        KINDS.iter().find(|row| row.0 == self).is_none_or(|row| row.2)
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name of a kind that this library does not know: a letter, then letters, digits and `_`, at most 15 characters in
/// all.
///
/// A backend of another crate names its kind once, checked when it is compiled, and its devices by it:
///
/// ```
/// use tensor_offload::DeviceId;
/// use tensor_offload::device::{DeviceKind, KindName};
///
/// const NAME: KindName = KindName::new("loopback").unwrap();
/// assert_eq!(DeviceId::other(NAME, 1), "loopback:1".parse()?);
/// assert_eq!(DeviceId::other(NAME, 1).kind(), DeviceKind::Other(NAME));
/// assert!(KindName::new("cuda").is_none());
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KindName([u8; KindName::MAX]);

impl KindName {
    const MAX: usize = 15;

    /// The name `text`, in lower case. `None` if it is malformed, or the name of a kind that this library knows.
    pub const fn new(text: &str) -> Option<KindName> {
        let (text, mut name, mut at) = (text.as_bytes(), [0; Self::MAX], 0);
        if text.is_empty() || text.len() > Self::MAX || !text[0].is_ascii_alphabetic() {
            return None;
        }
        // Loops, since iterators are not for constants.
        while at < text.len() {
            if !text[at].is_ascii_alphanumeric() && text[at] != b'_' {
                return None;
            }
            name[at] = text[at].to_ascii_lowercase();
            at += 1;
        }
        let mut kind = 0;
        while kind < KINDS.len() {
            if text.eq_ignore_ascii_case(KINDS[kind].1.as_bytes()) {
                return None;
            }
            kind += 1;
        }
        Some(KindName(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|&b| b == 0).unwrap_or(Self::MAX);
        std::str::from_utf8(&self.0[..end]).unwrap_or("")
    }
}

impl fmt::Debug for KindName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// A device by name: `cpu`, `disk`, `cuda:0`.
///
/// Numbers of `cuda` devices are those of the driver, so `CUDA_VISIBLE_DEVICES` applies. Devices sort by kind, then by
/// number: `cuda:10` comes after `cuda:2`.
///
/// ```
/// use tensor_offload::DeviceId;
/// let device: DeviceId = " CUDA:2 ".parse()?;
/// assert_eq!(device, DeviceId::cuda(2));
/// assert_eq!(device.to_string(), "cuda:2");
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct DeviceId {
    kind: DeviceKind,
    index: u32,
}

impl DeviceId {
    /// Host memory.
    pub const CPU: DeviceId = DeviceId { kind: DeviceKind::Cpu, index: 0 };
    /// The disk tier.
    pub const DISK: DeviceId = DeviceId { kind: DeviceKind::Disk, index: 0 };

    /// The device `kind:index`. `None` if the kind has no numbers and `index` is not 0.
    pub fn new(kind: DeviceKind, index: u32) -> Option<DeviceId> {
        (index == 0 || kind.numbered()).then_some(DeviceId { kind, index })
    }

    /// The device `cuda:index`.
    pub const fn cuda(index: u32) -> DeviceId {
        DeviceId { kind: DeviceKind::Cuda, index }
    }

    /// The device `hip:index`.
    pub const fn hip(index: u32) -> DeviceId {
        DeviceId { kind: DeviceKind::Hip, index }
    }

    /// The device `vulkan:index`.
    pub const fn vulkan(index: u32) -> DeviceId {
        DeviceId { kind: DeviceKind::Vulkan, index }
    }

    /// The device `name:index`, of a kind that another crate defines.
    pub const fn other(name: KindName, index: u32) -> DeviceId {
        DeviceId { kind: DeviceKind::Other(name), index }
    }

    /// The device of a kind that has numbers.
    #[cfg(feature = "cuda")]
    pub(crate) const fn of(kind: DeviceKind, index: u32) -> DeviceId {
        DeviceId { kind, index }
    }

    /// The device's kind.
    pub fn kind(self) -> DeviceKind {
        self.kind
    }

    /// The device's number; 0 for kinds without numbers.
    pub fn index(self) -> u32 {
        self.index
    }

    /// Whether the device is the host itself.
    pub fn is_host(self) -> bool {
        self.kind == DeviceKind::Cpu
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind.numbered() { f.pad(&format!("{}:{}", self.kind, self.index)) } else { f.pad(self.kind.name()) }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    /// Parses a name in any letter case. Blanks around the name and around the colon are allowed.
    fn from_str(text: &str) -> Result<Self> {
        let syntax = |expected: String| Error::syntax(text, 0..text.len(), expected);
        let (kind, index) = match text.split_once(':') {
            Some((kind, index)) => (kind.trim(), Some(index.trim())),
            None => (text.trim(), None),
        };
        let known = KINDS.iter().find(|row| row.1.eq_ignore_ascii_case(kind)).map(|row| row.0);
        let kind = known
            .or_else(|| KindName::new(kind).map(DeviceKind::Other))
            .ok_or_else(|| syntax("a device such as cpu, disk or cuda:0".to_owned()))?;
        let index = match index {
            Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse().ok(),
            Some(_) => None,
            None if kind.numbered() => {
                return Err(syntax(format!("a number, as in {kind}:0")));
            }
            None => Some(0),
        };
        let device = index.and_then(|index| DeviceId::new(kind, index));
        device.ok_or_else(|| syntax(format!("a number that a device of kind {kind} can have")))
    }
}

impl From<DeviceId> for String {
    fn from(device: DeviceId) -> Self {
        device.to_string()
    }
}

impl TryFrom<String> for DeviceId {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_print() {
        for (text, printed) in [
            ("cpu", "cpu"),
            ("CPU:0", "cpu"),
            ("Disk", "disk"),
            (" cuda : 10 ", "cuda:10"),
            ("MPS", "mps"),
            ("xpu:1", "xpu:1"),
            ("npu:0", "npu:0"),
            ("mlu:3", "mlu:3"),
            ("DirectML:0", "directml:0"),
            ("corex:7", "corex:7"),
            ("Vulkan:1", "vulkan:1"),
            ("tpu_v5:2", "tpu_v5:2"),
        ] {
            let device: DeviceId = text.parse().unwrap();
            assert_eq!(device.to_string(), printed);
            assert_eq!(printed.parse::<DeviceId>().unwrap(), device);
        }
        for text in [
            "",
            ":0",
            "cuda",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:1.5",
            "cpu:1",
            "mps:2",
            "cuda:4294967296",
            "5:0",
            "gpu 1:0",
            "averyveryverylongname:0",
        ] {
            assert!(text.parse::<DeviceId>().is_err(), "{text}");
        }
    }

    #[test]
    fn kinds_of_other_crates_have_names_of_their_own() {
        for text in ["", "5", "_a", "a-b", "a b", "\u{e4}", "averyveryverylong"] {
            assert_eq!(KindName::new(text), None, "{text}");
        }
        for (_, name, _) in KINDS {
            assert_eq!((KindName::new(name), KindName::new(&name.to_uppercase())), (None, None), "{name}");
        }
        let name = KindName::new("Fifteen_letters").unwrap();
        assert_eq!(name.as_str(), "fifteen_letters");
        assert_eq!(DeviceId::other(name, 3).to_string().parse::<DeviceId>().unwrap(), DeviceId::other(name, 3));
        assert_eq!(DeviceId::new(DeviceKind::Other(name), 3), Some(DeviceId::other(name, 3)));
    }

    #[test]
    fn order_is_by_kind_then_number() {
        let mut devices: Vec<DeviceId> =
            ["tpu:0", "xpu:0", "cuda:10", "cpu", "cuda:2", "disk"].iter().map(|s| s.parse().unwrap()).collect();
        devices.sort();
        let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["cpu", "disk", "cuda:2", "cuda:10", "xpu:0", "tpu:0"]);
    }
}
