// Computes the values of GGML's blocks, in f32, f16 or bf16.
//
// scripts/kernels/vulkan makes a text for each format of this and of the files that it includes, which have the formats as the files
// of the same names in src/ggml. The arithmetic is theirs, operation by operation, so that the bytes are those that the host gives.
// FORMAT is the function of the text's format: it gives the value at `at` of a run of a block.
//
// An invocation has a word of the destination: one value of f32, or two of 16 bits. src/backend/vulkan/dequantise.rs numbers the types
// of values and sets the constants.

#version 460
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 128) in;

layout(constant_id = 0) const uint BLOCK_BYTES = 18u;
layout(constant_id = 1) const uint BLOCK_RUNS = 1u;

layout(set = 0, binding = 0) readonly buffer Source { uint source[]; };
layout(set = 0, binding = 1) buffer Target { uint target[]; };

layout(push_constant) uniform Work {
    // The bytes of the bindings at which blocks and values begin.
    uint source_at, target_at;
    // How many values there are, whole blocks, and their type.
    uint count, kind;
};

#define TO_F32 0u
#define TO_F16 1u
#define TO_BF16 2u

#include "float.glsl"
#include "parts.glsl"
#include "blocks.glsl"
#include "k_quants.glsl"
#include "ternary.glsl"
#include "grids.glsl"
#include "lattices.glsl"

// The number of a value, as f32.
uint number_of(uint place) {
    const uint of_all = place / RUN, at = place % RUN;
    return FORMAT(source_at + of_all / BLOCK_RUNS * BLOCK_BYTES, of_all % BLOCK_RUNS, at);
}

void main() {
    const uint word = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    // Values of 16 bits may begin in the upper half of a word. That half and the last one are in words of which the other stays.
    const bool is_whole = kind == TO_F32;
    const uint first = is_whole ? word : 2u * word - target_at / 2u % 2u, each = is_whole ? 1u : 2u;
    uint bits = 0u, mask = 0u;
    // One place where a value is computed, and not repeated: drivers take long over a text with several.
    [[dont_unroll]] for (uint part = 0u; part < each; ++part) {
        const uint place = first + part;
        if (place >= count) continue;
        const uint number = number_of(place);
        const uint value = is_whole ? to_f32(number) : kind == TO_F16 ? to_f16(number) : to_bf16(number);
        bits |= value << 16u * part;
        mask |= (is_whole ? 0xffffffffu : 0xffffu) << 16u * part;
    }
    const uint at = target_at / 4u + word;
    if (mask == 0xffffffffu) {
        target[at] = bits;
    } else if (mask != 0u) {
        target[at] = target[at] & ~mask | bits;
    }
}
