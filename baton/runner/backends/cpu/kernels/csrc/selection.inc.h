/* Selection of the keys that a row attends to, by scores of keys and queries of their own (the indexer of DeepSeek-V3.2, arXiv
 * 2512.02556, section 2.1). Included by attention.inc.h, whose tiles and products it uses.
 *
 * A row's scores are functions of its own queries and of its sequence's keys, as attention's are; of equal scores the earlier key
 * counts more. */

/* A number whose order is that of scores; NaN is below all. */
INLINE uint32_t order_of(float score) {
    uint32_t bits;
    score += 0.0f; /* both zeros are equal */
    memcpy(&bits, &score, sizeof bits);
    if (score != score) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Sets the bits of the `most` largest of `count` scores, which are more; of equal ones those of the first. */
INLINE void select_largest(const float *scores, int64_t count, int64_t most, uint64_t *selected) {
    uint32_t least = 0, known = 0;
    int64_t left = most; /* of those that begin with the known digits of the least selected */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        uint32_t digit = 255;
        for (int64_t i = 0; i < count; i++) {
            uint32_t order = order_of(scores[i]);
            if ((order & known) == least) counts[order >> shift & 255]++;
        }
        while (counts[digit] < left) left -= counts[digit--];
        least |= digit << shift;
        known |= 255u << shift;
    }
    for (int64_t i = 0; i < count; i++) {
        uint32_t order = order_of(scores[i]);
        if (order > least || (order == least && left-- > 0)) selected[i / 64] |= (uint64_t)1 << i % 64;
    }
}

/* Adds to the sums of some rows' tokens what their heads score a tile's keys; state->scores has the products. */
INLINE void add_scores(const struct selection_call *selection, const struct attention_task *task, const struct attention_state *state,
                       size_t row, size_t count, int64_t tile, int64_t first_row, float *sums) {
    const size_t heads = (size_t)task->head_count, width = (size_t)selection->words * KEY_TILE;
    const v16 scale = v_set1(selection->keys.scale);
    for (size_t r = 0; r < count; r++) {
        const size_t token = (row + r) / heads, head = (row + r) % heads;
        const v16 weight = v_set1(selection->weights[(first_row + (int64_t)token) * selection->weights_stride + (int64_t)head]);
        float *to = sums + token * width + tile;
        for (size_t i = 0; i < KEY_TILE; i += LANES) {
            v16 score = v_max(v_zero(), v_mul(v_load(state->scores + r * KEY_TILE + i), scale)); /* NaN stays */
            v_store(to + i, v_fma(weight, score, head == 0 ? v_zero() : v_load(to + i)));
        }
    }
}

/* Computes the sums of a task's rows for all keys that they see. */
INLINE void sum_scores(const enum dtype dtype, const struct selection_job *job, const struct attention_task *task, int64_t first_position,
                       int64_t first_row, void *scratch, float *sums) {
    const struct attention_call *call = &job->call->keys;
    struct attention_state state = state_in_scratch(dtype, call, scratch);
    const size_t rows = prepare_queries(dtype, call, task, &state, 0);
    start_rows(dtype, call, &state, rows);
    state.rows[1].start = state.rows[1].end = 0; /* no next tile is prefetched */
    for (int64_t tile = 0; tile < first_position + task->token_count; tile += KEY_TILE) {
        find_rows(dtype, call, task, &state.rows[0], 0, first_position, tile);
        widen_tile(dtype, call, &state);
        load_tile(dtype, call, &state, 0, 0, 1);
        for (size_t row = 0; row < rows; row += SCORE_ROWS) {
            const size_t count = rows - row < SCORE_ROWS ? rows - row : SCORE_ROWS;
            score_rows(dtype, call, &state, row, count);
            add_scores(job->call, task, &state, row, count, tile, first_row, sums);
        }
    }
}

INLINE void select_rows(const enum dtype dtype, const struct selection_job *job, size_t index, void *scratch) {
    const struct selection_call *selection = job->call;
    const struct attention_call *call = &selection->keys;
    const struct attention_task *task = &job->tasks[index];
    float *sums = (float *)((char *)scratch + job->scratch_bytes);
    const int64_t tokens = call->query_start[task->seq + 1] - call->query_start[task->seq];
    const int64_t first_row = call->query_start[task->seq] + task->token_start;
    const int64_t first_position = call->seq_lens[task->seq] - tokens + task->token_start;
    /* Rows that see no more keys than they may have need no scores. */
    if (first_position + task->token_count > selection->most)
        sum_scores(dtype, job, task, first_position, first_row, scratch, sums);
    for (int64_t token = 0; token < task->token_count; token++) {
        const int64_t count = first_position + token + 1;
        uint64_t *selected = selection->selected + (first_row + token) * selection->words;
        memset(selected, 0, (size_t)selection->words * sizeof *selected);
        if (count > selection->most)
            select_largest(sums + (size_t)(token * selection->words) * KEY_TILE, count, selection->most, selected);
        else
            for (int64_t key = 0; key < count; key++) selected[key / 64] |= (uint64_t)1 << key % 64;
    }
}

TARGET static void select_keys_float32(const void *job, size_t task, void *scratch) { select_rows(DTYPE_FLOAT32, job, task, scratch); }
TARGET static void select_keys_bfloat16(const void *job, size_t task, void *scratch) { select_rows(DTYPE_BFLOAT16, job, task, scratch); }
