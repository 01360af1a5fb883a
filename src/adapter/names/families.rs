//! What the modules of one family of models are called by different programs, from the tables in `families/`.
//!
//! A line of a table is `ONE = OTHER`, two patterns for one module ([`Pattern`]): `{}` is a number, and a last `*` the
//! rest of the name. `ONE = A + B + 4 C` says that one program's weight stacks in rows what another keeps apart, C with
//! four times the rows of A. `<block>` at the end of both patterns stands for each of the indented lines under a line
//! `<block>`. What is in parentheses at the end says how the order of the rows differs. `#` begins a comment.
//!
//! The facts are from diffusers (`loaders/lora_conversion_utils.py`, `loaders/single_file_utils.py`,
//! `scripts/convert_wan_to_diffusers.py`), ComfyUI (`comfy/lora.py`, `comfy/utils.py`), llama.cpp
//! (`gguf-py/gguf/tensor_mapping.py`) and transformers (`models/llama/convert_llama_weights_to_hf.py`).

use std::collections::HashMap;
use std::sync::LazyLock;

use super::pattern::Pattern;
use super::rows::{Heads, RowOrder};

const TABLES: &[&str] = &[
    include_str!("families/flux.txt"),
    include_str!("families/stable_diffusion_unet.txt"),
    include_str!("families/clip.txt"),
    include_str!("families/wan.txt"),
    include_str!("families/llama.txt"),
];

/// One line of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) whole: Pattern,
    /// What the other program calls it, or the parts that it keeps apart, with their shares of the rows.
    pub(crate) parts: Vec<(u32, Pattern)>,
    /// How a checkpoint in the left side's names orders its rows, compared with an adapter in the right side's.
    pub(crate) order: RowOrder,
}

/// The lines of all tables.
pub(crate) fn rules() -> &'static [Rule] {
    static RULES: LazyLock<Vec<Rule>> = LazyLock::new(|| {
        TABLES.iter().flat_map(|table| parse(table).unwrap_or_else(|error| unreachable!("{error}"))).collect()
    });
    &RULES
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
    let (names, order) = match line.strip_suffix(')').and_then(|line| line.split_once('(')) {
        None => (line, RowOrder::Same),
        Some((names, "halves swapped")) => (names, RowOrder::HalvesSwapped),
        Some((names, "rotary queries")) => (names, RowOrder::RotaryHalved(Heads::Queries)),
        Some((names, "rotary keys")) => (names, RowOrder::RotaryHalved(Heads::Keys)),
        Some((names, "norm")) => (names, RowOrder::Shifted),
        Some((_, other)) => return Err(format!("`{other}` is no order of rows")),
    };
    let (whole, parts) = names.split_once('=').ok_or_else(|| format!("`{line}` has no `=`"))?;
    let whole = Pattern::parse(whole.trim())?;
    let part = |text: &str| {
        let text = text.trim();
        let (share, name) = text.split_once(' ').unwrap_or(("1", text));
        let pattern = Pattern::parse(name)?;
        if pattern.holes() != whole.holes() {
            return Err(format!("the sides of `{line}` leave different things open"));
        }
        Ok((share.parse().map_err(|_| format!("`{share}` is no share of rows"))?, pattern))
    };
    let parts = parts.split('+').map(part).collect::<Result<_, _>>()?;
    Ok(Rule { whole, parts, order })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tables_are_read() {
        for table in TABLES {
            assert!(!parse(table).unwrap().is_empty());
        }
        assert!(rules().len() > 250, "{}", rules().len());
    }

    #[test]
    fn sections_shares_and_orders_are_read() {
        let table = "# comment\na.{}.<x> = b.{}.<x>\n\n<x>\n    qkv = q + 2 kv\n    o = p (halves swapped)\n";
        let rules = parse(table).unwrap();
        let pattern = |text| Pattern::parse(text).unwrap();
        assert_eq!(rules[0].whole, pattern("a.{}.qkv"));
        assert_eq!(rules[0].parts, [(1, pattern("b.{}.q")), (2, pattern("b.{}.kv"))]);
        assert_eq!((rules[1].parts.len(), rules[1].order), (1, RowOrder::HalvesSwapped));
        for wrong in ["a", "a = b (upside down)", "a.{} = b", "    a = b", "a = two b", "a.<x> = b\n<x>\n    c = d"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
