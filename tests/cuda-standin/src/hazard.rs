//! Who may touch which bytes when: vector clocks over the streams and the host, and per range of memory the
//! accesses that later ones must be ordered after.
//!
//! Everything that orders work is known when it is enqueued (the stream's own order, a wait for an event, what the
//! host has waited for), so the checks are made then and never depend on how fast the workers happen to run.

use std::collections::BTreeMap;
use std::ops::Range;

/// For each stream (by its lane number) how much of it is known to have happened before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, lane: u32) -> u64 {
        self.0.get(lane as usize).copied().unwrap_or(0)
    }

    /// Says that this lane is now at `epoch`.
    pub(crate) fn set(&mut self, lane: u32, epoch: u64) {
        let lane = lane as usize;
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] = epoch;
    }

    /// Takes in all that the other one knows.
    pub(crate) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Whether the stamped access happened before what this clock stands for.
    pub(crate) fn covers(&self, stamp: &Stamp) -> bool {
        self.get(stamp.lane) >= stamp.epoch
    }
}

/// One piece of work of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) lane: u32,
    pub(crate) epoch: u64,
    /// The call that enqueued it.
    pub(crate) call: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// An access that is not ordered with the new one, and at least one of the two writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub(crate) with: Stamp,
    pub(crate) access: Access,
    /// The access was to a former life of the memory, before it was freed and handed out again.
    pub(crate) former: bool,
    pub(crate) at: u64,
}

#[derive(Clone, Debug, Default)]
struct Segment {
    end: u64,
    write: Option<Stamp>,
    reads: Vec<Stamp>,
    former: bool,
}

impl Segment {
    fn stamps(&self) -> impl Iterator<Item = (&Stamp, Access)> {
        let reads = self.reads.iter().map(|stamp| (stamp, Access::Read));
        self.write.iter().map(|stamp| (stamp, Access::Write)).chain(reads)
    }

    fn conflict(&self, access: Access, clock: &Clock, at: u64) -> Option<Conflict> {
        self.stamps()
            .filter(|(_, other)| access == Access::Write || *other == Access::Write)
            .find(|(stamp, _)| !clock.covers(stamp))
            .map(|(stamp, other)| Conflict { with: *stamp, access: other, former: self.former, at })
    }
}

/// The accesses to one allocation that later ones must be ordered after, in disjoint segments.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    segments: BTreeMap<u64, Segment>,
}

impl History {
    /// Checks an access to a range by work whose clock is given (the work's own stamp included), and remembers it.
    pub(crate) fn access(
        &mut self,
        range: Range<u64>,
        access: Access,
        stamp: Stamp,
        clock: &Clock,
    ) -> Option<Conflict> {
        if range.is_empty() {
            return None;
        }
        self.split(range.start);
        self.split(range.end);
        let conflict = self.segments.range(range.clone()).find_map(|(&at, seg)| seg.conflict(access, clock, at));
        match access {
            Access::Write => self.overwrite(range, stamp),
            Access::Read => self.add_read(range, stamp, clock),
        }
        conflict
    }

    /// The first access that has not happened before what the clock stands for.
    pub(crate) fn unordered(&self, clock: &Clock) -> Option<Conflict> {
        self.segments.iter().find_map(|(&at, seg)| seg.conflict(Access::Write, clock, at))
    }

    /// The stamps of the writes (and, if asked, the reads) to a range.
    pub(crate) fn stamps(&self, range: Range<u64>, reads_too: bool) -> Vec<Stamp> {
        let first = self.segments.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        self.segments
            .range(first..range.end)
            .filter(|(_, seg)| seg.end > range.start)
            .flat_map(|(_, seg)| seg.stamps())
            .filter(|(_, access)| reads_too || *access == Access::Write)
            .map(|(stamp, _)| *stamp)
            .collect()
    }

    /// The ranges that were written.
    pub(crate) fn written(&self) -> Vec<Range<u64>> {
        self.segments.iter().filter(|(_, seg)| seg.write.is_some()).map(|(&start, seg)| start..seg.end).collect()
    }

    /// What the next owner of this memory has to be ordered after: all that is not covered by the clock.
    pub(crate) fn residue(&self, clock: &Clock) -> History {
        let open = |seg: &Segment| seg.conflict(Access::Write, clock, 0).is_some();
        let mut segments = self.segments.clone();
        segments.retain(|_, seg| open(seg));
        for seg in segments.values_mut() {
            seg.former = true;
        }
        History { segments }
    }

    fn split(&mut self, at: u64) {
        let Some((_, seg)) = self.segments.range_mut(..at).next_back() else { return };
        if seg.end > at {
            let right = seg.clone();
            seg.end = at;
            self.segments.insert(at, right);
        }
    }

    fn overwrite(&mut self, range: Range<u64>, stamp: Stamp) {
        let covered: Vec<u64> = self.segments.range(range.clone()).map(|(&start, _)| start).collect();
        for start in covered {
            self.segments.remove(&start);
        }
        let segment = Segment { end: range.end, write: Some(stamp), reads: Vec::new(), former: false };
        self.segments.insert(range.start, segment);
    }

    fn add_read(&mut self, range: Range<u64>, stamp: Stamp, clock: &Clock) {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for (&start, seg) in self.segments.range_mut(range.clone()) {
            if at < start {
                gaps.push(at..start);
            }
            at = seg.end;
            // What happened before this read, any later writer is ordered after by being ordered after this one.
            seg.reads.retain(|earlier| !clock.covers(earlier));
            seg.reads.push(stamp);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        for gap in gaps {
            self.segments.insert(gap.start, Segment { end: gap.end, reads: vec![stamp], ..Segment::default() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(lane: u32, epoch: u64) -> Stamp {
        Stamp { lane, epoch, call: "test" }
    }

    fn clock(of: &[u64]) -> Clock {
        Clock(of.to_vec())
    }

    #[test]
    fn two_streams_without_an_order_conflict_where_they_overlap() {
        let mut history = History::default();
        assert_eq!(history.access(0..100, Access::Write, stamp(0, 1), &clock(&[1])), None);
        let conflict = history.access(50..150, Access::Read, stamp(1, 1), &clock(&[0, 1])).unwrap();
        assert_eq!((conflict.with, conflict.access, conflict.at), (stamp(0, 1), Access::Write, 50));
        assert_eq!(history.access(150..160, Access::Write, stamp(2, 1), &clock(&[0, 0, 1])), None);
    }

    #[test]
    fn a_joined_clock_is_an_order() {
        let mut history = History::default();
        history.access(0..100, Access::Write, stamp(0, 1), &clock(&[1]));
        assert_eq!(history.access(0..100, Access::Read, stamp(1, 1), &clock(&[1, 1])), None);
        assert_eq!(history.access(0..10, Access::Read, stamp(2, 1), &clock(&[1, 0, 1])), None);
        let conflict = history.access(5..6, Access::Write, stamp(0, 2), &clock(&[2, 1])).unwrap();
        assert_eq!(conflict.with, stamp(2, 1));
        assert_eq!(history.access(20..30, Access::Write, stamp(0, 3), &clock(&[3, 1])), None);
    }

    #[test]
    fn the_residue_is_what_the_clock_does_not_cover() {
        let mut history = History::default();
        history.access(0..10, Access::Write, stamp(0, 1), &clock(&[1]));
        history.access(10..20, Access::Read, stamp(1, 1), &clock(&[0, 1]));
        assert!(history.unordered(&clock(&[1, 1])).is_none());
        let mut later = history.residue(&clock(&[1, 0]));
        assert!(later.access(0..10, Access::Write, stamp(2, 1), &clock(&[0, 0, 1])).is_none());
        assert!(later.access(0..20, Access::Write, stamp(2, 2), &clock(&[0, 0, 2])).unwrap().former);
    }

    #[test]
    fn stamps_name_the_writers_of_a_range() {
        let mut history = History::default();
        history.access(0..100, Access::Write, stamp(0, 1), &clock(&[1]));
        history.access(40..60, Access::Write, stamp(0, 2), &clock(&[2]));
        assert_eq!(history.stamps(45..50, false), vec![stamp(0, 2)]);
        assert_eq!(history.stamps(10..50, false).len(), 2);
        assert_eq!(history.written(), vec![0..40, 40..60, 60..100]);
    }
}
