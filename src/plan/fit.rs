//! Whether the devices hold what a plan puts on them.

use std::collections::BTreeMap;

use super::value::{Assignment, DevicePlan};
use crate::device::{DeviceId, DeviceInfo, Machine};
use crate::error::{Error, Limit, Result, Shortfall, Term};

/// Checks every device, and every memory that several of them share, against what is free, or against the
/// total where that is unknown. `largest` is the name of the largest streamed layer.
///
/// # Errors
/// [`Error::DoesNotFit`] with all that the plan needs of the device and the first term that passes its memory.
pub(super) fn check(
    machine: &Machine,
    devices: &[DevicePlan],
    assignments: &[Assignment],
    largest: Option<&str>,
) -> Result<()> {
    let mut shared: BTreeMap<DeviceId, u64> = BTreeMap::new();
    // A device that gets nothing is not opened, and what it knows of a memory that it shares does not matter.
    for plan in devices.iter().filter(|plan| plan.needed() > 0) {
        let info = machine.device(plan.id)?;
        let before = shared.entry(info.domain).or_default();
        // The devices of one memory may know different things of it; the least holds.
        let memory = machine.device(info.domain).ok().filter(|memory| memory.usable() < info.usable()).unwrap_or(info);
        let needed = before.saturating_add(plan.needed());
        if needed > memory.usable() {
            return Err(short(plan, assignments, *before, memory, largest));
        }
        *before = needed;
    }
    Ok(())
}

fn short(
    plan: &DevicePlan,
    assignments: &[Assignment],
    before: u64,
    memory: &DeviceInfo,
    largest: Option<&str>,
) -> Error {
    let limit = memory.usable();
    let needed = before.saturating_add(plan.needed());
    let mut sum = before;
    let mut passes = |bytes: u64| {
        sum = sum.saturating_add(bytes);
        sum > limit
    };
    let opening = passes(plan.opening);
    let culprit = assignments.iter().filter(|a| a.device == plan.id).find(|a| passes(a.bytes));
    let (term, module) = match culprit {
        _ if opening => (Term::Opening, None),
        Some(assignment) => (Term::Weights, Some(assignment.module.to_string())),
        None if passes(plan.slots) => (Term::Slots, largest.map(str::to_owned)),
        None if passes(plan.scratch.saturating_sub(plan.slots)) => (Term::Scratch, None),
        None => (Term::Reserve, None),
    };
    Error::DoesNotFit(Box::new(Shortfall {
        device: plan.id,
        term,
        module,
        needed,
        limit,
        limit_is: if limit < memory.total || memory.free.is_some() { Limit::Free } else { Limit::InAll },
        total: memory.total,
        short: needed.saturating_sub(limit),
    }))
}
