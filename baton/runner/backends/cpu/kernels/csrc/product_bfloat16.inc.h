/* The product of a few rows with panels of bfloat16 pairs. Included after product_float32.inc.h; the includer defines DPBF16 if the
 * instruction set has vdpbf16ps, PAIR_ROWS if a tile has fewer rows than TALL_ROWS here, and MIDDLE_CASES for MIDDLE_PANELS panels
 * at a time and up to MIDDLE_ROWS rows if blocks between WIDE_ROWS and TALL_ROWS have tiles of their own. */

/* The length of a piece of k. Up to FEW_ROWS rows, the weights of a piece, of one group, stay in the first-level cache while block
 * after block of rows is multiplied with them, and the next piece is prefetched from memory; with more rows they stay in the
 * second-level cache. */
enum { FEW_PAIRS = 64, MANY_PAIRS = 512, AHEAD_BYTES = FEW_PAIRS * GROUP_COLUMNS * 4, LINE_BYTES = LANES * 4 };
enum { ROW_ITEMS_PER_PAIR = 2, QUERY_MULTIPLE = 2 };
#ifdef DPBF16
typedef uint16_t bf16_row; /* rows as they are in memory */
enum { PAIR_TILE_ROWS = WIDE_ROWS };
#else
typedef float bf16_row; /* rows of pairs as floats, odd element first */
#ifndef PAIR_ROWS
#define PAIR_ROWS TALL_ROWS
#endif
enum { PAIR_TILE_ROWS = PAIR_ROWS };
#endif

/* Converts a row of x to bf16_row; k is even. */
INLINE void widen_row(bf16_row *row, const uint16_t *x, size_t k) {
#ifdef DPBF16
    memcpy(row, x, k * 2);
#else
    uint32_t *bits = (uint32_t *)row;
    for (size_t i = 0; i < k; i += 2) {
        bits[i] = (uint32_t)x[i + 1] << 16;
        bits[i + 1] = (uint32_t)x[i] << 16;
    }
#endif
}

/* Rows of x as product_bfloat16 takes them: in place, or converted to `room`. */
INLINE const bf16_row *row_items(const uint16_t *x, size_t stride, size_t rows, size_t pairs, bf16_row *room, size_t *ldx) {
#ifdef DPBF16
    (void)rows, (void)pairs, (void)room;
    *ldx = stride;
    return x;
#else
    *ldx = pairs * ROW_ITEMS_PER_PAIR;
    for (size_t m = 0; m < rows; m++) widen_row(room + m * *ldx, x + m * stride, 2 * pairs);
    return room;
#endif
}

/* c[MM][NU * 16] (+)= x[MM][pairs] * panels, each pair's odd element first; strides count bfloat16 elements, ldx row
 * items. Prefetches as many weights from `ahead` on as it reads. */
INLINE void tile_bfloat16(const int MM, const int NU, const bf16_row *x, size_t ldx, const uint16_t *w, size_t panel_stride,
                          size_t pair_stride, size_t pairs, const char *ahead, float *c, size_t ldc, int accumulate) {
    v16 acc[12][4];
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) acc[m][u] = accumulate ? v_load(c + (size_t)m * ldc + (size_t)u * LANES) : v_zero();
    for (size_t i = 0; i < pairs; i++, w += pair_stride, ahead += (size_t)NU * LINE_BYTES) {
#ifdef DPBF16
        __m512i weights[4];
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            weights[u] = _mm512_loadu_si512(w + (size_t)u * panel_stride);
            __builtin_prefetch(ahead + (size_t)u * LINE_BYTES);
        }
#pragma GCC unroll 12
        for (int m = 0; m < MM; m++) {
            int32_t elements;
            memcpy(&elements, x + (size_t)m * ldx + 2 * i, sizeof elements);
            __m512i pair = _mm512_set1_epi32(elements);
#pragma GCC unroll 4
            for (int u = 0; u < NU; u++) acc[m][u] = _mm512_dpbf16_ps(acc[m][u], (__m512bh)weights[u], (__m512bh)pair);
        }
#else
        /* All odd elements before the even ones: so few weights are held at once that no sum leaves its register. */
        v16 weights[4];
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            weights[u] = v_load_odd(w + (size_t)u * panel_stride);
            __builtin_prefetch(ahead + (size_t)u * LINE_BYTES);
        }
#pragma GCC unroll 12
        for (int m = 0; m < MM; m++) {
            v16 value = v_set1(x[(size_t)m * ldx + 2 * i]);
#pragma GCC unroll 4
            for (int u = 0; u < NU; u++) acc[m][u] = v_fma(weights[u], value, acc[m][u]);
        }
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) weights[u] = v_load_even(w + (size_t)u * panel_stride);
#pragma GCC unroll 12
        for (int m = 0; m < MM; m++) {
            v16 value = v_set1(x[(size_t)m * ldx + 2 * i + 1]);
#pragma GCC unroll 4
            for (int u = 0; u < NU; u++) acc[m][u] = v_fma(weights[u], value, acc[m][u]);
        }
#endif
    }
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) v_store(c + (size_t)m * ldc + (size_t)u * LANES, acc[m][u]);
}

/* The case of a switch over the rows of a block, in product_bfloat16. */
#define TILE(MM, PANELS)                                                                                                 \
    case MM:                                                                                                             \
        tile_bfloat16(MM, PANELS, x, ldx, w + panel * panel_stride, panel_stride, pair_stride, pairs,                    \
                      ahead + panel * pairs * LINE_BYTES, c + panel * LANES, ldc, accumulate);                           \
        break;

TARGET static void product_bfloat16(size_t rows, size_t panels, const bf16_row *x, size_t ldx, const uint16_t *w,
                                    size_t panel_stride, size_t pair_stride, size_t pairs, float *c, size_t ldc, int accumulate) {
    /* Weights come from memory in order, whatever the order in which the tiles read them. */
    const char *ahead = (const char *)w + AHEAD_BYTES;
    while (rows > 0) {
        size_t block = block_rows(rows, PAIR_TILE_ROWS), panel = 0;
        if (block <= WIDE_ROWS && panels % WIDE_PANELS == 0) {
            for (; panel < panels; panel += WIDE_PANELS) switch (block) {
#define CASE(MM) TILE(MM, WIDE_PANELS)
                    WIDE_CASES(CASE)
#undef CASE
                }
#ifdef MIDDLE_PANELS
        } else if (block > WIDE_ROWS && block <= MIDDLE_ROWS && panels % MIDDLE_PANELS == 0) {
            for (; panel < panels; panel += MIDDLE_PANELS) switch (block) {
#define CASE(MM) TILE(MM, MIDDLE_PANELS)
                    MIDDLE_CASES(CASE)
#undef CASE
                }
#endif
        } else {
            for (; panel < panels; panel += TALL_PANELS) switch (block) {
#define CASE(MM) TILE(MM, TALL_PANELS)
                    TALL_CASES(CASE)
#undef CASE
                }
        }
        rows -= block;
        x += block * ldx;
        c += block * ldc;
    }
}
#undef TILE

/* Stores 16 probabilities of attention from a key on, rounded to bfloat16, in a row of KEY_TILE floats or bfloat16. */
INLINE void store_probabilities(v16 p, uint16_t *row, size_t key) {
#ifdef DPBF16
    v_store_factors(row + key, p);
#else
    v_store_rounded_pairs((bf16_row *)row + key, p);
#endif
}

/* c[rows][panels * 16] += probabilities[rows] * pairs; the pairs are in panels of KEY_TILE keys. */
INLINE void product_pairs(size_t rows, size_t panels, const uint16_t *probabilities, const uint16_t *pairs, float *c, size_t ldc) {
    product_bfloat16(rows, panels, (const bf16_row *)probabilities, 2 * KEY_TILE * sizeof *pairs / sizeof(bf16_row), pairs,
                     KEY_TILE * LANES, 2 * LANES, KEY_TILE / 2, c, ldc, 1);
}
