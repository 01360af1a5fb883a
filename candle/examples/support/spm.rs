//! Byte-pair encoding as SentencePiece does it: of all neighbours that make a token together, the pair of the highest score
//! is merged, the leftmost of several. The same as llama.cpp's `llm_tokenizer_spm`, `src/llama-vocab.cpp`.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};

use tokenizers::tokenizer::{Model, Result, Token, Trainer};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

/// A tokenizer over it.
pub(crate) type SpmTokenizer =
    TokenizerImpl<Spm, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The tokens of a vocabulary with scores.
#[derive(Clone, Debug)]
pub(crate) struct Spm {
    tokens: Vec<String>,
    ids: HashMap<String, u32>,
    /// The score of each token that text can become; `None` for marks and bytes.
    scores: Vec<Option<f32>>,
    /// The tokens of single bytes, by which characters without a token are spelled.
    bytes: Option<Box<[u32; 256]>>,
    unknown: u32,
}

impl Spm {
    /// A vocabulary without two equal tokens. `scores` has `None` for tokens that no text becomes. `unknown` is the token of
    /// characters that have none, where the vocabulary has not all bytes.
    pub(crate) fn new(tokens: Vec<String>, scores: Vec<Option<f32>>, unknown: u32) -> Spm {
        let ids: HashMap<String, u32> = tokens.iter().cloned().zip(0..).collect();
        let byte = |byte: u8| ids.get(&format!("<0x{byte:02X}>")).copied();
        let bytes: Option<Vec<u32>> = (0..=255).map(byte).collect();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok()).map(Box::new);
        Spm { tokens, ids, scores, bytes, unknown }
    }

    /// The token that a text is, and its score.
    fn token(&self, text: &str) -> Option<(u32, f32)> {
        let id = *self.ids.get(text)?;
        Some((id, (*self.scores.get(id as usize)?)?))
    }
}

/// A part of the text; of no bytes once it was merged into the one before.
struct Symbol {
    begin: usize,
    end: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// Two neighbours that make a token.
#[derive(PartialEq)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// The end of the right one's text. It tells a pair that was overtaken.
    end: usize,
    begin: usize,
}

impl Eq for Pair {}

impl Ord for Pair {
    fn cmp(&self, other: &Pair) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The characters of a text, merged.
struct Merging<'t> {
    model: &'t Spm,
    text: &'t str,
    symbols: Vec<Symbol>,
    pairs: BinaryHeap<Pair>,
}

impl<'t> Merging<'t> {
    fn of(model: &'t Spm, text: &'t str) -> Merging<'t> {
        let last = text.chars().count().saturating_sub(1);
        let symbol = |(index, (begin, character)): (usize, (usize, char))| Symbol {
            begin,
            end: begin + character.len_utf8(),
            before: index.checked_sub(1),
            after: (index < last).then_some(index + 1),
        };
        let symbols: Vec<Symbol> = text.char_indices().enumerate().map(symbol).collect();
        let mut merging = Merging { model, text, symbols, pairs: BinaryHeap::new() };
        (0..last).for_each(|left| merging.propose(Some(left), Some(left + 1)));
        while let Some(pair) = merging.pairs.pop() {
            merging.merge(&pair);
        }
        merging
    }

    fn propose(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let (begin, end) = (self.symbols[left].begin, self.symbols[right].end);
        if let Some((_, score)) = self.model.token(&self.text[begin..end]) {
            self.pairs.push(Pair { score, left, right, begin, end });
        }
    }

    fn merge(&mut self, pair: &Pair) {
        let (left, right) = (&self.symbols[pair.left], &self.symbols[pair.right]);
        let gone = left.begin == left.end || right.begin == right.end;
        if gone || (left.begin, right.end) != (pair.begin, pair.end) || left.after != Some(pair.right) {
            return;
        }
        let after = right.after;
        self.symbols[pair.right].begin = self.symbols[pair.right].end;
        self.symbols[pair.left].end = pair.end;
        self.symbols[pair.left].after = after;
        if let Some(after) = after {
            self.symbols[after].before = Some(pair.left);
        }
        self.propose(self.symbols[pair.left].before, Some(pair.left));
        self.propose(Some(pair.left), after);
    }
}

impl Model for Spm {
    type Trainer = Untrained;

    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        let mut tokens = Vec::new();
        let merging = Merging::of(self, text);
        for symbol in merging.symbols.iter().filter(|symbol| symbol.begin < symbol.end) {
            let (part, offsets) = (&text[symbol.begin..symbol.end], (symbol.begin, symbol.end));
            let mut push = |id: u32| {
                let value = self.tokens.get(id as usize).cloned().unwrap_or_default();
                tokens.push(Token::new(id, value, offsets));
            };
            match (self.token(part), &self.bytes) {
                (Some((id, _)), _) => push(id),
                (None, Some(bytes)) => part.bytes().for_each(|byte| push(bytes[usize::from(byte)])),
                (None, None) => push(self.unknown),
            }
        }
        Ok(tokens)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.get(id as usize).cloned()
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.ids.clone()
    }

    fn get_vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("the vocabulary of a GGUF file is in that file".into())
    }

    fn get_trainer(&self) -> Untrained {
        Untrained
    }
}

/// Vocabularies of GGUF files are complete.
pub(crate) struct Untrained;

impl Trainer for Untrained {
    type Model = Spm;

    fn should_show_progress(&self) -> bool {
        false
    }

    fn train(&self, _: &mut Spm) -> Result<Vec<AddedToken>> {
        Err("the vocabulary of a GGUF file is complete".into())
    }

    fn feed<I, S, F>(&mut self, _: I, _: F) -> Result<()>
    where
        I: Iterator<Item = S> + Send,
        S: AsRef<str> + Send,
        F: Fn(&str) -> Result<Vec<String>> + Sync,
    {
        Err("the vocabulary of a GGUF file is complete".into())
    }
}
