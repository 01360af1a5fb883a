//! The checkpoint's modules by the names that other programs use.

use std::collections::HashMap;

use super::families::{self, Rule};
use super::rows::{Projection, RowOrder, RowSlice};
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
    /// One module, or the modules that hold the parts of the named weight, in order.
    targets: Vec<Target<'a>>,
}

/// The index of aliases.
#[derive(Debug)]
pub(crate) struct Aliases<'a> {
    dotted: Names<'a>,
    /// The names with dots replaced by underscores.
    flat: Names<'a>,
}

impl<'a> Aliases<'a> {
    /// `modules` are those of `layout`.
    pub(crate) fn new(layout: &Layout, modules: &[Target<'a>]) -> Aliases<'a> {
        let mut aliases = Aliases { dotted: Names::new(), flat: Names::new() };
        let mut split = SplitModules { layout, found: HashMap::new() };
        for &target in modules {
            for (component, name) in roots(target.module) {
                if component != Component::ANY {
                    aliases.add(name.to_owned(), component, vec![target]);
                }
                for (number, rule) in families::rules().iter().enumerate() {
                    aliases.add_parts(rule, component, name, target);
                    split.find_rule(number, rule, component, name, target);
                }
                split.find_fused(component, name, target);
            }
        }
        for (name, component, targets) in split.complete() {
            aliases.add(name, component, targets);
        }
        aliases
    }

    /// The modules that an adapter for `component` calls `name`.
    pub(crate) fn dotted(&self, name: &str, component: Component) -> Found<'a> {
        found(&self.dotted, name, component)
    }

    /// As [`dotted`](Aliases::dotted), for a name with underscores in place of dots.
    pub(crate) fn flat(&self, name: &str, component: Component) -> Found<'a> {
        found(&self.flat, name, component)
    }

    /// Adds a rule's names for a module, or for the parts of its weight.
    fn add_parts(&mut self, rule: &Rule, component: Component, name: &str, target: Target<'a>) {
        let Some(captured) = rule.whole.captures(name) else { return };
        let of: u32 = rule.parts.iter().map(|(share, _)| share).sum();
        let mut first = 0;
        for (count, part) in &rule.parts {
            let projection = (rule.parts.len() > 1).then_some(Projection::Parts { first, count: *count, of });
            let order = if rule.order == RowOrder::Same { target.order } else { rule.order };
            self.add(part.fill(&captured), component, vec![Target { projection, order, ..target }]);
            first += count;
        }
    }

    fn add(&mut self, name: String, component: Component, targets: Vec<Target<'a>>) {
        let candidate = NamedTargets { component, targets };
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
}

/// The modules that hold the parts of weights that another program fuses, collected until all parts are found.
struct SplitModules<'a, 'l> {
    layout: &'l Layout,
    /// The parts found, by the rule, the model and the fused name.
    found: HashMap<(usize, Component, String), Vec<Option<Target<'a>>>>,
}

impl<'a> SplitModules<'a, '_> {
    fn find_rule(&mut self, number: usize, rule: &Rule, component: Component, name: &str, target: Target<'a>) {
        for (place, (_, part)) in rule.parts.iter().enumerate() {
            if let Some(captured) = part.captures(name) {
                let order = if rule.order == RowOrder::Same { target.order } else { rule.order.inverse() };
                let target = Target { order, ..target };
                self.put((number, component, rule.whole.fill(&captured)), rule.parts.len(), place, target);
            }
        }
    }

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
    fn complete(self) -> Vec<(String, Component, Vec<Target<'a>>)> {
        let layout = self.layout;
        let rows = |target: &Target<'_>| {
            let tensor = target.weight.or(target.bias)?;
            layout.at(tensor).shape.first().copied()
        };
        let mut complete = Vec::new();
        for ((_, component, name), targets) in self.found {
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
            complete.push((name, component, targets));
        }
        complete.sort_by(|(a, of_a, _), (b, of_b, _)| (a, of_a.0).cmp(&(b, of_b.0)));
        complete
    }
}

/// A module's name, and the name without each of the prefixes that it begins with.
fn roots(name: &str) -> impl Iterator<Item = (Component, &str)> {
    let models = MODEL_PREFIXES.iter().filter_map(move |root| Some((Component::ANY, name.strip_prefix(root)?)));
    let pipelines = ROOTS.iter().filter_map(move |(root, component)| Some((*component, name.strip_prefix(root)?)));
    [(Component::ANY, name)].into_iter().chain(models).chain(pipelines)
}

fn found<'a>(names: &Names<'a>, name: &str, component: Component) -> Found<'a> {
    let candidates = names.get(name).map_or(&[][..], Vec::as_slice);
    let candidates: Vec<_> = candidates.iter().filter(|candidate| candidate.component.and(component).0 != 0).collect();
    match candidates[..] {
        [] => Found::Nothing,
        [first, ..] if candidates.iter().all(|candidate| candidate.targets == first.targets) => {
            Found::One(first.targets.clone())
        }
        _ => Found::Several(candidates.iter().map(|candidate| candidate.targets[0].module.to_owned()).collect()),
    }
}
