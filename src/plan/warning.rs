//! Warnings of a plan.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::device::DeviceId;
use crate::error::{Contradiction, Error, Result};

/// A warning of a plan: a quota that could not be kept, a pattern without effect.
///
/// It prints and serialises as a sentence, which parses back to an equal value.
///
/// ```
/// use tensor_offload::{Machine, Planner};
/// use tensor_offload::checkpoint::Layout;
/// use tensor_offload::plan::Warning;
/// let (layout, machine) = (Layout::blocks([1 << 30; 4]), Machine::described(&["cpu=64gib".parse()?]));
/// let plan = Planner::new(&layout, &machine).keep_resident("head").plan()?;
/// assert_eq!(plan.warnings(), [Warning::IdlePattern { pattern: "head".to_owned() }]);
/// assert_eq!(plan.warnings()[0].to_string(), "no module is named like `head`");
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[non_exhaustive]
pub enum Warning {
    /// A module should be on the compute device, but the quota does not hold it.
    NotKept {
        /// The module.
        module: String,
        /// Why it should be there.
        why: KeptFor,
        /// The compute device.
        device: DeviceId,
    },
    /// Fewer bytes can leave the compute device than the allocation asks for.
    LeavesLess {
        /// The bytes that should leave.
        target: u64,
        /// The bytes that can leave.
        left: u64,
    },
    /// The device for the remainder takes more than its quota.
    OverQuota {
        /// The device.
        device: DeviceId,
        /// The bytes that it takes.
        bytes: u64,
        /// Its quota.
        quota: u64,
    },
    /// The streamed layers of a class differ, because the compute device takes modules that no quota holds.
    NotUniform {
        /// The compute device.
        device: DeviceId,
    },
    /// Bytes streamed from a device are copied within one memory.
    OneMemory {
        /// The device.
        device: DeviceId,
        /// The compute device, which shares its memory.
        compute: DeviceId,
        /// The bytes that are copied in each pass.
        bytes: u64,
    },
    /// The folder of the disk device is in memory (tmpfs), so its weights take what they should leave free.
    DiskInMemory {
        /// The device.
        device: DeviceId,
        /// The device whose memory holds the folder.
        memory: DeviceId,
        /// The bytes of the weights there.
        bytes: u64,
    },
    /// The number of fixed slots does not divide the number of streamed layers, so fewer layers can be prefetched across the
    /// end of a pass.
    UnevenSlots {
        /// The number of slots.
        slots: usize,
        /// The number of streamed layers.
        layers: usize,
    },
    /// Modules are to be kept [compressed](super::Planner::compress), and the files have none of them so, or they change, and no load is
    /// to compress them.
    NothingCompressed {
        /// The bytes of the modules that the setting is for.
        bytes: u64,
    },
    /// A pattern matches no module.
    IdlePattern {
        /// The pattern.
        pattern: String,
    },
}

/// The reason why a module should be on the compute device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeptFor {
    /// The caller named it.
    Wanted,
    /// The module is used at both ends of the network.
    BothEnds,
}

impl fmt::Display for KeptFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            KeptFor::Wanted => "is to be kept resident",
            KeptFor::BothEnds => "is used at both ends",
        })
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::NotKept { module, why, device } => {
                write!(f, "`{module}` {why}, but the quota of {device} does not hold it")
            }
            Warning::LeavesLess { target, left } => {
                write!(f, "{target} bytes are to leave, but no more than {left} can")
            }
            Warning::OverQuota { device, bytes, quota } => {
                let more = bytes.saturating_sub(*quota);
                write!(f, "{device} takes what no quota holds: {bytes} bytes, {more} more than its {quota}")
            }
            Warning::NotUniform { device } => {
                write!(f, "the streamed layers are not uniform: {device} takes modules that no quota holds")
            }
            Warning::OneMemory { device, compute, bytes } => write!(
                f,
                "{device} and {compute} share one memory: {bytes} bytes are copied within it in each pass, which weights on {compute} would not need"
            ),
            Warning::DiskInMemory { device, memory, bytes } => write!(
                f,
                "the folder of {device} is in the memory of {memory}, which its {bytes} bytes take: TMPDIR or Host::disk_folder names one on a disk"
            ),
            Warning::UnevenSlots { slots, layers } => {
                let ahead = (layers % slots.max(&1)).saturating_sub(1);
                write!(
                    f,
                    "{slots} fixed slots do not divide {layers} streamed layers: the last of a pass sees {ahead} fetched ahead"
                )
            }
            Warning::NothingCompressed { bytes } => write!(
                f,
                "none of the {bytes} bytes that were to be kept compressed have a code: the model's files have none, or adapters change the weights; Weights::compress has the load make codes"
            ),
            Warning::IdlePattern { pattern } => write!(f, "no module is named like `{pattern}`"),
        }
    }
}

impl FromStr for Warning {
    type Err = Error;

    /// Parses the printed form of a warning.
    ///
    /// # Errors
    /// [`Error::Plan`] for any other text.
    fn from_str(text: &str) -> Result<Self> {
        let read = read(text).filter(|warning| warning.to_string() == text);
        read.ok_or_else(|| Contradiction::Warning { text: text.to_owned() }.into())
    }
}

/// Parses a warning. The text after a name is parsed first, so the name may contain any characters.
fn read(text: &str) -> Option<Warning> {
    if let Some(pattern) = text.strip_prefix("no module is named like `") {
        return Some(Warning::IdlePattern { pattern: pattern.strip_suffix('`')?.to_owned() });
    }
    if let Some(named) = text.strip_prefix('`') {
        let (named, device) = named.strip_suffix(" does not hold it")?.rsplit_once(", but the quota of ")?;
        let of = |why: KeptFor| Some((named.strip_suffix(&format!("` {why}"))?.to_owned(), why));
        let (module, why) = [KeptFor::Wanted, KeptFor::BothEnds].into_iter().find_map(of)?;
        return Some(Warning::NotKept { module, why, device: device.parse().ok()? });
    }
    if let Some(rest) = text.strip_prefix("the streamed layers are not uniform: ") {
        return Some(Warning::NotUniform { device: rest.split_once(' ')?.0.parse().ok()? });
    }
    if let Some((device, rest)) = text.split_once(" takes what no quota holds: ") {
        let (bytes, quota) = (rest.split_once(' ')?.0, rest.rsplit_once(' ')?.1);
        let (device, bytes, quota) = (device.parse().ok()?, bytes.parse().ok()?, quota.parse().ok()?);
        return Some(Warning::OverQuota { device, bytes, quota });
    }
    if let Some((devices, rest)) = text.split_once(" share one memory: ") {
        let ((device, compute), bytes) = (devices.split_once(" and ")?, rest.split_once(' ')?.0);
        let (device, compute, bytes) = (device.parse().ok()?, compute.parse().ok()?, bytes.parse().ok()?);
        return Some(Warning::OneMemory { device, compute, bytes });
    }
    if let Some((devices, rest)) = text.strip_prefix("the folder of ").and_then(|text| text.split_once(", which its "))
    {
        let ((device, memory), bytes) = (devices.split_once(" is in the memory of ")?, rest.split_once(' ')?.0);
        let (device, memory, bytes) = (device.parse().ok()?, memory.parse().ok()?, bytes.parse().ok()?);
        return Some(Warning::DiskInMemory { device, memory, bytes });
    }
    if let Some(rest) = text.strip_prefix("none of the ") {
        return Some(Warning::NothingCompressed { bytes: rest.split_once(' ')?.0.parse().ok()? });
    }
    if let Some((slots, rest)) = text.split_once(" fixed slots do not divide ") {
        let (slots, layers) = (slots.parse().ok()?, rest.split_once(' ')?.0.parse().ok()?);
        return Some(Warning::UnevenSlots { slots, layers });
    }
    let (target, left) = text.strip_suffix(" can")?.split_once(" bytes are to leave, but no more than ")?;
    Some(Warning::LeavesLess { target: target.parse().ok()?, left: left.parse().ok()? })
}

impl From<Warning> for String {
    fn from(warning: Warning) -> String {
        warning.to_string()
    }
}

impl TryFrom<String> for Warning {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn devices() -> impl Strategy<Value = DeviceId> {
        prop_oneof![Just(DeviceId::CPU), Just(DeviceId::DISK), any::<u32>().prop_map(DeviceId::cuda)]
    }

    fn names() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a-z.`* ]{0,12}",
            Just("a` is used at both ends, but the quota of cpu does not hold it".to_owned()),
            Just("cpu takes what no quota holds: 1 bytes".to_owned()),
        ]
    }

    fn warnings() -> impl Strategy<Value = Warning> {
        let why = prop_oneof![Just(KeptFor::Wanted), Just(KeptFor::BothEnds)];
        prop_oneof![
            (names(), why, devices()).prop_map(|(module, why, device)| Warning::NotKept { module, why, device }),
            any::<(u64, u64)>().prop_map(|(target, left)| Warning::LeavesLess { target, left }),
            (devices(), any::<u64>(), any::<u64>()).prop_map(|(device, bytes, quota)| Warning::OverQuota {
                device,
                bytes,
                quota
            }),
            devices().prop_map(|device| Warning::NotUniform { device }),
            (devices(), devices(), any::<u64>()).prop_map(|(device, compute, bytes)| Warning::OneMemory {
                device,
                compute,
                bytes
            }),
            (devices(), devices(), any::<u64>()).prop_map(|(device, memory, bytes)| Warning::DiskInMemory {
                device,
                memory,
                bytes
            }),
            any::<(usize, usize)>().prop_map(|(slots, layers)| Warning::UnevenSlots { slots, layers }),
            any::<u64>().prop_map(|bytes| Warning::NothingCompressed { bytes }),
            names().prop_map(|pattern| Warning::IdlePattern { pattern }),
        ]
    }

    proptest! {
        #[test]
        fn a_warning_is_a_sentence_that_is_read_back(warning in warnings()) {
            let json = serde_json::to_value(&warning).unwrap();
            prop_assert_eq!(&json, &serde_json::Value::from(warning.to_string()));
            prop_assert_eq!(serde_json::from_value::<Warning>(json).unwrap(), warning);
        }
    }

    #[test]
    fn other_sentences_are_refused() {
        for text in ["", "no module", "cpu takes what no quota holds: 3 bytes, 3 more than its 1", "`a` is used, but"] {
            let error = text.parse::<Warning>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{text}` is not a warning")), "{error}");
        }
    }
}
