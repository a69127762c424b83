/* The product of a few rows with panels of 16 columns, and linear layers made of it; included once for each instruction set.
 *
 * The includer defines TARGET, the v16 vectors, and the shapes of its register tiles: WIDE_CASES for WIDE_PANELS panels
 * at a time and few rows, TALL_CASES for TALL_PANELS panels and up to TALL_ROWS rows. DPBF16 says that it has
 * vdpbf16ps.
 */
#include "kernels.h"

#include <string.h>

/* How far ahead of use the weights are asked for, in bytes: about one memory latency at full bandwidth. */
enum { PREFETCH_BYTES = 2048 };

#ifdef DPBF16
typedef uint32_t bf16_row; /* pairs as they lie in memory */
enum { ROW_ITEMS_PER_PAIR = 1 };
#else
typedef float bf16_row; /* pairs as floats, odd element first */
enum { ROW_ITEMS_PER_PAIR = 2 };
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

/* c[MM][NU * 16] (+)= x[MM][k] * panels */
INLINE void tile_float32(const int MM, const int NU, const float *x, size_t ldx, const float *w, size_t panel_stride, size_t k,
                         float *c, size_t ldc, int accumulate) {
    v16 acc[12][4];
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) acc[m][u] = accumulate ? v_load(c + (size_t)m * ldc + (size_t)u * LANES) : v_zero();
    for (size_t i = 0; i < k; i++) {
        v16 weights[4];
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            const float *p = w + (size_t)u * panel_stride + i * LANES;
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

/* The same for bfloat16 pairs, each odd element first; panel_stride counts bfloat16 elements, ldx row items. */
INLINE void tile_bfloat16(const int MM, const int NU, const bf16_row *x, size_t ldx, const uint16_t *w, size_t panel_stride,
                          size_t pairs, float *c, size_t ldc) {
    v16 acc[12][4];
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) acc[m][u] = v_zero();
    for (size_t i = 0; i < pairs; i++) {
#ifdef DPBF16
        __m512i weights[4];
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            const uint16_t *p = w + (size_t)u * panel_stride + i * 2 * LANES;
            weights[u] = _mm512_loadu_si512(p);
            __builtin_prefetch((const char *)p + PREFETCH_BYTES);
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
            const uint16_t *p = w + (size_t)u * panel_stride + i * 2 * LANES;
            odd[u] = v_load_odd(p);
            even[u] = v_load_even(p);
            __builtin_prefetch((const char *)p + PREFETCH_BYTES);
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

/* The next block of rows: as few blocks as the tiles allow, of nearly equal size. */
INLINE size_t block_rows(size_t rows) {
    size_t blocks = (rows + TALL_ROWS - 1) / TALL_ROWS;
    return (rows + blocks - 1) / blocks;
}

TARGET static void product_float32(size_t rows, size_t panels, const float *x, size_t ldx, const float *w, size_t panel_stride,
                                   size_t k, float *c, size_t ldc, int accumulate) {
    while (rows > 0) {
        size_t block = block_rows(rows), panel = 0;
        if (block <= WIDE_ROWS && panels % WIDE_PANELS == 0) {
            for (; panel < panels; panel += WIDE_PANELS) switch (block) {
#define CASE(MM)                                                                                                           \
    case MM:                                                                                                               \
        tile_float32(MM, WIDE_PANELS, x, ldx, w + panel * panel_stride, panel_stride, k, c + panel * LANES, ldc, accumulate); \
        break;
                    WIDE_CASES(CASE)
#undef CASE
                }
        } else {
            for (; panel < panels; panel += TALL_PANELS) switch (block) {
#define CASE(MM)                                                                                                           \
    case MM:                                                                                                               \
        tile_float32(MM, TALL_PANELS, x, ldx, w + panel * panel_stride, panel_stride, k, c + panel * LANES, ldc, accumulate); \
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

TARGET static void product_bfloat16(size_t rows, size_t panels, const bf16_row *x, size_t ldx, const uint16_t *w,
                                    size_t panel_stride, size_t pairs, float *c, size_t ldc) {
    while (rows > 0) {
        size_t block = block_rows(rows), panel = 0;
        if (block <= WIDE_ROWS && panels % WIDE_PANELS == 0) {
            for (; panel < panels; panel += WIDE_PANELS) switch (block) {
#define CASE(MM)                                                                                                         \
    case MM:                                                                                                             \
        tile_bfloat16(MM, WIDE_PANELS, x, ldx, w + panel * panel_stride, panel_stride, pairs, c + panel * LANES, ldc); \
        break;
                    WIDE_CASES(CASE)
#undef CASE
                }
        } else {
            for (; panel < panels; panel += TALL_PANELS) switch (block) {
#define CASE(MM)                                                                                                         \
    case MM:                                                                                                             \
        tile_bfloat16(MM, TALL_PANELS, x, ldx, w + panel * panel_stride, panel_stride, pairs, c + panel * LANES, ldc); \
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

#include "linear_store.inc.h"

TARGET static void linear_float32(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    const float *w = (const float *)call->packed + part.column * call->k;
    float *c = scratch;
    struct epilogue epilogue;
    open_epilogue(&epilogue, call, DTYPE_FLOAT32, part.column);
    for (size_t row = part.row, block; row < part.end; row += block) {
        block = block_rows(part.end - row);
        product_float32(block, GROUP_PANELS, (const float *)call->x + row * call->k, call->k, w, call->k * LANES, call->k, c,
                        GROUP_COLUMNS, 0);
        store_float32(&epilogue, (float *)call->out + row * call->n + part.column, call->n, block, c);
    }
}

TARGET static void linear_bfloat16(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    size_t pairs = call->k / 2, items = pairs * ROW_ITEMS_PER_PAIR;
    const uint16_t *w = (const uint16_t *)call->packed + part.column * call->k;
    float *c = scratch;
    struct epilogue epilogue;
    open_epilogue(&epilogue, call, DTYPE_BFLOAT16, part.column);
    for (size_t row = part.row, block; row < part.end; row += block) {
        const uint16_t *x = (const uint16_t *)call->x + row * call->k;
        block = block_rows(part.end - row);
#ifdef DPBF16
        const bf16_row *rows = (const bf16_row *)x;
#else
        bf16_row *rows = (bf16_row *)(c + TALL_ROWS * GROUP_COLUMNS);
        for (size_t m = 0; m < block; m++) widen_row(rows + m * items, x + m * call->k, call->k);
#endif
        product_bfloat16(block, GROUP_PANELS, rows, items, w, call->k * LANES, pairs, c, GROUP_COLUMNS);
        store_bfloat16(&epilogue, (uint16_t *)call->out + row * call->n + part.column, call->n, block, c);
    }
}
