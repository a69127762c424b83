/* bfloat16 products on AMX tiles; everything else as on AVX-512.
 *
 * tdpbf16ps sums 32 elements of k at once: the even and the odd ones in a chain each from zero, then the two added to the
 * output's sum. So these bits differ from the other paths', but the order is again fixed for each output alone.
 */
#if defined(__x86_64__) && defined(__linux__)
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "kernels.h"
#include "vector_avx512.h"

#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linear_store.inc.h"

enum { TILE_ROWS = 16, BLOCK_ROWS = 2 * TILE_ROWS, TILE_K = BF16_K_MULTIPLE, TILE_ELEMENTS = TILE_K * LANES };

/* Tile registers: 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* For a block of up to TILE_ROWS rows all sums belong to tile 4, else 0 and 1 to the first 16 rows and 2 and 3 to the rest. */
INLINE void configure(size_t block) {
    uint8_t first = (uint8_t)(block < TILE_ROWS ? block : TILE_ROWS);
    uint8_t second = (uint8_t)(block > TILE_ROWS ? block - TILE_ROWS : first);
    struct tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    const uint8_t rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = rows[i];
        config.row_bytes[i] = 64;
    }
    _tile_loadconfig(&config);
}

/* up to 16 rows with four panels */
TARGET static void multiply_wide(const uint16_t *x, size_t ldx, const uint16_t *w, size_t panel_stride, size_t steps, float *c) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t step = 0; step < steps; step++, x += TILE_K, w += TILE_ELEMENTS) {
        for (size_t panel = 0; panel < GROUP_PANELS; panel++)
            for (size_t line = 0; line < TILE_ELEMENTS; line += 32)
                __builtin_prefetch(w + panel * panel_stride + 2 * TILE_ELEMENTS + line);
        _tile_loadd(4, x, ldx * 2);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + panel_stride, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, w + 2 * panel_stride, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, w + 3 * panel_stride, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, GROUP_COLUMNS * 4);
    _tile_stored(1, c + LANES, GROUP_COLUMNS * 4);
    _tile_stored(2, c + 2 * LANES, GROUP_COLUMNS * 4);
    _tile_stored(3, c + 3 * LANES, GROUP_COLUMNS * 4);
}

/* 17 to 32 rows with two panels */
TARGET static void multiply_tall(const uint16_t *x, size_t ldx, const uint16_t *w, size_t panel_stride, size_t steps, float *c) {
    const uint16_t *below = x + TILE_ROWS * ldx;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t step = 0; step < steps; step++, x += TILE_K, below += TILE_K, w += TILE_ELEMENTS) {
        _tile_loadd(4, x, ldx * 2);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + panel_stride, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below, ldx * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, GROUP_COLUMNS * 4);
    _tile_stored(1, c + LANES, GROUP_COLUMNS * 4);
    _tile_stored(2, c + TILE_ROWS * GROUP_COLUMNS, GROUP_COLUMNS * 4);
    _tile_stored(3, c + TILE_ROWS * GROUP_COLUMNS + LANES, GROUP_COLUMNS * 4);
}

TARGET static void linear_bfloat16(const void *job, size_t task, void *scratch) {
    const struct linear_call *call = job;
    struct linear_task part = linear_task(call, task);
    const uint16_t *w = (const uint16_t *)call->packed + part.column * call->k;
    size_t panel_stride = call->k * LANES, steps = call->k / TILE_K, configured = 0;
    float *c = scratch;
    struct epilogue epilogue;
    open_epilogue(&epilogue, call, DTYPE_BFLOAT16, part.column);
    for (size_t row = part.row; row < part.end;) {
        size_t block = part.end - row < BLOCK_ROWS ? part.end - row : BLOCK_ROWS;
        const uint16_t *x = (const uint16_t *)call->x + row * call->k;
        if (block != configured) configure(configured = block);
        if (block <= TILE_ROWS) {
            multiply_wide(x, call->k, w, panel_stride, steps, c);
        } else {
            multiply_tall(x, call->k, w, panel_stride, steps, c);
            multiply_tall(x, call->k, w + 2 * panel_stride, panel_stride, steps, c + 2 * LANES);
        }
        store_bfloat16(&epilogue, (uint16_t *)call->out + row * call->n + part.column, call->n, block, c);
        row += block;
    }
    _tile_release();
}

/* Linux hands the tiles out on request only, once for the process. */
static int supported(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!isa_avx512.supported() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0; /* AMX-BF16, AMX-TILE */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

const struct isa isa_amx_bf16 = {
    "amx_bf16", supported, {avx512_linear_float32, linear_bfloat16}, {avx512_attention_float32, avx512_attention_bfloat16}, BLOCK_ROWS};
#endif
