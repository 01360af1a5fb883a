// The formats of src/ggml/blocks.rs: blocks with one scale, or one for each few values, and codes of whole bits or of a fixed
// table.

uint q1_0(uint block, uint run, uint at) {
    const uint plus = byte_at(block + 2u + run * 4u + (at >> 3)) >> (at & 7u) & 1u;
    return signed_by(half_at(block), plus ^ 1u, 0u);
}

uint q2_0(uint block, uint run, uint at) {
    return times(half_at(block), int(byte_at(block + 2u + run * 8u + (at >> 2)) >> ((at & 3u) << 1) & 3u) - 1);
}

uint q4_0(uint block, uint run, uint at) { return times(half_at(block), nibble_of(block + 2u, at) - 8); }

uint q4_1(uint block, uint run, uint at) {
    return add(times(half_at(block), nibble_of(block + 4u, at)), half_at(block + 2u));
}

int fifth_bit(uint bits, uint at) { return int(byte_at(bits + (at >> 3)) >> (at & 7u) & 1u) << 4; }

uint q5_0(uint block, uint run, uint at) {
    return times(half_at(block), (nibble_of(block + 6u, at) | fifth_bit(block + 2u, at)) - 16);
}

uint q5_1(uint block, uint run, uint at) {
    const int code = nibble_of(block + 8u, at) | fifth_bit(block + 4u, at);
    return add(times(half_at(block), code), half_at(block + 2u));
}

uint q8_0(uint block, uint run, uint at) { return times(half_at(block), with_sign(byte_at(block + 2u + at))); }

// Behind the scale stands the block's sum, which only products need.
uint q8_1(uint block, uint run, uint at) { return times(half_at(block), with_sign(byte_at(block + 4u + at))); }

// The value that a code of IQ4_NL and IQ4_XS stands for, -127 to 113, as src/ggml/blocks.rs lists them.
int of_iq4(int code) {
    return with_sign(entry(uvec4(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u), uint(code)));
}

uint iq4_nl(uint block, uint run, uint at) { return times(half_at(block), of_iq4(nibble_of(block + 2u, at))); }

// Each run has a scale of six bits, in two fields.
uint iq4_xs(uint block, uint run, uint at) {
    const int high = int(byte_at(block + 2u + (run >> 2)) >> ((run & 3u) << 1) & 3u);
    const int factor = nibble(block + 4u, run) | high << 4;
    return times(times(half_at(block), factor - 32), of_iq4(nibble_of(block + 8u + run * 16u, at)));
}

// Twice the value of a sign, two bits of exponent and one of fraction. Zero has one sign here.
int doubled_e2m1(int code) {
    const int magnitude = int(entry(uvec2(0x03020100u, 0x0c080604u), uint(code & 7)));
    return (code & 8) != 0 ? -magnitude : magnitude;
}

// The scale is half of two to the power of an exponent of eight bits, biased by 127.
uint mxfp4(uint block, uint run, uint at) {
    const uint exponent = byte_at(block);
    const uint scale = exponent < 2u ? 0x200000u << exponent : exponent - 1u << 23;
    return times(scale, doubled_e2m1(nibble_of(block + 1u, at)));
}

// Half of a magnitude in E4M3. The code of NaN is zero; with a sign bit, which no magnitude has, it goes on counting.
uint half_e4m3(uint code) {
    const uint magnitude = code & 0x7fu;
    if (code == 0x7fu || magnitude == 0u) return 0u;
    // Subnormal ones are whole numbers of 2 to the power of -9.
    return magnitude < 8u ? of_uint(magnitude) - (10u << 23) : (magnitude << 20) + (119u << 23);
}

// Each half of a run has a scale, and eight bytes for its codes.
uint nvfp4(uint block, uint run, uint at) {
    const uint half_run = 2u * run + (at >> 4);
    const int code = nibble_of(block + 4u + half_run * 8u, at & 15u, 3u);
    return times(half_e4m3(byte_at(block + half_run)), doubled_e2m1(code));
}
