//! The tokenizer that a GGUF file carries: byte-level BPE, with the splits of text that the file names, or SentencePiece's BPE.
//!
//! The keys are those of gguf-py, `gguf/constants.py`. What stands where a file says nothing is that of llama.cpp,
//! `src/llama-vocab.cpp`.

#[path = "gguf_splits.rs"]
mod splits;
#[path = "spm.rs"]
mod spm;

use std::collections::HashMap;

use candle_core::{Error, Result, bail};
use spm::{Spm, SpmTokenizer};
use tensor_offload::checkpoint::{Gguf, GgufArray, GgufValue};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, NormalizerWrapper, Tokenizer};

use super::generate::Tokens;

/// The types of tokens, of `llama_token_type` in llama.cpp's `include/llama.h`.
const UNKNOWN: i128 = 2;
const CONTROL: i128 = 3;
const USER_DEFINED: i128 = 4;
const BYTE: i128 = 6;

/// Marks that end a text or a turn, which files do not always name by a key; llama.cpp knows them by their texts, too.
const ENDS: [&str; 10] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<EOT>",
    "</s>",
];

/// What every error about a tokenizer ends with.
const INSTEAD: &str = "put the model's tokenizer.json beside the file";

/// The space of SentencePiece.
const SPACE: &str = "\u{2581}";

/// Builds the tokenizer of a file; `None` if it has none.
///
/// # Errors
/// A kind of tokenizer, or of splits, that is not here, and what is wrong with the file.
pub(crate) fn tokenizer(gguf: Gguf<'_>) -> Result<Option<Box<dyn Tokens>>> {
    let keys = Keys(gguf);
    match keys.text("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => Ok(None),
        Some("gpt2") => Ok(Some(Box::new(byte_level(&keys)?.into_inner()))),
        Some("llama") => Ok(Some(Box::new(sentence_piece(&keys)?))),
        Some(other) => bail!("the file's tokenizer is `{other}`, and `gpt2` and `llama` are here; {INSTEAD}"),
    }
}

/// The tokens that end a text.
///
/// # Errors
/// What is wrong with the file.
pub(crate) fn ends(gguf: Gguf<'_>) -> Result<Vec<u32>> {
    let keys = Keys(gguf);
    if keys.0.get("tokenizer.ggml.tokens").is_none() {
        return Ok(Vec::new());
    }
    let vocabulary = Vocabulary::read(&keys)?;
    let named = ["eos", "eot", "eom"].map(|name| keys.id(&format!("tokenizer.ggml.{name}_token_id"), &vocabulary));
    let mut ends: Vec<u32> = named.into_iter().filter_map(Result::transpose).collect::<Result<_>>()?;
    let mark = |id: &usize| ENDS.contains(&&*vocabulary.tokens[*id]) && vocabulary.kind(*id) == CONTROL;
    ends.extend((0..vocabulary.tokens.len()).filter(mark).filter_map(|id| u32::try_from(id).ok()));
    Ok(ends)
}

/// Byte-level BPE.
fn byte_level(keys: &Keys<'_>) -> Result<Tokenizer> {
    let Some(pre) = keys.text("tokenizer.ggml.pre")? else {
        bail!(
            "the file does not say how its tokenizer splits text (`tokenizer.ggml.pre`); {INSTEAD}, or convert it again"
        )
    };
    let Some(splits) = splits::named(pre) else {
        bail!("the file's tokenizer splits text as `{pre}`, which is not here; {INSTEAD}")
    };
    let vocabulary = Vocabulary::read(keys)?;
    let pair = |merge: String| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() => Ok((left.to_owned(), right.to_owned())),
        _ => Err(Error::msg(format!("the file's tokenizer has the merge `{merge}`, which is no pair; {INSTEAD}"))),
    };
    let merges = keys.texts("tokenizer.ggml.merges")?.into_iter().map(pair).collect::<Result<Vec<_>>>()?;
    let ids = vocabulary.tokens.iter().cloned().zip(0..);
    let bpe = BPE::builder().vocab_and_merges(ids.collect::<Vocab>(), merges).ignore_merges(splits.whole_words);
    let mut tokenizer = Tokenizer::new(bpe.build().map_err(wrong)?);
    if splits.composed {
        tokenizer.with_normalizer(Some(NFC)).map_err(wrong)?;
    }
    let split = |pattern: &&str| -> Result<PreTokenizerWrapper> {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(wrong)?.into())
    };
    let mut stages = splits.patterns.iter().map(split).collect::<Result<Vec<_>>>()?;
    stages.push(ByteLevel::new(false, true, false).into());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(stages))).with_decoder(Some(ByteLevel::default()));
    tokenizer.add_tokens(vocabulary.marks()).map_err(wrong)?;
    if let Some(template) = begin(keys, &vocabulary, splits.begins, None)? {
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

/// SentencePiece's BPE: spaces are characters, and each stretch of text between marks begins with one.
fn sentence_piece(keys: &Keys<'_>) -> Result<SpmTokenizer> {
    for key in ["tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.treat_whitespace_as_suffix"] {
        if keys.truth(key)? == Some(true) {
            bail!("the file's tokenizer has `{key}`, which is not here; {INSTEAD}");
        }
    }
    if keys
        .0
        .array("tokenizer.ggml.precompiled_charsmap")
        .transpose()
        .map_err(Error::wrap)?
        .is_some_and(|map| !map.is_empty())
    {
        bail!("the file's tokenizer has `tokenizer.ggml.precompiled_charsmap`, which is not here; {INSTEAD}");
    }
    let vocabulary = Vocabulary::read(keys)?;
    let scores = keys.array("tokenizer.ggml.scores")?;
    let Some(scores) = scores.floats().map(|scores| scores.map(|score| score as f32).collect::<Vec<f32>>()) else {
        bail!("the file's `tokenizer.ggml.scores` has no numbers; {INSTEAD}")
    };
    vocabulary.check_len("tokenizer.ggml.scores", scores.len())?;
    // No text becomes a mark that is not looked for, or a byte.
    let of_text = |kind: i128| ![UNKNOWN, CONTROL, BYTE].contains(&kind);
    let scores = scores.into_iter().enumerate().map(|(id, score)| Some(score).filter(|_| of_text(vocabulary.kind(id))));
    let unknown = keys.id("tokenizer.ggml.unknown_token_id", &vocabulary)?.unwrap_or(0);
    let mut tokenizer = SpmTokenizer::new(Spm::new(vocabulary.tokens.clone(), scores.collect(), unknown));
    let spaces: NormalizerWrapper = Replace::new(" ", SPACE).map_err(wrong)?.into();
    let back = Replace::new(SPACE, " ").map_err(wrong)?.into();
    let (mut before, mut after) = (vec![spaces], vec![back, ByteFallback::new().into(), Fuse::new().into()]);
    if keys.truth("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
        before.insert(0, Prepend::new(SPACE.to_owned()).into());
        after.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_normalizer(Some(Normalizers::new(before))).map_err(wrong)?;
    tokenizer.with_decoder(Some(Decoders::new(after)));
    tokenizer.add_tokens(vocabulary.marks()).map_err(wrong)?;
    if let Some(template) = begin(keys, &vocabulary, true, Some(1))? {
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

/// How texts begin: with the file's first token, where it says so. They are to be gone on with, so what may end a text
/// (`tokenizer.ggml.add_eos_token`) is left away.
fn begin(
    keys: &Keys<'_>,
    vocabulary: &Vocabulary,
    unsaid: bool,
    default: Option<u32>,
) -> Result<Option<TemplateProcessing>> {
    if !keys.truth("tokenizer.ggml.add_bos_token")?.unwrap_or(unsaid) {
        return Ok(None);
    }
    let Some(id) = keys.id("tokenizer.ggml.bos_token_id", vocabulary)?.or(default) else {
        bail!("the file's texts begin with a token, and it has no `tokenizer.ggml.bos_token_id`; {INSTEAD}")
    };
    let Some(token) = vocabulary.tokens.get(id as usize).cloned() else {
        bail!("the file's vocabulary has no token {id}, with which texts begin; {INSTEAD}")
    };
    let mut template = TemplateProcessing::builder();
    template.try_single(vec![token.clone(), "$0".to_owned()]).map_err(Error::msg)?.special_tokens(vec![(token, id)]);
    Ok(Some(template.build().map_err(Error::msg)?))
}

/// The tokens of a file, and their types.
struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i128>,
}

impl Vocabulary {
    fn read(keys: &Keys<'_>) -> Result<Vocabulary> {
        const TYPES: &str = "tokenizer.ggml.token_type";
        let mut tokens = keys.texts("tokenizer.ggml.tokens")?;
        // Tokens without a text are no text's.
        let empty = |(id, token): (usize, &mut String)| token.push_str(&format!("[EMPTY_{id}]"));
        tokens.iter_mut().enumerate().filter(|(_, token)| token.is_empty()).for_each(empty);
        let mut ids = HashMap::new();
        for (id, token) in tokens.iter().enumerate() {
            if let Some(other) = ids.insert(token, id) {
                bail!("the file's tokens {other} and {id} are both `{token}`; {INSTEAD}");
            }
        }
        let kinds = match keys.0.get(TYPES) {
            None => None,
            Some(_) => match keys.array(TYPES)?.integers() {
                Some(kinds) => Some(kinds.collect::<Vec<i128>>()),
                None => bail!("the file's `{TYPES}` has no whole numbers; {INSTEAD}"),
            },
        };
        let vocabulary = Vocabulary { tokens, kinds: kinds.unwrap_or_default() };
        if keys.0.get(TYPES).is_some() {
            vocabulary.check_len(TYPES, vocabulary.kinds.len())?;
        }
        Ok(vocabulary)
    }

    /// Checks that an array has an element for each token.
    fn check_len(&self, key: &str, len: usize) -> Result<()> {
        match self.tokens.len() == len {
            true => Ok(()),
            false => bail!("the file has {} tokens and {len} elements of `{key}`; {INSTEAD}", self.tokens.len()),
        }
    }

    /// A token's type: 0 where the file has none.
    fn kind(&self, id: usize) -> i128 {
        self.kinds.get(id).copied().unwrap_or(0)
    }

    /// The marks (`<|im_start|>`), which are tokens as a whole wherever they stand in a text.
    fn marks(&self) -> Vec<AddedToken> {
        let special = |kind| [UNKNOWN, CONTROL].contains(&kind);
        let marked = self.tokens.iter().zip(&self.kinds).filter(|(_, kind)| special(**kind) || **kind == USER_DEFINED);
        marked.map(|(token, kind)| AddedToken::from(token.clone(), special(*kind)).normalized(false)).collect()
    }
}

/// The file's metadata, in which values of other types than they should be are errors.
struct Keys<'g>(Gguf<'g>);

impl<'g> Keys<'g> {
    fn read<T>(&self, key: &str, wanted: &str, read: impl Fn(&'g GgufValue) -> Option<T>) -> Result<Option<T>> {
        match self.0.get(key).map(|value| (value, read(value))) {
            None => Ok(None),
            Some((_, Some(value))) => Ok(Some(value)),
            Some((value, None)) => bail!("the file's `{key}` is {value}, not {wanted}; {INSTEAD}"),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&'g str>> {
        self.read(key, "a text", GgufValue::as_str)
    }

    fn truth(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", GgufValue::as_bool)
    }

    /// The id of a token of the vocabulary.
    fn id(&self, key: &str, vocabulary: &Vocabulary) -> Result<Option<u32>> {
        let known = |value: &GgufValue| {
            let id = value.as_u64().filter(|id| *id < vocabulary.tokens.len() as u64)?;
            u32::try_from(id).ok()
        };
        self.read(key, "the number of one of its tokens", known)
    }

    fn array(&self, key: &str) -> Result<GgufArray> {
        match self.0.array(key).transpose().map_err(Error::wrap)? {
            Some(array) => Ok(array),
            None => bail!("the file's tokenizer has no array `{key}`; {INSTEAD}"),
        }
    }

    fn texts(&self, key: &str) -> Result<Vec<String>> {
        let array = self.array(key)?;
        let Some(texts) = array.texts() else { bail!("the file's `{key}` has no texts; {INSTEAD}") };
        let text = |(index, text): (usize, &[u8])| match std::str::from_utf8(text) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => bail!("element {index} of the file's `{key}` is no UTF-8; {INSTEAD}"),
        };
        texts.enumerate().map(text).collect()
    }
}

/// An error of the crate that tokenizes.
fn wrong(error: impl std::fmt::Display) -> Error {
    Error::msg(format!("the file's tokenizer: {error}; {INSTEAD}"))
}
