//! What the lanes of a warp do together: numbers that they take from each other, and the order of what they read and write.

use std::collections::HashMap;

use crate::ptx_op::From;

/// The lanes of a warp.
pub(crate) const LANES: usize = 32;

/// The lane that a lane takes a number from, and whether there is one; else it is the lane itself (`shfl.sync` of PTX).
pub(crate) fn source(from: From, lane: u32, by: u32, limits: u32) -> (u32, bool) {
    let (by, last, part) = (by & 31, limits & 31, limits >> 8 & 31);
    let (lowest, highest) = (lane & part, lane & part | last & !part);
    let (other, found) = match from {
        // The limit is the lowest lane here.
        From::Below => (lane.wrapping_sub(by), lane as i64 - i64::from(by) >= i64::from(highest)),
        From::Lane => (lowest | by & !part, lowest | by & !part <= highest),
        From::Partner => (lane ^ by, lane ^ by <= highest),
    };
    if found { (other, true) } else { (lane, false) }
}

/// Who used a byte last: thread of the launch, counted from 1, and the barriers that its warp had passed.
#[derive(Clone, Copy, Default)]
struct Used {
    wrote: u64,
    wrote_in: u32,
    /// [`SEVERAL`] where more than one thread did.
    read: u64,
    read_in: u32,
}

const SEVERAL: u64 = u64::MAX;

/// A thread at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// The number in the launch.
    pub(crate) thread: u64,
    /// The barriers that its warp has passed.
    pub(crate) barriers: u32,
}

/// Who used which bytes of global memory in a launch whose lanes work together. Only a barrier of its warp is an order between two
/// threads.
#[derive(Default)]
pub(crate) struct Uses {
    bytes: HashMap<u64, [Used; UNIT as usize]>,
}

/// The bytes that are kept together.
const UNIT: u64 = 8;

impl Used {
    /// Whether a use by `thread` in a barrier's interval is unordered with that of another.
    fn races(thread: u64, barriers: u32, turn: Turn) -> bool {
        let same_warp = |other: u64| (other - 1) / LANES as u64 == turn.thread / LANES as u64;
        thread != 0
            && thread != turn.thread + 1
            && (thread == SEVERAL || !same_warp(thread) || barriers == turn.barriers)
    }
}

impl Uses {
    /// A thread reads, or `writes`, bytes. Fails if another one uses one of them with no order between, and one of both writes.
    pub(crate) fn note(&mut self, turn: Turn, address: u64, count: u64, writes: bool) -> Result<(), ()> {
        for at in address..address + count {
            let used = &mut self.bytes.entry(at / UNIT).or_default()[(at % UNIT) as usize];
            let reads_race = writes && Used::races(used.read, used.read_in, turn);
            if Used::races(used.wrote, used.wrote_in, turn) || reads_race {
                return Err(());
            }
            if writes {
                (used.wrote, used.wrote_in) = (turn.thread + 1, turn.barriers);
            } else {
                let others = used.read != 0 && used.read != turn.thread + 1;
                (used.read, used.read_in) = (if others { SEVERAL } else { turn.thread + 1 }, turn.barriers);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_take_from_those_that_are_there() {
        let all = |from, by, limits| [0, 5, 31].map(|lane| source(from, lane, by, limits));
        assert_eq!(all(From::Below, 1, 0), [(0, false), (4, true), (30, true)]);
        assert_eq!(all(From::Below, 16, 0), [(0, false), (5, false), (15, true)]);
        assert_eq!(all(From::Lane, 31, 31), [(31, true); 3]);
        assert_eq!(all(From::Partner, 16, 31), [(16, true), (21, true), (15, true)]);
        // Parts of eight lanes.
        assert_eq!(all(From::Lane, 9, 0x181f), [(1, true), (1, true), (25, true)]);
        assert_eq!(source(From::Below, 8, 1, 0x1800), (8, false));
    }

    #[test]
    fn only_a_barrier_of_the_warp_orders_two_threads() {
        let turn = |thread, barriers| Turn { thread, barriers };
        let mut uses = Uses::default();
        assert_eq!(uses.note(turn(3, 0), 100, 16, true), Ok(()));
        assert_eq!(uses.note(turn(3, 0), 104, 2, false), Ok(()));
        assert_eq!(uses.note(turn(4, 0), 116, 4, true), Ok(()), "next to it");
        assert_eq!(uses.note(turn(5, 0), 104, 2, false), Err(()));
        assert_eq!(uses.note(turn(5, 0), 114, 4, true), Err(()));
        assert_eq!(uses.note(turn(5, 1), 104, 2, false), Ok(()));
        assert_eq!(uses.note(turn(6, 1), 104, 2, false), Ok(()));
        assert_eq!(uses.note(turn(5, 1), 104, 2, true), Err(()), "two read it");
        assert_eq!(uses.note(turn(40, 1), 108, 1, false), Err(()), "another warp");
    }
}
