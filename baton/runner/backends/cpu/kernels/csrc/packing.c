/* Packs weights, and reads rows of packed weights. */
#include "kernels.h"

#include <string.h>

/* The padded k of a packed weight; rows of x are padded with zeros to the same width. */
size_t baton_padded_k(int dtype, size_t k) {
    return dtype == DTYPE_FLOAT32 ? k : (k + BF16_K_MULTIPLE - 1) / BF16_K_MULTIPLE * BF16_K_MULTIPLE;
}

/* The number of elements in a packed weight with this number of columns. */
size_t baton_packed_size(int dtype, size_t columns, size_t k) {
    return (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS * GROUP_COLUMNS * baton_padded_k(dtype, k);
}

/* The index of a packed column's first element. step: elements of k in a step of bfloat16. */
static size_t column_start(int dtype, size_t column, size_t padded, size_t step) {
    size_t group = column / GROUP_COLUMNS * GROUP_COLUMNS * padded, within = column % GROUP_COLUMNS;
    if (dtype == DTYPE_FLOAT32) return group + within;
    return group + within / LANES * step * LANES + within % LANES * 2;
}

/* The offset from there to the pair that begins with element i of a bfloat16 column. */
static size_t pair_offset(size_t i, size_t step) { return i / step * step * GROUP_COLUMNS + i % step * LANES; }

/* Writes the rows of a weight [n, k] to packed columns, beginning at column first; each 16 rows go spread panels behind the 16
 * before them. The caller passes packed zeroed. */
void baton_pack(int isa, int dtype, const void *weight, void *packed, size_t n, size_t k, size_t first, size_t spread) {
    size_t padded = baton_padded_k(dtype, k), step = 2 * isas[isa]->step_pairs, starts[LANES];
    for (size_t row = 0; row < n; row += LANES) {
        size_t used = n - row < LANES ? n - row : LANES; /* 16 rows at a time: they are read side by side and written in order */
        for (size_t lane = 0; lane < used; lane++)
            starts[lane] = column_start(dtype, first + row * spread + lane, padded, step);
        if (dtype == DTYPE_FLOAT32) {
            const float *from = (const float *)weight + row * k;
            for (size_t i = 0; i < k; i++)
                for (size_t lane = 0; lane < used; lane++)
                    ((float *)packed)[starts[lane] + i * GROUP_COLUMNS] = from[lane * k + i];
        } else {
            const uint16_t *from = (const uint16_t *)weight + row * k;
            for (size_t i = 0; i < k; i += 2)
                for (size_t lane = 0; lane < used; lane++) {
                    uint16_t *to = (uint16_t *)packed + starts[lane] + pair_offset(i, step);
                    to[0] = from[lane * k + i];
                    if (i + 1 < k) to[1] = from[lane * k + i + 1];
                }
        }
    }
}

struct take_call {
    const void *packed;
    const int64_t *index;
    void *out;
    size_t k, step;
    int dtype;
};

static void take_row(const void *job, size_t task, void *scratch) {
    const struct take_call *call = job;
    size_t k = call->k, step = call->step;
    size_t start = column_start(call->dtype, (size_t)call->index[task], baton_padded_k(call->dtype, k), step);
    (void)scratch;
    if (call->dtype == DTYPE_FLOAT32) {
        const float *from = (const float *)call->packed + start;
        float *to = (float *)call->out + task * k;
        for (size_t i = 0; i < k; i++) to[i] = from[i * GROUP_COLUMNS];
    } else {
        const uint16_t *from = (const uint16_t *)call->packed + start;
        uint16_t *to = (uint16_t *)call->out + task * k;
        for (size_t i = 0; i + 1 < k; i += 2) memcpy(to + i, from + pair_offset(i, step), 4);
        if (k % 2 != 0) to[k - 1] = from[pair_offset(k - 1, step)];
    }
}

/* Copies row index[i] of a weight that is not gated to row i of out. */
int baton_take_rows(int isa, int dtype, const void *packed, const int64_t *index, void *out, size_t rows, size_t n, size_t k,
                    int n_threads) {
    size_t step = 2 * isas[isa]->step_pairs;
    struct take_call call = {.packed = packed, .index = index, .out = out, .k = k, .step = step, .dtype = dtype};
    for (size_t i = 0; i < rows; i++)
        if (index[i] < 0 || (size_t)index[i] >= n) return STATUS_BAD_INDEX;
    struct work work = {.function = take_row, .job = &call, .n_tasks = rows};
    return run_works(&work, 1, rows < 32 ? 1 : n_threads, NULL);
}
