//! The plan as a value.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::explain::Explanation;
use super::slots::Slots;
use super::traffic::{SlotForm, fetched_blocks};
use super::warning::Warning;
use crate::allocation::Mode;
use crate::checkpoint::{LayerId, Layout, ModuleId};
use crate::device::{Bandwidth, DeviceId, DeviceInfo};
use crate::dtype::{DType, TensorGrouping};
use crate::error::Result;
use crate::schedule::{Compressed, Groups, LANDING_CAP, Origin, SlotBlocks, VERDICT_ROOM};

/// How the modules of a device are spread over the order of execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Order {
    /// Each module goes to the first device of the allocation that still holds it.
    Sequential,
    /// Every device's modules are spread evenly, which suits streaming.
    #[default]
    Interleaved,
}

/// What [`Order::Interleaved`] spreads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Unit {
    /// Single modules; closest to the shares.
    #[default]
    Module,
    /// Each role is resident in all layers of a class or in none, and the rest of the compute device's quota holds whole
    /// layers, so that the streamed layers of a class are alike.
    Uniform,
}

/// How a placed module is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Use {
    /// The module lives on the compute device.
    Resident,
    /// The module lives elsewhere and is fetched to the compute device for each use of its layer.
    Streamed,
    /// The module lives elsewhere and is used there.
    InPlace,
    /// The module lives on the compute device in blocks, or compressed, and its values are computed into a slot for each use of its
    /// layer.
    Unpacked,
}

/// The home and use of one module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Assignment {
    /// The module's name.
    pub module: Arc<str>,
    /// The module's index in the layout.
    pub index: ModuleId,
    /// The module's layer.
    pub layer: LayerId,
    /// The device where the module lives.
    pub device: DeviceId,
    /// How the module is used.
    #[serde(rename = "use")]
    pub usage: Use,
    /// Whether its bytes reach the compute device through the pinned staging buffers on the host.
    pub staged: bool,
    /// The bytes of its weights; 0 if another module owns its storage. It takes as many at home, but for those that are saved.
    pub bytes: u64,
    /// The bytes that it takes less at home, and on its way to the compute device, because it is kept
    /// [compressed](super::Planner::compress); 0 if it is not.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub saved: u64,
}

/// A plan's share of one device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DevicePlan {
    /// The device.
    pub id: DeviceId,
    /// The device's quota in the allocation (a cap, or a share of a ratio); `None` if it takes the remainder.
    pub quota: Option<u64>,
    /// The weights homed here.
    #[serde(flatten)]
    pub weights: DeviceWeights,
    /// The needs beside the weights.
    #[serde(flatten)]
    pub beside: DeviceBeside,
    /// The device's memory as known when the plan was made.
    #[serde(flatten)]
    pub memory: DeviceRoom,
}

/// The weights that live on a device, in bytes, and the part that moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceWeights {
    /// The bytes of all weights on the device.
    pub bytes: u64,
    /// The number of modules.
    pub modules: usize,
    /// The bytes that leave the device in each pass.
    pub streamed: u64,
    /// The part of `streamed` that passes the pinned staging buffers on the host.
    pub staged: u64,
    /// The part of `bytes` that is kept in pinned host memory.
    pub pinned: u64,
    /// The part of `bytes` that stays in the model's own files, and is read from them for each use: it takes nothing of the device.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub in_files: u64,
    /// The part of `bytes` that is not there because weights are kept [compressed](super::Planner::compress). What stays in files
    /// is not counted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub saved: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl DeviceWeights {
    /// The bytes that the weights take on the device: all but those that stay in the model's files, and those that are saved.
    pub fn taken(&self) -> u64 {
        self.bytes.saturating_sub(self.in_files).saturating_sub(self.saved)
    }
}

/// A plan's needs on a device beside weights, in bytes. The first three apply to the compute device only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceBeside {
    /// The slots of streamed layers.
    pub slots: u64,
    /// The needs of patching, which may use the memory of the slots.
    pub scratch: u64,
    /// The memory that the caller keeps for activations.
    pub reserve: u64,
    /// The memory that opening the device takes, if it is not open yet and the plan uses it.
    #[serde(default)]
    pub opening: u64,
}

/// A device's memory as known when a plan was made, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceRoom {
    /// The total memory.
    pub total: u64,
    /// The free memory, if known.
    pub free: Option<u64>,
}

/// Where every module of a model lives and how it is used.
///
/// Every plan places each module of its layout exactly once, and its sums are right. A plan that is deserialised is checked for
/// this, and for being as it was written: plans are recomputed, not edited. A plan prints as a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan(Parts);

/// The parts of a plan, before they are validated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Parts {
    pub(super) mode: Mode,
    pub(super) order: Order,
    pub(super) unit: Unit,
    pub(super) compute: DeviceId,
    pub(super) depth: usize,
    /// Whether the caller provides the slots.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "own_slots")]
    pub(super) external_slots: bool,
    /// Whether each layer always uses the same slot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) fixed_slots: bool,
    /// How tensors are divided into allocations.
    #[serde(default, skip_serializing_if = "TensorGrouping::is_joined")]
    pub(super) grouping: TensorGrouping,
    /// The type of the values that slots hold in place of blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unpacked: Option<DType>,
    /// The most bytes of a landing buffer.
    #[serde(default = "landing_cap", skip_serializing_if = "is_landing_cap")]
    pub(super) landing_cap: u64,
    /// The speed at which the compute device decodes, in bytes of weights, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) decoding: Option<Bandwidth>,
    pub(super) slots: Slots,
    pub(super) devices: Vec<DevicePlan>,
    pub(super) assignments: Vec<Assignment>,
    pub(super) warnings: Vec<Warning>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) explanation: Option<Box<Explanation>>,
}

fn landing_cap() -> u64 {
    LANDING_CAP
}

fn is_landing_cap(cap: &u64) -> bool {
    *cap == LANDING_CAP
}

impl Plan {
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) when the parts contradict each other.
    pub(super) fn new(parts: Parts) -> Result<Plan> {
        parts.validate()?;
        Ok(Plan(parts))
    }

    /// A plan with other sizes of codes.
    pub(super) fn recounted_from(parts: Parts) -> Plan {
        Plan(parts)
    }

    pub(super) fn parts(&self) -> &Parts {
        &self.0
    }

    /// The parts of the plan.
    pub(super) fn into_parts(self) -> Parts {
        self.0
    }

    /// The mode of its allocation.
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// The order in which modules are spread; mode virtual is always sequential.
    pub fn order(&self) -> Order {
        self.0.order
    }

    /// What an interleaved order spreads.
    pub fn unit(&self) -> Unit {
        self.0.unit
    }

    /// The device that computes.
    pub fn compute(&self) -> DeviceId {
        self.0.compute
    }

    /// The number of layers that are prefetched.
    pub fn depth(&self) -> usize {
        self.0.depth
    }

    /// Every module once, in the layout's order.
    pub fn assignments(&self) -> &[Assignment] {
        &self.0.assignments
    }

    /// The home and use of a module; `None` if the plan has no such module.
    pub fn assignment(&self, module: ModuleId) -> Option<&Assignment> {
        self.0.assignments.get(module.index())
    }

    /// As [`assignment`](Plan::assignment), for a module known to be in the plan.
    pub(crate) fn at(&self, module: ModuleId) -> &Assignment {
        &self.0.assignments[module.index()]
    }

    /// The compute device, the allocation's devices and all other devices with modules, in order of id.
    pub fn devices(&self) -> &[DevicePlan] {
        &self.0.devices
    }

    /// The plan's share of the device `id`; `None` if the plan does not involve it.
    pub fn device(&self, id: DeviceId) -> Option<&DevicePlan> {
        self.0.devices.iter().find(|d| d.id == id)
    }

    /// The slots on the compute device.
    pub fn slots(&self) -> Slots {
        self.0.slots
    }

    /// Whether each streamed layer always uses the same slot, as [`Planner::fixed_slots`](super::Planner::fixed_slots)
    /// says.
    pub fn fixed_slots(&self) -> bool {
        self.0.fixed_slots
    }

    /// The origin of a module's bytes, if it is fetched into slots: the compute device for one that is only unpacked there.
    pub(crate) fn origin(&self, module: ModuleId) -> Option<Origin> {
        self.at(module).origin()
    }

    /// The type of the values that slots hold in place of GGML's blocks; `None` if slots hold the blocks. See
    /// [`Planner::unpack`](super::Planner::unpack).
    pub fn unpacked(&self) -> Option<DType> {
        self.0.unpacked
    }

    /// The plan's layout with its tensors as slots hold them.
    pub(crate) fn in_slots<'l>(&self, layout: &'l Layout) -> Cow<'l, Layout> {
        self.0.slot_form().in_slots(layout)
    }

    /// The groups of modules that share memory where they live, for the plan's layout.
    pub(crate) fn groups(&self, layout: &Layout) -> Groups {
        Groups::new(layout, |module| self.origin(module))
    }

    /// The tensors of compressed modules where they live, for the plan's layout and its groups.
    pub(crate) fn compressed(&self, layout: &Layout, groups: &Groups) -> Compressed {
        Compressed::new(layout, groups, |module| self.at(module).is_compressed())
    }

    /// Whether any module is kept compressed.
    pub(crate) fn is_compressed(&self) -> bool {
        self.assignments().iter().any(Assignment::is_compressed)
    }

    /// The bytes of a landing buffer that tensors land in: the rest is for the verdict on codes.
    pub(crate) fn landing_room(&self) -> u64 {
        let verdict = if self.is_compressed() { VERDICT_ROOM } else { 0 };
        self.slots().landing_bytes.saturating_sub(verdict)
    }

    /// The speed at which the compute device decodes, in bytes of weights; `None` if that was not known when the plan was made.
    pub fn decoding(&self) -> Option<Bandwidth> {
        self.0.decoding
    }

    /// Whether the caller provides the slots.
    pub(crate) fn has_external_slots(&self) -> bool {
        self.0.external_slots
    }

    /// How tensors are divided into allocations on the compute device, and where they are used in place.
    pub fn grouping(&self) -> TensorGrouping {
        self.0.grouping
    }

    /// The blocks into which the slots are divided, for the plan's layout.
    pub(crate) fn slot_blocks(&self, layout: &Layout) -> SlotBlocks {
        let (form, slots) = (self.0.slot_form(), self.slots());
        if !form.grouping.is_apart() {
            return SlotBlocks::whole(slots.bytes_each, slots.large_bytes);
        }
        let in_slots = form.in_slots(layout);
        let layers = fetched_blocks((layout, &in_slots), form.grouping, |module| self.origin(module).is_some());
        let (_, most) = Slots::of_blocks(&layers, form.depth, form.fixed);
        SlotBlocks::divided(form.grouping, &layers, most)
    }

    /// Whether the tensors of a module are allocations by themselves where it lives, rather than parts of one.
    pub(crate) fn is_apart(&self, module: ModuleId) -> bool {
        self.0.grouping.is_apart() && self.origin(module).is_none()
    }

    /// The bytes of all weights. Shared storage counts once.
    pub fn bytes(&self) -> u64 {
        self.0.devices.iter().map(|d| d.weights.bytes).sum()
    }

    /// The plan's warnings: quotas that could not be kept, patterns without effect.
    pub fn warnings(&self) -> &[Warning] {
        &self.0.warnings
    }

    /// The reasons for the plan; `None` unless mode auto made it.
    pub fn explanation(&self) -> Option<&Explanation> {
        self.0.explanation.as_deref()
    }
}

impl Parts {
    pub(super) fn slot_form(&self) -> SlotForm {
        let grouping = if self.external_slots { TensorGrouping::Joined } else { self.grouping };
        let (depth, fixed, unpacked, landing_cap) = (self.depth, self.fixed_slots, self.unpacked, self.landing_cap);
        SlotForm { depth, fixed, grouping, unpacked, landing_cap }
    }
}

impl Assignment {
    /// Whether the module is kept [compressed](super::Planner::compress).
    pub fn is_compressed(&self) -> bool {
        self.saved > 0
    }

    /// The origin of its bytes, as [`Plan::origin`] has it.
    pub(super) fn origin(&self) -> Option<Origin> {
        let origin = Origin { device: self.device, staged: self.staged, compressed: self.is_compressed() };
        self.usage.is_fetched().then_some(origin)
    }

    /// The bytes that the module takes at home, and on its way from there.
    pub(crate) fn taken(&self) -> u64 {
        self.bytes.saturating_sub(self.saved)
    }
}

impl DevicePlan {
    /// A device with nothing on it.
    pub(super) fn of(info: &DeviceInfo, quota: Option<u64>) -> DevicePlan {
        let memory = DeviceRoom { total: info.total, free: info.free };
        let (weights, beside) = Default::default();
        DevicePlan { id: info.id, quota, weights, beside, memory }
    }

    /// The bytes that the plan needs on the device: those of opening it, the weights but for those that stay in files, the larger
    /// of slots and scratch, and the reserve.
    pub fn needed(&self) -> u64 {
        let DeviceBeside { slots, scratch, reserve, opening } = self.beside;
        let kept = self.weights.taken().saturating_add(slots.max(scratch)).saturating_add(reserve);
        kept.saturating_add(opening)
    }
}

impl Order {
    /// The name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Order::Sequential => "sequential",
            Order::Interleaved => "interleaved",
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Use {
    /// The name, in lower case, with `_` for a blank.
    pub fn name(self) -> &'static str {
        match self {
            Use::Resident => "resident",
            Use::Streamed => "streamed",
            Use::InPlace => "in_place",
            Use::Unpacked => "unpacked",
        }
    }

    /// Whether the module gets into a slot for each use of its layer.
    pub(super) fn is_fetched(self) -> bool {
        matches!(self, Use::Streamed | Use::Unpacked)
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
