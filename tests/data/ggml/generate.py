#!/usr/bin/env python3
"""Writes the files beside it: blocks of GGML's formats and the values they stand for, and values and the blocks they become.

Values come from gguf-py (`pip install gguf`), those of the formats that it lacks and of the K formats' and IQ4_NL's blocks from
ggml's own C code: GGML_SOURCE names a checkout of it, of which src/ggml-quants.c is compiled without contraction of products
and sums. README.md tells the versions.
"""
import ctypes, hashlib, json, os, subprocess, tempfile
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = {t.name: s for t, s in GGML_QUANT_SIZES.items()}
SIZES.update(Q8_1=(32, 36), Q8_K=(256, 292), Q2_0=(64, 18))
FORMATS = """Q1_0 Q2_0 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S
IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 NVFP4""".split()
# Where a block's half floats lie.
HALVES = dict(Q1_0=[0], Q2_0=[0], Q4_0=[0], Q4_1=[0, 2], Q5_0=[0], Q5_1=[0, 2], Q8_0=[0], Q8_1=[0, 2], Q2_K=[80, 82], Q3_K=[108],
              Q4_K=[0, 2], Q5_K=[0, 2], Q6_K=[208], IQ1_S=[0], IQ2_XXS=[0], IQ2_XS=[0], IQ2_S=[0], IQ3_XXS=[0], IQ3_S=[0], IQ4_NL=[0],
              IQ4_XS=[0], TQ1_0=[52], TQ2_0=[64])

def library():
    source, out = os.environ["GGML_SOURCE"], os.path.join(tempfile.mkdtemp(), "ggml.so")
    subprocess.run(["gcc", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{source}/include", f"-I{source}/src", "-o", out,
                    f"{source}/src/ggml-quants.c", "-lm"], check=True)
    return ctypes.CDLL(out, mode=os.RTLD_LAZY)

C = library()
np.seterr(all="ignore")

def mixed(v):
    """The finaliser of SplitMix64 after one step."""
    v = v + np.uint64(0x9e3779b97f4a7c15)
    v = (v ^ v >> np.uint64(30)) * np.uint64(0xbf58476d1ce4e5b9)
    v = (v ^ v >> np.uint64(27)) * np.uint64(0x94d049bb133111eb)
    return v ^ v >> np.uint64(31)

def random_bytes(count):
    return mixed(np.arange((count + 7) // 8, dtype=np.uint64)).astype("<u8").view(np.uint8)[:count]

def dequantized(name, blocks):
    elements, size = SIZES[name]
    count = blocks.size // size * elements
    out = np.empty(count, np.float32)
    if name in ("Q1_0", "Q2_0", "Q8_K"):
        getattr(C, "dequantize_row_" + name.replace("Q", "q"))(blocks.ctypes.data_as(ctypes.c_void_p),
            out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(count))
        return out
    if name == "Q8_1":  # the blocks of Q8_0 with a sum after the scale
        blocks, name = np.delete(blocks.reshape(-1, 36), [2, 3], axis=1).reshape(-1), "Q8_0"
    return quants.dequantize(blocks.reshape(1, -1), T[name]).reshape(-1)

def uniform(start, count):
    return ((mixed(np.arange(start, start + count, dtype=np.uint64)) >> np.uint64(40)).astype(np.float32)
            / np.float32(1 << 24) - np.float32(0.5))

def bell(start, count):
    u = uniform(start, 4 * count).reshape(count, 4)
    return ((u[:, 0] + u[:, 1]) + u[:, 2]) + u[:, 3]

DISTRIBUTIONS = {"uniform": lambda n: uniform(0, n), "bell": lambda n: bell(0, n), "tails": lambda n: bell(0, n) ** 2 * bell(0, n)}
DISTRIBUTIONS["positive"] = lambda n: np.abs(bell(0, n)) + np.float32(0.25)

def inputs():
    f = np.float32
    rows = [uniform(0, 256), bell(1, 256), bell(2, 256) ** 3, bell(3, 256) * f(0.02), bell(4, 256) * f(1e-5), bell(5, 256) * f(3e-8),
            bell(6, 256) * f(1e-30), bell(7, 256) * f(1e4), bell(8, 256) * f(1e6), np.zeros(256, f), np.full(256, 0.37, f),
            np.full(256, -1.5, f), np.abs(bell(9, 256)), -np.abs(bell(10, 256)), bell(11, 256) + f(10),
            np.round(bell(12, 256) * f(4)), np.where(np.arange(256) % 2 == 0, f(0.5), f(-0.5)), np.arange(256, dtype=f) - f(128)]
    rows += [np.where(np.arange(256) % 32 == 5, f(8), bell(13, 256) * f(0.01)), np.where(np.arange(256) < 64, f(0), bell(14, 256)),
             np.where(np.arange(256) == 77, f(-3), f(0)), -np.zeros(256, f)]
    return np.stack(rows).astype(np.float32)

def quantized(name, x):
    elements, size = SIZES[name]
    if name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL"):
        out = np.zeros(x.size // elements * size, np.uint8)
        call = getattr(C, "quantize_iq4_nl")
        call.restype = ctypes.c_size_t
        x = np.ascontiguousarray(x, np.float32)
        # By the row, since ggml_row_size is not linked.
        ref = {"Q4_K": "quantize_row_q4_K_ref", "Q5_K": "quantize_row_q5_K_ref", "Q6_K": "quantize_row_q6_K_ref"}.get(name)
        if ref:
            getattr(C, ref)(x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size))
        else:
            call(x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(1), ctypes.c_int64(x.size), None)
        return out
    return quants.quantize(x.reshape(-1, 256), T[name]).reshape(-1)

def write(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {"dtype": {"uint8": "U8", "float32": "F32"}[str(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(os.path.join(HERE, path), "wb").write(len(text).to_bytes(8, "little") + text + data)

blocks, digests = {}, {}
for name in FORMATS:
    elements, size = SIZES[name]
    some = random_bytes(4 * size).reshape(4, size).copy()
    # A scale of the usual size, the largest one, the least one and a negative one.
    for at in HALVES.get(name, []):
        some[:, at:at + 2] = np.array([0x211f, 0x7bff, 0x0001, 0xb4cd], "<u2").view(np.uint8).reshape(4, 2)
    if name == "IQ1_M":
        for row, scale in zip(some, (0x211f, 0x7bff, 0x0001, 0xb4cd)):
            for k in range(4):
                row[48 + 2 * k + 1] = row[48 + 2 * k + 1] & 15 | (scale >> 4 * k & 15) << 4
    if name == "Q8_K":
        some[:, :4] = np.array([0.01, 1e30, 1e-42, -3.7], "<f4").view(np.uint8).reshape(4, 4)
    blocks[name] = some
    blocks[name + ".values"] = dequantized(name, some.reshape(-1)).reshape(4, elements)
    many = dequantized(name, random_bytes(1000 * size)).astype("<f4").copy()
    many.view("<u4")[np.isnan(many)] = 0x7fc00000
    digests[name] = hashlib.sha256(many.tobytes()).hexdigest()
write("dequantized.safetensors", blocks)
json.dump(digests, open(os.path.join(HERE, "dequantized.json"), "w"), indent=1)

x = inputs()
made = {"values": x}
for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 MXFP4 Q4_K Q5_K Q6_K IQ4_NL".split():
    made[name] = quantized(name, x)
write("quantized.safetensors", made)
errors = {}
for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 MXFP4 Q4_K Q5_K Q6_K IQ4_NL".split():
    errors[name] = {}
    for kind, make in DISTRIBUTIONS.items():
        v = make(256 * 200).astype(np.float32)
        back = dequantized(name, quantized(name, v))
        errors[name][kind] = float(np.sqrt(np.mean((back.astype(np.float64) - v) ** 2)))
json.dump(errors, open(os.path.join(HERE, "errors.json"), "w"), indent=1)
