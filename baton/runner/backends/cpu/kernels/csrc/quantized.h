/* Products with weights of 4, 5, 6 or 8 bits: integers with scales, as quantized_weight.py describes them.
 *
 * A row of x is quantized first, in blocks of at most 32 elements that all have one scale of the weight: scale = max|x| / 127,
 * codes = round(x / scale), half to even. The product of a block's codes is an exact integer, so it does not matter in which
 * order an instruction sums it. For each block, in the order of k:
 *     sum = fma(scale of w * scale of x, (float)(product of the codes - zero * sum of x's codes), sum)
 *     sum = fma(offset of w, scale of x * sum of x's codes, sum), if the weight has offsets
 * So all instruction sets give the same bits, whatever the rows and threads.
 *
 * Packed weights: groups of 64 columns, as in kernels.h. The columns' records follow each other along k, so that a task reads
 * memory in order. A record is:
 *     the factors of its scales [64], the factors of its offsets [64]: float16, where scales or offsets are 8 bits wide
 *     groups_per_record times: scales [64], offsets [64] (if any), zeros [64] (bytes; if has_zeros), and the codes of `group`
 *     elements of k, in steps of 4 of them:
 *         8 bits: [panel][16][4]
 *         4 bits: [pair of panels][16][4]; the low half of a byte belongs to the pair's first panel, the high half to its second
 *         5 and 6 bits: each pair's 64 bytes are followed by the bits above the fourth, 16 bytes for 5 bits and 32 for 6. The low
 *         half of a byte belongs to the pair's first panel. Of code i of a panel's 64, 5 bits have theirs in byte i % 16, at bit
 *         i / 16 of the half, and 6 bits in byte i % 32, at bit 2 * (i / 32)
 */
#ifndef BATON_QUANTIZED_H
#define BATON_QUANTIZED_H

#include "kernels.h"

/* What a scale or an offset is in memory; call_structs.py has the same numbers. */
enum number { NUMBER_NONE = 0, NUMBER_FLOAT32 = 1, NUMBER_BFLOAT16 = 2, NUMBER_FLOAT16 = 3, NUMBER_INT8 = 4, NUMBER_UINT8 = 5 };

/* block: elements of k that share a scale of x: a multiple of 4, at most MAX_BLOCK, and a divisor of group. zero: the code that
 * means zero, if not has_zeros. groups_per_record: groups that share a factor; 1 without factors. */
struct quantized_format {
    size_t bits, group, block, groups_per_record;
    int32_t zero, has_zeros, scales, offsets;
};

enum { MAX_BLOCK = 32, QUANTIZED_ROWS_OF_SUMS = 512 };

/* A block of a row of quantized x; weighted_sum is scale * sum, and start is -zero * sum. */
struct quantized_block {
    float scale, weighted_sum;
    int32_t start, minus_sum;
    int8_t codes[]; /* [block] */
};

static inline size_t quantized_block_bytes(const struct quantized_format *f) { return sizeof(struct quantized_block) + f->block; }
static inline size_t quantized_row_bytes(const struct quantized_format *f, size_t k) { return k / f->block * quantized_block_bytes(f); }

static inline int has_factors(int32_t number) { return number >= NUMBER_INT8; }
static inline size_t number_bytes(int32_t number) {
    return number == NUMBER_NONE ? 0 : number == NUMBER_FLOAT32 ? 4 : has_factors(number) ? 1 : 2;
}

/* Sizes in bytes, for all 64 columns. */
static inline size_t codes_bytes(const struct quantized_format *f, size_t elements) { return elements * GROUP_COLUMNS * f->bits / 8; }
/* Where the codes of a pair of panels begin in a step of 4 elements, if they have fewer than 8 bits. */
static inline size_t pair_of_panels(size_t bits, size_t panel) { return panel / 2 * 16 * bits; }
static inline size_t scales_bytes(const struct quantized_format *f) {
    return (number_bytes(f->scales) + number_bytes(f->offsets) + (f->has_zeros ? 1 : 0)) * GROUP_COLUMNS;
}
static inline size_t factors_bytes(const struct quantized_format *f) {
    return (size_t)(has_factors(f->scales) + has_factors(f->offsets)) * GROUP_COLUMNS * 2;
}
static inline size_t record_bytes(const struct quantized_format *f) {
    return factors_bytes(f) + f->groups_per_record * (scales_bytes(f) + codes_bytes(f, f->group));
}
static inline size_t quantized_columns_bytes(const struct quantized_format *f, size_t k) {
    return k / f->group / f->groups_per_record * record_bytes(f);
}

/* Where the numbers of one group of k are in a record, for 64 columns; NULL: the format has none. Only packing writes to them. */
struct quantized_group {
    uint8_t *scale_factors, *offset_factors, *scales, *offsets, *zeros, *codes;
};

static inline struct quantized_group group_of_record(const struct quantized_format *f, const uint8_t *record, size_t group) {
    uint8_t *factors = (uint8_t *)(uintptr_t)record;
    uint8_t *at = factors + factors_bytes(f) + group * (scales_bytes(f) + codes_bytes(f, f->group));
    struct quantized_group places = {0};
    if (has_factors(f->scales)) {
        places.scale_factors = factors;
        factors += GROUP_COLUMNS * 2;
    }
    if (has_factors(f->offsets)) places.offset_factors = factors;
    places.scales = at;
    at += number_bytes(f->scales) * GROUP_COLUMNS;
    if (f->offsets != NUMBER_NONE) places.offsets = at;
    at += number_bytes(f->offsets) * GROUP_COLUMNS;
    if (f->has_zeros) places.zeros = at;
    places.codes = at + (f->has_zeros ? GROUP_COLUMNS : 0);
    return places;
}

static inline struct quantized_group quantized_group(const struct quantized_format *f, const uint8_t *columns, size_t group) {
    return group_of_record(f, columns + group / f->groups_per_record * record_bytes(f), group % f->groups_per_record);
}

/* The parts of a weight [n, k] before it is packed; NULL: the format has none. */
struct quantized_parts {
    const uint8_t *codes, *scales, *scale_factors, *offsets, *offset_factors, *zeros;
};

/* call_structs.py has the same structures for ctypes. */
struct quantize_call {
    const void *x;
    void *out; /* rows of quantized_row_bytes */
    const struct quantized_format *format;
    size_t rows, k, x_stride, rows_per_task; /* the stride counts elements */
};

/* The kernels of one instruction set, indexed by the dtype of x and out. */
struct quantized_kernels {
    int (*supported)(void);
    const struct quantized_kernels *otherwise; /* what computes the same where the processor lacks an instruction */
    task_function linear[2], quantize[2];
    size_t linear_rows; /* rows of x that are multiplied with weights in registers */
};

extern const struct quantized_kernels quantized_amx_int8, quantized_avx512_vnni, quantized_avx2_vnni, quantized_avx2, quantized_portable;

/* The kernels that an instruction set uses on this processor. */
const struct quantized_kernels *quantized_kernels(const struct isa *isa);

struct work quantize_work(struct quantize_call *call, const struct isa *isa, enum dtype dtype);

#endif
