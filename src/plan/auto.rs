//! Mode auto: a search for the quotas, order and unit with the shortest pass.
//!
//! The bytes that the compute device does not hold can be split among the donors in many ways. What it holds depends on the
//! slots, which depend on what is streamed. So each candidate is planned like any allocation and timed by its forecast.
//! First all arrangements (order and unit, and which large layers are kept resident so that slots stay small) with one
//! split of the streamed bytes; then for the best of each order the other splits; then, as whole modules fall better on
//! one quota than on another, larger quotas of the compute device, and bytes moved from donor to donor. The search is deterministic,
//! and its result an allocation that a user could have written.

use std::time::Duration;

use super::candidates::{self, Quota, is_worth, takes_rest};
use super::compress::kept_compressed;
use super::explain::{Alternative, Explanation};
use super::outlier::outliers_of;
use super::planner::Planner;
use super::split::{Donor, Kept, Split};
use super::value::{DevicePlan, Order, Parts, Plan, Unit, Use};
use crate::allocation::{Allocation, Mode};
use crate::bytes::ByteSize;
use crate::checkpoint::{Layout, Module};
use crate::device::DeviceId;
use crate::error::{Error, Limit, Result};
use crate::limits::{STAGING_BUFFERS, STAGING_BYTES};

/// The most corrections of a quota until its plan fits.
const ROUNDS: usize = 12;

/// The number of larger quotas to try, up to all of the device's memory.
const LARGER: u64 = 16;

/// The parts of the streamed bytes that are moved from donor to donor: first large pieces, then small ones.
const PIECES: [u64; 2] = [16, 64];

/// The plan with the shortest pass for `planner`'s model and machine. The planner's allocation is ignored. Streamed modules that may be
/// kept compressed are, unless the pass is shorter without: decoding takes time, and landing buffers take memory. Resident ones are only
/// if the pass is shorter with it.
///
/// # Errors
/// [`Error::DoesNotFit`] when no candidate fits; any error of planning.
pub(super) fn plan(planner: &Planner<'_>, compute: DeviceId) -> Result<Plan> {
    if planner.compress_resident {
        return with_resident(planner, compute);
    }
    let found = search(planner, compute);
    if !planner.compress || found.as_ref().is_ok_and(|plan| !plan.is_compressed() || is_hidden(plan)) {
        return found;
    }
    let plain = search(&planner.clone().compress(false), compute);
    let (found, plain) = match (found, plain) {
        (Ok(found), Ok(plain)) => (found, plain),
        (found, plain) => return found.or_else(|error| plain.map_err(|_| error)),
    };
    match (found.explanation(), plain.explanation().cloned()) {
        (Some(of_found), Some(of_plain)) if is_worth(of_plain.pass, of_found.pass) => {
            plain.found(of_plain.rather_than(of_found))
        }
        _ => Ok(found),
    }
}

/// As [`plan`], for a planner that may keep resident modules compressed.
fn with_resident(planner: &Planner<'_>, compute: DeviceId) -> Result<Plan> {
    let plain = plan(&planner.clone().compress_resident(false), compute);
    if planner.kept_codes(compute).resident.is_empty() || plain.as_ref().is_ok_and(is_hidden) {
        return plain;
    }
    let (found, plain) = match (search(planner, compute), plain) {
        (Ok(found), Ok(plain)) if found.assignments().iter().any(|a| a.usage == Use::Unpacked) => (found, plain),
        (found, plain) => return plain.or_else(|error| found.map_err(|_| error)),
    };
    match (found.explanation(), plain.explanation().cloned()) {
        (Some(of_found), Some(of_plain)) if is_worth(of_found.pass, of_plain.pass) => {
            let told = of_found.clone().after(&of_plain);
            found.found(told)
        }
        (Some(of_found), Some(of_plain)) => plain.found(of_plain.rather_than_resident(of_found)),
        _ => Ok(plain),
    }
}

/// Whether the compute of a plan that was found hides all its transfers.
fn is_hidden(plan: &Plan) -> bool {
    plan.explanation().is_some_and(|told| told.pass <= told.compute)
}

fn search(planner: &Planner<'_>, compute: DeviceId) -> Result<Plan> {
    let mut search = Search::new(planner, compute)?;
    if let Some(plan) = search.whole()? {
        return Ok(plan);
    }
    search.arrangements(|_| true)?;
    search.splits()?;
    search.larger_quotas()?;
    search.larger_quotas()?;
    search.moves()?;
    search.finish()
}

/// Whether any candidate fits.
pub(super) fn fits(planner: &Planner<'_>, compute: DeviceId) -> bool {
    let any = |planner: &Planner<'_>| -> Result<bool> {
        let mut search = Search::new(planner, compute)?;
        Ok(search.whole()?.is_some() || search.arrangements(|search| search.found.is_empty())?)
    };
    let fits = |planner: &Planner<'_>| any(planner).unwrap_or(false);
    // Either may fit where the other does not.
    fits(planner) || planner.compress_resident && fits(&planner.clone().compress_resident(false))
}

struct Search<'a> {
    planner: &'a Planner<'a>,
    compute: DeviceId,
    /// The compute time of each layer, and of all layers.
    layers: Vec<Duration>,
    time: Duration,
    total: u64,
    /// The bytes of weights, slots and reserve that the compute device can hold.
    room: u64,
    /// What it keeps of weights that are compressed there.
    kept: Kept,
    donors: Vec<Donor>,
    /// The largest module except outliers, which are best kept off donors.
    unit: u64,
    found: Vec<Found>,
    tried: usize,
    refused: Option<Error>,
}

/// How modules are placed, independently of the quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arrangement {
    order: Order,
    unit: Unit,
    largest_slot: Option<u64>,
}

/// A candidate that fits.
struct Found {
    arrangement: Arrangement,
    split: Split,
    /// The compute device's quota.
    resident: u64,
    /// Donor -> bytes of its quota.
    shares: Vec<u64>,
    allocation: Allocation,
    pass: Duration,
}

const ORDERS: [(Order, Unit); 3] =
    [(Order::Interleaved, Unit::Uniform), (Order::Interleaved, Unit::Module), (Order::Sequential, Unit::Module)];

impl<'a> Search<'a> {
    fn new(planner: &'a Planner<'a>, compute: DeviceId) -> Result<Search<'a>> {
        let layers = planner.compute_time.of_layers(planner.layout)?;
        let info = planner.machine.device(compute)?;
        let domain = planner.machine.device(info.domain).unwrap_or(info);
        let pinned_cap = planner.pinned_cap.map_or(u64::MAX, ByteSize::get);
        let mut donors = Donor::all(planner.machine, compute, pinned_cap);
        leave_room_for_staging(&mut donors, planner, compute);
        if planner.compress && !compute.is_host() {
            donors = donors.into_iter().map(|donor| compressing(donor, planner.layout)).collect();
        }
        Ok(Search {
            planner,
            compute,
            time: layers.iter().sum(),
            layers,
            total: planner.total()?,
            room: info.usable().min(domain.usable()),
            kept: kept_here(planner, compute),
            donors,
            unit: largest_but_outliers(planner.layout),
            found: Vec::new(),
            tried: 0,
            refused: None,
        })
    }

    /// The plan with everything on the compute device, if that holds it.
    fn whole(&mut self) -> Result<Option<Plan>> {
        let allocation = Allocation::all_on(self.compute);
        let planner = self.planner.clone().allocation(allocation.clone());
        match self.placed(&planner).and_then(|parts| planner.checked(parts)) {
            Ok(plan) => {
                let pass = self.pass(&plan);
                let explanation = Explanation::whole(&plan, allocation, (self.time, pass));
                Ok(Some(plan.found(explanation)?))
            }
            Err(Error::DoesNotFit(short)) => {
                self.refused = Some(Error::DoesNotFit(short));
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }

    /// Tries all arrangements while `goes_on`. Returns whether any fits.
    fn arrangements(&mut self, goes_on: impl Fn(&Self) -> bool) -> Result<bool> {
        for largest_slot in self.largest_slots() {
            for (order, unit) in ORDERS {
                if !goes_on(self) {
                    return Ok(true);
                }
                self.try_split(Arrangement { order, unit, largest_slot }, Split::Hidden)?;
            }
        }
        Ok(!self.found.is_empty())
    }

    /// The limits of the slots to try: none, and some that keep the modules resident which make a layer exceed them.
    fn largest_slots(&self) -> Vec<Option<u64>> {
        let layout = self.planner.layout;
        let slots = self.planner.depth.saturating_add(1).min(layout.layers().len()) as u64;
        let fits = |most: u64| {
            let kept = layout.layers().iter().flat_map(|layer| self.planner.excess(layer, most));
            let kept = kept.fold(0u64, |sum, module| sum.saturating_add(layout.at(module).bytes));
            kept.saturating_add(most.saturating_mul(slots)) <= self.room
        };
        let sizes = candidates::slot_sizes(largest_layer(self.planner), fits);
        std::iter::once(None).chain(sizes.into_iter().map(Some)).collect()
    }

    /// Tries the other splits of the streamed bytes for the best candidate of each order. For one donor there are no others.
    fn splits(&mut self) -> Result<()> {
        if self.donors.len() < 2 {
            return Ok(());
        }
        for (order, unit) in ORDERS {
            let Some(arrangement) = self.fastest(order, unit).map(|found| found.arrangement) else { continue };
            for split in Split::ALL.into_iter().filter(|&split| split != Split::Hidden) {
                self.try_split(arrangement, split)?;
            }
        }
        Ok(())
    }

    /// Tries quotas of the compute device between the best candidate's and all that it has room for. Called again, between the
    /// best of these and that.
    fn larger_quotas(&mut self) -> Result<()> {
        let Some(best) = self.improvable() else { return Ok(()) };
        let (arrangement, split, resident) = (best.arrangement, best.split, best.resident);
        let above = self.most().saturating_sub(resident) / LARGER;
        for quota in (1..LARGER).map(|parts| resident + above * parts) {
            self.attempt(arrangement, split, Quota::at_most(quota), None)?;
        }
        Ok(())
    }

    /// Tries moving bytes from donor to donor, in large pieces and then in smaller ones.
    fn moves(&mut self) -> Result<()> {
        let rooms: Vec<u64> = self.donors.iter().map(|donor| donor.room).collect();
        for pieces in PIECES {
            let Some(best) = self.improvable() else { return Ok(()) };
            let (arrangement, split, resident) = (best.arrangement, best.split, best.resident);
            for shares in candidates::moved(&best.shares, &rooms, pieces) {
                self.attempt(arrangement, split, Quota::at_most(resident), Some(&shares))?;
            }
        }
        Ok(())
    }

    fn try_split(&mut self, arrangement: Arrangement, split: Split) -> Result<()> {
        let quota = Quota::most(self.most());
        self.attempt(arrangement, split, quota, None)
    }

    /// Plans with a quota of the compute device, and the rest split as `shares` says, or else by `split`. The slots' size follows
    /// from the plan, so the quota is corrected until its plan fits, and raised while it does.
    fn attempt(
        &mut self,
        arrangement: Arrangement,
        split: Split,
        mut quota: Quota,
        shares: Option<&[u64]>,
    ) -> Result<()> {
        let mut donors = self.donors.clone();
        for _ in 0..ROUNDS {
            let (streamed, topology) = (self.total - quota.next, self.planner.machine.topology());
            let by_split = || split.shares(&donors, streamed, topology, self.time);
            let Some(shares) = shares.map(<[u64]>::to_vec).or_else(by_split) else { break };
            let Some(rest) = takes_rest(&donors, &shares, self.unit) else { break };
            let allocation = self.allocation(quota.next, &shares, rest)?;
            let planner = self.planner_of(arrangement).allocation(allocation.clone());
            let parts = self.placed(&planner)?;
            let own = parts.devices.iter().find(|device| device.id == self.compute);
            let (beside, held) = own.map_or((self.room, 0), |own| (self.holds(own), own.weights.bytes));
            let goes_on = match planner.checked(parts) {
                Ok(plan) => {
                    let (pass, resident) = (self.pass(&plan), quota.next);
                    self.found.push(Found { arrangement, split, resident, shares, allocation, pass });
                    quota.fits(beside)
                }
                Err(Error::DoesNotFit(short)) => {
                    let goes_on = match donors.iter().position(|donor| donor.device == short.device) {
                        Some(donor) => {
                            let less = donors[donor].weights_in(short.short);
                            // What is too large for one allocation is so however little of it goes there.
                            let room = match short.limit_is {
                                Limit::InOneAllocation => 0,
                                _ => shares[donor].min(donors[donor].room).saturating_sub(less),
                            };
                            donors[donor].room = room;
                            true
                        }
                        None => quota.is_too_much(beside, held),
                    };
                    self.refused = Some(Error::DoesNotFit(short));
                    goes_on
                }
                Err(other) => return Err(other),
            };
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    /// The most bytes of weights that the compute device may hold.
    fn most(&self) -> u64 {
        self.kept.weights_in(self.room).min(self.total)
    }

    /// The bytes of weights that would fit beside what else a candidate needs on the compute device. It is told by how much more or
    /// less it holds than fits: those are weights that may be compressed, while others may have come first.
    fn holds(&self, own: &DevicePlan) -> u64 {
        let (bytes, taken) = (own.weights.bytes, own.weights.taken());
        let room = self.room.saturating_sub(own.needed().saturating_sub(taken));
        let holds = match room.checked_sub(taken) {
            Some(more) => bytes.saturating_add(self.kept.weights_in(more)),
            None => bytes.saturating_sub(self.kept.weights_in(taken - room)),
        };
        holds.min(self.total)
    }

    /// Places every module, and counts that it was tried.
    fn placed(&mut self, planner: &Planner<'_>) -> Result<Parts> {
        self.tried += 1;
        planner.placed()
    }

    /// The quotas of the compute device and of the donors, last the donor that takes the rest.
    fn allocation(&self, resident: u64, shares: &[u64], rest: usize) -> Result<Allocation> {
        let others = (0..shares.len()).filter(|&donor| donor != rest && shares[donor] > 0);
        let others = others.map(|donor| (self.donors[donor].device, shares[donor]));
        let quotas = std::iter::once((self.compute, resident)).chain(others);
        let quotas = quotas.fold(Allocation::builder(), |all, (device, bytes)| all.bytes(device, ByteSize(bytes)));
        quotas.rest(self.donors[rest].device).build()
    }

    /// The time of a plan's pass: its forecast, or its lower bound if staging, which the forecast does not count, makes that
    /// longer.
    fn pass(&self, plan: &Plan) -> Duration {
        let topology = self.planner.machine.topology();
        let forecast = plan.forecast_of(self.planner.layout, topology, &self.layers);
        let slots = plan.slots().sizes().count().max(plan.depth().saturating_add(1));
        let stays_in_slots = plan.fetched_layers() <= slots;
        if stays_in_slots { forecast } else { forecast.max(plan.estimate(topology, self.time).pass) }
    }

    /// The first candidate that no later one beats by enough to replace it.
    fn best(&self) -> Option<&Found> {
        self.found.iter().reduce(|best, found| if is_worth(found.pass, best.pass) { found } else { best })
    }

    /// The best candidate, unless the compute alone takes as long.
    fn improvable(&self) -> Option<&Found> {
        self.best().filter(|best| best.pass > self.time)
    }

    /// The first of the fastest candidates of an order and unit.
    fn fastest(&self, order: Order, unit: Unit) -> Option<&Found> {
        let alike =
            self.found.iter().filter(|found| (found.arrangement.order, found.arrangement.unit) == (order, unit));
        alike.min_by_key(|found| found.pass)
    }

    fn finish(self) -> Result<Plan> {
        let Some(best) = self.best() else {
            return Err(self.refused.unwrap_or_else(|| Error::bug("no allocation was tried, and none was refused")));
        };
        let others = ORDERS.map(|(order, unit)| {
            let fastest = self.fastest(order, unit)?;
            Some(Alternative::new(order, unit, fastest.allocation.clone(), fastest.pass))
        });
        let chosen = (best.arrangement.order, best.arrangement.unit);
        let others = others.into_iter().flatten().filter(|other| (other.order, other.unit) != chosen).collect();
        let layout = self.planner.layout;
        let most = best.arrangement.largest_slot.unwrap_or(u64::MAX);
        let kept = layout.layers().iter().flat_map(|layer| self.planner.excess(layer, most));
        let kept = kept.map(|module| layout.at(module).name.clone()).collect();
        let plan = self.planner_of(best.arrangement).allocation(best.allocation.clone());
        let plan = plan.placed().and_then(|parts| plan.checked(parts))?;
        let found = (best.allocation.clone(), best.pass);
        let (machine, donors) = (self.planner.machine, &self.donors);
        let explanation = Explanation::new(&plan, machine, donors, found, self.time, kept, others, self.tried);
        plan.found(explanation)
    }

    fn planner_of(&self, Arrangement { order, unit, largest_slot }: Arrangement) -> Planner<'a> {
        self.planner.clone().order(order).unit(unit).largest_slot(largest_slot)
    }
}

/// The bytes of a slot for the layer that needs the most.
fn largest_layer(planner: &Planner<'_>) -> u64 {
    planner.layout.layers().iter().map(|layer| planner.slot(layer)).max().unwrap_or(0)
}

/// Leaves room on the host for buffers: a few for each device that the compute device cannot reach.
fn leave_room_for_staging(donors: &mut [Donor], planner: &Planner<'_>, compute: DeviceId) {
    let topology = planner.machine.topology();
    let staged = donors.iter().filter(|donor| !topology.reaches(compute, donor.device)).count() as u64;
    let buffer = largest_layer(planner).min(STAGING_BYTES as u64);
    let staging = buffer.saturating_mul(STAGING_BUFFERS as u64).saturating_mul(staged);
    for donor in donors.iter_mut().filter(|donor| donor.device.is_host()) {
        donor.room = donor.room.saturating_sub(staging);
    }
}

/// What the compute device keeps of the weights that are compressed if they live there.
fn kept_here(planner: &Planner<'_>, compute: DeviceId) -> Kept {
    let codes = planner.kept_codes(compute);
    kept_of(
        planner.layout,
        compute,
        planner.layout.modules().iter().filter(|module| codes.resident.contains(&module.id)),
    )
}

/// The donor, with what it keeps of the whole model if it streams all of it. Which modules it gets, the plan of a candidate knows.
fn compressing(donor: Donor, layout: &Layout) -> Donor {
    let owners = layout.modules().iter().filter(|module| module.alias_of.is_none());
    let kept = kept_of(layout, donor.device, owners);
    donor.compressing(kept)
}

/// What a device keeps of modules, if all of them may be compressed there.
fn kept_of<'m>(layout: &Layout, device: DeviceId, modules: impl Iterator<Item = &'m Module>) -> Kept {
    let kept = |module: &Module| kept_compressed(layout, device, module.id).unwrap_or(module.bytes);
    let (kept, weights) = modules.fold((0u64, 0u64), |(all, weights), module| {
        (all.saturating_add(kept(module)), weights.saturating_add(module.bytes))
    });
    Kept::new(kept, weights)
}

fn largest_but_outliers(layout: &Layout) -> u64 {
    let outliers = outliers_of(layout);
    let others = layout.modules().iter().filter(|module| !outliers.contains(&module.id));
    others.map(|module| module.bytes).max().unwrap_or(0)
}

impl Plan {
    /// This plan, marked as found by mode auto.
    fn found(self, explanation: Explanation) -> Result<Plan> {
        let parts = self.into_parts();
        Plan::new(Parts { mode: Mode::Auto, explanation: Some(Box::new(explanation)), ..parts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::dtype::DType;

    #[test]
    fn the_largest_module_is_told_without_outliers() {
        let tensor = |name: &str, bytes, at| TensorInfo::new(name, DType::U8, &[bytes], 0, at).unwrap();
        let names = ["layers.0.a.weight", "layers.1.a.weight"];
        let tensors =
            vec![tensor("embed.weight", 90_000, 0), tensor(names[0], 2_000, 90_000), tensor(names[1], 3_000, 92_000)];
        assert_eq!(largest_but_outliers(&Layout::new(tensors)), 3_000);
        assert_eq!(largest_but_outliers(&Layout::new(Vec::new())), 0);
    }
}
