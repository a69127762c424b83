/* Products with quantized weights (quantized.h). Included once for each instruction set, after linear_float32.inc.h and the
 * vectors of integers; the includer defines the register tiles:
 * QUANTIZED_WIDE_ROWS rows by 4 panels, and QUANTIZED_TALL_ROWS rows by 2 panels, with their CASES; and QUANTIZED_UNROLLED, whether
 * there is code without a loop for a block of MAX_BLOCK elements, which takes long to compile. */
#include "quantized.h"

/* The length of a piece of k, whose weights stay in a cache while block after block of rows is multiplied with them: the
 * first-level cache while there are few rows, else the second-level cache. And how far ahead weights are prefetched. */
enum { FEW_PIECE_BYTES = 16 << 10, MANY_PIECE_BYTES = 64 << 10, CODES_AHEAD = FEW_PIECE_BYTES };

/* Quantizes a block of x; BLOCK: its length where the compiler knows it, else 0. */
INLINE void quantize_block(const enum dtype dtype, const size_t BLOCK, const struct quantized_format *f, const void *x, size_t index,
                           struct quantized_block *to) {
    const size_t block = BLOCK > 0 ? BLOCK : f->block, first = block < LANES ? block : LANES, second = block - first;
    v16 low = load_lanes(dtype, x, index, first), high = second > 0 ? load_lanes(dtype, x, index + first, second) : v_zero();
    int32_t bits = i_largest_magnitude(low, high);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    float scale = largest / 127.0f, sum = 0;
    int8_t codes[MAX_BLOCK] = {0};
    if (bits >= 0x7F800000) {
        scale = NAN; /* an infinity or NaN in x makes the whole row of the product NaN */
    } else if (scale > 0) {
        v16 shift = v_set1(ROUND_SHIFT);
        low = v_add(v_div(low, v_set1(scale)), shift);
        high = v_add(v_div(high, v_set1(scale)), shift);
        sum = v_total_of_integers(v_add(v_sub(low, shift), v_sub(high, shift)));
        i_store_codes(codes, low);
        i_store_codes(codes + LANES, high);
    }
    memcpy(to->codes, codes, block);
    to->scale = scale;
    to->weighted_sum = scale * sum;
    to->start = -f->zero * (int32_t)sum;
    to->minus_sum = -(int32_t)sum;
}

INLINE void quantize_rows(const enum dtype dtype, const struct quantize_call *call, size_t task) {
    const struct quantized_format *f = call->format;
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    char *to = (char *)call->out + row * quantized_row_bytes(f, call->k);
    for (; row < end; row++)
        for (size_t i = 0; i < call->k; i += f->block, to += quantized_block_bytes(f)) {
            struct quantized_block *block = (struct quantized_block *)to;
            if (f->block == MAX_BLOCK)
                quantize_block(dtype, MAX_BLOCK, f, call->x, row * call->x_stride + i, block);
            else
                quantize_block(dtype, 0, f, call->x, row * call->x_stride + i, block);
        }
}

TARGET static void quantize_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    quantize_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void quantize_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    quantize_rows(DTYPE_BFLOAT16, job, task);
}

/* 16 scales or offsets, from a column on; values and factors as struct quantized_group has them. */
INLINE v16 load_numbers(int32_t number, const uint8_t *values, const uint8_t *factors, size_t column) {
    switch ((enum number)number) {
    case NUMBER_FLOAT32: return v_load((const float *)values + column);
    case NUMBER_BFLOAT16: return v_load_bf16((const uint16_t *)values + column);
    case NUMBER_FLOAT16: return v_load_f16(values + 2 * column);
    case NUMBER_INT8: return v_mul(v_from_i(i_load_signed_bytes(values + column)), v_load_f16(factors + 2 * column));
    case NUMBER_UINT8: return v_mul(v_from_i(i_load_bytes(values + column)), v_load_f16(factors + 2 * column));
    case NUMBER_NONE: break;
    }
    return v_zero();
}

/* The block of x in a row that begins m rows behind x. */
INLINE const struct quantized_block *row_block(const char *x, size_t ldx, int m) {
    return (const struct quantized_block *)(x + (size_t)m * ldx);
}

/* Adds the products of four elements of k to sums[MM][NU]; `place` is that of their codes in a block of x. */
INLINE void multiply_four(const int BITS, const int MM, const int NU, const char *x, size_t ldx, const uint8_t *codes, size_t place,
                          i16 sums[12][4]) {
    i16 w[4];
#pragma GCC unroll 4
    for (int u = 0; u < NU; u++) {
        if (BITS == 8) {
            w[u] = i_load(codes + u * 64);
            __builtin_prefetch(codes + u * 64 + CODES_AHEAD);
        } else if (u % 2 == 0) {
            i16 both = i_load(codes + u * 32);
            __builtin_prefetch(codes + u * 32 + CODES_AHEAD);
            w[u] = i_low(both);
            w[u + 1] = i_high(both);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++) {
        int32_t four;
        memcpy(&four, row_block(x, ldx, m)->codes + place, sizeof four);
        i16 elements = i_set1(four);
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) sums[m][u] = i_dot(BITS, sums[m][u], w[u], elements);
    }
}

/* Adds the products of a block's codes to sums[MM][NU]. Nearly all formats have blocks of MAX_BLOCK elements. */
INLINE void multiply_codes(const int BITS, const int MM, const int NU, const char *x, size_t ldx, const uint8_t *codes, size_t block,
                           i16 sums[12][4]) {
    const size_t four_bytes = GROUP_COLUMNS * 4 * BITS / 8;
    if (QUANTIZED_UNROLLED && block == MAX_BLOCK) {
#pragma GCC unroll 8
        for (size_t place = 0; place < MAX_BLOCK; place += 4, codes += four_bytes)
            multiply_four(BITS, MM, NU, x, ldx, codes, place, sums);
        return;
    }
#pragma GCC unroll 1
    for (size_t place = 0; place < block; place += 4, codes += four_bytes)
        multiply_four(BITS, MM, NU, x, ldx, codes, place, sums);
}

INLINE void subtract_zeros(const int MM, const int NU, const char *x, size_t ldx, const i16 zero[4], i16 sums[12][4]) {
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) sums[m][u] = i_add_product(sums[m][u], zero[u], i_set1(row_block(x, ldx, m)->minus_sum));
}

/* Adds a block's share, which is in integers, to the float32 sums c[MM][NU * 16]. */
INLINE void add_block(const int OFFSETS, const int MM, const int NU, const char *x, size_t ldx, const v16 scale[4],
                      const v16 offset[4], i16 sums[12][4], float *c) {
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++) {
        const struct quantized_block *row = row_block(x, ldx, m);
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            float *sum = c + m * GROUP_COLUMNS + u * LANES;
            v16 total = v_fma(v_mul(scale[u], v_set1(row->scale)), v_from_i(sums[m][u]), v_load(sum));
            if (OFFSETS) total = v_fma(offset[u], v_set1(row->weighted_sum), total);
            v_store(sum, total);
        }
        /* This keeps the compiler from loading c of all rows first: there are registers for the integer sums, and not for c too. */
        __asm__ volatile("" : : : "memory");
    }
}

/* c[MM][NU * 16] (+)= the blocks of x from `from` to `to` times the columns from a panel on. x begins at that block, and has rows
 * of ldx bytes; `columns` are the records of the 64 columns. */
INLINE void tile_quantized(const int BITS, const int MM, const int NU, const struct quantized_format *f, const char *x, size_t ldx,
                           const uint8_t *columns, size_t panel, size_t from, size_t to, float *c) {
    const size_t blocks = f->group / f->block, block_codes = codes_bytes(f, f->block), first = panel * LANES;
    c += first;
    if (from == 0)
        for (int m = 0; m < MM; m++)
            for (int u = 0; u < NU; u++) v_store(c + m * GROUP_COLUMNS + u * LANES, v_zero());
    /* Divisions take long beside the products of a block, so places are counted up from here on. */
    const size_t groups = f->groups_per_record, whole_record = record_bytes(f);
    size_t block = from % blocks, in_record = from / blocks % groups;
    const uint8_t *record = columns + from / blocks / groups * whole_record;
    while (from < to) {
        const struct quantized_group group = group_of_record(f, record, in_record);
        const size_t left = blocks - block, end = to - from < left ? to : from + left;
        const uint8_t *codes = group.codes + block * block_codes + panel * 64 * BITS / 8;
        v16 scale[4], offset[4];
        i16 zero[4];
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            scale[u] = load_numbers(f->scales, group.scales, group.scale_factors, first + u * LANES);
            offset[u] = load_numbers(f->offsets, group.offsets, group.offset_factors, first + u * LANES);
            zero[u] = f->has_zeros ? i_load_bytes(group.zeros + first + u * LANES) : i_set1(0);
        }
        for (; from < end; from++, codes += block_codes, x += quantized_block_bytes(f)) {
            i16 sums[12][4];
#pragma GCC unroll 12
            for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
                for (int u = 0; u < NU; u++) sums[m][u] = i_set1(row_block(x, ldx, m)->start);
            multiply_codes(BITS, MM, NU, x, ldx, codes, f->block, sums);
            if (f->has_zeros) subtract_zeros(MM, NU, x, ldx, zero, sums);
            if (f->offsets != NUMBER_NONE)
                add_block(1, MM, NU, x, ldx, scale, offset, sums, c);
            else
                add_block(0, MM, NU, x, ldx, scale, offset, sums, c);
        }
        block = 0;
        if (++in_record == groups) {
            in_record = 0;
            record += whole_record;
        }
    }
}

/* c[rows][64] (+)= a piece of k, for all 64 columns. */
#define PRODUCT(BITS)                                                                                                              \
    TARGET static void product_##BITS##_bits(size_t rows, const struct quantized_format *f, const char *x, size_t ldx,             \
                                             const uint8_t *columns, size_t from, size_t to, float *c) {                           \
        while (rows > 0) {                                                                                                         \
            size_t block = block_rows(rows, QUANTIZED_TALL_ROWS);                                                                  \
            if (block <= QUANTIZED_WIDE_ROWS) {                                                                                    \
                switch (block) { QUANTIZED_WIDE_CASES(WIDE_##BITS) }                                                               \
            } else {                                                                                                               \
                for (size_t panel = 0; panel < GROUP_PANELS; panel += 2)                                                           \
                    switch (block) { QUANTIZED_TALL_CASES(TALL_##BITS) }                                                           \
            }                                                                                                                      \
            rows -= block;                                                                                                         \
            x += block * ldx;                                                                                                      \
            c += block * GROUP_COLUMNS;                                                                                            \
        }                                                                                                                          \
    }
#define WIDE_4(MM) case MM: tile_quantized(4, MM, 4, f, x, ldx, columns, 0, from, to, c); break;
#define TALL_4(MM) case MM: tile_quantized(4, MM, 2, f, x, ldx, columns, panel, from, to, c); break;
#define WIDE_8(MM) case MM: tile_quantized(8, MM, 4, f, x, ldx, columns, 0, from, to, c); break;
#define TALL_8(MM) case MM: tile_quantized(8, MM, 2, f, x, ldx, columns, panel, from, to, c); break;
PRODUCT(4)
PRODUCT(8)
#undef PRODUCT

INLINE void multiply_quantized(const enum dtype dtype, const struct linear_call *call, size_t task, float *sums) {
    const struct quantized_format *f = call->format;
    struct linear_task part = linear_task(call, task);
    size_t rows = part.end - part.row, blocks = call->k / f->block;
    size_t most = (rows <= FEW_ROWS ? FEW_PIECE_BYTES : MANY_PIECE_BYTES) / codes_bytes(f, f->block);
    size_t pieces = (blocks + most - 1) / most, depth = pieces > 0 ? (blocks + pieces - 1) / pieces : 0;
    const char *x = (const char *)call->x + part.row * call->x_stride;
    for (size_t group = part.group; group < part.group_end; group++) {
        const uint8_t *columns = (const uint8_t *)call->packed + group * quantized_columns_bytes(f, call->k);
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, dtype, group);
        if (blocks == 0) memset(sums, 0, rows * GROUP_COLUMNS * sizeof *sums);
        for (size_t from = 0, to; from < blocks; from = to) {
            const char *piece = x + from * quantized_block_bytes(f);
            to = blocks - from < depth ? blocks : from + depth;
            if (f->bits == 4)
                product_4_bits(rows, f, piece, call->x_stride, columns, from, to, sums);
            else
                product_8_bits(rows, f, piece, call->x_stride, columns, from, to, sums);
        }
        store_sums(&epilogue, call->out, part.row, rows, sums);
    }
}

TARGET static void quantized_linear_float32(const void *job, size_t task, void *scratch) {
    multiply_quantized(DTYPE_FLOAT32, job, task, scratch);
}
TARGET static void quantized_linear_bfloat16(const void *job, size_t task, void *scratch) {
    multiply_quantized(DTYPE_BFLOAT16, job, task, scratch);
}
