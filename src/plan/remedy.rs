//! Remedies for a plan that does not fit, each planned before it is suggested.

use std::cmp::Reverse;

use super::auto;
use super::outlier::outliers_of;
use super::planner::Planner;
use super::value::Use;
use crate::checkpoint::ModuleId;
use crate::error::{Error, Remedy, Shortfall};

impl<'a> Planner<'a> {
    /// Adds the remedies to the error of a plan that does not fit.
    pub(super) fn advised(&self, error: Error) -> Error {
        match error {
            Error::DoesNotFit(short) => {
                let remedies = self.remedies();
                Error::DoesNotFit(Box::new(Shortfall { remedies, ..*short }))
            }
            other => other,
        }
    }

    /// The remedies, of those tried, by which the plan fits: keeping resident or using in place the largest of the modules that
    /// make slots large, as many as it takes; and quotas that `auto` finds.
    fn remedies(&self) -> Vec<Remedy> {
        let streamed = self.streamed_outliers();
        let names = |few: usize| streamed[..few].iter().map(|&module| self.layout.at(module).name.clone()).collect();
        let least = |apply: fn(Planner<'a>, String) -> Planner<'a>| {
            let with = |names: Vec<String>| names.into_iter().fold(self.clone(), apply);
            (1..=streamed.len()).map(names).find(|names: &Vec<String>| with(names.clone()).fits())
        };
        let keep = if self.is_auto() { None } else { least(Planner::keep_resident) };
        let keep = keep.map(|modules| Remedy::KeepResident { modules });
        let in_place = least(Planner::in_place).map(|modules| Remedy::InPlace { modules });
        let auto = (!self.is_auto() && auto::fits(&self.for_auto(), self.compute_device())).then_some(Remedy::Auto);
        [keep, in_place, auto].into_iter().flatten().collect()
    }

    /// The outliers that would be streamed, the largest first; if quotas are not given, those that may be streamed.
    fn streamed_outliers(&self) -> Vec<ModuleId> {
        let placed = if self.is_auto() { None } else { self.placed().ok() };
        if placed.is_none() && !self.is_auto() {
            return Vec::new();
        }
        let is_streamed = |module: &ModuleId| match &placed {
            Some(parts) => parts.assignments[module.index()].usage == Use::Streamed,
            None => !self.is_in_place(self.layout.at(*module)),
        };
        let mut streamed: Vec<ModuleId> = outliers_of(self.layout).into_iter().filter(is_streamed).collect();
        streamed.sort_by_key(|&module| Reverse(self.layout.at(module).bytes));
        streamed
    }

    /// Whether planning succeeds.
    fn fits(&self) -> bool {
        match self.is_auto() {
            true => auto::fits(&self.for_auto(), self.compute_device()),
            false => self.planned().is_ok(),
        }
    }
}
