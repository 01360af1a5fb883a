// The formats of src/ggml/lattices.rs: blocks of 256 values, in groups that are points of a lattice. A run has four groups of
// eight, or twice as many of four.
//
// The tables of points are those of src/ggml/grids.rs: scripts/kernels/regenerate makes grids.cuh of it. A point is sixteen
// bits, its first coordinate the lowest, two bits for each of eight coordinates or four for each of four.

// What a point has in the place of a value: an index of the possible coordinates.
__device__ __forceinline__ int of_eight(u16 point, u32 at) {
    return point >> ((at & 7) << 1) & 3;
}

__device__ __forceinline__ int of_four(u16 point, u32 at) {
    return point >> ((at & 3) << 2) & 15;
}

// The coordinates are 8, 25 and 43.
__device__ __forceinline__ int of_iq2(u16 point, u32 at) {
    return 0x2b1908 >> (of_eight(point, at) << 3) & 0xff;
}

// A scale of the block times a factor and a half, in units of a power of two.
__device__ __forceinline__ float and_a_half(float scale, u32 factor, float unit) {
    return __fmul_rn(__fmul_rn(scale, __fadd_rn(0.5f, __int2float_rn((int)factor))), unit);
}

// For each run four indexes, and in 32 bits the signs of each group and the scale.
struct IQ2_XXS {
    enum { BYTES = 66, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        const u8 *codes = block + 2 + run * 8;
        u32 group = at >> 3, rest = double_word(codes + 4);
        float scale = and_a_half(half_at(block), rest >> 28, 0.25f);
        int coordinate = of_iq2(IQ2_XXS_CODES[codes[group]], at);
        return signed_by(times(scale, coordinate), even_signs(rest >> 7 * group), at & 7);
    }
};

// For each group an index of nine bits and its signs, for each half of a run a scale of four bits.
struct IQ2_XS {
    enum { BYTES = 74, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 code = word(block + 2 + run * 8 + (at >> 3) * 2);
        float scale = and_a_half(half_at(block), nibble(block + 66, 2 * run + (at >> 4)), 0.25f);
        int coordinate = of_iq2(IQ2_XS_CODES[code & 511], at);
        return signed_by(times(scale, coordinate), even_signs(code >> 9), at & 7);
    }
};

// For each group an index of ten bits and eight signs, for each half of a run a scale of four bits.
struct IQ2_S {
    enum { BYTES = 82, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 group = at >> 3;
        u32 index = block[2 + run * 4 + group] | (block[66 + run] >> 2 * group & 3) << 8;
        float scale = and_a_half(half_at(block), nibble(block + 74, 2 * run + (at >> 4)), 0.25f);
        return signed_by(times(scale, of_iq2(IQ2_S_CODES[index], at)), block[34 + run * 4 + group], at & 7);
    }
};

// For each four values an index; for each run, in 32 bits, the signs of each eight and the scale. The coordinates are 4 to 44
// in steps of eight, 52 and 62.
struct IQ3_XXS {
    enum { BYTES = 98, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 rest = double_word(block + 66 + run * 4);
        float scale = and_a_half(half_at(block), rest >> 28, 0.5f);
        u16 point = IQ3_XXS_CODES[block[2 + run * 8 + (at >> 2)]];
        int coordinate = entry(0x3e342c241c140c04ull, of_four(point, at));
        return signed_by(times(scale, coordinate), even_signs(rest >> 7 * (at >> 3)), at & 7);
    }
};

// For each four values an index of nine bits, for each eight their signs, for each run a scale of four bits. The coordinates
// are the odd numbers.
struct IQ3_S {
    enum { BYTES = 110, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 place = at >> 2;
        u32 index = block[2 + run * 8 + place] | (block[66 + run] >> place & 1) << 8;
        float scale = times(half_at(block), 1 + 2 * nibble(block + 106, run));
        int coordinate = 1 + 2 * of_four(IQ3_S_CODES[index], at);
        return signed_by(times(scale, coordinate), block[74 + run * 4 + (at >> 3)], at & 7);
    }
};

// A coordinate of IQ1_S and IQ1_M, -1, 0 or 1, moved by an eighth, times a scale.
__device__ __forceinline__ float moved(float scale, u32 index, u32 at, bool down) {
    int coordinate = of_eight(IQ1_CODES[index], at) - 1;
    return __fmul_rn(scale, __fadd_rn(__int2float_rn(coordinate), down ? -0.125f : 0.125f));
}

// For each group an index of eleven bits, for each run a scale of three bits and a direction.
struct IQ1_S {
    enum { BYTES = 50, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 group = at >> 3, rest = word(block + 34 + run * 2);
        float scale = times(half_at(block), 2 * (rest >> 12 & 7) + 1);
        u32 index = block[2 + run * 4 + group] | (rest >> 3 * group & 7) << 8;
        return moved(scale, index, at, rest >> 15);
    }
};

// For each group an index of eleven bits and a direction, for each half of a run a scale of three bits. The scale of the block
// is the high halves of the high bytes of the scales.
struct IQ1_M {
    enum { BYTES = 56, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        const u8 *factors = block + 48;
        u32 group = run * 4 + (at >> 3), sub = 2 * run + (at >> 4);
        u32 bits = factors[1] >> 4 | factors[3] >> 4 << 4 | factors[5] >> 4 << 8 | factors[7] >> 4 << 12;
        u32 factor = word(factors + (sub >> 2) * 2) >> 3 * (sub & 3) & 7;
        float scale = times(F16::lift((u16)bits), 2 * factor + 1);
        u32 rest = nibble(block + 32, group);
        return moved(scale, block[group] | (rest & 7) << 8, at, rest & 8);
    }
};
