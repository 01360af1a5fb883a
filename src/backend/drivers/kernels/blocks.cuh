// The formats of src/ggml/blocks.rs: blocks with one scale, or one for each few values, and codes of whole bits or of a fixed
// table.

struct Q1_0 {
    enum { BYTES = 18, RUNS_OF_BLOCK = 4 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 plus = block[2 + run * 4 + (at >> 3)] >> (at & 7) & 1;
        return signed_by(half_at(block), plus ^ 1, 0);
    }
};

struct Q2_0 {
    enum { BYTES = 18, RUNS_OF_BLOCK = 2 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        return times(half_at(block), (block[2 + run * 8 + (at >> 2)] >> ((at & 3) << 1) & 3) - 1);
    }
};

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

__device__ __forceinline__ int fifth_bit(const u8 *bits, u32 at) {
    return (bits[at >> 3] >> (at & 7) & 1) << 4;
}

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

// Behind the scale stands the block's sum, which only products need.
struct Q8_1 {
    enum { BYTES = 36, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        return times(half_at(block), with_sign(block[4 + at]));
    }
};

// The value that a code of IQ4_NL and IQ4_XS stands for, -127 to 113, as src/ggml/blocks.rs lists them.
__device__ __forceinline__ int of_iq4(int code) {
    return with_sign(entry(0xf6eaddcfbfad9881ull, 0x7159453526190d01ull, code));
}

struct IQ4_NL {
    enum { BYTES = 18, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        return times(half_at(block), of_iq4(nibble_of(block + 2, at)));
    }
};

// Each run has a scale of six bits, in two fields.
struct IQ4_XS {
    enum { BYTES = 136, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        int factor = nibble(block + 4, run) | (block[2 + (run >> 2)] >> ((run & 3) << 1) & 3) << 4;
        float scale = times(half_at(block), factor - 32);
        return times(scale, of_iq4(nibble_of(block + 8 + run * 16, at)));
    }
};

// Twice the value of a sign, two bits of exponent and one of fraction. Zero has one sign here.
__device__ __forceinline__ int doubled_e2m1(int code) {
    int magnitude = entry(0x0c08060403020100ull, code & 7);
    return code & 8 ? -magnitude : magnitude;
}

// The scale is half of two to the power of an exponent of eight bits, biased by 127.
struct MXFP4 {
    enum { BYTES = 17, RUNS_OF_BLOCK = 1 };
    static __device__ __forceinline__ float value(const u8 *block, u32, u32 at) {
        u32 exponent = block[0];
        float scale = __uint_as_float(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23);
        return times(scale, doubled_e2m1(nibble_of(block + 1, at)));
    }
};

// Half of a magnitude in E4M3. The code of NaN is zero; with a sign bit, which no magnitude has, it goes on counting.
__device__ __forceinline__ float half_e4m3(u8 code) {
    float magnitude = lift_magnitude(code & 0x7fu, 3, 7);
    return code == 0x7f ? 0.0f : __fmul_rn(magnitude, 0.5f);
}

// Each half of a run has a scale, and eight bytes for its codes.
struct NVFP4 {
    enum { BYTES = 36, RUNS_OF_BLOCK = 2 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 sub = 2 * run + (at >> 4);
        return times(half_e4m3(block[sub]), doubled_e2m1(nibble_of(block + 4 + sub * 8, at & 15, 3)));
    }
};
