// Computes the values of GGML's blocks, in f32, f16 or bf16.
//
// scripts/kernels/regenerate makes dequantise.ptx of this. The arithmetic is that of src/ggml, operation by operation, and
// the one rounding at the end that of src/float.rs, so that the bytes are those that the host gives. The intrinsics with
// `_rn` are there because the compiler would otherwise contract a multiplication and an addition into one.
//
// A warp has 256 consecutive values, in eight runs of 32: eight blocks of 32 values, or one of 256. A thread has the values
// at its place of each run, so that a warp reads and writes consecutive bytes. Blocks begin at any byte, so all reads are of
// single bytes.

#include "float.cuh"

#define WARP 32
#define WARPS 8
#define RUNS 8

// The types of values, as src/backend/cuda/kernels/dequantise.rs numbers them.
#define TO_F32 0
#define TO_F16 1
#define TO_BF16 2

__device__ __forceinline__ float half_at(const u8 *bytes) {
    return F16::lift((u16)(bytes[0] | bytes[1] << 8));
}

__device__ __forceinline__ float times(float scale, int code) {
    return __fmul_rn(scale, __int2float_rn(code));
}

// The byte as a number with a sign.
__device__ __forceinline__ int with_sign(u8 byte) {
    return (int)byte - ((int)(byte & 0x80) << 1);
}

// The half byte of a value in blocks of 32: those of the low halves of sixteen bytes, and after these of the high ones.
__device__ __forceinline__ int nibble_of(const u8 *codes, u32 at) {
    return codes[at & 15] >> (at >> 4 << 2) & 15;
}

// Byte number `at` of sixteen that two numbers hold, the first in the lowest bits.
__device__ __forceinline__ u8 entry(u64 low, u64 high, int at) {
    return (u8)((at & 8 ? high : low) >> ((at & 7) << 3));
}

__device__ __forceinline__ int fifth_bit(const u8 *bits, u32 at) {
    return (bits[at >> 3] >> (at & 7) & 1) << 4;
}

// A format has the bytes and the runs of a block, and the value at `at` of a run.

struct Q4_0 {
    enum { BYTES = 18, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        return times(half_at(block), nibble_of(block + 2, at) - 8);
    }
};

struct Q4_1 {
    enum { BYTES = 20, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        return __fadd_rn(times(half_at(block), nibble_of(block + 4, at)), half_at(block + 2));
    }
};

struct Q5_0 {
    enum { BYTES = 22, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        return times(half_at(block), (nibble_of(block + 6, at) | fifth_bit(block + 2, at)) - 16);
    }
};

struct Q5_1 {
    enum { BYTES = 24, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        int code = nibble_of(block + 8, at) | fifth_bit(block + 4, at);
        return __fadd_rn(times(half_at(block), code), half_at(block + 2));
    }
};

struct Q8_0 {
    enum { BYTES = 34, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        return times(half_at(block), with_sign(block[2 + at]));
    }
};

// The values that the codes stand for, -127 to 113, as src/ggml/blocks.rs lists them.
struct IQ4_NL {
    enum { BYTES = 18, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        u8 number = entry(0xf6eaddcfbfad9881ull, 0x7159453526190d01ull, nibble_of(block + 2, at));
        return times(half_at(block), with_sign(number));
    }
};

// Half of two to the power of an exponent of eight bits, biased by 127, times twice the value of a sign, two bits of exponent
// and one of fraction.
struct MXFP4 {
    enum { BYTES = 17, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        u32 exponent = block[0];
        float scale = __uint_as_float(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23);
        int code = nibble_of(block + 1, at);
        int magnitude = entry(0x0c08060403020100ull, 0x0c08060403020100ull, code);
        return times(scale, code & 8 ? -magnitude : magnitude);
    }
};

// The factors of scale and least value of the eight runs of Q4_K and Q5_K, each of six bits.
__device__ __forceinline__ int six_bits_of_scale(const u8 *packed, u32 run) {
    return run < 4 ? packed[run] & 63 : (packed[run + 4] & 15) | packed[run - 4] >> 6 << 4;
}

__device__ __forceinline__ int six_bits_of_least(const u8 *packed, u32 run) {
    return run < 4 ? packed[run + 4] & 63 : packed[run + 4] >> 4 | packed[run] >> 6 << 4;
}

__device__ __forceinline__ float of_run(const u8 *block, u32 run, int code) {
    float scale = times(half_at(block), six_bits_of_scale(block + 4, run));
    float least = times(half_at(block + 2), six_bits_of_least(block + 4, run));
    return __fsub_rn(times(scale, code), least);
}

struct Q4_K {
    enum { BYTES = 144, RUNS_OF_BLOCK = RUNS };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        return of_run(block, run, block[16 + (run >> 1) * WARP + at] >> ((run & 1) << 2) & 15);
    }
};

struct Q5_K {
    enum { BYTES = 176, RUNS_OF_BLOCK = RUNS };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        int code = block[48 + (run >> 1) * WARP + at] >> ((run & 1) << 2) & 15;
        return of_run(block, run, code | (block[16 + at] >> run & 1) << 4);
    }
};

struct Q6_K {
    enum { BYTES = 210, RUNS_OF_BLOCK = RUNS };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        int low = block[(run >> 2) * 64 + (run & 1) * WARP + at] >> ((run & 2) << 1) & 15;
        int high = block[128 + (run >> 2) * WARP + at] >> ((run & 3) << 1) & 3;
        float scale = times(half_at(block + 208), with_sign(block[192 + 2 * run + (at >> 4)]));
        return times(scale, (low | high << 4) - 32);
    }
};

template <class Format>
__device__ __forceinline__ void dequantise(const u8 *blocks, u8 *values, u32 runs, u32 kind) {
    const u64 first = ((u64)blockIdx.x * WARPS + threadIdx.y) * RUNS;
    const u32 at = threadIdx.x;
    if (first >= runs) return;

    // Runs beyond the last are computed as that one and not stored.
    const u32 count = (u32)min(runs - first, (u64)RUNS);
    float of_runs[RUNS];
#pragma unroll
    for (u32 run = 0; run < RUNS; ++run) {
        const u64 block = (first + min(run, count - 1)) / Format::RUNS_OF_BLOCK;
        of_runs[run] = Format::value(blocks + block * Format::BYTES, run, at);
    }

    u32 saturated = 0;
    const u64 place = first * WARP + at;
#pragma unroll
    for (u32 run = 0; run < RUNS; ++run) {
        if (run >= count) break;
        const u64 here = place + run * WARP;
        if (kind == TO_F32) ((u32 *)values)[here] = F32::round(of_runs[run], saturated);
        if (kind == TO_F16) ((u16 *)values)[here] = F16::round(of_runs[run], saturated);
        if (kind == TO_BF16) ((u16 *)values)[here] = Bf16::round(of_runs[run], saturated);
    }
}

#define KERNEL(name, format)                                                                                          \
    extern "C" __global__ void __launch_bounds__(WARP *WARPS) name(const u8 *blocks, u8 *values, u32 runs, u32 kind) { \
        dequantise<format>(blocks, values, runs, kind);                                                               \
    }

KERNEL(dequantise_q4_0, Q4_0)
KERNEL(dequantise_q4_1, Q4_1)
KERNEL(dequantise_q5_0, Q5_0)
KERNEL(dequantise_q5_1, Q5_1)
KERNEL(dequantise_q8_0, Q8_0)
KERNEL(dequantise_q4_k, Q4_K)
KERNEL(dequantise_q5_k, Q5_K)
KERNEL(dequantise_q6_k, Q6_K)
KERNEL(dequantise_iq4_nl, IQ4_NL)
KERNEL(dequantise_mxfp4, MXFP4)
