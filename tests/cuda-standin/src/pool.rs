//! Memory accounts of devices, and stream-ordered pools.

use std::collections::BTreeSet;

use crate::code::{Code, Outcome};
use crate::config::Config;
use crate::hazard::{Clock, Stamp};
use crate::memory::Allocation;
use crate::report::Rule;
use crate::vendor::Vendor;
use crate::world::{Call, State, new_handle};

/// A pool of a device's memory.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    /// It belongs to the device and cannot be destroyed.
    default: bool,
    /// The bytes that it keeps when the host waits.
    threshold: u64,
    reuse: [i32; 3],
    used: u64,
    used_high: u64,
    reserved_high: u64,
    /// Freed bytes that it still holds, and the frees that others must be ordered after.
    cached: Vec<(Option<Stamp>, u64)>,
    /// The other devices that may use its memory.
    shared_with: BTreeSet<usize>,
}

impl Pool {
    fn new(device: usize, default: bool) -> Pool {
        Pool {
            device,
            default,
            threshold: 0,
            reuse: [1; 3],
            used: 0,
            used_high: 0,
            reserved_high: 0,
            cached: Vec::new(),
            shared_with: BTreeSet::new(),
        }
    }

    fn reserved(&self) -> u64 {
        self.used + self.cached.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }
}

impl State {
    /// Takes bytes of a device's memory, from what its pools only keep if need be.
    pub(crate) fn take_bytes(&mut self, config: &Config, device: usize, bytes: u64) -> Outcome<()> {
        let total = config.devices[device].total;
        if self.devices[device].used.saturating_add(bytes) > total {
            self.trim(|_, pool| if pool.device == device { 0 } else { u64::MAX });
        }
        let slot = &mut self.devices[device];
        if slot.used.saturating_add(bytes) > total {
            return Err(Code::OUT_OF_MEMORY);
        }
        slot.used += bytes;
        slot.peak = slot.peak.max(slot.used);
        Ok(())
    }

    /// Takes bytes of a pool: first what was freed before this in the order of the stream, or has been freed by now.
    pub(crate) fn take_from_pool(&mut self, config: &Config, pool: u64, bytes: u64, order: &Clock) -> Outcome<()> {
        let mut missing = bytes;
        let Some(mut cached) = self.pools.get_mut(&pool).map(|pool| std::mem::take(&mut pool.cached)) else {
            return Err(Code::INVALID_VALUE);
        };
        for (stamp, kept) in &mut cached {
            if stamp.is_none_or(|stamp| order.covers(&stamp) || self.stamp_is_done(&stamp)) {
                let part = missing.min(*kept);
                *kept -= part;
                missing -= part;
            }
        }
        cached.retain(|(_, kept)| *kept > 0);
        let device = match self.pools.get_mut(&pool) {
            Some(found) => {
                found.cached = cached;
                found.used += bytes - missing;
                found.device
            }
            None => return Err(Code::INVALID_VALUE),
        };
        let taken = self.take_bytes(config, device, missing);
        if let Some(found) = self.pools.get_mut(&pool) {
            match taken {
                Ok(()) => found.used += missing,
                Err(_) => {
                    found.used -= bytes - missing;
                    found.cached.push((None, bytes - missing));
                }
            }
            found.used_high = found.used_high.max(found.used);
            found.reserved_high = found.reserved_high.max(found.reserved());
        }
        taken
    }

    /// Gives an allocation's bytes back to its pool or its device.
    pub(crate) fn give_back(&mut self, gone: &Allocation, freed: Option<Stamp>) {
        if let Some(pool) = gone.pool.and_then(|pool| self.pools.get_mut(&pool)) {
            pool.used -= gone.charged;
            pool.cached.push((freed, gone.charged));
        } else {
            self.devices[gone.device].used -= gone.charged;
        }
    }

    /// The host has waited: pools keep no more than their thresholds.
    pub(crate) fn release_cached(&mut self) {
        self.trim(|_, pool| pool.threshold);
    }

    /// Gives back what pools hold beyond `keep` and no one uses any more.
    fn trim(&mut self, keep: impl Fn(u64, &Pool) -> u64) {
        let holding = self.pools.iter().filter(|(_, pool)| !pool.cached.is_empty());
        for handle in holding.map(|(&handle, _)| handle).collect::<Vec<u64>>() {
            let Some(mut cached) = self.pools.get_mut(&handle).map(|pool| std::mem::take(&mut pool.cached)) else {
                continue;
            };
            let Some(pool) = self.pools.get(&handle) else { continue };
            let held: u64 = cached.iter().map(|(_, bytes)| bytes).sum();
            let mut excess = (pool.used + held).saturating_sub(keep(handle, pool)).min(held);
            let mut released = 0;
            for (stamp, bytes) in &mut cached {
                if stamp.is_none_or(|stamp| self.stamp_is_done(&stamp)) {
                    let part = excess.min(*bytes);
                    *bytes -= part;
                    excess -= part;
                    released += part;
                }
            }
            cached.retain(|(_, bytes)| *bytes > 0);
            let device = pool.device;
            if let Some(pool) = self.pools.get_mut(&handle) {
                pool.cached = cached;
            }
            self.devices[device].used -= released;
        }
    }
}

impl Call<'_> {
    pub(crate) fn known_pool<'s>(&self, state: &'s State, pool: u64) -> Outcome<&'s Pool> {
        let Some(found) = state.pools.get(&pool) else {
            return Err(self.no_handle(state, pool, "pool", Code::INVALID_VALUE));
        };
        self.whole(found.device)?;
        Ok(found)
    }

    fn pooled_device(&self, device: i32) -> Outcome<usize> {
        let index = self.device_index(device)?;
        self.whole(index)?;
        if self.has_pools(index) { Ok(index) } else { Err(Code::NOT_SUPPORTED) }
    }

    pub(crate) fn default_pool(&self, device: i32) -> Outcome<u64> {
        let device = self.pooled_device(device)?;
        let mut state = self.state();
        if let Some(pool) = state.devices[device].default_pool {
            return Ok(pool);
        }
        let handle = new_handle();
        state.pools.insert(handle, Pool::new(device, true));
        state.devices[device].default_pool = Some(handle);
        Ok(handle)
    }

    pub(crate) fn device_pool(&self, device: i32) -> Outcome<u64> {
        let index = self.pooled_device(device)?;
        let current = self.state().devices[index].current_pool;
        current.map_or_else(|| self.default_pool(device), Ok)
    }

    pub(crate) fn set_device_pool(&self, device: i32, pool: u64) -> Outcome<()> {
        let index = self.pooled_device(device)?;
        let mut state = self.state();
        if self.known_pool(&state, pool)?.device != index {
            return Err(Code::INVALID_VALUE);
        }
        state.devices[index].current_pool = Some(pool);
        Ok(())
    }

    pub(crate) fn current_pool(&self, state: &mut State, device: usize) -> Outcome<u64> {
        if let Some(pool) = state.devices[device].current_pool.or(state.devices[device].default_pool) {
            return Ok(pool);
        }
        let handle = new_handle();
        state.pools.insert(handle, Pool::new(device, true));
        state.devices[device].default_pool = Some(handle);
        Ok(handle)
    }

    pub(crate) fn create_pool(&self, device: i32) -> Outcome<u64> {
        let device = self.pooled_device(device)?;
        let handle = new_handle();
        self.state().pools.insert(handle, Pool::new(device, false));
        Ok(handle)
    }

    pub(crate) fn destroy_pool(&self, pool: u64) -> Outcome<()> {
        let mut state = self.state();
        let found = self.known_pool(&state, pool)?;
        if found.default {
            return Err(Code::INVALID_VALUE);
        }
        let (device, live) = (found.device, found.used);
        if live > 0 {
            self.violation(Rule::Leak, || format!("a pool was destroyed with {live} bytes of it allocated"));
        }
        // What is allocated goes back to the device when it is freed.
        let held = found.reserved() - live;
        state.devices[device].used -= held;
        if state.devices[device].current_pool == Some(pool) {
            state.devices[device].current_pool = None;
        }
        state.pools.remove(&pool);
        Ok(())
    }

    pub(crate) fn trim_pool(&self, pool: u64, keep: u64) -> Outcome<()> {
        let mut state = self.state();
        self.known_pool(&state, pool)?;
        state.trim(|handle, _| if handle == pool { keep } else { u64::MAX });
        Ok(())
    }

    /// The attributes by the driver's numbers; the first three are 32 bits wide, the others 64.
    pub(crate) fn pool_attribute(&self, pool: u64, attribute: u32) -> Outcome<u64> {
        let state = self.state();
        let pool = self.known_pool(&state, pool)?;
        Ok(match attribute {
            1..=3 => pool.reuse[attribute as usize - 1] as u64,
            4 => pool.threshold,
            5 => pool.reserved(),
            6 => pool.reserved_high,
            7 => pool.used,
            8 => pool.used_high,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    pub(crate) fn set_pool_attribute(&self, pool: u64, attribute: u32, value: u64) -> Outcome<()> {
        let mut state = self.state();
        self.known_pool(&state, pool)?;
        let pool = state.pools.get_mut(&pool).ok_or(Code::INVALID_VALUE)?;
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1] = i32::from(value != 0),
            4 => pool.threshold = value,
            6 if value == 0 => pool.reserved_high = pool.reserved(),
            8 if value == 0 => pool.used_high = pool.used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    /// Lets another device use a pool's memory, or takes that back.
    pub(crate) fn set_pool_access(&self, pool: u64, device: i32, access: bool) -> Outcome<()> {
        let device = self.device_index(device)?;
        let mut state = self.state();
        let owner = self.known_pool(&state, pool)?.device;
        if owner == device {
            return if access { Ok(()) } else { Err(Code::INVALID_VALUE) };
        }
        if access && !self.can_reach(device as i32, owner as i32)? {
            return Err(Code::INVALID_DEVICE);
        }
        let pool = state.pools.get_mut(&pool).ok_or(Code::INVALID_VALUE)?;
        if access {
            pool.shared_with.insert(device);
        } else {
            pool.shared_with.remove(&device);
        }
        Ok(())
    }

    pub(crate) fn pool_access(&self, pool: u64, device: i32) -> Outcome<bool> {
        let device = self.device_index(device)?;
        let state = self.state();
        let pool = self.known_pool(&state, pool)?;
        Ok(pool.device == device || pool.shared_with.contains(&device))
    }

    /// Whether work of one device may use memory of another one. Pools have a permission of their own.
    pub(crate) fn may_reach(&self, state: &State, from: usize, to: usize, pool: Option<u64>) -> bool {
        match pool {
            _ if from == to => true,
            Some(pool) => state.pools.get(&pool).is_some_and(|pool| pool.shared_with.contains(&from)),
            // With CNDrv, nobody has to be let.
            None if self.vendor == Vendor::CnDrv => self.linked(from, to),
            None => state.devices[from].reaches.contains(&to),
        }
    }
}
