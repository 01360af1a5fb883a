//! One module of an adapter and its target -> steps.

use std::ops::Range;
use std::sync::Arc;

use super::families::RowOrder;
use super::keys::{self, Part};
use super::matrix::Factor;
use super::report::SkipReason;
use super::step::{Change, Delta, Step};
use super::targets::Target;
use super::{Adapter, AdapterModule};
use crate::dtype::DType;
use crate::error::{AdapterFault, Error, Result};

/// A tensor of the checkpoint, with the shape that the steps so far leave it.
pub(crate) struct Weight<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: Vec<u64>,
}

/// The rows and columns of a tensor seen as a matrix, its first dimension by all others; a vector is one row. None
/// where they cannot be counted.
pub(crate) fn matrix_of(shape: &[u64]) -> Option<(usize, usize)> {
    let (rows, inner) = match shape {
        [rows, inner @ ..] if !inner.is_empty() => (*rows, inner),
        vector => (1, vector),
    };
    let cols = inner.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    rows.checked_mul(cols)?;
    Some((usize::try_from(rows).ok()?, usize::try_from(cols).ok()?))
}

/// What a module of an adapter does to its target.
#[derive(Default)]
pub(crate) struct Built {
    /// The weight's shape afterwards and the steps; none where it does not change.
    pub(crate) weight: Option<(Vec<u64>, Vec<Step>)>,
    pub(crate) bias: Option<(Vec<u64>, Vec<Step>)>,
    pub(crate) kinds: Vec<&'static str>,
    pub(crate) skipped: Vec<(Part, SkipReason)>,
}

/// Reads the module's factors, checks them against the target's shapes and lays them out.
pub(crate) fn steps<'a>(
    adapter: &Adapter,
    module: &AdapterModule,
    target: &Target<'_>,
    weight_of: &dyn Fn(usize) -> Weight<'a>,
) -> Result<Built> {
    let mut built = Built::default();
    let parts = Parts { adapter, module };
    if let Some(weight) = target.weight.map(weight_of) {
        let (rows, cols) = matrix_of(&weight.shape).unwrap_or_default();
        let mut context = Building { parts, weight, rows, cols, target, steps: Vec::new(), kinds: Vec::new() };
        context.factors()?;
        context.replacements()?;
        if !context.steps.is_empty() {
            built.weight = Some((context.weight.shape, context.steps));
            built.kinds = context.kinds;
        }
    } else {
        let of_weight = module.parts.keys().filter(|part| !part.is_of_bias());
        built.skipped.extend(of_weight.map(|&part| (part, SkipReason::NoParameter)));
    }
    bias(&parts, target, weight_of, &mut built)?;
    if built.weight.is_none() && target.weight.is_some() {
        let rest = module.parts.keys().filter(|part| !part.is_of_bias());
        built.skipped.extend(rest.map(|&part| (part, SkipReason::NothingToModify)));
    }
    Ok(built)
}

/// What changes the bias: steps of which each element is a row.
fn bias<'a>(
    parts: &Parts<'_>,
    target: &Target<'_>,
    weight_of: &dyn Fn(usize) -> Weight<'a>,
    built: &mut Built,
) -> Result<()> {
    let all = [
        (Part::DiffBias, "diff_b"),
        (Part::NormDiffBias, "b_norm"),
        (Part::UpBias, "lora_bias"),
        (Part::NewBias, "replacement"),
    ];
    for (part, kind) in all {
        let Some(factor) = parts.read(part)? else { continue };
        let Some(bias) = target.bias.map(weight_of) else {
            built.skipped.push((part, SkipReason::NoParameter));
            continue;
        };
        let factor = parts.own_part(target, factor)?;
        let whole = matrix_of(&bias.shape).map_or(0, |(rows, cols)| rows * cols);
        let rows = parts.rows_of(target, &factor, factor.values.len(), &bias, whole)?;
        let change = match part {
            Part::NewBias => Change::Set(factor.values),
            Part::UpBias => {
                let rank = parts.peft_rank().unwrap_or(1);
                Change::Add {
                    delta: Arc::new(Delta::Dense(factor.values)),
                    scale: parts.finite_scale(parts.ratio(rank)?)?,
                }
            }
            _ => Change::Add { delta: Arc::new(Delta::Dense(factor.values)), scale: parts.adapter.strength },
        };
        let (_, steps) = built.bias.get_or_insert_with(|| (bias.shape.clone(), Vec::new()));
        steps.push(Step { rows, change });
        built.kinds.push(kind);
    }
    Ok(())
}

impl Part {
    /// Whether it changes the bias and not the weight.
    fn is_of_bias(self) -> bool {
        matches!(self, Part::DiffBias | Part::NormDiffBias | Part::UpBias | Part::NewBias)
    }
}

/// The tensors of a module, read on demand.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(super) adapter: &'a Adapter,
    pub(super) module: &'a AdapterModule,
}

impl Parts<'_> {
    pub(super) fn has(&self, part: Part) -> bool {
        self.module.parts.contains_key(&part)
    }

    pub(super) fn read(&self, part: Part) -> Result<Option<Factor>> {
        self.module.parts.get(&part).map(|&index| Factor::read(self.adapter, index)).transpose()
    }

    /// The part, which goes with `beside`.
    pub(super) fn need(&self, part: Part, beside: Part) -> Result<Factor> {
        self.read(part)?.ok_or_else(|| {
            let missing = keys::counterpart(self.key(beside), &self.module.name, part);
            self.fault(beside, AdapterFault::Incomplete { missing })
        })
    }

    fn key(&self, part: Part) -> &str {
        self.module.parts.get(&part).map_or(&self.module.name, |&index| self.adapter.key(index))
    }

    pub(super) fn fault(&self, part: Part, fault: AdapterFault) -> Error {
        Error::adapter(&self.adapter.path, Some(self.key(part)), fault)
    }

    pub(super) fn shape_fault(&self, factor: &Factor, what: impl Into<String>, wanted: &[u64]) -> Error {
        let fault = AdapterFault::Shape { found: factor.shape.clone(), what: what.into(), wanted: wanted.to_vec() };
        Error::adapter(&self.adapter.path, Some(&factor.key), fault)
    }

    /// The first of these parts that the module has.
    pub(super) fn any_of(&self, parts: &[Part]) -> Part {
        parts.iter().copied().find(|&part| self.has(part)).unwrap_or(parts[0])
    }

    /// A part that holds a shape, and which one it is.
    pub(super) fn read_shape(&self, part: Part) -> Result<Option<(Part, Vec<u64>)>> {
        let Some(&index) = self.module.parts.get(&part) else { return Ok(None) };
        let info = &self.adapter.checkpoint.layout().tensors[index];
        let bytes = self.adapter.bytes(index)?;
        let whole = |value: f32| (value >= 0.0 && value.fract() == 0.0 && value < 1e9).then_some(value as u64);
        let shape: Option<Vec<u64>> = match info.dtype {
            DType::I64 => bytes.as_chunks().0.iter().map(|raw| u64::try_from(i64::from_le_bytes(*raw)).ok()).collect(),
            DType::I32 => bytes.as_chunks().0.iter().map(|raw| u64::try_from(i32::from_le_bytes(*raw)).ok()).collect(),
            _ => Factor::read(self.adapter, index)?.values.into_iter().map(whole).collect(),
        };
        let fault = || {
            let fault =
                AdapterFault::Shape { found: info.shape.clone(), what: "a list of sizes".to_owned(), wanted: vec![] };
            self.fault(part, fault)
        };
        Ok(Some((part, shape.ok_or_else(fault)?)))
    }

    /// The value of `alpha`.
    pub(super) fn alpha(&self) -> Result<Option<f64>> {
        let Some(alpha) = self.read(Part::Alpha)? else { return Ok(None) };
        match alpha.values[..] {
            [alpha] => Ok(Some(f64::from(alpha))),
            _ => Err(self.shape_fault(&alpha, "an alpha, which is one number,", &[])),
        }
    }

    /// alpha / rank, or what the configuration says; 1 without either.
    pub(super) fn ratio(&self, rank: usize) -> Result<f64> {
        match &self.adapter.config {
            Some(config) => Ok(config.scale(&self.module.name)),
            None => Ok(self.alpha()?.map_or(1.0, |alpha| alpha / rank as f64)),
        }
    }

    /// What a change is multiplied by: the strength times `ratio`.
    pub(super) fn finite_scale(&self, ratio: f64) -> Result<f32> {
        let scale = (f64::from(self.adapter.strength) * ratio) as f32;
        if scale.is_finite() && (ratio as f32).is_finite() {
            return Ok(scale);
        }
        let fault = AdapterFault::NotFinite { index: 0, value: format!("{scale} once scaled") };
        Err(self.fault(Part::Alpha, fault))
    }

    pub(super) fn peft_rank(&self) -> Option<usize> {
        self.adapter.config.as_ref().map(|config| config.rank(&self.module.name) as usize)
    }

    /// The rows, of a target's `all`, that a change of `rows` rows is for.
    pub(super) fn rows_of(
        &self,
        target: &Target<'_>,
        factor: &Factor,
        rows: usize,
        weight: &Weight<'_>,
        all: usize,
    ) -> Result<Range<usize>> {
        let place = match target.share {
            None => (rows == all).then_some(0..all),
            Some(share) => share.rows(rows, all),
        };
        place.ok_or_else(|| self.shape_fault(factor, format!("the target `{}`", weight.name), &weight.shape))
    }
}

/// The steps of a weight in the making.
pub(crate) struct Building<'a, 'w> {
    pub(super) parts: Parts<'a>,
    pub(super) weight: Weight<'w>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) target: &'a Target<'a>,
    pub(super) steps: Vec<Step>,
    kinds: Vec<&'static str>,
}

impl Building<'_, '_> {
    /// What is given whole: added (`W += s D`), or taken for the weight.
    fn replacements(&mut self) -> Result<()> {
        let strength = self.parts.adapter.strength;
        let all = [
            (Part::NormDiff, "w_norm", Some(strength)),
            (Part::Diff, "diff", Some(strength)),
            (Part::SetWeight, "set_weight", None),
            (Part::NewWeight, "replacement", None),
        ];
        for (part, kind, scale) in all {
            let Some(factor) = self.parts.read(part)? else { continue };
            let mut factor = self.parts.own_part(self.target, factor)?;
            match self.target.order {
                RowOrder::Shifted if scale.is_none() => {
                    let kind = format!("{kind} of `{}`, which may be kept with one added,", self.target.module);
                    return Err(self.parts.fault(part, AdapterFault::Unsupported { kind }));
                }
                // In the checkpoint's own name it is as the checkpoint has it.
                RowOrder::Transposed if self.parts.module.name != self.target.module && factor.shape.len() == 2 => {
                    factor = factor.swapped();
                }
                _ => {}
            }
            let all_rows = if self.weight.shape.len() > 1 { factor.flat().rows } else { 1 };
            let rows = self.parts.rows_of(self.target, &factor, all_rows, &self.weight, self.rows)?;
            if factor.values.len() != rows.len() * self.cols || factor.shape.get(1..) != self.weight.shape.get(1..) {
                return Err(self.fits_not(&factor));
            }
            let values = factor.values;
            self.push(kind, rows, |_| match scale {
                Some(scale) => Change::Add { delta: Arc::new(Delta::Dense(values)), scale },
                None => Change::Set(values),
            });
        }
        Ok(())
    }

    pub(super) fn push(
        &mut self,
        kind: &'static str,
        rows: Range<usize>,
        change: impl FnOnce(&Range<usize>) -> Change,
    ) {
        let change = change(&rows);
        self.steps.push(Step { rows, change });
        self.kinds.push(kind);
    }

    pub(super) fn fits_not(&self, factor: &Factor) -> Error {
        self.parts.shape_fault(factor, format!("the target `{}`", self.weight.name), &self.weight.shape)
    }
}
