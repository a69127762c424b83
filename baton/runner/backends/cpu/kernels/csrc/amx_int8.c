/* Products of many rows with quantized weights (quantized.h) on AMX's tiles of 8-bit integers. Only the integer sums of a block are
 * theirs; what follows is the float32 arithmetic of all other instruction sets, in their order, so the bits are the same.
 *
 * For a piece of k the codes of 64 columns are unpacked to bytes once, in the layout that a tile of weights has: a line has four
 * elements of k of 16 columns. A tile product multiplies a block of 16 rows with 16 columns; its sums are stored, and a little
 * later vectors scale and add them while tiles multiply the next blocks.
 *
 * Not timed: no machine with AMX was at hand. By an estimate for Intel's fourth generation of Xeon, 16 rows by 16 columns by a
 * block of 32 take 16 cycles on the tiles, and 24 on the two ports of vectors: a conversion, a product and a fused multiply-add for
 * 16 sums. vpdpbusd takes 64 cycles besides those 24. Unpacking 64 columns takes about 40 cycles a block: 16 rows, which take 100
 * then and 350 with vpdpbusd, are worth it; of few rows most of a tile product's time would go to unpacking, and they wait for
 * memory either way. docs/decisions/0029 has more.
 */
#if defined(__x86_64__) && defined(__linux__)
#define TARGET __attribute__((target("amx-tile,amx-int8,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "vector_avx512.h"
#include "amx_tiles.h"
#include "quantized.h"

#define WIDE_PANELS 4
#define WIDE_ROWS 1
#define WIDE_CASES(F) F(1)
#define TALL_PANELS 1
#define TALL_ROWS 1
#define TALL_CASES(F) F(1)
#include "functions.inc.h"
#include "product_float32.inc.h"
#include "adapters.inc.h"
#include "linear_float32.inc.h"
#include "integers_avx512_vnni.h"
#include "pieces_quantized.inc.h"

/* TILED_BLOCKS: the most blocks of a piece. Two panels of its weights (16 KB), 16 rows of x (12 KB) and the sums (16 KB) are in the
 * first-level cache together. CHUNK_BLOCKS: of how many blocks float32 sums stay in registers. VECTOR_ROWS: of how many rows. */
enum { TILE_ROWS = 16, TILED_BLOCKS = 16, CHUNK_BLOCKS = 4, PANELS = 2, VECTOR_ROWS = 8, BLOCK_BYTES = MAX_BLOCK * LANES };

/* The sums of a block of TILE_ROWS rows of x, for two panels. */
typedef int32_t block_sums[TILE_ROWS][PANELS][LANES];

/* What a piece is multiplied with, and room for it. */
struct tiled_piece {
    _Alignas(64) uint8_t codes[GROUP_PANELS][TILED_BLOCKS][BLOCK_BYTES];
    _Alignas(64) block_sums sums[2][CHUNK_BLOCKS];
    struct piece piece;
    const struct quantized_format *format;
    const char *x; /* rows of ldx bytes, from the piece on */
    size_t ldx, rows;
    float *c; /* [rows][64] */
};

/* Up to CHUNK_BLOCKS blocks of up to TILE_ROWS rows. */
struct chunk {
    size_t row, rows, block, blocks;
};

/* The tile products of a chunk that are left, each panel's of a block after the other's; the rest is of the next block. */
struct tile_products {
    const int8_t *x;
    const uint8_t *w;
    block_sums *sums;
    size_t ldx, block_bytes, left;
};

/* Tile registers 0 to 3 have sums, 4 and 5 blocks of rows of x, and 6 and 7 blocks of weights. */
TARGET static void configure(size_t rows, size_t block) {
    const uint8_t m = (uint8_t)rows, lines = (uint8_t)(block / 4);
    const uint16_t bytes = (uint16_t)block;
    struct tile_config config = {.palette = 1, .rows = {m, m, m, m, m, m, lines, lines},
                                 .row_bytes = {64, 64, 64, 64, bytes, bytes, 64, 64}};
    WRITTEN(&config);
    _tile_loadconfig(&config);
}

/* One tile product. UNSIGNED: whether codes of the weight are; otherwise their zero is subtracted. */
#define TILE_PRODUCT(SUMS, ROWS, CODES, panel)                                                \
    do {                                                                                      \
        _tile_loadd(CODES, p->w + (panel) * sizeof(uint8_t[TILED_BLOCKS][BLOCK_BYTES]), 64);  \
        _tile_zero(SUMS);                                                                     \
        if (UNSIGNED)                                                                         \
            _tile_dpbsud(SUMS, ROWS, CODES);                                                  \
        else                                                                                  \
            _tile_dpbssd(SUMS, ROWS, CODES);                                                  \
        _tile_stored(SUMS, (*p->sums)[0][panel], sizeof(int32_t[PANELS][LANES]));             \
    } while (0)

/* Computes the next tile product, if there is one. Neighbours use other registers, so that they overlap. */
INLINE void multiply_next(const int UNSIGNED, struct tile_products *p) {
    if (p->left == 0) return;
    const size_t number = p->left--;
    switch (number % 4) {
    case 0:
        _tile_loadd(4, p->x, p->ldx);
        TILE_PRODUCT(0, 4, 6, 0);
        return;
    case 3: TILE_PRODUCT(1, 4, 7, 1); break;
    case 2:
        _tile_loadd(5, p->x, p->ldx);
        TILE_PRODUCT(2, 5, 6, 0);
        return;
    default: TILE_PRODUCT(3, 5, 7, 1);
    }
    p->x += p->block_bytes;
    p->w += BLOCK_BYTES;
    p->sums++;
}

/* Adds the sums of MM rows of a chunk, from a row of it on, to c, as add_block does (tiles_quantized.inc.h); beside each block one
 * tile product of `next` is computed. */
INLINE void add_chunk(const int UNSIGNED, const int OFFSETS, const int MM, const struct tiled_piece *work,
                      const struct chunk *chunk, size_t row, size_t panel, const block_sums *sums, struct tile_products *next) {
    const size_t block_bytes = quantized_block_bytes(work->format), first = panel * LANES, ldx = work->ldx;
    const char *x = work->x + (chunk->row + row) * ldx + chunk->block * block_bytes;
    float *c = work->c + (chunk->row + row) * GROUP_COLUMNS + first;
    size_t four_rows = 4 * ldx;
    __asm__("" : "+r"(four_rows)); /* so that addresses of 8 rows need 4 registers */
    v16 totals[VECTOR_ROWS][PANELS], scale[PANELS], offset[PANELS];
    i16 zeros[PANELS];
#pragma GCC unroll 8
    for (int m = 0; m < MM; m++)
        for (int u = 0; u < PANELS; u++) totals[m][u] = v_load(c + m * GROUP_COLUMNS + u * LANES);
    for (size_t i = 0; i < chunk->blocks; i++, x += block_bytes) {
        const struct piece_block *block = &work->piece.block[chunk->block + i];
        const int32_t *of_rows = &sums[i][row][0][0];
        multiply_next(UNSIGNED, next);
        for (int u = 0; u < PANELS; u++) {
            scale[u] = v_load(block->widened->scales + first + u * LANES);
            if (OFFSETS) offset[u] = v_load(block->widened->offsets + first + u * LANES);
            if (UNSIGNED)
                zeros[u] = block->zeros == NULL ? i_set1(work->format->zero) : i_load_bytes(block->zeros + first + u * LANES);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MM; m++) {
            const struct quantized_block *of_row = row_block(m < 4 ? x : x + four_rows, ldx, m % 4);
            for (int u = 0; u < PANELS; u++) {
                i16 sum = i_load((const uint8_t *)(of_rows + (m * PANELS + u) * LANES));
                if (UNSIGNED) sum = i_add_product(sum, zeros[u], i_set1(of_row->minus_sum));
                totals[m][u] = v_fma(v_mul(scale[u], v_set1(of_row->scale)), v_from_i(sum), totals[m][u]);
                if (OFFSETS) totals[m][u] = v_fma(offset[u], v_set1(of_row->weighted_sum), totals[m][u]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MM; m++)
        for (int u = 0; u < PANELS; u++) v_store(c + m * GROUP_COLUMNS + u * LANES, totals[m][u]);
}

/* The chunk with a number: all of a piece's of 16 rows, then those of the next 16. */
INLINE struct chunk chunk_at(const struct tiled_piece *work, size_t number) {
    const size_t blocks = work->piece.blocks, across = (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    struct chunk chunk = {.row = number / across * TILE_ROWS, .block = number % across * CHUNK_BLOCKS};
    chunk.rows = work->rows - chunk.row < TILE_ROWS ? work->rows - chunk.row : TILE_ROWS;
    chunk.blocks = blocks - chunk.block < CHUNK_BLOCKS ? blocks - chunk.block : CHUNK_BLOCKS;
    return chunk;
}

/* Begins the tile products of a chunk, whose sums go to one of the two places by turns. */
INLINE struct tile_products tile_products(struct tiled_piece *work, const struct chunk *chunk, size_t panel, size_t turn) {
    const size_t block_bytes = quantized_block_bytes(work->format);
    const char *x = work->x + chunk->row * work->ldx + chunk->block * block_bytes;
    return (struct tile_products){.x = ((const struct quantized_block *)x)->codes, .w = work->codes[panel][chunk->block],
                                  .sums = work->sums[turn % 2], .ldx = work->ldx, .block_bytes = block_bytes,
                                  .left = PANELS * chunk->blocks};
}

/* c += all rows times a piece, for two panels. */
INLINE void multiply_panels(const int UNSIGNED, const int OFFSETS, struct tiled_piece *work, size_t panel) {
    const size_t across = (work->piece.blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    const size_t chunks = (work->rows + TILE_ROWS - 1) / TILE_ROWS * across;
    struct chunk chunk = chunk_at(work, 0);
    struct tile_products products = tile_products(work, &chunk, panel, 0);
    configure(chunk.rows, work->format->block);
    while (products.left > 0) multiply_next(UNSIGNED, &products);
    for (size_t i = 0; i < chunks; i++) {
        struct chunk following = chunk;
        if (i + 1 < chunks) {
            following = chunk_at(work, i + 1);
            products = tile_products(work, &following, panel, i + 1);
            if (following.rows != chunk.rows) configure(following.rows, work->format->block); /* no sums are in tiles here */
        }
        const block_sums *sums = work->sums[i % 2];
        size_t row = 0;
        for (; row + VECTOR_ROWS <= chunk.rows; row += VECTOR_ROWS)
            add_chunk(UNSIGNED, OFFSETS, VECTOR_ROWS, work, &chunk, row, panel, sums, &products);
        for (; row < chunk.rows; row++) add_chunk(UNSIGNED, OFFSETS, 1, work, &chunk, row, panel, sums, &products);
        while (products.left > 0) multiply_next(UNSIGNED, &products);
        chunk = following;
    }
}

/* Unpacks the codes of a piece, less a zero, to bytes. */
INLINE void unpack(const int BITS, struct tiled_piece *work, int zero) {
    const __m512i zeros = _mm512_set1_epi8((char)zero);
    for (size_t block = 0; block < work->piece.blocks; block++) {
        const uint8_t *codes = work->piece.block[block].codes;
        for (size_t line = 0; line < work->format->block / 4; line++, codes += codes_bytes(work->format, 4)) {
            i16 w[GROUP_PANELS];
            load_four(BITS, GROUP_PANELS, codes, few_piece_bytes, w);
            for (int u = 0; u < GROUP_PANELS; u++)
                _mm512_store_si512(&work->codes[u][block][line * 64], _mm512_sub_epi8(w[u], zeros));
        }
    }
}

typedef void (*panels_function)(struct tiled_piece *work, size_t panel);
typedef void (*unpack_function)(struct tiled_piece *work, int zero);

#define PANELS_FUNCTION(NAME, UNSIGNED, OFFSETS) \
    TARGET static void NAME(struct tiled_piece *work, size_t panel) { multiply_panels(UNSIGNED, OFFSETS, work, panel); }
PANELS_FUNCTION(signed_codes, 0, 0)
PANELS_FUNCTION(signed_codes_and_offsets, 0, 1)
PANELS_FUNCTION(unsigned_codes, 1, 0)
PANELS_FUNCTION(unsigned_codes_and_offsets, 1, 1)
#define UNPACK_FUNCTION(BITS) TARGET static void unpack_##BITS(struct tiled_piece *work, int zero) { unpack(BITS, work, zero); }
UNPACK_FUNCTION(4)
UNPACK_FUNCTION(5)
UNPACK_FUNCTION(6)
UNPACK_FUNCTION(8)

/* Whether the codes less their zero fit into signed bytes. Other zeros are multiplied with the sums of x and subtracted. */
INLINE int fits_signed(const struct quantized_format *f) {
    return !f->has_zeros && f->zero <= 128 && (1 << f->bits) - 1 - f->zero <= 127;
}

INLINE void multiply_on_tiles(const enum dtype dtype, const struct linear_call *call, size_t task, float *sums) {
    const struct quantized_format *f = call->format;
    const struct linear_task part = linear_task(call, task);
    const size_t rows = part.end - part.row, blocks = call->k / f->block;
    if (rows < TILE_ROWS || blocks == 0) {
        quantized_avx512_vnni.linear[dtype](call, task, sums);
        return;
    }
    const int fits = fits_signed(f), offsets = f->offsets != NUMBER_NONE;
    const panels_function multiply = fits ? offsets ? signed_codes_and_offsets : signed_codes
                                          : offsets ? unsigned_codes_and_offsets : unsigned_codes;
    const unpack_function unpack_codes = f->bits == 4 ? unpack_4 : f->bits == 5 ? unpack_5 : f->bits == 6 ? unpack_6 : unpack_8;
    const char *x = (const char *)call->x + part.row * call->x_stride;
    /* Pieces of equal length, in whole chunks. */
    const size_t pieces = (blocks + TILED_BLOCKS - 1) / TILED_BLOCKS;
    const size_t depth = ((blocks + pieces - 1) / pieces + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS * CHUNK_BLOCKS;
    struct tiled_piece work;
    work.format = f;
    work.ldx = call->x_stride;
    work.rows = rows;
    work.c = sums;
    for (size_t group = part.group; group < part.group_end; group++) {
        const uint8_t *columns = (const uint8_t *)call->packed + group * quantized_columns_bytes(f, call->k);
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, dtype, group);
        memset(sums, 0, rows * GROUP_COLUMNS * sizeof *sums);
        for (size_t from = 0, to; from < blocks; from = to) {
            to = blocks - from < depth ? blocks : from + depth;
            open_piece(f, offsets ? WIDENED_OFFSETS : WIDENED, columns, from, to, &work.piece);
            work.x = x + from * quantized_block_bytes(f);
            unpack_codes(&work, fits ? f->zero : 0);
            WRITTEN(&work);
            for (size_t panel = 0; panel < GROUP_PANELS; panel += PANELS) multiply(&work, panel);
        }
        add_adapters(dtype, call, group, part.row, rows, sums);
        store_sums(&epilogue, call->out, part.row, rows, sums);
    }
    _tile_release();
}

TARGET static void quantized_linear_float32(const void *job, size_t task, void *scratch) {
    multiply_on_tiles(DTYPE_FLOAT32, job, task, scratch);
}
TARGET static void quantized_linear_bfloat16(const void *job, size_t task, void *scratch) {
    multiply_on_tiles(DTYPE_BFLOAT16, job, task, scratch);
}
static void quantize_float32(const void *job, size_t task, void *scratch) {
    quantized_avx512_vnni.quantize[DTYPE_FLOAT32](job, task, scratch);
}
static void quantize_bfloat16(const void *job, size_t task, void *scratch) {
    quantized_avx512_vnni.quantize[DTYPE_BFLOAT16](job, task, scratch);
}

/* Whoever asks has isa_amx_bf16, which is supported only where these are. */
static int supported(void) { return 1; }

const struct quantized_kernels quantized_amx_int8 = {
    supported, NULL, {quantized_linear_float32, quantized_linear_bfloat16}, {quantize_float32, quantize_bfloat16}, TILE_ROWS};
#endif
