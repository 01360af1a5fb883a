//! Where every module of a model lives: a pure function of layout, machine and allocation.
//!
//! [`Planner`] resolves the allocation's quotas to bytes (`quota`), places the modules (`place`, `spread`,
//! `uniform`), works out what streaming needs (`traffic`) and checks that the devices hold it (`fit`). `demote` moves
//! what a plan has on its compute device to the host. The [`Plan`] that comes out is a value: it prints, serialises,
//! compares, and estimates the time of a pass (`estimate`, and `forecast` by the schedule of streaming). For mode auto quotas and order are found (`auto`,
//! `split`) by the forecasts of what they would come to.

mod auto;
mod check;
mod demote;
mod estimate;
mod explain;
mod fit;
mod forecast;
mod pattern;
mod place;
mod planner;
mod preset;
mod quota;
mod split;
mod spread;
mod table;
mod traffic;
mod uniform;
mod value;
mod warning;

pub use estimate::{Estimate, SegmentTime};
pub use explain::{Alternative, DeviceReason, Explanation};
pub use forecast::ComputeTime;
pub use planner::Planner;
pub use preset::Preset;
pub use value::{Assignment, DevicePlan, Order, Plan, Slots, Unit, Use};
pub use warning::{KeptFor, Warning};
