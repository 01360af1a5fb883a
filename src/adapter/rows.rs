//! Rows of an adapter's change, brought to where the checkpoint has them.

use super::build::Parts;
use super::families::{Heads, RowOrder};
use super::keys::Part;
use super::matrix::{Factor, Matrix};
use super::targets::Target;
use crate::error::{AdapterFault, Result};

/// How a checkpoint orders the rows of queries and keys, compared with an adapter in another program's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RotaryRows {
    /// As the adapter has them: GGUF files of Qwen, Gemma and others.
    Same,
    /// One of the two has the partners of each rotary pair side by side, the other, with transformers' names, in the
    /// two halves of a head: GGUF files of Llama and Mistral, Meta's own files.
    Paired {
        /// The model's heads (`num_attention_heads`).
        heads: usize,
        /// Its heads of keys and values (`num_key_value_heads`); as many as `heads` in older models.
        kv_heads: usize,
    },
}

impl Target<'_> {
    /// Whether an adapter's rows go to the target as they are.
    pub(super) fn takes_rows_as_they_are(&self) -> bool {
        self.cut.is_none() && matches!(self.order, RowOrder::Same | RowOrder::Shifted)
    }
}

impl Parts<'_> {
    /// The rows of `change`, which `factor` gives, that are for the target, in the target's order.
    pub(super) fn own_rows(&self, target: &Target<'_>, factor: &Factor, change: Matrix) -> Result<Matrix> {
        let rows = self.source_rows(target, factor, change.rows)?;
        let Some(rows) = rows else { return Ok(change) };
        let values = rows.iter().flat_map(|&row| change.row(row)).copied().collect();
        Ok(Matrix { rows: rows.len(), cols: change.cols, values })
    }

    /// The same of a factor as it is given: its first dimension are the rows.
    pub(super) fn own_part(&self, target: &Target<'_>, factor: Factor) -> Result<Factor> {
        let Some(&[_, ..]) = (!target.takes_rows_as_they_are()).then_some(&factor.shape[..]) else { return Ok(factor) };
        let own = self.own_rows(target, &factor, factor.flat())?;
        let mut shape = factor.shape;
        shape[0] = own.rows as u64;
        Ok(Factor { key: factor.key, shape, values: own.values })
    }

    /// Refuses a kind of adapter whose rows are not given one by one, where they would have to be moved.
    pub(super) fn needs_rows_as_they_are(&self, target: &Target<'_>, part: Part, kind: &str) -> Result<()> {
        if target.takes_rows_as_they_are() {
            return Ok(());
        }
        let kind = format!("{kind} for `{}`, which has its rows elsewhere,", target.module);
        Err(self.fault(part, AdapterFault::Unsupported { kind }))
    }

    /// For each row of the target the row of the change; none where they are the same.
    fn source_rows(&self, target: &Target<'_>, factor: &Factor, rows: usize) -> Result<Option<Vec<usize>>> {
        let (mut start, mut len) = (0, rows);
        if let Some(cut) = target.cut {
            if cut.of != rows as u64 {
                let what = format!("the parts of which `{}` is one; together they are", target.module);
                return Err(self.shape_fault(factor, what, &[cut.of]));
            }
            (start, len) = (cut.start as usize, cut.len as usize);
        }
        let misfit = |what: &str| self.shape_fault(factor, format!("{what} of `{}`", target.module), &[len as u64]);
        let source: Box<dyn Fn(usize) -> usize> = match target.order {
            RowOrder::Same | RowOrder::Shifted | RowOrder::Transposed if target.cut.is_none() => return Ok(None),
            RowOrder::Same | RowOrder::Shifted | RowOrder::Transposed => Box::new(|row| row),
            RowOrder::HalvesSwapped if len % 2 != 0 => return Err(misfit("two halves")),
            RowOrder::HalvesSwapped => Box::new(|row| (row + len / 2) % len),
            RowOrder::RotaryPaired(of) | RowOrder::RotaryHalved(of) => match self.heads(target, of, factor)? {
                None => Box::new(|row| row),
                Some(heads) if heads == 0 || len % (2 * heads) != 0 => return Err(misfit("the heads")),
                Some(heads) => {
                    let paired = matches!(target.order, RowOrder::RotaryPaired(_));
                    Box::new(move |row| rotary_source(row, len / heads, paired))
                }
            },
        };
        Ok(Some((0..len).map(|row| start + source(row)).collect()))
    }

    /// How many heads the rows belong to; none where their order is the same.
    fn heads(&self, target: &Target<'_>, of: Heads, factor: &Factor) -> Result<Option<usize>> {
        match self.adapter.rotary {
            Some(RotaryRows::Same) => Ok(None),
            Some(RotaryRows::Paired { heads, kv_heads }) => {
                Ok(Some(if of == Heads::Queries { heads } else { kv_heads }))
            }
            None => {
                let fault = AdapterFault::RowOrder { target: target.module.to_owned() };
                Err(crate::error::Error::adapter(&self.adapter.path, Some(&factor.key), fault))
            }
        }
    }
}

/// The adapter's row that belongs at `row`, for heads of `size` rows: the adapter has them halved where the
/// checkpoint has them `paired`, and the other way.
fn rotary_source(row: usize, size: usize, paired: bool) -> usize {
    let (head, place, half) = (row / size * size, row % size, size / 2);
    head + if paired { place % 2 * half + place / 2 } else { place % half * 2 + place / half }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
