// Decodes the lossless code for weights, whose format is in src/lossless/mod.rs.
//
// scripts/kernels/regenerate makes lossless.ptx of this. A warp decodes a block, tile after tile: a lane has the weights that the
// format gives it, and finds its codes of the second and the third level by sums over the lanes before it. Where a block is
// whole, a lane stores its eight weights of a group as runs of 16 bytes.
//
// A block is checked as src/lossless/decode.rs checks it. Whatever it holds, it is read within its bytes and written within its
// weights; what is not sound is told, and the weights are not defined then. The host has checked the header and the index.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define LANES 32
#define WARPS 4 // of a block of threads
#define ALL 0xffffffffu

#define TILE 1024
#define BLOCK 8192
#define CODES 256       // the bytes of a tile's codes
#define CODE_HEADER 64  // the bytes of the header of a code
#define BLOCK_HEADER 32 // and of a block
#define UNIT 16         // the bytes that the index counts by
#define PLAIN 0
#define LADDER 1
#define NO_CODES 0x80

// Of the sums.
#define FACTOR 0x9e3779b1u
#define START 0x9e3779b97f4a7c15ull

// What is zero if all blocks are sound: the sum of their sums less that of the tensor's header, and whether one is damaged.
struct State {
    u64 sum;
    u32 damaged, zero;
};

// A block's code. The place of a word beyond it is that of the last one.
struct Code {
    const u32 *words;
    u32 count;
    __device__ __forceinline__ u32 word(u32 at) const { return words[min(at, count - 1)]; }
};

// The rests of eight weights of a lane: whole bytes by their planes, and the bits beyond.
struct Rests {
    uint2 bytes[3];
    u32 bits;
};

// The bits of `ones` where `mask` has one, and of `zeros` elsewhere. As one instruction, which the compiler makes two of.
__device__ __forceinline__ u32 choose(u32 mask, u32 ones, u32 zeros) {
    u32 chosen;
    asm("lop3.b32 %0, %1, %2, %3, 202;" : "=r"(chosen) : "r"(mask), "r"(ones), "r"(zeros));
    return chosen;
}

// Four bytes from two numbers, as the low four nibbles of `selectors` name them, none of which is over 7. `__byte_perm` would
// mask them first.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selectors) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

// Moves the bits of `mask` up by `places`.
__device__ __forceinline__ u32 move_up(u32 bits, u32 mask, u32 places) { return bits + (bits & mask) * ((1 << places) - 1); }

// The low three bits of each nibble's field to bytes: four fields of three bits.
__device__ __forceinline__ u32 bytes_of_threes(u32 fields) {
    return move_up(move_up(fields & 0xfff, 0xfc0, 10), 0x00380038, 5);
}

// Pairs of bytes, the low ones first.
__device__ __forceinline__ void interleave(u32 (&words)[2], u32 low, u32 high) {
    words[0] = permute(low, high, 0x5140);
    words[1] = permute(low, high, 0x7362);
}

// The formats: the bytes of a weight, the planes of whole bytes and the bits beyond them, the largest exponent and its place.
// `join` makes four weights of their exponents and rests, each a byte.
struct Bf16 {
    typedef u16 Raw;
    enum { SIZE = 2, BYTES = 1, BITS = 0, LARGEST = 255, MANTISSA = 7 };
    static __device__ __forceinline__ void join(u32 (&words)[SIZE], u32 exponents, const u32 (&bytes)[3], u32) {
        const u32 low = choose(0x7f7f7f7f, bytes[0], exponents << 7), high = choose(0x7f7f7f7f, exponents >> 1, bytes[0]);
        interleave(words, low, high);
    }
};

struct F16 {
    typedef u16 Raw;
    enum { SIZE = 2, BYTES = 1, BITS = 3, LARGEST = 31, MANTISSA = 10 };
    static __device__ __forceinline__ void join(u32 (&words)[SIZE], u32 exponents, const u32 (&bytes)[3], u32 bits) {
        const u32 rests = bytes_of_threes(bits);
        interleave(words, bytes[0], exponents << 2 | rests & 0x03030303 | rests << 5 & 0x80808080);
    }
};

struct F32 {
    typedef u32 Raw;
    enum { SIZE = 4, BYTES = 3, BITS = 0, LARGEST = 255, MANTISSA = 23 };
    static __device__ __forceinline__ void join(u32 (&words)[SIZE], u32 exponents, const u32 (&bytes)[3], u32) {
        const u32 third = choose(0x7f7f7f7f, bytes[2], exponents << 7), fourth = choose(0x7f7f7f7f, exponents >> 1, bytes[2]);
        u32 low[2], high[2];
        interleave(low, bytes[0], bytes[1]);
        interleave(high, third, fourth);
#pragma unroll
        for (u32 pair = 0; pair < 2; ++pair) {
            words[2 * pair] = permute(low[pair], high[pair], 0x5410);
            words[2 * pair + 1] = permute(low[pair], high[pair], 0x7632);
        }
    }
};

struct E4m3 {
    typedef u8 Raw;
    enum { SIZE = 1, BYTES = 0, BITS = 4, LARGEST = 15, MANTISSA = 3 };
    static __device__ __forceinline__ void join(u32 (&words)[SIZE], u32 exponents, const u32 (&)[3], u32 bits) {
        const u32 rests = move_up(permute(bits, 0, 0x4140), 0x00f000f0, 4);
        words[0] = exponents << 3 | rests & 0x07070707 | rests << 4 & 0x80808080;
    }
};

struct E5m2 {
    typedef u8 Raw;
    enum { SIZE = 1, BYTES = 0, BITS = 3, LARGEST = 31, MANTISSA = 2 };
    static __device__ __forceinline__ void join(u32 (&words)[SIZE], u32 exponents, const u32 (&)[3], u32 bits) {
        const u32 rests = bytes_of_threes(bits);
        words[0] = exponents << 2 | rests & 0x03030303 | rests << 5 & 0x80808080;
    }
};

// The rests of a lane's weights of a tile; zeros of planes that are left out. `planes` are the places of the lane's part in them.
template <class Format, u32 PLANES>
__device__ __forceinline__ void load_rests(Rests (&rests)[4], const u8 *code, const u32 (&planes)[PLANES], u32 flags, u32 tile) {
    u32 bits[Format::BITS + 1] = {};
    const u32 last = PLANES - 1;
    if (Format::BITS > 0 && (flags >> last & 1) == 0) {
#pragma unroll
        for (u32 at = 0; at < Format::BITS; ++at) {
            bits[at] = ((const u32 *)(code + planes[last] + tile * (Format::BITS * TILE / 8)))[at];
        }
    }
#pragma unroll
    for (u32 group = 0; group < 4; ++group) {
#pragma unroll
        for (u32 plane = 0; plane < 3; ++plane) {
            rests[group].bytes[plane] = make_uint2(0, 0);
            if (plane < Format::BYTES && (flags >> plane & 1) == 0) {
                rests[group].bytes[plane] = *(const uint2 *)(code + planes[min(plane, last)] + tile * TILE + group * (TILE / 4));
            }
        }
        const u32 from = group * Format::BITS / 4;
        rests[group].bits = Format::BITS == 0 ? 0 : __funnelshift_r(bits[from], bits[from + 1], group * 8 * Format::BITS);
    }
}

// Eight weights of their exponents and rests.
template <class Format>
__device__ __forceinline__ void join_eight(u32 (&words)[2 * Format::SIZE], u32 low, u32 high, const Rests &rests) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        u32 bytes[3], four[Format::SIZE];
#pragma unroll
        for (u32 plane = 0; plane < 3; ++plane) bytes[plane] = half == 0 ? rests.bytes[plane].x : rests.bytes[plane].y;
        Format::join(four, half == 0 ? low : high, bytes, rests.bits >> half * 4 * Format::BITS);
#pragma unroll
        for (u32 at = 0; at < Format::SIZE; ++at) words[half * Format::SIZE + at] = four[at];
    }
}

// The factor of a word of a block in its sum.
__device__ __forceinline__ u32 factor_of(u32 word) { return (2 * word + 1) * FACTOR; }

// What a lane adds to a block's sum for consecutive words, of which the first has this factor.
template <u32 COUNT>
__device__ __forceinline__ void add(u64 &sum, const u32 (&words)[COUNT], u32 factor) {
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at) sum += (u64)words[at] * (factor + 2 * at * FACTOR);
}

// Stores consecutive words, four at a time where there are as many.
template <u32 COUNT>
__device__ __forceinline__ void store(u8 *to, const u32 (&words)[COUNT]) {
    if (COUNT == 2) *(uint2 *)to = make_uint2(words[0], words[1 % COUNT]);
#pragma unroll
    for (u32 at = 0; at + 4 <= COUNT; at += 4) {
        // The code is read once, too: what is stored must not take its place in the cache while it is on its way.
        __stcs((uint4 *)(to + 4 * at),
               make_uint4(words[at], words[(at + 1) % COUNT], words[(at + 2) % COUNT], words[(at + 3) % COUNT]));
    }
}

// Stores those of the weights in consecutive words that are before `count`, one by one, and gives the others zero bits. Returns
// whether all others are `padding`.
template <class Format, u32 COUNT>
__device__ __forceinline__ bool store_some(u8 *to, u32 (&words)[COUNT], u32 first, u32 count, u32 padding) {
    const u32 each = 4 / Format::SIZE, bits = 8 * Format::SIZE, mask = ALL >> (32 - bits);
    bool sound = true;
#pragma unroll
    for (u32 at = 0; at < COUNT * each; ++at) {
        const u32 shift = at % each * bits, weight = words[at / each] >> shift & mask;
        if (first + at < count) {
            ((typename Format::Raw *)to)[first + at] = (typename Format::Raw)weight;
        } else {
            sound = sound && weight == padding;
            words[at / each] &= ~(mask << shift);
        }
    }
    return sound;
}

// The sums over the lanes up to each.
__device__ __forceinline__ u32 sums_up_to(u32 value, const u32 (&takes)[5]) {
#pragma unroll
    for (u32 step = 0; step < 5; ++step) value += __shfl_up_sync(ALL, value, 1 << step) * takes[step];
    return value;
}

// The exponents of the levels, each a byte: of ranks 0 to 2, of 3 to 5, and of 6 to 12 with that of an escape.
struct Levels {
    u32 first, second, third_low, third_high;
};

// Eight codes of two bits, each in a nibble: a code below 3 is a byte of `table`, and each 3 the next byte of those that continue.
// `threes` has a bit for each 3. `upto` is the number of threes up to each code.
__device__ __forceinline__ void look_up(u32 &low, u32 &high, u32 codes, u32 threes, u32 upto, u32 table, u32 next_low,
                                        u32 next_high) {
    // Of the upper four codes, those that continue are counted on their own, and their bytes are moved down.
    const u32 of_low = upto & 0xf000, within = upto - of_low * 0x11110;
    // Bytes 0 to 2 are the table's, and 4 to 7 the next ones.
    const u32 selectors = codes + (within & threes * 15);
    low = permute(table, next_low, selectors);
    high = permute(table, __funnelshift_rc(next_low, next_high, of_low >> 9), selectors >> 16);
}

// Where a tile's tail is, for the check of what pads it: its first word, and how many codes it has of each level.
struct Tail {
    u32 at, second, third;
};

// The bit of a tail at which its third level begins.
__device__ __forceinline__ u32 third_begin(const Tail &tail) { return 2 * tail.second + 7 & ~7u; }

// Whether no bit of a tail is set that belongs to no code.
__device__ __forceinline__ bool is_padded_with_zeros(const Code &code, const Tail &tail) {
    const u32 second = 2 * tail.second, third = third_begin(tail) + 3 * tail.third;
    const u32 after_second = code.word(tail.at + second / 32) >> second % 32 & (1 << (0 - second & 7)) - 1;
    const u32 after_third = third % 32 == 0 ? 0 : code.word(tail.at + third / 32) >> third % 32;
    return (after_second | after_third) == 0;
}

// A lane's codes of a tile: those of the first level, where there are threes among them, and its bits of the other levels, the next
// code's the lowest: at most 64 and 96.
struct Codes {
    u32 first[2], threes[2], second[2], third[3];
};

// Finds a lane's bits of the second and the third level in the tile's tail at word `tail.at`, and counts the codes of all lanes.
__device__ __forceinline__ void find_levels(Codes &codes, Tail &tail, const Code &code, const u32 (&takes)[5]) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) codes.threes[half] = codes.first[half] & codes.first[half] >> 1 & 0x55555555;
    const u32 seconds = __popc(codes.threes[0] | codes.threes[1] << 1), seconds_upto = sums_up_to(seconds, takes);
    tail.second = __shfl_sync(ALL, seconds_upto, LANES - 1);
    u32 begin = 2 * (seconds_upto - seconds), from = tail.at + begin / 32;
    const u32 middle = code.word(from + 1);
    codes.second[0] = __funnelshift_r(code.word(from), middle, begin);
    codes.second[1] = __funnelshift_r(middle, code.word(from + 2), begin);

    const u32 valid_low = __funnelshift_rc(0x55555555, 0, max(32 - 2 * (int)seconds, 0));
    const u32 valid_high = __funnelshift_rc(0x55555555, 0, 64 - 2 * seconds);
    const u32 low = codes.second[0] & codes.second[0] >> 1 & valid_low, high = codes.second[1] & codes.second[1] >> 1 & valid_high;
    const u32 thirds = __popc(low | high << 1), thirds_upto = sums_up_to(thirds, takes);
    tail.third = __shfl_sync(ALL, thirds_upto, LANES - 1);
    begin = third_begin(tail) + 3 * (thirds_upto - thirds), from = tail.at + begin / 32;
    u32 word = code.word(from);
#pragma unroll
    for (u32 part = 0; part < 3; ++part) {
        const u32 next = code.word(from + part + 1);
        codes.third[part] = __funnelshift_r(word, next, begin);
        word = next;
    }
}

// The exponents of the eight codes of a group, each a byte, and takes their bits off the levels.
__device__ __forceinline__ void look_up_group(u32 &low, u32 &high, Codes &codes, const Levels &levels, u32 group) {
    const u32 shift = group % 2 * 2, half = group / 2;
    const u32 firsts = codes.first[half] >> shift & 0x33333333, threes = codes.threes[half] >> shift & 0x11111111;
    const u32 upto = threes * 0x11111111, twice = upto >> 27;

    // The next codes of the second level; those that are not this group's are looked up too, and nobody takes them.
    const u32 pairs = move_up(move_up(permute(codes.second[0], 0, 0x4140), 0x00f000f0, 4), 0x0c0c0c0c, 2);
    const u32 pair_threes = pairs & pairs >> 1 & __funnelshift_rc(0x11111111, 0, 32 - 2 * twice);
    const u32 pair_upto = pair_threes * 0x11111111, thrice = (pair_upto >> 28) * 3;
    // And of the third.
    const u32 triples = move_up(move_up(move_up(codes.third[0] & 0xffffff, 0xfff000, 4), 0x0fc00fc0, 2), 0x38383838, 1);
    codes.second[0] = __funnelshift_r(codes.second[0], codes.second[1], twice);
    codes.second[1] >>= twice;
    codes.third[0] = __funnelshift_r(codes.third[0], codes.third[1], thrice);
    codes.third[1] = __funnelshift_r(codes.third[1], codes.third[2], thrice);
    codes.third[2] >>= thrice;

    low = permute(levels.third_low, levels.third_high, triples);
    high = permute(levels.third_low, levels.third_high, triples >> 16);
    look_up(low, high, pairs, pair_threes, pair_upto, levels.second, low, high);
    look_up(low, high, firsts, threes, upto, levels.first, low, high);
}

// Gives the escapes their exponents, where `escape` stands for them, once all lanes have stored their weights. Returns whether
// those of the lane are sound, and adds the change to `sum`.
template <class Format>
__device__ __forceinline__ bool place_escapes(const u32 *escapes, u32 all, u32 escape, u8 *to, u32 count, u64 &sum) {
    bool sound = true;
    for (u32 number = threadIdx.x; number < all; number += LANES) {
        const u32 coded = escapes[number], place = coded >> 8, exponent = coded & 0xff;
        const bool in_order = number == 0 || escapes[number - 1] >> 8 < place;
        if (!in_order || place >= count || exponent > Format::LARGEST) {
            sound = false;
            continue;
        }
        typename Format::Raw *const weight = (typename Format::Raw *)to + place;
        const u32 before = *weight, field = Format::LARGEST << Format::MANTISSA;
        sound = sound && (before & field) == escape << Format::MANTISSA;
        const u32 after = before & ~field | exponent << Format::MANTISSA, bit = place * Format::SIZE % 4 * 8;
        *weight = (typename Format::Raw)after;
        const u32 factor = factor_of(place * Format::SIZE / 4);
        sum += (u64)(after << bit) * factor - (u64)(before << bit) * factor;
    }
    return sound;
}

// Decodes the tiles of a block to `to`. Returns whether what was decoded is sound, by what the lane saw of it, and adds the
// weights to `sum`. With `WHOLE` there are 8,192 of them, at a multiple of 16 bytes.
template <class Format, bool WHOLE>
__device__ __forceinline__ bool decode_tiles(const Code &code, uint4 table, u32 flags, u32 escapes, u8 *to, u32 count,
                                             u64 &sum) {
    const u32 PLANES = Format::BYTES + (Format::BITS > 0), lane = threadIdx.x;
    const u32 tiles = WHOLE ? BLOCK / TILE : (count + TILE - 1) / TILE;
    const u8 *const bytes = (const u8 *)code.words;

    // Where the parts are.
    u32 planes[PLANES], at = BLOCK_HEADER;
#pragma unroll
    for (u32 plane = 0; plane < PLANES; ++plane) {
        const u32 size = plane < Format::BYTES ? TILE : Format::BITS * TILE / 8;
        planes[plane] = at + lane * (plane < Format::BYTES ? 8 : size / LANES);
        if ((flags >> plane & 1) == 0) at += size * tiles;
    }
    const bool has_codes = (flags & NO_CODES) == 0;
    const u32 codes_at = at + lane * 8;
    if (has_codes) at += CODES * tiles;
    const u32 escapes_at = at / 4;
    if (escapes_at + escapes > code.count) return false;

    Levels levels;
    levels.first = table.x, levels.second = permute(table.x, table.y, 0x6543);
    levels.third_low = permute(table.y, table.z, 0x5432), levels.third_high = permute(table.z, table.w, 0x5432);
    const u32 padding = (table.x & 0xff) << Format::MANTISSA;
    u32 takes[5];
#pragma unroll
    for (u32 step = 0; step < 5; ++step) {
        takes[step] = lane >> step != 0;
        // So that it stays a factor: a multiplication costs less than a choice.
        asm("mov.b32 %0, %0;" : "+r"(takes[step]));
    }

    bool sound = true;
    // The tail of the tile, and that of the one that the lane checks.
    Tail tail = {escapes_at + escapes, 0, 0}, own = tail;
    // The lane's weights of the first group, and the factor of their first word.
    u8 *run = to + lane * 8 * Format::SIZE;
    u32 factor = factor_of(lane * 8 * Format::SIZE / 4);
#pragma unroll 1
    for (u32 tile = 0; tile < tiles; ++tile) {
        uint2 first = make_uint2(0, 0);
        if (has_codes) first = *(const uint2 *)(bytes + codes_at + tile * CODES);
        Rests rests[4];
        load_rests<Format>(rests, bytes, planes, flags, tile);
        Codes codes;
        codes.first[0] = first.x, codes.first[1] = first.y;
        find_levels(codes, tail, code, takes);
#pragma unroll
        for (u32 group = 0; group < 4; ++group) {
            u32 low, high, words[2 * Format::SIZE];
            look_up_group(low, high, codes, levels, group);
            join_eight<Format>(words, low, high, rests[group]);
            if (WHOLE) {
                store(run + group * (TILE / 4) * Format::SIZE, words);
            } else {
                sound = store_some<Format>(to, words, tile * TILE + group * (TILE / 4) + lane * 8, count, padding) && sound;
            }
            add(sum, words, factor + group * (TILE / 4) * Format::SIZE / 2 * FACTOR);
        }
        if (lane == tile) own = tail;
        run += TILE * Format::SIZE, factor += TILE * Format::SIZE / 2 * FACTOR;
        tail.at += ((third_begin(tail) + 3 * tail.third + 7) / 8 + 3) / 4;
    }
    const u32 end = tail.at;
    if (end > code.count || code.count - end >= UNIT / 4) return false;
    sound = sound && is_padded_with_zeros(code, own) && (end + lane >= code.count || code.words[end + lane] == 0);
    __syncwarp();
    return place_escapes<Format>(code.words + escapes_at, escapes, table.w >> 8 & 0xff, to, count, sum) && sound;
}

// The words of weights that are as they were, with what pads them.
template <class Format>
__device__ __forceinline__ u32 words_of(u32 count) { return (count * Format::SIZE + UNIT - 1) / UNIT * (UNIT / 4); }

// Copies a block that is as it was. Returns whether what pads it is zero, and adds the weights to `sum`.
template <class Format, bool WHOLE>
__device__ __forceinline__ bool copy(const u32 *from, u32 words, u8 *to, u32 count, u64 &sum) {
    bool sound = true;
    if (WHOLE) {
        for (u32 at = threadIdx.x; at < BLOCK * Format::SIZE / 16; at += LANES) {
            const uint4 four = ((const uint4 *)from)[at];
            const u32 words[4] = {four.x, four.y, four.z, four.w};
            store(to + at * 16, words);
            add(sum, words, factor_of(at * 4));
        }
    } else {
        for (u32 at = threadIdx.x; at < words; at += LANES) {
            u32 word[1] = {from[at]};
            sound = store_some<Format>(to, word, at * (4 / Format::SIZE), count, 0) && sound;
            add(sum, word, factor_of(at));
        }
    }
    return sound;
}

// Decodes a block of a tensor in blocks. Returns whether the lane found it sound.
template <class Format, bool WHOLE>
__device__ __forceinline__ bool decode_block(const Code &code, u8 *to, u32 count, u64 &sum, u64 &wanted) {
    const uint4 head = ((const uint4 *)code.words)[0], table = ((const uint4 *)code.words)[1];
    const u32 others[6] = {head.z, head.w, table.x, table.y, table.z, table.w};
    u64 of_header = 0;
    add(of_header, others, factor_of(BLOCK));
    wanted = ((u64)head.y << 32 | head.x) - of_header;

    const u32 escapes = head.z & 0xffff, kind = head.w & 0xff, flags = head.w >> 8;
    if ((head.z >> 16) * (UNIT / 4) != code.count || flags > 0xff || table.w >> 16 != 0) return false;
    if (kind == PLAIN) {
        const u32 words = words_of<Format>(count);
        const bool sound = (escapes | flags | table.x | table.y | table.z | table.w) == 0;
        if (!sound || code.count != BLOCK_HEADER / 4 + words) return false;
        return copy<Format, WHOLE>(code.words + BLOCK_HEADER / 4, words, to, count, sum);
    }
    const u32 PLANES = Format::BYTES + (Format::BITS > 0);
    if (kind != LADDER || (flags & ~NO_CODES) >> PLANES != 0 || ((flags & NO_CODES) != 0 && escapes != 0)) return false;
    if (((table.x | table.y | table.z | table.w) & ~(Format::LARGEST * 0x01010101u)) != 0) return false;
    return decode_tiles<Format, WHOLE>(code, table, flags, escapes, to, count, sum);
}

// The blocks of a code: where each begins and ends, in units of 16 bytes from the code's first.
template <class Format>
struct Places {
    const u8 *head; // header and index
    u32 blocks, last, in_blocks;

    // The weights of a block.
    __device__ __forceinline__ u32 count(u32 number) const { return number + 1 == blocks ? last : BLOCK; }
    __device__ __forceinline__ u32 begin(u32 number) const {
        if (in_blocks != 0) return ((const u32 *)(head + CODE_HEADER))[number];
        return CODE_HEADER / UNIT + (blocks + 1) / 2 + number * (BLOCK * Format::SIZE / UNIT);
    }
    __device__ __forceinline__ u32 end(u32 number) const {
        return in_blocks != 0 ? begin(number + 1) : begin(number) + words_of<Format>(count(number)) / (UNIT / 4);
    }
    // The sum of the weights of a block, where these are as they were.
    __device__ __forceinline__ u64 sum(u32 number) const { return ((const u64 *)(head + CODE_HEADER))[number]; }

    // The first block that ends after a unit. The lanes look at 32 of them at a time; whatever they find, it is one of the blocks or
    // the number of all.
    __device__ __forceinline__ u32 first_after(u32 unit) const {
        u32 low = 0, high = blocks;
        while (low < high) {
            const u32 step = (high - low + LANES - 1) / LANES, at = low + (threadIdx.x + 1) * step - 1;
            u32 before = at < high && end(at) <= unit;
#pragma unroll
            for (u32 other = LANES / 2; other > 0; other /= 2) before += __shfl_xor_sync(ALL, before, other);
            low = min(low + before * step, high);
            high = min(low + step - 1, high);
        }
        return low;
    }
};

// Decodes a block and adds what its header says of the sum to the state. All lanes are here.
template <class Format>
__device__ __forceinline__ void decode_one(const Places<Format> &places, const u8 *__restrict__ bytes, u8 *weights, State *state,
                                           uint3 part, u32 number, u32 begin, u32 end) {
    const u32 count = places.count(number), lane = threadIdx.x;
    u8 *const to = weights + (u64)number * (BLOCK * Format::SIZE);
    const bool whole = count == BLOCK && (u64)weights % 16 == 0;

    u64 sum = 0, wanted = 0;
    bool sound = false;
    const Code code = {(const u32 *)(bytes + (u64)(begin - part.x) * UNIT), (end - begin) * (UNIT / 4)};
    const u32 in_blocks = places.in_blocks, plain = words_of<Format>(count);
    if (in_blocks == 0) wanted = places.sum(number);
    if (part.x <= begin && begin <= end && end - begin >= (in_blocks != 0 ? BLOCK_HEADER / UNIT : 0)) {
        if (in_blocks != 0) {
            sound = whole ? decode_block<Format, true>(code, to, count, sum, wanted)
                          : decode_block<Format, false>(code, to, count, sum, wanted);
        } else {
            sound = whole ? copy<Format, true>(code.words, plain, to, count, sum)
                          : copy<Format, false>(code.words, plain, to, count, sum);
        }
    }

#pragma unroll
    for (u32 step = LANES / 2; step > 0; step /= 2) {
        const u32 low = __shfl_xor_sync(ALL, (u32)sum, step), high = __shfl_xor_sync(ALL, (u32)(sum >> 32), step);
        sum += (u64)high << 32 | low;
    }
    if (lane == 0) {
        sound = sound && sum + (number + 1) * START == wanted;
        atomicAdd(&state->sum, wanted);
    }
    if (!sound) atomicOr(&state->damaged, 1u);
}

// Of a code there are its header and index, and the part of units (16 bytes) `part.x` up to `part.z`. Those blocks are decoded that
// end after unit `part.y`, and not after `part.z`, by `warps` warps. `last` are the weights of the last block. `less_expected` is the
// sum of the code's header, negated, which comes with the first part.
template <class Format>
__device__ __forceinline__ void decode(const u8 *__restrict__ head, const u8 *__restrict__ bytes, u8 *weights, State *state,
                                       u64 less_expected, uint3 part, u32 warps, u32 blocks, u32 last, u32 in_blocks) {
    const u32 warp = blockIdx.x * WARPS + threadIdx.y;
    const Places<Format> places = {head, blocks, last, in_blocks};
    // Whatever the index says, so that a code of which no block is found is not sound.
    if (warp == 0 && part.y == 0 && threadIdx.x == 0) atomicAdd(&state->sum, less_expected);
    if (warp >= warps) return;
    const u32 first = part.y == 0 ? 0 : places.first_after(part.y);
    for (u32 number = first + warp; number < blocks; number += warps) {
        const u32 begin = places.begin(number), end = places.end(number);
        // The same for all lanes. What no part has is missing in the sum.
        if (end > part.z) break;
        if (end > part.y) decode_one(places, bytes, weights, state, part, number, begin, end);
    }
}

#define KERNEL(name, format)                                                                                          \
    extern "C" __global__ void __launch_bounds__(LANES *WARPS)                                                        \
        name(const u8 *__restrict__ head, const u8 *__restrict__ bytes, u8 *weights, State *state, u64 less_expected, \
             u32 begin, u32 after, u32 end, u32 warps, u32 blocks, u32 last, u32 in_blocks) {                         \
        const uint3 part = make_uint3(begin, after, end);                                                             \
        decode<format>(head, bytes, weights, state, less_expected, part, warps, blocks, last, in_blocks);             \
    }

KERNEL(lossless_bf16, Bf16)
KERNEL(lossless_f16, F16)
KERNEL(lossless_f32, F32)
KERNEL(lossless_e4m3, E4m3)
KERNEL(lossless_e5m2, E5m2)
