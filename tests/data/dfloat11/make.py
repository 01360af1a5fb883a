"""Makes this folder's checkpoints with DFloat11's own code: `python make.py`, with the packages dfloat11 0.5.0, torch 2.15,
transformers 5.24, safetensors, dahuffman, numpy and tqdm. No card is needed: what dfloat11 asks of one is left out.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import types

import numpy as np
import torch
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))


def without_card():
    """Stand-ins for the modules that dfloat11 imports for the card and for downloads. Nothing calls them here."""
    stand_ins = {
        "cupy": {"RawModule": lambda path: types.SimpleNamespace(get_function=lambda name: None)},
        "accelerate": {"infer_auto_device_map": None, "dispatch_model": None},
        "accelerate.utils": {"get_balanced_memory": None},
        "huggingface_hub": {"snapshot_download": None},
        "pkg_resources": {"resource_filename": lambda package, name: name},
    }
    before = {name: sys.modules.get(name) for name in stand_ins}
    for name, members in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(members)
    import dfloat11.dfloat11 as package
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module
    return package


import transformers

package = without_card()


def folder(name):
    path = os.path.join(HERE, name)
    shutil.rmtree(path, ignore_errors=True)
    return path


def compress(model, patterns, path, single):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        package.compress_model(model, patterns, path, save_single_file=single, check_correctness=False)
    save_file(before, f"{path}.expected.safetensors")


def scaled(model):
    """Weights of trained models' scales, biases and norms that are not all the same."""
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        deviation = 0.02 if value.dim() > 1 else 0.3
        value.data = torch.randn(value.shape, generator=generator).mul(deviation).to(torch.bfloat16)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=160,
        max_position_embeddings=64, tie_word_embeddings=False, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    scaled(model)
    # That of DFloat11/Llama-3.1-8B-Instruct-DF11.
    weights = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    weights += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    compress(model, {"lm_head": [], "model.embed_tokens": [], r"model.layers.\d+": weights}, folder("llama"), False)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.Module()
        self.norm.linear = torch.nn.Linear(width, 3 * width)
        self.proj_mlp = torch.nn.Linear(width, 4 * width)
        self.proj_out = torch.nn.Linear(5 * width, width)
        self.attn = torch.nn.Module()
        for name in ["to_q", "to_k", "to_v"]:
            setattr(self.attn, name, torch.nn.Linear(width, width))


class Flux(torch.nn.Module):
    """The names of FLUX.1's single blocks in diffusers. Every weight has a bias."""

    def __init__(self, width, count):
        super().__init__()
        self.x_embedder = torch.nn.Linear(16, width)
        self.single_transformer_blocks = torch.nn.ModuleList(Block(width) for _ in range(count))


def flux():
    model = Flux(24, 2).to(torch.bfloat16)
    scaled(model)
    weights = ("norm.linear", "proj_mlp", "proj_out", "attn.to_q", "attn.to_k", "attn.to_v")
    compress(model, {r"single_transformer_blocks\.\d+": weights}, folder("flux"), True)


class Single(torch.nn.Module):
    """A single block of FLUX.1 in ComfyUI's names."""

    def __init__(self, width):
        super().__init__()
        self.linear1 = torch.nn.Linear(width, 7 * width)
        self.linear2 = torch.nn.Linear(5 * width, width)
        self.modulation = torch.nn.Module()
        self.modulation.lin = torch.nn.Linear(width, 3 * width)


class Comfy(torch.nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.img_in = torch.nn.Linear(8, width)
        self.single_blocks = torch.nn.ModuleList(Single(width) for _ in range(count))


def comfy():
    model = Comfy(16, 2).to(torch.bfloat16)
    scaled(model)
    path = folder("comfy")
    # As the loader for ComfyUI has it, whose files come without the configuration.
    compress(model, {r"single_blocks\.\d+": ("linear1", "linear2", "modulation.lin")}, path, True)
    shutil.move(os.path.join(path, "model.safetensors"), f"{path}.safetensors")
    shutil.rmtree(path)


def bf16(exponents, generator):
    """Weights of these exponents, with random signs and mantissas."""
    rest = torch.from_numpy(generator.integers(0, 256, len(exponents)).astype(np.int64))
    bits = (rest & 0x80) << 8 | torch.as_tensor(exponents, dtype=torch.int64) << 7 | rest & 0x7F
    bits = torch.where(bits >= 1 << 15, bits - (1 << 16), bits)
    return bits.to(torch.int16).view(torch.bfloat16)


def coded(weights):
    """The tensors of a group of these weights, as `compress_model` makes them."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        codec, _, table = package.get_32bit_codec(package.get_codec(torch.cat(weights))[1])
        luts = package.get_luts(table)
        encoded, rests, positions, gaps, splits = package.encode_weights(weights, codec, 8, 512)
    tensors = dict(luts=luts, encoded_exponent=encoded, sign_mantissa=rests, gaps=gaps, split_positions=splits)
    return {**tensors, "output_positions": positions.view(torch.uint8)}


def code_lengths(weights):
    """The bits of the code of each weight's exponent."""
    weights = torch.cat(weights)
    table = package.get_32bit_codec(package.get_codec(weights)[1])[2]
    return [table[exponent][0] for exponent in (weights.view(torch.int16) >> 7 & 0xFF).tolist()]


def codes():
    """Groups at the edges of the format."""
    generator = np.random.default_rng(2)
    groups = {}
    groups["few"] = [bf16([120, 121, 120, 119, 120, 121, 122], generator)]
    # The rarest have codes of many bits, in several tables.
    counts = [1, 1]
    while len(counts) < 20:
        counts.append(counts[-1] + counts[-2])
    rare = np.repeat(np.arange(100, 120), counts)
    groups["rare"] = [bf16(generator.permutation(rare), generator)]
    # All that the format takes: the exponents below 240.
    groups["all"] = [bf16(np.concatenate([np.arange(240), generator.integers(0, 240, 3000)]), generator)]
    groups["several"] = [torch.from_numpy(generator.normal(0, 0.02, n)).to(torch.bfloat16) for n in (1, 9999, 4096, 2)]
    # Where the last code ends: at the end of a block; in the next one, with a byte.
    block = 8 * 8 * 512
    wanted = {
        "exact": lambda bits, last: bits == block,
        "crossing": lambda bits, last: bits > block > bits - last and bits % 8 == 0,
    }
    for seed in range(1000):
        exponents = np.random.default_rng(seed).integers(64, 200, 4700)
        for count in range(4600, 4640):
            lengths = code_lengths([bf16(exponents[:count], generator)])
            for name, wants in list(wanted.items()):
                if wants(sum(lengths), lengths[-1]):
                    groups[name] = [bf16(exponents[:count], generator)]
                    del wanted[name]
        if not wanted:
            break
    assert not wanted, wanted
    tensors, expected, lines = {}, {}, []
    for name, weights in groups.items():
        lengths = code_lengths(weights)
        tensors.update({f"{name}.{key}": value for key, value in coded(weights).items()})
        expected.update({f"{name}.{index}": weight for index, weight in enumerate(weights)})
        lines.append(f"{name} {len(lengths)} weights, {sum(lengths)} bits, codes of up to {max(lengths)} bits")
    save_file(tensors, os.path.join(HERE, "codes.safetensors"))
    save_file(expected, os.path.join(HERE, "codes.expected.safetensors"))
    print("\n".join(lines))


llama()
flux()
comfy()
codes()
