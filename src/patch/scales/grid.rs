//! Which of a weight's values each number of a scale is for.

use std::ops::Range;

use crate::checkpoint::{Format, Note};

/// The blocks of a weight that have a scale each. The weight is a stack of matrices (one, unless experts are stacked), and
/// all of them are cut into blocks in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    matrices: usize,
    /// Rows and columns of a matrix.
    matrix: [usize; 2],
    /// Rows and columns of a block; those at the edges may be smaller.
    block: [usize; 2],
    /// Blocks in a column of blocks, and in a row of them.
    blocks: [usize; 2],
    order: Order,
}

/// The order in which the scales of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Rows,
    /// In tiles of 128 rows by four columns, whole tiles, as cuBLAS takes them for blocks of a row.
    Tiles,
}

/// A block side that no matrix exceeds.
const WHOLE: usize = usize::MAX;

/// The side of the square blocks that programs use unless told otherwise.
const SQUARE: u64 = 128;

/// Columns of a block in MXFP8.
const MX: u64 = 32;

/// Rows and columns of a tile of scales.
const TILE: [usize; 2] = [128, 4];

impl Grid {
    /// The grid of a scale of shape `scale` over a weight of shape `weight`, of which the file may note something. `stated` is
    /// what the configuration says of the sides of blocks.
    ///
    /// - one number: for all values;
    /// - `[n]`, `[n, 1]`, `[n, 1, 1]`: for each index of the first dimension;
    /// - `[rows, n, 1]` for `[rows, columns]`: for columns / n columns of a row (musubi-tuner);
    /// - `[a, b]` for `[rows, columns]`, and `[e, a, b]` for `[e, rows, columns]`: for blocks, see [`blocks`]; with a note of
    ///   MXFP8, for 32 columns of a row.
    ///
    /// None for any other shape, and for blocks that the shapes do not tell.
    pub(super) fn of(weight: &[u64], scale: &[u64], note: Option<Note>, stated: Option<[u64; 2]>) -> Option<Grid> {
        let all: u64 = weight.iter().try_fold(1u64, |n, &side| n.checked_mul(side))?;
        if let Some(Note { format: Format::Mxfp8, .. }) = note {
            return Grid::mx(weight, scale);
        }
        if scale.iter().all(|&side| side == 1) {
            return Grid::new(1, [1, all], [None; 2], [1, 1]);
        }
        let (&first, rest) = weight.split_first().filter(|(_, rest)| !rest.is_empty() && all > 0)?;
        let inner = all / first;
        if scale.len() <= weight.len() && scale[0] == first && scale[1..].iter().all(|&side| side == 1) {
            return Grid::new(1, [first, inner], [Some(1), None], [first, 1]);
        }
        match (rest, scale) {
            ([cols], &[rows, n, 1]) if rows == first && n > 0 && cols.is_multiple_of(n) => {
                Grid::new(1, [rows, *cols], [Some(1), Some(cols / n)], [rows, n])
            }
            ([cols], &[a, b]) => Grid::new(1, [first, *cols], blocks([first, *cols], [a, b], note, stated)?, [a, b]),
            ([rows, cols], &[e, a, b]) if e == first => {
                Grid::new(e, [*rows, *cols], blocks([*rows, *cols], [a, b], note, stated)?, [a, b])
            }
            _ => None,
        }
    }

    /// Of MXFP8: a scale for each 32 columns of a row, row by row, or in tiles as ComfyUI and convert_to_quant store
    /// them. If both are of one shape, it is tiles: these programs write the notes.
    fn mx(weight: &[u64], scale: &[u64]) -> Option<Grid> {
        let (&[rows, cols], &[a, b]) = (weight, scale) else { return None };
        if rows == 0 || cols == 0 || !cols.is_multiple_of(MX) {
            return None;
        }
        let fits = |grid: &Grid| grid.stored_shape() == [a, b];
        [true, false].into_iter().find_map(|tiles| Grid::of_runs([rows, cols], MX, tiles).filter(fits))
    }

    /// A scale for each `wide` columns of a row of a matrix, of which rows are whole runs; in tiles or row by row.
    pub(in crate::patch) fn of_runs([rows, cols]: [u64; 2], wide: u64, tiles: bool) -> Option<Grid> {
        let grid = Grid::new(1, [rows, cols], [Some(1), Some(wide)], [rows, cols / wide])?;
        Some(Grid { order: if tiles { Order::Tiles } else { Order::Rows }, ..grid })
    }

    /// The rows and columns of the scales of one matrix, as they are stored.
    pub(in crate::patch) fn stored_shape(&self) -> Vec<u64> {
        let sides = match self.order {
            Order::Rows => self.blocks,
            Order::Tiles => [0, 1].map(|axis| self.blocks[axis].next_multiple_of(TILE[axis])),
        };
        sides.map(|side| side as u64).to_vec()
    }

    fn new(matrices: u64, matrix: [u64; 2], block: [Option<u64>; 2], blocks: [u64; 2]) -> Option<Grid> {
        let size = |n: u64| usize::try_from(n).ok();
        let side = |n: Option<u64>| n.map_or(Some(WHOLE), size);
        Some(Grid {
            matrices: size(matrices)?,
            matrix: [size(matrix[0])?, size(matrix[1])?],
            block: [side(block[0])?, side(block[1])?],
            blocks: [size(blocks[0])?, size(blocks[1])?],
            order: Order::Rows,
        })
    }

    /// How many scales there are.
    pub(in crate::patch) fn count(&self) -> usize {
        self.matrices * self.blocks[0] * self.blocks[1]
    }

    /// How many are stored, with those that fill tiles.
    pub(super) fn stored(&self) -> usize {
        match self.order {
            Order::Rows => self.count(),
            Order::Tiles => self.blocks[0].next_multiple_of(TILE[0]) * self.blocks[1].next_multiple_of(TILE[1]),
        }
    }

    /// Where scale number `index` is stored.
    pub(in crate::patch) fn place(&self, index: usize) -> usize {
        let Order::Tiles = self.order else { return index };
        // https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
        let (row, col) = (index / self.blocks[1], index % self.blocks[1]);
        let tile = row / TILE[0] * self.blocks[1].div_ceil(TILE[1]) + col / TILE[1];
        let (row, col) = (row % TILE[0], col % TILE[1]);
        tile * TILE[0] * TILE[1] + row % 32 * 16 + row / 32 * TILE[1] + col
    }

    /// Calls `each` with the number of the scale, and the elements that it is for, for `count` elements that follow each
    /// other in row-major order from `first` on. The elements are counted from there.
    pub(super) fn runs(&self, first: usize, count: usize, mut each: impl FnMut(usize, Range<usize>)) {
        if self.count() == 1 {
            return each(0, 0..count);
        }
        let ([rows, cols], [high, wide]) = (self.matrix, self.block);
        let mut from = 0;
        while from < count {
            let (line, col) = ((first + from) / cols, (first + from) % cols);
            let end = count.min(from + cols - col);
            let of_row = (line / rows * self.blocks[0] + line % rows / high) * self.blocks[1];
            let (mut scale, mut left) = (of_row + col / wide, wide - col % wide);
            while from < end {
                let to = from + left.min(end - from);
                each(scale, from..to);
                (from, scale, left) = (to, scale + 1, wide);
            }
        }
    }

    /// The rows and columns of a block, and the number of blocks in a row, once the weight is seen as one matrix of `rows` by
    /// `cols`; none if its blocks are not the same in each row of that.
    pub(super) fn over(&self, rows: usize, cols: usize) -> Option<([usize; 2], usize)> {
        let ([high, wide], [down, across]) = (self.block, self.blocks);
        if self.count() == 1 {
            return Some(([WHOLE; 2], 1));
        }
        if self.matrices == 1 {
            return (self.matrix == [rows, cols]).then_some((self.block, across));
        }
        let [inner_rows, inner_cols] = self.matrix;
        if Some(rows) == self.matrices.checked_mul(inner_rows) && cols == inner_cols {
            // The matrices one below the other.
            let even = down == 1 || inner_rows.is_multiple_of(high);
            return even.then_some(([high.min(inner_rows), wide], across));
        }
        if self.matrices != rows || inner_rows.checked_mul(inner_cols) != Some(cols) {
            return None;
        }
        // A row of the large matrix is a whole small one.
        match (down, across) {
            (1, 1) => Some(([1, WHOLE], 1)),
            (_, 1) if high == 1 || inner_rows.is_multiple_of(high) => Some(([1, high * inner_cols], down)),
            _ if high == 1 && inner_cols.is_multiple_of(wide) => Some(([1, wide], down * across)),
            _ => None,
        }
    }
}

/// The sides of the blocks of which there are `counts` in a matrix of `sides`; none as a side for the whole.
///
/// Programs take them from a configuration, which may not be at hand (DeepSeek, transformers, compressed-tensors), or divide
/// the sides by the counts (compressed-tensors' `dequantize`, convert_to_quant). So blocks are, in this order: what the note
/// says; what the configuration states, where it fits; 128 by 128, which all of these use unless told otherwise; columns of
/// one row; one column, unless the matrix is square, where it could as well be a row; squares with a side that is such a
/// quotient, unless a power of two or the other quotient would fit too. None if that fails: what else the counts could be
/// divided into (the scales of groups that are stored transposed, for example) nobody writes as blocks.
fn blocks(sides: [u64; 2], counts: [u64; 2], note: Option<Note>, stated: Option<[u64; 2]>) -> Option<[Option<u64>; 2]> {
    let are = |block: [u64; 2]| (0..2).all(|axis| counts[axis] == sides[axis].div_ceil(block[axis]));
    if let Some(block) = note.and_then(|note| note.block) {
        return are(block).then_some(block.map(Some));
    }
    if let Some(block) = stated.into_iter().chain([[SQUARE; 2]]).find(|&block| are(block)) {
        return Some(block.map(Some));
    }
    match (sides, counts) {
        (_, [0, _] | [_, 0]) => None,
        ([rows, _], [a, 1]) if a == rows => Some([Some(1), None]),
        ([rows, cols], [a, b]) if a == rows => (b < cols && cols.is_multiple_of(b)).then(|| [Some(1), Some(cols / b)]),
        ([rows, cols], [1, b]) if b == cols && rows != cols => Some([None, Some(1)]),
        _ => {
            let quotient = |axis: usize| {
                let exact = counts[axis] > 1 && sides[axis].is_multiple_of(counts[axis]);
                exact.then(|| sides[axis] / counts[axis])
            };
            let quotients = [quotient(0), quotient(1)].into_iter().flatten();
            let powers = (0..u64::BITS).map(|power| 1 << power);
            let square = |side: &u64| are([*side; 2]);
            let side = quotients.clone().find(square)?;
            let sure = quotients.chain(powers).filter(square).all(|other| other == side);
            sure.then_some([Some(side); 2])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The scale of each element, and the count of scales.
    fn map(weight: &[u64], scale: &[u64], note: Option<Note>) -> Option<(Vec<usize>, usize)> {
        let grid = Grid::of(weight, scale, note, None)?;
        let elements = weight.iter().product::<u64>() as usize;
        let from = |first: usize| {
            let mut scales = Vec::new();
            grid.runs(first, elements - first, |scale, range| {
                assert_eq!(range.start, scales.len());
                scales.resize(range.end, scale);
            });
            scales
        };
        let all = from(0);
        assert_eq!(from(elements / 3), all[elements / 3..]);
        Some((all, grid.count()))
    }

    fn wanted(elements: usize, scale: impl Fn(usize) -> usize) -> Vec<usize> {
        (0..elements).map(scale).collect()
    }

    #[test]
    fn one_number_and_one_for_each_row() {
        for scale in [&[][..], &[1], &[1, 1], &[1, 1, 1]] {
            assert_eq!(map(&[4, 6], scale, None), Some((vec![0; 24], 1)));
            assert_eq!(map(&[2, 4, 6], scale, None), Some((vec![0; 48], 1)));
            assert_eq!(map(&[6], scale, None), Some((vec![0; 6], 1)));
        }
        for scale in [&[4][..], &[4, 1]] {
            assert_eq!(map(&[4, 6], scale, None), Some((wanted(24, |at| at / 6), 4)));
        }
        for scale in [&[4][..], &[4, 1], &[4, 1, 1]] {
            assert_eq!(map(&[4, 2, 3], scale, None), Some((wanted(24, |at| at / 6), 4)));
        }
        assert_eq!(map(&[4, 2, 3], &[4, 2, 1], None), Some((wanted(24, |at| at / 3), 8)));
        assert_eq!(map(&[4, 2, 3], &[4, 1, 3], None), Some((wanted(24, |at| at / 6 * 3 + at % 3), 12)));
    }

    #[test]
    fn blocks_are_what_the_shapes_say() {
        let square = |rows: usize, cols: usize, high: usize, wide: usize| {
            let across = cols.div_ceil(wide);
            (wanted(rows * cols, |at| at / cols / high * across + at % cols / wide), rows.div_ceil(high) * across)
        };
        assert_eq!(map(&[256, 256], &[2, 2], None), Some(square(256, 256, 128, 128)));
        assert_eq!(map(&[130, 200], &[2, 2], None), Some(square(130, 200, 128, 128)));
        // 96 rows would make two blocks too, but 128 is what programs use.
        assert_eq!(map(&[192, 256], &[2, 2], None), Some(square(192, 256, 128, 128)));
        assert_eq!(map(&[16, 384], &[1, 3], None), Some(square(16, 384, 128, 128)));
        assert_eq!(map(&[128, 192], &[2, 3], None), Some(square(128, 192, 64, 64)));
        assert_eq!(map(&[100, 128], &[2, 2], None), Some(square(100, 128, 64, 64)));
        assert_eq!(map(&[16, 128], &[16, 4], None), Some(square(16, 128, 1, 32)));
        assert_eq!(map(&[16, 96], &[16, 2], None), Some(square(16, 96, 1, 48)));
        assert_eq!(map(&[48, 96], &[2, 4], None), Some(square(48, 96, 24, 24)));
        assert_eq!(map(&[4, 6], &[1, 6], None), Some(square(4, 6, 4, 1)));
        assert_eq!(map(&[16, 128], &[16, 2, 1], None), Some(square(16, 128, 1, 64)));
        let note = |side| Some(Note { format: Format::Fp8, block: Some([side; 2]) });
        assert_eq!(map(&[192, 192], &[2, 2], note(96)), Some(square(192, 192, 96, 96)));
        assert_eq!(map(&[192, 192], &[2, 2], note(64)), None);
        let stated = |stated| Grid::of(&[192, 192], &[2, 2], None, Some(stated)).unwrap().block;
        assert_eq!([stated([96, 96]), stated([64, 64])], [[96, 96], [128, 128]]);
        let stacked = map(&[3, 256, 192], &[3, 2, 2], None).unwrap();
        let one = square(256, 192, 128, 128);
        assert_eq!(stacked, (wanted(3 * 256 * 192, |at| at / (256 * 192) * 4 + one.0[at % (256 * 192)]), 12));
    }

    #[test]
    fn what_the_shapes_do_not_say_is_refused() {
        for (weight, scale) in [
            (&[4, 6][..], &[6][..]),
            (&[4, 6], &[4, 6]),
            (&[4, 6], &[2]),
            (&[4, 6], &[4, 4]),
            (&[4, 6], &[4, 4, 1]),
            (&[4, 6], &[0, 2]),
            (&[4, 6], &[4, 6, 1, 1]),
            (&[48, 100], &[2, 3]),
            (&[100, 200], &[2, 4]),
            (&[130, 250], &[3, 4]),
            // Of groups that are stored transposed, or of rows along the other axis.
            (&[64, 128], &[4, 64]),
            (&[64, 128], &[1, 64]),
            (&[64, 64], &[1, 64]),
            (&[2, 1], &[2, 2]),
            (&[6], &[6]),
            (&[4, 2, 3], &[4, 2]),
            (&[4, 2, 3], &[2, 1, 1]),
            (&[8, 3, 3, 3], &[8, 3]),
            (&[0, 6], &[0, 1]),
        ] {
            assert_eq!(map(weight, scale, None), None, "{weight:?} {scale:?}");
        }
    }

    #[test]
    fn scales_of_mxfp8_are_in_rows_or_in_tiles() {
        let note = Some(Note { format: Format::Mxfp8, block: Some([32; 2]) });
        let rows = Grid::of(&[16, 128], &[16, 4], note, None).unwrap();
        assert_eq!((rows.count(), rows.stored(), rows.place(9)), (64, 64, 9));
        let tiles = Grid::of(&[160, 192], &[256, 8], note, None).unwrap();
        assert_eq!((tiles.count(), tiles.stored()), (160 * 6, 256 * 8));
        let mut runs = Vec::new();
        tiles.runs(3 * 192 + 40, 60, |scale, range| runs.push((scale, range)));
        assert_eq!(runs, [(3 * 6 + 1, 0..24), (3 * 6 + 2, 24..56), (3 * 6 + 3, 56..60)]);
        // Scale (row 130, column 5): the tile below and to the right, its row 2, its column 1.
        assert_eq!(tiles.place(130 * 6 + 5), 3 * 512 + 2 * 16 + 1);
        assert_eq!(tiles.place(70 * 6), 6 * 16 + 2 * 4);
        let places: std::collections::BTreeSet<usize> = (0..tiles.count()).map(|index| tiles.place(index)).collect();
        assert_eq!(places.len(), tiles.count());
        assert_eq!(Grid::of(&[128, 128], &[128, 4], note, None).unwrap().order, Order::Tiles);
        for scale in [&[16, 3][..], &[64], &[1], &[16, 4, 1]] {
            assert_eq!(Grid::of(&[16, 128], scale, note, None), None);
        }
    }

    #[test]
    fn a_stack_is_one_matrix_where_its_blocks_allow_that() {
        let over = |weight: &[u64], scale: &[u64]| {
            let cols = weight[1..].iter().product::<u64>() as usize;
            Grid::of(weight, scale, None, None).unwrap().over(weight[0] as usize, cols)
        };
        assert_eq!(over(&[4, 6], &[1]), Some(([WHOLE; 2], 1)));
        assert_eq!(over(&[256, 256], &[2, 2]), Some(([128, 128], 2)));
        assert_eq!(over(&[3, 4, 6], &[3, 1, 1]), Some(([1, WHOLE], 1)));
        assert_eq!(over(&[3, 4, 6], &[3, 4, 1]), Some(([1, 6], 4)));
        assert_eq!(over(&[3, 256, 64], &[3, 2, 1]), Some(([1, 128 * 64], 2)));
        assert_eq!(over(&[3, 4, 64], &[3, 4, 2]), Some(([1, 32], 8)));
        assert_eq!(over(&[3, 256, 256], &[3, 2, 2]), None);
        assert_eq!(over(&[3, 200, 64], &[3, 2, 1]), None);
        let below = |weight: &[u64], scale: &[u64]| {
            let rows = (weight[0] * weight[1]) as usize;
            Grid::of(weight, scale, None, None).unwrap().over(rows, weight[2] as usize)
        };
        assert_eq!(below(&[3, 256, 256], &[3, 2, 2]), Some(([128, 128], 2)));
        assert_eq!(below(&[3, 4, 64], &[3, 1, 2]), Some(([4, 32], 2)));
        assert_eq!(below(&[3, 200, 64], &[3, 2, 1]), None);
    }

    proptest! {
        /// Whatever the shapes: every element has one scale, which is among those that are stored.
        #[test]
        fn every_grid_covers_its_weight(
            weight in proptest::collection::vec(0u64..40, 0..5),
            scale in proptest::collection::vec(0u64..40, 0..5),
            like in 0u32..4,
            mx in any::<bool>(),
            block in proptest::option::of(1u64..9),
        ) {
            // Shapes that are likely to fit.
            let scale: Vec<u64> = match like {
                0 => scale,
                1 => weight.iter().map(|side| side.div_ceil(8)).collect(),
                2 => weight.iter().enumerate().map(|(axis, side)| if axis == 0 { *side } else { 1 }).collect(),
                _ => weight.iter().enumerate().map(|(axis, side)| if axis == 0 { *side } else { side / 2 }).collect(),
            };
            let format = if mx { Format::Mxfp8 } else { Format::Fp8 };
            let note = block.map(|side| Note { format, block: Some([side; 2]) });
            if let Some((scales, count)) = map(&weight, &scale, note) {
                let grid = Grid::of(&weight, &scale, note, None).unwrap();
                prop_assert_eq!(scales.len() as u64, weight.iter().product::<u64>());
                prop_assert!(scales.iter().all(|scale| *scale < count));
                prop_assert!((0..count).all(|scale| grid.place(scale) < grid.stored()));
                prop_assert_eq!(grid.stored() as u64, scale.iter().product::<u64>());
            }
        }
    }
}
