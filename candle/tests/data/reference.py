"""Writes what the tests compare with: tiny checkpoints of random weights, and what transformers and diffusers compute over
them. Run once, with torch, transformers 5.24, diffusers and safetensors installed: python reference.py llama flux
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

DATA = Path(__file__).parent
TINY_LLAMA = DATA / "../../../examples/data/tiny-llama"


def randomise(model, std):
    """Random weights everywhere; norms stay around one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, std)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)


def decode(model, ids, splits):
    """The logits of a sequence that comes in pieces of `splits` tokens, over the cache, in one tensor."""
    cache, logits, start = None, [], 0
    with torch.no_grad():
        for tokens in splits:
            out = model(ids[:, start : start + tokens], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + tokens
            logits.append(out.logits)
        logits = torch.cat(logits, dim=1)
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    return logits


def llama():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=48, max_position_embeddings=256,
    )
    llama3 = dict(
        rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=100,
    )
    cases = {
        # Rotary waves of 6, 30, 140 and 664 positions: one is kept, one is on the ramp, two are slowed.
        "biases": ("llama", dict(head_dim=8, attention_bias=True, mlp_bias=True, rope_parameters=llama3)),
        "tied": ("llama", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="linear", rope_theta=1000.0, factor=2.0))),
        "qwen2": ("qwen2", dict(tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1000.0))),
    }
    splits = [7, 1, 1, 1, 2]
    for number, (name, (kind, options)) in enumerate(cases.items()):
        torch.manual_seed(number)
        config = AutoConfig.for_model(kind, **sizes, **options)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        randomise(model, 0.3)
        ids = torch.randint(0, config.vocab_size, (2, sum(splits)))
        model.save_pretrained(DATA / "llama" / name)
        (DATA / "llama" / name / "generation_config.json").unlink(missing_ok=True)
        save_file({"ids": ids, "logits": decode(model, ids, splits)}, DATA / "llama" / name / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, model.config.vocab_size, (1, sum(splits)))
    save_file({"ids": ids, "logits": decode(model, ids, splits)}, DATA / "llama" / "tiny-llama.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
