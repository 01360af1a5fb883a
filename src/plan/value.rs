//! The plan as a value.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::explain::Explanation;
use super::slots::Slots;
use super::warning::Warning;
use crate::allocation::Mode;
use crate::checkpoint::{LayerId, Layout, ModuleId};
use crate::device::{DeviceId, DeviceInfo};
use crate::error::Result;
use crate::schedule::{Groups, Origin};

/// How the modules of a device are spread over the order of execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Order {
    /// Each module goes to the first device of the allocation that still holds it.
    Sequential,
    /// Every device's modules are spread evenly, which streaming wants.
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
    /// A role is resident in all layers of a class or in none, and what is left of the compute device's
    /// quota holds whole layers, so that streamed layers of a class look alike.
    Uniform,
}

/// How a placed module is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Use {
    /// Its home is the compute device.
    Resident,
    /// It is kept elsewhere and brought to the compute device for its layer's turn.
    Streamed,
    /// It is kept elsewhere and used there.
    InPlace,
}

/// The home and the use of one module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Assignment {
    /// Its name.
    pub module: Arc<str>,
    /// Its place among the layout's modules.
    pub index: ModuleId,
    /// Its layer.
    pub layer: LayerId,
    /// Where its bytes live.
    pub device: DeviceId,
    /// How they are used.
    #[serde(rename = "use")]
    pub usage: Use,
    /// Whether they pass the pinned staging buffers on the host on their way to the compute device.
    pub staged: bool,
    /// The bytes that it takes at home; 0 where another module owns its storage.
    pub bytes: u64,
}

/// What a plan puts on one device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DevicePlan {
    /// The device.
    pub id: DeviceId,
    /// What the allocation allows it (a cap, or its share of a ratio); none where it takes what is left.
    pub quota: Option<u64>,
    /// The weights homed here.
    #[serde(flatten)]
    pub weights: DeviceWeights,
    /// What is needed beside them.
    #[serde(flatten)]
    pub beside: DeviceBeside,
    /// What was known of its memory when the plan was made.
    #[serde(flatten)]
    pub memory: DeviceRoom,
}

/// The weights that a plan homes on a device, in bytes, and what of them moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceWeights {
    /// All of them.
    pub bytes: u64,
    /// How many modules these are.
    pub modules: usize,
    /// What leaves the device in each pass.
    pub streamed: u64,
    /// The part of `streamed` that passes the pinned staging buffers on the host.
    pub staged: u64,
    /// The part of `bytes` that is kept in pinned host memory.
    pub pinned: u64,
}

/// What a plan needs of a device beside weights, in bytes; the first three of the compute device only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceBeside {
    /// The slots of streamed layers.
    pub slots: u64,
    /// What patching needs, which may use the memory of the slots.
    pub scratch: u64,
    /// What the caller keeps for activations.
    pub reserve: u64,
    /// What opening the device takes, where it was not open yet and something is put on it.
    #[serde(default)]
    pub opening: u64,
}

/// The memory of a device as it was known when a plan was made, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceRoom {
    /// All of it.
    pub total: u64,
    /// What of it was free, where known.
    pub free: Option<u64>,
}

/// Where every module of a model lives and how it is used.
///
/// A plan that exists places every module of its layout exactly once and its sums are right; one that is
/// deserialised is checked for that, and for being as it was written: a plan is made anew, not edited. It prints as a
/// table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan(Parts);

/// What a plan consists of, before it is validated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Parts {
    pub(super) mode: Mode,
    pub(super) order: Order,
    pub(super) unit: Unit,
    pub(super) compute: DeviceId,
    pub(super) depth: usize,
    /// Whether the caller has the slots.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "own_slots")]
    pub(super) external_slots: bool,
    /// Whether each layer always uses the same slot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) fixed_slots: bool,
    pub(super) slots: Slots,
    pub(super) devices: Vec<DevicePlan>,
    pub(super) assignments: Vec<Assignment>,
    pub(super) warnings: Vec<Warning>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) explanation: Option<Box<Explanation>>,
}

impl Plan {
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) where the parts contradict each other.
    pub(super) fn new(parts: Parts) -> Result<Plan> {
        parts.validate()?;
        Ok(Plan(parts))
    }

    pub(super) fn parts(&self) -> &Parts {
        &self.0
    }

    /// What it consists of.
    pub(super) fn into_parts(self) -> Parts {
        self.0
    }

    /// How the quotas of its allocation counted.
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// How modules are spread; mode virtual is always sequential.
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

    /// How many layers are brought ahead of the one in use.
    pub fn depth(&self) -> usize {
        self.0.depth
    }

    /// Every module once, in the layout's order.
    pub fn assignments(&self) -> &[Assignment] {
        &self.0.assignments
    }

    /// What becomes of a module; none when the plan has no such module.
    pub fn assignment(&self, module: ModuleId) -> Option<&Assignment> {
        self.0.assignments.get(module.index())
    }

    /// The same for a module of the layout that the plan is of.
    pub(crate) fn at(&self, module: ModuleId) -> &Assignment {
        &self.0.assignments[module.index()]
    }

    /// The compute device, the allocation's devices and where else something lives, in order of id.
    pub fn devices(&self) -> &[DevicePlan] {
        &self.0.devices
    }

    /// What the plan puts on `id`; none where the plan has nothing to do with it.
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

    /// Where a module's bytes come from, if it is streamed.
    pub(crate) fn origin(&self, module: ModuleId) -> Option<Origin> {
        let assignment = self.at(module);
        let origin = Origin { device: assignment.device, staged: assignment.staged };
        (assignment.usage == Use::Streamed).then_some(origin)
    }

    /// Which modules share memory where they live, for the layout that the plan is of.
    pub(crate) fn groups(&self, layout: &Layout) -> Groups {
        Groups::new(layout, |module| self.origin(module))
    }

    /// The bytes of all weights, shared storage once.
    pub fn bytes(&self) -> u64 {
        self.0.devices.iter().map(|d| d.weights.bytes).sum()
    }

    /// What a reader should know: quotas that could not be kept, patterns without effect.
    pub fn warnings(&self) -> &[Warning] {
        &self.0.warnings
    }

    /// Why it is as it is; none but of mode auto.
    pub fn explanation(&self) -> Option<&Explanation> {
        self.0.explanation.as_deref()
    }
}

impl DevicePlan {
    /// Nothing on a device.
    pub(super) fn of(info: &DeviceInfo, quota: Option<u64>) -> DevicePlan {
        let memory = DeviceRoom { total: info.total, free: info.free };
        let (weights, beside) = Default::default();
        DevicePlan { id: info.id, quota, weights, beside, memory }
    }

    /// What the plan needs of the device: what opening takes, weights, the larger of slots and scratch, and the
    /// reserve.
    pub fn needed(&self) -> u64 {
        let DeviceBeside { slots, scratch, reserve, opening } = self.beside;
        let kept = self.weights.bytes.saturating_add(slots.max(scratch)).saturating_add(reserve);
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
        }
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
