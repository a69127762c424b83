/* Kernels of mixtures of experts that treat each row alone: the choice of a row's experts, and the sum of what they give. Included
 * after functions.inc.h. */

/* The first of the largest of `count` numbers that are not taken; NaN is below all. */
INLINE size_t largest_left(const float *numbers, const uint8_t *taken, size_t count) {
    size_t best = count;
    for (size_t i = 0; i < count; i++)
        if (!taken[i] && (best == count || numbers[i] > numbers[best] || numbers[best] != numbers[best])) best = i;
    return best;
}

/* What a group of neighbours counts: the sum of its two best numbers, or its best one. */
INLINE float group_score(const float *numbers, size_t count, int by_two) {
    float best = -INFINITY, second = -INFINITY;
    for (size_t i = 0; i < count; i++) {
        second = numbers[i] > best ? best : numbers[i] > second ? numbers[i] : second;
        best = numbers[i] > best ? numbers[i] : best;
    }
    return by_two && count > 1 ? best + second : best;
}

/* e^(x - largest) for each of `count` numbers, of which there is room for whole vectors; returns their sum. */
INLINE float exponentials(float *numbers, size_t count) {
    float largest = -INFINITY;
    for (size_t i = 0; i < count; i++) largest = numbers[i] > largest ? numbers[i] : largest;
    for (size_t i = count; i < padded_lanes(count); i++) numbers[i] = -INFINITY;
    v16 sum = v_zero();
    for (size_t i = 0; i < count; i += LANES) {
        const v16 e = v_exp(v_max(v_set1(-200.0f), v_sub(v_load(numbers + i), v_set1(largest))));
        v_store(numbers + i, e);
        sum = v_add(sum, e);
    }
    return v_total(sum);
}

/* The share of an expert in the softmax of those that are not taken and near it; `left` has room for whole vectors. */
INLINE float share_of_near(const float *logits, const uint8_t *taken, size_t expert, size_t count, float near, float *left) {
    const float best = logits[expert];
    for (size_t i = 0; i < count; i++) {
        const float size = fabsf(logits[i]) > best ? fabsf(logits[i]) : best;
        left[i] = taken[i] || (best - logits[i]) / size > near ? -INFINITY : logits[i];
    }
    const float sum = exponentials(left, count);
    return left[expert] / sum;
}

INLINE void route_row(const enum dtype dtype, const struct route_call *call, size_t row, float *scores, uint8_t *taken) {
    const size_t experts = call->experts, padded = padded_lanes(experts), of_group = experts / call->groups;
    float *for_choice = scores + padded, *left = for_choice + padded, *weights = left + padded, *of_groups = weights + padded_lanes(call->most);
    int32_t *chosen = call->chosen + row * call->most;
    for (size_t i = 0; i < experts; i += LANES) {
        v16 logits = load_lanes(dtype, call->logits, row * call->logits_stride + i, lanes_left(i, experts));
        v_store(scores + i, call->scores == SCORES_SIGMOID ? v_times_sigmoid(v_set1(1.0f), logits) : logits);
    }
    if (call->scores == SCORES_SOFTMAX) {
        const v16 sum = v_set1(exponentials(scores, experts));
        for (size_t i = 0; i < experts; i += LANES) v_store(scores + i, v_div(v_load(scores + i), sum));
    }
    for (size_t i = 0; i < experts; i++) for_choice[i] = call->choice_bias == NULL ? scores[i] : scores[i] + call->choice_bias[i];
    memset(taken, call->groups > 1, experts);
    if (call->groups > 1) {
        uint8_t *group_taken = taken + experts;
        memset(group_taken, 0, call->groups);
        for (size_t g = 0; g < call->groups; g++) of_groups[g] = group_score(for_choice + g * of_group, of_group, call->groups_by_two);
        for (size_t i = 0; i < call->most_groups; i++) {
            const size_t group = largest_left(of_groups, group_taken, call->groups);
            group_taken[group] = 1;
            memset(taken + group * of_group, 0, of_group);
        }
    }
    for (size_t i = 0; i < call->most; i++) {
        const size_t expert = largest_left(for_choice, taken, experts);
        const int is_near = call->scores == SCORES_SOFTMAX_OF_NEAR;
        weights[i] = is_near ? share_of_near(scores, taken, expert, experts, call->near, left) : scores[expert];
        taken[expert] = 1;
        chosen[i] = (int32_t)expert;
    }
    float divisor = call->eps;
    if (call->scores == SCORES_SOFTMAX_OF_CHOSEN)
        divisor = exponentials(weights, call->most);
    else
        for (size_t i = 0; call->normalised && i < call->most; i++) divisor += weights[i];
    const int divides = call->normalised || call->scores == SCORES_SOFTMAX_OF_CHOSEN;
    for (size_t i = 0; i < call->most; i++) {
        weights[i] = (divides ? weights[i] / divisor : weights[i]) * call->factor;
        if (call->expert_factors != NULL) weights[i] *= call->expert_factors[chosen[i]];
        if (call->weights_dtype == DTYPE_BFLOAT16) {
            uint16_t rounded;
            store_number(DTYPE_BFLOAT16, &rounded, 0, weights[i]);
            const uint32_t bits = (uint32_t)rounded << 16;
            memcpy(&weights[i], &bits, sizeof bits);
        }
        call->weights[row * call->most + i] = weights[i];
    }
}

INLINE void route_rows(const enum dtype dtype, const struct route_call *call, size_t task, void *scratch) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    float *scores = scratch;
    uint8_t *taken = (uint8_t *)(scores + 3 * padded_lanes(call->experts) + padded_lanes(call->most) + call->groups);
    for (; row < end; row++) route_row(dtype, call, row, scores, taken);
}

TARGET static void route_float32(const void *job, size_t task, void *scratch) { route_rows(DTYPE_FLOAT32, job, task, scratch); }
TARGET static void route_bfloat16(const void *job, size_t task, void *scratch) { route_rows(DTYPE_BFLOAT16, job, task, scratch); }

INLINE void sum_row(const enum dtype dtype, const struct sum_call *call, size_t row) {
    const int32_t *places = call->places + row * call->most;
    const float *weights = call->weights + row * call->most;
    const size_t n = call->n;
    v16 gate = v_set1(1.0f);
    if (call->gate != NULL) {
        float lanes[LANES];
        v_store(lanes, load_lanes(dtype, call->gate, row, 1));
        gate = v_rounded(dtype, v_times_sigmoid(v_set1(1.0f), v_set1(lanes[0])));
    }
    for (size_t i = 0; i < n; i += LANES) {
        const size_t count = lanes_left(i, n);
        v16 sum = v_zero();
        for (size_t expert = 0; expert < call->most; expert++) {
            const int is_rest = places[expert] < 0;
            if (is_rest && call->rest == NULL) continue;
            const v16 out = is_rest ? load_lanes(dtype, call->rest, row * call->rest_stride + i, count) : load_lanes(dtype, call->outs, (size_t)places[expert] * n + i, count);
            sum = v_add(sum, call->are_weighted && !is_rest ? out : v_mul(out, v_set1(weights[expert])));
        }
        if (call->factor != 1.0f) sum = v_mul(v_rounded(dtype, sum), v_set1(call->factor));
        if (call->shared != NULL) {
            v16 shared = load_lanes(dtype, call->shared, row * call->shared_stride + i, count);
            if (call->gate != NULL) shared = v_rounded(dtype, v_mul(shared, gate));
            sum = v_add(v_rounded(dtype, sum), shared);
        }
        store_lanes(dtype, call->out, row * n + i, count, sum);
    }
}

INLINE void sum_rows(const enum dtype dtype, const struct sum_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    for (; row < end; row++) sum_row(dtype, call, row);
}

TARGET static void sum_experts_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    sum_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void sum_experts_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    sum_rows(DTYPE_BFLOAT16, job, task);
}

/* Some numbers' even or odd neighbours, from an index on. */
INLINE v16 load_neighbours(const enum dtype dtype, const void *x, size_t index, size_t count, int odd) {
    const size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2;
    uint32_t part[LANES] = {0};
    for (size_t i = 0; i < count; i++) memcpy((char *)part + i * size, (const char *)x + (index + 2 * i + (size_t)odd) * size, size);
    return load_lanes(dtype, part, 0, LANES);
}

INLINE void clamp_rows(const enum dtype dtype, const struct clamp_call *call, size_t task) {
    size_t row = task * call->rows_per_task, end = row + call->rows_per_task < call->rows ? row + call->rows_per_task : call->rows;
    const v16 high = v_set1(call->limit), low = v_set1(-call->limit);
    for (; row < end; row++)
        for (size_t i = 0; i < call->columns; i += LANES) {
            const size_t count = lanes_left(i, call->columns), from = (row * call->columns + i) * 2;
            const v16 gate = v_min(high, load_neighbours(dtype, call->x, from, count, 0)); /* NaN passes */
            const v16 up = v_max(low, v_min(high, load_neighbours(dtype, call->x, from, count, 1)));
            const v16 gated = v_times_sigmoid(gate, v_mul(gate, v_set1(call->alpha)));
            store_lanes(dtype, call->out, row * call->columns + i, count, v_mul(v_add(up, v_set1(1.0f)), gated));
        }
}

TARGET static void clamped_gate_float32(const void *job, size_t task, void *scratch) {
    (void)scratch;
    clamp_rows(DTYPE_FLOAT32, job, task);
}
TARGET static void clamped_gate_bfloat16(const void *job, size_t task, void *scratch) {
    (void)scratch;
    clamp_rows(DTYPE_BFLOAT16, job, task);
}
