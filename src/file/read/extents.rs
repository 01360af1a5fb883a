//! Which parts of a file the page cache has.

use std::ops::Range;

/// The bytes that are asked about at a time where a range is in the page cache in part.
const GRAIN: u64 = 2 << 20;

/// Bytes that are read in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) bytes: usize,
    /// Whether the page cache has at least half of them. To read the rest through it then costs less than to read all directly:
    /// it copies some eight times as fast as a disk reads, and slows the disk to some six tenths.
    pub(crate) is_cached: bool,
}

/// Divides `len` bytes from `at` on by whether the page cache has them. `cached` tells how many bytes of a range it has; what it
/// does not know is read through the page cache.
pub(super) fn extents(at: u64, len: usize, cached: impl Fn(Range<u64>) -> Option<u64>) -> Vec<Extent> {
    let end = at + len as u64;
    let found = cached(at..end);
    let all = |is_cached| vec![Extent { bytes: len, is_cached }];
    match found {
        _ if len == 0 => return Vec::new(),
        None => return all(true),
        Some(0) => return all(false),
        Some(found) if found >= len as u64 => return all(true),
        Some(_) => {}
    }
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = at;
    while at < end {
        let next = (at / GRAIN + 1).saturating_mul(GRAIN).min(end);
        let is_cached = cached(at..next).is_none_or(|found| found.saturating_mul(2) >= next - at);
        // No more than `len`.
        let bytes = (next - at) as usize;
        match extents.last_mut() {
            Some(last) if last.is_cached == is_cached => last.bytes += bytes,
            _ => extents.push(Extent { bytes, is_cached }),
        }
        at = next;
    }
    extents
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_are_told_apart() {
        let grain = GRAIN as usize;
        let extent = |bytes, is_cached| Extent { bytes, is_cached };
        let cases: [(Option<u64>, _); 3] = [(None, true), (Some(0), false), (Some(u64::MAX), true)];
        for (found, is_cached) in cases {
            assert_eq!(extents(5, 3 * grain, |_| found), [extent(3 * grain, is_cached)]);
        }
        // The first two grains are cached, of the third a quarter.
        let cached = |range: Range<u64>| Some(range.end.min(2 * GRAIN + GRAIN / 4).saturating_sub(range.start));
        assert_eq!(extents(10, 4 * grain, cached), [extent(2 * grain - 10, true), extent(2 * grain + 10, false)]);
        assert_eq!(extents(0, 0, cached), []);
        let end = u64::MAX - GRAIN / 2;
        assert_eq!(extents(end, 100, |range| Some((range.end - range.start) / 2)), [extent(100, true)]);
    }

    proptest! {
        #[test]
        fn no_byte_is_left_out(
            at in 0u64..10 * GRAIN,
            len in 0usize..10 << 20,
            cached in prop::collection::vec(any::<bool>(), 16),
        ) {
            let has = |at: u64| cached[(at / GRAIN) as usize % 16];
            let count = |range: Range<u64>| {
                let mut bytes = 0;
                let mut at = range.start;
                while at < range.end {
                    let next = ((at / GRAIN + 1) * GRAIN).min(range.end);
                    bytes += if has(at) { next - at } else { 0 };
                    at = next;
                }
                Some(bytes)
            };
            let parts = extents(at, len, count);
            prop_assert_eq!(parts.iter().map(|part| part.bytes).sum::<usize>(), len);
            prop_assert!(parts.windows(2).all(|pair| pair[0].is_cached != pair[1].is_cached));
            let mut at = at;
            for part in parts {
                prop_assert_eq!(part.is_cached, has(at));
                prop_assert_eq!(part.is_cached, has(at + part.bytes as u64 - 1));
                at += part.bytes as u64;
            }
        }
    }
}
