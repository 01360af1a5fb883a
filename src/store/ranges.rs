//! How the parts of an object that are wanted become ranges to ask for.

use std::ops::Range;

use crate::transfer::ReadPart;

/// The sizes of a range. Clients of object stores get their speed from many ranges of some MiB at a time: smaller ones cost more
/// requests, larger ones keep fewer of them busy.
pub(super) const SMALLEST: u64 = 4 << 20;
const LARGEST: u64 = 8 << 20;

/// Bytes between two parts that are asked for with them and dropped. They arrive sooner than the answer to another request.
const GAP: u64 = 32 << 10;

/// A range of an object, and which parts have bytes in it.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) range: Range<u64>,
    /// Indexes of parts, in order of their offsets.
    pub(super) parts: Range<usize>,
}

/// The ranges that have all bytes of `parts`, which are in order of their offsets and not empty. `in_flight` of them are asked for at a
/// time.
pub(super) fn ranges(parts: &[ReadPart<'_>], in_flight: usize) -> Vec<Wanted> {
    let end = |part: &ReadPart<'_>| part.at + part.dst.len() as u64;
    // Parts that follow each other, or nearly so.
    let mut runs: Vec<Range<u64>> = Vec::new();
    for part in parts {
        match runs.last_mut() {
            Some(run) if part.at <= run.end.saturating_add(GAP) => run.end = run.end.max(end(part)),
            _ => runs.push(part.at..end(part)),
        }
    }
    let total: u64 = runs.iter().map(|run| run.end - run.start).sum();
    let size = (total / in_flight.max(1) as u64).clamp(SMALLEST, LARGEST);
    let (mut wanted, mut first) = (Vec::new(), 0);
    for run in runs {
        // Of equal sizes, so that none ends long after the others.
        let count = (run.end - run.start).div_ceil(size).max(1);
        let size = (run.end - run.start).div_ceil(count);
        for start in (run.start..run.end).step_by(usize::try_from(size).unwrap_or(usize::MAX)) {
            let range = start..run.end.min(start + size);
            first += parts[first..].iter().take_while(|part| end(part) <= range.start).count();
            let last = parts.partition_point(|part| part.at < range.end);
            wanted.push(Wanted { range, parts: first..last });
        }
    }
    wanted
}

/// Copies bytes of the object from offset `at` on to where they belong in `parts`.
pub(super) fn scatter(parts: &mut [ReadPart<'_>], at: u64, bytes: &[u8]) {
    let end = at + bytes.len() as u64;
    for part in parts.iter_mut().take_while(|part| part.at < end) {
        let (begin, upto) = (part.at.max(at), (part.at + part.dst.len() as u64).min(end));
        if begin < upto {
            let to = (begin - part.at) as usize..(upto - part.at) as usize;
            part.dst[to].copy_from_slice(&bytes[(begin - at) as usize..(upto - at) as usize]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes(parts: &[(u64, usize)], in_flight: usize) -> Vec<(Range<u64>, Range<usize>)> {
        let mut bytes: Vec<Vec<u8>> = parts.iter().map(|&(_, len)| vec![0; len]).collect();
        let parts: Vec<ReadPart<'_>> =
            parts.iter().zip(&mut bytes).map(|(&(at, _), bytes)| ReadPart::new(at, bytes)).collect();
        ranges(&parts, in_flight).into_iter().map(|wanted| (wanted.range, wanted.parts)).collect()
    }

    #[test]
    fn what_is_close_is_asked_for_together_and_what_is_large_in_parts() {
        assert_eq!(sizes(&[], 32), []);
        assert_eq!(sizes(&[(8, 10), (18, 1), (19 + GAP, 5)], 32), [(8..24 + GAP, 0..3)]);
        assert_eq!(sizes(&[(8, 10), (19 + GAP, 5)], 32), [(8..18, 0..1), (19 + GAP..24 + GAP, 1..2)]);
        // Two parts want the same bytes.
        assert_eq!(sizes(&[(0, 100), (10, 20), (40, 100)], 32), [(0..140, 0..3)]);
        let large = sizes(&[(0, 10 << 20), (10 << 20, 10 << 20)], 32);
        assert_eq!(large.len(), 5);
        assert!(large.iter().all(|(range, _)| range.end - range.start == 4 << 20), "{large:?}");
        assert_eq!(large[2].1, 0..2);
        assert_eq!(sizes(&[(0, 64 << 20)], 2).len(), 8);
    }

    proptest! {
        #[test]
        fn every_byte_arrives_where_it_is_wanted(
            mut places in proptest::collection::vec((0u64..200_000, 1usize..100_000), 1..12),
            in_flight in 1usize..40,
        ) {
            places.sort();
            let object: Vec<u8> = (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let mut bytes: Vec<Vec<u8>> = places.iter().map(|&(_, len)| vec![0; len]).collect();
            let mut parts: Vec<ReadPart<'_>> =
                places.iter().zip(&mut bytes).map(|(&(at, _), bytes)| ReadPart::new(at, bytes)).collect();
            let mut before = 0;
            for Wanted { range, parts: of } in ranges(&parts, in_flight) {
                prop_assert!(before <= range.start && range.start < range.end);
                before = range.end;
                // As it arrives.
                for start in (range.start..range.end).step_by(7_777) {
                    let end = range.end.min(start + 7_777);
                    scatter(&mut parts[of.clone()], start, &object[start as usize..end as usize]);
                }
            }
            for (&(at, len), bytes) in places.iter().zip(&bytes) {
                prop_assert!(bytes[..] == object[at as usize..at as usize + len]);
            }
        }
    }
}
