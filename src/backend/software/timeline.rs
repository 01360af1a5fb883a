//! The time of software devices: transfers share the segments of a machine's links, on a virtual or a wall clock.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{Bookings, DeviceId, Topology};

/// The clock of simulated devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Clock {
    /// Simulated time: every copy is executed immediately, and its event gets the time at which the links would have
    /// completed it. Exact and, for one queueing thread, deterministic.
    Virtual,
    /// Real time: copies take as long as the links need.
    Wall,
}

/// The longest delay with which a transfer may be booked on a wall clock, if its thread was kept from running.
const LATEST: Duration = Duration::from_secs(10);

/// The most busy intervals that a segment remembers on a wall clock, so that many small transfers do not fill the memory. It
/// is more than the number of transfers that can be late at the same time.
const MOST: usize = 1024;

/// The segments of a machine's links and their busy times.
#[derive(Debug)]
pub(in crate::backend) struct Timeline {
    clock: Clock,
    topology: Topology,
    start: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Virtual time as the host knows it: the time of the latest event that it waited for.
    now: Duration,
    bookings: Bookings,
}

impl Timeline {
    pub(in crate::backend) fn new(clock: Clock, topology: Topology) -> Timeline {
        let state = Mutex::new(State { now: Duration::ZERO, bookings: Bookings::of(&topology) });
        Timeline { clock, topology, start: Instant::now(), state }
    }

    pub(in crate::backend) fn clock(&self) -> Clock {
        self.clock
    }

    pub(in crate::backend) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The current time, since the start.
    pub(in crate::backend) fn now(&self) -> Duration {
        match self.clock {
            Clock::Virtual => self.state().now,
            Clock::Wall => self.start.elapsed(),
        }
    }

    /// Advances virtual time to `time`, if that is later.
    pub(super) fn advance(&self, time: Duration) {
        let mut state = self.state();
        state.now = state.now.max(time);
    }

    /// Books a transfer of `bytes` that may start at `ready` on every segment of its route. Returns the time of its
    /// completion.
    pub(super) fn transfer(&self, from: DeviceId, to: DeviceId, bytes: u64, ready: Duration) -> Duration {
        let route = self.topology.path(from, to);
        let mut state = self.state();
        let past = match self.clock {
            Clock::Virtual => state.now,
            Clock::Wall => self.start.elapsed().saturating_sub(LATEST),
        };
        state.bookings.forget(&route, past);
        if self.clock == Clock::Wall {
            state.bookings.keep_latest(&route, MOST);
        }
        state.bookings.transfer(&self.topology, &route, bytes, ready)
    }

    /// Sleeps until `time` of a wall clock.
    pub(super) fn sleep_until(&self, time: Duration) {
        let left = time.saturating_sub(self.start.elapsed());
        if !left.is_zero() {
            std::thread::sleep(left);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Bandwidth;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn transfers_share_what_they_pass() {
        let (a, b) = (DeviceId::cuda(0), DeviceId::cuda(1));
        let gbps = |n: u64| Bandwidth::bytes_per_second(n * 1_000_000_000);
        let topology = Topology::new().link(DeviceId::CPU, gbps(10)).link(a, gbps(5)).link(b, gbps(10));
        let timeline = Timeline::new(Clock::Virtual, topology);
        let megabytes = 1_000_000;
        assert_eq!(timeline.transfer(DeviceId::CPU, a, 50 * megabytes, ms(0)), ms(10));
        // The host's memory is busy for 5 ms with the first; the second link then goes at its own speed.
        assert_eq!(timeline.transfer(DeviceId::CPU, b, 100 * megabytes, ms(0)), ms(15));
        // A late transfer leaves a gap, which an early one fills.
        assert_eq!(timeline.transfer(DeviceId::CPU, a, 5 * megabytes, ms(100)), ms(101));
        assert_eq!(timeline.transfer(DeviceId::CPU, a, 5 * megabytes, ms(20)), ms(21));
    }

    #[test]
    fn the_past_takes_no_memory() {
        let link = Bandwidth::bytes_per_second(1_000_000_000);
        let timeline = Timeline::new(Clock::Virtual, Topology::new().link(DeviceId::cuda(0), link));
        for step in 0..1000 {
            let end = timeline.transfer(DeviceId::CPU, DeviceId::cuda(0), 500_000, ms(step));
            assert_eq!(end, ms(step) + Duration::from_micros(500));
            timeline.advance(end);
        }
        assert!(timeline.state().bookings.intervals() <= 1);
    }
}
