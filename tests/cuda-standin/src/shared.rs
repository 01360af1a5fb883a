//! What the calls and the workers share: the configuration, what was seen, which devices are broken.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::code::Code;
use crate::config::Config;
use crate::hazard::Clock;
use crate::pace::Engines;
use crate::report::{Rule, Violation, Violations};
use crate::sync::lock;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) engines: Engines,
    violations: Mutex<Violations>,
    /// Per device the result that every call gives from now on; 0: it works.
    broken: Vec<AtomicU32>,
    /// What the host learned from functions of its own that a stream called.
    told: Mutex<Clock>,
    born: Instant,
    nudged: AtomicU64,
    /// The number of the plan of what goes wrong.
    pub(crate) plan: AtomicU64,
}

impl Shared {
    pub(crate) fn new(config: Config) -> Shared {
        Shared {
            engines: Engines::default(),
            violations: Mutex::default(),
            broken: config.devices.iter().map(|_| AtomicU32::new(0)).collect(),
            told: Mutex::default(),
            born: Instant::now(),
            nudged: AtomicU64::new(0),
            plan: AtomicU64::new(0),
            config,
        }
    }

    pub(crate) fn violation(&self, rule: Rule, call: &'static str, detail: impl FnOnce() -> String) {
        lock(&self.violations).add(rule, call, detail);
    }

    pub(crate) fn violations(&self) -> Vec<Violation> {
        lock(&self.violations).list()
    }

    /// Breaks a device, unless it is already broken in another way.
    pub(crate) fn break_device(&self, device: usize, code: Code) {
        if let Some(broken) = self.broken.get(device) {
            let _ = broken.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    pub(crate) fn broken(&self, device: usize) -> Option<Code> {
        match self.broken.get(device)?.load(Ordering::Acquire) {
            0 => None,
            code => Some(Code(code)),
        }
    }

    /// A stream calls a function of the program, which may tell the rest of the program how far the stream is.
    pub(crate) fn tell(&self, clock: &Clock) {
        lock(&self.told).join(clock);
    }

    pub(crate) fn told(&self) -> Clock {
        lock(&self.told).clone()
    }

    /// The host waits for something, or asks: all that is enqueued by now may start.
    pub(crate) fn nudge(&self) {
        let now = u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nudged.fetch_max(now, Ordering::AcqRel);
    }

    /// When work that was enqueued then may start, as things stand.
    pub(crate) fn may_start(&self, enqueued: Instant) -> Option<Instant> {
        let late = Duration::from_micros(self.config.late_micros);
        let nudged = self.born + Duration::from_nanos(self.nudged.load(Ordering::Acquire));
        if late.is_zero() || nudged >= enqueued { None } else { Some(enqueued + late) }
    }
}
