//! What mode auto's search (`auto`) tries next, and which of two results it prefers: functions of numbers alone.

use std::time::Duration;

use super::split::Donor;

/// A candidate replaces an earlier one only if it is faster by more than one part in this many.
const WORTH: u32 = 1000;

/// Slot sizes are tried in steps of the largest layer over this many: the first few that are useful.
const SLOT_STEPS: u64 = 32;
const SLOT_SIZES: usize = 5;

/// The smallest slot size is found to the largest layer over this many.
const SLOT_PRECISION: u64 = 512;

/// Whether a pass of `time` is so much shorter than one of `best` that it is preferred. Of times that are about equal, the
/// first stays.
pub(super) fn is_worth(time: Duration, best: Duration) -> bool {
    time.saturating_add(time / WORTH) < best
}

/// The slot sizes to try for layers of at most `largest` bytes, where `fits` says whether the compute device has room for
/// slots of a size and what is kept resident for it. The first is the smallest, which keeps the most resident; the others are
/// the steps above it.
pub(super) fn slot_sizes(largest: u64, fits: impl Fn(u64) -> bool) -> Vec<u64> {
    let step = largest / SLOT_STEPS;
    let mut sizes: Vec<u64> = (1..SLOT_STEPS).map(|n| step * n).filter(|&size| fits(size)).collect();
    if let Some(&first) = sizes.first() {
        let (mut low, mut high) = (first - step, first);
        while high - low > (largest / SLOT_PRECISION).max(1) {
            let middle = low.midpoint(high);
            if fits(middle) { high = middle } else { low = middle }
        }
        sizes.insert(0, high);
    }
    sizes.dedup();
    sizes.truncate(SLOT_SIZES);
    sizes
}

/// The shares that differ from `shares` by one piece, as far as the donors have `rooms`: for each two donors, a piece is moved
/// from one to the other. A piece is all shares together over `pieces`, or what the one has or the other has room for.
pub(super) fn moved(shares: &[u64], rooms: &[u64], pieces: u64) -> Vec<Vec<u64>> {
    let piece = shares.iter().sum::<u64>() / pieces;
    let pairs = (0..shares.len()).flat_map(|from| (0..shares.len()).map(move |to| (from, to)));
    let moved = |(from, to): (usize, usize)| {
        let bytes = piece.min(shares[from]).min(rooms[to].saturating_sub(shares[to]));
        let mut shares = shares.to_vec();
        shares[from] -= bytes;
        shares[to] += bytes;
        (from != to && bytes > 0).then_some(shares)
    };
    pairs.filter_map(moved).collect()
}

/// The search for a quota of the compute device.
#[derive(Debug)]
pub(super) struct Quota {
    /// The quota to try next.
    pub(super) next: u64,
    /// The largest quota known to fit.
    low: Option<u64>,
    /// The smallest quota that does not fit or must not be tried.
    high: Option<u64>,
}

impl Quota {
    /// A search from `most` down to what fits.
    pub(super) fn most(most: u64) -> Quota {
        Quota { next: most, low: None, high: None }
    }

    /// As [`most`](Quota::most), without raising the first quota that fits.
    pub(super) fn at_most(most: u64) -> Quota {
        Quota { next: most, low: None, high: Some(most.saturating_add(1)) }
    }

    /// Records that the quota fits, and that `beside` bytes would fit beside the slots. Returns whether to try another.
    pub(super) fn fits(&mut self, beside: u64) -> bool {
        let low = self.next;
        self.low = Some(low);
        self.next = match self.high {
            None => beside,
            Some(high) if beside > low => beside.min(high - 1),
            Some(high) => low.midpoint(high),
        };
        self.gains()
    }

    /// Records that the quota does not fit. Its plan holds `held` bytes; `beside` bytes would fit beside its slots.
    pub(super) fn is_too_much(&mut self, beside: u64, held: u64) -> bool {
        let high = self.next;
        self.high = Some(high);
        self.next = match self.low {
            Some(low) => low.midpoint(high),
            None => beside.min(held.saturating_sub(1)).min(high.saturating_sub(1)),
        };
        high > 0 && self.gains()
    }

    /// Whether the next quota gains enough to be tried.
    fn gains(&self) -> bool {
        self.low.is_none_or(|low| self.next > low + low / u64::from(WORTH))
    }
}

/// The donor that takes whatever is left. Whole modules seldom fill a quota, so it must have room: one of the donors that get
/// something anyway, if it has room for `unit` more bytes.
pub(super) fn takes_rest(donors: &[Donor], shares: &[u64], unit: u64) -> Option<usize> {
    let spare = |donor: &usize| donors[*donor].room.saturating_sub(shares[*donor]);
    let usable = (0..shares.len()).filter(|&donor| donors[donor].room > 0);
    let roomy = usable.clone().filter(|donor| shares[*donor] > 0 && spare(donor) >= unit);
    roomy.max_by_key(spare).or_else(|| usable.max_by_key(spare))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceId, DeviceInfo, Machine, Topology};

    /// The smallest size to one part in 512, and four steps of one part in 32 above it.
    #[test]
    fn the_smallest_slots_that_fit_are_tried_and_a_few_larger_ones() {
        // Steps of 160; the smallest to 10.
        assert_eq!(slot_sizes(5_120, |size| size >= 1_003), [1_010, 1_120, 1_280, 1_440, 1_600]);
        // With more slots, large ones do not fit.
        assert_eq!(slot_sizes(5_120, |size| (1_003..1_300).contains(&size)), [1_010, 1_120, 1_280]);
        assert_eq!(slot_sizes(5_120, |size| size >= 4_960), [4_960]);
        assert_eq!(slot_sizes(5_120, |size| size > 4_960), [0; 0]);
        // Everything but a few bytes may be kept.
        assert_eq!(slot_sizes(5_120, |_| true), [10, 160, 320, 480, 640]);
        // Nor does the search for bytes go on below one.
        assert_eq!(slot_sizes(256, |size| size >= 3), [3, 8, 16, 24, 32]);
        assert_eq!(slot_sizes(0, |_| true), [0]);
    }

    #[test]
    fn a_piece_moves_from_each_donor_to_each_other_that_has_room() {
        let free = u64::MAX;
        assert_eq!(moved(&[100, 60], &[free, free], 16), [[90, 70], [110, 50]]);
        // No more than there is, and than there is room for.
        assert_eq!(moved(&[155, 5], &[free, free], 16), [[145, 15], [160, 0]]);
        assert_eq!(moved(&[100, 60], &[free, 63], 16), [[97, 63], [110, 50]]);
        assert_eq!(moved(&[160, 0], &[160, 4], 16), [[156, 4]]);
        // Nothing to move, or no room.
        assert_eq!(moved(&[100, 60], &[100, 60], 16), [[0u64; 2]; 0]);
        assert_eq!(moved(&[160], &[free], 16), [[0u64; 1]; 0]);
        assert_eq!(
            moved(&[100, 0, 60], &[100, free, 70], 16),
            [[90, 10, 60], [90, 0, 70], [100, 10, 50]],
            "the first has no room, and the second has nothing"
        );
    }

    /// More than one part in a thousand is worth another plan, and an equal time is not.
    #[test]
    fn of_about_equal_times_the_first_stays() {
        let nanos = Duration::from_nanos;
        let best = nanos(1_001_000);
        let worth = [999_999, 1_000_000, 1_001_000, 2_000_000].map(|time| is_worth(nanos(time), best));
        assert_eq!(worth, [true, false, false, false]);
        assert!(!is_worth(Duration::ZERO, Duration::ZERO));
        assert!(!is_worth(Duration::MAX, Duration::MAX));
        assert!(is_worth(Duration::ZERO, nanos(1)));
    }

    #[test]
    fn a_quota_is_lowered_until_it_fits_and_then_raised() {
        let mut quota = Quota::most(1_000);
        // The slots leave 800; what the plan holds is lowered at least by a byte.
        assert!(quota.is_too_much(800, 900) && quota.next == 800);
        assert!(quota.is_too_much(790, 700) && quota.next == 699);
        // It fits with more beside its slots: up to what did not fit.
        assert!(quota.fits(750) && quota.next == 750);
        assert!(quota.fits(5_000) && quota.next == 799);
        // No more beside the slots: half the way.
        let mut quota = Quota { next: 600, low: None, high: Some(800) };
        assert!(quota.fits(600) && quota.next == 700);
        assert!(quota.is_too_much(600, 650) && quota.next == 650);
    }

    #[test]
    fn a_quota_that_fits_at_once_is_raised_to_what_fits_beside_its_slots() {
        let mut quota = Quota::most(100);
        assert!(quota.fits(120) && quota.next == 120);
        assert!(!quota.fits(120));
        // No further than asked.
        let mut quota = Quota::at_most(100);
        assert!(!quota.fits(200) && quota.next == 100);
        let mut nothing = Quota::most(0);
        assert!(!nothing.is_too_much(0, 0));
    }

    /// More than one part in a thousand is worth another plan.
    #[test]
    fn a_quota_is_not_raised_for_little() {
        let gains = |next| Quota { next, low: Some(1_000_000), high: None }.gains();
        assert_eq!([999_000, 1_000_000, 1_001_000, 1_001_001].map(gains), [false, false, false, true]);
        assert!(Quota { next: 0, low: None, high: Some(1) }.gains());
    }

    #[test]
    fn the_rest_goes_to_a_donor_with_room() {
        let machine = |rooms: &[u64]| {
            let devices = rooms.iter().zip(1..).map(|(&room, n)| DeviceInfo::new(DeviceId::cuda(n), room));
            let devices = devices.chain([DeviceInfo::new(DeviceId::cuda(0), 1)]);
            Machine::new(devices, Topology::new())
        };
        let rest =
            |rooms: &[u64], shares: &[u64]| takes_rest(&Donor::all(&machine(rooms), DeviceId::cuda(0), 0), shares, 5);
        // Of those that get something, the one with the most room left.
        assert_eq!(rest(&[10, 20, 90], &[5, 5, 0]), Some(1));
        assert_eq!(rest(&[10, 90], &[5, 0]), Some(0));
        // Too little room for a module more.
        assert_eq!(rest(&[9, 90], &[5, 0]), Some(1));
        assert_eq!(rest(&[0, 0], &[0, 0]), None);
    }
}
