// Adds products of low rank to a matrix in its storage type, in place: one pass, no f32 copy.
//
// scripts/kernels/regenerate makes patch.ptx of this, with cuda.cuh before it; scripts/kernels/hip makes patch.hipfb, with
// hip.cuh before it. The arithmetic is that of src/patch and src/float.rs, operation by operation, so that the bytes are
// those that the host gives: the sum in order of the rank, from zero, with fused multiply-add; times the scale; added; each
// rounded to f32, subnormals kept. The intrinsics with `_rn` are there because the compiler would otherwise contract a
// multiplication and an addition into one.
//
// A block of 128 threads has 64 rows by 128 columns, a warp 32 by 64 of them, and a thread 8 rows by 4 columns in each of
// two tiles of 32 columns. The factors come through shared memory, in slices of 8 of the rank, in two buffers: while one
// is multiplied, the next slice is on its way in registers. In a warp, threads that differ in bit 0 of their number read
// the same columns, and those that differ in bit 1 the same rows, so that a read of 16 bytes by all of them can be
// served in half the passes.

#include "float.cuh"

#define ROWS 8      // of a thread, and of a tile of `up`
#define RUN 4       // columns of a thread in a tile
#define COLS 8      // of a thread, in two tiles
#define WIDE 32     // columns of a tile
#define THREADS 128
#define ROW_TILES 8 // of a block
#define COL_TILES 4
#define SLICE 8     // of the rank
#define LINE 128    // bytes that are asked for at once

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

// The factors of a slice, each tile as it is in the work memory. The rows' tiles are apart by as many banks as a row of them.
struct __align__(16) Slice {
    float up[ROW_TILES][SLICE * ROWS + ROWS];
    float down[COL_TILES][SLICE * WIDE];
};

// A thread's place: the first of its rows and columns in the matrix, its first tiles in the block, and the block's.
struct Place {
    u32 row, col, row_tile, col_tile, block_row_tile, block_col_tile;
};

// `sums` += the products of a thread's 8 rows of `up` and 8 columns of `down`, for one of the rank.
__device__ __forceinline__ void multiply_one(float (&sums)[ROWS][COLS], const float *up, const float *down) {
    float4 low = *(const float4 *)up, high = *(const float4 *)(up + 4);
    float4 left = *(const float4 *)down, right = *(const float4 *)(down + SLICE * WIDE);
    const float rows[ROWS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const float cols[COLS] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) sums[row][col] = __fmaf_rn(rows[row], cols[col], sums[row][col]);
    }
}

// `sums` = a product's sums for the rows and columns of each thread. All threads of a block come here. `turn` is the buffer
// to begin with, and then that for the next call.
__device__ __forceinline__ void multiply(float (&sums)[ROWS][COLS], Slice (&slices)[2], u32 &turn, const Place &place,
                                         const u8 *work, const Product *product, u32 cols) {
    const u32 thread = threadIdx.x, rank = product->rank;
    // What a thread brings of each slice: 16 bytes of `up`, and twice 16 of `down`, from tiles that are two apart. Tiles beyond
    // the matrix or the product's rows are read from its last or first ones, and what comes of them is not used.
    const u32 first_tile = product->first_row / ROWS, last_tile = (product->end_row - 1) / ROWS;
    const u32 up_tile = thread / (SLICE * ROWS / 4), up_part = thread % (SLICE * ROWS / 4);
    const u32 down_tile = thread / (SLICE * WIDE / 4), down_part = thread % (SLICE * WIDE / 4);
    const u32 up_from = min(max(place.block_row_tile + up_tile, first_tile), last_tile) - first_tile;
    const u32 down_from = place.block_col_tile + down_tile, last_col_tile = (cols - 1) / WIDE;
    const float4 *up = (const float4 *)(work + product->up) + (u64)up_from * rank * (ROWS / 4) + up_part;
    const float4 *down = (const float4 *)(work + product->down) + down_part;
    const float4 *low = down + (u64)min(down_from, last_col_tile) * rank * (WIDE / 4);
    const float4 *high = down + (u64)min(down_from + 2, last_col_tile) * rank * (WIDE / 4);
    const u32 up_k = up_part / (ROWS / 4), down_k = down_part / (WIDE / 4);

    float4 next_up = {}, next_low = {}, next_high = {};
    u32 left = rank;
    auto bring = [&]() {
        if (up_k < left) next_up = *up;
        if (down_k < left) {
            next_low = *low;
            next_high = *high;
        }
        up += SLICE * ROWS / 4;
        low += SLICE * WIDE / 4;
        high += SLICE * WIDE / 4;
    };
    auto put = [&]() {
        Slice &slice = slices[turn];
        *(float4 *)&slice.up[up_tile][up_part * 4] = next_up;
        *(float4 *)&slice.down[down_tile][down_part * 4] = next_low;
        *(float4 *)&slice.down[down_tile + 2][down_part * 4] = next_high;
    };
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) sums[row][col] = 0;
    }
    bring();
    put();
#pragma unroll 1
    for (;;) {
        // One barrier is enough: before a buffer is filled, all threads have passed the barrier behind its last use.
        __syncthreads();
        const float *rows = slices[turn].up[place.row_tile];
        const float *runs = &slices[turn].down[place.col_tile][place.col % WIDE];
        const u32 now = min(left, SLICE);
        left -= now;
        turn ^= 1;
        if (left != 0) bring();
        if (now == SLICE) {
#pragma unroll
            for (u32 k = 0; k < SLICE; ++k) multiply_one(sums, rows + k * ROWS, runs + k * WIDE);
        } else {
#pragma unroll 1
            for (u32 k = 0; k < now; ++k) multiply_one(sums, rows + k * ROWS, runs + k * WIDE);
        }
        if (left == 0) break;
        put();
    }
}

// What a thread has of the matrix: from `at` on, so many of the rows and columns are inside of it. The place of the first
// element tells its scales. With `runs`, four elements are read and written as one.
template <class Format>
struct Part {
    typename Format::Raw *at;
    u32 width, row, col, rows, cols;
    bool runs;
};

// Four elements as 32-bit words.
template <u32 WORDS>
struct Run {
    u32 words[WORDS];
};

__device__ __forceinline__ void get(Run<1> &run, const void *at) { run.words[0] = *(const u32 *)at; }
__device__ __forceinline__ void get(Run<2> &run, const void *at) {
    uint2 words = *(const uint2 *)at;
    run = {words.x, words.y};
}
__device__ __forceinline__ void get(Run<4> &run, const void *at) {
    uint4 words = *(const uint4 *)at;
    run = {words.x, words.y, words.z, words.w};
}
__device__ __forceinline__ void set(const Run<1> &run, void *at) { *(u32 *)at = run.words[0]; }
__device__ __forceinline__ void set(const Run<2> &run, void *at) { *(uint2 *)at = make_uint2(run.words[0], run.words[1]); }
__device__ __forceinline__ void set(const Run<4> &run, void *at) {
    *(uint4 *)at = make_uint4(run.words[0], run.words[1], run.words[2], run.words[3]);
}

// An element of a run, and its place in a word.
#define WORD(raw, col) ((col) * sizeof(raw) / 4)
#define SHIFT(raw, col) ((col) * sizeof(raw) % 4 * 8)

// Multiplies the values by their scales, or divides them by these.
template <class Format, bool DIVIDE>
__device__ __forceinline__ void scale(float (&values)[ROWS][COLS], const Part<Format> &part, const u8 *work, Scales scales) {
    const float *all = (const float *)(work + scales.at);
    u32 of_col[COLS];
#pragma unroll
    for (u32 col = 0; col < COLS; ++col) {
        u32 at = col / RUN * WIDE + col % RUN;
        of_col[col] = min(part.col + at, part.width - 1) / scales.block_cols;
    }
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
        if (row >= part.rows) break;
        u32 of_row = (part.row + row) / scales.block_rows * scales.grid_cols;
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            float scale = all[of_row + of_col[col]];
            values[row][col] = DIVIDE ? __fdiv_rn(values[row][col], scale) : __fmul_rn(values[row][col], scale);
        }
    }
}

// The values of a part; what is outside of the matrix is zero, and is not stored.
template <class Format>
__device__ __forceinline__ void load(float (&values)[ROWS][COLS], const Part<Format> &part, const u8 *work, Scales scales) {
    typedef typename Format::Raw Raw;
    Run<sizeof(Raw)> all[ROWS][COLS / RUN] = {};
    const Raw *at = part.at;
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row, at += part.width) {
        if (row >= part.rows) break;
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            const u32 to = col / RUN * WIDE + col % RUN;
            Run<sizeof(Raw)> &run = all[row][col / RUN];
            if (part.runs && col % RUN == 0 && to < part.cols) get(run, at + to);
            if (!part.runs && to < part.cols) run.words[WORD(Raw, col % RUN)] |= (u32)at[to] << SHIFT(Raw, col % RUN);
        }
    }
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            u32 word = all[row][col / RUN].words[WORD(Raw, col % RUN)];
            values[row][col] = Format::lift((Raw)(word >> SHIFT(Raw, col % RUN)));
        }
    }
    if (Format::SCALED && scales.at != 0) scale<Format, false>(values, part, work, scales);
}

// Rounds the values of a part and stores them.
template <class Format>
__device__ __forceinline__ void store(float (&values)[ROWS][COLS], const Part<Format> &part, u8 *work, Scales scales) {
    typedef typename Format::Raw Raw;
    if (Format::SCALED && scales.at != 0) scale<Format, true>(values, part, work, scales);
    u32 saturated = 0;
    Run<sizeof(Raw)> all[ROWS][COLS / RUN] = {};
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            u32 more = 0;
            const Raw raw = Format::round(values[row][col], more);
            all[row][col / RUN].words[WORD(Raw, col % RUN)] |= (u32)raw << SHIFT(Raw, col % RUN);
            saturated += row < part.rows && col / RUN * WIDE + col % RUN < part.cols ? more : 0;
        }
    }
    Raw *at = part.at;
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row, at += part.width) {
        if (row >= part.rows) break;
#pragma unroll
        for (u32 col = 0; col < COLS; ++col) {
            const u32 to = col / RUN * WIDE + col % RUN;
            const Run<sizeof(Raw)> &run = all[row][col / RUN];
            if (part.runs && col % RUN == 0 && to < part.cols) set(run, at + to);
            if (!part.runs && to < part.cols) at[to] = (Raw)(run.words[WORD(Raw, col % RUN)] >> SHIFT(Raw, col % RUN));
        }
    }
    if (saturated != 0) atomicAdd((u64 *)work, (u64)saturated);
}

// Adds the scaled sums to the values, in the product's rows.
__device__ __forceinline__ void add(float (&values)[ROWS][COLS], const float (&sums)[ROWS][COLS], u32 first_row,
                                    const Product *product) {
    const u32 from = product->first_row, to = product->end_row;
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

// Whether a product is added to any row of a block.
__device__ __forceinline__ bool is_touched(const Place &place, const Product *product) {
    const u32 first = place.block_row_tile * ROWS, end = first + ROW_TILES * ROWS;
    return product->end_row > first && product->first_row < end;
}

// Asks for what a block has of the matrix, so that it is on its way while the products are computed.
template <class Format>
__device__ __forceinline__ void ask_for(const u8 *memory, u32 rows, u32 cols, const Place &place) {
    const u32 size = sizeof(typename Format::Raw), lines = WIDE * COL_TILES * size / LINE;
    for (u32 at = threadIdx.x; at < ROW_TILES * ROWS * lines; at += THREADS) {
        const u32 row = place.block_row_tile * ROWS + at / lines, col = place.block_col_tile * WIDE + at % lines * (LINE / size);
        if (row < rows && col < cols) prefetch(memory + ((u64)row * cols + col) * size);
    }
}

// `ONE`: there is one product. Then the values need not be kept while sums are computed.
template <class Format, bool ONE>
__device__ __forceinline__ void patch(u8 *memory, u32 rows, u32 cols, u8 *work, u32 products, Scales scales) {
    typedef typename Format::Raw Raw;
    __shared__ Slice slices[2];
    const u32 across = (cols + WIDE * COL_TILES - 1) / (WIDE * COL_TILES);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Place place;
    place.block_row_tile = blockIdx.x / across * ROW_TILES;
    place.block_col_tile = blockIdx.x % across * COL_TILES;
    place.row_tile = warp / 2 * 4 + (lane & 1) + (lane >> 4) * 2;
    place.col_tile = warp % 2 * 2;
    place.row = (place.block_row_tile + place.row_tile) * ROWS;
    place.col = (place.block_col_tile + place.col_tile) * WIDE + (lane >> 1 & 7) * RUN;

    Part<Format> part;
    part.at = (Raw *)memory + (u64)place.row * cols + place.col;
    part.width = cols, part.row = place.row, part.col = place.col;
    part.rows = rows - min(place.row, rows), part.cols = cols - min(place.col, cols);
    part.runs = cols % RUN == 0 && (u64)memory % (RUN * sizeof(Raw)) == 0;
    const Product *const first = (const Product *)(work + HEADER);
    u32 turn = 0;
    if (ONE) {
        ask_for<Format>(memory, rows, cols, place);
        float sums[ROWS][COLS], values[ROWS][COLS];
        const bool touched = is_touched(place, first);
        if (touched) multiply(sums, slices, turn, place, work, first, cols);
        load(values, part, work, scales);
        if (touched) add(values, sums, place.row, first);
        store(values, part, work, scales);
        return;
    }
    float values[ROWS][COLS];
    load(values, part, work, scales);
#pragma unroll 1
    for (u32 number = 0; number < products; ++number) {
        const Product *product = first + number;
        if (!is_touched(place, product)) continue;
        float sums[ROWS][COLS];
        multiply(sums, slices, turn, place, work, product, cols);
        add(values, sums, place.row, product);
    }
    store(values, part, work, scales);
}

#define KERNEL(name, format, one)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 3)                                                           \
        name(u8 *weight, u8 *work, u32 rows, u32 cols, u32 products, u32 scales_at, u32 block_rows, u32 block_cols,   \
             u32 grid_cols) {                                                                                         \
        Scales scales = {scales_at, block_rows, block_cols, grid_cols};                                               \
        patch<format, one>(weight, rows, cols, work, products, scales);                                                \
    }

KERNEL(patch_f32, F32, false)
KERNEL(patch_f16, F16, false)
KERNEL(patch_bf16, Bf16, false)
KERNEL(patch_e4m3, E4m3, false)
KERNEL(patch_e5m2, E5m2, false)
KERNEL(patch_one_f32, F32, true)
KERNEL(patch_one_f16, F16, true)
KERNEL(patch_one_bf16, Bf16, true)
