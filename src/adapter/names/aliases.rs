//! The checkpoint's modules by the names that other programs use.

use std::collections::{HashMap, HashSet};

use super::families::{self, Rule, Side};
use super::forms;
use super::pattern::Captured;
use super::rows::{RowOrder, RowSlice};
use super::{Component, FUSED, Found, MODEL_PREFIXES, Target};
use crate::checkpoint::Layout;

/// The prefixes that checkpoints of whole pipelines give the names of one model.
const ROOTS: &[(&str, Component)] = &[
    ("cond_stage_model.transformer.", Component::TEXT_1),
    ("cond_stage_model.model.", Component::TEXT_1),
    ("conditioner.embedders.0.transformer.", Component::TEXT_1),
    ("conditioner.embedders.1.model.", Component::TEXT_2),
    ("text_encoders.clip_l.transformer.", Component::TEXT_1),
    ("text_encoders.clip_g.transformer.", Component::TEXT_2),
    ("text_encoders.t5xxl.transformer.", T5),
    ("clip_h.transformer.", Component::TEXT_1),
    ("clip_l.transformer.", Component::TEXT_1),
    ("clip_g.transformer.", Component::TEXT_2),
    ("t5xxl.transformer.", T5),
];

/// The second text encoder of Flux, the third of Stable Diffusion 3.
const T5: Component = Component(Component::TEXT_2.0 | Component::TEXT_3.0);

/// Targets by name; several if a name is ambiguous.
type Names<'a> = HashMap<String, Vec<NamedTargets<'a>>>;

#[derive(Clone, Debug, PartialEq)]
struct NamedTargets<'a> {
    component: Component,
    /// The table that gives the name; `None` if no table does.
    table: Option<usize>,
    /// One module, or the modules that hold the parts of the named weight, in order.
    targets: Vec<Target<'a>>,
}

/// The index of aliases.
#[derive(Debug)]
pub(crate) struct Aliases<'a> {
    dotted: Names<'a>,
    /// The names with dots replaced by underscores.
    flat: Names<'a>,
    /// The tables of which a block fits. Families have the names of some modules outside their blocks in common.
    present: HashSet<usize>,
}

impl<'a> Aliases<'a> {
    /// `modules` are those of `layout`.
    pub(crate) fn new(layout: &Layout, modules: &[Target<'a>]) -> Aliases<'a> {
        let mut aliases = Aliases { dotted: Names::new(), flat: Names::new(), present: HashSet::new() };
        let mut split = SplitModules { layout, found: HashMap::new() };
        for &target in modules {
            let shape = target.weight.map(|weight| layout.at(weight).shape.as_slice());
            let bare = forms::unwrapped(target.module);
            let names = [Some(target.module), bare.as_deref()];
            for (component, name) in names.into_iter().flatten().flat_map(roots) {
                if component != Component::ANY {
                    let targets = vec![target];
                    aliases.add(name.to_owned(), NamedTargets { component, table: None, targets });
                }
                for (number, rule, side, captured) in families::rules().fitting(name) {
                    let (order, table) = (rule.order(shape), families::rules().table(number));
                    aliases.present.extend(table.filter(|_| rule.whole.placeholders().0 > 0));
                    match side {
                        Side::Whole => aliases.add_parts(rule, (component, table), in_order(target, order), &captured),
                        Side::Part(place) => {
                            let key = (number, component, rule.whole.fill(&captured));
                            split.put(key, rule.parts.len(), place, in_order(target, order.inverse()));
                        }
                    }
                }
                split.find_fused(component, name, target);
            }
        }
        for (name, candidate) in split.complete() {
            aliases.add(name, candidate);
        }
        aliases
    }

    /// The modules that an adapter for `component` calls `name`.
    pub(crate) fn dotted(&self, name: &str, component: Component) -> Found<'a> {
        self.found(&self.dotted, name, component)
    }

    /// As [`dotted`](Aliases::dotted), for a name with underscores in place of dots.
    pub(crate) fn flat(&self, name: &str, component: Component) -> Found<'a> {
        self.found(&self.flat, name, component)
    }

    /// Adds a rule's names for a module, or for the parts of its weight.
    fn add_parts(
        &mut self,
        rule: &Rule,
        (component, table): (Component, Option<usize>),
        target: Target<'a>,
        captured: &Captured<'_>,
    ) {
        for ((_, part), projection) in rule.parts.iter().zip(rule.projections()) {
            let targets = vec![Target { projection, ..target }];
            self.add(part.fill(captured), NamedTargets { component, table, targets });
        }
    }

    fn add(&mut self, name: String, candidate: NamedTargets<'a>) {
        let shorter = name.strip_suffix(".to_out.0").map(|outer| format!("{outer}.to_out"));
        for name in shorter.into_iter().chain([name]) {
            for (names, name) in [(&mut self.flat, name.replace('.', "_")), (&mut self.dotted, name)] {
                let candidates = names.entry(name).or_default();
                if !candidates.contains(&candidate) {
                    candidates.push(candidate.clone());
                }
            }
        }
    }

    fn found(&self, names: &Names<'a>, name: &str, component: Component) -> Found<'a> {
        let candidates = names.get(name).map_or(&[][..], Vec::as_slice);
        let fit = |candidate: &&NamedTargets<'_>| candidate.component.and(component).0 != 0;
        let mut candidates: Vec<_> = candidates.iter().filter(fit).collect();
        let is_present =
            |candidate: &&NamedTargets<'_>| candidate.table.is_none_or(|table| self.present.contains(&table));
        if candidates.iter().any(is_present) {
            candidates.retain(is_present);
        }
        match candidates[..] {
            [] => Found::Nothing,
            [first, ..] if candidates.iter().all(|candidate| candidate.targets == first.targets) => {
                Found::One(first.targets.clone())
            }
            _ => Found::Several(candidates.iter().map(|candidate| candidate.targets[0].module.to_owned()).collect()),
        }
    }
}

/// The modules that hold the parts of weights that another program fuses, collected until all parts are found.
struct SplitModules<'a, 'l> {
    layout: &'l Layout,
    /// The parts found, by the rule, the model and the fused name.
    found: HashMap<(usize, Component, String), Vec<Option<Target<'a>>>>,
}

impl<'a> SplitModules<'a, '_> {
    /// Finds projections that are often fused, in any family.
    fn find_fused(&mut self, component: Component, name: &str, target: Target<'a>) {
        let (outer, own) = name.rsplit_once('.').map_or(("", name), |(outer, own)| (&name[..=outer.len()], own));
        let mut number = usize::MAX;
        for (fused, sets) in FUSED {
            for set in *sets {
                number -= 1;
                if let Some(place) = set.iter().position(|(projection, _)| *projection == own) {
                    for fused in *fused {
                        self.put((number, component, format!("{outer}{fused}")), set.len(), place, target);
                    }
                }
            }
        }
    }

    fn put(&mut self, key: (usize, Component, String), count: usize, place: usize, target: Target<'a>) {
        self.found.entry(key).or_insert_with(|| vec![None; count])[place] = Some(target);
    }

    /// The fused weights of which all parts were found, with the rows of each part, in order of the names.
    fn complete(self) -> Vec<(String, NamedTargets<'a>)> {
        let layout = self.layout;
        let rows = |target: &Target<'_>| {
            let tensor = target.weight.or(target.bias)?;
            layout.at(tensor).shape.first().copied()
        };
        let mut complete = Vec::new();
        for ((number, component, name), targets) in self.found {
            let Some(mut targets) = targets.into_iter().collect::<Option<Vec<_>>>() else { continue };
            if targets.len() > 1 {
                let Some(lens) = targets.iter().map(rows).collect::<Option<Vec<u64>>>() else { continue };
                let Some(of) = lens.iter().try_fold(0u64, |sum, len| sum.checked_add(*len)) else { continue };
                let mut start = 0;
                for (target, len) in targets.iter_mut().zip(lens) {
                    target.slice = Some(RowSlice { start, len, of });
                    start += len;
                }
            }
            let table = families::rules().table(number);
            complete.push((name, NamedTargets { component, table, targets }));
        }
        complete.sort_by(|(a, at), (b, bt)| (a, at.component.0, at.table).cmp(&(b, bt.component.0, bt.table)));
        complete
    }
}

/// The target with its rows in another order, unless it is the same.
fn in_order(target: Target<'_>, order: RowOrder) -> Target<'_> {
    if order == RowOrder::Same { target } else { Target { order, ..target } }
}

/// A module's name, and the name without each of the prefixes that it begins with.
fn roots(name: &str) -> impl Iterator<Item = (Component, &str)> {
    let models = MODEL_PREFIXES.iter().filter_map(move |root| Some((Component::ANY, name.strip_prefix(root)?)));
    [(Component::ANY, name)].into_iter().chain(models).chain(pipeline_root(name))
}

/// The rest of a name that is of one model of a whole pipeline, by a prefix in [`ROOTS`] or as one of ComfyUI's other text
/// encoders (`text_encoders.qwen3_06b.transformer.`).
pub(super) fn pipeline_root(name: &str) -> Option<(Component, &str)> {
    let listed = ROOTS.iter().find_map(|(root, component)| Some((*component, name.strip_prefix(root)?)));
    listed.or_else(|| {
        let (encoder, rest) = name.strip_prefix("text_encoders.")?.split_once(".transformer.")?;
        (!encoder.contains('.')).then_some((Component::TEXT, rest))
    })
}
