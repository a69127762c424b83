/* Packs weights in float8, and reads rows of packed ones as floats; float8.h has the layout. */
#include "float8.h"
#include "vector_portable.h"

/* The bytes of a packed weight with this number of columns; k is padded. */
size_t baton_float8_size(size_t scale_group, size_t columns, size_t k) {
    return (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS * float8_columns_bytes(scale_group, k);
}

/* Where the codes of the elements i and i + 1 of a scale group are, from the scale group's first code on, for lane 0 of a panel; i
 * is even. step: elements of k in a step of bfloat16. */
static size_t panel_pair(size_t panel, size_t i, size_t step) {
    size_t element = i / step * step * GROUP_COLUMNS + panel * step * LANES + i % step * LANES;
    return element / CODES_AT_A_TIME * CODES_AT_A_TIME + element % CODES_AT_A_TIME / 4;
}

/* How much further those of another lane are. */
static size_t lane_offset(size_t lane) { return lane / 4 * 16 + lane % 4 * 2; }

/* Writes the rows of a weight [n, k], with scales [n, scale groups], to packed columns, beginning at column first; each 16 rows go
 * spread panels behind the 16 before them. The caller passes packed zeroed. */
void baton_pack_float8(int isa, size_t scale_group, const uint8_t *codes, const float *scales, uint8_t *packed, size_t n, size_t k,
                       size_t padded, size_t first, size_t spread) {
    size_t step = 2 * isas[isa]->step_pairs, groups = (k + scale_group - 1) / scale_group;
    size_t columns_bytes = float8_columns_bytes(scale_group, padded);
    for (size_t row = 0; row < n; row += LANES)
        for (size_t g = 0; g < groups; g++) { /* 16 rows at a time, so that what is written is still in a cache */
            size_t from = g * scale_group, count = k - from < scale_group ? k - from : scale_group;
            for (size_t r = row; r < row + LANES && r < n; r++) {
                size_t column = first + row * spread + (r - row), within = column % GROUP_COLUMNS;
                uint8_t *to = packed + column / GROUP_COLUMNS * columns_bytes + float8_group_offset(scale_group, g);
                memcpy(to + within * sizeof(float), &scales[r * groups + g], sizeof(float));
                to += FLOAT8_SCALE_BYTES + lane_offset(within % LANES);
                const uint8_t *own = codes + r * k + from;
                for (size_t i = 0; i < count; i += 2)
                    memcpy(to + panel_pair(within / LANES, i, step), own + i, count - i < 2 ? 1 : 2);
            }
        }
}

struct float8_rows_call {
    const uint8_t *packed;
    const int64_t *index;
    void *out;
    size_t scale_group, k, padded, step;
    int dtype;
};

static void float8_row(const void *job, size_t task, void *scratch) {
    const struct float8_rows_call *call = job;
    size_t column = (size_t)call->index[task], within = column % GROUP_COLUMNS;
    const uint8_t *columns = call->packed + column / GROUP_COLUMNS * float8_columns_bytes(call->scale_group, call->padded);
    (void)scratch;
    for (size_t i = 0; i < call->k; i++) {
        size_t in_group = i % call->scale_group;
        const uint8_t *group = columns + float8_group_offset(call->scale_group, i / call->scale_group);
        const uint8_t *codes = group + FLOAT8_SCALE_BYTES + lane_offset(within % LANES);
        float scale, value;
        memcpy(&scale, group + within * sizeof(float), sizeof scale);
        value = of_e4m3(codes[panel_pair(within / LANES, in_group / 2 * 2, call->step) + in_group % 2]) * scale;
        store_number((enum dtype)call->dtype, call->out, task * call->k + i, value);
    }
}

/* Writes row index[i] of a weight that is not gated to row i of out, as floats of the dtype. */
int baton_float8_rows(int isa, int dtype, size_t scale_group, const void *packed, const int64_t *index, void *out, size_t rows,
                      size_t n, size_t k, size_t padded, int n_threads) {
    struct float8_rows_call call = {.packed = packed, .index = index, .out = out, .scale_group = scale_group, .k = k,
                                    .padded = padded, .step = 2 * isas[isa]->step_pairs, .dtype = dtype};
    for (size_t i = 0; i < rows; i++)
        if (index[i] < 0 || (size_t)index[i] >= n) return STATUS_BAD_INDEX;
    struct work work = {.function = float8_row, .job = &call, .n_tasks = rows};
    return run_works(&work, 1, rows < 32 ? 1 : n_threads, NULL);
}
