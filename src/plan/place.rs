//! The allocation's quotas as bytes on the devices of one machine, and a device for every module.

use crate::allocation::{Allocation, Entry, Mode, Quota};
use crate::checkpoint::{Layout, ModuleId, Per};
use crate::device::{DeviceId, Machine};
use crate::error::{AllocationError, Error, Limit, Result, Shortfall, Term};

use super::warning::{KeptFor, Warning};

/// Modules below this many bytes are small, if they are also below [`SMALL_PART`] of the model.
const SMALL_BYTES: u64 = 64 << 10;
/// A small module has less than one part in this many of all bytes.
const SMALL_PART: u128 = 10_000;

/// Whether so many bytes, of a model of `total`, are few: modules of them stay resident.
pub(super) fn is_small(bytes: u64, total: u64) -> bool {
    bytes < SMALL_BYTES && u128::from(bytes) * SMALL_PART < u128::from(total)
}

/// The devices that modules can go to, in the order of the allocation. A *bin* is one of them, by its index.
#[derive(Debug)]
pub(super) struct Quotas {
    pub(super) bins: Vec<DeviceQuota>,
    /// The compute device's bin.
    pub(super) compute: usize,
    /// The remainder device's bin; `None` for a ratio without one.
    pub(super) rest: Option<usize>,
    /// Whether caps are hard. A ratio's caps are shares, which a device may miss by less than a module.
    pub(super) hard: bool,
}

/// One device and the bytes that it may take.
#[derive(Debug)]
pub(super) struct DeviceQuota {
    pub(super) device: DeviceId,
    /// The bytes that its entry grants; 0 for a bare `*`.
    pub(super) cap: u64,
    /// Whether its entry has an amount, so that `cap` is a quota.
    pub(super) quoted: bool,
}

impl Quotas {
    /// # Errors
    /// [`Error::UnknownDevice`] for a device that `machine` lacks, [`AllocationError::DuplicateDevice`] when two
    /// entries name one device: one by an alias, or the compute device by a fraction without a device.
    pub(super) fn new(allocation: &Allocation, machine: &Machine, compute: DeviceId, total: u64) -> Result<Quotas> {
        machine.device(compute)?;
        if let (Mode::Virtual, Some(virtual_vram)) = (allocation.mode(), allocation.virtual_vram()) {
            let mut bins = vec![DeviceQuota { device: compute, cap: 0, quoted: false }];
            for &device in &virtual_vram.donors {
                if bins.iter().any(|bin| bin.device == device) {
                    let (first, second) = (device.to_string(), "another name of it".to_owned());
                    return Err(AllocationError::DuplicateDevice { device, first, second }.into());
                }
                bins.push(DeviceQuota { device, cap: machine.device(device)?.usable_open(), quoted: false });
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
            quotas.bins.push(DeviceQuota { device, cap, quoted });
        }
        quotas.rest = quotas.rest.or_else(|| quotas.find(DeviceId::CPU));
        quotas.compute = quotas.find_or_add(compute, true);
        if quotas.hard && quotas.rest.is_none() {
            // If it is also the compute device, it takes everything.
            let rest = quotas.find_or_add(DeviceId::CPU, false);
            quotas.bins[rest].quoted = false;
            quotas.rest = Some(rest);
        }
        Ok(quotas)
    }

    /// Whether the bin takes the remainder.
    pub(super) fn takes_rest(&self, bin: usize) -> bool {
        self.hard && self.rest == Some(bin)
    }

    fn find(&self, device: DeviceId) -> Option<usize> {
        self.bins.iter().position(|bin| bin.device == device)
    }

    fn find_or_add(&mut self, device: DeviceId, quoted: bool) -> usize {
        self.find(device).unwrap_or_else(|| {
            self.bins.push(DeviceQuota { device, cap: 0, quoted });
            self.bins.len() - 1
        })
    }
}

/// The bytes of each entry of a ratio. They add up to `total`.
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

/// The bin of every module, as far as decided.
#[derive(Debug)]
pub(super) struct Placement<'a> {
    pub(super) layout: &'a Layout,
    pub(super) quotas: &'a Quotas,
    /// The bin of each module.
    home: Per<ModuleId, Option<usize>>,
    /// The bytes in each bin.
    used: Vec<u64>,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Placement<'a> {
    pub(super) fn new(layout: &'a Layout, quotas: &'a Quotas) -> Placement<'a> {
        let (home, used) = (Per::all(layout.modules().len(), None), vec![0; quotas.bins.len()]);
        Placement { layout, quotas, home, used, warnings: Vec::new() }
    }

    /// Keeps the modules resident that should always be, as far as the compute device's quota goes: those that are `wanted`,
    /// small ones, and embeddings used at both ends.
    pub(super) fn keep_first(&mut self, wanted: impl Fn(ModuleId) -> bool, total: u64) {
        let layout = self.layout;
        let small = |bytes: u64| is_small(bytes, total);
        self.keep(wanted, Some(KeptFor::Wanted));
        self.keep(|module| layout.at(module).bytes == 0 || small(layout.at(module).bytes), None);
        self.keep(|module| layout.at(module).tied, Some(KeptFor::BothEnds));
    }

    /// Keeps the modules resident that would make slots large, as far as the compute device's quota goes. `tables` come last:
    /// the caller gathers their rows, so the host is the next best device for them.
    pub(super) fn keep_outliers(&mut self, others: &[ModuleId], tables: &[ModuleId]) {
        self.keep(|module| others.contains(&module), None);
        self.keep(|module| tables.contains(&module), None);
        let host = self.quotas.find(DeviceId::CPU);
        for &table in tables {
            if let Some(host) = host.filter(|&host| self.is_open(table) && self.holds(host, self.bytes(table))) {
                self.put(table, host);
            }
        }
    }

    /// Gives the modules that are not used in place the compute device's quota first. If it holds all of them, they live there.
    /// Otherwise the modules used in place leave it to the others, and live on the host as far as the host's quota goes.
    pub(super) fn others_first(&mut self, in_place: impl Fn(ModuleId) -> bool) {
        let open = self.home.ids().filter(|&module| self.is_open(module));
        let (in_place, others): (Vec<_>, Vec<_>) = open.partition(|&module| in_place(module));
        if in_place.is_empty() {
            return;
        }
        let bytes = others.iter().map(|&module| self.bytes(module)).sum();
        let (bin, modules) = match self.holds(self.quotas.compute, bytes) {
            true => (Some(self.quotas.compute), others),
            false => (self.quotas.find(DeviceId::CPU).filter(|&host| host != self.quotas.compute), in_place),
        };
        for module in modules {
            if let Some(bin) = bin.filter(|&bin| self.holds(bin, self.bytes(module))) {
                self.put(module, bin);
            }
        }
    }

    /// Keeps modules resident. With `why`, a module that the quota does not hold causes a warning.
    fn keep(&mut self, kept: impl Fn(ModuleId) -> bool, why: Option<KeptFor>) {
        let compute = self.quotas.compute;
        for module in self.home.ids() {
            if !self.is_open(module) || !kept(module) {
                continue;
            }
            if self.holds(compute, self.bytes(module)) {
                self.put(module, compute);
            } else if let Some(why) = why {
                let (module, device) = (self.layout.at(module).name.clone(), self.quotas.bins[compute].device);
                self.warnings.push(Warning::NotKept { module, why, device });
            }
        }
    }

    /// Puts each module into the first bin that holds it, or else into the remainder.
    pub(super) fn sequential(&mut self) {
        for module in self.home.ids() {
            if self.is_open(module) {
                let bytes = self.bytes(module);
                let first = (0..self.used.len()).find(|&bin| self.room(bin) >= bytes);
                self.put(module, first.unwrap_or_else(|| self.overflow()));
            }
        }
    }

    /// Spreads every bin's modules evenly over the order.
    pub(super) fn interleaved(&mut self) {
        self.spread_modules(|_| true);
    }

    /// Moves `target` bytes from the end of the order to the donors, the bins after the compute device, in turn. The compute
    /// device keeps the rest.
    ///
    /// # Errors
    /// [`Error::DoesNotFit`] when the donors cannot take that much.
    pub(super) fn virtual_vram(&mut self, target: u64, machine: &Machine) -> Result<()> {
        let (mut left, mut stuck) = (0u64, None);
        for module in self.home.ids().rev() {
            if left >= target {
                break;
            }
            if self.is_open(module) {
                match (1..self.used.len()).find(|&donor| self.room(donor) >= self.bytes(module)) {
                    Some(donor) => {
                        self.put(module, donor);
                        left += self.bytes(module);
                    }
                    None => stuck = stuck.or(Some(module)),
                }
            }
        }
        if let (true, Some(module)) = (left < target, stuck) {
            return Err(self.donors_short(module, target - left, machine));
        }
        if left < target {
            self.warnings.push(Warning::LeavesLess { target, left });
        }
        for module in self.home.ids() {
            if self.is_open(module) {
                self.put(module, self.quotas.compute);
            }
        }
        Ok(())
    }

    /// The error when no donor has room for `module` and `missing` bytes must still leave.
    fn donors_short(&self, module: ModuleId, missing: u64, machine: &Machine) -> Error {
        let last = self.used.len() - 1;
        let (device, limit) = (self.quotas.bins[last].device, self.quotas.bins[last].cap);
        let needed = self.used[last].saturating_add(missing.max(self.bytes(module)));
        let total = machine.device(device).map_or(limit, |info| info.total);
        Error::DoesNotFit(Box::new(Shortfall {
            device,
            term: Term::Weights,
            module: Some(self.layout.at(module).name.clone()),
            needed,
            limit,
            limit_is: Limit::Free,
            total,
            short: needed.saturating_sub(limit),
            remedies: Vec::new(),
        }))
    }

    /// Spreads all open modules over the bins that `usable` admits. What these cannot hold goes to the remainder.
    pub(super) fn spread_modules(&mut self, usable: impl Fn(usize) -> bool) {
        let open: Vec<ModuleId> = self.home.ids().filter(|&module| self.is_open(module)).collect();
        let largest = open.iter().map(|&module| self.bytes(module)).max().unwrap_or(0);
        let smallest = open.iter().map(|&module| self.bytes(module)).min().unwrap_or(0);
        // Of modules of one size a bin takes only whole ones, so its share is what it can fill.
        let grain = if smallest == largest { largest.max(1) } else { 1 };
        let total = open.iter().map(|&module| self.bytes(module)).sum();
        let shares = self.shares(total, grain, &usable);
        let cap = |bin| if !self.quotas.hard || self.quotas.takes_rest(bin) { u64::MAX } else { self.room(bin) };
        let caps = (0..self.used.len()).map(|bin| if usable(bin) { cap(bin) } else { 0 }).collect();
        let mut split = ProportionalSplit::new(shares, caps, largest);
        for module in open {
            let bytes = self.bytes(module);
            let bin = split.assign(bytes).unwrap_or_else(|| {
                let bin = self.overflow();
                split.record(bin, bytes);
                bin
            });
            self.put(module, bin);
        }
    }

    /// The bytes that each bin would take of `total` bytes that can be split anywhere. Hard caps fill in turn and the remainder
    /// takes the rest. A ratio's bins take what is left of their shares.
    pub(super) fn shares(&self, total: u64, grain: u64, usable: &impl Fn(usize) -> bool) -> Vec<u64> {
        let mut left = total;
        let room = |bin: usize| if usable(bin) { self.room(bin) } else { 0 };
        let fill = |bin| {
            let share = if self.quotas.hard { (room(bin) - room(bin) % grain).min(left) } else { room(bin) };
            left = left.saturating_sub(share);
            share
        };
        let mut shares: Vec<u64> = (0..self.used.len()).map(fill).collect();
        if let Some(rest) = self.quotas.rest.filter(|_| self.quotas.hard) {
            shares[rest] += left;
        }
        shares
    }

    /// The bin for a module that no quota holds: the remainder. For a ratio, whose shares add up to the whole, the bin with
    /// the most room, never the compute device: if the others were full, it would have held the module.
    fn overflow(&self) -> usize {
        let other = |bin: &usize| *bin != self.quotas.compute;
        match self.quotas.rest {
            Some(rest) if self.quotas.hard || (self.room(rest) > 0 && other(&rest)) => rest,
            _ => (0..self.used.len()).rev().filter(other).max_by_key(|&b| self.room(b)).unwrap_or(self.quotas.compute),
        }
    }

    /// Gives modules that share another's storage their owner's home, and returns the bin of each module.
    pub(super) fn finish(mut self) -> (Per<ModuleId, usize>, Vec<Warning>) {
        if let Some(rest) = self.quotas.rest.filter(|_| self.quotas.hard) {
            let bin = &self.quotas.bins[rest];
            if bin.quoted && self.used[rest] > bin.cap {
                let (device, bytes, quota) = (bin.device, self.used[rest], bin.cap);
                self.warnings.push(Warning::OverQuota { device, bytes, quota });
            }
        }
        let owner = |module: ModuleId| self.layout.at(module).alias_of.unwrap_or(module);
        let home = |module| self.home[owner(module)].unwrap_or(self.quotas.compute);
        (self.home.ids().map(home).collect(), self.warnings)
    }

    pub(super) fn put(&mut self, module: ModuleId, bin: usize) {
        self.home[module] = Some(bin);
        self.used[bin] += self.bytes(module);
    }

    /// Whether the module has no home yet.
    pub(super) fn is_open(&self, module: ModuleId) -> bool {
        self.home[module].is_none() && self.layout.at(module).alias_of.is_none()
    }

    pub(super) fn bytes(&self, module: ModuleId) -> u64 {
        self.layout.at(module).bytes
    }

    /// The bytes in the bin.
    pub(super) fn used(&self, bin: usize) -> u64 {
        self.used[bin]
    }

    /// The rest of the bin's quota.
    pub(super) fn room(&self, bin: usize) -> u64 {
        self.quotas.bins[bin].cap.saturating_sub(self.used[bin])
    }

    fn holds(&self, bin: usize, bytes: u64) -> bool {
        self.quotas.takes_rest(bin) || self.room(bin) >= bytes
    }
}

/// Assigns units, given one by one in order, to bins in proportion to their shares.
///
/// With `ideal(i)` = share `i` over all shares x the bytes assigned so far, the unit goes to a bin that is
/// behind its ideal after this unit, and of those to the one that would be first to fall a whole (largest)
/// unit behind. Without caps every running total is then within one unit of its ideal, above because only
/// bins that are behind take a unit, below by the usual argument for earliest deadline first on one
/// processor (units of time are bytes): if a bin missed its deadline, then since the last unit that went to
/// a bin with a later deadline only bins with earlier deadlines were served, all of them not behind at that
/// unit's end, and together they cannot have been due more bytes than went by. The rule for equal units is
/// that of P-fair scheduling (Baruah, Cohen, Plaxton, Varvel, 1996).
#[derive(Debug)]
pub(super) struct ProportionalSplit {
    shares: Vec<u64>,
    /// The most bytes of each bin.
    caps: Vec<u64>,
    taken: Vec<u64>,
    all_shares: u128,
    assigned: u64,
    largest: u64,
}

impl ProportionalSplit {
    /// Bins with these shares and caps, for units of at most `largest` bytes. Shares and units add up to at
    /// most 2^63 each, so that no product below exceeds `u128`.
    pub(super) fn new(shares: Vec<u64>, caps: Vec<u64>, largest: u64) -> ProportionalSplit {
        let all_shares = shares.iter().map(|&share| u128::from(share)).sum();
        let taken = vec![0; shares.len()];
        ProportionalSplit { shares, caps, taken, all_shares, assigned: 0, largest }
    }

    /// Assigns the next unit to a bin; `None` if caps keep it from all bins that are behind. Then the caller chooses a bin and
    /// calls [`record`](ProportionalSplit::record).
    pub(super) fn assign(&mut self, bytes: u64) -> Option<usize> {
        let after = u128::from(self.assigned + bytes);
        let behind = |&bin: &usize| {
            let ideal = u128::from(self.shares[bin]) * after;
            u128::from(self.taken[bin]) * self.all_shares < ideal
        };
        let holds = |&bin: &usize| self.caps[bin] - self.taken[bin].min(self.caps[bin]) >= bytes;
        // The deadline of a bin is where its ideal reaches `taken + largest`.
        let due = |bin: usize| u128::from(self.taken[bin]) + u128::from(self.largest);
        let earlier = |&a: &usize, &b: &usize| {
            let (a_due, b_due) = (due(a) * u128::from(self.shares[b]), due(b) * u128::from(self.shares[a]));
            a_due.cmp(&b_due)
        };
        let bin = (0..self.shares.len()).filter(|bin| behind(bin) && holds(bin)).min_by(earlier)?;
        self.record(bin, bytes);
        Some(bin)
    }

    /// Records a unit that the caller put into `bin`.
    pub(super) fn record(&mut self, bin: usize, bytes: u64) {
        self.taken[bin] += bytes;
        self.assigned += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any shares that add up to the units.
    fn shares_and_units() -> impl Strategy<Value = (Vec<u64>, Vec<u64>)> {
        let units = prop::collection::vec(1u64..1000, 1..200);
        (units, prop::collection::vec(0u64..100, 1..7)).prop_map(|(units, weights)| {
            let (total, sum) = (units.iter().sum::<u64>(), weights.iter().sum::<u64>());
            let mut shares: Vec<u64> = weights.iter().map(|w| total * w / sum.max(1)).collect();
            shares[0] += total - shares.iter().sum::<u64>();
            (shares, units)
        })
    }

    proptest! {
        #[test]
        fn running_totals_stay_within_one_unit((shares, units) in shares_and_units()) {
            let (largest, total) = (*units.iter().max().unwrap(), units.iter().sum::<u64>());
            let mut split = ProportionalSplit::new(shares.clone(), vec![u64::MAX; shares.len()], largest);
            let mut assigned = 0;
            for unit in units {
                split.assign(unit).expect("a bin that is behind");
                assigned += unit;
                for (taken, share) in split.taken.iter().zip(&shares) {
                    let off = (i128::from(*taken) * i128::from(total) - i128::from(*share) * i128::from(assigned)).abs();
                    prop_assert!(off < i128::from(largest) * i128::from(total));
                }
            }
            prop_assert_eq!(split.taken.iter().sum::<u64>(), total);
        }
    }
}
