//! One module of an adapter and its target -> steps.

use std::ops::Range;

use super::keys::{self, Part};
use super::matrix::{Factor, Matrix};
use super::report::SkipReason;
use super::step::{Change, Delta, Product, Step};
use super::targets::Target;
use super::{Adapter, AdapterModule};
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

/// What changes the bias.
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
        let whole = matrix_of(&bias.shape).map_or(0, |(rows, cols)| rows * cols);
        let place = parts.rows_of(target, &factor, factor.values.len(), &bias, whole)?;
        if place != (0..whole) {
            let kind = format!("{kind} on a part of a bias");
            return Err(parts.fault(part, AdapterFault::Unsupported { kind }));
        }
        let change = match part {
            Part::NewBias => Change::Set(factor.values),
            Part::UpBias => {
                let rank = parts.peft_rank().unwrap_or(1);
                Change::Add { delta: Delta::Dense(factor.values), scale: parts.scale(rank)? }
            }
            _ => Change::Add { delta: Delta::Dense(factor.values), scale: parts.adapter.strength },
        };
        let (_, steps) = built.bias.get_or_insert_with(|| (bias.shape.clone(), Vec::new()));
        steps.push(Step { rows: 0..1, change });
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
    adapter: &'a Adapter,
    module: &'a AdapterModule,
}

impl Parts<'_> {
    fn has(&self, part: Part) -> bool {
        self.module.parts.contains_key(&part)
    }

    fn read(&self, part: Part) -> Result<Option<Factor>> {
        self.module.parts.get(&part).map(|&index| Factor::read(self.adapter, index)).transpose()
    }

    /// The part, which goes with `beside`.
    fn need(&self, part: Part, beside: Part) -> Result<Factor> {
        self.read(part)?.ok_or_else(|| {
            let missing = keys::counterpart(self.key(beside), &self.module.name, part);
            self.fault(beside, AdapterFault::Incomplete { missing })
        })
    }

    fn key(&self, part: Part) -> &str {
        self.module.parts.get(&part).map_or(&self.module.name, |&index| self.adapter.key(index))
    }

    fn fault(&self, part: Part, fault: AdapterFault) -> Error {
        Error::adapter(&self.adapter.path, Some(self.key(part)), fault)
    }

    fn shape_fault(&self, factor: &Factor, what: impl Into<String>, wanted: &[u64]) -> Error {
        let fault = AdapterFault::Shape { found: factor.shape.clone(), what: what.into(), wanted: wanted.to_vec() };
        Error::adapter(&self.adapter.path, Some(&factor.key), fault)
    }

    /// alpha / rank, or what the configuration says; 1 without either.
    fn ratio(&self, rank: usize) -> Result<f64> {
        if let Some(config) = &self.adapter.config {
            return Ok(config.scale(&self.module.name));
        }
        let Some(alpha) = self.read(Part::Alpha)? else { return Ok(1.0) };
        match alpha.values[..] {
            [alpha] => Ok(f64::from(alpha) / rank as f64),
            _ => Err(self.shape_fault(&alpha, "an alpha, which is one number,", &[])),
        }
    }

    /// What a module's change is multiplied by: the strength times [`ratio`](Parts::ratio).
    fn scale(&self, rank: usize) -> Result<f32> {
        let scale = (f64::from(self.adapter.strength) * self.ratio(rank)?) as f32;
        if scale.is_finite() {
            return Ok(scale);
        }
        Err(self.fault(Part::Alpha, AdapterFault::NotFinite { index: 0, value: format!("{scale} once scaled") }))
    }

    fn peft_rank(&self) -> Option<usize> {
        self.adapter.config.as_ref().map(|config| config.rank(&self.module.name) as usize)
    }

    /// The rows, of a target's `all`, that a change of `rows` rows is for.
    fn rows_of(
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
    parts: Parts<'a>,
    weight: Weight<'w>,
    rows: usize,
    cols: usize,
    target: &'a Target<'a>,
    steps: Vec<Step>,
    kinds: Vec<&'static str>,
}

impl Building<'_, '_> {
    /// The kinds of adapters that are made of factors.
    fn factors(&mut self) -> Result<()> {
        let parts = self.parts;
        let has = |part| parts.has(part);
        if has(Part::Up) || has(Part::Down) {
            self.lora(Part::Up, Part::Down)?;
        }
        if has(Part::EmbeddingUp) || has(Part::EmbeddingDown) {
            self.lora(Part::EmbeddingUp, Part::EmbeddingDown)?;
        }
        Ok(())
    }

    /// `W += s (alpha / r) reshape(flat(up) flat(down))`.
    fn lora(&mut self, up: Part, down: Part) -> Result<()> {
        let (up, down) = (self.parts.need(up, down)?, self.parts.need(down, up)?);
        let (left, right) = (up.flat(), down.flat());
        let rank = right.rows;
        if left.cols != rank {
            return Err(self.parts.shape_fault(&up, format!("`{}`", down.key), &down.shape));
        }
        if self.parts.peft_rank().is_some_and(|wanted| wanted != rank) {
            let wanted = self.parts.peft_rank().unwrap_or_default() as u64;
            return Err(self.parts.shape_fault(&down, "the rank in adapter_config.json", &[wanted]));
        }
        let transposed = self.parts.adapter.config.as_ref().is_some_and(|config| config.transposed);
        let is_embedding = self.parts.has(Part::EmbeddingUp);
        let (left, right, up, down) = if transposed || is_embedding {
            (right.transposed(), left.transposed(), down, up)
        } else {
            (left, right, up, down)
        };
        let rows = self.parts.rows_of(self.target, &up, left.rows, &self.weight, self.rows)?;
        if right.cols != self.cols {
            return Err(self.fits_not(&down));
        }
        let scale = self.parts.scale(rank)?;
        self.push("LoRA", rows, |rows| add_product(&left, &right, rows, scale));
        Ok(())
    }

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
            let all_rows = if self.weight.shape.len() > 1 { factor.flat().rows } else { 1 };
            let rows = self.parts.rows_of(self.target, &factor, all_rows, &self.weight, self.rows)?;
            if factor.values.len() != rows.len() * self.cols || factor.shape.get(1..) != self.weight.shape.get(1..) {
                return Err(self.fits_not(&factor));
            }
            let values = factor.values;
            self.push(kind, rows, |_| match scale {
                Some(scale) => Change::Add { delta: Delta::Dense(values), scale },
                None => Change::Set(values),
            });
        }
        Ok(())
    }

    fn push(&mut self, kind: &'static str, rows: Range<usize>, change: impl FnOnce(&Range<usize>) -> Change) {
        let change = change(&rows);
        self.steps.push(Step { rows, change });
        self.kinds.push(kind);
    }

    fn fits_not(&self, factor: &Factor) -> Error {
        self.parts.shape_fault(factor, format!("the target `{}`", self.weight.name), &self.weight.shape)
    }
}

fn add_product(up: &Matrix, down: &Matrix, rows: &Range<usize>, scale: f32) -> Change {
    Change::Add { delta: Delta::Product(Product::pack(up, down, rows.start)), scale }
}
