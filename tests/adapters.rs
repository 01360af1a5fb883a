//! Every kind of adapter against ComfyUI's own values, and the matching of names.

mod reference;

use proptest::prelude::*;
use reference::{Tensor, difference, f32s, file, floats, merged, named, stored, tensor};
use tensor_offload::adapter::{Adapter, Matching, Patches, SkipReason, Weights};
use tensor_offload::checkpoint::Layout;
use tensor_offload::error::AdapterFault;
use tensor_offload::{Checkpoint, DType, Error, TensorId};

const FLOATS: [(DType, &str); 3] =
    [(DType::F32, "expected.f32"), (DType::BF16, "expected.bf16"), (DType::F16, "expected.f16")];

fn data(path: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

#[test]
fn every_kind_gives_the_values_of_its_own_program() {
    let index = std::fs::read_to_string(data("adapters/index.json")).unwrap();
    let index: Vec<serde_json::Value> = serde_json::from_str(&index).unwrap();
    let mut failures = Vec::new();
    for case in &index {
        let name = case["name"].as_str().unwrap();
        let reference = Checkpoint::open(data(&format!("adapters/{name}.safetensors"))).unwrap();
        let strength: f32 = reference.metadata()["strength"].parse().unwrap();
        let (_, _, shape, base) = named(&reference, "base");
        let adapter: Vec<Tensor> = reference::tensors(&reference)
            .into_iter()
            .filter_map(|(key, dtype, shape, bytes)| {
                let rest = key.strip_prefix("adapter.x")?.to_owned();
                Some((format!("diffusion_model.blocks.0.attn.proj{rest}"), dtype, shape, bytes))
            })
            .collect();
        for (dtype, expected) in FLOATS {
            let norm = f32s("blocks.0.norm.weight", &[2], &[0.0, 1.0]);
            let weight = stored(dtype, &floats(DType::F32, &base));
            let model = file("base", &[tensor("blocks.0.attn.proj.weight", dtype, &shape, weight), norm.clone()]);
            let adapter = Adapter::from_checkpoint(file("adapter", &adapter), strength).unwrap();
            let (got, weights) = merged(&model, vec![adapter], Matching::Strict);
            let (_, _, wanted_shape, wanted) = named(&reference, expected);
            assert_eq!((got[0].1, &got[0].2), (dtype, &wanted_shape), "{name}");
            assert_eq!(got[1], norm);
            assert!(weights.report().skipped.is_empty() && weights.patches().factor_bytes() > 0);
            failures.extend(difference(dtype, &got[0].3, &wanted).map(|why| format!("{name} {dtype}: {why}")));
        }
    }
    assert!(
        failures.is_empty() && index.len() == 26,
        "{} of {}:\n{}",
        failures.len(),
        index.len(),
        failures.join("\n")
    );
}

/// A model with these modules of 4 by 4.
fn model(modules: &[&str]) -> Checkpoint {
    let values: Vec<f32> = (0..16).map(|v| v as f32 / 8.0 - 1.0).collect();
    let tensors: Vec<Tensor> = modules.iter().map(|m| f32s(&format!("{m}.weight"), &[4, 4], &values)).collect();
    file("model", &tensors)
}

/// A LoRA of rank 1 under these two keys.
fn pair(up: &str, down: &str) -> Vec<Tensor> {
    vec![f32s(up, &[4, 1], &[1.0, -2.0, 0.5, 3.0]), f32s(down, &[1, 4], &[0.25, 0.5, -1.0, 2.0])]
}

fn resolve(layout: &Layout, tensors: &[Tensor], matching: Matching) -> Result<Patches, Error> {
    Patches::resolve(layout, vec![Adapter::from_checkpoint(file("adapter", tensors), 1.0)?], matching)
}

fn fault(result: Result<Patches, Error>) -> (Option<String>, AdapterFault) {
    match result {
        Err(Error::Adapter { key, fault, .. }) => (key, *fault),
        other => panic!("{other:?}"),
    }
}

#[test]
fn six_spellings_of_one_module_are_one_target() {
    let base = model(&["blocks.0.attn.q", "blocks.0.attn.k"]);
    let spellings = [
        ("lora_unet_blocks_0_attn_q.lora_up.weight", "lora_unet_blocks_0_attn_q.lora_down.weight"),
        ("diffusion_model.blocks.0.attn.q.lora_B.weight", "diffusion_model.blocks.0.attn.q.lora_A.weight"),
        ("transformer.blocks.0.attn.q.lora_B.weight", "transformer.blocks.0.attn.q.lora_A.weight"),
        ("base_model.model.blocks.0.attn.q.lora_B.weight", "base_model.model.blocks.0.attn.q.lora_A.weight"),
        ("blocks.0.attn.q.lora.up.weight", "blocks.0.attn.q.lora.down.weight"),
        ("blocks.0.attn.q.lora_B", "blocks.0.attn.q.lora_A"),
    ];
    let results = spellings.map(|(up, down)| {
        // PEFT's names do not come without an alpha.
        let adapter = Adapter::from_checkpoint(file("adapter", &pair(up, down)), 1.0).unwrap().alpha(1.0).unwrap();
        let (tensors, weights) = merged(&base, vec![adapter], Matching::Strict);
        assert_eq!(weights.report().applied[0].targets, ["blocks.0.attn.q.weight"], "{up}");
        assert_eq!(weights.report().applied[0].keys.len(), 2);
        tensors
    });
    assert!(results.iter().all(|result| *result == results[0]));
    assert_ne!(results[0], reference::tensors(&base));
}

#[test]
fn underscores_inside_names_stay_and_ambiguous_ones_are_errors() {
    let base = model(&["blocks.0.attn_q", "blocks.0.attn.k", "a_b.c", "a.b_c"]);
    let kohya = |module: &str| pair(&format!("{module}.lora_up.weight"), &format!("{module}.lora_down.weight"));
    let found = resolve(base.layout(), &kohya("lora_unet_blocks_0_attn_q"), Matching::Strict).unwrap();
    assert_eq!(found.report().applied[0].targets, ["blocks.0.attn_q.weight"]);
    let (key, ambiguous) = fault(resolve(base.layout(), &kohya("lora_unet_a_b_c"), Matching::AllowPartial));
    assert_eq!(key.as_deref(), Some("lora_unet_a_b_c"));
    assert_eq!(ambiguous, AdapterFault::Ambiguous { candidates: vec!["a_b.c".into(), "a.b_c".into()] });
    let exact = resolve(base.layout(), &kohya("a_b.c"), Matching::Strict).unwrap();
    assert_eq!(exact.report().applied[0].targets, ["a_b.c.weight"]);
}

#[test]
fn nothing_and_some_matching_are_errors_that_show_both_sides() {
    let base = model(&["blocks.0.attn.q", "blocks.0.attn.k"]);
    let foreign = pair("unet.mid.proj.lora_up.weight", "unet.mid.proj.lora_down.weight");
    for matching in [Matching::Strict, Matching::AllowPartial] {
        let error = resolve(base.layout(), &foreign, matching).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("unet.mid.proj") && text.contains("blocks.0.attn.q"), "{text}");
        assert!(matches!(fault(Err(error)).1, AdapterFault::NothingMatches { keys: 1, .. }));
    }
    let mut some = pair("blocks.0.attn.q.lora_B", "blocks.0.attn.q.lora_A");
    some.extend(foreign);
    let (_, partly) = fault(resolve(base.layout(), &some, Matching::Strict));
    assert_eq!(partly, AdapterFault::PartlyMatches { keys: 2, unmatched: vec!["unet.mid.proj".into()] });
    let allowed = resolve(base.layout(), &some, Matching::AllowPartial).unwrap();
    let report = allowed.report();
    assert_eq!(
        report.applied[0].keys,
        ["blocks.0.attn.q.lora_A", "blocks.0.attn.q.lora_B"]
            .map(String::from)
            .iter()
            .rev()
            .cloned()
            .collect::<Vec<_>>()
    );
    assert_eq!(report.unmatched[0].keys.len(), 2);
    assert!(report.to_string().contains("unmatched: unet.mid.proj"));
    assert!(allowed.tensor(TensorId::new(1)).is_none() && allowed.tensor(TensorId::new(0)).is_some());
    assert!(matches!(fault(resolve(base.layout(), &[], Matching::Strict)).1, AdapterFault::NothingMatches { .. }));
}

#[test]
fn a_shape_that_does_not_fit_is_named_and_nothing_is_half_done() {
    let base = model(&["a", "b"]);
    let mut adapter = pair("a.lora_B", "a.lora_A");
    adapter.extend([f32s("b.lora_B", &[5, 1], &[0.0; 5]), f32s("b.lora_A", &[1, 4], &[0.0; 4])]);
    let misfit = |tensors: &[Tensor], matching| {
        let (key, shape) = fault(resolve(base.layout(), tensors, matching));
        assert_eq!(key.as_deref(), Some("b.lora_B"));
        assert!(matches!(&shape, AdapterFault::Shape { found, wanted, .. } if *found == [5, 1] && *wanted == [4, 4]));
        assert!(shape.to_string().contains("b.weight"), "{shape}");
    };
    misfit(&adapter, Matching::Strict);
    // Nothing else is left to apply.
    misfit(&adapter[2..], Matching::AllowPartial);
    let partly = resolve(base.layout(), &adapter, Matching::AllowPartial).unwrap();
    let [left_out] = &partly.report().unmatched[..] else { panic!("{:?}", partly.report()) };
    assert_eq!((left_out.module.as_str(), left_out.keys.len()), ("b", 2));
    assert!(left_out.why.as_ref().is_some_and(|why| why.contains("`b.lora_B`: shape [5, 1]")), "{left_out:?}");
    assert!(partly.tensor(TensorId::new(0)).is_some() && partly.tensor(TensorId::new(1)).is_none());
    let ranks = [f32s("a.lora_B", &[4, 2], &[0.0; 8]), f32s("a.lora_A", &[1, 4], &[0.0; 4])];
    assert!(matches!(fault(resolve(base.layout(), &ranks, Matching::Strict)).1, AdapterFault::Shape { .. }));
    let half = [f32s("a.lora_B.weight", &[4, 1], &[0.0; 4])];
    let missing = AdapterFault::Incomplete { missing: "a.lora_A.weight".into() };
    assert_eq!(fault(resolve(base.layout(), &half, Matching::Strict)).1, missing);
}

/// A weight of integers is named with its own name, for the adapter's is another.
#[test]
fn a_target_that_is_not_of_floats_is_named() {
    let codes = file("model", &[("a.weight".to_owned(), DType::I64, vec![4, 4], vec![0; 128])]);
    let (key, found) = fault(resolve(codes.layout(), &pair("a.lora_B", "a.lora_A"), Matching::Strict));
    let wanted = AdapterFault::BadDType { what: "its target `a.weight`".to_owned(), dtype: DType::I64 };
    assert_eq!((key.as_deref(), found), (Some("a"), wanted));
}

#[test]
fn factors_that_are_not_finite_name_their_key_and_element() {
    let base = model(&["a"]);
    let mut adapter = pair("a.lora_B", "a.lora_A");
    adapter[1] = f32s("a.lora_A", &[1, 4], &[0.0, 1.0, f32::NAN, 1.0]);
    let (key, not_finite) = fault(resolve(base.layout(), &adapter, Matching::Strict));
    assert_eq!(key.as_deref(), Some("a.lora_A"));
    assert_eq!(not_finite, AdapterFault::NotFinite { index: 2, value: "NaN".into() });
    for strength in [f32::NAN, f32::INFINITY] {
        assert!(Adapter::from_checkpoint(file("adapter", &pair("a.lora_B", "a.lora_A")), strength).is_err());
    }
}

#[test]
fn what_nothing_understands_is_reported() {
    let base = model(&["a"]);
    let mut adapter = pair("a.lora_B", "a.lora_A");
    adapter.push(f32s("a.something_new", &[1], &[0.0]));
    let not_understood = AdapterFault::NotUnderstood { keys: vec!["a.something_new".into()] };
    assert_eq!(fault(resolve(base.layout(), &adapter, Matching::Strict)).1, not_understood);
    let allowed = resolve(base.layout(), &adapter, Matching::AllowPartial).unwrap();
    assert_eq!(allowed.report().skipped[0].key, "a.something_new");
    assert_eq!(allowed.report().skipped[0].why, SkipReason::NotUnderstood);

    let boft = [f32s("a.oft_blocks", &[1, 2, 2, 2], &[0.0; 8])];
    assert_eq!(
        fault(resolve(base.layout(), &boft, Matching::AllowPartial)).1,
        AdapterFault::Unsupported { kind: "BOFT".into() }
    );
    let mut no_bias = pair("a.lora_B", "a.lora_A");
    no_bias.push(f32s("a.diff_b", &[4], &[0.0; 4]));
    assert!(matches!(fault(resolve(base.layout(), &no_bias, Matching::Strict)).1, AdapterFault::PartlyMatches { .. }));
    let alone = [f32s("a.alpha", &[], &[1.0])];
    assert!(matches!(fault(resolve(base.layout(), &alone, Matching::Strict)).1, AdapterFault::NotUnderstood { .. }));
}

#[test]
fn replacements_biases_and_norms_change_their_own_tensors() {
    let base = file(
        "model",
        &[
            f32s("a.weight", &[2, 2], &[1.0, 2.0, 3.0, 4.0]),
            f32s("a.bias", &[2], &[1.0, -1.0]),
            f32s("n.weight", &[2], &[0.5, 0.5]),
            f32s("n.bias", &[2], &[0.0, 0.0]),
            f32s("s.weight", &[2], &[0.0, 0.0]),
            f32s("modulation", &[1, 2], &[1.0, 1.0]),
        ],
    );
    let adapter = [
        f32s("a.diff", &[2, 2], &[1.0, 0.0, 0.0, 1.0]),
        f32s("a.diff_b", &[2], &[2.0, 2.0]),
        f32s("n.w_norm", &[2], &[1.0, 2.0]),
        f32s("n.b_norm", &[2], &[3.0, 4.0]),
        f32s("s.set_weight", &[2], &[7.0, 8.0]),
        f32s("diffusion_model.modulation.diff", &[1, 2], &[1.0, -1.0]),
    ];
    let adapter = Adapter::from_checkpoint(file("adapter", &adapter), 0.5).unwrap();
    let (got, weights) = merged(&base, vec![adapter], Matching::Strict);
    let values: Vec<Vec<f32>> = got.iter().map(|t| floats(t.1, &t.3)).collect();
    let wanted: [&[f32]; 6] = [&[1.5, 2.0, 3.0, 4.5], &[2.0, 0.0], &[1.0, 1.5], &[1.5, 2.0], &[7.0, 8.0], &[1.5, 0.5]];
    assert_eq!(values, wanted);
    assert_eq!(weights.report().applied.len(), 4);
}

#[test]
fn adapters_follow_each_other_on_one_weight() {
    let base = model(&["a"]);
    let one = || file("one", &pair("a.lora_B", "a.lora_A"));
    let open = |strength| Adapter::from_checkpoint(one(), strength).unwrap();
    let (twice, _) = merged(&base, vec![open(0.5), open(-0.25)], Matching::Strict);
    let (once, _) = merged(&base, vec![open(0.25)], Matching::Strict);
    assert_eq!(difference(DType::F32, &twice[0].3, &once[0].3), None);
    let (zero, weights) = merged(&base, vec![open(0.0)], Matching::Strict);
    assert_eq!(zero, reference::tensors(&base));
    assert!(weights.patches().tensor(TensorId::new(0)).is_none());
    assert!(weights.report().skipped.iter().all(|s| s.why == SkipReason::ZeroStrength));
    assert_eq!(weights.report().skipped.len(), 2);
}

#[test]
fn separate_projections_change_rows_of_a_fused_weight() {
    let values: Vec<f32> = (0..48).map(|v| v as f32 - 20.0).collect();
    let fused = file("model", &[f32s("blocks.0.attn.qkv.weight", &[12, 4], &values)]);
    let mut adapter = pair("blocks.0.attn.k.lora_B", "blocks.0.attn.k.lora_A");
    adapter.extend(pair("blocks.0.attn.v.lora_B", "blocks.0.attn.v.lora_A"));
    let adapter = Adapter::from_checkpoint(file("adapter", &adapter), 1.0).unwrap();
    let (got, _) = merged(&fused, vec![adapter], Matching::Strict);
    let got = floats(DType::F32, &got[0].3);
    let (up, down) = ([1.0, -2.0, 0.5, 3.0], [0.25, 0.5, -1.0, 2.0]);
    for (index, (got, was)) in got.iter().zip(&values).enumerate() {
        let delta = if index < 16 { 0.0 } else { up[index / 4 % 4] * down[index % 4] };
        assert_eq!(*got, was + delta, "{index}");
    }
}

#[test]
fn one_component_of_a_file_can_be_asked_for() {
    let base = model(&["blocks.0.q"]);
    let mut adapter = pair("unet.blocks.0.q.lora_B", "unet.blocks.0.q.lora_A");
    let ups = |module: &str, value| f32s(&format!("{module}.lora_B"), &[4, 1], &[value; 4]);
    adapter.push(ups("text_encoder.blocks.0.q", 2.0));
    adapter.push(f32s("text_encoder.blocks.0.q.lora_A", &[1, 4], &[1.0; 4]));
    assert!(matches!(fault(resolve(base.layout(), &adapter, Matching::Strict)).1, AdapterFault::Overlap { .. }));
    let unet = Adapter::from_checkpoint(file("adapter", &adapter), 1.0).unwrap().only("unet.");
    let weights = Weights::patched(base.clone(), vec![unet], Matching::Strict).unwrap();
    assert_eq!(weights.report().skipped.len(), 2);
    assert!(weights.report().skipped.iter().all(|s| s.why == SkipReason::OtherComponent));
}

#[test]
fn a_padded_weight_grows_in_the_layout_too() {
    let base = file("model", &[f32s("x.weight", &[4, 4], &[1.0; 16]), f32s("y.weight", &[4, 4], &[1.0; 16])]);
    let first = Adapter::from_checkpoint(file("first", &pair("x.lora_B", "x.lora_A")), 1.0).unwrap();
    let shape = tensor("x.reshape_weight", DType::I64, &[2], [5i64, 4].iter().flat_map(|v| v.to_le_bytes()).collect());
    let grown = [f32s("x.lora_B", &[5, 1], &[1.0; 5]), f32s("x.lora_A", &[1, 4], &[1.0; 4]), shape];
    let second = Adapter::from_checkpoint(file("second", &grown), 1.0).unwrap();
    let (got, weights) = merged(&base, vec![first, second], Matching::Strict);
    assert_eq!((&got[0].2[..], weights.layout().bytes(), base.layout().bytes()), (&[5, 4][..], 144, 128));
    assert_eq!(floats(DType::F32, &got[0].3)[12..], [2.75, 3.5, -1.0, 8.0, 1.0, 1.0, 1.0, 1.0]);
    let small = tensor("x.reshape_weight", DType::I64, &[2], [3i64, 4].iter().flat_map(|v| v.to_le_bytes()).collect());
    let mut shrunk = pair("x.lora_B", "x.lora_A");
    shrunk.push(small);
    assert!(matches!(fault(resolve(base.layout(), &shrunk, Matching::Strict)).1, AdapterFault::Shape { .. }));
}

#[test]
fn factors_of_every_kind_are_checked_against_each_other_and_the_weight() {
    let base = model(&["a"]);
    let zeros = |key: &str, shape: &[u64]| f32s(key, shape, &vec![0.5; shape.iter().product::<u64>() as usize]);
    let cases: [&[(&str, &[u64])]; 14] = [
        &[("a.hada_w1_a", &[4, 2]), ("a.hada_w1_b", &[2, 4]), ("a.hada_w2_a", &[4, 2])],
        &[("a.hada_w1_a", &[4, 2]), ("a.hada_w1_b", &[2, 5]), ("a.hada_w2_a", &[4, 2]), ("a.hada_w2_b", &[2, 4])],
        &[("a.hada_w1_a", &[4, 3]), ("a.hada_w1_b", &[2, 4]), ("a.hada_w2_a", &[4, 2]), ("a.hada_w2_b", &[2, 4])],
        &[
            ("a.hada_w1_a", &[2, 4]),
            ("a.hada_w1_b", &[2, 4]),
            ("a.hada_w2_a", &[2, 4]),
            ("a.hada_w2_b", &[2, 4]),
            ("a.hada_t1", &[2, 2, 1, 1]),
        ],
        &[("a.lokr_w1", &[2, 2])],
        &[("a.lokr_w1", &[2, 2]), ("a.lokr_w2", &[2, 3])],
        &[("a.lokr_w1", &[2, 2]), ("a.lokr_w2_a", &[2, 3]), ("a.lokr_w2_b", &[2, 2])],
        &[("a.lokr_w1", &[2, 2]), ("a.lokr_w2_a", &[1, 1000]), ("a.lokr_w2_b", &[1, 1000]), ("a.lokr_t2", &[1, 1, 1])],
        &[("a.a1.weight", &[4, 2]), ("a.a2.weight", &[2, 4]), ("a.b1.weight", &[4, 3]), ("a.b2.weight", &[2, 4])],
        &[("a.a1.weight", &[4, 2]), ("a.a2.weight", &[2, 4])],
        &[("a.oft_blocks", &[2, 3, 3])],
        &[("a.oft_blocks", &[2, 2, 3])],
        &[("a.lora_B", &[4, 1]), ("a.lora_A", &[1, 4]), ("a.dora_scale", &[3])],
        &[("a.lora_B", &[4, 1]), ("a.lora_A", &[1, 4]), ("a.lora_mid.weight", &[1, 2, 1, 1])],
    ];
    for case in cases {
        let tensors: Vec<Tensor> = case.iter().map(|(key, shape)| zeros(key, shape)).collect();
        let (key, fault) = fault(resolve(base.layout(), &tensors, Matching::Strict));
        assert!(key.is_some_and(|key| case.iter().any(|(other, _)| key == *other)), "{case:?}");
        assert!(matches!(fault, AdapterFault::Shape { .. } | AdapterFault::Incomplete { .. }), "{case:?}: {fault}");
    }
}

#[test]
fn both_layouts_of_glora_are_told_apart() {
    // W += W a b + c d, for either order of the factors, on a weight of [2, 3].
    let base = file("model", &[f32s("a.weight", &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])]);
    let (a, b) = ([1.0, 0.0, 2.0], [1.0, 0.5, 0.25]);
    let (c, d) = ([1.0, -1.0], [10.0, 20.0, 30.0]);
    let newer = [
        f32s("a.a1.weight", &[3, 1], &a),
        f32s("a.a2.weight", &[1, 3], &b),
        f32s("a.b1.weight", &[2, 1], &c),
        f32s("a.b2.weight", &[1, 3], &d),
    ];
    let older = [
        f32s("a.a2.weight", &[3, 1], &a),
        f32s("a.a1.weight", &[1, 3], &b),
        f32s("a.b2.weight", &[2, 1], &c),
        f32s("a.b1.weight", &[1, 3], &d),
    ];
    for layout in [newer, older] {
        let adapter = Adapter::from_checkpoint(file("adapter", &layout), 1.0).unwrap();
        let (got, _) = merged(&base, vec![adapter], Matching::Strict);
        assert_eq!(floats(DType::F32, &got[0].3), [18.0, 25.5, 34.75, 10.0, -7.0, -20.0]);
    }
}

const ENDINGS: [&str; 36] = [
    ".lora_up.weight",
    ".lora_down.weight",
    ".lora_mid.weight",
    ".lora_A",
    ".lora_B",
    ".lora_A.weight",
    ".lora_B.weight",
    ".alpha",
    ".dora_scale",
    ".reshape_weight",
    ".lora_magnitude_vector",
    ".hada_w1_a",
    ".hada_w1_b",
    ".hada_w2_a",
    ".hada_w2_b",
    ".hada_t1",
    ".hada_t2",
    ".lokr_w1",
    ".lokr_w1_a",
    ".lokr_w1_b",
    ".lokr_w2",
    ".lokr_w2_a",
    ".lokr_w2_b",
    ".lokr_t2",
    ".a1.weight",
    ".a2.weight",
    ".b1.weight",
    ".b2.weight",
    ".oft_blocks",
    ".diff",
    ".diff_b",
    ".set_weight",
    ".w_norm",
    ".b_norm",
    ".weight",
    ".bias",
];

fn any_tensor(names: impl Strategy<Value = String>) -> impl Strategy<Value = Tensor> {
    let shape = proptest::collection::vec(prop_oneof![6 => 1u64..4, 1 => Just(0u64)], 0..5);
    (names, shape, prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F8E4M3), Just(DType::I64)], any::<u8>())
        .prop_map(|(name, shape, dtype, fill)| {
            let bytes = dtype.bytes_of(&shape).unwrap() as usize;
            tensor(&name, dtype, &shape, vec![fill & 0x47; bytes])
        })
}

fn distinct(mut tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors.dedup_by(|a, b| a.0 == b.0);
    tensors
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn resolving_and_applying_never_panics(
        weights in proptest::collection::vec(any_tensor("(a|b\\.qkv|b\\.q)\\.(weight|bias|weight_scale)"), 1..5),
        factors in proptest::collection::vec(
            any_tensor(("(a|b\\.q|b_k|lora_unet_a)", 0..ENDINGS.len()).prop_map(|(name, end)| format!("{name}{}", ENDINGS[end]))),
            0..7,
        ),
        peft in any::<bool>(),
    ) {
        let base = file("base", &distinct(weights));
        let factors = file("adapter", &distinct(factors));
        let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4}"#;
        let adapter = if peft { Adapter::from_peft(factors, config, 0.5) } else { Adapter::from_checkpoint(factors, 0.5) };
        let Ok(adapter) = adapter else { return Ok(()) };
        let Ok(weights) = Weights::patched(base.clone(), vec![adapter], Matching::AllowPartial) else { return Ok(()) };
        for (index, patch) in weights.patches().iter() {
            let mut bytes = reference::bytes(&base, index);
            bytes.resize(weights.layout().tensor(index).unwrap().bytes as usize, 0);
            let siblings: Vec<Vec<u8>> = patch.needs().iter().map(|&index| reference::bytes(&base, index)).collect();
            let _ = patch.apply(&mut bytes, &siblings.iter().map(Vec::as_slice).collect::<Vec<_>>());
        }
    }
}

/// Values in -1..1 that look random.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mixed = |place: u64| (place ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (1..=count as u64).map(|place| (mixed(place) >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn loras_give_the_bits_of_their_formula(
        (rows, cols, rank) in (1usize..40, 1usize..700, 1usize..9),
        strengths in [-2.0f32..2.0, 0.1f32..1.0],
    ) {
        prop_assume!(strengths[0] != 0.0);
        let [up, down] = [[rows as u64, rank as u64], [rank as u64, cols as u64]];
        for (dtype, _) in FLOATS {
            let weight = stored(dtype, &noise(rows * cols, 3));
            let model = file("base", &[tensor("w.weight", dtype, &[rows as u64, cols as u64], weight.clone())]);
            let mut wanted = floats(dtype, &weight);
            let mut adapters = Vec::new();
            for (strength, seed) in strengths.into_iter().zip([4, 8]) {
                let (ups, downs) = (noise(rows * rank, seed), noise(rank * cols, seed + 1));
                let scale = (f64::from(strength) * 2.5 / rank as f64) as f32;
                for (index, weight) in wanted.iter_mut().enumerate() {
                    let (row, col) = (index / cols, index % cols);
                    let sum = (0..rank).fold(0.0f32, |sum, k| ups[row * rank + k].mul_add(downs[k * cols + col], sum));
                    *weight += scale * sum;
                }
                let factors = [
                    f32s("w.lora_up.weight", &up, &ups),
                    f32s("w.lora_down.weight", &down, &downs),
                    f32s("w.alpha", &[], &[2.5]),
                ];
                adapters.push(Adapter::from_checkpoint(file("adapter", &factors), strength).unwrap());
            }
            let (got, _) = merged(&model, adapters, Matching::Strict);
            prop_assert!(got[0].3 == stored(dtype, &wanted), "{dtype}");
        }
    }
}
