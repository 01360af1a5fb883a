//! Time that is counted and not kept: when each piece of work would begin and end if processors took no time. All that
//! decides it is known when work is enqueued, so it does not depend on when the work really runs.
//!
//! Work begins after the piece before it in its stream, after the events that its stream waited for, no earlier than the
//! latest end that the calling thread has seen, and, when it is a copy, where its link is free for as long as it takes.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Link;
use crate::pace::Engine;

thread_local! {
    /// The latest end that this thread has seen, and in which world.
    static SEEN: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Counted nanoseconds of a world: when its links are taken, and what was counted so far.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    world: u64,
    links: HashMap<Engine, Bookings>,
    /// No work begins earlier.
    floor: u64,
    /// The end of the last piece of work.
    end: u64,
}

impl Counting {
    pub(crate) fn new(world: u64) -> Counting {
        Counting { world, ..Counting::default() }
    }

    /// When work of the calling thread may begin at the earliest.
    pub(crate) fn earliest(&self) -> u64 {
        let (world, seen) = SEEN.get();
        if world == self.world { seen.max(self.floor) } else { self.floor }
    }

    /// The calling thread has seen that what ends then is over.
    pub(crate) fn saw(&self, end: u64) {
        let earliest = self.earliest();
        SEEN.set((self.world, earliest.max(end)));
    }

    /// When a copy over a link ends that could begin at `ready`: it takes the first time that is free for long enough.
    pub(crate) fn copy(&mut self, engine: Engine, link: Link, bytes: usize, ready: u64) -> u64 {
        self.links.entry(engine).or_default().book(ready, link.nanos(bytes))
    }

    /// Takes in the end of a piece of work.
    pub(crate) fn ends(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    /// The end of the last piece of work, which no later work begins before.
    pub(crate) fn mark(&mut self) -> u64 {
        self.floor = self.end;
        self.end
    }

    pub(crate) fn told(&self) -> Counted {
        let busy = |(engine, taken): (&Engine, &Bookings)| (engine.to_string(), taken.busy);
        Counted { end_nanos: self.end, busy_nanos: self.links.iter().map(busy).collect() }
    }
}

/// Counted time so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Counted {
    /// The end of the last piece of work, in nanoseconds.
    pub end_nanos: u64,
    /// For each link that was used (`to device 0`, `from device 0`, `device 0 to device 1`) how long, in nanoseconds.
    pub busy_nanos: BTreeMap<String, u64>,
}

impl Counted {
    /// The end of the last piece of work.
    pub fn end(&self) -> Duration {
        Duration::from_nanos(self.end_nanos)
    }

    /// How long a link was used.
    pub fn busy(&self, link: &str) -> Duration {
        Duration::from_nanos(self.busy_nanos.get(link).copied().unwrap_or(0))
    }
}

/// When a link is taken.
#[derive(Debug, Default)]
struct Bookings {
    /// From when until when, in order and apart.
    taken: Vec<(u64, u64)>,
    busy: u64,
}

impl Bookings {
    /// Takes the first gap of this length from `ready` on; its end.
    fn book(&mut self, ready: u64, nanos: u64) -> u64 {
        let mut place = self.taken.partition_point(|&(_, end)| end < ready);
        let mut begin = ready;
        while let Some(&(next, end)) = self.taken.get(place).filter(|(next, _)| *next < begin.saturating_add(nanos)) {
            begin = begin.max(end);
            debug_assert!(next <= end, "stretches have a length");
            place += 1;
        }
        let end = begin.saturating_add(nanos);
        self.busy = self.busy.saturating_add(nanos);
        if nanos > 0 {
            self.taken.insert(place, (begin, end));
            self.join(place + 1);
            self.join(place);
        }
        end
    }

    /// Makes one of a stretch and the one before it where they touch.
    fn join(&mut self, place: usize) {
        if place > 0 && place < self.taken.len() && self.taken[place - 1].1 == self.taken[place].0 {
            self.taken[place - 1].1 = self.taken[place].1;
            self.taken.remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_take_the_first_gap_that_is_long_enough() {
        let mut link = Bookings::default();
        assert_eq!(link.book(0, 10), 10);
        assert_eq!(link.book(20, 10), 30);
        assert_eq!(link.book(0, 11), 41, "the gap is one too short");
        assert_eq!(link.book(5, 4), 14);
        assert_eq!(link.book(0, 6), 20);
        assert_eq!((&link.taken[..], link.busy), (&[(0, 41)][..], 41));
        assert_eq!(link.book(100, 0), 100);
        assert_eq!(link.book(50, 1), 51);
        assert_eq!(link.taken, [(0, 41), (50, 51)]);
    }

    #[test]
    fn a_thread_has_seen_what_it_saw_itself_in_its_world() {
        let mut counting = Counting::new(7);
        counting.saw(40);
        counting.saw(30);
        assert_eq!(counting.earliest(), 40);
        std::thread::scope(|scope| scope.spawn(|| assert_eq!(counting.earliest(), 0)).join().unwrap());
        counting.ends(50);
        assert_eq!((counting.mark(), counting.earliest()), (50, 50));
        assert_eq!(Counting::new(8).earliest(), 0);
    }
}
