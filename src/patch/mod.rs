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
mod outcome;
mod pieces;
mod products;
mod scales;
mod steps;
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
pub use outcome::{PatchOutcome, Requantised};
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
    /// [`Error::Mismatch`] when the patch casts; [`Error::Io`] when no threads can be created; then nothing is changed.
    pub fn apply(&self, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        if self.casts() {
            let (tensor, dtype, asked) = (self.name.clone(), self.stored.dtype(), self.dtype());
            return Err(Mismatch::InPlace { tensor, dtype, asked }.into());
        }
        threads::run(|| self.apply_with(Tier::best(), bytes, siblings))?
    }

    /// The other tensors whose bytes [`apply`](TensorPatch::apply) needs: the scale of an fp8 weight, or the weight of a
    /// recomputed scale.
    pub fn needs(&self) -> &[TensorId] {
        &self.needs
    }

    /// The tensor's element type after patching; another than in the checkpoint if it is [cast](crate::Weights::cast).
    pub fn dtype(&self) -> DType {
        self.target.dtype()
    }

    /// The tensor's shape after patching; larger than in the checkpoint if an adapter pads the weight.
    pub fn patched_shape(&self) -> &[u64] {
        &self.patched_shape
    }

    /// The bytes of its factors in memory, as f32.
    pub fn factor_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.change.values() as u64 * 4).sum()
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
        let (rows, cols) = matrix_of(&self.patched_shape).unwrap_or_default();
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
        let wanted = bytes_of(&self.patched_shape, self.target);
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
mod tests {
    use super::*;
    use crate::ggml::Format;
    use proptest::prelude::*;

    /// Values in -1..1 that look random.
    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// These numbers as a matrix.
    fn matrix(rows: usize, cols: usize, seed: u64) -> Matrix {
        Matrix { rows, cols, values: noise(rows * cols, seed) }
    }

    fn product(rows: usize, cols: usize, rank: usize, seed: u64) -> Product {
        Product { up: matrix(rows, rank, seed), down: matrix(rank, cols, seed + 1) }
    }

    /// A product added to all rows.
    fn lora(rows: usize, cols: usize, rank: usize, seed: u64, scale: f32) -> Step {
        Step::add(0..rows, Delta::Product(product(rows, cols, rank, seed)), scale)
    }

    /// The scale of an adapter of such a rank at a strength, with an alpha of 2.5.
    fn scale(strength: f32, rank: usize) -> f32 {
        (f64::from(strength) * 2.5 / rank as f64) as f32
    }

    fn patch(dtype: DType, rows: usize, cols: usize, steps: Vec<Step>) -> TensorPatch {
        let weight = TensorInfo::new("w.weight", dtype, &[rows as u64, cols as u64], 0, 0).unwrap();
        let changes = Changes { steps, shape: weight.shape.clone(), ..Changes::default() };
        TensorPatch::new(&weight, changes, &Siblings::default()).unwrap()
    }

    /// Rows longer than a piece: each piece takes its own columns of the change.
    #[test]
    fn a_dense_change_of_long_rows_is_added_column_by_column() {
        let (rows, cols) = (3, 9_000);
        let (weight, change) = (noise(rows * cols, 1), noise(rows * cols, 2));
        let patch = patch(DType::F32, rows, cols, vec![Step::add(0..rows, Delta::Dense(change.clone()), 1.0)]);
        let mut bytes = stored(Float::F32, &weight);
        patch.apply(&mut bytes, &[]).unwrap();
        let sums: Vec<f32> = weight.iter().zip(&change).map(|(weight, change)| weight + change).collect();
        assert!(bytes == stored(Float::F32, &sums));
    }

    #[test]
    fn an_element_has_the_size_of_its_type() {
        let size = |dtype| patch(dtype, 2, 2, Vec::new()).element_bytes();
        assert_eq!([DType::F32, DType::BF16, DType::F16].map(size), [4, 2, 2]);
    }

    /// The float type that a patch rounds to.
    fn float(patch: &TensorPatch) -> Float {
        Float::of(patch.dtype()).unwrap()
    }

    fn stored(float: Float, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() * float.size()];
        float.round(values, &mut bytes);
        bytes
    }

    /// The definition, element by element.
    fn expected(weights: &[f32], cols: usize, factors: &[(Vec<f32>, Vec<f32>, usize, f32)]) -> Vec<f32> {
        let element = |(index, &weight): (usize, &f32)| {
            factors.iter().fold(weight, |weight, (up, down, rank, scale)| {
                let (row, col) = (index / cols, index % cols);
                let sum = (0..*rank).fold(0.0f32, |sum, k| up[row * rank + k].mul_add(down[k * cols + col], sum));
                weight + scale * sum
            })
        };
        weights.iter().enumerate().map(element).collect()
    }

    #[test]
    fn every_tier_and_split_gives_the_bits_of_the_definition() {
        for (rows, cols, rank) in [(1, 1, 1), (8, 32, 4), (13, 37, 5), (300, 1100, 16), (9, 513, 3)] {
            let all = [(rank, 7u64, scale(0.7, rank)), (rank + 1, 9, scale(-1.3, rank + 1))];
            let factors =
                all.map(|(rank, seed, scale)| (noise(rows * rank, seed), noise(rank * cols, seed + 1), rank, scale));
            for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
                let steps = Vec::from(all.map(|(rank, seed, scale)| lora(rows, cols, rank, seed, scale)));
                let patch = patch(dtype, rows, cols, steps);
                let before = stored(float(&patch), &noise(rows * cols, 3));
                let mut weights = vec![0.0; rows * cols];
                float(&patch).lift(&before, &mut weights);
                let wanted = stored(float(&patch), &expected(&weights, cols, &factors));
                for tier in Tier::all() {
                    for threads in [1, 3] {
                        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                        let mut bytes = before.clone();
                        pool.install(|| patch.apply_with(tier, &mut bytes, &[])).unwrap();
                        assert!(bytes == wanted, "{dtype} {rows}x{cols} {tier:?} on {threads} threads");
                    }
                }
            }
        }
    }

    #[test]
    fn every_kind_gives_the_same_bits_in_every_tier_and_split() {
        let rows = || 0..60;
        let whole = |rank| product(60, 70, rank, 11);
        let dora = |axis, of_original| Dora {
            ratio: 1.0,
            magnitude: noise(if axis == Axis::Rows { 60 } else { 70 }, 13),
            axis,
            of_original,
            epsilon: f32::EPSILON,
            strength: 0.6,
        };
        let (first, second) = (matrix(70, 3, 11), matrix(3, 70, 12));
        let linear = Linear { first, second, base: whole(3), inner: 1 };
        let kronecker = Kronecker { left: matrix(6, 7, 11), right: matrix(10, 10, 12), source: None };
        let kronecker = Delta::Kronecker(Box::new(kronecker));
        let kinds = [
            ("LoHa", Step::add(rows(), Delta::Hadamard(Box::new([whole(3), whole(4)])), 0.6)),
            ("LoKr", Step::add(rows(), kronecker, 0.6)),
            ("GLoRA", Step::add(rows(), Delta::Linear(Box::new(linear)), 0.6)),
            ("OFT", Step::rotate(rows(), 12, noise(5 * 12 * 12, 11), 0.6)),
            ("DoRA by rows", Step::decompose(rows(), Delta::Product(whole(3)), dora(Axis::Rows, true))),
            (
                "DoRA by columns",
                Step::decompose(rows(), Delta::Product(whole(3)), dora(Axis::Columns { inner: 1 }, false)),
            ),
            ("diff", Step::add(rows(), Delta::Dense(noise(4200, 11)), 0.6)),
            ("set", Step::set(7..29, noise(22 * 70, 11))),
        ];
        for (kind, step) in kinds {
            let patch = patch(DType::BF16, 60, 70, vec![lora(60, 70, 5, 1, scale(1.0, 5)), step]);
            let before = stored(float(&patch), &noise(4200, 5));
            let mut results = Vec::new();
            for tier in Tier::all() {
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let mut bytes = before.clone();
                    pool.install(|| patch.apply_with(tier, &mut bytes, &[])).unwrap();
                    results.push(bytes);
                }
            }
            assert!(results.iter().all(|bytes| *bytes == results[0]) && results[0] != before, "{kind}");
        }
    }

    #[test]
    fn stochastic_rounding_gives_the_same_bits_in_every_tier_and_split() {
        // By pieces, and on an f32 copy (norms over columns).
        for (rows, cols, copied) in [(300, 1100, false), (60, 700, true)] {
            let dora = || {
                let (magnitude, axis) = (noise(700, 13), Axis::Columns { inner: 1 });
                let dora =
                    Dora { ratio: 1.0, magnitude, axis, of_original: false, epsilon: f32::EPSILON, strength: 0.5 };
                Step::decompose(0..60, Delta::Product(product(60, 700, 3, 11)), dora)
            };
            let steps = || {
                let mut steps = vec![lora(rows, cols, 5, 1, scale(1.0, 5))];
                steps.extend(copied.then(dora));
                steps
            };
            for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
                let nearest = patch(dtype, rows, cols, steps());
                let mut patch = nearest.clone();
                patch.rounding = Rounding::Stochastic { seed: 5 };
                let before = stored(float(&patch), &noise(rows * cols, 3));
                let mut results = Vec::new();
                for tier in Tier::all() {
                    for threads in [1, 3] {
                        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                        let mut bytes = before.clone();
                        pool.install(|| patch.apply_with(tier, &mut bytes, &[])).unwrap();
                        results.push(bytes);
                    }
                }
                assert!(results.iter().all(|bytes| *bytes == results[0]), "{dtype} {rows}x{cols}");
                let mut rounded = before.clone();
                nearest.apply(&mut rounded, &[]).unwrap();
                assert_eq!(rounded == results[0], dtype == DType::F32, "{dtype}");
            }
        }
    }

    /// With a product, with norms over columns, and with nothing but the cast: each is the rounding of what f32 has.
    #[test]
    fn casts_give_the_same_bits_in_every_tier_and_split() {
        let (rows, cols) = (60, 1030);
        let dora = || {
            let (magnitude, axis) = (noise(cols, 13), Axis::Columns { inner: 1 });
            let dora = Dora { ratio: 1.0, magnitude, axis, of_original: false, epsilon: f32::EPSILON, strength: 0.5 };
            Step::decompose(0..rows, Delta::Product(product(rows, cols, 3, 11)), dora)
        };
        let product = || lora(rows, cols, 5, 1, scale(1.0, 5));
        for steps in [&(|| vec![]) as &dyn Fn() -> Vec<Step>, &|| vec![product()], &|| vec![product(), dora()]] {
            let mut patch = patch(DType::BF16, rows, cols, steps());
            let before = stored(Float::BF16, &noise(rows * cols, 5));
            let mut wide = Vec::new();
            for to in [Float::F32, Float::F16, Float::E4M3, Float::E5M2] {
                patch.set_type(to);
                for tier in Tier::all() {
                    for threads in [1, 3] {
                        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                        let mut bytes = vec![0; rows * cols * to.size()];
                        pool.install(|| patch.cast_with(tier, &before, &mut bytes));
                        if wide.is_empty() {
                            wide = vec![0.0; rows * cols];
                            Float::F32.lift(&bytes, &mut wide);
                        }
                        assert!(bytes == stored(to, &wide), "{to:?} {tier:?} on {threads} threads");
                    }
                }
            }
        }
    }

    /// In pieces, with norms over columns, and of a bias, whose rows are parts of blocks: as floats, and as blocks again.
    #[test]
    fn values_of_blocks_are_changed_as_floats_are_in_every_tier_and_split() {
        let (rows, cols) = (60, 768);
        let dora = || {
            let (magnitude, axis) = (noise(cols, 13), Axis::Columns { inner: 1 });
            let dora = Dora { ratio: 1.0, magnitude, axis, of_original: false, epsilon: f32::EPSILON, strength: 0.5 };
            Step::decompose(0..rows, Delta::Product(product(rows, cols, 3, 11)), dora)
        };
        let product = || lora(rows, cols, 5, 1, scale(1.0, 5));
        let dense = || Step::add(0..rows * cols, Delta::Dense(noise(rows * cols, 6)), 0.5);
        let kinds: [&dyn Fn() -> Vec<Step>; 4] =
            [&|| vec![], &|| vec![product()], &|| vec![product(), dora()], &|| vec![dense()]];
        for (kind, steps) in kinds.into_iter().enumerate() {
            for dtype in [DType::Q8_0, DType::Q5_1, DType::Q4_K, DType::Q6_K] {
                let format = Format::of(dtype).unwrap();
                let of = |dtype| {
                    let mut patch = patch(dtype, rows, cols, steps());
                    patch.is_bias = kind == 3;
                    patch
                };
                let (mut blocks, mut values) =
                    (vec![0; Encoding::Blocks(format).bytes(rows * cols)], noise(rows * cols, 5));
                format.quantise(&values, &mut blocks).unwrap();
                format.dequantise(&blocks, &mut values);
                let mut wide = stored(Float::F32, &values);
                of(DType::F32).apply(&mut wide, &[]).unwrap();
                Float::F32.lift(&wide, &mut values);
                let mut again = blocks.clone();
                format.quantise(&values, &mut again).unwrap();
                let mut outcomes = Vec::new();
                for tier in Tier::all() {
                    for threads in [1, 3] {
                        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                        for to in [Float::F32, Float::BF16] {
                            let mut cast = of(dtype);
                            cast.set_type(to);
                            let mut bytes = vec![0; rows * cols * to.size()];
                            pool.install(|| cast.cast_with(tier, &blocks, &mut bytes));
                            assert!(bytes == stored(to, &values), "{kind} {dtype} {to:?} {tier:?}");
                        }
                        if kind > 0 {
                            let mut requantised = of(dtype);
                            let mut bytes = blocks.clone();
                            let refused = pool.install(|| requantised.apply_with(tier, &mut bytes, &[]));
                            assert!(matches!(refused, Err(Error::Unpatchable { .. })) && bytes == blocks);
                            requantised.requantise().unwrap();
                            outcomes.push(pool.install(|| requantised.apply_with(tier, &mut bytes, &[])).unwrap());
                            assert!(bytes == again, "{kind} {dtype} {tier:?}");
                            assert_eq!(outcomes[0], *outcomes.last().unwrap(), "{kind} {dtype} {tier:?}");
                            assert_eq!(outcomes[0].requantised.values, values.len() as u64);
                            assert!(outcomes[0].requantised.rms_error() > 0.0);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_may_lie_at_any_address() {
        let patch = patch(DType::BF16, 20, 40, vec![lora(20, 40, 4, 1, scale(1.0, 4))]);
        let before = stored(float(&patch), &noise(800, 5));
        let mut aligned = before.clone();
        patch.apply(&mut aligned, &[]).unwrap();
        let mut shifted = vec![0u8; before.len() + 1];
        shifted[1..].copy_from_slice(&before);
        patch.apply(&mut shifted[1..], &[]).unwrap();
        assert_eq!(shifted[1..], aligned);
        assert!(patch.apply(&mut shifted, &[]).is_err() && patch.apply(&mut aligned, &[&[]]).is_err());
    }

    #[test]
    fn weights_that_are_not_finite_stay_so() {
        let patch = patch(DType::F16, 1, 3, vec![lora(1, 3, 4, 1, scale(1.0, 4))]);
        let mut bytes = stored(float(&patch), &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        patch.apply(&mut bytes, &[]).unwrap();
        let mut values = [0.0; 3];
        float(&patch).lift(&bytes, &mut values);
        assert!(values[0].is_nan());
        assert_eq!(values[1..], [f32::INFINITY, f32::NEG_INFINITY]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn any_shape_gives_the_bits_of_the_definition(rows in 1usize..40, cols in 1usize..700, rank in 1usize..9, s in -2.0f32..2.0) {
            prop_assume!(s != 0.0);
            let scale = scale(s, rank);
            let patch = patch(DType::BF16, rows, cols, vec![lora(rows, cols, rank, 3, scale)]);
            let mut bytes = stored(float(&patch), &noise(rows * cols, 8));
            let mut weights = vec![0.0; rows * cols];
            float(&patch).lift(&bytes, &mut weights);
            let factors = [(noise(rows * rank, 3), noise(rank * cols, 4), rank, scale)];
            patch.apply(&mut bytes, &[]).unwrap();
            prop_assert!(bytes == stored(float(&patch), &expected(&weights, cols, &factors)));
        }
    }
}
