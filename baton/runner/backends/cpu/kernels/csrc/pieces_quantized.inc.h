/* Pieces of k of quantized weights: where their blocks and scales are, and how codes are loaded. Included after the vectors of
 * integers. */
#include "quantized.h"

/* The most blocks of a piece. */
enum { PIECE_BLOCKS = 64 };

/* How a tile reads scales: float16 as they are in the record, for formats without offsets; or float32, to which all other numbers
 * are widened once for all tiles of a piece. */
enum numbers { HALVES, WIDENED, WIDENED_OFFSETS };

/* The scales and offsets of one group of k. */
struct widened_numbers {
    float scales[GROUP_COLUMNS], offsets[GROUP_COLUMNS];
};

/* A block of 64 columns; zeros: NULL, or those of the columns. */
struct piece_block {
    const uint8_t *codes, *halves, *zeros;
    const struct widened_numbers *widened;
};

struct piece {
    size_t blocks;
    struct piece_block block[PIECE_BLOCKS];
    struct widened_numbers widened[PIECE_BLOCKS];
};

/* 16 scales or offsets, from a column on; values and factors as struct quantized_group has them. */
INLINE v16 load_numbers(const enum number NUMBER, const uint8_t *values, const uint8_t *factors, size_t column) {
    switch (NUMBER) {
    case NUMBER_FLOAT32: return v_load((const float *)values + column);
    case NUMBER_BFLOAT16: return v_load_bf16((const uint16_t *)values + column);
    case NUMBER_FLOAT16: return v_load_f16(values + 2 * column);
    case NUMBER_INT8: return v_mul(v_from_i(i_load_signed_bytes(values + column)), v_load_f16(factors + 2 * column));
    case NUMBER_UINT8: return v_mul(v_from_i(i_load_bytes(values + column)), v_load_f16(factors + 2 * column));
    case NUMBER_NONE: break;
    }
    return v_zero();
}

/* Widens the scales or offsets of 64 columns. */
INLINE void widen_numbers(int32_t number, const uint8_t *values, const uint8_t *factors, float *to) {
#define CASE(NUMBER)                                                 \
    case NUMBER:                                                     \
        for (size_t column = 0; column < GROUP_COLUMNS; column += LANES) \
            v_store(to + column, load_numbers(NUMBER, values, factors, column)); \
        break;
    switch ((enum number)number) {
        CASE(NUMBER_FLOAT32)
        CASE(NUMBER_BFLOAT16)
        CASE(NUMBER_FLOAT16)
        CASE(NUMBER_INT8)
        CASE(NUMBER_UINT8)
    case NUMBER_NONE: break;
    }
#undef CASE
}

/* Finds the blocks from `from` to `to` in the records of 64 columns. Places are counted up, since divisions take long beside the
 * products of a block. */
INLINE void open_piece(const struct quantized_format *f, enum numbers numbers, const uint8_t *columns, size_t from, size_t to,
                       struct piece *piece) {
    const size_t blocks = f->group / f->block, block_codes = codes_bytes(f, f->block);
    const size_t groups = f->groups_per_record, whole_record = record_bytes(f);
    size_t block = from % blocks, in_record = from / blocks % groups;
    const uint8_t *record = columns + from / blocks / groups * whole_record;
    struct widened_numbers *widened = piece->widened;
    piece->blocks = 0;
    for (; from < to; block = 0, widened++) {
        const struct quantized_group group = group_of_record(f, record, in_record);
        for (const uint8_t *line = group.scales; line < group.codes; line += 64) __builtin_prefetch(line + few_piece_bytes);
        if (numbers != HALVES) widen_numbers(f->scales, group.scales, group.scale_factors, widened->scales);
        if (numbers == WIDENED_OFFSETS) widen_numbers(f->offsets, group.offsets, group.offset_factors, widened->offsets);
        for (; block < blocks && from < to; block++, from++)
            piece->block[piece->blocks++] =
                (struct piece_block){group.codes + block * block_codes, group.scales, group.zeros, widened};
        if (++in_record == groups) {
            in_record = 0;
            record += whole_record;
        }
    }
}

/* Keeps the compiler from moving memory accesses past this place: it would gather the prefetches of a block at its start, and load
 * c of all rows at once, which leaves too few registers for the integer sums. */
#define IN_ORDER() __asm__ volatile("" : : : "memory")

/* The block of x in a row that begins m rows behind x. */
INLINE const struct quantized_block *row_block(const char *x, size_t ldx, int m) {
    return (const struct quantized_block *)(x + (size_t)m * ldx);
}

/* Loads the codes of four elements of k, of NU panels, and prefetches those that are `ahead` bytes behind them. */
INLINE void load_four(const int BITS, const int NU, const uint8_t *codes, size_t ahead, i16 w[4]) {
#pragma GCC unroll 4
    for (int u = 0; u < NU; u++) {
        if (BITS == 8) {
            w[u] = i_load(codes + u * 64);
            __builtin_prefetch(codes + ahead + u * 64);
        } else if (u % 2 == 0) {
            const uint8_t *pair = codes + pair_of_panels(BITS, u);
            i16 both = i_load(pair);
            __builtin_prefetch(pair + ahead);
            if (BITS > 4) __builtin_prefetch(pair + ahead + 64); /* a pair's bytes are in two lines, or in three with the next pair's */
            w[u] = i_low(both);
            w[u + 1] = i_high(both);
            if (BITS > 4) {
                const i16 further = i_load_further(BITS, pair + 64);
                w[u] = i_with_further(BITS, 0, w[u], further);
                w[u + 1] = i_with_further(BITS, 1, w[u + 1], further);
            }
        }
    }
}
