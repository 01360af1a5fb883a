//! The allocation's quotas as bytes on the devices of one machine.

use crate::allocation::{Allocation, Entry, Mode, Quota};
use crate::device::{DeviceId, Machine};
use crate::error::{AllocationError, Error, Result};

/// The devices that modules can go to, in the order of the allocation.
#[derive(Debug)]
pub(super) struct Quotas {
    pub(super) bins: Vec<Bin>,
    /// The compute device's bin.
    pub(super) compute: usize,
    /// The remainder device's bin; a ratio may be without one.
    pub(super) rest: Option<usize>,
    /// Whether caps are hard. Those of a ratio are shares, which a device may miss by less than a module.
    pub(super) hard: bool,
}

/// One device and what it may take.
#[derive(Debug)]
pub(super) struct Bin {
    pub(super) device: DeviceId,
    /// The bytes that it takes of its own right; 0 for a bare `*`.
    pub(super) cap: u64,
    /// Whether it was given an amount, so that `cap` is its quota.
    pub(super) quoted: bool,
}

impl Quotas {
    /// # Errors
    /// [`Error::UnknownDevice`] for a device that `machine` lacks, [`AllocationError::DuplicateDevice`] when a fraction
    /// without a device and an entry of its own both name the compute device.
    pub(super) fn new(allocation: &Allocation, machine: &Machine, compute: DeviceId, total: u64) -> Result<Quotas> {
        machine.device(compute)?;
        if let (Mode::Virtual, Some(virtual_vram)) = (allocation.mode(), allocation.virtual_vram()) {
            let mut bins = vec![Bin { device: compute, cap: 0, quoted: false }];
            for &device in &virtual_vram.donors {
                bins.push(Bin { device, cap: machine.device(device)?.usable_open(), quoted: false });
            }
            return Ok(Quotas { bins, compute: 0, rest: Some(0), hard: true });
        }
        let ratio = allocation.mode() == Mode::Ratio;
        let shares = if ratio { shares(allocation, total)? } else { Vec::new() };
        let mut quotas = Quotas { bins: Vec::new(), compute: 0, rest: None, hard: !ratio };
        for (index, entry) in allocation.entries().iter().enumerate() {
            let device = entry.device.unwrap_or(compute);
            let whole = machine.device(device)?.total;
            if quotas.find(device).is_some() {
                return Err(twice(device, allocation.entries(), compute));
            }
            let (cap, quoted) = match &entry.quota {
                Quota::Bytes(bytes) | Quota::BytesAndRest(bytes) => (bytes.get(), true),
                Quota::Fraction(fraction) => (fraction.scaled_floor(whole).unwrap_or(whole), true),
                Quota::Percent(_) => (shares[index], true),
                Quota::Rest => (shares.get(index).copied().unwrap_or(0), ratio),
            };
            if entry.quota.takes_rest() {
                quotas.rest = Some(index);
            }
            quotas.bins.push(Bin { device, cap, quoted });
        }
        quotas.rest = quotas.rest.or_else(|| quotas.find(DeviceId::CPU));
        quotas.compute = quotas.find_or_add(compute, true);
        if quotas.hard && quotas.rest.is_none() {
            // Where it is also the compute device, it takes everything.
            let rest = quotas.find_or_add(DeviceId::CPU, false);
            quotas.bins[rest].quoted = false;
            quotas.rest = Some(rest);
        }
        Ok(quotas)
    }

    /// Whether the bin takes whatever comes.
    pub(super) fn takes_rest(&self, bin: usize) -> bool {
        self.hard && self.rest == Some(bin)
    }

    fn find(&self, device: DeviceId) -> Option<usize> {
        self.bins.iter().position(|bin| bin.device == device)
    }

    fn find_or_add(&mut self, device: DeviceId, quoted: bool) -> usize {
        self.find(device).unwrap_or_else(|| {
            self.bins.push(Bin { device, cap: 0, quoted });
            self.bins.len() - 1
        })
    }
}

/// The bytes of each entry of a ratio; they add up to `total`.
fn shares(allocation: &Allocation, total: u64) -> Result<Vec<u64>> {
    let weights =
        allocation.weights().ok_or_else(|| Error::bug("an allocation whose percentages have too many digits"))?;
    let sum: u128 = weights.iter().map(|&w| u128::from(w)).sum();
    let upto = |weight: u128| (u128::from(total) * weight / sum.max(1)) as u64;
    let mut before = 0u128;
    let share = |&weight: &u64| {
        let start = upto(before);
        before += u128::from(weight);
        upto(before) - start
    };
    Ok(weights.iter().map(share).collect())
}

fn twice(device: DeviceId, entries: &[Entry], compute: DeviceId) -> Error {
    let mut named = entries.iter().filter(|e| e.device.unwrap_or(compute) == device).map(ToString::to_string);
    let (first, second) = (named.next().unwrap_or_default(), named.next().unwrap_or_default());
    AllocationError::DuplicateDevice { device, first, second }.into()
}
