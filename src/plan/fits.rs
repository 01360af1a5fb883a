//! Whether a machine holds a plan.

use std::collections::BTreeMap;

use super::value::{Assignment, DevicePlan, Parts};
use crate::checkpoint::{Layout, ModuleId};
use crate::device::{DeviceId, DeviceInfo, Machine};
use crate::dtype::TensorGrouping;
use crate::error::{Error, Limit, Result, Shortfall, Term};

/// Checks every device, and every memory that several devices share, against its free memory, or against its total if the
/// free memory is unknown.
///
/// # Errors
/// [`Error::DoesNotFit`] with everything that the plan needs of the device, and the first term that exceeds its memory.
pub(super) fn fits(
    machine: &Machine,
    layout: &Layout,
    devices: &[DevicePlan],
    assignments: &[Assignment],
) -> Result<()> {
    let mut shared: BTreeMap<DeviceId, u64> = BTreeMap::new();
    // A device that gets nothing is not opened, and its view of a shared memory does not matter.
    for plan in devices.iter().filter(|plan| plan.needed() > 0) {
        let info = machine.device(plan.id)?;
        let before = shared.entry(info.domain).or_default();
        // Devices that share a memory may report different amounts of it; the least counts.
        let memory = machine.device(info.domain).ok().filter(|memory| memory.usable() < info.usable()).unwrap_or(info);
        let needed = before.saturating_add(plan.needed());
        if needed > memory.usable() {
            return Err(short(plan, (layout, assignments), *before, memory));
        }
        *before = needed;
    }
    Ok(())
}

/// Checks the allocations that a plan needs against the largest that each device's driver makes. `in_slots` is the layout as slots
/// hold it. Allocations by element type are a framework's, and not checked.
///
/// # Errors
/// [`Error::DoesNotFit`] with the first allocation that is too large.
pub(super) fn allocations(machine: &Machine, layout: &Layout, in_slots: &Layout, parts: &Parts) -> Result<()> {
    for plan in parts.devices.iter().filter(|plan| plan.needed() > 0) {
        let info = machine.device(plan.id)?;
        let (Some(largest), computes) = (info.largest, plan.id == parts.compute) else { continue };
        let too_large = |term, module: Option<&str>, needed| {
            Err(Error::DoesNotFit(Box::new(Shortfall {
                device: plan.id,
                term,
                module: module.map(str::to_owned),
                needed,
                limit: largest,
                limit_is: Limit::InOneAllocation,
                total: info.total,
                short: needed - largest,
                remedies: Vec::new(),
            })))
        };
        let largest_tensor = |layout: &Layout, module: ModuleId| {
            layout.own_tensors(module).map(|tensor| layout.at(tensor).bytes).max().unwrap_or(0)
        };
        for home in parts.assignments.iter().filter(|a| a.device == plan.id) {
            // As `Plan::is_apart`.
            let apart = parts.grouping.is_apart() && !home.usage.is_fetched();
            let bytes = if apart { home.taken().min(largest_tensor(layout, home.index)) } else { home.taken() };
            if bytes > largest {
                return too_large(Term::Weights, Some(&home.module), bytes);
            }
        }
        if computes && !parts.external_slots {
            let slot = match parts.grouping {
                TensorGrouping::Joined => parts.slots.bytes_each.max(parts.slots.large_bytes),
                TensorGrouping::PerTensor => {
                    let fetched = parts.assignments.iter().filter(|a| a.usage.is_fetched());
                    fetched.map(|a| largest_tensor(in_slots, a.index)).max().unwrap_or(0)
                }
                TensorGrouping::PerType => 0,
            };
            if slot > largest {
                return too_large(Term::Slots, largest_fetched(layout, &parts.assignments), slot);
            }
            if parts.slots.landing_bytes > largest {
                return too_large(Term::Slots, None, parts.slots.landing_bytes);
            }
        }
    }
    Ok(())
}

/// The name of the layer that brings the most into a slot.
fn largest_fetched<'l>(layout: &'l Layout, assignments: &[Assignment]) -> Option<&'l str> {
    let bytes =
        |module: &ModuleId| Some(&assignments[module.index()]).filter(|a| a.usage.is_fetched()).map_or(0, |a| a.bytes);
    let layers = layout.layers().iter().rev();
    layers.max_by_key(|layer| layer.modules.iter().map(bytes).sum::<u64>()).map(|layer| layer.name.as_str())
}

fn short(
    plan: &DevicePlan,
    (layout, assignments): (&Layout, &[Assignment]),
    before: u64,
    memory: &DeviceInfo,
) -> Error {
    let limit = memory.usable();
    let needed = before.saturating_add(plan.needed());
    let mut sum = before;
    let mut passes = |bytes: u64| {
        sum = sum.saturating_add(bytes);
        sum > limit
    };
    let opening = passes(plan.beside.opening);
    // Which modules stay in files the plan does not say.
    let by_module = plan.weights.in_files == 0;
    let culprit = assignments.iter().filter(|a| by_module && a.device == plan.id).find(|a| passes(a.taken()));
    let (term, module) = match culprit {
        _ if opening => (Term::Opening, None),
        Some(assignment) => (Term::Weights, Some(assignment.module.to_string())),
        None if !by_module && passes(plan.weights.taken()) => (Term::Weights, None),
        None if passes(plan.beside.slots) => (Term::Slots, largest_fetched(layout, assignments).map(str::to_owned)),
        None if passes(plan.beside.scratch.saturating_sub(plan.beside.slots)) => (Term::Scratch, None),
        None => (Term::Reserve, None),
    };
    Error::DoesNotFit(Box::new(Shortfall {
        device: plan.id,
        term,
        module,
        needed,
        limit,
        limit_is: if memory.free.is_some() { Limit::Free } else { Limit::InAll },
        total: memory.total,
        short: needed.saturating_sub(limit),
        remedies: Vec::new(),
    }))
}
