//! Ready-made allocations.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::allocation::Allocation;
use crate::bytes::ByteSize;
use crate::checkpoint::Layout;
use crate::device::{DeviceId, DeviceInfo, DeviceKind, Machine};
use crate::error::{Error, Result};

/// A ready-made allocation: how much of the compute device's memory weights may take.
///
/// | preset | on the compute device | for |
/// |---|---|---|
/// | `NoVram` | only the slots of streamed layers | cards that are full or very small |
/// | `Low` | half of what `Normal` takes | large activations |
/// | `Normal` | the whole model if it fits with the margin; else what fits with margin and slots | most |
/// | `High` | the whole model; a plan that does not fit is an error | a card for one model |
/// | `Shared` | as `Normal` without slots, the rest on `disk` where there is one | devices that share the host's memory, on which a copy on the host gains nothing |
///
/// The rest is streamed from `cpu`. The margin is what ComfyUI keeps free: 0.8 GiB for inference and 400 MiB (on
/// Windows 600 MiB), but no more than a quarter of the device. Slots are those of the planner's default depth of 2:
/// three of the largest layer. Without an accelerator everything is on `cpu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Preset {
    /// All weights are streamed.
    NoVram,
    /// Half of what `Normal` takes.
    Low,
    /// What fits.
    #[default]
    Normal,
    /// Everything, or an error.
    High,
    /// What fits, on a device that shares the host's memory.
    Shared,
}

const ALL: [(Preset, &str); 5] = [
    (Preset::NoVram, "novram"),
    (Preset::Low, "low"),
    (Preset::Normal, "normal"),
    (Preset::High, "high"),
    (Preset::Shared, "shared"),
];

/// 0.8 GiB for inference and 400 MiB (Linux) or 600 MiB (Windows).
const MARGIN: u64 = (8 << 30) / 10 + ((if cfg!(windows) { 600 } else { 400 }) << 20);

/// The number of slots at the planner's default depth.
const SLOTS: u64 = 3;

impl Preset {
    /// The allocation for a model on a machine, as a string would give it. The compute device is the machine's
    /// first that is neither host nor disk, as it is for the [`Planner`](super::Planner).
    ///
    /// ```
    /// use tensor_offload::checkpoint::Layout;
    /// use tensor_offload::Machine;
    /// use tensor_offload::plan::Preset;
    /// let layout = Layout::blocks([1 << 30; 10]);
    /// let machine = Machine::described(&["cuda:0=8gib".parse()?, "cpu=64gib".parse()?]);
    /// assert_eq!(Preset::NoVram.allocation(&layout, &machine)?.to_string(), "cuda:0,0b;cpu,*");
    /// assert_eq!(Preset::High.allocation(&layout, &machine)?.to_string(), "cuda:0,*");
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// No machine or layout causes one; the type is that of [`AllocationBuilder::build`](crate::allocation::AllocationBuilder::build).
    pub fn allocation(self, layout: &Layout, machine: &Machine) -> Result<Allocation> {
        let accelerator = |device: &&DeviceInfo| !matches!(device.id.kind(), DeviceKind::Cpu | DeviceKind::Disk);
        let Some(device) = machine.devices().iter().find(accelerator) else {
            return Ok(Allocation::all_on(DeviceId::CPU));
        };
        let (id, total) = (device.id, layout.bytes());
        let room = device.usable_open().saturating_sub(MARGIN.min(device.total / 4));
        let whole = matches!(self, Preset::High) || (matches!(self, Preset::Normal | Preset::Shared) && total <= room);
        if whole {
            return Ok(Allocation::all_on(id));
        }
        let largest = layout.layers().iter().map(|layer| layout.slot(layer)).max().unwrap_or(0);
        let beside_slots = room.saturating_sub(largest.saturating_mul(SLOTS));
        let weights = match self {
            Preset::NoVram => 0,
            Preset::Low => beside_slots.min(total) / 2,
            _ => beside_slots,
        };
        let rest = match self {
            Preset::Shared if machine.device(DeviceId::DISK).is_ok() => DeviceId::DISK,
            _ => DeviceId::CPU,
        };
        Allocation::builder().bytes(id, ByteSize(weights)).rest(rest).build()
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(ALL.iter().find(|row| row.0 == *self).map_or("", |row| row.1))
    }
}

impl FromStr for Preset {
    type Err = Error;

    /// # Errors
    /// [`Error::Allocation`] when the text is none of the five names. Case is ignored.
    fn from_str(text: &str) -> Result<Self> {
        let found = ALL.iter().find(|row| row.1.eq_ignore_ascii_case(text.trim())).map(|row| row.0);
        let expected = "novram, low, normal, high or shared".to_owned();
        found.ok_or_else(|| Error::syntax(text, 0..text.len(), expected))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Planner;
    use super::*;

    fn machine(devices: &[&str]) -> Machine {
        Machine::described(&devices.iter().map(|device| device.parse().unwrap()).collect::<Vec<_>>())
    }

    fn text(preset: Preset, layout: &Layout, machine: &Machine) -> String {
        let allocation = preset.allocation(layout, machine).unwrap();
        let plan = Planner::new(layout, machine).allocation(allocation.clone()).plan();
        assert_eq!(
            plan.is_ok(),
            preset != Preset::High || layout.bytes() <= machine.devices().last().unwrap().usable()
        );
        allocation.to_string()
    }

    #[test]
    fn each_preset_takes_what_it_says() {
        let layout = Layout::blocks([1 << 30; 10]);
        let small = machine(&["cpu=64gib", "disk=64gib", "cuda:0=8gib"]);
        let room = (8u64 << 30) - MARGIN - (3 << 30);
        assert_eq!(text(Preset::NoVram, &layout, &small), "cuda:0,0b;cpu,*");
        assert_eq!(text(Preset::Low, &layout, &small), format!("cuda:0,{}b;cpu,*", room / 2));
        assert_eq!(text(Preset::Normal, &layout, &small), format!("cuda:0,{room}b;cpu,*"));
        assert_eq!(text(Preset::High, &layout, &small), "cuda:0,*");
        assert_eq!(text(Preset::Shared, &layout, &small), format!("cuda:0,{room}b;disk,*"));
        let large = machine(&["cpu=64gib", "cuda:0=24gib"]);
        for preset in [Preset::Normal, Preset::High, Preset::Shared] {
            assert_eq!(text(preset, &layout, &large), "cuda:0,*");
        }
        assert_eq!(text(Preset::Low, &layout, &large), "cuda:0,5gb;cpu,*");
        // Memory in use by others is not counted.
        let busy = machine(&["cpu=64gib", "cuda:0=24gib,free=1gib"]);
        assert_eq!(Preset::Normal.allocation(&layout, &busy).unwrap().to_string(), "cuda:0,0b;cpu,*");
        // A quarter of a small card is kept free, and where there is no disk the host has the rest.
        let little = machine(&["cpu=64gib", "cuda:0=2gib"]);
        let layers = Layout::blocks([100 << 20; 30]);
        assert_eq!(text(Preset::Shared, &layers, &little), format!("cuda:0,{}mb;cpu,*", 2048 - 512 - 300));
        let host = machine(&["cpu=64gib", "disk=64gib"]);
        for (preset, _) in ALL {
            assert_eq!(preset.allocation(&layout, &host).unwrap().to_string(), "cpu,*");
        }
    }

    #[test]
    fn names_parse_and_print() {
        for (preset, name) in ALL {
            assert_eq!((name.to_uppercase().parse::<Preset>().unwrap(), preset.to_string().as_str()), (preset, name));
        }
        assert!("medium".parse::<Preset>().is_err());
    }
}
