//! Patches: changes of a tensor's values, and their arithmetic. Values are converted to f32, changed, and rounded once to the
//! storage type.
//!
//! A [`TensorPatch`] is a list of steps, each of which changes some rows of one tensor. [`Patches`](crate::adapter::Patches)
//! reads the factors and finds the tensor; a patch keeps their origin only to compare it.
//!
//! A weight is patched in small pieces, in place, without an f32 copy of the whole if its steps allow that. Every
//! element is computed by the same operations in the same order whatever the piece, the thread and the instruction
//! set: the sum over the rank in order with fused multiply-add, from zero; then times the scale; then added to the
//! weight; each rounded to f32. So the bytes are the same on every machine, and a device that does the same
//! operations computes the same bytes.
//!
//! A patch may also cast: its values are read in one type and rounded to another (`cast`). They are lifted, changed and
//! rounded once, as those of any patch are; without steps they are only lifted and rounded.

mod blocks;
mod cast;
mod codes;
mod deferred;
mod outcome;
mod part;
mod pieces;
mod products;
mod rows;
mod scales;
mod steps;
mod tiles;
mod vector;
mod whole;

use std::path::PathBuf;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, Siblings, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::encoding::Encoding;
use crate::error::{AdapterFault, Error, Measured, Mismatch, Result};
use crate::float::Float;
use crate::rounding::Rounding;
use crate::threads;
use crate::transfer::Stamp;
pub use blocks::{dequantise, quantise};
pub(crate) use codes::Codes;
use codes::OfCodes;
pub(crate) use deferred::{Deferral, FactorRecipe, Side};
pub use outcome::{PatchOutcome, Requantised};
use part::OfWhole;
use pieces::Stored;
use scales::Grid;
pub use scales::ScalePolicy;
pub(crate) use scales::{Scales, Scaling};
use steps::Scope;
pub(crate) use steps::{
    Axis, BlockTransform, Columns, Delta, Dora, Kronecker, Linear, Matrix, Product, Step, matrix_of,
};
use vector::Tier;
use whole::F32Weight;
pub(crate) use whole::same_change;

/// All changes of one tensor of the checkpoint.
///
/// A clone shares the factors. [`apply`](TensorPatch::apply) does the arithmetic.
#[derive(Clone, Debug)]
pub struct TensorPatch {
    /// The tensor's name, for messages.
    name: String,
    /// How the checkpoint stores it.
    stored: Encoding,
    /// How it is stored afterwards.
    target: Encoding,
    /// Whether its values may become blocks again.
    requantises: bool,
    /// Its shape in the checkpoint.
    shape: Vec<u64>,
    /// Its shape afterwards.
    patched_shape: Vec<u64>,
    scaling: Option<Scaling>,
    needs: Vec<TensorId>,
    steps: Arc<Vec<Step>>,
    /// Whether it is a bias, each element of which is a row.
    is_bias: bool,
    view: Option<(usize, usize)>,
    rounding: Rounding,
    scale_policy: ScalePolicy,
    /// For a recomputed scale, the weight that it belongs to.
    scale_of: Option<Arc<TensorPatch>>,
    /// For a tensor of a packed weight, which one it is. `shape` is then that of the weight's values, and `patched_shape` the
    /// tensor's own.
    codes: Option<OfCodes>,
    /// For a tensor of which a rank has a part, or that is in a stage, the patch of the whole. `shape`, `patched_shape` and, if they are
    /// enough, the steps are those of the part.
    of_whole: Option<Arc<OfWhole>>,
    makers: Vec<Maker>,
}

/// The changes of a tensor, while they are collected.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) steps: Vec<Step>,
    /// The tensor's shape after them.
    pub(crate) shape: Vec<u64>,
    /// Whether it is a bias, each element of which is a row: of a fused one, a part is changed.
    pub(crate) is_bias: bool,
    /// The tensor's rows and columns as the steps count them, if that is not its first dimension by all others.
    pub(crate) view: Option<(usize, usize)>,
    /// The origins of the steps, in order.
    pub(crate) makers: Vec<Maker>,
}

/// The origin of some of a patch's steps: an adapter, and its module of this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Maker {
    pub(crate) adapter: Arc<Origin>,
    pub(crate) module: String,
}

/// The files and settings of an adapter. Equal origins change a checkpoint in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) path: PathBuf,
    pub(crate) stamps: Vec<Stamp>,
    /// The bits of its strength.
    pub(crate) strength: u32,
    /// All else that it is applied with, in words.
    pub(crate) settings: String,
}

/// The inputs of a patch, without its factors. Patches of one checkpoint with equal recipes give a tensor the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recipe {
    name: String,
    target: Encoding,
    patched_shape: Vec<u64>,
    rounding: Rounding,
    scale_policy: ScalePolicy,
    /// The type of the weight's scales, and which values each is for.
    scales: Option<(Float, Grid)>,
    makers: Vec<Maker>,
    scale_of: Option<Box<Recipe>>,
}

impl TensorPatch {
    /// Patches a weight in place. `bytes` is as long as the patched tensor; it begins with the tensor's bytes as the
    /// checkpoint holds them, in its storage type, at any alignment. `siblings` are the checkpoint's bytes of the
    /// tensors that [`needs`](TensorPatch::needs) names, in its order. A patch that casts is applied by
    /// [`apply_from`](TensorPatch::apply_from).
    ///
    /// Weights that are NaN or infinite stay so. The work runs on the library's threads, one for each core, whatever thread
    /// calls this.
    ///
    /// # Errors
    /// [`Error::WrongSize`] when `bytes` or a sibling has another length; [`Error::Unpatchable`] when a scale is zero or not finite,
    /// and for blocks of GGML that are not to be [requantised](crate::Weights::requantise);
    /// [`Error::Mismatch`] when the patch casts, and for a part of a tensor whose change needs more of it
    /// ([`Weights::read`](crate::Weights::read) reads that); [`Error::Io`] when no threads can be created; then nothing is changed.
    pub fn apply(&self, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        self.check_own()?;
        if self.casts() {
            let (tensor, dtype, asked) = (self.name.clone(), self.stored.dtype(), self.dtype());
            return Err(Mismatch::InPlace { tensor, dtype, asked }.into());
        }
        threads::run(|| self.apply_with(Tier::best(), bytes, siblings))?
    }

    /// The other tensors whose bytes [`apply`](TensorPatch::apply) needs: the scale of an fp8 weight, the weight of a recomputed
    /// scale, or the others that a packed weight is made of.
    pub fn needs(&self) -> &[TensorId] {
        &self.needs
    }

    /// The tensor's element type after patching; another than in the checkpoint if it is [cast](crate::Weights::cast).
    pub fn dtype(&self) -> DType {
        match &self.of_whole {
            Some(of) => of.patch.dtype(),
            None => self.codes.as_ref().map_or_else(|| self.target.dtype(), OfCodes::dtype),
        }
    }

    /// The tensor's shape after patching; larger than in the checkpoint if an adapter pads the weight.
    pub fn patched_shape(&self) -> &[u64] {
        &self.patched_shape
    }

    /// The bytes of its factors in memory, as f32.
    pub fn factor_bytes(&self) -> u64 {
        let of_whole = self.of_whole.as_ref().map_or(0, |of| of.patch.factor_bytes());
        // A part that uses the steps of the whole has no others.
        let shared = self.of_whole.as_ref().is_some_and(|of| Arc::ptr_eq(&of.patch.steps, &self.steps));
        let own = self.steps.iter().filter(|_| !shared).map(|step| step.change.values() as u64 * 4).sum::<u64>();
        own + of_whole
    }

    /// The patch that makes `changes` to a tensor, whose scale is among `siblings`, the checkpoint's tensors.
    ///
    /// # Errors
    /// [`AdapterFault::BadDType`] for a tensor that is not of floats, and what is wrong with the scale beside it.
    pub(crate) fn new(
        tensor: &TensorInfo,
        changes: Changes,
        siblings: &Siblings<'_>,
    ) -> Result<TensorPatch, AdapterFault> {
        let bad_type = || AdapterFault::BadDType { what: "it".to_owned(), dtype: tensor.dtype };
        let encoding = Encoding::of(tensor.dtype).ok_or_else(bad_type)?;
        let scaling = Scaling::of(tensor, siblings)?;
        let Changes { steps, shape: patched_shape, is_bias, view, makers } = changes;
        if patched_shape != tensor.shape && scaling.as_ref().is_some_and(|scaling| scaling.count() > 1) {
            let kind = "padding of a weight with several scales; such".to_owned();
            return Err(AdapterFault::Unsupported { kind });
        }
        Ok(TensorPatch {
            name: tensor.name.clone(),
            stored: encoding,
            target: encoding,
            requantises: false,
            shape: tensor.shape.clone(),
            patched_shape,
            needs: scaling.iter().map(|scaling| scaling.tensor()).collect(),
            scaling,
            steps: Arc::new(steps),
            is_bias,
            view,
            rounding: Rounding::default(),
            scale_policy: ScalePolicy::default(),
            scale_of: None,
            codes: None,
            of_whole: None,
            makers,
        })
    }

    /// Sets the rounding.
    pub(crate) fn set_rounding(&mut self, rounding: Rounding) {
        match &mut self.scale_of {
            // A scale is always rounded to the nearest, however its weight is.
            Some(weight) => Arc::make_mut(weight).set_rounding(rounding),
            None => self.rounding = rounding,
        }
        if let Some(of) = &mut self.of_whole {
            Arc::make_mut(of).patch.set_rounding(rounding);
        }
    }

    /// Sets the policy for the weight's scale.
    pub(crate) fn set_scale_policy(&mut self, policy: ScalePolicy) {
        self.scale_policy = policy;
    }

    /// The size of an element as it is stored; of a block of elements that are stored together.
    pub(crate) fn element_bytes(&self) -> usize {
        self.target.block_bytes()
    }

    /// Whether it recomputes a weight's scale.
    pub(crate) fn is_of_scale(&self) -> bool {
        self.scale_of.is_some()
    }

    /// Whether it changes its tensor by the same numbers as another patch changes one of the same shape.
    pub(crate) fn changes_as(&self, other: &TensorPatch) -> bool {
        let shape = if self.codes.is_some() { &self.shape } else { &self.patched_shape };
        let (rows, cols) = matrix_of(shape).unwrap_or_default();
        let all = 0..rows;
        self.patched_shape == other.patched_shape
            && same_change(&self.steps, &other.steps, std::slice::from_ref(&all), cols)
    }

    /// The inputs of the patch.
    pub(crate) fn recipe(&self) -> Recipe {
        Recipe {
            name: self.name.clone(),
            target: self.target,
            patched_shape: self.patched_shape.clone(),
            rounding: self.rounding,
            scale_policy: self.scale_policy,
            scales: self.scaling.as_ref().map(Scaling::form),
            makers: self.makers.clone(),
            scale_of: self.scale_of.as_ref().map(|weight| Box::new(weight.recipe())),
        }
    }

    /// Reads its tensor, number `tensor` of the checkpoint, and patches it. `dst` has to be as long as the patched tensor.
    pub(crate) fn read(&self, checkpoint: &Checkpoint, tensor: TensorId, dst: &mut [u8]) -> Result<PatchOutcome> {
        if let Some(of) = self.through_whole() {
            self.check_size(dst)?;
            return of.read(checkpoint, dst);
        }
        if self.casts() {
            return self.read_cast(checkpoint, tensor, dst);
        }
        let info = checkpoint.info(tensor)?;
        let (stored, room) = (info.bytes as usize, dst.len());
        let pristine = dst.get_mut(..stored).ok_or_else(|| {
            let what = Measured::Tensor { name: info.name.clone() };
            Error::WrongSize { what, needed: stored as u64, given: room as u64 }
        })?;
        checkpoint.read(tensor, pristine)?;
        let siblings = self.read_siblings(checkpoint)?;
        self.apply(dst, &siblings.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    /// Reads the bytes of the tensors that [`needs`](TensorPatch::needs) names.
    pub(crate) fn read_siblings(&self, checkpoint: &Checkpoint) -> Result<Vec<Vec<u8>>> {
        let read = |&sibling: &TensorId| {
            let mut bytes = vec![0; checkpoint.info(sibling)?.bytes as usize];
            checkpoint.read(sibling, &mut bytes).map(|()| bytes)
        };
        self.needs.iter().map(read).collect()
    }

    /// As [`apply`](TensorPatch::apply), on the current thread pool.
    fn apply_with(&self, tier: Tier, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        self.check_size(bytes)?;
        self.check_target()?;
        if let Some(weight) = &self.scale_of {
            return weight.apply_to_scale(tier, bytes, siblings);
        }
        if let Some(of) = &self.codes {
            return self.repack(tier, of, bytes, siblings);
        }
        let scales = self.scales(siblings)?;
        let weight = self.stored(scales.as_ref());
        Ok(match (&self.scaling, &scales, self.target) {
            (Some(scaling), Some(old), Encoding::Float(float)) if self.scale_policy == ScalePolicy::Recompute => {
                let lifted = F32Weight::patched(tier, weight, bytes, &self.steps);
                let new = lifted.scales(float, scaling.float, old);
                lifted.store(Stored { scales: Some(&new), ..weight }, bytes)
            }
            _ if self.is_in_pieces() => pieces::apply(tier, weight, bytes, &self.steps),
            _ => whole::apply(tier, weight, bytes, &self.steps),
        })
    }

    /// Fails unless `patched` is as long as the patched tensor.
    fn check_size(&self, patched: &[u8]) -> Result<()> {
        let wanted = match &self.codes {
            Some(of) => Some(of.bytes()),
            None if self.of_whole.is_some() => {
                self.dtype().bytes_of(&self.patched_shape).and_then(|bytes| usize::try_from(bytes).ok())
            }
            None => bytes_of(&self.patched_shape, self.target),
        };
        if wanted == Some(patched.len()) {
            return Ok(());
        }
        let (what, given) = (Measured::Patched { name: self.name.clone() }, patched.len() as u64);
        Err(Error::WrongSize { what, needed: wanted.map_or(u64::MAX, |bytes| bytes as u64), given })
    }

    /// Whether no step needs more of the weight than a row, and rows are whole blocks.
    fn is_in_pieces(&self) -> bool {
        let (stored, target) = (self.stored.together(), self.target.together());
        let cols = if self.is_bias { 1 } else { self.matrix().1 };
        cols.is_multiple_of(stored)
            && cols.is_multiple_of(target)
            && self.steps.iter().all(|step| step.change.scope() < Scope::Weight)
    }

    /// Its rows and columns as the steps count them.
    fn matrix(&self) -> (usize, usize) {
        self.view.or_else(|| matrix_of(&self.shape)).unwrap_or_default()
    }

    fn stored<'a>(&self, scales: Option<&'a Scales>) -> Stored<'a> {
        let (rows, cols) = self.matrix();
        let (rows, cols) = if self.is_bias { (rows * cols, 1) } else { (rows, cols) };
        let (from, to) = (self.stored, self.target);
        Stored { from, to, scales, noise: self.rounding.noise(&self.name), rows, cols }
    }
}

/// The bytes of a shape.
fn bytes_of(shape: &[u64], stored: Encoding) -> Option<usize> {
    usize::try_from(stored.dtype().bytes_of(shape)?).ok()
}

#[cfg(test)]
mod tests;
