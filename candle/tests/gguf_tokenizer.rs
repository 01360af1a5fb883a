//! The tokenizers in GGUF files give the tokens that llama.cpp gives (`data/gguf/reference.py` asked it), and those of the same
//! tokenizer in a `tokenizer.json`. What is not here or not whole is refused by name.

#[path = "../examples/support/generate.rs"]
mod generate;
#[path = "../../tests/support/gguf.rs"]
#[allow(dead_code, reason = "this test writes files without tensors")]
mod gguf_file;
#[path = "../examples/support/gguf_tokenizer.rs"]
mod gguf_tokenizer;

use std::collections::BTreeMap;
use std::path::Path;

use generate::{Chat, Tokens};
use gguf_file::{Gguf, Value};
use serde::Deserialize;
use tensor_offload::{Checkpoint, DType};

const MARKS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const I32: u32 = 5;
const F32: u32 = 6;
const TEXT: u32 = 8;

/// Tensors of these tests are empty.
struct Random;

impl Random {
    fn of(_: u64, _: &str) -> Random {
        Random
    }

    fn elements(&mut self, _: DType, bytes: usize) -> Vec<u8> {
        vec![0; bytes]
    }
}

#[derive(Deserialize)]
struct Reference {
    texts: Vec<String>,
    tokens: Vec<String>,
    merges: Vec<String>,
    splits: BTreeMap<String, Vec<Vec<u32>>>,
    spm: Pieces,
}

#[derive(Deserialize)]
struct Pieces {
    texts: Vec<String>,
    pieces: Vec<String>,
    ids: BTreeMap<String, Vec<Vec<u32>>>,
}

impl Reference {
    fn read() -> Reference {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/tokenizers.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    /// Byte-level BPE that splits texts by a name.
    fn byte_level(&self, pre: &str) -> Gguf {
        let tokens: Vec<&str> = MARKS.into_iter().chain(self.tokens.iter().map(String::as_str)).collect();
        let kinds = (0..tokens.len()).map(|id| if id < MARKS.len() { 3 } else { 1 });
        let merges: Vec<&str> = self.merges.iter().map(String::as_str).collect();
        Gguf::new("llama")
            .entry("tokenizer.ggml.model", "gpt2")
            .entry("tokenizer.ggml.pre", pre)
            .entry("tokenizer.ggml.tokens", texts(&tokens))
            .entry("tokenizer.ggml.token_type", Value::Array(I32, kinds.map(Value::I32).collect()))
            .entry("tokenizer.ggml.merges", texts(&merges))
            .entry("tokenizer.ggml.bos_token_id", Value::U32(0))
    }

    /// SentencePiece's BPE, with the scores of `reference.py`.
    fn sentence_piece(&self) -> Gguf {
        let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
        tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
        tokens.extend(["<|user|>", "<mark>"].map(str::to_owned));
        let kinds = [2, 3, 3].into_iter().chain([6; 256]).chain([3, 4]).chain(self.spm.pieces.iter().map(|_| 1));
        let scores = [0.0; 261].into_iter().chain((0..self.spm.pieces.len()).map(|index| -((2 * index % 17) as f32)));
        let kinds = Value::Array(I32, kinds.map(Value::I32).collect());
        let scores = Value::Array(F32, scores.map(Value::F32).collect());
        tokens.extend(self.spm.pieces.iter().cloned());
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        Gguf::new("llama")
            .entry("tokenizer.ggml.model", "llama")
            .entry("tokenizer.ggml.tokens", texts(&tokens))
            .entry("tokenizer.ggml.token_type", kinds)
            .entry("tokenizer.ggml.scores", scores)
    }
}

fn texts(texts: &[&str]) -> Value {
    Value::Array(TEXT, texts.iter().map(|text| Value::from(*text)).collect())
}

/// The file with another value of a key, or without it.
fn with(mut file: Gguf, key: &str, value: impl Into<Option<Value>>) -> Gguf {
    let key = format!("tokenizer.ggml.{key}");
    file.entries.retain(|(own, _)| *own != key);
    match value.into() {
        Some(value) => file.entry(key, value),
        None => file,
    }
}

fn opened(file: &Gguf) -> Checkpoint {
    Checkpoint::from_bytes("model.gguf", file.build()).unwrap()
}

fn tokenizer(file: &Gguf) -> Box<dyn Tokens> {
    gguf_tokenizer::tokenizer(opened(file).gguf().unwrap()).unwrap().unwrap()
}

fn refused(file: &Gguf) -> String {
    let error = gguf_tokenizer::tokenizer(opened(file).gguf().unwrap()).err().unwrap().to_string();
    assert!(error.contains("put the model's tokenizer.json beside the file"), "{error}");
    error
}

#[test]
fn byte_level_tokens_are_those_of_llama_cpp() {
    let reference = Reference::read();
    for (pre, expected) in &reference.splits {
        let tokenizer = tokenizer(&reference.byte_level(pre));
        for (text, expected) in reference.texts.iter().zip(expected) {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(ids, *expected, "{pre}: {text}");
            let without = MARKS.iter().fold(text.clone(), |text, mark| text.replace(mark, ""));
            assert_eq!(tokenizer.decode(&ids).unwrap(), without, "{pre}");
        }
    }
}

/// llama.cpp's vocabularies of one kind have several names.
#[test]
fn names_of_one_kind_of_splits_give_equal_tokens() {
    let reference = Reference::read();
    for (pre, others) in [
        ("llama-bpe", &["llama3", "llama-v3", "falcon3", "pixtral"][..]),
        ("smaug-bpe", &["dbrx"]),
        ("deepseek-r1-qwen", &["megrez", "stablelm2"]),
        ("gpt-2", &["phi-2", "gigachat", "mpt", "olmo", "exaone4"]),
        ("smollm", &["starcoder", "refact", "command-r", "codeshell"]),
        ("gpt-4o", &["llama4"]),
        ("bloom", &["poro-chat", "gpt3-finnish"]),
    ] {
        for other in others {
            let tokenizer = tokenizer(&reference.byte_level(other));
            for (text, expected) in reference.texts.iter().zip(&reference.splits[pre]) {
                assert_eq!(tokenizer.encode(text, true).unwrap(), *expected, "{other}: {text}");
            }
        }
    }
}

/// The pre-tokenizers of the models' own `tokenizer.json`: Llama 3.1, Qwen2.5, SmolLM2, GPT-2.
#[test]
fn splits_are_those_of_the_models_own_tokenizers() {
    let reference = Reference::read();
    let by = |pattern: &str| {
        let split = serde_json::json!({
            "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false,
        });
        let bytes = serde_json::json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
        });
        serde_json::json!({ "type": "Sequence", "pretokenizers": [split, bytes] })
    };
    let words = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    let digits = serde_json::json!({ "type": "Digits", "individual_digits": true });
    let start = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|";
    let rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let nfc = serde_json::json!({ "type": "NFC" });
    for (pre, normalizer, splits, whole_words) in [
        ("llama-bpe", None, by(&format!(r"{start}\p{{N}}{{1,3}}{rest}")), true),
        ("qwen2", Some(nfc), by(&format!(r"{start}\p{{N}}{rest}")), false),
        ("smollm", None, serde_json::json!({ "type": "Sequence", "pretokenizers": [digits, words] }), false),
        ("gpt-2", None, words.clone(), false),
    ] {
        let vocabulary = MARKS.into_iter().chain(reference.tokens.iter().map(String::as_str)).zip(0_u32..);
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            vocabulary.map(|(token, id)| (token.to_owned(), id.into())).collect();
        let marks = MARKS.iter().zip(0_u32..).map(|(mark, id)| {
            serde_json::json!({
                "id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true,
            })
        });
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": marks.collect::<Vec<_>>(),
            "normalizer": normalizer, "pre_tokenizer": splits, "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": whole_words,
                "vocab": vocabulary, "merges": reference.merges,
            },
        });
        let own: tokenizers::Tokenizer = json.to_string().parse().unwrap();
        let tokenizer = tokenizer(&reference.byte_level(pre));
        let texts = reference.texts.iter().map(String::as_str);
        for text in texts.chain(["cafe\u{301} n\u{303}o", "I'ſ 'S", "\u{301}x", "a\u{85}b\u{2028}c"]) {
            let expected = own.encode(text, false).unwrap().get_ids().to_vec();
            assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{pre}: {text}");
        }
    }
}

#[test]
fn pieces_are_those_of_llama_cpp() {
    let reference = Reference::read();
    for (prefix, expected) in &reference.spm.ids {
        let file = with(reference.sentence_piece(), "add_space_prefix", Value::Bool(prefix == "true"));
        let tokenizer = tokenizer(&file);
        for (text, expected) in reference.spm.texts.iter().zip(expected) {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(ids, *expected, "{prefix}: {text}");
            if !text.contains('<') {
                assert_eq!(tokenizer.decode(&ids).unwrap(), *text, "{prefix}");
            }
        }
    }
    // What stands where the file does not say.
    let (unsaid, text) = (tokenizer(&reference.sentence_piece()), &reference.spm.texts[3]);
    assert_eq!(unsaid.encode(text, true).unwrap(), reference.spm.ids["true"][3]);
}

/// Without all bytes, characters that have no token are the unknown one.
#[test]
fn characters_without_a_token_are_unknown_where_bytes_are_missing() {
    let file = with(
        with(
            with(Reference::read().sentence_piece(), "tokens", texts(&["<unk>", "<s>", "\u{2581}", "a"])),
            "token_type",
            None,
        ),
        "scores",
        Value::Array(F32, [0.0; 4].map(Value::F32).to_vec()),
    );
    let tokenizer = tokenizer(&file);
    assert_eq!(tokenizer.encode("aéa", true).unwrap(), [1, 2, 3, 0, 3]);
}

#[test]
fn texts_begin_with_a_token_where_the_file_or_its_splits_say_so() {
    let reference = Reference::read();
    let first = |file: &Gguf| tokenizer(file).encode("a", true).unwrap()[0] == 0;
    for (pre, unsaid) in
        [("llama-bpe", true), ("tekken", true), ("smaug-bpe", false), ("qwen2", false), ("gpt-2", false)]
    {
        let file = reference.byte_level(pre);
        assert_eq!(first(&file), unsaid, "{pre}");
        for says in [true, false] {
            assert_eq!(first(&with(file.clone(), "add_bos_token", Value::Bool(says))), says, "{pre}");
        }
    }
    let missing = refused(&with(reference.byte_level("llama-bpe"), "bos_token_id", None));
    assert!(missing.contains("no `tokenizer.ggml.bos_token_id`"), "{missing}");
    let beyond = refused(&with(reference.byte_level("llama-bpe"), "bos_token_id", Value::U32(99_999)));
    assert!(beyond.contains("`tokenizer.ggml.bos_token_id` is 99999"), "{beyond}");
}

#[test]
fn the_tokens_that_end_a_text_have_keys_or_known_marks() {
    let file = Reference::read().byte_level("qwen2").entry("tokenizer.ggml.eos_token_id", Value::U32(7));
    let ends = |file: &Gguf| gguf_tokenizer::ends(opened(file).gguf().unwrap()).unwrap();
    assert_eq!(ends(&file), [7, 0, 2]);
    assert_eq!(ends(&with(file, "token_type", None)), [7]);
    assert!(ends(&Gguf::new("llama")).is_empty());
}

#[test]
fn a_conversation_is_asked_in_the_form_of_its_marks() {
    let chat = Chat::of(tokenizer(&Reference::read().byte_level("smollm")));
    assert_eq!(chat.end(), Some(2));
    let prompt = chat.prompt("hello").unwrap();
    assert_eq!((prompt.iter().filter(|id| **id == 1).count(), prompt.iter().filter(|id| **id == 2).count()), (3, 2));
}

#[test]
fn files_without_a_tokenizer_have_none() {
    for model in [None, Some("none"), Some("no_vocab")] {
        let file = with(Gguf::new("llama"), "model", model.map(Value::from));
        assert!(gguf_tokenizer::tokenizer(opened(&file).gguf().unwrap()).unwrap().is_none());
    }
}

#[test]
fn what_is_not_here_or_not_whole_is_refused_by_name() {
    let reference = Reference::read();
    let (bytes, pieces) = (|| reference.byte_level("qwen2"), || reference.sentence_piece());
    let cases = [
        (with(bytes(), "model", Value::from("bert")), "`bert`"),
        (with(bytes(), "model", Value::U32(1)), "`tokenizer.ggml.model` is 1, not a text"),
        (with(bytes(), "pre", Value::from("kimi-k2")), "splits text as `kimi-k2`"),
        (with(bytes(), "pre", Value::from("")), "splits text as ``"),
        (with(bytes(), "pre", None), "(`tokenizer.ggml.pre`)"),
        (with(bytes(), "tokens", None), "no array `tokenizer.ggml.tokens`"),
        (with(bytes(), "merges", None), "no array `tokenizer.ggml.merges`"),
        (with(bytes(), "merges", texts(&["ab"])), "merge `ab`"),
        (with(bytes(), "merges", texts(&["zzz yyy"])), "zzz"),
        (with(bytes(), "merges", Value::Array(I32, vec![Value::I32(1)])), "`tokenizer.ggml.merges` has no texts"),
        (with(bytes(), "tokens", texts(&["a", "b", "a"])), "tokens 0 and 2 are both `a`"),
        (
            with(bytes(), "token_type", Value::Array(I32, vec![Value::I32(1)])),
            "1 elements of `tokenizer.ggml.token_type`",
        ),
        (with(bytes(), "add_bos_token", Value::U8(1)), "`tokenizer.ggml.add_bos_token` is 1, not true or false"),
        (with(pieces(), "scores", None), "no array `tokenizer.ggml.scores`"),
        (with(pieces(), "scores", Value::Array(F32, vec![Value::F32(1.0)])), "1 elements of `tokenizer.ggml.scores`"),
        (with(pieces(), "remove_extra_whitespaces", Value::Bool(true)), "`tokenizer.ggml.remove_extra_whitespaces`"),
        (
            with(pieces(), "precompiled_charsmap", Value::Array(0, vec![Value::U8(1)])),
            "`tokenizer.ggml.precompiled_charsmap`",
        ),
    ];
    for (file, told) in &cases {
        let error = refused(file);
        assert!(error.contains(told), "{told}: {error}");
    }
}

/// Two tokens without a text are not two of one text.
#[test]
fn tokens_without_a_text_are_allowed() {
    let reference = Reference::read();
    let mut tokens: Vec<&str> = MARKS.into_iter().chain(reference.tokens.iter().map(String::as_str)).collect();
    tokens.extend(["", ""]);
    let file = with(with(reference.byte_level("gpt-2"), "tokens", texts(&tokens)), "token_type", None);
    assert!(!tokenizer(&file).encode("a word", false).unwrap().is_empty());
}
