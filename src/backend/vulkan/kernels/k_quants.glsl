// The formats of src/ggml/k_quants.rs: blocks of 256 values in sub-blocks, whose scales are themselves codes of a scale of the
// block. A sub-block is a run, or half of one.

// The two-bit code of a value, of which each 32 bytes hold four runs.
int two_bits(uint codes, uint run, uint at) {
    return int(byte_at(codes + (run >> 2) * RUN + at) >> ((run & 3u) << 1) & 3u);
}

uint q2_k(uint block, uint run, uint at) {
    const uint factors = byte_at(block + 2u * run + (at >> 4));
    const uint scale = times(half_at(block + 80u), int(factors & 15u));
    const uint least = times(half_at(block + 82u), int(factors >> 4));
    return sub(times(scale, two_bits(block + 16u, run, at)), least);
}

// A set bit of the mask is the third bit of a code, from which four is taken off.
uint q3_k(uint block, uint run, uint at) {
    const uint factors = block + 96u, half_run = 2u * run + (at >> 4);
    const uint low = byte_at(factors + (half_run & 7u)) >> (half_run >> 3 << 2) & 15u;
    const uint high = byte_at(factors + 8u + (half_run & 3u)) >> (half_run >> 2 << 1) & 3u;
    const uint scale = times(half_at(block + 108u), int(low | high << 4) - 32);
    const int third = int(byte_at(block + at) >> run & 1u);
    return times(scale, (two_bits(block + 32u, run, at) | third << 2) - 4);
}

// The factors of scale and least value of the eight runs of Q4_K and Q5_K, each of six bits.
int six_bits_of_scale(uint packed, uint run) {
    if (run < 4u) return int(byte_at(packed + run) & 63u);
    return int(byte_at(packed + run + 4u) & 15u | byte_at(packed + run - 4u) >> 6 << 4);
}

int six_bits_of_least(uint packed, uint run) {
    if (run < 4u) return int(byte_at(packed + run + 4u) & 63u);
    return int(byte_at(packed + run + 4u) >> 4 | byte_at(packed + run) >> 6 << 4);
}

uint of_run(uint block, uint run, int code) {
    const uint scale = times(half_at(block), six_bits_of_scale(block + 4u, run));
    const uint least = times(half_at(block + 2u), six_bits_of_least(block + 4u, run));
    return sub(times(scale, code), least);
}

// The four-bit code of a value, of which each 32 bytes hold two runs.
int four_bits(uint codes, uint run, uint at) {
    return int(byte_at(codes + (run >> 1) * RUN + at) >> ((run & 1u) << 2) & 15u);
}

uint q4_k(uint block, uint run, uint at) { return of_run(block, run, four_bits(block + 16u, run, at)); }

uint q5_k(uint block, uint run, uint at) {
    const int fifth = int(byte_at(block + 16u + at) >> run & 1u) << 4;
    return of_run(block, run, four_bits(block + 48u, run, at) | fifth);
}

uint q6_k(uint block, uint run, uint at) {
    const int low = int(byte_at(block + (run >> 2) * 64u + (run & 1u) * RUN + at) >> ((run & 2u) << 1) & 15u);
    const int high = two_bits(block + 128u, run, at);
    const uint scale = times(half_at(block + 208u), with_sign(byte_at(block + 192u + 2u * run + (at >> 4))));
    return times(scale, (low | high << 4) - 32);
}

// A scale in f32, the codes, and sums that only products need.
uint q8_k(uint block, uint run, uint at) {
    return times(double_word_at(block), with_sign(byte_at(block + 4u + run * RUN + at)));
}
