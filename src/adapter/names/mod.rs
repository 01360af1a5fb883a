//! Names: finding the tensor of a checkpoint that an adapter's key is for.
//!
//! | a new | goes into |
//! |---|---|
//! | ending of a key (`X.lora_up.weight`) | [`keys`] |
//! | prefix, wrapper or fused weight | the tables of this file |
//! | program's names for a family of models | a table in `families/` |
//! | order of rows | [`rows`] |

mod aliases;
mod families;
pub(super) mod keys;
pub(super) mod pattern;
pub(super) mod rows;

use std::cell::OnceCell;
use std::collections::HashMap;

use crate::checkpoint::{Layout, TensorId, packed_modules};
use aliases::Aliases;
use rows::{Projection, RowOrder, RowSlice};

/// The target of an adapter's module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target<'a> {
    /// The module's name in the checkpoint.
    pub(crate) module: &'a str,
    /// Its weight.
    pub(crate) weight: Option<TensorId>,
    /// Its bias.
    pub(crate) bias: Option<TensorId>,
    /// The projection to patch, if the checkpoint fuses several projections in one weight.
    pub(crate) projection: Option<Projection>,
    /// The rows of the adapter's change, if one change is for several of the checkpoint's weights.
    pub(crate) slice: Option<RowSlice>,
    /// The checkpoint's order of the rows.
    pub(crate) order: RowOrder,
}

impl<'a> Target<'a> {
    fn new(module: &'a str) -> Target<'a> {
        Target { module, weight: None, bias: None, projection: None, slice: None, order: RowOrder::Same }
    }
}

/// The names of unfused projections.
type Projections = &'static [(&'static str, Projection)];

/// The names of fused weights, with the names of their unfused projections.
const FUSED: &[(&[&str], &[Projections])] = &[
    (
        &["qkv", "to_qkv", "qkv_proj", "Wqkv", "attn_qkv"],
        &[
            &[("q", Projection::Query), ("k", Projection::Key), ("v", Projection::Value)],
            &[("to_q", Projection::Query), ("to_k", Projection::Key), ("to_v", Projection::Value)],
            &[("q_proj", Projection::Query), ("k_proj", Projection::Key), ("v_proj", Projection::Value)],
            &[("attn_q", Projection::Query), ("attn_k", Projection::Key), ("attn_v", Projection::Value)],
        ],
    ),
    (&["gate_up_proj"], &[&[("gate_proj", Projection::Gate), ("up_proj", Projection::Up)]]),
];

/// The prefixes of module names in adapters. Of two that match, the longer comes first.
const ADAPTER_PREFIXES: &[(&str, Component)] = &[
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
const FLAT_PREFIXES: &[(&str, Component)] = &[
    ("lora_unet_", Component::NETWORK),
    ("lora_te_", Component::TEXT_1),
    ("lora_te1_", Component::TEXT_1),
    ("lora_te2_", Component::TEXT_2),
    ("lora_te3_", Component::TEXT_3),
    ("lora_transformer_", Component::NETWORK),
    ("lycoris_", Component::ANY),
];

/// The models of a pipeline that a name can be for, as a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Component(pub(crate) u8);

impl Component {
    pub(crate) const NETWORK: Component = Component(1);
    pub(crate) const TEXT_1: Component = Component(2);
    pub(crate) const TEXT_2: Component = Component(4);
    pub(crate) const TEXT_3: Component = Component(8);
    pub(crate) const ANY: Component = Component(15);

    pub(crate) fn and(self, other: Component) -> Component {
        Component(self.0 & other.0)
    }
}

/// The prefixes that checkpoints give all names of a model.
const MODEL_PREFIXES: &[&str] = &[
    "model.diffusion_model.",
    "diffusion_model.",
    "model.",
    "transformer.",
    "unet.",
    "text_encoders.",
    "text_encoder.",
];

/// The name parts that training programs insert for modules that they wrap.
const WRAPPERS: &[(&str, &str)] = &[(".processor.", "."), (".base_layer", ""), (".modules_to_save", "")];

/// Indices into [`Targets::targets`] by name; several if a name matches several modules.
type Names = HashMap<String, Vec<usize>>;

/// The index of a checkpoint's names.
///
/// An exact name takes precedence. Then prefixes are stripped: the adapter's, then also the model's. Names without dots are
/// looked up among the model's names with *their* dots replaced by underscores, because it is unknown which of an adapter's
/// underscores were dots. Last come the names that other programs give the modules ([`Aliases`]), in either form.
pub(crate) struct Targets<'a> {
    layout: &'a Layout,
    targets: Vec<Target<'a>>,
    /// The number of targets that are the checkpoint's modules; the targets after these are projections of fused weights.
    modules: usize,
    exact: Names,
    /// Names without the model's prefix, and names of projections of fused weights.
    other: Names,
    flat: Names,
    flat_other: Names,
    /// Built when a name is not found among the others.
    aliases: OnceCell<Aliases<'a>>,
}

impl<'a> Targets<'a> {
    pub(crate) fn new(layout: &'a Layout) -> Targets<'a> {
        let (exact, other, flat, flat_other, aliases) = Default::default();
        let targets = modules(layout);
        let modules = targets.len();
        let mut index = Targets { layout, targets, modules, exact, other, flat, flat_other, aliases };
        for place in 0..index.modules {
            let module = index.targets[place].module;
            add(&mut index.exact, module.to_owned(), place);
            add(&mut index.flat, module.replace('.', "_"), place);
        }
        for place in 0..index.modules {
            let module = index.targets[place].module;
            index.add_other(module, place);
            if let Some(outer) = module.strip_suffix(".to_out.0") {
                index.add_other(&format!("{outer}.to_out"), place);
            }
            index.add_projections(place);
        }
        index
    }

    /// The module that an adapter calls `name`: none, one (or the several that hold its parts), or several that match equally
    /// well.
    pub(crate) fn find(&self, name: &str) -> Found<'a> {
        let dotted = candidates(name, ADAPTER_PREFIXES);
        let underscored = if name.contains('.') { Vec::new() } else { candidates(name, FLAT_PREFIXES) };
        let tiers = [
            (&self.exact, &dotted),
            (&self.other, &dotted),
            (&self.flat, &underscored),
            (&self.flat_other, &underscored),
        ];
        for (names, candidates) in tiers {
            if let Some(places) = candidates.iter().find_map(|(_, candidate)| names.get(candidate)) {
                return match places[..] {
                    [place] => Found::One(vec![self.targets[place]]),
                    _ => Found::Several(places.iter().map(|&p| self.targets[p].module.to_owned()).collect()),
                };
            }
        }
        let aliases = self.aliases.get_or_init(|| Aliases::new(self.layout, &self.targets[..self.modules]));
        let dotted = dotted.iter().map(|(component, name)| aliases.dotted(name, *component));
        let underscored = underscored.iter().map(|(component, name)| aliases.flat(name, *component));
        dotted.chain(underscored).find(|found| *found != Found::Nothing).unwrap_or(Found::Nothing)
    }

    /// Adds the other names of a module.
    fn add_other(&mut self, name: &str, place: usize) {
        for prefix in MODEL_PREFIXES {
            if let Some(rest) = name.strip_prefix(prefix) {
                add(&mut self.other, rest.to_owned(), place);
                add(&mut self.flat_other, rest.replace('.', "_"), place);
            }
        }
        if name != self.targets[place].module {
            add(&mut self.other, name.to_owned(), place);
            add(&mut self.flat_other, name.replace('.', "_"), place);
        }
    }

    /// Adds the projections of a fused weight, unless the checkpoint has modules of those names.
    fn add_projections(&mut self, place: usize) {
        let target = self.targets[place];
        let (outer, own) = target.module.rsplit_once('.').unwrap_or(("", target.module));
        for (_, projections) in FUSED.iter().filter(|(fused, _)| fused.contains(&own)) {
            for &(suffix, projection) in projections.iter().copied().flatten() {
                let name = if outer.is_empty() { suffix.to_owned() } else { format!("{outer}.{suffix}") };
                if !self.exact.contains_key(&name) {
                    self.targets.push(Target { projection: Some(projection), ..target });
                    self.add_other(&name, self.targets.len() - 1);
                }
            }
        }
    }

    /// The names of the checkpoint's modules, for messages.
    pub(crate) fn sample(&self) -> Vec<String> {
        self.targets[..self.modules].iter().take(8).map(|t| t.module.to_owned()).collect()
    }
}

/// The outcome of [`Targets::find`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found<'a> {
    Nothing,
    One(Vec<Target<'a>>),
    Several(Vec<String>),
}

/// The modules with a weight, packed or not, or a bias, and every other tensor as a separate module.
fn modules(layout: &Layout) -> Vec<Target<'_>> {
    let mut targets: Vec<Target<'_>> = Vec::new();
    let (mut place_of, packed) = (HashMap::new(), packed_modules(layout));
    for (id, tensor) in layout.tensor_ids().zip(layout.tensors()) {
        let (module, is_bias) = match tensor.name.rsplit_once('.') {
            _ if packed.contains_key(&id) => (packed[&id], false),
            Some((module, "weight")) => (module, false),
            Some((module, "bias")) => (module, true),
            _ => (tensor.name.as_str(), false),
        };
        let place = *place_of.entry(module).or_insert_with(|| {
            let order = if is_transposed(&tensor.name) { RowOrder::Transposed } else { RowOrder::Same };
            targets.push(Target { order, ..Target::new(module) });
            targets.len() - 1
        });
        let slot = if is_bias { &mut targets[place].bias } else { &mut targets[place].weight };
        if packed.contains_key(&id) {
            *slot = Some(id);
        }
        slot.get_or_insert(id);
    }
    targets
}

/// Whether a tensor is stored transposed. OpenCLIP stores its text projection as a matrix, inputs by outputs; others store a
/// linear module's weight.
fn is_transposed(tensor: &str) -> bool {
    tensor.rsplit('.').next() == Some("text_projection")
}

fn add(names: &mut Names, name: String, place: usize) {
    let places = names.entry(name).or_default();
    if !places.contains(&place) {
        places.push(place);
    }
}

/// `name` itself, then with up to three prefixes stripped in turn, then the same without wrappers; each with the
/// models that the prefixes say it can be for.
fn candidates(name: &str, prefixes: &[(&str, Component)]) -> Vec<(Component, String)> {
    let mut found = vec![(Component::ANY, name.to_owned())];
    let (mut rest, mut component) = (name, Component::ANY);
    for _ in 0..3 {
        let stripped = prefixes.iter().find_map(|(prefix, of)| Some((rest.strip_prefix(prefix)?, *of)));
        let Some((stripped, of)) = stripped else { break };
        (rest, component) = (stripped, component.and(of));
        found.push((component, rest.to_owned()));
    }
    for (wrapper, without) in WRAPPERS {
        let wrapped = found.iter().filter(|(_, name)| name.contains(wrapper));
        let unwrapped: Vec<_> = wrapped.map(|(component, name)| (*component, name.replace(wrapper, without))).collect();
        found.extend(unwrapped);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::dtype::DType;
    use proptest::prelude::*;

    fn layout(names: &[&str]) -> Layout {
        Layout::new(names.iter().map(|n| TensorInfo::new(*n, DType::F32, &[6, 2], 0, 0).unwrap()).collect())
    }

    fn found(layout: &Layout, name: &str) -> Option<String> {
        match Targets::new(layout).find(name) {
            Found::One(targets) => Some(targets[0].module.to_owned()),
            _ => None,
        }
    }

    #[test]
    fn the_exact_name_goes_before_any_stripping() {
        let both = layout(&["model.layers.0.q.weight", "layers.0.q.weight"]);
        assert_eq!(found(&both, "model.layers.0.q").as_deref(), Some("model.layers.0.q"));
        assert_eq!(found(&both, "layers.0.q").as_deref(), Some("layers.0.q"));
        assert_eq!(found(&both, "base_model.model.model.layers.0.q").as_deref(), Some("model.layers.0.q"));
        let whole = layout(&["model.diffusion_model.blocks.0.attn_q.weight"]);
        for name in ["diffusion_model.blocks.0.attn_q", "lora_unet_blocks_0_attn_q", "transformer.blocks.0.attn_q"] {
            assert_eq!(found(&whole, name).as_deref(), Some("model.diffusion_model.blocks.0.attn_q"), "{name}");
        }
    }

    #[test]
    fn underscores_are_resolved_by_the_models_names() {
        let model = layout(&["blocks.0.attn_q.weight", "blocks.0.attn.k.weight", "a_b.c.weight", "a.b_c.weight"]);
        assert_eq!(found(&model, "lora_unet_blocks_0_attn_q").as_deref(), Some("blocks.0.attn_q"));
        assert_eq!(found(&model, "lycoris_blocks_0_attn_k").as_deref(), Some("blocks.0.attn.k"));
        assert_eq!(
            Targets::new(&model).find("lora_unet_a_b_c"),
            Found::Several(vec!["a_b.c".to_owned(), "a.b_c".to_owned()])
        );
        assert_eq!(found(&model, "blocks.0.attn.q"), None);
    }

    #[test]
    fn projections_are_rows_of_a_fused_weight() {
        let model = layout(&["blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight", "blocks.1.attn.q.weight"]);
        let Found::One(keys) = Targets::new(&model).find("lora_unet_blocks_0_attn_to_k") else { panic!("no target") };
        assert_eq!((keys[0].module, keys[0].projection), ("blocks.0.attn.qkv", Some(Projection::Key)));
        assert_eq!(found(&model, "diffusion_model.blocks.1.attn.q").as_deref(), Some("blocks.1.attn.q"));
    }

    #[test]
    fn wrappers_inside_names_are_looked_through() {
        let model = layout(&["unet_block.attn1.to_q.weight", "unet_block.attn1.to_out.0.weight", "q.bias"]);
        assert_eq!(found(&model, "unet.unet_block.attn1.processor.to_q").as_deref(), Some("unet_block.attn1.to_q"));
        assert_eq!(found(&model, "unet_block.attn1.processor.to_out").as_deref(), Some("unet_block.attn1.to_out.0"));
        assert_eq!(found(&model, "base_model.model.q.base_layer").as_deref(), Some("q"));
    }

    proptest! {
        #[test]
        fn finding_never_panics(names in proptest::collection::vec("[a-c._]{0,12}", 0..6), wanted in "[a-c._]{0,14}") {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            Targets::new(&layout(&names)).find(&wanted);
        }
    }
}
