//! What the modules of one family of models are called by different programs, from the tables in `families/`.
//!
//! A line of a table is `ONE = OTHER`, two patterns for one module ([`Pattern`]): `{}` is a number, and a last `*` the
//! rest of the name. `ONE = A + B + 4 C` says that one program's weight stacks in rows what another keeps apart, C with
//! four times the rows of A. `<block>` at the end of both patterns stands for each of the indented lines under a line
//! `<block>`. What is in parentheses at the end says how the rows differ. `#` begins a comment.
//!
//! The facts are from diffusers (`loaders/lora_conversion_utils.py`, `loaders/single_file_utils.py`, `scripts/convert_*`),
//! ComfyUI (`comfy/lora.py`, `comfy/lora_convert.py`, `comfy/utils.py`, `comfy/supported_models.py`), sd-scripts and Musubi Tuner
//! (`networks/`), OneTrainer (`modules/model/`), DiffSynth-Studio (`diffsynth/utils/lora/`), llama.cpp
//! (`gguf-py/gguf/tensor_mapping.py`) and transformers (`models/llama/convert_llama_weights_to_hf.py`).

use std::collections::HashMap;
use std::sync::LazyLock;

use super::pattern::{Captured, Pattern};
use super::rows::{Heads, Projection, RowOrder};

const TABLES: &[&str] = &[
    include_str!("families/flux.txt"),
    include_str!("families/flux2.txt"),
    include_str!("families/chroma.txt"),
    include_str!("families/stable_diffusion_unet.txt"),
    include_str!("families/stable_diffusion_3.txt"),
    include_str!("families/clip.txt"),
    include_str!("families/wan.txt"),
    include_str!("families/wan_animate_2.txt"),
    include_str!("families/hunyuan_video.txt"),
    include_str!("families/ltx.txt"),
    include_str!("families/z_image.txt"),
    include_str!("families/lumina2.txt"),
    include_str!("families/krea2.txt"),
    include_str!("families/cosmos.txt"),
    include_str!("families/aura_flow.txt"),
    include_str!("families/pixart_and_sana.txt"),
    include_str!("families/mochi.txt"),
    include_str!("families/ideogram4.txt"),
    include_str!("families/qwen_image.txt"),
    include_str!("families/stable_cascade.txt"),
    include_str!("families/ace_step.txt"),
    include_str!("families/llama.txt"),
];

/// One line of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) whole: Pattern,
    /// What the other program calls it, or the parts that it keeps apart, with their shares of the rows.
    pub(crate) parts: Vec<(u32, Pattern)>,
    rows: Rows,
}

/// How the rows of the two sides of a rule differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    /// A checkpoint in the left side's names has this order, compared with an adapter in the right side's.
    Ordered(RowOrder),
    /// The halves are swapped if the rows are two vectors of the input's size. A block's modulation has more of them.
    PairSwapped,
    /// The parts are queries, keys and values, and the last two may have fewer rows.
    Grouped,
}

impl Rule {
    /// How a checkpoint in the left side's names orders the rows of a weight of this shape, compared with an adapter in the
    /// right side's.
    pub(crate) fn order(&self, shape: Option<&[u64]>) -> RowOrder {
        match (self.rows, shape) {
            (Rows::Ordered(order), _) => order,
            (Rows::PairSwapped, Some([rows, columns, ..])) if columns.checked_mul(2) == Some(*rows) => {
                RowOrder::HalvesSwapped
            }
            _ => RowOrder::Same,
        }
    }

    /// The rows of each part; `None` for a single one, which has all.
    pub(crate) fn projections(&self) -> Vec<Option<Projection>> {
        let of: u32 = self.parts.iter().map(|(share, _)| share).sum();
        match self.rows {
            Rows::Grouped => [Projection::Query, Projection::Key, Projection::Value].map(Some).to_vec(),
            _ if self.parts.len() == 1 => vec![None],
            _ => {
                let firsts = self.parts.iter().scan(0, |next, (count, _)| {
                    *next += count;
                    Some((*next - count, *count))
                });
                firsts.map(|(first, count)| Some(Projection::Parts { first, count, of })).collect()
            }
        }
    }
}

/// Which side of a rule fits a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Whole,
    Part(usize),
}

/// The lines of all tables.
///
/// A large model has many names and there are many rules, so the rules are found by a name's first and last part.
pub(crate) struct Rules {
    all: Vec<Rule>,
    /// The table that each rule is from.
    tables: Vec<usize>,
    /// The rules' sides by what all names that fit have before the first dot and after the last. Empty: names differ there.
    index: HashMap<String, HashMap<String, Vec<(usize, Side)>>>,
}

/// The lines of all tables.
pub(crate) fn rules() -> &'static Rules {
    static RULES: LazyLock<Rules> = LazyLock::new(|| {
        let parse = |table: &&str| parse(table).unwrap_or_else(|error| unreachable!("{error}"));
        Rules::new(TABLES.iter().map(parse).collect())
    });
    &RULES
}

impl Rules {
    fn new(by_table: Vec<Vec<Rule>>) -> Rules {
        let tables = by_table.iter().enumerate().flat_map(|(table, rules)| rules.iter().map(move |_| table)).collect();
        let all: Vec<Rule> = by_table.into_iter().flatten().collect();
        let mut index: HashMap<String, HashMap<String, Vec<_>>> = HashMap::new();
        for (number, rule) in all.iter().enumerate() {
            let parts = rule.parts.iter().enumerate().map(|(place, (_, part))| (Side::Part(place), part));
            for (side, pattern) in [(Side::Whole, &rule.whole)].into_iter().chain(parts) {
                let first = index.entry(pattern.first_part().unwrap_or_default().to_owned()).or_default();
                first.entry(pattern.last_part().unwrap_or_default().to_owned()).or_default().push((number, side));
            }
        }
        Rules { all, tables, index }
    }

    /// The table that a rule is from, by the rule's number; `None` if there is no such rule.
    pub(crate) fn table(&self, rule: usize) -> Option<usize> {
        self.tables.get(rule).copied()
    }

    /// The rules with a side that fits `name`, with their numbers.
    pub(crate) fn fitting<'n>(&self, name: &'n str) -> impl Iterator<Item = (usize, &Rule, Side, Captured<'n>)> {
        let first = name.split('.').next().unwrap_or(name);
        let last = name.rsplit('.').next().unwrap_or(name);
        let of_first = [first, ""].into_iter().filter_map(|first| self.index.get(first));
        let sides = of_first.flat_map(move |by_last| [last, ""].into_iter().filter_map(|last| by_last.get(last)));
        sides.flatten().filter_map(move |&(number, side)| {
            let rule = &self.all[number];
            let pattern = match side {
                Side::Whole => &rule.whole,
                Side::Part(place) => &rule.parts[place].1,
            };
            Some((number, rule, side, pattern.captures(name)?))
        })
    }
}

fn parse(table: &str) -> Result<Vec<Rule>, String> {
    let lines = || table.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let mut sections: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut section = None;
    for line in lines() {
        if let Some(inner) = line.strip_prefix("    ") {
            let section = section.ok_or("an indented line without a section")?;
            sections.entry(section).or_default().push(inner);
        } else {
            section = line.starts_with('<').then(|| line.trim());
        }
    }
    let mut rules = Vec::new();
    for line in lines().filter(|line| !line.starts_with([' ', '<'])) {
        let Some(name) = sections.keys().find(|name| line.contains(**name)) else {
            rules.push(rule(line)?);
            continue;
        };
        let outer = line
            .split_once('=')
            .and_then(|(left, right)| Some((left.trim().strip_suffix(name)?, right.trim().strip_suffix(name)?)));
        let (left, right) = outer.ok_or_else(|| format!("`{line}` does not end with {name} on both sides"))?;
        for inner in &sections[name] {
            let (whole, others) = inner.split_once('=').ok_or_else(|| format!("`{inner}` has no `=`"))?;
            let others: Vec<String> = others.split('+').map(|part| within(right, part.trim())).collect();
            rules.push(rule(&format!("{left}{} = {}", whole.trim(), others.join(" + ")))?);
        }
    }
    Ok(rules)
}

/// `part` with `outer` before its name.
fn within(outer: &str, part: &str) -> String {
    match part.split_once(' ').filter(|(first, _)| first.parse::<u32>().is_ok()) {
        Some((share, name)) => format!("{share} {outer}{name}"),
        None => format!("{outer}{part}"),
    }
}

fn rule(line: &str) -> Result<Rule, String> {
    let (names, rows) = match line.strip_suffix(')').and_then(|line| line.split_once('(')) {
        None => (line, Rows::Ordered(RowOrder::Same)),
        Some((names, rows)) => (names, how_rows_differ(rows)?),
    };
    let (whole, parts) = names.split_once('=').ok_or_else(|| format!("`{line}` has no `=`"))?;
    let whole = Pattern::parse(whole.trim())?;
    let part = |text: &str| {
        let text = text.trim();
        let (share, name) = text.split_once(' ').unwrap_or(("1", text));
        let pattern = Pattern::parse(name)?;
        if pattern.placeholders() != whole.placeholders() {
            return Err(format!("the sides of `{line}` have different placeholders"));
        }
        Ok((share.parse().map_err(|_| format!("`{share}` is no share of rows"))?, pattern))
    };
    let parts: Vec<_> = parts.split('+').map(part).collect::<Result<_, _>>()?;
    if rows == Rows::Grouped && parts.len() != 3 {
        return Err(format!("`{line}` has not three parts"));
    }
    Ok(Rule { whole, parts, rows })
}

fn how_rows_differ(text: &str) -> Result<Rows, String> {
    let order = match text {
        "halves swapped" => RowOrder::HalvesSwapped,
        "rotary queries" => RowOrder::RotaryHalved(Heads::Queries),
        "rotary keys" => RowOrder::RotaryHalved(Heads::Keys),
        "norm" => RowOrder::Shifted,
        "halves swapped if a pair" => return Ok(Rows::PairSwapped),
        "grouped" => return Ok(Rows::Grouped),
        other => return Err(format!("`{other}` does not say how rows differ")),
    };
    Ok(Rows::Ordered(order))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tables_are_read() {
        for table in TABLES {
            assert!(!parse(table).unwrap().is_empty());
        }
        assert!(rules().all.len() > 250, "{}", rules().all.len());
    }

    #[test]
    fn sections_shares_and_orders_are_read() {
        let table = "# comment\na.{}.<x> = b.{}.<x>\n\n<x>\n    qkv = q + 2 kv\n    o = p (halves swapped)\n    m = n (halves swapped if a pair)\n    f = q + k + v (grouped)\n";
        let rules = parse(table).unwrap();
        let pattern = |text| Pattern::parse(text).unwrap();
        assert_eq!(rules[0].whole, pattern("a.{}.qkv"));
        assert_eq!(rules[0].parts, [(1, pattern("b.{}.q")), (2, pattern("b.{}.kv"))]);
        let parts = |first, count| Some(Projection::Parts { first, count, of: 3 });
        assert_eq!(rules[0].projections(), [parts(0, 1), parts(1, 2)]);
        assert_eq!((rules[1].projections(), rules[1].order(None)), (vec![None], RowOrder::HalvesSwapped));
        let orders = [[4, 2], [12, 2]].map(|shape| rules[2].order(Some(&shape)));
        assert_eq!(orders, [RowOrder::HalvesSwapped, RowOrder::Same]);
        assert_eq!(rules[3].projections(), [Projection::Query, Projection::Key, Projection::Value].map(Some));
        for wrong in [
            "a",
            "a = b (upside down)",
            "a.{} = b",
            "    a = b",
            "a = two b",
            "a.<x> = b\n<x>\n    c = d",
            "a = b (grouped)",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rules_are_found_by_the_ends_of_a_name() {
        let table = "a.{}.q = b.{}\nc* = d.e.*\na.x = a.y\nf{}.g = h.{}.i";
        let rules = Rules::new(vec![parse(table).unwrap(), parse("k = l").unwrap()]);
        let fitting =
            |name: &str| -> Vec<_> { rules.fitting(name).map(|(number, _, side, _)| (number, side)).collect() };
        assert_eq!(fitting("a.3.q"), [(0, Side::Whole)]);
        assert_eq!(fitting("b.3"), [(0, Side::Part(0))]);
        assert_eq!(fitting("cow.moo"), [(1, Side::Whole)]);
        assert_eq!(fitting("d.e.f.g"), [(1, Side::Part(0))]);
        assert_eq!(fitting("a.y"), [(2, Side::Part(0))]);
        assert_eq!(fitting("f7.g"), [(3, Side::Whole)]);
        assert!(fitting("a.3.r").is_empty());
        assert_eq!(rules.fitting("l").map(|(number, ..)| rules.table(number)).collect::<Vec<_>>(), [Some(1)]);
    }
}
