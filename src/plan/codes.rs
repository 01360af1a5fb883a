//! Plans with codes that a load makes: their sizes are estimates until then.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::compress::{kept_compressed, saved_on};
use super::slots::Slots;
use super::traffic::{BinTraffic, Fetch, in_files, slots_of};
use super::value::{Assignment, Parts, Plan, Use};
use crate::checkpoint::{Layout, ModuleId};
use crate::device::DeviceId;
use crate::error::Result;

impl Plan {
    /// This plan, with the sizes that `layout` says of codes which a load makes: another estimate may have been planned with.
    pub(super) fn for_codes_of(&self, layout: &Layout) -> Cow<'_, Plan> {
        let is_made = |a: &Assignment| layout.module(a.index).is_some_and(|module| layout.is_made(module.id));
        self.recounted(layout, is_made)
    }

    /// This plan, if it was made for `layout`, with the sizes that this says of codes which a load makes.
    ///
    /// # Errors
    /// As [`verify`](Plan::verify).
    pub(crate) fn checked(&self, layout: &Layout) -> Result<Cow<'_, Plan>> {
        self.verify(layout)?;
        Ok(self.for_codes_of(layout))
    }

    /// This plan, once `layout` has the sizes of all codes.
    pub(crate) fn with_codes_of(&self, layout: &Layout) -> Cow<'_, Plan> {
        self.recounted(layout, |_| true)
    }

    fn recounted(&self, layout: &Layout, changes: impl Fn(&Assignment) -> bool) -> Cow<'_, Plan> {
        let changes = |a: &Assignment| a.is_compressed() && changes(a);
        if self.assignments().len() != layout.modules().len() || !self.assignments().iter().any(changes) {
            return Cow::Borrowed(self);
        }
        let mut parts = self.parts().clone();
        for a in parts.assignments.iter_mut().filter(|a| changes(a)) {
            let bytes = kept_compressed(layout, a.device, a.index).unwrap_or(a.bytes);
            a.saved = a.bytes.saturating_sub(bytes);
        }
        let (moved, slots) = parts.traffic(layout);
        // Landing buffers stay as large as they were planned, so that models of other weights can use the same.
        parts.slots = match parts.has_made_codes(layout) {
            true => Slots { landing_bytes: slots.landing_bytes.max(parts.slots.landing_bytes), ..slots },
            false => slots,
        };
        let in_files = in_files(layout, &parts.assignments);
        for (device, moved) in parts.devices.iter_mut().zip(moved) {
            device.weights.in_files = in_files.get(&device.id).copied().unwrap_or(0);
            let BinTraffic { streamed, staged, pinned } = moved;
            let here = parts.assignments.iter().filter(|a| a.device == device.id);
            device.weights.saved = here.map(|a| saved_on(layout, device.id, a.index, a.saved)).sum();
            (device.weights.streamed, device.weights.staged, device.weights.pinned) = (streamed, staged, pinned);
            device.beside.slots = if device.id == parts.compute { parts.slots.bytes() } else { 0 };
        }
        Cow::Owned(Plan::recounted_from(parts))
    }
}

impl Parts {
    /// Whether a load makes any of the codes that are kept.
    pub(super) fn has_made_codes(&self, layout: &Layout) -> bool {
        self.assignments.iter().any(|a| a.is_compressed() && layout.is_made(a.index))
    }

    /// The traffic of each device, and the slots, for the plan's layout.
    pub(super) fn traffic(&self, layout: &Layout) -> (Vec<BinTraffic>, Slots) {
        let places: BTreeMap<DeviceId, usize> = self.devices.iter().enumerate().map(|(i, d)| (d.id, i)).collect();
        let mut moved = vec![BinTraffic::default(); self.devices.len()];
        let fetch = |module: ModuleId| {
            let a = &self.assignments[module.index()];
            Fetch::of(a.usage, places[&a.device], a.staged, a.is_compressed())
        };
        let form = self.slot_form();
        let slots = slots_of((layout, &form.in_slots(layout)), form, fetch, &mut moved);
        for a in self.assignments.iter().filter(|a| a.usage == Use::Streamed && !a.staged && a.device.is_host()) {
            moved[places[&a.device]].pinned += a.taken();
        }
        (moved, if self.external_slots { slots.left_to_caller() } else { slots })
    }
}
