//! Names of modules, in which `*` stands for any run of characters.

use crate::checkpoint::Layout;

/// A pattern of a layout's module names.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    text: String,
    /// Whether it stands for the parts of a name as well: it has no `*`, and is not the whole name of a module.
    of_parts: bool,
}

impl Pattern {
    pub(super) fn new(text: String, layout: &Layout) -> Pattern {
        let of_parts = !text.contains('*') && !layout.modules().iter().any(|module| module.name == text);
        Pattern { text, of_parts }
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern matches a module's name: `*.mlp.*` and `experts` match `layers.0.mlp.experts.3`.
    pub(super) fn matches(&self, name: &str) -> bool {
        match self.of_parts {
            true => has_parts(name, &self.text),
            false => matches(&self.text, name),
        }
    }
}

/// Whether `parts`, one or several, are parts of `name` that follow each other, between its dots.
fn has_parts(name: &str, parts: &str) -> bool {
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
