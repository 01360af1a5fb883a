"""Writes what the tests compare with: tiny checkpoints of random weights, and what transformers and diffusers compute over
them. Run once, with torch, transformers 5.24, diffusers and safetensors installed: python reference.py llama tokenizer flux
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
    logits = decode(model, ids, splits)
    greedy = model.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=None)[:, ids.shape[1] :].contiguous()
    save_file({"ids": ids, "logits": logits, "greedy": greedy}, DATA / "llama" / "tiny-llama.safetensors")


def tokenizer():
    """As many tokens as the tiny Llama has: bytes, a few merges and the marks of a conversation, split as SmolLM2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    tokenizer.save(str(DATA / "llama" / "tokenizer.json"), pretty=False)


def black_forest_labs_names(state, depth, depth_single):
    """The weights of a FluxTransformer2DModel under the names and in the order of rows of src/flux/model.py."""
    pairs = {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "proj_out": "final_layer.linear",
    }
    left, out = dict(state), {}

    def move(old, new):
        for parameter in ["weight", "bias"]:
            if f"{old}.{parameter}" in left:
                out[f"{new}.{parameter}"] = left.pop(f"{old}.{parameter}")

    def join(olds, new):
        for parameter in ["weight", "bias"]:
            out[f"{new}.{parameter}"] = torch.cat([left.pop(f"{old}.{parameter}") for old in olds])

    def scale(old, new):
        out[f"{new}.scale"] = left.pop(f"{old}.weight")

    for old, new in pairs.items():
        move(old, new)
    for parameter in ["weight", "bias"]:
        first, second = left.pop(f"norm_out.linear.{parameter}").chunk(2)
        out[f"final_layer.adaLN_modulation.1.{parameter}"] = torch.cat([second, first])
    for index in range(depth):
        old, new = f"transformer_blocks.{index}", f"double_blocks.{index}"
        for side, norm, feed, qkv, proj, query, key in [
            ("img", "norm1", "ff", ["to_q", "to_k", "to_v"], "to_out.0", "norm_q", "norm_k"),
            ("txt", "norm1_context", "ff_context", ["add_q_proj", "add_k_proj", "add_v_proj"], "to_add_out",
             "norm_added_q", "norm_added_k"),
        ]:
            move(f"{old}.{norm}.linear", f"{new}.{side}_mod.lin")
            join([f"{old}.attn.{name}" for name in qkv], f"{new}.{side}_attn.qkv")
            move(f"{old}.attn.{proj}", f"{new}.{side}_attn.proj")
            scale(f"{old}.attn.{query}", f"{new}.{side}_attn.norm.query_norm")
            scale(f"{old}.attn.{key}", f"{new}.{side}_attn.norm.key_norm")
            move(f"{old}.{feed}.net.0.proj", f"{new}.{side}_mlp.0")
            move(f"{old}.{feed}.net.2", f"{new}.{side}_mlp.2")
    for index in range(depth_single):
        old, new = f"single_transformer_blocks.{index}", f"single_blocks.{index}"
        move(f"{old}.norm.linear", f"{new}.modulation.lin")
        join([f"{old}.attn.to_q", f"{old}.attn.to_k", f"{old}.attn.to_v", f"{old}.proj_mlp"], f"{new}.linear1")
        move(f"{old}.proj_out", f"{new}.linear2")
        scale(f"{old}.attn.norm_q", f"{new}.norm.query_norm")
        scale(f"{old}.attn.norm_k", f"{new}.norm.key_norm")
    assert not left, list(left)
    return out


def flux():
    from diffusers import FluxTransformer2DModel

    cases = {
        "guided": dict(depth=2, depth_single_blocks=2, guidance_embed=True, qkv_bias=True),
        "plain": dict(depth=1, depth_single_blocks=1, guidance_embed=False, qkv_bias=False),
    }
    sizes = dict(
        in_channels=8, out_channels=4, vec_in_dim=12, context_in_dim=10, hidden_size=16, mlp_ratio=4.0, num_heads=2,
        axes_dim=[2, 4, 2], theta=10000,
    )
    for number, (name, options) in enumerate(cases.items()):
        torch.manual_seed(number)
        config = {**sizes, **options}
        model = FluxTransformer2DModel(
            in_channels=8, out_channels=4, num_layers=config["depth"], num_single_layers=config["depth_single_blocks"],
            attention_head_dim=8, num_attention_heads=2, joint_attention_dim=10, pooled_projection_dim=12,
            guidance_embeds=config["guidance_embed"], axes_dims_rope=config["axes_dim"],
        ).eval()
        randomise(model, 0.2)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(parameter.bfloat16().float())
                # What is q, k and v of the double blocks.
                if not config["qkv_bias"] and key.startswith("transformer_blocks") and key.endswith("bias"):
                    if any(part in key for part in ["attn.to_q", "attn.to_k", "attn.to_v", "attn.add_"]):
                        parameter.zero_()
        batch, side, text = 2, 3, 5
        inputs = dict(
            img=torch.randn(batch, side * side, 8), txt=torch.randn(batch, text, 10), y=torch.randn(batch, 12),
            timesteps=torch.tensor([0.85, 0.3]), txt_ids=torch.zeros(text, 3),
            img_ids=torch.tensor([[0.0, row, column] for row in range(side) for column in range(side)]),
        )
        if config["guidance_embed"]:
            inputs["guidance"] = torch.tensor([3.5, 1.0])
        with torch.no_grad():
            velocity = model(
                hidden_states=inputs["img"], encoder_hidden_states=inputs["txt"], pooled_projections=inputs["y"],
                timestep=inputs["timesteps"], guidance=inputs.get("guidance"), img_ids=inputs["img_ids"],
                txt_ids=inputs["txt_ids"], return_dict=False,
            )[0]
        for ids in ["img_ids", "txt_ids"]:
            inputs[ids] = inputs[ids].expand(batch, -1, -1).contiguous()
        weights = black_forest_labs_names(model.state_dict(), config["depth"], config["depth_single_blocks"])
        if not config["qkv_bias"]:
            weights = {key: value for key, value in weights.items() if not key.endswith("_attn.qkv.bias")}
        weights = {key: value.bfloat16().contiguous() for key, value in weights.items()}
        folder = DATA / "flux" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, folder / "model.safetensors")
        save_file({**inputs, "velocity": velocity}, folder / "expected.safetensors")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
