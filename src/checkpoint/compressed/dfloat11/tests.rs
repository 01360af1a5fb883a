//! Shapes by configurations as published models have them.

use serde_json::{Value, json};

use super::shapes::Dimensions;
use super::*;

fn dimensions(config: Value) -> Dimensions {
    Dimensions::of(config.as_object().unwrap())
}

fn check(config: Value, shapes: &[(&str, [u64; 2])]) {
    let dimensions = dimensions(config);
    for (module, shape) in shapes {
        assert_eq!(dimensions.shape(module, shape[0] * shape[1], None), Ok(*shape), "{module}");
        // One row more or less is noticed.
        let other = dimensions.shape(module, (shape[0] + 1) * shape[1], None);
        assert!(matches!(other, Err(DFloat11Fault::OtherShape { .. })), "{module}: {other:?}");
    }
}

#[test]
fn language_models_have_the_shapes_of_their_configurations() {
    // Mistral-Nemo-Instruct-2407, whose heads are narrower than its hidden states.
    let nemo = json!({
        "hidden_size": 5120, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131_072,
    });
    let layer = "model.layers.7";
    let [q, k, o] = ["q_proj", "k_proj", "o_proj"].map(|name| format!("{layer}.self_attn.{name}"));
    let [gate, down] = ["gate_proj", "down_proj"].map(|name| format!("{layer}.mlp.{name}"));
    let shapes: [(&str, [u64; 2]); 7] = [
        (&q, [4096, 5120]),
        (&k, [1024, 5120]),
        (&o, [5120, 4096]),
        (&gate, [14336, 5120]),
        (&down, [5120, 14336]),
        ("lm_head", [131_072, 5120]),
        ("model.embed_tokens", [131_072, 5120]),
    ];
    check(nemo, &shapes);
    // Phi-4-reasoning-plus: without a head's width, and with projections that are one.
    let phi = json!({
        "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_key_value_heads": 10,
        "vocab_size": 100_352, "head_dim": null,
    });
    check(phi, &[("a.qkv_proj", [7680, 5120]), ("a.gate_up_proj", [35840, 5120]), ("a.o_proj", [5120, 5120])]);
    // gemma-3-4b-it: a part of a larger model.
    let gemma = json!({ "vision_config": { "hidden_size": 1152 }, "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    } });
    check(gemma, &[("language_model.model.layers.0.self_attn.q_proj", [2048, 2560]), ("x.v_proj", [1024, 2560])]);
}

#[test]
fn biases_tell_the_rows_of_any_weight() {
    let none = Dimensions::default();
    assert_eq!(none.shape("blocks.0.ff.net.2", 60, Some(12)), Ok([12, 5]));
    let fault = DFloat11Fault::OtherShape { weights: 61, rows: Some(12), columns: None };
    assert_eq!(none.shape("blocks.0.ff.net.2", 61, Some(12)), Err(fault));
    assert_eq!(none.shape("blocks.0.ff.net.2", 60, None), Err(DFloat11Fault::NoShape { weights: 60 }));
    assert_eq!(none.shape("blocks.0.ff.net.2", 60, Some(0)), Err(DFloat11Fault::NoShape { weights: 60 }));
    // What a part of another width has in its layers is its own.
    let text = dimensions(json!({ "hidden_size": 4, "intermediate_size": 8 }));
    assert_eq!(text.shape("visual.blocks.0.mlp.gate_proj", 60, Some(20)), Ok([20, 3]));
    assert!(text.shape("visual.blocks.0.mlp.gate_proj", 60, None).is_err());
}

#[test]
fn odd_dimensions_are_no_more_than_an_error() {
    for config in [
        json!({}),
        json!({ "hidden_size": 0, "num_attention_heads": 0 }),
        json!({ "hidden_size": -3, "head_dim": "many" }),
        json!({ "hidden_size": u64::MAX, "num_attention_heads": u64::MAX, "head_dim": u64::MAX, "intermediate_size": u64::MAX }),
        json!({ "hidden_size": 1, "num_attention_heads": 7 }),
    ] {
        let dimensions = dimensions(config);
        for module in ["a.q_proj", "a.qkv_proj", "a.o_proj", "a.gate_up_proj", "a.down_proj", "lm_head", "q", ""] {
            for weights in [0, 1, 6, u64::MAX] {
                if let Ok(shape) = dimensions.shape(module, weights, None) {
                    assert_eq!(shape[0] * shape[1], weights);
                }
            }
        }
    }
}

#[test]
fn the_bytes_of_a_group_are_shared_out() {
    let weight = |name: &str| Weight { name: name.to_owned(), shape: [1, 1], bytes: 0 };
    let mut weights = [weight("a"), weight("b"), weight("c")];
    share(100, &[1, 0, 2], &mut weights);
    assert_eq!(weights.map(|weight| weight.bytes), [33, 0, 67]);
}
