/* Kernels of rows in several streams, and of rows that are measured by their own mean. Included after rows.inc.h. */

INLINE float number_of(const enum dtype dtype, const void *from, size_t index) {
    if (dtype == DTYPE_FLOAT32) return ((const float *)from)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[index] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE float rounded_number(const enum dtype dtype, float number) {
    float lanes[LANES];
    v_store(lanes, v_rounded(dtype, v_set1(number)));
    return lanes[0];
}

/* Adds to a row's streams a sum of all of them, one after the other; the sum is rounded, and then the streams. */
INLINE void mix_row(const enum dtype dtype, const struct streams_call *call, size_t row) {
    const size_t n = call->columns, streams = call->streams, from = row * call->x_stride, to = row * streams * n;
    for (size_t stream = 0; stream < streams; stream++) {
        const size_t factors = row * call->factors_stride + stream * streams;
        for (size_t i = 0; i < n; i += LANES) {
            const size_t count = lanes_left(i, n);
            v16 total = v_mul(load_lanes(dtype, call->x, from + i, count), v_set1(number_of(dtype, call->factors, factors)));
            for (size_t other = 1; other < streams; other++) {
                const v16 factor = v_set1(number_of(dtype, call->factors, factors + other));
                total = v_add(total, v_mul(load_lanes(dtype, call->x, from + other * n + i, count), factor));
            }
            const v16 own = load_lanes(dtype, call->x, from + stream * n + i, count);
            store_lanes(dtype, call->out, to + stream * n + i, count, v_add(v_rounded(dtype, total), own));
        }
    }
}

/* Adds to a row's streams the difference of the result and the active one, times a factor and 1, each step rounded. */
INLINE void correct_row(const enum dtype dtype, const struct streams_call *call, size_t row) {
    const size_t n = call->columns, streams = call->streams, from = row * call->x_stride, to = row * streams * n;
    for (size_t stream = 0; stream < streams; stream++) {
        const float factor = number_of(dtype, call->factors, row * call->factors_stride + stream) + 1.0f;
        const v16 by = v_rounded(dtype, v_set1(factor));
        for (size_t i = 0; i < n; i += LANES) {
            const size_t count = lanes_left(i, n);
            const v16 result = load_lanes(dtype, call->result, row * call->result_stride + i, count);
            const v16 predicted = load_lanes(dtype, call->x, from + call->active * n + i, count);
            const v16 difference = v_rounded(dtype, v_sub(result, predicted));
            const v16 own = load_lanes(dtype, call->x, from + stream * n + i, count);
            store_lanes(dtype, call->out, to + stream * n + i, count, v_add(v_rounded(dtype, v_mul(difference, by)), own));
        }
    }
}

INLINE void average_row(const enum dtype dtype, const struct streams_call *call, size_t row) {
    const size_t n = call->columns, from = row * call->x_stride;
    for (size_t i = 0; i < n; i += LANES) {
        const size_t count = lanes_left(i, n);
        v16 total = v_zero();
        for (size_t stream = 0; stream < call->streams; stream++)
            total = v_add(total, load_lanes(dtype, call->x, from + stream * n + i, count));
        store_lanes(dtype, call->out, row * n + i, count, v_div(total, v_set1((float)call->streams)));
    }
}

INLINE void streams_rows(const enum dtype dtype, const struct streams_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++) {
        if (call->kind == STREAMS_MIXED)
            mix_row(dtype, call, row);
        else if (call->kind == STREAMS_CORRECTED)
            correct_row(dtype, call, row);
        else
            average_row(dtype, call, row);
    }
}

TARGET static void streams_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    streams_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void streams_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    streams_rows(DTYPE_BFLOAT16, job, task);
}

/* The mean of a row's numbers, or of their squares, which are rounded before; it is not rounded itself. */
INLINE float mean_of_row(const int squared, const enum dtype dtype, const void *x, size_t from, size_t n) {
    v16 sums[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (size_t i = 0; i < n; i += 4 * LANES) /* four independent sums hide the latency of an addition */
        for (size_t j = 0; j < 4 && i + j * LANES < n; j++) {
            v16 value = load_lanes(dtype, x, from + i + j * LANES, lanes_left(i + j * LANES, n));
            if (squared) value = v_rounded(dtype, v_mul(value, value));
            sums[j] = v_add(value, sums[j]);
        }
    return v_total(v_add(v_add(sums[0], sums[1]), v_add(sums[2], sums[3]))) / (float)n;
}

/* The root of a row's mean square, which counts as `least` where it is less; each step is rounded. */
INLINE float size_of_row(const enum dtype dtype, const void *x, size_t from, size_t n, float least) {
    const float mean = rounded_number(dtype, mean_of_row(1, dtype, x, from, n));
    return rounded_number(dtype, sqrtf(mean < least ? least : mean));
}

INLINE void resize_rows(const enum dtype dtype, const struct resize_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    const size_t n = call->columns;
    for (; row < end; row++) {
        const size_t from = row * call->x_stride, to = row * call->out_stride;
        if (call->like == NULL) {
            store_lanes(dtype, call->out, to, 1, v_set1(mean_of_row(0, dtype, call->x, from, n)));
            continue;
        }
        const v16 size = v_set1(size_of_row(dtype, call->like, row * call->like_stride, n, 0.0f));
        const v16 own = v_set1(size_of_row(dtype, call->x, from, n, call->least));
        for (size_t i = 0; i < n; i += LANES) {
            const size_t count = lanes_left(i, n);
            const v16 sized = v_rounded(dtype, v_mul(load_lanes(dtype, call->x, from + i, count), size));
            store_lanes(dtype, call->out, to + i, count, v_div(sized, own));
        }
    }
}

TARGET static void resize_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    resize_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void resize_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    resize_rows(DTYPE_BFLOAT16, job, task);
}

INLINE void sparse_gate_rows(const enum dtype dtype, const struct sparse_gate_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    const size_t n = call->columns;
    const struct norm_call of_gate = {.n = n};
    for (; row < end; row++) {
        const size_t from = row * call->x_stride;
        const float mean = mean_of_row(0, dtype, call->x, from, n);
        const float squares = total_of(1, dtype, NORM_AROUND_MEAN, &of_gate, call->x, from, 0, v_set1(mean));
        const float above = call->deviations * sqrtf(squares / (float)n);
        const v16 cutoff = v_set1(mean + above);
        for (size_t i = 0; i < n; i += LANES) {
            const size_t count = lanes_left(i, n);
            const v16 gate = v_max(v_zero(), v_sub(load_lanes(dtype, call->x, from + i, count), cutoff)); /* NaN passes */
            const v16 up = load_lanes(dtype, call->x, from + n + i, count);
            store_lanes(dtype, call->out, row * n + i, count, v_mul(v_activate((enum activation)call->activation, gate), up));
        }
    }
}

TARGET static void sparse_gate_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    sparse_gate_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void sparse_gate_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    sparse_gate_rows(DTYPE_BFLOAT16, job, task);
}
