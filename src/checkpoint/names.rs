//! The structure in tensor names: a tensor's module, the module's layer and stack, and the layer's place in the order of
//! execution.

use std::cmp::Ordering;

/// A layer's place in the order of execution.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) rank: Rank,
    pub(super) stack: usize,
    pub(super) number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Rank {
    Embedding,
    Input,
    Stack,
    FinalNorm,
    Head,
}

impl Rank {
    /// The rank of a module outside any stack, by the words that models use for such modules.
    pub(super) fn of(name: &str) -> Rank {
        let name = name.to_ascii_lowercase();
        let has = |words: &[&str]| words.iter().any(|w| name.contains(w));
        let is = |words: &[&str]| name.split('.').any(|part| words.contains(&part));
        if has(&["embed_out", "lm_head", "proj_out", "logit", "classifier"]) || is(&["head", "output", "score", "out"])
        {
            Rank::Head
        } else if has(&["embed", "embd"]) || is(&["wte", "wpe", "shared"]) {
            Rank::Embedding
        } else if has(&["final"]) && !has(&["norm"]) && !is(&["ln_final"]) {
            Rank::Head
        } else if (has(&["norm"]) && !has(&["pre_layrnorm", "pre_layernorm", "pre_norm"])) || is(&["ln_f", "ln_final"])
        {
            Rank::FinalNorm
        } else {
            Rank::Input
        }
    }
}

/// The module that a tensor belongs to: its name without the parameter's own word.
pub(super) fn module_name(tensor: &str) -> &str {
    let Some((module, parameter)) = tensor.rsplit_once('.') else { return tensor };
    let parameter_word = ["weight", "bias", "scale"].iter().any(|w| parameter.contains(w))
        || ["gamma", "beta", "qzeros", "g_idx"].contains(&parameter);
    // `blocks.0.modulation` is a parameter of the layer itself, so a module of its own.
    if !parameter_word && numbered_prefix(module).is_some_and(|(_, _, prefix)| prefix == module) {
        return tensor;
    }
    match module.rsplit_once('.') {
        // Factors kept beside their weight.
        Some((base, "lora_A" | "lora_B" | "lora_up" | "lora_down" | "lora_mid")) => base,
        _ => module,
    }
}

/// The outermost number of a name: the stack before it, the number, and both together.
pub(super) fn numbered_prefix(name: &str) -> Option<(&str, u64, &str)> {
    let mut start = 0;
    for part in name.split('.') {
        let end = start + part.len();
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            let number = part.parse().ok()?;
            return Some((name[..start].trim_end_matches('.'), number, &name[..end]));
        }
        start = end + 1;
    }
    None
}

/// Whether a module of this name runs in a numbered layer.
pub(crate) fn is_in_stack(name: &str) -> bool {
    numbered_prefix(name).is_some()
}

/// The names that models give token embeddings.
pub(super) const TOKEN_TABLES: [&str; 7] =
    ["embed_tokens", "token_embd", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared"];

/// The names of other lookup tables: positions, token types, and what each layer adds for a token.
const OTHER_TABLES: [&str; 14] = [
    "token_embedding",
    "embed_tokens_per_layer",
    "per_layer_token_embd",
    "position_embeddings",
    "position_embedding",
    "positional_embedding",
    "embed_positions",
    "position_embd",
    "wpe",
    "token_type_embeddings",
    "token_types",
    "type_embeddings",
    "segment_embeddings",
    "embed_type",
];

/// Whether a module of this name is a table of which a network looks up rows.
pub(crate) fn is_table(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name).to_ascii_lowercase();
    TOKEN_TABLES.iter().chain(&OTHER_TABLES).any(|table| *table == last)
}

/// Whether the rows of such a module's weight are the words of a vocabulary: a token embedding, or the head of a language
/// model.
pub(crate) fn has_vocabulary_rows(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name).to_ascii_lowercase();
    TOKEN_TABLES.contains(&last.as_str()) || is_language_head(name)
}

/// Whether a module of this name is the head of a language model.
pub(crate) fn is_language_head(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    ["lm_head", "embed_out", "output"].iter().any(|head| last.eq_ignore_ascii_case(head))
}

/// Order of names with runs of digits compared as numbers.
pub(super) fn natural(a: &str, b: &str) -> Ordering {
    // Names have long beginnings in common. They go on where these end, at the start of a number that was cut.
    let common = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    let start = (0..=common).rev().find(|&at| a.is_char_boundary(at)).unwrap_or(0);
    let start = a[..start].trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let (mut a_rest, mut b_rest) = (&a[start..], &b[start..]);
    while let (Some(x), Some(y)) = (a_rest.chars().next(), b_rest.chars().next()) {
        if x.is_ascii_digit() && y.is_ascii_digit() {
            let split = |s: &str| s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
            let (n, m) = (&a_rest[..split(a_rest)], &b_rest[..split(b_rest)]);
            let (n_value, m_value) = (n.trim_start_matches('0'), m.trim_start_matches('0'));
            let order = n_value.len().cmp(&m_value.len()).then_with(|| n_value.cmp(m_value));
            if order != Ordering::Equal {
                return order;
            }
            (a_rest, b_rest) = (&a_rest[n.len()..], &b_rest[m.len()..]);
        } else if x != y {
            return x.cmp(&y);
        } else {
            (a_rest, b_rest) = (&a_rest[x.len_utf8()..], &b_rest[y.len_utf8()..]);
        }
    }
    a_rest.len().cmp(&b_rest.len()).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_outside_of_stacks_are_ranked_by_their_words() {
        for (rank, names) in [
            (
                Rank::Head,
                &[
                    "lm_head",
                    "embed_out",
                    "proj_out",
                    "logit_scale",
                    "classifier.0",
                    "cls.Head",
                    "model.output",
                    "score",
                    "unet.out",
                    "final_layer.linear",
                ][..],
            ),
            (
                Rank::Embedding,
                &["model.embed_tokens", "token_embd", "transformer.wte", "transformer.wpe", "shared", "final_embed"],
            ),
            (Rank::FinalNorm, &["model.norm", "final_layer_norm", "output_norm", "transformer.ln_f", "text.ln_final"]),
            (Rank::Input, &["img_in", "vision.pre_layrnorm", "pre_layernorm", "pre_norm", "headless", "wtes"]),
        ] {
            for name in names {
                assert_eq!(Rank::of(name), rank, "{name}");
            }
        }
    }

    #[test]
    fn a_module_is_a_name_without_its_parameter() {
        for (tensor, module) in [
            ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj"),
            ("blocks.0.weight", "blocks.0"),
            ("blocks.0.scale_weight", "blocks.0"),
            ("blocks.0.gamma", "blocks.0"),
            ("blocks.0.qzeros", "blocks.0"),
            ("blocks.0.modulation", "blocks.0.modulation"),
            ("blocks.0.attn.modulation", "blocks.0.attn"),
            ("scale", "scale"),
            ("q_proj.lora_A.weight", "q_proj"),
            ("q_proj.lora_mid.weight", "q_proj"),
            ("q_proj.lora_C.weight", "q_proj.lora_C"),
        ] {
            assert_eq!(module_name(tensor), module, "{tensor}");
        }
    }

    #[test]
    fn runs_of_digits_are_numbers() {
        let order = ["a", "a1", "a01", "a2", "a10", "a10b", "a99999999999999999999999", "ab", "b", "é1", "é2"];
        for (place, &one) in order.iter().enumerate() {
            for (other_place, &other) in order.iter().enumerate() {
                let wanted = match (one, other) {
                    // Of one number, more zeros come first: the text decides.
                    ("a1", "a01") => Ordering::Greater,
                    ("a01", "a1") => Ordering::Less,
                    _ => place.cmp(&other_place),
                };
                assert_eq!(natural(one, other), wanted, "{one} {other}");
            }
        }
    }
}
