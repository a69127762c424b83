/* Kernels for AMX: bfloat16 products on tiles, float32 products on AVX-512 vectors. amx_int8.c has those of quantized weights.
 *
 * tdpbf16ps sums 32 elements of k at once: the even and the odd elements in one chain each, which begin at zero, and then adds
 * both to the output's sum. So the bits differ from those of the other paths, but the order is fixed for each output here, too.
 *
 * In attention a probability is passed as the sum of two bfloat16, which keeps 16 of its 24 bits.
 */
#if defined(__x86_64__) && defined(__linux__)
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define ROUND_BF16
#include "vector_avx512.h"
#include "amx_tiles.h"
#include "quantized.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WIDE_PANELS 4
#define WIDE_ROWS 6
#define WIDE_CASES(F) F(1) F(2) F(3) F(4) F(5) F(6)
#define TALL_PANELS 2
#define TALL_ROWS 12
#define TALL_CASES(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12)
#include "functions.inc.h"
#include "rows.inc.h"
#include "streams.inc.h"
#include "mixture.inc.h"
#include "states.inc.h"
#include "product_float32.inc.h"
#include "adapters.inc.h"
#include "linear_float32.inc.h"

typedef uint32_t bf16_row;
enum { ROW_ITEMS_PER_PAIR = 1, QUERY_MULTIPLE = BF16_K_MULTIPLE };
enum { TILE_ROWS = 16, BLOCK_ROWS = 2 * TILE_ROWS, TILE_K = BF16_K_MULTIPLE, STEP_PAIRS = TILE_K / 2 };
enum { TILE_ELEMENTS = TILE_K * LANES, STEP_ELEMENTS = GROUP_PANELS * TILE_ELEMENTS };
/* The weights of this many k stay in the first-level cache while rows are multiplied with them. */
enum { CACHED_K = 256 };

/* Tile registers 0 to 3 have sums, 4 and 5 rows of x, and 6 and 7 weights. `configured`: the number of rows for which this thread's
 * are configured; 0: the tiles are released. */
static _Thread_local size_t configured;

/* In a block of up to TILE_ROWS rows all sums are of the rows in tile 4; otherwise sums 0 and 1 are of the first 16 rows, and 2
 * and 3 of the rest. */
TARGET static void configure(size_t block) {
    if (configured == block) return;
    uint8_t first = (uint8_t)(block < TILE_ROWS ? block : TILE_ROWS);
    uint8_t second = (uint8_t)(block > TILE_ROWS ? block - TILE_ROWS : first);
    struct tile_config config = {.palette = 1, .rows = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS},
                                 .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}};
    WRITTEN(&config);
    _tile_loadconfig(&config);
    configured = block;
}

TARGET static void release(void) {
    _tile_release();
    configured = 0;
}

/* The factors of one product. In each repeat x continues and the weights begin again. Strides in elements; step_stride: from one
 * tile of the weights to the next along k. */
struct factors {
    const uint16_t *x, *w;
    size_t ldx, panel_stride, step_stride, steps, repeats;
};

#define LOAD_SUMS(c1, c2, c3)                    \
    do {                                         \
        if (accumulate) {                        \
            _tile_loadd(0, c, ldc * 4);          \
            _tile_loadd(1, (c1), ldc * 4);       \
            _tile_loadd(2, (c2), ldc * 4);       \
            _tile_loadd(3, (c3), ldc * 4);       \
        } else {                                 \
            _tile_zero(0);                       \
            _tile_zero(1);                       \
            _tile_zero(2);                       \
            _tile_zero(3);                       \
        }                                        \
    } while (0)

#define STORE_SUMS(c1, c2, c3)          \
    do {                                \
        _tile_stored(0, c, ldc * 4);    \
        _tile_stored(1, (c1), ldc * 4); \
        _tile_stored(2, (c2), ldc * 4); \
        _tile_stored(3, (c3), ldc * 4); \
    } while (0)

/* Prefetches the weights of all four panels one step ahead, where they are read from memory. */
INLINE void prefetch_step(const uint16_t *w) {
    for (size_t line = 0; line < STEP_ELEMENTS; line += 32) __builtin_prefetch(w + STEP_ELEMENTS + line);
}

/* Multiplies up to 16 rows with four panels. */
INLINE void multiply_wide(const struct factors *f, float *c, size_t ldc, const int accumulate, const int streams) {
    const uint16_t *x = f->x;
    LOAD_SUMS(c + LANES, c + 2 * LANES, c + 3 * LANES);
    for (size_t repeat = 0; repeat < f->repeats; repeat++) {
        const uint16_t *w = f->w;
        for (size_t step = 0; step < f->steps; step++, x += TILE_K, w += f->step_stride) {
            if (streams) prefetch_step(w);
            _tile_loadd(4, x, f->ldx * 2);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + f->panel_stride, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, w + 2 * f->panel_stride, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w + 3 * f->panel_stride, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    STORE_SUMS(c + LANES, c + 2 * LANES, c + 3 * LANES);
}

/* Multiplies 17 to 32 rows with two panels. */
INLINE void multiply_tall(const struct factors *f, float *c, size_t ldc, const int accumulate) {
    const uint16_t *x = f->x, *below = x + TILE_ROWS * f->ldx;
    float *under = c + TILE_ROWS * ldc;
    LOAD_SUMS(c + LANES, under, under + LANES);
    for (size_t repeat = 0; repeat < f->repeats; repeat++) {
        const uint16_t *w = f->w;
        for (size_t step = 0; step < f->steps; step++, x += TILE_K, below += TILE_K, w += f->step_stride) {
            _tile_loadd(4, x, f->ldx * 2);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + f->panel_stride, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, below, f->ldx * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    STORE_SUMS(c + LANES, under, under + LANES);
}

/* Multiplies any number of rows; panels is a multiple of GROUP_PANELS. */
INLINE void multiply(size_t rows, size_t panels, struct factors f, float *c, size_t ldc, const int accumulate) {
    const uint16_t *w = f.w;
    WRITTEN(f.x);
    WRITTEN(w);
    WRITTEN(c);
    for (size_t row = 0; row < rows; row += BLOCK_ROWS, f.x += BLOCK_ROWS * f.ldx, c += BLOCK_ROWS * ldc) {
        size_t block = rows - row < BLOCK_ROWS ? rows - row : BLOCK_ROWS, step = block <= TILE_ROWS ? 4 : 2;
        configure(block);
        for (size_t panel = 0; panel < panels; panel += step) {
            f.w = w + panel * f.panel_stride;
            if (block <= TILE_ROWS)
                multiply_wide(&f, c + panel * LANES, ldc, accumulate, 0);
            else
                multiply_tall(&f, c + panel * LANES, ldc, accumulate);
        }
    }
    WRITTEN(c);
}

/* Computes the sums of up to TILE_ROWS rows; the weights are read once, from memory. */
TARGET static void stream_sums(size_t rows, struct factors f, float *c) {
    WRITTEN(f.x);
    configure(rows);
    multiply_wide(&f, c, GROUP_COLUMNS, 0, 1);
    WRITTEN(c);
}

/* Prefetches one of several parts of the next piece of the weights into the second-level cache. */
INLINE void prefetch_share(const uint16_t *next, size_t elements, size_t part, size_t parts) {
    size_t lines = elements / 32;
    for (size_t line = lines * part / parts; line < lines * (part + 1) / parts; line++) __builtin_prefetch(next + line * 32, 0, 2);
}

/* Computes one piece of k for many rows: two panels of weights stay in the first-level cache while all rows are multiplied with
 * them, and the next piece is prefetched meanwhile. */
INLINE void multiply_piece(size_t rows, struct factors f, float *c, const int accumulate) {
    if (rows <= FEW_ROWS) { /* memory is slower than the products: all four panels at once, read in order */
        WRITTEN(f.x);
        for (size_t row = 0; row < rows; row += TILE_ROWS, f.x += TILE_ROWS * f.ldx, c += TILE_ROWS * GROUP_COLUMNS) {
            configure(rows - row < TILE_ROWS ? rows - row : TILE_ROWS);
            multiply_wide(&f, c, GROUP_COLUMNS, accumulate, row == 0);
        }
        WRITTEN(c);
        return;
    }
    const uint16_t *x = f.x, *w = f.w, *next = w + f.steps * STEP_ELEMENTS;
    size_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    WRITTEN(x);
    WRITTEN(c);
    for (size_t panel = 0; panel < GROUP_PANELS; panel += 2) {
        f.w = w + panel * f.panel_stride;
        for (size_t block = 0; block < blocks; block++) {
            size_t row = block * BLOCK_ROWS, count = rows - row < BLOCK_ROWS ? rows - row : BLOCK_ROWS;
            prefetch_share(next, f.steps * STEP_ELEMENTS, panel / 2 * blocks + block, 2 * blocks);
            f.x = x + row * f.ldx;
            configure(count);
            if (count > TILE_ROWS)
                multiply_tall(&f, c + row * GROUP_COLUMNS + panel * LANES, GROUP_COLUMNS, accumulate);
            else if (panel == 0)
                multiply_wide(&f, c + row * GROUP_COLUMNS, GROUP_COLUMNS, accumulate, 0);
        }
    }
    WRITTEN(c);
}

TARGET static void start_sums(size_t rows, struct factors f, float *c) { multiply_piece(rows, f, c, 0); }
TARGET static void continue_sums(size_t rows, struct factors f, float *c) { multiply_piece(rows, f, c, 1); }

/* Computes a piece of k for all groups of a task before the next piece, so that all groups but the first read the piece of x
 * from the second-level cache. */
TARGET static void linear_bfloat16(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    const uint16_t *x = (const uint16_t *)call->x + part.row * call->x_stride, *w = call->packed;
    size_t rows = part.end - part.row, pieces = rows <= TILE_ROWS || call->k == 0 ? 1 : (call->k + CACHED_K - 1) / CACHED_K;
    size_t depth = (call->k / TILE_K + pieces - 1) / pieces * TILE_K, from = 0;
    float *sums = scratch;
    do {
        size_t count = call->k - from < depth ? call->k - from : depth;
        for (size_t group = part.group; group < part.group_end; group++) {
            struct factors f = {.x = x + from, .w = w + (group * call->k + from) * GROUP_COLUMNS, .ldx = call->x_stride,
                                .panel_stride = TILE_ELEMENTS, .step_stride = STEP_ELEMENTS, .steps = count / TILE_K, .repeats = 1};
            float *c = sums + (group - part.group) * rows * GROUP_COLUMNS;
            if (rows <= TILE_ROWS)
                stream_sums(rows, f, c);
            else if (from == 0)
                start_sums(rows, f, c);
            else
                continue_sums(rows, f, c);
        }
        from += depth;
    } while (from < call->k);
    release();
    for (size_t group = part.group; group < part.group_end; group++, sums += rows * GROUP_COLUMNS) {
        struct epilogue epilogue;
        open_epilogue(&epilogue, call, DTYPE_BFLOAT16, group);
        add_adapters(DTYPE_BFLOAT16, call, group, part.row, rows, sums);
        store_sums(&epilogue, call->out, part.row, rows, sums);
    }
}

/* sums[rows][64] (+)= a piece of x times a piece of k of one group's weights, which a cache holds. */
INLINE void multiply_pairs(size_t rows, const uint16_t *x, size_t x_stride, const uint16_t *w, size_t pairs, float *sums,
                           bf16_row *room, int accumulate) {
    struct factors f = {.x = x, .w = w, .ldx = x_stride, .panel_stride = TILE_ELEMENTS, .step_stride = STEP_ELEMENTS,
                        .steps = 2 * pairs / TILE_K, .repeats = 1};
    (void)room;
    multiply(rows, GROUP_PANELS, f, sums, GROUP_COLUMNS, accumulate);
}

#include "linear_float8.inc.h"

TARGET static void linear_float8_and_release(const void *job, size_t task, void *scratch) {
    linear_float8_bfloat16(job, task, scratch);
    release();
}

INLINE void widen_row(bf16_row *row, const uint16_t *x, size_t k) { memcpy(row, x, k * 2); }

TARGET static void product_bfloat16(size_t rows, size_t panels, const bf16_row *x, size_t ldx, const uint16_t *w,
                                    size_t panel_stride, size_t pair_stride, size_t pairs, float *c, size_t ldc, int accumulate) {
    struct factors f = {.x = (const uint16_t *)x, .w = w, .ldx = 2 * ldx, .panel_stride = panel_stride,
                        .step_stride = pair_stride * TILE_K / 2, .steps = pairs * 2 / TILE_K, .repeats = 1};
    (void)accumulate; /* only attention's scores are computed here, and they begin at zero */
    multiply(rows, panels, f, c, ldc, 0);
}

/* Stores 16 probabilities from a key on: their upper 16 bits, and KEY_TILE elements further the rest, rounded to bfloat16. */
INLINE void store_probabilities(v16 p, uint16_t *row, size_t key) {
    uint16_t *halves = row + key;
    __m512i bits = _mm512_castps_si512(p);
    v16 upper = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xFFFF0000u)));
    _mm256_storeu_si256((__m256i *)halves, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    v_store_bf16(halves + KEY_TILE, v_sub(p, upper));
}

INLINE void product_pairs(size_t rows, size_t panels, const uint16_t *probabilities, const uint16_t *pairs, float *c, size_t ldc) {
    struct factors f = {.x = probabilities, .w = pairs, .ldx = 2 * KEY_TILE, .panel_stride = KEY_TILE * LANES,
                        .step_stride = TILE_ELEMENTS, .steps = KEY_TILE / TILE_K, .repeats = 2};
    multiply(rows, panels, f, c, ldc, 1);
}

#define FEW_SCORES "few_scores_amx.inc.h"
#include "attention.inc.h"

TARGET static void attention_bfloat16_and_release(const void *job, size_t task, void *scratch) {
    attention_bfloat16(job, task, scratch);
    release();
}

TARGET static void shared_attention_bfloat16_and_release(const void *job, size_t task, void *scratch) {
    shared_attention_bfloat16(job, task, scratch);
    release();
}

TARGET static void select_keys_bfloat16_and_release(const void *job, size_t task, void *scratch) {
    select_keys_bfloat16(job, task, scratch);
    release();
}

/* Linux lets a process use the tiles only after it has requested permission. */
static int supported(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!isa_avx512_bf16.supported() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return 0; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    if (!quantized_avx512_vnni.supported()) return 0;                 /* used beside AMX-INT8 */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

const struct isa isa_amx_bf16 = {
    "amx_bf16", supported, {linear_float32, linear_bfloat16}, {linear_float8_float32, linear_float8_and_release},
    {attention_float32, attention_bfloat16_and_release}, {shared_attention_float32, shared_attention_bfloat16_and_release},
    {select_keys_float32, select_keys_bfloat16_and_release},
    {rms_norm_float32, rms_norm_bfloat16}, {rotate_float32, rotate_bfloat16}, {shrink_float32, shrink_bfloat16},
    {convolve_float32, convolve_bfloat16}, {recur_float32, recur_bfloat16}, {gate_float32, gate_bfloat16}, {multiply_float32, multiply_bfloat16},
    {route_float32, route_bfloat16}, {sum_experts_float32, sum_experts_bfloat16}, {clamped_gate_float32, clamped_gate_bfloat16},
    {activate_float32, activate_bfloat16}, {add_float32, add_bfloat16}, {streams_float32, streams_bfloat16},
    {resize_float32, resize_bfloat16}, {sparse_gate_float32, sparse_gate_bfloat16}, STEP_PAIRS, BLOCK_ROWS, 512, 1,
    &quantized_amx_int8};
#endif
