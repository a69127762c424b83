/* The same product for bfloat16 pairs, after product_float32.inc.h; DPBF16 says that there is vdpbf16ps. */
#ifdef DPBF16
typedef uint32_t bf16_row; /* pairs as they lie in memory */
enum { ROW_ITEMS_PER_PAIR = 1, QUERY_MULTIPLE = 2 };
#else
typedef float bf16_row; /* pairs as floats, odd element first */
enum { ROW_ITEMS_PER_PAIR = 2, QUERY_MULTIPLE = 2 };
#endif

/* k is even */
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

/* c[MM][NU * 16] = x[MM][pairs] * panels, each pair's odd element first; strides count bfloat16 elements, ldx row
 * items. */
INLINE void tile_bfloat16(const int MM, const int NU, const bf16_row *x, size_t ldx, const uint16_t *w, size_t panel_stride,
                          size_t step_stride, size_t pairs, float *c, size_t ldc) {
    v16 acc[12][4];
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) acc[m][u] = v_zero();
    for (size_t first = 0; first < pairs; first += STEP_PAIRS, w += step_stride)
        for (size_t i = first; i < pairs && i < first + STEP_PAIRS; i++) {
            const uint16_t *p = w + (i - first) * 2 * LANES;
#ifdef DPBF16
            __m512i weights[4];
#pragma GCC unroll 4
            for (int u = 0; u < NU; u++) {
                weights[u] = _mm512_loadu_si512(p + (size_t)u * panel_stride);
                __builtin_prefetch((const char *)(p + (size_t)u * panel_stride) + PREFETCH_BYTES);
            }
#pragma GCC unroll 12
            for (int m = 0; m < MM; m++) {
                __m512i pair = _mm512_set1_epi32((int)x[(size_t)m * ldx + i]);
#pragma GCC unroll 4
                for (int u = 0; u < NU; u++) acc[m][u] = _mm512_dpbf16_ps(acc[m][u], (__m512bh)weights[u], (__m512bh)pair);
            }
#else
            v16 odd[4], even[4];
#pragma GCC unroll 4
            for (int u = 0; u < NU; u++) {
                odd[u] = v_load_odd(p + (size_t)u * panel_stride);
                even[u] = v_load_even(p + (size_t)u * panel_stride);
                __builtin_prefetch((const char *)(p + (size_t)u * panel_stride) + PREFETCH_BYTES);
            }
#pragma GCC unroll 12
            for (int m = 0; m < MM; m++) {
                v16 x_odd = v_set1(x[(size_t)m * ldx + 2 * i]), x_even = v_set1(x[(size_t)m * ldx + 2 * i + 1]);
#pragma GCC unroll 4
                for (int u = 0; u < NU; u++) acc[m][u] = v_fma(even[u], x_even, v_fma(odd[u], x_odd, acc[m][u]));
            }
#endif
        }
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) v_store(c + (size_t)m * ldc + (size_t)u * LANES, acc[m][u]);
}

TARGET static void product_bfloat16(size_t rows, size_t panels, const bf16_row *x, size_t ldx, const uint16_t *w,
                                    size_t panel_stride, size_t step_stride, size_t pairs, float *c, size_t ldc) {
    while (rows > 0) {
        size_t block = block_rows(rows), panel = 0;
        if (block <= WIDE_ROWS && panels % WIDE_PANELS == 0) {
            for (; panel < panels; panel += WIDE_PANELS) switch (block) {
#define CASE(MM)                                                                                                         \
    case MM:                                                                                                             \
        tile_bfloat16(MM, WIDE_PANELS, x, ldx, w + panel * panel_stride, panel_stride, step_stride, pairs,            \
                      c + panel * LANES, ldc);                                                                           \
        break;
                    WIDE_CASES(CASE)
#undef CASE
                }
        } else {
            for (; panel < panels; panel += TALL_PANELS) switch (block) {
#define CASE(MM)                                                                                                         \
    case MM:                                                                                                             \
        tile_bfloat16(MM, TALL_PANELS, x, ldx, w + panel * panel_stride, panel_stride, step_stride, pairs,            \
                      c + panel * LANES, ldc);                                                                           \
        break;
                    TALL_CASES(CASE)
#undef CASE
                }
        }
        rows -= block;
        x += block * ldx;
        c += block * ldc;
    }
}
