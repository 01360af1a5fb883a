//! Folders as PEFT saves them, against what its `merge_and_unload` gives on f32 weights.

mod reference;

use std::path::{Path, PathBuf};

use reference::{Tensor, difference, f32s, file, floats, merged, named, stored, tensor};
use tensor_offload::adapter::{Adapter, Matching, Weights};
use tensor_offload::error::AdapterFault;
use tensor_offload::{Checkpoint, DType, Error};

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/peft").join(path)
}

fn base() -> Checkpoint {
    Checkpoint::open(data("base_sharded")).unwrap()
}

/// The same model in f32.
fn base_f32() -> Checkpoint {
    let lifted =
        |(name, dtype, shape, bytes): Tensor| (name, DType::F32, shape, stored(DType::F32, &floats(dtype, &bytes)));
    file("base", &reference::tensors(&base()).into_iter().map(lifted).collect::<Vec<_>>())
}

#[test]
fn folders_give_what_peft_merges() {
    for variant in ["lora", "rslora", "dora", "patterns", "replaced"] {
        // The tensors that merging changes; the others have to stay.
        let changed = Checkpoint::open(data(&format!("changed_{variant}.safetensors"))).unwrap();
        for (base, dtype) in [(base_f32(), DType::F32), (base(), DType::BF16)] {
            let adapter = Adapter::open(data(&format!("adapter_{variant}")), 1.0).unwrap();
            let (got, weights) = merged(&base, vec![adapter], Matching::Strict);
            assert_eq!(weights.patches().iter().count(), changed.layout().tensors().len(), "{variant}");
            for (got, was) in got.iter().zip(reference::tensors(&base)) {
                let Some(index) = changed.find(&got.0) else {
                    assert_eq!(*got, was, "{variant}");
                    continue;
                };
                let wanted = stored(dtype, &floats(DType::F32, &reference::bytes(&changed, index)));
                assert_eq!(difference(dtype, &got.3, &wanted), None, "{variant} {dtype} {}", got.0);
            }
        }
    }
}

#[test]
fn the_weights_of_a_folder_open_with_their_configuration() {
    let folder = data("adapter_rslora");
    let by_file = Adapter::open(folder.join("adapter_model.safetensors"), 1.0).unwrap();
    assert_eq!(by_file.path(), folder);
    let of = |adapter| merged(&base(), vec![adapter], Matching::Strict).0;
    assert_eq!(of(by_file), of(Adapter::open(&folder, 1.0).unwrap()));
    let error = Adapter::open(data("base_sharded"), 1.0).unwrap_err().to_string();
    assert!(error.contains("adapter_config.json"), "{error}");
}

const CONFIG: &str = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["c"]"#;

fn peft(tensors: &[Tensor], settings: &str) -> Result<Adapter, Error> {
    Adapter::from_peft(file("adapter", tensors), &format!("{CONFIG} {settings}}}"), 1.0)
}

fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// `a [n, k] b [k, m]` in f64.
fn product(a: &[f32], b: &[f32], k: usize, m: usize) -> Vec<f64> {
    let n = a.len() / k;
    let element =
        |index: usize| (0..k).map(|i| f64::from(a[index / m * k + i]) * f64::from(b[i * m + index % m])).sum();
    (0..n * m).map(element).collect()
}

#[test]
fn fan_in_fan_out_transposes_lora_and_dora() {
    let (inputs, outputs) = (3, 5);
    let weight = noise(inputs * outputs, 1);
    let (a, b, m) = (noise(2 * inputs, 2), noise(outputs * 2, 3), noise(outputs, 4));
    let base = file("base", &[f32s("c.weight", &[3, 5], &weight)]);
    let prefix = "base_model.model.c";
    let mut factors = vec![
        f32s(&format!("{prefix}.lora_A.weight"), &[2, 3], &a),
        f32s(&format!("{prefix}.lora_B.weight"), &[5, 2], &b),
    ];
    let delta = product(&b, &a, 2, inputs);
    let changed = |input: usize, output: usize| {
        f64::from(weight[input * outputs + output]) + 1.5 * delta[output * inputs + input]
    };
    let check = |factors: &[Tensor], settings: &str, wanted: &dyn Fn(usize, usize) -> f64| {
        let (got, _) = merged(&base, vec![peft(factors, settings).unwrap()], Matching::Strict);
        let wanted: Vec<f32> = (0..15).map(|index| wanted(index / outputs, index % outputs) as f32).collect();
        assert_eq!(difference(DType::F32, &got[0].3, &stored(DType::F32, &wanted)), None, "{settings}");
    };
    check(&factors, r#", "fan_in_fan_out": true"#, &changed);
    factors.push(f32s(&format!("{prefix}.lora_magnitude_vector"), &[5], &m));
    check(&factors, r#", "fan_in_fan_out": true, "use_dora": true"#, &|input, output| {
        let norm = (0..inputs).map(|i| changed(i, output).powi(2)).sum::<f64>().sqrt();
        changed(input, output) * f64::from(m[output]) / norm
    });
    assert!(
        Weights::patched(base.clone(), vec![peft(&factors, r#", "use_dora": true"#).unwrap()], Matching::Strict)
            .is_err()
    );
}

#[test]
fn embeddings_biases_and_whole_tensors_are_applied() {
    let base = file(
        "base",
        &[f32s("e.weight", &[4, 3], &[1.0; 12]), f32s("c.weight", &[3, 3], &[0.0; 9]), f32s("c.bias", &[3], &[1.0; 3])],
    );
    let (a, b) = (noise(8, 1), noise(6, 2));
    let adapter = peft(
        &[
            f32s("base_model.model.e.lora_embedding_A", &[2, 4], &a),
            f32s("base_model.model.e.lora_embedding_B", &[3, 2], &b),
            f32s("base_model.model.c.lora_A.weight", &[2, 3], &[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
            f32s("base_model.model.c.lora_B.weight", &[3, 2], &[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
            f32s("base_model.model.c.lora_B.bias", &[3], &[1.0, 2.0, 4.0]),
        ],
        r#", "lora_bias": true"#,
    );
    let (got, _) = merged(&base, vec![adapter.unwrap()], Matching::Strict);
    let delta = product(&b, &a, 2, 4);
    let wanted: Vec<f32> = (0..12).map(|i| (1.0 + 1.5 * delta[i % 3 * 4 + i / 3]) as f32).collect();
    assert_eq!(difference(DType::F32, &got[0].3, &stored(DType::F32, &wanted)), None);
    assert_eq!(floats(DType::F32, &got[1].3), [1.5, 0.0, 0.0, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(floats(DType::F32, &got[2].3), [2.5, 4.0, 7.0]);
    let saved = peft(&[f32s("base_model.model.c.base_layer.bias", &[3], &[7.0; 3])], r#", "bias": "all""#);
    assert_eq!(floats(DType::F32, &merged(&base, vec![saved.unwrap()], Matching::Strict).0[2].3), [7.0; 3]);
}

#[test]
fn settings_and_factors_have_to_agree() {
    let base = file("base", &[f32s("c.weight", &[3, 3], &[0.0; 9])]);
    let factors = |rank: usize| {
        let (a, b) = (vec![0.5; rank * 3], vec![0.5; rank * 3]);
        [
            f32s("base_model.model.c.lora_A.weight", &[rank as u64, 3], &a),
            f32s("base_model.model.c.lora_B.weight", &[3, rank as u64], &b),
        ]
    };
    let fault = |adapter: Adapter| match Weights::patched(base.clone(), vec![adapter], Matching::Strict) {
        Err(Error::Adapter { fault, .. }) => *fault,
        other => panic!("{other:?}"),
    };
    assert!(matches!(fault(peft(&factors(3), "").unwrap()), AdapterFault::Shape { .. }));
    assert!(matches!(fault(peft(&factors(2), r#", "use_dora": true"#).unwrap()), AdapterFault::Incomplete { .. }));
    assert!(peft(&factors(2), r#", "surprise": 1"#).is_err());
    let mut delta = factors(2).to_vec();
    delta.push(tensor("base_model.model.c.trainable_tokens_delta", DType::F32, &[1], vec![0; 4]));
    assert!(
        matches!(peft(&delta, ""), Err(Error::Adapter { fault, .. }) if matches!(*fault, AdapterFault::Unsupported { .. }))
    );
    let named = named(&base, "c.weight");
    assert_eq!(named.3, vec![0; 36]);
}

/// Kinds other than LoRA, and LoRA of stacked experts, against what PEFT 0.21.2 merges: every linear layer, a convolution, each
/// with settings that change the arithmetic.
#[test]
fn every_kind_gives_what_peft_merges() {
    let data = |path: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/peft_kinds").join(path);
    let kinds = ["loha", "lokr", "lokr_whole", "oft", "oft_exact", "oft_shared", "boft", "boft_butterfly", "ia3"];
    let own_base =
        ["experts", "experts_transposed", "experts_ranks", "experts_alphas", "ia3_transposed", "dora_embedding"];
    let bases = kinds.map(|_| "base".to_owned()).into_iter().chain(own_base.map(|kind| format!("base_{kind}")));
    for (kind, base) in kinds.into_iter().chain(own_base).zip(bases) {
        let base = Checkpoint::open(data(&format!("{base}.safetensors"))).unwrap();
        let changed = Checkpoint::open(data(&format!("changed_{kind}.safetensors"))).unwrap();
        let adapter = Adapter::open(data(&format!("adapter_{kind}")), 1.0).unwrap();
        let (got, weights) = merged(&base, vec![adapter], Matching::Strict);
        assert!(!weights.report().applied.is_empty(), "{kind}");
        for (got, was) in got.iter().zip(reference::tensors(&base)) {
            match changed.find(&got.0) {
                Some(index) => {
                    let wanted = reference::bytes(&changed, index);
                    assert_eq!(difference(DType::F32, &got.3, &wanted), None, "{kind} {}", got.0);
                }
                None => assert_eq!(*got, was, "{kind}"),
            }
        }
        // At half the strength it is half as far from the base.
        let adapter = Adapter::open(data(&format!("adapter_{kind}")), 0.5).unwrap();
        let (half, _) = merged(&base, vec![adapter], Matching::Strict);
        for ((half, whole), was) in half.iter().zip(&got).zip(reference::tensors(&base)) {
            let [half, whole, was] = [&half.3, &whole.3, &was.3].map(|bytes| floats(DType::F32, bytes));
            for ((half, whole), was) in half.iter().zip(&whole).zip(&was) {
                assert!((half - (whole + was) / 2.0).abs() < 1e-4, "{kind}: {half} between {was} and {whole}");
            }
        }
    }
}
