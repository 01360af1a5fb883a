//! Choosing a bin for every module.

use super::quota::Quotas;
use super::spread::Dealer;
use super::warning::{KeptFor, Warning};
use crate::checkpoint::{Layout, ModuleId, Per};
use crate::device::Machine;
use crate::error::{Error, Limit, Result, Shortfall, Term};

/// Modules below this many bytes are small, if they are also below [`SMALL_PART`] of the model.
const SMALL_BYTES: u64 = 64 << 10;
/// A small module is under one such part of all bytes.
const SMALL_PART: u128 = 10_000;

/// Which bin every module lives in, as far as that is decided.
#[derive(Debug)]
pub(super) struct Placement<'a> {
    pub(super) layout: &'a Layout,
    pub(super) quotas: &'a Quotas,
    /// The bin of each.
    home: Per<ModuleId, Option<usize>>,
    /// Bytes in each bin.
    used: Vec<u64>,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Placement<'a> {
    pub(super) fn new(layout: &'a Layout, quotas: &'a Quotas) -> Placement<'a> {
        let (home, used) = (Per::all(layout.modules().len(), None), vec![0; quotas.bins.len()]);
        Placement { layout, quotas, home, used, warnings: Vec::new() }
    }

    /// Puts what should always be at hand on the compute device, as far as its quota goes: the modules
    /// that are `wanted`, small ones, and embeddings used at both ends.
    pub(super) fn keep_first(&mut self, wanted: impl Fn(ModuleId) -> bool, total: u64) {
        let layout = self.layout;
        let small = |bytes: u64| bytes < SMALL_BYTES && u128::from(bytes) * SMALL_PART < u128::from(total);
        self.keep(wanted, Some(KeptFor::Wanted));
        self.keep(|module| layout.at(module).bytes == 0 || small(layout.at(module).bytes), None);
        self.keep(|module| layout.at(module).both_ends, Some(KeptFor::BothEnds));
    }

    /// With `why`, a module that the quota does not hold is worth a warning.
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

    /// Each module to the first bin that holds it, else to the remainder.
    pub(super) fn sequential(&mut self) {
        for module in self.home.ids() {
            if self.is_open(module) {
                let bytes = self.bytes(module);
                let first = (0..self.used.len()).find(|&bin| self.room(bin) >= bytes);
                self.put(module, first.unwrap_or_else(|| self.overflow()));
            }
        }
    }

    /// Every bin's modules spread evenly over the order.
    pub(super) fn interleaved(&mut self) {
        self.deal_modules(|_| true);
    }

    /// The compute device keeps what does not leave: from the end of the order `target` bytes go to the
    /// donors, the bins after it, in turn.
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

    /// `module` found room with no donor, and `missing` bytes still have to leave.
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
        }))
    }

    /// Spreads all open modules over the bins that `usable` admits; what these cannot hold goes to the
    /// remainder.
    pub(super) fn deal_modules(&mut self, usable: impl Fn(usize) -> bool) {
        let open: Vec<ModuleId> = self.home.ids().filter(|&module| self.is_open(module)).collect();
        let largest = open.iter().map(|&module| self.bytes(module)).max().unwrap_or(0);
        let smallest = open.iter().map(|&module| self.bytes(module)).min().unwrap_or(0);
        // Of modules of one size a bin can only take whole ones, so its share is what it can fill.
        let grain = if smallest == largest { largest.max(1) } else { 1 };
        let total = open.iter().map(|&module| self.bytes(module)).sum();
        let shares = self.shares(total, grain, &usable);
        let cap = |bin| if !self.quotas.hard || self.quotas.takes_rest(bin) { u64::MAX } else { self.room(bin) };
        let caps = (0..self.used.len()).map(|bin| if usable(bin) { cap(bin) } else { 0 }).collect();
        let mut dealer = Dealer::new(shares, caps, largest);
        for module in open {
            let bytes = self.bytes(module);
            let bin = dealer.deal(bytes).unwrap_or_else(|| {
                let bin = self.overflow();
                dealer.give(bin, bytes);
                bin
            });
            self.put(module, bin);
        }
    }

    /// What each bin would take of `total` bytes that can be cut anywhere: hard caps fill in turn and the
    /// remainder takes what is left; shares of a ratio are what is left of them.
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

    /// The bin for a module that no quota holds: the remainder. Of a ratio, whose shares add up to the whole,
    /// the one with most room, never the compute device: were the others full, this one would hold it.
    fn overflow(&self) -> usize {
        let other = |bin: &usize| *bin != self.quotas.compute;
        match self.quotas.rest {
            Some(rest) if self.quotas.hard || (self.room(rest) > 0 && other(&rest)) => rest,
            _ => (0..self.used.len()).rev().filter(other).max_by_key(|&b| self.room(b)).unwrap_or(self.quotas.compute),
        }
    }

    /// Gives modules without storage of their own the home of their owner; the bin of each.
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

    /// Whether the module still needs a home.
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

    /// What is left of the bin's quota.
    pub(super) fn room(&self, bin: usize) -> u64 {
        self.quotas.bins[bin].cap.saturating_sub(self.used[bin])
    }

    fn holds(&self, bin: usize, bytes: u64) -> bool {
        self.quotas.takes_rest(bin) || self.room(bin) >= bytes
    }
}
