/* Convolutions and recurrences, whose layers keep a state of fixed size of each sequence (states.c has which blocks hold it).
 * Included after functions.inc.h.
 *
 * The tokens of a sequence are processed one after the other, and each sum is a chain of fused multiply-adds of its own column, over
 * taps or over the rows of the state in their order. So no bit depends on chunks, on the batch, on the width of a slice or on threads.
 */

/* Some columns of one sequence. The window has the rows before the next token, as many as there are taps but one, and then those of
 * some tokens. */
INLINE void convolve_columns(const enum dtype dtype, const struct convolution_call *call, int64_t seq, size_t column, size_t columns,
                             const float *weights, const float *bias, float *window) {
    const struct states *states = &call->states;
    const size_t taps = (size_t)call->taps, history = taps - 1, stride = (size_t)call->state_stride;
    const int64_t first_row = states->query_start[seq], tokens = states->query_start[seq + 1] - first_row;
    const int64_t start = states->seq_lens[seq] - tokens;
    if (tokens == 0) return;
    const float *before = state_before(states, seq, start);
    for (size_t h = 0; h < history; h++)
        for (size_t c = 0; c < columns; c += LANES) {
            v16 row = before == NULL ? v_zero()
                                     : load_lanes(DTYPE_FLOAT32, before, h * stride + column + c, lanes_left(c, columns));
            v_store(window + h * WINDOW_COLUMNS + c, row);
        }
    for (int64_t token = 0; token < tokens; token += WINDOW_TOKENS) {
        size_t count = (size_t)(tokens - token < WINDOW_TOKENS ? tokens - token : WINDOW_TOKENS);
        for (size_t c = 0; c < columns; c += LANES) {
            const size_t lanes = lanes_left(c, columns);
            for (size_t t = 0; t < count; t++) {
                size_t from = ((size_t)(first_row + token) + t) * (size_t)call->x_stride + column + c;
                v_store(window + (history + t) * WINDOW_COLUMNS + c, load_lanes(dtype, call->x, from, lanes));
            }
            for (size_t t = 0; t < count; t++) {
                v16 sum = v_load(bias + c);
                for (size_t j = 0; j < taps; j++)
                    sum = v_fma(v_load(weights + j * WINDOW_COLUMNS + c), v_load(window + (t + j) * WINDOW_COLUMNS + c), sum);
                if (call->has_silu) sum = v_times_sigmoid(sum, sum);
                size_t to = ((size_t)(first_row + token) + t) * (size_t)call->out_stride + column + c;
                store_lanes(dtype, call->out, to, lanes, sum);
            }
        }
        for (size_t t = 0; t < count; t++) {
            float *after = state_after(states, seq, start + token + (int64_t)t);
            for (size_t h = 0; after != NULL && h < history; h++)
                memcpy(after + h * stride + column, window + (t + 1 + h) * WINDOW_COLUMNS, columns * sizeof(float));
        }
        memmove(window, window + count * WINDOW_COLUMNS, history * WINDOW_COLUMNS * sizeof(float));
    }
}

INLINE void convolve(const enum dtype dtype, const struct convolution_call *call, size_t task, float *scratch) {
    const size_t taps = (size_t)call->taps, width = (size_t)call->columns;
    float *weights = scratch, *bias = weights + taps * WINDOW_COLUMNS, *window = bias + WINDOW_COLUMNS;
    size_t column = task * call->columns_per_task, end = column + call->columns_per_task < width ? column + call->columns_per_task : width;
    clear_columns(dtype, &call->states, call->out, (size_t)call->out_stride, column, end - column);
    for (; column < end; column += WINDOW_COLUMNS) {
        const size_t columns = end - column < WINDOW_COLUMNS ? end - column : WINDOW_COLUMNS;
        for (size_t c = 0; c < columns; c += LANES) {
            const size_t lanes = lanes_left(c, columns);
            for (size_t j = 0; j < taps; j++)
                v_store(weights + j * WINDOW_COLUMNS + c, load_lanes(DTYPE_FLOAT32, call->weight, j * width + column + c, lanes));
            v_store(bias + c, call->bias == NULL ? v_zero() : load_lanes(DTYPE_FLOAT32, call->bias, column + c, lanes));
        }
        for (int64_t seq = 0; seq < call->states.num_seqs; seq++)
            convolve_columns(dtype, call, seq, column, columns, weights, bias, window);
    }
}

TARGET static void convolve_float32(const void *job, size_t task, void *scratch) { convolve(DTYPE_FLOAT32, job, task, scratch); }
TARGET static void convolve_bfloat16(const void *job, size_t task, void *scratch) { convolve(DTYPE_BFLOAT16, job, task, scratch); }

/* What the rows of some tokens become before their states are computed: [RECURRENCE_TOKENS][stride] each. */
struct token_rows {
    float *query, *key, *read; /* read: the key times the factors of decay, which reads the state before it decays */
    float *factors;            /* of decay, where each row of the state has its own */
    size_t stride;
    float factor[RECURRENCE_TOKENS], beta[RECURRENCE_TOKENS];
    float *after[RECURRENCE_TOKENS]; /* the head's state in the block to which it is written, or NULL */
};

/* Widens the queries or keys of some tokens, and sets `lengths` to what they are multiplied by. */
INLINE void widen_tokens(const enum dtype dtype, const struct recurrence_call *call, const void *rows, size_t from, size_t row_stride,
                         size_t count, float scale, float *to, size_t stride, float *lengths) {
    const size_t dim = (size_t)call->key_dim, size = dtype == DTYPE_FLOAT32 ? 4 : 2;
    float squares[RECURRENCE_TOKENS][LANES];
    for (size_t t = 0; t < count; t++, from += row_stride, to += stride) {
        /* Rows of a head are far apart, so the processor does not see by itself which comes next. */
        for (size_t byte = 0; t + TOKENS_AHEAD < count && byte < dim * size; byte += 64)
            __builtin_prefetch((const char *)rows + (from + TOKENS_AHEAD * row_stride) * size + byte);
        v16 sum = v_zero();
        for (size_t i = 0; i < dim; i += LANES) {
            v16 part = load_lanes(dtype, rows, from + i, lanes_left(i, dim));
            sum = v_fma(part, part, sum);
            v_store(to + i, part);
        }
        v_store(squares[t], sum);
    }
    for (size_t t = 0; t < count; t++) {
        float total = 0.0f;
        for (size_t i = 0; i < LANES; i++) total = total + squares[t][i];
        lengths[t] = call->has_norm ? scale / sqrtf(total + call->norm_eps) : scale;
    }
}

/* e^x where x may be above what v_exp takes */
INLINE v16 decay_factor(v16 x) { return v_exp(v_min(v_set1(88.0f), x)); }

/* Prepares `count` tokens of a head, from a row on. */
INLINE void prepare_tokens(const enum dtype dtype, const struct recurrence_call *call, struct token_rows *rows, size_t count, int64_t row,
                           int64_t head) {
    const size_t dim = (size_t)call->key_dim, group = (size_t)(head / (call->heads / call->groups)) * dim;
    const size_t query_stride = (size_t)call->query_stride, key_stride = (size_t)call->key_stride, decays = (size_t)call->decay_stride;
    float query_lengths[RECURRENCE_TOKENS], key_lengths[RECURRENCE_TOKENS], logarithms[RECURRENCE_TOKENS] = {0};
    widen_tokens(dtype, call, call->query, (size_t)row * query_stride + group, query_stride, count, call->scale, rows->query,
                 rows->stride, query_lengths);
    widen_tokens(dtype, call, call->key, (size_t)row * key_stride + group, key_stride, count, 1.0f, rows->key, rows->stride, key_lengths);
    if (!call->decay_per_key) {
        for (size_t t = 0; t < count; t++) logarithms[t] = call->decay[((size_t)row + t) * decays + (size_t)head];
        for (size_t t = 0; t < count; t += LANES) v_store(rows->factor + t, decay_factor(v_load(logarithms + t)));
    }
    for (size_t t = 0; t < count; t++) {
        float *query = rows->query + t * rows->stride, *key = rows->key + t * rows->stride, *read = rows->read + t * rows->stride;
        const size_t decay = ((size_t)row + t) * decays + (size_t)head * dim;
        v16 factor = v_set1(rows->factor[t]);
        for (size_t i = 0; i < dim; i += LANES) {
            if (call->decay_per_key) {
                factor = decay_factor(load_lanes(DTYPE_FLOAT32, call->decay, decay + i, lanes_left(i, dim)));
                v_store(rows->factors + t * rows->stride + i, factor);
            }
            v16 part = v_mul(v_load(key + i), v_set1(key_lengths[t]));
            v_store(key + i, part);
            v_store(read + i, v_mul(part, factor));
            v_store(query + i, v_mul(v_load(query + i), v_set1(query_lengths[t])));
        }
        rows->beta[t] = call->beta == NULL ? 1.0f : call->beta[(row + (int64_t)t) * call->beta_stride + head];
    }
}

/* Where a slice of a state is read or written. */
struct state_place {
    float *first;
    size_t stride; /* from row to row */
};

/* What the state has of a token's key: the sums of `read` times the rows of the state. */
INLINE void read_state(const int vectors, size_t dim, struct state_place from, const float *read, v16 *sums) {
    for (int c = 0; c < vectors; c++) sums[c] = v_zero();
    for (size_t i = 0; i < dim; i++) {
        v16 factor = v_set1(read[i]);
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) sums[c] = v_fma(factor, v_load(from.first + i * from.stride + c * LANES), sums[c]);
    }
}

/* One token of a slice: the state decays, takes up the token's values, and is read by its query and, for `next`, by the next token's
 * key while it is in registers. */
INLINE void step_state(const int vectors, const int per_key, const int next, size_t dim, struct state_place from, struct state_place to,
                       const struct token_rows *rows, size_t t, const v16 *values, v16 *out, v16 *sums) {
    const float *query = rows->query + t * rows->stride, *key = rows->key + t * rows->stride;
    const float *read = rows->read + (t + 1) * rows->stride, *factors = rows->factors + t * rows->stride;
    v16 factor = v_set1(rows->factor[t]);
    for (int c = 0; c < vectors; c++) out[c] = sums[c] = v_zero();
    for (size_t i = 0; i < dim; i++) {
        v16 k = v_set1(key[i]), q = v_set1(query[i]), r = next ? v_set1(read[i]) : v_zero();
        if (per_key) factor = v_set1(factors[i]);
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            v16 state = v_fma(k, values[c], v_mul(factor, v_load(from.first + i * from.stride + c * LANES)));
            out[c] = v_fma(q, state, out[c]);
            if (next) sums[c] = v_fma(r, state, sums[c]);
            v_store(to.first + i * to.stride + c * LANES, state);
        }
    }
}

/* The tokens of a slice of `vectors` vectors, of which the last may have fewer lanes than the head has columns left. */
LONG_FUNCTION void walk_slice(const enum dtype dtype, const int vectors, const int per_key, const struct recurrence_call *call, int64_t head,
                       size_t column, size_t columns, int64_t row, size_t count, struct state_place from, struct state_place own,
                       const struct token_rows *rows) {
    const size_t dim = (size_t)call->key_dim, width = (size_t)call->value_dim;
    const int whole = columns == (size_t)vectors * LANES;
    const float skip = call->skip == NULL ? 0.0f : call->skip[head];
    v16 values[SLICE_VECTORS], out[SLICE_VECTORS], sums[SLICE_VECTORS];
    if (!whole && from.first != own.first) { /* whole vectors would reach into the next row */
        for (size_t i = 0; i < dim; i++)
            v_store(own.first + i * own.stride, load_lanes(DTYPE_FLOAT32, from.first, i * from.stride, columns));
        from = own;
    }
    read_state(vectors, call->has_delta_rule ? dim : 0, from, rows->read, sums);
    for (size_t t = 0; t < count; t++) {
        size_t of_head = (size_t)head * width + column, from_row = (size_t)(row + (int64_t)t);
        struct state_place to = own;
        if (rows->after[t] != NULL && whole) to = (struct state_place){rows->after[t] + column, width};
        for (int c = 0; c < vectors; c++) {
            size_t at = from_row * (size_t)call->value_stride + of_head + (size_t)c * LANES;
            values[c] = load_lanes(dtype, call->value, at, whole ? LANES : columns);
            v16 given = call->has_delta_rule ? v_sub(values[c], sums[c]) : values[c];
            if (call->beta != NULL) values[c] = v_mul(v_set1(rows->beta[t]), given);
        }
        if (call->has_delta_rule && t + 1 < count)
            step_state(vectors, per_key, 1, dim, from, to, rows, t, values, out, sums);
        else
            step_state(vectors, per_key, 0, dim, from, to, rows, t, values, out, sums);
        for (int c = 0; c < vectors; c++) {
            size_t at = from_row * (size_t)call->value_stride + of_head + (size_t)c * LANES, lanes = whole ? LANES : columns;
            if (call->skip != NULL) out[c] = v_fma(v_set1(skip), load_lanes(dtype, call->value, at, lanes), out[c]);
            store_lanes(dtype, call->out, from_row * (size_t)call->out_stride + of_head + (size_t)c * LANES, lanes, out[c]);
        }
        if (rows->after[t] != NULL && !whole)
            for (size_t i = 0; i < dim; i++)
                store_lanes(DTYPE_FLOAT32, rows->after[t], i * width + column, columns, v_load(own.first + i * own.stride));
        from = to;
    }
}

/* The columns of a slice: as many whole vectors as there are, and the rest as a slice of its own. */
INLINE size_t columns_of_slice(size_t column, size_t end) {
    size_t left = end - column;
    if (left >= SLICE_COLUMNS) return SLICE_COLUMNS;
    return left > LANES ? LANES : left;
}

INLINE void recur(const enum dtype dtype, const int per_key, const struct recurrence_call *call, size_t task, float *scratch) {
    const struct states *states = &call->states;
    const size_t parts = recurrence_parts(call), width = (size_t)call->value_dim, dim = (size_t)call->key_dim;
    const size_t tasks_of_seq = parts * (size_t)call->heads;
    if (task >= (size_t)states->num_seqs * tasks_of_seq) {
        clear_columns(dtype, states, call->out, (size_t)call->out_stride, 0, (size_t)call->heads * width);
        return;
    }
    const int64_t seq = (int64_t)(task / tasks_of_seq), head = (int64_t)(task % tasks_of_seq / parts);
    const int64_t first_row = states->query_start[seq], tokens = states->query_start[seq + 1] - first_row;
    const int64_t start = states->seq_lens[seq] - tokens;
    const size_t first = task % parts * call->columns_per_task;
    const size_t end = first + call->columns_per_task < width ? first + call->columns_per_task : width;
    const size_t of_head = (size_t)head * dim * width;
    struct token_rows rows = {.stride = padded_lanes(dim)};
    float *own = scratch; /* [dim][SLICE_COLUMNS] for each slice */
    rows.query = own + call->columns_per_task * dim;
    rows.key = rows.query + RECURRENCE_TOKENS * rows.stride;
    rows.read = rows.key + RECURRENCE_TOKENS * rows.stride;
    rows.factors = rows.read + RECURRENCE_TOKENS * rows.stride;
    float *before = tokens > 0 ? state_before(states, seq, start) : NULL; /* NULL: the state is in `own` */
    if (before == NULL)
        memset(own, 0, call->columns_per_task * dim * sizeof(float));
    else
        before += of_head;
    for (int64_t token = 0; token < tokens; token += RECURRENCE_TOKENS) {
        size_t count = (size_t)(tokens - token < RECURRENCE_TOKENS ? tokens - token : RECURRENCE_TOKENS);
        prepare_tokens(dtype, call, &rows, count, first_row + token, head);
        for (size_t t = 0; t < count; t++) {
            rows.after[t] = state_after(states, seq, start + token + (int64_t)t);
            if (rows.after[t] != NULL) rows.after[t] += of_head;
        }
        for (size_t column = first, columns; column < end; column += columns) {
            columns = columns_of_slice(column, end);
            struct state_place place = {own + (column - first) * dim, columns < LANES ? LANES : columns}, from = place;
            if (before != NULL) from = (struct state_place){before + column, width};
            if (columns == SLICE_COLUMNS && SLICE_VECTORS > 1)
                walk_slice(dtype, SLICE_VECTORS, per_key, call, head, column, columns, first_row + token, count, from, place, &rows);
            else
                walk_slice(dtype, 1, per_key, call, head, column, columns, first_row + token, count, from, place, &rows);
        }
        before = rows.after[count - 1];
    }
}

/* One token of LANES channels: the state [dim][LANES] decays, takes up the token's values, and is read by its query. */
INLINE void step_channels(const enum dtype dtype, const struct recurrence_call *call, size_t channel, size_t row, const float *query,
                          const float *key, float *state) {
    const size_t heads = (size_t)call->heads, dim = (size_t)call->key_dim, lanes = lanes_left(channel, heads);
    const v16 value = load_lanes(dtype, call->value, row * (size_t)call->value_stride + channel, lanes);
    const v16 size = load_lanes(DTYPE_FLOAT32, call->decay, row * (size_t)call->decay_stride + channel, lanes);
    v16 out = v_zero(), added = value;
    if (call->beta != NULL) added = v_mul(load_lanes(DTYPE_FLOAT32, call->beta, row * (size_t)call->beta_stride + channel, lanes), value);
    for (size_t i = 0; i < dim; i++, state += LANES) {
        v16 factor = decay_factor(v_mul(size, load_lanes(DTYPE_FLOAT32, call->rates, i * heads + channel, lanes)));
        v16 after = v_fma(v_set1(key[i]), added, v_mul(factor, v_load(state)));
        out = v_fma(v_set1(query[i]), after, out);
        v_store(state, after);
    }
    if (call->skip != NULL) out = v_fma(load_lanes(DTYPE_FLOAT32, call->skip, channel, lanes), value, out);
    store_lanes(dtype, call->out, row * (size_t)call->out_stride + channel, lanes, out);
}

/* The states of LANES channels, in a block [dim] each, as [dim][LANES]. */
INLINE void read_channels(const float *from, size_t lanes, size_t dim, float *to) {
    for (size_t i = 0; i < dim; i++)
        for (size_t lane = 0; lane < LANES; lane++) to[i * LANES + lane] = lane < lanes ? from[lane * dim + i] : 0.0f;
}

INLINE void write_channels(const float *from, size_t lanes, size_t dim, float *to) {
    for (size_t lane = 0; lane < lanes; lane++)
        for (size_t i = 0; i < dim; i++) to[lane * dim + i] = from[i * LANES + lane];
}

/* States of one column, with `rates`: a vector has one row of the states of LANES heads, the channels. The sums are those of recur. */
INLINE void recur_channels(const enum dtype dtype, const struct recurrence_call *call, size_t task, float *scratch) {
    const struct states *states = &call->states;
    const size_t heads = (size_t)call->heads, dim = (size_t)call->key_dim, tasks_of_seq = channel_tasks(call);
    if (task >= (size_t)states->num_seqs * tasks_of_seq) {
        clear_columns(dtype, states, call->out, (size_t)call->out_stride, 0, heads);
        return;
    }
    const int64_t seq = (int64_t)(task / tasks_of_seq);
    const int64_t first_row = states->query_start[seq], tokens = states->query_start[seq + 1] - first_row;
    const int64_t start = states->seq_lens[seq] - tokens;
    const size_t first = task % tasks_of_seq * CHANNELS_PER_TASK;
    const size_t end = first + CHANNELS_PER_TASK < heads ? first + CHANNELS_PER_TASK : heads;
    const size_t query_stride = (size_t)call->query_stride, key_stride = (size_t)call->key_stride, stride = padded_lanes(dim);
    float *own = scratch, *query = own + CHANNELS_PER_TASK * dim, *key = query + RECURRENCE_TOKENS * stride; /* own: [dim][LANES] each */
    float lengths[RECURRENCE_TOKENS];
    if (tokens == 0) return;
    const float *before = state_before(states, seq, start);
    if (before == NULL) memset(own, 0, CHANNELS_PER_TASK * dim * sizeof(float));
    for (size_t channel = first; before != NULL && channel < end; channel += LANES)
        read_channels(before + channel * dim, lanes_left(channel, heads), dim, own + (channel - first) * dim);
    for (int64_t token = 0; token < tokens; token += RECURRENCE_TOKENS) {
        const size_t count = (size_t)(tokens - token < RECURRENCE_TOKENS ? tokens - token : RECURRENCE_TOKENS);
        const size_t row = (size_t)(first_row + token);
        widen_tokens(dtype, call, call->key, row * key_stride, key_stride, count, 1.0f, key, stride, lengths);
        widen_tokens(dtype, call, call->query, row * query_stride, query_stride, count, call->scale, query, stride, lengths);
        for (size_t t = 0; t < count; t++)
            for (size_t i = 0; i < dim; i += LANES)
                v_store(query + t * stride + i, v_mul(v_load(query + t * stride + i), v_set1(lengths[t])));
        for (size_t channel = first; channel < end; channel += LANES) {
            float *state = own + (channel - first) * dim;
            for (size_t t = 0; t < count; t++) {
                step_channels(dtype, call, channel, row + t, query + t * stride, key + t * stride, state);
                float *after = state_after(states, seq, start + token + (int64_t)t);
                if (after != NULL) write_channels(state, lanes_left(channel, heads), dim, after + channel * dim);
            }
        }
    }
}

#define RECUR(name, dtype)                                                             \
    TARGET static void name(const void *job, size_t task, void *scratch) {             \
        const struct recurrence_call *call = job;                                      \
        if (call->rates != NULL)                                                       \
            recur_channels(dtype, call, task, scratch);                                \
        else if (call->decay_per_key)                                                  \
            recur(dtype, 1, call, task, scratch);                                      \
        else                                                                           \
            recur(dtype, 0, call, task, scratch);                                      \
    }
RECUR(recur_float32, DTYPE_FLOAT32)
RECUR(recur_bfloat16, DTYPE_BFLOAT16)
