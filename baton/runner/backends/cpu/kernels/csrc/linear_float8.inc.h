/* Linear layers with weights in float8 (float8.h). Included once for each instruction set, after linear_float32.inc.h and the
 * instruction set's multiply_pairs and STEP_PAIRS. Where FLOAT8_FEW_ROWS is defined, so few rows take few_rows_float8.inc.h. */
#include "float8.h"

/* Widens a piece of k, of all 64 columns, to the layout of packed weights in the dtype, and prefetches the next piece. */
INLINE void widen_piece(const enum dtype dtype, void *to, const uint8_t *codes, size_t elements) {
    const size_t bytes = float8_codes_bytes(elements), ahead = bytes;
    for (size_t i = 0; i < bytes; i += CODES_AT_A_TIME) {
        __builtin_prefetch(codes + i + ahead);
        if (dtype == DTYPE_BFLOAT16) {
            v_widen_e4m3((uint16_t *)to + i, codes + i);
            continue;
        }
        uint16_t wide[CODES_AT_A_TIME];
        v_widen_e4m3(wide, codes + i);
        for (size_t half = 0; half < 2; half++) { /* each half is one pair of k of one panel */
            size_t pair = i / (2 * LANES) + half, panel = pair / STEP_PAIRS % GROUP_PANELS;
            size_t element = 2 * (pair / STEP_PAIRS / GROUP_PANELS * STEP_PAIRS + pair % STEP_PAIRS);
            float *rows = (float *)to + element * GROUP_COLUMNS + panel * LANES;
            v_store(rows, v_load_even(wide + half * 2 * LANES));
            v_store(rows + GROUP_COLUMNS, v_load_odd(wide + half * 2 * LANES));
        }
    }
}

/* totals[rows][64] = scales * sums, plus the totals if there are any yet. */
INLINE void add_scaled(size_t rows, const float *scales, const float *sums, float *totals, int continues) {
    v16 scale[GROUP_PANELS];
    for (int u = 0; u < GROUP_PANELS; u++) scale[u] = v_load(scales + u * LANES);
    for (size_t m = 0; m < rows; m++, sums += GROUP_COLUMNS, totals += GROUP_COLUMNS)
        for (int u = 0; u < GROUP_PANELS; u++) {
            v16 before = continues ? v_load(totals + u * LANES) : v_zero();
            v_store(totals + u * LANES, v_fma(scale[u], v_load(sums + u * LANES), before));
        }
}

/* totals[rows][64] = x times the records of one group of columns; widened: room for a piece, and behind it for rows of x. */
INLINE void rows_float8(const enum dtype dtype, const struct linear_call *call, size_t rows, const void *x, const uint8_t *at,
                        float *sums, float *totals, void *widened) {
    const size_t item = dtype == DTYPE_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    const size_t depth = (rows <= FEW_ROWS ? FEW_WIDENED_BYTES : MANY_WIDENED_BYTES) / (GROUP_COLUMNS * item);
    for (size_t start = 0, end; start < call->k; start = end) {
        const float *scales = (const float *)at;
        at += FLOAT8_SCALE_BYTES;
        end = call->k - start < call->scale_group ? call->k : start + call->scale_group;
        for (size_t from = start, count; from < end; from += count, at += float8_codes_bytes(count)) {
            count = end - from < depth ? end - from : depth;
            widen_piece(dtype, widened, at, count);
            if (dtype == DTYPE_FLOAT32)
                product_float32(rows, GROUP_PANELS, (const float *)x + from, call->x_stride, widened, LANES, GROUP_COLUMNS, count,
                                sums, GROUP_COLUMNS, from > start);
            else
                multiply_pairs(rows, (const uint16_t *)x + from, call->x_stride, widened, count / 2, sums,
                               (bf16_row *)((char *)widened + MANY_WIDENED_BYTES), from > start);
        }
        add_scaled(rows, scales, sums, totals, start > 0);
    }
}

#ifdef FLOAT8_FEW_ROWS
#include "few_rows_float8.inc.h"
#endif

INLINE void multiply_float8(const enum dtype dtype, const struct linear_call *call, size_t task, float *scratch) {
    struct linear_task part = linear_task(call, task);
    const size_t rows = part.end - part.row, item = dtype == DTYPE_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    const char *x = (const char *)call->x + part.row * call->x_stride * item;
    float *totals = scratch, *sums = totals + rows * GROUP_COLUMNS, *widened = sums + rows * GROUP_COLUMNS;
    for (size_t group = part.group; group < part.group_end; group++) {
        const uint8_t *columns = (const uint8_t *)call->packed + group * float8_columns_bytes(call->scale_group, call->k);
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, dtype, group);
        if (call->k == 0) memset(totals, 0, rows * GROUP_COLUMNS * sizeof *totals);
#ifdef FLOAT8_FEW_ROWS
        if (dtype == DTYPE_BFLOAT16 && rows <= FLOAT8_FEW_ROWS)
            few_rows_float8(call, rows, (const uint16_t *)x, columns, sums, totals, (bf16_row *)widened);
        else
#endif
            rows_float8(dtype, call, rows, x, columns, sums, totals, widened);
        add_adapters(dtype, call, group, part.row, rows, totals);
        store_sums(&epilogue, call->out, part.row, rows, totals);
    }
}

TARGET static void linear_float8_float32(const void *job, size_t task, void *scratch) {
    multiply_float8(DTYPE_FLOAT32, job, task, scratch);
}
TARGET static void linear_float8_bfloat16(const void *job, size_t task, void *scratch) {
    multiply_float8(DTYPE_BFLOAT16, job, task, scratch);
}
