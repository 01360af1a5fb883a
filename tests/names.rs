//! Real keys of adapters against real checkpoints' names, across programs: `tests/data/names/*.txt`.
//!
//! A list has the checkpoint's tensors with their sizes, then the adapter's keys and what each has to change: a tensor,
//! some rows of one, or several that hold what the adapter has as one. Of factors, every row has to arrive at its place; at
//! the end of a line stands whether the halves are swapped there.

mod listed;
mod reference;

use std::collections::BTreeMap;
use std::path::Path;

use listed::{dealt, misplaced, read, tensors};
use proptest::prelude::*;
use reference::{Tensor, f32s, file, floats, merged};
use tensor_offload::adapter::{Adapter, Matching, Patches, RotaryRows};
use tensor_offload::error::AdapterFault;
use tensor_offload::{Checkpoint, DType, Error};

#[test]
fn every_listed_key_finds_its_target() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/names");
    let mut lists: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    lists.sort();
    let (mut failures, mut all) = (Vec::new(), 0);
    for list in &lists {
        let case = read(list);
        for keys in dealt(&case) {
            let factors: Vec<Tensor> =
                keys.iter().flat_map(|listed| tensors(&listed.key, &case.change(listed))).collect();
            let mut adapter = Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap().alpha(1.0).unwrap();
            adapter = case.rotary.map_or(adapter.clone(), |rows| adapter.rotary_rows(rows));
            let (values, weights) = merged(&case.base, vec![adapter], Matching::AllowPartial);
            for listed in keys {
                let applied = weights.report().applied.iter().find(|applied| applied.keys.contains(&listed.key));
                let got: Vec<_> = applied
                    .map(|a| a.targets.iter().cloned().zip(a.rows.iter().cloned()).collect())
                    .unwrap_or_default();
                all += 1;
                let fault = if got != listed.wanted {
                    Some(format!("{got:?} instead of {:?}", listed.wanted))
                } else {
                    misplaced(&case, listed, &values)
                };
                failures.extend(fault.map(|fault| format!("{}: {}: {fault}", list.display(), listed.key)));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {all}:\n{}", failures.len(), failures[..failures.len().min(40)].join("\n"));
    assert!(lists.len() >= 70 && all > 10_000, "{all} keys in {} lists", lists.len());
}

fn adapter(tensors: &[Tensor]) -> Adapter {
    Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap().alpha(1.0).unwrap()
}

/// A LoRA of rank 1 whose product is 1 at every column of row `n`, times `values[n]`.
fn rows(module: &str, values: &[f32], columns: u64) -> Vec<Tensor> {
    vec![
        f32s(&format!("{module}.lora_B.weight"), &[values.len() as u64, 1], values),
        f32s(&format!("{module}.lora_A.weight"), &[1, columns], &vec![1.0; columns as usize]),
    ]
}

fn zeros(tensors: &[(&str, [u64; 2])]) -> Checkpoint {
    let zero = |(name, shape): &(&str, [u64; 2])| f32s(name, shape, &vec![0.0; (shape[0] * shape[1]) as usize]);
    file("model", &tensors.iter().map(zero).collect::<Vec<_>>())
}

/// The first column of each tensor once the adapter is applied.
fn first_columns(base: &Checkpoint, adapter: Adapter) -> Vec<Vec<f32>> {
    let (got, _) = merged(base, vec![adapter], Matching::Strict);
    let column =
        |(_, dtype, shape, bytes): &Tensor| floats(*dtype, bytes).into_iter().step_by(shape[1] as usize).collect();
    got.iter().map(column).collect()
}

fn fault(base: &Checkpoint, adapter: Adapter) -> AdapterFault {
    match Patches::resolve(base.layout(), vec![adapter], Matching::Strict) {
        Err(Error::Adapter { fault, .. }) => *fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn parts_go_to_their_rows_and_a_whole_is_cut_into_its_parts() {
    let fused = zeros(&[("single_blocks.3.linear1.weight", [14, 2])]);
    let parts: [(&str, &[f32]); 4] =
        [("attn.to_v", &[5.0, 6.0]), ("attn.to_q", &[1.0, 2.0]), ("attn.to_k", &[3.0, 4.0]), ("proj_mlp", &[7.0; 8])];
    let all: Vec<Tensor> = parts
        .iter()
        .flat_map(|(part, values)| rows(&format!("transformer.single_transformer_blocks.3.{part}"), values, 2))
        .collect();
    let wanted = [&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..], &[7.0; 8]].concat();
    assert_eq!(first_columns(&fused, adapter(&all)).concat(), wanted);

    let name = |part: &str| format!("single_transformer_blocks.3.{part}.weight");
    let names = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"].map(name);
    let apart = zeros(&[(&names[0], [2, 2]), (&names[1], [2, 2]), (&names[2], [2, 2]), (&names[3], [8, 2])]);
    for whole in ["lora_unet_single_blocks_3_linear1", "diffusion_model.single_blocks.3.linear1"] {
        let got = first_columns(&apart, adapter(&rows(whole, &wanted, 2)));
        assert_eq!(got.concat(), wanted, "{whole}");
    }
    let short = fault(&apart, adapter(&rows("lora_unet_single_blocks_3_linear1", &wanted[..13], 2)));
    assert!(
        matches!(&short, AdapterFault::Shape { found, wanted, .. } if *found == [13, 1] && *wanted == [14]),
        "{short}"
    );
    let odd = fault(&fused, adapter(&rows("transformer.single_transformer_blocks.3.proj_mlp", &[1.0; 6], 2)));
    assert!(matches!(odd, AdapterFault::Shape { .. }), "{odd}");

    let grouped = zeros(&[("l.0.q_proj.weight", [4, 2]), ("l.0.k_proj.weight", [2, 2]), ("l.0.v_proj.weight", [2, 2])]);
    let got = first_columns(&grouped, adapter(&rows("l.0.qkv_proj", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 2)));
    assert_eq!(got, [vec![1.0, 2.0, 3.0, 4.0], vec![5.0, 6.0], vec![7.0, 8.0]]);
}

#[test]
fn other_kinds_are_cut_too_or_refused_by_name() {
    let names = ["q", "k", "v"].map(|part| format!("b.0.{part}.weight"));
    let apart = zeros(&[(&names[0], [2, 2]), (&names[1], [2, 2]), (&names[2], [2, 2])]);
    let values: Vec<f32> = (0..12).map(|v| v as f32).collect();
    let got = first_columns(&apart, adapter(&[f32s("b.0.qkv.diff", &[6, 2], &values)]));
    assert_eq!(got, [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]);
    let across = [f32s("b.0.qkv.oft_blocks", &[1, 6, 6], &[0.0; 36])];
    let fault = fault(&apart, adapter(&across));
    assert!(matches!(&fault, AdapterFault::Unsupported { kind } if kind.contains("b.0.q")), "{fault}");
}

#[test]
fn rows_are_brought_into_the_checkpoints_order() {
    let flux = zeros(&[("final_layer.adaLN_modulation.1.weight", [4, 2])]);
    let swapped = first_columns(&flux, adapter(&rows("transformer.norm_out.linear", &[1.0, 2.0, 3.0, 4.0], 2)));
    assert_eq!(swapped, [[3.0, 4.0, 1.0, 2.0]]);

    let gguf = zeros(&[("blk.0.attn_q.weight", [8, 2]), ("blk.0.attn_k.weight", [4, 2])]);
    let module = |part: &str| format!("base_model.model.model.layers.0.self_attn.{part}_proj");
    let mut both = rows(&module("q"), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 2);
    both.extend(rows(&module("k"), &[1.0, 2.0, 3.0, 4.0], 2));
    let unsaid = fault(&gguf, adapter(&both));
    assert_eq!(unsaid, AdapterFault::RowOrder { target: "blk.0.attn_q".into() });
    assert!(unsaid.to_string().contains("rotary_rows"));
    let paired = RotaryRows::Paired { heads: 2, kv_heads: 1 };
    let got = first_columns(&gguf, adapter(&both).rotary_rows(paired));
    assert_eq!(got, [vec![1.0, 3.0, 2.0, 4.0, 5.0, 7.0, 6.0, 8.0], vec![1.0, 3.0, 2.0, 4.0]]);
    let got = first_columns(&gguf, adapter(&both).rotary_rows(RotaryRows::Same));
    assert_eq!(got, [vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], vec![1.0, 2.0, 3.0, 4.0]]);
    let misfit = fault(&gguf, adapter(&both).rotary_rows(RotaryRows::Paired { heads: 3, kv_heads: 1 }));
    assert!(matches!(misfit, AdapterFault::Shape { .. }), "{misfit}");

    let hf = zeros(&[("model.layers.0.self_attn.q_proj.weight", [8, 2])]);
    let back = adapter(&rows("blk.0.attn_q", &[1.0, 3.0, 2.0, 4.0, 5.0, 7.0, 6.0, 8.0], 2)).rotary_rows(paired);
    assert_eq!(first_columns(&hf, back), [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]);
}

#[test]
fn a_part_of_a_fused_bias_is_changed() {
    let base = file(
        "model",
        &[
            f32s("double_blocks.0.img_attn.qkv.weight", &[6, 2], &[0.0; 12]),
            f32s("double_blocks.0.img_attn.qkv.bias", &[6], &[-0.0, 1.0, 2.0, 3.0, 4.0, -0.0]),
        ],
    );
    let bias = |adapters: Vec<Adapter>| floats(DType::F32, &merged(&base, adapters, Matching::Strict).0[1].3);
    let key = |part: &str, end: &str| format!("transformer.transformer_blocks.0.attn.{part}{end}");
    let keys = adapter(&[f32s(&key("to_k", ".diff_b"), &[2], &[10.0, 20.0])]);
    let got = bias(vec![keys.clone()]);
    assert_eq!(got, [0.0, 1.0, 12.0, 23.0, 4.0, 0.0]);
    assert!(got[0].is_sign_negative() && got[5].is_sign_negative(), "the others are not touched");
    // After one for the whole, and before one for another part.
    let whole = adapter(&[f32s("double_blocks.0.img_attn.qkv.diff_b", &[6], &[100.0; 6])]);
    let values = adapter(&[f32s(&key("to_v", ".lora_B.bias"), &[2], &[7.0, 8.0])]);
    assert_eq!(bias(vec![whole, keys, values]), [100.0, 101.0, 112.0, 123.0, 111.0, 108.0]);
    let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": ["to_q"]}"#;
    let saved = file("adapter", &[f32s("base_model.model.transformer_blocks.0.attn.to_q.bias", &[2], &[5.0, 6.0])]);
    let saved = Adapter::from_peft(saved, config, 1.0).unwrap();
    assert_eq!(bias(vec![saved]), [5.0, 6.0, 2.0, 3.0, 4.0, -0.0]);
    let long = fault(&base, adapter(&[f32s(&key("to_k", ".diff_b"), &[3], &[1.0; 3])]));
    assert!(matches!(long, AdapterFault::Shape { .. }), "{long}");
    let (_, weights) =
        merged(&base, vec![adapter(&[f32s(&key("to_v", ".diff_b"), &[2], &[1.0; 2])])], Matching::Strict);
    assert_eq!(weights.report().applied[0].rows, [Some(4..6)]);
}

/// OpenCLIP's projection is a matrix of inputs by outputs, where others have a linear module.
#[test]
fn a_text_projection_is_turned() {
    let name = "conditioner.embedders.1.model.text_projection";
    let base = zeros(&[(name, [2, 3])]);
    let whole = |adapter| floats(DType::F32, &merged(&base, vec![adapter], Matching::Strict).0[0].3);
    let lora = |module: &str| {
        adapter(&[
            f32s(&format!("{module}.lora_up.weight"), &[3, 1], &[1.0, 2.0, 3.0]),
            f32s(&format!("{module}.lora_down.weight"), &[1, 2], &[1.0, 10.0]),
        ])
    };
    for module in ["lora_te2_text_projection", "text_encoder_2.text_projection", name] {
        assert_eq!(whole(lora(module)), [1.0, 2.0, 3.0, 10.0, 20.0, 30.0], "{module}");
    }
    let diff = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
    assert_eq!(
        whole(adapter(&[f32s("lora_te2_text_projection.diff", &[3, 2], &diff)])),
        [1.0, 2.0, 3.0, 10.0, 20.0, 30.0]
    );
    // By the checkpoint's own name it is as the checkpoint has it.
    assert_eq!(whole(adapter(&[f32s(&format!("{name}.diff"), &[2, 3], &diff)])), diff);
    let lokr = [
        f32s("lora_te2_text_projection.lokr_w1", &[3, 1], &[1.0, 2.0, 3.0]),
        f32s("lora_te2_text_projection.lokr_w2", &[1, 2], &[1.0, 10.0]),
    ];
    assert_eq!(whole(adapter(&lokr)), [1.0, 2.0, 3.0, 10.0, 20.0, 30.0]);
    let oft = [f32s("lora_te2_text_projection.oft_blocks", &[1, 3, 3], &[0.0; 9])];
    let refused = fault(&base, adapter(&oft));
    assert!(matches!(&refused, AdapterFault::Unsupported { kind } if kind.contains(name)), "{refused}");
    let linear = zeros(&[("text_encoders.clip_g.transformer.text_projection.weight", [3, 2])]);
    assert_eq!(first_columns(&linear, lora("lora_te2_text_projection")), [[1.0, 2.0, 3.0]]);
}

/// Norms of GGUF files may have one added: what is added to them is the same, a whole one is not.
#[test]
fn norms_of_gguf_are_changed_but_not_replaced() {
    let norm = |name: &str| f32s(name, &[2], &[2.0, 3.0]);
    let base = file("model", &[norm("blk.0.attn_norm.weight")]);
    let diff = adapter(&[f32s("model.layers.0.input_layernorm.diff", &[2], &[0.5, 0.25])]);
    assert_eq!(floats(DType::F32, &merged(&base, vec![diff], Matching::Strict).0[0].3), [2.5, 3.25]);
    let set = fault(&base, adapter(&[f32s("model.layers.0.input_layernorm.set_weight", &[2], &[1.0; 2])]));
    assert!(matches!(&set, AdapterFault::Unsupported { kind } if kind.contains("blk.0.attn_norm")), "{set}");
    let own = adapter(&[f32s("blk.0.attn_norm.set_weight", &[2], &[1.0; 2])]);
    assert_eq!(floats(DType::F32, &merged(&base, vec![own], Matching::Strict).0[0].3), [1.0, 1.0]);
    let gemma = file("model", &[norm("blk.0.ffn_norm.weight"), norm("blk.0.post_attention_norm.weight")]);
    let unclear = fault(&gemma, adapter(&[f32s("model.layers.0.post_attention_layernorm.diff", &[2], &[1.0; 2])]));
    assert!(matches!(&unclear, AdapterFault::Ambiguous { candidates } if candidates.len() == 2), "{unclear}");
}

#[test]
fn the_models_own_names_go_before_the_tables() {
    // The name of another program for one module is the model's own for another.
    let base = zeros(&[("blocks.0.norm2.weight", [1, 2]), ("blocks.0.norm3.weight", [1, 2])]);
    let got = first_columns(&base, adapter(&[f32s("diffusion_model.blocks.0.norm2.diff", &[1, 2], &[1.0; 2])]));
    assert_eq!(got, [[1.0], [0.0]]);
    // Two text encoders of one file, told apart by the prefix only.
    let both = zeros(&[
        ("text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight", [2, 2]),
        ("text_encoders.clip_g.transformer.text_model.encoder.layers.0.mlp.fc1.weight", [2, 2]),
    ]);
    let second = rows("text_encoder_2.text_model.encoder.layers.0.mlp.fc1", &[1.0; 2], 2);
    assert_eq!(first_columns(&both, adapter(&second)), [[0.0; 2], [1.0; 2]]);
    let unclear = fault(&both, adapter(&rows("text_model.encoder.layers.0.mlp.fc1", &[1.0; 2], 2)));
    assert!(matches!(&unclear, AdapterFault::Ambiguous { candidates } if candidates.len() == 2), "{unclear}");
}

/// The roots of a vision-language model are one root, but a name is never given to one of two models by chance.
#[test]
fn a_language_model_is_found_under_another_root_if_only_one_fits() {
    let text = |root: &str| format!("{root}layers.0.q.weight");
    let [old, new, plain] = ["language_model.model.", "model.language_model.", "model."].map(text);
    let lora = |module: &str| adapter(&rows(module, &[1.0], 2));
    for file in [&old, &new, &plain] {
        let base = zeros(&[(file, [1, 2]), ("vision_tower.layers.0.q.weight", [1, 2])]);
        for root in [
            "language_model.model.",
            "model.language_model.",
            "model.text_model.",
            "model.",
            "base_model.model.model.",
            "",
        ] {
            assert_eq!(first_columns(&base, lora(&format!("{root}layers.0.q"))), [[1.0], [0.0]], "{root} on {file}");
        }
        assert_eq!(first_columns(&base, lora("model.vision_tower.layers.0.q")), [[0.0], [1.0]]);
        assert!(matches!(fault(&base, lora("model.audio_tower.layers.0.q")), AdapterFault::NothingMatches { .. }));
    }
    let both = zeros(&[(&old, [1, 2]), (&plain, [1, 2])]);
    assert_eq!(first_columns(&both, lora("model.layers.0.q")), [[0.0], [1.0]]);
    let unclear = fault(&both, lora("model.text_model.layers.0.q"));
    assert!(matches!(&unclear, AdapterFault::Ambiguous { candidates } if candidates.len() == 2), "{unclear}");
    let thinker = zeros(&[("thinker.lm_head.weight", [1, 2]), (&text("thinker.model."), [1, 2])]);
    assert_eq!(first_columns(&thinker, lora("base_model.model.lm_head")), [[1.0], [0.0]]);
    assert_eq!(first_columns(&thinker, lora("base_model.model.model.layers.0.q")), [[0.0], [1.0]]);
    let omni = zeros(&[(&text("talker.model."), [1, 2]), (&text("thinker.model."), [1, 2])]);
    assert!(matches!(fault(&omni, lora("base_model.model.model.layers.0.q")), AdapterFault::Ambiguous { .. }));
}

/// Z-Image adapters have `to.q.lora.down.weight` beside `to_q.alpha`.
#[test]
fn an_alpha_in_another_spelling_belongs_to_the_factors() {
    let base = zeros(&[("layers.0.attention.to_q.weight", [2, 2]), ("layers.0.attention.to_k.weight", [2, 2])]);
    let factors = |q: &str| {
        vec![
            f32s(&format!("layers.0.attention.{q}.lora.up.weight"), &[2, 1], &[1.0, 2.0]),
            f32s(&format!("layers.0.attention.{q}.lora.down.weight"), &[1, 2], &[1.0, 1.0]),
        ]
    };
    let alpha = |q: &str| f32s(&format!("layers.0.attention.{q}.alpha"), &[], &[4.0]);
    let adapter = |tensors: &[Tensor]| Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap();
    for (spelled, with) in [("to.q", "to_q"), ("to_q", "to.q"), ("to.q", "to.q")] {
        let mut all = factors(spelled);
        all.insert(0, alpha(with));
        assert_eq!(first_columns(&base, adapter(&all)), [[4.0, 8.0], [0.0, 0.0]], "{spelled} and {with}");
    }
    let mut twice = factors("to.q");
    twice.extend([alpha("to_q"), alpha("to.q")]);
    assert!(matches!(fault(&base, adapter(&twice)), AdapterFault::NotUnderstood { .. }));
    twice.extend(factors("to_q"));
    assert_eq!(first_columns(&base, adapter(&twice)), [[4.0, 8.0], [0.0, 0.0]]);
    twice[0] = f32s("layers.0.attention.to.q.lora.up.weight", &[2, 1], &[1.0, 3.0]);
    assert!(matches!(fault(&base, adapter(&twice)), AdapterFault::Overlap { .. }));
}

/// Families have names outside their blocks in common, for different modules.
#[test]
fn a_name_of_several_families_is_of_the_one_whose_blocks_there_are() {
    let cosmos = zeros(&[
        ("net.blocks.0.self_attn.q_proj.weight", [2, 2]),
        ("net.final_layer.linear.weight", [2, 2]),
        ("net.final_layer.adaln_modulation.2.weight", [2, 2]),
    ]);
    let lora = || adapter(&rows("transformer.norm_out.linear_2", &[1.0, 2.0], 2));
    assert_eq!(first_columns(&cosmos, lora()), [[0.0; 2], [0.0; 2], [1.0, 2.0]]);
    let lumina = zeros(&[("layers.0.attention.qkv.weight", [6, 2]), ("final_layer.linear.weight", [2, 2])]);
    assert_eq!(first_columns(&lumina, lora()), [&[0.0; 6][..], &[1.0, 2.0]]);
    let neither = zeros(&[("final_layer.linear.weight", [2, 2]), ("final_layer.adaln_modulation.2.weight", [2, 2])]);
    assert!(matches!(fault(&neither, lora()), AdapterFault::Ambiguous { .. }));
}

/// What is known by its exact name goes before every other reading of it.
#[test]
fn no_prefix_or_wrapper_is_taken_off_a_name_that_the_checkpoint_has() {
    for (own, shorter) in [
        ("module.a.b", "a.b"),
        ("a._orig_mod.b", "a.b"),
        ("net.a.b", "a.b"),
        ("dit.a.b", "a.b"),
        ("a.to.q", "a.to_q"),
        ("transformer_2.a.b", "a.b"),
    ] {
        let name = |module: &str| format!("{module}.weight");
        let base = zeros(&[(&name(own), [1, 2]), (&name(shorter), [1, 2])]);
        let lora = |module: &str| adapter(&rows(module, &[1.0], 2));
        assert_eq!(first_columns(&base, lora(own)), [[1.0], [0.0]], "{own}");
        assert_eq!(first_columns(&base, lora(shorter)), [[0.0], [1.0]], "{shorter}");
    }
}

#[test]
fn a_caller_names_modules_in_another_way() {
    let base = zeros(&[("enc.0.att.query.weight", [2, 2]), ("enc.1.att.query.weight", [2, 2])]);
    let foreign = || adapter(&rows("lora_x_b1_q", &[1.0, 2.0], 2));
    assert!(matches!(fault(&base, foreign()), AdapterFault::NothingMatches { .. }));
    let renamed = foreign().rename("lora_x_b{}_q", "enc.{}.att.query").unwrap();
    let (_, patches) = merged(&base, vec![renamed.clone()], Matching::Strict);
    assert_eq!(patches.report().applied[0].module, "lora_x_b1_q");
    assert_eq!(first_columns(&base, renamed), [[0.0, 0.0], [1.0, 2.0]]);
    // The first that fits is used, and goes before the adapter's own name.
    let own = adapter(&rows("enc.0.att.query", &[1.0, 2.0], 2)).rename("enc.0*", "enc.1*").unwrap();
    assert_eq!(first_columns(&base, own.rename("enc.{}*", "none.{}*").unwrap()), [[0.0, 0.0], [1.0, 2.0]]);
    // What it gives is looked up as any name is: here as a part of a fused weight.
    let fused = zeros(&[("double_blocks.0.img_attn.qkv.weight", [6, 2])]);
    let part = adapter(&rows("x.0.query", &[1.0, 2.0], 2)).rename("x.{}.query", "transformer_blocks.{}.attn.to_k");
    assert_eq!(first_columns(&fused, part.unwrap()), [[0.0, 0.0, 1.0, 2.0, 0.0, 0.0]]);
    for (from, to) in [("a.{}", "b"), ("a*", "b"), ("a*b", "c*"), ("{", "}"), ("{}{}", "{}{}")] {
        assert!(matches!(foreign().rename(from, to), Err(Error::Invalid { .. })), "{from} {to}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn resolving_names_of_every_table_never_panics(
        weights in proptest::collection::vec(("(double_blocks|single_blocks|blocks|blk|model\\.layers|transformer_blocks)\\.[0-9]\\.(img_attn\\.qkv|linear1|attn_q|self_attn\\.q_proj|self_attn\\.q|attn\\.to_[qkv]|qkv|[qkv])\\.weight", 0u64..9, 1u64..3), 1..6),
        modules in proptest::collection::vec(("(transformer\\.|lora_unet_|)(transformer_blocks|double_blocks|blk|model\\.layers)[._][0-9][._](attn[._]to_[qkv]|img_attn[._]qkv|attn_[qk]|self_attn[._]q_proj|qkv)", 0u64..9), 1..6),
        heads in 0usize..3,
    ) {
        let weights: BTreeMap<String, [u64; 2]> = weights.into_iter().map(|(name, rows, cols)| (name, [rows, cols])).collect();
        let base = zeros(&weights.iter().map(|(name, shape)| (name.as_str(), *shape)).collect::<Vec<_>>());
        let modules: BTreeMap<String, u64> = modules.into_iter().collect();
        let factors: Vec<Tensor> = modules.iter().flat_map(|(name, count)| rows(name, &vec![1.0; *count as usize], 2)).collect();
        let adapter = adapter(&factors).rotary_rows(RotaryRows::Paired { heads, kv_heads: heads });
        let _ = Patches::resolve(base.layout(), vec![adapter], Matching::AllowPartial);
    }
}
