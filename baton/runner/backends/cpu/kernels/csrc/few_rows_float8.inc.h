/* Products of a few rows with weights in float8 on vectors: codes are widened in registers and multiplied at once, without a way
 * through scratch memory. The chains are the same, so the bits are. The includer defines the shapes of its register tiles:
 * FLOAT8_WIDE_CASES for four panels, FLOAT8_TALL_CASES for two panels and more rows, up to FLOAT8_BLOCK_ROWS of them. */

/* How far ahead codes are prefetched; two panels go through a piece twice, so they prefetch the next piece. */
enum { FEW_CODES_BYTES = 16 << 10, WIDE_AHEAD_BYTES = 8 << 10, TALL_AHEAD_BYTES = FEW_CODES_BYTES };

/* Two panels of pairs of k, and the sum of a row's pair times one of them, added odd element first. */
#ifdef DPBF16
struct two_panels {
    __m512i pairs[2];
};
INLINE struct two_panels widen_panels(const uint8_t *codes) {
    struct two_panels wide;
    widen_e4m3(_mm512_loadu_si512(codes), wide.pairs);
    return wide;
}
INLINE v16 add_pair(v16 sum, const struct two_panels *wide, int panel, const bf16_row *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_dpbf16_ps(sum, (__m512bh)wide->pairs[panel], (__m512bh)_mm512_set1_epi32(pair));
}
#else
struct two_panels {
    v16 odd[2], even[2];
};
INLINE struct two_panels widen_panels(const uint8_t *codes) {
    struct two_panels wide;
    v_widen_e4m3_pairs(codes, wide.odd, wide.even);
    return wide;
}
INLINE v16 add_pair(v16 sum, const struct two_panels *wide, int panel, const bf16_row *x) {
    return v_fma(wide->even[panel], v_set1(x[1]), v_fma(wide->odd[panel], v_set1(x[0]), sum));
}
#endif

/* A piece of a scale group, of all 64 columns. */
struct float8_piece {
    const uint8_t *codes;
    const float *scales;
    size_t pairs;
    int starts, ends; /* whether it is the first and the last of its scale group */
    int continues;    /* whether there are totals of scale groups before it */
};

/* sums[MM][NU * 16] (+)= x[MM][pairs] * the piece's columns from a panel on; the last piece adds the scaled sums to the totals. */
INLINE void tile_float8(const int MM, const int NU, const struct float8_piece *piece, const bf16_row *x, size_t ldx, size_t panel,
                        float *sums, float *totals) {
    const size_t ahead = NU == GROUP_PANELS ? WIDE_AHEAD_BYTES : TALL_AHEAD_BYTES;
    const uint8_t *codes = piece->codes + panel * 2 * LANES;
    v16 acc[FLOAT8_BLOCK_ROWS][GROUP_PANELS];
    sums += panel * LANES;
    totals += panel * LANES;
#pragma GCC unroll 10
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) acc[m][u] = piece->starts ? v_zero() : v_load(sums + m * GROUP_COLUMNS + u * LANES);
    for (size_t i = 0; i < piece->pairs; i++, codes += 2 * GROUP_COLUMNS)
#pragma GCC unroll 2
        for (int u = 0; u < NU; u += 2) {
            const struct two_panels wide = widen_panels(codes + u * 2 * LANES);
            __builtin_prefetch(codes + u * 2 * LANES + ahead);
#pragma GCC unroll 10
            for (int m = 0; m < MM; m++) {
                const bf16_row *pair = x + (size_t)m * ldx + 2 * i;
                acc[m][u] = add_pair(acc[m][u], &wide, 0, pair);
                acc[m][u + 1] = add_pair(acc[m][u + 1], &wide, 1, pair);
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

TARGET static void rows_of_piece(size_t rows, const struct float8_piece *piece, const bf16_row *x, size_t ldx, float *sums,
                                 float *totals) {
    switch (rows) {
#define WIDE(MM)                                            \
    case MM:                                                \
        tile_float8(MM, 4, piece, x, ldx, 0, sums, totals); \
        break;
#define TALL(MM)                                                                                                         \
    case MM:                                                                                                             \
        for (size_t panel = 0; panel < GROUP_PANELS; panel += 2) tile_float8(MM, 2, piece, x, ldx, panel, sums, totals); \
        break;
        FLOAT8_WIDE_CASES(WIDE)
        FLOAT8_TALL_CASES(TALL)
#undef WIDE
#undef TALL
    }
}

/* totals[rows][64] = x times the records of one group of columns; room: for rows of x as bf16_row. */
INLINE void few_rows_float8(const struct linear_call *call, size_t rows, const uint16_t *x, const uint8_t *at, float *sums,
                            float *totals, bf16_row *room) {
    /* Tiles and blocks of rows that share codes read them again from the first-level cache. */
    const size_t most = FEW_CODES_BYTES / GROUP_COLUMNS;
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
            for (size_t row = 0, block; row < rows; row += block) {
                block = block_rows(rows - row, FLOAT8_BLOCK_ROWS);
                size_t ldx, to = row * GROUP_COLUMNS;
                const bf16_row *items = row_items(x + row * call->x_stride + from, call->x_stride, block, piece.pairs, room, &ldx);
                rows_of_piece(block, &piece, items, ldx, sums + to, totals + to);
            }
        }
    }
}
