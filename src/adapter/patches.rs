//! The patches of a checkpoint: what its adapters change, tensor by tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Adapter;
use super::report::{Applied, MatchReport, SkipReason, Skipped};
use super::resolve::{self, PackedWeights, Resolved};
use super::tied::{Apart, Ends};
use crate::checkpoint::{Checkpoint, FactorShapes, Layout, Siblings, TensorId};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::patch::{Deferral, Origin, ScalePolicy, Side, TensorPatch};
use crate::rounding::Rounding;

/// Whether every part of an adapter must match the checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Matching {
    /// Every tensor must be applied. The default.
    #[default]
    Strict,
    /// Some of an adapter's modules may be missing from the checkpoint, have another shape there, be for weights that are packed
    /// or have a scale that is not understood, or not be understood themselves; the report lists them, and nothing of such a module
    /// is applied. It is still an error if nothing of an adapter can be applied, or if a name matches several modules.
    AllowPartial,
}

/// Adapters resolved against the names and shapes of one checkpoint: for every tensor that they change, the steps in order.
///
/// [`Weights`](crate::Weights) combines them with the checkpoint, for reading and loading.
#[derive(Clone, Debug, Default)]
pub struct Patches {
    tensors: BTreeMap<TensorId, TensorPatch>,
    /// The weights whose changes are not merged.
    deferred: BTreeMap<TensorId, Deferral>,
    /// The checkpoint's layout with an untied head, if there is one.
    with_head: Option<Layout>,
    layout: Layout,
    report: MatchReport,
    origins: Vec<Arc<Origin>>,
    /// How all of them are stored.
    policy: (Rounding, ScalePolicy),
}

impl Patches {
    /// Finds the targets of `adapters` in `layout` and reads their factors.
    ///
    /// Several adapters change one weight in the order given, each applied to the result of those before it. Nothing is changed
    /// here, so an error leaves nothing half done.
    ///
    /// # Errors
    /// [`Error::Adapter`] naming the adapter, the key and the fault: nothing or (when strict) not all of the adapter
    /// matches, a name matches several modules, a shape does not fit, a factor is not finite or its counterpart is
    /// missing, the target's type cannot be patched, or the target is packed or has a scale that is not understood. What a
    /// file notes about its scales in tensors of text cannot be read here; [`Weights::patched`](crate::Weights::patched)
    /// reads it. [`Error::File`] and [`Error::Io`] from reading the factors.
    pub fn resolve(layout: &Layout, adapters: Vec<Adapter>, matching: Matching) -> Result<Patches> {
        let ends = Ends::of(layout, &adapters)?;
        let now = ends.layout().unwrap_or(layout);
        let siblings = Siblings::of(now);
        let patches = Patches::resolve_among(siblings, now, &adapters, matching, &PackedWeights::default())?;
        patches.with_ends(ends, layout)
    }

    /// As [`resolve`](Patches::resolve), with all that the checkpoint's files say of its scales.
    pub(super) fn resolve_in(
        checkpoint: &Checkpoint,
        adapters: Vec<Adapter>,
        matching: Matching,
        packed: &PackedWeights,
    ) -> Result<Patches> {
        let ends = Ends::of(checkpoint.layout(), &adapters)?;
        let with_head = ends.layout().map(|layout| checkpoint.with_layout(layout.clone())).transpose()?;
        let now = with_head.as_ref().unwrap_or(checkpoint);
        let siblings = Siblings::of_checkpoint(now);
        let patches = Patches::resolve_among(siblings, now.layout(), &adapters, matching, packed)?;
        patches.with_ends(ends, checkpoint.layout())
    }

    fn resolve_among(
        siblings: Siblings<'_>,
        layout: &Layout,
        adapters: &[Adapter],
        matching: Matching,
        packed: &PackedWeights,
    ) -> Result<Patches> {
        let Resolved { tensors, layout: patched, report, origins } =
            resolve::all(siblings, layout, adapters, matching, packed)?;
        Ok(Patches { tensors, layout: patched, report, origins, ..Patches::default() })
    }

    /// Takes the head for one with the embedding again, unless they came to differ. `layout` is the checkpoint's.
    fn with_ends(mut self, ends: Ends, layout: &Layout) -> Result<Patches> {
        let Ends::Apart(apart) = ends else { return Ok(self) };
        let Apart { untied, embedding, head, layout: with_head } = *apart;
        let same = match (self.tensors.get(&embedding), self.tensors.get(&head)) {
            (Some(embedding), Some(head)) => embedding.changes_as(head),
            (None, None) => true,
            _ => false,
        };
        if same {
            self.tie_again(layout, head, &untied.head)?;
        } else {
            self.report.untied = Some(untied);
            self.with_head = Some(with_head);
        }
        Ok(self)
    }

    /// Drops the patch of a head to which the same is done as to its embedding.
    fn tie_again(&mut self, layout: &Layout, head: TensorId, name: &str) -> Result<()> {
        self.tensors.remove(&head);
        let shapes: Vec<_> = self.iter().map(|(tensor, patch)| (tensor, patch.patched_shape().to_vec())).collect();
        self.layout = layout.patched(&shapes)?;
        let applied = std::mem::take(&mut self.report.applied);
        let (of_head, rest) = applied.into_iter().partition(|applied| applied.targets.iter().any(|to| to == name));
        self.report.applied = rest;
        for Applied { adapter, keys, .. } in of_head {
            let skipped =
                keys.into_iter().map(|key| Skipped { adapter: adapter.clone(), key, why: SkipReason::Repeated });
            self.report.skipped.extend(skipped);
        }
        Ok(())
    }

    /// The checkpoint's layout with the head as a last tensor, if the report tells of an untied one.
    pub(crate) fn with_head(&self) -> Option<&Layout> {
        self.with_head.as_ref()
    }

    /// No patches, for an unchanged `layout`.
    pub fn none(layout: &Layout) -> Patches {
        Patches { layout: layout.clone(), ..Patches::default() }
    }

    /// Sets how all patched tensors are rounded.
    #[must_use]
    pub fn rounding(mut self, rounding: Rounding) -> Patches {
        self.policy.0 = rounding;
        self.tensors.values_mut().for_each(|patch| patch.set_rounding(rounding));
        self
    }

    /// Sets whether the scales of fp8 weights are kept or recomputed.
    ///
    /// A recomputed scale is one of the tensors that change, so reading all of these gives it along with its weight. Its patch
    /// needs the weight, and repeats the weight's arithmetic; both work on an f32 copy of the weight.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a scale belongs to several weights.
    pub fn scales(mut self, policy: ScalePolicy) -> Result<Patches> {
        self.policy.1 = policy;
        self.tensors.retain(|_, patch| !patch.is_of_scale());
        self.tensors.values_mut().for_each(|patch| patch.set_scale_policy(policy));
        if policy == ScalePolicy::Keep {
            return Ok(self);
        }
        let mut scales = Vec::new();
        for (&weight, patch) in &self.tensors {
            let Some(scale) = patch.scale() else { continue };
            let info = self.layout.at(scale);
            if scales.iter().any(|(other, _)| *other == scale) {
                return Err(Error::invalid(format!("the scale `{}` is that of several weights", info.name)));
            }
            scales.extend(patch.of_scale(weight, info).map(|patch| (scale, patch)));
        }
        let own: Vec<_> = scales.iter().map(|(tensor, patch)| (*tensor, patch.patched_shape().to_vec())).collect();
        // Tensors that are only cast still share their bytes.
        let weights = self.tensors.iter().filter(|(_, patch)| !patch.only_casts());
        let weights = weights.map(|(&tensor, patch)| (tensor, patch.patched_shape().to_vec()));
        self.layout = self.layout.patched(&weights.chain(own).collect::<Vec<_>>())?;
        self.tensors.extend(scales);
        Ok(self)
    }

    /// The origins of the adapters, in order.
    pub(crate) fn origins(&self) -> &[Arc<Origin>] {
        &self.origins
    }

    /// The rounding and scale policy of all patched tensors; `None` if nothing changes.
    pub(crate) fn policy(&self) -> Option<(Rounding, ScalePolicy)> {
        (!self.tensors.is_empty()).then_some(self.policy)
    }

    /// The weights whose changes are deferred, and the type of their factors.
    pub(crate) fn deferred_types(&self) -> Vec<(TensorId, DType)> {
        self.deferred.iter().map(|(&weight, deferral)| (weight, deferral.float().dtype())).collect()
    }

    /// The changes of a weight, if they are deferred.
    pub(crate) fn deferral(&self, weight: TensorId) -> Option<&Deferral> {
        self.deferred.get(&weight)
    }

    /// The changes that a tensor of the layout is a factor of, and which.
    pub(crate) fn factor(&self, tensor: TensorId) -> Option<(&Deferral, Side)> {
        let factors = self.layout.factors_with(tensor)?;
        let side = if factors.a == tensor { Side::A } else { Side::B };
        Some((self.deferred.get(&factors.weight)?, side))
    }

    /// Whether weights in blocks or codes that the adapters change become such again.
    pub(crate) fn requantises(&self) -> bool {
        self.tensors.values().any(TensorPatch::requantises)
    }

    /// The tensors that are cast, with their new types.
    pub(crate) fn casts(&self) -> Vec<(TensorId, DType)> {
        let casts = self.tensors.iter().filter(|(_, patch)| patch.casts());
        casts.map(|(&tensor, patch)| (tensor, patch.dtype())).collect()
    }

    /// Lets weights in blocks of GGML that the adapters change become blocks again.
    pub(super) fn requantise(mut self) -> Result<Patches> {
        self.tensors.values_mut().try_for_each(TensorPatch::requantise)?;
        Ok(self)
    }

    /// Fails unless each patched tensor has a type afterwards.
    ///
    /// # Errors
    /// [`Error::Unpatchable`] for the first weight in blocks that is neither cast nor requantised.
    pub(crate) fn check_targets(&self) -> Result<()> {
        self.tensors.values().try_for_each(TensorPatch::check_target)
    }

    /// Takes the changes of these weights out of the patches. What is beside a packed one stays with it.
    pub(super) fn put_off(&mut self, deferred: Vec<(TensorId, Deferral)>) {
        for (weight, deferral) in deferred {
            if let Some(mut patch) = self.tensors.remove(&weight) {
                self.tensors.retain(|_, other| !other.is_of_codes_of(&patch));
                patch.drop_steps();
                if patch.casts() {
                    self.tensors.insert(weight, patch);
                }
            }
            self.deferred.insert(weight, deferral);
        }
    }

    /// Lays the tensors out again, from the checkpoint's layout.
    ///
    /// # Errors
    /// As [`Weights::defer`](super::Weights::defer).
    pub(super) fn lay_out(self, stored: &Layout) -> Result<Patches> {
        let policy = self.policy.1;
        self.laid_out(stored)?.scales(policy)
    }

    /// As [`lay_out`](Patches::lay_out), with the scales as they are.
    fn laid_out(mut self, stored: &Layout) -> Result<Patches> {
        // Tensors of the same bytes are cast together, but for one that changed when the others were cast.
        let (mut types, mut apart) = (BTreeMap::new(), BTreeSet::new());
        for tensor in stored.tensor_ids() {
            let (owner, dtype) = (stored.storage(tensor), self.tensors.get(&tensor).map(TensorPatch::dtype));
            if *types.entry(owner).or_insert(dtype) != dtype {
                apart.insert(owner);
            }
        }
        let changed = |(&tensor, patch): (&TensorId, &TensorPatch)| {
            let own = !patch.only_casts() || apart.contains(&stored.storage(tensor));
            own.then(|| (tensor, patch.patched_shape().to_vec()))
        };
        let changed: Vec<_> = self.tensors.iter().filter_map(changed).collect();
        let factors = self.deferred.iter().map(|(&weight, deferral)| FactorShapes {
            weight,
            dtype: deferral.float().dtype(),
            a: deferral.shape(Side::A),
            b: deferral.shape(Side::B),
        });
        let factors: Vec<_> = factors.collect();
        self.layout = stored.patched(&changed)?.cast(&self.casts())?.with_factors(&factors)?;
        Ok(self)
    }

    /// What these patches, of a whole checkpoint, are for a part of it.
    ///
    /// # Errors
    /// [`Error::Shard`] for a weight that can be divided no more once it is padded.
    pub(super) fn part(&self, checkpoint: &Checkpoint) -> Result<Patches> {
        let part = checkpoint.part().ok_or_else(|| Error::bug("patches for a part of a checkpoint that is none"))?;
        let whole = part.whole().layout();
        let is_padded = |(tensor, patch): (&TensorId, &TensorPatch)| patch.patched_shape() != whole.at(*tensor).shape;
        let padded = self.tensors.iter().any(is_padded).then(|| part.cuts_of(&self.layout)).transpose()?;
        let (mut tensors, mut deferred) = (BTreeMap::new(), BTreeMap::new());
        for (tensor, (of, cut)) in checkpoint.layout().tensor_ids().zip(part.tensors()) {
            if let Some(patch) = self.tensors.get(of) {
                let patched = padded.as_ref().map_or(cut, |padded| &padded[*of]);
                tensors.extend(patch.part(*of, cut.as_ref(), patched.as_ref())?.map(|patch| (tensor, patch)));
            }
            deferred.extend(self.deferred.get(of).map(|deferral| (tensor, deferral.part(cut.as_ref()))));
        }
        let (layout, report, origins) = (checkpoint.layout().clone(), self.report.clone(), self.origins.clone());
        let patches = Patches { tensors, deferred, with_head: None, layout, report, origins, policy: self.policy };
        patches.laid_out(checkpoint.layout())
    }

    /// The patch of a tensor, to be changed.
    pub(super) fn patch_mut(&mut self, tensor: TensorId) -> Option<&mut TensorPatch> {
        self.tensors.get_mut(&tensor)
    }

    /// Adds the patch of a tensor that is only cast.
    pub(super) fn add_cast(&mut self, tensor: TensorId, mut patch: TensorPatch) {
        let (rounding, scales) = self.policy;
        patch.set_rounding(rounding);
        patch.set_scale_policy(scales);
        self.tensors.insert(tensor, patch);
    }

    /// Gives tensors whose patches cast them their types in the layout. Patches that do nothing any more are dropped.
    pub(super) fn recast(mut self, types: &[(TensorId, DType)]) -> Result<Patches> {
        self.layout = self.layout.cast(types)?;
        self.tensors.retain(|_, patch| patch.casts() || !patch.only_casts());
        Ok(self)
    }

    /// These patches with a layout that says more of the same tensors.
    pub(super) fn with_layout(self, layout: Layout) -> Patches {
        Patches { layout, ..self }
    }

    /// How every tensor of the adapters was used.
    pub fn report(&self) -> &MatchReport {
        &self.report
    }

    /// The patch of a tensor; `None` if its bytes stay: no adapter changes it, or its changes are
    /// [deferred](crate::Weights::defer), and it is not cast.
    pub fn tensor(&self, tensor: TensorId) -> Option<&TensorPatch> {
        self.tensors.get(&tensor)
    }

    /// The tensors that change, in the layout's order, with their patches; those that are only cast among them.
    pub fn iter(&self) -> impl Iterator<Item = (TensorId, &TensorPatch)> {
        self.tensors.iter().map(|(&tensor, patch)| (tensor, patch))
    }

    /// The layout with the patched tensors' types and sizes, and with the factors of deferred changes as its last tensors. A
    /// tensor that an adapter changes never shares its bytes, even if it did before; those that are only cast, or whose changes
    /// are deferred, still do.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The bytes of all factors in memory, as f32.
    pub fn factor_bytes(&self) -> u64 {
        let merged = self.tensors.values().map(TensorPatch::factor_bytes).sum::<u64>();
        merged + self.deferred.values().map(Deferral::factor_bytes).sum::<u64>()
    }
}
