//! What applying a patch came to.

use std::cmp::Ordering;
use std::iter::Sum;
use std::ops::AddAssign;

use rayon::prelude::*;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

/// The outcome of [`TensorPatch::apply`](super::TensorPatch::apply).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PatchOutcome {
    /// The number of values beyond the range of an eight-bit storage type, stored as its largest value.
    pub saturated: u64,
    /// The values that became blocks of GGML's types again.
    pub requantised: Requantised,
}

/// How near blocks came to the values that they store.
///
/// The sums are in f64 and in a fixed order, so they are the same for every number of threads. Serialised, it is an object
/// of `values`, `inexpressible`, `rms_error` and `rms`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Requantised {
    /// The number of values in all blocks.
    pub values: u64,
    /// The number of blocks that store a NaN or an infinity, because a value is one or a scale is beyond f16.
    pub inexpressible: u64,
    /// The number of values in the other blocks.
    expressed: u64,
    /// The sum of the squares of their errors.
    errors: f64,
    /// The sum of their squares.
    squares: f64,
}

// The sums are of finite numbers below 2^258 only, so none is NaN.
impl Eq for Requantised {}

impl Requantised {
    /// The root of the mean square of what is stored less what it should be, in the weights' unit, over the blocks that are
    /// not [inexpressible](Requantised::inexpressible); 0 without values.
    pub fn rms_error(&self) -> f64 {
        self.root_mean(self.errors)
    }

    /// The root of the mean square of the values that should be stored, over the same blocks.
    pub fn rms(&self) -> f64 {
        self.root_mean(self.squares)
    }

    /// Orders by the inexpressible blocks, then by the error for the size of the values. The greatest is the worst.
    pub fn severity(&self, other: &Requantised) -> Ordering {
        let ratio = |of: &Requantised| if of.squares > 0.0 { of.errors / of.squares } else { of.errors };
        let blocks = self.inexpressible.cmp(&other.inexpressible);
        blocks.then_with(|| ratio(self).total_cmp(&ratio(other)))
    }

    fn root_mean(&self, sum: f64) -> f64 {
        if self.expressed == 0 { 0.0 } else { (sum / self.expressed as f64).sqrt() }
    }

    /// Counts one block, which was to store `wanted` and has the values `stored`.
    pub(super) fn count(&mut self, wanted: &[f32], stored: &[f32]) {
        self.values += wanted.len() as u64;
        let (mut errors, mut squares) = (0.0, 0.0);
        for (wanted, stored) in wanted.iter().zip(stored) {
            let (wanted, stored) = (f64::from(*wanted), f64::from(*stored));
            errors += (stored - wanted) * (stored - wanted);
            squares += wanted * wanted;
        }
        if f64::is_finite(errors) {
            self.expressed += wanted.len() as u64;
            self.errors += errors;
            self.squares += squares;
        } else {
            self.inexpressible += 1;
        }
    }
}

impl AddAssign for Requantised {
    fn add_assign(&mut self, other: Requantised) {
        let Requantised { values, inexpressible, expressed, errors, squares } = other;
        self.values += values;
        self.inexpressible += inexpressible;
        self.expressed += expressed;
        self.errors += errors;
        self.squares += squares;
    }
}

impl Sum for Requantised {
    fn sum<I: Iterator<Item = Requantised>>(parts: I) -> Requantised {
        parts.fold(Requantised::default(), |mut sum, part| {
            sum += part;
            sum
        })
    }
}

impl Serialize for Requantised {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Requantised", 4)?;
        object.serialize_field("values", &self.values)?;
        object.serialize_field("inexpressible", &self.inexpressible)?;
        object.serialize_field("rms_error", &self.rms_error())?;
        object.serialize_field("rms", &self.rms())?;
        object.end()
    }
}

impl PatchOutcome {
    pub(super) fn of_saturated(saturated: u64) -> PatchOutcome {
        PatchOutcome { saturated, ..PatchOutcome::default() }
    }

    /// The sum over tasks, in their order whatever thread ran which.
    pub(super) fn of_tasks(tasks: impl IndexedParallelIterator<Item = PatchOutcome>) -> PatchOutcome {
        let mut all = PatchOutcome::default();
        tasks.collect::<Vec<_>>().into_iter().for_each(|task| all += task);
        all
    }
}

impl AddAssign for PatchOutcome {
    fn add_assign(&mut self, other: PatchOutcome) {
        self.saturated += other.saturated;
        self.requantised += other.requantised;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_of_blocks_that_are_finite() {
        let mut all = Requantised::default();
        assert_eq!((all.rms_error(), all.rms()), (0.0, 0.0));
        all.count(&[3.0, -4.0], &[3.5, -4.5]);
        all.count(&[1.0, 1.0], &[f32::NAN, f32::NAN]);
        all.count(&[f32::INFINITY, 1.0], &[f32::INFINITY, f32::INFINITY]);
        all.count(&[1.0, 1e9], &[1.0, f32::INFINITY]);
        assert_eq!((all.values, all.inexpressible), (8, 3));
        assert_eq!((all.rms_error(), all.rms()), (0.5, 12.5f64.sqrt()));
        let json = serde_json::to_value([all, all].into_iter().sum::<Requantised>()).unwrap();
        let wanted = serde_json::json!({ "values": 16, "inexpressible": 6, "rms_error": 0.5, "rms": 12.5f64.sqrt() });
        assert_eq!(json, wanted);
    }
}
