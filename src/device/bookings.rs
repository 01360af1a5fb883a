//! The busy times of a topology's segments.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Topology;

/// The busy times of each segment of a topology. Transfers are booked first come, first served. A transfer that may start
/// early fills the gaps before others that were booked far ahead.
#[derive(Debug)]
pub(crate) struct Bookings(Vec<Busy>);

impl Bookings {
    /// Empty bookings for the segments of `topology`.
    pub(crate) fn of(topology: &Topology) -> Bookings {
        Bookings(topology.segments().iter().map(|_| Busy::default()).collect())
    }

    /// Books a transfer of `bytes` that may start at `ready` across the segments of `route`. Returns the time of its
    /// completion. The transfer starts once every segment has a free moment, and then fills each segment's gaps at that
    /// segment's speed.
    pub(crate) fn transfer(&mut self, topology: &Topology, route: &[usize], bytes: u64, ready: Duration) -> Duration {
        let start = route.iter().map(|&s| self.0[s].first_free(ready)).fold(ready, Duration::max);
        let take = |&s: &usize| self.0[s].take(start, topology.segments()[s].bandwidth.time(bytes));
        route.iter().map(take).fold(start, Duration::max)
    }

    /// Forgets the busy times on `route` that ended by `past`. No later transfer may start before `past`.
    pub(crate) fn forget(&mut self, route: &[usize], past: Duration) {
        route.iter().for_each(|&s| self.0[s].forget(past));
    }

    /// Forgets all but the latest `most` busy intervals of each segment of `route`.
    pub(crate) fn keep_latest(&mut self, route: &[usize], most: usize) {
        for &segment in route {
            let Busy(busy) = &mut self.0[segment];
            while busy.len() > most {
                busy.pop_first();
            }
        }
    }

    /// The largest number of busy intervals of any segment.
    #[cfg(test)]
    pub(crate) fn intervals(&self) -> usize {
        self.0.iter().map(|busy| busy.0.len()).max().unwrap_or(0)
    }
}

/// The busy times of a segment: disjoint intervals, start -> end.
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

    /// Fills `time` of the gaps from `ready` on. Returns the end of the last interval filled.
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

    /// Forgets the intervals that ended by `past`.
    fn forget(&mut self, past: Duration) {
        while let Some(first) = self.0.first_entry()
            && *first.get() <= past
        {
            first.remove();
        }
    }

    /// Marks a free interval as busy and merges it with adjacent intervals.
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
    use proptest::prelude::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    proptest! {
        /// Whatever the order of requests, a segment is never booked twice at the same time.
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
