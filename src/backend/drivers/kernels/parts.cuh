// The fields of blocks, as src/ggml/parts.rs reads them. Blocks begin at any byte, so all reads are of single bytes.
//
// The intrinsics with `_rn` are there because the compiler would otherwise contract a multiplication and an addition into one.

// A block as a warp sees it: runs of 32 values, of which a thread computes the one at its place.
#define WARP 32

// The sixteen bits, and the 32, that begin with a byte.
__device__ __forceinline__ u32 word(const u8 *bytes) {
    return bytes[0] | (u32)bytes[1] << 8;
}

__device__ __forceinline__ u32 double_word(const u8 *bytes) {
    return word(bytes) | word(bytes + 2) << 16;
}

__device__ __forceinline__ float half_at(const u8 *bytes) {
    return F16::lift((u16)word(bytes));
}

__device__ __forceinline__ float times(float scale, int code) {
    return __fmul_rn(scale, __int2float_rn(code));
}

// The byte as a number with a sign.
__device__ __forceinline__ int with_sign(u8 byte) {
    return (int)byte - ((int)(byte & 0x80) << 1);
}

// Half byte number `at`, of which a byte has the low one first.
__device__ __forceinline__ int nibble(const u8 *bytes, u32 at) {
    return bytes[at >> 1] >> ((at & 1) << 2) & 15;
}

// The half byte of a value where 2 to the power of `log_bytes` bytes hold twice as many values: those of all low halves, and
// after these those of the high ones.
__device__ __forceinline__ int nibble_of(const u8 *codes, u32 at, u32 log_bytes) {
    return codes[at & ((1 << log_bytes) - 1)] >> (at >> log_bytes << 2) & 15;
}

// The half byte of a value in blocks of 32.
__device__ __forceinline__ int nibble_of(const u8 *codes, u32 at) {
    return nibble_of(codes, at, 4);
}

// Byte number `at` of the eight of a number, the first in the lowest bits, and of the sixteen of two.
__device__ __forceinline__ u8 entry(u64 bytes, int at) {
    return (u8)(bytes >> (at << 3));
}

__device__ __forceinline__ u8 entry(u64 low, u64 high, int at) {
    return entry(at & 8 ? high : low, at & 7);
}

// The value with its sign changed where bit number `bit` of `signs` is set.
__device__ __forceinline__ float signed_by(float value, u32 signs, u32 bit) {
    return __uint_as_float(__float_as_uint(value) ^ signs >> bit << 31);
}

// The eight signs that seven bits stand for: the eighth makes the number of minus signs even.
__device__ __forceinline__ u32 even_signs(u32 bits) {
    bits &= 0x7f;
    return bits | (__popc(bits) & 1) << 7;
}
