//! Contexts that a program makes beside a device's primary one, and what becomes of a context whose work fails.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::code::{Code, Outcome};
use crate::lane::Ticket;
use crate::report::Rule;
use crate::stream::LaneState;
use crate::vendor::Vendor;
use crate::world::{Call, State, new_handle};

/// What becomes of a context once work in it has failed, where that is not the whole device's matter.
#[derive(Debug, Default)]
pub(crate) struct Fate {
    /// The result of the first work that failed; 0: none did.
    failed: AtomicU32,
    /// Whether such a failure ends all later work. Otherwise nothing is said of it.
    stops: AtomicBool,
    /// Held by the function of the program that a stream of the context calls: there is one thread for all of them.
    pub(crate) functions: Mutex<()>,
}

impl Fate {
    pub(crate) fn fail(&self, code: Code) {
        let _ = self.failed.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(crate) fn stop_on_failure(&self) {
        self.stops.store(true, Ordering::Release);
    }

    pub(crate) fn stops_on_failure(&self) -> bool {
        self.stops.load(Ordering::Acquire)
    }

    /// The result of all that comes after a failure that ends it.
    pub(crate) fn ended(&self) -> Option<Code> {
        let failed = self.failed.load(Ordering::Acquire);
        (failed != 0 && self.stops_on_failure()).then_some(Code(failed))
    }
}

impl State {
    /// The fate of a context, for vendors whose contexts have one of their own.
    pub(crate) fn fate_of(&mut self, vendor: Vendor, context: u64) -> Option<Arc<Fate>> {
        (vendor == Vendor::Acl).then(|| Arc::clone(self.fates.entry(context).or_default()))
    }
}

impl Call<'_> {
    /// Makes a further context of a device, and makes it current.
    pub(crate) fn create_context(&self, device: i32) -> Outcome<u64> {
        let index = self.device_index(device)?;
        self.whole(index)?;
        let context = new_handle();
        let mut state = self.state();
        state.contexts.insert(context, index);
        state.own_contexts.insert(context, self.name);
        Call::set_current_context(context);
        Ok(context)
    }

    /// Destroys a context that the program made, once its work has run; nothing may be left in it.
    pub(crate) fn destroy_context(&self, context: u64) -> Outcome<()> {
        let state = self.state();
        let device = self.context_device(&state, context)?;
        if !state.own_contexts.contains_key(&context) {
            return Err(Code::INVALID_CONTEXT);
        }
        let of_context = |lane: &&LaneState| lane.context == context;
        let tickets: Vec<Ticket> = state.lanes.iter().filter(of_context).map(LaneState::ticket).collect();
        drop(state);
        self.world.shared.nudge();
        tickets.iter().for_each(Ticket::wait);
        let mut state = self.state();
        if self.whole(device).is_ok() {
            for (made_by, what) in state.alive_in(context) {
                self.violation(Rule::Leak, || format!("the context went with {what} alive, from {made_by}"));
            }
        }
        state.lanes.iter().filter(of_context).for_each(|lane| lane.lane.close());
        state.streams.retain(|_, stream| stream.context != context);
        state.events.retain(|_, event| event.context != context);
        if self.vendor == Vendor::CnDrv {
            let charged = state.memory.drop_those(self.name, |allocation| allocation.context == context);
            state.devices[device].used -= charged;
        }
        state.contexts.remove(&context);
        state.own_contexts.remove(&context);
        state.fates.remove(&context);
        if Call::current_context() == context {
            Call::set_current_context(0);
        }
        Ok(())
    }
}
