//! What is given whole, of a weight or of a bias: added to it, or put in its place.

use super::{Building, Built, Parts, Weight};
use crate::adapter::Factor;
use crate::adapter::names::keys::Part;
use crate::adapter::names::rows::RowOrder;
use crate::adapter::report::SkipReason;
use crate::checkpoint::TensorId;
use crate::error::{AdapterFault, Result};
use crate::patch::{Columns, Delta, Step};

impl Building<'_, '_> {
    /// Those of `wanted` that the module has: added to the weight (`W += s D`), or taken for it.
    pub(super) fn replacements(&mut self, wanted: &[Part]) -> Result<()> {
        let strength = self.parts.adapter.strength;
        let all = [
            (Part::NormDiff, "w_norm", Some(strength)),
            (Part::Diff, "diff", Some(strength)),
            (Part::SetWeight, "set_weight", None),
            (Part::NewWeight, "replacement", None),
        ];
        for (part, kind, scale) in all.into_iter().filter(|(part, ..)| wanted.contains(part)) {
            let Some(factor) = self.parts.read(part)? else { continue };
            let mut factor = self.parts.own_part(factor)?;
            match self.parts.target.order {
                RowOrder::Shifted if scale.is_none() => {
                    let kind = format!("{kind} of `{}`, which may be kept with one added,", self.parts.target.module);
                    return Err(self.parts.fault(part, AdapterFault::Unsupported { kind }));
                }
                // In the checkpoint's own name it is as the checkpoint has it.
                RowOrder::Transposed
                    if self.parts.module.name != self.parts.target.module && factor.shape.len() == 2 =>
                {
                    factor = factor.swapped();
                }
                _ => {}
            }
            if part == Part::NewWeight && self.parts.target.grows_to(&factor.shape, &self.weight.shape) {
                self.pad_to(factor.shape.clone());
            }
            let all_rows = if self.weight.shape.len() > 1 { factor.flat().rows } else { 1 };
            let rows = self.parts.rows_of(&factor, all_rows, &self.weight)?;
            if factor.values.len() != rows.len() * self.weight.cols
                || factor.shape.get(1..) != self.weight.shape.get(1..)
            {
                return Err(self.shape_mismatch(&factor));
            }
            let values = factor.values;
            let step = match scale {
                Some(scale) => Step::add(rows, Delta::Dense(values), scale),
                None => Step::set(rows, values),
            };
            self.push(kind, step);
        }
        Ok(())
    }
}

/// What changes the bias: steps of which each element is a row.
pub(super) fn bias<'a>(parts: &Parts<'_>, weight_of: &dyn Fn(TensorId) -> Weight<'a>, built: &mut Built) -> Result<()> {
    scale_bias(parts, weight_of, built)?;
    let all = [
        (Part::DiffBias, "diff_b"),
        (Part::NormDiffBias, "b_norm"),
        (Part::UpBias, "lora_bias"),
        (Part::NewBias, "replacement"),
    ];
    for (part, kind) in all {
        let Some(factor) = parts.read(part)? else { continue };
        let Some(bias) = parts.target.bias.map(weight_of).map(Weight::into_bias) else {
            built.skipped.push((part, SkipReason::NoParameter));
            continue;
        };
        let factor = parts.own_part(factor)?;
        let rows = parts.rows_of(&factor, factor.values.len(), &bias)?;
        let step = match part {
            Part::NewBias => Step::set(rows, factor.values),
            Part::UpBias => {
                let ratio = parts.ratio(parts.rank())?;
                Step::add(rows, Delta::Dense(factor.values), parts.finite_scale(ratio.value)?)
            }
            _ => Step::add(rows, Delta::Dense(factor.values), parts.adapter.strength),
        };
        let (_, steps) = built.bias.get_or_insert_with(|| (bias.shape.clone(), Vec::new()));
        steps.push(step);
        built.kinds.push(kind);
    }
    Ok(())
}

/// (IA)^3 that multiplies the outputs of a module multiplies its bias, too.
fn scale_bias<'a>(parts: &Parts<'_>, weight_of: &dyn Fn(TensorId) -> Weight<'a>, built: &mut Built) -> Result<()> {
    let Some(factor) = parts.read(Part::Ia3)? else { return Ok(()) };
    let (Some(weight), Some(bias)) = (parts.target.weight.map(weight_of), parts.target.bias.map(weight_of)) else {
        return Ok(());
    };
    if parts.scales_outputs(&factor, &weight) != Some(true) {
        return Ok(());
    }
    let (bias, shape) = (bias.into_bias(), vec![factor.values.len() as u64]);
    let own = parts.own_part(Factor { shape, ..factor })?;
    let rows = parts.rows_of(&own, own.values.len(), &bias)?;
    let columns = Columns { transforms: Vec::new(), by_rows: Some(own.values), strength: parts.adapter.strength };
    let (_, steps) = built.bias.get_or_insert_with(|| (bias.shape.clone(), Vec::new()));
    steps.push(Step::transform(rows, columns));
    Ok(())
}
