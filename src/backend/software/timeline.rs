//! Time for software devices: transfers share the segments of a machine's links, on a virtual or a wall clock.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{DeviceId, Topology};

/// Which time simulated devices run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Simulated time: every copy is carried out at once and its event gets the time at which the links would
    /// have let it end. Exact and, for one queueing thread, deterministic.
    Virtual,
    /// Real time: copies take as long as the links say.
    Wall,
}

/// How long after its time a transfer on a wall clock may be asked for, its thread having been kept from running.
const LATEST: Duration = Duration::from_secs(10);

/// The most intervals that a segment remembers on a wall clock, so that many small transfers do not fill the memory with
/// them: more than the transfers that can be late at once.
const MOST: usize = 1024;

/// The segments of a machine's links and when they are busy.
#[derive(Debug)]
pub(in crate::backend) struct Timeline {
    clock: Clock,
    topology: Topology,
    start: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Virtual time as the host knows it: the latest event it waited for.
    now: Duration,
    segments: Vec<Busy>,
}

impl Timeline {
    pub(in crate::backend) fn new(clock: Clock, topology: Topology) -> Timeline {
        let segments = topology.segments().iter().map(|_| Busy::default()).collect();
        let state = Mutex::new(State { now: Duration::ZERO, segments });
        Timeline { clock, topology, start: Instant::now(), state }
    }

    pub(in crate::backend) fn clock(&self) -> Clock {
        self.clock
    }

    pub(in crate::backend) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The time now, since the beginning.
    pub(in crate::backend) fn now(&self) -> Duration {
        match self.clock {
            Clock::Virtual => self.state().now,
            Clock::Wall => self.start.elapsed(),
        }
    }

    /// Moves virtual time on to `time`, if it is not past it.
    pub(super) fn advance(&self, time: Duration) {
        let mut state = self.state();
        state.now = state.now.max(time);
    }

    /// When `bytes` that may leave at `ready` have arrived. Takes their share of every segment on the way.
    pub(super) fn transfer(&self, from: DeviceId, to: DeviceId, bytes: u64, ready: Duration) -> Duration {
        let route = self.topology.route(from, to);
        let mut state = self.state();
        let past = match self.clock {
            Clock::Virtual => state.now,
            Clock::Wall => self.start.elapsed().saturating_sub(LATEST),
        };
        let most = if self.clock == Clock::Wall { MOST } else { usize::MAX };
        route.iter().for_each(|&s| state.segments[s].forget(past, most));
        let start = route.iter().map(|&s| state.segments[s].first_free(ready)).fold(ready, Duration::max);
        let take = |&s: &usize| {
            let time = self.topology.segments()[s].bandwidth.time(bytes);
            state.segments[s].take(start, time)
        };
        route.iter().map(take).fold(start, Duration::max)
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

/// When a segment is busy: disjoint intervals, start -> end.
#[derive(Debug, Default)]
struct Busy(BTreeMap<Duration, Duration>);

impl Busy {
    /// The first time from `ready` on at which the segment is free.
    fn first_free(&self, ready: Duration) -> Duration {
        match self.0.range(..=ready).next_back() {
            Some((_, &end)) if end > ready => self.first_free(end),
            _ => ready,
        }
    }

    /// Fills `time` of the gaps from `ready` on; the end of the last one filled.
    fn take(&mut self, ready: Duration, time: Duration) -> Duration {
        let (mut at, mut left) = (self.first_free(ready), time);
        while !left.is_zero() {
            let next = self.0.range(at..).next().map(|(&start, _)| start);
            let gap = next.map_or(left, |start| (start - at).min(left));
            self.occupy(at, at + gap);
            left -= gap;
            at = if left.is_zero() { at + gap } else { self.first_free(at + gap) };
        }
        at
    }

    /// Forgets what ended by `past`, where no transfer begins any more, and the oldest of more than `most` intervals.
    fn forget(&mut self, past: Duration, most: usize) {
        let mut surplus = self.0.len().saturating_sub(most);
        while let Some(first) = self.0.first_entry()
            && (*first.get() <= past || surplus > 0)
        {
            first.remove();
            surplus = surplus.saturating_sub(1);
        }
    }

    /// Marks a free interval as busy and joins it with its neighbours.
    fn occupy(&mut self, mut start: Duration, mut end: Duration) {
        let before = self.0.range(..start).next_back().filter(|(_, before_end)| **before_end == start);
        if let Some(before) = before.map(|(&before, _)| before) {
            self.0.remove(&before);
            start = before;
        }
        if let Some(after_end) = self.0.remove(&end) {
            end = after_end;
        }
        if start < end {
            self.0.insert(start, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Bandwidth;
    use proptest::prelude::*;

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
        assert!(timeline.state().segments.iter().all(|busy| busy.0.len() <= 1));
    }

    proptest! {
        /// Whatever the order of requests, a segment carries its bandwidth and no more.
        #[test]
        fn a_segment_is_never_busy_twice(requests in prop::collection::vec((0u64..50, 0u64..20), 1..40)) {
            let mut busy = Busy::default();
            for &(ready, time) in &requests {
                let end = busy.take(ms(ready), ms(time));
                prop_assert!(end >= ms(ready) + ms(time));
            }
            let total: Duration = busy.0.iter().map(|(start, end)| *end - *start).sum();
            prop_assert_eq!(total, requests.iter().map(|r| ms(r.1)).sum::<Duration>());
            let bounds: Vec<_> = busy.0.iter().collect();
            prop_assert!(bounds.windows(2).all(|w| w[0].1 < w[1].0));
        }
    }
}
