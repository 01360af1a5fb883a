// Computes the values of GGML's blocks, in f32, f16 or bf16.
//
// scripts/kernels/regenerate makes dequantise.ptx of this and of the headers, which have the formats as the files of the same
// names in src/ggml. The arithmetic is theirs, operation by operation, and the one rounding at the end that of src/float.rs,
// so that the bytes are those that the host gives.
//
// A warp has 256 consecutive values, in eight runs of 32, which are 1 to 8 blocks. A thread has the values at its place of each
// run, so that a warp reads and writes consecutive bytes. A block of threads is eight warps; src/backend/drivers/dequantise.rs
// launches as many as the runs take.
//
// A format has the bytes and the runs of a block (1, 2, 4 or 8), and the value at `at` of a run of the block.

#include "float.cuh"
#include "parts.cuh"
#include "blocks.cuh"
#include "k_quants.cuh"
#include "ternary.cuh"
#include "grids.cuh"
#include "lattices.cuh"

#define WARPS 8
#define RUNS 8

// The types of values, as src/backend/drivers/dequantise.rs numbers them.
#define TO_F32 0
#define TO_F16 1
#define TO_BF16 2

template <class Format>
__device__ __forceinline__ void dequantise(const u8 *blocks, u8 *values, u32 runs, u32 kind) {
    const u64 first = ((u64)blockIdx.x * WARPS + threadIdx.y) * RUNS;
    const u32 at = threadIdx.x;
    if (first >= runs) return;

    // A warp's first run begins a block. Runs beyond the last are computed as ones of the last block and not stored.
    const u32 count = (u32)min(runs - first, (u64)RUNS), last = (count - 1) / Format::RUNS_OF_BLOCK;
    const u8 *own = blocks + first / Format::RUNS_OF_BLOCK * Format::BYTES;
    float of_runs[RUNS];
#pragma unroll
    for (u32 run = 0; run < RUNS; ++run) {
        const u32 block = min(run / Format::RUNS_OF_BLOCK, last);
        of_runs[run] = Format::value(own + block * Format::BYTES, run % Format::RUNS_OF_BLOCK, at);
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

KERNEL(dequantise_q1_0, Q1_0)
KERNEL(dequantise_q2_0, Q2_0)
KERNEL(dequantise_q4_0, Q4_0)
KERNEL(dequantise_q4_1, Q4_1)
KERNEL(dequantise_q5_0, Q5_0)
KERNEL(dequantise_q5_1, Q5_1)
KERNEL(dequantise_q8_0, Q8_0)
KERNEL(dequantise_q8_1, Q8_1)
KERNEL(dequantise_q2_k, Q2_K)
KERNEL(dequantise_q3_k, Q3_K)
KERNEL(dequantise_q4_k, Q4_K)
KERNEL(dequantise_q5_k, Q5_K)
KERNEL(dequantise_q6_k, Q6_K)
KERNEL(dequantise_q8_k, Q8_K)
KERNEL(dequantise_iq1_s, IQ1_S)
KERNEL(dequantise_iq1_m, IQ1_M)
KERNEL(dequantise_iq2_xxs, IQ2_XXS)
KERNEL(dequantise_iq2_xs, IQ2_XS)
KERNEL(dequantise_iq2_s, IQ2_S)
KERNEL(dequantise_iq3_xxs, IQ3_XXS)
KERNEL(dequantise_iq3_s, IQ3_S)
KERNEL(dequantise_iq4_nl, IQ4_NL)
KERNEL(dequantise_iq4_xs, IQ4_XS)
KERNEL(dequantise_tq1_0, TQ1_0)
KERNEL(dequantise_tq2_0, TQ2_0)
KERNEL(dequantise_mxfp4, MXFP4)
KERNEL(dequantise_nvfp4, NVFP4)
