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

/* Where a code is: its byte, or the half of it that `shift` says; and of 5 and 6 bits those above the fourth. */
struct code_place {
    uint8_t *low, *further;
    int shift, mask, further_shift, further_mask;
};

static struct code_place code_place(const struct quantized_format *f, uint8_t *packed, size_t column, size_t element) {
    uint8_t *step = packed + element / 4 * codes_bytes(f, 4);
    size_t panel = column / LANES, at = column % LANES * 4 + element % 4;
    if (f->bits == 8) return (struct code_place){.low = step + panel * 64 + at, .mask = 255};
    uint8_t *pair = step + pair_of_panels(f->bits, panel);
    size_t more = f->bits - 4, bytes = 16 * more;
    struct code_place place = {.low = pair + at, .shift = panel % 2 == 1 ? 4 : 0, .mask = 15};
    if (more > 0) {
        place.further = pair + 64 + at % bytes;
        place.further_shift = (int)(panel % 2 * 4 + at / bytes * more);
        place.further_mask = (1 << more) - 1;
    }
    return place;
}

static void pack_codes(const struct quantized_format *f, uint8_t *packed, size_t column, const uint8_t *codes) {
    for (size_t i = 0; i < f->group; i++) {
        struct code_place to = code_place(f, packed, column, i);
        *to.low = (uint8_t)(*to.low | (codes[i] & to.mask) << to.shift);
        if (to.further != NULL) *to.further = (uint8_t)(*to.further | (codes[i] >> 4 & to.further_mask) << to.further_shift);
    }
}

static int code_at(const struct quantized_format *f, uint8_t *packed, size_t column, size_t element) {
    struct code_place from = code_place(f, packed, column, element);
    int code = *from.low >> from.shift & from.mask;
    return from.further == NULL ? code : code | (*from.further >> from.further_shift & from.further_mask) << 4;
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
