//! Which bytes of a tensor a rank has.

use std::ops::Range;

use crate::dtype::DType;

/// The part of a tensor that a rank has: some ranges of the indices of one dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cut {
    pub(super) dimension: usize,
    /// In order; none is empty, and none meets the next.
    pub(super) ranges: Vec<Range<u64>>,
}

/// The bytes of a cut tensor among those of the whole: of each run of `stride` bytes the same `kept` ranges.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stretches {
    pub(super) stride: u64,
    pub(super) kept: Vec<Range<u64>>,
    /// The bytes of all `kept`.
    pub(super) width: u64,
}

impl Cut {
    /// Some ranges of the indices of a dimension, in order.
    #[cfg(test)]
    pub(crate) fn new(dimension: usize, ranges: Vec<Range<u64>>) -> Cut {
        Cut { dimension, ranges }
    }

    /// The indices of the dimension that are kept.
    fn count(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// The shape of what a rank has of a tensor of shape `whole`.
    pub(crate) fn shape(&self, whole: &[u64]) -> Vec<u64> {
        let mut shape = whole.to_vec();
        if let Some(dimension) = shape.get_mut(self.dimension) {
            *dimension = self.count();
        }
        shape
    }

    /// The bytes of the part in a tensor of shape `whole`. `None` if a range begins or ends within a block of the type.
    pub(crate) fn stretches(&self, whole: &[u64], dtype: DType) -> Option<Stretches> {
        let inner = whole.get(self.dimension..)?;
        let bytes = |count: u64| dtype.bytes_of(&[&[count], &inner[1..]].concat());
        let stride = bytes(inner[0])?;
        let mut kept: Vec<Range<u64>> = Vec::new();
        for range in &self.ranges {
            kept.push(bytes(range.start)?..bytes(range.end)?);
        }
        let width = kept.iter().map(|range| range.end - range.start).sum();
        Some(Stretches { stride, kept, width })
    }

    /// The dimension that is cut.
    pub(crate) fn dimension(&self) -> usize {
        self.dimension
    }

    /// The indices of the dimension that are kept, in order.
    pub(crate) fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

impl Stretches {
    /// The most bytes of the part that lie together in the whole.
    pub(super) fn longest(&self) -> u64 {
        self.kept.iter().map(|range| range.end - range.start).max().unwrap_or(0)
    }

    /// Calls `each` with the places in the whole of the bytes `part` of the part, in order: where they begin, and how many follow each
    /// other.
    pub(crate) fn each(&self, part: Range<u64>, mut each: impl FnMut(u64, u64)) {
        if self.width == 0 {
            return;
        }
        let (mut run, mut within) = (part.start / self.width, part.start % self.width);
        let mut left = part.end.saturating_sub(part.start);
        while left > 0 {
            for range in &self.kept {
                let len = range.end - range.start;
                if within >= len {
                    within -= len;
                    continue;
                }
                let here = (len - within).min(left);
                if here == 0 {
                    return;
                }
                each(run * self.stride + range.start + within, here);
                (within, left) = (0, left - here);
            }
            run += 1;
        }
    }

    /// Copies the part out of the whole.
    pub(crate) fn gather(&self, whole: &[u8], part: &mut [u8]) {
        let mut at = 0;
        self.each(0..part.len() as u64, |from, len| {
            let (from, len) = (from as usize, len as usize);
            part[at..at + len].copy_from_slice(&whole[from..from + len]);
            at += len;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(stretches: &Stretches, part: Range<u64>) -> Vec<(u64, u64)> {
        let mut places = Vec::new();
        stretches.each(part, |at, len| places.push((at, len)));
        places
    }

    #[test]
    fn rows_are_one_stretch_and_columns_one_for_each_row() {
        let rows = Cut { dimension: 0, ranges: vec![2..4] }.stretches(&[6, 3], DType::BF16).unwrap();
        assert_eq!(places(&rows, 0..12), [(12, 12)]);
        assert_eq!(places(&rows, 5..7), [(17, 2)]);
        let columns = Cut { dimension: 1, ranges: vec![1..2, 4..6] }.stretches(&[2, 6], DType::BF16).unwrap();
        assert_eq!(places(&columns, 0..12), [(2, 2), (8, 4), (14, 2), (20, 4)]);
        assert_eq!(places(&columns, 3..9), [(9, 3), (14, 2), (20, 1)]);
        assert_eq!(places(&columns, 4..4), []);
        let cut = Cut { dimension: 1, ranges: vec![1..2] };
        assert_eq!(cut.shape(&[2, 4, 5]), [2, 1, 5]);
        assert_eq!(places(&cut.stretches(&[2, 4, 5], DType::U8).unwrap(), 0..10), [(5, 5), (25, 5)]);
    }

    #[test]
    fn blocks_stay_whole() {
        let cut = |range| Cut { dimension: 1, ranges: vec![range] };
        assert!(cut(0..256).stretches(&[2, 512], DType::Q4_K).is_some());
        assert_eq!(cut(0..128).stretches(&[2, 512], DType::Q4_K), None);
        assert_eq!(cut(1..3).stretches(&[2, 4], DType::F4), None);
        assert!(Cut { dimension: 0, ranges: vec![1..2] }.stretches(&[2, 512], DType::Q4_K).is_some());
    }

    #[test]
    fn what_is_gathered_is_each_stretch() {
        let whole: Vec<u8> = (0..24).collect();
        let cut = Cut { dimension: 1, ranges: vec![0..1, 3..4] };
        let mut part = [0; 8];
        cut.stretches(&[2, 4, 3], DType::U8).unwrap().gather(&whole, &mut part[..]);
        assert_eq!(part, [0, 1, 2, 9, 10, 11, 12, 13]);
    }
}
