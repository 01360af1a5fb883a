"""Logits and tokens that llama.cpp gives for small GGUF files: models.json and tokenizers.json, for tests/gguf_models.rs and
tests/gguf_tokenizer.rs, which build the same files.

Needs numpy, gguf and llama-cpp-py-sync (0.11739 here, of llama.cpp 0ce8cd11).
"""

import json
import os
import tempfile

import gguf
import numpy as np
from llama_cpp_py_sync import _cffi_bindings as bindings

FOLDER = os.path.dirname(os.path.abspath(__file__))
PATH = os.path.join(tempfile.mkdtemp(), "model.gguf")
ffi, llama = bindings.ffi, bindings._load_library()
HIDDEN, INNER, VOCABULARY, BLOCKS, HEADS, KV_HEADS = 16, 24, 32, 2, 2, 1


@ffi.callback("void(enum ggml_log_level, const char*, void*)")
def silent(level, text, data):
    pass


def numbers(name, count):
    """The numbers of `Random::of(7, name)` in the tests."""
    state = 8
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    values = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append(np.float32(state >> 40) / np.float32(1 << 24) - np.float32(0.5))
    return np.array(values, dtype=np.float32)


def add(writer, key, value):
    (kind, value), = value.items()
    {"u32": writer.add_uint32, "f32": writer.add_float32, "text": writer.add_string}[kind](key, value)


def write_model(case):
    arch, dim = case["architecture"], case["head_dim"]
    writer = gguf.GGUFWriter(PATH, arch)
    for key, value in case["entries"].items():
        add(writer, f"{arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")

    def tensor(name, *shape, plus=0.0):
        values = numbers(name, int(np.prod(shape))) + np.float32(plus)
        writer.add_tensor(name, values.reshape(shape))

    tensor("token_embd.weight", VOCABULARY, HIDDEN)
    tensor("output_norm.weight", HIDDEN, plus=1.0)
    if not case["tied"]:
        tensor("output.weight", VOCABULARY, HIDDEN)
    if case["factors"]:
        writer.add_tensor("rope_freqs.weight", np.array(case["factors"], dtype=np.float32))
    for block in range(BLOCKS):
        for name in ["attn_norm", "ffn_norm"]:
            tensor(f"blk.{block}.{name}.weight", HIDDEN, plus=1.0)
        for name in ["attn_q_norm", "attn_k_norm"] if arch == "qwen3" else []:
            tensor(f"blk.{block}.{name}.weight", dim, plus=1.0)
        for name, outputs, inputs in [
            ("attn_q", HEADS * dim, HIDDEN),
            ("attn_k", KV_HEADS * dim, HIDDEN),
            ("attn_v", KV_HEADS * dim, HIDDEN),
            ("attn_output", HIDDEN, HEADS * dim),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ]:
            tensor(f"blk.{block}.{name}.weight", outputs, inputs)
            if name in case["biases"]:
                tensor(f"blk.{block}.{name}.bias", outputs)
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(vocabulary_only):
    params = llama.llama_model_default_params()
    params.vocab_only = vocabulary_only
    model = llama.llama_model_load_from_file(PATH.encode(), params)
    assert model != ffi.NULL, PATH
    return model


def last_logits(tokens):
    model = load(False)
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.type_k = params.type_v = 0  # f32
    params.flash_attn_type = 0
    context = llama.llama_init_from_model(model, params)
    ids = ffi.new("llama_token[]", tokens)
    assert llama.llama_decode(context, llama.llama_batch_get_one(ids, len(tokens))) == 0
    logits = ffi.buffer(llama.llama_get_logits_ith(context, -1), 4 * VOCABULARY)
    logits = [float(f"{value:.6g}") for value in np.frombuffer(logits, dtype=np.float32)]
    llama.llama_free(context)
    llama.llama_model_free(model)
    return logits


def models():
    qkv, factors = ["attn_q", "attn_k", "attn_v"], [1.0, 1.0, 2.5, 8.0]
    every = qkv + ["attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    u32, f32, text = (lambda value: {"u32": value}), (lambda value: {"f32": value}), (lambda value: {"text": value})
    yarn = {"rope.scaling.type": text("yarn"), "rope.scaling.factor": f32(4.0)}
    trained = {"rope.scaling.original_context_length": u32(32)}
    linear = {"rope.scaling.type": text("linear"), "rope.scaling.factor": f32(4.0)}

    def case(name, architecture, entries={}, head_dim=8, tied=False, biases=[], factors=[]):
        entries = {
            "block_count": u32(BLOCKS),
            "context_length": u32(64),
            "embedding_length": u32(HIDDEN),
            "feed_forward_length": u32(INNER),
            "vocab_size": u32(VOCABULARY),
            "attention.head_count": u32(HEADS),
            "attention.head_count_kv": u32(KV_HEADS),
            "attention.key_length": u32(head_dim),
            "attention.value_length": u32(head_dim),
            "attention.layer_norm_rms_epsilon": f32(1e-5),
            "rope.freq_base": f32(1000.0),
            "rope.dimension_count": u32(head_dim),
            **entries,
        }
        return dict(
            name=name, architecture=architecture, entries=entries, head_dim=head_dim, tied=tied, biases=biases, factors=factors
        )

    cases = [
        case("llama", "llama"),
        case("llama, the head tied", "llama", tied=True),
        case("llama, all biases", "llama", biases=every),
        case("llama, factors", "llama", factors=factors),
        case("llama, linear", "llama", linear),
        case("llama, linear by the older key", "llama", {"rope.scale_linear": f32(4.0)}),
        case("llama, a factor without a type", "llama", {"rope.scaling.factor": f32(4.0)}),
        case("llama, no scaling in spite of a factor", "llama", {**linear, "rope.scaling.type": text("none")}),
        case("llama, a factor of 0", "llama", {**linear, "rope.scaling.factor": f32(0.0)}),
        case("llama, linear with factors", "llama", linear, factors=factors),
        case("llama, YaRN", "llama", {**yarn, **trained}),
        case("llama, YaRN from the context length", "llama", yarn),
        case("llama, YaRN with factors", "llama", {**yarn, **trained}, factors=factors),
        case("llama, YaRN by 1", "llama", {**yarn, **trained, "rope.scaling.factor": f32(1.0)}),
        case("llama, YaRN with an attention factor", "llama", {**yarn, **trained, "rope.scaling.attn_factor": f32(1.3)}),
        case("llama, an attention factor alone", "llama", {"rope.scaling.attn_factor": f32(1.3)}),
        case("qwen2", "qwen2", biases=qkv),
        case("qwen2, the head tied", "qwen2", tied=True, biases=qkv),
        case("qwen2, YaRN", "qwen2", {**yarn, **trained}, biases=qkv),
        case("qwen3, wide heads", "qwen3", head_dim=12),
        case("qwen3, the head tied", "qwen3", head_dim=12, tied=True),
        case("qwen3, YaRN", "qwen3", {**yarn, **trained}, head_dim=12),
    ]
    tokens = [(7 * index * index + 3) % VOCABULARY for index in range(48)]
    for each in cases:
        write_model(each)
        each["logits"] = last_logits(tokens)
    return dict(tokens=tokens, cases=cases)


TEXTS = [
    "I'm sure they'LL say it's 12345 - or 1,234.5!",
    "  two  spaces\n\n\tand tabs\r\n \n  end   ",
    "camelCaseWords HTTPServer __init__(self): x+=1//2;\n//\n",
    "naïve café ǅungla ʰi 日本語テスト 한국어 ไทย हिन्दी ٣٤٥ Ⅷ½",
    "<|im_start|>user\nhello<|im_end|> <|endoftext|>a",
    "¿qué? «sí» … — $5 <=> ^~| `x` 🙂👩‍👩‍👧\u00a0\u3000!",
]
PRES = [
    "default", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "gpt-2", "smollm", "tekken", "gpt-4o", "deepseek-coder",
    "deepseek-v3", "bloom", "viking",
]


def characters():
    """The characters that stand for bytes in byte-level BPE."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    table = {byte: chr(byte) for byte in printed}
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return table


def merged():
    """Tokens and merges learned from the texts without any split, so that what is split shows."""
    table = characters()
    words = [[table[byte] for byte in text.encode()] for text in TEXTS for _ in range(2)]
    tokens, merges = [table[byte] for byte in range(256)], []
    while len(merges) < 260:
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(" ".join(best))
        if "".join(best) not in tokens:
            tokens.append("".join(best))
        for word in words:
            index = 0
            while index + 1 < len(word):
                if (word[index], word[index + 1]) == best:
                    word[index : index + 2] = ["".join(best)]
                index += 1
    return tokens, merges


def vocabulary(model, tokens, types):
    writer = gguf.GGUFWriter(PATH, "llama")
    for key in ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]:
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    return writer


def tokenized(writer, texts):
    finish(writer)
    model = load(True)

    def ids(text):
        text = text.encode()
        out = ffi.new("llama_token[]", 2 * len(text) + 8)
        count = llama.llama_tokenize(llama.llama_model_get_vocab(model), text, len(text), out, len(out), True, True)
        return list(out[0:count])

    ids = [ids(text) for text in texts]
    llama.llama_model_free(model)
    return ids


def tokenizers():
    tokens, merges = merged()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = marks + tokens
    types = [3] * len(marks) + [1] * (len(tokens) - len(marks))
    splits = {}
    for pre in PRES:
        writer = vocabulary("gpt2", tokens, types)
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        splits[pre] = tokenized(writer, TEXTS)
    pieces = "▁ ▁a ▁b a b c d aa aaa ab ba cd ▁ab ▁aba abab bb ▁▁ é , ▁c dd".split(" ")
    scores = [0.0] * 261 + [-float(2 * index % 17) for index in range(len(pieces))]
    spm = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["<|user|>", "<mark>"] + pieces
    types = [2, 3, 3] + [6] * 256 + [3, 4] + [1] * len(pieces)
    texts = [
        "", "a", "aaaa aaaaa", "abab abba", "  a  b ", "cd, ddd é日\n!", "<|user|>ab<mark> a</s>b", "<0x41> <unk>a", "ababababab",
    ]
    pieced = {}
    for prefix in [True, False]:
        writer = vocabulary("llama", spm, types)
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(prefix)
        pieced[str(prefix).lower()] = tokenized(writer, texts)
    return dict(
        texts=TEXTS, tokens=tokens[len(marks) :], merges=merges, splits=splits, spm=dict(texts=texts, pieces=pieces, ids=pieced)
    )


if __name__ == "__main__":
    llama.llama_log_set(silent, ffi.NULL)
    for name, make in [("models.json", models), ("tokenizers.json", tokenizers)]:
        with open(os.path.join(FOLDER, name), "w") as file:
            json.dump(make(), file, ensure_ascii=False, separators=(",", ":"))
            file.write("\n")
