/* The product of a few rows with panels of 16 columns in float32. Included once for each instruction set.
 *
 * The includer defines TARGET, the v16 vectors, and the shapes of its register tiles: WIDE_CASES for WIDE_PANELS panels
 * at a time and up to WIDE_ROWS rows, TALL_CASES for TALL_PANELS panels and up to TALL_ROWS rows.
 */
/* How many bytes ahead of their use weights are prefetched: about one memory latency at full bandwidth. */
enum { PREFETCH_BYTES = 2048 };

/* c[MM][NU * 16] (+)= x[MM][k] * panels; k_stride: elements from one row of a panel to the next. */
INLINE void tile_float32(const int MM, const int NU, const float *x, size_t ldx, const float *w, size_t panel_stride,
                         size_t k_stride, size_t k, float *c, size_t ldc, int accumulate) {
    v16 acc[12][4];
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) acc[m][u] = accumulate ? v_load(c + (size_t)m * ldc + (size_t)u * LANES) : v_zero();
    for (size_t i = 0; i < k; i++) {
        v16 weights[4];
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            const float *p = w + (size_t)u * panel_stride + i * k_stride;
            weights[u] = v_load(p);
            __builtin_prefetch((const char *)p + PREFETCH_BYTES);
        }
#pragma GCC unroll 12
        for (int m = 0; m < MM; m++) {
            v16 value = v_set1(x[(size_t)m * ldx + i]);
#pragma GCC unroll 4
            for (int u = 0; u < NU; u++) acc[m][u] = v_fma(weights[u], value, acc[m][u]);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) v_store(c + (size_t)m * ldc + (size_t)u * LANES, acc[m][u]);
}

/* The next block of rows: as few blocks as the tiles allow, of nearly equal size. */
INLINE size_t block_rows(size_t rows, size_t most) {
    size_t blocks = (rows + most - 1) / most;
    return (rows + blocks - 1) / blocks;
}

TARGET static void product_float32(size_t rows, size_t panels, const float *x, size_t ldx, const float *w, size_t panel_stride,
                                   size_t k_stride, size_t k, float *c, size_t ldc, int accumulate) {
    while (rows > 0) {
        size_t block = block_rows(rows, TALL_ROWS), panel = 0;
        if (block <= WIDE_ROWS && panels % WIDE_PANELS == 0) {
            for (; panel < panels; panel += WIDE_PANELS) switch (block) {
#define CASE(MM)                                                                                                           \
    case MM:                                                                                                               \
        tile_float32(MM, WIDE_PANELS, x, ldx, w + panel * panel_stride, panel_stride, k_stride, k, c + panel * LANES, ldc, \
                     accumulate);                                                                                          \
        break;
                    WIDE_CASES(CASE)
#undef CASE
                }
        } else {
            for (; panel < panels; panel += TALL_PANELS) switch (block) {
#define CASE(MM)                                                                                                           \
    case MM:                                                                                                               \
        tile_float32(MM, TALL_PANELS, x, ldx, w + panel * panel_stride, panel_stride, k_stride, k, c + panel * LANES, ldc, \
                     accumulate);                                                                                          \
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
