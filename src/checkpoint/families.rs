//! The order in which known networks run their layers, from the tables in `families/`.
//!
//! A table has families. `[NAME] STAGE` begins one; the lines after it are patterns of layers, in order of execution:
//!
//! - `a.b` is the layer of this name; `a.b.{}` is the layers `a.b.0`, `a.b.1`, … in order of their numbers, and
//!   `a.b.{} descending` the same from the largest number down;
//! - `a.*` is `a` and every layer under it that has no line of its own, in order of name;
//! - `A | B` are the names that several programs give to one layer;
//! - `& A` runs in turn with the line before: each layer after the other's layer of the same number. `& A every 5` has
//!   number n after the other's number 5 n, and `& A evenly` spreads the layers over those of the other line;
//! - `!` at the end marks what a checkpoint must have to be of the family: one of the line's names;
//! - `with A` is a line of its own, and says that a checkpoint must have a module A or one under it, which tells networks apart
//!   that have the same layers in another order;
//! - `#` begins a comment, which names the code that the order was taken from.
//!
//! `families/stages.txt` has the stages in order, and the names of the parts of whole pipelines in one file.

use std::collections::HashMap;
use std::sync::LazyLock;

const TABLES: [&str; 5] = [
    include_str!("families/autoencoders.txt"),
    include_str!("families/transformers.txt"),
    include_str!("families/unets.txt"),
    include_str!("families/language.txt"),
    include_str!("families/encoders.txt"),
];

/// The layers of one name, or of one name before a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Stem<'n> {
    pub(super) text: &'n str,
    /// Whether a number follows.
    pub(super) numbered: bool,
}

/// Networks with the same names in the same order.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    /// The index of its stage.
    pub(super) stage: usize,
    /// What a checkpoint must have: one of each entry.
    pub(super) needs: Vec<Vec<Need>>,
    /// The module that a checkpoint must have, or one under it.
    pub(super) with: Option<&'static str>,
    /// The last turn in which stacks run that the family must have.
    pub(super) last_stack: usize,
    /// The number of turns.
    pub(super) turns: usize,
    spots: HashMap<Stem<'static>, Spot>,
    /// The names under which every layer has a spot, longest first.
    under: Vec<(&'static str, Spot)>,
    /// The length of the longest name.
    longest: usize,
}

/// What a checkpoint must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// These layers.
    Layers(Stem<'static>),
    /// A layer of this name or one under it.
    Under(&'static str),
}

/// The place of a line in its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    /// The number of the line, without those that run in turn with the line before.
    pub(super) turn: usize,
    /// The number of the line among those that run in turn.
    pub(super) within: usize,
    pub(super) run: Run,
}

/// How the layers of a line follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    Ascending,
    Descending,
    Every(u64),
    Evenly,
    ByName,
}

/// Stages in order, each with what the names of its parts begin with.
#[derive(Debug, Default)]
pub(super) struct Stages {
    names: Vec<&'static str>,
    /// The beginnings, each with its stage.
    parts: Vec<(&'static str, usize)>,
}

impl Family {
    /// The spot of a layer, whose name is given without what comes before the family's own names.
    pub(super) fn spot(&self, stem: Stem<'_>) -> Option<Spot> {
        if stem.text.len() <= self.longest
            && let Some(spot) = self.spots.get(&stem)
        {
            return Some(*spot);
        }
        self.under.iter().find(|(name, _)| is_under(stem.text, name)).map(|(_, spot)| *spot)
    }

    /// The first need that says which layers they are: without these a checkpoint is not of the family.
    fn anchor(&self) -> impl Iterator<Item = Stem<'static>> {
        let stem = |need: &Need| match need {
            Need::Layers(stem) => Some(*stem),
            Need::Under(_) => None,
        };
        let all = self.needs.iter().map(move |any| any.iter().map(stem).collect::<Option<Vec<_>>>());
        all.flatten().next().into_iter().flatten()
    }
}

/// Whether a name is `outer` or begins with it and a dot.
fn is_under(name: &str, outer: &str) -> bool {
    name.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl Stages {
    /// The index of a stage.
    pub(super) fn index(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|stage| *stage == name)
    }

    /// The part of a pipeline that a name belongs to.
    pub(super) fn part_of(&self, name: &str) -> Option<Part> {
        let parts = self.parts.iter().enumerate().map(|(place, &(name, stage))| Part { name, place, stage });
        parts.filter(|part| is_under(name, part.name)).max_by_key(|part| part.name.len())
    }
}

/// A part of a whole pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// What its names begin with.
    pub(super) name: &'static str,
    /// Its place among all parts.
    pub(super) place: usize,
    /// The index of its stage.
    pub(super) stage: usize,
}

/// All families.
pub(super) fn families() -> &'static [Family] {
    static FAMILIES: LazyLock<Vec<Family>> = LazyLock::new(|| {
        let read = |table| parse(table, stages()).unwrap_or_else(|error| unreachable!("{error}"));
        TABLES.iter().flat_map(|table| read(table)).collect()
    });
    &FAMILIES
}

/// The indices of the families that need a stem first of all.
pub(super) fn families_with(stem: Stem<'_>) -> &'static [usize] {
    /// For each stem the index of its families.
    type Anchors = (HashMap<Stem<'static>, usize>, Vec<Vec<usize>>);
    static ANCHORS: LazyLock<Anchors> = LazyLock::new(|| {
        let (mut stems, mut with): Anchors = Default::default();
        for (index, family) in families().iter().enumerate() {
            for stem in family.anchor() {
                let of_stem = *stems.entry(stem).or_insert(with.len());
                with.resize(with.len().max(of_stem + 1), Vec::new());
                with[of_stem].push(index);
            }
        }
        (stems, with)
    });
    let (stems, with) = &*ANCHORS;
    stems.get(&stem).map_or(&[], |&of_stem| &with[of_stem])
}

/// The stages of all families.
pub(super) fn stages() -> &'static Stages {
    static STAGES: LazyLock<Stages> = LazyLock::new(|| {
        parse_stages(include_str!("families/stages.txt")).unwrap_or_else(|error| unreachable!("{error}"))
    });
    &STAGES
}

/// The lines of a table without comments and empty ones.
fn lines(table: &'static str) -> impl Iterator<Item = &'static str> {
    let uncommented = |line: &'static str| line.split_once('#').map_or(line, |(line, _)| line).trim();
    table.lines().map(uncommented).filter(|line| !line.is_empty())
}

fn parse_stages(table: &'static str) -> Result<Stages, String> {
    let mut stages = Stages::default();
    for line in lines(table) {
        let (name, parts) = line.split_once(':').ok_or_else(|| format!("`{line}` has no `:`"))?;
        stages.parts.extend(parts.split_whitespace().map(|part| (part, stages.names.len())));
        stages.names.push(name.trim());
    }
    Ok(stages)
}

fn parse(table: &'static str, stages: &Stages) -> Result<Vec<Family>, String> {
    let mut families: Vec<Family> = Vec::new();
    for line in lines(table) {
        if let Some(header) = line.strip_prefix('[') {
            let (name, stage) = header.split_once(']').ok_or_else(|| format!("`{line}` has no `]`"))?;
            let stage = stages.index(stage.trim()).ok_or_else(|| format!("`{line}` has no stage"))?;
            families.push(Family {
                name,
                stage,
                needs: Vec::new(),
                with: None,
                last_stack: 0,
                turns: 0,
                spots: HashMap::new(),
                under: Vec::new(),
                longest: 0,
            });
        } else {
            let family = families.last_mut().ok_or_else(|| format!("`{line}` stands before any family"))?;
            add(family, line).map_err(|error| format!("[{}] `{line}`: {error}", family.name))?;
        }
    }
    families.iter_mut().for_each(|family| family.under.sort_by_key(|(name, _)| std::cmp::Reverse(name.len())));
    match families.iter().find(|family| family.anchor().next().is_none()) {
        None => Ok(families),
        Some(family) => Err(format!("[{}] needs nothing", family.name)),
    }
}

/// Adds a line to a family.
fn add(family: &mut Family, line: &'static str) -> Result<(), &'static str> {
    if let Some(module) = line.strip_prefix("with ") {
        return match family.with.replace(module.trim()) {
            None => Ok(()),
            Some(_) => Err("the family has such a line already"),
        };
    }
    let (line, needed) = line.strip_suffix('!').map_or((line, false), |line| (line.trim_end(), true));
    let (line, in_turn) = line.strip_prefix('&').map_or((line, false), |line| (line.trim_start(), true));
    let (patterns, run) = how(line)?;
    if in_turn {
        family.turns = family.turns.checked_sub(1).ok_or("there is no line before it")?;
    }
    let spots = family.spots.values().chain(family.under.iter().map(|(_, spot)| spot));
    let within = spots.filter(|spot| spot.turn == family.turns).map(|spot| spot.within + 1).max();
    let spot = Spot { turn: family.turns, within: within.unwrap_or(0), run };
    family.turns += 1;
    let mut needs = Vec::new();
    for pattern in patterns.split('|').map(str::trim) {
        let need = match (pattern.strip_suffix(".{}"), pattern.strip_suffix(".*")) {
            (Some(text), _) => Need::Layers(Stem { text, numbered: true }),
            (None, Some(under)) => Need::Under(under),
            (None, None) => Need::Layers(Stem { text: pattern, numbered: false }),
        };
        let (Need::Layers(Stem { text, .. }) | Need::Under(text)) = need;
        let name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if text.is_empty() || !text.chars().all(name) {
            return Err("a name has letters, digits, dots, hyphens and underscores");
        }
        let known = match need {
            Need::Under(under) => {
                let known = family.under.iter().any(|(name, _)| *name == under);
                family.under.push((under, Spot { run: Run::ByName, ..spot }));
                known
            }
            Need::Layers(stem) => family.spots.insert(stem, spot).is_some(),
        };
        if known {
            return Err("the family has this name already");
        }
        family.longest = family.longest.max(text.len());
        needs.push(need);
    }
    if needed {
        let is_stack = |need: &Need| !matches!(need, Need::Layers(Stem { numbered: false, .. }));
        if needs.iter().any(is_stack) {
            family.last_stack = family.last_stack.max(spot.turn);
        }
        family.needs.push(needs);
    }
    Ok(())
}

/// The patterns of a line, and how their layers follow each other.
fn how(line: &'static str) -> Result<(&'static str, Run), &'static str> {
    if let Some((patterns, number)) = line.split_once(" every ") {
        let number = number.parse().ok().filter(|number| *number > 0).ok_or("`every` takes a number from 1")?;
        return Ok((patterns, Run::Every(number)));
    }
    for (word, run) in [(" descending", Run::Descending), (" evenly", Run::Evenly)] {
        if let Some(patterns) = line.strip_suffix(word) {
            return Ok((patterns, run));
        }
    }
    Ok((line, Run::Ascending))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(table: &'static str) -> Result<Vec<Family>, String> {
        parse(table, &parse_stages("first:\nsecond: a b.c").unwrap())
    }

    #[test]
    fn all_tables_are_read() {
        assert!(families().len() > 60, "{}", families().len());
        let stages = stages();
        assert!(stages.index("network") < stages.index("decoder of latents"));
        for stage in ["inputs", "conditions", "network", "encoder of latents", "decoder of latents"] {
            assert!(stages.index(stage).is_some(), "{stage}");
        }
        for (index, family) in families().iter().enumerate() {
            let found = family.anchor().all(|stem| families_with(stem).contains(&index));
            assert!(found && family.anchor().count() > 0, "{}", family.name);
        }
    }

    #[test]
    fn lines_are_read() {
        let table = "# comment\n[x] second\na | b.c # comment\n\nd.{} ! # comment\n& e.{} every 5\n& f.* evenly\ng.{} descending !";
        let family = &read(table).unwrap()[0];
        assert_eq!((family.name, family.stage, family.turns, family.last_stack), ("x", 1, 3, 2));
        let spot = |text, numbered| family.spot(Stem { text, numbered });
        let at = |turn, within, run| Some(Spot { turn, within, run });
        assert_eq!([spot("a", false), spot("b.c", false)], [at(0, 0, Run::Ascending); 2]);
        assert_eq!(spot("d", true), at(1, 0, Run::Ascending));
        assert_eq!(spot("e", true), at(1, 1, Run::Every(5)));
        assert_eq!([spot("f.x", false), spot("f", true), spot("f.y.z", true)], [at(1, 2, Run::ByName); 3]);
        assert_eq!(spot("g", true), at(2, 0, Run::Descending));
        assert_eq!([spot("a", true), spot("d", false), spot("fx", false), spot("", false)], [None; 4]);
        assert_eq!(family.anchor().collect::<Vec<_>>(), [Stem { text: "d", numbered: true }]);
        assert_eq!(family.needs.len(), 2);
    }

    #[test]
    fn tables_without_one_meaning_are_refused() {
        for wrong in [
            "a",
            "[x] second",
            "[x] third\na !",
            "[x second\na !",
            "[x] second\na.* !",
            "[x] second\n& a !",
            "[x] second\na !\na",
            "[x] second\na !\nb.*\nb.*",
            "[x] second\na !\nb.{} every 0",
            "[x] second\na !\nb.{}.c",
            "[x] second\na ! b",
            "[x] second\na | !",
            "[x] second\na !\nwith b\nwith c",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(parse_stages("first").is_err());
    }

    #[test]
    fn parts_are_told_by_the_longest_beginning() {
        let stages = parse_stages("one: a a.b\ntwo: a.b.c").unwrap();
        let part = |name| stages.part_of(name).map(|part| (part.place, part.stage));
        assert_eq!(
            [part("a"), part("a.x"), part("a.b.x"), part("a.b.c.")],
            [Some((0, 0)), Some((0, 0)), Some((1, 0)), Some((2, 1))]
        );
        assert_eq!([part("ab"), part("")], [None; 2]);
    }
}
