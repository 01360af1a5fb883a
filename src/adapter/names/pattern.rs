//! Patterns of module names.

/// A name in which `{}` stands for a number and a last `*` for everything after it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pattern {
    /// The texts before, between and after the numbers.
    texts: Vec<String>,
    rest: bool,
}

/// The parts of a name that the placeholders of a pattern match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Captured<'n> {
    numbers: Vec<&'n str>,
    rest: &'n str,
}

impl Pattern {
    /// # Errors
    /// Says what is wrong: a `*` before the end, a brace on its own, a number whose end cannot be told.
    pub(crate) fn parse(text: &str) -> Result<Pattern, String> {
        let (text, rest) = text.strip_suffix('*').map_or((text, false), |text| (text, true));
        let texts: Vec<String> = text.split("{}").map(str::to_owned).collect();
        if let Some(odd) = text.replace("{}", "").chars().find(|c| "{}*".contains(*c)) {
            return Err(format!("`{odd}` in `{text}` is neither `{{}}` nor a last `*`"));
        }
        let unclear = |text: &String| text.starts_with(|c: char| c.is_ascii_digit());
        let between = texts.len().saturating_sub(2);
        if texts[1..].iter().any(unclear) || texts[1..].iter().take(between).any(String::is_empty) {
            return Err(format!("where a number of `{text}` ends cannot be told"));
        }
        Ok(Pattern { texts, rest })
    }

    /// The number of `{}`, and whether it ends with `*`. A name can be mapped between two patterns that agree in both.
    pub(crate) fn placeholders(&self) -> (usize, bool) {
        (self.texts.len() - 1, self.rest)
    }

    /// What all fitting names have before their first dot; `None` if they differ there.
    pub(crate) fn first_part(&self) -> Option<&str> {
        let text = &self.texts[0];
        let whole = self.texts.len() == 1 && !self.rest;
        text.split_once('.').map(|(first, _)| first).or(whole.then_some(text))
    }

    /// What all fitting names have after their last dot; `None` if they differ there.
    pub(crate) fn last_part(&self) -> Option<&str> {
        let text = self.texts.last().filter(|_| !self.rest)?;
        text.rsplit_once('.').map(|(_, last)| last).or((self.texts.len() == 1).then_some(text))
    }

    pub(crate) fn captures<'n>(&self, name: &'n str) -> Option<Captured<'n>> {
        let mut rest = name.strip_prefix(self.texts[0].as_str())?;
        let mut numbers = Vec::new();
        for text in &self.texts[1..] {
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            if end == 0 {
                return None;
            }
            numbers.push(&rest[..end]);
            rest = rest[end..].strip_prefix(text.as_str())?;
        }
        (self.rest || rest.is_empty()).then_some(Captured { numbers, rest })
    }

    /// The name with `captured` in place of the placeholders.
    pub(crate) fn fill(&self, captured: &Captured<'_>) -> String {
        let mut name = self.texts[0].clone();
        for (number, text) in captured.numbers.iter().zip(&self.texts[1..]) {
            name.push_str(number);
            name.push_str(text);
        }
        if self.rest {
            name.push_str(captured.rest);
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carried(from: &str, to: &str, name: &str) -> Option<String> {
        let (from, to) = (Pattern::parse(from).unwrap(), Pattern::parse(to).unwrap());
        from.captures(name).map(|captured| to.fill(&captured))
    }

    #[test]
    fn names_are_carried_from_pattern_to_pattern() {
        assert_eq!(carried("a.{}.q", "b_{}_x.{}", "a.12.q"), Some("b_12_x.".into()));
        assert_eq!(carried("a.{}.{}.*", "{}-{}:*", "a.1.2.c.d"), Some("1-2:c.d".into()));
        assert_eq!(carried("a*", "b*", "a"), Some("b".into()));
        for other in ["a.x.q", "a..q", "a.1.qq", "b.1.q", ""] {
            assert_eq!(carried("a.{}.q", "b", other), None, "{other}");
        }
    }

    #[test]
    fn the_parts_that_all_fitting_names_have_are_told() {
        let parts = |text: &str| {
            let pattern = Pattern::parse(text).unwrap();
            (pattern.first_part().map(str::to_owned), pattern.last_part().map(str::to_owned))
        };
        let some = |part: &str| Some(part.to_owned());
        assert_eq!(parts("a.{}.b"), (some("a"), some("b")));
        assert_eq!(parts("a"), (some("a"), some("a")));
        assert_eq!(parts("a.b*"), (some("a"), None));
        assert_eq!(parts("a*"), (None, None));
        assert_eq!(parts("a{}.b.{}"), (None, None));
        assert_eq!(parts("{}.b_{}_c"), (None, None));
    }

    #[test]
    fn patterns_without_one_meaning_are_refused() {
        for text in ["a*b", "{a}", "a{", "}", "{}{}", "{}0", "**"] {
            assert!(Pattern::parse(text).is_err(), "{text}");
        }
        assert_eq!(Pattern::parse("{}.a.{}*").unwrap().placeholders(), (2, true));
    }
}
