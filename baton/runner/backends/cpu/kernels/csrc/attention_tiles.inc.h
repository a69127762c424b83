/* Tiles of keys and values: where they are in the cache, and how they are prefetched, widened from 8 bits, and copied into the
 * panels that products take. Included by attention.inc.h. */

/* The addresses of a tile's keys and values in the cache, of those that the task sees; of a cache in 8 bits also those of the keys'
 * scales. */
struct tile_rows {
    const char *key[KEY_TILE], *value[KEY_TILE];
    const uint16_t *scale[KEY_TILE];
    int64_t start, end; /* the range of keys that it sees, from the tile's start */
};

/* What decides the biases of a row: its position and the biases of its head. */
struct biased_row {
    const float *of_distance; /* [num_distances] */
    int64_t position;
};

/* The state of one task; most of it is in the thread's scratch. */
struct attention_state {
    float *scores;  /* [SCORE_ROWS][KEY_TILE]: products, then probabilities */
    float *output;  /* [rows][out_stride], unnormalised */
    float *sum;     /* [rows][LANES] */
    float *reference; /* [rows]: the running maximum that is subtracted from scores, times log2 e */
    float *values;  /* [KEY_TILE][out_stride] */
    uint16_t *pairs; /* [panel][KEY_TILE / 2][LANES][2], the same values */
    void *keys;     /* [KEY_TILE / LANES] panels */
    void *query;    /* [rows] converted query rows */
    char *widened;  /* of a cache in 8 bits: the tile's keys and then its values in the dtype of the query */
    uint16_t *probabilities; /* [SCORE_ROWS][2 * KEY_TILE], in the format of store_probabilities */
    size_t query_dim, out_stride, value_panels;
    struct tile_rows rows[2]; /* of the present tile and of the next one, of the same KV head or the next */
    int here;                 /* which of the two is the present tile's */
    int64_t asked;            /* how many keys of the next tile have been prefetched */
    size_t line_ahead;        /* 0; or few_scores and few_values prefetch all of the next tile, in steps of so many bytes */
    size_t key_bytes, value_bytes; /* in the cache, which has no values of their own in keys */
    int few;                  /* whether all rows are of one token: then keys are not transposed into panels */
    int values_as_they_lie;   /* whether the values of a whole tile are not copied into pairs either */
    struct biased_row biased[ATTENTION_ROWS]; /* of each row, only with distance_bias */
    const uint64_t *selected[ATTENTION_ROWS]; /* of each row, only with call->selected: the keys that it may see */
};

/* The keys of a tile, relative to its start, that a query token sees. */
struct key_range {
    int64_t start, end;
};

INLINE struct key_range visible_keys(const struct attention_call *call, int64_t length, int64_t position, int64_t tile) {
    int64_t start = first_key(call, position);
    int64_t end = position + 1 + call->ahead < length ? position + 1 + call->ahead : length;
    struct key_range range = {start > tile ? start - tile : 0, end < tile + KEY_TILE ? end - tile : KEY_TILE};
    return range;
}

static const uint32_t absent_key[MAX_HEAD_DIM];

INLINE int sees_all(struct key_range range) { return range.start == 0 && range.end == KEY_TILE; }

INLINE void load_values(const enum dtype dtype, struct attention_state *state, const void *value, size_t dim, size_t key) {
    const size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2;
    for (size_t from = 0; from < dim; from += LANES) {
        float *to = state->values + key * state->out_stride + from;
        const char *source = (const char *)value + from * size;
        uint32_t half[LANES] = {0};
        if (from + LANES > dim) source = memcpy(half, source, 8 * size); /* head_dim is a multiple of 8 */
        v_store(to, dtype == DTYPE_FLOAT32 ? v_load((const float *)source) : v_load_bf16((const uint16_t *)source));
    }
}

/* The bytes of a number in the cache. */
INLINE int64_t cache_element_size(const enum dtype dtype, const struct attention_call *call) {
    if (call->format != CACHE_AS_IT_IS) return 1;
    return dtype == DTYPE_FLOAT32 ? 4 : 2;
}

/* Finds the keys and values of a KV head's tile that the task sees: from the window of its first token to its last token. The
 * first addresses of each panel may always be prefetched. Prefetches the scales of a cache in 8 bits. */
INLINE void find_rows(const enum dtype dtype, const struct attention_call *call, const struct attention_task *task,
                      struct tile_rows *rows, int64_t kv_head, int64_t first_position, int64_t tile) {
    const int64_t size = cache_element_size(dtype, call), key_bytes = call->key_stride * size;
    const int64_t value_bytes = call->values_in_keys ? key_bytes : call->value_dim * size;
    const int32_t *table = call->block_tables + (int64_t)task->seq * call->table_stride;
    const int64_t length = call->seq_lens[task->seq];
    rows->start = visible_keys(call, length, first_position, tile).start;
    rows->end = visible_keys(call, length, first_position + task->token_count - 1, tile).end;
    for (int64_t panel = 0; panel < KEY_TILE; panel += LANES) rows->key[panel] = rows->value[panel] = (const char *)absent_key;
    if (rows->start >= rows->end) return;
    int64_t block = (tile + rows->start) / call->block_size, offset = (tile + rows->start) % call->block_size;
    for (int64_t j = rows->start; j < rows->end; block++, offset = 0) {
        int64_t start = table[block] * call->block_stride, token = kv_head * call->block_size + offset;
        const char *key = (const char *)call->cache + (start + call->key_offset) * size + token * key_bytes;
        const char *value = (const char *)call->cache + (start + call->value_offset) * size + token * value_bytes;
        int64_t count = call->block_size - offset < rows->end - j ? call->block_size - offset : rows->end - j;
        for (int64_t i = 0; i < count; i++) rows->key[j + i] = key + i * key_bytes;
        for (int64_t i = 0; i < count; i++) rows->value[j + i] = value + i * value_bytes;
        if (call->format != CACHE_AS_IT_IS) {
            const uint16_t *scale = (const uint16_t *)((const char *)call->cache + start + call->scale_offset) + token;
            for (int64_t i = 0; i < count; i++) rows->scale[j + i] = scale + i;
            __builtin_prefetch(scale);
            __builtin_prefetch(scale + call->scales_apart);
        }
        j += count;
    }
}

/* Prefetches some more keys and values of the next tile. Only a few at a time, since a core waits when too many cache lines are
 * being loaded; and most of them early, since they take longer to load than a tile of few rows takes to compute. */
INLINE void ask_ahead(struct attention_state *state, int64_t count) {
    const struct tile_rows *next = &state->rows[1 - state->here];
    int64_t j = state->asked > next->start ? state->asked : next->start;
    int64_t end = j + count < next->end ? j + count : next->end;
    for (; j < end; j++) {
        for (size_t line = 0; line < state->key_bytes; line += 64) __builtin_prefetch(next->key[j] + line);
        for (size_t line = 0; line < state->value_bytes; line += 64) __builtin_prefetch(next->value[j] + line);
    }
    state->asked = j;
}

INLINE v16 load_codes(const enum cache_format format, const uint8_t *codes) {
    return format == CACHE_INT8 ? v_load_int8(codes) : v_load_e4m3(codes);
}

/* Writes scale * code to a row in the query's dtype, which may be written up to a multiple of 16. */
INLINE void widen_codes(const enum dtype dtype, const enum cache_format format, const char *codes, uint16_t scale, size_t dim,
                        char *row) {
    uint32_t bits = (uint32_t)scale << 16;
    float step;
    memcpy(&step, &bits, sizeof step);
    const v16 factor = v_set1(step);
    size_t d = 0;
#ifdef VBMI
    for (; dtype == DTYPE_BFLOAT16 && format == CACHE_E4M3 && d + CODES_AT_A_TIME <= dim; d += CODES_AT_A_TIME)
        v_store_e4m3_times((uint16_t *)row + d, (const uint8_t *)codes + d, factor);
#endif
    for (; dtype == DTYPE_BFLOAT16 && d + 2 * LANES <= dim; d += 2 * LANES) {
        const uint8_t *from = (const uint8_t *)codes + d;
        v_store_two_factors((uint16_t *)row + d, v_mul(load_codes(format, from), factor),
                            v_mul(load_codes(format, from + LANES), factor));
    }
    for (; d < dim; d += LANES) {
        const uint8_t *from = (const uint8_t *)codes + d;
        uint8_t half[LANES] = {0};
        if (d + LANES > dim) from = memcpy(half, from, LANES / 2); /* dim is a multiple of 8, and the cache may end behind it */
        v16 numbers = v_mul(load_codes(format, from), factor);
        if (dtype == DTYPE_FLOAT32)
            v_store((float *)row + d, numbers);
        else
            v_store_bf16((uint16_t *)row + d, numbers);
    }
}

INLINE void widen_tile_from(const enum dtype dtype, const enum cache_format format, const struct attention_call *call,
                            struct attention_state *state) {
    const size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2, key_dim = (size_t)call->key_dim, value_dim = (size_t)call->value_dim;
    const size_t key_bytes = (key_dim + LANES - 1) / LANES * LANES * size;
    const size_t value_bytes = (value_dim + LANES - 1) / LANES * LANES * size;
    struct tile_rows *rows = &state->rows[state->here];
    char *key = state->widened, *value = key + KEY_TILE * key_bytes;
    for (int64_t j = rows->start; j < rows->end; j++, key += key_bytes, value += value_bytes) {
        widen_codes(dtype, format, rows->key[j], *rows->scale[j], key_dim, key);
        if (!call->values_in_keys) widen_codes(dtype, format, rows->value[j], rows->scale[j][call->scales_apart], value_dim, value);
        rows->key[j] = key;
        rows->value[j] = call->values_in_keys ? key : value;
    }
}

/* Replaces a tile's keys and values in 8 bits by numbers in the query's dtype; from there on everything is computed as if the cache
 * had held these. */
INLINE void widen_tile(const enum dtype dtype, const struct attention_call *call, struct attention_state *state) {
    if (call->format == CACHE_INT8) widen_tile_from(dtype, CACHE_INT8, call, state);
    if (call->format == CACHE_E4M3) widen_tile_from(dtype, CACHE_E4M3, call, state);
}

/* Copies the tile's values into panels: as floats for tokens that see a part of the tile, as pairs for tokens that see all of it.
 * Transposes its keys into panels, unless they are used in place. */
INLINE void load_tile(const enum dtype dtype, const struct attention_call *call, struct attention_state *state, int floats, int pairs,
                      int keys) {
    const size_t size = dtype == DTYPE_FLOAT32 ? 4 : 2, key_bytes = (size_t)call->key_dim * size, dim = (size_t)call->value_dim;
    const struct tile_rows *rows = &state->rows[state->here];
    for (int64_t panel = 0; (floats || pairs || keys) && panel < KEY_TILE / LANES; panel++) {
        ask_ahead(state, 8);
        if (floats)
            for (int64_t j = panel * LANES; j < (panel + 1) * LANES; j++)
                if (j >= rows->start && j < rows->end) load_values(dtype, state, rows->value[j], dim, (size_t)j);
        if (pairs)
            for (int64_t j = panel * LANES; j < (panel + 1) * LANES; j += 2)
                interleave_rows(state->pairs + j * LANES, KEY_TILE * LANES, (const uint16_t *)rows->value[j],
                                (const uint16_t *)rows->value[j + 1], dim);
        if (!keys) continue;
        const uint32_t *sources[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t j = panel * LANES + lane;
            sources[lane] = j >= rows->start && j < rows->end ? (const uint32_t *)rows->key[j] : absent_key;
        }
        transpose_rows(sources, key_bytes / 4, (uint32_t *)state->keys + (size_t)panel * LANES * state->query_dim * size / 4);
    }
}
