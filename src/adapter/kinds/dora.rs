//! DoRA: magnitudes that come with the factors of another kind.

use super::{Building, Pending};
use crate::adapter::Factor;
use crate::adapter::names::keys::Part;
use crate::adapter::names::rows::RowOrder;
use crate::error::{AdapterFault, Result};
use crate::patch::{Axis, Dora};

impl Building<'_, '_> {
    /// The decomposition that includes D; `None` if there are no magnitudes.
    pub(super) fn dora(&self, pending: &Pending) -> Result<Option<Dora>> {
        match self.parts.read(Part::DoraScale)? {
            Some(magnitude) => self.comfy_dora(magnitude, pending).map(Some),
            None => self.peft_dora(pending),
        }
    }

    /// `dora_scale`: norms of the original rows, or of the changed channels where it does not have one for each row.
    fn comfy_dora(&self, magnitude: Factor, pending: &Pending) -> Result<Dora> {
        let rows = pending.rows.len();
        let channels = self.weight.shape.get(1).map_or(0, |&channels| channels as usize);
        let all_rows = self.parts.target.slice.map_or(rows as u64, |slice| slice.of);
        let by_rows = magnitude.shape.first() == Some(&all_rows) && magnitude.values.len() as u64 == all_rows;
        // Norms of columns are over all rows, of which the target may have a part.
        if !by_rows || self.parts.target.order == RowOrder::Transposed {
            self.parts.needs_rows_as_they_are(Part::DoraScale, "DoRA")?;
        }
        let magnitude = if by_rows { self.parts.own_part(magnitude)? } else { magnitude };
        if !by_rows && magnitude.values.len() != channels {
            return Err(self.shape_mismatch(&magnitude));
        }
        let axis = if by_rows { Axis::Rows } else { Axis::Columns { inner: self.weight.cols / channels.max(1) } };
        Ok(self.decomposed(magnitude, axis, by_rows, f32::EPSILON, pending.ratio.value))
    }

    /// `lora_magnitude_vector`: norms of the changed rows (columns of a transposed weight).
    fn peft_dora(&self, pending: &Pending) -> Result<Option<Dora>> {
        let configured = self.parts.configured_dora();
        let Some(magnitude) = self.parts.read(self.parts.any_of(&[Part::Magnitude, Part::MlxMagnitude]))? else {
            if configured == Some(true) && pending.kind == "LoRA" {
                let missing = format!("{}.lora_magnitude_vector", self.parts.module.name);
                return Err(self.parts.fault(Part::Up, AdapterFault::Incomplete { missing }));
            }
            return Ok(None);
        };
        if configured == Some(false) {
            let reason = "use_dora is not set, yet there is a magnitude".to_owned();
            return Err(self.parts.fault(Part::Magnitude, AdapterFault::Config { reason }));
        }
        let magnitude = self.parts.own_part(magnitude)?;
        let (axis, count) = if pending.transposed {
            (Axis::Columns { inner: 1 }, self.weight.cols)
        } else {
            (Axis::Rows, pending.rows.len())
        };
        if magnitude.values.len() != count {
            return Err(self.shape_mismatch(&magnitude));
        }
        Ok(Some(self.decomposed(magnitude, axis, false, 0.0, pending.ratio.value)))
    }

    fn decomposed(&self, magnitude: Factor, axis: Axis, of_original: bool, epsilon: f32, ratio: f64) -> Dora {
        let (ratio, strength) = (ratio as f32, self.parts.adapter.strength);
        Dora { ratio, magnitude: magnitude.values, axis, of_original, epsilon, strength }
    }
}
