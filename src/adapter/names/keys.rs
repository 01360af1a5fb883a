//! What the name of an adapter's tensor says: which module it is for, and which part of the adapter it is.

use std::borrow::Cow;

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
    /// mlx-lm's factors, which are transposed.
    MlxUp,
    MlxDown,
    /// mlx-lm's DoRA magnitude.
    MlxMagnitude,
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
    /// PEFT's OFT: the upper triangles of blocks that rotate the columns.
    OftRotation,
    /// PEFT's BOFT: blocks that rotate the columns, factor by factor.
    BoftRotation,
    /// PEFT's BOFT: what multiplies the rows.
    BoftScale,
    /// PEFT's (IA)^3: what multiplies the rows or the columns.
    Ia3,
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
    Part(Cow<'a, str>, Part),
    /// A part of a kind that is known by name only.
    Unsupported(&'static str),
    /// Nothing known.
    Unknown,
}

/// Endings of the factors that stand in folders with a configuration, too.
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
    (".lora_B.weight", Part::Up),
    (".lora_A.weight", Part::Down),
    (".lora_B.bias", Part::UpBias),
    (".lora_B", Part::Up),
    (".lora_A", Part::Down),
    (".lora_embedding_B", Part::EmbeddingUp),
    (".lora_embedding_A", Part::EmbeddingDown),
    (".lora_magnitude_vector", Part::Magnitude),
    (".lora_magnitude_vector.weight", Part::Magnitude),
    (".lora_b", Part::MlxUp),
    (".lora_a", Part::MlxDown),
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
    (".oft_R.weight", Part::OftRotation),
    (".boft_R", Part::BoftRotation),
    (".boft_s", Part::BoftScale),
    (".ia3_l", Part::Ia3),
];

/// Endings of what goes with factors where there is no configuration, and of the kinds that have none.
const OTHERS: &[(&str, Part)] = &[
    (".alpha", Part::Alpha),
    (".dora_scale", Part::DoraScale),
    (".reshape_weight", Part::ReshapeWeight),
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
    (".oft_R", "OFT of PEFT before 0.16"),
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
    find(name, FACTORS.iter().chain(OTHERS))
        .or_else(|| modulation(name))
        .or_else(|| xlabs(name))
        .unwrap_or_else(|| unsupported(name))
}

/// Reads a name of a PEFT folder, where every tensor that is no factor takes the place of one of the model's.
pub(crate) fn parse_peft(name: &str) -> Key<'_> {
    // PEFT has its alpha in the configuration; other programs' files may come with one.
    if let Some(key) = find(name, FACTORS.iter().chain(&[(".alpha", Part::Alpha)])) {
        return key;
    }
    match unsupported(name) {
        Key::Unsupported(kind) => Key::Unsupported(kind),
        _ => whole(name),
    }
}

/// Reads a name of a GGUF file (llama.cpp, `convert_lora_to_gguf.py`), whose factors stand as PEFT's do. Those of a token embedding
/// do not.
pub(crate) fn parse_gguf(name: &str) -> Key<'_> {
    const ENDINGS: &[(&str, Part)] = &[(".weight.lora_b", Part::Up), (".weight.lora_a", Part::Down)];
    match find(name, ENDINGS.iter()) {
        Some(Key::Part(module, _)) if module == "token_embd" => {
            Key::Unsupported("LoRA of a token embedding in a GGUF file")
        }
        Some(key) => key,
        None if name.contains("_norm.") => whole(name),
        None => Key::Unknown,
    }
}

/// Reads a name of an mlx-lm folder.
pub(crate) fn parse_mlx(name: &str) -> Key<'_> {
    const ENDINGS: &[(&str, Part)] =
        &[(".lora_b", Part::MlxUp), (".lora_a", Part::MlxDown), (".m", Part::MlxMagnitude)];
    find(name, ENDINGS.iter()).unwrap_or_else(|| whole(name))
}

/// Reads the name of a tensor that takes the place of one of the model's. PEFT saves the weight beneath an embedding's factors,
/// too; it comes before them.
pub(crate) fn whole(name: &str) -> Key<'_> {
    let (module, part) = match name.rsplit_once('.') {
        Some((module, "weight")) => (module, Part::NewWeight),
        Some((module, "bias")) => (module, Part::NewBias),
        _ => (name, Part::NewWeight),
    };
    Key::Part(Cow::Borrowed(module.strip_suffix(".base_layer").unwrap_or(module)), part)
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

fn find<'a, 'b>(name: &'a str, endings: impl Iterator<Item = &'b (&'static str, Part)> + Clone) -> Option<Key<'a>> {
    let exact = |name: &str| endings.clone().find_map(|&(ending, part)| Some((name.strip_suffix(ending)?.len(), part)));
    let (length, part) = exact(name).or_else(|| exact(&without_adapter_name(name)?))?;
    Some(Key::Part(Cow::Borrowed(&name[..length]), part))
}

/// PEFT's keys with the name that a program gave to the adapter. It stands behind a module (`X.lora_A.NAME.weight`) or a
/// parameter (`X.lora_embedding_A.NAME`).
fn without_adapter_name(name: &str) -> Option<String> {
    const MODULES: [&str; 4] = ["lora_A", "lora_B", "lora_magnitude_vector", "oft_R"];
    const PARAMETERS: [&str; 5] = ["lora_embedding_", "hada_", "lokr_", "boft_", "ia3_l"];
    let (start, last) = name.rsplit_once('.')?;
    let (before, middle) = start.rsplit_once('.')?;
    if PARAMETERS.iter().any(|parameter| middle.starts_with(parameter)) {
        return Some(start.to_owned());
    }
    let of_module = before.rsplit_once('.').is_some_and(|(_, factor)| MODULES.contains(&factor));
    (of_module && (last == "weight" || last == "bias")).then(|| format!("{before}.{last}"))
}

/// A change of the modulation table of a block or head, which has no module's name of its own: `blocks.0.diff_m`.
fn modulation(name: &str) -> Option<Key<'_>> {
    let module = name.strip_suffix(".diff_m")?;
    let separator = if module.contains('.') || !module.contains('_') { '.' } else { '_' };
    Some(Key::Part(Cow::Owned(format!("{module}{separator}modulation")), Part::Diff))
}

/// XLabs' names for Flux, `processor.qkv_lora1.down.weight`: the number is for images or for text, so it belongs to the
/// module.
fn xlabs(name: &str) -> Option<Key<'_>> {
    const ENDINGS: [(&str, Part); 2] = [(".up.weight", Part::Up), (".down.weight", Part::Down)];
    let (module, part) = ENDINGS.iter().find_map(|(ending, part)| Some((name.strip_suffix(ending)?, *part)))?;
    (module.ends_with("_lora1") || module.ends_with("_lora2")).then_some(Key::Part(Cow::Borrowed(module), part))
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
            assert_eq!(parse(&format!("blocks.0.q{up}")), Key::Part("blocks.0.q".into(), Part::Up));
            assert_eq!(parse(&format!("blocks.0.q{down}")), Key::Part("blocks.0.q".into(), Part::Down));
        }
    }

    #[test]
    fn a_peft_folder_replaces_what_is_no_factor() {
        assert_eq!(parse_peft("model.norm.weight"), Key::Part("model.norm".into(), Part::NewWeight));
        assert_eq!(parse_peft("q.bias"), Key::Part("q".into(), Part::NewBias));
        assert_eq!(parse_peft("q.lora_A.weight"), Key::Part("q".into(), Part::Down));
        assert_eq!(parse("model.norm.weight"), Key::Unknown);
        assert_eq!(parse("a.processor.proj_lora2.up.weight"), Key::Part("a.processor.proj_lora2".into(), Part::Up));
        assert_eq!(parse("mlp.up.weight"), Key::Unknown);
        assert_eq!(parse("q.on_input"), Key::Unsupported("(IA)^3"));
    }
}
