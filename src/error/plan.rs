//! Faults of plans.

use std::fmt;

use serde::Serialize;

use crate::device::DeviceId;
use crate::dtype::TensorGrouping;

/// The reason why a plan does not fit: the device, the part of the plan that exceeds its memory, and both numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device} has {limit} bytes {limit_is}{}, the plan needs {needed} there ({term}{}): {short} bytes short{}", if limit < total { format!(" of {total}") } else { String::new() }, module.as_ref().map(|m| format!(", at {m}")).unwrap_or_default(), Remedies(remedies))]
#[non_exhaustive]
pub struct Shortfall {
    /// The device that would be overfull.
    pub device: DeviceId,
    /// The part that exceeds the limit.
    pub term: Term,
    /// The module (for [`Term::Slots`] the layer) at which the limit is exceeded, if there is one.
    pub module: Option<String>,
    /// Bytes that the plan needs on the device.
    pub needed: u64,
    /// Bytes that the device has.
    pub limit: u64,
    /// What the limit is.
    pub limit_is: Limit,
    /// All bytes of the device, free or not; `limit` where that is unknown.
    pub total: u64,
    /// `needed - limit`.
    pub short: u64,
    /// The remedies, each of which makes the plan fit; empty if none was found.
    pub remedies: Vec<Remedy>,
}

/// A change that makes the plan fit. It was tried. Prints as the setting to use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Remedy {
    /// These modules, which make slots large, [kept resident](crate::Planner::keep_resident).
    KeepResident {
        /// Their names.
        modules: Vec<String>,
    },
    /// These modules, which make slots large, used [in place](crate::Planner::in_place).
    InPlace {
        /// Their names.
        modules: Vec<String>,
    },
    /// The allocation `auto`.
    Auto,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (call, modules) = match self {
            Remedy::KeepResident { modules } => ("keep_resident", modules),
            Remedy::InPlace { modules } => ("in_place", modules),
            Remedy::Auto => return f.write_str("the allocation `auto`"),
        };
        for (index, module) in modules.iter().enumerate() {
            let and = if index > 0 { " and " } else { "" };
            write!(f, "{and}{call}(\"{module}\")")?;
        }
        Ok(())
    }
}

struct Remedies<'a>(&'a [Remedy]);

impl fmt::Display for Remedies<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, remedy) in self.0.iter().enumerate() {
            write!(f, "{}{remedy}", if index == 0 { "; it fits with " } else { ", or with " })?;
        }
        Ok(())
    }
}

/// A part of what a plan needs of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Term {
    /// The memory that opening the device takes.
    Opening,
    /// The weights that live there.
    Weights,
    /// The slots of streamed layers.
    Slots,
    /// The needs of patching.
    Scratch,
    /// The memory that the caller keeps for activations.
    Reserve,
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Term::Opening => "opening",
            Term::Weights => "weights",
            Term::Slots => "slots",
            Term::Scratch => "scratch",
            Term::Reserve => "reserve",
        })
    }
}

/// The limit that a plan is checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub enum Limit {
    /// What is free of a device, or may be used of it.
    #[serde(rename = "free")]
    Free,
    /// All memory of the device: what is free of it is not known.
    #[serde(rename = "in all")]
    InAll,
    /// The largest allocation that the device's driver makes ([`DeviceInfo::largest`](crate::device::DeviceInfo::largest)).
    #[serde(rename = "in one allocation")]
    InOneAllocation,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limit::Free => "free",
            Limit::InAll => "in all",
            Limit::InOneAllocation => "in one allocation",
        })
    }
}

/// The fault of a plan, or of its inputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    /// The plan and the model have different numbers of modules.
    #[error("the plan is of another model: it places {planned} modules, the model has {modules}")]
    OtherModel {
        /// The number of modules in the plan.
        planned: usize,
        /// The number of modules in the model.
        modules: usize,
    },
    /// A module of the plan differs from the model's module at the same index.
    #[error("the plan is of another model: its module {index} is {planned}, the model's is {module}")]
    OtherModule {
        /// The index of the module.
        index: usize,
        /// The module of the plan.
        planned: PlannedModule,
        /// The module of the model.
        module: PlannedModule,
    },
    /// A module is kept compressed by the plan, and not as small in the files of the model.
    #[error(
        "the plan saves {planned} bytes of module `{module}` by compression, and the files save {files}; plan again for these files, or have the load compress them with Weights::compress"
    )]
    OtherCodes {
        /// The module.
        module: String,
        /// The bytes that the plan saves.
        planned: u64,
        /// The bytes that the files save; 0 if they do not have it compressed, or if it changes.
        files: u64,
    },
    /// The plan has the model's modules, with layers in another order: it was made for a layout in that order, perhaps by another
    /// version of this crate.
    #[error(
        "the plan has the layers in another order than the model: its module {index} is {planned}, the model's is {module}; plan again, or give the layout the plan's order with Layout::in_order"
    )]
    OtherOrder {
        /// The place of the first module that differs.
        index: usize,
        /// The module of the plan.
        planned: PlannedModule,
        /// The module of the model.
        module: PlannedModule,
    },
    /// A plan that was read from a file contradicts itself.
    #[error("this is not a valid plan: {0}")]
    NotValid(Contradiction),
    /// The plan expects slots from the caller, but none were given.
    #[error("the plan leaves the slots to the caller; give them with Streamer::with_slots")]
    SlotsLeftToCaller,
    /// The plan divides slots, which those of the caller are not.
    #[error("the plan divides slots {grouping}, and slots of your own are whole; plan with Planner::external_slots")]
    SlotsDivided {
        /// How the plan divides them.
        grouping: TensorGrouping,
    },
    /// The plan computes on the host, and what would leave a compute device would go there.
    #[error("the plan computes on the host, so there is nowhere to demote to")]
    NowhereToDemote,
    /// The compute times are for a different number of layers than the model has.
    #[error("there are compute times for {given} layers, the model has {layers}")]
    ComputeTimes {
        /// How many times there are.
        given: usize,
        /// How many layers.
        layers: usize,
    },
    /// The compute times add up to more than a `Duration` holds.
    #[error("the compute times add up to too much")]
    EndlessComputeTime,
    /// The model has more bytes than can be planned.
    #[error("the model has {bytes} bytes, more than the {most} that can be planned")]
    TooManyBytes {
        /// The bytes of the model.
        bytes: u128,
        /// The most that can be planned.
        most: u64,
    },
}

/// A module, as plans and models describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedModule {
    /// Its name.
    pub name: String,
    /// The bytes that it takes where it is placed.
    pub bytes: u64,
    /// The index of its layer in the order of execution.
    pub layer: usize,
}

impl fmt::Display for PlannedModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` of {} bytes in layer {}", self.name, self.bytes, self.layer)
    }
}

/// A contradiction in a plan that was read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Contradiction {
    /// A device is listed twice.
    #[error("{device} is listed twice")]
    DeviceTwice {
        /// The device.
        device: DeviceId,
    },
    /// A device that is used is not listed.
    #[error("{device} is not listed")]
    NotListed {
        /// The device.
        device: DeviceId,
    },
    /// A module is not in the model's order.
    #[error("module `{module}` is out of order at {index}")]
    OutOfOrder {
        /// The module.
        module: String,
        /// Its index in the plan.
        index: usize,
    },
    /// A module cannot be used in this way on the device that holds it.
    #[error("`{module}` cannot be {usage} on {device}")]
    Usage {
        /// The module.
        module: String,
        /// Its use.
        usage: &'static str,
        /// The device.
        device: DeviceId,
    },
    /// The bytes of the modules exceed `u64`.
    #[error("it has more than 2^64 - 1 bytes")]
    Uncountable,
    /// The bytes or the number of a device's modules differ from what the plan states.
    #[error(
        "the sums of {device} are not those of its modules: {bytes} bytes of {modules} modules, not {said_bytes} of {said_modules}"
    )]
    Sums {
        /// The device.
        device: DeviceId,
        /// The bytes of its modules.
        bytes: u64,
        /// How many these are.
        modules: usize,
        /// The bytes that the plan states.
        said_bytes: u64,
        /// The number of modules that the plan states.
        said_modules: usize,
    },
    /// The plan's other figures of a device contradict each other.
    #[error("the terms of {device} contradict each other")]
    Terms {
        /// The device.
        device: DeviceId,
    },
    /// The slots differ from those that the streamed layers need.
    #[error(
        "its {layers} streamed layers need other slots: {needed} of {bytes} bytes{} at least, not {given} of {bytes_each}{}",
        Large(*needed_large), Large(*given_large)
    )]
    Slots {
        /// How many layers are streamed.
        layers: usize,
        /// How many slots they need.
        needed: usize,
        /// The bytes of the largest of them.
        bytes: u64,
        /// How many large slots they need beside these, and the bytes of each.
        needed_large: (usize, u64),
        /// How many slots the plan has.
        given: usize,
        /// The bytes of each.
        bytes_each: u64,
        /// How many large ones it has, and the bytes of each.
        given_large: (usize, u64),
    },
    /// The landing buffers are not those that the tensors in blocks need.
    #[error(
        "what it unpacks needs {} landing buffers of {} bytes, not {} of {}", needed.0, needed.1, given.0, given.1
    )]
    Landings {
        /// How many it needs, and the bytes of each.
        needed: (usize, u64),
        /// How many the plan has, and the bytes of each.
        given: (usize, u64),
    },
    /// Slots cannot hold values of this type in place of blocks.
    #[error("its slots hold values of type {dtype}, and blocks are unpacked to F32, F16 or BF16")]
    Unpacked {
        /// The type's name.
        dtype: String,
    },
    /// The bytes that a device sends in a pass differ from those of its modules.
    #[error(
        "{device} streams {} bytes, {} of them staged, and pins {}, not {}, {} and {}",
        needed[0], needed[1], needed[2], given[0], given[1], given[2]
    )]
    Traffic {
        /// The device.
        device: DeviceId,
        /// The bytes that are streamed, staged and pinned by its modules.
        needed: [u64; 3],
        /// What the plan states.
        given: [u64; 3],
    },
    /// The plan was changed after it was written.
    #[error("it was changed after it was written: its checksum does not match its figures; plan again")]
    Changed,
    /// The plan has a warning that is not one of a plan's.
    #[error("`{text}` is not a warning of plans")]
    Warning {
        /// The warning.
        text: String,
    },
}

/// Large slots, if any.
struct Large((usize, u64));

impl fmt::Display for Large {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            (0, 0) => Ok(()),
            (count, bytes) => write!(f, " and {count} of {bytes}"),
        }
    }
}
