//! Devices, their primary contexts, and who reaches whose memory.

use std::collections::{BTreeSet, HashMap};
use std::thread::ThreadId;
use std::time::Duration;

use crate::code::{Code, Outcome};
use crate::config::{Config, DeviceConfig};
use crate::lane::Ticket;
use crate::report::Rule;
use crate::stream::LaneState;
use crate::sync::lock;
use crate::vendor::Vendor;
use crate::world::{Call, State, new_handle};

/// What has become of one device.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Its primary context, while that is retained.
    pub(crate) context: Option<u64>,
    pub(crate) retained: u32,
    pub(crate) flags: u32,
    /// The devices whose memory its context may reach.
    pub(crate) reaches: BTreeSet<usize>,
    pub(crate) used: u64,
    pub(crate) peak: u64,
    pub(crate) default_pool: Option<u64>,
    pub(crate) current_pool: Option<u64>,
    /// The legacy default stream.
    pub(crate) legacy: Option<u32>,
    /// The per-thread default streams.
    pub(crate) per_thread: HashMap<ThreadId, u32>,
}

impl Device {
    /// A device of which other programs have taken this much.
    pub(crate) fn fresh(others_bytes: u64) -> Device {
        Device { used: others_bytes, ..Device::default() }
    }
}

impl Call<'_> {
    pub(crate) fn device_count(&self) -> usize {
        if lock(&self.world.faults).plan.no_devices { 0 } else { self.world.config().devices.len() }
    }

    /// The index behind a device handle (they are the same number).
    pub(crate) fn device_index(&self, device: i32) -> Outcome<usize> {
        usize::try_from(device).ok().filter(|&index| index < self.device_count()).ok_or(Code::INVALID_DEVICE)
    }

    pub(crate) fn described(&self, device: i32) -> Outcome<&DeviceConfig> {
        Ok(&self.world.config().devices[self.device_index(device)?])
    }

    pub(crate) fn driver_version(&self) -> i32 {
        let config = self.world.config();
        let version = match self.vendor {
            Vendor::Hip => config.hip_version,
            _ => config.driver_version,
        };
        lock(&self.world.faults).plan.driver_version.unwrap_or(version)
    }

    /// Refuses a call that came with a later version of the driver; a program would not find it in this one.
    pub(crate) fn since(&self, version: i32) -> Outcome<()> {
        if self.driver_version() >= version {
            return Ok(());
        }
        self.violation(Rule::NewerCall, || {
            format!("a driver of version {} has no such call, which came with {version}", self.driver_version())
        });
        Err(Code::NOT_SUPPORTED)
    }

    pub(crate) fn has_pools(&self, device: usize) -> bool {
        self.world.config().devices[device].pools && !lock(&self.world.faults).plan.no_pools
    }

    /// `cuDeviceGetAttribute`, by the driver's numbers.
    pub(crate) fn attribute(&self, device: i32, attribute: i32) -> Outcome<i32> {
        let index = self.device_index(device)?;
        let config = &self.world.config().devices[index];
        let (domain, bus, slot) = config.pci_parts();
        Ok(match attribute {
            1..=4 => 1024,                            // threads per block; block dimensions
            5 => i32::MAX,                            // grid dimension x
            6 | 7 => 65_535,                          // grid dimensions y, z
            8 => 49_152,                              // shared memory per block
            10 => 32,                                 // warp
            12 | 82 => 65_536,                        // registers
            13 => 1_410_000,                          // clock, kHz
            15 => i32::from(config.copy_engines > 0), // copies overlap kernels
            16 => config.multiprocessors,
            18 => i32::from(config.integrated),
            19 | 31 | 41 | 78 | 99 => 1, // maps host memory, concurrent kernels, one address space, priorities, registers
            33 => bus,
            34 => slot,
            36 => 1_593_000, // memory clock, kHz
            37 => 5120,      // memory bus, bits
            38 => 40 << 20,  // L2
            39 => 2048,      // threads per multiprocessor
            40 => config.copy_engines,
            50 => domain,
            75 => config.compute.0,
            76 => config.compute.1,
            91 => 1, // host pointers of registered memory are device pointers
            115 => i32::from(self.has_pools(index)),
            9..=119 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    pub(crate) fn retain(&self, device: i32) -> Outcome<u64> {
        let index = self.device_index(device)?;
        self.whole(index)?;
        let mut state = self.state();
        state.devices[index].retained += 1;
        Ok(state.context_of(self.world.config(), index))
    }

    /// Gives a retained context back; the last one takes everything in it along, which must be nothing.
    pub(crate) fn release(&self, device: i32) -> Outcome<()> {
        let index = self.device_index(device)?;
        let mut state = self.state();
        if state.devices[index].retained == 0 {
            return Err(Code::INVALID_CONTEXT);
        }
        state.devices[index].retained -= 1;
        if state.devices[index].retained == 0 {
            let tickets: Vec<Ticket> =
                state.lanes.iter().filter(|l| l.lane.device == index).map(LaneState::ticket).collect();
            drop(state);
            self.world.shared.nudge();
            tickets.iter().for_each(Ticket::wait);
            let mut state = self.state();
            // Someone may have retained it meanwhile.
            if state.devices[index].retained == 0 {
                state.destroy_context(self, index);
            }
        }
        self.whole(index)
    }

    /// Destroys all that is in a device's primary context, whoever retained it. It stays retained, and the next who
    /// retains it gets a new one. Work that runs is cut short, and what is enqueued never runs.
    pub(crate) fn reset_primary(&self, device: i32) -> Outcome<()> {
        let index = self.device_index(device)?;
        self.whole(index)?;
        let of_device = |state: &State| -> Vec<Ticket> {
            state.lanes.iter().filter(|l| l.lane.device == index).map(LaneState::ticket).collect()
        };
        let running = of_device(&self.state());
        running.iter().for_each(|ticket| ticket.lane.stop());
        running.iter().for_each(|ticket| ticket.lane.join(Duration::from_secs(5)));
        let mut state = self.state();
        of_device(&state).iter().for_each(|ticket| ticket.lane.abandon(ticket.epoch));
        state.take_context(self, index);
        Ok(())
    }

    pub(crate) fn primary_state(&self, device: i32) -> Outcome<(u32, bool)> {
        let index = self.device_index(device)?;
        let state = self.state();
        Ok((state.devices[index].flags, state.devices[index].context.is_some()))
    }

    pub(crate) fn make_current(&self, context: u64) -> Outcome<()> {
        if context != 0 {
            let device = self.context_device(&self.state(), context)?;
            self.whole(device)?;
        }
        Call::set_current_context(context);
        Ok(())
    }

    pub(crate) fn context_device(&self, state: &State, context: u64) -> Outcome<usize> {
        if state.taken.contains(&context) {
            return Err(Code::CONTEXT_IS_DESTROYED);
        }
        let missing = || self.no_handle(state, context, "context", Code::INVALID_CONTEXT);
        state.contexts.get(&context).copied().ok_or_else(missing)
    }

    pub(crate) fn set_context_flags(&self, flags: u32) -> Outcome<()> {
        let mut state = self.state();
        let device = self.device(&state)?;
        state.devices[device].flags = flags;
        Ok(())
    }

    /// Waits for all work of the current context.
    pub(crate) fn synchronize_context(&self) -> Outcome<()> {
        let state = self.state();
        let device = self.device(&state)?;
        let mut clock = state.host.clone();
        let mut tickets = Vec::new();
        for lane in state.lanes.iter().filter(|lane| lane.lane.device == device) {
            clock.join(&lane.clock);
            tickets.push(lane.ticket());
        }
        drop(state);
        self.host_waits(&tickets, &clock);
        self.whole(device)
    }

    pub(crate) fn can_reach(&self, from: i32, to: i32) -> Outcome<bool> {
        let (from, to) = (self.device_index(from)?, self.device_index(to)?);
        Ok(self.linked(from, to))
    }

    pub(crate) fn linked(&self, from: usize, to: usize) -> bool {
        !lock(&self.world.faults).plan.no_peers && self.world.config().peer(from, to).is_some()
    }

    pub(crate) fn peer_attribute(&self, attribute: i32, from: i32, to: i32) -> Outcome<i32> {
        let reaches = self.can_reach(from, to)?;
        if from == to {
            return Err(Code::INVALID_DEVICE);
        }
        match attribute {
            1 => Ok(0),                  // performance rank
            2 => Ok(i32::from(reaches)), // access
            3 | 4 => Ok(0),              // native atomics, arrays
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Lets the current context reach another one's memory, or takes that back.
    pub(crate) fn set_peer_access(&self, peer: u64, enable: bool) -> Outcome<()> {
        let other = {
            let state = self.state();
            self.device(&state)?;
            self.context_device(&state, peer)?
        };
        self.set_reach(other, enable)
    }

    /// Lets the current device reach another one's memory, or takes that back.
    pub(crate) fn set_reach(&self, other: usize, enable: bool) -> Outcome<()> {
        let mut state = self.state();
        let device = self.device(&state)?;
        self.whole(other)?;
        if !enable {
            let was = state.devices[device].reaches.remove(&other);
            return if was { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) };
        }
        if device == other {
            return Err(Code::INVALID_DEVICE);
        }
        if !self.linked(device, other) {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        let new = state.devices[device].reaches.insert(other);
        if new { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    }

    pub(crate) fn memory_info(&self) -> Outcome<(u64, u64)> {
        let state = self.state();
        let device = self.device(&state)?;
        let total = self.world.config().devices[device].total;
        Ok((total.saturating_sub(state.devices[device].used), total))
    }
}

impl State {
    /// A device's context, which is made if there is none.
    pub(crate) fn context_of(&mut self, config: &Config, device: usize) -> u64 {
        let slot = &mut self.devices[device];
        if let Some(context) = slot.context {
            return context;
        }
        let context = new_handle();
        slot.context = Some(context);
        slot.used += config.devices[device].context_bytes;
        slot.peak = slot.peak.max(slot.used);
        self.contexts.insert(context, device);
        context
    }

    fn destroy_context(&mut self, call: &Call<'_>, device: usize) {
        if call.whole(device).is_ok() {
            for (made_by, what) in self.alive(Some(device)) {
                call.violation(Rule::Leak, || format!("the context went with {what} alive, from {made_by}"));
            }
        }
        self.empty_context(call, device);
    }

    /// Destroys what a context has without asking whether that is alive, and remembers its handles.
    fn take_context(&mut self, call: &Call<'_>, device: usize) {
        let streams = self.streams.iter().filter(|(_, stream)| stream.device == device).map(|(&handle, _)| handle);
        let events = self.events.iter().filter(|(_, event)| event.device == device).map(|(&handle, _)| handle);
        let pools = self.pools.iter().filter(|(_, pool)| pool.device == device).map(|(&handle, _)| handle);
        let modules = self.modules.iter().filter(|(_, module)| module.device == device);
        let modules = modules.flat_map(|(&handle, module)| module.functions.keys().copied().chain([handle]));
        let contexts = self.contexts.iter().filter(|(_, of)| **of == device).map(|(&handle, _)| handle);
        let graphs = self.graphs.iter().filter(|(_, graph)| graph.device == device).map(|(&handle, _)| handle);
        let executables = self.executables.iter().filter(|(_, graph)| graph.device() == device);
        let graphs = graphs.chain(executables.map(|(&handle, _)| handle));
        let taken = streams.chain(events).chain(pools).chain(modules).chain(graphs).chain(contexts);
        let taken: Vec<u64> = taken.collect();
        self.taken.extend(taken);
        self.pinned.drop_device(device, call.name);
        let retained = self.devices[device].retained;
        self.empty_context(call, device);
        self.devices[device].retained = retained;
    }

    fn empty_context(&mut self, call: &Call<'_>, device: usize) {
        for lane in self.lanes.iter().filter(|lane| lane.lane.device == device) {
            lane.lane.close();
        }
        self.streams.retain(|_, stream| stream.device != device);
        self.events.retain(|_, event| event.device != device);
        self.pools.retain(|_, pool| pool.device != device);
        self.modules.retain(|_, module| module.device != device);
        self.graphs.retain(|_, graph| graph.device != device);
        self.executables.retain(|_, graph| graph.device() != device);
        self.memory.drop_device(device, call.name);
        self.contexts.retain(|_, of| *of != device);
        self.own_contexts.retain(|context, _| self.contexts.contains_key(context));
        self.fates.retain(|context, _| self.contexts.contains_key(context));
        let (peak, reaches) = (self.devices[device].peak, BTreeSet::new());
        let others_bytes = call.world.config().devices[device].others_bytes;
        self.captures.retain(|stream, _| self.streams.contains_key(stream));
        self.devices[device] = Device { peak, reaches, ..Device::fresh(others_bytes) };
        for other in &mut self.devices {
            other.reaches.remove(&device);
        }
    }
}
