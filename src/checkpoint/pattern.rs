//! Names of modules, in which `*` stands for any run of characters.

use std::collections::HashMap;

use super::{Layout, TensorId};

/// A pattern of a layout's module names.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    text: String,
    /// Whether it stands for the parts of a name as well: it has no `*`, and is not the whole name of a module.
    of_parts: bool,
}

impl Pattern {
    pub(crate) fn new(text: String, layout: &Layout) -> Pattern {
        let of_parts = !text.contains('*') && !layout.modules().iter().any(|module| module.name == text);
        Pattern { text, of_parts }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern matches a module's name: `*.mlp.*` and `experts` match `layers.0.mlp.experts.3`.
    pub(crate) fn matches(&self, name: &str) -> bool {
        match self.of_parts {
            true => has_parts(name, &self.text),
            false => matches(&self.text, name),
        }
    }

    /// The tensors of the modules that the pattern matches, and those whose own names it matches: `*.bias`, or the whole name of a
    /// tensor, which then stands for that one.
    pub(crate) fn tensors(&self, layout: &Layout) -> Vec<TensorId> {
        if let Some(tensor) = layout.find(&self.text) {
            return vec![tensor];
        }
        layout.tensor_ids().filter(|&tensor| self.names(tensor, layout)).collect()
    }

    /// Whether the pattern matches the name of a tensor or of its module.
    fn names(&self, tensor: TensorId, layout: &Layout) -> bool {
        let of_module = layout.module_of(tensor).is_some_and(|module| self.matches(&layout.at(module).name));
        of_module || self.matches(&layout.at(tensor).name)
    }
}

/// The tensors of a layout, those whose names differ in numbers alone together: layers and experts by the thousand.
pub(crate) struct Alike(HashMap<String, Vec<TensorId>>);

impl Alike {
    pub(crate) fn new(layout: &Layout) -> Alike {
        let mut alike: HashMap<String, Vec<TensorId>> = HashMap::new();
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        for (tensor, info) in layout.tensor_ids().zip(layout.tensors()) {
            let parts: Vec<&str> = info.name.split('.').map(|part| if is_number(part) { "0" } else { part }).collect();
            alike.entry(parts.join(".")).or_default().push(tensor);
        }
        Alike(alike)
    }

    /// As [`Pattern::tensors`], in no order, in less time for many tensors.
    pub(crate) fn tensors(&self, pattern: &Pattern, layout: &Layout) -> Vec<TensorId> {
        // A number in a pattern tells them apart, and the whole name of a tensor stands for that one.
        if pattern.text.bytes().any(|byte| byte.is_ascii_digit()) || layout.find(&pattern.text).is_some() {
            return pattern.tensors(layout);
        }
        let like = |tensors: &&Vec<TensorId>| tensors.first().is_some_and(|&first| pattern.names(first, layout));
        self.0.values().filter(like).flatten().copied().collect()
    }
}

/// Whether `parts`, one or several, are parts of `name` that follow each other, between its dots.
fn has_parts(name: &str, parts: &str) -> bool {
    // Most names do not have them at all.
    if !name.contains(parts) {
        return false;
    }
    let (name, parts): (Vec<&str>, Vec<&str>) = (name.split('.').collect(), parts.split('.').collect());
    name.windows(parts.len()).any(|run| run == parts)
}

/// Whether `name` matches `pattern`.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(head) else { return false };
    let (middle, tail) = rest.rsplit_once('*').unwrap_or(("", rest));
    match name.strip_suffix(tail) {
        Some(without_tail) => name = without_tail,
        None => return false,
    }
    middle.split('*').all(|part| match name.find(part) {
        Some(at) => {
            name = &name[at + part.len()..];
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::dtype::DType;

    #[test]
    fn a_star_stands_for_any_run() {
        for (pattern, name) in [
            ("lm_head", "lm_head"),
            ("*", ""),
            ("*", "anything"),
            ("model.layers.1.*", "model.layers.1.mlp"),
            ("*.norm", "a.norm"),
            ("a*b*c", "aXbYc"),
            ("a*b*c", "abbbc"),
            ("*.experts.*", "l.0.experts.3.up"),
            ("**", "x"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("lm_head", "lm_head2"),
            ("a*a", "a"),
            ("a*b*c", "acb"),
            ("model.layers.1.*", "model.layers.10.mlp"),
            ("", "x"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn tensors_are_found_by_their_modules_and_by_their_own_names() {
        let named = |name: &&str| TensorInfo::new(*name, DType::F32, &[1], 0, 0).unwrap();
        let names = ["a.q.weight", "a.q.bias", "b.a.q.weight", "a.q_norm.weight", "table"];
        let layout = Layout::new(names.iter().map(named).collect());
        for (pattern, wanted) in [
            ("a.q", &[0usize, 1][..]),
            ("q", &[0, 1, 2]),
            ("a.q.weight", &[0]),
            ("*.bias", &[1]),
            ("weight", &[0, 2, 3]),
            ("a.*", &[0, 1, 3]),
            ("table", &[4]),
            ("*", &[0, 1, 2, 3, 4]),
            ("norm", &[]),
        ] {
            let found = Pattern::new(pattern.to_owned(), &layout).tensors(&layout);
            assert_eq!(found.iter().map(|tensor| tensor.index()).collect::<Vec<_>>(), wanted, "{pattern}");
        }
    }

    #[test]
    fn tensors_that_differ_in_numbers_are_found_together() {
        let named = |name: &str| TensorInfo::new(name, DType::F32, &[1], 0, 0).unwrap();
        let names =
            ["a.0.q.weight", "a.1.q.weight", "a.10.q.bias", "a.1.w1.weight", "a.2.w1.weight", "q.weight", "a.0.0.x"];
        let layout = Layout::new(names.iter().map(|name| named(name)).collect());
        let alike = Alike::new(&layout);
        for pattern in
            ["q", "a", "a.1", "w1", "q.weight", "*.q", "a.*", "*.0.*", "*.bias", "weight", "a.0.q", "b", "*", "x"]
        {
            let pattern = Pattern::new(pattern.to_owned(), &layout);
            let mut found = alike.tensors(&pattern, &layout);
            found.sort_unstable();
            assert_eq!(found, pattern.tensors(&layout), "{}", pattern.text());
        }
    }

    #[test]
    fn without_a_star_a_pattern_is_a_name_or_a_part_of_names() {
        let layout = Layout::blocks([1, 1]);
        let whole = layout.modules()[0].name.clone();
        for (pattern, name, wanted) in [
            ("experts", "model.layers.0.mlp.experts.3.up_proj", true),
            ("mlp.experts", "model.layers.0.mlp.experts", true),
            ("experts.3", "model.layers.0.mlp.experts.3.up_proj", true),
            ("lm_head", "lm_head", true),
            ("experts", "model.layers.0.mlp.shared_experts.up_proj", false),
            ("layers.1", "model.layers.10.mlp", false),
            ("a.b.c", "b", false),
            ("", "x", false),
            ("*exps", "blk.0.ffn_up_exps", true),
            ("experts*", "model.layers.0.mlp.experts", false),
            // The name of a module stands for that one.
            (whole.as_str(), whole.as_str(), true),
            (whole.as_str(), &format!("other.{whole}"), false),
        ] {
            assert_eq!(Pattern::new(pattern.to_owned(), &layout).matches(name), wanted, "{pattern} {name}");
        }
    }
}
