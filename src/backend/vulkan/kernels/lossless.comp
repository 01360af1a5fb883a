// Decodes the lossless code for weights, whose format is in src/lossless/mod.rs, as src/backend/drivers/kernels/lossless.cu does.
//
// A workgroup decodes a block, tile after tile: a lane has the weights that the format gives it, and finds its codes of the second
// and the third level by sums over the lanes before it. All numbers have 32 bits, and so has what is read and written: no device
// needs more for this than Vulkan's core.
//
// A block is checked as src/lossless/decode.rs checks it. Whatever it holds, it is read within its words and written within its
// weights; what is not sound is told, and the weights are not defined then. The host has checked the header and the index.
//
// Loops have no attributes: there are drivers whose compilers take minutes and gigabytes where they are told to unroll them.
//
// Every bit of the weights is one lane's to write. A word of which others have bits, too, is only changed by atomic operations: so
// blocks that share a word do not meet, and what is beside the weights stays as it is.
#version 460
#extension GL_KHR_memory_scope_semantics : require

#define LANES 32
#define ROW 8
layout(local_size_x = LANES) in;

#define ALL 0xffffffffu
#define NONE uvec2(0)

#define TILE 1024
#define BLOCK 8192
// In words: a tile's codes, the headers of a code and of a block, and what the index counts by.
#define CODES 64
#define CODE_HEADER 16
#define BLOCK_HEADER 8
#define UNIT 4
#define PLAIN 0
#define LADDER 1
#define NO_CODES 0x80u

// Of the sums.
#define FACTOR 0x9e3779b1u
#define START uvec2(0x7f4a7c15u, 0x9e3779b9u)

#define BF16 0
#define F16 1
#define F32 2
#define E4M3 3
layout(constant_id = 0) const uint FORMAT = BF16; // 4 is E5M2
// Of a format: the bytes of a weight, the planes of whole bytes and the bits beyond them, the largest exponent and its place.
const uint SIZE = FORMAT == F32 ? 4u : FORMAT < F32 ? 2u : 1u;
const uint BYTES = FORMAT == F32 ? 3u : FORMAT < F32 ? 1u : 0u;
const uint BITS = FORMAT == BF16 || FORMAT == F32 ? 0u : FORMAT == E4M3 ? 4u : 3u;
const uint LARGEST = FORMAT == BF16 || FORMAT == F32 ? 255u : FORMAT == E4M3 ? 15u : 31u;
const uint MANTISSA = BYTES * 8 + BITS - 1;
// The weights of a word, the planes, and ones where each weight of a word begins.
const uint EACH = 4 / SIZE;
const uint PLANES = BYTES + (BITS == 0 ? 0u : 1u);
const uint ONES = SIZE == 1 ? 0x01010101u : SIZE == 2 ? 0x00010001u : 1u;

// The header and the index of a code.
layout(std430, set = 0, binding = 0) readonly buffer Head { uint words[]; } head;
// Some of its units of 16 bytes.
layout(std430, set = 0, binding = 1) readonly buffer Code { uint words[]; } code;
// Coherent, since what a lane has written is changed by the one that has an escape there.
layout(std430, set = 0, binding = 2) coherent buffer Weights { uint words[]; } weights;
// What is zero if all blocks are sound: the sum of their sums less that of the tensor's header, in two words, and whether one is
// damaged; then a word that stays.
layout(std430, set = 0, binding = 3) buffer Verdict { uint words[]; } verdict;

// The part of the code is that of units `begin` up to `end`. Of the blocks `first_block` up to `end_block` those are decoded that
// end after unit `after`, and not after `end`, by `groups` workgroups. `last` are the weights of the last block of all.
// `less_expected` is the sum of the code's header, negated, which comes with the first dispatch.
layout(push_constant) uniform Work {
    // The bytes at which the four begin in their bindings; the weights are those of block `first_block`.
    uint head_at, code_at, weights_at, verdict_at;
    uint begin, after, end, groups;
    uint blocks, last, in_blocks;
    uint less_expected_low, less_expected_high;
    uint first_block, end_block, is_first;
} work;

// Numbers of lanes that are added up, and the sums of rows of them.
shared uint numbers[LANES], rows[LANES / ROW];
// The exponents of a block's table in their places in a weight, and the lanes' sums of its weights.
shared uint exponents[16];
shared uvec2 sums[LANES];

// The block that is decoded: the first word of its code, and how many there are.
uint code_begin, code_count;
// Its weights: their first byte in the binding, how many bytes they have, whether they are a whole block of whole words, and what a
// word is beyond them.
uint block_at, block_bytes;
bool whole;
uint padding;
// What the lane adds to the sum, and whether all that it saw is sound.
uvec2 sum;
bool sound;

// Numbers of 64 bits are two words, the low one first.
uvec2 plus(uvec2 one, uvec2 other) {
    uint carry;
    const uint low = uaddCarry(one.x, other.x, carry);
    return uvec2(low, one.y + other.y + carry);
}

uvec2 minus(uvec2 one, uvec2 other) { return plus(plus(one, ~other), uvec2(1, 0)); }

uvec2 times(uint one, uint other) {
    uint high, low;
    umulExtended(one, other, high, low);
    return uvec2(low, high);
}

// Bits from one word and the next, from bit `shift` modulo 32 on.
uint funnel(uint low, uint high, uint shift) { return low >> (shift & 31) | high << 1 << (31 - (shift & 31)); }

// As many ones, up to 32.
uint ones(uint count) { return count < 32 ? (1u << count) - 1 : ALL; }

// The factor of a word of a block in its sum.
uint factor_of(uint word) { return (2 * word + 1) * FACTOR; }

void add_to_verdict(uvec2 number) {
    const uint at = work.verdict_at / 4, before = atomicAdd(verdict.words[at], number.x);
    atomicAdd(verdict.words[at + 1], number.y + (before > ~number.x ? 1 : 0));
}

// The sum of the lanes' numbers up to each, and that of all. All lanes are here.
uint sum_up_to(uint number, out uint all) {
    const uint lane = gl_LocalInvocationIndex, row = lane / ROW, place = lane % ROW;
    numbers[lane] = number;
    barrier();
    uint up_to = 0;
    for (uint at = 0; at < ROW; ++at) {
        const uint other = numbers[row * ROW + at];
        up_to += at <= place ? other : 0;
    }
    if (place == ROW - 1) rows[row] = up_to;
    barrier();
    all = 0;
    for (uint at = 0; at < LANES / ROW; ++at) {
        const uint other = rows[at];
        up_to += at < row ? other : 0;
        all += other;
    }
    return up_to;
}

// A word of the block's code. The place of a word beyond it is that of the last one.
uint code_word(uint at) { return code.words[code_begin + min(at, code_count - 1)]; }

// Gives a word of the binding these bits where `mask` has ones.
void put_bits(uint at, uint bits, uint mask) {
    if (mask == ALL) {
        weights.words[at] = bits;
    } else if (mask != 0) {
        atomicAnd(weights.words[at], ~mask);
        atomicOr(weights.words[at], bits);
    }
}

// A lane's consecutive words of a block: the next one, and the bits that the one before leaves for a word of the binding.
struct Run {
    uint word, bits, mask;
};

// Stores the next word of a run as far as the block's weights go, and adds it to the sum.
void put(inout Run run, uint word) {
    const uint at = block_at / 4 + run.word;
    if (whole) {
        weights.words[at] = word;
    } else {
        const uint left = block_bytes - min(4 * run.word, block_bytes), mask = ones(8 * min(left, 4)), shift = block_at % 4 * 8;
        sound = sound && ((word ^ padding) & ~mask) == 0;
        word &= mask;
        put_bits(at, run.bits | word << shift, run.mask | mask << shift);
        run.bits = word >> 1 >> (31 - shift);
        run.mask = mask >> 1 >> (31 - shift);
    }
    sum = plus(sum, times(word, factor_of(run.word)));
    ++run.word;
}

void finish(Run run) { put_bits(block_at / 4 + run.word, run.bits, run.mask); }

// The words of weights that are as they were, with what pads them.
uint words_of(uint count) { return (count * SIZE + 15) / 16 * UNIT; }

// Copies the block's weights from word `from` of its code on, where they are as they were.
void copy(uint from, uint words) {
    padding = 0;
    for (uint at = gl_LocalInvocationIndex * UNIT; at < words; at += LANES * UNIT) {
        Run run = Run(at, 0, 0);
        for (uint word = 0; word < UNIT; ++word) put(run, code.words[code_begin + from + at + word]);
        finish(run);
    }
}

// Where a tile's tail is, for the check of what pads it: its first word, and how many codes it has of each level.
struct Tail {
    uint at, second, third;
};

// The bit of a tail at which its third level begins.
uint third_begin(Tail tail) { return 2 * tail.second + 7 & ~7u; }

// Whether no bit of a tail is set that belongs to no code.
bool is_padded_with_zeros(Tail tail) {
    const uint second = 2 * tail.second, third = third_begin(tail) + 3 * tail.third;
    const uint after_second = code_word(tail.at + second / 32) >> second % 32 & ones(0 - second & 7);
    const uint after_third = third % 32 == 0 ? 0 : code_word(tail.at + third / 32) >> third % 32;
    return (after_second | after_third) == 0;
}

// A lane's codes of a tile: those of the first level, and its bits of the other levels, the next code's the lowest: at most 64 and
// 96.
struct Levels {
    uvec2 first, second;
    uvec3 third;
};

// Finds a lane's bits of the second and the third level in the tile's tail at word `tail.at`, and counts the codes of all lanes.
void find_levels(inout Levels levels, inout Tail tail) {
    const uvec2 threes = levels.first & levels.first >> 1 & 0x55555555u;
    const uint seconds = bitCount(threes.x) + bitCount(threes.y);
    uint begin = 2 * (sum_up_to(seconds, tail.second) - seconds), from = tail.at + begin / 32;
    const uint middle = code_word(from + 1);
    levels.second.x = funnel(code_word(from), middle, begin);
    levels.second.y = funnel(middle, code_word(from + 2), begin);

    const uvec2 valid = uvec2(ones(2 * min(seconds, 16)), ones(2 * (max(seconds, 16) - 16))) & 0x55555555u;
    const uvec2 continued = levels.second & levels.second >> 1 & valid;
    const uint thirds = bitCount(continued.x) + bitCount(continued.y);
    const uint upto = sum_up_to(thirds, tail.third);
    begin = third_begin(tail) + 3 * (upto - thirds), from = tail.at + begin / 32;
    const uvec4 words = uvec4(code_word(from), code_word(from + 1), code_word(from + 2), code_word(from + 3));
    levels.third = uvec3(funnel(words.x, words.y, begin), funnel(words.y, words.z, begin), funnel(words.z, words.w, begin));
}

// The eight exponents of a group of a lane are looked up one after the other, in bits of the levels that are enough for all.
struct Group {
    uint first, second, third, seconds, thirds;
};

// The next exponent, in its place.
uint next_exponent(inout Group group) {
    const uint code = group.first & 3, pair = code == 3 ? group.second & 3 : 0, triple = pair == 3 ? group.third & 7 : 0;
    const uint second = code == 3 ? 2 : 0, third = pair == 3 ? 3 : 0;
    group.first >>= 4, group.second >>= second, group.third >>= third;
    group.seconds += second, group.thirds += third;
    return exponents[code + pair + triple];
}

// Takes the bits of a group off the levels.
void leave_behind(inout Levels levels, Group group) {
    levels.second = uvec2(funnel(levels.second.x, levels.second.y, group.seconds), levels.second.y >> group.seconds);
    const uvec2 low = levels.third.xy, high = levels.third.yz;
    levels.third = uvec3(funnel(low.x, high.x, group.thirds), funnel(low.y, high.y, group.thirds), high.y >> group.thirds);
}

// Four bytes of a plane, at a word of the block's code; zeros of planes that are left out.
uint load_plane(uint plane, uint flags, uint at) {
    uint bytes = 0;
    if (plane < BYTES && (flags >> plane & 1) == 0) bytes = code.words[code_begin + at];
    return bytes;
}

// The rests' bits beyond whole bytes of a group of eight, of the lane's words from `at` on.
uint load_bits(uint flags, uint at, uint group) {
    uint bits = 0;
    if (BITS > 0 && (flags >> BYTES & 1) == 0) {
        const uint from = group * BITS / 4, next = min(from + 1, max(BITS, 1) - 1);
        bits = funnel(code.words[code_begin + at + from], code.words[code_begin + at + next], group * 8 * BITS);
    }
    return bits;
}

// Gives the escapes their exponents, where `escape` stands for them, once all lanes have stored their weights.
void place_escapes(uint escapes_at, uint all, uint escape, uint count) {
    for (uint number = gl_LocalInvocationIndex; number < all; number += LANES) {
        const uint at = code_begin + escapes_at + number, coded = code.words[at], place = coded >> 8, exponent = coded & 0xff;
        bool in_order = true;
        if (number > 0) in_order = code.words[at - 1] >> 8 < place;
        if (!in_order || place >= count || exponent > LARGEST) {
            sound = false;
            continue;
        }
        const uint byte = block_at + place * SIZE, there = MANTISSA + byte % 4 * 8;
        const uint before = atomicXor(weights.words[byte / 4], (escape ^ exponent) << there);
        sound = sound && (before >> there & LARGEST) == escape;
        const uint shift = MANTISSA + place * SIZE % 4 * 8, factor = factor_of(place * SIZE / 4);
        sum = minus(plus(sum, times(exponent << shift, factor)), times(escape << shift, factor));
    }
}

// Decodes the tiles of a block of as many weights. All lanes are here.
void decode_tiles(uvec4 table, uint flags, uint escapes, uint count) {
    const uint lane = gl_LocalInvocationIndex, tiles = (count + TILE - 1) / TILE;

    // Where the parts are, and the lane's part in them.
    uint planes[4], at = BLOCK_HEADER;
    for (uint plane = 0; plane < 4; ++plane) {
        planes[plane] = at + lane * (plane < BYTES ? 2 : BITS);
        if (plane < PLANES && (flags >> plane & 1) == 0) at += (plane < BYTES ? TILE / 4 : BITS * TILE / 32) * tiles;
    }
    const bool has_codes = (flags & NO_CODES) == 0;
    const uint codes_at = at + lane * 2;
    if (has_codes) at += CODES * tiles;
    const uint escapes_at = at;
    if (escapes_at + escapes > code_count) {
        sound = false;
        return;
    }

    padding = exponents[0] * ONES;
    // The tail of the tile, and that of the one that the lane checks.
    Tail tail = Tail(escapes_at + escapes, 0, 0), own = tail;
    for (uint tile = 0; tile < tiles; ++tile) {
        Levels levels = Levels(NONE, NONE, uvec3(0));
        if (has_codes) {
            const uint codes = code_begin + codes_at + tile * CODES;
            levels.first = uvec2(code.words[codes], code.words[codes + 1]);
        }
        find_levels(levels, tail);
        for (uint number = 0; number < 4; ++number) {
            Group group = Group(levels.first[number / 2] >> number % 2 * 2, levels.second.x, levels.third.x, 0, 0);
            Run run = Run((tile * TILE + number * (TILE / 4) + lane * 8) / EACH, 0, 0);
            const uint bits = load_bits(flags, planes[BYTES] + tile * (BITS * TILE / 32), number);
            for (uint four = 0; four < 2; ++four) {
                const uint from = tile * (TILE / 4) + number * (TILE / 16) + four;
                uvec3 bytes;
                for (uint plane = 0; plane < 3; ++plane) bytes[plane] = load_plane(plane, flags, planes[plane] + from);
                for (uint at = 0; at < SIZE; ++at) {
                    uint word = 0;
                    for (uint each = 0; each < EACH; ++each) {
                        const uint weight = at * EACH + each, above = bits >> (four * 4 + weight) * BITS & ones(BITS);
                        const uvec3 below = bytes >> weight * 8 & 0xff;
                        const uint rest = below.x | below.y << 8 | below.z << 16 | above << BYTES * 8;
                        const uint joined = next_exponent(group) | rest & ones(MANTISSA) | rest >> MANTISSA << (SIZE * 8 - 1);
                        word |= joined << each * SIZE * 8;
                    }
                    put(run, word);
                }
            }
            finish(run);
            leave_behind(levels, group);
        }
        if (lane == tile) own = tail;
        tail.at += ((third_begin(tail) + 3 * tail.third + 7) / 8 + 3) / 4;
    }
    if (tail.at > code_count || code_count - tail.at >= UNIT) {
        sound = false;
        return;
    }
    bool ends_with_zeros = true;
    if (tail.at + lane < code_count) ends_with_zeros = code_word(tail.at + lane) == 0;
    sound = sound && ends_with_zeros && is_padded_with_zeros(own);
    // All weights are there, for all lanes.
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsBuffer, gl_SemanticsAcquireRelease);
    place_escapes(escapes_at, escapes, table.w >> 8 & 0xff, count);
}

// Decodes a block of a tensor in blocks, and returns the sum that it has to have. All lanes are here.
uvec2 decode_block(uint count) {
    uint words[BLOCK_HEADER];
    for (uint at = 0; at < BLOCK_HEADER; ++at) words[at] = code.words[code_begin + at];
    uvec2 wanted = uvec2(words[0], words[1]);
    for (uint at = 2; at < BLOCK_HEADER; ++at) wanted = minus(wanted, times(words[at], factor_of(BLOCK + at - 2)));
    const uvec4 table = uvec4(words[4], words[5], words[6], words[7]);

    const uint escapes = words[2] & 0xffff, kind = words[3] & 0xff, flags = words[3] >> 8;
    const uint all = table.x | table.y | table.z | table.w;
    bool fits = (words[2] >> 16) * UNIT == code_count && flags <= 0xff && table.w >> 16 == 0;
    if (kind == PLAIN) {
        const uint plain = words_of(count);
        fits = fits && (escapes | flags | all) == 0 && code_count == BLOCK_HEADER + plain;
        if (fits) copy(BLOCK_HEADER, plain);
    } else {
        fits = fits && kind == LADDER && (flags & ~NO_CODES) >> PLANES == 0 && ((flags & NO_CODES) == 0 || escapes == 0);
        fits = fits && (all & ~(LARGEST * 0x01010101u)) == 0;
        // The lanes are through with the table of the block before: they have added their sums since.
        if (gl_LocalInvocationIndex < 16) {
            const uint at = gl_LocalInvocationIndex;
            exponents[at] = (table[at / 4] >> at % 4 * 8 & 0xff) << MANTISSA;
        }
        barrier();
        if (fits) decode_tiles(table, flags, escapes, count);
    }
    sound = sound && fits;
    return wanted;
}

// The weights of a block.
uint count_of(uint number) { return number + 1 == work.blocks ? work.last : BLOCK; }

// Where a block begins and ends, in units of 16 bytes from the code's first.
uint begin_of(uint number) {
    uint begin = CODE_HEADER / UNIT + (work.blocks + 1) / 2 + number * (BLOCK * SIZE / 16);
    if (work.in_blocks != 0) begin = head.words[work.head_at / 4 + CODE_HEADER + number];
    return begin;
}

uint end_of(uint number) {
    uint end = 0;
    if (work.in_blocks != 0) end = begin_of(number + 1);
    else end = begin_of(number) + words_of(count_of(number)) / UNIT;
    return end;
}

// The first block that ends after a unit. The lanes look at 32 of them at a time; whatever they find, it is one of the blocks or
// the number of all.
uint first_after(uint unit) {
    uint low = 0, high = work.blocks;
    while (low < high) {
        const uint step = (high - low + LANES - 1) / LANES, at = low + (gl_LocalInvocationIndex + 1) * step - 1;
        uint is_before = 0, before;
        if (at < high) is_before = end_of(at) <= unit ? 1 : 0;
        sum_up_to(is_before, before);
        low = min(low + before * step, high);
        high = min(low + step - 1, high);
    }
    return low;
}

// Decodes a block and adds what its header says of the sum to the verdict. All lanes are here.
void decode_one(uint number, uint begin, uint end) {
    const uint count = count_of(number), lane = gl_LocalInvocationIndex;
    code_begin = work.code_at / 4 + (begin - work.begin) * UNIT, code_count = (end - begin) * UNIT;
    block_at = work.weights_at + (number - work.first_block) * (BLOCK * SIZE), block_bytes = count * SIZE;
    whole = count == BLOCK && block_at % 4 == 0;
    sum = NONE, sound = true;

    uvec2 wanted = NONE;
    const bool in_blocks = work.in_blocks != 0;
    if (!in_blocks) {
        const uint at = work.head_at / 4 + CODE_HEADER + 2 * number;
        wanted = uvec2(head.words[at], head.words[at + 1]);
    }
    if (work.begin <= begin && begin <= end && end - begin >= (in_blocks ? BLOCK_HEADER / UNIT : 0)) {
        if (in_blocks) wanted = decode_block(count);
        else copy(0, words_of(count));
    } else {
        sound = false;
    }

    // The first lane is through with the sums of the block before.
    barrier();
    sums[lane] = sum;
    barrier();
    if (lane == 0) {
        uvec2 all = times(number + 1, START.x) + uvec2(0, (number + 1) * START.y);
        for (uint of = 0; of < LANES; ++of) all = plus(all, sums[of]);
        sound = sound && all == wanted;
        add_to_verdict(wanted);
    }
    if (!sound) atomicOr(verdict.words[work.verdict_at / 4 + 2], 1);
}

void main() {
    const uint group = gl_WorkGroupID.x;
    if (group >= work.groups) return;
    // Whatever the index says, so that a code of which no block is found is not sound.
    if (work.is_first != 0 && group == 0 && gl_LocalInvocationIndex == 0)
        add_to_verdict(uvec2(work.less_expected_low, work.less_expected_high));
    uint first = 0;
    if (work.after != 0) first = first_after(work.after);
    first = max(first, work.first_block);
    const uint stop = min(work.blocks, work.end_block);
    for (uint number = first + group; number < stop; number += work.groups) {
        const uint begin = begin_of(number), end = end_of(number);
        // The same for all lanes. What no part has is missing in the sum.
        if (end > work.end) break;
        if (end > work.after) decode_one(number, begin, end);
    }
}
