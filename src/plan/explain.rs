//! The explanation of an allocation that mode auto found.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::split::Donor;
use super::value::{Order, Plan, Unit};
use crate::allocation::Allocation;
use crate::bytes::ByteSize;
use crate::device::{DeviceId, Machine};

/// The reasons for a plan of mode auto. Prints as a few lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The quotas found. With the plan's order, its unit and [`kept`](Explanation::kept) they give the same
    /// placement.
    pub allocation: Allocation,
    /// Modules kept resident because they would make slots too large.
    pub kept: Vec<String>,
    /// The compute time of a pass that the search assumed; zero if none was given.
    pub compute: Duration,
    /// The time of a pass by [`Plan::forecast`], or by [`Plan::estimate`] if staging makes that longer.
    pub pass: Duration,
    /// The bytes on each device, with the reason.
    pub devices: Vec<DeviceReason>,
    /// The best plan of each other order and unit.
    pub others: Vec<Alternative>,
    /// The time of the best pass with modules kept [compressed](super::Planner::compress), if that is longer, so that none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed: Option<Duration>,
    /// The time of the best pass with resident modules kept [compressed](super::Planner::compress_resident), too, if that is no
    /// shorter, so that none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed_resident: Option<Duration>,
    /// The number of placements tried.
    pub tried: usize,
}

/// The bytes on one device, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceReason {
    /// The device.
    pub device: DeviceId,
    /// The bytes homed on it.
    pub bytes: u64,
    /// The reason.
    pub why: String,
}

/// The best plan of another order and unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Alternative {
    /// The order.
    pub order: Order,
    /// The unit.
    pub unit: Unit,
    /// The quotas.
    pub allocation: Allocation,
    /// The time of a pass.
    pub pass: Duration,
}

impl Alternative {
    pub(super) fn new(order: Order, unit: Unit, allocation: Allocation, pass: Duration) -> Alternative {
        Alternative { order, unit, allocation, pass }
    }
}

impl Explanation {
    /// Whether it says that `module` is kept resident for smaller slots.
    pub(super) fn keeps(&self, module: &str) -> bool {
        self.kept.iter().any(|kept| kept == module)
    }

    /// The explanation of a plan with everything on the compute device.
    pub(super) fn whole(plan: &Plan, allocation: Allocation, (compute, pass): (Duration, Duration)) -> Explanation {
        let reason = |device: &super::DevicePlan| DeviceReason {
            device: device.id,
            bytes: device.weights.bytes,
            why: "holds the whole model".to_owned(),
        };
        let devices = plan.devices().iter().filter(|device| device.weights.bytes > 0).map(reason).collect();
        let (kept, others, compressed, compressed_resident) = Default::default();
        Explanation { allocation, kept, compute, pass, devices, others, compressed, compressed_resident, tried: 1 }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one value, each made elsewhere")]
    pub(super) fn new(
        plan: &Plan,
        machine: &Machine,
        donors: &[Donor],
        (allocation, pass): (Allocation, Duration),
        compute: Duration,
        kept: Vec<String>,
        others: Vec<Alternative>,
        tried: usize,
    ) -> Explanation {
        let bytes = |device| plan.device(device).map_or(0, |d| d.weights.bytes);
        let own = DeviceReason { device: plan.compute(), bytes: bytes(plan.compute()), why: computes(plan) };
        let donor = |donor: &Donor| {
            let bytes = bytes(donor.device);
            DeviceReason { device: donor.device, bytes, why: donates(plan, machine, donor, bytes) }
        };
        let devices = std::iter::once(own).chain(donors.iter().map(donor)).collect();
        let (compressed, compressed_resident) = (None, None);
        Explanation { allocation, kept, compute, pass, devices, others, compressed, compressed_resident, tried }
    }

    /// This explanation of a plan that was preferred to that of another one, in which modules are kept compressed.
    pub(super) fn rather_than(self, compressed: &Explanation) -> Explanation {
        Explanation { compressed: Some(compressed.pass), ..self.after(compressed) }
    }

    /// This explanation of a plan that was preferred to that of another one, in which resident modules are kept compressed, too.
    pub(super) fn rather_than_resident(self, compressed: &Explanation) -> Explanation {
        Explanation { compressed_resident: Some(compressed.pass), ..self.after(compressed) }
    }

    /// This explanation, after a search that found another plan.
    pub(super) fn after(self, other: &Explanation) -> Explanation {
        Explanation { tried: self.tried + other.tried, ..self }
    }
}

fn computes(plan: &Plan) -> String {
    let (slots, reserve) = (plan.slots(), plan.device(plan.compute()).map_or(0, |d| d.beside.reserve));
    let reserve = if reserve > 0 { format!(" and {} in reserve", ByteSize(reserve).human()) } else { String::new() };
    let large = match slots.large {
        0 => String::new(),
        large => format!(" and {large} of {}", ByteSize(slots.large_bytes).human()),
    };
    format!(
        "computes: what fits beside {} slots of {}{large}{reserve}",
        slots.count,
        ByteSize(slots.bytes_each).human()
    )
}

fn donates(plan: &Plan, machine: &Machine, donor: &Donor, bytes: u64) -> String {
    if bytes == 0 {
        return "the others hold it all, no slower".to_owned();
    }
    let share = plan.device(donor.device);
    let streamed = share.map_or(0, |d| d.weights.streamed);
    let alone = donor.alone(0, donor.weights_in(streamed), machine.topology());
    let speed = match alone.is_zero() {
        true => "over a link of unknown speed".to_owned(),
        false => format!("{:.3} s on the way", alone.as_secs_f64()),
    };
    let staged = share.map_or(0, |d| d.weights.staged);
    let staged = if staged > 0 { format!(", {} of them staged", ByteSize(staged).human()) } else { String::new() };
    let full = if bytes >= donor.room - donor.room / 50 { ", full" } else { "" };
    format!("streams {} a pass: {speed}{staged}{full}", ByteSize(streamed).human())
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |time: Duration| time.as_secs_f64();
        write!(f, "auto: {}; a pass takes {:.3} s", self.allocation, seconds(self.pass))?;
        if !self.compute.is_zero() {
            write!(f, ", {:.3} of it compute", seconds(self.compute))?;
        }
        for DeviceReason { device, bytes, why } in &self.devices {
            write!(f, "\n  {device:8} {:>11}  {why}", ByteSize(*bytes).human())?;
        }
        if let Some(first) = self.kept.first() {
            let more = match self.kept.len() {
                1 => String::new(),
                n => format!(" and {} more", n - 1),
            };
            write!(f, "\n  {first}{more} stay resident, for smaller slots")?;
        }
        if let Some(pass) = self.compressed {
            write!(f, "\n  with weights kept compressed a pass takes {:.3} s", seconds(pass))?;
        }
        if let Some(pass) = self.compressed_resident {
            write!(f, "\n  with resident weights kept compressed, too, a pass takes {:.3} s", seconds(pass))?;
        }
        for other in &self.others {
            let unit = if other.unit == Unit::Uniform { ", uniform" } else { "" };
            write!(f, "\n  {}{unit}: {:.3} s with {}", other.order, seconds(other.pass), other.allocation)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explanation_keeps_the_modules_that_it_names() {
        let explanation = Explanation {
            allocation: Allocation::all_on(DeviceId::CPU),
            kept: vec!["embed".to_owned(), "layers.1.mlp".to_owned()],
            compute: Duration::ZERO,
            pass: Duration::ZERO,
            devices: Vec::new(),
            others: Vec::new(),
            compressed: None,
            compressed_resident: None,
            tried: 1,
        };
        assert!(explanation.keeps("embed") && explanation.keeps("layers.1.mlp"));
        assert!(!explanation.keeps("layers.1") && !explanation.keeps("head"));
    }
}
