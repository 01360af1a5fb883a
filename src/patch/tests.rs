//! What patches come to, for every type, instruction set and number of threads.

use super::vector::fused;
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
            let sum = (0..*rank).fold(0.0f32, |sum, k| fused(up[row * rank + k], down[k * cols + col], sum));
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

/// Panels, tiles, pieces and tasks end within the weight, and steps change all of its rows or some.
#[test]
fn products_of_some_rows_give_the_bits_of_the_definition() {
    for (rows, cols) in [(1, 31), (7, 33), (26, 129), (61, 64), (130, 300)] {
        for ranks in [&[1][..], &[64], &[4, 33], &[17, 2, 128]] {
            for slice in [0..rows, rows / 3..rows - rows / 4] {
                let factors = |(seed, &rank): (u64, &usize)| {
                    let Product { up, down } = product(slice.len(), cols, rank, 2 * seed);
                    (up.values, down.values, rank, scale(0.7, rank))
                };
                let factors: Vec<_> = (5..).zip(ranks).map(factors).collect();
                let step = |(seed, &rank): (u64, &usize)| {
                    let product = product(slice.len(), cols, rank, 2 * seed);
                    Step::add(slice.clone(), Delta::Product(product), scale(0.7, rank))
                };
                for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
                    let patch = patch(dtype, rows, cols, (5..).zip(ranks).map(step).collect());
                    let before = stored(float(&patch), &noise(rows * cols, 3));
                    let mut weights = vec![0.0; rows * cols];
                    float(&patch).lift(&before, &mut weights);
                    let of_slice = slice.start * cols..slice.end * cols;
                    let changed = expected(&weights[of_slice.clone()], cols, &factors);
                    weights[of_slice].copy_from_slice(&changed);
                    let wanted = stored(float(&patch), &weights);
                    for tier in Tier::all() {
                        for threads in [1, 3] {
                            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                            let mut bytes = before.clone();
                            pool.install(|| patch.apply_with(tier, &mut bytes, &[])).unwrap();
                            assert!(bytes == wanted, "{dtype} {rows}x{cols} {ranks:?} {slice:?} {tier:?} on {threads}");
                        }
                    }
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
        ("DoRA by columns", Step::decompose(rows(), Delta::Product(whole(3)), dora(Axis::Columns { inner: 1 }, false))),
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
            let dora = Dora { ratio: 1.0, magnitude, axis, of_original: false, epsilon: f32::EPSILON, strength: 0.5 };
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
