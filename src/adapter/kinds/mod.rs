//! Kinds of adapters: the meaning of a module's tensors, and the steps that they become.
//!
//! A kind is a file. A new one takes its parts and their endings in [`keys`], a file here that checks its factors against
//! the target and lays them out, and a line in [`Building::factors`]. Arithmetic that no kind has yet is a
//! [`Delta`] or a [`Step`] of its own.
//!
//! The formulas are those of ComfyUI's weight adapters (`comfy/weight_adapter`, 2025-10) and, where a configuration
//! stands beside the factors, of PEFT's LoRA layers (0.21).

mod dora;
mod experts;
mod glora;
mod loha;
mod lokr;
mod lora;
mod multiplied;
mod oft;
mod whole;

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use super::config::peft::PeftKind;
use super::config::{Config, FactorSource, PeftConfig, ScaleFactor};
use super::experts::Wrapped;
use super::names::Target;
use super::names::keys::{self, Part};
use super::report::SkipReason;
use super::{Adapter, AdapterModule, Factor, PEFT_PREFIX};
use crate::checkpoint::TensorId;
use crate::dtype::DType;
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

/// Factors that several targets of a module share.
pub(super) type FactorCache = RefCell<HashMap<TensorId, Rc<Factor>>>;

/// The steps of an adapter's module for its target.
#[derive(Default)]
pub(super) struct Built {
    /// The weight's patched shape and its steps; `None` if it does not change.
    pub(super) weight: Option<(Vec<u64>, Vec<Step>)>,
    /// The weight's rows and columns as its steps count them, if that is not its first dimension by all others.
    pub(super) view: Option<(usize, usize)>,
    /// The columns that change; `None` for all.
    pub(super) columns: Option<Range<usize>>,
    pub(super) bias: Option<(Vec<u64>, Vec<Step>)>,
    pub(super) kinds: Vec<&'static str>,
    /// What the factors are multiplied by, if the module has any.
    pub(super) factor: Option<ScaleFactor>,
    pub(super) skipped: Vec<(Part, SkipReason)>,
}

/// Reads the module's factors, checks them against the target's shapes and lays them out.
pub(super) fn steps<'a>(
    adapter: &Adapter,
    module: &AdapterModule,
    target: &Target<'_>,
    cache: &FactorCache,
    weight_of: &dyn Fn(TensorId) -> Weight<'a>,
) -> Result<Built> {
    let mut built = Built::default();
    let parts = Parts { adapter, module, target, cache };
    if let Some(weight) = target.weight.map(weight_of) {
        let mut building = Building::new(parts, weight);
        // PEFT's factors belong to the weight that it saves beside them.
        building.replacements(&[Part::NewWeight])?;
        building.factors()?;
        building.replacements(&[Part::NormDiff, Part::Diff, Part::SetWeight])?;
        building.in_rows_of_experts();
        let Building { factor, view, columns, .. } = building;
        (built.factor, built.view, built.columns) = (factor, view, columns);
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
    factor: Option<ScaleFactor>,
    view: Option<(usize, usize)>,
    columns: Option<Range<usize>>,
}

/// A change D of some rows, to be added or included in a decomposition.
struct Pending {
    kind: &'static str,
    rows: Range<usize>,
    delta: Delta<Product>,
    ratio: ScaleFactor,
    /// Whether D applies transposed, so that PEFT's magnitudes belong to columns.
    transposed: bool,
}

impl<'a, 'w> Building<'a, 'w> {
    fn new(parts: Parts<'a>, weight: Weight<'w>) -> Building<'a, 'w> {
        let (steps, kinds, factor, view, columns) = Default::default();
        Building { parts, weight, steps, kinds, factor, view, columns }
    }

    /// All factors that the module has.
    fn factors(&mut self) -> Result<()> {
        let parts = self.parts;
        let any = |of: &[Part]| of.iter().any(|&part| parts.has(part));
        if let Some(expert) = parts.target.expert.filter(|_| parts.has_factors()) {
            return self.experts(expert);
        }
        if any(&[Part::Up, Part::Down]) {
            self.lora(Part::Up, Part::Down)?;
        }
        if any(&[Part::EmbeddingUp, Part::EmbeddingDown]) {
            self.lora(Part::EmbeddingUp, Part::EmbeddingDown)?;
        }
        if any(&[Part::MlxUp, Part::MlxDown]) {
            self.lora(Part::MlxUp, Part::MlxDown)?;
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
        if any(&[Part::OftBlocks]) {
            self.oft()?;
        }
        if any(&[Part::OftRotation]) {
            self.peft_oft()?;
        }
        if any(&[Part::BoftRotation, Part::BoftScale]) {
            self.boft()?;
        }
        if any(&[Part::Ia3]) { self.ia3() } else { Ok(()) }
    }

    /// Counts the rows of a stack of experts, of which whole weights are given, expert by expert.
    fn in_rows_of_experts(&mut self) {
        let stacked = self.parts.target.expert.is_some_and(|expert| expert.stacked.is_some());
        let &[_, rows, cols] = &self.weight.shape[..] else { return };
        if stacked && self.view.is_none() {
            self.view = Some((self.weight.rows * rows as usize, cols as usize));
            self.steps.iter_mut().for_each(|step| step.split_rows(rows as usize));
        }
    }

    /// Adds D at its scale, or includes it in a decomposition.
    fn place(&mut self, pending: Pending) -> Result<()> {
        let dora = if self.parts.may_be_dora() { self.dora(&pending)? } else { None };
        let scale = self.parts.finite_scale(pending.ratio.value)?;
        let Pending { kind, rows, delta, ratio, .. } = pending;
        self.factor = Some(ratio);
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
    cache: &'a FactorCache,
}

impl Parts<'_> {
    /// Whether the module has anything but whole weights.
    fn has_factors(&self) -> bool {
        let whole = [Part::NewWeight, Part::NewBias, Part::Diff, Part::DiffBias, Part::SetWeight, Part::NormDiff];
        self.module.parts.keys().any(|part| !whole.contains(part))
    }

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

    /// The value of `alpha`, of any type of numbers.
    fn alpha(&self) -> Result<Option<f64>> {
        let Some(&tensor) = self.module.parts.get(&Part::Alpha) else { return Ok(None) };
        let info = self.adapter.checkpoint.layout().at(tensor);
        if info.shape.iter().product::<u64>() != 1 {
            let (found, what) = (info.shape.clone(), "an alpha, which is one number,".to_owned());
            return Err(self.fault(Part::Alpha, AdapterFault::Shape { found, what, wanted: vec![] }));
        }
        let bytes = self.adapter.bytes(tensor)?;
        let whole = match info.dtype {
            DType::I64 => bytes.first_chunk().map(|raw| i64::from_le_bytes(*raw)),
            DType::I32 => bytes.first_chunk().map(|raw| i32::from_le_bytes(*raw).into()),
            DType::I16 => bytes.first_chunk().map(|raw| i16::from_le_bytes(*raw).into()),
            DType::I8 => bytes.first_chunk().map(|raw| i8::from_le_bytes(*raw).into()),
            DType::U8 => bytes.first_chunk().map(|raw| u8::from_le_bytes(*raw).into()),
            DType::F64 => return Ok(bytes.first_chunk().map(|raw| f64::from_le_bytes(*raw))),
            _ => None,
        };
        match whole {
            Some(whole) => Ok(Some(whole as f64)),
            None => Ok(Some(f64::from(self.adapter.factor(tensor)?.values[0]))),
        }
    }

    /// alpha / rank of factors of this rank, from the first place that says an alpha; 1 where none does.
    ///
    /// # Errors
    /// [`AdapterFault::NoAlpha`] for PEFT's names, which never come without one.
    fn ratio(&self, rank: usize) -> Result<ScaleFactor> {
        let over_rank = |alpha: f64, source| ScaleFactor { value: alpha / rank as f64, source };
        let Adapter { alpha, config, metadata, .. } = self.adapter;
        if let Some(alpha) = alpha {
            return Ok(over_rank(*alpha, FactorSource::Caller));
        }
        if let Some(alpha) = self.alpha()? {
            return Ok(over_rank(alpha, FactorSource::Tensor));
        }
        if let Some(alpha) = self.adapter.gguf_alpha {
            return Ok(over_rank(alpha, FactorSource::Metadata("adapter.lora.alpha".to_owned())));
        }
        let said = match config.as_deref() {
            Some(Config::Peft(config)) => Some(config.scale(&self.configured_name(config))),
            Some(Config::Mlx(config)) => config.scale,
            None => None,
        };
        if let Some(value) = said {
            return Ok(ScaleFactor { value, source: FactorSource::Config });
        }
        let found = metadata.factor(&self.module.name, rank, self.has_kernel());
        if let Some(found) = found.map_err(|fault| Error::adapter(&self.adapter.path, None, fault))? {
            return Ok(found);
        }
        if self.module.name.starts_with(PEFT_PREFIX) || self.has(Part::MlxDown) {
            return Err(self.fault(self.any_of(&[Part::Down, Part::MlxDown]), AdapterFault::NoAlpha));
        }
        Ok(ScaleFactor { value: 1.0, source: FactorSource::Nothing })
    }

    /// The rank of its LoRA factors; 1 without any.
    fn rank(&self) -> usize {
        let down = self.module.parts.get(&Part::Down);
        down.and_then(|&down| self.adapter.checkpoint.layout().at(down).shape.first()).map_or(1, |&rank| rank as usize)
    }

    /// Whether the module is a convolution of more than one element.
    fn has_kernel(&self) -> bool {
        let shape = self.module.parts.get(&Part::Down).map(|&down| &self.adapter.checkpoint.layout().at(down).shape);
        shape.is_some_and(|shape| shape.iter().skip(2).any(|&side| side > 1))
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
        self.configured_dora() == Some(true)
            || [Part::DoraScale, Part::Magnitude, Part::MlxMagnitude].iter().any(|&part| self.has(part))
    }

    /// Whether the configuration says that magnitudes belong to the factors; `None` without one.
    fn configured_dora(&self) -> Option<bool> {
        self.adapter.config.as_deref().map(|config| match config {
            Config::Peft(config) => config.dora,
            Config::Mlx(config) => config.dora,
        })
    }

    fn peft_rank(&self) -> Option<usize> {
        let config = self.adapter.peft().filter(|config| config.kind == PeftKind::Lora);
        config.map(|config| config.rank(&self.configured_name(config)) as usize)
    }

    /// The name by which the patterns of a configuration find the module: its own, or that of the parameter that its factors are
    /// for.
    fn configured_name(&self, config: &PeftConfig) -> Cow<'_, str> {
        let wrapped = Wrapped::of(self.adapter, self.module, config).filter(|_| self.target.of_parameter);
        let parameter = wrapped.and_then(|wrapped| wrapped.parameter());
        parameter.map_or(Cow::Borrowed(&self.module.name), Cow::Owned)
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
        let Some(rows) = self.source_rows(factor, change.rows)? else { return Ok(change) };
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

    /// For each of the target's rows its row in a change of `rows` rows; `None` if that is the same.
    fn source_rows(&self, factor: &Factor, rows: usize) -> Result<Option<Vec<usize>>> {
        if !self.target.moves_rows() {
            return Ok(None);
        }
        let found = self.target.source_rows(rows, &factor.shape, self.adapter.rotary);
        found.map(Some).map_err(|fault| Error::adapter(&self.adapter.path, Some(&factor.key), fault))
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
