//! The order of execution of layers whose networks the [tables](super::families) know.
//!
//! A checkpoint may have several networks, each with something before its names: `model.diffusion_model.`,
//! `text_encoders.t5xxl.transformer.`. A family is found by the names that it needs, whatever comes before them. If several
//! families fit, the one that has lines for the most layers is taken.
//!
//! The order depends on the set of names alone. Layers of a known network that have no line stand where their words put them:
//! embeddings and other inputs at the network's beginning, stacks and norms after its stacks, heads at the end; of equals, by name.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use serde::Serialize;

use super::families::{Family, Need, Run, Spot, Stem, families, families_with, stages};
use super::names::{Rank, natural, numbered_prefix};

/// Where the order of a layout's layers comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "source", rename_all = "snake_case")]
#[non_exhaustive]
pub enum OrderSource {
    /// From a table of known networks, whatever the order of the files.
    #[non_exhaustive]
    FamilyTable {
        /// The networks that were found, in order of execution.
        families: Vec<&'static str>,
    },
    /// From words and numbers in the names, which leave nothing open.
    NamesRule,
    /// From words and numbers in the names; where these leave it open, from the order of the files.
    #[default]
    FileOrder,
    /// From [`Layout::in_order`](super::Layout::in_order).
    Given,
}

impl fmt::Display for OrderSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OrderSource::FamilyTable { families } => write!(f, "family table ({})", families.join("; ")),
            OrderSource::NamesRule => f.write_str("names rule"),
            OrderSource::FileOrder => f.write_str("file order"),
            OrderSource::Given => f.write_str("given"),
        }
    }
}

/// The order of layers, as the tables have it.
pub(super) struct Order {
    /// The layers' indices in order of execution.
    pub(super) layers: Vec<usize>,
    /// The families that were found, in order of execution.
    pub(super) families: Vec<&'static str>,
}

/// The order of layers of these names, which have `modules`; `None` if no table knows any of their networks.
pub(super) fn order<'m>(names: &[&str], modules: impl Iterator<Item = &'m str>) -> Option<Order> {
    let clean: Vec<Cow<'_, str>> = names.iter().map(|name| unwrapped(name)).collect();
    let mut groups: Groups<'_> = BTreeMap::new();
    for (layer, name) in clean.iter().enumerate() {
        let (text, numbered, number) = match numbered_prefix(name) {
            Some((text, number, _)) => (text, true, number),
            None => (&**name, false, 0),
        };
        groups.entry(Stem { text, numbered }).or_default().push((layer, number));
    }
    let components = select(&groups, &Modules::new(modules));
    if components.is_empty() {
        return None;
    }
    let mut placed = place(&groups, &components);
    placed.sort_unstable_by(|(a, x), (b, y)| {
        let named = || natural(&clean[*x], &clean[*y]).then_with(|| names[*x].cmp(names[*y]));
        a.cmp(b).then_with(named)
    });
    let families = components.iter().map(|component| component.family.name).collect();
    Some(Order { layers: placed.into_iter().map(|(_, layer)| layer).collect(), families })
}

/// For each stem, its layers and their numbers.
type Groups<'n> = BTreeMap<Stem<'n>, Layers>;

/// The layers of a stem: their indices and numbers.
type Layers = Vec<(usize, u64)>;

/// The names of modules, sorted when they are asked for.
struct Modules<'m, I> {
    names: Cell<Option<I>>,
    sorted: OnceCell<Vec<Cow<'m, str>>>,
}

impl<'m, I: Iterator<Item = &'m str>> Modules<'m, I> {
    fn new(names: I) -> Modules<'m, I> {
        Modules { names: Cell::new(Some(names)), sorted: OnceCell::new() }
    }

    /// Whether there is a module of this name or one under it.
    fn has(&self, name: &str) -> bool {
        let sorted = self.sorted.get_or_init(|| {
            let mut names: Vec<_> = self.names.take().into_iter().flatten().map(unwrapped).collect();
            names.sort_unstable();
            names
        });
        let below = format!("{name}.");
        let next = sorted.partition_point(|other| **other < *below);
        sorted.get(next).is_some_and(|other| other.starts_with(&below))
            || sorted.binary_search_by(|other| (**other).cmp(name)).is_ok()
    }
}

/// A network of a checkpoint.
#[derive(Debug)]
struct Component<'n> {
    family: &'static Family,
    /// What comes before the family's names.
    prefix: &'n str,
    /// The stems that have a line in the family's table, sorted.
    spots: Vec<(Stem<'n>, Spot)>,
    /// The number of their layers.
    layers: usize,
}

/// A layer's place in the order of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// The stage, the part of a pipeline, and the network.
    network: (usize, usize, usize),
    /// Two for each turn of the table: odd numbers are turns, even ones what comes before them.
    turn: usize,
    number: u64,
    within: usize,
}

/// Words in names that wrappers of a module add.
const WRAPPERS: [&str; 4] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"];

fn unwrapped(name: &str) -> Cow<'_, str> {
    let is_wrapper = |part: &str| WRAPPERS.contains(&part);
    match name.split('.').any(is_wrapper) {
        false => Cow::Borrowed(name),
        true => Cow::Owned(name.split('.').filter(|part| !is_wrapper(part)).collect::<Vec<_>>().join(".")),
    }
}

/// A stem of a network, without what comes before the network's names.
fn within<'n>(stem: Stem<'n>, prefix: &str) -> Stem<'n> {
    Stem { text: &stem.text[prefix.len()..], numbered: stem.numbered }
}

/// Where the beginnings of a name end, longest first, before each of its last parts.
fn cuts(text: &str) -> impl Iterator<Item = usize> {
    // No table needs a longer name.
    const MOST_PARTS: usize = 8;
    text.rmatch_indices('.').map(|(dot, _)| dot + 1).chain([0]).take(MOST_PARTS)
}

/// The networks, in order of execution.
fn select<'n, 'm, I: Iterator<Item = &'m str>>(groups: &Groups<'n>, modules: &Modules<'m, I>) -> Vec<Component<'n>> {
    let mut candidates = candidates(groups);
    candidates.retain(|c| c.family.with.is_none_or(|module| modules.has(&format!("{}{module}", c.prefix))));
    // The sort is stable: of equals, the family that comes first in the tables.
    candidates.sort_by_key(|component| Reverse(component.layers));
    let (mut taken, mut chosen) = (HashSet::new(), Vec::new());
    for mut component in candidates {
        component.spots.retain(|(stem, _)| !taken.contains(stem));
        if component.has_needs() {
            taken.extend(component.spots.iter().map(|(stem, _)| *stem));
            chosen.push(component);
        }
    }
    let order = StageOrder::of(&chosen);
    chosen.sort_by(|a, b| {
        let key = |c: &Component<'_>| (order.of_stage(c.family.stage), part(c.prefix));
        key(a).cmp(&key(b)).then_with(|| natural(a.prefix, b.prefix)).then_with(|| a.family.turns.cmp(&b.family.turns))
    });
    chosen
}

/// Every family that fits, at every place where it fits.
fn candidates<'n>(groups: &Groups<'n>) -> Vec<Component<'n>> {
    let mut found = BTreeSet::new();
    for stem in groups.keys() {
        for cut in cuts(stem.text) {
            let anchor = Stem { text: &stem.text[cut..], numbered: stem.numbered };
            found.extend(families_with(anchor).iter().map(|&family| (family, &stem.text[..cut])));
        }
    }
    let component = |(family, prefix): (usize, &'n str)| {
        let family = &families()[family];
        let spot =
            |(stem, layers): (&Stem<'n>, &Layers)| Some((*stem, family.spot(within(*stem, prefix))?, layers.len()));
        let first = Stem { text: prefix, numbered: false };
        let inside = groups.range(first..).take_while(|(stem, _)| stem.text.starts_with(prefix)).filter_map(spot);
        let (mut spots, mut layers) = (Vec::new(), 0);
        for (stem, spot, count) in inside {
            spots.push((stem, spot));
            layers += count;
        }
        Component { family, prefix, spots, layers }
    };
    found.into_iter().map(component).filter(Component::has_needs).collect()
}

impl Component<'_> {
    /// Whether it has everything that the family must have.
    fn has_needs(&self) -> bool {
        self.family.needs.iter().all(|any| any.iter().any(|need| self.has(need)))
    }

    fn has(&self, need: &Need) -> bool {
        let find = |stem: &Stem<'_>| self.spots.binary_search_by(|(own, _)| within(*own, self.prefix).cmp(stem));
        match need {
            Need::Layers(stem) => find(stem).is_ok(),
            Need::Under(name) => {
                let exact = [false, true].iter().any(|&numbered| find(&Stem { text: name, numbered }).is_ok());
                let below = format!("{name}.");
                let (Ok(next) | Err(next)) = find(&Stem { text: &below, numbered: false });
                let starts = |(own, _): &(Stem<'_>, Spot)| within(*own, self.prefix).text.starts_with(&below);
                exact || self.spots.get(next).is_some_and(starts)
            }
        }
    }
}

/// The order of the stages.
struct StageOrder {
    /// The two that change places, where there is no network between them.
    swapped: Option<(usize, usize)>,
}

impl StageOrder {
    fn of(components: &[Component<'_>]) -> StageOrder {
        let stage = |name| stages().index(name);
        let whole = components.iter().any(|component| Some(component.family.stage) == stage("network"));
        let swapped = stage("decoder of latents").zip(stage("encoder of latents"));
        StageOrder { swapped: swapped.filter(|_| !whole) }
    }

    fn of_stage(&self, stage: usize) -> usize {
        match self.swapped {
            Some((one, other)) if stage == one => other,
            Some((one, other)) if stage == other => one,
            _ => stage,
        }
    }
}

/// The place of a part of a pipeline among all parts; those that the table does not name come last.
fn part(prefix: &str) -> usize {
    stages().part_of(prefix).map_or(usize::MAX, |part| part.place)
}

/// All layers with their places.
fn place(groups: &Groups<'_>, components: &[Component<'_>]) -> Vec<(Place, usize)> {
    let order = StageOrder::of(components);
    let network = |index: usize| {
        let component = &components[index];
        (order.of_stage(component.family.stage), part(component.prefix), index)
    };
    let mut spots: HashMap<Stem<'_>, (usize, Spot)> = HashMap::new();
    for (index, component) in components.iter().enumerate() {
        spots.extend(component.spots.iter().map(|(stem, spot)| (*stem, (index, *spot))));
    }
    let strides = strides(groups, components);
    let mut around = Around::new(components);
    // Parameters of a network itself are a layer of the network's name.
    let mut own = HashMap::new();
    for (index, component) in components.iter().enumerate() {
        own.entry(component.prefix.trim_end_matches('.')).or_insert(index);
    }
    let mut placed = Vec::new();
    for (stem, layers) in groups {
        let owner = around.innermost(stem.text).filter(|&index| !is_earlier_part(*stem, &components[index]));
        let itself = own.get(stem.text).copied().filter(|_| !stem.numbered);
        placed.extend(layers.iter().map(|&(layer, number)| {
            let place = match (spots.get(stem), itself, owner) {
                (Some(&(index, spot)), ..) => {
                    let number = numbered(spot.run, number, strides.get(stem).copied());
                    Place { network: network(index), turn: 2 * spot.turn + 1, number, within: spot.within }
                }
                (None, Some(index), _) => Place { network: network(index), turn: 0, number: 0, within: 0 },
                (None, None, Some(index)) => beside(components[index].family, network(index), *stem),
                (None, None, None) => outside(*stem, &order),
            };
            (place, layer)
        }));
    }
    placed
}

/// A number that is the smaller, the sooner the layer runs.
fn numbered(run: Run, number: u64, stride: Option<u64>) -> u64 {
    match run {
        Run::Ascending => number,
        Run::Descending => u64::MAX - number,
        Run::Every(stride) => number.saturating_mul(stride),
        Run::Evenly => number.saturating_mul(stride.unwrap_or(1)),
        Run::ByName => 0,
    }
}

/// For the stems of lines that are spread evenly over another: how many of the other's layers come to one of theirs.
fn strides<'n>(groups: &Groups<'n>, components: &[Component<'n>]) -> HashMap<Stem<'n>, u64> {
    let count = |stem: &Stem<'n>| groups[stem].iter().map(|(_, number)| number.saturating_add(1)).max().unwrap_or(1);
    let mut strides = HashMap::new();
    for component in components {
        for (stem, spot) in component.spots.iter().filter(|(_, spot)| spot.run == Run::Evenly) {
            let others = component.spots.iter().filter(|(_, other)| (other.turn, other.within) == (spot.turn, 0));
            let most = others.map(|(other, _)| count(other)).max().unwrap_or(1);
            strides.insert(*stem, (most / count(stem)).max(1));
        }
    }
    strides
}

/// Whether a stem inside a network is of a part with a name of its own that runs before the network: a vision tower that no table
/// knows, in the names of the language model.
fn is_earlier_part(stem: Stem<'_>, around: &Component<'_>) -> bool {
    let part = stages().part_of(stem.text);
    part.is_some_and(|part| part.name.len() > around.prefix.len() && part.stage < around.family.stage)
}

/// The place of layers of a network whose table has no line for them. Those of one place are sorted by name.
fn beside(family: &Family, network: (usize, usize, usize), stem: Stem<'_>) -> Place {
    let after = 2 * family.last_stack + 2;
    let (turn, number) = match (Rank::of(stem.text), stem.numbered) {
        (Rank::Embedding, _) | (Rank::Input, false) => (0, 0),
        (Rank::Input | Rank::Stack, _) => (after, 0),
        (Rank::FinalNorm, _) => (after, 1),
        (Rank::Head, _) => (2 * family.turns, 0),
    };
    Place { network, turn, number, within: 0 }
}

/// The place of layers that belong to no known network.
fn outside(stem: Stem<'_>, order: &StageOrder) -> Place {
    let stage = |name| stages().index(name).unwrap_or(0);
    let rank = Rank::of(stem.text);
    let network = match (stages().part_of(stem.text), rank, stem.numbered) {
        (Some(part), ..) => (order.of_stage(part.stage), part.place, usize::MAX),
        (None, Rank::Embedding, _) | (None, Rank::Input, false) => (0, 0, 0),
        // What conditions a network runs before it.
        (None, Rank::Input | Rank::Stack, true) => (stage("conditions"), usize::MAX, usize::MAX),
        (None, ..) => (stage("network"), usize::MAX, usize::MAX),
    };
    // A stack without a word of its own is one.
    let rank = if stem.numbered && rank == Rank::Input { Rank::Stack } else { rank };
    Place { network, turn: rank as usize, number: 0, within: 0 }
}

/// Finds the network around each of several names that come in order.
struct Around<'n> {
    /// What comes before the names of each network, and the network's index, the last first.
    later: Vec<(&'n str, usize)>,
    /// Those around the last name, each within the one before.
    open: Vec<(&'n str, usize)>,
}

impl<'n> Around<'n> {
    fn new(components: &[Component<'n>]) -> Around<'n> {
        // Of several networks with the same beginning, the largest is the last to be opened.
        let mut later: Vec<_> = components.iter().enumerate().collect();
        later.sort_by_key(|(index, component)| (component.prefix, component.layers, *index));
        let later = later.into_iter().rev().map(|(index, component)| (component.prefix, index)).collect();
        Around { later, open: Vec::new() }
    }

    /// The innermost network around `name`, which must not come before the last name.
    fn innermost(&mut self, name: &str) -> Option<usize> {
        while let Some(&(prefix, index)) = self.later.last().filter(|(prefix, _)| *prefix <= name) {
            self.later.pop();
            self.open.retain(|(outer, _)| prefix.starts_with(outer));
            self.open.push((prefix, index));
        }
        while self.open.pop_if(|(prefix, _)| !name.starts_with(*prefix)).is_some() {}
        self.open.last().map(|(_, index)| *index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ordered(names: &[&'static str]) -> Vec<&'static str> {
        order(names, names.iter().copied())
            .map(|order| order.layers.iter().map(|&layer| names[layer]).collect())
            .unwrap_or_default()
    }

    #[test]
    fn the_family_with_lines_for_the_most_layers_is_taken() {
        let found = |names: &[&str]| order(names, [].into_iter()).map(|order| order.families).unwrap_or_default();
        let both = ["patch_embedding", "blocks.0", "blocks.1"];
        assert_eq!(
            found(&[&both[..], &["proj_out", "condition_embedder.time_proj"]].concat()),
            ["Wan, diffusers' names"]
        );
        assert_eq!(found(&[&both[..], &["head.head", "text_embedding.0"]].concat()), ["Wan, original names"]);
        assert!(found(&["blocks.0", "blocks.1", "patch"]).is_empty());
        // What a family has taken is not there for another.
        assert_eq!(found(&["model.embed_tokens", "model.layers.0", "lm_head"]), ["Language model"]);
    }

    #[test]
    fn networks_stand_one_after_another() {
        let names = [
            "vae.decoder.up.0",
            "vae.decoder.up.1",
            "vae.encoder.down.0",
            "vae.other",
            "unet.down_blocks.1",
            "unet.conv_in",
            "unet.down_blocks.0",
            "text_encoder_2.encoder.block.0",
            "text_encoder.text_model.encoder.layers.0",
            "text_encoder_3.unknown.0",
            "an_input",
            "a_condition.3",
            "model_ema",
        ];
        assert_eq!(
            ordered(&names),
            [
                "an_input",
                "text_encoder.text_model.encoder.layers.0",
                "text_encoder_2.encoder.block.0",
                "text_encoder_3.unknown.0",
                "a_condition.3",
                "unet.conv_in",
                "unet.down_blocks.0",
                "unet.down_blocks.1",
                "vae.other",
                "vae.decoder.up.1",
                "vae.decoder.up.0",
                "vae.encoder.down.0",
                "model_ema",
            ]
        );
        // Stacks that no table knows are not mixed.
        let unknown =
            ["unet.conv_in", "unet.b.1", "unet.a.1", "unet.a.10", "unet.b.0", "unet.a.2", "unet.down_blocks.0"];
        let order = ["unet.conv_in", "unet.down_blocks.0", "unet.a.1", "unet.a.2", "unet.a.10", "unet.b.0", "unet.b.1"];
        assert_eq!(ordered(&unknown), order);
        let other = ["q.1", "unet.conv_in", "p.1", "unet.down_blocks.0", "q.0", "p.0"];
        assert_eq!(ordered(&other), ["p.0", "p.1", "q.0", "q.1", "unet.conv_in", "unet.down_blocks.0"]);
        // A vision tower that no table knows runs before the language model that its names are in.
        let tower =
            ["model.vision_tower.timm_model.blocks.0", "model.language_model.layers.0", "model.other.0", "lm_head"];
        let order =
            ["model.vision_tower.timm_model.blocks.0", "model.language_model.layers.0", "model.other.0", "lm_head"];
        assert_eq!(ordered(&tower), order);
        // Without a network between them, the encoder is first.
        let alone = ["vae.decoder.up.0", "vae.decoder.up.1", "vae.encoder.down.0"];
        assert_eq!(ordered(&alone), ["vae.encoder.down.0", "vae.decoder.up.1", "vae.decoder.up.0"]);
    }

    #[test]
    fn a_layer_belongs_to_the_innermost_network_around_it() {
        let components = |prefixes: &[(&'static str, usize)]| {
            let component = |&(prefix, layers)| Component { family: &families()[0], prefix, spots: Vec::new(), layers };
            prefixes.iter().map(component).collect::<Vec<_>>()
        };
        let components = components(&[("", 1), ("a.", 1), ("a.b.", 1), ("a.b.", 5), ("c.", 1)]);
        let mut around = Around::new(&components);
        let names = [("_", 0), ("a", 0), ("a.a", 1), ("a.b.c", 3), ("a.c", 1), ("b", 0), ("c.x", 4), ("d", 0)];
        for (name, network) in names {
            assert_eq!(around.innermost(name), Some(network), "{name}");
        }
        assert_eq!(Around::new(&components[1..]).innermost("_"), None);
    }

    #[test]
    fn layers_that_are_spread_follow_those_that_they_are_spread_over() {
        let names =
            ["blocks.3", "patch_embedding", "vace_blocks.1", "blocks.2", "vace_blocks.0", "blocks.1", "blocks.0"];
        let order =
            ["patch_embedding", "blocks.0", "vace_blocks.0", "blocks.1", "blocks.2", "vace_blocks.1", "blocks.3"];
        assert_eq!(ordered(&names), order);
        // As many, or more, follow one by one.
        let names = ["vace_blocks.1", "vace_blocks.0", "patch_embedding", "blocks.0", "vace_blocks.2", "blocks.1"];
        let order = ["patch_embedding", "blocks.0", "vace_blocks.0", "blocks.1", "vace_blocks.1", "vace_blocks.2"];
        assert_eq!(ordered(&names), order);
    }

    #[test]
    fn numbers_of_any_size_are_ordered() {
        let largest = "decoder.up.18446744073709551615";
        assert_eq!(ordered(&["decoder.up.0", largest, "decoder.up.7"]), [largest, "decoder.up.7", "decoder.up.0"]);
        let beyond = "decoder.up.18446744073709551616";
        assert_eq!(ordered(&[beyond, "decoder.up.7"]).len(), 2);
    }
}
