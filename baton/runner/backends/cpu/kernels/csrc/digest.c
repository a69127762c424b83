/* XXH3 with 64 bits (Yann Collet, https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md) of layers longer than 240 bytes,
 * without a seed. Python's xxhash package holds the interpreter's lock (GIL) while it computes; a call of this function does not.
 */
#include <string.h>

#include "kernels.h"

enum { STRIPE = 64, LANE_COUNT = 8, SECRET_SIZE = 192, SECRET_RATE = 8, STRIPES_PER_ROUND = (SECRET_SIZE - STRIPE) / SECRET_RATE };

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

/* The compiler makes one version for each width of vectors; the loader chooses among them. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_WIDTH
#endif

static const unsigned char secret[SECRET_SIZE] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t word_at(const unsigned char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static inline void take_stripe(uint64_t sums[LANE_COUNT], const unsigned char *input, const unsigned char *key_at) {
    uint64_t words[LANE_COUNT], keys[LANE_COUNT];
    memcpy(words, input, sizeof words);
    memcpy(keys, key_at, sizeof keys);
    for (int lane = 0; lane < LANE_COUNT; lane++) {
        uint64_t key = words[lane] ^ keys[lane];
        sums[lane] += words[lane ^ 1] + (key & 0xFFFFFFFFU) * (key >> 32);
    }
}

static inline uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

FOR_EACH_WIDTH
static uint64_t digest(const unsigned char *input, size_t size) {
    uint64_t sums[LANE_COUNT] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    size_t stripes = (size - 1) / STRIPE;
    for (size_t stripe = 0; stripe < stripes; stripe++) {
        size_t place = stripe % STRIPES_PER_ROUND;
        take_stripe(sums, input + stripe * STRIPE, secret + place * SECRET_RATE);
        if (place + 1 < STRIPES_PER_ROUND)
            continue;
        for (int lane = 0; lane < LANE_COUNT; lane++) {
            uint64_t sum = sums[lane] ^ sums[lane] >> 47 ^ word_at(secret + SECRET_SIZE - STRIPE + lane * sizeof *sums);
            sums[lane] = sum * PRIME32_1;
        }
    }
    take_stripe(sums, input + size - STRIPE, secret + SECRET_SIZE - STRIPE - 7);
    uint64_t result = size * PRIME64_1;
    for (int lane = 0; lane < LANE_COUNT; lane += 2) {
        const unsigned char *keys = secret + 11 + lane * sizeof *sums;
        result += folded_product(sums[lane] ^ word_at(keys), sums[lane + 1] ^ word_at(keys + sizeof *sums));
    }
    result = (result ^ result >> 37) * 0x165667919E3779F9ULL;
    return result ^ result >> 32;
}

/* The layers of a sub-block: layer `i` has the rows from `ends[i - 1]` on up to `ends[i]`, and counts `weights[i]` times. */
struct digested_layers {
    const int64_t *starts, *lengths, *ends;
    const uint64_t *weights;
    size_t count;
};

/* The digest of layers that each have one row, whose bytes are where `bytes` leads. */
static uint64_t digest_of_rows(const unsigned char *bytes, const struct digested_layers *layers) {
    uint64_t sum = 0;
    for (size_t i = 0; i < layers->count; i++)
        sum += digest(bytes + layers->starts[i], layers->lengths[i]) * layers->weights[i];
    return sum;
}

/* The digest of a block's part `part`, whose rows are gathered in `scratch` first: all of them, because waiting for memory is shorter
 * for many rows than for those of a layer at a time.
 */
static uint64_t digest_of_part(const unsigned char *block, size_t part, const struct digested_layers *layers, unsigned char *scratch) {
    int64_t rows = layers->ends[layers->count - 1];
    unsigned char *end = scratch;
    for (int64_t row = 0; row < rows; row++) {
        size_t length = layers->lengths[row];
        memcpy(end, block + layers->starts[row] + part * length, length);
        end += length;
    }
    uint64_t sum = 0;
    int64_t row = 0;
    for (size_t i = 0; i < layers->count; i++) {
        size_t size = 0;
        for (; row < layers->ends[i]; row++)
            size += layers->lengths[row];
        sum += digest(scratch, size) * layers->weights[i];
        scratch += size;
    }
    return sum;
}

/* Computes the digests of `count` sub-blocks, of which each block of the memory has `parts`: the sum of the digests of their layers,
 * which must be longer than 240 bytes. The bytes of a layer are those of its rows; row `i` of part `p` of a block has `lengths[i]` bytes
 * from `starts[i] + p * lengths[i]` of the block on. `scratch` has room for a sub-block, if `parts` is not 1.
 */
void baton_digest_layers(const unsigned char *memory, size_t block_bytes, size_t parts, const uint64_t *sub_blocks, size_t count,
                         const int64_t *starts, const int64_t *lengths, const int64_t *ends, const uint64_t *weights, size_t layer_count,
                         unsigned char *scratch, uint64_t *digests) {
    struct digested_layers layers = {starts, lengths, ends, weights, layer_count};
    for (size_t i = 0; i < count; i++) {
        const unsigned char *block = memory + sub_blocks[i] / parts * block_bytes;
        digests[i] = parts == 1 ? digest_of_rows(block, &layers) : digest_of_part(block, sub_blocks[i] % parts, &layers, scratch);
    }
}
