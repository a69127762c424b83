/* Kernels that treat each row alone: root mean square norm, gates, products of rows and rotary positions. Included after functions.inc.h. */

/* What x is multiplied by to be gated. */
INLINE v16 activated(const enum dtype dtype, const struct norm_call *call, size_t gate, size_t count) {
    v16 by = load_lanes(dtype, call->gate, gate, count);
    return v_times_sigmoid(call->has_sigmoid_gate ? v_set1(1.0f) : by, by);
}

INLINE void norm_row(const enum dtype dtype, const int gate_first, const struct norm_call *call, size_t from, size_t gate, size_t weights,
                     size_t to) {
    const size_t n = call->n;
    const void *x = call->x;
    if (call->residual != NULL) {
        for (size_t i = 0; i < n; i += LANES) {
            size_t count = lanes_left(i, n);
            v16 sum = v_add(load_lanes(dtype, x, from + i, count), load_lanes(dtype, call->residual, to + i, count));
            store_lanes(dtype, call->sum, to + i, count, sum);
        }
        x = call->sum;
        from = to;
    }
    v16 squares[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (size_t i = 0; i < n; i += 4 * LANES) /* four independent sums hide the latency of an addition */
        for (size_t j = 0; j < 4 && i + j * LANES < n; j++) {
            size_t at = i + j * LANES, count = lanes_left(at, n);
            v16 value = load_lanes(dtype, x, from + at, count);
            if (gate_first) value = v_mul(value, activated(dtype, call, gate + at, count));
            squares[j] = v_fma(value, value, squares[j]);
        }
    float total = v_total(v_add(v_add(squares[0], squares[1]), v_add(squares[2], squares[3])));
    v16 factor = v_set1(1.0f / sqrtf(total / (float)n + call->eps));
    for (size_t i = 0; i < n; i += LANES) {
        size_t count = lanes_left(i, n);
        v16 value = load_lanes(dtype, x, from + i, count);
        v16 weight = load_lanes(dtype, call->weight, weights + i, count);
        if (gate_first) value = v_mul(value, activated(dtype, call, gate + i, count));
        v16 normal = v_mul(value, factor);
        if (gate_first)
            normal = v_mul(normal, weight);
        else if (call->gate != NULL)
            normal = v_mul(v_mul(normal, weight), activated(dtype, call, gate + i, count));
        else if (call->plus_one)
            normal = v_mul(normal, v_add(v_set1(1.0f), weight));
        else
            normal = v_mul(v_rounded(dtype, normal), weight);
        store_lanes(dtype, call->out, to + i, count, normal);
    }
}

INLINE void norm_rows(const enum dtype dtype, const struct norm_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++)
        for (size_t column = 0; column < call->columns; column++) {
            size_t from = row * call->stride[0] + column * call->stride[1], gate = row * call->gate_stride[0] + column * call->gate_stride[1];
            size_t weights = column * call->weight_stride, to = (row * call->columns + column) * call->n;
            if (call->gate_first)
                norm_row(dtype, 1, call, from, gate, weights, to);
            else
                norm_row(dtype, 0, call, from, gate, weights, to);
        }
}

TARGET static void rms_norm_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    norm_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void rms_norm_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    norm_rows(DTYPE_BFLOAT16, job, task);
}

INLINE void gate_rows(const enum dtype dtype, const struct gate_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++)
        for (size_t i = 0; i < call->columns; i += LANES) {
            const size_t count = lanes_left(i, call->columns);
            v16 x = load_lanes(dtype, call->x, row * call->x_stride + i, count);
            if (call->bias != NULL) x = v_add(x, load_lanes(DTYPE_FLOAT32, call->bias, i, count));
            if (call->scale != NULL) x = v_mul(x, load_lanes(DTYPE_FLOAT32, call->scale, i, count));
            x = call->is_sigmoid ? v_times_sigmoid(v_set1(1.0f), x) : v_softplus(x);
            x = v_min(v_set1(call->high), v_max(v_set1(call->low), x));
            if (call->factor != NULL) x = v_mul(x, load_lanes(DTYPE_FLOAT32, call->factor, i, count));
            store_lanes(DTYPE_FLOAT32, call->out, row * call->out_stride + i, count, x);
        }
}

TARGET static void gate_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    gate_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void gate_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    gate_rows(DTYPE_BFLOAT16, job, task);
}

INLINE void multiply_rows(const enum dtype dtype, const struct multiply_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++)
        for (size_t i = 0; i < call->columns; i += LANES) {
            const size_t count = lanes_left(i, call->columns);
            v16 x = load_lanes(dtype, call->x, row * call->x_stride + i, count);
            v16 by = load_lanes(dtype, call->by, row * call->by_stride + i, count);
            if (call->multiplier == MULTIPLIER_SIGMOID)
                x = v_times_sigmoid(x, by);
            else
                x = v_mul(x, call->multiplier == MULTIPLIER_SOFTPLUS ? v_softplus(by) : by);
            store_lanes(dtype, call->out, row * call->columns + i, count, x);
        }
}

TARGET static void multiply_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    multiply_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void multiply_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    multiply_rows(DTYPE_BFLOAT16, job, task);
}

/* Pairs of numbers, rotated by the angles with these cosines and sines. */
struct turned {
    v16 first, second;
};
INLINE struct turned turn(v16 first, v16 second, v16 cosine, v16 sine) {
    return (struct turned){v_sub(v_mul(first, cosine), v_mul(second, sine)), v_add(v_mul(second, cosine), v_mul(first, sine))};
}

/* Rotates LANES pairs of neighbours at most, from an element of x on. */
INLINE void rotate_neighbours(const enum dtype dtype, void *x, size_t from, size_t count, v16 cosine, v16 sine) {
    const size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2;
    uint32_t parts[2][LANES] = {{0}, {0}};
    char *numbers = (char *)x + from * size;
    for (size_t i = 0; i < 2 * count; i++) memcpy((char *)parts[i % 2] + i / 2 * size, numbers + i * size, size);
    struct turned turned = turn(load_lanes(dtype, parts[0], 0, LANES), load_lanes(dtype, parts[1], 0, LANES), cosine, sine);
    store_lanes(dtype, parts[0], 0, LANES, turned.first);
    store_lanes(dtype, parts[1], 0, LANES, turned.second);
    for (size_t i = 0; i < 2 * count; i++) memcpy(numbers + i * size, (char *)parts[i % 2] + i / 2 * size, size);
}

INLINE void rotate_head(const enum dtype dtype, const enum dtype angle_dtype, const struct rotate_call *call, size_t row, size_t angles) {
    const size_t half = call->half;
    for (size_t i = 0; i < half; i += LANES) {
        size_t count = lanes_left(i, half);
        v16 cosine = load_lanes(angle_dtype, call->cos, angles + i, count), sine = load_lanes(angle_dtype, call->sin, angles + i, count);
        if (call->in_pairs) {
            rotate_neighbours(dtype, call->x, row + 2 * i, count, cosine, sine);
            continue;
        }
        v16 first = load_lanes(dtype, call->x, row + i, count), second = load_lanes(dtype, call->x, row + half + i, count);
        struct turned turned = turn(first, second, cosine, sine);
        store_lanes(dtype, call->x, row + i, count, turned.first);
        store_lanes(dtype, call->x, row + half + i, count, turned.second);
    }
}

INLINE void rotate_rows(const enum dtype dtype, const struct rotate_call *call, size_t task) {
    size_t token = task * call->tokens_per_task;
    size_t end = token + call->tokens_per_task < call->tokens ? token + call->tokens_per_task : call->tokens;
    for (; token < end; token++)
        for (size_t head = 0; head < call->heads; head++) {
            size_t row = token * call->token_stride + head * call->head_stride, angles = token * call->angle_stride;
            if (call->angle_dtype == DTYPE_FLOAT32)
                rotate_head(dtype, DTYPE_FLOAT32, call, row, angles);
            else
                rotate_head(dtype, DTYPE_BFLOAT16, call, row, angles);
        }
}

TARGET static void rotate_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    rotate_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void rotate_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    rotate_rows(DTYPE_BFLOAT16, job, task);
}
