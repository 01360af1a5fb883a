// The formats of src/ggml/k_quants.rs: blocks of 256 values in sub-blocks, whose scales are themselves codes of a scale of the
// block. A sub-block is a run, or half of one.

// The two-bit code of a value, of which each 32 bytes hold four runs.
__device__ __forceinline__ int two_bits(const u8 *codes, u32 run, u32 at) {
    return codes[(run >> 2) * WARP + at] >> ((run & 3) << 1) & 3;
}

struct Q2_K {
    enum { BYTES = 84, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u8 factors = block[2 * run + (at >> 4)];
        float scale = times(half_at(block + 80), factors & 15), least = times(half_at(block + 82), factors >> 4);
        return __fsub_rn(times(scale, two_bits(block + 16, run, at)), least);
    }
};

// A set bit of the mask is the third bit of a code, from which four is taken off.
struct Q3_K {
    enum { BYTES = 110, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        const u8 *factors = block + 96;
        u32 sub = 2 * run + (at >> 4);
        int low = factors[sub & 7] >> (sub >> 3 << 2) & 15, high = factors[8 + (sub & 3)] >> (sub >> 2 << 1) & 3;
        float scale = times(half_at(block + 108), (low | high << 4) - 32);
        int third = block[at] >> run & 1;
        return times(scale, (two_bits(block + 32, run, at) | third << 2) - 4);
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

// The four-bit code of a value, of which each 32 bytes hold two runs.
__device__ __forceinline__ int four_bits(const u8 *codes, u32 run, u32 at) {
    return codes[(run >> 1) * WARP + at] >> ((run & 1) << 2) & 15;
}

struct Q4_K {
    enum { BYTES = 144, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        return of_run(block, run, four_bits(block + 16, run, at));
    }
};

struct Q5_K {
    enum { BYTES = 176, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        return of_run(block, run, four_bits(block + 48, run, at) | (block[16 + at] >> run & 1) << 4);
    }
};

struct Q6_K {
    enum { BYTES = 210, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        int low = block[(run >> 2) * 64 + (run & 1) * WARP + at] >> ((run & 2) << 1) & 15;
        int high = two_bits(block + 128, run, at);
        float scale = times(half_at(block + 208), with_sign(block[192 + 2 * run + (at >> 4)]));
        return times(scale, (low | high << 4) - 32);
    }
};

// A scale in f32, the codes, and sums that only products need.
struct Q8_K {
    enum { BYTES = 292, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        return times(__uint_as_float(double_word(block)), with_sign(block[4 + run * WARP + at]));
    }
};
