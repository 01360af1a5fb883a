//! What goes wrong on purpose.

use serde::{Deserialize, Serialize};

use crate::code::Code;
use crate::config::Link;
use crate::vendor::Vendor;

/// What goes wrong from now on. Calls are counted from when the plan was given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultPlan {
    /// Faults of single calls.
    pub faults: Vec<Fault>,
    /// No device reaches another, whatever the configuration says.
    pub no_peers: bool,
    /// Copies between devices go through and deliver wrong bytes.
    pub lying_peers: bool,
    /// Functions run, and the lowest bit of the first byte that a launch may write is wrong.
    pub lying_functions: bool,
    /// No device has memory pools.
    pub no_pools: bool,
    /// There are no devices.
    pub no_devices: bool,
    /// The driver is of this version.
    pub driver_version: Option<i32>,
    /// Every link between host and devices runs at this pace.
    pub link: Option<Link>,
}

impl FaultPlan {
    /// A plan of one fault.
    pub fn one(fault: Fault) -> FaultPlan {
        FaultPlan { faults: vec![fault], ..FaultPlan::default() }
    }
}

/// The calls that pin host memory.
const PINS: [&str; 7] = [
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "hipHostMalloc",
    "hipHostRegister",
    "aclrtMallocHost",
    "aclrtHostRegisterV2",
    "cnMallocHost",
];

/// The fault of one call, or of all from one on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// The exported names of the calls that count; empty: all count.
    #[serde(default)]
    pub calls: Vec<String>,
    /// The first call counts as 1.
    pub nth: u64,
    /// Whether all later ones fail too.
    #[serde(default)]
    pub onwards: bool,
    /// What happens.
    pub effect: Effect,
}

impl Fault {
    /// The `nth` call of one kind.
    pub fn nth(call: &str, nth: u64, effect: Effect) -> Fault {
        Fault { calls: vec![call.to_owned()], nth, onwards: false, effect }
    }

    /// The `nth` call of any kind.
    pub fn any(nth: u64, effect: Effect) -> Fault {
        Fault { calls: Vec::new(), nth, onwards: false, effect }
    }

    /// The `nth` attempt to pin host memory, by allocation or by registration.
    pub fn pin(nth: u64) -> Fault {
        let calls = PINS.map(str::to_owned).to_vec();
        Fault { calls, nth, onwards: false, effect: Effect::OutOfMemory }
    }

    /// And all later ones.
    #[must_use]
    pub fn onwards(mut self) -> Fault {
        self.onwards = true;
        self
    }
}

/// What happens at a faulty call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// It returns this result and does nothing. Numbers are always those of the call's vendor.
    Fail(u32),
    /// It returns the vendor's result for this, `CUDA_ERROR_OUT_OF_MEMORY` for instance, and does nothing.
    OutOfMemory,
    /// It returns this result, and so does every later call that concerns the device.
    Sticky(u32),
    /// The same with the vendor's result for this, `CUDA_ERROR_UNKNOWN` for instance, as when a device falls off the bus.
    DeviceLost,
    /// It succeeds; when the work it enqueued runs, the device breaks with this result. With ACL, only a result that is the
    /// device's breaks it (as 507010 is); any other is its context's, where by default everything goes on.
    LateSticky(u32),
    /// It succeeds; when half of the bytes that it copies are there, the device breaks with this result. Work other than
    /// a copy never runs.
    Torn(u32),
    /// It succeeds; the work it enqueued stands still this long before it runs.
    StallMillis(u64),
    /// It succeeds; the work it enqueued stands still until another plan takes the place of this one.
    Hold,
}

/// What a call is to do about its fault, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Fail(Code),
    Break(Code),
    Later(Spoil),
}

/// What is wrong with a piece of work that was enqueued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spoil {
    pub(crate) breaks: Option<Code>,
    /// Breaks it in the middle of a copy.
    pub(crate) tears: bool,
    pub(crate) stall_millis: u64,
    /// The number of the plan that holds it.
    pub(crate) held: Option<u64>,
}

impl Effect {
    /// What to do with a call, as part of the plan of this number.
    fn verdict(self, plan: u64, call: &str) -> Verdict {
        let vendor = Vendor::of(call);
        match self {
            Effect::Fail(code) => Verdict::Fail(vendor.code(code)),
            Effect::OutOfMemory => Verdict::Fail(vendor.out_of_memory(call)),
            Effect::Sticky(code) => Verdict::Break(vendor.code(code)),
            Effect::DeviceLost => Verdict::Break(vendor.device_lost()),
            Effect::LateSticky(code) => Verdict::Later(Spoil { breaks: Some(vendor.code(code)), ..Spoil::default() }),
            Effect::Torn(code) => {
                Verdict::Later(Spoil { breaks: Some(vendor.code(code)), tears: true, ..Spoil::default() })
            }
            Effect::StallMillis(millis) => Verdict::Later(Spoil { stall_millis: millis, ..Spoil::default() }),
            Effect::Hold => Verdict::Later(Spoil { held: Some(plan), ..Spoil::default() }),
        }
    }
}

/// A plan and how far it has come.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    pub(crate) plan: FaultPlan,
    number: u64,
    seen: Vec<u64>,
}

impl Faults {
    pub(crate) fn new(plan: FaultPlan, number: u64) -> Faults {
        let seen = vec![0; plan.faults.len()];
        Faults { plan, number, seen }
    }

    /// Counts a call and says what is to go wrong with it; the first fault that strikes wins.
    pub(crate) fn count(&mut self, call: &str) -> Option<Verdict> {
        let mut verdict = None;
        for (fault, seen) in self.plan.faults.iter().zip(&mut self.seen) {
            if !fault.calls.is_empty() && !fault.calls.iter().any(|name| name == call) {
                continue;
            }
            *seen += 1;
            let strikes = *seen == fault.nth || fault.onwards && *seen > fault.nth;
            if strikes && verdict.is_none() {
                verdict = Some(fault.effect.verdict(self.number, call));
            }
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_its_own_call_only() {
        let mut faults = Faults::new(FaultPlan::one(Fault::nth("a", 2, Effect::OutOfMemory)), 1);
        let struck: Vec<bool> = ["a", "b", "a", "a"].iter().map(|call| faults.count(call).is_some()).collect();
        assert_eq!(struck, [false, false, true, false]);
    }

    #[test]
    fn onwards_means_all_later_ones() {
        let mut faults = Faults::new(FaultPlan::one(Fault::any(2, Effect::Sticky(700)).onwards()), 1);
        assert_eq!(faults.count("a"), None);
        assert_eq!(faults.count("b"), Some(Verdict::Break(Code::ILLEGAL_ADDRESS)));
        assert_eq!(faults.count("c"), Some(Verdict::Break(Code::ILLEGAL_ADDRESS)));
    }
}
