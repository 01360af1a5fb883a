//! Mode auto: quotas, an order and a unit, found by what a pass would take with them.
//!
//! What the compute device does not hold can be shared among the donors in many ways, and what it holds depends on the
//! slots, which depend on what is streamed. So candidates are planned like any allocation and timed by their forecast.
//! First all arrangements (order and unit, and which large layers are kept resident so that slots stay small) with one
//! split of the streamed bytes; then for the best of each order the other splits; then bytes are moved between donors
//! as long as that helps. The search is deterministic, and its result an allocation that a user could have written.

use std::time::Duration;

use super::explain::{Alternative, Explanation};
use super::planner::Planner;
use super::split::{Donor, Split};
use super::value::{Order, Parts, Plan, Unit};
use crate::allocation::{Allocation, Mode};
use crate::bytes::ByteSize;
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// How often quotas are corrected until their plan fits.
const ROUNDS: usize = 12;

/// A candidate replaces one that was tried before only if it is faster by one part in so many.
const WORTH: u32 = 1000;

/// How many sizes of slots are tried, the largest among them.
const SLOT_SIZES: usize = 4;

/// The plan for `planner`'s model and machine whose pass is shortest; its own allocation is not looked at.
///
/// # Errors
/// [`Error::DoesNotFit`] when no candidate fits; whatever planning meets.
pub(super) fn plan(planner: &Planner<'_>, compute: DeviceId) -> Result<Plan> {
    let mut search = Search::new(planner, compute)?;
    if let Some(plan) = search.whole()? {
        return Ok(plan);
    }
    search.arrangements()?;
    search.splits()?;
    search.moves()?;
    search.finish()
}

struct Search<'a> {
    planner: &'a Planner<'a>,
    compute: DeviceId,
    /// What each layer computes, and all of them.
    layers: Vec<Duration>,
    time: Duration,
    total: u64,
    /// What the compute device can hold of weights, slots and reserve.
    room: u64,
    donors: Vec<Donor>,
    found: Vec<Found>,
    tried: usize,
    refused: Option<Error>,
}

/// How modules are placed, whatever the quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arrangement {
    order: Order,
    unit: Unit,
    largest_slot: Option<u64>,
}

/// A candidate that fits.
struct Found {
    arrangement: Arrangement,
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
        Ok(Search {
            planner,
            compute,
            time: layers.iter().sum(),
            layers,
            total: planner.total()?,
            room: info.usable().min(domain.usable()),
            donors: Donor::all(planner.machine, compute, planner.pinned_cap.map_or(u64::MAX, ByteSize::get)),
            found: Vec::new(),
            tried: 0,
            refused: None,
        })
    }

    /// The plan with everything on the compute device, if that holds it.
    fn whole(&mut self) -> Result<Option<Plan>> {
        let allocation = Allocation::all_on(self.compute);
        let planner = self.planner.clone().allocation(allocation.clone());
        self.tried += 1;
        match planner.placed().and_then(|parts| planner.checked(parts)) {
            Ok(plan) => {
                let explanation = Explanation::whole(&plan, allocation, self.time);
                Ok(Some(plan.found(explanation)?))
            }
            Err(Error::DoesNotFit(short)) => {
                self.refused = Some(Error::DoesNotFit(short));
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }

    fn arrangements(&mut self) -> Result<()> {
        for largest_slot in self.slot_sizes() {
            for (order, unit) in ORDERS {
                self.attempt(Arrangement { order, unit, largest_slot }, Split::Hidden)?;
            }
        }
        Ok(())
    }

    /// Which layers are kept resident for the sake of smaller slots: none; those larger than a few of the sizes that
    /// there are.
    fn slot_sizes(&self) -> Vec<Option<u64>> {
        let layout = self.planner.layout;
        let mut sizes: Vec<u64> = layout.layers.iter().map(|layer| layout.slot_of(layer)).collect();
        sizes.sort_unstable();
        let slots = self.planner.depth.saturating_add(1) as u64;
        let kept =
            |most: u64| sizes.iter().filter(|&&size| size > most).fold(0u64, |sum, &size| sum.saturating_add(size));
        let fits = |most: &u64| kept(*most).saturating_add(most.saturating_mul(slots)) <= self.room;
        let mut distinct = sizes.clone();
        distinct.dedup();
        distinct.pop();
        let useful: Vec<u64> = distinct.into_iter().filter(fits).collect();
        let step = useful.len().div_ceil(SLOT_SIZES - 1).max(1);
        let chosen = useful.into_iter().rev().step_by(step);
        std::iter::once(None).chain(chosen.map(Some)).collect()
    }

    fn splits(&mut self) -> Result<()> {
        if self.donors.len() < 2 {
            return Ok(());
        }
        for (order, unit) in ORDERS {
            let of_order = |found: &&Found| (found.arrangement.order, found.arrangement.unit) == (order, unit);
            let best = self.found.iter().filter(of_order).min_by_key(|found| found.pass);
            let Some(arrangement) = best.map(|found| found.arrangement) else { continue };
            for split in Split::ALL.into_iter().filter(|&split| split != Split::Hidden) {
                self.attempt(arrangement, split)?;
            }
        }
        Ok(())
    }

    /// Moves bytes from donor to donor while that shortens the best candidate's pass.
    fn moves(&mut self) -> Result<()> {
        for part in [16, 64] {
            let Some(best) = self.best().filter(|best| best.pass > self.time) else { return Ok(()) };
            let (arrangement, shares) = (best.arrangement, best.shares.clone());
            let moved = shares.iter().sum::<u64>() / part;
            for from in (0..shares.len()).filter(|&from| shares[from] > 0) {
                for to in (0..shares.len()).filter(|&to| to != from) {
                    let mut shares = shares.clone();
                    let moved =
                        moved.min(shares[from]).min(self.donors[to].room - shares[to].min(self.donors[to].room));
                    shares[from] -= moved;
                    shares[to] += moved;
                    if moved > 0 {
                        self.attempt_with(arrangement, |_, _| Some(shares.clone()))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn attempt(&mut self, arrangement: Arrangement, split: Split) -> Result<()> {
        let (topology, time) = (&self.planner.machine.topology, self.time);
        self.attempt_with(arrangement, |donors, streamed| split.shares(donors, streamed, topology, time))
    }

    /// Plans with the most that the compute device holds beside the slots, the rest shared out by `split`. How large
    /// the slots are is known only then, so the quota is corrected until it fits, and raised while it fits.
    fn attempt_with(
        &mut self,
        arrangement: Arrangement,
        split: impl Fn(&[Donor], u64) -> Option<Vec<u64>>,
    ) -> Result<()> {
        let (mut resident, mut donors) = (self.room.min(self.total), self.donors.clone());
        self.leave_room_for_staging(&mut donors);
        // The largest quota that fits and the smallest that does not.
        let (mut low, mut high) = (None, None);
        for _ in 0..ROUNDS {
            let Some((shares, rest)) = split(&donors, self.total - resident).and_then(|s| with_rest(&donors, s)) else {
                break;
            };
            let allocation = self.allocation(resident, &shares, rest)?;
            let planner = self.planner_of(arrangement).allocation(allocation.clone());
            let parts = planner.placed()?;
            self.tried += 1;
            let own = parts.devices.iter().find(|device| device.id == self.compute);
            let (beside, held) = own.map_or((0, 0), |own| (own.needed() - own.bytes, own.bytes));
            let beside_slots = self.room.saturating_sub(beside);
            match planner.checked(parts) {
                Ok(plan) => {
                    let pass = self.pass(&plan);
                    self.found.push(Found { arrangement, shares, allocation, pass });
                    low = Some(resident);
                    resident = high.map_or(beside_slots, |high: u64| beside_slots.min(high - 1));
                }
                Err(Error::DoesNotFit(short)) if short.device == self.compute => {
                    self.refused = Some(Error::DoesNotFit(short));
                    high = Some(resident);
                    let less = beside_slots.min(held.saturating_sub(1)).min(resident.saturating_sub(1));
                    resident = low.map_or(less, |low: u64| low.midpoint(resident));
                }
                Err(Error::DoesNotFit(short)) => {
                    let Some(donor) = donors.iter().position(|donor| donor.device == short.device) else { break };
                    donors[donor].room = shares[donor].min(donors[donor].room).saturating_sub(short.short);
                    self.refused = Some(Error::DoesNotFit(short));
                }
                Err(other) => return Err(other),
            }
            let gains = low.is_none_or(|low| resident > low + self.room / WORTH as u64);
            if !gains || high == Some(0) {
                break;
            }
        }
        Ok(())
    }

    /// Bytes of devices that the compute device cannot reach pass staging buffers on the host, one for each slot.
    fn leave_room_for_staging(&self, donors: &mut [Donor]) {
        let topology = &self.planner.machine.topology;
        if donors.iter().all(|donor| topology.reaches(self.compute, donor.device)) {
            return;
        }
        let layout = self.planner.layout;
        let largest = layout.layers.iter().map(|layer| layout.slot_of(layer)).max().unwrap_or(0);
        let staging = largest.saturating_mul(self.planner.depth.saturating_add(1) as u64);
        for donor in donors.iter_mut().filter(|donor| donor.device.is_host()) {
            donor.room = donor.room.saturating_sub(staging);
        }
    }

    /// The quotas as text would have them: the compute device, the donors, and last the one that takes the rest.
    fn allocation(&self, resident: u64, shares: &[u64], rest: usize) -> Result<Allocation> {
        let quota = |device: DeviceId, bytes: u64| format!("{device},{}", ByteSize(bytes));
        let mut entries = vec![quota(self.compute, resident)];
        let others = (0..shares.len()).filter(|&donor| donor != rest && shares[donor] > 0);
        entries.extend(others.map(|donor| quota(self.donors[donor].device, shares[donor])));
        entries.push(format!("{},*", self.donors[rest].device));
        entries.join(";").parse()
    }

    /// The time of a plan's pass: its forecast, or its floor where staging, which the forecast leaves out, makes that
    /// longer.
    fn pass(&self, plan: &Plan) -> Duration {
        let topology = &self.planner.machine.topology;
        let forecast = plan.forecast_of(self.planner.layout, topology, &self.layers);
        let stays_in_slots = plan.streamed_layers() <= plan.slots().count;
        if stays_in_slots { forecast } else { forecast.max(plan.estimate(topology, self.time).pass) }
    }

    /// The first of the candidates that none after it is worth to replace.
    fn best(&self) -> Option<&Found> {
        self.found.iter().reduce(|best, found| if found.pass + found.pass / WORTH < best.pass { found } else { best })
    }

    fn finish(self) -> Result<Plan> {
        let Some(best) = self.best() else {
            return Err(self.refused.unwrap_or_else(|| Error::invalid("there is no device for the model")));
        };
        let others = ORDERS.map(|(order, unit)| {
            let of_order = |found: &&Found| (found.arrangement.order, found.arrangement.unit) == (order, unit);
            let fastest = self.found.iter().filter(of_order).min_by_key(|found| found.pass);
            fastest.map(|found| Alternative::new(order, unit, found.allocation.clone(), found.pass))
        });
        let chosen = (best.arrangement.order, best.arrangement.unit);
        let others = others.into_iter().flatten().filter(|other| (other.order, other.unit) != chosen).collect();
        let layout = self.planner.layout;
        let large = |layer: &&crate::checkpoint::Layer| {
            best.arrangement.largest_slot.is_some_and(|s| layout.slot_of(layer) > s)
        };
        let kept = layout.layers.iter().filter(large).flat_map(|layer| &layer.modules);
        let kept = kept.map(|&module| layout.modules[module].name.clone()).collect();
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

/// The shares, and which donor's share is whatever is left: whole modules seldom fill a quota, so the one with most room.
fn with_rest(donors: &[Donor], mut shares: Vec<u64>) -> Option<(Vec<u64>, usize)> {
    let spare = |donor: &usize| donors[*donor].room - shares[*donor].min(donors[*donor].room);
    let rest = (0..shares.len()).filter(|&donor| donors[donor].room > 0).max_by_key(spare)?;
    shares.iter_mut().zip(donors).for_each(|(share, donor)| *share = (*share).min(donor.room));
    Some((shares, rest))
}

impl Plan {
    /// The plan as one of mode auto.
    fn found(self, explanation: Explanation) -> Result<Plan> {
        let parts = self.into_parts();
        Plan::new(Parts { mode: Mode::Auto, explanation: Some(Box::new(explanation)), ..parts })
    }
}
