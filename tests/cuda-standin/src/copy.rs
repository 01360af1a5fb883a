//! Copies and fills: which memory they touch, whether they may, and what the stream is to do.

use std::sync::Arc;

use crate::backing::{Backing, checksum, copy};
use crate::code::{Code, Outcome};
use crate::graph::Node;
use crate::hazard::{Access, Clock, Stamp};
use crate::lane::{Check, Copy, Place, Work};
use crate::memory::Found;
use crate::pace::Route;
use crate::pinned::{PORTABLE, UNPINNED, is_reset};
use crate::report::Rule;
use crate::stream::Turn;
use crate::sync::lock;
use crate::vendor::Vendor;
use crate::world::{Call, State};

/// Where a host address lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostRange {
    Pageable,
    Pinned { base: u64, offset: u64 },
}

impl Call<'_> {
    pub(crate) fn upload(&self, dst: u64, src: *const u8, len: u64, stream: u64, wait: bool) -> Outcome<()> {
        let mut state = self.state();
        let address = src.expose_provenance() as u64;
        let lane = self.lane_for(&mut state, stream, || Node::Upload { dst, src: address, len })?;
        if len == 0 {
            return Ok(());
        }
        let found = self.own(&state, dst, len, lane)?;
        let host = self.host_range(&state, src.cast_mut(), len, lane)?;
        let wait = wait || matches!(host, HostRange::Pageable) && self.vendor.waits_for_pageable();
        let (src, check) = match host {
            HostRange::Pageable => (self.stage(src, len)?, Check::Never),
            HostRange::Pinned { base, offset } => {
                pinned_source(&state, base, offset, len, self.world.config().check_sources)?
            }
        };
        let dst = self.place(&state, &found)?;
        let turn = state.turn(lane, self.name);
        self.touch(&mut state, &found, Access::Write, &turn);
        self.touch_host(&mut state, host, len, Access::Read, &turn);
        let route = Route::ToDevice(found.device);
        let work = Copy { src, dst, len: len as usize, route, check, lie: false };
        self.submit(&mut state, turn, Work::Copy(work));
        if wait { self.wait_for_lane(state, lane) } else { Ok(()) }
    }

    /// A download to memory that is not pinned is over when the call returns.
    pub(crate) fn download(&self, dst: *mut u8, src: u64, len: u64, stream: u64, wait: bool) -> Outcome<()> {
        let mut state = self.state();
        let address = dst.expose_provenance() as u64;
        let lane = self.lane_for(&mut state, stream, || Node::Download { dst: address, src, len })?;
        if len == 0 {
            return Ok(());
        }
        let found = self.own(&state, src, len, lane)?;
        let host = self.host_range(&state, dst, len, lane)?;
        let wait = wait || matches!(host, HostRange::Pageable);
        let dst = match host {
            HostRange::Pageable => Place { backing: Arc::new(Backing::borrowed(dst, len as usize)), offset: 0 },
            HostRange::Pinned { base, offset } => pinned_place(&state, base, offset)?,
        };
        let src = self.place(&state, &found)?;
        let turn = state.turn(lane, self.name);
        self.touch(&mut state, &found, Access::Read, &turn);
        self.touch_host(&mut state, host, len, Access::Write, &turn);
        let route = Route::ToHost(found.device);
        let work = Copy { src, dst, len: len as usize, route, check: Check::Never, lie: false };
        self.submit(&mut state, turn, Work::Copy(work));
        if wait { self.wait_for_lane(state, lane) } else { Ok(()) }
    }

    /// Copies between device memories, of one device or of two; contexts, when given, must be those of the memory.
    pub(crate) fn across(
        &self,
        dst: (u64, Option<u64>),
        src: (u64, Option<u64>),
        len: u64,
        stream: u64,
        wait: bool,
    ) -> Outcome<()> {
        let mut state = self.state();
        let lane = self.lane_for(&mut state, stream, || Node::Across { dst, src, len })?;
        if len == 0 {
            return Ok(());
        }
        let from = self.reachable(&state, src, len, lane)?;
        let to = self.reachable(&state, dst, len, lane)?;
        self.not_within_a_device(&state, &from, &to)?;
        if from.base == to.base && from.offset.abs_diff(to.offset) < len {
            self.violation(Rule::Overlap, || {
                format!("{len} bytes from offset {} to offset {} of one allocation", from.offset, to.offset)
            });
        }
        let (src, dst) = (self.place(&state, &from)?, self.place(&state, &to)?);
        let turn = state.turn(lane, self.name);
        self.touch(&mut state, &from, Access::Read, &turn);
        self.touch(&mut state, &to, Access::Write, &turn);
        let route = if from.device == to.device { Route::Within } else { Route::Between(from.device, to.device) };
        let lie = route != Route::Within && lock(&self.world.faults).plan.lying_peers;
        let work = Copy { src, dst, len: len as usize, route, check: Check::Never, lie };
        self.submit(&mut state, turn, Work::Copy(work));
        if wait { self.wait_for_lane(state, lane) } else { Ok(()) }
    }

    pub(crate) fn fill(&self, dst: u64, byte: u8, len: u64, stream: u64) -> Outcome<()> {
        let mut state = self.state();
        let lane = self.lane_for(&mut state, stream, || Node::Fill { dst, byte, len })?;
        if len == 0 {
            return Ok(());
        }
        let found = self.own(&state, dst, len, lane)?;
        let dst = self.place(&state, &found)?;
        let turn = state.turn(lane, self.name);
        self.touch(&mut state, &found, Access::Write, &turn);
        self.submit(&mut state, turn, Work::Fill { dst, len: len as usize, byte });
        Ok(())
    }

    /// A range of the stream's own device.
    pub(crate) fn own(&self, state: &State, address: u64, len: u64, lane: u32) -> Outcome<Found> {
        let found = self.locate(state, address, len)?;
        let device = state.lanes[lane as usize].lane.device;
        if found.device != device {
            self.violation(Rule::WrongContext, || {
                format!("memory of device {} with a context of device {device} current", found.device)
            });
            return Err(Code::INVALID_VALUE);
        }
        self.of_queues_context(state, &found)?;
        Ok(found)
    }

    /// With CNDrv memory belongs to a context, which must be that of the queue, and so the current one.
    fn of_queues_context(&self, state: &State, found: &Found) -> Outcome<()> {
        let context = state.memory.get(found.base).map(|allocation| allocation.context);
        if self.vendor != Vendor::CnDrv || context == Some(Call::current_context()) {
            return Ok(());
        }
        self.violation(Rule::WrongContext, || {
            format!("memory of another context than the queue's, of device {}", found.device)
        });
        Err(Code::INVALID_VALUE)
    }

    /// Nor does CNDrv copy between two contexts of one device.
    fn not_within_a_device(&self, state: &State, from: &Found, to: &Found) -> Outcome<()> {
        self.of_queues_context(state, from)?;
        if from.device == to.device { self.of_queues_context(state, to) } else { Ok(()) }
    }

    /// A range that a stream's device may reach.
    pub(crate) fn reachable(
        &self,
        state: &State,
        (address, context): (u64, Option<u64>),
        len: u64,
        lane: u32,
    ) -> Outcome<Found> {
        let found = self.locate(state, address, len)?;
        if let Some(context) = context {
            let device = self.context_device(state, context)?;
            let of = state.memory.get(found.base).map(|allocation| allocation.context);
            if device != found.device || self.vendor == Vendor::CnDrv && of != Some(context) {
                self.violation(Rule::WrongContext, || {
                    format!("memory of device {} named as one of device {device}", found.device)
                });
                return Err(Code::INVALID_VALUE);
            }
        }
        self.whole(found.device)?;
        let device = state.lanes[lane as usize].lane.device;
        let pool = state.memory.get(found.base).and_then(|allocation| allocation.pool);
        if !self.may_reach(state, device, found.device, pool) {
            self.violation(Rule::NoPeerAccess, || {
                let what = if pool.is_some() { "pool memory" } else { "memory" };
                format!("device {device} was not given access to {what} of device {}", found.device)
            });
            return Err(Code::PEER_ACCESS_NOT_ENABLED);
        }
        Ok(found)
    }

    pub(crate) fn place(&self, state: &State, found: &Found) -> Outcome<Place> {
        let allocation = state.memory.get(found.base).ok_or(Code::INVALID_VALUE)?;
        Ok(Place { backing: Arc::clone(&allocation.backing), offset: found.offset as usize })
    }

    pub(crate) fn host_range(&self, state: &State, at: *mut u8, len: u64, lane: u32) -> Outcome<HostRange> {
        let address = at.expose_provenance() as u64;
        if at.is_null() || address.checked_add(len).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        let Some((base, region)) = state.pinned.holding(address) else {
            if let Some((size, call)) = state.pinned.gone_at(address) {
                if is_reset(call) {
                    return Err(Code::INVALID_VALUE);
                }
                self.violation(Rule::UseAfterFree, || format!("{size} pinned bytes that {call} freed"));
                return Err(Code::INVALID_VALUE);
            }
            if state.pinned.overlaps(address, len) {
                self.violation(Rule::PartlyPinned, || format!("{len} bytes that run into pinned memory"));
                return Err(Code::INVALID_VALUE);
            }
            if state.memory.holding(address).is_some() {
                self.violation(Rule::UnknownAddress, || "device memory given as host memory".to_owned());
                return Err(Code::INVALID_VALUE);
            }
            return Ok(HostRange::Pageable);
        };
        let offset = address - base;
        if len > region.len - offset {
            let rule = if region.registered { Rule::PartlyPinned } else { Rule::OutOfBounds };
            self.violation(rule, || format!("{len} bytes at offset {offset} of {} pinned bytes", region.len));
            return Err(Code::INVALID_VALUE);
        }
        if let Some(why) = region.stale() {
            self.violation(Rule::StaleRegistration, || format!("{len} bytes of {} registered ones: {why}", region.len));
            return Err(Code::INVALID_VALUE);
        }
        if region.flags & UNPINNED != 0 {
            return Ok(HostRange::Pageable);
        }
        let device = state.lanes[lane as usize].lane.device;
        if region.device != device && region.flags & PORTABLE == 0 {
            self.violation(Rule::NotPortable, || {
                format!("memory pinned for device {} used with a stream of device {device}", region.device)
            });
            return Ok(HostRange::Pageable);
        }
        Ok(HostRange::Pinned { base, offset })
    }

    /// Copies a source that is not pinned before the call returns.
    pub(crate) fn stage(&self, src: *const u8, len: u64) -> Outcome<Place> {
        let backing = Backing::new(len as usize).ok_or(Code::OUT_OF_MEMORY)?;
        // SAFETY: the program gave this range as the source; the backing was just made for it.
        unsafe { copy(src, backing.at(0), len as usize) };
        Ok(Place { backing: Arc::new(backing), offset: 0 })
    }

    fn touch_host(&self, state: &mut State, host: HostRange, len: u64, access: Access, turn: &Turn) {
        let clock = state.lanes[turn.lane].clock.clone();
        self.touch_host_after(state, host, len, access, turn, &clock);
    }

    /// The same, for a use that is only ordered after what the clock stands for.
    pub(crate) fn touch_host_after(
        &self,
        state: &mut State,
        host: HostRange,
        len: u64,
        access: Access,
        turn: &Turn,
        clock: &Clock,
    ) {
        let HostRange::Pinned { base, offset } = host else { return };
        let Some(region) = state.pinned.get_mut(base) else { return };
        let range = offset..offset + len;
        if let Some(conflict) = region.history.access(range.clone(), access, turn.stamp, clock) {
            self.conflict(access, &range, conflict);
        }
    }
}

pub(crate) fn pinned_place(state: &State, base: u64, offset: u64) -> Outcome<Place> {
    let (_, region) = state.pinned.holding(base).ok_or(Code::INVALID_VALUE)?;
    Ok(Place { backing: Arc::clone(&region.backing), offset: offset as usize })
}

/// A pinned source and its fingerprint, which is left to the copy when earlier work has yet to write the source.
pub(crate) fn pinned_source(state: &State, base: u64, offset: u64, len: u64, checked: bool) -> Outcome<(Place, Check)> {
    let place = pinned_place(state, base, offset)?;
    let (_, region) = state.pinned.holding(base).ok_or(Code::INVALID_VALUE)?;
    if !checked {
        return Ok((place, Check::Never));
    }
    let pending = |stamp: &Stamp| !state.stamp_is_done(stamp);
    if region.history.stamps(offset..offset + len, false).iter().any(pending) {
        return Ok((place, Check::AtStart));
    }
    // SAFETY: the range lies in the region, which is pinned.
    let sum = unsafe { checksum(place.at(), len as usize) };
    Ok((place, Check::Taken(sum)))
}
