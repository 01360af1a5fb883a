// The fields of blocks, as src/ggml/parts.rs reads them. A block is the place of its first byte in the source, which may be any.

// The values of a run, which is a part of a block. A block of any type is 1, 2, 4 or 8 of them.
#define RUN 32u

uint byte_at(uint at) { return source[at >> 2] >> ((at & 3u) << 3) & 0xffu; }

// The sixteen bits, and the 32, that begin with a byte.
uint word_at(uint at) { return byte_at(at) | byte_at(at + 1u) << 8; }
uint double_word_at(uint at) { return word_at(at) | word_at(at + 2u) << 16; }

uint half_at(uint at) { return of_half(word_at(at)); }

uint times(uint scale, int code) { return mul(scale, of_int(code)); }

// The byte as a number with a sign.
int with_sign(uint bits) { return int(bits) - (int(bits & 0x80u) << 1); }

// Half byte number `at` from a place on, of which a byte has the low one first.
int nibble(uint from, uint at) { return int(byte_at(from + (at >> 1)) >> ((at & 1u) << 2) & 15u); }

// The half byte of a value where 2 to the power of `log_bytes` bytes hold twice as many values: those of all low halves, and
// after these those of the high ones.
int nibble_of(uint codes, uint at, uint log_bytes) {
    return int(byte_at(codes + (at & (1u << log_bytes) - 1u)) >> (at >> log_bytes << 2) & 15u);
}

// The half byte of a value in blocks of 32.
int nibble_of(uint codes, uint at) { return nibble_of(codes, at, 4u); }

// Byte number `at` of numbers, the first in the lowest bits.
uint entry(uvec2 bytes, uint at) { return (at < 4u ? bytes.x : bytes.y) >> ((at & 3u) << 3) & 0xffu; }
uint entry(uvec4 bytes, uint at) { return at < 8u ? entry(bytes.xy, at) : entry(bytes.zw, at & 7u); }

// The value with its sign changed where bit number `bit` of `signs` is set.
uint signed_by(uint value, uint signs, uint bit) { return value ^ signs >> bit << 31; }

// The eight signs that seven bits stand for: the eighth makes the number of minus signs even.
uint even_signs(uint bits) { return bits & 0x7fu | uint(bitCount(bits & 0x7fu) & 1) << 7; }
