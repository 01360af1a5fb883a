//! Which rows the modules of one adapter change. Each row is changed by one of them: two would depend on their order in the file,
//! and programs write the same change twice, under the names of a fused weight and of its parts.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::names::Target;
use super::{Adapter, AdapterModule};
use crate::checkpoint::{Layout, TensorId};
use crate::error::{AdapterFault, Error, Result};
use crate::patch::{Changes, Step, matrix_of, same_change};

/// The steps of a module for one tensor.
pub(super) struct Change<'t> {
    pub(super) tensor: TensorId,
    /// The tensor's shape after them.
    pub(super) shape: Vec<u64>,
    pub(super) steps: Vec<Step>,
    /// The tensor's rows and columns as the steps count them, if that is not its first dimension by all others.
    pub(super) view: Option<(usize, usize)>,
    /// The columns that change; `None` for all.
    pub(super) columns: Option<Range<usize>>,
    pub(super) target: &'t Target<'t>,
}

impl Change<'_> {
    fn cols(&self) -> Option<usize> {
        match self.view {
            _ if self.target.bias == Some(self.tensor) => Some(1),
            Some((_, cols)) => Some(cols),
            None => matrix_of(&self.shape).map(|(_, cols)| cols),
        }
    }
}

/// The rows that the modules so far change, by tensor.
#[derive(Default)]
pub(super) struct Claims<'m> {
    of: HashMap<TensorId, Vec<Claim<'m>>>,
}

struct Claim<'m> {
    module: &'m str,
    rows: Vec<Range<usize>>,
    columns: Option<Range<usize>>,
    /// Its steps among those of the tensor.
    steps: Range<usize>,
}

/// The outcome of [`Claims::claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claimed {
    /// The rows are the module's.
    First,
    /// Other modules make all of its changes.
    Again,
}

impl<'m> Claims<'m> {
    /// Claims the rows that `changes` change for `module`, before they are added to those `so_far`.
    ///
    /// # Errors
    /// [`AdapterFault::Overlap`] naming another module that changes some of these rows in another way, or only a part of what
    /// `module` changes.
    pub(super) fn claim(
        &mut self,
        adapter: &Adapter,
        module: &'m AdapterModule,
        changes: &[Change<'_>],
        so_far: &BTreeMap<TensorId, Changes>,
        layout: &Layout,
    ) -> Result<Claimed> {
        let all: Vec<_> = changes.iter().filter_map(|change| Some((change, self.met(change, so_far)?))).collect();
        let refused = all.iter().find(|(_, met)| !met.same).or(all.first().filter(|_| all.len() < changes.len()));
        if let Some((change, met)) = refused {
            let tensor = layout.at(change.tensor).name.clone();
            let fault = AdapterFault::Overlap { other: met.module.to_owned(), tensor };
            return Err(Error::adapter(&adapter.path, Some(&module.name), fault));
        }
        if !all.is_empty() {
            return Ok(Claimed::Again);
        }
        for change in changes {
            let first = so_far.get(&change.tensor).map_or(0, |changes| changes.steps.len());
            let steps = first..first + change.steps.len();
            let (rows, columns) = (rows_of(&change.steps), change.columns.clone());
            let claim = Claim { module: &module.name, rows, columns, steps };
            self.of.entry(change.tensor).or_default().push(claim);
        }
        Ok(Claimed::First)
    }

    /// What other modules do to the rows of `change`; `None` if nothing.
    fn met(&self, change: &Change<'_>, so_far: &BTreeMap<TensorId, Changes>) -> Option<Met<'m>> {
        let rows = rows_of(&change.steps);
        let claims = self.of.get(&change.tensor)?.iter().filter(|claim| meet(&claim.columns, &change.columns));
        let others = claims.map(|claim| (claim, shared(&claim.rows, &rows)));
        let others: Vec<_> = others.filter(|(_, shared)| !shared.is_empty()).collect();
        let module = others.first()?.0.module;
        let steps = &so_far.get(&change.tensor)?.steps;
        let cols = change.cols()?;
        let same = |(claim, shared): &(&Claim<'_>, Vec<Range<usize>>)| {
            let steps = &steps[claim.steps.clone()];
            claim.columns == change.columns && same_change(steps, &change.steps, shared, cols)
        };
        let covered: usize = others.iter().map(|(_, shared)| count(shared)).sum();
        Some(Met { module, same: covered == count(&rows) && others.iter().all(same) })
    }
}

/// What other modules do to rows.
struct Met<'m> {
    /// The first of them.
    module: &'m str,
    /// Whether they change all of the rows, in the same way.
    same: bool,
}

/// Whether two ranges of columns share any.
fn meet(one: &Option<Range<usize>>, other: &Option<Range<usize>>) -> bool {
    let both = one.as_ref().zip(other.as_ref());
    both.is_none_or(|(one, other)| one.start < other.end && other.start < one.end)
}

/// The rows that steps change, in order.
fn rows_of(steps: &[Step]) -> Vec<Range<usize>> {
    let mut rows: Vec<Range<usize>> = steps.iter().map(Step::rows).filter(|rows| !rows.is_empty()).cloned().collect();
    rows.sort_by_key(|rows| rows.start);
    let mut merged: Vec<Range<usize>> = Vec::new();
    for rows in rows {
        match merged.last_mut().filter(|last| rows.start <= last.end) {
            Some(last) => last.end = last.end.max(rows.end),
            None => merged.push(rows),
        }
    }
    merged
}

/// The rows that are in both lists, each in order.
fn shared(one: &[Range<usize>], other: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut found, mut rest) = (Vec::new(), other);
    for rows in one {
        rest = &rest[rest.iter().take_while(|other| other.end <= rows.start).count()..];
        let near = rest.iter().take_while(|other| other.start < rows.end);
        found.extend(near.map(|other| rows.start.max(other.start)..rows.end.min(other.end)));
    }
    found
}

fn count(rows: &[Range<usize>]) -> usize {
    rows.iter().map(Range::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_shared_where_both_lists_have_them() {
        let found = shared(&[0..4, 8..12, 20..24], &[2..3, 10..22, 30..40]);
        assert_eq!(found, [2..3, 10..12, 20..22]);
        assert_eq!((shared(&[0..4, 8..9], &[4..8, 9..10]), count(&found)), (vec![], 5));
        let steps = [4..6, 0..2, 2..4, 9..9, 8..9].map(|rows| Step::set(rows, vec![]));
        assert_eq!(rows_of(&steps), [0..6, 8..9]);
    }
}
