/* Paged attention. Included once for each instruction set, after its products. A row "sees" the keys that it attends to.
 *
 * The includer's product_bfloat16 computes scores in bfloat16. It takes queries that widen_row has converted, with the head
 * dimension padded to a multiple of QUERY_MULTIPLE. With FEW_SCORES, few_scores computes the scores of a single token, with the
 * same bits; with FEW_VALUES, few_values computes what they add to the outputs.
 * Where a row sees a whole tile of bfloat16 values, its probabilities are rounded to bfloat16, too (store_probabilities and
 * product_pairs).
 *
 * The keys of a query row are processed in tiles of KEY_TILE absolute positions, with a running maximum and sum (online softmax;
 * Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"). Tiles begin at absolute multiples of KEY_TILE, a
 * key's lane is its position modulo 16, and a tile changes a row's state only by the keys that the row sees. So the arithmetic of
 * a row is a function of its query and its own keys: other rows, the bounds of the chunk, the block size and the placement of
 * blocks only decide what is computed beside it. Memory behind a request's keys never enters a sum. So rows of several requests can
 * attend to a tile together, too, where these share it (sharing.c, shared_attention.inc.h).
 */
#define LOG2_E 1.44269504f
#define REFERENCE_SLACK 8.0f

#include "attention_tiles.inc.h"

#ifdef FEW_SCORES
#define FEW_ROWS_OF(dtype) ((dtype) == DTYPE_BFLOAT16)
#include FEW_SCORES
#else
#define FEW_ROWS_OF(dtype) 0
enum { FEW_SCORE_ROWS = 0 };
#endif

/* The softmax of one row over one tile: scores become unnormalised probabilities 2^(score - reference), in bfloat16 where the row
 * sees the whole tile. The reference is a maximum that the row has seen. It, the sum and the output are rescaled only for a
 * probability above 2^REFERENCE_SLACK; up to there float32 is as precise. biases: [KEY_TILE], added to scaled scores; or NULL. */
INLINE void softmax_row(const struct attention_call *call, struct attention_state *state, float *scores, uint16_t *probabilities,
                        size_t row, struct key_range range, const float *biases) {
    float *output = state->output + row * state->out_stride;
    const v16 scale = v_set1(call->softcap != 0.0f ? call->scale : call->scale * LOG2_E);
    v16 s[KEY_TILE / LANES];
#pragma GCC unroll 4
    for (int i = 0; i < KEY_TILE / LANES; i++) {
        s[i] = v_mul(v_load(scores + i * LANES), scale);
        if (call->softcap != 0.0f) s[i] = v_mul(v_softcap(s[i], call->softcap), v_set1(LOG2_E));
        if (biases != NULL) s[i] = v_add(s[i], v_mul(v_load(biases + i * LANES), v_set1(LOG2_E)));
    }
    if (range.start > 0 || range.end < KEY_TILE) {
#pragma GCC unroll 4
        for (int i = 0; i < KEY_TILE / LANES; i++) v_store(scores + i * LANES, s[i]);
        for (int64_t j = 0; j < range.start; j++) scores[j] = -INFINITY;
        for (int64_t j = range.end; j < KEY_TILE; j++) scores[j] = -INFINITY;
#pragma GCC unroll 4
        for (int i = 0; i < KEY_TILE / LANES; i++) s[i] = v_load(scores + i * LANES);
    }
    float reference = state->reference[row];
    v16 sum = v_load(state->sum + row * LANES), largest = v_max(v_max(s[0], s[1]), v_max(s[2], s[3]));
    if (v_any_above(largest, reference + REFERENCE_SLACK)) {
        float before = reference;
        state->reference[row] = reference = v_largest(largest);
        v16 factor = v_exp2(v_set1(before - reference));
        sum = v_mul(sum, factor);
        for (size_t d = 0; d < state->out_stride; d += LANES) v_store(output + d, v_mul(v_load(output + d), factor));
    }
#pragma GCC unroll 4
    for (int i = 0; i < KEY_TILE / LANES; i++) {
        v16 p = v_exp2(v_sub(s[i], v_set1(reference)));
        sum = v_add(sum, p);
        if (probabilities != NULL)
            store_probabilities(p, probabilities, (size_t)i * LANES);
        else
            v_store(scores + i * LANES, p);
    }
    v_store(state->sum + row * LANES, sum);
}

/* The biases that a row adds to the scores of a tile's keys; zero for keys behind its own, which it does not see. */
INLINE void biases_of_row(const struct attention_call *call, struct biased_row row, int64_t tile, float *biases) {
    const int64_t farthest = call->num_distances - 1, distance = row.position - tile; /* of the first key */
    int64_t first_near = distance > farthest ? distance - farthest : 0;
    int64_t first_behind = distance + 1 < KEY_TILE ? distance + 1 : KEY_TILE;
    if (first_near > KEY_TILE) first_near = KEY_TILE;
    for (int64_t j = 0; j < first_near; j++) biases[j] = row.of_distance[farthest];
    for (int64_t j = first_near; j < first_behind; j++) biases[j] = row.of_distance[distance - j];
    for (int64_t j = first_behind; j < KEY_TILE; j++) biases[j] = 0.0f;
}

/* softmax_row of `count` rows with the biases of their distances. Not inlined, so that rows without biases are computed by the same
 * instructions as if there were none. */
TARGET static __attribute__((noinline)) void softmax_biased_rows(const struct attention_call *call, struct attention_state *state,
                                                                 size_t row, size_t count, struct key_range range, int64_t tile,
                                                                 int whole) {
    float biases[KEY_TILE];
    for (size_t r = 0; r < count; r++) {
        ask_ahead(state, count < 8 && !state->values_as_they_lie ? 3 : 1);
        biases_of_row(call, state->biased[row + r], tile, biases);
        softmax_row(call, state, state->scores + r * KEY_TILE, whole ? state->probabilities + r * 2 * KEY_TILE : NULL, row + r, range,
                    biases);
    }
}

/* softmax_row of `count` rows that see only the keys that were selected. Not inlined, as softmax_biased_rows. */
TARGET static __attribute__((noinline)) void softmax_selected_rows(const struct attention_call *call, struct attention_state *state,
                                                                   size_t row, size_t count, struct key_range range, int64_t tile,
                                                                   int whole) {
    const uint64_t in_range = (range.end < KEY_TILE ? ((uint64_t)1 << range.end) - 1 : ~(uint64_t)0) & ~(uint64_t)0 << range.start;
    for (size_t r = 0; r < count; r++) {
        float *scores = state->scores + r * KEY_TILE;
        uint16_t *probabilities = whole ? state->probabilities + r * 2 * KEY_TILE : NULL;
        const uint64_t seen = state->selected[row + r][tile / KEY_TILE] & in_range;
        ask_ahead(state, count < 8 && !state->values_as_they_lie ? 3 : 1);
        if (seen == 0) { /* softmax_row needs a key */
            for (size_t i = 0; i < KEY_TILE; i += LANES) {
                if (whole)
                    store_probabilities(v_zero(), probabilities, i);
                else
                    v_store(scores + i, v_zero());
            }
            continue;
        }
        for (int64_t j = 0; j < KEY_TILE; j++)
            if (!(seen >> j & 1)) scores[j] = -INFINITY;
        softmax_row(call, state, scores, probabilities, row + r, range, NULL);
    }
}

/* Whether one of a task's rows of a KV head may see a key of the tile. */
INLINE int any_selected(const struct attention_task *task, const struct attention_state *state, size_t base, int64_t tile) {
    for (size_t row = base; row < base + (size_t)(task->token_count * task->head_count); row++)
        if (state->selected[row][tile / KEY_TILE] != 0) return 1;
    return 0;
}

/* Whether one of the tokens sees the whole tile. Both bounds of what a token sees grow with its position, so one check suffices. */
INLINE int any_sees_all(const struct attention_call *call, int64_t length, int64_t first_position, int64_t tokens, int64_t tile) {
    int64_t last = tile + KEY_TILE - 1 - call->ahead, reaches = last > first_position ? last : first_position;
    return reaches < first_position + tokens && sees_all(visible_keys(call, length, reaches, tile));
}

/* Computes the products of query rows and the keys of the loaded tile. */
INLINE void score_rows(const enum dtype dtype, const struct attention_call *call, struct attention_state *state, size_t row,
                       size_t count) {
    const size_t dim = (size_t)call->key_dim, pairs = state->query_dim / 2, items = pairs * ROW_ITEMS_PER_PAIR;
    if (dtype == DTYPE_FLOAT32)
        product_float32(count, KEY_TILE / LANES, (const float *)state->query + row * dim, dim, state->keys, dim * LANES, LANES,
                        dim, state->scores, KEY_TILE, 0);
    else
        product_bfloat16(count, KEY_TILE / LANES, (const bf16_row *)state->query + row * items, items, state->keys,
                         state->query_dim * LANES, 2 * LANES, pairs, state->scores, KEY_TILE, 0);
}

/* Computes scores, probabilities and outputs of rows that see the same keys of the loaded tile. */
INLINE void attend_rows(const enum dtype dtype, const struct attention_call *call, struct attention_state *state, int64_t kv, size_t row,
                        size_t count, struct key_range range, int64_t tile) {
    float *output = state->output + row * state->out_stride;
    (void)kv;
    if (!state->values_as_they_lie) ask_ahead(state, 8);
#ifdef FEW_SCORES
    if (dtype == DTYPE_BFLOAT16 && state->few)
        few_scores(state, kv, row, count, call->key_dim);
    else
#endif
        score_rows(dtype, call, state, row, count);
    int whole = dtype == DTYPE_BFLOAT16 && sees_all(range);
    if (call->distance_bias != NULL)
        softmax_biased_rows(call, state, row, count, range, tile, whole);
    else if (call->selected != NULL)
        softmax_selected_rows(call, state, row, count, range, tile, whole);
    else
        for (size_t r = 0; r < count; r++) {
            ask_ahead(state, count < 8 && !state->values_as_they_lie ? 3 : 1);
            softmax_row(call, state, state->scores + r * KEY_TILE, whole ? state->probabilities + r * 2 * KEY_TILE : NULL, row + r,
                        range, NULL);
        }
#ifdef FEW_VALUES
    if (whole && state->values_as_they_lie) {
        few_values(state, count, (size_t)call->value_dim, output);
        return;
    }
#endif
    if (whole) {
        product_pairs(count, state->value_panels, state->probabilities, state->pairs, output, state->out_stride);
        return;
    }
    product_float32(count, state->value_panels, state->scores + range.start, KEY_TILE,
                    state->values + (size_t)range.start * state->out_stride, LANES, state->out_stride,
                    (size_t)(range.end - range.start), output, state->out_stride, 1);
}

INLINE void attend_tile(const enum dtype dtype, const struct attention_call *call, const struct attention_task *task,
                        struct attention_state *state, int64_t kv, int64_t first_position, int64_t tile) {
    const size_t heads = (size_t)task->head_count;
    const size_t base = (size_t)kv * heads; /* a task with several KV heads has one token */
    const int64_t length = call->seq_lens[task->seq];
    if (call->selected != NULL && !any_selected(task, state, base, tile)) return;
    struct key_range first = visible_keys(call, length, first_position, tile);
    struct key_range last = visible_keys(call, length, first_position + task->token_count - 1, tile);
    int pairs = dtype == DTYPE_BFLOAT16 && any_sees_all(call, length, first_position, task->token_count, tile);
    int floats = !pairs || !sees_all(first) || !sees_all(last);
    load_tile(dtype, call, state, floats, pairs && !state->values_as_they_lie, !state->few);
    for (int64_t token = 0; token < task->token_count;) {
        struct key_range range = visible_keys(call, length, first_position + token, tile);
        int64_t next = token + 1; /* tokens that see the same keys of this tile share products */
        for (; next < task->token_count; next++) {
            struct key_range other = visible_keys(call, length, first_position + next, tile);
            if (other.start != range.start || other.end != range.end) break;
        }
        size_t end = range.start < range.end ? (size_t)next * heads : 0;
        for (size_t row = (size_t)token * heads; row < end; row += SCORE_ROWS)
            attend_rows(dtype, call, state, kv, base + row, end - row < SCORE_ROWS ? end - row : SCORE_ROWS, range, tile);
        token = next;
    }
}

/* Notes the positions and the biases of a task's rows, which are those from a row on. */
INLINE void find_biased_rows(const struct attention_call *call, const struct attention_task *task, struct attention_state *state,
                             size_t row) {
    int64_t tokens = call->query_start[task->seq + 1] - call->query_start[task->seq];
    int64_t position = call->seq_lens[task->seq] - tokens + task->token_start;
    for (int64_t token = 0; token < task->token_count; token++)
        for (int64_t head = task->head_start; head < task->head_start + task->head_count * task->kv_count; head++)
            state->biased[row++] = (struct biased_row){call->distance_bias + head * call->num_distances, position + token};
}

/* Converts the queries of a task to the rows from a row on, and returns their number. */
INLINE size_t prepare_queries(const enum dtype dtype, const struct attention_call *call, const struct attention_task *task,
                              struct attention_state *state, size_t row) {
    const size_t dim = (size_t)call->key_dim, items = dtype == DTYPE_FLOAT32 ? dim : state->query_dim / 2 * ROW_ITEMS_PER_PAIR;
    const int64_t first_row = call->query_start[task->seq] + task->token_start;
    const size_t before = row;
    if (call->distance_bias != NULL) find_biased_rows(call, task, state, row);
    for (int64_t i = 0; call->selected != NULL && i < task->token_count * task->head_count * task->kv_count; i++)
        state->selected[row + (size_t)i] =
            call->selected + (first_row + i / (task->head_count * task->kv_count)) * call->selected_words;
    for (int64_t token = 0; token < task->token_count; token++)
        for (int64_t head = 0; head < task->head_count * task->kv_count; head++, row++) {
            size_t from = (size_t)((first_row + token) * call->query_stride) + (size_t)(task->head_start + head) * dim;
            if (dtype == DTYPE_FLOAT32) {
                memcpy((float *)state->query + row * items, (const float *)call->query + from, dim * sizeof(float));
            } else {
                bf16_row *to = (bf16_row *)state->query + row * items;
                if (state->query_dim > dim) memset(to, 0, items * sizeof *to);
                widen_row(to, (const uint16_t *)call->query + from, dim);
            }
        }
    return row - before;
}

/* The state of rows that have seen no key yet. */
INLINE void start_rows(const enum dtype dtype, const struct attention_call *call, struct attention_state *state, size_t rows) {
    const size_t dim = (size_t)call->key_dim, size = dtype == DTYPE_FLOAT32 ? 4 : 2;
    if (state->query_dim > dim) /* scratch may have NaN or infinity, and zero times that is not zero */
        for (size_t panel = 0; panel < KEY_TILE / LANES; panel++)
            memset((char *)state->keys + (panel * state->query_dim + dim) * LANES * size, 0, (state->query_dim - dim) * LANES * size);
    memset(state->output, 0, rows * state->out_stride * sizeof(float));
    memset(state->sum, 0, rows * LANES * sizeof(float));
    for (size_t row = 0; row < rows; row++) state->reference[row] = -INFINITY;
}

/* Saves the states of a task's rows after shared attention, or goes on with those that were saved. */
INLINE void exchange_states(const struct attention_job *job, const struct attention_task *task, struct attention_state *state, size_t row,
                            const int save) {
    const size_t floats = state_floats(job->call->value_dim);
    const int64_t first = job->sharing->place[task->seq] + task->token_start;
    for (int64_t token = first; token < first + task->token_count; token++)
        for (int64_t head = 0; head < task->head_count * task->kv_count; head++, row++) {
            float *saved = job->sharing->states + (size_t)(token * job->call->heads + task->head_start + head) * floats;
            float *parts[] = {state->output + row * state->out_stride, state->sum + row * LANES, state->reference + row};
            const size_t sizes[] = {state->out_stride, LANES, 1};
            for (int i = 0; i < 3; saved += sizes[i++])
                memcpy(save ? saved : parts[i], save ? parts[i] : saved, sizes[i] * sizeof(float));
        }
}

INLINE void store_outputs(const enum dtype dtype, const struct attention_call *call, const struct attention_task *task,
                          struct attention_state *state, int64_t first_row) {
    const size_t dim = (size_t)call->value_dim;
    size_t row = 0;
    for (int64_t token = 0; token < task->token_count; token++)
        for (int64_t head = 0; head < task->head_count * task->kv_count; head++, row++) {
            float sum = v_total(v_load(state->sum + row * LANES)), *output = state->output + row * state->out_stride;
            size_t to = (size_t)((first_row + token) * call->out_stride) + (size_t)(task->head_start + head) * dim;
            v16 divisor = v_set1(sum), factor = v_set1(1.0f);
            if (call->sinks != NULL) { /* one more score, which has no value */
                float sink = call->sinks[task->head_start + head] * LOG2_E, reference = state->reference[row];
                if (sink > reference) {
                    factor = v_exp2(v_set1(reference - sink));
                    divisor = v_add(v_mul(divisor, factor), v_set1(1.0f));
                } else {
                    divisor = v_add(divisor, v_exp2(v_set1(sink - reference)));
                }
            }
            for (size_t d = 0; d < dim; d += LANES) {
                v16 result = v_load(output + d);
                if (call->sinks != NULL) result = v_mul(result, factor);
                store_lanes(dtype, call->out, to + d, lanes_left(d, dim), v_div(result, divisor));
            }
        }
}

/* The state of a task whose parts are in the thread's scratch, with keys in panels; the first tile's rows are here. */
INLINE struct attention_state state_in_scratch(const enum dtype dtype, const struct attention_call *call, void *scratch) {
    struct attention_state state;
    size_t dim = (size_t)call->key_dim, multiple = dtype == DTYPE_BFLOAT16 ? QUERY_MULTIPLE : 1;
    state.query_dim = (dim + multiple - 1) / multiple * multiple;
    state.out_stride = padded_columns(call->value_dim);
    state.value_panels = state.out_stride / LANES;
    state.scores = scratch;
    state.output = state.scores + SCORE_ROWS * KEY_TILE;
    state.sum = state.output + ATTENTION_ROWS * state.out_stride;
    state.reference = state.sum + ATTENTION_ROWS * LANES;
    state.values = state.reference + ATTENTION_ROWS;
    state.pairs = (uint16_t *)(state.values + KEY_TILE * state.out_stride);
    state.probabilities = state.pairs + KEY_TILE * state.out_stride;
    state.keys = state.probabilities + SCORE_ROWS * 2 * KEY_TILE;
    state.query = (float *)state.keys + KEY_TILE * padded_columns(call->key_dim);
    state.widened = (char *)((float *)state.query + ATTENTION_ROWS * padded_columns(call->key_dim));
    state.key_bytes = dim * (size_t)cache_element_size(dtype, call);
    state.value_bytes = call->values_in_keys ? 0 : (size_t)call->value_dim * (size_t)cache_element_size(dtype, call);
    state.few = state.values_as_they_lie = state.here = 0;
    state.asked = 0;
    state.line_ahead = 0;
    return state;
}

#include "shared_attention.inc.h"

INLINE void attend(const enum dtype dtype, const struct attention_job *job, size_t index, void *scratch) {
    const struct attention_call *call = job->call;
    const struct attention_task *task = &job->tasks[index];
    const int64_t shared_tiles = job->sharing == NULL ? 0 : job->sharing->tiles[task->seq];
    struct attention_state state = state_in_scratch(dtype, call, scratch);
    int64_t query_start = call->query_start[task->seq], query_end = call->query_start[task->seq + 1];
    int64_t first_row = query_start + task->token_start;
    const int64_t length = call->seq_lens[task->seq];
    int64_t first_position = length - (query_end - query_start) + task->token_start;
    int64_t last_position = first_position + task->token_count - 1 + call->ahead; /* of a key that is attended to */
    if (last_position >= length) last_position = length - 1;
    int64_t tile = first_key(call, first_position);
    if (shared_tiles > 0) tile = shared_tiles * KEY_TILE;
    state.few = FEW_ROWS_OF(dtype) && task->token_count == 1 && task->head_count <= FEW_SCORE_ROWS;
#ifdef FEW_VALUES
    state.values_as_they_lie = state.few && call->value_dim % (2 * LANES) == 0;
#endif
    /* A panel's keys are side by side in the cache. */
    const int whole_panels = state.values_as_they_lie && call->block_size % LANES == 0 && call->key_dim % LANES == 0;
    const size_t line_of_panel = whole_panels ? 2 * LANES * (size_t)cache_element_size(dtype, call) : 0;
    state.here = 1;
    tile = tile / KEY_TILE * KEY_TILE;
    find_rows(dtype, call, task, &state.rows[0], task->kv_head, first_position, tile);
    if (state.few) ask_ahead(&state, KEY_TILE);
    size_t rows = prepare_queries(dtype, call, task, &state, 0);
#ifdef FEW_SCORES
    for (int64_t kv = 0; dtype == DTYPE_BFLOAT16 && state.few && kv < task->kv_count; kv++)
        transpose_query(&state, kv, (size_t)task->head_count);
#endif
    start_rows(dtype, call, &state, rows);
    if (shared_tiles > 0) exchange_states(job, task, &state, 0, 0);
    state.here = 0;
    for (; tile <= last_position; tile += KEY_TILE)
        for (int64_t kv = 0; kv < task->kv_count; kv++, state.here = 1 - state.here) {
            int64_t next = kv + 1 < task->kv_count ? kv + 1 : 0, next_tile = next == 0 ? tile + KEY_TILE : tile;
            find_rows(dtype, call, task, &state.rows[1 - state.here], task->kv_head + next, first_position, next_tile);
            state.line_ahead = sees_all(visible_keys(call, length, first_position, tile)) ? line_of_panel : 0;
            state.asked = state.line_ahead > 0 ? KEY_TILE : 0;
            widen_tile(dtype, call, &state);
            attend_tile(dtype, call, task, &state, kv, first_position, tile);
            ask_ahead(&state, KEY_TILE);
        }
    store_outputs(dtype, call, task, &state, first_row);
}

TARGET static void attention_float32(const void *job, size_t task, void *scratch) { attend(DTYPE_FLOAT32, job, task, scratch); }
TARGET static void attention_bfloat16(const void *job, size_t task, void *scratch) { attend(DTYPE_BFLOAT16, job, task, scratch); }
TARGET static void shared_attention_float32(const void *job, size_t task, void *scratch) {
    attend_shared(DTYPE_FLOAT32, job, task, scratch);
}
TARGET static void shared_attention_bfloat16(const void *job, size_t task, void *scratch) {
    attend_shared(DTYPE_BFLOAT16, job, task, scratch);
}

#include "selection.inc.h"
