//! The rows of a weight that a name refers to, and their order, if a checkpoint and an adapter store them differently.

use std::ops::Range;

use super::Target;
use crate::checkpoint::has_vocabulary_rows;
use crate::error::AdapterFault;

/// One of the projections that a fused weight stacks in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Projection {
    Query,
    Key,
    Value,
    /// The gate, before the up projection.
    Gate,
    Up,
    /// `count` of the `of` equal parts of the rows, from part `first` on.
    Parts {
        first: u32,
        count: u32,
        of: u32,
    },
}

impl Projection {
    /// The rows of a fused weight of `all` rows that belong to a projection of `rows` rows; `None` if the weight
    /// cannot contain such a projection. Keys and values have equal rows, queries a multiple of theirs.
    pub(crate) fn rows(self, rows: usize, all: usize) -> Option<Range<usize>> {
        let pair = rows.checked_mul(2)?;
        let start = match self {
            Projection::Query => {
                let others = all.checked_sub(rows)?;
                let fits = others > 0 && others % 2 == 0 && rows >= others / 2 && rows.is_multiple_of(others / 2);
                return fits.then_some(0..rows);
            }
            Projection::Parts { first, count, of } => {
                let [first, count, of] = [first, count, of].map(|n| n as usize);
                let each = all.checked_div(of).filter(|each| each * of == all && each.checked_mul(count) == Some(rows));
                return each.filter(|each| *each > 0).map(|each| each * first..each * (first + count));
            }
            Projection::Gate => 0,
            Projection::Up => rows,
            Projection::Key => all.checked_sub(pair)?,
            Projection::Value => all.checked_sub(rows)?,
        };
        let fits = match self {
            Projection::Gate | Projection::Up => rows > 0 && pair == all,
            _ => rows > 0 && all.checked_sub(pair).is_some_and(|query| query >= rows && query.is_multiple_of(rows)),
        };
        fits.then_some(start..start + rows)
    }
}

/// A slice of the rows of an adapter's change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowSlice {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// The number of rows of the change.
    pub(crate) of: u64,
}

/// The order of a weight's rows in a checkpoint, compared with the weight that an adapter was made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum RowOrder {
    #[default]
    Same,
    /// The two halves are swapped.
    HalvesSwapped,
    /// The partners of a rotary embedding, which the adapter has in two halves of each head, may stand side by side.
    RotaryPaired(Heads),
    /// The reverse of `RotaryPaired`.
    RotaryHalved(Heads),
    /// Rows and columns are swapped.
    Transposed,
    /// The rows are the same, but the values may have one added, as some programs store a norm: a change is the same, a whole
    /// weight is not.
    Shifted,
}

/// The heads that a weight's rows belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Heads {
    Queries,
    Keys,
}

impl RowOrder {
    /// The order with adapter and checkpoint exchanged.
    pub(crate) fn inverse(self) -> RowOrder {
        match self {
            RowOrder::RotaryPaired(heads) => RowOrder::RotaryHalved(heads),
            RowOrder::RotaryHalved(heads) => RowOrder::RotaryPaired(heads),
            same => same,
        }
    }
}

/// The order of a checkpoint's query and key rows, compared with an adapter in another program's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RotaryRows {
    /// The adapter's order: GGUF files of Qwen, Gemma and others.
    Same,
    /// One of the two has the partners of each rotary pair side by side; the other, with transformers' names, has them in the
    /// two halves of a head: GGUF files of Llama and Mistral, and Meta's files.
    Paired {
        /// The number of query heads (`num_attention_heads`).
        heads: usize,
        /// The number of key and value heads (`num_key_value_heads`); equal to `heads` in older models.
        kv_heads: usize,
    },
}

impl Target<'_> {
    /// Whether the target's rows are at other positions in an adapter's change.
    pub(crate) fn moves_rows(&self) -> bool {
        let in_order = matches!(self.order, RowOrder::Same | RowOrder::Shifted | RowOrder::Transposed);
        self.slice.is_some() || !in_order
    }

    /// Whether an adapter's change applies without moving rows or transposing.
    pub(crate) fn takes_rows_as_they_are(&self) -> bool {
        !self.moves_rows() && self.order != RowOrder::Transposed
    }

    /// Whether a whole weight of shape `new` takes the place of one of shape `old` with more words added to the vocabulary.
    pub(crate) fn grows_to(&self, new: &[u64], old: &[u64]) -> bool {
        let ([new_rows, new_cols], [rows, cols]) = (new, old) else { return false };
        let more = new_rows > rows && new_cols == cols;
        more && has_vocabulary_rows(self.module) && self.projection.is_none() && self.takes_rows_as_they_are()
    }

    /// For each row of the target, the row in a change of `rows` rows, given by a tensor of shape `shape`.
    ///
    /// # Errors
    /// [`AdapterFault::Shape`] when the rows are not those of the target's parts, halves or heads,
    /// [`AdapterFault::RowOrder`] when their order is not known.
    pub(crate) fn source_rows(
        &self,
        rows: usize,
        shape: &[u64],
        rotary: Option<RotaryRows>,
    ) -> Result<Vec<usize>, AdapterFault> {
        let fault = |what, wanted| AdapterFault::Shape { found: shape.to_vec(), what, wanted: vec![wanted] };
        let (mut start, mut len) = (0, rows);
        if let Some(slice) = self.slice {
            if slice.of != rows as u64 {
                let what = format!("the parts of which `{}` is one; together they are", self.module);
                return Err(fault(what, slice.of));
            }
            (start, len) = (slice.start as usize, slice.len as usize);
        }
        let misfit = |what: &str| fault(format!("{what} of `{}`", self.module), len as u64);
        let source: Box<dyn Fn(usize) -> usize> = match self.order {
            RowOrder::Same | RowOrder::Shifted | RowOrder::Transposed => Box::new(|row| row),
            RowOrder::HalvesSwapped if len % 2 != 0 => return Err(misfit("two halves")),
            RowOrder::HalvesSwapped => Box::new(|row| (row + len / 2) % len),
            RowOrder::RotaryPaired(of) | RowOrder::RotaryHalved(of) => match self.heads(of, rotary)? {
                None => Box::new(|row| row),
                // A file may say any number.
                Some(heads) if heads == 0 || heads > len / 2 || len % (2 * heads) != 0 => {
                    return Err(misfit("the heads"));
                }
                Some(heads) => {
                    let paired = matches!(self.order, RowOrder::RotaryPaired(_));
                    Box::new(move |row| rotary_source(row, len / heads, paired))
                }
            },
        };
        Ok((0..len).map(|row| start + source(row)).collect())
    }

    /// The number of heads that the rows belong to; `None` if their order is the same.
    fn heads(&self, of: Heads, rotary: Option<RotaryRows>) -> Result<Option<usize>, AdapterFault> {
        match rotary {
            Some(RotaryRows::Same) => Ok(None),
            Some(RotaryRows::Paired { heads, kv_heads }) => {
                Ok(Some(if of == Heads::Queries { heads } else { kv_heads }))
            }
            None => Err(AdapterFault::RowOrder { target: self.module.to_owned() }),
        }
    }
}

/// The adapter's row that belongs at `row`, for heads of `size` rows. With `paired`, the checkpoint has pairs and the adapter
/// halves; otherwise the reverse.
fn rotary_source(row: usize, size: usize, paired: bool) -> usize {
    let (head, place, half) = (row / size * size, row % size, size / 2);
    head + if paired { place % 2 * half + place / 2 } else { place % half * 2 + place / half }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_are_rows_of_a_fused_weight() {
        assert_eq!(Projection::Key.rows(2, 6), Some(2..4));
        assert_eq!(Projection::Query.rows(8, 12), Some(0..8));
        assert_eq!(Projection::Key.rows(2, 12), Some(8..10));
        assert_eq!(Projection::Value.rows(2, 12), Some(10..12));
        assert_eq!(Projection::Up.rows(6, 12), Some(6..12));
        let last = Projection::Parts { first: 3, count: 4, of: 7 };
        assert_eq!((last.rows(8, 14), last.rows(7, 14), last.rows(0, 0)), (Some(6..14), None, None));
        for projection in [Projection::Query, Projection::Key, Projection::Value, Projection::Gate, Projection::Up] {
            assert_eq!(
                (projection.rows(5, 12), projection.rows(13, 12), projection.rows(usize::MAX, 12)),
                (None, None, None)
            );
        }
    }

    #[test]
    fn rotary_orders_undo_each_other() {
        let paired: Vec<usize> = (0..8).map(|row| rotary_source(row, 4, true)).collect();
        assert_eq!(paired, [0, 2, 1, 3, 4, 6, 5, 7]);
        for size in [2, 4, 6, 128] {
            for row in 0..size * 2 {
                assert_eq!(rotary_source(rotary_source(row, size, true), size, false), row);
            }
        }
    }

    proptest! {
        #[test]
        fn shares_stay_inside(rows in 0usize..40, all in 0usize..80) {
            let parts = Projection::Parts { first: 1, count: 2, of: 4 };
            for projection in [Projection::Query, Projection::Key, Projection::Value, Projection::Gate, Projection::Up, parts] {
                if let Some(range) = projection.rows(rows, all) {
                    prop_assert!(range.len() == rows && range.end <= all && rows > 0);
                }
            }
        }
    }
}
