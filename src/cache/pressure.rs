//! Memory pressure: when to request a clean-up without being asked.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::PoisonError;

use serde::Serialize;

use super::{FreeRequest, ModelCache};
use crate::bytes::ByteSize;
use crate::device::{DeviceId, MemoryUsage};
use crate::error::Result;
use crate::registry::Registry;

/// The thresholds of memory use above which a clean-up is requested.
///
/// For the host: over 85 % of its memory, and again only 5 points above the use at the last request. Once the use is 5 points
/// below the threshold, the last request is forgotten. The host's memory is what the process may use: the system's memory, or
/// the tightest limit of its control groups. For a device: when less than its margin is free, and again only after the margin
/// was free in between. There are no margins by default.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "it does nothing until a cache is checked with it"]
pub struct Pressure {
    percent: u8,
    points: u8,
    margins: BTreeMap<DeviceId, u64>,
}

impl Default for Pressure {
    fn default() -> Pressure {
        Pressure { percent: 85, points: 5, margins: BTreeMap::new() }
    }
}

/// The state of earlier requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PressureState {
    /// The host's use at the last request, in hundredths of a percent.
    level: Option<u64>,
    /// The devices that had less free than their margins.
    short: BTreeSet<DeviceId>,
}

/// The inputs of the decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PressureReadings {
    /// The host's memory.
    pub host: MemoryUsage,
    /// The devices' memory.
    pub devices: Vec<(DeviceId, MemoryUsage)>,
    /// Whether a model of the cache is being streamed.
    pub pass_runs: bool,
}

impl PressureReadings {
    /// Readings of the host and of devices while no pass runs.
    pub fn new(host: MemoryUsage, devices: Vec<(DeviceId, MemoryUsage)>) -> PressureReadings {
        PressureReadings { host, devices, pass_runs: false }
    }

    /// Sets whether a pass runs.
    #[must_use]
    pub fn pass_runs(mut self, runs: bool) -> PressureReadings {
        self.pass_runs = runs;
        self
    }
}

/// The result of a check of memory pressure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PressureReport {
    /// The request.
    pub request: FreeRequest,
    /// The host's use, in hundredths of a percent.
    pub host: u64,
    /// The devices with less free than their margins, and the missing bytes.
    pub short: Vec<(DeviceId, u64)>,
    /// Whether the decision was postponed because a pass runs.
    pub postponed: bool,
}

impl Pressure {
    /// The default thresholds.
    pub fn new() -> Pressure {
        Pressure::default()
    }

    /// Sets the use of host memory, in percent, above which a clean-up is requested. Default: 85.
    pub fn host_percent(mut self, percent: u8) -> Pressure {
        self.percent = percent.min(100);
        self
    }

    /// Sets how many points higher the use must be for another clean-up. Default: 5.
    pub fn points(mut self, points: u8) -> Pressure {
        self.points = points;
        self
    }

    /// Requests a clean-up when less than `margin` is free on a device.
    pub fn margin(mut self, device: DeviceId, margin: ByteSize) -> Pressure {
        self.margins.insert(device, margin.get());
        self
    }

    /// Decides from the readings and the state of earlier requests, and updates the state. While a pass runs, it decides only
    /// if `force` is set.
    #[must_use]
    pub fn judge(
        &self,
        state: &PressureState,
        readings: &PressureReadings,
        force: bool,
    ) -> (PressureReport, PressureState) {
        let level = per_ten_thousand(readings.host);
        let mut report = PressureReport { host: level, ..PressureReport::default() };
        if readings.pass_runs && !force {
            report.postponed = true;
            return (report, state.clone());
        }
        let mut next = PressureState { level: self.remembered(state.level, level), short: BTreeSet::new() };
        let again = next.level.is_none_or(|last| level >= last + u64::from(self.points) * 100);
        if level > u64::from(self.percent) * 100 && again {
            report.request = FreeRequest::ALL;
            next.level = Some(level);
        }
        for (id, memory) in &readings.devices {
            let margin = self.margins.get(id).copied().unwrap_or(0);
            if memory.available() < margin {
                report.short.push((*id, margin - memory.available()));
                if next.short.insert(*id) && !state.short.contains(id) {
                    report.request = FreeRequest::ALL;
                }
            }
        }
        (report, next)
    }

    /// The level of the last request; `None` if the use fell well below the threshold since.
    fn remembered(&self, last: Option<u64>, level: u64) -> Option<u64> {
        let forgotten = u64::from(self.percent.saturating_sub(self.points)) * 100;
        last.filter(|_| level > forgotten)
    }
}

/// The use in hundredths of a percent, rounded up, so that any byte over a percentage is over it.
fn per_ten_thousand(memory: MemoryUsage) -> u64 {
    let used = u128::from(memory.total.saturating_sub(memory.available())) * 10_000;
    used.div_ceil(u128::from(memory.total.max(1))) as u64
}

impl ModelCache {
    /// Reads the memory of the host and of all open devices, and requests a clean-up if `pressure` says so; the next
    /// [`service_requests`](ModelCache::service_requests) serves it. A pass runs while a [`Streamer`](crate::Streamer) of
    /// a cached model exists; then nothing is requested unless `force` is set.
    ///
    /// # Errors
    /// When the host's memory cannot be read. A device whose memory cannot be read is left out.
    pub fn check_pressure(&self, registry: &Registry, pressure: &Pressure, force: bool) -> Result<PressureReport> {
        let host = registry.device(DeviceId::CPU)?.memory()?;
        let memory = |device: &std::sync::Arc<dyn crate::backend::Device>| Some((device.id(), device.memory().ok()?));
        let devices = registry.opened().iter().filter_map(memory).collect();
        let pass_runs = self.entries().models.values().any(|entry| entry.model.is_streaming());
        let readings = PressureReadings { host, devices, pass_runs };
        let report = {
            let mut state = self.pressure.lock().unwrap_or_else(PoisonError::into_inner);
            let (report, next) = pressure.judge(&state, &readings, force);
            *state = next;
            report
        };
        if !report.request.is_empty() {
            tracing::info!("{report}");
        }
        self.request_free(report.request);
        Ok(report)
    }
}

impl fmt::Display for PressureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02} % of the host's memory in use", self.host / 100, self.host % 100)?;
        for (device, bytes) in &self.short {
            write!(f, ", {device} {} short of its margin", ByteSize(*bytes).human())?;
        }
        match (self.postponed, self.request.is_empty()) {
            (true, _) => f.write_str("; a pass runs"),
            (false, true) => Ok(()),
            (false, false) => f.write_str("; a clean-up is asked for"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the use of a host of 10,000 bytes through a policy; the uses at which a clean-up was asked for.
    fn asked(pressure: &Pressure, uses: &[u64]) -> Vec<u64> {
        let mut state = PressureState::default();
        let ask = |used: &&u64| {
            let readings = PressureReadings::new(MemoryUsage::new(10_000, 10_000 - **used, 0, 0), Vec::new());
            let (report, next) = pressure.judge(&state, &readings, false);
            state = next;
            assert_eq!((report.host, report.postponed), (**used, false));
            !report.request.is_empty()
        };
        uses.iter().filter(ask).copied().collect()
    }

    #[test]
    fn the_host_asks_over_85_percent_and_again_5_points_higher() {
        let pressure = Pressure::new();
        let uses = [0, 8_400, 8_500, 8_501, 8_600, 9_000, 9_001, 9_500, 9_501, 10_000];
        assert_eq!(asked(&pressure, &uses), [8_501, 9_001, 9_501]);
        // Around the threshold it is asked for once; well below it, the last time is forgotten.
        assert_eq!(asked(&pressure, &[8_600, 8_400, 8_600, 8_001, 8_999, 8_000, 8_600]), [8_600, 8_600]);
        assert_eq!(asked(&pressure, &[9_700, 10_000, 9_000, 9_700]), [9_700]);
        assert_eq!(asked(&Pressure::new().host_percent(50).points(0), &[5_000, 5_001, 5_001]), [5_001, 5_001]);
    }

    #[test]
    fn one_byte_over_is_over() {
        let host = MemoryUsage::new(1 << 40, (1u64 << 40) * 15 / 100 - 1, 0, 0);
        let (report, _) = Pressure::new().judge(&PressureState::default(), &PressureReadings::new(host, vec![]), false);
        assert_eq!((report.host, report.request), (8_501, FreeRequest::ALL));
        // What is reserved is as good as used.
        let host = MemoryUsage::new(1_000, 200, 100, 100);
        let (report, _) = Pressure::new().judge(&PressureState::default(), &PressureReadings::new(host, vec![]), false);
        assert_eq!(report.request, FreeRequest::ALL);
    }

    #[test]
    fn a_device_asks_once_until_its_margin_was_free() {
        let card = DeviceId::cuda(0);
        let pressure = Pressure::new().margin(card, ByteSize(100));
        let (mut state, mut asked) = (PressureState::default(), Vec::new());
        for free in [100, 99, 50, 100, 98] {
            let usage = MemoryUsage::new(1_000, free, 0, 0);
            let readings = PressureReadings::new(MemoryUsage::new(100, 100, 0, 0), vec![(card, usage)]);
            let (report, next) = pressure.judge(&state, &readings, false);
            state = next;
            assert_eq!(report.short, if free < 100 { vec![(card, 100 - free)] } else { vec![] });
            asked.push(!report.request.is_empty());
        }
        assert_eq!(asked, [false, true, false, false, true]);
    }

    #[test]
    fn a_pass_is_not_disturbed_unless_forced() {
        let readings = PressureReadings::new(MemoryUsage::new(100, 5, 0, 0), Vec::new()).pass_runs(true);
        let (report, state) = Pressure::new().judge(&PressureState::default(), &readings, false);
        assert!(report.postponed && report.request.is_empty() && state == PressureState::default());
        assert_eq!(Pressure::new().judge(&state, &readings, true).0.request, FreeRequest::ALL);
    }
}
