/* Attention of the few rows of one token with vdpbf16ps: keys are transposed and values are paired in registers, instead of being
 * written to panels in memory and read again. The next tile is prefetched evenly meanwhile, as fast as a core can load it. Scores
 * and outputs are the same chains of products, so their bits are the same. */

enum { FEW_SCORE_ROWS = 8, FEW_PANELS = 2 };

/* Does nothing: the query's rows are used as they are. */
INLINE void transpose_query(struct attention_state *state, int64_t kv, size_t rows) { (void)state, (void)kv, (void)rows; }

/* Computes scores[ROWS][key] for FEW_PANELS panels of keys, from key first on. */
INLINE void score_panels(const int ROWS, struct attention_state *state, const uint32_t *query, int64_t first) {
    const struct tile_rows *rows = &state->rows[state->here];
    const size_t words = state->query_dim / 2;
    const uint32_t *keys[FEW_PANELS * LANES];
    for (int64_t lane = 0; lane < FEW_PANELS * LANES; lane++) {
        int64_t j = first + lane;
        keys[lane] = j >= rows->start && j < rows->end ? (const uint32_t *)rows->key[j] : absent_key;
    }
    v16 sums[FEW_SCORE_ROWS][FEW_PANELS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) sums[m][0] = sums[m][1] = v_zero();
    for (size_t w = 0; w < words; w += 4) {
        __m512i pairs[FEW_PANELS][4];
        ask_ahead(state, 2);
        transpose_four_words(keys, w, pairs[0]);
        transpose_four_words(keys + LANES, w, pairs[1]);
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; i++)
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32((int)query[(size_t)m * words + w + i]);
                sums[m][0] = _mm512_dpbf16_ps(sums[m][0], (__m512bh)pairs[0][i], pair);
                sums[m][1] = _mm512_dpbf16_ps(sums[m][1], (__m512bh)pairs[1][i], pair);
            }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        v_store(state->scores + m * KEY_TILE + first, sums[m][0]);
        v_store(state->scores + m * KEY_TILE + first + LANES, sums[m][1]);
    }
}

/* output[ROWS][32 columns from d on] += probabilities * values of the tile; the rows attend to the whole tile. */
INLINE void value_panels(const int ROWS, struct attention_state *state, size_t d, float *output) {
    const struct tile_rows *rows = &state->rows[state->here];
    const uint32_t *probabilities = (const uint32_t *)state->probabilities;
    v16 sums[FEW_SCORE_ROWS][FEW_PANELS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        sums[m][0] = v_load(output + (size_t)m * state->out_stride + d);
        sums[m][1] = v_load(output + (size_t)m * state->out_stride + d + LANES);
    }
    for (int j = 0; j < KEY_TILE; j += 4) {
        ask_ahead(state, 1);
#pragma GCC unroll 2
        for (int i = j; i < j + 4; i += 2) {
            __m512i pairs[FEW_PANELS];
            interleave_32((const uint16_t *)rows->value[i] + d, (const uint16_t *)rows->value[i + 1] + d, pairs);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32((int)probabilities[m * KEY_TILE + i / 2]);
                sums[m][0] = _mm512_dpbf16_ps(sums[m][0], (__m512bh)pairs[0], pair);
                sums[m][1] = _mm512_dpbf16_ps(sums[m][1], (__m512bh)pairs[1], pair);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        v_store(output + (size_t)m * state->out_stride + d, sums[m][0]);
        v_store(output + (size_t)m * state->out_stride + d + LANES, sums[m][1]);
    }
}

#define FEW_CASES(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8)

/* Computes scores[row][key] of the tile for count rows, from a row on, all of one KV head. */
INLINE void few_scores(struct attention_state *state, int64_t kv, size_t row, size_t count, int64_t key_dim) {
    const uint32_t *query = (const uint32_t *)state->query + row * (state->query_dim / 2);
    (void)kv, (void)key_dim;
    for (int64_t first = 0; first < KEY_TILE; first += FEW_PANELS * LANES) switch (count) {
#define CASE(MM)                                \
    case MM:                                    \
        score_panels(MM, state, query, first); \
        break;
            FEW_CASES(CASE)
#undef CASE
        }
}

/* output[row][column] += probabilities * values, with the bits of product_pairs; dim is a multiple of 32. */
INLINE void few_values(struct attention_state *state, size_t count, size_t dim, float *output) {
    for (size_t d = 0; d < dim; d += FEW_PANELS * LANES) switch (count) {
#define CASE(MM)                                 \
    case MM:                                     \
        value_panels(MM, state, d, output); \
        break;
            FEW_CASES(CASE)
#undef CASE
        }
}
