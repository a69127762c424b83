/* Products of a few rows with weights in float8, with vdpbf16ps: codes are widened in registers and multiplied at once, without a way
 * through scratch memory. The chains are the same, so the bits are. */

enum { FEW_TALL_ROWS = 10, FEW_CODES_BYTES = 16 << 10, FLOAT8_AHEAD_BYTES = 16 << 10 };

/* A piece of a scale group, of all 64 columns. */
struct float8_piece {
    const uint8_t *codes;
    const float *scales;
    size_t pairs;
    int starts, ends; /* whether it is the first and the last of its scale group */
    int continues;    /* whether there are totals of scale groups before it */
};

/* sums[MM][NU * 16] (+)= x[MM][pairs] * the piece's columns from a panel on; the last piece adds the scaled sums to the totals. */
INLINE void tile_float8(const int MM, const int NU, const struct float8_piece *piece, const uint16_t *x, size_t ldx, size_t panel,
                        float *sums, float *totals) {
    const uint8_t *codes = piece->codes + panel * 2 * LANES;
    v16 acc[FEW_TALL_ROWS][GROUP_PANELS];
    sums += panel * LANES;
    totals += panel * LANES;
#pragma GCC unroll 10
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) acc[m][u] = piece->starts ? v_zero() : v_load(sums + m * GROUP_COLUMNS + u * LANES);
    for (size_t i = 0; i < piece->pairs; i++, codes += 2 * GROUP_COLUMNS)
#pragma GCC unroll 2
        for (int u = 0; u < NU; u += 2) {
            __m512i wide[2];
            widen_e4m3(_mm512_loadu_si512(codes + u * 2 * LANES), wide);
            __builtin_prefetch(codes + u * 2 * LANES + FLOAT8_AHEAD_BYTES);
#pragma GCC unroll 10
            for (int m = 0; m < MM; m++) {
                int32_t elements;
                memcpy(&elements, x + (size_t)m * ldx + 2 * i, sizeof elements);
                __m512bh pair = (__m512bh)_mm512_set1_epi32(elements);
                acc[m][u] = _mm512_dpbf16_ps(acc[m][u], (__m512bh)wide[0], pair);
                acc[m][u + 1] = _mm512_dpbf16_ps(acc[m][u + 1], (__m512bh)wide[1], pair);
            }
        }
#pragma GCC unroll 10
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) {
            float *sum = sums + m * GROUP_COLUMNS + u * LANES, *total = totals + m * GROUP_COLUMNS + u * LANES;
            if (!piece->ends)
                v_store(sum, acc[m][u]);
            else
                v_store(total, v_fma(v_load(piece->scales + (panel + (size_t)u) * LANES), acc[m][u],
                                     piece->continues ? v_load(total) : v_zero()));
        }
}

TARGET static void few_rows_of_piece(size_t rows, const struct float8_piece *piece, const uint16_t *x, size_t ldx, float *sums,
                                     float *totals) {
    for (size_t block; rows > 0; rows -= block) {
        block = block_rows(rows, FEW_TALL_ROWS);
        switch (block) {
#define WIDE(MM)                                            \
    case MM:                                                \
        tile_float8(MM, 4, piece, x, ldx, 0, sums, totals); \
        break;
#define TALL(MM)                                                                                                         \
    case MM:                                                                                                             \
        for (size_t panel = 0; panel < GROUP_PANELS; panel += 2) tile_float8(MM, 2, piece, x, ldx, panel, sums, totals); \
        break;
            WIDE(1) WIDE(2) WIDE(3) WIDE(4) TALL(5) TALL(6) TALL(7) TALL(8) TALL(9) TALL(10)
#undef WIDE
#undef TALL
        }
        x += block * ldx;
        sums += block * GROUP_COLUMNS;
        totals += block * GROUP_COLUMNS;
    }
}

/* totals[rows][64] = x times the records of one group of columns. */
INLINE void few_rows_float8(const struct linear_call *call, size_t rows, const uint16_t *x, const uint8_t *at, float *sums,
                            float *totals) {
    /* Where there are several blocks of rows, they read the codes of a piece from the first-level cache. */
    const size_t most = rows <= FEW_TALL_ROWS ? call->k : FEW_CODES_BYTES / GROUP_COLUMNS;
    for (size_t start = 0, end; start < call->k; start = end) {
        struct float8_piece piece = {.scales = (const float *)at, .continues = start > 0};
        at += FLOAT8_SCALE_BYTES;
        end = call->k - start < call->scale_group ? call->k : start + call->scale_group;
        for (size_t from = start, count; from < end; from += count, at += float8_codes_bytes(count)) {
            count = end - from < most ? end - from : most;
            piece.codes = at;
            piece.pairs = count / 2;
            piece.starts = from == start;
            piece.ends = from + count == end;
            few_rows_of_piece(rows, &piece, x + from, call->x_stride, sums, totals);
        }
    }
}
