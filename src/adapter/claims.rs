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
    rows: Range<usize>,
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
    /// [`AdapterFault::Collision`] naming another module that changes some of these rows in another way, or only a part of what
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
            let role = format!("rows of `{}`", layout.at(change.tensor).name);
            let fault = AdapterFault::Collision { other: met.module.to_owned(), role };
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
        let shared = |claim: &Claim<'_>| claim.rows.start.max(rows.start)..claim.rows.end.min(rows.end);
        let meets = |claim: &&Claim<'_>| !shared(claim).is_empty() && meet(&claim.columns, &change.columns);
        let others: Vec<_> = self.of.get(&change.tensor)?.iter().filter(meets).collect();
        let steps = &so_far.get(&change.tensor)?.steps;
        let cols = change.cols()?;
        let same = |claim: &&Claim<'_>| {
            let steps = &steps[claim.steps.clone()];
            claim.columns == change.columns && same_change(steps, &change.steps, shared(claim), cols)
        };
        let covered: usize = others.iter().map(|claim| shared(claim).len()).sum();
        let module = others.first()?.module;
        Some(Met { module, same: covered == rows.len() && others.iter().all(same) })
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

/// The rows that steps change.
fn rows_of(steps: &[Step]) -> Range<usize> {
    let rows = || steps.iter().map(Step::rows).filter(|rows| !rows.is_empty());
    let start = rows().map(|rows| rows.start).min().unwrap_or(0);
    start..rows().map(|rows| rows.end).max().unwrap_or(0)
}
