//! Where every module of a model lives: a pure function of layout, machine and allocation.
//!
//! [`Planner`] (`planner`) has the inputs. The allocation's quotas become bytes on the machine's devices, and every module
//! gets a device (`place`, `uniform`); the needs of streaming follow (`traffic`, and `compress` for what is kept compressed); then `check` makes sure that the devices hold
//! the result and that its parts agree. `demote` moves a plan's resident modules to the host. The resulting [`Plan`] is a
//! value: it prints, serialises, compares, and estimates the time of a pass (`estimate`, and `forecast` by the schedule of
//! streaming). Mode auto (`auto`, `candidates`, `split`) searches quotas and an order by the forecasts of the plans that they give.

mod auto;
mod candidates;
mod check;
mod codes;
mod compress;
mod demote;
mod estimate;
mod explain;
mod fits;
mod forecast;
mod outlier;
mod place;
mod planner;
mod preset;
mod remedy;
mod slots;
mod split;
mod table;
mod traffic;
mod uniform;
mod value;
mod warning;

pub use crate::dtype::TensorGrouping;
pub use estimate::{Estimate, SegmentTime};
pub use explain::{Alternative, DeviceReason, Explanation};
pub use forecast::ComputeTime;
pub use outlier::Outlier;
pub use planner::Planner;
pub use preset::Preset;
pub use slots::Slots;
pub use value::{Assignment, DeviceBeside, DevicePlan, DeviceRoom, DeviceWeights, Order, Plan, Unit, Use};
pub use warning::{KeptFor, Warning};
