/* Kernels that treat each row alone: norms, gates, products and sums of rows, activations and rotary positions. Included after functions.inc.h. */

/* Kinds of norms apart, so that the usual one pays for nothing that others need. */
enum norm_kind { NORM_AROUND_ZERO, NORM_AROUND_MEAN, NORM_OF_GATED };

/* What x is multiplied by to be gated. */
INLINE v16 activated(const enum dtype dtype, const struct norm_call *call, size_t gate, size_t count) {
    v16 by = load_lanes(dtype, call->gate, gate, count);
    return v_times_sigmoid(call->has_sigmoid_gate ? v_set1(1.0f) : by, by);
}

/* Up to 16 numbers of what a norm is of: of x, which is gated first, or less a mean; the other lanes are zero. */
INLINE v16 load_normed(const enum dtype dtype, const enum norm_kind kind, const struct norm_call *call, const void *x, size_t from,
                       size_t gate, size_t count, v16 mean) {
    float part[LANES];
    v16 v = load_lanes(dtype, x, from, count);
    if (kind == NORM_OF_GATED) return v_mul(v, activated(dtype, call, gate, count));
    if (kind == NORM_AROUND_ZERO) return v;
    v = v_sub(v, mean);
    if (count == LANES) return v;
    v_store(part, v);
    return load_lanes(DTYPE_FLOAT32, part, 0, count);
}

/* The sum of what a norm is of, or of its squares. */
INLINE float total_of(const int squared, const enum dtype dtype, const enum norm_kind kind, const struct norm_call *call, const void *x,
                      size_t from, size_t gate, v16 mean) {
    const size_t n = call->n;
    v16 sums[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (size_t i = 0; i < n; i += 4 * LANES) /* four independent sums hide the latency of an addition */
        for (size_t j = 0; j < 4 && i + j * LANES < n; j++) {
            const size_t at = i + j * LANES;
            v16 value = load_normed(dtype, kind, call, x, from + at, gate + at, lanes_left(at, n), mean);
            sums[j] = squared ? v_fma(value, value, sums[j]) : v_add(value, sums[j]);
        }
    return v_total(v_add(v_add(sums[0], sums[1]), v_add(sums[2], sums[3])));
}

INLINE void norm_row(const enum dtype dtype, const enum norm_kind kind, const struct norm_call *call, size_t from, size_t gate,
                     size_t weights, size_t to) {
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
    v16 mean = v_zero();
    if (kind == NORM_AROUND_MEAN) mean = v_set1(total_of(0, dtype, NORM_AROUND_ZERO, call, x, from, gate, mean) / (float)n);
    v16 factor = v_set1(1.0f / sqrtf(total_of(1, dtype, kind, call, x, from, gate, mean) / (float)n + call->eps));
    for (size_t i = 0; i < n; i += LANES) {
        size_t count = lanes_left(i, n);
        v16 normal = v_mul(load_normed(dtype, kind, call, x, from + i, gate + i, count, mean), factor);
        v16 weight = load_lanes(dtype, call->weight, weights + i, count);
        if (kind == NORM_OF_GATED)
            normal = v_mul(normal, weight);
        else if (call->gate != NULL)
            normal = v_mul(v_mul(normal, weight), activated(dtype, call, gate + i, count));
        else if (kind == NORM_AROUND_MEAN)
            normal = v_fma(normal, weight, call->bias == NULL ? v_zero() : load_lanes(dtype, call->bias, i, count));
        else if (call->plus_one)
            normal = v_mul(normal, v_add(v_set1(1.0f), weight));
        else
            normal = v_mul(v_rounded(dtype, normal), weight);
        store_lanes(dtype, call->out, to + i, count, normal);
    }
}

INLINE void norm_rows(const enum dtype dtype, const enum norm_kind kind, const struct norm_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++)
        for (size_t column = 0; column < call->columns; column++)
            norm_row(dtype, kind, call, row * call->stride[0] + column * call->stride[1],
                     row * call->gate_stride[0] + column * call->gate_stride[1], column * call->weight_stride,
                     (row * call->columns + column) * call->n);
}

INLINE void norm_rows_of_kind(const enum dtype dtype, const struct norm_call *call, size_t task) {
    if (call->gate_first)
        norm_rows(dtype, NORM_OF_GATED, call, task);
    else if (call->around_mean)
        norm_rows(dtype, NORM_AROUND_MEAN, call, task);
    else
        norm_rows(dtype, NORM_AROUND_ZERO, call, task);
}

TARGET static void rms_norm_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    norm_rows_of_kind(DTYPE_FLOAT32, job, task);
}
TARGET static void rms_norm_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    norm_rows_of_kind(DTYPE_BFLOAT16, job, task);
}

INLINE void gate_rows(const enum dtype dtype, const struct gate_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++)
        for (size_t i = 0; i < call->columns; i += LANES) {
            const size_t count = lanes_left(i, call->columns);
            if (call->function == GATE_NARROWED) {
                v16 wide = load_lanes(DTYPE_FLOAT32, call->x, row * call->x_stride + i, count);
                store_lanes(dtype, call->out, row * call->out_stride + i, count, wide);
                continue;
            }
            v16 x = load_lanes(dtype, call->x, row * call->x_stride + i, count);
            if (call->bias != NULL) x = v_add(x, load_lanes(DTYPE_FLOAT32, call->bias, i, count));
            if (call->scale != NULL) x = v_mul(x, load_lanes(DTYPE_FLOAT32, call->scale, i, count));
            if (call->function == GATE_SIGMOID) x = v_times_sigmoid(v_set1(1.0f), x);
            if (call->function == GATE_SOFTPLUS) x = v_softplus(x);
            if (call->function != GATE_PLAIN) x = v_min(v_set1(call->high), v_max(v_set1(call->low), x));
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

/* x * multiplier(by) for up to 16 columns of a row from a column on; broadcast: the first number of by is for all of them. */
INLINE void multiply_lanes(const enum dtype dtype, const int broadcast, const struct multiply_call *call, size_t row, size_t column,
                           size_t count, size_t by_column) {
    v16 x = load_lanes(dtype, call->x, row * call->x_stride + column, count);
    v16 by = load_lanes(dtype, call->by, row * call->by_stride + by_column, broadcast ? 1 : count);
    if (broadcast) {
        float lanes[LANES];
        v_store(lanes, by);
        by = v_set1(lanes[0]);
    }
    if (call->multiplier == MULTIPLIER_SIGMOID)
        x = v_times_sigmoid(x, by);
    else
        x = v_mul(x, call->multiplier == MULTIPLIER_SOFTPLUS ? v_softplus(by) : by);
    store_lanes(dtype, call->out, row * call->columns + column, count, x);
}

INLINE void multiply_rows(const enum dtype dtype, const struct multiply_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++) {
        if (call->width == 1)
            for (size_t i = 0; i < call->columns; i += LANES) multiply_lanes(dtype, 0, call, row, i, lanes_left(i, call->columns), i);
        else
            for (size_t first = 0; first < call->columns; first += call->width)
                for (size_t i = 0; i < call->width; i += LANES)
                    multiply_lanes(dtype, 1, call, row, first + i, lanes_left(i, call->width), first / call->width);
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

INLINE void activate_rows(const enum dtype dtype, const struct activate_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++)
        for (size_t i = 0; i < call->columns; i += LANES) {
            const size_t count = lanes_left(i, call->columns);
            v16 x = load_lanes(dtype, call->x, row * call->x_stride + i, count);
            if (call->activation == ACTIVATION_CLAMP)
                x = v_min(v_set1(call->bound), v_max(v_set1(-call->bound), x)); /* NaN passes */
            else if (call->activation == ACTIVATION_SCALE)
                x = v_mul(x, v_set1(call->factor));
            else if (call->activation == ACTIVATION_DIVIDE)
                x = v_div(x, v_set1(call->factor));
            else if (call->activation == ACTIVATION_TANH)
                x = v_tanh(x);
            else if (call->activation == ACTIVATION_XIELU)
                x = v_xielu(x, v_set1(call->positive), v_set1(call->negative), v_set1(call->linear), v_set1(call->near));
            else
                x = v_activate((enum activation)call->activation, x);
            store_lanes(dtype, call->out, row * call->columns + i, count, x);
        }
}

TARGET static void activate_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    activate_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void activate_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    activate_rows(DTYPE_BFLOAT16, job, task);
}

INLINE void add_rows(const enum dtype dtype, const struct add_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++)
        for (size_t first = 0; first < call->columns; first += call->width)
            for (size_t i = 0; i < call->width; i += LANES) {
                const size_t count = lanes_left(i, call->width);
                v16 other = v_mul(load_lanes(dtype, call->other, row * call->other_stride + i, count), v_set1(call->factor));
                v16 one = load_lanes(dtype, call->one, row * call->one_stride + first + i, count);
                store_lanes(dtype, call->out, row * call->out_stride + first + i, count, v_add(one, v_rounded(dtype, other)));
            }
}

TARGET static void add_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    add_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void add_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    add_rows(DTYPE_BFLOAT16, job, task);
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
