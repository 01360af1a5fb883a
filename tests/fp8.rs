//! Patching fp8 weights, with and without a kept scale, against values computed with PyTorch.

mod reference;

use reference::{Tensor, f32s, file, merged, named, tensor};
use tensor_offload::adapter::{Adapter, Matching, Weights};
use tensor_offload::{Checkpoint, DType, Error, Rounding, ScalePolicy, TensorId};

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(format!("{}/tests/data/fp8/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn stored_codes_are_those_of_the_reference() {
    for case in ["e4m3_plain", "e5m2_plain", "e4m3_scale_weight", "e4m3_weight_scale", "e4m3_block_scale_inv"] {
        let (base, factors) = (open(&format!("{case}.base")), open(&format!("{case}.adapter")));
        let strength = factors.metadata()["strength"].parse().unwrap();
        let adapter = Adapter::from_checkpoint(factors, strength).unwrap();
        let (got, weights) = merged(&base, vec![adapter], Matching::Strict);
        let wanted = named(&open(&format!("{case}.expected")), "blocks.0.proj.weight");
        for (got, was) in got.iter().zip(reference::tensors(&base)) {
            if got.0 == wanted.0 {
                assert_eq!((got.1, &got.2), (wanted.1, &wanted.2), "{case}");
                let off = got.3.iter().zip(&wanted.3).filter(|(a, b)| a != b).count();
                assert!(off <= (wanted.3.len() / 1000).max(1), "{case}: {off} of {} codes differ", wanted.3.len());
            } else {
                assert_eq!(*got, was, "{case}: a scale or marker changed");
            }
        }
        assert_eq!(weights.patches().iter().next().unwrap().1.needs().len(), usize::from(!case.contains("plain")));
    }
}

/// E4M3 codes: 16, 20, 448 and -448.
const SIXTEEN: u8 = 0x58;
const TWENTY: u8 = 0x5a;
const LARGEST: u8 = 0x7e;

fn model(codes: &[u8], scale: Tensor) -> Checkpoint {
    let columns = codes.len() as u64;
    file("model", &[tensor("a.weight", DType::F8E4M3, &[1, columns], codes.to_vec()), scale])
}

fn adding(delta: f32, columns: usize) -> Adapter {
    let factors = [
        f32s("a.lora_up.weight", &[1, 1], &[delta]),
        f32s("a.lora_down.weight", &[1, columns as u64], &vec![1.0; columns]),
    ];
    Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap()
}

#[test]
fn a_scaled_weight_is_patched_in_its_real_value() {
    for scale in [
        f32s("a.scale_weight", &[], &[0.01]),
        f32s("a.weight_scale", &[1], &[0.01]),
        f32s("a.weight_scale_inv", &[1, 1], &[0.01]),
    ] {
        let (got, _) = merged(&model(&[SIXTEEN], scale.clone()), vec![adding(0.04, 1)], Matching::Strict);
        assert_eq!(got[0].3, [TWENTY], "{}", scale.0);
        assert_eq!(got[1], scale);
    }
}

#[test]
fn saturation_is_counted_and_never_gives_nan() {
    let base = model(&[SIXTEEN, LARGEST, LARGEST | 0x80, 0x7f], f32s("a.weight_scale", &[], &[0.5]));
    let (got, weights) = merged(&base, vec![adding(1e6, 4)], Matching::Strict);
    assert_eq!(got[0].3, [LARGEST, LARGEST, LARGEST, 0x7f]);
    let mut codes = vec![SIXTEEN, LARGEST, LARGEST | 0x80, 0x7f];
    let patch = weights.patches().tensor(TensorId::new(0)).unwrap();
    assert_eq!(patch.apply(&mut codes, &[&0.5f32.to_le_bytes()]).unwrap().saturated, 3);
    let mut untouched = vec![SIXTEEN; 4];
    for scale in [0.0f32, f32::NAN, f32::INFINITY] {
        assert!(patch.apply(&mut untouched, &[&scale.to_le_bytes()]).is_err());
    }
    assert!(patch.apply(&mut untouched, &[]).is_err() && patch.apply(&mut untouched, &[&[0; 3]]).is_err());
    assert_eq!(untouched, [SIXTEEN; 4]);
}

#[test]
fn rows_may_have_scales_of_their_own_and_grids_have_to_fit() {
    let weight = tensor("a.weight", DType::F8E4M3, &[2, 1], vec![SIXTEEN; 2]);
    let rows = file("model", &[weight.clone(), f32s("a.weight_scale", &[2, 1], &[0.01, 0.02])]);
    let factors = [f32s("a.lora_B", &[2, 1], &[0.04, 0.08]), f32s("a.lora_A", &[1, 1], &[1.0])];
    let adapter = || vec![Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap()];
    assert_eq!(merged(&rows, adapter(), Matching::Strict).0[0].3, [TWENTY; 2]);
    for scale in [f32s("a.weight_scale_inv", &[2, 2], &[1.0; 4]), tensor("a.weight_scale", DType::U8, &[1], vec![1])] {
        let odd = file("model", &[weight.clone(), scale]);
        let error = Weights::patched(odd.clone(), adapter(), Matching::Strict).unwrap_err().to_string();
        assert!(error.contains("a.weight_scale"), "{error}");
    }
}

/// The tensors as [`Weights::read`] gives them, of which so many values are saturated.
fn read(weights: &Weights, saturated: u64) -> Vec<Vec<u8>> {
    let mut sum = 0;
    let read = |index: TensorId| {
        let mut bytes = vec![0; weights.layout().tensor(index).unwrap().bytes as usize];
        sum += weights.read(index, &mut bytes).unwrap().saturated;
        bytes
    };
    let tensors = weights.layout().tensor_ids().map(read).collect();
    assert_eq!(sum, saturated);
    tensors
}

fn lifted(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude =
        if exponent == 0 { fraction / 8.0 * 2f32.powi(-6) } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn a_scale_can_be_computed_anew() {
    let base = model(&[SIXTEEN, LARGEST, 0, SIXTEEN | 0x80], f32s("a.weight_scale", &[], &[0.5]));
    let resolve = || Weights::patched(base.clone(), vec![adding(672.0, 4)], Matching::Strict).unwrap();
    let weights = resolve().scales(ScalePolicy::Recompute).unwrap();
    let (weight, scale) = (TensorId::new(0), TensorId::new(1));
    assert_eq!(
        weights.patches().iter().map(|(index, patch)| (index, patch.needs().to_vec())).collect::<Vec<_>>(),
        [(weight, vec![scale]), (scale, vec![weight])]
    );
    // 8, 224, 0 and -8, each with 672 more: the largest is 896, twice the type's largest value.
    let got = read(&weights, 0);
    assert_eq!(got[1], 2f32.to_le_bytes());
    assert_eq!(got[0].iter().map(|code| lifted(*code)).collect::<Vec<_>>(), [352.0, 448.0, 320.0, 320.0]);
    let kept = weights.scales(ScalePolicy::Keep).unwrap().rounding(Rounding::NearestEven);
    let kept = read(&kept, 4);
    assert_eq!((kept[0][1], &kept[1]), (LARGEST, &0.5f32.to_le_bytes().to_vec()));
}

/// A derived model would patch a scale again if the order made another recipe of it.
#[test]
fn rounding_and_scales_are_set_in_any_order() {
    use tensor_offload::{Loader, Planner, Registry};
    let base = model(&[SIXTEEN, LARGEST, 0, SIXTEEN | 0x80], f32s("a.weight_scale", &[], &[0.5]));
    let resolved = Weights::patched(base, vec![adding(672.0, 4)], Matching::Strict).unwrap();
    let (rounding, scales) = (Rounding::Stochastic { seed: 7 }, ScalePolicy::Recompute);
    let before = resolved.clone().rounding(rounding).scales(scales).unwrap();
    let after = resolved.scales(scales).unwrap().rounding(rounding);
    assert_eq!(read(&before, 0), read(&after, 0));

    let registry = Registry::system();
    let plan = Planner::new(before.layout(), registry.machine()).allocation("cpu,*".parse().unwrap()).plan().unwrap();
    let loader = Loader::new(&registry);
    let first = std::sync::Arc::new(loader.load(&before, &plan).unwrap());
    assert_eq!(loader.derive(&first, &after, &plan).unwrap().report().read, 0);
    let other = after.rounding(Rounding::Stochastic { seed: 8 });
    // Each of the two is patched with the bytes of the other beside its own.
    assert_eq!(loader.derive(&first, &other, &plan).unwrap().report().read, 2 * plan.bytes());
}

#[test]
fn every_unit_of_a_grid_has_its_own_new_scale() {
    let (rows, cols) = (130usize, 200usize);
    let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 37 % 0x70) as u8 | (i as u8 & 1) << 7).collect();
    let weight = tensor("a.weight", DType::F8E4M3, &[rows as u64, cols as u64], codes.clone());
    let blocks = f32s("a.weight_scale_inv", &[2, 2], &[0.5, 0.25, 2.0, 1.0]);
    let by_rows: Vec<f32> = (0..rows).map(|row| 0.01 * (row + 1) as f32).collect();
    for scale in [blocks, f32s("a.weight_scale", &[rows as u64, 1], &by_rows)] {
        let base = file("model", &[weight.clone(), scale.clone()]);
        let up: Vec<f32> = (0..rows).map(|row| (row as f32 - 60.0) * 0.03).collect();
        let factors = [f32s("a.lora_B", &[rows as u64, 1], &up), f32s("a.lora_A", &[1, cols as u64], &vec![1.0; cols])];
        let adapter = Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap();
        let weights = Weights::patched(base.clone(), vec![adapter], Matching::Strict).unwrap();
        let got = read(&weights.scales(ScalePolicy::Recompute).unwrap(), 0);
        let old: Vec<f32> = scale.3.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let new: Vec<f32> = got[1].as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let unit = |index: usize| {
            let (row, col) = (index / cols, index % cols);
            if old.len() == 4 { row / 128 * 2 + col / 128 } else { row }
        };
        let real = |index: usize| lifted(codes[index]) * old[unit(index)] + up[index / cols];
        let mut largest = vec![0.0f32; old.len()];
        (0..codes.len()).for_each(|index| largest[unit(index)] = largest[unit(index)].max(real(index).abs()));
        for (new, largest) in new.iter().zip(&largest) {
            assert!((new * 448.0 - largest).abs() < largest * 1e-6);
        }
        for (index, code) in got[0].iter().enumerate() {
            let (stored, real, step) = (lifted(*code) * new[unit(index)], real(index), new[unit(index)] * 448.0);
            assert!(
                (stored - real).abs() <= (real.abs() / 16.0).max(step * 2e-6) * 1.001,
                "{index}: {stored} for {real}"
            );
        }
    }
}

#[test]
fn what_gives_no_new_scale_keeps_the_old_one() {
    let base = model(&[SIXTEEN, SIXTEEN], f32s("a.weight_scale", &[], &[0.25]));
    let zero = Weights::patched(base.clone(), vec![adding(-4.0, 2)], Matching::Strict).unwrap();
    let got = read(&zero.scales(ScalePolicy::Recompute).unwrap(), 0);
    assert_eq!((&got[0], &got[1]), (&vec![0, 0], &0.25f32.to_le_bytes().to_vec()));
    // An adapter that replaces the scale itself.
    let base = model(&[SIXTEEN], f32s("a.weight_scale", &[1, 1], &[0.25]));
    let both = [
        f32s("a.lora_B", &[1, 1], &[1.0]),
        f32s("a.lora_A", &[1, 1], &[1.0]),
        f32s("a.weight_scale.diff", &[1, 1], &[1.0]),
    ];
    let adapter = Adapter::from_checkpoint(file("adapter", &both), 1.0).unwrap();
    let weights = Weights::patched(base.clone(), vec![adapter], Matching::Strict).unwrap();
    assert!(matches!(weights.scales(ScalePolicy::Recompute), Err(Error::Invalid { .. })));
}

#[test]
fn a_model_loads_with_new_scales() {
    use tensor_offload::{Loader, Planner, Registry};
    let base = model(&[SIXTEEN; 64], f32s("a.weight_scale", &[], &[0.5]));
    let weights = Weights::patched(base.clone(), vec![adding(672.0, 64)], Matching::Strict).unwrap();
    let weights = weights.scales(ScalePolicy::Recompute).unwrap();
    let registry = Registry::system();
    let plan = Planner::new(weights.layout(), registry.machine()).allocation("cpu,*".parse().unwrap()).plan().unwrap();
    let model = Loader::new(&registry).load(&weights, &plan).unwrap();
    for (info, wanted) in base.layout().tensors().iter().zip(read(&weights, 0)) {
        let mut got = vec![0; wanted.len()];
        model.read(&info.name, &mut got).unwrap();
        assert_eq!(got, wanted, "{}", info.name);
    }
}
