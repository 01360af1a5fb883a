//! The forms in which an adapter's name is looked up: without prefixes, without wrappers, under another root.

use super::Component;
use super::aliases::pipeline_root;

/// A name to look up, with the models of a pipeline that it can be for.
pub(super) type Form = (Component, String);

/// The forms of one name.
#[derive(Debug, Default)]
pub(super) struct Forms {
    /// To look up among names with dots.
    pub(super) dotted: Vec<Form>,
    /// To look up among names with underscores in place of dots.
    pub(super) flat: Vec<Form>,
}

type Prefixes = &'static [(&'static str, Component)];

/// The prefixes of module names in adapters. Of two that match, the longer comes first.
const PREFIXES: Prefixes = &[
    ("base_model.model.", Component::ANY),
    ("diffusion_model.", Component::NETWORK),
    ("transformer.", Component::NETWORK),
    ("unet.", Component::NETWORK),
    ("text_encoder.", Component::TEXT_1),
    ("text_encoder_2.", Component::TEXT_2),
    ("text_encoder_3.", Component::TEXT_3),
    ("text_encoders.", Component::ANY),
    ("model.", Component::ANY),
];

/// The prefixes in names with underscores in place of dots.
const FLAT_PREFIXES: Prefixes = &[
    ("lora_unet_", Component::NETWORK),
    ("lora_te_", Component::TEXT_1),
    ("lora_te1_", Component::TEXT_1),
    ("lora_te2_", Component::TEXT_2),
    ("lora_te3_", Component::TEXT_3),
    ("lora_transformer_", Component::NETWORK),
    ("lycoris_", Component::ANY),
];

/// Prefixes that are rarer, or too short to be stripped before everything else was tried: the second network of Wan 2.2
/// (diffusers), DiffSynth's pipelines, Cosmos and what is trained on it, Stable Cascade (ComfyUI), Ideogram and LTX-2
/// (diffusers), HiDream's fourth text encoder (OneTrainer), OFT (sd-scripts).
const MORE_PREFIXES: Prefixes = &[
    ("transformer_2.", Component::NETWORK),
    ("conditional_transformer.", Component::NETWORK),
    ("connectors.", Component::NETWORK),
    ("pipe.dit.", Component::NETWORK),
    ("pipe.dit2.", Component::NETWORK),
    ("dit.", Component::NETWORK),
    ("net.", Component::NETWORK),
    ("text_encoder_4.", Component::TEXT),
    ("lora_unet_", Component::NETWORK),
    ("lora_te_", Component::TEXT_1),
    ("lora_te1_", Component::TEXT_1),
    ("lora_te2_", Component::TEXT_2),
    ("lora_te3_", Component::TEXT_3),
    ("lora_transformer_", Component::NETWORK),
    ("lycoris_", Component::ANY),
];

const MORE_FLAT_PREFIXES: Prefixes = &[
    ("lora_prior_unet_", Component::NETWORK),
    ("lora_prior_te_", Component::TEXT_1),
    ("lora_te4_", Component::TEXT),
    ("oft_unet_", Component::NETWORK),
    ("transformer_2_", Component::NETWORK),
    ("transformer_", Component::NETWORK),
    ("diffusion_model_", Component::NETWORK),
    ("model_diffusion_model_", Component::NETWORK),
    ("net_", Component::NETWORK),
];

/// The name parts that training programs insert for modules that they wrap, and what stays of them.
const INSERTED: &[(&str, &str)] = &[(".processor.", "."), (".base_layer", ""), (".modules_to_save", "")];

/// The parts of a name that stand for a wrapper around a module: of `torch.compile`, of data parallelism, of FSDP and of
/// activation checkpointing.
const WRAPPERS: &[&str] = &["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// The roots of one model inside others, and on its own: one program saves the same weights under several of them
/// (transformers, `_checkpoint_conversion_mapping`). Of two that fit, the longer comes first.
struct Roots {
    roots: &'static [&'static str],
    /// What has to follow the root; empty if anything may.
    parts: &'static [&'static str],
}

const ROOTS: &[Roots] = &[
    // The output layer of a language model.
    Roots {
        roots: &[
            "model.language_model.lm_head",
            "language_model.lm_head",
            "model.lm_head",
            "thinker.lm_head",
            "vlm.language_model.lm_head",
            "vlm.lm_head",
            "text_model.lm_head",
            "lm_head",
        ],
        parts: &[""],
    },
    Roots {
        roots: &[
            "vlm.model.vision_tower.vision_model.",
            "vlm.vision_tower.vision_model.",
            "model.vision_tower.vision_model.",
            "vision_tower.vision_model.",
            "vlm.model.vision_tower.",
            "vlm.vision_tower.",
            "model.vision_tower.",
            "vision_tower.",
            "model.vision_model.",
            "vision_model.",
        ],
        parts: &[],
    },
    Roots { roots: &["model.visual.", "thinker.visual.", "vlm.model.visual.", "vlm.visual.", "visual."], parts: &[] },
    Roots { roots: &["model.audio_tower.", "thinker.audio_tower.", "audio_tower."], parts: &[] },
    Roots {
        roots: &[
            "vlm.model.multi_modal_projector.",
            "vlm.multi_modal_projector.",
            "model.multi_modal_projector.",
            "multi_modal_projector.",
        ],
        parts: &[],
    },
    // The language model itself, of which the last root is none.
    Roots {
        roots: &[
            "model.language_model.model.",
            "model.language_model.",
            "language_model.model.",
            "language_model.",
            "vlm.model.language_model.",
            "vlm.language_model.model.",
            "vlm.model.",
            "model.text_model.",
            "text_model.model.",
            "text_model.",
            "thinker.model.",
            "talker.model.",
            "model.",
            "",
        ],
        parts: &["layers", "embed_tokens", "norm"],
    },
];

impl Forms {
    /// The name itself, with prefixes stripped, and without what wraps modules for training.
    pub(super) fn written(name: &str) -> Forms {
        let dotted = with_insertions(stripped(name, PREFIXES));
        let flat = if name.contains('.') { Vec::new() } else { with_insertions(stripped(name, FLAT_PREFIXES)) };
        Forms { dotted, flat }
    }

    /// Further forms, for a name that none of [`written`](Forms::written) finds: rarer prefixes, wrappers anywhere, and
    /// underscores for some of the dots or dots for some of the underscores (`convert_lora.py` of Musubi Tuner writes dots for
    /// underscores that it does not know).
    pub(super) fn respelled(name: &str) -> Forms {
        let bare = unwrapped(name);
        let names =
            [Some((Component::ANY, name)), bare.as_deref().map(|name| (Component::ANY, name)), pipeline_root(name)];
        let mut dotted = Vec::new();
        for (of, name) in names.into_iter().flatten() {
            let forms = with_insertions(stripped_of_all(name, &[MORE_PREFIXES, PREFIXES]));
            dotted.extend(forms.into_iter().map(|(component, name)| (component.and(of), name)));
        }
        let mut flat: Vec<Form> = Vec::new();
        for (component, name) in &dotted {
            let name = name.replace('.', "_");
            let bare = flat_unwrapped(&name);
            for name in [Some(name), bare].into_iter().flatten() {
                let forms = stripped_of_all(&name, &[MORE_FLAT_PREFIXES, FLAT_PREFIXES]);
                let forms = forms.into_iter().map(|(of, name)| (component.and(of), name));
                flat.extend(forms.filter(|form| form.0.0 != 0).collect::<Vec<_>>());
            }
        }
        for forms in [&mut dotted, &mut flat] {
            let mut seen = std::collections::HashSet::new();
            forms.retain(|form| seen.insert(form.clone()));
        }
        Forms { dotted, flat }
    }

    /// The forms with dots under the other roots of the same model.
    pub(super) fn dotted_under_other_roots(&self) -> impl Iterator<Item = Forms> {
        let forms = self.dotted.iter().flat_map(|form| other_roots(form, "."));
        forms.map(|form| Forms { dotted: vec![form], flat: Vec::new() })
    }

    /// The forms without dots under the other roots of the same model.
    pub(super) fn flat_under_other_roots(&self) -> impl Iterator<Item = Forms> {
        let forms = self.flat.iter().flat_map(|form| other_roots(form, "_"));
        forms.map(|form| Forms { dotted: Vec::new(), flat: vec![form] })
    }
}

/// `name` without the parts that stand for wrappers; `None` if it has none.
pub(super) fn unwrapped(name: &str) -> Option<String> {
    let is_wrapper = |part: &&str| WRAPPERS.contains(part);
    if !name.split('.').any(|part| is_wrapper(&part)) {
        return None;
    }
    let parts: Vec<&str> = name.split('.').filter(|part| !is_wrapper(part)).collect();
    (!parts.is_empty()).then(|| parts.join("."))
}

/// [`unwrapped`] for a name with underscores in place of dots. `module` is only taken for a wrapper at the beginning.
fn flat_unwrapped(name: &str) -> Option<String> {
    let mut bare = name.to_owned();
    for wrapper in WRAPPERS.iter().filter(|wrapper| wrapper.starts_with('_')) {
        bare = bare.replace(&format!("{wrapper}_"), "");
        if let Some(rest) = bare.strip_suffix(&format!("_{wrapper}")) {
            bare = rest.to_owned();
        }
    }
    if let Some(rest) = bare.strip_prefix("module_") {
        bare = rest.to_owned();
    }
    (bare != name && !bare.is_empty()).then_some(bare)
}

/// `name` itself, then with up to three prefixes stripped in turn, each with the models that the prefixes say it can be for.
fn stripped(name: &str, prefixes: &[(&str, Component)]) -> Vec<Form> {
    let mut found = vec![(Component::ANY, name.to_owned())];
    let (mut rest, mut component) = (name, Component::ANY);
    for _ in 0..3 {
        let stripped = prefixes.iter().find_map(|(prefix, of)| Some((rest.strip_prefix(prefix)?, *of)));
        let Some((stripped, of)) = stripped else { break };
        (rest, component) = (stripped, component.and(of));
        found.push((component, rest.to_owned()));
    }
    found
}

/// [`stripped`] with several lists of prefixes, up to five, and of the underscores that a prefix may leave.
fn stripped_of_all(name: &str, lists: &[Prefixes]) -> Vec<Form> {
    let mut found = vec![(Component::ANY, name.to_owned())];
    let (mut rest, mut component) = (name, Component::ANY);
    for _ in 0..5 {
        let mut prefixes = lists.iter().copied().flatten();
        let Some((stripped, of)) = prefixes.find_map(|(prefix, of)| Some((rest.strip_prefix(prefix)?, *of))) else {
            break;
        };
        (rest, component) = (stripped, component.and(of));
        found.push((component, rest.to_owned()));
        let trimmed = rest.trim_start_matches('_');
        if trimmed.len() < rest.len() {
            found.push((component, trimmed.to_owned()));
        }
    }
    found
}

/// The forms, then the same without what [`INSERTED`] lists.
fn with_insertions(mut found: Vec<Form>) -> Vec<Form> {
    for (inserted, without) in INSERTED {
        let longer = found.iter().filter(|(_, name)| name.contains(inserted));
        let shorter: Vec<_> = longer.map(|(component, name)| (*component, name.replace(inserted, without))).collect();
        found.extend(shorter);
    }
    found
}

/// A form under the other roots; `separator` stands where the names have dots.
fn other_roots((component, name): &Form, separator: &str) -> Vec<Form> {
    let spelled = |name: &str| name.replace('.', separator);
    let is = |rest: &str, part: &str| rest.strip_prefix(part).is_some_and(|r| r.is_empty() || r.starts_with(separator));
    let rest_of = |of: &Roots| {
        let root = of.roots.iter().copied().find(|root| name.starts_with(&spelled(root)))?;
        let rest = &name[root.len()..];
        let fits = of.parts.is_empty()
            || of.parts.iter().any(|part| if part.is_empty() { rest.is_empty() } else { is(rest, part) });
        fits.then_some((root, rest))
    };
    let Some((of, (root, rest))) = ROOTS.iter().find_map(|of| Some((of, rest_of(of)?))) else { return Vec::new() };
    let others = of.roots.iter().filter(|other| **other != root);
    others.map(|other| (*component, format!("{}{rest}", spelled(other)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(forms: &[Form]) -> Vec<&str> {
        forms.iter().map(|(_, name)| name.as_str()).collect()
    }

    #[test]
    fn the_name_as_it_is_comes_first() {
        let forms = Forms::written("base_model.model.transformer.a.processor.b");
        assert_eq!(
            names(&forms.dotted),
            [
                "base_model.model.transformer.a.processor.b",
                "transformer.a.processor.b",
                "a.processor.b",
                "base_model.model.transformer.a.b",
                "transformer.a.b",
                "a.b"
            ]
        );
        assert_eq!(forms.dotted[2].0, Component::NETWORK);
        assert!(forms.flat.is_empty());
        assert_eq!(names(&Forms::written("lora_te2_a_b").flat), ["lora_te2_a_b", "a_b"]);
    }

    #[test]
    fn wrappers_are_parts_of_a_name_and_not_pieces_of_one() {
        assert_eq!(unwrapped("module.a._orig_mod.b._fsdp_wrapped_module").as_deref(), Some("a.b"));
        for name in ["a.b", "modules.a", "a_orig_mod.b", "_orig_mod", "module"] {
            assert_eq!(unwrapped(name), None, "{name}");
        }
        assert_eq!(flat_unwrapped("_orig_mod_a_0__checkpoint_wrapped_module_b").as_deref(), Some("a_0_b"));
        assert_eq!(flat_unwrapped("a_b__orig_mod").as_deref(), Some("a_b"));
        assert_eq!(flat_unwrapped("module_a_b").as_deref(), Some("a_b"));
        assert_eq!(flat_unwrapped("a_module_b"), None);
    }

    #[test]
    fn dots_and_underscores_are_exchanged_last() {
        let has = |name, wanted: &str| {
            let forms = Forms::respelled(name);
            assert!(names(&forms.flat).contains(&wanted), "{forms:?}");
        };
        has("lora_unet_blocks_22.self_attn.q", "blocks_22_self_attn_q");
        has("lora_unet__blocks_0_q", "blocks_0_q");
        has("lora_unet__orig_mod_blocks_0_q", "blocks_0_q");
        has("diffusion_model.layers.0.attention.to.q", "layers_0_attention_to_q");
        assert!(names(&Forms::respelled("pipe.dit.module.a.b").dotted).contains(&"a.b"));
    }

    #[test]
    fn a_language_model_has_several_roots() {
        let under = |name: &str| -> Vec<String> {
            let forms = Forms::written(name);
            forms.dotted_under_other_roots().flat_map(|forms| forms.dotted).map(|(_, name)| name).collect()
        };
        for name in ["base_model.model.model.layers.0.q", "model.language_model.layers.0.q", "layers.0.q"] {
            assert!(under(name).contains(&"language_model.model.layers.0.q".to_owned()), "{name}");
        }
        assert!(under("language_model.lm_head").contains(&"lm_head".to_owned()));
        assert!(under("model.visual.blocks.0.q").iter().all(|name| name.contains("visual.")));
        assert!(under("model.encoder.layers.0.q").is_empty());
        let flat = Forms::written("lora_te1_model_layers_0_q");
        assert!(flat.flat_under_other_roots().any(|forms| names(&forms.flat) == ["model_language_model_layers_0_q"]));
    }
}
