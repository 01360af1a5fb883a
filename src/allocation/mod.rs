//! Allocation strings: how much of a model each device takes.

mod builder;
mod parse;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use builder::AllocationBuilder;

use crate::bytes::{ByteSize, Decimal};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// How much of a model each device takes, as a user writes it.
///
/// `DEVICE,QUOTA` entries separated by `;`. All quotas of one string are of one [`Mode`]:
///
/// | quota | mode | meaning |
/// |---|---|---|
/// | `2.5gb`, `500 MiB`, `0b` | bytes | at most so much; units are powers of 1024 |
/// | `5gb*` | bytes | so much, and what no other quota holds |
/// | `50%` | ratio | a weight; the weights are normalised by their sum |
/// | `0.8`, `.5`, `1` | fraction | at most this part of the device's whole memory |
/// | `*` | any | what no other quota holds; in a ratio `100% - the others`, at least 0 |
///
/// Without a `*`, `cpu` takes what no quota holds. A fraction without a device (`0.8`) is for the compute
/// device. `EXPERT#COMPUTE;GIB;DONOR[,DONOR…]` names the compute device and, when `EXPERT` is empty, moves
/// at least `GIB` gibibytes from the end of the model to the donors (mode virtual). Letter case, blanks
/// around tokens, empty entries, a trailing `;` or `#`, and braces around the whole do not matter;
/// `cuda:0,0.85,cpu,0.15` is read as pairs.
///
/// `auto`, alone or before a `#`, lets the planner choose what makes a pass shortest on the machine.
/// `auto,reserve=2gb` keeps that much of the compute device free for activations.
///
/// `Display` prints a string that parses back to an equal value. In code, use a [builder](Allocation::builder).
///
/// ```
/// use tensor_offload::Allocation;
/// use tensor_offload::allocation::Mode;
/// let allocation: Allocation = "{ CUDA:0 , 2.5 GB ; cpu , * ; }".parse()?;
/// assert_eq!(allocation.mode(), Mode::Bytes);
/// assert_eq!(allocation.to_string(), "cuda:0,2.5gb;cpu,*");
/// # Ok::<(), tensor_offload::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Allocation {
    mode: Mode,
    entries: Vec<Entry>,
    virtual_vram: Option<VirtualVram>,
    /// The memory that mode auto keeps free; `None` if not given, and in other modes.
    reserve: Option<ByteSize>,
}

/// The meaning of an [`Allocation`]'s quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// Bytes, as hard caps.
    Bytes,
    /// Weights, normalised by their sum.
    Ratio,
    /// Parts of each device's whole memory, as hard caps.
    Fraction,
    /// An amount that leaves the compute device.
    Virtual,
    /// Chosen by the planner to make a pass shortest.
    Auto,
}

impl Allocation {
    /// The mode of its quotas. A string of only `*` is of mode bytes.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The compute device, if the string names one (after `#`).
    pub fn compute(&self) -> Option<DeviceId> {
        self.virtual_vram.as_ref().map(|v| v.compute)
    }

    /// An allocation of everything to `device`.
    pub fn all_on(device: DeviceId) -> Allocation {
        let entries = vec![Entry { device: Some(device), quota: Quota::Rest }];
        Allocation { mode: Mode::Bytes, entries, virtual_vram: None, reserve: None }
    }

    /// The memory to keep free on the compute device, if the string sets it (`auto,reserve=2gb`).
    pub fn reserve(&self) -> Option<ByteSize> {
        self.reserve
    }

    /// The same with other names of devices.
    pub(crate) fn renamed(mut self, name: impl Fn(DeviceId) -> DeviceId) -> Allocation {
        let virtual_vram = self.virtual_vram.iter_mut();
        let devices = virtual_vram.flat_map(|v| [&mut v.compute].into_iter().chain(&mut v.donors));
        let entries = self.entries.iter_mut().filter_map(|entry| entry.device.as_mut());
        devices.chain(entries).for_each(|device| *device = name(*device));
        self
    }

    /// The entries in order; empty in modes virtual and auto.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// What stands after `#`.
    pub(crate) fn virtual_vram(&self) -> Option<&VirtualVram> {
        self.virtual_vram.as_ref()
    }

    /// The weights of a ratio, one for each entry, exact in a unit that all share.
    ///
    /// `None` if they have too many digits for that, or if this is not a ratio.
    pub(crate) fn weights(&self) -> Option<Vec<u64>> {
        let percents = || self.entries.iter().filter_map(|e| e.quota.percent());
        let decimals = percents().map(Decimal::decimals).max().unwrap_or(0);
        let unit = 10u64.checked_pow(u32::try_from(decimals).ok()?)?;
        let mut others = 0u64;
        for percent in percents() {
            others = others.checked_add(percent.scaled_floor(unit)?)?;
        }
        let rest = unit.checked_mul(100)?.saturating_sub(others);
        others.checked_add(rest)?;
        let weight = |entry: &Entry| match &entry.quota {
            Quota::Rest => Some(rest),
            quota => quota.percent()?.scaled_floor(unit),
        };
        self.entries.iter().map(weight).collect()
    }
}

/// One device and its quota.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    /// `None` for the compute device, whichever that is.
    pub(crate) device: Option<DeviceId>,
    pub(crate) quota: Quota,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Quota {
    Bytes(ByteSize),
    /// `5gb*`: these bytes, and what no other quota holds.
    BytesAndRest(ByteSize),
    Percent(Decimal),
    Fraction(Decimal),
    /// `*`
    Rest,
}

impl Quota {
    /// The mode that the entry requires; `None` if it fits all modes.
    fn mode(&self) -> Option<Mode> {
        match self {
            Quota::Bytes(_) | Quota::BytesAndRest(_) => Some(Mode::Bytes),
            Quota::Percent(_) => Some(Mode::Ratio),
            Quota::Fraction(_) => Some(Mode::Fraction),
            Quota::Rest => None,
        }
    }

    /// Whether it carries a `*`.
    pub(crate) fn takes_rest(&self) -> bool {
        matches!(self, Quota::Rest | Quota::BytesAndRest(_))
    }

    fn percent(&self) -> Option<&Decimal> {
        match self {
            Quota::Percent(percent) => Some(percent),
            _ => None,
        }
    }
}

/// `COMPUTE;GIB;DONOR[,DONOR…]`
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct VirtualVram {
    pub(crate) compute: DeviceId,
    gib: Decimal,
    /// At least one, each once, none the compute device.
    pub(crate) donors: Vec<DeviceId>,
}

impl VirtualVram {
    /// The bytes that must leave the compute device; `None` if they exceed `u64`, which no parsed value does.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.gib.scaled_floor(1 << 30)
    }
}

/// The word for mode auto.
const AUTO: &str = "auto";

impl Mode {
    /// The name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Bytes => "bytes",
            Mode::Ratio => "ratio",
            Mode::Fraction => "fraction",
            Mode::Virtual => "virtual",
            Mode::Auto => AUTO,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Allocation {
    type Err = Error;

    /// # Errors
    /// [`Error::Allocation`] with the position of the error when the text is not a valid allocation.
    fn from_str(text: &str) -> Result<Self> {
        parse::allocation(text)
    }
}

impl TryFrom<&str> for Allocation {
    type Error = Error;

    /// As [`from_str`](Allocation::from_str).
    fn try_from(text: &str) -> Result<Self> {
        text.parse()
    }
}

impl fmt::Display for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.mode == Mode::Auto {
            f.write_str(AUTO)?;
        }
        if let Some(reserve) = self.reserve {
            write!(f, ",reserve={reserve}")?;
        }
        for (index, entry) in self.entries.iter().enumerate() {
            let separator = if index > 0 { ";" } else { "" };
            write!(f, "{separator}{entry}")?;
        }
        if let Some(v) = &self.virtual_vram {
            write!(f, "#{};{};", v.compute, v.gib)?;
            for (index, donor) in v.donors.iter().enumerate() {
                let separator = if index > 0 { "," } else { "" };
                write!(f, "{separator}{donor}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = self.device {
            write!(f, "{device},")?;
        }
        match &self.quota {
            Quota::Bytes(bytes) => write!(f, "{bytes}"),
            Quota::BytesAndRest(bytes) => write!(f, "{bytes}*"),
            Quota::Percent(percent) => write!(f, "{percent}%"),
            Quota::Fraction(fraction) => write!(f, "{fraction}"),
            Quota::Rest => f.write_str("*"),
        }
    }
}

impl From<Allocation> for String {
    fn from(allocation: Allocation) -> Self {
        allocation.to_string()
    }
}

impl TryFrom<String> for Allocation {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}
