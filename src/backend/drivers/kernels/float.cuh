// Element types as f32 and back, for the kernels beside this file.
//
// The arithmetic is that of src/float.rs, operation by operation, so that the bytes are those that the host gives: each
// result is rounded to f32, and subnormals are kept.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SIGN 0x80000000u
#define INFINITY_BITS 0x7f800000u

__device__ __forceinline__ float lift_magnitude(u32 magnitude, u32 mantissa, u32 bias) {
    u32 normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23);
    float step = __uint_as_float((128 - bias - mantissa) << 23);
    float subnormal = __fmul_rn(__int2float_rn((int)magnitude), step);
    return magnitude < (1u << mantissa) ? subnormal : __uint_as_float(normal);
}

__device__ __forceinline__ u32 round_magnitude(u32 magnitude, u32 mantissa, u32 bias) {
    u32 shift = 23 - mantissa;
    u32 even = magnitude >> shift & 1;
    u32 normal = ((magnitude + (1u << (shift - 1)) - 1 + even) >> shift) - ((127 - bias) << mantissa);
    float magic = __uint_as_float((128 - bias - mantissa + 23) << 23);
    u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), magic)) - __float_as_uint(magic);
    return magnitude < (128 - bias) << 23 ? subnormal : normal;
}

__device__ __forceinline__ float with_sign(u32 magnitude, u32 sign) {
    return __uint_as_float(magnitude | sign << 31);
}

struct F32 {
    typedef u32 Raw;
    enum { SCALED = 0 };
    static __device__ __forceinline__ float lift(Raw raw) { return __uint_as_float(raw); }
    static __device__ __forceinline__ Raw round(float value, u32 &) {
        u32 bits = __float_as_uint(value);
        return (bits & ~SIGN) > INFINITY_BITS ? 0x7fc00000u : bits;
    }
};

struct Bf16 {
    typedef u16 Raw;
    enum { SCALED = 0 };
    static __device__ __forceinline__ float lift(Raw raw) { return __uint_as_float((u32)raw << 16); }
    static __device__ __forceinline__ Raw round(float value, u32 &) {
        u32 bits = __float_as_uint(value);
        u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return (Raw)((bits & ~SIGN) > INFINITY_BITS ? 0x7fc0u : rounded);
    }
};

struct F16 {
    typedef u16 Raw;
    enum { SCALED = 0 };
    static __device__ __forceinline__ float lift(Raw raw) {
        u32 magnitude = raw & 0x7fffu;
        u32 finite = __float_as_uint(lift_magnitude(magnitude, 10, 15));
        u32 special = INFINITY_BITS | (magnitude & 0x3ff) << 13;
        return with_sign(magnitude >= 0x7c00 ? special : finite, raw >> 15);
    }
    static __device__ __forceinline__ Raw round(float value, u32 &) {
        u32 bits = __float_as_uint(value), magnitude = bits & ~SIGN;
        u32 rounded = min(round_magnitude(magnitude, 10, 15), 0x7c00u) | (bits & SIGN) >> 16;
        return (Raw)(magnitude > INFINITY_BITS ? 0x7e00u : rounded);
    }
};

struct E4m3 {
    typedef u8 Raw;
    enum { SCALED = 1 };
    static __device__ __forceinline__ float lift(Raw raw) {
        u32 magnitude = raw & 0x7fu;
        u32 finite = __float_as_uint(lift_magnitude(magnitude, 3, 7));
        return with_sign(magnitude == 0x7f ? INFINITY_BITS | 0x400000u : finite, raw >> 7);
    }
    static __device__ __forceinline__ Raw round(float value, u32 &saturated) {
        u32 bits = __float_as_uint(value), magnitude = bits & ~SIGN;
        u32 rounded = round_magnitude(magnitude, 3, 7);
        bool nan = magnitude > INFINITY_BITS;
        saturated += rounded > 0x7e && !nan ? 1 : 0;
        return (Raw)(nan ? 0x7fu : min(rounded, 0x7eu) | (bits & SIGN) >> 24);
    }
};

struct E5m2 {
    typedef u8 Raw;
    enum { SCALED = 1 };
    static __device__ __forceinline__ float lift(Raw raw) {
        u32 magnitude = raw & 0x7fu;
        u32 finite = __float_as_uint(lift_magnitude(magnitude, 2, 15));
        u32 special = INFINITY_BITS | (magnitude & 3) << 21;
        return with_sign(magnitude >= 0x7c ? special : finite, raw >> 7);
    }
    static __device__ __forceinline__ Raw round(float value, u32 &saturated) {
        u32 bits = __float_as_uint(value), magnitude = bits & ~SIGN;
        u32 rounded = round_magnitude(magnitude, 2, 15);
        u32 code = magnitude == INFINITY_BITS ? 0x7cu : min(rounded, 0x7bu);
        saturated += rounded > 0x7b && magnitude < INFINITY_BITS ? 1 : 0;
        return (Raw)(magnitude > INFINITY_BITS ? 0x7fu : code | (bits & SIGN) >> 24);
    }
};
