//! What is alive: for reports, and for contexts that go.

use crate::report::{Report, Rule, Violation};
use crate::shared::Shared;
use crate::stream::LaneState;
use crate::vendor::Vendor;
use crate::world::State;

impl State {
    /// What is alive, of one device or of all: who made it, and what it is.
    pub(crate) fn alive(&self, device: Option<usize>) -> Vec<(&'static str, String)> {
        let wanted = |of: usize| device.is_none_or(|device| device == of);
        let memory = self.memory.iter().map(|a| (a.device, a.call, format!("{} bytes of device {}", a.len, a.device)));
        let pinned = self.pinned.iter().map(|r| (r.device, r.call, format!("{} pinned bytes", r.len)));
        let streams = self.streams.values().map(|s| (s.device, s.call, format!("a stream of device {}", s.device)));
        let events = self.events.values().map(|e| (e.device, e.call, format!("an event of device {}", e.device)));
        let modules = self.modules.values().map(|m| (m.device, m.call, format!("a module of device {}", m.device)));
        let contexts = self.own_contexts.iter().filter_map(|(context, call)| {
            let device = *self.contexts.get(context)?;
            Some((device, *call, format!("a context of device {device}")))
        });
        let all = memory.chain(pinned).chain(streams).chain(events).chain(modules).chain(contexts);
        all.filter(|(of, _, _)| wanted(*of)).map(|(_, call, what)| (call, what)).collect()
    }

    /// What is alive of what belongs to a context: who made it, and what it is.
    pub(crate) fn alive_in(&self, context: u64) -> Vec<(&'static str, String)> {
        let streams = self.streams.values().filter(|s| s.context == context);
        let streams = streams.map(|s| (s.call, format!("a stream of device {}", s.device)));
        let events = self.events.values().filter(|e| e.context == context);
        let events = events.map(|e| (e.call, format!("an event of device {}", e.device)));
        // Ascend's memory is its device's.
        let memory = self.memory.iter().filter(|a| a.context == context && Vendor::of(a.call) == Vendor::CnDrv);
        let memory = memory.map(|a| (a.call, format!("{} bytes of device {}", a.len, a.device)));
        streams.chain(events).chain(memory).collect()
    }

    pub(crate) fn report(&self, shared: &Shared) -> Report {
        let mut leaks: Vec<Violation> = Vec::new();
        let whole = (0..self.devices.len()).filter(|&device| shared.broken(device).is_none());
        for (call, what) in whole.flat_map(|device| self.alive(Some(device))) {
            match leaks.iter_mut().find(|leak| leak.call == call) {
                Some(leak) => leak.count += 1,
                None => leaks.push(Violation { rule: Rule::Leak, call: call.to_owned(), detail: what, count: 1 }),
            }
        }
        let stale = self.pinned.stale().map(|(len, call, why)| Violation {
            rule: Rule::StaleRegistration,
            call: call.to_owned(),
            detail: format!("{len} bytes are registered still: {why}"),
            count: 1,
        });
        let pending = |lane: &LaneState| {
            let ticket = lane.ticket();
            ticket.epoch.saturating_sub(ticket.lane.done())
        };
        let retained = self.devices.iter().filter(|device| device.retained > 0 && device.context.is_some()).count();
        Report {
            violations: shared.violations().into_iter().chain(stale).collect(),
            leaks,
            live_allocations: self.memory.iter().count() as u64,
            live_bytes: self.memory.iter().map(|allocation| allocation.len).sum(),
            live_pinned: self.pinned.iter().count() as u64,
            live_pinned_bytes: self.pinned.iter().map(|region| region.len).sum(),
            live_streams: self.streams.len() as u64,
            live_events: self.events.len() as u64,
            live_contexts: (retained + self.own_contexts.len()) as u64,
            pending: self.lanes.iter().map(pending).sum(),
            peak_bytes: self.devices.iter().map(|device| device.peak).collect(),
            counted: self.counting.told(),
            ..Report::default()
        }
    }
}
