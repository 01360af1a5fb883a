//! Names with `*` for any run of characters.

/// Whether `name` matches `pattern`.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
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
    use super::matches;

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
}
