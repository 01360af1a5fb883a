//! Patching fp8 weights, with and without a kept scale, against values computed with PyTorch.

mod reference;

use reference::{Tensor, f32s, file, merged, named, tensor};
use tensor_offload::adapter::{Adapter, Matching, Patches};
use tensor_offload::{Checkpoint, DType};

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(format!("{}/tests/data/fp8/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn stored_codes_are_those_of_the_reference() {
    for case in ["e4m3_plain", "e5m2_plain", "e4m3_scale_weight", "e4m3_weight_scale", "e4m3_block_scale_inv"] {
        let (base, factors) = (open(&format!("{case}.base")), open(&format!("{case}.adapter")));
        let strength = factors.metadata()["strength"].parse().unwrap();
        let adapter = Adapter::from_checkpoint(factors, strength).unwrap();
        let (got, patches) = merged(&base, vec![adapter], Matching::Strict);
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
        assert_eq!(patches.iter().next().unwrap().1.needs().len(), usize::from(!case.contains("plain")));
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
    let (got, patches) = merged(&base, vec![adding(1e6, 4)], Matching::Strict);
    assert_eq!(got[0].3, [LARGEST, LARGEST, LARGEST, 0x7f]);
    let mut codes = vec![SIXTEEN, LARGEST, LARGEST | 0x80, 0x7f];
    let patch = patches.tensor(0).unwrap();
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
        let error = Patches::resolve(odd.layout(), adapter(), Matching::Strict).unwrap_err().to_string();
        assert!(error.contains("a.weight_scale"), "{error}");
    }
}
