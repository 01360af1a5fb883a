//! Experts: finding the weights of a mixture of experts, which one program stacks in a tensor and another keeps apart.
//!
//! | checkpoint | adapter |
//! |---|---|
//! | `experts.gate_up_proj` [E, 2 i, h] or [E, h, 2 i], `experts.down_proj` | one pair of factors for each expert (`experts.3.up_proj`) |
//! | the same | PEFT's for a whole parameter (`target_parameters`), under its module's name |
//! | GGUF's `ffn_gate_exps` [E, i, h], … | one pair of factors for each expert; llama.cpp's of all, under the same name |
//! | `experts.3.gate_proj.weight` [i, h], … | PEFT's for a whole parameter; mlx-lm's (`switch_mlp.gate_proj`) |
//!
//! Mixtral's older files say w1, w3 and w2 for gate, up and down, and `block_sparse_moe` for `mlp`.

use super::config::PeftConfig;
use super::names::keys::Part;
use super::names::{Found, Target, Targets};
use super::{Adapter, AdapterModule};
use crate::checkpoint::Layout;
use crate::error::AdapterFault;

/// What of an expert's, or all experts', weights a target is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expert {
    /// The number of experts, where the target stacks them; `None` if it is the weight of one.
    pub(super) stacked: Option<u32>,
    /// The expert; `None` for all of a stack.
    pub(super) number: Option<u32>,
    pub(super) part: ExpertPart,
    /// Whether the target, a stack, holds [inputs, outputs] for each expert; `None` if its shape does not say.
    pub(super) transposed: Option<bool>,
    /// Whether gate and up stand in turn, and not one after the other: gpt-oss, whose experts have biases.
    pub(super) interleaved: bool,
}

/// A part of what one tensor fuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertPart {
    /// All of it.
    Whole,
    /// The first half of the outputs: the gate.
    Gate,
    /// The second half.
    Up,
}

/// The names of the weights of one expert, with the stack that fuses them and the part that it is there.
const SINGLE: [(&str, &str, ExpertPart); 6] = [
    ("gate_proj", "gate_up_proj", ExpertPart::Gate),
    ("up_proj", "gate_up_proj", ExpertPart::Up),
    ("down_proj", "down_proj", ExpertPart::Whole),
    ("w1", "gate_up_proj", ExpertPart::Gate),
    ("w3", "gate_up_proj", ExpertPart::Up),
    ("w2", "down_proj", ExpertPart::Whole),
];

/// The ending of the names of llama.cpp's stacks: `ffn_gate_exps`, `ffn_up_exps`, `ffn_down_exps`.
const GGUF_ENDING: &str = "_exps";

/// The names of the module that holds the experts: the same module in files of different age.
const HOLDERS: [&str; 4] = ["mlp.experts", "block_sparse_moe.experts", "feed_forward.experts", "mlp.switch_mlp"];

/// An adapter's module with factors for a parameter that stacks experts.
pub(super) struct Wrapped {
    /// The parameters of its module, of which one is meant, in the order in which PEFT wraps them.
    parameters: Vec<String>,
    /// How many wrappers are around its module, and which this is, from the inside.
    wrappers: usize,
    number: usize,
    /// The name of the module without the wrappers.
    module: String,
    /// The inputs and outputs of the factors.
    factors: Option<[u64; 2]>,
}

/// The parameters of experts in the order in which models of transformers define them, which is that of PEFT's wrappers.
const DEFINED: [&str; 6] = ["gate_up_proj", "gate_up_proj_bias", "gate_proj", "up_proj", "down_proj", "down_proj_bias"];

fn place_of(parameter: &str) -> Option<usize> {
    DEFINED.iter().position(|name| *name == parameter)
}

/// The inputs and outputs of a module's factors.
fn sides_of(adapter: &Adapter, module: &AdapterModule) -> Option<[u64; 2]> {
    let shape = |part| Some(&adapter.checkpoint.layout().at(*module.parts.get(&part)?).shape);
    Some([*shape(Part::Down)?.get(1)?, *shape(Part::Up)?.first()?])
}

impl Wrapped {
    /// A module of PEFT's for one of `target_parameters`: wrappers around a module stand inside each other, so the first
    /// parameter's factors have the longest name (`experts.base_layer.lora_A`, `experts.lora_A`).
    pub(super) fn of(adapter: &Adapter, module: &AdapterModule, config: &PeftConfig) -> Option<Wrapped> {
        const WRAPPER: &str = ".base_layer";
        let core = module.name.trim_end_matches(WRAPPER);
        let parameter = |target: &String| {
            let (outer, own) = target.rsplit_once('.').unwrap_or(("", target));
            let fits = outer.is_empty() || core == outer || core.ends_with(&format!(".{outer}"));
            (fits && own != "weight").then(|| own.to_owned())
        };
        let mut parameters: Vec<String> = config.parameters.iter().filter_map(parameter).collect();
        if parameters.is_empty() {
            return None;
        }
        parameters.sort_by_key(|name| (place_of(name), name.clone()));
        parameters.dedup();
        let depth = |name: &str| Some(name.strip_prefix(core)?.len() / WRAPPER.len());
        let same = |other: &&AdapterModule| other.name.trim_end_matches(WRAPPER) == core;
        let wrappers = adapter.modules.iter().filter(same).count();
        let number = wrappers.checked_sub(depth(&module.name)? + 1)?;
        let factors = sides_of(adapter, module);
        Some(Wrapped { parameters, wrappers, number, module: core.to_owned(), factors })
    }

    /// The name of the parameter, if there are as many of them as wrappers.
    pub(super) fn parameter(&self) -> Option<String> {
        let known = self.wrappers == 1 || self.parameters.iter().all(|name| place_of(name).is_some());
        let own = self.parameters.get(self.number).filter(|_| known && self.parameters.len() == self.wrappers)?;
        Some(format!("{}.{own}", self.module))
    }

    /// The targets of the factors: the stack of the parameter, or the weights of each expert.
    ///
    /// # Errors
    /// [`AdapterFault::Config`] when it is not known which parameter is meant.
    pub(super) fn find<'a>(&self, layout: &'a Layout, targets: &Targets<'a>) -> Result<Found<'a>, AdapterFault> {
        let there = |name: &&String| self.targets_of(layout, targets, name).is_some();
        let parameters: Vec<&String> = self.parameters.iter().filter(there).collect();
        if parameters.is_empty() {
            return Ok(Found::Nothing);
        }
        if parameters.len() != self.wrappers {
            return Err(AdapterFault::Config {
                reason: format!(
                    "target_parameters names {} parameters of `{}`, which has factors for {}",
                    parameters.len(),
                    self.module,
                    self.wrappers
                ),
            });
        }
        let parameter = match parameters[..] {
            [only] => only,
            _ if parameters.iter().all(|name| place_of(name).is_some()) => parameters[self.number],
            _ => self.by_shape(layout, targets, &parameters)?,
        };
        let of_parameter = |target| Target { of_parameter: true, ..target };
        let found = self.targets_of(layout, targets, parameter);
        Ok(found.map_or(Found::Nothing, |found| Found::One(found.into_iter().map(of_parameter).collect())))
    }

    /// The one parameter whose shape the factors fit, where the order of the parameters is not known.
    fn by_shape<'p>(
        &self,
        layout: &Layout,
        targets: &Targets<'_>,
        parameters: &[&'p String],
    ) -> Result<&'p String, AdapterFault> {
        let fits = |name: &&&String| {
            let target = one(targets.find(&format!("{}.{name}", self.module)));
            let weight = target.and_then(|target| target.weight);
            match weight.map(|weight| &layout.at(weight).shape[..]) {
                Some(&[.., rows, cols]) => {
                    self.factors.is_some_and(|sides| sides == [rows, cols] || sides == [cols, rows])
                }
                _ => false,
            }
        };
        match parameters.iter().filter(fits).collect::<Vec<_>>()[..] {
            [one] => Ok(one),
            _ => Err(AdapterFault::Config {
                reason: format!(
                    "target_parameters names several parameters of `{}`, and the factors' shapes do not say which they are for",
                    self.module
                ),
            }),
        }
    }

    fn targets_of<'a>(&self, layout: &'a Layout, targets: &Targets<'a>, parameter: &str) -> Option<Vec<Target<'a>>> {
        let stack = holders(&self.module).find_map(|module| stack(layout, targets, &format!("{module}.{parameter}")));
        if let Some((target, expert)) = stack {
            return Some(vec![Target { expert: Some(expert), ..target }]);
        }
        // Of another shape, such as a packed one.
        let other = || Some(vec![one(targets.find(&format!("{}.{parameter}", self.module)))?]);
        singles(targets, &self.module, parameter).or_else(other)
    }
}

/// The same target, with what it stacks if that is experts.
pub(super) fn stacked<'a>(layout: &'a Layout, targets: &Targets<'a>, target: Target<'a>) -> Target<'a> {
    const WORDS: [&str; 2] = ["experts", "switch_mlp"];
    let is_of_experts = |word: &str| WORDS.contains(&word) || word.ends_with(GGUF_ENDING);
    let of_experts = target.module.split('.').any(is_of_experts) && target.projection.is_none();
    match of_experts.then(|| stack(layout, targets, target.module)).flatten() {
        Some((_, expert)) => Target { expert: Some(expert), ..target },
        None => target,
    }
}

/// The target of one expert's factors, or of mlx-lm's for all experts, where no module has the adapter's name.
pub(super) fn find<'a>(layout: &'a Layout, targets: &Targets<'a>, name: &str) -> Found<'a> {
    let Some((outer, own)) = name.rsplit_once('.') else { return Found::Nothing };
    let of_name = SINGLE.iter().find(|(single, ..)| *single == own);
    let Some(&(_, fused, part)) = of_name else { return Found::Nothing };
    let (holder, number) = match outer.rsplit_once('.') {
        Some((holder, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => (holder, number.parse().ok()),
        _ => (outer, None),
    };
    if !HOLDERS.iter().any(|known| holder.ends_with(known)) {
        return Found::Nothing;
    }
    for holder in holders(holder) {
        let whole = same_part(own).map(|own| (own, ExpertPart::Whole));
        for (own, part) in whole.chain([(fused, part)]) {
            if let Some((target, expert)) = stack(layout, targets, &format!("{holder}.{own}")) {
                return Found::One(vec![Target { expert: Some(Expert { number, part, ..expert }), ..target }]);
            }
        }
    }
    match number {
        Some(number) => single(targets, holder, number, own).map_or(Found::Nothing, |target| Found::One(vec![target])),
        None => singles(targets, holder, own).map_or(Found::Nothing, Found::One),
    }
}

/// The names of a module that holds experts in files of different age, its own first.
fn holders(module: &str) -> impl Iterator<Item = String> {
    let known = HOLDERS.iter().find_map(|holder| module.strip_suffix(holder)).map(str::to_owned);
    let others = known.into_iter().flat_map(|outer| HOLDERS.map(|holder| format!("{outer}{holder}")));
    let own = module.to_owned();
    std::iter::once(own.clone()).chain(others.filter(move |other| *other != own))
}

/// The tensor `name`, if it stacks the weights of experts.
fn stack<'a>(layout: &'a Layout, targets: &Targets<'a>, name: &str) -> Option<(Target<'a>, Expert)> {
    let target = one(targets.find(name))?;
    let shape_of = |target: &Target<'_>| match layout.at(target.weight?).shape[..] {
        [count, rows, cols] => Some([count, rows, cols]),
        _ => None,
    };
    let shape = shape_of(&target)?;
    let number = u32::try_from(shape[0]).ok()?;
    let (holder, own) = name.rsplit_once('.')?;
    let other = |own: &str| one(targets.find(&format!("{holder}.{own}"))).as_ref().and_then(shape_of);
    let shapes = match own {
        "gate_up_proj" => Some(shape).zip(other("down_proj")),
        "down_proj" => other("gate_up_proj").zip(Some(shape)),
        _ => None,
    };
    // llama.cpp's stacks are of matrices of outputs by inputs.
    let of_gguf = target.module.ends_with(GGUF_ENDING).then_some(false);
    let of_shapes = shapes.and_then(|([_, a, b], [_, c, d])| {
        // [2 i, h] and [h, i], or [h, 2 i] and [i, h]; no sizes are both.
        match (Some(a) == d.checked_mul(2) && b == c, Some(b) == c.checked_mul(2) && a == d) {
            (true, false) => Some(false),
            (false, true) => Some(true),
            _ => None,
        }
    });
    let transposed = of_gguf.or(of_shapes);
    let interleaved = one(targets.find(&format!("{name}_bias"))).is_some();
    Some((target, Expert { stacked: Some(number), number: None, part: ExpertPart::Whole, transposed, interleaved }))
}

/// The weights of all experts that a stack of this name fuses, if the checkpoint keeps them apart.
fn singles<'a>(targets: &Targets<'a>, module: &str, stack: &str) -> Option<Vec<Target<'a>>> {
    let mut found = Vec::new();
    for number in 0.. {
        let parts: Vec<Target<'a>> = match stack {
            "gate_up_proj" => [("gate_proj", ExpertPart::Gate), ("up_proj", ExpertPart::Up)]
                .into_iter()
                .filter_map(|(own, part)| with_part(single(targets, module, number, own)?, part))
                .collect(),
            own => single(targets, module, number, own).into_iter().collect(),
        };
        if parts.is_empty() || (stack == "gate_up_proj" && parts.len() != 2) {
            break;
        }
        found.extend(parts);
    }
    (!found.is_empty()).then_some(found)
}

fn with_part(target: Target<'_>, part: ExpertPart) -> Option<Target<'_>> {
    let expert = Expert { part, ..target.expert? };
    Some(Target { expert: Some(expert), ..target })
}

/// The names of the same part of an expert, the given one first; nothing for a name of none.
fn same_part(own: &str) -> impl Iterator<Item = &'static str> + Clone {
    let of_name = SINGLE.iter().find(|(single, ..)| *single == own);
    let others = SINGLE.iter().filter(move |other| of_name.is_some_and(|one| (one.1, one.2) == (other.1, other.2)));
    let own = of_name.map(|(name, ..)| *name);
    own.into_iter().chain(others.map(|(name, ..)| *name).filter(move |name| Some(*name) != own))
}

/// The weight of one expert, by any of its names.
fn single<'a>(targets: &Targets<'a>, module: &str, number: u32, own: &str) -> Option<Target<'a>> {
    let same = same_part(own);
    let names = holders(module).flat_map(|holder| same.clone().map(move |own| format!("{holder}.{number}.{own}")));
    let target = names.map(|name| one(targets.find(&name))).find_map(|found| found)?;
    let expert =
        Expert { stacked: None, number: Some(number), part: ExpertPart::Whole, transposed: None, interleaved: false };
    Some(Target { expert: Some(expert), ..target })
}

fn one(found: Found<'_>) -> Option<Target<'_>> {
    match found {
        Found::One(targets) => match targets[..] {
            [target] if target.projection.is_none() && target.slice.is_none() => Some(target),
            _ => None,
        },
        _ => None,
    }
}
