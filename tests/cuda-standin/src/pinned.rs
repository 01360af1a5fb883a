//! Pinned host memory: allocated here or registered by the program.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backing::Backing;
use crate::code::{Code, Outcome};
use crate::config::MemoryMode;
use crate::hazard::History;
use crate::lane::Ticket;
use crate::mapping::Mark;
use crate::report::Rule;
use crate::world::{Call, State};

pub(crate) const PORTABLE: u32 = 1;
/// No flag of any driver: registered for something else than copies, which treat it as what is not pinned.
pub(crate) const UNPINNED: u32 = 1 << 31;

/// Whether a call takes memory from its owners, who break no rule by using it.
pub(crate) fn is_reset(call: &str) -> bool {
    matches!(call, "cuDevicePrimaryCtxReset_v2" | "hipDeviceReset")
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) device: usize,
    pub(crate) len: u64,
    pub(crate) flags: u32,
    pub(crate) registered: bool,
    pub(crate) backing: Arc<Backing>,
    pub(crate) history: History,
    pub(crate) call: &'static str,
    mark: Option<Mark>,
}

impl Region {
    /// Why its memory is no longer what was registered, if it is not.
    pub(crate) fn stale(&self) -> Option<&'static str> {
        self.mark.as_ref().and_then(Mark::lost)
    }

    fn lift(&self) {
        if let Some(mark) = self.mark.as_ref().filter(|mark| mark.lost().is_none()) {
            mark.lift();
        }
    }
}

#[derive(Debug)]
struct Gone {
    len: u64,
    /// The call that ended it.
    call: &'static str,
    /// Allocated memory keeps its addresses in quarantine, so that nothing else can be taken for it; its pages are given
    /// back.
    backing: Option<Arc<Backing>>,
}

#[derive(Debug, Default)]
pub(crate) struct Pinned {
    regions: BTreeMap<u64, Region>,
    /// Where regions were that are gone.
    gone: BTreeMap<u64, Gone>,
}

impl Pinned {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.values()
    }

    pub(crate) fn get_mut(&mut self, base: u64) -> Option<&mut Region> {
        self.regions.get_mut(&base)
    }

    /// The region that holds an address.
    pub(crate) fn holding(&self, address: u64) -> Option<(u64, &Region)> {
        let (&base, region) = self.regions.range(..=address).next_back()?;
        (address < base + region.len).then_some((base, region))
    }

    /// Registered memory that was unmapped meanwhile: its size, the call that registered it, and what is there now.
    pub(crate) fn stale(&self) -> impl Iterator<Item = (u64, &'static str, &'static str)> {
        self.regions.values().filter_map(|region| Some((region.len, region.call, region.stale()?)))
    }

    /// The size of the allocated memory that an address was in, and the call that freed it.
    pub(crate) fn gone_at(&self, address: u64) -> Option<(u64, &'static str)> {
        let (base, gone) = self.gone.range(..=address).next_back()?;
        (gone.backing.is_some() && address < base + gone.len).then_some((gone.len, gone.call))
    }

    /// Takes all that a device's context pinned. What the driver allocated stays readable, which a card does not promise.
    pub(crate) fn drop_device(&mut self, device: usize, call: &'static str) {
        let of_device = |(&base, region): (&u64, &Region)| (region.device == device).then_some(base);
        let gone: Vec<u64> = self.regions.iter().filter_map(of_device).collect();
        for base in gone {
            if let Some(region) = self.regions.remove(&base) {
                region.lift();
                let backing = (!region.registered).then_some(region.backing);
                self.gone.insert(base, Gone { len: region.len, call, backing });
            }
        }
    }

    /// Whether any region shares a byte with the range.
    pub(crate) fn overlaps(&self, address: u64, len: u64) -> bool {
        let before = self.regions.range(..address.saturating_add(len)).next_back();
        before.is_some_and(|(base, region)| base + region.len > address)
    }

    fn insert(&mut self, base: u64, region: Region) {
        let end = base + region.len;
        let covered: Vec<u64> = self.gone.range(base..end).map(|(&base, _)| base).collect();
        for base in covered {
            self.gone.remove(&base);
        }
        self.regions.insert(base, region);
    }
}

impl Call<'_> {
    fn may_pin(&self, state: &State, len: u64) -> Outcome<()> {
        let pinned: u64 = state.pinned.iter().map(|region| region.len).sum();
        match self.world.config().pinned_limit {
            Some(limit) if pinned.saturating_add(len) > limit => Err(Code::OUT_OF_MEMORY),
            _ => Ok(()),
        }
    }

    pub(crate) fn host_allocate(&self, len: u64, flags: u32) -> Outcome<u64> {
        let mut state = self.state();
        let device = self.device(&state)?;
        if len == 0 || flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        self.may_pin(&state, len)?;
        let backing = Arc::new(Backing::new(len as usize).ok_or(Code::OUT_OF_MEMORY)?);
        let base = backing.at(0).expose_provenance() as u64;
        let history = History::default();
        let region = Region { device, len, flags, registered: false, backing, history, call: self.name, mark: None };
        state.pinned.insert(base, region);
        Ok(base)
    }

    pub(crate) fn host_register(&self, at: *mut u8, len: u64, flags: u32) -> Outcome<()> {
        let mut state = self.state();
        let device = self.device(&state)?;
        let base = at.expose_provenance() as u64;
        if at.is_null() || len == 0 || base.checked_add(len).is_none() || flags & !UNPINNED > 15 {
            return Err(Code::INVALID_VALUE);
        }
        if !self.world.config().registers {
            return Err(Code::NOT_SUPPORTED);
        }
        if state.pinned.overlaps(base, len) {
            let stale = state.pinned.holding(base).and_then(|(_, region)| Some((region.len, region.stale()?)));
            if let Some((of, why)) = stale {
                self.violation(Rule::StaleRegistration, || format!("{of} bytes are registered there already: {why}"));
            }
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.may_pin(&state, len)?;
        let backing = Arc::new(Backing::borrowed(at, len as usize));
        let history = History::default();
        let mark = self.world.config().check_sources.then(|| Mark::set(base, len));
        let region = Region { device, len, flags, registered: true, backing, history, call: self.name, mark };
        state.pinned.insert(base, region);
        Ok(())
    }

    /// Ends a pinned region: the host must have seen the end of all its uses.
    pub(crate) fn unpin(&self, base: u64, registered: bool) -> Outcome<()> {
        let mut state = self.state();
        self.device(&state)?;
        let failure = if registered { Code::HOST_MEMORY_NOT_REGISTERED } else { Code::INVALID_VALUE };
        if state.pinned.regions.get(&base).is_none_or(|region| region.registered != registered) {
            let gone = state.pinned.gone.get(&base);
            if gone.is_some_and(|gone| is_reset(gone.call)) {
                return Err(failure);
            }
            let rule = if gone.is_some() { Rule::DoubleFree } else { Rule::BadFree };
            self.violation(rule, || match gone {
                Some(gone) => format!("the host memory at {base:#x} was already given up by {}", gone.call),
                None => format!("no such pinned memory starts at {base:#x}"),
            });
            return Err(failure);
        }
        let region = state.pinned.regions.remove(&base).ok_or(failure)?;
        if let Some(why) = region.stale() {
            self.violation(Rule::StaleRegistration, || format!("{} registered bytes: {why}", region.len));
        }
        region.lift();
        if let Some(open) = region.history.unordered(&state.host) {
            self.violation(Rule::FreeInUse, || {
                format!("{} pinned bytes were given up while {} may still use them", region.len, open.with.call)
            });
        }
        // The program may unmap registered memory next, so no worker may be left in it.
        let users = region.history.stamps(0..region.len, true);
        let users: Vec<Ticket> = users.iter().map(|stamp| state.ticket_of(stamp)).collect();
        let keeps = !registered && self.world.config().memory == MemoryMode::Quarantine;
        let backing = keeps.then(|| Arc::clone(&region.backing));
        if keeps || registered {
            state.pinned.gone.insert(base, Gone { len: region.len, call: self.name, backing });
        }
        drop(state);
        self.world.shared.nudge();
        users.iter().for_each(Ticket::wait);
        if keeps {
            region.backing.empty();
        }
        Ok(())
    }

    pub(crate) fn host_flags(&self, address: u64) -> Outcome<u32> {
        let state = self.state();
        self.device(&state)?;
        state.pinned.holding(address).map(|(_, region)| region.flags).ok_or(Code::INVALID_VALUE)
    }

    /// With one address space for host and devices, pinned memory has one address.
    pub(crate) fn host_device_pointer(&self, address: u64) -> Outcome<u64> {
        self.host_flags(address)?;
        Ok(address)
    }
}
