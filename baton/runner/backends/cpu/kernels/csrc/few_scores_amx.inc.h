/* Scores of the few rows of one token on AMX: the keys are used as they are in the cache, as rows of a tile, and the query is
 * transposed instead. A score is the same sum in the same order as with transposed keys, so its bits are the same. */

enum { FEW_SCORE_ROWS = LANES };

/* The address of a KV head's query as pairs [query_dim / 2][16][2]; they are behind the query rows. */
INLINE uint16_t *query_pairs(const struct attention_state *state, int64_t kv) {
    return (uint16_t *)state->query + (ATTENTION_ROWS + (size_t)kv * LANES) * state->query_dim;
}

/* Transposes the query rows of a KV head into pairs; missing rows are zero. */
INLINE void transpose_query(struct attention_state *state, int64_t kv, size_t rows) {
    const uint32_t *sources[LANES];
    size_t words = state->query_dim / 2;
    for (size_t row = 0; row < LANES; row++)
        sources[row] = row < rows ? (const uint32_t *)state->query + ((size_t)kv * rows + row) * words : absent_key;
    transpose_rows(sources, words, (uint32_t *)query_pairs(state, kv));
}

/* Sixteen keys: in place if the cache has them side by side, otherwise a copy, with zeros for keys that no row attends to. */
INLINE const uint16_t *key_rows(struct attention_state *state, size_t key_dim, int64_t first) {
    const struct tile_rows *rows = &state->rows[state->here];
    size_t key_bytes = key_dim * sizeof(uint16_t);
    int side_by_side = first >= rows->start && first + LANES <= rows->end && key_dim == state->query_dim;
    /* All of them, since blocks in any order may begin where some of these keys would lie. */
    for (int64_t i = 1; side_by_side && i < LANES; i++) side_by_side = rows->key[first + i] == rows->key[first] + (size_t)i * key_bytes;
    if (side_by_side) return (const uint16_t *)rows->key[first];
    uint16_t *copy = (uint16_t *)state->keys + (size_t)first * state->query_dim;
    memset(copy, 0, LANES * state->query_dim * sizeof *copy);
    for (int64_t j = first; j < first + LANES; j++)
        if (j >= rows->start && j < rows->end)
            memcpy(copy + (size_t)(j - first) * state->query_dim, rows->key[j], key_bytes);
    return copy;
}

INLINE void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

/* Computes scores[row][key] of the tile for up to 16 rows of a KV head. */
INLINE void few_scores(struct attention_state *state, int64_t kv, size_t row, size_t count, int64_t key_dim) {
    (void)row, (void)count;
    _Alignas(64) float sums[KEY_TILE * LANES]; /* [key][row] */
    const uint16_t *k0 = key_rows(state, (size_t)key_dim, 0), *k1 = key_rows(state, (size_t)key_dim, LANES);
    const uint16_t *k2 = key_rows(state, (size_t)key_dim, 2 * LANES), *k3 = key_rows(state, (size_t)key_dim, 3 * LANES);
    const uint16_t *query = query_pairs(state, kv);
    size_t stride = state->query_dim * sizeof(uint16_t);
    WRITTEN(k0);
    WRITTEN(query);
    configure(TILE_ROWS);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t d = 0; d < state->query_dim; d += TILE_K) {
        _tile_loadd(6, query + d * LANES, 64);
        _tile_loadd(4, k0 + d, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, k1 + d, stride);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, k2 + d, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, k3 + d, stride);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + LANES * LANES, 64);
    _tile_stored(2, sums + 2 * LANES * LANES, 64);
    _tile_stored(3, sums + 3 * LANES * LANES, 64);
    WRITTEN(sums);
    for (size_t panel = 0; panel < KEY_TILE / LANES; panel++) {
        __m512i r[LANES];
        ask_ahead(state, 5);
#pragma GCC unroll 16
        for (size_t i = 0; i < LANES; i++) r[i] = _mm512_load_si512(sums + (panel * LANES + i) * LANES);
        transpose_16x16(r);
#pragma GCC unroll 16
        for (size_t i = 0; i < LANES; i++) _mm512_storeu_si512(state->scores + i * KEY_TILE + panel * LANES, r[i]);
    }
}
