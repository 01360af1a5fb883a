//! Device memory: addresses that no host can dereference, and who may use them in which order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::backing::{Backing, RUBBISH};
use crate::code::{Code, Outcome};
use crate::config::{Config, MemoryMode};
use crate::hazard::{Access, Clock, History, Stamp};
use crate::lane::{Work, poison};
use crate::pinned::is_reset;
use crate::report::Rule;
use crate::stream::Turn;
use crate::vendor::Vendor;
use crate::world::{Call, State};

/// Where device addresses start. Not canonical on any 64-bit machine that runs this: touching one is a fault.
pub(crate) const BASE: u64 = 0x00D0_0000_0000_0000;
/// The addresses of one device.
const SPAN: u64 = 1 << 44;
const ALIGNMENT: u64 = 512;
/// What lies between two allocations, so that running past an end never hits a neighbour.
const GAP: u64 = 64 << 10;
/// The most bytes of freed memory that are kept to be handed out again.
const KEPT: u64 = 2 << 30;

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) device: usize,
    pub(crate) context: u64,
    pub(crate) len: u64,
    /// What it counts for in the device's memory.
    pub(crate) charged: u64,
    pub(crate) backing: Arc<Backing>,
    pub(crate) history: History,
    pub(crate) pool: Option<u64>,
    pub(crate) call: &'static str,
}

/// Freed memory that waits to be handed out again.
#[derive(Debug)]
struct Spare {
    device: usize,
    pool: Option<u64>,
    base: u64,
    backing: Arc<Backing>,
    residue: History,
    /// Freed in the order of a stream.
    freed: Option<Stamp>,
}

#[derive(Debug, Default)]
pub(crate) struct Memory {
    live: BTreeMap<u64, Allocation>,
    /// Ranges that were freed and not handed out again: their lengths and the calls that freed them.
    freed: BTreeMap<u64, (u64, &'static str)>,
    next: BTreeMap<usize, u64>,
    spares: Vec<Spare>,
}

/// A range of device memory that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) base: u64,
    pub(crate) device: usize,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Memory {
    pub(crate) fn get(&self, base: u64) -> Option<&Allocation> {
        self.live.get(&base)
    }

    pub(crate) fn get_mut(&mut self, base: u64) -> Option<&mut Allocation> {
        self.live.get_mut(&base)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Allocation> {
        self.live.values()
    }

    /// The live allocation that holds an address.
    pub(crate) fn holding(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (&base, allocation) = self.live.range(..=address).next_back()?;
        (address < base + allocation.len).then_some((base, allocation))
    }

    /// Takes fresh or formerly used memory; `order` is the clock of the stream that allocates, if one does.
    fn take(&mut self, config: &Config, new: NewAllocation, order: &Clock) -> Outcome<u64> {
        if let Some((base, backing, residue)) = self.spare(&new, order) {
            self.freed.remove(&base);
            self.live.insert(base, new.into_allocation(backing, residue));
            return Ok(base);
        }
        let backing = Backing::new(new.len as usize).ok_or(Code::OUT_OF_MEMORY)?;
        backing.fill(0..new.len.min(config.fill_fresh) as usize, RUBBISH);
        let next = self.next.entry(new.device).or_insert(GAP);
        let base = BASE + new.device as u64 * SPAN + *next;
        *next = (*next + new.len + GAP).next_multiple_of(ALIGNMENT);
        if *next >= SPAN {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.live.insert(base, new.into_allocation(Arc::new(backing), History::default()));
        Ok(base)
    }

    fn spare(&mut self, new: &NewAllocation, order: &Clock) -> Option<(u64, Arc<Backing>, History)> {
        let fits = |spare: &Spare| {
            let capacity = spare.backing.len() as u64;
            spare.device == new.device
                && spare.pool == new.pool
                && (new.len..=new.len.saturating_mul(2)).contains(&capacity)
                && spare.freed.is_none_or(|stamp| order.covers(&stamp))
        };
        let index = self.spares.iter().rposition(fits)?;
        let spare = self.spares.remove(index);
        Some((spare.base, spare.backing, spare.residue))
    }

    fn keep(&mut self, spare: Spare) {
        self.spares.push(spare);
        let mut kept: u64 = self.spares.iter().map(|spare| spare.backing.len() as u64).sum();
        while kept > KEPT && !self.spares.is_empty() {
            kept -= self.spares.remove(0).backing.len() as u64;
        }
    }

    pub(crate) fn drop_device(&mut self, device: usize, call: &'static str) {
        self.drop_those(call, |allocation| allocation.device == device);
        self.spares.retain(|spare| spare.device != device);
    }

    /// Takes all of which that holds; the bytes that it counted for.
    pub(crate) fn drop_those(&mut self, call: &'static str, of: impl Fn(&Allocation) -> bool) -> u64 {
        let gone: Vec<u64> = self.live.iter().filter(|(_, found)| of(found)).map(|(&base, _)| base).collect();
        let gone = gone.into_iter().filter_map(|base| Some((base, self.live.remove(&base)?)));
        let mut charged = 0;
        for (base, allocation) in gone {
            self.freed.insert(base, (allocation.len, call));
            charged += allocation.charged;
        }
        charged
    }
}

struct NewAllocation {
    device: usize,
    context: u64,
    len: u64,
    charged: u64,
    pool: Option<u64>,
    call: &'static str,
}

impl NewAllocation {
    fn into_allocation(self, backing: Arc<Backing>, history: History) -> Allocation {
        let NewAllocation { device, context, len, charged, pool, call } = self;
        Allocation { device, context, len, charged, backing, history, pool, call }
    }
}

impl Call<'_> {
    fn charge(&self, device: usize, len: u64) -> Outcome<u64> {
        let granularity = self.world.config().devices[device].granularity.max(1);
        len.checked_next_multiple_of(granularity).ok_or(Code::OUT_OF_MEMORY)
    }

    pub(crate) fn allocate(&self, len: u64) -> Outcome<u64> {
        let mut state = self.state();
        let device = self.device(&state)?;
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let charged = self.charge(device, len)?;
        state.take_bytes(self.world.config(), device, charged)?;
        let context = self.owning_context();
        let new = NewAllocation { device, context, len, charged, pool: None, call: self.name };
        let order = state.host.clone();
        let taken = state.memory.take(self.world.config(), new, &order);
        if taken.is_err() {
            state.devices[device].used -= charged;
        }
        taken
    }

    /// Allocates in the order of a stream, from a pool (by default the device's current one).
    pub(crate) fn allocate_async(&self, len: u64, pool: Option<u64>, stream: u64) -> Outcome<u64> {
        let mut state = self.state();
        let lane = self.lane(&mut state, stream)?;
        let device = state.lanes[lane as usize].lane.device;
        if !self.has_pools(device) {
            return Err(Code::NOT_SUPPORTED);
        }
        let pool = match pool {
            Some(pool) => pool,
            None => self.current_pool(&mut state, device)?,
        };
        let of_pool = self.known_pool(&state, pool)?.device;
        if of_pool != device && !self.may_reach(&state, device, of_pool, Some(pool)) {
            return Err(Code::INVALID_VALUE);
        }
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let charged = self.charge(of_pool, len)?;
        let turn = state.turn(lane, self.name);
        let order = state.lanes[turn.lane].clock.clone();
        let taken = state.take_from_pool(self.world.config(), pool, charged, &order).and_then(|()| {
            let (device, pool) = (of_pool, Some(pool));
            let new = NewAllocation { device, context: 0, len, charged, pool, call: self.name };
            state.memory.take(self.world.config(), new, &order)
        });
        if let Some(allocation) = taken.ok().and_then(|base| state.memory.get_mut(base)) {
            // Users on other streams must come after the allocation itself.
            let _ = allocation.history.access(0..len, Access::Write, turn.stamp, &order);
        }
        self.submit(&mut state, turn, Work::Nothing);
        taken
    }

    /// Frees memory now: the host must have seen the end of all its uses.
    pub(crate) fn free(&self, base: u64) -> Outcome<()> {
        let mut state = self.state();
        let mut device = self.device(&state)?;
        if base == 0 {
            return Ok(());
        }
        if self.vendor == Vendor::Hip {
            // Whichever is current, it finds the device by the address.
            device = state.memory.get(base).map_or(device, |allocation| allocation.device);
            self.whole(device)?;
        }
        let allocation = self.take_out(&mut state, base, device)?;
        if let Some(open) = allocation.history.unordered(&state.host) {
            self.violation(Rule::FreeInUse, || {
                format!("{} bytes were freed while {} may still use them", allocation.len, open.with.call)
            });
        }
        state.give_back(&allocation, None);
        if self.world.config().memory == MemoryMode::Quarantine {
            poison(&allocation.backing, &allocation.history.written());
        }
        let host = state.host.clone();
        self.retire(&mut state, base, allocation, &host, None);
        Ok(())
    }

    /// Frees memory in the order of a stream, which must come after all its uses.
    pub(crate) fn free_async(&self, base: u64, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        let lane = self.lane(&mut state, stream)?;
        let device = state.lanes[lane as usize].lane.device;
        if !self.has_pools(device) {
            return Err(Code::NOT_SUPPORTED);
        }
        if base == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut allocation = self.take_out(&mut state, base, device)?;
        let turn = state.turn(lane, self.name);
        let clock = state.lanes[turn.lane].clock.clone();
        let written = allocation.history.written();
        let whole = 0..allocation.len;
        if let Some(open) = allocation.history.access(whole, Access::Write, turn.stamp, &clock) {
            self.violation(Rule::FreeInUse, || {
                format!("{} bytes are freed with no order to {}", allocation.len, open.with.call)
            });
        }
        let stamp = turn.stamp;
        state.give_back(&allocation, Some(stamp));
        let work = match self.world.config().memory {
            MemoryMode::Quarantine => Work::Poison { backing: Arc::clone(&allocation.backing), ranges: written },
            MemoryMode::Reuse => Work::Nothing,
        };
        self.submit(&mut state, turn, work);
        self.retire(&mut state, base, allocation, &Clock::default(), Some(stamp));
        Ok(())
    }

    fn take_out(&self, state: &mut State, base: u64, device: usize) -> Outcome<Allocation> {
        let Some(found) = state.memory.get(base) else {
            let freed = state.memory.freed.get(&base);
            if freed.is_some_and(|(_, call)| is_reset(call)) {
                return Err(Code::INVALID_VALUE);
            }
            let rule = if freed.is_some() { Rule::DoubleFree } else { Rule::BadFree };
            self.violation(rule, || match freed {
                Some((len, call)) => format!("{len} bytes were already freed by {call}"),
                None => format!("no allocation starts at {base:#x}"),
            });
            return Err(Code::INVALID_VALUE);
        };
        if found.device != device {
            self.violation(Rule::WrongContext, || {
                format!("memory of device {} freed with a context of device {device}", found.device)
            });
            return Err(Code::INVALID_VALUE);
        }
        state.memory.live.remove(&base).ok_or(Code::INVALID_VALUE)
    }

    fn retire(&self, state: &mut State, base: u64, gone: Allocation, seen: &Clock, freed: Option<Stamp>) {
        state.memory.freed.insert(base, (gone.len, self.name));
        if self.world.config().memory == MemoryMode::Reuse {
            let residue = gone.history.residue(seen);
            let (device, pool, backing) = (gone.device, gone.pool, gone.backing);
            state.memory.keep(Spare { device, pool, base, backing, residue, freed });
        }
    }

    /// The allocation that a range lies in, which must be all of it.
    pub(crate) fn locate(&self, state: &State, address: u64, len: u64) -> Outcome<Found> {
        if let Some((base, allocation)) = state.memory.holding(address) {
            let offset = address - base;
            if len > allocation.len - offset {
                self.violation(Rule::OutOfBounds, || {
                    format!("{len} bytes at offset {offset} of an allocation of {} bytes", allocation.len)
                });
                return Err(Code::INVALID_VALUE);
            }
            return Ok(Found { base, device: allocation.device, offset, len });
        }
        let freed = state.memory.freed.range(..=address).next_back();
        if let Some((_, (size, call))) = freed.filter(|(base, (size, _))| address < **base + size) {
            if is_reset(call) {
                return Err(Code::INVALID_VALUE);
            }
            self.violation(Rule::UseAfterFree, || format!("an allocation of {size} bytes that {call} freed"));
            return Err(Code::INVALID_VALUE);
        }
        let before = state.memory.live.range(..address).next_back();
        match before.filter(|(base, allocation)| address < **base + allocation.len + GAP) {
            Some((base, allocation)) => self.violation(Rule::OutOfBounds, || {
                format!("offset {} of an allocation of {} bytes", address - base, allocation.len)
            }),
            None => self.violation(Rule::UnknownAddress, || format!("nothing was ever at {address:#x}")),
        }
        Err(Code::INVALID_VALUE)
    }

    /// Checks a use of device memory against all others, and remembers it.
    pub(crate) fn touch(&self, state: &mut State, found: &Found, access: Access, turn: &Turn) {
        let clock = state.lanes[turn.lane].clock.clone();
        self.touch_after(state, found, access, turn, &clock);
    }

    /// The same, for a use that is only ordered after what the clock stands for.
    pub(crate) fn touch_after(&self, state: &mut State, found: &Found, access: Access, turn: &Turn, clock: &Clock) {
        let Some(allocation) = state.memory.live.get_mut(&found.base) else { return };
        let range = found.offset..found.offset + found.len;
        if let Some(conflict) = allocation.history.access(range.clone(), access, turn.stamp, clock) {
            self.conflict(access, &range, conflict);
        }
    }

    pub(crate) fn conflict(&self, access: Access, range: &Range<u64>, other: crate::hazard::Conflict) {
        let rule = if other.former { Rule::ReusedUnordered } else { Rule::Unordered };
        self.violation(rule, || {
            format!(
                "a {access:?} of bytes {}..{} is not ordered with the {:?} by {} at {}",
                range.start, range.end, other.access, other.with.call, other.at
            )
        });
    }
}
