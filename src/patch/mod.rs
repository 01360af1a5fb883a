//! The arithmetic of adapters: lift to f32, change, round once to the storage type.
//!
//! A weight is worked on in small pieces, in place, so no f32 copy of it exists where its steps allow that. Every
//! element is computed by the same operations in the same order whatever the piece, the thread and the instruction
//! set: the sum over the rank in order with fused multiply-add, from zero; then times the scale; then added to the
//! weight; each rounded to f32. So the bytes are the same on every machine, and a device that does the same
//! operations gets them too.

mod pieces;
mod products;
mod read;
mod scales;
mod vector;
mod whole;

use crate::adapter::{Reach, ScalePolicy, TensorPatch, matrix_of};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::threads;
use pieces::Matrix;
pub(crate) use read::siblings;
pub(crate) use scales::Scales;
use vector::Tier;
use whole::Lifted;

/// What [`TensorPatch::apply`] has to tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PatchOutcome {
    /// Values that lie beyond the largest one of an eight-bit storage type, and were stored as that.
    pub saturated: u64,
}

impl TensorPatch {
    /// Patches a weight in place. `bytes` is as long as the patched tensor; it begins with the tensor's bytes as the
    /// checkpoint holds them, in its storage type, at any alignment. `siblings` are the checkpoint's bytes of the
    /// tensors that [`needs`](TensorPatch::needs) names, in its order.
    ///
    /// Weights that are NaN or infinite stay so. The work is spread over threads of the library's own, one for each core,
    /// whatever thread this is called on.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `bytes` or a sibling has another length, or a scale is zero or not finite;
    /// [`Error::Io`] when the system gives no threads; then nothing is changed.
    pub fn apply(&self, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        threads::run(|| self.apply_with(Tier::best(), bytes, siblings))?
    }

    /// The same on the current pool.
    fn apply_with(&self, tier: Tier, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        let wanted = bytes_of(&self.patched_shape, self.float.size());
        if wanted != Some(bytes.len()) {
            let (name, len) = (&self.name, bytes.len());
            return Err(Error::invalid(format!("tensor `{name}` has {wanted:?} bytes once patched, the buffer {len}")));
        }
        if let Some(weight) = &self.scale_of {
            return weight.apply_to_scale(tier, bytes, siblings);
        }
        let scales = self.scales(siblings)?;
        let matrix = self.matrix(scales.as_ref());
        let in_pieces = self.steps.iter().all(|step| step.change.reach() < Reach::Weight);
        let saturated = match (&self.scaling, &scales) {
            (Some(scaling), Some(old)) if self.scale_policy == ScalePolicy::Recompute => {
                let lifted = Lifted::patched(tier, matrix, bytes, &self.steps);
                let new = lifted.scales(self.float, scaling.float, old);
                lifted.store(Matrix { scales: Some(&new), ..matrix }, bytes)
            }
            _ if in_pieces => pieces::apply(tier, matrix, bytes, &self.steps),
            _ => whole::apply(tier, matrix, bytes, &self.steps),
        };
        Ok(PatchOutcome { saturated })
    }

    /// Computes the scale in `bytes` anew; the only sibling is the weight, as the checkpoint holds it.
    fn apply_to_scale(&self, tier: Tier, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        let [weight] = siblings else { return Err(self.miscounted(1, siblings.len())) };
        let wanted = bytes_of(&self.shape, self.float.size());
        if wanted != Some(weight.len()) {
            let (name, len) = (&self.name, weight.len());
            return Err(Error::invalid(format!("tensor `{name}` has {wanted:?} bytes, {len} are given")));
        }
        let (Some(scaling), Some(old)) = (&self.scaling, self.scales(&[bytes])?) else {
            return Ok(PatchOutcome::default());
        };
        let lifted = Lifted::patched(tier, self.matrix(Some(&old)), weight, &self.steps);
        lifted.scales(self.float, scaling.float, &old).write(scaling.float, bytes);
        Ok(PatchOutcome::default())
    }

    fn matrix<'a>(&self, scales: Option<&'a Scales>) -> Matrix<'a> {
        let (rows, cols) = matrix_of(&self.shape).unwrap_or_default();
        let (rows, cols) = if self.is_bias { (rows * cols, 1) } else { (rows, cols) };
        Matrix { float: self.float, scales, noise: self.rounding.noise(&self.name), rows, cols }
    }

    /// The scales beside the weight, from the siblings' bytes.
    pub(crate) fn scales(&self, siblings: &[&[u8]]) -> Result<Option<Scales>> {
        if siblings.len() != self.needs.len() {
            return Err(self.miscounted(self.needs.len(), siblings.len()));
        }
        let Some((scaling, bytes)) = self.scaling.as_ref().zip(siblings.first()) else { return Ok(None) };
        let scales = Scales::read(scaling, bytes);
        scales.map(Some).map_err(|reason| Error::invalid(format!("tensor `{}`: its scale {reason}", self.name)))
    }

    fn miscounted(&self, needs: usize, given: usize) -> Error {
        Error::invalid(format!("tensor `{}` needs {needs} others to be patched, {given} are given", self.name))
    }
}

/// The bytes of a shape.
fn bytes_of(shape: &[u64], element: usize) -> Option<usize> {
    let elements = DType::U8.bytes_of(shape)?;
    usize::try_from(elements).ok()?.checked_mul(element)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{Adapter, Matching, Patches};
    use crate::checkpoint::{Checkpoint, Layout, TensorInfo};
    use crate::rounding::Rounding;
    use proptest::prelude::*;

    /// A file in memory with these f32 tensors.
    fn file(tensors: &[(&str, &[usize], Vec<f32>)]) -> Checkpoint {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, shape, values) in tensors {
            let begin = data.len();
            data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert((*name).to_owned(), entry);
        }
        let header = serde_json::Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes().chain(data));
        Checkpoint::from_bytes("adapter", bytes).unwrap()
    }

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

    fn lora(rows: usize, cols: usize, rank: usize, seed: u64) -> Checkpoint {
        file(&[
            ("w.lora_up.weight", &[rows, rank], noise(rows * rank, seed)),
            ("w.lora_down.weight", &[rank, cols], noise(rank * cols, seed + 1)),
            ("w.alpha", &[], vec![2.5]),
        ])
    }

    fn patch(dtype: DType, rows: usize, cols: usize, adapters: &[(Checkpoint, f32)]) -> TensorPatch {
        let weight = TensorInfo::new("w.weight", dtype, &[rows as u64, cols as u64], 0, 0).unwrap();
        let adapters = adapters.iter().map(|(file, s)| Adapter::from_checkpoint(file.clone(), *s).unwrap()).collect();
        let patches = Patches::resolve(&Layout::new(vec![weight]), adapters, Matching::Strict).unwrap();
        patches.tensor(0).unwrap().clone()
    }

    fn stored(float: crate::float::Float, values: &[f32]) -> Vec<u8> {
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
            let adapters = [(lora(rows, cols, rank, 7), 0.7), (lora(rows, cols, rank + 1, 9), -1.3)];
            let factors: Vec<_> = [(rank, 7u64, 0.7f32), (rank + 1, 9, -1.3)]
                .map(|(rank, seed, s)| {
                    let scale = (f64::from(s) * 2.5 / rank as f64) as f32;
                    (noise(rows * rank, seed), noise(rank * cols, seed + 1), rank, scale)
                })
                .to_vec();
            for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
                let patch = patch(dtype, rows, cols, &adapters);
                let before = stored(patch.float, &noise(rows * cols, 3));
                let mut weights = vec![0.0; rows * cols];
                patch.float.lift(&before, &mut weights);
                let wanted = stored(patch.float, &expected(&weights, cols, &factors));
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
        let some = |name: &'static str, shape: &'static [usize]| (name, shape, noise(shape.iter().product(), 11));
        let kinds = [
            vec![
                some("w.hada_w1_a", &[60, 3]),
                some("w.hada_w1_b", &[3, 70]),
                some("w.hada_w2_a", &[60, 4]),
                some("w.hada_w2_b", &[4, 70]),
            ],
            vec![some("w.lokr_w1", &[6, 7]), some("w.lokr_w2_a", &[10, 2]), some("w.lokr_w2_b", &[2, 10])],
            vec![
                some("w.a1.weight", &[70, 3]),
                some("w.a2.weight", &[3, 70]),
                some("w.b1.weight", &[60, 3]),
                some("w.b2.weight", &[3, 70]),
            ],
            vec![some("w.oft_blocks", &[5, 12, 12])],
            vec![some("w.lora_B", &[60, 3]), some("w.lora_A", &[3, 70]), some("w.dora_scale", &[60, 1])],
            vec![some("w.lora_B", &[60, 3]), some("w.lora_A", &[3, 70]), some("w.dora_scale", &[1, 70])],
            vec![some("w.diff", &[60, 70])],
        ];
        for kind in kinds {
            let patch = patch(DType::BF16, 60, 70, &[(lora(60, 70, 5, 1), 1.0), (file(&kind), 0.6)]);
            let before = stored(patch.float, &noise(4200, 5));
            let mut results = Vec::new();
            for tier in Tier::all() {
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let mut bytes = before.clone();
                    pool.install(|| patch.apply_with(tier, &mut bytes, &[])).unwrap();
                    results.push(bytes);
                }
            }
            assert!(results.iter().all(|bytes| *bytes == results[0]) && results[0] != before, "{}", kind[0].0);
        }
    }

    #[test]
    fn stochastic_rounding_gives_the_same_bits_in_every_tier_and_split() {
        // By pieces, and on an f32 copy (norms over columns).
        let dora = file(&[
            ("w.lora_B", &[60, 3], noise(180, 11)),
            ("w.lora_A", &[3, 700], noise(2100, 12)),
            ("w.dora_scale", &[1, 700], noise(700, 13)),
        ]);
        for (adapters, rows, cols) in
            [(vec![(lora(300, 1100, 5, 1), 1.0)], 300, 1100), (vec![(lora(60, 700, 5, 1), 1.0), (dora, 0.5)], 60, 700)]
        {
            for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
                let nearest = patch(dtype, rows, cols, &adapters);
                let mut patch = nearest.clone();
                patch.rounding = Rounding::Stochastic { seed: 5 };
                let before = stored(patch.float, &noise(rows * cols, 3));
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

    #[test]
    fn bytes_may_lie_at_any_address() {
        let patch = patch(DType::BF16, 20, 40, &[(lora(20, 40, 4, 1), 1.0)]);
        let before = stored(patch.float, &noise(800, 5));
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
        let patch = patch(DType::F16, 1, 3, &[(lora(1, 3, 4, 1), 1.0)]);
        let mut bytes = stored(patch.float, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        patch.apply(&mut bytes, &[]).unwrap();
        let mut values = [0.0; 3];
        patch.float.lift(&bytes, &mut values);
        assert!(values[0].is_nan());
        assert_eq!(values[1..], [f32::INFINITY, f32::NEG_INFINITY]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn any_shape_gives_the_bits_of_the_definition(rows in 1usize..40, cols in 1usize..700, rank in 1usize..9, s in -2.0f32..2.0) {
            prop_assume!(s != 0.0);
            let patch = patch(DType::BF16, rows, cols, &[(lora(rows, cols, rank, 3), s)]);
            let mut bytes = stored(patch.float, &noise(rows * cols, 8));
            let mut weights = vec![0.0; rows * cols];
            patch.float.lift(&bytes, &mut weights);
            let scale = (f64::from(s) * 2.5 / rank as f64) as f32;
            let factors = [(noise(rows * rank, 3), noise(rank * cols, 4), rank, scale)];
            patch.apply(&mut bytes, &[]).unwrap();
            prop_assert!(bytes == stored(patch.float, &expected(&weights, cols, &factors)));
        }
    }
}
