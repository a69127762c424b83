/* Attention of the few rows of one token on AVX-512: keys are transposed by eight words and values are paired in registers,
 * instead of being written to panels for the whole tile and read again. Scores and outputs are the same chains of products as
 * tile_bfloat16's, so their bits are the same.
 *
 * The next tile is prefetched evenly meanwhile, in the order in which it will be used: panels of keys during the scores, panels of
 * values during the outputs. For each word of a panel of keys, and for each two values, that are computed, one line of the same
 * panel of the next tile is prefetched; of a cache in 8 bits half a line, so that each line is asked for twice. */

enum { FEW_SCORE_ROWS = 8, FEW_PANELS = 2 };

/* Keeps an array in memory: in registers, it would leave too few of them for the sums. */
#define IN_MEMORY(array) __asm__ volatile("" : "+m"(array))

/* A pair of a query row or of probabilities, as the products take it. */
#ifdef DPBF16
typedef uint32_t few_pair;
#else
typedef struct {
    float odd, even;
} few_pair;
#endif

/* From one row of probabilities to the next. */
enum { PROBABILITY_PAIRS = 2 * KEY_TILE * sizeof(uint16_t) / sizeof(few_pair) };

/* The address of a KV head's query as pairs [query_dim / 2][FEW_SCORE_ROWS]; they are behind the query rows of all KV heads. */
INLINE few_pair *query_pairs(const struct attention_state *state, int64_t kv) {
    enum { QUERY_ROWS = TASK_KV_HEADS * FEW_SCORE_ROWS };
    _Static_assert(2 * QUERY_ROWS <= ATTENTION_ROWS, "the scratch has room for two copies of the query rows");
    return (few_pair *)state->query + (size_t)(QUERY_ROWS + kv * FEW_SCORE_ROWS) * (state->query_dim / 2);
}

/* Transposes the query rows of a KV head, so that the rows' pairs are side by side. */
INLINE void transpose_query(struct attention_state *state, int64_t kv, size_t rows) {
    const size_t pairs = state->query_dim / 2;
    const few_pair *query = (const few_pair *)state->query + (size_t)kv * rows * pairs;
    few_pair *to = query_pairs(state, kv);
    for (size_t w = 0; w < pairs; w++)
        for (size_t row = 0; row < rows; row++) to[w * FEW_SCORE_ROWS + row] = query[row * pairs + w];
}

#ifdef DPBF16
/* sums[ROWS][panel] += the products of a pair of each row, `stride` pairs apart, and of the pairs of two panels. */
INLINE void add_products(const int ROWS, const few_pair *row, size_t stride, __m512i first, __m512i second,
                         v16 sums[FEW_SCORE_ROWS][FEW_PANELS]) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32((int)row[(size_t)m * stride]);
        sums[m][0] = _mm512_dpbf16_ps(sums[m][0], (__m512bh)first, pair);
        sums[m][1] = _mm512_dpbf16_ps(sums[m][1], (__m512bh)second, pair);
    }
}
#else
/* sums[ROWS][panel] += the products of an element of each row, `stride` pairs apart, and of two vectors. */
INLINE void add_element(const int ROWS, const float *element, size_t stride, v16 first, v16 second, v16 sums[FEW_SCORE_ROWS][FEW_PANELS]) {
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        v16 factor = v_set1(element[2 * (size_t)m * stride]);
        sums[m][0] = v_fma(first, factor, sums[m][0]);
        sums[m][1] = v_fma(second, factor, sums[m][1]);
    }
}
INLINE void add_products(const int ROWS, const few_pair *row, size_t stride, __m512i first, __m512i second,
                         v16 sums[FEW_SCORE_ROWS][FEW_PANELS]) {
    add_element(ROWS, &row->odd, stride, odd_16(first), odd_16(second), sums);
    add_element(ROWS, &row->even, stride, even_16(first), even_16(second), sums);
}
#endif

/* Computes scores[ROWS][key] for FEW_PANELS panels of keys, from key first on. */
INLINE void score_panels(const int ROWS, struct attention_state *state, const few_pair *query, int64_t first) {
    const struct tile_rows *rows = &state->rows[state->here], *next = &state->rows[1 - state->here];
    const size_t words = state->query_dim / 2, line = state->line_ahead;
    const uint32_t *seen[FEW_PANELS * LANES], *const *keys = (const uint32_t *const *)rows->key + first;
    if (first < rows->start || first + FEW_PANELS * LANES > rows->end) {
        for (int64_t lane = 0; lane < FEW_PANELS * LANES; lane++) {
            int64_t j = first + lane;
            seen[lane] = j >= rows->start && j < rows->end ? keys[lane] : absent_key;
        }
        keys = seen;
    }
    const char *ahead[FEW_PANELS] = {next->key[first], next->key[first + LANES]};
    v16 sums[FEW_SCORE_ROWS][FEW_PANELS];
    __m512i pairs[FEW_PANELS][8];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) sums[m][0] = sums[m][1] = v_zero();
    size_t w = 0;
    for (; w + 8 <= words; w += 8) {
        if (line == 0) ask_ahead(state, 4);
        transpose_eight_words(keys, w, pairs[0]);
        transpose_eight_words(keys + LANES, w, pairs[1]);
        IN_MEMORY(pairs);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++, ahead[0] += line, ahead[1] += line) {
            __builtin_prefetch(ahead[0]);
            __builtin_prefetch(ahead[1]);
            add_products(ROWS, query + (w + (size_t)i) * FEW_SCORE_ROWS, 1, pairs[0][i], pairs[1][i], sums);
        }
    }
    if (w < words) {
        ask_ahead(state, 2);
        transpose_four_words(keys, w, pairs[0]);
        transpose_four_words(keys + LANES, w, pairs[1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            add_products(ROWS, query + (w + (size_t)i) * FEW_SCORE_ROWS, 1, pairs[0][i], pairs[1][i], sums);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        v_store(state->scores + m * KEY_TILE + first, sums[m][0]);
        v_store(state->scores + m * KEY_TILE + first + LANES, sums[m][1]);
    }
}

/* The sums of 32 columns of an output. Without vdpbf16ps they are those of the even and of the odd columns, which is how 32 bfloat16
 * values are widened in the fewest instructions. */
INLINE void load_columns(const float *output, v16 sums[FEW_PANELS]) {
    v16 first = v_load(output), second = v_load(output + LANES);
#ifdef DPBF16
    sums[0] = first;
    sums[1] = second;
#else
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    sums[0] = _mm512_permutex2var_ps(first, even, second);
    sums[1] = _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
#endif
}
INLINE void store_columns(float *output, const v16 sums[FEW_PANELS]) {
#ifdef DPBF16
    v_store(output, sums[0]);
    v_store(output + LANES, sums[1]);
#else
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    v_store(output, _mm512_permutex2var_ps(sums[0], low, sums[1]));
    v_store(output + LANES, _mm512_permutex2var_ps(sums[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), sums[1]));
#endif
}

/* sums[ROWS] += the products of the probabilities of two keys and of 32 columns of their values. */
INLINE void add_values(const int ROWS, const few_pair *probabilities, const uint16_t *even, const uint16_t *odd,
                       v16 sums[FEW_SCORE_ROWS][FEW_PANELS]) {
#ifdef DPBF16
    __m512i pairs[FEW_PANELS];
    interleave_32(even, odd, pairs);
    add_products(ROWS, probabilities, PROBABILITY_PAIRS, pairs[0], pairs[1], sums);
#else
    add_element(ROWS, &probabilities->odd, PROBABILITY_PAIRS, v_load_even(odd), v_load_odd(odd), sums);
    add_element(ROWS, &probabilities->even, PROBABILITY_PAIRS, v_load_even(even), v_load_odd(even), sums);
#endif
}

/* output[ROWS][32 columns from d on] += probabilities * values of the tile; the rows attend to the whole tile. */
INLINE void value_panels(const int ROWS, struct attention_state *state, size_t d, float *output) {
    const struct tile_rows *rows = &state->rows[state->here], *next = &state->rows[1 - state->here];
    const few_pair *probabilities = (const few_pair *)state->probabilities;
    const size_t line = state->line_ahead;
    v16 sums[FEW_SCORE_ROWS][FEW_PANELS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) load_columns(output + (size_t)m * state->out_stride + d, sums[m]);
    for (int panel = 0; panel < KEY_TILE; panel += LANES) {
        const char *ahead = next->value[panel] + d / 2 * line;
        for (int j = panel; j < panel + LANES; j += 4) {
            if (line == 0) ask_ahead(state, 1);
#pragma GCC unroll 2
            for (int i = j; i < j + 4; i += 2, ahead += 2 * line) {
                __builtin_prefetch(ahead);
                __builtin_prefetch(ahead + line);
                add_values(ROWS, probabilities + i / 2, (const uint16_t *)rows->value[i] + d, (const uint16_t *)rows->value[i + 1] + d, sums);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) store_columns(output + (size_t)m * state->out_stride + d, sums[m]);
}

#define FEW_CASES(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8)

/* Computes scores[row][key] of the tile for count rows, from a row on, all of one KV head. */
INLINE void few_scores(struct attention_state *state, int64_t kv, size_t row, size_t count, int64_t key_dim) {
    const few_pair *query = query_pairs(state, kv);
    (void)row, (void)key_dim;
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
