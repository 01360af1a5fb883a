//! The tokenizer that a GGUF file carries: byte-level BPE, with the splits of text that the file names.
//!
//! The splits are those of llama.cpp, `src/llama-vocab.cpp`, and of the models' own `tokenizer.json`.

use candle_core::{Error, Result, bail};
use tensor_offload::checkpoint::{Gguf, GgufArray, GgufValue};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer};

/// How Llama 3 splits text; Qwen2 has `\p{N}` for `\p{N}{1,3}`.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The types of tokens, of `llama_token_type` in llama.cpp's `include/llama.h`.
const CONTROL: i128 = 3;
const USER_DEFINED: i128 = 4;

/// Builds the tokenizer of a file; `None` if it has none.
///
/// # Errors
/// A kind of tokenizer, or of splits, that is not here, and what is wrong with the file.
pub(crate) fn tokenizer(gguf: Gguf<'_>) -> Result<Option<Tokenizer>> {
    let text = |key: &str| gguf.get(key).and_then(GgufValue::as_str);
    let Some(model) = text("tokenizer.ggml.model") else { return Ok(None) };
    if model != "gpt2" {
        bail!(
            "the file's tokenizer is `{model}`, and byte-level BPE (`gpt2`) alone is here; put the model's tokenizer.json \
               beside the file"
        );
    }
    let pre = text("tokenizer.ggml.pre").unwrap_or("default");
    let tokens = texts(gguf, "tokenizer.ggml.tokens")?;
    let pairs = texts(gguf, "tokenizer.ggml.merges")?;
    let pair = |merge: &String| {
        let pair = merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned()));
        pair.ok_or_else(|| Error::msg(format!("the file's tokenizer has the merge `{merge}`, which is no pair")))
    };
    let merges = pairs.iter().map(pair).collect::<Result<Vec<_>>>()?;
    let ids = tokens.iter().zip(0_u32..).map(|(token, id)| (token.clone(), id));
    let whole_words = matches!(pre, "llama3" | "llama-v3" | "llama-bpe");
    let bpe = BPE::builder().vocab_and_merges(ids.collect::<Vocab>(), merges).ignore_merges(whole_words);
    let mut tokenizer = Tokenizer::new(bpe.build().map_err(Error::msg)?);
    if pre == "qwen2" {
        tokenizer.with_normalizer(Some(NFC)).map_err(Error::msg)?;
    }
    tokenizer.with_pre_tokenizer(Some(splits(pre)?)).with_decoder(Some(ByteLevel::default()));
    add_marks(&mut tokenizer, gguf, &tokens)?;
    begin(&mut tokenizer, gguf, &tokens)?;
    Ok(Some(tokenizer))
}

/// How text is split before pairs are merged.
fn splits(pre: &str) -> Result<PreTokenizerWrapper> {
    let words = ByteLevel::new(false, true, true);
    let by = |pattern: &str| -> Result<PreTokenizerWrapper> {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(Error::msg)?;
        Ok(Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]).into())
    };
    match pre {
        "gpt-2" | "default" => Ok(words.into()),
        "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), words.into()]).into()),
        "llama3" | "llama-v3" | "llama-bpe" | "smaug-bpe" => by(LLAMA_3),
        "qwen2" => by(&LLAMA_3.replace("{1,3}", "")),
        other => bail!(
            "the file's tokenizer splits text as `{other}`, which is not here; put the model's tokenizer.json beside the file"
        ),
    }
}

/// Has the file's marks (`<|im_start|>`) be tokens as a whole.
fn add_marks(tokenizer: &mut Tokenizer, gguf: Gguf<'_>, tokens: &[String]) -> Result<()> {
    let Some(types) = gguf.array("tokenizer.ggml.token_type").transpose().map_err(Error::wrap)? else { return Ok(()) };
    let Some(types) = types.integers() else { bail!("the file's `tokenizer.ggml.token_type` has no whole numbers") };
    let marked = tokens.iter().zip(types).filter(|(_, kind)| [CONTROL, USER_DEFINED].contains(kind));
    let marks: Vec<AddedToken> =
        marked.map(|(token, kind)| AddedToken::from(token.clone(), kind == CONTROL).normalized(false)).collect();
    tokenizer.add_tokens(marks).map_err(Error::msg)?;
    Ok(())
}

/// Has texts begin with the file's first token, where it says so.
fn begin(tokenizer: &mut Tokenizer, gguf: Gguf<'_>, tokens: &[String]) -> Result<()> {
    let bos = gguf.get("tokenizer.ggml.add_bos_token").and_then(GgufValue::as_bool) == Some(true);
    let id = gguf.get("tokenizer.ggml.bos_token_id").and_then(GgufValue::as_u64).filter(|_| bos);
    let token = id.and_then(|id| Some((tokens.get(usize::try_from(id).ok()?)?.clone(), u32::try_from(id).ok()?)));
    if let Some((token, id)) = token {
        let single = vec![token.clone(), "$0".to_owned()];
        let mut template = TemplateProcessing::builder();
        template.try_single(single).map_err(Error::msg)?.special_tokens(vec![(token, id)]);
        let template = template.build().map_err(Error::msg)?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(())
}

/// An array of texts.
fn texts(gguf: Gguf<'_>, key: &str) -> Result<Vec<String>> {
    let array: Option<GgufArray> = gguf.array(key).transpose().map_err(Error::wrap)?;
    let Some(array) = array else { bail!("the file's tokenizer has no `{key}`") };
    let Some(texts) = array.texts() else { bail!("the file's `{key}` has no texts") };
    Ok(texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect())
}
