/* Tiles of products with quantized weights: a few rows of x times a piece of k, which stays in a cache while block after block of
 * rows is multiplied with it. Included by product_quantized.inc.h. */
#include "pieces_quantized.inc.h"

/* The length of a piece of k in bytes of codes: few_piece_bytes of the first-level cache while there are few rows, else a part of
 * the second-level cache. Weights are prefetched few_piece_bytes ahead. */
enum { MANY_PIECE_BYTES = 64 << 10 };

/* Adds the products of four elements of a row to sums[NU]; `place` is that of their codes in a block of x. */
INLINE void add_four(const int BITS, const int NU, const struct quantized_block *row, size_t place, const i16 w[4], i16 sums[4]) {
    int32_t four;
    memcpy(&four, row->codes + place, sizeof four);
    i16 elements = i_set1(four);
#pragma GCC unroll 4
    for (int u = 0; u < NU; u++) sums[u] = i_dot(BITS, sums[u], w[u], elements);
}

/* Adds the products of four elements of k to sums[MM][NU]. */
INLINE void add_step(const int BITS, const int MM, const int NU, const char *x, size_t ldx, const uint8_t *codes, size_t ahead,
                     size_t place, i16 sums[12][4]) {
    i16 w[4];
    load_four(BITS, NU, codes, ahead, w);
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++) add_four(BITS, NU, row_block(x, ldx, m), place, w, sums[m]);
    IN_ORDER();
}

/* What the sums of a block's products begin with: minus the weights' zeros times the sum of x. */
INLINE void begin_sums(const int MM, const int NU, const char *x, size_t ldx, const uint8_t *zeros, i16 sums[12][4]) {
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) sums[m][u] = i_set1(row_block(x, ldx, m)->start);
    if (zeros == NULL) return;
#pragma GCC unroll 12
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++)
            sums[m][u] = i_add_product(sums[m][u], i_load_bytes(zeros + u * LANES), i_set1(row_block(x, ldx, m)->minus_sum));
}

/* Adds a row's share of a block, which is in integers, to the float32 sums c[NU * 16]. */
INLINE void add_block(const enum numbers NUMBERS, const int NU, const struct quantized_block *row, const v16 scale[4],
                      const float *offsets, const i16 sums[4], float *c) {
#pragma GCC unroll 4
    for (int u = 0; u < NU; u++) {
        v16 total = v_fma(v_mul(scale[u], v_set1(row->scale)), v_from_i(sums[u]), v_load(c + u * LANES));
        if (NUMBERS == WIDENED_OFFSETS) total = v_fma(v_load(offsets + u * LANES), v_set1(row->weighted_sum), total);
        v_store(c + u * LANES, total);
    }
}

/* c[MM][NU * 16] += the piece times the columns from a panel on. x begins at the piece, and has rows of ldx bytes. BLOCK: the
 * blocks' length where the compiler knows it, else 0.
 *
 * A row's sums are added to c as soon as they are complete, so that conversions and float32 arithmetic of one row are computed
 * beside the integer products of the next. */
INLINE void tile_quantized(const int BITS, const enum numbers NUMBERS, const size_t BLOCK, const int MM, const int NU, size_t length,
                           const char *x, size_t ldx, const struct piece *piece, size_t panel, float *c) {
    const size_t four_bytes = GROUP_COLUMNS * 4 * BITS / 8, first = panel * LANES, ahead = few_piece_bytes;
    const size_t last = (BLOCK > 0 ? BLOCK : length) - 4;
    c += first;
    for (const struct piece_block *block = piece->block, *end = block + piece->blocks; block < end; block++) {
        const uint8_t *codes = block->codes + panel * 64 * BITS / 8, *zeros = block->zeros == NULL ? NULL : block->zeros + first;
        const uint8_t *halves = block->halves + 2 * first;
        const float *scales = block->widened->scales + first, *offsets = block->widened->offsets + first;
        i16 sums[12][4], w[4];
        v16 scale[4];
        begin_sums(MM, NU, x, ldx, zeros, sums);
        size_t place = 0;
        if (BLOCK > 0)
#pragma GCC unroll 8
            for (; place < last; place += 4, codes += four_bytes) add_step(BITS, MM, NU, x, ldx, codes, ahead, place, sums);
        else
#pragma GCC unroll 1
            for (; place < last; place += 4, codes += four_bytes) add_step(BITS, MM, NU, x, ldx, codes, ahead, place, sums);
        load_four(BITS, NU, codes, ahead, w);
#pragma GCC unroll 4
        for (int u = 0; u < NU; u++) scale[u] = NUMBERS == HALVES ? v_load_f16(halves + 2 * u * LANES) : v_load(scales + u * LANES);
#pragma GCC unroll 12
        for (int m = 0; m < MM; m++) {
            const struct quantized_block *row = row_block(x, ldx, m);
            add_four(BITS, NU, row, last, w, sums[m]);
            add_block(NUMBERS, NU, row, scale, offsets, sums[m], c + m * GROUP_COLUMNS);
            IN_ORDER();
        }
        x += sizeof(struct quantized_block) + last + 4;
    }
}

/* c[rows][64] += a piece of k, for all 64 columns; length: of a block. */
INLINE void multiply_piece(const int BITS, const enum numbers NUMBERS, const size_t BLOCK, size_t rows, size_t length, const char *x,
                           size_t ldx, const struct piece *piece, float *c) {
    for (size_t count; rows > 0; rows -= count, x += count * ldx, c += count * GROUP_COLUMNS) {
        count = block_rows(rows, QUANTIZED_TALL_ROWS);
#define WIDE_TILE(MM) case MM: tile_quantized(BITS, NUMBERS, BLOCK, MM, 4, length, x, ldx, piece, 0, c); break;
#define TALL_TILE(MM) case MM: tile_quantized(BITS, NUMBERS, BLOCK, MM, 2, length, x, ldx, piece, panel, c); break;
        if (count <= QUANTIZED_WIDE_ROWS) {
            switch (count) { QUANTIZED_WIDE_CASES(WIDE_TILE) }
        } else {
            for (size_t panel = 0; panel < GROUP_PANELS; panel += 2)
                switch (count) { QUANTIZED_TALL_CASES(TALL_TILE) }
        }
#undef WIDE_TILE
#undef TALL_TILE
    }
}

typedef void (*piece_function)(size_t rows, size_t length, const char *x, size_t ldx, const struct piece *piece, float *c);

#define PIECE(BITS, NUMBERS, BLOCK)                                                                                              \
    TARGET static void piece_##BITS##_##NUMBERS##_##BLOCK(size_t rows, size_t length, const char *x, size_t ldx,                 \
                                                          const struct piece *piece, float *c) {                                \
        multiply_piece(BITS, NUMBERS, BLOCK, rows, length, x, ldx, piece, c);                                                    \
    }
PIECE(4, WIDENED, 0)
PIECE(5, WIDENED, 0)
PIECE(6, WIDENED, 0)
PIECE(8, WIDENED, 0)
PIECE(4, WIDENED_OFFSETS, 0)
PIECE(5, WIDENED_OFFSETS, 0)
PIECE(6, WIDENED_OFFSETS, 0)
PIECE(8, WIDENED_OFFSETS, 0)
#if QUANTIZED_UNROLLED
PIECE(5, HALVES, 32)
PIECE(5, WIDENED_OFFSETS, 32)
PIECE(6, WIDENED, 16)
PIECE(4, HALVES, 32)
PIECE(8, HALVES, 32)
PIECE(4, WIDENED, 32)
PIECE(8, WIDENED, 32)
PIECE(4, WIDENED_OFFSETS, 32)
PIECE(8, WIDENED_OFFSETS, 32)
#endif
#undef PIECE

/* The function for pieces of a format's weights, and how it reads scales. Nearly all formats have blocks of MAX_BLOCK elements. */
INLINE piece_function piece_function_of(const struct quantized_format *f, enum numbers *numbers) {
    const int is_4 = f->bits == 4, is_5 = f->bits == 5, is_6 = f->bits == 6;
    *numbers = f->offsets == NUMBER_NONE ? WIDENED : WIDENED_OFFSETS;
#if QUANTIZED_UNROLLED
    if (f->block == 16 && is_6 && *numbers == WIDENED) return piece_6_WIDENED_16;
    if (f->block == MAX_BLOCK && is_5 && *numbers == WIDENED_OFFSETS) return piece_5_WIDENED_OFFSETS_32;
    if (f->block == MAX_BLOCK && is_5 && f->scales == NUMBER_FLOAT16) {
        *numbers = HALVES;
        return piece_5_HALVES_32;
    }
    if (f->block == MAX_BLOCK && (is_4 || f->bits == 8)) {
        if (*numbers == WIDENED_OFFSETS) return is_4 ? piece_4_WIDENED_OFFSETS_32 : piece_8_WIDENED_OFFSETS_32;
        if (f->scales != NUMBER_FLOAT16) return is_4 ? piece_4_WIDENED_32 : piece_8_WIDENED_32;
        *numbers = HALVES;
        return is_4 ? piece_4_HALVES_32 : piece_8_HALVES_32;
    }
#endif
    if (*numbers == WIDENED_OFFSETS)
        return is_4   ? piece_4_WIDENED_OFFSETS_0
               : is_5 ? piece_5_WIDENED_OFFSETS_0
               : is_6 ? piece_6_WIDENED_OFFSETS_0
                      : piece_8_WIDENED_OFFSETS_0;
    return is_4 ? piece_4_WIDENED_0 : is_5 ? piece_5_WIDENED_0 : is_6 ? piece_6_WIDENED_0 : piece_8_WIDENED_0;
}
