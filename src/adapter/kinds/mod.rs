//! Kinds of adapters: the meaning of a module's tensors, and the steps that they become.
//!
//! A kind is a file. A new one takes its parts and their endings in [`keys`], a file here that checks its factors against
//! the target and lays them out, and a line in [`Building::factors`]. Arithmetic that no kind has yet is a
//! [`Delta`] or a [`Step`] of its own.
//!
//! The formulas are those of ComfyUI's weight adapters (`comfy/weight_adapter`, 2025-10) and, where a configuration
//! stands beside the factors, of PEFT's LoRA layers (0.21).

mod dora;
mod glora;
mod loha;
mod lokr;
mod lora;
mod oft;
mod whole;

use std::ops::Range;

use super::names::Target;
use super::names::keys::{self, Part};
use super::report::SkipReason;
use super::{Adapter, AdapterModule, Factor};
use crate::checkpoint::TensorId;
use crate::error::{AdapterFault, Error, Result};
use crate::patch::{Delta, Matrix, Product, Step, matrix_of};

/// A tensor of the checkpoint after the steps so far, viewed as a matrix.
pub(super) struct Weight<'a> {
    name: &'a str,
    shape: Vec<u64>,
    rows: usize,
    cols: usize,
}

impl<'a> Weight<'a> {
    pub(super) fn new(name: &'a str, shape: Vec<u64>) -> Weight<'a> {
        let (rows, cols) = matrix_of(&shape).unwrap_or_default();
        Weight { name, shape, rows, cols }
    }

    /// The weight as a bias: each element is a row.
    fn into_bias(self) -> Weight<'a> {
        Weight { rows: self.rows * self.cols, cols: 1, ..self }
    }
}

/// The steps of an adapter's module for its target.
#[derive(Default)]
pub(super) struct Built {
    /// The weight's patched shape and its steps; `None` if it does not change.
    pub(super) weight: Option<(Vec<u64>, Vec<Step>)>,
    pub(super) bias: Option<(Vec<u64>, Vec<Step>)>,
    pub(super) kinds: Vec<&'static str>,
    pub(super) skipped: Vec<(Part, SkipReason)>,
}

/// Reads the module's factors, checks them against the target's shapes and lays them out.
pub(super) fn steps<'a>(
    adapter: &Adapter,
    module: &AdapterModule,
    target: &Target<'_>,
    weight_of: &dyn Fn(TensorId) -> Weight<'a>,
) -> Result<Built> {
    let mut built = Built::default();
    let parts = Parts { adapter, module, target };
    if let Some(weight) = target.weight.map(weight_of) {
        let mut building = Building { parts, weight, steps: Vec::new(), kinds: Vec::new() };
        building.factors()?;
        building.replacements()?;
        if !building.steps.is_empty() {
            built.weight = Some((building.weight.shape, building.steps));
            built.kinds = building.kinds;
        }
    } else {
        let of_weight = module.parts.keys().filter(|part| !part.is_of_bias());
        built.skipped.extend(of_weight.map(|&part| (part, SkipReason::NoParameter)));
    }
    whole::bias(&parts, weight_of, &mut built)?;
    if built.weight.is_none() && target.weight.is_some() {
        let rest = module.parts.keys().filter(|part| !part.is_of_bias());
        built.skipped.extend(rest.map(|&part| (part, SkipReason::NothingToModify)));
    }
    Ok(built)
}

/// The steps of a weight while they are built.
struct Building<'a, 'w> {
    parts: Parts<'a>,
    weight: Weight<'w>,
    steps: Vec<Step>,
    kinds: Vec<&'static str>,
}

/// A change D of some rows, to be added or included in a decomposition.
struct Pending {
    kind: &'static str,
    rows: Range<usize>,
    delta: Delta<Product>,
    /// alpha / rank.
    ratio: f64,
    /// Whether D applies transposed, so that PEFT's magnitudes belong to columns.
    transposed: bool,
}

impl Building<'_, '_> {
    /// All factors that the module has.
    fn factors(&mut self) -> Result<()> {
        let parts = self.parts;
        let any = |of: &[Part]| of.iter().any(|&part| parts.has(part));
        if any(&[Part::Up, Part::Down]) {
            self.lora(Part::Up, Part::Down)?;
        }
        if any(&[Part::EmbeddingUp, Part::EmbeddingDown]) {
            self.lora(Part::EmbeddingUp, Part::EmbeddingDown)?;
        }
        if any(&[Part::HadaW1A, Part::HadaW1B, Part::HadaW2A, Part::HadaW2B]) {
            self.loha()?;
        }
        if any(&[Part::LokrW1, Part::LokrW1A, Part::LokrW1B, Part::LokrW2, Part::LokrW2A, Part::LokrW2B]) {
            self.lokr()?;
        }
        if any(&[Part::GloraA1, Part::GloraA2, Part::GloraB1, Part::GloraB2]) {
            self.glora()?;
        }
        if any(&[Part::OftBlocks]) { self.oft() } else { Ok(()) }
    }

    /// Adds D at its scale, or includes it in a decomposition.
    fn place(&mut self, pending: Pending) -> Result<()> {
        let dora = if self.parts.may_be_dora() { self.dora(&pending)? } else { None };
        let scale = self.parts.finite_scale(pending.ratio)?;
        let Pending { kind, rows, delta, .. } = pending;
        let step = match dora {
            Some(dora) => Step::decompose(rows, delta, dora),
            None => Step::add(rows, delta, scale),
        };
        self.push(kind, step);
        Ok(())
    }

    fn push(&mut self, kind: &'static str, step: Step) {
        self.steps.push(step);
        self.kinds.push(kind);
    }

    fn shape_mismatch(&self, factor: &Factor) -> Error {
        self.parts.shape_fault(factor, format!("the target `{}`", self.weight.name), &self.weight.shape)
    }
}

/// The tensors of a module, read on demand, for one of the module's targets.
#[derive(Clone, Copy)]
struct Parts<'a> {
    adapter: &'a Adapter,
    module: &'a AdapterModule,
    target: &'a Target<'a>,
}

impl Parts<'_> {
    fn has(&self, part: Part) -> bool {
        self.module.parts.contains_key(&part)
    }

    fn read(&self, part: Part) -> Result<Option<Factor>> {
        self.module.parts.get(&part).map(|&tensor| self.adapter.factor(tensor)).transpose()
    }

    /// The part, which must exist because `beside` does.
    fn need(&self, part: Part, beside: Part) -> Result<Factor> {
        self.read(part)?.ok_or_else(|| {
            let missing = keys::counterpart(self.key(beside), &self.module.name, part);
            self.fault(beside, AdapterFault::Incomplete { missing })
        })
    }

    fn key(&self, part: Part) -> &str {
        self.module.parts.get(&part).map_or(&self.module.name, |&tensor| self.adapter.key(tensor))
    }

    fn fault(&self, part: Part, fault: AdapterFault) -> Error {
        Error::adapter(&self.adapter.path, Some(self.key(part)), fault)
    }

    fn shape_fault(&self, factor: &Factor, what: impl Into<String>, wanted: &[u64]) -> Error {
        let fault = AdapterFault::Shape { found: factor.shape.clone(), what: what.into(), wanted: wanted.to_vec() };
        Error::adapter(&self.adapter.path, Some(&factor.key), fault)
    }

    /// The first of these parts that the module has.
    fn any_of(&self, parts: &[Part]) -> Part {
        parts.iter().copied().find(|&part| self.has(part)).unwrap_or(parts[0])
    }

    /// The value of `alpha`.
    fn alpha(&self) -> Result<Option<f64>> {
        let Some(alpha) = self.read(Part::Alpha)? else { return Ok(None) };
        match alpha.values[..] {
            [alpha] => Ok(Some(f64::from(alpha))),
            _ => Err(self.shape_fault(&alpha, "an alpha, which is one number,", &[])),
        }
    }

    /// alpha / rank, or what the configuration says; 1 without either.
    fn ratio(&self, rank: usize) -> Result<f64> {
        match &self.adapter.config {
            Some(config) => Ok(config.scale(&self.module.name)),
            None => Ok(self.alpha()?.map_or(1.0, |alpha| alpha / rank as f64)),
        }
    }

    /// The scale of a change: the strength times `ratio`.
    fn finite_scale(&self, ratio: f64) -> Result<f32> {
        let scale = (f64::from(self.adapter.strength) * ratio) as f32;
        if scale.is_finite() && (ratio as f32).is_finite() {
            return Ok(scale);
        }
        let fault = AdapterFault::NotFinite { index: 0, value: format!("{scale} once scaled") };
        Err(self.fault(Part::Alpha, fault))
    }

    /// Whether the factors have magnitudes, or should have.
    fn may_be_dora(&self) -> bool {
        let configured = self.adapter.config.as_ref().is_some_and(|config| config.dora);
        configured || self.has(Part::DoraScale) || self.has(Part::Magnitude)
    }

    fn peft_rank(&self) -> Option<usize> {
        self.adapter.config.as_ref().map(|config| config.rank(&self.module.name) as usize)
    }

    /// The rows of `weight`, of which the target may be a part, that a change of `rows` rows is for.
    fn rows_of(&self, factor: &Factor, rows: usize, weight: &Weight<'_>) -> Result<Range<usize>> {
        let place = match self.target.projection {
            None => (rows == weight.rows).then_some(0..rows),
            Some(projection) => projection.rows(rows, weight.rows),
        };
        place.ok_or_else(|| self.shape_fault(factor, format!("the target `{}`", weight.name), &weight.shape))
    }

    /// The rows of `change`, which `factor` gives, that are for the target, in the target's order.
    fn own_rows(&self, factor: &Factor, change: Matrix) -> Result<Matrix> {
        if !self.target.moves_rows() {
            return Ok(change);
        }
        let rows = self.target.source_rows(change.rows, &factor.shape, self.adapter.rotary);
        let rows = rows.map_err(|fault| Error::adapter(&self.adapter.path, Some(&factor.key), fault))?;
        let values = rows.iter().flat_map(|&row| change.row(row)).copied().collect();
        Ok(Matrix { rows: rows.len(), cols: change.cols, values })
    }

    /// The same of a factor as it is given: its first dimension are the rows.
    fn own_part(&self, factor: Factor) -> Result<Factor> {
        if !self.target.moves_rows() || factor.shape.is_empty() {
            return Ok(factor);
        }
        let own = self.own_rows(&factor, factor.flat())?;
        let mut shape = factor.shape;
        shape[0] = own.rows as u64;
        Ok(Factor { key: factor.key, shape, values: own.values })
    }

    /// Refuses a kind of adapter whose rows are not given one by one, where they would have to be moved.
    fn needs_rows_as_they_are(&self, part: Part, kind: &str) -> Result<()> {
        if self.target.takes_rows_as_they_are() {
            return Ok(());
        }
        let kind = format!("{kind} for `{}`, which has its rows elsewhere,", self.target.module);
        Err(self.fault(part, AdapterFault::Unsupported { kind }))
    }
}
