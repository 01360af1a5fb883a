//! How the texts of byte-level BPE are split before pairs are merged, by the names that GGUF files have for it.
//!
//! The names, and what belongs to each, are those of llama.cpp, `src/llama-vocab.cpp`; the patterns are those of the models' own
//! `tokenizer.json`, as that file quotes them.

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";

/// How a text is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Splits {
    /// What is cut out, one pattern after another of what the ones before have left.
    pub(crate) patterns: &'static [&'static str],
    /// Whether a word that is a token as a whole is that token, whatever pairs would give.
    pub(crate) whole_words: bool,
    /// Whether texts begin with the first token where the file does not say.
    pub(crate) begins: bool,
    /// Whether characters are composed before (NFC).
    pub(crate) composed: bool,
}

const fn by(patterns: &'static [&'static str]) -> Splits {
    Splits { patterns, whole_words: false, begins: false, composed: false }
}

/// What a name of `tokenizer.ggml.pre` stands for; `None` for one that is not here.
pub(crate) fn named(name: &str) -> Option<Splits> {
    Some(match name {
        "default" => by(&[r"[\p{P}$+<=>^~|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            Splits { whole_words: true, begins: true, ..by(&[LLAMA_3]) }
        }
        "smaug-bpe" | "dbrx" => by(&[LLAMA_3]),
        "qwen2" => Splits { composed: true, ..by(&[QWEN_2]) },
        "deepseek-r1-qwen" | "megrez" | "kormo" | "stablelm2" | "hunyuan" | "solar-open" => by(&[QWEN_2]),
        "gpt-2" | "phi-2" | "gigachat" | "a.x-4.0" | "mellum" | "exaone4" | "mpt" | "olmo" | "jais" | "trillion"
        | "granite-docling" => by(&[GPT_2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            by(&[DIGIT, GPT_2])
        }
        "tekken" => Splits { whole_words: true, begins: true, ..by(&[TEKKEN]) },
        "gpt-4o" | "llama4" | "kanana2" => by(&[GPT_4O]),
        "deepseek-coder" => by(&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\u{d7ff}]+", DIGIT]),
        "deepseek-v3" => by(&[
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ]),
        "poro-chat" | "bloom" | "gpt3-finnish" => by(&[" ?[^(\\s|.,!?…。，、।۔،)]+"]),
        "viking" => by(&[" ?[^(\\s|.,!?…。，、।۔،)]+", DIGIT]),
        _ => return None,
    })
}
