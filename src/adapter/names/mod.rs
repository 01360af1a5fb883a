//! Names: finding the tensor of a checkpoint that an adapter's key is for.
//!
//! | a new | goes into |
//! |---|---|
//! | ending of a key (`X.lora_up.weight`) | [`keys`] |
//! | fused weight, or prefix of checkpoints | the tables of this file |
//! | prefix or wrapper of adapters, or root of one model inside another | [`forms`] |
//! | program's names for a family of models | a table in `families/` |
//! | order of rows | [`rows`] |

mod aliases;
mod families;
mod forms;
pub(super) mod keys;
pub(super) mod pattern;
pub(super) mod rows;

use std::cell::OnceCell;
use std::collections::HashMap;

use super::experts::Expert;
use crate::checkpoint::{Layout, TensorId, packed_modules};
use aliases::Aliases;
use forms::Forms;
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
    /// What it is of a mixture of experts, if the adapter's factors are given by expert or for all of them.
    pub(crate) expert: Option<Expert>,
    /// Whether the adapter's factors are for a parameter, under the name of the module that has it.
    pub(crate) of_parameter: bool,
}

impl<'a> Target<'a> {
    fn new(module: &'a str) -> Target<'a> {
        Target {
            module,
            weight: None,
            bias: None,
            projection: None,
            slice: None,
            order: RowOrder::Same,
            expert: None,
            of_parameter: false,
        }
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
    // What diffusers' `fuse_qkv_projections` fuses besides.
    (
        &["to_added_qkv"],
        &[&[("add_q_proj", Projection::Query), ("add_k_proj", Projection::Key), ("add_v_proj", Projection::Value)]],
    ),
    (&["to_kv"], &[&[("to_k", FIRST_HALF), ("to_v", SECOND_HALF)]]),
    (&["to_added_kv"], &[&[("add_k_proj", FIRST_HALF), ("add_v_proj", SECOND_HALF)]]),
];

const FIRST_HALF: Projection = Projection::Parts { first: 0, count: 1, of: 2 };
const SECOND_HALF: Projection = Projection::Parts { first: 1, count: 1, of: 2 };

/// The models of a pipeline that a name can be for, as a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Component(pub(crate) u8);

impl Component {
    pub(crate) const NETWORK: Component = Component(1);
    pub(crate) const TEXT_1: Component = Component(2);
    pub(crate) const TEXT_2: Component = Component(4);
    pub(crate) const TEXT_3: Component = Component(8);
    /// Any text encoder.
    pub(crate) const TEXT: Component = Component(14);
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
    "net.",
];

/// Indices into [`Targets::targets`] by name; several if a name matches several modules.
type Names = HashMap<String, Vec<usize>>;

/// The index of a checkpoint's names.
///
/// An exact name takes precedence. Then prefixes are stripped: the adapter's, then also the model's. Names without dots are
/// looked up among the model's names with *their* dots replaced by underscores, because it is unknown which of an adapter's
/// underscores were dots. Then come the names that other programs give the modules ([`Aliases`]), in either form. Only when
/// all of these find nothing is the name respelled ([`Forms::respelled`]), and at last put under another root.
pub(crate) struct Targets<'a> {
    layout: &'a Layout,
    targets: Vec<Target<'a>>,
    /// The number of targets that are the checkpoint's modules; the targets after these are projections of fused weights.
    modules: usize,
    exact: Names,
    /// Names without the model's prefix, and names of projections of fused weights.
    other: Names,
    /// Both with underscores in place of dots. Built when a name without dots is looked up.
    flat: OnceCell<[Names; 2]>,
    /// Built when a name is not found among the others.
    aliases: OnceCell<Aliases<'a>>,
}

impl<'a> Targets<'a> {
    pub(crate) fn new(layout: &'a Layout) -> Targets<'a> {
        let (exact, other, flat, aliases) = Default::default();
        let targets = modules(layout);
        let modules = targets.len();
        let mut index = Targets { layout, targets, modules, exact, other, flat, aliases };
        for place in 0..index.modules {
            let module = index.targets[place].module;
            add(&mut index.exact, module.to_owned(), place);
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
        let written = Forms::written(name);
        let found = self.find_form(&written);
        if found != Found::Nothing {
            return found;
        }
        let respelled = Forms::respelled(name);
        let found = self.find_form(&respelled);
        if found != Found::Nothing {
            return found;
        }
        let dotted = self.agreed(respelled.dotted_under_other_roots());
        if dotted != Found::Nothing { dotted } else { self.agreed(respelled.flat_under_other_roots()) }
    }

    /// The module that all forms find that find one; several, if they differ.
    fn agreed(&self, forms: impl Iterator<Item = Forms>) -> Found<'a> {
        forms.map(|forms| self.find_form(&forms)).fold(Found::Nothing, Found::or)
    }

    /// The module of the first form that there is.
    fn find_form(&self, forms: &Forms) -> Found<'a> {
        let dotted = [(&self.exact, &forms.dotted), (&self.other, &forms.dotted)];
        let flat =
            (!forms.flat.is_empty()).then(|| self.flat.get_or_init(|| [&self.exact, &self.other].map(flattened)));
        let flat = flat.into_iter().flatten().map(|names| (names, &forms.flat));
        for (names, forms) in dotted.into_iter().chain(flat) {
            if let Some(places) = forms.iter().find_map(|(_, name)| names.get(name)) {
                return match places[..] {
                    [place] => Found::One(vec![self.targets[place]]),
                    _ => Found::Several(places.iter().map(|&p| self.targets[p].module.to_owned()).collect()),
                };
            }
        }
        let aliases = self.aliases.get_or_init(|| Aliases::new(self.layout, &self.targets[..self.modules]));
        let dotted = forms.dotted.iter().map(|(component, name)| aliases.dotted(name, *component));
        let flat = forms.flat.iter().map(|(component, name)| aliases.flat(name, *component));
        dotted.chain(flat).find(|found| *found != Found::Nothing).unwrap_or(Found::Nothing)
    }

    /// Adds the other names of a module.
    fn add_other(&mut self, name: &str, place: usize) {
        if let Some(bare) = forms::unwrapped(name) {
            self.add_other(&bare, place);
        }
        for prefix in MODEL_PREFIXES {
            if let Some(rest) = name.strip_prefix(prefix) {
                add(&mut self.other, rest.to_owned(), place);
            }
        }
        if name != self.targets[place].module {
            add(&mut self.other, name.to_owned(), place);
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

impl Found<'_> {
    /// What either is; several, if they differ.
    fn or(self, other: Self) -> Self {
        let names = |found: &Self| match found {
            Found::Nothing => Vec::new(),
            Found::One(targets) => targets.iter().map(|target| target.module.to_owned()).collect(),
            Found::Several(names) => names.clone(),
        };
        match (&self, &other) {
            (_, Found::Nothing) => self,
            (Found::Nothing, _) => other,
            _ if self == other => self,
            _ => {
                let mut both = names(&self);
                both.extend(names(&other));
                both.sort();
                both.dedup();
                Found::Several(both)
            }
        }
    }
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

/// The same index by names with underscores in place of dots.
fn flattened(names: &Names) -> Names {
    let mut flat = Names::with_capacity(names.len());
    for (name, places) in names {
        places.iter().for_each(|&place| add(&mut flat, name.replace('.', "_"), place));
    }
    flat.values_mut().for_each(|places| places.sort_unstable());
    flat
}

fn add(names: &mut Names, name: String, place: usize) {
    let places = names.entry(name).or_default();
    if !places.contains(&place) {
        places.push(place);
    }
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

    /// Names of what roots, prefixes and wrappers are made of.
    const PARTS: &str = "(model|language_model|text_model|lm_head|visual|module|_orig_mod|net|dit|transformer|lora_unet|lora_te|text_encoders|layers|norm|a|é|0|q|to_qkv|to_out)([._](model|language_model|module|_orig_mod|transformer|layers|norm|a|0|q|k|to_q|qkv|to_out|weight|bias)){0,5}";

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
        // Some trainers also write dots for underscores; an exact name still goes first.
        assert_eq!(found(&model, "blocks.0.attn.q").as_deref(), Some("blocks.0.attn_q"));
        assert_eq!(found(&model, "blocks.0.attn.v"), None);
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

        #[test]
        fn an_own_name_is_found_as_itself(
            names in proptest::collection::btree_set(PARTS, 1..8),
            wanted in PARTS,
        ) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let layout = layout(&names);
            let targets = Targets::new(&layout);
            for &target in &targets.targets[..targets.modules] {
                prop_assert_eq!(targets.find(target.module), Found::One(vec![target]));
            }
            targets.find(&wanted);
        }
    }
}
