/* Packs quantized weights, and reads rows of packed ones as floats; quantized.h has the layout. */
#include "quantized.h"

#include <math.h>
#include <string.h>

/* The bytes of a packed weight with this number of columns, and of a row of x that was quantized for it. */
size_t baton_quantized_size(const struct quantized_format *format, size_t columns, size_t k) {
    return (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS * quantized_columns_bytes(format, k);
}
size_t baton_quantized_row_bytes(const struct quantized_format *format, size_t k) { return quantized_row_bytes(format, k); }

/* Copies the value of a row at an index to a column. */
static void place(uint8_t *to, size_t column, const uint8_t *values, size_t index, size_t size) {
    memcpy(to + column * size, values + index * size, size);
}

/* Where the codes of a column are in a step of 4 elements: the places of its first one. */
struct column_codes {
    uint8_t *low;        /* its byte, or the half of it that `shift` says */
    int shift, mask;
    uint8_t *further[2]; /* of each bit above the fourth the 8 bytes of its panel */
    size_t further_at;   /* which of their bits */
};

static struct column_codes column_codes(const struct quantized_format *f, uint8_t *step, size_t column) {
    size_t panel = column / LANES, lane = column % LANES;
    if (f->bits == 8) return (struct column_codes){.low = step + panel * 64 + lane * 4, .mask = 255};
    uint8_t *pair = step + pair_of_panels(f->bits, panel);
    return (struct column_codes){
        .low = pair + lane * 4,
        .shift = panel % 2 == 1 ? 4 : 0,
        .mask = 15,
        .further = {pair + further_bits(4, panel), pair + further_bits(5, panel)},
        .further_at = lane * 4,
    };
}

static void pack_codes(const struct quantized_format *f, uint8_t *packed, size_t column, const uint8_t *codes) {
    for (size_t i = 0; i < f->group; i++) {
        struct column_codes to = column_codes(f, packed + i / 4 * codes_bytes(f, 4), column);
        to.low[i % 4] = (uint8_t)(to.low[i % 4] | (codes[i] & to.mask) << to.shift);
        for (size_t bit = 4, at = to.further_at + i % 4; bit < f->bits && f->bits < 8; bit++) {
            uint8_t *byte = to.further[bit - 4] + at / 8;
            *byte = (uint8_t)(*byte | (codes[i] >> bit & 1) << at % 8);
        }
    }
}

static int code_at(const struct quantized_format *f, uint8_t *packed, size_t column, size_t i) {
    struct column_codes from = column_codes(f, packed + i / 4 * codes_bytes(f, 4), column);
    int code = from.low[i % 4] >> from.shift & from.mask;
    for (size_t bit = 4, at = from.further_at + i % 4; bit < f->bits && f->bits < 8; bit++)
        code |= (from.further[bit - 4][at / 8] >> at % 8 & 1) << bit;
    return code;
}

/* Writes the rows of a weight to packed columns, beginning at column first; each 16 rows go spread panels behind the 16 before
 * them. The caller passes packed zeroed. */
void baton_pack_quantized(const struct quantized_format *f, const struct quantized_parts *from, void *packed, size_t n, size_t k,
                          size_t first, size_t spread) {
    size_t groups = k / f->group;
    for (size_t row = 0; row < n; row += LANES)
        for (size_t g = 0; g < groups; g++) /* 16 rows at a time, so that what is written is still in a cache */
            for (size_t r = row; r < row + LANES && r < n; r++) {
                size_t column = first + row * spread + (r - row), within = column % GROUP_COLUMNS, index = r * groups + g;
                const uint8_t *columns = (const uint8_t *)packed + column / GROUP_COLUMNS * quantized_columns_bytes(f, k);
                struct quantized_group to = quantized_group(f, columns, g);
                if (to.scale_factors != NULL) place(to.scale_factors, within, from->scale_factors, index / f->groups_per_record, 2);
                if (to.offset_factors != NULL) place(to.offset_factors, within, from->offset_factors, index / f->groups_per_record, 2);
                place(to.scales, within, from->scales, index, number_bytes(f->scales));
                if (to.offsets != NULL) place(to.offsets, within, from->offsets, index, number_bytes(f->offsets));
                if (to.zeros != NULL) place(to.zeros, within, from->zeros, index, 1);
                pack_codes(f, to.codes, within, from->codes + r * k + g * f->group);
            }
}

static float from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static float from_half(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    float magnitude = (half & 0x7C00) == 0x7C00 ? from_bits(0x7F800000 | (uint32_t)(half & 0x3FF) << 13)
                                                : ldexpf((float)((half & 0x3FF) | ((half & 0x7C00) != 0 ? 0x400 : 0)),
                                                         ((half & 0x7C00) != 0 ? half >> 10 & 31 : 1) - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

static float number_at(int32_t number, const uint8_t *values, const uint8_t *factors, size_t column) {
    uint32_t bits = 0;
    switch ((enum number)number) {
    case NUMBER_FLOAT32: memcpy(&bits, values + 4 * column, 4); return from_bits(bits);
    case NUMBER_BFLOAT16: return from_bits((uint32_t)values[2 * column] << 16 | (uint32_t)values[2 * column + 1] << 24);
    case NUMBER_FLOAT16: return from_half(values + 2 * column);
    case NUMBER_INT8: return (float)(int8_t)values[column] * from_half(factors + 2 * column);
    case NUMBER_UINT8: return (float)values[column] * from_half(factors + 2 * column);
    case NUMBER_NONE: break;
    }
    return 0;
}

struct dequantize_call {
    const struct quantized_format *format;
    const uint8_t *packed;
    const int64_t *index;
    void *out;
    size_t k;
    int dtype;
};

static void dequantize_row(const void *job, size_t task, void *scratch) {
    const struct dequantize_call *call = job;
    const struct quantized_format *f = call->format;
    size_t column = (size_t)call->index[task], within = column % GROUP_COLUMNS;
    const uint8_t *columns = call->packed + column / GROUP_COLUMNS * quantized_columns_bytes(f, call->k);
    (void)scratch;
    for (size_t g = 0; g < call->k / f->group; g++) {
        struct quantized_group group = quantized_group(f, columns, g);
        float scale = number_at(f->scales, group.scales, group.scale_factors, within);
        float offset = number_at(f->offsets, group.offsets, group.offset_factors, within);
        int zero = group.zeros != NULL ? group.zeros[within] : f->zero;
        for (size_t i = 0; i < f->group; i++) {
            float value = (float)(code_at(f, group.codes, within, i) - zero) * scale;
            if (f->offsets != NUMBER_NONE) value = value + offset;
            store_number((enum dtype)call->dtype, call->out, task * call->k + g * f->group + i, value);
        }
    }
}

/* Writes row index[i] of a weight that is not gated to row i of out, as floats of the dtype. */
int baton_dequantize_rows(int dtype, const struct quantized_format *format, const void *packed, const int64_t *index, void *out,
                          size_t rows, size_t n, size_t k, int n_threads) {
    struct dequantize_call call = {.format = format, .packed = packed, .index = index, .out = out, .k = k, .dtype = dtype};
    for (size_t i = 0; i < rows; i++)
        if (index[i] < 0 || (size_t)index[i] >= n) return STATUS_BAD_INDEX;
    struct work work = {.function = dequantize_row, .job = &call, .n_tasks = rows};
    return run_works(&work, 1, rows < 32 ? 1 : n_threads, NULL);
}
