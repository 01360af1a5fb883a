// The formats of src/ggml/lattices.rs: blocks of 256 values, in groups that are points of a lattice. A run has four groups of
// eight, or twice as many of four.
//
// The tables of points are those of src/ggml/grids.rs: scripts/kernels/vulkan makes grids.glsl of it, with two points in a word. A
// point is sixteen bits, its first coordinate the lowest, two bits for each of eight coordinates or four for each of four.

#define POINT(table, index) (table[(index) >> 1] >> (((index) & 1u) << 4) & 0xffffu)

// What a point has in the place of a value: an index of the possible coordinates.
uint of_eight(uint point, uint at) { return point >> ((at & 7u) << 1) & 3u; }
uint of_four(uint point, uint at) { return point >> ((at & 3u) << 2) & 15u; }

// The coordinates are 8, 25 and 43.
int of_iq2(uint point, uint at) { return int(0x2b1908u >> (of_eight(point, at) << 3) & 0xffu); }

// A scale of the block times a factor and a half, in units of a power of two.
#define HALF 0x3f000000u
#define QUARTER 0x3e800000u
uint and_a_half(uint scale, uint factor, uint unit) { return mul(mul(scale, add(HALF, of_uint(factor))), unit); }

// For each run four indexes, and in 32 bits the signs of each group and the scale.
uint iq2_xxs(uint block, uint run, uint at) {
    const uint codes = block + 2u + run * 8u, group = at >> 3, rest = double_word_at(codes + 4u);
    const uint scale = and_a_half(half_at(block), rest >> 28, QUARTER);
    const uint index = byte_at(codes + group);
    return signed_by(times(scale, of_iq2(POINT(IQ2_XXS_CODES, index), at)), even_signs(rest >> 7u * group), at & 7u);
}

// For each group an index of nine bits and its signs, for each half of a run a scale of four bits.
uint iq2_xs(uint block, uint run, uint at) {
    const uint code = word_at(block + 2u + run * 8u + (at >> 3) * 2u), index = code & 511u;
    const uint scale = and_a_half(half_at(block), uint(nibble(block + 66u, 2u * run + (at >> 4))), QUARTER);
    return signed_by(times(scale, of_iq2(POINT(IQ2_XS_CODES, index), at)), even_signs(code >> 9), at & 7u);
}

// For each group an index of ten bits and eight signs, for each half of a run a scale of four bits.
uint iq2_s(uint block, uint run, uint at) {
    const uint group = at >> 3;
    const uint index = byte_at(block + 2u + run * 4u + group) | (byte_at(block + 66u + run) >> 2u * group & 3u) << 8;
    const uint scale = and_a_half(half_at(block), uint(nibble(block + 74u, 2u * run + (at >> 4))), QUARTER);
    const uint signs = byte_at(block + 34u + run * 4u + group);
    return signed_by(times(scale, of_iq2(POINT(IQ2_S_CODES, index), at)), signs, at & 7u);
}

// For each four values an index; for each run, in 32 bits, the signs of each eight and the scale. The coordinates are 4 to 44
// in steps of eight, 52 and 62.
uint iq3_xxs(uint block, uint run, uint at) {
    const uint rest = double_word_at(block + 66u + run * 4u), index = byte_at(block + 2u + run * 8u + (at >> 2));
    const uint scale = and_a_half(half_at(block), rest >> 28, HALF);
    const uint coordinate = entry(uvec2(0x1c140c04u, 0x3e342c24u), of_four(POINT(IQ3_XXS_CODES, index), at));
    return signed_by(times(scale, int(coordinate)), even_signs(rest >> 7u * (at >> 3)), at & 7u);
}

// For each four values an index of nine bits, for each eight their signs, for each run a scale of four bits. The coordinates
// are the odd numbers.
uint iq3_s(uint block, uint run, uint at) {
    const uint place = at >> 2;
    const uint index = byte_at(block + 2u + run * 8u + place) | (byte_at(block + 66u + run) >> place & 1u) << 8;
    const uint scale = times(half_at(block), 1 + 2 * nibble(block + 106u, run));
    const int coordinate = 1 + 2 * int(of_four(POINT(IQ3_S_CODES, index), at));
    return signed_by(times(scale, coordinate), byte_at(block + 74u + run * 4u + (at >> 3)), at & 7u);
}

// A coordinate of IQ1_S and IQ1_M, -1, 0 or 1, moved by an eighth, times a scale.
#define EIGHTH 0x3e000000u
uint moved(uint scale, uint index, uint at, bool down) {
    const int coordinate = int(of_eight(POINT(IQ1_CODES, index), at)) - 1;
    return mul(scale, add(of_int(coordinate), down ? EIGHTH | SIGN : EIGHTH));
}

// For each group an index of eleven bits, for each run a scale of three bits and a direction.
uint iq1_s(uint block, uint run, uint at) {
    const uint group = at >> 3, rest = word_at(block + 34u + run * 2u);
    const uint scale = times(half_at(block), int(2u * (rest >> 12 & 7u) + 1u));
    const uint index = byte_at(block + 2u + run * 4u + group) | (rest >> 3u * group & 7u) << 8;
    return moved(scale, index, at, rest >> 15 != 0u);
}

// For each group an index of eleven bits and a direction, for each half of a run a scale of three bits. The scale of the block
// is the high halves of the high bytes of the scales.
uint iq1_m(uint block, uint run, uint at) {
    const uint factors = block + 48u, group = run * 4u + (at >> 3), half_run = 2u * run + (at >> 4);
    const uint bits = byte_at(factors + 1u) >> 4 | byte_at(factors + 3u) >> 4 << 4 | byte_at(factors + 5u) >> 4 << 8
        | byte_at(factors + 7u) >> 4 << 12;
    const uint factor = word_at(factors + (half_run >> 2) * 2u) >> 3u * (half_run & 3u) & 7u;
    const uint scale = times(of_half(bits), int(2u * factor + 1u)), rest = uint(nibble(block + 32u, group));
    return moved(scale, byte_at(block + group) | (rest & 7u) << 8, at, (rest & 8u) != 0u);
}
