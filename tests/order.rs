//! The order of execution of known networks (`tests/data/order.txt`), and of others.

use proptest::prelude::*;
use tensor_offload::DType;
use tensor_offload::checkpoint::{Layout, OrderSource, TensorInfo};

/// A network of the list: the families that are to be found, and its tensors in order of execution.
struct Case {
    families: Vec<String>,
    tensors: Vec<String>,
}

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for line in include_str!("data/order.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(families) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            let families = families.split("; ").map(str::to_owned).collect();
            cases.push(Case { families, tensors: Vec::new() });
        } else {
            cases.last_mut().unwrap().tensors.extend(expanded(line));
        }
    }
    cases
}

/// The names that a line stands for.
fn expanded(line: &str) -> Vec<String> {
    let Some((before, (range, after))) =
        line.split_once('{').map(|(before, rest)| (before, rest.split_once('}').unwrap()))
    else {
        return vec![line.to_owned()];
    };
    let (first, last) = range.split_once("..").unwrap();
    let (first, last): (u32, u32) = (first.parse().unwrap(), last.parse().unwrap());
    let numbers: Vec<u32> = if first <= last { (first..=last).collect() } else { (last..=first).rev().collect() };
    numbers.into_iter().map(|number| format!("{before}{number}{after}")).collect()
}

fn layout<'n>(names: impl IntoIterator<Item = &'n str>) -> Layout {
    let tensor = |(at, name): (u64, &str)| TensorInfo::new(name, DType::F32, &[4], 0, 16 * at).unwrap();
    Layout::new((0..).zip(names).map(tensor).collect())
}

fn layers(layout: &Layout) -> Vec<&str> {
    layout.layers().iter().map(|layer| layer.name.as_str()).collect()
}

fn families(layout: &Layout) -> Vec<&str> {
    match layout.order() {
        OrderSource::FamilyTable { families, .. } => families.clone(),
        _ => Vec::new(),
    }
}

/// The layers of a case's tensors, in order of execution.
fn wanted<'l>(layout: &'l Layout, tensors: &[String]) -> Vec<&'l str> {
    let layer = |name: &String| {
        let module = layout.module_of(layout.find(name).unwrap()).unwrap();
        layout.layer(layout.module(module).unwrap().layer).unwrap().name.as_str()
    };
    let mut layers: Vec<&str> = tensors.iter().map(layer).collect();
    layers.dedup();
    layers
}

#[test]
fn known_networks_run_in_the_order_of_their_code_whatever_the_order_of_the_file() {
    for case in cases() {
        let mut names: Vec<&str> = case.tensors.iter().map(String::as_str).collect();
        for turn in 0..4 {
            match turn {
                0 => names.sort_unstable(),
                1 => names.reverse(),
                2 => names.sort_by_key(|name| name.len()),
                _ => {}
            }
            let layout = layout(names.iter().copied());
            assert_eq!(layers(&layout), wanted(&layout, &case.tensors), "{:?}, turn {turn}", case.families);
            assert_eq!(families(&layout), case.families, "turn {turn}");
        }
    }
}

#[test]
fn what_stands_before_the_names_does_not_matter() {
    for prefix in ["model.diffusion_model.", "module._orig_mod.", "a.b2.layers.c.", "transformer.", "x_embedder."] {
        // The parts of a whole pipeline are told by what stands before.
        for case in cases().iter().filter(|case| case.families.len() < 3) {
            // Parameters of the network itself are one module, of the network's name.
            let named = case.tensors.iter().filter(|name| name.contains('.'));
            let named: Vec<String> = named.map(|name| format!("{prefix}{name}")).collect();
            let mut sorted: Vec<&str> = named.iter().map(String::as_str).collect();
            sorted.sort_unstable();
            let layout = layout(sorted);
            assert_eq!(layers(&layout), wanted(&layout, &named), "{prefix} {:?}", case.families);
            assert_eq!(families(&layout), case.families, "{prefix}");
        }
    }
    let own =
        layout(["net.aa_in.weight", "net.joint_blocks.0.w.weight", "net.pos_embed", "net.context_embedder.weight"]);
    assert_eq!(layers(&own), ["net", "net.aa_in", "net.context_embedder", "net.joint_blocks.0"]);
    let wrapped = layout([
        "single_transformer_blocks.0._orig_mod.attn.to_q.weight",
        "transformer_blocks.1._orig_mod.attn.to_q.weight",
        "transformer_blocks._orig_mod.0.attn.to_q.weight",
        "_orig_mod.x_embedder._fsdp_wrapped_module.weight",
    ]);
    assert!(!families(&wrapped).is_empty());
    assert_eq!(
        layers(&wrapped)[1..],
        ["transformer_blocks._orig_mod.0", "transformer_blocks.1", "single_transformer_blocks.0"]
    );
}

#[test]
fn layers_that_a_table_has_no_line_for_are_placed_by_their_words() {
    let flux = layout([
        "a.head.weight",
        "transformer_blocks.0.w.weight",
        "new_stack.10.w.weight",
        "new_stack.2.w.weight",
        "aa_in.weight",
        "single_transformer_blocks.0.w.weight",
        "proj_out.weight",
        "x_embedder.weight",
        "new_norm.weight",
        "self_parameter",
    ]);
    let wanted = [
        "aa_in",
        "self_parameter",
        "x_embedder",
        "transformer_blocks.0",
        "single_transformer_blocks.0",
        "new_stack.2",
        "new_stack.10",
        "new_norm",
        "proj_out",
        "a.head",
    ];
    assert_eq!(layers(&flux), wanted);
}

#[test]
fn other_networks_keep_the_order_of_their_names_and_files() {
    let sources = |names: &[&str]| layout(names.iter().copied()).order().clone();
    let blocks = ["embed.weight", "blocks.1.w.weight", "blocks.0.w.weight", "norm.weight", "head.weight"];
    assert_eq!(sources(&blocks), OrderSource::NamesRule);
    assert_eq!(layers(&layout(blocks)), ["embed", "blocks.0", "blocks.1", "norm", "head"]);
    // Of two stacks, or two inputs, the file tells which is first.
    let stacks = ["second.0.w.weight", "first.0.w.weight"];
    assert_eq!(sources(&stacks), OrderSource::FileOrder);
    assert_eq!(layers(&layout(stacks)), ["second.0", "first.0"]);
    assert_eq!(sources(&["b_in.weight", "a_in.weight", "blocks.0.w.weight"]), OrderSource::FileOrder);
    assert_eq!(sources(&["blocks.1.w.weight", "blocks.01.w.weight"]), OrderSource::FileOrder);
    assert_eq!(sources(&[]), OrderSource::NamesRule);
    let given = layout(stacks).in_order(&["first.0"]).unwrap();
    assert_eq!((given.order(), layers(&given)), (&OrderSource::Given, vec!["first.0", "second.0"]));
}

#[test]
fn the_source_of_an_order_is_told_in_words_and_in_json() {
    let flux = layout(["single_blocks.0.w.weight", "double_blocks.0.w.weight"]);
    assert_eq!(flux.order().to_string(), "family table (Flux and Chroma, original names)");
    let json = serde_json::to_value(flux.order()).unwrap();
    assert_eq!(json, serde_json::json!({ "source": "family_table", "families": ["Flux and Chroma, original names"] }));
    let words = |names: &[&str]| layout(names.iter().copied()).order().to_string();
    assert_eq!(words(&["blocks.0.w.weight"]), "names rule");
    assert_eq!(words(&["a.0.w.weight", "b.0.w.weight"]), "file order");
    let given = flux.in_order(&[]).unwrap();
    assert_eq!(
        (given.order().to_string(), serde_json::to_value(given.order()).unwrap()["source"].as_str()),
        ("given".into(), Some("given"))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_permutation_of_a_known_checkpoint_has_one_order(
        (case, shuffled) in (0..cases().len()).prop_flat_map(|case| (Just(case), Just(cases()[case].tensors.clone()).prop_shuffle())),
    ) {
        let layout = layout(shuffled.iter().map(String::as_str));
        prop_assert_eq!(layers(&layout), wanted(&layout, &cases()[case].tensors));
    }

    #[test]
    fn any_names_have_each_layer_once_and_one_order_where_a_table_knows_them(
        names in proptest::collection::btree_set(
            "(model\\.|vae\\.)?(x_embedder|transformer_blocks\\.[0-3]|single_transformer_blocks\\.[0-3]|decoder\\.up\\.[0-3]|decoder\\.conv_in|layers\\.[0-9]{1,2}|embed_tokens|[a-c]{1,2}(\\.[0-2])?)(\\.[a-b])?\\.weight", 1..30),
        seed in any::<u64>(),
    ) {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut other = names.clone();
        other.sort_by_key(|name| name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into())));
        let (one, two) = (layout(names), layout(other));
        prop_assert_eq!(one.order(), two.order());
        if !families(&one).is_empty() {
            prop_assert_eq!(layers(&one), layers(&two));
        }
        let (mut sorted, count) = (layers(&one), one.layers().len());
        sorted.sort_unstable();
        sorted.dedup();
        prop_assert_eq!(sorted.len(), count);
        prop_assert!(one.layers().iter().all(|layer| !layer.modules.is_empty()));
    }
}
