//! Chunks of layers whose bytes go through buffers on the host, because the compute device cannot read them. Each chunk uses
//! one of a few buffers in turn.

use std::ops::Range;

use super::contents::Slice;
use crate::limits::STAGING_BYTES;

/// Byte ranges that share a buffer, one after the other.
pub(crate) type Chunk = Vec<Slice>;

/// Splits slices into chunks that each fit one buffer.
pub(crate) fn chunks(slices: &[Slice]) -> Vec<Chunk> {
    let slice = |(index, range): (usize, Range<usize>)| {
        let whole: &Slice = &slices[index];
        Slice { module: whole.module, at: whole.at + range.start - whole.range.start, range }
    };
    let ranges = slices.iter().map(|slice| slice.range.clone());
    split(ranges, STAGING_BYTES).into_iter().map(|chunk| chunk.into_iter().map(slice).collect()).collect()
}

/// Splits byte ranges into groups of `most` bytes, the last of fewer; for each byte range the index of the one that it is a
/// part of. `most` is at least one.
pub(crate) fn split(ranges: impl IntoIterator<Item = Range<usize>>, most: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let (mut groups, mut room) = (Vec::<Vec<_>>::new(), 0);
    for (index, range) in ranges.into_iter().enumerate() {
        let mut begin = range.start;
        while begin < range.end {
            if room == 0 {
                groups.push(Vec::new());
                room = most;
            }
            let end = range.end.min(begin + room);
            if let Some(group) = groups.last_mut() {
                group.push((index, begin..end));
            }
            (room, begin) = (room - (end - begin), end);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    #[test]
    fn groups_are_full_but_for_the_last() {
        let split = |ranges: &[(usize, usize)]| super::split(ranges.iter().map(|&(begin, end)| begin..end), 8);
        let wanted = [vec![(0, 0..8)], vec![(0, 8..10), (1, 40..45), (2, 3..4)], vec![(2, 4..5)]];
        assert_eq!(split(&[(0, 10), (40, 45), (3, 5)]), wanted);
        assert_eq!(split(&[(7, 7)]), [[]; 0]);
    }
}
