//! What the name of an adapter's tensor says: which module it is for, and which part of the adapter it is.

/// The role of one tensor of an adapter's module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Part {
    Up,
    Down,
    Mid,
    /// PEFT's embedding factors, which apply transposed.
    EmbeddingUp,
    EmbeddingDown,
    /// What PEFT's `lora_bias` adds to the bias.
    UpBias,
    Alpha,
    DoraScale,
    /// PEFT's DoRA magnitude, which follows another rule than `DoraScale`.
    Magnitude,
    ReshapeWeight,
    HadaW1A,
    HadaW1B,
    HadaW2A,
    HadaW2B,
    HadaT1,
    HadaT2,
    LokrW1,
    LokrW1A,
    LokrW1B,
    LokrW2,
    LokrW2A,
    LokrW2B,
    LokrT2,
    GloraA1,
    GloraA2,
    GloraB1,
    GloraB2,
    OftBlocks,
    Diff,
    DiffBias,
    NormDiff,
    NormDiffBias,
    SetWeight,
    /// A whole tensor that takes the place of the module's weight, or of its bias.
    NewWeight,
    NewBias,
}

impl Part {
    /// Whether it changes the bias and not the weight.
    pub(crate) fn is_of_bias(self) -> bool {
        matches!(self, Part::DiffBias | Part::NormDiffBias | Part::UpBias | Part::NewBias)
    }

    /// Whether it takes the place of the module's weight.
    pub(crate) fn is_whole(self) -> bool {
        matches!(self, Part::SetWeight | Part::NewWeight)
    }
}

/// The reading of one tensor's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Key<'a> {
    /// A part of a known kind of adapter.
    Part(&'a str, Part),
    /// A part of a kind that is known by name only.
    Unsupported(&'static str),
    /// Nothing known.
    Unknown,
}

/// Endings of LoRA's factors.
const FACTORS: &[(&str, Part)] = &[
    (".lora_up.weight", Part::Up),
    (".lora_down.weight", Part::Down),
    (".lora_mid.weight", Part::Mid),
    ("_lora.up.weight", Part::Up),
    ("_lora.down.weight", Part::Down),
    (".lora.up.weight", Part::Up),
    (".lora.down.weight", Part::Down),
    (".lora_linear_layer.up.weight", Part::Up),
    (".lora_linear_layer.down.weight", Part::Down),
    (".lora_B.default.weight", Part::Up),
    (".lora_A.default.weight", Part::Down),
    (".lora_B.default.bias", Part::UpBias),
    (".lora_B.weight", Part::Up),
    (".lora_A.weight", Part::Down),
    (".lora_B.bias", Part::UpBias),
    (".lora_B", Part::Up),
    (".lora_A", Part::Down),
    (".lora_embedding_B", Part::EmbeddingUp),
    (".lora_embedding_A", Part::EmbeddingDown),
    (".lora_embedding_B.default", Part::EmbeddingUp),
    (".lora_embedding_A.default", Part::EmbeddingDown),
    (".lora_magnitude_vector", Part::Magnitude),
    (".lora_magnitude_vector.weight", Part::Magnitude),
    (".lora_magnitude_vector.default.weight", Part::Magnitude),
];

/// Endings of what goes with factors where there is no configuration, and of the other kinds of adapters.
const OTHERS: &[(&str, Part)] = &[
    (".alpha", Part::Alpha),
    (".dora_scale", Part::DoraScale),
    (".reshape_weight", Part::ReshapeWeight),
    (".hada_w1_a", Part::HadaW1A),
    (".hada_w1_b", Part::HadaW1B),
    (".hada_w2_a", Part::HadaW2A),
    (".hada_w2_b", Part::HadaW2B),
    (".hada_t1", Part::HadaT1),
    (".hada_t2", Part::HadaT2),
    (".lokr_w1", Part::LokrW1),
    (".lokr_w1_a", Part::LokrW1A),
    (".lokr_w1_b", Part::LokrW1B),
    (".lokr_w2", Part::LokrW2),
    (".lokr_w2_a", Part::LokrW2A),
    (".lokr_w2_b", Part::LokrW2B),
    (".lokr_t2", Part::LokrT2),
    (".oft_blocks", Part::OftBlocks),
    (".diff", Part::Diff),
    (".diff_b", Part::DiffBias),
    (".w_norm", Part::NormDiff),
    (".b_norm", Part::NormDiffBias),
    (".set_weight", Part::SetWeight),
    (".a1.weight", Part::GloraA1),
    (".a2.weight", Part::GloraA2),
    (".b1.weight", Part::GloraB1),
    (".b2.weight", Part::GloraB2),
];

/// Endings that name a kind which is not applied.
const UNSUPPORTED: &[(&str, &str)] = &[
    (".on_input", "(IA)^3"),
    (".ia3_l", "(IA)^3"),
    (".boft_R", "BOFT"),
    (".boft_s", "BOFT"),
    (".oft_R", "PEFT's OFT"),
    (".oft_R.weight", "PEFT's OFT"),
    (".oft_diag", "diagonal OFT"),
    (".rescale", "OFT with a rescale"),
    (".vera_lambda_b", "VeRA"),
    (".vera_lambda_d", "VeRA"),
    (".hra_u", "HRA"),
    (".lokr_t1", "LoKr with lokr_t1"),
    (".bias_indices", "sparse bias"),
    (".bias_values", "sparse bias"),
    (".bias_size", "sparse bias"),
    (".trainable_tokens_delta", "trainable tokens"),
];

/// Reads a name of an adapter without configuration.
pub(crate) fn parse(name: &str) -> Key<'_> {
    find(name, FACTORS.iter().chain(OTHERS)).or_else(|| xlabs(name)).unwrap_or_else(|| unsupported(name))
}

/// Reads a name of a PEFT folder, where every tensor that is no factor takes the place of one of the model's.
pub(crate) fn parse_peft(name: &str) -> Key<'_> {
    if let Some(key) = find(name, FACTORS.iter()) {
        return key;
    }
    match (unsupported(name), name.rsplit_once('.')) {
        (Key::Unsupported(kind), _) => Key::Unsupported(kind),
        (_, Some((module, "weight"))) => Key::Part(module, Part::NewWeight),
        (_, Some((module, "bias"))) => Key::Part(module, Part::NewBias),
        _ => Key::Part(name, Part::NewWeight),
    }
}

/// The key that `part` of `module` would have, in the spelling of `beside`, the key of another part.
pub(crate) fn counterpart(beside: &str, module: &str, part: Part) -> String {
    const PAIRS: &[(&str, &str)] = &[("lora_up", "lora_down"), ("lora_B", "lora_A"), (".up.", ".down.")];
    let swapped = PAIRS.iter().find_map(|(up, down)| match part {
        Part::Down => beside.rfind(up).map(|at| format!("{}{down}{}", &beside[..at], &beside[at + up.len()..])),
        Part::Up => beside.rfind(down).map(|at| format!("{}{up}{}", &beside[..at], &beside[at + down.len()..])),
        _ => None,
    });
    let ending = FACTORS.iter().chain(OTHERS).find(|(_, p)| *p == part).map_or("", |(ending, _)| ending);
    swapped.unwrap_or_else(|| format!("{module}{ending}"))
}

fn find<'a, 'b>(name: &'a str, mut endings: impl Iterator<Item = &'b (&'static str, Part)>) -> Option<Key<'a>> {
    endings.find_map(|&(ending, part)| name.strip_suffix(ending).map(|module| Key::Part(module, part)))
}

/// XLabs' names for Flux, `processor.qkv_lora1.down.weight`: the number is for images or for text, so it belongs to the
/// module.
fn xlabs(name: &str) -> Option<Key<'_>> {
    const ENDINGS: [(&str, Part); 2] = [(".up.weight", Part::Up), (".down.weight", Part::Down)];
    let (module, part) = ENDINGS.iter().find_map(|(ending, part)| Some((name.strip_suffix(ending)?, *part)))?;
    (module.ends_with("_lora1") || module.ends_with("_lora2")).then_some(Key::Part(module, part))
}

fn unsupported(name: &str) -> Key<'_> {
    let known = UNSUPPORTED.iter().find(|(ending, _)| name.ends_with(ending));
    known.map_or(Key::Unknown, |&(_, kind)| Key::Unsupported(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_pair_is_read() {
        for (up, down) in [
            (".lora_up.weight", ".lora_down.weight"),
            ("_lora.up.weight", "_lora.down.weight"),
            (".lora_B.weight", ".lora_A.weight"),
            (".lora_B.default.weight", ".lora_A.default.weight"),
            (".lora.up.weight", ".lora.down.weight"),
            (".lora_B", ".lora_A"),
            (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"),
        ] {
            assert_eq!(parse(&format!("blocks.0.q{up}")), Key::Part("blocks.0.q", Part::Up));
            assert_eq!(parse(&format!("blocks.0.q{down}")), Key::Part("blocks.0.q", Part::Down));
        }
    }

    #[test]
    fn a_peft_folder_replaces_what_is_no_factor() {
        assert_eq!(parse_peft("model.norm.weight"), Key::Part("model.norm", Part::NewWeight));
        assert_eq!(parse_peft("q.bias"), Key::Part("q", Part::NewBias));
        assert_eq!(parse_peft("q.lora_A.weight"), Key::Part("q", Part::Down));
        assert_eq!(parse("model.norm.weight"), Key::Unknown);
        assert_eq!(parse("a.processor.proj_lora2.up.weight"), Key::Part("a.processor.proj_lora2", Part::Up));
        assert_eq!(parse("mlp.up.weight"), Key::Unknown);
        assert_eq!(parse("q.on_input"), Key::Unsupported("(IA)^3"));
    }
}
