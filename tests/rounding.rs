//! Stochastic rounding of patched weights: right on average, and the same for a seed.

mod reference;

use reference::{Tensor, f32s, file, floats, merged, stored, tensor};
use tensor_offload::adapter::{Adapter, Matching, Weights};
use tensor_offload::{Checkpoint, DType, Rounding, TensorId};

const COLUMNS: usize = 1 << 14;

fn model() -> Checkpoint {
    let ones = stored(DType::BF16, &vec![1.0; COLUMNS * 4]);
    let weight = |name: &str| tensor(name, DType::BF16, &[4, COLUMNS as u64], ones.clone());
    file("model", &[weight("a.weight"), weight("b.weight")])
}

/// Adds `delta` to all of both weights.
fn adapter(delta: f32) -> Adapter {
    let pair = |name: &str| -> [Tensor; 2] {
        [
            f32s(&format!("{name}.lora_B"), &[4, 1], &[delta; 4]),
            f32s(&format!("{name}.lora_A"), &[1, COLUMNS as u64], &vec![1.0; COLUMNS]),
        ]
    };
    Adapter::from_checkpoint(file("adapter", &[pair("a"), pair("b")].concat()), 1.0).unwrap()
}

fn read(weights: &Weights, threads: usize) -> [Vec<u8>; 2] {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    [0, 1].map(|index| {
        let mut bytes = vec![0; weights.layout().tensor(TensorId::new(index)).unwrap().bytes as usize];
        pool.install(|| weights.read(TensorId::new(index), &mut bytes)).unwrap();
        bytes
    })
}

#[test]
fn changes_smaller_than_a_step_are_not_lost_on_average() {
    let base = model();
    // An eighth of bf16's step at 1.
    let delta = 1.0 / 1024.0;
    let (nearest, weights) = merged(&base, vec![adapter(delta)], Matching::Strict);
    assert_eq!(nearest, reference::tensors(&base));
    let weights = weights.rounding(Rounding::Stochastic { seed: 11 });
    for bytes in read(&weights, 1) {
        let values = floats(DType::BF16, &bytes);
        assert!(values.iter().all(|&value| value == 1.0 || value == 1.0078125));
        let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / values.len() as f64;
        // Five standard deviations of the mean.
        let room = 5.0 * 0.0078125 * (0.125f64 * 0.875 / values.len() as f64).sqrt();
        assert!((mean - 1.0 - f64::from(delta)).abs() < room, "{mean}");
    }
}

#[test]
fn a_seed_and_a_name_decide() {
    let base = model();
    let weights = Weights::patched(base.clone(), vec![adapter(0.001)], Matching::Strict).unwrap();
    let seeded = |seed| weights.clone().rounding(Rounding::Stochastic { seed });
    let [a, b] = read(&seeded(1), 1);
    assert_ne!(a, b);
    for threads in [1, 2, 3] {
        assert_eq!(read(&seeded(1), threads), [a.clone(), b.clone()]);
    }
    assert_ne!(read(&seeded(2), 1)[0], a);
    let nearest = seeded(1).rounding(Rounding::NearestEven);
    assert_eq!(read(&nearest, 1), read(&weights, 1));
}
