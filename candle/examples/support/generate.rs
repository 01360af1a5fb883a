//! Text from a language model: SmolLM2's form of a conversation, and the most likely token after each.

#![allow(dead_code, reason = "each program uses its part")]

use std::path::Path;

use candle_core::{D, Device, Error, IndexOp, Result, Tensor};
use tokenizers::{Decoder, Model, Normalizer, PostProcessor, PreTokenizer, Tokenizer, TokenizerImpl};

/// What SmolLM2's own template puts first.
const SYSTEM: &str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
const START: &str = "<|im_start|>";
const END: &str = "<|im_end|>";

/// A tokenizer, over a model of any kind.
pub(crate) trait Tokens {
    /// The id of a token.
    fn id(&self, token: &str) -> Option<u32>;
    /// The tokens of a text, with those that each text begins and ends with if `special`.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>>;
    /// The text of tokens, without marks.
    fn decode(&self, tokens: &[u32]) -> Result<String>;
    /// Gives the text of tokens as they come; a token that ends within a character gives nothing yet.
    fn pieces(&self) -> Box<dyn FnMut(u32) -> Result<String> + '_>;
}

impl<M, N, T, P, D> Tokens for TokenizerImpl<M, N, T, P, D>
where
    M: Model,
    N: Normalizer,
    T: PreTokenizer,
    P: PostProcessor,
    D: Decoder,
{
    fn id(&self, token: &str) -> Option<u32> {
        self.token_to_id(token)
    }

    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        Ok(TokenizerImpl::encode(self, text, special).map_err(Error::msg)?.get_ids().to_vec())
    }

    fn decode(&self, tokens: &[u32]) -> Result<String> {
        TokenizerImpl::decode(self, tokens, true).map_err(Error::msg)
    }

    fn pieces(&self) -> Box<dyn FnMut(u32) -> Result<String> + '_> {
        let mut stream = self.decode_stream(true);
        Box::new(move |token| Ok(stream.step(token).map_err(Error::msg)?.unwrap_or_default()))
    }
}

/// A model's tokens, and how it was taught to hold conversations.
pub(crate) struct Chat {
    tokenizer: Box<dyn Tokens>,
    /// The token that ends an answer; `None` for models that were taught no conversation in this form.
    end: Option<u32>,
}

impl Chat {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub(crate) fn open(file: &Path) -> Result<Chat> {
        let in_file = |error: &dyn std::fmt::Display| Error::msg(format!("{}: {error}", file.display()));
        let tokenizer = Tokenizer::from_file(file).map_err(|error| in_file(&error))?;
        Ok(Chat::of(Box::new(tokenizer.into_inner())))
    }

    /// A model's tokenizer.
    pub(crate) fn of(tokenizer: Box<dyn Tokens>) -> Chat {
        let end = tokenizer.id(START).and_then(|_| tokenizer.id(END));
        Chat { tokenizer, end }
    }

    /// The token that ends an answer.
    pub(crate) fn end(&self) -> Option<u32> {
        self.end
    }

    /// The tokens of a conversation that asks one question, up to where the answer begins; of the text alone, to be gone on
    /// with, for models that were taught no conversation in this form.
    pub(crate) fn prompt(&self, question: &str) -> Result<Vec<u32>> {
        if self.end.is_none() {
            return self.tokenizer.encode(question, true);
        }
        let turn = |role: &str, text: &str| format!("{START}{role}\n{text}{END}\n");
        let text = format!("{}{}{START}assistant\n", turn("system", SYSTEM), turn("user", question));
        self.tokenizer.encode(&text, false)
    }

    /// The text of tokens, without marks.
    pub(crate) fn text(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens)
    }

    /// Gives the text of tokens as they come; a token that ends within a character gives nothing yet.
    pub(crate) fn pieces(&self) -> impl FnMut(u32) -> Result<String> {
        self.tokenizer.pieces()
    }
}

/// The tokens that end a text, as a model's `config.json` has them: none, one or several.
///
/// # Errors
/// What is wrong with the text.
pub(crate) fn ends(config: &str) -> Result<Vec<u32>> {
    let config: serde_json::Value = serde_json::from_str(config).map_err(Error::msg)?;
    let id = |value: &serde_json::Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    Ok(match &config["eos_token_id"] {
        serde_json::Value::Array(ids) => ids.iter().filter_map(id).collect(),
        one => id(one).into_iter().collect(),
    })
}

/// The tokens that follow `prompt`, each the most likely one, before the first of `ends`; without it they go on, so
/// [`take`](Iterator::take) some.
///
/// `pass` is a pass of the network: it takes what the sequence goes on with, `[1, tokens]`, and gives logits,
/// `[1, any, vocabulary]`, of which the last count. Each token that is taken costs one pass.
pub(crate) fn greedy<E: From<Error>>(
    prompt: &[u32],
    ends: &[u32],
    device: &Device,
    mut pass: impl FnMut(Tensor) -> std::result::Result<Tensor, E>,
) -> impl Iterator<Item = std::result::Result<u32, E>> {
    let mut next = Some(prompt.to_vec());
    std::iter::from_fn(move || {
        let tokens = next.take()?;
        let mut token = || -> std::result::Result<u32, E> {
            let logits = pass(Tensor::new(tokens.as_slice(), device)?.unsqueeze(0)?)?;
            Ok(logits.i((0, logits.dim(1)? - 1))?.argmax(D::Minus1)?.to_scalar::<u32>()?)
        };
        match token() {
            Ok(token) if ends.contains(&token) => None,
            Ok(token) => {
                next = Some(vec![token]);
                Some(Ok(token))
            }
            Err(error) => Some(Err(error)),
        }
    })
}
