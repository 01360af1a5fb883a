// Adds products of low rank to a matrix in its storage type, in place: one pass, no f32 copy.
//
// scripts/kernels/regenerate makes patch.ptx of this. The arithmetic is that of src/patch and
// src/float.rs, operation by operation, so that the bytes are those that the host gives: the sum in order of the rank,
// from zero, with fused multiply-add; times the scale; added; each rounded to f32, subnormals kept. The intrinsics with
// `_rn` are there because the compiler would otherwise contract a multiplication and an addition into one.
//
// A thread has a tile of 8 rows by 4 columns in registers; the columns are 32 apart, so that a warp reads and writes
// runs of 32 elements at any alignment. A warp has 8 rows by 128 columns, and a block of 8 warps 64 rows by as many.
// Nothing is shared between threads, so there are no barriers.

#include "float.cuh"

#define ROWS 8
#define COLS 4
#define WARP 32
#define WARPS 8

// One product, as src/backend/kernels.rs lays it out. The places are in bytes from the beginning of the work memory.
struct Product {
    u64 up;        // f32, for each 8 rows of the matrix from the tile of `first_row` on: rank by 8
    u64 down;      // f32, for each 32 columns: rank by 32
    u32 rank;
    u32 first_row; // the rows that it is added to
    u32 end_row;
    float scale;
};

// Where the list of products begins; before it stands the number of saturated values.
#define HEADER 32

// The grid of scales of an fp8 matrix; it begins at `at` bytes of the work memory, 0 where there is none.
struct Scales {
    u32 at, block_rows, block_cols, grid_cols;
};

// `sums` += the product of a thread's 8 rows of `up` and 4 columns of `down`.
__device__ __forceinline__ void multiply(float (&sums)[ROWS][COLS], const float4 *up, const float *const (&down)[COLS], u32 rank) {
#pragma unroll 1
    for (u32 k = 0; k < rank; ++k) {
        float4 low = up[2 * k], high = up[2 * k + 1];
        const float rows[ROWS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            float value = down[col][k * WARP];
#pragma unroll
            for (u32 row = 0; row < ROWS; ++row) sums[row][col] = __fmaf_rn(rows[row], value, sums[row][col]);
        }
    }
}

// Multiplies the values by their scales, or divides them by these.
template <bool DIVIDE>
__device__ __forceinline__ void scale(float (&values)[ROWS][COLS], const u8 *work, Scales scales, u32 first_row, u32 first_col,
                                      u32 rows, u32 cols) {
    const float *all = (const float *)(work + scales.at);
    u32 of_col[COLS];
#pragma unroll
    for (u32 col = 0; col < COLS; ++col) of_col[col] = min(first_col + col * WARP, cols - 1) / scales.block_cols;
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
        u32 of_row = min(first_row + row, rows - 1) / scales.block_rows * scales.grid_cols;
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            float scale = all[of_row + of_col[col]];
            values[row][col] = DIVIDE ? __fdiv_rn(values[row][col], scale) : __fmul_rn(values[row][col], scale);
        }
    }
}

template <class Format>
__device__ __forceinline__ void patch(u8 *memory, u32 rows, u32 cols, u8 *work, u32 products, Scales scales) {
    typedef typename Format::Raw Raw;
    const u32 across = (cols + WARP * COLS - 1) / (WARP * COLS);
    const u32 tile = blockIdx.x / across * WARPS + threadIdx.y;
    const u32 first_row = tile * ROWS;
    const u32 first_col_tile = blockIdx.x % across * COLS;
    const u32 first_col = first_col_tile * WARP + threadIdx.x;
    if (first_row >= rows) return;

    // What lies beyond the edges is read from them, computed along and not stored.
    Raw *weight = (Raw *)memory + (u64)first_row * cols;
    u32 col_of[COLS];
#pragma unroll
    for (u32 col = 0; col < COLS; ++col) col_of[col] = min(first_col + col * WARP, cols - 1);
    float values[ROWS][COLS];
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
        const Raw *of_row = weight + (u64)min(row, rows - 1 - first_row) * cols;
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) values[row][col] = Format::lift(of_row[col_of[col]]);
    }
    if (Format::SCALED && scales.at != 0) scale<false>(values, work, scales, first_row, first_col, rows, cols);

#pragma unroll 1
    for (u32 number = 0; number < products; ++number) {
        const Product *product = (const Product *)(work + HEADER) + number;
        const u32 from = product->first_row, to = product->end_row, rank = product->rank;
        if (first_row + ROWS <= from || first_row >= to) continue;
        const float4 *up = (const float4 *)(work + product->up) + (u64)(tile - from / ROWS) * rank * (ROWS / 4);
        const float *down[COLS];
        const u32 last_tile = (cols - 1) / WARP;
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            u64 col_tile = min(first_col_tile + col, last_tile);
            down[col] = (const float *)(work + product->down) + col_tile * rank * WARP + threadIdx.x;
        }
        float sums[ROWS][COLS] = {};
        multiply(sums, up, down, rank);
        const float factor = product->scale;
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row) {
            if (first_row + row < from || first_row + row >= to) continue;
#pragma unroll
            for (u32 col = 0; col < COLS; ++col) {
                values[row][col] = __fadd_rn(values[row][col], __fmul_rn(factor, sums[row][col]));
            }
        }
    }

    if (Format::SCALED && scales.at != 0) scale<true>(values, work, scales, first_row, first_col, rows, cols);
    u32 saturated = 0;
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row, weight += cols) {
        if (first_row + row >= rows) break;
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            if (first_col + col * WARP < cols) weight[first_col + col * WARP] = Format::round(values[row][col], saturated);
        }
    }
    if (saturated != 0) atomicAdd((u64 *)work, (u64)saturated);
}

#define KERNEL(name, format)                                                                                          \
    extern "C" __global__ void __launch_bounds__(WARP *WARPS, 2)                                                       \
        name(u8 *weight, u8 *work, u32 rows, u32 cols, u32 products, u32 scales_at, u32 block_rows, u32 block_cols,   \
             u32 grid_cols) {                                                                                         \
        Scales scales = {scales_at, block_rows, block_cols, grid_cols};                                               \
        patch<format>(weight, rows, cols, work, products, scales);                                                    \
    }

KERNEL(patch_f32, F32)
KERNEL(patch_f16, F16)
KERNEL(patch_bf16, Bf16)
KERNEL(patch_e4m3, E4m3)
KERNEL(patch_e5m2, E5m2)
