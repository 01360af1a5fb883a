// The formats of src/ggml/ternary.rs: the values -1, 0 and 1 times a scale.

// Five values in a byte, as digits of base three of a fraction. 32 bytes have five values, sixteen have five, and four have
// four; the first values of all bytes come first. So the sixteen have runs 5 and 6 and half of run 7, and the four the rest.
struct TQ1_0 {
    enum { BYTES = 54, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        u32 byte = at, digit = run;
        if (run > 4) {
            u32 of_sixteen = (run - 5) * WARP + at, of_four = of_sixteen - 80;
            bool last = of_sixteen >= 80;
            byte = last ? 48 + (of_four & 3) : 32 + (of_sixteen & 15);
            digit = last ? of_four >> 2 : of_sixteen >> 4;
        }
        // The powers of three.
        u32 fraction = block[byte] * entry(0x511b090301ull, digit) & 0xff;
        return times(half_at(block + 52), (int)(fraction * 3 >> 8) - 1);
    }
};

// Four values in a byte; each 32 bytes hold four runs.
struct TQ2_0 {
    enum { BYTES = 66, RUNS_OF_BLOCK = 8 };
    static __device__ __forceinline__ float value(const u8 *block, u32 run, u32 at) {
        return times(half_at(block + 64), (block[(run >> 2) * WARP + at] >> ((run & 3) << 1) & 3) - 1);
    }
};
