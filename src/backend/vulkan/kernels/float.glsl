// Arithmetic of f32 in integers. Vulkan leaves it to drivers how floats round and whether subnormals stay, and few of them promise
// both; so the numbers are bits here, and each result is the exact one rounded once, to nearest, as the host's is.

#define SIGN 0x80000000u
#define INFINITY 0x7f800000u
#define NAN 0x7fc00000u
#define HIDDEN 0x800000u

// A magnitude as its exponent, biased by 127, and 24 bits, the highest of which is set unless it is zero.
struct Parts {
    int exponent;
    uint bits;
};

Parts parts_of(uint magnitude) {
    const uint bits = magnitude & (HIDDEN - 1u);
    if (magnitude >= HIDDEN) return Parts(int(magnitude >> 23), bits | HIDDEN);
    const int places = 23 - findMSB(bits | 1u);
    return Parts(1 - places, bits << places);
}

// The bits shifted down, the lowest of them set if any bit was lost.
uint shift_down(uint bits, uint places) {
    if (places >= 32u) return uint(bits != 0u);
    return bits >> places | uint(places != 0u && (bits & (1u << places) - 1u) != 0u);
}

// The number of 32 bits, the highest set unless it is zero, of which the lowest tells of others beyond.
uint rounded(uint sign, int exponent, uint bits) {
    if (exponent <= 0) {
        bits = shift_down(bits, uint(1 - exponent));
        exponent = 1;
    }
    const uint rest = bits & 0xffu, kept = bits >> 8;
    const uint up = uint(rest > 0x80u || (rest == 0x80u && (kept & 1u) != 0u));
    // A carry goes on to the exponent, from subnormal numbers too.
    return sign | (exponent >= 255 ? INFINITY : min((uint(exponent - 1) << 23) + kept + up, INFINITY));
}

uint mul(uint a, uint b) {
    const uint sign = (a ^ b) & SIGN, x = a & ~SIGN, y = b & ~SIGN;
    if (max(x, y) >= INFINITY) return max(x, y) > INFINITY || min(x, y) == 0u ? NAN : sign | INFINITY;
    if (min(x, y) == 0u) return sign;
    const Parts first = parts_of(x), second = parts_of(y);
    uint high, low;
    umulExtended(first.bits << 8, second.bits << 8, high, low);
    int exponent = first.exponent + second.exponent - 126;
    if (high < SIGN) {
        high = high << 1 | low >> 31;
        low <<= 1;
        exponent -= 1;
    }
    return rounded(sign, exponent, high | uint(low != 0u));
}

uint add(uint a, uint b) {
    if ((a & ~SIGN) < (b & ~SIGN)) {
        const uint swapped = a;
        a = b;
        b = swapped;
    }
    const uint sign = a & SIGN, x = a & ~SIGN, y = b & ~SIGN;
    const bool same = sign == (b & SIGN);
    if (x >= INFINITY) return x > INFINITY || (y == INFINITY && !same) ? NAN : a;
    if (y == 0u) return x == 0u && !same ? 0u : a;
    const Parts first = parts_of(x), second = parts_of(y);
    // Room for a carry above, and below for what decides the rounding.
    const uint large = first.bits << 7, small = shift_down(second.bits << 7, uint(first.exponent - second.exponent));
    const uint sum = same ? large + small : large - small;
    if (sum == 0u) return 0u;
    const int places = 31 - findMSB(sum);
    return rounded(sign, first.exponent + 1 - places, sum << places);
}

uint sub(uint a, uint b) { return add(a, b ^ SIGN); }

// A number of at most 24 bits.
uint of_uint(uint number) {
    if (number == 0u) return 0u;
    const int top = findMSB(number);
    return (uint(127 + top) << 23) + ((number << (23 - top)) & (HIDDEN - 1u));
}

uint of_int(int number) { return of_uint(uint(abs(number))) | (number < 0 ? SIGN : 0u); }

// The number of an f16.
uint of_half(uint half_bits) {
    const uint sign = (half_bits & 0x8000u) << 16, magnitude = half_bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return sign | INFINITY | (magnitude & 0x3ffu) << 13;
    // Subnormal ones are whole numbers of 2 to the power of -24.
    if (magnitude < 0x400u) return sign | (magnitude == 0u ? 0u : of_uint(magnitude) - (24u << 23));
    return sign | (magnitude << 13) + (112u << 23);
}

// To the types of values, with one NaN.
uint to_f32(uint number) { return (number & ~SIGN) > INFINITY ? NAN : number; }

uint to_bf16(uint number) {
    if ((number & ~SIGN) > INFINITY) return 0x7fc0u;
    return (number + 0x7fffu + (number >> 16 & 1u)) >> 16;
}

uint to_f16(uint number) {
    const uint sign = (number & SIGN) >> 16, magnitude = number & ~SIGN;
    if (magnitude > INFINITY) return 0x7e00u;
    if (magnitude < 113u << 23) {
        // Whole numbers of 2 to the power of -24.
        const Parts parts = parts_of(magnitude);
        const uint bits = shift_down(parts.bits << 7, uint(126 - parts.exponent)), rest = bits & 0x7fu, kept = bits >> 7;
        return sign | kept + uint(rest > 0x40u || (rest == 0x40u && (kept & 1u) != 0u));
    }
    return sign | min((magnitude + 0xfffu + (magnitude >> 13 & 1u) >> 13) - (112u << 10), 0x7c00u);
}
