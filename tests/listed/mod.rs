//! Lists of real keys: `tests/data/names/*.txt`.

use std::ops::Range;
use std::path::Path;

use tensor_offload::Checkpoint;
use tensor_offload::adapter::RotaryRows;

use crate::reference::{Tensor, f32s, file, floats};

/// A tensor, and which of its rows where that is said.
pub(crate) type Wanted = (String, Option<Range<u64>>);

/// One list.
pub(crate) struct Case {
    pub(crate) base: Checkpoint,
    pub(crate) rotary: Option<RotaryRows>,
    pub(crate) keys: Vec<Listed>,
}

/// One key of a list.
pub(crate) struct Listed {
    pub(crate) key: String,
    /// Its targets, with the rows that are named.
    pub(crate) wanted: Vec<Wanted>,
    halves_swapped: bool,
}

impl Case {
    fn shape(&self, tensor: &str) -> &[u64] {
        let id = self.base.find(tensor).unwrap_or_else(|| panic!("no tensor `{tensor}`"));
        &self.base.layout().tensor(id).unwrap().shape
    }

    /// How many rows of a tensor a key changes.
    fn rows(&self, (tensor, rows): &Wanted) -> u64 {
        rows.as_ref().map_or(self.shape(tensor)[0], |rows| rows.end - rows.start)
    }

    /// The shape of the adapter's change.
    pub(crate) fn change(&self, listed: &Listed) -> Vec<u64> {
        let mut shape = self.shape(&listed.wanted[0].0).to_vec();
        shape[0] = listed.wanted.iter().map(|wanted| self.rows(wanted)).sum();
        shape
    }
}

pub(crate) fn read(path: &Path) -> Case {
    let text = std::fs::read_to_string(path).unwrap();
    let (mut tensors, mut keys, mut rotary, mut section) = (Vec::new(), Vec::new(), None, "");
    let number = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{}: {text}", path.display()));
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(heads) = line.strip_prefix("[rotary ").and_then(|rest| rest.strip_suffix(']')) {
            let (heads, kv_heads) = heads.split_once(' ').unwrap();
            rotary = Some(RotaryRows::Paired { heads: number(heads) as usize, kv_heads: number(kv_heads) as usize });
        } else if line.starts_with('[') {
            section = line;
        } else if section == "[checkpoint]" {
            let (name, shape) = line.split_once(' ').unwrap();
            let shape: Vec<u64> = shape.split('x').map(number).collect();
            tensors.push(f32s(name, &shape, &vec![0.0; shape.iter().product::<u64>() as usize]));
        } else {
            let (key, targets) = line.split_once(" -> ").unwrap();
            let swapped = targets.strip_suffix(" (halves swapped)");
            let target = |target: &str| match target.split_once(' ') {
                None => (target.to_owned(), None),
                Some((name, rows)) => {
                    let (start, end) = rows.split_once("..").unwrap();
                    (name.to_owned(), Some(number(start)..number(end)))
                }
            };
            let wanted = swapped.unwrap_or(targets).split(" + ").map(target).collect();
            keys.push(Listed { key: key.to_owned(), wanted, halves_swapped: swapped.is_some() });
        }
    }
    Case { base: file("model", &tensors), rotary, keys }
}

/// The key of the other factor, if this is a factor's.
fn counterpart(key: &str) -> Option<String> {
    let ends = [
        ("lora_A.weight", "lora_B.weight"),
        ("lora_A.default.weight", "lora_B.default.weight"),
        ("lora_down.weight", "lora_up.weight"),
        (".lora_A", ".lora_B"),
        (".down.weight", ".up.weight"),
    ];
    ends.into_iter().find_map(|(down, up)| Some(format!("{}{up}", key.strip_suffix(down)?)))
}

/// The adapter's tensors of one key, for a change of this shape. Factors make row `n` of it `n + 1` everywhere.
pub(crate) fn tensors(key: &str, shape: &[u64]) -> Vec<Tensor> {
    let filled = |key: &str, shape: &[u64]| f32s(key, shape, &vec![1.0; shape.iter().product::<u64>() as usize]);
    if [".diff", ".w_norm", ".diff_b", ".lora_B.bias"].iter().any(|ending| key.ends_with(ending)) {
        return vec![filled(key, shape)];
    }
    let (rows, mut inner) = (shape[0], shape.to_vec());
    if key.ends_with("lora_embedding_A") {
        return vec![filled(key, &[1, rows]), filled(&key.replace("embedding_A", "embedding_B"), &[shape[1], 1])];
    }
    let up = counterpart(key).unwrap_or_else(|| panic!("{key} is of no known kind"));
    let mut outer = vec![rows, 1];
    outer.extend(vec![1; shape.len() - 2]);
    inner[0] = 1;
    let numbers: Vec<f32> = (1..=rows).map(|row| row as f32).collect();
    vec![filled(key, &inner), f32s(&up, &outer, &numbers)]
}

/// The first column of what a key changes, in the order of its targets.
fn changed_rows(case: &Case, listed: &Listed, merged: &[Tensor]) -> Vec<f32> {
    let column = |(name, rows): &Wanted| -> Vec<f32> {
        let (_, dtype, shape, bytes) = merged.iter().find(|tensor| tensor.0 == *name).unwrap();
        let column: Vec<f32> =
            floats(*dtype, bytes).into_iter().step_by(shape[1..].iter().product::<u64>() as usize).collect();
        let rows = rows.clone().unwrap_or(0..case.shape(name)[0]);
        column[rows.start as usize..rows.end as usize].to_vec()
    };
    listed.wanted.iter().flat_map(column).collect()
}

/// Why a key's factors are not where they have to be.
pub(crate) fn misplaced(case: &Case, listed: &Listed, merged: &[Tensor]) -> Option<String> {
    // Where rows and columns are swapped, or the heads' rows, other tests say what comes out.
    let elsewhere = case.rotary.is_some() || listed.wanted.iter().any(|(name, _)| name.ends_with("text_projection"));
    if counterpart(&listed.key).is_none() || elsewhere {
        return None;
    }
    let mut wanted: Vec<f32> = (1..=case.change(listed)[0]).map(|row| row as f32).collect();
    if listed.halves_swapped {
        let half = wanted.len() / 2;
        wanted.rotate_left(half);
    }
    let got = changed_rows(case, listed, merged);
    (got != wanted).then(|| format!("rows {got:?} instead of {wanted:?}"))
}

/// The keys in groups. Keys that mean the same rows cannot stand in one adapter.
pub(crate) fn dealt(case: &Case) -> Vec<Vec<&Listed>> {
    let meet = |(tensor, rows): &Wanted, (other, theirs): &Wanted| {
        let apart = |a: &Range<u64>, b: &Range<u64>| a.end <= b.start || b.end <= a.start;
        tensor == other && !rows.as_ref().zip(theirs.as_ref()).is_some_and(|(rows, theirs)| apart(rows, theirs))
    };
    let overlap = |a: &Listed, b: &Listed| a.wanted.iter().any(|a| b.wanted.iter().any(|b| meet(a, b)));
    let mut groups: Vec<Vec<&Listed>> = Vec::new();
    for listed in &case.keys {
        match groups.iter_mut().find(|group| !group.iter().any(|other| overlap(listed, other))) {
            Some(group) => group.push(listed),
            None => groups.push(vec![listed]),
        }
    }
    groups
}
