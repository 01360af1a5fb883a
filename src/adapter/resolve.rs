//! Resolving adapters against a checkpoint: their modules are matched, and the steps of each tensor collected.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::claims::{Change, Claimed, Claims};
use super::experts::{self, Wrapped};
use super::gguf;
use super::kinds::{self, Built, FactorCache, Weight};
use super::names::keys::Part;
use super::names::rows::RowOrder;
use super::names::{Found, Target, Targets};
use super::report::{Applied, MatchReport, SkipReason, Skipped, Unmatched};
use super::{Adapter, AdapterModule, Matching};
use crate::checkpoint::{Layout, Packed, Pattern, Siblings, TensorId};
use crate::encoding::Encoding;
use crate::error::{AdapterFault, Error, Packing, Result};
use crate::float::Float;
use crate::patch::{Changes, Codes, Maker, Origin, Scaling, TensorPatch};

/// The outcome of resolving.
pub(super) struct Resolved {
    pub(super) tensors: BTreeMap<TensorId, TensorPatch>,
    /// The layout with the patched shapes.
    pub(super) layout: Layout,
    pub(super) report: MatchReport,
    pub(super) origins: Vec<Arc<Origin>>,
}

/// What becomes of changed weights that are packed into codes. Others are refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PackedWeights {
    /// Whether they are packed again, if their codes are understood.
    pub(super) repacked: bool,
    /// Patterns of weights whose changes are deferred afterwards, so that their codes need not be understood.
    pub(super) deferred: Vec<String>,
}

/// Resolves adapters in order, each against the tensors as those before it leave them.
pub(super) fn all(
    siblings: Siblings<'_>,
    layout: &Layout,
    adapters: &[Adapter],
    matching: Matching,
    packed: &PackedWeights,
) -> Result<Resolved> {
    let targets = Targets::new(layout);
    let mut resolving = Resolving::new(layout, siblings, packed);
    for adapter in adapters {
        resolving.origins.push(Arc::new(adapter.origin()));
        let known = adapter.with_known_rows(resolving.siblings.gguf());
        resolving.adapter(&known, &targets, matching)?;
    }
    resolving.finish()
}

/// The state of [`all`], with the shapes after the steps so far.
struct Resolving<'a> {
    layout: &'a Layout,
    siblings: Siblings<'a>,
    /// Whether packed weights may be packed again.
    repacked: bool,
    /// The tensors whose changes are deferred afterwards.
    deferred: BTreeSet<TensorId>,
    /// The packed weights that change.
    codes: BTreeMap<TensorId, Codes>,
    changed: BTreeMap<TensorId, Changes>,
    report: MatchReport,
    /// The origins of the adapters so far; the last is the current adapter's.
    origins: Vec<Arc<Origin>>,
}

impl<'a> Resolving<'a> {
    fn new(layout: &'a Layout, siblings: Siblings<'a>, packed: &PackedWeights) -> Resolving<'a> {
        let (codes, changed) = (BTreeMap::new(), BTreeMap::new());
        let (report, origins) = (MatchReport::default(), Vec::new());
        let patterns = packed.deferred.iter().map(|text| Pattern::new(text.clone(), layout));
        let (repacked, deferred) = (packed.repacked, patterns.flat_map(|pattern| pattern.tensors(layout)).collect());
        Resolving { layout, siblings, repacked, deferred, codes, changed, report, origins }
    }

    fn adapter(&mut self, adapter: &Adapter, targets: &Targets<'a>, matching: Matching) -> Result<()> {
        adapter.check_component()?;
        if let Some(fault) = gguf::other_architecture(self.siblings.gguf(), adapter.checkpoint.gguf()) {
            return Err(Error::adapter(&adapter.path, None, fault));
        }
        let wanted = |key: &str| adapter.wants(key);
        let mut matched = Vec::new();
        let (first_unmatched, first_skipped) = (self.report.unmatched.len(), self.report.skipped.len());
        for module in &adapter.modules {
            if !wanted(&module.name) {
                self.skip(adapter, module.parts.values(), SkipReason::OtherComponent);
                continue;
            }
            let found = self.find(adapter, module, targets).and_then(|found| self.converted(adapter, module, found));
            match found.map_err(|fault| Error::adapter(&adapter.path, Some(&module.name), fault))? {
                Found::One(targets) => matched.push((module, targets)),
                Found::Several(candidates) => {
                    let fault = AdapterFault::Ambiguous { candidates };
                    return Err(Error::adapter(&adapter.path, Some(&module.name), fault));
                }
                Found::Nothing => self.report.unmatched.push(unmatched(adapter, module, None)),
            }
        }
        self.replacements(adapter, targets, &wanted, &mut matched);
        for tensor in &adapter.unknown {
            let other = !wanted(adapter.key(*tensor));
            let why = if other { SkipReason::OtherComponent } else { SkipReason::NotUnderstood };
            self.skip(adapter, [tensor], why);
        }
        let matched = join_spellings(matched);
        // Before anything is compared: codes explain why nothing else fits.
        let (mut refused, mut patchable) = (None, Vec::new());
        for (module, targets) in &matched {
            match self.check_codes(adapter, module, targets) {
                Ok(()) => patchable.push((module, targets)),
                Err((_, error)) if matching == Matching::Strict => return Err(error),
                Err((why, error)) => {
                    self.skip(adapter, module.parts.values(), why);
                    refused.get_or_insert(error);
                }
            }
        }
        self.check_found(adapter, matched.len(), first_unmatched, targets, matching)?;
        let (mut claims, first_applied) = (Claims::default(), self.report.applied.len());
        for (module, targets) in patchable {
            match self.module(adapter, module, targets, &mut claims) {
                Err(error) if matching == Matching::AllowPartial && is_misfit(&error) => {
                    self.report.unmatched.push(unmatched(adapter, module, Some(&error)));
                    refused.get_or_insert(error);
                }
                done => done?,
            }
        }
        match refused {
            // An adapter of which nothing fits is one for another model.
            Some(error) if self.report.applied.len() == first_applied => Err(error),
            _ if matching == Matching::Strict => self.check_applied(adapter, first_skipped),
            _ => Ok(()),
        }
    }

    /// The targets of a module, which may be experts.
    fn find(
        &self,
        adapter: &Adapter,
        module: &AdapterModule,
        targets: &Targets<'a>,
    ) -> Result<Found<'a>, AdapterFault> {
        if let Some(wrapped) = adapter.peft().and_then(|config| Wrapped::of(adapter, module, config)) {
            let found = wrapped.find(self.layout, targets)?;
            if found != Found::Nothing {
                return Ok(found);
            }
        }
        let name = adapter.renamed(&module.name);
        Ok(match targets.find(&name) {
            Found::One(mut found) => {
                if let [target] = &mut found[..] {
                    *target = experts::stacked(self.layout, targets, *target);
                }
                Found::One(found)
            }
            Found::Nothing => experts::find(self.layout, targets, &name),
            several => several,
        })
    }

    /// The same targets, with what is known of the conversion to the one GGUF file among checkpoint and adapter; an error where
    /// nothing is known of it. Between two GGUF files nothing is converted.
    fn converted(
        &self,
        adapter: &Adapter,
        module: &AdapterModule,
        found: Found<'a>,
    ) -> Result<Found<'a>, AdapterFault> {
        let (of_model, of_adapter) = (self.siblings.gguf(), adapter.checkpoint.gguf());
        let (Some(gguf), Found::One(targets)) = (of_model.or(of_adapter), &found) else { return Ok(found) };
        let name = adapter.renamed(&module.name);
        let unknown = |target: &Target<'_>| match of_model {
            Some(_) => gguf::unknown_conversion(gguf, &name, target.module),
            None => gguf::unknown_conversion(gguf, target.module, &name),
        };
        if let Some(fault) = targets.iter().filter(|_| adapter.rotary.is_none()).find_map(unknown) {
            return Err(fault);
        }
        let unshifted = |target: &Target<'a>| match target.order {
            RowOrder::Shifted if gguf::keeps_norms(gguf) => Target { order: RowOrder::Same, ..*target },
            _ => *target,
        };
        Ok(Found::One(targets.iter().map(unshifted).collect()))
    }

    /// Finds the targets of whole tensors beside factors: tensors of the checkpoint with their names and shapes. Others are not
    /// understood.
    fn replacements<'m>(
        &mut self,
        adapter: &'m Adapter,
        targets: &Targets<'a>,
        wanted: &dyn Fn(&str) -> bool,
        matched: &mut Vec<(&'m AdapterModule, Vec<Target<'a>>)>,
    ) {
        let shape_of = |tensor: &TensorId| &adapter.checkpoint.layout().at(*tensor).shape;
        for module in &adapter.replacements {
            let fits = |target: &Target<'_>| {
                module.parts.iter().all(|(part, tensor)| {
                    let own = if part.is_of_bias() { target.bias } else { target.weight };
                    target.projection.is_none() && own.is_some_and(|own| self.layout.at(own).shape == *shape_of(tensor))
                })
            };
            let found = targets.find(&adapter.renamed(&module.name));
            match self.converted(adapter, module, found).unwrap_or(Found::Nothing) {
                _ if !wanted(&module.name) => self.skip(adapter, module.parts.values(), SkipReason::OtherComponent),
                Found::One(targets) if matches!(&targets[..], [target] if fits(target)) => {
                    matched.push((module, targets));
                }
                _ => self.skip(adapter, module.parts.values(), SkipReason::NotUnderstood),
            }
        }
    }

    /// Fails if nothing matched or, when strict, if anything is unmatched.
    fn check_found(
        &self,
        adapter: &Adapter,
        matched: usize,
        first_unmatched: usize,
        targets: &Targets<'_>,
        matching: Matching,
    ) -> Result<()> {
        let unmatched: Vec<String> =
            self.report.unmatched[first_unmatched..].iter().map(|u| u.module.clone()).collect();
        let keys = matched + unmatched.len();
        let fault = if matched == 0 {
            let named = if keys > 0 {
                unmatched
            } else {
                adapter.unknown.iter().map(|&tensor| adapter.key(tensor).into()).collect()
            };
            let adapter_sample = named.into_iter().take(8).collect();
            AdapterFault::NothingMatches { keys, adapter_sample, checkpoint_sample: targets.sample() }
        } else if matching == Matching::Strict && !unmatched.is_empty() {
            AdapterFault::PartlyMatches { keys, unmatched }
        } else {
            return Ok(());
        };
        Err(Error::adapter(&adapter.path, None, fault))
    }

    /// Builds the steps of one module, whose parts may be in several of the checkpoint's modules. An error leaves everything as
    /// it was.
    fn module<'m>(
        &mut self,
        adapter: &Adapter,
        module: &'m AdapterModule,
        targets: &[Target<'_>],
        claims: &mut Claims<'m>,
    ) -> Result<()> {
        if adapter.strength == 0.0 {
            self.skip(adapter, module.parts.values(), SkipReason::ZeroStrength);
            return Ok(());
        }
        let (mut changes, mut skipped, mut kind, mut scale) = (Vec::new(), BTreeMap::new(), Vec::new(), None);
        let cache = FactorCache::default();
        for target in targets {
            let built = kinds::steps(adapter, module, target, &cache, &|tensor| self.weight(tensor))?;
            let Built { weight, view, columns, bias, kinds, factor, skipped: not_here } = built;
            for (tensor, steps, view, columns) in
                [(target.weight, weight, view, columns), (target.bias, bias, None, None)]
            {
                if let (Some(tensor), Some((shape, steps))) = (tensor, steps) {
                    self.check_dtype(adapter, module, tensor)?;
                    changes.push(Change { tensor, shape, steps, view, columns, target });
                }
            }
            skipped.extend(not_here);
            (kind, scale) = (kinds, factor.or(scale));
        }
        for (part, why) in &skipped {
            self.skip(adapter, module.parts.get(part), *why);
        }
        let used = || module.parts.iter().filter(|(part, _)| !skipped.contains_key(part)).map(|(_, tensor)| tensor);
        if claims.claim(adapter, module, &changes, &self.changed, self.layout)? == Claimed::Again {
            self.skip(adapter, used(), SkipReason::Repeated);
            return Ok(());
        }
        if changes.is_empty() {
            return Ok(());
        }
        let keys = keys(adapter, used());
        let (mut changed, mut rows) = (Vec::new(), Vec::new());
        for change in changes {
            let of_part = change.target.projection.is_some()
                || change.target.expert.is_some_and(|expert| expert.stacked.and(expert.number).is_some());
            let part = change.steps.iter().find(|_| of_part);
            rows.push(part.map(|step| step.rows().start as u64..step.rows().end as u64));
            changed.push(self.layout.at(change.tensor).name.clone());
            self.apply(change, module);
        }
        self.report.applied.push(Applied {
            adapter: adapter.path.clone(),
            strength: adapter.strength,
            module: module.name.clone(),
            kind: kind.join(" + "),
            factor: scale,
            keys,
            targets: changed,
            rows,
        });
        Ok(())
    }

    /// Adds the steps of a change to its tensor's.
    fn apply(&mut self, change: Change<'_>, module: &AdapterModule) {
        let now = self.changed.entry(change.tensor).or_default();
        now.shape = change.shape;
        let maker = |adapter| Maker { adapter: Arc::clone(adapter), module: module.name.clone() };
        now.makers.extend(self.origins.last().map(maker));
        now.is_bias = change.target.bias == Some(change.tensor);
        now.view = change.view.or(now.view);
        now.steps.extend(change.steps);
    }

    /// Fails if the module would change a weight whose elements are codes of something that is not understood.
    fn check_codes(
        &mut self,
        adapter: &Adapter,
        module: &AdapterModule,
        targets: &[Target<'_>],
    ) -> Result<(), (SkipReason, Error)> {
        let changes_weight = module.parts.keys().any(|part| !part.is_of_bias() && *part != Part::Alpha);
        if adapter.strength == 0.0 || !changes_weight {
            return Ok(());
        }
        let fault = |fault| Error::adapter(&adapter.path, Some(&module.name), fault);
        for tensor in targets.iter().filter_map(|target| target.weight) {
            let weight = self.layout.at(tensor);
            if let Some(packed) = Packed::of(weight, &self.siblings) {
                let packing = packed.packing;
                let codes = self.codes_of(tensor, packed);
                let codes = codes.map_err(|refused| (SkipReason::Packed(packing), fault(refused)))?;
                self.codes.insert(tensor, codes);
                continue;
            }
            let scale_in_gguf = self.siblings.scale_in_gguf(weight);
            if self.deferred.contains(&tensor)
                && (scale_in_gguf.is_some() || Scaling::of(weight, &self.siblings).is_err())
            {
                // Whatever the scale means is left to the caller, as the weight is.
                self.codes.insert(tensor, Codes::unread((tensor, weight), Packing::Unknown, weight.shape.clone()));
                continue;
            }
            if let Some(scale) = scale_in_gguf {
                let (weight, scale) = (weight.name.clone(), scale.name.clone());
                return Err((SkipReason::UnknownScale, fault(AdapterFault::UnknownScale { weight, scale })));
            }
            let scaling = Scaling::of(weight, &self.siblings);
            let scaling = scaling.map_err(|unknown| (SkipReason::UnknownScale, fault(unknown)))?;
            let Some(scale) = scaling.map(|scaling| scaling.tensor()) else { continue };
            for (part, tensor) in &module.parts {
                let dtype = adapter.checkpoint.layout().at(*tensor).dtype;
                if part.is_whole() && Float::of(dtype).is_none_or(Float::is_fp8) {
                    let scale = self.layout.at(scale).name.clone();
                    let codes = AdapterFault::ScaledReplacement { dtype, scale };
                    return Err((SkipReason::UnknownScale, fault(codes)));
                }
            }
        }
        Ok(())
    }

    /// The codes of a packed weight, which is to be changed.
    fn codes_of(&self, tensor: TensorId, packed: Packed) -> Result<Codes, AdapterFault> {
        let weight = self.layout.at(tensor);
        let deferred = self.deferred.contains(&tensor);
        if (self.repacked || deferred) && packed.packing.is_written() {
            return Codes::of((tensor, weight), &packed, &self.siblings);
        }
        if let Some(shape) = packed.shape(weight, &self.siblings).filter(|_| deferred) {
            return Ok(Codes::unread((tensor, weight), packed.packing, shape));
        }
        let Packed { packing, sign } = packed;
        Err(AdapterFault::Packed { tensor: weight.name.clone(), dtype: weight.dtype, packing, sign })
    }

    fn check_dtype(&self, adapter: &Adapter, module: &AdapterModule, tensor: TensorId) -> Result<()> {
        let info = self.layout.at(tensor);
        if Encoding::of(info.dtype).is_some() || self.codes.contains_key(&tensor) {
            return Ok(());
        }
        let fault = AdapterFault::BadDType { what: format!("its target `{}`", info.name), dtype: info.dtype };
        Err(Error::adapter(&adapter.path, Some(&module.name), fault))
    }

    /// The tensor after the steps so far.
    fn weight(&self, tensor: TensorId) -> Weight<'a> {
        let info = self.layout.at(tensor);
        let stored = self.codes.get(&tensor).map_or(&info.shape[..], Codes::shape);
        let shape = self.changed.get(&tensor).map_or(stored, |changed| &changed.shape);
        Weight::new(&info.name, shape.to_vec())
    }

    fn skip<'i>(&mut self, adapter: &Adapter, tensors: impl IntoIterator<Item = &'i TensorId>, why: SkipReason) {
        let skipped = keys(adapter, tensors).into_iter().map(|key| Skipped { adapter: adapter.path.clone(), key, why });
        self.report.skipped.extend(skipped);
    }

    /// Fails if a strict match skipped any tensor of the adapter.
    fn check_applied(&self, adapter: &Adapter, first_skipped: usize) -> Result<()> {
        let faulty = self.report.skipped[first_skipped..].iter().filter(|s| s.why.is_fault());
        let keys: Vec<String> = faulty.clone().map(|s| s.key.clone()).collect();
        let fault = match keys.len() {
            0 => return Ok(()),
            _ if faulty.clone().all(|s| s.why == SkipReason::NoParameter) => {
                AdapterFault::PartlyMatches { keys: adapter.modules.len(), unmatched: keys }
            }
            _ => AdapterFault::NotUnderstood { keys },
        };
        Err(Error::adapter(&adapter.path, None, fault))
    }

    fn finish(self) -> Result<Resolved> {
        let Resolving { layout, siblings, mut codes, changed, report, origins, .. } = self;
        let mut shapes: BTreeMap<TensorId, Vec<u64>> =
            changed.iter().map(|(&tensor, changed)| (tensor, changed.shape.clone())).collect();
        let mut tensors = BTreeMap::new();
        for (tensor, changes) in changed {
            let info = layout.at(tensor);
            let fault = |fault| Error::Unpatchable { tensor: info.name.clone(), fault: Box::new(fault) };
            let changed_scale =
                |scale: TensorId| fault(AdapterFault::ChangedScale { scale: layout.at(scale).name.clone() });
            if let Some(codes) = codes.remove(&tensor) {
                for (part, patch) in TensorPatch::of_codes(codes, changes).map_err(fault)? {
                    if shapes.insert(part, patch.patched_shape().to_vec()).is_some() && part != tensor {
                        return Err(changed_scale(part));
                    }
                    tensors.insert(part, patch);
                }
                continue;
            }
            let patch = TensorPatch::new(info, changes, &siblings).map_err(fault)?;
            if let Some(scale) = patch.scale().filter(|scale| shapes.contains_key(scale)) {
                return Err(changed_scale(scale));
            }
            tensors.insert(tensor, patch);
        }
        let shapes: Vec<(TensorId, Vec<u64>)> = shapes.into_iter().collect();
        Ok(Resolved { tensors, layout: layout.patched(&shapes)?, report, origins })
    }
}

/// Joins an alpha to the factors of the same module, where a file spells the module's name in two ways (Z-Image:
/// `to.q.lora.down.weight` and `to_q.alpha`).
fn join_spellings<'m, 'a>(
    matched: Vec<(&'m AdapterModule, Vec<Target<'a>>)>,
) -> Vec<(Cow<'m, AdapterModule>, Vec<Target<'a>>)> {
    let is_alpha = |module: &AdapterModule| module.parts.keys().eq([&Part::Alpha]);
    let (alphas, others): (Vec<_>, Vec<_>) = matched.into_iter().partition(|(module, _)| is_alpha(module));
    let mut joined: Vec<_> = others.into_iter().map(|(module, targets)| (Cow::Borrowed(module), targets)).collect();
    for (alpha, targets) in alphas {
        let takes = |(module, of): &&mut (Cow<'_, AdapterModule>, Vec<Target<'_>>)| {
            *of == targets && !module.parts.contains_key(&Part::Alpha)
        };
        match joined.iter_mut().find(takes) {
            Some((module, _)) => module.to_mut().parts.extend(alpha.parts.clone()),
            None => joined.push((Cow::Borrowed(alpha), targets)),
        }
    }
    joined
}

/// Whether a module does not fit the checkpoint's shapes.
fn is_misfit(error: &Error) -> bool {
    matches!(error, Error::Adapter { fault, .. } if matches!(**fault, AdapterFault::Shape { .. }))
}

/// The entry of a module that is not applied.
fn unmatched(adapter: &Adapter, module: &AdapterModule, why: Option<&Error>) -> Unmatched {
    let why = why.map(|error| match error {
        Error::Adapter { key: Some(key), fault, .. } => format!("`{key}`: {fault}"),
        Error::Adapter { fault, .. } => fault.to_string(),
        other => other.to_string(),
    });
    Unmatched {
        adapter: adapter.path.clone(),
        module: module.name.clone(),
        keys: keys(adapter, module.parts.values()),
        why,
    }
}

fn keys<'i>(adapter: &Adapter, tensors: impl IntoIterator<Item = &'i TensorId>) -> Vec<String> {
    tensors.into_iter().map(|&tensor| adapter.key(tensor).to_owned()).collect()
}
