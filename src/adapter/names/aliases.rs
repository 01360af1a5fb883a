//! The checkpoint's modules by the names that other programs give them.

use std::collections::HashMap;

use super::families::{self, Rule};
use super::rows::{Cut, RowOrder, Share};
use super::{Component, FUSED, Found, MODEL_PREFIXES, Target};
use crate::checkpoint::Layout;

/// What checkpoints of whole pipelines put before the names of one of their models.
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

/// Names to what they mean; several where it is not clear.
type Names<'a> = HashMap<String, Vec<Meaning<'a>>>;

#[derive(Clone, Debug, PartialEq)]
struct Meaning<'a> {
    component: Component,
    /// One module, or those that hold the parts of what the name means, in order.
    targets: Vec<Target<'a>>,
}

/// The index of the names.
#[derive(Debug)]
pub(crate) struct Aliases<'a> {
    dotted: Names<'a>,
    /// The same with dots made underscores.
    flat: Names<'a>,
}

impl<'a> Aliases<'a> {
    /// `modules` are those of `layout`.
    pub(crate) fn new(layout: &Layout, modules: &[Target<'a>]) -> Aliases<'a> {
        let mut aliases = Aliases { dotted: Names::new(), flat: Names::new() };
        let mut apart = Apart { layout, found: HashMap::new() };
        for &target in modules {
            for (component, name) in roots(target.module) {
                if component != Component::ANY {
                    aliases.add(name.to_owned(), component, vec![target]);
                }
                for (number, rule) in families::rules().iter().enumerate() {
                    aliases.add_parts(rule, component, name, target);
                    apart.find_rule(number, rule, component, name, target);
                }
                apart.find_fused(component, name, target);
            }
        }
        for (name, component, targets) in apart.complete() {
            aliases.add(name, component, targets);
        }
        aliases
    }

    /// What an adapter for `component` means by `name`.
    pub(crate) fn dotted(&self, name: &str, component: Component) -> Found<'a> {
        found(&self.dotted, name, component)
    }

    /// The same for a name whose dots have become underscores.
    pub(crate) fn flat(&self, name: &str, component: Component) -> Found<'a> {
        found(&self.flat, name, component)
    }

    /// The names that a rule has for a module, or for the parts of its weight.
    fn add_parts(&mut self, rule: &Rule, component: Component, name: &str, target: Target<'a>) {
        let Some(captured) = rule.whole.captures(name) else { return };
        let of: u32 = rule.parts.iter().map(|(share, _)| share).sum();
        let mut first = 0;
        for (count, part) in &rule.parts {
            let share = (rule.parts.len() > 1).then_some(Share::Parts { first, count: *count, of });
            let order = if rule.order == RowOrder::Same { target.order } else { rule.order };
            self.add(part.fill(&captured), component, vec![Target { share, order, ..target }]);
            first += count;
        }
    }

    fn add(&mut self, name: String, component: Component, targets: Vec<Target<'a>>) {
        let meaning = Meaning { component, targets };
        let shorter = name.strip_suffix(".to_out.0").map(|outer| format!("{outer}.to_out"));
        for name in shorter.into_iter().chain([name]) {
            for (names, name) in [(&mut self.flat, name.replace('.', "_")), (&mut self.dotted, name)] {
                let meanings = names.entry(name).or_default();
                if !meanings.contains(&meaning) {
                    meanings.push(meaning.clone());
                }
            }
        }
    }
}

/// The modules that hold the parts of what another program fuses, until all of them are found.
struct Apart<'a, 'l> {
    layout: &'l Layout,
    /// By the rule, the model and the fused name.
    found: HashMap<(usize, Component, String), Vec<Option<Target<'a>>>>,
}

impl<'a> Apart<'a, '_> {
    fn find_rule(&mut self, number: usize, rule: &Rule, component: Component, name: &str, target: Target<'a>) {
        for (place, (_, part)) in rule.parts.iter().enumerate() {
            if let Some(captured) = part.captures(name) {
                let order = if rule.order == RowOrder::Same { target.order } else { rule.order.inverse() };
                let target = Target { order, ..target };
                self.put((number, component, rule.whole.fill(&captured)), rule.parts.len(), place, target);
            }
        }
    }

    /// Projections that are often fused, whatever the family.
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

    /// Those of which all parts are there, with the rows of each; in order of the names.
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
                    target.cut = Some(Cut { start, len, of });
                    start += len;
                }
            }
            complete.push((name, component, targets));
        }
        complete.sort_by(|(a, of_a, _), (b, of_b, _)| (a, of_a.0).cmp(&(b, of_b.0)));
        complete
    }
}

/// A module's name, and without each of the roots that it begins with.
fn roots(name: &str) -> impl Iterator<Item = (Component, &str)> {
    let models = MODEL_PREFIXES.iter().filter_map(move |root| Some((Component::ANY, name.strip_prefix(root)?)));
    let pipelines = ROOTS.iter().filter_map(move |(root, component)| Some((*component, name.strip_prefix(root)?)));
    [(Component::ANY, name)].into_iter().chain(models).chain(pipelines)
}

fn found<'a>(names: &Names<'a>, name: &str, component: Component) -> Found<'a> {
    let meanings = names.get(name).map_or(&[][..], Vec::as_slice);
    let meanings: Vec<_> = meanings.iter().filter(|meaning| meaning.component.and(component).0 != 0).collect();
    match meanings[..] {
        [] => Found::Nothing,
        [first, ..] if meanings.iter().all(|meaning| meaning.targets == first.targets) => {
            Found::One(first.targets.clone())
        }
        _ => Found::Several(meanings.iter().map(|meaning| meaning.targets[0].module.to_owned()).collect()),
    }
}
