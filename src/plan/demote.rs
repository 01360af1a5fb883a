//! A plan without resident modules, to make room on its compute device.

use super::compress::{KeptCodes, saved_on};
use super::fits;
use super::planner::default_pinned_cap;
use super::traffic::{BinTraffic, Placed};
use super::value::{Assignment, DevicePlan, Parts, Plan, Use};
use crate::bytes::ByteSize;
use crate::checkpoint::{Layout, ModuleId, Per};
use crate::device::{DeviceId, Machine};
use crate::error::{PlanFault, Result};

impl Plan {
    /// This plan with its resident modules moved to the host and streamed from there.
    ///
    /// Everything else stays where it is, at the same depth. The slots may grow, since layers are now streamed whole. The
    /// moved modules are pinned up to the planner's default cap, or staged if the plan has staged host memory already.
    ///
    /// ```
    /// use tensor_offload::checkpoint::Layout;
    /// use tensor_offload::{DeviceId, Machine, Planner};
    /// let (layout, card) = (Layout::blocks([1 << 30; 10]), DeviceId::cuda(0));
    /// let machine = Machine::described(&["cuda:0=24gib".parse()?, "cpu=64gib".parse()?]);
    /// let plan = Planner::new(&layout, &machine).allocation("cuda:0,8gib;cpu,*".parse()?).depth(1).plan()?;
    /// let demoted = plan.demoted(&layout, &machine)?;
    /// let on_card = |plan: &tensor_offload::Plan| plan.device(card).map(|share| (share.weights.bytes >> 30, share.beside.slots >> 30));
    /// assert_eq!((on_card(&plan), on_card(&demoted)), (Some((8, 2)), Some((0, 2))));
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when the plan is for another model, or computes on the host;
    /// [`Error::UnknownDevice`](crate::Error::UnknownDevice) when the machine has no host;
    /// [`Error::DoesNotFit`](crate::Error::DoesNotFit) as [`Planner::plan`](super::Planner::plan).
    pub fn demoted(&self, layout: &Layout, machine: &Machine) -> Result<Plan> {
        let plan = self.away(layout, machine, Use::Streamed)?;
        fits::fits(machine, layout, &plan.devices, &plan.assignments)?;
        fits::allocations(machine, layout, &plan.slot_form().in_slots(layout), &plan)?;
        Plan::new(plan)
    }

    /// As [`demoted`](Plan::demoted) without slots, with all modules used in place: for a model that waits on the host until
    /// there is room.
    pub(crate) fn parked(&self, layout: &Layout, machine: &Machine) -> Result<Plan> {
        Plan::new(self.away(layout, machine, Use::InPlace)?)
    }

    fn away(&self, layout: &Layout, machine: &Machine, usage: Use) -> Result<Parts> {
        let plan = self.checked(layout)?;
        let (old, compute) = (plan.parts(), plan.compute());
        if compute.is_host() {
            return Err(PlanFault::NowhereToDemote.into());
        }
        let host = machine.device(DeviceId::CPU)?;
        let mut devices = old.devices.clone();
        if !devices.iter().any(|device| device.id == host.id) {
            devices.push(DevicePlan::of(host, None));
            devices.sort_by_key(|device| device.id);
        }
        let assignments = plan.moved_away(layout, machine, usage);
        let ids: Vec<DeviceId> = devices.iter().map(|device| device.id).collect();
        let place = |a: &Assignment| ids.iter().position(|&id| id == a.device).unwrap_or(0);
        let home: Per<ModuleId, usize> = assignments.iter().map(place).collect();
        let uses: Per<ModuleId, Use> = assignments.iter().map(|a| a.usage).collect();
        let staged: Per<ModuleId, bool> = assignments.iter().map(|a| a.staged).collect();
        let mut moved = vec![BinTraffic::default(); ids.len()];
        let (topology, form) = (machine.topology(), old.slot_form());
        let in_slots = &*form.in_slots(layout);
        let saved: Per<ModuleId, u64> = assignments.iter().map(|a| a.saved).collect();
        // What is compressed stays so, and no more is.
        let (pinned_cap, codes) = (0, KeptCodes::none());
        let placed =
            Placed { layout, in_slots, topology, compute, devices: &ids, home: &home, form, pinned_cap, codes };
        let slots = placed.slots(&uses, &staged, &saved, &mut moved);
        let slots = if old.external_slots { slots.left_to_caller() } else { slots };
        for (device, moved) in devices.iter_mut().zip(moved) {
            let here = || assignments.iter().filter(|a| a.device == device.id);
            let pinned = here().filter(|a| a.usage == Use::Streamed && !a.staged && device.id.is_host());
            (device.weights.streamed, device.weights.staged) = (moved.streamed, moved.staged);
            device.weights.pinned = pinned.map(Assignment::taken).sum();
            device.weights.bytes = here().map(|a| a.bytes).sum();
            device.weights.saved = here().map(|a| saved_on(layout, device.id, a.index, a.saved)).sum();
            device.weights.modules = here().count();
            device.beside.slots = if device.id == compute { slots.bytes() } else { 0 };
        }
        Ok(Parts { slots, devices, assignments, explanation: None, ..old.clone() })
    }

    /// The assignments with those on the compute device moved to the host. Moved and streamed modules get `usage`.
    fn moved_away(&self, layout: &Layout, machine: &Machine, usage: Use) -> Vec<Assignment> {
        let owns = |a: &&Assignment| layout.at(a.index).alias_of.is_none();
        let streamed =
            || self.assignments().iter().filter(owns).filter(|a| a.usage == Use::Streamed && a.device.is_host());
        let pinned: u64 = streamed().filter(|a| !a.staged).map(Assignment::taken).sum();
        let capped = streamed().any(|a| a.staged);
        let cap = default_pinned_cap(machine).map_or(u64::MAX, ByteSize::get);
        let mut left = if capped { 0 } else { cap.saturating_sub(pinned) };
        let mut moved: Vec<Assignment> = self.assignments().to_vec();
        for a in &mut moved {
            if matches!(a.usage, Use::Resident | Use::Unpacked) {
                (a.device, a.usage, a.staged) = (DeviceId::CPU, Use::Streamed, a.taken() > left);
                left -= if a.staged { 0 } else { a.taken() };
            }
            if usage == Use::InPlace {
                (a.usage, a.staged) = (Use::InPlace, false);
            }
        }
        for module in layout.modules() {
            if let Some(owner) = module.alias_of.filter(|_| moved[module.id.index()].usage == Use::Streamed) {
                moved[module.id.index()].staged = moved[owner.index()].staged;
            }
        }
        moved
    }
}
